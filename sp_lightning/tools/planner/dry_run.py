"""A dry run: measures the FLOPs, activations and weight uses of each layer in a batch, without a device and without memory.

The batch runs forward and backward under torch's ``FakeTensorMode``: tensors have shapes, dtypes and lifetimes, but no data.
Every operator is counted: the bytes that it reads and writes and, if a formula for it is known, its FLOPs. The bytes of all
tensors that are alive are counted as well, except weights and buffers. A model of 70 billion parameters takes a few seconds.
"""

from __future__ import annotations

import re
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import flop_registry

from sp_lightning.capabilities.activations.offload import count_once, is_small
from sp_lightning.capabilities.activations.policy import Call, offloaded_bytes, peak_bytes
from sp_lightning.core.model.found import Found
from sp_lightning.core.model.rows import row_finder
from sp_lightning.core.model.wrapped import parts
from sp_lightning.core.plan.choices import Mode, Modes
from sp_lightning.core.plan.units import in_gib
from sp_lightning.core.torch_compat.private import (
    TorchDispatchMode,
    cpu_attention_backward_operator,
    cpu_attention_operator,
    current_graph_task,
    grouped_mm_operator,
    no_torch_functions,
    storage_id,
    to_copy_operator,
    tree_leaves,
    tree_map_only,
)
from sp_lightning.tools.planner.prediction.visits import Visit


@dataclass
class Cost:
    """The computation of one layer call, or that between two layer calls.

    Attributes:
        layers: indices of the layers whose forward or backward runs; empty between layer calls.
        backward: True in the backward of these layers.
        flops: floating-point operations of matrix products, convolutions and attention.
        read: bytes that matrix products, convolutions and attention read and write. Reading the weight bounds the time of a
            product with few rows.
        moved: bytes that all other operators read and write.
        needs: in backward, the indices of the layers whose weights are needed, as keys in the order of use.
        share: in forward, the share of stacked experts that tokens are routed to.
        continues: True for the rest of a forward, after the call of a layer inside it.
    """

    layers: tuple[int, ...]
    backward: bool
    flops: int = 0
    read: int = 0
    moved: int = 0
    needs: dict[int, None] = field(default_factory=dict)
    share: float = 1.0
    continues: bool = False


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
    """The computation and activations of a batch.

    Attributes:
        costs: the costs of layer calls, and of the computation between them, in order.
        activation_bytes: the peak of the bytes of all tensors except weights, uploaded casts and buffers: activations,
            intermediate results, gradients of activations, and the gradients of the layer that is in backward.
        calls: the unit calls in the order of the forward.
        outside: bytes of activations that are saved outside of all units, usually by the loss. No mode changes them.
        largest_outside: the largest tensor that is saved outside of units; None if all such tensors are small.
        whole: the names of tables that are read as a whole, not only by rows.
    """

    costs: tuple[Cost, ...]
    activation_bytes: int
    calls: tuple[Call, ...]
    outside: int
    largest_outside: Saved | None
    whole: frozenset[str] = frozenset()

    def saved(self, modes: Mode | Modes) -> int:
        """Returns the peak bytes of activations on the device. ``modes`` is one mode for all units, or the mode of each unit."""
        if isinstance(modes, str):
            modes = dict.fromkeys((call.unit for call in self.calls), modes)
        return peak_bytes(self.calls, modes) + self.outside

    def offloaded(self, modes: Mode | Modes) -> int:
        """Returns the bytes of activations in host memory."""
        if isinstance(modes, str):
            modes = dict.fromkeys((call.unit for call in self.calls), modes)
        return offloaded_bytes(self.calls, modes)

    def alive(self, modes: Mode | Modes) -> int:
        """Returns :attr:`activation_bytes` with other modes. In the dry run, all activations are kept."""
        return self.activation_bytes - self.saved("keep") + self.saved(modes)

    def visits(self, *, flops: float, memory: float) -> list[Visit]:
        """Returns the layer calls with their times.

        The time of a call is the longer one of its FLOPs and its ``read`` bytes, plus that of its ``moved`` bytes.

        Args:
            flops: the device's FLOP/s.
            memory: bytes/s of the device's memory.
        """
        return [
            Visit(
                cost.layers,
                max(cost.flops / flops, cost.share * cost.read / memory) + cost.moved / memory,
                cost.backward,
                tuple(cost.needs),
                share=cost.share,
                continues=cost.continues,
            )
            for cost in self.costs
        ]


def estimate(found: Found, run: Callable[[], Tensor | None]) -> Work:
    """Runs a batch and counts its computation and activations.

    Args:
        found: the layers of a module that was made in :func:`~sp_lightning.tools.planner.fake.fake_tensors`. Call this
            function in the same context.
        run: runs one forward. It returns the loss, whose backward runs next, or None.

    Raises:
        Exception: any error of the module. A module that reads values cannot be run without values.
    """
    trial = _Trial(found)
    saves = _Saves(trial.stays, trial.copies)
    repeats = _Repeats(trial, saves, found)
    with ExitStack() as stack:
        stack.enter_context(repeats.replaced())
        for module, visits in found.visits.items():
            if visits:
                stack.callback(module.register_forward_pre_hook(partial(trial.enter, visits)).remove)
                stack.callback(module.register_forward_hook(partial(trial.leave, visits)).remove)
        for parameter in found.places:
            if parameter.requires_grad:
                stack.callback(parameter.register_post_accumulate_grad_hook(_drop_gradient).remove)
        # Autocast caches no casts, as in a run: Lightning's precision plugins disable its cache.
        stack.callback(torch.set_autocast_cache_enabled, torch.is_autocast_cache_enabled())
        torch.set_autocast_cache_enabled(False)
        stack.enter_context(_Fused())
        stack.enter_context(trial)
        with saves.counted(found.units):
            loss = run()
        if loss is not None:
            trial.now = trial.begin((), backward=True)
            # _Fused must stay active in backward, in which checkpoints compute forwards again. torch disables a mode while
            # the mode handles a call. So this is not loss.backward(), which _Fused would handle.
            torch.autograd.backward(get_gradient_edge(loss), torch.ones_like(loss))
    repeats.copy_backwards()
    outside = saves.outside()
    large = (saved for saved in outside if not is_small(saved.nbytes))
    largest = max(large, key=lambda saved: saved.nbytes, default=None)
    left = sum(saved.nbytes for saved in outside)
    return Work(trial.costs(), trial.peak, tuple(saves.calls), left, largest, frozenset(trial.whole))


class _Saves:
    """Counts the activations of each unit call in a forward, as the engine does.

    Args:
        stays: returns True for tensors that are on the device anyway, and do not count.
        copies: the storages of autocast's copies of weights that stay on the device. They stay there as well, as small storages
            do.
    """

    def __init__(self, stays: Callable[[Tensor], bool], copies: Mapping[int, StorageWeakRef]) -> None:
        self._stays = stays
        self._copied = copies
        self.calls: list[Call] = []
        self.now: int | None = None  # the index of the running call
        self._above: list[int | None] = []  # the indices of the calls around the running call
        # The keys are storage_id. A weak reference to a storage prevents that another storage gets the same number.
        self._seen: dict[int, StorageWeakRef] = {}  # storages saved in units
        self._given: dict[int, StorageWeakRef] = {}  # storages of the arguments of units
        self._between: dict[int, StorageWeakRef] = {}  # storages saved outside of units
        self._outside: dict[int, Saved] = {}  # tensors saved outside of units

    @contextmanager
    def counted(self, units: Mapping[str, nn.Module]) -> Iterator[None]:
        """Counts the activations of the forward in this context.

        A tensor that is saved inside ``torch.utils.checkpoint`` is not counted: the checkpoint installs its own saved-tensor
        hooks, and autograd calls only the innermost hooks.
        """
        with ExitStack() as stack:
            for name, unit in units.items():
                enter = partial(self._enter, name)
                stack.callback(unit.register_forward_pre_hook(enter, with_kwargs=True).remove)
                stack.callback(unit.register_forward_hook(self._leave, always_call=True).remove)
            stack.enter_context(saved_tensors_hooks(self._pack, lambda tensor: tensor))
            yield

    def has(self, tensor: Tensor) -> bool:
        """Returns True if a tensor's storage is saved in a unit."""
        return tensor.layout is torch.strided and storage_id(tensor.untyped_storage()) in self._seen

    def add(self, tensor: Tensor) -> None:
        """Adds a tensor's storage to those that are saved in units, without its bytes."""
        count_once(tensor, self._seen, small=True)

    def outside(self) -> list[Saved]:
        """Returns the tensors that are saved outside of units, except those whose storage is also saved in a unit."""
        return [saved for key, saved in self._outside.items() if key not in self._seen]

    def _enter(self, unit: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._above.append(self.now)
        if torch.is_grad_enabled():
            arguments = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
            self.now = len(self.calls)
            inputs = sum(count_once(argument, self._given, small=True) for argument in arguments)
            self.calls.append(Call(unit, 0, inputs))

    def _leave(self, *_: Any) -> None:
        self.now = self._above.pop()

    def _pack(self, tensor: Tensor) -> Tensor:
        """Counts a saved tensor, and returns a detached one.

        Not counted: weights, uploaded casts, buffers, and tensors that a run cannot offload, for example conjugate views.
        """
        for _, part in parts("", tensor):  # a packed weight has no memory of its own, but that of its parts
            self._count(part)
        return tensor.detach()  # a graph node that saves its own output would keep itself alive forever

    def _count(self, tensor: Tensor) -> None:
        if tensor.layout is torch.strided and not (tensor.is_conj() or tensor.is_neg() or self._stays(tensor)):
            if self.now is not None:
                nbytes = count_once(tensor, self._seen, small=True)
                call = self.calls[self.now]
                copied = self._copied.get(storage_id(tensor.untyped_storage()))
                stays = is_small(nbytes) or (copied is not None and not copied.expired())
                small = call.small + nbytes * stays
                self.calls[self.now] = replace(call, saved=call.saved + nbytes, small=small)
            elif nbytes := count_once(tensor, self._between, small=True):
                self._outside[storage_id(tensor.untyped_storage())] = Saved(nbytes, tensor.dtype, tensor.shape)


class _Trial(TorchDispatchMode):
    """Adds each operator to the cost of the current layer call (``now``), and counts the bytes of tensors that are alive."""

    def __init__(self, found: Found) -> None:
        super().__init__()
        self.all_costs: list[Cost] = []
        self._above: list[Cost] = []
        # Bytes of the storages that are alive, without weights, uploaded casts and buffers: the peak, and the current number.
        self.peak = self.alive = 0
        self._living: dict[int, Any] = {}  # for each storage that is alive, the finalizer that subtracts its bytes
        self._weights = {
            storage_id(p.untyped_storage()): index
            for index, layer in enumerate(found.layers)
            for _, p in (*layer.parameters, *layer.lowered)
        }
        # Residents are weights, but no backward needs a layer for them.
        self._weights.update({storage_id(p.untyped_storage()): -1 for _, p in found.residents.parameters})
        self._tables = {storage_id(p.untyped_storage()): t.name for t in found.tables for _, p in t.parameters}
        self.whole: set[str] = set()
        # Buffers, and modules that are moved as a whole, are always on the device.
        root = [*found.visits, *(module for _, module in found.aside)]
        staying = [*(b for module in root for b in module.buffers())]
        staying += [p for _, module in found.aside for p in module.parameters()]
        self._addresses = {storage_id(tensor.untyped_storage()) for tensor in staying}
        self._lowered = {storage_id(p.untyped_storage()) for layer in found.layers for _, p in layer.lowered}
        # The casts of the weights in _lowered. They are kept alive, so that no other storage gets the same storage_id.
        self._casts: list[Tensor] = []
        self.copies: dict[int, StorageWeakRef] = {}  # copies in another dtype of weights that stay on the device
        self.now = self.begin((), backward=False)

    def begin(self, layers: tuple[int, ...], *, backward: bool) -> Cost:
        """Adds an empty cost and returns it. The caller assigns the cost to ``now``."""
        self.all_costs.append(Cost(layers, backward))
        return self.all_costs[-1]

    def enter(self, layers: tuple[int, ...], module: nn.Module, args: Any) -> None:
        """Begins a layer call. This is a forward pre-hook of modules that use layers."""
        self._above.append(self.now)
        self.now = self.begin(layers, backward=False)
        self.now.share = row_finder().routed_share(module, args)

    def leave(self, layers: tuple[int, ...], module: nn.Module, args: Any, output: Any) -> None:
        """Ends a layer call. This is a forward hook of modules that use layers.

        A new cost continues the enclosing call. Gradient hooks on the outputs detect when the backward of this call begins.
        """
        above = self._above.pop()
        self.now = self.begin(above.layers, backward=above.backward)
        self.now.continues = not above.backward and bool(above.layers)
        for tensor in tree_leaves(output):
            if isinstance(tensor, Tensor) and tensor.requires_grad and tensor.grad_fn is not None:
                tensor.register_hook(partial(self._touch, layers))

    def _touch(self, layers: tuple[int, ...], gradient: Tensor) -> None:
        """Begins the backward of a layer call. The gradient of a second output of the same call begins nothing."""
        if not (self.now.backward and self.now.layers == layers):
            self.now = self.begin(layers, backward=True)

    def costs(self) -> tuple[Cost, ...]:
        """Returns the costs that have computation or layers, in order."""
        return tuple(cost for cost in self.all_costs if cost.layers or cost.flops or cost.moved)

    def hold(self, nbytes: int) -> None:
        """Counts bytes as alive; negative bytes are freed."""
        self.alive += nbytes
        self.peak = max(self.peak, self.alive)

    def _see(self, tensor: Tensor) -> None:
        """Counts the storage of a tensor as alive until the storage is freed."""
        storage = tensor.untyped_storage()
        key, nbytes = storage_id(storage), storage.nbytes()
        if key not in self._living:
            self.hold(nbytes)
            self._living[key] = weakref.finalize(storage, self._gone, key, nbytes)

    def _gone(self, key: int, nbytes: int) -> None:
        if self._living.pop(key, None) is not None:
            self.alive -= nbytes

    def forget(self, tensor: Tensor) -> None:
        """Counts the storage of a tensor as alive no more. Its bytes are held by :meth:`hold`."""
        storage = tensor.untyped_storage()
        key = storage_id(storage)
        if (counted := self._living.get(key)) is not None:
            counted.detach()
            self.alive -= storage.nbytes()
            self._living[key] = weakref.finalize(storage, self._living.pop, key, None)  # so that _see counts it no more

    def stays(self, tensor: Tensor) -> bool:
        """Returns True if a tensor has the memory of a weight, an uploaded cast, a buffer, or a module that is moved whole."""
        key = storage_id(tensor.untyped_storage())
        return key in self._weights or key in self._addresses

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "prim":  # a short path for reading a tensor's device, the most frequent operator
            return args[0].device if func is torch.ops.prim.device.default else func(*args, **(kwargs or {}))
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # a quantised weight then calls operators on its plain tensors, which are counted
        with no_torch_functions():  # _Fused handles only calls of the model
            return self._count(func, args, kwargs or {})

    def _count(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Runs an operator, counts it in ``now``, and returns its result."""
        if func is torch.ops.aten.embedding.default and args[1].is_floating_point():
            # torch 2.10 and 2.11 raise an error about such indices only for real tensors.
            raise RuntimeError("embedding was given indices that are not integers.")
        result = func(*args, **kwargs)
        outputs, inputs = _tensors(result), _tensors((*args, *kwargs.values()))
        keys = [storage_id(leaf.untyped_storage()) for leaf in inputs]
        copies = func.overloadpacket is to_copy_operator
        casts = copies and keys[0] in self._lowered
        if copies and self._weights.get(keys[0]) == -1 and outputs[0].dtype is not inputs[0].dtype:
            self.copies[storage_id(outputs[0].untyped_storage())] = StorageWeakRef(outputs[0].untyped_storage())
        for tensor in outputs:
            if casts:
                self._casts.append(tensor)  # a run uploads the cast to its layer's slot: no additional memory
                self._weights[storage_id(tensor.untyped_storage())] = self._weights[keys[0]]
            elif not self.stays(tensor):
                self._see(tensor)
        if func.is_view or func.overloadpacket is torch.ops.aten.detach:
            return result  # views compute nothing
        if func is not torch.ops.aten.embedding.default:  # which reads only rows of a table
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


@dataclass
class _Block:
    """A block that was run, with the facts that equal blocks repeat.

    Attributes:
        module: the block.
        begin, end: the part of the costs that its forward has added.
        call: the index of its unit call; None in inference.
        results: its output, with a :class:`_Result` in place of each tensor.
        before: the bytes that were alive before its forward.
        grown: the bytes by which the next block found more; None until then.
    """

    module: nn.Module
    begin: int
    end: int
    call: int | None
    results: Any
    before: int
    grown: int | None = None

    @property
    def tensors(self) -> list[_Result]:
        """The tensors in its output."""
        return [each for each in tree_leaves(self.results) if isinstance(each, _Result)]


@dataclass(frozen=True)
class _Result:
    """The properties of a tensor that a block returns. ``saved`` is True if its storage is one of the saved activations."""

    shape: torch.Size
    dtype: torch.dtype
    requires_grad: bool
    saved: bool


class _Repeats:
    """Runs only some of equal blocks: the first two and the last one, which has the peak of memory. The others repeat the second.

    Blocks are equal if their modules have the same classes, numbers and weights' shapes, and if their arguments have the same
    shapes. A repeated block returns new tensors of the right shapes; its costs, activations and memory are copied.
    """

    def __init__(self, trial: _Trial, saves: _Saves, found: Found) -> None:
        self._trial, self._saves, self._found = trial, saves, found
        self._kinds = {unit: _kind(module) for unit, module in found.units.items() if found.visits.get(module)}
        self._last = {kind: unit for unit, kind in self._kinds.items()}  # by kind, the last unit
        self._ran: dict[Any, list[_Block]] = {}
        self._open: _Block | None = None  # the block whose growth is not known yet
        self._backward: list[tuple[Cost, _Block, nn.Module]] = []

    @contextmanager
    def replaced(self) -> Iterator[None]:
        """In this context, equal blocks run once. Their modules have a forward that may repeat another one."""
        counts = Counter(self._kinds.values())
        with ExitStack() as stack:
            for unit, module in self._found.units.items():
                if counts[self._kinds.get(unit, ())] > _RUN and "forward" not in vars(module):
                    module.forward = wraps(module.forward)(partial(self._forward, unit, module, module.forward))
                    stack.callback(delattr, module, "forward")
            yield

    def _forward(self, unit: str, module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if current_graph_task() != -1:
            return forward(*args, **kwargs)  # a checkpoint computes again
        trial, leaves = self._trial, tree_leaves((args, kwargs))
        if self._open is not None and self._open.grown is None:
            self._open.grown = trial.alive - self._open.before
        described = [*map(_described, leaves)]
        key = (self._kinds[unit], torch.is_grad_enabled(), *kwargs, *described)
        ran = self._ran.setdefault(key, [])
        given = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]
        if None in described or len(ran) < _RUN or self._last[self._kinds[unit]] == unit:
            before, begin = trial.alive, len(trial.all_costs) - 1
            output = forward(*args, **kwargs)
            results = tree_map_only(Tensor, self._result, output)
            self._open = _Block(module, begin, len(trial.all_costs), self._saves.now, results, before)
            known = all(isinstance(each, (_Result, bool, int, float, str, type(None))) for each in tree_leaves(results))
            trains = any(isinstance(each, _Result) and each.requires_grad for each in tree_leaves(results))
            if known and None not in described and (given or not trains):
                ran.append(self._open)
            return output
        return self._repeat(ran[1], module, given)

    def _repeat(self, block: _Block, module: nn.Module, given: list[Tensor]) -> Any:
        """Returns new tensors as the results of a block, and copies the costs and calls of an equal one."""
        trial, saves = self._trial, self._saves
        first, *others = self._copies(trial.all_costs[block.begin : block.end], block, module)
        if saves.now is not None and block.call is not None:
            saves.calls[saves.now] = replace(saves.calls[block.call], unit=saves.calls[saves.now].unit)
        with self.uncounted():
            made = _Repetition.apply(self, block, module, *given)
        for tensor, result in zip(made, block.tensors, strict=True):
            if result.saved:  # the copied call and memory count it, and the next block may save it, too
                saves.add(tensor)
                trial.forget(tensor)
        output = iter(made)
        vars(trial.now).update(vars(first))
        trial.all_costs += others
        trial.hold(block.grown or 0)
        return tree_map_only(_Result, lambda _: next(output), block.results)

    def _result(self, tensor: Tensor) -> _Result:
        return _Result(tensor.shape, tensor.dtype, tensor.requires_grad, self._saves.has(tensor))

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """In this context, operators have no costs."""
        now, self._trial.now = self._trial.now, Cost((), backward=False)
        yield
        self._trial.now = now

    def begin_backward(self, block: _Block, module: nn.Module) -> None:
        """Called when the backward of a repeated block begins."""
        self._trial.hold(-(block.grown or 0))
        self._backward.append((self._trial.now, block, module))

    def copy_backwards(self) -> None:
        """Replaces the cost of each repeated block's backward by copies of the costs of the equal block."""
        costs = self._trial.all_costs
        copies: dict[int, list[Cost]] = {}
        for cost, block, module in self._backward:
            own = {layer for each in block.module.modules() for layer in self._found.visits.get(each, ())}
            begun = (
                at for at, each in enumerate(costs) if each.backward and each.layers and own.issuperset(each.layers)
            )
            begin = end = next(begun, 0)
            while begin and end < len(costs) and costs[end].layers and own.issuperset(costs[end].layers):
                end += 1
            copies[id(cost)] = self._copies(costs[begin:end], block, module)
        costs[:] = [copy for cost in costs for copy in copies.get(id(cost), [cost])]

    def _copies(self, costs: Iterable[Cost], block: _Block, module: nn.Module) -> list[Cost]:
        """Returns costs of a block with the layers of an equal one."""
        visits = self._found.visits
        pairs = zip(block.module.modules(), module.modules(), strict=True)
        layers = {a: b for one, other in pairs for a, b in zip(visits.get(one, ()), visits.get(other, ()), strict=True)}
        return [
            replace(
                cost,
                layers=tuple(layers.get(each, each) for each in cost.layers),
                needs={layers.get(each, each): None for each in cost.needs},
            )
            for cost in costs
        ]


class _Repetition(torch.autograd.Function):
    """The graph node of a repeated block."""

    @staticmethod
    def forward(ctx: Any, repeats: _Repeats, block: _Block, module: nn.Module, *given: Tensor) -> tuple[Tensor, ...]:
        """Returns a tensor for each result of the block."""
        ctx.repeats, ctx.block, ctx.module = repeats, block, module
        ctx.given = [(each.shape, each.dtype) for each in given]
        made = [torch.empty(each.shape, dtype=each.dtype, device="cpu") for each in block.tensors]
        ctx.mark_non_differentiable(*(m for m, each in zip(made, block.tensors, strict=True) if not each.requires_grad))
        return tuple(made)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        """Returns a tensor for the gradient of each given tensor."""
        ctx.repeats.begin_backward(ctx.block, ctx.module)
        with ctx.repeats.uncounted():
            return (None, None, None, *(torch.empty(shape, dtype=dtype, device="cpu") for shape, dtype in ctx.given))


def _kind(module: nn.Module) -> tuple[Any, ...]:
    """Returns the properties of a block on which its costs depend: equal blocks have equal ones, except their numbers."""
    return tuple(
        (
            name, type(each),
            *((key, value) for key, value in vars(each).items() if type(value) in _NUMBERS and not _POSITION.search(key)),
            *((key, p.shape, p.dtype, p.requires_grad, type(p)) for key, p in each._parameters.items() if p is not None),
            *((key, b.shape, b.dtype) for key, b in each._buffers.items() if b is not None),
        )
        for name, each in module.named_modules()
    )  # fmt: skip


def _described(leaf: Any) -> Any:
    """Returns the properties of a block's argument on which its costs depend; None if they are not known."""
    if isinstance(leaf, Tensor):
        # Costs may depend on the values of indices, which equal blocks get in the same tensor.
        values = 0 if leaf.is_floating_point() else storage_id(leaf.untyped_storage())
        return leaf.shape, leaf.dtype, leaf.requires_grad, values
    return (leaf,) if leaf is None or type(leaf) in _NUMBERS or isinstance(leaf, torch.dtype) else None


_RUN = 2
"""The number of equal blocks that run, besides the last one."""
_NUMBERS = (bool, int, float, str)
_POSITION = re.compile("idx|index|layer_id|layer_number|block_id")
"""The names of attributes with a block's position."""


def _tensors(found: Any) -> list[Tensor]:
    """Returns the tensors in the arguments or results of an operator, including tensors in lists."""
    if isinstance(found, (tuple, list)):
        return [tensor for each in found for tensor in _tensors(each)]
    return [found] if isinstance(found, Tensor) else []


class _Fused(TorchFunctionMode):
    """Removes the dropout of attention, so that attention is counted as a fused kernel, as on a GPU.

    The counted operators are those of the CPU, which has no fused attention with dropout.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is nn.functional.scaled_dot_product_attention:
            if len(args) > 4:  # dropout_p is the fifth argument
                args = (*args[:4], 0.0, *args[5:])
            else:
                kwargs = {**kwargs, "dropout_p": 0.0}
        return func(*args, **kwargs)


def _drop_gradient(parameter: Tensor) -> None:
    """Frees the gradient of a weight at once, because a run offloads it."""
    parameter.grad = None


# ---------------------------------------------------------------------- floating-point operations


def _grouped_flops(a: Tensor, b: Tensor, *args: Any, **kwargs: Any) -> int:
    """Returns the FLOPs of a grouped product.

    With two stacks of matrices, each expert has its own product. Otherwise experts split the rows of ``a``, the columns of ``b``,
    or the summed dimension.
    """
    experts_share_nothing = a.ndim == 3 and b.ndim == 3
    return 2 * a.numel() * b.shape[-1] if a.ndim == 2 or experts_share_nothing else 2 * a[0].numel() * b.shape[-1]


def _convolution_backward_flops(
    gradient: Tensor, x: Tensor, weight: Tensor, _bias: Any, _stride: Any, _padding: Any, _dilation: Any, transposed: bool,
    _output_padding: Any, _groups: int, mask: Any, **kwargs: Any,
) -> int:  # fmt: skip
    """Returns the FLOPs of the forward, once for each needed gradient (of input and weight). torch's formula ignores groups."""
    multiplications = weight[0].numel() * (x if transposed else gradient).numel()
    return 2 * multiplications * sum(bool(wanted) for wanted in mask[:2])


def _attention_flops(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> int:
    """Returns the FLOPs of the CPU's attention operator, for which torch 2.10 and 2.11 have no formula.

    Several heads of queries may share a head of keys, so the heads of the query are counted.
    """
    return 2 * query[..., 0].numel() * key.shape[-2] * (query.shape[-1] + value.shape[-1])


def _attention_backward_flops(
    _gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
) -> int:
    """Returns the FLOPs of the scores, which are recomputed, and of the gradients of query, key, value and scores."""
    return 2 * query[..., 0].numel() * key.shape[-2] * (3 * query.shape[-1] + 2 * value.shape[-1])


_FLOPS: dict[Any, Callable[..., int]] = {
    grouped_mm_operator: _grouped_flops,
    torch.ops.aten.convolution_backward: _convolution_backward_flops,
    cpu_attention_operator: _attention_flops,
    cpu_attention_backward_operator: _attention_backward_flops,
}
"""By operator, the function that computes its FLOPs. torch's own formulas of these operators are missing or wrong."""
