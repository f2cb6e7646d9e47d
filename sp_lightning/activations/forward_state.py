"""What a forward finds and what it changes, so that it can be run again as if for the first time."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from sp_lightning.activations.snapshot import Snapshot, host_of
from sp_lightning.activations.state import put
from sp_lightning.device.torch_private import TORCHSCRIPT, preserve_version_counter, top_saved_tensors_hooks

OutsideWatch = Callable[[str], Callable[[], str | None]]
"""Takes a unit's name. What it returns says what was done to weights outside of the unit since; None if nothing was."""


class Unrepeatable(RuntimeError):
    """A forward that cannot be run a second time as if it were the first."""


class ForwardState:
    """What a forward finds when this object is made, and what it changes until :meth:`forward_ended`.

    Args:
        unit: the module's name.
        module: it and the modules inside it are looked at.
        given: the forward's arguments. Objects among them that are no tensors are looked at, and what they hold.
        volatile: the names of tensors that the unit was seen to write where no version shows it; more are added.
        outside: says what was done to weights outside of the unit.
    """

    def __init__(
        self, unit: str, module: nn.Module, given: Sequence[Any], volatile: set[str], outside: OutsideWatch
    ) -> None:
        self._unit = unit
        self._outside = outside
        self._volatile = volatile
        self._before = Snapshot(module, given)
        self._unchanged: list[tuple[str, Tensor, int]] = []  # tensors that the forward has not changed
        self._scripted: str | None = None  # what has saved for backward in TorchScript

    def calls(self, unit: str, module: nn.Module) -> None:
        """Looks, from now on, at another unit that the forward is about to call: its state is put back, too."""
        self._before.add(unit, module)

    def saves_in_torchscript(self, name: str) -> None:
        """A function of TorchScript has saved something for backward in the forward."""
        self._scripted = name

    @property
    def context(self) -> contextvars.Context:
        """The context variables before the forward."""
        return self._before.context

    def forward_ended(self) -> None:
        """Forgets the values of large tensors that the forward has not changed.

        Raises:
            Unrepeatable: it has written what cannot be put back, or has saved something in TorchScript.
        """
        if self._scripted is not None:
            # Its first call is profiled and runs operator by operator. A later one runs an optimized graph, which saves other
            # tensors, in another order: gradients were wrong where their shapes were the same. torch's own checkpoint has
            # this defect, and the exception that ends its second run early cannot pass through TorchScript's interpreter.
            self.refuse(
                f"calls {self._scripted!r} in TorchScript, which saves other tensors for backward once it is optimized"
            )
        before = self._before
        for weight in before.weights:
            if weight.is_written:
                self.refuse(f"writes its parameter {weight.name!r}")
            if weight.has_other_gradient:
                self.refuse(f"runs a backward that gives its parameter {weight.name!r} a gradient")
        for tensor, version in before.inputs:
            if tensor._version != version:
                self.refuse(f"writes a tensor of shape {tuple(tensor.shape)} that it is given")
        before.inputs.clear()  # a weight among them would keep its layer on the device
        for name, copied in list(before.tensors.items()):
            if copied.kept or copied.counted:
                continue
            if not copied.trusted and not copied.same_bits:
                self._volatile.add(name)  # it was written through .data, or in NumPy
            elif name not in self._volatile:
                del before.tensors[name]
                self._unchanged.append((name, copied.tensor, copied.version))

    def drop_values(self) -> None:
        """Forgets all but what :meth:`check` needs. There is no second run."""
        self._before.states.clear()
        self._before.tensors.clear()

    def check(self) -> None:
        """Checks that what was written since can be put back.

        Raises:
            Unrepeatable: it cannot.
        """
        for weight in self._before.weights:
            if weight.is_written:
                self._refuse_written(weight.name, "Parameter")
        for name, place, key, held in self._before.held:
            if host_of(place.get(key)) is not held:
                self._refuse_written(name, "What is called", "exchanged")
        for name, tensor, version in self._unchanged:
            # Another call of the unit may have written it where no version shows it.
            if tensor._version != version or name in self._volatile:
                self._refuse_written(name, "Buffer or attribute")

    @contextmanager
    def restored(self) -> Iterator[None]:
        """While this is active, everything is as it was before the forward. Afterwards it is as it is now.

        Raises:
            Unrepeatable: something was written since that cannot be put back, or the second run has written a weight
                outside of the unit once more, or has given it another gradient.
        """
        self.check()
        tensors = self._before.tensors.values()
        states = [*(copied.state for copied in tensors), *self._before.states]
        now = [(each, each.read()) for each in states]
        with preserve_version_counter(tuple(copied.tensor for copied in tensors)):
            done = self._outside(self._unit)
            try:
                put((each, each.before) for each in states)
                yield
            finally:  # torch stops the second run by an exception once it has computed what backward needs
                put(now)
                self.refuse(done())

    def refuse(self, done: str | None) -> None:
        """Refuses a forward for what it has done.

        Raises:
            Unrepeatable: it has done anything.
        """
        if done is not None:
            raise Unrepeatable(
                f'The forward of {self._unit!r} {done}, and cannot be run again (activations="recompute"). {self._remedy()}'
            )

    def _refuse_written(self, name: str, what: str, how: str = "modified by an inplace operation") -> None:
        raise Unrepeatable(
            f"{what} {name!r} of {self._unit!r} has been {how} between forward and backward, which was to "
            f'compute the forward again (activations="recompute"). {self._remedy()}'
        )

    def _remedy(self) -> str:
        return (
            "Keep or offload what it saves: "
            f'SuperpipelineStrategy(activations={{"{self._unit}": "offload", "**": "recompute"}}).'
        )


# ---------------------------------------------------------------------- forwards that run for the first time

_of_thread = threading.local()


def first_runs() -> list[ForwardState]:
    """The forwards of this thread that run for the first time, of which a second one may come."""
    if not hasattr(_of_thread, "running"):
        _of_thread.running = []
    running: list[ForwardState] = _of_thread.running
    return running


@contextmanager
def first_run(of: ForwardState) -> Iterator[None]:
    """While this is active, a forward runs for the first time."""
    _watch_torchscript()
    first_runs().append(of)
    try:
        yield
    finally:
        first_runs().remove(of)


@cache
def _watch_torchscript() -> None:
    """From now on, forwards are told which calls of TorchScript save for backward. torch has no hooks around such calls."""
    for kind in TORCHSCRIPT:
        kind.__call__ = _watched(kind.__call__)


def _watched(call: Callable[..., Any]) -> Callable[..., Any]:
    def run(function: Any, *args: Any, **kwargs: Any) -> Any:
        hooks = top_saved_tensors_hooks() if first_runs() else None
        if hooks is None:
            return call(function, *args, **kwargs)
        pack, unpack = hooks

        def noted(tensor: Tensor) -> Any:
            for running in first_runs():
                running.saves_in_torchscript(function.name)
            return pack(tensor)

        with saved_tensors_hooks(noted, unpack):
            return call(function, *args, **kwargs)

    return run
