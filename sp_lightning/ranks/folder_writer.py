"""torch.distributed.checkpoint's writer, with file names that are unique to the checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint import FileSystemWriter, Metadata, SavePlan
from torch.distributed.checkpoint.storage import WriteResult

from sp_lightning.trainer.part_files import cause_of


class Writer(FileSystemWriter):
    """Writes files as torch's writer does. A failed write raises its cause instead of torch's error about the file's length.

    Args:
        folder: the folder for the files.
        number: a text that is unique to the checkpoint. Rank 0's counts.
        threads: the number of threads that write, each to its own file.

    Attributes:
        stored: the place of each tensor by name, on rank 0 once all ranks have written.
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
        # torch 2.10 and 2.11 write this only to a copy of the metadata.
        self.stored = {each.index.fqn: each.storage_data for written in results for each in written}

    def write_data(self, *arguments: Any, **options: Any) -> Any:
        try:
            return super().write_data(*arguments, **options)
        except RuntimeError as error:
            raise cause_of(error) from None
