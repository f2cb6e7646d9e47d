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

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from weakref import WeakSet

from torch import Tensor
from torch.utils.checkpoint import checkpoint

from sp_lightning.activations.forward_state import Elsewhere, ForwardState, first_runs
from sp_lightning.activations.unit_call import UnitCall
from sp_lightning.device.torch_private import checkpoint_hook, tree_flatten, tree_unflatten

Rerun = Callable[[str, Any], AbstractContextManager[None]]
"""A context for the second run of a unit's forward, in backward. It takes the unit's name and its positional arguments."""


_our_hooks: WeakSet[Callable[..., Any]] = WeakSet()


def is_checkpointed() -> bool:
    """Whether a non-reentrant checkpoint of the user's, in its first or its second run, takes what autograd saves now."""
    hook = checkpoint_hook()
    return hook is not None and hook not in _our_hooks


def run_recomputed(
    call: UnitCall,
    forward: Callable[..., Any],
    args: Any,
    kwargs: Any,
    *,
    rerun: Rerun,
    volatile: dict[str, set[str]],
    elsewhere: Elsewhere,
    anchor: Tensor,
) -> Any:
    """Runs a unit's forward, of which autograd keeps the inputs only.

    The second run is seen by everything outside of the module and its arguments: hooks on inner modules, prints, files and
    global variables.

    Args:
        call: the call that this is.
        forward: the unit's forward.
        args, kwargs: its arguments.
        rerun: the context for the second run.
        volatile: by unit, the buffers whose values change; what the first run learns is added.
        elsewhere: says what was done to weights outside of a unit.
        anchor: a tensor on the device. It tells torch's checkpoint whose random state to restore if no argument does.

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
            state = ForwardState(call.unit, call.module, once, volatile, elsewhere)
            (args, kwargs), given = given, None
            with first_runs.of(state):
                output = forward(*args, **kwargs)
            state.forward_ended()
            return output
        # Lists and dicts are made anew, as they were given: what the forward has added to them stays in those of the
        # first run.
        args, kwargs = tree_unflatten([once[position] for position in positions], structure)
        with rerun(call.unit, args), state.restored():
            return state.context.copy().run(forward, *args, **kwargs)

    return checkpoint(run, anchor, *once.values(), use_reentrant=False)


def _is_leaf(value: Any) -> bool:
    """Whether checkpoint keeps a value as it is. Objects are not taken apart, even if torch was told how to do that."""
    return type(value) not in (tuple, list, dict) and not (isinstance(value, tuple) and hasattr(value, "_fields"))
