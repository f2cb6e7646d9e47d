"""Finds tensors on the meta device, which have no values, and gives them values or raises an error.

The tensor objects stay the same, so tied weights, parameter lists and the user's references remain valid. Some buffers are in
no file, because transformers computes them, for example the frequencies of rotary embeddings. For these buffers
:func:`compute_buffers` calls transformers.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from sp_lightning.core.torch_compat.private import exchange_memory, gradient_hooks, has_accumulation_hooks, storage_id


class WithoutValues(NamedTuple):
    """A parameter or a buffer on the meta device.

    Attributes:
        names: the qualified names. A tied parameter has several names.
        tensor: the tensor object that the modules hold.
    """

    names: tuple[str, ...]
    tensor: Tensor


def named_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yields all parameters, then all buffers, each under all its names."""
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def find_without_values(module: nn.Module) -> list[WithoutValues]:
    """Returns the parameters and buffers on the meta device. Lazy parameters, which have no shape yet, are not among them.

    Raises:
        ValueError: a tensor on the meta device cannot be given values, for example a view or a tensor subclass.
    """
    names: dict[Tensor, list[str]] = {}
    for name, tensor in named_tensors(module):
        if tensor.is_meta and not nn.parameter.is_lazy(tensor):
            names.setdefault(tensor, []).append(name)
    found = [WithoutValues(tuple(each), tensor) for tensor, each in names.items()]
    if found:
        _refuse_special(module, found)
    return found


def _refuse_special(module: nn.Module, found: list[WithoutValues]) -> None:
    """Raises a ValueError if one of these tensors would lose its class, its hooks or its shared memory when it gets values."""
    scripted = {
        p for child in module.modules() if isinstance(child, torch.jit.ScriptModule) for p in child.parameters()
    }
    storages: dict[int, str] = {}
    for (name, *_), tensor in found:
        other = storages.setdefault(storage_id(tensor.untyped_storage()), name)
        reason = ""
        if type(tensor) not in (Tensor, nn.Parameter):
            reason = f"is of class {type(tensor).__name__}"
        elif tensor in scripted:
            reason = "belongs to a ScriptModule"
        elif gradient_hooks(tensor) or has_accumulation_hooks(tensor):
            reason = "has hooks, which would be lost"
        elif other != name:
            reason = f"is a view of the memory of {other!r}"
        if reason:
            raise ValueError(
                f"{name!r} is on the meta device and {reason}. Only plain parameters and buffers with memory of their own can "
                "be given values there: build it on the CPU."
            )


def refuse_without_values(module: nn.Module) -> None:
    """Checks that all parameters and buffers have values: they are neither lazy nor on the meta device.

    They are not initialised later, because the results would differ from those of an initialisation on the CPU:

    - On the meta device ``nn.init.trunc_normal_`` (torch 2.15) and ``post_init`` (transformers 5) do nothing.
    - ``reset_parameters`` does not repeat changes that parent modules made after it.
    - On the meta device no random numbers were drawn, so the random numbers that follow differ.

    Raises:
        ValueError: a parameter or buffer has no values.
    """
    for name, parameter in module.named_parameters():
        if nn.parameter.is_lazy(parameter):
            raise ValueError(
                f"Parameter {name!r} has no shape yet (a lazy module). Run one batch through the module before "
                "fit, or give the module its sizes."
            )
    parameters = set(module.parameters())
    for name, tensor in named_tensors(module):
        if tensor.is_meta and tensor in parameters:
            raise ValueError(
                f"Parameter {name!r} is on the meta device and has no values. Give them from a file: "
                "SuperpipelineStrategy(load_weights_from=FILE), or ckpt_path=FILE of trainer.fit (validate, test, predict). "
                "Without a file, build the module on the CPU, so that it is initialised. Set-up moves it layer by layer and "
                "needs no second copy (with several devices, each process builds one)."
            )
        if tensor.is_meta:
            raise ValueError(
                f"Buffer {name!r} is on the meta device, has no values, and is in no file that was given. Build it on the CPU: "
                'make its values with device="cpu", or use accelerate.init_empty_weights() in place of torch.device("meta"), '
                "which leaves buffers on the CPU."
            )


def give_values(found: WithoutValues, value: Tensor) -> None:
    """Gives values to a tensor on the meta device. The tensor object and its attributes stay.

    Args:
        found: the tensor.
        value: the values, on the CPU, with the tensor's shape. If dtype and strides are equal, a parameter takes over the
            memory of ``value``. Otherwise the values are copied and converted as by ``copy_``. A buffer always gets a copy.
    """
    tensor = found.tensor
    with torch.no_grad():
        alike = (value.dtype, value.stride(), value.device.type) == (tensor.dtype, tensor.stride(), "cpu")
        if not alike or not isinstance(tensor, nn.Parameter):
            value = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu").copy_(value)
    exchange_memory(tensor, nn.Parameter(value, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else value)


# ---------------------------------------------------------------------- buffers that transformers computes

_HAS_VALUES = "_is_hf_initialized"
"""The attribute that marks parameters and buffers which the initialisation of transformers 5 must not change."""


def compute_buffers(module: nn.Module) -> None:
    """Computes buffers on the meta device with transformers, as ``from_pretrained`` does.

    Buffers that transformers does not compute stay on the meta device. Versions before 5 do not compute buffers.

    Args:
        module: the root. Its parameters have values.
    """
    modeling: Any = sys.modules.get("transformers.modeling_utils")
    initialization: Any = sys.modules.get("transformers.initialization")  # exists since version 5
    if modeling is None or initialization is None or not find_without_values(module):
        return
    for child, model in _with_model(module, None, modeling.PreTrainedModel):
        buffers = {key: buffer for key, buffer in child._buffers.items() if buffer is not None and buffer.is_meta}
        if model is not None and buffers:
            # An initialisation may draw random numbers. The random state of the user must not change.
            with torch.random.fork_rng(devices=[]), torch.no_grad(), initialization.guard_torch_init_functions():
                _compute(child, buffers, model)


def _with_model(module: nn.Module, model: Any, kind: type) -> Iterator[tuple[nn.Module, Any]]:
    """Yields a module and all modules in it, each with the innermost transformers model that contains it, or None.

    Args:
        module: the module.
        model: the transformers model that contains the module; None if there is none.
        kind: the base class of transformers models.
    """
    model = module if isinstance(module, kind) else model
    yield module, model
    for child in module.children():
        yield from _with_model(child, model, kind)


def _compute(child: nn.Module, buffers: dict[str, Tensor], model: Any) -> None:
    """Initialises a module's buffers with transformers, and gives values to the buffers that were written completely.

    The initialisation runs twice, on buffers of zeros and on buffers of ones. If the two results of a buffer differ, it was not
    written completely, and stays on the meta device.

    Args:
        child: the module.
        buffers: its buffers on the meta device, by name.
        model: the transformers model that contains the module.
    """
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
    """A context in which transformers does not change the parameters and buffers of a module, except ``buffers``.

    Marks the parameters and buffers, and removes the marks at the end.
    """
    tensors = [tensor for tensor in (*child.parameters(), *child.buffers()) if not hasattr(tensor, _HAS_VALUES)]
    marked = [tensor for tensor in tensors if not any(tensor is child._buffers[key] for key in buffers)]
    for tensor in marked:
        setattr(tensor, _HAS_VALUES, True)
    try:
        yield
    finally:
        for tensor in marked:
            delattr(tensor, _HAS_VALUES)
