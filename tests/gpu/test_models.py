"""The model matrix and quantised weights on CUDA, against the plain module there, stepped on the CPU."""

from __future__ import annotations

from itertools import product
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn

from tests.support.gpu_reference import DEVICE, reference
from tests.support.models import Module, Stack, vectors
from tests.support.runs import Batches, LossRecorder, Make, assert_equal, fused, loader, superpipeline, trainer_for
from tests.support.zoo import NOT_REPEATED, ZOO

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore::UserWarning"),  # of kernels without a deterministic form, of the libraries
]


def check(make: Make, batches: Batches, precision: Any) -> Any:
    """Losses and everything that is left behind. Returns the strategy."""
    losses, state = reference(fused(make), batches, precision)
    pl.seed_everything(7, verbose=False)
    module, recorder, strategy = make(), LossRecorder(), superpipeline(k=1)
    trainer_for(strategy, accelerator="gpu", precision=precision, callbacks=[recorder]).fit(module, loader(batches))
    assert_equal([each.cpu() for each in recorder.losses], losses, "losses")
    assert_equal({name: value.cpu() for name, value in module.state_dict().items()}, state, "state")
    return strategy


@pytest.mark.parametrize(
    ("name", "precision"),
    [
        pytest.param(*pair, marks=pytest.mark.gpu(NOT_REPEATED[pair]) if pair in NOT_REPEATED else ())
        for pair in product(ZOO, ("32-true", "bf16-mixed"))
    ],
)
def test_models_are_bitwise_equal(name: str, precision: str) -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with torch.compiler.set_stance("force_eager"):  # a deterministic roi_align would be compiled for minutes
            check(ZOO[name].make, ZOO[name].batches(2), precision)
    finally:
        torch.use_deterministic_algorithms(False)


def with_a_trained_head(net: Stack) -> Module:
    """A frozen quantised base, of which only the head trains."""
    net.head = nn.Linear(128, 128, dtype=net.stem.weight.dtype)
    return Module(net)


@pytest.mark.parametrize("bits", [8, pytest.param(4, marks=pytest.mark.gpu("a format for GPUs alone"))])
def test_torchao(bits: int) -> None:
    quantization = pytest.importorskip("torchao.quantization")
    config = (
        quantization.Int8WeightOnlyConfig()
        if bits == 8
        else quantization.Int4WeightOnlyConfig(group_size=32, int4_packing_format="tile_packed_to_4d")
    )

    def make() -> Module:
        net = Stack(width=128).to(DEVICE, torch.bfloat16).requires_grad_(False)
        quantization.quantize_(net.blocks, config)
        return with_a_trained_head(net)

    batches = [torch.randn(4, 128).bfloat16() for _ in vectors()]
    strategy = check(make, batches, "32-true")
    assert any("packed bytes" in note for note in strategy.plan.notes)


@pytest.mark.gpu("formats that bitsandbytes makes on a GPU")
@pytest.mark.parametrize("bits", [8, 4])
def test_bitsandbytes(bits: int) -> None:
    bnb = pytest.importorskip("bitsandbytes")

    def quantised(linear: nn.Linear) -> nn.Module:
        kind = bnb.nn.Linear8bitLt if bits == 8 else bnb.nn.Linear4bit
        options = {"has_fp16_weights": False} if bits == 8 else {"compute_dtype": torch.bfloat16}
        made = kind(linear.in_features, linear.out_features, **options)
        made.load_state_dict(linear.state_dict())
        return made.requires_grad_(False)

    def make() -> Module:
        net = Stack(width=128).bfloat16().requires_grad_(False)
        for block in net.blocks:
            block.inner, block.outer = quantised(block.inner), quantised(block.outer)
        return with_a_trained_head(net.cuda())  # which quantises

    check(make, [torch.randn(4, 128).bfloat16() for _ in vectors()], "32-true")
