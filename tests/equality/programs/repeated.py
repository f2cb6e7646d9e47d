"""A layer that is called several times in a step: each parameter's gradients are summed in autograd's own order."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint

from tests.equality.rows import program, tiers
from tests.support.models import Module

WIDTH = 8


def subclass(kind: type[nn.Module]) -> type[nn.Module]:
    """A user's own class, whose attributes a second run has to find as the first one did."""

    class Theirs(kind):  # type: ignore[misc, valid-type]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return super().forward(*args, **kwargs)

    return Theirs


class Recurrent(nn.Module):
    """The second half of a sequence goes on with the state of the first."""

    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.rnn = kind(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        first, state = self.rnn(x[:, :3])
        return torch.cat([first, self.rnn(x[:, 3:], state)[0]], 1)


class Cells(nn.Module):
    """The gates of a cell are views of one storage that count their writes each by itself."""

    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.cell = kind(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        state, states = None, []
        for each in x.unbind(1):
            state = self.cell(each, state)
            states.append(state[0] if isinstance(state, tuple) else state)
        return torch.stack(states, 1)


class Shared(nn.Module):
    """Uses its weight three times, its norm twice."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.inner.weight
        return self.norm(torch.tanh(self.norm(self.inner(x)) @ weight) + x * weight.sum(0))


class Checkpointed(Shared):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


class Kept(Shared):
    """Saved-tensor hooks that keep what they are given: weights, too."""

    def forward(self, x: Tensor) -> Tensor:
        with saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
            return super().forward(x)


class Listed(Shared):
    """Keeps a list of its weights from call to call."""

    def forward(self, x: Tensor) -> Tensor:
        self.seen = [self.norm.weight, self.inner.weight]
        return super().forward(x) * self.seen[0].sum()


class HookedAndKept(Kept):
    """A hook on a parameter sees the sum of all calls, once."""

    def __init__(self) -> None:
        super().__init__()
        for parameter in self.parameters():
            parameter.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))


class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.conv(x.transpose(1, 2))).transpose(1, 2)


class Attention(nn.Module):
    """Attention is given one tensor three times, and asks whether it is one."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, dropout=0.1, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, value=x, need_weights=False)[0] + x


KINDS: dict[str, Callable[[], nn.Module]] = {
    "gru": lambda: Recurrent(nn.GRU),
    "gru-subclass": lambda: Recurrent(subclass(nn.GRU)),
    "lstm-subclass": lambda: Recurrent(subclass(nn.LSTM)),
    "rnn-subclass": lambda: Recurrent(subclass(nn.RNN)),
    "gru-cell": lambda: Cells(nn.GRUCell),
    "lstm-cell": lambda: Cells(nn.LSTMCell),
    "linear": lambda: subclass(nn.Linear)(WIDTH, WIDTH),
    "norm": lambda: nn.LayerNorm(WIDTH),
    "weight-norm": lambda: weight_norm(nn.Linear(WIDTH, WIDTH)),
    "convolution": Convolution,
    "attention": Attention,
    "encoder": lambda: subclass(nn.TransformerEncoderLayer)(WIDTH, 2, 16, dropout=0.1, batch_first=True),
    "shared": Shared,
    "checkpointed": Checkpointed,
    "listed": Listed,
    "kept": Kept,
    "hooked-and-kept": HookedAndKept,
}
ORDERS: dict[str, Callable[[Any, Any, Tensor], Tensor]] = {
    "sequence": lambda layer, other, x: layer(layer(other(layer(x).sin()) * 2)),
    "branches": lambda layer, other, x: layer(x).tanh() * layer(other(x)) + other(layer(x * 2)),
}


class Calls(nn.Module):
    def __init__(self, kind: str, order: str) -> None:
        super().__init__()
        self.order = ORDERS[order]
        self.layer, self.other, self.head = KINDS[kind](), Shared(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.order(self.layer, self.other, x))


def sequences() -> Any:
    return list(torch.randn(2, 3, 6, WIDTH, generator=torch.Generator().manual_seed(1)))


SIMULATED = [f"{mode}, k=1, simulated" for mode in ("keep", "recompute", "offload")]
MIXED = [f"{mode}, k=1, bf16-mixed" for mode in ("keep", "recompute", "offload")]
for number, (kind, order) in enumerate(product(KINDS, ORDERS)):
    program(
        f"repeated: {kind} in {order}", tiers(rest=[SIMULATED[number % 3]] if number % 4 == 0 else [], long=[
            *(each for at, each in enumerate(SIMULATED) if number % 4 or at != number % 3), *MIXED]),
        batches=sequences, covers="gradients are summed as on plain",
    )(lambda kind=kind, order=order: Module(Calls(kind, order)))  # fmt: skip
