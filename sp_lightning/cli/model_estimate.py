"""A model that is built and run without memory, and what follows from that for a plan."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import torch
from torch import nn

from sp_lightning.activations.chunked_loss import chunk_loss
from sp_lightning.cli.arguments import PRECISIONS, Question
from sp_lightning.cli.below_memory import BelowMemory, place_inference, place_training
from sp_lightning.cli.host_step import HostStep, host_step, refuse_step
from sp_lightning.cli.model_source import FORWARD_WANTED, ModelWithBatch, has_forward, load_model
from sp_lightning.device.torch_private import VALUES_NEEDED
from sp_lightning.model.find import find_layers
from sp_lightning.model.found import Found
from sp_lightning.plan.activation_policy import FREEING, Call, Mode, Modes, peak_bytes
from sp_lightning.plan.host_memory import kept_for_processes
from sp_lightning.plan.ledger import Ledger, make_ledger
from sp_lightning.plan.plan import Plan, make_plan
from sp_lightning.tune.choices import Balance
from sp_lightning.tune.dry_run import Work, estimate, on_paper
from sp_lightning.tune.host_time import host_seconds
from sp_lightning.tune.simulator import predict
from sp_lightning.tune.visits import Prediction, Rates, Visit, schedule_visits


@dataclass(frozen=True)
class ModelEstimate:
    """What is known of a model, whatever the window.

    Attributes:
        question: what was asked.
        model: the model with its batch.
        found: its layers.
        step: the optimizer's step; None for inference.
        work: what a batch computes, or, if tokens are generated, what the last token does. None if the batch could not
            be run without values.
        why_no_work: the reason for that.
        prompts: what the prompts compute, if tokens are generated.
    """

    question: Question
    model: ModelWithBatch
    found: Found
    step: HostStep | None
    work: Work | None
    why_no_work: str = ""
    prompts: Work | None = None

    def plan(self, k: int, k_prime: int) -> Plan:
        """The plan for a window."""
        asked = self.question
        return make_plan(
            self.found, k=k, k_prime=k_prime, ranks=asked.devices, nodes=asked.nodes, training=not asked.predict
        )

    @cached_property
    def smallest_plan(self) -> Plan:
        """The plan that takes least memory of the device."""
        return self.plan(1, 1)

    @cached_property
    def ledger(self) -> Ledger | None:
        """The host's memory in training; None for inference."""
        return None if self.step is None else self.step.ledger(self.question, self.smallest_plan)

    @property
    def parameters(self) -> int:
        """How many numbers the weights are."""
        return sum(parameter.numel() for parameter in self.found.places)

    @property
    def activation_bytes(self) -> int:
        """Device memory beside weights and their gradients, as far as it is known; the least with ``auto``."""
        return min(map(self.work.alive, self._choices)) if self.work is not None else 0

    @property
    def saved_bytes(self) -> int:
        """How much of that autograd saves."""
        return min(map(self.work.saved, self._choices)) if self.work is not None else 0

    @property
    def _choices(self) -> tuple[Mode, ...]:
        """The modes that all units may have."""
        return FREEING if self.question.activations == "auto" else (self.question.activations,)

    @property
    def offloaded_bytes(self) -> int:
        """Host memory of activations, of all devices. With ``auto``, all units are offloaded in the first batches."""
        if self.work is None or self.question.activations not in ("offload", "auto"):
            return 0
        return self.question.devices * self.work.offloaded

    @cached_property
    def below(self) -> BelowMemory | None:
        """What is on the disk; None without one."""
        if self.question.disk is None:
            return None
        if self.ledger is None or self.step is None:
            return place_inference(self.smallest_plan, self._all_host_bytes, self.host_limit)
        plan, early = self.smallest_plan, self.step.early(self.question)
        batches = self.question.accumulate
        wide = make_ledger(plan, (), early=early, accumulate=batches, clips=None, scales=False).gradients
        below = place_training(plan, self.ledger, wide, self.offloaded_bytes, self.host_limit, early=early)
        return replace(below, batches=batches)

    @property
    def kept_for_processes(self) -> int:
        """Host memory that processes take for themselves, of what there is."""
        memory, disk = self.question.host_memory, self.question.disk is not None
        return 0 if memory is None else min(memory, kept_for_processes(memory, self.question.devices, disk=disk))

    @property
    def host_limit(self) -> int | None:
        """What that leaves. None for no limit."""
        return None if self.question.host_memory is None else self.question.host_memory - self.kept_for_processes

    @property
    def host_bytes(self) -> int:
        """Host memory of everything, on the node."""
        return self._all_host_bytes if self.below is None else self.below.host_bytes

    @property
    def _all_host_bytes(self) -> int:
        """The same without a disk."""
        if self.ledger is not None:
            return self.ledger.nbytes + self.offloaded_bytes
        return self.smallest_plan.taken(training=False)[1] + self.offloaded_bytes

    def flops(self, plan: Plan, modes: Modes) -> int:
        """The floating-point operations of a batch, second forwards included."""
        if self.work is None:
            return 0
        visits = self.work.visits(flops=1.0, memory=math.inf)  # each operation takes one second
        return round(sum(each.seconds for each in self._balance(plan, visits, Rates(1, 1, 1, 1)).visited(modes)))

    def weight_bytes(self, plan: Plan) -> int:
        """Device memory of weights, and in training of their gradients."""
        return plan.taken(training=not self.question.predict)[0]

    @property
    def rates(self) -> Rates:
        """What the machine does in a second, as the question says."""
        transfers, memory = self.question.pcie * 1e9, self.question.dram * 1e9
        others = self.question.devices - 1  # each device keeps its own part of a gradient, and sends the others theirs
        links = self.question.links * 1e9 * self.question.devices / others if others else math.inf
        visit, weight = host_seconds(training=not self.question.predict, measured=self.question.measure_host)
        return Rates(
            transfers,
            transfers,
            self._update_rate(memory),
            memory,
            visit,
            weight,
            links=links,
            network=self._network_rate,
            disk=self.question.disk or math.inf,
            sliced=self.question.transfer == "sliced" and others > 0,
        )

    @property
    def _network_rate(self) -> float:
        """Bytes of gradients that nodes add up in a second.

        Each sends the others their parts of its sum, and the whole of its own part; both over one network, which its devices
        share. Sums of 16 bits travel in float32.
        """
        others, half = self.question.nodes - 1, PRECISIONS[self.question.precision][0].itemsize == 2
        return self.question.network * self.question.nodes / (2 * others * (1 + half)) if others else math.inf

    def _update_rate(self, memory: float) -> float:
        """Bytes of gradients that the optimizer consumes in a second, if it reads and writes ``memory`` bytes in that."""
        if self.step is None:
            return math.inf
        gradients = sum(layer.gradient_bytes for layer in self.smallest_plan.trained)
        return gradients / (self.step.seconds or max(self._update_traffic, 1) / memory)

    @property
    def _update_traffic(self) -> int:
        """Bytes that a step of a fused optimizer reads and writes on the host, beside what each batch does."""
        return 0 if self.ledger is None else self.ledger.update_bytes - self.question.accumulate * self._batch_traffic

    @property
    def _batch_traffic(self) -> int:
        """Bytes that each of accumulated batches reads and writes on the host, on average."""
        batches = self.question.accumulate
        return 0 if self.ledger is None or batches == 1 else self.ledger.batch_bytes // batches

    @property
    def overlap(self) -> Literal["off", "forward", "backward"]:
        """When updates run, if they can run in the background."""
        return "off" if self.step is not None and self.step.waits else self.question.overlap

    def modes(self, plan: Plan) -> Modes:
        """The mode of each unit with a window. ``auto`` is, as in a run, the fastest choice within the memory that it leaves."""
        work, choice, limit = self.work, self.question.activations, self.question.gpu_memory
        if choice != "auto" or work is None or limit is None:
            mode = "offload" if choice == "auto" else choice  # as a run with auto begins
            return dict.fromkeys((call.unit for call in self._calls(plan)), mode)
        offloaded = dict.fromkeys((call.unit for call in work.calls), FREEING[1])
        others = work.alive("offload") - peak_bytes(work.calls, offloaded)
        balance = self._balance(plan, self._visits(plan), self.rates)
        choices = balance.candidates(max(0, limit - self.weight_bytes(plan) - others))
        return min(choices, key=lambda modes: self.predict(plan, modes).seconds)

    def predict(self, plan: Plan, modes: Modes, rates: Rates | None = None, *, updates: bool = True) -> Prediction:
        """The time of a batch with a window and modes, of accumulated ones the average.

        Args:
            plan: the window.
            modes: what happens to activations.
            rates: those of the machine; by default the one that the question describes.
            updates: whether they take time and the host memory's bandwidth.
        """
        rates = rates or self.rates
        last = self._batch(
            plan, modes, rates, updates=updates, on_disk={} if self.below is None else self.below.by_index(plan)
        )
        others = self.question.accumulate - 1
        if not others:
            return last
        return last.beside(self._batch(plan, modes, rates, updates=False, on_disk={}), others)

    def _batch(
        self, plan: Plan, modes: Modes, rates: Rates, *, updates: bool, on_disk: Mapping[int, int]
    ) -> Prediction:
        """One batch, with an update or without."""
        if not updates:
            rates = replace(rates, update=math.inf)
        visits = self._balance(plan, self._visits(plan), rates).visited(modes)
        traffic = self._batch_traffic + self._update_traffic * updates
        return predict(plan, visits, rates, overlap=self.overlap, host_traffic=traffic, on_disk=on_disk)

    def _visits(self, plan: Plan) -> list[Visit]:
        """What a batch does if all activations are kept."""
        flops = self.question.tflops * 1e12
        if self.work is not None:
            return self.work.visits(flops=flops, memory=self.question.device_bandwidth * 1e9)
        counts = [sum(math.prod(span.shape) for span in (*layer.spans, *layer.casts)) for layer in plan.layers]
        seconds = [2 * count * self.model.uses / flops for count in counts]
        return schedule_visits(plan, seconds, training=not self.question.predict)

    def _calls(self, plan: Plan) -> tuple[Call, ...]:
        unknown = tuple(Call(layer.name, saved=0, inputs=0) for layer in plan.layers)
        return self.work.calls if self.work is not None else unknown

    def _balance(self, plan: Plan, visits: list[Visit], rates: Rates) -> Balance:
        index_of = {layer.name: index for index, layer in enumerate(plan.layers)}
        return Balance(self._calls(plan), index_of, visits, rates)


def estimate_model(question: Question) -> ModelEstimate:
    """Builds the model and runs a batch of it, both without memory.

    Raises:
        ValueError: the model is not known, cannot take what it is asked to take, or has nothing to stream or train.
        ImportError: a library is missing.
    """
    if question.devices * question.nodes > 1 and question.disk is not None and question.predict:
        raise ValueError(
            "--disk with --predict is for one device: with several, all weights are in memory. Leave out one."
        )
    refuse_step(question)
    if question.activations == "auto" and (question.gpu_memory is None or question.predict):
        why = "nothing is trained here, so none are saved" if question.predict else "give that limit, too"
        raise ValueError(f"--activations auto: what becomes of activations is chosen within --gpu-memory; {why}.")
    dtype, autocast = PRECISIONS[question.precision]
    with _default_dtype(dtype), on_paper(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = load_model(question, image=question.image)
        module = model.module
        if not any(True for _ in module.parameters()):
            raise ValueError(f"{question.model!r} has no parameters, so there is nothing to stream.")
        module.to(dtype)
        _prepare(module, question)
        module.train(not question.predict)
        found = find_layers(module, layers=question.layers, resident=question.resident or (), autocast=autocast)
        if question.generate is None:
            model, work, why = _run_batch(model, found, question, autocast)
            return ModelEstimate(question, model, found, host_step(question, module), work, why)
        prompts, work = _generate(model, found, question, autocast)
        return ModelEstimate(question, model, found, None, work, prompts=prompts)


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _prepare(module: nn.Module, question: Question) -> None:
    """Has a module recompute by itself, and its loss computed in chunks, as far as that is asked."""
    enable = getattr(module, "gradient_checkpointing_enable", None)
    if question.checkpointing and enable is None:
        raise ValueError(f"{type(module).__name__} has no gradient_checkpointing_enable; leave out --checkpointing.")
    if question.checkpointing and enable is not None:
        enable()
    tokens, keep = question.loss_tokens, question.keep_logits
    if tokens is None and keep:
        raise ValueError("--keep-logits says what becomes of logits with --loss-tokens N; give that, too.")
    if tokens is not None and question.predict:
        raise ValueError("--loss-tokens is for training, and nothing is trained here; leave it out.")
    if tokens is not None:
        chunk_loss(module, tokens, keep_logits=keep)


# ---------------------------------------------------------------------- a batch


def _run_batch(
    model: ModelWithBatch, found: Found, question: Question, autocast: torch.dtype | None
) -> tuple[ModelWithBatch, Work | None, str]:
    """What a batch computes, or the reason why that is not known; and the model with the batch that was run.

    For ``--input``, a batch of whole numbers is tried if the model refuses the other one.

    Raises:
        ValueError: the model cannot take the size that was asked for.
    """
    if not has_forward(model.module):
        return model, None, f"{type(model.module).__name__} has no forward; {FORWARD_WANTED}"
    work = _try_batch(model, found, question, autocast)
    if isinstance(work, Work):
        return model, work, ""
    why = _in_one_line(work)
    if question.image is None and question.input is None:
        return model, None, why
    other = replace(load_model(question, whole=question.input is not None), module=model.module)
    again = _try_batch(other, found, question, autocast)
    if isinstance(again, Work) and question.input is not None:
        return other, again, ""
    if isinstance(again, Work):
        raise ValueError(
            f"--image {question.image}: {question.model!r} cannot take that ({why}). Leave --image out: it is run with "
            f"{other.items} then."
        )
    if question.input is not None and not isinstance(work, VALUES_NEEDED):
        raise ValueError(
            f"--input {' '.join(map(str, question.input))}: {question.model!r} cannot take one tensor of that shape "
            f"(numbers with a fraction: {why}; whole numbers: {_in_one_line(again)}). "
            "Give the shape of a whole batch, or set example_input_array in the module to what its forward takes, and "
            "leave --input out."
        )
    return model, None, why


def _in_one_line(error: Work | Exception) -> str:
    said = str(error).strip()
    return f"{type(error).__name__}: {said.splitlines()[0].removesuffix('.') if said else ''}"


def _try_batch(
    model: ModelWithBatch, found: Found, question: Question, autocast: torch.dtype | None
) -> Work | Exception:
    training = not question.predict
    try:
        with nullcontext() if training else torch.no_grad():
            return estimate(found, lambda: model.run(training=training, autocast=autocast))
    except Exception as error:  # a module that reads values may raise anything; the report says what
        return error


def _generate(
    model: ModelWithBatch, found: Found, question: Question, autocast: torch.dtype | None
) -> tuple[Work, Work]:
    """What the prompts compute, and what the last token does, which has the memory of both.

    Raises:
        ValueError: the model generates no text, or cannot be run without values.
    """
    if model.generation is None or question.generate is None:
        raise ValueError(
            f"{question.model!r} is no language model of transformers with a cache of keys and values; "
            "leave out --generate."
        )
    try:
        with torch.no_grad(), torch.autocast("cpu", autocast) if autocast is not None else nullcontext():
            prompts, token = (estimate(found, run) for run in model.generation(question.generate))
    except Exception as error:
        raise ValueError(
            f"--generate: {question.model!r} could not be run without values ({type(error).__name__}: {error}). Leave it out."
        ) from error
    return prompts, replace(token, activation_bytes=max(prompts.activation_bytes, token.activation_bytes))
