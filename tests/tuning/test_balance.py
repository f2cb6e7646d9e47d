"""``activations="auto"``: the cheaper way for each unit, for as few units as the budget asks, and never beyond it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback

from sp_lightning.capabilities.activations import offload
from sp_lightning.capabilities.activations.calls import UnitModes
from sp_lightning.capabilities.activations.policy import Call, least_bytes, peak_bytes
from sp_lightning.capabilities.tuning.balance import Balance, without_second_forwards
from sp_lightning.capabilities.tuning.simulator import Walk
from sp_lightning.capabilities.tuning.visits import Rates, Visit
from sp_lightning.core.plan.plan import Plan, PlannedLayer
from sp_lightning.core.plan.rings import Ring
from tests.support.models import CASES, Module, Stack, vectors
from tests.support.runs import assert_same, fit, superpipeline
from tests.support.saving import Saves, rows, saving
from tests.support.simdevice import SimDevice, simulated
from tests.support.tiers import some

UNITS = [f"blocks.{index}" for index in range(8)]
GB = 10**9


def balance(
    *, link: float = 10 * GB, seconds: float = 0.01, saved: int = GB, inputs: int = GB // 10, resident: int = 0
) -> Balance:
    """Eight equal units, the first ``keep_on_gpu`` ones without a layer."""
    index_of = {unit: index - resident for index, unit in enumerate(UNITS) if index >= resident}
    layers = list(index_of.values())
    forwards = [Visit((index,), seconds) for index in layers]
    if resident:
        forwards.insert(0, Visit((), seconds * resident))
    backwards = [Visit((index,), 2 * seconds, True, (index,)) for index in reversed(layers)]
    calls = tuple(Call(unit, saved, inputs) for unit in UNITS)
    return Balance(calls, index_of, [*forwards, *backwards], Rates(link, link, link, math.inf, visit_seconds=0.0))


def a_plan() -> Plan:
    layers = tuple(PlannedLayer(unit, 10, 10, 0, ()) for unit in UNITS)
    return Plan(2, 1, layers, (Ring(3, 10),), PlannedLayer("residents", 0, 0, -1, ()), tuple(range(8)))


def fastest(of: Balance, room: int) -> dict[str, Any]:
    return dict(
        min(of.candidates(room), key=lambda modes: Walk(a_plan(), of.visited(modes), of.rates).predict().seconds)
    )


@pytest.mark.parametrize("resident", [0, 3])
@pytest.mark.parametrize(("link", "mode"), [(1000 * GB, "offload"), (0.1 * GB, "recompute")])
def test_the_cheaper_way_is_taken(link: float, mode: str, resident: int) -> None:
    """A transfer that computation hides costs nothing, one that takes seconds costs more than a second forward."""
    modes = fastest(balance(link=link, resident=resident), room=5 * GB)
    assert set(modes.values()) == {"keep", mode}


def test_each_unit_has_its_own_way() -> None:
    """Where much is computed units travel, where little is they are computed again: faster than either for all."""
    of = balance(link=100 * GB)
    visits = [replace(visit, seconds=visit.seconds / (10 if visit.layers[0] > 3 else 1)) for visit in of.visits]
    of = replace(of, visits=visits)
    modes = fastest(of, room=3 * GB)
    assert [modes[unit] for unit in UNITS[:6]] == ["offload"] * 3 + ["recompute"] * 3

    def seconds(modes: Any) -> float:
        return Walk(a_plan(), of.visited(modes), of.rates).predict().seconds

    assert seconds(modes) < min(seconds(dict.fromkeys(UNITS, mode)) for mode in ("recompute", "offload"))


@pytest.mark.parametrize("room", [int(share * GB) for share in (0.1, 1, 2, 3.5, 6, 7.9, 8, 20)])
def test_every_candidate_fits_and_frees_no_more_than_needed(room: int) -> None:
    of = balance()
    candidates = list(of.candidates(room))
    assert candidates
    for modes in candidates:
        assert peak_bytes(of.calls, modes) <= max(room, least_bytes(of.calls))
        freed = [unit for unit, mode in modes.items() if mode != "keep"]
        if room >= least_bytes(of.calls):
            for unit in freed[-1:]:
                less = {**modes, unit: "keep"}
                assert len(freed) == 0 or peak_bytes(of.calls, less) > room - GB
    if room >= 8 * GB:
        assert candidates == [dict.fromkeys(UNITS, "keep")]


def test_what_a_batch_does_with_other_modes() -> None:
    of = balance()
    modes: dict[str, Any] = {
        **dict.fromkeys(UNITS, "keep"),
        UNITS[1]: "recompute",
        UNITS[2]: "offload",
        UNITS[7]: "offload",
    }
    visits = of.visited(modes)
    assert [visit.moved for visit in visits] == [0, 0, GB, *[0] * 10, GB, 0, 0], "the last ones of a forward stay"
    assert [visit.seconds for visit in visits[8:]] == pytest.approx([0.02] * 6 + [0.03] + [0.02])
    again = without_second_forwards(of.visited(dict.fromkeys(UNITS, "recompute")))
    assert [visit.seconds for visit in again] == pytest.approx([visit.seconds for visit in of.visits])


def test_units_without_a_layer_go_with_the_one_before_them() -> None:
    of = balance(resident=2)
    visits = of.visited({**dict.fromkeys(UNITS, "keep"), UNITS[0]: "offload", UNITS[3]: "offload"})
    assert sum(visit.moved for visit in visits if not visit.backward) == 2 * GB
    assert sum(visit.moved for visit in visits if visit.backward) == 2 * GB


# ---------------------------------------------------------------------- in a run


def train(
    capacity: float, batches: Sequence[Any], make: Any, callbacks: Sequence[Callback] = (), **options: Any
) -> tuple[Any, SimDevice]:
    """On a device of so many bytes, a sixteenth of which stays free."""
    with simulated(capacity=int(capacity)) as devices:
        ours = fit(make, batches, superpipeline(activations="auto", **options), callbacks=callbacks)
    return ours, devices[0]


@pytest.mark.long("real models; the next test has a made one")
@pytest.mark.parametrize(
    "name", some(["llama-dropout", "conditional", "reused", "gan", "lstm"], "llama-dropout", why="four more of them")
)
def test_real_models_within_a_budget(name: str, seen: list[UnitModes], monkeypatch: pytest.MonkeyPatch) -> None:
    """Half-way between what offloading everything takes and what keeping everything does."""
    monkeypatch.setattr(offload, "WORTH_MOVING", 1)
    case, peaks = CASES[name], {}
    batches = [*case.batches(), *case.batches()]
    for mode in ("keep", "offload"):
        with simulated(capacity=2**40) as devices:
            fit(case.make, batches, superpipeline(k=1, k_prime=1, activations=mode))
        peaks[mode] = devices[0].peak
    room = (peaks["keep"] + peaks["offload"]) // 2
    ours, device = train(room * 16 / 15 + 1, batches, case.make, k=1, k_prime=1)
    assert_same(ours, fit(case.make, batches))
    assert device.peak <= room * 16 / 15
    assert {"keep"} < set(seen[-1].modes.values())


@pytest.mark.parametrize("units", [3, 4, 6, 9])
def test_the_budget_is_filled_and_kept(units: int, seen: list[UnitModes], monkeypatch: pytest.MonkeyPatch) -> None:
    """In units of what each of eight saves: as many are kept as there is room for, to the byte of the formula."""
    monkeypatch.setattr(offload, "WORTH_MOVING", Saves.SIZE)
    room = units * Saves.SIZE + 24_000  # weights, gradients, and what is small
    batches = rows() * 2
    ours, device = train(room * 16 / 15 + 1, batches, lambda: saving([1] * 8))
    assert_same(ours, fit(lambda: saving([1] * 8), batches))
    modes = seen[0].modes
    assert device.peak <= room
    calls = tuple(Call(unit, Saves.SIZE, 0) for unit in modes)
    assert min(units, 8) - 1 <= peak_bytes(calls, modes) / Saves.SIZE <= units
    if units > 8:
        assert set(modes.values()) == {"keep"}


@pytest.mark.rest("the first tier has the budget that is kept")
def test_a_larger_batch_offloads_what_does_not_fit(seen: list[UnitModes], monkeypatch: pytest.MonkeyPatch) -> None:
    """It offloads what does not fit, as a first batch does. The batch after it measures all activations."""
    monkeypatch.setattr(offload, "WORTH_MOVING", 2**10)
    generator = torch.Generator().manual_seed(1)
    batches = [torch.randn(size, 16, generator=generator) for size in (32, 32, 32, 96, 96, 32)]
    chosen: list[set[str]] = []
    begin = UnitModes.begin

    def noted(self: UnitModes) -> None:
        chosen.append(set(self.modes.values()))
        begin(self)

    monkeypatch.setattr(UnitModes, "begin", noted)
    ours, device = train(110_000, batches, lambda: Module(Stack()))
    assert_same(ours, fit(lambda: Module(Stack()), batches))
    assert device.peak <= 110_000
    assert chosen[:4] == [{"keep"}] * 4
    assert chosen[4] == {"offload"}


@pytest.mark.usefixtures("nothing_fits")
def test_an_error_teaches_that_there_is_less_room() -> None:
    """Else the next batch would choose what has just failed."""

    class RunsOut(Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            run = trainer.strategy._run
            if batch_idx == 4:
                before = run._window.room
                run.tuner.shrink()
                assert run._window.room == before - before // 16
                assert "keep" not in run.results.activations.values()
                seen.append(before)

    seen: list[int] = []
    train(10**6, [*vectors(), *vectors()], lambda: Module(Stack()), callbacks=[RunsOut()])
    assert seen


def test_without_a_limit_all_is_kept(seen: list[UnitModes]) -> None:
    """As on the CPU."""
    ours = fit(lambda: Module(Stack()), vectors(), superpipeline(activations="auto"))
    assert_same(ours, fit(lambda: Module(Stack()), vectors()))
    assert set(seen[0].modes.values()) == {"keep"}


def test_a_budget_counts_activations_on_the_cpu_too(seen: list[UnitModes], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "WORTH_MOVING", Saves.SIZE)
    strategy = superpipeline(k=2, k_prime=1, activations="auto", gpu_memory=4 * Saves.SIZE + 24_000)
    ours = fit(lambda: saving([1] * 8), rows() * 2, strategy)
    assert_same(ours, fit(lambda: saving([1] * 8), rows() * 2))
    modes = list(seen[0].modes.values())
    assert "keep" in modes
    assert set(modes) != {"keep"}
    assert (strategy.plan.k, strategy.plan.k_prime) == (2, 1)
