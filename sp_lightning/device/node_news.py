"""The news of nodes: what the primary of each node has said on its board is brought to the boards of the others.

Shared memory ends at a node. So a thread of each primary writes the primary's part of its board to the store at which the
processes of all nodes have met, and copies what the others have written there. Nobody waits for it, and no result depends on
it: it says where another node is, that it has failed and how, or that nothing is heard of it any more.
"""

from __future__ import annotations

import os
from datetime import timedelta
from threading import Event, Lock, Thread
from time import sleep
from typing import Any

import torch.distributed as dist

from sp_lightning.device.board import Board


class NodeNews:
    """What one primary tells those of the other nodes, and hears of them.

    Args:
        board: of this node.
        node: this node's number.
        nodes: how many nodes there are.
        name: under which the nodes find each other's news. It is the same on all of them and no other's.

    Attributes:
        pause: seconds between two looks. The store is one process's, and each node asks it for what all others say.
    """

    def __init__(self, board: Board, node: int, nodes: int, name: str) -> None:
        self._board = board
        self._node = node
        self._keys = {each: f"superpipeline/{name}/{each}" for each in range(nodes)}
        self.pause = 0.1 * max(1, nodes // 4)
        self._lock = Lock()
        self._over = Event()
        self._thread: Thread | None = None
        # A connection of its own: what waits on the process group's does not hold up the news.
        where = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store: Any = dist.TCPStore(*where, is_master=False, wait_for_workers=False, timeout=_PATIENCE)
        self._store: Any = store
        self._store.set(self._keys[node], board.tell())

    def begin(self) -> None:
        """Begins to tell and to hear. All nodes have told something before."""
        self.end()
        self._over.clear()
        self._exchange()
        self._thread = Thread(target=self._run, name="superpipeline-nodes", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Tells the others the last news, and ends the thread."""
        self._over.set()
        if self._thread is not None:
            self._tell_soon()
            self._thread.join(_LAST)
            self._thread = None

    def failed(self) -> None:
        """Tells the others at once that this node has failed, and gives them the time to hear of it: the store may go with it."""
        if self._thread is not None and self._tell_soon():
            sleep(3 * self.pause)

    def _tell_soon(self) -> bool:
        """Lets a thread tell the news, which could wait for long. Returns whether it has within some seconds."""
        telling = Thread(target=self._exchange, name="superpipeline-last-news", daemon=True)
        telling.start()
        telling.join(_LAST)
        return not telling.is_alive()

    def _run(self) -> None:
        while not self._over.wait(self.pause):
            self._exchange()

    def _exchange(self) -> None:
        with self._lock:
            try:
                self._store.set(self._keys[self._node], self._board.tell())
                others = {node: key for node, key in self._keys.items() if node != self._node}
                for node, said in zip(others, self._store.multi_get(list(others.values())), strict=True):
                    self._board.hear(node, said)
            except RuntimeError:  # the store is gone or does not answer: nothing is heard of any node
                return


_PATIENCE = timedelta(seconds=10)
"""How long the store may take for one answer."""

_LAST = 1.0
"""Seconds that the last news may take."""
