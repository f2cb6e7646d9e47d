"""Records objects that belong to one trial: they have a state, so two trials that run at the same time cannot share them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from sp_lightning.core.torch_compat.private import tree_leaves

_Reference = Callable[[], Any]
"""Returns an object; None after the object was freed."""


class TrialObjects:
    """The objects of one trial. They are compared by identity, so an equal object may belong to another trial."""

    def __init__(self) -> None:
        self._taken: dict[int, _Reference] = {}
        self._trainers: dict[int, tuple[_Reference, _Reference]] = {}  # modules and data modules, each with its trainer

    def take(self, things: Iterable[tuple[str, Any]], others: Iterable[TrialObjects]) -> None:
        """Records objects of the trial. For a plain tensor, records its storage, because several tensors may view one storage.

        Args:
            things: the objects, each with its place in words, for messages.
            others: the objects of the other trials.

        Raises:
            RuntimeError: another trial has the same object or, for a plain tensor (a buffer), the same memory.
        """
        for place, thing in things:
            held = thing.untyped_storage() if type(thing) is Tensor and thing.layout is torch.strided else thing
            # The object is compared as well, because Python may give the id of a freed object to a new one.
            for other in (each for each in others if id(held) in each._taken and each._taken[id(held)]() is held):
                other._keep_trainers()
                raise RuntimeError(
                    f"A {type(thing).__name__} is in two trials of a SharedBase at once: {place}. Make it or copy it in each "
                    "(copy.deepcopy; .clone() of a weight or a buffer): modules with all that is in them, data modules, "
                    "callbacks, loggers, profilers and loaders with a state are each trial's own. Equal weights are shared."
                )
            self._taken[id(held)] = _reference(held)

    def note_trainer(self, trainer: Any, module: nn.Module) -> None:
        """Records a trainer as the trainer of its module and of its data module."""
        for each in (module, getattr(trainer, "datamodule", None)):
            if each is not None:
                self._trainers[id(each)] = _reference(each), _reference(trainer)

    def _keep_trainers(self) -> None:
        """Sets ``trainer`` of this trial's modules again, because Lightning has set it to the trainer of the refused trial."""
        for each, trainer in self._trainers.values():
            if (owner := each()) is not None:
                owner.trainer = trainer()


def _reference(thing: Any) -> _Reference:
    try:
        return weakref.ref(thing)
    except TypeError:  # for example a builtin iterator
        return lambda: thing


def parts(module: nn.Module) -> list[tuple[str, Any]]:
    """Returns the modules, parameters and buffers in a module, each with its name."""
    modules = ((name or "the LightningModule", each) for name, each in module.named_modules())
    return [*modules, *module.named_parameters(), *module.named_buffers()]


def parts_of_trainer(trainer: Any) -> list[tuple[str, Any]]:
    """Returns the objects of a trainer that keep a state of its run, each with the trainer's attribute."""
    one = [(name, getattr(trainer, name, None)) for name in ("datamodule", "profiler", "precision_plugin")]
    some = [(name, each) for name in ("callbacks", "loggers") for each in getattr(trainer, name)]
    return [(f"trainer.{name}", each) for name, each in (*one, *some) if each is not None]


def with_state(loader: Any) -> Iterator[Any]:
    """Yields the parts of a loader that an iteration may change: loaders, data sets, samplers."""
    if not isinstance(loader, DataLoader):
        if not hasattr(loader, "__getitem__"):  # such an object may be its own iterator, whose state is its position
            yield loader
        for each in tree_leaves(getattr(loader, "iterables", ())):  # of a CombinedLoader
            yield from with_state(each)
        return
    if loader.persistent_workers or loader.generator is not None or hasattr(loader, "state_dict"):
        yield loader
    if isinstance(loader.dataset, IterableDataset):
        yield loader.dataset
    batches: Any = loader.batch_sampler
    # A sampler may keep a random state or an epoch. Without ``__getitem__``, it may also be its own iterator. torch's are not.
    for sampler in (loader.sampler, batches, getattr(batches, "sampler", None)):
        known = hasattr(sampler, "__getitem__") or type(sampler).__module__.startswith("torch.")
        stateful = getattr(sampler, "generator", None) is not None or hasattr(sampler, "set_epoch")
        if sampler is not None and (stateful or not known):
            yield sampler
