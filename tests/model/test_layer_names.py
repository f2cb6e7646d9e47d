"""What is a layer of each model of the tests is written down: a change of the finder shows by name what it changes.

``python -m tests.model.test_layer_names`` writes ``support/layers.txt`` anew.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import torch
from torch import nn

from sp_lightning.core.model.find import find_layers
from tests.model.findable import MODELS
from tests.support.models import CASES
from tests.support.zoo import ZOO

RECORD = Path(__file__).parents[1] / "support" / "layers.txt"
MAKERS: dict[str, Callable[[], nn.Module]] = {
    **{f"layers/{name}": make for name, (make, _) in MODELS.items()},
    **{f"models/{name}": case.make for name, case in CASES.items()},
    **{f"zoo/{name}": entry.make for name, entry in ZOO.items()},
}


def digest(lines: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:12]


def line_for(module: nn.Module) -> tuple[str, str]:
    """What the module is, and what its layers are: in short for the reader, in full as a digest."""
    found = find_layers(module)
    layers = [layer.name for layer in found.layers]
    parts = (  # without names of ours: a change of a name would change all digests
        layers,
        [table.name for table in found.tables],
        list(found.units),
        [name for name, _ in found.residents.parameters],
        sorted(found.experts),
    )
    inside = [f"{layer.name} {name}" for layer in found.layers for name, _ in layer.parameters]
    short = Counter(re.sub(r"\d+", "*", name) for name in layers)
    shown = " ".join(f"{name}×{count}" if count > 1 else name or "·" for name, count in short.items())
    is_now = digest(f"{name} {tuple(p.shape)}" for name, p in module.named_parameters())
    return is_now, f"{digest([*map(repr, parts), *inside])} {shown}"


def lines() -> dict[str, tuple[str, str]]:
    with torch.random.fork_rng():
        return {name: line_for(make()) for name, make in MAKERS.items()}


def written() -> dict[str, tuple[str, str]]:
    records = [line.split(" ", 2) for line in RECORD.read_text().splitlines()]
    return {name: (module, layers) for name, module, layers in records}


def test_each_model_is_written_down() -> None:
    assert written().keys() == MAKERS.keys(), "write it anew: python -m tests.model.test_layer_names"


@pytest.mark.long("all models are built")
def test_the_layers_of_known_models_stay_as_they_are() -> None:
    """A release of a library may change a model; while its parameters are those that were written down, so are its layers."""
    found, before = lines(), written()
    same = [name for name in found if found[name][0] == before[name][0]]
    assert len(same) > len(found) / 2, "the libraries' models are others: python -m tests.model.test_layer_names"
    assert {name: found[name] for name in same} == {name: before[name] for name in same}


if __name__ == "__main__":
    RECORD.write_text("".join(f"{name} {module} {layers}\n" for name, (module, layers) in lines().items()))
