"""The values of a run, kept in files, and the bitwise comparison of two runs."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, fields, is_dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np  # Lightning needs torchmetrics, which needs NumPy
import torch
from torch import Tensor, nn

from sp_lightning.core.device.layout import flat_bytes
from sp_lightning.core.model.wrapped import parts


@dataclass(frozen=True)
class Entry:
    """Values that a run had at one moment.

    Attributes:
        kind: the kind of values: a row of the report.
        moment: the moment, in words.
        file: a file of ``torch.save``.
        key: the key of the values in the file; None if they are the whole file.
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
    """The values of a run, in the order of time. The values are in files, because a model may fill the memory.

    Args:
        folder: the folder for the files; it is created.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.entries: list[Entry] = []
        folder.mkdir()

    def add(self, kind: str, moment: str, values: Any) -> None:
        """Writes copies of all tensors and plain values in a structure to a file. An empty structure adds no entry."""
        found = {name: _copied(value) for name, value in flatten(values)}
        if found:
            file = self._folder / str(len(self.entries))
            torch.save(found, file)
            self.entries.append(Entry(kind, moment, file))


@dataclass(frozen=True)
class Difference:
    """The first difference of one kind.

    Attributes:
        name: the name of the tensor, or the place of a value.
        moment: the moment of the run, in words.
        how: the difference, in words.
        run: the run that differs.
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
    """The comparison of all values of one kind.

    Attributes:
        tensors: the number of tensors of the reference.
        first: the first difference, if there is one.
        values: the number of tensors and other values of the reference.
    """

    tensors: int = 0
    first: Difference | None = None
    values: int = 0


def compare(ours: Record, plain: Record, but: Set[tuple[str, str]] = frozenset()) -> dict[str, Compared]:
    """Compares two records, bit by bit.

    Args:
        ours: the record of the run in question.
        plain: the record of the reference.
        but: places that are not compared, as :func:`unrepeatable` returns them.

    Returns:
        The comparison of each kind, in the order of their first entries.
    """
    kinds = dict.fromkeys(entry.kind for entry in (*plain.entries, *ours.entries))
    return {kind: _compare_kind(_of(ours, kind), _of(plain, kind), but) for kind in kinds}


def unrepeatable(again: Record, plain: Record, kind: str) -> set[tuple[str, str]]:
    """Returns the places where two runs have different values of one kind.

    A place has no number of a batch or call: it stands for all batches and calls.
    """
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
    """Yields the differences with their places: the moment without its numbers, and the name."""
    found, expected = ours.values(), plain.values()
    for name in dict.fromkeys([*expected, *found]):
        if name not in found or name not in expected:
            how: str | None = f"only {'plain Lightning' if name in expected else 'the other run'} has it"
        else:
            how = difference(found[name], expected[name])
        if how is not None:
            yield (re.sub(r"\d+", "", plain.moment), name), Difference(name, plain.moment, how)


def difference(ours: Any, plain: Any) -> str | None:
    """Describes how two values differ; None if they are bit-identical."""
    if not isinstance(ours, Tensor) or not isinstance(plain, Tensor):
        same = type(ours) is type(plain) and (ours == plain or (ours != ours and plain != plain))  # the last: two NaN
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
    """Yields all tensors and plain values of a structure, with their places. For other objects it yields the class name."""
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
    """Returns the items of a container by their places; None for any other object."""
    if isinstance(value, Mapping):
        return value
    if isinstance(value, (list, tuple)):
        return dict(enumerate(value))
    if is_dataclass(value) and not isinstance(value, type):
        return {each.name: getattr(value, each.name, None) for each in fields(value)}
    return None


def held(root: nn.Module) -> dict[str, Any]:
    """Returns tensors and arrays in attributes of modules and in nested containers, without registered weights and buffers."""
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
