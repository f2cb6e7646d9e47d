"""A pytest plugin: a simulated device stands for the GPU in the tests of ``tests/gpu``.

``pytest -m '' -p tests.support.simulated_gpu tests/gpu`` runs them on a machine without a GPU, with ``--part`` one fortieth of
them. Trainers that ask for a GPU get the CPU, each strategy gets a :class:`~tests.support.simdevice.SimDevice`, and updates are
decided as on a GPU.

A test with the mark ``gpu`` runs so. If it needs a real GPU, the mark says why, ``@pytest.mark.gpu("why")``, and the test is
skipped with this reason. A test that is skipped in any other way fails.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch

from tests.support.runs import as_on_a_gpu
from tests.support.simdevice import simulated
from tests.support.tiers import number, part_of


def pytest_configure() -> None:
    if torch.cuda.is_available():
        raise pytest.UsageError(
            'This machine has a GPU. Hide it from tests of a simulated one: CUDA_VISIBLE_DEVICES=""'
        )


@pytest.hookimpl(trylast=True)  # after the third tier was divided into parts
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Takes the tests with the mark, or one part of them, and skips those that need a real GPU."""
    part = config.getoption("part")
    marked = [item for item in items if item.get_closest_marker("gpu")]
    kept = [item for item in marked if part is None or part_of(item.nodeid) == number(part)]
    config.hook.pytest_deselected(items=[item for item in items if item not in set(kept)])
    items[:] = kept
    for item in items:
        if (why := reason(item)) is not None:
            item.add_marker(pytest.mark.skip(reason=why))


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: Any) -> Generator[None, object, object]:
    """Around each test, and not around its fixtures."""
    with gpu_simulated():
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Fails a test that was skipped without a reason in its mark: nobody would notice that it runs nowhere."""
    report = yield
    if report.skipped and reason(item) is None:
        report.outcome = "failed"
        report.longrepr = f"{item.nodeid} was skipped: {report.longrepr}. Say why in its mark: @pytest.mark.gpu('why')"
    return report


def reason(item: pytest.Item) -> str | None:
    """Returns why a test needs a real GPU, as its nearest mark with a reason says; None if it runs on a simulated one."""
    return next((mark.args[0] for mark in item.iter_markers("gpu") if mark.args), None)


@contextmanager
def gpu_simulated() -> Iterator[None]:
    """While this is active, Trainers with ``accelerator="gpu"`` compute on the CPU, and strategies on a simulated device."""
    made = pl.Trainer.__init__

    @wraps(made)
    def init(self: pl.Trainer, *args: Any, accelerator: Any = "auto", **options: Any) -> None:
        made(self, *args, accelerator="cpu" if accelerator == "gpu" else accelerator, **options)

    with mock.patch.object(pl.Trainer, "__init__", init), simulated(capacity=2**40), as_on_a_gpu():
        yield
