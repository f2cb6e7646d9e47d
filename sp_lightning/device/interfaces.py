"""The network interface by which the other nodes are reached. gloo takes the one that the machine's own name stands for."""

from __future__ import annotations

import os
import socket
import struct
from contextlib import suppress

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

VARIABLE = "GLOO_SOCKET_IFNAME"
_ADDRESS_OF = 0x8915  # SIOCGIFADDR of Linux


def choose_interface(address: str) -> None:
    """Has gloo take the interface that leads to an address, unless the user has named one.

    On many systems a machine's own name stands for 127.0.1.1 (``/etc/hosts``), where no other node finds it.

    Args:
        address: where the processes meet: an address or a name of the first node.
    """
    if VARIABLE not in os.environ and (name := interface_to(address)) is not None:
        os.environ[VARIABLE] = name


def interface_to(address: str) -> str | None:
    """The name of the interface that leads to an address (IPv4); None if it is not known, or leads to this machine alone."""
    if fcntl is None:
        return None
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 9))  # of a datagram's socket this sends nothing
        mine = probe.getsockname()[0]
        if mine.startswith("127."):
            return None
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # it has no such address
                found = fcntl.ioctl(probe, _ADDRESS_OF, struct.pack("256s", name.encode()))
                if socket.inet_ntoa(found[20:24]) == mine:
                    return name
    return None
