"""Modules for ``sp_lightning.check``: one with all that is compared, and some with an error that it has to find."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch import callbacks
from torch import Tensor, nn

from sp_lightning import SuperpipelineStrategy
from tests.support.models import Module, Stack, vectors
from tests.support.runs import loader


def batches() -> Any:
    return loader(vectors())


class Everything(Module):
    """Logs, has buffers, a scheduler, and data of its own."""

    def __init__(self) -> None:
        super().__init__(nn.Sequential(Stack(), nn.BatchNorm1d(16), nn.Dropout(0.1)))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1)}

    train_dataloader = val_dataloader = predict_dataloader = staticmethod(batches)  # type: ignore[assignment]


class Data(pl.LightningDataModule):
    train_dataloader = val_dataloader = staticmethod(batches)  # type: ignore[assignment]


class Configured(Module):
    """As a config names it."""

    def __init__(self, depth: int = 2) -> None:
        super().__init__(Stack(depth))


class Unrepeatable(Module):
    """Draws from a generator that nobody can seed."""

    def __init__(self) -> None:
        super().__init__(Stack())

    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) * (1 + os.urandom(1)[0] / 256 + os.urandom(1)[0])


class OtherBuffer(Module):
    """Has a buffer of another value under the strategy, and nothing else."""

    def __init__(self) -> None:
        super().__init__(Stack())
        self.register_buffer("seen", torch.zeros(3))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen[1] += isinstance(self.trainer.strategy, SuperpipelineStrategy)


class OtherOutput(Module):
    """One of its blocks gives something else under the strategy."""

    def __init__(self) -> None:
        super().__init__(Stack())

    def on_fit_start(self) -> None:
        if is_streamed(self):
            self.net.blocks[2].register_forward_hook(lambda block, arguments, output: output * (1 + 2**-20))


class OtherValidation(Module):
    """Logs another value in validation under the strategy. Its validation steps return an empty dictionary."""

    def __init__(self) -> None:
        super().__init__(Stack())

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("val_loss", self.loss(batch) + is_streamed(self))
        return {}

    val_dataloader = staticmethod(batches)


class TooLarge(Module):
    """Needs more memory than there is, under plain Lightning."""

    def __init__(self) -> None:
        super().__init__(Stack())

    def loss(self, batch: Any) -> Tensor:
        if not isinstance(self.trainer.strategy, SuperpipelineStrategy):
            raise torch.OutOfMemoryError("too large")
        return super().loss(batch)


class Refused(Module):
    """Two trained parameters over one memory, which the strategy refuses."""

    def __init__(self) -> None:
        super().__init__(Stack())
        self.alias = nn.Parameter(self.net.stem.weight.data)


class CannotPredict(Module):
    def __init__(self) -> None:
        super().__init__(Stack())

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        raise ValueError("nothing to see")


class StopsOffloaded(Module):
    """Its training stops in its own code, but only where this strategy offloads activations."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        strategy: Any = self.trainer.strategy
        if isinstance(strategy, SuperpipelineStrategy) and "offload" in strategy.activations.values():
            raise RuntimeError("kernel fault")
        return super().training_step(batch, batch_idx)


class TrainsNothing(Module):
    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        return None


class AssertsInVain(Module):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        raise AssertionError("of the user")


class Ends(Module):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        raise SystemExit(0)


def is_streamed(module: pl.LightningModule) -> bool:
    return isinstance(module.trainer.strategy, SuperpipelineStrategy)


class KeepsTensors(Module):
    """Has tensors in plain attributes, in containers, and in a module that nobody registered; one differs by ``place``."""

    def __init__(self, place: str = "") -> None:
        super().__init__(Stack())
        self.place = place
        self.state = torch.zeros(2)
        self.held: dict[Any, Any] = {"list": [torch.zeros(2)], 7: np.zeros(2)}
        self.held["itself"] = self.held
        self.teachers = [nn.Linear(2, 2, bias=False)]
        self.alias = [self.net.blocks]
        self.shapes = torch.empty(3, device="meta")

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        value = 1.0 + is_streamed(self)
        if self.place == "state":
            self.state = self.state + value
        elif self.place:
            found = {"list": self.held["list"][0], "array": self.held[7], "teacher": self.teachers[0].weight.data}
            found[self.place][0] = value


class LogsByItself(Module):
    """Calls methods of its logger and of the logger's experiment, and writes to the logger's folder."""

    def __init__(self) -> None:
        super().__init__(Stack())
        self.save_hyperparameters()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        logger: Any = self.logger
        logger.experiment.add_scalar("mine", float(loss), self.global_step)
        logger.experiment.summary["best"] = torch.ones(2)
        logger.log_image("seen", images=[np.zeros(3)])
        for folder in (logger.log_dir, self.trainer.log_dir):
            (Path(str(folder)) / f"{batch_idx}.txt").write_text("of the user")
        return loss


class LogsTimes(Module):
    """Logs a time, and a loss that is another one under the strategy if it is ``wrong``."""

    def __init__(self, *, wrong: bool = False) -> None:
        super().__init__(Stack())
        self.wrong = wrong

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log_dict({"seconds": time.perf_counter(), "loss": float(loss) + (self.wrong and is_streamed(self))})
        return loss


class SavesByItself(Module):
    """Its own callbacks write to the folder that the process is in."""

    def __init__(self) -> None:
        super().__init__(Stack())

    def configure_callbacks(self) -> list[Any]:
        return [callbacks.ModelCheckpoint(dirpath="checkpoints"), callbacks.LearningRateMonitor(), callbacks.Timer()]


class RunsOut(Module):
    """Its device has too little memory for the runs whose numbers ``when`` is true of."""

    made = 0

    def __init__(self, when: Callable[[int], bool]) -> None:
        super().__init__(Stack())
        self.when = when
        self.number = RunsOut.made = RunsOut.made + 1

    def loss(self, batch: Any) -> Tensor:
        if self.when(self.number):
            raise torch.OutOfMemoryError("too large")
        return super().loss(batch)


class NeedsArguments(Module):
    def __init__(self, width: int) -> None:
        super().__init__(Stack(width=width))
