"""The base class of tensors whose values are not in host memory."""

from __future__ import annotations

from torch import Tensor


class AbsentTensor(Tensor):
    """A tensor of an optimizer's state, or a weight, whose values are elsewhere, for example in a file.

    Computing with it loads the values first.
    """

    def load(self) -> None:
        """Loads the values into new memory that the tensor owns. From then on it is an ordinary tensor."""
        raise NotImplementedError
