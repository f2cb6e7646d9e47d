"""What activations take, on paper: the bytes that the engine measures."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import flop_registry, register_flop_formula

from sp_lightning.capabilities.activations import offload
from sp_lightning.capabilities.activations.policy import Call
from sp_lightning.core.engine.engine import Engine
from sp_lightning.core.model.find import find_layers
from sp_lightning.tools.planner.dry_run import Saved, Work, estimate
from sp_lightning.tools.planner.fake import fake_tensors
from tests.support.models import CASES, Block, Case, Module, Stack, llama, tokens, vectors
from tests.support.runs import fit, superpipeline
from tests.support.tiers import first


class HalfCheckpointed(Block):
    """Keeps nothing of its first half but the input."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = checkpoint(lambda x: torch.tanh(self.inner(x)).exp(), x, use_reentrant=False)
        return x + self.outer(hidden)


class HalfCheckpointedStack(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(HalfCheckpointed() for _ in range(3))


class Between(nn.Sequential):
    """Saves between its layers what the second of them saves, too."""

    def forward(self, x: Tensor) -> Tensor:
        return self[1](torch.exp(self[0](x)))


def eager(**options: Any) -> Case:
    """Its attention takes the same way on paper as on the CPU: with a mask, and not fused."""
    return Case(lambda: llama(dropout=0.0, attn_implementation="eager", **options), tokens)


MODELS = {
    "llama": eager(),
    "llama-checkpoint": eager(checkpointing={"use_reentrant": False}),
    "half-checkpointed": Case(lambda: Module(HalfCheckpointedStack()), vectors),
    "resnet50": CASES["resnet50"],
    "vit": CASES["vit"],
    "stack": CASES["stack"],
    "reused": CASES["reused"],
    "transformer-encoder": CASES["transformer-encoder"],
}
MIXED = [name for name in MODELS if name != "resnet50"]  # whose BatchNorm has statistics in bfloat16, on paper only
SOME = 200  # bytes; most of these models save larger and smaller tensors


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Call, ...]]:
    """The calls that the engine has counted, of every run."""
    found: list[tuple[Call, ...]] = []
    close = Engine.close

    def closed(self: Engine) -> None:
        found.append(self.activations.calls)
        close(self)

    monkeypatch.setattr(Engine, "close", closed)
    return found


def worked(case: Case, autocast: torch.dtype | None = None) -> Work:
    """A batch on paper."""
    with fake_tensors(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch, where modules are copied on paper
        module = case.make()
        module.train()
        batch = tree_map_only(Tensor, lambda each: torch.zeros(each.shape, dtype=each.dtype), case.batches()[0])

        def run() -> Tensor | None:
            with torch.autocast("cpu", autocast) if autocast is not None else nullcontext():
                loss: Any = module.training_step(batch, 0)
                return loss if torch.is_grad_enabled() else None

        return estimate(find_layers(module, autocast=autocast), run)


@pytest.mark.long("takes a second or more")
@pytest.mark.parametrize("worth", first([1, SOME], SOME, second=[], why="the same when everything leaves"))
@pytest.mark.parametrize(
    ("name", "precision"),
    first(
        [*((name, "32-true") for name in MODELS), *((name, "bf16-mixed") for name in MIXED)],
        ("llama", "bf16-mixed"),
        ("stack", "32-true"),
        why="other models, and the same in the other precision",
    ),
)
def test_what_units_save_is_what_the_engine_measures(
    name: str, precision: Any, worth: int, measured: list[tuple[Call, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offload, "WORTH_MOVING", worth)
    case = MODELS[name]
    fit(case.make, case.batches()[:1], superpipeline(activations="offload"), precision=precision, recorded="losses")
    work = worked(case, torch.bfloat16 if precision == "bf16-mixed" else None)
    assert [(call.unit, call.moved) for call in work.calls] == [(call.unit, call.saved) for call in measured[0]]
    if worth == 1:
        # Storages that are never offloaded are not counted in a run.
        assert [replace(call, saved=call.moved, small=0) for call in work.calls] == [*measured[0]]
    assert any(call.saved for call in work.calls)


@pytest.mark.long("takes a second or more")
def test_what_is_saved_outside_of_units(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss, and the inputs of checkpoints around units."""
    monkeypatch.setattr(offload, "WORTH_MOVING", SOME)
    work = worked(MODELS["llama"])
    assert work.largest_outside == Saved(16 * 64 * 4, torch.float32, torch.Size([16, 64]))
    assert work.outside == work.largest_outside.nbytes + 16 * 8 + 4  # the labels, and how many they are
    assert str(work.largest_outside) == "float32 (16, 64), 4.0 KiB"

    monkeypatch.setattr(offload, "WORTH_MOVING", 1)
    work = worked(CASES["checkpoint-calls"])
    assert [call.saved for call in work.calls] == [256, *[0] * 5, 256]
    assert work.outside == 6 * 256  # the blocks' inputs, and the output's square

    work = worked(Case(lambda: Module(Between(nn.Linear(16, 32), nn.Linear(32, 16))), vectors))
    assert [call.saved for call in work.calls] == [256, 512]
    assert work.outside == 256


def saved_by(case: Case) -> int:
    """Bytes that autograd saves when the forward really runs, but for weights and buffers."""
    module = case.make()
    stays = {tensor.untyped_storage().data_ptr() for tensor in (*module.parameters(), *module.buffers())}
    storages: dict[int, Any] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in stays:
            storages[storage.data_ptr()] = storage  # held, so that no other one is given its address
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        loss: Any = module.training_step(case.batches()[0], 0)
    assert loss.requires_grad
    return sum(storage.nbytes() for storage in storages.values())


@pytest.mark.long("takes a second or more")
def test_what_a_loss_saves(monkeypatch: pytest.MonkeyPatch) -> None:
    """On paper as in a run: all that units and the loss save, each storage once."""
    monkeypatch.setattr(offload, "WORTH_MOVING", SOME)
    work = worked(MODELS["llama"])
    assert work.largest_outside == Saved(16 * 64 * 4, torch.float32, torch.Size([16, 64]))
    assert work.outside == 16 * 64 * 4 + 16 * 8 + 4
    assert work.saved("keep") == saved_by(MODELS["llama"])


@pytest.mark.long("takes a second or more")
def test_what_is_small_is_counted_and_does_not_travel(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is kept or computed again, as what is large; offloaded it stays."""
    work = worked(MODELS["llama"])
    assert {call.moved for call in work.calls} == {0}
    assert work.largest_outside is None
    assert work.alive("offload") == work.activation_bytes
    assert work.offloaded("offload") == 0
    monkeypatch.setattr(offload, "WORTH_MOVING", 1)
    large = worked(MODELS["llama"])
    assert [call.small for call in work.calls] == [call.moved for call in large.calls]
    assert work.outside == large.outside > 16 * 64 * 4
    for mode in ("keep", "recompute"):
        assert work.saved(mode) == large.saved(mode)
    assert work.saved("offload") == work.saved("keep") > large.saved("offload")


def test_modes_take_what_the_formula_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "WORTH_MOVING", 1)
    work = worked(Case(lambda: Module(nn.Sequential(*(nn.Linear(16, 16) for _ in range(5)))), vectors))
    assert [(call.saved, call.inputs) for call in work.calls] == [(256, 256)] * 5
    assert work.outside == 256
    assert work.saved("keep") == 6 * 256
    assert work.saved("offload") == 3 * 256  # two layers' and the loss
    assert work.offloaded("offload") == 3 * 256
    assert work.alive("keep") == work.activation_bytes
    assert work.alive("offload") == work.activation_bytes - 3 * 256


@pytest.mark.long("takes a second or more")
def test_copied_modules_have_weights() -> None:
    """Until 2026-11, tensors copied on paper were of a mode of their own, and no operator knew a copy's weights again."""
    twins = worked(Case(lambda: Module(nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32), 2)), vectors))
    needed = {layer for cost in twins.costs if cost.backward for layer in cost.needs}
    assert needed == {0, 1}


class Attentions(nn.ModuleList):
    def forward(self, x: Tensor) -> Tensor:
        for attention in self:
            x, _ = attention(x, x, x)
        return x


def attending(layers: int) -> Module:
    return Module(Attentions(nn.MultiheadAttention(64, 2) for _ in range(layers)))


@pytest.mark.rest("takes tenths of a second")
@torch.no_grad()
def test_casts_that_do_not_travel_are_made_for_each_use() -> None:
    """Attention that reads weights past their modules' calls has them in float32, and Lightning's autocast has no cache."""
    few, many = (
        worked(Case(partial(attending, layers), lambda: [torch.zeros(1, 64)]), torch.bfloat16) for layers in (2, 8)
    )
    assert few.activation_bytes == many.activation_bytes > 64 * 64 * 2


def test_only_operators_move_bytes() -> None:
    """Until 2026-11, torch's asking a tensor for its device counted as reading it: most of the bytes of a language model."""
    linears = Case(lambda: Module(nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(2)))), vectors)
    costs = worked(linears).costs
    assert [cost.moved for cost in costs if cost.layers] == [0] * 4
    assert all(cost.flops for cost in costs if cost.layers)


@pytest.mark.long("takes a second or more")
def test_attention_with_dropout_inside_checkpoints() -> None:
    """Until 2026-11, backward left dropout in, which forward had left out, and checkpoints refused the difference."""
    assert worked(CASES["llama-checkpoint"]).activation_bytes


@pytest.mark.parametrize(("rows", "seconds"), [(1, 4 * 64 * 64 / 1e6), (1000, 2 * 1000 * 64 * 64 / 1e6)])
def test_a_product_takes_its_operations_or_the_reading_of_its_weight(rows: int, seconds: float) -> None:
    """On a device with one operation and one byte in a microsecond; four bytes for each of the weight's numbers."""
    with fake_tensors():
        net = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(3)))

        def run() -> None:
            net(torch.zeros(rows, 64))

        with torch.no_grad():
            work = estimate(find_layers(net), run)
    times = [visit.seconds for visit in work.visits(flops=1e6, memory=1e6) if visit.layers]
    assert times == pytest.approx([seconds] * 3, rel=0.05)


class Attends(nn.Module):
    def __init__(self, heads: int) -> None:
        super().__init__()
        self.heads = heads

    def forward(self, x: Tensor) -> Tensor:
        key = x[:, : self.heads]
        return nn.functional.scaled_dot_product_attention(x, key, key, enable_gqa=True)


@pytest.mark.parametrize("heads", [2, 1])
def test_attention_is_counted_in_forward_and_backward(heads: int) -> None:
    """Two products of length x length x width in forward, five in backward, of which one is made again."""
    module = nn.Sequential(nn.Linear(8, 8, bias=False), Attends(heads))
    x = torch.ones(1, 2, 16, 8)
    with fake_tensors():
        work = estimate(find_layers(module, layers=["0"]), lambda: module(x).sum().backward())
    linear = 2 * 2 * 16 * 8 * 8
    product = 2 * 2 * 16 * 16 * 8
    assert sum(cost.flops for cost in work.costs) == 2 * linear + 7 * product


def test_formulas_that_a_module_registers_count() -> None:
    """``plan`` imports the module after this package; a copy of torch's table did not have them."""
    with torch.library._scoped_library("sp_counted", "DEF") as library:
        library.define("mm(Tensor a, Tensor b) -> Tensor")
        library.impl("mm", torch.mm, "CompositeExplicitAutograd")
        operator = torch.ops.sp_counted.mm
        register_flop_formula(operator)(lambda a, b, *_, out_shape=None, **__: 12345)

        class Counted(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                return x + operator(x.detach(), x.detach())

        module = nn.Sequential(nn.Linear(8, 8, bias=False), Counted())
        x = torch.ones(8, 8)
        try:
            with fake_tensors():
                work = estimate(find_layers(module, layers=["0"]), lambda: module(x).sum().backward())
        finally:
            del flop_registry[operator]
    assert sum(cost.flops for cost in work.costs) == 12345 + 2 * 2 * 8 * 8 * 8
