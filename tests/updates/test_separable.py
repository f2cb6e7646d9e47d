"""torchao's optimizers, whose state has few bits, are taken apart by layers as torch's fused ones are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchao import optim

from sp_lightning import SuperpipelineStrategy
from sp_lightning.core.model.wrapped import parts
from sp_lightning.core.plan.ledger import FEW_BITS
from sp_lightning.core.updates.fused import is_separable
from tests.support.engine import taken_apart
from tests.support.models import Module
from tests.support.nets import on_device
from tests.support.runs import loader, trainer_for
from tests.support.tiers import first
from tests.support.ways import overlapping

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    name: getattr(optim, name) for name in ("Adam8bit", "AdamW8bit", "Adam4bit", "AdamW4bit", "AdamFp8", "AdamWFp8")
}
WIDTH = 64  # 4,096 numbers are the smallest state that torchao keeps in few bits
pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated:")


class Layers(Module):
    def __init__(self, kind: str, wider: int = 0, **options: Any) -> None:
        widths = [WIDTH * (1 + wider * i) for i in range(2)] * 2
        pairs = (nn.Sequential(nn.Linear(WIDTH, w), nn.Dropout(0.2), nn.Linear(w, WIDTH)) for w in widths)
        super().__init__(nn.Sequential(*pairs))
        self.make = lambda parameters: OPTIMIZERS[kind](parameters, lr=1e-2, **options)

    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch + 0.1 * torch.randn_like(batch))

    def configure_optimizers(self) -> Any:
        optimizer = self.make(self.parameters())
        return [optimizer], [torch.optim.lr_scheduler.ConstantLR(optimizer)]


def batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(3, WIDTH, generator=generator) for _ in range(4)]


@pytest.fixture(autouse=True)
def eager(request: pytest.FixtureRequest) -> Iterator[None]:
    """Graphs take their time, and are none of ours."""
    with nullcontext() if "compiled_steps" in request.node.name else torch.compiler.set_stance("force_eager"):
        yield


def trained(strategy: Any, kind: str, wider: int = 0, **options: Any) -> list[Tensor]:
    """Weights, then the plain tensors of the optimizer's state, in its order."""
    torch.manual_seed(0)
    module = Layers(kind, wider)
    trainer = trainer_for(strategy, max_epochs=2, **options)
    trainer.fit(module, loader(batches()))
    state = [leaf for p in trainer.optimizers[0].state.values() for leaf in p.values()]
    return [
        *(p.detach().clone() for p in module.parameters()),
        *(part for leaf in state for _, part in parts("", leaf)),
    ]


@pytest.mark.long("takes a second or more")
@pytest.mark.parametrize("precision", first(["32-true", "bf16-mixed"], "bf16-mixed", why="casts come on top"))
@pytest.mark.parametrize("kind", first(OPTIMIZERS, "AdamW8bit", why="they differ in how they pack their state"))
def test_their_updates_under_backward_are_plains(kind: str, precision: Any) -> None:
    options: dict[str, Any] = {"precision": precision}
    plain = trained("auto", kind, **options)
    with taken_apart() as layers:
        strategy = overlapping("backward")
        ours = trained(strategy, kind, **options)
    assert layers
    assert len(ours) == len(plain)
    assert all(map(torch.equal, ours, plain))
    state = ours[len(list(Layers(kind).parameters())) :]
    assert strategy.ledger.state == sum(part.nbytes for part in state), "the ledger counts the bits"


@pytest.mark.long("torch compiles its step for each shape, which takes seconds")
@pytest.mark.parametrize(
    ("where", "precision"), [("host", "32-true"), ("host", "bf16-true"), ("host", "64-true"), ("device", "bf16-mixed")]
)
def test_compiled_steps_leave_what_a_model_draws(where: str, precision: Any) -> None:
    """torch.compile restores torch's random state; what compiles in the background has to be alone."""

    def run(strategy: Any) -> list[Tensor]:
        torch._dynamo.reset()
        return trained(strategy, "AdamW8bit", wider=1, precision=precision)

    plain = run("auto")
    mode: Any = "backward" if where == "host" else "off"
    ours = run(overlapping(mode) if where == "host" else on_device(optimizer_overlap=mode))
    assert len(ours) == len(plain)
    assert all(map(torch.equal, ours, plain))


def test_what_compiles_its_step_does_not_step_beside_a_forward() -> None:
    for strategy in (overlapping("forward"), on_device(optimizer_overlap="forward")):
        with pytest.raises(ValueError, match=r"AdamW8bit compiles its step, .*optimizer_overlap=\"off\""):
            trainer_for(strategy).fit(Layers("AdamW8bit"), loader(batches()))


@pytest.mark.long("those under backward are in the first tier")
def test_their_steps_on_the_device_are_plains() -> None:
    ours, plain = trained(on_device(), "AdamW8bit"), trained("auto", "AdamW8bit")
    assert len(ours) == len(plain)
    assert all(map(torch.equal, ours, plain))


def test_what_draws_random_numbers_is_not_taken_apart() -> None:
    """In another order, or in another thread, the same generator would give the model other numbers."""
    weight = nn.Parameter(torch.zeros(2))
    assert is_separable(optim.AdamW8bit([weight]))
    assert not is_separable(optim.AdamW8bit([weight], bf16_stochastic_round=True))
    assert not is_separable(type("Mine", (optim.AdamW8bit,), {})([weight]))
    assert not is_separable(torch.optim.RMSprop([weight]))
    assert {type(make([weight])).__qualname__ for make in OPTIMIZERS.values()} == {name for _, name in FEW_BITS}
    strategy = SuperpipelineStrategy(optimizer_overlap="forward")
    module, trainer = Layers("AdamW8bit", bf16_stochastic_round=True), trainer_for(strategy)
    with pytest.raises(ValueError, match=r"bf16_stochastic_round=True\) draws random numbers"):
        trainer.fit(module, loader(batches()))


@pytest.mark.long("takes a second or more")
@pytest.mark.parametrize(
    "kind", first(["AdamW8bit", "Adam4bit", "AdamWFp8"], "AdamW8bit", why="they differ in how they pack their state")
)
def test_a_run_resumes(kind: str, tmp_path: Path) -> None:
    """Plain Lightning 2.6 cannot load such a state itself."""
    whole = trained(overlapping("backward"), kind)
    torch.manual_seed(0)
    half = trainer_for(overlapping("backward"), max_epochs=1)
    half.fit(Layers(kind), loader(batches()))
    half.save_checkpoint(file := tmp_path / "half.ckpt")
    random = torch.get_rng_state()
    module = Layers(kind)
    trainer = trainer_for(overlapping("backward"), max_epochs=2)
    torch.set_rng_state(random)
    trainer.fit(module, loader(batches()), ckpt_path=str(file), weights_only=False)
    state = [leaf for p in trainer.optimizers[0].state.values() for leaf in p.values()]
    resumed = [*module.parameters(), *(part for leaf in state for _, part in parts("", leaf))]
    assert all(map(torch.equal, resumed, whole))
