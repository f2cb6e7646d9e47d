"""Train a torchvision model to classify images; what fills the device here is activations, not weights.

    python examples/train_vision.py                                    # no download: scikit-learn's digits, on a CPU
    python examples/train_vision.py --model vit_b_16 --activations recompute
    python examples/train_vision.py --data imagenette2 --model vit_h_14 --image 224 --batch-size 64 \\
        --precision bf16-mixed --activations offload --workers 8       # a GPU; folders train/CLASS/ and val/CLASS/

The order of events: train for some epochs, each followed by validation, save the weights, compare the memory.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torchvision
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

from sp_lightning.device.torch_fake import fake_tensors
from sp_lightning.model.find import find_layers
from sp_lightning.plan.units import human_bytes
from sp_lightning.tune.dry_run import estimate

if not __package__:  # started as a file: what lies beside it is found from the repository's root
    sys.path.insert(0, str(Path(__file__).parents[1]))

from examples.console import ConsoleLogger, last_loss, say, say_memory, say_speed, steps_per_second
from examples.recipe import (
    HOLDS_TRAINING,
    add_run_options,
    check_file,
    check_least,
    check_positive,
    cuda_peak,
    make_trainer,
    plain_steps_per_second,
    plain_training_bytes,
    prepare_output,
    run,
)

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet, which published weights were trained with
AUXILIARY = {"googlenet", "inception_v3"}  # give more than logits in training
HELD_OUT = 5  # one digit in so many is for validation


@dataclass(frozen=True)
class Result:
    """What a run came to.

    Attributes:
        first_loss, last_loss: of the first training step, and the mean over the last tenth of the steps.
        val_loss, accuracy: on the images for validation, at the end.
        steps: optimizer steps in total.
        images_per_second: of training; validation between epochs counts as time.
        peak_device_bytes, planned_device_bytes: weights and gradients on the device, counted and planned.
        plain_device_bytes: computed: weights, gradients and AdamW's moments, which plain training keeps there.
        offloaded_bytes: activations that went to the host, all batches together.
        weights: state_dict of the torchvision model, for ``--weights``.
    """

    first_loss: float
    last_loss: float
    val_loss: float
    accuracy: float
    steps: int
    images_per_second: float
    peak_device_bytes: int
    planned_device_bytes: int
    plain_device_bytes: int
    offloaded_bytes: int
    weights: Path


def main(argv: Sequence[str] | None = None) -> Result:
    """Run the recipe; ``argv`` as on the command line."""
    parser = make_parser()
    options = parser.parse_args(argv)
    try:  # all that can be wrong with the input shows here, before any work
        check(options)
        images = Images(options.data, image=options.image, batch_size=options.batch_size, workers=options.workers)
        images.setup("fit")
        check_vision_model(options.model, len(images.classes), options.image)
        steps = options.epochs * len(images.train_dataloader())
        pl.seed_everything(options.seed, verbose=False)
        model = vision_model(options.model, len(images.classes), options.image, options.weights)
        (folder,) = prepare_output(options.output, "")
        console = ConsoleLogger(steps)
        trainer, strategy = make_trainer(options, epochs=options.epochs, logger=console)
    except (ValueError, OSError, MisconfigurationException) as error:
        parser.error(str(error))

    say(f"{len(images.training):,} images of {len(images.classes)} classes, {len(images.validation):,} for validation")
    module = Classifier(model, options.lr)
    trainer.fit(module, datamodule=images)
    say(f"\n{strategy.plan}\n")
    weights = folder / f"{options.model}.pth"
    torch.save(model.state_dict(), weights)

    result = Result(
        first_loss=console.losses[0].loss,
        last_loss=last_loss(console.losses),
        val_loss=float(trainer.callback_metrics["val_loss"]),
        accuracy=float(trainer.callback_metrics["accuracy"]),
        steps=trainer.global_step,
        images_per_second=options.batch_size * steps_per_second(console.losses),
        peak_device_bytes=strategy.stats().peak_device_bytes,
        planned_device_bytes=strategy.plan.peak_device_bytes,
        plain_device_bytes=plain_training_bytes(module),
        offloaded_bytes=strategy.stats().stored_bytes,
        weights=weights,
    )
    say(f"Loss: {result.first_loss:.3f} → {result.last_loss:.3f}, in validation {result.val_loss:.3f}")
    say(f"Accuracy: {result.accuracy:.1%} of {len(images.validation):,} images that were held out")
    speed = plain_steps_per_second(options, module, images.train_dataloader())
    say_speed(result.images_per_second, options.batch_size * speed, "images")
    modes = ", ".join(f"{mode} {n}" for mode, n in Counter(strategy.activations.values()).items())
    moved = f"; {human_bytes(result.offloaded_bytes // steps)} offloaded per step" if result.offloaded_bytes else ""
    say(f"Activations, in layers and parts beside them: {modes}{moved}")
    kept, recomputed = saved_for_backward(options, len(images.classes))
    say(f"  saved for backward    {human_bytes(kept):>10}   with --activations keep, as plain Lightning does")
    say(f"                        {human_bytes(recomputed):>10}   with --activations recompute")
    say_memory(
        strategy.plan,
        counted=result.peak_device_bytes,
        plain=result.plain_device_bytes,
        holds=HOLDS_TRAINING,
        allocated=cuda_peak(trainer),
    )
    say(f"Weights: {weights} (go on with --weights {weights})")
    return result


class Classifier(pl.LightningModule):
    """Any model that gives a number per class.

    Args:
        model: images to logits, [batch, classes].
        lr: learning rate of AdamW.
    """

    def __init__(self, model: nn.Module, lr: float = 1e-3) -> None:
        super().__init__()
        self.model = model
        self.lr = lr

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        loss = F.cross_entropy(self.model(images), labels)
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        images, labels = batch
        logits = self.model(images)
        self.log("val_loss", F.cross_entropy(logits, labels), batch_size=len(labels))
        self.log("accuracy", (logits.argmax(-1) == labels).float().mean(), batch_size=len(labels))

    def predict_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return self.model(batch[0]).argmax(-1)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


# ---------------------------------------------------------------------- images


class Images(pl.LightningDataModule):
    """Images in folders, or scikit-learn's 1,797 handwritten digits.

    Args:
        data: a folder with ``train/CLASS/*.jpg`` and ``val/CLASS/*.jpg``; None for the digits.
        image: pixels on each side.
        batch_size: images per step.
        workers: processes that read images.
    """

    def __init__(self, data: Path | None = None, image: int = 32, batch_size: int = 32, workers: int = 0) -> None:
        super().__init__()
        self.data, self.image, self.batch_size, self.workers = data, image, batch_size, workers

    def setup(self, stage: str) -> None:
        """
        Raises:
            ValueError, OSError: a folder that cannot be used.
        """
        self.training: Any
        self.validation: Any
        if self.data is None:
            self.training, self.validation = read_digits(self.image)
            self.classes = [str(digit) for digit in range(10)]
        else:
            self.training, self.validation = read_folder(self.data, self.image)
            self.classes = self.training.classes
        if len(self.training) < self.batch_size:
            raise ValueError(
                f"There are {len(self.training)} images to train on, a batch takes --batch-size {self.batch_size}. "
                "Lower it."
            )

    def train_dataloader(self) -> DataLoader[Any]:
        # batch normalisation cannot work with a last batch of one image
        return DataLoader(self.training, self.batch_size, shuffle=True, drop_last=True, num_workers=self.workers)

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.validation, self.batch_size, num_workers=self.workers)

    def predict_dataloader(self) -> DataLoader[Any]:
        return self.val_dataloader()


def read_digits(image: int) -> tuple[TensorDataset, TensorDataset]:
    """For training, and for validation: 8 × 8 pixels of grey, made larger, in three colours.

    Raises:
        ValueError: scikit-learn is missing.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ValueError(
            "The digits come with scikit-learn: pip install scikit-learn. Or give --data FOLDER."
        ) from error
    digits = load_digits()
    grey = torch.from_numpy(digits.images).float()[:, None] / 16
    large = F.interpolate(grey, size=(image, image), mode="bilinear").expand(-1, 3, -1, -1)
    pixels, labels = v2.functional.normalize(large, list(MEAN), list(STD)), torch.from_numpy(digits.target).long()
    held_out = torch.arange(len(labels)) % HELD_OUT == 0
    return TensorDataset(pixels[~held_out], labels[~held_out]), TensorDataset(pixels[held_out], labels[held_out])


def read_folder(data: Path, image: int) -> tuple[ImageFolder, ImageFolder]:
    """torchvision's ImageFolder, cropped at random and mirrored for training.

    Raises:
        ValueError, FileNotFoundError: the folders are not there, are empty, or differ in their classes.
    """
    for name in ("train", "val"):
        if not (data / name).is_dir():
            raise ValueError(f"--data {data}: there is no folder {name} in it. It needs train/CLASS/ and val/CLASS/.")
    as_tensor = [v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)]
    random = v2.Compose([v2.RandomResizedCrop(image, scale=(0.3, 1.0)), v2.RandomHorizontalFlip(), *as_tensor])
    centre = v2.Compose([v2.Resize(image * 8 // 7), v2.CenterCrop(image), *as_tensor])
    training, validation = ImageFolder(data / "train", random), ImageFolder(data / "val", centre)
    if training.classes != validation.classes:
        other = sorted(set(training.classes) ^ set(validation.classes))
        raise ValueError(f"--data {data}: {', '.join(other)} must be in train and in val; each class needs both.")
    return training, validation


# ---------------------------------------------------------------------- model


def vision_model(name: str, classes: int, image: int = 32, weights: Path | None = None) -> nn.Module:
    """A torchvision model from random weights, or from a file as far as names and shapes agree.

    Args:
        name: as ``torchvision.models.list_models()`` has it.
        classes: numbers that it gives.
        image: pixels on each side; vision transformers are made for it.
        weights: a state_dict, as torchvision publishes them and this recipe writes them.

    Raises:
        ValueError: nothing in the file fits.
    """
    sizes = {"image_size": image} if name.startswith("vit_") else {}
    model = torchvision.models.get_model(name, weights=None, num_classes=classes, **sizes)
    if weights is not None:
        try:
            given = torch.load(weights, weights_only=True, map_location="cpu")
        except Exception as error:
            raise ValueError(
                f"--weights {weights}: is no file that torch.save wrote a state_dict to. {error}"
            ) from error
        own = model.state_dict()
        fitting = {key: value for key, value in given.items() if key in own and value.shape == own[key].shape}
        if not fitting:
            raise ValueError(f"--weights {weights}: nothing in it fits {name}. Give weights of that model.")
        if left := [key for key in own if key not in fitting]:
            say(f"Not in --weights, or of another shape, so random: {', '.join(left[:4])}{' ...' * (len(left) > 4)}")
        model.load_state_dict(fitting, strict=False)
    return model


def check_vision_model(name: str, classes: int, image: int) -> None:
    """Two images through the model without values, which costs nothing at any size.

    Raises:
        ValueError: there is no such model, or it cannot take such images.
    """
    names = sorted(set(torchvision.models.list_models(module=torchvision.models)) - AUXILIARY)
    if name not in names:
        raise ValueError(f"--model {name}: torchvision has no such classifier. It has: {', '.join(names)}.")
    try:
        with torch.device("meta"):
            vision_model(name, classes, image)(torch.empty(2, 3, image, image))
    except (ValueError, RuntimeError, AssertionError) as error:
        raise ValueError(f"--model {name} cannot take --image {image}: {error}") from error


def saved_for_backward(options: argparse.Namespace, classes: int) -> tuple[int, int]:
    """Most bytes of activations that a batch keeps for its backward: all of them, and with recompute. Takes no memory."""
    lower = torch.float32 if options.precision == "32-true" else torch.bfloat16
    with fake_tensors(), torch.autocast("cpu", lower, enabled=options.precision == "bf16-mixed"):
        module = Classifier(vision_model(options.model, classes, options.image), options.lr)
        images = torch.empty(options.batch_size, 3, options.image, options.image)
        labels = torch.zeros(options.batch_size, dtype=torch.long)
        if options.precision == "bf16-true":
            module.to(lower)
            images = images.to(lower)
        work = estimate(find_layers(module), lambda: F.cross_entropy(module.model(images), labels))
    return work.saved("keep"), work.saved("recompute")


# ---------------------------------------------------------------------- the command line


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    add = parser.add_argument
    add("--model", default="resnet18", help="name of a torchvision classifier (%(default)s)")
    add("--data", type=Path, help="folder with train/CLASS/ and val/CLASS/ (default: scikit-learn's digits)")
    add("--weights", type=Path, help="state_dict to start from, such as torchvision's (default: random)")
    add("--image", type=int, default=32, help="pixels on each side (%(default)s)")
    add("--epochs", type=int, default=3, help="(%(default)s)")
    add("--batch-size", type=int, default=32, help="images per step (%(default)s)")
    add("--lr", type=float, default=1e-3, help="learning rate (%(default)s)")
    add("--workers", type=int, default=0, help="processes that read images (%(default)s)")
    add_run_options(parser, "train_vision")
    return parser


def check(options: argparse.Namespace) -> None:
    """
    Raises:
        ValueError: an option that cannot be.
    """
    check_least(options, image=8, epochs=1, batch_size=2, workers=0)
    check_positive(options, "lr")
    check_file("--weights", options.weights, "a state_dict")


if __name__ == "__main__":
    run(main)
