"""What counts as another module or parameter between two batches; where weights are that user code has captured."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from threading import Thread
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from sp_lightning.core.device.device import Device
from sp_lightning.core.engine.engine import Engine
from sp_lightning.core.model.find import find_layers
from sp_lightning.core.plan.plan import make_plan
from tests.support.models import vectors
from tests.support.moments import At
from tests.support.runs import fit, superpipeline

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
    engine = Engine(net, found, make_plan(found, k=1, k_prime=1), Device(torch.device("cpu")), pin=False)
    assert not engine.changed()
    CHANGES[what](net)
    assert engine.changed()
    engine.close()


def test_a_captured_weight_is_where_its_data_is() -> None:
    """In the step's own thread, on the device of the device parameter, for which "meta" stands; otherwise on the host."""

    def place(weight: Any) -> tuple[str, bool, bool, str]:
        made = torch.empty(weight.shape, device=weight.device)
        return weight.device.type, weight.is_cpu, weight.is_cuda, made.device.type

    def looks(m: Any) -> None:
        (weight,) = m.kept
        device_of = type(weight).roles[0].device_of
        thread = Thread(target=lambda: m.noted.append(place(weight)))
        with mock.patch.dict(device_of, {id(weight): torch.empty(weight.shape, device="meta")}):
            m.noted.append(place(weight))
            thread.start()
            thread.join()

    moments: dict[str, Any] = {
        "init": lambda m: m.kept.append(m.net[1].first.weight),
        "start": looks,
        "on_train_batch_end": lambda m: m.noted.append(place(*m.kept)),
    }
    trained = fit(partial(At, **moments), vectors(1), superpipeline(k=1), recorded="nothing")
    on_host = ("cpu", True, False, "cpu")
    assert trained.module.noted == [("meta", False, False, "meta"), on_host, on_host]
