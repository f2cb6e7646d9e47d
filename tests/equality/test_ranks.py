"""Several devices: what every rank sees is bitwise what it sees under Lightning's ``ddp``.

Two ranks are compared with ``ddp`` itself, more with ``ddp`` whose communication hook sums in the order of ranks, because
gloo's own sums depend on where an element lies in a buffer. Under accumulation ``ddp`` sums in every batch here.
"""

from __future__ import annotations

import pytest

from tests.equality.on_ranks import ACCUMULATED, MODES, REFUSED, TRAINED, compare, reference, train_ours
from tests.support.ranks import RanksFailed, in_ranks
from tests.support.tiers import some

QUICK = ("stack", "gan", "experts/mixture")
SOME = ("llama-dropout", "gpt2-tied", "resnet50", "conditional", "lora-checkpoint", "rows/looked-up", "experts/mixture")


EVERY_SIXTH = [name for name in TRAINED if name not in QUICK][::6]


@pytest.mark.long("takes a second or more")
@pytest.mark.parametrize(
    "name",
    [
        *QUICK,
        *(pytest.param(name, marks=pytest.mark.rest("one of each kind is in the first tier")) for name in EVERY_SIXTH),
        *(
            pytest.param(name, marks=pytest.mark.long("the second tier has a sixth of the cases"))
            for name in TRAINED
            if name not in (*QUICK, *EVERY_SIXTH)
        ),
    ],
)
def test_two_ranks_are_lightnings_ddp(name: str) -> None:
    compare(name, reference=reference(name, 2))


@pytest.mark.long("takes a second or more")
@pytest.mark.parametrize(
    "name",
    [
        *(
            pytest.param(name, marks=pytest.mark.rest("some show the order of three"))
            for name in ("conditional", SOME[0])
        ),
        *(
            pytest.param(name, marks=pytest.mark.long("two and three ranks take the same way"))
            for name in TRAINED
            if name not in ("conditional", SOME[0])
        ),
    ],
)
def test_three_ranks_are_ddp_in_the_order_of_ranks(name: str) -> None:
    """Gradients are accumulated, so they are added to a sum before they are summed."""
    options = {} if name == "gan" else ACCUMULATED  # manual optimization does both by hand
    compare(name, 3, options=options, reference=reference(name, 3))


LIKE_TWO = "the modes of two ranks have these cases"
OF_RANKS_ALONE = (("conditional", "all under forward"), ("conditional", "scaled"))
FEW = ("llama-dropout", "conditional")
OWN_TWO_LAYERS = ("resnet50", "lora-checkpoint")
"""Each process owns so little state that all of it is in memory while one layer steps: nothing of it goes to a disk."""


@pytest.mark.long("takes a second or more")
@pytest.mark.parametrize(
    ("name", "mode"),
    [
        *OF_RANKS_ALONE,
        *(
            pytest.param(name, mode, marks=pytest.mark.rest("the first tier has the modes on one device"))
            for name in SOME
            for mode in MODES
            if name in FEW and (name, mode) not in OF_RANKS_ALONE
        ),
        *(
            pytest.param(name, mode, marks=pytest.mark.long("the second tier has the modes with other models"))
            for name in SOME
            for mode, (strategy, _) in MODES.items()
            if name not in FEW and not (name in OWN_TWO_LAYERS and strategy.get("disk"))
        ),
    ],
)
def test_modes(name: str, mode: str) -> None:
    strategy, options = MODES[mode]
    compare(name, strategy=strategy, options=options, reference=reference(name, 2))


@pytest.mark.long("two ranks take the same way")
@pytest.mark.parametrize("name", ["conditional", "llama-dropout", "experts/mixture"])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_three_ranks_in_backward(name: str, precision: str) -> None:
    compare(name, 3, {"k": 1, "optimizer_overlap": "backward"}, {"precision": precision}, reference(name, 3))


@pytest.mark.long("two and three ranks take the same way")
@pytest.mark.parametrize("name", SOME)
def test_four_ranks(name: str) -> None:
    compare(name, 4, reference="ddp in order")


@pytest.mark.long("test_ranks_refusals has errors of several ranks in the first tier")
@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str) -> None:
    with pytest.raises(RanksFailed, match=REFUSED[name]):
        in_ranks(2, train_ours, name, 2, {"k": 1}, {})


@pytest.mark.long("three processes")
def test_the_comparison_can_fail() -> None:
    """gloo's own order is another one from three ranks on."""
    with pytest.raises(AssertionError, match="values differ"):
        compare("llama-dropout", 3, reference="ddp")


ON_DEVICES = {
    "fused in the step": ({"k": 1}, {}),
    **{mode: MODES[mode] for mode in ("all under forward", "mixed", "offload", "scaled")},
}


@pytest.mark.long("the same on simulated devices; the first tier has those of one rank")
@pytest.mark.parametrize("name", some(["llama-dropout", "conditional", "experts/mixture"], "conditional", why=LIKE_TWO))
@pytest.mark.parametrize("mode", ON_DEVICES)
def test_ranks_with_devices_of_their_own(name: str, mode: str) -> None:
    """As on accelerators: steps are fused, copies take effect late, and memory that is used too early is NaN."""
    strategy, options = ON_DEVICES[mode]
    compare(name, strategy=strategy, options=options, reference=reference(name, 2), on_devices=True)
