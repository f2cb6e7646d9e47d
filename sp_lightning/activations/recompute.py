"""A forward whose inner results are not kept: they are computed once more in backward, by torch's own checkpoint.

torch restores its random state and autocast. What it leaves to the user is done here: a forward that is run twice shows
once, and sees the second time what it saw the first time. Its module's buffers and attributes (BatchNorm's statistics,
spectral norms, counters, lists, tensors that ``functional_call`` puts in place of weights), the objects that it is given (a
cache of keys and values), Python's and NumPy's random state, context variables and the choice of attention kernels are,
for the second run, what they were before the first; afterwards they are as they were. What cannot be put back (a weight
or an argument that the forward writes) is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from sp_lightning.activations.forward_state import Changes
from sp_lightning.device.torch_private import tree_flatten, tree_unflatten


def recomputed(
    unit: str,
    module: nn.Module,
    forward: Callable[..., Any],
    again: Callable[[str, Any], AbstractContextManager[None]],
    volatile: dict[str, set[str]],
    anchor: Tensor,
    args: Sequence[Any],
    kwargs: dict[str, Any],
) -> Any:
    """Run a module's forward, of which autograd keeps the inputs only.

    The second run is seen by hooks on inner modules, prints, files and global variables: everything outside of the
    module and its arguments.

    Args:
        unit: the module's name.
        module: whose state it is.
        forward: its forward.
        again: a context for the second run, in backward; called with the name and the positional arguments.
        volatile: by unit, the buffers whose values change; what the first run learns is added.
        anchor: a tensor on the device, whose random state is restored, too.

    Raises:
        Unrepeatable: what the forward has written cannot be put back.
    """
    given: Any = (tuple(args), kwargs)
    leaves, spec = tree_flatten(given, is_leaf=_is_leaf)
    once = {id(leaf): leaf for leaf in leaves}  # what is given twice is one object again: attention asks for that
    at = {identity: number for number, identity in enumerate(once)}
    places = [at[id(leaf)] for leaf in leaves]
    changes: Changes | None = None

    def run(anchor: Tensor, *once: Any) -> Any:
        nonlocal changes, given
        if changes is None:
            changes, (args, kwargs), given = Changes(unit, module, once, volatile), given, None
            output = forward(*args, **kwargs)
            changes.keep()
            return output
        # Lists and dicts are as they were given; what the forward adds to them is in those of the first run.
        args, kwargs = tree_unflatten([once[place] for place in places], spec)
        with again(unit, args), changes.undone():
            return changes.context.copy().run(forward, *args, **kwargs)

    return checkpoint(run, anchor, *once.values(), use_reentrant=False)


def _is_leaf(value: Any) -> bool:
    """Whether checkpoint keeps a value as it is; objects are not taken apart, whoever has told torch how to."""
    return type(value) not in (tuple, list, dict) and not (isinstance(value, tuple) and hasattr(value, "_fields"))
