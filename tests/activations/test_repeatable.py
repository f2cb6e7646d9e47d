"""A forward that is run twice sees the second time what it saw the first; what cannot be put back is refused by name."""

from __future__ import annotations

import contextvars
import gc
import random
import sys
import types
import weakref
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from sp_lightning.capabilities.activations.recompute import Unrepeatable
from sp_lightning.core.store.block import HostBlock
from tests.support.models import Module, Stack, twice, vectors
from tests.support.repeated_block import Block
from tests.support.runs import assert_equal, assert_same, fit, superpipeline
from tests.support.simdevice import simulated
from tests.support.tiers import first

pytestmark = pytest.mark.usefixtures("everything_is_worth_moving")


class Codebook(Block):
    """As vector quantizers do it: through ``.data``, which no version shows."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("code", torch.ones(16))

    code: Tensor

    def factor(self, x: Tensor) -> Tensor:
        self.code.data.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return self.code.clone()


class Functional(Block):
    """Batch statistics in buffers of its own, by a function."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(16))
        self.register_buffer("variance", torch.ones(16))

    mean: Tensor
    variance: Tensor

    def factor(self, x: Tensor) -> Tensor:
        normal = nn.functional.batch_norm(x, self.mean, self.variance, training=True)
        return normal * self.mean.clone()


class Arrays(Block):
    """A buffer through NumPy, an array, queues of numbers and of tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.ones(1))
        self.array = np.ones(2)
        self.queue: deque[float] = deque([1.0], maxlen=3)
        self.tensors = deque([torch.ones(16)])

    seen: Tensor

    def factor(self, x: Tensor) -> Any:
        self.seen.numpy()[0] += 1
        self.array *= 1.5
        self.queue.append(float(self.array[0]))
        self.tensors[0].mul_(1.5)
        return float(self.seen) * self.array.sum() * sum(self.queue) * self.tensors[0]


class Draws(Block):
    """Random numbers that are not torch's own."""

    def __init__(self) -> None:
        super().__init__()
        self.theirs = torch.Generator().manual_seed(1)
        self.python, self.numpy = random.Random(1), np.random.default_rng(1)

    def factor(self, x: Tensor) -> Any:
        ours = random.random() + float(np.random.rand()) + self.python.random() + float(self.numpy.random())
        return torch.rand(16, generator=self.theirs) * ours


class Deep(Block):
    """Objects in objects, one that can be called, a dict of which only the order changes."""

    def __init__(self) -> None:
        super().__init__()
        self.state = types.SimpleNamespace(inner=types.SimpleNamespace(count=0))
        self.counter = Counts()
        self.order = {"a": 1.0, "b": 2.0}

    def factor(self, x: Tensor) -> Any:
        self.state.inner.count += 1
        first = next(iter(self.order))
        self.order[first] = self.order.pop(first)
        return self.state.inner.count * self.counter() * self.order[next(iter(self.order))]


class Counts:
    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> int:
        self.count += 1
        return self.count


class Late(Codebook):
    """Writes through ``.data`` from the second batch on; a tuple of tensors; NumPy's older source."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.pair = (torch.ones(16), torch.ones(16))
        self.older = np.random.RandomState(1)

    def factor(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == 1:
            return torch.ones(16)
        for number, each in enumerate(self.pair):
            each.add_(number + 1)
        return super().factor(x) * self.pair[0] * self.pair[1] * float(self.older.normal())


class Odd(Block):
    """What is no state, and does not like to be looked at."""

    def __init__(self) -> None:
        super().__init__()
        self.fixed = np.broadcast_to(np.ones(1), (4,))
        self.unlisted = [torch.jit.script(nn.Linear(2, 2))]
        self.scripted = torch.jit.script(nn.BatchNorm1d(16))
        self.answers, self.raises, self.frozen = Answers(), Raises(), Frozen({"a": 1})
        self.meta, self.emptied, self.wide = torch.ones(2, device="meta"), torch.ones(8), torch.ones(1).expand(4)
        self.emptied.untyped_storage().resize_(0)
        self.system = random.SystemRandom()
        self.queue: deque[int] = deque([1, 2])

    def factor(self, x: Tensor) -> Any:
        return self.fixed.sum() * self.frozen["a"]


class Answers:
    def __getattr__(self, name: str) -> None:
        return None


class Raises:
    def __getattr__(self, name: str) -> None:
        raise KeyError(name)


class Frozen(dict[str, int]):
    def clear(self) -> None:
        raise TypeError("frozen")

    update = __setitem__ = copy = clear  # type: ignore[assignment]


class Bank(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(16))

    mean: Tensor

    def forward(self, x: Tensor) -> Tensor:
        self.mean.mul_(0.9).add_(x.detach().mean(0))
        return 1 + self.mean.clone()


class Unregistered(Block):
    """Modules that no parent lists, with weights and without; an array; a leaf that requires gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.banks = [Bank()]
        self.__dict__["hidden"] = Bank()
        self.__dict__["codes"] = Codebook()
        self.control = types.SimpleNamespace(bank=Bank(), block=self)
        self.numbers = array("d", [1.0])
        self.leaf = torch.ones(16, requires_grad=True)

    def factor(self, x: Tensor) -> Tensor:
        self.numbers[0] *= 1.1
        with torch.no_grad():
            self.leaf.mul_(0.9)
        banks = self.banks[0](x) * self.hidden(x) * self.control.bank(x)
        return banks * self.codes.factor(x) * self.numbers[0] * self.leaf.detach().clone()


class LateAndLarge(Block):
    """Writes a large buffer through ``.data`` from the second batch on."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("code", torch.ones(16, 2**15))
        self.calls = 0

    code: Tensor

    def factor(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls > 1:
            self.code.data.mul_(0.9)
        return self.code[:, 0].clone()


def old_spectral_norm() -> nn.Module:
    """Its hook writes buffers before each forward, and puts a tensor in the place of the weight."""
    return nn.utils.spectral_norm(nn.Linear(16, 16))


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
@pytest.mark.parametrize("times", [1, 3])
@pytest.mark.parametrize("block", [Unregistered, LateAndLarge, old_spectral_norm])
def test_state_that_is_out_of_sight(block: Callable[[], nn.Module], times: int) -> None:
    """Each block is called several times before backward, too."""

    class Repeats(Module):
        def loss(self, batch: Tensor) -> Tensor:
            return torch.stack([super(Repeats, self).loss(batch * (n + 1)) for n in range(times)]).sum()

    def make() -> Module:
        return Repeats(nn.Sequential(*(block() for _ in range(3))))

    late = block is LateAndLarge and times > 1  # of the first call nothing is known any more
    with pytest.raises(Unrepeatable, match=r"'code' of 'net.*' has been modified") if late else nullcontext():
        assert_same(fit(make, vectors(4), superpipeline(k=1, activations="recompute")), fit(make, vectors(4)))


def _refuses(*_: Any) -> Any:
    raise NotImplementedError


_OF_CONTAINERS = ("__len__", "__iter__", "__eq__", "__hash__", "__bool__", "__getitem__", "items", "values", "copy")


class Holds(Block):
    """Has objects of classes that refuse what a container does, as e3nn's ``Irrep`` does, a tuple without a length."""

    def __init__(self, kind: type) -> None:
        super().__init__()
        given = [(0, 1)] if kind in (tuple, list, set, deque) else []
        value = type("Hostile", (kind,), dict.fromkeys(_OF_CONTAINERS, _refuses))(*given)
        self.pairs = ((8, value),)
        self.listed = [value]


@pytest.mark.parametrize(
    "kind", [object, tuple, list, set, deque, dict, OrderedDict, bytearray, random.Random], ids=str
)
def test_methods_of_users_objects_are_not_called(kind: type) -> None:
    """The snapshot read the length of a tuple whose class has none: a NotImplementedError without a text."""

    def make() -> Module:
        return Module(nn.Sequential(*(Holds(kind) for _ in range(3))))

    assert_same(fit(make, vectors(), superpipeline(k=1, activations="recompute")), fit(make, vectors()))


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
@pytest.mark.parametrize("block", [Codebook, Functional, Arrays, Draws, Deep, Late, Odd])
def test_state_that_no_version_shows(block: type[nn.Module]) -> None:
    random.seed(3)
    np.random.seed(3)
    reference = fit(twice(block), vectors())
    after = random.random(), float(np.random.rand())
    random.seed(3)
    np.random.seed(3)
    assert_same(fit(twice(block), vectors(), superpipeline(k=1, activations="recompute")), reference)
    assert (random.random(), float(np.random.rand())) == after


class Grows(Block):
    """Gives buffers other sizes in place: one when it is first called (observers of torch.ao), one that grows with each call.

    Args:
        how: how buffers get other sizes.
        width: the columns of the buffer that grows.
    """

    def __init__(self, how: str, width: int) -> None:
        super().__init__()
        self.how = how
        self.register_buffer("peak", torch.empty(0))
        self.register_buffer("table", torch.ones(width, 2).t())  # not contiguous
        self.rows = [self.table[:1]]  # another tensor over the same memory

    peak: Tensor
    table: Tensor

    def factor(self, x: Tensor) -> Tensor:
        now = x.detach().abs().amax(0)
        table = torch.cat([self.table * 0.9, self.table[-1:] * 1.1])
        if not self.peak.numel():
            self._put(self.peak, now)
        self.peak.copy_(torch.maximum(self.peak, now))
        self.rows[0].mul_(0.9)
        self._put(self.table, table)
        return (1 + self.peak) * self.table[:, :16].sum(0) * self.rows[0][0, :16]

    def _put(self, buffer: Tensor, value: Tensor) -> None:
        if self.how == "data":
            buffer.data = value
        elif self.how == "set":
            buffer.set_(value)  # type: ignore[call-overload]
        else:
            buffer.resize_(value.shape).copy_(value)


@pytest.mark.parametrize(
    "width",
    [
        pytest.param(16, id="small"),
        pytest.param(
            2**18, id="large", marks=pytest.mark.rest("copies of large buffers are dropped if they were not written")
        ),
    ],
)
@pytest.mark.parametrize("how", ["resize", "data", "set"])
def test_buffers_that_get_another_size_in_place(how: str, width: int) -> None:
    """Values were restored into a tensor of another size: torch's own error, without a name."""

    def make() -> Module:
        return Module(nn.Sequential(*(Grows(how, width) for _ in range(3))))

    assert_same(fit(make, vectors(3), superpipeline(k=1, activations="recompute")), fit(make, vectors(3)))


# ---------------------------------------------------------------------- what others do between forward and backward


class Adapts(Module):
    """The second forward runs with other weights, another mode, another attribute, another context."""

    where = contextvars.ContextVar("where", default=1.0)

    def loss(self, batch: Any) -> Tensor:
        net: Any = self.net
        adapted = {name: p * 0.5 for name, p in net.blocks[0].named_parameters()}
        first = functional_call(net.blocks[0], adapted, (net.stem(batch),))
        token = self.where.set(3.0)
        net.blocks[1].scale = 2.0
        loss = net.blocks[1](first).square().mean()
        net.eval()
        net.blocks[1].scale = 5.0
        self.where.reset(token)
        loss = loss + super().loss(batch)
        net.train()
        net.blocks[1].scale = 1.0
        return loss


class Scaled(Block):
    def __init__(self) -> None:
        super().__init__()
        self.scale = 1.0
        self.drop = nn.Dropout(0.3)

    def factor(self, x: Tensor) -> Tensor:
        return self.drop(x) * self.scale * Adapts.where.get()


def adapts() -> Module:
    stack = Stack()
    for index in range(len(stack.blocks)):
        stack.blocks[index] = Scaled()
    return Adapts(stack)


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.parametrize("mode", ["recompute", "offload"])
def test_weights_modes_attributes_and_context_are_those_of_the_first_run(mode: Any) -> None:
    assert_same(fit(adapts, vectors(), superpipeline(k=1, activations=mode)), fit(adapts, vectors()))


class DropsWeights(Module):
    """One weight is exchanged for a tensor while a forward runs, and put back before backward (WeightDrop)."""

    def loss(self, batch: Any) -> Tensor:
        linear: Any = self.net.blocks[1].inner  # type: ignore[union-attr, index]
        weight = linear.weight
        del linear.weight
        linear.weight = nn.functional.dropout(weight, 0.5)
        loss = super().loss(batch)
        del linear.weight
        linear.register_parameter("weight", weight)
        return loss


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.parametrize("mode", ["recompute", "offload"])
def test_a_weight_that_was_exchanged_for_a_tensor_is_there_after_backward(mode: Any) -> None:
    """After the second run, the weight was None: the tensor's attribute, which was no longer there, was put back as None."""
    ours = fit(lambda: DropsWeights(Stack()), vectors(), superpipeline(k=1, activations=mode))
    assert_same(ours, fit(lambda: DropsWeights(Stack()), vectors()))
    inner = ours.module.net.blocks[1].inner
    assert "weight" not in vars(inner)
    assert isinstance(inner.weight, nn.Parameter)


class CallsAnother(Block):
    """A unit in another one's forward."""

    def __init__(self, other: list[nn.Module]) -> None:
        super().__init__()
        self.other = other

    def factor(self, x: Tensor) -> Tensor:
        return self.other[0](x)


class AsksForGradients(Block):
    """A backward in a forward, and a storage that is written after it."""

    def factor(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.inner(x)) * 1.5 + torch.sin(x)
        (gradient,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return torch.sin(y + torch.tanh(gradient))


class Mapped(Block):
    def forward(self, x: Tensor) -> Tensor:
        return torch.vmap(self.row)(x)

    def row(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.inner(x))


def nested() -> Module:
    stack = Stack()
    stack.blocks[1] = CallsAnother([stack.blocks[3]])
    return Module(stack)


@pytest.mark.long("takes a second or more")
@pytest.mark.parametrize("mode", ["recompute", "offload"])
@pytest.mark.parametrize(
    "make",
    [
        pytest.param(nested, id="nested"),
        pytest.param(twice(AsksForGradients), id="gradients"),
        pytest.param(twice(Mapped), id="vmap", marks=pytest.mark.rest("vmap around a layer is in the first tier")),
    ],
)
def test_forwards_of_all_kinds(make: Any, mode: Any) -> None:
    with simulated():
        ours = fit(make, vectors(), superpipeline(k=1, activations=mode))
    assert_same(ours, fit(make, vectors()))


class Remembers(Block):
    """Keeps a tensor with its graph, which nobody goes backward through."""

    def factor(self, x: Tensor) -> float:
        self.last = self.inner(x) * 2
        return 1.0


def vmapped(net: nn.Module, batch: Tensor) -> Tensor:
    return torch.vmap(net, randomness="different")(batch).square().mean()


def forward_mode(net: nn.Module, batch: Tensor) -> Tensor:
    with forward_ad.dual_level():
        dual = net(forward_ad.make_dual(batch, torch.ones_like(batch)))
        return forward_ad.unpack_dual(dual).tangent.square().mean()


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.parametrize("mode", ["recompute", "offload"])
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
@pytest.mark.parametrize("transform", [vmapped, forward_mode])
def test_what_checkpoints_cannot_repeat_is_kept(transform: Callable[..., Tensor], mode: Any) -> None:
    class Transforms(Module):
        def loss(self, batch: Any) -> Tensor:
            return transform(self.net, batch) + super().loss(batch)

    ours = fit(lambda: Transforms(Stack()), vectors(), superpipeline(k=1, activations=mode))
    assert_same(ours, fit(lambda: Transforms(Stack()), vectors()))


@pytest.mark.long("graphs are looked for in all memory")
@pytest.mark.parametrize("mode", ["recompute", "offload"])
def test_no_graph_keeps_that_of_the_batch_before(mode: Any) -> None:
    alive: list[int] = []
    seen: weakref.WeakSet[Tensor] = weakref.WeakSet()

    class Counts(Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            seen.update(block.last for block in pl_module.net.blocks)
            gc.collect()
            alive.append(len(seen))

    fit(twice(Remembers), vectors(6), superpipeline(activations=mode), callbacks=[Counts()], recorded="losses")
    assert alive[-1] <= alive[1]


class Logs(Block):
    """As layers do that know their LightningModule."""

    def factor(self, x: Tensor) -> float:
        self.say[0]("inside", x.detach().mean(), on_step=True, on_epoch=True)
        return 1.0


@pytest.mark.rest("takes tenths of a second")
def test_what_a_layer_logs_is_logged_once() -> None:
    def make() -> Module:
        module = twice(Logs)()
        for block in module.net.blocks:  # type: ignore[union-attr]
            block.say = [lambda *args, **more: module.log(*args, **more)]  # type: ignore[union-attr]
        return module

    ours = fit(make, vectors(), superpipeline(activations="recompute"))
    plain = fit(make, vectors())
    assert_equal(ours.trainer.callback_metrics, plain.trainer.callback_metrics, "metrics")


# ---------------------------------------------------------------------- inside a checkpoint of the user's


class Normalized(Block):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(16)

    def factor(self, x: Tensor) -> Tensor:
        return self.norm(x)


class Checkpointed(Stack):
    """Checkpoints each of its blocks, or two at once. One of the two may hand what it saves to other hooks."""

    def __init__(self, block: Callable[[], nn.Module], how: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(4))
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        one, two, three, four = self.blocks
        if self.how == "two at once":
            return self.head(four(three(checkpoint(lambda y: two(one(y)), x, use_reentrant=False))))
        if self.how == "packed elsewhere":
            return self.head(checkpoint(lambda y: _with_other_hooks(one, two(y)), x, use_reentrant=False))
        for block in self.blocks:
            x = checkpoint(block.forward if self.how == "forwards" else block, x, use_reentrant=False)
        return self.head(x)


def _with_other_hooks(block: nn.Module, x: Tensor) -> Tensor:
    with torch.autograd.graph.save_on_cpu():
        return block(x)


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.filterwarnings("ignore:`torch.nn.utils.spectral_norm` is deprecated")
@pytest.mark.parametrize(
    "options",
    [
        {"activations": "recompute", "k": 2},
        {"activations": {"net.blocks.0": "recompute", "**": "keep"}, "k": 1},
        {"activations": "auto", "gpu_memory": 150_000},
    ],
    ids=["all", "one", "auto"],
)
@pytest.mark.parametrize("how", ["blocks", "forwards", "two at once", "packed elsewhere"])
@pytest.mark.parametrize(
    "block", first([Normalized, old_spectral_norm], Normalized, why="a hook writes buffers as a forward does")
)
@pytest.mark.usefixtures("nothing_fits")
def test_a_checkpoint_of_the_users_around_a_layer_shows_as_often_as_ever(
    block: Callable[[], nn.Module], how: str, options: dict[str, Any]
) -> None:
    def make() -> Module:
        return Module(Checkpointed(block, how))

    batches = [torch.randn(256, 16) for _ in range(4)]
    assert_same(fit(make, batches, superpipeline(**options)), fit(make, batches))


# ---------------------------------------------------------------------- forwards of the user's own


class Wraps(Module):
    """Wraps a forward within a step, and leaves it there; another module has one of its own already."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        block: Any = self.net.blocks[1]  # type: ignore[index]
        forward = block.forward
        block.forward = lambda x: forward(x) * 0.5
        return super().training_step(batch, batch_idx)


def with_own_forward() -> Module:
    stack = Stack()
    block: Any = stack.blocks[2]
    forward = block.forward
    block.forward = lambda x: forward(x) * 2
    return Wraps(stack)


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.parametrize("mode", ["recompute", "offload"])
def test_forwards_that_users_replace(mode: Any) -> None:
    ours = fit(with_own_forward, vectors(), superpipeline(activations=mode))
    assert_same(ours, fit(with_own_forward, vectors()))


class Moved(Block):
    """What NLLB's router does: ``.to`` that changes nothing gives ``param.data`` itself."""

    def factor(self, x: Tensor) -> float:
        self.inner = self.inner.to(self.inner.weight.dtype)
        return 2.0


@pytest.mark.rest("takes tenths of a second")
def test_a_move_that_changes_nothing_is_no_write(monkeypatch: pytest.MonkeyPatch) -> None:
    def make() -> Module:
        return Module(nn.Sequential(*(Moved() for _ in range(4))))

    def refuse(self: HostBlock, index: int, value: Tensor) -> None:
        raise AssertionError("nothing was written")

    monkeypatch.setattr(HostBlock, "write", refuse)
    strategy = superpipeline(k=1, activations="recompute")
    assert_same(fit(make, vectors(), strategy), fit(make, vectors()))


@pytest.mark.rest("takes tenths of a second")
def test_pyros_handlers_are_there_for_the_second_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A guide's draws were replayed in the first run; in the second one, in backward, the model drew anew, silently."""
    runtime: Any = types.ModuleType("pyro.poutine.runtime")
    runtime._PYRO_STACK = []
    monkeypatch.setitem(sys.modules, "pyro.poutine.runtime", runtime)

    class Replay:
        """Gives what the guide drew, once for each site, as Pyro's traces do."""

        def __init__(self) -> None:
            self.sites = {number: torch.randn(16) for number in range(4)}
            self.seen: dict[int, Tensor] = {}

        def sample(self, site: int) -> Tensor:
            assert site not in self.seen, "Multiple sample sites"
            self.seen[site] = self.sites[site]
            return self.sites[site]

    class Sampled(Block):
        def __init__(self, site: int) -> None:
            super().__init__()
            self.site = site

        def factor(self, x: Tensor) -> Tensor:
            return runtime._PYRO_STACK[-1].sample(self.site) if runtime._PYRO_STACK else torch.randn(16)

    class Guided(Module):
        def loss(self, batch: Any) -> Tensor:
            runtime._PYRO_STACK.append(Replay())
            try:
                return super().loss(batch)
            finally:
                runtime._PYRO_STACK.pop()

    def make() -> Module:
        return Guided(nn.Sequential(*(Sampled(site) for site in range(4))))

    assert_same(fit(make, vectors(), superpipeline(k=1, activations="recompute")), fit(make, vectors()))
    assert runtime._PYRO_STACK == []
