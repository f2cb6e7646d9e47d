"""What only memory, streams and an allocator of a device can show, in numbers that do not depend on speed."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback

from sp_lightning import SuperpipelineStrategy
from sp_lightning.core.device.accelerator import Accelerator
from sp_lightning.core.device.device import Stream, Wait
from tests.support.models import CASES, Module, Stack, llama
from tests.support.runs import assert_same, fit

pytestmark = pytest.mark.usefixtures("everything_is_worth_moving")
STEPS = 4
WORDS = torch.arange(64).view(2, 32) % 61
NETS: dict[str, Any] = {
    "linear": (lambda: Module(Stack(6, width=64)), [torch.randn(8, 64) for _ in range(STEPS)]),
    "llama": (partial(llama, dropout=0.0), [{"input_ids": WORDS, "labels": WORDS}] * STEPS),
}


@pytest.mark.parametrize("name", ["stack", "llama-dropout", "vit"])
def test_first_trainings_are_equal(name: str) -> None:
    make, batches = CASES[name].make, CASES[name].batches()
    assert_same(fit(make, batches, SuperpipelineStrategy(k=1)), fit(make, batches))


def test_a_module_that_is_on_the_device_before_is_named() -> None:
    """It is moved to the CPU by the run, as from CUDA. torch's error said nothing of the weight."""
    with pytest.raises(RuntimeError, match=r"'net\.\S+' is on mcpu:0.*module\.cpu\(\)"):
        fit(lambda: Module(Stack(2)).to("mcpu"), NETS["linear"][1], SuperpipelineStrategy(k=1))


def hooked(make: Any) -> Any:
    module = make()
    for parameter in module.parameters():
        parameter.register_post_accumulate_grad_hook(lambda _: None)
    return module


class Counts(Callback):
    """Counts copies and waits of the host in all steps but the first."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.found = Counter[str]()
        copy, synchronize = Accelerator.copy, Accelerator.synchronize

        def copied(device: Any, targets: Any, sources: Any, stream: Stream, **options: Any) -> None:
            self.found[stream.name] += 1
            copy(device, targets, sources, stream, **options)

        def waited(device: Any, event: Any, why: Wait) -> None:
            self.found[why.name] += event is not None
            synchronize(device, event, why)

        monkeypatch.setattr(Accelerator, "copy", copied)
        monkeypatch.setattr(Accelerator, "synchronize", waited)

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            self.found.clear()

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.last = (
            {name: self.found[name] / batch_idx for name in ("UPLOAD", "DOWNLOAD", "APPLY_AFTER_DRAIN")}
            if batch_idx
            else {}
        )


@pytest.mark.parametrize(
    ("name", "how", "copies"),
    [
        ("linear", "plain", (13, 8, 8)), ("linear", "clipped", (13, 8, 8)), ("linear", "hooked", (13, 28, 28)),
        ("linear", "offload", (29, 24, 8)), ("llama", "plain", (10, 7, 7)), ("llama", "clipped", (10, 7, 7)),
        ("llama", "hooked", (10, 39, 39)), ("llama", "offload", (81, 78, 7)),
    ],
)  # fmt: skip
def test_copies_and_waits_of_a_step(
    name: str, how: str, copies: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each layer's gradients take one download and one wait of the CPU; with hooks on gradients, each gradient does."""
    make, batches = NETS[name]
    counts = Counts(monkeypatch)
    strategy = SuperpipelineStrategy(k=1, activations="offload" if how == "offload" else "auto")
    fit(partial(hooked, make) if how == "hooked" else make, batches, strategy, recorded="nothing", callbacks=[counts],
        gradient_clip_val=0.1 if how == "clipped" else None)  # fmt: skip
    # Whole numbers: the first upload for the next step may have begun when the counts are read.
    assert tuple(map(int, counts.last.values())) == copies, "uploads, downloads, waits of the CPU for gradients"
