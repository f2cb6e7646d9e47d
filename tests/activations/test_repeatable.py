"""A forward that is run twice sees the second time what it saw the first; what cannot be put back is refused by name."""

from __future__ import annotations

import gc
import sys
import types
import weakref
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn

from tests.support.kernels import Block
from tests.support.models import Module, twice, vectors
from tests.support.runs import assert_same, fit, superpipeline

pytestmark = pytest.mark.usefixtures("everything_is_worth_moving")


class Remembers(Block):
    """Keeps a tensor with its graph, which nobody goes backward through."""

    def factor(self, x: Tensor) -> float:
        self.last = self.inner(x) * 2
        return 1.0


@pytest.mark.long("graphs are looked for in all memory")
@pytest.mark.parametrize("mode", ["recompute", "offload"])
def test_no_graph_keeps_that_of_the_batch_before(mode: Any) -> None:
    alive: list[int] = []
    seen: weakref.WeakSet[Tensor] = weakref.WeakSet()

    class Counts(Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            seen.update(block.last for block in pl_module.net.blocks)
            gc.collect()
            alive.append(len(seen))

    fit(twice(Remembers), vectors(6), superpipeline(activations=mode), callbacks=[Counts()], recorded="losses")
    assert alive[-1] <= alive[1]


# ---------------------------------------------------------------------- forwards of the user's own


@pytest.mark.rest("takes tenths of a second")
def test_pyros_handlers_are_there_for_the_second_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A guide's draws were replayed in the first run; in the second one, in backward, the model drew anew, silently."""
    runtime: Any = types.ModuleType("pyro.poutine.runtime")
    runtime._PYRO_STACK = []
    monkeypatch.setitem(sys.modules, "pyro.poutine.runtime", runtime)

    class Replay:
        """Gives what the guide drew, once for each site, as Pyro's traces do."""

        def __init__(self) -> None:
            self.sites = {number: torch.randn(16) for number in range(4)}
            self.seen: dict[int, Tensor] = {}

        def sample(self, site: int) -> Tensor:
            assert site not in self.seen, "Multiple sample sites"
            self.seen[site] = self.sites[site]
            return self.sites[site]

    class Sampled(Block):
        def __init__(self, site: int) -> None:
            super().__init__()
            self.site = site

        def factor(self, x: Tensor) -> Tensor:
            return runtime._PYRO_STACK[-1].sample(self.site) if runtime._PYRO_STACK else torch.randn(16)

    class Guided(Module):
        def loss(self, batch: Any) -> Tensor:
            runtime._PYRO_STACK.append(Replay())
            try:
                return super().loss(batch)
            finally:
                runtime._PYRO_STACK.pop()

    def make() -> Module:
        return Guided(nn.Sequential(*(Sampled(site) for site in range(4))))

    assert_same(fit(make, vectors(), superpipeline(k=1, activations="recompute")), fit(make, vectors()))
    assert runtime._PYRO_STACK == []
