"""Frozen weights that a checkpoint leaves out, because the program that resumes from it has them already.

A checkpoint that lacks weights is only worth something if they can be had again. So a weight is left out only if the
module had its values by itself: no run has trained it, no checkpoint has given it others, and it is what it was when
the first run began. The file holds a digest of each, so that loading it is refused if the module has other weights.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from sp_lightning.layers.writes import digest
from sp_lightning.model.wrapped import parts
from sp_lightning.trainer.checkpoint_io import BESIDE_AVERAGES

FROZEN = "superpipeline_frozen"
"""The key of a checkpoint under which the names of the weights that it leaves out stand, with digests and dtypes."""

LeftOut = dict[str, tuple[str, str]]
"""The digest and the dtype of each weight that is left out, by name."""

_first: Any = WeakIdKeyDictionary()
"""The digest of each parameter when a run found it frozen for the first time."""

_acquired: Any = WeakIdKeyDictionary()
"""Parameters whose values their module would not have by itself: trained in this process, or loaded from a checkpoint."""


def note_trained(module: nn.Module) -> None:
    """Notes that training begins or goes on: whatever is not frozen now will have other values."""
    for parameter in module.parameters():
        if parameter.requires_grad:
            _acquired[_remembered(parameter)] = True


def note_loaded(module: nn.Module, state: Mapping[str, Any], restored: Collection[str] = ()) -> None:
    """Notes which weights a checkpoint's state is about to give other values than they have.

    Args:
        module: whose weights they are.
        state: the state in the checkpoint.
        restored: names of weights that have no values but those.
    """
    for name, parameter in _named(module):
        loaded = state.get(name)
        if isinstance(loaded, Tensor) and (name in restored or not _same(loaded, parameter)):
            _acquired[_remembered(parameter)] = True


class FrozenWeights:
    """The frozen weights of a run.

    Args:
        module: as training begins, with its parameters on the host.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        remembered = {name: _remembered(parameter) for name, parameter in _named(module)}
        self._digests = {name: _first.setdefault(remembered[name], now) for name, now in self._now().items()}

    def _now(self) -> dict[str, str]:
        named = _named(self.module)
        frozen = {name: p for name, p in named if not p.requires_grad and _remembered(p) not in _acquired}
        with ThreadPoolExecutor(torch.get_num_threads()) as threads:
            return dict(zip(frozen, threads.map(digest, frozen.values()), strict=True))

    def leave_out(self, state: dict[str, Any]) -> LeftOut:
        """Takes out of a state dictionary every weight that is frozen and unchanged and stands there as it is."""
        note_trained(self.module)
        parameters, now = dict(_named(self.module)), self._now()
        left_out = {
            name: (found, str(parameters[name].dtype))
            for name, found in now.items()
            if found == self._digests.get(name) and name in state and _is_itself(state[name], parameters[name])
        }
        for name in left_out:
            del state[name]
        return left_out


def fill_checkpoint(module: nn.Module, checkpoint: dict[str, Any]) -> None:
    """Puts the module's own weights into a checkpoint where it leaves some out.

    Raises:
        RuntimeError: the module does not have them, or has others.
    """
    for key in ("state_dict", BESIDE_AVERAGES):
        if key in checkpoint and FROZEN in checkpoint:
            copies = key == BESIDE_AVERAGES  # the averages are loaded over the module's weights before these are
            checkpoint[key] = _filled(module, checkpoint[key], checkpoint[FROZEN], copies=copies)


def _filled(module: nn.Module, state: Mapping[str, Any], left_out: LeftOut, *, copies: bool) -> dict[str, Any]:
    parameters, filled = dict(_named(module)), dict(state)
    others = []
    for name, (expected, dtype) in left_out.items():
        if name in state:  # a callback has put it back, as averaged weights are
            continue
        if name not in parameters:
            raise RuntimeError(
                f"This checkpoint leaves out the frozen weight {name!r} (save_frozen=False), and the module has no weight of "
                "that name. Build the module as it was when the checkpoint was written."
            )
        if parameters[name].is_meta or digest(_cast(parameters[name], dtype)) != expected:
            others.append(name)
        filled[name] = _cast(parameters[name], dtype).detach()
        if copies:
            filled[name] = filled[name].clone()
    if others:
        raise RuntimeError(
            f"This checkpoint leaves out the frozen weight {others[0]!r}{f' and {len(others) - 1} more' * (len(others) > 1)} "
            "(save_frozen=False), and the module has other values. Expected the values from when it was written. Load the same "
            "pretrained weights into a new module, before trainer.fit (validate, test, predict)."
        )
    return filled


def _remembered(parameter: Tensor) -> Tensor:
    """The tensor that stands for a parameter in what is remembered of it: of a wrapped one the first that it consists of.

    torch 2.15 cannot move a module to another device while a wrapped parameter of it is weakly referenced.
    """
    first: Tensor = next(parts("", parameter))[1]
    return first


def _same(loaded: Tensor, parameter: Tensor) -> bool:
    return digest(loaded) == digest(_cast(parameter, str(loaded.dtype)))


def _cast(parameter: Tensor, dtype: str) -> Tensor:
    """Converts a parameter as a trainer of another precision does. A wrapped one has no dtype of its own and stays."""
    if len([*parts("", parameter)]) > 1 or str(parameter.dtype) == dtype:
        return parameter
    return parameter.detach().to(getattr(torch, dtype.removeprefix("torch.")))


def _is_itself(value: Any, parameter: Tensor) -> bool:
    """Whether a state dictionary holds the parameter as it is, and not another form of it."""
    if not isinstance(value, Tensor) or type(value) is not type(parameter.detach()):
        return False
    pairs = zip(parts("", value), parts("", parameter), strict=True)
    return all(
        (a.data_ptr(), a.shape, a.stride(), a.dtype) == (b.data_ptr(), b.shape, b.stride(), b.dtype)
        for (_, a), (_, b) in pairs
    )


def _named(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    return module.named_parameters(remove_duplicate=False)
