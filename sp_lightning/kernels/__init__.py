"""Kernels of our own for the host: the update of a layer, and norms of gradients, in one walk over memory each.

An optional extra (``pip install llvmlite``): what is to be made (``variants``), llvmlite writes (``ir``) and
compiles for this processor, and torch's own threads run it (``jit``). Each has torch's bits, or is not used: ``update`` compares
it with torch's operator when it is compiled. ``gpu``, ``gpu_ir`` and ``gpu_norms`` have the bits of torch's operators on a GPU.
Imports ``device``; what comes in are the arguments of torch's fused operators.
"""
