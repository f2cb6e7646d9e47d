"""Optimizer steps of several ranks: the primary's optimizers step and hold the state; those of other ranks follow them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch.optim import Optimizer

from sp_lightning.engine.streamer import Streamer
from sp_lightning.ranks.turns import RankTurns
from sp_lightning.torch_compat.patched import in_place_of, own_step
from sp_lightning.trainer.group import WholeSteps
from sp_lightning.trainer.update_facts import CLIPPING
from sp_lightning.trainer.user_hooks import calls_closure_first
from sp_lightning.updates.scaler import Found, HostGradScaler

Closure = Callable[[], Any]


class RankSteps(WholeSteps):
    """Runs each optimizer step, unscaling and clipping once for all ranks.

    The method ``step`` is replaced on the optimizer, so schedulers, hooks and Lightning see the same object. On the primary it
    runs with the parameters that all ranks see. On other ranks it only runs the closure, as often as the primary's, and the
    hooks; their optimizers have no state.

    Args:
        engine: returns the engine whose weights are stepped. It may be built anew while the run lasts.
    """

    def __init__(self, engine: Callable[[], Streamer]) -> None:
        self._engine = engine
        self._own: dict[Optimizer, Any] = {}  # the attribute ``step`` that an optimizer object had before
        self._attached = ExitStack()

    @property
    def _turns(self) -> RankTurns:
        turns = self._engine().turns
        assert isinstance(turns, RankTurns)
        return turns

    def attach(self, optimizers: list[Optimizer], scaler: Any) -> None:
        """Replaces the steps of these optimizers, and the unscaling of a gradient scaler (None without one)."""
        self.detach()
        if isinstance(scaler, HostGradScaler):
            self._attached.enter_context(in_place_of(scaler, {"run_on_one_rank": self._unscale}))
        for optimizer in optimizers:
            if "state" not in vars(optimizer):
                raise ValueError(
                    f"{type(optimizer).__name__} gives the state of an optimizer that it wraps, and several devices give it "
                    "one of its own. Return the wrapped optimizer from configure_optimizers, or pass Trainer(devices=1)."
                )
            self._own[optimizer] = vars(optimizer).get("step")
            step = partial(self._lead_step, own_step(optimizer)) if self.primary else self._follow_step
            replaced = {"step": MethodType(_with_hooks(step), optimizer)}
            self._attached.enter_context(in_place_of(optimizer, replaced))
            if not self.primary:
                optimizer.state = _StateOnOtherRank()

    def detach(self) -> None:
        """Puts the optimizers' own steps back."""
        self._attached.close()
        for optimizer in self._own:
            if isinstance(optimizer.state, _StateOnOtherRank):
                optimizer.state = defaultdict(dict)
        self._own.clear()

    # ------------------------------------------------------------------ steps

    def _lead_step(
        self, step: Callable[..., Any], optimizer: Any, closure: Closure | None = None, **kwargs: Any
    ) -> Any:
        """Runs a step on the primary. Whenever it calls its closure, the other ranks call theirs, with the present weights."""
        optimizer._opt_called = True  # for schedulers, which otherwise warn that they come before the optimizer
        turns = self._turns
        results: list[Any] = []
        with ExitStack() as turn:
            # If the step calls its closure first, the turn begins after it. A rank's writes are private until then, so its
            # forward and backward use the same weights.
            begun = closure is None or self._turn_comes_first(optimizer)

            def begin() -> None:
                turn.enter_context(turns.primary(self._step_of(optimizer), weights=True))

            def run_closure() -> Any:
                nonlocal begun
                if begun:
                    turn.pop_all().__exit__(None, None, None)
                    self._engine().invalidate()  # the optimizer may have written weights
                    turns.ranks.end_turn(_CLOSURE)
                begun = True
                results.append(closure() if closure is not None else None)
                begin()
                return results[-1]

            if begun:
                begin()
            result = step(*([] if closure is None else [run_closure]), **kwargs)
        turns.ranks.end_turn(_which(result, results))
        self._refuse_others(optimizer)
        return result

    def _follow_step(self, optimizer: Any, closure: Closure | None = None, **_: Any) -> Any:
        """Follows a step of the primary. If that returns the result of its nth closure call, returns this rank's nth result."""
        optimizer._opt_called = True
        results: list[Any] = []
        if closure is not None and not self._turn_comes_first(optimizer):
            results.append(closure())
        while (which := self._turns.follow(self._step_of(optimizer), weights=True)) == _CLOSURE:
            self._engine().invalidate()
            results.append(closure() if closure is not None else None)
        self._refuse_others(optimizer)
        return results[int(which)] if which != _NOTHING else None

    def _step_of(self, optimizer: Optimizer) -> str:
        return self._engine().updating.step_of(optimizer)

    def _turn_comes_first(self, optimizer: Optimizer) -> bool:
        """Returns True if the turn begins before the closure is called.

        Raises:
            RuntimeError: it does, and ranks have written different weights.
        """
        if calls_closure_first(optimizer, self._own.get(optimizer)):
            return False
        self._turns.must_be_alike(
            f"{type(optimizer).__name__}.step may write weights before it calls its closure: all ranks then use rank 0's"
        )
        return True

    def _refuse_others(self, optimizer: Any) -> None:
        """Raises an error for parameters that the module does not have: only the primary has stepped them.

        Raises:
            RuntimeError: such a parameter has a gradient.
        """
        updating = self._engine().updating
        for number, group in enumerate(optimizer.param_groups):
            for index, parameter in enumerate(group["params"]):
                host = getattr(parameter, "host", parameter)
                if parameter.grad is not None and updating.layer_of(host) is None:
                    raise RuntimeError(
                        f"{type(optimizer).__name__} steps a parameter of shape {tuple(parameter.shape)} (number {index} of its "
                        f"group {number}) that the module does not have: several devices do not sum its gradient. Make it an "
                        "attribute of the module, or pass Trainer(devices=1)."
                    )

    # ------------------------------------------------------------------ clipping

    @property
    def primary(self) -> bool:
        """Whether this rank's optimizers step."""
        return self._turns.ranks.primary

    def clipping(
        self, methods: dict[str, Callable[..., None]], plugin: Any, *, in_updates: bool
    ) -> dict[str, Callable[..., None]]:
        """Returns methods that clip the gradients of all ranks once, on the primary."""
        if in_updates:
            return methods if self.primary else dict.fromkeys(methods, lambda *_, **__: None)
        return {name: self._on_primary_alone(methods.get(name, getattr(plugin, name))) for name in CLIPPING}

    def _on_primary_alone(self, action: Callable[..., Any]) -> Callable[..., Any]:
        within = getattr(action, "func", None) == self.once  # an optimizer steps inside another one's closure
        return action if within else partial(self.once, action)

    def once(self, action: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Runs an action on the gradients of all ranks, on the primary. The other ranks wait for it."""
        return self._on_primary(partial(action, *args, **kwargs), lambda result: 0.0)[0]

    def _unscale(self, action: Callable[[], Found]) -> Found:
        """Divides the gradients of all ranks by the scale. Returns on every rank whether some are not finite."""
        nothing = -1.0
        found, largest = self._on_primary(
            action, lambda found: max((float(each) for each in found.values()), default=nothing)
        )
        if found is None:
            found = {} if largest == nothing else {torch.device("cpu"): torch.tensor(largest)}
        return found

    def _on_primary(self, action: Callable[[], Any], value: Callable[[Any], float]) -> tuple[Any, float]:
        """Runs an action on the gradients of all ranks, on the primary.

        Returns:
            The result, which is None on other ranks; and on all ranks the number ``value(result)``.
        """
        turns = self._turns
        if not turns.ranks.primary:
            return None, turns.follow(_CLIPPING, weights=False)
        with turns.primary(_CLIPPING, weights=False):
            result = action()
        return result, turns.ranks.end_turn(value(result))


_NOTHING, _CLOSURE = -1, -2
"""Numbers with which the primary ends its turn. Others are the index of the closure's result that the step returns.

``_NOTHING``: the step returns None. ``_CLOSURE``: all ranks run the closure, and another turn follows.
"""

_CLIPPING = "clipping or unscaling of gradients"


def _which(result: Any, results: list[Any]) -> int:
    """Returns the index of the closure's result that a step returns; of the last one for any other value."""
    if result is None or not results:
        return _NOTHING
    return next((index for index, each in enumerate(results) if each is result), len(results) - 1)


def _with_hooks(step: Callable[..., Any]) -> Any:
    """Returns a step with torch's hooks around it. They run on all ranks, outside of the primary's turn."""
    hooked = Optimizer.profile_hook_step(step)
    vars(hooked).update(_wrapped_by_lr_sched=True, _with_counter=True)  # so that schedulers do not wrap it
    return hooked


class _StateOnOtherRank(defaultdict[Any, Any]):
    """The state of an optimizer on a rank without state. It can be saved and loaded; reading it raises an error."""

    def __init__(self) -> None:
        super().__init__(dict)

    def __reduce__(self) -> Any:
        return defaultdict, (dict,)

    def _refuse(self, *_: Any) -> Any:
        raise RuntimeError(
            "With several devices, optimizers have state on rank 0 alone; this process has another rank. Read it under "
            "`if trainer.is_global_zero:`. If an optimizer writes weights outside of its step (optimizer.eval()), use "
            "Trainer(devices=1)."
        )

    __getitem__ = __contains__ = get = setdefault = _refuse
