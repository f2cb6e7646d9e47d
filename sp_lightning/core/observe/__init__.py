"""Reports of a run: the count of activations, and messages.

- ``activations``: counts the activations that autograd holds on a CPU.
- ``messages``: notes that are added to errors, and errors that replace unclear ones of torch's.

This folder may import ``device``, ``model`` and ``plan``.
"""
