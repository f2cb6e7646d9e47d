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
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from sp_lightning import SuperpipelineStrategy, dial, stream
from sp_lightning.core.model.find import find_layers
from sp_lightning.core.model.found import tensor_bytes
from sp_lightning.core.model.wrapped import move, parts
from sp_lightning.core.torch_compat.private import current_graph_task
from sp_lightning.core.updates.fused import divide
from tests.support.gpu_reference import BATCHES, OPTIMIZERS, RUNS, by_place
from tests.support.models import CASES, Module, SparseEmbedding, Stack, vectors
from tests.support.nets import Stepped
from tests.support.nets import Stepped as OfKind
from tests.support.quantised import CASES as QUANTISED
from tests.support.runs import Outcome, as_on_a_gpu, assert_equal, assert_same, fit, superpipeline
from tests.support.simdevice import simulated
from tests.support.tiers import some

FUSED = partial(AdamW, lr=1e-2, fused=True)  # on the simulated device, both places have its bits


def run(make: Any, strategy: Any, *, batches: Any = BATCHES, **options: Any) -> Outcome:
    with simulated():
        return fit(make, batches, strategy, **{"recorded": "losses", **options})


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
@pytest.mark.parametrize("overlap", ["off", "forward"])
def test_a_step_that_cannot_be_divided_into_layers_is_divided_by_place(overlap: Any) -> None:
    """A sparse gradient: torch's own code steps all layers at once."""
    case = CASES["sparse-embedding"]
    strategy = superpipeline(k=1, gpu_layers=2, optimizer_overlap="off")
    assert SparseEmbedding in type(case.make()).__mro__
    ours = run(case.make, strategy, batches=case.batches())
    assert_same(ours, fit(case.make, case.batches(), by_place(2, fuse=False), recorded="losses"))


class InTurn(Optimizer):
    """Notes the order in which it steps parameters."""

    steps_each_parameter_alone = True

    def __init__(self, parameters: Any, stepped: list[Tensor]) -> None:
        parameters = list(parameters)
        super().__init__([{"params": parameters[:5]}, {"params": parameters[5:]}], {})
        self.stepped = stepped

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = None if closure is None else torch.enable_grad()(closure)()
        for p in [p for group in self.param_groups for p in group["params"]]:
            self.stepped.append(p)
            p.sub_(p.grad, alpha=0.1)
        return loss


def test_a_whole_step_begins_with_what_stays() -> None:
    """The CPU's part of each group came first, and the GPU was idle meanwhile."""
    stepped: list[Tensor] = []
    strategy = superpipeline(k=1, gpu_layers=4, optimizer_overlap="off")
    ours = run(partial(Stepped, partial(InTurn, stepped=stepped)), strategy, batches=BATCHES[:1])
    stay = [
        name.startswith(tuple(layer for layer, *_ in strategy.plan.stay)) for name, _ in ours.module.named_parameters()
    ]
    place = dict(zip(ours.module.parameters(), stay, strict=True))
    assert [place[p] for p in stepped] == sorted(stay, reverse=True)
    assert 5 < sum(stay) < len(stay), "both groups are divided, or one is and the other stays"


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


class ReleasesTheGpu(Stepped):
    """Lends the GPU after each step."""

    def on_train_batch_end(self, *_: Any) -> None:
        with self.trainer.strategy.gpu_released():  # type: ignore[attr-defined]
            pass


def bytes_of(module: Any, optimizer: Optimizer, names: tuple[str, ...]) -> int:
    """The weights, gradients and state of layers."""
    weights = [p for name, p in module.named_parameters() if name.startswith(names)]
    state = [each for p in weights for name, each in optimizer.state[p].items() if name != "step"]
    return sum(each.nbytes for each in (*weights, *(p.grad for p in weights), *state))


@pytest.mark.parametrize("make", [Stepped, ReleasesTheGpu])
def test_what_returns_to_the_host_is_counted_before(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights, gradients and state of layers that stay came to the CPU at the end of the run without a check."""
    checked: list[dict[str, int]] = []

    def check(needed: dict[str, int], *_: Any) -> None:
        checked.append(needed)

    monkeypatch.setattr("sp_lightning.trainer.run.check_host", check)
    strategy = superpipeline(k=1, gpu_layers=3)
    ours = run(partial(make, FUSED), strategy, batches=BATCHES[:2], recorded="nothing")
    back = bytes_of(ours.module, ours.trainer.optimizers[0], tuple(f"{name}." for name, *_ in strategy.plan.stay))
    ledger = strategy.ledger
    training = {"for gradients": ledger.gradients, "for the optimizer's state": ledger.state}
    at_end = {**training, "for layers that return from the GPU when the run ends": back}
    lent = [{"for layers that leave the GPU": back}] * 2 * (make is ReleasesTheGpu)
    assert checked[1:] == [training, at_end, *lent]
    assert ledger.returning == back
    assert re.search(r"; .* more return from the GPU when the run ends\.$", str(ledger))
    assert "host, at the end" in str(strategy.plan)
    plan = strategy.plan
    assert plan.host_bytes_at_end - plan.host_bytes == back // 2, "weights and gradients"


def test_too_little_host_memory_for_what_returns_is_an_error_before_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sp_lightning.trainer.host_memory.available_bytes", lambda: 2**16)
    monkeypatch.setattr("sp_lightning.core.plan.ledger.returning_bytes", lambda *_: 2**20)
    with pytest.raises(MemoryError, match=r"1\.0 MiB for layers that return from the GPU when the run ends"):
        run(partial(Stepped, FUSED), superpipeline(k=1, gpu_layers=3), batches=BATCHES[:1], recorded="nothing")


@pytest.mark.rest("takes tenths of a second")
def test_gradients_of_layers_that_stay_are_counted_when_a_backward_begins_and_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They were counted at each gradient that arrived, but not at the end, when the last ones are still in flight."""
    counted: list[Tensor] = []

    def count(gradient: Tensor) -> int:
        counted.extend([gradient] if current_graph_task() != -1 else [])  # not those of `stats()`
        return tensor_bytes(gradient)

    monkeypatch.setattr("sp_lightning.core.engine.engine.tensor_bytes", count)
    strategy = superpipeline(k=1, gpu_layers=6)
    ours = run(partial(Stepped, FUSED), strategy, batches=BATCHES[:2], accumulate_grad_batches=2)
    assert strategy.stats().peak_gradient_bytes == sum(p.nbytes for p in ours.module.parameters())
    names = tuple(f"{name}." for name, _, _ in strategy.plan.stay)
    stay = sum(name.startswith(names) for name, _ in ours.module.named_parameters())
    assert len(counted) == 3 * stay, "the first backward begins without gradients"


@pytest.mark.rest("takes tenths of a second")
def test_too_many_layers_are_refused_with_what_they_take() -> None:
    with (
        pytest.raises(ValueError, match=r"Lower gpu_layers, .*or give it as much memory"),
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
    assert "fewer gpu_layers" in note


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


class Frozen(Stepped):
    """Only the stem and biases are trained."""

    def __init__(self) -> None:
        super().__init__(FUSED)
        for name, p in self.named_parameters():
            p.requires_grad_("stem" in name or name.endswith("bias"))


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.parametrize("make", [partial(Stepped, FUSED), Frozen], ids=["trained", "frozen"])
@pytest.mark.parametrize("stays", [{"gpu_layers": 3}, {"keep_on_gpu": ["net.blocks.2", "net.blocks.3"]}], ids=str)
def test_copies_of_weights_that_stay_are_not_offloaded(make: Any, stays: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Autocast's 16-bit copies went to the CPU and back, 2 bytes per weight each way in each step."""
    monkeypatch.setattr("sp_lightning.capabilities.activations.offload.WORTH_MOVING", 1)
    offloaded = []
    for options in (stays, dict[str, Any]()):
        strategy = superpipeline(k=1, activations="offload", **options)
        ours = run(make, strategy, batches=BATCHES[:4], precision="bf16-mixed")
        assert_same(ours, fit(make, BATCHES[:4], recorded="losses", precision="bf16-mixed"))
        offloaded.append((strategy.stats().offloaded_activation_bytes, strategy.stats().uploaded_activation_bytes))
    assert offloaded[0] == offloaded[1]
    assert all(offloaded[0])


@pytest.mark.rest("takes tenths of a second")
def test_copies_of_weights_that_stay_are_kept_if_memory_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    """They take memory, but only activations are offloaded."""
    monkeypatch.setattr("sp_lightning.capabilities.activations.offload.WORTH_MOVING", 1)
    monkeypatch.setattr("sp_lightning.capabilities.tuning.tuner.Tuner._left", lambda self, kept: -1 * bool(kept()))
    offloaded = []
    for stay in (3, 0):
        strategy = superpipeline(gpu_layers=stay, gpu_memory="1GiB")
        run(partial(Stepped, FUSED), strategy, batches=BATCHES[:4], precision="bf16-mixed")
        offloaded.append(strategy.stats().offloaded_activation_bytes)
    assert offloaded[0] == offloaded[1] > 0


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


def test_a_backend_to_which_torch_moves_no_existing_parameter_is_named() -> None:
    """As those of other packages (``PrivateUse1``), for which ``Module.to`` makes other parameters. The meta device is one."""
    parameter = nn.Parameter(torch.ones(3))
    parameter.grad = gradient = torch.ones(3)
    with pytest.raises(
        RuntimeError, match=r"torch does not move an existing parameter to meta in place.* Leave gpu_layers out"
    ):
        move(parameter, lambda tensor: tensor.to("meta"))
    assert parameter.device.type == "cpu"
    assert parameter.grad is gradient


def test_state_is_moved_to_a_backend_to_which_torch_moves_no_existing_tensor() -> None:
    """As the same object. State that a step had put into an optimizer ended with the error of ``gpu_layers``."""
    state = known = torch.ones(3)
    move(state, lambda tensor: tensor.to("meta"))
    assert state.device.type == "meta"
    assert state is known


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
