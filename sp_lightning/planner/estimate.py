"""What is known of a model, whatever the window, and what follows from that for each window.

The model is built without memory, and a batch of it is run without values. What that shows is a frozen record,
:class:`Estimate`: verdict, text, JSON and picture are made from it.
"""

from __future__ import annotations

import math
import warnings
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from sp_lightning.activations.chunked_loss import chunk_loss
from sp_lightning.activations.policy import FREEING, Call, peak_bytes
from sp_lightning.model.find import find_layers
from sp_lightning.model.found import Found
from sp_lightning.plan.choices import Mode, Modes
from sp_lightning.plan.host_memory import all_but_an_eighth
from sp_lightning.plan.plan import Plan, make_plan
from sp_lightning.planner.adapters import add_adapters
from sp_lightning.planner.arguments import PRECISIONS, Question, contradictions, in_pixels
from sp_lightning.planner.dry_run import Cost, Work, estimate
from sp_lightning.planner.fake import VALUES_NEEDED, fake_tensors
from sp_lightning.planner.host import HostMemory, HostStep, host_memory, host_step, update_rates
from sp_lightning.planner.known_values import answered
from sp_lightning.planner.model_source import Arguments, ModelSource, has_forward, load_model
from sp_lightning.torch_compat.modes import default_dtype
from sp_lightning.torch_compat.private import tree_leaves
from sp_lightning.tuning.balance import Balance
from sp_lightning.tuning.choices import SAME
from sp_lightning.tuning.machine import host_seconds
from sp_lightning.tuning.simulator import Walk
from sp_lightning.tuning.visits import Prediction, Rates

_NO_UPDATES: dict[str, Any] = {"update": math.inf, "step": math.inf}
_SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Of the layers that could stay, the shares that are tried."""
_DRY_RUN = (
    "model", "predict", "generate", "precision", "batch_size", "tokens", "image", "frames", "input",
    "gradient_checkpointing", "loss_tokens", "lora", "keep_logits", "optimizer", "optimizer_on", "step_seconds", "layers",
    "keep_on_gpu", "host_tflops", "scale",
)  # fmt: skip
"""What of a question a batch without values, or the optimizer's step, depends on, but for when updates run."""


def dtypes(precision: str) -> tuple[torch.dtype, torch.dtype | None]:
    """The dtype of the parameters, and the dtype of autocast, if there is one, by Lightning's name of a precision."""
    parameters, autocast = PRECISIONS[precision]
    return getattr(torch, parameters), None if autocast is None else getattr(torch, autocast)


@dataclass(frozen=True)
class Estimate:
    """What is known of a model, whatever the window.

    Attributes:
        question: what was asked.
        found: the model's layers.
        items: what a batch consists of, in words.
        step: the optimizer's step; None for inference.
        work: what a batch computes, or, if tokens are generated, what the last token does.
        why_guessed: if no batch could be run, the reason. ``work`` is a guess then, which has no activations.
        uses: how often a forward uses a weight, by that guess.
        prompts: what the prompts compute, if tokens are generated.
        notes: sentences: what of a batch is not counted, which weights have no adapters or move whole.
        unit: what a batch of a diffusion model is counted in; empty for other models.
    """

    question: Question
    found: Found
    items: str
    step: HostStep | None
    work: Work
    why_guessed: str = ""
    uses: int = 0
    prompts: Work | None = None
    notes: tuple[str, ...] = ()
    unit: str = ""

    @property
    def parameters(self) -> int:
        """How many numbers the weights are."""
        return sum(parameter.numel() for parameter in self.found.places)

    @property
    def trained(self) -> int:
        """How many of them are trained."""
        return sum(parameter.numel() for parameter in self.found.places if parameter.requires_grad)

    def asked(self, question: Question) -> Estimate | None:
        """The estimate for another question about the same batch; None if a batch has to be run for it."""
        if any(getattr(question, name) != getattr(self.question, name) for name in _DRY_RUN):
            return None
        step = self.step
        if step is not None and step.overlap == self.question.mode:
            step = replace(step, overlap=question.mode)
        return replace(self, question=question, step=step)

    @cached_property
    def plain_bytes(self) -> int:
        """Device memory of plain Lightning."""
        return self._plain_bytes("keep")

    @cached_property
    def checkpointed_bytes(self) -> int:
        """Device memory of plain Lightning if torch's checkpoints have each layer compute its activations again."""
        return self._plain_bytes("keep" if self.question.predict else "recompute")

    def _plain_bytes(self, mode: Mode) -> int:
        """Device memory of plain Lightning.

        That is weights and, in training, gradients and optimizer state, and the more of two: casts and activations, or a third
        tensor per trained parameter in the step of torch's optimizers, unless they are fused. ``ddp`` has gradients twice.
        """
        plan, ledger = self.plan(1, 1), self.host.ledger
        weights, gradients = plan.plain
        nbytes = sum(span.nbytes for layer in plan.layers for span in layer.casts) + self.work.alive(mode)
        if ledger is None:
            return weights + nbytes
        copies = 1 if plan.alone else 2
        return weights + copies * gradients + (ledger.state or 0) + max(nbytes, gradients)

    def plan(self, k: int, k_prime: int) -> Plan:
        """The plan for a window."""
        return _plan(self.question, self.found, k, k_prime)

    def staying(self, k: int, k_prime: int) -> Estimate:
        """The estimate for a window, with a number of layers that stay in place of ``--gpu-layers auto``.

        As many stay as fit beside the window and activations; fewer only if a batch is faster so. If no window fits, none stays.
        """
        question, limit, count = self.question, self.question.gpu_memory, len(self.found.layers)
        if question.gpu_layers != "auto" or limit is None:
            return self
        counted = [replace(self, question=question.but(gpu_layers=number)) for number in range(count + 1)]
        needed = self.activation_bytes
        fitting = bisect_right(counted, limit - needed, key=lambda each: each.weight_bytes(each.plan(k, k_prime)))
        if not fitting:
            return counted[0]
        most, seconds = fitting - 1, dict[int, float]()
        for number in {round(share * most) for share in _SHARES}:
            plan = counted[number].plan(k, k_prime)
            seconds[number] = counted[number].predict(plan, counted[number].modes(plan)).seconds
        enough = SAME * min(seconds.values())
        return counted[max(number for number, each in seconds.items() if each <= enough)]

    def weight_bytes(self, plan: Plan) -> int:
        """Device memory of weights, and in training of their gradients."""
        return plan.taken(training=not self.question.predict)[0]

    @cached_property
    def activations(self) -> Mode | Literal["auto"]:
        """What the question says of activations; ``"keep"`` for ``"auto"``, if all fit with the smallest window, as in a run."""
        asked = self.question
        if asked.activations != "auto":
            return asked.activations
        smallest = self.plan(min(asked.k or (1,)), min(asked.k_prime or (1,)))
        needed = self.weight_bytes(smallest) + self.work.alive("keep")
        fits = asked.predict or asked.gpu_memory is None or needed <= asked.gpu_memory
        return "keep" if fits else "auto"

    @property
    def activation_bytes(self) -> int:
        """Device memory beside weights and their gradients; the least with ``auto``."""
        choice = self.activations
        return min(map(self.work.alive, FREEING)) if choice == "auto" else self.work.alive(choice)

    @cached_property
    def host(self) -> HostMemory:
        """The host's memory. With ``auto``, all units are offloaded once, as far as there is room."""
        asked, plan, choice = self.question, self.plan(1, 1), self.activations
        offloaded = self.work.offloaded if choice in ("offload", "auto") else 0
        found = host_memory(asked, plan, self.step, offloaded)
        if choice == "auto" and asked.disk is None and found.limit is not None and not found.fits:
            # A run offloads as far as there is room, and computes other layers' activations again.
            room = all_but_an_eighth(found.limit - found.nbytes + found.parts["activations"])
            found = host_memory(asked, plan, self.step, room // asked.devices)
        return found

    @property
    def _traffic(self) -> tuple[int, int]:
        """Bytes that a fused optimizer's step, and each of its batches on average, reads and writes on the host."""
        ledger, batches = self.host.ledger, self.question.accumulate_grad_batches
        if ledger is None:
            return 0, 0
        each = ledger.batch_bytes // batches if batches > 1 else 0
        return ledger.update_bytes - batches * each, each

    @cached_property
    def rates(self) -> Rates:
        """What the machine does in a second, as the question says."""
        asked, step, ledger, updates = self.question, self.step, self.host.ledger, _NO_UPDATES
        if step is not None and ledger is not None:
            updates = update_rates(asked, step, self.plan(1, 1), ledger, self._traffic[0])
        visit, weight = asked.measured.python or host_seconds(training=not asked.predict, measured=asked.measure_host)
        devices, nodes = asked.devices - 1, asked.nodes - 1  # the others
        # Sums of 16 bits travel in float32.
        wide = 2 if asked.stores_16_bits else 1
        return Rates(
            upload=asked.pcie,
            download=asked.pcie,
            **updates,
            host_memory=asked.host_bandwidth,
            visit_seconds=visit,
            weight_seconds=weight,
            # Each device keeps its own part of a gradient, and sends the others theirs.
            links=asked.links * asked.devices / devices if devices else math.inf,
            # Each node sends the others their parts of its sum, and the whole of its own part; its devices share the network.
            network=asked.network * asked.nodes / (2 * nodes * wide) if nodes else math.inf,
            disk=asked.disk or math.inf,
            sliced=asked.transfer == "sharded" and devices > 0,
            synchronous=asked.measured.synchronous,
        ).slowed(asked.measured.slower)

    def _balance(self, plan: Plan, rates: Rates) -> Balance:
        """What a batch does if all activations are kept, and which choices of their modes there are."""
        asked, pace = self.question, 1 / self.question.measured.slower
        visits = self.work.visits(flops=pace * asked.tflops * 1e12, memory=pace * asked.device_bandwidth)
        return Balance(self.work.calls, {layer.name: at for at, layer in enumerate(plan.layers)}, visits, rates)

    def modes(self, plan: Plan) -> Modes:
        """The mode of each unit with a window. ``auto`` is, as in a run, the fastest choice within the memory that it leaves."""
        work, choice, limit = self.work, self.activations, self.question.gpu_memory
        if choice != "auto":
            return dict.fromkeys((call.unit for call in work.calls), choice)
        assert limit is not None
        others = work.alive("offload") - peak_bytes(work.calls, dict.fromkeys((c.unit for c in work.calls), "offload"))
        choices = self._balance(plan, self.rates).candidates(max(0, limit - self.weight_bytes(plan) - others))
        return min(choices, key=lambda modes: self.predict(plan, modes).seconds)

    def flops(self, plan: Plan, modes: Modes) -> int:
        """The floating-point operations of a batch, second forwards included."""
        visits = self.work.visits(flops=1.0, memory=math.inf)  # each operation takes one second
        balance = replace(self._balance(plan, Rates(1, 1, 1, 1)), visits=visits)
        return round(sum(visit.seconds for visit in balance.visited(modes)))

    def predict(self, plan: Plan, modes: Modes, rates: Rates | None = None, *, updates: bool = True) -> Prediction:
        """The time of a batch with a window and modes, of accumulated ones the average.

        Args:
            plan: the window.
            modes: what happens to activations.
            rates: those of the machine; by default the one that the question describes.
            updates: whether they take time and the host memory's bandwidth.
        """
        rates, batches = rates or self.rates, self.question.accumulate_grad_batches
        last = self._batch(plan, modes, rates, updates=updates, moves=True)
        if batches == 1:
            return last
        return last.beside(self._batch(plan, modes, rates, updates=False, moves=False), batches - 1)

    def _batch(self, plan: Plan, modes: Modes, rates: Rates, *, updates: bool, moves: bool) -> Prediction:
        """One batch, with an update or without, and with what that reads and writes on the disk or without."""
        update, each = self._traffic
        overlap = self.question.mode if self.step is None else self.step.overlap
        on_disk = self.host.moved(plan, self.question.accumulate_grad_batches) if moves else {}
        with_updates = rates if updates else replace(rates, **_NO_UPDATES, update_upload=0.0, update_download=0.0)
        visits = self._balance(plan, rates).visited(modes)
        walk = Walk(plan, visits, with_updates, overlap=overlap, frees=self.question.frees, on_disk=on_disk)
        return walk.predict(host_traffic=each + update * updates)


def _plan(question: Question, found: Found, k: int, k_prime: int) -> Plan:
    training = not question.predict
    share, count = question.gpu_layers, len(found.layers)
    stay = 0 if share == "auto" else share if isinstance(share, int) else round(share * count)
    options: dict[str, Any] = {"ranks": question.devices, "nodes": question.nodes, "training": training, "stay": stay}
    plan = make_plan(found, k=k, k_prime=k_prime, **options)
    return replace(plan, steps_on_device=training and question.optimizer_on == "gpu")


def estimate_model(question: Question) -> Estimate:
    """Builds the model and runs a batch of it, both without memory.

    Raises:
        ValueError: the question contradicts itself, or the model is not known, cannot take what it is asked to take, or has
            nothing to stream or train.
        ImportError: a library is missing.
    """
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
            notes += _load_base(source, autocast)
            notes += add_adapters(module, question.lora)
        if autocast is None and dtype is not torch.float32:
            module.to(dtype)  # Lightning leaves weights as they are otherwise
        if question.gradient_checkpointing:
            _enable_checkpoints(module)
        if question.loss_tokens is not None:
            chunk_loss(module, question.loss_tokens, keep_logits=question.keep_logits)
        module.train(not question.predict)
        found = find_layers(module, layers=question.layers, keep_on_gpu=question.keep_on_gpu or (), autocast=autocast)
        if question.generate is not None:
            prompts, work = _generate(source, found, question)
            made = Estimate(question, found, next(iter(source.batches)), None, work, prompts=prompts)
        else:
            with torch.set_grad_enabled(not question.predict):
                items, known, why = _run_batch(source, found, question)
            step = None if question.predict else host_step(question, module)
            work, guessed = (known, "") if known else (_guess(question, found, source.uses), why)
            notes += [why] if why and not guessed else []
            made = Estimate(
                question, found, items, step, work, guessed, source.uses, notes=tuple(notes), unit=source.unit
            )
    return _with_whole_tables(made)


def _enable_checkpoints(module: nn.Module) -> None:
    """Turns on the model's own gradient checkpointing, which transformers and diffusers name differently."""
    names = ("gradient_checkpointing_enable", "enable_gradient_checkpointing")
    enable: Any = next((method for name in names if (method := getattr(module, name, None)) is not None), None)
    if enable is None:
        raise ValueError(
            f"--gradient-checkpointing: {type(module).__name__} has no {names[0]}(), as models of transformers have. Use "
            "--activations recompute instead."
        )
    enable()


def _load_base(source: ModelSource, autocast: torch.dtype | None) -> list[str]:
    """Converts a base that will be frozen to its config's dtype, if that is a 16-bit one, and returns a note on it."""
    stored = source.stored
    if autocast is None or stored is None or not stored.is_floating_point or stored.itemsize >= 4:
        return []
    source.module.to(stored)
    return [
        f"the frozen base has {str(stored).removeprefix('torch.')} weights, as they are stored; adapters have float32"
    ]


def _with_whole_tables(made: Estimate) -> Estimate:
    """Another estimate if the model reads the whole weight of an embedding, as for a head tied by code: that is a layer then."""
    if not made.work.whole:
        return made
    whole = sorted(made.work.whole)
    again = estimate_model(made.question.but(layers=[*(made.question.layers or ()), *whole]))
    note = f"{', '.join(whole)}: more than rows of it are read, outside its call, so layers= moves it whole"
    return replace(again, notes=(*again.notes, note))


# ---------------------------------------------------------------------- a batch


def _run_batch(source: ModelSource, found: Found, question: Question) -> tuple[str, Work | None, str]:
    """What was run, in words, what it computes, and what of that is not counted; or None, and the reason why it is not known.

    Raises:
        ValueError: the model cannot take the size that was asked for.
    """
    module, items = source.module, next(iter(source.batches), "no batch known")
    if not has_forward(module):
        why = (
            f"{type(module).__name__} has no forward; define one that calls the network as training_step does, or give what "
            "makes the network itself (package.module:make_network)"
        )
        return items, None, why
    if not source.batches:
        why = "it is not known what the model takes: say --input SIZE …, or set its example_input_array"
        return items, None, f"ValueError: {why}"
    autocast, failed = dtypes(question.precision)[1], dict[str, Exception]()
    for batch, arguments in source.batches.items():
        try:
            told: list[str] = []
            run = partial(_forward, source, arguments, autocast, told)
            work = answered(partial(estimate, found, run), at_once=source.images)
        except Exception as error:  # a module that reads values may raise anything; the report says what
            failed[batch] = error
            continue
        if failed and question.image is not None:
            raise ValueError(
                f"--image {in_pixels(question.image)}: {question.model!r} cannot take that ({_in_one_line(failed[items])}). "
                f"Leave --image out: it is run with {batch} then."
            )
        if _NO_LOSS in told and "token" in batch:
            told.append(_LOSS_OF_TOKENS)
        if source.images and failed and "image" not in batch:
            told.append(_UNCOUNTED.format(_in_one_line(failed[items])))
        return batch, work, " ".join(dict.fromkeys(told))
    if question.input is not None and not isinstance(failed[items], VALUES_NEEDED):
        fraction, *_, whole = map(_in_one_line, failed.values())
        raise ValueError(
            f"--input {' '.join(map(str, question.input))}: {question.model!r} cannot take one tensor of that shape "
            f"(numbers with a fraction: {fraction}; whole numbers: {whole}). Give the shape of a whole batch, or set "
            "example_input_array in the module to what its forward takes, and leave --input out."
        )
    return items, None, _in_one_line(failed[items])


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
    """Runs one forward. Returns the loss in training: the model's own, the known one, or the mean of the first output, noted."""
    args, kwargs = arguments()
    with torch.autocast("cpu", autocast, enabled=autocast is not None):
        output: Any = source.module(*args, **kwargs)
        if not torch.is_grad_enabled():
            return None
        loss = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
        if isinstance(loss, Tensor):
            return loss
        # A subclass of dict is a leaf to torch, unless its library has registered it.
        leaves = tree_leaves(dict(output) if isinstance(output, dict) else output)
        outputs = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]
        if not outputs:
            raise ValueError("nothing that the model returns has a gradient")
        if source.loss is not None:
            return source.loss(outputs)
        told += [_NO_LOSS] * (len(leaves) > 1 or outputs[0].ndim > 0)  # else it returns its loss
        return outputs[0].float().mean()


def _guess(question: Question, found: Found, uses: int) -> Work:
    """What a batch may compute that cannot be run, if each weight is used so many times in a forward."""
    plan = _plan(question, found, 1, 1)
    counts = [sum(math.prod(span.shape) for span in (*layer.spans, *layer.casts)) for layer in plan.layers]
    costs = [Cost((layer,), backward=False, flops=2 * uses * counts[layer]) for layer in plan.order]
    if not question.predict:
        costs += [
            Cost((layer,), backward=True, flops=4 * uses * counts[layer], needs={layer: None})
            for layer in reversed(plan.order)
        ]
    calls = tuple(Call(layer.name, saved=0, inputs=0) for layer in plan.layers)
    return Work(tuple(costs), 0, calls, calls, outside=0, largest_outside=None)


def _generate(source: ModelSource, found: Found, question: Question) -> tuple[Work, Work]:
    """What the prompts compute, and what the last token does, which has the memory of both.

    Raises:
        ValueError: the model generates no text, or cannot be run without values.
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
            f"--generate: what {question.model!r} does for a token is not known: it could not be run without values "
            f"({_in_one_line(error)})."
        ) from error
    return prompts, replace(token, activation_bytes=max(prompts.activation_bytes, token.activation_bytes))
