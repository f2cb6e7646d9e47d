"""neuralforecast: all models of one interface, which fits and predicts."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import neuralforecast
import numpy as np
import pandas as pd

REQUIRES = ["neuralforecast"]

_random = np.random.default_rng(0)
_SERIES = pd.concat(
    pd.DataFrame({
        "unique_id": str(number),
        "ds": pd.date_range("2020-01-01", periods=80, freq="D"),
        "y": _random.random(80) + np.sin(np.arange(80)),
    })
    for number in range(3)
)  # fmt: skip
_NEEDS_MORE = ("FEDformer", "xLSTM", "HINT", "AutoNHITS", "TimeLLM")  # eight heads, other packages, a model of models
_SMALL = {
    "hidden_size": 16, "encoder_layers": 2, "decoder_layers": 1, "n_head": 2, "n_heads": 2, "conv_hidden_size": 16,
    "encoder_hidden_size": 16, "decoder_hidden_size": 16, "lstm_hidden_size": 16, "linear_hidden_size": 16, "d_model": 16,
    "d_ff": 16, "top_k": 2, "ff_dim": 16, "patch_len": 8, "e_layers": 1, "n_block": 1, "n_series": 3, "windows_batch_size": 16,
}  # fmt: skip


def _train(kind: Any) -> None:
    known = inspect.signature(kind.__init__).parameters
    options: dict[str, Any] = {name: value for name, value in _SMALL.items() if name in known}
    if "NBEATS" in kind.__name__ or kind.__name__ == "NHITS":
        options["mlp_units"] = [[16, 16]] * 3
    model = kind(h=8, input_size=16, max_steps=4, val_check_steps=2, batch_size=4, **options)
    forecast = neuralforecast.NeuralForecast(models=[model], freq="D")
    forecast.fit(_SERIES, val_size=8)
    forecast.predict()


MODELS: dict[str, Callable[[], None]] = {
    name: partial(_train, kind)
    for name, kind in vars(neuralforecast.models).items()
    if inspect.isclass(kind) and name not in _NEEDS_MORE
}
