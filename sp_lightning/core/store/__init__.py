"""The host store: the authoritative copy of all weights, in host memory.

- ``block``: the weights of one layer in one flat, pinned block. The user's parameters are views of it.
- ``block_memory``: the memory of a block, and of the gradients of a layer.
- ``absent_tensor``: the base class of tensors whose values are not in host memory.

To *absorb* a parameter is to copy its value to its place in a block, and to make the parameter a view of that place. The store
absorbs the model's parameters layer by layer at set-up. Uploads read the blocks, and downloads and optimizers write them.
This folder may import ``plan``, ``model`` and the folders below them.
"""
