"""Trains the models of one package in this process, and prints what each loop left behind as lines of JSON.

``python -m tests.packages.child NAME plain`` or, for a strategy, its options as JSON in place of ``plain``.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import json
import random
import sys
import traceback
from collections.abc import Callable, Mapping
from typing import Any

import lightning.pytorch
import numpy as np
import pytorch_lightning
import torch
from torch import Tensor

import sp_lightning
import sp_lightning.pytorch_lightning

LOOPS: tuple[str, ...] = ("fit", "validate", "test", "predict")
STRATEGIES = {
    lightning.pytorch: sp_lightning.SuperpipelineStrategy,
    pytorch_lightning: sp_lightning.pytorch_lightning.SuperpipelineStrategy,
}


def main() -> None:
    """Trains the models of ``NAME``, one after the other; one that raises does not keep the others from it."""
    name, how = sys.argv[1:]
    options = None if how == "plain" else json.loads(how)
    seed()  # data is made when the file is imported
    models: dict[str, Callable[[], None]] = importlib.import_module(f"tests.packages.{name}").MODELS
    seen: list[dict[str, Any]] = []
    for library, strategy in STRATEGIES.items():
        _patch(library.Trainer, None if options is None else functools.partial(strategy, **options), seen)
    for model, train in models.items():
        seen.clear()
        seed()
        error = None
        try:
            train()
        except Exception as raised:
            traceback.print_exc()
            error = f"{type(raised).__name__}: {raised}"
        print("SEEN", json.dumps({"model": model, "loops": seen, "error": error}), flush=True)


def seed() -> None:
    """Seeds whatever draws random numbers."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


def _patch(trainer: Any, make_strategy: Callable[[], Any] | None, seen: list[dict[str, Any]]) -> None:
    """Has each trainer use the CPU and the strategy, and each loop tell what it left."""
    make = trainer.__init__

    @functools.wraps(make)  # pytorch_tabular reads the signature
    def made(self: Any, *args: Any, **options: Any) -> None:
        strategy = {} if make_strategy is None else {"strategy": make_strategy()}
        options.pop("strategy", None)
        make(self, *args, **{"logger": False, **options, "accelerator": "cpu", "devices": 1, **strategy})

    trainer.__init__ = made
    for name in LOOPS:
        setattr(trainer, name, _observed(name, getattr(trainer, name), seen))


def _observed(name: str, loop: Callable[..., Any], seen: list[dict[str, Any]]) -> Callable[..., Any]:
    def observed(self: Any, *args: Any, **options: Any) -> Any:
        seed()
        output = loop(self, *args, **options)
        module = self.lightning_module
        plan = getattr(self.strategy, "plan", None)
        seen.append({
            "loop": name,
            "module": type(module).__name__,
            "steps": self.global_step,
            "layers": None if plan is None else len(plan.layers),
            "state": digest(module.state_dict()),
            "optimizers": digest([each.state_dict().get("state") for each in self.optimizers] if name == "fit" else []),
            "metrics": digest(dict(sorted(self.callback_metrics.items()))),
            "output": digest(output),
            "random": digest(torch.get_rng_state()),
        })  # fmt: skip
        return output

    return observed


def digest(value: Any) -> str:
    """A digest of all tensors, arrays and numbers in a value, with their dtypes and shapes."""
    found = hashlib.blake2s()
    _add(value, found)
    return found.hexdigest()


def _add(value: Any, found: Any) -> None:
    if isinstance(value, Tensor):
        array = value.detach().cpu()
        array = (array.to_dense() if array.is_sparse else array).contiguous()
        found.update(f"{array.dtype} {tuple(array.shape)}".encode())
        found.update(array.reshape(-1).view(torch.uint8).numpy().tobytes() if array.numel() else b"")
    elif isinstance(value, np.ndarray):
        _add(torch.from_numpy(np.ascontiguousarray(value)), found)
    elif isinstance(value, Mapping):
        for key in value:
            found.update(str(key).encode())
            _add(value[key], found)
    elif isinstance(value, (list, tuple)):
        for each in value:
            _add(each, found)
    else:
        found.update(repr(value).encode() if isinstance(value, (int, float, str, type(None))) else b"an object")


if __name__ == "__main__":
    main()
