"""The ledger has an answer once there are optimizers, and says so before."""

from __future__ import annotations

from typing import Any

import pytest

from sp_lightning import SuperpipelineStrategy
from tests.support.models import Module, Stack, vectors
from tests.support.runs import loader, trainer_for


class Looks(Module):
    """Asks for the ledger while it makes its optimizer, in which it may fail."""

    fails = False

    def __init__(self) -> None:
        super().__init__(Stack())
        self.said: list[str] = []

    def configure_optimizers(self) -> Any:
        strategy: Any = self.trainer.strategy
        with pytest.raises(RuntimeError, match=r"No ledger: only trainer\.fit") as error:
            _ = strategy.ledger
        self.said.append(str(error.value))
        if self.fails:
            raise KeyError("in configure_optimizers")
        return super().configure_optimizers()


def test_there_is_no_ledger_before_optimizers(monkeypatch: pytest.MonkeyPatch) -> None:
    strategy, module = SuperpipelineStrategy(k=1), Looks()
    monkeypatch.setattr(Looks, "fails", True)
    with pytest.raises(KeyError, match="in configure_optimizers"):
        trainer_for(strategy).fit(module, loader(vectors()))
    with pytest.raises(RuntimeError, match=r"No ledger: only trainer\.fit"):
        _ = strategy.ledger
    monkeypatch.setattr(Looks, "fails", False)
    again = SuperpipelineStrategy(k=1)
    trainer_for(again).fit(module, loader(vectors()))
    assert again.ledger.state, "two tensors for each weight"
    assert len(module.said) == 2
