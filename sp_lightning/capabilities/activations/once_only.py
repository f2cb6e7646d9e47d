"""Forwards of other packages that are known not to run twice, with the reason and the option that works with them."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping

from torch import nn

_KNOWN = {
    ("bitsandbytes", "Linear8bitLt"): "bitsandbytes' Linear8bitLt moves its 8-bit weights in its first forward",
}
"""The reason, by package and class."""

_SHOWN = 8
"""The most units that a message lists by name. If there are more, it lists patterns."""


def known_cause(module: nn.Module) -> str | None:
    """Returns the reason why the forward of a unit cannot run twice; None if the unit has no module of a known class."""
    kinds = {
        (kind.__module__.partition(".")[0], kind.__name__) for each in module.modules() for kind in type(each).__mro__
    }
    return next((cause for kind, cause in _KNOWN.items() if kind in kinds), None)


def explained(cause: str, units: Mapping[str, nn.Module]) -> str:
    """Returns a message with the cause, the units that it concerns, and the option that works with all of them.

    Args:
        cause: as :func:`known_cause` returns it.
        units: all units by name.
    """
    concerned = [unit for unit, module in units.items() if known_cause(module) == cause]
    patterns = _patterns(concerned, units)
    listed = concerned if len(concerned) <= _SHOWN else patterns
    # A pattern that decides nothing raises an error, so "**" is left out if no unit remains for it.
    others = [] if len(concerned) == len(units) else ['"**": "recompute"']
    modes = ", ".join([*(f'"{pattern}": "offload"' for pattern in patterns), *others])
    return (
        f'{cause}; activations="recompute" runs a forward twice. Blocks concerned ({len(concerned)}): '
        f"{', '.join(map(repr, listed))}. Use SuperpipelineStrategy(activations={{{modes}}})."
    )


def _patterns(concerned: Collection[str], units: Iterable[str]) -> list[str]:
    """Returns patterns that match exactly these units. Indices become ``*`` if the pattern then matches no other unit."""
    found: dict[str, None] = {}
    for unit in concerned:
        # Only whole components of a name, as in "layers.3.mlp", are indices.
        pattern = re.sub(r"(?<![^.])\d+(?![^.])", "*", unit)
        matches = re.compile(re.escape(pattern).replace(r"\*", "[^.]+") + r"(\.|$)").match
        only = all(each in concerned for each in units if matches(each))
        found[pattern if only else unit] = None
    return list(found)
