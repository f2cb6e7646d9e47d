"""Buffers that must be on the same device as weights: averages of weights, and masks of pruned modules.

*Averages.* Modules such as latent diffusion's ``LitEma`` keep averages of weights in buffers. ``average.type_as(weight)`` makes a
copy if the two are on different devices, and writes to that copy are lost. Between steps these buffers are on the host, as the
weights are. In a step they are on the device, from the moment when one of them is read until the end of the step.

*Masks.* ``torch.nn.utils.prune`` keeps a mask in a buffer, ``weight_mask``. Before each forward it multiplies the mask with a
streamed parameter, ``weight_orig``, and keeps the product in a plain attribute, ``weight``. When the user prunes again between
two steps, torch computes a new mask from the product and the old mask, and multiplies it with the parameter. So all three must be
on the host between steps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.prune import BasePruningMethod

from sp_lightning.core.device.device import Device
from sp_lightning.core.device.layout import strided
from sp_lightning.core.torch_compat.modes import no_inference_mode
from sp_lightning.core.torch_compat.private import forward_pre_hooks, pruned_attribute

# If a module has at most this many buffers, they are not taken for averages: by chance, they may have the shapes of a small
# module's weights.
_FEW = 2


def find_averages(root: nn.Module) -> list[nn.Module]:
    """Finds modules that keep averages of weights in buffers.

    Such a module has no parameters. The shapes of its buffers, without scalars, are the shapes of all weights, or of all trained
    weights, of another module, in the same order.
    """
    bare = [module for module in root.modules() if not any(True for _ in module.parameters())]
    copies = {module: tuple(buffer.shape for buffer in module.buffers() if buffer.dim()) for module in bare}
    copies = {module: shapes for module, shapes in copies.items() if len(shapes) > _FEW}
    if not copies:
        return []
    weights = {tuple(p.shape for p in module.parameters()) for module in root.modules()}
    weights |= {tuple(p.shape for p in module.parameters() if p.requires_grad) for module in root.modules()}
    return [module for module, shapes in copies.items() if shapes in weights]


_Sent = tuple[dict[str, Tensor | None], str, Tensor, Tensor]
"""A buffer on the device: the module's dictionary of buffers, the name, the tensor on the host, the copy on the device."""


class AveragesOnDevice:
    """The buffers of a module: on the device after the first read within a step, and on the host after the step.

    Args:
        module: the module that has the buffers.
        device: the device to copy the buffers to.
        in_step: returns True if modules hold device parameters now.
    """

    def __init__(self, module: nn.Module, device: torch.device, in_step: Callable[[], bool]) -> None:
        self._owners = list(module.modules())
        self._device = device
        self._in_step = in_step
        self._sent: list[_Sent] = []
        for owner in self._owners:
            owner._buffers = _Buffers(owner._buffers, self._send)

    def send_back(self) -> None:
        """Copies the buffers back to the host, with all writes on the device."""
        sent, self._sent = self._sent, []
        with torch.no_grad():
            for buffers, name, host, device in sent:
                now = dict.get(buffers, name)
                if now is device:
                    buffers[name] = host.copy_(device)
                elif now is not None:  # user code has assigned another tensor in the step
                    buffers[name] = now.to(host.device)

    def close(self) -> None:
        """Copies the buffers back to the host for good, and gives the modules plain dictionaries of buffers again."""
        self.send_back()
        for owner in self._owners:
            owner._buffers = dict(dict.items(owner._buffers))

    def _send(self) -> None:
        """Copies the buffers to the device. Called before each read of a buffer; in a step, only the first call copies."""
        if self._sent or not self._in_step():
            return
        with no_inference_mode():  # copies made in inference mode could not be written in training
            self._sent = [  # set after all copies: if one copy raises (out of memory), no buffer is exchanged
                (owner._buffers, name, host, torch.empty_like(host, device=self._device).copy_(host))
                for owner in self._owners
                for name, host in dict.items(owner._buffers)
                if host is not None and host.device != self._device
            ]
        for buffers, name, _, sent in self._sent:
            buffers[name] = sent


class _Buffers(dict[str, Any]):
    """A module's dictionary of buffers that calls ``ask`` before user code reads one of them."""

    def __init__(self, buffers: dict[str, Any], ask: Callable[[], None]) -> None:
        super().__init__(buffers)
        self._ask = ask

    def __getitem__(self, name: str) -> Any:
        self._ask()
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self._ask()
        return super().get(name, default)

    def items(self) -> Any:
        self._ask()
        return super().items()

    def values(self) -> Any:
        self._ask()
        return super().values()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copies are plain dictionaries, because a copied module is a plain module."""
        return dict, (dict(self.items()),)


class PrunedWeights:
    """The masks and products of all pruned modules. If the model computes on the host, they are not copied.

    Args:
        module: the root.
        device: copies masks and products.
    """

    def __init__(self, module: nn.Module, device: Device) -> None:
        self._device = device
        self._pruned = [  # the modules with a pruned weight, and the name of that weight
            (child, pruned_attribute(hook))
            for child in ([] if device.computes_on_host else module.modules())
            for hook in forward_pre_hooks(child).values()
            if isinstance(hook, BasePruningMethod)
        ]
        # By module and name of the weight, while a step runs: the mask on the host, and its copy on the device.
        self._sent: dict[tuple[nn.Module, str], tuple[Tensor, Tensor]] = {}
        self.hold_host()

    def hold_device(self) -> None:
        """Puts the masks on the device when a step begins or continues.

        All of them are copied in each step, and back after it, because a write through ``.data`` changes no version.
        """
        for module, name in self._pruned:
            host = module._buffers.get(f"{name}_mask")
            if host is None:  # the user has made the pruning permanent
                continue
            with no_inference_mode(), torch.no_grad():
                whole = host.detach().clone()  # dense memory, whatever the strides of the user's tensor
                flat = strided(whole, 0, torch.uint8, (whole.nbytes,), (1,))
                sent = strided(self._device.send(flat), 0, whole.dtype, whole.shape, whole.stride())
            self._sent[module, name] = host, sent
            module._buffers[f"{name}_mask"] = sent

    def hold_host(self) -> None:
        """Puts masks and products on the host, after a step that has ended or was interrupted."""
        for module, name in self._pruned:
            present = module._buffers.get(f"{name}_mask")
            if present is None:
                continue
            host, sent = self._sent.pop((module, name), (present, None))
            mask = self._device.receive(present)
            if present is sent:  # else user code has set another mask
                with no_inference_mode(), torch.no_grad():
                    mask = host.copy_(mask)
            module._buffers[f"{name}_mask"] = mask
            product = vars(module).get(name)
            if isinstance(product, Tensor):
                vars(module)[name] = self._device.receive(product.detach()).requires_grad_(product.requires_grad)
