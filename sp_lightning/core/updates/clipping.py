"""Clips gradients for steps that are divided into layers: norms are computed during backward, and updates multiply."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_value_, clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer

from sp_lightning.core.device.device import Stream
from sp_lightning.core.torch_compat.private import has_accumulation_hooks, sparse_values
from sp_lightning.core.weights.gradient_roles import Change, Factor, change, refuse_freed, stored, unwidened
from sp_lightning.core.weights.gradients import each_row_once
from sp_lightning.core.weights.layer import StreamedLayer

if TYPE_CHECKING:
    from sp_lightning.core.engine.engine import Engine

Measured = dict[nn.Parameter, tuple[Tensor, int, Tensor]]
"""For each parameter the gradient that was measured, its version then, and its norm."""
_FOR_ANY_THREADS = (torch.float32, torch.bfloat16)
"""The dtypes of gradients whose norms do not depend on the number of threads."""


class Clipping:
    """Clips an optimizer's gradients as Lightning's precision plugins do. Results are bit-identical to torch's functions.

    Args:
        optimizer: the optimizer whose gradients are clipped.
        engine: the engine, which has the layers of these gradients.

    Attributes:
        pending: the change by which the updates clip gradients; None if they do not clip.
        at_once: True if gradients are clipped by this class, layer by layer, and not in the updates.
    """

    def __init__(self, optimizer: Optimizer, engine: Engine) -> None:
        self._optimizer = optimizer
        self._on_gpu = engine.stepper.steps_all  # norms are computed where layers are stepped
        self._engine = engine
        self._measured: Measured = {}
        self.pending: Change | None = None
        self.at_once = False

    def by_norm(self, optimizer: Optimizer, clip_val: float) -> None:
        """Clips by the norm of all gradients together. Computes norms that are not known yet."""
        everything = [p for group in optimizer.param_groups for p in group["params"]]
        parameters = [p for p in everything if stored(p) is not None]
        measured, self._measured = self._measured, {}
        # A hook may have written a gradient after its norm was measured.
        if any(map(has_accumulation_hooks, parameters)):
            measured = {}
        # get_total_norm computes the norm of each tensor. A norm in place of a gradient is unchanged, because it is a scalar.
        # The gradients of parameters that stay on the GPU are given as they are.
        if self._on_gpu:
            total = get_total_norm(self._norms_on_device(parameters))
        else:
            known = {each: self._norm_or_gradient(measured, each) for each in parameters}
            total = get_total_norm(self._engine.owners.norms(everything, known))
        if stay := [p for p in parameters if p in self._engine.found.on_gpu]:
            clip_grads_with_norm_(stay, clip_val, total)
        coefficient = torch.clamp(clip_val / (total + 1e-6), max=1.0).cpu()
        if self._on_gpu:
            self._engine.stepper.synchronize_norms()
        # As torch.nn.utils.clip_grads_with_norm_ does, for a gradient or a part of one.
        self._clip(Factor(coefficient) if coefficient != 1 else None)

    def by_value(self, optimizer: Optimizer, clip_val: float) -> None:
        """Clips each element of the gradients to at most ``clip_val`` and at least ``-clip_val``."""
        everything = [p for group in optimizer.param_groups for p in group["params"]]
        if stay := [p for p in everything if p in self._engine.found.on_gpu]:
            clip_grad_value_(stay, clip_val)
        self._clip(by_value(clip_val))

    def _clip(self, by: Change | None) -> None:
        """Sets the change by which the updates clip; with :attr:`at_once`, clips now."""
        self.pending = by
        if self.at_once:
            self.finish()

    def _norms_on_device(self, parameters: Sequence[nn.Parameter]) -> list[Tensor]:
        """Returns the norms of gradients. Sparse gradients are unchanged, because the step raises an error for them.

        Gradients of parameters that stay on the GPU are unchanged as well.
        """
        stay = self._engine.found.on_gpu
        gradients = [(p, gradient) for p in parameters if (gradient := stored(p)) is not None]
        normed = [p not in stay and gradient.layout is torch.strided for p, gradient in gradients]
        norms = iter(self._engine.stepper.norms([g for (_, g), by in zip(gradients, normed, strict=True) if by]))
        return [next(norms) if by else gradient for (_, gradient), by in zip(gradients, normed, strict=True)]

    def _norm_or_gradient(self, measured: Measured, parameter: nn.Parameter) -> Tensor:
        """Returns a gradient on the host, or its norm: if the norm is known, or the gradient is narrow or may leave memory."""
        gradient = stored(parameter)
        assert gradient is not None
        if (norm := _known_norm(measured, parameter, gradient)) is not None:
            return norm
        stays_readable = unwidened(gradient) is gradient and not self._in_memory(parameter)
        return gradient if stays_readable else self._engine.updating.norms.of(gradient)

    def _in_memory(self, parameter: nn.Parameter) -> bool:
        """Loads a gradient into host memory. Returns True if the next layer's gradients may take its place in memory."""
        layer = self._engine.updating.layer_of(parameter)
        return layer is not None and layer.use_gradients()

    def measure(self, layer: StreamedLayer) -> None:
        """Computes the norms of a layer's gradients during backward, in the background thread if possible.

        Leaves out a layer with a sparse gradient, and a layer with a gradient whose norm depends on the number of threads
        (float16).
        """
        parameters = [parameter for member in layer.with_masters for parameter in member.block.parameters]
        gradients = [(p, gradient) for p in parameters if (gradient := stored(p)) is not None]
        if any(g.layout is not torch.strided or g.dtype not in _FOR_ANY_THREADS for _, g in gradients):
            return

        measured, device, norms = self._measured, self._engine.device, self._engine.updating.norms

        def work(by: Stream | None) -> None:
            if measured is self._measured:  # otherwise the step has continued without these norms
                device.access([unwidened(gradient) for _, gradient in gradients], by, write=False)
                for parameter, gradient in gradients:
                    measured[parameter] = gradient, gradient._version, norms.of(gradient)

        if layer.use_gradients():
            work(None)  # in the background, the gradients might have left memory
        else:
            device.later(partial(work, Stream.UPDATE))

    def finish(self) -> None:
        """Clips gradients if no update does it: the step was not divided, or the gradient scaler has skipped it."""
        clip, self.pending = self.pending, None
        if clip is not None:
            stay = self._engine.found.on_gpu  # their gradients are clipped already
            for parameter in [p for group in self._optimizer.param_groups for p in group["params"] if p not in stay]:
                if not change(parameter, clip) and parameter.grad is not None:
                    self._in_memory(parameter)  # loads the gradient
                    clip(parameter.grad)

    def end(self) -> None:
        """Called when the step is over. Clips gradients that are not clipped yet, and forgets all norms."""
        self._measured = {}
        self.finish()


def norm_of_all(parameters: Sequence[nn.Parameter], engine: Engine, kind: float) -> Tensor:
    """Returns the norm of the gradients of all parameters together, bit-identical to ``torch.nn.utils.get_total_norm``.

    With several devices, all processes call it.

    Args:
        parameters: the module's parameters.
        engine: the engine.
        kind: as torch's ``norm_type``; not 0.

    Returns:
        A tensor without dimensions, in host memory; 0 without gradients.

    Raises:
        RuntimeError: gradients were freed.
    """
    updating, own = engine.updating, dict[nn.Parameter, Tensor]()
    for parameter in parameters:
        refuse_freed(parameter, "The norm of gradients was read")
        if (gradient := stored(parameter)) is not None and updating.owns(parameter):
            layer = updating.layer_of(parameter)
            if layer is not None:
                layer.use_gradients()
            if gradient.layout is not torch.strided:
                gradient = sparse_values(each_row_once(gradient))
            own[parameter] = updating.norms.of(gradient, kind).cpu()
    norms = engine.owners.norms(parameters, own)
    return torch.linalg.vector_norm(torch.stack(norms), kind) if norms else torch.tensor(0.0, device="cpu")


def _known_norm(measured: Measured, parameter: nn.Parameter, gradient: Tensor) -> Tensor | None:
    """Returns the norm that was measured during backward; None if there is none, or the gradient was written since."""
    known, version, norm = measured.get(parameter, (None, None, gradient))
    return norm if known is gradient and version == gradient._version else None


def by_value(clip_val: float) -> Change:
    """Returns a change that clips each element, as ``torch.nn.utils.clip_grad_value_`` does."""
    return lambda gradient: gradient.clamp_(-clip_val, clip_val)
