"""Experts in 4 bits: bitwise as dequantised ones, streamed as on plain Lightning, by rows, in checkpoints."""

from __future__ import annotations

import copy
import io
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import Tensor, nn
from torchao.prototype.mx_formats.mx_tensor import MXTensor
from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor

import sp_lightning
from sp_lightning.capabilities.experts import packed_stacks
from sp_lightning.capabilities.experts.packed_stacks import PackedStack, named_stacks
from sp_lightning.core.model.wrapped import builder, parts
from tests.support import stacked
from tests.support.poison import poisoned
from tests.support.runs import Outcome, assert_equal, assert_same, fit, loader, superpipeline, trainer_for
from tests.support.tiers import first

SIZES: dict[str, dict[str, Any]] = {"qwen3": {"moe_intermediate_size": 32}, "gpt-oss": {"intermediate_size": 64}}
IMPLEMENTATIONS = ("eager", "batched_mm", "grouped_mm")
FORMATS: tuple[Any, ...] = ("nvfp4", "mxfp4")
STACKS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
CASES = [(name, how, kind) for name in SIZES for how in IMPLEMENTATIONS for kind in FORMATS]
QUICK = [("qwen3", "grouped_mm", "mxfp4"), ("gpt-oss", "grouped_mm", "nvfp4"), ("qwen3", "eager", "nvfp4")]


def packed(name: str = "qwen3", how: str = "grouped_mm", kind: Any = "mxfp4", **more: Any) -> stacked.Transformer:
    """A model with packed experts, all of it frozen."""
    dtype = more.pop("dtype", torch.float32)
    module = stacked.transformer(name, how, **SIZES[name], **more)
    sp_lightning.pack_experts(module.net.to(dtype), kind)
    module.net.requires_grad_(False)
    return module


def dequantised(module: stacked.Transformer) -> stacked.Transformer:
    """The same model with the values of the packed experts in its own dtype."""
    for _, owner, key in [*named_stacks(module)]:
        weight: Any = owner._parameters[key]
        owner._parameters[key] = nn.Parameter(weight.dequantize(), requires_grad=False)
    return module


def adapted(module: stacked.Transformer, *, experts: bool = False) -> stacked.Transformer:
    """The model with adapters of attention, or of the stacks."""
    targets: Any = {"target_parameters": STACKS, "target_modules": []} if experts else {"target_modules": ["v_proj"]}
    module.net = peft.get_peft_model(module.net, peft.LoraConfig(r=2, init_lora_weights=False, **targets))
    return module


def adapters(outcome: Outcome) -> tuple[Any, Any]:
    """The losses and the gradients of the adapters."""
    kept = [{name: grad for name, grad in each.items() if "lora_" in name} for each in outcome.gradients]
    assert all(grad is not None and grad.any() for each in kept for grad in each.values())
    return outcome.losses, kept


def experts_of(module: nn.Module) -> list[PackedStack]:
    return [p for p in module.parameters() if isinstance(p, PackedStack)]


# ---------------------------------------------------------------------- on plain Lightning


@pytest.mark.parametrize(("name", "how", "kind"), first(CASES, *QUICK, why="other models, functions and formats"))
def test_packed_experts_compute_as_dequantised_ones(name: str, how: str, kind: str) -> None:
    with_packed = fit(lambda: adapted(packed(name, how, kind)), stacked.tokens())
    dense = fit(lambda: adapted(dequantised(packed(name, how, kind))), stacked.tokens())
    assert len(experts_of(with_packed.module)) == 4
    assert not experts_of(dense.module)
    assert_equal(adapters(with_packed), adapters(dense), "losses and gradients")


@pytest.mark.parametrize("how", first(IMPLEMENTATIONS, "grouped_mm", why="adapters make the stacks dense in each"))
def test_adapters_on_packed_experts_compute_as_on_dequantised_ones(how: str) -> None:
    with_packed = fit(lambda: adapted(packed("gpt-oss", how), experts=True), stacked.tokens())
    dense = fit(lambda: adapted(dequantised(packed("gpt-oss", how)), experts=True), stacked.tokens())
    assert_equal(adapters(with_packed), adapters(dense), "losses and gradients")


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_are_near_and_take_few_bytes(dtype: torch.dtype, kind: Any) -> None:
    dense = stacked.transformer("qwen3", **SIZES["qwen3"]).net.to(dtype)
    module = copy.deepcopy(dense)
    names = sp_lightning.pack_experts(module, kind)
    assert names == [f"model.layers.{number}.{stack}" for number in range(2) for stack in STACKS]
    for name in names:
        weight: Any = module.get_parameter(name)
        before = dense.get_parameter(name)
        assert not weight.requires_grad
        assert (weight.shape, weight.stride(), weight.dtype) == (before.shape, before.stride(), dtype)
        error = (weight.dequantize() - before).float().norm() / before.float().norm()
        assert 0 < error < 0.2
        bits = 8 * sum(part.nbytes for _, part in parts("", weight)) / weight.numel()
        assert bits == (4.25 if kind == "mxfp4" else 4.5 + 32 / weight[0].numel())


@pytest.mark.parametrize("kind", FORMATS)
def test_stacks_are_packed_and_dequantised_in_pieces(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    whole = experts_of(packed("gpt-oss", kind=kind))
    monkeypatch.setattr(packed_stacks, "_AT_ONCE", 3 * 64 * 128)
    torch.manual_seed(0)
    pieces = experts_of(packed("gpt-oss", kind=kind))
    for one, other in zip(whole, pieces, strict=True):
        assert_equal(dict(parts("", other)), dict(parts("", one)), "parts")
        assert_equal(other.dequantize(), one.dequantize(), "values")


@pytest.mark.parametrize("name", SIZES)
def test_views_stay_packed(name: str) -> None:
    weight: Any = experts_of(packed(name))[0]
    dense = weight.dequantize()
    views: list[Callable[[Any], Any]] = [
        lambda w: w[3],
        lambda w: w[torch.tensor(3)],
        lambda w: w.transpose(1, 2),
        lambda w: w.transpose(-2, -1)[2],
        lambda w: w[2].t(),
        lambda w: w.mT,
        lambda w: w.detach(),
        lambda w: w.clone(),
        lambda w: w.mT.clone(),
        lambda w: w.contiguous(),
        lambda w: w.clone(memory_format=torch.contiguous_format),
        lambda w: w.to("cpu", torch.bfloat16),
    ]
    for view in views:
        taken, expected = view(weight), view(dense)
        assert isinstance(taken, PackedStack)
        assert (taken.stride(), taken.device) == (expected.stride(), expected.device)
        assert_equal(taken.dequantize(), expected, "values")
    others: list[Callable[[Any], Tensor]] = [
        lambda w: w[torch.tensor([1, 1, 0])],
        lambda w: w[1:3],
        lambda w: w.transpose(0, 1),
        lambda w: w + 1,
        lambda w: w.mT.contiguous().view(-1),
        lambda w: torch.empty_like(w).fill_(1),
        lambda w: torch.baddbmm(w, torch.ones(8, w.shape[1], 2), torch.ones(8, 2, w.shape[2])),
    ]
    for compute in others:
        result = compute(weight)
        assert type(result) is Tensor
        assert_equal(result, compute(dense), "values")
    for copied in (weight.clone(), weight.to(torch.bfloat16), weight.to("cpu", copy=True)):
        assert copied.values.data_ptr() != weight.values.data_ptr()
        assert not copied.read_only
    moved = weight.to("meta")  # as to a GPU: with a layout among the arguments
    assert isinstance(moved, PackedStack)
    assert (moved.device.type, moved.values.device.type, moved.stride()) == ("meta", "meta", weight.stride())
    assert repr(weight) == f"PackedStack(mxfp4, {tuple(weight.shape)}, torch.float32)"


@pytest.mark.parametrize("kind", FORMATS)
def test_an_expert_of_zeros_stays_zero(kind: Any) -> None:
    net = stacked.transformer("qwen3", **SIZES["qwen3"]).net
    with torch.no_grad():
        net.model.layers[0].mlp.experts.down_proj[3] = 0
    sp_lightning.pack_experts(net, kind)
    values = experts_of(net)[1].dequantize()
    assert not values[3].any()
    assert values.isfinite().all()


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_dtypes_that_torchao_does_not_quantise(dtype: torch.dtype, kind: Any) -> None:
    torch.manual_seed(0)
    expected = experts_of(packed(kind=kind))
    torch.manual_seed(0)
    found = experts_of(packed(kind=kind, dtype=torch.float64))
    assert_equal([each.values for each in found], [each.values for each in expected], "values")
    assert {each.dtype for each in experts_of(packed(kind=kind, dtype=dtype))} == {dtype}


def test_shared_stacks_stay_shared() -> None:
    net = stacked.transformer("qwen3", **SIZES["qwen3"]).net
    first, second = (layer.mlp.experts for layer in net.model.layers)
    second.down_proj = first.down_proj
    assert len(sp_lightning.pack_experts(net)) == 4
    assert second.down_proj is first.down_proj


def test_packed_experts_move_to_shared_memory() -> None:
    net = packed().net.share_memory()
    assert all(part.is_shared() for each in experts_of(net) for _, part in parts("", each))


def test_data_is_assigned_whole_or_not_at_all() -> None:
    weight, other = experts_of(packed())[0], experts_of(packed(dtype=torch.bfloat16))[0]
    weight.data = other
    assert weight.dtype is torch.bfloat16
    assert_equal(weight.dequantize(), other.dequantize(), "values")
    for wrong in (weight.dequantize(), experts_of(packed(kind="nvfp4"))[0]):
        with pytest.raises(NotImplementedError, match=r"\.data of PackedStack.*Expected the same format and layout"):
            weight.data = wrong


@pytest.mark.filterwarnings("ignore:.*non-leaf|.*Dynamo:UserWarning")
@pytest.mark.long("compiles for some seconds")
@pytest.mark.skipif(stacked.READS_ADDRESSES, reason="torch 2.10 cannot move a compiled module back on plain Lightning")
def test_blocks_are_compiled_whole() -> None:
    """A compiler traces with tensors of its own: nothing of a trace is kept for other models."""
    packed_stacks._pairs.cache_clear()

    def make(*, compiles: bool = True) -> stacked.Transformer:
        module = adapted(packed())
        for block in module.net.base_model.model.model.layers if compiles else ():
            block.compile(backend="aot_eager")
        return module

    torch._dynamo.reset()
    ours = fit(make, stacked.tokens(), superpipeline(k=1))
    torch._dynamo.reset()
    assert_same(ours, fit(make, stacked.tokens()))
    fit(lambda: make(compiles=False), stacked.tokens(1))


def test_a_packed_weight_of_a_run_that_is_over_is_named() -> None:
    kept: list[Any] = []

    class Keeps(stacked.Transformer):
        def loss(self, batch: Any) -> Tensor:
            kept.extend(experts_of(self.net))
            return super().loss(batch)

    fit(lambda: Keeps(adapted(packed()).net), stacked.tokens(1), superpipeline(k=1))
    with pytest.raises(
        RuntimeError, match=r"layers.0.mlp.experts.gate_up_proj' was taken within a step of a run that is over"
    ):
        kept[0].sum()


def test_packed_experts_follow_the_dtype_of_their_module() -> None:
    module = packed().net
    before = [weight.dequantize() for weight in experts_of(module)]
    module.to(torch.bfloat16)
    assert [weight.dtype for weight in experts_of(module)] == [torch.bfloat16] * 4
    assert_equal([w.dequantize() for w in experts_of(module)], [w.bfloat16() for w in before], "values")


# ---------------------------------------------------------------------- streamed


def by_rows(strategy: Any, times: int) -> bool:
    """Returns True if fewer bytes of experts were uploaded than ``times`` uploads of all experts have."""
    whole = times * sum(layer.nbytes for layer in strategy.plan.layers if layer.rows)
    return strategy.stats().expert_bytes > 0 and (strategy.stats().expert_bytes < whole or stacked.READS_ADDRESSES)


@pytest.mark.long("takes a second or more")
@pytest.mark.parametrize(("name", "how", "kind"), first(CASES, *QUICK, why="other models, functions and formats"))
def test_streamed_training_equals_plain_and_few_rows_come(name: str, how: str, kind: str) -> None:
    def make() -> stacked.Transformer:
        return adapted(packed(name, how, kind))

    batches, strategy = stacked.tokens(), superpipeline(k=1)
    with poisoned():
        ours = fit(make, batches, strategy)
    assert_same(ours, fit(make, batches))
    assert by_rows(strategy, 2 * len(batches)), "in forward and backward"
    stacks = [layer for layer in strategy.plan.layers if layer.rows]
    assert len(stacks) == 2
    assert {span.dtype for layer in stacks for span in layer.spans} >= {torch.uint8}


MODES = [(each, other) for each in ("keep", "recompute", "offload") for other in ("32-true", "bf16-true", "bf16-mixed")]


@pytest.mark.long("takes a second or more")
@pytest.mark.usefixtures("everything_is_worth_moving")
@pytest.mark.parametrize(
    ("activations", "precision"), first(MODES, ("recompute", "bf16-mixed"), why="other modes and precisions")
)
@pytest.mark.parametrize("base", first(["float32", "bfloat16"], "bfloat16", why="another dtype of the base"))
def test_modes_and_precisions(activations: Any, precision: Any, base: str) -> None:
    if (precision, base) in [("32-true", "bfloat16"), ("bf16-true", "float32")]:
        base = {"bfloat16": "float32", "float32": "bfloat16"}[base]

    def make() -> stacked.Transformer:
        return adapted(packed("gpt-oss", dtype=getattr(torch, base)))

    batches, strategy = stacked.tokens(), superpipeline(k=1, activations=activations)
    with poisoned():
        ours = fit(make, batches, strategy, precision=precision)
    assert_same(ours, fit(make, batches, precision=precision))
    assert by_rows(strategy, 2 * len(batches))


@pytest.mark.long("takes a second or more")
@pytest.mark.parametrize("activations", first(["keep", "recompute"], "recompute", why="the same adapters, saved"))
@pytest.mark.parametrize("how", first(IMPLEMENTATIONS, "grouped_mm", why="adapters make the stacks dense in each"))
def test_adapters_on_packed_experts_are_streamed(how: str, activations: Any) -> None:
    def make() -> stacked.Transformer:
        return adapted(packed("qwen3", how, "nvfp4"), experts=True)

    with poisoned():
        ours = fit(make, stacked.tokens(), superpipeline(k=1, activations=activations))
    assert_same(ours, fit(make, stacked.tokens()))


def of_torchao(weight: PackedStack) -> Any:
    """Returns torchao's tensor of the same values."""
    if weight.factors is not None:
        return NVFP4Tensor(
            weight.values, weight.scales, 16, weight.dtype, per_tensor_scale=weight.factors, act_quant_kwargs=None
        )
    like = MXTensor.to_mx(torch.zeros(1, 1, 32, dtype=weight.dtype), torch.float4_e2m1fn_x2, 32)
    return builder(like)(iter([weight.values, weight.scales]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", FORMATS)
def test_dequantised_values_are_those_of_torchao_for_all_bytes_and_scales(kind: str, dtype: torch.dtype) -> None:
    block, form = (16, torch.float8_e4m3fn) if kind == "nvfp4" else (32, torch.float8_e8m0fnu)
    values = torch.arange(256, dtype=torch.uint8).repeat(2, 256, 1)
    scales = torch.arange(256, dtype=torch.uint8)[:, None].repeat(2, 1, 512 // block).view(form)
    factors = torch.tensor([0.0123, 3.7]).view(2, 1, 1) if kind == "nvfp4" else None
    weight = PackedStack(values, scales, factors, False, False, dtype)
    assert_equal(weight.dequantize(), of_torchao(weight).dequantize(), "values")
    assert_equal(weight[1].dequantize(), of_torchao(weight)[1].dequantize(), "values of a row")


def bare() -> stacked.Transformer:
    """Stacks that are torchao's own tensors, without PackedStack."""
    module = packed("qwen3", "eager", "nvfp4", num_hidden_layers=8)
    for _, owner, key in [*named_stacks(module)]:
        weight: Any = owner._parameters[key]
        owner._parameters[key] = nn.Parameter(of_torchao(weight), requires_grad=False)
    return module


EIGHT_LAYERS: dict[str, Callable[[], stacked.Transformer]] = {
    "packed": lambda: packed("qwen3", "eager", "nvfp4", num_hidden_layers=8),
    "grouped": lambda: packed(num_hidden_layers=8),
    "torchao": bare,
}


@pytest.mark.long("takes a second or more")
@pytest.mark.usefixtures("everything_is_worth_moving")
@pytest.mark.parametrize("activations", first(["keep", "recompute", "offload"], "keep", why="other modes"))
@pytest.mark.parametrize("case", EIGHT_LAYERS)
def test_the_graph_holds_no_slot(case: str, activations: Any) -> None:
    """Autograd saves the packed tensor, which is packed as its place in the slot."""

    def make() -> stacked.Transformer:
        return adapted(EIGHT_LAYERS[case]())

    strategy = superpipeline(k=1, k_prime=1, activations=activations)
    with poisoned():
        ours = fit(make, stacked.tokens(1), strategy)
    assert_same(ours, fit(make, stacked.tokens(1)))
    assert strategy.stats().peak_device_bytes <= strategy.plan.peak_device_bytes


WRITES: dict[str, Callable[[Any, Any], Any]] = {
    "whole": lambda weight, other: weight.copy_(other),
    "detached": lambda weight, other: weight.detach().copy_(other),
    "data": lambda weight, other: weight.data.copy_(other),
    "parts": lambda weight, other: weight.values.copy_(other.values),
    "row": lambda weight, other: weight[1].copy_(other[1]),
    "transposed": lambda weight, other: weight.mT.copy_(other.mT),
    "detached row": lambda weight, other: weight.detach()[1].copy_(other[1]),
    "row, detached": lambda weight, other: weight[1].detach().copy_(other[1]),
}


def written_in_evaluation(how: str, kind: str) -> Callable[[], stacked.Transformer]:
    """Packed experts that a hook writes in each forward of an evaluation, while they are on the device."""

    def make() -> stacked.Transformer:
        module = adapted(packed(kind=kind))
        experts = next(owner for _, owner, _ in named_stacks(module))
        other = copy.deepcopy(experts.gate_up_proj)
        other.values.copy_(other.values.flip(0))

        def write(*_: Any) -> None:
            if not torch.is_grad_enabled():
                WRITES[how](experts.gate_up_proj, other)

        next(m for m in module.modules() if type(m).__name__ == "Qwen3MoeDecoderLayer").register_forward_pre_hook(write)
        return module

    return make


@pytest.mark.long("takes a second or more")
@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("how", first(["whole", "detached", "data", "parts"], "whole", "data", why="other writes"))
def test_experts_that_were_written_on_the_device_are_copied_back(how: str, kind: str) -> None:
    options: dict[str, Any] = {"val": stacked.tokens(2), "max_epochs": 2}
    ours = fit(written_in_evaluation(how, kind), stacked.tokens(), superpipeline(k=1), **options)
    assert_same(ours, fit(written_in_evaluation(how, kind), stacked.tokens(), **options))


@pytest.mark.parametrize("how", ["row", "transposed", "detached row", "row, detached"])
def test_a_view_of_experts_cannot_be_written(how: str) -> None:
    """A streamed run lost such a write: no version and no hook shows it."""
    said = "and no view: copy into the whole parameter"
    weight: Any = experts_of(packed(kind="nvfp4").net)[0]
    with pytest.raises(NotImplementedError, match=said):
        WRITES[how](weight, weight.clone())
    with pytest.raises(NotImplementedError, match=said):
        fit(written_in_evaluation(how, "nvfp4"), stacked.tokens(1), superpipeline(k=1), val=stacked.tokens(1))


# ---------------------------------------------------------------------- prediction and checkpoints


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.parametrize("inference_mode", [True, False])
@pytest.mark.parametrize(("name", "how", "kind"), first(CASES, *QUICK, why="other models, functions and formats"))
def test_predicts(name: str, how: str, kind: str, inference_mode: bool) -> None:
    def predictions(module: stacked.Transformer, strategy: Any = "auto") -> Any:
        return trainer_for(strategy, inference_mode=inference_mode).predict(module, loader(stacked.tokens()))

    torch.manual_seed(5)
    module, strategy = packed(name, how, kind), superpipeline(k=1)
    plain = predictions(copy.deepcopy(module))
    with poisoned():
        ours = predictions(copy.deepcopy(module), strategy)
    assert_equal(ours, plain, "predictions")
    assert by_rows(strategy, len(plain))
    assert_equal(plain, predictions(dequantised(module)), "predictions with dequantised experts")


@pytest.mark.long("takes a second or more")
@pytest.mark.parametrize("kind", first(FORMATS, "nvfp4", why="the other format"))
def test_resumes_from_a_checkpoint(tmp_path: Path, kind: str) -> None:
    def make() -> stacked.Transformer:
        return adapted(packed(kind=kind))

    batches, states = stacked.tokens(6), []
    whole = fit(make, batches, max_epochs=2)
    for strategy in ("auto", superpipeline(k=1)):
        file = tmp_path / "whole.ckpt"
        first_half = fit(make, batches, strategy)
        first_half.trainer.save_checkpoint(file)
        states.append(torch.load(file, weights_only=True)["state_dict"])
        assert sum(isinstance(each, PackedStack) for each in states[-1].values()) == 4
    assert_equal(states[1], states[0], "checkpoints")
    for strategy in ("auto", superpipeline(k=1)):
        ours = fit(make, batches, strategy, ckpt_path=file, max_epochs=2)
        assert_equal(ours.state, whole.state, "state")
        assert_equal(ours.losses, whole.losses[len(batches) :], "losses")


@pytest.mark.rest("takes tenths of a second")
def test_a_checkpoint_brings_its_own_experts(tmp_path: Path) -> None:
    """Not those that the module was made with."""

    def other() -> stacked.Transformer:
        torch.manual_seed(8)
        return adapted(packed())

    file, batches = tmp_path / "one.ckpt", stacked.tokens()
    one = fit(lambda: adapted(packed()), batches, superpipeline(k=1))
    one.trainer.save_checkpoint(file)
    ours = fit(other, batches, superpipeline(k=1), ckpt_path=file, max_epochs=2)
    assert_same(ours, fit(other, batches, ckpt_path=file, max_epochs=2))
    assert_equal(experts_of(ours.module), experts_of(one.module), "experts")


def saved_and_loaded(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=not isinstance(value, nn.Module), map_location=lambda storage, _: storage)


def pickled(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("copied", [copy.deepcopy, saved_and_loaded, pickled])
def test_copies_and_files_of_a_module(copied: Callable[[Any], Any], kind: str) -> None:
    module = packed("gpt-oss", kind=kind).net
    other = copied(module)
    assert [*dict(other.named_parameters())] == [*dict(module.named_parameters())]
    assert_equal(dict(other.state_dict()), dict(module.state_dict()), "state")
    pairs = [*zip(experts_of(module), experts_of(other), strict=True)]
    assert len(pairs) == 4
    for one, copy_of_it in pairs:
        assert isinstance(copy_of_it, nn.Parameter)
        assert not copy_of_it.requires_grad
        addresses = [{part.data_ptr() for _, part in parts("", each)} for each in (one, copy_of_it)]
        assert not addresses[0] & addresses[1]


@pytest.mark.parametrize("assign", [False, True])
def test_state_dicts_are_loaded(assign: bool) -> None:
    one, other = packed().net, packed().net
    state = saved_and_loaded(one.state_dict())
    addresses = [part.data_ptr() for each in experts_of(other) for _, part in parts("", each)]
    other.load_state_dict(state, assign=assign)
    assert_equal(dict(other.state_dict()), dict(one.state_dict()), "state")
    same = [part.data_ptr() for each in experts_of(other) for _, part in parts("", each)] == addresses
    assert same is not assign
    dense = dequantised(packed()).net
    dense.load_state_dict(state)
    assert_equal([dense.get_parameter(name) for name, *_ in named_stacks(dense)],
                 [each.dequantize() for each in experts_of(one)], "values")  # fmt: skip


# ---------------------------------------------------------------------- errors


def with_infinity() -> nn.Module:
    net = stacked.transformer("qwen3", **SIZES["qwen3"]).net
    with torch.no_grad():
        net.model.layers[1].mlp.experts.down_proj[2, 1, 1] = float("inf")
    return net


@pytest.mark.parametrize(
    ("module", "kind", "said"),
    [
        (lambda: stacked.transformer("qwen3").net, "int4", 'Got format=\'int4\'. Expected "nvfp4" or "mxfp4"'),
        (lambda: nn.Linear(32, 32), "nvfp4", "Linear has no stacked experts to pack"),
        (lambda: stacked.transformer("qwen3").net, "mxfp4", r"down_proj' has 24 inputs. Expected a multiple of 32"),
        (lambda: stacked.transformer("qwen3").net, "nvfp4", r"down_proj' has 24 inputs. Expected a multiple of 16"),
        (
            lambda: stacked.transformer("qwen3", moe_intermediate_size=48).net,
            "mxfp4",
            'of 32.*"nvfp4" takes multiples of 16',
        ),
        (lambda: packed().net, "nvfp4", "Qwen3MoeForCausalLM are packed already.*gate_up_proj"),
        (with_infinity, "nvfp4", r"layers.1.*down_proj' has values that are not finite"),
    ],
    ids=["format", "no experts", "32 inputs", "16 inputs", "48 inputs", "packed before", "infinite"],
)
def test_what_cannot_be_packed(module: Callable[[], nn.Module], kind: Any, said: str) -> None:
    net = module()
    before = dict(net.named_parameters())
    with pytest.raises(ValueError, match=said):
        sp_lightning.pack_experts(net, kind)
    if "finite" not in said:  # else some stacks are packed before
        assert all(each is before[name] for name, each in net.named_parameters())


@pytest.mark.parametrize("kind", FORMATS)
def test_torchao_is_needed(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    module = stacked.transformer("qwen3", **SIZES["qwen3"]).net
    monkeypatch.setitem(sys.modules, "torchao.prototype", None)
    with pytest.raises(ImportError, match=r"Experts in 4 bits need torchao\. Install it: pip install torchao"):
        sp_lightning.pack_experts(module, kind)


def test_packed_experts_cannot_be_written() -> None:
    module = packed().net
    weight: Any = experts_of(module)[0]
    before = [part.clone() for _, part in parts("", weight)]
    writes: list[Callable[[], Any]] = [
        lambda: weight.mul_(2),
        lambda: weight[1].zero_(),
        lambda: weight.__setitem__(0, torch.zeros(64, 32)),
        lambda: torch.add(torch.ones(weight.shape), 1, out=weight),
        lambda: torch._foreach_mul_([torch.ones(2), weight], 2),
    ]
    for write in writes:
        with pytest.raises(NotImplementedError, match="cannot be trained, averaged, or merged"):
            write()
    with pytest.raises(NotImplementedError, match="cannot be trained, averaged, or merged"):
        weight.copy_(weight.dequantize())
    others = [experts_of(packed(kind="nvfp4"))[0], experts_of(packed("gpt-oss"))[0], weight.mT]
    for other in others:
        with pytest.raises(
            NotImplementedError, match=r"Copying into PackedStack.*Expected the same format and layout"
        ) as raised:
            weight.copy_(other)
        assert ('Pack the model as the other one: pack_experts(model, "nvfp4")' in str(raised.value)) is (
            other.format == "nvfp4"
        )
    assert_equal([part for _, part in parts("", weight)], before, "parts")
    assert_equal(torch.zeros(weight.shape).copy_(weight), weight.dequantize(), "values")


def test_packed_experts_cannot_be_trained() -> None:
    def make() -> stacked.Transformer:
        module = packed()
        module.net.requires_grad_(True)
        return module

    with pytest.raises(ValueError, match=r"gate_up_proj' is of class PackedStack.* Freeze it"):
        fit(make, stacked.tokens(), superpipeline(k=1))
    with pytest.raises(NotImplementedError, match=r"It cannot be trained, averaged, or merged"):
        fit(make, stacked.tokens())
