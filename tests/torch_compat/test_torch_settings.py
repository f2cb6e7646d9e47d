"""Settings of torch that only private names read and write as they are: :mod:`sp_lightning.core.torch_compat.private` has
them."""

from __future__ import annotations

import pytest
import torch

from sp_lightning.core.torch_compat import private as torch_private


def test_float32_precisions_are_read_as_they_were_set() -> None:
    """What is inherited is no value of its own, and nothing raises where old and new names were used."""
    read, write, backends = torch_private.float32_precisions, torch_private.set_float32_precisions, torch.backends
    before = read()
    try:
        backends.fp32_precision = "tf32"
        assert backends.cuda.matmul.fp32_precision == "tf32"
        assert read() == (*before[:2], "tf32", *before[3:])
        for at in range(9):  # what a backend has, its operations inherit
            only = (*before[:2], *("ieee" if each == at else "none" for each in range(9)))
            write(only)
            assert read() == only
        write(before)
        backends.cudnn.allow_tf32 = False
        torch.set_float32_matmul_precision("highest")
        backends.cuda.matmul.fp32_precision = "tf32"
        with pytest.raises(RuntimeError, match="mix of the legacy and new"):
            torch.get_float32_matmul_precision()
        mixed = read()
        assert mixed[:2] == ("highest", False)
        write(before)
        assert read() == before
        write(mixed)
        assert read() == mixed
    finally:
        write(before)
    assert backends.cudnn.allow_tf32 == before[1]
    assert torch.get_float32_matmul_precision() == before[0]


def test_attention_order() -> None:
    before = torch_private.attention_order()
    with torch.nn.attention.sdpa_kernel([torch.nn.attention.SDPBackend.MATH], set_priority=True):
        inside = torch_private.attention_order()
    assert inside[0] == torch.nn.attention.SDPBackend.MATH.value != before[0]
    torch_private.set_attention_order(inside)
    assert torch_private.attention_order() == inside
    torch_private.set_attention_order(before)
    assert torch_private.attention_order() == before
