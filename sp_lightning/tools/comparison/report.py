"""The report of a check, as a table and as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field

from sp_lightning.core.plan.units import human_bytes
from sp_lightning.tools.comparison.record import Compared

EQUAL, DIFFERENT, NOT_RUN = 0, 1, 2
_CAUSE = 'How to find the cause: "A result differs" in examples/guide/troubleshooting.md.'


@dataclass(frozen=True)
class RunFigures:
    """The name of a run, its seconds per training batch, and its device memory in bytes (None: unknown)."""

    name: str
    seconds: float
    device_bytes: int | None


@dataclass
class Report:
    """The result of a check.

    Attributes:
        reference: the run with which the strategy was compared, and the meaning of an equal result.
        rows: a row for each kind of compared values.
        runs: the timed runs.
        layers: the number of layers.
        streamed: the share of the bytes of weights and buffers that is offloaded.
        counted: True if ``device_bytes`` is the sum of weights, gradients and optimizer state, as on the CPU. False if it was
            measured.
        notes: other sentences for the user.
        why: the reason why nothing was compared; empty if something was compared.
    """

    reference: str = ""
    rows: dict[str, Compared] = field(default_factory=dict)
    runs: list[RunFigures] = field(default_factory=list)
    layers: int = 0
    streamed: float = 0.0
    counted: bool = True
    notes: list[str] = field(default_factory=list)
    why: str = ""

    @property
    def status(self) -> int:
        """0: everything is equal. 1: something differs. 2: nothing was compared."""
        if self.why:
            return NOT_RUN
        return DIFFERENT if any(row.first for row in self.rows.values()) else EQUAL

    @property
    def verdict(self) -> str:
        """The status in words."""
        return {EQUAL: "equal", DIFFERENT: "different", NOT_RUN: "not run"}[self.status]

    def __str__(self) -> str:
        if self.why:
            return " ".join([*(note for note in self.notes if note not in self.why), "Nothing was compared.", self.why])
        width = max(map(len, self.rows))
        lines = [self.reference, "", f"{'what':<{width}} {'tensors':>8}  result"]
        for what, row in self.rows.items():
            equal = "ran, returned nothing to compare"
            if row.tensors:
                equal = "equal"
            elif row.values:
                equal = f"equal ({row.values} values)"
            lines.append(f"{what:<{width}} {row.tensors:>8}  {row.first or equal}")
        if self.runs:  # empty if every run of the strategy raised an error
            memory = "peak of allocated memory"
            if self.counted:
                memory = "weights, gradients and optimizer state, as counted; activations are not in it"
            longest = max(len(each.name) for each in self.runs)
            lines += ["", f"time per training batch, and GPU memory ({memory}):"]
            for each in self.runs:
                size = human_bytes(each.device_bytes or 0)
                lines.append(f"  {each.name:<{longest}} {each.seconds:>9.3g} s {size:>10}")
            lines += ["", f"{self.layers} layers found; {self.streamed:.0%} of weights and buffers are offloaded."]
        cause = f" {_CAUSE}" if self.status == DIFFERENT else ""
        return "\n".join([*lines, *self.notes, f"Result: {self.verdict}.{cause}"])

    def as_json(self) -> str:
        """Returns the report as JSON. Sizes are in bytes, times in seconds."""
        return json.dumps({"status": self.status, "verdict": self.verdict, **asdict(self)}, indent=2)
