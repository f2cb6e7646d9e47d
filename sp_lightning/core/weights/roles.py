"""Roles of host parameters: classes that a parameter has for some time, in addition to the user's class.

With a role, code that uses the parameter runs the role's code first. For example, while an update of the parameter runs, a role
waits for the update. A parameter may have several roles: its update runs, its gradient is narrow, modules hold a device parameter
in its place. A parameter gets and loses its roles in any order.

For each set of roles there is a *combined class*, which derives from the roles and the user's class. It has the name of the
user's class, because error messages show the name. "Note: roles of parameters" in ``updates/__init__`` says why there are roles.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

from torch import DisableTorchFunctionSubclass, Tensor, nn

from sp_lightning.core.messages import SWAPPED_IN_STEP
from sp_lightning.core.torch_compat.metadata import METADATA
from sp_lightning.core.torch_compat.private import NoticesSwap, tree_map_only
from sp_lightning.core.weights.device_parameter import DeviceParameter, set_class

_lock = threading.RLock()  # an update may end in another thread


class ParameterRole(NoticesSwap, nn.Parameter):
    """A role. Its methods precede those of roles with a higher :attr:`rank`, and those of the user's class.

    Attributes:
        rank: the place of the role among the roles of a parameter. 0 waits for an update, 1 is for the time of a step
            (``swap``), 2 for a gradient that other processes may read, 3 for one that is narrow or not here.
        roles, users: of a combined class: the roles, and the user's class.
        classes: the combined classes whose first role is this one. They live as long as the role.
    """

    rank: ClassVar[int]
    roles: ClassVar[tuple[type[ParameterRole], ...]] = ()
    users: ClassVar[type[nn.Parameter]]
    classes: ClassVar[dict[Any, type[nn.Parameter]]]

    def __init_subclass__(cls) -> None:
        cls.classes = {}

    def __new__(cls, data: Any = None, requires_grad: bool = True) -> Any:
        """Lets ``type(p)(data)`` make an ordinary parameter."""
        return cls.users(data, requires_grad)

    @classmethod
    def is_foreign(cls) -> bool:
        """Returns True if the present thread is outside the run, so that it must not remove the role from a parameter."""
        return False

    def __eq__(self, other: object) -> Any:
        """Returns True also for the device parameter, so that dictionaries find a host parameter by its device parameter."""
        if issubclass(type(other), DeviceParameter) and other.host is self:  # type: ignore[attr-defined]
            return True
        return super().__eq__(other)

    __hash__ = nn.Parameter.__hash__

    def before_swap(self) -> None:
        """Ends the roles that a use ends: an update under way, a narrow gradient. Other roles refuse the exchange."""
        _ = self.data, self.grad
        if issubclass(type(self), ParameterRole):
            raise RuntimeError(SWAPPED_IN_STEP.format(what=self.described()))

    def described(self) -> str:
        """Returns the parameter's name, or its shape if the role does not know its name."""
        return f"a parameter of shape {tuple(self.shape)}"

    def __repr__(self) -> str:  # type: ignore[override]
        kind = getattr(type(self), "users", type(self))  # another thread may remove the role at any time
        return repr(kind(self.detach(), self.requires_grad))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Returns a copy without roles: an ordinary parameter of the user's class."""
        kind: Any = type(self)  # read once, because another thread may remove the role at any time
        roles = kind.roles if issubclass(kind, ParameterRole) else ()
        if any(role.is_foreign() for role in roles):  # this thread must not remove the roles
            return kind.users.__deepcopy__(self, memo)
        with left([self], roles):
            return copy.deepcopy(self, memo)


OF_THE_PARAMETER = METADATA | {
    *(getattr(getattr(Tensor, name), how) for name in ("grad", "requires_grad") for how in ("__get__", "__set__")),
    *(getattr(Tensor, name) for name in (
        "requires_grad_", "register_hook", "register_post_accumulate_grad_hook", "stride", "data_ptr", "untyped_storage",
        "storage_offset", "is_contiguous", "is_shared", "share_memory_", "retain_grad",
    )),
    *(getattr(getattr(Tensor, name), how) for name, how in (("grad", "__delete__"), ("data", "__get__"))),
}  # fmt: skip
"""Functions that use the host parameter itself and not its values: its attributes, its hooks, its memory."""

_IN_PLACE = {
    "__iadd__",
    "__isub__",
    "__imul__",
    "__itruediv__",
    "__ifloordiv__",
    "__imod__",
    "__ipow__",
    "__imatmul__",
    "__iand__",
    "__ior__",
    "__ixor__",
    "__ilshift__",
    "__irshift__",
    "__setitem__",
}


def writes_in_place(func: Callable[..., Any], kwargs: Mapping[str, Any]) -> bool:
    """Returns True if a function of torch writes one of its arguments, as its name or an argument ``out`` shows."""
    name = getattr(func, "__name__", "")
    by_name = name.endswith("_") and not name.endswith("__")
    return by_name or name in _IN_PLACE or "out" in kwargs


def looked_at(func: Callable[..., Any], args: Any, kwargs: Any, present: Callable[[Tensor, Tensor], Tensor]) -> Any:
    """Calls a function with plain tensors in place of host parameters, for a thread outside the run.

    Args:
        func: the function.
        args, kwargs: its arguments.
        present: takes a host parameter and a view of its memory. Returns the tensor that the function gets.
    """

    def seen(each: Tensor) -> Tensor:
        if not issubclass(type(each), ParameterRole):
            return each
        with DisableTorchFunctionSubclass():
            view = each.detach()
        return present(each, view)

    args, kwargs = tree_map_only(Tensor, seen, (args, kwargs))
    return func(*args, **kwargs)


def take(parameter: nn.Parameter, role: type[ParameterRole]) -> None:
    """Gives a parameter a role. If it has the role already, nothing changes."""
    take_all((parameter,), role)


def leave(parameter: nn.Parameter, role: type[ParameterRole]) -> None:
    """Removes a role, and roles that derive from it, from a parameter. If the parameter has no such role, nothing changes."""
    leave_all((parameter,), role)


def take_all(parameters: Sequence[nn.Parameter], role: type[ParameterRole]) -> None:
    """Gives parameters a role. The first branch is the common case: a parameter without roles or a class of the user."""
    with _lock:
        plain = _class_of((role,), nn.Parameter)
        for parameter in parameters:
            if type(parameter) is nn.Parameter:
                set_class(parameter, plain)
            else:
                _change(parameter, lambda roles: (*roles, role))


def leave_all(parameters: Sequence[nn.Parameter], role: type[ParameterRole]) -> None:
    """Removes a role, and roles that derive from it, from parameters. The first branch is the common case: no other role."""
    with _lock:
        plain = _class_of((role,), nn.Parameter)
        for parameter in parameters:
            if type(parameter) is plain:
                set_class(parameter, nn.Parameter)
            elif type(parameter) is not nn.Parameter:
                _change(parameter, lambda roles: tuple(each for each in roles if not issubclass(each, role)))


@contextmanager
def left(parameters: Sequence[nn.Parameter], roles: Sequence[type[ParameterRole]]) -> Iterator[None]:
    """A context in which parameters do not have these roles. At its end, every parameter gets all of them."""
    for role in roles:
        for parameter in parameters:
            leave(parameter, role)
    try:
        yield
    finally:
        for role in roles:
            for parameter in parameters:
                take(parameter, role)


def _change(
    parameter: Any, change: Callable[[tuple[type[ParameterRole], ...]], tuple[type[ParameterRole], ...]]
) -> None:
    """Gives a parameter other roles, by their combined class. ``change`` takes the present roles, and returns the new ones."""
    kind = type(parameter)
    before = kind.roles if issubclass(kind, ParameterRole) else ()
    after = change(before)
    roles = tuple(sorted(set(after), key=lambda role: role.rank)) if len(after) > 1 else after
    if roles != before:
        users = kind.users if before else kind
        set_class(parameter, _class_of(roles, users) if roles else users)


def _class_of(roles: tuple[type[ParameterRole], ...], users: type[nn.Parameter]) -> type[nn.Parameter]:
    """Returns the combined class of roles, which are sorted by rank, and the user's class. The first call makes the class."""
    classes = roles[0].classes
    if (roles, users) not in classes:
        attributes = {"__module__": users.__module__, "roles": roles, "users": users}
        classes[roles, users] = type(users.__name__, (*roles, users), attributes)
    return classes[roles, users]
