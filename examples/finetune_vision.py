"""Fine-tune an image classifier that is larger than the GPU's memory. Copy it with common.py.

    python examples/finetune_vision.py                              # a small ViT on small images, without downloads
    python examples/finetune_vision.py --model vit_gigantic_patch14_clip_224.laion2b --data photos --lr 1e-5 \\
        --batch-size 64 --accumulate-grad-batches 2                 # every weight of 1.8 B, on a 24 GB card
    python examples/finetune_vision.py --model google/vit-huge-patch14-224-in21k --data photos --head-only
    python examples/finetune_vision.py --augment strong --mixup 0.2 --ema 0.999
    python examples/finetune_vision.py --resume                     # or --dial, or --strategy auto (plain Lightning)

``--data`` is a folder with a folder of images for each class. One image in ten is for validation, unless the folder has
two folders ``train`` and ``val`` with the folders of classes. ``--model`` is a name of timm, or a model of transformers.

Time and memory of the second command on a 24 GB card, *estimated* for 100 TFLOP/s and 25 GB/s over PCIe:

    superpipeline plan timm.models.vision_transformer:vit_gigantic_patch14_clip_224 --input 64 3 224 224 \\
        --activations recompute --gradient-clip norm --accumulate-grad-batches 2 --gpu-memory 22GiB --host-memory 62GiB
        # 3.21 s per batch, 19.9 samples/s, device memory 6.7 GiB, host memory 31.3 GiB

(``--activations recompute`` stands for the model's own gradient checkpointing, which ``plan`` cannot turn on in a model
of timm.) Smaller models, up to ViT-g with 1.0 B, fit such a card without this strategy (*estimated*): use ``--strategy auto``.
"""

from __future__ import annotations

import argparse
import copy
import difflib
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import common

EXAMPLE = "vit_base_patch16_224.augreg_in21k"


def parse(argv: Sequence[str] | None = None) -> Any:
    parser = common.training_options(
        __doc__,
        "finetune_vision",
        model="name of timm, or hub name or folder of transformers (default: a small ViT, random weights)",
        data="folder of class folders (default: scikit-learn's handwritten digits)",
        lr="1e-3 with --head-only, 2e-5 with --model, else 1e-3",
        batch_size=32,
        epochs=5,
        rows="images",
        without=["--steps", "--validate-every", "--lora"],  # an epoch ends with a validation and a checkpoint
    )
    add = parser.add_argument
    add("--pretrained", action=argparse.BooleanOptionalAction, default=True, help="the weights of --model (on)")
    add("--head-only", action="store_true", help="train the classifier on top, and no other weights")
    add("--augment", default="light", choices=["off", "light", "strong"], help="crops and flips, and colours (light)")
    add("--flip", action=argparse.BooleanOptionalAction, help="mirror images (on; off for the default data: digits)")
    add("--mixup", type=float, metavar="ALPHA", help="mix each image with another one, for example 0.2 (off)")
    add("--ema", type=float, metavar="DECAY", help="average the weights, for example 0.999 (off); 4 bytes per weight")
    options = common.read_options(parser, argv)
    if options.head_only and not options.model:
        options.error(f"--head-only: needs --model. For example: --model {EXAMPLE}")
    return options


if __name__ == "__main__":
    parse()  # reports wrong options before the slow imports that follow; main() reads them again

import lightning.pytorch as pl
import timm
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging
from timm.models import save_for_hf
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader
from torchvision.transforms import v2
from transformers import AutoConfig, AutoImageProcessor, AutoModelForImageClassification
from transformers import get_cosine_schedule_with_warmup as cosine_with_warmup

from sp_lightning import SuperpipelineStrategy


class Classifier(pl.LightningModule):
    """Plain Lightning: only ``Trainer(strategy=...)`` decides where the layers are."""

    def __init__(
        self, model: Any, lr: float = 1e-3, classes: int = 10, mixup: float | None = None, seed: int = 0
    ) -> None:
        super().__init__()
        self.model, self.lr, self.seed = model, lr, seed
        self.mix = v2.MixUp(alpha=mixup, num_classes=classes) if mixup else None

    def forward(self, images: Tensor) -> Tensor:
        output = self.model(images)
        return getattr(output, "logits", output).float()  # models of timm return the logits themselves

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        # For mixup and dropout: each batch has its own seed, so that a resumed run draws the same random numbers.
        torch.manual_seed(hash((self.seed, self.current_epoch, batch_idx)))
        images, labels = self.mix(*batch) if self.mix else batch
        loss = F.cross_entropy(self(images), labels)
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        images, labels = batch
        logits = self(images)
        self.log("val_loss", F.cross_entropy(logits, labels), batch_size=len(labels))
        self.log("accuracy", (logits.argmax(1) == labels).float().mean(), batch_size=len(labels))

    def configure_optimizers(self) -> Any:
        trained = [p for p in self.parameters() if p.requires_grad]
        groups = [
            {"params": [p for p in trained if p.ndim > 1], "weight_decay": 0.05},
            {"params": [p for p in trained if p.ndim <= 1], "weight_decay": 0.0},  # biases and norms
        ]
        optimizer = torch.optim.AdamW(groups, lr=self.lr)
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = cosine_with_warmup(optimizer, steps // 20, steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Images(pl.LightningDataModule):
    """The images of a folder, in batches. The model decides about ``size``, ``mean`` and ``std``."""

    def __init__(
        self, data: Path | None = None, size: int = 32, mean: Sequence[float] = (0.5,) * 3, std: Sequence[float] = (0.5,) * 3,
        *, batch_size: int = 64, augment: str = "light", flip: bool | None = None, workers: int = 0, seed: int = 0,
    ) -> None:  # fmt: skip
        super().__init__()
        self.size, self.mean, self.std, self.batch_size, self.workers = size, mean, std, batch_size, workers
        self.seed, self.augment, self.flip = seed, augment, data is not None if flip is None else flip
        data = data or common.write_digits(Path("runs/digits"))
        if (data / "train").is_dir() and (data / "val").is_dir():
            self.training, self.validation = common.read_folder(data / "train"), common.read_folder(data / "val")
            if self.training.classes != self.validation.classes:
                differing = sorted({*self.training.classes} ^ {*self.validation.classes})
                raise ValueError(f"--data {data}: train and val have different classes: {', '.join(differing)}")
        else:
            self.training, self.validation = common.read_folder(data), common.read_folder(data)
            samples = self.training.samples
            self.training.samples = [sample for i, sample in enumerate(samples) if i % 10]
            self.validation.samples = samples[::10]
        self.classes = self.training.classes
        if (count := len(self.training)) < batch_size:
            raise ValueError(
                f"--data {data}: found {count} images for training. Expected at least --batch-size {batch_size}. "
                f"For example: --batch-size {count}"
            )

    def train_dataloader(self) -> DataLoader[Any]:
        random: list[Any] = [v2.RandomResizedCrop(self.size, (0.5, 1.0), interpolation=v2.InterpolationMode.BICUBIC)]
        random += [v2.RandomHorizontalFlip()] if self.flip else []
        random += [v2.TrivialAugmentWide()] if self.augment == "strong" else []
        self.training.transform = v2.Compose([*(random if self.augment != "off" else self.centre()), *self.tensor()])
        training: Any = common.Seeded(self.training)
        order = common.Shuffled(len(self.training), self.seed)
        return DataLoader(training, self.batch_size, sampler=order, drop_last=True, num_workers=self.workers)

    def val_dataloader(self) -> DataLoader[Any]:
        self.validation.transform = v2.Compose([*self.centre(), *self.tensor()])
        return DataLoader(self.validation, self.batch_size, num_workers=self.workers)

    def centre(self) -> list[Any]:
        return [v2.Resize(self.size, v2.InterpolationMode.BICUBIC), v2.CenterCrop(self.size)]

    def tensor(self) -> list[Any]:
        return [v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(self.mean, self.std)]


def load_model(model: str | None, classes: int, pretrained: bool = True) -> tuple[Any, int, Any, Any]:
    """The model on the CPU, with a head for ``classes``; the size, mean and standard deviation of its images."""
    file = Path(model or "") / "config.json"
    saved_by_timm = bool(model) and file.is_file() and "architecture" in json.loads(file.read_text())
    if model is None or saved_by_timm or ("/" not in model and not Path(model).exists()):
        try:
            name, how = f"local-dir:{model}" if saved_by_timm else str(model), {"num_classes": classes}
            net = timm.create_model(name, pretrained=pretrained, **how) if model else common.small_vit(classes)
        except RuntimeError as error:
            similar = difflib.get_close_matches(str(model), timm.list_models(pretrained=True)) or [EXAMPLE]
            example = f"For example: {' or '.join(similar)}. Models of transformers have two names: OWNER/NAME"
            raise ValueError(f"--model {model}: timm: {error}. {example}") from error
        expected = timm.data.resolve_model_data_config(net)
        return net, expected["input_size"][-1], expected["mean"], expected["std"]
    if Path(model).exists() and not file.is_file():
        raise ValueError(f"--model {model}: expected a folder with config.json, or a name")
    processor = AutoImageProcessor.from_pretrained(model)
    size = processor.crop_size if getattr(processor, "do_center_crop", None) else processor.size
    options: Any = {"num_labels": classes, "dtype": torch.float32}
    if pretrained:  # a head for another number of classes is replaced
        net = AutoModelForImageClassification.from_pretrained(model, ignore_mismatched_sizes=True, **options)
    else:
        net = AutoModelForImageClassification.from_config(AutoConfig.from_pretrained(model, **options))
    return net, size.get("height") or size["shortest_edge"], processor.image_mean, processor.image_std


def freeze(model: Any) -> None:
    """All weights except the classifier's."""
    if hasattr(model, "get_classifier"):  # of timm
        model.requires_grad_(False)
        model.get_classifier().requires_grad_(True)
    else:
        model.base_model.requires_grad_(False)


def checkpoint_activations(model: Any) -> None:
    try:
        if hasattr(model, "set_grad_checkpointing"):  # of timm
            model.set_grad_checkpointing(True)
        else:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    except (AssertionError, ValueError) as error:
        raise ValueError(f"--model: no gradient checkpointing ({error}). Add --no-gradient-checkpointing") from error


def main(argv: Sequence[str] | None = None) -> Classifier:
    options = parse(argv)
    common.prepare(options)
    with common.errors_in_the_input(options):  # before any work
        # Other options: keep_on_gpu, k, optimizer_on, ... (examples/guide/options.md)
        ours = SuperpipelineStrategy(
            gpu_memory=options.gpu_memory, host_memory=options.host_memory, disk=options.disk,
            optimizer_overlap=options.optimizer_overlap,
        )  # fmt: skip
        done = torch.load(options.resume, mmap=True)["epoch"] + 1 if options.resume else 0
        if done >= options.epochs:
            example = f"For example: --epochs {2 * done}"
            raise ValueError(f"--resume {options.resume}: has {done} of {options.epochs} epochs. {example}")
        names = ("batch_size", "augment", "flip", "workers", "seed")
        data = Path(options.data) if options.data else None
        images = Images(data, **{name: getattr(options, name) for name in names})
        classes = len(images.classes)
        model, images.size, images.mean, images.std = load_model(options.model, classes, options.pretrained)
        if options.head_only:
            freeze(model)
        elif options.gradient_checkpointing:
            checkpoint_activations(model)
    lr = options.lr or (1e-3 if options.head_only else 2e-5 if options.model else 1e-3)
    module = Classifier(model.train(), lr, classes, options.mixup, options.seed)
    if options.dial:
        print(common.measure(options, lambda: copy.deepcopy(module), images))
        return module
    common.check_resume(options, module)
    average = [EMAWeightAveraging(device="cpu", decay=options.ema)] if options.ema else []
    outputs = common.outputs(options, average, each_epoch=True)
    strategy = "auto" if options.strategy == "auto" else ours  # auto is plain Lightning
    trainer = pl.Trainer(strategy=strategy, devices=1, max_epochs=options.epochs, **common.settings(options), **outputs)
    print(
        f"{len(images.training):,} images of {classes} classes, {len(images.validation):,} for validation.", flush=True
    )
    begin = time.perf_counter()
    trainer.fit(module, datamodule=images, ckpt_path=options.resume)
    speed = (options.epochs - done) * len(images.training) / (time.perf_counter() - begin)

    saved = options.output / "model"
    if hasattr(model, "save_pretrained"):  # of transformers
        model.config.id2label = dict(enumerate(images.classes))
        model.save_pretrained(saved)
        AutoImageProcessor.from_pretrained(options.model).save_pretrained(saved)
        load = f'AutoModelForImageClassification.from_pretrained("{saved}")'
    else:
        save_for_hf(model, str(saved), model_config={"label_names": images.classes}, safe_serialization=True)
        load = f'timm.create_model("local-dir:{saved}", pretrained=True)'
    print(f"{speed:,.0f} images per second, with validation. Saved: {saved}. To load: {load}")
    print(f"To continue, repeat the command with --resume --epochs {2 * options.epochs}.")
    return module


if __name__ == "__main__":
    main()
