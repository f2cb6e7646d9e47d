"""The only file that depends on Lightning beyond its public API. Other files do not change with Lightning's version.

*Two packages.* ``pytorch_lightning`` is a copy of ``lightning.pytorch`` with its own classes. A class that this package imports
from ``lightning`` also stands for its namesake in ``pytorch_lightning``. The class of an object shows its package.

*Private names.* Each has one function in this file. Its docstring says why the public API does not suffice.
``tests/trainer/test_compat.py`` tests each with the oldest and the newest supported Lightning.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeGuard, TypeVar

import lightning.pytorch as pl
from lightning.fabric.utilities.imports import _IS_INTERACTIVE
from lightning.pytorch.core.optimizer import _MockOptimizer
from lightning.pytorch.plugins.io.wrapper import _WrappingCheckpointIO

T = TypeVar("T")

# ---------------------------------------------------------------------- the two packages of Lightning

_NAMES = {"pytorch_lightning": "lightning.pytorch", "lightning_fabric": "lightning.fabric"}


def path(kind: type) -> str:
    """Returns the full name of a class in ``lightning``, also for its namesake in ``pytorch_lightning``."""
    package, dot, rest = kind.__module__.partition(".")
    return f"{_NAMES.get(package, package)}{dot}{rest}.{kind.__qualname__}"


def is_a(value: object, kind: type[T]) -> TypeGuard[T]:
    """Returns True if a value is an instance of a class or of its namesake, or of a subclass of one of the two."""
    return path(kind) in map(path, type(value).__mro__)


def is_exactly(value: object, kinds: Iterable[type]) -> bool:
    """Returns True if the value's class is one of these classes or their namesakes. A subclass does not count."""
    return path(type(value)) in map(path, kinds)


def base_of(value: object, kind: type[T]) -> type[T]:
    """Returns ``kind`` or its namesake, whichever is a base of the value's class; ``kind`` if neither is a base."""
    name = path(kind)
    return next((base for base in type(value).__mro__ if path(base) == name), kind)


# ---------------------------------------------------------------------- the trainer


def trainer_of(module: pl.LightningModule) -> Any | None:
    """Returns a module's trainer, or None.

    ``module.trainer`` raises an error without a trainer, for example in a strategy that was connected by hand.
    """
    return module._trainer


def attach_callback(trainer: Any, callback: Any) -> None:
    """Adds a callback to an existing trainer, at the place where the trainer's constructor would have put it.

    Lightning orders callbacks (``ModelCheckpoint`` is last) only in the constructor.
    """
    trainer.callbacks = trainer._callback_connector._reorder_callbacks([*trainer.callbacks, callback])


def skips_backward(trainer: Any) -> bool:
    """Returns True if training steps run without backward.

    ``StochasticWeightAveraging`` lets the loop skip backward while it adapts BatchNorm. There is no public way to ask.
    """
    return bool(trainer.fit_loop._skip_backward)


def accumulates(trainer: Any) -> bool:
    """Returns True if the running training batch only accumulates gradients, and a later batch has the optimizer step.

    The answer depends on ``accumulate_grad_batches`` and on the end of the epoch. The loop's method is private.
    """
    return bool(trainer.fit_loop._should_accumulate())


def barrier_before_batches(trainer: Any, barrier: Callable[[], object] | None) -> None:
    """Makes Lightning's loop call ``barrier``, a collective, before each training batch.

    At this point, the loop broadcasts whether rank 0 has received SIGTERM, and bypasses the strategy. A rank whose epoch is
    longer than rank 0's would wait in that broadcast for ever, or receive the data of another collective.

    Args:
        trainer: the trainer.
        barrier: the collective; None restores Lightning's behaviour.
    """
    loop = trainer.fit_loop.epoch_loop
    name = "_broadcast_sigterm_tensor"
    vars(loop).pop(name, None)
    if barrier is None or not hasattr(loop, name):
        return
    broadcast = getattr(loop, name)

    def together() -> None:
        barrier()
        broadcast()

    vars(loop)[name] = together


def logged_step(trainer: Any) -> int:
    """Returns the step that Lightning gives to loggers: the number of training batches with an optimizer step.

    ``trainer.global_step`` counts the steps of all optimizers: a multiple of this number if there are several.
    """
    return int(trainer.fit_loop.epoch_loop._batches_that_stepped)


def last_checkpoint(trainer: Any) -> str | None:
    """Returns the newest checkpoint that the trainer's callbacks have saved; None without one.

    ``trainer.checkpoint_callback`` is only the first of several callbacks that save checkpoints.
    """
    names = ("last_model_path", "best_model_path")
    found = [getattr(each, name, "") for each in trainer.checkpoint_callbacks for name in names]

    def written(file: str) -> float:
        return Path(file).stat().st_mtime if Path(file).exists() else 0.0  # a remote file counts as the oldest

    return max(filter(None, found), key=written, default=None)


# ---------------------------------------------------------------------- optimizers, files


def is_no_optimizer(optimizer: object) -> bool:
    """Returns True for the mock that replaces the optimizer if ``configure_optimizers`` returns None."""
    return is_a(optimizer, _MockOptimizer)


def wraps_another(io: object) -> bool:
    """Returns True if a ``CheckpointIO`` is a wrapper, for example ``AsyncCheckpointIO``. Its ``checkpoint_io`` is the inner one.

    The base class of Lightning's and users' wrappers is private.
    """
    return is_a(io, _WrappingCheckpointIO)


# ---------------------------------------------------------------------- the strategy


def is_interactive() -> bool:
    """Returns True in a notebook or a prompt, where Lightning cannot start a script again for each device."""
    return bool(_IS_INTERACTIVE)


def set_inherited(kind: type, instance: object, name: str, value: object) -> None:
    """Sets a property with the setter of the base classes of ``kind``: ``super()`` can read properties, but cannot set them.

    Args:
        kind: the class that overrides the property.
        instance: the object whose property is set.
        name: the property's name.
        value: its new value.
    """
    getattr(super(kind, type(instance)), name).__set__(instance, value)


def given_checkpoint_io(strategy: Any) -> Any | None:
    """Returns the ``CheckpointIO`` that a strategy was given, or None. ``strategy.checkpoint_io`` would create one."""
    return strategy._checkpoint_io


def forget_module(strategy: Any) -> None:
    """Makes ``strategy.lightning_module`` None. This property has no setter."""
    strategy._lightning_module = None
