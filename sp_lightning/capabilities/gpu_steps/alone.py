"""Finds out whether an optimizer steps each parameter by itself, and checks the steps of classes that only declare it."""

from __future__ import annotations

import pickle
import random
import sys
from collections.abc import Iterable, Sequence
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from sp_lightning.core.device.device import Device, Stream, Wait
from sp_lightning.core.torch_compat.private import is_traceable_wrapper_subclass, tree_leaves
from sp_lightning.core.updates.fused import is_of_bitsandbytes, is_separable

_ALONE = {
    "ASGD", "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "Muon", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD",
}  # fmt: skip
"""torch's optimizers that step each parameter by itself. LBFGS and SparseAdam do not."""

DECLARES = "steps_each_parameter_alone"
"""The attribute by which a user's class declares that it steps each parameter by itself."""


def steps_alone(optimizer: Any) -> bool:
    """Returns True if an optimizer steps each parameter by itself. Then steps of layers are bit-identical to the whole step."""
    return not is_declared(optimizer) or bool(getattr(type(optimizer), DECLARES, False))


def is_declared(optimizer: Any) -> bool:
    """Returns True if the class of an optimizer has to declare that it steps each parameter by itself.

    Optimizers of torch, bitsandbytes and torchao that are known to do so need no declaration.
    """
    if is_torchs(optimizer):
        return type(optimizer).__name__ not in _ALONE
    # torchao's are not separable with stochastic rounding, which draws random numbers in the order of all parameters.
    return not (is_of_bitsandbytes(optimizer) or is_separable(optimizer))


def is_torchs(optimizer: Any) -> bool:
    """Returns True if an optimizer's class is one of torch's. A class that derives from one may step in its own way."""
    kind = type(optimizer)
    return getattr(torch.optim, kind.__name__, None) is kind


def against_gpu(optimizers: Sequence[Any]) -> str:
    """Returns why optimizers cannot step on the GPU; empty if they can."""
    for optimizer in optimizers:
        if steps_alone(optimizer):
            continue
        name = type(optimizer).__name__
        if is_torchs(optimizer):
            return f"{name} steps all parameters together"
        declares = f"{name}.{DECLARES} = True"
        return f"{name} is not known to step each parameter by itself. If it does, say so in its class: {declares}"
    return next(filter(None, map(depends_on_places, optimizers)), "")


def depends_on_places(optimizer: Any) -> str:
    """Returns why an optimizer depends on the identity or the address of its parameters; empty if it does not.

    The copies that step on the GPU have neither.
    """
    # bitsandbytes' PytorchLARS is an ordinary optimizer: it has no `mng`.
    if not is_of_bitsandbytes(optimizer) or not hasattr(optimizer, "mng"):
        return ""
    if optimizer.is_paged:
        return (
            f"{type(optimizer).__name__} pages its state by itself. Its class without Paged needs no more memory here"
        )
    manager = optimizer.mng
    if manager.index2config or manager.pid2config or manager.module_weight_config_triple:
        return "bitsandbytes' GlobalOptimManager has settings for single parameters, which it finds by their places"
    return ""


class DeclaredStep:
    """Checks the step of a user's class, which may change only parameters and their own state. Other changes would be lost.

    Made before the step. :meth:`compare` is called after it.

    Args:
        part_of: the part of the optimizer that steps, with its settings.
        twins: the parameters that ``part_of`` steps: those on the GPU, or the host parameters of a layer that the CPU steps.
        device: the GPU.
        count: False for host parameters: other threads may refer to them at any time, so new references prove nothing.
    """

    def __init__(self, part_of: Any, twins: Sequence[nn.Parameter], device: Device, *, count: bool = True) -> None:
        self._device = device
        self._part = part_of
        self._twins = twins
        self._attributes = _settings(vars(part_of))
        self._groups = [_settings(group) for group in part_of.param_groups]
        self._of_twins = [dict(vars(twin)) for twin in twins]
        self._gradients = [twin.grad for twin in twins]
        # New state adds a reference to its parameter, the key. So the parameters that have state already are recorded.
        self._known = set(part_of.state)
        self._random = device.random_states()
        self._own_generators = _generator_states([self._attributes, *self._groups])
        # Other threads (for example a logger's) may draw from the generators of Python and NumPy. So only the first step of each
        # layer, which has no state yet, compares them.
        self._python = None if self._known else _python_states()
        self._references = [sys.getrefcount(twin) if count else sys.maxsize for twin in twins]

    def compare(self, state: dict[Any, Any]) -> None:
        """Compares the optimizer and its parameters with those before the step.

        Args:
            state: the state of the parameters.

        Raises:
            RuntimeError: the step has changed something else, or has made state that cannot be copied between host and GPU.
        """
        part_of, twins = self._part, self._twins
        groups = [_settings(group) for group in part_of.param_groups]
        new = [twin in state and twin not in self._known for twin in twins]
        allowed = [count + each for count, each in zip(self._references, new, strict=True)]
        reasons = {
            "writes its param_groups": not all(map(_same, self._groups, groups)),
            "writes attributes of the optimizer": not _same(self._attributes, _settings(vars(part_of))),
            "keeps state that is no parameter's": any(all(key is not twin for twin in twins) for key in state),
            "empties state": any(not state.get(twin) for twin in twins if twin in state or twin in self._known),
            "draws random numbers": not all(map(torch.equal, self._random, self._device.random_states()))
            or self._own_generators != _generator_states([self._attributes, *self._groups])
            or self._python not in (None, _python_states()),
            "sets p.grad": any(twin.grad is not was for twin, was in zip(twins, self._gradients, strict=True)),
            "writes attributes of parameters": not all(map(_same, self._of_twins, (vars(twin) for twin in twins))),
            "keeps parameters": self._keeps_more(allowed),
        }
        what = next((what for what, holds in reasons.items() if holds), None) or _cannot_pass(state, twins)
        if what is not None:
            raise RuntimeError(
                f'optimizer_on="gpu" and gpu_layers step layer by layer, but {type(part_of).__name__}.step {what}, although it '
                f"has {DECLARES} = True: it may read and write one parameter, its gradient and its state[p] at a time, and "
                "nothing else. Leave both options out: then the CPU steps all layers at once."
            )

    def _keeps_more(self, allowed: Sequence[int]) -> bool:
        """Returns True if anything refers to the parameters beyond the allowed number of references."""

        def more() -> bool:
            counts = [sys.getrefcount(twin) for twin in self._twins]
            return any(now > most for now, most in zip(counts, allowed, strict=True))

        if more():  # some backends' kernels refer to their tensors until they have run
            self._device.synchronize(self._device.record(Stream.STEP), Wait.TAKE_AFTER_STEP)
        return more()


def _python_states() -> tuple[Any, ...]:
    """Returns the random states of Python and NumPy."""
    _, numbers, position, *_ = cast(tuple[Any, ...], np.random.get_state())
    return random.getstate(), bytes(numbers), position


def _generator_states(settings: Iterable[dict[str, Any]]) -> list[bytes]:
    """Returns the states of an optimizer's own random generators."""
    values = [value for each in settings for value in each.values()]
    states = [bytes(value.get_state().numpy()) for value in values if isinstance(value, torch.Generator)]
    kinds = (random.Random, np.random.Generator, np.random.RandomState)
    others = [value for value in values if isinstance(value, kinds) and not isinstance(value, random.SystemRandom)]
    return [*states, *map(pickle.dumps, others)]


def _settings(of: dict[str, Any]) -> dict[str, Any]:
    """Returns the attributes of an optimizer, or the entries of a group, without parameters, groups and state."""
    return {name: value for name, value in of.items() if name not in ("params", "param_groups", "state")}


def _same(before: dict[str, Any], after: dict[str, Any]) -> bool:
    return before.keys() == after.keys() and all(after[name] is value for name, value in before.items())


def _cannot_pass(state: dict[Any, Any], twins: Iterable[nn.Parameter]) -> str | None:
    """Returns why some state cannot be copied between host and GPU; None if all of it can."""
    memory = {
        tensor.data_ptr() for twin in twins for tensor in (twin, twin.grad) if tensor is not None and tensor.numel()
    }
    places = set[int]()
    for leaf in tree_leaves([dict(each) for each in state.values()]):
        if not isinstance(leaf, Tensor):
            if not isinstance(leaf, (bool, int, float, complex, str, bytes, type(None))):
                return f"keeps a {type(leaf).__name__} in its state"
            continue
        if leaf.layout is not torch.strided or leaf.requires_grad:
            return "keeps a sparse tensor, or one that requires a gradient, in its state"
        if leaf.numel() and not is_traceable_wrapper_subclass(leaf):
            if leaf.data_ptr() in memory | places:
                return "keeps a view of a parameter, of its gradient, or of other state in its state"
            places.add(leaf.data_ptr())
    return None
