"""The ledger: what it says of the host's memory is what is measured."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from sp_lightning import SuperpipelineStrategy
from sp_lightning.core.model.find import find_layers
from sp_lightning.core.plan.ledger import Steps, make_ledger
from sp_lightning.core.plan.plan import make_plan
from sp_lightning.core.store.block_memory import Staging
from sp_lightning.core.weights.gradients import Gradients
from tests.support.models import Module
from tests.support.runs import fit
from tests.support.tiers import first, some
from tests.support.ways import scaled

WIDTH, DEPTH = 64, 6


def wide(optimizer: Any = torch.optim.AdamW, **options: Any) -> Module:
    class Wide(Module):
        def configure_optimizers(self) -> Any:
            return optimizer(self.parameters(), **options)

    return Wide(nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(DEPTH))))


PLAIN: dict[str, Any] = {"early": False, "accumulate": 1, "clips": None}
BATCHES = [torch.ones(2, WIDTH)] * 4


@pytest.mark.rest("takes tenths of a second")
def test_it_counts_adamw() -> None:
    strategy = SuperpipelineStrategy(k=1)
    fit(wide, BATCHES, strategy, gradient_clip_val=1.0)
    ledger = strategy.ledger
    count = WIDTH * WIDTH * DEPTH
    assert ledger.parameters == count
    assert (ledger.weights, ledger.gradients, ledger.state) == (4 * count, 4 * count, 8 * count)
    assert "16 bytes per parameter" in str(ledger)


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.parametrize("clip", [None, 1.0])
def test_it_counts_gradients_of_16_mixed(clip: float | None) -> None:
    """Gradients stay in 16 bits until the update; for norms, one at a time is widened."""
    strategy = SuperpipelineStrategy(k=1, optimizer_overlap="forward")
    fit(wide, BATCHES, strategy, recorded="nothing", gradient_clip_val=clip, **scaled())
    ledger = strategy.ledger
    count = WIDTH * WIDTH * DEPTH
    assert ledger.gradients == 2 * count + (clip is not None) * 4 * WIDTH * WIDTH  # and the buffer for norms


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.parametrize("k_prime", [1, 2, 3])
def test_the_staging_memory_of_accumulated_gradients(k_prime: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """So many layers' gradients are staged at once as the ledger says."""
    place, give_back = Gradients._place, Staging.give_back
    taken: list[Any] = []
    most = 0

    def placed(self: Gradients, *args: Any) -> Any:
        nonlocal most
        result = place(self, *args)
        taken.extend([result[1]] if result[1] is not None else [])
        most = max(most, len(taken))
        return result

    def given_back(self: Staging, block: Any) -> None:
        taken[:] = [each for each in taken if each is not block]
        give_back(self, block)

    monkeypatch.setattr(Gradients, "_place", placed)
    monkeypatch.setattr(Staging, "give_back", given_back)
    strategy = SuperpipelineStrategy(k=1, k_prime=k_prime)
    net = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(12)))
    fit(lambda: Module(net), [torch.ones(2, 8)] * 2, strategy, accumulate_grad_batches=2)
    once = make_ledger(strategy.plan, [], Steps(**PLAIN))
    assert strategy.ledger.gradients - once.gradients == most * max(
        layer.gradient_bytes for layer in strategy.plan.layers
    )


@pytest.mark.rest("takes tenths of a second")
def test_it_counts_what_the_options_need() -> None:
    strategy = SuperpipelineStrategy(k=1)
    fit(lambda: wide(torch.optim.SGD, lr=0.1), BATCHES, strategy, accumulate_grad_batches=2)
    ledger = strategy.ledger
    layer = WIDTH * WIDTH * 4
    assert ledger.state == 0
    assert ledger.gradients == (DEPTH + 3) * layer  # and staging for k' + 2 layers
    early = make_ledger(strategy.plan, [], Steps(**{**PLAIN, "early": True}))
    assert early.gradients == min(DEPTH, 4) * layer  # of k' + 3 layers
    fit(lambda: wide(torch.optim.Adafactor), BATCHES, strategy := SuperpipelineStrategy(k=1))
    assert 0 < strategy.ledger.state < layer  # factored, and known once it is there
    assert make_ledger(strategy.plan, [torch.optim.Adafactor(wide().parameters())], Steps(**PLAIN)).state is None


def test_there_is_none_outside_training() -> None:
    with pytest.raises(RuntimeError, match=r"only trainer\.fit"):
        _ = SuperpipelineStrategy().ledger


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
@pytest.mark.parametrize("place", ["cpu", "gpu"])
def test_layers_that_stay_take_no_host_memory(place: Any, precision: Any) -> None:
    """Half of equal layers: half of weights, gradients and state."""
    found = {}
    for stay in (0, DEPTH // 2, DEPTH):
        strategy = SuperpipelineStrategy(k=1, optimizer_on=place, gpu_layers=stay, optimizer_overlap="off")
        fit(wide, BATCHES, strategy, recorded="nothing", precision=precision, gradient_clip_val=1.0)
        found[stay] = strategy.ledger
    none, half, everything = found.values()
    # What k' + 2 layers' casts come in, which a step of the host's widens.
    staged = 3 * 2 * WIDTH * WIDTH if (place, precision) == ("cpu", "bf16-mixed") else 0
    assert half.gradients - staged == (none.gradients - staged) // 2
    assert everything.gradients == 0
    weights_and_state = none.nbytes - none.gradients
    assert half.nbytes == weights_and_state // 2 + half.gradients
    assert everything.nbytes == 0


def test_gradients_that_wait_are_those_of_layers_that_do_not_stay() -> None:
    """With accumulation, and if each is freed in backward: staging of layers of which none comes is none."""
    net = wide().net
    plans = [make_plan(find_layers(net, gpu_layers=stay), k=1, k_prime=1) for stay in (0, DEPTH - 1, DEPTH)]
    layer = WIDTH * WIDTH * 4
    for steps, expected in (
        ({"accumulate": 2}, [(DEPTH + 3) * layer, 4 * layer, 0]),
        ({"early": True}, [4 * layer, layer, 0]),
    ):
        assert [make_ledger(plan, [], Steps(**{**PLAIN, **steps})).gradients for plan in plans] == expected


GROWTH = """
import gc, sys, torch, lightning.pytorch as pl
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import nn
from sp_lightning import SuperpipelineStrategy
torch.set_num_threads(1)
def resident():
    gc.collect()
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("VmRSS"))
class Net(pl.LightningModule):
    def __init__(self, depth, width):
        super().__init__()
        self.net = nn.Sequential(*(nn.Linear(width, width) for _ in range(depth)))
    def training_step(self, batch, batch_idx):
        self.resident = resident()  # with the gradients of the step before
        return self.net(batch).square().mean()
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())
def fit(depth, width):
    strategy = SuperpipelineStrategy(k=1, optimizer_overlap=sys.argv[1])
    quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    half = sys.argv[2] == "16-mixed"  # which Lightning takes on the CPU from its plugin alone
    precision = dict(plugins=MixedPrecision("16-mixed", "cpu", scaler)) if half else dict(precision=sys.argv[2])
    trainer = pl.Trainer(strategy=strategy, accelerator="cpu", max_steps=4, **precision, **quiet)
    module = Net(depth, width)
    trainer.fit(module, torch.utils.data.DataLoader(torch.randn(8, width), batch_size=2))
    return module.resident, strategy
fit(2, 1536)  # loads code
before = resident()
after, strategy = fit(30, 1536)
print(after - before, strategy.ledger.nbytes, strategy.plan.peak_device_bytes, strategy.ledger.parameters)
"""


@pytest.mark.long("a process that imports torch and trains")
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    ("mode", "precision", "most"),
    some(
        [
            ("off", "32-true", 16.1),
            ("forward", "bf16-mixed", 16.1),
            ("forward", "16-mixed", 16.1),
            ("backward", "32-true", 12.6),
            ("backward", "bf16-mixed", 14.3),
        ],
        ("forward", "bf16-mixed", 16.1),
        why="it has all kinds of memory",
    ),
)
def test_memory_grows_by_what_it_says(mode: str, precision: str, most: float) -> None:
    """Within 5 %; on the CPU the device's share is host memory, too. glibc's heap, which torch's CPU tensors lie in,
    does not fill holes of aligned blocks again, so it is kept out."""
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "100000", "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", GROWTH, mode, precision],
        capture_output=True, text=True, env=environment, check=True,
    )  # fmt: skip
    growth, ledger, device, count = map(int, ran.stdout.split()[-4:])
    assert 0.95 * ledger <= growth <= 1.05 * (ledger + device)
    assert ledger / count <= most


GUIDES = Path(__file__).parents[2] / "examples" / "guide"
ACCUMULATED: dict[Any, tuple[int, int]] = {"32-true": (16, 4), "bf16-mixed": (18, 4), "bf16-true": (8, 2)}


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.parametrize("precision", first(ACCUMULATED, "bf16-mixed", why="other dtypes"))
def test_accumulation_takes_what_the_guides_say(precision: Any) -> None:
    """They said 18 bytes per parameter in one place, and 19 in another, which holds what waits of some model."""
    count, (each, of_gradient) = WIDTH * WIDTH * DEPTH, ACCUMULATED[precision]
    for accumulate in (1, 2):
        strategy = SuperpipelineStrategy(k=1, k_prime=1, optimizer_overlap="forward")
        options: Any = {"precision": precision, "accumulate_grad_batches": accumulate}
        fit(wide, BATCHES, strategy, recorded="nothing", **options)
        waiting = 3 * of_gradient * WIDTH * WIDTH * (accumulate > 1)  # of k' + 2 layers
        assert strategy.ledger.nbytes - waiting == (each if accumulate > 1 else min(each, 16)) * count
    memory = (GUIDES / "memory.md").read_text()
    assert "| `32-true` | 16 |" in memory
    assert "| `bf16-mixed`, `16-mixed` | 16, or [18](updates.md#gradients-in-16-bits) |" in memory
    assert "| `bf16-true`, `16-true` | 8 |" in memory
    pages = [page.read_text() for page in GUIDES.glob("*.md")]
    assert not any(re.search(r"up to 19|\(then 9\)", page) for page in pages)
