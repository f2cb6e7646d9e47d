"""anomalib: detectors of anomalies in images, the small ones, without the weights that it would download."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import timm
import torch
import torchvision.models._api
from anomalib import models
from anomalib.data import Folder
from anomalib.engine import Engine
from PIL import Image
from torch import nn

REQUIRES = ["anomalib", "timm"]


def _offline() -> None:
    """Weights that would be downloaded are those that the network was made with."""
    load = nn.Module.load_state_dict

    def load_what_is_there(self: nn.Module, state: Any, strict: bool = True, assign: bool = False) -> Any:
        return load(self, state, strict=strict and bool(state), assign=assign)

    changed: Any = nn.Module
    changed.load_state_dict = load_what_is_there
    timm.create_model = partial(_untrained, timm.create_model)
    for module in (torch.hub, torchvision.models._api):
        module.load_state_dict_from_url = lambda *_, **__: {}  # type: ignore[attr-defined]


def _untrained(create: Any, name: str, *args: Any, **options: Any) -> Any:
    return create(name, *args, **{**options, "pretrained": False})


def _images() -> Path:
    folder, random = Path(tempfile.mkdtemp()), np.random.default_rng(0)
    for kind, number in (("good", 8), ("bad", 4)):
        (folder / kind).mkdir()
        for index in range(number):
            Image.fromarray(random.integers(0, 255, (64, 64, 3), dtype=np.uint8)).save(folder / kind / f"{index}.png")
    return folder


def _train(kind: Any, options: dict[str, Any]) -> None:
    data = Folder(
        name="noise", root=_FOLDER, normal_dir="good", abnormal_dir="bad", train_batch_size=4, eval_batch_size=2, num_workers=0,
        test_split_mode="from_dir", val_split_mode="from_test", seed=0,
    )  # fmt: skip
    limits: dict[str, Any] = {f"limit_{loop}_batches": 2 for loop in ("train", "val", "test")}
    with tempfile.TemporaryDirectory() as folder:
        model, engine = kind(**options), Engine(max_epochs=1, default_root_dir=folder, **limits)
        engine.fit(model, datamodule=data)
        engine.test(model, datamodule=data)


_offline()
_FOLDER = _images()
_SMALL = {"backbone": "resnet18", "pre_trained": False}
MODELS: dict[str, Callable[[], None]] = {
    kind.__name__: partial(_train, kind, options)
    for kind, options in (
        (models.Stfpm, {}),
        (models.Padim, {**_SMALL, "layers": ["layer1"], "n_features": 20}),
        (models.Cflow, {**_SMALL, "layers": ["layer2"], "coupling_blocks": 2}),
        (models.Fre, {"pre_trained": False}),
        (models.Ganomaly, {}),
    )
}
