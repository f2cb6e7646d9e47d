"""A forward that cannot be run twice is refused by name, and what fails in between leaves nothing half there."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from sp_lightning.capabilities.activations.offload import Offload
from sp_lightning.capabilities.activations.policy import Remedies
from sp_lightning.capabilities.activations.recompute import Unrepeatable
from sp_lightning.core.torch_compat.private import current_graph_task
from tests.support.models import Module, Stack, twice, vectors
from tests.support.repeated_block import Block
from tests.support.runs import assert_same, fit, superpipeline
from tests.support.simdevice import simulated
from tests.support.tiers import first

pytestmark = pytest.mark.usefixtures("everything_is_worth_moving")

# ---------------------------------------------------------------------- what cannot be put back


class WritesWeight(Block):
    def factor(self, x: Tensor) -> float:
        with torch.no_grad():
            self.inner.bias.mul_(0.9)
        return 1.0


class WritesWeightData(Block):
    def factor(self, x: Tensor) -> float:
        self.inner.bias.data.mul_(0.9)
        return 1.0


class WritesInput(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(torch.relu_(x))


class RunsBackward(Block):
    def factor(self, x: Tensor) -> float:
        self.inner(x.detach()).square().mean().backward()
        return 1.0


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.parametrize(
    ("block", "said"),
    [
        (WritesWeight, r"The forward of 'net.blocks.0' writes its parameter 'inner.bias', and cannot be run again"),
        (WritesWeightData, r"The forward of 'net.blocks.0' writes its parameter 'inner.bias'"),
        (
            RunsBackward,
            r"The forward of 'net.blocks.0' runs a backward that gives its parameter 'inner.weight' a gradient",
        ),
        (WritesInput, r"The forward of 'net.blocks.0' writes a tensor of shape \(4, 16\) that it is given"),
    ],
)
def test_writes_that_cannot_be_undone_are_refused(block: type[nn.Module], said: str) -> None:
    with pytest.raises(
        Unrepeatable, match=f"{said}.*" + r"activations=\{\"net.blocks.0\": \"offload\", \"\*\*\": \"recompute\"\}"
    ):
        fit(twice(block), vectors(), superpipeline(activations="recompute"))
    for mode in ("keep", "offload"):
        fit(twice(block), vectors(1), superpipeline(activations=mode))  # as on plain Lightning


class RaisesInBackward(Block):
    def forward(self, x: Tensor) -> Tensor:
        if current_graph_task() != -1:
            raise LookupError("one value per batch")
        return super().forward(x)


@pytest.mark.rest("takes tenths of a second")
def test_an_error_of_the_second_run_says_so() -> None:
    with pytest.raises(LookupError, match="one value per batch") as raised:
        fit(twice(RaisesInBackward), vectors(), superpipeline(activations="recompute"))
    assert "'net.blocks.4' ran again in backward" in raised.value.__notes__[0]


def compiled(source: str) -> Any:
    """A function of TorchScript that has never been called: its first call is another one than those that follow."""
    return torch.jit.CompilationUnit(f"def scripted(x: Tensor, y: Tensor) -> Tensor:\n    return {source}\n").scripted


class ScriptedInTheMiddle(Block):
    def __init__(self) -> None:
        super().__init__()
        self.gate = compiled("torch.sigmoid(x) * y")

    def factor(self, x: Tensor) -> Any:
        return torch.tanh(self.gate(self.inner(x), x))


class ScriptedAtTheEnd(Block):
    """As schnetpack sums the messages of atoms."""

    def __init__(self) -> None:
        super().__init__()
        self.sum = compiled("x.new_zeros(x.shape).index_add(0, torch.arange(x.size(0)), x)")

    def forward(self, x: Tensor) -> Any:
        return self.sum(super().forward(x), x)


class ScriptedModule(Block):
    def __init__(self) -> None:
        super().__init__()
        self.gelus = torch.jit.script(nn.Sequential(nn.GELU(), nn.Sigmoid()))

    def factor(self, x: Tensor) -> Any:
        return self.gelus(x)


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
@pytest.mark.parametrize(
    ("block", "name"), [(ScriptedInTheMiddle, "scripted"), (ScriptedAtTheEnd, "scripted"), (ScriptedModule, "forward")]
)
def test_what_torchscript_saves_is_not_recomputed(block: type[nn.Module], name: str) -> None:
    """The gradients of the first step were wrong without a word, or TorchScript raised an error without a message.

    TorchScript profiles the first call of a function and optimizes it for the calls that follow. The second run of a layer
    then saved the tensors of another graph in the place of those of the first run. Where the function was the last thing in
    a layer, the exception by which torch's checkpoint ends the second run was lost in TorchScript's interpreter.
    """
    with pytest.raises(Unrepeatable, match=f"The forward of 'net.blocks.0' calls '{name}' in TorchScript, which saves"):
        fit(twice(block), vectors(), superpipeline(activations="recompute"))
    remedy = {"net.blocks.*": "offload", "**": "recompute"}
    assert_same(fit(twice(block), vectors(), superpipeline(activations=remedy)), fit(twice(block), vectors()))


class ScriptedMask(Block):
    def __init__(self) -> None:
        super().__init__()
        self.mask = compiled("(x > 0).to(y.dtype) * 2 + (y < x)")

    def factor(self, x: Tensor) -> Any:
        return self.mask(x.detach(), x.detach().flip(0))


@pytest.mark.rest("takes tenths of a second")
def test_torchscript_that_saves_nothing_is_recomputed() -> None:
    ours = fit(twice(ScriptedMask), vectors(), superpipeline(activations="recompute"))
    assert_same(ours, fit(twice(ScriptedMask), vectors()))


class WritesAnother(Block):
    """Writes a weight of a layer that it holds out of sight, in a list."""

    def __init__(self, write: Callable[[Any], None]) -> None:
        super().__init__()
        self.write = write
        self.others: list[Any] = []

    def forward(self, x: Tensor) -> Tensor:
        for other in self.others:
            self.write(other)
        return super().forward(x)


class WritesAnotherLast(WritesAnother):
    """Nothing is saved for backward after the write, so that torch stops the second run before it."""

    def forward(self, x: Tensor) -> Tensor:
        output = Block.forward(self, x)
        for other in self.others:
            self.write(other)
        return output


def _multiply(other: Any) -> None:
    with torch.no_grad():
        other.weight.mul_(0.9)


def _multiply_data(other: Any) -> None:
    other.weight.data.mul_(0.9)


def _multiply_all(other: Any) -> None:
    torch._foreach_mul_([other.weight.data], 0.9)


def _multiply_a_view(other: Any) -> None:
    other.weight.detach()[0].mul_(0.9)


def _exchange(other: Any) -> None:
    other.weight.data = other.weight.data * 0.9


def _make_ones(other: Any) -> None:
    with torch.no_grad():
        other.weight.fill_(1.0)


def writes_another(write: Callable[[Any], None], target: int = 3, kind: type = WritesAnother) -> Callable[[], Module]:
    """Makes a module whose second block writes a weight of another one."""

    def make() -> Module:
        stack = Stack()
        blocks = [kind(write) for _ in range(5)]
        blocks[1].others = [blocks[target].inner]
        stack.blocks = nn.ModuleList(blocks)
        return Module(stack)

    return make


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.parametrize("resident", [(), ("net.blocks.3",)], ids=["moves", "stays"])
@pytest.mark.parametrize(
    "write",
    first(
        [_multiply, _multiply_data, _multiply_all, _multiply_a_view, _exchange],
        _multiply_data,
        _exchange,
        why="writes that torch counts are found by the version, as those of a forward's own weights are",
    ),
)
def test_a_forward_that_writes_a_weight_of_another_layer_is_refused(
    write: Callable[[Any], None], resident: Any
) -> None:
    make, remedy = writes_another(write), {"net.blocks.1": "offload", "**": "recompute"}
    said = "The forward of 'net.blocks.1' writes 'net.blocks.3.inner.weight', a weight outside of it, and cannot be run again"
    with pytest.raises(Unrepeatable, match=said) as refused:
        fit(make, vectors(), superpipeline(k=1, activations="recompute", keep_on_gpu=resident))
    assert f"activations={json.dumps(remedy)}" in str(refused.value)
    ours = fit(make, vectors(), superpipeline(k=1, activations=remedy, keep_on_gpu=resident))
    assert_same(ours, fit(make, vectors()))


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.parametrize(
    "make",
    [writes_another(_make_ones), writes_another(_multiply, kind=WritesAnotherLast)],
    ids=["the same values", "behind what is saved"],
)
def test_writes_elsewhere_that_show_once_are_equal(make: Callable[[], Module]) -> None:
    assert_same(fit(make, vectors(), superpipeline(k=1, activations="recompute")), fit(make, vectors()))


class GivesAnother(WritesAnother):
    """Gives a weight of another layer a gradient, without a call of that layer."""

    def __init__(self) -> None:
        super().__init__(lambda other: other.weight.square().mean().backward())


def gives_another() -> Module:
    stack = Stack()
    stack.blocks = nn.ModuleList(GivesAnother() for _ in range(5))
    giver: Any = stack.blocks[1]
    giver.others = [stack.blocks[3].inner]
    return Module(stack)


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.parametrize("resident", [(), ("net.blocks.3",)], ids=["moves", "stays"])
def test_a_forward_that_gives_another_layer_gradients_is_refused(resident: Any) -> None:
    remedy = {"net.blocks.1": "offload", "**": "recompute"}
    said = "The forward of 'net.blocks.1' runs a backward that gives 'net.blocks.3.inner.weight' a gradient, and cannot"
    with pytest.raises(Unrepeatable, match=said):
        fit(gives_another, vectors(), superpipeline(k=1, activations="recompute", keep_on_gpu=resident))
    ours = fit(gives_another, vectors(), superpipeline(k=1, activations=remedy, keep_on_gpu=resident))
    assert_same(ours, fit(gives_another, vectors()))


class WritesBetween(Module):
    """Where plain autograd does not mind: it has not saved the bias."""

    def loss(self, batch: Any) -> Tensor:
        loss = super().loss(batch)
        with torch.no_grad():
            self.net.blocks[2].inner.bias.mul_(0.5)  # type: ignore[index, union-attr]
        return loss


def test_weights_that_are_written_between_are_refused() -> None:
    said = r"'inner.bias' of 'net.blocks.2' has been modified by an inplace operation between forward and backward\."
    with pytest.raises(Unrepeatable, match=said + r".*activations=\{\"net.blocks.2\": \"offload\""):
        fit(lambda: WritesBetween(Stack()), vectors(), superpipeline(activations="recompute"))


class Masks(Module):
    """Keeps pruned weights at zero, in a hook that Lightning calls between forward and backward."""

    def on_before_zero_grad(self, optimizer: Any) -> None:
        with torch.no_grad():
            for block in self.net.blocks:  # type: ignore[union-attr]
                block.inner.bias.mul_(0.5)


@pytest.mark.parametrize(
    ("own", "remedy"),
    [
        ("recompute", {"net.blocks.*": "offload", "**": "recompute"}),
        (
            {"net.blocks.2": "keep", "net.head": "offload", "net.blocks.*": "recompute", "**": "recompute"},
            {"net.blocks.0": "offload", "net.blocks.1": "offload", "net.blocks.3": "offload", "net.blocks.4": "offload",
             "net.blocks.2": "keep", "net.head": "offload", "**": "recompute"},
        ),
    ],
    ids=["one mode", "patterns"],
)  # fmt: skip
def test_the_remedy_names_all_written_units_and_keeps_the_users_patterns(own: Any, remedy: dict[str, str]) -> None:
    """One run for each unit was necessary."""
    with pytest.raises(Unrepeatable, match=r"Also changed: net\.blocks\.0, net\.blocks\.1, ") as raised:
        fit(lambda: Masks(Stack()), vectors(), superpipeline(k=1, activations=own))
    named = re.search(r"activations=(\{.*?\})", str(raised.value))
    assert named is not None
    assert list(json.loads(named[1]).items()) == list(remedy.items())  # the first pattern that matches decides
    ours = fit(lambda: Masks(Stack()), vectors(), superpipeline(k=1, activations=json.loads(named[1])))
    assert_same(ours, fit(lambda: Masks(Stack()), vectors()))


class Table(nn.Embedding):
    """Looks up rows. Only torch's own class is known to need no second forward."""


class Normalizes(Module):
    """Normalizes an embedding, the only weight of its unit, in a hook that Lightning calls between forward and backward."""

    def __init__(self) -> None:
        super().__init__(nn.Sequential(Table(8, 16), Stack()))

    def on_before_zero_grad(self, optimizer: Any) -> None:
        weight = self.net[0].weight
        weight.data = nn.functional.normalize(weight.data, dim=-1)


@pytest.mark.rest("takes tenths of a second")
def test_the_remedy_for_a_written_unit_names_the_unit_and_works() -> None:
    batches = [torch.arange(8)] * 3
    with pytest.raises(RuntimeError, match=r"by a hook \(on_before_zero_grad\) or an optimizer") as raised:
        fit(Normalizes, batches, superpipeline(k=1, activations="recompute"))
    named = re.search(r"activations=(\{.*?\})", str(raised.value))
    assert named is not None
    ours = fit(Normalizes, batches, superpipeline(k=1, activations=json.loads(named[1])))
    assert_same(ours, fit(Normalizes, batches))


class StepsBetween(Module):
    """A fused step bumps no version, so that plain autograd goes on, with what it has saved."""

    def __init__(self) -> None:
        super().__init__(Stack())
        self.automatic_optimization = False

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, fused=True)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        loss = self.loss(batch)
        self.manual_backward(loss, retain_graph=True)
        optimizer.step()
        self.manual_backward(loss)
        optimizer.step()


@pytest.mark.rest("takes tenths of a second")
def test_a_step_between_two_backwards_is_refused() -> None:
    said = r"'weight' of 'net.head' has been modified by an inplace operation between two backwards of one graph.*an optimizer"
    with pytest.raises(Unrepeatable, match=said + r".*activations=\"offload\"\)") as refused:
        fit(StepsBetween, vectors(), superpipeline(k=1, activations="recompute"))
    assert "net.head" not in str(refused.value).partition("activations=")[2]  # all layers need it
    for mode in ("keep", "offload"):
        assert_same(fit(StepsBetween, vectors(), superpipeline(k=1, activations=mode)), fit(StepsBetween, vectors()))


class WritesUnseenBetween(StepsBetween):
    """Writes of which torch shows nothing, between two backwards: what was saved stays as it was on plain Lightning."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        loss = self.loss(batch)
        self.manual_backward(loss, retain_graph=True)
        for block in self.net.blocks:  # type: ignore[union-attr]
            block.inner.bias.data.mul_(0.9)
        self.manual_backward(loss)
        optimizer.step()


@pytest.mark.rest("takes tenths of a second")
def test_an_unseen_write_between_two_backwards_is_refused() -> None:
    """The gradients of the second backward were wrong without a word."""
    with pytest.raises(Unrepeatable, match=r"The forward of 'net.blocks.4' computed other values in backward"):
        fit(WritesUnseenBetween, vectors(), superpipeline(k=1, activations="recompute"))
    ours = fit(WritesUnseenBetween, vectors(), superpipeline(k=1, activations="offload"))
    assert_same(ours, fit(WritesUnseenBetween, vectors()))


class Squashes(Block):
    """Its first operator saves its output alone."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.inner(torch.sigmoid(x)))


class AddsInPlace(Stack):
    """Residual connections that write what the layers were given."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Squashes() for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x += block(x)
        return self.head(x)


@pytest.mark.rest("takes tenths of a second")
def test_an_input_that_is_written_after_the_layer_is_refused() -> None:
    """torch's own error names no layer."""
    said = r"A tensor that 'net.blocks.4' was given has been written since.*Write x = x \+ layer\(x\) in place of x \+= layer"
    with pytest.raises(Unrepeatable, match=said) as refused:
        fit(lambda: Module(AddsInPlace()), vectors(), superpipeline(k=1, activations="recompute"))
    assert 'activations={"net.blocks.4": "offload", "**": "recompute"}' in str(refused.value)
    for mode in ("keep", "offload"):
        ours = fit(lambda: Module(AddsInPlace()), vectors(), superpipeline(k=1, activations=mode))
        assert_same(ours, fit(lambda: Module(AddsInPlace()), vectors()))


@pytest.mark.parametrize(
    "make",
    [
        twice(WritesWeight), twice(ScriptedInTheMiddle), writes_another(_multiply), gives_another,
        lambda: WritesBetween(Stack()), lambda: Module(AddsInPlace()),
    ],
    ids=["weight", "TorchScript", "another weight", "another gradient", "between", "input"],
)  # fmt: skip
@pytest.mark.usefixtures("nothing_fits")
def test_auto_trains_what_cannot_run_twice(make: Callable[[], Module]) -> None:
    """It must not end a run that plain Lightning finishes."""
    batches = [*vectors(), *vectors()]
    with simulated(capacity=60_000):
        strategy = superpipeline(k=1, k_prime=1)
        ours = fit(make, batches, strategy)
    assert_same(ours, fit(make, batches))
    assert "offload" in strategy.activations.values()


# ---------------------------------------------------------------------- faults


class Bounded(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return torch.tanh(weight)


class CachedParametrizations(Module):
    """torch keeps parametrized weights in a global dictionary, so that the second call of a layer saves other tensors."""

    def __init__(self) -> None:
        super().__init__(Stack(3))
        for block in self.net.blocks:
            parametrize.register_parametrization(block.inner, "weight", Bounded())

    def loss(self, batch: Any) -> Tensor:
        with parametrize.cached():
            return super().loss(batch) + super().loss(batch + 1)


@pytest.mark.rest("takes tenths of a second")
def test_weights_that_torch_caches_are_no_part_of_a_second_forward() -> None:
    said = r"(?s)forward of 'net\.blocks\.\d' computed other values.*parametrize\.cached\(\).*\"offload\""
    with pytest.raises(Unrepeatable, match=said):
        fit(CachedParametrizations, vectors(), superpipeline(activations="recompute"))
    offloaded = {"net.blocks.*": "offload", "**": "recompute"}
    ours = fit(CachedParametrizations, vectors(), superpipeline(activations=offloaded))
    assert_same(ours, fit(CachedParametrizations, vectors()))


class Retries(Module):
    """Catches an error in backward, and goes backward again."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__(net)
        self.automatic_optimization = False
        self.retried = 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        optimizer: Any = self.optimizers()
        loss = self.loss(batch)
        try:
            self.manual_backward(loss, retain_graph=True)
        except torch.OutOfMemoryError:
            self.retried += 1
            optimizer.zero_grad()
            self.manual_backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return loss


@pytest.mark.rest("takes tenths of a second")
def test_an_error_while_activations_come_back_leaves_none_half_there(monkeypatch: pytest.MonkeyPatch) -> None:
    bring = Offload._begin_return
    failed: list[bool] = []

    def fails_once(self: Offload, storages: Any) -> None:
        device = self._device
        if len(storages) > 1 and not failed and all(each.source is None and each.returned is None for each in storages):
            failed.append(True)
            given = iter([device.empty])

            def empty(nbytes: int) -> Tensor:
                make = next(given, None)
                if make is None:
                    raise torch.OutOfMemoryError("no room")
                return make(nbytes)

            with monkeypatch.context() as context:
                context.setattr(device, "empty", empty)
                bring(self, storages)
        bring(self, storages)

    reference = fit(lambda: Retries(Stack()), vectors())
    monkeypatch.setattr(Offload, "_begin_return", fails_once)
    ours = fit(lambda: Retries(Stack()), vectors(), superpipeline(activations="offload"))
    assert_same(ours, reference)
    assert failed
    assert ours.module.retried == 0, "what failed was one unit ahead, and came on demand"


def test_patterns_with_another_name_or_without_effect() -> None:
    stack = Stack()
    stack.alias = stack.blocks[1]
    strategy = superpipeline(activations={"net.alias": "offload"})
    fit(lambda: Module(stack), vectors(1), strategy)
    assert [name for name, mode in strategy.activations.items() if mode == "offload"] == ["net.blocks.1"]
    shadowed: Any = {"net.blocks": "offload", "net.blocks.1": "keep"}
    with pytest.raises(ValueError, match=r"'net.blocks.1': 'keep'\} decides nothing: .* Put 'net.blocks.1' before"):
        fit(lambda: Module(Stack()), vectors(1), superpipeline(activations=shadowed))


# ---------------------------------------------------------------------- modules of other packages


class EightBits(nn.Module):
    """A frozen layer of bitsandbytes in 8 bits, and an adapter beside it."""

    def __init__(self) -> None:
        super().__init__()
        bnb = pytest.importorskip("bitsandbytes")
        self.base = bnb.nn.Linear8bitLt(16, 16, has_fp16_weights=False).requires_grad_(False)
        self.base.weight = self.base.weight.to("cpu")  # which quantises
        self.adapter = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.base(x) + self.adapter(x))


def with_eight_bits() -> Module:
    return Module(nn.Sequential(nn.Linear(16, 16), *(EightBits() for _ in range(3)), nn.Linear(16, 16)))


@pytest.mark.rest("takes tenths of a second")
def test_layers_of_bitsandbytes_name_an_option_that_works() -> None:
    """The first forward moves the 8-bit weights, so the second one computes with other tensors."""
    with pytest.raises(
        Unrepeatable, match=r"'net.\d' computed other values .* for all layers, activations=\"offload\""
    ):
        fit(with_eight_bits, vectors(), superpipeline(activations="recompute"))
    apart = {"net.1": "offload", "net.2": "offload", "net.3": "offload", "**": "recompute"}
    for modes in ("offload", apart):
        ours = fit(with_eight_bits, vectors(), superpipeline(activations=modes))
        assert_same(ours, fit(with_eight_bits, vectors()))


class ReadsAfterwards(Block):
    """Other code reads the whole weight after the linear layer, so the second run finds it on the device."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 0.01 * self.inner.weight.square().mean()


class ComputesWithAnother(nn.Module):
    """The second run computes with other values of the weight's form."""

    runs: ClassVar[list[None]] = []

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16, bias=False).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        self.runs.append(None)
        weight = self.inner.weight
        if len(self.runs) > 1:
            weight = (weight + 1).to(torch.bfloat16)
        return x + nn.functional.linear(x, weight)


def of(block: type[nn.Module], depth: int = 1) -> Callable[[], Any]:
    return lambda: Module(nn.Sequential(nn.Linear(16, 16), *(block() for _ in range(depth)), nn.Linear(16, 16)))


@pytest.mark.rest("takes tenths of a second")
def test_a_cast_may_be_autocasts_own_in_the_second_run() -> None:
    """It raised: the weight's place in the slot was compared with a tensor elsewhere, whose values are the same."""
    options: dict[str, Any] = {"precision": "bf16-mixed"}
    ours = fit(of(ReadsAfterwards, 3), vectors(), superpipeline(k=1, activations="recompute"), **options)
    assert_same(ours, fit(of(ReadsAfterwards, 3), vectors(), **options))


def test_another_tensor_in_place_of_a_cast_is_noticed() -> None:
    ComputesWithAnother.runs.clear()
    strategy = superpipeline(k=1, activations="recompute", layers=["net.1"])
    with pytest.raises(Unrepeatable, match=r"'net\.1' computed other values"):
        fit(of(ComputesWithAnother), vectors(1), strategy, precision="bf16-mixed")


@pytest.mark.parametrize(
    ("concerned", "modes"),
    [(range(12), '"offload"'), (range(9), '"net.8": "offload", "**": "recompute"}')],
    ids=["all", "not all"],
)
def test_many_blocks_are_a_pattern_if_it_matches_no_others(concerned: range, modes: str) -> None:
    units = {f"net.{at}": nn.Linear(1, 1) for at in range(12)}
    root = nn.ModuleDict({"net": nn.ModuleList(units.values())})
    assert modes in Remedies(root, units, "recompute").without([f"net.{at}" for at in concerned])
