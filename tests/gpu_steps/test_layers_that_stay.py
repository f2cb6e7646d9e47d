"""Layers that stay on the device: what user code keeps, replaces or reads of them meanwhile, as on plain Lightning.

Each test was written after a program whose numbers differed without an error.
"""

from __future__ import annotations

import copy
import itertools
import os
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import SGD, AdamW, Optimizer
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.hooks import RemovableHandle

from sp_lightning.capabilities.gpu_steps.away import _NEED_NO_VALUES
from sp_lightning.core.layers.layer import StreamedLayer
from sp_lightning.core.updates.background import BackgroundUpdates
from tests.support.engine import Slots
from tests.support.models import vectors
from tests.support.nets import Does
from tests.support.on_device import Stepped, on_device
from tests.support.runs import Outcome, assert_equal, assert_same, fit, loader, superpipeline
from tests.support.simdevice import simulated
from tests.support.tiers import first

WAYS: dict[str, Callable[[], Any]] = {
    "all layers": lambda: on_device(gpu_layers=1.0, optimizer_overlap="off"),
    "half of them": lambda: superpipeline(k=1, gpu_layers=0.5, optimizer_overlap="off"),
}
Act = Callable[[Any, Any], object]


def weight(module: Any) -> Any:
    found = module.net.blocks[0].inner.weight
    assert isinstance(found, Tensor)
    return found


def momentum(parameters: Any) -> Optimizer:
    return SGD(parameters, lr=0.1, momentum=0.9)


def after_batches(act: Act, make: Callable[[Any], Optimizer], strategy: Any, **options: Any) -> Outcome:
    """Trains, and calls ``act`` with the trainer and the module after each batch."""
    does = Does(on_train_batch_end=lambda trainer, module, *_: act(trainer, module))
    return fit(lambda: Stepped(make), vectors(7), strategy, callbacks=[does], recorded="losses", **options)


def assert_as_plain(act: Callable[[], Act], make: Callable[[Any], Optimizer], way: str, **options: Any) -> None:
    """Compares with plain Lightning; each run gets an ``act`` of its own."""
    with simulated():
        ours = after_batches(act(), make, WAYS[way](), **options)
    assert_same(ours, after_batches(act(), make, "auto", **options))


class LeavesOut(Stepped):
    """The third batch has no loss, or uses only the last block, so that layers that stay are not stepped."""

    def __init__(self, kept: int) -> None:
        super().__init__()
        self.kept = kept

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx != 2:
            return super().training_step(batch, batch_idx)
        return self.net.blocks[-1](batch).square().mean() if self.kept else None  # type: ignore[index,operator,union-attr]


@pytest.mark.long("takes a second or more")
@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
@pytest.mark.parametrize(
    ("way", "kept"), first(itertools.product(WAYS, (0, 1)), ("half of them", 1), why="the same elsewhere")
)
def test_a_batch_that_steps_no_layer_is_plains(kept: int, way: str) -> None:
    """Weights are read after each batch, so the next step uploads state. Landing did not wait for that upload."""

    def trained(strategy: Any) -> Outcome:
        reads = Does(on_train_batch_end=lambda _, module, *__: [p.detach().norm() for p in module.parameters()])
        return fit(partial(LeavesOut, kept), vectors(6), strategy, callbacks=[reads], recorded="losses")

    with simulated():
        ours = trained(WAYS[way]())
    assert_same(ours, trained("auto"))


@pytest.mark.parametrize("which", ["blocks.0.inner", "head"])
def test_a_weight_is_given_memory_beside_layers_that_stay(which: str) -> None:
    """The weights of the layers that stay were read, to see whether one has the same memory: an error that named them."""

    def given(_: Any, module: Any, *__: Any) -> None:
        weight = module.net.get_submodule(which).weight
        weight.data = weight.detach().clone()

    def trained(strategy: Any) -> Outcome:
        return fit(Stepped, vectors(4), strategy, callbacks=[Does(on_train_batch_start=given)], recorded="losses")

    with simulated():
        ours = trained(superpipeline(k=1, optimizer_on="gpu", gpu_layers=1))
    assert_same(ours, trained("auto"))


class ReturnsParameters(Stepped):
    """Steps return parameters, and hooks read what they have returned."""

    seen: ClassVar[list[Any]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"loss": super().training_step(batch, batch_idx), "weight": weight(self)}

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        return [self.net(batch), weight(self), {"all": list(self.parameters())}]

    predict_step = validation_step

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.seen.append(tree_map_only(Tensor, lambda each: each.detach().clone(), outputs))

    on_validation_batch_end = on_predict_batch_end = on_train_batch_end


@pytest.mark.long("a special case of layers that user code reads")
@pytest.mark.parametrize("options", [{}, {"optimizer_on": "gpu", "gpu_layers": 3}], ids=str)
def test_steps_that_return_parameters(options: dict[str, Any]) -> None:
    def run(strategy: Any) -> tuple[Outcome, list[Any]]:
        ReturnsParameters.seen = seen = []
        trained = fit(ReturnsParameters, vectors(4), strategy, vectors(2), recorded="losses")
        seen.append(trained.trainer.predict(trained.module, loader(vectors(2))))
        return trained, seen

    with simulated():
        ours, seen = run(superpipeline(k=1, **options))
    plain, expected = run("auto")
    assert_same(ours, plain)
    assert_equal(seen, expected, "what steps return")
    assert {type(each) for each in tree_leaves(seen[-1])} == {Tensor, Parameter}


# ---------------------------------------------------------------------- functions that land nothing

_GIVEN: dict[Any, tuple[Any, ...]] = {
    Tensor.grad.__set__: (None,),  # type: ignore[attr-defined]
    Tensor.requires_grad.__set__: (True,),  # type: ignore[attr-defined]
    Tensor.register_hook: (lambda gradient: None,),
    Tensor.register_post_accumulate_grad_hook: (lambda parameter: None,),
}


def answers(module: Any) -> list[Any]:
    """What each function that lands nothing returns for each weight, called twice. Handles of hooks are removed again."""
    found: list[Any] = []
    for p in module.net.parameters():
        for func in (*sorted(_NEED_NO_VALUES, key=repr), Tensor.is_shared, Tensor.is_pinned, repr):
            for _ in range(2):
                try:
                    answer = func(p, *_GIVEN.get(func, ()))
                except (RuntimeError, AttributeError) as error:  # for example `names` of a tensor without names
                    answer = type(error)
                if isinstance(answer, RemovableHandle):
                    answer.remove()
                simple = isinstance(answer, (bool, int, str, tuple, torch.dtype, torch.device, torch.layout, type))
                found.append((func, answer if simple else type(answer)))
    return found


@pytest.mark.long("takes a second or more")
@pytest.mark.parametrize("way", first(WAYS, "half of them", why="the same with all layers"))
def test_functions_of_weights_that_stay_answer_as_plains(way: str) -> None:
    """``is_shared`` made a storage object without memory, and torch ended the process when it was freed."""
    seen: list[list[Any]] = []
    for strategy in (WAYS[way](), "auto"):
        found: list[Any] = []
        after_batches(lambda _, module, found=found: found.extend(answers(module)), momentum, strategy)  # type: ignore[misc]
        seen.append(found)
    differ = [(mine, theirs) for mine, theirs in zip(*seen, strict=True) if repr(mine) != repr(theirs)]
    assert not differ


# ---------------------------------------------------------------------- state


@pytest.mark.long("takes a second or more")
@pytest.mark.parametrize("way", WAYS)
def test_a_state_that_is_loaded_in_mid_run_counts(way: str) -> None:
    def load() -> Act:
        kept: list[Any] = []

        def act(trainer: Any, _: Any) -> None:
            optimizer = trainer.optimizers[0]
            if trainer.global_step == 2:
                kept.append(copy.deepcopy(optimizer.state_dict()))
            if trainer.global_step == 4:
                optimizer.load_state_dict(kept[0])

        return act

    assert_as_plain(load, AdamW, way)


@pytest.mark.long("takes a second or more")
@pytest.mark.parametrize("way", WAYS)
def test_a_parameter_without_a_group_keeps_its_state(way: str) -> None:
    def remove() -> Act:
        removed: list[Tensor] = []

        def act(trainer: Any, module: Any) -> None:
            parameters = trainer.optimizers[0].param_groups[0]["params"]
            if trainer.global_step == 2:
                removed.append(parameters.pop(2))
            if trainer.global_step == 3:
                weight(module).norm()
            if trainer.global_step == 4:
                parameters.insert(2, removed[0])

        return act

    assert_as_plain(remove, AdamW, way)


@pytest.mark.long("takes a second or more")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("written", [False, True], ids=["read", "written"])
def test_a_state_that_user_code_has_kept_is_the_optimizers(way: str, written: bool) -> None:
    def run(strategy: Any) -> tuple[Outcome, list[Tensor]]:
        kept: list[dict[str, Tensor]] = []
        seen: list[Tensor] = []

        def act(trainer: Any, module: Any) -> None:
            if trainer.global_step == 2:
                kept.append(trainer.optimizers[0].state[weight(module)])
            if kept and written:
                kept[0]["momentum_buffer"] = torch.full_like(weight(module), 0.5)
            elif kept:
                seen.append(kept[0]["momentum_buffer"].clone())

        return after_batches(act, momentum, strategy), seen

    with simulated():
        ours, seen = run(WAYS[way]())
    plain, expected = run("auto")
    assert_same(ours, plain)
    assert_equal(seen, expected, "state")


# ---------------------------------------------------------------------- weights


@pytest.mark.long("takes a second or more")
@pytest.mark.parametrize("way", WAYS)
def test_a_storage_that_user_code_has_kept_has_the_weights(way: str) -> None:
    def run(strategy: Any) -> list[list[int]]:
        kept: list[Any] = []
        seen: list[list[int]] = []

        def act(trainer: Any, module: Any) -> None:
            if trainer.global_step == 2:
                kept.append(weight(module).untyped_storage())
            if kept:
                seen.append(list(kept[0])[:64])

        after_batches(act, momentum, strategy)
        return seen

    with simulated():
        ours = run(WAYS[way]())
    assert ours == run("auto")


@pytest.mark.long("takes a second or more")
@pytest.mark.parametrize("way", WAYS)
def test_casts_that_a_graph_has_saved_come_with_their_layer(way: str) -> None:
    """User code asks for a layer between forward and backward."""

    def look(trainer: Any, module: Any, *_: Any) -> None:
        weight(module).norm()

    def run(strategy: Any) -> Outcome:
        does = Does(on_before_zero_grad=look)
        return fit(Stepped, vectors(4), strategy, callbacks=[does], recorded="losses", precision="bf16-mixed")

    with simulated():
        ours = run(WAYS[way]())
    assert_same(ours, run("auto"))


@pytest.mark.parametrize("way", WAYS)
def test_a_weight_that_another_thread_has_kept_does_not_stop_updates(way: str) -> None:
    def keep() -> Act:
        kept: list[Tensor] = []

        def act(trainer: Any, module: Any) -> None:
            if trainer.global_step == 2:
                thread = threading.Thread(target=lambda: kept.append(weight(module).detach()))
                thread.start()
                thread.join()

        return act

    ours = after_batches(keep(), momentum, WAYS[way]())
    assert_same(ours, after_batches(keep(), momentum, "auto"))


@pytest.mark.rest("takes tenths of a second")
def test_a_layer_that_stays_never_takes_the_slot_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Slots] = []
    make = Slots.__init__

    def noting(self: Slots, *args: Any, **options: Any) -> None:
        found.append(self)
        make(self, *args, **options)

    monkeypatch.setattr(Slots, "__init__", noting)
    checked: list[bool] = []

    def act(*_: Any) -> None:
        slots = found[0]
        first, *others = [layer for layer in slots._layers if layer.own_slot is not None]
        assert first.own_slot is not None
        view = first.own_slot.lease.memory[:4]  # which user code holds
        checked.append(slots.find(first, lambda layer: 1.0) in [layer.own_slot for layer in others])
        del view

    with simulated():
        after_batches(act, momentum, on_device(gpu_layers=1.0, optimizer_overlap="off"))
    assert checked
    assert not any(checked)


# ---------------------------------------------------------------------- steps of user code


class Declared(Optimizer):
    """Writes gradients, and looks at attributes of its parameters."""

    steps_each_parameter_alone = True

    def __init__(self, parameters: Any, unseen: bool) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.unseen = unseen

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for p in (p for group in self.param_groups for p in group["params"]):
            if p.grad is not None and p.requires_grad:
                (p.grad.data if self.unseen else p.grad).mul_(0.5)
                p.sub_(p.grad, alpha=0.1 * getattr(p, "scale", 1.0))
        return loss


@pytest.mark.long("takes a second or more")
@pytest.mark.parametrize("unseen", [False, True], ids=["grad", "grad.data"])
@pytest.mark.parametrize("options", [{"precision": "bf16-mixed"}, {"accumulate_grad_batches": 2}], ids=str)
def test_gradients_that_a_step_writes_are_read_as_it_has_left_them(unseen: bool, options: dict[str, Any]) -> None:
    def run(strategy: Any) -> tuple[Outcome, list[Any]]:
        seen: list[Any] = []

        def act(_: Any, module: Any) -> None:
            seen.append([None if p.grad is None else p.grad.clone() for p in module.parameters()])

        return after_batches(act, lambda parameters: Declared(parameters, unseen), strategy, **options), seen

    with simulated():
        ours, seen = run(WAYS["all layers"]())
    plain, expected = run("auto")
    assert_same(ours, plain)
    assert_equal(seen, expected, "gradients")


@pytest.mark.long("takes a second or more")
@pytest.mark.parametrize("what", ["scale", "requires_grad"])
def test_a_step_finds_the_attributes_that_parameters_have_now(what: str) -> None:
    def scale(trainer: Any, module: Any, *_: Any) -> None:
        if what == "scale":
            weight(module).scale = 1 / (1 + trainer.global_step)

    def freeze(trainer: Any, module: Any, *_: Any) -> None:
        if what == "requires_grad" and trainer.global_step == 2:
            weight(module).requires_grad_(False)

    def run(strategy: Any) -> Outcome:
        does = Does(on_train_batch_end=scale, on_after_backward=freeze)
        make = partial(Declared, unseen=False)
        return fit(lambda: Stepped(make), vectors(7), strategy, callbacks=[does], recorded="losses")

    with simulated():
        ours = run(WAYS["all layers"]())
    assert_same(ours, run("auto"))


@pytest.mark.long("takes a second or more")
@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_fork_does_not_land_the_layers_of_a_run_that_is_over() -> None:
    """The run could not land them, for example because the GPU has failed. A later fork would fail, too."""
    landing: list[StreamedLayer] = []

    def fails(self: BackgroundUpdates, layer: StreamedLayer) -> None:
        landing.append(layer)
        raise RuntimeError("the GPU has failed")

    with simulated(), mock.patch.object(BackgroundUpdates, "land", fails):
        with pytest.raises(RuntimeError, match="the GPU has failed"):
            after_batches(lambda *_: None, partial(SGD, lr=0.1), WAYS["all layers"]())
        of_the_run = list(landing)
        if not (child := os.fork()):
            os._exit(0)
        os.waitpid(child, 0)
    assert landing == of_the_run
    assert all(layer.kept for layer in of_the_run)
