"""Loops, their flags and their data loaders."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import callbacks as plc
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from tests.conformance.features import feature
from tests.support.models import CASES, vectors
from tests.support.nets import Does, Net, clock, middle
from tests.support.runs import fused, loader
from tests.support.tiers import first
from tests.support.ways import LATE, RunVariant, Seen, compare, left


class Quiet(Net):
    """Logs nothing."""

    def log(self, *args: Any, **kwargs: Any) -> None:
        """A barebones trainer warns."""


FLAGS: dict[str, dict[str, Any]] = {
    "limit_train_batches, limit_val_batches": {"limit_train_batches": 4, "limit_val_batches": 0.5},
    "overfit_batches": {"overfit_batches": 2},
    "fast_dev_run": {"fast_dev_run": 3},
    "val_check_interval": {"val_check_interval": 2},
    "val_check_interval, fraction": {"val_check_interval": 0.5, "accumulate_grad_batches": 2},
    "check_val_every_n_epoch": {"check_val_every_n_epoch": 2, "max_epochs": 4},
    "check_val_every_n_epoch=None": {"check_val_every_n_epoch": None, "val_check_interval": 4, "max_epochs": 3},
    "max_steps": {"max_steps": 8, "max_epochs": -1},
    "min_epochs": {"min_epochs": 3, "max_epochs": 5, "callbacks": ["stops"]},
    "min_steps": {"min_steps": 9, "max_epochs": 5, "callbacks": ["stops"]},
    "num_sanity_val_steps": {"num_sanity_val_steps": 2},
    "num_sanity_val_steps=-1": {"num_sanity_val_steps": -1},
    "detect_anomaly": {"detect_anomaly": True},
    "barebones": {"barebones": True, "logger": None, "log_every_n_steps": None},
    "deterministic": {"deterministic": True},
    "benchmark": {"benchmark": True},
    "sync_batchnorm": {"sync_batchnorm": True},
    "use_distributed_sampler": {"use_distributed_sampler": False},
    "accumulate_grad_batches": {"accumulate_grad_batches": 4},
    "log_every_n_steps": {"log_every_n_steps": 4},
    "inference_mode=False": {"inference_mode": False},
    "enable_autolog_hparams=False": {"enable_autolog_hparams": False},
}


@pytest.fixture
def _as_before() -> Iterator[None]:
    """Some flags are switches of torch's."""
    yield
    torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.benchmark = False
    torch.autograd.set_detect_anomaly(False)


class StopsAt(Callback):
    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            trainer.should_stop = True


@pytest.mark.long("flags of the Trainer that touch no weight")
@feature("Loops and flags", *(f"`{name}`" for name in FLAGS), "`trainer.should_stop`")
@pytest.mark.usefixtures("_as_before")
@pytest.mark.filterwarnings("ignore:.*Anomaly Detection has been enabled.*:UserWarning")
@pytest.mark.parametrize(
    "name",
    first(
        FLAGS,
        "val_check_interval",
        "max_steps",
        "overfit_batches",
        "num_sanity_val_steps",
        "barebones",
        "detect_anomaly",
        why="other flags of Lightning's",
    ),
)
def test_flags(name: str, tmp_path: Path) -> None:
    def run(way: RunVariant) -> Seen:
        options: dict[str, Any] = {"max_epochs": 2, **FLAGS[name]}
        steps: list[Tensor] = []
        if name != "barebones":
            callbacks = [StopsAt()] if "callbacks" in options else []
            watch = Does(on_validation_batch_end=lambda trainer, module, *_: steps.append(middle(module)))
            options["callbacks"] = [*callbacks, watch]
        seen = way.fit(Quiet if name == "barebones" else Net, val=4, **options)
        return {**seen, "steps": steps}

    seen = compare(run, tmp_path)
    assert seen["progress"][0] > 1
    assert seen["steps"] or name == "barebones"


@pytest.mark.long("takes a second or more")
@feature("Loops and flags", "`max_time`")
def test_max_time(tmp_path: Path) -> None:
    def run(way: RunVariant) -> Seen:
        with clock(plc.timer, "monotonic"):
            return way.fit(max_time={"seconds": 10}, max_epochs=20)

    assert 2 < compare(run, tmp_path)["progress"][0] < 100


class Reloads(Net):
    """Has other data in each epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.loaded: list[int] = []

    def train_dataloader(self) -> Any:
        self.loaded.append(self.trainer.current_epoch)
        return loader([x + self.trainer.current_epoch for x in vectors(3)])

    def val_dataloader(self) -> Any:
        return loader(vectors(2))


@pytest.mark.long("the first tier has one of each kind")
@feature("Loops and flags", "`reload_dataloaders_every_n_epochs`")
def test_reloaded_data(tmp_path: Path) -> None:
    def run(way: RunVariant) -> Seen:
        trainer = way.trainer(max_epochs=4, reload_dataloaders_every_n_epochs=2)
        module = Reloads()
        trainer.fit(module)
        return {**left(trainer), "loaded": module.loaded}

    assert compare(run, tmp_path)["loaded"] == [0, 2]


class Several(Net):
    """Batches of several loaders."""

    def loss(self, batch: Any) -> Tensor:
        parts = [each for each in (batch.values() if isinstance(batch, dict) else [batch]) if each is not None]
        return torch.stack([super(Several, self).loss(each) for each in parts]).sum()

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("val_loss", self.loss(batch), batch_size=4)

    test_step = validation_step

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        return self.loss(batch) * (dataloader_idx + 1)


def several() -> dict[str, Any]:
    first, second = vectors(5), [x * 2 for x in vectors(3)]
    return {"first": loader(first), "second": loader(second)}


COMBINED = ("min_size", "max_size", "max_size_cycle", "sequential")


@pytest.mark.long("takes a second or more")
@feature("Loops and flags", *(f"`CombinedLoader`: {mode}" for mode in COMBINED))
@pytest.mark.parametrize("mode", first(COMBINED, next(iter(COMBINED)), why="other modes of Lightning's"))
def test_combined_loaders(mode: Any, tmp_path: Path) -> None:
    def run(way: RunVariant) -> Seen:
        trainer = way.trainer()
        module = Several()
        training: Any = loader(vectors(3)) if mode == "sequential" else CombinedLoader(several(), mode)
        trainer.fit(module, training, CombinedLoader(several(), mode))
        tested = trainer.test(module, CombinedLoader(several(), mode), verbose=False)
        predicted = trainer.predict(module, CombinedLoader(several(), "sequential"))  # which alone it takes
        return {"tested": tested, "predicted": predicted, **left(trainer)}

    seen = compare(run, tmp_path)
    assert seen["tested"][0]
    assert seen["predicted"]
    steps = {"min_size": 3, "max_size": 5, "max_size_cycle": 5, "sequential": 3}
    assert seen["progress"][0] == steps[mode]


@pytest.mark.long("the first tier has one of each kind")
@feature("Loops and flags", "several validation, test and predict loaders")
def test_several_loaders(tmp_path: Path) -> None:
    def run(way: RunVariant) -> Seen:
        trainer = way.trainer(max_epochs=2)
        module = Several()
        loaders = list(several().values())
        trainer.fit(module, loader(vectors(3)), loaders)
        validated = trainer.validate(module, loaders, verbose=False)
        tested = trainer.test(module, loaders, verbose=False)
        return {"values": [validated, tested, trainer.predict(module, loaders)], **left(trainer)}

    seen = compare(run, tmp_path)
    assert len(seen["values"][0]) == 2
    assert len(seen["values"][2]) == 2


@pytest.mark.rest("takes tenths of a second")
@feature("Loops and flags", "`limit_test_batches`, `limit_predict_batches`")
def test_limits_of_other_loops(tmp_path: Path) -> None:
    def run(way: RunVariant) -> Seen:
        trainer = way.trainer(limit_test_batches=2, limit_predict_batches=0.5)
        module = Net()
        tested = trainer.test(module, loader(vectors(6)), verbose=False)
        return {"tested": tested, "predicted": trainer.predict(module, loader(vectors(6)))}

    assert len(compare(run, tmp_path, ["off"])["predicted"]) == 3


class Streamed(IterableDataset):
    """Has no length."""

    def __iter__(self) -> Iterator[Any]:
        for x in vectors(5):
            yield x + torch.rand(())


@pytest.mark.long("the first tier has one of each kind")
@feature("Loops and flags", "`IterableDataset`")
@pytest.mark.parametrize("options", [{}, {"val_check_interval": 2}, {"limit_train_batches": 3}], ids=str)
def test_iterable_data(options: dict[str, Any], tmp_path: Path) -> None:
    def run(way: RunVariant) -> Seen:
        trainer = way.trainer(max_epochs=2, **options)
        trainer.fit(Net(), DataLoader(Streamed(), batch_size=None), DataLoader(Streamed(), batch_size=None))
        return left(trainer)

    assert compare(run, tmp_path)["progress"][0] == (6 if "limit_train_batches" in options else 10)


class Skips(Net):
    """Leaves out batches and losses."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if self.how == "epoch" and batch_idx == 2 else None

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return None if self.how == "loss" and batch_idx in (1, 2) else loss


@pytest.mark.rest("takes tenths of a second")
@feature("Loops and flags", "`on_train_batch_start` returns -1", "`training_step` returns None")
@pytest.mark.filterwarnings("ignore:.*returned `None`:UserWarning")
@pytest.mark.parametrize("how", ["epoch", "loss"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_skipped(how: str, accumulate: int, tmp_path: Path) -> None:
    def run(way: RunVariant) -> Seen:
        return way.fit(partial(Skips, how), max_epochs=2, accumulate_grad_batches=accumulate)

    seen = compare(run, tmp_path)
    assert (
        seen["progress"][0] == {("epoch", 1): 4, ("epoch", 2): 2, ("loss", 1): 8 + 4, ("loss", 2): 6}[how, accumulate]
    )


@pytest.mark.long("takes a second or more")
@feature("Loops and flags", "fit → validate → test → predict", "`inference_mode` on and off")
@pytest.mark.parametrize("inference_mode", first([True, False], True, why="the same without inference mode"))
@pytest.mark.parametrize(
    "name", first(["stack", "gpt2-tied", "resnet50"], "gpt2-tied", second=["stack"], why="other models")
)
def test_all_loops(name: str, inference_mode: bool, tmp_path: Path) -> None:
    def run(way: RunVariant) -> Seen:
        trainer = way.trainer(inference_mode=inference_mode)
        case = CASES[name]
        module = fused(case.make)()
        inference: list[bool] = []
        handle = module.net.register_forward_hook(lambda *_: inference.append(torch.is_inference_mode_enabled()))
        trainer.fit(module, loader(case.batches()), loader(case.batches()[:1]))
        validated = trainer.validate(module, loader(case.batches()), verbose=False)
        tested = trainer.test(module, loader(case.batches()[1:]), verbose=False)
        predicted = trainer.predict(module, loader(case.batches()))
        handle.remove()
        outside = module.predict_step(case.batches()[0], 0).detach()
        values = [validated, tested, predicted, outside]
        return {"values": values, "inference": inference, **left(trainer)}

    seen = compare(run, tmp_path, LATE)
    assert any(seen["inference"]) == inference_mode
    assert all(len(each) for each in seen["values"])
