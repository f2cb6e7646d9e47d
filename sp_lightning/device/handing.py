"""Handing: the descriptor of shared memory goes from one process of a node to the others.

They need no file system in common, and no name under which others could find the memory.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Callable
from uuid import uuid4


def hand_out(descriptor: int, number: int, announce: Callable[[str], object]) -> dict[int, int]:
    """Sends the descriptor of memory to other processes.

    Args:
        descriptor: the memory's.
        number: how many processes are to get it.
        announce: tells the others where they get it.

    Returns:
        The processes by their ranks.
    """
    processes: dict[int, int] = {}
    with socket.socket(socket.AF_UNIX) as server:
        token = f"superpipeline-{uuid4().hex}"
        server.bind(f"\0{token}")
        server.listen(number + 1)
        server.settimeout(_PATIENCE)
        announce(token)
        while len(processes) < number:
            connection, _ = server.accept()
            with connection:
                process, user, _ = _peer(connection)
                if user == os.getuid():
                    rank = struct.unpack("q", connection.recv(8))[0]
                    processes[rank] = process
                    socket.send_fds(connection, [b"."], [descriptor])
    return processes


def receive(token: str, rank: int) -> tuple[int, int]:
    """Returns a descriptor that another process hands out, and that process.

    Args:
        token: where it does.
        rank: this process's.
    """
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(_PATIENCE)
        connection.connect(f"\0{token}")
        connection.sendall(struct.pack("q", rank))
        process = _peer(connection)[0]
        _, descriptors, _, _ = socket.recv_fds(connection, 1, 1)
    return descriptors[0], process


_PATIENCE = 60.0
"""Seconds until a rank that does not come for shared memory is given up."""


def _peer(connection: socket.socket) -> tuple[int, int, int]:
    """Returns process, user and group at the other end of a connection, as this process numbers them."""
    return struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
