"""Quantised weights: tensor subclasses stream as their packed bytes, whoever reads or writes them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchao.quantization import Int8WeightOnlyConfig, quantize_

from tests.equality.rows import program, tiers
from tests.support.models import Module, Stack, Transformer, tokens
from tests.support.nets import Does
from tests.support.quantised import CONFIGS, adapted, travels_packed

ONE = tiers(rest=["k=1"])


def quantised(name: str, variants: Any = ONE, **more: Any) -> Any:
    return program(f"quantised: {name}", variants, **more)


def partly_quantised(kind: type[Module] = Module) -> Module:
    net = Stack()
    for block in net.blocks:
        quantize_(block, Int8WeightOnlyConfig())
        block.inner.bias.requires_grad_(True)
    return kind(net)


def partly(kind: Any) -> Any:
    return partial(partly_quantised, kind)


def packed(ours: Any) -> None:
    assert travels_packed(ours.trainer.strategy.plan)


for name, config in CONFIGS.items():
    # The registry of equality has those that were float32.
    quantised(f"adapters on a base of bfloat16, {name}", tiers(long=["bf16-true"]), batches=tokens, validated=True, also=packed,
              covers="parts of other dtypes")(adapted(config, torch.bfloat16))  # fmt: skip


@quantised("generated tokens", tiers(rest=["users, k=1"]), run="predict", batches=partial(tokens, 2),
           of=lambda kind: lambda: kind(adapted(Int8WeightOnlyConfig)().net))  # fmt: skip
class Generating(Transformer):
    """With random numbers, on the device."""

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net.generate(input_ids=batch["input_ids"], max_new_tokens=4, do_sample=True, pad_token_id=0)


@quantised("weights read without forward", validated=True, of=partly)
class Reads(Module):
    """Looks at a quantised weight in every other way."""

    def loss(self, batch: Any) -> Tensor:
        weight = self.net.blocks[3].inner.weight
        assert weight.shape == (32, 16)
        assert weight.requires_grad is False
        whole = weight.dequantize().sum() + weight.qdata.float().mean() + weight.scale.sum()
        copied = copy.deepcopy(weight)
        x = self.net.stem(batch)
        x = F.linear(F.linear(x, self.net.blocks[2].inner.weight), self.net.blocks[2].outer.weight)
        kept = [weight.qdata]
        for block in self.net.blocks:
            x = block(x)
        self.log("kept", kept[0].float().sum() + copied.scale.sum())
        return self.net.head(x).square().mean() + 0.01 * whole


def not_a_layer(ours: Any) -> None:
    assert "net.blocks.2" not in [layer.name for layer in ours.trainer.strategy.plan.layers]


quantised("residents", strategy={"keep_on_gpu": ["net.blocks.2"]}, covers="they may be quantised", also=not_a_layer)(
    partly_quantised
)


class Named(nn.Parameter):
    """A subclass whose memory is plain: it streams as ever."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear:
            plain = [a.as_subclass(Tensor) if type(a) is not Tensor and isinstance(a, Tensor) else a for a in args]
            return F.linear(*plain) * 2
        return super().__torch_function__(func, types, args, kwargs or {})


@quantised("parameters with functions of their own", validated=True)
def named() -> Module:
    """A subclass whose memory is plain streams as ever."""
    net = Stack()
    net.blocks[1].inner.weight = Named(net.blocks[1].inner.weight.detach())
    return Module(net)


def inner(module: Any, at: int) -> Any:
    return module.net.blocks[at].inner.weight


def loaded(module: Any, step: int) -> None:
    if step == 1:
        module.net.blocks.load_state_dict(partly_quantised().net.blocks.state_dict())  # type: ignore[union-attr]


WRITES: dict[str, Callable[[Any, int], Any]] = {
    "scaled in place": lambda module, step: [inner(module, at).scale.mul_(1.1) for at in range(5)],
    "copied": lambda module, step: [inner(module, at).copy_(inner(module, at + 1)) for at in range(4)],
    "loaded": loaded,
    "through .data": lambda module, step: inner(module, 1).data.copy_(inner(module, 2)),
    "through .data of a part": lambda module, step: inner(module, 1).scale.data.mul_(1.2),
}


class Writes(Module):
    """Writes that a step makes last."""

    write: Any
    when: str

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.when == "training":
            with torch.no_grad():
                type(self).write(self, batch_idx)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if self.when == "validation":
            type(self).write(self, batch_idx)
        super().validation_step(batch, batch_idx)


for name, write in WRITES.items():
    for when in ("training", "validation"):
        quantised(f"{name} in {when}", tiers(rest=["keep, k=1"]), validated=True, covers="writes inside a step last")(
            partly(type("Written", (Writes,), {"write": write, "when": when}))
        )


def quantises_again(module: Any) -> None:
    linear = module.net.blocks[1].inner
    with torch.no_grad():
        linear.weight = nn.Parameter(linear.weight.dequantize() * 0.5)
    quantize_(linear, Int8WeightOnlyConfig())


def exchanges_a_part(module: Any) -> None:
    weight = inner(module, 1)
    weight.scale = weight.scale * 2


for name, does in {"quantised again": quantises_again, "a part that is exchanged": exchanges_a_part}.items():
    quantised(
        f"{name} between batches", tiers(rest=["keep, k=1"]), covers="it is taken in before the next batch",
        callbacks=lambda does=does: [Does(on_train_batch_end=lambda trainer, module, *_: does(module))],
    )(partly_quantised)  # fmt: skip


class Exchanges(Module):
    def loss(self, batch: Any) -> Tensor:
        exchanges_a_part(self)
        return super().loss(batch)


quantised(
    "a part that is exchanged inside a step", tiers("keep, k=1"), covers="refused by name", repairable=False,
    refused={"keep, k=1": r"RuntimeError: .*'scale' of a wrapped parameter \(Int8Tensor\) was exchanged inside a step"},
)(partly(Exchanges))  # fmt: skip
quantised(
    "a weight that is to be trained later", tiers("keep, k=1"), covers="refused by name", repairable=False,
    refused={"keep, k=1": r"ValueError: .*'net.blocks.1.inner.weight' is of class Int8Tensor.*Freeze it"},
    callbacks=lambda: [Does(on_train_batch_end=lambda trainer, module, *_: inner(module, 1).requires_grad_(True))],
)(partly_quantised)  # fmt: skip


def nobody_waits(ours: Any) -> None:
    assert set(ours.module.noted) == {Tensor}


def note_part(trainer: Any, module: Any, *_: Any) -> None:
    layer = module.net.base_model.model.model.layers[3]
    module.noted = [*getattr(module, "noted", []), type(vars(layer.mlp.up_proj.weight)["qdata"])]


quantised(
    "parts while adapters are updated", tiers(rest=["forward, accumulated, clipped, two epochs"]),
    batches=tokens, also=nobody_waits,
    callbacks=lambda: [Does(on_train_batch_end=note_part)], covers="nobody updates them: they are what they were",
)(adapted(Int8WeightOnlyConfig))  # fmt: skip


@quantised("dictionaries filled in steps and between", of=partly)
class Keys(Module):
    """A wrapped weight and its stand-in are one key."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__(net)
        self.tables: list[dict[nn.Parameter, int]] = []
        self.seen: list[Any] = []

    def look(self) -> None:
        self.tables.append({p: number for number, p in enumerate(self.parameters())})
        self.seen += [[table.get(p) for p in self.parameters()] for table in self.tables]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.look()
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, *_: Any) -> None:
        self.look()
