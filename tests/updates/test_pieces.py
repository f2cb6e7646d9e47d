"""Updates piece by piece: torch's own step to the bit, whatever it is asked for, in fewer walks over memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from sp_lightning.core.updates import pieces
from sp_lightning.core.updates.pieces import InPieces, mode_for, piece_size
from sp_lightning.core.weights.gradient_roles import keep_narrow
from tests.support.pieces import OPTIMIZERS, Steps

ELEMENTS = 512


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


@pytest.mark.parametrize("needs", ["nothing", "half weight", "clip", "narrow gradient", "cast"])
def test_only_steps_that_need_the_mode_run_in_it(needs: str) -> None:
    parameter = nn.Parameter(torch.ones(4, dtype=torch.bfloat16 if needs == "half weight" else torch.float32))
    parameter.grad = torch.ones_like(parameter)
    if needs == "narrow gradient":
        keep_narrow(parameter, torch.ones(4, dtype=torch.bfloat16), looked_at=lambda: None)
    casts = {id(parameter): torch.empty(4, dtype=torch.bfloat16)} if needs == "cast" else {}
    with torch.DisableTorchFunctionSubclass():
        found = mode_for([parameter], casts, {id(parameter): lambda gradient: None} if needs == "clip" else {})
    assert isinstance(found, InPieces) == (needs in ("clip", "narrow gradient", "cast"))


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
