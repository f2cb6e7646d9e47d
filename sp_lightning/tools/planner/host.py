"""The host in ``plan``: the optimizer's step, host memory, and the disk."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from sp_lightning.core.plan.ledger import Ledger, Steps, has_known_state, make_ledger
from sp_lightning.core.plan.plan import Plan
from sp_lightning.core.torch_compat.private import tree_leaves
from sp_lightning.core.updates.fused import has_fused_step
from sp_lightning.core.updates.step_context import compiles, reads_settings
from sp_lightning.registry import needed_for
from sp_lightning.tools.planner.arguments import Overlap, Question
from sp_lightning.tools.planner.cpu_seconds import EIGHT_BITS_SECONDS, NORM_SECONDS, PIECES_SECONDS, muon_flops

if TYPE_CHECKING:
    from sp_lightning.capabilities.disk.state_placement import OnDisk, StatePlacement

_PASSING = "buffers for the disk"
_RETURNING = "layers back from the GPU at the end"
_HOST_FLOPS = 1e12  # floating-point operations per second of the host, for Muon's products
_THREADS = 8  # of updates on the host: a machine with a card of 16 GB or more has at least as many cores


# ---------------------------------------------------------------------- the step


@dataclass(frozen=True)
class HostStep:
    """An optimizer's step.

    Attributes:
        name: the name of the optimizer in the answer.
        optimizers: optimizers whose state has the same size. Host memory is computed from them.
        overlap: when updates run; ``off`` if updates cannot run in the background.
        seconds: the time of a step; None if a step takes the time of a pass over memory, as with a fused optimizer.
        why: the reason for ``seconds``, in words; empty if ``seconds`` is None.
        source: the option or method that chose the optimizer.
        on_device: True if the step runs on the device.
        flops: floating-point operations of a step, if they determine its time; 0 if memory does.
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
    """Returns the step of the asked optimizer, else of the module's own optimizer if its state is known, else of AdamW.

    Raises:
        ValueError: no parameter of the module is trained, or torchao is missing.
    """
    step = _step_of(question, module)
    return step if question.optimizer_on == "cpu" else on_device(step, question)


def on_device(step: HostStep, question: Question) -> HostStep:
    """Returns the same step on the device.

    Its time is that of ``step.flops`` if not 0, else that of a pass over device memory.
    """
    seconds, why = None, ""
    if step.flops:
        seconds = step.flops / (question.tflops * 1e12)
        why = (
            f"{step.flops / 1e12:.3g} TFLOP on the device, {seconds:.3g} s with {question.tflops:g} TFLOP/s (--tflops)"
        )
    # With weights of 16 bits ("bf16-true"), Lightning sets torch's default dtype to 16 bits during the forward. A step that runs
    # at the same time would create the optimizer's new tensors in that dtype, unlike a step of plain Lightning. So the step does
    # not overlap. Nor do those that read it in each step.
    alone = question.stores_16_bits or any(map(reads_settings, step.optimizers))
    overlap = "off" if alone else beside(step.optimizers, question.mode)
    return replace(step, overlap=overlap, on_device=True, seconds=seconds, why=why)


def beside(optimizers: Iterable[torch.optim.Optimizer], overlap: Overlap) -> Overlap:
    """Returns the asked overlap; ``off`` instead of ``forward`` for optimizers that compile their step.

    Nothing else runs while such an optimizer steps.
    """
    return "off" if overlap == "forward" and any(map(compiles, optimizers)) else overlap


def update_rates(question: Question, step: HostStep, plan: Plan, ledger: Ledger, traffic: Traffic) -> dict[str, Any]:
    """Returns the fields of :class:`~sp_lightning.tools.planner.prediction.visits.Rates` for updates, by name.

    Args:
        question: has the bandwidths of memory.
        step, plan, ledger: the optimizer's step, the plan of the layers, and the host memory of training.
        traffic: the host memory that steps read and write.
    """
    gradients = max(1, sum(layer.gradient_bytes for layer in plan.trained))
    staying = sum(nbytes for _, _, nbytes in plan.stay)
    share, state = gradients / (gradients + staying), (ledger.state or 0) / gradients
    rates = {"step": _stay_rate(question, step, gradients + staying, state)} if staying else {}
    if not step.on_device:
        seconds = max(traffic.step, 1) / question.host_bandwidth
        seconds = share * step.seconds if step.seconds else max(seconds, _pieces_seconds(question, plan))
        return {"update": gradients / seconds, **rates}
    update = gradients / (share * step.seconds) if step.seconds else question.device_bandwidth / (3 + 2 * state)
    read, written = (nbytes / gradients for nbytes in (traffic.uploaded, traffic.downloaded))
    return {"update": update, "update_upload": read, "update_download": written, **rates}


def _pieces_seconds(question: Question, plan: Plan) -> float:
    """Returns the seconds that updates in pieces compute, on as many threads as are assumed."""
    each = PIECES_SECONDS + NORM_SECONDS * (question.gradient_clip == "norm")
    return each * sum(layer.narrow_bytes for layer in plan.trained) / 2 / _THREADS


def _stay_rate(question: Question, step: HostStep, gradients: int, state: float) -> float:
    """Returns the bytes of gradients per second that the optimizer steps of staying layers consume.

    A step reads weights, gradients and state, and writes weights and state. Clipping by norm also reads the gradients once. Both
    kinds of clipping read and write the gradients.

    Args:
        question: has the device's speed, and the kind of gradient clipping.
        step: the optimizer's step.
        gradients: bytes of all gradients.
        state: bytes of state for each byte of gradients.
    """
    if step.flops:
        return gradients / (step.flops / (question.tflops * 1e12))
    clips = {"norm": 3, "value": 2}.get(question.gradient_clip or "", 0)
    return question.device_bandwidth / (3 + 2 * state + clips)


def _step_of(question: Question, module: nn.Module) -> HostStep:
    """Returns :func:`host_step`, on the CPU."""
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    if not trained:
        raise ValueError(f"No parameter of {question.model!r} requires a gradient. Add --predict.")
    own = _configured(module) if question.optimizer is None else ()
    name = " and ".join(sorted({type(each).__name__ for each in own}))
    if own and all(map(has_known_state, own)):
        overlap = question.mode if all(map(has_fused_step, own)) else "off"
        flops = sum(muon_flops(g["params"]) for o in own if type(o) is torch.optim.Muon for g in o.param_groups)
        step = HostStep(name, own, overlap, source="configure_optimizers", flops=flops)
        seconds = flops / _HOST_FLOPS
        why = f"{flops / 1e12:.3g} TFLOP on the host, {seconds:.3g} s with {_HOST_FLOPS / 1e12:g} TFLOP/s (assumed)"
        return replace(step, seconds=seconds, why=why) if flops else step
    source = f"in place of {name}, whose state is not known" if own else "--optimizer"
    if question.optimizer == "adamw8bit":
        try:
            from torchao.optim import AdamW8bit
        except ImportError as error:
            raise ValueError("--optimizer adamw8bit needs torchao: pip install torchao") from error
        # Each step converts the state from and to 8 bits. The time of this can only be measured.
        seconds = EIGHT_BITS_SECONDS * sum(parameter.numel() for parameter in trained)
        why = f"{seconds:.3g} s, {1e9 * EIGHT_BITS_SECONDS:g} ns per parameter as measured on two CPU cores"
        few_bits = (AdamW8bit(trained),)
        return HostStep("AdamW8bit", few_bits, beside(few_bits, question.mode), seconds, why)
    sgd = question.optimizer == "sgd"
    fused = torch.optim.SGD(trained, momentum=0.9) if sgd else torch.optim.AdamW(trained)
    name = "SGD with momentum" if sgd else "AdamW"
    return HostStep(name, (fused,), question.mode, source=source)


def _configured(module: nn.Module) -> tuple[torch.optim.Optimizer, ...]:
    """Returns the optimizers of a LightningModule; no optimizers if ``configure_optimizers`` is missing or raises an error."""
    try:
        configured: Any = module.configure_optimizers
        leaves = tree_leaves(configured())
    except Exception:  # user code may raise any error
        return ()
    return tuple(dict.fromkeys(leaf for leaf in leaves if isinstance(leaf, torch.optim.Optimizer)))


# ---------------------------------------------------------------------- memory


@dataclass(frozen=True)
class HostMemory:
    """The contents of a node's host memory and disk. All sizes are in bytes.

    Attributes:
        parts: by name, the sizes of the contents of host memory. If host memory is too small even with a disk, these are the
            least sizes.
        limit: the given host memory without ``kept``; None for no limit.
        kept: the part of the given host memory that is left to the processes, for their libraries and batches.
        ledger: the host memory of training without a disk; None for inference.
        placement: the layers whose optimizer state (in inference: weights) is on the disk. None without a disk, or if host
            memory is too small even with a disk.
        trained: the trained weights and gradients on the disk; None without a disk.
    """

    parts: Mapping[str, int]
    limit: int | None
    kept: int
    ledger: Ledger | None
    placement: StatePlacement | None = None
    trained: OnDisk | None = None

    @property
    def nbytes(self) -> int:
        """The size of all contents of host memory."""
        return sum(self.parts.values())

    @property
    def fits(self) -> bool:
        """True if the contents fit into host memory."""
        return self.limit is None or self.nbytes <= self.limit

    def moved(self, plan: Plan, batches: int) -> Mapping[int, int]:
        """Returns the disk traffic by layer index: bytes that an update reads and also writes; in inference, bytes of an upload.

        Gradients are written and read once in each batch of a step. Trained weights are written once and read up to three times
        (twice by uploads), which counts as two reads and two writes. All of this counts as traffic of the update.

        Args:
            plan: the layers.
            batches: the number of batches of a step.
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


def host_memory(
    question: Question, plan: Plan, step: HostStep | None, offloaded: int, on_gpu: Container[torch.Tensor] = ()
) -> HostMemory:
    """Computes the host memory of a run. With a disk, data that does not fit into host memory is on the disk.

    Args:
        question: has the size of host memory, and the disk.
        plan: the layers.
        step: the optimizer's step; None for inference.
        offloaded: bytes of activations that each device offloads.
        on_gpu: the weights that stay on the device, with their state, until the run ends.
    """
    memory = question.host_memory
    disk = question.disk is not None
    kept = 0
    limit = None
    if memory is not None:
        with needed_for("--host-memory"):
            from sp_lightning.capabilities.disk.host_budget import kept_for_processes
        kept = min(memory, kept_for_processes(memory, question.devices, disk=disk))
        limit = memory - kept
    if step is None:
        ledger, parts = None, Counter(weights=plan.host_bytes)
        # Not movable to the disk: weights that are uploaded as casts, tables, and resident weights.
        movable, sizes = "weights", {layer.name: layer.nbytes for layer in plan.layers if not layer.casts}
    else:
        ledger, movable = _ledger(question, plan, step, on_gpu), "optimizer state"
        state, gradients = ledger.state or 0, sum(layer.gradient_bytes for layer in plan.trained)
        parts = Counter({"weights": ledger.weights, "gradients": ledger.gradients, movable: state})
        sizes = {layer.name: layer.gradient_bytes * state // max(gradients, 1) for layer in plan.trained}
        sizes = {name: size for name, size in sizes.items() if size}
    parts["activations"] = question.devices * offloaded
    if plan.stay:  # activations have left host memory then
        returning = plan.host_bytes_at_end - plan.host_bytes if ledger is None else ledger.returning
        parts[_RETURNING] = max(0, returning - parts["activations"])
    if not disk:
        return HostMemory(parts, limit, kept, ledger)
    parts[movable] -= sum(sizes.values())
    with needed_for("--disk"):
        from sp_lightning.capabilities.disk.state_placement import OnDisk, choose_on_disk, least_room
    chosen = OnDisk()
    placement = _place(sizes, parts.total(), limit)
    if placement is None and limit is not None and ledger is not None and step is not None and plan.alone:
        # With several devices, only optimizer state can be on the disk. Gradients on the disk have the parameters' dtype: all of
        # them take ``wide`` bytes more. Buffers for state in flight need at least twice the largest layer's state.
        wide = _ledger(question, plan, step, on_gpu, narrow=False).gradients - ledger.gradients
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
    """Returns the layers whose data is on the disk; None if host memory is too small even for the buffers of the disk.

    Args:
        sizes: the bytes of each layer that may be on the disk.
        others: bytes of all other contents of host memory.
        limit: bytes of host memory; None for no limit.
    """
    from sp_lightning.capabilities.disk.state_placement import place_state

    try:
        return place_state(sizes, None if limit is None else limit - others)
    except MemoryError:
        return None


def _early(question: Question, step: HostStep) -> bool:
    """Returns True if each layer is updated in backward and its gradients are freed after that."""
    return question.accumulate_grad_batches == 1 and step.overlap == "backward" and question.frees


def _in_pieces(step: HostStep) -> bool:
    """Returns True if layers are updated piece by piece, so that the data of one pass is in the caches for the next."""
    return step.overlap != "off" and step.seconds is None and not step.on_device


def _ledger(
    question: Question, plan: Plan, step: HostStep, on_gpu: Container[torch.Tensor], *, narrow: bool = True
) -> Ledger:
    """Returns the host memory of training without a disk. With ``narrow=False``, gradients have the parameters' dtype."""
    steps = Steps(
        early=_early(question, step),
        accumulate=question.accumulate_grad_batches,
        clips=question.gradient_clip,
        narrow=(_in_pieces(step) or step.on_device) and narrow,
        on_device=step.on_device,
    )
    return make_ledger(plan, step.optimizers, steps, on_gpu)


class Traffic(NamedTuple):
    """Bytes of host memory that optimizer steps read and write: an upper bound for fused steps. Layers that stay have none.

    Attributes:
        step: by the CPU, in each step.
        batch: by the CPU, in each micro-batch. 0 without accumulation: ``step`` then contains them.
        uploaded, downloaded: by the transfers of weights, gradients and state of a step on the device.
    """

    step: int = 0
    batch: int = 0
    uploaded: int = 0
    downloaded: int = 0


def host_traffic(question: Question, plan: Plan, step: HostStep, state: int) -> Traffic:
    """Counts the passes over host memory. ``state``: bytes of the optimizers' state."""
    layers, accumulate, more = plan.trained, question.accumulate_grad_batches, question.accumulate_grad_batches - 1
    pieces, on_device, norm = _in_pieces(step), step.on_device, question.gradient_clip == "norm"
    narrow = (
        (pieces or on_device) and not more and plan.alone
    )  # sums of gradients, of batches or devices, are not narrow
    gradients = sum(layer.gradient_bytes for layer in layers)  # as large as the weights that an update reads and writes
    halves = sum(layer.narrow_bytes for layer in layers)  # gradients of casts, in the casts' dtype
    kept, widened = gradients - halves * narrow, halves * plan.alone * (not narrow)
    wide = kept - halves * narrow  # without narrow gradients, which other passes unscale and clip
    clipped = wide * (question.gradient_clip is not None)
    if on_device and _early(question, step):
        kept, widened = plan.residents.gradient_bytes, 0
    casts = accumulate * sum(cast.nbytes for layer in layers for cast in layer.casts)
    downloaded = sum(cast.nbytes for layer in layers for cast in layer.casts if layer.gradient_bytes) * on_device
    read_for_casts = accumulate * sum(each.nbytes for each in plan.masters) - 2 * halves * (pieces or on_device)
    batches = read_for_casts + casts - downloaded
    batches += more * gradients * (3 if plan.alone else plan.ranks)  # several devices add to gradients on the device
    passes = batches + 3 * widened + (kept + wide) * (question.precision == "16-mixed") + clipped * (2 - pieces)
    # Narrow gradients are widened into a buffer for their norms.
    passes += norm * (kept + 4 * halves * narrow * (not on_device))
    uploaded, downloaded = gradients + kept + state, gradients + state + downloaded
    if on_device:
        transfers = uploaded, downloaded
    else:
        passes, transfers = passes + uploaded + downloaded, (0, 0)
    each = batches // accumulate if more else 0
    return Traffic(passes - accumulate * each, each, *transfers)
