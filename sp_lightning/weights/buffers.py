"""Averages of weights that a module keeps in buffers, as latent diffusion's ``LitEma`` does.

Such buffers have to be where the weights are: ``average.type_as(weight)`` makes a copy if the two are on different devices,
and what is written to that copy is lost. Between steps the buffers are on the host, as the weights are. Within a step
the weights are on the device, and so are the buffers of such a module while it is called. Once somebody asks for one of them
outside of a call (a method that updates them), they stay on the device until the step is over.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

# A module with so few buffers may have them for another purpose, and only by chance the shapes of a small module's weights.
_FEW = 2


def find_averages(root: nn.Module) -> list[nn.Module]:
    """Finds the modules without parameters whose buffers have the shapes of all, or all trained, weights of a module."""
    bare = [module for module in root.modules() if not any(True for _ in module.parameters())]
    weights = {tuple(p.shape for p in module.parameters()) for module in root.modules()}
    weights |= {tuple(p.shape for p in module.parameters() if p.requires_grad) for module in root.modules()}
    copies = {module: tuple(buffer.shape for buffer in module.buffers() if buffer.dim()) for module in bare}
    return [module for module, shapes in copies.items() if len(shapes) > _FEW and shapes in weights]


class OnTheDevice:
    """A listener of module hooks: the module's buffers are on the device for a call within a step, and on the host after it.

    Args:
        module: the module that has the buffers.
        device: the device that they are to be on.
        in_step: says whether modules hold device parameters now.
    """

    def __init__(self, module: nn.Module, device: torch.device, in_step: Callable[[], bool]) -> None:
        self._module = module
        self._device = device
        self._in_step = in_step
        self._depth = 0
        self._asked = False
        self._sent: list[_Sent] = []
        for owner in module.modules():
            owner._buffers = _Buffers(owner._buffers, self._ask)

    def enter(self, visits: Sequence[Any], inputs: Any) -> Sequence[Any]:
        """Sends the buffers to the device, because the module is called."""
        self._send()
        self._depth += 1
        return visits

    def leave(self, visits: Sequence[Any], output: Any) -> None:
        """Brings the buffers back to the host after the module's outermost call has returned or raised."""
        self._depth = max(self._depth - 1, 0)
        if not self._depth and not self._asked:
            self.send_back()

    def send_back(self) -> None:
        """Brings the buffers back to the host, with what was written on the device."""
        self._asked, self._depth = False, 0
        sent, self._sent = self._sent, []
        with torch.no_grad():
            for place, name, host, device in sent:
                now = dict.get(place, name)
                if now is device:
                    place[name] = host.copy_(device)
                elif now is not None:
                    place[name] = now.to(host.device)

    def close(self) -> None:
        """Brings the buffers back to the host for good, and gives the modules plain dictionaries of buffers again."""
        self.send_back()
        for owner in self._module.modules():
            if isinstance(owner._buffers, _Buffers):
                owner._buffers = owner._buffers.plain()

    def _ask(self) -> None:
        if not self._depth and self._in_step():
            self._asked = True
            self._send()

    def _send(self) -> None:
        if self._sent or not self._in_step():
            return
        self._sent = [  # the device may have no memory for one of them, and then none is sent
            _Sent(owner._buffers, name, host, torch.empty_like(host, device=self._device).copy_(host))
            for owner in self._module.modules()
            for name, host in dict.items(owner._buffers)
            if host is not None and host.device != self._device
        ]
        for buffer in self._sent:
            buffer.place[buffer.name] = buffer.sent


class _Buffers(dict[str, Any]):
    """A module's dictionary of buffers that calls ``ask`` before somebody reads one of them."""

    def __init__(self, buffers: dict[str, Any], ask: Callable[[], None]) -> None:
        super().__init__(buffers)
        self._ask = ask

    def __getitem__(self, name: str) -> Any:
        self._ask()
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self._ask()
        return super().get(name, default)

    def items(self) -> Any:
        self._ask()
        return super().items()

    def values(self) -> Any:
        self._ask()
        return super().values()

    def plain(self) -> dict[str, Any]:
        """A plain dictionary of the same buffers, as torch has it."""
        return dict(dict.items(self))

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copies are plain dictionaries, because a copied module is a plain module."""
        self._ask()
        return dict, (self.plain(),)


class _Sent(NamedTuple):
    """A buffer that is on the device: the dictionary and the name that it has in its module, and both tensors."""

    place: dict[str, Tensor | None]
    name: str
    host: Tensor
    sent: Tensor
