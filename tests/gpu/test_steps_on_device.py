"""The check of a sceptic with a GPU: ``strategy="auto"`` against steps on the device, bitwise, with no footnote."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from sp_lightning import SuperpipelineStrategy
from sp_lightning.core.device.accelerator import Accelerator
from sp_lightning.core.device.device import Stream, Wait
from tests.support.gpu_reference import NAMES
from tests.support.models import CASES, Module, Stack, vectors
from tests.support.runs import Outcome, assert_equal, fit

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore::UserWarning"),  # each kernel without a deterministic form says so once
    pytest.mark.usefixtures("deterministic"),
]


def on_host(value: Any) -> Any:
    return torch.utils._pytree.tree_map_only(torch.Tensor, lambda each: each.detach().cpu(), value)


def assert_plains(make: Callable[[], Any], batches: Any, mode: str, **options: Any) -> None:
    def run(strategy: Any) -> Outcome:
        return fit(make, batches, strategy, recorded="losses", accelerator="gpu", **options)

    plain = run("auto")
    ours = run(SuperpipelineStrategy(k=1, optimizer_on="gpu", optimizer_overlap=mode))  # type: ignore[arg-type]
    for what in ("losses", "state", "optimizers"):
        assert_equal(on_host(getattr(ours, what)), on_host(getattr(plain, what)), what)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
@pytest.mark.parametrize("mode", ["off", "forward", "backward"])
@pytest.mark.parametrize(
    "name", [name for name in NAMES if name not in ("gan", "lbfgs", "sparse-embedding", "parameter-hooks")]
)
def test_training_is_that_of_plain_lightning_on_the_device(name: str, mode: str, precision: Any) -> None:
    mode = "off" if precision == "bf16-true" else mode  # whose default dtype would reach the step
    clip = {} if mode == "backward" else {"gradient_clip_val": 0.05}
    assert_plains(CASES[name].make, CASES[name].batches(), mode, precision=precision, **clip)


class Stepped(Module):
    def __init__(self, make: Callable[[Any], Optimizer]) -> None:
        super().__init__(Stack())
        self.make = make

    def configure_optimizers(self) -> Any:
        return self.make(self.parameters())


def of_bitsandbytes(parameters: Any, bits: int = 8) -> Optimizer:
    optim: Any = pytest.importorskip("bitsandbytes.optim")
    found: Optimizer = optim.AdamW(parameters, lr=1e-2, optim_bits=bits, min_8bit_size=16)
    return found


OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "AdamW": lambda ps: torch.optim.AdamW(ps, lr=1e-2),
    "AdamW, fused": lambda ps: torch.optim.AdamW(ps, lr=1e-2, fused=True),
    "AdamW, capturable": lambda ps: torch.optim.AdamW(ps, lr=1e-2, capturable=True),
    "AdamW, one by one": lambda ps: torch.optim.AdamW(ps, lr=1e-2, foreach=False),
    "SGD": lambda ps: torch.optim.SGD(ps, lr=1e-2, momentum=0.9, nesterov=True),
    "ASGD": lambda ps: torch.optim.ASGD(ps, lr=1e-2),
    "Adafactor": lambda ps: torch.optim.Adafactor(ps, lr=1e-2),
    "Muon": lambda ps: torch.optim.Muon([p for p in ps if p.ndim == 2], lr=1e-2),
    "bitsandbytes": of_bitsandbytes,
    "bitsandbytes, 32 bits": lambda ps: of_bitsandbytes(ps, bits=32),
}


FOR_GPUS = {"AdamW, capturable": "an option for GPUs alone"}


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        pytest.param(each, mode, marks=pytest.mark.gpu(*filter(None, [FOR_GPUS.get(each)])))
        for each in OPTIMIZERS
        for mode in ("off", "forward")
        if mode == "off" or each not in ("ASGD", "Adafactor", "Muon")  # refused
    ],
)
def test_every_optimizer_steps_as_on_plain_lightning(name: str, mode: str) -> None:
    assert_plains(lambda: Stepped(OPTIMIZERS[name]), vectors(), mode, precision="bf16-mixed")


@pytest.mark.gpu("streams of CUDA")
@pytest.mark.parametrize("mode", ["off", "forward", "backward"])
def test_a_users_stream_waits_for_steps_as_the_default_one_does(mode: str) -> None:
    """Casts that a step leaves on the device come from another stream than the forward's."""

    class OnStream(Module):
        def on_fit_start(self) -> None:
            self.stream: Any = torch.cuda.stream(torch.cuda.Stream())
            self.stream.__enter__()

        def on_fit_end(self) -> None:
            self.stream.__exit__(None, None, None)

    wide = [batch.repeat(1, 32) for batch in vectors()]
    assert_plains(lambda: OnStream(Stack(depth=12, width=512)), wide, mode, precision="bf16-mixed")


@pytest.mark.gpu("streams of CUDA; tests/engine/test_threads.py has the same on a simulated device")
def test_layers_of_one_step_on_two_streams_are_refused() -> None:
    class OnTwo(Module):
        def loss(self, batch: Tensor) -> Tensor:
            with torch.cuda.stream(torch.cuda.Stream()):
                self.net(batch)
            return super().loss(batch)

    with pytest.raises(RuntimeError, match="used on another CUDA stream"):
        assert_plains(lambda: OnTwo(Stack()), vectors(), "off")


@pytest.mark.gpu("streams of CUDA")
def test_the_models_kernels_do_not_wait_for_uploads_of_steps() -> None:
    """They were on one stream."""
    waited = list[Stream]()
    wait = Accelerator.wait

    def noting(self: Accelerator, stream: Stream, event: Any, why: Wait) -> None:
        if why is Wait.STEP_AFTER_BRING:
            waited.append(stream)
            assert torch.cuda.current_stream() != torch.cuda.default_stream()
        wait(self, stream, event, why)

    with mock.patch.object(Accelerator, "wait", noting):
        assert_plains(lambda: Stepped(OPTIMIZERS["AdamW"]), vectors(), "forward", precision="bf16-mixed")
    assert set(waited) == {Stream.STEP}


def test_state_is_in_host_memory() -> None:
    strategy = SuperpipelineStrategy(k=1, optimizer_on="gpu")
    outcome = fit(
        lambda: Stepped(OPTIMIZERS["AdamW, fused"]), vectors(), strategy, recorded="losses", accelerator="gpu"
    )
    (state,) = (optimizer.state for optimizer in outcome.trainer.optimizers)
    assert {value.device.type for each in state.values() for value in each.values()} == {"cpu"}
    assert all(isinstance(p, nn.Parameter) for p in state)
