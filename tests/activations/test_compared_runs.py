"""A forward that computes other values in backward than it did in forward raises an error, whatever the reason is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode

from sp_lightning import SuperpipelineStrategy
from sp_lightning.capabilities.activations.fingerprints import SavedRun, differences, may_be_unwritten
from sp_lightning.capabilities.activations.host_ring import HostRing
from sp_lightning.capabilities.activations.recompute import Unrepeatable
from tests.support.models import Module, Stack, vectors
from tests.support.runs import assert_same, fit, fused, superpipeline
from tests.support.simdevice import simulated

pytestmark = pytest.mark.usefixtures("everything_is_worth_moving")

# ---------------------------------------------------------------------- what surrounds the forward is gone in backward


class Norm(nn.LayerNorm):
    pass


class Louder(Norm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 1.5


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner, self.act, self.scale = Norm(16), nn.Linear(16, 16), nn.Tanh(), 1.0

    def forward(self, x: Tensor) -> Tensor:
        return x + self.act(self.inner(self.norm(x))) * self.scale


def blocks() -> Module:
    stack = Stack()
    stack.blocks = nn.ModuleList(Block() for _ in range(5))
    return Module(stack)


def louder(module: Any, args: Any, output: Tensor) -> Tensor:
    return output * 1.5


def louder_inputs(module: Any, args: Any) -> Any:
    return tuple(each * 1.5 for each in args)


class LouderLinear(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result * 1.5 if func is nn.functional.linear else result


@contextmanager
def handle(made: Any) -> Iterator[None]:
    try:
        yield
    finally:
        made.remove()


@contextmanager
def exchanged(owner: Any, **attributes: Any) -> Iterator[None]:
    before = {name: getattr(owner, name) for name in attributes}
    for name, value in attributes.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)


@contextmanager
def in_evaluation(block: Any) -> Iterator[None]:
    block.eval()
    try:
        yield
    finally:
        block.train()


def patched(owner: Any, name: str) -> Any:
    """``owner``'s function gives half as much again."""
    own = getattr(owner, name)
    return mock.patch.object(owner, name, lambda *args, **options: own(*args, **options) * 1.5)


def of(norm: Any, hook: Callable[..., Any]) -> Callable[..., Any]:
    return lambda module, *rest: hook(module, *rest) if module is norm else None


AROUND: dict[str, Callable[[Any], Any]] = {
    "hook": lambda block: handle(block.norm.register_forward_hook(louder)),
    "pre-hook": lambda block: handle(block.inner.register_forward_pre_hook(louder_inputs)),
    "global hook": lambda block: handle(register_module_forward_hook(of(block.norm, louder))),
    "global pre-hook": lambda block: handle(register_module_forward_pre_hook(of(block.norm, louder_inputs))),
    "forward of an instance": lambda block: patched(block.norm, "forward"),
    "forward of a class": lambda block: patched(Norm, "forward"),
    "class": lambda block: exchanged(block.norm, __class__=Louder),
    "function": lambda block: patched(nn.functional, "layer_norm"),
    "function mode": lambda block: LouderLinear(),
    "hook on the layer": lambda block: handle(block.register_forward_hook(louder)),
    "pre-hook on the layer": lambda block: handle(block.register_forward_pre_hook(louder_inputs)),
    "backward hook": lambda block: handle(block.inner.register_full_backward_hook(lambda _, g, out: (g[0] * 1.5,))),
    "attribute": lambda block: exchanged(block, scale=1.5),
    "attribute of torch's": lambda block: exchanged(block.norm, eps=0.5),
    "submodule": lambda block: exchanged(block, act=nn.ReLU()),
    "evaluation": in_evaluation,
}
EQUAL = {
    "hook on the layer",
    "pre-hook on the layer",
    "backward hook",
    "attribute",
    "attribute of torch's",
    "evaluation",
}


class Steered(Module):
    """Something is around the forward of its blocks, as with activation steering and ablations."""

    def __init__(self, kind: str) -> None:
        super().__init__(blocks().net)
        self.kind = kind

    def loss(self, batch: Any) -> Tensor:
        with AROUND[self.kind](self.net.blocks[1]):  # type: ignore[index, union-attr]
            return super().loss(batch)


RAISE = [kind for kind in AROUND if kind not in EQUAL]


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.parametrize("kind", RAISE)
def test_what_is_around_a_forward_alone_raises(kind: str) -> None:
    """Gradients were wrong without a word, as torch's own checkpoint leaves them."""
    with pytest.raises(Unrepeatable, match=r"of 'net\.blocks\.\d'"):
        fit(lambda: Steered(kind), vectors(), superpipeline(k=1, activations="recompute"))


@pytest.mark.long("takes a second or more")
@pytest.mark.parametrize("kind", sorted(EQUAL))
def test_what_changes_nothing_that_is_saved_is_equal(kind: str) -> None:
    ours = fit(lambda: Steered(kind), vectors(), superpipeline(k=1, activations="recompute"))
    assert_same(ours, fit(lambda: Steered(kind), vectors()))


def test_offload_without_room_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Activations for which the host had no room were computed again, which the user has not asked for."""
    monkeypatch.setattr(HostRing, "free_bytes", -1)
    ours = fit(lambda: Steered("hook"), vectors(), superpipeline(k=1, activations="offload"))
    assert_same(ours, fit(lambda: Steered("hook"), vectors()))


@pytest.mark.long("takes a second or more")
def test_it_names_the_layer_and_what_to_paste() -> None:
    remedy = {"net.blocks.1": "offload", "**": "recompute"}
    said = r"The forward of 'net.blocks.1' computed other values in backward than in forward. It depends on what has changed"
    with pytest.raises(Unrepeatable, match=said) as raised:
        fit(lambda: Steered("hook"), vectors(), superpipeline(activations="recompute"))
    assert 'activations={"net.blocks.1": "offload", "**": "recompute"}' in str(raised.value)
    ours = fit(lambda: Steered("hook"), vectors(), superpipeline(activations=remedy))
    assert_same(ours, fit(lambda: Steered("hook"), vectors()))


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


class AsksForGradients(Steered):
    """Through ``torch.autograd.grad``, which only returns them."""

    def __init__(self) -> None:
        super().__init__("hook")
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        loss = self.loss(batch)
        torch.autograd.grad(loss, list(self.net.parameters()))


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.parametrize("device", ["cpu", "simulated"])
def test_returned_gradients_are_not_wrong(device: str) -> None:
    with ExitStack() as contexts:
        if device == "simulated":
            contexts.enter_context(simulated())
        with pytest.raises(Unrepeatable, match=r"of 'net.blocks.1' computed other values"):
            fit(AsksForGradients, vectors(1), superpipeline(k=1, activations="recompute"))


class Catches(Steered):
    """Catches the error, and goes on without what was around the forward."""

    def __init__(self) -> None:
        super().__init__("hook")
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        self.kind = "hook"
        try:
            self.manual_backward(self.loss(batch))
        except Unrepeatable:
            self.caught = True
        optimizer.zero_grad()
        self.kind = "attribute"
        self.manual_backward(self.loss(batch))
        optimizer.step()


@pytest.mark.long("takes a second or more")
@pytest.mark.parametrize("device", ["cpu", "simulated"])
def test_a_step_may_go_on_after_the_error(device: str) -> None:
    with ExitStack() as contexts:
        if device == "simulated":
            contexts.enter_context(simulated())
        ours = fit(Catches, vectors(), superpipeline(k=1, activations="recompute"), recorded="losses")
    assert ours.module.caught
    assert_same(ours, fit(Catches, vectors(), recorded="losses"))


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


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.LSTM(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)[0]


@pytest.mark.long("takes a second or more")
def test_a_recurrent_layer_is_repeatable() -> None:
    """On a CPU it saves a workspace that it has not written as a whole."""

    def make() -> Module:
        stack = Stack()
        stack.blocks = nn.ModuleList(Recurrent() for _ in range(5))
        return Module(stack)

    batches = [torch.randn(70, 16) for _ in range(3)]
    assert_same(fit(make, batches, superpipeline(k=1, activations="recompute")), fit(make, batches))
