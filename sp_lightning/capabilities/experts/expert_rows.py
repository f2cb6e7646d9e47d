"""Uploads of stacked experts: only the experts that tokens are routed to.

A stack is one parameter for all experts of a module, and an expert is a row of it. The layer's slot has the size of the whole
layer, but only the uploaded rows are valid. Each expert has its usual offset, so kernels find it by its index.

The other rows must not be read. Therefore the device parameters of stacks stay stand-ins even while the layer is on the device.
An operation in a routed call runs if it only reads the routed rows. Any other operation uploads the whole layer first.
"""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from sp_lightning.capabilities.experts.packed_stacks import PackedStack
from sp_lightning.capabilities.experts.stacks import NEARLY_ALL, StackReading, how_it_reads, with_adapters
from sp_lightning.core.device.device import Device, Stream
from sp_lightning.core.device.layout import part
from sp_lightning.core.messages import say_once
from sp_lightning.core.torch_compat.modes import no_dispatch_modes, no_inference_mode
from sp_lightning.core.torch_compat.private import (
    forward_hooks,
    forward_pre_hooks,
    global_forward_hooks,
    global_forward_pre_hooks,
    gradient_hooks,
    transforms_active,
)
from sp_lightning.core.weights.device_parameter import DeviceParameter, Untouched, hides_stand_ins
from sp_lightning.core.weights.layer import NOTHING, AllRows, Rows, Slot, StreamedLayer

# The experts of the last call are prefetched if, on average over recent calls, at least this share was used again.
_STEADY = 3 / 4
# The weight of the latest call in this average.
_LATEST = 1 / 4
# With this many indices per expert, nearly all experts are used. So the host does not wait for the indices.
_MANY = 16
_ALONG_ROWS = (torch.select, Tensor.select, torch.index_select, Tensor.index_select)
_HOOKED = "a forward pre-hook, on it or on all modules, may replace the indices; put the hook on the block"
_ADAPTED = "baddbmm"  # how PEFT adds an adapter to a stack: expert by expert
_BY_GROUPS = frozenset({"transpose", "grouped_mm", "grouped_mm_fallback", _ADAPTED})


class _Call(NamedTuple):
    """A call of a module of stacked experts.

    Attributes:
        rows: the experts that tokens are routed to.
        trusted: True if the call is known to read only these rows, also through views of a stack.
    """

    rows: Rows = None
    trusted: bool = False


class ExpertRows(AllRows):
    """The rows of a layer of stacked experts: which are needed, which are in its slot, and which get a gradient.

    Args:
        layer: the layer. Its stacks hold ``layer.planned.rows`` experts.
        device: copies rows.
        log: the logger for the reason why all experts of the layer are uploaded.

    Attributes:
        needed: the rows that the present use of the layer may read.
        present: the valid rows in the layer's slot, or in its last slot.
        comes_whole: why every call uploads all experts; empty if only routed experts are uploaded.
    """

    watches_calls = True

    def __init__(self, layer: StreamedLayer, device: Device, log: logging.Logger) -> None:
        self.layer = layer
        self._device = device
        self.count = layer.planned.rows
        self.stacks = frozenset(layer.planned.stacks)
        layer.parameters.compute = self.compute
        layer.parameters.notice_uses_of(self.stacks)
        self.needed: Rows = NOTHING
        self.present: Rows = NOTHING
        self.comes_whole = ""
        self._log = log
        self._calls: dict[int, list[_Call]] = {}  # running calls by thread
        self._last: Rows = NOTHING  # the rows of the latest call
        self._training = False
        self._this_step = False  # whether the latest call was in the running step
        self._steadiness = 0.0
        # Whether autograd graphs may use other rows than routed ones. Stays True, because such a graph may be kept.
        self._read_whole = False
        self._gradient_rows: dict[int, set[int] | None] = {}  # by the parameter's index, in the running backward

    # ------------------------------------------------------------------ calls

    def begin_step(self, *, training: bool) -> None:
        """Called when a step begins. Forgets the calls of the last step, except the experts of the latest one."""
        self._training = training
        self._this_step = False
        self._calls.clear()

    def begin_call(self, module: nn.Module, args: Sequence[Any], kwargs: dict[str, Any] | None) -> None:
        """Reads which experts a call is routed to.

        Records the call as the latest of its thread, and adds its rows to :attr:`needed`. All rows are added if the call may read
        other rows, or if it is routed to nearly all experts.
        """
        rows = None
        reading = None if self.comes_whole or hides_stand_ins((args, kwargs)) else self._reading(module)
        if reading is not None:
            rows = self._read_indices([*args, *(kwargs or {}).values()])
        few = rows is not None and len(rows) < NEARLY_ALL * self.count
        call = _Call(rows, trusted=reading is StackReading.ROUTED_ROWS) if few else _Call()
        self._calls.setdefault(threading.get_ident(), []).append(call)
        last = self._last
        self._last = call.rows
        if (
            last and rows is not None and not (self._training and self._this_step)
        ):  # in training, a later call in the same step is a recomputed one, which is routed as before
            self._steadiness += _LATEST * (len(last & rows) / len(last) - self._steadiness)
        self._this_step = True
        self.need(call.rows)

    def _reading(self, module: nn.Module) -> StackReading | None:
        """Returns how a call reads stacks; None if the call may read all experts.

        If a hook or an unknown forward is the reason, the layer falls back (:meth:`fall_back`).
        """
        if transforms_active():
            return None
        *around, experts = with_adapters(module)
        if is_parametrized(experts):
            self._say("a parametrization reads all of them")
            return None
        reading = how_it_reads(experts)
        why = "" if reading is not StackReading.UNKNOWN else "it is not known how its forward reads them"
        if global_forward_pre_hooks or any(forward_pre_hooks(each) for each in (*around, experts)):
            why = _HOOKED
        # Hooks inside PEFT's outermost module find the adapted stack, which is a plain tensor, and may read all of it.
        if around and (global_forward_hooks or any(forward_hooks(each) for each in (*around[1:], experts))):
            why = "a forward hook, on it or on all modules, may read all of them; put the hook on the block"
        if why:
            self.fall_back(why)
            return None
        return reading

    def _read_indices(self, arguments: Sequence[Any]) -> Rows:
        """Returns the experts whose indices a call takes; None if all experts have to be uploaded.

        That is the case if the arguments have not exactly one tensor of integers, if it has :data:`_MANY` indices per expert, or
        if an index is out of range. In the last case the layer falls back. The host waits for the indices.
        """
        tensors = [each for each in arguments if isinstance(each, Tensor) and each.dtype in (torch.int32, torch.int64)]
        if len(tensors) != 1 or tensors[0].numel() >= _MANY * self.count:
            return None
        self._device.stats.host_waits += 1
        with no_dispatch_modes(), no_inference_mode():
            rows = frozenset(tensors[0].detach().to("cpu", torch.int64).unique().tolist())
        outside = [row for row in sorted(rows) if not 0 <= row < self.count]
        if outside:
            self.fall_back(f"it is given the index {outside[0]}, which is not one of its {self.count} experts")
            return None
        return rows

    def end_call(self) -> None:
        """Ends the latest call in this thread."""
        if calls := self._calls.get(threading.get_ident()):
            calls.pop()

    def _call(self) -> _Call | None:
        calls = self._calls.get(threading.get_ident())
        return calls[-1] if calls else None

    # ------------------------------------------------------------------ uploads

    def need(self, rows: Rows) -> None:
        """Adds rows that the present or next use of the layer may read. None adds all rows."""
        self.needed = None if rows is None or self.needed is None else self.needed | rows

    @property
    def complete(self) -> bool:  # type: ignore[override]
        """True if the needed rows are in the layer's slot."""
        return self.present is None or (self.needed is not None and self.needed <= self.present)

    @property
    def ahead(self) -> Rows:  # type: ignore[override]
        """The rows to prefetch: those of the last call, or no rows.

        They are prefetched in three cases: for the backward after a forward in training; if the last call needed all rows; and if
        recent calls needed nearly the same rows.
        """
        certain = self._last is None or (self._training and self._this_step)
        return self._last if certain or self._steadiness >= _STEADY else NOTHING

    def send(self, slot: Slot, source: Tensor) -> int | None:
        """Copies the needed rows to a slot; if no rows are needed, the rows to prefetch.

        Rows that are in the slot already are not copied. Returns the bytes copied from the host; None if the caller has to upload
        the whole layer.
        """
        fresh = slot.layer is not self.layer or slot.stale
        wanted = self.ahead if self.needed == NOTHING else self.needed
        if slot.stale and slot.layer is self.layer:  # views of valid rows must get the new values
            wanted = None if wanted is None or self.present is None else wanted | self.present
        before = NOTHING if fresh else self.present
        self.present = None if wanted is None or before is None else before | wanted
        if before is None:
            return 0
        if wanted is None and not before:
            self._device.stats.expert_bytes += self.layer.planned.nbytes
            return None
        missing = sorted(set(range(self.count) if wanted is None else wanted) - before)
        pieces = self._pieces(missing, beside_stacks=fresh)
        self._device.copy([slot.memory[each] for each in pieces], [source[each] for each in pieces], Stream.UPLOAD)
        nbytes = sum(piece.stop - piece.start for piece in pieces)
        self._device.stats.expert_bytes += nbytes
        return nbytes

    def _pieces(self, rows: Sequence[int], *, beside_stacks: bool) -> list[slice]:
        """Returns the ranges of bytes to upload: these rows of each stack, and if ``beside_stacks`` all other parameters."""
        pieces = []
        runs = _runs(rows)
        for index, span in enumerate(self.layer.planned.spans):
            if index in self.stacks:
                row = span.nbytes // self.count
                pieces += [slice(span.offset + first * row, span.offset + last * row) for first, last in runs]
            elif beside_stacks:
                pieces.append(slice(span.offset, span.offset + span.nbytes))
        return pieces

    def lost(self) -> None:
        """Marks all rows as invalid."""
        self.present = NOTHING

    def end_use(self) -> None:
        """Forgets which rows are needed."""
        self.needed = NOTHING

    def begin_use(self) -> None:
        """Counts the needed rows that are on the device, and the needed rows that are not."""
        present = NOTHING if self.layer.slot is None else self.present
        wanted = frozenset(range(self.count)) if self.needed is None else self.needed
        found = wanted if present is None else wanted & present
        self._device.stats.expert_hits += len(found)
        self._device.stats.expert_misses += len(wanted) - len(found)

    # ------------------------------------------------------------------ operations

    def compute(self, weight: Any, func: Callable[..., Any], types: Any, args: Sequence[Any], kwargs: Any) -> Any:
        """Runs an operation with a stack if the operation only reads rows of its call; otherwise returns NotImplemented.

        If the operation runs, records that only these rows get a gradient from it.
        """
        call = self._call()
        # A function of another tensor subclass may read any row.
        foreign = any(kind not in (Tensor, nn.Parameter) and not issubclass(kind, DeviceParameter) for kind in types)
        if call is None or foreign or not self._may_compute(call, func, args, kwargs):
            return NotImplemented
        with Untouched():
            output = func(*args, **kwargs)
        self.computed(func, output)
        if torch.is_grad_enabled() and weight.host.requires_grad:
            if isinstance(output, Tensor) and output.requires_grad:
                output.register_hook(partial(self._note_gradient, weight._index, call.rows))
            else:  # without one result that requires a gradient, the rows of the gradient cannot be recorded
                self._read_whole = True
        return output

    def may_compute_with_wrapped(self, use: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
        """Returns True if a wrapped stack may be used now, because all rows that the operation reads are in the slot."""
        call = self._call()
        if call is None:
            return False
        # A wrapped stack that is not a PackedStack may read any row of its plain tensors. So only operations that take rows by
        # their indices are allowed with it.
        trusted = call.trusted and any(isinstance(each, PackedStack) for each in args)
        return self._may_compute(_Call(call.rows, trusted=trusted), use, args, kwargs)

    def computed(self, func: Callable[..., Any], output: Any) -> None:
        """Sets the experts to zero that no token is routed to, if the function has added an adapter to a stack.

        These experts were computed from arbitrary values, because they need not be in the slot. The call does not read them, but
        autograd saves the whole result.
        """
        call = self._call()
        if call is None or not call.trusted or getattr(func, "__name__", "") != _ADAPTED:
            return
        assert call.rows is not None
        with torch.no_grad():
            for first, last in _runs([row for row in range(self.count) if row not in call.rows]):
                output.detach()[first:last].zero_()

    def _may_compute(self, call: _Call, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
        """Returns True if a function may run with the rows in the slot. If it may read other rows, the layer falls back."""
        if not self.layer.state.attached:
            return False
        if self.present is None or self._reads_rows(call, func, args, kwargs):
            return True
        name = getattr(func, "__name__", func)
        adapted = (
            "; with adapters on stacks (PEFT's target_parameters), only batched_mm and grouped_mm leave experts out"
        )
        self.fall_back(f"an operation reads all of them ({name}){adapted if name == _ADAPTED else ''}")
        return False

    def _reads_rows(self, call: _Call, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
        """Returns True if a function only reads rows of the call, and these are in the slot. Called if the slot lacks rows.

        A trusted call reads these rows by ``stack[…]``, or computes with them by a grouped product or a batched one. Any other
        function must name its rows by indices.
        """
        if call.rows is None or self.present is None or not call.rows <= self.present:
            return False
        # Some of these functions have names with an underscore in torch (torch._grouped_mm).
        if call.trusted and (func is Tensor.__getitem__ or getattr(func, "__name__", "").lstrip("_") in _BY_GROUPS):
            return True
        if func is Tensor.__getitem__:
            return _numbers(args[1], self.count) <= call.rows
        along_rows = func in _ALONG_ROWS and len(args) == 3 and not kwargs and args[1] == 0
        return along_rows and _numbers(args[2], self.count) <= call.rows

    def fall_back(self, why: str) -> None:
        """Uploads all experts with each call from now on."""
        if not self.comes_whole:
            self.comes_whole = why
            self._say(why)

    def _say(self, why: str) -> None:
        layers = re.sub(r"\d+", "*", self.layer.name)  # one line for all layers of this kind
        say_once(self._log, f"Superpipeline: all experts of {layers!r} are uploaded for each call, because {why}.")

    def saved_rows(self, index: int | None, view: Tensor | None = None, offset: int = 0) -> Rows:
        """Returns the rows of a saved tensor.

        Args:
            index: the parameter in which the tensor begins. If it is not a stack, there are no rows. None returns all rows.
            view: the saved tensor, a view of the slot. If it has several rows of the stack, the rows that a trusted call reads
                are returned, or else the valid rows. None for any tensor of the running call.
            offset: bytes from the beginning of the slot.
        """
        if view is None:
            call = self._call()
            return call.rows if call is not None and call.trusted else None
        if index is None or index not in self.stacks:
            return NOTHING if index is not None else None
        call, span = self._call(), self.layer.planned.spans[index]
        row = span.nbytes // self.count
        extent = sum((n - 1) * s for n, s in zip(view.shape, view.stride(), strict=True)) * view.element_size()
        first, last = (offset - span.offset) // row, (offset - span.offset + extent) // row
        if first == last:
            return frozenset({first})
        return call.rows if call is not None and call.trusted else self.present

    # ------------------------------------------------------------------ values and gradients for the host

    def completed(self, index: int, value: Tensor, slots: Collection[int]) -> Tensor:
        """Returns a weight's value on the device. Rows that are not in the slot are taken from the host."""
        if self.present is None or index not in self.stacks or value.untyped_storage().data_ptr() not in slots:
            return value
        span, rows = replace(self.layer.planned.spans[index], offset=0), sorted(self.present)
        with no_inference_mode():
            whole = part(self.layer.block.weight_bytes(index).clone(), span)
            whole[rows] = value[rows].to("cpu")
        return whole

    def read_whole(self) -> None:
        """Records that an operation outside routed calls has used the weights, so any row may get a gradient."""
        self._read_whole = True

    def _note_gradient(self, index: int, rows: Rows, gradient: Tensor) -> None:
        """Records the rows of a gradient. A hook on the result of an operation: called in backward."""
        noted = self._gradient_rows.get(index, NOTHING)
        self._gradient_rows[index] = None if rows is None or noted is None else {*noted, *rows}

    def gradient_rows(self, index: int) -> Rows:
        """Returns the rows of a gradient that may be nonzero, and forgets them; None for all rows.

        All rows are returned if other operations than those of routed calls may have contributed, if a hook on the weight may
        change the gradient, and if nearly all rows are used.
        """
        rows = self._gradient_rows.pop(index, None)
        if self._read_whole or rows is None or gradient_hooks(self.layer.block.parameters[index]):
            return None
        return frozenset(rows) if len(rows) < NEARLY_ALL * self.count else None


def _numbers(index: Any, count: int) -> frozenset[int]:
    """Returns the rows that an index selects; -1, which is not a row, if they are unknown."""
    # The exact class: True and False are ints for isinstance, but do not select a row.
    if type(index) is int:
        return frozenset({index + count * (index < 0)})
    if type(index) is Tensor and index.dtype in (torch.int32, torch.int64):
        return frozenset(number + count * (number < 0) for number in index.reshape(-1).tolist())
    return frozenset({-1})


def _runs(numbers: Sequence[int]) -> list[tuple[int, int]]:
    """Groups ascending numbers into runs ``(first, last + 1)``."""
    runs: list[tuple[int, int]] = []
    for number in numbers:
        if runs and runs[-1][1] == number:
            runs[-1] = runs[-1][0], number + 1
        else:
            runs.append((number, number + 1))
    return runs
