"""The counters of a run."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Stats:
    """Counters since set-up.

    Attributes:
        fetched_layers: how many layers were copied to the device.
        fetched_bytes: bytes of weights copied to the device, rows of embeddings included.
        drained_bytes: bytes of gradients copied to the host.
        transfers: how many groups of layers were fetched as one.
        demand_fetches: how many layers were needed before the trace had asked for them. Compute stalls for each of them.
        host_waits: how often the host waited for compute where it could have run ahead: for the indices of rows, for
            sparse gradients, for weights that were written on the device.
        extra_slots: how many slots were made beyond the plan, because somebody held views of weights.
        peak_device_bytes: the most bytes that weights and gradients took on the device.
        stored_bytes, returned_bytes: bytes of activations copied to the host, and back.
        stall_seconds: seconds that compute waited for fetches.
        drain_stall_seconds: seconds that compute waited for gradients to leave.
        update_stall_seconds: seconds that the host waited for updates in the background.
        activation_stall_seconds: seconds that compute waited for activations to leave and to come back.
        step_seconds: seconds that optimizers' steps took on the host while the device waited; 0 where the model computes on
            the host, too.
        expert_hits, expert_misses: how many stacked experts that uses of their layers have asked for were on the device when
            the use began, kept or come ahead of time, and how many had to come then. A hit may thus have travelled, too.
        expert_bytes: bytes of stacked experts copied to the device, ahead of time or not; what was saved is seen here. They
            are among ``fetched_bytes``.
        gathered_bytes: bytes of weights that came from other devices of the node, with ``transfer="sliced"``. They are among
            ``fetched_bytes``.
    """

    fetched_layers: int
    fetched_bytes: int
    drained_bytes: int
    transfers: int
    demand_fetches: int
    host_waits: int
    extra_slots: int
    peak_device_bytes: int
    stored_bytes: int
    returned_bytes: int
    stall_seconds: float
    drain_stall_seconds: float
    update_stall_seconds: float
    activation_stall_seconds: float
    step_seconds: float
    expert_hits: int = 0
    expert_misses: int = 0
    expert_bytes: int = 0
    gathered_bytes: int = 0

    @property
    def waited_seconds(self) -> float:
        """Seconds of waiting of all kinds."""
        transfers = self.stall_seconds + self.drain_stall_seconds + self.activation_stall_seconds
        return transfers + self.update_stall_seconds + self.step_seconds
