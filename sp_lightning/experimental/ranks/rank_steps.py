"""Optimizer steps of several ranks: only the primary's optimizers step and have state. Other ranks wait for their steps."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch.optim import Optimizer

from sp_lightning.core.engine.streamer import Streamer
from sp_lightning.core.torch_compat.patched import in_place_of, own_step
from sp_lightning.core.updates.scaler import Found, HostGradScaler
from sp_lightning.experimental.ranks.turns import RankTurns
from sp_lightning.trainer.group import WholeSteps
from sp_lightning.trainer.update_facts import CLIPPING
from sp_lightning.trainer.user_hooks import calls_closure_first

Closure = Callable[[], Any]


class RankSteps(WholeSteps):
    """Runs each optimizer step, unscaling and clipping once for all ranks.

    The method ``step`` is replaced on the optimizer, so schedulers, hooks and Lightning see the same object. On the primary the
    step writes the weights that all ranks share. On other ranks the step only runs the hooks, and the closure as often as the
    primary does. The optimizers of other ranks have no state.

    Args:
        engine: returns the engine whose weights are stepped. The engine may be built again during a run.
    """

    def __init__(self, engine: Callable[[], Streamer]) -> None:
        self._engine = engine
        self._own: dict[Optimizer, Any] = {}  # the attribute ``step`` of an optimizer object before it was replaced
        self._attached = ExitStack()

    @property
    def _turns(self) -> RankTurns:
        turns = self._engine().turns
        assert isinstance(turns, RankTurns)
        return turns

    def attach(self, optimizers: list[Optimizer], scaler: Any) -> None:
        """Replaces the steps of these optimizers and the unscaling of a gradient scaler. On other ranks, drops optimizer state.

        Args:
            optimizers: the optimizers whose steps are not split by layers.
            scaler: the gradient scaler; None without one.

        Raises:
            ValueError: an optimizer has no attribute ``state`` of its own, which could be replaced.
        """
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
        """Restores the optimizers' own steps. On other ranks the optimizers get empty states, which can be read again."""
        self._attached.close()
        for optimizer in self._own:
            if isinstance(optimizer.state, _StateOnOtherRank):
                optimizer.state = defaultdict(dict)
        self._own.clear()

    # ------------------------------------------------------------------ steps

    def _lead_step(
        self, step: Callable[..., Any], optimizer: Any, closure: Closure | None = None, **kwargs: Any
    ) -> Any:
        """Runs a step on the primary, in turns. Whenever the step calls its closure, the other ranks call their closures.

        Before a closure runs, the turn ends, so that all ranks have the present weights.

        Args:
            step: the optimizer's own step.
            optimizer: the optimizer.
            closure: the closure of this rank.
            kwargs: further arguments of the step.
        """
        optimizer._opt_called = True  # otherwise schedulers warn that they were stepped before the optimizer
        turns = self._turns
        results: list[Any] = []
        with ExitStack() as turn:
            # If the step calls its closure first, the turn begins after the closure. Until then a rank's writes are private, so
            # that forward and backward of a rank use the same weights.
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
        """Waits for a step of the primary, and calls this rank's closure whenever the primary calls its own.

        If the primary's step returns the result of its nth closure call, returns the result of this rank's nth call.
        """
        optimizer._opt_called = True  # as in `_lead_step`
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
        """Returns True if the turn begins before the closure is called, because the step may write weights before that.

        In this case, checks that all ranks have written the same weights (collective): all closures then use rank 0's weights.

        Raises:
            RuntimeError: the turn begins first, and ranks have written different weights.
        """
        if calls_closure_first(optimizer, self._own.get(optimizer)):
            return False
        self._turns.must_be_alike(
            f"{type(optimizer).__name__}.step may write weights before it calls its closure: all ranks then use rank 0's"
        )
        return True

    def _refuse_others(self, optimizer: Any) -> None:
        """Checks that the optimizer has not stepped parameters that the module does not have.

        Ranks do not share such parameters, so only the primary has stepped them.

        Raises:
            RuntimeError: a parameter that the module does not have has a gradient.
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
        """True if this rank's optimizers step."""
        return self._turns.ranks.primary

    def clipping(
        self, methods: dict[str, Callable[..., None]], plugin: Any, *, in_updates: bool
    ) -> dict[str, Callable[..., None]]:
        """Returns methods that clip the gradients of all ranks once, on the primary, by name.

        If updates clip in the background, the methods of other ranks do nothing. Otherwise the other ranks wait for the primary.
        """
        if in_updates:
            return methods if self.primary else dict.fromkeys(methods, lambda *_, **__: None)
        return {name: self._on_primary_alone(methods.get(name, getattr(plugin, name))) for name in CLIPPING}

    def _on_primary_alone(self, action: Callable[..., Any]) -> Callable[..., Any]:
        # If an optimizer steps inside the closure of another optimizer, the method is wrapped already.
        within = getattr(action, "func", None) == self.once
        return action if within else partial(self.once, action)

    def once(self, action: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Runs an action on the primary alone, on the gradients of all ranks. The other ranks wait for it, and return None."""
        return self._on_primary(partial(action, *args, **kwargs), lambda result: 0.0)[0]

    def _unscale(self, action: Callable[[], Found]) -> Found:
        """Divides the gradients of all ranks by the scale.

        Args:
            action: divides this rank's gradients, and returns by device a tensor that is not 0 if a gradient is not finite.

        Returns:
            The result of ``action`` on the primary. On other ranks, the largest of these values; empty if there is none.
        """
        nothing = -1.0
        found, largest = self._on_primary(
            action, lambda found: max((float(each) for each in found.values()), default=nothing)
        )
        if found is None:
            found = {} if largest == nothing else {torch.device("cpu"): torch.tensor(largest)}
        return found

    def _on_primary(self, action: Callable[[], Any], value: Callable[[Any], float]) -> tuple[Any, float]:
        """Runs an action on the gradients of all ranks, on the primary. The other ranks wait for the primary.

        Args:
            action: the action.
            value: returns a number for the result of the action. The number is sent to all ranks.

        Returns:
            The result, which is None on other ranks; and on all ranks the number ``value(result)`` of the primary.
        """
        turns = self._turns
        if not turns.ranks.primary:
            return None, turns.follow(_CLIPPING, weights=False)
        with turns.primary(_CLIPPING, weights=False):
            result = action()
        return result, turns.ranks.end_turn(value(result))


_NOTHING, _CLOSURE = -1, -2
"""Numbers with which the primary ends its turn in a step.

``_NOTHING``: the step returns None. ``_CLOSURE``: all ranks run the closure, and another turn follows. A number of at least 0 is
the index of the closure's result that the step returns.
"""

_CLIPPING = "clipping or unscaling of gradients"


def _which(result: Any, results: list[Any]) -> int:
    """Returns the index in ``results`` of the value that a step returns. For a value that is not there, returns the last index.

    Args:
        result: the value that the step returns. For None, returns ``_NOTHING``.
        results: the results of the closure's calls. If the closure was not called, returns ``_NOTHING``.
    """
    if result is None or not results:
        return _NOTHING
    return next((index for index, each in enumerate(results) if each is result), len(results) - 1)


def _with_hooks(step: Callable[..., Any]) -> Any:
    """Returns a step with torch's step hooks around it. The hooks run on all ranks, outside of the primary's turn."""
    hooked = Optimizer.profile_hook_step(step)
    vars(hooked).update(_wrapped_by_lr_sched=True, _with_counter=True)  # so that schedulers do not wrap it
    return hooked


class _StateOnOtherRank(defaultdict[Any, Any]):
    """The state of an optimizer on a rank that is not the primary. It is empty.

    It can be saved, and loading a state replaces it. Reading an entry raises an error.
    """

    def __init__(self) -> None:
        super().__init__(dict)

    def __reduce__(self) -> Any:  # pickled and copied as an ordinary empty state
        return defaultdict, (dict,)

    def _refuse(self, *_: Any) -> Any:
        raise RuntimeError(
            "With several devices, optimizers have state on rank 0 alone; this process has another rank. Read it under "
            "`if trainer.is_global_zero:`. If an optimizer writes weights outside of its step (optimizer.eval()), use "
            "Trainer(devices=1)."
        )

    __getitem__ = __contains__ = get = setdefault = _refuse
