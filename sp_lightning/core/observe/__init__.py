"""Reports of a run: the count of activations.

- ``activations``: counts the activations that autograd holds on a CPU.

This folder may import ``device``, ``model`` and ``plan``.
"""
