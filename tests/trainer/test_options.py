"""Options that cannot be get a clear error: what was found, what was expected, the name, a remedy."""

from __future__ import annotations

import inspect
import os
import pickle
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.plugins.precision import BitsandbytesPrecision, MixedPrecision, TransformerEnginePrecision
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy, StrategyRegistry
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor, nn

import sp_lightning
from sp_lightning import SuperpipelineStrategy
from sp_lightning.core.device.device import Device
from sp_lightning.core.engine.streamer import Streamer
from sp_lightning.core.plan.choices import HABITS
from sp_lightning.core.plan.options import checked_path
from tests.support.models import Module, Stack, vectors
from tests.support.runs import loader, trainer_for


@pytest.mark.parametrize("option", ["k", "k_prime"])
@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        (0, ValueError, "must be at least 1, found 0"),
        (-3, ValueError, "must be at least 1, found -3"),
        (1.5, TypeError, "integer (a number of layers), found 1.5"),
        ("2", TypeError, "integer (a number of layers), found '2'"),
        (True, TypeError, "integer (a number of layers), found True"),
        (None, TypeError, "integer (a number of layers), found None"),
        (torch.tensor(2.5), TypeError, "integer (a number of layers), found tensor(2.5000)"),
    ],
)
def test_k_and_k_prime(option: str, value: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"{option} must be.*{re.escape(message.split(' ')[-1])}"):
        SuperpipelineStrategy(**{option: value})


def test_options_are_keyword_only() -> None:
    with pytest.raises(TypeError, match=r"^SuperpipelineStrategy takes keyword arguments only, found 2\."):
        SuperpipelineStrategy(2)  # type: ignore[misc]


@pytest.mark.parametrize(
    ("option", "hint"),
    [
        ("kprime", "Did you mean k_prime?"),
        ("gpu_mem", "Did you mean gpu_memory?"),
        ("optimiser_overlap", "Did you mean optimizer_overlap?"),
        ("banana", f"Valid options: {', '.join(inspect.signature(SuperpipelineStrategy).parameters)}."),
    ],
)
@pytest.mark.parametrize("kind", [SuperpipelineStrategy, type("Own", (SuperpipelineStrategy,), {})])
def test_an_option_that_is_not_there(kind: type[SuperpipelineStrategy], option: str, hint: str) -> None:
    """By the class that the user knows, which is not the one that has the options."""
    with pytest.raises(TypeError, match=re.escape(f"{kind.__name__} has no option '{option}'. {hint}") + "$"):
        kind(**{option: 1})


@pytest.mark.long("a subprocess that imports torch")
@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("gpu_memory: lots", "superpipeline fit: gpu_memory takes a size: GiB as a number"),
        pytest.param("kprime: 2", "Option 'kprime' is not accepted", marks=pytest.mark.long("jsonargparse refuses it")),
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


def test_a_registered_name_serves_many_trainers() -> None:
    """What examples/guide/options.md says about options and several trainers."""
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
        ({"keep_on_gpu": None}, TypeError, r"keep_on_gpu= takes names or glob patterns, found None"),
        ({"keep_on_gpu": [3]}, TypeError, r"keep_on_gpu= takes names or glob patterns"),
        ({"pin_memory": "no"}, TypeError, r"pin_memory must be True or False, found 'no'"),
        ({"disk": ""}, TypeError, r'disk must be the path of .*, found \'\'\. For example disk="'),
        ({"disk": "/tmp", "host_memory": 0}, ValueError, r'takes a size.* found 0\. For example host_memory="8GiB"'),
        ({"gpu_memory": True}, TypeError, "takes a size.* found True"),
        ({"callback": None}, TypeError, r"callback must be True or False, found None"),
    ],
)
def test_patterns_of_the_wrong_kind(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        SuperpipelineStrategy(**options)


def test_the_strategy_takes_the_devices_of_its_trainer() -> None:
    one = pl.Trainer(strategy="superpipeline", accelerator="cpu", devices=1).strategy
    assert isinstance(one, SuperpipelineStrategy)
    assert isinstance(one, SingleDeviceStrategy)
    two = pl.Trainer(strategy="superpipeline", accelerator="cpu", devices=2).strategy
    assert isinstance(two, SuperpipelineStrategy)
    assert isinstance(two, DDPStrategy)
    assert not isinstance(two, SingleDeviceStrategy)
    assert two.world_size == 2


def test_a_users_strategy_stays_theirs_on_several_devices() -> None:
    class Mine(SuperpipelineStrategy):
        def on_train_start(self) -> None:
            super().on_train_start()

    mine = Mine(k=1)
    trainer = pl.Trainer(strategy=mine, accelerator="cpu", devices=2)
    assert trainer.strategy is mine
    assert isinstance(mine, Mine)
    assert type(mine).on_train_start is Mine.on_train_start
    assert isinstance(mine, DDPStrategy)


def test_paths_in_a_users_home_are_found() -> None:
    """A config is read by no shell. "~/scratch" was not found, and the remedy, mkdir -p, did not help."""
    assert checked_path("disk", "a folder", "/nvme", "~/scratch") == Path.home() / "scratch"


def test_a_strategy_can_be_pickled() -> None:
    copied = pickle.loads(pickle.dumps(SuperpipelineStrategy(k=1)))
    assert isinstance(copied, SuperpipelineStrategy)
    assert isinstance(copied, SingleDeviceStrategy)


def test_the_strategy_takes_the_nodes_of_its_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_zero_only, "rank", 0)  # Lightning sets it: later tests would log and write nothing
    monkeypatch.setenv("NODE_RANK", "2")
    monkeypatch.setenv("LOCAL_RANK", "0")
    one_each = pl.Trainer(strategy="superpipeline", accelerator="cpu", devices=1, num_nodes=3).strategy
    assert isinstance(one_each, DDPStrategy)
    assert (one_each.world_size, one_each.global_rank, one_each.local_rank) == (3, 2, 0)
    monkeypatch.setenv("LOCAL_RANK", "1")
    two_each = pl.Trainer(strategy="superpipeline", accelerator="cpu", devices=2, num_nodes=3)
    assert (two_each.world_size, two_each.global_rank, two_each.local_rank) == (6, 5, 1)
    assert two_each.distributed_sampler_kwargs == {"num_replicas": 6, "rank": 5}


@pytest.mark.parametrize("kind", [TransformerEnginePrecision, BitsandbytesPrecision])
def test_precision_plugins_that_cannot_work(kind: Any) -> None:
    plugin = kind.__new__(kind)  # their packages need a GPU to be imported
    with pytest.raises(ValueError, match=f"cannot work with {kind.__name__}.*bf16-mixed"):
        SuperpipelineStrategy(precision_plugin=plugin)


def test_devices_without_streams() -> None:
    from sp_lightning.core.device.accelerator import device_for

    with pytest.raises(ValueError, match=r"cannot use device 'meta'.*accelerator="):
        device_for(torch.device("meta"))


class RefusesPinning(Device):
    def pin(self, memory: Tensor) -> bool:
        return False


def test_refused_pinning_warns_once_and_goes_on() -> None:
    from sp_lightning.core.model.find import find_layers
    from sp_lightning.core.plan.plan import make_plan

    module = Stack()
    found = find_layers(module)
    with pytest.warns(UserWarning, match=r"GiB of CPU memory could not be page-locked.*pin_memory=False") as caught:
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


def test_the_name_is_registered() -> None:
    trainer = pl.Trainer(strategy="superpipeline", accelerator="cpu", logger=False, enable_checkpointing=False)
    assert isinstance(trainer.strategy, SuperpipelineStrategy)
    assert trainer.strategy.root_device.type == "cpu"
    assert "superpipeline" in pl.strategies.StrategyRegistry
    assert sp_lightning.__version__


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"cpu_offload": True}, "always offloaded"),
        ({"offload_optimizer": True}, 'optimizer_on="gpu"'),
        ({"blocks_to_swap": 20}, "k=2"),
        ({"num_blocks_per_group": 2}, "k=2"),
        ({"nvme_path": "/scratch"}, 'disk="/scratch"'),
        ({"precision": "bf16-mixed"}, r'Trainer\(precision="bf16-mixed"\)'),
        ({"gradient_checkpointing": True}, 'activations="recompute"'),
        ({"activations": True}, 'Use activations="recompute"'),
        ({"activations": "checkpoint"}, 'Use activations="recompute"'),
        ({"activations": {"a.*": "cpu"}}, 'Use activations="offload"'),
        ({"activations": "recompte"}, 'Did you mean activations="recompute"'),
        ({"optimizer_overlap": "backwards"}, 'Did you mean optimizer_overlap="backward"'),
        ({"k'": 2}, "k_prime=1"),
        ({"fused_optimizer": True}, r"Write it in the optimizer: torch\.optim\.AdamW\(…, fused=True\)"),
        ({"optimizer_on": "cuda"}, 'Use optimizer_on="gpu"'),
        ({"optimizer_overlap": False}, 'Use optimizer_overlap="off"'),
        ({"gpu_memory": 0.8}, '0.8 may be GiB or a share. For GiB: "0.8GiB"'),
        ({"gpu_memory": "150%"}, "a share of the free memory from 0% to 100%"),
    ],
)
def test_what_other_libraries_call_it_gets_an_answer(options: dict[str, Any], said: str) -> None:
    with pytest.raises((TypeError, ValueError), match=said):
        SuperpipelineStrategy(**options)


def test_each_habit_names_an_option_that_exists() -> None:
    known = set(inspect.signature(SuperpipelineStrategy).parameters)
    assert not known & set(HABITS)
    for option, instead in HABITS.items():
        named = re.search(r"[Uu]se (\w+)[=,]", instead)
        assert named is None or named[1] in known, (option, instead)


def test_sizes_as_people_type_them() -> None:
    sizes = {"16G": 16 * 2**30, "16Gi": 16 * 2**30, "16GiB": 16 * 2**30, "16GB": 16 * 10**9, "80%": 0.8}
    for text, size in sizes.items():
        assert SuperpipelineStrategy(gpu_memory=text)._options.gpu_memory == size
        assert SuperpipelineStrategy(host_memory=text)._options.host_memory == size


def test_its_repr_shows_the_options_that_were_given() -> None:
    strategy = SuperpipelineStrategy(k=2, layers="net.*", activations="keep")
    assert repr(strategy) == "SuperpipelineStrategy(k=2, activations='keep', layers=('net.*',))"
    assert repr(SuperpipelineStrategy()) == "SuperpipelineStrategy()"


@pytest.mark.parametrize(
    "settings",
    [{"accelerator": "cpu"}, {}, {"plugins": [MixedPrecision("bf16-mixed", "cpu")]}, {"devices": 2}],
    ids=["accelerator", "nothing", "plugins", "devices"],
)
def test_a_strategy_in_two_trainers_is_refused(settings: dict[str, Any]) -> None:
    """Lightning said "accelerator set through both strategy class and accelerator flag", or took the first one's precision."""
    strategy = SuperpipelineStrategy(k=3)
    settings = {"accelerator": "cpu", **settings} if "devices" in settings else settings
    first = pl.Trainer(strategy=strategy, logger=False, **settings)
    with pytest.raises(
        RuntimeError,
        match=r"one strategy object belongs to one Trainer\. Use .*Trainer\(strategy=SuperpipelineStrategy\(k=3\)\)\.",
    ):
        pl.Trainer(strategy=strategy, logger=False, **settings)
    assert first.strategy is strategy
    assert strategy.accelerator is not None
