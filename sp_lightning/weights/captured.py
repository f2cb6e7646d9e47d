"""Host parameters that user code has captured: in a list in ``__init__``, in another object, in an optimizer's groups.

A step's graph is made of device parameters. A captured parameter is the host's, so that ``torch.autograd.grad`` would not find
it there, and a loss of it would be another leaf, whose gradients are added up in another order. While a step runs, the
host's parameters therefore have a role: what is computed with one for a graph is computed with the device's.

So is what is computed with another tensor that is on the device. Else reads and writes outside of graphs (in ``torch.no_grad``,
of ``.data`` and ``.grad``) are those of the host's memory: between backward and an optimizer's step gradients are there.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from sp_lightning.device.layout import METADATA
from sp_lightning.device.modes import never_compiled
from sp_lightning.device.torch_private import tree_leaves, tree_map_only
from sp_lightning.weights.device_parameter import DeviceParameter, Untouched, hides_stand_ins
from sp_lightning.weights.roles import Role, leave_all, left, take_all


class Captured:
    """The host's parameters of a module, as user code may have captured them.

    Args:
        pairs: each host parameter with its device parameter.
        on_device: says whether modules hold device parameters now.
    """

    def __init__(self, pairs: Iterable[tuple[nn.Parameter, DeviceParameter]], on_device: Callable[[], bool]) -> None:
        of = {id(host): device for host, device in pairs if isinstance(host, nn.Parameter)}
        self._hosts = [device.host for device in of.values()]
        self._role: type[_InStep] = type("InStep", (_InStep,), {"device_of": of, "on_device": staticmethod(on_device)})

    def watch(self, watch: bool, *, thread: int | None = None) -> None:
        """Sets whether what is computed with the host's parameters for a graph is computed with the device's.

        Args:
            watch: whether it is. Otherwise each use is an ordinary one: an optimizer's, or one between steps.
            thread: the identifier of the thread that runs the step; None for the same as before.
        """
        if watch:
            self._role.thread = self._role.thread if thread is None else thread
            take_all(self._hosts, self._role)
        else:
            leave_all(self._hosts, self._role)

    def watch_forward(self, *, begins: bool) -> None:
        """Does the same for a forward within backward, if user code has computed with one: no other pays for that."""
        if self._role.used:
            self.watch(begins)


class _InStep(Role):
    """A host parameter while a step runs."""

    rank = 1
    device_of: dict[int, DeviceParameter]
    on_device: Callable[[], bool]
    used = False
    thread = 0

    @classmethod
    @never_compiled
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        # Another thread may take the role from a parameter at any time: its class is not asked again.
        role = next(each for each in cls.roles if issubclass(each, _InStep))
        of = role.device_of
        if func in _OF_THE_HOST:
            if func == _GET_DATA:
                _host_is_used([of[id(args[0])]])
            if func == _SET_GRADIENT and args[1] is not None and id(args[0]) in of:
                args = args[0], of[id(args[0])]._of.doors.device.on_host(args[1])
            with Untouched():
                return func(*args, **kwargs)
        leaves = tree_leaves((args, kwargs))
        hosts = [leaf for leaf in leaves if id(leaf) in of]
        others = [leaf for leaf in leaves if isinstance(leaf, Tensor) and id(leaf) not in of]
        role.used = True
        if _on_device(func, others, role):
            args, kwargs = tree_map_only(Tensor, lambda each: of.get(id(each), each), (args, kwargs))
            return func(*args, **kwargs)
        _host_is_used([of[id(host)] for host in hosts])
        # No update is waited for here: what has that role, too, was asked first. Other classes among the arguments are asked.
        with left(hosts, [role]) if hides_stand_ins(others) else Untouched():
            return func(*args, **kwargs)


def _host_is_used(parameters: Iterable[DeviceParameter]) -> None:
    """Prepares host weights to be read and written: they have what was written on the device, and no transfer reads them."""
    for group in {parameter._of for parameter in parameters}:
        group.doors.host_is_used(group.layer)


def _on_device(func: Callable[..., Any], others: Sequence[Tensor], role: type[_InStep]) -> bool:
    """Whether a call is to be given the device's parameters: for a graph, or because another argument is on the device."""
    if func == Tensor.data.__set__:  # type: ignore[attr-defined]
        return False
    if func in _OF_GRAPHS or any(issubclass(type(other), DeviceParameter) for other in others):
        return True
    if func in (Tensor.detach, torch.detach):
        # It may be written. Other threads look at the host's memory, which never leaves.
        return role.on_device() and threading.get_ident() == role.thread
    device = next(iter(role.device_of.values()))._of.doors.device
    others = [other for other in others if other.ndim]
    if any(map(device.has, others)):
        return True
    return torch.is_grad_enabled() and (not others or device.computes_on_host)


_OF_GRAPHS = {torch.autograd.grad, torch.autograd.backward, Tensor.backward}
"""What looks for parameters in a graph."""

_GET_DATA = Tensor.data.__get__  # type: ignore[attr-defined]
_SET_GRADIENT = Tensor.grad.__set__  # type: ignore[union-attr]

_OF_THE_HOST = METADATA | {
    *(getattr(getattr(Tensor, name), how) for name in ("grad", "requires_grad") for how in ("__get__", "__set__")),
    *(getattr(Tensor, name) for name in (
        "requires_grad_", "register_hook", "register_post_accumulate_grad_hook", "stride", "data_ptr", "untyped_storage",
        "storage_offset", "is_contiguous", "is_shared", "share_memory_", "retain_grad",
    )),
    *(getattr(getattr(Tensor, name), how) for name, how in (("grad", "__delete__"), ("data", "__get__"))),
}  # fmt: skip
"""What is the host parameter's own: its attributes, its hooks, its memory."""
