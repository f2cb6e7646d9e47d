"""What stands in place of a unit's forward while a step runs."""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Callable
from typing import Any

from torch import nn

from sp_lightning.device.modes import never_compiled
from sp_lightning.device.torch_private import COMPILED_CALL


class UnitForward:
    """Stands in place of a module's forward, and hands each call on.

    A deep copy of the module that is made meanwhile has a forward of its own. So has a module that is unpickled. A shallow copy
    has this object among its attributes (learn2learn's ``clone_module`` copies a module's ``__dict__`` and exchanges the
    weights in it); this object then runs the forward of the copy, and hands nothing on.

    Args:
        name: the unit's name.
        module: the unit.
        call: takes the name, the module's own forward, and the arguments of a call.
    """

    def __init__(self, name: str, module: nn.Module, call: Callable[[str, Callable[..., Any], Any, Any], Any]) -> None:
        self._call: Callable[[str, Callable[..., Any], Any, Any], Any] | None = call
        self._name = name
        self.__self__ = module
        # Nothing can be put inside a compiled call, so it is replaced as a whole.
        self._attribute = "forward" if getattr(module, COMPILED_CALL, None) is None else COMPILED_CALL
        attributes = vars(module)
        self._own: Any = attributes.get(self._attribute)  # what the instance had under this name, beside its class
        self._forward: Callable[..., Any] = getattr(module, self._attribute)
        self.__func__ = getattr(self._forward, "__func__", self._forward)
        functools.update_wrapper(self, self._forward)

    def install(self) -> None:
        """Takes its place in the module."""
        vars(self.__self__)[self._attribute] = self

    def remove(self) -> None:
        """Gives the module its own forward back. Whoever has kept this object calls that forward from now on."""
        self._call = None
        attributes = vars(self.__self__)
        if attributes.get(self._attribute) is self:
            if self._own is None:
                del attributes[self._attribute]
            else:
                attributes[self._attribute] = self._own

    @never_compiled  # the engine is no part of a graph
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        called = self._called()
        if called is not self.__self__ and self._own is None:
            return self.__func__(called, *args, **kwargs)
        if called is not self.__self__ or self._call is None:
            return self._forward(*args, **kwargs)
        return self._call(self._name, self._forward, args, kwargs)

    def _called(self) -> nn.Module:
        """The module whose forward this is in the running call.

        Nothing hands it over: an attribute of an instance is not bound to it, and a hook on the module would take
        ``nn.TransformerEncoderLayer`` off its fast path. So it is read from the frame of ``nn.Module.__call__``, which is the
        second one from here, or a little further if something is being compiled.
        """
        frame = sys._getframe(2)
        for _ in range(4):
            if frame.f_globals is vars(nn.modules.module):
                called = frame.f_locals["self"]
                return called if vars(called).get(self._attribute) is self else self.__self__
            if frame.f_back is None:
                break
            frame = frame.f_back
        return self.__self__

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        # The forward is bound to the copy of the module, which is made before its attributes are.
        return copy.deepcopy(self._forward, memo)

    def __reduce__(self) -> Any:
        return (getattr, (self.__self__, "forward")) if self._own is None else (_identity, (self._own,))


def _identity(value: Any) -> Any:
    return value
