"""What a run has counted."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Stats:
    """Counters since set-up.

    Attributes:
        fetched_layers: layers copied to the device.
        fetched_bytes, drained_bytes: copied to the device, rows of embeddings included, and gradients copied to the host.
        transfers: groups of layers that were fetched as one.
        demand_fetches: layers that were needed before the trace had asked for them; each stalls compute.
        host_waits: times that the host waited for compute where it could have run ahead: for the indices of rows, for sparse
            gradients, for weights that were written on the device.
        extra_slots: slots made beyond the plan because views of weights had escaped.
        peak_device_bytes: most device memory that weights and gradients took.
        stored_bytes, returned_bytes: activations copied to the host, and back.
        stall_seconds: seconds that compute waited for fetches.
        drain_stall_seconds: seconds that compute waited for gradients to leave.
        update_stall_seconds: seconds that the host waited for updates in the background.
        activation_stall_seconds: seconds that compute waited for activations to leave and to come back.
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

    @property
    def waited_seconds(self) -> float:
        """Seconds that anything was waited for."""
        return self.stall_seconds + self.drain_stall_seconds + self.update_stall_seconds + self.activation_stall_seconds
