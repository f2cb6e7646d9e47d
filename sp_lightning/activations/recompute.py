"""A forward whose inner results are not kept: backward computes them once more, by torch's own checkpoint.

torch restores its random state and autocast, and leaves the rest to the user. Here the rest is done for the user: a forward
that runs twice leaves the traces of one run, and finds the second time what it found the first time. For the second run,
these are what they were before the first one: the module's buffers and attributes (BatchNorm's statistics, spectral norms,
counters, lists, tensors that ``functional_call`` puts in place of weights), the objects that it is given (a cache of keys
and values), the random states of Python and NumPy, context variables, which weights are trained, and the choice of attention
kernels. After the second run, they are as they were before it. What cannot be put back, as a weight or an argument that the
forward writes, is refused by name: a weight of the module as soon as the first run has written it, another one if the second
run writes it once more.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from weakref import WeakSet

from torch import Tensor
from torch.utils.checkpoint import checkpoint

from sp_lightning.activations.forward_state import ForwardState, OutsideWatch, Unrepeatable, first_run
from sp_lightning.activations.unit_calls import UnitCall
from sp_lightning.device.torch_private import checkpoint_hook, tree_flatten, tree_leaves, tree_unflatten

Rerun = Callable[[str, Any], AbstractContextManager[None]]
"""A context for the second run of a unit's forward, in backward. It takes the unit's name and its positional arguments."""

_our_hooks: WeakSet[Callable[..., Any]] = WeakSet()


class Recompute:
    """Runs units' forwards of which autograd keeps the inputs only; and finds out, in a trial, of which ones it could.

    In a trial forwards run once, as usual. What they write, and what is written between them and the end of backward, is
    looked at.

    Args:
        rerun: a context for the second run of a unit's forward.
        outside: says what was done to weights outside of a unit.
        anchor: a tensor on the device. It tells torch's checkpoint whose random state to restore if no argument does.

    Attributes:
        in_trial: whether forwards are looked at now.
    """

    def __init__(self, rerun: Rerun, outside: OutsideWatch, anchor: Tensor) -> None:
        self._rerun = rerun
        self._outside = outside
        self._anchor = anchor
        # By unit, the tensors that it writes where no version shows it.
        self._volatile: defaultdict[str, set[str]] = defaultdict(set)
        self.in_trial = False
        self._unfit: dict[str, str] = {}
        self._watched: list[tuple[str, ForwardState]] = []

    def run(self, call: UnitCall, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Runs a unit's forward, of which autograd keeps the inputs only.

        The second run is seen by everything outside of the module and its arguments: hooks on inner modules, prints, files
        and global variables.

        Raises:
            Unrepeatable: the forward has written what cannot be put back, or has saved something in TorchScript.
        """
        given: Any = (tuple(args), kwargs)
        leaves, structure = tree_flatten(given, is_leaf=_is_leaf)
        # What is given twice has to be one object in the second run, too: attention asks whether query and key are the same.
        once = {id(leaf): leaf for leaf in leaves}
        position = {identity: number for number, identity in enumerate(once)}
        positions = [position[id(leaf)] for leaf in leaves]
        state: ForwardState | None = None

        def run(anchor: Tensor, *once: Any) -> Any:
            nonlocal state, given
            if hook := checkpoint_hook():
                _our_hooks.add(hook)
            if state is None:
                state = self._look(call, once)
                (args, kwargs), given = given, None
                with first_run(state):
                    output = forward(*args, **kwargs)
                state.forward_ended()
                return output
            # Lists and dicts are made anew, as they were given: what the forward has added to them stays in those of the
            # first run.
            args, kwargs = tree_unflatten([once[position] for position in positions], structure)
            with self._rerun(call.unit, args), state.restored():
                return state.context.copy().run(forward, *args, **kwargs)

        return checkpoint(run, self._anchor, *once.values(), use_reentrant=False)

    def _look(self, call: UnitCall, given: Sequence[Any]) -> ForwardState:
        return ForwardState(call.unit, call.module, given, self._volatile[call.unit], self._outside)

    # ------------------------------------------------------------------ the trial

    def begin_trial(self) -> None:
        """Looks at all forwards from now on."""
        self.in_trial = True

    def end_trial(self) -> dict[str, str]:
        """Looks at none from now on. Returns the units that could not be recomputed, and why."""
        unfit, self._unfit, self.in_trial = self._unfit, {}, False
        return unfit

    def try_out(self, call: UnitCall, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Runs a unit's forward once and looks at what it changes."""
        state = None
        try:
            state = self._look(call, tree_leaves((args, kwargs)))
        except Exception as error:  # an object of the user's may raise anything when it is looked at
            self._unfit[call.unit] = str(error)
        done = self._outside(call.unit)
        with nullcontext() if state is None else first_run(state):
            output = forward(*args, **kwargs)
        try:
            if state is not None:
                state.forward_ended()
                state.refuse(done())
                state.drop_values()
                self._watched.append((call.unit, state))
        except Unrepeatable as error:
            self._unfit[call.unit] = str(error)
        return output

    def backward_ended(self) -> None:
        """Looks at what was written since the forwards, which a second forward in backward could not put back."""
        watched, self._watched = self._watched, []
        for unit, state in watched if self.in_trial else ():
            try:
                state.check()
            except Unrepeatable as error:
                self._unfit[unit] = str(error)


def is_checkpointed() -> bool:
    """Whether a non-reentrant checkpoint of the user's, in its first or its second run, takes what autograd saves now."""
    hook = checkpoint_hook()
    return hook is not None and hook not in _our_hooks


def _is_leaf(value: Any) -> bool:
    """Whether checkpoint keeps a value as it is. Objects are not taken apart, even if torch was told how to do that."""
    return type(value) not in (tuple, list, dict) and not (isinstance(value, tuple) and hasattr(value, "_fields"))
