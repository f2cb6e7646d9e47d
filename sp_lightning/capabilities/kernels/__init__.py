"""Kernels for the CPU: the update of a layer, and norms of gradients, in a single pass over memory each.

This folder implements two interfaces of the core, ``device.host_kernels.HostKernels`` and ``updates.gpu_bits.GpuBits``. It needs
llvmlite (``pip install llvmlite``). Without this folder or without llvmlite, torch's operators do the same work with more passes
over memory, and optimizer steps on the CPU have the CPU's last bits.

``registry`` makes the first of ``update`` and ``norms``; ``like_gpu`` implements the second. ``variants`` describes kernels,
``ir`` and ``gpu_ir`` write them in LLVM's assembly, and ``jit`` compiles them for this processor and runs them on torch's
threads. A kernel is used only if its results are bit-identical to torch's: ``update`` and ``norms`` compare them with torch's
operators on the CPU, ``gpu`` and ``gpu_norms`` with torch's operators on this GPU.
``step_like`` updates one parameter on the CPU; the result is bit-identical to that of a step on the GPU.
"""
