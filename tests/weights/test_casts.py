"""Weights that travel as their casts: how many bytes, and who makes a cast when; gradients in the memory of their casts.

``tests/equality/programs/casts.py`` has what user code does with them.
"""

from __future__ import annotations

import threading
from collections.abc import Collection
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from sp_lightning import SuperpipelineStrategy
from sp_lightning.core.model.find import find_layers
from sp_lightning.core.torch_compat.cast_gradient import CastGradient
from sp_lightning.core.weights import casts
from sp_lightning.core.weights.casts import Cast, autocast_would_cast
from sp_lightning.core.weights.host_casts import Casts
from tests.support.models import Block, Module, Stack, llama, tokens, vectors
from tests.support.nets import OwnLinear, Readers, Tied, of_blocks
from tests.support.runs import assert_equal, fit, loader, superpipeline, trainer_for
from tests.support.ways import MIXED, mixed, overlapping


@pytest.mark.parametrize("lowers", [True, False])
def test_a_backend_that_casts_other_operators_gets_masters(lowers: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """One casts ``mm`` alone: a linear layer with a bias got a 16-bit weight beside a float32 input."""
    monkeypatch.setattr(casts, "TORCHS", set())
    casts._lowers.cache_clear()
    if not lowers:
        monkeypatch.setattr(nn.functional, "linear", lambda x, weight, bias: torch.addmm(bias, x, weight.t()).float())
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        assert autocast_would_cast(torch.bfloat16, torch.device("cpu")) is lowers
    casts._lowers.cache_clear()


@pytest.mark.rest("takes tenths of a second")
def test_casts_are_made_once_between_two_writes() -> None:
    """Forward's and backward's fetch share them; validation makes none while nothing is written."""
    made: list[Casts] = []
    cast_into = Casts._cast_into

    def note(self: Casts, wire: Tensor, *but: Any) -> None:
        made.append(self)
        cast_into(self, wire, *but)

    with mock.patch.object(Casts, "_cast_into", note):
        fit(lambda: Module(Stack()), vectors(4), superpipeline(k=1), **MIXED)
    assert len(made) == 4 * 7
    made.clear()
    with mock.patch.object(Casts, "_cast_into", note):
        trainer_for(superpipeline(k=1), **MIXED).predict(Module(Stack()), loader(vectors(4)))
    assert len(made) == 7


@pytest.mark.rest("takes tenths of a second")
def test_updates_in_the_background_make_the_casts_and_nobody_makes_them_again() -> None:
    """Where no hook could have written the weights since."""
    makers: list[str] = []
    walks: list[int] = []
    cast_into = Casts._cast_into

    def note(self: Casts, wire: Tensor, but: Collection[int] = ()) -> None:
        makers.append(threading.current_thread().name)
        walks.append(sum(id(master) not in but for master in self._masters.parameters))
        cast_into(self, wire, but)

    with mock.patch.object(Casts, "_cast_into", note):
        trainer_for(SuperpipelineStrategy(k=1, optimizer_overlap="forward"), **MIXED).fit(
            Module(Stack()), loader(vectors(4))
        )
    assert len(makers) == 7 + 4 * 7  # before the first step, and with each update
    assert sum(name.startswith("superpipeline") for name in makers) == 4 * 7
    assert sum(walks) == len(list(Stack().parameters())), "those of an update are made piece by piece, while it steps"


def test_only_what_autocast_casts_is_lowered() -> None:
    def lowered(net: nn.Module, **options: Any) -> set[str]:
        found = find_layers(net, autocast=torch.bfloat16, **options)
        return {name for layer in found.layers for name, _ in layer.lowered}

    blocks = of_blocks(Block)()
    assert lowered(blocks) == {name for name, _ in blocks.named_parameters()}
    assert lowered(blocks, keep_on_gpu=["blocks.1"]) == {n for n, _ in blocks.named_parameters() if "blocks.1" not in n}
    assert lowered(blocks.bfloat16()) == set()
    assert lowered(Tied()) == {n for n, _ in Tied().named_parameters() if "head" not in n and "table" not in n}
    assert lowered(Readers()) == {f"decoder.linear{i}.{n}" for i in (1, 2) for n in ("weight", "bias")}
    compiled = of_blocks(Block)()
    compiled.blocks[1].compile(backend="eager")
    biases = {name for name, _ in compiled.named_parameters() if name.startswith("blocks.1") and name.endswith("bias")}
    assert biases
    assert lowered(compiled) == {name for name, _ in compiled.named_parameters()} - biases
    assert lowered(of_blocks(OwnLinear)()) == {
        f"{layer}.{n}" for layer in ("stem", "head", *(f"blocks.{i}.{m}" for i in range(3) for m in ("more", "outer")))
        for n in ("weight", "bias")
    }  # fmt: skip


@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
def test_without_autocast_nothing_is_lowered(precision: Any) -> None:
    strategy = superpipeline()
    fit(
        lambda: Module(Stack()).to(torch.bfloat16 if "bf16" in precision else None),
        [torch.ones(2, 16)],
        strategy,
        precision=precision,
    )
    assert strategy.plan.masters == ()


class CompiledInside(Block):
    """A function that is compiled, and a module's forward, where no set-up sees it: graphs break at each weight."""

    def __init__(self) -> None:
        super().__init__()
        self.compiled = torch.compile(lambda x: torch.tanh(self.inner(x)), backend="eager")
        self.outer.forward = torch.compile(self.outer.forward, backend="eager")  # type: ignore[method-assign]

    def forward(self, x: Tensor) -> Tensor:
        return x + self.outer(self.compiled(x))


@pytest.mark.long("takes a second or more")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # Dynamo asks for it where a graph breaks
def test_compiled_where_no_set_up_sees_it() -> None:
    """Dynamo would trace the engine; now its graphs break at each weight that travels as a cast."""
    plain = mixed(lambda: Module(of_blocks(CompiledInside)()), "auto")
    torch._dynamo.reset()
    with pytest.warns(UserWarning, match="compile_blocks"):
        ours = mixed(lambda: Module(of_blocks(CompiledInside)()), superpipeline(k=1))
    assert_equal(ours, plain, "compiled inside")


@pytest.mark.long("takes a second or more")
@pytest.mark.parametrize(
    ("first", "then"),
    [("auto", "ours"), ("ours", "auto")],
)
def test_checkpoints_hold_the_masters(tmp_path: Any, first: str, then: str) -> None:
    def strategy(name: str) -> Any:
        return superpipeline(k=1) if name == "ours" else "auto"

    def resume(half: str, whole: str) -> list[Any]:
        fit(llama, tokens(), strategy(half), **MIXED).trainer.save_checkpoint(tmp_path / f"{half}.ckpt")
        outcome = fit(llama, tokens(), strategy(whole), max_epochs=2, ckpt_path=tmp_path / f"{half}.ckpt", **MIXED)
        assert all(value.dtype == torch.float32 for value in outcome.state.values() if value.is_floating_point())
        return [outcome.state, outcome.optimizers, outcome.gradients]

    assert_equal(resume(first, then), resume("auto", "auto"), f"{first}, then {then}")


# ---------------------------------------------------------------------- gradients

NARROW = torch.arange(12, dtype=torch.bfloat16).view(3, 4)


def test_it_is_a_float32_tensor_in_half_the_memory() -> None:
    gradient = CastGradient(NARROW)
    assert (gradient.dtype, gradient.shape, gradient.device.type) == (torch.float32, (3, 4), "cpu")
    with torch.DisableTorchFunctionSubclass():  # as autograd makes it a weight's
        again = gradient.detach()
    assert type(again) is CastGradient
    assert again.inner_tensor is gradient.inner_tensor is NARROW


def test_sums_are_plain_and_as_exact_as_float32() -> None:
    one, other = (CastGradient(torch.full((2,), value, dtype=torch.bfloat16)) for value in (256.0, 1.0))
    total = one + other
    assert type(total) is Tensor
    assert total.tolist() == [257.0, 257.0], "of bfloat16 it would be 256"


def test_whoever_holds_it_sees_what_is_written() -> None:
    gradient = CastGradient(NARROW.clone())
    view = gradient.view(-1)
    gradient.mul_(0.5)
    view[0] = 7
    assert torch.equal(gradient.inner_tensor, torch.tensor([7, *(each / 2 for each in range(1, 12))]).view(3, 4))
    assert torch.equal(gradient.detach(), gradient.inner_tensor)
    assert gradient.wide() is gradient.inner_tensor


@pytest.mark.parametrize("shape", [(4,), (1, 4)])
def test_it_has_memory_of_its_own(shape: tuple[int, ...]) -> None:
    """What a bias is added to has the same gradient, which user code may keep and write."""
    bias, x, kept = torch.zeros(shape, requires_grad=True), torch.ones(shape).bfloat16(), list[Tensor]()
    total = x + Cast.apply(bias, bias.detach().bfloat16())
    total.register_hook(kept.append)
    bias.register_hook(lambda gradient: kept.append(gradient.inner_tensor))
    (total * 2).sum().backward()
    theirs, ours = kept
    assert torch.equal(theirs, ours)
    assert theirs.data_ptr() != ours.data_ptr()


def test_what_is_to_be_differentiated_is_converted() -> None:
    weight, found = torch.zeros(2, 3, requires_grad=True), list[Tensor]()
    weight.register_hook(found.append)
    torch.autograd.grad(Cast.apply(weight, weight.detach().bfloat16()).square().sum(), weight, create_graph=True)
    assert type(found[0]) is Tensor
    assert found[0].requires_grad


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.parametrize("overlap", ["off", "forward", "backward"])
@pytest.mark.parametrize(("make", "widened"), [(Stack, False), (lambda: nn.Sequential(*[nn.Linear(16, 16)] * 2), True)])
def test_nothing_is_widened_on_the_device_but_for_sums(
    make: Any, widened: bool, overlap: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[CastGradient] = []
    wide = CastGradient.wide

    def noted(gradient: CastGradient) -> Tensor:
        found.append(gradient)
        return wide(gradient)

    monkeypatch.setattr(CastGradient, "wide", noted)
    fit(lambda: Module(make()), vectors(), overlapping(overlap), precision="bf16-mixed", recorded="losses")
    assert bool(found) == widened
