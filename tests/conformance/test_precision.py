"""Precision: all of Lightning's plugins that work on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins import MixedPrecision

from tests.conformance.features import feature
from tests.support.models import CASES
from tests.support.runs import fused, loader
from tests.support.tiers import first
from tests.support.ways import EVERY, LATE, RunVariant, Seen, compare, files, left


def in_precision(precision: str, make: Callable[[], pl.LightningModule]) -> Callable[[], pl.LightningModule]:
    """Made in it; AdamW's ``eps`` is none in float16."""
    kind = {"bf16-true": torch.bfloat16, "16-true": torch.float16, "64-true": torch.float64}.get(precision)
    if kind is None:
        return make

    def made() -> pl.LightningModule:
        module = make().to(kind)
        configure: Any = module.configure_optimizers

        def configured() -> Any:
            optimizer = configure()
            optimizer.param_groups[0]["eps"] = 1e-3
            return optimizer

        module.configure_optimizers = configured  # type: ignore[method-assign]
        return module

    return made


PRECISIONS = ("32-true", "bf16-mixed", "16-mixed", "bf16-true", "16-true", "64-true")


@pytest.mark.long("takes a second or more")
@feature("Precision", *(f"`{precision}`" for precision in PRECISIONS))
@pytest.mark.parametrize("name", first(["stack", "llama-dropout"], "stack", why="a larger model"))
@pytest.mark.parametrize("precision", PRECISIONS)
def test_precision(precision: str, name: str, tmp_path: Path) -> None:
    case = CASES[name]

    def run(way: RunVariant) -> Seen:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=2)
        options: dict[str, Any] = (
            {"plugins": [MixedPrecision("16-mixed", "cpu", scaler=scaler)]}
            if precision == "16-mixed"
            else {"precision": precision}
        )
        saver = ModelCheckpoint(way.folder, "one", every_n_train_steps=4)
        dtypes: list[str] = []
        options |= {"callbacks": [saver], "enable_checkpointing": True, "max_epochs": 2}
        trainer = way.trainer(**options)
        with trainer.init_module():
            module = in_precision(precision, fused(case.make))()
        module.net.register_forward_hook(
            lambda _, args, kwargs, output: dtypes.append(str(getattr(output, "logits", output).dtype)),
            with_kwargs=True,
        )
        trainer.fit(module, loader(case.batches()), loader(case.batches()[:1]))
        predicted = trainer.predict(module, loader(case.batches()[:1]))
        return {**left(trainer), "dtypes": dtypes, "predicted": predicted, "files": files(way.folder)}

    overlaps = LATE if precision == "16-mixed" else EVERY
    seen = compare(run, tmp_path, overlaps)
    wanted = {"32": "torch.float32", "bf16": "torch.bfloat16", "16": "torch.float16", "64": "torch.float64"}
    assert set(seen["dtypes"]) == {wanted[precision.split("-")[0]]}
    assert all(value.isfinite().all() for value in seen["state"].values())
    assert seen["files"]
