"""The writer of torch.distributed.checkpoint, whose files have a number of their checkpoint's own in their names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint import FileSystemWriter, Metadata, SavePlan
from torch.distributed.checkpoint.storage import WriteResult

from sp_lightning.trainer.part_files import cause_of


class Writer(FileSystemWriter):
    """As torch's. What ends a write is raised as it is: torch raises an error about a file's length while handling it.

    Args:
        folder: where the files go.
        number: of this checkpoint, as rank 0 has chosen it: a text that no other one has.
        threads: how many threads write, each to a file of its own.

    Attributes:
        stored: where each tensor is, by its name: on rank 0, once all have written.
    """

    stored: Mapping[str, Any]

    def __init__(self, folder: Path, number: str, threads: int) -> None:
        super().__init__(folder, thread_count=threads)
        self._number = number

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        named = super().prepare_global_plan(plans)  # on rank 0, for all
        return [
            replace(plan, storage_data=replace(plan.storage_data, prefix=f"__{rank}_{self._number}_"))
            for rank, plan in enumerate(named)
        ]

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        super().finish(metadata, results)
        # torch 2.10 and 2.11 note this in a copy of the metadata, which is the file's alone.
        self.stored = {each.index.fqn: each.storage_data for written in results for each in written}

    def write_data(self, *arguments: Any, **options: Any) -> Any:
        try:
            return super().write_data(*arguments, **options)
        except RuntimeError as error:
            raise cause_of(error) from None
