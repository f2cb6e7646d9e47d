"""Layers that stay on the GPU: their optimizer steps them in their slots, so a step copies neither their weights nor their state.

Such a layer has a slot of its own. Its first step uploads its weights and its optimizer state. From then on the GPU's copy
is the valid one (``layer.kept``). The host parameters have a class (``gpu_steps.away``) that *lands* the layer when user code
needs one of them: it downloads weights and state. User code may then write weights and state, so the next step uploads both
again.

Steps are issued to a stream of their own. It waits for all kernels that were issued to the compute stream before the step was
queued for the background (:meth:`Device.later`). So a step writes the slot after the last kernel that read it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.optim import Optimizer

from sp_lightning.capabilities.gpu_steps.alone import DeclaredStep
from sp_lightning.capabilities.gpu_steps.away import role_of
from sp_lightning.capabilities.gpu_steps.state_exchange import StateExchange
from sp_lightning.capabilities.gpu_steps.twins import resemble, twin_of, written_by
from sp_lightning.core.device.device import Device, Stream, Wait
from sp_lightning.core.device.layout import lay_out, part, total_bytes
from sp_lightning.core.layers.layer import StreamedLayer
from sp_lightning.core.layers.narrow_gradient import NarrowGradient, narrow_and_changes
from sp_lightning.core.layers.roles import leave_all, take_all
from sp_lightning.core.torch_compat.modes import no_dispatch_modes, no_inference_mode
from sp_lightning.core.torch_compat.patched import state_of
from sp_lightning.core.torch_compat.private import tree_leaves
from sp_lightning.core.updates.background import BackgroundUpdates
from sp_lightning.core.updates.layer_stepper import Key


@dataclass(eq=False)
class _Weights:
    """The weights of a layer and of its masters on the GPU.

    Attributes:
        targets: each weight on the GPU, by the ``id`` of the host parameter: masters in ``memory``, other weights in the slot.
        casts: the masters' casts in the slot, by the ``id`` of the host parameter.
        memory: the memory of the masters; None if the layer has none.
        parameters: the host parameters, in the order of ``targets``.
    """

    targets: dict[int, Tensor]
    casts: dict[int, Tensor]
    memory: Tensor | None
    parameters: list[nn.Parameter]


@dataclass(eq=False)
class _Part:
    """A layer on the GPU in one optimizer.

    Attributes:
        twins: the parameters on the GPU, by the ``id`` of the host parameter.
        state: the optimizer's state, by the parameters on the GPU.
        of_host: the tensors of the state that stay on the host, as on plain Lightning, each with the copy that is stepped.
        nbytes: bytes of the state on the GPU.
        counted: the number of parameters whose state ``nbytes`` counts.
    """

    twins: dict[int, nn.Parameter]
    state: dict[Any, Any]
    of_host: list[tuple[Tensor, Tensor]]
    nbytes: int = 0
    counted: int = 0


class StayingLayers:
    """The layers that stay: the background thread steps them, and code that needs their host parameters lands them.

    Args:
        device: the GPU.
        state: exchanges optimizer state between host and GPU. It is also used for layers that do not stay.
        updates: the updates of the run, which land layers; None if no layer stays.

    Attributes:
        nbytes: bytes of GPU memory of masters and state, without slots.
    """

    def __init__(self, device: Device, state: StateExchange, updates: BackgroundUpdates | None = None) -> None:
        self._role = role_of(updates)
        self._device = device
        self._state = state
        self._weights: dict[StreamedLayer, _Weights] = {}
        self._parts: dict[StreamedLayer, dict[Optimizer, _Part]] = {}
        self.nbytes = 0

    def _count(self) -> None:
        """Computes :attr:`nbytes` anew. The number is stored because it is read several times for each layer."""
        masters = sum(each.memory.nbytes for each in self._weights.values() if each.memory is not None)
        self.nbytes = masters + sum(each.nbytes for parts in self._parts.values() for each in parts.values())

    def has_state(self, layer: StreamedLayer, optimizer: Optimizer, parameter: nn.Parameter) -> bool:
        """Returns True if the state of a host parameter is on the GPU."""
        part_of = self._parts.get(layer, {}).get(optimizer) if layer.kept else None
        twin = None if part_of is None else part_of.twins.get(id(parameter))
        return twin is not None and bool(part_of and part_of.state.get(twin))

    # ------------------------------------------------------------------ steps

    def step(self, key: Key, part_of: Any, step: Callable[[], Any], *, declared: bool) -> None:
        """Runs the step of a layer in its slot. If the optimizer raises an error, weights are as it has left them.

        The arguments are those of :meth:`StepsOnDevice.step`.

        Raises:
            RuntimeError: a declared step does other things than step each parameter by itself.
        """
        layer, optimizer = key
        device, groups, state = self._device, part_of.param_groups, state_of(part_of)
        with device.on(Stream.STEP):
            self.keep(layer)
            kept = self._parts[layer].setdefault(optimizer, _Part({}, defaultdict(dict), []))
            self._bring_state(key, groups, state, kept)
            step_groups = [
                {**group, "params": [p for p in group["params"] if p.grad is not None or declared]} for group in groups
            ]
            stepped = [p for group in step_groups for p in group["params"]]
            if not stepped:
                return
            twins = [kept.twins[id(p)] for p in stepped]
            for p, twin in zip(stepped, twins, strict=True):
                resemble(twin, p)
            gradients = self._give_gradients(stepped, twins)
            # A user's class may write a gradient through .data, which no version shows. So its gradients count as written.
            before = [(t._version, None if declared or t.grad is None else t.grad._version) for t in twins]
            part_of.state = kept.state
            part_of.param_groups = [{**g, "params": [kept.twins[id(p)] for p in g["params"]]} for g in step_groups]
            layer.newer_than_host = True
            try:
                contract = DeclaredStep(part_of, twins, device) if declared else None
                step()
                if contract is not None:
                    contract.compare(part_of.state)
                kept.state = part_of.state
                self._take_over(key, stepped, twins, before)
            finally:
                part_of.param_groups, part_of.state = groups, state
                for twin in twins:
                    twin.grad = None
                layer.read_by_step = gradients
                layer.stepped = device.record(Stream.STEP)
            if len(kept.state) > kept.counted:
                leaves = [
                    each for each in tree_leaves(dict(kept.state)) if isinstance(each, Tensor) and device.has(each)
                ]
                kept.counted, kept.nbytes = len(kept.state), sum(each.nbytes for each in leaves)
                self._count()

    def bring(self, layer: StreamedLayer) -> None:
        """Uploads a frozen layer, so that the GPU's copy is the valid one."""
        with self._device.on(Stream.STEP):
            self.keep(layer)

    def keep(self, layer: StreamedLayer) -> None:
        """Makes the GPU's copy of a layer the valid one: uploads the layer and its masters, and casts the masters.

        If the GPU's copy is valid already, does nothing.
        """
        if layer.kept:
            return
        device, slot = self._device, layer.own_slot
        assert slot is not None
        owned = layer.block.parameters
        masters = () if layer.masters is None else layer.masters.block.parameters
        found = self._weights.get(layer)
        if found is None:
            places = [part(slot.memory, span) for span in layer.spans]
            spans = lay_out(("", each) for each in masters)
            memory = device.empty(total_bytes(spans)) if masters else None
            targets = dict(zip(map(id, owned), places, strict=False))
            if memory is not None:
                targets |= {id(p): part(memory, span) for p, span in zip(masters, spans, strict=True)}
            casts = dict(zip(map(id, masters), places[len(owned) :], strict=True))
            found = self._weights[layer] = _Weights(targets, casts, memory, [*owned, *masters])
        self._parts[layer] = {}
        sources = [p.detach() for p in (*owned, *masters)]
        device.wait(Stream.UPLOAD, device.record(Stream.STEP), Wait.FETCH_AFTER_USE)
        self._state.copy("bring", layer.index, list(found.targets.values()), sources, Stream.UPLOAD)
        self._arrive(sources, found.memory, slot.memory)
        for p in masters:
            found.casts[id(p)].copy_(found.targets[id(p)])
        layer.casts.mark_current()
        layer.stepped = device.record(Stream.STEP)
        layer.kept = layer.newer_than_host = True  # the values are equal, but `hide` may free the host's memory
        self._count()

    def hide(self, layer: StreamedLayer) -> None:
        """Frees the host memory of a layer whose GPU copy is valid. Gives its parameters the class that lands it."""
        for member in layer.with_masters:
            take_all(member.block.parameters, self._role)
            if not member.block.hidden:
                member.block.hide()

    def _arrive(self, sources: Iterable[Tensor], *memory: Tensor | None) -> None:
        """Makes steps and the host wait for uploads. The host waits because user code may write the sources from now on.

        Args:
            sources: the host tensors that the uploads read.
            memory: the memory that the uploads write.
        """
        device, sent = self._device, self._device.record(Stream.UPLOAD)
        device.wait(Stream.STEP, sent, Wait.STEP_AFTER_BRING)
        device.access([each for each in memory if each is not None], Stream.STEP, write=True)
        device.synchronize(sent, Wait.REUSE_AFTER_BRING)
        device.access(sources, Stream.UPDATE, write=True)

    def _bring_state(self, key: Key, groups: Sequence[dict[str, Any]], state: dict[Any, Any], kept: _Part) -> None:
        """Makes twins of the parameters of one optimizer that have none in ``kept`` yet, and uploads their state.

        Adds both to ``kept``. The user's ``state`` has empty entries for these parameters afterwards.
        """
        groups = [{**group, "params": [p for p in group["params"] if id(p) not in kept.twins]} for group in groups]
        if not any(group["params"] for group in groups):
            return
        layer, device, weights = key[0], self._device, self._weights[key[0]]
        held, uploaded = self._state.separate(key, groups, state), dict[int, Tensor]()
        if held is not None:
            memory = device.upload_target(held.nbytes, Stream.STEP)
            targets, sources = held.for_upload(memory)
            self._state.copy("bring", layer.index, targets, sources, Stream.UPLOAD)
            self._arrive(sources, memory)
            layer.stepped = device.record(Stream.STEP)  # a step may follow, or none, or an error
            uploaded = {id(each): part(memory, span).data for each, span in zip(held.tensors, held.spans, strict=True)}
        parameters = [p for group in groups for p in group["params"]]
        twins = {id(p): twin_of(p, weights.targets[id(p)]) for p in parameters}
        own, of_host = self._state.on_gpu(parameters, twins, state, uploaded)
        for p in parameters:
            if p in state:
                state[p].clear()
        kept.twins |= twins
        kept.state.update(own)
        kept.of_host += of_host

    def _give_gradients(self, stepped: Sequence[nn.Parameter], twins: Sequence[nn.Parameter]) -> list[Tensor]:
        """Gives the twins their gradients. Uploads gradients that were offloaded, and returns those that stayed on the GPU."""
        device = self._device
        made = [(p, twin, *narrow_and_changes(p.grad)) for p, twin in zip(stepped, twins, strict=True)]
        stayed = [came for p, _, came, _ in made if getattr(p.grad, "computed", None) is not None]
        for event in {id(e): e for p in stepped if (e := getattr(p.grad, "computed", None)) is not None}.values():
            device.wait(Stream.STEP, event, Wait.DRAIN_AFTER_GRADIENT)
        known = set(map(id, stayed))
        coming = [came for _, _, came, _ in made if came is not None and id(came) not in known]
        arrived = iter(self._upload(coming) if coming else ())
        for _, twin, came, changes in made:
            if came is None:
                continue
            stays = id(came) in known
            gradient = came if stays else next(arrived)
            if stays:
                device.access(came, Stream.STEP, write=False)
            if gradient.dtype is not twin.dtype:
                twin.grad = gradient.to(twin.dtype)
            else:  # user code may read a gradient that has stayed, and must not find the changes in it
                twin.grad = gradient.clone() if stays and changes else gradient.data
            for change in changes:
                change(twin.grad)
        return stayed

    def _upload(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        """Returns copies of gradients in GPU memory. Steps and the host wait for the uploads."""
        device, spans = self._device, lay_out(("", each) for each in gradients)
        memory = device.upload_target(total_bytes(spans), Stream.STEP)
        targets = [part(memory, span) for span in spans]
        device.copy(targets, list(gradients), Stream.UPLOAD)
        self._arrive(gradients, memory)
        return targets

    def _take_over(
        self,
        key: Key,
        stepped: Sequence[nn.Parameter],
        twins: Sequence[nn.Parameter],
        before: Sequence[tuple[int, int | None]],
    ) -> None:
        """Completes a step: increments the versions of host parameters that were written, and casts new weights.

        Gradients that the step has written are downloaded to ``param.grad``, or replace a narrow gradient.

        Args:
            key: the layer, and the user's optimizer.
            stepped, twins: the host parameters, and their twins.
            before: before the step, the version of each twin, and of its gradient. None if the gradient counts as written.

        Raises:
            RuntimeError: the step has given a parameter another dtype or shape.
        """
        layer, device, weights = key[0], self._device, self._weights[key[0]]
        what = f"{type(key[1]).__name__}.step has given a parameter of {layer.name!r}"
        # Only for the errors of `written_by`: nothing is downloaded.
        list(written_by(what, ((p, twin, None) for p, twin in zip(stepped, twins, strict=True))))
        written = list[tuple[Tensor, Tensor]]()
        for p, twin, (version, gradients) in zip(stepped, twins, before, strict=True):
            place = weights.targets[id(p)]
            if twin.data_ptr() != place.data_ptr():  # the step has set `twin.data = other`
                place.copy_(twin.detach())
                twin.data = place
            if id(p) in weights.casts:
                weights.casts[id(p)].copy_(place)
            if twin._version != version:  # as on plain Lightning: with some versions of torch a fused step shows none
                increment_version(p)
            if twin.grad is not None and p.grad is not None and twin.grad._version != gradients:
                written.append((p.grad, twin.grad))
        for gradient, on_gpu in written:
            if type(gradient) is NarrowGradient:
                gradient.narrow_and_changes, gradient.computed = (on_gpu, ()), device.record(Stream.STEP)
            else:
                device.wait(Stream.DOWNLOAD, device.record(Stream.STEP), Wait.TAKE_AFTER_STEP)
                device.copy([gradient], [on_gpu], Stream.DOWNLOAD)
        if written:
            # User code may read the gradients at any time, so the host waits. Few optimizers write gradients.
            for stream in (Stream.STEP, Stream.DOWNLOAD):
                device.synchronize(device.record(stream), Wait.READ_AFTER_TAKE)
        layer.casts.mark_current()

    # ------------------------------------------------------------------ back to the host

    def land(self, layer: StreamedLayer) -> None:
        """Downloads the weights and the state of a layer, if the host's are older. The GPU's copy is still valid."""
        if layer.newer_than_host:
            with no_inference_mode(), no_dispatch_modes(), torch.no_grad(), torch.DisableTorchFunctionSubclass():
                self._land(layer)

    def _land(self, layer: StreamedLayer) -> None:
        device, weights = self._device, self._weights[layer]
        for member in layer.with_masters:
            member.block.show()
        copies = [(p.data, weights.targets[id(p)]) for p in weights.parameters]
        places = layer.casts.places(Stream.DOWNLOAD, values_change=False)  # graphs have saved the casts on the GPU
        copies += [(places[key], cast) for key, cast in weights.casts.items() if key in places]
        # Not the parameters of the optimizer's groups: user code may have removed one, and must still find its state.
        known = {id(p): p for p in weights.parameters}
        for optimizer, kept in self._parts[layer].items():
            pairs = [(known[key], twin) for key, twin in kept.twins.items()]
            state = state_of(optimizer)
            copies += self._state.give_back((layer, optimizer), pairs, kept.state, state, kept.of_host)
            self._state.forget((layer, optimizer))
        targets, sources = map(list, zip(*copies, strict=True))
        device.wait(Stream.DOWNLOAD, layer.stepped, Wait.TAKE_AFTER_STEP)
        device.wait(Stream.DOWNLOAD, device.record(Stream.COMPUTE), Wait.TAKE_AFTER_USE)
        self._state.copy("take", layer.index, targets, sources, Stream.DOWNLOAD)
        device.synchronize(device.record(Stream.DOWNLOAD), Wait.READ_AFTER_TAKE)
        layer.casts.mark_current()
        layer.newer_than_host = False

    def make_host_valid(self, layer: StreamedLayer) -> None:
        """Makes the host's copy of a layer the valid one, after :meth:`land`. The next fetch or step uploads it again."""
        # A fetch into the slot waits for the last use by compute, but not for the step that wrote the slot. So the host waits.
        self._device.synchronize(layer.stepped, Wait.READ_AFTER_TAKE)
        layer.kept = False
        self._parts.pop(layer, None)
        self._count()
        for member in layer.with_masters:
            leave_all(member.block.parameters, self._role)

    def forget(self, layers: Iterable[StreamedLayer]) -> None:
        """Called when the slots of these layers are freed. The host's copies are valid."""
        for layer in layers:
            self._weights.pop(layer, None)
            self._parts.pop(layer, None)
            layer.own_slot = None
        self._count()
