"""The answer of a check: as a table for people, and as JSON for programs."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field

from sp_lightning.comparison.record import Compared
from sp_lightning.plan.units import human_bytes

EQUAL, DIFFERENT, NOT_RUN = 0, 1, 2


@dataclass(frozen=True)
class RunFigures:
    """A run's name, its seconds for each training batch, and the device memory that it took, in bytes (None: not known)."""

    name: str
    seconds: float
    device_bytes: int | None


@dataclass
class Report:
    """What a check has found.

    Attributes:
        reference: what the strategy was compared with, and what that proves.
        rows: by what was compared.
        runs: those that were timed.
        layers: how many layers were found.
        streamed: the share of the weights and buffers, by bytes, that streams.
        counted: whether ``device_bytes`` are counted (weights, gradients, optimizer state), as on the CPU, or measured.
        notes: what else there is to know, in sentences.
        explanation: what a difference comes from, in sentences.
        why: why nothing was compared; empty if something was.
    """

    reference: str = ""
    rows: dict[str, Compared] = field(default_factory=dict)
    runs: list[RunFigures] = field(default_factory=list)
    layers: int = 0
    streamed: float = 0.0
    counted: bool = True
    notes: list[str] = field(default_factory=list)
    explanation: list[str] = field(default_factory=list)
    why: str = ""

    @property
    def status(self) -> int:
        """0: all is equal. 1: something differs. 2: nothing was compared."""
        if self.why:
            return NOT_RUN
        return DIFFERENT if any(row.first for row in self.rows.values()) else EQUAL

    @property
    def verdict(self) -> str:
        """The answer in one word or two."""
        return {EQUAL: "equal", DIFFERENT: "different", NOT_RUN: "not run"}[self.status]

    def __str__(self) -> str:
        if self.why:
            return " ".join([*(note for note in self.notes if note not in self.why), "Nothing was compared.", self.why])
        width = max(map(len, self.rows))
        lines = [self.reference, "", f"{'what':<{width}} {'tensors':>8}  result"]
        for what, row in self.rows.items():
            equal = "equal" if row.tensors else f"equal ({row.values} values)" if row.values else "nothing returned"
            lines.append(f"{what:<{width}} {row.tensors:>8}  {row.first or equal}")
        if self.runs:  # else the strategy has stopped each time
            memory = (
                "weights, gradients and optimizer state, as counted" if self.counted else "the most that was allocated"
            )
            longest = max(len(each.name) for each in self.runs)
            lines += ["", f"time per training batch, and device memory ({memory}):"]
            for each in self.runs:
                size = human_bytes(each.device_bytes or 0)
                lines.append(f"  {each.name:<{longest}} {each.seconds:>9.3g} s {size:>10}")
            lines += ["", f"{self.layers} layers found; {self.streamed:.0%} of weights and buffers are offloaded."]
        return "\n".join([*lines, *self.notes, *self.explanation, f"Result: {self.verdict}."])

    def as_json(self) -> str:
        """The same for programs; bytes and seconds."""
        return json.dumps({"status": self.status, "verdict": self.verdict, **asdict(self)}, indent=2)
