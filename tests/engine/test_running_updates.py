"""What waits for an update that is under way, and what does not."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any
from unittest import mock

import pytest
import torch

from sp_lightning.core.device.device import Device
from sp_lightning.core.engine.backward import PendingCall
from sp_lightning.core.updates.layerwise import LayerwiseStep
from tests.support.engine import Uses, streamed, three_linears
from tests.support.models import vectors
from tests.support.moments import At
from tests.support.runs import fit, superpipeline


@pytest.mark.parametrize("results", [(), (object(),)], ids=["results on the host", "results on the device"])
def test_a_layer_is_prefetched_once_its_update_has_ended(results: tuple[object, ...]) -> None:
    """A prefetch before that would wait for the update. Without one, the layer would be waited for at its use."""
    device = Device(torch.device("cpu"))
    with (
        streamed(three_linears(), device, k=1, k_prime=1) as engine,
        mock.patch.object(device, "has_happened", return_value=not results),
    ):
        source, layer = engine.source, engine.layers[0]
        assert source.ready(layer)
        update: Future[None] = Future()
        with mock.patch.object(layer.owner, "update", update), mock.patch.object(layer, "step_results", results):
            assert not source.ready(layer)
            update.set_result(None)
            assert source.ready(layer)


def test_writes_are_counted_after_the_update() -> None:
    """Until then the update may change the version at any time. Without an update there is nothing to wait for."""
    with (
        streamed(three_linears(), Device(torch.device("cpu")), k=1, k_prime=1) as engine,
        mock.patch.object(Uses, "write_back") as waits,
    ):
        layer = engine.layers[0]
        layer.parameters.writes(0)
        update: Future[None] = Future()
        with mock.patch.object(layer.owner, "update", update):
            assert not waits.called
            layer.parameters.writes(0)
            waits.assert_called_once_with(layer)
            update.set_result(None)
            layer.parameters.writes(0)
            waits.assert_called_once_with(layer)


def test_a_step_counts_writes_of_the_weights_that_have_a_gradient() -> None:
    """A fused step shows in no version, so a forward that runs again would miss its writes."""
    net = three_linears()
    with streamed(net, Device(torch.device("cpu")), k=1, k_prime=1) as engine:
        layer = engine.layers[0]
        layer.block.parameters[1].grad = torch.ones(4)
        engine.updating.before(deferred=False, parameters=net.parameters())
        assert layer.parameters.unversioned_writes == [0, 1]


def test_a_layer_is_not_updated_before_the_backward_of_each_of_its_calls_has_begun() -> None:
    with streamed(three_linears(), Device(torch.device("cpu")), k=1, k_prime=1) as engine:
        backward, layer, begun = engine.backward, engine.layers[0], list[Any]()
        begins = lambda visits, gradient: begun.append(visits)  # noqa: E731
        assert not isinstance(backward.awaited(begins, [layer]), PendingCall), "no step updates layers in backward"
        with mock.patch.object(backward, "may_update", return_value=True):
            calls = [backward.awaited(begins, [layer]) for _ in range(2)]
            for call in calls:
                assert backward._incomplete(layer)
                call(torch.ones(1))
            assert not backward._incomplete(layer)
        assert begun == [[layer], [layer]]


def test_updates_are_as_urgent_as_the_next_forward_needs_them(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[list[int | None]] = []
    order = LayerwiseStep._order

    def note(self: LayerwiseStep) -> Any:
        layers = order(self)
        found.append([self._updates.urgency.get(layer) for layer in layers])
        return layers

    monkeypatch.setattr(LayerwiseStep, "_order", note)
    fit(At, vectors(2), superpipeline(k=1, optimizer_overlap="forward"))
    assert found
    assert all(each == list(range(len(each))) for each in found), found
