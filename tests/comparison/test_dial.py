"""``sp_lightning.dial``: memory and time of some windows beside plain Lightning."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sp_lightning import dial
from sp_lightning.__main__ import main
from sp_lightning.tools.comparison import small_models
from sp_lightning.tools.comparison.dial import Dial, DialRow, Memory, with_activations
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


class Stops(Module):
    """Raises an error with the strategy."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if planted.is_streamed(self):
            raise RuntimeError("stops")
        return self.loss(batch)


class TooLarge(Module):
    """Needs more memory than there is, under plain Lightning."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if not planted.is_streamed(self):
            raise torch.OutOfMemoryError("too large")
        return self.loss(batch)

    predict_step = training_step


@pytest.mark.long("takes a second or more")
@pytest.mark.parametrize("predict", [False, True])
def test_two_windows_beside_plain_lightning(predict: bool, capsys: pytest.CaptureFixture[str]) -> None:
    found = measured(planted.Everything, k=(1, 3), predict=predict)
    assert [row.name for row in found.rows] == ["plain", "k=1, k'=1", "k=3, k'=1"]
    sizes = [row.total or 0 for row in found.rows]
    assert sizes[0] == max(sizes) > sizes[-1] > sizes[-2] > 0
    assert all(row.seconds for row in found.rows)
    assert (found.status, found.notes) == (0, [])
    runs = 3 if predict else 4  # the last one counts plain Lightning's activations
    shown = re.findall(r"run (\d) of (\d)", capsys.readouterr().err)
    assert shown == [(str(at), str(runs)) for at in range(1, runs + 1)]


@pytest.mark.rest("takes tenths of a second")
def test_plain_lightning_has_weights_gradients_and_optimizer_state() -> None:
    nbytes, steps = sum(each.nbytes for each in Stack().parameters()), 4 * len([*Stack().parameters()])
    memory = measured(lambda: Module(Stack())).rows[0].memory
    assert memory is not None
    assert memory[:3] == (nbytes, nbytes, 2 * nbytes + steps)  # AdamW counts its steps


@pytest.mark.rest("takes tenths of a second")
def test_buffers_count_on_both_sides() -> None:
    """Those of plain Lightning were left out: a module with large buffers took 443 % of plain Lightning's memory."""

    def make() -> Module:
        module = Module(Stack())
        module.register_buffer("table", torch.zeros(100_000))
        return module

    plain, ours = (row.memory for row in measured(make).rows)
    assert plain is not None
    assert ours is not None
    assert plain.weights > ours.weights > 400_000
    assert (measured(make, predict=True).rows[0].total or 0) == plain.weights


class Derives(Module):
    """Its loss uses a transform, which torch does not run under saved-tensor hooks."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        slope = torch.func.grad(lambda x: x.square().sum())(batch)
        return self.loss(batch + 0 * slope)


@pytest.mark.rest("takes tenths of a second")
def test_a_program_that_does_not_run_while_activations_are_counted() -> None:
    """``dial`` refused what it had measured before."""
    found = measured(lambda: Derives(Stack()), keep_on_gpu=["**"], activations="keep")
    assert [row.seconds is not None for row in found.rows] == [True, True]
    assert [row.memory is not None and row.memory.activations for row in found.rows] == [0, 0]
    assert "No row has activations: plain Lightning does not train while they are counted. RuntimeError" in str(found)


class WritesSaved(Module):
    """Its backward raises: it has written to a tensor that autograd has saved."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        saved = loss.exp()
        return saved.add_(1)


@pytest.mark.rest("takes tenths of a second")
def test_an_error_of_plain_lightning_is_told() -> None:
    """Hooks that counted hid it, and a window seemed to fail alone."""
    with pytest.raises(NotRunError, match=r"'plain' stopped. RuntimeError: .*inplace operation"):
        measured(lambda: WritesSaved(Stack()))


ROWS, NARROW, WIDE, BLOCKS = 64, 16, 64, 4
INPUT, HIDDEN = 4 * ROWS * NARROW, 4 * ROWS * WIDE


def of_blocks(**options: Any) -> list[Memory]:
    """Plain Lightning and a window, for blocks whose activations are known: the input, and the hidden tensor."""

    def make() -> Module:
        block = lambda: nn.Sequential(nn.Linear(NARROW, WIDE), nn.ReLU(), nn.Linear(WIDE, NARROW))  # noqa: E731
        return Module(nn.Sequential(*(block() for _ in range(BLOCKS))))

    data = lambda: [torch.randn(ROWS, NARROW) for _ in range(4)]  # noqa: E731
    found = dial(make, data, steps=3, trainer={"accelerator": "cpu"}, k=(1,), k_prime=(1,), **options)
    return [row.memory for row in found.rows if row.memory is not None]


@pytest.mark.rest("takes tenths of a second")
def test_both_sides_are_one_sum_with_the_same_activations() -> None:
    """Activations were left out: a table said 12 % of plain Lightning's memory where a GPU needs 38 %."""
    plain, ours = of_blocks()
    assert plain.activations == ours.activations == BLOCKS * (INPUT + HIDDEN) + INPUT  # the loss squares the output
    for memory in (plain, ours):
        assert memory.total == memory.weights + memory.gradients + memory.optimizer + memory.activations
    assert ours.total > ours.activations > 0.5 * ours.total, "what streaming cannot lower is most of it"


@pytest.mark.rest("takes tenths of a second")
def test_recomputed_activations_take_less_and_plain_lightning_stays() -> None:
    (plain, ours), (same, less) = of_blocks(), of_blocks(activations="recompute")
    assert same == plain
    assert less.activations == BLOCKS * INPUT + HIDDEN < ours.activations
    assert less[:3] == ours[:3]


def test_a_table_has_one_unit_and_a_gpu_has_its_allocators_total() -> None:
    rows = [
        DialRow("plain", with_activations((300 * 2**20, 300 * 2**20, 600 * 2**20), 2**31, 0), 1.0),
        DialRow("k=1, k'=1, recompute", with_activations((2**20, 5 * 2**20, 0), 30 * 2**20, 7), 2.0),
        DialRow("k=2, k'=1, recompute"),
    ]
    assert [row.total for row in rows] == [2**31, 30 * 2**20, None]
    head, _, *lines = str(Dial("net", "training", rows)).splitlines()[2:]
    assert [line.replace(" ", "") for line in (head, *lines)] == [
        "|GiB|weights|gradients|optimizerstate|activations|total|ofplain|sperbatch|ofplain|",
        "|plain|0.293|0.293|0.586|0.828|2.0|100%|1|1.00|",
        "|k=1,k'=1,recompute|0.000977|0.00488|0|0.0234|0.0293|1%|2|2.00|",
        "|k=2,k'=1,recompute|||||||||",
    ]


def test_a_table_of_prediction_has_the_total_alone() -> None:
    found = Dial("net", "prediction", [DialRow("plain", Memory(2**20, 0, 0, 0), 1.0)])
    assert str(found).splitlines()[2].split("|")[1:-1] == [
        " MiB   ",
        " total ",
        " of plain ",
        " s per batch ",
        " of plain ",
    ]


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.parametrize("predict", [False, True])
def test_windows_are_measured_if_plain_lightning_does_not_fit(predict: bool) -> None:
    """The size of its optimizer's state is then unknown."""
    found = measured(lambda: TooLarge(Stack()), predict=predict)
    plain, window = found.rows
    assert (found.status, plain.seconds, plain.total is None) == (0, None, not predict)
    assert window.seconds
    assert found.notes == ["plain: OutOfMemoryError: too large"]


@pytest.mark.rest("takes tenths of a second")
def test_a_window_that_stops_has_no_time_and_says_why() -> None:
    found = measured(lambda: Stops(Stack()), k=(1, 2))
    assert [row.seconds is None for row in found.rows] == [False, True, True]
    assert (found.status, found.notes[0]) == (1, "k=1, k'=1: RuntimeError: stops")


@pytest.mark.long("takes a second or more")
def test_a_window_that_cannot_fit_is_not_run_and_says_what_it_needs() -> None:
    rows = measured(lambda: Module(Stack()), k=(1, 4)).rows[-2:]
    sizes = [sum(row.memory[:3]) for row in rows if row.memory is not None]
    found = measured(lambda: Module(Stack()), k=(1, 4), gpu_memory=sum(sizes) // 2)
    assert ([row.seconds is None for row in found.rows], found.status) == ([False, False, True], 0)
    assert "Weights and gradients need" in found.notes[0]
    assert "Use less: SuperpipelineStrategy(k=1, k_prime=1)." in found.notes[0]


@pytest.mark.long("the sentences are tested in tests/trainer/test_callback.py")
def test_a_window_larger_than_the_model_is_measured_and_remarked_on() -> None:
    found = measured(lambda: Module(Stack()), k=(100,), k_prime=(1, 50))
    assert [note.partition(" ")[0] for note in found.notes] == ["k=100", "k_prime=50"]


@pytest.mark.parametrize("wrong", [{"k": (0,)}, {"k_prime": ()}, {"activations": "nothing"}])
def test_wrong_options_raise_an_error_before_any_run(wrong: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(wrong))}.*"):
        measured(planted.Everything, **wrong)
    assert not capsys.readouterr().err


def test_what_plain_lightning_cannot_run_is_not_measured() -> None:
    with pytest.raises(NotRunError, match=r"has no predict_step"):
        measured(lambda: small_models.pl.LightningModule(), predict=True)


@pytest.mark.rest("takes tenths of a second")
def test_the_command_prints_a_table_and_draws_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "new" / "dial.png"
    main([*COMMAND, "--out", str(picture)])
    assert re.search(r"^\| k=1, k'=1 .*\|$", capsys.readouterr().out, re.MULTILINE)
    assert picture.stat().st_size > 0


@pytest.mark.parametrize("name", ["page.md", "page"])
def test_out_is_a_picture(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*COMMAND, "--out", name])
    assert ended.value.code == 2
    assert "The page is what dial prints: --out page.png > page.md" in capsys.readouterr().err


def test_a_picture_needs_matplotlib_before_any_run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(SystemExit):
        main([*COMMAND, "--out", "page.png"])
    said = capsys.readouterr().err
    assert "Pictures need matplotlib: pip install matplotlib." in said
    assert "run 1" not in said


@pytest.mark.long("the mechanism is tested with smaller models")
@pytest.mark.parametrize("predict", [False, True])
@pytest.mark.parametrize("name", SMALL)
def test_the_small_models_are_measured(name: str, predict: bool) -> None:
    found = dial(getattr(small_models, name), steps=3, k=(2,), trainer={"accelerator": "cpu"}, predict=predict)
    assert (found.status, found.notes) == (0, [])
