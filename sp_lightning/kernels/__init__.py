"""Kernels for the CPU: the update of a layer, and norms of gradients, in a single pass over memory each.

It enters at two interfaces of the core, ``device.host_kernels.HostKernels`` and ``updates.gpu_bits.GpuBits``, and needs llvmlite
(``pip install llvmlite``). Without either, torch's operators do the same with more passes, and steps have the CPU's last bits.

``host`` and ``like_gpu`` are the two entries. ``variants`` describes kernels, ``ir`` and ``gpu_ir`` write them in LLVM's
assembly, and ``jit`` compiles them for this processor and runs them on torch's threads. A kernel is used only if it has torch's
bits: ``update`` and ``norms`` compare it with torch's operators on the CPU, ``gpu`` and ``gpu_norms`` with those on this GPU.
``step_like`` updates one parameter with the bits of the GPU.
"""
