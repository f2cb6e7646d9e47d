"""Everything that this package knows of Lightning beyond its public API.

Two things are kept here, so that no other file changes with a version of Lightning.

*Lightning under both its names.* ``pytorch_lightning`` is ``lightning.pytorch`` once more, with classes of its own. A
class that this package imports from ``lightning`` stands for its namesake in ``pytorch_lightning``, too; the class of an
object says which of them it belongs to.

*Private names of Lightning.* Each has one function here, which says why the public API does not answer.
``tests/trainer/test_compat.py`` tests each with the oldest and the newest Lightning that are supported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, TypeGuard, TypeVar

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.device_dtype_mixin import _DeviceDtypeModuleMixin
from lightning.fabric.utilities.imports import _IS_INTERACTIVE
from lightning.pytorch.core.optimizer import _MockOptimizer
from lightning.pytorch.plugins.io.wrapper import _WrappingCheckpointIO
from torch import nn

T = TypeVar("T")

# ---------------------------------------------------------------------- Lightning under both its names

_NAMES = {"pytorch_lightning": "lightning.pytorch", "lightning_fabric": "lightning.fabric"}


def path(kind: type) -> str:
    """Returns the name under which ``lightning`` has this class."""
    package, dot, rest = kind.__module__.partition(".")
    return f"{_NAMES.get(package, package)}{dot}{rest}.{kind.__qualname__}"


def is_a(value: object, kind: type[T]) -> TypeGuard[T]:
    """Answers as ``isinstance`` does, for the class or its namesake."""
    return any(path(base) == path(kind) for base in type(value).__mro__)


def is_exactly(value: object, kinds: Iterable[type]) -> bool:
    """Whether the value's class is one of these classes or of their namesakes. A subclass is not."""
    return path(type(value)) in {path(kind) for kind in kinds}


def base_of(value: object, kind: type[T]) -> type[T]:
    """Returns ``kind`` or its namesake, whichever is among the bases of the value's class; ``kind`` if neither is."""
    return next((base for base in type(value).__mro__ if path(base) == path(kind)), kind)


# ---------------------------------------------------------------------- the trainer


def trainer_of(module: pl.LightningModule) -> Any | None:
    """Returns a module's trainer, or None.

    ``module.trainer`` raises an error where there is none, as in a strategy that was connected by hand.
    """
    return module._trainer


def attach_callback(trainer: Any, callback: Any) -> None:
    """Adds a callback to a trainer that exists already, where the trainer's constructor would have put it.

    Lightning orders callbacks (``ModelCheckpoint`` comes last) in the constructor alone.
    """
    trainer.callbacks = trainer._callback_connector._reorder_callbacks([*trainer.callbacks, callback])


def skips_backward(trainer: Any) -> bool:
    """Whether training steps are followed by no backward.

    ``StochasticWeightAveraging`` has the loop skip it while it adapts BatchNorm. Nothing public says so.
    """
    return bool(trainer.fit_loop._skip_backward)


def accumulates(trainer: Any) -> bool:
    """Whether the running training batch only adds to gradients, because its optimizer step comes with a later batch.

    The answer depends on ``accumulate_grad_batches`` and on whether the epoch ends; the loop's method is private.
    """
    return bool(trainer.fit_loop._should_accumulate())


def meet_before_batches(trainer: Any, meet: Callable[[], None] | None) -> None:
    """Has all processes meet before each training batch; None: as Lightning has it.

    Its loop says there, by a broadcast that goes round the strategy, whether rank 0 has got a signal to end. A process whose
    epoch is longer than that of rank 0 would wait in it for ever, or take something else that is sent for it.
    """
    loop, name = trainer.fit_loop.epoch_loop, "_broadcast_sigterm_tensor"
    vars(loop).pop(name, None)
    if meet is None or not hasattr(loop, name):
        return
    broadcast = getattr(loop, name)

    def together() -> None:
        meet()
        broadcast()

    vars(loop)[name] = together


def look_at_loaders(trainer: Any, look: Callable[[str, Any], None]) -> None:
    """Has a function look at what loops get from a hook or from the trainer's caller, by the hook's name, before they iterate it.

    Lightning iterates it before any public hook comes.
    """
    fitting = trainer.fit_loop
    for loop in (fitting, fitting.epoch_loop.val_loop, trainer.validate_loop, trainer.test_loop, trainer.predict_loop):
        vars(loop._data_source)["dataloader"] = partial(_looked_at, loop._data_source, look)


def _looked_at(source: Any, look: Callable[[str, Any], None]) -> Any:
    found = type(source).dataloader(source)
    look(source.name, found)
    return found


def logged_step(trainer: Any) -> int:
    """Returns the step that Lightning gives to loggers: the number of training batches with an optimizer step.

    ``trainer.global_step`` counts the steps of all optimizers, which is a multiple of it where there are several.
    """
    return int(trainer.fit_loop.epoch_loop._batches_that_stepped)


def last_checkpoint(trainer: Any) -> str | None:
    """Returns the newest checkpoint that the trainer's callbacks have saved; None without one.

    ``trainer.checkpoint_callback`` is the first of them. A file on another system than this one has no time here.
    """
    names = ("last_model_path", "best_model_path")
    found = [getattr(each, name, "") for each in trainer.checkpoint_callbacks for name in names]
    return max(
        filter(None, found), key=lambda file: Path(file).stat().st_mtime if Path(file).exists() else 0.0, default=None
    )


# ---------------------------------------------------------------------- modules, optimizers, files


def note_device(module: nn.Module, device: torch.device) -> None:
    """Sets what ``module.device`` says, if the module is one of Lightning's.

    ``device`` has no setter: it follows ``module.to(device)``, which would move the parameters, too.
    """
    if is_a(module, _DeviceDtypeModuleMixin):
        module._device = device


def is_no_optimizer(optimizer: object) -> bool:
    """Whether this stands for the optimizer of a module whose ``configure_optimizers`` returns None."""
    return is_a(optimizer, _MockOptimizer)


def wraps_another(io: object) -> bool:
    """Whether a ``CheckpointIO`` is a wrapper, as ``AsyncCheckpointIO`` is: the one inside is its ``checkpoint_io``.

    The base class of Lightning's wrappers, from which users derive theirs, is private.
    """
    return is_a(io, _WrappingCheckpointIO)


# ---------------------------------------------------------------------- the strategy


def is_interactive() -> bool:
    """Whether this is a notebook or a prompt, where no script can be started again for each device."""
    return bool(_IS_INTERACTIVE)


def set_inherited(kind: type, instance: object, name: str, value: object) -> None:
    """Sets a property as the base classes of ``kind`` do. ``super()`` reads properties, but it cannot set them.

    Args:
        kind: the class that overrides the property.
        instance: the object whose property is set.
        name: the property's name.
        value: its new value.
    """
    getattr(super(kind, type(instance)), name).__set__(instance, value)


def given_checkpoint_io(strategy: Any) -> Any | None:
    """Returns the ``CheckpointIO`` that a strategy was given, or None. Reading ``strategy.checkpoint_io`` makes one."""
    return strategy._checkpoint_io


def forget_module(strategy: Any) -> None:
    """Makes ``strategy.lightning_module`` None; it has no setter."""
    strategy._lightning_module = None
