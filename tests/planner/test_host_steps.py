"""The time of optimizer steps that compute longer than they read and write memory, in ``plan``."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sp_lightning.__main__ import main
from sp_lightning.tools.planner.cpu_seconds import muon_flops
from sp_lightning.tools.planner.host import HostStep, on_device


def test_muons_products_are_counted_as_torch_multiplies() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    matrices = [torch.nn.Parameter(torch.randn(shape)) for shape in ((8, 24), (32, 16), (5, 5))]
    optimizer = torch.optim.Muon(matrices)
    for matrix in matrices:
        matrix.grad = torch.randn_like(matrix)
    with FlopCounterMode(display=False) as counter:
        optimizer.step()
    assert muon_flops(matrices) == counter.get_total_flops()


@pytest.mark.parametrize(("kind", "overlap"), [(torch.optim.Muon, "off"), (torch.optim.AdamW, "forward")])
def test_what_reads_settings_in_each_step_overlaps_with_nothing_on_the_gpu(kind: Any, overlap: str) -> None:
    question: Any = SimpleNamespace(stores_16_bits=False, mode="forward", tflops=1.0)
    step = HostStep("", (kind([torch.nn.Parameter(torch.ones(2, 2))]),), "off")
    assert on_device(step, question).overlap == overlap


@pytest.mark.long(
    "four answers about a model of billions of parameters; test_separable counts small states in the first tier"
)
def test_plan_counts_eight_bits_of_state(capsys: pytest.CaptureFixture[str]) -> None:
    """Real layers' sizes: what is small stays float32, and so may be half of a small model."""
    asked = ["plan", "examples/shapes/llama-3-8b.json", "--k", "1", "--k-prime", "1", "--json"]

    def found(*arguments: str) -> dict[str, Any]:
        main([*asked, *arguments])
        answered: dict[str, Any] = json.loads(capsys.readouterr().out)
        return answered

    host = ("--optimizer", "adamw8bit", "--optimizer-on", "cpu")
    adamw, bits = found(), found(*host, "--optimizer-overlap", "off")
    saved = (adamw["host_bytes"] - bits["host_bytes"]) / adamw["parameters"]
    assert 3.5 < saved < 4.5, "8 bytes of state against 2, and gradients that are widened: 2 more"
    behind = found(*host)
    assert behind["windows"][0]["seconds"] < bits["windows"][0]["seconds"], "in the background, layer by layer"
    assert behind["windows"][0]["busy_seconds"]["optimizer"] == pytest.approx(21e-9 * adamw["parameters"], rel=0.01)
    usual = found("--optimizer", "adamw8bit")
    assert usual["optimizer_on"] == "gpu"
    assert usual["windows"][0]["seconds"] < 2 * adamw["windows"][0]["seconds"], "8-bit states step on the GPU"
