"""Random modules and random uses of them, bitwise equal to plain PyTorch, on the CPU and the simulated device.

100 examples in the first tier, 300 in the second (``pytest tests/endurance/test_fuzz.py --hypothesis-profile=ci``), 5,000 in
the third (``--hypothesis-profile=long``).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from sp_lightning.core.device.device import Device
from tests.support.engine import step, streamed, update
from tests.support.runs import assert_equal
from tests.support.simdevice import SimDevice, Watch

WIDTH = 8


@dataclass(frozen=True)
class Part:
    """One block of a random module."""

    kind: str
    hidden: int
    frozen: bool
    checkpointed: str
    skip: int | None
    again: int | None
    tie: int | None
    sometimes: bool


@dataclass(frozen=True)
class Use:
    """What is done with the module."""

    parts: tuple[Part, ...]
    mode: str
    k: int
    k_prime: int
    device: str
    steps: int
    clip: bool
    autocast: bool = False
    seed: int = field(default=0)


class Piece(nn.Module):
    """A block of the kind that its part says."""

    def __init__(self, part: Part) -> None:
        super().__init__()
        self.part = part
        self.inner = nn.Linear(WIDTH, part.hidden)
        self.outer = nn.Linear(part.hidden, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH) if part.kind == "batchnorm" else nn.LayerNorm(WIDTH)
        self.drop = nn.Dropout(0.2 if part.kind == "dropout" else 0.0)
        self.calls = nn.Buffer(torch.zeros(()))

    def forward(self, x: Tensor) -> Any:
        self.calls.add_(1)
        inside = self.part.checkpointed == "inside"
        y = checkpoint(self.compute, x, use_reentrant=False) if inside else self.compute(x)
        if self.part.kind == "outputs":
            return {"main": y, "side": (y.detach() * 0.1, self.inner.weight.sum())}
        return y

    def compute(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.inner(self.drop(x)))
        if self.part.kind == "no-grad":
            with torch.no_grad():
                return self.norm(x + self.outer(y)) + x
        if self.part.kind == "direct":
            return x + nn.functional.linear(y, self.outer.weight) * self.norm.weight
        return self.norm(x + self.outer(y))


class Net(nn.Module):
    """Blocks in a row, with skips, reuse, ties, conditions and checkpoints."""

    def __init__(self, parts: tuple[Part, ...]) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.pieces = nn.ModuleList(Piece(part) for part in parts)
        self.head = nn.Linear(WIDTH, 3)
        pieces: list[Any] = list(self.pieces)
        for index, part in enumerate(parts):
            if part.tie is not None and pieces[part.tie % len(parts)].part.hidden == part.hidden:
                pieces[index].inner.weight = pieces[part.tie % len(parts)].inner.weight
            if part.frozen:
                pieces[index].requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        seen = [x]
        for piece in self.pieces:
            part: Part = piece.part  # type: ignore[assignment]
            if part.sometimes and torch.rand(()).item() < 0.5:
                continue
            if part.skip is not None:
                x = x + seen[part.skip % len(seen)]
            x = self.call(piece, x)
            if part.again is not None:
                x = self.call(self.pieces[part.again % len(self.pieces)], x)
            seen.append(x)
        return self.head(x)

    def call(self, piece: Any, x: Tensor) -> Tensor:
        if piece.part.checkpointed in ("outside", "reentrant"):
            out = checkpoint(piece, x, use_reentrant=piece.part.checkpointed == "reentrant")
        else:
            out = piece(x)
        return out["main"] + out["side"][0] + out["side"][1] * 1e-3 if isinstance(out, dict) else out


def work(net: nn.Module, mode: str, x: Tensor) -> list[Tensor]:
    """One step's forwards and backwards; what it returns is compared as well."""

    def loss(factor: float = 1.0) -> Tensor:
        return (net(x * factor) * factor).square().mean()

    if mode == "two-forwards":
        both = loss() + loss(0.5)
        both.backward()
        return [both.detach()]
    if mode == "two-backwards":
        first = loss()
        first.backward(retain_graph=True)
        (first * 2).backward()
        return [first.detach()]
    if mode == "forwards-first":
        first, second = loss(), loss(0.5)
        second.backward()
        first.backward()
        return [first.detach(), second.detach()]
    if mode == "autograd-grad":
        value = loss()
        wanted = [p for p in net.parameters() if p.requires_grad]
        return [g for g in torch.autograd.grad(value, wanted, allow_unused=True) if g is not None]
    if mode == "double":
        inputs = x.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(net(inputs).sum(), inputs, create_graph=True)
        penalty = gradient.square().sum() + loss()
        penalty.backward()
        return [penalty.detach()]
    value = loss()
    value.backward()
    return [value.detach()]


def run(use: Use, device: Device | None) -> list[Any]:
    """Train a fresh net; everything that is left."""
    torch.manual_seed(use.seed)
    net = Net(use.parts)
    optimizer = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=1e-2)
    results: list[Any] = []

    def one(number: int, go: Any, apply: Any) -> None:
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(number)).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=use.autocast, cache_enabled=False):
            results.append(go(lambda: work(net, use.mode, x)))
        results.append([None if p.grad is None else p.grad.clone() for p in net.parameters()])
        if number % 2 == 0 and not all(p.grad is None for p in net.parameters()):
            if use.clip:
                nn.utils.clip_grad_norm_(net.parameters(), 0.1)
            apply()
            optimizer.zero_grad()

    if device is None:
        for number in range(use.steps):
            one(number, lambda work: work(), optimizer.step)
    else:
        autocast = torch.bfloat16 if use.autocast else None
        with streamed(net, device, k=use.k, k_prime=use.k_prime, autocast=autocast) as engine:
            for number in range(use.steps):
                one(number, lambda work: step(engine, work), lambda: update(engine, optimizer))
    return [*results, dict(net.state_dict()), optimizer.state_dict(), torch.get_rng_state()]


index = st.one_of(st.none(), st.integers(0, 5))
part = st.builds(
    Part,
    kind=st.sampled_from(["plain", "batchnorm", "dropout", "outputs", "no-grad", "direct"]),
    hidden=st.sampled_from([4, 16, 16, 64]),
    frozen=st.sampled_from([False, False, False, True]),
    checkpointed=st.sampled_from(["no", "no", "outside", "inside", "reentrant"]),
    skip=index,
    again=index,
    tie=index,
    sometimes=st.sampled_from([False, False, True]),
)
use = st.builds(
    Use,
    parts=st.lists(part, min_size=1, max_size=5).map(tuple),
    mode=st.sampled_from(["plain", "two-forwards", "two-backwards", "forwards-first", "autograd-grad", "double"]),
    k=st.integers(1, 4),
    k_prime=st.integers(1, 3),
    device=st.sampled_from(["cpu", "simulated"]),
    steps=st.integers(1, 3),
    clip=st.booleans(),
    autocast=st.booleans(),
    seed=st.integers(0, 3),
)


def attempt(use: Use, device: Device | None) -> list[Any] | str:
    """The outcome, or that autograd refused (no graph left, a reentrant checkpoint): then it must do so for both."""
    try:
        return run(use, device)
    except RuntimeError:
        if device is not None and attempt(use, None) != "refused":
            raise
        return "refused"


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@given(use=use)
def test_like_plain_pytorch(use: Use) -> None:
    plain = attempt(use, None)
    if use.device == "cpu":
        ours = attempt(use, Device(torch.device("cpu")))
    else:
        device = SimDevice(torch.device("cpu"))
        with Watch(device):
            ours = attempt(use, device)
    assert_equal(ours, plain, str(use))
