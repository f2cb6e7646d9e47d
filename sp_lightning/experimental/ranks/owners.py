"""Owners: each layer of a node is stepped by one rank, in the memory that all ranks of the node share.

A *step number* for each layer is in shared memory. The layer's owner sets it after the layer's update, and the other ranks of the
node wait for it before they read the layer. Between two steps, writes of user code to weights are private to their rank. When a
step begins, all ranks must have written the same values: each owner then copies them to the shared memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from sp_lightning.core.device.device import Wait
from sp_lightning.core.engine.host_source import HostSource
from sp_lightning.core.engine.owners import Owners
from sp_lightning.core.updates.background import TORN_IN_BACKWARD
from sp_lightning.core.updates.fused import OF_EACH
from sp_lightning.core.weights.layer import StreamedLayer
from sp_lightning.core.weights.ring import Staged
from sp_lightning.experimental.ranks.agreement import settings
from sp_lightning.experimental.ranks.block_memory import SharedBlockMemory, merge, written_in_common
from sp_lightning.experimental.ranks.gradient_copies import GradientCopies

if TYPE_CHECKING:
    from sp_lightning.core.engine.engine import Engine
    from sp_lightning.experimental.ranks.ranks import Ranks

Divided = list[tuple[dict[str, Any], dict[str, Any]]]
"""Groups of an optimizer that have only owned parameters for some time, with the user's values of the changed settings."""

ALIKE = (
    "Write the same values on all ranks, and undo a write of one rank alone before the optimizer steps. If the optimizer "
    "computes values of its groups from gradients, pass Trainer(devices=1)."
)


class RankOwners(Owners):
    """The owners of all layers, as one rank sees them.

    Args:
        ranks: the ranks.
        engine: this rank's engine.

    Attributes:
        ranks: as the argument.
        copies: copies of gradients, which user code of other ranks reads.
    """

    several = True

    def __init__(self, ranks: Ranks, engine: Engine) -> None:
        self.ranks = ranks
        self._engine = engine
        self._layers = layers = engine.layers
        self._families = [layer for layer in layers if layer.owner is layer]
        self._owner: dict[StreamedLayer, int] = {}
        self._numbers = ranks.share(8 * len(layers), "step numbers").common.view(torch.int64)
        self._counted = False  # True if `number` counts a step that has not begun yet
        self._whole: list[Divided] = []  # of steps of all layers at once that run, the innermost last
        self._common = ExitStack()
        self.copies = GradientCopies(ranks, self, layers)

    @property
    def number(self) -> int:
        """The number of steps so far. A layer that is up to date has this step number."""
        return self.ranks.stepped

    # ------------------------------------------------------------------ who owns a layer

    def assign(
        self, optimizers: Sequence[Optimizer], known: dict[nn.Parameter, int], alone: Callable[[Any], bool]
    ) -> None:
        """Assigns each layer to a rank, balanced by bytes.

        Args:
            optimizers: all optimizers.
            known: the owners so far, by parameter. Layers keep their owners. Updated with the new owners.
            alone: returns True if an optimizer steps each parameter by itself. All layers of another optimizer have one owner.

        Raises:
            RuntimeError: an optimizer that does not step each parameter by itself has got layers of several owners.
        """
        layer_of = {p: layer.owner for layer in self._layers for p in layer.block.parameters}
        together = {layer: {layer} for layer in self._families}
        for optimizer in [each for each in optimizers if not alone(each)]:
            parameters = [p for group in optimizer.param_groups for p in group["params"] if p in layer_of]
            joined = set().union(*(together[layer_of[p]] for p in parameters))
            together |= dict.fromkeys(joined, joined)
        loads = [0] * self.ranks.size
        sets = {id(each): each for each in together.values()}.values()
        for layers in sorted(sets, key=lambda each: -sum(map(_nbytes, each))):
            parameters = [p for layer in layers for member in layer.with_masters for p in member.block.parameters]
            before = {known[p] for p in parameters if p in known}
            if len(before) > 1 and len(layers) > 1:
                raise RuntimeError(
                    "An optimizer that steps all its parameters together has got layers that several devices have stepped "
                    "so far. Give it all parameters in configure_optimizers, or pass Trainer(devices=1)."
                )
            owner = before.pop() if before else min(range(len(loads)), key=lambda rank: loads[rank])
            loads[owner] += sum(map(_nbytes, layers))
            known |= dict.fromkeys(parameters, owner)
            self._owner |= dict.fromkeys(layers, owner)

    def owns(self, layer: StreamedLayer) -> bool:
        return self.rank_of(layer) == self.ranks.rank

    def rank_of(self, layer: StreamedLayer) -> int:
        """Returns the number of the rank of the node that owns a layer."""
        return self._owner.get(layer.owner, 0)

    def owner_of(self, layer: StreamedLayer) -> str:
        """Returns the name of the rank of this node that owns a layer."""
        return self.ranks.called(self.ranks.node * self.ranks.size + self.rank_of(layer))

    def _of(self, own: bool) -> list[StreamedLayer]:
        return [layer for layer in self._layers if self.owns(layer) is own]

    # ------------------------------------------------------------------ step numbers

    def publish(self, layer: StreamedLayer, number: int) -> None:
        """Tells the other ranks of the node that a layer has the weights of a step."""
        self._numbers[layer.index] = number

    def is_published(self, layer: StreamedLayer, number: int) -> bool:
        return int(self._numbers[layer.index]) >= number

    def wait_for(self, layer: StreamedLayer, number: int) -> None:
        """Waits until a layer's owner has published a step."""
        self.ranks.wait_until(self._numbers[layer.index], number, Wait.READ_AFTER_OWNER)

    # ------------------------------------------------------------------ a step

    def gather(self, optimizer: Optimizer, what: Callable[[], str]) -> None:
        """Waits for all ranks. Checks that they have written the same weights, and shares these writes.

        Raises:
            ValueError: ranks have written different weights since the last step, or have changed groups of the optimizer.
        """
        self._engine.updates.finish()
        self._prepare()
        found = {layer.name: memory_of(layer).digest(layer.planned.spans) for layer in self._layers}
        written = {("writes to weights", name): digest for name, digest in found.items() if digest}
        stepped = [p for group in optimizer.param_groups for p in group["params"]]
        written |= self.copies.written(stepped)
        self.copies.forget(stepped)
        self.ranks.compare(
            what(),
            {("owners", layer.name): self.rank_of(layer) for layer in self._families} | written | settings(optimizer),
            ALIKE,
            Wait.STEP_AFTER_ARRIVAL,
        )
        self.copies.close(stepped)
        self._merge()
        self.count()
        self._counted = False

    def count(self) -> None:
        """Counts a step: when it begins, or before, when a backward begins that may update layers."""
        self.ranks.stepped += not self._counted
        self._counted = True

    def may_begin(self, layer: StreamedLayer) -> bool:
        engine = self._engine
        if engine.updating.is_viewed(layer):
            return False
        engine.updating.before_early_update(layer)
        written = any(bool(member.block.displaced) or memory_of(member).look() for member in layer.with_masters)
        layer.updated_early = not written and not self.owns(layer)
        if layer.updated_early:
            engine.updates.torn = TORN_IN_BACKWARD
            engine.updates.refuse_uses(layer)
        return not written

    def follow(self) -> None:
        self._follow()
        for layer in self._families:
            if not self.owns(layer) and self._engine.updating.is_viewed(layer):
                self._engine.updates.complete(layer)

    def _follow(self) -> None:
        updates: Any = self._engine.updates
        for layer in self._families:
            if self.owns(layer) and layer.update is None:
                self.publish(layer, self.number)
        updates.follow([layer for layer in self._families if not self.owns(layer)])

    def begin_whole(self, optimizer: Optimizer, what: Callable[[], str]) -> None:
        if not self._whole:  # otherwise an optimizer's own code has called another one's step
            self.gather(optimizer, what)
            for layer in self._of(own=True):
                self._common.enter_context(written_in_common(layer.block))
        self._whole.append(self._divide(optimizer))

    def end_whole(self, *, well: bool) -> None:
        if not self._whole:
            return
        _undo(self._whole.pop())
        if self._whole and well:
            return
        while self._whole:
            _undo(self._whole.pop())
        self._common.close()
        if well:
            self._cast()
            self._follow()
            self._engine.updates.wait_for_all()

    def refuse_closure(self) -> None:
        if self._whole:
            raise RuntimeError(closure_again("An optimizer"))

    @contextmanager
    def divided(self, optimizers: Sequence[Optimizer]) -> Iterator[None]:
        """A context in which optimizers have only the parameters that this rank owns."""
        groups = [each for optimizer in optimizers for each in self._divide(optimizer)]
        try:
            yield
        finally:
            _undo(groups)

    def _divide(self, optimizer: Optimizer) -> Divided:
        layer_of = {p: layer for layer in self._layers for p in layer.block.parameters}
        changed: Divided = []
        for number, group in enumerate(optimizer.param_groups):
            foreign = [p for p in group["params"] if p not in layer_of and p.grad is not None]
            if foreign:
                _undo(changed)
                raise RuntimeError(
                    f"{type(optimizer).__name__} steps a parameter of shape {tuple(foreign[0].shape)} (of its group {number}) "
                    "that the module does not have: several devices do not sum its gradient. Make it an attribute of the "
                    "module, or pass Trainer(devices=1)."
                )
            at = [index for index, p in enumerate(group["params"]) if p not in layer_of or self.owns(layer_of[p])]
            lists = {key: group[key] for key in OF_EACH if key in group}
            changed.append((group, lists))
            group.update({key: [values[index] for index in at] for key, values in lists.items()})
        return changed

    # ------------------------------------------------------------------ clipping

    @contextmanager
    def changing(self, what: str) -> Iterator[None]:
        """A context in which the engine changes gradients, before the step: unscales or clips them. Collective.

        Raises:
            ValueError: ranks have written different values to gradients.
        """
        opened = self.copies.opened
        self.ranks.compare(what, self.copies.written(), ALIKE)
        self.copies.close(reopens=True)
        yield
        self.copies.reopen(opened)

    def norms(self, parameters: Sequence[nn.Parameter], own: Mapping[nn.Parameter, Tensor]) -> list[Tensor]:
        table = torch.zeros(2, len(parameters), dtype=torch.float64, device="cpu")
        for index, parameter in enumerate(parameters):
            if parameter in own:
                table[0, index], table[1, index] = torch.linalg.vector_norm(own[parameter]).double(), 1
        self.ranks.barrier("norms of gradients")
        self.ranks.add_up(table, "norms of gradients")  # zeros are added to each norm, so the sum is exact
        return [value.to(p.dtype) for p, value, there in zip(parameters, *table.unbind(), strict=True) if there]

    # ------------------------------------------------------------------ writes of user code

    @contextmanager
    def loading(self, module: nn.Module) -> Iterator[None]:
        """A context for loading a state into a module. Afterwards all ranks have the owners' values. Collective at its end.

        After each submodule is loaded, ranks drop their private pages of layers that they do not own, so that they do not keep a
        whole copy of the weights.
        """

        def drop(*_: object) -> None:
            merge(list(map(memory_of, self._of(own=False))), commit=False)

        handles = [m.register_load_state_dict_post_hook(drop) for m in module.modules() if m._parameters]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
        self._prepare()
        self.ranks.barrier("an exchange of weights", why=Wait.STEP_AFTER_ARRIVAL)
        self._merge()
        self.ranks.barrier("the end of an exchange of weights", why=Wait.READ_AFTER_OWNER)

    def fill(self) -> None:
        """Copies rank 0's weights to all nodes, and computes the casts on one rank of each node. Collective."""
        if self.ranks.nodes > 1:
            self.ranks.fill([memory_of(layer).common for layer in self._layers if self.ranks.rank == 0])
        if self.ranks.rank == 0:
            self._cast(self._layers)
        self.ranks.barrier("the first weights", why=Wait.READ_AFTER_FILL)

    def _merge(self) -> None:
        """Copies private writes to owned layers to the shared memory, with new casts. Drops private writes to other layers."""
        merge(list(map(memory_of, self._of(own=False))), commit=False)
        if merge(list(map(memory_of, self._of(own=True))), commit=True):
            self._cast()

    def _cast(self, layers: Sequence[StreamedLayer] | None = None) -> None:
        """Computes the casts of owned layers, or of these layers, in the shared memory."""
        for layer in self._of(own=True) if layers is None else layers:
            layer.casts.invalidate()
            layer.casts.refresh()

    def _prepare(self) -> None:
        """Copies weights that user code has written on the device to the host, adopts new memory, and waits for uploads."""
        with self._engine.lock:
            self._engine.step.write_back()
            source: Any = self._engine.source
            source.adopt()
            source.synchronize()


class SharedSource(HostSource):
    """The :class:`~sp_lightning.core.weights.ring.BlockSource` of several ranks.

    Owners keep the casts in shared memory up to date. If this rank's user code has written to a layer since the last step, the
    layer is uploaded from this rank's private view, with casts of its own. Private pages are not page-locked.
    """

    def adopt(self) -> None:
        """Adopts memory that user code has given to parameters of any layer."""
        for layer in self.engine.layers:
            if displaced := layer.block.displaced:
                self._adopt(layer, displaced)

    def stage(self, layer: StreamedLayer) -> Staged:
        """Returns the layer's bytes as this rank's user code sees them, in shared memory or in the private view.

        Waits for the layer's update. If this rank has written to a layer with casts, computes its casts in the private view.
        """
        self.wait(layer)
        for member in layer.with_masters:
            if displaced := member.block.displaced:
                self._adopt(member, displaced)
        written = [
            memory_of(member).look() for member in layer.with_masters
        ]  # a list, because each `look` also records its result
        if layer.masters is not None and any(written):
            memory_of(layer).written = True
            layer.casts.invalidate()
            self.engine.slots.synchronize(Wait.CAST_AFTER_FETCH, layer)
            layer.casts.refresh()
        else:
            layer.casts.mark_current()
        return layer.block.weights, None


def closure_again(name: str) -> str:
    """Returns the error message for an optimizer that needs losses of other weights within its step."""
    return (
        f"{name} calls its closure after it may have written weights. With several devices each device steps some layers only. "
        "Use an optimizer that calls its closure once, or Trainer(devices=1)."
    )


def memory_of(layer: StreamedLayer) -> SharedBlockMemory:
    """Returns the memory of a layer's block."""
    assert isinstance(layer.block.memory, SharedBlockMemory)
    return layer.block.memory


def _nbytes(layer: StreamedLayer) -> int:
    return sum(member.planned.nbytes for member in layer.with_masters)


def _undo(divided: Divided) -> None:
    for group, lists in divided:
        group.update(lists)
