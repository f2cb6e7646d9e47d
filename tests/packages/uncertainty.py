"""torch-uncertainty: routines around networks, ensembles of them and their averages."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch_uncertainty import TUTrainer, methods, routines
from torch_uncertainty.models import classification
from torch_uncertainty.transforms import RepeatTarget

REQUIRES = ["torch-uncertainty"]

_IMAGES, _CLASSES, _PIXELS = torch.randn(16, 3, 32, 32), torch.randint(0, 4, (16,)), torch.randint(0, 3, (16, 32, 32))


def _small() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, 2, 1), nn.Dropout(0.2), nn.ReLU(),
        nn.Flatten(), nn.Linear(512, 4),
    )  # fmt: skip


def _segments() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3, 1, 1), nn.ReLU(), nn.Conv2d(8, 3, 1))


def _train(make: Callable[[], nn.Module], routine: Any, targets: Any, classes: int, **options: Any) -> None:
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    trained = routine(model=model, num_classes=classes, loss=nn.CrossEntropyLoss(), optim_recipe=optimizer, **options)
    loader: Any = DataLoader(TensorDataset(_IMAGES, targets), batch_size=4)
    trainer = TUTrainer(max_epochs=1, enable_checkpointing=False)
    trainer.fit(trained, loader, loader)
    trainer.test(trained, loader)


def _classify(make: Callable[[], nn.Module], **options: Any) -> Callable[[], None]:
    return partial(_train, make, routines.ClassificationRoutine, _CLASSES, 4, **options)


def _residual(kind: Any, **options: Any) -> Callable[[], nn.Module]:
    return partial(kind, arch=18, in_channels=3, num_classes=4, style="cifar", **options)


_TWO = {"is_ensemble": True, "format_batch_fn": RepeatTarget(2)}
MODELS: dict[str, Callable[[], None]] = {
    "ResNet": _classify(_residual(classification.resnet)),
    "packed ResNet": _classify(_residual(classification.packed_resnet, num_estimators=2, alpha=2, gamma=1), **_TWO),
    "Monte Carlo dropout": _classify(lambda: methods.mc_dropout(_small(), num_estimators=3), is_ensemble=True),
    "deep ensemble": _classify(lambda: methods.deep_ensembles([_small(), _small()]), **_TWO),
    "EMA": _classify(lambda: methods.EMA(_small(), momentum=0.9)),
    "SWA": _classify(lambda: methods.SWA(_small(), cycle_start=0, cycle_length=1)),
    "SWAG": _classify(lambda: methods.SWAG(_small(), cycle_start=0, cycle_length=1)),
    "segmentation": partial(_train, _segments, routines.SegmentationRoutine, _PIXELS, 3),
}
