"""Forwards that cannot run twice: those of other packages that are known, and the option that works with any of them."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

from torch import nn

from sp_lightning.capabilities.activations.policy import resolve
from sp_lightning.core.plan.choices import ActivationChoice, Mode, Modes

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


class Remedies(NamedTuple):
    """Makes the text that names an ``activations=`` without the units that cannot run twice.

    Attributes:
        module: the root.
        units: all units by name.
        choice: the user's ``activations=``.
    """

    module: nn.Module
    units: Mapping[str, nn.Module]
    choice: ActivationChoice

    def without(self, concerned: Collection[str]) -> str:
        """Returns the value of an ``activations=`` that offloads these units, and has the user's own patterns for the others."""
        modes: dict[str, Mode] = dict.fromkeys(_patterns(concerned, self.units), "offload")
        own: Modes = {"**": "recompute"} if isinstance(self.choice, str) else self.choice
        for pattern, mode in own.items():
            if pattern in modes:
                continue
            try:
                resolve({**modes, pattern: mode}, self.module, self.units)
            except ValueError:  # no unit remains for it, and a pattern that decides nothing raises an error
                continue
            modes[pattern] = mode
        if isinstance(self.choice, str) and "recompute" not in resolve(modes, self.module, self.units).values():
            return '"offload"'
        return json.dumps(modes)

    def explained(self, cause: str) -> str:
        """Returns a message with a cause, the units that it concerns, and the option that works with all of them.

        Args:
            cause: as :func:`known_cause` returns it.
        """
        concerned = [unit for unit, module in self.units.items() if known_cause(module) == cause]
        listed = concerned if len(concerned) <= _SHOWN else _patterns(concerned, self.units)
        return (
            f'{cause}; activations="recompute" runs a forward twice. Blocks concerned ({len(concerned)}): '
            f"{', '.join(map(repr, listed))}. Use SuperpipelineStrategy(activations={self.without(concerned)})."
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
