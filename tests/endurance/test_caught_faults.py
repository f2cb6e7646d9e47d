"""User code catches a fault that struck between the two halves of a pair, and goes on: everything is as before it.

:data:`ROWS` is the table. What must hold is the same for all rows: nothing is half done (:func:`state_of`), writes between
steps are seen, and all that follows is bitwise plain Lightning's after the same. Faults that end training are in ``test_faults``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from itertools import count, product
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from sp_lightning.core.engine.step import Step
from sp_lightning.core.torch_compat.private import top_saved_tensors_hooks
from sp_lightning.core.updates.layerwise import LayerwiseStep
from sp_lightning.core.weights.bound_weights import BoundWeights
from sp_lightning.core.weights.residents import Residents
from sp_lightning.core.weights.swap import ParameterSwap
from sp_lightning.core.weights.writes import WriteBack
from sp_lightning.registry import is_installed
from sp_lightning.trainer.checkpoint_io import AtomicCheckpointIO
from tests.support.engine import Calls, Slots, Uploads, engine_of
from tests.support.models import Module, Stack, vectors
from tests.support.runs import assert_equal, assert_same, fit, superpipeline
from tests.support.simdevice import simulated
from tests.support.tiers import first, some

pytestmark = pytest.mark.states

# ---------------------------------------------------------------------- what user code does


class ByData(Optimizer):
    """Writes weights through ``.data``, which no version shows."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                self.write(parameter)

    def write(self, parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.data.add_(parameter.grad, alpha=-0.1)


def calls(module: Catches) -> None:
    module.net(torch.ones(2, 16))


def writes_and_calls(module: Catches) -> None:
    """It writes what the weight has already, because the fault is that the host does not get it."""
    inner = module.net.blocks[1].inner

    def writes(*_: Any) -> None:
        inner.weight.data.mul_(1)

    handle = inner.register_forward_pre_hook(writes)
    try:
        calls(module)
    finally:
        handle.remove()


def reads(module: Catches) -> None:
    (module.net.blocks[3].inner.weight @ module.net.blocks[2].outer.weight).sum()


def goes_backward(module: Catches) -> None:
    x = torch.ones(2, 16, requires_grad=True)
    torch.autograd.grad(module.net(x).sum(), x)


def saves(module: Catches) -> None:
    module.trainer.save_checkpoint(module.folder / "caught.ckpt")


def steps(module: Catches) -> None:
    """By Lightning's optimizer."""
    module.manual_backward(module.net(torch.ones(2, 16)).sum())
    optimizer: Any = module.optimizers()
    optimizer.step()


def steps_again(module: Catches) -> None:
    """By torch's own, after a forward without a backward: the weights are on the device."""
    module.manual_backward(module.net(torch.ones(2, 16)).sum())
    calls(module)
    module.trainer.optimizers[0].step()


# ---------------------------------------------------------------------- the table


@dataclass(frozen=True)
class Row:
    """One pair, and one fault between its halves.

    Attributes:
        pair: the two halves.
        owner, name, number: the function that raises, and in which of its calls since user code began. The owner is an object,
            or the name of a module that need not be installed.
        does: what user code does meanwhile.
        when: "in" a step, "between" two.
        options: of the strategy.
        manual: whether optimization is manual. Plain Lightning then does and catches the same; otherwise what user code does
            changes nothing.
    """

    pair: str
    owner: Any
    name: str
    number: int
    does: Callable[[Catches], None]
    when: tuple[str, ...] = ("in", "between")
    options: dict[str, Any] = field(default_factory=dict)
    manual: bool = False

    @property
    def place(self) -> Any:
        """The owner."""
        return import_module(self.owner) if isinstance(self.owner, str) else self.owner


IN, BETWEEN, BOTH = ("in",), ("between",), ("in", "between")
RECOMPUTE, OFFLOAD, AHEAD = {"activations": "recompute"}, {"activations": "offload"}, {"optimizer_overlap": "forward"}
ROWS = [
    Row("enter of a call / leave", Step, "begin_outside", 1, calls, BETWEEN),
    Row("enter of a call / leave", Step, "activate", 1, calls, BETWEEN),
    Row("enter of a call / leave", Residents, "refresh", 1, calls, BETWEEN),
    Row("enter of a call / leave", Calls, "_activate", 1, calls, IN),
    Row("enter of a call / leave", Calls, "_activate", 2, calls, IN),
    Row("enter of a call / leave", Slots, "fetch", 2, calls),
    Row("enter of a call / leave", torch, "tanh", 2, calls),
    Row("leave of a call, its parts", WriteBack, "copy_to_host", 1, writes_and_calls),
    Row("leave of a call, its parts", WriteBack, "write_back_all", 1, calls, BETWEEN),
    Row("begin_call / end_call", Slots, "lock", 3, calls),
    Row("begin_call / end_call", BoundWeights, "attach", 3, calls),
    Row("operation_on: begin_call / end_call", Slots, "lock", 2, reads, IN),
    Row("fetch: slot taken / filled", Uploads, "send", 3, calls),
    Row("modules: to_device / to_host", ParameterSwap, "to_device", 1, calls, BETWEEN),
    Row("modules: to_host / to_device", ParameterSwap, "to_host", 1, saves, IN),
    Row("reading: to_host / install, to_device", nn.Module, "state_dict", 1, saves, BOTH, RECOMPUTE),
    Row("reading: to_host / install, to_device", nn.Module, "state_dict", 1, saves, BOTH, OFFLOAD),
    Row("reading: to_host / install, to_device", AtomicCheckpointIO, "save_checkpoint", 1, saves, BOTH, RECOMPUTE),
    Row(
        "activations: enter / leave",
        "sp_lightning.capabilities.activations.offload",
        "count_once",
        1,
        calls,
        IN,
        OFFLOAD,
    ),
    Row("activations: enter / leave", torch, "tanh", 2, calls, BOTH, OFFLOAD),
    Row("activations: first run / its end", torch, "tanh", 2, calls, BOTH, RECOMPUTE),
    Row(
        "activations: second run / its end",
        "sp_lightning.capabilities.activations.recompute",
        "_writes_of",
        1,
        goes_backward,
        IN,
        RECOMPUTE,
    ),
    Row("activations: second run / its end", torch, "tanh", 7, goes_backward, IN, RECOMPUTE),
    Row("optimizer: before a step / after", ByData, "write", 4, steps, IN, RECOMPUTE, manual=True),
    Row("optimizer: before a step / after", ByData, "write", 4, steps_again, IN, RECOMPUTE, manual=True),
    Row("optimizer: deferring / its end", LayerwiseStep, "_groups_by_layer", 1, steps, IN, AHEAD),
]
ERRORS = (RuntimeError, torch.OutOfMemoryError, KeyboardInterrupt)
CASES = [(row, when, error) for row, error in product(ROWS, ERRORS) for when in row.when]


NAMES = [
    f"{row.pair}, {getattr(row.owner, '__name__', row.owner)}.{row.name} in {row.does.__name__} {when}, {error.__name__}"
    for row, when, error in CASES
]


# ---------------------------------------------------------------------- what must hold


def _recomputed() -> list[Any]:
    if not is_installed("capabilities.activations"):
        return []
    from sp_lightning.capabilities.activations.recompute import running  # a capability that may be missing

    return [*running()]


def state_of(module: Catches) -> dict[str, Any]:
    """What a caught fault must leave as it was."""
    engine = engine_of(module.trainer.strategy)
    running, activations = engine.uses.calls, engine.activations
    offload = getattr(activations, "offload", None)
    return {
        "a step runs": engine.step.running,
        "depth": (running.depth, running._here.depth),
        "pins": [layer.running_calls for layer in engine.layers],
        "slots in use": sum(slot.locked for slot in engine.slots.all) - len(engine.residency.used),
        "hooks on the thread": top_saved_tensors_hooks(),
        "modules hold": {type(each) is nn.Parameter for each in module.parameters()},
        "activations": (getattr(activations, "_installed", None), sum("forward" in vars(m) for m in module.modules())),
        "the unit under way": None if offload is None else offload.call,
        "recomputed units under way": _recomputed(),
        "optimizer": [set(vars(each)) - {"_opt_called"} for each in module.trainer.optimizers],
        "groups": [len(each.param_groups) for each in module.trainer.optimizers],
        "torch": (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_default_dtype()),
    }


class Catches(Module):
    """Catches a fault in the second batch, or after it; and writes weights through references from before training."""

    net: Any

    def __init__(self, row: Row, when: str, error: type[BaseException], folder: Path) -> None:
        super().__init__(Stack())
        for block in self.net.blocks:
            block.drop.p = 0.0  # plain Lightning's random state does not depend on how far a call has come
        self.row, self.when, self.error, self.folder = row, when, error, folder
        self.automatic_optimization = row.does not in (steps, steps_again)
        self.kept = list(self.parameters())
        self.seen: list[Tensor] = []
        self.whole: dict[str, Any] = {}  # between two steps, before the fault

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx == 1 and self.when == "in":
            self.meet()
        if self.automatic_optimization:
            return self.loss(batch)
        optimizer: Any = self.optimizers()
        self.seen.append(self.net(batch).detach().clone())
        optimizer.zero_grad()
        loss = self.loss(batch)
        self.manual_backward(loss)
        optimizer.step()
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1 and self.when == "between":
            self.meet()
        for weight in self.kept:
            weight.data.mul_(0.99)
        self.seen.append(self.net(batch).detach().clone())
        if engine_of(self.trainer.strategy) is not None:
            self.whole = self.whole or state_of(self)
            assert_equal(state_of(self), self.whole, "state")

    def meet(self) -> None:
        """Does it, with the fault."""
        ours = engine_of(self.trainer.strategy) is not None
        if not ours and not self.row.manual:
            return
        before = state_of(self) if ours else {}
        original, numbers = getattr(self.row.place, self.row.name), count(1)

        def fails(*args: Any, **options: Any) -> Any:
            if next(numbers) == self.row.number:
                raise self.error("injected")
            return original(*args, **options)

        with mock.patch.object(self.row.place, self.row.name, fails), pytest.raises(self.error, match="injected"):
            self.row.does(self)
        if self.row.manual:
            calls(self)  # torch tells nobody that an optimizer's step has raised, so that is seen now
        if ours:
            assert_equal(state_of(self), before, "state")

    def configure_optimizers(self) -> Optimizer:
        return ByData(self.parameters()) if self.row.manual else torch.optim.AdamW(self.parameters(), fused=True)


@pytest.mark.usefixtures("everything_is_worth_moving")
@pytest.mark.parametrize(
    ("row", "when", "error"),
    first(
        CASES,
        if_=lambda case: case[2] is torch.OutOfMemoryError and CASES.index(case) % 2 == 0,
        why="the same with other errors, and at other moments",
    ),
    ids=NAMES,
)
def test_a_caught_fault(row: Row, when: str, error: type[BaseException], tmp_path: Path) -> None:
    compare(row, when, error, tmp_path)


@pytest.mark.long("the same on the asynchronous device, which shows races, too")
@pytest.mark.usefixtures("everything_is_worth_moving")
@pytest.mark.parametrize(
    ("row", "when", "error"),
    some(CASES, *(case for case in CASES if case[2] is torch.OutOfMemoryError), why="the same with other errors"),
    ids=NAMES,
)
def test_a_caught_fault_on_a_device(row: Row, when: str, error: type[BaseException], tmp_path: Path) -> None:
    with simulated():
        compare(row, when, error, tmp_path, k_prime=2)


def compare(row: Row, when: str, error: type[BaseException], tmp_path: Path, k_prime: int = 1) -> None:
    plain = fit(lambda: Catches(row, when, error, tmp_path), vectors(4), recorded="losses")
    ours = fit(
        lambda: Catches(row, when, error, tmp_path),
        vectors(4),
        superpipeline(k=1, k_prime=k_prime, **row.options),
        recorded="losses",
    )
    assert_same(ours, plain)
    assert_equal(ours.module.seen, plain.module.seen, "what was seen")


class Interrupted(Module):
    """Catches Ctrl-C just when a call of a module between two steps has begun."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        with mock.patch.object(Calls, "enter", self.enter), pytest.raises(KeyboardInterrupt):
            self.net(batch)

    @staticmethod
    def enter(*_: Any, begin: Any = Calls.enter) -> Any:
        begin(*_)
        raise KeyboardInterrupt


def test_ctrl_c_as_a_call_between_steps_begins_that_was_caught_is_refused() -> None:
    """What was written to the host's weights since could be ignored until the next step."""
    with pytest.raises(
        RuntimeError, match=r"Ctrl-C came while a call .* between two steps began or ended, and was caught"
    ):
        fit(lambda: Interrupted(Stack()), vectors(4), superpipeline(k=1))
