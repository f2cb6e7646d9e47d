"""What counts as another module or parameter between two batches, so that layers are absorbed again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from sp_lightning.core.device.device import Device
from sp_lightning.core.engine.streamer import Streamer
from sp_lightning.core.model.find import find_layers
from sp_lightning.core.plan.plan import make_plan


def _replace_parameter(net: Any) -> None:
    net[1].weight = nn.Parameter(net[1].weight.detach().clone())


def _rename_parameter(net: Any) -> None:
    net[1]._parameters["other"] = net[1]._parameters.pop("weight")


def _fill_what_was_none(net: Any) -> None:
    net[1].bias = nn.Parameter(torch.zeros(4))


def _drop_what_was_none(net: Any) -> None:
    del net[1]._parameters["bias"]
    net[1].register_parameter("other", None)


def _add_parameter(net: Any) -> None:
    net[1].register_parameter("scale", nn.Parameter(torch.ones(1)))


def _replace_module(net: Any) -> None:
    net[1] = nn.Linear(4, 4, bias=False)


def _add_module(net: Any) -> None:
    net.append(nn.Identity())


def _convert(net: Any) -> None:
    net[1].weight.data = net[1].weight.data.double()


def _reshape(net: Any) -> None:
    net[1].weight.data = torch.zeros(2, 8)


def _transpose(net: Any) -> None:
    net[1].weight.data = net[1].weight.data.t()


CHANGES = (
    _replace_parameter, _rename_parameter, _fill_what_was_none, _drop_what_was_none, _add_parameter, _replace_module,
    _add_module, _convert, _reshape, _transpose,
)  # fmt: skip


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__.strip("_"))
def test_a_change_is_noticed(change: Callable[[Any], None]) -> None:
    net = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(3)))
    found = find_layers(net, layers=["0", "1", "2"])
    streamer = Streamer(net, found, make_plan(found, k=1, k_prime=1), Device(torch.device("cpu")), pin=False)
    assert not streamer.changed()
    change(net)
    assert streamer.changed()
    streamer.close()
