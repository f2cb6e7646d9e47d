"""The visits of a batch (its layer calls), the speed of the machine, and the prediction that follows from both."""

from __future__ import annotations

import math
from dataclasses import dataclass

from sp_lightning.core.device.timeline import Interval, Kind

RESOURCES: dict[str, tuple[Kind, ...]] = {
    "compute": ("forward", "backward", "between"),
    "fetch": ("fetch", "return", "bring"),
    "drain": ("drain", "store", "take"),
    "optimizer": ("update",),
    "links": ("reduce",),
    "disk": ("read", "write"),
}
"""The kinds of intervals during which each resource is busy."""


@dataclass(frozen=True)
class Visit:
    """One use of some layers by a batch, in forward or in backward.

    Attributes:
        layers: indices of the layers that one module's call uses; empty for computation between layers.
        seconds: the time of the device's computation.
        backward: True for the layers' backward, after which their gradients are offloaded.
        needs: in backward, the layers whose weights are needed, in this order. The backward of an embedding needs none.
        moved: bytes of activations that are offloaded after a forward, or uploaded for a backward.
        share: the share of stacked experts that a forward uses.
        continues: True for the rest of a forward, after the call of a layer inside it (experts in a block).
    """

    layers: tuple[int, ...]
    seconds: float
    backward: bool = False
    needs: tuple[int, ...] = ()
    moved: int = 0
    share: float = 1.0
    continues: bool = False


@dataclass(frozen=True)
class Rates:
    """The speed of the machine. If no other unit is stated, values are in bytes per second.

    Attributes:
        upload, download: copies to the device, and to the host.
        update: gradients that the optimizer consumes, on the CPU or the device.
        host_memory: reads and writes of host memory.
        visit_seconds: seconds of Python for each use of layers.
        weight_seconds: additional seconds of Python for each weight of those layers.
        synchronous: True if nothing else runs during a copy, as on the CPU.
        links: gradients that are summed over the devices of a node.
        disk: reads or writes of a disk.
        update_upload, update_download: if the optimizer steps on the device, bytes that an update uploads and downloads for each
            byte of its layer's gradients; otherwise 0.
        step: gradients that the optimizer consumes in the steps of layers that stay on the device.
    """

    upload: float
    download: float
    update: float
    host_memory: float
    visit_seconds: float = 1e-4
    weight_seconds: float = 0.0
    synchronous: bool = False
    links: float = math.inf
    disk: float = math.inf
    update_upload: float = 0.0
    update_download: float = 0.0
    step: float = math.inf


@dataclass(frozen=True)
class Prediction:
    """The predicted time of a batch whose trace is known. All times are in seconds.

    Attributes:
        seconds: from the beginning of one batch to that of the next.
        busy: seconds of work by resource: ``compute``, ``fetch``, ``drain``, ``optimizer``, ``links`` (between
            devices), ``disk`` (if it is used), ``host`` (Python), ``host memory`` (of the node), ``gpu steps`` (of staying
            layers, if there are any).
        stalls: seconds that compute waited, by cause. The keys are the index of each layer, ``gradients`` (their offload),
            ``residents``, and ``activations`` (their offload and upload).
        intervals: all copies and computations, in seconds from the beginning of the batch.
    """

    seconds: float
    busy: dict[str, float]
    stalls: dict[int | str, float]
    intervals: tuple[Interval, ...]

    def beside(self, other: Prediction, times: int) -> Prediction:
        """Returns the average of this prediction and ``times`` copies of ``other``, with the intervals of this prediction."""

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
        """The resource with the most work. No schedule is faster than this work."""
        return max(self.busy, key=self.busy.__getitem__)
