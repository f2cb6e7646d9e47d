"""gluonts: estimators that train with torch, and the predictors that they give."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import gluonts.torch as estimators
import numpy as np
from gluonts.dataset.common import ListDataset

REQUIRES = ["gluonts[torch]"]

_random = np.random.default_rng(0)
_SERIES = ListDataset([{"start": "2020-01-01", "target": _random.random(100) + 1} for _ in range(4)], freq="D")
_BRIEF = {"prediction_length": 4, "trainer_kwargs": {"max_epochs": 1}, "num_batches_per_epoch": 4, "batch_size": 8}
_HEADS = {"d_model": 16, "nhead": 2, "dim_feedforward": 16, "num_encoder_layers": 2}


def _train(kind: Any, options: dict[str, Any]) -> None:
    predictor = kind(**options, **_BRIEF).train(_SERIES)
    list(predictor.predict(_SERIES))


MODELS: dict[str, Callable[[], None]] = {
    kind.__name__.removesuffix("Estimator"): partial(_train, kind, options)
    for kind, options in (
        (estimators.DeepAREstimator, {"freq": "D", "hidden_size": 8}),
        (estimators.SimpleFeedForwardEstimator, {"hidden_dimensions": [8, 8]}),
        (estimators.TemporalFusionTransformerEstimator, {"freq": "D", "hidden_dim": 8, "num_heads": 2}),
        (estimators.PatchTSTEstimator, {"patch_len": 4, **_HEADS}),
        (estimators.LagTSTEstimator, {"freq": "D", **_HEADS}),
        (estimators.DLinearEstimator, {"hidden_dimension": 8}),
        (estimators.WaveNetEstimator, {"freq": "D", "num_residual_channels": 8, "num_skip_channels": 8}),
        (
            estimators.TiDEEstimator,
            {"freq": "D", "feat_proj_hidden_dim": 4, "encoder_hidden_dim": 8, "decoder_hidden_dim": 8},
        ),
    )
}
