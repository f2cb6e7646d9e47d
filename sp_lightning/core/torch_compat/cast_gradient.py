"""A float32 gradient in the memory of the 16-bit gradient of the cast: half the bytes until something computes with it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sp_lightning.core.torch_compat.metadata import METADATA
from sp_lightning.core.torch_compat.private import make_wrapper, tree_map_only

_AS_ITS_OWN = torch.ops.aten.detach.default
"""The operator with which autograd stores a gradient in ``param.grad``. User code's ``gradient.detach()`` is another function."""


class CastGradient(Tensor):
    """The gradient that a cast passes to the master weight. Plain autograd would have converted it to float32.

    If no other gradient is added to it, autograd stores it in ``param.grad`` unconverted. The first computation with it, also by
    autograd or by a hook on a node of the graph, converts it: ``inner_tensor`` is a plain float32 tensor from then on.

    Args:
        inner_tensor: the gradient in the cast's dtype, strided. No other code uses its memory.

    Attributes:
        inner_tensor: the gradient: in the cast's dtype, or in float32 after the first computation.
    """

    inner_tensor: Tensor

    @staticmethod
    def __new__(cls, inner_tensor: Tensor) -> CastGradient:
        strides, device = inner_tensor.stride(), inner_tensor.device
        made = make_wrapper(cls, inner_tensor.shape, strides=strides, dtype=torch.float32, device=device)
        made.inner_tensor = inner_tensor
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # The gradient is widened in this method as well as in __torch_dispatch__: user code may call functions that are not
        # operators (data_ptr). A dispatch mode calls autograd's operator again, through this method.
        if func not in METADATA and func is not _AS_ITS_OWN:
            args, kwargs = tree_map_only(cls, cls.wide, (args, kwargs or {}))
        with torch.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any, kwargs: Any = None) -> Any:  # type: ignore[override]
        if func is _AS_ITS_OWN:
            return cls(args[0].inner_tensor)
        args, kwargs = tree_map_only(cls, cls.wide, (args, kwargs or {}))
        return func(*args, **kwargs)

    def wide(self) -> Tensor:
        """Returns the gradient as a plain float32 tensor, and keeps this tensor in place of the 16-bit one."""
        with torch.DisableTorchFunctionSubclass():
            self.inner_tensor = self.inner_tensor.to(torch.float32)
        return self.inner_tensor


def plain(gradients: Any) -> Any:
    """Converts the result of a call of autograd's engine to plain tensors. The result is a tuple, or empty, or None."""
    return gradients and tuple(each.wide() if type(each) is CastGradient else each for each in gradients)
