"""Access: the four doors by which a layer is asked for, each at the moment when its weights are needed.

- a module is called (:meth:`Access.enter`, :meth:`Access.leave`, by way of :mod:`sp_lightning.engine.module_hooks`),
- autograd unpacks a weight that it saved (:meth:`Access.unpack`, by way of :mod:`sp_lightning.engine.saved_tensors`),
- anything else computes with a weight whose layer is away (:meth:`Access.on_demand`, by way of a stand-in's class),
- a table's rows are looked up (:meth:`Access.reading_rows`).

A wrong guess of the prefetch, which fetches layers before anybody asks, costs a fetch and never a result.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from sp_lightning.device.lease import Lease
from sp_lightning.device.modes import no_dispatch_modes, no_modes
from sp_lightning.device.torch_private import (
    DIFFERENTIATING,
    current_graph_task,
    interpreter_stack,
    top_saved_tensors_hooks,
    tree_leaves,
)
from sp_lightning.engine.backward import Backward
from sp_lightning.engine.exchange import Exchange
from sp_lightning.engine.host_source import HostSource, tied
from sp_lightning.engine.lent_weights import LentWeights
from sp_lightning.engine.module_hooks import Visits
from sp_lightning.engine.residency import Residency, needed_again
from sp_lightning.engine.saved_tensors import Packing, packs
from sp_lightning.engine.step import Step
from sp_lightning.weights.device_parameter import DeviceParameter, hides_stand_ins
from sp_lightning.weights.layer import Kind, StreamedLayer
from sp_lightning.weights.residents import Residents


class Access:
    """The doors; to parameters, the :class:`~sp_lightning.weights.parameter_group.Doors`.

    Args:
        lock: the engine's; it is never held across user code, and backward's hooks run on autograd's threads.
        residency, lent, source, residents, exchange, step, backward: the engine's parts below.
        layers: all of them.
        offloads: asked whether what a graph saves may leave the device.
        unit: gives the layers of a unit, by its name.
        around_rerun: a context for a forward that is run again, which nobody but autograd is to see.

    Attributes:
        depth: how many calls of modules are under way.
        run_again: the unit whose forward was run again last.
        packing: the hooks for what autograd saves; from :meth:`pack_with` on.
    """

    packing: Packing

    def __init__(
        self,
        lock: threading.RLock,
        layers: Sequence[StreamedLayer],
        residency: Residency,
        lent: LentWeights,
        source: HostSource,
        residents: Residents,
        exchange: Exchange,
        step: Step,
        backward: Backward,
        *,
        offloads: Callable[[], bool],
        unit: Callable[[str], Visits],
        around_rerun: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._lock = lock
        self._residency = residency
        self._lent = lent
        self._source = source
        self._residents = residents
        self._exchange = exchange
        self._step = step
        self._backward = backward
        moving = [layer for layer in layers if layer.kind is not Kind.RESIDENTS]
        self._moves = bool(moving)
        self._casts = any(layer.masters is not None for layer in moving)
        self._first = next((layer for layer in moving if layer.kind is Kind.BLOCK), None)
        self._offloads = offloads
        self._unit = unit
        self._around_rerun = around_rerun
        self.gradient_arrived = backward.gradient_arrived  # no detour: it is called for each gradient
        self.gradients_complete = backward.complete
        self.depth = 0
        self.run_again = ""
        self._calls = threading.local()  # of each thread: how many calls are under way, and the hooks of the outermost
        self._closed = False

    # ------------------------------------------------------------------ a module is called

    def enter(self, visits: Visits, inputs: Any) -> Visits:
        """A module is called: its layers come, and stay until :meth:`leave`. Returns which, for that."""
        if visits and visits[0].kind is Kind.TABLE and not hides_stand_ins(inputs):
            visits = ()  # its rows will do
        self._refuse_transforms_and_traces(visits)
        if self._casts and hides_stand_ins(inputs):
            visits = (*visits, *(layer.masters for layer in visits if layer.masters is not None))
        step = self._step
        with self._lock, no_dispatch_modes():
            if not (step.running or self._backward.tasks or self.depth):
                step.begin_outside()
            self.depth += 1
            self._notice_thread()
            self._push_hooks()
            step.activate()
            self._residents.group.sync_requires_grad()
            entered = [layer for layer in visits if not layer.pins]
            self._residency.begin_call(visits, backward=bool(self._backward.tasks))  # (1) (2) (3)
            for layer in entered:
                layer.parameters.watch()
        return visits

    def leave(self, visits: Visits, output: Any) -> None:
        """The call has returned (4) or raised: its layers may go (5)."""
        step = self._step
        with self._lock, no_dispatch_modes():
            self.depth = max(self.depth - 1, 0)
            if torch.is_grad_enabled() and visits:
                self._watch(visits, output)
            # While an exception is under way its frames hold the weights; checkpoints stop their recompute by one.
            self._residency.end_call(visits, release=sys.exception() is None)
            self._pop_hooks()
            if self.depth == 0 and not step.running and not self._backward.tasks:
                step.end(writes_follow=True)
            elif visits:
                self._residency.fetch_ahead()

    @contextmanager
    def rerun(self, unit: str, inputs: Any) -> Iterator[None]:
        """A unit's forward runs once more, in backward: no hook of the module says so."""
        self._backward.join()
        self.run_again = unit
        visits = self.enter(self._unit(unit), inputs)
        try:
            with self._around_rerun():
                yield
        finally:
            self.leave(visits, None)

    def _watch(self, visits: Visits, output: Any) -> None:
        pre_backward = partial(self._pre_backward, tuple(visits))
        for tensor in (output,) if isinstance(output, Tensor) else tree_leaves(output):
            if isinstance(tensor, Tensor) and tensor.requires_grad and tensor.grad_fn is not None:
                tensor.register_hook(pre_backward)

    def _pre_backward(self, visits: Visits, gradient: Tensor) -> None:
        """Backward has come to these layers: those above are done, and so must be the drains of those before."""
        self._backward.join()
        with self._lock, no_dispatch_modes():
            self._step.activate()
            self._residency.pre_backward(visits)
        self._backward.sink.make_room(visits)

    # ------------------------------------------------------------------ autograd unpacks a weight

    def pack_with(self, packing: Packing) -> None:
        """From here on what autograd saves in calls is packed."""
        self.packing = packing

    def unpack(self, layer: StreamedLayer, view: Callable[[Lease], Tensor]) -> Tensor:
        """Autograd unpacks a weight (6). Its view is made under the lock: from then on it holds the slot."""
        self._backward.join()
        residency = self._residency
        with self._lock, no_modes():
            new = residency.unpack(layer)
            saved = view(residency.used[layer].lease)
        if new:
            self._backward.sink.make_room((layer,))
        return saved

    def saves_raw(self) -> bool:
        """Whether autograd would save tensors as they are now, and not as the engine's hooks pack them."""
        return torch.is_grad_enabled() and not packs()

    # ------------------------------------------------------------------ weights are read elsewhere

    @contextmanager
    def on_demand(self, parameters: Sequence[DeviceParameter], *, casts: bool = False) -> Iterator[None]:
        """These device parameters, or their ``casts``, are there for one operation.

        Raises:
            RuntimeError: the run is over.
        """
        if self._closed:
            name = parameters[0]._of.spans[parameters[0]._index].name
            raise RuntimeError(
                f"{name!r} was taken within a step of a run that is over, and is used now: it has no memory any more. Take "
                f"it from its module: dict(module.named_parameters())[{name!r}]."
            )
        wanted = {parameter._of.layer for parameter in parameters}
        residents = self._residents.layer in wanted
        layers = sorted(wanted - {self._residents.layer}, key=lambda layer: layer.index)
        if casts:
            layers = [masters.owner for masters in layers]
        with self._lock, no_dispatch_modes():
            self._notice_thread()
            if residents:
                self._residents.refresh()
                self._residents.group.ask(before_use=False)
            self._residency.begin_call(layers, backward=bool(self._backward.tasks))
        for layer in layers:
            if layer.table is not None:
                layer.table.used_whole = layer.table.used_whole or torch.is_grad_enabled()
        if self._backward.tasks:
            self._backward.sink.make_room(layers)
        try:
            yield
        finally:
            with self._lock, no_dispatch_modes():
                self._residency.end_call(layers, release=False)
                if residents and not self._exchange.on_device:
                    self._residents.take_back_writes()
                    self._residents.group.ask(before_use=True)
                if (
                    self.saves_raw() or not self._exchange.on_device
                ):  # the next operation is to come through this door, too
                    self._residency.release_unpinned()
                self._residency.fetch_ahead()

    @contextmanager
    def reading_rows(self, layer: StreamedLayer) -> Iterator[bool]:
        """Rows of a table are gathered from the host's weight, unless all of it is on the device, where it may be written.

        Raises:
            RuntimeError: the running backward has updated the table already.
        """
        with self._lock, no_dispatch_modes():
            if layer.owner.updated_early:
                raise RuntimeError(needed_again(layer, "its weights were needed again"))
            layer.parameters.sync_requires_grad()
            if layer.slot is None:
                self._residency.release_exchanged(layer)
                self._source.stage(layer)
            yield layer.slot is None

    # ------------------------------------------------------------------ weights are written through .data

    def take_back_writes(self, layer: StreamedLayer) -> None:
        """What may have been written of a layer through ``.data`` is the host's now."""
        with self._lock, no_dispatch_modes():
            self._lent.take_back(layer)

    def replacing(self, layer: StreamedLayer, index: int, value: Tensor) -> None:
        """``param.data = value`` follows; graphs that saved views of the weight keep the old memory."""
        with self._lock, no_dispatch_modes():
            self._refuse_tying(layer, index, value)
            self._lent.replace(layer, index, value)

    def _refuse_tying(self, layer: StreamedLayer, index: int, value: Tensor) -> None:
        address = value.untyped_storage().data_ptr()
        slot = self._residency.slots.by_address.get(address)
        other = slot.layer if slot is not None else None
        if slot is None and address == self._residents.address:
            other = self._residents.layer
        if other is not None:
            at = other.parameters.at(int(value.storage_offset()) * value.element_size())
            if at is not None and (other, at) != (layer, index):
                raise RuntimeError(tied(layer.planned.spans[index].name, other.planned.spans[at].name))

    # ------------------------------------------------------------------ threads, hooks, refusals

    def reset(self) -> None:
        """The step failed: its calls are over."""
        self.depth = 0
        self._pop_hooks(all_calls=True)

    def close(self) -> None:
        """The run is over."""
        self._closed = True

    def _notice_thread(self) -> None:
        """From a second thread's first use on every use of a weight comes through a door, until the step is over."""
        if self._step.shared or threading.get_ident() == self._step.thread:
            return
        if current_graph_task() == -1:  # autograd's threads come one after the other
            for layer in self._residency.used:  # whoever uses these has not been noticed
                layer.pins += 1
            self._step.share(True)

    def _push_hooks(self) -> None:
        """Calls outside a step, in other threads, and second runs inside backward build graphs, too."""
        calls = vars(self._calls)
        calls["depth"] = calls.get("depth", 0) + 1
        none_active = top_saved_tensors_hooks() is None
        needed = self._moves or self._offloads()
        if calls["depth"] == 1 and needed and torch.is_grad_enabled() and none_active:
            hooks = self.packing.hooks()
            hooks.__enter__()
            calls["hooks"] = hooks

    def _pop_hooks(self, *, all_calls: bool = False) -> None:
        calls = vars(self._calls)
        calls["depth"] = 0 if all_calls else max(calls.get("depth", 0) - 1, 0)
        if not calls["depth"] and "hooks" in calls:
            hooks = calls.pop("hooks")
            if packs():  # else a nested backward that failed has taken them off
                hooks.__exit__(None, None, None)

    def _refuse_transforms_and_traces(self, visits: Visits) -> None:
        if torch.jit.is_tracing():
            raise RuntimeError(
                "torch.jit.trace was called during a run: a trace would hold memory through which other layers pass. Trace the "
                "module before or after the run; in loggers, TensorBoardLogger(log_graph=False)."
            )
        stack = interpreter_stack() or ()
        if self._first is not None and any(level.key() in DIFFERENTIATING for level in stack):
            name = (visits[0] if visits else self._first).name
            raise RuntimeError(
                f"torch.func.grad (or vjp, jacrev, jvp) reached the streamed layer {name!r}: these transforms keep weights "
                f"where they cannot be streamed. Use torch.autograd.grad(..., create_graph=True), or keep the layer on "
                f"the device: SuperpipelineStrategy(resident=[{name!r}])."
            )
