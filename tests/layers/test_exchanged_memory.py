"""Weights that are given other memory, or share it: as plain autograd has them, or refused by name."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import replace
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint

from sp_lightning.layers.layer import Kind, StreamedLayer
from sp_lightning.layers.write_guard import guard_of
from tests.support.data_writes import BLOCKS, Convolutions, Linears, Writes, multiply
from tests.support.models import Module, vectors
from tests.support.poison import poisoned
from tests.support.runs import assert_equal, assert_same, fit, loader, superpipeline, trainer_for
from tests.support.simdevice import simulated
from tests.support.tiers import first

pytestmark = pytest.mark.usefixtures("everything_is_worth_moving")


class TransposesInStep(Module):
    """``weight.data = weight.data.t()``: the same memory in another order, which the slot has no place for."""

    def loss(self, batch: Any) -> Tensor:
        first = super().loss(batch)
        for block in self.net:
            block.first.weight.data = block.first.weight.data.t()
        return first + super().loss(batch)


@pytest.mark.parametrize("resident", [[], ["net"]])
def test_another_order_inside_a_step_is_refused(resident: list[str]) -> None:
    """The order was dropped without a word; kernels choose by it."""

    def make() -> Module:
        return TransposesInStep(nn.Sequential(*(Linears() for _ in range(4))))

    with pytest.raises(
        RuntimeError, match=r"'net\.0\.first\.weight' has strides \(16, 1\) and was given .*\(1, 16\).*empty_like"
    ):
        fit(make, vectors(), superpipeline(k=2, k_prime=1, keep_on_gpu=resident))


class BlendsInPlace(Module):
    """``pt.data = …; pt.data.add_(p.data)``: reading ``p`` let go of ``pt``'s layer, and the write went where nobody looked."""

    def __init__(self, trained: bool, before: bool) -> None:
        super().__init__(nn.Sequential(*(Linears() for _ in range(4))))
        self.target = nn.Sequential(*(Linears() for _ in range(4))).requires_grad_(trained)
        self.before = before

    def blend(self) -> None:
        for p, pt in zip(self.net.parameters(), self.target.parameters(), strict=True):
            pt.data = pt.data * 0.9
            pt.data.add_(p.data, alpha=0.1)

    def loss(self, batch: Any) -> Tensor:
        if self.before:
            self.blend()
        loss = F.mse_loss(self.net(batch), self.target(batch))
        if not self.before:
            self.blend()
        return loss


@pytest.mark.rest("averages and writes between batches are in the first tier")
@pytest.mark.parametrize("precision", first(["32-true", "bf16-mixed"], "bf16-mixed", why="the same in one precision"))
@pytest.mark.parametrize(("trained", "before"), [(True, True), (True, False), (False, True), (False, False)])
def test_writes_to_memory_that_a_weight_was_given(trained: bool, before: bool, precision: Any) -> None:
    def make() -> Module:
        return BlendsInPlace(trained, before)

    plain = fit(make, vectors(), precision=precision)
    for options in ({"k": 1}, {"k": 8}, {"k": 1, "activations": "offload"}, {"k": 1, "keep_on_gpu": ["target"]}):
        assert_same(fit(make, vectors(), superpipeline(k_prime=1, **options), precision=precision), plain)
    with simulated():
        assert_same(fit(make, vectors(), superpipeline(k=1, k_prime=1), precision=precision), plain)


def test_a_detached_weight_that_is_written_before_the_forward_is_no_reason_to_refuse() -> None:
    """The write was counted twice: by its version, and when the host took it over, which may be after the first run."""

    class Blends(Module):
        def loss(self, batch: Any) -> Tensor:
            p, q = self.net[0].first.weight, self.net[2].first.weight
            mine, theirs = p.detach(), q.detach()
            mine.add_(theirs, alpha=0.1)
            p.data = p.data * 0.9
            with torch.no_grad():
                p.add_(q, alpha=0.1)
            return super().loss(batch)

    def make() -> Module:
        return Blends(nn.Sequential(*(Linears() for _ in range(4))))

    for precision in ("32-true", "bf16-mixed"):
        plain = fit(make, vectors(), precision=precision)
        for activations in ("keep", "recompute"):
            ours = fit(make, vectors(), superpipeline(k=2, k_prime=1, activations=activations), precision=precision)
            assert_same(ours, plain)


class WritesWhatItWasGiven(Writes):
    """Exchanged before the forward, written in place after it: backward sees that, as the memory is the same."""

    def loss(self, batch: Any) -> Tensor:
        for p in self.net.parameters():
            p.data = p.data * 0.99
        return super().loss(batch)


class StandardizesInHook(Writes):
    """Weight standardisation before each call: what the call saves lies in the memory that the weight was given."""

    def __init__(self, block: type[nn.Module], write: Callable[[Any], None]) -> None:
        super().__init__(block, write)
        for layer in self.net:
            layer.register_forward_pre_hook(self.standardize)

    @staticmethod
    def standardize(layer: Any, _: Any) -> None:
        weight = layer.first.weight
        weight.data = (weight.data - weight.data.mean()) / (weight.data.std() + 0.5)


def add_then_multiply(p: Any) -> None:
    p.data += 0.1  # which ends in p.data = p.data
    p.data.mul_(0.5)


def hold_and_put_back(p: Any) -> None:
    before = p.data
    p.data = torch.zeros_like(before)
    p.data.sum()
    p.data = before


@pytest.mark.rest("writes and averages are in the first tier")
@pytest.mark.parametrize("write", [multiply, add_then_multiply, hold_and_put_back])
@pytest.mark.parametrize("block", ["linear", "convolution"])
def test_the_same_memory_is_the_same_weight(block: str, write: Callable[[Any], None]) -> None:
    for case in (Writes, WritesWhatItWasGiven, StandardizesInHook):

        def make(case: type[Writes] = case) -> Module:
            return case(BLOCKS[block], write)

        plain = fit(make, vectors())
        for options in ({"k": 1}, {"k": 4}, {"k": 1, "activations": "offload"}, {"k": 1, "keep_on_gpu": ["net.3"]}):
            assert_same(fit(make, vectors(), superpipeline(k_prime=1, **options)), plain)
        with poisoned():
            assert_same(fit(make, vectors(), superpipeline(k=1, k_prime=1)), plain)


@pytest.mark.parametrize("resident", [[], ["net.3"], ["net.2", "net.3"]])
def test_tying_inside_a_step_is_refused(resident: list[str]) -> None:
    """Plain ties the two for good; here one would get a copy, and the two would part."""

    class Ties(Module):
        def loss(self, batch: Any) -> Tensor:
            loss = super().loss(batch)
            self.net[2].second.weight.data = self.net[3].second.weight.data
            return loss

    with pytest.raises(
        RuntimeError,
        match=r"'net\.2\.second\.weight' was given the memory of 'net\.3\.second\.weight'.*data\.clone\(\)",
    ):
        fit(
            lambda: Ties(nn.Sequential(*(Linears() for _ in range(4)))),
            vectors(),
            superpipeline(k=2, keep_on_gpu=resident),
        )


@pytest.mark.parametrize("places", [(1, 3), (2, 2)])
def test_new_memory_that_two_weights_share_is_refused(places: tuple[int, int]) -> None:
    """Neither has the memory of its layer any more, so each got a copy, and the two parted silently."""

    class Ties(Module):
        def on_train_batch_start(self, *_: Any) -> None:
            one, other = self.net[places[0]].first.weight, self.net[places[1]].second.weight
            one.data = other.data = torch.ones_like(one)

    with pytest.raises(
        RuntimeError, match=r"was given the memory of 'net\.\d\.(first|second)\.weight'.*data\.clone\(\)"
    ):
        fit(lambda: Ties(nn.Sequential(*(Linears() for _ in range(4)))), vectors(), superpipeline(k=2))


class Followed(Module):
    """A moving average, by ``how``, before the forward of each step."""

    def __init__(self, how: str) -> None:
        super().__init__(nn.Sequential(*(Linears() for _ in range(4))))
        self.target = nn.Sequential(*(Linears() for _ in range(4))).requires_grad_(False)
        self.how = how
        self.mine = [list(self.net.parameters()), list(self.target.parameters())]

    def loss(self, batch: Any) -> Tensor:
        new = self.net.state_dict()
        if self.how == "state_dict":
            for name, value in self.target.state_dict().items():
                value.data.copy_(value.data * 0.9 + new[name].data * 0.1)
        elif self.how == "detach":
            for p, pt in zip(self.net.parameters(), self.target.parameters(), strict=True):
                pt.detach().data.lerp_(p.detach(), 0.1)
        else:
            for p, pt in zip(*self.mine, strict=True):
                pt.data = pt.data * 0.9 + p.data * 0.1
        return F.mse_loss(self.net(batch), self.target(batch)) + self.net(batch * 2).square().mean()


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("how", ["state_dict", "detach", "references"])
def test_averages_by_all_ways(how: str, precision: Any) -> None:
    """What ``state_dict()`` gives is detached: writes of its ``.data`` were lost; casts of exchanged weights stayed the old."""

    def make() -> Module:
        return Followed(how)

    plain = fit(make, vectors(), precision=precision)
    # Residents are plain parameters within a step, and nobody notices that they are detached.
    resident = {"keep_on_gpu": ["target"], "debug_writes": how != "references"}
    for options in ({"k": 1}, {"k": 8}, {"k": 2, **resident}):
        assert_same(fit(make, vectors(), superpipeline(k_prime=1, **options), precision=precision), plain)


class WritesBeforeItsStep(Module):
    """Weight noise around the closure: after ``on_train_batch_start``, before ``training_step``."""

    def __init__(self, how: str) -> None:
        super().__init__(nn.Sequential(*(Linears() for _ in range(4))))
        self.how = how

    def shake(self, *_: Any) -> None:
        for p in self.parameters():
            p.data.mul_(0.9)

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        if self.how == "hook":
            self.shake()
        super().optimizer_step(*args, **kwargs)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        shake = self.shake

        class Shakes(torch.optim.SGD):
            def step(self, closure: Any = None) -> Any:
                shake()
                return super().step(closure)

        optimizer = (Shakes if self.how == "optimizer" else torch.optim.SGD)(self.parameters(), lr=0.1)
        if self.how == "pre-hook":
            optimizer.register_step_pre_hook(shake)
        return optimizer


@pytest.mark.parametrize("how", ["hook", "optimizer", "pre-hook"])
def test_writes_between_a_batchs_start_and_its_step(how: str) -> None:
    def make() -> Module:
        return WritesBeforeItsStep(how)

    plain = fit(make, vectors())
    for options in ({"k": 1}, {"k": 4}, {"k": 2, "keep_on_gpu": ["net.0"]}):
        assert_same(fit(make, vectors(), superpipeline(k_prime=1, **options)), plain)
    with simulated():
        assert_same(fit(make, vectors(), superpipeline(k=1, k_prime=1)), plain)


class Sharpness(Module):
    """SAM by hand: weights are moved along the gradient between two backwards of one step."""

    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        moves = [0.1 * p.grad for p in self.parameters()]
        for p, move in zip(self.parameters(), moves, strict=True):
            p.data.add_(move)
        optimizer.zero_grad()
        loss = self.loss(batch)
        self.manual_backward(loss)
        for p, move in zip(self.parameters(), moves, strict=True):
            p.data.sub_(move)
        optimizer.step()
        return loss


@pytest.mark.parametrize("options", [{}, {"keep_on_gpu": ["net.0"]}, {"keep_on_gpu": ["net"]}, {"debug_writes": True}])
def test_weights_that_are_moved_between_two_backwards(options: dict[str, Any]) -> None:
    def make() -> Module:
        return Sharpness(nn.Sequential(*(Linears() for _ in range(4))))

    plain = fit(make, vectors())
    assert_same(fit(make, vectors(), superpipeline(k=2, k_prime=1, **options)), plain)


class Adversarial(Module):
    """FGM by hand: an embedding is moved along its gradient for a second backward, and given its old values as other memory."""

    automatic_optimization = False

    def __init__(self) -> None:
        super().__init__(nn.Sequential(nn.Embedding(20, 16), *(Linears() for _ in range(3))))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        weight: Any = self.net[0].weight
        before = weight.data.clone()
        weight.data.add_(0.5 * weight.grad / weight.grad.norm())
        loss = self.loss(batch)
        self.manual_backward(loss)
        self.net[0].weight.data = before
        optimizer.step()
        return loss


@pytest.mark.parametrize("resident", [[], ["net.0"]])
def test_the_poison_of_tests_changes_no_numbers_itself(resident: list[str]) -> None:
    """It did: memory that a weight was given within a step was adopted into the copy that stood for the hidden block."""
    words = [torch.randint(0, 20, (2, 5), generator=torch.Generator().manual_seed(i)) for i in range(4)]
    plain = fit(Adversarial, words)
    for options in ({"k": 1}, {"k": 3}):
        with poisoned():
            assert_same(fit(Adversarial, words, superpipeline(k_prime=1, keep_on_gpu=resident, **options)), plain)


@pytest.mark.parametrize("what", ["weight", "tied", "module", "pruned", "bias"])
def test_what_is_exchanged_before_its_second_run_is_refused(what: str) -> None:
    from sp_lightning.activations.recompute import Unrepeatable

    class Exchanges(Module):
        def loss(self, batch: Any) -> Tensor:
            loss = super().loss(batch)
            layer = self.net[1]
            if what == "weight":
                layer.second.weight = nn.Parameter(layer.second.weight.detach() * 0.5)
            elif what == "tied":
                layer.second.weight = layer.first.weight
            elif what == "module":
                layer.second = nn.Linear(16, 16)
            elif what == "pruned":
                prune.l1_unstructured(layer.second, "weight", 0.5)
            else:
                layer.second.bias = None
            return loss

    with pytest.raises(Unrepeatable, match=r"'second(\.\w+)?' of 'net\.1' has been exchanged between.*\"offload\""):
        fit(
            lambda: Exchanges(nn.Sequential(*(Linears() for _ in range(4)))),
            vectors(),
            superpipeline(k=2, k_prime=1, activations="recompute"),
        )


class PutsBackOnce(Writes):
    """A weight gets its own memory back in the first step; later ones write it after the forward."""

    steps = 0

    def loss(self, batch: Any) -> Tensor:
        self.steps += 1
        if self.steps == 1:
            for p in self.net.parameters():
                hold_and_put_back(p)
        return super().loss(batch)


def test_what_got_its_own_memory_back_still_does_not_leave() -> None:
    """The residents' memory was counted among what a step had been given, and was offloaded in the next one."""

    def make() -> Module:
        return PutsBackOnce(Linears, multiply)

    options = {"keep_on_gpu": ["**.second"], "activations": "offload"}
    assert_same(fit(make, vectors(), superpipeline(k=1, k_prime=1, **options)), fit(make, vectors()))


class KeepsTheOldMemory(Module):
    """Gives a weight other memory between two steps and keeps the old, as a swap of averages does; writes it in the next."""

    def __init__(self, write: str) -> None:
        super().__init__(nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4))))
        self.write = write

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        weight = self.net[1][0].weight
        if batch_idx == 1:
            self.old = weight.data
            weight.data = weight.data * 0.5

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        weight, other = self.net[1][0].weight, self.net[2][0].weight
        if self.write == "copy":
            weight.data.copy_(other.data)
        else:
            weight.data.mul_(0.9)
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("resident", [(), ("net.1",)])
@pytest.mark.parametrize("write", ["copy", "mul"])
def test_a_block_that_left_its_memory_to_somebody_is_not_out_of_date_for_ever(write: str, resident: Any) -> None:
    batches = [torch.ones(2, 8) * i for i in range(1, 6)]
    strategy = superpipeline(k=1, keep_on_gpu=resident)
    ours = fit(lambda: KeepsTheOldMemory(write), batches, strategy, recorded="losses")
    assert_same(ours, fit(lambda: KeepsTheOldMemory(write), batches, recorded="losses"))
    if not resident:
        fetches = strategy.fetches()
        assert fetches["net.1.0"] <= fetches["net.2.0"] + 2


class GivesOtherMemory(pl.Callback):
    """Before the first batch, in inference mode."""

    def on_predict_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        for parameter in pl_module.parameters():
            parameter.data = parameter.data * 0.9


@pytest.mark.parametrize("resident", [[], ["net"]], ids=["layers", "residents"])
def test_weights_that_are_given_other_memory_before_a_prediction(resident: list[str]) -> None:
    def predictions(strategy: Any) -> Any:
        torch.manual_seed(0)
        module = Module(nn.Sequential(*(Linears() for _ in range(4))))
        return trainer_for(strategy, callbacks=[GivesOtherMemory()]).predict(module, loader(vectors()))

    assert_equal(predictions(superpipeline(k=2, k_prime=1, keep_on_gpu=resident)), predictions("auto"), "predictions")


class GivesItsOwnValues(nn.Module):
    """As bitsandbytes' 8-bit layer: it computes with a copy that it holds, and gives the weight that copy in each forward."""

    def __init__(self, write: str = "") -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, 16).half(), requires_grad=False)
        self.scale = nn.Parameter(torch.ones(64))
        self.back = nn.Linear(64, 16, bias=False).requires_grad_(False)
        self.write = write
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "copied"):
            with torch.no_grad():
                self.copied = [self.weight.detach().clone()]
        (held,) = self.copied
        self.calls += 1
        out = F.linear(x, self.weight.float()) * self.scale
        self.weight.data = held
        if self.calls == 3 and self.write == "held":
            held.mul_(0.5)
        if self.calls == 3 and self.write == "held.data":
            held.data.mul_(0.5)
        if self.calls == 3 and self.write == "weight":
            self.weight.mul_(0.5)
        if self.calls == 3 and self.write == "other":
            self.weight.data = held * 0.5
        return torch.tanh(self.back(torch.tanh(out)))


class Checkpointed(nn.Module):
    """Checkpoints its own forward, as transformers does: no call of a module tells that it runs again."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(self._run, x, use_reentrant=False)
        return out

    def _run(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer.forward(x)
        return x


def test_a_weight_that_is_given_its_own_values_again_stays_where_it_is() -> None:
    """Each use in a block that ran again wrote all such weights of the block back, and fetched the block anew."""

    def make() -> Module:
        return Module(nn.Sequential(*(Checkpointed(*(GivesItsOwnValues() for _ in range(3))) for _ in range(5))))

    plain = fit(make, vectors())
    for device in (nullcontext(), simulated()):
        strategy = superpipeline(k=1, k_prime=1)
        with device:
            assert_same(fit(make, vectors(), strategy), plain)
        weights = sum(p.nbytes for p in make().parameters())
        stats = strategy.stats()
        assert stats.fetched_bytes <= 2.4 * weights * len(vectors())
        assert not stats.extra_slots


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("write", ["held", "held.data", "weight", "other"])
def test_the_copy_that_a_weight_was_given_is_written_later(write: str, checkpointed: bool) -> None:
    def make() -> Module:
        block = Checkpointed if checkpointed else nn.Sequential
        return Module(nn.Sequential(*(block(GivesItsOwnValues(write)) for _ in range(4))))

    plain = fit(make, vectors(6))
    for options in ({"k": 1}, {"k": 4}):
        assert_same(fit(make, vectors(6), superpipeline(k_prime=1, **options)), plain)


class CastsItself(nn.Linear):
    """As diffusers' layerwise casting: weights in 8 bits are cast up before the forward and back behind it."""

    def forward(self, x: Tensor) -> Tensor:
        self.to(torch.bfloat16)
        out = super().forward(x)
        self.to(torch.float8_e4m3fn)
        return out


class CastBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = CastsItself(16, 16).requires_grad_(False), CastsItself(16, 16).requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(16))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.second(torch.tanh(self.first(x) * self.scale)))


class Eighths(Module):
    def __init__(self) -> None:
        super().__init__(nn.Sequential(*(CastBlock() for _ in range(5))).bfloat16())
        for block in self.net:
            block.first.to(torch.float8_e4m3fn)
            block.second.to(torch.float8_e4m3fn)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_weights_that_are_cast_up_and_back_stay_where_they_are(precision: Any) -> None:
    """Each weight was copied to the host after each use. A view in the graph kept all the copies of 8 bits, too."""
    batches = [batch.bfloat16() for batch in vectors()]
    plain = fit(Eighths, batches, precision=precision)
    strategy = superpipeline(k=1, k_prime=1)
    ours = fit(Eighths, batches, strategy, precision=precision)
    assert_same(ours, plain)
    assert strategy.stats().host_waits <= 5 * len(batches)  # one comparison a layer
    assert strategy.stats().fetched_layers <= 2 * 5 * len(batches)


def test_weights_that_the_first_forward_leaves_in_8_bits() -> None:
    """With ``bf16-true`` Lightning casts the stored weights up; the graph of the first step has saved views of those."""
    batches = [batch.bfloat16() for batch in vectors()]
    plain = fit(Eighths, batches, precision="bf16-true")
    for device in (nullcontext(), simulated()):
        with device:
            assert_same(fit(Eighths, batches, superpipeline(k=1, k_prime=1), precision="bf16-true"), plain)


class ExchangesAfterItsUse(Writes):
    """Frozen weights are given other values in the second step, once their block, or the whole forward, has used them."""

    def __init__(self, within: bool) -> None:
        super().__init__(Linears, self.exchange)
        self.requires_grad_(False)
        self.shift = nn.Parameter(torch.zeros(16))
        self.within = within
        self.calls = 0
        for block in self.net if within else ():
            block.register_forward_hook(self.after_block)

    def after_block(self, block: nn.Module, *_: Any) -> None:
        for p in block.parameters():
            self.exchange(p)

    def exchange(self, p: Any) -> None:
        if self.calls == 2:
            p.data = p.detach() * 0.5

    def loss(self, batch: Any) -> Tensor:
        self.calls += 1
        if self.within:
            return Module.loss(self, batch + self.shift)
        return super().loss(batch + self.shift)


@pytest.mark.parametrize("within", [True, False])
def test_a_frozen_weight_that_is_exchanged_after_its_use_in_mixed_precision(within: bool) -> None:
    """Backward needs the casts of before. Bringing the layer makes new ones, so it has to ask for the old ones after that."""

    def make() -> Module:
        return ExchangesAfterItsUse(within)

    plain = fit(make, vectors(), precision="bf16-mixed")
    assert_same(fit(make, vectors(), superpipeline(k=1, k_prime=1), precision="bf16-mixed"), plain)


class KeepsANormsMemory(Module):
    """Gives a norm other memory between forward and backward, and keeps the old."""

    def __init__(self) -> None:
        super().__init__(nn.Sequential(*(Convolutions() for _ in range(4))))

    def on_before_zero_grad(self, optimizer: torch.optim.Optimizer) -> None:
        weight = self.net[2].norm.weight
        self.old = weight.data
        weight.data = weight.data.clone()


def test_a_block_that_leaves_its_memory_takes_its_casts_along() -> None:
    """It took new memory for its weights alone. Backward read casts that nobody had written there: other numbers in each run."""
    plain = fit(KeepsANormsMemory, vectors(), precision="bf16-mixed")
    for device in (nullcontext(), simulated()):
        with device:
            ours = fit(KeepsANormsMemory, vectors(), superpipeline(k=1, k_prime=1), precision="bf16-mixed")
        assert_same(ours, plain)


class WritesWhatItHad(Linears):
    """Gives a weight a copy of its own values, and writes the memory that it had before; ``how`` says when."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.second.weight.requires_grad_(False)
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "before":
            self.exchange()
            return super().forward(x)
        out = super().forward(x)
        self.exchange()
        return out

    def exchange(self) -> None:
        weight = self.second.weight
        old = weight.data
        weight.data = weight.detach().clone()
        old.mul_(0.5)
        if self.how == "put back":
            weight.data = old


@pytest.mark.parametrize("k", [1, 8])
@pytest.mark.parametrize("how", ["left", "put back"])
def test_memory_that_a_weight_had_is_not_written_before_backward(how: str, k: int) -> None:
    """On plain Lightning backward computes with what was written. Here it did with the values of before, without a word."""
    from sp_lightning.activations.recompute import Unrepeatable

    def make() -> Module:
        return Module(nn.Sequential(*(WritesWhatItHad(how) for _ in range(4))))

    with pytest.raises(RuntimeError, match=r"'net\.3\.second\.weight' was given other memory .* before was written"):
        fit(make, vectors(), superpipeline(k=k, k_prime=1))
    with pytest.raises(Unrepeatable, match=r"'net\.0' writes its parameter 'second\.weight'"):
        fit(make, vectors(), superpipeline(k=k, k_prime=1, activations="recompute"))


def test_memory_that_a_weight_had_is_written_before_its_use() -> None:
    def make() -> Module:
        return Module(nn.Sequential(*(WritesWhatItHad("before") for _ in range(4))))

    plain = fit(make, vectors())
    for k in (1, 8):
        assert_same(fit(make, vectors(), superpipeline(k=k, k_prime=1)), plain)


class WidensItself(nn.Module):
    """Gives its weight the same values in float64, and keeps that memory."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 16), requires_grad=False)
        self.scale = nn.Parameter(torch.ones(16))

    def forward(self, x: Tensor) -> Tensor:
        self.wide = self.weight.detach().double()
        self.weight.data = self.wide
        return torch.tanh(F.linear(x, self.weight.float())) * self.scale


class WritesWide(Module):
    def __init__(self) -> None:
        super().__init__(nn.Sequential(*(WidensItself() for _ in range(4))))

    def loss(self, batch: Any) -> Tensor:
        self.net(batch)
        for block in self.net:
            block.wide.data.mul_(0.5)
        return super().loss(batch)


@pytest.mark.parametrize("k", [1, 8])
def test_memory_of_another_dtype_is_written_while_its_layer_is_away(k: int) -> None:
    """The next use of the layer overwrote it with the host's values, without a word."""
    plain = fit(WritesWide, vectors())
    assert_same(fit(WritesWide, vectors(), superpipeline(k=k, k_prime=1)), plain)


UNKNOWN: dict[str, Callable[[Any, Any, Any], tuple[Any, str, Any]]] = {
    "an update is under way": lambda writes, layer, slot: (layer.owner, "update", Future()),
    "the host's was written": lambda writes, layer, slot: (StreamedLayer, "outdated", True),
    "the slot has to be filled again": lambda writes, layer, slot: (slot, "stale", True),
    "the slot's views may write it": lambda writes, layer, slot: (guard_of(layer), "digests", object()),
    "writes are looked for": lambda writes, layer, slot: (writes, "_watch", object()),
    "only rows are uploaded": lambda writes, layer, slot: (layer, "planned", replace(layer.planned, rows=(0,))),
    "a table": lambda writes, layer, slot: (layer, "kind", Kind.TABLE),
    "residents": lambda writes, layer, slot: (layer, "kind", Kind.RESIDENTS),
    "the weight was handed out": lambda writes, layer, slot: (guard_of(layer), "viewed", {0}),
    "it has another dtype": lambda writes, layer, slot: (guard_of(layer), "retyped", {0: torch.ones(1)}),
}


@pytest.mark.parametrize("why", UNKNOWN)
def test_a_weight_is_not_compared_with_a_slot_that_may_have_other_values_than_the_host(why: str) -> None:
    """Then it is written back, as before. Equal to the slot, it would be taken for the host's."""
    found: list[set[int]] = []

    class Asks(Module):
        def loss(self, batch: Any) -> Tensor:
            loss = super().loss(batch)
            writes = self.trainer.strategy._run.engine._writes
            slot = next(each for each in writes._slots.all if each.layer is not None)
            given = {0: writes._slots.views(slot.layer, slot)[0].clone()}
            found.append(writes._alike(slot, given))
            owner, name, value = UNKNOWN[why](writes, slot.layer, slot)
            with mock.patch.object(owner, name, value):
                found.append(writes._alike(slot, given))
            return loss

    fit(lambda: Asks(nn.Sequential(*(Linears() for _ in range(3)))), vectors(1), superpipeline(k=1))
    assert found == [{0}, set()]
