"""The engine object: it makes the parts, and takes the calls of ``trainer``."""

from __future__ import annotations

import logging
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from sp_lightning.core.device.closing import close_all
from sp_lightning.core.device.device import Device, Wait
from sp_lightning.core.device.own_threads import OwnThreads
from sp_lightning.core.device.stats import Stats
from sp_lightning.core.engine.activations import KeepAll, MakeActivations
from sp_lightning.core.engine.backward import Backward
from sp_lightning.core.engine.placement import ONE_DEVICE, Placement
from sp_lightning.core.engine.saved_tensors import SavedTensors, packs
from sp_lightning.core.engine.schedule import Prefetch, Residency
from sp_lightning.core.engine.step import Step, StepKind
from sp_lightning.core.engine.uses import Calls, ModuleCall, Uses, listen
from sp_lightning.core.model.found import Found, tensor_bytes
from sp_lightning.core.model.rows import row_finder
from sp_lightning.core.model.wrapped import parts, stand_in
from sp_lightning.core.plan.plan import Plan
from sp_lightning.core.store.block_memory import Allocate, BlockMemory, Staging
from sp_lightning.core.torch_compat.patched import unwatch, watch
from sp_lightning.core.torch_compat.private import compiled_graphs
from sp_lightning.core.updates.layer_stepper import LayerStepper
from sp_lightning.core.updates.updating import Updating
from sp_lightning.core.weights.bound_weights import BoundWeights
from sp_lightning.core.weights.buffers import AveragesOnDevice, PrunedWeights
from sp_lightning.core.weights.compiled_calls import CompiledCalls, compiled_calls
from sp_lightning.core.weights.host_casts import Casts
from sp_lightning.core.weights.layer import Kind, StreamedLayer, kinds
from sp_lightning.core.weights.parameter_group import ParameterGroup
from sp_lightning.core.weights.residents import Residents
from sp_lightning.core.weights.ring import Slots
from sp_lightning.core.weights.swap import ParameterSwap
from sp_lightning.core.weights.writes import WriteBack

MakeStepper = Callable[[Device, Plan, bool], LayerStepper]
"""Makes the part that steps layers on the GPU. Arguments: the device, the plan, the run's updates, True if memory is pinned."""


class Engine:
    """Streams the layers of one module.

    Each part in this folder gets the engine as its only argument, and finds the other parts in its attributes. The order in which
    :meth:`__init__` makes them says what a part may use: when it is made, those before it; in a step, all.

    Args:
        module: the root. Its parameters become views of the host store, and its modules' calls are listened to.
        found: the module's layers.
        plan: the plan that was made for ``found``.
        device: the device.
        pin: True if host memory is page-locked.
        placement: makes the parts that depend on the number of devices.
        make_activations: makes the part that carries out the modes of activations. By default all stay on the device.
        averages: modules whose buffers are on the device from their first use in a step until the end of the step.
        threads: the threads that belong to the run; None: the present one.
        make_stepper: makes the part that steps layers on the GPU; None if no plan of the run steps layers there.
        log: the logger for the engine's warnings; None for Lightning's.

    Attributes:
        lock: guards the data of all parts. Hooks in backward run on autograd's threads. It is never held while user code runs.
        closed: True after the run: later uses of device parameters and later backwards are errors.
        layers: all layers. The residents are last.
        visits: by module, the layers that a call of the module uses, without tables.
        device_storages: the addresses of storages that are on the device in any case, beside the slots.
        stepper: steps layers on the GPU.
        count_saved: None, or a function that a tool sets between two steps to count activations. It gets each tensor that
            autograd saves and that stays on the device, also when a forward runs again. Its result is held as long as the tensor.
    """

    def __init__(
        self,
        module: nn.Module,
        found: Found,
        plan: Plan,
        device: Device,
        *,
        pin: bool,
        placement: Placement = ONE_DEVICE,
        make_activations: MakeActivations = KeepAll,
        averages: Sequence[nn.Module] = (),
        threads: OwnThreads | None = None,
        make_stepper: MakeStepper | None = None,
        log: logging.Logger | None = None,
    ) -> None:
        self.module, self.found, self.plan, self.device = module, found, plan, device
        self.pin, self.log = pin, log
        device.begin_peak(forget=True)  # torch counts per process, which may have had other runs
        self.lock = threading.RLock()
        self.threads = threads or OwnThreads()
        self.closed = False
        self._staying = found.staying[0]
        self._staying_gradients = 0

        # Memory on the host and on the device, activations, and updates.
        self.staging = Staging(device, pin=pin)
        self.layers = _make_layers(self, placement)
        *moving, residents = self.layers
        masters = (f"{layer.name}, float32" for layer in plan.masters)
        device.layer_names = [*(layer.name for layer in plan.layers), *masters, *(table.name for table in plan.tables)]
        self.visits = {module: tuple(self.layers[index] for index in used) for module, used in found.visits.items()}
        self._embeddings = row_finder().make_rows(found, self.layers, device, log, pin=pin)
        self.device_storages: set[int] = set()
        self.count_saved: Callable[[Tensor], Any] | None = None
        self.activations = make_activations(self)
        self.slots = Slots(plan, moving, device, placement.uploads(self))
        self.gradients = placement.gradients(self)
        self.stepper = LayerStepper()
        if make_stepper is not None and plan.steps_on_device:
            self.stepper = make_stepper(device, plan, pin)
        self.updates = placement.updates(self)

        # A layer's way to the device and back.
        await_update = partial(self.updates.wait, why=Wait.READ_AFTER_UPDATE)
        self.writes = WriteBack(self.slots, device, self.device_storages, await_update)
        self.source = placement.source(self)
        self.residents = Residents(residents, self.source, self.writes)
        bound_weights = BoundWeights(self.slots, self.writes)
        prefetch = Prefetch(plan, self.slots, self.layers, self.source.ready)
        self.residency = Residency(self.slots, prefetch, self.source, bound_weights, self.note_memory)

        # Steps, and all that asks for layers in them.
        self.step = Step(self)
        self.backward = Backward(self)
        self.owners = placement.owners(self)
        self.updating = Updating(self)
        self.saved_tensors = SavedTensors(self)
        self.uses = Uses(self)
        self.calls = Calls(self)
        self.swap = ParameterSwap(
            module,
            found.places,
            self.layers,
            _stand_ins_for_wrapped(found, self.layers),
            self.residents,
            PrunedWeights(module, device),
            [AveragesOnDevice(average, device.device, lambda: self.swap.on_device) for average in averages],
            self.threads,
        )
        self.writes.on_host = lambda: not self.swap.on_device

        self._graphs_before = compiled_graphs()
        self._module_calls: list[ModuleCall] = []
        self._compiled: list[CompiledCalls] = []
        try:
            self._connect()
        except BaseException:
            self.close()
            raise

    def _connect(self) -> None:
        """Connects modules, autograd and device parameters to the engine."""
        for layer in self.layers:
            layer.parameters.connect(layer, self.uses)
        watch(self.backward)
        # Before `listen`, whose functions then run around these functions: casts are on the device when a compiled module gets
        # them.
        self._compiled = compiled_calls(self.module, self.layers)
        visits = self.visits | self._embeddings
        self._module_calls = listen(self.calls, visits, self.found.units, self.activations.run)

    # ------------------------------------------------------------------ a step

    def begin(self, phase: str, *, training: bool, manual: bool = False, quiet: bool = False) -> None:
        """Begins a step: puts device parameters into the modules and fetches the first layers.

        Args:
            phase: the name of the trace, for example ``train``.
            training: True if a backward is expected.
            manual: True if user code reads gradients and writes weights within the step (manual optimization).
            quiet: True if no code can have written weights since the last step or :meth:`prefetch_for`.
        """
        kind = StepKind.INFERENCE if not training else StepKind.MANUAL if manual else StepKind.AUTOMATIC
        with self.lock:
            self.backward.abandon()
            for compiled in self._compiled:
                compiled.masters.clear()
            self.step.begin(phase, kind, quiet=quiet)

    @property
    def in_step(self) -> bool:
        """True if a step runs."""
        return self.step.running

    @property
    def in_backward(self) -> bool:
        """True if a backward runs."""
        return bool(self.backward.tasks)

    def prefetch_for(self, phase: str, *, training: bool) -> None:
        """Fetches the first layers of the next step, of ``phase``. The caller ensures that no code writes weights before it."""
        with self.lock:
            self.step.prefetch_for(phase, training=training)

    def saving(self) -> AbstractContextManager[None]:
        """A context for user code that builds a graph: saved weights are packed, so that the graph holds no slot."""
        return self.calls.user_code()

    def await_backward(self, *, seen: bool = False) -> None:
        """Makes the step end with the next backward; see :meth:`Step.await_backward`."""
        with self.lock:
            self.step.await_backward(seen=seen)

    def announce_backward(self, loss: Tensor, *, quiet: bool) -> None:
        """Announces the ``backward`` of a loss; see :meth:`Backward.announce`."""
        self.backward.announce(loss, quiet=quiet)

    def end_without_backward(self) -> None:
        """Ends a step that was to end with its backward and had none."""
        with self.lock:
            if self.step.running and self.step.ends_with_backward and not self.backward.tasks:
                self.step.end()

    def end(self, *, writes_follow: bool = False) -> None:
        """Ends the step: puts the host's parameters back into the modules; see :meth:`Step.end`."""
        with self.lock:
            self.step.end(writes_follow=writes_follow)

    def abort(self, *, over: bool = False) -> None:
        """Ends a step that has failed, and drops its gradients in flight.

        If the run is not ``over`` and this is called inside the step's user code, the step continues: user code may catch the
        error.
        """
        with self.lock:
            if not self.closed:
                # `packs`: the hooks of `saving` are active, so this is inside the step's user code.
                self._abort(over=over or not (self.step.running and packs()))

    def _abort(self, *, over: bool) -> None:
        """Ends all updates and, if the step is ``over``, the step. Marks all copies on the device as out of date."""
        self.updates.recover()
        if over:
            self.uses.calls.reset()
            self.backward.abandon()
            self.step.end(failed=True)  # an error is being raised already
        self.step.invalidate()

    @contextmanager
    def reading(self) -> Iterator[None]:
        """A context in which modules hold host parameters, even in the middle of a step, for code that reads the module.

        First waits for all updates.
        """
        self.updates.finish()
        on_device = self.swap.on_device
        try:
            with self.lock:
                self.step.show_host()
            yield
        finally:  # user code may catch an error, and go on with the step
            with self.lock:
                self.step.go_on(on_device=on_device)

    # ------------------------------------------------------------------ between steps

    def invalidate(self, *, goes_on: bool = True) -> None:
        """Marks all copies on the device as out of date, because host weights were or may have been written.

        Args:
            goes_on: True if code of the running step follows; see :meth:`Step.invalidate`.
        """
        with self.lock:
            self.step.invalidate(goes_on=goes_on)

    def allow_writes(self) -> None:
        """Prepares for user code that may write weights between steps: no transfer reads them, and all copies are out of date."""
        with self.lock:
            self.step.allow_writes()

    def resize(self, plan: Plan) -> None:
        """Streams the same layers through the slots of another plan.

        Raises:
            torch.OutOfMemoryError: the device has no memory for the slots. There are no slots then, until a call succeeds.
        """
        with self.lock:
            self.step.write_back()
            self.step.expected = None  # layers that were prefetched for the next step are lost
            self.updates.join()
            self.plan = plan
            self.gradients.transfers.in_flight = plan.k_prime + 1
            self.residency.prefetch.follow(plan)
            self.slots.resize(plan)
            self.note_memory()

    def leave_device(self) -> None:
        """Frees the device memory of streamed weights and of steps. :meth:`resize` takes new memory.

        Memory that tensors of user code view is not freed. A module that is called before :meth:`resize` takes extra slots.
        """
        with self.lock:
            rings = tuple(replace(ring, slots=0) for ring in self.plan.rings)
            self.resize(replace(self.plan, rings=rings))
            self.residents.leave()
            self.stepper.close()

    def recount(self, plan: Plan) -> None:
        """Takes a plan of the same layers and slots that counts other gradients, because layers were unfrozen."""
        self.plan = plan

    def changed(self) -> bool:
        """Returns True if user code has replaced, renamed or compiled modules, or replaced parameters, their dtypes or shapes.

        Also True if it has unfrozen weights whose memory is not this run's alone.

        Called before each batch. Also renews the patch of autograd's engine, which notices backwards that fail.

        Raises:
            RuntimeError: see :meth:`RunningCalls.refuse_interrupted`.
        """
        self.uses.calls.refuse_interrupted()
        watch(self.backward)  # other code may have restored the function that `watch` patches
        return self.swap.changed()

    def thawed(self) -> bool:
        """Returns True if layers were unfrozen, so that there will be gradients that the plan does not count."""
        planned = zip(self.layers, (*self.plan.moving, self.plan.residents), strict=True)
        uncounted = [layer for layer, its_plan in planned if not its_plan.gradient_bytes]
        thawed = any(parameter.requires_grad for layer in uncounted for parameter in layer.block.parameters)
        # `staying` has the bytes of weights that are on the device between steps, too, and of their gradients.
        return thawed or self.found.staying > self.plan.staying

    # ------------------------------------------------------------------ statistics

    @property
    def weight_bytes(self) -> int:
        """Bytes of device memory that weights, buffers and optimizer steps take now."""
        return self.slots.device_bytes + self.residents.nbytes + self._staying + self.stepper.nbytes

    def note_memory(self, *, staying: bool = False) -> None:
        """Updates the peak of device memory: weights, and gradients. Called whenever memory use may have grown.

        Args:
            staying: True to count the gradients of weights that stay on the device. The engine is not notified of them, and there
                may be hundreds. So they are counted when a backward begins and ends, and not at each gradient.
        """
        if staying:
            self._staying_gradients = sum(tensor_bytes(p.grad) for p in self.found.on_gpu if p.grad is not None)
        weights, stats = self.weight_bytes, self.device.stats
        gradients = self.gradients.transfers.device_bytes + self._staying_gradients
        if weights + gradients > stats.peak_device_bytes:
            stats.peak_device_bytes, stats.peak_gradient_bytes = weights + gradients, gradients
            stats.peak_optimizer_bytes = steps = self.stepper.nbytes
            stats.peak_weight_bytes = weights - steps

    def begin_peaks(self) -> None:
        """Measures all peaks of device memory anew, because the plan's memory is less than before, and stays so."""
        self.device.begin_peak(forget=True)
        self.device.stats.peak_device_bytes = -1  # less than now
        self.note_memory(staying=True)

    def stats(self) -> Stats:
        """Returns the present counters."""
        self.note_memory(staying=True)
        counted, stalled, allocated = self.device.stats, self.device.stall_seconds, self.device.most_bytes()
        return counted.copy(
            peak_activation_bytes=max(allocated - counted.peak_device_bytes, 0),
            peak_allocated_bytes=allocated,
            stall_seconds=stalled(Wait.USE_AFTER_FETCH, Wait.USE_AFTER_RESIDENTS),
            gradient_stall_seconds=stalled(Wait.REUSE_AFTER_DRAIN),
            update_stall_seconds=stalled(Wait.FETCH_AFTER_UPDATE, Wait.READ_AFTER_UPDATE),
            activation_stall_seconds=stalled(Wait.REUSE_AFTER_STORE, Wait.USE_AFTER_RETURN),
            compiled_graphs=compiled_graphs() - self._graphs_before,
            fetches={layer.name: layer.fetches for layer in self.layers if layer.kind is Kind.BLOCK},
        )

    # ------------------------------------------------------------------ the end

    def refuse_late_writes(self) -> None:
        """Checks that no weight was written through a view of the last step since that step. No further step would notice it.

        Raises:
            RuntimeError: a weight was.
        """
        with self.lock:
            self.writes.write_back_viewed(self.slots.all)

    def close(self) -> None:
        """Frees device memory, and removes all hooks and patches. Modules keep the host parameters as ordinary CPU parameters."""
        with self.lock:
            close_all(
                partial(unwatch, self.backward),  # first, because it is a patch of the whole process
                partial(self._abort, over=True),
                self.updates.close,
                self.swap.to_host,
                self._disconnect,
                self.slots.free,
                self.activations.close,
                self.residents.close,
                self.stepper.close,
                self.swap.close,
                *(layer.close for layer in self.layers),
                *(layer.block.unpin for layer in self.layers),
                self.staging.unpin,
                self.device.close,
            )

    def _disconnect(self) -> None:
        """Refuses later uses of device parameters and graphs of this run, and removes the hooks on module calls."""
        self.closed = True
        for calls in self._module_calls:
            calls.remove()
        for compiled in self._compiled:
            compiled.remove()


def _make_layers(engine: Engine, placement: Placement) -> list[StreamedLayer]:
    """Makes the layers of a plan, in the order of :attr:`Plan.moving`. The residents are last.

    The module's parameters become views of the layers' memory on the host.
    """
    found, plan, device, pin = engine.found, engine.plan, engine.device, engine.pin
    found_layers = (*found.layers, *found.masters, *found.tables, found.residents)
    allocate = placement.allocate(engine)
    memory = partial(_allocate_locked, allocate, pin) if plan.steps_on_device else allocate
    layers: list[StreamedLayer] = []
    for kind, found_layer, planned in zip(kinds(plan), found_layers, (*plan.moving, plan.residents), strict=True):
        seldom = kind in (Kind.MASTERS, Kind.TABLE)
        block = placement.block(found_layer, planned, device, engine.staging, memory, pin=pin, fetched_seldom=seldom)
        autocast = found.autocast if kind is Kind.MASTERS else None
        group = ParameterGroup(planned.spans, block.parameters, device.device, autocast=autocast)
        layers.append(StreamedLayer(len(layers), kind, planned, block, group, expert=len(layers) in plan.experts))
    for layer in layers:
        if layer.planned.masters is not None:
            layer.masters = layers[layer.planned.masters]
            layer.with_masters = (layer, layer.masters)
            layer.masters.owner = layer
            layer.casts = Casts(layer.block, layer.masters, device)
    if pin:
        _warn_of_unpinned(layers)
    return layers


def _warn_of_unpinned(layers: Sequence[StreamedLayer]) -> None:
    """Warns if the system has refused to page-lock memory of layers that are uploaded often."""
    blocks = [layer.block for layer in layers if layer.kind in (Kind.BLOCK, Kind.RESIDENTS)]
    unpinned = sum(block.planned.nbytes for block in blocks if not block.memory.pinned)
    if unpinned:
        warnings.warn(
            f"{unpinned / 2**30:.2f} GiB of CPU memory could not be page-locked (pinned): copies to the device are then "
            "synchronous and two to three times slower, results are the same. Raise the limit of locked memory, if there is "
            "one (ulimit -l), or pass pin_memory=False to go without and without this warning.",
            stacklevel=3,
        )


def _allocate_locked(allocate: Allocate, pin: bool, nbytes: int, seldom: bool) -> BlockMemory:
    """Allocates page-locked memory for a block that the device updates, even if it is rarely uploaded."""
    return allocate(nbytes, pin)


def _stand_ins_for_wrapped(found: Found, layers: Sequence[StreamedLayer]) -> dict[nn.Parameter, Any]:
    """Makes a stand-in for each wrapped parameter (a tensor subclass of plain tensors; see ``model.wrapped``).

    Modules hold the stand-in during a step. The layers hold the parameter's plain tensors.
    """
    where = {
        id(part): (layer.parameters, index) for layer in layers for index, part in enumerate(layer.block.parameters)
    }
    made = {}
    for host in found.wrapped:
        members = [where[id(part)] for _, part in parts("", host)]
        (group, index), (part_name, _) = members[0], next(parts("", host))
        name = group.spans[index].name.removesuffix(part_name)
        data = iter([group.stand_in_data[index] for group, index in members])
        made[host] = stand_in(
            host, data, partial(_bring, name, members), partial(_expose, members), members[0][0].layer.rows.computed
        )
    return made


def _bring(name: str, members: Sequence[tuple[ParameterGroup, int]], use: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """Returns the plain tensors of a wrapped parameter on the device. Their slots are not reused while they are referenced.

    Args:
        name: the parameter's name.
        members: the parameter group and the index of each plain tensor.
        use, args, kwargs: the function that uses the wrapped parameter, and its arguments.
    """
    group, _ = members[0]
    group.engine.refuse_over(name)
    if group.layer.rows.may_compute_with_wrapped(use, args, kwargs):
        return [group.alias(index) for group, index in members]
    with group.engine.operation_on([group.all[index] for group, index in members]):
        return [group.alias(index) for group, index in members]


def _expose(members: Sequence[tuple[ParameterGroup, int]]) -> None:
    """Records that a wrapped parameter may be written at any time without a change of its versions."""
    for group, index in members:
        group.expose(index)
