"""pytorch-forecasting: networks that are made from a data set of series."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pandas as pd
import pytorch_forecasting as forecasting
from pytorch_forecasting.models.timexer import TimeXer

REQUIRES = ["pytorch-forecasting"]

_random = np.random.default_rng(0)
_SERIES = pd.concat(
    pd.DataFrame({
        "time": np.arange(60),
        "series": str(number),
        "value": _random.random(60) + 1,
        "known": _random.random(60),
        "kind": _random.choice(list("abc"), 60),
    })
    for number in range(6)
).reset_index(drop=True)  # fmt: skip
_KNOWN = {"time_varying_known_reals": ["known"]}
_ALL = {**_KNOWN, "time_varying_known_categoricals": ["kind"], "static_categoricals": ["series"]}


def _train(kind: Any, more: dict[str, Any], **options: Any) -> None:
    data = forecasting.TimeSeriesDataSet(
        _SERIES, time_idx="time", target="value", group_ids=["series"], max_encoder_length=12, max_prediction_length=4,
        time_varying_unknown_reals=["value"], **more,
    )  # fmt: skip
    network = kind.from_dataset(data, learning_rate=1e-3, optimizer="adam", **options)
    trained, validated = (data.to_dataloader(train=train, batch_size=8) for train in (True, False))
    trainer = pl.Trainer(max_epochs=1, limit_train_batches=4, limit_val_batches=2, gradient_clip_val=0.1)
    trainer.fit(network, trained, validated)
    network.predict(data.to_dataloader(train=False, batch_size=16), trainer_kwargs={"accelerator": "cpu"})


MODELS: dict[str, Callable[[], None]] = {
    "TemporalFusionTransformer": partial(
        _train, forecasting.TemporalFusionTransformer, _ALL, hidden_size=8, lstm_layers=2
    ),
    "NBeats": partial(_train, forecasting.NBeats, {}, widths=[16, 32]),
    "NBeatsKAN": partial(_train, forecasting.NBeatsKAN, {}, widths=[16, 32]),
    "NHiTS": partial(_train, forecasting.NHiTS, _ALL, hidden_size=16),
    "DeepAR": partial(_train, forecasting.DeepAR, _KNOWN, hidden_size=8, rnn_layers=2),
    "RecurrentNetwork": partial(_train, forecasting.RecurrentNetwork, _ALL, hidden_size=8, cell_type="GRU"),
    "DecoderMLP": partial(_train, forecasting.DecoderMLP, _ALL, hidden_size=8),
    "TiDEModel": partial(_train, forecasting.TiDEModel, _ALL, hidden_size=8),
    "TimeXer": partial(_train, TimeXer, _KNOWN, hidden_size=16, n_heads=2, e_layers=2, d_ff=32, patch_length=4),
}
