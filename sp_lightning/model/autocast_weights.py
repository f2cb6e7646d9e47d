"""Which weights travel as casts: those that autocast would cast in every use."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from sp_lightning.device.torch_private import FakeTensor, is_compiled
from sp_lightning.model.found import Place
from sp_lightning.model.torchscript import uses_torchscript

# Autocast casts the weight and the bias wherever one of these is called. A subclass may use them otherwise.
_CAST = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
# These read the weights of such children without calling the children.
_READS_CHILDREN = (nn.MultiheadAttention, nn.TransformerEncoderLayer)


def lowered_parameters(module: nn.Module, places: Mapping[nn.Parameter, tuple[Place, ...]]) -> set[nn.Parameter]:
    """The float32 parameters that nothing but the calls of their own modules is known to read."""
    reading = [
        child
        for child in module.modules()
        if isinstance(child, _READS_CHILDREN) or is_compiled(child) or uses_torchscript(child)
    ]
    excluded = {inner for child in reading for inner in child.modules()}
    return {
        parameter
        for parameter, where in places.items()
        if (type(parameter) is nn.Parameter or isinstance(parameter, FakeTensor))
        and parameter.dtype is torch.float32
        and all(type(child) in _CAST and child not in excluded for child, _ in where)
    }
