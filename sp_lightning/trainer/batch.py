"""One step of a loop, and once more where the window was too large for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn

from sp_lightning.trainer.compat import skips_backward
from sp_lightning.trainer.retry import Snapshot
from sp_lightning.trainer.run import Run
from sp_lightning.trainer.user_hooks import UserHooks


class Batch:
    """One training, validation, test or prediction step, between the beginning and the end of a step of the engine.

    Args:
        run: its engine is up to date.
        hooks: what user code may do before and after the step.
        module: whose step it is.
        phase: ``"train"``, ``"validate"``, ``"test"`` or ``"predict"``.
    """

    def __init__(self, run: Run, hooks: UserHooks, module: pl.LightningModule, phase: str) -> None:
        self._run = run
        self._hooks = hooks
        self._module = module
        self._phase = phase
        self._training = phase == "train"

    def run(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Runs the step, and once more if the device runs out of memory in a batch that is measured and nothing else happened.

        Args:
            step: Lightning's. The other arguments are handed to it.

        Raises:
            torch.OutOfMemoryError: the step is not repeated, or has failed twice.
        """
        # A snapshot pickles the attributes of the user's modules, so it is made where a repetition has a chance alone.
        tuner = self._run.tuner
        measured = self._training and tuner is not None and tuner.measures_modes
        snapshot = Snapshot(self._module, (args, kwargs)) if measured else None
        try:
            return self._attempt(step, *args, **kwargs)
        except torch.OutOfMemoryError as error:
            if not self._run.make_room(error, self._obstacle(snapshot)):
                raise
            assert snapshot is not None
            snapshot.restore()
        # Outside of the handler: the error would keep the frames of the first attempt, and with them device memory.
        return self._attempt(step, *args, **kwargs)

    def _obstacle(self, snapshot: Snapshot | None) -> str | None:
        """Why the step cannot be repeated, in words; None where that is not tried, and an empty string if it can."""
        if snapshot is None:
            return None
        if self._run.ranks is not None and any(isinstance(each, nn.SyncBatchNorm) for each in self._module.modules()):
            return "the other ranks would have to repeat it, too, because of SyncBatchNorm"
        return snapshot.obstacle()

    def _attempt(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        streamer = self._run.streamer
        assert streamer is not None
        manual = self._training and not self._module.automatic_optimization
        quiet = not self._hooks.may_have_written(self._phase)
        with self._run.whole_after_failure():
            streamer.begin(self._phase, training=self._training, manual=manual, quiet=quiet)
            with streamer.saving():
                output = step(*args, **kwargs)
                if self._training and not manual and self._has_backward(output):
                    streamer.await_backward(seen=self._hooks.may_look_at_gradients_before_backward())
                else:
                    streamer.end(writes_follow=self._training or self._hooks.may_write_after(self._phase))
                return output

    def _has_backward(self, output: Any) -> bool:
        return output is not None and not skips_backward(self._module.trainer)
