"""The reference of ``gpu_layers`` on a CPU that stands for both places: plain Lightning, whose steps are divided by place."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import nn

from sp_lightning.core.model.find import find_layers
from sp_lightning.tools.comparison.reference import StepsOnHost


class StepsByPlace(StepsOnHost):
    """Takes the CPU for a device that is not the host. Parameters that do not stay there are copied, and stepped fused."""

    host = torch.device("meta")


def staying(gpu_layers: int | float, module: nn.Module) -> Iterable[nn.Parameter]:
    """The parameters of the layers that stay."""
    return [parameter for layer in find_layers(module, gpu_layers=gpu_layers).stay for _, parameter in layer.parameters]


def by_place(gpu_layers: int | float, *, fuse: bool = True) -> Any:
    """The reference of a number of layers, or of a share."""
    return StepsByPlace(torch.device("cpu"), fuse=fuse, stay=partial(staying, gpu_layers))
