"""``sp_lightning.stream``: where steps and streams begin and end, and what it leaves. Its results are in ``tests/equality``."""

from __future__ import annotations

import copy
import importlib
import logging
import pickle
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import GenerationMixin

from sp_lightning import stream
from sp_lightning.any_loop.words import LOG
from sp_lightning.core import messages
from tests.support.models import Stack, llama, tokens, vectors

X = vectors(1)[0]


def a_stream() -> tuple[Stack, torch.optim.Optimizer]:
    net = Stack(2)
    return net, torch.optim.SGD(net.parameters(), lr=1e-2)


def test_a_forward_whose_graph_is_gone_ends_its_step() -> None:
    net, optimizer = a_stream()
    with stream(net, optimizer, k=1) as streamed:
        net(X)
        assert streamed._run.engine.in_step
        with torch.no_grad():
            net(X)
        assert not streamed._run.engine.in_step


def test_an_ordinary_module_after_an_error() -> None:
    net, optimizer = a_stream()
    own = optimizer.step
    net.head.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError), stream(net, optimizer, k=1):
        net(X)
    assert {type(parameter) for parameter in net.parameters()} == {nn.Parameter}
    assert optimizer.step == own
    assert torch.amp.GradScaler.step.__module__ == "torch.amp.grad_scaler"


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


def test_without_an_optimizer_gradients_are_planned_when_a_call_needs_them() -> None:
    """Calls that train nothing have the plan of an inference."""
    net, frozen = Stack(3), Stack(3).requires_grad_(False)
    with stream(net, k=1) as streamed, stream(frozen, k=1) as streamed_frozen:
        with torch.no_grad():
            net(X)
        frozen(X.clone().requires_grad_()).sum().backward()
        assert streamed.plan.gradient_bytes == streamed_frozen.plan.gradient_bytes == 0
        net(X).sum().backward()
        assert streamed.plan.gradient_bytes > 0
    assert all(p.grad is not None for p in net.head.parameters())


def test_the_limit_changes_between_two_steps() -> None:
    """The attribute was set, and nothing read it."""
    net, optimizer = a_stream()
    with stream(net, optimizer, gpu_memory="1GiB") as streamed:
        net(X).sum().backward()
        with pytest.raises(ValueError, match="gpu_memory"):
            streamed.gpu_memory = "lots"
        streamed.gpu_memory = "2GiB"
        loss = net(X).sum()
        with pytest.raises(RuntimeError, match="gpu_memory was used while a step runs"):
            streamed.gpu_memory = "1GiB"
        loss.backward()
        assert streamed.gpu_memory == 2 << 30
    for late in (lambda: streamed.gpu_released(), lambda: setattr(streamed, "gpu_memory", "1GiB")):
        with pytest.raises(RuntimeError, match="of a stream that has ended"):
            late()


# ---------------------------------------------------------------------- generation


def test_a_copy_generates_with_its_own_weights() -> None:
    net = llama().net
    ids = tokens(1)[0]["input_ids"]
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    with stream(net, optimizer, k=1):
        copied = copy.deepcopy(net).eval()
        before = [weight.clone() for weight in copied.parameters()]
        net(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        own = type(net).generate(copied, ids, max_new_tokens=4, do_sample=False)
        assert torch.equal(copied.generate(ids, max_new_tokens=4, do_sample=False), own)
        assert all(map(torch.equal, before, copied.parameters()))
    assert torch.equal(copied.generate(ids, max_new_tokens=4, do_sample=False), own)


def test_two_streams_of_one_class_generate_each_with_its_own() -> None:
    nets, ids = [llama().net.eval(), llama().net.eval()], tokens(1)[0]["input_ids"]
    before = vars(GenerationMixin)["generate"]
    expected = nets[1].generate(ids, max_new_tokens=2, do_sample=False)
    with stream(nets[0], k=1) as first, stream(nets[1], k=1) as second:
        first.close()
        assert torch.equal(nets[1].generate(ids, max_new_tokens=2, do_sample=False), expected)
        assert second.stats().fetched_layers > 0
    assert vars(GenerationMixin)["generate"] is before


OF_THE_USER = """
from torch import nn

class Net(nn.Sequential):
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
    (tmp_path / "of_the_user.py").write_text(OF_THE_USER)
    monkeypatch.syspath_prepend(tmp_path)
    kind: Any = importlib.import_module("of_the_user").Net
    make = lambda: kind(*(nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4)) for _ in range(3)))  # noqa: E731
    net, other, x, before = make(), make(), torch.randn(2, 4), vars(kind)["generate"]
    expected, attributes = net.generate(x, 2), set(vars(net))
    with stream(net, torch.optim.SGD(net.parameters()), k=1, k_prime=1) as streamed:
        assert other.generate(x, 2).requires_grad, "no step: the module is another one"
        assert torch.equal(net.generate(x, 2), expected)
        assert streamed.stats().fetched_layers > 0
        assert set(vars(net)) == attributes
        (tmp_path / "module.pkl").write_bytes(pickle.dumps((net, x)))
    assert vars(kind)["generate"] is before
    done = subprocess.run([sys.executable, "-c", LOADS], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", str(hash(tuple(expected.flatten().tolist())))]


# ---------------------------------------------------------------------- weights of other modules, and the log


@pytest.mark.parametrize("options", [{}, {"gpu_layers": 1.0}])
def test_a_weight_that_is_tied_follows_when_the_gpu_is_lent(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers that stay on the GPU move to the CPU and back. On the CPU, ``to`` would not move them."""
    net, optimizer = a_stream()
    other = Stack(2)
    to = torch.Tensor.to
    monkeypatch.setattr(torch.Tensor, "to", lambda self, *args, **kwargs: to(self, *args, **kwargs).clone())
    with stream(net, optimizer, k=1, **options) as streamed:
        other.blocks[0].inner.weight.data = net.blocks[0].inner.weight.data
        before = net.blocks[0].inner.weight.data  # kept, so that no other memory gets its address
        with streamed.gpu_released():
            pass
        assert (net.blocks[0].inner.weight.data_ptr() == before.data_ptr()) == (not options)
        assert net.blocks[0].inner.weight.data_ptr() == other.blocks[0].inner.weight.data_ptr()


def test_a_tie_that_cannot_be_kept_leaves_the_engine() -> None:
    net, optimizer = a_stream()
    other = Stack(2)
    with stream(net, optimizer, k=1) as streamed:
        other.stem.weight.data = net.stem.weight.data[:2]
        with pytest.raises(ValueError, match=r"'stem\.weight' shares its memory with 'weight' of a Linear"):
            streamed.gpu_memory = "1GiB"
        net(X).sum().backward()
        assert streamed.gpu_memory is None


def test_a_stream_logs_its_plan_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "lightning.pytorch")
    net, optimizer = a_stream()
    with stream(net, optimizer, k=1):
        assert caplog.messages == []
        for _ in range(3):
            net(X).sum().backward()
            optimizer.step()
    (line,) = caplog.messages
    assert line.startswith("Superpipeline: 4 layers, k = 1, k' = 1: weights and gradients take ")
    assert "the plain loop" in line
