"""Divides an optimizer's step into updates of layers. torch's own code runs each update, in the background.

- ``optimizer_overlap="forward"``: updates begin after backward, when the norm of the gradients is known. They run during the next
  forward, in the order in which that forward needs the layers.
- ``"backward"``: a layer may be updated as soon as its gradients are complete. If several layers may, the layer that the next
  forward needs first is updated first. Updates that have not begun when backward ends run during the next forward. If gradients
  are freed, at most one layer waits for its update.

:func:`sp_lightning.core.plan.update_policy.decide` chooses between them.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from sp_lightning.core.device.device import Stream, Wait
from sp_lightning.core.device.lease import ALONE, held_elsewhere, references
from sp_lightning.core.messages import LOG
from sp_lightning.core.plan.update_policy import EarlyUpdates, OptimizerPolicy, UpdatePolicy
from sp_lightning.core.torch_compat.patched import OWN_ATTRIBUTES, attributes_of, order_new_state, state_of
from sp_lightning.core.torch_compat.private import tree_map
from sp_lightning.core.updates.background import TORN_IN_BACKWARD
from sp_lightning.core.updates.clipping import Clipping, by_value
from sp_lightning.core.updates.fused import (
    OF_EACH,
    constants_of,
    divide,
    has_fused_step,
    is_separable,
    lacks_buffers,
    runs_fused,
    settings_on_cpu,
    shares_state,
)
from sp_lightning.core.updates.pieces import mode_for
from sp_lightning.core.updates.state_store import IN_MEMORY, StateStore
from sp_lightning.core.updates.step_context import StepContext, compiles
from sp_lightning.core.weights.gradient_roles import Change, change, stored, unwidened
from sp_lightning.core.weights.layer import StreamedLayer

if TYPE_CHECKING:
    from sp_lightning.core.engine.engine import Engine

Groups = list[dict[str, Any]]
_probe = SimpleNamespace()
_UNHELD = sys.getrefcount(attributes_of(_probe))
"""Number of references to the state of all parameters, and to ``vars(optimizer)``, if user code has none. Measured, because
versions of Python differ in the references that a call takes."""


@dataclass(frozen=True)
class _Traits:
    """How the steps of one optimizer run. The traits do not change after set-up.

    Attributes:
        on_gpu: True if layers are uploaded for their steps, which run on the GPU with the settings that the user gave the
            optimizer. Parameters that stay on the GPU are stepped there in any case.
        waits: True if the step returns only when all updates have ended (``optimizer_overlap="off"``).
        ends_on_host: True if an update ends only when its results are in host memory, because the next update may reuse it.
        early: when backward may begin updates, and whether gradients are freed after them.
        fuse: True if torch's fused step runs on the CPU if the user has set neither ``fused`` nor ``foreach``.
        separable: True if an unfused step may be divided into layers: the step of a layer gives its parameters the same values
            as the whole step.
        checked: True if only the optimizer's class declares that its step may be divided, so the stepper checks what each step
            has written.
        keeps_narrow: True if gradients keep the dtype of backward until their update. An unfused step on the CPU reads whole
            gradients, and a checked step may write them, so both get gradients in the dtype of the parameter.
        compiles: True if the step is compiled. The run then waits for each update, so that no other code runs meanwhile.
        constants: the names of state that parameters share and no step writes.
    """

    on_gpu: bool
    waits: bool
    ends_on_host: bool
    early: EarlyUpdates
    fuse: bool
    separable: bool
    checked: bool
    keeps_narrow: bool
    compiles: bool
    constants: frozenset[str]


def _traits(optimizer: Optimizer, engine: Engine, policy: UpdatePolicy, own: OptimizerPolicy) -> _Traits:
    """Decides, once, how the steps of an optimizer run; see :class:`_Traits`."""
    on_gpu = engine.stepper.steps_all
    waits = policy.overlap == "off"
    separable = waits or on_gpu or is_separable(optimizer)
    checked = engine.stepper.is_declared(optimizer)
    return _Traits(
        on_gpu=on_gpu,
        waits=waits,
        ends_on_host=policy.ends_on_host,
        early=policy.early,
        fuse=policy.fused and has_fused_step(optimizer),
        separable=separable,
        checked=checked,
        keeps_narrow=own.narrow and not checked and (on_gpu or not separable),
        compiles=compiles(optimizer),
        constants=constants_of(optimizer),
    )


class LayerwiseStep:
    """Runs the steps of one optimizer layer by layer, if they are fused or separable.

    torch's fused kernels treat each tensor by itself, and their results are bit-identical for any number of threads. So a layer
    may be updated in any thread and at any time. A step that cannot be divided (sparse gradients, a group that is not fused,
    parameters that the module does not have) runs as torch runs it, all layers at once.

    One step calls in this order: :meth:`deferring` around the whole step; during backward ``_layer_done``, which
    :class:`~sp_lightning.core.engine.backward.Backward` calls for each layer; :meth:`submit` for the layers that are left;
    :meth:`give_back_groups` after torch's own step.

    Args:
        optimizer: the user's optimizer, which keeps its groups and its state.
        engine: the engine whose layers are updated.
        policy: where, when and how layers are updated.
        own: how this optimizer's steps run.
        clip_value: the limit to which each element of a gradient is clipped; None if elements are not clipped.
        state: loads the optimizer's state of a layer before the layer's update, and stores it afterwards.

    Attributes:
        clipping: clips the gradients.
        begun: the layers whose updates of this step have begun during backward.
        tried: True if a step has tested which layers backward uses after their gradients are complete.
        needed: the reasons why that step could not have updated layers in backward: uses of a layer after its gradients were
            complete, or that the step could not be divided.
        clip_value: the argument ``clip_value``; None if no layer is updated in backward.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        engine: Engine,
        *,
        policy: UpdatePolicy,
        own: OptimizerPolicy,
        clip_value: float | None = None,
        state: StateStore = IN_MEMORY,
    ) -> None:
        self._traits = traits = _traits(optimizer, engine, policy, own)
        self._optimizer = optimizer
        self._class = type(optimizer)  # while updates run, the optimizer has another class
        self._engine = engine
        self._updates = engine.updates
        self._state = state
        in_backward = traits.early.in_backward
        engine.stepper.arrange(state_on_disk=state.elsewhere, ahead=not (in_backward or traits.waits))
        self.clipping = Clipping(optimizer, engine)
        self.clip_value = clip_value if in_backward else None

        # Backward calls `_layer_done` with each layer whose gradients are complete. Before that, the gradient sink calls
        # `_may_update`: it returns True if the step waits for the layer, to update it in this backward.
        self._layer_done, self._may_update = self.clipping.measure if policy.measure_norms else None, None
        if in_backward:
            self._layer_done, self._may_update = self._update_early, self._may_begin
        elif traits.early is EarlyUpdates.TRIED:
            self._layer_done, self._may_update = self._note_late_uses, lambda layer: False

        # Of all steps so far.
        self.tried = False
        self.needed: list[str] = []
        self._stepped: set[int] = set()  # ids of the parameters that had a step, so that their state exists
        self._told = False  # True if it was logged that other code holds the state
        self._known: set[nn.Parameter] | None = None  # the parameters with state before the updates that may make some

        # Of the running step.
        self.begun: set[StreamedLayer] = set()
        # The layers that backward may still update, with their groups; None until they are known.
        self._updatable: dict[StreamedLayer, Groups] | None = None
        self._closure: Callable[[], Any] | None = None
        self._context: StepContext
        self._groups = self._none = Groups()  # `_groups` are the user's while the optimizer has the empty `_none`
        self._noted = False  # True if `_note_state` was called
        self._state_held: bool | None = None  # see `_is_state_held`; None until it is known

    @contextmanager
    def deferring(self) -> Iterator[None]:
        """A context for a step of the optimizer: backward calls back for each complete layer, :meth:`submit` submits updates."""
        # Whether a group runs fused depends on the gradients, and the last step's gradients still exist. If a group cannot be
        # divided now (for example, a gradient was sparse), backward updates no layer.
        can_divide = not self._traits.early.in_backward or all(map(self._can_divide, self._optimizer.param_groups))
        self._updatable = None if can_divide else {}
        self._context = self._context_here()
        self._engine.backward.layer_done = self._layer_done
        self._engine.backward.may_update = self._may_update
        self._engine.gradients.keep_narrow = self._traits.keeps_narrow
        try:
            yield
        finally:
            self._engine.backward.layer_done = self._engine.backward.may_update = None
            self._engine.gradients.keep_narrow = False
            self._noted, self._state_held = False, None
            self.give_back_groups()
            self.clipping.end()

    # ------------------------------------------------------------------ updates

    def _context_here(self) -> StepContext:
        """Returns the settings that the optimizer's step would find if this thread ran it now."""
        return StepContext({"cpu", self._engine.device.device.type})

    def _update_early(self, layer: StreamedLayer) -> None:
        """Submits the update of a layer whose gradients backward has completed, if it may be updated so early.

        Other layers are left to :meth:`submit`.
        """
        updatable = self._early_groups()
        if layer not in updatable or not self._may_begin(layer):
            return
        held = self._is_held(layer, _parameters(updatable[layer]))
        if held:
            return  # user code may read or write the tensors that it holds in this backward
        groups = updatable.pop(layer)
        if any(_is_sparse(parameter) for member in layer.with_masters for parameter in member.block.parameters):
            self._updatable = {}  # no layer is updated in this backward any more
            self._refuse(_sparse(layer))  # an error if some layers are updated already; else all are updated at once
            return
        if not self.begun:
            self._updates.begin()
        self._updates.torn = TORN_IN_BACKWARD
        self.begun.add(layer)
        self._engine.updating.before_early_update(layer)
        self._submit(layer, groups, held=held)
        if self._traits.early is EarlyUpdates.FREES:
            self._updates.limit_pending(1)  # so at most one layer's gradients wait in memory for their update

    def _may_begin(self, layer: StreamedLayer) -> bool:
        """Returns True if backward may begin the update of a layer now, or if another process may, which steps the layer."""
        owners = self._engine.owners
        if owners.owns(layer) and layer not in self._early_groups():
            return False
        return owners.may_begin(layer)

    def _note_late_uses(self, layer: StreamedLayer) -> None:
        """Notes in :attr:`needed` if backward uses a layer although its gradients are complete. Nothing is updated.

        Called in a step that tests whether later steps could update layers in backward (``EarlyUpdates.TRIED``).
        """
        self.tried = True
        self._engine.updating.notice_uses(layer)
        self._updates.note_late_uses(layer, self.needed.append)

    def _order(self) -> list[StreamedLayer]:
        """Returns all layers by the urgency of their updates. Also sets the urgency of updates in the background.

        This is the order in which the next forward needs them.

        On the GPU, and if state is not in memory, updates run in the order in which they are submitted.
        """
        order = list(self._engine.updating.order())
        in_order = self._state.elsewhere or self._traits.on_gpu
        self._updates.urgency = {} if in_order else {layer: at for at, layer in enumerate(order)}
        return order

    def _early_groups(self) -> dict[StreamedLayer, Groups]:
        """Returns the groups of the layers that can be updated in backward and whose updates have not begun."""
        if self._updatable is None:
            self._order()  # sets the urgency of updates
            try:
                self._updatable = self._groups_by_layer()
            except _UndividedError:
                self._updatable = {}
        return self._updatable

    def submit(self, closure: Callable[[], Any] | None = None) -> bool:
        """Submits the layers that are not updated yet, after backward and clipping.

        Args:
            closure: returns the result of the running step's closure; None if it has no closure.

        Returns:
            True if updates of layers were submitted. torch's step then finds no groups until :meth:`give_back_groups` (see "Note:
            empty groups" in ``updates/__init__``). False if torch's step has to update all layers at once.

        Raises:
            RuntimeError: the step cannot be divided, although an option needs updates of single layers.
        """
        self._closure = closure
        self._context = self._context_here()  # user code may have changed settings since the step began
        # A later backward is not of this step.
        self._engine.backward.layer_done = self._engine.backward.may_update = None
        self._updates.end_early()
        # A forward without a backward may have left transfers in flight.
        self._engine.updating.before(deferred=bool(self.begun))
        self._engine.updating.gather(self._optimizer)
        try:
            by_layer = self._groups_by_layer()
        except _UndividedError as undivided:
            self._prepare_undivided_step(undivided)
        else:
            self._submit_layers(by_layer)
        self.begun.clear()
        if type(self._optimizer) is self._class:  # no update is under way, so `_updated` will not be called
            self._order_state()
        self._updates.torn = None  # the background has all updates now; if one fails, `torn` is set again
        if self._traits.waits or self._state_held:
            self._updates.wait_for_all()
        return self.submitted

    def _submit_layers(self, by_layer: Mapping[StreamedLayer, Groups]) -> None:
        """Submits the layers that are not updated yet, the most urgent one first. The optimizer has no groups afterwards.

        First steps the parameters that stay on the GPU.
        """
        if not self.begun:
            self._updates.begin()
        self._updates.torn = "the optimizer's step was interrupted, and may have updated some layers"
        self._is_state_held()  # counts references while no update runs
        self._step_staying()
        for layer in self._order():
            if layer in by_layer:
                held = not self._traits.waits and self._is_held(layer, _parameters(by_layer[layer]))
                self._submit(layer, by_layer[layer], held=held)
        self._engine.owners.follow()
        self.clipping.pending = None  # the updates clip
        self._groups, self._optimizer.param_groups = self._optimizer.param_groups, self._none

    def _prepare_undivided_step(self, undivided: _UndividedError) -> None:
        """Prepares torch's own step of all layers at once, for a step that cannot be divided.

        Raises:
            RuntimeError: an option needs updates of single layers.
        """
        self._refuse(undivided)
        if self._traits.early is EarlyUpdates.TRIED:
            self.needed.append(undivided.args[0])
        self.clipping.finish()  # torch's step does not clip

    def _step_staying(self) -> None:
        """Steps the parameters that stay on the GPU, together, with torch's own code and the settings that the user gave.

        Called in the user's thread: the kernels follow those of backward in the stream of the model.
        """
        groups = [divide(group, self._engine.found.on_gpu)[1] for group in self._optimizer.param_groups]
        if groups := [group for group in groups if group["params"]]:
            self._note_state()
            part = self._part(groups)
            step = self._step_of(part)
            with torch.no_grad():
                self._engine.stepper.step_checked(part, step) if self._traits.checked else step()

    def refuse_other_clipping(self, clip_value: float | None) -> None:
        """Checks that the updates in this step's backward have clipped in the same way.

        Args:
            clip_value: the limit of each element; None for a norm, which is known only after backward.

        Raises:
            RuntimeError: updates have begun with another limit.
        """
        if self.begun and (clip_value is None or clip_value != self.clip_value):
            raise RuntimeError(
                'Gradient clipping was changed within a training step. With optimizer_overlap="backward", layers are updated '
                "already. Change trainer.gradient_clip_val between two batches (on_train_batch_end), or use "
                'SuperpipelineStrategy(optimizer_overlap="forward").'
            )

    def _refuse(self, undivided: _UndividedError) -> None:
        """Raises a RuntimeError for a step that cannot be divided, if an option needs updates of single layers."""
        what, instead = undivided.args
        needs = {
            'optimizer_overlap="backward"': self.begun,
            self._state.option: self._state.elsewhere,
            'optimizer_on="gpu"': self._traits.on_gpu,
            "Training on several devices": self._engine.owners.several,
        }
        for name, needed in needs.items():
            if needed:
                names = [self._state.option] * self._state.elsewhere + ["optimizer_on"] * self._traits.on_gpu
                otherwise = f"leave {' and '.join(names)} out" if names else ""
                if not self._traits.on_gpu:
                    otherwise += f"{' and ' * bool(names)}pass optimizer_overlap='off'"
                raise RuntimeError(
                    f"{name} updates layers one by one, but {what}. {instead}, or {otherwise}."
                ) from undivided

    def _can_divide(self, group: dict[str, Any]) -> bool:
        """Returns True if the step of a group, run layer by layer, gives the same bits as torch's own step of the group."""
        part, _ = divide(group, self._engine.found.on_gpu)
        return self._traits.separable or not part["params"] or runs_fused(self._optimizer, part, fuse=self._traits.fuse)

    @property
    def submitted(self) -> bool:
        """True if the running step has submitted its updates, and the optimizer has no groups."""
        return self._optimizer.param_groups is self._none

    def give_back_groups(self) -> None:
        """Gives the optimizer its groups again. Called when the step is over."""
        if self._optimizer.param_groups is self._none:  # else user code has replaced them
            self._optimizer.param_groups = self._groups

    def _groups_by_layer(self) -> dict[StreamedLayer, Groups]:
        """Returns each layer's part of the groups: the same settings, and only the layer's parameters.

        Layers whose updates of this step have begun are left out.

        Raises:
            _UndividedError: the step cannot be divided.
        """
        by_layer, state = defaultdict(list), state_of(self._optimizer)
        # If an update has begun in this step, the groups were checked before it. Now the state of some layers has buffers that
        # the state of others lacks, so a second check would fail.
        check = not self.begun
        if check and shares_state(self._optimizer.param_groups, state, self._traits.constants):
            raise _UndividedError("two parameters share a state", "Give each parameter a state of its own")
        for group in self._optimizer.param_groups:
            if check and not self._can_divide(group):
                raise _UndividedError("a group of parameters is not fused", "Make the optimizer with fused=True")
            group, _ = divide(group, self._engine.found.on_gpu)
            settings = self._copy_settings(group)
            if check and self._traits.early.in_backward and not self._traits.on_gpu:
                trained = [p for p in group["params"] if p.requires_grad and self._engine.updating.owns(p)]
                if lacks_buffers(group, state, trained):
                    what = "some parameters of a group have momentum and others have none yet"
                    raise _UndividedError(what, "Pass optimizer_overlap='forward'")
            name_of = dict(zip(map(id, group["params"]), group.get("param_names", ()), strict=False))
            for layer, parameters in self._parameters_by_layer(group).items():
                named = {"param_names": [name_of[id(p)] for p in parameters]} if name_of else {}
                by_layer[layer].append({**settings, **named, "params": parameters})
        return by_layer

    def _copy_settings(self, group: dict[str, Any]) -> dict[str, Any]:
        """Copies a group's settings, because schedulers change them after the step, while updates may still run.

        For steps on the CPU, also with ``fused=True`` if torch would run the group fused.
        """
        settings = tree_map(_snapshot, {key: value for key, value in group.items() if key not in OF_EACH})
        if not self._traits.on_gpu:
            settings |= settings_on_cpu(settings)
            if self.begun or runs_fused(self._optimizer, group, fuse=self._traits.fuse):
                settings["fused"] = True
        return settings

    def _parameters_by_layer(self, group: dict[str, Any]) -> dict[StreamedLayer, list[nn.Parameter]]:
        """Returns a group's parameters by layer, without layers whose updates of this step have begun.

        Raises:
            _UndividedError: a parameter is not the module's, or has a sparse gradient.
        """
        parts = defaultdict(list)
        for parameter in group["params"]:
            layer = self._engine.updating.layer_of(parameter)
            if layer is None:
                what = f"the optimizer has a parameter of shape {tuple(parameter.shape)} that is not the module's"
                raise _UndividedError(what, "Make it the module's")
            if layer not in self.begun and self._engine.owners.owns(layer):
                if _is_sparse(parameter):
                    raise _sparse(layer)
                parts[layer].append(parameter)
        return parts

    def _submit(self, layer: StreamedLayer, groups: Groups, *, held: bool) -> None:
        """Submits the update of a layer to the background thread. Until updates end, the optimizer has the class that waits.

        Args:
            layer: the layer.
            groups: the layer's part of the groups.
            held: True if user code holds tensors that the update writes. Then this waits for the update.
        """
        parameters = _parameters(groups)
        self._note_state()
        if type(self._optimizer) is self._class:
            # See "Note: class that waits" in updates/__init__.
            self._optimizer.__class__ = _waiting(self._class, self._finish)
            self._updates.afterwards(self._updated)
        part = self._part(groups)
        # Taken now, because the update runs later: user code may then change settings, and the next step may clip otherwise.
        engine, context, clips = self._engine, self._context, self._record_clipping(parameters)

        def update() -> None:
            self._state.load((layer, self._optimizer), part)
            trained = [parameter for parameter in parameters if parameter.grad is not None]
            self._step_layer(layer, part, trained, clips, context)
            if self._traits.ends_on_host:
                engine.device.synchronize(layer.downloaded, Wait.READ_AFTER_TAKE)
            self._state.store((layer, self._optimizer), part)
            vars(part).pop("state", None)  # so that `_is_state_held` counts no reference of an update that has ended

        at_once = self._traits.compiles or self._makes_state(parameters) or held
        release = (
            partial(engine.updating.release_gradients, layer, parameters)
            if self._traits.early is EarlyUpdates.FREES
            else None
        )
        self._updates.submit(layer, update, release)
        if at_once and not self._traits.waits:
            self._updates.complete(layer)

    def _record_clipping(self, parameters: Sequence[nn.Parameter]) -> dict[int, Change]:
        """Records the step's clipping in narrow gradients, which are then clipped when they are widened.

        Returns:
            The clipping of the other gradients, which the update clips itself, by the id of their parameter.
        """
        clip = self.clipping.pending
        if clip is None and self.clip_value is not None:  # in backward, before the precision plugin clips
            clip = by_value(self.clip_value)
        return {id(p): clip for p in parameters if clip is not None and not change(p, clip)}

    def _part(self, groups: Groups) -> Optimizer:
        """Returns the optimizer with these groups alone; see "Note: part of an optimizer" in ``updates/__init__``."""
        part = object.__new__(self._class)
        vars(part).update(attributes_of(self._optimizer), param_groups=groups)
        return part

    def _step_of(self, part: Optimizer) -> Callable[[], Any]:
        """Returns the optimizer's own code for a part of it."""
        # A user's class may read the loss that its closure returns.
        closures = (self._closure,) if self._traits.checked and self._closure is not None else ()
        return partial(_own_step(self._class), part, *closures)

    def _note_state(self) -> None:
        """Notes which parameters have state, before the first update of a step that may make some."""
        if self._noted:
            return
        self._noted = True
        state = state_of(self._optimizer)
        if not all(
            dict.get(state, p) for p in _parameters(self._optimizer.param_groups) if self._engine.updating.owns(p)
        ):
            self._updates.wait_for_all()  # updates of the last step may still make state
            self._known = set(dict.keys(state))

    def _order_state(self) -> None:
        """Puts new state in the order of the parameters, as torch's step makes it. No update is under way."""
        known, self._known = self._known, None
        if known is not None:
            groups = self._groups if self.submitted else self._optimizer.param_groups
            order_new_state(state_of(self._optimizer), _parameters(groups), known)

    def _is_held(self, layer: StreamedLayer, parameters: Sequence[nn.Parameter]) -> bool:
        """Returns True if user code holds tensors that the update writes: a kept ``state_dict()``, a view, optimizer state.

        Such a tensor is not a parameter, so nothing notices when user code reads or writes it.
        """
        if self._is_state_held() or self._engine.updating.is_viewed(layer):
            return True
        state = state_of(self._optimizer)
        own = [dict.get(state, parameter, {}) for parameter in parameters]
        # Two references are ours: the optimizer's, and that of the list.
        if any(references(own, index) > ALONE + 1 for index in range(len(own))):
            return True  # the update fills a dictionary that user code holds
        return held_elsewhere(own, self._engine.stepper.references((layer, self._optimizer)))

    def _is_state_held(self) -> bool:
        """Returns True if user code holds ``optimizer.state`` or ``vars(optimizer)``. Nothing notices when it reads these.

        The first call in a step counts the references, before the first update of the step. The parts of earlier steps have no
        reference any more.
        """
        if self._state_held is None:
            self._updates.wait_for_all()
            held = sys.getrefcount(state_of(self._optimizer)) > _UNHELD
            self._state_held = held or sys.getrefcount(attributes_of(self._optimizer)) > _UNHELD
            if self._state_held and not self._told and not self._traits.waits:
                self._told = True
                LOG.info(
                    "Superpipeline: other code holds %s.state or its vars(), so these steps do not overlap with the model. "
                    "Read optimizer.state each time instead.",
                    self._class.__name__,
                )
        return self._state_held

    def _makes_state(self, parameters: Sequence[nn.Parameter]) -> bool:
        """Returns True if the optimizer may create state of these parameters on the GPU, because it steps one for the first time.

        The dtype of that state is the default dtype of the process. (On the CPU torch's fused steps name the dtype.) The
        parameters are recorded as stepped, so the next call returns False.
        """
        if not self._traits.on_gpu:
            return False
        new = {id(p) for p in parameters if stored(p) is not None} - self._stepped
        self._stepped |= new
        return bool(new)

    def _step_layer(
        self,
        layer: StreamedLayer,
        part: Optimizer,
        trained: Sequence[nn.Parameter],
        clips: Mapping[int, Change],
        context: StepContext,
    ) -> None:
        """Runs the step of one layer, and casts its new weights. Runs in the background thread.

        Args:
            layer: the layer.
            part: the layer's part of the optimizer.
            trained: its parameters that have a gradient.
            clips: how each gradient is still to be clipped, by the id of its parameter.
            context: the settings of the thread that has called the step.
        """
        step = partial(context.run, self._step_of(part))
        stepper = self._engine.stepper
        if self._traits.on_gpu:
            _clip(trained, clips)
            stepper.step((layer, self._optimizer), part, step, declared=self._traits.checked)
            return
        for parameter in trained:
            self._engine.device.access(unwidened(parameter.grad), Stream.UPDATE, write=id(parameter) in clips)
        if self._traits.separable:
            _clip(trained, clips)
            if self._traits.checked:
                stepper.step_checked(part, step)
            else:
                step()
        else:
            # See "Note: fused operator in pieces" in updates/__init__.
            with mode_for(trained, layer.casts.places(Stream.UPDATE), clips):
                step()
        layer.casts.refresh(by=Stream.UPDATE, but=set() if self._traits.separable else set(map(id, trained)))

    def _finish(self) -> None:
        """Waits for all updates, because code reads the optimizer's state.

        Raises:
            RuntimeError: backward has updated layers, so the state is not the one from before the step any more.
        """
        self._updates.finish()
        for layer in self.begun if self._updates.threads.own else ():
            layer.refuse_updated("the optimizer's state was needed")

    def _updated(self) -> None:
        """Gives the optimizer its own class again. Called after all updates."""
        self._optimizer.__class__ = self._class
        if not self.begun:  # else the step continues, and other layers may make state
            self._order_state()


def _own_step(kind: type[Optimizer]) -> Callable[..., Any]:
    """Returns an optimizer's step without its hooks, which run once for all layers."""
    # torch wraps the `step` of each class in a function that calls the hooks.
    own: Callable[..., Any] = kind.step.__wrapped__  # type: ignore[attr-defined]
    return own


def _clip(parameters: Sequence[nn.Parameter], clips: Mapping[int, Change]) -> None:
    for parameter in parameters:
        if id(parameter) in clips and parameter.grad is not None:
            clips[id(parameter)](parameter.grad)


def _is_sparse(parameter: nn.Parameter) -> bool:
    gradient = stored(parameter)
    return gradient is not None and gradient.layout is not torch.strided


class _UndividedError(Exception):
    """A step cannot be divided into updates of layers. The arguments are the reason and a remedy."""


def _parameters(groups: Groups) -> list[nn.Parameter]:
    return [parameter for group in groups for parameter in group["params"]]


def _sparse(layer: StreamedLayer) -> _UndividedError:
    return _UndividedError(f"{layer.name!r} has sparse gradients", "Make embeddings with sparse=False")


def _waiting(kind: type[Optimizer], finish: Callable[[], None]) -> type[Optimizer]:
    """Returns the class that an optimizer has while its updates are under way. Code that reads the state waits first.

    Args:
        kind: the optimizer's own class.
        finish: waits for the updates, after which the optimizer has its own class again.
    """

    def attributes(self: Optimizer) -> dict[str, Any]:
        finish()
        return attributes_of(self)

    def set_attributes(self: Optimizer, value: dict[str, Any]) -> None:
        finish()
        OWN_ATTRIBUTES.__set__(self, value)

    def state(self: Optimizer) -> Any:
        finish()
        # A LightningOptimizer that is made meanwhile derives from this class. It has no state: after this error its `__getattr__`
        # reads the wrapped optimizer's.
        if "state" not in attributes_of(self):
            raise AttributeError("state")
        return attributes_of(self)["state"]

    def set_state(self: Optimizer, value: Any) -> None:
        finish()
        attributes_of(self)["state"] = value

    def set_all(self: Optimizer, value: dict[str, Any]) -> None:
        finish()  # load_state_dict replaces the state without reading it
        kind.__setstate__(self, value)

    def reduce(self: Optimizer, protocol: Any) -> Any:
        finish()
        if type(self) is not waiting:
            return self.__reduce_ex__(protocol)  # the optimizer has its own class again, whose method this now is
        # In a thread that is not the run's, the optimizer keeps the class that waits.
        reduced: Any = kind.__reduce_ex__(self, protocol)
        function, arguments, *more = reduced
        return function, tuple(kind if each is waiting else each for each in arguments), *more

    properties = {"state": property(state, set_state), "__dict__": property(attributes, set_attributes)}
    methods = {**properties, "__setstate__": set_all, "__reduce_ex__": reduce}
    waiting = type(kind.__name__, (kind,), {**methods, "__module__": kind.__module__})
    return waiting


def _snapshot(setting: Any) -> Any:
    return setting.clone() if isinstance(setting, Tensor) else setting
