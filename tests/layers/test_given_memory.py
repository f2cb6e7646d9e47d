"""Weights that have other memory: before a run, between two epochs, from a ``state_dict()`` that is kept; and what it costs."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn

from sp_lightning.core.layers.layer import Kind, StreamedLayer
from sp_lightning.core.layers.write_guard import guard_of
from tests.support.bare import bare
from tests.support.engine import streamer_of
from tests.support.models import Block, Module, Stack, vectors
from tests.support.moments import At, CastBlock, Checkpointed, GivesItsOwnValues, in_8_bits, multiply, net_of, rebind
from tests.support.nets import Does
from tests.support.runs import assert_equal, assert_same, fit, loader, superpipeline, trainer_for
from tests.support.simdevice import simulated
from tests.support.starts import start
from tests.support.tiers import first

# ---------------------------------------------------------------------- before and after a run, between two epochs


@pytest.mark.parametrize("frozen", ["", "stem", "head"])
def test_parameters_over_the_same_memory(frozen: str) -> None:
    net = Stack()
    net.stem.weight.data = net.head.weight.data
    if frozen:
        net.get_submodule(frozen).requires_grad_(False)
    remedies = r"module_b\.weight = module_a.*module_b\.weight\.data\.clone\(\)"
    with pytest.raises(ValueError, match=r"'net.*weight' are two Parameter objects over the same memory.*" + remedies):
        start(superpipeline(), Module(net))
    net.stem.weight.data = net.stem.weight.data.clone()
    start(superpipeline(), Module(net))


class Permuted(nn.Module):
    """A block of a flow: a permutation, and its transpose for the way back, are views of one memory."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)
        permutation = torch.eye(16)[torch.randperm(16)]
        self.forth = nn.Parameter(permutation, requires_grad=False)
        self.back = nn.Parameter(permutation.t(), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.inner(x @ self.forth)) @ self.back


@pytest.mark.rest("takes tenths of a second")
def test_frozen_parameters_over_the_same_memory_get_a_copy_each() -> None:
    ours, plain = (fit(lambda: At(Permuted), vectors(), each, val=vectors()) for each in (superpipeline(k=1), "auto"))
    assert_same(ours, plain)
    thaws = lambda: At(Permuted, on_train_epoch_start=lambda m: m.net[1].back.requires_grad_(m.current_epoch == 1))  # noqa: E731
    with pytest.raises(ValueError, match=r"'net.1.*' are two Parameter objects over the same memory"):
        fit(thaws, vectors(), superpipeline(k=1), max_epochs=2)


def change(m: Any, how: str) -> None:
    """Gives weights other memory before the second epoch."""
    if m.current_epoch != 1:
        return
    if how == "to":
        m.net.blocks[1].to(torch.float64).to(torch.float32)
    elif how == "assign":
        other = Stack()
        torch.manual_seed(5)
        for p in other.parameters():
            nn.init.normal_(p, std=0.1)
        m.net.load_state_dict(other.state_dict(), assign=True)
    elif how == "replace":
        m.net.blocks[2] = Block().requires_grad_(False)
    else:
        m.net.double()


class Rebinds(Module):
    def __init__(self, how: str) -> None:
        super().__init__(Stack())
        self.how = how

    def on_train_epoch_start(self) -> None:
        change(self, self.how)

    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch.to(next(self.net.parameters()).dtype))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.parametrize("how", ["to", "assign", "replace", "double"])
def test_layers_are_packed_again(how: str) -> None:
    ours, plain = (fit(lambda: Rebinds(how), vectors(), each, max_epochs=3) for each in (superpipeline(k=1), "auto"))
    assert_equal(ours.state, plain.state, how)
    assert_equal(ours.losses, plain.losses, how)


def test_other_dtypes_outside_a_step_are_named() -> None:
    """Between batches the layers are packed again, but not in the middle of a step or outside of any."""
    doubles = Does(on_fit_start=lambda trainer, m: (m.net.double(), m.net(torch.ones(2, 16).double())))
    with pytest.raises(
        RuntimeError, match=r"'net\.stem\.weight' is torch\.float64 .*Expected torch\.float32 .*between two batches"
    ):
        start(superpipeline(), callbacks=[doubles])


def test_a_weight_that_was_kept_from_a_step_is_told_after_the_run() -> None:
    """Pyro's store of parameters keeps what ``pyro.module`` finds within a step."""
    module = At(start=lambda m: m.kept.append(m.net[1].first.weight))
    trainer_for(superpipeline(k=1)).fit(module, loader(vectors()))
    with pytest.raises(RuntimeError, match=r"'net\.1\.first\.weight' was taken within a step.*named_parameters"):
        module.kept[0].sum()
    assert dict(module.named_parameters())["net.1.first.weight"].sum().isfinite()


@pytest.mark.parametrize("resident", [[], ["net"]], ids=["layers", "residents"])
def test_weights_that_are_given_other_memory_before_a_prediction(resident: list[str]) -> None:
    """Before the first batch, in inference mode."""
    given = Does(on_predict_start=lambda trainer, m: [rebind(p) for p in m.parameters()])

    def predictions(strategy: Any) -> Any:
        torch.manual_seed(0)
        return trainer_for(strategy, callbacks=[given]).predict(Module(net_of()), loader(vectors()))

    assert_equal(predictions(superpipeline(k=2, k_prime=1, keep_on_gpu=resident)), predictions("auto"), "predictions")


# ---------------------------------------------------------------------- written after the callbacks


class WritesLate(Module):
    """Weights are written in a way that no version shows, after the callbacks were called at the batch's end."""

    def __init__(self, where: str) -> None:
        super().__init__(Stack())
        self.where = where

    def write(self, where: str) -> None:
        for p in self.parameters() if where == self.where else ():
            multiply(p)

    def on_save_checkpoint(self, checkpoint: Any) -> None:
        self.write("on_save_checkpoint")

    def configure_optimizers(self) -> Any:
        module = self

        class Plateau(torch.optim.lr_scheduler.ReduceLROnPlateau):
            """Steps after ``on_train_batch_end``, unlike others."""

            def step(self, *args: Any) -> None:  # type: ignore[override]
                super().step(*args)
                module.write("scheduler")

        optimizer = super().configure_optimizers()
        plateau = {"scheduler": Plateau(optimizer), "interval": "step", "monitor": "loss"}
        return {"optimizer": optimizer, "lr_scheduler": plateau}

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss)
        return loss

    def train_dataloader(self) -> Any:
        self.write("train_dataloader")
        return loader(vectors())


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.filterwarnings("ignore:The dirpath has changed:UserWarning")
@pytest.mark.parametrize("simulation", first([nullcontext, simulated], simulated, why="the same on the CPU"))
@pytest.mark.parametrize("where", ["on_save_checkpoint", "scheduler", "train_dataloader"])
def test_weights_written_after_the_callbacks_are_seen(where: str, simulation: Any, tmp_path: Path) -> None:
    def run(strategy: Any, folder: Path) -> Any:
        pl.seed_everything(3, verbose=False)
        module, saves = WritesLate(where), where == "on_save_checkpoint"
        trainer = trainer_for(
            strategy, max_epochs=2, enable_checkpointing=saves,
            callbacks=[ModelCheckpoint(folder, every_n_train_steps=1, save_top_k=-1)] if saves else [],
            reload_dataloaders_every_n_epochs=int(where == "train_dataloader"),
        )  # fmt: skip
        trainer.fit(module)
        return module.state_dict(), trainer.optimizers[0].state_dict()

    with simulation():
        ours = run(superpipeline(k=2), tmp_path / "ours")
    assert_equal(ours, run("auto", tmp_path / "plain"), where)


# ---------------------------------------------------------------------- tensors of a state_dict() that are kept


class KeepsState(Module):
    """Keeps a layer's ``state_dict()``, which gives references, and views of it; ``how`` gives weights other memory later."""

    def __init__(self, how: str) -> None:
        super().__init__(Stack(2))
        self.how = how
        self.seen: list[Any] = []

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            self.kept = self.net.blocks[0].state_dict()
            self.rows = {name: value[:2] for name, value in self.kept.items()}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx == 3 and self.how == "in a step":
            self.exchange("inner.bias")
        loss = self.loss(batch)
        if batch_idx == 3 and self.how == "after the forward":
            self.exchange("outer.weight")
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        if self.trainer.global_step == 4:
            if self.how == "written, too":
                self.kept["inner.weight"].mul_(0.5)
            for name in {"one": ("inner.bias",), "two": ("inner.bias", "outer.weight"), "all": self.kept}.get(
                self.how, ()
            ):
                self.exchange(name)
            if self.how == "written, too":
                self.exchange("inner.bias")
                self.kept["inner.bias"].fill_(3.0)
        if self.trainer.global_step > 1:
            self.seen.append([value.clone() for value in (*self.kept.values(), *self.rows.values())])

    def exchange(self, name: str) -> None:
        rebind(self.net.blocks[0].get_parameter(name))


@pytest.mark.long("takes a second or more")
@pytest.mark.parametrize("precision", first(["32-true", "bf16-mixed"], "bf16-mixed", why="the same in float32"))
@pytest.mark.parametrize("how", ["one", "two", "all", "written, too", "in a step", "after the forward"])
def test_kept_tensors_follow_the_weights_that_keep_their_memory(how: str, precision: str) -> None:
    """Those of a layer's other weights did not; and where a step had exchanged a weight, its old tensor showed new values."""
    plain = bare(lambda: KeepsState(how), "auto", vectors(6), precision=precision)
    for options in ({"k": 1}, {"k": 1, "keep_on_gpu": ["net.blocks.0"]}):
        with simulated():
            ours = bare(lambda: KeepsState(how), superpipeline(**options), vectors(6), precision=precision)
        assert_equal(ours, plain, str(options))


# ---------------------------------------------------------------------- what it costs


@pytest.mark.parametrize("k", [1, 8])
def test_plain_code_has_no_write_guard(k: int) -> None:
    """Nothing is downloaded and compared then."""
    found: list[Any] = []

    def look(trainer: Any, *_: Any) -> None:
        found.extend(layer.guard for layer in streamer_of(trainer.strategy)._layers)

    looks = Does(on_train_batch_start=look, on_before_backward=look, on_train_batch_end=look)
    strategy = superpipeline(k=k)
    fit(lambda: Module(net_of()), vectors(), strategy, callbacks=[looks], recorded="nothing")
    assert found
    assert set(found) == {None}
    assert strategy.stats().host_waits == 0


@pytest.mark.long("takes a second or more")
def test_a_weight_that_is_given_its_own_values_again_stays_where_it_is() -> None:
    """Each use in a block that ran again wrote all such weights of the block back, and fetched the block anew."""

    def make() -> Module:
        return At(lambda: Checkpointed(*(GivesItsOwnValues() for _ in range(3))))

    plain = fit(make, vectors())
    for device in (nullcontext(), simulated()):
        strategy = superpipeline(k=1, k_prime=1)
        with device:
            assert_same(fit(make, vectors(), strategy), plain)
        weights = sum(p.nbytes for p in make().parameters())
        stats = strategy.stats()
        assert stats.fetched_bytes <= 2.4 * weights * len(vectors())
        assert not stats.extra_slots


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_weights_that_are_cast_up_and_back_stay_where_they_are(precision: Any) -> None:
    """Each weight was copied to the host after each use. A view in the graph kept all the copies of 8 bits, too."""
    strategy = superpipeline(k=1, k_prime=1)
    fit(lambda: in_8_bits(CastBlock), vectors(), strategy, precision=precision)
    assert strategy.stats().host_waits <= 4 * len(vectors())  # one comparison a layer
    assert strategy.stats().fetched_layers <= 2 * 4 * len(vectors())


class KeepsTheOldMemory(At):
    """Gives a weight other memory between two steps and keeps the old, as a swap of averages does; writes it in the next."""

    def __init__(self, write: str) -> None:
        super().__init__(start=self.write)
        self.how = write

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        weight = self.net[1].first.weight
        if batch_idx == 1:
            self.kept.append(weight.data)
            rebind(weight)

    def write(self, m: At) -> None:
        data = self.net[1].first.weight.data
        data.copy_(self.net[2].first.weight.data) if self.how == "copy" else data.mul_(0.9)


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.parametrize("resident", [(), ("net.1",)])
@pytest.mark.parametrize("write", ["copy", "mul"])
def test_a_layer_that_left_its_memory_to_user_code_is_not_out_of_date_for_ever(write: str, resident: Any) -> None:
    strategy = superpipeline(k=1, keep_on_gpu=resident)
    ours = fit(lambda: KeepsTheOldMemory(write), vectors(5), strategy, recorded="losses")
    assert_same(ours, fit(lambda: KeepsTheOldMemory(write), vectors(5), recorded="losses"))
    if not resident:
        fetches = strategy.fetches()
        assert fetches["net.1"] <= fetches["net.2"] + 2


# ---------------------------------------------------------------------- automatic choices


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.usefixtures("nothing_fits", "everything_is_worth_moving")
def test_auto_offloads_activations_of_layers_that_are_written_in_between() -> None:
    def make() -> Module:
        return At(after_forward=lambda m: [rebind(p) for p in m.net.parameters()])

    strategy = superpipeline(k=2, k_prime=1, activations="auto", gpu_memory="64KiB")
    assert_same(fit(make, vectors(), strategy), fit(make, vectors()))
    assert "offload" in strategy.activations.values()


class GivesOnce(nn.Module):
    """Gives its weight other memory in the first call of a step, and may write that memory in the others."""

    def __init__(self, writes: bool) -> None:
        super().__init__()
        self.writes = writes
        self.linear, self.given = nn.Linear(16, 16), list[Tensor]()

    def forward(self, x: Tensor) -> Tensor:
        if not self.given:
            self.linear.weight.data = given = self.linear.weight.data * 0.5
            self.given.append(given)
        elif self.writes:
            self.given[0].mul_(0.5)
        return torch.tanh(self.linear(x))


@pytest.mark.parametrize(
    ("inside", "precision"), [(False, "32-true"), (True, "32-true"), (False, "bf16-mixed"), (True, "bf16-mixed")]
)
@pytest.mark.parametrize("changes", [True, False], ids=["written", "not written"])
def test_given_memory_is_written_between_two_calls_of_a_step_and_in_them(
    changes: bool, inside: bool, precision: Any
) -> None:
    def loss(m: Any, batch: Tensor) -> Tensor:
        for block in m.net:
            block.given.clear()
        with torch.no_grad():
            m.net(batch)
            for block in m.net if changes else ():
                block.given[0].mul_(0.5)
            m.seen.append(m.net(batch).clone())
            for block in m.net:
                block.given[0].add_(0.1)
            m.seen.append([block.linear.weight.detach().clone() for block in m.net])
        result: Tensor = m.net(batch).square().mean()
        return result

    make = lambda: At(lambda: GivesOnce(inside), loss=loss)  # noqa: E731
    ours, plain = (fit(make, vectors(2), each, precision=precision) for each in (superpipeline(k=1), "auto"))
    assert_same(ours, plain)
    assert_equal(ours.module.seen, plain.module.seen, "what a step has seen")  # type: ignore[union-attr]


# ---------------------------------------------------------------------- states that no option forces

UNKNOWN: dict[str, Callable[[Any, Any, Any], tuple[Any, str, Any]]] = {
    "an update is under way": lambda writes, layer, slot: (layer.owner, "update", Future()),
    "the CPU's was written": lambda writes, layer, slot: (StreamedLayer, "stale", True),
    "the slot has to be filled again": lambda writes, layer, slot: (slot, "stale", True),
    "the slot's views may write it": lambda writes, layer, slot: (guard_of(layer), "digests", object()),
    "only rows are uploaded": lambda writes, layer, slot: (layer, "planned", replace(layer.planned, rows=(0,))),
    "a table": lambda writes, layer, slot: (layer, "kind", Kind.TABLE),
    "residents": lambda writes, layer, slot: (layer, "kind", Kind.RESIDENTS),
    "the weight was handed out": lambda writes, layer, slot: (guard_of(layer), "diverged", {0}),
    "it has another dtype": lambda writes, layer, slot: (guard_of(layer), "retyped", {0: torch.ones(1)}),
}


@pytest.mark.parametrize("why", UNKNOWN)
def test_a_weight_is_not_compared_with_a_slot_that_may_have_other_values_than_the_host(why: str) -> None:
    """Then it is written back, as before. Equal to the slot, it would be taken for the host's."""
    found: list[set[int]] = []

    def ask(m: At) -> None:
        writes = streamer_of(m.trainer.strategy)._writes
        slot = next(each for each in writes._slots.all if each.layer is not None)
        given = {0: writes._slots.views(slot.layer, slot)[0].clone()}
        found.append(writes._alike(slot, given))
        owner, name, value = UNKNOWN[why](writes, slot.layer, slot)
        with mock.patch.object(owner, name, value):
            found.append(writes._alike(slot, given))

    fit(lambda: At(after_forward=ask), vectors(1), superpipeline(k=1))
    assert found == [{0}, set()]


class Scaled(nn.Module):
    """Backward reads the scale as autograd has saved it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.scale = nn.Linear(16, 16), nn.Parameter(torch.ones(16))

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.inner(x)) * self.scale


class Precise(Module):
    """Calls a layer in another dtype, and gives it its own dtype back."""

    def __init__(self, after: bool) -> None:
        super().__init__(nn.Sequential(*(Scaled() for _ in range(4))))
        self.after = after

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx) if self.after else None
        if batch_idx == 1:
            layer: Any = self.net[1]  # type: ignore[index]
            with torch.no_grad():
                layer.double()
                layer(torch.ones(2, 16, dtype=torch.double))
                layer.float()
        return super().training_step(batch, batch_idx) if loss is None else loss


@pytest.mark.parametrize("after", [False, True])
def test_a_layer_has_another_dtype_for_a_while(after: bool) -> None:
    """Later backwards read the values from before."""
    make = lambda: Precise(after)  # noqa: E731
    with simulated():
        ours = fit(make, vectors(4), superpipeline(k=1))
    assert_same(ours, fit(make, vectors(4)))
