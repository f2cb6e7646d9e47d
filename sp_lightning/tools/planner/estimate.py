"""An estimate of a model's memory and speed, from which each window is predicted.

The model is built without memory, and runs a batch without values. The result is an immutable :class:`Estimate`, from which
the verdict, the text, the JSON and the plot are made.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from sp_lightning import registry
from sp_lightning.capabilities.activations.policy import peak_bytes
from sp_lightning.core.model.find import find_layers
from sp_lightning.core.model.found import Found
from sp_lightning.core.plan.choices import Mode, Modes
from sp_lightning.core.plan.plan import Plan, make_plan, plan_contents
from sp_lightning.core.torch_compat.modes import default_dtype
from sp_lightning.core.torch_compat.private import tree_leaves
from sp_lightning.tools.planner.adapters import add_adapters
from sp_lightning.tools.planner.arguments import PRECISIONS, Question, contradictions
from sp_lightning.tools.planner.dry_run import Work, estimate
from sp_lightning.tools.planner.fake import VALUES_NEEDED, fake_tensors
from sp_lightning.tools.planner.host import (
    HostMemory,
    HostStep,
    Traffic,
    host_memory,
    host_step,
    host_traffic,
    update_rates,
)
from sp_lightning.tools.planner.known_values import answered
from sp_lightning.tools.planner.model_source import Arguments, ModelSource, has_forward, load_model
from sp_lightning.tools.planner.modes import oldest_offloaded, visited
from sp_lightning.tools.planner.prediction.machine import HOST_SECONDS
from sp_lightning.tools.planner.prediction.simulator import Walk
from sp_lightning.tools.planner.prediction.visits import Prediction, Rates, Visit

SAME = 1.01
"""Predicted times that differ by at most this factor count as equally fast; the smallest window of them is chosen."""
_NO_UPDATES: dict[str, Any] = {"update": math.inf, "step": math.inf}
_SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
"""The shares of the layers that fit, which ``--gpu-layers auto`` tries."""
_DRY_RUN = (
    "model", "predict", "generate", "precision", "batch_size", "tokens", "image", "input",
    "gradient_checkpointing", "lora", "optimizer", "optimizer_on", "layers", "keep_on_gpu",
    "pack_experts",
)  # fmt: skip
"""The arguments that change the dry run of a batch or the optimizer's step, except ``optimizer_overlap``."""


def dtypes(precision: str) -> tuple[torch.dtype, torch.dtype | None]:
    """Returns the dtypes of the parameters and of autocast (None: no autocast) for Lightning's name of a precision."""
    parameters, autocast = PRECISIONS[precision]
    return getattr(torch, parameters), None if autocast is None else getattr(torch, autocast)


@dataclass(frozen=True)
class Estimate:
    """The facts about a model that do not depend on the window.

    Attributes:
        question: the question.
        found: the model's layers. None stays on the device.
        find: finds the layers if some stay on the device. The argument is their number, or their share.
        items: the contents of a batch, in words.
        step: the optimizer's step; None for inference.
        work: the work of a batch; if tokens are generated, the work of the last token.
        prompts: the work of the prompts, if tokens are generated.
        notes: sentences for the user, for example on parts of a batch that are not counted, or on weights without adapters.
        checkpointing: the name of the method that enabled the model's own gradient checkpointing; empty if none did.
    """

    question: Question
    found: Found
    find: Callable[[int | float], Found]
    items: str
    step: HostStep | None
    work: Work
    prompts: Work | None = None
    notes: tuple[str, ...] = ()
    checkpointing: str = ""

    @cached_property
    def _predictions(self) -> dict[Any, Prediction]:
        """Predictions by plan and modes, which are made once."""
        return {}

    @property
    def parameters(self) -> int:
        """The number of parameters."""
        return sum(parameter.numel() for parameter in self.found.places)

    @property
    def trained(self) -> int:
        """The number of trained parameters."""
        return sum(parameter.numel() for parameter in self.found.places if parameter.requires_grad)

    def asked(self, question: Question) -> Estimate | None:
        """Returns the estimate for another question; None if the other question needs its own dry run."""
        if any(getattr(question, name) != getattr(self.question, name) for name in _DRY_RUN):
            return None
        step = self.step
        # Any other overlap is "off", because the optimizer cannot step as asked.
        if step is not None and step.overlap == self.question.mode:
            step = replace(step, overlap=question.mode)
        return replace(self, question=question, step=step)

    @cached_property
    def plain_bytes(self) -> int:
        """Device memory of plain Lightning."""
        return self._plain_bytes("keep")

    @cached_property
    def checkpointed_bytes(self) -> int:
        """Device memory of plain Lightning if each layer runs in ``torch.utils.checkpoint``."""
        return self._plain_bytes("keep" if self.question.predict else "recompute")

    def _plain_bytes(self, mode: Mode) -> int:
        """Returns the device memory of plain Lightning.

        The device holds weights and, in training, gradients (with ``ddp`` twice: also in buckets) and optimizer state. The larger
        of two sizes is added:

        - casts and activations, in forward and backward;
        - in training, a temporary tensor per trained parameter, in the step of torch's optimizers. Fused optimizers need
          none, but whether the user's optimizer is fused is unknown.
        """
        alone = replace(self, question=self.question.but(gpu_layers=0))  # otherwise some state is not in host memory
        plan, ledger = alone.plan(1, 1), alone.host.ledger
        weights, gradients = plan.plain
        nbytes = sum(span.nbytes for layer in plan.layers for span in layer.casts) + self.work.alive(mode)
        if ledger is None:
            return weights + nbytes
        copies = 1 if plan.alone else 2
        return weights + copies * gradients + (ledger.state or 0) + max(nbytes, gradients)

    def plan(self, k: int, k_prime: int) -> Plan:
        """Returns the plan for a window."""
        asked = self.question
        options: dict[str, Any] = {"ranks": asked.devices, "training": not asked.predict}
        plan = make_plan(self._staying[0], k=k, k_prime=k_prime, contents=self._staying[1], **options)
        return replace(plan, steps_on_device=not asked.predict and asked.optimizer_on == "gpu")

    @cached_property
    def _staying(self) -> tuple[Found, dict[str, Any]]:
        """The layers, some of which stay on the device, with their sizes, as every plan has them; none stays with ``auto``."""
        share = self.question.gpu_layers
        found = self.found if share in (0, "auto") else self.find(share)  # type: ignore[arg-type]
        return found, plan_contents(found)

    @cached_property
    def _counted(self) -> list[Estimate]:
        """The estimate with each number of staying layers."""
        numbers = range(len(self.found.layers) + 1)
        return [replace(self, question=self.question.but(gpu_layers=number)) for number in numbers]

    def staying(self, k: int, k_prime: int) -> Estimate:
        """Returns the estimate for a window, with ``--gpu-layers auto`` replaced by a number of layers.

        The number is the largest that fits beside the window and activations, or a smaller one that is faster. If the window
        itself does not fit, no layer stays.
        """
        question = self.question
        limit = question.gpu_memory
        if question.gpu_layers != "auto" or limit is None:
            return self
        counted = self._counted
        room = limit - self.activation_bytes

        def fits(number: int) -> bool:
            own = sum(weights + 4 * gradients for _, weights, gradients in counted[number]._staying[0].stay_bytes)
            return own <= room and counted[number].plan(k, k_prime).peak_device_bytes <= room

        # Not a bisection: if more layers stay, slots may be smaller, and less memory is needed.
        most = next((number for number in reversed(range(len(counted))) if fits(number)), 0)
        seconds: dict[int, float] = {}
        for number in {round(share * most) for share in _SHARES}:
            if number < most and not fits(number):
                continue
            plan = counted[number].plan(k, k_prime)
            seconds[number] = counted[number].predict(plan, counted[number].modes(plan)).seconds
        enough = SAME * min(seconds.values())
        return counted[max(number for number, each in seconds.items() if each <= enough)]

    @cached_property
    def activations(self) -> Mode | Literal["auto"]:
        """The asked activation mode.

        ``"auto"`` becomes ``"keep"`` if all activations fit beside the smallest window, as in a run, and also in inference and
        without a limit.
        """
        asked = self.question
        if asked.activations != "auto":
            return asked.activations
        smallest = self.plan(min(asked.k or (1,)), min(asked.k_prime or (1,)))
        needed = smallest.peak_device_bytes + self.work.alive("keep")
        fits = asked.predict or asked.gpu_memory is None or needed <= asked.gpu_memory
        return "keep" if fits else "auto"

    @property
    def activation_bytes(self) -> int:
        """Device memory of activations and intermediate results; with ``auto``, the least: all are offloaded."""
        choice = self.activations
        return self.work.alive("offload" if choice == "auto" else choice)

    @cached_property
    def host(self) -> HostMemory:
        """The host memory if no activations are offloaded."""
        return self._host_memory(0)

    def _host_memory(self, offloaded: int) -> HostMemory:
        return host_memory(self.question, self.plan(1, 1), self.step, offloaded, self._staying[0].on_gpu)

    def host_with(self, modes: Modes) -> HostMemory:
        """Returns the host memory with the activations that these modes offload."""
        offloaded = self.work.offloaded(modes)
        return self._host_memory(offloaded) if offloaded else self.host

    @property
    def _traffic(self) -> Traffic:
        """The host memory that optimizer steps read and write."""
        step, ledger = self.step, self.host.ledger
        if step is None or ledger is None:
            return Traffic()
        return host_traffic(self.question, self.plan(1, 1), step, ledger.state or 0)

    @cached_property
    def rates(self) -> Rates:
        """The speed of the machine, from the question."""
        asked, step, ledger, updates = self.question, self.step, self.host.ledger, _NO_UPDATES
        if step is not None and ledger is not None:
            updates = update_rates(asked, step, self.plan(1, 1), ledger, self._traffic)
        visit, weight = asked.measured.python or HOST_SECONDS["inference" if asked.predict else "training"]
        others = asked.devices - 1  # the number of other devices
        return Rates(
            upload=asked.pcie,
            download=asked.pcie,
            **updates,
            host_memory=asked.host_bandwidth,
            visit_seconds=visit,
            weight_seconds=weight,
            # Each device keeps its own part of a gradient, and sends the other parts to the other devices.
            links=asked.links * asked.devices / others if others else math.inf,
            disk=asked.disk or math.inf,
            synchronous=asked.measured.synchronous,
        )

    def _visits(self, plan: Plan, modes: Modes, *, flops: float, memory: float) -> list[Visit]:
        """Returns the layer calls of a batch, with times for a device of these operations and bytes per second."""
        index_of, first = {layer.name: at for at, layer in enumerate(self.found.layers)}, len(plan.stay)

        def streamed(layers: Iterable[int]) -> tuple[int, ...]:  # the first layers stay, and are not among the plan's
            return tuple(layer - first for layer in layers if layer >= first)

        visits = visited(self.work.visits(flops=flops, memory=memory), self.work.calls, index_of, modes)
        return [replace(each, layers=streamed(each.layers), needs=streamed(each.needs)) for each in visits]

    def modes(self, plan: Plan) -> Modes:
        """Returns the activation mode of each unit. As in a run, ``auto`` offloads the oldest activations if not all fit."""
        work = self.work
        choice = self.activations
        limit = self.question.gpu_memory
        if choice != "auto":
            return dict.fromkeys((call.unit for call in work.calls), choice)
        assert limit is not None  # otherwise ``activations`` would be "keep"
        # Bytes that no choice of modes changes.
        others = work.alive("offload") - peak_bytes(work.calls, dict.fromkeys((c.unit for c in work.calls), "offload"))
        room = max(0, limit - plan.peak_device_bytes - others)
        return oldest_offloaded(work.calls, room)

    def flops(self, plan: Plan, modes: Modes) -> int:
        """Returns the floating-point operations of a batch, recomputation included."""
        # Each operation takes one second.
        return round(sum(visit.seconds for visit in self._visits(plan, modes, flops=1.0, memory=math.inf)))

    def predict(self, plan: Plan, modes: Modes, rates: Rates | None = None, *, updates: bool = True) -> Prediction:
        """Returns the time of a batch; with accumulation, the average over the batches of a step.

        Args:
            plan: the plan for a window.
            modes: the activation mode of each unit.
            rates: the speed of the machine; by default that of the question.
            updates: False to predict the time as if updates took no time and no bandwidth of host memory.
        """
        rates = rates or self.rates
        key = (plan.k, plan.k_prime, plan.stay, tuple(modes.values()), rates, updates)
        if key not in self._predictions:
            found = self._batch(plan, modes, rates, updates=updates, moves=True)
            if (batches := self.question.accumulate_grad_batches) > 1:
                found = found.beside(self._batch(plan, modes, rates, updates=False, moves=False), batches - 1)
            self._predictions[key] = found
        return self._predictions[key]

    def _batch(self, plan: Plan, modes: Modes, rates: Rates, *, updates: bool, moves: bool) -> Prediction:
        """Predicts one batch: with optimizer steps if ``updates`` is True, with disk traffic if ``moves`` is True."""
        traffic = self._traffic
        overlap = self.question.mode if self.step is None else self.step.overlap
        on_disk: Mapping[int, int] = {}
        if moves and self.question.disk is not None:
            on_disk = self.host_with(modes).moved(plan, self.question.accumulate_grad_batches)
        with_updates = rates if updates else replace(rates, **_NO_UPDATES, update_upload=0.0, update_download=0.0)
        asked = self.question
        visits = self._visits(plan, modes, flops=asked.tflops * 1e12, memory=asked.device_bandwidth)
        walk = Walk(plan, visits, with_updates, overlap=overlap, frees=self.question.frees, on_disk=on_disk)
        return walk.predict(host_traffic=traffic.batch + traffic.step * updates)


def estimate_model(question: Question) -> Estimate:
    """Builds the model and runs a batch, both without memory.

    A default of ``question.tokens`` is changed to a number that the model takes.

    Raises:
        ValueError: the question contradicts itself; the model is unknown, does not take the batch, or reads values in its
            forward; or it has no parameters to stream or train.
        ImportError: a library is missing.
    """
    question = _with_fast_steps(question)
    for reason in contradictions(question):
        raise ValueError(reason)
    dtype, autocast = dtypes(question.precision)
    with default_dtype(dtype), fake_tensors(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = (source := load_model(question)).module
        if not any(True for _ in module.parameters()):
            raise ValueError(f"{question.model!r} has no parameters.")
        notes = list(source.notes)
        if question.lora is not None:
            notes += _load_base(source, autocast)  # before adapters are added, which stay in float32
        if packing := question.pack_experts or source.packed:
            registry.public("pack_experts")(module, packing)
        if question.lora is not None:
            notes += add_adapters(module, question.lora)
        if autocast is None and dtype is not torch.float32:
            module.to(dtype)  # Lightning converts weights for "bf16-true" and "16-true" only
        checkpointing = _enable_checkpoints(module) if question.gradient_checkpointing else ""
        module.train(not question.predict)
        find = partial(
            find_layers, module, layers=question.layers, keep_on_gpu=question.keep_on_gpu or (), autocast=autocast
        )
        found = find()

        @cache
        def find_staying(number: int | float) -> Found:
            with fake_tensors():
                return find(gpu_layers=number)

        if question.generate is not None:
            prompts, work = _generate(source, found, question)
            made = Estimate(
                question,
                found,
                find_staying,
                next(iter(source.batches)),
                None,
                work,
                prompts=prompts,
                notes=tuple(notes),
            )
        else:
            step = None if question.predict else host_step(question, module)
            with torch.set_grad_enabled(not question.predict):
                items, work, uncounted = _run_batch(source, found, question)
            made = Estimate(question, found, find_staying, items, step, work, notes=(*notes, *uncounted))
        made = replace(made, checkpointing=checkpointing)
    return _with_whole_tables(made)


def _with_fast_steps(question: Question) -> Question:
    """Returns the question with steps of AdamW8bit on the GPU, if the user did not choose their place.

    On the CPU they take a hundred times as long as those of AdamW.
    """
    fast = question.but(optimizer_on="gpu")
    slow = question.optimizer == "adamw8bit" and "optimizer_on" not in question.given
    return fast if slow and not question.predict and not any(True for _ in contradictions(fast)) else question


def _enable_checkpoints(module: nn.Module) -> str:
    """Enables the model's own gradient checkpointing. Returns the name of the method, in transformers or in diffusers."""
    names = ("gradient_checkpointing_enable", "enable_gradient_checkpointing")
    name = next((name for name in names if hasattr(module, name)), None)
    if name is None:
        raise ValueError(
            f"--gradient-checkpointing: {type(module).__name__} has no {names[0]}(), as models of transformers have. Use "
            "--activations recompute instead."
        )
    enable: Any = getattr(module, name)
    enable()
    return name


def _load_base(source: ModelSource, autocast: torch.dtype | None) -> list[str]:
    """Converts a frozen base to the dtype of its stored weights, and returns a note for the user.

    Nothing is converted without autocast, or if the stored dtype is unknown, is not floating-point, or has 32 bits or more.
    """
    stored = source.stored
    if autocast is None or stored is None or not stored.is_floating_point or stored.itemsize >= 4:
        return []
    source.module.to(stored)
    return [
        f"the frozen base has {str(stored).removeprefix('torch.')} weights, as they are stored; adapters have float32"
    ]


def _with_whole_tables(made: Estimate) -> Estimate:
    """Runs the model again with the tables that it reads as a whole as layers, and returns the new estimate.

    If there are no such tables, returns the given estimate. For example, code of the model may use the weight of an embedding
    for its head.
    """
    if not made.work.whole:
        return made
    whole = sorted(made.work.whole)
    again = estimate_model(made.question.but(layers=[*(made.question.layers or ()), *whole]))
    note = f"{', '.join(whole)}: more than rows of it are read, outside its call, so layers= moves it whole"
    return replace(again, notes=(*again.notes, note))


# ---------------------------------------------------------------------- a batch


def _run_batch(source: ModelSource, found: Found, question: Question) -> tuple[str, Work, list[str]]:
    """Runs the batches of the source in turn until the model takes one.

    Returns:
        The contents of the batch in words, its work, and sentences on parts that are not counted.

    Raises:
        ValueError: the model has no forward, or its inputs are not known; or it does not take the asked size, or reads values.
    """
    module, items = source.module, next(iter(source.batches), "")
    if not has_forward(module):
        raise ValueError(
            f"{type(module).__name__} has no forward; define one that calls the network as training_step does, or give what "
            "makes the network itself (package.module:make_network)."
        )
    if not source.batches:
        raise ValueError(
            f"The inputs of {question.model!r} are not known: add --input SIZE …, or set its example_input_array."
        )
    autocast, failed = dtypes(question.precision)[1], dict[str, Exception]()
    for batch, arguments in source.batches.items():
        try:
            told: list[str] = []
            run = partial(_forward, source, arguments, autocast, told)
            work = answered(partial(estimate, found, run), at_once=source.images)
        except Exception as error:  # a module that reads values may raise any error; the message contains it
            failed[batch] = error
            continue
        if _NO_LOSS in told and "token" in batch:
            told.append(_LOSS_OF_TOKENS)
        if source.images and failed and "image" not in batch:
            told.append(_UNCOUNTED.format(_in_one_line(failed[items])))
        return batch, work, [*dict.fromkeys(told)]
    why = "; ".join(f"{batch}: {_in_one_line(error)}" for batch, error in failed.items())
    if not isinstance(failed[items], VALUES_NEEDED):
        raise ValueError(
            f"{question.model!r} cannot take its batch ({why}). Give the shape of a whole batch (--input, --image, --tokens), or "
            "set example_input_array in the module to what its forward takes."
        )
    raise ValueError(
        f"{question.model!r}: no batch could be run without values ({why}). A forward whose control flow depends on values "
        "cannot be planned. print(trainer.strategy.plan) lists the memory of a run."
    )


_NO_LOSS = (
    "No loss is counted, because the forward returns none; the mean of its first output stands for it. Give a factory of a "
    "module whose forward returns the loss to have it counted."
)
_LOSS_OF_TOKENS = "A cross entropy over a vocabulary saves about three times the bytes of its logits in float32."
_UNCOUNTED = (
    "The images are not counted, and so neither are the activations of the vision tower: a batch with images could not be run "
    "without values ({}). Leave device memory for them."
)


def _in_one_line(error: Exception) -> str:
    said = str(error).strip()
    return f"{type(error).__name__}: {said.splitlines()[0].removesuffix('.') if said else ''}"


def _forward(
    source: ModelSource, arguments: Callable[[], Arguments], autocast: torch.dtype | None, told: list[str]
) -> Tensor | None:
    """Runs one forward, and returns the loss in training, None in inference.

    The loss is the one that the forward returns, else the mean of the first output. For such a mean, a note is appended to
    ``told``, except if the output is a single number.
    """
    args, kwargs = arguments()
    with torch.autocast("cpu", autocast, enabled=autocast is not None):
        output: Any = source.module(*args, **kwargs)
        if not torch.is_grad_enabled():
            return None
        loss = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
        if isinstance(loss, Tensor):
            return loss
        # torch treats a subclass of dict as a leaf if its library has not registered it.
        leaves = tree_leaves(dict(output) if isinstance(output, dict) else output)
        outputs = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]
        if not outputs:
            raise ValueError("nothing that the model returns has a gradient")
        if len(leaves) > 1 or outputs[0].ndim > 0:  # a single scalar is the loss
            told.append(_NO_LOSS)
        return outputs[0].float().mean()


def _generate(source: ModelSource, found: Found, question: Question) -> tuple[Work, Work]:
    """Returns the work of the prompts, and of the last token. The memory of the second is the larger memory of both.

    Raises:
        ValueError: the model does not generate text, or cannot be run without values.
    """
    if source.generation is None or question.generate is None:
        raise ValueError(
            f"{question.model!r} is not a language model of transformers with a key-value cache; leave out --generate."
        )
    autocast = dtypes(question.precision)[1]
    try:
        with torch.no_grad(), torch.autocast("cpu", autocast, enabled=autocast is not None):
            make = partial(source.generation, question.generate)
            prompts, token = answered(lambda: [estimate(found, run) for run in make()], at_once=source.images)
    except Exception as error:
        raise ValueError(
            f"--generate: the work of {question.model!r} for a token is not known: it could not be run without values "
            f"({_in_one_line(error)})."
        ) from error
    return prompts, replace(token, activation_bytes=max(prompts.activation_bytes, token.activation_bytes))
