"""After a run that has waited for optimizer steps, the log names options with which they could be faster."""

from __future__ import annotations

import re
from typing import Any
from unittest import mock

import pytest
import torch
from torch.optim import Optimizer

from sp_lightning import SuperpipelineStrategy
from sp_lightning.core.device.device import Wait
from tests.support.models import vectors
from tests.support.nets import Stepped, adamw
from tests.support.runs import fit
from tests.support.simdevice import SimDevice, simulated

SECONDS = 10.0


class Asks(Stepped):
    """Asks for the advice at the end of a run of :data:`SECONDS`."""

    said: str

    def on_train_end(self) -> None:
        self.said = self.trainer.strategy._step_advice(SECONDS)  # type: ignore[attr-defined]


def advice(waited: float, make: Any = adamw, precision: Any = "32-true", clip: Any = None, **options: Any) -> str:
    """The advice after a run on a simulated device that has waited so many seconds for updates in the background."""

    def stalled(device: Any, *why: Wait) -> float:
        return waited if Wait.FETCH_AFTER_UPDATE in why else 0.5 if Wait.USE_AFTER_FETCH in why else 0.0

    module = Asks(make)
    with mock.patch.object(SimDevice, "stall_seconds", stalled), simulated():
        strategy = SuperpipelineStrategy(**{"k": 1, "optimizer_overlap": "backward", **options})
        fit(lambda: module, vectors(), strategy, recorded="nothing", precision=precision, gradient_clip_val=clip)
    return module.said


ON_GPU = 'Try optimizer_on="gpu": the GPU then runs the optimizer steps, and results have its last bits.'


class Unknown(torch.optim.AdamW):
    pass


def unknown(parameters: Any) -> Optimizer:
    return Unknown(parameters, lr=1e-2)


@pytest.mark.long("takes a second or more")
@pytest.mark.parametrize(
    ("waited", "options", "said"),
    [
        (5.1, {}, True),
        (4.9, {}, False),
        (9.0, {"optimizer_on": "gpu"}, False),
        (9.0, {"optimizer_overlap": "off", "make": unknown}, False),
        (9.0, {"gpu_memory": "40KiB"}, False),
        (9.0, {"optimizer_overlap": "forward", "precision": "bf16-true"}, False),
    ],
    ids=["half", "less", "there already", "cannot step there", "no room", "mode"],
)
def test_a_run_that_waits_for_updates_half_of_its_time_is_told_of_the_gpu(
    waited: float, options: dict[str, Any], said: bool
) -> None:
    assert (ON_GPU in advice(waited, **options)) is said


@pytest.mark.rest("takes tenths of a second")
def test_the_former_choice_is_an_error_that_names_what_to_write_now() -> None:
    message = re.escape('optimizer_on must be one of "cpu", "gpu", found \'auto\'. Use optimizer_on="cpu".')
    with pytest.raises(ValueError, match=message):
        SuperpipelineStrategy(optimizer_on="auto")  # type: ignore[arg-type]
