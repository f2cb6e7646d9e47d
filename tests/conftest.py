"""What every test gets: quiet logs, and a check that nothing of ours is left behind."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from lightning.pytorch.utilities import rank_zero_only
from torch.nn.modules import module as torch_module
from torch.optim import optimizer as torch_optimizer

from sp_lightning.core.engine.engine import Engine
from sp_lightning.core.torch_compat.private import ENGINE_CALL
from tests.support.runs import imports_are_over
from tests.support.states import checked_states
from tests.support.tiers import keep_one_part, number

if TYPE_CHECKING:
    from sp_lightning.capabilities.activations.calls import UnitModes

COMMON: dict[str, Any] = {
    "deadline": None,
    "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large],
    "print_blob": True,
    "phases": [Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink],
}
settings.register_profile("first", max_examples=25, derandomize=True, **COMMON)
settings.register_profile("ci", max_examples=300, derandomize=True, **COMMON)
settings.register_profile("long", max_examples=5000, **COMMON)
settings.load_profile("first")

# Models are tiny: a second thread costs more than it brings, and very much more on a busy machine.
torch.set_num_threads(1)
os.environ.setdefault("OMP_NUM_THREADS", "1")  # of the processes that tests start

for name in ("lightning.pytorch", "lightning.pytorch.utilities.rank_zero", "lightning.fabric", "transformers"):
    logging.getLogger(name).setLevel(logging.ERROR)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--part", help="of the third tier, only this part (.ci/part), with layers' states compared in each test"
    )


@pytest.hookimpl(tryfirst=True)  # before tests are taken by their marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Takes one part of the third tier if an option says so, and runs tests of several ranks first.

    They are then tests of one worker, whose server of processes imports everything but once.
    """
    refuse_without_reason(items)
    if (part := config.getoption("part")) is not None:
        keep_one_part(config, items, number(part))
    items.sort(key=lambda item: "/test_rank" not in item.nodeid and "/test_nodes" not in item.nodeid)


def refuse_without_reason(items: list[pytest.Item]) -> None:
    """Refuse a test whose mark moves it out of the first tier, or away from the simulated device (``gpu``), without a reason."""
    for item in items:
        for mark in (mark for name in ("rest", "long", "hours", "gpu") for mark in item.iter_markers(name)):
            if mark.name == "gpu" and not mark.args:
                continue  # it runs on the simulated device
            if not (len(mark.args) == 1 and isinstance(mark.args[0], str) and len(mark.args[0].split()) > 1):
                raise pytest.UsageError(f'{item.nodeid}: say why, as in @pytest.mark.{mark.name}("a run of minutes")')


def pytest_collection_finish() -> None:
    """By now all test files are imported, and most of what they use."""
    imports_are_over()


@pytest.fixture(autouse=True)
def _nothing_left_behind() -> Iterator[None]:
    """Fail a test that leaks global hooks, saved-tensor hooks or autograd settings."""
    yield
    assert not torch_module._global_forward_hooks
    assert not torch_module._global_forward_pre_hooks
    assert not torch_optimizer._global_optimizer_pre_hooks
    assert not torch_optimizer._global_optimizer_post_hooks
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None
    call = getattr(*ENGINE_CALL)
    setattr(*ENGINE_CALL, torch.autograd.graph._engine_run_backward)  # one test fails, not all that come after it
    assert call is torch.autograd.graph._engine_run_backward
    assert torch.is_grad_enabled()
    assert rank_zero_only.rank == 0  # otherwise later tests log and write nothing


@pytest.fixture(autouse=True)
def _layers_change_as_the_table_says(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test in which a layer's state changes in a way that ``tests/support/states.py`` does not list.

    Only tests with the mark ``states`` are compared, and those of a part of the third tier.
    """
    asked_for = request.node.get_closest_marker("states") or request.config.getoption("part") is not None
    with checked_states() if asked_for else nullcontext():
        yield


@pytest.fixture
def everything_is_worth_moving(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests of offloaded activations, whose models are small."""
    from sp_lightning.capabilities.activations import offload

    monkeypatch.setattr(offload, "WORTH_MOVING", 1)


@pytest.fixture
def nothing_fits() -> Iterator[None]:
    """For tests of ``activations="auto"``, whose models are small."""
    from tests.support.poison import crowded

    with crowded():
        yield


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[UnitModes]:
    """The activations of every run, to look at after it."""
    found: list[UnitModes] = []
    close = Engine.close

    def closed(self: Engine) -> None:
        found.append(self.activations)
        close(self)

    monkeypatch.setattr(Engine, "close", closed)
    return found
