"""Compiles the text of a kernel for this processor, and runs it on torch's threads."""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import sys
import threading
from collections.abc import Callable, Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from sp_lightning.capabilities.kernels.variants import GpuNormRecipe, GpuRecipe, Variant

R = TypeVar("R")
LOG = logging.getLogger("lightning.pytorch.superpipeline")
_lock = threading.Lock()  # LLVM's state belongs to the process, so one thread compiles at a time
_engines: list[Any] = []
"""LLVM's engines. They own the machine code of all kernels, which is never freed."""


class Compiled:
    """A compiled kernel.

    Args:
        text: LLVM's assembly of a function ``void run(i64 begin, i64 end, ptr arguments)``.

    Raises:
        ImportError: llvmlite is missing.
        RuntimeError, OSError: this system or this llvmlite cannot compile the kernel, or cannot run new machine code.
    """

    def __init__(self, text: str) -> None:
        import llvmlite.binding as llvm

        _refuse_if_hardened()
        with _lock:
            llvm.initialize_native_target()
            llvm.initialize_native_asmprinter()
            module = llvm.parse_assembly(text)
            module.verify()
            passes = llvm.create_pass_builder(_machine(llvm), llvm.create_pipeline_tuning_options(speed_level=2))
            passes.getModulePassManager().run(module, passes)
            engine = llvm.create_mcjit_compiler(module, _machine(llvm))  # another one: the engine owns its machine
            engine.finalize_object()
            _engines.append(engine)
            self._address = engine.get_function_address("run")
        self._parallel_for = _find_parallel_for()

    def run(self, count: int, least: int, arguments: ctypes.Structure) -> None:
        """Runs the kernel on torch's threads, without the interpreter's lock.

        Args:
            count: the number of items.
            least: the least number of items of a thread.
            arguments: the arguments for which the kernel was written. Their addresses must be valid during the call.
        """
        failed = self._parallel_for(0, count, least, self._address, ctypes.addressof(arguments))
        assert not failed, "a kernel raises nothing"


def address(tensor: Tensor, what: str) -> int:
    """Returns the address of a tensor for a kernel, which reads and writes host memory without looking at the tensor's device.

    Args:
        tensor: the tensor.
        what: its name, for the message of the assertion that it is on the host.
    """
    assert tensor.is_cpu, f"A kernel for the CPU got a {what} of shape {tuple(tensor.shape)} on {tensor.device}."
    return tensor.data_ptr()


def is_installed() -> bool:
    """Returns True if llvmlite is installed. It may still fail to compile a kernel."""
    return find_spec("llvmlite") is not None


def find_kernel(
    what: Variant | torch.dtype,
    recipes: Iterable[R],
    agrees: Callable[[Compiled, R], bool],
) -> tuple[Compiled, R] | None:
    """Returns the first kernel that has torch's bits, with its recipe; None if no kernel has them, or if an error occurs.

    Logs at DEBUG whether a kernel is used, and why not.

    Args:
        what: an update, or the dtype of gradients whose norms are computed.
        recipes: how torch's operators may have been compiled, the likeliest first.
        agrees: returns True if a kernel and torch's operators compute the same bits.
    """
    try:
        from sp_lightning.capabilities.kernels import gpu_ir, ir  # both import llvmlite

        for recipe in recipes:
            write: Callable[..., str] = gpu_ir.text if isinstance(recipe, (GpuRecipe, GpuNormRecipe)) else ir.text
            if agrees(kernel := Compiled(write(what, recipe)), recipe):
                LOG.debug("Superpipeline: a kernel is used for %s.", what)
                return kernel, recipe
        why = "kernels differ from torch's operators"
    except Exception as error:  # a broken llvmlite, or one of another version, may raise anything
        why = f"no kernel can be compiled, which pip install llvmlite may mend: {error}"
    LOG.debug("Superpipeline: torch's operators are used for %s: %s.", what, why)
    return None


def _refuse_if_hardened() -> None:
    """Raises an OSError if this system does not let written memory become executable: LLVM would end the process then."""
    if sys.platform == "win32":
        return
    memory = mmap.mmap(-1, mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    libc, begin = ctypes.CDLL(None, use_errno=True), ctypes.c_char.from_buffer(memory)
    address = ctypes.c_void_p(ctypes.addressof(begin))
    if libc.mprotect(address, ctypes.c_size_t(mmap.PAGESIZE), mmap.PROT_READ | mmap.PROT_EXEC):
        raise OSError(ctypes.get_errno(), "memory cannot be made executable")


def _machine(llvm: Any) -> Any:
    """Returns a new target machine for this processor with all its features. The caller owns the machine."""
    features = llvm.get_host_cpu_features().flatten()
    target = llvm.Target.from_default_triple()
    return target.create_target_machine(cpu=llvm.get_host_cpu_name(), features=features, opt=3, jit=True)


def _find_parallel_for() -> Any:
    """Returns ``torch_parallel_for``, which torch exports for C since 2.10. It uses at most ``torch.get_num_threads()`` threads.

    Raises:
        OSError, AttributeError: torch's library was not found, or has no such function.
    """
    names = {"win32": "torch_cpu.dll", "darwin": "libtorch_cpu.dylib"}
    library = Path(torch.__file__).parent / "lib" / names.get(sys.platform, "libtorch_cpu.so")
    found = ctypes.CDLL(os.fspath(library)).torch_parallel_for
    found.argtypes, found.restype = [ctypes.c_int64] * 3 + [ctypes.c_void_p] * 2, ctypes.c_int32
    return found
