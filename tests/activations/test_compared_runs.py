"""A forward that computes other values in backward than it did in forward raises an error, whatever the reason is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor

from sp_lightning import SuperpipelineStrategy
from sp_lightning.capabilities.activations.fingerprints import SavedRun, differences, may_be_unwritten
from sp_lightning.capabilities.activations.recompute import Unrepeatable
from tests.equality.programs.unrepeatable import Steered
from tests.support.models import vectors
from tests.support.runs import fit, fused
from tests.support.simdevice import simulated

pytestmark = pytest.mark.usefixtures("everything_is_worth_moving")

# ---------------------------------------------------------------------- nothing follows from wrong gradients


@pytest.mark.long("takes a second or more")
@pytest.mark.parametrize("overlap", ["off", "forward", "backward"])
def test_no_weight_is_updated_by_wrong_gradients(overlap: Any) -> None:
    """The host looks at the comparison of two runs before it takes over the gradients that follow from the second one."""
    made: list[pl.LightningModule] = []

    def make() -> pl.LightningModule:
        made.append(fused(lambda: Steered("hook"))())
        return made[-1]

    strategy = SuperpipelineStrategy(k=1, k_prime=1, activations="recompute", optimizer_overlap=overlap)
    with simulated(), pytest.raises(Unrepeatable, match=r"of 'net.blocks.1' computed other values") as raised:
        fit(make, vectors(1), strategy, recorded="losses")
    pl.seed_everything(7, verbose=False)
    before = dict(make().named_parameters())
    changed = {name for name, value in made[0].named_parameters() if not torch.equal(value, before[name])}
    assert {name for name in changed if "blocks.1" in name or "blocks.0" in name or "stem" in name} == set()
    assert bool(changed) == (overlap == "backward")
    notes = " ".join(getattr(raised.value, "__notes__", ()))
    assert ("not those of any whole step" in notes) == bool(changed)


# ---------------------------------------------------------------------- fingerprints


def fingerprinted(tensor: Tensor) -> SavedRun:
    run = SavedRun(lambda address: None)
    run.found.append(run._fingerprint(tensor))
    return run


def differ(one: Tensor, other: Tensor) -> bool:
    return any(each.item() for each in differences(fingerprinted(one), fingerprinted(other)))


DTYPES = (
    torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64, torch.bool, torch.int64, torch.int8,
    torch.float8_e4m3fn,
)  # fmt: skip
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "as it lies": lambda x: x,
    "transposed": lambda x: x.t(),
    "a part": lambda x: x[:, 3:-2],
    "behind an odd number of elements": lambda x: x.flatten()[1:],
    "expanded": lambda x: x[:, None].expand(-1, 2, -1),
    "each other": lambda x: x[:, ::2],
}


def some(dtype: torch.dtype, shape: tuple[int, ...] = (40, 1001)) -> Tensor:
    """Too large to be kept whole, and no whole number of rows."""
    bits = torch.randint(
        0, 256, (*shape, dtype.itemsize), dtype=torch.uint8, generator=torch.Generator().manual_seed(1)
    )
    return bits.remainder(2).squeeze(-1).bool() if dtype is torch.bool else bits.view(dtype).squeeze(-1)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_bit_shows(dtype: torch.dtype, layout: str) -> None:
    view, place = LAYOUTS[layout], torch.Generator().manual_seed(2)
    before = some(dtype)
    assert not differ(view(before), view(before.clone()))
    for _ in range(20):
        after = before.clone()
        target = view(after)
        at = tuple(int(torch.randint(size, (), generator=place)) for size in target.shape)
        if dtype is torch.bool:
            target[at] = ~target[at]
        else:
            raw = target[at].clone().view(1).view(torch.uint8)
            raw[int(torch.randint(len(raw), (), generator=place))] ^= 1 << int(torch.randint(8, (), generator=place))
            target[at] = raw.view(dtype)[0]
        assert differ(view(before), target), at


CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "rows that change places": lambda x: x.flip(0),
    "columns that change places": lambda x: x.flip(1),
    "two elements that change places": lambda x: torch.cat([x[:, 1:2], x[:, :1], x[:, 2:]], 1),
    "signs": torch.neg,
    "signs of two columns": lambda x: torch.cat([x[:, :1], -x[:, 1:2], x[:, 2:3], -x[:, 3:4], x[:, 4:]], 1),
    "signs of imaginary parts": lambda x: x * torch.tensor([1, -1], dtype=x.dtype).repeat(1024),
    "what is lost to one row is given to another": lambda x: torch.cat([x[:1] + 1, x[1:2] - 1, x[2:]]),
    "a block of zeros": lambda x: torch.cat([x[:, :512], 0 * x[:, 512:]], 1),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_changes_that_sums_could_hide_show(dtype: torch.dtype, change: str) -> None:
    x = torch.randn(64, 2048, generator=torch.Generator().manual_seed(3)).to(dtype)
    assert differ(x, CHANGES[change](x))


def test_shapes_dtypes_and_strides_show() -> None:
    x = torch.zeros(64, 64)
    assert differ(x, x.view(32, 128))
    assert differ(x, x.double())
    assert differ(x, x.t())


def test_what_is_saved_twice_is_summed_once() -> None:
    run, x = SavedRun(lambda address: None), torch.randn(64, 128)
    one, other = run._fingerprint(x), run._fingerprint(x.detach())
    assert one is other
    x.add_(1)
    assert run._fingerprint(x) is not one


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support", "ignore:The PyTorch API of nested tensors")
def test_sparse_nested_and_wrapped_tensors_have_values() -> None:
    for make in (
        lambda x: x.to_sparse(),
        lambda x: x.to_sparse_csr(),
        lambda x: torch.nested.nested_tensor([x[:1], x]),
        lambda x: torch.nested.nested_tensor([x[:1], x], layout=torch.jagged),
    ):
        x = torch.eye(4)
        assert not differ(make(x), make(x.clone()))
        assert differ(make(x), make(2 * x))


def test_what_kernels_leave_unwritten_counts_for_nothing() -> None:
    def on(*shape: int, dtype: torch.dtype, device: str = "meta") -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    assert may_be_unwritten(on(dtype=torch.int64))  # a seed
    assert may_be_unwritten(on(2, dtype=torch.uint64))
    assert may_be_unwritten(on(64, dtype=torch.uint8))  # a recurrent layer's workspace
    assert not may_be_unwritten(on(64, dtype=torch.int64))
    assert not may_be_unwritten(on(8, 8, dtype=torch.bool))
    assert not may_be_unwritten(on(dtype=torch.float32))
    assert not may_be_unwritten(on(dtype=torch.int64, device="cpu"))
