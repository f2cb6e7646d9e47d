"""Copies of a model's weights that a module keeps in buffers: averages, as latent diffusion's ``LitEma`` keeps them.

Between steps they are on the host, where the weights are: ``average.type_as(weight)`` makes a copy where the two are
apart, and what is then written to it is lost. Within a step weights are the device's; so is such a module's call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

# Other modules have as many buffers as a small module has weights, too.
_FEW = 2


def find_averages(root: nn.Module) -> list[nn.Module]:
    """The modules without parameters whose buffers have the shapes of all weights, or all trained ones, of a module."""
    bare = [module for module in root.modules() if not any(True for _ in module.parameters())]
    weights = {tuple(p.shape for p in module.parameters()) for module in root.modules()}
    weights |= {tuple(p.shape for p in module.parameters() if p.requires_grad) for module in root.modules()}
    copies = {module: tuple(buffer.shape for buffer in module.buffers() if buffer.dim()) for module in bare}
    return [module for module, shapes in copies.items() if len(shapes) > _FEW and shapes in weights]


class OnTheDevice:
    """A gate's keeper: a module's buffers are on the device for a call within a step, and on the host after it.

    Args:
        module: whose they are.
        device: where they are to be.
        in_step: whether modules hold device parameters now.
    """

    def __init__(self, module: nn.Module, device: torch.device, in_step: Callable[[], bool]) -> None:
        self._module = module
        self._device = device
        self._in_step = in_step
        self._depth = 0
        self._sent: list[_Sent] = []

    def enter(self, visits: Sequence[int], inputs: Any) -> Sequence[int]:
        """The module is called."""
        self._depth += 1
        if self._depth == 1 and self._in_step():
            for owner in self._module.modules():
                for name, host in owner._buffers.items():
                    if host is not None and host.device != self._device:
                        sent = torch.empty_like(host, device=self._device).copy_(host)
                        self._sent.append(_Sent(owner._buffers, name, host, sent))
            for each in self._sent:
                each.place[each.name] = each.sent
        return visits

    def leave(self, visits: Sequence[int], output: Any) -> None:
        """The call has returned, or raised: what it has written is the host's."""
        self._depth -= 1
        if self._depth:
            return
        sent, self._sent = self._sent, []
        with torch.no_grad():
            for place, name, host, device in sent:
                now = place.get(name)
                if now is device:
                    place[name] = host.copy_(device)
                elif now is not None:
                    place[name] = now.to(host.device)


class _Sent(NamedTuple):
    place: dict[str, Tensor | None]
    name: str
    host: Tensor
    sent: Tensor
