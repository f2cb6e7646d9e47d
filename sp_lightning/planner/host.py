"""The host's side of ``plan``: the optimizer's step, and what is in host memory and on a disk below it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from sp_lightning.plan.ledger import ON_DEVICE, Ledger, Steps, has_known_state, make_ledger
from sp_lightning.plan.plan import Plan
from sp_lightning.planner.arguments import PRECISIONS, Overlap, Question
from sp_lightning.registry import needed_for
from sp_lightning.torch_compat.private import tree_leaves
from sp_lightning.updates.cpu_seconds import EIGHT_BITS_SECONDS, muon_flops
from sp_lightning.updates.fused import has_fused_step
from sp_lightning.updates.step_context import compiles

if TYPE_CHECKING:
    from sp_lightning.disk.state_placement import OnDisk, StatePlacement

_PASSING = "memory for what passes to the disk"
_MOST_OBLONG = 8  # Muon is for the matrices of layers; those of a vocabulary (embeddings, heads) are more oblong


# ---------------------------------------------------------------------- the step


@dataclass(frozen=True)
class HostStep:
    """How an optimizer's step runs.

    Attributes:
        name: what it is called in the answer.
        optimizers: optimizers with the same state, so that host memory can be counted.
        overlap: when updates run, if they can run in the background.
        seconds: what a step takes, if that is not a pass of a fused optimizer over memory; None if it is.
        why: how many seconds, in words; empty for a fused optimizer.
        source: what names the optimizer.
        on_device: whether the device steps.
        flops: what it multiplies, if that and not memory decides how long it takes.
    """

    name: str
    optimizers: tuple[torch.optim.Optimizer, ...]
    overlap: Overlap
    seconds: float | None = None
    why: str = ""
    source: str = "--optimizer"
    on_device: bool = False
    flops: int = 0


def host_step(question: Question, module: nn.Module) -> HostStep:
    """The step of the optimizer that the question names; else of the module's own, if that is known; else of AdamW.

    Raises:
        ValueError: nothing in the module is trained, or torchao is missing.
    """
    step = _step_of(question, module)
    return step if question.optimizer_on == "cpu" else on_device(step, question)


def on_device(step: HostStep, question: Question) -> HostStep:
    """The same step on the device: what it multiplies decides how long it takes there, or what it reads and writes."""
    seconds, why = question.step_seconds, step.why if question.step_seconds else ""
    if seconds is None and step.flops:
        seconds, why = _multiplied(step.flops, "device", question.tflops, "--tflops")
    # In the background what an optimizer makes would get the model's dtype.
    overlap = "off" if question.stores_16_bits else beside(step.optimizers, question.mode)
    return replace(step, overlap=overlap, on_device=True, seconds=seconds, why=why)


def beside(optimizers: Iterable[torch.optim.Optimizer], overlap: Overlap) -> Overlap:
    """When updates run for which an overlap was asked: those that compile their step never run beside a forward."""
    return "off" if overlap == "forward" and any(map(compiles, optimizers)) else overlap


def update_rates(question: Question, step: HostStep, plan: Plan, ledger: Ledger, traffic: int) -> dict[str, Any]:
    """The :class:`~sp_lightning.tuning.visits.Rates` of updates, by their names.

    Args:
        question: says how fast memory is.
        step, plan, ledger: the optimizer's step, the layers, and what training has on the host.
        traffic: bytes that a fused optimizer's step reads and writes on the host.
    """
    everything, gradients = (
        max(1, sum(layer.gradient_bytes for layer in layers)) for layers in (plan.trained, plan.offloaded)
    )
    share, state = gradients / everything, (ledger.state or 0) / everything
    there = {"step": _stepped_there(question, step, everything, state)} if plan.stay else {}
    if not step.on_device:
        seconds = share * step.seconds if step.seconds else max(traffic, 1) / question.host_bandwidth
        return {"update": gradients / seconds, **there}
    read, written = (sum(getattr(e, way) for e in ledger.passes if e.what == ON_DEVICE) for way in ("read", "written"))
    update = everything / step.seconds if step.seconds else question.device_bandwidth / (3 + 2 * state)
    return {"update": update, "update_upload": read / gradients, "update_download": written / gradients, **there}


def _stepped_there(question: Question, step: HostStep, gradients: int, state: float) -> float:
    """Bytes of gradients per second that steps of layers consume that stay on the device.

    A step reads weights, gradients and ``state`` times as many bytes of state, and writes all but gradients. Of masters it
    widens gradients before, and casts weights behind that. Clipping reads gradients once for a norm, and multiplies a copy.

    Args:
        question: says how fast the device is, and what is done with gradients.
        step: the optimizer's.
        gradients: bytes of all gradients.
        state: bytes of state for each byte of gradients.
    """
    if step.flops:
        return gradients / (step.flops / (question.tflops * 1e12))
    narrow, clip = PRECISIONS[question.precision][1] is not None, question.gradient_clip
    passes = 3 + 2 * state + 3 * narrow
    passes += (clip == "norm") * (0.5 if narrow else 1) + (clip is not None) * (2 if narrow else 4)
    return question.device_bandwidth / passes


def _multiplied(flops: int, there: str, tflops: float, option: str) -> tuple[float, str]:
    """The seconds that so many multiplications and additions take, and how many in words."""
    seconds = flops / (tflops * 1e12)
    return seconds, f"{flops / 1e12:.3g} TFLOP on the {there}, {seconds:.3g} s with {tflops:g} TFLOP/s ({option})"


def _on_host(question: Question, flops: int) -> tuple[float | None, str]:
    """The seconds that what Muon multiplies takes on the host, and how many in words; None if it is nothing."""
    return _multiplied(flops, "host", question.host_tflops, "--host-tflops") if flops else (None, "")


def _step_of(question: Question, module: nn.Module) -> HostStep:
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    if not trained:
        raise ValueError(f"No parameter of {question.model!r} requires a gradient. Say --predict.")
    seconds, why = question.step_seconds, f"{question.step_seconds or 0:g} s (--step-seconds)"
    own, source = _configured(module) if question.optimizer is None and seconds is None else (), "--optimizer"
    name = " and ".join(sorted({type(each).__name__ for each in own}))
    if own and all(map(has_known_state, own)):
        overlap = question.mode if all(map(has_fused_step, own)) else "off"
        flops = sum(muon_flops(g["params"]) for o in own if type(o) is torch.optim.Muon for g in o.param_groups)
        seconds, why = _on_host(question, flops)
        return HostStep(name, own, overlap, seconds, why, source="configure_optimizers", flops=flops)
    source = f"in place of {name}, whose state is not known" if own else source
    if question.optimizer == "muon":
        matrices = [weight for weight in trained if _is_for_muon(weight)]
        # SGD with momentum has one tensor of state for each matrix, as Muon has. The others are AdamW's, by convention.
        others = [weight for weight in trained if not _is_for_muon(weight)]
        momentum = [torch.optim.SGD(matrices, momentum=0.95)] if matrices else []
        optimizers = (*momentum, *([torch.optim.AdamW(others)] if others else []))
        flops = muon_flops(matrices)
        if seconds is None:
            seconds, why = _on_host(question, flops)
        name = "Muon" + ", and AdamW for embeddings, heads and vectors" * bool(others)
        return HostStep(name, optimizers, "off", seconds, why, flops=flops)
    if question.optimizer == "adamw8bit":
        try:
            from torchao.optim import AdamW8bit
        except ImportError as error:
            raise ValueError("--optimizer adamw8bit needs torchao: pip install torchao") from error
        if seconds is None and question.optimizer_on == "cpu":
            # Its state is converted in each step: only a measurement tells how long that takes.
            seconds = EIGHT_BITS_SECONDS * sum(parameter.numel() for parameter in trained)
            why = f"{seconds:.3g} s, {1e9 * EIGHT_BITS_SECONDS:g} ns per parameter as on two CPU cores (--step-seconds)"
        few_bits = (AdamW8bit(trained),)
        return HostStep("AdamW8bit", few_bits, beside(few_bits, question.mode), seconds, why)
    sgd = question.optimizer == "sgd"
    fused = torch.optim.SGD(trained, momentum=0.9) if sgd else torch.optim.AdamW(trained)
    name = "SGD with momentum" if sgd else "AdamW"
    if seconds is None:
        return HostStep(name, (fused,), question.mode, source=source)
    return HostStep(f"an optimizer with the state of {name}", (fused,), "off", seconds, why)


def _configured(module: nn.Module) -> tuple[torch.optim.Optimizer, ...]:
    """The optimizers of a LightningModule; none if they need what only a run has."""
    try:
        configured: Any = module.configure_optimizers
        leaves = tree_leaves(configured())
    except Exception:  # code of a user may raise anything
        return ()
    return tuple(dict.fromkeys(leaf for leaf in leaves if isinstance(leaf, torch.optim.Optimizer)))


def _is_for_muon(weight: Tensor) -> bool:
    return weight.ndim == 2 and max(weight.shape) <= _MOST_OBLONG * min(weight.shape)


# ---------------------------------------------------------------------- memory


@dataclass(frozen=True)
class HostMemory:
    """What is in the host memory of a node, and on its disk. All sizes are in bytes.

    Attributes:
        parts: what is in memory, by what it is; the least that can be, if there is not as much.
        limit: what processes leave of the memory that there is. None for no limit.
        kept: what they take for themselves.
        ledger: what training has, all of it in memory; None for inference.
        placement: which layers' optimizer state, or weights in inference, is on the disk. None without a disk, or if memory
            does not suffice even with one.
        trained: what else is on the disk; None without a disk.
    """

    parts: Mapping[str, int]
    limit: int | None
    kept: int
    ledger: Ledger | None
    placement: StatePlacement | None = None
    trained: OnDisk | None = None

    @property
    def nbytes(self) -> int:
        """What is in memory."""
        return sum(self.parts.values())

    @property
    def stepping_bytes(self) -> int:
        """The same while batches are trained: without the layers that stay on the device, which a checkpoint brings."""
        return self.nbytes - (0 if self.ledger is None else self.ledger.staying)

    @property
    def fits(self) -> bool:
        """Whether there is as much memory."""
        return self.limit is None or self.nbytes <= self.limit

    def moved(self, plan: Plan, batches: int) -> Mapping[int, int]:
        """Bytes that a layer's update reads, and as many that it writes, by the layer's index; or that a fetch reads.

        Gradients are written when they come, and read once, in each batch of a step. Trained weights are written once and read up
        to three times, twice by fetches. All of that counts as the update's.
        """
        if self.placement is None or self.trained is None:
            return {}
        below = Counter(self.placement.on_disk)
        for planned in self.trained.weights:
            below[planned.name] += 2 * planned.nbytes
        for planned in self.trained.gradients:
            below[planned.name] += batches * planned.gradient_bytes
        first = len(plan.layers) + len(plan.masters)
        indexed = {**dict(enumerate(plan.layers)), **dict(enumerate((*plan.tables, plan.residents), first))}
        return {index: below[layer.name] for index, layer in indexed.items() if layer.name in below}


def host_memory(question: Question, plan: Plan, step: HostStep | None, offloaded: int) -> HostMemory:
    """Counts host memory, and places on the disk, if there is one, what memory does not hold.

    Args:
        question: says how much memory there is, and whether there is a disk.
        plan: the layers.
        step: the optimizer's; None for inference.
        offloaded: bytes of activations that each device has there.
    """
    memory, disk = question.host_memory, question.disk is not None
    kept, limit = 0, None
    if memory is not None:
        with needed_for("--host-memory"):
            from sp_lightning.disk.host_budget import kept_for_processes
        kept = min(memory, kept_for_processes(memory, question.devices, disk=disk))
        limit = memory - kept
    if step is None:
        ledger, parts = None, Counter(weights=plan.taken(training=False)[1])
        # Weights that travel as casts, tables and residents stay in memory.
        movable, sizes = "weights", {layer.name: layer.nbytes for layer in plan.layers if not layer.casts}
    else:
        ledger, movable = _ledger(question, plan, step), "optimizer state"
        state, gradients = ledger.state or 0, sum(layer.gradient_bytes for layer in plan.trained)
        parts = Counter({"weights": ledger.weights, "gradients": ledger.gradients, movable: state})
        sizes = {layer.name: layer.gradient_bytes * state // max(gradients, 1) for layer in plan.trained}
        sizes = {name: size for name, size in sizes.items() if size}
    parts["activations"] = question.devices * offloaded
    if not disk:
        return HostMemory(parts, limit, kept, ledger)
    parts[movable] -= sum(sizes.values())
    with needed_for("--disk"):
        from sp_lightning.disk.state_placement import OnDisk, choose_on_disk, least_room
    chosen = OnDisk()
    placement = _place(sizes, parts.total(), limit)
    if placement is None and limit is not None and ledger is not None and step is not None and plan.alone:
        # With several devices nothing but state goes to the disk, where gradients are as wide as parameters.
        wide = _ledger(question, plan, step, narrow=False).gradients - ledger.gradients
        missing = parts.total() + wide + 2 * max(sizes.values(), default=0) - limit
        chosen = choose_on_disk(plan, missing, gradients=not _early(question, step))
        parts["weights"] -= chosen.weight_bytes
        parts["gradients"] += wide * bool(chosen.gradients) - chosen.gradient_bytes
        parts[_PASSING] = chosen.window
        placement = _place(sizes, parts.total(), limit)
    if placement is None:
        parts[movable] += least_room(sizes)
    else:
        parts.update({movable: sum(placement.in_memory.values()), _PASSING: placement.staging})
    return HostMemory(parts, limit, kept, ledger, placement, chosen)


def _place(sizes: Mapping[str, int], others: int, limit: int | None) -> StatePlacement | None:
    from sp_lightning.disk.state_placement import place_state

    try:
        return place_state(sizes, None if limit is None else limit - others)
    except MemoryError:
        return None


def _early(question: Question, step: HostStep) -> bool:
    """Whether each layer is updated in backward, after which its gradients are freed."""
    return question.accumulate_grad_batches == 1 and step.overlap == "backward" and question.frees


def _ledger(question: Question, plan: Plan, step: HostStep, *, narrow: bool = True) -> Ledger:
    fused = step.overlap != "off" and step.seconds is None and not step.on_device
    steps = Steps(
        early=_early(question, step),
        accumulate=question.accumulate_grad_batches,
        clips=question.gradient_clip,
        scales=question.precision == "16-mixed",
        pieces=fused,
        narrow=(fused or step.on_device) and narrow,
        on_device=step.on_device,
        sliced=question.transfer == "sharded",
    )
    return make_ledger(plan, step.optimizers, steps)
