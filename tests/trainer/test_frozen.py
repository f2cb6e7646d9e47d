"""Checkpoints without frozen weights: smaller, and never a trap; and those of weights that are read in place from a file."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback, EMAWeightAveraging, ModelCheckpoint
from safetensors.torch import load_file, save_file

from sp_lightning.core.model.digests import digest
from sp_lightning.trainer.frozen_weights import FROZEN
from tests.support.models import Module, Stack, lora, tokens, vectors
from tests.support.moments import At
from tests.support.on_disk import in_memory, stay
from tests.support.runs import Outcome, assert_equal, assert_same, fit, loader, superpipeline, trainer_for


class Backbone(Module):
    """All but the head is frozen; with ``thawed`` a block is not."""

    def __init__(self, scale: float = 1.0, thawed: bool = False) -> None:
        super().__init__(Stack())
        self.net.requires_grad_(False)
        self.net.head.requires_grad_(True)
        self.net.blocks[1].requires_grad_(thawed)  # type: ignore[union-attr, index]
        with torch.no_grad():
            self.net.stem.weight.mul_(scale)


HEAD = {"net.head.weight", "net.head.bias"}
STEM = {"net.stem.weight"}
WRITTEN = {"net.blocks.2.inner.weight"}


def small() -> Any:
    return superpipeline(k=1, save_frozen=False)


def saved(file: Path) -> dict[str, Any]:
    return torch.load(file, weights_only=True)


def train(
    strategy: Any, file: Path | None = None, make: Any = Backbone, batches: Any = None, **options: Any
) -> Outcome:
    outcome = fit(make, batches or vectors(), strategy, **options)
    if file is not None:
        outcome.trainer.save_checkpoint(file)
    return outcome


def validate(outcome: Outcome, module: Any = None, run: str = "validate", **options: Any) -> None:
    getattr(outcome.trainer, run)(module or outcome.module, loader(vectors()), **options)


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.parametrize("make", [Backbone, lora])
def test_resumes_bitwise(make: Any, tmp_path: Path) -> None:
    """From a file without frozen weights as from one with them; and under plain Lightning's strategy from the latter."""
    batches, outcomes, predictions = (vectors() if make is Backbone else tokens()), [], []
    for name, strategy in {"small": small, "whole": lambda: "auto"}.items():
        file = tmp_path / f"{name}.ckpt"
        first = train(strategy(), file, make, batches)
        outcomes.append(train(strategy(), None, make, batches, ckpt_path=file, max_epochs=2))
        pl.seed_everything(7, verbose=False)
        predictions.append(trainer_for(strategy()).predict(make(), loader(batches), ckpt_path=file))
        trained = {name for name, p in first.module.named_parameters() if p.requires_grad}
        if name == "small":
            assert set(saved(file)["state_dict"]) == trained
            assert set(saved(file)[FROZEN]).isdisjoint(trained)
    assert_same(*outcomes)
    assert_equal(predictions[0], predictions[1], "predictions")
    assert (tmp_path / "small.ckpt").stat().st_size < (tmp_path / "whole.ckpt").stat().st_size


# ---------------------------------------------------------------------- what a file has besides what is trained


class Does(Callback):
    """Changes the module after each batch."""

    def __init__(self, code: Callable[[Any], Any]) -> None:
        self.code = code

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self.code(pl_module)


def write(module: Any) -> None:
    module.net.blocks[2].inner.weight.data.mul_(1.5)


WRITES = Does(write)
FREEZES = Does(lambda module: module.net.blocks[1].requires_grad_(False))


class FreezesItself(Module):
    """When its optimizer is made: after a checkpoint has been loaded."""

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__(Backbone(scale).net.requires_grad_(True))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        for child in (self.net.stem, self.net.blocks):
            child.requires_grad_(False)  # type: ignore[union-attr]
        return super().configure_optimizers()


def turned() -> Module:
    """A module that saves its weights transposed."""

    def turn(state: dict[str, Any]) -> None:
        state |= {name: value.t().contiguous() for name, value in state.items() if "stem.weight" in name}

    module = Backbone()
    module.register_state_dict_post_hook(lambda module, state, prefix, local: turn(state))
    module.register_load_state_dict_pre_hook(lambda module, state, *_: turn(state))
    return module


def whole_of(make: Any, folder: Path) -> dict[str, Any]:
    """Options of a run that begins with a whole checkpoint, whose stem has other values."""
    train("auto", folder / "whole.ckpt", partial(make, 2.0))
    return {"ckpt_path": folder / "whole.ckpt"}


def after_an_earlier_fit(module: Any, *callbacks: Callback) -> Outcome:
    trainer_for(small(), callbacks=list(callbacks)).fit(module, loader(vectors()))
    for child in (module.net.stem, module.net.blocks):
        child.requires_grad_(False)
    return train(small(), None, lambda: module)


def a_second_fit(folder: Path) -> Outcome:
    """It begins anew, with other weights to train."""
    outcome = train(small())
    outcome.module.net.stem.requires_grad_(True)  # type: ignore[union-attr, operator]
    outcome.trainer.fit_loop.max_epochs = 2
    outcome.module.configure_optimizers = lambda: torch.optim.SGD(outcome.module.net.stem.parameters(), lr=0.1)  # type: ignore[method-assign, union-attr]
    outcome.trainer.fit(outcome.module, loader(vectors()))
    return outcome


def a_validation(folder: Path, *, code: Any = None, module: Any = None, **options: Any) -> Outcome:
    outcome = train(small())
    if code is not None:
        code(outcome.module)
    validate(outcome, module, **options)
    return outcome


def another_module(folder: Path) -> Outcome:
    outcome, other = train(small()), Backbone(2.0)
    other.net.blocks = outcome.module.net.blocks  # type: ignore[union-attr]
    validate(outcome, other)
    return outcome


def validates_first(folder: Path) -> Outcome:
    options = whole_of(FreezesItself, folder)
    pl.seed_everything(7, verbose=False)
    outcome = Outcome([], [], {}, [], torch.empty(0), FreezesItself(), trainer_for(small()))
    validate(outcome, **options)
    outcome.trainer.fit(outcome.module, loader(vectors()))
    return outcome


ALL = set(Backbone().state_dict())
BLOCK = {name for name in ALL if ".blocks.1." in name}
FILES: dict[str, tuple[Callable[[Path], Outcome], set[str]]] = {
    "by default": (lambda folder: train(superpipeline(k=1)), ALL),
    "nothing": (lambda folder: train(small()), set()),
    "trained before it was frozen": (
        lambda folder: train(small(), None, partial(Backbone, thawed=True), callbacks=[FREEZES]), BLOCK),
    "written where no version shows it": (lambda folder: train(small(), callbacks=[WRITES]), WRITTEN),
    "loaded": (lambda folder: train(small(), max_epochs=2, **whole_of(Backbone, folder)), STEM),
    "loaded before it was frozen": (
        lambda folder: train(small(), None, FreezesItself, max_epochs=2, **whole_of(FreezesItself, folder)), STEM),
    "loaded by a validation before": (validates_first, STEM),
    "written by an earlier fit": (lambda folder: after_an_earlier_fit(Backbone(), WRITES), WRITTEN),
    "trained by an earlier fit": (lambda folder: after_an_earlier_fit(Module(Stack())), ALL),
    "trained by a second fit": (a_second_fit, {*STEM, "net.stem.bias"}),
    "written before a validation": (partial(a_validation, code=write), WRITTEN),
    "loaded by a validation": (lambda folder: a_validation(folder, **whole_of(Backbone, folder)), STEM),
    "of another module": (another_module, ALL),
    "in another form": (lambda folder: train(small(), None, turned), STEM),
    **{f"nothing, {run}": (partial(a_validation, run=run), set[str]()) for run in ("validate", "test", "predict")},
}  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_a_file_has_what_the_module_does_not_have_by_itself(name: str, tmp_path: Path) -> None:
    """A run resumes from it."""
    run, more = FILES[name]
    outcome, file = run(tmp_path), tmp_path / "a.ckpt"
    outcome.trainer.save_checkpoint(file)
    state = saved(file)["state_dict"]
    assert set(state) == HEAD | more
    assert (FROZEN in saved(file)) == (more != ALL)
    values = outcome.trainer.lightning_module.state_dict()
    assert_equal(state, {key: value for key, value in values.items() if key in state}, "values")
    if not more or "form" in name:
        train(superpipeline(k=1), None, turned if "form" in name else Backbone, ckpt_path=file, max_epochs=3)


def test_other_loops_keep_what_fit_has_noted(tmp_path: Path) -> None:
    outcome = train(small(), tmp_path / "before.ckpt")
    validate(outcome)
    outcome.trainer.save_checkpoint(tmp_path / "after.ckpt")
    before, after = (saved(tmp_path / f"{name}.ckpt") for name in ("before", "after"))
    assert_equal([after[FROZEN], after["optimizer_states"]], [before[FROZEN], before["optimizer_states"]], "noted")


def renamed() -> Module:
    module = Backbone()
    module.net.trunk = module.net.__dict__["_modules"].pop("stem")
    return module


@pytest.mark.parametrize("save_frozen", [True, False])
@pytest.mark.parametrize(
    ("make", "said"),
    [(partial(Backbone, 2.0), "other values"), (renamed, "no weight of that name"), (None, r"Missing key\(s\)")],
)
def test_other_weights_are_refused(make: Any, said: str, save_frozen: bool, tmp_path: Path) -> None:
    """Plain Lightning says what is missing."""
    train(small(), tmp_path / "a.ckpt")
    strategy = "auto" if make is None else superpipeline(save_frozen=save_frozen)
    with pytest.raises(RuntimeError, match=rf"({said}.*)?net.stem.weight(.*{said})?"):
        train(strategy, None, make or Backbone, ckpt_path=tmp_path / "a.ckpt")


@pytest.mark.long("takes a second or more")
@pytest.mark.filterwarnings("ignore:The dirpath has changed")  # ModelCheckpoint, which is resumed into another folder
def test_averaged_weights(tmp_path: Path) -> None:
    """The callback saves averages of all weights beside the run's own, and puts them into the module at the end."""
    resumed = []
    for folder, save_frozen in (("whole", True), ("small", False)):
        for place, options in ((folder, {}), (f"{folder}-again", {"ckpt_path": tmp_path / folder / "a.ckpt"})):
            callbacks = [EMAWeightAveraging(device="cpu"), ModelCheckpoint(tmp_path / place, "a")]
            strategy = superpipeline(k=1, save_frozen=save_frozen)
            more: dict[str, Any] = {
                "callbacks": callbacks,
                "enable_checkpointing": True,
                "max_epochs": 1 + len(options),
            }
            outcome = train(strategy, **more, **options)
        resumed.append(outcome)
    assert set(saved(tmp_path / "small" / "a.ckpt")["current_model_state"]) == HEAD
    assert_same(*resumed)


DTYPES = {"bf16-true": torch.bfloat16, "16-true": torch.half, "64-true": torch.double}


@pytest.mark.parametrize("precision", DTYPES)
def test_resumes_in_other_precisions(precision: Any, tmp_path: Path) -> None:
    """The module is converted when the trainer has loaded it. A whole run has the losses of one from the whole file."""
    batches, losses = [batch.to(DTYPES[precision]) for batch in vectors()], []
    for save_frozen in (True, False):
        file, strategy = tmp_path / f"{save_frozen}.ckpt", superpipeline(k=1, save_frozen=save_frozen)
        options: dict[str, Any] = {"batches": batches, "precision": precision}
        train(strategy, file, **options)
        train(small(), tmp_path / "b.ckpt", **options, ckpt_path=file, max_epochs=2)
        assert save_frozen or set(saved(file)["state_dict"]) == set(saved(tmp_path / "b.ckpt")["state_dict"]) == HEAD
        pl.seed_everything(7, verbose=False)
        validation = trainer_for(superpipeline(k=1)).validate(
            Backbone(), loader(vectors()), ckpt_path=file, verbose=False
        )
        losses.append(validation)
    assert str(losses[0]) == str(losses[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.bool, torch.float64])
def test_a_digest_tells_values_apart(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    tensor = torch.randint(0, 2, ((1 << 18) + 3,)).to(dtype)
    others = [tensor.clone() for _ in range(3)]
    for other, index in zip(others, (0, 70_000, -1), strict=True):
        other[index] = not other[index] if dtype is torch.bool else other[index] + 1
    others += [tensor[1:], tensor[None], tensor.flip(0), torch.zeros_like(tensor)]
    if dtype.is_floating_point:
        others += [-tensor, 2 * tensor, tensor * torch.tensor([1, -1]).repeat(len(tensor))[: len(tensor)].to(dtype)]
    found = digest(tensor)
    assert found == digest(tensor.clone())
    assert found == digest(torch.cat([tensor[:1], tensor])[1:]), "wherever it lies"
    assert found not in [digest(other) for other in others]


def test_a_digest_of_a_conjugate_is_that_of_its_values() -> None:
    tensor = torch.randn(5, dtype=torch.complex64)
    assert digest(tensor.conj()) == digest(tensor.conj().resolve_conj()) != digest(tensor)


# ---------------------------------------------------------------------- weights that are read in place from a file


@pytest.fixture
def backbone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes a net of which all but the ends is frozen, with weights that stay in a file."""
    stay(monkeypatch)
    torch.manual_seed(5)
    save_file(dict(At(depth=4).net.state_dict()), tmp_path / "net.safetensors")

    def make() -> At:
        module = At(depth=4)
        module.net.load_state_dict(load_file(tmp_path / "net.safetensors"), assign=True)
        module.net[1:3].requires_grad_(False)
        return module

    return make


def in_place(folder: Path, **options: Any) -> Any:
    return superpipeline(k=1, disk=folder, **options)


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.parametrize("save_frozen", [True, False])
def test_checkpoints_are_written_and_resumed_without_weights_in_memory(
    save_frozen: bool, backbone: Any, tmp_path: Path
) -> None:
    resumed, saved = [], []
    for name in ("ours", "plain"):
        strategy: Any = lambda: in_place(tmp_path, save_frozen=save_frozen) if name == "ours" else "auto"  # noqa: B023, E731
        module = fit(backbone, vectors(), strategy(), callbacks=[Saves(tmp_path / name)], recorded="nothing").module
        assert name == "plain" or not [each for each in in_memory(module.net) if each[0] in "12"]
        saved.append(torch.load(tmp_path / name, weights_only=True))
        again = {
            "recorded": "losses",
            "max_epochs": 2,
            "ckpt_path": tmp_path / name,
            "callbacks": [Saves(tmp_path / "x")],
        }
        resumed.append(fit(backbone, vectors(), strategy(), **again))
    assert_same(*resumed)
    ours, plain = saved
    if save_frozen:
        assert_equal(ours["state_dict"], plain["state_dict"], "state_dict")
    else:
        assert {name[4] for name in ours["state_dict"]} == {"0", "3"}
        assert len(ours["superpipeline_frozen"]) + len(ours["state_dict"]) == len(plain["state_dict"])


class Saves(Callback):
    def __init__(self, file: Path) -> None:
        self.file = file

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        trainer.save_checkpoint(self.file)


def test_a_weight_in_another_order_is_saved(backbone: Any, tmp_path: Path) -> None:
    """With the same memory and the same shape it counted as the file's, and was left out."""

    class Transposes(Saves):
        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            weight = pl_module.net[1].first.weight
            weight.data = weight.data.t()
            super().on_train_end(trainer, pl_module)

    fit(backbone, vectors(), in_place(tmp_path, save_frozen=False), callbacks=[Transposes(tmp_path / "saved")])
    saved = torch.load(tmp_path / "saved", weights_only=False)["state_dict"]
    assert "net.1.first.weight" in saved
    assert "net.2.first.weight" not in saved
