"""Lightning's commands ``fit``, ``validate``, ``test`` and ``predict``."""

from __future__ import annotations

import sys

from sp_lightning.planner.arguments import PROGRAM


def run_lightning(arguments: list[str]) -> None:
    """Runs Lightning's CLI.

    Args:
        arguments: the arguments of the command line. The first one is the command, for example ``fit``.

    Raises:
        ValueError, ImportError: the arguments name no model, a value in the configuration is invalid, or jsonargparse is missing.
    """
    named = [word.partition("=")[0] for word in arguments]
    if not {"--model", "--config", "-c", "--help", "-h", "--print_config"} & set(named):
        raise ValueError(
            f"no model. Expected --config FILE or --model package.Class. For example {PROGRAM} {arguments[0]} --config "
            "examples/configs/fit_llm.yaml"
        )
    from sp_lightning.planner.lightning_cli import SuperpipelineCLI, in_one_line

    try:
        # The CLI warns if it gets arguments while sys.argv has arguments, too. So it reads sys.argv if both are the same.
        SuperpipelineCLI(**({} if arguments == sys.argv[1:] else {"args": arguments}))
    except ModuleNotFoundError as error:
        if "jsonargparse" not in str(error):
            raise
        raise ImportError(f'{error} Install it: pip install "jsonargparse[signatures]".') from error
    except ValueError as error:
        raise ValueError(in_one_line(str(error))) from error
