"""Settings of torch that only private names read and write as they are: :mod:`sp_lightning.core.torch_compat.private` has
them."""

from __future__ import annotations

import torch

from sp_lightning.core.torch_compat import private as torch_private
from tests.support.precisions import restored_precisions


def test_float32_precisions_are_read_as_they_were_set() -> None:
    """By old and by new names. Nothing raises where both were used."""
    read, backends = torch_private.float32_precisions, torch.backends
    before = read()
    with restored_precisions():
        backends.fp32_precision = "tf32"
        assert backends.cuda.matmul.fp32_precision == "tf32"
        assert read()["torch.backends.fp32_precision"] == "tf32" != before["torch.backends.fp32_precision"]
        torch.set_float32_matmul_precision("medium")
        backends.cuda.matmul.fp32_precision = "tf32"
        assert read() != before
    legacy = backends.cudnn.allow_tf32
    with restored_precisions():
        backends.cudnn.allow_tf32 = not legacy
        assert read() != before
        backends.cudnn.allow_tf32 = legacy
    assert read() == before


def test_attention_order() -> None:
    before = torch_private.attention_order()
    with torch.nn.attention.sdpa_kernel([torch.nn.attention.SDPBackend.MATH], set_priority=True):
        assert torch_private.attention_order()[0] == torch.nn.attention.SDPBackend.MATH.value != before[0]
    assert torch_private.attention_order() == before
