"""Counts the bytes of tensors that operators make, until they are freed."""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor

from sp_lightning.core.torch_compat.private import TorchDispatchMode, storage_id, tree_leaves


class MadeBytes(TorchDispatchMode):
    """Counts the bytes of the tensors that operators make in this mode: now, and at most."""

    most = now = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {storage_id(each.untyped_storage()) for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)}
        made = func(*args, **(kwargs or {}))
        for storage in (each.untyped_storage() for each in tree_leaves(made) if isinstance(each, Tensor)):
            if storage_id(storage) not in given:
                given.add(storage_id(storage))
                weakref.finalize(storage, self._count, -storage.nbytes())
                self._count(storage.nbytes())
        return made

    def _count(self, nbytes: int) -> None:
        self.now += nbytes
        self.most = max(self.most, self.now)
