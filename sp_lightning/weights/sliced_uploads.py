"""Sliced uploads: of a layer each rank of a node copies its own part from the host, and gets the others' from device to device.

So each byte of a layer crosses one device's link to the host instead of every one's, and host memory is read once instead of
once for each device. It is a matter of time alone: where the ranks do not fetch the same layers in the same order, each copies
the rest of the layer from the host, as without this class.

A gather that not all ranks have announced yet is *on its way*: its slot counts as filled, and whoever uses it waits for the
others first. Gathers are issued in the order of their announcements: whenever the engine comes by, and while it waits for other
ranks, of which one may wait for this gather. While user code runs, which may wait for other ranks as well, a thread sees to it.

Relative to sums of gradients, which are another process group's, that order differs from rank to rank. gloo runs both side by
side. Kernels of NCCL do, too, as long as the device has room for both, but NCCL does not promise it. One order on all ranks would
mean no gathers from a backward's first sum to its end: half of what slices save.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from torch import Tensor

from sp_lightning.device.board import LOOK
from sp_lightning.device.device import Device
from sp_lightning.device.gather_board import AHEAD, LAST, MOST, GatherBoard, gather_board_bytes
from sp_lightning.device.ranks import Ranks
from sp_lightning.device.waits import Stream
from sp_lightning.observe.messages import say_once
from sp_lightning.weights.layer import StreamedLayer
from sp_lightning.weights.uploads import OnItsWay, Uploads

_ALIGNMENT = 512
"""Parts of a layer are multiples of so many bytes."""

_IN_A_ROW, _EVERY = 3, 32
"""After so many rounds in a row in which ranks did not agree, one of so many is tried, which is the same one on all ranks."""

_MOST_ROUNDS = 1 << 20
"""More rounds between two sums of gradients have no gathers."""


class SlicedUploads(Uploads):
    """Copies the layers of the main ring together with the other ranks of the node. All ranks of all nodes make one of these.

    Args:
        device: copies, and says in which order.
        ranks: those who upload.
        lock: the engine's. Whoever calls a method holds it.
        own: whether what a rank uploads of a layer is its own and not everybody's.
        log: for the one line that says that ranks do not agree; None for Lightning's.
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
        self._lock = lock
        self._ranks = ranks
        self._own = own
        self._log = log or logging.getLogger("lightning.pytorch")
        memory = ranks.share(gather_board_bytes(ranks.size), "the board of gathers")
        self._group: Any = ranks.groups.uploads
        self._board = GatherBoard(memory, ranks.rank, ranks.size, ranks.until)
        self._pending: deque[OnItsWay] = deque()
        self._issuing = False
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, name="superpipeline-gathers", daemon=True)
        self._thread.start()
        ranks.meanwhile = self._go_on_meanwhile
        self._open = self._tried = False  # whether this is within a round, and one in which it may gather
        self._sums = self._rounds = 0  # how often the ranks had summed gradients when it began, and rounds since
        self._parted = 0  # rounds in a row in which ranks did not agree

    def send(self, layer: StreamedLayer, target: Tensor, source: Tensor, landed: Callable[[], None]) -> OnItsWay | None:
        part = source.nbytes // self._ranks.size // _ALIGNMENT * _ALIGNMENT
        number = self._announce(layer) if part and layer.planned.ring == self.ring else None
        if number is None:
            self.device.copy((target,), (source,), Stream.UPLOAD)
            return None
        begin, rest = self._ranks.rank * part, self._ranks.size * part
        pieces = [slice(begin, begin + part), slice(rest, source.nbytes)][: 1 + (rest < source.nbytes)]
        self.device.copy([target[each] for each in pieces], [source[each] for each in pieces], Stream.UPLOAD)
        self._pending.append(coming := OnItsWay(number, layer, target, source, part, landed))
        self.go_on()
        return coming if coming in self._pending else None

    def _announce(self, layer: StreamedLayer) -> int | None:
        if not self._open:
            self._begin()
        if len(self._pending) >= AHEAD:
            self.finish(self._pending[0])
        own = MOST - 1 - self._ranks.rank  # under which no other rank announces anything
        return self._board.announce(own if self._own(layer) else layer.index)

    def _begin(self) -> None:
        """Begins a round. Sums of gradients number rounds alike on all ranks, whatever they have done in between."""
        self._open = True
        if self._sums != self._ranks.sums:
            self._sums, self._rounds = self._ranks.sums, 0
        self._rounds += 1
        number = self._sums * _MOST_ROUNDS + self._rounds
        if self._rounds < _MOST_ROUNDS and number < LAST:  # else the last round stays closed
            self._tried = self._parted < _IN_A_ROW or (self._sums + self._rounds) % _EVERY == 0
            self._board.begin(number, patient=self._tried)

    # ------------------------------------------------------------------ the rest of a layer

    def go_on(self) -> None:
        while self._pending and not self._issuing:
            verdict = self._board.verdict(self._pending[0].number)
            if verdict is None:
                return
            self._issue(together=verdict)

    def _look(self) -> None:
        """The thread: what others wait for is done here if the engine does not come by."""
        while not self._over.wait(LOOK):
            self._board.answer()
            try:
                self._go_on_meanwhile()
            except Exception:  # the layers are there, and the engine fails at what the ranks do together next
                return

    def _go_on_meanwhile(self) -> None:
        """As :meth:`go_on`, for whoever may not wait for the engine."""
        if self._pending and self._lock.acquire(blocking=False):
            try:
                self.go_on()
            finally:
                self._lock.release()

    def finish(self, last: OnItsWay | None = None) -> None:
        # The others have announced these, or announce them no more, within the time that they take to answer.
        while self._pending and (last is None or last in self._pending):
            first = self._pending[0]
            try:
                verdict = self._board.wait(first.number)
            except BaseException:
                self._alone()
                raise
            if first in self._pending:  # it was not issued meanwhile
                self._issue(together=verdict)

    def _issue(self, *, together: bool) -> None:
        if not together:
            self._alone()
            return
        coming, size = self._pending[0], self._ranks.size
        gathered = coming.target[: size * coming.part]
        begun = self.device.mark(Stream.UPLOAD)
        self._issuing = True
        try:
            with self.device.on(Stream.UPLOAD):
                self._ranks.gather(gathered, self._group, f"layer {coming.layer.name!r}")
        except BaseException:
            self._alone()  # nobody waits a second time for a rank that does not come: the run ends, which asks for all layers
            raise
        finally:
            self._issuing = False
        self._pending.popleft()
        self.device.access(gathered, Stream.UPLOAD, write=True)
        self.device.note("gather", coming.layer.index, begun, Stream.UPLOAD, gathered.nbytes)
        self.gathered_bytes += gathered.nbytes - coming.part
        coming.landed()

    def _alone(self) -> None:
        """Copies the rest of all layers that are on their way: the others do not bring them, or not in this order."""
        self._board.close_round()
        while self._pending:
            coming = self._pending.popleft()
            begin = self._ranks.rank * coming.part
            pieces = [slice(0, begin), slice(begin + coming.part, self._ranks.size * coming.part)]
            pieces = [each for each in pieces if each.start < each.stop]
            self.device.copy(
                [coming.target[each] for each in pieces], [coming.source[each] for each in pieces], Stream.UPLOAD
            )
            coming.landed()

    def end_round(self) -> None:
        if not self._open:
            return
        self.finish()
        self._open = False
        if self._tried:
            self._parted = self._parted + 1 if self._board.closed else 0
            if self._parted == _IN_A_ROW:
                say_once(self._log, _PARTED)
        self._board.end()

    def close(self) -> None:
        self._pending.clear()
        self._group = None
        self._ranks.meanwhile = lambda: None
        self._board.close()
        self._over.set()


_PARTED = (
    "Superpipeline: the ranks fetch layers in different orders, or at different times; meanwhile each uploads whole layers, as "
    'with transfer="whole".'
)
