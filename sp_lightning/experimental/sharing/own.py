"""Objects that belong to one trial: they have a state, so two trials that run at the same time cannot share them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from sp_lightning.core.torch_compat.private import tree_leaves


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
