"""Modules for ``sp_lightning.check``: one with all that is compared, and some with an error that it has to find."""

from __future__ import annotations

import ctypes
import os
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from sp_lightning import SuperpipelineStrategy
from tests.support.data_writes import WritesUnseen
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


def writes_unseen() -> WritesUnseen:
    return WritesUnseen("reference")


class ReadsByAddress(Module):
    """Reads a weight of its first block once the forward is over, by an address that it has taken from it."""

    def __init__(self) -> None:
        super().__init__(Stack())

    def loss(self, batch: Any) -> Tensor:
        taken: list[tuple[int, int]] = []

        def take(block: Any, arguments: Any, output: Any) -> None:
            weight = next(block.parameters())
            taken.append((weight.data_ptr(), weight.nbytes))

        handle = self.net.blocks[0].register_forward_hook(take)
        loss = super().loss(batch)
        handle.remove()
        found = torch.frombuffer(bytearray(ctypes.string_at(*taken[0])), dtype=torch.float32)
        return loss + found.mean()


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
        if isinstance(self.trainer.strategy, SuperpipelineStrategy):
            self.net.blocks[2].register_forward_hook(lambda block, arguments, output: output * (1 + 2**-20))


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
