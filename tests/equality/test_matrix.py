"""The model matrix: models of the libraries train and predict bitwise as on plain Lightning.

MODELS.md lists the models; ``python -m tests.equality.test_matrix`` writes it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.elsewhere import backward_elsewhere
from tests.support.poison import poisoned
from tests.support.runs import Outcome, assert_equal, assert_same, fit, loader, superpipeline
from tests.support.tiers import first, some
from tests.support.zoo import DIFFUSION, NOT_REPEATED, SECTIONS, ZOO, Entry

PRECISIONS: dict[str, dict[str, int]] = {"32-true": {"k": 1, "k_prime": 1}, "bf16-mixed": {"k": 2, "k_prime": 1}}
PAGE = Path(__file__).parents[1] / "MODELS.md"

# torch's own remark about nn.RMSNorm under autocast, which leaves its weight in float32.
pytestmark = pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight:UserWarning")


def run(entry: Entry, strategy: Any, precision: Any) -> Outcome:
    """Train two batches and validate, then predict."""
    *training, last = entry.batches()
    outcome = fit(entry.make, training, strategy, val=[last], precision=precision)
    outcome.extra["metrics"] = dict(outcome.trainer.callback_metrics)
    outcome.extra["predictions"] = outcome.trainer.predict(outcome.module, loader([last]))
    outcome.extra["random state"] = torch.get_rng_state()
    return outcome


def check(entry: Entry, precision: str, around: Callable[[], AbstractContextManager[Any]] = nullcontext) -> Outcome:
    """Compare everything that ours, which runs inside a context, leaves behind with what plain Lightning does."""
    plain = run(entry, "auto", precision)
    assert all(loss.isfinite() for loss in plain.losses), "the reference run is not finite"
    with poisoned(), around():
        ours = run(entry, superpipeline(**PRECISIONS[precision]), precision)
    assert ours.trainer.strategy.stats().fetched_layers, "nothing was streamed"
    assert_same(ours, plain)
    assert_equal(ours.extra, plain.extra, "extra")
    return ours


@pytest.mark.long("takes a second or more")
@pytest.mark.parametrize(
    "precision",
    [
        pytest.param(
            "32-true",
            marks=pytest.mark.long("casts move beside weights that do not, so that bf16-mixed shows both"),
        ),
        "bf16-mixed",
    ],
)
@pytest.mark.parametrize(
    "name",
    first(
        ZOO,
        *(entries[0].name for entries in SECTIONS.values()),
        second=[*list(ZOO)[::6], *(entry.name for entry in DIFFUSION)],
        why="one model of each section is in the first tier, every sixth one and those of diffusion in the second",
    ),
)
def test_models_are_bitwise_equal(name: str, precision: str) -> None:
    if (name, precision) in NOT_REPEATED:
        pytest.skip(NOT_REPEATED[name, precision])
    check(ZOO[name], precision)


@pytest.mark.long("the registry of cases has some whose backward runs elsewhere in the first tier")
@pytest.mark.parametrize("name", some(ZOO, *list(ZOO)[3::8], why="every eighth model is in the second tier"))
def test_models_are_bitwise_equal_if_backward_runs_in_another_thread(name: str) -> None:
    if (name, "bf16-mixed") in NOT_REPEATED:
        pytest.skip(NOT_REPEATED[name, "bf16-mixed"])
    check(ZOO[name], "bf16-mixed", backward_elsewhere)


def test_names_are_unique() -> None:
    assert len(ZOO) == sum(map(len, SECTIONS.values()))


def page() -> str:
    """MODELS.md: the catalogue, by sections."""
    left_out = "; ".join(f"`{name}` in `{precision}` ({why})" for (name, precision), why in NOT_REPEATED.items())
    lines = [
        "# Models",
        f"{len(ZOO)} models of transformers, torchvision, timm, diffusers and PEFT, tiny, with random weights. Each trains two "
        f"batches, validates and predicts on superpipeline and on plain Lightning, in `{'` and `'.join(PRECISIONS)}`. "
        "Losses, gradients, parameters, buffers, optimizer state, metrics, random state and predictions are equal, bit for bit: "
        "`pytest -m '' tests/equality/test_matrix.py`.",
        f"Not compared, because plain Lightning does not repeat itself: {left_out}.",
    ]
    for section, entries in SECTIONS.items():
        lines += [f"## {section}", ", ".join(entry.name for entry in entries)]
    return "\n\n".join(lines) + "\n"


def test_the_page_is_of_this_catalogue() -> None:
    assert PAGE.read_text() == page(), "write it anew: python -m tests.equality.test_matrix"


if __name__ == "__main__":
    PAGE.write_text(page())
