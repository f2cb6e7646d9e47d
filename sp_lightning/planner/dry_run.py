"""A dry run: finds out what each layer of a batch computes, saves and needs again, without a device and without memory.

The batch really runs, forward and backward, under torch's ``FakeTensorMode``: tensors have shapes, dtypes and lifetimes,
but no data. Every operator is counted (FLOPs by torch's own formulas, bytes if there is no formula), and so is every byte
that is alive beside the parameters. A model of 70 billion parameters takes some seconds.
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
from sp_lightning.activations.policy import EXEMPT, Call, peak_bytes
from sp_lightning.model.found import Found
from sp_lightning.plan.choices import Mode, Modes
from sp_lightning.plan.units import in_gib
from sp_lightning.registry import row_finder
from sp_lightning.torch_compat.private import (
    TorchDispatchMode,
    cpu_attention_backward_operator,
    cpu_attention_operator,
    grouped_mm_operator,
    no_torch_functions,
    storage_id,
    to_copy_operator,
    tree_leaves,
)
from sp_lightning.tuning.visits import Visit


@dataclass
class Cost:
    """What one visit of layers computes.

    Attributes:
        layers: indices of the layers whose module is called, or whose backward runs; none between layers.
        backward: whether this is their backward.
        flops: floating-point operations of matrix products, convolutions and attention.
        read: bytes that those read and write. A product with few rows takes as long as its weight is read.
        moved: bytes that all other operators read and write.
        needs: in backward, the layers whose weights are needed, as keys in that order.
        share: in forward, the share of stacked experts that is routed to.
    """

    layers: tuple[int, ...]
    backward: bool
    flops: int = 0
    read: int = 0
    moved: int = 0
    needs: dict[int, None] = field(default_factory=dict)
    share: float = 1.0


@dataclass(frozen=True)
class Saved:
    """A tensor that autograd saves, with the bytes of its storage."""

    nbytes: int
    dtype: torch.dtype
    shape: torch.Size

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')} {tuple(self.shape)}, {in_gib(self.nbytes)}"


@dataclass(frozen=True)
class Work:
    """What a batch does.

    Attributes:
        costs: what each visit computes, in the order of the visits.
        activation_bytes: the most bytes that are alive at once beside parameters and casts that travel: activations,
            intermediate results, gradients of activations, the gradients of the layer that is in backward.
        calls: the unit calls in the order of the forward, without the small storages that they save.
        small: the same calls with the small storages only, which are kept or computed again and never travel.
        outside: bytes that autograd saves outside of all units, as a rule in the loss. No mode changes them.
        largest_outside: the largest tensor saved there, unless all of them are small.
        whole: the names of tables of which more than rows was read.
    """

    costs: tuple[Cost, ...]
    activation_bytes: int
    calls: tuple[Call, ...]
    small: tuple[Call, ...]
    outside: int
    largest_outside: Saved | None
    whole: frozenset[str] = frozenset()

    @property
    def offloaded(self) -> int:
        """Bytes of saved tensors on the host if all units are offloaded."""
        return sum(call.saved for call in self.calls[:-EXEMPT])

    def saved(self, modes: Mode | Modes) -> int:
        """The most bytes of saved tensors on the device at once: with one mode for all units, or with one for each."""
        if isinstance(modes, str):
            modes = dict.fromkeys((call.unit for call in self.calls), modes)
        stay, calls = self.outside, []
        for call, small in zip(self.calls, self.small, strict=True):
            if modes[call.unit] == "offload":
                stay += small.saved
                calls.append(call)
            else:
                calls.append(Call(call.unit, call.saved + small.saved, call.inputs + small.inputs))
        return peak_bytes(calls, modes) + stay

    def alive(self, modes: Mode | Modes) -> int:
        """As ``activation_bytes``, with such modes."""
        return self.activation_bytes - self.saved("keep") + self.saved(modes)

    def visits(self, *, flops: float, memory: float) -> list[Visit]:
        """The visits with their times, on a device of ``flops`` FLOP/s whose own memory moves ``memory`` bytes/s."""
        return [
            Visit(
                cost.layers,
                max(cost.flops / flops, cost.share * cost.read / memory) + cost.moved / memory,
                cost.backward,
                tuple(cost.needs),
                share=cost.share,
            )
            for cost in self.costs
        ]


def estimate(found: Found, run: Callable[[], Tensor | None]) -> Work:
    """Runs a batch and counts what it does.

    Args:
        found: the layers of a module that was made in :func:`~sp_lightning.planner.fake.fake_tensors`. This is called in
            the same context.
        run: one forward. It returns the loss, whose backward follows, or None.

    Raises:
        Exception: whatever the module raises. A module that looks at values cannot be run without any.
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
        # Lightning's precision plugins switch autocast's cache off as well.
        stack.callback(torch.set_autocast_cache_enabled, torch.is_autocast_cache_enabled())
        torch.set_autocast_cache_enabled(False)
        stack.enter_context(_Fused())
        stack.enter_context(trial)
        with saves.counted(found.units):
            loss = run()
        if loss is not None:
            trial.now = trial.begin((), backward=True)
            # loss.backward() is a call that _Fused handles, and while a mode handles a call it is switched off. It has to
            # stay on, because checkpoints compute forwards during backward.
            torch.autograd.backward(get_gradient_edge(loss), torch.ones_like(loss))
    outside = saves.outside()
    large = (saved for saved in outside if not is_small(saved.nbytes))
    largest = max(large, key=lambda saved: saved.nbytes, default=None)
    calls, small, whole = tuple(saves.calls), tuple(saves.small), frozenset(trial.whole)
    return Work(trial.costs(), trial.peak, calls, small, sum(saved.nbytes for saved in outside), largest, whole)


class _Saves:
    """Counts by unit calls, as the engine does, what autograd saves in a forward but for what ``stays`` on the device anyway."""

    def __init__(self, stays: Callable[[Tensor], bool]) -> None:
        self._stays = stays
        self.calls: list[Call] = []
        self.small: list[Call] = []  # the same calls, with what they save in small storages
        self._now: int | None = None  # the index of the call that is running
        self._above: list[int | None] = []  # the indices of the calls around it
        # The keys are addresses of storages. As long as a storage is held weakly, its address is not given to another.
        self._seen: dict[int, StorageWeakRef] = {}  # saved in units
        self._given: dict[int, StorageWeakRef] = {}  # among the arguments of units
        self._between: dict[int, StorageWeakRef] = {}  # saved outside of units
        self._outside: dict[int, Saved] = {}  # what those storages were saved as

    @contextmanager
    def counted(self, units: Mapping[str, nn.Module]) -> Iterator[None]:
        """Counts what the forward in this context saves, but for checkpoints, whose own hooks hide that."""
        with ExitStack() as stack:
            for name, unit in units.items():
                enter = partial(self._enter, name)
                stack.callback(unit.register_forward_pre_hook(enter, with_kwargs=True).remove)
                stack.callback(unit.register_forward_hook(self._leave, always_call=True).remove)
            stack.enter_context(saved_tensors_hooks(self._pack, lambda tensor: tensor))
            yield

    def outside(self) -> list[Saved]:
        """The tensors that are saved outside of units, and in none of them."""
        return [saved for key, saved in self._outside.items() if key not in self._seen]

    def _enter(self, unit: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._above.append(self._now)
        if torch.is_grad_enabled():
            arguments = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
            self._now = len(self.calls)
            sizes = [count_once(argument, self._given, small=True) for argument in arguments]
            self.calls.append(Call(unit, 0, sum(size for size in sizes if not is_small(size))))
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
        return tensor.detach()  # a node that kept its own output, and with it itself, would never be freed


class _Trial(TorchDispatchMode):
    """Counts operators, and assigns them to the visit that is under way (``now``)."""

    def __init__(self, found: Found) -> None:
        super().__init__()
        self._costs: list[Cost] = []
        self._above: list[Cost] = []
        self.peak = self._alive = 0  # bytes beside parameters, casts that travel, and buffers: the most, and now
        self._living: dict[int, Any] = {}  # of each storage that is alive, what counts its bytes off
        self._weights = {
            storage_id(p.untyped_storage()): index
            for index, layer in enumerate(found.layers)
            for _, p in (*layer.parameters, *layer.lowered)
        }
        self._weights.update({storage_id(p.untyped_storage()): -1 for _, p in found.residents.parameters})
        self._tables = {storage_id(p.untyped_storage()): t.name for t in found.tables for _, p in t.parameters}
        self.whole: set[str] = set()
        # Buffers, and modules that are moved whole, are on the device all the time.
        root = [*found.visits, *(module for _, module in found.aside)]
        staying = [*(b for module in root for b in module.buffers())]
        staying += [p for _, module in found.aside for p in module.parameters()]
        self._addresses = {storage_id(tensor.untyped_storage()) for tensor in staying}
        self._lowered = {storage_id(p.untyped_storage()) for layer in found.layers for _, p in layer.lowered}
        # The casts of those weights. They are kept alive, so that no other storage is given their addresses.
        self._casts: list[Tensor] = []
        self.now = self.begin((), backward=False)

    def begin(self, layers: tuple[int, ...], *, backward: bool) -> Cost:
        """Begins another visit; the caller makes it the one under way. Returns its cost, which is empty."""
        self._costs.append(Cost(layers, backward))
        return self._costs[-1]

    def enter(self, layers: tuple[int, ...], module: nn.Module, args: Any) -> None:
        """Forward pre-hook of a module that uses layers: their visit begins."""
        self._above.append(self.now)
        self.now = self.begin(layers, backward=False)
        self.now.share = row_finder().routed_share(module, args)

    def leave(self, layers: tuple[int, ...], module: nn.Module, args: Any, output: Any) -> None:
        """Forward hook of such a module: the visit of its caller goes on, and the outputs tell when backward comes."""
        above = self._above.pop()
        self.now = self.begin(above.layers, backward=above.backward)
        for tensor in tree_leaves(output):
            if isinstance(tensor, Tensor) and tensor.requires_grad and tensor.grad_fn is not None:
                tensor.register_hook(partial(self._touch, layers))

    def _touch(self, layers: tuple[int, ...], gradient: Tensor) -> None:
        if not (self.now.backward and self.now.layers == layers):
            self.now = self.begin(layers, backward=True)

    def costs(self) -> tuple[Cost, ...]:
        """The visits that computed something or used layers, in order."""
        return tuple(cost for cost in self._costs if cost.layers or cost.flops or cost.moved)

    def _see(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key, nbytes = storage_id(storage), storage.nbytes()
        if key not in self._living:
            self._alive += nbytes
            self.peak = max(self.peak, self._alive)
            self._living[key] = weakref.finalize(storage, self._gone, key, nbytes)

    def _gone(self, key: int, nbytes: int) -> None:
        if self._living.pop(key, None) is not None:
            self._alive -= nbytes

    def stays(self, tensor: Tensor) -> bool:
        """Whether a tensor's memory is that of a weight, of a cast that travels, or of a buffer."""
        key = storage_id(tensor.untyped_storage())
        return key in self._weights or key in self._addresses

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "prim":  # it reads a tensor's device, more often than anything else
            return args[0].device if func is torch.ops.prim.device.default else func(*args, **(kwargs or {}))
        with no_torch_functions():  # _Fused is for what the model calls
            return self._count(func, args, kwargs or {})

    def _count(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func is torch.ops.aten.embedding.default and args[1].is_floating_point():
            # torch 2.10 and 2.11 refuse such indices only if the tensors are real.
            raise RuntimeError("embedding was given indices that are not integers.")
        result = func(*args, **kwargs)
        outputs, inputs = _tensors(result), _tensors((*args, *kwargs.values()))
        keys = [storage_id(leaf.untyped_storage()) for leaf in inputs]
        casts = func.overloadpacket is to_copy_operator and keys[0] in self._lowered
        for tensor in outputs:
            if casts:
                self._casts.append(tensor)  # it arrives with its layer, and takes no memory beside the slot
                self._weights[storage_id(tensor.untyped_storage())] = self._weights[keys[0]]
            elif not self.stays(tensor):
                self._see(tensor)
        if func.is_view or func.overloadpacket is torch.ops.aten.detach:
            return result  # these compute nothing
        if func is not torch.ops.aten.embedding.default:
            self.whole.update(self._tables[key] for key in keys if key in self._tables)
        if self.now.backward:
            layers = (self._weights.get(key, -1) for key in keys)
            self.now.needs |= dict.fromkeys(layer for layer in layers if layer >= 0)
        flops = _FLOPS.get(func.overloadpacket) or flop_registry.get(func.overloadpacket)
        nbytes = sum(tensor.numel() * tensor.element_size() for tensor in (*inputs, *outputs))
        if flops is not None:
            self.now.flops += flops(*args, **kwargs, out_val=result)
            self.now.read += nbytes
        else:
            self.now.moved += nbytes
        return result


def _tensors(found: Any) -> list[Tensor]:
    """The tensors of an operator, whose arguments and results are tensors, or lists of some at most."""
    if isinstance(found, (tuple, list)):
        return [tensor for each in found for tensor in _tensors(each)]
    return [found] if isinstance(found, Tensor) else []


class _Fused(TorchFunctionMode):
    """Leaves the dropout of attention out, so that attention is counted as the fused kernel that a GPU runs.

    The operators that are counted are the CPU's, which has no fused attention with dropout.
    """

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


# ---------------------------------------------------------------------- floating-point operations


def _grouped_flops(a: Tensor, b: Tensor, *args: Any, **kwargs: Any) -> int:
    """FLOPs of several experts at once, which share out rows of ``a``, columns of ``b`` or what is summed over."""
    experts_share_nothing = a.ndim == 3 and b.ndim == 3
    return 2 * a.numel() * b.shape[-1] if a.ndim == 2 or experts_share_nothing else 2 * a[0].numel() * b.shape[-1]


def _convolution_backward_flops(
    gradient: Tensor, x: Tensor, weight: Tensor, _bias: Any, _stride: Any, _padding: Any, _dilation: Any, transposed: bool,
    _output_padding: Any, _groups: int, mask: Any, **kwargs: Any,
) -> int:  # fmt: skip
    """Counts a forward for each gradient that is wanted. torch's own formula ignores the groups."""
    multiplications = weight[0].numel() * (x if transposed else gradient).numel()
    return 2 * multiplications * sum(bool(wanted) for wanted in mask[:2])


def _attention_flops(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> int:
    """FLOPs of the CPU's attention, for which torch 2.10 and 2.11 have no formula. Several queries may share a key."""
    return 2 * query[..., 0].numel() * key.shape[-2] * (query.shape[-1] + value.shape[-1])


def _attention_backward_flops(
    _gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
) -> int:
    """Scores are computed again; then come the gradients of query and key, of value and of the scores."""
    return 2 * query[..., 0].numel() * key.shape[-2] * (3 * query.shape[-1] + 2 * value.shape[-1])


_FLOPS: dict[Any, Callable[..., int]] = {
    grouped_mm_operator: _grouped_flops,
    torch.ops.aten.convolution_backward: _convolution_backward_flops,
    cpu_attention_operator: _attention_flops,
    cpu_attention_backward_operator: _attention_backward_flops,
}
"""What counts an operator's FLOPs, from its arguments and result, where torch has no formula or a wrong one."""
