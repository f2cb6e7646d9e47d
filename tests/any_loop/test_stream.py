"""A plain loop with ``sp_lightning.stream`` has the bits of the same loop without it."""

from __future__ import annotations

import copy
import importlib
import logging
import pickle
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any
from unittest import mock

import accelerate
import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint
from transformers import GenerationMixin

from sp_lightning import compile_blocks, stream
from sp_lightning.any_loop.stream import StreamedLoop
from sp_lightning.any_loop.words import LOG
from sp_lightning.core.engine.step import Step
from sp_lightning.core.observe import messages
from tests.equality.cases import CASES
from tests.support.loops import Loop, assert_streams, compare
from tests.support.models import Module, Stack, llama, tokens, vectors
from tests.support.runs import assert_equal
from tests.support.simdevice import simulated
from tests.support.tiers import first

# peft warns that these adapters cannot be merged.
pytestmark = pytest.mark.filterwarnings("ignore:TorchaoLoraLinear was instantiated without")
LOOPS = {
    "plain": Loop(),
    "clipping": Loop(clip=0.1),
    "accumulation": Loop(accumulate=2),
    "zero_grad between forward and backward": Loop(zero_first=True),
    "a scheduler": Loop(schedule=True),
    "evaluation after each step": Loop(evaluate=True),
    "a closure": Loop(closure=True),
    "a scaler": Loop(scale=True, clip=0.1),
    "bfloat16": Loop(bf16=True),
}


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.parametrize("name", LOOPS)
def test_loops(name: str) -> None:
    assert_streams(lambda: Module(Stack()), vectors(4), LOOPS[name], k=1)


@pytest.mark.long("takes a second or more")
@pytest.mark.parametrize(("overlap", "only_steps_write"), [("off", False), ("forward", True)])
@pytest.mark.parametrize("name", first(LOOPS, "clipping", "evaluation after each step", why="more loops of the same"))
def test_loops_on_an_asynchronous_device(name: str, only_steps_write: bool, overlap: Any) -> None:
    """No copy and no update races with the loop's own code."""
    make = lambda: Fused(Stack())  # noqa: E731
    with simulated():
        assert_streams(make, vectors(4), LOOPS[name], k=1, only_steps_write=only_steps_write, optimizer_overlap=overlap)


class Fused(Module):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, fused=True)


@pytest.mark.rest("takes tenths of a second")
def test_autocast_uploads_casts() -> None:
    assert_streams(lambda: Module(Stack()), vectors(4), LOOPS["bfloat16"], k=1, autocast=torch.bfloat16)


class UsesTwice(nn.Module):
    """Weights that a forward uses several times: learned prompts, a shared layer, a matrix, also where autocast does not cast."""

    def __init__(self) -> None:
        super().__init__()
        self.prompt = nn.Parameter(torch.randn(3, 16))
        self.keys, self.values = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        keys, values = self.keys(self.prompt), self.values(self.prompt)
        x = x + torch.tanh(self.keys(x) + self.keys(2 * x)) + (torch.softmax(x.to(keys.dtype) @ keys.t(), -1) @ values)
        x = x + (x @ self.prompt.t()) @ self.prompt + self.prompt.mean(0) * self.prompt[0]
        return torch.tanh(x.float())


class Checkpointed(nn.Module):
    """Runs a module in the user's own checkpoint; ``reentrant=None``: without one."""

    def __init__(self, inner: nn.Module, reentrant: bool | None) -> None:
        super().__init__()
        self.inner, self.reentrant = inner, reentrant

    def forward(self, x: torch.Tensor) -> Any:
        if self.reentrant is None:
            return self.inner(x)
        return checkpoint(self.inner, x.requires_grad_(), use_reentrant=self.reentrant)


@pytest.mark.parametrize("reentrant", [None, False, True], ids=["called", "checkpoint", "reentrant"])
@pytest.mark.parametrize("mode", ["keep", "recompute", "offload"])
def test_autocasts_cache_keeps_one_cast_of_a_weight(mode: Any, reentrant: bool | None) -> None:
    """The gradients of its uses were added in float32 in a forward that runs again; plain adds them in bfloat16."""
    make = lambda: Module(nn.Sequential(*(Checkpointed(UsesTwice(), reentrant) for _ in range(3))))  # noqa: E731
    for options in ({}, {"autocast": torch.bfloat16}):
        assert_streams(make, vectors(2), LOOPS["bfloat16"], k=1, k_prime=1, activations=mode, **options)


BY_KIND = (
    "llama-checkpoint-reentrant", "gpt2-tied", "vit", "lstm", "reused", "conditional", "frozen", "clamped-in-forward", "teacher",
    "penalty-on-parameters", "autograd-grad", "sparse-embedding", "tied-apart", "experts/mixture", "rows/looked-up",
    "transformer-encoder", "parameter-hooks", "quantised/int8",
)  # fmt: skip
LEFT_OUT = ("gan",)
"""See :func:`test_two_optimizers`."""


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.parametrize(
    "name", first([each for each in CASES if each not in LEFT_OUT], *BY_KIND, why="more of the same")
)
def test_cases(name: str) -> None:
    case = CASES[name]
    loop = Loop(clip=None if "sparse" in name else 0.1, closure=name == "lbfgs")
    assert_streams(case.make, case.batches(), loop, k=1, k_prime=1)


# ---------------------------------------------------------------------- other orders of the same calls


def two_forwards(net: nn.Module, optimizer: Any, x: Any) -> Any:
    one, other = net(x).square().mean(), net(2 * x).mean()
    one.backward()
    other.backward()
    optimizer.step()
    return one


def one_backward(net: nn.Module, optimizer: Any, x: Any) -> Any:
    loss = net(x).square().mean() + net(2 * x).mean()
    loss.backward()
    optimizer.step()
    return loss


def forward_without_backward(net: nn.Module, optimizer: Any, x: Any) -> Any:
    validation = net(x).sum()
    del validation
    return two_forwards(net, optimizer, x)


def reference_between(net: nn.Module, optimizer: Any, x: Any) -> Any:
    """A forward without gradients between a forward and its backward, as in preference optimization."""
    output = net(x)
    with torch.no_grad():
        reference = net(x + 1)
    loss = (output - reference).square().mean()
    loss.backward()
    optimizer.step()
    return loss


def retained(net: nn.Module, optimizer: Any, x: Any) -> Any:
    loss = net(x).square().mean()
    loss.backward(retain_graph=True)
    loss.backward()
    optimizer.step()
    return loss


def gradients_asked_for(net: nn.Module, optimizer: Any, x: Any) -> Any:
    """``torch.autograd.grad`` with parameters of before the step."""
    parameters = optimizer.param_groups[0]["params"]
    loss = net(x).square().mean()
    for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
        parameter.grad = gradient
    optimizer.step()
    return loss


def written(net: nn.Module, optimizer: Any, x: Any) -> Any:
    """Weights are written through ``.data``, a copy and ``load_state_dict``, at each moment between two calls."""
    for parameter in net.parameters():
        parameter.data.mul_(0.9)
    loss = net(x).square().mean()
    loss.backward()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(0.01)
    optimizer.step()
    net.load_state_dict({name: value * 0.99 for name, value in net.state_dict().items()})
    with torch.no_grad():
        return net(x)


def averaged(net: Any, optimizer: Any, x: Any) -> Any:
    """A copy of the module in the middle of a step."""
    output = net(x)
    twin = copy.deepcopy(net)
    loss = (output - twin(x).detach()).square().mean() + output.mean()
    loss.backward()
    optimizer.step()
    return loss, dict(twin.state_dict())


def thawed(net: Any, optimizer: Any, x: Any) -> Any:
    net.head.requires_grad_(not net.head.weight.requires_grad)
    return one_backward(net, optimizer, x)


def exchanged(net: Any, optimizer: Any, x: Any) -> Any:
    """A layer's weight is another parameter from now on, so that the engine is built again."""
    net.head.weight = nn.Parameter(net.head.weight.detach() * 0.9)
    optimizer.add_param_group({"params": [net.head.weight]})
    return one_backward(net, optimizer, x)


def caught(net: Any, optimizer: Any, x: Any) -> Any:
    """Errors in forward and in backward, which the loop survives."""
    with mock.patch.object(net.head, "forward", side_effect=KeyError), pytest.raises(KeyError):
        net(x)
    output = net(x)
    output.register_hook(lambda gradient: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        output.sum().backward()
    return one_backward(net, optimizer, x)


def perturbed(net: nn.Module, optimizer: Any, x: Any) -> Any:
    """Two backwards, the second one with weights that the gradients of the first have changed (SAM)."""
    net(x).square().mean().backward()
    with torch.no_grad():
        changes = [0.05 * parameter.grad for parameter in net.parameters()]
        for parameter, change in zip(net.parameters(), changes, strict=True):
            parameter.add_(change)
    optimizer.zero_grad()
    loss = net(x).square().mean()
    loss.backward()
    with torch.no_grad():
        for parameter, change in zip(net.parameters(), changes, strict=True):
            parameter.sub_(change)
    optimizer.step()
    return loss


ORDERS = (
    two_forwards, one_backward, forward_without_backward, reference_between, retained, gradients_asked_for, written, averaged,
    thawed, exchanged, caught, perturbed,
)  # fmt: skip


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("overlap", ["off", "forward"])
def test_orders(order: Any, overlap: Any) -> None:
    def train(streamed: Any) -> list[Any]:
        net = Stack()
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, fused=True)
        with streamed(net, optimizer, k=1, optimizer_overlap=overlap):
            found = []
            for x in vectors(3):
                found.append(order(net, optimizer, x))
                optimizer.zero_grad()
        return [found, dict(net.state_dict()), optimizer.state_dict()]

    compare(train)


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.parametrize("device", [nullcontext, partial(simulated, shared=True)], ids=["cpu", "simulated"])
def test_two_streams_in_one_backward(device: Any) -> None:
    """The generator's loss goes through the discriminator, which another optimizer and another stream has.

    On a GPU, both have its upload stream, and no wait was made for that.
    """

    def train(streamed: Any) -> list[Any]:
        nets = [Stack(3), Stack(3)]
        ours, theirs = (torch.optim.SGD(net.parameters(), lr=1e-2) for net in nets)
        with streamed(nets[0], ours, k=1), streamed(nets[1], theirs, k=1):
            for x in vectors(3):
                nets[1](nets[0](x)).mean().backward()
                ours.step()
                theirs.zero_grad()
                nets[1](nets[0](x).detach()).square().mean().backward()
                theirs.step()
                ours.zero_grad()
        return [dict(net.state_dict()) for net in nets]

    with device():
        compare(train)


@pytest.mark.parametrize("overlap", first(["off", "forward"], "off", why="other updates"))
def test_two_optimizers(overlap: Any) -> None:
    """Each steps after losses of its own, and one of them in every second batch only, as in adversarial training."""

    def train(streamed: Any) -> list[Any]:
        net = Stack(3)
        blocks, others = list(net.blocks.parameters()), [*net.stem.parameters(), *net.head.parameters()]
        often = torch.optim.AdamW(blocks, lr=1e-2, fused=True)
        seldom = torch.optim.SGD(others, lr=1e-2, momentum=0.9, fused=True)
        with streamed(net, [often, seldom], k=1, optimizer_overlap=overlap):
            for number, x in enumerate(vectors(4)):
                net(x).square().mean().backward()
                often.step()
                net.zero_grad()
                if number % 2:
                    net(x).mean().backward()
                    nn.utils.clip_grad_value_(others, 0.01)
                    seldom.step()
        return [dict(net.state_dict()), often.state_dict(), seldom.state_dict()]

    compare(train)


@contextmanager
def steps_begun() -> Iterator[list[str]]:
    """The phases of the steps that begin."""
    begun, begin = list[str](), Step.begin

    def note(self: Step, phase: str, *args: Any, **kwargs: Any) -> None:
        begun.append(phase)
        begin(self, phase, *args, **kwargs)

    with mock.patch.object(Step, "begin", note):
        yield begun


@pytest.mark.rest("takes tenths of a second")
def test_generation_between_steps() -> None:
    def train(streamed: Any) -> list[Any]:
        net: Any = llama(dropout=0.0).net
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
        found = []
        with streamed(net, optimizer, k=1) as streaming, steps_begun() as begun:
            for batch in tokens(2):
                net.train()
                net(**batch).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                net.eval()
                found.append(net.generate(batch["input_ids"][:1], max_new_tokens=3, do_sample=True, pad_token_id=0))
            if isinstance(streaming, StreamedLoop):
                assert begun == ["train", "predict"] * 2, "a generation is one step"
        return [found, dict(net.state_dict())]

    compare(train)


@pytest.mark.long("torch.compile of the whole module, and of its blocks, of which only the blocks stay compiled")
@pytest.mark.filterwarnings(
    "ignore::UserWarning"
)  # of dynamo, on inputs that are not leaves; and of ours, on ended graphs
@pytest.mark.parametrize("whole", [True, False])
def test_compiled_modules(whole: bool) -> None:
    def train(streamed: Any) -> Any:
        net = Stack()
        if not whole:
            compile_blocks(net, backend="aot_eager")
        optimizer = torch.optim.AdamW(net.parameters())
        with streamed(net, optimizer, k=1):
            call = torch.compile(net, backend="aot_eager") if whole else net
            for x in vectors(3):
                call(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        return dict(net.state_dict())

    compare(train)


def test_inference_alone() -> None:
    def predict(streamed: Any) -> Any:
        net = Stack().eval()
        with streamed(net, k=1), torch.no_grad():
            return [net(x) for x in vectors(3)]

    compare(predict)


def test_a_forward_whose_graph_is_gone_ends_its_step() -> None:
    net, optimizer = a_stream()
    with stream(net, optimizer, k=1) as streamed:
        net(vectors(1)[0])
        assert streamed._run.engine.in_step
        with torch.no_grad():
            net(vectors(1)[0])
        assert not streamed._run.engine.in_step


# ---------------------------------------------------------------------- the end, and errors


def a_stream() -> tuple[Stack, torch.optim.Optimizer]:
    net = Stack(2)
    return net, torch.optim.SGD(net.parameters(), lr=1e-2)


def test_an_ordinary_module_after_an_error() -> None:
    net, optimizer = a_stream()
    own = optimizer.step
    net.head.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError), stream(net, optimizer, k=1):
        net(vectors(1)[0])
    assert {type(parameter) for parameter in net.parameters()} == {nn.Parameter}
    assert optimizer.step == own
    assert torch.amp.GradScaler.step.__module__ == "torch.amp.grad_scaler"


def test_errors_in_the_words_of_a_loop() -> None:
    """Notes on an error in forward, and an error in backward."""
    net, optimizer = a_stream()
    calls = count()
    net.blocks[1].inner.register_forward_pre_hook(lambda module, args: args[0] + next(calls))
    with stream(net, optimizer, k=2, activations="recompute"):
        with (
            mock.patch.object(net.head, "forward", side_effect=torch.OutOfMemoryError),
            pytest.raises(torch.OutOfMemoryError) as raised,
        ):
            net(vectors(1)[0])
        assert "Use less: sp_lightning.stream(model, optimizer, k=1, k_prime=1)" in raised.value.__notes__[0]
        loss = net(vectors(1)[0]).sum()
        with pytest.raises(RuntimeError, match=r"use_deterministic_alg.*stream\(model, optimizer, activations="):
            loss.backward()


def test_log_lines_in_the_words_of_a_loop(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "lightning.pytorch")
    LOG.info("%s, or %s", "SuperpipelineStrategy(k=1)", 'Trainer(precision="bf16-true")')
    assert caplog.messages == ["sp_lightning.stream(model, optimizer, k=1), or model.to(torch.bfloat16)"]


@pytest.mark.parametrize("keeps", [False, True])
def test_a_caught_error_keeps_no_view(
    keeps: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The frames of an error hold weights until the loop has caught it. Code that keeps a view is told so, if only at the end."""
    monkeypatch.setattr(messages, "_SAID", set())
    caplog.set_level(logging.INFO, "lightning.pytorch")
    net = nn.Sequential(nn.Embedding(8, 8), nn.Linear(8, 8), nn.Linear(8, 8, bias=False))
    net[2].weight = net[0].weight
    views = list[torch.Tensor]()
    if keeps:
        net[2].register_forward_hook(lambda module, *_: views.append(module.weight[:2]))
    with stream(net, torch.optim.SGD(net.parameters()), k=1):
        for token in (8, 1):
            with suppress(IndexError):
                net(torch.tensor([token])).sum().backward()
    assert caplog.messages.count(messages.KEPT_VIEW) == keeps


def test_a_weight_has_one_stream() -> None:
    net, optimizer = a_stream()
    with stream(net, optimizer, k=1), pytest.raises(ValueError, match=r"'weight' is streamed already.*stream\.close"):
        stream(net.head)


def test_another_optimizer() -> None:
    net, optimizer = a_stream()
    other = torch.optim.SGD(net.head.parameters(), lr=1.0)
    with stream(net, optimizer, k=1):
        net(vectors(1)[0]).sum().backward()
        with pytest.raises(
            RuntimeError,
            match=r"SGD steps weights of a stream, and was not given.*close this stream.*\[all optimizers\]",
        ):
            other.step()


def test_a_backward_after_the_end() -> None:
    net, optimizer = a_stream()
    with stream(net, optimizer, k=1) as streamed:
        loss = net(vectors(1)[0]).sum()
    streamed.close()  # again
    with pytest.raises(RuntimeError, match="backward was called on a graph of a run that is over"):
        loss.backward()


def test_several_processes() -> None:
    with (
        mock.patch("torch.distributed.is_initialized", return_value=True),
        mock.patch("torch.distributed.get_world_size", return_value=2),
        pytest.raises(ValueError, match=r"in one of 2 processes.*Trainer\(strategy="),
    ):
        stream(Stack(2))


def test_weights_elsewhere_and_options_of_the_trainer() -> None:
    with pytest.raises(ValueError, match=r"'weight' is on meta.*Leave out model\.to"):
        stream(nn.Linear(2, 2, device="meta"))
    with pytest.raises(TypeError, match="no option 'save_frozen', which belongs to Lightning's Trainer"):
        stream(Stack(2), save_frozen=False)
    with pytest.raises(TypeError, match=r"stream\(\) has no option 'memory'"):
        stream(Stack(2), memory="1GiB")
    with pytest.raises(TypeError, match=r"no option 'precision'. Use autocast=torch\.bf"):
        stream(Stack(2), precision="bf16-mixed")


def test_options_that_need_lightning() -> None:
    net, optimizer = a_stream()
    with pytest.raises(
        ValueError, match=r"a loop does not say before a backward.*Use sp_lightning\.stream\(model, opti"
    ):
        stream(net, optimizer, optimizer_overlap="backward")
    with stream(net, optimizer, gpu_memory="1GiB") as streamed:
        net(vectors(1)[0]).sum().backward()
    assert streamed.plan.layers
    assert streamed.stats().fetched_layers > 0


def test_a_copy_generates_with_its_own_weights() -> None:
    net = llama().net
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    ids = tokens(1)[0]["input_ids"]
    with stream(net, optimizer, k=1):
        copied = copy.deepcopy(net).eval()
        before = [weight.clone() for weight in copied.parameters()]
        net(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        own = type(net).generate(copied, ids, max_new_tokens=4, do_sample=False)
        assert torch.equal(copied.generate(ids, max_new_tokens=4, do_sample=False), own)
        assert all(map(torch.equal, before, copied.parameters()))
    assert torch.equal(copied.generate(ids, max_new_tokens=4, do_sample=False), own)


GENERATES = """
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4)) for _ in range(3)])
    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return x
    def generate(self, x, tokens):
        for _ in range(tokens):
            x = self(x)
        return x
"""
LOADS = """
import pickle, sys
sys.modules["sp_lightning"] = None
import torch
module, x = pickle.load(open("module.pkl", "rb"))
print("generate" in vars(module), hash(tuple(module.generate(x, 2).flatten().tolist())))
"""


@pytest.mark.rest("a process that imports torch")
def test_a_pickle_of_the_module_has_nothing_of_the_stream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It had an attribute ``generate``, which later changes of the class's method did not reach."""
    (tmp_path / "of_the_user.py").write_text(GENERATES)
    monkeypatch.syspath_prepend(tmp_path)
    kind: Any = importlib.import_module("of_the_user").Net
    net, x, before = kind(), torch.randn(2, 4), vars(kind)["generate"]
    expected = net.generate(x, 2)
    attributes = set(vars(net))
    with stream(net, torch.optim.SGD(net.parameters()), k=1, k_prime=1) as streamed:
        other = kind()
        assert other.generate(x, 2).requires_grad, "no step: the module is another one"
        assert torch.equal(net.generate(x, 2), expected)
        assert streamed.stats().fetched_layers > 0
        assert set(vars(net)) == attributes
        (tmp_path / "module.pkl").write_bytes(pickle.dumps((net, x)))
    assert vars(kind)["generate"] is before
    done = subprocess.run([sys.executable, "-c", LOADS], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", str(hash(tuple(expected.flatten().tolist())))]


def test_two_streams_of_one_class_generate_each_with_its_own() -> None:
    nets, ids = [llama().net.eval(), llama().net.eval()], tokens(1)[0]["input_ids"]
    before = vars(GenerationMixin)["generate"]
    expected = nets[1].generate(ids, max_new_tokens=2, do_sample=False)
    with stream(nets[0], k=1) as first, stream(nets[1], k=1) as second:
        first.close()
        assert torch.equal(nets[1].generate(ids, max_new_tokens=2, do_sample=False), expected)
        assert second.stats().fetched_layers > 0
    assert vars(GenerationMixin)["generate"] is before


class Keeps(Stack):
    """Its forward keeps the loss, and returns nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> Any:
        self.losses.append(super().forward(x).square().mean())


def keeping(calls: int, options: dict[str, Any] | None) -> list[torch.Tensor]:
    """The gradients and weights of a loop whose forwards return None, with a penalty on weights."""
    torch.manual_seed(0)
    net = Keeps()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.05)
    found = []
    with nullcontext() if options is None else stream(net, optimizer, **options):
        for batch in vectors(3):
            for number in range(calls):
                net(batch * (1 + number))
            penalty = sum(((weight * 1.3).square().sum() + weight.abs().sum() for weight in net.parameters()), 0.0)
            (torch.stack(net.losses).sum() + 0.01 * penalty).backward()
            net.losses.clear()
            found += [weight.grad.clone() for weight in net.parameters() if weight.grad is not None]
            optimizer.step()
            optimizer.zero_grad()
    return [*found, *net.parameters()]


@pytest.mark.parametrize("calls", [1, 2])
def test_a_forward_that_returns_none_is_a_step(calls: int) -> None:
    """The step ended with it, so gradients of the penalty were added in another order."""
    assert_equal(keeping(calls, {"k": 1, "k_prime": 1}), keeping(calls, None), "")


def test_a_checkpoint_around_the_root_is_an_error() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    with stream(net, torch.optim.SGD(net.parameters())), pytest.raises(RuntimeError, match="around a streamed module"):
        checkpoint(net, torch.ones(2, 4), use_reentrant=False)


@pytest.mark.parametrize("given", [(1, ()), (nn.Linear(1, 1), 3), (nn.Linear(1, 1), [3])])
def test_other_arguments(given: Any) -> None:
    with pytest.raises(TypeError, match="expected a module, its optimizer"):
        stream(*given)


def test_an_optimizer_of_another_model() -> None:
    with pytest.raises(ValueError, match="SGD has no weight of the streamed module"):
        stream(nn.Linear(1, 1), torch.optim.SGD(nn.Linear(1, 1).parameters()))


@pytest.mark.parametrize("overlap", ["off", "forward"])
def test_an_optimizer_that_accelerate_has_wrapped(overlap: Any) -> None:
    def train(streamed: bool) -> Any:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
        inner = torch.optim.AdamW(net.parameters(), lr=1e-2, fused=True)
        optimizer = accelerate.Accelerator(cpu=True, device_placement=False).prepare(inner)
        losses = []
        with stream(net, optimizer, k=1, optimizer_overlap=overlap) if streamed else nullcontext():
            for x in torch.randn(3, 4, 8):
                losses.append(net(x).square().mean())
                losses[-1].backward()
                optimizer.step()
                optimizer.zero_grad()
        return [loss.item() for loss in losses], dict(net.state_dict())

    assert_equal(train(True), train(False), "a wrapped optimizer")


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


@pytest.mark.parametrize("sim", [False, True], ids=["cpu", "simulated"])
def test_an_optimizer_of_master_weights_is_left_out(sim: bool) -> None:
    """Without optimizers, steps ended with the forward: a penalty was added up in another order, and plans had no gradients."""

    def train(streamed: bool) -> Any:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)).bfloat16()
        optimizer = MasterAdamW(net.parameters())
        if streamed:
            with pytest.raises(ValueError, match=r"master weights\), leave it out: sp_lightning\.stream\(model\)"):
                stream(net, optimizer)
        losses = []
        device = simulated() if sim and streamed else nullcontext()
        with device, stream(net, k=1) if streamed else nullcontext() as stream_of_net:  # as the error says
            for index, x in enumerate(torch.randn(6, 4, 8).bfloat16()):
                loss = net(x).float().square().mean()
                for p in net.parameters():
                    loss = loss + p.float().pow(3).sum() + p.abs().sum().float()
                losses.append(loss.item())
                loss.backward()
                if index % 2:
                    optimizer.step()
                    with torch.no_grad():
                        losses.append(net(x).sum().item())
            if stream_of_net is not None:
                assert stream_of_net.plan.gradient_bytes > 0
        return losses, dict(net.state_dict())

    assert_equal(train(True), train(False), "master weights")


def test_without_an_optimizer_gradients_are_planned_when_a_call_needs_them() -> None:
    """Calls that train nothing have the plan of an inference."""
    net, frozen, x = Stack(3), Stack(3).requires_grad_(False), torch.ones(2, 16)
    with stream(net, k=1) as streamed, stream(frozen, k=1) as streamed_frozen:
        with torch.no_grad():
            net(x)
        frozen(x.clone().requires_grad_()).sum().backward()
        assert streamed.plan.gradient_bytes == streamed_frozen.plan.gradient_bytes == 0
        net(x).sum().backward()
        assert streamed.plan.gradient_bytes > 0
    assert all(p.grad is not None for p in net.head.parameters())


def test_without_an_optimizer_gradients_that_do_not_fit_are_an_error_with_a_remedy() -> None:
    net, x = Stack(3), torch.ones(2, 16)
    with stream(net, k=1, k_prime=1) as streamed:
        least = streamed.plan.peak_device_bytes
    with stream(net, k=1, k_prime=1, gpu_memory=least) as streamed:
        with pytest.raises(ValueError, match="Weights and gradients need") as caught:
            net(x)
        assert "call the module under torch.no_grad()" in caught.value.__notes__[0]
        with torch.no_grad():  # as the note says
            assert net(x).shape == (2, 16)
        assert streamed.plan.gradient_bytes == 0


class Shifted(nn.Module):
    """Calls a frozen module with weights that are computed from trained ones."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner.requires_grad_(False)
        self.shifts = nn.ParameterList(nn.Parameter(torch.full_like(p, 0.1)) for p in inner.parameters())

    def forward(self, x: torch.Tensor) -> Any:
        named = zip(self.inner.named_parameters(), self.shifts, strict=True)
        return functional_call(self.inner, {name: weight + shift for (name, weight), shift in named}, (x,))


def shifted() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))


def test_computed_weights_belong_into_a_forward() -> None:
    """The root took them for its weights, and the tensors that they were computed from got no gradient."""
    net = shifted()
    computed = {name: weight * 1.0 for name, weight in net.named_parameters()}
    with (
        stream(net, torch.optim.SGD(net.parameters(), lr=0.1), k=1),
        pytest.raises(RuntimeError, match=r"'0.weight' is a computed tensor .* Write functional_call into the forward"),
    ):
        functional_call(net, computed, (torch.ones(2, 8),))
    losses = []
    for options in (None, {"k": 1}):
        net = Shifted(shifted())
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        with nullcontext() if options is None else stream(net, optimizer, **options):  # type: ignore[arg-type]
            for _ in range(3):
                net(torch.ones(2, 8)).square().mean().backward()
                optimizer.step()
        losses.append([p.detach().clone() for p in net.parameters()])
    assert all(map(torch.equal, *losses))


def test_the_limit_changes_between_two_steps() -> None:
    """The attribute was set, and nothing read it."""
    net, x = Stack(), torch.ones(2, 16)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with stream(net, optimizer, gpu_memory="1GiB") as streamed:
        net(x).sum().backward()
        with pytest.raises(ValueError, match="gpu_memory"):
            streamed.gpu_memory = "lots"
        streamed.gpu_memory = "2GiB"
        loss = net(x).sum()
        with pytest.raises(RuntimeError, match="gpu_memory was used while a step runs"):
            streamed.gpu_memory = "1GiB"
        loss.backward()
        assert streamed.gpu_memory == 2 << 30
    for late in (lambda: streamed.gpu_released(), lambda: setattr(streamed, "gpu_memory", "1GiB")):
        with pytest.raises(RuntimeError, match="of a stream that has ended"):
            late()


def test_a_stream_within_a_step_is_the_second_one() -> None:
    net = Stack()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with stream(net, optimizer, k=1):
        loss = net(torch.ones(2, 16)).sum()
        with pytest.raises(ValueError, match="is streamed already"):
            stream(net, optimizer)
        loss.backward()
    with pytest.raises(TypeError, match=r"expected the module itself.*model\.module"):
        stream(nn.DataParallel(net), optimizer)
