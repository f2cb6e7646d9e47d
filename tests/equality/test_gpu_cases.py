"""What the GPU's tests of equality rest on, as far as a CPU can say."""

from __future__ import annotations

import importlib
import sys
from typing import Any

import pytest
import torch

from sp_lightning import SuperpipelineStrategy
from tests.support.gpu_reference import EXTRA_SLOTS, NAMES, REFUSED, reference
from tests.support.models import CASES
from tests.support.runs import assert_equal, fit, fused, superpipeline
from tests.support.tiers import first

ZOO = "tests.support.zoo"


def test_models_of_a_library_that_is_not_there_are_skipped_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The catalogue imported diffusers, and the GPU's machine has none: no model was tried there."""
    monkeypatch.setitem(sys.modules, "diffusers", None)
    monkeypatch.delitem(sys.modules, ZOO, raising=False)
    zoo = importlib.import_module(ZOO).ZOO
    assert zoo["llama"].make()
    with pytest.raises(pytest.skip.Exception, match="diffusers"):
        zoo["dit"].make()


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.parametrize(("name", "precision"), sorted(EXTRA_SLOTS))
def test_slots_beyond_the_plan_are_the_cases_own(name: str, precision: Any) -> None:
    """The GPU's test took those of a penalty on parameters for a defect. They are made on a CPU as well."""
    strategy = superpipeline(k=1)
    fit(CASES[name].make, CASES[name].batches(), strategy, precision=precision)
    assert strategy.stats().extra_slots


@pytest.mark.parametrize("mode", ["off", "backward"])
@pytest.mark.parametrize("name", first(NAMES, "stack", "parameter-hooks", "returns-view", why="a GPU runs them all"))
def test_the_reference_is_what_plain_lightning_gives(name: str, mode: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step on the host of gradients from a device is Lightning's own step, where the device is the host."""
    make = CASES[name].make if mode == "off" else fused(CASES[name].make)
    # oneDNN trains LSTMs in bfloat16 on processors with AVX-512 only; torch's own operators do it on all.
    if name == "lstm":
        monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)
    losses, state = reference(make, CASES[name].batches(), "bf16-mixed", "cpu")
    plain = fit(make, CASES[name].batches(), precision="bf16-mixed")
    assert_equal(plain.losses, losses, "losses")
    assert_equal({key: value for key, value in plain.state.items() if key != "hooked"}, state, "state")
    if (name, mode) in REFUSED:
        with pytest.raises(ValueError, match=REFUSED[name, mode]):
            fit(make, CASES[name].batches(), SuperpipelineStrategy(k=1, optimizer_overlap=mode), precision="bf16-mixed")
