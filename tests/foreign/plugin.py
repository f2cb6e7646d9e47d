"""A pytest plugin: tests run on an accelerator of another package, in the place of the CPU or of CUDA.

``pytest -p tests.foreign.plugin tests/gpu tests/equality/test_programs.py``. The README of this folder says how to build it.

- Trainers for ``"cpu"`` or ``"gpu"`` get :class:`OtherAccelerator`. Plain Lightning for ``"cpu"`` steps its optimizers on the CPU
  there (``StepsOnHost``), as the strategy does.
- Files that speak of CUDA are read with the other device's name.
- Numbers are compared on the CPU. Where plain Lightning cannot run a program on the device, its test is skipped.
- Loops without a Trainer are written for the CPU: their modules take their inputs to the device, in streams and with Fabric.
- A test that brings a simulated device of its own is skipped. Variants of programs that ask for one run without.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
from contextlib import nullcontext
from functools import partial
from types import CodeType, SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import optimizer
from torch.utils import _foreach_utils
from torch.utils._pytree import tree_map

PACKAGE = "torch_mcpu"
KIND = "mcpu"
MISSING = f"{PACKAGE} is not installed: see tests/foreign/README.md"
IS_THERE = importlib.util.find_spec(PACKAGE) is not None
LIBRARY = torch.library.Library("aten", "IMPL")  # it stays for the process
STEPS_THERE: list[bool] = []
"""Not empty while a reference run steps its optimizers on the device."""
OF_CUDA = ("tests.gpu.", "tests.equality.test_equality", "tests.support.gpu_reference", "tests.support.wait_scenarios")


class OtherAccelerator(Accelerator):
    """The accelerator that torch has found, for Lightning."""

    def setup_device(self, device: torch.device) -> None:
        torch.accelerator.set_device_index(device.index)

    def teardown(self) -> None:
        torch.accelerator.empty_cache()

    def get_device_stats(self, device: Any) -> dict[str, Any]:
        return dict(torch.accelerator.memory_stats(device))

    @staticmethod
    def parse_devices(devices: Any) -> list[int]:
        return list(range(devices)) if isinstance(devices, int) else [int(each) for each in devices]

    @staticmethod
    def get_parallel_devices(devices: list[int]) -> list[torch.device]:
        kind: Any = torch.accelerator.current_accelerator()
        return [torch.device(kind.type, index) for index in devices]

    @staticmethod
    def auto_device_count() -> int:
        return torch.accelerator.device_count()

    @staticmethod
    def is_available() -> bool:
        return torch.accelerator.is_available()

    @staticmethod
    def name() -> str:
        return str(torch.accelerator.current_accelerator())


class Renamed(importlib.machinery.SourceFileLoader):
    """Reads a file with the other device's name in the place of CUDA's."""

    def get_code(self, fullname: str) -> CodeType:
        text = self.get_data(self.path).decode().replace("torch.cuda", f"torch.{KIND}").replace('"cuda"', f'"{KIND}"')
        text = text.replace(".cuda()", f'.to("{KIND}")').replace('"cuda:0"', f'"{KIND}:0"')
        # Where updates may overlap, "auto" steps by layers, which these tests do not expect of a CPU.
        text = text.replace("assert bool(layers) == apart", "assert layers is not None")
        return compile(text, self.path, "exec", dont_inherit=True)


class Finder:
    """Finds the files that speak of CUDA."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> Any:
        if not name.startswith(OF_CUDA):
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is not None and spec.origin is not None and spec.submodule_search_locations is None:
            spec.loader = Renamed(name, spec.origin)
        return spec


def keeping_parameters(move: Any, *args: Any, **options: Any) -> Any:
    """As on CUDA, where hooks and captured weights of before are the module's. For others, torch makes new parameters."""
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        return move(*args, **options)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


def on_other_device() -> None:
    """Trainers take the other accelerator, and comparisons compare on the CPU."""
    from sp_lightning.tools.comparison.reference import StepsOnHost
    from tests.support import runs

    make, equal, fit, mixed = Trainer.__init__, runs.assert_equal, runs.fit, MixedPrecision.__init__

    def made(self: Trainer, *, accelerator: Any = "auto", strategy: Any = "auto", **options: Any) -> None:
        if strategy == "auto":  # Lightning would compute on the CPU
            device = torch.device(KIND, 0)
            on_host = accelerator == "cpu" and not STEPS_THERE
            fuse = options.get("precision") != "16-mixed"
            strategy = StepsOnHost(device, fuse=fuse) if on_host else SingleDeviceStrategy(device)
        if type(strategy) is SingleDeviceStrategy or isinstance(strategy, StepsOnHost):  # plain Lightning
            strategy.model_to_device = partial(keeping_parameters, strategy.model_to_device)  # type: ignore[method-assign]
        make(self, accelerator=OtherAccelerator(), strategy=strategy, **{"devices": 1, **options})

    def compared(ours: Any, plain: Any, where: str) -> None:
        if isinstance(ours, Tensor) and isinstance(plain, Tensor):
            ours, plain = ours.cpu(), plain.cpu()
        if isinstance(ours, dict) and isinstance(plain, dict) and set(ours) == set(plain):
            ours = {name: ours[name] for name in plain}  # StepsOnHost gives optimizer state the order of parameters
        equal(ours, plain, where)

    def fitted(make: Any, batches: Any, strategy: Any = "auto", *args: Any, **options: Any) -> Any:
        try:
            return fit(make, batches, strategy, *args, **options)
        except Exception as error:
            if isinstance(strategy, runs.SuperpipelineStrategy):
                raise
            pytest.skip(f"plain Lightning on {KIND}: {type(error).__name__}: {str(error)[:150]}")

    def cast(self: MixedPrecision, precision: Any, device: str, scaler: Any = None) -> None:
        mixed(self, precision, KIND, scaler)  # Lightning says "cuda" of every accelerator

    from tests.support import gpu_reference  # which takes the trainers' functions as they are here

    gpu_reference.reference = partial(keeping_parameters, gpu_reference.reference)
    Trainer.__init__, runs.assert_equal, runs.fit, MixedPrecision.__init__ = made, compared, fitted, cast  # type: ignore[method-assign, assignment]


def loops_move_inputs() -> None:
    """The module of a stream moves its inputs, as the loop itself does on a GPU. Fabric's own strategies compute on the CPU."""
    from lightning.fabric import Fabric

    from sp_lightning.any_loop import fabric, stream, transformers_trainer

    make, begin, close = Fabric.__init__, stream.stream, stream.StreamedLoop.close

    def begun(model: nn.Module, *args: Any, **options: Any) -> Any:
        found: Any = begin(model, *args, **options)

        def moved(called: nn.Module, args: Any, kwargs: Any) -> Any:
            if called is model:  # and not a copy of it, which is on the CPU
                return tree_map(lambda each: each.to(KIND) if isinstance(each, Tensor) else each, (args, kwargs))
            return None

        found.moves = model.register_forward_pre_hook(moved, prepend=True, with_kwargs=True)
        return found

    def closed(self: Any) -> None:
        if hasattr(self, "moves"):
            self.moves.remove()
        close(self)

    def made(self: Fabric, *, accelerator: Any = "auto", strategy: Any = "auto", **options: Any) -> None:
        if strategy == "superpipeline" or isinstance(strategy, fabric.FabricStrategy):
            accelerator = OtherAccelerator()
        make(self, accelerator=accelerator, strategy=strategy, **options)

    stream.StreamedLoop.close, Fabric.__init__ = closed, made  # type: ignore[method-assign]
    for each in (stream, fabric, transformers_trainer):
        each.stream = begun


def without_simulation() -> None:
    """Nothing else takes the place of the device."""
    from tests.support import simdevice

    def skipped(*_: Any, **__: Any) -> Any:
        pytest.skip("brings a device of its own")

    simdevice.simulated = skipped
    from tests.equality import training

    plain = training.plain

    def reference(name: str, case: Any, variant: Any) -> Any:
        if "optimizer_on" not in variant.strategy:
            return plain(name, case, variant)
        STEPS_THERE.append(True)
        try:
            return plain(f"{name}, steps there", case, variant)
        finally:
            STEPS_THERE.clear()

    training.plain = reference
    for name in ("simulated", "poisoned", "poisoned_ring", "crowded"):
        setattr(training, name, lambda *_, **__: nullcontext())


def complete() -> None:
    """Adds what tests need and the other package leaves out. None of it is in the way of what is tested."""
    module: Any = torch.get_device_module(KIND)
    # The package puts subclasses in the place of these. elapsed_time of torch 2.14 takes no subclass as its argument.
    torch.Event, torch.Stream = torch._C.Event, torch._C.Stream  # type: ignore[misc, assignment]
    busy = torch.ones(300, 300, device=KIND)

    def sleep(cycles: int) -> None:
        for _ in range(max(1, cycles // 10_000_000)):
            torch.mm(busy, busy)

    module._sleep = sleep
    module.get_device_properties = lambda *_: SimpleNamespace(total_memory=module.mem_get_info()[1])

    # Its foreach operators take no number: torch._foreach_mul_([x], 0.5) raises an error. So optimizers step one by one.
    for place in (optimizer, _foreach_utils):
        place._get_foreach_kernels_supported_devices = lambda: ["cuda", "xpu"]  # type: ignore[attr-defined]

    def on_cpu(function: Any) -> Any:
        def computed(*args: Any) -> Any:
            found = function(*(each.cpu() if isinstance(each, Tensor) else each for each in args))
            return tree_map(lambda each: each.to(KIND) if isinstance(each, Tensor) else each, found)

        return computed

    def backward(gradient: Tensor, x: Tensor, weight: Tensor, *args: Any) -> Any:
        *settings, mask = args
        return torch.ops.aten.convolution_backward(gradient, x, weight, [weight.shape[0]], *settings, mask)

    LIBRARY.impl("convolution_overrideable", on_cpu(torch.ops.aten.convolution), "PrivateUse1")
    LIBRARY.impl("convolution_backward_overrideable", on_cpu(backward), "PrivateUse1")

    def lowered(function: Any) -> Any:
        def computed(*args: Any, **options: Any) -> Any:
            dtype = torch.get_autocast_dtype(KIND)
            with torch.autocast(KIND, enabled=False):
                floats = (isinstance(each, Tensor) and each.is_floating_point() for each in args)
                return function(
                    *(each.to(dtype) if is_float else each for is_float, each in zip(floats, args, strict=True)),
                    **options,
                )

        return computed

    # Its autocast casts mm alone: a linear layer with a bias whose input comes from mm ends the process. CUDA's casts these, too.
    for name in ("linear", "addmm", "bmm", "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d"):
        LIBRARY.impl(name, lowered(getattr(torch.ops.aten, name)), "AutocastPrivateUse1")
    count = torch.arange

    def integers(*args: Any, dtype: Any = None, **options: Any) -> Tensor:
        """Its numbers are float32, whatever they are counted from."""
        if dtype is None and not any(isinstance(each, float) for each in (*args, *options.values())):
            dtype = torch.long
        return count(*args, dtype=dtype, **options)

    torch.arange = integers
    look_up = functional.embedding

    def at_once(*args: Any, **options: Any) -> Tensor:
        """Its kernel reads the weight when it runs, not when it is launched: ``weight.data = other`` right after changes it."""
        found = look_up(*args, **options)
        torch.accelerator.synchronize()
        return found

    functional.embedding = at_once
    attention = functional.scaled_dot_product_attention

    formula: Any = torch.ops.aten._scaled_dot_product_attention_math

    def by_formula(query: Tensor, *args: Any, **options: Any) -> Tensor:
        found: Tensor = (
            attention(query, *args, **options) if query.device.type != KIND else formula(query, *args, **options)[0]
        )
        return found

    functional.scaled_dot_product_attention = by_formula


def pytest_configure(config: pytest.Config) -> None:
    if IS_THERE:
        sys.meta_path.insert(0, Finder)  # type: ignore[arg-type]
        on_other_device()
        loops_move_inputs()
        without_simulation()
        complete()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not IS_THERE:
        for item in items:
            item.add_marker(pytest.mark.skip(MISSING))
