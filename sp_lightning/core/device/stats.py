"""The counters of a run. Each part of the engine adds to the ones of its device (:attr:`Device.stats`)."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Self


@dataclass
class Stats:
    """Counters since set-up. Peaks: since the search for k has ended, if it has tried larger windows than the chosen one.

    A counter takes two places: a field of this class, and the line of the part that counts. Users and the callback read a
    :meth:`copy`. Numbers are metrics, too (``trainer.metrics``).

    Attributes:
        fetched_layers: the number of layer uploads.
        fetched_bytes: bytes of layers' weights uploaded to the device, rows of embeddings included. Uploads of residents do not
            count, although residents are uploaded again after each optimizer step.
        offloaded_gradient_bytes: bytes of gradients offloaded to the host.
        transfers: the number of transfers; each uploads a group of layers.
        demand_fetches: how often a layer was fetched because it was needed at once, without a prefetch. Compute stalls on each.
        host_waits: how often the host waited for compute and so could not run ahead: for the indices of rows, for gradients
            whose size depends on computed values, and for weights that were written on the device.
        extra_slots: the number of slots beyond the plan, allocated because all slots of a ring were in use or viewed.
        peak_device_bytes: the peak of bytes that weights, gradients and optimizer steps took on the device.
        peak_weight_bytes, peak_gradient_bytes, peak_optimizer_bytes: the parts of ``peak_device_bytes``: weights and buffers;
            gradients; and optimizer state with the memory of optimizer steps, which is 0 if all steps run on the CPU.
        peak_activation_bytes: the peak of bytes that activations took on the device: all of ``peak_allocated_bytes`` that is not
            in ``peak_device_bytes``. 0 on the CPU, where ``sp_lightning.dial`` counts activations.
        peak_allocated_bytes: the peak of bytes that torch had allocated on the device. ``torch.cuda.max_memory_allocated()``
            may be less, because each run and the choice of a window reset it. 0 on the CPU.
        offloaded_activation_bytes, uploaded_activation_bytes: bytes of activations offloaded to the host, and uploaded again.
        stall_seconds: seconds that compute stalled on uploads.
        gradient_stall_seconds: seconds that compute stalled on gradient offloading.
        update_stall_seconds: seconds that the host waited for updates in the background.
        activation_stall_seconds: seconds that compute stalled on activations that were offloaded or uploaded.
        step_seconds: seconds of optimizer steps on the host during which the device waited; 0 if the model computes on the host.
        expert_hits: the number of requested stacked experts that were on the device when the call of their layer began. They
            were prefetched, or were still in the layer's slot.
        expert_misses: the number of requested stacked experts that had to be uploaded when the call of their layer began.
        expert_bytes: bytes of stacked experts uploaded to the device, prefetched or not. ``fetched_bytes`` includes them.
        compiled_graphs: the number of graphs that ``torch.compile`` made in the process.
        step_upload_bytes, step_download_bytes: bytes of weights, gradients and state that were uploaded for steps on the GPU, and
            downloaded after them.
        fetches: the number of uploads of each block, by its name.
        fetched_bytes_by_layer: the parts of ``fetched_bytes``, by the layer's name. Masters count with their layer.
    """

    fetched_layers: int = 0
    fetched_bytes: int = 0
    offloaded_gradient_bytes: int = 0
    transfers: int = 0
    demand_fetches: int = 0
    host_waits: int = 0
    extra_slots: int = 0
    peak_device_bytes: int = 0
    offloaded_activation_bytes: int = 0
    uploaded_activation_bytes: int = 0
    stall_seconds: float = 0
    gradient_stall_seconds: float = 0
    update_stall_seconds: float = 0
    activation_stall_seconds: float = 0
    step_seconds: float = 0
    expert_hits: int = 0
    expert_misses: int = 0
    expert_bytes: int = 0
    compiled_graphs: int = 0
    peak_allocated_bytes: int = 0
    peak_weight_bytes: int = 0
    peak_gradient_bytes: int = 0
    peak_optimizer_bytes: int = 0
    peak_activation_bytes: int = 0
    step_upload_bytes: int = 0
    step_download_bytes: int = 0
    fetches: dict[str, int] = field(default_factory=dict)
    fetched_bytes_by_layer: dict[str, int] = field(default_factory=dict)

    def copy(self, **present: Any) -> Self:
        """Returns a copy that later counts do not change. ``present``: values that are read, not counted."""
        by_layer = {name: dict(value) for name, value in vars(self).items() if isinstance(value, dict)}
        return replace(self, **{**by_layer, **present})

    @property
    def waits(self) -> dict[str, float]:
        """Seconds of stalls and waits, by cause."""
        return {
            "fetches": self.stall_seconds,
            "gradient offloading": self.gradient_stall_seconds,
            "updates": self.update_stall_seconds,
            "activations": self.activation_stall_seconds,
            "optimizers' steps": self.step_seconds,
        }

    @property
    def waited_seconds(self) -> float:
        """Seconds of all stalls and waits together."""
        return sum(self.waits.values())
