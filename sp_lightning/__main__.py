"""The entry point of ``superpipeline`` and ``python -m sp_lightning``. :mod:`sp_lightning.tools.planner` has the commands."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from sp_lightning.registry import needed_for


def main(argv: Sequence[str] | None = None) -> None:
    """Runs a command. Without ``argv``, first adds the working directory to ``sys.path``.

    Args:
        argv: the arguments of the command line; None: those of this process.

    Raises:
        SystemExit: with status 2 after an error in a command. ``plan``: with status 1 if a model does not fit. ``check``: with
            status 1 if results differ, 2 if nothing was compared. The message has the reason.
        MissingCapabilityError: the folder of the command line is missing.
    """
    with needed_for("The command line", can_leave_out=False):
        from sp_lightning.tools.planner.arguments import LIGHTNING, make_parser, read

    arguments = list(sys.argv[1:] if argv is None else argv)
    if argv is None and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as with python -m, so that users can name their own modules
    parser = make_parser()
    try:
        given = None if arguments and arguments[0] in LIGHTNING else read(parser, arguments)
        from sp_lightning import _public  # noqa: F401  # registers the strategy

        _run(given, arguments)
    except BrokenPipeError:  # the reader has closed the pipe (plan … | head)
        # Python flushes stdout once more when it exits, which would raise the error again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(0) from None
    except (ValueError, TypeError, ImportError, OSError) as error:
        parser.exit(2, f"{parser.prog} {arguments[0]}: {error}\n")


def _run(given: argparse.Namespace | None, arguments: list[str]) -> None:
    """Imports the module of a command, and runs the command.

    Args:
        given: the parsed arguments; None for the commands of Lightning's CLI, which parses ``arguments`` itself.
        arguments: the words of the command line.
    """
    from sp_lightning.tools.planner.arguments import Question, make_parser

    with needed_for(f"The command {arguments[0]}", can_leave_out=False):
        if given is None:
            from sp_lightning.tools.planner import lightning_cli

            lightning_cli.run_lightning(arguments)
        elif given.command == "check":
            from sp_lightning.tools.comparison import command

            command.run(given)
        elif given.command == "dial":
            from sp_lightning.tools.comparison import command

            command.run_dial(given)
        elif given.command == "rates":
            from sp_lightning.tools.planner import measured

            print(measured.run_rates(given))
        else:
            from sp_lightning.tools.planner import plan_command

            assert isinstance(given, Question)
            # Parsed again without defaults: the namespace then has only the arguments that the user gave.
            given.given = frozenset(vars(make_parser(usual=False).parse_args(arguments)))
            plan_command.run_plan(given)


if __name__ == "__main__":
    main()
