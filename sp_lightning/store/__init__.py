"""The host store: the authoritative copy of all weights, in host memory.

- ``block``: the weights of one layer in one flat, pinned block. The user's parameters are views of it.
- ``block_memory``: the memory of a block, and of the gradients of a layer.
- ``absent_tensor``: the base class of tensors whose values are not in host memory.

In come the model's parameters, which are absorbed layer by layer. Out goes flat memory, which uploads read and downloads write.
This folder may import ``plan``, ``model``, ``observe`` and the folders below them.
"""
