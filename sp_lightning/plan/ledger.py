"""The host's side of the plan: what its memory holds, and how often a step of the optimizer passes over it.

With the optimizer on the host, the bandwidth of its memory bounds training, next to the transfers. So each pass is listed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch

from sp_lightning.model.wrapped import parts
from sp_lightning.plan.plan import Plan
from sp_lightning.plan.units import human_bytes
from sp_lightning.torch_compat.patched import state_of
from sp_lightning.torch_compat.private import tree_leaves


@dataclass(frozen=True)
class Pass:
    """One walk over host memory in a step.

    Attributes:
        what: what it does.
        read, written: bytes that it reads and writes, for all parameters together.
    """

    what: str
    read: int
    written: int


ON_DEVICE = "steps on the device"
"""The pass of what steps there bring and take, in place of that of updates."""
_TRANSFERS = ("fetch", "gradients", ON_DEVICE)
_OF_BATCHES = ("casts", "accumulation")


@dataclass(frozen=True)
class Ledger:
    """Host memory of a node while training. All sizes are in bytes.

    Attributes:
        parameters: how many numbers the weights are, frozen ones included.
        weights: bytes of all parameters, and of the casts that travel in place of some, but of those that are read in place.
        gradients: bytes of ``param.grad``, and of memory for gradients that are added to others, but of those that stay on the
            device.
        state: bytes of the optimizers' tensors; None if they are not known before the first step.
        passes: what one step of a fused optimizer, with all its micro-batches, reads and writes at most. Other optimizers
            pass over the memory more often.
        ranks: how many processes of the node, each with a device, share that memory.
        on_disk: bytes of the state that are on a disk and not in memory.
        staging: bytes of memory that they pass through.
        disk_traffic: bytes that were read and written there for each step so far but the first; 0 before the second one.
        weights_on_disk, gradients_on_disk: bytes of trained weights and of gradients that are on a disk, too.
        fused: whether the step runs fused.
        staying: bytes of weights and state of layers that stay on the device: in host memory until the first step, and while
            a checkpoint is written.
    """

    parameters: int
    weights: int
    gradients: int
    state: int | None
    passes: tuple[Pass, ...]
    ranks: int = 1
    on_disk: int = 0
    staging: int = 0
    disk_traffic: float = 0.0
    weights_on_disk: int = 0
    gradients_on_disk: int = 0
    fused: bool = True
    staying: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of everything, without the optimizers' state if that is not known: the most, while a checkpoint is written."""
        return self.weights + self.gradients + (self.state or 0) - self.on_disk + self.staging

    @property
    def stepping_bytes(self) -> int:
        """The same while batches are trained, from the first step on."""
        return self.nbytes - self.staying

    @property
    def sent(self) -> tuple[int, int]:
        """Bytes that transfers of a step bring to the device, and from it."""
        moved = [each for each in self.passes if each.what in _TRANSFERS]
        return sum(each.read for each in moved), sum(each.written for each in moved)

    @property
    def traffic(self) -> int:
        """Bytes that all passes of a step read and write."""
        return sum(each.read + each.written for each in self.passes)

    @property
    def update_bytes(self) -> int:
        """Bytes that the host's processor reads and writes in a step: all passes but those of transfers."""
        return sum(each.read + each.written for each in self.passes if each.what not in _TRANSFERS)

    @property
    def batch_bytes(self) -> int:
        """Of these, what is read and written in each of a step's micro-batches: for all of them together."""
        return sum(each.read + each.written for each in self.passes if each.what in _OF_BATCHES)

    def __str__(self) -> str:
        """Two lines: memory; traffic, each pass as bytes read and written. A third one if something is on a disk."""
        count = max(self.parameters, 1)
        state = "optimizer state unknown before its first step"
        if self.state is not None:
            state = f"{human_bytes(self.state - self.on_disk)} optimizer state"
        if self.staging:
            state += f", {human_bytes(self.staging)} for what is on a disk"
        passes = ", ".join(f"{each.what} {each.read / count:.3g}/{each.written / count:.3g}" for each in self.passes)
        read, written = (sum(getattr(each, way) for each in self.passes) / count for way in ("read", "written"))
        step = "fused optimizer step, at most" if self.fused else "optimizer step, which does not run fused, more than"
        of = f" of the node's {self.ranks} devices together" if self.ranks > 1 else ""
        stays = ""
        if self.staying:
            less = f"{human_bytes(self.stepping_bytes)}, {self.stepping_bytes / count:.3g} bytes per parameter"
            stays = f" While batches are trained, {human_bytes(self.staying)} of that are in GPU memory alone: {less} remain."
        return (
            f"Superpipeline: host memory of training{of}: {human_bytes(self.nbytes)}, {self.nbytes / count:.3g} bytes per "
            f"parameter ({human_bytes(self.weights)} weights, {human_bytes(self.gradients)} gradients with those on "
            f"their way, {state}).{stays}\n"
            f"Superpipeline: host memory traffic per parameter and {step}: {read:.3g} bytes read and {written:.3g} "
            f"written (read/written by {passes})." + self._of_disk(count)
        )

    def _of_disk(self, count: int) -> str:
        below = {
            "trained weights": self.weights_on_disk, "gradients": self.gradients_on_disk, "the optimizer state": self.on_disk,
        }  # fmt: skip
        if not any(below.values()):
            return ""
        so_far = f" ({self.disk_traffic / count:.3g} on average of those so far)" if self.disk_traffic else ""
        what = " and ".join(f"{human_bytes(nbytes)} of {name}" for name, nbytes in below.items() if nbytes)
        return (
            f"\nSuperpipeline: {what} are on a disk and pass through {human_bytes(self.staging)} of memory; bytes read and "
            f"written per parameter in each step but the first: {2 * sum(below.values()) / count:.3g} at least{so_far}."
        )


@dataclass(frozen=True)
class Steps:
    """How the steps of a run go.

    Attributes:
        early: whether a layer is updated in backward, after which its gradients are freed.
        accumulate: how many micro-batches a step has.
        clips: how gradients are clipped: ``"norm"``, ``"value"``, or None if they are not.
        scales: whether gradients are unscaled.
        pieces: whether layers are updated piece by piece, so that what one walk has left in the caches serves the next.
        narrow: whether gradients that leave as casts stay so until the update.
        sliced: whether the devices of a node upload layers together.
        on_device: whether layers are stepped on the device. Then the host's memory is read and written by transfers alone.
    """

    early: bool
    accumulate: int
    clips: str | None
    scales: bool
    pieces: bool = False
    narrow: bool = False
    sliced: bool = False
    on_device: bool = False


def make_ledger(plan: Plan, optimizers: Iterable[torch.optim.Optimizer], steps: Steps) -> Ledger:
    """Counts host memory and its traffic for a run with these layers, and with the state of these optimizers."""
    once = steps.accumulate == 1
    steps = replace(steps, early=steps.early and once, narrow=steps.narrow and once and plan.alone)  # sums are float32
    state = _state_bytes(optimizers)
    passes = _passes(plan, state or 0, steps)
    return Ledger(
        parameters=sum(math.prod(span.shape) for layer in (*plan.trained, *plan.masters) for span in layer.spans),
        weights=sum(layer.nbytes for layer in (*plan.trained, *plan.masters)),
        gradients=_gradient_bytes(plan, steps),
        state=state,
        passes=tuple(each for each in passes if each.read or each.written),
        ranks=plan.ranks,
        staying=_weights_that_stay(plan) + (state or 0) - _offloaded_state(plan, state or 0),
    )


def _weights_that_stay(plan: Plan) -> int:
    """Bytes of the weights, casts and masters of layers that stay on the device."""
    layers, offloaded = (*plan.trained, *plan.masters), (*plan.offloaded, *plan.offloaded_masters)
    return sum(layer.nbytes for layer in layers) - sum(layer.nbytes for layer in offloaded)


def _offloaded_state(plan: Plan, state: int) -> int:
    """Of the optimizers' state, the bytes that layers have which do not stay on the device: as much as their gradients' share."""
    everything = sum(layer.gradient_bytes for layer in plan.trained)
    return state * sum(layer.gradient_bytes for layer in plan.offloaded) // max(everything, 1) if plan.stay else state


def _gradient_bytes(plan: Plan, steps: Steps) -> int:
    """Host memory of gradients, those on their way included. Those of layers that stay on the device never come."""
    layers, sums, narrow = plan.offloaded, steps.accumulate > 1, steps.narrow
    # Gradients that are added to others, or widened, are staged: those of k' + 1 transfers, and of one that has landed.
    staging = (layer.gradient_bytes if sums else layer.narrow_bytes * (not narrow) for layer in layers)
    # Those of several devices are added up before they leave, in the parameters' dtypes.
    staged = (plan.k_prime + 2) * max(staging) * plan.alone
    kept = [layer.gradient_bytes - narrow * layer.narrow_bytes for layer in layers]  # as they wait for the update
    if not steps.early:
        return sum(kept) + staged
    if steps.on_device:  # those of layers never leave it
        return plan.residents.gradient_bytes + staged
    # Those of k' + 1 transfers, of one that has landed, and of one whose update is under way.
    return min(sum(kept), plan.residents.gradient_bytes + (plan.k_prime + 3) * max(kept)) + staged


def _passes(plan: Plan, state: int, steps: Steps) -> list[Pass]:
    """All passes of a step; ``state`` in bytes. Layers that stay on the device have none."""
    layers, accumulate, more = plan.offloaded, steps.accumulate, steps.accumulate - 1
    clips, scales, pieces, narrow = steps.clips, steps.scales, steps.pieces, steps.narrow
    masters, state = sum(each.nbytes for each in plan.offloaded_masters), _offloaded_state(plan, state)
    casts = sum(cast.nbytes for layer in layers for cast in layer.casts)
    # What all devices of the node together copy in a forward. Of a table some rows travel.
    fetched = [layer for index, layer in enumerate(plan.layers) if index not in plan.stay]
    together = sum(layer.nbytes for layer in fetched if steps.sliced and layer.ring == plan.main_ring)
    whole = sum(layer.nbytes for layer in (*fetched, plan.residents)) - together
    gradients = sum(layer.gradient_bytes for layer in layers)
    # What leaves as casts is half as large as its masters' gradients.
    halves = sum(layer.narrow_bytes for layer in layers)
    kept = gradients - halves * narrow
    narrow_leave = halves * plan.alone
    widened = narrow_leave * (not narrow)
    wide = kept - halves * narrow  # a narrow gradient is unscaled and clipped on its way
    clipped = wide * (clips is not None)
    leave = gradients
    if steps.early and steps.on_device:
        leave = kept = plan.residents.gradient_bytes
        narrow_leave = widened = 0
    # A gradient is as large as its weight.
    update = Pass("update", gradients + kept + state, gradients + state)
    there = 0  # casts that come from the device
    if steps.on_device:
        there = sum(cast.nbytes for layer in layers for cast in layer.casts if layer.gradient_bytes)
        update = Pass(ON_DEVICE, gradients + kept + state, gradients + state + there)
    return [
        Pass("casts", accumulate * masters - 2 * halves * (pieces or steps.on_device), accumulate * casts - there),
        Pass("fetch", 2 * accumulate * (together + plan.ranks * whole), 0),
        Pass("gradients", 0, accumulate * (leave - narrow_leave)),
        Pass("widening", widened, 2 * widened),
        # Several devices take what is there already with them, and add it up there.
        Pass("accumulation", more * gradients * (2 if plan.alone else plan.ranks), more * gradients * plan.alone),
        Pass("unscaling", kept * scales, wide * scales),
        Pass("norm", kept * (clips == "norm"), 0),
        Pass("clipping", clipped * (not pieces), clipped),
        update,
    ]


def _state_bytes(optimizers: Iterable[torch.optim.Optimizer]) -> int | None:
    """Bytes of the optimizers' state. Of an optimizer that is not torch's, they are known once the state is there."""
    total = 0
    for optimizer in optimizers:
        trained = [(group, p) for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
        bits = FEW_BITS.get((type(optimizer).__module__, type(optimizer).__qualname__))
        if bits is not None:
            total += sum(_few_bits(p, group, optimizer, bits) for group, p in trained)
        elif has_known_state(optimizer):
            total += sum(state_tensors(optimizer, group) * p.numel() * p.element_size() for group, p in trained)
        else:
            leaves = tree_leaves(dict(state_of(optimizer)))
            state = [part for leaf in leaves if isinstance(leaf, torch.Tensor) for _, part in parts("", leaf)]
            if not state:
                return None
            total += sum(each.nbytes for each in state if each.layout is torch.strided)
    return total


def _few_bits(parameter: torch.Tensor, group: dict[str, Any], optimizer: Any, bits: int) -> int:
    """Bytes of the state that torchao's Adam has for a parameter: codes, a scale for each block, a table for 4 and 8 bits."""
    size, numel, block = parameter.element_size(), parameter.numel(), optimizer.block_size
    if numel >= 4096 and numel % block == 0:  # others keep whole numbers
        table = 4 * 2**bits * (not type(optimizer).__qualname__.endswith("Fp8"))
        each = numel * bits // 8 + 4 * numel // block + table
    else:
        each = numel * size
    return (2 + bool(group["amsgrad"])) * each + 4  # and the number of steps


FEW_BITS = {
    ("torchao.optim.adam", f"{kind}{suffix}"): bits
    for kind in ("Adam", "AdamW")
    for suffix, bits in (("8bit", 8), ("4bit", 4), ("Fp8", 8))
}
"""The bits of an element in the state of torchao's optimizers, by module and name, because torchao need not be installed."""


def _adam(group: dict[str, Any]) -> int:
    return 2 + bool(group["amsgrad"])


# How many tensors of a parameter's size each optimizer has for the parameter, given its group.
_TENSORS: dict[type, Any] = {
    torch.optim.Adam: _adam,
    torch.optim.AdamW: _adam,
    torch.optim.SGD: lambda group: int(group["momentum"] != 0),
    torch.optim.Adagrad: lambda group: 1,
    torch.optim.RMSprop: lambda group: 1 + bool(group["momentum"]) + bool(group["centered"]),
    torch.optim.NAdam: lambda group: 2,
    torch.optim.RAdam: lambda group: 2,
    torch.optim.Adamax: lambda group: 2,
    torch.optim.Adadelta: lambda group: 2,
    torch.optim.Muon: lambda group: 1,
}


def has_known_state(optimizer: Any) -> bool:
    """Whether an optimizer is one of torch's whose state is tensors of the parameters' sizes, each stepped by itself."""
    return type(optimizer) in _TENSORS


def state_tensors(optimizer: Any, group: dict[str, Any]) -> int:
    """How many tensors of a parameter's size such an optimizer has for each parameter of a group."""
    return int(_TENSORS[type(optimizer)](group))
