"""Sizes of torch's ``foreach`` operators on a GPU (``MultiTensorApply.cuh``, ``block_reduce.cuh``)."""

CHUNK = 65536
"""Elements that a block of threads takes of a tensor."""
THREADS = 512
"""Threads of a block."""
EACH = 4
"""Elements that a thread takes at a time."""
WARP = 32
"""Threads that add up together."""
