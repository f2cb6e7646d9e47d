"""Moves the masks of pruned modules: within a step they are on the device, after it on the host, where the weights are.

``torch.nn.utils.prune`` keeps a mask in a buffer, ``weight_mask``, and multiplies it before each forward with a parameter,
``weight_orig``, which streams. The product stays in a plain attribute, ``weight``. When the user prunes again between two
steps, torch computes a mask from the product and the mask before, and multiplies it with the parameter. All three then have
to be on the host.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.prune import BasePruningMethod

from sp_lightning.device.device import Device
from sp_lightning.device.layout import strided
from sp_lightning.device.modes import no_inference_mode
from sp_lightning.device.torch_private import forward_pre_hooks, pruned_attribute


class PrunedWeights:
    """The masks and products of all pruned modules; none are moved if the device is the host.

    Args:
        module: the root.
        device: copies them.
    """

    def __init__(self, module: nn.Module, device: Device) -> None:
        self._device = device
        self._pruned = [] if device.computes_on_host else _find_pruned(module)
        self._masks: dict[tuple[nn.Module, str], _Mask] = {}
        self.hold_host()

    def hold_device(self) -> None:
        """Puts the masks on the device, as a step begins or goes on. Those that were not written since are there already."""
        for module, name in self._pruned:
            host = module._buffers.get(f"{name}_mask")
            mask = self._masks.get((module, name))
            if host is None:  # the user has made the pruning permanent
                continue
            if mask is None or mask.host is not host or mask.version != host._version:
                mask = self._masks[module, name] = _Mask(host, host._version, self._send(host))
            module._buffers[f"{name}_mask"] = mask.device

    def hold_host(self) -> None:
        """Brings masks and products to the host, after a step that has ended or was interrupted."""
        for module, name in self._pruned:
            present = module._buffers.get(f"{name}_mask")
            if present is None:
                continue
            mask = self._masks.get((module, name))
            at_host = mask.host if mask is not None and mask.device is present else self._device.receive(present)
            module._buffers[f"{name}_mask"] = at_host
            product = vars(module).get(name)
            if isinstance(product, Tensor):
                vars(module)[name] = self._device.receive(product.detach()).requires_grad_(product.requires_grad)

    def _send(self, host: Tensor) -> Tensor:
        with no_inference_mode(), torch.no_grad():
            whole = host.detach().clone()  # dense memory, whatever the strides of the user's tensor
            flat = strided(whole, 0, torch.uint8, (whole.nbytes,), (1,))
            return strided(self._device.send(flat), 0, whole.dtype, whole.shape, whole.stride())


class _Mask(NamedTuple):
    """A mask on the host, the version of it that was sent, and its copy on the device."""

    host: Tensor
    version: int
    device: Tensor


def _find_pruned(module: nn.Module) -> list[tuple[nn.Module, str]]:
    """The modules with a pruned weight, and the name of that weight."""
    return [
        (child, pruned_attribute(hook))
        for child in module.modules()
        for hook in forward_pre_hooks(child).values()
        if isinstance(hook, BasePruningMethod)
    ]
