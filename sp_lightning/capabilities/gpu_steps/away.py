"""Host parameters of layers that stay on the GPU: code that reads or writes their values lands the layer first."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from sp_lightning.core.layers.roles import ParameterRole, writes_in_place
from sp_lightning.core.torch_compat.metadata import UNCHANGED_BY_UPDATES
from sp_lightning.core.torch_compat.private import tree_leaves
from sp_lightning.core.updates.background import BackgroundUpdates

_NEED_NO_VALUES = UNCHANGED_BY_UPDATES | {
    Tensor._version.__get__,  # type: ignore[attr-defined]
    Tensor.stride,
    *(getattr(Tensor.grad, how) for how in ("__get__", "__set__", "__delete__")),
    Tensor.requires_grad.__set__,  # type: ignore[attr-defined]
    Tensor.requires_grad_,
    Tensor.register_hook,
    Tensor.register_post_accumulate_grad_hook,
    Tensor.is_contiguous,
}
"""Functions that need a parameter's attributes, gradient or hooks, but neither its values nor its storage. torch ends the process
if it frees a Python storage object whose memory must not be read, so ``is_shared`` is not among them."""


class OnGpu(ParameterRole):
    """A host parameter whose values are on the GPU alone. Code that reads or writes them lands the layer first.

    See "Note: roles of parameters" in ``updates/__init__``.
    """

    rank = 1
    _updates: BackgroundUpdates

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _NEED_NO_VALUES:
            return super().__torch_function__(func, types, args, kwargs or {})
        values = tree_leaves((args, kwargs))
        if cls.is_foreign() and not writes_in_place(func, kwargs or {}):
            cls._updates.await_work(values)  # lands the layers, and does not change the classes of parameters
            return super().__torch_function__(func, types, args, kwargs or {})
        for kind in types:
            if issubclass(kind, OnGpu):
                kind._updates.land_layers_of(values)  # after this the arguments have their ordinary classes again
        return func(*args, **(kwargs or {}))

    @classmethod
    def is_foreign(cls) -> bool:
        return not cls._updates.threads.own

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        updates = self._updates  # read first: after landing, the parameter has its ordinary class without `_updates`
        if self.is_foreign():
            updates.await_work([self])
            return ParameterRole.__deepcopy__(self, memo)
        updates.land_layers_of([self])
        return copy.deepcopy(self, memo)


def role_of(updates: BackgroundUpdates | None) -> type[OnGpu]:
    """Returns the role of the host parameters of one run.

    Args:
        updates: the updates of the run, which land layers; None if no layer stays.
    """
    return type("OnDevice", (OnGpu,), {"_updates": updates})
