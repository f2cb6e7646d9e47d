"""Sharded uploads: each rank of a node uploads its own part of a layer, and gets the other parts from the other devices.

The second half is a *gather*. So each byte crosses PCIe once instead of once per device, and host memory is read once. Results do
not change. If the ranks do not fetch the same layers in the same order, each rank copies the rest of the layer from host memory.

A collective in which one rank takes no part hangs, and one that another rank enters with another layer mixes them silently. The
order in which ranks fetch layers depends on the batch's path and on timing. So each rank *announces* a gather in the
:class:`~sp_lightning.ranks.gather_log.GatherLog` before it takes part, and gathers are issued in the order of announcements:
whenever the engine calls ``go_on``, and while it waits for other ranks, one of which may wait for this gather. While user code
runs, which may wait for other ranks as well, a thread does it.

Sums of gradients use another process group, and their order relative to gathers differs from rank to rank. gloo runs both at the
same time. NCCL's kernels do as well, as long as the device has room for both, but NCCL does not promise it. One order on all
ranks would mean no gathers from a backward's first sum to its end: half of what sharded uploads save.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from sp_lightning.device.device import Device, Stream
from sp_lightning.layers.layer import PendingUpload, StreamedLayer
from sp_lightning.layers.uploads import Uploads
from sp_lightning.observe.messages import say_once
from sp_lightning.ranks.gather_log import AHEAD, GatherLog, gather_log_bytes
from sp_lightning.ranks.news import LOST
from sp_lightning.ranks.ranks import Ranks


@dataclass(eq=False)
class PendingGather(PendingUpload):
    """A layer of which this rank has sent its own part to the slot. The other parts come from the other ranks.

    Attributes:
        number: the number of its gather in the round.
        target: its slot's memory, flat ``uint8``.
        source: its bytes in host memory.
        part: bytes of each rank's part. The bytes behind the last part were sent by this rank.
        landed: called once the rest was issued.
    """

    number: int
    target: Tensor
    source: Tensor
    part: int
    landed: Callable[[], None]


class SlicedUploads(Uploads):
    """Uploads the layers of the main ring together with the other ranks of the node. All ranks of all nodes make one of these.

    Args:
        device: issues the copies.
        ranks: the ranks.
        lock: the engine's lock. The caller holds it, except for :meth:`close`.
        own: returns True if a rank uploads its private values of a layer.
        log: the logger for a line that ranks do not agree; None for Lightning's.
    """

    def __init__(
        self,
        device: Device,
        ranks: Ranks,
        lock: threading.RLock,
        own: Callable[[StreamedLayer], bool],
        log: logging.Logger | None,
    ) -> None:
        super().__init__(device)
        self.pending: deque[PendingGather] = deque()
        self._lock = lock
        self._ranks = ranks
        self._own = own
        self._log = log or logging.getLogger("lightning.pytorch")
        memory = ranks.share(gather_log_bytes(ranks.size), "the log of gathers")
        self._group: Any = ranks.uploads
        self._gathers = GatherLog(memory, ranks.rank, ranks.size, ranks.until, ranks.status.wait_until)
        self._issuing = False
        self._over = threading.Event()
        threading.Thread(target=self._look, name="superpipeline-gathers", daemon=True).start()
        ranks.meanwhile = self._go_on_meanwhile
        self._in_round = False
        self._tried = False  # whether gathers are tried in this round
        self._sums = 0  # the number of backwards before this round
        self._rounds = 0  # rounds since that backward
        self._disagreed = 0  # consecutive rounds in which ranks did not agree

    def send(
        self, layer: StreamedLayer, target: Tensor, source: Tensor, landed: Callable[[], None]
    ) -> PendingUpload | None:
        part = source.nbytes // self._ranks.size // _ALIGNMENT * _ALIGNMENT
        number = self._announce(layer) if part and layer.planned.ring == self.ring else None
        if number is None:
            return super().send(layer, target, source, landed)
        begin, rest = self._ranks.rank * part, self._ranks.size * part
        self._copy(target, source, (begin, begin + part), (rest, source.nbytes))
        self.pending.append(coming := PendingGather(layer, number, target, source, part, landed))
        self.go_on()
        return coming if coming in self.pending else None

    def _copy(self, target: Tensor, source: Tensor, *parts: tuple[int, int]) -> None:
        pieces = [slice(begin, end) for begin, end in parts if begin < end]
        self.device.copy([target[each] for each in pieces], [source[each] for each in pieces], Stream.UPLOAD)

    def _announce(self, layer: StreamedLayer) -> int | None:
        if not self._in_round:
            self._begin()
        if len(self.pending) >= AHEAD:
            self.finish(self.pending[0])
        # No other rank announces a private layer by the same number.
        return self._gathers.announce(-1 - self._ranks.rank if self._own(layer) else layer.index)

    def _begin(self) -> None:
        """Begins a round. Its number is the same on all ranks, because it counts from the last sum of gradients."""
        self._in_round = True
        if self._sums != self._ranks.sums:
            self._sums = self._ranks.sums
            self._rounds = 0
        self._rounds += 1
        self._tried = self._disagreed < _IN_A_ROW or (self._sums + self._rounds) % _EVERY == 0
        self._gathers.begin(self._sums << 32 | self._rounds, patient=self._tried)

    # ------------------------------------------------------------------ the rest of a pending upload

    def go_on(self, using: StreamedLayer | None = None) -> None:
        while self.pending and not self._issuing:
            verdict = self._gathers.verdict(self.pending[0].number)
            if verdict is None:
                return
            self._issue(together=verdict)

    def _look(self) -> None:
        """The thread: issues gathers that other ranks wait for while the engine does not call :meth:`go_on`."""
        while not self._over.wait(0.05):
            try:
                self._go_on_meanwhile()
            except Exception:  # the engine raises it at the next collective
                return

    def _go_on_meanwhile(self) -> None:
        """Calls :meth:`go_on` unless the engine holds the lock."""
        if self.pending and self._lock.acquire(blocking=False):
            try:
                self.go_on()
            finally:
                self._lock.release()

    def finish(self, last: PendingUpload | None = None) -> None:
        while self.pending and (last is None or last in self.pending):
            first = self.pending[0]
            try:
                verdict = self._gathers.wait(first.number)
            except BaseException:
                self._alone()
                raise
            if first in self.pending:  # the wait has not issued it
                self._issue(together=verdict)

    def _issue(self, *, together: bool) -> None:
        if not together:
            self._alone()
            return
        coming = self.pending[0]
        gathered = coming.target[: self._ranks.size * coming.part]
        begun = self.device.mark(Stream.UPLOAD)
        self._issuing = True
        try:
            with self.device.on(Stream.UPLOAD):
                self._ranks.gather(gathered, self._group, f"layer {coming.layer.name!r}")
        except BaseException:
            self._alone()  # do not wait again for a rank that does not come: the end of the run finishes all uploads
            raise
        finally:
            self._issuing = False
        self.pending.popleft()
        self.device.access(gathered, Stream.UPLOAD, write=True)
        self.device.note("gather", coming.layer.index, begun, Stream.UPLOAD, gathered.nbytes)
        self.gathered_bytes += gathered.nbytes - coming.part
        coming.landed()

    def _alone(self) -> None:
        """Copies the rest of all pending layers from host memory, because the ranks do not gather them in this order."""
        self._gathers.close_round()
        while self.pending:
            coming = self.pending.popleft()
            begin, last = self._ranks.rank * coming.part, self._ranks.size * coming.part
            self._copy(coming.target, coming.source, (0, begin), (begin + coming.part, last))
            coming.landed()

    def end_round(self, *, after_error: bool = False) -> None:
        try:
            self._end_round()
        except LOST:
            if not after_error:
                raise

    def _end_round(self) -> None:
        if not self._in_round:
            return
        self.finish()
        self._in_round = False
        if self._tried:
            self._disagreed = self._disagreed + 1 if self._gathers.disagreed else 0
            if self._disagreed == _IN_A_ROW:
                say_once(self._log, _PARTED)
        self._gathers.end()

    def close(self) -> None:
        self._over.set()
        with self._lock:
            self.pending.clear()
            self._group = None
            self._ranks.meanwhile = lambda: None
            self._gathers.close()


_ALIGNMENT = 512
"""Bytes of which each part of a layer is a multiple."""

_IN_A_ROW, _EVERY = 3, 32
"""After ``_IN_A_ROW`` consecutive rounds without agreement, gathers are tried in every ``_EVERY``-th round on all ranks."""

_PARTED = (
    "Superpipeline: the ranks fetch layers in different orders, or at different times; meanwhile each uploads whole layers, as "
    'with transfer="full".'
)
