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
from torch.utils.checkpoint import checkpoint

from tests.support.data_writes import BLOCKS, WRITES, Linears, Writes, multiply, rebind, rebind_twice
from tests.support.models import Module, Stack, vectors
from tests.support.poison import poisoned
from tests.support.runs import assert_same, fit, superpipeline
from tests.support.simdevice import simulated
from tests.support.tiers import first

pytestmark = pytest.mark.usefixtures("everything_is_worth_moving")

# Each write in float32, and each kind of write where weights travel as casts or in half precision.
IN_PRECISIONS = [(write, "32-true") for write in WRITES] + [
    (write, precision) for write in (rebind, multiply) for precision in ("bf16-mixed", "bf16-true")
]


@pytest.mark.parametrize(("write", "precision"), IN_PRECISIONS)
@pytest.mark.parametrize("block", first(BLOCKS, "linear", why="other kinds of layers"))
def test_backward_sees_what_plain_autograd_sees(block: str, write: Callable[[Any], None], precision: Any) -> None:
    from sp_lightning.activations.recompute import Unrepeatable

    def make() -> Module:
        return Writes(BLOCKS[block], write)

    plain = fit(make, vectors(2), precision=precision)
    inner = "**.wide" if block == "scalar" else "**.second"
    options: list[dict[str, Any]] = [
        {"k": 1}, {"k": 4}, {"k": 1, "activations": "offload"}, {"k": 2, "keep_on_gpu": ["net"]}, {"k": 2, "keep_on_gpu": [inner]}
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


@pytest.mark.long("the same writes on a simulated device")
@pytest.mark.parametrize(
    "activations", first(["keep", "offload"], "offload", why="offloaded ones are kept on the GPU for a while, too")
)
@pytest.mark.parametrize(("write", "precision"), IN_PRECISIONS)
def test_on_a_device_of_its_own(write: Callable[[Any], None], activations: Any, precision: Any) -> None:
    def make() -> Module:
        return Writes(Linears, write)

    plain = fit(make, vectors(), precision=precision)
    for resident in ([], ["**.second"]):  # whose memory is exchanged, too: it was offloaded then
        with simulated():
            strategy = superpipeline(k=1, k_prime=1, activations=activations, keep_on_gpu=resident)
            assert_same(fit(make, vectors(), strategy, precision=precision), plain)


@pytest.mark.usefixtures("nothing_fits")
def test_auto_offloads_what_is_written_in_between() -> None:
    def make() -> Module:
        return Writes(Linears, rebind)

    strategy = superpipeline(k=2, k_prime=1, activations="auto", gpu_memory="64KiB")
    assert_same(fit(make, vectors(), strategy), fit(make, vectors()))
    assert "recompute" not in strategy.activations.values()


@pytest.mark.parametrize("write", WRITES)
def test_what_is_written_of_the_last_layer_alone_is_refused_under_recompute(write: Callable[[Any], None]) -> None:
    """The layer is still in use when its second run begins: nobody has looked at it since."""
    from sp_lightning.activations.recompute import Unrepeatable

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
    from sp_lightning.activations.recompute import Unrepeatable

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
