"""``Fabric(strategy="superpipeline")``: streams the modules that Lightning's Fabric sets up."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from lightning.fabric.strategies import SingleDeviceStrategy
from torch import nn
from torch.optim import Optimizer

from sp_lightning.any_loop.stream import StreamedLoop, steps, strategy_with, stream
from sp_lightning.core.device.closing import close_all
from sp_lightning.core.torch_compat.patched import replace_method
from sp_lightning.trainer.option_checks import checked_budget
from sp_lightning.trainer.options import AUTOCAST, prepare_precision

_STEPS = ("training_step", "validation_step", "test_step", "predict_step")
"""The methods that Fabric's modules have in place of ``forward`` if they are LightningModules."""


class FabricStrategy(SingleDeviceStrategy):
    """Streams the modules of Lightning's Fabric: their layers are copied to the GPU while they run.

    ::

        fabric = Fabric(strategy=sp_lightning.FabricStrategy(gpu_memory="8GiB"))
        model, optimizer = fabric.setup(model, optimizer)

    ``Fabric(strategy="superpipeline")`` is the same without options. Results are bitwise those of the same code without this
    strategy on one device, under the conditions of :func:`sp_lightning.stream`, which streams each module when it is set up.
    Fabric does all else on the CPU, between two steps: it clips, scales, saves and loads. Checkpoints are those of one device.

    Modules stay on the CPU: ``fabric.init_module()`` makes them there, and ``fabric.setup`` and ``fabric.to_device`` leave them
    there. One device computes. A module that is not set up is moved by ``module.to(fabric.device)``.

    Args:
        only_steps_write: as for :func:`sp_lightning.stream`.
        options: as for :func:`sp_lightning.stream`, without ``autocast`` and ``device``, which Fabric chooses.

    Raises:
        TypeError: an option is unknown, or belongs to Lightning's Trainer.
        ValueError: an option has an invalid value.
    """

    # Fabric sets this attribute, and the next two, before it calls `_configure_launcher`
    cluster_environment: Any = None
    num_nodes = _num_nodes = 1

    def __init__(self, *, only_steps_write: bool = False, **options: Any) -> None:
        if "device" in options:
            raise TypeError("FabricStrategy() has no option 'device'. Expected Fabric(accelerator=…, devices=1).")
        strategy_with(options, "FabricStrategy()")  # an error now, not at the first call
        self._options = {"only_steps_write": only_steps_write, **options}
        self._devices: list[torch.device] = []
        self._streams: dict[nn.Module, StreamedLoop] = {}
        self._steppers: list[Optimizer] = []
        self._replaced = ExitStack()
        super().__init__()

    @property
    def streams(self) -> list[StreamedLoop]:
        """The streams of the modules that were set up, with their plans, counters and ``gpu_released()``."""
        return list(self._streams.values())

    @property
    def gpu_memory(self) -> int | float | str | None:
        """The limit of GPU memory of each module. It may be set between two steps."""
        return self._options.get("gpu_memory")

    @gpu_memory.setter
    def gpu_memory(self, value: int | float | str | None) -> None:
        checked_budget("gpu_memory", value)
        for each in self.streams:
            each.gpu_memory = value
        self._options["gpu_memory"] = value

    @contextmanager
    def gpu_released(self) -> Generator[int, None, None]:
        """A context between two steps in which other code can use the GPU's memory, of all streams.

        See :meth:`sp_lightning.SuperpipelineStrategy.gpu_released`.
        """
        with ExitStack() as contexts:
            yield sum(contexts.enter_context(each.gpu_released()) for each in self.streams)

    # ------------------------------------------------------------------ what Fabric gives

    @property
    def parallel_devices(self) -> list[torch.device]:
        """The devices that Fabric has chosen."""
        return self._devices

    @parallel_devices.setter
    def parallel_devices(self, devices: Sequence[torch.device]) -> None:
        self._devices = list(devices)

    @property
    def root_device(self) -> torch.device:
        """The device on which layers compute."""
        return self._devices[0] if self._devices else torch.device("cpu")

    def _configure_launcher(self) -> None:
        """Called when Fabric has set all its parts. Raises a ValueError if they are not those of one process."""
        number = len(self._devices) * self._num_nodes
        if number == 1 and self.cluster_environment.creates_processes_externally:
            number = self.cluster_environment.world_size()
        if number > 1:
            raise ValueError(
                f'Fabric(strategy="superpipeline") was given {number} devices or processes. Expected one, because '
                "processes share no gradients. Use Fabric(devices=1), or Lightning's Trainer: "
                "Trainer(strategy=SuperpipelineStrategy(), devices=…)."
            )
        prepare_precision(self.precision)  # type: ignore[arg-type]

    @contextmanager
    def module_init_context(self, empty_init: bool | None = None) -> Generator[None, None, None]:
        """Makes modules on the CPU, because they may not fit on the device."""
        with super().module_init_context(empty_init), torch.device("cpu"):  # the inner context determines the device
            yield

    def module_to_device(self, module: nn.Module) -> None:
        """Leaves the module on the CPU, from where it is streamed."""

    # ------------------------------------------------------------------ streams

    def setup_module_and_optimizers(self, module: nn.Module, optimizers: list[Optimizer], *scheduler: Any) -> Any:
        """Streams the module with its optimizers."""
        self._steppers += optimizers  # before the stream begins, so that its engine is built once
        return super().setup_module_and_optimizers(module, optimizers, *scheduler)

    def setup_module(self, module: nn.Module) -> nn.Module:
        """Streams the module. Its weights have other memory from now on, as on plain Fabric, which moves it to the GPU now."""
        if module in self._streams:
            return module
        optimizers = [each for each in self._steppers if steps(each, module)]
        autocast = AUTOCAST.get(self.precision.precision)
        streamed = stream(module, optimizers, autocast=autocast, device=self.root_device, **self._options)
        self._streams[module] = streamed
        if getattr(module, "automatic_optimization", True):  # otherwise these methods step optimizers themselves
            for name in filter(partial(_is_own, module), _STEPS):
                self._replaced.enter_context(replace_method(module, name, partial(_call, streamed)))
        return module

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Adds an optimizer to the streams whose weights it steps. Warns if there are none."""
        if optimizer not in self._steppers:
            self._steppers.append(optimizer)
            for module, streamed in self._streams.items():
                if steps(optimizer, module):
                    streamed.add(optimizer)
        if not any(steps(optimizer, module) for module in self._streams):
            warnings.warn(
                f"{type(optimizer).__name__} steps weights of no module that this Fabric has set up, so they are not streamed. "
                "Expected one Fabric for module and optimizer, and the module first: model, optimizer = fabric.setup(model, "
                "optimizer). Ignore this for an optimizer that steps copies of the weights.",
                stacklevel=4,
            )
        return optimizer

    def teardown(self) -> None:
        """Ends all streams. The modules are then ordinary modules on the CPU."""
        streams, self._streams = self.streams, {}
        close_all(*(each.close for each in streams), self._replaced.close, self._steppers.clear, super().teardown)


def _call(streamed: StreamedLoop, own: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Runs a method of :data:`_STEPS` as a call of the module: it may call parts of the module."""
    return streamed.call(partial(own, *args, **kwargs))


def _is_own(module: nn.Module, name: str) -> bool:
    """Returns True if a module has a method that is not one of Lightning's, which do nothing or call the module."""
    where = getattr(getattr(module, name, None), "__module__", None)
    return where is not None and where.partition(".")[0] not in ("lightning", "pytorch_lightning")
