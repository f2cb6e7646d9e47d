"""What a simulated batch takes, and why."""

from __future__ import annotations

from dataclasses import dataclass

from sp_lightning.device.timeline import Interval


@dataclass(frozen=True)
class Prediction:
    """How long a batch takes once the trace is known, and why. All times are in seconds.

    Attributes:
        seconds: from the beginning of one batch to that of the next.
        busy: seconds of work by resource: ``compute``, ``fetch``, ``drain``, ``optimizer``, ``links`` (between
            devices), ``network`` (between nodes, if there are several), ``disk`` (if something is there), ``host``
            (Python's own time), ``host memory`` (of the node).
        stalls: seconds that compute waited, by what it waited for. The keys are the index of each layer, ``gradients``
            (until they had left), ``residents``, and ``activations`` (until they had left or had come back).
        intervals: what happened when, counted from the beginning of the batch.
    """

    seconds: float
    busy: dict[str, float]
    stalls: dict[int | str, float]
    intervals: tuple[Interval, ...]

    def beside(self, other: Prediction, times: int) -> Prediction:
        """The average with so many others. What happened when is this one's."""

        def mean(mine: float, its: float) -> float:
            return (mine + times * its) / (times + 1)

        return Prediction(
            mean(self.seconds, other.seconds),
            {name: mean(busy, other.busy.get(name, 0.0)) for name, busy in self.busy.items()},
            {key: mean(self.stalls.get(key, 0.0), other.stalls.get(key, 0.0)) for key in (*self.stalls, *other.stalls)},
            self.intervals,
        )

    @property
    def binds(self) -> str:
        """The resource with the most work. No schedule is faster than that."""
        return max(self.busy, key=self.busy.__getitem__)
