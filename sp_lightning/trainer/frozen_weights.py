"""Leaves frozen weights out of checkpoints (``save_frozen=False``), because the program that resumes has them already.

A checkpoint without some weights is useful only if the program can build them again. So a weight is left out only if its values
are those of the module's construction: no run has trained it, no checkpoint has changed it, and it has not changed since training
first began with the weight frozen. The checkpoint has a digest of each omitted weight, so that loading raises an error if the
module has other weights.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn

from sp_lightning.core.model.digests import digest
from sp_lightning.core.model.wrapped import parts
from sp_lightning.trainer.checkpoint_io import BESIDE_AVERAGES

FROZEN = "superpipeline_frozen"
"""The key of a checkpoint for the omitted weights: their names, digests and dtypes."""

LeftOut = dict[str, tuple[str, str]]
"""The digest and the dtype of each omitted weight, by name."""

# Attributes of parameters. Weak dictionaries do not serve: torch.utils.swap_tensors raises for tensors with weak references.

_FIRST = "superpipeline_first"
"""The digest from the beginning of the first training with ``save_frozen=False`` in which the parameter was frozen."""

_ACQUIRED = "superpipeline_acquired"
"""True if a new module would not have the parameter: it was trained in this process, or loaded from a checkpoint."""


def note_trained(module: nn.Module) -> None:
    """Marks all parameters that are not frozen as trained. Called when training begins, and before a checkpoint is written."""
    for parameter in module.parameters():
        if parameter.requires_grad:
            vars(_remembered(parameter))[_ACQUIRED] = True


def note_loaded(module: nn.Module, state: Mapping[str, Any], restored: Collection[str]) -> None:
    """Marks the weights that a checkpoint changes, so that they are never left out. Called before the checkpoint is loaded.

    Args:
        module: the module into which the state is loaded.
        state: the state dictionary of the checkpoint.
        restored: names of weights that had no values of their own. They have the checkpoint's already.
    """
    for name, parameter in _named(module):
        loaded = state.get(name)
        if isinstance(loaded, Tensor) and (name in restored or not _same(loaded, parameter)):
            vars(_remembered(parameter))[_ACQUIRED] = True


class FrozenWeights:
    """The frozen weights of a run. The constructor computes the digest of each.

    Args:
        module: the module at the beginning of training, with its parameters on the host.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        remembered = {name: _remembered(parameter) for name, parameter in _named(module)}
        self._digests = {name: vars(remembered[name]).setdefault(_FIRST, now) for name, now in self._now().items()}

    def _now(self) -> dict[str, str]:
        """Returns the present digest of each frozen weight, by name, without trained and loaded weights."""
        named = _named(self.module)
        frozen = {name: p for name, p in named if not p.requires_grad and _ACQUIRED not in vars(_remembered(p))}
        with ThreadPoolExecutor(torch.get_num_threads()) as threads:
            return dict(zip(frozen, threads.map(digest, frozen.values()), strict=True))

    def leave_out(self, state: dict[str, Any]) -> LeftOut:
        """Removes from a state dictionary every frozen, unchanged weight whose entry is the parameter itself.

        An entry that is another tensor, for example an average, stays. Also marks weights that are unfrozen now as trained: user
        code may have unfrozen them since training began.

        Returns:
            The omitted weights.
        """
        note_trained(self.module)
        parameters = dict(_named(self.module))
        now = self._now()
        left_out = {
            name: (found, str(parameters[name].dtype))
            for name, found in now.items()
            if found == self._digests.get(name) and name in state and _is_itself(state[name], parameters[name])
        }
        for name in left_out:
            del state[name]
        return left_out


def fill_checkpoint(module: nn.Module, checkpoint: dict[str, Any]) -> None:
    """Adds the omitted weights to the state of a checkpoint, with the module's values. No-op if none were omitted.

    Args:
        module: the module into which the checkpoint will be loaded.
        checkpoint: the checkpoint, whose state dictionaries are replaced.

    Raises:
        RuntimeError: the module lacks an omitted weight, or has other values.
    """
    for key in ("state_dict", BESIDE_AVERAGES):
        if key in checkpoint and FROZEN in checkpoint:
            # Copies, because the averages are loaded first, and overwrite the module's weights.
            copies = key == BESIDE_AVERAGES
            checkpoint[key] = _filled(module, checkpoint[key], checkpoint[FROZEN], copies=copies)


def _filled(module: nn.Module, state: Mapping[str, Any], left_out: LeftOut, *, copies: bool) -> dict[str, Any]:
    """Returns a state dictionary with the omitted weights: views of the module's weights, or copies with ``copies``.

    Raises:
        RuntimeError: the module lacks an omitted weight, or has other values.
    """
    parameters, filled = dict(_named(module)), dict(state)
    others = []
    for name, (expected, dtype) in left_out.items():
        if name in state:  # a callback has added it again, for example averaged weights
            continue
        if name not in parameters:
            raise RuntimeError(
                f"This checkpoint leaves out the frozen weight {name!r} (save_frozen=False), and the module has no weight of "
                "that name. Build the same module as when the checkpoint was written."
            )
        if parameters[name].is_meta or digest(_cast(parameters[name], dtype)) != expected:
            others.append(name)
        filled[name] = _cast(parameters[name], dtype).detach()
        if copies:
            filled[name] = filled[name].clone()
    if others:
        more = f" and {len(others) - 1} more" if len(others) > 1 else ""
        raise RuntimeError(
            f"This checkpoint leaves out the frozen weight {others[0]!r}{more} "
            "(save_frozen=False), and the module has other values. Expected the values from when it was written. Load the same "
            "pretrained weights into a new module, before trainer.fit (validate, test, predict)."
        )
    return filled


def _remembered(parameter: Tensor) -> Tensor:
    """Returns the tensor that has the attributes: the parameter, or the first inner tensor of a wrapper subclass.

    ``Module.to`` exchanges the attributes of a wrapper subclass, also if nothing is moved.
    """
    first: Tensor = next(parts("", parameter))[1]
    return first


def _same(loaded: Tensor, parameter: Tensor) -> bool:
    return digest(loaded) == digest(_cast(parameter, str(loaded.dtype)))


def _cast(parameter: Tensor, dtype: str) -> Tensor:
    """Converts a parameter to a dtype, as a trainer of another precision does. Returns a wrapper subclass unchanged.

    A wrapper subclass of several tensors has no single dtype.
    """
    if len([*parts("", parameter)]) > 1 or str(parameter.dtype) == dtype:
        return parameter
    return parameter.detach().to(getattr(torch, dtype.removeprefix("torch.")))


def _is_itself(value: Any, parameter: Tensor) -> bool:
    """Returns True if an entry of a state dictionary is the parameter itself: same class, memory, shape and dtype."""
    if not isinstance(value, Tensor) or type(value) is not type(parameter.detach()):
        return False
    pairs = zip(parts("", value), parts("", parameter), strict=True)
    return all(
        (a.data_ptr(), a.shape, a.stride(), a.dtype) == (b.data_ptr(), b.shape, b.stride(), b.dtype)
        for (_, a), (_, b) in pairs
    )


def _named(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    return module.named_parameters(remove_duplicate=False)
