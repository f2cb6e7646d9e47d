"""Which mode a layer's activations get, and options that cannot be."""

from __future__ import annotations

from typing import Any

import pytest

from sp_lightning import SuperpipelineStrategy
from tests.support.models import Module, Stack, vectors
from tests.support.runs import fit, superpipeline

pytestmark = pytest.mark.usefixtures("everything_is_worth_moving")

# ---------------------------------------------------------------------- options


@pytest.mark.long("takes a second or more")
def test_patterns_decide_by_the_first_match() -> None:
    choice: dict[str, Any] = {"net.blocks.1": "keep", "net.blocks": "recompute", "net.he*": "offload"}
    strategy = superpipeline(activations=choice)
    fit(lambda: Module(Stack()), vectors(), strategy)
    modes = {name.removeprefix("net."): mode for name, mode in strategy.activations.items()}
    assert modes.pop("blocks.1") == modes.pop("stem") == "keep"
    assert modes.pop("head") == "offload"
    assert set(modes.values()) == {"recompute"}


@pytest.mark.parametrize(
    ("choice", "error", "said"),
    [
        ("drop", ValueError, "activations must be one of"),
        (3, TypeError, r"activations must be one of .* found 3"),
        ({"net.blocks.*": "drop"}, ValueError, r"the mode must be one of"),
        ({3: "keep"}, TypeError, "found the pattern 3"),
    ],
)
def test_options_that_cannot_be(choice: Any, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        SuperpipelineStrategy(activations=choice)


@pytest.mark.parametrize(
    ("pattern", "said"),
    [
        ("net.blok.*", r"activations='net.blok.\*' matches nothing in Module. Closest names: \['net.blocks"),
        ("net.blocks.1.inner", r"names a part of 'net.blocks.1'.*Use activations=\{'net.blocks.1': 'offload'\}"),
    ],
)
def test_patterns_that_match_no_unit(pattern: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        fit(lambda: Module(Stack()), vectors(), superpipeline(activations={pattern: "offload"}))
