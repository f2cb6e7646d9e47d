"""Blocks that inductor compiles for a GPU: bit-identical to plain Lightning, uploaded in 16 bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch._dynamo

from sp_lightning import SuperpipelineStrategy, compile_blocks
from tests.support.gpu_reference import GPU
from tests.support.models import llama, lora, tokens
from tests.support.runs import Outcome, assert_equal, fit

pytestmark = [
    pytest.mark.gpu("inductor's kernels; python -m tests.equality.compiled_blocks runs those for a CPU"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.usefixtures("deterministic"),
]
OPTIONS: dict[str, Any] = {**GPU, "precision": "bf16-mixed"}


def train(make: Any, strategy: Any, *, compiled: bool = True) -> Outcome:
    def made() -> Any:
        module = make()
        if compiled:
            compile_blocks(module)
        return module

    torch._dynamo.reset()
    return fit(made, tokens(), strategy, **OPTIONS)


@pytest.mark.parametrize("activations", ["keep", "recompute", "offload"])
@pytest.mark.parametrize("make", [llama, lora])
def test_results_and_bytes(make: Any, activations: Any) -> None:
    plain = train(make, "auto")
    options: dict[str, Any] = {"k": 1, "activations": activations, "optimizer_on": "gpu"}
    strategy, eager = SuperpipelineStrategy(**options), SuperpipelineStrategy(**options)
    ours = train(make, strategy)
    assert_equal([loss.cpu() for loss in ours.losses], [loss.cpu() for loss in plain.losses], "losses")
    expected = {name: value.cpu() for name, value in plain.state.items()}
    assert_equal({name: value.cpu() for name, value in ours.state.items()}, expected, "state")
    train(make, eager, compiled=False)
    assert strategy.stats().fetched_bytes == eager.stats().fetched_bytes
