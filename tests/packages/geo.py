"""torchgeo: its trainers for images, of every task."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torchgeo import trainers

REQUIRES = ["torchgeo", "pycocotools"]

Sample = dict[str, Tensor]


class Samples(Dataset[Sample]):
    def __init__(self, make: Callable[[], Sample]) -> None:
        self.make = make

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Sample:
        torch.manual_seed(index)
        return self.make()


class Data(pl.LightningDataModule):
    """The same samples in all loops."""

    def __init__(self, make: Callable[[], Sample], collate: Callable[[Any], Any] | None) -> None:
        super().__init__()
        self.make, self.collate = make, collate

    def loader(self) -> Any:
        return DataLoader(Samples(self.make), batch_size=4, collate_fn=self.collate)

    train_dataloader = val_dataloader = test_dataloader = predict_dataloader = loader


def _train(
    kind: Any,
    options: dict[str, Any],
    make: Callable[[], Sample],
    loops: tuple[str, ...] = ("fit",),
    collate: Any = None,
) -> None:
    limits: dict[str, Any] = {f"limit_{loop}_batches": 1 for loop in ("val", "test", "predict")}
    trainer, task, data = (
        pl.Trainer(max_epochs=1, limit_train_batches=2, **limits),
        kind(in_channels=3, **options),
        Data(make, collate),
    )
    for loop in loops:
        getattr(trainer, loop)(task, datamodule=data)


def _image(size: int = 64, **more: Tensor) -> Sample:
    return {"image": torch.rand(3, size, size), **more}


def _label(size: int = 64) -> Sample:
    return _image(size, label=torch.randint(0, 4, ()))


def _labels() -> Sample:
    return _image(label=torch.randint(0, 2, (4,)))


def _number() -> Sample:
    return _image(label=torch.rand(1))


def _mask(size: int = 64) -> Sample:
    return _image(size, mask=torch.randint(0, 3, (size, size)))


def _heights() -> Sample:
    return _image(mask=torch.rand(64, 64))


def _change() -> Sample:
    return {"image": torch.rand(2, 3, 64, 64), "mask": torch.randint(0, 2, (1, 64, 64))}


def _boxes() -> Sample:
    boxes = torch.tensor([[4.0, 4.0, 30.0, 30.0], [10.0, 12.0, 50.0, 40.0]])
    masks = torch.randint(0, 2, (2, 64, 64)).to(torch.uint8)
    return _image(bbox_xyxy=boxes, label=torch.randint(1, 3, (2,)), mask=masks)


def _together(samples: list[Sample]) -> dict[str, Any]:
    lists = {key: [each[key] for each in samples] for key in ("bbox_xyxy", "label", "mask")}
    return {"image": torch.stack([each["image"] for each in samples]), **lists}


ALL = ("fit", "test", "predict")
_SEGMENTATION, _DETECTION = trainers.SemanticSegmentationTask, trainers.ObjectDetectionTask
_CLASSES = {"task": "multiclass", "num_classes": 4}
_SEGMENTS = {"task": "multiclass", "num_classes": 3}
_RESNET = {"model": "resnet18"}
_UNET = {"model": "unet", "backbone": "resnet18"}
_HEAD = {"hidden_dim": 16, "output_dim": 8, "size": 64, "layers": 2}
_BANK = {"memory_bank_size": 16, "gather_distributed": False}
MODELS: dict[str, Callable[[], None]] = {
    "classification, ResNet": partial(_train, trainers.ClassificationTask, {**_RESNET, **_CLASSES}, _label, ALL),
    "classification, ViT": partial(
        _train, trainers.ClassificationTask, {"model": "vit_tiny_patch16_224", **_CLASSES}, partial(_label, 224), ALL
    ),
    "several labels": partial(
        _train, trainers.ClassificationTask, {**_RESNET, "task": "multilabel", "num_labels": 4, "loss": "bce"}, _labels, ALL
    ),
    "regression": partial(_train, trainers.RegressionTask, {**_RESNET, "num_outputs": 1}, _number, ALL),
    **{
        f"segmentation, {model}": partial(
            _train, _SEGMENTATION, {"model": model, "backbone": "resnet18", "num_filters": 8, **_SEGMENTS}, _mask, ALL
        )
        for model in ("unet", "deeplabv3+", "fcn", "segformer", "upernet")
    },
    "segmentation, frozen backbone": partial(
        _train, _SEGMENTATION, {**_UNET, **_SEGMENTS, "freeze_backbone": True}, _mask, ALL
    ),
    "segmentation, dpt": partial(
        _train, _SEGMENTATION, {"model": "dpt", "backbone": "tu-vit_tiny_patch16_224", **_SEGMENTS},
        partial(_mask, 224), ALL,
    ),
    "regression of pixels": partial(_train, trainers.PixelwiseRegressionTask, _UNET, _heights, ALL),
    "change detection": partial(_train, trainers.ChangeDetectionTask, _UNET, _change),
    **{
        f"detection, {model}": partial(
            _train, _DETECTION, {"model": model, "backbone": "resnet18", "num_classes": 3}, _boxes, collate=_together
        )
        for model in ("faster-rcnn", "fcos", "retinanet")
    },
    "instances, mask-rcnn": partial(
        _train, trainers.InstanceSegmentationTask, {"model": "mask-rcnn", "backbone": "resnet50", "num_classes": 3}, _boxes,
        collate=_together,
    ),
    "SimCLR": partial(_train, trainers.SimCLRTask, {**_RESNET, "version": 1, **_HEAD}, _image),
    "BYOL": partial(_train, trainers.BYOLTask, _RESNET, partial(_image, 224)),
    "MoCo 2": partial(
        _train, trainers.MoCoTask, {**_RESNET, "version": 2, **_BANK, **_HEAD},
        _image,
    ),
}  # fmt: skip
