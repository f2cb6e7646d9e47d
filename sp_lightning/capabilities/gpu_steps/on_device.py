"""Steps layers on the GPU: uploads weights, gradients and state, runs the optimizer's own code, and downloads the results.

Weights and optimizer state are in host memory that transfers read and write. For its update, a layer's weights, gradients and
state are uploaded to one of two slots, so that the next layer's upload and the last layer's download overlap with the step. The
optimizer finds ordinary parameters and tensors on the GPU, and steps them in the form (foreach, fused, capturable) that its user
chose.

Steps have a stream of their own. On the model's stream, the next forward's kernels would wait for the state of layers that they
do not need yet. The two streams share no memory: new weights are uploaded from the host again, or a fetch copies them from the
tensors that a step has made.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Container, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer

from sp_lightning.capabilities.gpu_steps.alone import DeclaredStep, is_declared
from sp_lightning.capabilities.gpu_steps.host_state import SeparateState, ids_of_constants
from sp_lightning.capabilities.gpu_steps.state_exchange import StateExchange
from sp_lightning.capabilities.gpu_steps.step_slots import StepSlot, StepSlots
from sp_lightning.capabilities.gpu_steps.twins import for_fetch, twin_of, written_by
from sp_lightning.core.device.device import Device, Stream, Wait
from sp_lightning.core.device.layout import aligned, lay_out, part, total_bytes
from sp_lightning.core.plan.plan import Plan
from sp_lightning.core.torch_compat.modes import no_inference_mode
from sp_lightning.core.torch_compat.patched import state_of
from sp_lightning.core.updates.fused import constants_of
from sp_lightning.core.updates.layer_stepper import FRESH, Key, LayerStepper
from sp_lightning.core.weights.gradient_roles import Change, narrow_and_changes
from sp_lightning.core.weights.layer import StreamedLayer

_HALF = 128 * 2**20
"""The most bytes of each half of the buffer to which gradients are uploaded for their norms."""


class StepsOnDevice(LayerStepper):
    """Steps layers on the GPU. The background thread calls it, one layer after the other.

    Args:
        device: the GPU.
        pin: True to page-lock host memory of state.
        slots: the number of slots of the largest layer's size, see :class:`StepSlots`.
    """

    steps_all = True

    def __init__(
        self,
        device: Device,
        *,
        pin: bool,
        slots: int,
    ) -> None:
        self._device = device
        device.steps = True
        self._slots = StepSlots(device, slots)
        self._state = StateExchange(device, pin=pin)
        self._ahead = False
        # The layers that were stepped last: their new weights are still on the GPU, from where their next fetch may copy them.
        self._fresh = deque[StreamedLayer]()

    def arrange(self, *, state_on_disk: bool, ahead: bool) -> None:
        self._state.on_disk, self._ahead = state_on_disk, ahead

    def is_declared(self, optimizer: Optimizer) -> bool:
        return is_declared(optimizer)

    def step_checked(self, part_of: Any, step: Callable[[], Any]) -> None:
        state, parameters = state_of(part_of), [p for group in part_of.param_groups for p in group["params"]]
        part_of.state = defaultdict(dict, {p: values for p in parameters if (values := dict.get(state, p))})
        contract = DeclaredStep(part_of, parameters, self._device, count=False)
        step()
        contract.compare(part_of.state)
        for p, values in part_of.state.items():
            if (entry := state.setdefault(p, values)) is not values:
                entry.update(values)  # user code may hold the empty entry

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        return self._slots.nbytes

    def step(self, key: Key, part_of: Any, step: Callable[[], Any], *, declared: bool) -> None:
        """Runs the step of a layer. If the optimizer raises an error, the layer's weights and state are unchanged.

        Args:
            key: the layer, and the user's optimizer.
            part_of: the layer's part of that optimizer, with the host's parameters in its groups.
            step: the optimizer's own code, which steps ``part_of``.
            declared: True if only the user's class declares that it steps each parameter by itself. The step is then checked.

        Raises:
            RuntimeError: a declared step does other things than step each parameter by itself.
        """
        groups, state = part_of.param_groups, state_of(part_of)
        # Leaves out parameters without a gradient: their state could be taken for the state of another parameter of the same
        # shape. A declared step gets all parameters, because a user's class may step them without a gradient.
        step_groups = [
            {**group, "params": [p for p in group["params"] if p.grad is not None or declared]} for group in groups
        ]
        stepped = [p for group in step_groups for p in group["params"]]
        if not stepped:
            return
        held = self._state.join(key, step_groups, state)
        with self._device.on(Stream.STEP):
            try:
                slot, twins, uploaded = self._bring(key[0].index, stepped, held)
                gradients: list[Any] = [twin.grad for twin in twins]
                versions = [None if declared or gradient is None else gradient._version for gradient in gradients]
                stay = self._exchange(part_of, step_groups, dict(zip(map(id, stepped), twins, strict=True)), uploaded)
                contract = DeclaredStep(part_of, twins, self._device) if declared else None
                step()
                if contract is not None:
                    contract.compare(part_of.state)
                # A user's class may write a gradient through .data, which no version shows. So its gradients count as written.
                written = [
                    g if g is not None and g._version != v and g is twin.grad else None
                    for g, twin, v in zip(gradients, twins, versions, strict=True)
                ]
                pairs = list(zip(stepped, twins, written, strict=True))
                self._take_back(key, slot, pairs, (part_of.state, state, stay))
                part_of.param_groups, part_of.state = groups, state
            except BaseException:
                self._settle(key[0])
                raise

    def _settle(self, layer: StreamedLayer) -> None:
        """After an error, waits until no stream copies weights, state or a slot for the failed update."""
        device = self._device
        for stream in (Stream.UPLOAD, Stream.DOWNLOAD):
            device.wait(Stream.STEP, device.record(stream), Wait.STEP_AFTER_BRING)
        layer.downloaded = device.record(Stream.STEP)
        device.synchronize(layer.downloaded, Wait.READ_AFTER_TAKE)

    def close(self) -> None:
        """Frees GPU memory. State stays on the host."""
        self._slots.free()

    # ------------------------------------------------------------------ before the step

    def _bring(
        self, layer: int, trained: Sequence[nn.Parameter], held: SeparateState | None
    ) -> tuple[StepSlot, list[nn.Parameter], dict[int, Tensor]]:
        """Uploads the weights, gradients and state for a layer's update to a slot, except gradients that stayed on the GPU.

        Args:
            layer: the index of the layer, for the timeline.
            trained: the host parameters that are stepped.
            held: their state; None if there is none yet.

        Returns:
            - The slot.
            - The twins of the parameters, in the slot, with their gradients.
            - The tensors of the state in the slot, by the ``id`` of the host tensor.
        """
        device = self._device
        made = [narrow_and_changes(p.grad) for p in trained]
        computed = [getattr(p.grad, "computed", None) for p in trained]
        coming = [came for (came, _), event in zip(made, computed, strict=True) if event is None and came is not None]
        spans = lay_out(("", each) for each in (*trained, *coming))
        begin = total_bytes(spans)
        nbytes = begin + (0 if held is None else held.nbytes)
        slot = self._slots.take(nbytes)
        memory = slot.memory
        targets, sources = [part(memory, span) for span in spans], [*trained, *coming]
        if held is not None:
            state_targets, state_sources = held.for_upload(memory[begin:nbytes])
            targets += state_targets
            sources += state_sources
        self._state.copy("bring", layer, targets, [each.detach() for each in sources], Stream.UPLOAD)
        device.wait(Stream.STEP, device.record(Stream.UPLOAD), Wait.STEP_AFTER_BRING)
        device.access(memory[:nbytes], Stream.STEP, write=True)
        for event in {id(each): each for each in computed if each is not None}.values():
            # If user code has chosen a stream for backward, the step stream has not waited for its kernels yet.
            device.wait(Stream.STEP, event, Wait.DRAIN_AFTER_GRADIENT)
        arrived = iter(targets[len(trained) :])
        twins = []
        for p, weight, (came, changes), event in zip(trained, targets, made, computed, strict=False):
            twins.append(twin := twin_of(p, weight))
            if event is not None:
                device.access(came, Stream.STEP, write=True)
            if came is None:
                continue
            gradient = came if event is not None else next(arrived)
            twin.grad = gradient.data if gradient.dtype is twin.dtype else gradient.to(twin.dtype)
            for change in changes:
                change(twin.grad)
        pairs = () if held is None else zip(held.tensors, held.spans, strict=True)
        return slot, twins, {id(tensor): part(memory[begin:], span).data for tensor, span in pairs}

    def _exchange(
        self,
        part_of: Any,
        groups: Sequence[dict[str, Any]],
        twins: dict[int, nn.Parameter],
        uploaded: dict[int, Tensor],
    ) -> list[tuple[Tensor, Tensor]]:
        """Gives a part of an optimizer the parameters on the GPU, and the tensors of its state on the GPU.

        Args:
            part_of: the part of the optimizer.
            groups: its parameter groups, with only the host parameters that this step updates.
            twins: the parameters on the GPU, by the ``id`` of the host parameter.
            uploaded: the tensors of the part's state on the GPU, by the ``id`` of the host tensor.

        Returns:
            The tensors of the state that stay on the host, each with the copy that is stepped. If the step succeeds, the values
            of the copies become the state.
        """
        parameters = [p for group in groups for p in group["params"]]
        part_of.state, stay = self._state.on_gpu(parameters, twins, state_of(part_of), uploaded)
        part_of.param_groups = [{**group, "params": [twins[id(p)] for p in group["params"]]} for group in groups]
        return stay

    def references(self, key: Key) -> Container[int]:
        return self._state.references(key)

    # ------------------------------------------------------------------ after it

    def _take_back(
        self,
        key: Key,
        slot: StepSlot,
        stepped: Sequence[tuple[nn.Parameter, nn.Parameter, Tensor | None]],
        states: tuple[dict[Any, Any], dict[Any, Any], list[tuple[Tensor, Tensor]]],
    ) -> None:
        """Begins to download the results of a step, and gives the user's optimizer its state on the host.

        Args:
            key: the layer, and the user's optimizer.
            slot: the slot of the layer.
            stepped: each host parameter, its twin, and the twin's gradient if the step has written it; otherwise None.
            states: the state after the step, by twin; the user's state, by host parameter; and the tensors of the user's state
                that stay on the host, each with the copy that was stepped.
        """
        layer, device = key[0], self._device
        pairs = [(p, twin) for p, twin, _ in stepped]
        what = f"{type(key[1]).__name__}.step has given a parameter of {layer.name!r}"
        copies = list(written_by(what, stepped))  # to the host, from the GPU
        current, places = layer.casts.current, layer.casts.places(Stream.STEP)
        casts = {id(p): twin.detach().to(places[id(p)].dtype) for p, twin in pairs if id(p) in places}
        copies += [(places[index], cast) for index, cast in casts.items()]
        copies += self._state.give_back(key, pairs, *states)
        targets, sources = map(list, zip(*copies, strict=True))
        made = for_fetch(layer, casts, pairs) if self._ahead else []
        # Without the constants: no step writes them, and downloads of the layer before may still be reading them.
        constants = ids_of_constants(states[0], constants_of(key[1]))
        device.access((each for _, each in (*copies, *made) if id(each) not in constants), Stream.STEP, write=True)
        device.wait(Stream.DOWNLOAD, device.record(Stream.STEP), Wait.TAKE_AFTER_STEP)
        self._state.copy("take", layer.index, targets, sources, Stream.DOWNLOAD)
        slot.downloaded = layer.downloaded = device.record(Stream.DOWNLOAD)
        slot.results, layer.step_results, layer.stepped = sources, made, device.record(Stream.STEP)
        self._fresh.append(layer)
        if len(self._fresh) > FRESH:
            self._fresh.popleft().step_results = ()
        with no_inference_mode():
            for p, twin in pairs:
                if twin._version:  # as on plain Lightning: with some versions of torch a fused step shows none
                    increment_version(p)
        if places and (current or set(places) <= {id(p) for p, _ in pairs}):
            layer.casts.mark_current()  # all casts are new, or were current before
        elif layer.masters is not None:
            device.synchronize(layer.downloaded, Wait.READ_AFTER_TAKE)
            layer.casts.refresh(by=Stream.UPDATE)

    # ------------------------------------------------------------------ clipping

    def norms(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        """Returns the norms of gradients, see :meth:`LayerStepper.norms`.

        If all gradients are on the GPU, nothing is uploaded. Otherwise they are uploaded in groups, alternately to the two halves
        of a buffer, so that uploads overlap with the computation of norms. A gradient that is larger than a half uses the whole
        buffer.
        """
        device, made = self._device, list(map(narrow_and_changes, gradients))
        if all(getattr(gradient, "computed", None) is not None for gradient in gradients):  # they are on the GPU
            return [_norm_of(came, each.dtype, changes) for each, (came, changes) in zip(gradients, made, strict=True)]
        sizes = [aligned(came.nbytes) for came, _ in made]
        largest = max(sizes, default=0)
        half = min(sum(sizes), _HALF)
        memory = device.upload_target(max(largest, 2 * half))
        halves = deque([(memory[:half], None), (memory[half : 2 * half], None)])
        found, at = list[Tensor](), 0
        while at < len(gradients):
            end, used = at + 1, sizes[at]
            while end < len(gradients) and used + sizes[end] <= half:
                used += sizes[end]
                end += 1
            buffer, read = (memory, halves[-1][1]) if used > half else halves[0]
            if read is not None:  # the event after the norms of the gradients that were in this memory before
                device.wait(Stream.UPLOAD, read, Wait.FETCH_AFTER_USE)
            came = [each for each, _ in made[at:end]]
            targets = [part(buffer, span) for span in lay_out(("", each) for each in came)]
            device.copy(targets, came, Stream.UPLOAD)
            device.wait(Stream.COMPUTE, device.record(Stream.UPLOAD), Wait.USE_AFTER_FETCH)
            device.access(buffer[:used], Stream.COMPUTE, write=True)  # changes are made in this memory
            for target, gradient, (_, changes) in zip(targets, gradients[at:end], made[at:end], strict=True):
                found.append(_norm_of(target, gradient.dtype, changes))
            computed = device.record(Stream.COMPUTE)
            if used > half:
                halves = deque((each, computed) for each, _ in halves)
            else:
                halves.popleft()
                halves.append((buffer, computed))
            at = end
        return found

    def synchronize_norms(self) -> None:
        self._device.synchronize(self._device.record(Stream.COMPUTE), Wait.CLIP_AFTER_NORM)


def _norm_of(came: Tensor, dtype: torch.dtype, changes: Sequence[Change]) -> Tensor:
    """Returns the norm of a gradient on the GPU.

    Args:
        came: the gradient as backward has computed it.
        dtype: the dtype in which the norm is computed.
        changes: the changes of the gradient since backward. They are made in a copy.
    """
    wide = came.to(dtype, copy=bool(changes))
    for change in changes:
        change(wide)
    return get_total_norm([wide])


def make_stepper(device: Device, plan: Plan, pin: bool) -> StepsOnDevice:
    """Makes the stepper of a run. See :data:`~sp_lightning.core.engine.engine.MakeStepper`."""
    return StepsOnDevice(device, pin=pin, slots=plan.step_slots)
