"""What a forward finds and what it changes, so that it can be run again as if for the first time."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.attention import sdpa_kernel

from sp_lightning.activations.containers import copy_container, restore_container
from sp_lightning.activations.snapshot import SMALL, Snapshot
from sp_lightning.activations.tensor_copy import TensorCopy, clone, write
from sp_lightning.activations.weight_state import WeightState, host_of
from sp_lightning.device.torch_private import TORCHSCRIPT, preserve_version_counter, top_saved_tensors_hooks

Elsewhere = Callable[[str], Callable[[], str | None]]
"""Takes a unit's name. What it returns says what was done to weights outside of the unit since; None if nothing was."""

# The value of an attribute that is not there: None would be one, and would hide a weight of that name.
_ABSENT = object()
_NOTHING: AbstractContextManager[None] = nullcontext()  # it may be entered again and again


class Unrepeatable(RuntimeError):
    """A forward that cannot be run a second time as if it were the first."""


class ForwardState:
    """What a forward finds when this object is made, and what it changes until :meth:`forward_ended`.

    Args:
        unit: the module's name.
        module: it and the modules inside it are looked at.
        given: the forward's arguments. Objects among them that are no tensors are looked at, and what they hold.
        volatile: by unit, the buffers whose values change; :meth:`restored` adds what it has learned.
        elsewhere: says what was done to weights outside of the unit.
    """

    def __init__(
        self,
        unit: str,
        module: nn.Module,
        given: Sequence[Any],
        volatile: dict[str, set[str]],
        elsewhere: Elsewhere,
    ) -> None:
        self._unit = unit
        self._elsewhere = elsewhere
        self._volatile = volatile
        self._before = Snapshot(module, given)
        self._unchanged: list[tuple[str, Tensor, int]] = []  # tensors that the forward has not changed
        self._learned: set[str] = set()  # names of tensors that were seen to be volatile
        self._scripted: str | None = None  # what has saved for backward in TorchScript

    def calls(self, unit: str, module: nn.Module) -> None:
        """Looks, from now on, at another unit that the forward is about to call: its state is put back, too."""
        self._before.add(unit, module)

    def saves_in_torchscript(self, name: str) -> None:
        """Is told that TorchScript has saved something for backward in the forward.

        Args:
            name: the function's or method's.
        """
        self._scripted = name

    @property
    def context(self) -> contextvars.Context:
        """The context variables before the forward."""
        return self._before.context

    def forward_ended(self) -> None:
        """Forgets the values of what the forward has not changed.

        Raises:
            Unrepeatable: it has written what cannot be put back, or has saved something in TorchScript.
        """
        if self._scripted is not None:
            # Its first call is profiled and runs operator by operator. A later one runs an optimized graph, which saves other
            # tensors, in another order: gradients were wrong where their shapes were the same. torch's own checkpoint has
            # this defect, and the exception that ends its second run early cannot pass through TorchScript's interpreter.
            raise Unrepeatable(
                self._refusal(
                    f"calls {self._scripted!r} in TorchScript, which saves other tensors for backward once it is optimized"
                )
            )
        for weight in self._before.weights:
            if weight.is_written:
                raise Unrepeatable(self._refusal(f"writes its parameter {weight.name!r}"))
            if weight.has_other_gradient:
                raise Unrepeatable(
                    self._refusal(f"runs a backward that gives its parameter {weight.name!r} a gradient")
                )
        for tensor, version in self._before.inputs:
            if tensor._version != version:
                raise Unrepeatable(self._refusal(f"writes a tensor of shape {tuple(tensor.shape)} that it is given"))
        self._before.inputs.clear()  # a weight among them would keep its layer on the device
        for name, copied in list(self._before.tensors.items()):
            self._forget_unchanged(name, copied)

    def _forget_unchanged(self, name: str, copied: TensorCopy) -> None:
        """Forgets a tensor's value if the forward has not changed it, and nothing else is known to change it."""
        volatile = self._volatile.get(self._unit)
        if copied.stays or copied.counted:
            return
        if not (copied.trusted and volatile is not None) and not copied.same_bits:
            self._learned.add(name)  # it was written through .data, or in NumPy, where no version shows it
        elif volatile is None and copied.trusted and copied.tensor.nbytes <= SMALL:
            pass  # the first backward has to show what is written between forward and backward
        elif volatile is None or name not in volatile:
            del self._before.tensors[name]
            self._unchanged.append((name, copied.tensor, copied.version))

    def drop_values(self) -> None:
        """Forgets all but what :meth:`check` needs. There is no second run."""
        before = self._before
        for values in (before.containers, before.tensors, before.random, before.foreign, before.inputs):
            values.clear()

    def check(self) -> None:
        """Checks that what was written since can be put back.

        Raises:
            Unrepeatable: it cannot.
        """
        for weight in self._before.weights:
            if weight.is_written:
                raise Unrepeatable(self._written_since(weight.name, "Parameter"))
        for name, place, key, held in self._before.held:
            if host_of(place.get(key)) is not held:
                raise Unrepeatable(self._written_since(name, "What is called", "exchanged"))
        volatile = self._volatile.get(self._unit, ())
        for name, tensor, version in self._unchanged:
            # A tensor that has become volatile since was not kept.
            if tensor._version != version or name in volatile:
                raise Unrepeatable(self._written_since(name, "Buffer or attribute"))

    @contextmanager
    def restored(self) -> Iterator[None]:
        """While this is active, everything is as it was before the forward. Afterwards it is as it is now.

        Raises:
            Unrepeatable: something was written since that cannot be put back, or the second run has written a weight
                outside of the unit once more, or has given it another gradient.
        """
        self.check()
        before = self._before
        counted = (name for name, copied in before.tensors.items() if copied.counted)
        self._volatile.setdefault(self._unit, set()).update(self._learned, counted)
        now = _values_now(before)
        kernels = sdpa_kernel(before.kernels) if before.kernels else nullcontext()
        with preserve_version_counter(tuple(copied.tensor for copied in before.tensors.values())), kernels:
            done = self._elsewhere(self._unit)
            try:
                _values_before(before).put()
                yield
            finally:  # torch stops the second run by an exception once it has computed what backward needs
                now.put()
                self.refuse(done())

    def refuse(self, done: str | None) -> None:
        """Refuses a forward for what it has done to weights outside of the unit.

        Raises:
            Unrepeatable: it has done anything.
        """
        if done is not None:
            raise Unrepeatable(self._refusal(done))

    # ------------------------------------------------------------------ what is said

    def _refusal(self, what: str) -> str:
        return (
            f'The forward of {self._unit!r} {what}, and cannot be run again (activations="recompute"). {self._remedy()}'
        )

    def _written_since(self, name: str, what: str, how: str = "modified by an inplace operation") -> str:
        return (
            f"{what} {name!r} of {self._unit!r} has been {how} between forward and backward, which was to "
            f'compute the forward again (activations="recompute"). {self._remedy()}'
        )

    def _remedy(self) -> str:
        return (
            "Keep or offload what it saves: "
            f'SuperpipelineStrategy(activations={{"{self._unit}": "offload", "**": "recompute"}}).'
        )


class _FirstRuns(threading.local):
    """The forwards of a thread that run for the first time, of which a second one may come."""

    def __init__(self) -> None:
        self._running: list[ForwardState] = []

    @contextmanager
    def of(self, state: ForwardState) -> Iterator[None]:
        """While this is active, a forward runs for the first time."""
        _watch_torchscript()
        self._running.append(state)
        try:
            yield
        finally:
            self._running.remove(state)

    def call(self, unit: str, module: nn.Module) -> None:
        """A unit is about to be called; if it is inside the modules of such a forward, that has seen it already."""
        for state in self._running:
            state.calls(unit, module)

    def in_torchscript(self, function: Any) -> AbstractContextManager[Any]:
        """Around a call of TorchScript: the forwards are told whether it saves anything for backward."""
        hooks = top_saved_tensors_hooks() if self._running else None
        if hooks is None:
            return _NOTHING
        pack, unpack = hooks

        def noted(tensor: Tensor) -> Any:
            for state in self._running:
                state.saves_in_torchscript(function.name)
            return pack(tensor)

        return saved_tensors_hooks(noted, unpack)


first_runs = _FirstRuns()


@cache
def _watch_torchscript() -> None:
    """Has each call of TorchScript tell the forwards what it saves, from now on. torch has no hooks around such calls."""

    def watched(call: Callable[..., Any]) -> Callable[..., Any]:
        def run(function: Any, *args: Any, **kwargs: Any) -> Any:
            with first_runs.in_torchscript(function):
                return call(function, *args, **kwargs)

        return run

    for kind in TORCHSCRIPT:
        kind.__call__ = watched(kind.__call__)


class _Values(NamedTuple):
    """Values, each with what it is put into."""

    tensors: list[tuple[Tensor, Tensor]]
    random: list[tuple[Callable[[Any], Any], Any]]
    containers: list[tuple[Any, Any]]
    foreign: list[tuple[dict[str, Any], str, Any]]
    weights: list[tuple[WeightState, bool]]
    training: list[tuple[nn.Module, bool]]
    dtype: torch.dtype

    def put(self) -> None:
        """Puts the values where they belong."""
        for tensor, value in self.tensors:
            write(tensor, value)
        for set_state, state in self.random:
            set_state(state)
        for container, copied in self.containers:
            restore_container(container, copied)
        for place, key, held in self.foreign:
            if held is _ABSENT:
                place.pop(key, None)
            else:
                place[key] = held
        for weight, trained in self.weights:
            weight.train(trained)
        for module, training in self.training:
            module.training = training
        torch.set_default_dtype(self.dtype)


def _values_before(before: Snapshot) -> _Values:
    return _Values(
        [(copied.tensor, copied.before) for copied in before.tensors.values()],
        [(source.write, source.state) for source in before.random],
        list(before.containers.values()),
        before.foreign,
        [(weight, weight.trained) for weight in before.weights],
        before.training,
        before.dtype,
    )


def _values_now(before: Snapshot) -> _Values:
    """The values, as they are now, of all that was looked at."""
    return _Values(
        [(copied.tensor, clone(copied.tensor)) for copied in before.tensors.values()],
        [(source.write, source.read()) for source in before.random],
        [(container, copy_container(container)) for container, _ in before.containers.values()],
        [(place, key, place.get(key, _ABSENT)) for place, key, _ in before.foreign],
        [(weight, weight.is_trained) for weight in before.weights],
        [(module, module.training) for module, _ in before.training],
        torch.get_default_dtype(),
    )
