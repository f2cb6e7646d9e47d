"""``sp_lightning.dial``: memory and time of some windows beside plain Lightning, and whether they compute the same."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from sp_lightning import SuperpipelineStrategy, dial
from sp_lightning.__main__ import main
from sp_lightning.tools.comparison import small_models
from sp_lightning.tools.comparison.dial import Dial
from sp_lightning.tools.comparison.options import SMALL
from sp_lightning.tools.comparison.subject import NotRunError
from tests.support import planted
from tests.support.models import Module, Stack, vectors

COMMAND = [
    "dial",
    "tests.support.planted:Everything",
    "--accelerator",
    "cpu",
    "--k",
    "1",
    "--k-prime",
    "1",
    "--steps",
    "3",
]


def measured(factory: Any, *, k: Any = (1,), k_prime: Any = (1,), **options: Any) -> Dial:
    return dial(factory, lambda: vectors(4), steps=3, trainer={"accelerator": "cpu"}, k=k, k_prime=k_prime, **options)


class OtherNumbers(Module):
    """Computes another loss with the strategy."""

    def __init__(self) -> None:
        super().__init__(Stack())

    @property
    def streamed(self) -> bool:
        return isinstance(self.trainer.strategy, SuperpipelineStrategy)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch) * (1.5 if self.streamed else 1.0)


class Stops(OtherNumbers):
    """Raises an error with the strategy."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.streamed:
            raise RuntimeError("stops")
        return self.loss(batch)


@pytest.mark.long("takes a second or more")
@pytest.mark.parametrize("predict", [False, True])
def test_two_windows_beside_plain_lightning(predict: bool, capsys: pytest.CaptureFixture[str]) -> None:
    found = measured(planted.Everything, k=(1, 3), predict=predict)
    beside = ["plain", "plain, optimizer on the CPU"][: 2 - predict]
    assert [row.name for row in found.rows] == [*beside, "k=1, k'=1", "k=3, k'=1"]
    assert [row.equal for row in found.rows] == [""] * len(beside) + ["yes", "yes"]
    sizes = [row.counted or 0 for row in found.rows]
    assert sizes[0] == max(sizes) > sizes[-1] > sizes[-2] > 0
    assert all(row.seconds or row.name == beside[-1] for row in found.rows)
    assert (found.status, found.notes) == (0, [])
    assert re.findall(r"run (\d) of (\d)", capsys.readouterr().err) == [(str(at), "4") for at in range(1, 5)]


@pytest.mark.long("takes a second or more")
def test_plain_lightning_with_its_optimizer_on_the_cpu_has_all_but_the_optimizer_s_state() -> None:
    found = measured(lambda: Module(Stack()))
    weights = 2 * sum(parameter.nbytes for parameter in Stack().parameters())
    plain, aside, _ = found.rows
    assert plain.counted is not None
    assert aside.counted == weights < plain.counted <= 2 * weights + 4 * len(list(Stack().parameters()))
    assert " as plain |" in str(found)


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.parametrize(("factory", "why"), [(OtherNumbers, "values differ by up to"), (Stops, "RuntimeError: stops")])
def test_a_run_that_computes_something_else_or_stops_is_not_equal(factory: Any, why: str) -> None:
    found = measured(factory)
    assert (found.rows[-1].equal, found.status) == ("no", 1)
    assert re.search(f"k=1, k'=1: .*{why}", found.notes[0])


@pytest.mark.long("takes a second or more")
def test_a_window_that_cannot_fit_is_not_run_and_says_what_it_needs() -> None:
    sizes = [row.counted or 0 for row in measured(lambda: Module(Stack()), k=(1, 4)).rows[-2:]]
    found = measured(lambda: Module(Stack()), k=(1, 4), gpu_memory=sum(sizes) // 2)
    assert [row.equal for row in found.rows[-2:]] == ["yes", "not run"]
    assert "Weights and gradients need" in found.notes[0]
    assert "Use less: SuperpipelineStrategy(k=1, k_prime=1)." in found.notes[0]


@pytest.mark.long("the sentences are tested in tests/trainer/test_callback.py")
def test_a_window_larger_than_the_model_is_measured_and_remarked_on() -> None:
    found = measured(lambda: Module(Stack()), k=(100,), k_prime=(1, 50))
    assert [note.partition(" ")[0] for note in found.notes] == ["k=100", "k_prime=50"]
    assert [row.equal for row in found.rows[-2:]] == ["yes", "yes"]


@pytest.mark.parametrize("wrong", [{"k": (0,)}, {"k_prime": ()}, {"activations": "nothing"}])
def test_wrong_options_raise_an_error_before_any_run(wrong: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(wrong))}.*"):
        measured(planted.Everything, **wrong)
    assert not capsys.readouterr().err


def test_what_plain_lightning_cannot_run_is_not_measured() -> None:
    with pytest.raises(NotRunError, match=r"has no predict_step"):
        measured(lambda: small_models.pl.LightningModule(), predict=True)


@pytest.mark.long("takes a second or more")
def test_the_command_writes_a_page_and_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "new" / "page.md"
    main([*COMMAND, "--out", str(page)])
    table = capsys.readouterr().out
    assert re.search(r"^\| k=1, k'=1 .*\| +yes \|$", table, re.MULTILINE)
    text = page.read_text()
    assert "--k-prime 1 --steps 3" in text
    assert "![Time of a batch against GPU memory](page.png)" in text
    assert page.with_suffix(".png").stat().st_size > 0


@pytest.mark.long("another page")
def test_without_matplotlib_the_page_has_no_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    main([*COMMAND, "--out", str(tmp_path / "page.md")])
    assert "No picture: Pictures need matplotlib" in capsys.readouterr().err
    assert "![" not in (tmp_path / "page.md").read_text()


@pytest.mark.long("the mechanism is tested with smaller models")
@pytest.mark.parametrize("predict", [False, True])
@pytest.mark.parametrize("name", SMALL)
def test_the_small_models_are_equal(name: str, predict: bool) -> None:
    found = dial(getattr(small_models, name), steps=3, k=(2,), trainer={"accelerator": "cpu"}, predict=predict)
    assert [row.equal for row in found.rows[-2:]] == ["yes", "yes"]
