"""Trains the same module with plain Lightning and with the strategy, and compares the outcomes bit by bit."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric.utilities import registry
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import Strategy
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils.data import DataLoader

from sp_lightning import SuperpipelineStrategy
from sp_lightning.core.model.wrapped import parts

Batches = Sequence[Any]
Make = Callable[[], pl.LightningModule]
Recorded = Literal["gradients", "losses", "nothing"]
Run = Literal["fit", "predict", "validate", "test"]


class LossRecorder(Callback):
    """Records the loss of each training batch."""

    def __init__(self) -> None:
        self.losses: list[Tensor] = []
        self.gradients: list[dict[str, Tensor | None]] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        loss = outputs["loss"] if isinstance(outputs, dict) and "loss" in outputs else outputs
        if isinstance(loss, Tensor):
            self.losses.append(loss.detach().clone())


class Recorder(LossRecorder):
    """Also records all gradients, by name, after each backward."""

    def on_after_backward(self, trainer: Any, pl_module: pl.LightningModule) -> None:
        self.gradients.append({name: _gradient(p) for name, p in pl_module.named_parameters()})


def _gradient(parameter: torch.nn.Parameter) -> Any:
    gradient = parameter.grad
    return None if gradient is None else gradient.detach().to_dense().clone()


@dataclass
class Outcome:
    """The outcome of a training.

    Attributes:
        losses: the loss of each training batch.
        gradients: the gradients after each backward, by name; empty if they were not recorded.
        state: the tensors of the module's state dictionary.
        optimizers: the optimizers' state dictionaries.
        rng: torch's random state on the CPU.
        module: the trained module.
        trainer: its trainer.
        results: what a prediction or a validation returns.
        extra: values that single tests add.
    """

    losses: list[Tensor]
    gradients: list[dict[str, Tensor | None]]
    state: dict[str, Tensor]
    optimizers: list[dict[str, Any]]
    rng: Tensor
    module: pl.LightningModule
    trainer: pl.Trainer
    results: Any = None
    extra: dict[str, Any] = field(default_factory=dict)


def collate(batch: list[Any]) -> Any:
    """Returns the batch unchanged: the data sets of tests have whole batches as their items."""
    return batch[0]


def loader(batches: Batches) -> DataLoader[Any]:
    """Returns a data loader that yields the batches in order."""
    return DataLoader(list(batches), batch_size=1, collate_fn=collate)  # type: ignore[arg-type]


def trainer_for(strategy: Strategy | str, **options: Any) -> pl.Trainer:
    """Returns a trainer on the CPU without logging, checkpoints and progress bar."""
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
    run: Run = "fit",
    **options: Any,
) -> Outcome:
    """Seeds random states, makes the module, and trains it, or predicts or validates with it.

    Args:
        make: makes the module.
        batches: the batches of an epoch.
        strategy: the strategy; "auto" for plain Lightning.
        val: the batches of validation; None for no validation.
        ckpt_path: a checkpoint to resume from.
        recorded: the values to record, with a callback. The callback's hooks have an effect: the strategy does not update layers
            in backward if a hook reads gradients. Use "losses" or "nothing" for tests of that mode.
        run: what the trainer does.
        options: options of the trainer.
    """
    pl.seed_everything(7, verbose=False)
    module = make()
    recorder = Recorder() if recorded == "gradients" else LossRecorder()
    callbacks = [*options.pop("callbacks", []), *([] if recorded == "nothing" else [recorder])]
    trainer = trainer_for(strategy, callbacks=callbacks, **options)
    loaded, results = loader(copy.deepcopy(batches)), None
    if run == "fit":
        trainer.fit(module, loaded, None if val is None else loader(val), ckpt_path=ckpt_path)
    else:
        results = getattr(trainer, run)(module, loaded, **({} if run == "predict" else {"verbose": False}))
    return Outcome(
        losses=recorder.losses,
        gradients=recorder.gradients,
        state={name: value.clone() for name, value in module.state_dict().items() if isinstance(value, Tensor)},
        optimizers=[copy.deepcopy(trainer.strategy.optimizer_state(each)) for each in trainer.optimizers],
        rng=torch.get_rng_state(),
        module=module,
        trainer=trainer,
        results=results,
    )


def assert_same(ours: Outcome, plain: Outcome) -> None:
    """Asserts that losses, gradients, results, parameters, buffers, optimizer state and random state are bit-identical."""
    assert plain.losses or plain.optimizers or plain.results, "the reference run did nothing"
    assert_equal(ours.losses, plain.losses, "losses")
    assert_equal(ours.gradients, plain.gradients, "gradients")
    assert_equal(ours.results, plain.results, "results")
    assert_equal(ours.state, plain.state, "state")
    assert_equal(ours.optimizers, plain.optimizers, "optimizers")
    assert torch.equal(ours.rng, plain.rng), "random state differs"


def assert_equal(ours: Any, plain: Any, where: str) -> None:
    """Asserts that nested structures are bit-identical. NaN is equal to NaN.

    Args:
        ours: the value to test.
        plain: the expected value.
        where: the name of the value, for the message.
    """
    if is_traceable_wrapper_subclass(plain):
        assert type(ours) is type(plain), f"{where}: {type(ours)} is not {type(plain)}"
        assert_equal(dict(parts("", ours)), dict(parts("", plain)), where)
    elif isinstance(plain, Tensor):
        assert isinstance(ours, Tensor), f"{where}: expected a tensor, got {ours!r}"
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
    """Returns the strategy under test."""
    return SuperpipelineStrategy(**options)


def as_on_a_gpu() -> AbstractContextManager[Any]:
    """Updates are decided as on a GPU: optimizers run fused if their users leave that open, and ``"auto"`` may overlap updates.

    Without, also on a simulated device, optimizers run as plain Lightning's, which step on the CPU, too.
    """
    return mock.patch("sp_lightning.trainer.update_facts._computes_on_host", return_value=False)


def fused(make: Make) -> Make:
    """Returns a function that makes the module with fused optimizers, which is the reference of runs with fused steps."""

    def make_fused() -> pl.LightningModule:
        module = make()
        configure = module.configure_optimizers

        def configure_fused() -> Any:
            configured = configure()
            if isinstance(configured, list):
                optimizers = configured
            elif isinstance(configured, dict):
                optimizers = [configured["optimizer"]]
            else:
                optimizers = [configured]
            for optimizer in optimizers:
                for group in optimizer.param_groups:
                    group["fused"] = True
            return configured

        module.configure_optimizers = configure_fused  # type: ignore[method-assign]
        return module

    return make_fused


@contextmanager
def as_torch_can() -> Iterator[None]:
    """Around a plain run: skips the test where torch itself has no kernel, as for an LSTM in bfloat16 on some processors."""
    try:
        yield
    except RuntimeError as error:
        if "could not create a primitive" not in str(error):
            raise
        pytest.skip(f"torch cannot compute this on this processor: {error}")


def imports_are_over() -> None:
    """The garbage collector no longer looks at what is there (0.3 s each time), nor each trainer for callbacks of packages."""
    gc.collect()
    gc.freeze()
    registry.entry_points = cache(entry_points)  # type: ignore[assignment]
