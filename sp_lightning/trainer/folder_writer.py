"""The writer of torch.distributed.checkpoint, whose files have a number of their checkpoint's own in their names."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint import FileSystemWriter, SavePlan

from sp_lightning.trainer.part_files import cause_of


class Writer(FileSystemWriter):
    """As torch's. What ends a write is raised as it is: torch raises an error about a file's length while handling it.

    Args:
        folder: where the files go.
        number: of this checkpoint, as rank 0 has chosen it: a text that no other one has.
        threads: how many threads write, each to a file of its own.
    """

    def __init__(self, folder: Path, number: str, threads: int) -> None:
        super().__init__(folder, thread_count=threads)
        self._number = number

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        named = super().prepare_global_plan(plans)  # on rank 0, for all
        return [
            replace(plan, storage_data=replace(plan.storage_data, prefix=f"__{rank}_{self._number}_"))
            for rank, plan in enumerate(named)
        ]

    def write_data(self, *arguments: Any, **options: Any) -> Any:
        try:
            return super().write_data(*arguments, **options)
        except RuntimeError as error:
            raise cause_of(error) from None
