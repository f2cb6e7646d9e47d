"""Whether steps on the CPU have the bits of the steps that plain Lightning would take on the GPU, and why not.

Plain Lightning's optimizer steps on the GPU: with torch's ``foreach`` operators, or with ``fused=True``. Where ``kernels`` has
its formulas, and this GPU has confirmed them, an update on the CPU has the bits of the unchanged program's. All groups of an
optimizer have to be confirmed, because weights that are stepped in two ways would be those of neither.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from sp_lightning.device.patched import state_of
from sp_lightning.device.torch_private import FUSED_STEPS, unscales_by_itself
from sp_lightning.kernels.gpu_norms import has_norms_of
from sp_lightning.kernels.jit import is_installed
from sp_lightning.kernels.update import HALVES, is_confirmed
from sp_lightning.kernels.variants import OPEN, Form, Kind, Like, Variant
from sp_lightning.optim.fused import has_fused_step, may_get_gradients
from sp_lightning.weights.narrow_gradient import as_it_came, stored
from sp_lightning.weights.roles import ParameterRole

KINDS: dict[type, Kind] = {
    torch.optim.Adam: "adam",
    torch.optim.AdamW: "adamw",
    torch.optim.SGD: "sgd",
    torch.optim.Adagrad: "adagrad",
}
assert set(KINDS.values()) == set(FUSED_STEPS.values())


@dataclass(frozen=True)
class LikeGpu:
    """Steps of an optimizer that have a GPU's bits.

    Args:
        device: the GPU.
        fuse: whether groups step fused for which their user has left that open.
    """

    device: torch.device
    fuse: bool

    def of(self, group: Mapping[str, Any]) -> Like:
        """Whose bits the steps of a group have."""
        return Like(self.device, "fused" if group.get("fused") or self.fuse else "foreach")

    def against(self, optimizer: torch.optim.Optimizer, module: nn.Module, *, scaled: bool) -> str:
        """Why an optimizer's steps have other bits than on the GPU; empty if they have the same.

        Args:
            optimizer: the optimizer.
            module: the module that it trains.
            scaled: whether gradients are scaled (``16-mixed``).
        """
        name = type(optimizer).__name__
        tables = (nn.Embedding, nn.EmbeddingBag)
        sparse = (name for name, each in module.named_modules() if isinstance(each, tables) and each.sparse)
        if found := next(sparse, ""):
            return f"{found} has sparse gradients"
        if scaled and unscales_by_itself(optimizer):
            return f"{name} unscales gradients by itself"
        if not has_fused_step(optimizer):
            return f"{name} is not one of torch's Adam, AdamW, SGD and Adagrad"
        if not is_installed():
            return "llvmlite is missing, which pip install llvmlite adds"
        with torch.DisableTorchFunctionSubclass():  # updates may be under way; nothing here depends on them
            reasons = (self._against(optimizer, group) for group in optimizer.param_groups)
            return next((f"{name}: {reason}" for reason in reasons if reason), "")

    def against_group(self, group: Mapping[str, Any], known: set[int]) -> str:
        """Why a group's next step has other bits, although :meth:`against` had no reason; empty if it has the same.

        Settings may have changed since, and parameters may have been added. That formulas are confirmed is not asked here.

        Args:
            group: the group.
            known: the ``id`` of parameters that need not be looked at again. Others are added.
        """
        if reason := _against_settings(group, self.of(group).form):
            return reason
        if any(map(_is_laid_out_otherwise, group["params"])):
            return "a gradient's memory has another order than its weight's"
        new = [p for p in group["params"] if id(p) not in known and may_get_gradients(p)]
        if reason := next(filter(None, map(_against_parameter, new)), ""):
            return reason
        known.update(map(id, new))
        return ""

    def against_norms(self, optimizer: torch.optim.Optimizer) -> str:
        """Why norms of an optimizer's gradients have other bits than on the GPU; empty if they have the same."""
        with torch.DisableTorchFunctionSubclass():
            trained = [p for group in optimizer.param_groups for p in group["params"] if may_get_gradients(p)]
            if len({p.dtype for p in trained}) > 1:
                return "weights have several dtypes"
        largest = max((p.numel() for p in trained), default=0)
        return "" if has_norms_of(self.device, largest) else "no formula has the bits of norms on this GPU"

    def _against(self, optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> str:
        form = self.of(group).form
        trained = [p for p in group["params"] if may_get_gradients(p)]
        return (
            _against_settings(group, form)
            or next(filter(None, map(_against_parameter, trained)), "")
            or _against_state(state_of(optimizer), trained)
            or self._unconfirmed(KINDS[type(optimizer)], group, {p.dtype for p in trained})
        )

    def _unconfirmed(self, kind: Kind, group: Mapping[str, Any], dtypes: Iterable[torch.dtype]) -> str:
        like = self.of(group)
        if (kind, like.form) not in OPEN:
            return "fused=True computes in double precision on a GPU"
        if not all(map(is_confirmed, _variants(kind, group, dtypes, like))):
            return f"no formula has the bits of its {like.form} step on this GPU"
        return ""


def _against_settings(group: Mapping[str, Any], form: Form) -> str:
    for name in ("capturable", "differentiable", "foreach"):
        if group.get(name):
            return f"{name}=True"
    if form == "foreach":
        for name in ("fused", "foreach"):
            if group.get(name) is False:
                return f"{name}=False steps one parameter after the other"
        if isinstance(group["lr"], Tensor):
            return "the learning rate is a tensor"
    if any(isinstance(each, Tensor) for each in group.get("betas", ())):
        return "a beta is a tensor"
    return ""


def _against_parameter(parameter: nn.Parameter) -> str:
    kind: Any = type(parameter)
    kind = kind.users if issubclass(kind, ParameterRole) else kind
    if kind not in (nn.Parameter, Tensor):
        return f"a parameter is a {kind.__name__}"
    if parameter.dtype not in (torch.float32, *HALVES):
        return f"a parameter has the dtype {parameter.dtype}"
    if not is_dense(parameter):
        return "a parameter's memory has gaps"
    return ""


def _against_state(state: Mapping[Any, Any], parameters: Iterable[nn.Parameter]) -> str:
    entries = ((p, value) for p in parameters for value in dict(state.get(p, {})).values())
    others = [
        v for p, v in entries if isinstance(v, Tensor) and v.shape == p.shape and v.dim() and v.dtype is not p.dtype
    ]
    return f"state has the dtype {others[0].dtype}, another one than its weight" if others else ""


def _is_laid_out_otherwise(parameter: nn.Parameter) -> bool:
    """Whether a gradient has other strides than its weight. Then torch steps the group by operators that were not compared."""
    gradient = as_it_came(stored(parameter))
    return gradient is not None and gradient.layout is torch.strided and gradient.stride() != parameter.stride()


def writes_gradients(optimizer: torch.optim.Optimizer) -> bool:
    """Whether torch's ``foreach`` step leaves other gradients than it was given: SGD's, with Nesterov momentum alone."""
    return type(optimizer) is torch.optim.SGD and any(
        group["nesterov"] and not group["weight_decay"] and not group["maximize"] for group in optimizer.param_groups
    )


def is_dense(tensor: Tensor) -> bool:
    """Whether elements lie side by side, in any order of the dimensions."""
    size = 1
    for stride, length in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if length > 1:
            if stride != size:
                return False
            size *= length
    return True


def _variants(kind: Kind, group: Mapping[str, Any], dtypes: Iterable[torch.dtype], like: Like) -> Iterator[Variant]:
    """What steps of a group may be, with a weight decay and without: a scheduler may change that."""
    own: list[dict[str, Any]] = [{}]
    if kind in ("adam", "adamw"):
        own = [{"amsgrad": group["amsgrad"], "near": is_near(group["betas"][0])}]
    elif kind == "sgd":
        momentum, nesterov = group["momentum"] != 0, group["nesterov"]
        own = [{"momentum": momentum, "nesterov": nesterov, "first": first} for first in {False, momentum}]
    for dtype, decays, more in product(sorted(dtypes, key=str), {True, bool(group["weight_decay"])}, own):
        yield Variant(kind, dtype, None, 0, maximize=group["maximize"], decays=decays, weight=dtype, like=like, **more)


def is_near(beta1: float) -> bool:
    """Whether Adam's average moves by less than half of the way to the gradient, which torch writes otherwise."""
    return bool(abs(torch.tensor(1 - beta1, dtype=torch.float32, device="cpu")) < 0.5)
