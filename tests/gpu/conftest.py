"""A time limit between tests, so that what has run by then is reported: Ctrl-C inside ``fit`` is Lightning's."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # before the first kernel: results that repeat

SECONDS = float(os.environ.get("GPU_TEST_SECONDS", "inf"))
_begun = time.monotonic()


def pytest_runtest_setup(item: Any) -> None:
    if time.monotonic() - _begun > SECONDS:
        pytest.exit(f"{SECONDS:.0f} s are over; {item.nodeid} and what follows has not run")
