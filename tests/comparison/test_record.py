"""What counts as a difference, and what it is called."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sp_lightning.tools.comparison.record import Record, compare, difference, flatten, held, unrepeatable

NAN = float("nan")
POISON = torch.full((4,), 0xFF, dtype=torch.uint8).view(torch.float32)


@pytest.mark.parametrize(
    ("ours", "plain", "how"),
    [
        (torch.tensor([1.0, NAN]), torch.tensor([1.0, NAN]), None),
        (torch.tensor([1.0, 2.5]), torch.tensor([1.0, 2.0]), "values differ by up to 0.5"),
        (torch.tensor([NAN, 2.0]), torch.tensor([1.0, 2.0]), "NaN in 1 of 2 values where plain Lightning has numbers"),
        (torch.tensor([0.0]), torch.tensor([-0.0]), "values are equal, but a zero's sign, or a NaN's bits, differ"),
        (POISON, torch.tensor([NAN]), "values are equal, but a zero's sign, or a NaN's bits, differ"),
        (torch.tensor([1, 2]), torch.tensor([1, 5]), "values differ by up to 3"),
        (torch.tensor([True]), torch.tensor([False]), "values differ by up to 1"),
        (torch.ones(2, dtype=torch.half), torch.ones(2), "float16[2] is not float32[2]"),
        (torch.ones(3), torch.ones(2), "float32[3] is not float32[2]"),
        (torch.tensor(1 + 2j), torch.tensor(1 + 2j), None),
        (torch.ones(2)[::2], torch.ones(1), None),
        (1, 1, None),
        (1, 1.0, "1 is not 1.0"),
        ("a", "b", "'a' is not 'b'"),
        (NAN, NAN, None),
        (NAN, 1.0, "nan is not 1.0"),
        (torch.ones(1), None, "tensor([1.]) is not None"),
    ],
)
def test_differences_are_said_in_words(ours: Any, plain: Any, how: str | None) -> None:
    assert difference(ours, plain) == how


@dataclass
class Held:
    inner: list[Any]


def test_structures_are_taken_apart() -> None:
    value = {"a": (torch.ones(1), None), 3: Held([2.5, np.zeros(2)]), "object": object()}
    found = dict(flatten(value))
    assert list(found) == ["a.0", "a.1", "3.inner.0", "3.inner.1", "object"]
    assert found["object"] == "object"
    assert torch.equal(found["3.inner.1"], torch.zeros(2, dtype=torch.float64))


def test_values_of_numpy_and_of_other_plain_classes_are_compared() -> None:
    value = {"scalar": np.float32(1.5), "names": np.array(["a", "b"]), "bytes": b"ab", "set": {1}}
    assert dict(flatten(value)) == {"scalar": 1.5, "names.0": "a", "names.1": "b", "bytes": b"ab", "set": {1}}


def test_keys_that_look_alike_are_told_apart() -> None:
    assert dict(flatten({"a": {1: 2.0, "1": 3.0}})) == {"a.1": 2.0, "a.'1'": 3.0}


def record(folder: Path, *entries: tuple[str, str, Any]) -> Record:
    made = Record(folder)
    for entry in entries:
        made.add(*entry)
    return made


def test_the_first_difference_of_each_kind_is_kept(tmp_path: Path) -> None:
    ours = record(tmp_path / "ours", ("losses", "batch 0", 1.0), ("losses", "batch 1", {"x": torch.ones(2)}))
    plain = record(
        tmp_path / "plain", ("losses", "batch 0", 1.0), ("losses", "batch 1", {"x": torch.zeros(2)}), ("weights", "end", [1])
    )  # fmt: skip
    found = compare(ours, plain)
    assert list(found) == ["losses", "weights"]
    assert str(found["losses"].first) == "differs in the run '': x, batch 1: values differ by up to 1"
    assert found["losses"].tensors == 1
    assert str(found["weights"].first) == "differs in the run '': end: only one of the two runs has it"


def test_what_is_kept_is_a_copy(tmp_path: Path) -> None:
    value = torch.ones(2)
    made = record(tmp_path / "record", ("weights", "end", [value]))
    value.zero_()
    assert torch.equal(made.entries[0].values()["0"], torch.ones(2))


def test_what_one_run_alone_has_is_a_difference(tmp_path: Path) -> None:
    ours, plain = (record(tmp_path / name, ("a", "end", {name: 1})) for name in ("x", "y"))
    assert str(compare(ours, plain)["a"].first) == "differs in the run '': y, end: only plain Lightning has it"


def test_values_of_another_moment_are_not_those_of_this_one(tmp_path: Path) -> None:
    """A call of a logger's method was compared with one of another."""
    ours, plain = (record(tmp_path / name, ("logs", f"call 1 of {name}", [1])) for name in ("x", "y"))
    assert (
        str(compare(ours, plain)["logs"].first) == "differs in the run '': call 1 of y: only one of the two runs has it"
    )


def test_places_that_do_not_repeat_can_be_left_out(tmp_path: Path) -> None:
    """All batches are compared, because a time may be the same by chance in one of them."""
    again, plain, ours, wrong = (
        record(tmp_path / str(number), *(("logs", f"batch {batch}", values) for batch, values in enumerate(both)))
        for number, both in enumerate(
            [
                [{"time": 1.0, "loss": 3.0}, {"time": 2.0, "loss": 4.0}],
                [{"time": 1.5, "loss": 3.0}, {"time": 2.0, "loss": 4.0}],
                [{"time": 1.7, "loss": 3.0}, {"time": 2.5, "loss": 4.0}],
                [{"time": 1.7, "loss": 3.0}, {"time": 2.5, "loss": 4.5}],
            ]
        )
    )
    but = unrepeatable(again, plain, "logs")
    assert but == {("batch ", "time")}
    assert compare(ours, plain, but=but)["logs"].first is None
    assert str(compare(wrong, plain, but=but)["logs"].first) == "differs in the run '': loss, batch 1: 4.5 is not 4.0"


def test_what_attributes_hold_is_found_once_and_a_class_is_no_instance() -> None:
    module: Any = torch.nn.Linear(2, 2)
    module.held = {"itself": [torch.zeros(1)], 5: Held([torch.ones(1)]), "kind": Held}
    module.held["again"] = module.held
    module.shapes = torch.empty(2, device="meta")
    assert list(held(module)) == ["held.itself.0", "held.1.inner.0"]
    assert dict(flatten(Held)) == {"": "type"}
