"""A batch on paper before there is a device: what each layer computes, saves and needs again, without memory.

The batch runs for real, forward and backward, under torch's ``FakeTensorMode``: tensors have shapes, dtypes and
lifetimes, and no data. Operators are counted as they come (FLOPs by torch's own formulas, bytes where there is none),
and so is every byte that is alive beside the parameters. 70 billion parameters take some seconds.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import flop_registry

from sp_lightning.activations.offload import count_once, is_small
from sp_lightning.device.torch_private import (
    FakeTensorMode,
    TorchDispatchMode,
    grouped_mm_operator,
    storage_id,
    to_copy_operator,
    tree_leaves,
    truncated_normal_without_values,
)
from sp_lightning.model.found import Found
from sp_lightning.plan.activation_policy import EXEMPT, Call, Mode, peak_bytes
from sp_lightning.plan.units import human_bytes
from sp_lightning.tune.visits import Visit


@dataclass
class Cost:
    """What one visit of layers computes.

    Attributes:
        layers: those whose module is called, or whose backward comes; none between layers.
        backward: whether it is their backward.
        flops: of matrix products, convolutions and attention.
        moved: bytes that all other operators read and write.
        needs: in backward, the layers whose weights are needed, in that order.
    """

    layers: tuple[int, ...]
    backward: bool
    flops: int = 0
    moved: int = 0
    needs: dict[int, None] = field(default_factory=dict)


@dataclass(frozen=True)
class Saved:
    """A tensor that autograd saves.

    Attributes:
        nbytes: of its storage.
        dtype, shape: its own.
    """

    nbytes: int
    dtype: torch.dtype
    shape: torch.Size

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')} {tuple(self.shape)}, {human_bytes(self.nbytes)}"


@dataclass(frozen=True)
class Work:
    """What a batch does.

    Attributes:
        costs: in the order in which they come.
        activation_bytes: most bytes alive at once beside parameters and casts that travel: activations, intermediate
            results, gradients of activations, the gradients of the layer that is in backward; and buffers.
        calls: of the units, in the order of the forward; small storages are not in them.
        small: the same calls with those only: they are kept or computed again, and never travel.
        outside: bytes that autograd saves outside of all units, in the loss as a rule, whatever the units' modes.
        largest_outside: the largest of those, if it is not small.
    """

    costs: tuple[Cost, ...]
    activation_bytes: int
    calls: tuple[Call, ...]
    small: tuple[Call, ...]
    outside: int
    largest_outside: Saved | None

    @property
    def flops(self) -> int:
        """Of the whole batch."""
        return sum(cost.flops for cost in self.costs)

    @property
    def offloaded(self) -> int:
        """Bytes of saved tensors on the host, where all units are offloaded."""
        return sum(call.saved for call in self.calls[:-EXEMPT])

    def saved(self, mode: Mode) -> int:
        """Most bytes of saved tensors on the device at once, where all units are in one mode."""
        modes = dict.fromkeys((call.unit for call in self.calls), mode)
        if mode == "offload":
            return peak_bytes(self.calls, modes) + sum(call.saved for call in self.small) + self.outside
        both = zip(self.calls, self.small, strict=True)
        calls = [Call(one.unit, one.saved + other.saved, one.inputs + other.inputs) for one, other in both]
        return peak_bytes(calls, modes) + self.outside

    def alive(self, mode: Mode) -> int:
        """As ``activation_bytes``, where all units are in one mode."""
        return self.activation_bytes - self.saved("keep") + self.saved(mode)

    def visits(self, *, flops: float, memory: float) -> list[Visit]:
        """With times, for a device of so many FLOP/s and so many bytes/s of its own memory."""
        return [
            Visit(cost.layers, cost.flops / flops + cost.moved / memory, cost.backward, tuple(cost.needs))
            for cost in self.costs
        ]


@contextmanager
def on_paper() -> Iterator[None]:
    """Modules that are made inside have parameters without memory, and compute shapes only."""
    mode: Any = FakeTensorMode(allow_non_fake_inputs=True)
    mode.__deepcopy__ = lambda memo: mode  # else a copy of a tensor is of another mode, and none of its views knows it
    with truncated_normal_without_values(), mode:
        yield


def cast(module: nn.Module, dtype: torch.dtype) -> None:
    """As ``module.to(dtype)``, which cannot exchange parameters without memory. Shared ones stay shared."""
    made: dict[nn.Parameter, nn.Parameter] = {}
    for child in module.modules():
        for name, parameter in child._parameters.items():
            if parameter is not None and parameter.is_floating_point() and parameter.dtype is not dtype:
                if parameter not in made:
                    made[parameter] = nn.Parameter(parameter.detach().to(dtype), parameter.requires_grad)
                child._parameters[name] = made[parameter]
        for name, buffer in child._buffers.items():
            if buffer is not None and buffer.is_floating_point():
                child._buffers[name] = buffer.to(dtype)


def estimate(found: Found, run: Callable[[], Tensor | None]) -> Work:
    """Run a batch and count.

    Args:
        found: the layers of a module that was made in :func:`on_paper`, where this is called, too.
        run: one forward. Returns the loss, whose backward follows, or None.

    Raises:
        Exception: whatever the module raises; a module that looks at values cannot be run without any.
    """
    trial = _Trial(found)
    saves = _Saves(trial.stays)
    with ExitStack() as stack:
        for module, visits in found.visits.items():
            if visits:
                stack.callback(module.register_forward_pre_hook(partial(trial.enter, visits)).remove)
                stack.callback(module.register_forward_hook(partial(trial.leave, visits)).remove)
        for parameter in found.places:
            if parameter.requires_grad:
                stack.callback(parameter.register_post_accumulate_grad_hook(_drop_gradient).remove)
        stack.callback(torch.set_autocast_cache_enabled, torch.is_autocast_cache_enabled())
        torch.set_autocast_cache_enabled(False)  # as Lightning does
        stack.enter_context(_Fused())
        stack.enter_context(trial)
        with saves.counted(found.units):
            loss = run()
        if loss is not None:
            trial.now = trial.begin((), backward=True)
            # A tensor's own backward would run without _Fused, and checkpoints compute forwards in it.
            torch.autograd.backward(get_gradient_edge(loss), torch.ones_like(loss))
    outside = saves.outside()
    largest = max((each for each in outside if not is_small(each.nbytes)), key=lambda each: each.nbytes, default=None)
    calls, small = tuple(saves.calls), tuple(saves.small)
    return Work(trial.costs(), trial.peak(), calls, small, sum(each.nbytes for each in outside), largest)


@dataclass
class _Live:
    """Bytes that are alive, and the most that were."""

    now: int = 0
    peak: int = 0
    known: dict[int, Any] = field(default_factory=dict)

    def see(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage_id(storage)
        if key not in self.known:
            self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)
            self.known[key] = weakref.finalize(storage, self._gone, key, storage.nbytes())

    def _gone(self, key: int, nbytes: int) -> None:
        if self.known.pop(key, None) is not None:
            self.now -= nbytes


class _Saves:
    """What autograd saves in a forward, by calls of units: counted as the engine does it (``offload``).

    Args:
        stays: whether a tensor is on the device in any case.
    """

    def __init__(self, stays: Callable[[Tensor], bool]) -> None:
        self._stays = stays
        self.calls: list[Call] = []
        self.small: list[Call] = []  # what of them is in small storages
        self._now: int | None = None  # the call under way
        self._above: list[int | None] = []  # those that it is made in
        # By storage; what is weakly held keeps its address from being given to another.
        self._seen: dict[int, StorageWeakRef] = {}
        self._given: dict[int, StorageWeakRef] = {}  # among arguments
        self._between: dict[int, StorageWeakRef] = {}  # outside of units
        self._outside: dict[int, Saved] = {}

    @contextmanager
    def counted(self, units: Mapping[str, nn.Module]) -> Iterator[None]:
        """Around a forward. Checkpoints inside have hooks of their own, and what those save is not seen."""
        with ExitStack() as stack:
            for name, unit in units.items():
                enter = partial(self._enter, name)
                stack.callback(unit.register_forward_pre_hook(enter, with_kwargs=True).remove)
                stack.callback(unit.register_forward_hook(self._leave, always_call=True).remove)
            stack.enter_context(saved_tensors_hooks(self._pack, lambda tensor: tensor))
            yield

    def outside(self) -> list[Saved]:
        """What no unit saves."""
        return [saved for key, saved in self._outside.items() if key not in self._seen]

    def _enter(self, unit: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._above.append(self._now)
        if torch.is_grad_enabled():
            given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
            self._now = len(self.calls)
            sizes = [count_once(each, self._given, small=True) for each in given]
            self.calls.append(Call(unit, 0, sum(each for each in sizes if not is_small(each))))
            self.small.append(Call(unit, 0, sum(filter(is_small, sizes))))

    def _leave(self, *_: Any) -> None:
        self._now = self._above.pop()

    def _pack(self, tensor: Tensor) -> Tensor:
        if tensor.layout is torch.strided and not (tensor.is_conj() or tensor.is_neg() or self._stays(tensor)):
            if self._now is not None:
                nbytes = count_once(tensor, self._seen, small=True)
                calls = self.small if is_small(nbytes) else self.calls
                calls[self._now] = replace(calls[self._now], saved=calls[self._now].saved + nbytes)
            elif nbytes := count_once(tensor, self._between, small=True):
                self._outside[storage_id(tensor.untyped_storage())] = Saved(nbytes, tensor.dtype, tensor.shape)
        return tensor.detach()  # an output that its own node keeps would never be freed


class _Trial(TorchDispatchMode):
    """Counts operators, for whatever layer is at work."""

    def __init__(self, found: Found) -> None:
        super().__init__()
        self._costs: list[Cost] = []
        self._above: list[Cost] = []
        self._live = _Live()
        self._weights = {
            storage_id(p.untyped_storage()): layer
            for layer, each in enumerate(found.layers)
            for _, p in (*each.parameters, *each.lowered)
        }
        self._weights.update({storage_id(p.untyped_storage()): -1 for _, p in found.residents.parameters})
        # Buffers, and modules that are moved whole, are on the device all the time.
        root = [*found.visits, *(module for _, module in found.aside)]
        staying = {id(b): b for module in root for b in module.buffers()}
        staying.update((id(p), p) for _, module in found.aside for p in module.parameters())
        self._staying = list(staying.values())
        self._addresses = {storage_id(each.untyped_storage()) for each in self._staying}
        self._lowered = {storage_id(p.untyped_storage()) for layer in found.layers for _, p in layer.lowered}
        self._casts: list[Tensor] = []  # of those; alive, so that their storages' addresses stay theirs
        self.now = self.begin((), backward=False)

    def begin(self, layers: tuple[int, ...], *, backward: bool) -> Cost:
        """From here on operators are those of another visit."""
        self._costs.append(Cost(layers, backward))
        return self._costs[-1]

    def enter(self, layers: tuple[int, ...], *_: Any) -> None:
        """A module that uses layers is called."""
        self._above.append(self.now)
        self.now = self.begin(layers, backward=False)

    def leave(self, layers: tuple[int, ...], module: nn.Module, args: Any, output: Any) -> None:
        """It has returned; what follows is its caller's."""
        above = self._above.pop()
        self.now = self.begin(above.layers, backward=above.backward)
        for tensor in tree_leaves(output):
            if isinstance(tensor, Tensor) and tensor.requires_grad and tensor.grad_fn is not None:
                tensor.register_hook(partial(self._touch, layers))

    def _touch(self, layers: tuple[int, ...], gradient: Tensor) -> None:
        if not (self.now.backward and self.now.layers == layers):
            self.now = self.begin(layers, backward=True)

    def costs(self) -> tuple[Cost, ...]:
        """What was computed."""
        return tuple(each for each in self._costs if each.layers or each.flops or each.moved)

    def peak(self) -> int:
        """Most bytes beside parameters and casts that travel."""
        return self._live.peak + sum(each.numel() * each.element_size() for each in self._staying)

    def stays(self, tensor: Tensor) -> bool:
        """Whether its memory is that of a weight, of a cast that travels, or of a buffer."""
        key = storage_id(tensor.untyped_storage())
        return key in self._weights or key in self._addresses

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten.embedding.default and args[1].is_floating_point():
            # torch 2.10 and 2.11 refuse this of real tensors only.
            raise RuntimeError("embedding was given indices that are no whole numbers.")
        result = func(*args, **kwargs)
        outputs = [each for each in tree_leaves(result) if isinstance(each, Tensor)]
        inputs = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        casts = func.overloadpacket is to_copy_operator and self._is_lowered(inputs[0])
        for tensor in outputs:
            if casts:
                self._casts.append(tensor)  # the wire brings it
                self._weights[storage_id(tensor.untyped_storage())] = self._weights[
                    storage_id(inputs[0].untyped_storage())
                ]
            elif not self.stays(tensor):
                self._live.see(tensor)
        if func.is_view or func.namespace == "prim" or func.overloadpacket is torch.ops.aten.detach:
            return result  # prim: a tensor's device is asked for
        if self.now.backward:
            for tensor in inputs:
                layer = self._layer_of(tensor)
                if layer is not None and layer >= 0:
                    self.now.needs[layer] = None
        flops = _FLOPS.get(func.overloadpacket) or flop_registry.get(func.overloadpacket)
        if flops is not None:
            self.now.flops += flops(*args, **kwargs, out_val=result)
        else:
            self.now.moved += sum(each.numel() * each.element_size() for each in (*inputs, *outputs))
        return result

    def _is_lowered(self, tensor: Tensor) -> bool:
        return storage_id(tensor.untyped_storage()) in self._lowered

    def _layer_of(self, tensor: Tensor) -> int | None:
        return self._weights.get(storage_id(tensor.untyped_storage()))


def _grouped_flops(a: Tensor, b: Tensor, *args: Any, **kwargs: Any) -> int:
    """Experts at once: rows of ``a`` are shared out among them, or those of ``b``, or what they have in common."""
    experts_share_nothing = a.ndim == 3 and b.ndim == 3
    return 2 * a.numel() * b.shape[-1] if a.ndim == 2 or experts_share_nothing else 2 * a[0].numel() * b.shape[-1]


def _convolution_backward_flops(
    gradient: Tensor, x: Tensor, weight: Tensor, _bias: Any, _stride: Any, _padding: Any, _dilation: Any, transposed: bool,
    _output_padding: Any, _groups: int, mask: Any, **kwargs: Any,
) -> int:  # fmt: skip
    """As often as forward as there are gradients. torch's formula leaves out the groups."""
    each = weight[0].numel() * (x if transposed else gradient).numel()
    return 2 * each * sum(bool(wanted) for wanted in mask[:2])


_FLOPS: dict[Any, Callable[..., int]] = {
    grouped_mm_operator: _grouped_flops,
    torch.ops.aten.convolution_backward: _convolution_backward_flops,
}


class _Fused(TorchFunctionMode):
    """Attention with dropout is fused on a GPU and not on the CPU, whose operators are counted: leave the dropout out."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is nn.functional.scaled_dot_product_attention:
            if len(args) > 4:
                args = (*args[:4], 0.0, *args[5:])
            else:
                kwargs = {**kwargs, "dropout_p": 0.0}
        return func(*args, **kwargs)


def _drop_gradient(parameter: Tensor) -> None:
    parameter.grad = None
