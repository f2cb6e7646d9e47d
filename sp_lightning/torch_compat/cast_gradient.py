"""A weight's float32 gradient, in the memory of its cast's: in half as many bytes, as long as nothing computes with it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sp_lightning.torch_compat.metadata import METADATA
from sp_lightning.torch_compat.private import make_wrapper, tree_map_only

_AS_ITS_OWN = torch.ops.aten.detach.default
"""The operator by which autograd makes a gradient a weight's. ``gradient.detach()`` in user code is another function."""


class CastGradient(Tensor):
    """What a cast's node hands on to its weight's: a gradient that plain autograd would have converted to float32.

    autograd makes it the weight's gradient as it is if nothing else is to be added. Whatever computes with it, autograd's sums
    and hooks of the graph's nodes included, gets one plain float32 tensor, which the gradient consists of from then on.

    Args:
        came: the gradient in the cast's dtype, strided. No other code has this memory.

    Attributes:
        came: the same; in float32 once something has computed with it.
    """

    came: Tensor

    @staticmethod
    def __new__(cls, came: Tensor) -> CastGradient:
        made = make_wrapper(cls, came.shape, strides=came.stride(), dtype=torch.float32, device=came.device)
        made.came = came
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # User code may ask for memory, too, which operators do not. A dispatch mode calls autograd's operator again.
        if func not in METADATA and func is not _AS_ITS_OWN:
            args, kwargs = tree_map_only(cls, cls.wide, (args, kwargs or {}))
        with torch.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any, kwargs: Any = None) -> Any:  # type: ignore[override]
        if func is _AS_ITS_OWN:
            return cls(args[0].came)
        args, kwargs = tree_map_only(cls, cls.wide, (args, kwargs or {}))
        return func(*args, **kwargs)

    def wide(self) -> Tensor:
        """The gradient as a plain float32 tensor."""
        with torch.DisableTorchFunctionSubclass():
            self.came = self.came.to(torch.float32)
        return self.came


def plain(gradients: Any) -> Any:
    """What a call of autograd's engine has returned, with plain tensors."""
    return gradients and tuple(each.wide() if type(each) is CastGradient else each for each in gradients)
