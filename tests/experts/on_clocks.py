"""Compares the step times that ``plan`` predicts for mixtures of experts with the real engine's on a simulated clock device.

A small model with the layers of the large one is trained on the CPU, with LoRA on attention and gradient checkpointing. Its
experts are packed in 4 bits, or in bfloat16. Copies and layer calls advance clocks by the seconds of the large model: an upload
by the large layer's bytes at the card's PCIe rate, a call by the seconds that ``plan`` computes for the large layer. So only the
order of the engine's work is measured: which upload is issued when, and which call waits for it.
"""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple
from unittest import mock

import lightning.pytorch as pl
import peft
import torch
import transformers
from torch import Tensor
from torch.utils.data import DataLoader

import sp_lightning
from sp_lightning import SuperpipelineStrategy
from sp_lightning.core.device.device import Device, Stream, Wait
from sp_lightning.core.weights.layer import StreamedLayer
from sp_lightning.core.weights.ring import Slots
from sp_lightning.tools.planner.answer import Row, answer
from sp_lightning.tools.planner.arguments import make_parser, read
from sp_lightning.tools.planner.estimate import estimate_model
from sp_lightning.tools.planner.prediction.visits import RESOURCES, Rates
from tests.support.clocked import Clocked
from tests.support.models import enable_checkpointing

SHAPES = Path(__file__).parents[2] / "examples" / "shapes"
CARDS = {
    "24 GB": ["--gpu-memory", "22GiB"],
    "80 GB": ["--gpu-memory", "76GiB", "--tflops", "400", "--device-bandwidth", "3350GB/s", "--pcie", "50GB/s"],
}
FORMATS = {
    "qwen3-30b-a3b": (None, "nvfp4"),
    "gpt-oss-20b": ("mxfp4",),
    "gpt-oss-120b": (None, "mxfp4"),
    "glm-4.5-air": (None, "nvfp4"),
    "deepseek-v2-lite": (None, "nvfp4"),
}
"""Models, each with the formats of its experts. None is bfloat16."""
SMALL = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "moe_intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "vocab_size": 256,
}
"""The sizes of a small model. The numbers of layers and of experts are those of the large one."""
TOKENS, STEPS = 512, 5


class Scaled(Clocked):
    """A clock device on which layers have the bytes and seconds of a large model.

    Args:
        row: what ``plan`` predicts for the large model.
        pcie: bytes per second.

    Attributes:
        sent: the layer that is being uploaded; None if something else is copied.
        between: seconds of computation outside of layers.
    """

    def __init__(self, row: Row, pcie: float) -> None:
        super().__init__(Rates(pcie, pcie, math.inf, math.inf, visit_seconds=0.0), 0.0, 0.0)
        self.sent: StreamedLayer | None = None
        layers, intervals = row.plan.moving, row.prediction.intervals
        self._nbytes = {layer.name: layer.nbytes for layer in (*row.plan.masters, *row.plan.tables, *row.plan.layers)}
        # A layer's seconds in a batch, by its name and by whether backward has begun: that includes recomputation.
        self._layer_seconds = defaultdict[tuple[str, bool], float](float)
        backward = min(each.begin for each in intervals if each.kind == "backward")
        for each in intervals:
            if each.kind in ("forward", "backward") and each.layer is not None and each.layer < len(layers):
                self._layer_seconds[layers[each.layer].name, each.begin >= backward] += each.end - each.begin
        computed = sum(each.end - each.begin for each in intervals if each.kind in RESOURCES["compute"])
        self.between = computed - sum(self._layer_seconds.values())
        self._calls, self._before = Counter[tuple[str, bool]](), Counter[tuple[str, bool]]()

    def batch_begins(self) -> None:
        """Spends the seconds outside of layers. From now on calls are counted anew."""
        self.spend(Stream.COMPUTE, self.between, "between", None)
        self._calls, self._before = Counter(), self._calls

    def call(self, layer: StreamedLayer) -> None:
        """Spends the seconds of a call: an equal part of the layer's seconds, by the number of calls in the last batch."""
        key = in_plan(layer), torch._C._current_graph_task_id() != -1
        self._calls[key] += 1
        if before := self._before[key]:
            self.spend(
                Stream.COMPUTE, self._layer_seconds[key] / before, "backward" if key[1] else "forward", layer.index
            )

    def access(self, memory: Any, by: Stream | None, *, write: bool) -> None:
        """Takes no time: :meth:`call` spends it."""

    def copy(
        self, targets: Sequence[Tensor], sources: Sequence[Any], stream: Stream, *, why: Wait | None = None
    ) -> None:
        self._wait_for_turn()
        Device.copy(self, targets, sources, stream, why=why)
        if stream is Stream.UPLOAD and (layer := self.sent) is not None:
            share = sum(each.nbytes for each in sources) / layer.planned.nbytes
            self.transfer("fetch", layer.index, round(share * self._nbytes.get(in_plan(layer), 0)))


def in_plan(layer: StreamedLayer) -> str:
    """Returns a layer's name in ``plan``, which has neither a LightningModule nor PEFT's model around it."""
    return layer.name.removeprefix("net.base_model.model.")


class Trained(pl.LightningModule):
    """A language model. Notes the time at which each batch begins."""

    def __init__(self, net: Any, device: Scaled) -> None:
        super().__init__()
        self.net = net
        self.clocks = device
        self.at: list[float] = []

    def on_train_batch_start(self, *_: Any) -> None:
        self.clocks.batch_begins()
        self.at.append(max(self.clocks.now[Stream.COMPUTE], self.clocks.host))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.net(input_ids=batch, labels=batch, use_cache=False).loss
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([each for each in self.parameters() if each.requires_grad], lr=1e-4)


class Measured(NamedTuple):
    """A model on a card.

    Attributes:
        row: the row of ``plan``.
        planned, measured: seconds of a step.
    """

    row: Row
    planned: float
    measured: float


def small_model(config: dict[str, Any], packing: str | None) -> Any:
    """Returns a small model with adapters on attention, in bfloat16."""
    given = {name: SMALL.get(name, value) for name, value in config.items() if name != "quantization_config"}
    made = transformers.AutoConfig.for_model(given.pop("model_type"), **given)
    net = transformers.AutoModelForCausalLM.from_config(made, dtype=torch.bfloat16)
    if packing:
        sp_lightning.pack_experts(net, packing)  # type: ignore[arg-type]
    linear = [name for name, each in net.named_modules() if ".self_attn." in name and isinstance(each, torch.nn.Linear)]
    attention = sorted({name.rpartition(".")[2] for name in linear})
    net = peft.get_peft_model(net, peft.LoraConfig(r=2, target_modules=attention))
    net.enable_input_require_grads()
    enable_checkpointing(net, use_reentrant=False)
    return net


def ask(config: dict[str, Any], card: str, packing: str | None) -> Row:
    """Returns the best row of ``plan`` for a model on a card."""
    options = ["--lora", "16", "--tokens", "2048", "--gradient-checkpointing", "--host-memory", "500GiB"]
    if not packing:
        config = {name: value for name, value in config.items() if name != "quantization_config"}
    elif "quantization_config" not in config:
        options += ["--pack-experts", packing]
    with TemporaryDirectory() as folder:
        file = Path(folder) / "model.json"
        file.write_text(json.dumps(config))
        given: Any = read(make_parser(), ["plan", str(file), *options, *CARDS[card]])
        found = answer(estimate_model(given))
    assert found.best is not None, found
    return found.best


def measure(name: str, card: str, packing: str | None) -> Measured:
    """Trains a small model on a clock device that has the times of the large one."""
    config = json.loads((SHAPES / f"{name}.json").read_text())
    row = ask(config, card, packing)
    device = Scaled(row, row.estimate.rates.upload)
    strategy = SuperpipelineStrategy(k=row.plan.k, k_prime=row.plan.k_prime)
    pl.seed_everything(1, verbose=False)
    module = Trained(small_model(config, packing), device)
    trainer = pl.Trainer(
        strategy=strategy, accelerator="cpu", precision="bf16-mixed", max_epochs=1, logger=False, barebones=True
    )
    lock, copy = Slots.lock, Slots._copy

    def scaled(slots: Slots, layer: StreamedLayer, *args: Any) -> int:
        device.sent = layer
        try:
            return copy(slots, layer, *args)
        finally:
            device.sent = None

    def timed(slots: Slots, layer: StreamedLayer, *, backward: bool = False) -> Any:
        slot = lock(slots, layer, backward=backward)
        device.call(layer)
        return slot

    with (
        mock.patch("sp_lightning.trainer.run.device_for", return_value=device),
        mock.patch.object(Slots, "lock", timed),
        mock.patch.object(Slots, "_copy", scaled),
    ):
        trainer.fit(module, DataLoader(torch.randint(256, (STEPS, 1, TOKENS)), batch_size=None))  # type: ignore[arg-type]
    at = module.at[2:]
    return Measured(row, row.prediction.seconds, (at[-1] - at[0]) / (len(at) - 1))
