"""Seven small trainings that need only the core, each compared bit by bit with plain Lightning.

``python -m tests.repository.core_runs`` prints a digest of each training's weights as JSON. An installation without a capability
must print the same digests. So a default that does nothing, where it should do something, is detected.
"""

from __future__ import annotations

import hashlib
import json
import logging
import warnings
from typing import Any

from lightning.pytorch import LightningModule

from tests.support.models import Module, Stack, vectors
from tests.support.runs import assert_same, fit, fused, superpipeline
from tests.support.tables import Text, numbers

TRAININGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "float32": ({"k": 2}, {}),
    "k is chosen": ({}, {}),
    "bf16-mixed": ({"k": 2}, {"precision": "bf16-mixed"}),
    "clipping": ({"k": 2}, {"gradient_clip_val": 0.1}),
    "updates in forward": ({"k": 2, "optimizer_overlap": "forward"}, {}),
    "updates in backward": ({"k": 1, "optimizer_overlap": "backward"}, {}),
    "an embedding": ({"k": 1}, {}),
}
"""For each training the options of the strategy, and the options of the trainer."""


def digest_of(name: str) -> str:
    """Trains with plain Lightning and with the strategy, compares them, and returns a digest of the weights."""
    options, trainer_options = TRAININGS[name]
    embedding = name == "an embedding"

    def plain() -> LightningModule:
        return Module(Text() if embedding else Stack())

    make = fused(plain) if "optimizer_overlap" in options else plain  # updates in the background run fused
    batches = numbers(4) if embedding else vectors()
    trainer_options = {
        "recorded": "losses",
        **trainer_options,
    }  # recording gradients would rule out updates in backward
    ours = fit(make, batches, superpipeline(**options), **trainer_options)
    assert_same(ours, fit(make, batches, **trainer_options))
    weights = hashlib.sha256()
    for key, value in sorted(ours.state.items()):
        weights.update(key.encode() + value.numpy().tobytes())
    return weights.hexdigest()[:16]


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    for logger in ("lightning.pytorch", "lightning.pytorch.utilities.rank_zero"):
        logging.getLogger(logger).setLevel(logging.ERROR)
    print(json.dumps({name: digest_of(name) for name in TRAININGS}))
