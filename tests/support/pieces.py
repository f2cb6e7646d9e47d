"""Steps of every fused optimizer, as a user takes them and as updates do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from sp_lightning.core.updates.pieces import InPieces
from sp_lightning.core.weights.gradient_roles import Factor, change, keep_narrow

SHAPES = [(3000,), (64, 100), (5, 7), (), (1, 4097), (16, 8, 3, 3)]
ADAM = torch.optim.Adam
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adam": lambda p: ADAM(p, lr=0.1, fused=True),
    "adam, decayed": lambda p: ADAM(p, lr=0.1, weight_decay=0.3, fused=True),
    "adam, amsgrad, maximised": lambda p: ADAM(p, lr=0.1, amsgrad=True, maximize=True, fused=True),
    "adam, lr is a tensor": lambda p: ADAM(p, lr=torch.tensor(0.1), fused=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.3, fused=True),
    "adamw, amsgrad": lambda p: torch.optim.AdamW(p, lr=0.1, amsgrad=True, fused=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.1, fused=True),
    "sgd, momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.2, fused=True),
    "sgd, nesterov, maximised": lambda p: torch.optim.SGD(
        p, lr=0.1, momentum=0.9, nesterov=True, maximize=True, fused=True
    ),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, lr_decay=0.1, weight_decay=0.1, fused=True),
    "groups": lambda p: torch.optim.AdamW(
        [{"params": p[::2], "weight_decay": 0.5}, {"params": p[1::2], "lr": 0.01}], lr=0.1, fused=True
    ),
}


class Steps:
    """The same steps of an optimizer, whole or in pieces.

    Args:
        pieces: elements of a piece; None for whole steps as a user takes them.
        came: the dtype in which gradients come.
        clip: what clips whole gradients, and the function that clips a part of one.
    """

    def __init__(
        self,
        make: Callable[[Any], torch.optim.Optimizer],
        pieces: int | None,
        came: torch.dtype,
        clip: str,
        **shape: Any,
    ) -> None:
        torch.manual_seed(0)
        self.parameters = [nn.Parameter(torch.randn(each)) for each in SHAPES]
        self.parameters.append(nn.Parameter(torch.randn(16, 8, 3, 3).to(memory_format=torch.channels_last)))
        self.without = nn.Parameter(torch.randn(1000))
        self.casts = [torch.zeros_like(p, dtype=torch.bfloat16) for p in self.parameters]
        self.optimizer = make([*self.parameters, self.without])
        for _ in range(3):
            gradients = [torch.randn_like(p).to(came) for p in self.parameters]
            if pieces is None:
                self.whole(gradients, clip)
            else:
                self.cut(gradients, clip, pieces)

    def whole(self, gradients: list[Tensor], clip: str) -> None:
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient.to(parameter.dtype)
        if clip == "norm":
            clip_grad_norm_(self.parameters, 0.1)
        elif clip == "value":
            clip_grad_value_(self.parameters, 0.1)
        self.optimizer.step()
        for parameter, cast in zip(self.parameters, self.casts, strict=True):
            cast.copy_(parameter.detach())

    def cut(self, gradients: list[Tensor], clip: str, elements: int) -> None:
        total = torch.linalg.vector_norm(
            torch.stack([torch.linalg.vector_norm(g, dtype=torch.float32) for g in gradients])
        )
        coefficient = torch.clamp(0.1 / (total + 1e-6), max=1.0)
        clipping: dict[str, Any] = {
            "norm": Factor(coefficient), "value": lambda g: g.clamp_(-0.1, 0.1)
        }  # fmt: skip
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient if gradient.dtype is parameter.dtype else None
            if parameter.grad is None:
                keep_narrow(parameter, gradient, looked_at=lambda: None)
        clips = {id(p): clipping[clip] for p in self.parameters if clip and not change(p, clipping[clip])}
        casts = {id(p): cast for p, cast in zip(self.parameters, self.casts, strict=True)}
        with InPieces(casts, clips, elements=elements), torch.DisableTorchFunctionSubclass():
            type(self.optimizer).step.__wrapped__(self.optimizer)  # type: ignore[attr-defined]

    def outcome(self) -> list[Tensor]:
        state = [value for p in self.parameters for value in self.optimizer.state[p].values() if value is not None]
        return [*(p.detach() for p in (*self.parameters, self.without)), *self.casts, *state]
