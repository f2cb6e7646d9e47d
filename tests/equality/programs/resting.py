"""Predictions with a slot for each layer: layers rest between their calls, and nothing is released or fetched."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.functional import linear

from tests.equality.rows import program, tiers
from tests.support.models import vectors
from tests.support.moments import At
from tests.support.runs import Outcome

EACH = tiers("users' path, k=all, k'=1", rest=["users' path, k=1, k'=1"])


class Between(At):
    """Its code runs in the third of five batches, when the third of four layers is to come. ``kept`` is from before the run."""

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        self.batch = batch_idx
        x = self.net[1](self.net[0](batch))
        self.at("between")
        return self.net[3](self.net[2](x)), [each.clone() for each in self.seen]


def rested(ours: Outcome) -> None:
    strategy: Any = ours.trainer.strategy
    if strategy.plan.k == 99:
        assert strategy.stats().fetched_layers <= 2 * len(strategy.plan.layers)


def between(name: str, also: Callable[[Outcome], None] = rested, **more: Any) -> Any:
    def register(code: Callable[[Any], Any]) -> None:
        program(
            f"prediction: {name}", EACH, on=Between, at="between", run="predict", batches=partial(vectors, 5), also=also,
            covers=code.__doc__ or "", **more,
        )(code)  # fmt: skip

    return register


@between("a weight written in a batch")
def _(m: Any) -> None:
    """The layer has come, and rests on the device."""
    if m.batch == 2:
        m.net[2].second.weight.add_(1)


@between("a weight written in a batch, and read without a call")
def _(m: Any) -> None:
    """The read sees the write."""
    if m.batch == 2:
        m.net[2].second.weight.add_(1)
        m.seen.append(linear(torch.ones(1, 16), m.net[2].second.weight))


@between("a view written in another batch")
def _(m: Any) -> None:
    """The write is to reach the host."""
    if m.batch == 0:
        m.kept.append(m.net[2].second.bias[:])
    if m.batch == 3:
        m.kept[0].add_(1)
    m.seen[:] = [m.net[2].second.bias.clone()]


for dtype in (torch.float32, torch.float64):

    def give(m: Any, dtype: torch.dtype = dtype) -> None:
        """The memory is to reach the host, and to be read from the next batch on."""
        if m.batch == 2:
            m.net[2].second.bias.data = torch.full((16,), 7.0, dtype=dtype)
            m.net[2].second.bias.data = m.net[2].second.bias.data.float()

    between(f"memory that a weight was given, {dtype}")(give)


for name, around in (("", None), (", by hooks that keep weights", saved_tensors_hooks(lambda t: t, lambda t: t))):

    def differentiates(m: Any, around: Any = around) -> None:
        """A prediction may build graphs, too: what it saves is found wherever its layer is."""
        if around is not None and m.batch == 0:
            m.net[0].second.bias.requires_grad_(False)
        with torch.enable_grad():
            x = vectors(1)[0].requires_grad_()
            if around is None:
                y = m.net(x).sum()
            else:
                with around:
                    y = m.net(x).sum()
        m.net[1].first.weight.data.numel()  # whoever has this may write it, so the layer does not rest any more
        weights = [weight for weight in m.net.parameters() if weight.requires_grad]
        m.seen[:] = torch.autograd.grad(y, [x, *weights])

    between(f"a graph that is differentiated{name}", also=lambda ours: None, inference_mode=False)(differentiates)
