"""Steps on the CPU with a GPU's bits: whole runs beside plain Lightning on an emulated GPU, and every reason against them."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn

from sp_lightning import SuperpipelineStrategy
from sp_lightning.capabilities.kernels import gpu_norms, jit, like_gpu
from sp_lightning.capabilities.kernels.like_gpu import LikeGpu
from sp_lightning.core.layers.narrow_gradient import is_unaligned
from sp_lightning.tools.comparison.reference import StepsOnHost
from tests.support.emulated_gpu import ALL, forget, gpu_device
from tests.support.like_gpu import BATCHES, ON_GPU, OPTIMIZERS, Stepped, plain, said
from tests.support.mixed import scaled
from tests.support.models import Module, Stack
from tests.support.on_disk import everything_below, on_disk
from tests.support.ranks import in_ranks
from tests.support.runs import Outcome, assert_equal, assert_same, fit
from tests.support.tiers import first

pytest.importorskip("llvmlite")
CPU = torch.device("cpu")


def ours(make: Any, usual: frozenset[str] = ALL, overlap: Any = "forward", **options: Any) -> Outcome:
    with gpu_device(usual):
        strategy = SuperpipelineStrategy(k=1, optimizer_overlap=overlap)
        return fit(make, BATCHES, strategy, recorded="nothing", **options)


def assert_same_gradients(found: Outcome, expected: Outcome) -> None:
    """What the last step has left is equal: gradients that were clipped, say."""
    last, theirs = ([p.grad for p in each.module.parameters()] for each in (found, expected))
    assert any(each is not None for each in theirs)
    assert_equal(last, theirs, "the last gradients")


# ---------------------------------------------------------------------- whole runs

RUNS: list[tuple[str, str, str, dict[str, Any]]] = [
    ("AdamW", "bf16-mixed", "forward", {"gradient_clip_val": 0.1}),
    ("AdamW, fused", "32-true", "backward", {}),
    ("AdamW", "32-true", "off", {"gradient_clip_val": 0.1, "accumulate_grad_batches": 2}),
    ("Adam", "bf16-true", "forward", {}),
    ("SGD", "bf16-mixed", "off", {}),
    ("Adagrad", "32-true", "forward", {"gradient_clip_val": 0.02, "gradient_clip_algorithm": "value"}),
    ("AdamW", "16-mixed", "forward", {"gradient_clip_val": 0.1}),
    ("AdamW, fused", "bf16-true", "off", {"gradient_clip_val": 0.1}),
    ("Adam", "32-true", "backward", {"accumulate_grad_batches": 2}),
    ("SGD", "32-true", "backward", {}),
    ("Adagrad", "bf16-mixed", "off", {"gradient_clip_val": 0.1}),
    ("SGD", "16-mixed", "off", {"gradient_clip_val": 0.1}),
]


@pytest.mark.long("takes a second or more")
@pytest.mark.parametrize(
    ("name", "precision", "overlap", "options"), first(RUNS, *RUNS[:3], second=RUNS[3:7], why="a second of NumPy each")
)
@pytest.mark.parametrize("usual", first([ALL, frozenset()], ALL, why="a GPU that compiles otherwise"), ids=len)
def test_runs_have_the_bits_of_plain_lightning_on_the_gpu(
    name: str, precision: str, overlap: str, options: dict[str, Any], usual: frozenset[str]
) -> None:
    make = partial(Stepped, OPTIMIZERS[name])

    def given() -> dict[str, Any]:  # a scaler belongs to one trainer
        return options | (scaled() if precision == "16-mixed" else {"precision": precision})

    found, expected = ours(make, usual, overlap, **given()), plain(make, usual, **given())
    assert ON_GPU in said(found)
    assert_same(found, expected)
    if overlap != "backward":  # which frees gradients
        assert_same_gradients(found, expected)


def test_the_cpus_bits_differ() -> None:
    """Otherwise the tests above would show nothing."""
    make = partial(Stepped, OPTIMIZERS["AdamW"])
    of_gpu, of_cpu = plain(make), fit(make, BATCHES, recorded="nothing")
    assert any(not torch.equal(of_gpu.state[name], of_cpu.state[name]) for name in of_gpu.state)


class Mixed(Module):
    """Two groups, of which one steps fused, and a weight that gets no gradient."""

    def __init__(self) -> None:
        super().__init__(Stack())
        self.spare = nn.Parameter(torch.ones(3))

    def configure_optimizers(self) -> Any:
        weights = list(self.net.parameters())
        return torch.optim.AdamW(
            [{"params": [*weights[::2], self.spare]}, {"params": weights[1::2], "fused": True, "weight_decay": 0.0}],
            lr=0.01,
        )


@pytest.mark.long("takes a second or more")
def test_groups_step_in_their_own_ways() -> None:
    found = ours(Mixed)
    assert "AdamW (foreach) and AdamW (fused) steps on the CPU" in said(found)
    assert_same(found, plain(Mixed))


class Scheduled(Stepped):
    """Learning rate and weight decay change after each step, the latter from 0 on."""

    def on_train_batch_end(self, *_: Any) -> None:
        for optimizer in self.trainer.optimizers:
            for group in optimizer.param_groups:
                group["lr"] *= 0.5
                group["weight_decay"] += 0.1


@pytest.mark.long("takes a second or more")
def test_settings_may_change_during_a_run() -> None:
    make = partial(Scheduled, partial(torch.optim.AdamW, lr=0.01, weight_decay=0.0))
    assert_same(ours(make), plain(make))


class Turned(Stepped):
    """A first beta of 0 is the least one. Its average has another formula."""

    def on_train_batch_end(self, *_: Any) -> None:
        for optimizer in self.trainer.optimizers:
            for group in optimizer.param_groups:
                group["betas"] = (0.0, 0.99)


@pytest.mark.long("takes a second or more")
def test_formulas_are_confirmed_when_settings_first_need_them() -> None:
    make = partial(Turned, OPTIMIZERS["AdamW"])
    assert_same(ours(make), plain(make))


class Changed(Stepped):
    def __init__(self, how: Any) -> None:
        super().__init__(OPTIMIZERS["AdamW"])
        self._how = how

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            for optimizer in self.trainer.optimizers:
                self._how(optimizer)


def added(optimizer: torch.optim.Optimizer) -> None:
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})


def one_by_one(optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups[0]["foreach"] = False


def rate_in_a_tensor(optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups[0]["lr"] = torch.tensor(0.02)


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.parametrize(
    ("how", "reason"),
    [
        (one_by_one, "foreach=False steps one parameter after the other"),
        (rate_in_a_tensor, "the learning rate is a tensor"),
        (added, "the optimizer has a parameter of shape (3,) that is not the module's"),
    ],
)
@pytest.mark.parametrize("overlap", ["off", "forward"])
def test_a_change_that_takes_the_gpus_bits_away_is_said(
    how: Any, reason: str, overlap: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "lightning.pytorch.superpipeline"):
        found = ours(partial(Changed, how), overlap=overlap)
    warned = [each.getMessage() for each in caplog.records if "last bits" in each.getMessage()]
    assert warned == [f"Superpipeline: this step of AdamW has the CPU's last bits, not the GPU's: {reason}."]
    if how is not added:
        assert ON_GPU not in said(found)
        assert f"differ from the GPU's in the last bits: AdamW: {reason}" in said(found)


class CallsTorch(Stepped):
    """Steps torch's optimizer, of which Lightning does not hear."""

    def __init__(self) -> None:
        super().__init__(OPTIMIZERS["AdamW"])
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        optimizer: Any = self.optimizers(use_pl_optimizer=False)
        loss = self.loss(batch)
        self.manual_backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return loss


@pytest.mark.rest("takes tenths of a second")
def test_a_step_that_lightning_does_not_run_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "lightning.pytorch.superpipeline"):
        ours(CallsTorch)
    warned = [each.getMessage() for each in caplog.records if "last bits" in each.getMessage()]
    assert len(warned) == 1
    assert "user code has called torch's optimizer, not the one that self.optimizers() returns" in warned[0]


class ClipsItself(Stepped):
    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        self.clip_gradients(optimizer, 0.01, "norm")


@pytest.mark.long("takes a second or more")
@pytest.mark.parametrize("overlap", ["off", "forward"])
def test_a_module_that_clips_in_its_own_way_has_the_gpus_norms(overlap: str, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[Any] = []  # the CPU's norms of so few numbers may have the same bits
    norms_like = gpu_norms.norms_like

    def counted(*given: Any) -> Any:
        taken.append(given)
        return norms_like(*given)

    monkeypatch.setattr(gpu_norms, "norms_like", counted)
    make = partial(ClipsItself, OPTIMIZERS["SGD"])
    assert_same(ours(make, overlap=overlap), plain(make))
    assert taken


@pytest.mark.long("takes a second or more")
def test_norms_of_gradients_in_another_order_of_dimensions_are_the_gpus() -> None:
    make = partial(Stepped, OPTIMIZERS["AdamW"], ChannelsLast)
    assert_same(ours(make, gradient_clip_val=0.1), plain(make, gradient_clip_val=0.1))


class ChannelsLast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList(
            nn.Conv2d(1, 1, 3, padding=1).to(memory_format=torch.channels_last) for _ in range(2)
        )
        self.wide = nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last)
        self.turned = nn.Parameter(torch.randn(4, 16).t())

    def forward(self, x: Tensor) -> Tensor:
        y = x.view(-1, 1, 4, 4)
        for each in self.convolutions:
            y = each(y)
        return self.wide(y.expand(-1, 3, 4, 4)).mean() + x @ self.turned


class Joined(nn.Module):
    """The gradient of ``even`` is a part of a tensor, and begins behind three numbers in the GPU's memory."""

    def __init__(self) -> None:
        super().__init__()
        self.odd, self.even = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.randn(16, 16))

    def forward(self, x: Tensor) -> Tensor:
        weights = torch.cat([self.odd, self.even.flatten()])
        return x @ weights[3:].view(16, 16) + weights[:1]


@pytest.mark.parametrize("precision", first(["32-true", "bf16-true", "bf16-mixed"], "32-true", why="the same"))
def test_norms_of_gradients_at_an_odd_place(precision: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[bool] = []  # the norms of so few numbers may have the same bits
    norms_like = gpu_norms.norms_like

    def noted(device: Any, gradients: Any) -> Any:
        found.extend(map(is_unaligned, gradients))
        return norms_like(device, gradients)

    monkeypatch.setattr(gpu_norms, "norms_like", noted)

    def make() -> Stepped:
        return Stepped(OPTIMIZERS["SGD"], lambda: nn.Sequential(*(Joined() for _ in range(2))))

    options: dict[str, Any] = {"gradient_clip_val": 0.1, "precision": precision}
    assert_same(ours(make, **options), plain(make, **options))
    assert any(found)


class Looks(pl.Callback):
    """Reads gradients after they are clipped."""

    def __init__(self) -> None:
        self.seen: list[Tensor] = []

    def on_before_zero_grad(self, trainer: Any, module: Any, optimizer: Any) -> None:
        self.seen += [p.grad.clone() for p in module.parameters() if p.grad is not None]


@pytest.mark.long("takes a second or more")
@pytest.mark.parametrize("overlap", ["off", "forward"])
def test_a_hook_sees_gradients_that_were_clipped_as_on_the_gpu(overlap: str) -> None:
    make, mine, theirs = partial(Stepped, OPTIMIZERS["AdamW"]), Looks(), Looks()
    found = ours(make, overlap=overlap, gradient_clip_val=0.1, callbacks=[mine])
    assert_same(found, plain(make, gradient_clip_val=0.1, callbacks=[theirs]))
    assert mine.seen
    assert all(map(torch.equal, mine.seen, theirs.seen))


@pytest.mark.long("takes a second or more")
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
def test_sgd_leaves_the_gradients_that_it_leaves_on_the_gpu(precision: str) -> None:
    """With Nesterov momentum alone, torch adds that to ``p.grad`` itself."""
    make, mine, theirs = (
        partial(Stepped, partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True)),
        Looks(),
        Looks(),
    )
    found = ours(make, precision=precision, callbacks=[mine])
    assert_same(found, plain(make, precision=precision, callbacks=[theirs]))
    assert mine.seen
    assert all(map(torch.equal, mine.seen, theirs.seen))
    assert_same_gradients(found, plain(make, precision=precision))


@pytest.mark.long("takes a second or more")
@pytest.mark.parametrize("overlap", ["off", "forward"])
def test_what_sgd_adds_to_gradients_is_there_after_the_step(overlap: str) -> None:
    """Without hooks on gradients these stay in 16 bits, and would lose what the step adds."""
    make = partial(Stepped, partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True))
    found, expected = ours(make, overlap=overlap, precision="bf16-mixed"), plain(make, precision="bf16-mixed")
    assert_same_gradients(found, expected)


class Turns(Stepped):
    """Gives a weight a gradient that lies in memory in another order."""

    def on_after_backward(self) -> None:
        weight = self.net.blocks[0].inner.weight
        weight.grad = weight.grad.t().contiguous().t()


@pytest.mark.rest("takes tenths of a second")
def test_a_gradient_in_another_order_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "lightning.pytorch.superpipeline"):
        ours(partial(Turns, OPTIMIZERS["AdamW"]))
    assert "a gradient's memory has another order than its weight's" in caplog.text


class ByHand(Stepped):
    automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.net(batch).square().mean())
        self.clip_gradients(optimizer, 0.1, "norm")
        optimizer.step()


@pytest.mark.rest("takes tenths of a second")
def test_norms_of_manual_optimization_are_the_cpus_and_said() -> None:
    found = ours(partial(ByHand, OPTIMIZERS["AdamW"]), overlap="off")
    assert "Norms that you take yourself, as in clip_gradients, have the CPU's last bits" in said(found)


def test_state_in_another_dtype_is_said() -> None:
    module = nn.Linear(3, 3)
    optimizer = ADAMW(module.parameters())
    module(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    for values in optimizer.state.values():
        values["exp_avg"] = values["exp_avg"].bfloat16()
    with gpu_device():
        found = LikeGpu(CPU, fuse=False).against(optimizer, module, scaled=False)
    assert found == "AdamW: state has the dtype torch.bfloat16, another one than its weight"


@pytest.mark.long("a disk")
@pytest.mark.parametrize("overlap", ["off", "forward"])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_gradients_and_state_on_a_disk(
    precision: str, overlap: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, options = partial(Stepped, OPTIMIZERS["AdamW"]), {"gradient_clip_val": 0.1, "precision": precision}
    everything_below(monkeypatch, window=1 << 14)
    with gpu_device():
        strategy = on_disk(tmp_path, optimizer_overlap=overlap, fused_optimizer="auto")
        found = fit(make, BATCHES, strategy, recorded="nothing", **options)
    assert ON_GPU in said(found)
    assert_same(found, plain(make, **options))


@pytest.mark.long("takes a second or more")
def test_a_scale_that_is_no_power_of_two() -> None:
    """Such a product is rounded, so that norms are taken of widened gradients."""
    make = partial(Stepped, OPTIMIZERS["AdamW"])
    options = [scaled(init_scale=300.0) | {"gradient_clip_val": 0.1} for _ in range(2)]
    assert_same(ours(make, **options[0]), plain(make, **options[1]))


def train_on_rank(overlap: str | None) -> tuple[str, dict[str, Tensor]]:
    """Trains with Lightning's DDP, or with an overlap. Returns what the plan says, and the weights."""
    make = partial(Stepped, OPTIMIZERS["AdamW"])
    if overlap is None:
        return "", plain(make, strategy="ddp", devices=2, gradient_clip_val=0.1).state
    found = ours(make, overlap=overlap, devices=2, gradient_clip_val=0.1)
    return said(found), found.state


@pytest.mark.long("two processes")
def test_several_devices_have_the_gpus_bits_if_layers_are_updated_one_by_one() -> None:
    """Whether a GPU confirms formulas is decided on each rank, and all ranks have to step in one way."""
    for (text, state), (_, expected) in zip(
        in_ranks(2, train_on_rank, "forward"), in_ranks(2, train_on_rank, None), strict=True
    ):
        assert ON_GPU in text
        assert_equal(state, expected, "state")
    for text, _ in in_ranks(2, train_on_rank, "off"):
        assert 'with several devices and optimizer_overlap="off", the primary steps all layers at once' in text
        assert ON_GPU not in text


# ---------------------------------------------------------------------- what is against it


@pytest.fixture
def emulated() -> Iterator[None]:
    with gpu_device():
        yield


def against(make: Any, module: nn.Module | None = None, *, scaled: bool = False, fuse: bool = False) -> str:
    module = module or nn.Linear(3, 3)
    return LikeGpu(CPU, fuse=fuse).against(make(module.parameters()), module, scaled=scaled)


class Own(torch.optim.AdamW):
    """A subclass may step in its own way."""


class Tagged(nn.Parameter):
    """A parameter of a user's class, for which torch steps one after the other."""


def with_parameter(parameter: nn.Parameter) -> nn.Module:
    module = nn.Module()
    module.weight = parameter
    return module


ADAMW = torch.optim.AdamW
REASONS: list[tuple[str, Any, Any, dict[str, Any]]] = [
    ("Own is not one of torch's", Own, None, {}),
    ("capturable=True", partial(ADAMW, capturable=True), None, {}),
    ("differentiable=True", partial(ADAMW, differentiable=True), None, {}),
    ("foreach=True", partial(ADAMW, foreach=True), None, {}),
    ("foreach=False steps one parameter", partial(ADAMW, foreach=False), None, {}),
    ("fused=False steps one parameter", partial(ADAMW, fused=False), None, {}),
    ("fused=False steps one parameter", partial(ADAMW, fused=False), None, {"fuse": True}),
    ("the learning rate is a tensor", partial(ADAMW, lr=torch.tensor(0.1)), None, {}),
    ("a beta is a tensor", partial(ADAMW, betas=(torch.tensor(0.9), torch.tensor(0.999))), None, {}),
    ("fused=True computes in double precision", partial(torch.optim.SGD, lr=0.1, fused=True), None, {}),
    ("a parameter is a Tagged", ADAMW, partial(with_parameter, Tagged(torch.ones(3))), {}),
    ("the dtype torch.float64", ADAMW, partial(nn.Linear, 3, 3, dtype=torch.float64), {}),
    ("memory has gaps", ADAMW, partial(with_parameter, nn.Parameter(torch.ones(4, 4)[:, ::2])), {}),
    ("0 has sparse gradients", partial(torch.optim.SGD, lr=0.1), lambda: nn.Sequential(nn.Embedding(3, 3, sparse=True)), {}),
    ("unscales gradients by itself", partial(ADAMW, fused=True), None, {"scaled": True}),
]  # fmt: skip


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize(("reason", "make", "module", "options"), REASONS, ids=[each[0] for each in REASONS])
def test_each_reason_is_said(reason: str, make: Any, module: Any, options: dict[str, Any]) -> None:
    assert reason in against(make, None if module is None else module(), **options)


@pytest.mark.usefixtures("emulated")
def test_nothing_is_against_a_usual_program() -> None:
    assert against(ADAMW) == against(ADAMW, fuse=True) == against(partial(ADAMW, fused=True), fuse=True) == ""
    channels_last = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    assert against(ADAMW, channels_last) == ""


@pytest.mark.parametrize(
    ("optimizer", "unknown"),
    [
        (partial(ADAMW, weight_decay=0.0), lambda variant: variant.decays),
        (OPTIMIZERS["SGD"], lambda variant: not variant.first),
        (OPTIMIZERS["SGD"], lambda variant: variant.first),
    ],
    ids=["with decay", "later steps", "the first step"],
)
def test_formulas_of_later_steps_are_asked_for_at_set_up(
    optimizer: Any, unknown: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A scheduler may begin weight decay, and SGD's momentum exists from its second step on."""
    monkeypatch.setattr(like_gpu, "is_confirmed", lambda variant: not unknown(variant))
    assert "no formula has the bits of its foreach step" in against(optimizer)


def test_parameters_that_were_added_are_looked_at_once() -> None:
    like, known = LikeGpu(CPU, fuse=False), set[int]()
    usual, tagged = nn.Parameter(torch.ones(3)), Tagged(torch.ones(3))
    optimizer = ADAMW([usual])
    (group,) = optimizer.param_groups
    assert like.against_group(group, known) == ""
    assert known == {id(usual)}
    group["params"].append(tagged)
    assert like.against_group(group, known) == "a parameter is a Tagged"
    assert like.against_group(group, {id(usual), id(tagged)}) == ""


@pytest.mark.long("takes a second or more")
def test_an_unknown_gpu_is_said() -> None:
    """This CPU's own ``foreach`` operators, which are no GPU's."""
    forget()
    assert against(ADAMW) == "AdamW: no formula has the bits of its foreach step on this GPU"


@pytest.mark.usefixtures("emulated")
def test_without_llvmlite_the_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(like_gpu, "is_installed", lambda: False)
    assert against(ADAMW) == "llvmlite is missing, which pip install llvmlite adds"
    assert jit.is_installed()


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.usefixtures("emulated")
def test_norms_of_several_dtypes_are_the_cpus() -> None:
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3, dtype=torch.bfloat16))
    assert LikeGpu(CPU, fuse=False).against_norms(ADAMW(module.parameters())) == "weights have several dtypes"
    assert LikeGpu(CPU, fuse=False).against_norms(ADAMW(module[0].parameters())) == ""


def test_norms_are_confirmed_for_the_largest_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def has_norms_of(device: torch.device, largest: int) -> bool:
        asked.append(largest)
        return True

    monkeypatch.setattr(like_gpu, "has_norms_of", has_norms_of)
    LikeGpu(CPU, fuse=False).against_norms(ADAMW(nn.Linear(3, 4).parameters()))
    assert asked == [12]


@pytest.mark.rest("takes tenths of a second")
def test_norms_that_no_formula_has_are_said() -> None:
    forget()
    found = LikeGpu(CPU, fuse=False).against_norms(ADAMW(nn.Linear(3, 3).parameters()))
    assert found == "no formula has the bits of norms on this GPU"


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"fused_optimizer": False}, "differ from the GPU's in the last bits: fused_optimizer=False"),
        ({"fused_optimizer": True}, f"AdamW (fused) steps on the CPU {ON_GPU}"),
    ],
)
def test_the_plan_says_whose_bits_steps_have(options: dict[str, Any], words: str) -> None:
    with gpu_device():
        strategy = SuperpipelineStrategy(k=1, **options)
        fit(partial(Stepped, OPTIMIZERS["AdamW"]), BATCHES[:2], strategy, recorded="losses")
    assert words in str(strategy.plan)


@pytest.mark.rest("takes tenths of a second")
def test_fused_optimizer_true_has_the_bits_of_fused_steps_on_the_gpu() -> None:
    with gpu_device():
        found = fit(
            partial(Stepped, OPTIMIZERS["AdamW"]),
            BATCHES,
            SuperpipelineStrategy(k=1, fused_optimizer=True),
            recorded="losses",
        )
    expected = plain(partial(Stepped, OPTIMIZERS["AdamW, fused"]))
    for name, value in expected.state.items():
        assert torch.equal(found.state[name], value), name


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.parametrize(("overlap", "all_threads"), [("off", True), ("forward", False)])
def test_steps_that_are_waited_for_have_all_threads(overlap: Any, all_threads: bool) -> None:
    """Nothing else computes meanwhile."""
    with gpu_device() as devices:
        strategy = SuperpipelineStrategy(k=1, optimizer_overlap=overlap)
        fit(partial(Stepped, OPTIMIZERS["AdamW"]), BATCHES[:1], strategy, recorded="losses")
    assert [each.background_threads for each in devices] == [torch.get_num_threads() if all_threads else None]


def test_on_a_cpu_nothing_is_said() -> None:
    strategy = SuperpipelineStrategy(k=1)
    found = fit(partial(Stepped, OPTIMIZERS["AdamW"]), BATCHES, strategy, recorded="losses")
    assert "bits" not in str(strategy.plan)
    assert_same(found, fit(partial(Stepped, OPTIMIZERS["AdamW"]), BATCHES, recorded="losses"))


class Late(Module):
    """SGD with momentum, of which one weight gets its first gradient later: torch's fused step refuses that."""

    def __init__(self) -> None:
        super().__init__(Stack())
        self.late = nn.Linear(16, 16)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.net(batch).square().mean()
        return loss + self.late(batch).square().mean() if batch_idx else loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


@pytest.mark.rest("takes tenths of a second")
def test_a_step_that_cannot_be_divided_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "lightning.pytorch.superpipeline"):
        ours(Late)
    warned = [each.getMessage() for each in caplog.records if "last bits" in each.getMessage()]
    assert len(warned) == 1
    assert "this step of SGD has the CPU's last bits, not the GPU's" in warned[0]


# ---------------------------------------------------------------------- the reference of a check


class OnCopies(StepsOnHost):
    """Takes the CPU for a device that is not the host."""

    host = torch.device("meta")


def test_the_reference_steps_on_the_gpu_where_the_strategy_has_its_bits() -> None:
    make = partial(Stepped, OPTIMIZERS["AdamW"])
    with gpu_device():
        stays = OnCopies(CPU, fuse=True, like=LikeGpu(CPU, fuse=False))
        fit(make, BATCHES, stays, recorded="losses")
        moves = OnCopies(CPU, fuse=True, like=LikeGpu(CPU, fuse=False))
        fit(partial(Stepped, partial(ADAMW, foreach=False)), BATCHES, moves, recorded="losses")
    assert not stays.moved
    assert moves.moved
