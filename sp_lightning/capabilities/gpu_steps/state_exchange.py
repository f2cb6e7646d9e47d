"""Exchanges optimizer state between the user's optimizer, whose state is in host memory, and steps on the GPU."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Container, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from sp_lightning.capabilities.gpu_steps.host_state import HostState, SeparateState, of_device, unshare
from sp_lightning.capabilities.gpu_steps.twins import made_on, to_host
from sp_lightning.core.device.device import Device, Stream
from sp_lightning.core.device.timeline import Kind
from sp_lightning.core.torch_compat.modes import no_inference_mode
from sp_lightning.core.torch_compat.private import is_traceable_wrapper_subclass, tree_map
from sp_lightning.core.updates.fused import constants_of
from sp_lightning.core.updates.layer_stepper import Key


class StateExchange:
    """The host memory of optimizer state, and the copies for steps on the GPU.

    Args:
        device: the GPU.
        pin: True to page-lock host memory of state.

    Attributes:
        on_disk: True if state is written to a disk between two updates. Then each tensor has memory of its own.
    """

    def __init__(self, device: Device, *, pin: bool) -> None:
        self.on_disk = False
        self._device = device
        self._pin = pin
        self._states: dict[Key, SeparateState] = {}

    def copy(
        self, kind: Kind, layer: int, targets: Sequence[Tensor], sources: Sequence[Tensor], stream: Stream
    ) -> None:
        """Issues copies, and counts their bytes.

        Args:
            kind: the kind of the interval in the timeline.
            layer: the index of the layer.
            targets, sources, stream: as in :meth:`Device.copy`.
        """
        nbytes = sum(each.nbytes for each in sources)
        if stream is Stream.UPLOAD:
            self._device.stats.step_upload_bytes += nbytes
        else:
            self._device.stats.step_download_bytes += nbytes
        with self._device.timed(kind, layer, stream, nbytes):
            self._device.copy(targets, sources, stream)

    # ------------------------------------------------------------------ to the GPU

    def join(self, key: Key, groups: Iterable[dict[str, Any]], state: dict[Any, Any]) -> SeparateState | None:
        """Returns the state of a layer that plain Lightning has on the GPU, in host memory for an upload; None if there is none.

        The tensors are moved into one piece of memory, unless each needs memory of its own. This is repeated if a checkpoint or
        user code has exchanged tensors.
        """
        held = self._states.get(key)
        known = set() if held is None else set(map(id, held.tensors))
        tensors = list(of_device(groups, state, known))
        if held is not None and held.holds(tensors):
            return held
        tensors = _unshared(key, groups, state, known)
        if not tensors:
            self._states.pop(key, None)
            return None
        if self.on_disk:
            held = SeparateState(tensors)
        else:
            held = self._anew(tensors)
            for own, each in zip(held.tensors, tensors, strict=True):
                own.copy_(each)
                with no_inference_mode():
                    each.data = own
            held.tensors = tensors
        self._states[key] = held
        return held

    def on_gpu(
        self,
        parameters: Iterable[nn.Parameter],
        twins: dict[int, nn.Parameter],
        state: dict[Any, Any],
        uploaded: dict[int, Tensor],
    ) -> tuple[dict[Any, Any], list[tuple[Tensor, Tensor]]]:
        """Returns the state of parameters for a step on the GPU.

        Args:
            parameters: the host parameters.
            twins: the parameters on the GPU, by the ``id`` of the host parameter.
            state: the user's state.
            uploaded: the uploaded tensors of the state, by the ``id`` of the host tensor.

        Returns:
            - The state, by the parameters on the GPU.
            - The tensors of the state that stay on the host, each with the copy that is stepped.
        """
        stay = list[tuple[Tensor, Tensor]]()

        def for_step(leaf: Any) -> Any:
            if isinstance(leaf, Tensor) and is_traceable_wrapper_subclass(leaf):  # quantised state, which is small
                return leaf.to(self._device.device)
            if type(leaf) is Tensor and id(leaf) not in uploaded:
                # It stays on the host, as on plain Lightning: a step counter, for example. A copy is stepped, so that a step that
                # fails leaves the user's state unchanged. Later, `give_back` copies the new values to that state.
                stay.append((leaf, leaf.clone()))
                return stay[-1][1]
            return uploaded.get(id(leaf), leaf)

        found = defaultdict[Any, dict[Any, Any]](dict)
        for p in parameters:
            if values := dict.get(state, p):
                found[twins[id(p)]] = tree_map(for_step, dict(values))
        return found, stay

    # ------------------------------------------------------------------ back to the host

    def give_back(
        self,
        key: Key,
        pairs: Iterable[tuple[nn.Parameter, nn.Parameter]],
        new: dict[Any, Any],
        state: dict[Any, Any],
        stay: Iterable[tuple[Tensor, Tensor]],
    ) -> list[tuple[Tensor, Tensor]]:
        """Puts the state of a step on the GPU into the user's optimizer, as tensors on the host.

        The caller downloads the values. Until the downloads have ended, the tensors on the host have no valid values.

        Args:
            key: the layer and its optimizer.
            pairs: the host parameters, each with its twin on the GPU.
            new: the state after the step, by the parameters on the GPU. A parameter without new state keeps its old state.
            state: the user's state. Its dictionaries are changed in place, because user code may hold them.
            stay: tensors that stay on the host, each with the copy that was stepped, from :meth:`on_gpu`.

        Returns:
            The downloads: each tensor on the host, with the tensor on the GPU that is copied to it.
        """
        entries = [(p, new[twin]) for p, twin in pairs if new.get(twin)]
        of_host = {id(stepped): own.copy_(stepped) for own, stepped in stay}
        copies = list[tuple[Tensor, Tensor]]()
        if made := made_on(self._device.device, (values for _, values in entries)):
            held = self._states.get(key)
            if held is None or not held.is_like(made):
                held = self._states[key] = self._anew(made)
            copies = list(zip(held.for_download(), made, strict=True))
            of_host |= {id(on_gpu): on_host for on_gpu, on_host in zip(made, held.tensors, strict=True)}
        for p, values in entries:
            entry, now = state.setdefault(p, {}), tree_map(lambda leaf: to_host(leaf, of_host), values)
            entry.clear()
            entry.update(now)
        return copies

    def _anew(self, like: Sequence[Tensor]) -> SeparateState:
        """Returns host memory for new state, without values, with the shapes, dtypes and strides of ``like``."""
        if self.on_disk:
            return SeparateState([torch.empty_like(each, device="cpu") for each in like])
        return HostState(self._device, like, pin=self._pin)

    def references(self, key: Key) -> Container[int]:
        """See :meth:`LayerStepper.references`."""
        held = self._states.get(key)
        return () if held is None else set(map(id, held.tensors))


def _unshared(
    key: Key, groups: Iterable[dict[str, Any]], state: dict[Any, Any], known: Collection[int]
) -> list[Tensor]:
    """Returns the tensors of a layer's state that plain Lightning has on the GPU. First gives the layer its own constants.

    Args:
        key: the layer and its optimizer.
        groups, state: the optimizer's groups with the layer's parameters, and its state.
        known: the ``id`` of each tensor that a step on the GPU has made.
    """
    if constants := constants_of(key[1]):
        unshare(groups, state, constants)
    return list(of_device(groups, state, known))
