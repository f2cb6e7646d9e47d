"""How much host memory is available: the free memory of the system, within the limit of the control group."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from sp_lightning.core.device.host_memory import free_garbage
from sp_lightning.core.plan.units import human_bytes

# A v1 control group without a limit reports a number near 2⁶³.
_UNLIMITED = 2**60


def available_bytes(root: Path = Path("/")) -> int | None:
    """Returns the bytes that this process can take without being killed, with swap; None if the system is not Linux.

    Args:
        root: the root of the file system whose ``proc`` and ``sys`` are read. Tests give another one.
    """
    free = _field(root / "proc/meminfo", "MemAvailable")
    if free is None:
        return None
    return min([free + (_field(root / "proc/meminfo", "SwapFree") or 0), *_of_groups(root)])


def resident_bytes(root: Path = Path("/")) -> int:
    """Returns the bytes of memory that this process has taken, with its libraries; 0 if the system is not Linux.

    Pages of mapped data (a checkpoint from which training resumes, weights that stay in files) do not count if the system can
    reclaim them. In a shared mapping these are the clean pages: dirty pages must be written to the disk first. In a private
    mapping they are all pages except the anonymous ones, which this process has written.
    """
    taken = _field(root / "proc/self/status", "VmRSS")
    if taken is None:
        return 0
    others, signs = 0, dict[str, int]()
    for line in _lines(root / "proc/self/smaps"):
        words = line.split(maxsplit=5)
        if not words[0].endswith(":"):  # a mapping begins: addresses, rights, offset, device, inode, file
            # Data is a file that is not a library: libraries count.
            data = len(words) == 6 and words[4] != "0" and ".so" not in words[5]
            signs = {} if not data else _OF_PRIVATE if words[1].endswith("p") else _OF_SHARED
        elif words[0] in signs:
            others += signs[words[0]] * int(words[1])
    return taken - others * 1024


_OF_PRIVATE = {"Rss:": 1, "Anonymous:": -1}
_OF_SHARED = {"Shared_Clean:": 1, "Private_Clean:": 1}
"""The lines of a mapping of data, with their signs, whose sum is the memory that the system can reclaim."""


def host_memory() -> tuple[int, int] | None:
    """Returns the bytes that this process has taken, and the bytes that it can have in all; None if the system is not Linux."""
    taken, available = resident_bytes(), available_bytes()
    return None if available is None else (taken, taken + available)


def peak_bytes() -> int | None:
    """Returns the most bytes of memory that this process has had, with mapped files; None if the system is not Linux."""
    return _field(Path("/proc/self/status"), "VmHWM")


def anonymous_bytes() -> int:
    """Returns the bytes of private memory: neither files nor memory that processes share; 0 if the system is not Linux."""
    return _field(Path("/proc/self/status"), "RssAnon") or 0


def _of_groups(root: Path) -> list[int]:
    """Returns the bytes that are free in the process's control group and in each group above it, if they have limits.

    Free is the limit less the memory that cannot be reclaimed.
    """
    found = []
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = [*line.split(":", 2), "none", ""][:3]
        if controllers and "memory" not in controllers.split(","):
            continue
        top = root / "sys/fs/cgroup" / ("memory" if controllers else "")
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes") if controllers else ("memory.max", "memory.current")
        group = top / path.strip("/")
        # In a container, the path may be the host's path of the group. Then the container sees the group at the top.
        for each in (group, *group.parents) if group.is_dir() else (top,):
            limit, taken = (_number(each / name) for name in names)
            if limit is not None and taken is not None and limit < _UNLIMITED:
                found.append(max(0, limit - taken + _reclaimable(each / "memory.stat")))
            if each == top:
                break
    return found


def _lines(file: Path) -> list[str]:
    return file.read_text(errors="replace").splitlines() if file.is_file() else []


def _field(file: Path, field: str) -> int | None:
    """Returns the bytes of a field of a file with lines such as ``VmRSS:  12 kB``."""
    line = next((line for line in _lines(file) if line.startswith(f"{field}:")), None)
    return None if line is None else int(line.split()[1]) * 1024


def _number(file: Path) -> int | None:
    text = "".join(_lines(file)).strip()
    return int(text) if text.isdecimal() else None


def _reclaimable(file: Path) -> int:
    """Returns the bytes of the page cache that can be reclaimed. A v1 group counts the groups below it in ``total_…``."""
    pairs = dict(line.split(maxsplit=1) for line in _lines(file) if len(line.split()) == 2)
    text = pairs.get("total_inactive_file", pairs.get("inactive_file", "0"))
    return int(text) if text.isdecimal() else 0


# ---------------------------------------------------------------------- what a run may take


class HostBudget:
    """The host memory that a run may take: all free memory of the system. With ``host_memory=``, a subclass limits it."""

    def count_others(self, gather: Callable[[int, str], list[int]]) -> None:
        """Counts the memory that the node's other processes have taken, if one limit counts for all processes. Collective.

        Args:
            gather: returns the numbers of all processes, given this process's number and words for messages.
        """

    def room(self) -> int | None:
        """Returns the bytes that the run can take from now on; None if the system does not report them."""
        return available_bytes()

    def too_little(self, total: int, room: int, parts: str) -> str:
        """Returns an error message.

        Args:
            total: the bytes that are needed in addition to the process's present memory.
            room: the bytes that can be taken.
            parts: the parts of ``total``, in words.
        """
        return (
            f"{human_bytes(total)} more of CPU memory are needed ({parts}), and {human_bytes(room)} can be had "
            f"(the system's free memory and swap, within the limits of the control group)."
        )


MACHINE = HostBudget()


def all_but_an_eighth(free: int) -> int:
    """Returns the part of free memory that activations may take. An eighth is left to other processes."""
    return max(0, free) * 7 // 8


def check_host(needed: dict[str, int], remedy: str, budget: HostBudget = MACHINE) -> int | None:
    """Raises an error before the system would kill the process for its memory.

    Args:
        needed: the bytes that are needed in addition to the process's present memory, by their use.
        remedy: a sentence for the user.
        budget: the limit.

    Returns:
        The bytes that activations may take beside the needed bytes; None if the system does not report free memory.

    Raises:
        MemoryError: more is needed than is available.
    """
    room, total = budget.room(), sum(needed.values())
    if room is not None and total > room:
        free_garbage()  # reference cycles may keep the memory of a finished run
        room = budget.room()
    if room is not None and total > room:
        parts = ", ".join(f"{human_bytes(nbytes)} {what}" for what, nbytes in needed.items() if nbytes)
        raise MemoryError(f"{budget.too_little(total, room, parts)} {remedy}")
    return None if room is None else all_but_an_eighth(room - total)
