"""The frozen weights that trials have in common: one copy on the host, and a few layers on the device.

:class:`BaseWeights` moves the frozen weights of a model to one host memory. A trial's copy of the model has parameters of its own
over the same memory. So a weight is common if it lies there, and nothing is compared. Nobody may write the memory:
:meth:`BaseWeights.check` finds a write by its version, and by a digest when a trial ends.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Collection, Hashable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from sp_lightning.core.device.device import Device, Stream, Wait
from sp_lightning.core.device.host_memory import PinnedMemory
from sp_lightning.core.device.layout import PAGE, Span, aligned, bytes_of, lay_out, part, total_bytes, versions, view
from sp_lightning.core.device.lease import lend
from sp_lightning.core.model.found import Layer
from sp_lightning.core.model.wrapped import parts
from sp_lightning.core.plan.plan import PlannedLayer
from sp_lightning.core.store.block import HostBlock
from sp_lightning.core.store.block_memory import BlockMemory, Staging
from sp_lightning.core.torch_compat.modes import no_inference_mode
from sp_lightning.core.torch_compat.private import is_traceable_wrapper_subclass
from sp_lightning.core.weights.layer import StreamedLayer
from sp_lightning.core.weights.ring import Uploads
from sp_lightning.core.weights.writes import digest_of_values
from sp_lightning.experimental.sharing.turns import TURNS, TrialTurn

ON_DEVICE = 2
"""The default number of common layers on the device, in addition to the trials' windows."""
_WRITTEN = (
    "{name!r}, a frozen weight of a SharedBase, was written by {by}. Trials share its memory. Before such a write, give the "
    "module a weight of its own: layer.weight = nn.Parameter(layer.weight.clone(), requires_grad=False)."
)
_LOAD_AGAIN = " The model has the written values now: load it again, and make a new SharedBase(model)."


class BaseWeights:
    """The frozen weights of a model, one behind the other in one host memory.

    Args:
        model: the model. Its frozen parameters become views of the memory.

    Raises:
        ValueError: the model has no frozen parameters.

    Attributes:
        bytes: the memory, flat ``uint8``.
        pinned: True if the memory is page-locked.
    """

    def __init__(self, model: nn.Module) -> None:
        frozen = [(name, p) for name, p in model.named_parameters() if not (p.requires_grad or p.is_meta)]
        named = [each for name, p in frozen for each in parts(name, p)]
        if not named:
            raise ValueError("The model of a SharedBase has no frozen weights: call model.requires_grad_(False) first.")
        self._module, self._frozen = model, [p for _, p in frozen]
        self._spans = lay_out(named)
        self.pinned = False
        self.bytes = Device(torch.device("cpu")).host_empty(total_bytes(self._spans))
        with no_inference_mode(), torch.no_grad():
            for (_, tensor), span in zip(named, self._spans, strict=True):
                part(self.bytes, span).copy_(tensor.data)
                tensor.data = view(lend(bytes_of(self.bytes, span)), replace(span, offset=0))
        self._at = {self.bytes.data_ptr() + span.offset: span for span in self._spans if span.nbytes}
        self._digests = [digest_of_values(part(self.bytes, span)) for span in self._spans]
        self._written = ""  # the error for all trials, after a write
        self._memory: PinnedMemory | None = None

    def copy_of_model(self) -> nn.Module:
        """Returns a copy of the model. Its frozen parameters are new objects over the same memory."""
        return copy.deepcopy(self._module, {id(p): _over_same_memory(p) for p in self._frozen if not p.requires_grad})

    def lock(self, device: Device) -> None:
        """Page-locks the memory, once."""
        self._memory = self._memory or PinnedMemory(device, memory=self.bytes, pin=True)
        self.pinned = self._memory.pinned

    def place(self, tensor: Tensor) -> Span | None:
        """Returns the place of a tensor in the memory; None if it is trained, or has other memory, or another form."""
        with torch.DisableTorchFunctionSubclass():  # neither the values nor an update are needed
            found = self._at.get(tensor.data_ptr())
            alike = found and (tensor.dtype, tensor.shape, tensor.stride()) == (found.dtype, found.shape, found.stride)
        return found if alike and not tensor.requires_grad else None

    def in_front(self, layer: Layer) -> Layer:
        """Returns a layer with its common weights first, in the order of the memory. The rest is in the same order as before."""
        first: Any = partial(sorted, key=lambda named: getattr(self.place(named[1]), "offset", math.inf))
        return CommonFirst(**vars(layer) | {"parameters": tuple(first(layer.parameters))})

    def beginning(self, layer: Layer, planned: PlannedLayer) -> tuple[int, int, int]:
        """Returns the number of common weights with which a layer begins, and the bytes between which they are in the memory.

        Of layers whose single rows are uploaded, of residents and of masters, weights are read from a block's own memory. If not
        all of their weights are common, they count as not common.
        """
        count = begin = end = last = 0
        for found in (self.place(parameter) for _, parameter in layer.parameters):
            if found is None or (count and found.offset != end):
                break
            begin = begin if count else found.offset
            count, end, last = count + 1, found.offset + aligned(found.nbytes), found.offset + found.nbytes
        all_common = count == len(planned.spans) and not planned.casts
        return count if all_common or (type(layer) is CommonFirst and not planned.rows) else 0, begin, last

    def check(self, by: str, begin: int = 0, end: int | None = None) -> None:
        """Checks by digests that no weight between two bytes was written.

        Args:
            by: who may have written, for the error.
            begin, end: the bytes. ``end``: None for the end of the memory.

        Raises:
            RuntimeError: see :meth:`refuse_written`.
        """
        end = self.bytes.nbytes if end is None else end
        for span, digest in zip(self._spans, self._digests, strict=True):
            if begin <= span.offset < end and digest_of_values(part(self.bytes, span)) != digest:
                self._written = self._written or _WRITTEN.format(name=span.name, by=by) + _LOAD_AGAIN
        self.refuse_written()

    def refuse_written(self) -> None:
        """Raises a RuntimeError if :meth:`check` has found a written weight, in any trial, because the weight is all trials'."""
        if self._written:
            raise RuntimeError(self._written)


def _over_same_memory(parameter: nn.Parameter) -> nn.Parameter:
    """Returns a new parameter of the same class and with the same attributes, over the same memory, with versions of its own."""
    made = nn.Parameter(parameter.data, requires_grad=False)
    if not is_traceable_wrapper_subclass(parameter):  # its attributes are tensors, which `data` has made anew
        made.__class__ = type(parameter)
        vars(made).update(vars(parameter))
    return made


class CommonFirst(Layer):
    """A layer whose common weights are in front of the trial's own weights."""


class TrialMemory(BlockMemory):
    """The memory of a block that begins with common weights.

    It has their place as well, so that offsets are the same, but these pages are never used and take no memory. If all weights
    are common, it is their memory.

    Args:
        weights: the common weights.
        begin, end: the bytes of ``weights`` between which those of the block are.
        device, nbytes, pin: as for :class:`BlockMemory`.
    """

    def __init__(self, weights: BaseWeights, begin: int, end: int, device: Device, nbytes: int, pin: bool) -> None:
        self._weights, self._begin, self._end = weights, begin, end
        super().__init__(device, nbytes, pin)

    def reallocate(self) -> None:
        own = aligned(self._end - self._begin)
        self.common, self.pinned = self._weights.bytes[self._begin :][: self._nbytes], self._weights.pinned
        if own < self._nbytes:
            memory = self._device.host_empty(self._nbytes)
            self._memory = PinnedMemory(self._device, memory=memory[own // PAGE * PAGE :], pin=self._pin)
            self.common, self.pinned = memory[: self._nbytes], self.pinned and self._memory.pinned


class TrialBlock(HostBlock):
    """A layer's weights of one trial. The common weights remain where they are; only the trial's own are absorbed.

    Args:
        weights: the common weights.
        found: the result of :meth:`BaseWeights.beginning` for the layer.
        layer, planned, device, staging, options: as for :class:`HostBlock`.

    Attributes:
        base: the bytes of the common weights.
        key: the beginning and the end of these bytes in the memory of all common weights.
    """

    def __init__(
        self, weights: BaseWeights, found: tuple[int, int, int], layer: Layer, planned: PlannedLayer, device: Device,
        staging: Staging, _: Any, **options: Any,
    ) -> None:  # fmt: skip
        self._weights, (self._count, begin, end) = weights, found
        self.key, self.base = (begin, end), weights.bytes[begin:end]
        self.is_common = self._count == len(planned.spans) and not planned.casts
        allocate = partial(TrialMemory, weights, begin, end, device)
        super().__init__(layer, planned, device, staging, allocate, **options)
        self._versions = versions(self.parameters[: self._count])

    def check(self, by: str) -> None:
        """Checks that no common weight was written, as versions show. A write of the same values, as by a checkpoint, is none.

        Raises:
            RuntimeError: a weight was written. ``by``: the trial, for the error.
        """
        before, self._versions = self._versions, versions(self.parameters[: self._count])
        if self._versions != before:
            self._weights.check(by, *self.key)

    @property
    def is_outdated(self) -> bool:  # type: ignore[override]
        return any(parameter.requires_grad for parameter in self.parameters[: self._count])

    def place(self, index: int) -> Tensor:
        return bytes_of(self.base, self.planned.spans[index]) if index < self._count else super().place(index)

    def _absorb(self, index: int, into: Tensor | None) -> None:
        """Raises a RuntimeError if user code has given a common weight other memory with other values."""
        if index >= self._count:
            super()._absorb(index, into)
            return
        span, common = self.planned.spans[index], self.weight_bytes(index)
        with torch.DisableTorchFunctionSubclass():
            value = self.parameters[index].data
        if value.data_ptr() != common.data_ptr() and digest_of_values(value) != digest_of_values(part(self.base, span)):
            raise RuntimeError(_WRITTEN.format(name=span.name, by="this trial"))
        self._make_view(index)


class OnDevice:
    """Copies of common layers on the device: the ones that were uploaded last. Keys identify layers.

    Args:
        layers: the number of layers on the device at once.

    Attributes:
        fetched_bytes: the bytes that were uploaded for all trials together.
    """

    def __init__(self, layers: int) -> None:
        self._layers = layers
        self._copies: dict[Hashable, Tensor] = {}  # in the order of their uploads
        self._device: Device
        self.fetched_bytes = 0

    def has(self, key: Hashable) -> bool:
        """Returns True if a layer is on the device, or its upload is in flight."""
        return key in self._copies

    def bring(self, key: Hashable, source: Tensor, device: Device) -> Tensor:
        """Returns device memory with a layer, which later operations of the upload stream may read.

        If the layer is not on the device, issues its upload, which replaces the layer that was uploaded first. All trials on a
        device have the same upload stream, so their copies need no waits among each other.
        """
        if key not in self._copies:
            self._device = device
            full = len(self._copies) == self._layers
            memory = self._copies.pop(next(iter(self._copies))) if full else None
            if memory is not None and memory.nbytes < source.nbytes:
                self._close(memory)
                memory = None
            if memory is None:
                memory = device.upload_target(source.nbytes)
            device.copy([memory[: source.nbytes]], [source], Stream.UPLOAD)
            self.fetched_bytes += source.nbytes
            self._copies[key] = memory
        return self._copies[key][: source.nbytes]

    def free(self) -> None:
        """Frees the device memory. Called when no trial is under way. Waits for copies from and to the memory."""
        while self._copies:
            self._close(self._copies.popitem()[1])

    def _close(self, memory: Tensor) -> None:
        self._device.synchronize(self._device.record(Stream.UPLOAD), Wait.CLOSE_AFTER_FETCH)
        self._device.access(memory, Stream.COMPUTE, write=True)  # compute may use the memory next


class SharedUploads(Uploads):
    """Fills a trial's slots with common weights from the device, and with the trial's own weights from the host.

    Args:
        device: copies the weights.
        on_device: the common layers on the device.
        turn: the trial's turn, which may end before a layer is uploaded or used.
        under_way: the trials under way. If there is no other one, common weights are uploaded directly into the slot.
    """

    def __init__(self, device: Device, on_device: OnDevice, turn: TrialTurn, under_way: Collection[Any]) -> None:
        super().__init__(device)
        self._on_device, self._turn, self._under_way = on_device, turn, under_way
        self._unused = set[StreamedLayer]()  # layers that were uploaded and not used since then
        self._passed = False  # True after `send`, until an uploaded layer is used for the first time

    def send(self, layer: StreamedLayer, target: Tensor, source: Tensor) -> None:
        block = layer.block
        key = block.key if isinstance(block, TrialBlock) else None
        TURNS.pass_on(self._turn, key)
        self._passed = True
        self._unused.add(layer)
        if not isinstance(block, TrialBlock):
            super().send(layer, target, source)
            return
        common = block.base if len(self._under_way) == 1 else self._on_device.bring(key, block.base, self.device)
        own = aligned(common.nbytes)
        self.device.copy([target[: common.nbytes], target[own:]], [common, source[own:]], Stream.UPLOAD)

    def before_use(self, layer: StreamedLayer) -> None:
        # At the end of a forward no further upload may follow, so `send` lets no other trial have a turn. The kernels of this
        # trial wait for its last uploads. Without a change of turns, kernels of other trials would wait behind them, because the
        # device has one stream for kernels.
        if layer in self._unused:
            self._unused.remove(layer)
            if not self._passed:
                TURNS.pass_on(self._turn)
            self._passed = False
