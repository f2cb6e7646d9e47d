"""Store: memory on the host. The authoritative copy of all weights is here.

- ``block``: one layer's weights in one flat, pinned block, whose views are the user's parameters; ``block_memory``: the memory
  under it, of this process alone or of all ranks, and what the layer's gradients arrive in.
- ``direct_file``: reads and writes of files past the page cache, scratch files among them; ``away``: the stand-ins that users
  find for what is there.
- ``mapped_file``: memory that is mapped from a scratch file of its own, for trained weights and gradients.
- ``weights_in_files``: weights in the user's own files, found and read, and a layer that has some there: user code keeps the
  mapping that it has, and what it writes there is seen in the system's table of pages.

The model's parameters come in and are absorbed layer by layer. Flat bytes that a transfer reads or writes go out. The wing
may import ``plan``, ``model`` and ``device``.
"""
