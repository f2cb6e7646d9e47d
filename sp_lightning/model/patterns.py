"""What the user chooses by name, by glob pattern, by class or by a callable."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from torch import nn

from sp_lightning.model.blocks import has_parts
from sp_lightning.model.found import tensor_bytes

LayerChoice = str | type[nn.Module] | Sequence[str | type[nn.Module]] | Callable[[nn.Module], Iterable[Any]] | None
"""What ``layers=`` takes: names or glob patterns, module classes, a callable, or None if they are to be found."""

_Named = TypeVar("_Named")


def chosen_layers(module: nn.Module, layers: LayerChoice, names: Mapping[nn.Module, str]) -> set[nn.Module]:
    """The modules that ``layers=`` chooses; those without parameters are left out.

    Args:
        module: the root.
        layers: the choice.
        names: the name of each module in the tree.

    Raises:
        TypeError: the callable returned something else than a list.
        ValueError: a choice that is not in the tree, or two layers of which one is inside the other.
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
    """The parameters that ``keep_on_gpu=`` chooses, by their own names or by those of modules above them.

    Raises:
        ValueError: a pattern that matches nothing.
    """
    parameters = dict(module.named_parameters(remove_duplicate=False))
    named: dict[str, nn.Module | nn.Parameter] = {**dict(module.named_modules(remove_duplicate=False)), **parameters}
    residents: set[nn.Parameter] = set()
    for pattern in patterns:
        for match in matching(module, pattern, "keep_on_gpu", named):
            residents.update(match.parameters() if isinstance(match, nn.Module) else [match])
    return residents


def matching(module: nn.Module, pattern: str, option: str, named: Mapping[str, _Named]) -> list[_Named]:
    """What has a dotted name that matches a glob pattern.

    Args:
        module: the root, whose largest modules the error names.
        pattern: ``*`` stands for one part of a dotted name, ``**`` for any number of parts, ``?`` for one character.
        option: the option that the pattern was given for.
        named: what is looked through, by name.

    Raises:
        ValueError: nothing does. The error has the option, and names that may have been meant.
    """
    expression = re.compile(_glob(pattern))
    matches = [value for name, value in named.items() if name and expression.fullmatch(name)]
    if matches:
        return matches
    sizes = {name: sum(map(tensor_bytes, child.parameters())) for name, child in module.named_modules() if name}
    largest = sorted(sizes, key=lambda name: sizes[name], reverse=True)[:5]
    close = difflib.get_close_matches(pattern, [name for name in named if name], n=3, cutoff=0.4)
    raise ValueError(
        f"{option}={pattern!r} matches nothing in {type(module).__name__}. "
        f"Closest names: {close or 'none'}. Largest modules: {largest}. "
        f"'*' stands for one part of a dotted name, '**' for any number of parts."
    )


def _glob(pattern: str) -> str:
    parts = re.split(r"(\*\*|\*|\?)", pattern)
    return "".join({"**": ".*", "*": "[^.]*", "?": "[^.]"}.get(part, re.escape(part)) for part in parts)
