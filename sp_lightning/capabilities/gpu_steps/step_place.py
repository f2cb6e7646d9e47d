"""Chooses where optimizers step with ``optimizer_on="auto"``, and suggests the other place if it would be faster."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from torch.optim import Optimizer

from sp_lightning.capabilities.gpu_steps.alone import against_gpu, is_declared
from sp_lightning.capabilities.gpu_steps.times import host_seconds_of, least_seconds, measure
from sp_lightning.core.observe.messages import degrading
from sp_lightning.core.plan.choices import Overlap
from sp_lightning.core.plan.update_policy import UpdateFacts, choose_overlap
from sp_lightning.core.updates.fused import is_of_bitsandbytes
from sp_lightning.trainer.step_place import StepPlace

LOG = logging.getLogger("lightning.pytorch.superpipeline")
_MUCH = 0.9  # the other place changes the last bits, so it must take less than this share of the time


class MeasuredPlace(StepPlace):
    """Decides once in a run where its optimizers step, by measured rates of the machine."""

    def against(self, optimizers: Sequence[Optimizer]) -> str:
        return against_gpu(optimizers)

    def is_declared(self, optimizer: Optimizer) -> bool:
        return is_declared(optimizer)

    def moves(self, stepping: Sequence[Optimizer], facts: UpdateFacts) -> bool:
        if facts.optimizer_on != "auto" or not stepping:
            return False
        if self.why:
            # The place does not change, except if the trainer has got an optimizer that the GPU cannot step.
            moves = facts.place == "gpu" and bool(facts.against_gpu)
            self.why = facts.against_gpu if moves else self.why
            return moves
        if facts.on_cpu:
            self.why = "the model computes there, too"
        elif facts.place == "cpu":
            self.why = "several devices" if facts.ranks else "the device has no room for two layers' state"
        else:
            stays, self.why = self._choose(stepping, facts)
            return not stays
        return False

    def _choose(self, stepping: Sequence[Optimizer], facts: UpdateFacts) -> tuple[bool, str]:
        """Returns True if the GPU is the better place, otherwise False; and the reason.

        Raises:
            ValueError: the user's ``optimizer_overlap`` is not possible on the GPU.
        """
        names = " and ".join(sorted({type(each).__name__ for each in stepping}))
        if why := _against_gpu(facts):
            return False, why
        if any(map(is_of_bitsandbytes, stepping)):
            return True, "bitsandbytes' kernels are for devices"
        there, _ = choose_overlap(facts, "gpu")
        try:
            here, _ = choose_overlap(facts, "cpu")
        except ValueError:
            return True, f'the CPU cannot update {names} with optimizer_overlap="{facts.overlap}"'
        seconds = self._seconds(stepping, there, here)
        if seconds is None:
            return False, f"what the state of {names} will be is not known, or the device could not be measured"
        why = "estimated time of an update: {gpu:.3g} s on the GPU, {cpu:.3g} s on the CPU".format(**seconds)
        return seconds["gpu"] < _MUCH * seconds["cpu"], why

    def better(self, stepping: Sequence[Optimizer], facts: UpdateFacts) -> str:
        now, other = ("gpu", "cpu") if facts.place == "gpu" else ("cpu", "gpu")
        if _against_gpu(facts):
            return ""
        try:
            there, here = choose_overlap(facts, "gpu")[0], choose_overlap(facts, "cpu")[0]
        except ValueError:
            return ""
        seconds = self._seconds(stepping, there, here)
        if seconds is None or seconds[other] >= _MUCH * seconds[now]:
            return ""
        return f'Estimated time of an update: {seconds[other]:.3g} s with optimizer_on="{other}", {seconds[now]:.3g} s now.'

    def _seconds(self, stepping: Sequence[Optimizer], there: Overlap, here: Overlap) -> Mapping[str, float] | None:
        """Returns the seconds of a step in each place; None if the optimizers' state is not known, or the GPU is full.

        Args:
            stepping: the optimizers.
            there, here: the phase that updates would overlap with on the GPU, and on the CPU.
        """
        on_device, on_host = self._count("gpu", there), self._count("cpu", here)
        if on_device.state is None:
            return None
        machine = None
        with degrading(LOG, "The measurement of the GPU", "It does not decide where optimizers step"):
            machine = measure(self._engine_device())
        if machine is None:
            return None
        computing = host_seconds_of(stepping, machine)
        return {"gpu": least_seconds(on_device, machine), "cpu": least_seconds(on_host, machine, computing)}


def _against_gpu(facts: UpdateFacts) -> str:
    """Returns why ``"auto"`` cannot step on the GPU; empty if it can."""
    if facts.against_gpu:
        return facts.against_gpu
    if facts.fused_optimizer is True:
        return "fused_optimizer=True is about steps there"
    return facts.against_gpu_background if facts.overlap in ("forward", "backward") else ""
