"""Forwards of other packages that are known not to run twice: why, in which units, and the option that works with them."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping

from torch import nn

_KNOWN = {
    ("bitsandbytes", "Linear8bitLt"): "bitsandbytes' Linear8bitLt moves its 8-bit weights in its first forward",
    ("peft", "ParamWrapper"): "PEFT's target_parameters exchange a parameter in each forward",
}
"""By package and class: what the forward of such a module does."""

_SHOWN = 8
"""Units that a message lists by name. More are a pattern and a number."""


def known_cause(module: nn.Module) -> str | None:
    """Returns why the forward of a unit cannot run twice; empty if nothing inside it is known for that."""
    kinds = {
        (kind.__module__.partition(".")[0], kind.__name__) for each in module.modules() for kind in type(each).__mro__
    }
    return next((cause for kind, cause in _KNOWN.items() if kind in kinds), None)


def explained(cause: str, units: Mapping[str, nn.Module]) -> str:
    """Says what the cause is, which units it concerns, and the option that works with them all.

    Args:
        cause: as :func:`known_cause` returns it.
        units: all units by name.
    """
    concerned = [unit for unit, module in units.items() if known_cause(module) == cause]
    patterns = _patterns(concerned, units)
    listed = concerned if len(concerned) <= _SHOWN else patterns
    # A pattern that decides nothing is an error.
    others = [] if len(concerned) == len(units) else ['"**": "recompute"']
    modes = ", ".join([*(f'"{pattern}": "offload"' for pattern in patterns), *others])
    return (
        f'{cause}; activations="recompute" runs a forward twice. Blocks concerned ({len(concerned)}): '
        f"{', '.join(map(repr, listed))}. Use SuperpipelineStrategy(activations={{{modes}}})."
    )


def _patterns(concerned: Collection[str], units: Iterable[str]) -> list[str]:
    """Patterns that match these units and no others. Numbers become ``*`` where that is so."""
    found: dict[str, None] = {}
    for unit in concerned:
        pattern = re.sub(r"(?<![^.])\d+(?![^.])", "*", unit)
        matches = re.compile(re.escape(pattern).replace(r"\*", "[^.]+") + r"(\.|$)").match
        only = all(each in concerned for each in units if matches(each))
        found[pattern if only else unit] = None
    return list(found)
