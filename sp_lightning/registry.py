"""Where the capabilities enter. This is the only file of the core that names their folders.

A capability is a folder without which the core works: it is found here, when the option that asks for it is resolved, and enters
through an interface that the core defines. Its own ``__init__`` says what it adds, at which interface it enters, and what it
costs when it is not used. Nothing is imported from a capability before it is asked for.

If a folder is missing, one of three things happens. Each function below says which:

- **error**: the option raises :class:`MissingCapabilityError` (for example ``disk=``);
- **fallback**: a default continues without it and logs one line (for example ``k="auto"`` without ``tuning``);
- **slower**: the results are the same, and nothing is logged (for example optimizer steps without ``kernels``).
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

    import torch
    from torch import nn

    from sp_lightning.device.device import Device
    from sp_lightning.device.host_kernels import HostKernels
    from sp_lightning.engine.activations import ActivationPlan
    from sp_lightning.engine.placement import Placement
    from sp_lightning.engine.state_store import StateStore
    from sp_lightning.engine.streamer import MakeStepper, Streamer
    from sp_lightning.engine.tuner import BaseTuner
    from sp_lightning.model.found import Found
    from sp_lightning.model.rows import RowFinder
    from sp_lightning.plan.choices import ActivationChoice, OptimizerOn, Share
    from sp_lightning.plan.host_memory import HostBudget
    from sp_lightning.plan.ledger import Ledger
    from sp_lightning.plan.plan import Plan
    from sp_lightning.plan.window import Window
    from sp_lightning.trainer.checkpoint_io import CheckpointFormat
    from sp_lightning.trainer.optimizer_steps import SteppedRun
    from sp_lightning.trainer.options import Options
    from sp_lightning.trainer.step_place import StepPlace
    from sp_lightning.updates.gpu_bits import GpuBits

CAPABILITIES = {
    "activations": "offloads or recomputes activations, and cuts a loss into chunks",
    "comparison": "compares a module with plain Lightning (sp_lightning.check)",
    "disk": "keeps optimizer state, weights and gradients on a disk",
    "experts": "uploads only the experts and embedding rows that a batch uses",
    "gpu_steps": "runs optimizer steps on the GPU, and keeps layers there with their optimizer state",
    "kernels": "compiles kernels for optimizer steps on the CPU",
    "planner": "the command line: plan, check, rates, convert",
    "ranks": "trains on several devices",
    "sharing": "lets several trainings share one frozen base",
    "tuning": "measures batches, and chooses k, k' and the modes of activations",
}
"""The folders, and what each adds."""

PUBLIC = {
    "SharedBase": "sharing.shared_base",
    "check": "comparison.check",
    "chunk_loss": "activations.chunked_loss",
    "rank_order_hook": "ranks.rank_order",
}
"""The public names of ``sp_lightning`` that capabilities have, and the file of each."""


class MissingCapabilityError(ImportError):
    """An option needs a folder of the package that is not installed."""


@contextmanager
def needed_for(option: str, *, can_leave_out: bool = True) -> Iterator[None]:
    """Imports of a capability stand inside this context, so that a missing folder raises one clear error.

    Args:
        option: what the user wrote, for the message, for example ``disk="/scratch"``.
        can_leave_out: True if the message may suggest to leave the option out.

    Raises:
        MissingCapabilityError: the folder is missing.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        folder = _capability(error.name)
        if folder is None:
            raise
        install = "pip install --force-reinstall sp_lightning"
        remedy = f"Install the whole package: {install}"
        if can_leave_out:
            remedy = f"Install the whole package ({install}), or leave {option} out."
        raise MissingCapabilityError(
            f"{option} needs sp_lightning/{folder}, which is not installed. {remedy}"
        ) from None


def _capability(module: str | None) -> str | None:
    """Returns the capability that a module's name is in; None for other modules."""
    package, _, rest = (module or "").partition(".")
    folder = rest.partition(".")[0]
    return folder if package == "sp_lightning" and folder in CAPABILITIES and not is_installed(folder) else None


@cache
def is_installed(folder: str) -> bool:
    """Returns True if the folder of a capability is part of this installation."""
    return find_spec(f"sp_lightning.{folder}") is not None


def public(name: str) -> Any:
    """Returns what a public name of a capability stands for.

    Raises:
        MissingCapabilityError: the folder is missing.
    """
    with needed_for(f"sp_lightning.{name}", can_leave_out=False):
        return getattr(import_module(f"sp_lightning.{PUBLIC[name]}"), name)


@cache
def row_finder() -> RowFinder:
    """Returns what finds stacked experts and embeddings. Without ``experts`` (slower), all layers are uploaded whole."""
    if is_installed("experts"):
        from sp_lightning.experts.finder import ExpertsAndEmbeddings

        return ExpertsAndEmbeddings()
    from sp_lightning.model.rows import RowFinder

    return RowFinder()


# ---------------------------------------------------------------------- activations


def activations(choice: ActivationChoice, module: nn.Module, found: Found, *, may_choose: bool) -> ActivationPlan:
    """``activations=``: what becomes of what autograd saves in forward.

    Missing folder: error, except with ``"keep"``. ``"auto"`` continues with ``"keep"``, and logs that if device memory ends.

    Args:
        choice: the option.
        module: the root.
        found: its layers and units.
        may_choose: whether ``"auto"`` may choose modes: the run trains, and device memory is limited.
    """
    from sp_lightning.engine.activations import ActivationPlan

    if choice == "keep" or (choice == "auto" and not may_choose):
        return ActivationPlan()
    if choice == "auto" and not is_installed("activations"):
        return ActivationPlan(
            why_kept='Superpipeline: activations="auto" keeps all activations on the device, because sp_lightning/activations '
            "is not installed."
        )
    with needed_for("activations=" + json.dumps(choice)):
        from sp_lightning.activations.calls import plan_activations
    return plan_activations(choice, module, found)


# ---------------------------------------------------------------------- disk


def require_disk(option: str) -> None:
    """``disk=``. **Error** if the folder is missing. The functions below are called afterwards."""
    with needed_for(option):
        import sp_lightning.disk  # noqa: F401


def host_budget(host_memory: int | float) -> HostBudget:
    """``host_memory=`` without ``disk=``. Returns what limits host memory. **Error** if the folder is missing."""
    with needed_for("host_memory="):
        from sp_lightning.disk.host_budget import LimitedMemory
    return LimitedMemory(host_memory)


def placement_on_disk(
    found: Found, plan: Plan, options: Options, device: torch.device, *, accumulate: int
) -> Placement:
    """``disk=``. Returns where weights and gradients are. The arguments are those of ``disk.tier.place``."""
    from sp_lightning.disk.tier import place

    return place(found, plan, options, device, accumulate=accumulate)


def state_on_disk(
    run: SteppedRun,
    options: Options,
    optimizers: Sequence[Any],
    ledger: Ledger,
    still: Callable[[], AbstractContextManager[None]],
    log: logging.Logger,
) -> tuple[StateStore, int]:
    """``disk=``. Returns where optimizer state is, and its host memory. The arguments are those of ``disk.tier.open_store``."""
    from sp_lightning.disk.tier import open_store

    return open_store(run, options, optimizers, ledger, still, log)


def checkpoint_writer() -> Callable[[Any, IO[bytes]], None]:
    """Returns what writes a checkpoint: ``torch.save``, unless this process has had tensors on a disk, which may be in it."""
    if "sp_lightning.disk.away" not in sys.modules:
        import torch

        return torch.save
    from sp_lightning.disk.away import save

    return save


# ---------------------------------------------------------------------- GPU steps


def layer_stepper(optimizer_on: OptimizerOn, gpu_layers: Share) -> MakeStepper | None:
    """Returns what makes the GPU's optimizer steps; None if the options ask for none.

    Without ``gpu_steps``, ``optimizer_on="gpu"`` and a number of ``gpu_layers`` are errors. ``"auto"`` falls back to the CPU.
    """
    named = []
    if optimizer_on == "gpu":
        named.append('optimizer_on="gpu"')
    if gpu_layers not in (0, "auto"):
        named.append(f"gpu_layers={gpu_layers}")
    by_default = (optimizer_on, gpu_layers) == ("cpu", 0)
    if by_default or not (named or is_installed("gpu_steps")):
        return None
    with needed_for(" and ".join(named)):
        from sp_lightning.gpu_steps.on_device import make_stepper
    return make_stepper


def step_place() -> type[StepPlace]:
    """Returns what says whether optimizers can step on the GPU. Without ``gpu_steps`` (fallback) they cannot."""
    if is_installed("gpu_steps"):
        from sp_lightning.gpu_steps.step_place import MeasuredPlace

        return MeasuredPlace
    from sp_lightning.trainer.step_place import StepPlace

    return StepPlace


# ---------------------------------------------------------------------- tuning


def make_tuner(
    window: Window, streamer: Streamer, device: Device, log: logging.Logger, *, chooses_modes: bool, alone: bool
) -> BaseTuner:
    """Returns what chooses k, k' and the modes of activations between batches.

    Without ``tuning`` (fallback) the first plan stays and all activations are kept.

    Args:
        window: what the user asked for, and what fits.
        streamer: the engine.
        device: its device.
        log: the logger for choices.
        chooses_modes: True if modes of activations are to be chosen once not all activations fit.
        alone: True if nothing else in this process uses the device's memory.
    """
    chooses_window = window.auto or (window.room is not None and streamer.plan.stack_bytes > 0)
    if chooses_window or chooses_modes:
        if is_installed("tuning"):
            from sp_lightning.tuning.tuner import Tuner

            return Tuner(window, streamer, device, log, window_too=chooses_window, modes_too=chooses_modes, alone=alone)
        log.info("Superpipeline: k, k' and activations stay as they are planned: sp_lightning/tuning is not installed.")
    from sp_lightning.engine.tuner import BaseTuner

    return BaseTuner(window, streamer)


# ---------------------------------------------------------------------- ranks: error


def part_of_several_devices(devices: int, nodes: int) -> Any:
    """Returns the class that is the strategy's part for several devices."""
    with needed_for(f"devices={devices}" if nodes == 1 else f"num_nodes={nodes}"):
        from sp_lightning.ranks.strategy import RankStrategy
    return RankStrategy


def checkpoint_format(*, folder: bool) -> CheckpointFormat:
    """Returns how checkpoints are written: as one file, or as a folder (``save_distributed_checkpoint=True``)."""
    if not folder:
        from sp_lightning.trainer.checkpoint_io import CheckpointFormat

        return CheckpointFormat()
    with needed_for("save_distributed_checkpoint=True"):
        from sp_lightning.ranks.folder_format import FolderFormat
    return FolderFormat()


def read_checkpoint_folder(folder: Path, weights_only: bool | None) -> dict[str, Any]:
    """Returns the checkpoint in a folder that several processes have written."""
    with needed_for(f'ckpt_path="{folder}", a folder,'):
        from sp_lightning.ranks.folder_reader import read
    return read(folder, weights_only)


def check_transfer(transfer: str) -> None:
    """Raises an error if devices of a node are to share uploads (``transfer=``), and the folder is missing."""
    if transfer != "full":
        with needed_for(f'transfer="{transfer}"'):
            import sp_lightning.ranks.transfer  # noqa: F401


# ---------------------------------------------------------------------- kernels


@cache
def host_kernels() -> HostKernels:
    """Returns the kernels for updates and norms on the CPU. Without ``kernels`` (slower), torch's operators do both."""
    if is_installed("kernels"):
        from sp_lightning.kernels.host import CompiledKernels

        return CompiledKernels()
    from sp_lightning.device.host_kernels import HostKernels

    return HostKernels()


def gpu_bits(device: torch.device | None) -> GpuBits:
    """Makes what decides which CPU steps have the bits of a GPU. Without ``kernels`` (fallback), none have, which is logged.

    Args:
        device: the GPU on which plain Lightning steps; None if it steps on the CPU.
    """
    if is_installed("kernels"):
        from sp_lightning.kernels.like_gpu import ConfirmedBits

        return ConfirmedBits(device)
    from sp_lightning.updates.gpu_bits import GpuBits

    return GpuBits(device)
