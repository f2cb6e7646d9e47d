"""The strategy's options, checked before anything is built."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal, cast, get_args

from torch import nn

from sp_lightning.layers import LayerChoice

Overlap = Literal["auto", "off", "forward", "backward"]


def check_count(option: str, value: Any) -> None:
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{option} must be a whole number of layers, found {value!r}. For example {option}=2.")
    if value < 1:
        raise ValueError(f"{option} must be at least 1, found {value}. For example {option}=1.")


def checked_switch(option: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{option} must be True or False, found {value!r}.")
    return value


def checked_overlap(mode: Any) -> Overlap:
    if mode not in get_args(Overlap):
        raise ValueError(f"optimizer_overlap must be one of {get_args(Overlap)}, found {mode!r}.")
    return cast(Overlap, mode)


def checked_layers(layers: Any) -> LayerChoice:
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
    picks = (patterns,) if isinstance(patterns, str) else patterns
    picks = tuple(picks) if isinstance(picks, Iterable) else (picks,)
    if not all(isinstance(pick, str) for pick in picks):
        raise TypeError(
            f'{option}= takes names or glob patterns, found {patterns!r}. For example {option}=["lm_head"].'
        )
    return picks
