"""A forward that is run twice sees the second time what it saw the first; what cannot be put back is refused by name."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from tests.support.kernels import Block
from tests.support.models import twice, vectors
from tests.support.runs import fit, superpipeline

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
