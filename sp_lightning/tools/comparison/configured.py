"""A module, its data and a trainer's settings from a config of Lightning's CLI."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning.pytorch.cli import LightningArgumentParser, LightningCLI


class Configured(LightningCLI):
    """Lightning's CLI without a trainer.

    Attributes:
        settings: the arguments of ``Trainer`` in the config.
    """

    settings: dict[str, Any]

    @classmethod
    def of(cls, config: str, model: Callable[[], Any] | None, data: Callable[[], Any] | None, seed: int) -> Configured:
        """Reads a config, and makes the module and the data module.

        Args:
            config: the file.
            model: the class of the module, if the config does not name it.
            data: the class of the data module, if the config does not name it.
            seed: the seed of all random states, if the config has none.

        Raises:
            Exception: the config cannot be read, or a class that it names cannot be made.
            ModuleNotFoundError: jsonargparse is not installed.
        """
        usual: dict[str, Any] = {"save_config_callback": None, "args": ["--config", config], "run": False}
        return cls(model, data, seed_everything_default=seed, parser_kwargs={"exit_on_error": False}, **usual)

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        # A config of ``fit`` has these: the checkpoint to resume from. A check starts without one.
        for name in ("--ckpt_path", "--weights_only"):
            parser.add_argument(name, type=Any, default=None)

    def instantiate_trainer(self, **kwargs: Any) -> Any:
        self.settings = dict(self.config_init["trainer"])
