"""Lightning's Fabric with ``FabricStrategy``: checkpoints, the end, the GPU on loan. Its results are in ``tests/equality``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from torch import nn

from sp_lightning import FabricStrategy
from tests.support.models import Stack, vectors
from tests.support.runs import assert_equal

X = vectors(1)[0]


def fabric_with(strategy: Any) -> Fabric:
    return Fabric(accelerator="cpu", devices=1, strategy=strategy)


@pytest.mark.rest("checkpoints are Fabric's own code")
@pytest.mark.parametrize("ours_first", [True, False])
def test_a_checkpoint_of_one_is_resumed_by_the_other(ours_first: bool, tmp_path: Path) -> None:
    def train(ours: bool, save: str, load: bool = True) -> None:
        fabric = fabric_with(FabricStrategy(k=1) if ours else "auto")
        fabric.seed_everything(7, verbose=False)
        net: Any = Stack(3)
        net, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), lr=1e-2))
        state = {"net": net, "optimizer": optimizer, "step": 0}
        if load:
            fabric.load(tmp_path / "first", state)
        for x in vectors(4):
            fabric.backward(net(x).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            state["step"] += 1
        fabric.save(tmp_path / save, state)
        fabric.strategy.teardown()

    train(ours_first, "first", load=False)
    train(True, "ours")
    train(False, "plain")
    ours, plain = (torch.load(tmp_path / name, weights_only=True) for name in ("ours", "plain"))
    assert_equal(ours, plain, "resumed")
    assert ours["step"] == 8
    assert (tmp_path / "ours").stat().st_size == (tmp_path / "plain").stat().st_size


def test_the_name_and_the_end() -> None:
    fabric = fabric_with("superpipeline")
    net = fabric.setup(Stack(3))
    strategy: Any = fabric.strategy
    assert strategy.streams[0].plan.layers
    net(X)
    strategy.teardown()
    assert (strategy.streams, {type(each) for each in net.parameters()}) == ([], {nn.Parameter})
    net(X)
    assert strategy.streams == []


def test_the_limit_and_the_loan_are_those_of_all_streams() -> None:
    fabric = fabric_with(FabricStrategy(k=1, gpu_memory="1GiB"))
    nets = [fabric.setup(Stack(2)) for _ in range(2)]
    strategy: Any = fabric.strategy
    for net in nets:
        net(X)
    with pytest.raises(ValueError, match="gpu_memory"):
        strategy.gpu_memory = "lots"
    strategy.gpu_memory = "2GiB"
    assert [each.gpu_memory for each in strategy.streams] == [2 << 30] * 2
    with strategy.gpu_released() as staying:
        assert staying == 0
        for each in strategy.streams:
            with pytest.raises(RuntimeError, match="released already"):
                each.gpu_memory = "1GiB"
    strategy.teardown()


def test_modules_stay_on_the_host() -> None:
    strategy = FabricStrategy()
    strategy.parallel_devices = [torch.device("meta")]
    with strategy.module_init_context():
        net = nn.Linear(1, 1)
    strategy.module_to_device(net)
    assert net.weight.device.type == "cpu"
    with strategy.tensor_init_context():
        assert torch.ones(1).device.type == "meta"


def test_a_module_that_does_not_fit_is_not_set_up() -> None:
    strategy: Any = FabricStrategy(k=1, gpu_memory="1KiB")
    fabric = fabric_with(strategy)
    for _ in range(2):
        with pytest.raises(ValueError, match="gpu_memory"):
            fabric.setup(Stack(2))
    assert strategy.streams == []


def test_gradients_that_do_not_fit_leave_the_stream_as_it_was() -> None:
    """The optimizer arrives after the module was set up."""
    strategy: Any = FabricStrategy(k=1, k_prime=1)
    fabric_with(strategy).setup(Stack(3))
    least = strategy.streams[0].plan.peak_device_bytes
    strategy.teardown()
    strategy = FabricStrategy(k=1, k_prime=1, gpu_memory=least)
    fabric = fabric_with(strategy)
    net = fabric.setup_module(Stack(3))
    with pytest.raises(ValueError, match="Weights and gradients need"):
        fabric.setup_optimizers(torch.optim.SGD(net.parameters()))
    with torch.no_grad():
        assert net(X).shape == (4, 16)
    strategy.teardown()


def test_an_optimizer_of_weights_that_are_not_streamed() -> None:
    """sheeprl sets its agent up with another Fabric: nothing was streamed, and nothing said so."""
    fabric = fabric_with(FabricStrategy(k=1))
    net = fabric_with("auto").setup_module(Stack(2))
    with pytest.warns(UserWarning, match="SGD steps weights of no module that this Fabric has set up") as caught:
        fabric.setup_optimizers(torch.optim.SGD(net.parameters()))
    assert [each.filename for each in caught] == [__file__]
