"""darts: its forecasting models that torch trains."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from darts import TimeSeries, models
from darts.utils.likelihood_models.torch import GaussianLikelihood, QuantileRegression

REQUIRES = ["darts"]

_VALUES = np.random.default_rng(0).random((100, 2)) + np.sin(np.arange(100))[:, None]
_SERIES = TimeSeries.from_values(_VALUES.astype("float32"))
_EPOCH = {"n_epochs": 1, "batch_size": 16, "random_state": 0}
_WINDOW = {"input_chunk_length": 12, "output_chunk_length": 4, **_EPOCH}
_BLOCKS = {"num_blocks": 1, "num_layers": 2, "layer_widths": 16}
_LSTM = {"model": "LSTM", "hidden_dim": 8, "training_length": 16}
_QUANTILES = QuantileRegression([0.1, 0.5, 0.9])
_DECAYS = {"lr_scheduler_cls": torch.optim.lr_scheduler.ExponentialLR, "lr_scheduler_kwargs": {"gamma": 0.9}}


def _train(kind: Any, options: dict[str, Any]) -> None:
    model = kind(**options)
    model.fit(_SERIES, val_series=_SERIES)
    model.predict(4, series=_SERIES)


MODELS: dict[str, Callable[[], None]] = {
    name: partial(_train, kind, options)
    for name, kind, options in (
        ("RNNModel", models.RNNModel, {"input_chunk_length": 12, **_LSTM, **_EPOCH}),
        ("BlockRNNModel", models.BlockRNNModel, {"model": "GRU", "hidden_dim": 8, "n_rnn_layers": 2, **_WINDOW}),
        ("NBEATSModel", models.NBEATSModel, {"num_stacks": 3, **_BLOCKS, **_WINDOW}),
        ("NBEATSModel, a rate that decays", models.NBEATSModel, {"num_stacks": 2, **_BLOCKS, **_WINDOW, **_DECAYS}),
        ("NHiTSModel", models.NHiTSModel, {"layer_widths": 16, **_WINDOW}),
        ("TCNModel", models.TCNModel, {"num_filters": 4, **_WINDOW}),
        ("TCNModel, Gaussian", models.TCNModel, {"num_filters": 4, "likelihood": GaussianLikelihood(), **_WINDOW}),
        (
            "TransformerModel", models.TransformerModel,
            {"d_model": 16, "nhead": 2, "num_encoder_layers": 2, "num_decoder_layers": 2, "dim_feedforward": 16, **_WINDOW},
        ),
        ("TFTModel", models.TFTModel, {"hidden_size": 8, "add_relative_index": True, **_WINDOW}),
        ("DLinearModel", models.DLinearModel, _WINDOW),
        ("NLinearModel", models.NLinearModel, _WINDOW),
        ("TiDEModel", models.TiDEModel, {"hidden_size": 16, **_WINDOW}),
        ("TiDEModel, quantiles", models.TiDEModel, {"hidden_size": 8, "likelihood": _QUANTILES, **_WINDOW}),
        ("TSMixerModel", models.TSMixerModel, {"hidden_size": 8, "ff_size": 8, "use_reversible_instance_norm": True, **_WINDOW}),
    )
}  # fmt: skip
