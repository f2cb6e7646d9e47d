"""What the engine does around every optimizer's step in this process, by torch's hooks on optimizers."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from sp_lightning.trainer.run import Run
from sp_lightning.weights.device_parameter import DeviceParameter


class StepHooks:
    """Tells the engine of a run when an optimizer is about to write weights, and when it has written them.

    User code runs between the beginning of a step and the optimizer's own code: in hooks of the optimizer, and in the closure,
    from which Lightning calls ``on_before_optimizer_step``, too. What it writes, or may have written, on the device is taken
    back before the optimizer writes the host's weights. Later it would overwrite the update.

    Args:
        run: the run.
        deferring: says whether an optimizer's step only submits updates. It prepares the engine itself then, before each.
    """

    def __init__(self, run: Run, deferring: Callable[[Optimizer], bool]) -> None:
        self._run = run
        self._deferring = deferring
        self._begun = 0.0  # when the running step began, or went on after its closure
        self._in_closure: Optimizer | None = None  # whose closure runs, called by torch's step
        self._last: dict[Optimizer, RemovableHandle] = {}
        self._handles = [register_optimizer_step_pre_hook(self._before), register_optimizer_step_post_hook(self._after)]

    def close(self) -> None:
        """Removes the hooks."""
        for handle in (*self._handles, *self._last.values()):
            handle.remove()

    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        """Runs before all other hooks. Returns what the step is called with."""
        self._prepare(optimizer)
        if self._run.streamer is None:
            return None
        self._drop_last(optimizer)
        self._last[optimizer] = optimizer.register_step_pre_hook(self._prepare)  # after those of the user
        args = (optimizer, *(self._followed(optimizer, each) for each in args[1:]))
        return args, {name: self._followed(optimizer, each) for name, each in kwargs.items()}

    def _prepare(self, optimizer: Optimizer, *_: Any) -> None:
        if self._run.streamer is not None:
            deferred = self._deferring(optimizer)
            if not deferred:  # else it was made before the step, and a look at its state would wait for updates
                hold_hosts(optimizer)
            parameters = (p for group in optimizer.param_groups for p in group["params"])
            self._run.streamer.updating.before(deferred=deferred, parameters=parameters)
        self._begun = perf_counter()

    def _followed(self, optimizer: Optimizer, argument: Any) -> Any:
        """A closure after which the engine prepares for the step anew; any other argument as it is."""
        if not callable(argument):
            return argument

        def closure(*args: Any, **kwargs: Any) -> Any:
            if self._run.streamer is not None:
                self._run.streamer.updating.resume()
            outer, self._in_closure = self._in_closure, optimizer
            try:
                result = argument(*args, **kwargs)
            finally:
                self._in_closure = outer
            self._prepare(optimizer)
            return result

        return closure

    def closed(self, optimizer: Optimizer) -> None:
        """Prepares for a step anew, because the user's closure has returned, and Lightning's hooks after it come next."""
        if optimizer is self._in_closure:
            self._prepare(optimizer)

    def _drop_last(self, optimizer: Optimizer) -> None:
        if (handle := self._last.pop(optimizer, None)) is not None:
            handle.remove()

    def _after(self, optimizer: Optimizer, *_: Any) -> None:
        """Runs after a step, before all other hooks."""
        self._drop_last(optimizer)
        streamer, now = self._run.streamer, perf_counter()
        if streamer is not None:
            if not streamer.device.computes_on_host:
                streamer.updating.step_seconds += now - self._begun
            self._begun = now  # an optimizer may have stepped inside another one's step
            streamer.invalidate()


def hold_hosts(optimizer: Any) -> None:
    """Puts the host's parameters into groups and the state's keys where the device's are, because it was made within a step."""
    for group in optimizer.param_groups:
        if any(map(_is_device_s, group["params"])):
            group["params"] = [p.host if _is_device_s(p) else p for p in group["params"]]
    state = optimizer.state
    if any(map(_is_device_s, state)):
        items = list(state.items())
        state.clear()
        state.update((key.host if _is_device_s(key) else key, value) for key, value in items)


def _is_device_s(key: Any) -> bool:
    return issubclass(type(key), DeviceParameter)
