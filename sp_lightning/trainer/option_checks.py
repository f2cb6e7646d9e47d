"""Checks the strategy's options before anything is built.

Each function returns the option's value in one form. It raises a TypeError or a ValueError with the option, the given value, the
expected values and an example.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from difflib import get_close_matches
from functools import wraps
from inspect import signature
from os import PathLike
from pathlib import Path
from typing import Any, ParamSpec, cast, get_args

from torch import nn

from sp_lightning.core.model.patterns import LayerChoice
from sp_lightning.core.plan.choices import HABITS, ActivationChoice, Count, Mode, Share
from sp_lightning.core.plan.units import parse_bytes

P = ParamSpec("P")

_INSTEAD: dict[str, dict[str, tuple[Any, ...]]] = {
    "activations": {
        "recompute": ("checkpoint", "checkpointing", True), "keep": ("none", None, False), "offload": ("cpu", "host"),
    },
    "optimizer_on": {"cpu": ("host", "auto"), "gpu": ("device", "cuda")},
    "optimizer_overlap": {"auto": (True,), "off": (False, None, "none")},
}  # fmt: skip
"""By option and choice, values that mean the same to users of other libraries."""


def by_name(init: Callable[P, None]) -> Callable[P, None]:
    """Makes an ``__init__`` raise for positional arguments and unknown options, with the name of the user's class."""
    known = list(signature(init).parameters)[1:]

    @wraps(init)
    def checked(*args: P.args, **options: P.kwargs) -> None:
        name, given = type(args[0]).__name__, args[1:]
        if given:
            raise TypeError(
                f"{name} takes keyword arguments only, found {given[0]!r}. For example {name}(k={given[0]!r})."
            )
        for option in [each for each in options if each not in known]:
            close = get_close_matches(option, known, 1, cutoff=0.6)
            hint = f"Did you mean {close[0]}?" if close else f"Valid options: {', '.join(known)}."
            if option in HABITS:
                hint = HABITS[option]
            raise TypeError(f"{name} has no option {option!r}. {hint}")
        init(*args, **options)

    return checked


def checked_count(option: str, value: Any) -> Count:
    """Returns an integer of at least 1, or ``"auto"``."""
    if value == "auto" and isinstance(value, str):
        return "auto"
    if not _is_whole(value):
        raise TypeError(
            f'{option} must be an integer (a number of layers) or "auto", found {value!r}. For example {option}=2.'
        )
    if value < 1:
        raise ValueError(f"{option} must be at least 1, found {value}. For example {option}=1.")
    return int(value)


def _is_whole(value: Any) -> bool:
    """Returns True for an integer of any type. Tensors with a fraction have an ``__index__``, too, which raises an error."""
    with suppress(TypeError):
        return not isinstance(value, bool) and operator.index(value) is not None
    return False


def checked_share(option: str, value: Any) -> Share:
    """Returns a number of layers (an integer of at least 0), or a share of them (a float of at most 1)."""
    wanted = f"{option} must be a number of layers (8) or a share of them (0.5), found {value!r}."
    if isinstance(value, str) and value == "auto":
        raise ValueError(
            f"{wanted} The number is chosen before the run: `superpipeline plan MODEL --gpu-layers auto --gpu-memory 22GiB` "
            f"proposes one."
        )
    whole = _is_whole(value)
    if not (whole or isinstance(value, float)):
        raise TypeError(f"{wanted} For example {option}=8.")
    if not value >= 0 or (not whole and value > 1):
        raise ValueError(f"{wanted} For example {option}=0.5.")
    return int(value) if whole else value


def checked_budget(option: str, value: Any) -> int | float | None:
    """Returns a memory limit: bytes (see :func:`parse_bytes`), a share of the free memory (``"80%"``, as a float), or None."""
    percent = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*%\s*", value) if isinstance(value, str) else None
    if percent is None:
        return None if value is None else parse_bytes(option, value)
    if not 0 < float(percent[1]) <= 100:
        raise ValueError(
            f'{option} takes a share of the free memory from 0% to 100%, found {value!r}. For example "80%".'
        )
    return float(percent[1]) / 100


def checked_switch(option: str, value: Any) -> bool:
    """Returns True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"{option} must be True or False, found {value!r}.")
    return value


def checked_path(option: str, what: str, example: str, value: Any) -> Path | None:
    """Returns the path of a file or a folder, or None."""
    if value is not None and (not isinstance(value, (str, PathLike)) or value == ""):
        raise TypeError(f'{option} must be the path of {what}, found {value!r}. For example {option}="{example}".')
    return None if value is None else Path(value).expanduser()  # no shell has expanded "~/scratch" in a config


def checked_choice(option: str, choices: tuple[str, ...], value: Any) -> Any:
    """Returns the value if it is one of the choices."""
    if value not in choices:
        raise ValueError(
            f"{option} must be one of {quoted(choices)}, found {value!r}.{_instead(option, value, choices)}"
        )
    return value


def quoted(choices: Iterable[str]) -> str:
    """Returns words in quotation marks, separated by commas."""
    return ", ".join(f'"{choice}"' for choice in choices)


def _instead(option: str, value: Any, choices: Sequence[str]) -> str:
    """Returns a sentence with the choice that the value means: a misspelt one, or that of another library; empty if unknown."""
    for choice, meant in _INSTEAD.get(option, {}).items():
        if any(type(value) is type(each) and value == each for each in meant):
            return f' Use {option}="{choice}".'
    close = get_close_matches(value, choices, 1) if isinstance(value, str) else []
    return f' Did you mean {option}="{close[0]}"?' if close else ""


def checked_activations(choice: Any) -> ActivationChoice:
    """Returns one mode for all units, or modes by pattern."""
    modes = get_args(Mode)
    choices = ("auto", *modes)
    if isinstance(choice, str):
        if choice not in choices:
            raise ValueError(
                f"activations must be one of {quoted(choices)}, or a mapping, found {choice!r}."
                f"{_instead('activations', choice, choices)}"
            )
        return cast(ActivationChoice, choice)
    wanted = f'{quoted(choices)}, or a mapping: activations={{"encoder.*": "offload"}}'
    if not isinstance(choice, Mapping):
        raise TypeError(
            f"activations must be one of {wanted}, found {choice!r}.{_instead('activations', choice, choices)}"
        )
    for pattern, mode in choice.items():
        if not isinstance(pattern, str):
            raise TypeError(f"activations must be one of {wanted}, found the pattern {pattern!r}.")
        if mode not in modes:
            raise ValueError(
                f"activations={{{pattern!r}: {mode!r}}}: the mode must be one of {quoted(modes)}."
                f"{_instead('activations', mode, modes)}"
            )
    return dict(choice)


def checked_layers(layers: Any) -> LayerChoice:
    """Returns names, glob patterns and module classes as a tuple. A callable or None is returned unchanged."""
    if layers is None or (callable(layers) and not isinstance(layers, (type, nn.Module))):
        return layers
    wanted = 'names, glob patterns, module classes or a callable, for example layers=["model.layers.*"]'
    picks = (layers,) if isinstance(layers, (str, type)) else layers
    if isinstance(picks, nn.Module) or not isinstance(picks, Iterable):
        raise TypeError(f"layers= takes {wanted}; found {type(layers).__name__}.")
    picks = tuple(picks)
    if not picks:
        raise ValueError(f"layers= is empty; give {wanted}, or None to have them found.")
    for pick in picks:
        if not isinstance(pick, str) and not (isinstance(pick, type) and issubclass(pick, nn.Module)):
            raise TypeError(f"layers= takes {wanted}; found {pick!r}.")
    return picks


def checked_patterns(option: str, patterns: Any) -> tuple[str, ...]:
    """Returns names and glob patterns as a tuple."""
    picks = (patterns,) if isinstance(patterns, str) else patterns
    picks = tuple(picks) if isinstance(picks, Iterable) else (picks,)
    if not all(isinstance(pick, str) for pick in picks):
        raise TypeError(
            f'{option}= takes names or glob patterns, found {patterns!r}. For example {option}=["lm_head"].'
        )
    return picks
