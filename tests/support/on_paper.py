"""Which operators this torch runs without values, on its meta device."""

from __future__ import annotations

import pytest
import torch


def _multiplies_by_groups() -> bool:
    try:
        torch._grouped_mm(
            torch.empty(8, 16, device="meta"),
            torch.empty(2, 16, 16, device="meta"),
            offs=torch.empty(2, dtype=torch.int32, device="meta"),
        )
    except RuntimeError:
        return False
    return True


on_paper = pytest.mark.skipif(
    not _multiplies_by_groups(), reason="aten::_grouped_mm takes no float32 on paper (meta) before torch 2.15"
)
"""For tests of models with stacked experts in float32."""
