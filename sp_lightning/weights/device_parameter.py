"""Device parameters: what modules hold in place of the host's parameters while a step runs.

A :class:`DeviceParameter` is a leaf of the autograd graph with the right shape, dtype and device for the whole step.
While its layer is on the device it is a view of the slot, and nothing about it is slower than about a plain
``Parameter``. While its layer is away it is a :class:`StandIn`: a NaN scalar expanded to shape, whose class brings the
layer before anything computes with it. So every use of a weight is right, wherever it is: weights read without
forward, arithmetic on ``self.parameters()``, ``torch.autograd.grad`` with respect to parameters.

What belongs to the host's parameter goes there: ``.grad``, ``requires_grad_``, hooks.
"""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge, increment_version
from torch.utils.hooks import RemovableHandle

from sp_lightning.device.layout import METADATA, Span, normal_mode, unseen
from sp_lightning.device.torch_private import (
    DYNAMO_MARKS,
    count_function_modes,
    gradient_hooks,
    rebuild_parameter,
    tree_leaves,
    tree_map_only,
)
from sp_lightning.weights.casts import LOWERED_FUNCTIONS, Cast, autocast_would_cast, came_from_cast
from sp_lightning.weights.saved_values import Editions

_Untouched = torch.DisableTorchFunctionSubclass  # reads of a stand-in itself, not of the weight that it stands for
# The attributes of the tensor itself, which DeviceParameter hides behind its own.
_tensor_data: Any = Tensor.data
_tensor_grad: Any = Tensor.grad
_tensor_requires_grad: Any = Tensor.requires_grad


class DeviceParameter(nn.Parameter):
    """A parameter's view of the slot that its layer is in. Made by :class:`DeviceParameters`, never by hand."""

    _of: DeviceParameters
    _index: int

    def __new__(cls, data: Any = None, requires_grad: bool = True) -> Any:
        """``type(p)(data)`` is an ordinary parameter."""
        theirs = next(each for each in cls.__mro__ if not issubclass(each, DeviceParameter))
        make: Any = theirs
        return make(data, requires_grad)

    def __getattr__(self, name: str) -> Any:
        """What the user hung on the parameter."""
        if name in ("_of", "_index"):
            raise AttributeError(name)
        return getattr(self.host, name)

    def __setattr__(self, name: str, value: Any) -> None:
        own = name in ("_of", "_index", "data", "grad", "requires_grad", "__class__")
        if own or name.startswith(DYNAMO_MARKS):  # torch.compile looks into __dict__ for what it has marked
            object.__setattr__(self, name, value)
        else:
            setattr(self.host, name, value)

    def __hash__(self) -> int:
        """As the host's parameter, so that sets and dictionaries of parameters find it: ``optimizer.state[p]``."""
        return hash(self.host)

    def __eq__(self, other: object) -> Any:
        if other is self.host:
            return True
        return super().__eq__(other)

    @property
    def host(self) -> nn.Parameter:
        """The user's parameter."""
        return self._of.hosts[self._index]

    @property
    def data(self) -> Tensor:
        # Writes through .data bump no version, and may come as long as somebody holds what is returned here.
        with self._of.present(self):
            self._of.exposed.add(self._index)
            return _tensor_data.__get__(self)

    @data.setter
    def data(self, value: Tensor) -> None:
        if value is self:  # module.to(…) that changes nothing
            return
        with self._of.present(self):
            self._of.exposed.add(self._index)
            if not same_place(value, _tensor_data.__get__(self)):  # as after p.data += 1
                self._of.replacing(self._of.layer, self._index, value)
                _tensor_data.__set__(self, value)

    @property
    def grad(self) -> Tensor | None:
        return self.host.grad

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        self.host.grad = value

    @grad.deleter
    def grad(self) -> None:
        self.host.grad = None

    @property
    def requires_grad(self) -> bool:
        return self.host.requires_grad

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.host.requires_grad = value
        set_requires_grad(self, value)

    def as_subclass(self, cls: Any) -> Any:
        with self._of.present(self):  # torch's does not ask
            return super().as_subclass(cls)

    def requires_grad_(self, requires_grad: bool = True) -> DeviceParameter:
        self.requires_grad = requires_grad
        return self

    def register_hook(self, hook: Callable[[Tensor], Tensor | None]) -> Any:
        return self.host.register_hook(hook)

    def register_post_accumulate_grad_hook(self, hook: Callable[[Tensor], None]) -> Any:
        return self.host.register_post_accumulate_grad_hook(hook)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        """A copy is a plain parameter, as a copied module is a plain module."""
        if id(self) not in memo:
            memo[id(self)] = nn.Parameter(self.data.detach().clone(), self.requires_grad)
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return rebuild_parameter, (self.data.detach().clone(), self.requires_grad, {})


class StandIn(DeviceParameter):
    """A device parameter whose layer is away. Reading its metadata is free, anything else brings the layer."""

    @classmethod
    @torch.compiler.disable  # the engine is no part of a graph
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in LOWERED_FUNCTIONS:
            found = _call_with_casts(func, args, kwargs)
            if found is not None:
                return found
        if func in METADATA:
            with _Untouched():
                return func(*args, **kwargs)
        if func is torch.nn.functional.embedding and (found := _look_up(*args, **kwargs)) is not None:
            return found
        if func is torch.autograd.grad:
            return _grad_by_edges(*args, **kwargs)
        if func in (torch.autograd.backward, Tensor.backward):  # backward(inputs=…)
            args, kwargs = tree_map_only(DeviceParameter, _edge, (args, kwargs))
            return func(*args, **kwargs)
        away = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, StandIn)]
        if not away:
            raise RuntimeError(
                f"{getattr(func, '__name__', func)} was given a weight whose layer is away, inside an object of "
                "a class that is no list, tuple or dictionary. Pass the weight itself, or keep its layer on the device: "
                "SuperpipelineStrategy(resident=[…])."
            )
        with away[0]._of.together(away):
            if away[0]._of.shared or away[0]._of.kept_raw():
                args, kwargs = tree_map_only(DeviceParameter, _alias, (args, kwargs))
            if (
                func is Tensor.detach or func is torch.detach
            ):  # as state_dict() does; writes of its .data bump no version
                away[0]._of.expose()
            return func(*args, **kwargs)


def _call_with_casts(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor | None:
    """The result for the casts of all stand-ins among the arguments; None if they have to come themselves."""
    away = [each for each in (*args, *kwargs.values()) if issubclass(type(each), StandIn)]
    groups = list(dict.fromkeys(each._of for each in away))
    for of in groups:
        if of.autocast is None or not autocast_would_cast(of.autocast, of.device):
            return None
    casts = {of: of.casts for of in groups}  # another thread may exchange them meanwhile
    for of in groups:
        if casts[of] is None or of.shared:  # called from outside their layer
            with of.together(away, casts=True):
                casts = {of: of.casts for of in groups}
                return None if None in casts.values() else _call(casts, func, args, kwargs)
    return _call(casts, func, args, kwargs) if groups else None


def _look_up(indices: Any, weight: Any, *args: Any, **kwargs: Any) -> Tensor | None:
    """The result of ``embedding`` from the rows alone; None if all of the weight has to come."""
    look_up = weight._of.look_up if isinstance(weight, StandIn) else None
    return None if look_up is None else look_up(weight, indices, *args, **kwargs)


def _call(casts: Any, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor:
    # Autocast casts the last argument first, so that in backward the gradients come in the arguments' order.
    last = {name: _cast(kwargs[name], casts) for name in sorted(kwargs)} if kwargs else kwargs  # bias before weight
    return func(*[_cast(each, casts) for each in reversed(args)][::-1], **last)


def _cast(each: Any, casts: dict[DeviceParameters, Sequence[Tensor]]) -> Any:
    if not issubclass(type(each), StandIn):  # isinstance of a Parameter is slow: its metaclass asks in Python
        return each
    of, index = each._of, each._index
    if not torch.is_grad_enabled():
        return casts[of][index]
    return Cast.apply(each, casts[of][index]) if of.hosts[index].requires_grad else casts[of][index].detach()


class DeviceParameters:
    """The device parameters of one layer.

    They are there (:meth:`attach`) while the layer is used, and away (:meth:`detach`) otherwise.

    Args:
        layer: index of the layer.
        spans: where each parameter lies in the layer's memory.
        hosts: the user's parameters, in the same order.
        device: of the slots.
        autocast: the dtype of these parameters' casts, if they are masters.
        together: called with the stand-ins that something wants to compute with; a context during which they, or their
            ``casts``, are there.
        kept_raw: whether autograd would save tensors as they are now, and not as our hooks pack them.
        arrived: called with an index and a device parameter when autograd has put a gradient there.
        replacing: called with an index and the other memory before ``param.data = other``; the layer is there.
        settle: called before somebody asks which weights were written: what was is the host's then, and is counted.
    """

    def __init__(
        self,
        layer: int,
        spans: Sequence[Span],
        hosts: Sequence[nn.Parameter],
        device: torch.device,
        *,
        autocast: torch.dtype | None = None,
        together: Callable[..., AbstractContextManager[None]],
        kept_raw: Callable[[], bool],
        arrived: Callable[[int, int, Tensor], None],
        replacing: Callable[[int, int, Tensor], None],
        settle: Callable[[int], None],
    ) -> None:
        self.layer = layer
        self.spans = spans
        self._offsets = [span.offset for span in spans]
        self.hosts = hosts
        self.device = device
        self.autocast = autocast
        self.casts: Sequence[Tensor] | None = None
        """Of masters: what their functions are given in their place, while their layer is there and has them right."""
        self.look_up: Callable[..., Tensor | None] | None = None
        """Of a table: ``embedding`` without the whole weight."""
        self._lossless: tuple[int, int, int] | None = None  # index, address, version of the gradient under way
        self.together = together
        self.kept_raw = kept_raw
        self._arrived = arrived
        self.replacing = replacing
        self._settle = settle
        self.editions = [Editions(span.offset) for span in spans]
        """What graphs have saved views of."""
        self.exposed: set[int] = set()  # whose .data was handed out: nobody knows when it is written
        self.apart: dict[int, Tensor] = {}
        """Those that were given another dtype, in device memory of their own."""
        self.outside: dict[int, Tensor] = {}
        """Weights that were given other memory (``param.data = other``), which somebody else holds and may write, too."""
        self.unseen = [0] * len(spans)
        """How often each weight was found to have been written where no version shows it."""
        self.steps = 0
        """A number that rises with each optimizer's step; a fused one bumps no version."""
        self.attached = False
        self.shared = False
        self._present = [_with_user_class(DeviceParameter, type(host)) for host in hosts]
        self._absent = [_with_user_class(StandIn, type(host)) for host in hosts]
        self._handles: list[RemovableHandle] = []
        with normal_mode():
            self._away = [_nothing_like(span, device) for span in spans]
            self.all = [self._make(index) for index in range(len(spans))]
        # An accumulator that lives keeps the count of references the same, whether a graph is alive or not.
        self._accumulators: list[GradientEdge | None] = [None] * len(spans)
        self._synced: list[bool] | None = None
        self._references: dict[int, int] = {}  # to each, at the beginning of its layer's forward
        self._kept: dict[int, int] = {}  # by somebody, since then
        self._versions = [self.version(index) for index in range(len(spans))]
        self._host_versions = [host._version for host in hosts]
        self._addresses = [host.data_ptr() for host in hosts]

    def _make(self, index: int) -> DeviceParameter:
        host = self.hosts[index]
        takes_gradient = host.is_floating_point() or host.is_complex()
        away = self._away[index].new_empty(()).expand_as(self._away[index])  # not _away: it would share its version
        parameter: Any = nn.Parameter(away, requires_grad=takes_gradient)
        _tensor_data.__set__(parameter, self._away[index])
        if takes_gradient:
            # The user's hooks run where they do on a plain parameter, with torch.autograd.grad as well.
            self._handles.append(parameter.register_hook(lambda gradient: self._hooked(index, gradient)))
            arrived, layer = self._arrived, self.layer
            self._handles.append(parameter.register_post_accumulate_grad_hook(lambda p: arrived(layer, index, p)))
            parameter.requires_grad_(host.requires_grad)
        object.__setattr__(parameter, "_of", self)
        object.__setattr__(parameter, "_index", index)
        parameter.__class__ = _with_user_class(StandIn, type(host))
        return parameter

    def _hooked(self, index: int, gradient: Tensor) -> Tensor:
        hooked = gradient_hooks(self.hosts[index])  # they may write it where no version shows that
        lossless = self.autocast is not None and not hooked and came_from_cast(gradient)
        self._lossless = (index, gradient.data_ptr(), gradient._version) if lossless else None
        return _run_hooks(self.hosts[index], gradient)

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
        with _Untouched():
            kinds = self._absent if self.shared else self._present
            for parameter, value, kind in zip(self.all, views, kinds, strict=True):
                _tensor_data.__set__(parameter, value)
                parameter.__class__ = kind
        self.attached = True

    def set_apart(self, index: int, value: Tensor) -> None:
        """A weight was given another dtype: the layer's memory has no place for it."""
        with normal_mode():
            self.apart[index] = value
            self._away[index] = _nothing_like(value, self.device)

    def refuse_exchanged(self, index: int) -> None:
        """Autograd saved a weight in its layer's memory, where it is no more if it was given another dtype since."""
        with _Untouched():
            now = self.all[index].dtype
        if now is not self.spans[index].dtype:
            raise RuntimeError(
                f"Parameter {self.spans[index].name!r} was given {now} (param.data = other) between a forward that used it "
                f"as {self.spans[index].dtype} and the backward. Exchange it before the forward."
            )

    def _with_those_apart(self, views: Sequence[Tensor]) -> Sequence[Tensor]:
        with normal_mode(), torch.no_grad():
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
            parameter.__class__ = kind

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
        with _Untouched():
            for index, (parameter, kind) in enumerate(zip(self.all, self._absent, strict=True)):
                if index not in self._kept:
                    _tensor_data.__set__(parameter, self._away[index])
                parameter.__class__ = kind
        self.attached = False

    def let_go(self) -> bool:
        """Take the memory from what nobody keeps any more. Returns whether nothing is kept."""
        if self._kept and not self.attached:
            before, self._kept = self._kept, self._still_kept()
            with _Untouched():
                for index in before.keys() - self._kept.keys():
                    _tensor_data.__set__(self.all[index], self._away[index])
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
        with _Untouched():
            return int(self.all[index]._version)

    def version_once_fetched(self, index: int) -> int:
        """As :meth:`version`, once :meth:`fetched` has taken in what the host has written since."""
        return self.version(index) + (self.hosts[index]._version != self._host_versions[index])

    def _count_references(self) -> list[int]:
        return [sys.getrefcount(parameter) for parameter in self.all]

    def writes(self, index: int) -> int:
        """A number that rises with each write of a weight by anybody, shown by a version or not."""
        if index in self.exposed or self.version(index) != self._versions[index]:
            self._settle(self.layer)
        return self.version_once_fetched(index) + self.steps + self.unseen[index]

    def take_written(self) -> list[int]:
        """The weights that were, or through ``.data`` may have been, written since the last call.

        Written while the layer was there, or afterwards through a view that somebody still holds.
        """
        with _Untouched():
            versions = [each._version for each in self.all]
        before, self._versions = self._versions, versions
        if versions == before:
            return sorted(self.exposed)
        changed = {i for i, (old, new) in enumerate(zip(before, versions, strict=True)) if old != new}
        return sorted(changed | self.exposed)

    def alias(self, index: int) -> Tensor:
        """As :meth:`value`, with the device parameter's own version: writes of it show."""
        with _Untouched():
            return self.all[index].detach()

    def value(self, index: int) -> Tensor:
        """What a device parameter is now; attached."""
        with _Untouched():
            return _tensor_data.__get__(self.all[index])

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
                self._accumulators[index] = _edge(parameter) if host.requires_grad else None
                for counted in (self._references, self._kept):
                    if index in counted:
                        counted[index] += 1 if host.requires_grad else -1

    @property
    def stale(self) -> bool:
        """Whether a host parameter was written or exchanged since :meth:`fetched`."""
        return [host._version for host in self.hosts] != self._host_versions or (
            [host.data_ptr() for host in self.hosts] != self._addresses
        )

    def fetched(self) -> None:
        """The device's copy is that of the host's parameters as they are now.

        Where they changed, the device parameters' versions change too, so that autograd's in-place check sees an
        optimizer step between forward and backward as it would on plain parameters.
        """
        now = [host._version for host in self.hosts]
        if now == self._host_versions:
            return
        for index, (old, new) in enumerate(zip(self._host_versions, now, strict=True)):
            if old != new:
                with normal_mode(), _Untouched():
                    increment_version(self.all[index])
                self._versions[index] += 1
        self._host_versions = now

    def written_back(self) -> None:
        """The host's parameters have taken over what was written on the device: no change from outside."""
        self._host_versions = [host._version for host in self.hosts]

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
        return self.together([parameter]) if isinstance(parameter, StandIn) else nullcontext()


@cache
def _with_user_class(ours: type[DeviceParameter], theirs: type[nn.Parameter]) -> type[DeviceParameter]:
    """Our class, which is also the user's own subclass of ``Parameter`` if there is one."""
    return ours if theirs in (nn.Parameter, Tensor) else type(f"{ours.__name__}{theirs.__name__}", (ours, theirs), {})


def _run_hooks(host: nn.Parameter, gradient: Tensor) -> Tensor:
    for hook in list((gradient_hooks(host) or {}).values()):
        replaced = hook(gradient)
        gradient = gradient if replaced is None else replaced
    return gradient


def same_place(tensor: Tensor, other: Tensor) -> bool:
    """Whether two tensors are the same elements in memory."""
    return (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()) == (
        other.data_ptr(), other.dtype, other.shape, other.stride()
    )  # fmt: skip


def requires_grad(parameter: Tensor) -> bool:
    """What autograd sees on the device parameter itself."""
    with _Untouched():
        return _tensor_requires_grad.__get__(parameter)


def set_requires_grad(parameter: Tensor, value: bool) -> None:
    """Set what autograd sees on the device parameter itself."""
    with _Untouched():
        _tensor_requires_grad.__set__(parameter, value)


def take_gradient(parameter: Tensor) -> Tensor | None:
    """The gradient that autograd put on the device parameter, which lets go of it."""
    with _Untouched():
        gradient = _tensor_grad.__get__(parameter)
        _tensor_grad.__set__(parameter, None)
    return gradient


def hides_stand_ins(inputs: Any) -> bool:
    """Whether what a module is given makes torch pass its operators by our stand-ins: another class decides first.

    A jagged nested tensor does; or a mode, which sees every operator.
    """
    return count_function_modes() > 0 or any(
        isinstance(each, Tensor) and getattr(type(each).__torch_function__, "__func__", None) not in _NO_HANDLERS
        for each in tree_leaves(inputs)
        if type(each) is not Tensor
    )


# A class without a handler of its own, and one that has switched them off, as nn.Parameter does.
_NO_HANDLERS = (Tensor.__torch_function__.__func__, None)  # type: ignore[attr-defined]


def _nothing_like(value: Span | Tensor, device: torch.device) -> Tensor:
    fill = float("nan") if value.dtype.is_floating_point or value.dtype.is_complex else 0
    return torch.full((), fill, dtype=value.dtype, device=device).expand(value.shape)


def _grad_by_edges(outputs: Any, inputs: Any, *args: Any, materialize_grads: bool = False, **kwargs: Any) -> Any:
    """``torch.autograd.grad`` asks its inputs for their place in the graph only: no layer need come.

    Inside, nothing may switch the dispatch off: user code that runs in backward (a checkpoint's recompute) needs it.
    """
    inputs = [inputs] if isinstance(inputs, Tensor) else list(inputs)
    edges = [_edge(each) if isinstance(each, DeviceParameter) else each for each in inputs]
    if not materialize_grads:
        return torch.autograd.grad(outputs, edges, *args, **kwargs)
    found = torch.autograd.grad(outputs, edges, *args, **{**kwargs, "allow_unused": True})
    return tuple(
        torch.zeros(each.shape, dtype=each.dtype, device=each.device) if gradient is None else gradient
        for gradient, each in zip(found, inputs, strict=True)
    )


def _alias(parameter: DeviceParameter) -> Tensor:
    """The weight under another tensor, which whoever keeps it keeps with its memory."""
    wanted = torch.is_grad_enabled() and requires_grad(parameter)
    with _Untouched(), unseen():
        return parameter.view_as(parameter) if wanted else parameter.detach()


def _edge(parameter: DeviceParameter) -> GradientEdge:
    with _Untouched(), normal_mode(), torch.enable_grad():
        return get_gradient_edge(parameter)
