"""Gives modules on the meta device their values, from files of weights (safetensors, torch) or from a trainer's checkpoint.

Parameters become views of the mapped file, and the host store copies them layer by layer. So host memory holds the model once.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from torch import Tensor, nn

from sp_lightning.model.weight_files import fill, find_prefix, open_weights
from sp_lightning.model.without_values import WithoutValues, compute_buffers, find_without_values, give_values
from sp_lightning.observe.messages import less_host_memory
from sp_lightning.plan.host_memory import MACHINE, HostBudget, check_host

_ALIGNMENT = 64
"""Bytes, as in torch's files. At other alignments, as in the files of a folder, kernels may compute other bits."""


class GivenValues:
    """Gives modules on the meta device the user's values.

    Args:
        path: the file of ``load_weights_from``; None without.
        stay: True if weights may stay in the file as far as host memory has no room for them.
        budget: limits host memory.
    """

    def __init__(self, path: Path | None, *, stay: bool = False, budget: HostBudget = MACHINE) -> None:
        self._path = path
        self._stay = stay
        self._budget = budget
        self._has_read = False  # True once values of the file were given, by `restore` or `complete`

    def restore(self, module: pl.LightningModule, state: Mapping[str, Any]) -> set[str]:
        """Prepares a module for loading a checkpoint's state: torch cannot load into parameters on the meta device.

        Args:
            module: the root.
            state: the state dictionary of the checkpoint.

        Returns:
            The names of the parameters that get their first values from the checkpoint.
        """
        found = find_without_values(module)
        if found and self._path is not None:
            # The checkpoint overwrites these values of the file, so they must be in memory.
            self._read_file(module, found, self._path, [each for each in found if state.keys() & each.names])
            return set()
        self._check_room(found)
        restored: set[str] = set()
        for each in found:
            plain = (state[name] for name in each.names if type(state.get(name)) in (Tensor, nn.Parameter))
            value = next((value for value in plain if value.shape == each.tensor.shape), None)
            if value is not None:
                give_values(each, value.clone() if value.data_ptr() % _ALIGNMENT else value)
                restored.update(each.names)
        return restored

    def complete(self, module: pl.LightningModule, *, training: bool) -> None:
        """Gives a module all available values before set-up, which raises an error for parameters without values.

        Args:
            module: the module.
            training: True if weights that are not frozen are trained, and so must be in memory.

        Raises:
            ValueError: the module has values already, or the file does not fit.
            MemoryError: host memory has no room for the weights that must be in memory.
        """
        found = find_without_values(module)
        if self._path is not None:
            if not found and not self._has_read:
                raise ValueError(
                    f"load_weights_from={str(self._path)!r} gives values to modules on the meta device, and all parameters of "
                    f'{type(module).__name__} have values. Leave it out, or build the module inside torch.device("meta").'
                )
            if found and (not self._has_read or any(isinstance(each.tensor, nn.Parameter) for each in found)):
                trained = [each for each in found if training and each.tensor.requires_grad]
                self._read_file(module, found, self._path, trained)
        if not any(parameter.is_meta for parameter in module.parameters()):
            compute_buffers(module)

    def _read_file(
        self, module: pl.LightningModule, found: list[WithoutValues], path: Path, written: list[WithoutValues]
    ) -> None:
        """Gives values from the file. Weights in ``written`` must be in memory."""
        shapes, read = open_weights(path, "load_weights_from")
        prefix = find_prefix(module, found, shapes, path, "load_weights_from")
        self._check_room(written if self._stay else found)
        fill(module, found, prefix, shapes, read)
        self._has_read = True

    def _check_room(self, found: list[WithoutValues]) -> None:
        """Raises a MemoryError if host memory has no room for these tensors."""
        check_host({"for the weights": sum(each.tensor.nbytes for each in found)}, less_host_memory(), self._budget)
