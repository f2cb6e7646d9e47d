"""Optimizer state on a disk: memory that is mapped from a scratch file. A layer's pages are in memory while it is updated."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from sp_lightning.capabilities.disk.away import note_on_disk
from sp_lightning.capabilities.disk.mapped_file import MappedFile, MappedMemory, is_on_disk
from sp_lightning.core.device.layout import is_dense, whole_pages
from sp_lightning.core.device.lease import shared
from sp_lightning.core.torch_compat.modes import no_inference_mode
from sp_lightning.core.torch_compat.patched import state_of
from sp_lightning.core.torch_compat.private import tree_leaves
from sp_lightning.core.updates.state_store import Key
from sp_lightning.core.weights.layer import StreamedLayer

LEAST = 2**16
"""The least bytes of a tensor on the disk. Smaller tensors stay in memory: step counters, and the state of biases and norms."""


class StateOnDisk:
    """The optimizer state of a run. The state of some layers is in a mapped file.

    An optimizer makes new state in memory of its own. After the update, the tensors are moved into the file. Later updates read
    and write them there: the file prefetches the next layer, and writes earlier layers.

    Args:
        file: the mapped file.
        in_memory: the names of the layers whose state stays in memory.
    """

    def __init__(self, file: MappedFile, in_memory: Iterable[str]) -> None:
        self._file = file
        self._stay = frozenset(in_memory)
        # A key has several blocks if its tensors were made in several updates, or if user code has exchanged some of them.
        self._blocks = defaultdict[Key, list[MappedMemory]](list)

    def load(self, key: Key) -> None:
        """Reads the state of a layer to memory before its update, and prefetches the state of the next layer.

        Args:
            key: the layer and the user's optimizer.

        Raises:
            OSError: the disk failed.
        """
        for block in self._blocks.get(key, ()):
            block.use()

    def store(self, key: Key, part_of: Any, *, taken_over: bool = False) -> None:
        """Moves new state of a layer into the file after its update, if the layer's state is on the disk.

        Small tensors, and tensors of which user code holds a view, stay in memory.

        Args:
            key: the layer and the user's optimizer.
            part_of: the layer's part of that optimizer, with the optimizer's state.
            taken_over: True if no update has made the state.

        Raises:
            OSError: the disk failed.
        """
        if key[0].name in self._stay:
            return
        tensors = [tensor for tensor in _tensors(part_of) if _fills_its_memory(tensor)]
        before = self._blocks[key]
        blocks = [block for block in before if any(map(block.contains, tensors))]
        # A tensor in the file of an earlier run, or of another layer from which user code has taken it, is moved, too.
        new = [each for each in tensors if not any(block.contains(each) for block in blocks) and not shared(each)]
        if not taken_over:  # loaded tensors are in memory that a file or `torch.load` has given
            new = [each for each in new if _is_of_torch(each)]
        for block in before:
            if block not in blocks:
                self._file.forget(block)
        self._blocks[key] = [*blocks, self._move(new)] if new else blocks

    def _move(self, tensors: Sequence[Tensor]) -> MappedMemory:
        """Moves tensors to new memory in the file. Returns this memory."""
        block = self._file.allocate(sum(whole_pages(tensor.nbytes) for tensor in tensors), pin=False)
        block.renew()
        offset = 0
        for tensor in tensors:
            memory = block.part(offset, tensor)
            offset += whole_pages(tensor.nbytes)
            with no_inference_mode():
                tensor.data = memory.copy_(tensor)
        note_on_disk(tensors, "optimizer state")
        return block

    def absorb(self, optimizers: Iterable[Optimizer], layer_of: Callable[[nn.Parameter], StreamedLayer | None]) -> None:
        """Moves state that no update has made: the state of a checkpoint, or of an optimizer's own set-up.

        Args:
            optimizers: all optimizers of the run. No update is under way.
            layer_of: the layer that a parameter is updated with.
        """
        self._file.leave()
        before = list(chain.from_iterable(self._blocks.values()))
        self._blocks.clear()
        by_key = defaultdict[Key, list[nn.Parameter]](list)
        for optimizer in optimizers:
            for parameter in [p for group in optimizer.param_groups for p in group["params"]]:
                if (layer := layer_of(parameter)) is not None:
                    by_key[layer, optimizer].append(parameter)
        with torch.no_grad():
            for key, parameters in by_key.items():
                part_of = SimpleNamespace(state=state_of(key[1]), param_groups=[{"params": parameters}])
                self._blocks[key] = before  # layers may be divided in another way now
                self.store(key, part_of, taken_over=True)


def _tensors(optimizer: Any) -> list[Tensor]:
    """Returns all plain tensors of the state of an optimizer's parameters, each once."""
    state = state_of(optimizer)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    leaves = (leaf for p in parameters if p in state for leaf in tree_leaves(state[p]) if type(leaf) is Tensor)
    return list({id(leaf): leaf for leaf in leaves}.values())


def _fills_its_memory(tensor: Tensor) -> bool:
    """Returns True if a tensor on the CPU has :data:`LEAST` bytes or more, fills its storage, and is in no graph."""
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.device.type != "cpu" or tensor.requires_grad:
        return False
    return LEAST <= tensor.nbytes == tensor.untyped_storage().nbytes() and is_dense(tensor)


def _is_of_torch(tensor: Tensor) -> bool:
    """Returns True if no code except torch, such as NumPy or DLPack, has a tensor's memory: torch can then resize the storage."""
    return tensor.untyped_storage().resizable() or is_on_disk(tensor)
