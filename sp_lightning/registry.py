"""Imports the capabilities. This is the only file that names their folders.

A capability is a folder without which the core works. When an option needs a capability, a function of this file imports the
folder, and returns its implementation of an interface of the core. The core has a default for each interface. The ``__init__``
of the capability describes what the capability adds, its interface, and its cost when it is not used. Nothing is imported from a
capability before it is needed.

Only the strategy (``trainer``), the command and capabilities import this file. They hand the parts below what they got from it.
What the whole process uses (:func:`row_finder`) is given to the core once, by :func:`install`.

If a folder is missing, one of three things happens. Each function below says which:

- **error**: the option raises :class:`MissingCapabilityError` (for example ``disk=``);
- **fallback**: a default continues without it and logs one line (for example ``k="auto"`` without ``tuning``);
- **slower**: the results are the same, and nothing is logged (for example uploads of experts without ``experts``).
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from sp_lightning.core.device.device import Device
    from sp_lightning.core.engine.activations import ActivationPlan
    from sp_lightning.core.engine.engine import Engine, MakeStepper
    from sp_lightning.core.model.found import Found
    from sp_lightning.core.model.rows import RowFinder
    from sp_lightning.core.plan.choices import ActivationChoice, Place
    from sp_lightning.core.plan.window import Window
    from sp_lightning.trainer.host_memory import HostBudget
    from sp_lightning.trainer.tuner import BaseTuner

CAPABILITIES = {
    "capabilities.activations": "offloads or recomputes activations",
    "any_loop": "streams in loops without Lightning's Trainer (sp_lightning.stream)",
    "tools.comparison": "compares a module with plain Lightning (sp_lightning.check, sp_lightning.dial)",
    "capabilities.disk": "keeps optimizer state, weights and gradients on a disk",
    "capabilities.experts": "uploads only the experts and embedding rows that a batch uses",
    "capabilities.gpu_steps": "runs optimizer steps on the GPU, and keeps layers there with their optimizer state",
    "tools.planner": "the command line: plan, check, dial, rates",
    "experimental.ranks": "trains on several devices",
    "capabilities.tuning": "measures batches, chooses k, and has activations offloaded",
}
"""The folders, as names of packages, and what each adds."""

PUBLIC = {
    "FabricStrategy": "any_loop.fabric",
    "StreamedTrainer": "any_loop.transformers_trainer",
    "check": "tools.comparison.check",
    "dial": "tools.comparison.dial",
    "load_mxfp4": "capabilities.experts.mxfp4",
    "pack_experts": "capabilities.experts.packed_stacks",
    "rank_order_hook": "experimental.ranks.rank_order",
    "stream": "any_loop.stream",
}
"""The public names of ``sp_lightning`` that capabilities have, and the file of each."""


class MissingCapabilityError(ImportError):
    """An option needs a folder of this package, and the folder is missing."""


@contextmanager
def needed_for(option: str, *, can_leave_out: bool = True) -> Iterator[None]:
    """A context for imports of a capability. If the folder is missing, it raises an error that names the option.

    Args:
        option: the option as the user wrote it, for the message, for example ``disk="/scratch"``.
        can_leave_out: True if the message may suggest to leave the option out.

    Raises:
        MissingCapabilityError: the folder is missing.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        folder = _missing_capability(error.name)
        if folder is None:  # another module is missing
            raise
        install = "pip install --force-reinstall sp_lightning"
        if can_leave_out:
            remedy = f"Install the whole package ({install}), or leave {option} out."
        else:
            remedy = f"Install the whole package: {install}"
        raise MissingCapabilityError(
            f"{option} needs sp_lightning/{folder}, which is not installed. {remedy}"
        ) from None


def _missing_capability(module: str | None) -> str | None:
    """Returns the capability to which a module belongs, if its folder is missing; None for all other modules."""
    name = (module or "").removeprefix("sp_lightning.")
    folder = next((each for each in CAPABILITIES if f"{name}.".startswith(f"{each}.")), None)
    return None if folder is None or is_installed(folder) else folder.replace(".", "/")


@cache
def is_installed(folder: str) -> bool:
    """Returns True if the folder of a capability, a key of :data:`CAPABILITIES`, is part of this installation."""
    assert folder in CAPABILITIES, folder
    return find_spec(f"sp_lightning.{folder}") is not None


def public(name: str) -> Any:
    """Returns the object of a public name that a capability defines, for example ``sp_lightning.check``.

    Raises:
        MissingCapabilityError: the folder is missing.
    """
    with needed_for(f"sp_lightning.{name}", can_leave_out=False):
        return getattr(import_module(f"sp_lightning.{PUBLIC[name]}"), name)


def fabric_strategy() -> Any:
    """Returns the strategy of ``Fabric(strategy="superpipeline")``. Without ``any_loop``, it raises an error."""
    return public("FabricStrategy")()


def install() -> None:
    """Gives the core the functions that resolve what the whole process uses. Importing the package calls this."""
    from sp_lightning.core.model import rows

    rows.install(row_finder)


@cache
def row_finder() -> RowFinder:
    """Returns the finder of stacked experts and embeddings, whose rows are uploaded as batches use them.

    Without ``experts`` (slower), all layers are uploaded whole.
    """
    if is_installed("capabilities.experts"):
        from sp_lightning.capabilities.experts.finder import ExpertsAndEmbeddings

        return ExpertsAndEmbeddings()
    from sp_lightning.core.model.rows import RowFinder

    return RowFinder()


# ---------------------------------------------------------------------- activations


def activations(choice: ActivationChoice, module: nn.Module, found: Found, *, may_evict: bool) -> ActivationPlan:
    """Resolves ``activations=``: how the activations of each unit are stored between forward and backward.

    Without the folder, ``"auto"`` keeps all activations (fallback); this is logged after an out-of-memory error. All values
    except ``"auto"`` and ``"keep"`` are an error.

    Args:
        choice: the option.
        module: the root.
        found: its layers and units.
        may_evict: True if ``"auto"`` may offload activations: the run trains, and device memory is limited.
    """
    from sp_lightning.core.engine.activations import ActivationPlan

    if choice == "keep" or (choice == "auto" and not may_evict):
        return ActivationPlan(automatic=choice == "auto")
    if choice == "auto" and not is_installed("capabilities.activations"):
        return ActivationPlan(
            automatic=True,
            why_kept='Superpipeline: activations="auto" keeps all activations on the GPU, because '
            "sp_lightning/capabilities/activations is not installed.",
        )
    with needed_for("activations=" + json.dumps(choice)):
        from sp_lightning.capabilities.activations.calls import plan_activations
    return plan_activations(choice, module, found)


# ---------------------------------------------------------------------- disk


def require_disk(option: str) -> None:
    """Checks that ``disk=`` is possible. Without the folder, it raises an error."""
    with needed_for(option):
        import sp_lightning.capabilities.disk  # noqa: F401


def host_budget(host_memory: int | float) -> HostBudget:
    """Returns the limit of host memory for ``host_memory=`` without ``disk=``. Without the folder, it raises an error."""
    with needed_for("host_memory="):
        from sp_lightning.capabilities.disk.host_budget import LimitedMemory
    return LimitedMemory(host_memory)


def disk_tier() -> Any:
    """Returns the module of ``disk=``, which makes the placement of weights and gradients, and the store of optimizer state.

    Called only after :func:`require_disk`.
    """
    from sp_lightning.capabilities.disk import tier

    return tier


def checkpoint_writer() -> Callable[[Any, IO[bytes]], None]:
    """Returns the function that writes a checkpoint: ``torch.save``, or one that reads tensors on a disk one at a time.

    Such tensors can only be in a checkpoint if this process has imported the module that makes them.
    """
    if "sp_lightning.capabilities.disk.away" not in sys.modules:
        import torch

        return torch.save
    from sp_lightning.capabilities.disk.away import save

    return save


# ---------------------------------------------------------------------- GPU steps


def layer_stepper(optimizer_on: Place) -> MakeStepper | None:
    """Returns the function that makes the stepper of layers on the GPU; None if layers step on the CPU.

    Without ``gpu_steps``, ``optimizer_on="gpu"`` is an error.
    """
    if optimizer_on == "cpu":
        return None
    with needed_for('optimizer_on="gpu"'):
        from sp_lightning.capabilities.gpu_steps.on_device import make_stepper
    return make_stepper


def against_gpu(optimizers: Sequence[Optimizer]) -> str:
    """Returns why optimizers cannot step on the GPU; empty if they can. Without ``gpu_steps`` (fallback), they cannot."""
    if not is_installed("capabilities.gpu_steps"):
        return "sp_lightning/capabilities/gpu_steps is not installed"
    from sp_lightning.capabilities.gpu_steps.alone import against_gpu

    return against_gpu(optimizers)


def is_declared(optimizer: Optimizer) -> bool:
    """Returns True if only a declaration in its class shows that an optimizer steps each parameter by itself.

    Without ``gpu_steps`` (fallback), no step needs a declaration.
    """
    if not is_installed("capabilities.gpu_steps"):
        return False
    from sp_lightning.capabilities.gpu_steps.alone import is_declared

    return is_declared(optimizer)


# ---------------------------------------------------------------------- tuning


def make_tuner(window: Window, engine: Engine, device: Device, log: logging.Logger, *, evicts: bool) -> BaseTuner:
    """Returns the tuner, which chooses k between batches, and has activations offloaded if not all fit.

    Without ``tuning`` (fallback), the first plan stays, and ``activations="auto"`` keeps all activations.

    Args:
        window: the user's k, k' and GPU memory, and the plans that fit.
        engine: the engine.
        device: its device.
        log: the logger for choices.
        evicts: True to offload the oldest activations when not all activations fit.
    """
    if window.auto or evicts:
        if is_installed("capabilities.tuning"):
            from sp_lightning.capabilities.tuning.tuner import Tuner

            return Tuner(window, engine, device, log, window_too=window.auto, evicts=evicts)
        log.info(
            "Superpipeline: k and activations stay as they are planned: sp_lightning/capabilities/tuning is not installed."
        )
    from sp_lightning.trainer.tuner import BaseTuner

    return BaseTuner(window, engine)


# ---------------------------------------------------------------------- ranks
# Without the folder, a call that needs it raises an error.


def part_of_several_devices(devices: int, nodes: int) -> Any:
    """Returns the class that a strategy on several devices has as a further base."""
    with needed_for(f"devices={devices}" if nodes == 1 else f"num_nodes={nodes}"):
        from sp_lightning.experimental.ranks.strategy import RankStrategy
    return RankStrategy


# ---------------------------------------------------------------------- comparison


def check_command(option: str) -> Any:
    """Returns the module with the commands ``check`` and ``dial``. Without the folder, it raises an error.

    Args:
        option: what needs the folder, for the message.
    """
    with needed_for(option, can_leave_out=False):
        from sp_lightning.tools.comparison import command
    return command
