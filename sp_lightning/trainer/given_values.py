"""Gives modules on the meta device their values, from files of weights (safetensors, torch) or from a trainer's checkpoint.

Parameters become views of the mapped file, and the host store copies them layer by layer. So host memory holds the model once.
"""

from __future__ import annotations

import json
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from sp_lightning.model.without_values import (
    WithoutValues,
    compute_buffers,
    find_without_values,
    give_values,
    named_tensors,
)
from sp_lightning.observe.messages import less_host_memory
from sp_lightning.plan.host_memory import MACHINE, HostBudget, check_host

_ALIGNMENT = 64
"""Bytes, as in torch's files. At other alignments, as in the files of a folder, kernels may compute other bits."""


class GivenValues:
    """Gives modules on the meta device the user's values.

    Args:
        path: the file of ``load_weights_from``; None without.
        stay: True if weights may stay in the file as far as host memory has no room for them.
        budget: limits host memory.
    """

    def __init__(self, path: Path | None, *, stay: bool = False, budget: HostBudget = MACHINE) -> None:
        self._path = path
        self._stay = stay
        self._budget = budget
        self._has_read = False  # True once values of the file were given, by `restore` or `complete`

    def restore(self, module: pl.LightningModule, state: Mapping[str, Any]) -> set[str]:
        """Prepares a module for loading a checkpoint's state: torch cannot load into parameters on the meta device.

        Args:
            module: the root.
            state: the state dictionary of the checkpoint.

        Returns:
            The names of the parameters that get their first values from the checkpoint.
        """
        found = find_without_values(module)
        if found and self._path is not None:
            # The checkpoint overwrites these values of the file, so they must be in memory.
            self._read_file(module, found, self._path, [each for each in found if state.keys() & each.names])
            return set()
        self._check_room(found)
        restored: set[str] = set()
        for each in found:
            plain = (state[name] for name in each.names if type(state.get(name)) in (Tensor, nn.Parameter))
            value = next((value for value in plain if value.shape == each.tensor.shape), None)
            if value is not None:
                give_values(each, value.clone() if value.data_ptr() % _ALIGNMENT else value)
                restored.update(each.names)
        return restored

    def complete(self, module: pl.LightningModule, *, training: bool) -> None:
        """Gives a module all available values before set-up, which raises an error for parameters without values.

        Args:
            module: the module.
            training: True if weights that are not frozen are trained, and so must be in memory.

        Raises:
            ValueError: the module has values already, or the file does not fit.
            MemoryError: host memory has no room for the weights that must be in memory.
        """
        found = find_without_values(module)
        if self._path is not None:
            if not found and not self._has_read:
                raise ValueError(
                    f"load_weights_from={str(self._path)!r} gives values to modules on the meta device, and all parameters of "
                    f'{type(module).__name__} have values. Leave it out, or build the module inside torch.device("meta").'
                )
            if found and (not self._has_read or any(isinstance(each.tensor, nn.Parameter) for each in found)):
                trained = [each for each in found if training and each.tensor.requires_grad]
                self._read_file(module, found, self._path, trained)
        if not any(parameter.is_meta for parameter in module.parameters()):
            compute_buffers(module)

    def _read_file(
        self, module: pl.LightningModule, found: list[WithoutValues], path: Path, written: list[WithoutValues]
    ) -> None:
        """Gives values from the file. Weights in ``written`` must be in memory."""
        shapes, read = open_weights(path)
        prefix = _find_prefix(module, found, shapes, path)
        self._check_room(written if self._stay else found)
        for each in found:
            name = next((name for name in each.names if _strip(name, prefix) in shapes), None)
            if name is not None:
                give_values(each, read(_strip(name, prefix)))
        given = {id(each.tensor) for each in found}
        with torch.no_grad():  # parameters and buffers that had values before: the file's values replace them
            for name, tensor in named_tensors(module):
                if _strip(name, prefix) in shapes and id(tensor) not in given:
                    tensor.copy_(read(_strip(name, prefix)))
        self._has_read = True

    def _check_room(self, found: list[WithoutValues]) -> None:
        """Raises a MemoryError if host memory has no room for these tensors."""
        check_host({"for the weights": sum(each.tensor.nbytes for each in found)}, less_host_memory(), self._budget)


def _strip(name: str, prefix: str) -> str:
    """Returns a name of the module as it is in the file; empty if it does not begin with the prefix."""
    return name.removeprefix(prefix) if name.startswith(prefix) else ""


# ---------------------------------------------------------------------- how a file's names fit a module's


def _find_prefix(module: nn.Module, found: list[WithoutValues], in_file: Shapes, path: Path) -> str:
    """Returns the prefix that the names in a file lack: the name of the sub-module whose file it is, with a dot.

    Raises:
        ValueError: no prefix fits all names and shapes.
    """
    shapes = {name: tuple(tensor.shape) for name, tensor in named_tensors(module)}
    needed = [each.names for each in found if isinstance(each.tensor, nn.Parameter)]
    prefixes = ["", *(f"{name}." for name, _ in module.named_modules(remove_duplicate=False) if name)]
    first = next((name for name in in_file if any(prefix + name in shapes for prefix in prefixes)), "")

    def misfits(prefix: str) -> tuple[list[str], list[str]]:
        more = [name for name, shape in in_file.items() if shapes.get(prefix + name) != shape]
        fits = {prefix + name for name in in_file.keys() - more}
        return [names[0] for names in needed if fits.isdisjoint(names)], more

    candidates = [prefix for prefix in prefixes if prefix + first in shapes] or [""]
    best = min(candidates, key=lambda prefix: sum(map(len, misfits(prefix))))
    missing, unexpected = misfits(best)
    if missing or unexpected:
        raise ValueError(
            f"load_weights_from={str(path)!r} does not fit {type(module).__name__}"
            + (f", or its {best[:-1]!r}" if best else "")
            + (f". It lacks {_listed(missing, shapes)}" if missing else "")
            + (f". The module has no {_listed(unexpected, in_file)}" if unexpected else "")
            + ". The file must have the names and sizes of the module, or of a sub-module; build missing weights on the CPU. "
            "transformers saves some models under older names than the module has: save_pretrained(folder, "
            "save_original_format=False) keeps the names."
        )
    return best


def _listed(names: list[str], shapes: Shapes) -> str:
    shown = ", ".join(f"{name!r} of shape {shapes[name]}" for name in names[:3])
    return shown + (f" and {len(names) - 3} more" if len(names) > 3 else "")


# ---------------------------------------------------------------------- files of weights: each weight is read when it is used

_MAPPED_TOGETHER = 2**26
"""Bytes that are read through one mapping of a safetensors file. The mapping and its pages are freed with the last tensor."""


Shapes = Mapping[str, tuple[int, ...]]
"""The shape of each weight in a file, by name."""

Read = Callable[[str], Tensor]
"""Returns a weight, mapped from the file. It may be written, which does not change the file."""


def _open_safetensors(path: Path, files: Mapping[str, Path] | None = None) -> tuple[Shapes, Read]:
    """Opens a file of safetensors, or the files that an index names.

    Args:
        files: the file of each weight, by name; None if all weights are in ``path``.
        path: the file.

    Raises:
        ImportError: safetensors is not installed.
    """
    try:
        from safetensors import safe_open
    except ImportError as error:
        raise ImportError(
            f"{path} is read with the package safetensors, which is not installed: pip install safetensors."
        ) from error
    places: dict[str, Path] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for each in sorted(set(files.values())) if files else [path]:
        opened: Any = safe_open(each, framework="pt")
        for name in opened.keys():  # noqa: SIM118 (it has no iterator)
            shapes[name] = tuple(opened.get_slice(name).get_shape())
            places[name] = each
    last, nbytes = None, 0

    def read(name: str) -> Tensor:
        """Returns a weight. Opens its file again after :data:`_MAPPED_TOGETHER` bytes, so that the first mapping can be freed."""
        nonlocal opened, last, nbytes
        if last != places[name] or nbytes > _MAPPED_TOGETHER:
            last, nbytes = places[name], 0
            opened = safe_open(last, framework="pt")
        value: Tensor = opened.get_tensor(name)
        nbytes += value.nbytes
        return value

    return shapes, read


def _open_torch(path: Path) -> tuple[Shapes, Read]:
    """Opens a checkpoint of Lightning, or a state dictionary that ``torch.save`` has written.

    Raises:
        ValueError: the file has other contents.
        pickle.UnpicklingError: the file has objects other than tensors and plain values.
    """
    content = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    state = content.get("state_dict", content) if isinstance(content, dict) else content
    strange = {type(state)} - {dict, OrderedDict}
    if not strange:
        strange = {type(each) for each in state.values()} - {Tensor, nn.Parameter}
    if strange:
        raise ValueError(
            f"load_weights_from={str(path)!r}: expected a Lightning checkpoint or a state dictionary of plain tensors, found "
            f"{strange.pop().__name__}. Write one: torch.save(model.state_dict(), FILE)."
        )
    return {name: tuple(each.shape) for name, each in state.items()}, state.__getitem__


def open_weights(path: Path) -> tuple[Shapes, Read]:
    """Opens a file of weights.

    Args:
        path: a file, a folder that ``save_pretrained`` has written, or the index in it.

    Raises:
        FileNotFoundError: the file, or a file that the index names, is missing.
        ValueError: the folder has no such file, or several.
    """
    if path.is_dir():
        path = _in_folder(path)
    if not path.is_file():
        raise FileNotFoundError(f"load_weights_from={str(path)!r}: file not found.")
    if path.name.endswith(".safetensors.index.json"):
        files = {name: path.parent / file for name, file in json.loads(path.read_text())["weight_map"].items()}
        missing = next((file for file in files.values() if not file.is_file()), None)
        if missing is not None:
            raise FileNotFoundError(f"{str(path)!r} names {missing.name!r}, which is not beside it.")
        return _open_safetensors(path, files)
    return _open_safetensors(path) if path.suffix == ".safetensors" else _open_torch(path)


def _in_folder(folder: Path) -> Path:
    """Returns the index of a folder, or its only file."""
    for pattern in ("*.safetensors.index.json", "*.safetensors"):
        found = sorted(folder.glob(pattern))
        if len(found) == 1:
            return found[0]
        if found:
            names = ", ".join(each.name for each in found)
            raise ValueError(
                f"load_weights_from={str(folder)!r}: there are several {pattern} ({names}). Name one of them."
            )
    raise ValueError(
        f"load_weights_from={str(folder)!r}: expected model.safetensors or model.safetensors.index.json in this folder, "
        "found neither. Write one by model.save_pretrained(FOLDER), or name a file."
    )
