"""Loops without a Trainer, in ``sp_lightning.stream``: usual forms, other orders of the same calls, errors and what they say."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from contextlib import nullcontext, suppress
from functools import partial
from itertools import count
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import accelerate
import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from sp_lightning import compile_blocks, stream
from sp_lightning.core.engine.step import Step
from tests.equality.cases import CASES
from tests.equality.rows import Streamed, loop, mistake, tiers
from tests.support import loops
from tests.support.loops import acts, tie, trained
from tests.support.models import Module, Stack, fused_adamw, llama, tokens, vectors
from tests.support.simdevice import simulated

OFF = tiers(rest=["keep, k=1"])
BOTH = tiers(rest=["keep, k=1", "forward, accumulated, clipped, two epochs"])
QUICK = tiers("keep, k=1", "forward, accumulated, clipped, two epochs")
LATE = ("keep, k=1, simulated", "forward, accumulated, clipped, two epochs, simulated")


class Fused(Module):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return fused_adamw(self)


FORMS = {
    "no more than the calls": loops.Loop(),
    "clipping": loops.Loop(clip=0.1),
    "accumulation": loops.Loop(accumulate=2),
    "zero_grad between forward and backward": loops.Loop(zero_first=True),
    "a scheduler": loops.Loop(schedule=True),
    "evaluation after each step": loops.Loop(evaluate=True),
    "a closure": loops.Loop(closure=True),
    "a scaler": loops.Loop(scale=True, clip=0.1),
    "bfloat16": loops.Loop(bf16=True),
}
for name, form in FORMS.items():
    late = 2 if name in ("clipping", "evaluation after each step") else 3

    @loop(f"loop: {name}", {**OFF, **dict.fromkeys(LATE, late)})
    def _(streamed: Streamed, form: loops.Loop = form) -> Any:
        """No copy and no update races with the loop's own code."""
        streamed = partial(streamed, only_steps_write=form.clip is not None)
        return trained(lambda: Fused(Stack()), vectors(4), form, streamed)


class UsesTwice(nn.Module):
    """Weights that a forward uses several times: learned prompts, a shared layer, a matrix, also where autocast does not cast.

    With ``reentrant`` a part runs in the user's own checkpoint.
    """

    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        self.prompt, self.reentrant = nn.Parameter(torch.randn(3, 16)), reentrant
        self.keys, self.values = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Any:
        if self.reentrant is None:
            return self.run(x)
        return checkpoint(self.run, x.requires_grad_(), use_reentrant=self.reentrant)

    def run(self, x: Tensor) -> Tensor:
        keys, values = self.keys(self.prompt), self.values(self.prompt)
        x = x + torch.tanh(self.keys(x) + self.keys(2 * x)) + (torch.softmax(x.to(keys.dtype) @ keys.t(), -1) @ values)
        x = x + (x @ self.prompt.t()) @ self.prompt + self.prompt.mean(0) * self.prompt[0]
        return torch.tanh(x.float())


for reentrant, cast in ((None, None), (False, torch.bfloat16), (True, torch.bfloat16), (None, torch.bfloat16)):
    loop(
        f"loop: uses of a weight in autocast, reentrant={reentrant}, autocast={cast}",
        tiers("keep, k=1", "recompute, k=1", "offload, k=1"),
        covers="their gradients were added in float32 in a forward that runs again; plain adds them in bfloat16",
    )(lambda streamed, reentrant=reentrant, cast=cast: trained(
        lambda: Fused(nn.Sequential(*(UsesTwice(reentrant) for _ in range(3)))), vectors(2), FORMS["bfloat16"],
        partial(streamed, autocast=cast),
    ))  # fmt: skip

BY_KIND = {
    "llama-checkpoint-reentrant", "gpt2-tied", "vit", "lstm", "reused", "conditional", "frozen", "clamped-in-forward", "teacher",
    "penalty-on-parameters", "autograd-grad", "sparse-embedding", "tied-apart", "experts/mixture", "rows/looked-up",
    "transformer-encoder", "parameter-hooks", "quantised/int8",
}  # fmt: skip
for name, case in CASES.items():
    if name == "gan":
        continue  # two optimizers are a loop of their own
    form = loops.Loop(clip=None if "sparse" in name else 0.1, closure=name == "lbfgs")
    loop(f"loop: case {name}", {"keep, k=1": 2 if name in BY_KIND else 3}, covers=case.covers)(
        lambda streamed, case=case, form=form: trained(case.make, case.batches(), form, streamed)
    )

# ---------------------------------------------------------------------- other orders of the same calls


def order(name: str, variants: Any = BOTH, net: Any = Stack, optimizer: Any = fused_adamw) -> Callable[[Any], Any]:
    """Registers what a loop does with net, optimizer and batch before each step. What it returns is compared."""

    def register(code: Callable[[Any, Any, Any], Any]) -> None:
        def train(streamed: Streamed) -> Any:
            trained, found = net(), []
            stepped = optimizer(trained)
            with streamed(trained, stepped):
                for x in vectors(3):
                    found.append(code(trained, stepped, x))
                    stepped.step()
                    stepped.zero_grad()
            return [found, dict(trained.state_dict()), stepped.state_dict()]

        loop(f"loop: {name}", variants, covers=code.__doc__ or "another order of the same calls")(train)

    return register


def backward_of_two(net: Any, optimizer: Any, x: Tensor) -> Tensor:
    loss: Tensor = net(x).square().mean() + net(2 * x).mean()
    loss.backward()
    return loss


order("one backward of two forwards")(backward_of_two)


@order("a forward without a backward, then two with one each")
def _(net: Any, optimizer: Any, x: Tensor) -> Any:
    net(x).sum()
    one, other = net(x).square().mean(), net(2 * x).mean()
    one.backward()
    other.backward()
    return one


@order("a reference forward between forward and backward")
def _(net: Any, optimizer: Any, x: Tensor) -> Any:
    """Without gradients, as in preference optimization."""
    output = net(x)
    with torch.no_grad():
        reference = net(x + 1)
    (output - reference).square().mean().backward()
    return output


@order("a graph that is retained")
def _(net: Any, optimizer: Any, x: Tensor) -> None:
    loss = net(x).square().mean()
    loss.backward(retain_graph=True)
    loss.backward()


@order("gradients that are asked for")
def _(net: Any, optimizer: Any, x: Tensor) -> None:
    """``torch.autograd.grad`` with parameters of before the step."""
    parameters = optimizer.param_groups[0]["params"]
    gradients = torch.autograd.grad(net(x).square().mean(), parameters)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient


@order("weights written between any two calls")
def _(net: Any, optimizer: Any, x: Tensor) -> Any:
    """Through ``.data``, a copy and ``load_state_dict``."""
    with torch.no_grad():
        before = net(x)
    net.load_state_dict({name: value * 0.99 for name, value in net.state_dict().items()})
    for parameter in net.parameters():
        parameter.data.mul_(0.9)
    net(x).square().mean().backward()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(0.01)
    return before


@order("a copy of the module in the middle of a step")
def _(net: Any, optimizer: Any, x: Tensor) -> Any:
    output, twin = net(x), copy.deepcopy(net)
    ((output - twin(x).detach()).square().mean() + output.mean()).backward()
    return dict(twin.state_dict())


@order("a layer that is frozen and thawed")
def _(net: Any, optimizer: Any, x: Tensor) -> None:
    net.head.requires_grad_(not net.head.weight.requires_grad)
    backward_of_two(net, optimizer, x)


@order("a parameter that is exchanged")
def _(net: Any, optimizer: Any, x: Tensor) -> None:
    """The engine is built again."""
    net.head.weight = nn.Parameter(net.head.weight.detach() * 0.9)
    optimizer.add_param_group({"params": [net.head.weight]})
    backward_of_two(net, optimizer, x)


@order("errors that the loop catches")
def _(net: Any, optimizer: Any, x: Tensor) -> None:
    """In forward and in backward."""
    with mock.patch.object(net.head, "forward", side_effect=KeyError), suppress(KeyError):
        net(x)
    output = net(x)
    output.register_hook(lambda gradient: 1 / 0)
    with suppress(ZeroDivisionError):
        output.sum().backward()
    backward_of_two(net, optimizer, x)


@order("two backwards, the second with changed weights")
def _(net: Any, optimizer: Any, x: Tensor) -> None:
    """By the gradients of the first, as SAM does."""
    for sign in (1, -1):
        net(x).square().mean().backward()
        with torch.no_grad():
            if sign == 1:
                changes = [0.05 * parameter.grad for parameter in net.parameters()]
                optimizer.zero_grad()
            for parameter, change in zip(net.parameters(), changes, strict=True):
                parameter.add_(sign * change)


@loop("loop: two streams in one backward", OFF, inside=partial(simulated, shared=True))
def _(streamed: Streamed) -> Any:
    """The generator's loss goes through the discriminator. Both had one upload stream on a GPU, and no wait was made for that."""
    nets = [Stack(3), Stack(3)]
    ours, theirs = (torch.optim.SGD(net.parameters(), lr=1e-2) for net in nets)
    with streamed(nets[0], ours), streamed(nets[1], theirs):
        for x in vectors(3):
            nets[1](nets[0](x)).mean().backward()
            ours.step()
            theirs.zero_grad()
            nets[1](nets[0](x).detach()).square().mean().backward()
            theirs.step()
            ours.zero_grad()
    return [dict(net.state_dict()) for net in nets]


@loop("loop: two optimizers", tiers("keep, k=1", rest=["forward, accumulated, clipped, two epochs"]))
def _(streamed: Streamed) -> Any:
    """Each steps after losses of its own, and one of them in every second batch only, as in adversarial training."""
    net = Stack(3)
    blocks, others = list(net.blocks.parameters()), [*net.stem.parameters(), *net.head.parameters()]
    often = torch.optim.AdamW(blocks, lr=1e-2, fused=True)
    seldom = torch.optim.SGD(others, lr=1e-2, momentum=0.9, fused=True)
    with streamed(net, [often, seldom]):
        for number, x in enumerate(vectors(4)):
            net(x).square().mean().backward()
            often.step()
            net.zero_grad()
            if number % 2:
                net(x).mean().backward()
                nn.utils.clip_grad_value_(others, 0.01)
                seldom.step()
    return [dict(net.state_dict()), often.state_dict(), seldom.state_dict()]


@loop("loop: generation between steps", OFF)
def _(streamed: Streamed) -> Any:
    """A generation is one step."""
    net: Any = llama(dropout=0.0).net
    optimizer, found = fused_adamw(net), []
    with (
        streamed(net, optimizer) as ours,
        mock.patch.object(Step, "begin", autospec=True, side_effect=Step.begin) as begun,
    ):
        for batch in tokens(2):
            net.train()
            net(**batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            net.eval()
            found.append(net.generate(batch["input_ids"][:1], max_new_tokens=3, do_sample=True, pad_token_id=0))
        assert ours is None or [each.args[1] for each in begun.call_args_list] == ["train", "predict"] * 2
    return [found, dict(net.state_dict())]


for whole in (True, False):

    @loop(f"loop: compiled, {whole=}", tiers(long=OFF))
    def _(streamed: Streamed, whole: bool = whole) -> Any:
        """The whole module, or its blocks, of which only the blocks stay compiled."""
        torch._dynamo.reset()
        warnings.filterwarnings(
            "ignore", category=UserWarning
        )  # dynamo's on inputs that are no leaves, ours on ended graphs
        net = Stack()
        if not whole:
            compile_blocks(net, backend="aot_eager")
        optimizer = torch.optim.AdamW(net.parameters())
        with streamed(net, optimizer):
            call = torch.compile(net, backend="aot_eager") if whole else net
            for x in vectors(3):
                call(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        return dict(net.state_dict())


@loop("loop: inference alone", tiers("keep, k=1"))
def _(streamed: Streamed) -> Any:
    """There is no optimizer."""
    net = Stack().eval()
    with streamed(net), torch.no_grad():
        return [net(x) for x in vectors(3)]


class Keeps(Stack):
    """Its forward keeps the loss, and returns nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[Tensor] = []

    def forward(self, x: Tensor) -> Any:
        self.losses.append(super().forward(x).square().mean())


@loop("loop: forwards that return None", tiers("keep, k=1"))
def _(streamed: Streamed) -> Any:
    """The step ended with the first one, so gradients of a penalty were added in another order."""
    net, found = Keeps(), []
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.05)
    with streamed(net, optimizer):
        for number, batch in enumerate(vectors(3)):
            for factor in range(1 + number % 2):
                net(batch * (1 + factor))
            penalty = sum(((weight * 1.3).square().sum() + weight.abs().sum() for weight in net.parameters()), 0.0)
            (torch.stack(net.losses).sum() + 0.01 * penalty).backward()
            net.losses.clear()
            found += [weight.grad.clone() for weight in net.parameters() if weight.grad is not None]
            optimizer.step()
            optimizer.zero_grad()
    return [*found, *net.parameters()]


def wrapped(net: Any) -> Any:
    return accelerate.Accelerator(cpu=True, device_placement=False).prepare(fused_adamw(net))


order("an optimizer that accelerate has wrapped", QUICK, optimizer=wrapped)(backward_of_two)


class MasterAdamW(torch.optim.AdamW):
    """Steps float32 copies of 16-bit weights, as NeMo's, BAdam's and apex's optimizers do."""

    def __init__(self, parameters: Any) -> None:
        self.own = list(parameters)
        super().__init__([nn.Parameter(each.detach().float()) for each in self.own], lr=1e-2)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        pairs = list(zip(self.param_groups[0]["params"], self.own, strict=True))
        for master, own in pairs:
            master.grad = own.grad.float()
        super().step()
        for master, own in pairs:
            own.data.copy_(master.data)
            own.grad = None


@loop("loop: an optimizer of master weights", tiers("keep, k=1", "keep, k=1, simulated"))
def _(streamed: Streamed) -> Any:
    """Without optimizers, steps ended with the forward: a penalty was added up in another order, and plans had no gradients."""
    net = Stack(3).bfloat16()
    optimizer, losses = MasterAdamW(net.parameters()), []
    with suppress(ValueError), streamed(net, optimizer):
        pass  # "leave it out"
    with streamed(net) as ours:
        for index, x in enumerate(vectors(6)):
            loss = net(x.bfloat16()).float().square().mean()
            for p in net.parameters():
                loss = loss + p.float().pow(3).sum() + p.abs().sum().float()
            losses.append(loss)
            loss.backward()
            if index % 2:
                optimizer.step()
                with torch.no_grad():
                    losses.append(net(x.bfloat16()).sum())
        assert ours is None or ours.plan.gradient_bytes > 0
    return losses, dict(net.state_dict())


class Shifted(nn.Module):
    """Calls a frozen module with weights that are computed from trained ones."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4))).requires_grad_(False)
        self.shifts = nn.ParameterList(nn.Parameter(torch.full_like(p, 0.1)) for p in self.inner.parameters())

    def forward(self, x: Tensor) -> Any:
        named = zip(self.inner.named_parameters(), self.shifts, strict=True)
        return functional_call(self.inner, {name: weight + shift for (name, weight), shift in named}, (x,))


order("computed weights in a forward", tiers("keep, k=1"), net=Shifted)(
    backward_of_two
)  # the remedy of the error below

# ---------------------------------------------------------------------- weights of another module, in the same memory


class ByHand:
    """Steps weights as a loop without optimizers does."""

    def __init__(self, net: nn.Module) -> None:
        self.net = net

    def step(self) -> None:
        with torch.no_grad():
            for weight in self.net.parameters():
                weight.sub_(0.1 * weight.grad)

    def zero_grad(self) -> None:
        self.net.zero_grad()


def played(streamed: Streamed, before: Callable[..., Any], begun: Callable[..., Any], *, given: bool = True) -> Any:
    """Trains an agent. Before the stream begins, ``before`` gets agent and player, and after that ``begun``, and the stream."""
    agent, player = Stack(3), Stack(3)
    kept = [before(agent, player)]
    optimizer = fused_adamw(agent) if given else ByHand(agent)
    with streamed(agent, *([optimizer] if given else [])) as ours:
        kept.append(begun(agent, player, ours))
        found = [acts(agent, player, optimizer, x) for x in vectors(4)]
    return [found, dict(agent.state_dict()), kept[1]]


def tied_and_built_again(agent: Any, player: Any, ours: Any) -> None:
    tie(player, agent)
    player.stem.weight.data = agent.stem.weight.data
    if ours is not None:
        ours.gpu_memory = "1GiB"


def tied_and_exchanged(agent: Any, player: Any, _: Any) -> None:
    tie(player, agent)
    agent.head.bias = nn.Parameter(agent.head.bias.detach() * 0.9)


def nothing(*_: Any) -> None: ...


TIES = tiers("keep, k=1", rest=["forward, accumulated, clipped, two epochs", *LATE])
for name, begun, given, covers in (
    ("after the stream began", lambda agent, player, _: tie(player, agent), True, "they follow each step"),
    ("and the engine is built again", tied_and_built_again, True, "they follow to the new memory"),
    ("and gradients are planned", lambda agent, player, _: tie(player, agent), False, "the engine is built again for them"),
    ("and a parameter is exchanged", tied_and_exchanged, True, "the engine is built again, in a layout of its own"),
):  # fmt: skip
    loop(f"loop: weights tied to another module {name}", TIES, covers=covers)(
        partial(played, before=nothing, begun=begun, given=given)
    )


def given_a_vector(agent: Any, _: Any) -> Tensor:
    vector = nn.utils.parameters_to_vector(agent.parameters()).detach()
    nn.utils.vector_to_parameters(vector, agent.parameters())
    return vector


def mapped(agent: Any, _: Any) -> Any:
    with TemporaryDirectory() as folder:
        torch.save(agent.state_dict(), f"{folder}/agent.pt")
        state = torch.load(f"{folder}/agent.pt", mmap=True)
        agent.load_state_dict(state, assign=True)
    return state


def frozen(agent: Any, player: Any) -> None:
    agent.blocks.requires_grad_(False)
    player.requires_grad_(False)
    tie(player.blocks, agent.blocks)


def tied_and_copied(agent: Any, player: Any) -> None:
    tie(player, agent)
    for parameter in player.parameters():
        parameter.data = parameter.data.clone()


def of_the_dead(agent: Any, _: Any) -> None:
    dead = Stack(3)
    vars(dead)["itself"] = dead
    tie(agent, dead)


for name, before in (
    ("a vector that all weights are views of", given_a_vector),
    ("a mapped file", mapped),
    ("a held state_dict()", lambda agent, _: agent.state_dict()),
    ("a frozen module", frozen),
    ("a module until that gets a copy", tied_and_copied),
    ("a module that only a cycle holds", of_the_dead),
):  # fmt: skip
    loop(f"loop: memory that a weight shares with {name}", tiers("keep, k=1"), covers="no tie to be kept")(
        partial(played, before=before, begun=nothing)
    )

# ---------------------------------------------------------------------- what does not go, and what is said

NET, X = partial(Stack, 2), vectors(1)[0]


def within(code: Callable[..., Any], make: Callable[[], Any] = NET, **options: Any) -> Callable[[], None]:
    """Code in an open stream of a net; it gets net and stream."""

    def run() -> None:
        net = make()
        with stream(net, torch.optim.SGD(net.parameters(), lr=1e-2), **{"k": 1, **options}) as streamed:
            code(net, streamed)

    return run


def computed(net: Any, _: Any) -> None:
    functional_call(net, {name: weight * 1.0 for name, weight in net.named_parameters()}, (X,))


def of_another(net: Any, _: Any) -> None:
    net(X).sum().backward()
    torch.optim.SGD(net.head.parameters(), lr=1.0).step()


def in_a_step(net: Any, streamed: Any) -> None:
    loss = net(X).sum()
    try:
        stream(net)
    finally:
        loss.backward()


def after_the_end() -> None:
    net = NET()
    with stream(net, torch.optim.SGD(net.parameters()), k=1) as streamed:
        loss = net(X).sum()
    streamed.close()  # again
    loss.backward()


def in_two_processes() -> None:
    with mock.patch.multiple("torch.distributed", is_initialized=lambda: True, get_world_size=lambda: 2):
        stream(NET())


def tied_before(part: slice = slice(None)) -> None:
    net, player = NET(), NET().requires_grad_(False)
    player.head.weight = nn.Parameter(net.head.weight.data[part], requires_grad=False)
    stream(net)


def tied_buffer() -> None:
    net, other = NET(), NET()
    other.register_buffer("kept", net.head.weight.data)
    stream(net)


def tied_streams(*, first: bool) -> None:
    net, player = NET(), NET()
    with stream(net, k=1):
        if first:
            tie(player, net)
        with stream(player, k=1), torch.no_grad():
            tie(player, net)
            player(X)


def thawed() -> None:
    net, player = NET().requires_grad_(False), NET().requires_grad_(False)
    tie(player, net)
    with stream(net, k=1):
        net(X)
        net.head.requires_grad_(True)
        net(X)


def lacks_memory(net: Any, _: Any) -> None:
    with mock.patch.object(net.head, "forward", side_effect=torch.OutOfMemoryError):
        net(X)


def unrepeatable(net: Any, _: Any) -> None:
    calls, block = count(), net.blocks[1]
    block.inner.register_forward_pre_hook(lambda *_: setattr(block, "calls", next(calls)))
    net(X).sum().backward()


def gradients_do_not_fit() -> None:
    net = Stack(3)
    with stream(net, k=1, k_prime=1) as streamed:
        least = streamed.plan.peak_device_bytes
    with stream(net, k=1, k_prime=1, gpu_memory=least) as streamed:
        with pytest.raises(ValueError, match="Weights and gradients need"), nullcontext(streamed):
            net(X)
        with torch.no_grad():
            assert net(X).shape == (4, 16)  # as the note says
        net(X)


def _wrapped(net: Any, _: Any) -> None:
    checkpoint(net, X, use_reentrant=False)


for name, said, code in (
    ("a weight of two streams", r"ValueError: 'weight' is streamed already.*stream\.close",
     within(lambda net, _: stream(net.head))),
    ("a second stream within a step", "ValueError: 'stem.weight' is streamed already", within(in_a_step)),
    ("weights tied before", r"ValueError: Parameter 'head.weight' shares its memory with 'weight' of a Linear.*after sp_light",
     tied_before),
    ("a part of a weight tied before", "ValueError: Parameter 'head.weight' shares its memory with 'weight' of a Linear",
     partial(tied_before, slice(2))),
    ("a buffer tied before", "ValueError: Parameter 'head.weight' shares its memory with 'kept' of a Stack", tied_buffer),
    ("frozen weights tied before, one thawed", "ValueError: Parameter 'head.weight' shares its memory", thawed),
    ("two streams of tied modules", r"ValueError: Parameter 'stem.weight' was given the memory.*Stream only one of them",
     partial(tied_streams, first=True)),
    ("modules tied in their streams", r"RuntimeError: Parameter 'stem.weight' was given the memory.*Stream only one of them",
     partial(tied_streams, first=False)),
    ("an optimizer that the stream was not given",
     r"RuntimeError: SGD steps weights of a stream, and was not given.*close this stream.*\[all optimizers\]",
     within(of_another)),
    ("an optimizer of another model", "ValueError: SGD has no weight of the streamed module",
     lambda: stream(NET(), torch.optim.SGD(nn.Linear(1, 1).parameters()))),
    ("an optimizer of master weights", r"ValueError: .*master weights\), leave it out: sp_lightning\.stream\(model\)",
     lambda: stream(net := NET(), MasterAdamW(net.parameters()))),
    ("a backward after the end", "RuntimeError: .*backward was called on a graph of a run that is over", after_the_end),
    ("several processes", r"ValueError: .*in one of 2 processes.*Trainer\(strategy=", in_two_processes),
    ("weights elsewhere", r"ValueError: 'weight' is on meta.*Leave out model\.to",
     lambda: stream(nn.Linear(2, 2, device="meta"))),
    ("DataParallel", r"TypeError: .*expected the module itself.*model\.module", lambda: stream(nn.DataParallel(NET()))),
    ("an option of the Trainer", "TypeError: .*no option 'save_frozen', which belongs to Lightning's Trainer",
     lambda: stream(NET(), save_frozen=False)),
    ("an option that is not there", r"TypeError: stream\(\) has no option 'memory'", lambda: stream(NET(), memory="1GiB")),
    ("precision", r"TypeError: .*no option 'precision'. Use autocast=torch\.bf", lambda: stream(NET(), precision="bf16-mixed")),
    ("updates under backward", r"ValueError: .*a loop does not say before a backward.*Use sp_lightning\.stream\(model, opti",
     within(lambda *_: None, optimizer_overlap="backward")),
    ("no module", "TypeError: .*expected a module, its optimizer", lambda: stream(1)),  # type: ignore[arg-type]
    ("no optimizer", "TypeError: .*expected a module, its optimizer", lambda: stream(NET(), 3)),  # type: ignore[arg-type]
    ("a list without optimizers", "TypeError: .*expected a module, its optimizer", lambda: stream(NET(), [3])),  # type: ignore[list-item]
    ("a checkpoint around the root", "RuntimeError: .*around a streamed module", within(_wrapped)),
    ("computed weights of the root", r"RuntimeError: .*is a computed tensor .* Write functional_call into the forward",
     within(computed)),
    ("too little memory for a forward", r"OutOfMemoryError.*Use less: sp_lightning.stream\(model, optimizer, k=1, k_prime=1, ",
     within(lacks_memory, k=2)),
    ("too little memory for gradients", r"ValueError: .*Weights and gradients need.*call the module under torch.no_grad\(\)",
     gradients_do_not_fit),
    ("a forward that counts its calls", r"Unrepeatable: .*blocks\.1\.calls.*stream\(model, optimizer, activations=",
     within(unrepeatable, activations="recompute")),
):  # fmt: skip
    mistake(f"loop: {name}", said)(code)
