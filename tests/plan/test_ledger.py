"""The ledger: what it says of the host's memory and traffic is what is measured."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sp_lightning import SuperpipelineStrategy
from sp_lightning.core.device.device import Device
from sp_lightning.core.layers.gradients import Gradients
from sp_lightning.core.model.find import find_layers
from sp_lightning.core.plan.ledger import Steps, make_ledger
from sp_lightning.core.plan.plan import make_plan
from sp_lightning.core.plan.units import human_bytes
from sp_lightning.core.store.block_memory import Staging
from tests.support.mixed import scaled
from tests.support.models import Module
from tests.support.overlapping import at_once
from tests.support.runs import fit, loader, trainer_for
from tests.support.tiers import first, some

WIDTH, DEPTH = 64, 6


def wide(optimizer: Any = torch.optim.AdamW, **options: Any) -> Module:
    class Wide(Module):
        def configure_optimizers(self) -> Any:
            return optimizer(self.parameters(), **options)

    return Wide(nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(DEPTH))))


PLAIN: dict[str, Any] = {"early": False, "accumulate": 1, "clips": None, "scales": False}
BATCHES = [torch.ones(2, WIDTH)] * 4


@pytest.mark.rest("takes tenths of a second")
def test_it_counts_adamw() -> None:
    strategy = SuperpipelineStrategy(k=1)
    fit(wide, BATCHES, strategy, gradient_clip_val=1.0)
    ledger = strategy.ledger
    count = WIDTH * WIDTH * DEPTH
    assert ledger.parameters == count
    assert (ledger.weights, ledger.gradients, ledger.state) == (4 * count, 4 * count, 8 * count)
    assert {each.what: (each.read / count, each.written / count) for each in ledger.passes} == {
        "fetch": (8, 0),
        "gradients": (0, 4),
        "norm": (4, 0),
        "clipping": (4, 4),
        "update": (16, 12),
    }
    assert "16 bytes per parameter" in str(ledger)
    assert "more than: 32 bytes read and 20 written (read/written by fetch 8/0, gradients 0/4," in str(ledger)


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.parametrize("clip", [None, 1.0])
def test_it_counts_one_pass_of_16_mixed(clip: float | None) -> None:
    """Gradients in 16 bits are read once for infinities, and widened once for norms. The update unscales and clips them."""
    strategy = SuperpipelineStrategy(k=1, optimizer_overlap="forward")
    fit(wide, BATCHES, strategy, recorded="nothing", gradient_clip_val=clip, **scaled())
    ledger = strategy.ledger
    count = WIDTH * WIDTH * DEPTH
    assert {each.what: (each.read / count, each.written / count) for each in ledger.passes} == {
        "casts": (0, 2),
        "fetch": (4, 0),
        "gradients": (0, 2),
        "unscaling": (2, 0),
        **({} if clip is None else {"norm": (6, 4)}),
        "update": (14, 12),
    }
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
    assert any(each.what == "accumulation" for each in ledger.passes)
    early = make_ledger(strategy.plan, [], Steps(**{**PLAIN, "early": True, "scales": True}))
    assert early.gradients == min(DEPTH, 4) * layer  # of k' + 3 layers
    assert any(each.what == "unscaling" for each in early.passes)
    fit(lambda: wide(torch.optim.Adafactor), BATCHES, strategy := SuperpipelineStrategy(k=1))
    assert 0 < strategy.ledger.state < layer  # factored, and known once it is there
    assert make_ledger(strategy.plan, [torch.optim.Adafactor(wide().parameters())], Steps(**PLAIN)).state is None


def test_there_is_none_outside_training() -> None:
    with pytest.raises(RuntimeError, match=r"only trainer\.fit"):
        _ = SuperpipelineStrategy().ledger


class Traffic(TorchDispatchMode):
    """Bytes of host memory that operators read and write: of host blocks, gradients and optimizer state."""

    def __init__(self, *, pieces: bool) -> None:
        super().__init__()
        self.read = self.written = 0
        self.ranges: list[tuple[int, int]] = []
        self.pieces = pieces
        self.in_caches: set[int] = set()  # the addresses of what the last operator of an update wrote

    def on_host(self, tensor: Tensor) -> bool:
        return any(start <= tensor.data_ptr() < end for start, end in self.ranges)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.split("::")[1]
        if name in ("zeros_like", "zeros"):  # the state that an optimizer makes
            made = func(*args, **(kwargs or {}))
            if name == "zeros" or self.on_host(args[0]):  # and not of layers that stay on the device
                self.ranges.append((made.data_ptr(), made.data_ptr() + made.nbytes))
            return made
        aliases = any(each.alias_info is not None and not each.alias_info.is_write for each in func._schema.returns)
        if not aliases and name not in ("set_", "detach", "empty", "empty_like"):
            for position, (argument, value) in enumerate(zip(func._schema.arguments, args, strict=False)):
                written = argument.alias_info is not None and argument.alias_info.is_write
                for tensor in tree_leaves(value):
                    if isinstance(tensor, Tensor) and tensor.ndim and self.on_host(tensor):
                        if name in ("copy_", "_fused_adamw_") and tensor.data_ptr() in self.in_caches:
                            continue  # a weight that is cast right after its update, a gradient that was just clipped
                        is_gradient = name.startswith("_fused") and position == 1  # read, whatever the schema allows
                        self.written += tensor.nbytes * (written and not is_gradient)
                        self.read += tensor.nbytes * (name not in ("copy_", "fill_", "zero_") or position > 0)
        if self.pieces and (name == "mul_" or name.startswith("_fused")):
            self.in_caches = {tensor.data_ptr() for tensor in tree_leaves(args[0])}
        return func(*args, **(kwargs or {}))


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("clip", [None, 1e-4])
@pytest.mark.parametrize("precision", first(["32-true", "bf16-mixed", "16-mixed"], "16-mixed", why="it has all passes"))
@pytest.mark.parametrize("overlap", ["off", "forward"])
def test_no_step_passes_over_more_than_it_says(
    overlap: Any, precision: str, clip: float | None, accumulate: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    _compare_traffic(monkeypatch, overlap, precision, clip, accumulate=accumulate)


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.parametrize("clip", [None, 1e-4])
@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
def test_nor_does_a_step_with_layers_that_stay(
    precision: str, clip: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    _compare_traffic(monkeypatch, "off", precision, clip, stay=DEPTH // 2)


def _compare_traffic(
    monkeypatch: pytest.MonkeyPatch,
    overlap: Any,
    precision: str,
    clip: float | None,
    *,
    accumulate: int = 1,
    stay: int = 0,
) -> None:
    traffic = Traffic(pieces=overlap != "off")
    counted: list[tuple[int, int]] = []
    make = Device.host_empty

    def noted(self: Device, nbytes: int, *, pin: bool) -> Tensor:
        memory = make(self, nbytes, pin=pin)
        traffic.ranges.append((memory.data_ptr(), memory.data_ptr() + memory.nbytes))
        return memory

    monkeypatch.setattr(Device, "host_empty", noted)
    monkeypatch.setattr(Device, "later", at_once)  # where this thread's operators are counted
    # The engine's own operators are to be counted.
    monkeypatch.setattr("sp_lightning.core.engine.calls.held", lambda lock, **_: lock)
    strategy = SuperpipelineStrategy(k=1, fused_optimizer=True, optimizer_overlap=overlap, gpu_layers=stay)
    options: dict[str, Any] = {
        **(scaled() if precision == "16-mixed" else {"precision": precision}),
        "gradient_clip_val": clip, "accumulate_grad_batches": accumulate,
    }  # fmt: skip

    class Steps(Module):
        if overlap == "off" and not stay:

            def on_train_batch_end(self, *_: Any) -> None:
                """After this nothing on the device is trusted, so that all is fetched each time."""

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            if batch_idx % accumulate == 0:
                counted.append((traffic.read, traffic.written))
            return super().training_step(batch, batch_idx)

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters())

    with traffic:
        trainer_for(strategy, **options).fit(Steps(wide().net), loader(BATCHES * accumulate))
    passes = strategy.ledger.passes
    # From the second step on, by which all memory is there.
    (read_before, written_before), (read, written) = counted[1], counted[3]
    most_read, most_written = 2 * sum(each.read for each in passes), 2 * sum(each.written for each in passes)
    assert (0.8 if overlap == "off" and not stay else 0.7) * most_read <= read - read_before <= most_read
    assert 0.8 * most_written <= written - written_before <= most_written


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
@pytest.mark.parametrize("place", ["cpu", "gpu"])
def test_layers_that_stay_pass_over_no_host_memory(place: Any, precision: Any) -> None:
    """Half of equal layers: half of each pass, and of gradients. A checkpoint brings weights and state to the host."""
    found = {}
    for stay in (0, DEPTH // 2, DEPTH):
        strategy = SuperpipelineStrategy(k=1, optimizer_on=place, gpu_layers=stay, optimizer_overlap="off")
        fit(wide, BATCHES, strategy, recorded="nothing", precision=precision, gradient_clip_val=1.0)
        found[stay] = strategy.ledger
    none, half, everything = found.values()
    assert {each.what: (2 * each.read, 2 * each.written) for each in half.passes} == {
        each.what: (each.read, each.written) for each in none.passes
    }
    assert everything.passes == ()
    # What k' + 2 layers' casts come in, which a step of the host's widens.
    staged = 3 * 2 * WIDTH * WIDTH if (place, precision) == ("cpu", "bf16-mixed") else 0
    assert half.gradients - staged == (none.gradients - staged) // 2
    assert everything.gradients == 0
    weights_and_state = none.nbytes - none.gradients
    assert [each.staying for each in (none, half, everything)] == [0, weights_and_state // 2, weights_and_state]
    assert half.nbytes == weights_and_state + half.gradients, "while a checkpoint is written"
    assert half.stepping_bytes == weights_and_state // 2 + half.gradients
    assert everything.stepping_bytes == 0
    assert "While batches are trained" not in str(none)
    assert f"{human_bytes(half.staying)} of that are in GPU memory alone: {human_bytes(half.stepping_bytes)}, " in str(
        half
    )


def test_gradients_that_wait_are_those_of_layers_that_do_not_stay() -> None:
    """With accumulation, and if each is freed in backward: staging of layers of which none comes is none."""
    found = find_layers(wide().net)
    plans = [make_plan(found, k=1, k_prime=1, stay=stay) for stay in (0, DEPTH - 1, DEPTH)]
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


@pytest.mark.parametrize("fused", [False, True])
def test_the_line_says_whether_the_step_runs_fused(fused: bool) -> None:
    """It called every step fused, and the count the most, on a CPU, too, where the optimizer runs as it was written."""
    strategy = SuperpipelineStrategy(k=1, fused_optimizer=fused)
    fit(wide, BATCHES[:2], strategy)
    expected = "fused optimizer step, at most: " if fused else "optimizer step, which does not run fused, more than: "
    assert f"CPU memory traffic per parameter and {expected}" in str(strategy.ledger)


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
