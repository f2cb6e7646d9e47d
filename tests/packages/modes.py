"""Prints the mode that ``optimizer_overlap="auto"`` takes for models of a package, with the CPU counted as an accelerator.

Usage: ``python -m tests.packages.modes NAME [MODEL ...]``, in an environment that has the package (``python -m tests.packages
--venv FOLDER`` makes one). It prints a line of JSON for each model: class, mode, whether gradients are kept, and the reason.
"""

from __future__ import annotations

import importlib
import json
import sys
from typing import Any
from unittest import mock

from sp_lightning.trainer.optimizer_steps import OptimizerSteps
from tests.packages import child


def main(package: str, *only: str) -> None:
    """Trains the models, or those of these names, each once."""
    child.LOOPS = ("fit",)
    models = importlib.import_module(f"tests.packages.{package}").MODELS
    for library, strategy in child.STRATEGIES.items():
        child._patch(library.Trainer, strategy, [])
    chosen: dict[str, Any] = {}
    execute = OptimizerSteps._apply_policy

    def noted(steps: OptimizerSteps) -> None:
        execute(steps)
        if steps._run.trains and steps.policy is not None:
            name = type(steps._trainer.lightning_module).__name__
            chosen.update(
                {"class": name, "mode": steps.overlap, "early": steps.policy.early.name, "why": steps.policy.why}
            )

    computes_elsewhere = mock.patch("sp_lightning.trainer.update_facts._computes_on_host", return_value=False)
    with computes_elsewhere, mock.patch.object(OptimizerSteps, "_apply_policy", noted):
        for model, train in models.items():
            if not only or model in only:
                chosen.clear()
                child.seed()
                train()
                print(json.dumps({"package": package, "model": model, **chosen}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
