"""Weights of another dtype than their layer's: in checkpoints, and under the lock of arriving gradients."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from sp_lightning.core.engine.backward import Backward
from tests.equality.programs.retyped import routed
from tests.support.models import Module, vectors
from tests.support.runs import assert_equal, assert_same, fit, superpipeline


def batches() -> Any:
    return [batch.to(torch.bfloat16) for batch in vectors(4)]


def stateless() -> Module:
    """Plain's Adam cannot go on: its state is loaded as bfloat16, for the weight before the first forward."""
    module = routed()
    module.configure_optimizers = lambda: torch.optim.SGD(module.parameters(), lr=0.1)  # type: ignore[method-assign]
    return module


@pytest.mark.rest("takes tenths of a second")
def test_checkpoints(tmp_path: Path) -> None:
    ours, plain = tmp_path / "ours.ckpt", tmp_path / "plain.ckpt"
    options: dict[str, Any] = {"precision": "bf16-true", "max_steps": 3}
    fit(stateless, batches(), superpipeline(k=1), **options).trainer.save_checkpoint(ours)
    fit(stateless, batches(), **options).trainer.save_checkpoint(plain)
    saved = torch.load(ours, weights_only=True)["state_dict"]
    assert_equal(saved, torch.load(plain, weights_only=True)["state_dict"], "state_dict")
    assert saved["net.1.classifier.weight"].dtype is torch.float32
    options = {"precision": "bf16-true", "max_steps": 6, "max_epochs": 2}
    resumed = fit(stateless, batches(), superpipeline(k=1), ckpt_path=ours, **options)
    assert_same(resumed, fit(stateless, batches(), ckpt_path=plain, **options))


def test_a_gradient_of_another_dtype_takes_its_weight_back_under_the_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread of autograd might copy back the same weight."""
    owned: list[bool] = []
    arrived: Any = Backward.gradient_arrived

    def watched(backward: Any, *args: Any) -> None:
        write_back = backward.engine.writes.write_back

        def noted(layer: Any) -> None:
            owned.append(backward.engine.lock._is_owned())
            write_back(layer)

        with monkeypatch.context() as patches:
            patches.setattr(backward.engine.writes, "write_back", noted)
            arrived(backward, *args)

    monkeypatch.setattr(Backward, "gradient_arrived", watched)
    fit(routed, vectors(2), superpipeline(k=1, keep_on_gpu=["net.*"]), precision="bf16-true")
    assert owned
    assert all(owned)
