"""Bad input gets a clear error: what was found, what was expected, the name, a remedy."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.precision import BitsandbytesPrecision, TransformerEnginePrecision
from lightning.pytorch.strategies import StrategyRegistry
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

import sp_lightning
from sp_lightning import SuperpipelineCallback, SuperpipelineStrategy
from sp_lightning.device.device import Device
from sp_lightning.engine.access import Access
from sp_lightning.engine.backward import _GraphTaskEnd
from sp_lightning.engine.saved_tensors import packs
from sp_lightning.engine.streamer import Streamer
from sp_lightning.optim import background
from sp_lightning.optim.layerwise import LayerwiseStep
from sp_lightning.plan.units import parse_bytes
from sp_lightning.weights import swap
from tests.support.engine import streamer_of
from tests.support.models import Block, Module, Stack, llama, tokens, vectors
from tests.support.runs import Outcome, assert_equal, assert_same, fit, loader, superpipeline, trainer_for


@pytest.mark.parametrize("option", ["k", "k_prime"])
@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        (0, ValueError, "must be at least 1, found 0"),
        (-3, ValueError, "must be at least 1, found -3"),
        (1.5, TypeError, "whole number of layers, found 1.5"),
        ("2", TypeError, "whole number of layers, found '2'"),
        (True, TypeError, "whole number of layers, found True"),
        (None, TypeError, "whole number of layers, found None"),
    ],
)
def test_k_and_k_prime(option: str, value: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"{option} must be.*{re.escape(message.split(' ')[-1])}"):
        SuperpipelineStrategy(**{option: value})


def test_options_are_keyword_only() -> None:
    with pytest.raises(TypeError, match=r"^SuperpipelineStrategy takes its options by name, found 2\."):
        SuperpipelineStrategy(2)  # type: ignore[misc]


@pytest.mark.parametrize(
    ("option", "hint"),
    [
        ("kprime", "Did you mean k_prime?"),
        ("budget", "Did you mean memory_budget?"),
        ("fused", "Did you mean fused_optimizer?"),
        ("banana", f"There are {', '.join(inspect.signature(SuperpipelineStrategy).parameters)}."),
    ],
)
@pytest.mark.parametrize("kind", [SuperpipelineStrategy, type("Own", (SuperpipelineStrategy,), {})])
def test_an_option_that_is_not_there(kind: type[SuperpipelineStrategy], option: str, hint: str) -> None:
    """By the class that the user knows, which is not the one that has the options."""
    with pytest.raises(TypeError, match=re.escape(f"{kind.__name__} has no option '{option}'. {hint}") + "$"):
        kind(**{option: 1})


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("memory_budget: lots", "python -m sp_lightning fit: memory_budget takes a number with a unit"),
        ("kprime: 2", "Option 'kprime' is not accepted"),
    ],
)
def test_an_option_of_a_config_that_cannot_be(given: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "fit.yaml").write_text(CONFIG.format(given=given))
    command = [sys.executable, "-W", "ignore", "-m", "sp_lightning", "fit", "--config", "fit.yaml"]
    done = subprocess.run(command, cwd=tmp_path, env=with_checkout(), capture_output=True, text=True, check=False)
    assert done.returncode
    assert said in done.stderr
    assert "Traceback" not in done.stderr


CONFIG = """
trainer:
  accelerator: cpu
  logger: false
  strategy: {{class_path: sp_lightning.SuperpipelineStrategy, init_args: {{{given}}}}}
model: {{class_path: lightning.pytorch.demos.boring_classes.BoringModel}}
"""


def with_checkout() -> dict[str, str]:
    """The environment in which other folders' processes import this project."""
    return {**os.environ, "PYTHONPATH": str(Path(sp_lightning.__file__).parent.parent)}


def test_one_strategy_has_one_trainer_and_a_name_as_many_as_it_likes() -> None:
    """What README says about options and several trainers."""
    strategy = SuperpipelineStrategy(k=4)
    trainer_for(strategy)
    with pytest.raises(MisconfigurationException, match="accelerator set through both strategy class and accelerator"):
        trainer_for(strategy)
    StrategyRegistry.register("my_superpipeline", SuperpipelineStrategy, k=4)
    try:
        trainers = [trainer_for("my_superpipeline") for _ in range(2)]
        for trainer in trainers:
            trainer.fit(Module(Stack()), loader(vectors(2)))
            assert trainer.strategy.plan.k == 4
    finally:
        StrategyRegistry.remove("my_superpipeline")
    assert trainers[0].strategy is not trainers[1].strategy


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"layers": 5}, TypeError, r"layers= takes names.*found int"),
        ({"layers": [5]}, TypeError, r"layers= takes names.*found 5"),
        ({"layers": []}, ValueError, r"layers= is empty"),
        ({"layers": nn.Linear(1, 1)}, TypeError, r"layers= takes names.*found Linear"),
        ({"resident": None}, TypeError, r"resident= takes names or glob patterns, found None"),
        ({"resident": [3]}, TypeError, r"resident= takes names or glob patterns"),
        ({"fused_optimizer": None}, TypeError, r'fused_optimizer must be "auto", True or False, found None'),
        ({"pin_memory": "no"}, TypeError, r"pin_memory must be True or False, found 'no'"),
        ({"callback": None}, TypeError, r"callback must be True or False, found None"),
    ],
)
def test_patterns_of_the_wrong_kind(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        SuperpipelineStrategy(**options)


def start(strategy: Any, module: pl.LightningModule | None = None, **options: Any) -> None:
    trainer_for(strategy, **options).fit(module or Module(Stack()), loader(vectors()))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"layers": ["net.block.*"]},
            r"layers='net\.block\.\*' matches nothing in Module\. Closest names: \['net\.blocks.*Largest modules: \['net'",
        ),
        ({"resident": ["net.haed"]}, r"resident='net\.haed' matches nothing.*net\.head"),
        ({"layers": [nn.Conv2d]}, r"layers= names the class Conv2d, which the module has none of\. It has: .*Stack"),
        ({"layers": ["net.blocks.*", "net.blocks.0.inner"]}, r"Overlapping layers: 'net\.blocks\.0\.inner' is inside"),
        (
            {"layers": ["net.head"], "resident": ["net.head"]},
            r"Overlapping layers: 'net\.head' is chosen by layers= and",
        ),
    ],
)
def test_patterns_that_do_not_fit(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        start(SuperpipelineStrategy(**options))


@pytest.mark.parametrize(
    ("returned", "error", "message"),
    [
        (None, TypeError, "returned NoneType; expected a list"),
        ("net.head", TypeError, "returned str; expected a list"),
        ([nn.Linear(1, 1)], ValueError, "returned a Linear that is not part of the module"),
    ],
)
def test_a_callable_that_returns_the_wrong_thing(returned: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        start(SuperpipelineStrategy(layers=lambda module: returned))


@pytest.mark.parametrize(
    ("layers", "names"),
    [
        (["net.blocks.*"], {"net.blocks.0", "net.blocks.4"}),
        ("net.blocks.?", {"net.blocks.0", "net.blocks.4"}),
        ([Block], {"net.blocks.0", "net.blocks.4"}),
        (Block, {"net.blocks.0", "net.blocks.4"}),
        (lambda module: module.net.blocks, {"net.blocks.0", "net.blocks.4"}),
        (lambda module: [module.net.blocks[1], "net.blocks.2.inner"], {"net.blocks.1", "net.blocks.2.inner"}),
        (["**.inner"], {"net.blocks.0.inner", "net.blocks.0.outer", "net.head"}),
    ],
)
def test_layers_can_be_chosen(layers: Any, names: set[str]) -> None:
    strategy = superpipeline(layers=layers)
    ours = fit(lambda: Module(Stack()), vectors(), strategy)
    assert names <= {layer.name for layer in strategy.plan.layers}
    assert_equal(ours.state, fit(lambda: Module(Stack()), vectors()).state, "state")


def test_residents_can_be_chosen() -> None:
    strategy = superpipeline(resident=["net.head", "net.blocks.1.inner.weight"])
    fit(lambda: Module(Stack()), vectors(), strategy)
    assert {span.name for span in strategy.plan.residents.spans} == {
        "net.head.weight", "net.head.bias", "net.blocks.1.inner.weight",
    }  # fmt: skip


class SmallDevice(Device):
    """A device with little memory."""

    free: int | None = 0

    def free_bytes(self) -> int | None:
        return self.free


@pytest.mark.parametrize(
    ("free", "options", "message"),
    [
        (
            4096, {},
            r"need 20480 bytes \(20\.0 KiB\) with k=1 and k_prime=1, and 3840 bytes \(3\.8 KiB\) are free on cpu.*"
            r"layer, 'net\.blocks\.0', takes 5120 bytes.*layers=\[\"net\.blocks\.\*\.\*\"\]\), whose least is",
        ),
        (24576, {"k": 2, "k_prime": 1}, r"need 25600 bytes .* with k=2 .*least is 20\.0 KiB.*Strategy\(k=1, k_prime=1\)"),
        (
            2**20, {"memory_budget": "10KiB"},
            r"need 20480 bytes .* with k=1 .*, and 10240 bytes \(10\.0 KiB\) are of memory_budget=10240",
        ),
        (None, {"memory_budget": 0.5}, r"memory_budget=0\.5 is a share of the device's free memory, and cpu has no"),
    ],
)  # fmt: skip
def test_too_large_for_the_device(free: int | None, options: dict[str, Any], message: str) -> None:
    module = Module(Stack())
    before = {name: value.clone() for name, value in module.state_dict().items()}
    with (
        mock.patch.object(SmallDevice, "free", free),
        mock.patch("sp_lightning.trainer.run.device_for", lambda device: SmallDevice(device)),
        pytest.raises(ValueError, match=message),
    ):
        start(SuperpipelineStrategy(**options), module)
    assert_equal(dict(module.state_dict()), before, "nothing is lost")


class Nested(pl.LightningModule):
    """Blocks alike, each of several linear layers."""

    def __init__(self, *inner: int) -> None:
        super().__init__()
        self.net = nn.Sequential(
            *(
                nn.Sequential(*(nn.Linear(64, 64) for _ in range(count))) if count else nn.Linear(64, 64)
                for count in inner
            )
        )

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.net(batch).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize(("inner", "pattern"), [((4, 4, 4), "net.*.*"), ((0, 4, 0), "net.*.*")])
def test_layers_that_are_advised_were_tried(inner: tuple[int, ...], pattern: str) -> None:
    """What the error says can be pasted, and then the least is what it says."""
    batches = [torch.randn(2, 64)]
    with pytest.raises(ValueError, match="are of memory_budget=1024") as told:
        fit(lambda: Nested(*inner), batches, SuperpipelineStrategy(memory_budget="1KiB", layers="net.*"))
    advised = re.search(r"SuperpipelineStrategy\((layers=\[.*\])\), whose least is (.*)\.$", str(told.value))
    assert advised is not None, str(told.value)
    assert advised[1] == f'layers=["{pattern}"]'
    least = parse_bytes("memory_budget", advised[2])
    with pytest.raises(ValueError, match=re.escape(f"The least is {advised[2]}")):
        fit(lambda: Nested(*inner), batches, SuperpipelineStrategy(memory_budget=least // 2, layers=[pattern]))
    fit(lambda: Nested(*inner), batches, SuperpipelineStrategy(memory_budget=int(least * 1.01), layers=[pattern]))


@pytest.mark.parametrize("inner", [(0, 0, 0), (1, 1)])
def test_no_layers_are_advised_where_none_are_smaller(inner: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"There are no smaller layers in it\. Use precision=\"bf16-true\"") as told:
        fit(lambda: Nested(*inner), [torch.randn(2, 64)], SuperpipelineStrategy(memory_budget="1KiB"))
    assert "layers=[" not in str(told.value)


def test_more_than_one_device() -> None:
    with pytest.raises(ValueError, match=r"runs on one device; the trainer chose 2.*devices=1"):
        pl.Trainer(strategy="superpipeline", accelerator="cpu", devices=2)


def test_more_than_one_node() -> None:
    with pytest.raises(ValueError, match=r"runs on one node; the trainer was given 2"):
        pl.Trainer(strategy="superpipeline", accelerator="cpu", devices=1, num_nodes=2)


@pytest.mark.parametrize("kind", [TransformerEnginePrecision, BitsandbytesPrecision])
def test_precision_plugins_that_cannot_work(kind: Any) -> None:
    plugin = kind.__new__(kind)  # their packages need a GPU to be imported
    with pytest.raises(ValueError, match=f"cannot work with {kind.__name__}.*bf16-mixed"):
        SuperpipelineStrategy(precision_plugin=plugin)


def test_devices_without_streams() -> None:
    from sp_lightning.device.accelerator import device_for

    with pytest.raises(ValueError, match=r"cannot use device 'meta'.*accelerator="):
        device_for(torch.device("meta"))


def test_lazy_modules() -> None:
    with pytest.raises(ValueError, match=r"'net\.1\.weight' has no shape yet.*Run one batch"):
        start(superpipeline(), Module(nn.Sequential(nn.Linear(16, 16), nn.LazyLinear(4))))


def test_meta_modules() -> None:
    with torch.device("meta"):
        module = Module(Stack())
    with pytest.raises(ValueError, match=r"'net\.stem\.weight' is on the meta device.*to_empty"):
        start(superpipeline(), module)


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


class Thaws(Module):
    def on_train_epoch_start(self) -> None:
        self.net[1].back.requires_grad_(self.current_epoch == 1)


def test_frozen_parameters_over_the_same_memory_get_a_copy_each() -> None:
    def permuted() -> Module:
        return Module(nn.Sequential(*(Permuted() for _ in range(3))))

    ours = fit(permuted, vectors(), superpipeline(k=1), val=vectors())
    assert_same(ours, fit(permuted, vectors(), val=vectors()))
    with pytest.raises(ValueError, match=r"'net.1.*' are two Parameter objects over the same memory"):
        fit(lambda: Thaws(permuted().net), vectors(), superpipeline(k=1), max_epochs=2)


@pytest.mark.parametrize("change", ["to", "assign", "replace", "double"])
def test_weights_rebound_behind_our_back_are_absorbed_again(change: str) -> None:
    class Rebinds(Module):
        def on_train_epoch_start(self) -> None:
            net: Any = self.net
            if self.current_epoch != 1:
                return
            if change == "to":
                net.blocks[1].to(torch.float64).to(torch.float32)
            elif change == "assign":
                other = Stack()
                torch.manual_seed(5)
                for p in other.parameters():
                    nn.init.normal_(p, std=0.1)
                net.load_state_dict(other.state_dict(), assign=True)
            elif change == "replace":
                net.blocks[2] = Block().requires_grad_(False)
            elif change == "double":
                net.double()

        def loss(self, batch: Any) -> Tensor:
            return super().loss(batch.to(next(self.net.parameters()).dtype))

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    make = lambda: Rebinds(Stack())  # noqa: E731
    ours, plain = (fit(make, vectors(), strategy, max_epochs=3) for strategy in (superpipeline(k=1), "auto"))
    assert_equal(ours.state, plain.state, change)
    assert_equal(ours.losses, plain.losses, change)


def test_other_dtypes_outside_a_step_are_named() -> None:
    """Between batches the layers are absorbed again; in the middle of a step or outside any there is no place."""

    class Doubles(Module):
        def on_fit_start(self) -> None:
            self.net.double()
            self.net(torch.ones(2, 16).double())

    with pytest.raises(
        RuntimeError, match=r"'net\.stem\.weight' was torch\.float32 .* is torch\.float64 .*between two batches"
    ):
        start(superpipeline(), Doubles(Stack()))


def test_a_weight_written_between_forward_and_backward_is_autograds_own_error() -> None:
    class Writes(Module):
        def loss(self, batch: Any) -> Tensor:
            loss = super().loss(batch)
            net: Any = self.net
            with torch.no_grad():
                net.blocks[1].inner.weight.mul_(2)
            return loss

    for strategy in ("auto", superpipeline(), superpipeline(k=99)):
        with pytest.raises(RuntimeError, match=r"modified by an inplace operation: \[torch\.\w*FloatTensor \[16, 32\]"):
            start(strategy, Writes(Stack()))


def test_an_optimizer_step_between_forward_and_backward_is_autograds_own_error() -> None:
    class Steps(Module):
        automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer: Any = self.optimizers()
            loss = self.loss(batch)
            self.manual_backward(loss, retain_graph=True)
            optimizer.step()
            self.manual_backward(loss)

    for strategy in ("auto", superpipeline(), superpipeline(k=99)):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            start(strategy, Steps(Stack()))


def test_an_activation_written_in_place_is_autograds_own_error() -> None:
    """Where saved-tensor hooks are active autograd leaves the check out; without ours this was silent."""

    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            y = torch.exp(self.linear(x))
            return y.add_(1).sum()

    for strategy in ("auto", superpipeline()):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            start(strategy, Module(Writes()))


def test_torch_func_grad_through_a_streamed_layer() -> None:
    class Transforms(Module):
        def loss(self, batch: Any) -> Tensor:
            return torch.func.grad(lambda x: self.net(x).sum())(batch).sum()

    with pytest.raises(RuntimeError, match=r"torch\.func\.grad.*create_graph=True.*resident="):
        start(superpipeline(), Transforms(Stack()))


@pytest.mark.parametrize("activations", ["keep", "recompute"])
def test_torch_func_grad_where_nothing_is_streamed(activations: Any) -> None:
    class Transforms(Module):
        def loss(self, batch: Any) -> Tensor:
            return torch.func.grad(lambda x: self.net(x).square().sum())(batch).square().sum() + super().loss(batch)

    ours = fit(lambda: Transforms(Stack()), vectors(), superpipeline(resident=["**"], activations=activations))
    assert_same(ours, fit(lambda: Transforms(Stack()), vectors()))


def test_torch_func_grad_outside_a_step_names_the_layer() -> None:
    class Transforms(Module):
        def on_train_epoch_start(self) -> None:
            torch.func.grad(lambda x: self.net(x).sum())(torch.ones(2, 16))

    with pytest.raises(RuntimeError, match=r"reached the streamed layer 'net\.stem'.*resident=\['net\.stem'\]"):
        start(superpipeline(), Transforms(Stack()))


@pytest.mark.filterwarnings("ignore:`torch.jit.trace.*` is deprecated:FutureWarning", "ignore::DeprecationWarning")
def test_a_trace_in_a_run_is_refused() -> None:
    class Traces(Module):
        def on_fit_start(self) -> None:
            torch.jit.trace(self.net, torch.ones(2, 16))

    with pytest.raises(RuntimeError, match=r"torch\.jit\.trace was called during a run.*log_graph=False"):
        start(superpipeline(), Traces(Stack()))
    module = Module(Stack())
    start(superpipeline(), module)
    net, x = module.net.eval(), torch.ones(2, 16)
    assert torch.equal(torch.jit.trace(net, x)(x), net(x))


def test_gradients_with_a_graph_of_their_own() -> None:
    class Graph(Module):
        automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            self.loss(batch).backward(create_graph=True)

    with (
        pytest.warns(UserWarning, match="create_graph=True"),
        pytest.raises(RuntimeError, match=r"The gradient of 'net\..*create_graph=True.*torch\.autograd\.grad"),
    ):
        start(superpipeline(), Graph(Stack()))


class RefusesPinning(Device):
    def pin(self, memory: Tensor) -> bool:
        return False


def test_refused_pinning_warns_once_and_goes_on() -> None:
    from sp_lightning.engine.streamer import Streamer
    from sp_lightning.model.find import find_layers
    from sp_lightning.plan.plan import make_plan

    module = Stack()
    found = find_layers(module)
    with pytest.warns(UserWarning, match=r"GiB of host memory could not be page-locked.*pin_memory=False") as caught:
        streamer = Streamer(
            module, found, make_plan(found, k=1, k_prime=1), RefusesPinning(torch.device("cpu")), pin=True
        )
    assert len(caught) == 1
    assert module(torch.ones(1, 16)).isfinite().all()
    streamer.close()


def test_plan_and_stats_before_setup() -> None:
    strategy = SuperpipelineStrategy()
    with pytest.raises(RuntimeError, match="no plan yet"):
        _ = strategy.plan
    with pytest.raises(RuntimeError, match="no counters yet"):
        strategy.stats()


def test_the_callback_needs_the_strategy() -> None:
    with pytest.raises(ValueError, match=r"SuperpipelineCallback works with SuperpipelineStrategy only.*SingleDevice"):
        start("auto", callbacks=[SuperpipelineCallback()])


@pytest.mark.parametrize("where", ["forward", "backward", "after_backward", "optimizer", "validation", "interrupt"])
def test_after_a_failure_the_module_is_whole(where: str) -> None:
    """Host parameters are back in the modules, finite, and a new run is equal to plain."""

    class Fails(Module):
        broken = True

        def loss(self, batch: Any) -> Tensor:
            if self.broken and where == "forward":
                self.net(batch)
                raise KeyError(where)
            if self.broken and where == "interrupt":
                raise SystemExit(where)
            loss = super().loss(batch)
            if self.broken and where == "backward":
                loss.register_hook(lambda _: (_ for _ in ()).throw(KeyError(where)))
            return loss

        def on_after_backward(self) -> None:
            if self.broken and where == "after_backward":
                raise KeyError(where)

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            if self.broken and where == "optimizer":
                raise KeyError(where)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            super().validation_step(batch, batch_idx)
            if self.broken and where == "validation":
                raise KeyError(where)

    def run(strategy: Any) -> Any:
        pl.seed_everything(5, verbose=False)
        module = Fails(Stack())
        trainer = trainer_for(strategy)
        with pytest.raises((KeyError, SystemExit), match=where):
            trainer.fit(module, loader(vectors()), loader(vectors()))
        assert all(type(p) is nn.Parameter and p.isfinite().all() for p in module.parameters())
        assert not any(m._forward_hooks for m in module.modules())
        broken = {name: value.clone() for name, value in module.state_dict().items()}
        module.broken = False
        trainer = trainer_for(superpipeline() if strategy != "auto" else "auto")
        trainer.fit(module, loader(vectors()), loader(vectors()))
        return broken, dict(module.state_dict())

    assert_equal(run(superpipeline(k=1)), run("auto"), where)


@pytest.mark.filterwarnings("ignore:.*torch.jit.*")
def test_modules_that_are_never_cut() -> None:
    """Attention reads a child's weight without calling it, ScriptModules take no hooks: whole, and equal."""

    def make() -> Module:
        scripted = torch.jit.script(nn.Linear(16, 16))
        return Module(nn.Sequential(nn.Linear(16, 16), scripted, SelfAttention(), Block()))

    strategy = superpipeline(k=1)
    ours = fit(make, vectors(), strategy)
    assert_equal(ours.state, fit(make, vectors()).state, "state")
    assert any("ScriptModule" in note for note in strategy.plan.notes)
    assert not any("out_proj" in layer.name for layer in strategy.plan.layers)


class SelfAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x)[0]


def test_nothing_to_stream_just_runs() -> None:
    class NoParameters(Module):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            return None

        def configure_optimizers(self) -> Any:
            return None

    strategy = superpipeline()
    trainer_for(strategy).validate(NoParameters(nn.Tanh()), loader(vectors()), verbose=False)
    assert strategy.plan.layers == ()
    everything = superpipeline(resident=["**"])
    ours = fit(llama, tokens(), everything)
    assert everything.plan.layers == ()
    assert_equal(ours.state, fit(llama, tokens()).state, "state")


@pytest.mark.parametrize("options", [{"layers": "net.blocks"}, {"layers": "net"}, {"resident": ["**"]}], ids=str)
def test_a_plan_that_saves_nothing_says_so(options: dict[str, Any]) -> None:
    strategy = superpipeline(**options)
    fit(lambda: Module(Stack()), vectors(1), strategy)
    assert any("no less device memory than all weights and gradients do" in note for note in strategy.plan.notes)
    assert "note:" in str(strategy.plan)


def compile_whole(net: nn.Module) -> nn.Module:
    return torch.compile(net, backend="eager")  # type: ignore[return-value]


def compile_layers(net: Any) -> nn.Module:
    for block in net.blocks:
        block.compile(backend="eager")
    return net


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo looks at inputs
@pytest.mark.parametrize("compiled", [compile_whole, compile_layers])
def test_compiled_modules_are_one_layer(compiled: Any) -> None:
    """Nothing can come and go inside a graph."""
    strategy = superpipeline(k=1)
    ours = fit(lambda: Module(compiled(Stack())), vectors(), strategy)
    assert_equal(ours.state, fit(lambda: Module(compiled(Stack())), vectors()).state, "state")
    assert len(strategy.plan.layers) == (1 if compiled is compile_whole else 7)
    assert any("Compile its layers instead" in note for note in strategy.plan.notes) == (compiled is compile_whole)


def test_the_name_is_registered() -> None:
    trainer = pl.Trainer(strategy="superpipeline", accelerator="cpu", logger=False, enable_checkpointing=False)
    assert isinstance(trainer.strategy, SuperpipelineStrategy)
    assert trainer.strategy.root_device.type == "cpu"
    assert "superpipeline" in pl.strategies.StrategyRegistry
    assert sp_lightning.__version__


class GivenOther(Module):
    """A library that packs a weight anew when it first runs does this."""

    def loss(self, batch: Any) -> Tensor:
        loss = super().loss(batch)
        weight = self.net.blocks[1].inner.weight
        weight.data = weight.data.view(-1) if self.other is None else weight.data.to(self.other)
        return loss

    other: torch.dtype | None = None


def test_data_of_another_shape_inside_a_step_is_refused() -> None:
    module = GivenOther(Stack())
    with pytest.raises(
        RuntimeError, match=r"'net.blocks.1.inner.weight' is torch.float32 of shape \(32, 16\) and was given"
    ):
        trainer_for(superpipeline(k=1)).fit(module, loader(vectors()))
    assert module.net.blocks[1].inner.weight.shape == (32, 16)


@pytest.mark.parametrize("k", [1, 9])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_data_of_another_dtype_before_backward_is_refused(dtype: torch.dtype, k: int) -> None:
    """Plain's backward finds the new weight where it saved the old one, and raises as well."""
    module = GivenOther(Stack())
    module.other = dtype
    with pytest.raises(RuntimeError, match=r"'net.blocks.1.inner.weight' was given torch.* used it as torch.float32"):
        trainer_for(superpipeline(k=k)).fit(module, loader(vectors()))
    with pytest.raises(RuntimeError, match=r"dtype"):
        trainer_for("auto").fit(module.float(), loader(vectors()))


class Halves(Module):
    """Under mixed precision this weight travels as its cast."""

    def loss(self, batch: Any) -> Tensor:
        self.net.blocks[1].inner.to(torch.bfloat16)
        return super().loss(batch)


def test_data_of_another_dtype_in_mixed_precision() -> None:
    def run(strategy: Any) -> Outcome:
        return fit(lambda: Halves(Stack()), vectors(), strategy, precision="bf16-mixed")

    with pytest.raises(RuntimeError, match=r"and was given torch.bfloat16.*resident=\['net.blocks.1.inner.weight'\]"):
        run(superpipeline(k=1))
    assert_same(run(superpipeline(k=1, resident=["net.blocks.1.inner"])), run("auto"))


def at(original: Any, number: int, error: BaseException) -> Any:
    """A function that raises the first time it has been called so often."""
    calls = count(1)

    def wrapped(*args: Any, **options: Any) -> Any:
        if next(calls) == number:
            raise error
        return original(*args, **options)

    return wrapped


def half_swapped(number: int) -> Any:
    """Places are exchanged one after the other, and in one of the exchanges Ctrl-C comes in the middle."""
    original, calls = swap._swap, count(1)

    def half(swaps: Any) -> None:
        struck = next(calls) == number
        for index, each in enumerate(swaps):
            if struck and index == 3:
                raise KeyboardInterrupt
            original([each])

    return half


INTERRUPTED: dict[str, Callable[[], Any]] = {
    "while layers are submitted": lambda: mock.patch.object(
        LayerwiseStep, "_submit", at(LayerwiseStep._submit, 10, KeyboardInterrupt())
    ),
    "while one is handed over": lambda: mock.patch.object(Device, "later", at(Device.later, 12, KeyboardInterrupt())),
    "when one has been waited for": lambda: mock.patch.object(
        background, "_restore_classes", at(background._restore_classes, 3, KeyboardInterrupt())
    ),
    "while device parameters come": lambda: mock.patch.object(swap, "_swap", half_swapped(3)),
    "while device parameters go": lambda: mock.patch.object(swap, "_swap", half_swapped(4)),
}


@pytest.mark.parametrize("when", INTERRUPTED)
def test_ctrl_c_inside_the_engine_leaves_a_whole_module(when: str, tmp_path: Path) -> None:
    module = Module(Stack())
    trainer = trainer_for(SuperpipelineStrategy(k=1, optimizer_overlap="forward"))
    with INTERRUPTED[when](), pytest.raises(SystemExit):
        trainer.fit(module, loader(vectors(6)))
    assert all(type(p) is nn.Parameter for p in module.parameters())
    state = trainer.optimizers[0].state
    steps = {float(state[p]["step"]) if p in state else 0.0 for p in module.parameters()}
    if len(steps) == 1:
        trainer.save_checkpoint(tmp_path / "whole.ckpt")
    else:
        with pytest.raises(RuntimeError, match="not those of any whole step"):
            trainer.save_checkpoint(tmp_path / "torn.ckpt")
    assert ("submitted" in when or "handed" in when) == (len(steps) > 1)
    trainer_for(SuperpipelineStrategy(k=1)).fit(module, loader(vectors()))


def test_a_checkpoint_on_exception_that_is_refused_leaves_nothing_behind(tmp_path: Path) -> None:
    """Lightning skips its teardown when a callback fails in ``on_exception``; the first error stays in sight."""
    module = Module(Stack())
    trainer = trainer_for(
        SuperpipelineStrategy(k=1, optimizer_overlap="forward"),
        callbacks=[ModelCheckpoint(tmp_path, save_on_exception=True)],
        enable_checkpointing=True,
    )
    error = KeyError("in the update")
    adam: Any = sys.modules["torch.optim.adam"]  # torch hides its name
    with (
        mock.patch.object(adam, "adam", at(adam.adam, 10, error)),
        pytest.raises(RuntimeError, match=r"not saved: .*in the update.*Go on from the last checkpoint") as raised,
    ):
        trainer.fit(module, loader(vectors()))
    assert raised.value.__context__ is error
    assert streamer_of(trainer.strategy) is None
    assert all(type(p) is nn.Parameter for p in module.parameters())
    assert not list(tmp_path.iterdir())


def test_after_an_error_between_two_batches_nothing_is_under_way() -> None:
    """``on_exception`` of callbacks comes before the strategy's."""
    seen: list[set[type]] = []

    class Looks(pl.Callback):
        def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
            seen.append({type(p) for p in pl_module.parameters()})

    strategy = SuperpipelineStrategy(k=1, optimizer_overlap="forward")
    trainer = trainer_for(strategy, callbacks=[Looks()])
    failing = mock.patch.object(Streamer, "prefetch_for", at(Streamer.prefetch_for, 4, KeyError("between")))
    with failing, pytest.raises(KeyError, match="between"):
        trainer.fit(Module(Stack()), loader(vectors()))
    assert seen == [{nn.Parameter}]


class GoesOn(Module):
    """Catches what its first backward raises, in the middle of a layer, and goes on with the next batch."""

    def __init__(self) -> None:
        super().__init__(Stack())
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        loss = self.loss(batch)
        handle = self.net.blocks[2].inner.weight.register_hook(self.fail) if batch_idx == 0 else None
        try:
            self.manual_backward(loss)
        except KeyError:
            assert handle is not None
            handle.remove()
        else:
            optimizer.step()

    def fail(self, gradient: Tensor) -> None:
        raise KeyError("in backward")


@pytest.mark.parametrize("held", [False, True])
def test_gradients_of_a_backward_that_failed_are_dropped(held: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where one of autograd's threads still holds its graph task when the next batch begins."""
    plain = fit(GoesOn, vectors(3))
    if held:
        monkeypatch.delattr(_GraphTaskEnd, "__del__")
    assert_same(fit(GoesOn, vectors(3), superpipeline(k=1)), plain)


class CallsBetween(Module):
    def on_train_batch_end(self, *args: Any) -> None:
        with torch.enable_grad():
            self.net(torch.ones(1, 16))


def test_ctrl_c_as_a_call_between_steps_is_left_takes_its_hooks_off(monkeypatch: pytest.MonkeyPatch) -> None:
    leave = Access.leave
    struck: list[bool] = []

    def interrupted(self: Access, *args: Any) -> None:
        if not self._step.running and packs() and not struck:
            struck.append(True)
            raise KeyboardInterrupt
        leave(self, *args)

    monkeypatch.setattr(Access, "leave", interrupted)
    with pytest.raises(SystemExit):
        trainer_for(superpipeline(k=1)).fit(CallsBetween(Stack()), loader(vectors(2)))
    assert struck
    assert not packs()


def test_a_weight_that_was_kept_from_a_step_is_told_after_the_run() -> None:
    """Pyro's store of parameters keeps what ``pyro.module`` finds within a step."""
    kept: list[Any] = []

    class Keeps(Module):
        def loss(self, batch: Any) -> Tensor:
            kept[:] = [self.net.blocks[1].inner.weight]
            return super().loss(batch)

    module = Keeps(Stack())
    trainer_for(superpipeline(k=1)).fit(module, loader(vectors()))
    with pytest.raises(
        RuntimeError, match=r"'net\.blocks\.1\.inner\.weight' was taken within a step.*named_parameters"
    ):
        kept[0].sum()
    assert dict(module.named_parameters())["net.blocks.1.inner.weight"].sum().isfinite()
