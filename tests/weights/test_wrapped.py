"""Quantised weights: what is refused, what they consist of, and checkpoints of them.

``tests/equality/programs/quantised.py`` has what user code does with them.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torchao.quantization import Int8WeightOnlyConfig

from sp_lightning.core.model.find import find_layers
from sp_lightning.core.model.wrapped import parts
from tests.equality.programs.quantised import partly_quantised
from tests.support.models import Stack, tokens
from tests.support.quantised import adapted, opaque
from tests.support.runs import assert_equal, assert_same, fit, superpipeline

# peft warns that these adapters cannot be merged: nobody told it how to quantise again.
pytestmark = pytest.mark.filterwarnings("ignore:TorchaoLoraLinear was instantiated without")


@pytest.mark.long("takes a second or more")
def test_resumes(tmp_path: Path) -> None:
    """A checkpoint holds the quantised weights as plain Lightning's does, which cannot load any (a callable map_location)."""
    make, files = adapted(Int8WeightOnlyConfig), [tmp_path / "ours.ckpt", tmp_path / "plain.ckpt"]
    for file, strategy in zip(files, [superpipeline(k=1), "auto"], strict=True):
        fit(make, tokens(), strategy).trainer.save_checkpoint(file)
    saved = [torch.load(file, weights_only=False) for file in files]
    assert_equal(saved[0]["state_dict"], saved[1]["state_dict"], "state_dict")
    with pytest.raises(RuntimeError, match="Callable map_location"):
        fit(make, tokens(6), ckpt_path=files[1], max_epochs=2)
    assert_same(*(fit(make, tokens(6), superpipeline(k=1), ckpt_path=file, max_epochs=2) for file in files))


def with_opaque() -> nn.Module:
    net = Stack()
    net.blocks[1].inner.weight = opaque(torch.randn(32, 16))
    return net


def trainable() -> nn.Module:
    net = partly_quantised().net
    net.blocks[1].inner.weight.requires_grad_(True)
    return net


@pytest.mark.parametrize(
    ("make", "remedy"), [(with_opaque, "Exchange it for a plain parameter"), (trainable, "Freeze it")], ids=["opaque", "trained"]
)  # fmt: skip
def test_others_are_refused_by_name(make: Callable[[], nn.Module], remedy: str) -> None:
    with pytest.raises(
        ValueError, match=rf"'blocks.1.inner.weight' is of class (Opaque|Int8Tensor).*{remedy}.*keep_on_gpu="
    ):
        find_layers(make())
    found = find_layers(make(), keep_on_gpu=["blocks.1.inner.weight"])
    assert [name for name, _ in found.aside] == ["blocks.1.inner"]
    assert any("stays on the GPU whole" in note for note in found.notes)


def test_parts_of_nested_subclasses() -> None:
    plain = torch.ones(3)
    assert list(parts("weight", plain)) == [("weight", plain)]
    weight = partly_quantised().net.blocks[0].inner.weight
    assert [name for name, _ in parts("weight", weight)] == ["weight.qdata", "weight.scale", "weight.zero_point"]
