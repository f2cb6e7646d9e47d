"""The base class of tensors whose values are not in host memory."""

from __future__ import annotations

from torch import Tensor


class AbsentTensor(Tensor):
    """A tensor of an optimizer's state, or a weight, whose values are elsewhere. Computing with it brings them."""

    def bring(self) -> None:
        """Reads the values into memory of the tensor's own. From then on it is an ordinary tensor."""
        raise NotImplementedError
