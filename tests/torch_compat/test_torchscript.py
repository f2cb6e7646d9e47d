"""The privates of torch by which TorchScript is called."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from sp_lightning.core.torch_compat import private as torch_private


@pytest.mark.filterwarnings("ignore:.* is deprecated")
def test_what_is_called_in_torchscript_has_one_of_two_classes() -> None:
    function = torch.jit.CompilationUnit("def half(x: Tensor) -> Tensor:\n    return x / 2\n").half
    scripted: Any = torch.jit.script(nn.Linear(2, 2))
    traced: Any = torch.jit.trace(nn.Linear(2, 2), torch.ones(1, 2))
    assert (type(function), type(scripted.forward)) == torch_private.TORCHSCRIPT
    assert type(traced.forward) is type(scripted.forward)
    assert (function.name, scripted.forward.name) == ("half", "forward")
