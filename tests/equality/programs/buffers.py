"""Averages of weights that a module keeps in buffers (latent diffusion's ``LitEma``, retyped), and masks of pruned weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import product
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn.utils import prune

from sp_lightning.core.weights.buffers import AveragesOnDevice
from tests.equality.rows import program, tiers
from tests.support.models import Module, Stack, vectors

UPDATED = ["forward, accumulated, clipped, two epochs, simulated", "backward, accumulated, two epochs, simulated"]
AVERAGES = tiers(rest=[UPDATED[0]], long=[UPDATED[1], "users, k=1, simulated", "keep, k=1"])


class Average(nn.Module):
    """Copies of the trained weights."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.register_buffer("decay", torch.tensor(0.9))
        self.names = {}
        for name, p in model.named_parameters():
            if p.requires_grad:
                self.names[name] = name.replace(".", "")
                self.register_buffer(self.names[name], p.detach().clone())

    def forward(self, model: nn.Module) -> None:
        with torch.no_grad():
            copies = dict(self.named_buffers())
            for name, p in model.named_parameters():
                if p.requires_grad:
                    key = self.names[name]
                    copies[key] = copies[key].type_as(p)
                    copies[key].sub_((1 - self.decay) * (copies[key] - p))

    def copy_to(self, model: nn.Module) -> None:
        copies = dict(self.named_buffers())
        for name, p in model.named_parameters():
            if name in self.names:
                p.data.copy_(copies[self.names[name]].data)


class Penalty(Average):
    """The square of the distance from where training began (L2-SP)."""

    def forward(self, model: nn.Module) -> Tensor:
        pairs = ((p, self.get_buffer(self.names[name])) for name, p in model.named_parameters())
        return torch.stack([(p - start).square().sum() for p, start in pairs]).sum()


class Teacher(Average):
    """A copy of the model that follows it."""

    def forward(self, model: nn.Module, x: Tensor) -> Tensor:
        copies = {name: self.get_buffer(key) for name, key in self.names.items()}
        return torch.func.functional_call(model, copies, (x,))


AFTER: dict[str, Callable[[Any], Any]] = {
    "": lambda average: lambda net: None,
    "call": lambda average: average,
    "method": lambda average: average.forward,
    "both": lambda average: lambda net: (average.forward(net), average(net)),
}


class Diffusion(Module):
    """Averages after each batch, as latent diffusion does, or within the step; validates with both."""

    def __init__(self, within: str) -> None:
        super().__init__(Stack())
        self.average = Average(self.net)
        self.within = within

    @contextmanager
    def averaged(self) -> Iterator[None]:
        own = [p.clone() for p in self.net.parameters()]
        self.average.copy_to(self.net)
        try:
            yield
        finally:
            for kept, p in zip(own, self.net.parameters(), strict=True):
                p.data.copy_(kept.data)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        hidden = self.net(batch)
        AFTER[self.within](self.average)(self.net)
        SENT.append(sum(len(keeper._sent) for keeper in KEEPERS))
        return (hidden + self.net(batch)).square().mean()

    def on_train_batch_end(self, *args: Any) -> None:
        assert not any(keeper._sent for keeper in KEEPERS)
        if not self.within:
            self.average(self.net)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        with self.averaged():
            self.log("averaged", self.loss(batch), batch_size=2)


KEEPERS: list[AveragesOnDevice] = []
SENT: list[int] = []


@contextmanager
def on_another_device() -> Iterator[None]:
    """``cpu:0`` stands for another device than ``cpu``. What a step has sent is back after it."""

    def elsewhere(module: nn.Module, device: torch.device, in_step: Any) -> AveragesOnDevice:
        KEEPERS.append(AveragesOnDevice(module, torch.device("cpu:0"), in_step))
        return KEEPERS[-1]

    SENT.clear()
    with mock.patch("sp_lightning.core.engine.engine.AveragesOnDevice", elsewhere):
        yield
    assert len(KEEPERS) == 1
    assert all(SENT)
    KEEPERS.clear()


def buffers(name: str, variants: Any = AVERAGES, **more: Any) -> Any:
    return program(f"buffers: {name}", variants, **{"validated": True, **more})


for within in AFTER:
    buffers(f"averages {within or 'after each batch'}", covers="copies that a step asks for are the device's")(
        partial(Diffusion, within)
    )
    if within:
        buffers(f"averages on another device, {within}", tiers(rest=["keep, k=1"]), inside=on_another_device,
                covers="what a step has sent is back after it")(partial(Diffusion, within))  # fmt: skip

OTHER = tiers(rest=["simulated, k=1"], long=[UPDATED[1], "recompute, k=1, simulated"])


@buffers("a penalty on the distance from copies", OTHER)
class Penalized(Module):
    """Copies that are only read."""

    def __init__(self) -> None:
        super().__init__(Stack())
        self.start = Penalty(self.net)

    def loss(self, batch: Tensor) -> Tensor:
        return super().loss(batch) + self.start(self.net) * 0.1


@buffers("a teacher of copies", OTHER)
class Taught(Module):
    """Copies that compute in place of the weights."""

    def __init__(self) -> None:
        super().__init__(Stack())
        self.teacher = Teacher(self.net)

    def loss(self, batch: Tensor) -> Tensor:
        with torch.no_grad():
            wanted = self.teacher(self.net, batch)
        return (self.net(batch) - wanted.roll(1, 0)).square().mean()


class Pruned(Module):
    """Prunes before training, writes a mask in place or through ``.data``, prunes once more, makes one pruning permanent."""

    def __init__(self, when: str, *, data: bool = False) -> None:
        super().__init__(Stack())
        self.when, self.data = when, data
        self.linear = [each for each in self.net.modules() if isinstance(each, nn.Linear)]
        for each in self.linear:
            prune.l1_unstructured(each, "weight", 0.3)

    def write(self, row: int) -> None:
        mask: Any = self.linear[1].weight_mask
        with torch.no_grad():
            (mask.data if self.data else mask)[row] = 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.when == "in a step" and batch_idx in (1, 2):
            self.write(batch_idx)
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.when and batch_idx == 0:
            self.write(0)
        if self.when and batch_idx == 1:
            prune.l1_unstructured(self.linear[0], "weight", 0.3)
        if self.when and batch_idx == 2:
            prune.remove(self.linear[2], "weight")


def rows_are_masked(ours: Any) -> None:
    """What a step had written was lost at its end."""
    mask = ours.module.linear[1].weight_mask
    assert not mask[: 3 if ours.module.when == "in a step" else 1].any()


for when, data in product(("between steps", "in a step"), (False, True)):
    buffers(
        f"masks written {when}{' through .data' if data else ''}", tiers(rest=["keep, k=1, simulated"]), validated=False,
        covers="masks are the device's within a step, and the host's after it", batches=partial(vectors, 5),
        also=rows_are_masked,
    )(partial(Pruned, when, data=data))  # fmt: skip
buffers(
    "masks that nobody writes", tiers(rest=["keep, k=1, simulated"], long=["users, k=1, simulated"]), batches=partial(vectors, 5),
    covers="masks are the device's within a step, and the host's after it",
)(partial(Pruned, ""))  # fmt: skip
