"""The device parameters of one layer. They are views of its slot while the layer is attached, and stand-ins otherwise."""

from __future__ import annotations

import sys
import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, increment_version
from torch.utils.hooks import RemovableHandle

from sp_lightning.core.device.layout import Span, absent, version_of, versions
from sp_lightning.core.messages import HIDDEN_READ, WAITS_FOR_NODE
from sp_lightning.core.torch_compat.cast_gradient import CastGradient
from sp_lightning.core.torch_compat.modes import no_inference_mode
from sp_lightning.core.torch_compat.private import counted_nodes, gradient_hooks
from sp_lightning.core.weights.casts import SavedPlace
from sp_lightning.core.weights.device_parameter import (
    AttachedParameter,
    DeviceParameter,
    OffloadedParameter,
    StandIn,
    Untouched,
    gradient_edge,
    same_place,
    set_class,
    tensor_data,
    tensor_requires_grad,
)


class ParameterGroup:
    """The device parameters of one layer.

    :meth:`attach` makes them views of the layer's slot, :meth:`detach` makes them stand-ins: parameters without memory, whose
    class notices each use. A use is *noticed* if the class (:class:`OffloadedParameter`) runs before the operation.

    Args:
        spans: the place of each parameter in the layer's memory.
        hosts: the user's parameters, in the same order.
        device: the device of the slots.
        autocast: the dtype of these parameters' casts, if they are masters; otherwise None.

    Attributes:
        layer, engine: the :class:`~sp_lightning.core.weights.layer.StreamedLayer`, and the engine that fetches the layer: its
            :class:`~sp_lightning.core.engine.uses.Uses`. :meth:`connect` sets both.
        by_rows: True if only rows of some parameters may be on the device. These parameters keep the class of
            stand-ins also while they are views of the slot (:meth:`notice_uses_of`).
        compute: runs an operation that needs only rows of a stand-in; None if the layer is uploaded whole. The function takes
            the stand-in and the arguments of ``__torch_function__``. If it returns NotImplemented, the whole layer is uploaded.
        casts: if these parameters are masters, their casts on the device, which functions get in place of the masters. None if
            no casts are offered: the owner is not attached, the casts are out of date, or the masters are on the device.
        all: the device parameters, in the order of ``spans``.
        places: for each weight, the :class:`~sp_lightning.core.weights.casts.SavedPlace` of graphs that save views of it.
        exposed: the indices of weights that user code may write at any time without a change of a version counter: it has their
            ``.data``. Their values are compared with the host's.
        retyped: by index, the memory of weights that were given another dtype, for which the slot has no place. Each use copies
            the host's values to this memory.
        converted: the indices of weights that were given another dtype since :meth:`take_written`.
        stand_in_data: the data of each stand-in: a tensor without memory.
        counters: plain tensors that share the version counters of the device parameters. Reading a version of a plain tensor
            runs no Python code.
        unversioned_writes: how often each weight was written without a change of its version, as far as the engine knows: by a
            fused optimizer step, for example.
    """

    layer: Any
    engine: Any

    def __init__(
        self,
        spans: Sequence[Span],
        hosts: Sequence[nn.Parameter],
        device: torch.device,
        *,
        autocast: torch.dtype | None = None,
    ) -> None:
        self.spans = spans
        self._offsets = [span.offset for span in spans]
        self._beginning_at = {span.offset: index for index, span in enumerate(spans) if span.nbytes}
        self.hosts = hosts
        self.device = device
        self.autocast = autocast
        self.casts: Sequence[Tensor] | None = None
        self.places = [SavedPlace() for _ in spans]
        self.exposed: set[int] = set()
        self.retyped: dict[int, Tensor] = {}
        self.converted: set[int] = set()
        # The `.data` that user code got: the weight, the tensor, a tensor without memory that shares its version, the version.
        self._handed_out: list[tuple[int, weakref.ref[Tensor], Tensor, int]] = []
        self.unversioned_writes = [0] * len(spans)
        self.by_rows = False
        self.compute: Callable[..., Any] | None = None
        self._view_classes = [_with_user_class(AttachedParameter, type(host)) for host in hosts]
        self._stand_in_classes = [_with_user_class(StandIn, type(host)) for host in hosts]
        self._handles: list[RemovableHandle] = []
        with no_inference_mode():
            self.stand_in_data = [self._stand_in_like(span, index) for index, span in enumerate(spans)]
            self.all = [self._make(index) for index in range(len(spans))]
        # The gradient accumulator of a parameter holds a reference to the parameter. If accumulators were made and freed with
        # graphs, reference counts could not be compared. So the accumulators are kept alive here.
        self._accumulators: list[GradientEdge | None] = [None] * len(spans)
        self._synced: list[bool] | None = None  # the `requires_grad` that the device parameters have
        self._references: dict[int, int] = {}  # references to each parameter when its layer's forward began
        self._held: dict[int, int] = {}  # the same, for parameters that autograd or user code has kept since then
        with no_inference_mode(), Untouched():
            self.counters = [parameter.detach() for parameter in self.all]
        self._versions, self._host_versions = versions(self.counters), versions(hosts)

    def notice_uses_of(self, indices: Iterable[int]) -> None:
        """Keeps the class of stand-ins for these parameters while the layer is attached: the slot may lack some of their rows."""
        self.by_rows = True
        for index in indices:
            self._view_classes[index] = self._stand_in_classes[index]

    def connect(self, layer: Any, engine: Any) -> None:
        """Sets the layer and the engine, and adds hooks for gradients. The parameters can be used from now on."""
        self.layer = layer
        self.engine = engine
        for index, host in enumerate(self.hosts):
            if host.is_floating_point() or host.is_complex():
                # A frozen parameter accepts no hooks, and may be unfrozen later. So it is unfrozen while hooks are added. The
                # class is plain meanwhile, because attributes of a DeviceParameter are those of the host parameter.
                parameter, kind, requires = self.all[index], type(self.all[index]), host.requires_grad
                set_class(parameter, nn.Parameter)
                nn.Parameter.requires_grad_(parameter, True)
                # The first hook runs the user's hooks, which are on the host parameter, at the same time as on a plain parameter:
                # in torch.autograd.grad as well. The second hook is called for each gradient, so it is the engine's method
                # itself, without a Python frame in between.
                arrived = partial(engine.gradient_arrived, layer, index)
                self._handles += [
                    Tensor.register_hook(parameter, partial(self._hooked, index)),
                    Tensor.register_post_accumulate_grad_hook(parameter, arrived),
                ]
                nn.Parameter.requires_grad_(parameter, requires)
                set_class(parameter, kind)

    def _make(self, index: int) -> DeviceParameter:
        """Makes one device parameter, as a stand-in."""
        host = self.hosts[index]
        # The data is set afterwards, because a parameter that is made of a tensor shares the tensor's version counter.
        away = torch.empty((), dtype=host.dtype, device=self.device).expand(host.shape)
        parameter: Any = nn.Parameter(away, requires_grad=host.requires_grad)
        tensor_data.__set__(parameter, self.stand_in_data[index])
        object.__setattr__(parameter, "_of", self)
        object.__setattr__(parameter, "_index", index)
        parameter.__class__ = _with_user_class(StandIn, type(host))
        return parameter

    def _hooked(self, index: int, gradient: Tensor) -> Tensor | None:
        """Runs the user's hooks on a gradient. Each hook may replace the gradient.

        Returns:
            The gradient after the hooks. None if there are no hooks: autograd then keeps the gradient, which may be a
            :class:`CastGradient`.

        Raises:
            RuntimeError: a hook waits for the host parameter's node, which backward does not reach. torch would never call it.
        """
        host = self.hosts[index]
        hooks = gradient_hooks(host)
        if hooks and type(gradient) is CastGradient:  # hooks get the plain float32 tensor of plain Lightning
            gradient = gradient.wide()
        for hook in list(hooks.values()) if hooks else ():
            if any(getattr(node, "variable", None) is host for node in counted_nodes(hook)):
                raise RuntimeError(WAITS_FOR_NODE.format(name=self.spans[index].name))
            replaced = hook(gradient)
            gradient = gradient if replaced is None else replaced
        return gradient if hooks else None

    def attach(self, views: Sequence[Tensor]) -> None:
        """Makes every parameter a view of the slot. Weights that were given another dtype get the host's values in their memory.

        Args:
            views: the views of the slot, one for each parameter.
        """
        if self.retyped:
            with no_inference_mode(), torch.no_grad(), Untouched():
                for index, weight in self.retyped.items():
                    weight.copy_(self.hosts[index])
            views = [self.retyped.get(index, value) for index, value in enumerate(views)]
        with Untouched():
            for parameter, value, kind in zip(self.all, views, self._view_classes, strict=True):
                tensor_data.__set__(parameter, value)
                set_class(parameter, kind)

    def _stand_in_like(self, value: Span | Tensor, index: int) -> Tensor:
        return absent(value, self.device, HIDDEN_READ.format(name=self.spans[index].name))

    def give(self, index: int, memory: Tensor, value: Tensor) -> None:
        """Copies a value to memory, of which a weight of this attached layer becomes a view.

        Autograd sees a write in place. In backward, graphs that have saved views without a version counter raise its error, too.

        Args:
            index: the index of the weight.
            memory: the weight's place in the slot or, if it is given another dtype, memory of its own.
            value: the value, of the same dtype and shape.
        """
        self.move(index, memory)
        with no_inference_mode(), torch.no_grad(), Untouched():
            self.all[index].copy_(value)
        self.give_place(index)

    def move(self, index: int, memory: Tensor) -> None:
        """Makes a weight a view of memory that has its value. Its stand-in has the memory's dtype from now on."""
        with no_inference_mode(), Untouched():
            if (now := self.value(index)).dtype is not memory.dtype:
                self.stand_in_data[index] = self._stand_in_like(memory, index)
            if not same_place(now, memory):
                tensor_data.__set__(self.all[index], memory)
        if memory.dtype is self.spans[index].dtype:
            self.retyped.pop(index, None)
        else:
            self.retyped[index] = memory

    def give_place(self, index: int) -> None:
        """Records for graphs that have saved views of a weight that the weight got other values (``param.data = other``)."""
        self.places[index].written = True
        self.places[index] = SavedPlace()

    def refuse_exchanged(self, index: int) -> None:
        """Raises a RuntimeError if a weight was given another dtype after autograd saved a view of the weight in the slot."""
        with Untouched():
            now = self.all[index].dtype
        if now is not self.spans[index].dtype:
            raise RuntimeError(
                f"Parameter {self.spans[index].name!r} was given {now} (param.data = other) between a forward that used it "
                f"as {self.spans[index].dtype} and the backward. Exchange it before the forward."
            )

    def notice_uses(self, noticed: bool) -> None:
        """Sets whether each use of attached weights is noticed, as uses of stand-ins are."""
        for parameter, kind in zip(self.all, self._stand_in_classes if noticed else self._view_classes, strict=True):
            set_class(parameter, kind)

    def count_references(self) -> None:
        """Counts the references to each parameter at the beginning of a forward.

        :meth:`detach` counts again. A parameter with more references by then is held by user code, or by a graph whose
        saved-tensor hooks return their argument.
        """
        if not self._references:  # the first forward since `detach`
            self._references = dict(enumerate(map(sys.getrefcount, self.all)))
            if self._held:  # earlier graphs still hold parameters, so the count from before these graphs remains
                self._references |= self._still_held()

    def detach(self) -> bool:
        """Makes the parameters stand-ins. Returns True if neither a graph nor user code holds one of them.

        A device parameter that a graph has kept since :meth:`count_references` stays a view of the slot until
        :meth:`free_dropped`, because autograd reads the parameter without running its class. Recompute of a checkpoint keeps
        frozen weights in this way, and so do saved-tensor hooks that return their argument. Every other use of the parameter is
        noticed, as with all stand-ins.
        """
        # The counts of the last forward; if there was no forward since the last call, the parameters that were held then.
        self._held, self._references = self._references or self._held, {}
        held = self._held = self._still_held()
        set_data = tensor_data.__set__
        with Untouched():
            for index, (parameter, kind) in enumerate(zip(self.all, self._stand_in_classes, strict=True)):
                if index not in held:
                    set_data(parameter, self.stand_in_data[index])
                set_class(parameter, kind)
        return not held

    def free_dropped(self) -> bool:
        """Makes parameters that graphs no longer hold stand-ins again. Returns True if no graph holds a parameter now."""
        if self._held and not self.layer.state.attached:  # parameters of an attached layer have to be views
            before, self._held = self._held, self._still_held()
            with Untouched():
                for index in before.keys() - self._held.keys():
                    tensor_data.__set__(self.all[index], self.stand_in_data[index])
        return not self._held

    def _still_held(self) -> dict[int, int]:
        """Returns the entries of ``_held`` whose parameter still has more references than the entry counts."""
        held: dict[int, int] = {}
        if self._held:
            now = list(map(sys.getrefcount, self.all))
            for index, before in self._held.items():
                if now[index] > before:
                    held[index] = before
        return held

    def at(self, offset: int) -> int | None:
        """Returns the index of the parameter at byte ``offset`` of the slot; None if padding or a cast is there."""
        if (beginning := self._beginning_at.get(offset)) is not None:  # nearly all saved views are of a whole weight
            return beginning
        index = bisect_right(self._offsets, offset) - 1
        if index < 0:
            return None
        span = self.spans[index]
        return index if offset < span.offset + max(span.nbytes, 1) else None  # an empty parameter is at its offset, too

    def version(self, index: int) -> int:
        """Returns the version of a weight: it rises with each write on the device, and in :meth:`fetched` after host writes."""
        return self.counters[index]._version

    def version_once_fetched(self, index: int) -> int:
        """Returns the value that :meth:`version` will have after :meth:`fetched` has counted later writes on the host."""
        with Untouched():
            written = self.hosts[index]._version != self._host_versions[index]
        return self.counters[index]._version + written

    def writes(self, index: int) -> int:
        """Returns a number that rises with each known write of a weight, also with writes that no version shows.

        If an update of the layer runs, which may change the version at any time, or if the weight may have been written on the
        device, this first makes the host weights current (``Uses.write_back``).
        """
        written = index in self.exposed or self.version(index) != self._versions[index]
        update = self.layer.owner.update
        if written or (update is not None and not update.done()):
            self.engine.write_back(self.layer)
        return self.version_once_fetched(index) + self.unversioned_writes[index]

    @property
    def changed(self) -> bool:
        """True if versions show that a weight was written on the device since :meth:`take_written`."""
        if list(map(version_of, self.counters)) != self._versions:
            return True
        return bool(self._handed_out) and any(counter._version != version for *_, counter, version in self._handed_out)

    def written(self) -> bool:
        """Returns True if :meth:`take_written` would return a weight, or if user code has given a weight another dtype."""
        return bool(self.exposed or self.retyped) or self.changed

    def take_written(self) -> list[int]:
        """Returns the indices of the weights that were written on the device since the last call, or may have been.

        User code wrote these weights while the layer was attached, or later through a view or ``.data`` that it still holds.
        """
        now = versions(self.counters)
        before, self._versions = self._versions, now
        changed = (
            {i for i, (old, new) in enumerate(zip(before, now, strict=True)) if old != new} if now != before else set()
        )
        if self._handed_out:
            changed.update(index for index, _, counter, version in self._handed_out if counter._version != version)
            # Views of a tensor that is dropped are not followed any longer.
            self._handed_out = [
                (i, d, counter, counter._version) for i, d, counter, _ in self._handed_out if d() is not None
            ]
        changed |= self.converted
        self.converted.clear()
        return sorted(changed | self.exposed)

    def hand_out(self, index: int) -> Tensor:
        """Returns the data of a weight of this attached layer for user code, which may write it.

        Such a write changes no version of the weight. In this use the values are compared; later the version of the returned
        tensor shows it.
        """
        self.expose(index)
        data = self.value(index)
        if not data.is_inference():
            counter = data.detach()
            tensor_data.__set__(counter, self.stand_in_data[index])
            self._handed_out.append((index, weakref.ref(data), counter, counter._version))
        return data

    def forget_views(self) -> None:
        """Called when only the device parameters view the slot, and the host has all writes."""
        self.exposed.clear()
        self._handed_out.clear()

    def alias(self, index: int) -> Tensor:
        """Returns :meth:`value` as a tensor that shares the version counter of the device parameter, so that writes show."""
        with Untouched():
            return self.all[index].detach()

    def value(self, index: int) -> Tensor:
        """Returns the data of a device parameter, while the layer is attached."""
        with Untouched():
            return tensor_data.__get__(self.all[index])

    def sync_requires_grad(self) -> None:
        """Copies ``requires_grad`` from the host parameters, because user code may change it between two forwards.

        Also keeps the gradient accumulators of trained parameters alive, and counts the reference that each of them holds.
        """
        with Untouched():
            wanted = list(map(_requires_grad, self.hosts))
        if wanted == self._synced:
            return
        self._synced = wanted
        for index, parameter in enumerate(self.all):
            with Untouched():
                if tensor_requires_grad.__get__(parameter) != wanted[index]:
                    tensor_requires_grad.__set__(parameter, wanted[index])
            if wanted[index] != (self._accumulators[index] is not None):
                self._accumulators[index] = gradient_edge(parameter) if wanted[index] else None
                for counted in (self._references, self._held):  # the accumulator's reference is not a graph's
                    if index in counted:
                        counted[index] += 1 if wanted[index] else -1

    @property
    def host_written(self) -> bool:
        """True if versions show that a host parameter was written since :meth:`fetched`."""
        with Untouched():
            return list(map(version_of, self.hosts)) != self._host_versions

    def fetched(self) -> None:
        """Records that the device has the host's present values.

        If a host parameter was written, the version of the device parameter rises as well. So autograd's check for in-place
        writes detects an optimizer step between forward and backward, as with plain parameters.
        """
        with Untouched():
            now = list(map(version_of, self.hosts))
        if now == self._host_versions:  # nearly always true in backward
            return
        with no_inference_mode(), Untouched():
            for index, (old, new) in enumerate(zip(self._host_versions, now, strict=True)):
                if old != new:
                    increment_version(self.all[index])
                    self._versions[index] += 1  # so that `take_written` does not take this for a write on the device
        self._host_versions = now

    def written_back(self) -> None:
        """Records that a write-back has changed the host's versions, so that the copy on the device is not out of date."""
        self._host_versions = versions(self.hosts)

    def close(self) -> None:
        """Drops all hooks and parameters. Autograd holds hooks in objects that the garbage collector does not see."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._accumulators.clear()
        self._held.clear()
        self.all.clear()

    def expose(self, index: int | None = None) -> None:
        """Records that a weight may be written at any time without a change of its version. ``index``: None for all weights."""
        self.exposed.update(range(len(self.all)) if index is None else (index,))

    def present(self, parameter: DeviceParameter) -> AbstractContextManager[None]:
        """A context in which a parameter's layer is on the device."""
        return self.engine.operation_on([parameter]) if isinstance(parameter, OffloadedParameter) else nullcontext()


_requires_grad = attrgetter("requires_grad")


@cache
def _with_user_class(kind: type[DeviceParameter], users: type[nn.Parameter]) -> type[DeviceParameter]:
    """Returns a class of device parameters that also derives from the user's subclass of ``Parameter``, if there is one.

    The parts of wrapped parameters have the class ``Tensor``.
    """
    return kind if users in (nn.Parameter, Tensor) else type(f"{kind.__name__}{users.__name__}", (kind, users), {})
