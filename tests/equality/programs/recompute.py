"""Forwards that run twice, as in torch's checkpoint: buffers count once, and what else a forward changes is refused."""

from __future__ import annotations

import contextvars
import copy
import itertools
import random
import types
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import torch
import transformers
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.checkpoint import checkpoint

from sp_lightning.core.store.block import HostBlock
from sp_lightning.core.torch_compat.private import current_graph_task
from tests.equality.rows import program, tiers
from tests.support.kernels import Block, CountsSaved, RunsKernel
from tests.support.models import Module, Stack, Transformer, tokens, twice, vectors
from tests.support.poison import crowded
from tests.support.runs import Make, Outcome

RECOMPUTE = tiers(rest=["recompute, k=1"])


def changes(what: str) -> dict[str, str]:
    """Refused, because a second run would change it again."""
    return {"recompute, k=1": f'Unrepeatable: The forward of \'net.* changes {what}, and would .*activations="offload"'}


BOTH = tiers(rest=["recompute, k=1", "offload, k=1"])


def three(block: Callable[[], nn.Module]) -> Make:
    return lambda: Module(nn.Sequential(*(block() for _ in range(3))))


# ---------------------------------------------------------------------- state that no version shows


@program("recompute: a buffer written through .data", RECOMPUTE, of=twice)
class Codebook(Block):
    """As vector quantizers do it: through ``.data``, which no version shows."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("code", torch.ones(16))

    code: Tensor

    def factor(self, x: Tensor) -> Tensor:
        self.code.data.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return self.code.clone()


@program("recompute: statistics of a function", RECOMPUTE, of=twice)
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


@program("recompute: arrays and queues", RECOMPUTE, of=twice, refused=changes("the attribute 'net.blocks.0.queue'"))
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


@program("recompute: random numbers of Python", RECOMPUTE, of=twice, refused=changes("the random numbers of Python"))
class DrawsFromPython(Block):
    """Draws from the generator of the process."""

    def factor(self, x: Tensor) -> Any:
        return random.random() * torch.tanh(x)


@program("recompute: random numbers of NumPy", RECOMPUTE, of=twice, refused=changes("the random numbers of NumPy"))
class DrawsFromNumPy(Block):
    """Draws from the generator of the process."""

    def factor(self, x: Tensor) -> Any:
        return float(np.random.rand()) * torch.tanh(x)


@program(
    "recompute: random numbers of others", RECOMPUTE, of=twice, refused=changes("the attribute 'net.blocks.0.theirs'")
)
class Draws(Block):
    """Random numbers that are not torch's own."""

    def __init__(self) -> None:
        super().__init__()
        self.theirs = torch.Generator().manual_seed(1)
        self.python, self.numpy = random.Random(1), np.random.default_rng(1)

    def factor(self, x: Tensor) -> Any:
        ours = self.python.random() + float(self.numpy.random())
        return torch.rand(16, generator=self.theirs) * ours


@program("recompute: objects in objects", RECOMPUTE, of=twice)
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


@program(
    "recompute: writes from the second batch on",
    RECOMPUTE,
    of=twice,
    refused=changes("the attribute 'net.blocks.0.calls'"),
)
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


@program("recompute: attributes that are not state", RECOMPUTE, of=twice)
class Odd(Block):
    """Attributes that are not state, and raise an error when they are read."""

    def __init__(self) -> None:
        super().__init__()
        self.fixed = np.broadcast_to(np.ones(1), (4,))
        self.unlisted = [torch.jit.script(nn.Linear(2, 2))]
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


class Repeats(Module):
    """Each block is called several times before backward."""

    def __init__(self, block: Callable[[], nn.Module], times: int) -> None:
        super().__init__(three(block)().net)
        self.times = times

    def loss(self, batch: Tensor) -> Tensor:
        return torch.stack([super(Repeats, self).loss(batch * (n + 1)) for n in range(self.times)]).sum()


for block, times in itertools.product((Unregistered, LateAndLarge, old_spectral_norm), (1, 3)):
    refused = {} if times == 1 else {"recompute, k=1": r"Unrepeatable: 'weight' of 'net.2' has been exchanged"}
    if block is not old_spectral_norm:
        refused = changes(f"the attribute 'net.0.{'leaf' if block is Unregistered else 'calls'}'")
    program(
        f"recompute: {block.__name__} out of sight, called {times} times", RECOMPUTE,
        batches=lambda: vectors(4), repairable=False, covers=block.__doc__ or "",
        refused=refused,
    )(lambda block=block, times=times: Repeats(block, times))  # fmt: skip


def _refuses(*_: Any) -> Any:
    raise NotImplementedError


_OF_CONTAINERS = ("__len__", "__iter__", "__eq__", "__hash__", "__bool__", "__getitem__", "items", "values", "copy")


class Holds(Block):
    """Objects whose classes raise an error for operations of a container, such as e3nn's ``Irrep``, a tuple without a length."""

    def __init__(self, kind: type) -> None:
        super().__init__()
        given = [(0, 1)] if kind in (tuple, list, set, deque) else []
        value = type("Hostile", (kind,), dict.fromkeys(_OF_CONTAINERS, _refuses))(*given)
        self.pairs = ((8, value),)
        self.listed = [value]


for kind in (object, tuple, list, set, deque, dict, OrderedDict, bytearray, random.Random):
    program(
        f"recompute: a {kind.__name__} whose methods raise", tiers("recompute, k=1"),
        covers="the snapshot read the length of a tuple whose class has none: a NotImplementedError without a text",
    )(three(partial(Holds, kind)))  # fmt: skip


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

    peak: Tensor
    table: Tensor

    def factor(self, x: Tensor) -> Tensor:
        now = x.detach().abs().amax(0)
        table = torch.cat([self.table * 0.9, self.table[-1:] * 1.1])
        if not self.peak.numel():
            self._put(self.peak, now)
        self.peak.copy_(torch.maximum(self.peak, now))
        self._put(self.table, table)
        return (1 + self.peak) * self.table[:, :16].sum(0)

    def _put(self, buffer: Tensor, value: Tensor) -> None:
        if self.how == "data":
            buffer.data = value
        elif self.how == "set":
            buffer.set_(value)  # type: ignore[call-overload]
        else:
            buffer.resize_(value.shape).copy_(value)


for how, width in itertools.product(("resize", "data", "set"), (16, 2**18)):
    program(
        f"recompute: a {'large' if width > 16 else 'small'} buffer that grows, by {how}",
        {"recompute, k=1": 1 if width == 16 else 2},
        refused={"recompute, k=1": r"Unrepeatable: .* writes the buffer 'table', which is too large"} if width > 16 else {},
        covers="values were restored into a tensor of another size: torch's own error, without a name",
    )(three(partial(Grows, how, width)))  # fmt: skip


# ---------------------------------------------------------------------- what others do between forward and backward


class Scaled(Block):
    def __init__(self) -> None:
        super().__init__()
        self.scale = 1.0
        self.drop = nn.Dropout(0.3)

    def factor(self, x: Tensor) -> Tensor:
        return self.drop(x) * self.scale * Adapts.where.get()


@program(
    "recompute: weights, mode, attribute and context of the first run", BOTH,
    refused={"recompute, k=1": "Unrepeatable: 'inner.weight' of 'net.blocks.0' has been exchanged"},
)  # fmt: skip
class Adapts(Module):
    """The second forward runs with other weights, another mode, another attribute, another context."""

    def __init__(self) -> None:
        super().__init__(twice(Scaled)().net)

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


def no_tensor_is_left(ours: Outcome) -> None:
    inner = ours.module.net.blocks[1].inner
    assert "weight" not in vars(inner)
    assert isinstance(inner.weight, nn.Parameter)


@program(
    "recompute: a weight exchanged for a tensor", BOTH, also=no_tensor_is_left,
    refused={"recompute, k=1": "Unrepeatable: 'inner.weight' of 'net.blocks.1' has been exchanged"},
)  # fmt: skip
class DropsWeights(Module):
    """One weight is exchanged while a forward runs, and put back before backward (WeightDrop): it was None after it."""

    def __init__(self) -> None:
        super().__init__(Stack())

    def loss(self, batch: Any) -> Tensor:
        linear: Any = self.net.blocks[1].inner  # type: ignore[union-attr, index]
        weight = linear.weight
        del linear.weight
        linear.weight = nn.functional.dropout(weight, 0.5)
        loss = super().loss(batch)
        del linear.weight
        linear.register_parameter("weight", weight)
        return loss


SIMULATED = tiers(rest=["recompute, k=1, simulated"], long=["offload, k=1, simulated"])


class CallsOther(Block):
    """A unit in another one's forward."""

    def __init__(self, other: list[nn.Module]) -> None:
        super().__init__()
        self.other = other

    def factor(self, x: Tensor) -> Tensor:
        return self.other[0](x)


@program("recompute: a unit in the forward of another one", SIMULATED)
def nested() -> Module:
    """A unit calls another one."""
    stack = Stack()
    stack.blocks[1] = CallsOther([stack.blocks[3]])
    return Module(stack)


@program("recompute: a backward in a forward", tiers(long=SIMULATED), of=twice)
class BackwardInside(Block):
    """A backward in a forward, and a storage that is written after it."""

    def factor(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.inner(x)) * 1.5 + torch.sin(x)
        (gradient,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return torch.sin(y + torch.tanh(gradient))


@program("recompute: vmap in a forward", tiers(long=SIMULATED), of=twice)
class Mapped(Block):
    """Around a layer's own weights."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.vmap(self.row)(x)

    def row(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.inner(x))


def vmapped(net: nn.Module, batch: Tensor) -> Tensor:
    return torch.vmap(net, randomness="different")(batch).square().mean()


def forward_mode(net: nn.Module, batch: Tensor) -> Tensor:
    with forward_ad.dual_level():
        dual = net(forward_ad.make_dual(batch, torch.ones_like(batch)))
        return forward_ad.unpack_dual(dual).tangent.square().mean()


class Transforms(Module):
    def __init__(self, transform: Callable[..., Tensor]) -> None:
        super().__init__(Stack())
        self.transform = transform

    def loss(self, batch: Any) -> Tensor:
        return self.transform(self.net, batch) + super().loss(batch)


for transform in (vmapped, forward_mode):
    program(
        f"recompute: {transform.__name__}", BOTH, covers="what checkpoints cannot repeat is kept"
    )(lambda transform=transform: Transforms(transform))  # fmt: skip


class Logs(Block):
    """As layers do that know their LightningModule."""

    def factor(self, x: Tensor) -> float:
        self.say[0]("inside", x.detach().mean(), on_step=True, on_epoch=True)
        return 1.0


@program("recompute: a layer that logs", tiers(rest=["recompute"]))
def logging() -> Module:
    """It logs once."""
    module = twice(Logs)()
    for block in module.net.blocks:
        block.say = [lambda *args, **more: module.log(*args, **more)]
    return module


class Wraps(Module):
    """Wraps a forward within a step, and leaves it there; another module has one of its own already."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        block: Any = self.net.blocks[1]  # type: ignore[index]
        forward = block.forward
        block.forward = lambda x: forward(x) * 0.5
        return super().training_step(batch, batch_idx)


@program("recompute: forwards that users replace", tiers(rest=["recompute", "offload"]))
def with_own_forward() -> Module:
    """One before the run, one in a step."""
    stack = Stack()
    block: Any = stack.blocks[2]
    forward = block.forward
    block.forward = lambda x: forward(x) * 2
    return Wraps(stack)


def refuse(self: HostBlock, index: int, value: Tensor) -> None:
    raise AssertionError("nothing was written")


@program(
    "recompute: a move that changes nothing",
    RECOMPUTE,
    of=three,
    inside=lambda: mock.patch.object(HostBlock, "write", refuse),
)
class Moved(Block):
    """What NLLB's router does: ``.to`` that changes nothing gives ``param.data`` itself."""

    def factor(self, x: Tensor) -> float:
        self.inner = self.inner.to(self.inner.weight.dtype)
        return 2.0


# ---------------------------------------------------------------------- inside a checkpoint of the user's


class Normalized(Block):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(16)

    def factor(self, x: Tensor) -> Tensor:
        return self.norm(x)


def _with_other_hooks(block: nn.Module, x: Tensor) -> Tensor:
    with torch.autograd.graph.save_on_cpu():
        return block(x)


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


for block, how in itertools.product(
    (Normalized, old_spectral_norm), ("blocks", "forwards", "two at once", "packed elsewhere")
):
    program(
        f"recompute: {block.__name__} in a user's checkpoint of {how}",
        dict.fromkeys(("recompute, k=2", "net.blocks.0 recomputed, k=1", "auto in 150 kB"), 2)
        if block is Normalized else tiers(rest=["recompute, k=2"], long=["net.blocks.0 recomputed, k=1", "auto in 150 kB"]),
        batches=lambda: list(torch.randn(4, 256, 16, generator=torch.Generator().manual_seed(4))), inside=crowded,
        covers="a checkpoint of the user's around a layer shows as often as ever",
    )(lambda block=block, how=how: Module(Checkpointed(block, how)))  # fmt: skip


# ---------------------------------------------------------------------- what a forward keeps


@program("recompute: statistics, masks and counts", RECOMPUTE, of=twice)
class Norms(nn.Module):
    """Statistics that are moved, by momentum and by number, an iteration that is read and written, a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = spectral_norm(nn.Linear(16, 16))
        self.moved = nn.BatchNorm1d(16)
        self.averaged = nn.BatchNorm1d(16, momentum=None)
        self.drop = nn.Dropout(0.2)
        self.register_buffer("calls", torch.zeros(1))

    calls: Tensor

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x + self.drop(self.averaged(self.moved(self.inner(x)))) * self.calls


@program(
    "recompute: what Python keeps from call to call",
    RECOMPUTE,
    of=twice,
    refused=changes("the attribute 'net.blocks.0.calls'"),
)
class Keeps(nn.Module):
    """Everything that Python code keeps from call to call: a number, a list, a tensor, an object, a set."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)
        self.calls = 0
        self.means: list[float] = []
        self.by_name: dict[str, list[int]] = {"x": []}
        self.last: Any = torch.zeros(16)
        self.shapes: set[int] = set()

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.means.append(float(x.detach().mean()))
        self.by_name["x"].append(self.calls)
        self.shapes.add(self.calls)
        y = x + torch.tanh(self.inner(x)) * self.calls + self.last * len(self.means)
        self.last = y.detach().mean(0)
        self.fresh = len(self.shapes)
        return y


class Reached(nn.Module):
    """Statistics, and an iteration that is read and written."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = spectral_norm(nn.Linear(16, 16))
        self.norm = nn.BatchNorm1d(16)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.inner(x))


class Numbered(Reached):
    """A number that Python keeps."""

    number = 0

    def forward(self, x: Tensor) -> Tensor:
        self.number += 1
        return super().forward(x) / self.number


class CallsAnother(nn.Module):
    """A unit that calls another one, whose state is not its own."""

    def __init__(self, other: nn.Module, how: str) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)
        self.others, self.how = [other], how

    def forward(self, x: Tensor) -> Tensor:
        (other,) = self.others
        if self.how == "without gradients":
            with torch.no_grad():
                seen = other(x)
        else:
            seen = other(x)
            if self.how == "twice":
                seen = seen + other(x)
        return torch.tanh(self.inner(x + seen))  # torch stops the second run after what backward needs last


def calls_another(how: str, reached: type[nn.Module] = Reached) -> Module:
    stack = Stack()
    stack.blocks[1] = reached()
    stack.blocks[2] = CallsAnother(stack.blocks[1], how)
    stack.blocks[3] = CallsAnother(stack.blocks[2], how)
    return Module(stack)


HOW = ("called", "twice", "without gradients")


CALLER = {"net.blocks.2": "recompute", "**": "offload"}


for how in HOW:
    covers = "the state of a unit that a recomputed one calls changes once"
    variants = {**RECOMPUTE, **({"forward, recompute": 2} if how == "called" else {})}
    program(f"recompute: a unit {how} by another one", variants, covers=covers)(lambda how=how: calls_another(how))
    program(
        f"offload: a unit {how} by a recomputed one", RECOMPUTE, strategy={"activations": CALLER}, covers=covers
    )(lambda how=how: calls_another(how))  # fmt: skip
program(
    "offload: a unit that counts its calls, called by a recomputed one", RECOMPUTE, strategy={"activations": CALLER},
    repairable=False, refused=changes("the attribute 'net.blocks.1.number'"), covers="its count is not a buffer",
)(lambda: calls_another("called", Numbered))  # fmt: skip
program(
    "keep: a unit called twice by a recomputed one", RECOMPUTE, strategy={"activations": {"net.blocks.3": "recompute"}},
    covers="nothing but that one is recomputed",
)(lambda: calls_another("twice"))  # fmt: skip


def cached_llama() -> Transformer:
    """As a configuration comes: a forward makes a cache of keys and values, which its layers add to."""
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=32,
    )  # fmt: skip
    assert config.use_cache
    return Transformer(transformers.LlamaForCausalLM(config))


class LooksAtCache(Transformer):
    """The loss asks what the layers have added."""

    def loss(self, batch: Any) -> Tensor:
        output = self.net(**batch)
        return output.loss + sum(layer.keys.square().mean() for layer in output.past_key_values.layers)


class Collects(nn.Module):
    """Adds to a list and to a dict that it is given, and reads them."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)

    def forward(self, x: Tensor, seen: list[Tensor], *, by_name: dict[str, Any]) -> Tensor:
        seen.append(self.inner(x))
        by_name["count"] = by_name.get("count", 0) + 1
        return x + torch.tanh(sum(seen)) * len(seen) * by_name["count"]  # type: ignore[arg-type]


@program("recompute: what arguments collect", BOTH)
class Collecting(Module):
    """Each layer adds to a list and to a dict once."""

    def __init__(self) -> None:
        super().__init__(nn.ModuleList(Collects() for _ in range(4)))

    def loss(self, batch: Any) -> Tensor:
        seen: list[Tensor] = []
        by_name: dict[str, Any] = {}
        for block in self.net:  # type: ignore[attr-defined]
            batch = block(batch, seen, by_name=by_name)
        assert len(seen) == by_name["count"] == 4
        return batch.square().mean() + sum(each.square().mean() for each in seen)


def no_slot_is_held(ours: Outcome) -> None:
    """The cache holds the graphs of second runs until the step ends, and these held views of the slots."""
    assert not ours.trainer.strategy.stats().extra_slots


for model in (Transformer, LooksAtCache):
    program(
        f"recompute: a cache of {model.__name__}", BOTH, batches=tokens, also=no_slot_is_held,
        covers="keys and values are added to it twice, and the losses are equal",
    )(lambda model=model: model(cached_llama().net))  # fmt: skip


# ---------------------------------------------------------------------- copies, kernels


def cloned(module: nn.Module) -> Any:
    """As learn2learn's ``clone_module``: another object with the same attributes, except weights and modules."""
    clone: Any = module.__new__(type(module))
    clone.__dict__ = module.__dict__.copy()
    clone._parameters = {name: p.clone() for name, p in module._parameters.items() if p is not None}
    clone._modules = {name: cloned(child) for name, child in module._modules.items() if child is not None}
    return clone


def copied(module: nn.Module) -> Any:
    """A shallow copy of each module, with weights of its own."""
    copies: dict[nn.Module, Any] = {child: copy.copy(child) for child in module.modules()}
    for child, mine in copies.items():
        mine._parameters = {name: p.clone() for name, p in child._parameters.items() if p is not None}
        mine._modules = {name: copies[inner] for name, inner in child._modules.items() if inner is not None}
    return copies[module]


class Adapted(Module):
    """The loss of a copy whose weights have made a step of their own (MAML), and the copy once more after the step."""

    def __init__(self, clone: Callable[[nn.Module], Any]) -> None:
        super().__init__(Stack())
        self.clone = clone
        self.kept: list[Any] = []

    def loss(self, batch: Any) -> Tensor:
        clone = self.clone(self.net)
        weights = list(clone.parameters())
        gradients = torch.autograd.grad(clone(batch).square().mean(), weights, create_graph=True)
        stepped = {id(w): w - 0.5 * g for w, g in zip(weights, gradients, strict=True)}
        for module in clone.modules():
            module._parameters = {name: stepped[id(p)] for name, p in module._parameters.items()}
        self.kept = [clone]
        return super().loss(batch) + clone(batch).square().mean()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        clone = self.kept.pop()
        for module in clone.modules():
            module._parameters = {name: torch.full_like(p, 0.1) for name, p in module._parameters.items()}
        self.log("after", clone(batch).square().mean())


for clone in (cloned, copied):
    program(
        f"recompute: a layer {clone.__name__}", BOTH,
        covers="the copy's layers ran the forwards of the original, with the original's weights: nothing was adapted",
    )(lambda clone=clone: Adapted(clone))  # fmt: skip
program(
    "recompute: memory that a kernel has not written", tiers(long=["recompute, k=1, simulated"]), of=twice,
    covers="it is not compared",
)(RunsKernel)  # fmt: skip


_nodes: list[Any] = []


class ReadsNodes(Block):
    """A hook reads what the nodes of all blocks so far have saved, before their backward reads it."""

    def factor(self, x: Tensor) -> Any:
        output = torch.tanh(self.inner(x))
        if current_graph_task() == -1:
            _nodes.append(output.grad_fn)
        nodes = list(_nodes)
        output.register_hook(lambda gradient: gradient + sum(node._saved_result.mean() for node in nodes))
        return output


class RetainsGraph(Module):
    def __init__(self, block: Callable[[], nn.Module]) -> None:
        super().__init__(twice(block)().net)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        _nodes.clear()
        loss = self.loss(batch)
        optimizer.zero_grad()
        self.manual_backward(loss, retain_graph=True)
        self.manual_backward(loss)
        optimizer.step()


for block in (CountsSaved, ReadsNodes):
    said = (
        r"Unrepeatable: .*'net.blocks.\d' saved other tensors when it ran again .*torch says:\n.*already unpacked once"
    )
    program(
        f"recompute: saved tensors that {block.__name__} reads twice", RECOMPUTE, covers="a graph is kept for a second backward",
        refused={"recompute, k=1": said} if block is ReadsNodes else {},
    )(lambda block=block: RetainsGraph(block))  # fmt: skip


@program(
    "recompute: a recurrent layer", tiers(long=["recompute, k=1"]), of=twice,
    batches=lambda: list(torch.randn(3, 70, 16, generator=torch.Generator().manual_seed(4))),
)  # fmt: skip
class Recurrent(nn.Module):
    """On a CPU it saves a workspace that it has not written as a whole."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.LSTM(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)[0]
