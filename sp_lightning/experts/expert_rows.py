"""Stacked experts of which only those travel that something is routed to.

A stack is one parameter for all experts of a module; an expert is a row of it. The layer's slot is as large as the whole
layer, and of it only rows are filled: each expert lies where it always lies, so that kernels find it under its number and
choose as they always do. What lies in the other rows must not be read. Therefore the stacks' device parameters stay
stand-ins even while the layer is on the device. An operation in a routed call goes on if it is known to read routed rows
alone; any other operation, wherever it happens, brings the whole layer first.
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

from sp_lightning.device.device import Device, Stream, Wait
from sp_lightning.device.layout import part
from sp_lightning.experts.expert_cache import ExpertCache
from sp_lightning.experts.stacks import NEARLY_ALL, StackReading, how_it_reads
from sp_lightning.layers.device_parameter import DeviceParameter, Untouched, hides_stand_ins
from sp_lightning.layers.layer import NOTHING, AllRows, Rows, Slot, StreamedLayer
from sp_lightning.observe.messages import say_once
from sp_lightning.plan.plan import Plan
from sp_lightning.torch_compat.modes import no_dispatch_modes, no_inference_mode
from sp_lightning.torch_compat.private import (
    forward_pre_hooks,
    global_forward_pre_hooks,
    gradient_hooks,
    transforms_active,
)

# The experts of the last call come ahead of time if that share of them was asked for again.
_STEADY = 3 / 4
# The weight of the latest call in that share.
_LATEST = 1 / 4
# With so many indices for each expert nearly all experts are among them. The host does not wait for these indices.
_MANY = 16
_ALONG_ROWS = (torch.select, Tensor.select, torch.index_select, Tensor.index_select)
_HOOKED = "a forward pre-hook, on it or on all modules, may exchange the indices; put the hook on the block"
_BY_GROUPS = frozenset({"transpose", "grouped_mm", "grouped_mm_fallback"})


class _Call(NamedTuple):
    """A call of a module of stacked experts.

    Attributes:
        rows: the experts that something is routed to.
        trusted: whether the call is known to read these rows alone, whatever views of a stack it makes.
    """

    rows: Rows = None
    trusted: bool = False


class ExpertRows(AllRows):
    """Which rows of a layer are asked for, which are in its slot, and which get a gradient.

    Args:
        layer: the layer, whose stacks hold ``layer.planned.rows`` experts.
        device: copies them.
        log: the logger that is told why all experts of the layer come.

    Attributes:
        needed: the rows that the present use of the layer may read.
        present: the rows that are in the slot that the layer is in, or was in last.
        comes_whole: why all experts come whatever is routed; empty while that is not so.
    """

    watches_calls = True

    def __init__(self, layer: StreamedLayer, device: Device, cache: ExpertCache, log: logging.Logger) -> None:
        self.layer = layer
        self._device = device
        self._cache = cache
        self.cache: ExpertCache | None = None
        self.count = layer.planned.rows
        self.stacks = frozenset(layer.planned.stacks)
        layer.parameters.compute = self.compute
        layer.parameters.notice_uses_of(self.stacks)
        self.needed: Rows = NOTHING
        self.present: Rows = NOTHING
        self.comes_whole = ""
        self._sent: list[int] = []  # the rows of the last fetch that the cache is to have
        self._log = log
        self._calls: dict[int, list[_Call]] = {}  # by thread, those that are running
        self._last: Rows = NOTHING  # of the latest call
        self._training = False
        self._this_step = False  # whether the latest call was in the running step
        self._steadiness = 0.0
        self._read_whole = False  # whether graphs may have been built of anything but routed rows
        self._gradient_rows: dict[int, set[int] | None] = {}  # by index of the parameter, in the running backward

    def allocate(self, plan: Plan) -> int:
        """Allocates the cache, unless another layer has done so, and uses it if the plan has memory for it."""
        nbytes = self._cache.allocate(plan.cache_bytes)
        self.cache = self._cache if self._cache.has_room else None
        return nbytes

    def free(self) -> None:
        """Frees the cache."""
        self._cache.free()
        self.cache = None

    # ------------------------------------------------------------------ calls

    def begin_step(self, *, training: bool) -> None:
        """A step begins."""
        self._training = training
        self._this_step = False
        self._calls.clear()

    def begin_call(self, module: nn.Module, args: Sequence[Any], kwargs: dict[str, Any] | None) -> None:
        """A call of the module begins in this thread, with these arguments."""
        trusted, rows = False, None
        reading = None if self.comes_whole or hides_stand_ins((args, kwargs)) else self._reading(module)
        if reading is not None:
            trusted, rows = reading is StackReading.ROUTED_ROWS, self._read_indices([*args, *(kwargs or {}).values()])
        few = rows is not None and len(rows) < NEARLY_ALL * self.count
        call = _Call(rows, trusted) if few else _Call()
        self._calls.setdefault(threading.get_ident(), []).append(call)
        last, self._last = self._last, call.rows
        if last and rows is not None and not (self._training and self._this_step):  # a recompute routes as before
            self._steadiness += _LATEST * (len(last & rows) / len(last) - self._steadiness)
        self._this_step = True
        self.need(call.rows)

    def _reading(self, module: nn.Module) -> StackReading | None:
        """What is known of how the call reads stacks; None if it reads all of them, or that is not known."""
        if transforms_active():
            return None
        if is_parametrized(module):
            self._say("a parametrization computes with all of them (PEFT's adapters on stacks, target_parameters)")
            return None
        reading = how_it_reads(module)
        hooked = bool(forward_pre_hooks(module) or global_forward_pre_hooks)
        if reading is not StackReading.UNKNOWN and not hooked:
            return reading
        self.fall_back(_HOOKED if hooked else "nobody knows how its forward reads them")
        return None

    def _read_indices(self, arguments: Sequence[Any]) -> Rows:
        """The experts that the call is given the indices of; None if that is not clear, or if there are many indices."""
        tensors = [each for each in arguments if isinstance(each, Tensor) and each.dtype in (torch.int32, torch.int64)]
        if len(tensors) != 1 or tensors[0].numel() >= _MANY * self.count:
            return None
        self.host_waits += 1
        with no_dispatch_modes(), no_inference_mode():
            rows = frozenset(tensors[0].detach().to("cpu", torch.int64).unique().tolist())
        outside = [row for row in sorted(rows) if not 0 <= row < self.count]
        if outside:
            self.fall_back(f"it is given the index {outside[0]}, which is not one of its {self.count} experts")
            return None
        return rows

    def end_call(self) -> None:
        """The latest call in this thread has returned or raised."""
        if calls := self._calls.get(threading.get_ident()):
            calls.pop()

    def _call(self) -> _Call | None:
        calls = self._calls.get(threading.get_ident())
        return calls[-1] if calls else None

    # ------------------------------------------------------------------ rows come

    def need(self, rows: Rows) -> None:
        """The use of the layer that begins, or goes on, may read these rows."""
        self.needed = None if rows is None or self.needed is None else self.needed | rows

    @property
    def complete(self) -> bool:  # type: ignore[override]
        """Whether the rows that are needed are in the layer's slot."""
        return self.present is None or (self.needed is not None and self.needed <= self.present)

    @property
    def ahead(self) -> Rows:  # type: ignore[override]
        """The rows worth a fetch before a call asks for them: in backward, those of forward; otherwise, if calls are alike."""
        certain = self._last is None or (self._training and self._this_step)
        return self._last if certain or self._steadiness >= _STEADY else NOTHING

    def send(self, slot: Slot, source: Tensor) -> int | None:
        """Copies the rows to a slot that are needed, or worth a fetch if none is; those that the cache has from there."""
        fresh = slot.layer is not self.layer or slot.stale
        wanted = self.ahead if self.needed == NOTHING else self.needed
        if slot.stale and slot.layer is self.layer:  # views of rows that are there follow the weight
            wanted = None if wanted is None or self.present is None else wanted | self.present
        before = NOTHING if fresh else self.present
        self.present = None if wanted is None or before is None else before | wanted
        if before is None:
            return 0
        cached = NOTHING if self.cache is None else self.cache.rows(self.layer)
        if wanted is None and not before and not cached:
            self._sent = []
            self.sent_bytes += self.layer.planned.nbytes
            return None
        missing = set(range(self.count) if wanted is None else wanted) - before
        self._sent = sorted(missing - cached)
        pieces = self._pieces(beside_stacks=fresh)
        self._device.copy([slot.memory[each] for each in pieces], [source[each] for each in pieces], Stream.UPLOAD)
        if self.cache is not None and missing & cached:
            # What was fetched there before may have been overwritten unused, so that compute has not waited for it.
            self._device.wait(Stream.COMPUTE, slot.filled, Wait.BRING_AFTER_FETCH)
            self.cache.bring(self.layer, missing & cached, slot.memory)
            if not (slot.lent or slot.escaped):  # otherwise the last kernel is still to come
                slot.idle = self._device.record(Stream.COMPUTE)
        nbytes = sum(piece.stop - piece.start for piece in pieces)
        self.sent_bytes += nbytes
        return nbytes

    def _pieces(self, *, beside_stacks: bool) -> list[slice]:
        """The bytes of the layer's memory that are sent: of stacks the rows, in runs, and what is no stack if it is to be."""
        pieces = []
        runs = _runs(self._sent)
        for index, span in enumerate(self.layer.planned.spans):
            if index in self.stacks:
                row = span.nbytes // self.count
                pieces += [slice(span.offset + first * row, span.offset + last * row) for first, last in runs]
            elif beside_stacks:
                pieces.append(slice(span.offset, span.offset + span.nbytes))
        return pieces

    def arrived(self, slot: Tensor) -> None:
        """Has the cache keep the rows that were sent to a slot, once compute has waited for them."""
        sent, self._sent = self._sent, []
        if self.cache is not None and sent:
            self.cache.keep(self.layer, sent, slot)

    def lost(self) -> None:
        """None of the rows can be relied on."""
        self.present = NOTHING

    def drop_cached(self) -> None:
        """The host's experts were or may have been written."""
        if self.cache is not None:
            self.cache.drop(self.layer)

    def end_use(self) -> None:
        """The next use says anew what it needs."""
        self.needed = NOTHING

    def begin_use(self) -> None:
        """Counts the rows of the use that begins, and those of them that are on the device."""
        slot = self.layer.slot
        present = NOTHING if slot is None else self.present
        if self.cache is not None:
            if self.needed is not None:
                self.cache.use(self.layer, self.needed)
            present = None if present is None else present | self.cache.rows(self.layer)
        wanted = frozenset(range(self.count)) if self.needed is None else self.needed
        found = wanted if present is None else wanted & present
        self.hits += len(found)
        self.misses += len(wanted) - len(found)

    # ------------------------------------------------------------------ rows are read

    def compute(self, weight: Any, func: Callable[..., Any], types: Any, args: Sequence[Any], kwargs: Any) -> Any:
        """Computes with a stack in a call that may do so."""
        call = self._call()
        foreign = any(kind not in (Tensor, nn.Parameter) and not issubclass(kind, DeviceParameter) for kind in types)
        if call is None or foreign or not self._may_compute(call, func, args, kwargs):
            return NotImplemented
        with Untouched():
            output = func(*args, **kwargs)
        if torch.is_grad_enabled() and weight.host.requires_grad:
            if isinstance(output, Tensor) and output.requires_grad:
                output.register_hook(partial(self._note_gradient, weight._index, call.rows))
            else:
                self._read_whole = True
        return output

    def may_compute_with_wrapped(self, use: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
        """Whether a wrapped stack may be used now (see ``StandInForWrapped.whole``): all that is read of it is in the slot."""
        call = self._call()
        # Of the tensors inside, their class may read what it likes, except where rows are taken by their numbers.
        return call is not None and self._may_compute(_Call(call.rows), use, args, kwargs)

    def _may_compute(self, call: _Call, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
        group = self.layer.parameters
        if group.shared or not group.attached:
            return False
        if self.present is None or self._reads_rows(call, func, args, kwargs):
            return True
        self.fall_back(f"it computes with all of them ({getattr(func, '__name__', func)})")
        return False

    def _reads_rows(self, call: _Call, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
        """Whether a function reads no rows of a stack but those of a call, all of which are there."""
        if call.rows is None or self.present is None or not call.rows <= self.present:
            return False
        if call.trusted and (func is Tensor.__getitem__ or getattr(func, "__name__", "").lstrip("_") in _BY_GROUPS):
            return True
        if func is Tensor.__getitem__:
            return _numbers(args[1], self.count) <= call.rows
        along_rows = func in _ALONG_ROWS and len(args) == 3 and not kwargs and args[1] == 0
        return along_rows and _numbers(args[2], self.count) <= call.rows

    def fall_back(self, why: str) -> None:
        """From now on all experts of the layer come with each call."""
        if not self.comes_whole:
            self.comes_whole = why
            self._say(why)

    def _say(self, why: str) -> None:
        layers = re.sub(r"\d+", "*", self.layer.name)  # one line for all layers of which the same holds
        say_once(self._log, f"Superpipeline: all experts of {layers!r} come with each call, because {why}.")

    def saved_rows(self, index: int | None, view: Tensor | None = None, offset: int = 0) -> Rows:
        """The rows in which a saved view lies; if it is of several, those that its call reads."""
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

    # ------------------------------------------------------------------ rows go back

    def completed(self, index: int, value: Tensor, slots: Collection[int]) -> Tensor:
        """A weight's value on the device, with the host's rows where the slot has none."""
        if self.present is None or index not in self.stacks or value.untyped_storage().data_ptr() not in slots:
            return value
        span, rows = replace(self.layer.planned.spans[index], offset=0), sorted(self.present)
        with no_inference_mode():
            whole = part(self.layer.block.present(index).clone(), span)
            whole[rows] = value[rows].to("cpu")
        return whole

    def read_whole(self) -> None:
        """Anything but a routed call has computed with the weights, and its graph may reach any row."""
        self._read_whole = True

    def _note_gradient(self, index: int, rows: Rows, gradient: Tensor) -> None:
        noted = self._gradient_rows.get(index, NOTHING)
        self._gradient_rows[index] = None if rows is None or noted is None else {*noted, *rows}

    def gradient_rows(self, index: int) -> Rows:
        """The rows that calls in this backward were given; None if anything else has a part in the gradient."""
        rows = self._gradient_rows.pop(index, None)
        if self._read_whole or rows is None or gradient_hooks(self.layer.block.parameters[index]):
            return None
        return frozenset(rows) if len(rows) < NEARLY_ALL * self.count else None


def _numbers(index: Any, count: int) -> frozenset[int]:
    """The rows that an index takes; an impossible one if that cannot be told."""
    if type(index) is int:
        return frozenset({index + count * (index < 0)})
    if type(index) is Tensor and index.dtype in (torch.int32, torch.int64):
        return frozenset(number + count * (number < 0) for number in index.reshape(-1).tolist())
    return frozenset({-1})


def _runs(numbers: Sequence[int]) -> list[tuple[int, int]]:
    """Ascending numbers as runs: the first number of each, and the one behind its last."""
    runs: list[tuple[int, int]] = []
    for number in numbers:
        if runs and runs[-1][1] == number:
            runs[-1] = runs[-1][0], number + 1
        else:
            runs.append((number, number + 1))
    return runs
