"""Run the same module under plain Lightning and under superpipeline, and compare everything bitwise."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import Strategy
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils.data import DataLoader

from sp_lightning import SuperpipelineStrategy
from sp_lightning.model.wrapped import parts

Batches = Sequence[Any]
Make = Callable[[], pl.LightningModule]
Recorded = Literal["gradients", "losses", "nothing"]


class LossRecorder(Callback):
    """Notes losses."""

    def __init__(self) -> None:
        self.losses: list[Tensor] = []
        self.gradients: list[dict[str, Tensor | None]] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        loss = outputs["loss"] if isinstance(outputs, dict) and "loss" in outputs else outputs
        if isinstance(loss, Tensor):
            self.losses.append(loss.detach().clone())


class Recorder(LossRecorder):
    """Notes all gradients, too, in the order in which they come, as ``on_after_backward`` finds them."""

    def on_after_backward(self, trainer: Any, pl_module: pl.LightningModule) -> None:
        self.gradients.append(
            {
                name: None if p.grad is None else p.grad.detach().to_dense().clone()
                for name, p in pl_module.named_parameters()
            }
        )


@dataclass
class Outcome:
    """Everything that a run leaves behind."""

    losses: list[Tensor]
    gradients: list[dict[str, Tensor | None]]
    state: dict[str, Tensor]
    optimizers: list[dict[str, Any]]
    rng: Tensor
    module: pl.LightningModule
    trainer: pl.Trainer
    extra: dict[str, Any] = field(default_factory=dict)


def collate(batch: list[Any]) -> Any:
    """Data sets here hold whole batches."""
    return batch[0]


def loader(batches: Batches) -> DataLoader[Any]:
    """One batch after the other, in order."""
    return DataLoader(list(batches), batch_size=1, collate_fn=collate)  # type: ignore[arg-type]


def trainer_for(strategy: Strategy | str, **options: Any) -> pl.Trainer:
    """A quiet CPU trainer."""
    settings: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "max_epochs": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
    }
    return pl.Trainer(strategy=strategy, **{**settings, **options})


def fit(
    make: Make,
    batches: Batches,
    strategy: Strategy | str = "auto",
    val: Batches | None = None,
    ckpt_path: Path | None = None,
    recorded: Recorded = "gradients",
    **options: Any,
) -> Outcome:
    """Seed, make the module, train it. What is noted is noted by a hook of a callback, and the engine heeds hooks."""
    pl.seed_everything(7, verbose=False)
    module = make()
    recorder = Recorder() if recorded == "gradients" else LossRecorder()
    callbacks = [*options.pop("callbacks", []), *([] if recorded == "nothing" else [recorder])]
    trainer = trainer_for(strategy, callbacks=callbacks, **options)
    batches = copy.deepcopy(batches)
    trainer.fit(module, loader(batches), None if val is None else loader(val), ckpt_path=ckpt_path)
    return Outcome(
        losses=recorder.losses,
        gradients=recorder.gradients,
        state={name: value.clone() for name, value in module.state_dict().items() if isinstance(value, Tensor)},
        optimizers=[copy.deepcopy(each.state_dict()) for each in trainer.optimizers],
        rng=torch.get_rng_state(),
        module=module,
        trainer=trainer,
    )


def assert_same(ours: Outcome, plain: Outcome) -> None:
    """Bitwise equality of losses, gradients, parameters, buffers, optimizer state and random state."""
    assert plain.losses or plain.optimizers, "the reference run did nothing"
    assert_equal(ours.losses, plain.losses, "losses")
    assert_equal(ours.gradients, plain.gradients, "gradients")
    assert_equal(ours.state, plain.state, "state")
    assert_equal(ours.optimizers, plain.optimizers, "optimizers")
    assert torch.equal(ours.rng, plain.rng), "random state differs"


def assert_equal(ours: Any, plain: Any, where: str) -> None:
    """Bitwise equality of nested structures; the message names the place."""
    if is_traceable_wrapper_subclass(plain):
        assert type(ours) is type(plain), f"{where}: {type(ours)} is not {type(plain)}"
        assert_equal(dict(parts("", ours)), dict(parts("", plain)), where)
    elif isinstance(plain, Tensor):
        assert isinstance(ours, Tensor), f"{where}: {ours!r} is no tensor"
        assert ours.dtype == plain.dtype, f"{where}: {ours.dtype} is not {plain.dtype}"
        assert ours.shape == plain.shape, f"{where}: {tuple(ours.shape)} is not {tuple(plain.shape)}"
        same = torch.equal(ours, plain) or (
            plain.is_floating_point()
            and torch.equal(ours.isnan(), plain.isnan())
            and torch.equal(ours.nan_to_num(), plain.nan_to_num())
        )
        assert same, f"{where}: values differ by up to {(ours.double() - plain.double()).abs().max():.3g}"
    elif isinstance(plain, dict):
        assert list(ours) == list(plain), f"{where}: keys {list(ours)} are not {list(plain)}"
        for key in plain:
            assert_equal(ours[key], plain[key], f"{where}[{key!r}]")
    elif isinstance(plain, (list, tuple)):
        assert len(ours) == len(plain), f"{where}: {len(ours)} entries, not {len(plain)}"
        for index, (mine, theirs) in enumerate(zip(ours, plain, strict=True)):
            assert_equal(mine, theirs, f"{where}[{index}]")
    else:
        assert ours == plain, f"{where}: {ours!r} is not {plain!r}"


def superpipeline(**options: Any) -> SuperpipelineStrategy:
    """The strategy under test; the optimizer is left as it is, because plain Lightning leaves it."""
    return SuperpipelineStrategy(**{"fused_optimizer": False, **options})


def fused(make: Make) -> Make:
    """The module with its optimizers as ours run them: fused, in the groups that leave it open."""

    def made() -> pl.LightningModule:
        module = make()
        configure = module.configure_optimizers

        def configured() -> Any:
            found = configure()
            for optimizer in (
                found if isinstance(found, list) else [found["optimizer"] if isinstance(found, dict) else found]
            ):
                for group in optimizer.param_groups:
                    group["fused"] = True
            return found

        module.configure_optimizers = configured  # type: ignore[method-assign]
        return module

    return made
