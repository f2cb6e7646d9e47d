"""An optimizer's state while its updates are under way: whoever reads it waits for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer


def waiting(kind: type[Optimizer], finish: Callable[[], None]) -> type[Optimizer]:
    """The class that an optimizer has while its updates are under way: whoever reads its state waits first."""

    def state(self: Optimizer) -> Any:
        finish()
        # A LightningOptimizer that is made meanwhile derives from this class and has no state; it asks the wrapped one.
        if "state" not in vars(self):
            raise AttributeError("state")
        return vars(self)["state"]

    def set_state(self: Optimizer, value: Any) -> None:
        finish()
        vars(self)["state"] = value

    def reduce(self: Optimizer, protocol: Any) -> Any:
        finish()
        return self.__reduce_ex__(protocol)  # it has its own class again, and this is that class's method

    methods = {"state": property(state, set_state), "__reduce_ex__": reduce}
    return type(kind.__name__, (kind,), {**methods, "__module__": kind.__module__})
