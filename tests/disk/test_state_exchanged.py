"""State on a disk that user code moves between parameters and groups without a look at it.

A stranger found these: what was moved within a layer was copied over what was still to be moved, and a layer whose state stays in
memory kept a tensor that is on the disk.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch import Tensor, nn

from tests.support.models import Module
from tests.support.on_disk import away, on_disk, without_room
from tests.support.runs import assert_same, fit
from tests.support.tiers import first

OVERLAPS = first(["off", "forward", "backward"], "off", why="the same in other modes of updates")


class Block(nn.Module):
    """Two weights that are alike."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = (nn.Linear(32, 32, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.q(x)) + torch.tanh(self.k(x))


def made(overlap: Any) -> Callable[[], Module]:
    def make() -> Module:
        module = Module(nn.Sequential(*(Block() for _ in range(5))))
        fused = True if overlap != "off" else None
        module.configure_optimizers = lambda: torch.optim.AdamW(module.parameters(), lr=1e-3, fused=fused)  # type: ignore[method-assign]
        return module

    return make


def batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(4, 32, generator=generator) for _ in range(5)]


class After(Callback):
    """Does something once, after the third batch."""

    def __init__(self, act: Callable[[Any, Any], object]) -> None:
        self.act = act

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            self.act(pl_module.net, trainer.optimizers[0])


def exchange_tensors(net: Any, optimizer: Any) -> None:
    for block in net:
        q, k = optimizer.state[block.q.weight], optimizer.state[block.k.weight]
        q["exp_avg"], k["exp_avg"] = k["exp_avg"], q["exp_avg"]


def exchange_states(net: Any, optimizer: Any) -> None:
    for block in net:
        q, k = block.q.weight, block.k.weight
        optimizer.state[q], optimizer.state[k] = optimizer.state[k], optimizer.state[q]


def reorder_keys(net: Any, optimizer: Any) -> None:
    for state in optimizer.state.values():
        state["exp_avg"] = state.pop("exp_avg")


def reorder_parameters(net: Any, optimizer: Any) -> None:
    optimizer.param_groups[0]["params"].reverse()


def move_to_a_new_group(net: Any, optimizer: Any) -> None:
    moved = [block.q.weight for block in net]
    names = set(map(id, moved))
    group = optimizer.param_groups[0]
    group["params"] = [each for each in group["params"] if id(each) not in names]
    optimizer.add_param_group({"params": moved, "lr": 1e-4})


ACTS = {
    act.__name__: act
    for act in (exchange_tensors, exchange_states, reorder_keys, reorder_parameters, move_to_a_new_group)
}


def assert_plains(overlap: Any, folder: Path, act: Any) -> None:
    """Compares a run with state on a disk with plain Lightning's. ``act`` gets the module and the optimizer after a batch."""
    settings: Any = {"callbacks": [After(act)], "recorded": "nothing"}
    ours = fit(made(overlap), batches(), on_disk(folder, optimizer_overlap=overlap), **settings)
    assert_same(ours, fit(made(overlap), batches(), **settings))


@pytest.mark.long("takes a second or more")
@pytest.mark.parametrize("act", first(ACTS, "move_to_a_new_group", why="other ways of the same"))
@pytest.mark.parametrize("overlap", OVERLAPS)
def test_state_gets_another_place_within_its_layer(
    overlap: Any, act: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_room(monkeypatch)
    assert_plains(overlap, tmp_path, ACTS[act])


@pytest.mark.long("takes a second or more")
@pytest.mark.parametrize("overlap", OVERLAPS)
def test_a_layer_in_memory_gets_state_that_is_on_the_disk(
    overlap: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_room(monkeypatch, 20 * 2**10)
    found: list[int] = []

    def exchange(net: Any, optimizer: Any) -> None:
        found.append(away(optimizer))
        states = [optimizer.state[block.q.weight] for block in net]
        for one, other in zip(states, states[1:] + states[:1], strict=True):
            one["exp_avg"], other["exp_avg"] = other["exp_avg"], one["exp_avg"]

    assert_plains(overlap, tmp_path, exchange)
    assert 0 < found[0] < 20  # some layers' state is in memory, and some is not


def read_all(optimizer: Any) -> list[float]:
    tensors = [state[name] for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
    return [float(tensor.sum()) for tensor in tensors]


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.parametrize("overlap", OVERLAPS)
def test_all_is_read_while_a_view_is_held(overlap: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The view goes on seeing the updates."""
    without_room(monkeypatch)
    held: list[Any] = []

    def hold(net: Any, optimizer: Any) -> None:
        held.append(next(iter(optimizer.state.values()))["exp_avg"].view(-1)[:3])
        held.append(read_all(optimizer))

    assert_plains(overlap, tmp_path, hold)
    assert held[1] == held[3]
    assert torch.equal(held[0], held[2])
