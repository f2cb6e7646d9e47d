"""Chooses blocks that are divided into their parts, because they are much larger than other blocks of their class.

A convolutional network doubles its channels from stage to stage, so its last blocks have most of its weights: two blocks have 72%
of ResNet-18. Slots of several sizes do not help there (see ``core/plan/rings.py``), but smaller layers do. The blocks of a
transformer have one size, and stay whole.

The rule: if the two largest layers have more than :data:`_ENOUGH` of all weights, blocks are divided, the largest first. A block
is divided if it has more than :data:`_OUTLIER` times the bytes of the median block of its class, and more than :data:`_SHARE` of
all weights. So are the networks of an ensemble, and large parts of a divided block. Blocks of the same class and size are divided
together, because a single one that stays whole needs slots of its size. The division ends when the two largest layers have at
most :data:`_ENOUGH` of all weights, or at most :data:`_NEAR` times the least that is possible with whole modules. It begins only
if they have more than :data:`_WORTH` times this least, because each part costs the time of a layer call.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence

from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from sp_lightning.core.model.blocks import code_names, ensemble, has_parts, uses_torchscript
from sp_lightning.core.model.found import Unit, tensor_bytes
from sp_lightning.core.torch_compat.private import is_compiled

_ENOUGH = 1 / 3
_NEAR = 11 / 10
_WORTH = 4 / 3
_OUTLIER = 2
_SHARE = 1 / 16
# Dividing a block helps if its largest part has at most this share of the block.
_HELPS = 9 / 10
# A block whose own parameters have more than this share of its bytes is one layer: only calls of modules are known in advance.
_OWN_SHARE = 1 / 50


class UnevenBlocks:
    """Chooses the blocks that are divided, step by step.

    Args:
        root: the model.
    """

    def __init__(self, root: nn.Module) -> None:
        self._root = root
        self._total = _bytes(root.parameters())
        self._medians: dict[type, int] = {}  # by class, before blocks are divided
        self._uneven: set[nn.Module] = set()  # the networks of an ensemble, and all modules in divided blocks

    def next(self, streamed: Sequence[Unit], units: Collection[Unit]) -> list[nn.Module]:
        """Returns blocks of one class and size to divide now; empty if the layers are small enough or cannot be divided.

        Args:
            streamed: the units that are layers.
            units: all units.
        """
        largest = sorted((unit.nbytes for unit in streamed), reverse=True)[:2]
        if sum(largest) <= _ENOUGH * self._total:
            return []
        begins = not self._medians
        if begins:
            self._medians = _median_by_class(units)
            self._uneven = {*(ensemble(self._root, {unit.module for unit in streamed}) or ())}
        # A block with experts is not divided: its experts are layers already.
        closed = {unit.module for unit in units if unit.within or unit.expert}
        sizes = {unit: _smallest_parts(unit, closed) for unit in streamed if self._is_outlier(unit)}
        parts = {unit: each for unit, each in sizes.items() if max(each) <= _HELPS * unit.nbytes}
        least = sorted((size for unit in streamed for size in parts.get(unit, [unit.nbytes])), reverse=True)[:2]
        if not parts or sum(largest) <= (_WORTH if begins else _NEAR) * sum(least):
            return []
        first = max(parts, key=lambda unit: unit.nbytes)
        kind = type(first.module), first.nbytes
        alike = [unit.module for unit in parts if (type(unit.module), unit.nbytes) == kind]
        blocks = [module for module in alike if module is not None]
        self._uneven.update(inner for block in blocks for inner in block.modules())
        return blocks

    def _is_outlier(self, unit: Unit) -> bool:
        if unit.nbytes <= _SHARE * self._total:
            return False
        return unit.module in self._uneven or unit.nbytes > _OUTLIER * self._medians.get(type(unit.module), math.inf)


def _median_by_class(units: Iterable[Unit]) -> dict[type, int]:
    """Returns the bytes of the median unit of each class. Of two units, this is the smaller one."""
    sizes: defaultdict[type, list[int]] = defaultdict(list)
    for unit in units:
        sizes[type(unit.module)].append(unit.nbytes)
    return {kind: statistics.median_low(each) for kind, each in sizes.items()}


def _smallest_parts(unit: Unit, closed: set[nn.Module | None]) -> list[int]:
    """Returns the bytes of the smallest layers into which a unit can be divided; one number if it cannot be divided.

    Args:
        unit: the unit of a module or of a single parameter.
        closed: experts and tables. A module that contains one of them is not divided.
    """
    owned = {parameter for _, parameter in unit.parameters}
    return [*_parts(unit.module, owned, closed)] if unit.module is not None else [unit.nbytes]


def _parts(module: nn.Module, owned: set[nn.Parameter], closed: set[nn.Module | None]) -> Iterator[int]:
    if not can_be_divided(module) or not closed.isdisjoint(module.modules()):
        yield _bytes(p for p in module.parameters() if p in owned)
        return
    yield _bytes(p for p in module.parameters(recurse=False) if p in owned)
    for child in module.children():
        yield from _parts(child, owned, closed)


def _bytes(parameters: Iterable[nn.Parameter]) -> int:
    return sum(map(tensor_bytes, parameters))


def can_be_divided(module: nn.Module) -> bool:
    """Returns True if each child of a module can be a layer: the module's forward calls them, and reads no weight itself.

    A weight that is read without a call of its module is uploaded on demand, while the device waits.
    """
    if not has_parts(module) or is_compiled(module) or is_parametrized(module):
        return False
    if any(
        isinstance(child, (nn.ParameterList, nn.ParameterDict)) for child in module.children()
    ):  # these are never called
        return False
    own = _bytes(module.parameters(recurse=False))
    return (
        own <= _OWN_SHARE * _bytes(module.parameters()) and not uses_torchscript(module) and not reads_weights(module)
    )


def reads_weights(module: nn.Module) -> bool:
    """Returns True if a module's forward names a parameter of a module inside it, such as ``self.qkv.weight``.

    Also returns True if the forward has no Python code.
    """
    code = getattr(module.forward, "__code__", None)
    inside = {name.rpartition(".")[2] for child in module.children() for name, _ in child.named_parameters()}
    return code is None or not inside.isdisjoint(code_names(code))
