"""One layer's block of the host store: its weights in one flat, pinned memory.

The user's ``Parameter`` objects become views of the block. So every optimizer, checkpoint and callback works on them unchanged.
Each parameter has its own torch storage, although the memory is one block: a storage tells whether user code holds a view of that
weight, and ``torch.save`` writes only that weight.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from sp_lightning.core.device.device import Device
from sp_lightning.core.device.layout import bytes_of, part, view
from sp_lightning.core.device.lease import lend, shared
from sp_lightning.core.messages import KEPT_MEMORY, LOG, say_once
from sp_lightning.core.model.found import Layer
from sp_lightning.core.plan.plan import PlannedLayer
from sp_lightning.core.store.block_memory import Allocate, GradientMemory, Staging
from sp_lightning.core.torch_compat.modes import no_inference_mode
from sp_lightning.core.torch_compat.private import move_storage, storage_of

_open = WeakSet[Any]()
"""The blocks of all runs of the process that have not ended."""
_moved: list[tuple[StorageWeakRef, Tensor]] = []
"""Storages that were moved out of a block, with the memory of the block: a NumPy array may still view that memory."""

OTHER_BACKEND = (
    "{name!r} is on {device}, and torch does not move an existing parameter from there to the CPU in place, as it does from "
    "CUDA, ROCm and XPU. Call module.cpu() before the run and before optimizers are made."
)


class HostBlock:
    """The weights of one layer in host memory, and the memory for its gradients.

    To *absorb* a parameter is to copy its value into the block, and to make it a view of its place there.

    Attributes:
        planned: the place of each parameter.
        parameters: the user's parameters, in the order of ``planned.spans``.
        retyped: the indices of parameters that got another dtype inside a step (``module.float()`` in a forward). They have
            memory of their own until the engine is rebuilt, before the next batch.
        memory: the block itself.
        gradients: the memory for the parameters' gradients.
        absorbed_at: the value of :attr:`addresses` when the block last absorbed parameters.

    Args:
        layer: the parameters to absorb.
        planned: the place of each parameter in the block.
        device: records reads and writes.
        staging: lends the memory for gradients.
        allocate: allocates the memory for weights.
        pin: True to page-lock the memory for weights. Without effect if ``fetched_seldom`` is True.
        fetched_seldom: True for blocks that are rarely uploaded as a whole: masters and embedding tables.
    """

    def __init__(
        self,
        layer: Layer,
        planned: PlannedLayer,
        device: Device,
        staging: Staging,
        allocate: Allocate,
        *,
        pin: bool,
        fetched_seldom: bool = False,
    ) -> None:
        self.planned = planned
        self.parameters: Sequence[nn.Parameter] = [parameter for _, parameter in layer.parameters]
        self._device = device
        self._fetched_seldom = fetched_seldom
        self.retyped: set[int] = set()
        self._storages: list[StorageWeakRef | None] = [None] * len(planned.spans)
        self.gradients = GradientMemory([span.name for span in planned.spans], self.parameters, staging)
        # The place of each parameter in its own storage.
        self._own_spans = [replace(span, offset=0) for span in planned.spans]
        self.memory = allocate(planned.nbytes, pin and not fetched_seldom)
        # Each original is freed when it is absorbed, so that set-up takes the memory of the model and of one layer.
        for index in range(len(self.parameters)):
            self._absorb(index, self.memory.initial)
        self.absorbed_at = self.addresses
        _open.add(self)

    @property
    def weights(self) -> Tensor:
        """The ``planned.nbytes`` bytes that an upload copies, flat ``uint8``: the weights and, behind them, their casts."""
        return self.memory.fetched

    @property
    def addresses(self) -> list[int]:
        """The address of each parameter's data."""
        with torch.DisableTorchFunctionSubclass():  # must not fetch values
            return list(map(Tensor.data_ptr, self.parameters))

    @property
    def displaced(self) -> list[int]:
        """The indices of parameters that got other memory (``param.data = other``) after they were absorbed."""
        now = self.addresses
        if now == self.absorbed_at:  # nearly always true, and this is called before each fetch
            return []
        pairs = enumerate(zip(now, self.absorbed_at, strict=True))
        return [index for index, (at, before) in pairs if at != before and index not in self.retyped]

    def weight_bytes(self, index: int) -> Tensor:
        """Returns the bytes of a weight, flat ``uint8``."""
        return self.place(index)

    def place(self, index: int) -> Tensor:
        """Returns the memory of which a parameter is made a view, flat ``uint8``."""
        return bytes_of(self.memory.seen, self.planned.spans[index])

    def has_values_of_place(self, index: int) -> bool:
        """Returns True if a parameter with other memory has the bytes of its place in the block."""
        span, target = self._own_spans[index], self.parameters[index]
        with no_inference_mode(), torch.no_grad(), torch.DisableTorchFunctionSubclass():
            if (target.dtype, target.shape, target.stride()) != (span.dtype, span.shape, span.stride):
                return False
            values = torch.empty(target.nbytes, dtype=torch.uint8, device="cpu")
            view(values, span).copy_(target)
            return torch.equal(values, self.weight_bytes(index))

    def write(self, index: int, value: Tensor) -> bool:
        """Copies the device's value of a weight to the host if its bytes differ. Autograd sees a write in place.

        Called for weights that user code has written on the device (``weights.writes``). If the value has another dtype, the
        parameter gets memory of its own and is added to :attr:`retyped`, until it has its first dtype again.

        Args:
            index: the index of the parameter.
            value: the device's value.

        Returns:
            True if the host's weight was changed.

        Raises:
            RuntimeError: the value has another shape; or it has another dtype, and the weight is uploaded as a cast or by rows.
        """
        target = self.parameters[index]
        name = self.planned.spans[index].name
        if (value.shape, value.dtype) != (target.shape, target.dtype):
            if value.shape == target.shape and not self._fetched_seldom:
                if (
                    value.dtype is self.planned.spans[index].dtype
                ):  # its place in the block is the parameter's memory again
                    self.retyped.discard(index)
                    self._make_view(index)
                    self.write(index, value)
                else:
                    self.retyped.add(index)
                    with no_inference_mode(), torch.DisableTorchFunctionSubclass():  # without its role, as below
                        target.data = value.to("cpu", copy=True)
                return True
            raise RuntimeError(
                f"Parameter {name!r} is {target.dtype} of shape {tuple(target.shape)} and was given {value.dtype} of shape "
                f"{tuple(value.shape)} inside a step (param.data = other). Exchange it between two batches or before "
                f"trainer.fit, or keep it on the GPU: SuperpipelineStrategy(keep_on_gpu=[{name!r}])."
            )
        # The parameter may have a role by now, whose operators wait for an update (``weights.roles``). This reads and writes
        # without it. Bytes are compared and not values, because a NaN is not equal to itself and -0.0 is equal to 0.0.
        with no_inference_mode(), torch.no_grad(), torch.DisableTorchFunctionSubclass():
            if index in self.retyped:
                downloaded = value.detach().cpu()
                before, now = (each.detach().reshape(-1).view(torch.uint8) for each in (target, downloaded))
                if torch.equal(before, now):
                    return False
            else:
                # Bytes are compared and not values, because a NaN is not equal to itself and -0.0 is equal to 0.0.
                written = torch.empty(target.nbytes, dtype=torch.uint8, device="cpu")
                downloaded = view(written, self._own_spans[index]).copy_(value)
                if torch.equal(written, self.weight_bytes(index)):
                    return False
                self._device.access(self.memory.seen, None, write=True)
            target.copy_(downloaded)
        return True

    def reabsorb(self) -> None:
        """Absorbs parameters again that got other memory (``param.data = other``) since they were absorbed.

        Other tensors may still view the old memory: another parameter after a swap, or a ``state_dict()``. They keep the old
        values, in one of two ways:

        - If tensors also view weights of the layer that were not displaced, the old values are copied to memory of their own.
        - Otherwise the block gets new memory, and the old block belongs to the viewing tensors. Their values are not copied.

        The caller has waited for uploads that read the old memory.

        Raises:
            RuntimeError: a parameter has another dtype or shape, which does not fit its place in the block.
        """
        displaced = self.displaced
        for index in displaced:
            refuse_other_form(self, index, "in the middle of a step or in a call outside any step")
            with torch.DisableTorchFunctionSubclass():
                if shared(self.parameters[index]):
                    say_once(LOG, KEPT_MEMORY)
        still_viewed = [
            index for index in displaced if (storage := self._storages[index]) is not None and not storage.expired()
        ]
        in_block = [index for index in range(len(self.parameters)) if index not in self.retyped]
        if still_viewed and any(self.is_viewed_at(index) for index in in_block if index not in displaced):
            for index in still_viewed:
                self._move_old_values(index)
        elif still_viewed:
            before = self.weights
            self.memory.reallocate()
            for cast in self.planned.casts:  # not parameters, so the loop below does not copy them
                bytes_of(self.memory.seen, cast).copy_(bytes_of(before, cast))
            displaced = in_block  # all parameters of the block have to be copied to the new memory
        for index in displaced:
            self._absorb(index, self.memory.seen)
        self.absorbed_at = self.addresses

    @property
    def is_viewed(self) -> bool:
        """True if a tensor other than its parameter views the memory of a weight."""
        return any(map(self.is_viewed_at, range(len(self.parameters))))

    def is_viewed_at(self, index: int) -> bool:
        """Returns True if a tensor other than its parameter views the memory of this weight."""
        with torch.DisableTorchFunctionSubclass():
            return self._storages[index] is not None and shared(self.parameters[index])

    def _move_old_values(self, index: int) -> None:
        """Moves tensors that view a weight's place in the block to memory of their own, with the same values."""
        reference = self._storages[index]
        if reference is not None and (storage := storage_of(reference)) is not None:
            _moved[:] = [moved for moved in _moved if not moved[0].expired()]
            _moved.append((reference, self.memory.seen))
            move_storage(storage)

    def unpin(self) -> None:
        """Releases the page locks, because the run ends. Parameters and gradients stay."""
        _open.discard(self)
        self.memory.unpin()
        self.gradients.unpin()

    def _absorb(self, index: int, into: Tensor | None) -> None:
        """Absorbs one parameter: copies its value, and makes its data a view of the block.

        Args:
            index: the index of the parameter.
            into: the memory to write; None if another process writes the same value.
        """
        # Without dispatch: within a step, operators on the host parameter would use the device parameter.
        with no_inference_mode(), torch.no_grad(), torch.DisableTorchFunctionSubclass():
            if into is not None:
                self._device.access(self.weights, None, write=True)
                part(into, self.planned.spans[index]).copy_(self.parameters[index].data)
        self._make_view(index)

    def _make_view(self, index: int) -> None:
        """Makes a parameter's data a view of its place in the block, with a new storage. Copies nothing."""
        with no_inference_mode(), torch.no_grad(), torch.DisableTorchFunctionSubclass():
            target, parameter = view(lend(self.place(index)), self._own_spans[index]), self.parameters[index]
            try:
                parameter.data = target
            except RuntimeError as error:  # torch keeps tensors of a PrivateUse1 backend apart
                name = self.planned.spans[index].name
                raise RuntimeError(OTHER_BACKEND.format(name=name, device=parameter.device)) from error
        self._storages[index] = StorageWeakRef(target.untyped_storage())


def open_blocks() -> list[HostBlock]:
    """Returns the blocks of all runs of the process that have not ended."""
    return list(_open)


def refuse_other_form(block: HostBlock, index: int, when: str) -> None:
    """Raises a RuntimeError if a parameter's new memory does not have the dtype and shape of its place in a block.

    Args:
        block: the block.
        index: the index of the parameter.
        when: the time at which the parameter got the memory, as the message says it.
    """
    parameter, span = block.parameters[index], block.planned.spans[index]
    if parameter.dtype != span.dtype or parameter.shape != span.shape:
        raise RuntimeError(
            f"Parameter {span.name!r} is {parameter.dtype} of shape {tuple(parameter.shape)}, {when}. Expected {span.dtype} "
            f"of shape {tuple(span.shape)}, as at set-up. Exchange parameters between two batches, or before trainer.fit."
        )
