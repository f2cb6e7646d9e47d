"""``gpu_layers``: the layers that stay on the device are ordinary modules there, and a step is divided by place."""

from __future__ import annotations

import copy
import itertools
import logging
import re
import weakref
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from sp_lightning import SuperpipelineStrategy, dial, stream
from sp_lightning.capabilities.activations.recompute import Unrepeatable
from sp_lightning.core.model.find import find_layers
from sp_lightning.core.model.found import tensor_bytes
from sp_lightning.core.model.wrapped import move, parts
from sp_lightning.core.torch_compat.private import current_graph_task
from sp_lightning.core.updates.fused import divide
from tests.support.models import CASES, Block, Module, SparseEmbedding, Stack, vectors
from tests.support.nets import Does
from tests.support.on_device import Stepped, on_device
from tests.support.plain_bits import BATCHES, OPTIMIZERS, RUNS
from tests.support.plain_bits import Stepped as OfKind
from tests.support.quantised import CASES as QUANTISED
from tests.support.runs import Outcome, as_on_a_gpu, assert_equal, assert_same, fit, superpipeline
from tests.support.simdevice import Mixed, simulated
from tests.support.staying import by_place
from tests.support.tiers import some

FUSED = partial(AdamW, lr=1e-2, fused=True)  # on the simulated device, both places have its bits


def run(make: Any, strategy: Any, *, batches: Any = BATCHES, **options: Any) -> Outcome:
    with simulated():
        return fit(make, batches, strategy, **{"recorded": "losses", **options})


# ---------------------------------------------------------------------- whose bits

WAYS = [
    (name, how, overlap)
    for name, how, overlap in itertools.product(OPTIMIZERS, RUNS, ("off", "forward", "backward"))
    if overlap != "backward" or how in ("plain", "clipped by value")
]


OF_EACH = [("AdamW", "clipped", "off"), ("AdamW", "clipped", "forward")]


@pytest.mark.rest("takes a second each")
@pytest.mark.parametrize(("name", "how", "overlap"), some(WAYS, *OF_EACH, why="other optimizers and options"))
def test_steps_are_divided_by_place(name: str, how: str, overlap: Any) -> None:
    """The CPU steps some layers, fused; the others are stepped where they are, as the user's optimizer was made."""
    make = partial(OfKind, OPTIMIZERS[name])
    strategy = SuperpipelineStrategy(k=1, optimizer_overlap=overlap, gpu_layers=3)
    with as_on_a_gpu():
        ours = run(make, strategy, recorded="nothing", **RUNS[how])
    assert_same(ours, fit(make, BATCHES, by_place(3), recorded="nothing", **RUNS[how]))


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.parametrize("share", [2, 0.5, 1.0])
@pytest.mark.parametrize("overlap", ["off", "forward"])
def test_with_optimizers_on_the_gpu_all_bits_are_plains(share: Any, overlap: Any) -> None:
    strategy = on_device(gpu_layers=share, optimizer_overlap=overlap)
    ours = run(Stepped, strategy, batches=BATCHES[:5], gradient_clip_val=0.05)
    assert_same(ours, fit(Stepped, BATCHES[:5], recorded="losses", gradient_clip_val=0.05))


MODES: dict[str, dict[str, Any]] = {
    "bf16-mixed": {"precision": "bf16-mixed"},
    "bf16-true": {"precision": "bf16-true"},
    "by value": {"gradient_clip_val": 1e-3, "gradient_clip_algorithm": "value"},
    "accumulated": {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1},
}


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.parametrize("mode", MODES)
def test_other_modes_of_training(mode: str) -> None:
    ours = run(partial(Stepped, FUSED), superpipeline(k=1, gpu_layers=0.5), batches=BATCHES[:5], **MODES[mode])
    assert_same(ours, fit(partial(Stepped, FUSED), BATCHES[:5], recorded="losses", **MODES[mode]))


class Overflows(Stepped):
    """The gradient of one layer is infinite in the second batch."""

    def __init__(self, where: str) -> None:
        super().__init__(FUSED)
        self.where = where

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        weight = self.net.get_submodule(self.where).weight
        return loss + (weight.sum() * 1e38 if batch_idx == 1 else 0.0)


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.parametrize("where", ["stem", "head"])
def test_a_step_is_skipped_if_either_place_has_an_infinity(where: str) -> None:
    """The first layers stay, so ``stem`` is on the device, and ``head`` is streamed."""

    def options() -> dict[str, Any]:
        return {"plugins": MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=256.0))}

    ours = run(partial(Overflows, where), superpipeline(k=1, gpu_layers=2), batches=BATCHES[:5], **options())
    plain = fit(partial(Overflows, where), BATCHES[:5], recorded="losses", **options())
    assert_same(ours, plain)
    scales = [each.trainer.precision_plugin.scaler.get_scale() for each in (ours, plain)]
    assert scales == [128.0, 128.0]


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.parametrize("overlap", ["off", "forward"])
def test_a_step_that_cannot_be_divided_into_layers_is_divided_by_place(overlap: Any) -> None:
    """A sparse gradient: torch's own code steps all layers at once."""
    case = CASES["sparse-embedding"]
    strategy = superpipeline(k=1, gpu_layers=2, optimizer_overlap="off")
    assert SparseEmbedding in type(case.make()).__mro__
    ours = run(case.make, strategy, batches=case.batches())
    assert_same(ours, fit(case.make, case.batches(), by_place(2, fuse=False), recorded="losses"))


class ByHand(Stepped):
    """Manual optimization, with torch's clipping of all gradients."""

    def __init__(self) -> None:
        super().__init__(FUSED)
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> None:  # type: ignore[override]
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        torch.nn.utils.clip_grad_norm_(self.parameters(), 0.05)
        optimizer.step()


class ByClosure(ByHand):
    def training_step(self, batch: Tensor, batch_idx: int) -> None:  # type: ignore[override]
        optimizer: Any = self.optimizers()

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = self.loss(batch)
            self.manual_backward(loss)
            return loss

        optimizer.step(closure=closure)


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.parametrize("make", [ByHand, ByClosure])
def test_manual_optimization(make: Any) -> None:
    ours = run(make, superpipeline(k=1, gpu_layers=3), batches=BATCHES[:4], recorded="nothing")
    assert_same(ours, fit(make, BATCHES[:4], recorded="nothing"))


class Unfreezes(Stepped):
    """Unfreezes layers of both places in mid-run, and adds their parameters to the optimizer."""

    def __init__(self) -> None:
        super().__init__(lambda ps: FUSED([p for p in ps if p.requires_grad]))
        self.net.blocks.requires_grad_(False)

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.trainer.optimizers[0].add_param_group({"params": list(self.net.blocks.requires_grad_().parameters())})


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.parametrize("overlap", ["off", "forward"])
def test_layers_that_are_unfrozen_in_mid_run(overlap: Any) -> None:
    strategy = superpipeline(k=1, gpu_layers=3, optimizer_overlap=overlap)
    ours = run(Unfreezes, strategy, batches=BATCHES[:3], max_epochs=3)
    assert_same(ours, fit(Unfreezes, BATCHES[:3], max_epochs=3, recorded="losses"))


# ---------------------------------------------------------------------- which layers, and what they take


@pytest.mark.parametrize(
    ("gpu_layers", "names"),
    [(0, []), (2, ["net.stem", "net.blocks.0"]), (0.5, ["net.stem", "net.blocks.0", "net.blocks.1", "net.blocks.2"])],
)
def test_the_first_layers_stay(gpu_layers: Any, names: list[str]) -> None:
    module = Module(Stack())
    every, found = find_layers(module), find_layers(module, gpu_layers=gpu_layers)
    assert [layer.name for layer in found.stay] == names
    assert [layer.name for layer in (*found.stay, *found.layers)] == [layer.name for layer in every.layers]
    assert found.on_gpu | found.places.keys() == set(module.parameters())
    assert not found.on_gpu & found.places.keys()
    assert found.units == every.units, "they have modes of activations, as other layers"


class Made(Module):
    """Notes which parameters are on the device when the optimizer is made."""

    def __init__(self, net: nn.Module, moved: list[Any]) -> None:
        super().__init__(net)
        self.moved = moved

    def configure_optimizers(self) -> Any:
        self.there = set(self.moved)
        raise RuntimeError("enough")


def test_layers_are_there_before_the_optimizer_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    moved: list[Any] = []
    monkeypatch.setattr("sp_lightning.trainer.run.move", lambda each, _: moved.append(each))
    module = Made(Stack(), moved)
    with pytest.raises(RuntimeError, match="enough"):
        fit(lambda: module, BATCHES[:1], superpipeline(gpu_layers=2), recorded="nothing")
    there: Any = module.net
    assert module.there == {*there.stem.parameters(), *there.blocks[0].parameters()}


def test_a_tied_weight_stays_or_streams_as_one() -> None:
    net: Any = nn.Module()
    net.embed, net.head = nn.Embedding(64, 16), nn.Linear(16, 64, bias=False)
    net.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
    net.head.weight = net.embed.weight
    found = find_layers(net, layers=["embed", "blocks.*", "head"], gpu_layers=1)
    assert net.head.weight in found.on_gpu
    assert len(found.layers) == 3


@pytest.mark.rest("takes tenths of a second")
def test_what_stays_moves_nothing_and_takes_no_host_memory() -> None:
    strategy = superpipeline(k=1, gpu_layers=1.0)
    ours = run(partial(Stepped, FUSED), strategy, batches=BATCHES[:4])
    stats, plan, ledger = strategy.stats(), strategy.plan, strategy.ledger
    assert stats.fetched_bytes == stats.offloaded_gradient_bytes == stats.step_upload_bytes == 0
    assert (plan.host_bytes, ledger.nbytes) == (0, 0)
    trained = sum(p.nbytes for p in ours.module.parameters())
    assert plan.staying == (trained, trained)
    assert stats.peak_device_bytes <= plan.peak_device_bytes == 5 * trained
    assert plan.nothing == "nothing is streamed: gpu_layers keeps all layers on the GPU"


@pytest.mark.rest("takes tenths of a second")
def test_gradients_of_layers_that_stay_are_counted_when_a_backward_begins_and_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They were counted at each gradient that arrived, but not at the end, when the last ones are still in flight."""
    counted: list[Tensor] = []

    def count(gradient: Tensor) -> int:
        counted.extend([gradient] if current_graph_task() != -1 else [])  # not those of `stats()`
        return tensor_bytes(gradient)

    monkeypatch.setattr("sp_lightning.core.engine.streamer.tensor_bytes", count)
    strategy = superpipeline(k=1, gpu_layers=6)
    ours = run(partial(Stepped, FUSED), strategy, batches=BATCHES[:2], accumulate_grad_batches=2)
    assert strategy.stats().peak_gradient_bytes == sum(p.nbytes for p in ours.module.parameters())
    names = tuple(f"{name}." for name, _, _ in strategy.plan.stay)
    stay = sum(name.startswith(names) for name, _ in ours.module.named_parameters())
    assert len(counted) == 3 * stay, "the first backward begins without gradients"


@pytest.mark.rest("takes tenths of a second")
def test_too_many_layers_are_refused_with_what_they_take() -> None:
    with (
        pytest.raises(ValueError, match=r"The 7 layers that stay take .*: lower gpu_layers"),
        simulated(capacity=70_000),
    ):
        fit(Stepped, BATCHES[:2], superpipeline(k=1, gpu_layers=1.0, gpu_memory=70_000), recorded="losses")


@pytest.mark.rest("takes tenths of a second")
def test_out_of_memory_names_a_smaller_number() -> None:
    class Full(Stepped):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            raise torch.OutOfMemoryError("full")

    with pytest.raises(torch.OutOfMemoryError) as raised:
        run(Full, superpipeline(k=1, gpu_layers=4))
    (note, *_) = raised.value.__notes__
    assert "The 4 layers that stay take " in note
    assert "use fewer, SuperpipelineStrategy(gpu_layers=2)." in note


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.parametrize("mode", ["recompute", "offload"])
def test_activations_of_layers_that_stay_have_a_mode(mode: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sp_lightning.capabilities.activations.offload.WORTH_MOVING", 1)
    make = partial(Stepped, FUSED)
    strategy = superpipeline(k=1, gpu_layers=0.5, activations=mode)
    ours = run(make, strategy, batches=BATCHES[:4])
    assert strategy.activations == dict.fromkeys(find_layers(make()).units, mode)
    assert_same(ours, fit(make, BATCHES[:4], recorded="losses"))
    if mode == "offload":  # and their weights are not offloaded
        without = superpipeline(k=1, activations=mode)
        run(make, without, batches=BATCHES[:4])
        assert strategy.stats().offloaded_activation_bytes == without.stats().offloaded_activation_bytes > 0


class Writes(Block):
    """Writes weights in its forward: its own, a frozen number that nothing reads, or the first block's."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what
        self.count = nn.Parameter(torch.zeros(1), requires_grad=False)
        self.other: list[Any] = []  # a list, so that the module is no child

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            if self.what == "own":
                self.inner.weight.mul_(0.9)
            elif self.what == "a number":
                self.count.add_(1)
            elif self.what == "a number, by .data":
                self.count.data.add_(1)
            elif self.what == "another's" and self.other:
                self.other[0].count.add_(1)
        if self.what == "gradients" and torch.is_grad_enabled():
            super().forward(x.detach()).square().mean().backward()
        return super().forward(x)


def writing(what: str) -> Module:
    blocks = [Writes(what) for _ in range(4)]
    blocks[3].other.append(blocks[0])
    return Module(nn.Sequential(*blocks))


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.parametrize("what", ["own", "a number", "a number, by .data", "another's", "gradients"])
@pytest.mark.parametrize("stay", [1, 4])
def test_a_forward_that_would_write_a_weight_twice_is_refused(what: str, stay: int) -> None:
    """It runs again in backward. Without an error, numbers were counted twice."""
    with pytest.raises(Unrepeatable, match=r"writes|runs a backward"):
        run(partial(writing, what), superpipeline(k=1, gpu_layers=stay, activations="recompute"))


# ---------------------------------------------------------------------- how memory is moved


def test_a_parameter_is_moved_in_its_place() -> None:
    """Other code may refer to it, for example weakly. Its gradient is moved, too."""
    parameter = nn.Parameter(torch.ones(3))
    parameter.grad = torch.ones(3)
    known, memory = weakref.ref(parameter), parameter.data_ptr()
    moved: list[Tensor] = []
    move(parameter, lambda each: moved.append(each.clone()) or moved[-1])  # type: ignore[func-returns-value]
    assert known() is parameter
    assert [each.data_ptr() for each in moved] == [parameter.data_ptr(), parameter.grad.data_ptr()]
    assert memory not in [each.data_ptr() for each in moved]


@pytest.mark.filterwarnings("ignore:TorchaoLoraLinear was instantiated without")
def test_the_parts_of_a_wrapped_parameter_are_moved() -> None:
    module = QUANTISED["int8"]()
    weight: Any = next(p for p in module.parameters() if is_traceable_wrapper_subclass(p))
    known, before = weakref.ref(weight), [(part, part.clone()) for _, part in parts("", weight)]
    move(weight, torch.clone)
    assert known() is weight
    for (_, part), (old, value) in zip(parts("", weight), before, strict=True):
        assert torch.equal(part, value)
        assert part.data_ptr() != old.data_ptr()


def test_a_parameter_of_bitsandbytes_is_moved_as_it_is() -> None:
    """``Module.to`` would quantise it."""
    kind = pytest.importorskip("bitsandbytes").nn.Params4bit
    weight = kind(torch.ones(64, 64), requires_grad=False)
    memory = weight.data_ptr()
    move(weight, torch.clone)
    assert type(weight) is kind
    assert weight.data_ptr() != memory
    assert (weight.dtype, weight.bnb_quantized) == (torch.float32, False)


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
@pytest.mark.parametrize("ours_first", [True, False])
def test_a_run_goes_on_with_and_without_layers_that_stay(ours_first: bool, tmp_path: Path) -> None:
    make = partial(Stepped, FUSED)
    ways = [lambda: superpipeline(k=1, gpu_layers=3), lambda: "auto"]
    before, after = ways if ours_first else reversed(ways)
    saver = ModelCheckpoint(dirpath=tmp_path, filename="first", save_last=False)
    run(make, before(), batches=BATCHES[:3], callbacks=[saver], enable_checkpointing=True)
    went_on = run(make, after(), batches=BATCHES[:3], ckpt_path=tmp_path / "first.ckpt", max_epochs=2)
    assert_same(went_on, fit(make, BATCHES[:3], ckpt_path=tmp_path / "first.ckpt", max_epochs=2, recorded="losses"))


@pytest.mark.rest("takes tenths of a second")
def test_layers_that_stay_leave_a_gpu_that_is_released() -> None:
    def released(trainer: Any, module: Any, *_: Any) -> None:
        with trainer.strategy.gpu_released() as staying:
            assert staying == 0

    does = [Does(on_train_batch_end=released)]
    ours = run(partial(Stepped, FUSED), superpipeline(k=1, gpu_layers=3), batches=BATCHES[:4], callbacks=does)
    assert_same(ours, fit(partial(Stepped, FUSED), BATCHES[:4], recorded="losses"))


def looped(module: Any, optimizer: Optimizer, batches: Any) -> None:
    torch.manual_seed(1)  # the module drops activations
    for batch in batches:
        optimizer.zero_grad()
        module(batch).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 0.05)
        optimizer.step()


@pytest.mark.rest("takes tenths of a second")
def test_a_stream_moves_the_state_of_its_optimizer_and_puts_it_back() -> None:
    torch.manual_seed(1)
    plain = Stack()
    ours = copy.deepcopy(plain)
    expected, optimizer = FUSED(plain.parameters()), FUSED(ours.parameters())
    looped(plain, expected, BATCHES[:3])
    looped(plain, expected, BATCHES[3:])
    looped(ours, optimizer, BATCHES[:3])
    moved: list[Any] = []
    with simulated() as made, stream(ours, optimizer, k=1, gpu_layers=3):
        looped(ours, optimizer, BATCHES[3:])
        moved += [each for p in ours.parameters() for each in optimizer.state[p].values() if made[0].has(each)]
        moved += [p for p in ours.parameters() if made[0].has(p)]
    assert len(moved) == 3 * 10, "a weight and two moments for each of ten parameters"
    assert not any(made[0].has(each) for each in moved), "all of it is back"
    assert_equal(dict(ours.state_dict()), dict(plain.state_dict()), "weights")
    assert_equal(optimizer.state_dict(), expected.state_dict(), "optimizer")


# ---------------------------------------------------------------------- user code


@pytest.mark.rest("takes tenths of a second")
def test_state_that_is_loaded_in_mid_run_counts() -> None:
    def act() -> Any:
        kept: list[Any] = []

        def load(trainer: Any, *_: Any) -> None:
            if trainer.global_step == 2:
                kept.append(copy.deepcopy(trainer.optimizers[0].state_dict()))
            if trainer.global_step == 4:
                trainer.optimizers[0].load_state_dict(kept[0])

        return [Does(on_train_batch_end=load)]

    make, batches = partial(Stepped, FUSED), BATCHES
    ours = run(make, superpipeline(k=1, gpu_layers=3), batches=batches, callbacks=act())
    assert_same(ours, fit(make, batches, callbacks=act(), recorded="losses"))


class LeavesOut(Stepped):
    """The third batch has no loss, or uses only the last block, so that layers that stay are not stepped."""

    def __init__(self, kept: int) -> None:
        super().__init__(FUSED)
        self.kept = kept

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx != 2:
            return super().training_step(batch, batch_idx)
        return self.net.blocks[-1](batch).square().mean() if self.kept else None  # type: ignore[index,operator,union-attr]


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
@pytest.mark.parametrize("kept", [0, 1])
@pytest.mark.parametrize("overlap", ["off", "forward"])
def test_a_batch_that_steps_no_layer(kept: int, overlap: Any) -> None:
    strategy = superpipeline(k=1, gpu_layers=3, optimizer_overlap=overlap)
    ours = run(partial(LeavesOut, kept), strategy, batches=BATCHES)
    assert_same(ours, fit(partial(LeavesOut, kept), BATCHES, recorded="losses"))


def test_code_between_steps_that_mixes_both_places_is_an_error() -> None:
    """torch's own, on a GPU."""

    def mixes(_: Any, module: Any, *__: Any) -> None:
        module.net.stem.bias + module.net.head.bias

    with pytest.raises(Mixed):
        run(Stepped, superpipeline(k=1, gpu_layers=2), callbacks=[Does(on_train_batch_end=mixes)])


class Counts(Optimizer):
    """Writes a setting of its groups in each step."""

    steps_each_parameter_alone = True

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1, "count": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            group["count"] += 1
            for p in (p for p in group["params"] if p.grad is not None):
                p.sub_(p.grad, alpha=0.1)
        return loss


def two_groups(parameters: Any) -> Counts:
    parameters = list(parameters)
    return Counts([{"params": parameters[:6]}, {"params": parameters[6:]}])


def test_a_step_that_writes_settings_of_divided_groups_is_refused() -> None:
    with pytest.raises(
        RuntimeError, match=r"gpu_layers divides param_groups by place, but Counts\.step writes settings"
    ):
        run(partial(Stepped, Counts), superpipeline(k=1, gpu_layers=2))


@pytest.mark.rest("takes tenths of a second")
def test_it_may_write_those_of_groups_in_one_place() -> None:
    make = partial(Stepped, two_groups)
    assert_same(run(make, superpipeline(k=1, gpu_layers=2)), fit(make, BATCHES, recorded="losses"))


# ---------------------------------------------------------------------- what is refused


class OfItsOwn(Optimizer):
    """No one knows what it does."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    step = Counts.step


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (torch.optim.LBFGS, "LBFGS steps all parameters together"),
        (OfItsOwn, "OfItsOwn is not known to step each parameter by itself"),
    ],
)
def test_an_optimizer_that_does_not_step_each_parameter_alone(make: Any, said: str) -> None:
    with pytest.raises(
        ValueError, match=f"gpu_layers=2 steps some layers on the GPU and the others on the CPU: {said}"
    ):
        run(partial(Stepped, make), superpipeline(k=1, gpu_layers=2))


class Halves(Stepped):
    """The first layers are frozen, or have an optimizer of their own."""

    def __init__(self, frozen: bool) -> None:
        super().__init__()
        self.frozen = frozen
        if frozen:
            for p in list(self.parameters())[:6]:
                p.requires_grad_(False)

    def configure_optimizers(self) -> Any:
        parameters = list(self.parameters())
        first, others = parameters[:6], torch.optim.LBFGS(parameters[6:])
        return others if self.frozen else SGD(first, lr=0.1)


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.parametrize("frozen", [True, False])
def test_any_optimizer_may_have_parameters_in_one_place(frozen: bool) -> None:
    options: dict[str, Any] = {"batches": BATCHES[:3]}
    ours = run(partial(Halves, frozen), superpipeline(k=1, gpu_layers=2), **options)
    assert_same(ours, fit(partial(Halves, frozen), BATCHES[:3], recorded="losses"))


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        (-1, ValueError, "a number of layers (8) or a share of them (0.5), found -1"),
        (1.5, ValueError, "found 1.5. For example gpu_layers=0.5"),
        (float("nan"), ValueError, "found nan"),
        (True, TypeError, "found True"),
        ("all", TypeError, "found 'all'"),
        ("auto", ValueError, "`superpipeline plan MODEL --gpu-layers auto --gpu-memory 22GiB` proposes one."),
    ],
)
def test_wrong_values(given: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error) as raised:
        SuperpipelineStrategy(gpu_layers=given)
    assert message in str(raised.value)


def test_state_is_in_one_place(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"gpu_layers=0\.5 keeps optimizer state in GPU memory, and disk= keeps it on a disk"
    ):
        SuperpipelineStrategy(gpu_layers=0.5, disk=tmp_path)


def test_a_group_is_divided_with_the_names_of_its_parameters() -> None:
    weights = [nn.Parameter(torch.ones(1)) for _ in range(3)]
    group = {"params": weights, "param_names": ["a", "b", "c"], "lr": 0.1}
    here, there = divide(group, {weights[1]})
    assert (here["param_names"], there["param_names"], here["lr"]) == (["a", "c"], ["b"], 0.1)
    assert [id(each) for each in (*here["params"], *there["params"])] == [id(weights[at]) for at in (0, 2, 1)]


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.parametrize("stay", [2, 100])
def test_dial_counts_the_optimizer_state_of_layers_that_stay(stay: int) -> None:
    """``dial`` said that all layers on the GPU take 35 % of plain Lightning's memory."""
    found = dial(
        lambda: Module(Stack()),
        lambda: vectors(4),
        steps=3,
        trainer={"accelerator": "cpu"},
        k=(1,),
        k_prime=(1,),
        gpu_layers=stay,
    )
    plain, ours = (row.memory for row in found.rows)
    assert plain is not None
    assert ours is not None
    if stay == 100:
        assert ours[1:] == plain[1:]
        assert ours.weights == plain.weights
    else:
        assert 0 < ours.optimizer < plain.optimizer


def test_plain_lightnings_memory_in_the_log_does_not_depend_on_layers_that_stay(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, logger="lightning.pytorch.superpipeline")
    for stay in (0, 2):
        fit(lambda: Module(Stack()), vectors(1), SuperpipelineStrategy(k=1, gpu_layers=stay), recorded="nothing")
    first, second = re.findall("plain Lightning (.+) with optimizer state", "\n".join(caplog.messages))
    assert first == second


def test_the_plan_names_the_layers_that_stay() -> None:
    strategy = SuperpipelineStrategy(k=1, gpu_layers=2)
    fit(lambda: Module(Stack()), vectors(1), strategy, recorded="nothing")
    assert re.search(r"stay on the GPU .*net\.stem, net\.blocks\.0", str(strategy.plan))
