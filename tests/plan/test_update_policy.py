"""How layers are updated: a table of facts and of the policy that follows from them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from sp_lightning.core.plan.update_policy import (
    BatchFacts,
    EarlyUpdates,
    Paging,
    UpdateFacts,
    UpdatePolicy,
    complete,
    decide,
)

NO, TRIED, KEEPS, FREES = EarlyUpdates
MEMORY = Paging()
NORM, VALUE = BatchFacts(clip=("norm", 1.0)), BatchFacts(clip=("value", 0.5))


def policy(on_disk: Paging = MEMORY, /, **facts: Any) -> UpdatePolicy:
    given = UpdateFacts(**facts)
    return complete(decide(given), given, on_disk)


@pytest.mark.parametrize(
    ("facts", "overlap", "early", "why"),
    [
        # The first backward shows whether updates may begin in it.
        ({}, "forward", TRIED, ""),
        ({"tried": True}, "backward", KEEPS, ""),
        ({"tried": True, "read_after_step": True}, "backward", KEEPS, ""),
        ({"tried": True, "needed": "in the first step, a use"}, "forward", NO, "in the first step, a use"),
        # "auto" is off where updates would not run beside the model.
        ({"against_background": "they compete"}, "off", NO, "they compete"),
        ({"against_layers": "not fused"}, "off", NO, "not fused"),
        ({"against_forward": "compiles"}, "off", NO, "compiles"),
        ({"optimizers": ()}, "off", NO, "there is no optimizer"),
        # "auto" begins no update in backward if something needs all gradients.
        ({"accumulation_hooks": True}, "forward", NO, "parameters have post-accumulate hooks"),
        ({"step_hooks": True}, "forward", NO, "the optimizer has step hooks"),
        ({"batch": BatchFacts(automatic=False)}, "forward", NO, "optimization is manual"),
        ({"batch": NORM}, "forward", NO, "gradient_clip_val=1.0 needs all gradients"),
        ({"batch": VALUE, "tried": True}, "backward", KEEPS, ""),
        ({"batch": replace(VALUE, clips_as_lightning=False)}, "forward", NO, "gradient_clip_val=0.5 needs"),
        ({"batch": BatchFacts(scales=True)}, "forward", NO, "the gradient scaler of 16-mixed"),
        ({"batch": BatchFacts(averages=True)}, "forward", NO, "StochasticWeightAveraging steps"),
        ({"batch": BatchFacts(hook="EMA.on_after_backward")}, "forward", NO, "EMA.on_after_backward may look"),
        ({"disk": True}, "forward", NO, "with a disk"),
        ({"ranks": True}, "forward", NO, "with several devices, it is not the default"),
        # Modes asked for by name.
        ({"overlap": "off"}, "off", NO, ""),
        ({"overlap": "off", "against_layers": "not fused"}, "off", NO, ""),
        ({"overlap": "forward"}, "forward", NO, ""),
        ({"overlap": "backward"}, "backward", FREES, ""),
        ({"overlap": "backward", "read_after_step": True}, "backward", KEEPS, ""),
        ({"overlap": "backward", "disk": True}, "backward", FREES, ""),
        ({"overlap": "forward", "against_background": "they compete"}, "forward", NO, ""),
        # An impossible place is an error only if the user has named it.
        ({"against_gpu": "LBFGS", "tried": True}, "backward", KEEPS, ""),
        # On the GPU, other things count.
        ({"place": "gpu", "tried": True}, "backward", FREES, ""),
        ({"place": "gpu", "against_layers": "not fused", "tried": True}, "backward", FREES, ""),
        ({"place": "gpu", "against_gpu_background": "declared"}, "off", NO, "declared"),
        ({"place": "gpu", "read_after_step": True}, "forward", NO, "on the GPU, gradients are freed"),
        ({"place": "gpu", "batch": VALUE}, "forward", NO, "gradient_clip_val=0.5 needs all gradients"),
        ({"place": "gpu", "overlap": "backward", "read_after_step": True}, "backward", FREES, ""),
    ],
)
def test_when_layers_are_updated(facts: dict[str, Any], overlap: str, early: EarlyUpdates, why: str) -> None:
    found = decide(UpdateFacts(**facts))
    assert (found.overlap, found.early) == (overlap, early)
    assert found.why.startswith(why)
    assert bool(found.why) == bool(why)


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({"overlap": "forward", "against_layers": "not fused"}, r'not fused. Use SuperpipelineStrategy\(optimizer_overlap="off"'),
        ({"overlap": "backward", "against_layers": "not fused", "instead": "Leave it, or use"}, "Leave it, or use Sup"),
        ({"overlap": "forward", "against_forward": "compiles"}, r'compiles. Use .*overlap="off"'),
        ({"overlap": "backward", "batch": NORM}, r'all gradients before the first update. Use .*overlap="forward"'),
        ({"overlap": "backward", "place": "gpu", "batch": VALUE}, r'optimizer_on="gpu", optimizer_overlap="forward"'),
        ({"overlap": "forward", "place": "gpu", "against_gpu_background": "declared"}, r'"gpu", optimizer_overlap="off"'),
        ({"place": "gpu", "against_gpu": "LBFGS"}, 'optimizer_on="gpu" cannot be used: LBFGS'),
        ({"gpu_layers": 3, "against_both": "LBFGS"}, "gpu_layers=3 steps some layers on the GPU and the others .*: LBFGS"),
    ],
)  # fmt: skip
def test_what_is_asked_for_and_not_possible(facts: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        decide(UpdateFacts(**facts))


OFF: dict[str, Any] = {"overlap": "off"}
STATE, GRADIENTS = Paging(anything=True), Paging(gradients=True, anything=True)


@pytest.mark.parametrize(
    ("facts", "disk", "unit", "all_threads"),
    [
        (OFF, Paging(), "whole", False),
        (OFF | {"ranks": True}, Paging(), "whole", False),
        ({"overlap": "forward"}, Paging(), "layers", False),
        (OFF | {"place": "gpu"}, Paging(), "layers", True),
        (OFF | {"disk": True}, STATE, "layers", True),
        (OFF | {"disk": True}, Paging(), "whole", False),
        # All ranks step in one way.
        (OFF | {"disk": True, "ranks": True}, Paging(), "layers", True),
    ],
)
def test_what_steps_at_once(facts: dict[str, Any], disk: Paging, unit: str, all_threads: bool) -> None:
    found = policy(disk, **facts)
    assert (found.unit, found.all_threads) == (unit, all_threads)
    assert [each.by_layers for each in found.optimizers] == [unit == "layers"]


@pytest.mark.parametrize(
    ("facts", "fused"),
    [
        ({}, True),
        ({"on_cpu": True}, False),  # plain Lightning steps on the CPU, too
        ({"on_cpu": True, "overlap": "forward"}, True),
        ({"place": "gpu"}, False),
    ],
)
def test_whether_steps_run_fused(facts: dict[str, Any], fused: bool) -> None:
    assert policy(**facts).fused is fused


@pytest.mark.parametrize(
    ("facts", "disk", "measures"),
    [
        ({"batch": NORM}, Paging(), True),
        ({"batch": VALUE}, Paging(), False),
        ({"batch": NORM, "unread_before_step": False}, Paging(), False),
        ({"batch": NORM, "place": "gpu"}, Paging(), False),
        ({"batch": NORM, "overlap": "off"}, Paging(), False),
        ({"batch": NORM, "overlap": "off"}, GRADIENTS, True),
    ],
)
def test_whether_norms_are_measured_in_backward(facts: dict[str, Any], disk: Paging, measures: bool) -> None:
    assert policy(disk, **facts).measure_norms is measures


@pytest.mark.parametrize(
    ("facts", "disk", "read", "unread"),
    [
        (OFF, Paging(), "whole", "whole"),
        ({}, Paging(), "whole", "in update"),
        ({"place": "gpu"}, Paging(), "at once", "at once"),
        (OFF, GRADIENTS, "at once", "in update"),
    ],
)
def test_where_gradients_are_clipped(facts: dict[str, Any], disk: Paging, read: str, unread: str) -> None:
    found = policy(disk, **facts)
    assert (found.clip(read=True), found.clip(read=False)) == (read, unread)


def test_gradients_stay_narrow_where_nobody_reads_them() -> None:
    def narrow(on_disk: Paging = MEMORY, /, **facts: Any) -> bool:
        return policy(on_disk, **facts).optimizers[0].narrow

    assert narrow()
    assert not narrow(unread=False)
    assert not narrow(ranks=True)
    assert not narrow(GRADIENTS)


def test_when_results_are_awaited() -> None:
    assert not policy(place="gpu").ends_on_host
    assert policy(place="gpu", disk=True).ends_on_host
    assert not policy(disk=True).ends_on_host


def test_the_limit_of_single_elements() -> None:
    assert [each.clip_value for each in (BatchFacts(), NORM, VALUE)] == [None, None, 0.5]


def test_a_policy_is_printed_in_one_line() -> None:
    assert str(policy(**OFF, on_cpu=True)) == "all layers at once on the CPU; overlap: off"
    assert str(policy(**OFF)) == "all layers at once on the CPU, fused if the optimizer leaves that open; overlap: off"
    found = policy(place="gpu", batch=NORM)
    assert str(found).startswith("layer by layer on the GPU; overlap: forward (gradient_clip_val=1.0 needs all")


def test_completing_a_policy_twice_changes_nothing() -> None:
    facts = UpdateFacts(place="gpu", disk=True, batch=NORM)
    once = complete(decide(facts), facts, STATE)
    assert complete(once, facts, STATE) == once
