"""A time limit between tests, so that what has run by then is reported: Ctrl-C inside ``fit`` is Lightning's.

And threads, of which the CPU's tests have one: here an optimizer steps a large Llama on the host.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # before the first kernel: results that repeat

# In seconds since the epoch, as whoever kills this process counts; what is imported first takes its time, too.
END = float(os.environ.get("GPU_TEST_END", "inf"))
THREADS = int(os.environ.get("GPU_TEST_THREADS", "8"))


def pytest_runtest_setup(item: Any) -> None:
    if time.time() > END:
        pytest.exit(f"The time is over; {item.nodeid} and what follows has not run")


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
