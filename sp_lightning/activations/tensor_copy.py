"""A tensor with its value before a forward."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from sp_lightning.device.modes import no_dispatch_modes, no_inference_mode
from sp_lightning.device.torch_private import overlaps_itself


class TensorCopy(NamedTuple):
    """A tensor before the forward.

    Attributes:
        tensor: the tensor itself.
        before: a copy of its value.
        version: its version, which counts in-place writes.
        stays: whether the value is kept for the second run, whatever the first run does.
        trusted: whether the version shows all writes.
    """

    tensor: Tensor
    before: Tensor
    version: int
    stays: bool
    trusted: bool

    @property
    def counted(self) -> bool:
        """Whether its version has changed."""
        return self.tensor._version != self.version

    @property
    def same_bits(self) -> bool:
        """Whether its value is what it was, bit for bit."""
        with no_inference_mode(), no_dispatch_modes(), torch.no_grad():
            return torch.equal(_bytes(self.tensor), _bytes(self.before))


def can_be_copied(tensor: Tensor) -> bool:
    """Whether a tensor has memory of its own that can be put back."""
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_meta or tensor.is_inference():
        return False
    if tensor.numel() and not tensor.untyped_storage().nbytes():
        return False  # its memory is given up for the time being, as FSDP does
    return not overlaps_itself(tensor)  # an expanded tensor has its values in its base


def clone(tensor: Tensor) -> Tensor:
    """A copy of a tensor's value."""
    with no_inference_mode(), no_dispatch_modes(), torch.no_grad():
        return tensor.detach().clone()


def write(tensor: Tensor, value: Tensor) -> None:
    """Puts a value into a tensor."""
    with no_inference_mode(), no_dispatch_modes(), torch.no_grad():
        tensor.copy_(value)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1).contiguous().view(torch.uint8)
