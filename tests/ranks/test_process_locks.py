"""Processes that end are noticed, although their forked children live on."""

from __future__ import annotations

import os
import signal
import struct
from time import sleep

from sp_lightning.core.device.layout import PAGE
from sp_lightning.core.device.pages import create
from sp_lightning.experimental.ranks.process_locks import ProcessLocks


def test_a_process_that_has_ended_is_noticed_although_its_worker_lives() -> None:
    descriptor = create(PAGE, "locks")
    locks = ProcessLocks(descriptor, 0, 2)
    ready, tells = os.pipe()
    other = os.fork()
    if not other:
        ProcessLocks(descriptor, 1, 2)
        worker = os.fork()  # it keeps all descriptors of its parent
        if worker:
            os.write(tells, struct.pack("q", worker))
        sleep(60)
        os._exit(0)
    (worker,) = struct.unpack("q", os.read(ready, 8))
    assert locks.ended() is None
    os.kill(other, signal.SIGKILL)
    os.waitpid(other, 0)
    assert locks.ended() == 1
    os.kill(worker, signal.SIGKILL)
    locks.close()
