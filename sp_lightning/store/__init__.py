"""Store: memory on the host. The authoritative weights are here.

``block`` holds one layer's weights in one flat pinned block, whose views are the user's parameters, and the memory that its
gradients land in; ``host_ring`` is pinned memory that offloaded activations use again and again.

Comes in: the model's parameters, which are absorbed layer by layer. Goes out: flat bytes that a transfer reads or writes. It may
import ``plan``, ``model`` and ``device``.
"""
