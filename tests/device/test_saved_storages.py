"""``torch.save`` with other bytes than those of the storages that it is given."""

from __future__ import annotations

import io
from typing import Any

import torch

from sp_lightning.core.torch_compat import private as torch_private


def test_what_is_written_for_a_storage_can_be_another_one() -> None:
    content = {"one": torch.ones(3), "two": torch.zeros(2)}
    torch.save(content, theirs := io.BytesIO())
    torch_private.save_by_way_of(lambda storage: storage, content, ours := io.BytesIO())
    assert ours.getvalue() == theirs.getvalue()
    asked: list[Any] = []
    other = torch.full((3,), 7.0).untyped_storage()

    def notes(storage: Any) -> Any:
        asked.append(storage)
        return other

    torch_private.save_by_way_of(notes, content, ours := io.BytesIO())
    ours.seek(0)
    assert {name: value.tolist() for name, value in torch.load(ours).items()} == {"one": [7.0] * 3, "two": [7.0] * 2}
    assert [storage.nbytes() for storage in asked] == [12, 8]
