"""What users have put on an optimizer or around one: a step of their own, a state that is another optimizer's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from torch.optim import Optimizer


def own_step(optimizer: Optimizer) -> Callable[..., Any]:
    """An optimizer's step without the hooks around it, and without what schedulers put around it to count its calls."""
    step: Any = vars(optimizer).get("step")
    if not is_patched(optimizer, step):
        step = type(optimizer).step
        while getattr(step, "hooked", False):
            step = step.__wrapped__
        step = MethodType(step, optimizer)
    return step


def state_of(optimizer: Any) -> Any:
    """An optimizer's state by parameter, as it is now: no update that is under way is waited for.

    One that wraps another (Opacus' ``DPOptimizer``, accelerate's) has none of its own, and gives that one's by a property.
    """
    own = vars(optimizer).get("state")  # a property may wait
    return optimizer.state if own is None else own


def is_patched(optimizer: Any, step: Any) -> bool:
    """Whether a step that an optimizer has on the object is other code than its class's, beside what torch puts around that.

    ``functools.wraps`` copies names and attributes, so that the code alone tells.
    """
    function = getattr(step, "__func__", step)
    while function is not None and function is not type(optimizer).step:
        if isinstance(function, partial):
            function = function.func
        code = getattr(function, "__code__", None)
        if code is None or not code.co_filename.startswith(_OURS_AND_TORCHS):
            return True
        function = getattr(function, "__wrapped__", None)
    return False


@contextmanager
def in_place_of(owner: Any, methods: Mapping[str, Any]) -> Iterator[None]:
    """While this is active an object has these in place of its class's methods. What it had of its own before comes back."""
    own = vars(owner)
    before = {name: own[name] for name in methods if name in own}
    own.update(methods)
    try:
        yield
    finally:
        for name in methods:
            own.pop(name, None)
        own.update(before)


_OURS_AND_TORCHS = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))
