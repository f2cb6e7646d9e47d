"""Pages of memory, and tensors without memory, which stand where a tensor is away."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from sp_lightning.core.device import layout
from sp_lightning.core.device.layout import absent

READS: dict[str, Callable[[Tensor], Any]] = {
    "an operator": lambda w: w + 1,
    "a view": lambda w: w[0].mul(2),
    "a write": lambda w: w.zero_(),
    "a copy": lambda w: torch.empty(2, 3).copy_(w),
    "vmap": torch.vmap(lambda w: w + 1),
    "the address": lambda w: w.data_ptr(),
}


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
def test_a_tensor_without_memory_says_why_when_it_is_read(read: str, dtype: torch.dtype) -> None:
    made = absent(torch.ones(3, 2, dtype=dtype).t(), torch.device("cpu"), "It is elsewhere.")
    assert (made.shape, made.stride(), made.dtype) == ((2, 3), (1, 2), dtype)
    parameter = nn.Parameter(torch.ones(2, 3, dtype=dtype), requires_grad=False)
    parameter.data = made
    with pytest.raises(RuntimeError, match="It is elsewhere"):
        READS[read](parameter)
    parameter.data = torch.ones(2, 3, dtype=dtype)
    assert parameter.sum() == 6, "with memory again it is an ordinary one"


def test_an_empty_tensor_needs_no_memory() -> None:
    made = absent(torch.ones(0, 3), torch.device("cpu"), "It is elsewhere.")
    assert made.shape == (0, 3)


def test_pages_are_those_of_the_system() -> None:
    """Some ARM systems (Grace) have pages of 64 KiB, which were taken for pages of 4 KiB."""
    with mock.patch("mmap.PAGESIZE", 2**16):
        there = runpy.run_path(str(layout.__file__))
    assert [there["whole_pages"](nbytes) for nbytes in (0, 5000, 2**16 + 1)] == [2**16, 2**16, 2**17]
