"""The heart: each case of the registry, trained in each of its variants, is bitwise equal to plain Lightning."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor

from tests.equality.cases import CASES
from tests.equality.training import ours, plain
from tests.equality.variants import VARIANTS, Variant, pairs
from tests.support.engine import taken_apart
from tests.support.models import llama, tokens
from tests.support.runs import Outcome, as_torch_can, assert_same, fit, superpipeline
from tests.support.tiers import first

TIERS: dict[int, Any] = {
    1: (),
    2: pytest.mark.rest("the registry of variants has other cases for the first tier"),
    3: pytest.mark.long("the second tier has each case with every 47th variant"),
}
PAIRS = [pytest.param(case, variant, id=f"{case} | {variant}", marks=TIERS[tier]) for case, variant, tier in pairs()]
pytestmark = [
    pytest.mark.usefixtures("everything_is_worth_moving"),
    pytest.mark.states,
    # peft warns that these adapters cannot be merged: nobody told it how to quantise again.
    pytest.mark.filterwarnings("ignore:TorchaoLoraLinear was instantiated without"),
]


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights of these models would fit into one piece of an update."""
    monkeypatch.setattr("sp_lightning.core.updates.pieces.piece_size", lambda threads: 512)


@pytest.mark.parametrize(("name", "variant_name"), PAIRS)
def test_training_is_bitwise_equal(name: str, variant_name: str) -> None:
    case, variant = CASES[name], VARIANTS[variant_name]
    said = variant.refused.get(name, variant.refused.get("*"))
    if said is not None:
        with pytest.raises((ValueError, RuntimeError), match=said):
            ours(case, variant)
        return
    with as_torch_can():
        reference = plain(name, case, variant)
    with taken_apart() as layers:
        outcome, strategy = ours(case, variant)
    assert_same(outcome, reference)
    chosen = variant.strategy.get("optimizer_overlap") == "auto"
    if not (variant.below or chosen):  # where any optimizer with state updates by layers, or may do so
        plan = strategy.plan
        moving = any(layer.gradient_bytes for layer in plan.trained)  # otherwise all trained layers stay
        apart = moving and ("optimizer_on" in variant.strategy or (variant.background and case.fusible))
        assert bool(layers) == apart, "updates by layers, and nowhere else"
    whole = variant.strategy.get("activations") == "recompute"  # where blocks move whole
    if case.shown_by is not None and not whole and "gpu_layers" not in variant.strategy:
        assert case.shown_by(strategy.plan)


@pytest.mark.long("each pair once more; the second tier has eight families of them")
@pytest.mark.parametrize(
    ("name", "variant_name"),
    [
        (c, variant)
        for c, variant, _ in pairs()
        if not VARIANTS[variant].strategy.keys() & {"optimizer_on", "gpu_layers"}
    ],
)
def test_the_same_with_steps_on_the_device(name: str, variant_name: str) -> None:
    """Equal, or refused by name: what the host does there, and the device does not."""
    case, on_host = CASES[name], VARIANTS[variant_name]
    variant = replace(on_host, strategy={**on_host.strategy, "optimizer_on": "gpu"})
    with as_torch_can():
        reference = None if {name, "*"} & variant.refused.keys() else plain(name, case, variant)
    said, outcome = "", None
    try:
        outcome, _ = ours(case, variant)
    except (ValueError, RuntimeError) as error:
        said = str(error)
    expected = variant.refused.get(name, variant.refused.get("*", "optimizer_on"))
    assert outcome is not None or re.search(f"{expected}|optimizer_on", said), said
    if outcome is not None:
        assert reference is not None, f"the host refuses it: {expected}"
        assert_same(outcome, reference)


@pytest.mark.long("takes a second or more")
@pytest.mark.parametrize("clip", [None, 1e-3])
@pytest.mark.parametrize("init_scale", [2.0**10, 2.0**40])
@pytest.mark.parametrize("name", first(["llama-dropout", "stack"], "stack", why="a larger model"))
def test_16_mixed_scales_skips_and_grows(name: str, init_scale: float, clip: float | None) -> None:
    """With the scaler's state; the larger scale makes gradients infinite, so that steps are skipped."""

    def run(strategy: Any) -> tuple[Outcome, dict[str, Any]]:
        scaler = torch.amp.GradScaler("cpu", init_scale=init_scale, growth_interval=2, backoff_factor=2.0**-20)
        plugin = MixedPrecision("16-mixed", "cpu", scaler=scaler)
        options = {"plugins": [plugin], "gradient_clip_val": clip, "max_epochs": 2}
        return fit(CASES[name].make, CASES[name].batches(), strategy, **options), plugin.state_dict()

    (mine, my_scaler), (plain, plain_scaler) = run(superpipeline(k=1)), run("auto")
    assert_same(mine, plain)
    assert my_scaler == plain_scaler
    assert plain_scaler["scale"] != init_scale


def test_the_comparison_can_fail() -> None:
    """A wrong gradient in one layer, one bit in one parameter: both are seen."""
    variant = VARIANTS["k=2, k'=1"]
    reference = plain("stack", CASES["stack"], variant)
    outcome, _ = ours(CASES["stack"], variant)
    name = "net.blocks.2.inner.weight"
    outcome.state[name] = outcome.state[name].clone()
    outcome.state[name].view(-1)[3] += 1e-7
    with pytest.raises(AssertionError, match=name):
        assert_same(outcome, reference)


@pytest.mark.long("takes a second or more")
def test_the_comparison_of_offloaded_activations_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes back is what backward reads: one wrong number is seen."""
    from sp_lightning.capabilities.activations.offload import Offload

    load, variant = Offload.load, VARIANTS["offload, k=1, simulated"]

    def wrong(self: Offload, stored: Any) -> Tensor:
        tensor = load(self, stored).clone()
        tensor.view(-1)[0] += 1
        return tensor

    monkeypatch.setattr(Offload, "load", wrong)
    with pytest.raises(AssertionError, match=r"gradients|losses"):
        assert_same(ours(CASES["stack"], variant)[0], plain("stack", CASES["stack"], variant))


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.parametrize("batch_count", [1, 5])
def test_without_the_callback(batch_count: int) -> None:
    """The strategy alone is right; the callback only makes it fast and legible."""
    batches = tokens(batch_count)
    mine = fit(llama, batches, superpipeline(callback=False), val=batches)
    assert_same(mine, fit(llama, batches, val=batches))


# ---------------------------------------------------------------------- the registry itself


def test_every_case_and_every_variant_says_what_it_covers() -> None:
    assert all(len(each.covers.split()) > 2 for each in [*CASES.values(), *VARIANTS.values()])
    assert len({case.covers for case in CASES.values()}) == len(CASES)


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
def test_a_variant_names_cases_that_there_are(variant: Variant) -> None:
    assert variant.cases
    assert variant.cases | set(variant.refused) - {"*"} <= set(CASES)


def test_the_first_tier_has_every_case_and_the_second_every_variant() -> None:
    assert {case for case, _, tier in pairs() if tier == 1} == set(CASES)
    assert {variant for _, variant, tier in pairs() if tier < 3} == set(VARIANTS)
