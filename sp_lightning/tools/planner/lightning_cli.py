"""Lightning's CLI with this strategy as its default, and errors in one line."""

from __future__ import annotations

import re
import sys
from typing import Any, NoReturn

from lightning.pytorch import Trainer
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from sp_lightning.tools.planner.arguments import PROGRAM
from sp_lightning.trainer.strategy import SuperpipelineStrategy


class OneLineParser(LightningArgumentParser):
    """Reports an error in one line. By default, jsonargparse prints fifty lines of usage before it."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        if not self.exit_on_error:  # the parser of a class's arguments, whose message becomes a part of another one
            super().error(message, ex)
        self.exit(2, f"{PROGRAM}: {in_one_line(message)}\n")


class SuperpipelineCLI(LightningCLI):
    """Lightning's CLI. A config or an option that names another strategy wins; then one line says that it runs.

    Args:
        options: the arguments of Lightning's CLI.
    """

    def __init__(self, **options: Any) -> None:
        defaults = {"strategy": "superpipeline"}
        super().__init__(trainer_defaults=defaults, parser_class=OneLineParser, **options)

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        trainer = super().instantiate_trainer(**kwargs)
        if not isinstance(trainer.strategy, SuperpipelineStrategy):
            given = self._get(self.config, "trainer")["strategy"]
            runs = "plain Lightning" if given == "auto" else "this strategy"
            rank_zero_info(
                f"Superpipeline: strategy: {getattr(given, 'class_path', given)} was given, so {runs} runs. Without it, "
                "SuperpipelineStrategy runs."
            )
        return trainer


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
    try:
        # The CLI warns if it gets arguments while sys.argv has arguments, too. So it reads sys.argv if both are the same.
        SuperpipelineCLI(**({} if arguments == sys.argv[1:] else {"args": arguments}))
    except ModuleNotFoundError as error:
        if "jsonargparse" not in str(error):
            raise
        raise ImportError(f'{error} Install it: pip install "jsonargparse[signatures]".') from error
    except ValueError as error:
        raise ValueError(in_one_line(str(error))) from error


def in_one_line(message: str) -> str:
    """Returns a message of jsonargparse without the types that it tried and the whole value: the key, and the reasons."""
    head, _, tried = message.partition("Errors:\n")
    parts = re.split(r"^ *- ", tried.partition("Given value type:")[0], flags=re.MULTILINE)
    reasons = [" ".join(part.split()) for part in parts if part.strip() and not part.startswith("Expected a ")]
    key = [line for line in head.splitlines()[:1] if "key" in line]  # absent from an error of a class itself
    hint = (
        ['In YAML, off, on, yes and no are true or false: write "off" in quotes.']
        if "Got value: False" in message
        else []
    )
    return " ".join([*key, *reasons] if reasons else [*message.split(), *hint])
