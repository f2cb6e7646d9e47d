"""Decides which CPU optimizer steps have the bits of plain Lightning's steps on the GPU, and why other steps do not have them.

Plain Lightning's optimizer steps on the GPU, with torch's ``foreach`` operators or with ``fused=True``. If ``gpu`` has the
formulas, and a comparison with this GPU has confirmed them, updates on the CPU have the bits of the unchanged program. All groups
of an optimizer have to be confirmed. If only some were, the weights would be those of neither device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from sp_lightning.capabilities.kernels.gpu_norms import GpuNorms, has_norms_of
from sp_lightning.capabilities.kernels.jit import is_installed
from sp_lightning.capabilities.kernels.step_like import step_like
from sp_lightning.capabilities.kernels.update import is_confirmed
from sp_lightning.capabilities.kernels.variants import OPEN, Form, Like, Variant, is_near
from sp_lightning.core.device.host_kernels import HALVES
from sp_lightning.core.device.layout import is_dense
from sp_lightning.core.layers.narrow_gradient import Norms, stored, unwidened
from sp_lightning.core.layers.roles import ParameterRole
from sp_lightning.core.torch_compat.patched import state_of
from sp_lightning.core.torch_compat.private import Kind, unscales_by_itself
from sp_lightning.core.updates.fused import KINDS, has_fused_step, may_get_gradients
from sp_lightning.core.updates.gpu_bits import GpuBits
from sp_lightning.core.updates.pieces import UpdateOne


@dataclass(frozen=True)
class LikeGpu:
    """Steps of one optimizer that have a GPU's bits (:class:`~sp_lightning.core.updates.gpu_bits.StepsLikeGpu`).

    Args:
        device: the GPU.
        fuse: True if groups step fused whose user has not decided.
        norms: makes the object that computes norms with the GPU's bits; None if norms have the CPU's bits.
        kind: the kind of the optimizer; None before :meth:`against` has found that its steps have the GPU's bits.
    """

    device: torch.device
    fuse: bool
    norms: Callable[[], Norms] | None = None
    kind: Kind | None = None

    def of(self, group: Mapping[str, Any]) -> UpdateOne:
        return partial(step_like, self.reference(group))

    def reference(self, group: Mapping[str, Any]) -> Like:
        """Returns the reference of a group's steps: the GPU, and the form of torch's steps on it."""
        fused = group.get("fused")
        return Like(self.device, "fused" if fused or (self.fuse and fused is None) else "foreach")

    def against(self, optimizer: torch.optim.Optimizer, module: nn.Module, *, scaled: bool) -> str:
        """Returns why an optimizer's steps differ from the GPU's in the last bits; empty if they do not.

        Args:
            optimizer: the optimizer.
            module: the module that it trains.
            scaled: True if gradients are scaled (``16-mixed``).
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
        with torch.DisableTorchFunctionSubclass():  # must not wait for pending updates: no reason depends on them
            reasons = (self._against(optimizer, group) for group in optimizer.param_groups)
            return next((f"{name}: {reason}" for reason in reasons if reason), "")

    def against_group(self, group: Mapping[str, Any], known: set[int]) -> str:
        # `against` has confirmed the formulas at set-up. Settings may have changed since, and parameters may have been added.
        if reason := _against_settings(group, self.reference(group).form):
            return reason
        if any(map(_is_laid_out_otherwise, group["params"])):
            return "a gradient's memory has another order than its weight's"
        new = [p for p in group["params"] if id(p) not in known and may_get_gradients(p)]
        if reason := next(filter(None, map(_against_parameter, new)), ""):
            return reason
        known.update(map(id, new))
        with torch.DisableTorchFunctionSubclass():
            dtypes = {p.dtype for p in group["params"] if may_get_gradients(p)}
        return "" if self.kind is None else self._unconfirmed(self.kind, group, dtypes)

    def against_norms(self, optimizer: torch.optim.Optimizer) -> str:
        """Returns why norms of an optimizer's gradients differ from the GPU's in the last bits; empty if they do not."""
        with torch.DisableTorchFunctionSubclass():
            trained = [p for group in optimizer.param_groups for p in group["params"] if may_get_gradients(p)]
            if len({p.dtype for p in trained}) > 1:
                return "weights have several dtypes"
        largest = max((p.numel() for p in trained), default=0)
        return "" if has_norms_of(self.device, largest) else "no formula has the bits of norms on this GPU"

    def _against(self, optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> str:
        form = self.reference(group).form
        trained = [p for p in group["params"] if may_get_gradients(p)]
        return (
            _against_settings(group, form)
            or next(filter(None, map(_against_parameter, trained)), "")
            or _against_state(state_of(optimizer), trained)
            or self._unconfirmed(KINDS[type(optimizer)], group, {p.dtype for p in trained})
        )

    def _unconfirmed(self, kind: Kind, group: Mapping[str, Any], dtypes: Iterable[torch.dtype]) -> str:
        like = self.reference(group)
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
    """Returns True if a gradient has other strides than its weight. In this case torch steps the group with other operators."""
    gradient = unwidened(stored(parameter))
    return gradient is not None and gradient.layout is torch.strided and gradient.stride() != parameter.stride()


def _variants(kind: Kind, group: Mapping[str, Any], dtypes: Iterable[torch.dtype], like: Like) -> Iterator[Variant]:
    """Yields the variants of a group's steps. Variants with weight decay are always among them: a scheduler may set it later."""
    own: list[dict[str, Any]] = [{}]
    if kind in ("adam", "adamw"):
        own = [{"amsgrad": group["amsgrad"], "near": is_near(group["betas"][0])}]
    elif kind == "sgd":
        momentum, nesterov = group["momentum"] != 0, group["nesterov"]
        own = [{"momentum": momentum, "nesterov": nesterov, "first": first} for first in {False, momentum}]
    for dtype, decays, more in product(sorted(dtypes, key=str), {True, bool(group["weight_decay"])}, own):
        yield Variant(kind, dtype, None, 0, maximize=group["maximize"], decays=decays, weight=dtype, like=like, **more)


class ConfirmedBits(GpuBits):
    """The optimizers of a run whose CPU steps have a GPU's bits, and the reason why another one has not."""

    def __init__(self, device: torch.device | None) -> None:
        super().__init__(device)
        self._why_norms = ""
        self.stepping: dict[torch.optim.Optimizer, LikeGpu] = {}

    def decide(
        self,
        optimizers: Iterable[torch.optim.Optimizer],
        module: nn.Module,
        against: str,
        *,
        fuse: bool,
        scaled: bool,
        clips: bool,
    ) -> None:
        self._why, self._why_norms, self.stepping = against, "", {}
        if self._gpu is None or against:
            return
        like = LikeGpu(self._gpu, fuse)
        for optimizer in optimizers:
            if why := like.against(optimizer, module, scaled=scaled):
                self._why = self._why or why
                continue
            why = like.against_norms(optimizer) if clips else ""
            self._why_norms = self._why_norms or why
            norms = partial(GpuNorms, self._gpu) if clips and not why else None
            self.stepping[optimizer] = replace(like, norms=norms, kind=KINDS[type(optimizer)])

    @property
    def whole(self) -> bool:
        return self._gpu is not None and not (self._why or self._why_norms)

    def sentences(self, *, automatic: bool, mixed: bool = False) -> list[str]:
        if self._gpu is None:
            return []
        alike, why = set[str](), self._why
        for optimizer, like in self.stepping.items():
            name = type(optimizer).__name__
            for group in optimizer.param_groups:
                if against := like.against_group(group, set()):  # the group has changed since `decide`
                    why = why or f"{name}: {against}"
                else:
                    alike.add(f"{name} ({like.reference(group).form})")
        said = []
        if alike:
            said.append(f"{' and '.join(sorted(alike))} steps on the CPU with the bits of its steps on this GPU.")
        if alike and not automatic:
            said.append("Norms that you take yourself, as in clip_gradients, have the CPU's last bits.")
        if self._why_norms:
            said.append(f"Norms for clipping differ from the GPU's in the last bits: {self._why_norms}.")
        return [*said, *self._against_cpu(why, mixed=mixed)]
