"""Buffers that are in no file because transformers computes them, such as the frequencies of rotary embeddings."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from sp_lightning.model.without_values import WithoutValues, find_without_values, give_values

_HAS_VALUES = "_is_hf_initialized"
"""The attribute by which transformers 5 knows the parameters and buffers that its initialisation is to leave alone."""


def compute_buffers(module: nn.Module) -> None:
    """Has transformers compute the buffers on the meta device, as its ``from_pretrained`` does.

    What it does not compute stays there.

    Args:
        module: the root. Its parameters have values.
    """
    modeling: Any = sys.modules.get("transformers.modeling_utils")
    initialization: Any = sys.modules.get("transformers.initialization")  # there is none before version 5
    if modeling is None or initialization is None or not find_without_values(module):
        return
    for child, model in _within(module, None, modeling.PreTrainedModel):
        buffers = {key: buffer for key, buffer in child._buffers.items() if buffer is not None and buffer.is_meta}
        if model is not None and buffers:
            with torch.random.fork_rng(devices=[]), torch.no_grad(), initialization.guard_torch_init_functions():
                _compute(child, buffers, model)


def _within(module: nn.Module, model: Any, kind: type) -> Iterator[tuple[nn.Module, Any]]:
    """All modules, each with the model of transformers in which it is."""
    model = module if isinstance(module, kind) else model
    yield module, model
    for child in module.children():
        yield from _within(child, model, kind)


def _compute(child: nn.Module, buffers: dict[str, Tensor], model: Any) -> None:
    """Computes one module's buffers twice, over zeros and over ones: those that are equal were computed as a whole."""
    results = []
    for filler in (0, 1):
        child._buffers.update({key: torch.full_like(each, filler, device="cpu") for key, each in buffers.items()})
        with _left_alone(child, buffers):
            model._init_weights(child)
        results.append({key: child._buffers[key] for key in buffers})
    child._buffers.update(buffers)
    for key, buffer in buffers.items():
        value, again = (each[key] for each in results)
        if value is not None and again is not None and torch.equal(value, again):
            give_values(WithoutValues((key,), buffer), value)


@contextmanager
def _left_alone(child: nn.Module, buffers: dict[str, Tensor]) -> Iterator[None]:
    """Everything in a module but these buffers is marked, so that transformers leaves it alone."""
    tensors = [tensor for tensor in (*child.parameters(), *child.buffers()) if not hasattr(tensor, _HAS_VALUES)]
    marked = [tensor for tensor in tensors if not any(tensor is child._buffers[key] for key in buffers)]
    for tensor in marked:
        setattr(tensor, _HAS_VALUES, True)
    try:
        yield
    finally:
        for tensor in marked:
            delattr(tensor, _HAS_VALUES)
