"""An automatic choice does not end a run: the table in ``examples/guide/limits.md``, a test for each row.

Each row lets a call fail on the simulated device. Then the run ends as plain Lightning's on a GPU, and the log has one line about
it; or, if weights are torn or the user's forward was interrupted, the error says what happened and what to do.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial, wraps
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch._dynamo

from sp_lightning import SuperpipelineStrategy
from sp_lightning.trainer.compile import compile_blocks
from tests.support import stacked
from tests.support.gpu_reference import BATCHES, OPTIMIZERS
from tests.support.models import Block, Module
from tests.support.nets import Stepped
from tests.support.poison import crowded
from tests.support.runs import assert_same, fit, fused
from tests.support.simdevice import SimDevice, simulated
from tests.support.tiers import first

OUT = torch.OutOfMemoryError("CUDA out of memory.")
LAUNCH = RuntimeError("CUDA error: no kernel image is available for execution on the device")
LIMITS = Path(__file__).parents[2] / "examples/guide/limits.md"
When = Callable[..., bool]


def _nth(number: int) -> When:
    return lambda count, *_: count == number


_always: When = lambda *_: True  # noqa: E731


@contextmanager
def failing(owner: str, name: str, error: Exception, when: When = lambda count, *_: count == 1) -> Iterator[list[int]]:
    """In this context a function raises an error.

    Args:
        owner: the module or class of the function, by its full name.
        name: the function's name.
        error: the error.
        when: returns True if a call fails. It gets the number of the call and its arguments.

    Yields:
        The numbers of the calls that have failed.
    """
    target = _imported(owner)
    real, calls, failed = getattr(target, name), 0, list[int]()

    @wraps(real)
    def function(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if when(calls, *args):
            failed.append(calls)
            raise type(error)(*error.args)  # a new one, because errors get notes
        return real(*args, **kwargs)

    function.cache_clear = getattr(real, "cache_clear", None)  # type: ignore[attr-defined]
    with mock.patch.object(target, name, function):
        yield failed
    assert failed, f"{owner}.{name} did not fail"


def _imported(path: str) -> Any:
    module, _, kind = path.rpartition(".")
    return getattr(__import__(module, fromlist=[kind]), kind)


ADAMW = OPTIMIZERS["AdamW"]
STEPPED = partial(Stepped, ADAMW)
GPU = partial(simulated, capacity=2**20)


@dataclass(frozen=True)
class Row:
    """A row of the table.

    Attributes:
        choice, fails, when: the first three columns of the table.
        inject: makes the contexts in which the call fails.
        says: a line of the log, or what the error says if ``raises``.
        raises: True if the run ends.
        options: of the strategy.
        trainer: options of the trainer.
        make: makes the module.
        exact: True if the results are compared bit by bit; False if they need only be close.
        device: makes the context of the device.
    """

    choice: str
    fails: str
    when: str
    inject: Callable[[], list[AbstractContextManager[Any]]]
    says: str
    raises: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    trainer: dict[str, Any] = field(default_factory=dict)
    make: Callable[[], Module] = STEPPED
    exact: bool = True
    device: Callable[[], AbstractContextManager[Any]] = GPU


def _refuses_locks() -> AbstractContextManager[Any]:
    return mock.patch.object(SimDevice, "pin", return_value=False)


def _prefers_large() -> AbstractContextManager[Any]:
    """On a simulated device a copy takes no time, so uploads would not stall a batch."""
    return mock.patch(
        "sp_lightning.capabilities.tuning.tuner.Tuner._measured", lambda tuner, *_: (1 / tuner.engine.plan.k,) * 2
    )


def _large(count: int, slots: Any, *_: Any) -> bool:
    """The condition for a slot of a larger window, of the run and not of a prediction."""
    return isinstance(slots._device, SimDevice) and slots._plan.k > 1


def _second_and_third(count: int, slots: Any, *_: Any) -> bool:
    """The condition for a larger window that does not fit, after which the present one does not fit either."""
    if not isinstance(slots._device, SimDevice):
        return False
    slots._device.asked = getattr(slots._device, "asked", 0) + (not slots.all)
    return slots._device.asked in (2, 3)


def _fails_in(step: int, raised: Exception = OUT) -> Callable[[], Module]:
    """Makes modules whose forward raises an error in one step, with the strategy only."""

    class Fails(Stepped):
        def loss(self, batch: Any) -> Any:
            if self.global_step == step and isinstance(self.trainer.strategy, SuperpipelineStrategy):
                raise type(raised)(*raised.args)
            return super().loss(batch)

    return partial(Fails, ADAMW)


class NeedsHeadAgain(Stepped):
    """From the third step on, backward ends with a use of the head, whose gradients are complete first."""

    def loss(self, batch: Any) -> Any:
        if self.global_step > 1:
            batch = batch.clone().requires_grad_()
            batch.register_hook(lambda gradient: gradient + self.net.head.weight.sum())
        return super().loss(batch)


def _compiled(block: type[torch.nn.Module], **options: Any) -> Callable[[], Module]:
    def make() -> Module:
        torch._dynamo.reset()
        module = Module(torch.nn.Sequential(*(block() for _ in range(3))))
        compile_blocks(module, **options)
        return module

    return make


class Sums(Block):
    """Reads a weight by another function than a linear layer."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.inner.weight.sum()


def _no_backend(*_: Any) -> Any:
    raise RuntimeError("no compiler")


class Unseen(stacked.Stack):
    """torch does not see which experts its forward reads."""

    def forward(self, x: torch.Tensor, indices: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return super().forward(x, indices, weights) + stacked.kernel(x, self.inner)


class UnseenRouter(stacked.Router):
    stack = Unseen


ACTIVATIONS = "`activations`"
WINDOW, LOCKS = "`k`", "`pin_memory`"
OVERLAP, CASTS, EXPERTS = "`optimizer_overlap`", "16-bit weights of compiled blocks", "used experts only"
BEFORE, AFTER = "no", "yes"
MIXED: dict[str, Any] = {"trainer": {"precision": "bf16-mixed"}, "device": nullcontext, "exact": False}
EXPERT = {"make": lambda: Module(stacked.Routers()), "device": nullcontext, "exact": False}
TORN = "These weights are not those of any whole step"
SLOT = "tests.support.engine.Slots"

ROWS = [
    Row(
        ACTIVATIONS, "CPU memory for an activation", BEFORE,
        lambda: [crowded(), failing("sp_lightning.capabilities.activations.host_ring", "PinnedMemory", LAUNCH)],
        "the CPU has no room for the activations of", options={"k": 1},
    ),
    Row(
        WINDOW, "GPU memory for a larger k", BEFORE,
        lambda: [_prefers_large(), failing(SLOT, "_make", OUT, _large)], "no room for k = ",
    ),
    Row(
        WINDOW, "GPU memory for the present k, after a larger one has failed", BEFORE,
        lambda: [_prefers_large(), failing(SLOT, "_make", OUT, _second_and_third)], "no room for k = ",
    ),
    Row(
        WINDOW, "GPU memory in your forward or backward", BEFORE, lambda: [_prefers_large()],
        "Use less: SuperpipelineStrategy(k=1, k_prime=1, ", raises=True, make=_fails_in(4),
    ),
    Row(
        OVERLAP, "a step in the background", AFTER,
        lambda: [failing("sp_lightning.core.updates.layerwise.LayerwiseStep", "_step_layer", LAUNCH, _nth(10))],
        f"{TORN}, and are not saved: the optimizer's update failed in the background", raises=True,
    ),
    Row(
        OVERLAP, "a backward that needs an updated layer again", AFTER, list,
        'Use SuperpipelineStrategy(optimizer_overlap="forward")', raises=True,
        make=partial(NeedsHeadAgain, ADAMW),
    ),
    Row(LOCKS, "the page lock (`cudaHostRegister`)", BEFORE, lambda: [_refuses_locks()], "could not be page-locked"),
    Row(
        CASTS, "a graph needs float32 weights", BEFORE, list, "needs weights in float32",
        make=_compiled(Sums, backend="aot_eager"), **MIXED,
    ),
    Row(
        CASTS, "the compiler (`torch.compile`)", BEFORE, list, "no compiler", raises=True,
        make=_compiled(Block, backend=_no_backend), **MIXED,
    ),
    Row(
        EXPERTS, "a forward that may read all experts", BEFORE, list, "are uploaded for each call, because",
        **EXPERT | {"make": lambda: Module(stacked.Routers(UnseenRouter))},
    ),
]  # fmt: skip


ANYWHERE: tuple[Any, ...] = (
    # As on a GPU: updates may overlap with the model. Lines count that another test's run has logged as well.
    mock.patch("sp_lightning.trainer.update_facts._computes_on_host", return_value=False),
    mock.patch("sp_lightning.core.messages._SAID", new_callable=set),
)


@pytest.mark.long("takes a second or more")
@pytest.mark.parametrize(
    "row",
    first(
        ROWS,
        if_=lambda row: row.choice == OVERLAP,
        second=[row for row in ROWS if row.choice != CASTS],
        why="trainings on a simulated device",
    ),
    ids=lambda row: f"{row.choice}: {row.fails}",
)
def test_a_choice_that_fails(row: Row, caplog: pytest.LogCaptureFixture, recwarn: pytest.WarningsRecorder) -> None:
    batches = [each * (1 + at / 10) for at, each in enumerate((*BATCHES, *BATCHES))]
    strategy = SuperpipelineStrategy(**row.options)
    make = row.make if row.options.get("optimizer_on") == "gpu" else fused(row.make)  # as steps on the CPU run
    caplog.set_level(logging.INFO, "lightning.pytorch")
    with ExitStack() as stack:
        for context in (*ANYWHERE, row.device(), *row.inject()):
            stack.enter_context(context)
        if row.raises:
            error: Any = stack.enter_context(pytest.raises((RuntimeError, torch._dynamo.exc.TorchDynamoException)))
        outcome = fit(make, batches, strategy, recorded="losses", **row.trainer)
    if row.raises:
        said = [str(error.value), *getattr(error.value, "__notes__", ())]
    else:
        said = [*caplog.messages, *(str(each.message) for each in recwarn), str(strategy.plan)]
        plain = fit(make, batches, recorded="losses", **row.trainer)
        torch.testing.assert_close(outcome.losses, plain.losses)
        if row.exact:
            assert_same(outcome, plain)
    assert any(row.says in each for each in said), "\n".join(said)


def test_the_guide_has_these_rows() -> None:
    lines = [line.split(" | ") for line in LIMITS.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    table = [tuple(cells[:3]) for cells in lines if len(cells) > 2 and cells[2] in (BEFORE, AFTER)]
    assert table == [(f"| {row.choice}", row.fails, row.when) for row in ROWS]
