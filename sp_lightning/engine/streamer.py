"""The engine: one layer's forward, then its backward.

::

    host block ──fetch──▶ slot ──use──▶ device parameters ──▶ forward ──release──▶ slot may be overwritten
                  (1)          (2)            (3)               (4)        (5)
    param.grad ◀──apply── staging ◀──drain── gradient ◀── backward ◀──use── unpack ◀── fetched again
                  (9)                 (8)                    (7)              (6)

Nothing here decides where a layer lies (``plan``) or what its memory means (``slots``, ``host``); this file decides
*when*. The rule throughout: a wrong guess costs a fetch, never a result. Whoever needs a weight asks for its layer at
that moment, through one of four doors, and all four end in :meth:`Streamer._use`:

- a layer's module is called (forward hook),
- autograd unpacks a weight that it saved (saved-tensor hook),
- anything else computes with a device parameter whose layer is away (its ``__torch_function__``),
- the trace says that it will be needed soon (prefetch).

Of a large embedding only rows are asked for (``tables``), as a rule; it is a layer that comes by the third door alone.

In mixed precision some weights travel as their casts (``casts``), which only the functions get that autocast would cast
them for. Their float32 masters are, to this file, further layers: without slots, without visits, brought by the third
door alone, and everything that holds for a layer holds for them.
"""

from __future__ import annotations

import logging
import sys
import threading
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from sp_lightning.activations.calls import Activations
from sp_lightning.activations.offload import HostRing
from sp_lightning.device.device import Device, Stream, Wait
from sp_lightning.device.layout import Loan, Span, normal_mode, shared, unseen, view
from sp_lightning.device.torch_private import (
    DIFFERENTIATING,
    current_graph_task,
    interpreter_stack,
    queue_callback,
    top_saved_tensors_hooks,
    tree_leaves,
)
from sp_lightning.engine.module_hooks import attach_gates
from sp_lightning.engine.saved_tensors import Packing, packs
from sp_lightning.model.find import Found
from sp_lightning.model.wrapped import parts, stand_in
from sp_lightning.observe.stats import Stats
from sp_lightning.optim.background import Updates
from sp_lightning.plan.activation_policy import Mode
from sp_lightning.plan.plan import Plan
from sp_lightning.store.block import HostBlock, Staging
from sp_lightning.weights.buffers import OnTheDevice
from sp_lightning.weights.casts import Casts
from sp_lightning.weights.device_parameter import (
    DeviceParameter,
    DeviceParameters,
    hides_stand_ins,
    same_place,
    take_gradient,
)
from sp_lightning.weights.embedding_rows import Table
from sp_lightning.weights.gradients import Gradients
from sp_lightning.weights.prefetch import Prefetch
from sp_lightning.weights.pruned import PrunedWeights
from sp_lightning.weights.residents import Residents
from sp_lightning.weights.slots import Slot, Slots
from sp_lightning.weights.swap import Places
from sp_lightning.weights.weight_watch import WeightWatch


class _BackwardEnd:
    """What autograd calls when a graph task ends. If the task fails, autograd drops it instead: that is an end too.

    Gradients that had arrived by then are in ``param.grad``, as after any failed backward.
    """

    def __init__(self, ends: Callable[[int], None], task: int) -> None:
        self._ends = ends
        self._task = task

    def __call__(self) -> None:
        self._ends(self._task)

    def __del__(self) -> None:
        self._ends(self._task)  # does nothing the second time


class Streamer:
    """Streams the layers of one module.

    Args:
        module: the root; its parameters become views of the host store, its modules get hooks.
        found: its layers.
        plan: made for ``found``.
        device: the seam.
        pin: page-lock host memory.
        modes: what becomes of the activations of each unit; None keeps all.
        host_room: bytes of host memory that activations may take; None for no end.
        averages: modules whose buffers are on the device only for their calls within a step.
        check_writes: look for writes of weights that torch shows no sign of.
        around_rerun: a context for a forward that is run again, in backward: nobody but autograd is to see it.
        log: where the engine's warnings go; None for Lightning's log.
    """

    def __init__(
        self,
        module: nn.Module,
        found: Found,
        plan: Plan,
        device: Device,
        *,
        pin: bool,
        modes: Mapping[str, Mode] | None = None,
        host_room: int | None = None,
        averages: Sequence[nn.Module] = (),
        check_writes: bool = False,
        around_rerun: Callable[[], AbstractContextManager[None]] = nullcontext,
        log: logging.Logger | None = None,
    ) -> None:
        self.plan = plan
        self._module = module
        self.found = found
        self.device = self._device = device
        self._lock = threading.RLock()  # backward's hooks run on autograd's threads; never held across user code
        staging = self._staging = Staging(device, pin=pin)
        self._masters = {layer: each.masters for layer, each in enumerate(plan.layers) if each.masters is not None}
        self._owners = {masters: layer for layer, masters in self._masters.items()}
        self._on_demand = range(len(plan.layers), len(plan.moving))  # masters, then tables: these leave after each use
        tables = self._on_demand[len(plan.masters) :]
        layers = (*found.layers, *found.masters, *found.tables, found.residents)
        self._blocks = [
            HostBlock(layer, planned, device, staging, pin=pin, fetched_seldom=index in self._on_demand)
            for index, (layer, planned) in enumerate(zip(layers, (*plan.moving, plan.residents), strict=True))
        ]
        self._weight_watch = WeightWatch(self._blocks) if check_writes else None
        self._casts = {
            layer: Casts(self._blocks[layer], self._blocks[masters], device) for layer, masters in self._masters.items()
        }
        if pin:
            _warn_unpinned([block for index, block in enumerate(self._blocks) if index not in self._on_demand])
        self._slots = Slots(plan, self._blocks, device)
        self._gradients = Gradients(
            self._blocks, self._owners, device, staging, in_flight=plan.k_prime + 1, complete=self._layer_complete
        )
        self.updates = Updates(self._blocks, self._owners, device)
        self.on_complete: Callable[[int], None] | None = None
        """Called in the backward that was announced, with each layer whose gradients are all in ``param.grad``."""
        self.updated_early: set[int] = set()
        """The layers whose updates this backward has begun (``optimizer_overlap="backward"``)."""
        self._layer_of = {
            id(p): self._owners.get(layer, layer) for layer, block in enumerate(self._blocks) for p in block.parameters
        }
        self._parameters = [
            DeviceParameters(
                index,
                block.planned.spans,
                block.parameters,
                device.device,
                autocast=found.autocast if index in self._owners else None,
                together=self._together,
                kept_raw=_kept_raw,
                arrived=self._arrived,
                replacing=self._replacing,
                settle=self._settle_writes,
            )
            for index, block in enumerate(self._blocks)
        ]
        self._group_of = {id(host): group for group in self._parameters for host in group.hosts}
        self._tables: dict[int, Table] = {}
        for index, layer in zip(tables, found.tables, strict=True):
            embedding: Any = found.places[layer.parameters[0][1]][0].module
            reading = partial(self._reading_rows, index)
            compacted = partial(self._gradients.compacted.add, index)
            table = Table(embedding, self._blocks[index], device, pin=pin, reading=reading, compacted=compacted)
            self._parameters[index].look_up = table.look_up
            self._tables[index] = table
        stays = self._stays = set[int]()
        self._given: set[int] = set()  # addresses of memory that weights were given in this step; nothing of it leaves
        self._residents = Residents(
            self._parameters[-1],
            self._blocks[-1],
            self.updates,
            device,
            adopt=self._adopt,
            write_back=self._write_back,
            stays=stays,
        )
        self._places = Places(module, found.places, self._blocks, self._parameters, self._stand_ins_for_wrapped())
        self._index_of = {layer.name: index for index, layer in enumerate(plan.layers)}
        self.activations = Activations(
            module,
            found.units,
            modes or dict.fromkeys(found.units, "keep"),
            {name: self._index_of.get(name, self._residents.layer) for name in found.units},
            device,
            HostRing(device, pin=pin, limit=host_room),
            stays,
            self._again,
            log,
        )
        self._packing = Packing(
            self._parameters, self._slots.by_address, self._casts, self.activations.offload, device, self._reach
        )
        of_tables: dict[nn.Module, tuple[int, ...]] = {table.module: (index,) for index, table in self._tables.items()}
        self._gates = attach_gates(self, {**found.visits, **of_tables})
        self._averages = [OnTheDevice(each, device.device, in_step=lambda: self._places.on_device) for each in averages]
        for each, keeper in zip(averages, self._averages, strict=True):
            self._gates += attach_gates(keeper, {each: ()})
        self._pruned = PrunedWeights(module, device)
        # the batch: which trace, which phase was expected, whether modules hold device parameters
        self._prefetch = Prefetch(plan, self._slots, self.updates.ready)
        self._expected: str | None = None
        self._in_step = False
        self._training = False
        self._manual = False
        self._ends_with_backward = False
        # the call: how deep, hooks of its own, what is lent, what running calls pin
        self._depth = 0
        self._calls = threading.local()  # of each thread: how deep, and hooks of its own
        self._used: dict[int, Slot] = {}
        self._kept: set[int] = set()  # released, and some weights may still be kept as they were
        self._outside: set[int] = set()  # released, and somebody holds memory that some weights were given
        self._pins: defaultdict[int, int] = defaultdict(int)
        self._thread = 0  # whose step it is
        self._shared = False  # whether others use weights, too
        # the backward: open graph tasks, outermost first, and whether gradients are accumulated
        self._closed = False
        self._tasks: list[int] = []
        self._nested = False
        self._announced = False  # whether the running backward is that of the loss
        self._accumulates = False
        self._demand_fetches = 0
        self._write_backs = 0
        self._peak = 0
        self._around_rerun = around_rerun
        self.run_again = ""
        """The unit whose forward was run in backward last."""

    # ------------------------------------------------------------------ the life of a step

    def begin(self, phase: str, *, training: bool, manual: bool = False, quiet: bool = False) -> None:
        """A step begins: device parameters go into the modules, the first layers are fetched.

        Args:
            phase: name of the trace to follow.
            training: whether a backward is expected.
            manual: whether user code reads gradients and writes weights within the step (manual optimization).
            quiet: whether nothing can have written weights since the last step or :meth:`expect`.
        """
        with self._lock:
            self.abandon_backward()
            if not quiet:
                self.forget()
            if self._expected != phase:
                self._prefetch.start(phase, training=training)
            self._prefetch.trace.cyclic = quiet and not training
            self._expected = None
            self._in_step = True
            self._thread = threading.get_ident()
            self._training = training
            self._manual = manual
            self._ends_with_backward = False
            self._slots.idle_since = None
            for table in self._tables.values():
                table.used_whole = False
            if training:
                self.activations.begin()
            self._activate()
            self._fetch_ahead()

    def expect(self, phase: str, *, training: bool) -> None:
        """Nothing will write weights before the next step, which is of ``phase``: its first layers may come now."""
        with self._lock:
            self._prefetch.start(phase, training=training)
            self._expected = phase
            self._fetch_ahead()

    def await_backward(self) -> None:
        """User code has returned a loss; the step is over once its backward has ended (automatic optimization)."""
        self._ends_with_backward = True

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Around code that reads the module from outside, in the middle of a step, too: it finds the host's parameters."""
        self.updates.finish()
        with self._lock:
            active = self._places.on_device
            self._take_back_writes()
            self._deactivate()
            self.activations.remove()
        yield
        with self._lock:
            if active and self._in_step:
                self._activate()
            if self._in_step and self._training:
                self.activations.install()

    def end(self, *, settle: bool = False) -> None:
        """The step is over: host parameters are back in the modules.

        Args:
            settle: whether user code may write weights next, which no transfer may be reading then.

        Raises:
            RuntimeError: weights were written by a way that only ``check_writes`` sees.
        """
        with self._lock:
            self._compare_writes()
            self._in_step = False
            self._pins.clear()
            self._take_back_writes()
            self._deactivate()
            self.activations.remove()
            self.activations.settle()
            if self._training:
                self.forget()  # from here on hooks and optimizers may write weights unseen, through .data
            self._slots.give_back_extra()
            if self._shared:
                self._share(False)
            if settle:
                self._synchronize_uploads()

    def abort(self) -> None:
        """The step failed: as :meth:`end`, and gradients that were on their way are dropped."""
        with self._lock:
            if self._closed:
                return
            self.updates.recover()
            self._depth = 0
            self._pop_hooks(all_calls=True)
            self.abandon_backward()
            watch, self._weight_watch = self._weight_watch, None  # there is an error already
            self.end()
            self._weight_watch = watch
            self.forget()

    def abandon_backward(self) -> None:
        """A backward that failed leaves no gradients behind on their way."""
        self._tasks.clear()
        self._nested = self._announced = self._accumulates = False
        self.updated_early.clear()
        self._gradients.drop()

    def saving(self) -> AbstractContextManager[None]:
        """Around user code that builds a graph: saved weights are packed, so that the graph holds no slot."""
        return self._packing.hooks() if self._residents.layer else nullcontext()

    def announce_backward(self, loss: Tensor, *, quiet: bool) -> None:
        """``backward`` follows: once it has ended all gradients are to be on the host, before anyone reads them.

        Args:
            loss: what ``backward`` is called on.
            quiet: whether nothing can write weights between forward and backward.
        """
        if loss.requires_grad:
            loss.register_hook(partial(self._backward_begins, quiet))

    def end_without_backward(self) -> None:
        """A step that was to end with its backward had none."""
        with self._lock:
            if self._in_step and self._ends_with_backward and not self._tasks:
                self.end()

    def before_update(self, *, deferred: bool, parameters: Iterable[Tensor] = ()) -> None:
        """An optimizer's step begins; nothing may read host weights while it writes them.

        Args:
            deferred: whether updates may go on meanwhile: the step only submits some, or has submitted some already.
            parameters: that it steps; if some are the device's, they are written where no version shows it (fused).
        """
        if not deferred:
            self.updates.finish()
        with self._lock:
            self._take_back_writes()
            self._compare_writes()
            self._synchronize_uploads()
            for each in parameters:
                host = each
                if issubclass(type(each), DeviceParameter):
                    each._of.exposed.add(each._index)  # type: ignore[attr-defined]
                    host = each.host  # type: ignore[attr-defined]
                with torch.DisableTorchFunctionSubclass():  # its update may be under way, and goes on
                    if id(host) in self._group_of and host.grad is not None:
                        self._group_of[id(host)].steps += 1

    def forget(self) -> None:
        """Host weights have been or may have been written: copies on the device are out of date."""
        with self._lock:
            self._release_loose()
            self._forget_copies()
            self._residents.forget()
            self._expected = None
            if self._in_step and self._manual:
                self._activate()  # the step goes on after the optimizer's
                self._look_at_weights()

    def settle(self) -> None:
        """Between steps: user code may write weights now, which no transfer may be reading, and none has read."""
        with self._lock:
            if not self._in_step:
                self.forget()
                self._synchronize_uploads()

    def layer_of(self, parameter: nn.Parameter) -> int | None:
        """The layer of a host parameter; None if it is none of the module's."""
        return self._layer_of.get(id(parameter))

    def parameters_of(self, layer: int) -> Sequence[nn.Parameter]:
        """The host parameters of a layer, those that travel as casts included."""
        return [parameter for block in self.updates.blocks_of(layer) for parameter in block.parameters]

    def update_order(self) -> Iterator[int]:
        """What is needed first: residents, tables, then the layers as the next forward needs them."""
        residents = self._residents.layer
        order = (residents, *self._tables, *self._prefetch.order("train"), *range(residents))
        return iter(dict.fromkeys(order))

    def before_early_update(self, layer: int) -> None:
        """A layer is about to be updated in the middle of backward; a fetch of it that nobody used may be under way."""
        self.updated_early.add(layer)
        for index in (layer, self._masters.get(layer, layer)):
            self._slots.synchronize(Wait.UPDATE_AFTER_FETCH, index)
            if self._parameters[index].exposed:
                self._settle_writes(index)
                self._parameters[index].exposed.clear()  # what the device has is not to be written over the update

    def after_update(self, layer: int) -> None:
        """In the background: a layer's weights are updated; what travels of them is made anew before anybody waits for it."""
        casts = self._casts.get(layer)
        if casts is not None:
            casts.doubt()
            casts.refresh(by=Stream.UPDATE)

    def release_gradients(self, layer: int, parameters: Sequence[nn.Parameter]) -> None:
        """These parameters of a layer are updated and nobody needs their gradients any more."""
        for parameter in parameters:
            parameter.grad = None
        for block in self.updates.blocks_of(layer):
            block.release_gradients()

    def resize(self, plan: Plan) -> None:
        """Between steps: stream the same layers through the slots of another plan.

        Raises:
            torch.OutOfMemoryError: the device has no memory for them; there are no slots then, until this succeeds.
        """
        with self._lock:
            self._take_back_writes()
            self._expected = None
            self.plan = plan
            self._prefetch.follow(plan)
            self._gradients.in_flight = plan.k_prime + 1
            self._slots.resize(plan)
            self._note_peak()

    def recount(self, plan: Plan) -> None:
        """Takes a plan of the same layers and slots that counts other gradients: layers have been unfrozen."""
        self.plan = plan

    def limit_activations(self, nbytes: int | None) -> None:
        """Sets the most bytes of host memory that activations may take; None for no limit."""
        self.activations.ring.limit = nbytes

    @property
    def weight_bytes(self) -> int:
        """Device memory of slots and residents, now."""
        return self._slots.device_bytes + self._residents.nbytes

    def changed(self) -> bool:
        """Whether modules or parameters were exchanged behind our back, or changed their dtype or shape."""
        return self._places.changed()

    def thawed(self) -> bool:
        """Whether gradients are expected that the plan did not count: layers have been unfrozen."""
        blocks = zip(self._blocks, (*self.plan.moving, self.plan.residents), strict=True)
        return any(
            not planned.gradient_bytes and any(parameter.requires_grad for parameter in block.parameters)
            for block, planned in blocks
        )

    def stats(self) -> Stats:
        """The counters now."""
        self._note_peak()
        return Stats(
            fetched_layers=self._slots.fetched.total(),
            fetched_bytes=self._slots.fetched_bytes + sum(table.sent_bytes for table in self._tables.values()),
            drained_bytes=self._gradients.drained_bytes,
            transfers=self._slots.transfers,
            demand_fetches=self._demand_fetches,
            host_waits=self._write_backs
            + self._gradients.host_waits
            + sum(t.host_waits for t in self._tables.values()),
            extra_slots=self._slots.extra_slots,
            peak_device_bytes=self._peak,
            stored_bytes=self.activations.offload.stored_bytes,
            returned_bytes=self.activations.offload.returned_bytes,
            stall_seconds=self._device.stall_seconds(Wait.USE_AFTER_FETCH, Wait.USE_AFTER_RESIDENTS),
            drain_stall_seconds=self._device.stall_seconds(Wait.REUSE_AFTER_DRAIN),
            update_stall_seconds=self._device.stall_seconds(Wait.FETCH_AFTER_UPDATE, Wait.READ_AFTER_UPDATE),
            activation_stall_seconds=self._device.stall_seconds(Wait.REUSE_AFTER_STORE, Wait.USE_AFTER_RETURN),
        )

    def fetches(self) -> dict[str, int]:
        """How often each layer was fetched since set-up."""
        fetched = self._slots.fetched
        return {layer.name: fetched[index] for index, layer in enumerate(self.plan.layers)}

    def close(self) -> None:
        """Host parameters stay in the modules as ordinary CPU parameters; device memory and hooks are gone."""
        with self._lock:
            self.abort()
            self.updates.close()
            self._closed = True
            for handle in self._gates:
                handle.remove()
            self._slots.close()
            self.activations.offload.close()
            self._residents.close()
            for group in self._parameters:
                group.close()
            self._places.close()
            for each in self._averages:
                each.close()
            for block in self._blocks:
                block.unpin()
            for table in self._tables.values():
                table.unpin()
            self._staging.unpin()
            self._device.close()

    # ------------------------------------------------------------------ doors: module calls

    def enter(self, visits: Sequence[int], inputs: Any) -> Sequence[int]:
        """A module is called: its layers come and stay until :meth:`leave`. Returns which, for that."""
        if visits and visits[0] in self._tables and not hides_stand_ins(inputs):
            visits = ()  # its rows will do
        self._refuse_transforms_and_traces(visits)
        if self._masters and hides_stand_ins(inputs):
            visits = (*visits, *(self._masters[layer] for layer in visits if layer in self._masters))
        with self._lock, unseen():
            if not (self._in_step or self._tasks or self._depth):
                self.forget()  # a call outside any step: nobody knows what was written since
                self._thread = threading.get_ident()
                self._prefetch.start("outside", training=False)
            self._depth += 1
            self._notice_thread()
            self._push_hooks()
            self._activate()
            self._residents.group.sync_requires_grad()
            entered = [layer for layer in visits if not self._pins[layer]]
            self._hold(visits)  # (1) (2) (3)
            for layer in entered:
                self._parameters[layer].watch()
        return visits

    def leave(self, visits: Sequence[int], output: Any) -> None:
        """The call has returned (4) or raised: its layers may go."""
        with self._lock, unseen():
            self._depth = max(self._depth - 1, 0)
            if torch.is_grad_enabled() and visits:
                self._watch(visits, output)
            for layer in visits:
                self._pins[layer] -= 1
                # While an exception is under way its frames hold the weights; checkpoints stop their recompute by one.
                if self._pins[layer] <= 0 and layer in self._used and sys.exception() is None:
                    self._release(layer)  # (5)
            self._pop_hooks()
            if self._depth == 0 and not self._in_step and not self._tasks:
                self.end(settle=True)
            elif visits:
                self._fetch_ahead()

    @contextmanager
    def _again(self, unit: str, inputs: Any) -> Iterator[None]:
        """A unit's forward runs once more, in backward: no hook of the module's says so."""
        self._join_backward()
        self.run_again = unit
        visits = self.enter(self.found.visits[self.found.units[unit]], inputs)
        try:
            with self._around_rerun():
                yield
        finally:
            self.leave(visits, None)

    def _watch(self, visits: Sequence[int], output: Any) -> None:
        touch = partial(self._touch, tuple(visits))
        for tensor in (output,) if isinstance(output, Tensor) else tree_leaves(output):
            if isinstance(tensor, Tensor) and tensor.requires_grad and tensor.grad_fn is not None:
                tensor.register_hook(touch)

    def _touch(self, visits: tuple[int, ...], gradient: Tensor) -> None:
        """Backward has come to these layers: those above are done, and so must be the drains of those before."""
        self._join_backward()
        with self._lock, unseen():
            self._activate()
            if self._release_loose(keep=visits):
                self._fetch_ahead()
        self._gradients.make_room(visits)

    # ------------------------------------------------------------------ doors: saved tensors

    def _reach(self, layer: int, view: Callable[[Loan, Sequence[Tensor]], Tensor]) -> Tensor:
        """Autograd unpacks a weight (6). Its view is made under the lock: from then on it holds the slot."""
        self._join_backward()
        with self._lock, unseen():
            new = layer not in self._used
            if new:
                released = self._release_loose()
                self._use(layer)
                if released:
                    self._fetch_ahead()
            slot = self._used[layer]
            saved = view(slot.loan, self._slots.views(slot))
        if new:
            self._gradients.make_room((layer,))
        return saved

    # ------------------------------------------------------------------ doors: weights read elsewhere

    @contextmanager
    def _together(self, parameters: Sequence[DeviceParameter], *, casts: bool = False) -> Iterator[None]:
        """These device parameters, or their ``casts``, are there for one operation."""
        if self._closed:
            name = parameters[0]._of.spans[parameters[0]._index].name
            raise RuntimeError(
                f"{name!r} was taken within a step of a run that is over, and is used now: it has no memory any more. Take "
                f"it from its module: dict(module.named_parameters())[{name!r}]."
            )
        layers = sorted({parameter._of.layer for parameter in parameters} - {self._residents.layer})
        if casts:
            layers = [self._owners[masters] for masters in layers]
        residents = any(parameter._of.layer == self._residents.layer for parameter in parameters)
        with self._lock, unseen():
            self._notice_thread()
            if residents:
                self._residents.refresh()
                self._residents.group.ask(before_use=False)
            self._hold(layers)
        for table in [self._tables[layer] for layer in layers if layer in self._tables]:
            table.used_whole = table.used_whole or torch.is_grad_enabled()
        if self._tasks:
            self._gradients.make_room(layers)
        try:
            yield
        finally:
            with self._lock, unseen():
                for layer in layers:
                    self._pins[layer] -= 1
                if residents and not self._places.on_device:
                    self._residents.take_back_writes()
                    self._residents.group.ask(before_use=True)
                if _kept_raw() or not self._places.on_device:  # the next operation is to come through this door as well
                    self._release_loose()
                self._fetch_ahead()

    def _stand_ins_for_wrapped(self) -> dict[nn.Parameter, Any]:
        where = {
            id(part): (group, index)
            for group, block in zip(self._parameters, self._blocks, strict=True)
            for index, part in enumerate(block.parameters)
        }
        made = {}
        for host in self.found.wrapped:
            own = [where[id(part)] for _, part in parts("", host)]
            away = iter([group.away(i) for group, i in own])
            made[host] = stand_in(host, away, partial(self._bring_parts, own), partial(self._expose_parts, own))
        return made

    def _bring_parts(self, own: Sequence[tuple[DeviceParameters, int]]) -> list[Tensor]:
        """What a wrapped parameter consists of, on the device: the slot is held while somebody holds that."""
        with self._together([group.all[index] for group, index in own]):
            return [group.alias(index) for group, index in own]

    def _expose_parts(self, own: Sequence[tuple[DeviceParameters, int]]) -> None:
        """They have been written, or may be at any time, where no version shows it."""
        for group, index in own:
            group.exposed.add(index)

    @contextmanager
    def _reading_rows(self, layer: int) -> Iterator[bool]:
        """Rows of a table are gathered from the host's weight, unless all of it is on the device, where it may be written."""
        with self._lock, unseen():
            if self._updated_early(layer):
                raise RuntimeError(self._needed_again(layer, "its weights were needed again"))
            self._parameters[layer].sync_requires_grad()
            if layer not in self._slots:
                self.updates.wait(layer, Wait.FETCH_AFTER_UPDATE)
                self._adopt(layer)
            yield layer not in self._slots

    # ------------------------------------------------------------------ backward

    def _arrived(self, layer: int, index: int, parameter: Tensor) -> None:
        """(7) Autograd has put a gradient on a device parameter; (8) it leaves for the host."""
        gradient = take_gradient(parameter)
        if gradient is None:
            return
        group = self._parameters[layer]
        if gradient.dtype is not group.hosts[index].dtype:  # param.data = other: the host's follows before it gets this
            self._settle_writes(layer)
        if group.autocast is not None and group.lossless(index, gradient):
            gradient = gradient.to(group.autocast)
        self._join_backward()
        self._accumulates = True
        if self._updated_early(layer):
            raise RuntimeError(self._needed_again(layer, "another gradient arrived for it"))
        complete = self._gradients.arrived(layer, index, gradient)
        self._note_peak()
        if complete:
            self._gradients.drain(layer)

    def _layer_complete(self, layer: int) -> None:
        # Where backwards are nested (a reentrant checkpoint's), several may give one layer gradients.
        if self.on_complete is not None and self._announced and not self._nested:
            self.on_complete(layer)

    def _updated_early(self, layer: int) -> bool:
        return self._owners.get(layer, layer) in self.updated_early

    def _needed_again(self, layer: int, why: str) -> str:
        return (
            f'optimizer_overlap="backward" had updated layer {self._blocks[layer].planned.name!r} when, in the same backward, '
            f'{why}: some weights are those of the next step now. Use SuperpipelineStrategy(optimizer_overlap="forward").'
        )

    def _backward_begins(self, quiet: bool, gradient: Tensor) -> None:
        self._announced = True
        self._accumulates = True
        self._join_backward()
        with self._lock:
            for layer in [layer for layer in self._used if not self._pins[layer] and self._outdated(layer)]:
                self._release(layer)  # somebody has written or exchanged the host's
            self._compare_writes()
            if not quiet:
                self._write_back_late(self._slots.all)
                self._forget_copies()

    def _join_backward(self) -> None:
        """Have autograd call :meth:`_backward_ends` when the present graph task ends; it may be a nested one."""
        task = current_graph_task()
        if task == -1 or task in self._tasks:
            return
        with self._lock:
            if task in self._tasks:
                return
            if self._closed:
                raise RuntimeError(
                    "backward was called on a graph of a run that is over: its weights are not on the device any more. "
                    "Call it before trainer.fit (validate, test, predict) returns."
                )
            self._tasks.append(task)
            self._nested = self._nested or len(self._tasks) > 1
        end = _BackwardEnd(self._backward_ends, task)
        queue_callback(end)

    def _backward_ends(self, task: int) -> None:
        """(9) All gradients are on the host; after the outermost one the modules hold the host's parameters again."""
        if task not in self._tasks:  # without the lock: the garbage collector may call this in any thread
            return
        with self._lock:
            if self._closed or task not in self._tasks:
                return
            self._tasks = self._tasks[: self._tasks.index(task)]
            self._release_loose()
        try:
            self._gradients.settle()
        finally:  # where a user's hook raised, plain autograd would have computed no further either
            self._gradients.drop()
            if not self._tasks:
                self._outermost_backward_ended()

    def _outermost_backward_ended(self) -> None:
        with self._lock:
            self._synchronize_uploads()
            self.activations.settle()
            accumulated, self._accumulates = self._accumulates, False
            self._nested = self._announced = False
            if not self._in_step or (accumulated and self._ends_with_backward):
                self.end()
            elif accumulated and self._manual:
                # User code reads gradients and writes weights now; the next call goes on with the step.
                self._take_back_writes()
                self._deactivate()
                self._forget_copies()
                self._residents.forget()

    # ------------------------------------------------------------------ layers come and go

    def _use(self, layer: int) -> Slot:
        """The layer is on the device now; whoever called is the reason."""
        if layer in self._used:
            return self._used[layer]
        if self._outside:
            self._take_back_outside(layer)
            if layer in self._masters:
                self._take_back_outside(self._masters[layer])
        self._slots.resume()
        if layer not in self._on_demand:
            self._prefetch.trace.visit(layer)
        early = self._updated_early(layer)
        if not early and not self.updates.ready(layer):
            self.updates.wait(layer, Wait.FETCH_AFTER_UPDATE)
            self._fetch_ahead()
        if layer in self._slots and not early and self._outdated(layer):
            self._slots.forget([layer])
        if early and layer not in self._slots:
            raise RuntimeError(self._needed_again(layer, "its weights were needed again"))
        if layer not in self._slots:
            self._demand_fetches += 1
            self._fetch([(layer, self._slots.find(layer, self._prefetch.trace.next_use))])
        slot = self._slots.use(layer, backward=bool(self._tasks))
        self._used[layer] = slot
        self._note_peak()
        return slot

    def _outdated(self, layer: int) -> bool:
        """Whether the host's weights were written since the layer was fetched, as far as versions show it."""
        casts = self._casts.get(layer)
        return self._parameters[layer].stale or (casts is not None and not casts.current)

    def _hold(self, layers: Sequence[int]) -> None:
        """These layers are there, as the modules' parameters, until they are unpinned."""
        if layers:
            self._release_loose(keep=layers)
        for layer in layers:
            self._use(layer)
            self._pins[layer] += 1
        for layer in layers:
            group = self._parameters[layer]
            views = self._slots.views(self._used[layer])
            if not group.attached:
                group.attach(views[: len(group.all)])
                self._suspect(group)
            group.sync_requires_grad()
            if layer in self._masters:
                self._offer_casts(layer, views[len(group.all) :])

    def _offer_casts(self, layer: int, casts: Sequence[Tensor]) -> None:
        """The layer's casts stand for its masters, unless those are there and may be written."""
        masters = self._parameters[self._masters[layer]]
        masters.sync_requires_grad()
        masters.casts = casts if masters.layer not in self._slots and self._casts[layer].current else None

    def _release(self, layer: int) -> None:
        slot = self._used.pop(layer)
        group = self._parameters[layer]
        if group.attached:
            written = {index: group.value(index) for index in group.take_written()}
            places = self._slots.views(slot) if written else []
            outside = {index: value for index, value in written.items() if not same_place(value, places[index])}
            self._write_back(layer, written.items())
            group.detach()
            if not group.let_go():
                self._kept.add(layer)
            if outside:  # param.data = another tensor: the slot does not have it
                self._slots.forget([layer])
                self._keep_outside(layer, outside)
        else:  # used by autograd only; a view that had outlived the use before may have been written
            self._write_back_late((slot,))
        self._slots.release(slot)
        if layer in self._masters:
            self._parameters[self._masters[layer]].casts = None
        if layer in self._on_demand:
            if slot.escaped:  # views of them may be written at any time
                group.casts = None
            else:
                self._slots.forget([layer])
                group.exposed.intersection_update(group.outside)

    def _keep_outside(self, layer: int, outside: dict[int, Tensor]) -> None:
        """Whoever else holds the other memory of a weight may write it later: until then it is the weight's."""
        group = self._parameters[layer]
        group.outside = {i: value for i, value in outside.items() if i not in group.apart and shared(value)}
        group.exposed.intersection_update(group.outside)
        if group.outside:
            self._outside.add(layer)
        else:
            self._outside.discard(layer)

    def _take_back_outside(self, layer: int) -> None:
        """What was written of a layer that is away, in memory that it was given, is the host's now."""
        group = self._parameters[layer]
        if group.outside and not group.attached:
            before = list(group.unseen)
            self._slots.synchronize(Wait.UPDATE_AFTER_FETCH, layer)  # it may be coming already, as it was
            self._write_back(layer, group.outside.items())
            if group.unseen != before:
                self._slots.forget([layer])
            self._keep_outside(layer, group.outside)

    def _release_loose(self, keep: Sequence[int] = ()) -> bool:
        """Release what no running call pins. Returns whether anything was."""
        loose = [layer for layer in self._used if not self._pins[layer] and layer not in keep]
        for layer in loose:
            self._release(layer)
        let_go = {layer for layer in self._kept if self._parameters[layer].let_go()}
        self._kept -= let_go
        return bool(loose or let_go)

    def _write_back(self, layer: int, written: Iterable[tuple[int, Tensor]]) -> None:
        """Weights that were, or may have been, written on the device become the host's."""
        group = self._parameters[layer]
        for index, value in written:
            # The blocking copy in write() implies this wait; it would be needed were the copy none.
            self._device.synchronize(self._device.record(Stream.COMPUTE), Wait.WRITE_BACK_AFTER_USE)
            self._write_backs += 1
            if self._blocks[layer].write(index, value):
                if index in self._blocks[layer].apart:
                    group.set_apart(index, value)
                group.unseen[index] += 1
                group.written_back()
                group.casts = None
                if self._weight_watch is not None:
                    self._weight_watch.look_at(self._blocks[layer], index)

    def _suspect(self, group: DeviceParameters) -> None:
        if self._weight_watch is not None:
            group.expose()

    def _look_at_weights(self) -> None:
        if self._weight_watch is not None and self._in_step:
            self.updates.finish()
            self._weight_watch.look()

    def _compare_writes(self) -> None:
        if self._weight_watch is not None and self._in_step:
            self._weight_watch.compare()

    def _settle_writes(self, layer: int) -> None:
        """What may have been written of a layer through ``.data`` is the host's now."""
        with self._lock, unseen():
            group = self._parameters[layer]
            if group.attached:
                self._write_back(layer, ((index, group.value(index)) for index in group.take_written()))
            else:
                self._take_back_outside(layer)
                self._write_back_late([slot for slot in self._slots.all if slot.layer == layer])

    def _replacing(self, layer: int, index: int, value: Tensor) -> None:
        """A weight is about to be given other memory (``param.data = other``); graphs that saved views of it keep the old."""
        with self._lock, unseen():
            group = self._parameters[layer]
            self._refuse_tying(layer, index, value)
            _refuse_other_order(group.spans[index], value)
            self._given |= {value.untyped_storage().data_ptr()} - self._stays  # a weight may get its own memory back
            self._stays |= self._given
            if group.editions[index].saved:
                self._write_back(layer, [(index, group.value(index))])  # earlier writes through .data are theirs, too
                self._keep_saved(layer, index)

    def _refuse_tying(self, layer: int, index: int, value: Tensor) -> None:
        address = value.untyped_storage().data_ptr()
        slot = self._slots.by_address.get(address)
        other = (
            slot.layer if slot is not None else self._residents.layer if address == self._residents.address else None
        )
        if other is not None:
            at = self._parameters[other].at(int(value.storage_offset()) * value.element_size())
            if at is not None and (other, at) != (layer, index):
                raise RuntimeError(
                    _tied(self._parameters[layer].spans[index].name, self._parameters[other].spans[at].name)
                )

    def _keep_saved(self, layer: int, index: int) -> None:
        self._parameters[layer].editions[index].keep(self._blocks[layer].copy_of(index))

    def _write_back_late(self, slots: Iterable[Slot]) -> None:
        """A view that outlived its layer's release may have been written since; its memory is the slot's still."""
        for slot in slots:
            layer = slot.layer
            if layer is not None and layer not in self._used and slot.escaped:
                spans = self._parameters[layer].spans
                written = self._parameters[layer].take_written()
                if written:
                    self._device.access(slot.memory, Stream.COMPUTE, write=False)
                with normal_mode():
                    apart = self._parameters[layer].apart
                    values = {index: view(slot.memory, spans[index]) for index in written}
                    self._write_back(layer, ((index, apart.get(index, value)) for index, value in values.items()))

    def _fetch(self, pairs: Sequence[tuple[int, Slot]]) -> None:
        self._write_back_late(slot for _, slot in pairs)
        for layer, _ in pairs:
            self.updates.wait(layer, Wait.FETCH_AFTER_UPDATE)
            self._adopt(layer)
            casts = self._casts.get(layer)
            if casts is not None:
                self._adopt(self._masters[layer])
                if not casts.current:
                    self._slots.synchronize(Wait.CAST_AFTER_FETCH, layer)
                casts.refresh()
        self._slots.fetch(pairs)
        for layer, _ in pairs:
            self._parameters[layer].fetched()

    def _adopt(self, layer: int) -> None:
        """Take in what the user put under the layer's parameters."""
        block = self._blocks[layer]
        displaced = block.displaced
        if displaced:
            self._refuse_tied(block, displaced)
            self._synchronize_uploads()
            if layer in self._used and not self._pins[layer]:
                self._release(layer)  # what is on the device was exchanged on the host, and must not be written back
            self._slots.forget([layer])
            for index in displaced:
                self._keep_saved(layer, index)
                self._parameters[layer].unseen[index] += 1
            block.adopt()
            if layer in self._owners:  # the block's memory is the same, its values are others
                self._casts[self._owners[layer]].doubt()
            if self._weight_watch is not None:
                for index in displaced:
                    self._weight_watch.look_at(block, index)

    def _refuse_tied(self, block: HostBlock, displaced: Sequence[int]) -> None:
        mine = {block.parameters[index].data_ptr(): block.planned.spans[index].name for index in displaced}
        for other in self._blocks:
            for span, parameter, address in zip(other.planned.spans, other.parameters, other.addresses, strict=True):
                name = mine.get(address)
                if name is not None and name != span.name and parameter.data_ptr() == address and parameter.numel():
                    raise RuntimeError(_tied(name, span.name))

    def _forget_copies(self) -> None:
        """What no running call uses is out of date."""
        out_of_date = [layer for layer in range(self._residents.layer) if layer not in self._used]
        self._slots.forget(out_of_date)
        for layer in out_of_date:
            # Whoever writes weights waits for updates first, so that what is being updated was not written.
            if layer in self._casts and not self.updates.under_way(layer):
                self._casts[layer].doubt()

    def _fetch_ahead(self) -> None:
        """Fetch along the trace what there are slots for."""
        for pairs in self._prefetch.transfers():
            self._fetch(pairs)

    # ------------------------------------------------------------------ modules hold one or the other

    def _activate(self) -> None:
        """Device parameters into the modules; residents up to date."""
        if not self._places.on_device:
            self._residents.group.ask(before_use=False)
            self._places.hold_device()
            self._pruned.hold_device()
            self._look_at_weights()
        self._residents.refresh()
        self._suspect(self._residents.group)

    def _deactivate(self) -> None:
        """Host parameters into the modules."""
        if self._places.on_device:
            self._residents.group.ask(before_use=True)
            self._places.hold_host()
            self._pruned.hold_host()
            if self._weight_watch is not None:
                self._weight_watch.look_away()
            for each in self._averages:
                each.send_back()

    def _synchronize_uploads(self) -> None:
        """The host waits until no transfer reads its weights any more."""
        self._slots.synchronize(Wait.UPDATE_AFTER_FETCH)
        self._residents.synchronize()
        for layer, block in enumerate(self._blocks):
            if not self.updates.under_way(layer):  # written by whatever comes now: optimizer, hooks, callbacks
                self._device.access(block.weights, None, write=True)

    def _take_back_writes(self) -> None:
        """Every weight that was written on the device is the host's now."""
        self._release_loose()
        for layer in list(self._outside):
            self._take_back_outside(layer)
            self._keep_outside(layer, {})
        self._stays -= self._given
        self._given.clear()
        self._write_back_late(self._slots.all)
        self._residents.take_back_writes()
        for group in self._parameters:
            group.exposed.clear()

    # ------------------------------------------------------------------ small things

    def _notice_thread(self) -> None:
        """From a second thread's first use on every use of a weight comes through a door, until the step is over."""
        if self._shared or threading.get_ident() == self._thread:
            return
        if current_graph_task() == -1:  # autograd's threads come one after the other
            for layer in self._used:  # whoever uses these has not been noticed
                self._pins[layer] += 1
            self._share(True)

    def _share(self, shared: bool) -> None:
        self._shared = shared
        for group in self._parameters[:-1]:  # residents do not leave
            group.share(shared)

    def _push_hooks(self) -> None:
        """Calls outside a step, in other threads, and recomputes inside backward build graphs too."""
        calls = vars(self._calls)
        calls["depth"] = calls.get("depth", 0) + 1
        none_active = top_saved_tensors_hooks() is None
        needed = self._residents.layer or "offload" in self.activations.modes.values()
        if calls["depth"] == 1 and needed and torch.is_grad_enabled() and none_active:
            hooks = self._packing.hooks()
            hooks.__enter__()
            calls["hooks"] = hooks

    def _pop_hooks(self, *, all_calls: bool = False) -> None:
        calls = vars(self._calls)
        calls["depth"] = 0 if all_calls else max(calls.get("depth", 0) - 1, 0)
        if not calls["depth"] and "hooks" in calls:
            hooks = calls.pop("hooks")
            if packs():  # else a nested backward that failed has taken them off
                hooks.__exit__(None, None, None)

    def _refuse_transforms_and_traces(self, visits: Sequence[int]) -> None:
        if torch.jit.is_tracing():
            raise RuntimeError(
                "torch.jit.trace was called during a run: a trace would hold memory through which other layers pass. Trace the "
                "module before or after the run; in loggers, TensorBoardLogger(log_graph=False)."
            )
        stack = interpreter_stack() or ()
        if self.plan.layers and any(level.key() in DIFFERENTIATING for level in stack):
            name = self.plan.moving[visits[0] if visits else 0].name
            raise RuntimeError(
                f"torch.func.grad (or vjp, jacrev, jvp) reached the streamed layer {name!r}: these transforms keep weights "
                f"where they cannot be streamed. Use torch.autograd.grad(..., create_graph=True), or keep the layer on "
                f"the device: SuperpipelineStrategy(resident=[{name!r}])."
            )

    def _note_peak(self) -> None:
        now = self.weight_bytes + self._gradients.device_bytes
        if now > self._peak:
            self._peak = now


def _refuse_other_order(span: Span, value: Tensor) -> None:
    strides = zip(span.shape, span.stride, value.stride(), strict=False)
    if value.shape == span.shape and any(size > 1 and mine != theirs for size, mine, theirs in strides):
        raise RuntimeError(
            f"Parameter {span.name!r} has strides {span.stride} and was given memory with strides {value.stride()} inside a step "
            "(param.data = other, module.to(memory_format=…)); kernels choose by them. Give it the same order, param.data = "
            "torch.empty_like(param).copy_(other), or exchange it between two batches or before trainer.fit."
        )


def _tied(name: str, other: str) -> str:
    return (
        f"Parameter {name!r} was given the memory of {other!r} (param.data = other.data); moving them would part them "
        f"silently. Tie them by sharing one object (module_b.weight = module_a.weight), or give it a copy: "
        f"param.data = other.data.clone()."
    )


def _kept_raw() -> bool:
    return torch.is_grad_enabled() and not packs()


def _warn_unpinned(blocks: Sequence[HostBlock]) -> None:
    unpinned = sum(block.planned.nbytes for block in blocks if not block.pinned)
    if unpinned:
        warnings.warn(
            f"{unpinned / 2**30:.2f} GiB of host memory could not be page-locked (pinned): copies to the device are then "
            "synchronous and two to three times slower, results are the same. Raise the limit of locked memory, if there is "
            "one (ulimit -l), or pass pin_memory=False to go without and without this warning.",
            stacklevel=2,
        )
