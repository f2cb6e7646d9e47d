"""Keep, recompute, offload: bitwise equal to plain Lightning, and as much memory as the formula says."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

from sp_lightning import SuperpipelineStrategy
from sp_lightning.activations.forward_state import Unrepeatable
from sp_lightning.activations.offload import Offload
from tests.support.models import CASES, Case
from tests.support.poison import poisoned
from tests.support.reference import plain, run
from tests.support.runs import Outcome, assert_same, fit, superpipeline
from tests.support.saving import MODES
from tests.support.simdevice import simulated

pytestmark = pytest.mark.usefixtures("everything_is_worth_moving")

# ---------------------------------------------------------------------- equality


@pytest.mark.parametrize("name", CASES)
def test_recompute_is_bitwise_equal(name: str) -> None:
    strategy = superpipeline(k=1, k_prime=1, activations="recompute")
    if name == "clamped-in-forward":
        with pytest.raises(
            Unrepeatable, match=r"'net.blocks.0' writes its parameter 'inner.weight', and cannot be run again"
        ):
            run(CASES[name], strategy)
        return
    with poisoned():
        ours = run(CASES[name], strategy)
    assert_same(ours, plain(name))


@pytest.mark.parametrize("name", CASES)
def test_offload_is_bitwise_equal_and_without_races(name: str, poisoned_ring: None) -> None:
    with simulated():
        ours = run(CASES[name], superpipeline(k=1, k_prime=1, activations="offload"))
    assert_same(ours, plain(name))


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["llama-dropout", "lora-checkpoint", "gradient-penalty", "frozen"])
def test_precision_and_accumulation(name: str, mode: Any, precision: str, poisoned_ring: None) -> None:
    case = CASES[name]
    if precision == "bf16-true":
        case = Case(lambda: CASES[name].make().bfloat16(), case.batches)
    options: dict[str, Any] = {"precision": precision, "accumulate_grad_batches": 2, "gradient_clip_val": 0.1}
    with simulated():
        ours = run(case, superpipeline(k=1, activations=mode), **options)
    assert_same(ours, run(case, "auto", **options))


@pytest.mark.parametrize("overlap", ["forward", "backward"])
@pytest.mark.parametrize("mode", MODES)
def test_updates_in_the_background(mode: Any, overlap: Any) -> None:
    case = CASES["llama-dropout"]

    def trained(**options: Any) -> Outcome:
        strategy = SuperpipelineStrategy(k=1, optimizer_overlap=overlap, **options)
        return fit(case.make, case.batches(), strategy, gradients=False, gradient_clip_val=None)

    with simulated():
        ours = trained(activations=mode)
    assert_same(ours, trained())


def test_the_comparison_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes back is what backward reads: one wrong number is seen."""
    load = Offload.load

    def wrong(self: Offload, stored: Any) -> Tensor:
        tensor = load(self, stored).clone()
        tensor.view(-1)[0] += 1
        return tensor

    monkeypatch.setattr(Offload, "load", wrong)
    with pytest.raises(AssertionError, match=r"gradients|losses"):
        assert_same(run(CASES["stack"], superpipeline(k=1, activations="offload")), plain("stack"))
