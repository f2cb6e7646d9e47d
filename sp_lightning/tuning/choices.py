"""Choices that fit the budget: k and k', and what becomes of activations.

As much of the model is on the device as fits and makes a batch faster. ``activations="auto"`` chooses recompute or offload
for as few units as the budget asks. The cost of a mode is the time per byte that it frees: recompute costs a second
forward, offload the part of its transfers that computation does not hide. This yields a few candidates, of which the
prediction of a whole batch chooses.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from sp_lightning.activations.policy import EXEMPT, FREEING, Call, Mode, Modes, least_bytes, peak_bytes
from sp_lightning.device.device import Device
from sp_lightning.model.found import Found
from sp_lightning.plan.choices import Count, OptimizerOn, Share
from sp_lightning.plan.plan import Plan, make_plan
from sp_lightning.plan.units import human_bytes
from sp_lightning.tuning.visits import Rates, Visit

# This share of the free memory is left for what allocators round up and for what libraries take for themselves.
_MARGIN = 1 / 16
# These values of k' are tried. More layers in one transfer are seldom worth the slots that they take.
_TOGETHER = (1, 2, 4)
# Plans whose times differ by no more than this factor count as equally fast, and the smallest of them is chosen.
SAME = 1.01
# On the CPU nothing limits k, so the smallest window in which transfers overlap with computation is used: k and k'.
_WITHOUT_LIMIT = (2, 1)


class Window:
    """The choice of k and k'.

    Two numbers of bytes bound it: the budget, and what everything beside the weights takes (activations, gradients,
    workspaces, buffers). The latter is measured while the first batches run through the smallest window.

    Args:
        k, k_prime: numbers, or "auto".
        budget: bytes of device memory (int), or the share of what is free at set-up (float). None means all that is
            free, less a margin.
        ranks, nodes: how many devices of a node sum their gradients, and how many nodes do.
        training: whether batches are trained.
        optimizer_on: where layers are stepped then. With ``"auto"`` there is room for steps on the device, if the budget has it.

        stay: layers that stay on the device with their optimizer state: how many, or which share of them. With ``"auto"`` as many
            as the budget has room for beside everything else, once that was measured.

    Attributes:
        steps_on_device: whether plans have that room.
        may_stay: whether results do not depend on how many layers stay, so that ``"auto"`` may choose that.
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
        optimizer_on: OptimizerOn = "cpu",
        stay: Share = 0,
    ) -> None:
        self._k = k
        self._k_prime = k_prime
        self._budget = budget
        self._margin = _MARGIN if "auto" in (k, k_prime) else 0
        self._training = training
        self._options: dict[str, Any] = {"ranks": ranks, "nodes": nodes, "training": training}
        self.steps_on_device = optimizer_on != "cpu" and training and ranks * nodes == 1
        self._open = optimizer_on == "auto"
        self._stay: int | float = 0 if stay == "auto" or not training or ranks * nodes > 1 else stay
        self._chooses_stay = stay == "auto" and training and ranks * nodes == 1
        self._most_stay: int | None = None  # after the device had too little memory for more
        self.may_stay = False
        self._found: Found
        self.room: int | None = None
        """Bytes of the budget; None if nothing limits device memory."""
        self.free: int | None = None
        """Bytes of the device's memory that were free at set-up, less those that others have taken since; None on the CPU."""
        self.rest = 0
        """The most bytes that everything but weights takes, as far as is known; gradients on their way are included."""
        self.rest_gradients = 0
        """How many of the bytes of ``rest`` are gradients, at most."""

    @property
    def auto(self) -> bool:
        """Whether k, k' or how many layers stay is to be chosen, and a budget to choose them for is known."""
        return (
            ("auto" in (self._k, self._k_prime) or self._chooses_stay)
            and self.room is not None
            and not self._found.nothing
        )

    def begin(self, found: Found, device: Device, find: Callable[[Sequence[str]], Found] | None = None) -> Plan:
        """Returns the plan for the first batches: the smallest window.

        Args:
            found: the model's layers.
            device: the device, on which nothing is allocated yet.
            find: finds the layers that other patterns name. It serves the advice in an error message.

        Raises:
            ValueError: not even that plan fits the budget, or the budget is a share and the device has no memory of its
                own.
        """
        free, budget = device.free_bytes(), self._budget
        self._found, self.free = found, free
        self.rest = self.rest_gradients = 0
        if isinstance(budget, int):
            self.room = budget if free is None else min(budget, free)
        elif free is not None:
            self.room = int(free * (1 - self._margin if budget is None else budget))
        elif budget is not None:
            raise ValueError(
                f"gpu_memory={budget} is a share of the device's free memory, and {device.device} has no memory of "
                'its own. Give a size: SuperpipelineStrategy(gpu_memory="1GiB").'
            )
        smallest = _WITHOUT_LIMIT if self.room is None else (1, 1)
        plan = self._plan(*smallest)
        if self._open and (device.computes_on_host or self._is_too_large(plan)):
            self.steps_on_device = False
            plan = self._plan(*smallest)
        if self.room is not None and self._is_too_large(plan):
            raise ValueError(self._too_large(plan, self.room, device, find))
        return plan

    def lower_budget(self, there: int | None = None) -> None:
        """Lowers the budget, if there is one, because it proved too large.

        Args:
            there: bytes that torch has allocated or could allocate, which are then the most. None takes a sixteenth off.
        """
        if there is not None and self.free is not None:
            self.free = min(self.free, there)
        if self.room is not None:
            share = 1 - self._margin if self._budget is None else 1
            self.room = self.room - self.room // 16 if there is None else min(self.room, int(there * share))

    @property
    def filled_room(self) -> int | None:
        """Bytes of the budget that something else may fill beside k and k', even if both are numbers: kept activations."""
        whole = self.room is None or self._budget is not None or self._margin
        return self.room if whole else int((self.room or 0) * (1 - _MARGIN))

    def fill(self) -> None:
        """From now on something else fills the memory that k and k' leave."""
        self.room, self._margin = self.filled_room, self._margin or _MARGIN
        self.rest = self.rest_gradients = 0

    def needs(self, plan: Plan) -> int:
        """Bytes of device memory that a plan takes, together with everything else that was measured."""
        gradients = max(0, plan.gradient_bytes - self.rest_gradients)
        moving = plan.slot_bytes + plan.update_bytes + gradients
        return moving + plan.resident_bytes + plan.cache_bytes + self.rest

    def fits(self, plan: Plan, more: int = 0) -> bool:
        """Whether a plan, everything else that was measured and ``more`` bytes stay within the budget."""
        return self.room is None or self.needs(plan) + more <= self.room

    def choose(self, seconds: Callable[[Plan], float]) -> Plan:
        """Returns the plan with the fastest batch among those that fit, and of equally fast plans the smallest.

        Args:
            seconds: predicts how long a batch takes with a plan.
        """
        count = self._count
        together = [each for each in _TOGETHER if each <= count] if self._k_prime == "auto" else [self._k_prime]
        times = {plan: seconds(plan) for plan in map(self._largest, together) if self.fits(plan)}
        if not times:
            return self.smallest()
        enough = min(times.values()) * SAME
        plan = min((each for each in times if times[each] <= enough), key=lambda each: each.peak_device_bytes)
        while self._k == "auto" and plan.k > 1:
            smaller = self._plan(plan.k // 2, plan.k_prime)
            if seconds(smaller) > enough:
                break
            plan = smaller
        return plan

    def with_experts(self, plan: Plan) -> Plan:
        """The plan, with as many stacked experts kept on the device as the budget leaves room for."""
        if self.room is None or not plan.stack_bytes:
            return plan
        most = max(0, min(self.room - self.needs(replace(plan, cache_bytes=0)), plan.stack_bytes))
        return replace(plan, cache_bytes=most)

    def with_staying(self, plan: Plan) -> Plan:
        """The plan, with as many layers on the device for good as the budget leaves room for, if that is left open."""
        return self.filled_with_staying(plan) if self._chooses_stay and self.may_stay else plan

    def filled_with_staying(self, plan: Plan) -> Plan:
        """The plan, with as many layers on the device for good as the budget leaves room for beside what was measured."""
        most = self._count if self._most_stay is None else min(self._count, self._most_stay)
        plans = (self._make(self._found, k=plan.k, k_prime=plan.k_prime, stay=count) for count in range(1, most + 1))
        for larger in (replace(each, cache_bytes=plan.cache_bytes) for each in plans):
            if not self.fits(larger):
                break
            plan = larger
        return plan

    def let_fewer_stay(self, plan: Plan) -> None:
        """From now on at most half as many layers stay as with a plan, for which the device had too little memory."""
        self._most_stay = len(plan.stay) // 2

    def let_none_stay(self) -> None:
        """From now on no layer stays by choice."""
        self._most_stay = 0

    def again(self, plan: Plan, found: Found) -> Plan:
        """The same plan for layers of which others are trained now."""
        again = self._make(found, k=plan.k, k_prime=plan.k_prime, stay=len(plan.stay))
        return replace(again, cache_bytes=plan.cache_bytes)

    def smallest(self) -> Plan:
        """The smallest plan, for when the device has run out of memory."""
        return self._plan(1, 1)

    @property
    def _count(self) -> int:
        return max(len(self._found.layers), 1)

    def _largest(self, k_prime: int) -> Plan:
        """The plan with this k' and the largest k that fits; k is 1 if none does."""
        ks = range(1, self._count + 1)
        fitting = bisect_left(ks, True, key=lambda k: not self.fits(self._plan(k, k_prime))) if self._k == "auto" else 0
        return self._plan(max(1, fitting), k_prime)

    def _make(self, found: Found, *, k: int, k_prime: int, stay: int | None = None) -> Plan:
        if stay is None:
            stay = self._stay if isinstance(self._stay, int) else round(self._stay * len(found.layers))
            stay = stay if self._most_stay is None else min(stay, self._most_stay)
        plan = make_plan(found, k=k, k_prime=k_prime, stay=stay, **self._options)
        return replace(plan, steps_on_device=self.steps_on_device)

    def _plan(self, k: int, k_prime: int) -> Plan:
        """The plan with such a window, but for what the user gave as a number."""
        return self._make(
            self._found,
            k=k if self._k == "auto" else min(self._k, self._count),
            k_prime=k_prime if self._k_prime == "auto" else self._k_prime,
        )

    # ------------------------------------------------------------------ what does not fit

    def _least(self, plan: Plan) -> int:
        """Bytes of device memory that a plan takes at least: those of gradients count in training."""
        return plan.taken(training=self._training)[0]

    def _is_too_large(self, plan: Plan) -> bool:
        return self.room is not None and self._least(plan) > self.room

    def _too_large(self, plan: Plan, room: int, device: Device, find: Callable[[Sequence[str]], Found] | None) -> str:
        """The error message for a plan that does not fit: what is needed, what there is, and what would help."""
        smallest = self._make(self._found, k=1, k_prime=1)
        staying = plan.resident_bytes + (plan.residents.gradient_bytes + plan.staying[1]) * self._training
        if not plan.layers or staying > room:
            whole = ", ".join(f"{name!r} ({type(module).__name__})" for name, module in self._found.aside[:3])
            remedy = (
                f"What stays on the device takes {_bytes(staying)} of that{f', with {whole}' if whole else ''}. Leave names "
                "out of keep_on_gpu=, give a module in place of its ScriptModule, so that their weights are streamed, or give "
                "it as much memory."
            )
        elif plan.stay and self._least(self._make(self._found, k=1, k_prime=1, stay=0)) <= room:
            remedy = (
                f"The {len(plan.stay)} layers that stay take {_bytes(plan.staying_bytes)} of that beside their slots, for "
                "gradients and optimizer state: lower gpu_layers, or give it as much memory."
            )
        elif plan.steps_on_device and self._least(plan) - plan.update_bytes <= room:
            remedy = (
                f"The two slots in which layers are stepped take {_bytes(plan.update_bytes - plan.staying_bytes)} of that: leave "
                'optimizer_on="gpu" out, or give it as much memory.'
            )
        elif self._least(smallest) <= room:
            remedy = "Use less: SuperpipelineStrategy(k=1, k_prime=1)."
        else:
            remedy = self._smaller_layers(plan, smallest, find)
        free = f"{_bytes(room)} are free on {device.device}"
        there = free if self._budget is None else f"with gpu_memory={self._budget!r} there are {_bytes(room)}"
        what = "Weights and gradients need" if self._training else "Weights need"
        return (
            f"{what} {_bytes(self._least(plan))} with k={plan.k} and k_prime={plan.k_prime}, and {there}. The least is "
            f"{human_bytes(self._least(smallest))}, with k=1 and k_prime=1. {remedy}"
        )

    def _smaller_layers(self, plan: Plan, smallest: Plan, find: Callable[[Sequence[str]], Found] | None) -> str:
        """Advice to cut the largest layer, and those like it, if less is needed then."""
        largest = max(plan.layers, key=lambda layer: layer.nbytes)
        said = f"The largest layer, {largest.name!r}, takes {_bytes(largest.nbytes)}. "
        alike = ".".join("*" if part.isdecimal() else part for part in largest.name.split("."))
        with suppress(ValueError):  # the pattern matches no module, or the modules that it matches overlap
            cut = self._least(self._make(find([f"{alike}.*"]), k=1, k_prime=1)) if find is not None else None
            if cut is not None and cut < self._least(smallest):
                return (
                    f'{said}Cut it into smaller ones: SuperpipelineStrategy(layers=["{alike}.*"]), whose least is '
                    f"{human_bytes(cut)}."
                )
        return f'{said}There are no smaller layers in it. Use precision="bf16-true", or give it as much memory.'


def _bytes(nbytes: int) -> str:
    return f"{nbytes} bytes ({human_bytes(nbytes)})"


# ---------------------------------------------------------------------- what becomes of activations


def _with_forwards(visits: Sequence[Visit]) -> Iterator[tuple[Visit, int]]:
    """Each visit with the index of its forward: its own, or the one whose backward it is; -1 if that is not known."""
    # By layers, forwards whose backward is to come.
    pending: defaultdict[tuple[int, ...], list[int]] = defaultdict(list)
    for at, visit in enumerate(visits):
        if not visit.backward:
            pending[visit.layers].append(at)
            yield visit, at
        else:
            yield visit, pending[visit.layers].pop() if pending[visit.layers] else -1


def without_second_forwards(visits: Sequence[Visit]) -> list[Visit]:
    """Returns the visits of a batch whose units were all recomputed as they would be if all were kept.

    A layer's backward then contains its second forward, whose time is taken to be that of the first.
    """
    return [
        replace(visit, seconds=max(0.0, visit.seconds - visits[forward].seconds))
        if visit.backward and visit.layers and forward >= 0
        else visit
        for visit, forward in _with_forwards(visits)
    ]


@dataclass(frozen=True)
class Balance:
    """What is known of a batch's activations, and the choices of modes that follow from it.

    Attributes:
        calls: the unit calls of the batch's forward, in order.
        index_of: the index of each unit's layer. Units that stay on the device have none.
        visits: what the batch does, with its times, if all activations are kept.
        rates: how fast the machine is.
    """

    calls: tuple[Call, ...]
    index_of: Mapping[str, int]
    visits: Sequence[Visit]
    rates: Rates

    def candidates(self, room: int) -> Iterator[Modes]:
        """Choices of modes with which activations take at most ``room`` bytes on the device.

        Each changes as few units as that asks, the cheapest ones first. If no choice takes so little, those that take the
        least are returned.

        Three ways are tried: the cheaper mode of each unit, all units recomputed, all units offloaded. A mixture by
        turns, for a link that is too slow to offload every unit, is left out: it is never faster than the better mode
        alone, because a copy has the time of one unit to finish in, whatever mode the next unit has.
        """
        costs = {call.unit: self._cost(call.unit) for call in self.calls}
        kept: dict[str, Mode] = dict.fromkeys(costs, "keep")
        cheaper = {unit: min(FREEING, key=costs[unit].__getitem__) for unit in self._freeable}
        choices: list[Modes] = []
        for way in (cheaper, *(dict.fromkeys(costs, mode) for mode in FREEING)):
            order = sorted(way, key=lambda unit: costs[unit][way[unit]])
            fewest = bisect_left(
                range(len(order)),
                True,
                key=lambda count: peak_bytes(self.calls, kept | {unit: way[unit] for unit in order[:count]}) <= room,
            )
            modes = kept | {unit: way[unit] for unit in order[:fewest]}
            if modes not in choices and peak_bytes(self.calls, modes) <= max(room, least_bytes(self.calls)):
                choices.append(modes)
        yield from choices

    def visited(self, modes: Modes) -> list[Visit]:
        """What the batch does with these modes. Units without a layer of their own count with the layer before them."""
        # By the index of a forward visit: bytes that leave after it, and seconds that its backward takes longer.
        moved: defaultdict[int, int] = defaultdict(int)
        recomputed: defaultdict[int, float] = defaultdict(float)
        forwards = [at for at, visit in enumerate(self.visits) if visit.layers and not visit.backward]
        at = forwards[0] if forwards else 0
        following = iter(forwards)
        for number, call in enumerate(self.calls):
            index = self.index_of.get(call.unit)
            if index is not None:
                at = next((forward for forward in following if index in self.visits[forward].layers), at)
            if modes[call.unit] == "offload" and number < len(self.calls) - EXEMPT:
                moved[at] += call.saved
            elif modes[call.unit] == "recompute":
                recomputed[at] += self._seconds(call.unit) if index is None else self.visits[at].seconds
        return [
            replace(
                visit, moved=moved[forward], seconds=visit.seconds + (recomputed[forward] if visit.backward else 0.0)
            )
            for visit, forward in _with_forwards(self.visits)
        ]

    # ------------------------------------------------------------------ one unit

    @property
    def _freeable(self) -> list[str]:
        """The units whose activations could be freed, in the order of the forward."""
        return list(dict.fromkeys(call.unit for call in self.calls[:-EXEMPT] if call.saved))

    def _cost(self, unit: str) -> dict[Mode, float]:
        """Seconds per byte that is freed, for each mode that frees any."""
        calls = [call for call in self.calls if call.unit == unit]
        saved, inputs = sum(call.saved for call in calls), sum(call.inputs for call in calls)
        up, down = saved / self.rates.upload, saved / self.rates.download
        if not self.rates.synchronous:
            # Activations leave during the next unit's forward and come back during the next unit's backward.
            following = next((b.unit for a, b in pairwise(self.calls) if a.unit == unit and b.unit != unit), unit)
            down = max(0.0, down - self._seconds(following))
            up = max(0.0, up - self._seconds(following, backward=True))
        return {"recompute": self._seconds(unit) / max(saved - inputs, 1), "offload": (down + up) / max(saved, 1)}

    def _seconds(self, unit: str, *, backward: bool = False) -> float:
        """How long a unit's forward or backward takes.

        Units without a layer share the time between layers equally; their backward is taken to be twice their forward.
        """
        index = self.index_of.get(unit)
        if index is not None:
            return sum(visit.seconds for visit in self.visits if visit.backward is backward and index in visit.layers)
        between = sum(visit.seconds for visit in self.visits if not visit.layers and not visit.backward)
        return between * (1 + backward) / max(1, sum(name not in self.index_of for name in self._freeable))
