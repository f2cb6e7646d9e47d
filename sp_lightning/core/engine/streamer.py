"""The streamer: the facade of the engine. It builds the parts and passes every call to one of them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial

from torch import Tensor, nn

from sp_lightning.core.device.closing import close_all
from sp_lightning.core.device.device import Device, Wait
from sp_lightning.core.device.own_threads import OwnThreads
from sp_lightning.core.device.stats import Stats
from sp_lightning.core.engine.activations import ActivationSetup, KeepAll, MakeActivations
from sp_lightning.core.engine.assembly import make_layers, stand_ins_for_wrapped
from sp_lightning.core.engine.calls import Calls, ModuleCall, listen
from sp_lightning.core.engine.graph import Backward, SavedTensors, packs
from sp_lightning.core.engine.placement import ONE_DEVICE, Placement
from sp_lightning.core.engine.schedule import Prefetch, Residency
from sp_lightning.core.engine.step import Step, StepKind
from sp_lightning.core.engine.updating import Updating
from sp_lightning.core.engine.uses import Uses
from sp_lightning.core.layers.bound_weights import BoundWeights
from sp_lightning.core.layers.buffers import AveragesOnDevice, PrunedWeights
from sp_lightning.core.layers.compiled_calls import CompiledCalls, compiled_calls
from sp_lightning.core.layers.layer import Kind, StreamedLayer
from sp_lightning.core.layers.residents import Residents
from sp_lightning.core.layers.ring import Slots
from sp_lightning.core.layers.swap import ParameterSwap
from sp_lightning.core.layers.writes import WriteBack
from sp_lightning.core.model.found import Found, tensor_bytes
from sp_lightning.core.model.rows import row_finder
from sp_lightning.core.observe.activations import HeldActivations
from sp_lightning.core.plan.plan import Plan
from sp_lightning.core.store.block_memory import Staging
from sp_lightning.core.torch_compat.patched import unwatch, watch
from sp_lightning.core.torch_compat.private import compiled_graphs
from sp_lightning.core.updates.layer_stepper import LayerStepper

MakeStepper = Callable[[Device, Plan, bool], LayerStepper]
"""Makes the part that steps layers on the GPU. Arguments: the device, the plan, the run's updates, True if memory is pinned."""


class Streamer:
    """Streams the layers of one module.

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
        threads: the threads that belong to the run.
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
        self.plan = plan
        self.found = found
        self.device = device
        self._module = module
        # Hooks in backward run on autograd's threads. The lock is never held while user code runs.
        self._lock = threading.RLock()
        self.threads = threads or OwnThreads()
        self._closed = False
        self._build_weights(pin, placement, make_stepper, log)
        visits = {module: tuple(self._layers[index] for index in used) for module, used in found.visits.items()}
        self.activations = make_activations(self._activation_setup(visits, log))
        self._gradients.transfers.check = self.activations.check
        self._build_step(averages, placement)
        self._build_calls()
        try:
            self._connect(visits)
        except BaseException:
            self.close()
            raise

    # ------------------------------------------------------------------ the parts, from below

    def _build_weights(
        self, pin: bool, placement: Placement, make_stepper: MakeStepper | None, log: logging.Logger | None
    ) -> None:
        """Builds host memory, slots, gradients and updates."""
        device, plan = self.device, self.plan
        self._staging = Staging(device, pin=pin)
        allocate, block = placement.allocate(device, plan), placement.block
        self._layers = make_layers(self.found, plan, device, self._staging, allocate, block, pin=pin)
        *self._moving, self._resident_layer = self._layers
        masters = (f"{layer.name}, float32" for layer in plan.masters)
        device.layer_names = [*(layer.name for layer in plan.layers), *masters, *(table.name for table in plan.tables)]
        self._device_storages: set[int] = set()
        self._embeddings = row_finder().make_rows(self.found, self._layers, device, log, pin=pin)
        self._slots = Slots(plan, self._moving, device, placement.uploads(device, log))
        self._gradients = placement.gradients(device, self._staging, self._layers, plan.k_prime + 1)
        self.updates = placement.updates(self._layers, device)
        self.updates.threads = self.threads
        self._writes = WriteBack(self._slots, device, self._device_storages)
        self._bound_weights = BoundWeights(self._slots, self._writes)
        self._writes.await_update = partial(self.updates.wait, why=Wait.READ_AFTER_UPDATE)
        self._source = placement.source(self._layers, self._slots, self.updates, device)
        self._residents = Residents(self._resident_layer, self._source, self._writes)
        self._pin = pin
        # On a GPU the allocator counts activations.
        held = HeldActivations(self._staying_tensors, (self._slots.by_address, self._device_storages))
        self._held = held if self.device.computes_on_host else None
        if make_stepper is not None and plan.steps_on_device:
            self.updates.stepper = make_stepper(device, plan, pin)
        self._gradients.keep_for_step = plan.steps_on_device
        self._staying = self.found.staying[0]
        self._staying_gradients = 0
        prefetch = Prefetch(plan, self._slots, self._layers, self._source.ready)
        self._residency = Residency(self._slots, prefetch, self._source, self._bound_weights, self._note_memory)

    def _staying_tensors(self) -> Iterator[Tensor]:
        """Yields the tensors outside of slots that are on the device anyway: buffers, and weights that stay on the device."""
        yield from self.found.on_gpu
        yield from self._module.buffers()

    def _activation_setup(
        self, visits: dict[nn.Module, tuple[StreamedLayer, ...]], log: logging.Logger | None
    ) -> ActivationSetup:
        """Collects the parts that modes of activations use. Functions look up parts that are made later."""
        units, rows = self.found.units, {layer.name: layer.index for layer in self._layers if layer.kind is Kind.BLOCK}
        return ActivationSetup(
            self._module,
            self.found,
            self._layers,
            layers_of={name: visits.get(module, ()) for name, module in units.items()},
            rows={name: rows.get(name, self._resident_layer.index) for name in units},  # in timelines
            device=self.device,
            pin=self._pin,
            device_storages=self._device_storages,
            rerun=lambda layers, inputs: self._calls.rerun(layers, inputs),
            layer_at=lambda address: self._uses.layer_at(address),
            given_by_nested=lambda: self._backward.given_by_nested(),
            held=self._held,
            log=log,
        )

    def _build_step(self, averages: Sequence[nn.Module], placement: Placement) -> None:
        """Builds the parameter swap, the step and its backward."""
        root, device, layers = self._module, self.device, self._layers
        self._swap = swap = ParameterSwap(
            root,
            self.found.places,
            layers,
            stand_ins_for_wrapped(self.found, layers),
            self._residents,
            PrunedWeights(root, device),
            self.threads,
        )
        swap.averages = [AveragesOnDevice(module, device.device, lambda: swap.on_device) for module in averages]
        self._step = Step(
            device=device,
            layers=layers,
            threads=self.threads,
            residency=self._residency,
            residents=self._residents,
            source=self._source,
            swap=swap,
            writes=self._writes,
            activations=self.activations,
            updates=self.updates,
        )
        self._backward = Backward(
            lock=self._lock,
            layers=layers,
            residency=self._residency,
            source=self._source,
            writes=self._writes,
            gradients=self._gradients,
            activations=self.activations,
            updates=self.updates,
            note_memory=self._note_memory,
            step=self._step,
        )
        self.owners = placement.owners(self._lock, layers, self._source, self._step)
        self.updating = Updating(
            lock=self._lock,
            device=device,
            layers=layers,
            residency=self._residency,
            source=self._source,
            writes=self._writes,
            gradients=self._gradients,
            updates=self.updates,
            step=self._step,
            backward=self._backward,
            owners=self.owners,
            stay=self.found.on_gpu,
        )

    def _build_calls(self) -> None:
        """Builds the parts that receive requests for layers."""
        saved_tensors = SavedTensors(
            lock=self._lock,
            device=self.device,
            residency=self._residency,
            writes=self._writes,
            activations=self.activations,
            backward=self._backward,
            held=self._held,
        )
        self._uses = Uses(
            lock=self._lock,
            threads=self.threads,
            device=self.device,
            residency=self._residency,
            residents=self._residents,
            source=self._source,
            swap=self._swap,
            writes=self._writes,
            activations=self.activations,
            updates=self.updates,
            step=self._step,
            backward=self._backward,
            hooks=saved_tensors.hooks,
        )
        self._calls = Calls(
            lock=self._lock,
            threads=self.threads,
            layers=self._layers,
            residency=self._residency,
            residents=self._residents,
            activations=self.activations,
            step=self._step,
            backward=self._backward,
            saved_tensors=saved_tensors,
            uses=self._uses,
        )
        self._module_calls: list[ModuleCall] = []
        self._graphs_before = compiled_graphs()
        self._compiled: list[CompiledCalls] = []

    def _connect(self, visits: dict[nn.Module, tuple[StreamedLayer, ...]]) -> None:
        """Connects modules, autograd and device parameters to the engine."""
        for layer in self._layers:
            layer.parameters.connect(layer, self._uses)
        watch(self._backward)
        # Before `listen`, whose functions then run around these functions: casts are on the device when a compiled module gets
        # them.
        self._compiled = compiled_calls(self._module, self._layers)
        self._module_calls = listen(self._calls, visits | self._embeddings, self.found.units, self.activations.run)

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
        with self._lock:
            self._backward.abandon()
            for compiled in self._compiled:
                compiled.masters.clear()
            if training and self._held is not None:
                self._held.begin()
            self._step.begin(phase, kind, quiet=quiet)

    @property
    def in_step(self) -> bool:
        """True if a step runs."""
        return self._step.running

    @property
    def in_backward(self) -> bool:
        """True if a backward runs."""
        return bool(self._backward.tasks)

    def prefetch_for(self, phase: str, *, training: bool) -> None:
        """Fetches the first layers of the next step, of ``phase``. The caller ensures that no code writes weights before it."""
        with self._lock:
            self._step.prefetch_for(phase, training=training)

    def saving(self) -> AbstractContextManager[None]:
        """A context for user code that builds a graph: saved weights are packed, so that the graph holds no slot."""
        return self._calls.user_code()

    def await_backward(self, *, seen: bool = False) -> None:
        """Makes the step end with the next backward; see :meth:`Step.await_backward`."""
        with self._lock:
            self._step.await_backward(seen=seen)

    def announce_backward(self, loss: Tensor, *, quiet: bool) -> None:
        """Announces the ``backward`` of a loss; see :meth:`Backward.announce`."""
        self._backward.announce(loss, quiet=quiet)

    def end_without_backward(self) -> None:
        """Ends a step that was to end with its backward and had none."""
        with self._lock:
            if self._step.running and self._step.ends_with_backward and not self._backward.tasks:
                self._step.end()

    def end(self, *, writes_follow: bool = False) -> None:
        """Ends the step: puts the host's parameters back into the modules; see :meth:`Step.end`."""
        with self._lock:
            self._step.end(writes_follow=writes_follow)

    def abort(self, *, over: bool = False) -> None:
        """Ends a step that has failed, and drops its gradients in flight.

        If the run is not ``over`` and this is called inside the step's user code, the step continues: user code may catch the
        error.
        """
        with self._lock:
            if not self._closed:
                # `packs`: the hooks of `saving` are active, so this is inside the step's user code.
                self._abort(over=over or not (self._step.running and packs()))

    def _abort(self, *, over: bool) -> None:
        """Ends all updates and, if the step is ``over``, the step. Marks all copies on the device as out of date."""
        self.updates.recover()
        if over:
            self._uses.calls.reset()
            self._backward.abandon()
            self._step.end(failed=True)  # an error is being raised already
        self._step.invalidate()

    @contextmanager
    def reading(self) -> Iterator[None]:
        """A context in which modules hold host parameters, even in the middle of a step, for code that reads the module.

        First waits for all updates.
        """
        self.updates.finish()
        on_device = self._swap.on_device
        try:
            with self._lock:
                self._step.show_host()
            yield
        finally:  # user code may catch an error, and go on with the step
            with self._lock:
                self._step.go_on(on_device=on_device)

    # ------------------------------------------------------------------ between steps

    def invalidate(self, *, goes_on: bool = True) -> None:
        """Marks all copies on the device as out of date, because host weights were or may have been written.

        Args:
            goes_on: True if code of the running step follows; see :meth:`Step.invalidate`.
        """
        with self._lock:
            self._step.invalidate(goes_on=goes_on)

    def allow_writes(self) -> None:
        """Prepares for user code that may write weights between steps: no transfer reads them, and all copies are out of date."""
        with self._lock:
            self._step.allow_writes()

    def resize(self, plan: Plan) -> None:
        """Streams the same layers through the slots of another plan.

        Raises:
            torch.OutOfMemoryError: the device has no memory for the slots. There are no slots then, until a call succeeds.
        """
        with self._lock:
            self._step.write_back()
            self._step.expected = None  # layers that were prefetched for the next step are lost
            self.updates.join()
            self.plan = plan
            self._gradients.transfers.in_flight = plan.k_prime + 1
            self._residency.prefetch.follow(plan)
            self._slots.resize(plan)
            self._note_memory()

    def leave_device(self) -> None:
        """Frees the device memory of streamed weights and of steps. :meth:`resize` takes new memory.

        Memory that tensors of user code view is not freed. A module that is called before :meth:`resize` takes extra slots.
        """
        with self._lock:
            rings = tuple(replace(ring, slots=0) for ring in self.plan.rings)
            self.resize(replace(self.plan, rings=rings))
            self._residents.leave()
            self.updates.stepper.close()

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
        self._uses.calls.refuse_interrupted()
        watch(self._backward)  # other code may have restored the function that `watch` patches
        return self._swap.changed() or any(layer.block.is_outdated for layer in self._layers)

    def thawed(self) -> bool:
        """Returns True if layers were unfrozen, so that there will be gradients that the plan does not count."""
        planned = zip(self._layers, (*self.plan.moving, self.plan.residents), strict=True)
        uncounted = [layer for layer, its_plan in planned if not its_plan.gradient_bytes]
        thawed = any(parameter.requires_grad for layer in uncounted for parameter in layer.block.parameters)
        # `staying` has the bytes of weights that are on the device between steps, too, and of their gradients.
        return thawed or self.found.staying > self.plan.staying

    # ------------------------------------------------------------------ statistics

    @property
    def weight_bytes(self) -> int:
        """Bytes of device memory that weights, buffers and optimizer steps take now."""
        return self._slots.device_bytes + self._residents.nbytes + self._staying + self.updates.stepper.nbytes

    def _note_memory(self, *, staying: bool = False) -> None:
        """Updates the peak of device memory: weights, and gradients. Called whenever memory use may have grown.

        Args:
            staying: True to count the gradients of weights that stay on the device. The engine is not notified of them, and there
                may be hundreds. So they are counted when a backward begins and ends, and not at each gradient.
        """
        if staying:
            self._staying_gradients = sum(tensor_bytes(p.grad) for p in self.found.on_gpu if p.grad is not None)
        weights, stats = self.weight_bytes, self.device.stats
        gradients = self._gradients.transfers.device_bytes + self._staying_gradients
        if weights + gradients > stats.peak_device_bytes:
            stats.peak_device_bytes, stats.peak_gradient_bytes = weights + gradients, gradients
            stats.peak_optimizer_bytes = steps = self.updates.stepper.nbytes
            stats.peak_weight_bytes = weights - steps

    def stats(self) -> Stats:
        """Returns the present counters."""
        self._note_memory(staying=True)
        counted, stalled, allocated = self.device.stats, self.device.stall_seconds, self.device.most_bytes()
        activations = max(allocated - counted.peak_device_bytes, 0) if self._held is None else self._held.peak
        return counted.copy(
            peak_activation_bytes=activations,
            peak_allocated_bytes=allocated,
            stall_seconds=stalled(Wait.USE_AFTER_FETCH, Wait.USE_AFTER_RESIDENTS),
            gradient_stall_seconds=stalled(Wait.REUSE_AFTER_DRAIN),
            update_stall_seconds=stalled(Wait.FETCH_AFTER_UPDATE, Wait.READ_AFTER_UPDATE),
            activation_stall_seconds=stalled(Wait.REUSE_AFTER_STORE, Wait.USE_AFTER_RETURN),
            compiled_graphs=compiled_graphs() - self._graphs_before,
            fetches={layer.name: layer.fetches for layer in self._layers if layer.kind is Kind.BLOCK},
        )

    # ------------------------------------------------------------------ the end

    def close(self) -> None:
        """Frees device memory, and removes all hooks and patches. Modules keep the host parameters as ordinary CPU parameters."""
        with self._lock:
            close_all(
                partial(unwatch, self._backward),  # first, because it is a patch of the whole process
                partial(self._abort, over=True),
                self.updates.close,
                self._swap.to_host,
                self._disconnect,
                self._slots.free,
                self.activations.close,
                self._residents.close,
                self.updates.stepper.close,
                self._swap.close,
                *(layer.close for layer in self._layers),
                *(layer.block.unpin for layer in self._layers),
                self._staging.unpin,
                self.device.close,
            )

    def _disconnect(self) -> None:
        """Refuses later uses of device parameters and graphs of this run, and removes the hooks on module calls."""
        self._closed = True
        self._backward.close()
        self._uses.close()
        for calls in self._module_calls:
            calls.remove()
        for compiled in self._compiled:
            compiled.remove()
