"""Which plans fit the budget of GPU memory.

:class:`Window` makes the plan for the first batches, with the smallest window. A tuner (``sp_lightning.trainer.tuner``) may
measure the memory that batches use beside weights. After that :class:`Window` also tells which larger plans fit.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from sp_lightning.core.device.device import Device
from sp_lightning.core.model.found import Found
from sp_lightning.core.plan.choices import Count
from sp_lightning.core.plan.plan import Plan, make_plan
from sp_lightning.core.plan.units import as_option, human_bytes

FREE_THE_GPU = "List them: nvidia-smi. End them, or choose another GPU: CUDA_VISIBLE_DEVICES=1."
"""The next step if other programs fill a GPU."""

# This share of the free memory is left to the rounding of allocators and to libraries.
_MARGIN = 1 / 16
# If a smaller share of the device is free at set-up, the log says so.
_NEARLY_ALL = 0.9
# k if nothing limits memory (on the CPU): the smallest window in which transfers overlap with computation.
_WITHOUT_LIMIT = 2


def about_others(held: int, total: int) -> str:
    """Returns the next step if other programs hold these bytes of a GPU's memory."""
    return f"Other programs hold {human_bytes(held)} of the GPU's {human_bytes(total)}. {FREE_THE_GPU}"


class Window:
    """The plans that fit: k and k'.

    Two numbers of bytes decide which plans fit: the budget, and the memory use of everything except weights (activations,
    gradients, workspaces, buffers). A tuner measures this memory use while the first batches run with the smallest window.

    Args:
        k: a number, or "auto".
        k_prime: a number, or "auto", which is 1.
        budget: bytes of device memory (int), or a share of the memory that is free at set-up (float). None means all free
            memory, less a margin if k is "auto".
        ranks, nodes: the number of devices of a node, and of nodes, that sum their gradients.
        training: True if the batches are trained.
        steps_on_device: True if optimizers step on the device, so that plans have room for steps.

    Attributes:
        k: as given.
        k_prime: the number.
        budget: as given. Takes effect with :meth:`begin`.
    """

    def __init__(
        self,
        k: Count,
        k_prime: Count,
        budget: int | float | None,
        *,
        ranks: int = 1,
        nodes: int = 1,
        training: bool = True,
        steps_on_device: bool = False,
    ) -> None:
        self.k = k
        self.k_prime = 1 if k_prime == "auto" else k_prime
        self.budget = budget
        self._margin = _MARGIN if k == "auto" else 0  # only chosen windows fill the memory
        self._training = training
        self._options: dict[str, Any] = {"ranks": ranks, "nodes": nodes, "training": training}
        self._steps_on_device = steps_on_device and training and ranks * nodes == 1
        self._found: Found
        self.room: int | None = None
        """Bytes of the budget; None if nothing limits device memory."""
        self.free: int | None = None
        """Bytes of device memory that were free at set-up. :meth:`lower_budget` may lower the number. None on the CPU."""
        self.remark = ""
        """A sentence for the user if the run may fill a device that other programs use as well."""
        self.rest = 0
        """The measured peak of everything except weights, in bytes. Gradients in flight are included."""
        self.rest_gradients = 0
        """The most bytes of ``rest`` that are gradients."""
        self.rest_steps = 0
        """The bytes of ``rest`` that are optimizer steps of weights that stay on the device, and their state."""

    @property
    def auto(self) -> bool:
        """True if k is chosen, and a budget limits the choice."""
        return self.k == "auto" and self.room is not None and not self._found.nothing

    def begin(self, found: Found, device: Device) -> Plan:
        """Returns the plan for the first batches: the smallest window. Sets the budget by the device's free memory.

        Args:
            found: the model's layers.
            device: the device, before anything is allocated on it.

        Raises:
            ValueError: the plan does not fit the budget, or the budget is a share and the device has no memory of its own.
        """
        free, budget = device.free_bytes(), self.budget
        self._found, self.free, self.room = found, free, None
        self.remark = self._about_free(free, device.total_bytes())
        self.rest = self.rest_gradients = self.rest_steps = 0
        if isinstance(budget, int):
            self.room = budget if free is None else min(budget, free)
        elif free is not None:
            self.room = int(free * (1 - self._margin if budget is None else budget))
        elif budget is not None:
            raise ValueError(
                f"gpu_memory={as_option(budget)} is a share of the device's free memory, and {device.device} has no memory of "
                'its own. Give a size: SuperpipelineStrategy(gpu_memory="1GiB").'
            )
        plan = self.plan(_WITHOUT_LIMIT if self.room is None else 1)
        if self.room is not None and self._is_too_large(plan):
            raise ValueError(self._too_large(plan, self.room, device))
        return plan

    def _about_free(self, free: int | None, total: int | None) -> str:
        if self.budget is not None or free is None or total is None or free >= _NEARLY_ALL * total:
            return ""
        return (
            f"{human_bytes(free)} of the GPU's {human_bytes(total)} are free, and gpu_memory= is not set, so this run may use "
            "all that is free. If another program on this GPU needs more memory later, set gpu_memory= in both."
        )

    def expect_gradients(self, expected: bool) -> None:
        """Sets whether batches are trained. The plans of :meth:`begin` are then others; the CPU steps all layers."""
        self._training = self._options["training"] = expected

    def lower_budget(self, there: int | None = None) -> None:
        """Lowers the budget, if there is one, because it was too large.

        Args:
            there: bytes that torch has allocated or could allocate: the new upper bound. None lowers the budget by 1/16.
        """
        if there is not None and self.free is not None:
            self.free = min(self.free, there)
        if self.room is None:
            return
        if there is None:
            self.room -= self.room // 16
        else:
            share = 1 - self._margin if self.budget is None else 1
            self.room = min(self.room, int(there * share))

    @property
    def filled_room(self) -> int | None:
        """Bytes of the budget if kept activations may fill it, even if k and k' are numbers."""
        # No limit; or the user's limit, which may be filled; or a limit that leaves a margin already.
        if self.room is None or self.budget is not None or self._margin:
            return self.room
        return int(self.room * (1 - _MARGIN))

    def needs(self, plan: Plan) -> int:
        """Returns the bytes of device memory that a plan uses, and that everything else uses, as measured."""
        gradients = max(0, plan.gradient_bytes - self.rest_gradients)
        steps = plan.update_bytes - min(self.rest_steps, plan.staying_bytes)
        return plan.slot_bytes + steps + gradients + plan.resident_bytes + self.rest

    def fits(self, plan: Plan, more: int = 0) -> bool:
        """Returns True if :meth:`needs` of a plan and ``more`` bytes stay within the budget."""
        return self.room is None or self.needs(plan) + more <= self.room

    def again(self, plan: Plan, found: Found) -> Plan:
        """Returns the same plan after other weights have become trainable."""
        return self._make(found, k=plan.k, k_prime=plan.k_prime)

    def smallest(self) -> Plan:
        """Returns the smallest plan, for use after the device has run out of memory."""
        return self.plan(1)

    @property
    def count(self) -> int:
        """The number of layers, at least 1: the largest k."""
        return max(len(self._found.layers), 1)

    def _make(self, found: Found, *, k: int, k_prime: int) -> Plan:
        """Makes the plan of a window."""
        plan = make_plan(found, k=k, k_prime=k_prime, **self._options)
        return replace(plan, steps_on_device=self._steps_on_device)

    def plan(self, k: int) -> Plan:
        """Returns the plan with this k. If the user gave a number for ``k``, that number is used instead."""
        return self._make(self._found, k=k if self.k == "auto" else min(self.k, self.count), k_prime=self.k_prime)

    # ------------------------------------------------------------------ plans that do not fit

    def _is_too_large(self, plan: Plan) -> bool:
        return self.room is not None and plan.peak_device_bytes > self.room

    def _too_large(self, plan: Plan, room: int, device: Device) -> str:
        """Returns the error message for a plan that does not fit: needed memory, free memory and a remedy."""
        least = self._make(self._found, k=1, k_prime=1).peak_device_bytes
        free = f"{_bytes(room)} are free on {device.device}"
        given = free if self.budget is None else f"with gpu_memory={as_option(self.budget)} there are {_bytes(room)}"
        parts = {
            "slots": plan.slot_bytes, "what stays on the GPU": plan.resident_bytes, "gradients": plan.gradient_bytes,
            "steps": plan.update_bytes,
        }  # fmt: skip
        takes = ", ".join(f"{name} {human_bytes(nbytes)}" for name, nbytes in parts.items() if nbytes)
        largest = max(plan.layers, key=lambda layer: layer.nbytes, default=None)
        divide = "" if largest is None else f"divide the largest layer, {largest.name!r}, with layers=, "
        remedy = (
            "Use less: SuperpipelineStrategy(k=1, k_prime=1)."
            if least <= room
            else f'Lower gpu_layers, {divide}leave optimizer_on="gpu" or names of keep_on_gpu= out, or give it as much memory.'
        )
        others = device.held_by_others()
        return (
            f"{'Weights and gradients need' if self._training else 'Weights need'} {_bytes(plan.peak_device_bytes)} with "
            f"k={plan.k} and k_prime={plan.k_prime} ({takes}), and {given}. The least is {human_bytes(least)}, with k=1 and "
            f"k_prime=1. {remedy}{'' if others is None else f' {about_others(*others)}'}"
        )


def _bytes(nbytes: int) -> str:
    return f"{nbytes} bytes ({human_bytes(nbytes)})"
