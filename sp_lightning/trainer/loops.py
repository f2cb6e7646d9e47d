"""What the engine does while Lightning's loops go on: before, in and after each batch."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor

from sp_lightning.plan.ledger import Ledger
from sp_lightning.trainer.agreement import Buffers, compare_optimizers, compare_weights
from sp_lightning.trainer.compat import skips_backward
from sp_lightning.trainer.optimizer_steps import Closure, OptimizerSteps
from sp_lightning.trainer.options import Options
from sp_lightning.trainer.run import Run
from sp_lightning.trainer.user_hooks import UserHooks


class Loops:
    """The loops of one run: training with its validation, or a validation, test or prediction loop alone.

    Args:
        run: its engine computes.
        module: whose steps they are; it has a trainer.
        options: the user's.
        log: where a user's messages go.
    """

    def __init__(self, run: Run, module: pl.LightningModule, options: Options, log: logging.Logger) -> None:
        self._run = run
        self._module = module
        self._hooks = UserHooks(module, check_writes=options.check_writes)
        self._steps = OptimizerSteps(run, self._hooks, options, log)
        self._begun = False
        self._buffers = None if run.ranks is None else Buffers(run.ranks, module, module.trainer.state.fn)

    def close(self) -> None:
        """Leaves the optimizers as they were. The run is closed already."""
        self._steps.close()

    @property
    def ledger(self) -> Ledger | None:
        """Host memory and traffic of training as they are now; None outside training."""
        return self._steps.ledger

    def remarks(self) -> list[str]:
        """What a user should know of this run beside the plan, in sentences."""
        return [*self._run.remarks(), *self._steps.remarks()]

    # ------------------------------------------------------------------ loops begin and end

    def fitting_begins(self) -> None:
        """Set-up for training is over but for loading a checkpoint.

        Raises:
            ValueError: ``optimizer_overlap`` has a mode that is not possible, or ranks have different optimizers.
            RuntimeError: the host has no room for gradients and optimizer state.
        """
        if self._run.ranks is not None:
            compare_optimizers(self._run.ranks, self._module.trainer.optimizers)
        self._steps.arrange(self._module.trainer)
        ledger = self._steps.ledger
        assert ledger is not None
        needed = {"for gradients": ledger.gradients, "for the optimizer's state": self._steps.place_state()}
        self._run.reserve_host_memory(needed)

    def compare_nodes(self, when: str, *, state: bool = False) -> None:
        """With several nodes, compares their weights. Collective.

        Args:
            when: it is, in words.
            state: whether the optimizers' state is compared, too.

        Raises:
            ValueError: they differ.
        """
        ranks = self._run.ranks
        if ranks is not None and ranks.nodes > 1:
            with self._run.host_parameters():
                compare_weights(ranks, self._module, when, self._module.trainer.optimizers if state else ())

    def optimizers_loaded(self) -> None:
        """The optimizers have the state of a checkpoint."""
        self._steps.state_loaded()

    def begin(self, phase: str) -> None:
        """A loop begins. What ``on_fit_start`` and its like have changed counts."""
        if not self._begun:
            self._begun = True
            self.compare_nodes("before the first batch")
        self._hooks.loop_starts()
        if self._run.ranks is not None:
            self._run.ranks.board.place = f"the beginning of the loop {phase!r}"
        if phase == "train":
            self._steps.arrange(self._module.trainer)
        if phase == "validate" and self._run.tuner is not None:
            self._run.tuner.stop_timing()  # validation is no part of the training batch before it

    # ------------------------------------------------------------------ batches

    def training_batch_starts(self, batch: Any) -> None:
        """Callbacks and module have had their hooks: but for an optimizer's step around it, the training step is next."""
        self._renew()
        assert self._run.streamer is not None
        if self._hooks.may_write_weights("train"):
            self._run.streamer.invalidate()
        self._tune("train", batch)
        if not self._hooks.may_write_before_training_step():
            self._run.streamer.prefetch_for("train", training=True)

    def step(self, phase: str, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Runs Lightning's step of a batch.

        Args:
            phase: ``"train"``, ``"validate"``, ``"test"`` or ``"predict"``.
            step: Lightning's. The other arguments are handed to it.

        Raises:
            torch.OutOfMemoryError: the device has run out of memory. The window is smaller from now on, and the error says
                which options take less.
        """
        if phase != "train":  # the start of a training batch has seen to it
            self._renew()
            self._tune(phase, args)
        if self._buffers is not None:
            self._buffers.step_begins()
        training, streamer = phase == "train", self._run.streamer
        assert streamer is not None
        manual = training and not self._module.automatic_optimization
        quiet = not self._hooks.may_have_written(phase)
        try:
            with self._run.whole_after_failure():
                streamer.begin(phase, training=training, manual=manual, quiet=quiet)
                with streamer.saving():
                    output = step(*args, **kwargs)
                    if training and not manual and output is not None and not skips_backward(self._module.trainer):
                        streamer.await_backward(seen=self._hooks.run_at("zero_grad"))
                    else:
                        follows = any(
                            map(self._hooks.may_write_weights, (phase, "train"))
                        )  # the batch may be the last one
                        streamer.end(writes_follow=training or follows)
                    return output
        except torch.OutOfMemoryError as error:
            self._run.make_room(error)
            raise

    def backward_follows(self, loss: Tensor) -> None:
        """The loss is what ``backward`` will be called on."""
        if self._run.streamer is not None:
            self._run.streamer.announce_backward(loss, quiet=not self._hooks.may_write_weights("backward"))

    def backward_is_over(self) -> None:
        """Also where the module's own ``backward`` does nothing."""
        if self._run.streamer is not None:
            self._run.streamer.end_without_backward()

    def optimizer_step(self, optimizer: Any, closure: Closure, step: Callable[[Closure], Any], plugin: Any) -> Any:
        """Runs an optimizer's step, as :meth:`OptimizerSteps.run` says."""
        return self._steps.run(optimizer, closure, step, plugin)

    def expect_next_batch(self) -> None:
        """A training batch is over: where nothing writes weights before the next one, its first layers come now."""
        if self._run.streamer is not None and not self._hooks.may_write_weights("train"):
            with self._run.whole_after_failure():
                self._run.streamer.prefetch_for("train", training=True)

    def _renew(self) -> None:
        if self._run.renew():
            self._steps.rearrange()

    def _tune(self, phase: str, batch: Any) -> None:
        """Has k and k' chosen, if they are to be. Validation within training chooses nothing."""
        fitting = self._module.trainer.state.fn == TrainerFn.FITTING
        if self._run.tuner is not None and (phase == "train") == fitting:
            self._run.tuner.batch_starts(batch, self._steps.overlap)
