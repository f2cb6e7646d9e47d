"""Timelines of some training batches, and the files they go to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sp_lightning.device.timeline import Interval, Timeline, chrome_trace
from sp_lightning.observe.plot import draw_timeline, supported_formats
from sp_lightning.trainer.partner import Partner


class Recording:
    """Records every so many training batches of a run, and writes them when the run ends; of several ranks rank 0 does.

    Args:
        timeline: file for a Chrome trace of all batches that were recorded; None for none.
        plot: file for a picture of the last one; None for none.
        every: how many training batches pass from one that is recorded to the next. The first of all is not recorded:
            kernels and caches are made in it.

    Raises:
        ValueError: a file's name is that of a folder, or does not end as a picture's does.
        ImportError: pictures need matplotlib.

    Attributes:
        batches: the intervals of each batch that was recorded, by the batch's number.
    """

    def __init__(self, timeline: str | Path | None, plot: str | Path | None, every: int) -> None:
        self._timeline = _checked_file("timeline", timeline)
        self._plot = _checked_file("plot", plot)
        self._every = every
        self._records = False
        self._seen = 0
        self._running: int | None = None  # the batch that is being recorded
        self._intervals: Timeline | None = None
        self.batches: dict[int, list[Interval]] = {}
        if self._plot is not None:
            formats = supported_formats()
            if self._plot.suffix[1:] not in formats:
                raise ValueError(
                    f"plot={str(plot)!r} must end in one of {sorted(formats)}. For example plot='run.png'."
                )

    def __getstate__(self) -> dict[str, Any]:
        """Leaves out the device's events."""
        return {**vars(self), "_intervals": None}

    @property
    def _files(self) -> list[Path]:
        return [file for file in (self._timeline, self._plot) if file is not None]

    def reset(self, *, training: bool) -> None:
        """A run begins.

        Args:
            training: whether there will be batches to record, by this rank. The files are tried before any work is done.

        Raises:
            OSError: a file cannot be written.
        """
        self._records = training
        for file in self._files if training else ():
            file.parent.mkdir(parents=True, exist_ok=True)
            file.open("ab").close()
        self._seen = 0
        self._running = self._intervals = None
        self.batches.clear()

    def batch_starts(self, partner: Partner) -> None:
        """A training batch begins."""
        if not (self._files and self._records):
            return
        self.stop(partner)
        self._seen += 1
        if self._seen > 1 and (self._seen - 2) % self._every == 0:
            self._running = self._seen - 1
            self._intervals = self._intervals or partner.make_timeline()
            partner.record(self._intervals, on=True)

    def stop(self, partner: Partner) -> None:
        """What follows belongs to no batch, or to the next one."""
        if self._intervals is None:
            return
        partner.record(self._intervals, on=False)
        if self._running is not None:
            if self._timeline is None:  # the picture shows the last batch only
                self.batches.clear()
            self.batches.setdefault(self._running, [])
            self._running = None
        if self.batches:
            # An interval that had not ended at the last stop belongs to the batch that was recorded last.
            self.batches[max(self.batches)] += self._intervals.take()

    def write(self, partner: Partner) -> None:
        """Writes the files. Checkpoints, and the error that ended a run, must not be lost because a disk is full."""
        self.stop(partner)
        try:
            if self.batches:
                self._write_files(partner)
        except Exception:
            partner.log.exception("Superpipeline: the timeline could not be written.")

    def _write_files(self, partner: Partner) -> None:
        plan = partner.plan
        masters = (f"{layer.name}, float32" for layer in plan.masters)
        rows = [*(layer.name for layer in plan.layers), *masters, *(table.name for table in plan.tables)]
        if self._timeline is not None:
            process = None if plan.alone else f"rank 0 of {plan.ranks * plan.nodes}"
            self._timeline.write_text(json.dumps(chrome_trace(self.batches, rows, process)))
            partner.log.info(
                "Superpipeline: %d batches are in %s; open it in https://ui.perfetto.dev.",
                len(self.batches),
                self._timeline,
            )
        if self._plot is not None:
            last = max(self.batches)
            title = f"Training batch {last}, k = {plan.k}, k' = {plan.k_prime}"
            title += f", rank 0 of {plan.ranks * plan.nodes}" * (not plan.alone)
            draw_timeline(self.batches[last], rows, self._plot, title)
        self.batches.clear()

    def close(self) -> None:
        """The run is over: files that nothing was written to go."""
        self._intervals = None
        for file in self._files if self._records else ():
            if file.is_file() and not file.stat().st_size:
                file.unlink()


def _checked_file(option: str, path: str | Path | None) -> Path | None:
    if path is None:
        return None
    file = Path(path)
    if file.is_dir():
        raise ValueError(f"{option}={str(path)!r} is a folder; name a file in it.")
    return file
