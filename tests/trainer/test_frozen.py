"""Checkpoints without frozen weights: smaller, and never a trap."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback, EMAWeightAveraging, ModelCheckpoint

from sp_lightning.core.layers.writes import digest
from sp_lightning.trainer.frozen_weights import FROZEN
from tests.support.models import Module, Stack, lora, tokens, vectors
from tests.support.runs import assert_equal, assert_same, fit, loader, superpipeline, trainer_for


class Backbone(Module):
    """All but the head is frozen."""

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__(Stack())
        self.net.requires_grad_(False)
        self.net.head.requires_grad_(True)
        with torch.no_grad():
            self.net.stem.weight.mul_(scale)


HEAD = {"net.head.weight", "net.head.bias"}


def saved(file: Path) -> dict[str, Any]:
    return torch.load(file, weights_only=True)


def train(strategy: Any, file: Path | None = None, make: Any = Backbone, **options: Any) -> Any:
    outcome = fit(make, vectors(), strategy, **options)
    if file is not None:
        outcome.trainer.save_checkpoint(file)
    return outcome


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.parametrize("make", [Backbone, lora])
def test_resumes_bitwise(make: Any, tmp_path: Path) -> None:
    """From a file without frozen weights as from one with them; and under plain Lightning's strategy from the latter."""
    batches, outcomes = (vectors() if make is Backbone else tokens()), []
    for name, strategy in {"small": superpipeline(k=1, save_frozen=False), "whole": "auto"}.items():
        first = fit(make, batches, strategy)
        file = tmp_path / f"{name}.ckpt"
        first.trainer.save_checkpoint(file)
        second = superpipeline(k=1, save_frozen=False) if name == "small" else "auto"
        outcomes.append(fit(make, batches, second, ckpt_path=file, max_epochs=2))
        trained = {name for name, p in first.module.named_parameters() if p.requires_grad}
        if name == "small":
            assert set(saved(file)["state_dict"]) == trained
            assert set(saved(file)[FROZEN]).isdisjoint(trained)
    assert_same(*outcomes)
    assert (tmp_path / "small.ckpt").stat().st_size < (tmp_path / "whole.ckpt").stat().st_size


def test_evaluates_from_a_file_without_frozen_weights(tmp_path: Path) -> None:
    file = tmp_path / "small.ckpt"
    train(superpipeline(k=1, save_frozen=False), file)

    def predictions(strategy: Any, **options: Any) -> Any:
        pl.seed_everything(7, verbose=False)
        return trainer_for(strategy).predict(Backbone(), loader(vectors()), **options)

    expected = train("auto", file=tmp_path / "whole.ckpt")
    assert_equal(
        predictions(superpipeline(), ckpt_path=file), predictions("auto", ckpt_path=tmp_path / "whole.ckpt"), ""
    )
    assert expected.trainer.global_step == 3


def test_all_is_saved_by_default(tmp_path: Path) -> None:
    train(superpipeline(k=1), tmp_path / "whole.ckpt")
    file = saved(tmp_path / "whole.ckpt")
    assert set(file["state_dict"]) == set(Backbone().state_dict())
    assert FROZEN not in file


class FreezesLater(Callback):
    """Trains a layer first; so does who resumes what somebody else has trained."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        pl_module.net.blocks[1].requires_grad_(False)


def test_what_was_trained_before_it_was_frozen_is_saved(tmp_path: Path) -> None:
    def make() -> Module:
        module = Backbone()
        module.net.blocks[1].requires_grad_(True)
        return module

    train(superpipeline(k=1, save_frozen=False), tmp_path / "a.ckpt", make, callbacks=[FreezesLater()])
    expected = HEAD | {name for name in make().state_dict() if ".blocks.1." in name}
    assert set(saved(tmp_path / "a.ckpt")["state_dict"]) == expected


class WritesFrozen(Callback):
    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        pl_module.net.blocks[2].inner.weight.data.mul_(1.5)


def test_what_was_written_is_saved(tmp_path: Path) -> None:
    """Where no version shows it, too."""
    train(superpipeline(k=1, save_frozen=False), tmp_path / "a.ckpt", callbacks=[WritesFrozen()])
    assert set(saved(tmp_path / "a.ckpt")["state_dict"]) == HEAD | {"net.blocks.2.inner.weight"}


def test_what_came_from_a_checkpoint_is_saved(tmp_path: Path) -> None:
    """The module does not have it by itself, so the next file must."""
    train("auto", tmp_path / "whole.ckpt", lambda: Backbone(scale=2.0))
    train(superpipeline(k=1, save_frozen=False), tmp_path / "b.ckpt", ckpt_path=tmp_path / "whole.ckpt", max_epochs=2)
    assert set(saved(tmp_path / "b.ckpt")["state_dict"]) == HEAD | {"net.stem.weight"}


@pytest.mark.parametrize("save_frozen", [True, False])
def test_other_weights_are_refused(save_frozen: bool, tmp_path: Path) -> None:
    train(superpipeline(k=1, save_frozen=False), tmp_path / "a.ckpt")
    with pytest.raises(RuntimeError, match=r"leaves out the frozen weight 'net.stem.weight'.*other values"):
        train(superpipeline(save_frozen=save_frozen), make=lambda: Backbone(2.0), ckpt_path=tmp_path / "a.ckpt")

    def renamed() -> Module:
        module = Backbone()
        module.net.trunk = module.net.__dict__["_modules"].pop("stem")
        return module

    with pytest.raises(RuntimeError, match=r"'net.stem.weight'.*no weight of that name"):
        train(superpipeline(save_frozen=save_frozen), make=renamed, ckpt_path=tmp_path / "a.ckpt")


def test_plain_lightning_says_what_is_missing(tmp_path: Path) -> None:
    train(superpipeline(k=1, save_frozen=False), tmp_path / "a.ckpt")
    with pytest.raises(RuntimeError, match=r"Missing key\(s\).*net.stem.weight"):
        train("auto", ckpt_path=tmp_path / "a.ckpt")
    pl.seed_everything(7, verbose=False)
    module = Backbone()
    module.load_state_dict(saved(tmp_path / "a.ckpt")["state_dict"], strict=False)


@pytest.mark.long("takes a second or more")
@pytest.mark.filterwarnings("ignore:The dirpath has changed")  # ModelCheckpoint, which is resumed into another folder
def test_averaged_weights(tmp_path: Path) -> None:
    """The callback saves averages of all weights beside the run's own, and puts them into the module at the end."""

    def run(folder: str, save_frozen: bool, **options: Any) -> Any:
        callbacks = [EMAWeightAveraging(device="cpu"), ModelCheckpoint(tmp_path / folder, "a")]
        strategy = superpipeline(k=1, save_frozen=save_frozen)
        return fit(Backbone, vectors(), strategy, callbacks=callbacks, enable_checkpointing=True, **options)

    resumed = []
    for folder, save_frozen in (("whole", True), ("small", False)):
        run(folder, save_frozen)
        resumed.append(run(f"{folder}-again", save_frozen, ckpt_path=tmp_path / folder / "a.ckpt", max_epochs=2))
    assert set(saved(tmp_path / "small" / "a.ckpt")["current_model_state"]) == HEAD
    assert_same(*resumed)


def test_what_an_earlier_fit_changed_is_saved(tmp_path: Path) -> None:
    module = Backbone()
    trainer_for(superpipeline(k=1, save_frozen=False), callbacks=[WritesFrozen()]).fit(module, loader(vectors()))
    trainer = trainer_for(superpipeline(k=1, save_frozen=False))
    trainer.fit(module, loader(vectors()))
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    assert set(saved(tmp_path / "a.ckpt")["state_dict"]) == HEAD | {"net.blocks.2.inner.weight"}


@pytest.mark.rest("takes tenths of a second")
def test_a_half_file_in_a_whole_run(tmp_path: Path) -> None:
    """Plain Lightning loads what the file has: weights that were rounded."""
    batches = [batch.bfloat16() for batch in vectors()]
    losses = []
    for save_frozen in (True, False):
        strategy, file = superpipeline(k=1, save_frozen=save_frozen), tmp_path / f"{save_frozen}.ckpt"
        fit(Backbone, batches, strategy, precision="bf16-true").trainer.save_checkpoint(file)
        pl.seed_everything(7, verbose=False)
        losses.append(
            trainer_for(superpipeline(k=1)).validate(Backbone(), loader(vectors()), ckpt_path=file, verbose=False)
        )
    assert losses[0] == losses[1]


def test_a_second_fit_begins_anew(tmp_path: Path) -> None:
    strategy = superpipeline(k=1, save_frozen=False)
    outcome = train(strategy)
    outcome.module.net.stem.requires_grad_(True)
    outcome.trainer.fit_loop.max_epochs = 2
    outcome.module.configure_optimizers = lambda: torch.optim.SGD(outcome.module.net.stem.parameters(), lr=0.1)
    outcome.trainer.fit(outcome.module, loader(vectors()))
    outcome.trainer.save_checkpoint(tmp_path / "a.ckpt")
    assert set(saved(tmp_path / "a.ckpt")["state_dict"]) == HEAD | {"net.stem.weight", "net.stem.bias"}


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.parametrize("loop", ["validate", "test", "predict"])
def test_other_loops_keep_what_fit_has_noted(loop: str, tmp_path: Path) -> None:
    """A checkpoint after them is as one that was saved before, and a run resumes from it."""
    strategy = superpipeline(k=1, save_frozen=False)
    outcome = train(strategy, tmp_path / "before.ckpt")
    getattr(outcome.trainer, loop)(
        outcome.module, loader(vectors()), **({} if loop == "predict" else {"verbose": False})
    )
    outcome.trainer.save_checkpoint(tmp_path / "after.ckpt")
    before, after = saved(tmp_path / "before.ckpt"), saved(tmp_path / "after.ckpt")
    assert set(after["state_dict"]) == HEAD
    assert after[FROZEN] == before[FROZEN]
    assert_equal(before["optimizer_states"], after["optimizer_states"], "")
    resumed = [
        train(superpipeline(k=1, save_frozen=False), ckpt_path=tmp_path / f"{name}.ckpt", max_epochs=2)
        for name in ("before", "after")
    ]
    assert_same(*resumed)


def test_what_validation_wrote_or_loaded_is_saved(tmp_path: Path) -> None:
    """After fit, too."""
    train("auto", tmp_path / "whole.ckpt", lambda: Backbone(scale=2.0))
    outcome = train(superpipeline(k=1, save_frozen=False))
    with torch.no_grad():
        outcome.module.net.blocks[2].inner.weight.mul_(1.5)
    outcome.trainer.validate(outcome.module, loader(vectors()), verbose=False)
    outcome.trainer.save_checkpoint(tmp_path / "written.ckpt")
    assert set(saved(tmp_path / "written.ckpt")["state_dict"]) == HEAD | {"net.blocks.2.inner.weight"}
    outcome.trainer.validate(outcome.module, loader(vectors()), ckpt_path=tmp_path / "whole.ckpt", verbose=False)
    outcome.trainer.save_checkpoint(tmp_path / "loaded.ckpt")
    state = saved(tmp_path / "loaded.ckpt")["state_dict"]
    assert set(state) == HEAD | {"net.blocks.2.inner.weight", "net.stem.weight"}
    assert_equal(state["net.stem.weight"], saved(tmp_path / "whole.ckpt")["state_dict"]["net.stem.weight"], "")


def test_validation_of_another_module_saves_all_of_it(tmp_path: Path) -> None:
    outcome = train(superpipeline(k=1, save_frozen=False))
    other = Backbone(2.0)
    other.net.blocks = outcome.module.net.blocks
    outcome.trainer.validate(other, loader(vectors()), verbose=False)
    outcome.trainer.save_checkpoint(tmp_path / "a.ckpt")
    file = saved(tmp_path / "a.ckpt")
    assert set(file["state_dict"]) == set(Backbone().state_dict())
    assert FROZEN not in file


@pytest.mark.parametrize("precision", ["bf16-true", "16-true", "64-true"])
def test_resumes_in_other_precisions(precision: Any, tmp_path: Path) -> None:
    """The module is converted when the trainer has loaded it."""
    strategy = superpipeline(k=1, save_frozen=False)
    batches = [
        batch.to({"bf16-true": torch.bfloat16, "16-true": torch.half, "64-true": torch.double}[precision])
        for batch in vectors()
    ]
    fit(Backbone, batches, strategy, precision=precision).trainer.save_checkpoint(tmp_path / "a.ckpt")
    assert set(saved(tmp_path / "a.ckpt")["state_dict"]) == HEAD
    again = superpipeline(k=1, save_frozen=False)
    fit(Backbone, batches, again, precision=precision, ckpt_path=tmp_path / "a.ckpt", max_epochs=2)
    again.lightning_module.trainer.save_checkpoint(tmp_path / "b.ckpt")
    assert set(saved(tmp_path / "b.ckpt")["state_dict"]) == HEAD


def test_what_an_earlier_fit_trained_is_saved(tmp_path: Path) -> None:
    pl.seed_everything(7, verbose=False)
    module = Module(Stack())
    trainer_for(superpipeline(k=1)).fit(module, loader(vectors()))
    for child in (module.net.stem, module.net.blocks):
        child.requires_grad_(False)
    trainer = trainer_for(superpipeline(k=1, save_frozen=False))
    trainer.fit(module, loader(vectors()))
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    assert set(saved(tmp_path / "a.ckpt")["state_dict"]) == set(module.state_dict())


class FreezesItself(Module):
    """When its optimizer is made: after a checkpoint has been loaded."""

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__(Backbone(scale).net.requires_grad_(True))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        for child in (self.net.stem, self.net.blocks):
            child.requires_grad_(False)
        return super().configure_optimizers()


@pytest.mark.parametrize("validate", [False, True])
def test_what_came_from_a_checkpoint_before_it_was_frozen_is_saved(validate: bool, tmp_path: Path) -> None:
    train("auto", tmp_path / "whole.ckpt", lambda: FreezesItself(2.0))
    strategy, options = superpipeline(k=1, save_frozen=False), {"ckpt_path": tmp_path / "whole.ckpt"}
    if validate:
        pl.seed_everything(7, verbose=False)
        module, trainer = FreezesItself(), trainer_for(strategy)
        trainer.validate(module, loader(vectors()), verbose=False, **options)
        trainer.fit(module, loader(vectors()))
        trainer.save_checkpoint(tmp_path / "b.ckpt")
    else:
        train(strategy, tmp_path / "b.ckpt", FreezesItself, max_epochs=2, **options)
    assert set(saved(tmp_path / "b.ckpt")["state_dict"]) == HEAD | {"net.stem.weight"}


def test_another_form_of_a_weight_is_saved(tmp_path: Path) -> None:
    """A module that saves its weights transposed."""

    def turned() -> Module:
        def turn(state: dict[str, Any]) -> None:
            state |= {name: value.t().contiguous() for name, value in state.items() if "stem.weight" in name}

        module = Backbone()
        module.register_state_dict_post_hook(lambda module, state, prefix, local: turn(state))
        module.register_load_state_dict_pre_hook(lambda module, state, *_: turn(state))
        return module

    train(superpipeline(k=1, save_frozen=False), tmp_path / "a.ckpt", turned)
    assert set(saved(tmp_path / "a.ckpt")["state_dict"]) == HEAD | {"net.stem.weight"}
    train(superpipeline(k=1), None, turned, ckpt_path=tmp_path / "a.ckpt", max_epochs=2)


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
