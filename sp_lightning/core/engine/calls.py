"""Calls: a module is called. Its layers are locked and attached before, and released after.

:class:`ModuleCall` surrounds the calls of one module, and :class:`Calls` carries out what each call needs.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from sp_lightning.core.device.own_threads import ONLY_READS
from sp_lightning.core.layers.device_parameter import hides_stand_ins
from sp_lightning.core.layers.layer import Kind, StreamedLayer
from sp_lightning.core.torch_compat.around_calls import release, surround
from sp_lightning.core.torch_compat.modes import held, never_compiled
from sp_lightning.core.torch_compat.private import DIFFERENTIATING, interpreter_stack, trace_only_inlined, tree_leaves

if TYPE_CHECKING:
    from sp_lightning.core.engine.engine import Engine

Visits = Sequence[StreamedLayer]
Run = Callable[[str, Any, nn.Module, Any, Any], Any]
"""Runs the call of a unit; see :attr:`~sp_lightning.core.engine.activations.Activations.run`."""


class Calls:
    """Begins and ends the calls of modules that use layers."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        moving = [layer for layer in engine.layers if layer.kind is not Kind.RESIDENTS]
        self._streams = bool(moving)  # False if the module has only residents, which need no packing
        self._casts = any(layer.masters is not None for layer in moving)
        self._first = next((layer for layer in moving if layer.kind is Kind.BLOCK), None)
        self._running = engine.uses.calls

    def enter(self, visits: Visits, inputs: Any) -> Visits:
        """Locks and attaches the layers of a module before its call, and activates the saved-tensor hooks.

        Outside a step the call is a short step of its own: :meth:`leave` ends it.

        Args:
            visits: the layers that the module uses.
            inputs: the arguments of the call.

        Returns:
            The layers for :meth:`leave`: none for a table whose rows are looked up; also the masters if other code may read them.

        Raises:
            RuntimeError: the call is traced or transformed, or the step computes on another stream.
        """
        engine = self.engine
        if visits and visits[0].kind is Kind.TABLE and not hides_stand_ins(inputs):
            visits = ()  # the look-up itself fetches the rows that it needs
        if torch.jit.is_tracing() or interpreter_stack():
            self._refuse_transforms_and_traces(visits)
        # If torch asks other code before the stand-ins, that code may read a master, which has memory only while it is attached.
        if self._casts and hides_stand_ins(inputs):
            visits = (*visits, *(layer.masters for layer in visits if layer.masters is not None))
        step = engine.step
        if visits and (make_room := engine.activations.make_room) is not None:
            make_room(visits, inputs)
        with held(engine.lock):
            outside = self._outside()
            try:
                if outside:
                    step.begin_outside()
                if visits:
                    step.refuse_other_stream(visits[0].name)
                self._activate()
                engine.residents.group.sync_requires_grad()
                engine.residency.begin_call(visits, backward=bool(engine.backward.tasks))
            except BaseException:  # user code may catch the error, so undo everything: no call has begun
                if outside:
                    step.end(writes_follow=True)
                raise
            packs_any = self._streams or engine.activations.packs
            self._running.begin(engine.saved_tensors.hooks if packs_any else None)
            for layer in visits:
                if layer.running_calls == 1:  # this call is the outermost one that uses the layer
                    layer.parameters.count_references()
        return visits

    def _activate(self) -> None:
        """Calls :meth:`Step.activate` if modules hold host parameters or the residents may be out of date, which is seldom."""
        engine = self.engine
        residents = engine.residents
        layer = residents.layer
        if not (engine.swap.on_device and residents.current and layer.update is None) or layer.stale:
            engine.step.activate(in_backward=bool(engine.backward.tasks))

    def _outside(self) -> bool:
        """Returns True if no step, backward or module call runs."""
        return not (self.engine.step.running or self.engine.backward.tasks or self._running.depth)

    def leave(self, visits: Visits, output: Any) -> None:
        """Releases the layers of a module whose call has returned or raised, and prefetches other layers.

        Also adds hooks to the outputs that notice the backward of the call. Ends the short step of a call outside a step.
        """
        engine = self.engine
        with held(engine.lock):
            try:
                if torch.is_grad_enabled() and visits:
                    self._watch(visits, output)
                # The frames of an exception hold the weights as long as the exception is handled. So the layers are
                # released later. This is common: checkpoints end their recompute by an exception.
                engine.residency.end_call(visits, release=sys.exception() is None)  # (4)
            finally:  # releasing a layer copies writes back, which may raise
                self._running.end()
                outside = self._outside()
                if outside:
                    engine.step.end(writes_follow=True)
            if visits and not outside:
                engine.residency.fetch_ahead()

    @contextmanager
    def rerun(self, visits: Visits, inputs: Any) -> Iterator[None]:
        """A context for a forward that runs again in backward, for which no module is called.

        Args:
            visits: the layers that the forward uses.
            inputs: its positional arguments.
        """
        self.engine.backward.join()
        entered = self.enter(visits, inputs)
        try:
            yield
        finally:
            self.leave(entered, None)

    def _watch(self, visits: Visits, output: Any) -> None:
        """Adds a hook to the outputs of a module call. Autograd calls the hook when the backward of the call begins."""
        pre_backward = self.engine.backward.awaited(self._pre_backward, tuple(visits))
        for tensor in (output,) if isinstance(output, Tensor) else tree_leaves(output):
            if isinstance(tensor, Tensor) and tensor.requires_grad and tensor.grad_fn is not None:
                tensor.register_hook(pre_backward)

    def _pre_backward(self, visits: Visits, gradient: Tensor) -> None:
        """Releases layers whose backward is over, and issues the transfer of their gradients.

        Hook on the outputs of a module call: the backward of the module's layers, ``visits``, begins. So the backward of later
        layers is over.
        """
        engine = self.engine
        with held(engine.lock):
            engine.backward.join()
            self._activate()
            engine.residency.pre_backward(visits)
        engine.backward.make_room(visits)

    @contextmanager
    def user_code(self) -> Iterator[None]:
        """A context for the user code of a step. Saved tensors are packed in it, so that the graph holds no slot.

        Afterwards no call of this thread counts as running.
        """
        with self.engine.saved_tensors.hooks() if self._streams else nullcontext():
            try:
                yield
            finally:
                self._running.reset()  # Ctrl-C may have interrupted the end of a call

    def _refuse_transforms_and_traces(self, visits: Visits) -> None:
        """Raises a RuntimeError if the call is traced (``torch.jit``) or differentiated by ``torch.func``."""
        if torch.jit.is_tracing():
            raise RuntimeError(
                "torch.jit.trace was called during a run: a trace would hold memory through which other layers pass. Trace the "
                "module before or after the run; in loggers, TensorBoardLogger(log_graph=False)."
            )
        stack = interpreter_stack()
        if stack and self._first is not None and any(level.key() in DIFFERENTIATING for level in stack):
            name = (visits[0] if visits else self._first).name
            raise RuntimeError(
                f"torch.func.grad (or vjp, jacrev, jvp) reached the streamed layer {name!r}: these transforms keep weights "
                f"where they cannot be streamed. Use torch.autograd.grad(..., create_graph=True), or keep the layer on "
                f"the device: SuperpipelineStrategy(keep_on_gpu=[{name!r}])."
            )


class ModuleCall:
    """Begins and ends each call of one module: before its pre-hooks and after its hooks.

    Args:
        calls: carries out what a call needs.
        module: the module.
        visits: the layers that the module uses.
        in_evaluation: the layers that the module uses in evaluation; None if they are ``visits``.
        unit: the name of the module as a unit of activations; None if it is not a unit.
        run: runs the calls of units; None if units are called like other modules.
    """

    def __init__(
        self,
        calls: Calls,
        module: nn.Module,
        visits: Visits,
        in_evaluation: Visits | None = None,
        unit: str | None = None,
        run: Run | None = None,
    ) -> None:
        self._calls = calls
        self._module = module
        self._visits = visits
        self._in_evaluation = in_evaluation
        self._unit = unit
        self._run = run
        self._rows = next((layer.rows for layer in visits if layer.rows.watches_calls), None)
        surround(module, self)

    def remove(self) -> None:
        """Leaves the module's calls alone from now on."""
        release(self._module, self)

    @trace_only_inlined
    def __call__(self, call: Any, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        visits = self._begin(args, kwargs)
        output = None
        try:
            if self._unit is None or self._run is None:
                output = call(module, *args, **kwargs)
            else:
                output = self._run(self._unit, call, module, args, kwargs)
            return output
        finally:  # also after Ctrl-C
            self._end(visits, output)

    @never_compiled  # transfers cannot be part of a compiled graph
    def _begin(self, args: Any, kwargs: Any) -> Visits:
        """Calls :meth:`Calls.enter`. Layers that choose rows by the call's arguments (experts) get the arguments first.

        Raises:
            RuntimeError: a thread outside the run makes the call; or see :meth:`Calls.enter`.
        """
        threads = self._calls.engine.threads
        if threading.get_ident() != threads.main and not threads.own:
            name = repr(self._visits[0].name) if self._visits else type(self._module).__name__
            raise RuntimeError(ONLY_READS.format(what=f"{name} was called"))
        if self._in_evaluation is not None and not self._module.training:
            return self._calls.enter(self._in_evaluation, args)
        if self._rows is None:
            return self._calls.enter(self._visits, args)
        self._rows.begin_call(self._module, args, kwargs)
        try:
            return self._calls.enter(self._visits, (args, kwargs))
        except BaseException:
            self._rows.end_call()
            raise

    @never_compiled
    def _end(self, visits: Visits, output: Any) -> None:
        if self._rows is not None:
            self._rows.end_call()
        self._calls.leave(visits, output)


def listen(
    calls: Calls,
    visits: Mapping[nn.Module, tuple[StreamedLayer, ...]],
    units: Mapping[str, nn.Module] | None = None,
    run: Run | None = None,
) -> list[ModuleCall]:
    """Begins and ends the calls of modules, until the returned objects are removed.

    Args:
        calls: carries out what a call needs.
        visits: by module, the layers that the module uses.
        units: by name, the modules whose calls ``run`` runs.
        run: runs the calls of units; None if units are called like other modules.
    """
    unit_of = {module: name for name, module in (units or {}).items()}
    return [
        ModuleCall(calls, module, used, _in_evaluation(module, visits), unit_of.get(module), run)
        for module, used in visits.items()
    ]


def _in_evaluation(module: nn.Module, visits: Mapping[nn.Module, tuple[StreamedLayer, ...]]) -> Visits | None:
    """Returns the layers that a module uses in evaluation; None if they are the same as in training.

    In evaluation torch's encoders read weights without calling their modules. ``nn.TransformerEncoderLayer`` reads the weights
    of all its submodules if the weights have no ``__torch_function__``. ``nn.TransformerEncoder`` reads the weights of its first
    layer to choose its path.
    """
    read: nn.Module
    if isinstance(module, nn.TransformerEncoder) and len(module.layers):
        read = module.layers[0]
    elif isinstance(module, nn.TransformerEncoderLayer):
        read = module
    else:
        return None
    used = {layer for child in (module, *read.modules()) for layer in visits.get(child, ())}
    return None if used == set(visits[module]) else tuple(sorted(used, key=lambda layer: layer.index))
