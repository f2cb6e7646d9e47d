"""What trials over one frozen base gain where transfers are slow: the real engine, and a device whose streams are clocks.

Trainings run as ever, on the CPU; their copies and layers move clocks on by the seconds that a machine would need, in which the
host takes no time. A layer computes for one second and travels for so many. So the clock of the compute stream says how long
trials take at once, and one after the other.
"""

from __future__ import annotations

import bisect
import copy
import math
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple
from unittest import mock

import lightning.pytorch as pl
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, LlamaConfig

from sp_lightning import SharedBase, SuperpipelineStrategy
from sp_lightning.core.device.device import Device, Stream, Wait
from sp_lightning.experimental.sharing.common import ON_DEVICE
from sp_lightning.tools.planner.prediction.clocks import ClockDevice
from sp_lightning.tools.planner.prediction.visits import Rates

RANK = 1  # of adapters: what travels is nearly all the base's
VOCABULARY = 1024


class Workload(NamedTuple):
    """LoRA on a Llama from random weights.

    Attributes:
        layers, hidden: transformer blocks, and their width.
        tokens: of each batch, in windows of 64.
        steps: of each trial.
    """

    layers: int
    hidden: int
    tokens: int
    steps: int


class Adapted(pl.LightningModule):
    """Keeps its losses."""

    def __init__(self, net: Any, rate: float) -> None:
        super().__init__()
        self.net, self.rate = net, rate
        self.losses: list[float] = []

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """With a hook between two batches, which could write weights, a trial alone fetches nothing of the next one."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.net(input_ids=batch, labels=batch, use_cache=False).loss
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([each for each in self.parameters() if each.requires_grad], lr=self.rate)


def trial_of(workload: Workload) -> tuple[Any, Callable[[Any, int], list[float]]]:
    """A model, and a trial of a copy of it: its number says the learning rate and the seed. Returns its losses."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=workload.hidden, intermediate_size=3 * workload.hidden,
        num_hidden_layers=workload.layers, num_attention_heads=workload.hidden // 32, num_key_value_heads=workload.hidden // 32,
        max_position_embeddings=256, tie_word_embeddings=True,
    )  # fmt: skip
    net = AutoModelForCausalLM.from_config(config).requires_grad_(False)
    batches = torch.randint(VOCABULARY, (workload.steps, workload.tokens // 64, 64))
    lora = LoraConfig(task_type="CAUSAL_LM", r=RANK, lora_dropout=0.05, target_modules="all-linear")

    def trial(copied: Any, number: int) -> list[float]:
        torch.manual_seed(number)
        module = Adapted(get_peft_model(copied, lora), 1e-4 * (1 + number))
        strategy = SuperpipelineStrategy(k=2)
        trainer = pl.Trainer(strategy=strategy, accelerator="cpu", max_epochs=1, logger=False, barebones=True)
        trainer.fit(module, DataLoader(batches, batch_size=None))  # type: ignore[arg-type]
        return module.losses

    return net, trial


class Streams(dict[Any, float]):
    """What streams' clocks show. Each trial, which is a thread, has its own, as on an accelerator; kernels have one."""

    @staticmethod
    def _key(stream: Stream) -> Any:
        return stream if stream is Stream.COMPUTE else (threading.get_ident(), stream)

    def __getitem__(self, stream: Stream) -> float:
        return self.get(self._key(stream), 0.0)

    def __setitem__(self, stream: Stream, seconds: float) -> None:
        super().__setitem__(self._key(stream), seconds)


class Clocked(ClockDevice):
    """The device of all trials. The real engine moves its clocks on, and bytes are copied as well.

    All uploads take turns on one link: each has the first time that is free for as long as it takes.

    Args:
        travel: seconds that a byte from the host takes.
    """

    def __init__(self, travel: float) -> None:
        super().__init__(Rates(1 / travel if travel else math.inf, math.inf, math.inf, math.inf))
        self.now = Streams()
        self._link: list[tuple[float, float]] = []  # when it is busy, in order
        self._made: list[Tensor] = []

    def empty(self, nbytes: int) -> Tensor:
        self._made.append(Device.empty(self, nbytes))
        return self._made[-1]

    def copy(
        self, targets: Sequence[Tensor], sources: Sequence[Any], stream: Stream, *, why: Wait | None = None
    ) -> None:
        Device.copy(self, targets, sources, stream, why=why)
        there = {each.untyped_storage().data_ptr() for each in self._made}  # a copy from there takes no time
        nbytes = sum(source.nbytes for source in sources if source.untyped_storage().data_ptr() not in there)
        if stream is Stream.UPLOAD and nbytes:
            seconds, begin = nbytes / self._rates.upload, max(self.now[stream], self.host)
            for busy, free in self._link:
                if begin + seconds <= busy:
                    break
                begin = max(begin, free)
            bisect.insort(self._link, (begin, begin + seconds))
            self.now[stream] = begin
            self.transfer("fetch", 0, nbytes)

    def access(self, memory: Tensor | Iterable[Tensor], by: Stream | None, *, write: bool) -> None:
        # The engine says so of a slot when a layer begins to use it, and when it has.
        if by is Stream.COMPUTE and not write and isinstance(memory, Tensor):
            self.spend(Stream.COMPUTE, 0.5, "forward", 0)


class Ran(NamedTuple):
    """What the clocks say of a run.

    Attributes:
        seconds: what the compute stream's shows at the end.
        computed: so many of them it computed.
        nbytes: from the host.
        result: the run's.
    """

    seconds: float
    computed: float
    nbytes: int
    result: Any


class Row(NamedTuple):
    """Trials at once.

    Attributes:
        trials: how many.
        gain: how many times as fast they are as one after the other.
        bound: how many times as fast they would be if the device computed all the time.
        share: their bytes for each that comes for trials one after the other.
    """

    trials: int
    gain: float
    bound: float
    share: float


def clocked(run: Callable[[], Any], travel: float) -> Ran:
    """Runs something on such a device, where a byte travels for so many seconds."""
    device = Clocked(travel)
    with mock.patch("sp_lightning.trainer.run.device_for", return_value=device):
        result = run()
    computed = sum(each.end - each.begin for each in device.intervals if each.kind == "forward")
    return Ran(device.now[Stream.COMPUTE], computed, device.copied, result)


def measure(ratio: float, counts: Sequence[int], workload: Workload) -> list[Row]:
    """Trains so many trials at once, and the same ones one after the other.

    Args:
        ratio: how many times as long as it computes a layer travels.
        counts: how many trials.
        workload: what each trains.

    Raises:
        RuntimeError: a trial has other losses than alone.
    """
    (net, trial), rows = trial_of(workload), []
    travel = ratio * 2 * workload.layers * workload.steps / clocked(lambda: trial(copy.deepcopy(net), 0), 0.0).nbytes
    for count in counts:
        alone = [clocked(lambda number=number: trial(copy.deepcopy(net), number), travel) for number in range(count)]  # type: ignore[misc]
        base = SharedBase(net, layers=ON_DEVICE)
        at_once = clocked(lambda: base.map(lambda number: trial(base.copy(), number), range(count)), travel)  # noqa: B023
        if at_once.result != [each.result for each in alone]:
            raise RuntimeError(f"{count} trials at once have other losses than one after the other.")
        seconds, nbytes = sum(each.seconds for each in alone), sum(each.nbytes for each in alone)
        bound = seconds / sum(each.computed for each in alone)
        rows.append(Row(count, seconds / at_once.seconds, bound, at_once.nbytes / nbytes))
    return rows
