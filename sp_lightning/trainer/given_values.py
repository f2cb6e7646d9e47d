"""Gives modules on the meta device their values, from files of weights (safetensors, torch) or from a trainer's checkpoint.

Parameters become views of the mapped file, and the host store copies them layer by layer. So host memory has only one copy of the
model.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from torch import Tensor, nn

from sp_lightning.core.messages import LESS_HOST_MEMORY
from sp_lightning.core.model.without_values import WithoutValues, compute_buffers, find_without_values, give_values
from sp_lightning.trainer.host_memory import MACHINE, HostBudget, check_host
from sp_lightning.trainer.weight_files import fill, find_prefix, open_weights

_ALIGNMENT = 64
"""The alignment of tensors in torch's files, in bytes. Another ``checkpoint_io`` may return tensors with other alignments, at
which kernels may compute other bits.
"""


class GivenValues:
    """Gives modules on the meta device the user's values.

    Args:
        path: the file of ``load_weights_from``; None if the option is not given.
        stay: True if weights for which host memory has no room may stay in the file.
        budget: the limit of host memory.
    """

    def __init__(self, path: Path | None, *, stay: bool = False, budget: HostBudget = MACHINE) -> None:
        self._path = path
        self._stay = stay
        self._budget = budget
        self._has_read = False  # True after `restore` or `complete` has read the file

    def restore(self, module: pl.LightningModule, state: Mapping[str, Any]) -> set[str]:
        """Prepares a module for loading a checkpoint's state: gives values to parameters and buffers on the meta device.

        torch cannot load into such parameters. With ``load_weights_from``, the values are those of its file. Otherwise they are
        those of the checkpoint, if it has a plain tensor of the same shape.

        Args:
            module: the root.
            state: the state dictionary of the checkpoint.

        Returns:
            The names of the parameters and buffers that get their first values from the checkpoint.

        Raises:
            ValueError: the file does not fit.
            MemoryError: host memory has no room for the weights.
        """
        found = find_without_values(module)
        if found and self._path is not None:
            # Loading the checkpoint overwrites these values, so they must be in memory, not in the file.
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
        """Gives a module all available values. Called before layers are found, which raises an error for missing values.

        Args:
            module: the module.
            training: True if weights that are not frozen are trained. These must be in memory, not in the file.

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
            # After the file was read, buffers that it lacks still have no values. Only for parameters, the file is read again.
            if found and (not self._has_read or any(isinstance(each.tensor, nn.Parameter) for each in found)):
                trained = [each for each in found if training and each.tensor.requires_grad]
                self._read_file(module, found, self._path, trained)
        if not any(parameter.is_meta for parameter in module.parameters()):
            compute_buffers(module)

    def _read_file(
        self, module: pl.LightningModule, found: list[WithoutValues], path: Path, written: list[WithoutValues]
    ) -> None:
        """Gives values from the file.

        Args:
            module: the root.
            found: its parameters and buffers without values.
            path: the file.
            written: the members of ``found`` that will be written, and must be in memory. The others may stay in the file if
                ``stay`` allows it.
        """
        shapes, read = open_weights(path, "load_weights_from")
        prefix = find_prefix(module, found, shapes, path, "load_weights_from")
        self._check_room(written if self._stay else found)
        fill(module, found, prefix, shapes, read)
        self._has_read = True

    def _check_room(self, found: list[WithoutValues]) -> None:
        """Raises a MemoryError if host memory has no room for these tensors."""
        check_host({"for the weights": sum(each.tensor.nbytes for each in found)}, LESS_HOST_MEMORY, self._budget)
