"""What a run leaves, kept in files, and the comparison of two of them, bit by bit."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, fields, is_dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np  # Lightning needs torchmetrics, which needs NumPy
import torch
from torch import Tensor, nn

from sp_lightning.device.layout import flat_bytes
from sp_lightning.model.wrapped import parts


@dataclass(frozen=True)
class Entry:
    """Values that a run had at one moment.

    Attributes:
        kind: what they are: a row of the report.
        moment: when it had them, in words.
        file: where they are, as ``torch.save`` writes them.
        key: under which the file has them; None if it has nothing else.
    """

    kind: str
    moment: str
    file: Path
    key: str | None = None

    def values(self) -> dict[str, Any]:
        """The values by their names: tensors on the host, mapped from the file, and plain values."""
        found = torch.load(self.file, map_location="cpu", mmap=True, weights_only=False)
        return dict(flatten(found if self.key is None else found.get(self.key)))


class Record:
    """What a run leaves, in the order of time. Values are in files, because a model may fill the memory.

    Args:
        folder: where the files are; it is made.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.entries: list[Entry] = []
        folder.mkdir()

    def add(self, kind: str, moment: str, values: Any) -> None:
        """Keeps copies of all tensors and plain values in a structure."""
        found = {name: _copied(value) for name, value in flatten(values)}
        if found:
            file = self._folder / str(len(self.entries))
            torch.save(found, file)
            self.entries.append(Entry(kind, moment, file))

    def keep_only(self, kind: str) -> None:
        """Removes the files of all other kinds."""
        for entry in self.entries:
            if entry.kind != kind:
                entry.file.unlink(missing_ok=True)
        self.entries = _of(self, kind)


@dataclass(frozen=True)
class Difference:
    """The first difference of one kind.

    Attributes:
        name: of the tensor, or the place of a value.
        moment: when the run had it, in words.
        how: what the difference is, in words.
        run: the run that has it.
    """

    name: str
    moment: str
    how: str
    run: str = ""

    def __str__(self) -> str:
        where = f"{self.name}, {self.moment}" if self.name else self.moment
        return f"differs in the run {self.run!r}: {where}: {self.how}"


@dataclass
class Compared:
    """What came of comparing all of one kind.

    Attributes:
        tensors: how many there were.
        first: the first difference, if there is one.
        values: how many tensors and other values there were.
    """

    tensors: int = 0
    first: Difference | None = None
    values: int = 0


def compare(
    ours: Record, plain: Record, leave_out: Sequence[str] = (), but: Set[tuple[str, str]] = frozenset()
) -> dict[str, Compared]:
    """Compares two records, bit by bit.

    Args:
        ours: that of the run in question.
        plain: that of the run that is right.
        leave_out: kinds that only one of them has.
        but: places that are not compared, as :func:`unrepeatable` returns them.

    Returns:
        by kind, in the order in which the kinds first came.
    """
    kinds = dict.fromkeys(entry.kind for entry in (*plain.entries, *ours.entries) if entry.kind not in leave_out)
    return {kind: _compare_kind(_of(ours, kind), _of(plain, kind), but) for kind in kinds}


def unrepeatable(again: Record, plain: Record, kind: str) -> set[tuple[str, str]]:
    """The places where two runs have different values of one kind, whatever the number of a batch or call."""
    both = zip(_of(again, kind), _of(plain, kind), strict=False)
    return {place for ours, entry in both for place, *_ in _differences(ours, entry)}


def _of(record: Record, kind: str) -> list[Entry]:
    return [entry for entry in record.entries if entry.kind == kind]


def _compare_kind(ours: list[Entry], plain: list[Entry], but: Set[tuple[str, str]]) -> Compared:
    compared = Compared()
    for mine, theirs in zip_longest(ours, plain):
        if mine is None or theirs is None or mine.moment != theirs.moment:
            there = theirs or mine
            assert there is not None
            compared.first = compared.first or Difference("", there.moment, "only one of the two runs has it")
            continue
        expected = theirs.values()
        compared.tensors += sum(isinstance(value, Tensor) for value in expected.values())
        compared.values += sum(value is not None for value in expected.values())
        if compared.first is None:
            found = (each for place, each in _differences(mine, theirs) if place not in but)
            compared.first = next(found, None)
    return compared


def _differences(ours: Entry, plain: Entry) -> Iterator[tuple[tuple[str, str], Difference]]:
    """By place: the moment but for its numbers, and the name."""
    found, expected = ours.values(), plain.values()
    for name in dict.fromkeys([*expected, *found]):
        if name not in found or name not in expected:
            how: str | None = f"only {'plain Lightning' if name in expected else 'the other run'} has it"
        else:
            how = difference(found[name], expected[name])
        if how is not None:
            yield (re.sub(r"\d+", "", plain.moment), name), Difference(name, plain.moment, how)


def difference(ours: Any, plain: Any) -> str | None:
    """In what two values differ, in words; None if they have the same bits."""
    if not isinstance(ours, Tensor) or not isinstance(plain, Tensor):
        same = type(ours) is type(plain) and (ours == plain or (ours != ours and plain != plain))  # the latter of NaN
        return None if same else f"{ours!r} is not {plain!r}"
    if ours.dtype != plain.dtype or ours.shape != plain.shape:
        return f"{_form(ours)} is not {_form(plain)}"
    if torch.equal(flat_bytes(ours), flat_bytes(plain)):
        return None
    wide = torch.complex128 if plain.is_complex() else torch.float64
    apart, nan = (ours.to(wide) - plain.to(wide)).abs(), ours.isnan() & ~plain.isnan()
    if nan.any():
        return f"NaN in {int(nan.sum())} of {nan.numel()} values where plain Lightning has numbers"
    most = float(apart.nan_to_num().max())
    return (
        f"values differ by up to {most:.3g}" if most else "values are equal, but a zero's sign, or a NaN's bits, differ"
    )


def _form(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _copied(value: Any) -> Any:
    return value.detach().to_dense().to("cpu", copy=True).contiguous() if isinstance(value, Tensor) else value


def flatten(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """All tensors and plain values of a structure, with their places. Of other objects only the class is given."""
    if isinstance(value, Tensor):
        yield from parts(name, value)
    elif isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
        yield name, torch.from_numpy(value)
    elif isinstance(value, (np.ndarray, np.generic)):
        yield from flatten(value.tolist(), name)
    elif value is None or isinstance(value, (bool, int, float, complex, str, bytes, set, frozenset)):
        yield name, value
    else:
        inner = _inside(value)
        if inner is None:
            yield name, type(value).__qualname__
        else:
            apart = len(set(map(str, inner))) == len(inner)  # 1 and "1" may be keys of one dictionary
            for key, each in inner.items():
                place = str(key) if apart else repr(key)
                yield from flatten(each, f"{name}.{place}" if name else place)


def _inside(value: Any) -> Mapping[Any, Any] | None:
    """What a container holds, by its places in it; None for any other object."""
    if isinstance(value, Mapping):
        return value
    if isinstance(value, (list, tuple)):
        return dict(enumerate(value))
    if is_dataclass(value) and not isinstance(value, type):
        return {each.name: getattr(value, each.name, None) for each in fields(value)}
    return None


def held(root: nn.Module) -> dict[str, Any]:
    """Tensors and arrays in attributes of modules, and in the containers and modules there; no registered weight or buffer."""
    seen = {id(registered) for module in root.modules() for registered in (module._parameters, module._buffers)}
    found: dict[str, Any] = {}

    def look(value: Any, name: str) -> None:
        if isinstance(value, (Tensor, np.ndarray)):
            found[name.replace("._modules", "")[1:]] = value
        elif id(value) not in seen:
            seen.add(id(value))  # a container may hold itself
            inner = vars(value) if isinstance(value, nn.Module) else _inside(value)
            for index, (key, each) in enumerate((inner or {}).items()):
                look(each, f"{name}.{key if isinstance(key, str) else index}")

    look(root, "")
    return {name: value for name, value in found.items() if not getattr(value, "is_meta", False)}
