"""The entry of ``python -m sp_lightning``. The commands are in :mod:`sp_lightning.cli`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from sp_lightning.cli.arguments import LIGHTNING, Question, make_parser, separate
from sp_lightning.cli.commands import run_check, run_convert, run_lightning, run_plan
from sp_lightning.cli.measured import run_rates


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command that the arguments name; by default those of the process.

    Raises:
        SystemExit: with status 1 if a model does not fit, with status 3 if it is not known whether it fits, with status 2 if
            a command cannot do what it is asked to do. The message says why.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments and arguments[0] in LIGHTNING:
        run_lightning(arguments)
        return
    parser = make_parser()
    given = parser.parse_args(arguments, namespace=Question())
    try:
        if given.command == "convert":
            run_convert(given.source, given.target, trust=given.trust)
        elif given.command == "check":
            run_check(given)
        elif given.command == "rates":
            print(run_rates(given))
        else:
            given.given = frozenset(vars(make_parser(usual=False).parse_args(arguments)))
            run_plan(separate(given))
    except (ValueError, TypeError, ImportError, OSError) as error:
        parser.exit(2, f"{parser.prog} {given.command}: {error}\n")


if __name__ == "__main__":
    main()
