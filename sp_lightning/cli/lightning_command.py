"""``fit``, ``validate``, ``test`` and ``predict``: Lightning's CLI, which finds this strategy registered."""

from __future__ import annotations

import sys

LIGHTNING = ("fit", "validate", "test", "predict")
"""The commands of Lightning's CLI."""


def run_lightning(arguments: list[str]) -> None:
    """Runs Lightning's CLI.

    Raises:
        SystemExit: jsonargparse is not installed, or a value in the configuration is refused; the message says why.
    """
    try:
        from lightning.pytorch.cli import LightningCLI

        # With arguments of its own, the CLI warns that sys.argv has others.
        LightningCLI(args=arguments) if arguments != sys.argv[1:] else LightningCLI()
    except ModuleNotFoundError as error:
        if "jsonargparse" not in str(error):
            raise
        raise SystemExit(f'{error} Install it: pip install "sp_lightning[cli]".') from error
    except ValueError as error:
        # jsonargparse lists every type that it tried, and the value in full. The user needs the reasons alone.
        tried = str(error).partition("\nErrors:\n  - ")[2].partition("\nGiven value type:")[0].split("\n  - ")
        reasons = [reason for reason in tried if reason and not reason.startswith("Expected a ")]
        if not reasons:
            raise
        raise SystemExit(f"python -m sp_lightning {arguments[0]}: {' '.join(reasons)}") from error
