"""Files of weights: safetensors, in one file or several, and torch's. Nothing is read before it is asked for."""

from __future__ import annotations

import json
import zipfile
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

_MAPPED_TOGETHER = 2**26
"""Bytes that are read through one mapping of a safetensors file. It goes with the last of them, and their pages with it."""


class SafetensorsFile:
    """A file of safetensors, or the files that an index names.

    Attributes:
        shapes: the shape of each weight, by its name.
        dtypes: what the file says of the dtype of each.

    Args:
        files: the file in which each weight is, by its name; None for all that are in ``path``.
        path: the file.

    Raises:
        ImportError: safetensors is not installed.
    """

    def __init__(self, path: Path, files: Mapping[str, Path] | None = None) -> None:
        try:
            from safetensors import safe_open
        except ImportError as error:
            raise ImportError(
                f"{path} is read with the package safetensors, which is not installed: pip install safetensors."
            ) from error
        self._open: Any = safe_open
        self._file: Any = None
        self._path: Path | None = None
        self._read = 0
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, str] = {}
        self._files: dict[str, Path] = {}
        for each in sorted(set(files.values())) if files else [path]:
            file = self._open(each, framework="pt")
            for name in file.keys():  # noqa: SIM118 (it has no iterator)
                part = file.get_slice(name)
                self.shapes[name], self.dtypes[name] = tuple(part.get_shape()), part.get_dtype()
                self._files[name] = each

    def read(self, name: str) -> Tensor:
        """Returns a weight, which stays in the file until it is copied. It may be written: the file does not change."""
        if self._path != self._files[name] or self._read > _MAPPED_TOGETHER:
            self._path, self._read = self._files[name], 0
            self._file = self._open(self._path, framework="pt")
        value: Tensor = self._file.get_tensor(name)
        self._read += value.nbytes
        return value


class TorchFile:
    """A checkpoint of Lightning's, or a state dictionary that ``torch.save`` wrote.

    Attributes:
        shapes, dtypes: as those of :class:`SafetensorsFile`.

    Raises:
        ValueError: the file has something else.
        pickle.UnpicklingError: the file holds other objects than tensors and plain values.
    """

    def __init__(self, path: Path) -> None:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
        state = content.get("state_dict", content) if isinstance(content, dict) else content
        strange = {type(state)} - {dict, OrderedDict}
        if not strange:
            strange = {type(each) for each in state.values()} - {Tensor, nn.Parameter}
        if strange:
            raise ValueError(
                f"weights={str(path)!r}: expected a checkpoint of Lightning's or a state dictionary of plain tensors, found "
                f"{strange.pop().__name__}. Write one: torch.save(model.state_dict(), FILE)."
            )
        self._state: dict[str, Tensor] = state
        self.shapes = {name: tuple(each.shape) for name, each in self._state.items()}
        self.dtypes = {name: str(each.dtype) for name, each in self._state.items()}

    def read(self, name: str) -> Tensor:
        """As :meth:`SafetensorsFile.read`."""
        return self._state[name]


WeightFile = SafetensorsFile | TorchFile


def open_weights(path: Path) -> WeightFile:
    """Opens a file of weights.

    Args:
        path: a file, a folder as ``save_pretrained`` writes it, or the index in it.

    Raises:
        FileNotFoundError: it is not there, or a file is not that its index names.
        ValueError: a folder has none, or several.
    """
    if path.is_dir():
        path = _in_folder(path)
    if not path.is_file():
        raise FileNotFoundError(f"weights={str(path)!r}: there is no such file.")
    if path.name.endswith(".safetensors.index.json"):
        files = {name: path.parent / file for name, file in json.loads(path.read_text())["weight_map"].items()}
        missing = next((file for file in files.values() if not file.is_file()), None)
        if missing is not None:
            raise FileNotFoundError(f"{str(path)!r} names {missing.name!r}, which is not beside it.")
        return SafetensorsFile(path, files)
    return SafetensorsFile(path) if path.suffix == ".safetensors" else TorchFile(path)


def _in_folder(folder: Path) -> Path:
    """The index of a folder, or its only file."""
    for pattern in ("*.safetensors.index.json", "*.safetensors"):
        found = sorted(folder.glob(pattern))
        if len(found) == 1:
            return found[0]
        if found:
            names = ", ".join(each.name for each in found)
            raise ValueError(f"weights={str(folder)!r}: there are several {pattern} ({names}). Name one of them.")
    raise ValueError(
        f"weights={str(folder)!r}: expected model.safetensors or model.safetensors.index.json in this folder, found neither. "
        "Write one by model.save_pretrained(FOLDER), or name a file."
    )
