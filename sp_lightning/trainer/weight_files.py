"""Files of weights (safetensors, torch): opens them, compares their names with a module's names, and copies or maps their values.

Files are mapped, so a weight is read from the disk when it is used (except torch files in the old format, which are loaded).
Parameters without values become views of the mapped file if their dtype and strides are those of the file.
"""

from __future__ import annotations

import json
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sp_lightning.core.model.without_values import WithoutValues, give_values, named_tensors

_MAPPED_TOGETHER = 2**26
"""After this many bytes, a new mapping of a safetensors file is made. A mapping is freed with the last tensor that views it."""


Shapes = Mapping[str, tuple[int, ...]]
"""The shape of each weight in a file, by name."""

Read = Callable[[str], Tensor]
"""Returns a weight, mapped from the file. Writes to the weight do not change the file."""


def _open_safetensors(path: Path, files: Mapping[str, Path] | None = None) -> tuple[Shapes, Read]:
    """Opens a file of safetensors, or the files that an index names.

    Args:
        path: the file, or the index.
        files: the file of each weight, by name; None if all weights are in ``path``.

    Raises:
        ImportError: safetensors is not installed.

    Returns:
        The shapes of the weights by name, and a function that reads one weight.
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
        """Returns a weight. After :data:`_MAPPED_TOGETHER` bytes, maps the file again, so that the old mapping can be freed."""
        nonlocal opened, last, nbytes
        if last != places[name] or nbytes > _MAPPED_TOGETHER:
            last, nbytes = places[name], 0
            opened = safe_open(last, framework="pt")
        value: Tensor = opened.get_tensor(name)
        nbytes += value.nbytes
        return value

    return shapes, read


def _open_torch(path: Path, asked: str) -> tuple[Shapes, Read]:
    """Opens a checkpoint of Lightning, or a state dictionary that ``torch.save`` has written.

    Args:
        path: the file.
        asked: the option or argument by which the user gave the path, for errors.

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
            f"{asked}={str(path)!r}: expected a Lightning checkpoint or a state dictionary of plain tensors, found "
            f"{strange.pop().__name__}. Write one: torch.save(model.state_dict(), FILE)."
        )
    return {name: tuple(each.shape) for name, each in state.items()}, state.__getitem__


def open_weights(path: Path, asked: str) -> tuple[Shapes, Read]:
    """Opens a file of weights.

    Args:
        path: a file, a folder that ``save_pretrained`` has written, or the index in it.
        asked: the option or argument by which the user gave the path, for errors.

    Raises:
        FileNotFoundError: the file, or a file that the index names, is missing.
        ImportError: the file needs the package ``safetensors``, which is not installed.
        ValueError: the folder has no such file, or several; or a value of the state dictionary is not a plain tensor.
        pickle.UnpicklingError: the file has objects other than tensors and plain values.

    Returns:
        The shapes of the weights by name, and a function that reads one weight.
    """
    if path.is_dir():
        path = _in_folder(path, asked)
    if not path.is_file():
        raise FileNotFoundError(f"{asked}={str(path)!r}: file not found.")
    if path.name.endswith(".safetensors.index.json"):
        files = {name: path.parent / file for name, file in json.loads(path.read_text())["weight_map"].items()}
        missing = next((file for file in files.values() if not file.is_file()), None)
        if missing is not None:
            raise FileNotFoundError(f"{str(path)!r} names {missing.name!r}, which is not beside it.")
        return _open_safetensors(path, files)
    return _open_safetensors(path) if path.suffix == ".safetensors" else _open_torch(path, asked)


def _in_folder(folder: Path, asked: str) -> Path:
    """Returns the index in a folder of safetensors, or its only safetensors file.

    Raises:
        ValueError: the folder has neither, or several of one kind.
    """
    for pattern in ("*.safetensors.index.json", "*.safetensors"):
        found = sorted(folder.glob(pattern))
        if len(found) == 1:
            return found[0]
        if found:
            names = ", ".join(each.name for each in found)
            raise ValueError(f"{asked}={str(folder)!r}: there are several {pattern} ({names}). Name one of them.")
    raise ValueError(
        f"{asked}={str(folder)!r}: expected model.safetensors or model.safetensors.index.json in this folder, "
        "found neither. Write one by model.save_pretrained(FOLDER), or name a file."
    )


# ---------------------------------------------------------------------- how a file's names fit a module's


def find_prefix(module: nn.Module, found: Iterable[WithoutValues], in_file: Shapes, path: Path, asked: str) -> str:
    """Returns the prefix that the names in a file lack: the name of the submodule whose weights the file has, with a dot.

    If the file has the weights of the module itself, the prefix is empty.

    Args:
        module: the module.
        found: the parameters and buffers of the module that have no values. The file must have all these parameters. It need not
            have the buffers.
        in_file: the shape of each weight in the file.
        path: the file, for errors.
        asked: the option or argument by which the user gave the path, for errors.

    Raises:
        ValueError: with every prefix, the file lacks a parameter, or has a weight that does not fit the module by name and shape.
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
            f"{asked}={str(path)!r} does not fit {type(module).__name__}"
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


def fill(module: nn.Module, found: Iterable[WithoutValues], prefix: str, in_file: Iterable[str], read: Read) -> None:
    """Gives a module the values in a file. Values that parameters and buffers have already are overwritten.

    Args:
        module: the module.
        found: the parameters and buffers of the module that have no values.
        prefix: the result of :func:`find_prefix`.
        in_file: the names of the weights in the file.
        read: reads a weight.
    """
    names = {*in_file}
    given: set[int] = set()
    for each in found:
        given.add(id(each.tensor))
        name = next((name for name in each.names if _strip(name, prefix) in names), None)
        if name is not None:
            give_values(each, read(_strip(name, prefix)))
    with torch.no_grad():
        for name, tensor in named_tensors(module):
            if _strip(name, prefix) in names and id(tensor) not in given:
                tensor.copy_(read(_strip(name, prefix)))


def _strip(name: str, prefix: str) -> str:
    """Returns the name in the file for a name in the module; an empty name if it does not begin with the prefix."""
    return name.removeprefix(prefix) if name.startswith(prefix) else ""
