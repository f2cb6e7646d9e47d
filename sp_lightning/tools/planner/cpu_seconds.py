"""Costs of optimizer steps that compute longer on the CPU than they read and write memory."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

EIGHT_BITS_SECONDS = 21e-9
"""Seconds per parameter of a step of an optimizer whose state has few bits (``plan.ledger.FEW_BITS``).

Measured on two cores: ``examples/results/README.md``, Optimizer steps."""


PIECES_SECONDS = 2.3e-9
"""Seconds per parameter, with one thread, of an update that widens a 16-bit gradient and casts the weight (``updates.pieces``).

More threads divide it, until the bandwidth of host memory bounds the update. Measured on two cores, as the next one:
``examples/results/README.md``, Optimizer steps."""
NORM_SECONDS = 1.1e-9
"""The same for the norm of a 16-bit gradient, and its multiplication in the update."""


def muon_flops(matrices: Iterable[Tensor]) -> int:
    """Returns the floating-point operations of a step of ``torch.optim.Muon``: five Newton–Schulz iterations for each matrix.

    An iteration of an m × n matrix, m ≤ n, has products of m·n·m, m·m·m and m·m·n multiplications and additions.

    Args:
        matrices: of shape ``(rows, columns)``.
    """
    total = 0
    for matrix in matrices:
        m, n = sorted(matrix.shape)
        total += 5 * (2 * m * m * n + 2 * m**3 + 2 * m * m * n)
    return total
