"""Lightning's Fabric with ``FabricStrategy`` has the bits of plain Fabric on one device."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning import LightningModule
from lightning.fabric import Fabric
from lightning.fabric.plugins import BitsandbytesPrecision, MixedPrecision
from lightning.fabric.plugins.environments import LightningEnvironment, TorchElasticEnvironment
from lightning.fabric.strategies import SingleDeviceStrategy
from torch import nn
from torch.utils.data import DataLoader

from sp_lightning import FabricStrategy
from tests.support.models import Stack, vectors
from tests.support.runs import assert_equal
from tests.support.simdevice import simulated
from tests.support.tiers import first

Train = Callable[[Fabric], Any]


def fabric_with(*, streamed: bool, options: dict[str, Any] | None = None, **settings: Any) -> Fabric:
    """Returns a Fabric on the CPU, with our strategy or without it."""
    strategy: Any = SingleDeviceStrategy()
    if streamed:
        strategy = FabricStrategy(k=1, **(options or {}))
    fabric = Fabric(accelerator="cpu", devices=1, strategy=strategy, **settings)
    fabric.seed_everything(7, verbose=False)
    fabric.launch()
    return fabric


def run(train: Train, *, streamed: bool, simulate: bool = False, **settings: Any) -> Any:
    """Returns what a function has computed with a Fabric, and the random state."""
    fabric = fabric_with(streamed=streamed, **settings)
    if not streamed:
        return [copy.deepcopy(train(fabric)), torch.get_rng_state()]
    strategy: Any = fabric.strategy
    with simulated() if simulate else nullcontext():
        try:
            found = copy.deepcopy(train(fabric))
            assert strategy.streams, "nothing was streamed"
        finally:
            strategy.teardown()
    return [found, torch.get_rng_state()]


def compare(train: Train, simulate: bool, settings: Callable[[], dict[str, Any]] = dict) -> None:
    ours = run(train, streamed=True, simulate=simulate, **settings())
    assert_equal(ours, run(train, streamed=False, **settings()), "fabric")


def batches(fabric: Fabric) -> Any:
    return fabric.setup_dataloaders(DataLoader(torch.cat(vectors(4)), batch_size=len(vectors(1)[0])))


def made(fabric: Fabric) -> tuple[Any, Any]:
    with fabric.init_module():
        net = Stack(3)
    return fabric.setup(net, torch.optim.AdamW(net.parameters(), lr=1e-2))


def loop(
    fabric: Fabric, clip: dict[str, float] | None = None, accumulate: int = 1, evaluate: bool = False
) -> list[Any]:
    """Trains with a scheduler, as the options say. Returns losses, norms, weights, and the state of optimizer and scaler."""
    net, optimizer = made(fabric)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer)
    found = []
    for index, x in enumerate(batches(fabric)):
        waits = (index + 1) % accumulate != 0
        with fabric.no_backward_sync(net, enabled=waits):
            loss = net(x).square().mean()
            fabric.backward(loss / accumulate)
        found.append(loss.detach())
        if waits:
            continue
        if clip is not None:
            found.append(fabric.clip_gradients(net, optimizer, **clip))
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        if evaluate:
            net.eval()
            with torch.no_grad(), fabric.autocast():
                found.append(net(x).float().sum())
            net.train()
    return [found, dict(net.state_dict()), optimizer.state_dict(), fabric.strategy.precision.state_dict()]


LOOPS: dict[str, dict[str, Any]] = {
    "plain": {},
    "clipping by norm, and accumulation": {"clip": {"max_norm": 0.1}, "accumulate": 2},
    "clipping by value, and evaluation": {"clip": {"clip_val": 0.01}, "evaluate": True},
}


def scaled() -> dict[str, Any]:
    """Fabric replaces 16-mixed by bf16-mixed on the CPU, except as a plugin."""
    return {
        "plugins": MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=2))
    }


PRECISIONS: dict[str, Callable[[], dict[str, Any]]] = {
    **{name: partial(dict, precision=name) for name in ("32-true", "bf16-mixed", "bf16-true", "64-true")},
    "16-mixed": scaled,
}


QUICK = (
    (False, "32-true", "clipping by value, and evaluation"),
    (False, "16-mixed", "clipping by norm, and accumulation"),
)


@pytest.mark.parametrize(
    ("simulate", "precision", "name"),
    first(
        [*QUICK, *itertools.product([True], PRECISIONS, LOOPS)], *QUICK, why="a simulated device and further precisions"
    ),
)
def test_loops(simulate: bool, precision: str, name: str) -> None:
    """Losses, norms, weights, optimizer state and the scaler's."""
    compare(lambda fabric: loop(fabric, **LOOPS[name]), simulate, PRECISIONS[precision])


# ---------------------------------------------------------------------- other ways to set up and to step


def closures(fabric: Fabric, make: Any = torch.optim.AdamW) -> Any:
    """The first closure of the first step is the module's first call."""
    net = Stack(3)
    net, optimizer = fabric.setup(net, make(net.parameters(), lr=1e-2))  # type: ignore[assignment]

    def closure(x: Any) -> Any:
        optimizer.zero_grad()
        loss = net(x).square().mean()
        fabric.backward(loss)
        return loss

    return [[optimizer.step(partial(closure, x)).detach() for x in batches(fabric)], dict(net.state_dict())]


def several_closures(fabric: Fabric) -> Any:
    return closures(fabric, torch.optim.LBFGS)


def set_up_apart(fabric: Fabric) -> Any:
    """The optimizer is made after the module was set up, has run, and was loaded."""
    net = fabric.setup_module(Stack())
    with torch.inference_mode():
        before = net(vectors(1)[0]).clone()
    net.load_state_dict({name: value * 0.9 for name, value in net.state_dict().items()})
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(net.parameters(), lr=1e-2))
    for x in batches(fabric):
        fabric.backward(net(x).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    return [before, dict(net.state_dict()), optimizer.state_dict()]


def two_of_each(fabric: Fabric) -> Any:
    nets = [Stack(3), Stack(3)]
    pairs = [fabric.setup(net, torch.optim.SGD(net.parameters(), lr=1e-2)) for net in nets]
    (generator, ours), (critic, theirs) = pairs
    for x in batches(fabric):
        fabric.backward(critic(generator(x)).mean())
        ours.step()
        theirs.zero_grad()
        fabric.backward(critic(generator(x).detach()).square().mean())
        theirs.step()
        ours.zero_grad()
    return [dict(net.state_dict()) for net in nets]


def one_optimizer(fabric: Fabric) -> Any:
    nets = [fabric.setup(Stack(3)) for _ in range(2)]
    weights = itertools.chain(*(net.parameters() for net in nets))
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(weights, lr=1e-2))
    for x in batches(fabric):
        fabric.backward(nets[1](nets[0](x)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    return [*(dict(net.state_dict()) for net in nets), optimizer.state_dict()]


class Lit(LightningModule):
    """Its steps call a part of it."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Stack()

    def training_step(self, x: Any) -> Any:
        return self.net(x).square().mean()

    validation_step = training_step


def lightning_modules(fabric: Fabric) -> Any:
    lit: Any = Lit()
    lit, optimizer = fabric.setup(lit, torch.optim.AdamW(lit.parameters(), lr=1e-2))
    found = []
    for x in batches(fabric):
        fabric.backward(lit.training_step(x))
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            found.append(lit.validation_step(x))
    return [found, dict(lit.state_dict())]


WAYS = (closures, several_closures, set_up_apart, two_of_each, one_optimizer, lightning_modules)


@pytest.mark.long("other orders of the same calls, on a simulated device")
@pytest.mark.parametrize("train", WAYS)
def test_ways(train: Train) -> None:
    compare(train, simulate=True)


@pytest.mark.rest("checkpoints are Fabric's own code")
@pytest.mark.parametrize("ours_first", [True, False])
def test_a_checkpoint_of_one_is_resumed_by_the_other(ours_first: bool, tmp_path: Path) -> None:
    def train(fabric: Fabric, load: bool = False, save: str = "first") -> Any:
        net, optimizer = made(fabric)
        state = {"net": net, "optimizer": optimizer, "step": 0}
        if load:
            fabric.load(tmp_path / "first", state)
        for x in batches(fabric):
            fabric.backward(net(x).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            state["step"] += 1
        fabric.save(tmp_path / save, state)
        return [dict(net.state_dict()), optimizer.state_dict(), state["step"]]

    run(train, streamed=ours_first)
    for save, streamed in (("ours", True), ("plain", False)):
        run(lambda fabric: train(fabric, load=True, save=save), streamed=streamed)  # noqa: B023
    ours, plain = (torch.load(tmp_path / name, weights_only=True) for name in ("ours", "plain"))
    assert_equal(ours, plain, "resumed")
    assert ours["step"] == 8
    assert (tmp_path / "ours").stat().st_size == (tmp_path / "plain").stat().st_size


# ---------------------------------------------------------------------- the end, and errors


def test_the_name_and_the_end() -> None:
    fabric = Fabric(accelerator="cpu", devices=1, strategy="superpipeline")
    net, _ = made(fabric)
    strategy: Any = fabric.strategy
    assert strategy.streams == []
    net(vectors(1)[0])
    assert strategy.streams[0].plan.layers
    strategy.teardown()
    assert (strategy.streams, {type(each) for each in net.parameters()}) == ([], {nn.Parameter})
    net(vectors(1)[0])
    assert strategy.streams == []


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.parametrize("name", LOOPS)
def test_layers_that_stay_on_the_gpu(name: str) -> None:
    ours = run(partial(loop, **LOOPS[name]), streamed=True, simulate=True, options={"gpu_layers": 2})
    assert_equal(ours, run(partial(loop, **LOOPS[name]), streamed=False), "fabric")


def test_the_limit_and_the_loan_are_those_of_all_streams() -> None:
    fabric = Fabric(accelerator="cpu", devices=1, strategy=FabricStrategy(k=1, gpu_memory="1GiB"))
    nets = [fabric.setup(Stack(2)) for _ in range(2)]
    strategy: Any = fabric.strategy
    for net in nets:
        net(vectors(1)[0])
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


@pytest.mark.parametrize("settings", [{"devices": 2}, {"num_nodes": 2}, {"plugins": TorchElasticEnvironment()}])
def test_several_processes(settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match=r"was given 2 devices or processes.*Fabric\(devices=1\)"):
        Fabric(**{"accelerator": "cpu", "devices": 1, "strategy": "superpipeline", **settings})


def test_what_fabric_chooses() -> None:
    with pytest.raises(TypeError, match=r"no option 'device'. Expected Fabric\(accelerator"):
        FabricStrategy(device="cpu")
    with pytest.raises(TypeError, match="no option 'save_frozen', which belongs to Lightning's Trainer"):
        FabricStrategy(save_frozen=False)
    with pytest.raises(TypeError, match="no option 'autocast'"):
        FabricStrategy(autocast=torch.bfloat16)


def test_modules_stay_on_the_host() -> None:
    strategy = FabricStrategy()
    strategy.parallel_devices = [torch.device("meta")]
    with strategy.module_init_context():
        net = nn.Linear(1, 1)
    strategy.module_to_device(net)
    assert net.weight.device.type == "cpu"
    with strategy.tensor_init_context():
        assert torch.ones(1).device.type == "meta"


def test_precisions_that_replace_layers() -> None:
    plugin = BitsandbytesPrecision.__new__(BitsandbytesPrecision)
    strategy = FabricStrategy()
    strategy.precision = plugin
    strategy.parallel_devices = [torch.device("cpu")]
    strategy.cluster_environment = LightningEnvironment()
    with pytest.raises(ValueError, match="superpipeline cannot work with BitsandbytesPrecision"):
        strategy._configure_launcher()


def test_a_module_that_does_not_fit_is_not_called_without_a_stream() -> None:
    fabric = Fabric(accelerator="cpu", devices=1, strategy=FabricStrategy(k=1, gpu_memory="1KiB"))
    net = fabric.setup(Stack(2))
    for _ in range(2):
        with pytest.raises(ValueError, match="gpu_memory"):
            net(vectors(1)[0])
    fabric.strategy.teardown()


def test_an_optimizer_that_was_not_set_up() -> None:
    fabric = fabric_with(streamed=True)
    net = fabric.setup(Stack(2))
    optimizer = torch.optim.SGD(net.parameters())
    fabric.backward(net(vectors(1)[0]).sum())
    with pytest.raises(RuntimeError, match=r"was not given to it.*fabric\.setup\(model, optimizer, other\)"):
        optimizer.step()
    fabric.strategy.teardown()
