"""Runs with updates in the background, and the same runs on plain Lightning."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor

from sp_lightning import SuperpipelineStrategy
from sp_lightning.core.device.device import Device
from sp_lightning.core.layers.layer import StreamedLayer
from sp_lightning.core.updates.background import BackgroundUpdates, _PendingUpdate
from tests.support.models import CASES, Module, Stack
from tests.support.runs import Outcome, fit, fused

OVERLAP = ("forward", "backward")
_plain: dict[Any, Outcome] = {}


def run(name: str, strategy: Any, **options: Any) -> Outcome:
    case = CASES[name]
    if options.get("precision") == "16-mixed":
        options.pop("precision")
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=2)
        options["plugins"] = [MixedPrecision("16-mixed", "cpu", scaler=scaler)]
    convert = {"bf16-true": torch.bfloat16, "16-true": torch.float16}.get(options.get("precision", ""))

    def make() -> pl.LightningModule:
        module = case.make() if name == "sparse-embedding" else fused(case.make)()  # fused takes no sparse gradients
        return module if convert is None else module.to(convert)

    batches = case.batches()
    val = None if any(getattr(batch, "requires_grad", False) for batch in batches) else case.batches()[:2]
    return fit(make, batches, strategy, val=val, recorded="losses", **options)


def plain(name: str, **options: Any) -> Outcome:
    key = (name, *sorted(options.items()))
    if key not in _plain:
        _plain[key] = run(name, "auto", **options)
    return _plain[key]


def overlapping(mode: Any, **options: Any) -> SuperpipelineStrategy:
    return SuperpipelineStrategy(**{"k": 1, "optimizer_overlap": mode, **options})


@contextmanager
def taken_apart() -> Iterator[list[int]]:
    """The layers that are updated by themselves, in order."""
    layers: list[int] = []
    submit = BackgroundUpdates.submit

    def noted(self: BackgroundUpdates, layer: StreamedLayer, work: Callable[[], None], *then: Any) -> None:
        layers.append(layer.index)
        submit(self, layer, work, *then)

    with mock.patch.object(BackgroundUpdates, "submit", noted):
        yield layers


def at_once(self: Device, work: Callable[[], None], urgency: int | None = None) -> Future[None]:
    """In place of the background thread."""
    future: Future[None] = Future()
    work()
    future.set_result(None)
    return future


# ---------------------------------------------------------------------- nobody sees it


class Looks(Module):
    """Looks at everything at once: weights and gradients by old references, state through the optimizer and through Lightning."""

    def __init__(self) -> None:
        super().__init__(Stack())
        self.seen: list[Any] = []
        self.references = [dict(self.named_parameters())["net.head.weight"]]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx:
            self.look(batch_idx)
        return super().training_step(batch, batch_idx)

    def look(self, batch_idx: int) -> None:
        weight = self.references[0]
        optimizer: Any = self.optimizers()
        looks: list[Callable[[], Any]] = [
            lambda: weight.detach().clone(),
            lambda: weight.grad.clone(),
            lambda: weight.data.sum(),
            lambda: [value["exp_avg"].clone() for value in optimizer.state.values()],
            lambda: optimizer.optimizer.state_dict()["state"][3]["exp_avg_sq"].clone(),
            lambda: [p.detach().clone() for p in self.parameters()],
            lambda: torch._foreach_norm([weight]),
        ]
        self.seen.append(looks[batch_idx % len(looks)]())
        assert not issubclass(type(weight), _PendingUpdate)  # within a step it has another role, as a captured weight
