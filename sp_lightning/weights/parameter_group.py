"""The device parameters of one layer: there while the layer is used, stand-ins while it is away."""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, increment_version
from torch.utils.hooks import RemovableHandle

from sp_lightning.device.layout import Span, addresses, versions
from sp_lightning.device.modes import no_inference_mode
from sp_lightning.device.torch_private import gradient_hooks
from sp_lightning.weights.casts import came_from_cast
from sp_lightning.weights.device_parameter import (
    DeviceParameter,
    StandIn,
    Untouched,
    gradient_edge,
    requires_grad,
    set_class,
    set_requires_grad,
    tensor_data,
)
from sp_lightning.weights.saved_values import Editions

if TYPE_CHECKING:
    from sp_lightning.weights.layer import StreamedLayer


class Doors(Protocol):
    """The ways by which what modules do with weights reaches the engine: the one way up from here."""

    def on_demand(self, parameters: Sequence[DeviceParameter], *, casts: bool = False) -> AbstractContextManager[None]:
        """A context during which these device parameters, or their ``casts``, are on the device."""

    def saves_raw(self) -> bool:
        """Whether autograd would save tensors as they are now, and not as the engine's hooks pack them."""

    def gradient_arrived(self, layer: StreamedLayer, index: int, parameter: Tensor) -> None:
        """Autograd has put a gradient on a device parameter."""

    def gradients_complete(self, layer: StreamedLayer) -> None:
        """All parameters of a layer, and of its masters, have got their gradients in this backward."""

    def replacing(self, layer: StreamedLayer, index: int, value: Tensor) -> None:
        """``param.data = value`` follows; the layer is on the device."""

    def settle_writes(self, layer: StreamedLayer) -> None:
        """Somebody asks which weights of a layer were written: the host takes over what was."""

    def reading_rows(self, layer: StreamedLayer) -> AbstractContextManager[bool]:
        """A context in which a table's host weight is up to date and nobody writes it. It yields whether its rows will do."""


class ParameterGroup:
    """The device parameters of one layer.

    They are on the device (:meth:`attach`) while the layer is used, and away (:meth:`detach`) otherwise.

    Args:
        spans: where each parameter lies in the layer's memory.
        hosts: the user's parameters, in the same order.
        device: of the slots.
        autocast: the dtype of these parameters' casts, if they are masters.

    Attributes:
        layer, doors: whose they are, and who is asked for it; from :meth:`connect` on.
        shared: whether several threads use them.
        casts: of masters, what their functions are given in their place while the layer has the right ones.
        look_up: of a table, ``embedding`` without the whole weight.
        editions: what graphs have saved views of.
        exposed: the weights whose ``.data`` was handed out: nobody knows when it is written.
        apart: the weights that were given another dtype, in device memory of their own.
        outside: the weights that were given other memory (``param.data = other``), which somebody else holds and may write.
        unseen: how often each weight was found to have been written where no version shows it.
        steps: a number that rises with each optimizer's step; a fused step bumps no version.
    """

    layer: StreamedLayer
    doors: Doors

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
        self.hosts = hosts
        self.device = device
        self.autocast = autocast
        self.casts: Sequence[Tensor] | None = None
        self.look_up: Callable[..., Tensor | None] | None = None
        self._lossless: tuple[int, int, int] | None = None  # index, address, version of the gradient under way
        self.editions = [Editions(span.offset) for span in spans]
        self.exposed: set[int] = set()
        self.apart: dict[int, Tensor] = {}
        self.outside: dict[int, Tensor] = {}
        self.unseen = [0] * len(spans)
        self.steps = 0
        self.attached = False
        self.shared = False
        self._present = [_with_user_class(DeviceParameter, type(host)) for host in hosts]
        self._absent = [_with_user_class(StandIn, type(host)) for host in hosts]
        self._handles: list[RemovableHandle] = []
        with no_inference_mode():
            self._away = [_nothing_like(span, device) for span in spans]
            self.all = [self._make(index) for index in range(len(spans))]
        # An accumulator that lives keeps the count of references the same, whether a graph is alive or not.
        self._accumulators: list[GradientEdge | None] = [None] * len(spans)
        self._synced: list[bool] | None = None
        self._references: dict[int, int] = {}  # to each, at the beginning of its layer's forward
        self._kept: dict[int, int] = {}  # by somebody, since then
        with no_inference_mode(), Untouched():  # they count versions with the parameters, and have no class of ours
            self._counters = [parameter.detach() for parameter in self.all]
        self._versions = versions(self._counters)
        self._host_versions = versions(hosts)
        self._addresses = addresses(hosts)

    def connect(self, layer: StreamedLayer, doors: Doors) -> None:
        """From here on they can be used."""
        self.layer = layer
        self.doors = doors

    def _make(self, index: int) -> DeviceParameter:
        host = self.hosts[index]
        takes_gradient = host.is_floating_point() or host.is_complex()
        away = self._away[index].new_empty(()).expand_as(self._away[index])  # not _away: it would share its version
        parameter: Any = nn.Parameter(away, requires_grad=takes_gradient)
        tensor_data.__set__(parameter, self._away[index])
        if takes_gradient:
            # The user's hooks run where they do on a plain parameter, with torch.autograd.grad as well.
            self._handles.append(parameter.register_hook(lambda gradient: self._hooked(index, gradient)))
            self._handles.append(
                parameter.register_post_accumulate_grad_hook(
                    lambda filled: self.doors.gradient_arrived(self.layer, index, filled)
                )
            )
            parameter.requires_grad_(host.requires_grad)
        object.__setattr__(parameter, "_of", self)
        object.__setattr__(parameter, "_index", index)
        parameter.__class__ = _with_user_class(StandIn, type(host))
        return parameter

    def _hooked(self, index: int, gradient: Tensor) -> Tensor | None:
        hooks = gradient_hooks(self.hosts[index])  # they may write it where no version shows that
        if self.autocast is not None:
            lossless = not hooks and came_from_cast(gradient)
            self._lossless = (index, gradient.data_ptr(), gradient._version) if lossless else None
        return _run(hooks, gradient) if hooks else None

    def lossless(self, index: int, gradient: Tensor) -> bool:
        """Whether the dtype of the casts holds all of a gradient that has arrived, unchanged by anybody's hooks."""
        return self._lossless is not None and self._lossless == (index, gradient.data_ptr(), gradient._version)

    def away(self, index: int) -> Tensor:
        """What a parameter's data is while its layer is away."""
        return self._away[index]

    def attach(self, views: Sequence[Tensor]) -> None:
        """The layer is on the device: every parameter becomes what ``views`` has for it, on lent memory."""
        if self.outside:
            views = [self.outside.get(index, value) for index, value in enumerate(views)]
        if self.apart:
            views = self._with_those_apart(views)
        with Untouched():
            kinds = self._absent if self.shared else self._present
            for parameter, value, kind in zip(self.all, views, kinds, strict=True):
                tensor_data.__set__(parameter, value)
                set_class(parameter, kind)
        self.attached = True

    def set_apart(self, index: int, value: Tensor) -> None:
        """A weight was given another dtype: the layer's memory has no place for it."""
        with no_inference_mode():
            self.apart[index] = value
            self._away[index] = _nothing_like(value, self.device)

    def refuse_exchanged(self, index: int) -> None:
        """Autograd saved a weight in its layer's memory, where it is no more if it was given another dtype since."""
        with Untouched():
            now = self.all[index].dtype
        if now is not self.spans[index].dtype:
            raise RuntimeError(
                f"Parameter {self.spans[index].name!r} was given {now} (param.data = other) between a forward that used it "
                f"as {self.spans[index].dtype} and the backward. Exchange it before the forward."
            )

    def _with_those_apart(self, views: Sequence[Tensor]) -> Sequence[Tensor]:
        with no_inference_mode(), torch.no_grad():
            apart = {index: mine.copy_(self.hosts[index]) for index, mine in self.apart.items()}
        return [apart.get(index, value) for index, value in enumerate(views)]

    def share(self, shared: bool) -> None:
        """Whether several threads use weights: each use is noticed then, so that none leaves under another's hands."""
        self.shared = shared
        if self.attached:
            self.ask(before_use=shared)

    def ask(self, before_use: bool) -> None:
        """Whether each use of what is there is to be noticed all the same, as that of a stand-in is."""
        for parameter, kind in zip(self.all, self._absent if before_use else self._present, strict=True):
            set_class(parameter, kind)

    def watch(self) -> None:
        """The layer's own forward begins: whoever keeps a device parameter from here on may be autograd's hooks."""
        self._references = dict(enumerate(self._count_references())) | self._still_kept()

    def detach(self) -> None:
        """The layer's slot may be reused, once :meth:`let_go` says so.

        A device parameter that somebody has kept since :meth:`watch` stays a view of the slot's memory: a checkpoint's
        recompute keeps frozen weights so, and so do saved-tensor hooks that return what they are given. Autograd would
        read it without asking. Whoever else uses it is noticed, as with all that are away.
        """
        self._kept, self._references = self._references or self._kept, {}
        self._kept = self._still_kept()
        with Untouched():
            for index, (parameter, kind) in enumerate(zip(self.all, self._absent, strict=True)):
                if index not in self._kept:
                    tensor_data.__set__(parameter, self._away[index])
                set_class(parameter, kind)
        self.attached = False

    def let_go(self) -> bool:
        """Take the memory from what nobody keeps any more. Returns whether nothing is kept."""
        if self._kept and not self.attached:
            before, self._kept = self._kept, self._still_kept()
            with Untouched():
                for index in before.keys() - self._kept.keys():
                    tensor_data.__set__(self.all[index], self._away[index])
        return not self._kept

    def _still_kept(self) -> dict[int, int]:
        """Which device parameters have more references than they had without whoever keeps them, and how many that was."""
        now = self._count_references() if self._kept else []
        return {index: before for index, before in self._kept.items() if now[index] > before}

    def at(self, offset: int) -> int | None:
        """The parameter that lies ``offset`` bytes into the layer's memory; None between them, and for a cast."""
        index = bisect_right(self._offsets, offset) - 1
        if index < 0:
            return None
        span = self.spans[index]
        return index if offset < span.offset + max(span.nbytes, 1) else None

    def version(self, index: int) -> int:
        """How often a weight was written, on the host or on the device, as far as versions show it."""
        return self._counters[index]._version

    def version_once_fetched(self, index: int) -> int:
        """As :meth:`version`, once :meth:`fetched` has taken in what the host has written since."""
        return self.version(index) + (self.hosts[index]._version != self._host_versions[index])

    def _count_references(self) -> list[int]:
        return list(map(sys.getrefcount, self.all))

    def writes(self, index: int) -> int:
        """A number that rises with each write of a weight by anybody, shown by a version or not."""
        if index in self.exposed or self.version(index) != self._versions[index]:
            self.doors.settle_writes(self.layer)
        return self.version_once_fetched(index) + self.steps + self.unseen[index]

    def take_written(self) -> list[int]:
        """The weights that were, or through ``.data`` may have been, written since the last call.

        Written while the layer was there, or afterwards through a view that somebody still holds.
        """
        now = versions(self._counters)
        before, self._versions = self._versions, now
        if now == before:
            return sorted(self.exposed)
        changed = {i for i, (old, new) in enumerate(zip(before, now, strict=True)) if old != new}
        return sorted(changed | self.exposed)

    def alias(self, index: int) -> Tensor:
        """As :meth:`value`, with the device parameter's own version: writes of it show."""
        with Untouched():
            return self.all[index].detach()

    def value(self, index: int) -> Tensor:
        """What a device parameter is now; attached."""
        with Untouched():
            return tensor_data.__get__(self.all[index])

    def sync_requires_grad(self) -> None:
        """Follow the user, who may freeze and unfreeze between two forwards."""
        wanted = [host.requires_grad for host in self.hosts]
        if wanted == self._synced:
            return
        self._synced = wanted
        for index, (parameter, host) in enumerate(zip(self.all, self.hosts, strict=True)):
            if requires_grad(parameter) != host.requires_grad:
                set_requires_grad(parameter, host.requires_grad)
            if host.requires_grad != (self._accumulators[index] is not None):
                self._accumulators[index] = gradient_edge(parameter) if host.requires_grad else None
                for counted in (self._references, self._kept):
                    if index in counted:
                        counted[index] += 1 if host.requires_grad else -1

    @property
    def stale(self) -> bool:
        """Whether a host parameter was written or exchanged since :meth:`fetched`."""
        return versions(self.hosts) != self._host_versions or addresses(self.hosts) != self._addresses

    def fetched(self) -> None:
        """The device's copy is that of the host's parameters as they are now.

        Where they changed, the device parameters' versions change too, so that autograd's in-place check sees an
        optimizer step between forward and backward as it would on plain parameters.
        """
        now = versions(self.hosts)
        if now == self._host_versions:
            return
        for index, (old, new) in enumerate(zip(self._host_versions, now, strict=True)):
            if old != new:
                with no_inference_mode(), Untouched():
                    increment_version(self.all[index])
                self._versions[index] += 1
        self._host_versions = now

    def written_back(self) -> None:
        """The host's parameters have taken over what was written on the device: no change from outside."""
        self._host_versions = versions(self.hosts)

    def close(self) -> None:
        """Let go of everything: autograd holds hooks where the garbage collector does not look."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._accumulators.clear()
        self._kept.clear()
        self.all.clear()

    def expose(self) -> None:
        """Any weight of the layer may be written at any time, where no version shows it."""
        self.exposed.update(range(len(self.all)))

    def present(self, parameter: DeviceParameter) -> AbstractContextManager[None]:
        """A context in which a parameter's layer is there."""
        return self.doors.on_demand([parameter]) if isinstance(parameter, StandIn) else nullcontext()


@cache
def _with_user_class(ours: type[DeviceParameter], theirs: type[nn.Parameter]) -> type[DeviceParameter]:
    """Our class, which is also the user's own subclass of ``Parameter`` if there is one."""
    return ours if theirs in (nn.Parameter, Tensor) else type(f"{ours.__name__}{theirs.__name__}", (ours, theirs), {})


def _run(hooks: dict[int, Callable[..., Any]], gradient: Tensor) -> Tensor:
    for hook in list(hooks.values()):
        replaced = hook(gradient)
        gradient = gradient if replaced is None else replaced
    return gradient


def _nothing_like(value: Span | Tensor, device: torch.device) -> Tensor:
    fill = float("nan") if value.dtype.is_floating_point or value.dtype.is_complex else 0
    return torch.full((), fill, dtype=value.dtype, device=device).expand(value.shape)
