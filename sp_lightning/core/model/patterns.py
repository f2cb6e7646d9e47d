"""Resolves ``layers=`` and ``keep_on_gpu=``: names, glob patterns, classes and callables."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from torch import nn

from sp_lightning.core.model.blocks import has_parts
from sp_lightning.core.model.found import tensor_bytes

LayerChoice = str | type[nn.Module] | Sequence[str | type[nn.Module]] | Callable[[nn.Module], Iterable[Any]] | None
"""The type of ``layers=``: names or glob patterns, module classes, a callable, or None to choose automatically."""

_Named = TypeVar("_Named")


def chosen_layers(module: nn.Module, layers: LayerChoice, names: Mapping[nn.Module, str]) -> set[nn.Module]:
    """Returns the modules that ``layers=`` chooses, except modules without parameters.

    Args:
        module: the root.
        layers: the value of the option.
        names: the name of each module in the tree.

    Raises:
        TypeError: the callable returned a string, or an object that is not iterable.
        ValueError: a choice is not in the tree, or one chosen module is inside another.
    """
    chosen: dict[nn.Module, None] = {}
    for pick in _picks(module, layers):
        matches = _matches(module, pick, names)
        chosen.update(dict.fromkeys(match for match in matches if any(True for _ in match.parameters())))
    for outer in chosen:
        for inner in outer.modules():
            if inner is not outer and inner in chosen:
                raise ValueError(
                    f"Overlapping layers: {names[inner]!r} is inside {names[outer]!r}, and layers= chose both. "
                    f"Choose one, for example layers=[{names[outer]!r}]."
                )
    return set(chosen)


def _picks(module: nn.Module, layers: LayerChoice) -> Iterable[Any]:
    """Returns the single choices of ``layers=``: names, patterns, classes or modules."""
    if layers is None:
        return ()
    if isinstance(layers, (str, type)):
        return (layers,)
    picks: Any = layers(module) if callable(layers) else layers
    if isinstance(picks, str) or not isinstance(picks, Iterable):
        raise TypeError(
            f"The callable given as layers= returned {type(picks).__name__}; expected a list of names or modules, "
            f"for example: lambda module: list(module.model.layers)."
        )
    return picks


def _matches(module: nn.Module, pick: Any, names: Mapping[nn.Module, str]) -> list[nn.Module]:
    """Returns the modules that one choice of ``layers=`` stands for. If there is none, raises a ValueError."""
    if isinstance(pick, nn.Module):
        if pick not in names:
            raise ValueError(
                f"layers= returned a {type(pick).__name__} that is not part of the module. Expected its own modules, for "
                "example: lambda module: list(module.model.layers)."
            )
        return [pick]
    if not isinstance(pick, type):
        return matching(module, pick, "layers", dict(module.named_modules()))
    matches = [child for child in names if isinstance(child, pick)]
    if not matches:
        kinds = sorted({type(child).__name__ for child in names if has_parts(child)})
        raise ValueError(
            f"layers= names the class {pick.__name__}, which is not in the module. Expected one of {kinds}."
        )
    return matches


def chosen_residents(module: nn.Module, patterns: Sequence[str]) -> set[nn.Parameter]:
    """Returns the parameters that ``keep_on_gpu=`` chooses, by their names or by the names of modules that contain them.

    Raises:
        ValueError: a pattern matches nothing.
    """
    parameters = dict(module.named_parameters(remove_duplicate=False))
    named: dict[str, nn.Module | nn.Parameter] = {**dict(module.named_modules(remove_duplicate=False)), **parameters}
    residents: set[nn.Parameter] = set()
    for pattern in patterns:
        for match in matching(module, pattern, "keep_on_gpu", named):
            residents.update(match.parameters() if isinstance(match, nn.Module) else [match])
    return residents


def matching(module: nn.Module, pattern: str, option: str, named: Mapping[str, _Named]) -> list[_Named]:
    """Returns the values whose dotted names match a glob pattern.

    Args:
        module: the root. The error names its largest modules.
        pattern: ``*`` stands for one part of a dotted name, ``**`` for any number of parts, ``?`` for one character.
        option: the name of the option that contains the pattern, for the error.
        named: the candidates, by name.

    Raises:
        ValueError: no name matches. The message contains similar names.
    """
    expression = re.compile(_glob(pattern))
    # The root has an empty name. It cannot be chosen, even by "**".
    matches = [value for name, value in named.items() if name and expression.fullmatch(name)]
    if matches:
        return matches
    sizes = {name: sum(map(tensor_bytes, child.parameters())) for name, child in module.named_modules() if name}
    largest = sorted(sizes, key=lambda name: sizes[name], reverse=True)[:5]
    close = difflib.get_close_matches(pattern, [name for name in named if name], n=3, cutoff=0.4)
    stacks = [name for name in sizes if isinstance(module.get_submodule(name), nn.ModuleList | nn.Sequential)]
    examples = [f"{max(stacks, key=lambda name: sizes[name])}.*"] if stacks else largest[:1]
    raise ValueError(
        f"{option}={pattern!r} matches nothing in {type(module).__name__}. "
        f"{f'Closest names: {close}. ' if close else ''}Largest modules: {largest}. For example {examples}. "
        f"'*' stands for one part of a dotted name, '**' for any number of parts."
    )


def _glob(pattern: str) -> str:
    """Returns the regular expression of a glob pattern."""
    parts = re.split(r"(\*\*|\*|\?)", pattern)
    return "".join({"**": ".*", "*": "[^.]*", "?": "[^.]"}.get(part, re.escape(part)) for part in parts)
