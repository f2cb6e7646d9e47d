"""Formats and parses numbers of bytes and of parameters."""

from __future__ import annotations

import math
import re
from numbers import Integral, Real


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


def in_one_unit(*sizes: float) -> list[str]:
    """Formats numbers of bytes that are compared, all in the unit of the largest: GiB from 0.1 GiB on, and so on."""
    units = {"GiB": 2**30, "MiB": 2**20, "KiB": 2**10}
    name, size = next(((name, size) for name, size in units.items() if max(sizes) >= 0.1 * size), ("B", 1))
    return [f"{each / size:.1f} {name}" if each >= size else f"{each / size:.3g} {name}" for each in sizes]


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


def as_option(budget: float) -> str:
    """Formats a memory limit for an option: bytes (an integer) as :func:`exact_bytes`, a share (a float) in percent."""
    return f'"{exact_bytes(budget) if isinstance(budget, int) else f"{100 * budget:g}%"}"'


def parse_bytes(option: str, size: object) -> int:
    """Returns the bytes of a size, by the one rule of all options of the strategy, the recipes and the command line.

    - Text with a unit: ``GB`` is 10⁹ bytes; ``GiB``, ``Gi`` and ``G`` are 2³⁰.
    - A number below 10,000, or its text, is GiB: ``24``, ``24.0``, ``"24"``, ``1.5``. A larger whole number is bytes.
    - Shares of a memory are not sizes: ``"80%"``, and decimals up to 1.0, which could be a share or GiB.

    Args:
        option: the name of the option, for the error.
        size: the size, for example ``"8GiB"`` or ``8``.

    Raises:
        TypeError: the size is neither text nor a number.
        ValueError: the size is zero, negative, a share, a number with an unknown unit, or 10,000 or more with a fraction.
    """
    wanted = 'a size: GiB as a number (24), or with a unit ("24GiB", "24GB", "512MiB")'
    if isinstance(size, bool) or not isinstance(size, str | Real):  # NumPy's numbers, too
        raise TypeError(f"{option} takes {wanted}, found {size!r}.")
    text = str(size) if isinstance(size, str | Integral) else f"{float(size):f}"  # YAML reads 1e9 as a float
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(?:([KMGT])(iB?|B)?|(B))?\s*", text, re.IGNORECASE)
    if match is None or len(match[1]) > 20 or not float(match[1]):
        raise ValueError(f'{option} takes {wanted}, found {size!r}. For example {option}="8GiB".')
    number, prefix, suffix, single = match.groups()
    if prefix is None and single is None:
        if "." in number and (float(number) <= 1 or (float(number) >= LARGEST_GIB and not float(number).is_integer())):
            raise ValueError(
                f'{option} takes {wanted}; {size!r} may be GiB or a share. For GiB: "{float(number):g}GiB".'
            )
        prefix = "G" if float(number) < LARGEST_GIB else ""
    base = 1000 if (suffix or "").upper() == "B" else 1024
    return int(float(number) * base ** " KMGT".index((prefix or " ").upper()))


LARGEST_GIB = 10_000
"""From this number on, a size without a unit is bytes. No machine has this many GiB, and no layer fits into as few bytes."""
