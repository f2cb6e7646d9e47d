"""Where the optimizers of a run step with ``optimizer_on="auto"``, and whether another place or time would be faster."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch.optim import Optimizer

from sp_lightning.gpu_steps.alone import is_of_bitsandbytes
from sp_lightning.gpu_steps.times import host_seconds_of, least_seconds, measure
from sp_lightning.plan.choices import Overlap
from sp_lightning.plan.ledger import Ledger
from sp_lightning.trainer.options import Options
from sp_lightning.trainer.user_hooks import against_background_on_device, against_steps_on_device, choose_overlap

if TYPE_CHECKING:
    from sp_lightning.trainer.run import Run

_MUCH = 0.9  # what one place takes of the other's time, to be worth other bits


class StepPlace:
    """Decides where the optimizers of a run step: once for all its steps, because the last bits depend on it.

    Args:
        run: whose steps they are.
        options: the user's.
        count: what a step sends, reads and writes: by whether the device steps, and when.

    Attributes:
        why: why ``"auto"`` has chosen the place; empty before, and where nothing is to choose.
    """

    def __init__(self, run: Run, options: Options, count: Callable[[bool, Overlap], Ledger]) -> None:
        self._run = run
        self._options = options
        self._count = count
        self.why = ""

    @property
    def remark(self) -> str:
        """What was chosen, as a sentence; empty if nothing was."""
        place = "GPU" if self._run.steps_on_device else "CPU"
        return f'Optimizers step on the {place} (optimizer_on="auto": {self.why}).' if self.why else ""

    def decide(self, stepping: Sequence[Optimizer], *, fuse: bool) -> None:
        """Decides it, from optimizers, hooks and callbacks as they are now.

        Args:
            stepping: the optimizers.
            fuse: whether the host would run them fused where their users left that open.

        Raises:
            ValueError: they are to be on the device, and cannot be.
        """
        asked, run = self._options.optimizer_on, self._run
        if asked == "gpu" and (why := against_steps_on_device(run.module.trainer, stepping)):
            raise ValueError(f'optimizer_on="gpu" cannot be used: {why}. Leave it out: then the host steps.')
        if asked != "auto" or self.why or not stepping:
            return
        if run.engine.device.computes_on_host:
            self.why = "the model computes there, too"
            return
        if not run.steps_on_device:
            self.why = "several devices" if run.ranks else "the device has no room for two layers' state"
            return
        stays, self.why = self._choose(stepping, fuse)
        if not stays:
            run.step_on_host()

    def _choose(self, stepping: Sequence[Optimizer], fuse: bool) -> tuple[bool, str]:
        """Returns whether the device is the better place, and why.

        Raises:
            ValueError: the user's ``optimizer_overlap`` is not possible on the device.
        """
        names = " and ".join(sorted({type(each).__name__ for each in stepping}))
        if why := self._against_device(stepping):
            return False, why
        if any(map(is_of_bitsandbytes, stepping)):
            return True, "bitsandbytes' kernels are for devices"
        there = self._overlap(stepping, on_device=True)
        try:
            here = self._overlap(stepping, fuse=fuse)
        except ValueError:
            return True, f'the host cannot update {names} with optimizer_overlap="{self._options.optimizer_overlap}"'
        seconds = self._seconds(stepping, there, here)
        if seconds is None:
            return False, f"what the state of {names} will be is not known, or the device has no room to be measured"
        why = "estimated time of an update: {gpu:.3g} s on the GPU, {cpu:.3g} s on the CPU".format(**seconds)
        return seconds["gpu"] < _MUCH * seconds["cpu"], why

    def better(self, stepping: Sequence[Optimizer], *, fuse: bool) -> str:
        """A sentence if the other place would be faster; empty if not, or if that is not known or not possible."""
        now, other = ("gpu", "cpu") if self._run.steps_on_device else ("cpu", "gpu")
        if self._against_device(stepping):
            return ""
        try:
            there, here = self._overlap(stepping, on_device=True), self._overlap(stepping, fuse=fuse)
        except ValueError:
            return ""
        seconds = self._seconds(stepping, there, here)
        if seconds is None or seconds[other] >= _MUCH * seconds[now]:
            return ""
        return f'Estimated time of an update: {seconds[other]:.3g} s with optimizer_on="{other}", {seconds[now]:.3g} s now.'

    def earlier(self, stepping: Sequence[Optimizer], *, fuse: bool) -> str:
        """A sentence if the run has waited for updates under forward most, and they may run under backward; else empty."""
        run, stats = self._run, self._run.engine.stats()
        if 2 * stats.update_stall_seconds < stats.waited_seconds:
            return ""
        try:
            choose_overlap("backward", run.module.trainer, stepping, fuse=fuse, on_device=run.steps_on_device)
        except ValueError:
            return ""
        return (
            'Try optimizer_overlap="backward": updates then overlap with the backward pass, too '
            "(p.grad is None after a step)."
        )

    def _against_device(self, stepping: Sequence[Optimizer]) -> str:
        options, trainer = self._options, self._run.module.trainer
        background = options.optimizer_overlap in ("forward", "backward")
        return (
            against_steps_on_device(trainer, stepping)
            or ("fused_optimizer=True is about steps there" if options.fused_optimizer is True else "")
            or (against_background_on_device(trainer, stepping) if background else "")
        )

    def _overlap(self, stepping: Sequence[Optimizer], *, fuse: bool = False, on_device: bool = False) -> Overlap:
        """When updates would run. The errors are those of :func:`choose_overlap`."""
        asked, trainer = self._options.optimizer_overlap, self._run.module.trainer
        return choose_overlap(asked, trainer, stepping, fuse=fuse, on_device=on_device)[0]

    def _seconds(self, stepping: Sequence[Optimizer], there: Overlap, here: Overlap) -> Mapping[str, float] | None:
        """Seconds of a step by the place; None if the optimizers' state is not known, or the device is full.

        Args:
            stepping: the optimizers.
            there, here: when updates would run on the device, and on the host.
        """
        on_device, on_host = self._count(True, there), self._count(False, here)
        if on_device.state is None:
            return None
        try:
            machine = measure(self._run.engine.device)
        except torch.OutOfMemoryError:
            return None
        computing = host_seconds_of(stepping, machine)
        return {"gpu": least_seconds(on_device, machine), "cpu": least_seconds(on_host, machine, computing)}
