"""What the GPU's tests of equality rest on, as far as a CPU can say."""

from __future__ import annotations

import importlib
import sys
from typing import Any

import pytest

from tests.support.gpu_reference import EXTRA_SLOTS
from tests.support.models import CASES
from tests.support.runs import fit, superpipeline

ZOO = "tests.support.zoo"


def test_models_of_a_library_that_is_not_there_are_skipped_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The catalogue imported diffusers, and the GPU's machine has none: no model was tried there."""
    monkeypatch.setitem(sys.modules, "diffusers", None)
    monkeypatch.delitem(sys.modules, ZOO, raising=False)
    zoo = importlib.import_module(ZOO).ZOO
    assert zoo["llama"].make()
    with pytest.raises(pytest.skip.Exception, match="diffusers"):
        zoo["dit"].make()


@pytest.mark.parametrize(("name", "precision"), sorted(EXTRA_SLOTS))
def test_slots_beyond_the_plan_are_the_cases_own(name: str, precision: Any) -> None:
    """The GPU's test took those of a penalty on parameters for a defect. They are made on a CPU as well."""
    strategy = superpipeline(k=1)
    fit(CASES[name].make, CASES[name].batches(), strategy, precision=precision)
    assert strategy.stats().extra_slots
