"""Optim: the optimizer's steps on the host, whole or layer by layer.

``background`` runs updates of layers while the next forward, or the rest of backward, goes on; ``layerwise`` takes a fused
step apart for it; ``fused`` switches torch's fused kernels on while a step lasts, and has the gradient scaler of the host.

Comes in: the user's optimizer, and the layers (``weights``). Goes out: updated weights on the host; who reads them waits. It may
import ``weights`` and the wings below; the engine above is known as the protocol ``Updatable``, and where an optimizer's
state lies as ``OptimizerState``.
"""
