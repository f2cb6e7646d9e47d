"""Frozen weights that a checkpoint leaves out, because whoever resumes it has them already.

A checkpoint that lacks weights is only worth something if they can be had again. So a weight is left out only where it is
what it was when training began and no checkpoint gave it another value; the file has a digest of each, and whoever loads it
is told if the module's own weights are others.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from sp_lightning.wrapped import parts

FROZEN = "superpipeline_frozen"
"""Of a checkpoint: names of the weights that it leaves out, and their digests."""

_CHUNK = 2**15  # words of 8 bytes: a digest is one of sums of so many, each times another odd number


def digest(tensor: Tensor) -> str:
    """What tells a weight's values from others; one pass over its memory."""
    found = hashlib.blake2b(digest_size=16)
    for _, part in parts("", tensor.detach()):
        flat = part.contiguous().reshape(-1).view(torch.uint8)
        flat = flat.clone() if flat.storage_offset() % 8 else flat
        words = flat[: flat.nbytes // 8 * 8].view(torch.int64)
        chunks, rest = words[: len(words) // _CHUNK * _CHUNK], words[len(words) // _CHUNK * _CHUNK :]
        odd = torch.arange(1, 2 * _CHUNK, 2)
        sums = [
            *(chunks.view(-1, _CHUNK) @ odd).tolist(),
            int(rest @ odd[: len(rest)]),
            *flat[8 * len(words) :].tolist(),
        ]
        found.update(repr((part.dtype, tuple(part.shape), sums)).encode())
    return found.hexdigest()


class Frozen:
    """The frozen weights of a run.

    Args:
        module: as training begins, its parameters on the host.
        others: names of those that a checkpoint has given other values than the module had by itself.
    """

    def __init__(self, module: nn.Module, others: set[str]) -> None:
        self._module = module
        self._digests = {name: digest(p) for name, p in _named(module) if not p.requires_grad and name not in others}

    def leave_out(self, state: dict[str, Any]) -> dict[str, str]:
        """Take out of a state dictionary what is frozen and unchanged. Returns names and digests."""
        left_out = {
            name: self._digests[name]
            for name, parameter in _named(self._module)
            if name in state and name in self._digests and not parameter.requires_grad
            and digest(parameter) == self._digests[name]
        }  # fmt: skip
        for name in left_out:
            del state[name]
        return left_out


def differing(module: nn.Module, state: Mapping[str, Any]) -> set[str]:
    """The frozen weights to which a checkpoint's state is about to give other values."""
    return {
        name
        for name, parameter in _named(module)
        if not parameter.requires_grad and isinstance(found := state.get(name), Tensor)
        if digest(found) != digest(parameter)
    }


def fill_in(module: nn.Module, state: Mapping[str, Any], left_out: Mapping[str, str]) -> dict[str, Any]:
    """A checkpoint's state with the module's own weights where it leaves some out.

    Raises:
        RuntimeError: the module does not have them, or others.
    """
    own = dict(_named(module))
    filled = dict(state)
    for name, expected in left_out.items():
        if name in state:  # put back by a callback, as averaged weights are
            continue
        if name not in own:
            raise RuntimeError(
                f"This checkpoint leaves out the frozen weight {name!r} (save_frozen=False), and the module has none of that "
                "name. Build the module as it was when the checkpoint was written."
            )
        if digest(own[name]) != expected:
            raise RuntimeError(
                f"This checkpoint leaves out the frozen weight {name!r} (save_frozen=False), and the module has other values "
                "than it had when the checkpoint was written. Load the same pretrained weights before trainer.fit (validate, "
                "test, predict), in the same dtype."
            )
        filled[name] = own[name]
    return filled


def _named(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    return module.named_parameters(remove_duplicate=False)
