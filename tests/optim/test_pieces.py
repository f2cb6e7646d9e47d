"""Updates piece by piece: torch's own step to the bit, whatever it is asked for, in fewer walks over memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from sp_lightning.optim import pieces
from sp_lightning.optim.pieces import InPieces, piece_size
from sp_lightning.weights.narrow_gradient import change, keep_narrow

SHAPES = [(3000,), (64, 100), (5, 7), (), (1, 4097), (16, 8, 3, 3)]
ELEMENTS = 512
ADAM = torch.optim.Adam
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adam": lambda p: ADAM(p, lr=0.1, fused=True),
    "adam, decayed": lambda p: ADAM(p, lr=0.1, weight_decay=0.3, fused=True),
    "adam, amsgrad, maximised": lambda p: ADAM(p, lr=0.1, amsgrad=True, maximize=True, fused=True),
    "adam, lr is a tensor": lambda p: ADAM(p, lr=torch.tensor(0.1), fused=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.3, fused=True),
    "adamw, amsgrad": lambda p: torch.optim.AdamW(p, lr=0.1, amsgrad=True, fused=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.1, fused=True),
    "sgd, momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.2, fused=True),
    "sgd, nesterov, maximised": lambda p: torch.optim.SGD(
        p, lr=0.1, momentum=0.9, nesterov=True, maximize=True, fused=True
    ),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, lr_decay=0.1, weight_decay=0.1, fused=True),
    "groups": lambda p: torch.optim.AdamW(
        [{"params": p[::2], "weight_decay": 0.5}, {"params": p[1::2], "lr": 0.01}], lr=0.1, fused=True
    ),
}


class Steps:
    """The same steps of an optimizer, whole or in pieces.

    Args:
        pieces: elements of a piece; None for whole steps as a user takes them.
        came: the dtype in which gradients come.
        clip: what clips whole gradients, and the function that clips a part of one.
    """

    def __init__(
        self,
        make: Callable[[Any], torch.optim.Optimizer],
        pieces: int | None,
        came: torch.dtype,
        clip: str,
        **shape: Any,
    ) -> None:
        torch.manual_seed(0)
        self.parameters = [nn.Parameter(torch.randn(each)) for each in SHAPES]
        self.parameters.append(nn.Parameter(torch.randn(16, 8, 3, 3).to(memory_format=torch.channels_last)))
        self.without = nn.Parameter(torch.randn(1000))
        self.casts = [torch.zeros_like(p, dtype=torch.bfloat16) for p in self.parameters]
        self.optimizer = make([*self.parameters, self.without])
        for _ in range(3):
            gradients = [torch.randn_like(p).to(came) for p in self.parameters]
            if pieces is None:
                self.whole(gradients, clip)
            else:
                self.cut(gradients, clip, pieces)

    def whole(self, gradients: list[Tensor], clip: str) -> None:
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient.to(parameter.dtype)
        if clip == "norm":
            clip_grad_norm_(self.parameters, 0.1)
        elif clip == "value":
            clip_grad_value_(self.parameters, 0.1)
        self.optimizer.step()
        for parameter, cast in zip(self.parameters, self.casts, strict=True):
            cast.copy_(parameter.detach())

    def cut(self, gradients: list[Tensor], clip: str, elements: int) -> None:
        total = torch.linalg.vector_norm(
            torch.stack([torch.linalg.vector_norm(g, dtype=torch.float32) for g in gradients])
        )
        coefficient = torch.clamp(0.1 / (total + 1e-6), max=1.0)
        clipping: dict[str, Any] = {
            "norm": lambda g: g.mul_(coefficient), "value": lambda g: g.clamp_(-0.1, 0.1)
        }  # fmt: skip
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient if gradient.dtype is parameter.dtype else None
            if parameter.grad is None:
                keep_narrow(parameter, gradient, looked_at=lambda: None)
        clips = {id(p): clipping[clip] for p in self.parameters if clip and not change(p, clipping[clip])}
        casts = {id(p): cast for p, cast in zip(self.parameters, self.casts, strict=True)}
        with InPieces(casts, clips, elements=elements), torch.DisableTorchFunctionSubclass():
            type(self.optimizer).step.__wrapped__(self.optimizer)  # type: ignore[attr-defined]

    def outcome(self) -> list[Tensor]:
        state = [value for p in self.parameters for value in self.optimizer.state[p].values() if value is not None]
        return [*(p.detach() for p in (*self.parameters, self.without)), *self.casts, *state]


@pytest.mark.parametrize("clip", ["", "norm", "value"])
@pytest.mark.parametrize("came", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_pieces_get_the_bits_of_the_whole(name: str, came: torch.dtype, clip: str) -> None:
    whole = Steps(OPTIMIZERS[name], None, came, clip)
    ours = Steps(OPTIMIZERS[name], ELEMENTS, came, clip)
    assert len(whole.outcome()) == len(ours.outcome())
    for index, (mine, plain) in enumerate(zip(ours.outcome(), whole.outcome(), strict=True)):
        assert torch.equal(mine, plain), index
        assert mine.stride() == plain.stride()
    assert ours.without not in ours.optimizer.state or name.startswith("adagrad")


def test_the_comparison_can_fail() -> None:
    whole, other = (Steps(OPTIMIZERS[name], None, torch.float32, "") for name in ("adam", "adam, decayed"))
    assert not torch.equal(whole.outcome()[0], other.outcome()[0])


class Notes(torch.utils._python_dispatch.TorchDispatchMode):
    """The operators that read or write values, with the number of elements of what they write."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        if name == "copy_" or name.startswith("_fused"):
            self.seen.append((name, sum(t.numel() for t in args[0]) if name != "copy_" else args[0].numel()))
        return func(*args, **(kwargs or {}))


def test_each_piece_is_widened_stepped_and_cast_before_the_next() -> None:
    large, *small = (nn.Parameter(torch.ones(n)) for n in (1200, 300, 300, 5))
    optimizer = torch.optim.AdamW([large, *small], fused=True)
    casts = {id(p): torch.empty_like(p, dtype=torch.bfloat16) for p in (large, *small)}
    for p in (large, *small):
        keep_narrow(p, torch.ones_like(p, dtype=torch.bfloat16), looked_at=lambda: None)
    with Notes() as notes, InPieces(casts, {}, elements=512), torch.DisableTorchFunctionSubclass():
        torch.optim.AdamW.step.__wrapped__(optimizer)  # type: ignore[attr-defined]
    walks = ("copy_", "_fused_adamw_", "copy_")
    assert notes.seen == [
        *((walk, n) for n in (512, 512, 1200 - 1024) for walk in walks),
        ("copy_", 300), ("copy_", 300), ("_fused_adamw_", 600), ("copy_", 300), ("copy_", 300),
        *((walk, 5) for walk in walks),
    ]  # fmt: skip


def test_what_is_walked_over_once_is_not_cut() -> None:
    parameter = nn.Parameter(torch.ones(5000))
    parameter.grad = torch.ones(5000)
    optimizer = torch.optim.AdamW([parameter], fused=True)
    with Notes() as notes, InPieces({}, {}, elements=512):
        torch.optim.AdamW.step.__wrapped__(optimizer)  # type: ignore[attr-defined]
    assert notes.seen == [("_fused_adamw_", 5000)]


@pytest.mark.parametrize("cache", [2**21, 3 * 2**18, 1, 0])
def test_a_piece_is_a_power_of_two_that_fits_the_caches(cache: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a piece begins between two vectors of the processor, last bits may differ."""
    monkeypatch.setattr(pieces, "second_level_cache", lambda: cache)
    for threads in (1, 3, 16):
        piece_size.cache_clear()
        elements = piece_size(threads)
        assert elements.bit_count() == 1
        assert elements >= 512
        assert elements == 512 or 16 * elements <= threads * (cache or 2**20) / 2 < 32 * elements
    piece_size.cache_clear()
