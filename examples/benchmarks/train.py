"""Train one workload with several contestants.

From the root of the repository::

    python -m examples.benchmarks.train --size tiny
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from examples.benchmarks import contest
from examples.benchmarks.rows import Row


def main(argv: Sequence[str] | None = None) -> list[Row]:
    """Run; ``argv`` as on the command line."""
    return contest.main("train", "Train one workload with several contestants.", argv)


if __name__ == "__main__":
    sys.exit(0 if contest.any_ok(main()) else 1)
