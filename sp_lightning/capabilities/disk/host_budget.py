"""``host_memory=``: how much host memory a run may take, and how much of it is left to the processes themselves."""

from __future__ import annotations

from collections.abc import Callable

from sp_lightning.core.device.host_memory import free_garbage
from sp_lightning.core.plan.units import as_option, enough_bytes, human_bytes
from sp_lightning.trainer import host_memory as machine
from sp_lightning.trainer.host_memory import HostBudget

MARGIN = 1 / 16
"""With a disk, the share of ``host_memory`` that is left to batches, to activations on the CPU, and to the process itself."""

_LEAST_MARGIN = 96 * 2**20
"""The least margin in bytes: with adapters on a small language model, the first step took 77 MiB beyond all estimates."""

_LIBRARIES = 864 * 2**20
"""Memory of a process that has imported torch, Lightning and transformers (858 MiB with torch 2.15 on a CPU)."""

_OF_EACH = 520 * 2**20
"""Memory of each further process, which shares the libraries' files in memory (518 MiB)."""

_DIFFERS = 16 * 2**20
"""How much the memory of a process differs between two runs (4 MiB were measured)."""


def kept_for_processes(host_memory: int, devices: int, *, disk: bool) -> int:
    """Returns the bytes of ``host_memory`` that a run will leave to its processes, as far as they are known before the run.

    Args:
        host_memory: the limit in bytes.
        devices: the number of devices of a node. Each has a process.
        disk: True with ``disk=``. Then the processes get a share of the memory; otherwise a fixed number of bytes.
    """
    return _margin(host_memory, disk=disk) + _of_libraries(devices)


def limit_for(nbytes: int, devices: int, *, disk: bool) -> int:
    """Returns the smallest ``host_memory`` with which a run can use ``nbytes``. See :func:`kept_for_processes`."""
    return _with_margin(nbytes + _of_libraries(devices), disk=disk)


def _of_libraries(devices: int) -> int:
    return _LIBRARIES + (devices - 1) * _OF_EACH


def _margin(host_memory: int, *, disk: bool = True) -> int:
    share = int(host_memory * MARGIN) if disk else 0
    return max(share, _LEAST_MARGIN)


def _with_margin(needed: int, *, disk: bool = True) -> int:
    """Returns the smallest ``host_memory`` that has room for ``needed`` bytes and the margin."""
    least = needed + _LEAST_MARGIN
    return max(int(needed / (1 - MARGIN)) + 1, least) if disk else least


def room_for(host_memory: int | float | None, elsewhere: int = 0, *, disk: bool = True) -> int | None:
    """Returns the bytes of host memory that can be taken from now on; None if the system does not report them.

    Args:
        host_memory: the limit in bytes, or a share of the free memory; None for all free memory.
        elsewhere: the bytes that other processes have taken of a limit in bytes, which all processes share.
        disk: True with ``disk=``. Then a share of the memory is left free.
    """
    available = machine.available_bytes()
    if isinstance(host_memory, int):
        limit = host_memory - _margin(host_memory, disk=disk) - machine.resident_bytes() - elsewhere
        return limit if available is None else min(limit, available)
    if available is None:
        return None
    return int(available * (host_memory or 1) * (1 - MARGIN if disk else 1))


def remedy_for(missing: int, given: int | float | None) -> str:
    """Returns a remedy for the user if host memory is too small with a disk.

    Args:
        missing: the bytes that are missing.
        given: ``host_memory``.
    """
    if not isinstance(given, int):
        return f"free {enough_bytes(int(missing / (1 - MARGIN)) + _DIFFERS)}"
    needed = given - _margin(given) + missing
    return f'host_memory="{enough_bytes(_with_margin(needed) + _DIFFERS)}" is enough'


def itself() -> str:
    """Returns a phrase for error messages: this process, and how much memory it has taken so far."""
    return f"the process, which itself takes {human_bytes(machine.resident_bytes())}"


class LimitedMemory(HostBudget):
    """The limit ``host_memory=`` without a disk: a run may take this much, as if the machine had no more.

    Args:
        host_memory: bytes, or a share of the free memory.
    """

    def __init__(self, host_memory: int | float) -> None:
        self._host_memory = host_memory
        self._others = 0  # bytes that the node's other processes have taken

    def count_others(self, gather: Callable[[int, str], list[int]]) -> None:
        free_garbage()
        own = machine.anonymous_bytes()
        self._others = sum(gather(own, "what processes have taken of CPU memory")) - own

    def room(self) -> int | None:
        return room_for(self._host_memory, self._others, disk=False)

    def too_little(self, total: int, room: int, parts: str) -> str:
        given = self._host_memory
        if not isinstance(given, int):
            return (
                f"host_memory={as_option(given)} of the free memory is too little: {human_bytes(total)} more are needed "
                f"({parts}), and it leaves {human_bytes(room)}. Store the rest on a disk: "
                f'SuperpipelineStrategy(disk="/scratch", host_memory={as_option(given)}).'
            )
        taken = machine.resident_bytes() + self._others
        if taken + total <= given - _LEAST_MARGIN:
            return super().too_little(total, room, parts)
        enough = enough_bytes(_with_margin(taken + total, disk=False) + _DIFFERS)
        # With a disk, a window of layers and the buffers of transfers stay in memory. If less than half would fit, they may not.
        disk = ""
        if 2 * (given - _margin(given) - taken) >= total:
            disk = (
                f' Or store the rest on a disk: SuperpipelineStrategy(disk="/scratch", host_memory={as_option(given)}).'
            )
        return (
            f"host_memory={as_option(given)} is too little: {human_bytes(taken + total + _LEAST_MARGIN)} are needed "
            f"({human_bytes(taken)} taken already, {parts}, {human_bytes(_LEAST_MARGIN)} for batches). "
            f'host_memory="{enough}" is enough.{disk}'
        )
