"""Fine-tune an image classifier that is larger than the GPU's memory. One file, to copy and to change.

    python examples/finetune_vision.py                              # a small ViT on small images, without downloads
    python examples/finetune_vision.py --model vit_gigantic_patch14_clip_224.laion2b --data photos --lr 1e-5 \\
        --batch-size 64 --accumulate-grad-batches 2                 # every weight of 1.8 B, on a 24 GB card
    python examples/finetune_vision.py --model google/vit-huge-patch14-224-in21k --data photos --head-only
    python examples/finetune_vision.py --augment strong --mixup 0.2 --ema 0.999
    python examples/finetune_vision.py --resume runs/finetune_vision/last.ckpt    # continue an interrupted run
    python examples/finetune_vision.py --strategy auto              # plain Lightning, for comparison
    python examples/finetune_vision.py --dial                       # memory and time of k and k', measured

``--data`` is a folder with a folder of images for each class. One image in ten is for validation, unless the folder has
two folders ``train`` and ``val`` with the folders of classes. ``--model`` is a name of timm, or a model of transformers.

Time and memory of the second command on a 24 GB card, *estimated* for 100 TFLOP/s and 25 GB/s over PCIe:

    python -m sp_lightning plan timm.models.vision_transformer:vit_gigantic_patch14_clip_224 --input 64 3 224 224 \\
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
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

EXAMPLE = "vit_base_patch16_224.augreg_in21k"

# ---------------------------------------------------------------------- options


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    add = parser.add_argument
    add("--model", help="name of timm, or hub name or folder of transformers (default: a small ViT, random weights)")
    add("--pretrained", action=argparse.BooleanOptionalAction, default=True, help="the weights of --model (on)")
    add("--data", type=Path, help="folder of class folders (default: scikit-learn's handwritten digits)")
    add("--head-only", action="store_true", help="train the classifier on top, and no other weights")
    add("--augment", default="light", choices=["off", "light", "strong"], help="crops and flips, and colours (light)")
    add("--flip", action=argparse.BooleanOptionalAction, help="mirror images (on; off for the default data: digits)")
    add("--mixup", type=float, metavar="ALPHA", help="mix each image with another one, for example 0.2 (off)")
    add("--ema", type=float, metavar="DECAY", help="average the weights, for example 0.999 (off); 4 bytes per weight")
    add("--epochs", type=int, default=5, help="passes over the images; with --resume, including earlier (%(default)s)")
    add("--batch-size", type=int, default=32, help="images per batch (%(default)s)")
    add("--accumulate-grad-batches", type=int, default=1, help="batches per optimizer step (%(default)s)")
    add("--lr", type=float, help="peak learning rate (default: 1e-3 with --head-only, 2e-5 with --model, else 1e-3)")
    add("--gradient-checkpointing", action=argparse.BooleanOptionalAction, default=True, help="the model's own (on)")
    add("--precision", default="bf16-mixed", choices=["bf16-mixed", "bf16-true", "32-true"], help="(%(default)s)")
    add("--strategy", default="superpipeline", choices=["superpipeline", "auto"], help="auto is plain (%(default)s)")
    add("--gpu-memory", help="at most, for example 16GiB (default: free memory)")
    add("--accelerator", default="auto", help="as in Lightning (%(default)s)")
    add("--workers", type=int, default=0, help="processes that read images (%(default)s)")
    add("--dial", action="store_true", help="in place of the run, measure memory and time for some k and k'")
    add("--seed", type=int, default=0, help="(%(default)s)")
    add("--resume", type=Path, help="last.ckpt of a run with the same options")
    add("--output", type=Path, default=Path("runs/finetune_vision"), help="(%(default)s)")
    return parser


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Reads the options, and reports errors that show without a model."""
    parser = make_parser()
    options = parser.parse_args(argv)
    for name in ("epochs", "batch_size", "accumulate_grad_batches", "lr", "mixup", "ema"):
        value = getattr(options, name)
        if value is not None and value <= 0:
            parser.error(f"--{name.replace('_', '-')} {value}: expected a number above 0")
    if options.ema is not None and options.ema >= 1:
        parser.error(f"--ema {options.ema}: expected a decay between 0 and 1. For example: --ema 0.999")
    if options.head_only and not options.model:
        parser.error(f"--head-only: needs --model. For example: --model {EXAMPLE}")
    if options.data and not options.data.is_dir():
        parser.error(f"--data {options.data}: not a folder. Expected a folder with a folder of images for each class")
    if options.resume and not options.resume.is_file():
        parser.error(f"--resume {options.resume}: not a file. Expected last.ckpt of an earlier run")
    if options.output.is_file():
        parser.error(f"--output {options.output}: expected a folder, got a file")
    return options


if __name__ == "__main__":
    parse()  # reports wrong options before the slow imports that follow; main() reads them again

import lightning.pytorch as pl
import timm
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from PIL import Image
from timm.models import save_for_hf
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, Sampler
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2
from transformers import AutoConfig, AutoImageProcessor, AutoModelForImageClassification
from transformers import get_cosine_schedule_with_warmup as cosine_with_warmup

from sp_lightning import SuperpipelineStrategy, dial

DIGITS = Path("runs/digits")

# ---------------------------------------------------------------------- training


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

    def on_validation_epoch_end(self) -> None:
        values = sorted(self.trainer.callback_metrics.items())
        print(f"step {self.global_step}", *(f" {name} {value:.3f}" for name, value in values), flush=True)

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


# ---------------------------------------------------------------------- data


class Images(pl.LightningDataModule):
    """The images of a folder, in batches. The model decides about ``size``, ``mean`` and ``std``."""

    def __init__(
        self, data: Path | None = None, size: int = 32, mean: Sequence[float] = (0.5,) * 3, std: Sequence[float] = (0.5,) * 3,
        *, batch_size: int = 64, augment: str = "light", flip: bool | None = None, workers: int = 0, seed: int = 0,
    ) -> None:  # fmt: skip
        super().__init__()
        self.size, self.mean, self.std, self.batch_size, self.workers = size, mean, std, batch_size, workers
        self.seed, self.augment, self.flip = seed, augment, data is not None if flip is None else flip
        data = data or write_digits(DIGITS)
        if (data / "train").is_dir() and (data / "val").is_dir():
            self.training, self.validation = read_folder(data / "train"), read_folder(data / "val")
            if self.training.classes != self.validation.classes:
                differing = sorted({*self.training.classes} ^ {*self.validation.classes})
                raise ValueError(f"--data {data}: train and val have different classes: {', '.join(differing)}")
        else:
            self.training, self.validation = read_folder(data), read_folder(data)
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
        training, order = Seeded(self.training), Shuffled(len(self.training), self.seed)
        return DataLoader(training, self.batch_size, sampler=order, drop_last=True, num_workers=self.workers)

    def val_dataloader(self) -> DataLoader[Any]:
        self.validation.transform = v2.Compose([*self.centre(), *self.tensor()])
        return DataLoader(self.validation, self.batch_size, num_workers=self.workers)

    def centre(self) -> list[Any]:
        return [v2.Resize(self.size, v2.InterpolationMode.BICUBIC), v2.CenterCrop(self.size)]

    def tensor(self) -> list[Any]:
        return [v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(self.mean, self.std)]


class Shuffled(Sampler[tuple[int, int]]):
    """The images of an epoch in random order, each with a seed for its augmentation: the same if the run is resumed."""

    def __init__(self, count: int, seed: int) -> None:
        self.count, self.seed, self.epoch = count, seed, 0

    def set_epoch(self, epoch: int) -> None:  # called by Lightning
        self.epoch = epoch

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[tuple[int, int]]:
        random = torch.Generator().manual_seed(1_000_000 * self.seed + self.epoch)
        seeds = torch.randint(2**60, (self.count,), generator=random)
        return zip(torch.randperm(self.count, generator=random).tolist(), seeds.tolist(), strict=True)


class Seeded(Dataset[tuple[Tensor, int]]):
    """Images with the augmentations of given seeds."""

    def __init__(self, images: Any) -> None:
        self.images = images

    def __getitem__(self, item: tuple[int, int]) -> tuple[Tensor, int]:
        index, seed = item
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            return self.images[index]


def read_folder(folder: Path) -> Any:
    try:
        images = ImageFolder(folder)
    except FileNotFoundError as error:
        raise ValueError(f"--data {folder}: {error}. Expected a folder of images for each class") from error
    if len(images.classes) < 2:
        raise ValueError(f"--data {folder}: found one class, {images.classes[0]}. Expected two or more folders")
    for file, _ in images.samples:
        try:
            Image.open(file).close()  # reads the header only
        except OSError as error:
            raise ValueError(f"--data: {file} is not a readable image ({error}). Remove it or replace it") from error
    return images


def write_digits(folder: Path) -> Path:
    """The default data: 1,797 handwritten digits of 8 × 8 pixels, which are a part of scikit-learn."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    for number, (pixels, label) in enumerate(zip(digits.images, digits.target, strict=True)):
        (folder / str(label)).mkdir(parents=True, exist_ok=True)
        Image.fromarray((pixels * 15.9).astype("uint8")).save(folder / str(label) / f"{number:04}.png")
    return folder


# ---------------------------------------------------------------------- model


def saved_by_timm(model: str) -> bool:
    config = Path(model) / "config.json"
    return config.is_file() and "architecture" in json.loads(config.read_text())


def check_model(model: str | None) -> None:
    """Reads the config. Weights are loaded after all input has been checked. Raises ValueError if the model does not exist."""
    if model is None or timm.is_model(model) or (Path(model) / "config.json").is_file():
        return
    if Path(model).exists() or model.startswith((".", "/")) or model.count("/") > 1:
        raise ValueError(f"--model {model}: expected a folder with config.json, or a name")
    if "/" not in model:
        similar = difflib.get_close_matches(model, timm.list_models(pretrained=True)) or [EXAMPLE]
        raise ValueError(
            f"--model {model}: timm has no such model. For example: {' or '.join(similar)}. Models of transformers have "
            "two names: OWNER/NAME"
        )


def load_model(model: str | None, classes: int, pretrained: bool = True) -> tuple[Any, int, Any, Any]:
    """The model on the CPU, with a head for ``classes``; the size, mean and standard deviation of its images."""
    if model is None:
        small: dict[str, Any] = {"img_size": 32, "patch_size": 8, "embed_dim": 96, "depth": 4, "num_heads": 3}
        small |= {"global_pool": "avg", "class_token": False, "fc_norm": False}
        config = {"input_size": (3, 32, 32), "mean": (0.5,) * 3, "std": (0.5,) * 3}
        net = timm.create_model("vit_tiny_patch16_224", num_classes=classes, pretrained_cfg_overlay=config, **small)
        return net, 32, (0.5,) * 3, (0.5,) * 3
    if timm.is_model(model) or saved_by_timm(model):
        name = f"local-dir:{model}" if saved_by_timm(model) else model
        try:
            net = timm.create_model(name, pretrained=pretrained, num_classes=classes)
        except RuntimeError as error:
            raise ValueError(f"--model {model}: {error}") from error
        expected = timm.data.resolve_model_data_config(net)
        return net, expected["input_size"][-1], expected["mean"], expected["std"]
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
        raise ValueError(
            f"--model: has no gradient checkpointing ({error}). Add --no-gradient-checkpointing"
        ) from error


# ---------------------------------------------------------------------- the run


def fits(file: Path, module: pl.LightningModule, strategy: str) -> bool:
    """Returns True if a checkpoint has this model's weights and trains the same ones."""
    checkpoint = torch.load(file, mmap=True)
    saved = {name: value.shape for name, value in checkpoint["state_dict"].items()}
    if strategy == "superpipeline":  # which may have left out frozen weights
        frozen = {name: p.shape for name, p in module.named_parameters(remove_duplicate=False) if not p.requires_grad}
        saved = frozen | saved
    trained = sum(len(group["params"]) for group in checkpoint["optimizer_states"][0]["param_groups"])
    same = saved == {name: value.shape for name, value in module.state_dict().items()}
    return same and trained == sum(p.requires_grad for p in module.parameters())


def main(argv: Sequence[str] | None = None) -> Classifier:
    options = parse(argv)
    # The newest transformers have another name for gradient_checkpointing_enable. Small data need no workers.
    ignored = "gradient_checkpointing_enable|does not have many workers|Checkpoint directory|number of training batches"
    warnings.filterwarnings("ignore", message=f".*({ignored})")
    pl.seed_everything(options.seed, verbose=False)
    try:  # reports errors in the input before any work
        strategy: Any = options.strategy
        if strategy == "superpipeline":  # other options: keep_on_gpu, k, optimizer_on, ... (examples/guide/options.md)
            strategy = SuperpipelineStrategy(gpu_memory=options.gpu_memory)
        check_model(options.model)
        done = torch.load(options.resume, mmap=True)["epoch"] + 1 if options.resume else 0
        if done >= options.epochs:
            raise ValueError(
                f"--resume {options.resume}: has {done} of {options.epochs} epochs. For example: --epochs {2 * done}"
            )
        images = Images(
            options.data,
            batch_size=options.batch_size,
            augment=options.augment,
            flip=options.flip,
            workers=options.workers,
            seed=options.seed,
        )
        classes = len(images.classes)
        model, images.size, images.mean, images.std = load_model(options.model, classes, options.pretrained)
        if options.head_only:
            freeze(model)
        elif options.gradient_checkpointing:
            checkpoint_activations(model)
    except (ValueError, OSError) as error:
        make_parser().error(str(error))
    lr = options.lr or (1e-3 if options.head_only else 2e-5 if options.model else 1e-3)
    module = Classifier(model.train(), lr, classes, options.mixup, options.seed)
    if options.resume and not fits(options.resume, module, options.strategy):
        make_parser().error(
            f"--resume {options.resume}: a checkpoint of another model or of a run with other options (--head-only). Expected "
            "last.ckpt of a run with the same options"
        )

    if options.dial:  # the same model for each k and k', and for plain Lightning
        settings = {name: getattr(options, name) for name in ("accelerator", "precision", "accumulate_grad_batches")}
        print(
            dial(
                lambda: copy.deepcopy(module),
                lambda: copy.copy(images),
                trainer={**settings, "gradient_clip_val": 1.0},
                name="finetune_vision",
                gpu_memory=options.gpu_memory,
            )
        )
        return module

    callbacks: list[Any] = [EMAWeightAveraging(device="cpu", decay=options.ema)] if options.ema else []
    callbacks += [  # one checkpoint, after each epoch
        ModelCheckpoint(options.output, "last", save_on_train_epoch_end=True, enable_version_counter=False)
    ]
    trainer = pl.Trainer(
        strategy=strategy,
        accelerator=options.accelerator,
        devices=1,
        precision=options.precision,
        max_epochs=options.epochs,
        accumulate_grad_batches=options.accumulate_grad_batches,
        gradient_clip_val=1.0,
        num_sanity_val_steps=-1,  # validates before the first step, too
        callbacks=callbacks,
        logger=CSVLogger(options.output, name="logs"),
        log_every_n_steps=10,
        enable_progress_bar=sys.stdout.isatty(),
        enable_model_summary=False,
    )
    print(
        f"{len(images.training):,} images of {classes} classes, {len(images.validation):,} for validation.", flush=True
    )
    begin = time.perf_counter()
    trainer.fit(module, datamodule=images, ckpt_path=options.resume)
    seconds = time.perf_counter() - begin

    saved, last = options.output / "model", options.output / "last.ckpt"
    if hasattr(model, "save_pretrained"):  # of transformers
        model.config.id2label = dict(enumerate(images.classes))
        model.save_pretrained(saved)
        AutoImageProcessor.from_pretrained(options.model).save_pretrained(saved)
        load = f'AutoModelForImageClassification.from_pretrained("{saved}")'
    else:
        save_for_hf(model, str(saved), model_config={"label_names": images.classes}, safe_serialization=True)
        load = f'timm.create_model("local-dir:{saved}", pretrained=True)'
    speed = (options.epochs - done) * len(images.training) / seconds
    print(f"Trained for {seconds:.0f} s ({speed:,.0f} images per second, with validation).")
    print(f"Saved: {saved}. Checkpoint: {last}. Losses: {options.output / 'logs'}. To load: {load}")
    print(f"To continue, repeat the command with --resume {last} --epochs {2 * options.epochs}.")
    return module


if __name__ == "__main__":
    main()
