"""A run that begins inside of another one, in the same thread, as a callback does that trains a probe."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sp_lightning import SuperpipelineStrategy
from tests.equality.rows import program, tiers
from tests.support.models import Module, Stack, vectors
from tests.support.runs import loader, superpipeline, trainer_for


class Probe(Module):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-2, momentum=0.9)


class Outer(Module):
    """Trains a probe between two steps, or within one.

    Args:
        where: the hook.
        how: what the probe consists of: a copy of the network, another one, or the network itself and a layer more, which is
            refused within a step. "refused": the program goes on after that; ``Module.cpu`` makes other parameters, as it does
            for a device of another package.
        on: where steps of the probe run.
    """

    def __init__(self, where: str, how: str, on: str = "cpu") -> None:
        super().__init__(Stack(3))
        self.where, self.how, self.on = where, how, on
        self.seen: list[Tensor] = []

    def at(self, where: str, batch_idx: int) -> None:
        if where != self.where or batch_idx != 1:
            return
        net = {
            "copy": lambda: copy.deepcopy(self.net),
            "another": lambda: Stack(2),
            "itself": lambda: nn.Sequential(self.net, nn.Linear(16, 16)),
        }
        probe = Probe(net["itself" if self.how == "refused" else self.how]())
        ours = isinstance(self.trainer.strategy, SuperpipelineStrategy)
        strategy = superpipeline(k=1, optimizer_on=self.on, optimizer_overlap="off") if ours else "auto"
        if self.how == "refused":
            if ours:
                torch.__future__.set_overwrite_module_params_on_conversion(True)
                try:
                    with pytest.raises(ValueError, match="is a weight of another run"):
                        trainer_for(strategy, max_steps=2).fit(probe, loader(vectors(2)))
                finally:
                    torch.__future__.set_overwrite_module_params_on_conversion(False)
            return
        trainer_for(strategy, max_steps=2).fit(probe, loader(vectors(2)))
        self.seen += [p.detach().clone() for p in probe.parameters()]

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.at("start", batch_idx)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.at("step", batch_idx)
        return super().training_step(batch, batch_idx)

    def on_after_backward(self) -> None:
        self.at("after backward", self.trainer.global_step)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.at("end", batch_idx)


for where, how in (
    ("start", "copy"), ("start", "itself"), ("after backward", "copy"), ("after backward", "itself"), ("end", "itself"),
    ("end", "another"), ("step", "copy"), ("step", "another"),
):  # fmt: skip
    covers = "both are what they are on plain Lightning"
    program(f"inner run: {where}, {how}", tiers(long=["keep, k=1"]), covers=covers)(partial(Outer, where, how))
    program(
        f"inner run: {where}, {how}, on the GPU", tiers(rest=["keep, k=1", "forward, accumulated, clipped, two epochs"]),
        covers=covers,
        strategy={"optimizer_on": "gpu"},
    )(partial(Outer, where, how, "gpu"))  # fmt: skip
program(
    "inner run: weights that are in a step", tiers("keep, k=1"), repairable=False, covers="a weight has one run at a time",
    refused={"keep, k=1": "ValueError: 'net.0.stem.weight' of Probe is a weight of another run, .* copy.deepcopy"},
)(partial(Outer, "step", "itself"))  # fmt: skip
program(
    "inner run: refused within a step, which goes on", tiers("keep, k=1"),
    covers="the end of the refused run does not move the weights of the step",
)(partial(Outer, "step", "refused"))  # fmt: skip
program(
    "inner run: the GPU's weights stepped on the host", tiers("keep, k=1"), repairable=False, strategy={"optimizer_on": "gpu"},
    refused={"keep, k=1": r"RuntimeError: .*SGD is not what Outer.configure_optimizers .* on the CPU"},
    covers="the outer run would not see the step",
)(partial(Outer, "end", "itself"))  # fmt: skip
