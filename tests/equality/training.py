"""Trains a case in a variant, and on plain Lightning once for all variants that train alike.

A new option of :class:`~tests.equality.variants.Variant` takes effect here: memory, disks, threads and compiled blocks.
"""

from __future__ import annotations

import copy
import os
import random
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import torch._dynamo
from lightning.fabric import Fabric
from lightning.fabric.strategies import SingleDeviceStrategy
from lightning.pytorch.plugins.precision import MixedPrecision

from sp_lightning import SuperpipelineStrategy, compile_blocks
from sp_lightning.core.weights import compiled_calls
from tests.equality.cases import Case
from tests.equality.rows import Loop
from tests.equality.variants import Variant
from tests.support.checkpointed import checkpointed
from tests.support.elsewhere import backward_elsewhere
from tests.support.on_disk import put_below
from tests.support.poison import crowded, poisoned, poisoned_ring
from tests.support.runs import Make, Outcome, fit, fused
from tests.support.simdevice import simulated

DTYPES = {"bf16-true": torch.bfloat16, "16-true": torch.float16, "64-true": torch.float64}
DYNAMOS = ".*non-leaf|.*Dynamo"
_plain: dict[str, Outcome] = {}


def _checkpointed(make: Make, mode: Any, layers: Any) -> pl.LightningModule:
    return checkpointed(make(), mode, layers)


def plain(name: str, case: Case, variant: Variant) -> Outcome:
    """The reference run. Variants that differ in the strategy alone share it."""
    options = {**variant.strategy, **getattr(case, "strategy", {})}
    mode = options.get("activations", "keep") if getattr(case, "checkpointed", False) else None
    key = repr((name, case.options(variant.trainer), variant.seen, variant.background, variant.compiled, mode))
    if key not in _plain:
        if mode is not None:
            case = replace(case, make=partial(_checkpointed, case.make, mode, options.get("layers")))
        _plain[key] = _train(case, variant, "auto")
    return _plain[key]


def ours(case: Case, variant: Variant) -> tuple[Outcome, SuperpipelineStrategy]:
    """The run under test."""
    with _memory(variant), _disk(variant) as disk, getattr(case, "inside", nullcontext)() as inside:
        strategy = SuperpipelineStrategy(**{**variant.strategy, **disk, **getattr(case, "strategy", {})})
        outcome = _train(case, variant, strategy)
        outcome.extra["inside"] = inside
        return outcome, strategy


def looped(loop: Loop, variant: Variant | None) -> Any:
    """Trains in a loop without a Trainer: streamed as a variant says, or plainly. Returns all results and the random state."""
    streamed = variant is not None
    with ExitStack() as stack:
        if variant is not None:
            stack.enter_context(_memory(variant))
            stack.enter_context(loop.inside())
        options = {} if variant is None else variant.strategy
        pl.seed_everything(7, verbose=False)
        if loop.fabric is None:
            from sp_lightning import stream  # a capability that may be missing

            given: Any = partial(stream, **options) if streamed else lambda *_, **__: nullcontext()
            return [loop.train(given), torch.get_rng_state()]
        from sp_lightning import FabricStrategy

        strategy: Any = FabricStrategy(**options) if streamed else SingleDeviceStrategy()
        given = Fabric(accelerator="cpu", devices=1, strategy=strategy, **loop.fabric())
        given.launch()
        stack.callback(strategy.teardown)
        found = copy.deepcopy(loop.train(given))
        assert not streamed or strategy.streams, "nothing was streamed"
        return [found, torch.get_rng_state()]


def _train(case: Case, variant: Variant, strategy: Any) -> Outcome:
    options = case.options(variant.trainer)
    if options.get("precision") == "16-mixed":
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=2)
        options = {**options, "plugins": [MixedPrecision("16-mixed", "cpu", scaler=scaler)]}
        del options["precision"]
    make = _made(case, variant, DTYPES.get(options.get("precision", "")))
    val = case.validation()
    if variant.compiled:  # dynamo's own remarks, on inputs that are not leaves; programs say what else is told
        message = DYNAMOS if hasattr(case, "inside") else ""
        warnings.filterwarnings("ignore", message, category=UserWarning)
    callbacks = case.callbacks()
    outcome = fit(
        make, case.batches(), strategy, val=val, recorded=variant.seen, run=case.run, callbacks=callbacks, **options
    )  # fmt: skip
    outcome.extra["graphs"] = int(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    outcome.extra["draws"] = random.random(), float(np.random.rand())
    return outcome


def forget_graphs() -> None:
    """Forgets all graphs, and what is known of them."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled_calls._reading_masters.clear()


def _made(case: Case, variant: Variant, dtype: torch.dtype | None) -> Make:
    make = fused(case.make) if variant.background and case.fusible else case.make

    def made() -> pl.LightningModule:
        module = make()
        if variant.compiled:
            forget_graphs()
            with suppress(ValueError):  # a case without blocks
                compile_blocks(module, backend="aot_eager")
        return module if dtype is None else module.to(dtype)

    return made


@contextmanager
def _disk(variant: Variant) -> Iterator[dict[str, Any]]:
    """The options of a strategy that has something on a disk, if the variant says so.

    A file system in memory stands for the disk, because others wait for each write. ``tests/trainer`` writes to a real one.
    """
    if not variant.below:
        yield {}
        return
    fast = "/dev/shm" if os.path.isdir("/dev/shm") else None
    with TemporaryDirectory(dir=fast) as folder, pytest.MonkeyPatch.context() as monkeypatch:
        put_below(monkeypatch, variant.below)
        try:
            yield {"disk": folder}
        finally:
            assert not os.listdir(folder)


@contextmanager
def _memory(variant: Variant) -> Iterator[None]:
    with ExitStack() as stack:
        if variant.memory == "poisoned":
            stack.enter_context(poisoned())
        if variant.memory == "simulated":
            stack.enter_context(simulated())
        if variant.strategy.get("optimizer_overlap") == "auto":  # as on an accelerator
            stack.enter_context(mock.patch("sp_lightning.trainer.update_facts._computes_on_host", return_value=False))
        if variant.memory == "crowded":
            stack.enter_context(simulated(capacity=2**40))
            stack.enter_context(crowded())
        if variant.strategy.get("activations") == "offload" or variant.memory == "crowded":
            stack.enter_context(poisoned_ring())
        callers = stack.enter_context(backward_elsewhere()) if variant.elsewhere else None
        yield
        assert callers != set(), "no backward has run elsewhere"
