"""What counts as another module or parameter between two batches, so that layers are absorbed again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from sp_lightning.core.device.device import Device
from sp_lightning.core.engine.engine import Engine
from sp_lightning.core.model.find import find_layers
from sp_lightning.core.plan.plan import make_plan

CHANGES: dict[str, Callable[[Any], Any]] = {
    "a parameter": lambda net: setattr(net[1], "weight", nn.Parameter(net[1].weight.detach().clone())),
    "a parameter's name": lambda net: net[1]._parameters.update(other=net[1]._parameters.pop("weight")),
    "what was None": lambda net: setattr(net[1], "bias", nn.Parameter(torch.zeros(4))),
    "the name of what was None": lambda net: (net[1]._parameters.pop("bias"), net[1].register_parameter("other", None)),
    "another parameter": lambda net: net[1].register_parameter("scale", nn.Parameter(torch.ones(1))),
    "a module": lambda net: net.__setitem__(1, nn.Linear(4, 4, bias=False)),
    "another module": lambda net: net.append(nn.Identity()),
    "dtype": lambda net: net[1].double(),
    "shape": lambda net: setattr(net[1].weight, "data", torch.zeros(2, 8)),
    "strides": lambda net: setattr(net[1].weight, "data", net[1].weight.data.t()),
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_change_is_noticed(what: str) -> None:
    net = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(3)))
    found = find_layers(net, layers=["0", "1", "2"])
    streamer = Engine(net, found, make_plan(found, k=1, k_prime=1), Device(torch.device("cpu")), pin=False)
    assert not streamer.changed()
    CHANGES[what](net)
    assert streamer.changed()
    streamer.close()
