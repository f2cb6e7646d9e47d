"""The entry of ``python -m sp_lightning``. The commands are in :mod:`sp_lightning.cli`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from sp_lightning.cli.arguments import LIGHTNING
from sp_lightning.cli.commands import run_convert, run_lightning, run_plan


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command that the arguments name; by default those of the process."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments and arguments[0] in LIGHTNING:
        run_lightning(arguments)
    elif arguments and arguments[0] == "convert":
        run_convert(arguments[1:])
    else:
        run_plan(arguments)


if __name__ == "__main__":
    main()
