"""What users do every day and no GPU has run: adapters, packed experts, activations within a budget, kernels with quirks.

The same tests run on a CPU, where they show that their programs work; there is no GPU's behaviour in that.
"""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn

from examples import superpipeline_in_150_lines
from sp_lightning import SuperpipelineStrategy
from tests.support import stacked
from tests.support.gpu_reference import DEVICE, by_place
from tests.support.models import Module, Stack, lora, tokens
from tests.support.runs import Outcome, assert_equal, fit

pytestmark = [
    pytest.mark.rest("programs for a GPU; other tests show the same on a CPU"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]
SIZES = {"cpu": (4096, 64, "12MiB"), "gpu": (32768, 256, "512MiB")}
"""Of a batch, its width, and a budget that does not have room for all activations of eight blocks."""


@pytest.fixture(params=["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
def accelerator(request: Any) -> Any:
    return request.param


def pair(accelerator: str, make: Any, batches: Any, precision: Any = "32-true", **options: Any) -> Any:
    """Plain Lightning's run, on a GPU with steps on the CPU; this strategy's; and the strategy."""
    strategy = SuperpipelineStrategy(**options)
    plain = "auto" if accelerator == "cpu" else by_place(0, device=DEVICE)
    trainer: Any = {"accelerator": accelerator, "precision": precision, "recorded": "losses"}
    return fit(make, batches, plain, **trainer), fit(make, batches, strategy, **trainer), strategy


def on_cpu(outcome: Outcome) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Losses, and the weights that may train; packed ones have no memory of their own to compare."""
    trained = {name for name, p in outcome.module.named_parameters() if p.requires_grad}
    return [loss.cpu() for loss in outcome.losses], {name: outcome.state[name].cpu() for name in sorted(trained)}


def assert_plain(*arguments: Any, **options: Any) -> SuperpipelineStrategy:
    plain, ours, strategy = pair(*arguments, **options)
    assert_equal(on_cpu(ours), on_cpu(plain), "losses and weights")
    return strategy


@pytest.mark.long("takes a second or more")
@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_adapters(accelerator: str, precision: str, deterministic: None) -> None:
    assert_plain(accelerator, lora, tokens(), precision)


@pytest.mark.long("takes a second or more")
@pytest.mark.parametrize("name", ["qwen3", "gpt-oss"])
def test_packed_experts(accelerator: str, name: str, deterministic: None) -> None:
    pytest.importorskip("torchao")
    assert_plain(accelerator, stacked.adapted(name, packed=True), stacked.tokens(), k=1)


class Fused(Module):
    """A fused optimizer, which gets numbers of the scaler, and a learning rate that may be on the GPU."""

    def __init__(self, fused: bool | None, rate: Any) -> None:
        super().__init__(Stack(depth=8, width=512))
        self.fused, self.rate = fused, rate

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=self.rate, fused=self.fused)


@pytest.mark.gpu
@pytest.mark.parametrize("overlap", ["off", "forward", "backward"])
def test_fused_steps_on_the_cpu_wait_for_numbers_from_the_gpu(overlap: Any) -> None:
    """The scale, whether a gradient is infinite, and the learning rate. Powers of two: exact, also in float32."""
    rate = 2.0**-7
    batches = [torch.randn(8, 512, generator=torch.Generator().manual_seed(n)) for n in range(6)]

    def run(fused: bool | None, rate: Any) -> Outcome:
        strategy = SuperpipelineStrategy(k=1, optimizer_overlap=overlap)
        return fit(
            lambda: Fused(fused, rate), batches, strategy, accelerator="gpu", precision="16-mixed", recorded="nothing"
        )

    expected = run(None, rate)
    assert_equal(run(True, rate).state, expected.state, "fused")
    assert_equal(run(True, torch.tensor(rate, device=DEVICE)).state, expected.state, "a rate on the GPU")


class Flash(torch.autograd.Function):
    """As flash-attn 2, saves the state of a random generator that its kernel has not written."""

    dirt = itertools.count(12345)

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        written = torch.full((2,), next(Flash.dirt), device=x.device)
        del written  # the next tensor of this size has its memory
        ctx.save_for_backward(x, torch.empty(2, dtype=torch.int64, device=x.device))
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        assert len(ctx.saved_tensors) == 2
        return gradients[0] * 2


def added(x: Tensor) -> Tensor:
    """Rows that are added up in no order, as in mixtures of experts."""
    to = torch.arange(len(x), device=x.device) % 16
    return x + torch.zeros(16, x.shape[1], device=x.device).index_add(0, to, x)[to] / len(x)


INNER = [pytest.param(torch.tanh, id="tanh"), pytest.param(Flash.apply, id="flash")]


class Block(nn.Module):
    def __init__(self, width: int, inner: Any) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(width, width), nn.Linear(width, width)
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return x + self.b(self.inner(torch.relu(self.a(x))))


def blocks(width: int, inner: Any) -> Module:
    return Module(nn.Sequential(*(Block(width, inner) for _ in range(8))))


def within_budget(accelerator: str, inner: Any) -> Any:
    rows, width, budget = SIZES[accelerator]
    generator = torch.Generator().manual_seed(1)
    batches = [torch.randn(rows, width, generator=generator) for _ in range(6)]
    return pair(accelerator, partial(blocks, width, inner), batches, k=1, gpu_memory=budget)


@pytest.mark.long("takes a second or more")
@pytest.mark.parametrize("inner", INNER)
def test_activations_that_do_not_fit(accelerator: str, inner: Any) -> None:
    plain, ours, strategy = within_budget(accelerator, inner)
    assert_equal(on_cpu(ours), on_cpu(plain), "losses and weights")
    assert set(strategy.activations.values()) != {"keep"}


@pytest.mark.long("takes a second or more")
def test_activations_of_a_kernel_that_does_not_repeat(accelerator: str) -> None:
    """Plain Lightning differs from itself on a GPU, so that the run only has to end, near it."""
    plain, ours, _ = within_budget(accelerator, added)
    for mine, its in zip(ours.losses, plain.losses, strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-3, atol=1e-3)


@pytest.mark.long("takes a second or more")
@pytest.mark.parametrize("inner", INNER)
def test_recomputed(accelerator: str, inner: Any) -> None:
    batches = [torch.randn(8, 64, generator=torch.Generator().manual_seed(step)) for step in range(4)]
    assert_plain(accelerator, partial(blocks, 64, inner), batches, k=1, activations="recompute")


class Retries(Callback):
    """Notes how often torch's allocator had to give memory back before it got some, and what it holds."""

    def __init__(self) -> None:
        self.seen = list[int]()

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        torch.cuda.synchronize()
        self.seen.append(torch.cuda.memory_stats()["num_alloc_retries"])


@pytest.mark.gpu("retries of torch's own allocator")
@pytest.mark.parametrize("precision", ["bf16-mixed", "32-true"])
def test_layers_that_stay_leave_room_for_what_steps_make(precision: Any) -> None:
    budget, retries = 1 << 30, Retries()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    strategy = SuperpipelineStrategy(gpu_layers=4, gpu_memory=budget)
    batches = [torch.randn(64, 2048, generator=torch.Generator().manual_seed(step)) for step in range(10)]
    torch.cuda.set_per_process_memory_fraction(1.25 * budget / torch.cuda.get_device_properties(0).total_memory)
    try:
        fit(lambda: Module(Stack(depth=12, width=2048)), batches, strategy, accelerator="gpu", precision=precision,
            recorded="nothing", callbacks=[retries])  # fmt: skip
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert strategy.plan.stay
    assert retries.seen[4:] == [retries.seen[4]] * len(retries.seen[4:])
    assert torch.cuda.max_memory_reserved() <= budget


@pytest.mark.gpu("tests/examples runs the page on a CPU")
@pytest.mark.parametrize(("k", "k_prime"), [(1, 1), (2, 1), (3, 2)])
def test_the_idea_in_150_lines(k: int, k_prime: int, capsys: pytest.CaptureFixture[str]) -> None:
    superpipeline_in_150_lines.main([f"--k={k}", f"--k-prime={k_prime}"])
    printed = capsys.readouterr().out
    assert "KiB on cuda" in printed
    assert "All losses and weights are equal, bit for bit." in printed
