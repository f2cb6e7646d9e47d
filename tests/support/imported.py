"""What each of many small runs would do again with all that is imported, although nothing new is there to be found."""

from __future__ import annotations

import gc
from functools import cache
from importlib.metadata import entry_points

from lightning.fabric.utilities import registry


def imports_are_over() -> None:
    """The garbage collector no longer looks at what is there (0.3 s each time), nor each trainer for callbacks of packages."""
    gc.collect()
    gc.freeze()
    registry.entry_points = cache(entry_points)  # type: ignore[assignment]
