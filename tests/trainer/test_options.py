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
from sp_lightning.core.engine.engine import Engine
from sp_lightning.core.plan.choices import HABITS
from sp_lightning.trainer.option_checks import checked_path
from tests.support.models import Module, Stack, vectors
from tests.support.runs import loader, trainer_for

LAYERS = r"""must be an integer \(a number of layers\) or "auto", found """
VALID = re.escape(f"Valid options: {', '.join(inspect.signature(SuperpipelineStrategy).parameters)}.")
REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    # a value of the wrong kind
    ({"k": 0}, ValueError, "k must be at least 1, found 0"),
    ({"k_prime": -3}, ValueError, "k_prime must be at least 1, found -3"),
    *(({"k": value}, TypeError, f"k {LAYERS}{re.escape(repr(value))}") for value in (1.5, "2", True, None, torch.tensor(2.5))),
    ({"k_prime": 1.5}, TypeError, f"k_prime {LAYERS}1.5"),
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
    # a name that is not there
    ({"kprime": 1}, TypeError, r"has no option 'kprime'\. Did you mean k_prime\?$"),
    ({"gpu_mem": 1}, TypeError, r"has no option 'gpu_mem'\. Did you mean gpu_memory\?$"),
    ({"optimiser_overlap": 1}, TypeError, r"has no option 'optimiser_overlap'\. Did you mean optimizer_overlap\?$"),
    ({"banana": 1}, TypeError, rf"has no option 'banana'\. {VALID}$"),
    # what other libraries call it gets an answer
    ({"cpu_offload": True}, TypeError, "always offloaded"),
    ({"offload_optimizer": True}, TypeError, 'optimizer_on="gpu"'),
    ({"blocks_to_swap": 20}, TypeError, "k=2"),
    ({"num_blocks_per_group": 2}, TypeError, "k=2"),
    ({"nvme_path": "/scratch"}, TypeError, 'disk="/scratch"'),
    ({"precision": "bf16-mixed"}, TypeError, r'Trainer\(precision="bf16-mixed"\)'),
    ({"gradient_checkpointing": True}, TypeError, 'activations="recompute"'),
    ({"activations": True}, TypeError, 'Use activations="recompute"'),
    ({"activations": "checkpoint"}, ValueError, 'Use activations="recompute"'),
    ({"activations": {"a.*": "cpu"}}, ValueError, 'Use activations="offload"'),
    ({"activations": "recompte"}, ValueError, 'Did you mean activations="recompute"'),
    ({"optimizer_overlap": "backwards"}, ValueError, 'Did you mean optimizer_overlap="backward"'),
    ({"k'": 2}, TypeError, "k_prime=1"),
    ({"fused_optimizer": True}, TypeError, r"Write it in the optimizer: torch\.optim\.AdamW\(…, fused=True\)"),
    ({"optimizer_on": "cuda"}, ValueError, 'Use optimizer_on="gpu"'),
    ({"optimizer_overlap": False}, ValueError, 'Use optimizer_overlap="off"'),
    ({"gpu_memory": 0.8}, ValueError, '0.8 may be GiB or a share. For GiB: "0.8GiB"'),
    ({"gpu_memory": "150%"}, ValueError, "a share of the free memory from 0% to 100%"),
]  # fmt: skip


@pytest.mark.parametrize(("options", "error", "said"), REFUSED)
def test_an_option_that_cannot_be(options: dict[str, Any], error: type[Exception], said: str) -> None:
    with pytest.raises((TypeError, ValueError), match=said) as caught:
        SuperpipelineStrategy(**options)
    assert caught.type is error


def test_an_error_names_the_class_that_the_user_knows() -> None:
    with pytest.raises(TypeError, match=r"^Own has no option 'kprime'\."):
        type("Own", (SuperpipelineStrategy,), {})(kprime=1)


def test_options_are_keyword_only() -> None:
    with pytest.raises(TypeError, match=r"^SuperpipelineStrategy takes keyword arguments only, found 2\."):
        SuperpipelineStrategy(2)  # type: ignore[misc]


@pytest.mark.long("a subprocess that imports torch")
@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("gpu_memory: lots", "superpipeline fit: gpu_memory takes a size: GiB as a number"),
        ("kprime: 2", "Option 'kprime' is not accepted"),
    ],
)
def test_an_option_of_a_config_that_cannot_be(given: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "fit.yaml").write_text(CONFIG.format(given=given))
    command = [sys.executable, "-W", "ignore", "-m", "sp_lightning", "fit", "--config", "fit.yaml"]
    environment = {**os.environ, "PYTHONPATH": str(Path(sp_lightning.__file__).parent.parent)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
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


def trainer_on(devices: int = 1, strategy: Any = "superpipeline", **options: Any) -> pl.Trainer:
    return pl.Trainer(strategy=strategy, accelerator="cpu", devices=devices, logger=False, **options)


def test_the_strategy_takes_the_devices_of_its_trainer() -> None:
    one, two = trainer_on().strategy, trainer_on(2).strategy
    assert isinstance(one, SuperpipelineStrategy)
    assert isinstance(two, SuperpipelineStrategy)
    assert isinstance(one, SingleDeviceStrategy)
    assert isinstance(two, DDPStrategy)
    assert not isinstance(two, SingleDeviceStrategy)
    assert two.world_size == 2


def test_a_users_strategy_stays_theirs_on_several_devices() -> None:
    class Mine(SuperpipelineStrategy):
        def on_train_start(self) -> None:
            super().on_train_start()

    mine = Mine(k=1)
    assert trainer_on(2, mine).strategy is mine
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
    one_each = trainer_on(num_nodes=3).strategy
    assert isinstance(one_each, DDPStrategy)
    assert (one_each.world_size, one_each.global_rank, one_each.local_rank) == (3, 2, 0)
    monkeypatch.setenv("LOCAL_RANK", "1")
    two_each = trainer_on(2, num_nodes=3)
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
        engine = Engine(module, found, make_plan(found, k=1, k_prime=1), RefusesPinning(torch.device("cpu")), pin=True)
    assert len(caught) == 1
    assert module(torch.ones(1, 16)).isfinite().all()
    engine.close()


def test_plan_and_stats_before_setup() -> None:
    strategy = SuperpipelineStrategy()
    with pytest.raises(RuntimeError, match="no plan yet"):
        _ = strategy.plan
    with pytest.raises(RuntimeError, match="no counters yet"):
        strategy.stats()


def test_the_name_is_registered() -> None:
    assert trainer_on().strategy.root_device.type == "cpu"
    assert "superpipeline" in pl.strategies.StrategyRegistry
    assert sp_lightning.__version__


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
