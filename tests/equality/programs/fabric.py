"""Lightning's Fabric with ``FabricStrategy``: usual loops, other ways to set up and to step, errors."""

from __future__ import annotations

import copy
import itertools
from functools import partial
from typing import Any
from unittest import mock

import torch
from lightning import LightningModule
from lightning.fabric import Fabric
from lightning.fabric.plugins import BitsandbytesPrecision, MixedPrecision
from lightning.fabric.plugins.environments import LightningEnvironment, TorchElasticEnvironment
from torch.utils.data import DataLoader

from sp_lightning import FabricStrategy
from tests.equality.rows import loop, mistake, tiers
from tests.support.loops import acts, tie
from tests.support.models import Stack, fused_adamw, vectors

STAY = "50% stay, these stepped on the device, off, 32-true, simulated"


def batches(fabric: Fabric) -> Any:
    return fabric.setup_dataloaders(DataLoader(torch.cat(vectors(4)), batch_size=len(vectors(1)[0])))


def trained(
    fabric: Fabric, *, clip: dict[str, float] | None = None, accumulate: int = 1, evaluate: bool = False
) -> Any:
    """Trains with a scheduler, as the options say. Returns losses, norms, weights, and the state of optimizer and scaler."""
    with fabric.init_module():
        net: Any = Stack(3)
    net, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), lr=1e-2))
    scheduler, found = torch.optim.lr_scheduler.LinearLR(optimizer), []
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


def scaled() -> dict[str, Any]:
    """Fabric replaces 16-mixed by bf16-mixed on the CPU, except as a plugin."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=2)
    return {"plugins": MixedPrecision("16-mixed", "cpu", scaler)}


FORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "clipped by norm, accumulated": {"clip": {"max_norm": 0.1}, "accumulate": 2},
    "clipped by value, evaluated": {"clip": {"clip_val": 0.01}, "evaluate": True},
}
TRUE = ("32-true", "bf16-mixed", "bf16-true", "64-true")
PRECISIONS: dict[str, Any] = {name: partial(dict, precision=name) for name in TRUE}
PRECISIONS["16-mixed"] = scaled
FIRST = {("32-true", "clipped by value, evaluated"), ("16-mixed", "clipped by norm, accumulated")}
for precision, form in itertools.product(PRECISIONS, FORMS):
    variants = tiers(rest=["keep, k=1, simulated", *([STAY] if precision == "32-true" else ())])
    variants |= tiers("keep, k=1") if (precision, form) in FIRST else {}
    covers = "losses, norms, weights, the optimizer's state and the scaler's"
    make = partial(trained, **FORMS[form])
    loop(f"fabric: {form}, {precision}", variants, fabric=PRECISIONS[precision], covers=covers)(make)

# ---------------------------------------------------------------------- other ways to set up and to step

ways = partial(loop, variants=tiers(rest=["keep, k=1"], long=["keep, k=1, simulated"]), fabric=dict)


def closures(fabric: Fabric, make: Any) -> Any:
    net: Any = Stack(3)
    net, optimizer = fabric.setup(net, make(net.parameters(), lr=1e-2))

    def closure(x: Any) -> Any:
        optimizer.zero_grad()
        loss = net(x).square().mean()
        fabric.backward(loss)
        return loss

    return [[optimizer.step(partial(closure, x)).detach() for x in batches(fabric)], dict(net.state_dict())]


for kind in (torch.optim.AdamW, torch.optim.LBFGS):
    covers = "the first closure of the first step is the module's first call"
    ways(f"fabric: closures of {kind.__name__}", covers=covers)(partial(closures, make=kind))


@ways("fabric: an optimizer of a module that has run")
def _(fabric: Fabric) -> Any:
    """The optimizer is made after the module was set up, has run, and was loaded."""
    net = fabric.setup_module(Stack())
    with torch.inference_mode():
        before = net(vectors(1)[0]).clone()
    net.load_state_dict({name: value * 0.9 for name, value in net.state_dict().items()})
    optimizer = fabric.setup_optimizers(fused_adamw(net))
    for x in batches(fabric):
        fabric.backward(net(x).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    return [before, dict(net.state_dict()), optimizer.state_dict()]


@ways("fabric: two modules and two optimizers")
def _(fabric: Fabric) -> Any:
    """As in adversarial training."""
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


@ways("fabric: two modules and one optimizer")
def _(fabric: Fabric) -> Any:
    """Each of two streams has the optimizer of both."""
    nets = [fabric.setup(Stack(3)) for _ in range(2)]
    weights = itertools.chain(*(net.parameters() for net in nets))
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(weights, lr=1e-2))
    for x in batches(fabric):
        fabric.backward(nets[1](nets[0](x)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    return [*(dict(net.state_dict()) for net in nets), optimizer.state_dict()]


class Lit(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = Stack()

    def training_step(self, x: Any) -> Any:
        return self.net(x).square().mean()

    validation_step = training_step


@ways("fabric: a LightningModule")
def _(fabric: Fabric) -> Any:
    """Its steps call a part of it."""
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


def played(fabric: Fabric, *, apart: bool) -> Any:
    """As sheeprl's agents: another Fabric sets up a copy, which acts between two steps, with the weights of the agent."""
    agent: Any = Stack(3)
    player: Any = Fabric(accelerator="cpu", devices=1).setup_module(copy.deepcopy(agent))
    optimizer: Any = torch.optim.AdamW(agent.parameters(), lr=1e-2)
    if apart:
        agent = fabric.setup_module(agent)
        tie(player, agent)
        optimizer = fabric.setup_optimizers(optimizer)
    else:
        agent, optimizer = fabric.setup(agent, optimizer)
        tie(player, agent)
    state = agent.state_dict()
    found = [acts(agent, player, optimizer, x, fabric.backward) for x in batches(fabric)]
    return [found, state, dict(agent.state_dict())]


for apart in (False, True):
    variants = tiers("keep, k=1", rest=["keep, k=1, simulated"])
    covers = "the module has its memory from set-up on, and so has a state_dict() of that time"
    loop(f"fabric: weights tied to another module after set-up, {apart=}", variants, fabric=dict, covers=covers)(
        partial(played, apart=apart)
    )


# ---------------------------------------------------------------------- what does not go, and what is said


def several(**settings: Any) -> None:
    with mock.patch.dict("os.environ", WORLD_SIZE="2"):
        Fabric(**{"accelerator": "cpu", "devices": 1, "strategy": "superpipeline", **settings})


def not_set_up() -> None:
    fabric = Fabric(accelerator="cpu", devices=1, strategy=FabricStrategy(k=1))
    net = fabric.setup(Stack(2))
    optimizer = torch.optim.SGD(net.parameters())
    try:
        fabric.backward(net(vectors(1)[0]).sum())
        optimizer.step()
    finally:
        fabric.strategy.teardown()


def tied(*, before: bool) -> None:
    fabric, net, player = Fabric(accelerator="cpu", devices=1, strategy=FabricStrategy(k=1)), Stack(2), Stack(2)
    try:
        if before:
            tie(player, net)
        for each in (net, player):
            fabric.setup_module(each)
        tie(player, net)
        player(vectors(1)[0])
    finally:
        fabric.strategy.teardown()


def replaces_layers() -> None:
    strategy = FabricStrategy()
    strategy.precision = BitsandbytesPrecision.__new__(BitsandbytesPrecision)  # its package needs a GPU
    strategy.parallel_devices, strategy.cluster_environment = [torch.device("cpu")], LightningEnvironment()
    strategy._configure_launcher()


SEVERAL = r"ValueError: .*was given 2 devices or processes.*Fabric\(devices=1\)"
for name, said, code in (
    ("two devices", SEVERAL, partial(several, devices=2)),
    ("two nodes", SEVERAL, partial(several, num_nodes=2)),
    ("two processes", SEVERAL, lambda: several(plugins=TorchElasticEnvironment())),
    ("the option device", r"TypeError: .*no option 'device'. Expected Fabric\(accelerator",
     lambda: FabricStrategy(device="cpu")),
    ("an option of the Trainer", "TypeError: .*no option 'save_frozen', which belongs to Lightning's Trainer",
     lambda: FabricStrategy(save_frozen=False)),
    ("autocast", "TypeError: .*no option 'autocast'", lambda: FabricStrategy(autocast=torch.bfloat16)),
    ("an optimizer that was not set up", r"RuntimeError: .*was not given to it.*fabric\.setup\(model, optimizer, other\)",
     not_set_up),
    ("weights tied before set-up", r"ValueError: Parameter 'stem.weight' shares its memory.*after.*fabric\.setup",
     partial(tied, before=True)),
    ("two modules tied after set-up", r"ValueError: Parameter 'stem.weight' was given the memory.*Stream only one",
     partial(tied, before=False)),
    ("a precision that replaces layers", "ValueError: superpipeline cannot work with BitsandbytesPrecision", replaces_layers),
):  # fmt: skip
    mistake(f"fabric: {name}", said)(code)
