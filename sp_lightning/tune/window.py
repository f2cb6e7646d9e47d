"""k and k' by themselves: as much of the model on the device as the budget has room for and as makes a batch faster."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from sp_lightning.device.device import Device
from sp_lightning.model.found import Found
from sp_lightning.plan.options import Count
from sp_lightning.plan.plan import Plan, make_plan
from sp_lightning.plan.units import human_bytes

# What allocators round up, and what libraries take for themselves, of memory that is free.
_MARGIN = 1 / 16
# What k' is tried: more layers in one transfer than that are seldom worth their slots.
_TOGETHER = (1, 2, 4)
# Plans whose batches take so nearly the same time are equal; the smallest is chosen.
SAME = 1.01
# On the CPU there is no limit to find: layers move through the smallest window that overlaps.
_WITHOUT_LIMIT = (2, 1)


class Window:
    """The choice of k and k'.

    Two numbers of bytes bound it: the budget, and what everything beside weights takes (activations, gradients,
    workspaces, buffers), which is measured while the first batches run through the smallest window.

    Args:
        k, k_prime: numbers, or "auto".
        budget: bytes of device memory, or the share of what is free at set-up; None for all of that but a margin.
        filled: whether something else takes what k and k' leave, if they are numbers.
    """

    def __init__(self, k: Count, k_prime: Count, budget: int | float | None, *, filled: bool = False) -> None:
        self._margin = _MARGIN if filled or "auto" in (k, k_prime) else 0
        self._k = k
        self._k_prime = k_prime
        self._budget = budget
        self._found: Found | None = None
        self.room: int | None = None
        """Bytes of the budget; None where nothing limits it."""
        self.rest = 0
        """Most bytes that anything but weights takes, as far as it is known; the gradients on their way among them."""
        self.rest_gradients = 0
        """How many of these are gradients, at most."""

    @property
    def auto(self) -> bool:
        """Whether there is anything to choose."""
        return "auto" in (self._k, self._k_prime) and self.room is not None

    def begin(self, found: Found, device: Device, find: Callable[[Sequence[str]], Found] | None = None) -> Plan:
        """The plan for the first batches: the smallest window.

        Args:
            found: the layers.
            device: before anything is allocated.
            find: finds the layers that patterns name instead, for advice.

        Raises:
            ValueError: not even that fits the budget.
        """
        free = device.free_bytes()
        if isinstance(self._budget, float) and free is None:
            raise ValueError(
                f"memory_budget={self._budget} is a share of the device's free memory, and {device.device} has no memory of "
                'its own. Give a size: SuperpipelineStrategy(memory_budget="1GiB").'
            )
        self._found = found
        self.rest = self.rest_gradients = 0
        self.room = _room(self._budget, free, margin=self._margin)
        limited = self.room is not None
        k, k_prime = (1, 1) if limited else _WITHOUT_LIMIT
        plan = self._plan(k, k_prime)
        if self.room is not None:
            self._check(plan, self.room, device, find)
        return plan

    def lower_budget(self) -> None:
        """Takes a sixteenth off the budget, if there is one: it was too large in practice."""
        if self.room is not None:
            self.room -= self.room // 16

    def needs(self, plan: Plan) -> int:
        """Bytes of device memory, with all that was measured."""
        gradients = max(0, plan.gradient_bytes - self.rest_gradients)
        return plan.slot_bytes + plan.resident_bytes + gradients + self.rest

    def fits(self, plan: Plan, more: int = 0) -> bool:
        """Whether a plan, everything else and so many bytes ``more`` stay within the budget."""
        return self.room is None or self.needs(plan) + more <= self.room

    def choose(self, seconds: Callable[[Plan], float]) -> Plan:
        """The plan with the fastest batch among those that fit, and the smallest of equally fast ones.

        Args:
            seconds: predicts a batch.
        """
        largest = list(self._largest())
        if not largest:
            return self.smallest()
        times = {plan: seconds(plan) for plan in largest}
        enough = min(times.values()) * SAME
        plan = min((each for each in largest if times[each] <= enough), key=lambda each: each.peak_device_bytes)
        below = plan
        while self._k == "auto" and below.k > 1:
            below = self._plan(below.k // 2, plan.k_prime)
            if seconds(below) > enough:
                break
            plan = below
        return plan

    def smallest(self) -> Plan:
        """The plan for when the device has run out of memory."""
        return self._plan(1, 1)

    def _largest(self) -> Iterator[Plan]:
        assert self._found is not None
        count = max(len(self._found.layers), 1)
        together = _TOGETHER if self._k_prime == "auto" else (self._k_prime,)
        for k_prime in together:
            plan = self._most(k_prime)
            if self.fits(plan) and (k_prime <= count or k_prime == self._k_prime):
                yield plan

    def _most(self, k_prime: int) -> Plan:
        """The largest k that fits, or 1."""
        assert self._found is not None
        if self._k != "auto":
            return self._plan(self._k, k_prime)
        low, high = 1, max(len(self._found.layers), 1)
        while low < high:
            middle = (low + high + 1) // 2
            if self.fits(self._plan(middle, k_prime)):
                low = middle
            else:
                high = middle - 1
        return self._plan(low, k_prime)

    def _plan(self, k: int, k_prime: int) -> Plan:
        assert self._found is not None
        return make_plan(
            self._found,
            k=k if self._k == "auto" else min(self._k, max(len(self._found.layers), 1)),
            k_prime=k_prime if self._k_prime == "auto" else self._k_prime,
        )

    def _check(self, plan: Plan, room: int, device: Device, find: Callable[[Sequence[str]], Found] | None) -> None:
        if not plan.layers or plan.peak_device_bytes <= room:
            return
        largest = max(plan.layers, key=lambda layer: layer.nbytes)
        smallest = make_plan(self._found, k=1, k_prime=1) if self._found else plan
        budget = f"free on {device.device}" if self._budget is None else f"of memory_budget={self._budget!r}"
        if smallest.peak_device_bytes <= room:
            remedy = "Use less: SuperpipelineStrategy(k=1, k_prime=1)."
        else:
            remedy = _smaller_layers(largest.name, smallest, find) or (
                'There are no smaller layers in it. Use precision="bf16-true", where it is float32, or give it as much memory.'
            )
        raise ValueError(
            f"Weights and gradients need {plan.peak_device_bytes} bytes ({human_bytes(plan.peak_device_bytes)}) with k={plan.k} "
            f"and k_prime={plan.k_prime}, and {room} bytes ({human_bytes(room)}) are {budget}. The least is "
            f"{human_bytes(smallest.peak_device_bytes)}, with k=1 and k_prime=1; the largest layer, {largest.name!r}, takes "
            f"{largest.nbytes} bytes ({human_bytes(largest.nbytes)}). {remedy}"
        )


def _smaller_layers(largest: str, least: Plan, find: Callable[[Sequence[str]], Found] | None) -> str:
    """How to cut the largest layer, and those like it, so that less is needed; nothing where no cut does that."""
    if find is None:
        return ""
    alike = ".".join("*" if part.isdecimal() else part for part in largest.split("."))
    for pattern in (f"{alike}.*", f"{largest}.*"):
        try:
            plan = make_plan(find([pattern]), k=1, k_prime=1)
        except ValueError:  # it has no modules of its own, or what it names overlaps
            continue
        if plan.peak_device_bytes < least.peak_device_bytes:
            return (
                f'Cut it into smaller ones: SuperpipelineStrategy(layers=["{pattern}"]), whose least is '
                f"{human_bytes(plan.peak_device_bytes)}."
            )
    return ""


def _room(budget: int | float | None, free: int | None, margin: float) -> int | None:
    if isinstance(budget, int):
        return budget if free is None else min(budget, free)
    return None if free is None else int(free * (1 - margin if budget is None else budget))
