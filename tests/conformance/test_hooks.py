"""Hooks of modules, callbacks and data modules: their order, what they see and what they write."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.core.hooks import CheckpointHooks, DataHooks, ModelHooks
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.conformance.features import feature
from tests.support.models import CASES, vectors
from tests.support.nets import Fails, Net, Scheduled, assert_changing, fails, middle
from tests.support.runs import assert_equal, fused, loader
from tests.support.tiers import first
from tests.support.ways import EVERY, LATE, RunVariant, Seen, compare, left

pytestmark = [
    # Lightning's advice to who resumes without the callbacks that saved.
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`, callbacks used to create:UserWarning"),
]

LOOKS = (
    "on_train_start", "on_train_epoch_start", "on_train_batch_start", "on_before_zero_grad", "on_before_backward",
    "on_after_backward", "on_before_optimizer_step", "on_train_batch_end", "on_train_epoch_end",
    "on_validation_batch_start", "on_validation_batch_end", "on_train_end",
)  # fmt: skip


class Looks(Callback):
    """Notes all weights and gradients in every hook, and what kind of tensors they are."""

    def __init__(self, hooks: Sequence[str], gradients: bool) -> None:
        self.seen: list[tuple[str, dict[str, Any]]] = []
        self.gradients = gradients
        for hook in hooks:
            setattr(self, hook, partial(self._look, hook))

    def _look(self, hook: str, trainer: Any, pl_module: Any, *_: Any) -> None:
        self.seen.append((hook, {name: self._noted(p) for name, p in pl_module.named_parameters()}))

    def _noted(self, p: Tensor) -> list[Any]:
        kind = [
            isinstance(p, nn.Parameter),
            p.is_leaf,
            p.requires_grad,
            str(p.device),
            str(p.dtype),
            p.shape,
            p.stride(),
        ]
        gradient = p.grad if self.gradients else None
        noted = None if gradient is None else [gradient.clone(), str(gradient.device), str(gradient.dtype)]
        return [p.detach().clone(), kind, noted]


@pytest.mark.long("takes a second or more")
@feature("Hooks", "weights and gradients, read in every hook of a step")
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("name", first(["stack", "llama-dropout"], "stack", second=(), why="a larger model"))
def test_what_hooks_see(name: str, accumulate: int, tmp_path: Path) -> None:
    case = CASES[name]

    def run(way: RunVariant) -> Seen:
        looks = Looks(LOOKS, gradients=True)
        options = {"callbacks": [looks], "accumulate_grad_batches": accumulate, "max_epochs": 2}
        seen = way.fit(fused(case.make), case.batches(), case.batches()[:1], **options)
        return {**seen, "looks": looks.seen}

    looks = compare(run, tmp_path, LATE)["looks"]
    assert {hook for hook, _ in looks} == set(LOOKS)
    first = next(iter(looks[0][1]))
    for hook in ("on_train_batch_start", "on_before_optimizer_step"):
        assert_changing([values[first][0] for each, values in looks if each == hook])
    gradients = [values[first][2] for hook, values in looks if hook == "on_after_backward"]
    assert_changing([gradient[0] for gradient in gradients])


@pytest.mark.long("takes a second or more")
@feature("Hooks", "weights, read between batches that are updated under backward")
def test_what_hooks_see_of_early_updates(tmp_path: Path) -> None:
    hooks = [hook for hook in LOOKS if "zero_grad" not in hook and "backward" not in hook and "optimizer" not in hook]

    def run(way: RunVariant) -> Seen:
        looks = Looks(hooks, gradients=False)
        seen = way.fit(callbacks=[looks], max_epochs=2)
        return {**seen, "looks": looks.seen}

    looks = compare(run, tmp_path)["looks"]
    assert_changing([values["net.blocks.1.inner.weight"][0] for hook, values in looks if hook == "on_train_batch_end"])


class Changes(Callback):
    """Writes weights, gradients, buffers and the optimizer's state in a hook."""

    def __init__(self, hook: str, what: str) -> None:
        self.what = what
        setattr(self, hook, self._change)

    @torch.no_grad()
    def _change(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        for index, p in enumerate(pl_module.parameters()):
            if self.what == "weights":
                p.mul_(0.99)
            elif self.what == "data":
                p.data.add_(1e-3 * index)
            elif self.what == "gradients" and p.grad is not None:
                p.grad.add_(torch.rand_like(p.grad), alpha=1e-2)
            elif self.what == "optimizer":
                for state in trainer.optimizers[0].state.values():
                    state["exp_avg"].mul_(0.9)


CHANGES = [
    *((hook, what) for hook in LOOKS if hook != "on_train_end" for what in ("weights", "data")
      if what == "data" or hook not in ("on_before_backward", "on_before_zero_grad")),  # autograd refuses those
    ("on_after_backward", "gradients"), ("on_before_optimizer_step", "gradients"),
    ("on_train_batch_start", "optimizer"), ("on_train_batch_end", "optimizer"), ("on_train_epoch_end", "optimizer"),
]  # fmt: skip


@pytest.mark.long("takes a second or more")
@feature("Hooks", "weights, gradients and optimizer state, written in hooks")
@pytest.mark.parametrize(
    ("hook", "what"),
    first(CHANGES, if_=lambda each: each[0] in ("on_train_batch_start", "on_after_backward"), why="other hooks"),
)
def test_what_hooks_write(hook: str, what: str, tmp_path: Path) -> None:
    overlaps = LATE if "zero_grad" in hook or "backward" in hook or "optimizer" in hook else EVERY
    seen = compare(
        lambda way: way.fit(callbacks=[Changes(hook, what)], max_epochs=2, batches=3, val=1), tmp_path, overlaps
    )
    if hook != "on_train_start":
        untouched = RunVariant(tmp_path / "untouched", None).fit(max_epochs=2, batches=3, val=1)
        with pytest.raises(AssertionError, match="differ"):
            assert_equal(seen["state"], untouched["state"], "state")


def noting(owner: type, names: Sequence[str], label: str, noted: list[Any]) -> Any:
    """A subclass in which every hook notes its name and, in a module, a weight."""

    def wrap(name: str) -> Any:
        inherited = getattr(owner, name)

        def hook(self: Any, *args: Any, **kwargs: Any) -> Any:
            noted.append((f"{label}.{name}", middle(self) if isinstance(self, nn.Module) else None))
            return inherited(self, *args, **kwargs)

        hook.__signature__ = inspect.signature(inherited)  # type: ignore[attr-defined]
        return hook

    return type(f"Noting{owner.__name__}", (owner,), {name: wrap(name) for name in names})


def hooks_of(*owners: type) -> list[str]:
    return sorted(
        {
            name
            for owner in owners
            for name, value in vars(owner).items()
            if inspect.isfunction(value) and name[0] != "_"
        }
        - {"configure_sharded_model", "state_key"}
    )


OF_MODULES = [
    *hooks_of(ModelHooks, DataHooks, CheckpointHooks), "training_step", "validation_step", "test_step", "predict_step",
    "configure_optimizers", "configure_callbacks", "backward", "optimizer_step", "optimizer_zero_grad",
    "lr_scheduler_step", "configure_gradient_clipping",
]  # fmt: skip


class WithData(Scheduled):
    def __init__(self) -> None:
        super().__init__("epoch")

    def train_dataloader(self) -> Any:
        return loader(vectors(3))

    def val_dataloader(self) -> Any:
        return loader(vectors(2))

    test_dataloader = predict_dataloader = val_dataloader


@pytest.mark.long("takes a second or more")
@feature("Hooks", "all hooks of modules and callbacks: order, and weights at each")
def test_order_of_hooks(tmp_path: Path) -> None:
    def run(way: RunVariant) -> Seen:
        noted: list[Any] = []
        callback = noting(Callback, hooks_of(Callback), "callback", noted)()
        saver = ModelCheckpoint(way.folder, "one", every_n_train_steps=2)
        options = {"max_epochs": 2, "accumulate_grad_batches": 2, "num_sanity_val_steps": 1}
        trainer = way.trainer(callbacks=[callback, saver], enable_checkpointing=True, **options)
        module = noting(WithData, OF_MODULES, "module", noted)()
        trainer.fit(module)
        trainer.validate(module, verbose=False)
        trainer.test(module, verbose=False)
        predicted = trainer.predict(module)
        trainer.fit_loop.max_epochs = 3
        trainer.fit(module, ckpt_path=way.folder / "one.ckpt")
        return {**left(trainer), "hooks": noted, "predicted": predicted}

    hooks = compare(run, tmp_path, LATE)["hooks"]
    names = {name for name, _ in hooks}
    assert {f"module.{name}" for name in OF_MODULES} - names <= {"module.on_exception"}
    assert len(names) > 90
    assert_changing([weight for _, weight in hooks if weight is not None])


class Data(pl.LightningDataModule):
    """All hooks that there are, each seen, and a state."""

    def __init__(self, noted: list[Any]) -> None:
        super().__init__()
        self.save_hyperparameters({"size": 4})
        self.noted = noted
        self.given = 0

    def _note(self, name: str, *more: Any) -> None:
        self.noted.append((name, *more))

    def prepare_data(self) -> None:
        self._note("prepare_data")

    def setup(self, stage: str) -> None:
        self._note("setup", str(stage))
        self.batches = vectors(5)

    def teardown(self, stage: str) -> None:
        self._note("teardown", str(stage))

    def train_dataloader(self) -> Any:
        self._note("train_dataloader")
        return DataLoader(TensorDataset(torch.cat(list(self.batches))), batch_size=4, shuffle=True)

    def val_dataloader(self) -> Any:
        self._note("val_dataloader")
        return DataLoader(TensorDataset(torch.cat(list(self.batches[:2]))), batch_size=4)

    test_dataloader = predict_dataloader = val_dataloader

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.given += 1
        self._note("before", batch[0].clone())
        return batch[0] + 1

    def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
        self._note("transfer", str(device))
        return super().transfer_batch_to_device(batch, device, dataloader_idx)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self._note("after", batch.clone())
        return batch + torch.rand(())

    def on_exception(self, exception: BaseException) -> None:
        self._note("exception", str(exception))

    def state_dict(self) -> dict[str, Any]:
        return {"given": self.given}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._note("load_state_dict", state_dict)
        self.given = state_dict["given"]


@pytest.mark.long("takes a second or more")
@feature("Hooks", "`LightningDataModule`, all hooks")
def test_data_module(tmp_path: Path) -> None:
    def run(way: RunVariant) -> Seen:
        noted: list[Any] = []
        saver = ModelCheckpoint(way.folder, "one", every_n_train_steps=3)
        trainer = way.trainer(callbacks=[saver], enable_checkpointing=True, max_epochs=2)
        module, data = Net(), Data(noted)
        trainer.fit(module, datamodule=data)
        values = [trainer.validate(module, data, verbose=False), trainer.test(module, data, verbose=False)]
        values.append(trainer.predict(module, data))
        resumed = way.trainer(max_epochs=3, callbacks=[Fails("after")])
        with fails("after"):
            resumed.fit(Net(), datamodule=Data(noted), ckpt_path=way.folder / "one.ckpt")
        return {**left(trainer), "noted": noted, "values": values, "resumed": left(resumed)}

    noted = compare(run, tmp_path)["noted"]
    assert {"exception", "load_state_dict", "teardown"} <= {each[0] for each in noted}
