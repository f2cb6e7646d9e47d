"""Hooks between two batches without training: the weights that they touch are uploaded again, and no others."""

from __future__ import annotations

import copy
import gc
import logging
import threading
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import BasePredictionWriter, Callback
from torch import Tensor, nn

from sp_lightning.core.observe import messages
from tests.support.models import Module, vectors
from tests.support.runs import assert_equal, assert_same, fit, loader, superpipeline, trainer_for
from tests.support.simdevice import simulated
from tests.support.tiers import first

LAYERS, BATCHES = 6, 5


class Six(Module):
    def __init__(self) -> None:
        super().__init__(nn.Sequential(*(nn.Linear(16, 16) for _ in range(LAYERS)), nn.Tanh()))
        self.outputs: list[Tensor] = []

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.outputs.append(self.net(batch).detach().clone())
        return self.outputs[-1]

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.predict_step(batch, batch_idx)

    test_step = validation_step


class HasHooks(Six):
    def on_predict_batch_start(self, *_: Any) -> None: ...

    def on_validation_batch_end(self, *_: Any) -> None: ...

    def on_test_batch_end(self, *_: Any) -> None: ...


class Transfers(Six):
    def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
        return super().transfer_batch_to_device(batch, device, dataloader_idx)


class Writer(BasePredictionWriter):
    def write_on_batch_end(self, *_: Any) -> None: ...


class Acts(Callback):
    """Calls ``act`` with the third layer after each batch, and ``starts`` with it before the first."""

    def __init__(self, act: Callable[..., Any], starts: Callable[..., Any] = lambda layer: None) -> None:
        self.act, self.starts, self.kept = act, starts, None

    def on_predict_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self.kept = self.starts(pl_module.net[2])

    def on_predict_batch_end(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
        self.act(pl_module.net[2], self)

    def on_validation_batch_end(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
        self.act(pl_module.net[2], self)

    def on_test_batch_end(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
        self.act(pl_module.net[2], self)


def run(
    strategy: Any,
    make: Callable[[], Six] = Six,
    callbacks: list[Callback] | None = None,
    loop: str = "predict",
    **options: Any,
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Returns the outputs of each batch, and the weights after the last one."""
    pl.seed_everything(7, verbose=False)
    module = make()
    trainer = trainer_for(strategy, callbacks=callbacks or [], **options)
    getattr(trainer, loop)(module, loader(vectors(BATCHES)))
    return module.outputs, {name: value.clone() for name, value in module.state_dict().items()}


@pytest.mark.parametrize("loop", first(["predict", "validate", "test"], "predict", why="the same in the other loops"))
@pytest.mark.parametrize(
    "hooks", [(Six, None), (HasHooks, None), (Transfers, None), (Six, Writer), (Six, lambda: Acts(lambda *_: None))]
)
def test_a_hook_that_touches_no_weight_costs_nothing(hooks: tuple[Any, Any], loop: str) -> None:
    make, callback = hooks
    callbacks = [] if callback is None else [callback("batch") if callback is Writer else callback()]
    strategy = superpipeline(k=LAYERS, k_prime=1)
    assert_equal(run(strategy, make, callbacks, loop), run("auto", make, callbacks, loop), loop)
    assert strategy.stats().fetched_layers == LAYERS


def scale(layer: Any, callback: Any) -> None:
    with torch.no_grad():
        layer.weight.mul_(0.5)


def scale_data(layer: Any, callback: Any) -> None:
    layer.weight.data.mul_(0.5)


def scale_storage(layer: Any, callback: Any) -> None:
    torch.empty(0).set_(layer.bias.untyped_storage(), 0, (16,), (1,)).mul_(0.5)


def scale_array(layer: Any, callback: Any) -> None:
    layer.weight.detach().numpy()[:] *= 0.5


def scale_kept(layer: Any, callback: Any) -> None:
    callback.kept.mul_(0.5)


def scale_kept_once(layer: Any, callback: Any) -> None:
    if callback.kept is not None:
        callback.kept.mul_(0.5)
        callback.kept = None


def exchange(layer: Any, callback: Any) -> None:
    layer.weight.data = layer.weight.data * 0.5


def load(layer: Any, callback: Any) -> None:
    layer.load_state_dict({name: value * 0.5 for name, value in layer.state_dict().items()})


def step_fused(layer: Any, callback: Any) -> None:
    """A fused step changes no version."""
    with torch.inference_mode(False):
        parameters = list(layer.parameters())
        for p in parameters:
            p.grad = torch.ones_like(p)
        torch.optim.Adam(parameters, lr=0.1, fused=True).step()
        for p in parameters:
            p.grad = None


def swap_average(layer: Any, callback: Any) -> None:
    average = callback.kept
    for p, other in zip(layer.parameters(), average.parameters(), strict=True):
        before = other.data.clone()
        other.data.copy_(p.data)
        p.data.copy_(before)


def write_in_thread(layer: Any, callback: Any) -> None:
    thread = threading.Thread(target=lambda: layer.weight.data.mul_(0.5))
    thread.start()
    thread.join()


def read(layer: Any, callback: Any) -> None:
    """What loggers compute of weights, and copies."""
    callback.seen = [layer.weight.norm(), layer.weight.sum().item(), layer.bias.isfinite().all(), layer.weight.clone()]
    assert layer.weight.shape == (16, 16)
    assert layer.weight.requires_grad
    assert layer.weight.grad is None
    copy.deepcopy(layer)


def halved_twice(layer: Any) -> Any:
    other = copy.deepcopy(layer)
    for p in other.parameters():
        p.data.mul_(0.25)
    return other


WRITES: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    each.__name__: (each, lambda layer: None)
    for each in (scale, scale_data, scale_storage, scale_array, exchange, load, step_fused, write_in_thread)
} | {
    "data kept": (scale_kept, lambda layer: layer.weight.data),
    "view kept": (scale_kept, lambda layer: layer.weight.detach()[3:]),
    "array kept": (lambda layer, callback: callback.kept.__imul__(0.5), lambda layer: layer.weight.detach().numpy()),
    "state kept": (lambda layer, callback: callback.kept["bias"].mul_(0.5), lambda layer: layer.state_dict()),
    "average": (swap_average, halved_twice),
}


@pytest.mark.rest("a special case of the same rule")
@pytest.mark.parametrize("way", ["scale_data", "data kept", "average"])
@pytest.mark.parametrize("options", [{"keep_on_gpu": ["net.2"]}, {"precision": "bf16-mixed"}, {"k": 2}], ids=str)
def test_writes_of_residents_and_masters(way: str, options: dict[str, Any]) -> None:
    act, starts = WRITES[way]
    precision = {"precision": options.pop("precision")} if "precision" in options else {}
    ours = run(superpipeline(**{"k": LAYERS, "k_prime": 1} | options), callbacks=[Acts(act, starts)], **precision)
    assert_equal(ours, run("auto", callbacks=[Acts(act, starts)], **precision), way)


@pytest.mark.parametrize("k", first([LAYERS, 2], LAYERS, why="each way again, with prefetches under way"))
@pytest.mark.parametrize("way", WRITES)
def test_a_layer_that_a_hook_writes_is_uploaded_again(way: str, k: int) -> None:
    act, starts = WRITES[way]
    with simulated():
        strategy = superpipeline(k=k, k_prime=1)
        ours = run(strategy, callbacks=[Acts(act, starts)])
    assert_equal(ours, run("auto", callbacks=[Acts(act, starts)]), way)
    if k == LAYERS and way != "step_fused":  # of one layer, before each batch but the first. A step may write any layer
        assert strategy.stats().fetched_layers == LAYERS + BATCHES - 1


def test_memory_that_a_hook_drops_after_its_write_was_held() -> None:
    """The write and the last reference are in one gap, in which no operation gets the parameter."""
    callbacks = [Acts(scale_kept_once, lambda layer: layer.weight.data) for _ in range(2)]
    strategy = superpipeline(k=LAYERS, k_prime=1)
    assert_equal(run(strategy, callbacks=[callbacks[0]]), run("auto", callbacks=[callbacks[1]]), "outputs")
    assert strategy.stats().fetched_layers == LAYERS + 1


@pytest.mark.rest("a special case of the same rule")
@pytest.mark.parametrize("loop", ["validate", "test"])
def test_writes_of_hooks_in_other_loops(loop: str) -> None:
    strategy = superpipeline(k=LAYERS, k_prime=1)
    ours = run(strategy, callbacks=[Acts(scale_data)], loop=loop)
    assert_equal(ours, run("auto", callbacks=[Acts(scale_data)], loop=loop), loop)
    assert strategy.stats().fetched_layers == LAYERS + BATCHES - 1


def test_hooks_that_read_weights_cost_nothing() -> None:
    strategy = superpipeline(k=LAYERS, k_prime=1)
    assert_equal(run(strategy, callbacks=[Acts(read)]), run("auto", callbacks=[Acts(read)]), "outputs")
    assert strategy.stats().fetched_layers == LAYERS


@pytest.mark.rest("a special case of the same rule")
def test_exchanged_modules_are_found() -> None:
    def act(layer: Any, callback: Any) -> None:
        net = callback.net
        net[0], net[1] = net[1], net[0]

    class Swaps(Acts):
        def on_predict_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
            self.net = pl_module.net

    strategy = superpipeline(k=LAYERS, k_prime=1)
    assert_equal(run(strategy, callbacks=[Swaps(act)])[0], run("auto", callbacks=[Swaps(act)])[0], "outputs")


@pytest.mark.rest("a special case of the same rule")
def test_calls_of_modules_in_hooks_upload_no_other_layer() -> None:
    def act(layer: Any, callback: Any) -> None:
        layer(torch.ones(1, 16))
        layer.weight.data.mul_(0.5)
        layer(torch.ones(1, 16))

    strategy = superpipeline(k=LAYERS, k_prime=1)
    assert_equal(run(strategy, callbacks=[Acts(act)]), run("auto", callbacks=[Acts(act)]), "outputs")
    assert strategy.stats().fetched_layers == LAYERS + BATCHES


class Captures(Six):
    """A step gets the host memory of a captured parameter, and writes it after the layer's last use in the step."""

    def __init__(self) -> None:
        super().__init__()
        self.captured = [list(self.net.parameters())]

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        memory = self.captured[0][4].data
        super().predict_step(batch, batch_idx)
        memory.mul_(0.5)
        return self.outputs[-1]


@pytest.mark.parametrize("callbacks", [[], [Acts(lambda *_: None)]])
def test_host_memory_that_a_step_has_used_is_uploaded_again(callbacks: list[Callback]) -> None:
    strategy = superpipeline(k=LAYERS, k_prime=1)
    assert_equal(run(strategy, Captures, callbacks), run("auto", Captures, callbacks), "outputs")


@pytest.mark.rest("a special case of the same rule")
def test_validation_in_training_trusts_what_hooks_leave_alone() -> None:
    def trained(strategy: Any, act: Callable[..., Any]) -> Any:
        return fit(Six, vectors(2), strategy, val=vectors(BATCHES), callbacks=[Acts(act)], max_epochs=2)

    fetched = []
    for act in (lambda *_: None, scale_data):
        strategy = superpipeline(k=LAYERS, k_prime=1)
        ours, plain = trained(strategy, act), trained("auto", act)
        assert_same(ours, plain)
        assert_equal(ours.module.outputs, plain.module.outputs, "validation")
        fetched.append(strategy.stats().fetched_layers)
    assert fetched[1] - fetched[0] == 2 * (BATCHES - 1)
    assert fetched[0] <= 2 * (2 + 1) * LAYERS


class KeepsView(Six):
    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.kept = self.net[2].weight[:2]
        return super().predict_step(batch, batch_idx)


def gives_memory(layer: Any, callback: Any) -> None:
    callback.given = torch.zeros_like(layer.weight)
    layer.weight.data = callback.given


@pytest.mark.parametrize(
    ("make", "act", "lines"),
    [
        (KeepsView, lambda *_: None, [messages.KEPT_VIEW]),
        (Six, gives_memory, [messages.KEPT_MEMORY]),
        (Six, scale_data, []),
    ],
)
def test_a_line_says_that_kept_memory_is_not_the_weights(
    make: Any, act: Any, lines: list[str], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(messages, "_SAID", set())
    caplog.set_level(logging.INFO, "lightning.pytorch")
    run(superpipeline(k=LAYERS, k_prime=1), make, callbacks=[Acts(act)])
    assert [each for each in caplog.messages if each in (messages.KEPT_VIEW, messages.KEPT_MEMORY)] == lines


@pytest.mark.rest("a special case of the same rule")
def test_a_run_in_a_hook_finds_ordinary_parameters() -> None:
    def act(layer: Any, callback: Any) -> None:
        inner = Six()
        inner.net = nn.Sequential(layer)
        trainer_for(superpipeline(k=1)).predict(inner, loader(vectors(2)))
        layer.weight.data.mul_(0.5)
        callback.seen = [*getattr(callback, "seen", []), *inner.outputs]

    strategy, ours, plain = superpipeline(k=LAYERS, k_prime=1), Acts(act), Acts(act)
    assert_equal(run(strategy, callbacks=[ours]), run("auto", callbacks=[plain]), "outputs")
    assert_equal(ours.seen, plain.seen, "inner outputs")


@pytest.mark.rest("takes tenths of a second")
def test_after_the_run_parameters_are_ordinary() -> None:
    module = Six()
    trainer_for(superpipeline(k=LAYERS, k_prime=1), callbacks=[Acts(lambda *_: None)]).predict(
        module, loader(vectors(2))
    )
    assert {type(p) for p in module.parameters()} == {nn.Parameter}
    gc.collect()


def _scaled(layer: nn.Linear, _: Acts) -> None:
    layer.bias = nn.Parameter(layer.bias * 1.1)


def _scaled_outside(layer: nn.Linear, _: Acts) -> None:
    with torch.inference_mode(False):
        layer.bias = nn.Parameter(layer.bias.detach().clone() * 1.1)


def test_weights_made_in_inference_mode() -> None:
    """Their writes have no number: an error with a remedy, which works."""
    with pytest.raises(RuntimeError, match=r"'net\.2\.bias' was made in inference mode.*inference_mode\(False\)"):
        predicted("superpipeline", _scaled)
    assert_equal(predicted("superpipeline", _scaled_outside), predicted("auto", _scaled_outside), "outputs")


def predicted(strategy: str, act: Callable[..., Any]) -> list[Tensor]:
    torch.manual_seed(0)
    module = Six()
    trainer_for(strategy, callbacks=[Acts(act)]).predict(module, loader(vectors(BATCHES)))
    return module.outputs
