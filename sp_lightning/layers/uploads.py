"""Uploads: how a layer's bytes come from the host into a slot.

``Uploads`` copies whole layers. With ``SlicedUploads`` each rank of a node copies its own part of a layer from the host, and
gets the others' from device to device (a *gather*). So each byte crosses one device's link to the host instead of every one's,
and host memory is read once. It is a matter of time alone: where the ranks do not fetch the same layers in the same order, each
copies the rest of the layer from the host.

A collective in which one rank takes no part hangs, and one that another rank meets with another layer mixes them silently. Ranks
fetch layers in an order that depends on the batch's path and on timing. So each *announces* a gather in the ``GatherLog`` before
it takes part. Gathers are issued in that order: whenever the engine comes by, and while it waits for other ranks, of which one
may wait for this gather. While user code runs, which may wait for other ranks as well, a thread does it.

Relative to sums of gradients, which are another process group's, that order differs from rank to rank. gloo runs both side by
side. Kernels of NCCL do, too, as long as the device has room for both, but NCCL does not promise it. One order on all ranks would
mean no gathers from a backward's first sum to its end: half of what slices save.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from time import monotonic
from typing import Any

from torch import Tensor

from sp_lightning.device.device import Device, Stream
from sp_lightning.layers.layer import PendingGather, StreamedLayer
from sp_lightning.observe.messages import say_once
from sp_lightning.ranks.board import LOOK
from sp_lightning.ranks.ranks import Ranks
from sp_lightning.ranks.shared_memory import SharedMemory


class Uploads:
    """Copies whole layers.

    Args:
        device: copies them.

    Attributes:
        ring: the index of the ring that most bytes pass through.
        gathered_bytes: bytes that came from other devices.
        pending: the layers that are on their way.
    """

    def __init__(self, device: Device) -> None:
        self.device = device
        self.ring = 0
        self.gathered_bytes = 0
        self.pending: deque[PendingGather] = deque()

    def send(
        self, layer: StreamedLayer, target: Tensor, source: Tensor, landed: Callable[[], None]
    ) -> PendingGather | None:
        """Begins the upload of a layer. The upload stream waits already for what was in the slot, and for the layer's bytes.

        Args:
            layer: the layer.
            target: its slot's memory, flat ``uint8``.
            source: its bytes on the host, of the same size.
            landed: is called once all was issued to the upload stream, if that is later than now.

        Returns:
            The layer on its way; None if all was issued.
        """
        self.device.copy((target,), (source,), Stream.UPLOAD)
        return None

    def go_on(self, using: StreamedLayer | None = None) -> None:
        """Issues what can be issued by now of the layers on their way.

        Args:
            using: the layer that compute comes to; None if it comes to none.
        """

    def finish(self, last: PendingGather | None = None) -> None:
        """Issues all layers up to this one, or all that are on their way. A rank that has failed is a ``RankError``."""

    def end_round(self) -> None:
        """Issues all that are on their way: what comes next may be other weights. The errors are those of :meth:`finish`."""

    def close(self) -> None:
        """Nothing is sent any more."""


class SlicedUploads(Uploads):
    """Copies the layers of the main ring together with the other ranks of the node. All ranks of all nodes make one of these.

    Args:
        device: copies, and says in which order.
        ranks: those who upload.
        lock: the engine's. The caller of a method holds it, but for :meth:`close`.
        own: whether what a rank uploads of a layer is its own and not that of all ranks.
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
        memory = ranks.share(gather_log_bytes(ranks.size), "the log of gathers")
        self._group: Any = ranks.uploads
        self._gathers = GatherLog(memory, ranks.rank, ranks.size, ranks.until, ranks.board.until)
        self._issuing = False
        self._over = threading.Event()
        threading.Thread(target=self._look, name="superpipeline-gathers", daemon=True).start()
        ranks.meanwhile = self._go_on_meanwhile
        self._in_round = self._tried = False  # whether this is within a round, and one in which it may gather
        self._sums = self._rounds = 0  # how often the ranks had summed gradients when it began, and rounds since
        self._parted = 0  # rounds in a row in which ranks did not agree

    def send(
        self, layer: StreamedLayer, target: Tensor, source: Tensor, landed: Callable[[], None]
    ) -> PendingGather | None:
        part = source.nbytes // self._ranks.size // _ALIGNMENT * _ALIGNMENT
        number = self._announce(layer) if part and layer.planned.ring == self.ring else None
        if number is None:
            return super().send(layer, target, source, landed)
        begin, rest = self._ranks.rank * part, self._ranks.size * part
        self._copy(target, source, (begin, begin + part), (rest, source.nbytes))
        self.pending.append(coming := PendingGather(number, layer, target, source, part, landed))
        self.go_on()
        return coming if coming in self.pending else None

    def _copy(self, target: Tensor, source: Tensor, *parts: tuple[int, int]) -> None:
        pieces = [slice(begin, end) for begin, end in parts if begin < end]
        self.device.copy([target[each] for each in pieces], [source[each] for each in pieces], Stream.UPLOAD)

    def _announce(self, layer: StreamedLayer) -> int | None:
        if not self._in_round:
            self._begin()
        if len(self.pending) >= _AHEAD:
            self.finish(self.pending[0])
        # What is this rank's own no other one announces by the same number.
        return self._gathers.announce(-1 - self._ranks.rank if self._own(layer) else layer.index)

    def _begin(self) -> None:
        """Begins a round. Sums of gradients number rounds alike on all ranks, whatever they have done in between."""
        self._in_round = True
        if self._sums != self._ranks.sums:
            self._sums, self._rounds = self._ranks.sums, 0
        self._rounds += 1
        self._tried = self._parted < _IN_A_ROW or (self._sums + self._rounds) % _EVERY == 0
        self._gathers.begin(self._sums << 32 | self._rounds, patient=self._tried)

    # ------------------------------------------------------------------ the rest of a layer

    def go_on(self, using: StreamedLayer | None = None) -> None:
        while self.pending and not self._issuing:
            verdict = self._gathers.verdict(self.pending[0].number)
            if verdict is None:
                return
            self._issue(together=verdict)

    def _look(self) -> None:
        """The thread: what others wait for is done here if the engine does not come by."""
        while not self._over.wait(LOOK):
            try:
                self._go_on_meanwhile()
            except Exception:  # the layers are there, and the engine fails at what the ranks do together next
                return

    def _go_on_meanwhile(self) -> None:
        """As :meth:`go_on`, for a caller that may not wait for the engine."""
        if self.pending and self._lock.acquire(blocking=False):
            try:
                self.go_on()
            finally:
                self._lock.release()

    def finish(self, last: PendingGather | None = None) -> None:
        while self.pending and (last is None or last in self.pending):
            first = self.pending[0]
            try:
                verdict = self._gathers.wait(first.number)
            except BaseException:
                self._alone()
                raise
            if first in self.pending:  # it was not issued meanwhile
                self._issue(together=verdict)

    def _issue(self, *, together: bool) -> None:
        if not together:
            self._alone()
            return
        coming, size = self.pending[0], self._ranks.size
        gathered = coming.target[: size * coming.part]
        begun = self.device.mark(Stream.UPLOAD)
        self._issuing = True
        try:
            with self.device.on(Stream.UPLOAD):
                self._ranks.gather(gathered, self._group, f"layer {coming.layer.name!r}")
        except BaseException:
            self._alone()  # a rank that does not come is waited for once: the run ends, which asks for all layers
            raise
        finally:
            self._issuing = False
        self.pending.popleft()
        self.device.access(gathered, Stream.UPLOAD, write=True)
        self.device.note("gather", coming.layer.index, begun, Stream.UPLOAD, gathered.nbytes)
        self.gathered_bytes += gathered.nbytes - coming.part
        coming.landed()

    def _alone(self) -> None:
        """Copies the rest of all layers that are on their way: the others do not bring them, or not in this order."""
        self._gathers.close_round()
        while self.pending:
            coming = self.pending.popleft()
            begin, last = self._ranks.rank * coming.part, self._ranks.size * coming.part
            self._copy(coming.target, coming.source, (0, begin), (begin + coming.part, last))
            coming.landed()

    def end_round(self) -> None:
        if not self._in_round:
            return
        self.finish()
        self._in_round = False
        if self._tried:
            self._parted = self._parted + 1 if self._gathers.parted else 0
            if self._parted == _IN_A_ROW:
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
"""Parts of a layer are multiples of so many bytes."""

_IN_A_ROW, _EVERY = 3, 32
"""After so many rounds in a row in which ranks did not agree, one of so many is tried, which is the same one on all ranks."""

_PARTED = (
    "Superpipeline: the ranks fetch layers in different orders, or at different times; meanwhile each uploads whole layers, as "
    'with transfer="full".'
)

# ---------------------------------------------------------------------- what the ranks of a node agree on

_ROUND, _CLOSED, _RANKS = range(3)
_KEPT, _AHEAD = 256, 200
"""So many announcements are in the log. A rank has at most so many that others have not made: fewer than are kept."""

PATIENCE = 0.2
"""Seconds that a rank waits for another's announcement before it closes the round."""


def gather_log_bytes(size: int) -> int:
    """Returns how much memory the log takes of so many ranks."""
    return 8 * (_RANKS + 2 * size + _KEPT)


Until = Callable[[Callable[[], bool], str], None]


class GatherLog:
    """The gathers of one round, in the order in which all ranks announce them. A round is a step of the model.

    A gather takes place once all ranks have announced it. A rank that announces another one, has waited too long, or announces
    no more *closes* the round: nothing more is announced in it. So what takes place is the same on all ranks, whenever they look.

    Args:
        memory: of :func:`gather_log_bytes`, which all ranks of the node have, full of zeros.
        rank: this process's number on its node.
        size: how many ranks the node has.
        until: waits for something that other ranks bring about, as :meth:`sp_lightning.ranks.ranks.Ranks.until`.
        until_free: waits for the lock of the log, which may not issue gathers meanwhile: that asks the log.

    Attributes:
        parted: whether ranks have not agreed in this round, as far as this rank has seen.
    """

    def __init__(self, memory: SharedMemory, rank: int, size: int, until: Until, until_free: Until) -> None:
        self._locked = partial(memory.locked, until_free)
        self._words: Any = memory.words("q")
        self._active = _RANKS + rank  # whether the rank has gathers of the round that it may not have resolved
        self._count = _RANKS + size + rank  # how many it has announced
        self._all_active = slice(_RANKS, _RANKS + size)
        self._counts = slice(_RANKS + size, _RANKS + 2 * size)
        self._log = _RANKS + 2 * size
        self._until = until
        self._number = 0
        self.parted = False

    def begin(self, number: int, *, patient: bool = True) -> None:
        """Begins a round, or closes it if some rank has not resolved all gathers of one before.

        Args:
            number: a larger one than those before. All ranks number their rounds alike, or make no gathers in them.
            patient: whether to wait some time for those ranks. Otherwise the round is closed at once.
        """
        self._number, self.parted = number, False
        if patient:
            late = monotonic() + PATIENCE
            self._until(lambda: self._join() or monotonic() > late, "the end of the others' last round of gathers")
        if not self._words[self._active]:
            self.close_round()

    def _join(self) -> bool:
        words = self._words
        with self._locked():
            if words[_CLOSED] >= self._number:
                return True
            if words[_ROUND] < self._number and not any(words[self._all_active]):
                words[_ROUND] = self._number
                for count in range(self._counts.start, self._counts.stop):
                    words[count] = 0
            words[self._active] = words[_ROUND] == self._number
            return bool(words[self._active])

    def announce(self, what: int) -> int | None:
        """Announces this rank's next gather.

        Args:
            what: a number under which no rank announces anything else.

        Returns:
            Its number in this round; None if it does not take place.
        """
        words = self._words
        with self._locked():
            number, others = words[self._count], max(words[self._counts])
            place = self._log + number % _KEPT
            if words[_CLOSED] < self._number:
                if number == others:  # the first rank that comes to this gather
                    words[place] = what
                if words[place] == what:
                    words[self._count] = number + 1
                    return int(number)
                words[_CLOSED] = self._number
        self.parted = True
        return None

    def verdict(self, number: int) -> bool | None:
        """Returns whether a gather that this rank has announced in this round takes place; None if it cannot be told yet."""
        with self._locked():
            if number < min(self._words[self._counts]):
                return True
            return False if self._words[_CLOSED] >= self._number else None

    def wait(self, number: int) -> bool:
        """Waits for the :meth:`verdict`, for some time, and returns it."""
        late = monotonic() + PATIENCE
        there = "a layer that all devices fetch together"
        self._until(lambda: self.verdict(number) is not None or monotonic() > late, there)
        if self.verdict(number) is None:
            self.close_round()
        return bool(self.verdict(number))

    def close_round(self) -> None:
        """Has no rank announce more in this round, because they do not agree."""
        self.parted = True
        self._close(self._number)

    def end(self) -> None:
        """Ends the round, all of whose gathers are resolved here."""
        self._close(self._number)
        self._words[self._active] = 0

    def close(self) -> None:
        """Has no rank announce more in any round."""
        self._close((1 << 63) - 1)

    def _close(self, number: int) -> None:
        with self._locked():
            self._words[_CLOSED] = max(self._words[_CLOSED], number)
