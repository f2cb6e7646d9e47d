"""A time limit between tests, and a file of what each has come to, for runs that are cut off: ``examples.benchmarks`` reads it.

And threads, of which the CPU's tests have one: here an optimizer steps a large Llama on the host.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # before the first kernel: results that repeat

# In seconds since the epoch, as whoever kills this process counts; what is imported first takes its time, too.
END = float(os.environ.get("GPU_TEST_END", "inf"))
THREADS = int(os.environ.get("GPU_TEST_THREADS", "8"))


# A folder with the names of tests that need not run again (passed), to which results are written. Workers read the first only.
FOLDER = os.environ.get("GPU_TEST_FOLDER")
LATE = "The time is over"
IN_ITS_PLACE = ("tests.support.simulated_gpu", "tests.foreign.plugin")
"""Plugins with another device in the place of a GPU."""


def pytest_collection_modifyitems(config: Any, items: list[Any]) -> None:
    """Leaves out what has passed, and in a run of all tests without a GPU what would be skipped: 1,500 tests."""
    passed = set(Path(FOLDER, "passed").read_text().splitlines()) if FOLDER else set()
    missing = [] if torch.cuda.is_available() or any(map(config.pluginmanager.has_plugin, IN_ITS_PLACE)) else items
    missing = [item for item in missing if item.get_closest_marker("gpu")]
    for item in missing:
        item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))
    skipped = [] if any("gpu" in argument for argument in config.args) else missing
    left = [*skipped, *(item for item in items if item.nodeid in passed)]
    config.hook.pytest_deselected(items=left)
    gone = set(left)
    items[:] = [item for item in items if item not in gone]


def pytest_runtest_setup(item: Any) -> None:
    if time.time() > END:
        pytest.skip(LATE)


def pytest_runtest_logreport(report: Any) -> None:
    """Each result is in the file at once. The last result counts: a test whose teardown fails has not passed."""
    if FOLDER and "PYTEST_XDIST_WORKER" not in os.environ and (report.when == "call" or report.outcome != "passed"):
        outcome = "late" if report.skipped and LATE in str(report.longrepr) else report.outcome
        with Path(FOLDER, "results").open("a") as file:
            file.write(json.dumps([report.nodeid, outcome]) + "\n")


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    if torch.cuda.is_available():
        torch.set_num_threads(min(THREADS, os.cpu_count() or 1))
    yield
    torch.set_num_threads(before)


@pytest.fixture
def deterministic() -> Iterator[None]:
    """Kernels whose results repeat, where there are such."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cudnn.benchmark = False
    yield
    torch.use_deterministic_algorithms(False)
