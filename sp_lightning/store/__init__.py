"""Store: memory on the host. The authoritative copy of all weights is here.

``block`` holds one layer's weights in one flat, pinned block, whose views are the user's parameters; ``block_memory`` is the
memory under it, of this process alone or of all ranks. ``gradient_memory`` is
what the layer's gradients arrive in. ``host_ring`` is the pinned memory that offloaded activations use again and again.
``direct_file`` reads and writes files past the page cache, ``scratch`` is one below the host's memory, and ``staging_ring`` what bytes pass through on their way there.
``away`` are the stand-ins that users find for what is there. ``mapped_file`` is memory that is mapped from
a file of its own, for trained weights and gradients.
``file_block`` is a layer of which some weights are in the user's own files, which ``weights_in_files`` finds and reads.

The model's parameters come in and are absorbed layer by layer. Flat bytes that a transfer reads or writes go out. The wing
may import ``plan``, ``model`` and ``device``.
"""
