"""Weights written through ``.data`` between a forward and its backward: as plain autograd has them, or refused by name.

Plain autograd keeps the *old* values where it saved a view of the weight (a linear layer saves its transpose) and sees the
*new* ones where it saved the weight itself (a convolution does). torchgeo's ``BYOLTask`` moves its averages so, and got
other gradients here, without a word.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint

from sp_lightning.activations import offload
from sp_lightning.activations.forward_state import Unrepeatable
from tests.support.models import Module, Stack, vectors
from tests.support.poison import poisoned
from tests.support.runs import assert_same, fit, fused, superpipeline
from tests.support.simdevice import simulated


@pytest.fixture(autouse=True)
def everything_is_worth_moving(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "WORTH_MOVING", 1)


class Linears(nn.Module):
    """Two linear layers: their backwards need a transpose each, and the second one what the first one gave."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.second(torch.tanh(self.first(x))))


class Convolutions(nn.Module):
    """Two convolutions and a norm: their backwards need the weights themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.norm = nn.Conv1d(16, 16, 1), nn.Conv1d(16, 16, 1), nn.LayerNorm(16)

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(torch.tanh(self.first(x[..., None])))[..., 0]
        return torch.tanh(self.norm(x))


class Scalars(nn.Module):
    """Weights of one element: a view of one looks like the weight itself."""

    def __init__(self) -> None:
        super().__init__()
        self.narrow, self.wide = nn.Linear(1, 1), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.wide(x)) * self.narrow(x[..., :1])


BLOCKS = {"linear": Linears, "convolution": Convolutions, "scalar": Scalars}


def rebind(p: Any) -> None:
    p.data = 0.5 * p.data


def rebind_twice(p: Any) -> None:
    p.data = 0.5 * p.data
    p.data = p.data + 0.1


def multiply(p: Any) -> None:
    p.data.mul_(0.5)


def copy_into(p: Any) -> None:
    p.data.copy_(0.5 * p.data)


def rebind_then_multiply(p: Any) -> None:
    p.data = 0.5 * p.data
    p.data.mul_(0.5)


def multiply_then_rebind(p: Any) -> None:
    p.data.mul_(0.5)
    p.data = p.data + 0.1


WRITES = [rebind, rebind_twice, multiply, copy_into, rebind_then_multiply, multiply_then_rebind]
# Each write in float32, and each kind of write where weights travel as casts or in half precision.
IN_PRECISIONS = [(write, "32-true") for write in WRITES] + [
    (write, precision) for write in (rebind, multiply) for precision in ("bf16-mixed", "bf16-true")
]


class Writes(Module):
    """Writes all its weights between forward and backward."""

    def __init__(self, block: type[nn.Module], write: Callable[[Any], None]) -> None:
        super().__init__(nn.Sequential(*(block() for _ in range(4))))
        self.write = write

    def loss(self, batch: Any) -> Tensor:
        loss = super().loss(batch)
        if self.training:
            for p in self.net.parameters():
                self.write(p)
        return loss


@pytest.mark.parametrize(("write", "precision"), IN_PRECISIONS)
@pytest.mark.parametrize("block", BLOCKS)
def test_backward_sees_what_plain_autograd_sees(block: str, write: Callable[[Any], None], precision: Any) -> None:
    def make() -> Module:
        return Writes(BLOCKS[block], write)

    plain = fit(make, vectors(2), precision=precision)
    inner = "**.wide" if block == "scalar" else "**.second"
    options: list[dict[str, Any]] = [
        {"k": 1}, {"k": 4}, {"k": 1, "activations": "offload"}, {"k": 2, "resident": ["net"]}, {"k": 2, "resident": [inner]}
    ]  # fmt: skip
    for each in options:
        assert_same(fit(make, vectors(2), superpipeline(k_prime=1, **each), precision=precision), plain)
    with pytest.raises(Unrepeatable, match=r"'(first|narrow)\.\w+' of 'net\.\d' has been modified .*\"offload\""):
        fit(make, vectors(), superpipeline(k=2, k_prime=1, activations="recompute"), precision=precision)


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("block", BLOCKS)
def test_with_nothing_left_in_slots_or_on_the_host(block: str, write: Callable[[Any], None]) -> None:
    def make() -> Module:
        return Writes(BLOCKS[block], write)

    plain = fit(make, vectors())
    with poisoned():
        assert_same(fit(make, vectors(), superpipeline(k=1, k_prime=1)), plain)


@pytest.mark.parametrize("activations", ["keep", "offload"])
@pytest.mark.parametrize(("write", "precision"), IN_PRECISIONS)
def test_on_a_device_of_its_own(write: Callable[[Any], None], activations: Any, precision: Any) -> None:
    def make() -> Module:
        return Writes(Linears, write)

    plain = fit(make, vectors(), precision=precision)
    for resident in ([], ["**.second"]):  # whose memory is exchanged, too: it was offloaded then
        with simulated():
            strategy = superpipeline(k=1, k_prime=1, activations=activations, resident=resident)
            assert_same(fit(make, vectors(), strategy, precision=precision), plain)


def test_auto_offloads_what_is_written_in_between() -> None:
    def make() -> Module:
        return Writes(Linears, rebind)

    strategy = superpipeline(k=2, k_prime=1, activations="auto", memory_budget="64KiB")
    assert_same(fit(make, vectors(), strategy), fit(make, vectors()))
    assert "recompute" not in strategy.activations.values()


@pytest.mark.parametrize("write", WRITES)
def test_what_is_written_of_the_last_layer_alone_is_refused_under_recompute(write: Callable[[Any], None]) -> None:
    """The layer is still in use when its second run begins: nobody has looked at it since."""

    class WritesLast(Module):
        def loss(self, batch: Any) -> Tensor:
            loss = super().loss(batch)
            write(self.net[3].second.weight)
            return loss

    def make() -> Module:
        return WritesLast(nn.Sequential(*(Linears() for _ in range(4))))

    assert_same(fit(make, vectors(), superpipeline(k=2, k_prime=1)), fit(make, vectors()))
    with pytest.raises(Unrepeatable, match=r"'second\.weight' of 'net\.3' has been modified"):
        fit(make, vectors(), superpipeline(k=2, k_prime=1, activations="recompute"))


def test_data_that_is_only_read_is_no_write() -> None:
    """Norms of weights, for a log, under recompute."""

    class Reads(Module):
        def loss(self, batch: Any) -> Tensor:
            loss = super().loss(batch)
            self.norm = sum(p.data.norm() for p in self.net.parameters())
            return loss

    def make() -> Module:
        return Reads(nn.Sequential(*(Linears() for _ in range(4))))

    plain = fit(make, vectors())
    assert_same(fit(make, vectors(), superpipeline(k=2, k_prime=1, activations="recompute")), plain)
    with poisoned():
        assert_same(fit(make, vectors(), superpipeline(k=2, k_prime=1, activations="recompute")), plain)


@pytest.mark.parametrize("write", WRITES)
def test_writes_before_the_forward_are_no_reason_to_refuse(write: Callable[[Any], None]) -> None:
    """What was written before the first run is there for the second one, too."""

    class Before(Module):
        def loss(self, batch: Any) -> Tensor:
            for p in reversed(list(self.net.parameters())):  # the layer that is written last is the first to be called
                write(p)
            return super().loss(batch)

    def make() -> Module:
        return Before(nn.Sequential(*(Linears() for _ in range(4))))

    plain = fit(make, vectors())
    for activations in ("keep", "recompute", "offload"):
        assert_same(fit(make, vectors(), superpipeline(k=2, k_prime=1, activations=activations)), plain)


class MovingAverages(Module):
    """BYOL: a target network follows by ``pt.data = beta * pt.data + (1 - beta) * p.data``, in ``training_step``."""

    def __init__(self) -> None:
        super().__init__(Stack())
        self.target = Stack()

    def loss(self, batch: Any) -> Tensor:
        predicted, wanted = self.net(batch), self.target(batch)
        for p, pt in zip(self.net.parameters(), self.target.parameters(), strict=True):
            pt.data = 0.9 * pt.data + 0.1 * p.data
        return F.mse_loss(predicted, wanted)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("activations", ["keep", "offload"])
def test_moving_averages_of_a_target_that_is_trained(activations: Any, precision: Any) -> None:
    ours = fit(MovingAverages, vectors(), superpipeline(k=2, k_prime=1, activations=activations), precision=precision)
    assert_same(ours, fit(MovingAverages, vectors(), precision=precision))


class WritesThenCallsAgain(Writes):
    """Two forwards of one step, with a write after each."""

    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) + super().loss(batch * 2)


@pytest.mark.parametrize("write", [rebind, rebind_twice])
@pytest.mark.parametrize("block", ["linear", "convolution"])
def test_each_forward_keeps_its_own(block: str, write: Callable[[Any], None]) -> None:
    def make() -> Module:
        return WritesThenCallsAgain(BLOCKS[block], write)

    plain = fit(make, vectors())
    for k, activations in ((1, "keep"), (4, "keep"), (2, "offload")):
        assert_same(fit(make, vectors(), superpipeline(k=k, k_prime=1, activations=activations)), plain)


class WritesByOldReference(Module):
    """An optimizer of one's own, made before the run: it holds the host's parameters."""

    def __init__(self, block: type[nn.Module]) -> None:
        super().__init__(nn.Sequential(*(block() for _ in range(4))))
        self.mine = [list(self.net.parameters())]

    def loss(self, batch: Any) -> Tensor:
        loss = super().loss(batch)
        self.norms = [p.detach().norm() for p in self.net[-1].parameters()]  # the layer is in use from here on
        for p in self.mine[0]:
            p.data = 0.5 * p.data
        return loss


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("block", ["linear", "convolution"])
def test_through_references_that_were_taken_before(block: str, precision: Any) -> None:
    def make() -> Module:
        return WritesByOldReference(BLOCKS[block])

    plain = fit(make, vectors(), precision=precision)
    for k, activations in ((1, "keep"), (4, "keep"), (2, "offload")):
        ours = fit(make, vectors(), superpipeline(k=k, k_prime=1, activations=activations), precision=precision)
        assert_same(ours, plain)
    with pytest.raises(Unrepeatable, match=r"of 'net\.\d' has been modified"):
        fit(make, vectors(), superpipeline(k=2, k_prime=1, activations="recompute"), precision=precision)


class WritesInHook(Module):
    """After ``training_step`` and before backward."""

    def __init__(self, block: type[nn.Module]) -> None:
        super().__init__(nn.Sequential(*(block() for _ in range(4))))

    def on_before_backward(self, loss: Tensor) -> None:
        for p in self.parameters():
            p.data = 0.5 * p.data


@pytest.mark.parametrize("block", ["linear", "convolution"])
def test_in_a_hook_before_backward(block: str) -> None:
    def make() -> Module:
        return WritesInHook(BLOCKS[block])

    plain = fit(make, vectors())
    for k in (1, 4):
        assert_same(fit(make, vectors(), superpipeline(k=k, k_prime=1)), plain)


class WritesOthers(Module):
    """Leaves that are none of the module's streamed weights: a free tensor, a buffer, a parameter that nobody lists."""

    def __init__(self) -> None:
        super().__init__(nn.Sequential(*(Linears() for _ in range(4))))
        self.register_buffer("scale", torch.full((16,), 2.0))
        self.hidden = [nn.Parameter(torch.full((16,), 3.0))]

    scale: Tensor

    def loss(self, batch: Any) -> Tensor:
        free = torch.full((16,), 1.5, requires_grad=True)
        x = self.net(batch) * self.scale * free * self.hidden[0]
        loss = (x * x.detach()).mean()
        for leaf in (free, self.scale, self.hidden[0]):
            leaf.data = leaf.data * 0.5
        return loss


@pytest.mark.parametrize("activations", ["keep", "offload"])
def test_other_leaves_are_followed_as_plain_autograd_follows_them(activations: Any) -> None:
    plain = fit(WritesOthers, vectors())
    assert_same(fit(WritesOthers, vectors(), superpipeline(k=2, k_prime=1, activations=activations)), plain)


class WritesInsideCheckpoint(Module):
    """Inside a checkpoint of the user's nothing of ours packs, and each use lets go of its layer at once."""

    def __init__(self) -> None:
        super().__init__(Stack())
        self.norms: list[Tensor] = []

    def loss(self, batch: Any) -> Tensor:
        def run(x: Tensor) -> Tensor:
            weight = self.net.head.weight
            self.norms.append(weight.data.norm())
            if len(self.norms) % 2:
                weight.data = weight.data * 0.5
            return self.net.blocks[0](x)

        y = checkpoint(run, batch, use_reentrant=False)
        self.norms.append(self.net.head.weight.data.norm())
        return super().loss(y)


def test_inside_a_checkpoint_the_write_is_not_lost() -> None:
    plain = fit(WritesInsideCheckpoint, vectors())
    ours = fit(WritesInsideCheckpoint, vectors(), superpipeline(k=1, k_prime=1))
    assert_same(ours, plain)
    assert torch.equal(torch.stack(ours.module.norms), torch.stack(plain.module.norms))


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
        fit(make, vectors(), superpipeline(k=2, k_prime=1, resident=resident))


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


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize(("trained", "before"), [(True, True), (True, False), (False, True), (False, False)])
def test_writes_to_memory_that_a_weight_was_given(trained: bool, before: bool, precision: Any) -> None:
    def make() -> Module:
        return BlendsInPlace(trained, before)

    plain = fit(make, vectors(), precision=precision)
    for options in ({"k": 1}, {"k": 8}, {"k": 1, "activations": "offload"}, {"k": 1, "resident": ["target"]}):
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


@pytest.mark.parametrize("write", [multiply, add_then_multiply, hold_and_put_back])
@pytest.mark.parametrize("block", ["linear", "convolution"])
def test_the_same_memory_is_the_same_weight(block: str, write: Callable[[Any], None]) -> None:
    for case in (Writes, WritesWhatItWasGiven, StandardizesInHook):

        def make(case: type[Writes] = case) -> Module:
            return case(BLOCKS[block], write)

        plain = fit(make, vectors())
        for options in ({"k": 1}, {"k": 4}, {"k": 1, "activations": "offload"}, {"k": 1, "resident": ["net.3"]}):
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
            superpipeline(k=2, resident=resident),
        )


class WritesUnseen(Module):
    """Writes of which torch shows no sign, by ``how``."""

    def __init__(self, how: str) -> None:
        super().__init__(nn.Sequential(*(Linears() for _ in range(4))))
        self.old = [[layer.second.weight for layer in self.net]]
        self.how = how

    def loss(self, batch: Any) -> Tensor:
        loss = super().loss(batch)
        if self.how == "reference":
            self.old[0][1].data.mul_(0.5)
        elif self.how == "numpy":
            self.net[1].second.weight.detach().numpy()[:] *= 0.5
        elif self.how == "dlpack":
            torch.from_dlpack(self.net[1].second.weight.detach()).mul_(0.5)
        return loss


@pytest.mark.parametrize("resident", [[], ["net.1"]])
@pytest.mark.parametrize("how", ["numpy", "dlpack"])
def test_unseen_writes_on_the_device_are_looked_for(how: str, resident: list[str]) -> None:
    def make() -> Module:
        return WritesUnseen(how)

    strategy = superpipeline(k=1, k_prime=1, resident=resident, check_writes=True)
    assert_same(fit(make, vectors(), strategy), fit(make, vectors()))


@pytest.mark.parametrize("activations", ["keep", "recompute"])
def test_unseen_writes_on_the_host_are_refused(activations: Any) -> None:
    strategy = superpipeline(k=1, k_prime=1, activations=activations, check_writes=True)
    with pytest.raises(RuntimeError, match=r"'net\.1\.second\.weight' was written within a step by a way.*its module"):
        fit(lambda: WritesUnseen("reference"), vectors(), strategy)


class Alternates(Module):
    """Manual optimization: two steps in each batch, one of them fused, which bumps no version."""

    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        optimizers: Any = self.optimizers()
        for optimizer in optimizers:
            optimizer.zero_grad()
            loss = self.loss(batch)
            self.manual_backward(loss)
            optimizer.step()
        return loss

    def configure_optimizers(self) -> Any:
        return [torch.optim.Adam(self.parameters(), fused=fused) for fused in (False, True)]


@pytest.mark.parametrize(
    "options", [{}, {"activations": "recompute"}, {"optimizer_overlap": "forward", "fused_optimizer": True}]
)
def test_looking_finds_nothing_where_nothing_is(options: dict[str, Any]) -> None:
    strategy = superpipeline(k=2, k_prime=1, check_writes=True, **options)
    make = fused(lambda: Module(Stack())) if "fused_optimizer" in options else lambda: Module(Stack())
    assert_same(
        fit(make, vectors(), strategy, val=vectors(), accumulate_grad_batches=2),
        fit(make, vectors(), val=vectors(), accumulate_grad_batches=2),
    )
    if "optimizer_overlap" not in options:
        strategy = superpipeline(k=2, k_prime=1, check_writes=True, **options)
        assert_same(fit(lambda: Alternates(Stack()), vectors(), strategy), fit(lambda: Alternates(Stack()), vectors()))


def test_looking_goes_with_no_update_inside_backward() -> None:
    with pytest.raises(ValueError, match=r'check_writes=True.*optimizer_overlap="off"'):
        superpipeline(check_writes=True, optimizer_overlap="backward")


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
    resident = {"resident": ["target"], "check_writes": how != "references"}
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
    for options in ({"k": 1}, {"k": 4}, {"k": 2, "resident": ["net.0"]}):
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


@pytest.mark.parametrize("options", [{}, {"resident": ["net.0"]}, {"resident": ["net"]}, {"check_writes": True}])
def test_weights_that_are_moved_between_two_backwards(options: dict[str, Any]) -> None:
    def make() -> Module:
        return Sharpness(nn.Sequential(*(Linears() for _ in range(4))))

    plain = fit(make, vectors())
    assert_same(fit(make, vectors(), superpipeline(k=2, k_prime=1, **options)), plain)


@pytest.mark.parametrize("what", ["weight", "tied", "module", "pruned", "bias"])
def test_what_is_exchanged_before_its_second_run_is_refused(what: str) -> None:
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

    options = {"resident": ["**.second"], "activations": "offload"}
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
    strategy = superpipeline(k=1, resident=resident)
    ours = fit(lambda: KeepsTheOldMemory(write), batches, strategy, gradients=False)
    assert_same(ours, fit(lambda: KeepsTheOldMemory(write), batches, gradients=False))
    if not resident:
        fetches = strategy.fetches()
        assert fetches["net.1.0"] <= fetches["net.2.0"] + 2
