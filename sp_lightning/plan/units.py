"""Formats and parses numbers of bytes and of parameters."""

from __future__ import annotations

import math
import re


def human_bytes(nbytes: float) -> str:
    """Formats a number of bytes with the binary unit that fits its size."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} TiB"


def in_gib(nbytes: float) -> str:
    """Formats a number of bytes in GiB, so that figures to compare have one unit. Below 0.1 GiB a smaller unit is used."""
    gib = nbytes / 2**30
    return f"{gib:.1f} GiB" if gib >= 1 else f"{gib:.3g} GiB" if gib >= 0.1 else human_bytes(nbytes)


def number(count: float) -> str:
    """Formats a number of parameters or tokens, in billions or millions."""
    if count >= 1e8:
        return f"{count / 1e9:.2f} B"
    return f"{count / 1e6:.2f} M" if count >= 1e4 else str(count)


def enough_gib(nbytes: int) -> str:
    """Formats a number of bytes for an option: in GiB, rounded up to thousandths."""
    return f"{math.ceil(nbytes / 2**30 * 1000) / 1000:.15g}GiB"


def enough_bytes(nbytes: int) -> str:
    """Formats a number of bytes for an option: rounded up to whole MiB."""
    return f"{-(-nbytes // 2**20)}MiB"


def exact_bytes(nbytes: int) -> str:
    """Formats a number of bytes exactly for an option: in the largest unit without decimals, or in GiB with ``.5``."""
    if nbytes % 2**30 == 2**29:
        return f"{nbytes / 2**30:.15g}GiB"
    units = {
        f"{prefix}{infix}B": base**n for base, infix in ((1024, "i"), (1000, "")) for n, prefix in enumerate("KMGT", 1)
    }
    fitting = {name: size for name, size in units.items() if nbytes % size == 0} if nbytes else {}
    name = max(fitting, key=fitting.__getitem__, default="B")
    return f"{nbytes // fitting.get(name, 1)}{name}"


def parse_bytes(option: str, text: str) -> int:
    """Returns the bytes of a size with a unit. ``GB`` is 10⁹ bytes; ``GiB``, ``Gi`` and ``G`` are 2³⁰.

    Args:
        option: the name of the option, for the error.
        text: the size, for example ``"8GiB"``.

    Raises:
        ValueError: the text is not a size with a unit, or the size is zero.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(?:([KMGT])(iB?|B)?|B)\s*", text, re.IGNORECASE)
    if match is None or len(match[1]) > 20 or not float(match[1]):
        raise ValueError(
            f'{option} takes a number with a unit (B, MB, MiB, GB, GiB, …), found {text!r}. For example "8GiB".'
        )
    base = 1000 if (match[3] or "").upper() == "B" else 1024
    return int(float(match[1]) * base ** " KMGT".index((match[2] or " ").upper()))
