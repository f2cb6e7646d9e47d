"""Runs that come past a wait of the engine each, and fail if it is left out."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from typing import Any, Literal
from unittest import mock

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.optim import optimizer as torch_optimizer

from sp_lightning import SuperpipelineStrategy
from sp_lightning.core.device.accelerator import Accelerator
from sp_lightning.core.device.device import Stream, Wait
from sp_lightning.core.torch_compat.modes import no_inference_mode
from sp_lightning.trainer import step_hooks
from tests.support.engine import choose
from tests.support.models import CASES, Block, Module, Stack, vectors
from tests.support.runs import Outcome, fit, fused, loader, trainer_for
from tests.support.tiers import needs


def training(strategy: Any) -> Outcome:
    case = CASES["vit"]  # it has residents
    return fit(case.make, case.batches(), strategy, val=case.batches()[:2], accumulate_grad_batches=2)


class SkipsFirst(Module):
    """Every second batch leaves the first block out: its backward ends with an upload of a layer that nothing uses."""

    def __init__(self) -> None:
        super().__init__(Stack())
        self.skips = True

    def loss(self, batch: Tensor) -> Tensor:
        net: Any = self.net
        self.skips = not self.skips
        x = net.stem(batch)
        for block in net.blocks[1:] if self.skips else net.blocks:
            x = block(x)
        loss: Tensor = net.head(x).square().mean()
        return loss


def skipped(strategy: Any) -> Outcome:
    return fit(SkipsFirst, vectors(4), strategy, accumulate_grad_batches=2)


def written_in_place(strategy: Any) -> Outcome:
    case = CASES["rescaled-in-eval"]
    return fit(case.make, case.batches(), strategy, val=case.batches()[:2])


class StepsFirst(Module):
    """Applies the last batch's gradients before anything else."""

    def __init__(self) -> None:
        super().__init__(CASES["vit"].make().net)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        optimizer: Any = self.optimizers()
        optimizer.step()
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.manual_backward(loss)
        return loss


def steps_first(strategy: Any) -> Outcome:
    """With residents alone: another upload after theirs would be waited for, too."""
    if isinstance(strategy, SuperpipelineStrategy):
        choose(strategy, keep_on_gpu=("net",))
    return fit(StepsFirst, CASES["vit"].batches(), strategy)


class Ahead(Module):
    """Forwards right before an optimizer's step: the host comes to it long before the device has done with them."""

    def __init__(self) -> None:
        super().__init__(CASES["vit"].make().net)
        self.automatic_optimization = False
        self.seen: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        self.manual_backward(torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1]))
        with torch.no_grad():
            self.seen += [self.net(batch[0]) for _ in range(2)]
        optimizer.step()
        optimizer.zero_grad()


def ahead(strategy: Any) -> Outcome:
    outcome = fit(Ahead, CASES["vit"].batches(), strategy)
    assert isinstance(outcome.module, Ahead)
    outcome.losses += [each.cpu() for each in outcome.module.seen]
    return outcome


_RUNS = itertools.count()


class Drifts(Block):
    """Computes other activations in each run while it ``drifts``, by a number that no module holds."""

    drifts = True

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + next(_RUNS) if self.drifts else x)


class DropsGradients(Module):
    """Catches the error that ends a backward: a forward has computed other values when it ran again."""

    def __init__(self) -> None:
        super().__init__(Stack())
        self.automatic_optimization = False
        net: Any = self.net
        net.blocks[0] = Drifts()
        net.shift = nn.Parameter(torch.zeros(16))  # a resident: its gradient is copied last, after the error

    def loss(self, batch: Tensor) -> Tensor:
        net: Any = self.net
        loss: Tensor = (net(batch) + net.shift).square().mean()
        return loss

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        optimizer: Any = self.optimizers()
        if batch_idx == 0:
            with suppress(RuntimeError):  # a backward with recomputed activations; plain Lightning's raises nothing
                self.manual_backward(self.loss(batch))
            net: Any = self.net
            net.blocks[0].drifts = False
        optimizer.zero_grad()
        loss = self.loss(batch)
        self.manual_backward(loss)
        optimizer.step()
        return loss


def dropped(strategy: Any) -> Outcome:
    if isinstance(strategy, SuperpipelineStrategy):
        choose(strategy, activations="recompute")
    return fit(DropsGradients, vectors(), strategy, recorded="losses")  # plain Lightning has one backward more


class Looks(Callback):
    """Reads a weight after each step."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        pl_module.net.head.weight.sum()


def in_the_background(strategy: Any, **options: Any) -> Outcome:
    if isinstance(strategy, SuperpipelineStrategy):
        choose(strategy, optimizer_overlap="forward")
    make = fused(lambda: Module(Stack()))
    return fit(make, vectors(), strategy, gradient_clip_val=0.05, recorded="losses", **options)


def on_device(strategy: Any) -> Outcome:
    if isinstance(strategy, SuperpipelineStrategy):
        choose(strategy, optimizer_on="gpu")
    case = CASES["vit"]
    options: Any = {"gradient_clip_val": 0.05, "precision": "bf16-mixed", "recorded": "losses"}
    return fit(case.make, case.batches(), strategy, val=case.batches()[:2], **options)


def fetched_on_device(strategy: Any) -> Outcome:
    """Fetches read the casts that steps have left on the device."""
    if isinstance(strategy, SuperpipelineStrategy):
        choose(strategy, optimizer_on="gpu", optimizer_overlap="forward")
    return fit(lambda: Module(Stack()), vectors(), strategy, precision="bf16-mixed", recorded="losses")


def two_optimizers(strategy: Any) -> Outcome:
    """Validation casts all layers anew, also those whose optimizer has not waited for their last transfers."""
    case = CASES["gan"]
    return fit(case.make, case.batches(), strategy, val=case.batches()[:2], precision="bf16-mixed", recorded="nothing")


def looked_at(strategy: Any) -> Outcome:
    return in_the_background(strategy, callbacks=[Looks()])


def offloaded(strategy: Any, make: Any = lambda: Module(Stack())) -> Outcome:
    if isinstance(strategy, SuperpipelineStrategy):
        choose(strategy, activations="offload")
    return fit(make, vectors(), strategy)


def returned_in_vain(strategy: Any) -> Outcome:
    """Nothing else comes to the device in backward: all layers stay in their slots, all other activations stay."""
    if isinstance(strategy, SuperpipelineStrategy):
        choose(strategy, activations={"net.blocks.2": "offload"}, k=99)
    return fit(lambda: Module(Aside()), vectors(), strategy)


class Aside(Stack):
    """A block whose result nobody uses."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for index, block in enumerate(self.blocks):
            if index == 2:
                self.unused = block(x + 0)  # which nobody else saves, and waits for
            else:
                x = block(x)
        return self.head(x)


class NoBackward(Module):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:  # type: ignore[override]
        loss = self.loss(batch)
        return loss if batch_idx < 2 else None


class Text(Stack):
    """Looks up twice in a table, the second time while the first rows may still be leaving."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(300, 16)

    def forward(self, x: Tensor) -> Tensor:
        numbers = x.abs().mul(50).long() % 300
        return super().forward(self.table(numbers[:, 0]) + self.table(numbers[:, 1]))


def looked_up(strategy: Any) -> Outcome:
    needs("capabilities.experts")
    return fit(lambda: Module(Text()), vectors(), strategy)


def predicted(make: Any, batches: Any, strategy: Any) -> Outcome:
    """Where no hook may write, the first layers for a batch that never comes are under way at the end."""
    pl.seed_everything(7, verbose=False)
    trainer, module = trainer_for(strategy), make()
    losses = trainer.predict(module, loader(batches))
    state = {name: value.clone() for name, value in module.state_dict().items()}
    assert isinstance(losses, list)
    return Outcome(losses, [], state, [], torch.get_rng_state(), module, trainer)


def predicted_unseen(strategy: Any) -> Outcome:
    """Nothing but residents: their transfer is waited for by compute alone, and compute by nobody."""
    if isinstance(strategy, SuperpipelineStrategy):
        choose(strategy, keep_on_gpu=("net",))
    case = CASES["vit"]
    pl.seed_everything(7, verbose=False)
    trainer, module = trainer_for(strategy), case.make()
    trainer.predict(module, loader(case.batches()), return_predictions=False)
    state = {name: value.clone() for name, value in module.state_dict().items()}
    return Outcome(list(state.values()), [], state, [], torch.get_rng_state(), module, trainer)


OF_RANKS = (
    Wait.REDUCE_AFTER_GRADIENT,
    Wait.DRAIN_AFTER_REDUCE,
    Wait.STEP_AFTER_ARRIVAL,
    Wait.READ_AFTER_OWNER,
    Wait.READ_AFTER_PUBLISH,
    Wait.READ_AFTER_FILL,
)
"""Waits that several devices alone have: ``tests/ranks/test_rank_waits.py`` leaves them out."""

SCENARIOS: dict[Wait, Callable[[Any], Outcome]] = {
    Wait.FETCH_AFTER_USE: training,
    Wait.USE_AFTER_FETCH: training,
    Wait.CAST_AFTER_FETCH: two_optimizers,
    Wait.WRITE_BACK_AFTER_USE: written_in_place,
    Wait.RESIDENTS_AFTER_USE: training,
    Wait.USE_AFTER_RESIDENTS: training,
    Wait.DRAIN_AFTER_GRADIENT: training,
    Wait.REUSE_AFTER_DRAIN: training,
    Wait.APPLY_AFTER_DRAIN: training,
    Wait.DROP_AFTER_DRAIN: dropped,
    Wait.STORE_AFTER_SAVE: offloaded,
    Wait.REUSE_AFTER_STORE: offloaded,
    Wait.RETURN_AFTER_USE: offloaded,
    Wait.USE_AFTER_RETURN: offloaded,
    Wait.REUSE_AFTER_RETURN: returned_in_vain,
    Wait.CLOSE_AFTER_STORE: lambda strategy: offloaded(strategy, lambda: NoBackward(Stack())),
    Wait.GATHER_AFTER_SEND: looked_up,
    Wait.UPDATE_AFTER_FETCH: skipped,
    Wait.UPDATE_AFTER_RESIDENTS: steps_first,
    Wait.FETCH_AFTER_UPDATE: in_the_background,
    Wait.READ_AFTER_UPDATE: looked_at,
    Wait.CLIP_AFTER_NORM: on_device,
    Wait.STEP_AFTER_BRING: on_device,
    Wait.TAKE_AFTER_STEP: on_device,
    Wait.BRING_AFTER_TAKE: on_device,
    Wait.READ_AFTER_TAKE: on_device,
    Wait.STEP_AFTER_FETCH: fetched_on_device,
    Wait.CLOSE_AFTER_FETCH: lambda strategy: predicted(CASES["vit"].make, CASES["vit"].batches(), strategy),
    Wait.UNPIN_AFTER_COPY: predicted_unseen,
}


@contextmanager
def left_out() -> Iterator[None]:
    """Around a run that is to fail."""
    logging.getLogger("lightning.pytorch.superpipeline").setLevel(logging.CRITICAL)
    try:
        yield
    finally:  # a race in tearing down leaves hooks, which is no matter here
        step_hooks._of_process = step_hooks._OfProcess()
        torch_optimizer._global_optimizer_pre_hooks.clear()
        torch_optimizer._global_optimizer_post_hooks.clear()
        logging.getLogger("lightning.pytorch.superpipeline").setLevel(logging.NOTSET)


IMPLIED = {
    Wait.WRITE_BACK_AFTER_USE: "the weight's own copy to the host",
    Wait.GATHER_AFTER_SEND: "the copy of the indices to the host, since compute has waited for the rows before",
}
"""Waits that a blocking copy beside them implies on a device; they would be needed were it none."""


Slow = Literal["copies", "compute"]
REGIMES: tuple[Slow, ...] = ("copies", "compute")
CYCLES = {"copies": 40_000_000, "compute": 5_000_000}
"""Of a sleep, by the regime: some milliseconds, and the kernels of the tests' models are microseconds. A copy has to sleep
longer than the host takes from there to what a wait protects."""
UPDATE_SECONDS = 0.02


class Delayed(Accelerator):
    """Plugs into the engine's one seam.

    Args:
        device: a GPU.
        slow: the regime.
        omit: a wait that is left out.
    """

    def __init__(self, device: torch.device, slow: Slow, omit: Wait | None = None) -> None:
        super().__init__(device)
        self.slow = slow
        self.omit = omit
        self.waits: set[Wait] = set()
        self.early: list[str] = []
        """Streams that were busy when host memory was unpinned; a finalizer cannot raise."""

    def copy(
        self, targets: Sequence[Tensor], sources: Sequence[Tensor], stream: Stream, *, why: Wait | None = None
    ) -> None:
        if self.slow == "copies":
            with self.on(stream), no_inference_mode():
                torch.cuda._sleep(CYCLES[self.slow])  # type: ignore[no-untyped-call]
                for target, source in zip(targets, sources, strict=True):
                    spoil(target, source)
        super().copy(targets, sources, stream, why=why)

    def access(self, memory: Tensor | Iterable[Tensor], by: Stream | None, *, write: bool) -> None:
        if self.slow == "compute" and by in (Stream.COMPUTE, Stream.STEP):
            with self.on(by):
                torch.cuda._sleep(CYCLES[self.slow])  # type: ignore[no-untyped-call]

    def wait(self, stream: Stream, event: Any, why: Wait) -> None:
        self.waits.add(why)
        if why is not self.omit:
            super().wait(stream, event, why)

    def synchronize(self, event: Any, why: Wait) -> None:
        self.waits.add(why)
        if why is not self.omit:
            super().synchronize(event, why)

    def later(self, work: Callable[[], None], urgency: int | None = None) -> Future[None]:
        def late() -> None:
            time.sleep(UPDATE_SECONDS)
            work()

        return super().later(late, urgency)

    def finish(self, work: Future[None], why: Wait) -> None:
        self.waits.add(why)
        if why is not self.omit:
            super().finish(work, why)

    def unpin(self, memory: Tensor) -> None:
        for name, side in self._side.items():
            if name is not Stream.STEP and not side.query():
                self.early.append(name.value)
                side.synchronize()  # unpinning now might end the process, and with it what others have found
        super().unpin(memory)


def spoil(target: Tensor, source: Tensor) -> None:
    """NaN, wherever the target is, in the order of the current stream."""
    value = float("nan") if source.is_floating_point() else 0xFF
    if target.device == source.device or target.device.type != "cpu":
        target.fill_(value)
    else:
        target.copy_(torch.full_like(source, value), non_blocking=True)


@contextmanager
def delayed(slow: Slow, omit: Wait | None = None) -> Iterator[list[Delayed]]:
    """Every strategy inside runs on such a device, whose trainers take the GPU; the list is of those that were made."""
    from tests.support import runs, wait_scenarios

    made: list[Delayed] = []

    def make(device: torch.device) -> Delayed:
        made.append(Delayed(device, slow, omit))
        return made[-1]

    trainer_for = runs.trainer_for

    def on_gpu(strategy: Any, **options: Any) -> Any:
        return trainer_for(strategy, **{"accelerator": "gpu", **options})

    with (
        mock.patch("sp_lightning.trainer.run.device_for", make),
        mock.patch.object(runs, "trainer_for", on_gpu),
        mock.patch.object(wait_scenarios, "trainer_for", on_gpu),
    ):
        yield made
    torch.cuda.synchronize()


NOT_SEEN = {
    **IMPLIED,
    Wait.DROP_AFTER_DRAIN: "the next gradient comes into that memory by the same stream, and nothing else does",
    Wait.CLOSE_AFTER_FETCH: "page locks are given back next, which waits for all copies before anybody takes memory",
    Wait.CLOSE_AFTER_STORE: "the same",
}
"""Waits whose omission no result can show, and why; the clocks of the simulated device show it."""

SEEN = [wait for wait in Wait if wait not in NOT_SEEN and wait not in OF_RANKS]
"""Waits of one device whose omission a result shows. Those of several ranks have no scenario on one device."""
