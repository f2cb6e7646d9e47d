"""Weights that travel as their casts: half the bytes move, and a cast is made once between two writes."""

from __future__ import annotations

import threading
from collections.abc import Collection
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from sp_lightning import SuperpipelineStrategy
from sp_lightning.core.device.device import Stream
from sp_lightning.core.layers.host_casts import Casts
from sp_lightning.core.model.find import find_layers
from tests.support.mixed import MIXED, OwnLinear, Readers, Tied, of_blocks
from tests.support.models import CASES, Block, Module, Stack, vectors
from tests.support.runs import assert_same, fit, fused, loader, superpipeline, trainer_for

# ---------------------------------------------------------------------- bytes


class Linears(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(*(nn.Linear(128, 128, bias=False) for _ in range(6)))


def wide() -> list[Tensor]:
    return [torch.ones(2, 128, requires_grad=True) for _ in range(3)]


@pytest.mark.rest("takes tenths of a second")
def test_half_the_bytes_move() -> None:
    """In both directions; and the plan says so."""
    full, half = superpipeline(k=1), superpipeline(k=1)
    fit(lambda: Module(Linears()), wide(), full)
    fit(lambda: Module(Linears()), wide(), half, **MIXED)
    layer = 128 * 128 * 4
    assert [each.nbytes for each in half.plan.layers] == [layer // 2] * 6
    assert half.plan.slot_bytes == 2 * layer // 2
    assert half.plan.gradient_bytes == 2 * layer // 2 + layer // 2  # two in flight, and one that is copied
    assert half.plan.host_bytes == 6 * (2 * layer + layer // 2)
    assert any("100% of the layers' bytes are uploaded as bfloat16" in note for note in half.plan.notes)
    assert half.stats().fetched_layers == full.stats().fetched_layers
    assert half.stats().fetched_bytes == full.stats().fetched_bytes // 2 == half.stats().fetched_layers * layer // 2
    assert half.stats().offloaded_gradient_bytes == full.stats().offloaded_gradient_bytes // 2
    assert half.stats().demand_fetches == half.stats().extra_slots == 0


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.parametrize(
    ("name", "share"),
    [
        ("llama-dropout", 0.6),
        ("bert", 0.65),
        ("vit", 0.76),
        pytest.param("resnet50", 0.8, marks=pytest.mark.rest("a large model")),
    ],
)
def test_fewer_bytes_move_of_real_models(name: str, share: float) -> None:
    """They are so small that alignment counts; embeddings, norms and attention modules' own weights stay float32."""
    full, half = superpipeline(k=1), superpipeline(k=1)
    fit(CASES[name].make, CASES[name].batches(), full)
    fit(CASES[name].make, CASES[name].batches(), half, **MIXED)
    assert half.stats().demand_fetches == half.stats().extra_slots == 0
    assert half.stats().peak_device_bytes <= half.plan.peak_device_bytes
    assert half.stats().fetched_bytes <= share * full.stats().fetched_bytes


@pytest.mark.parametrize("use", ["once", "twice", "hooked"])
def test_a_gradient_is_lowered_only_where_that_loses_nothing(use: str) -> None:
    class Uses(Linears):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(super().forward(x) if use == "twice" else x)

    def make() -> Module:
        module = Module(Uses())
        for p in module.parameters():
            if use == "hooked":
                p.register_hook(lambda gradient: gradient * 1.001)
        return module

    strategy = superpipeline()
    assert_same(fit(make, wide(), strategy, **MIXED), fit(make, wide(), **MIXED))
    assert strategy.stats().offloaded_gradient_bytes == 3 * 6 * 128 * 128 * (2 if use == "once" else 4)


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


@pytest.mark.rest("takes tenths of a second")
def test_casts_that_a_graph_needed_when_their_update_began_are_made_after_it_although_the_graph_has_died() -> None:
    """The update puts no casts where the graph's are. Nobody else would make them if it counted as if it had."""
    graphs: list[Tensor] = []
    refused: list[bool] = []
    places = Casts.places

    class Keeps(Module):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            graphs.append(self.loss(batch))
            return super().training_step(batch, batch_idx)

    def noted(self: Casts, by: Stream) -> Any:
        found = places(self, by)
        refused.append(not found)
        if not found:
            graphs.clear()
        return found

    overlapped = SuperpipelineStrategy(k=1, optimizer_overlap="forward")
    with mock.patch.object(Casts, "places", noted):
        ours = fit(fused(lambda: Keeps(Stack())), vectors(4), overlapped, recorded="nothing", **MIXED)
    assert any(refused)
    assert_same(ours, fit(fused(lambda: Keeps(Stack())), vectors(4), recorded="nothing", **MIXED))


@pytest.mark.rest("takes tenths of a second")
def test_a_graph_keeps_its_casts_whose_weights_an_update_in_the_background_replaces() -> None:
    class Later(Module):
        """Adds the loss of the batch before, whose graph has the weights of the step before."""

        kept: Tensor | None = None

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            before, self.kept = self.kept, self.loss(batch)
            loss = super().training_step(batch, batch_idx)
            return loss if before is None else loss + before

    def run(strategy: Any) -> Any:
        return fit(fused(lambda: Later(Stack())), vectors(4), strategy, recorded="nothing", **MIXED)

    assert_same(run(SuperpipelineStrategy(k=1, optimizer_overlap="forward")), run("auto"))


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
