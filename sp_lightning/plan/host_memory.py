"""How much host memory is available: what the system has free, within what the control group allows."""

from __future__ import annotations

from pathlib import Path

from sp_lightning.device.host_memory import free_garbage
from sp_lightning.plan.units import enough_bytes, exact_bytes, human_bytes

# A v1 control group without a limit says a number near 2⁶³.
_UNLIMITED = 2**60


def available_bytes(root: Path = Path("/")) -> int | None:
    """Bytes that this process can take without being killed, swap included. None if the system is not Linux.

    Args:
        root: the root of the file system that is read.
    """
    free = _field(root / "proc/meminfo", "MemAvailable")
    if free is None:
        return None
    return min([free + (_field(root / "proc/meminfo", "SwapFree") or 0), *_of_groups(root)])


def resident_bytes(root: Path = Path("/")) -> int:
    """Bytes of memory that this process has taken, those of its libraries included. 0 if the system is not Linux.

    Pages of mapped data (a checkpoint that is resumed from, weights that stay in their files) that this process has not written
    do not count: the system takes them back when somebody needs memory. Those of a file that was just copied are dirty until
    the disk has them; of a private mapping, only anonymous pages are the process's own.
    """
    taken = _field(root / "proc/self/status", "VmRSS")
    if taken is None:
        return 0
    others, signs = 0, dict[str, int]()
    for line in _lines(root / "proc/self/smaps"):
        words = line.split(maxsplit=5)
        if not words[0].endswith(":"):  # a mapping begins: addresses, rights, offset, device, inode, file
            data = len(words) == 6 and words[4] != "0" and ".so" not in words[5]
            signs = {} if not data else _OF_PRIVATE if words[1].endswith("p") else _OF_SHARED
        elif words[0] in signs:
            others += signs[words[0]] * int(words[1])
    return taken - others * 1024


_OF_PRIVATE = {"Rss:": 1, "Anonymous:": -1}
_OF_SHARED = {"Shared_Clean:": 1, "Private_Clean:": 1}
"""Which lines of a mapping of data add up to what is not the process's own memory."""


def host_memory() -> tuple[int, int] | None:
    """Bytes of host memory that this process has taken, and that it can have in all. None if the system is not Linux."""
    taken, available = resident_bytes(), available_bytes()
    return None if available is None else (taken, taken + available)


def anonymous_bytes() -> int:
    """Bytes of memory that this process has for itself alone: neither files nor what several processes share.

    0 if the system is not Linux.
    """
    return _field(Path("/proc/self/status"), "RssAnon") or 0


MARGIN = 1 / 16
"""The share of ``host_memory`` that is left to batches, activations on the CPU, and the process itself."""

_LEAST_MARGIN = 96 * 2**20
"""The least of that: with adapters on a small language model, the first step took 77 MiB that nothing here counts."""


_LIBRARIES = 864 * 2**20
"""What a process has taken once torch, Lightning and transformers are imported (858 MiB with torch 2.15 on a CPU)."""


_OF_EACH = 520 * 2**20
"""What of that each further process takes for itself: the files of the libraries are in memory once (518 MiB)."""


def kept_for_processes(host_memory: int, devices: int, *, disk: bool) -> int:
    """Bytes of ``host_memory`` that a run will leave to its processes, one for each device, as far as that is known before.

    Args:
        host_memory: bytes.
        devices: of a node.
        disk: whether there is one, for what exceeds the memory. A share of that is left to processes then.
    """
    return _margin(host_memory, disk=disk) + _of_libraries(devices)


def limit_for(nbytes: int, devices: int, *, disk: bool) -> int:
    """The least ``host_memory`` that leaves so many bytes beside the processes. The arguments are those of the above."""
    return _with_margin(nbytes + _of_libraries(devices), disk=disk)


def _of_libraries(devices: int) -> int:
    return _LIBRARIES + (devices - 1) * _OF_EACH


def _margin(host_memory: int, *, disk: bool = True) -> int:
    return max(int(host_memory * MARGIN) * disk, _LEAST_MARGIN)


def _with_margin(needed: int, *, disk: bool = True) -> int:
    """The least ``host_memory`` that leaves so many bytes."""
    return max((int(needed / (1 - MARGIN)) + 1) * disk, needed + _LEAST_MARGIN)


def room_for(host_memory: int | float | None, elsewhere: int = 0, *, disk: bool = True) -> int | None:
    """Bytes of host memory that can be taken from now on. None if the system does not say.

    Args:
        host_memory: what the process may take in all, in bytes, or a share of what is free; None for all that is free.
        elsewhere: bytes of it that other processes have taken, which share the rest.
        disk: whether a disk takes the rest. Then a share of the memory is left free.
    """
    available = available_bytes()
    if isinstance(host_memory, int):
        limit = host_memory - _margin(host_memory, disk=disk) - resident_bytes() - elsewhere
        return limit if available is None else min(limit, available)
    return None if available is None else int(available * (host_memory or 1) * (1 - MARGIN * disk))


def remedy_for(missing: int, given: int | float | None) -> str:
    """What is enough where host memory is too small by so many bytes, in words.

    Args:
        missing: bytes.
        given: ``host_memory``, of which a share is left to the process.
    """
    if not isinstance(given, int):
        return f"free {enough_bytes(int(missing / (1 - MARGIN)) + _DIFFERS)}"
    needed = given - _margin(given) + missing
    return f'host_memory="{enough_bytes(_with_margin(needed) + _DIFFERS)}" is enough'


def itself() -> str:
    """What this process takes before training needs more, in words."""
    return f"the process, which itself takes {human_bytes(resident_bytes())}"


_DIFFERS = 16 * 2**20
"""What a process takes more in one run than in another (4 MiB were measured)."""


def _of_groups(root: Path) -> list[int]:
    """What the process's control group and each group above it leave: the limit less what is taken and not reclaimable."""
    found = []
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = [*line.split(":", 2), "none", ""][:3]
        if controllers and "memory" not in controllers.split(","):
            continue
        top = root / "sys/fs/cgroup" / ("memory" if controllers else "")
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes") if controllers else ("memory.max", "memory.current")
        group = top / path.strip("/")
        # In a container, the path may be the one that the host sees. Then the group is at the top.
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
    """The bytes of a field of a file that has lines such as ``VmRSS:  12 kB``."""
    fields = dict(line.split(":", 1) for line in _lines(file) if ":" in line)
    return int(fields[field].split()[0]) * 1024 if field in fields else None


def _number(file: Path) -> int | None:
    text = "".join(_lines(file)).strip()
    return int(text) if text.isdecimal() else None


def _reclaimable(file: Path) -> int:
    """Bytes of the page cache that the kernel would give back. A v1 group counts the groups below it in ``total_…``."""
    pairs = dict(line.split(maxsplit=1) for line in _lines(file) if len(line.split()) == 2)
    text = pairs.get("total_inactive_file", pairs.get("inactive_file", "0"))
    return int(text) if text.isdecimal() else 0


def spare_bytes(needed: dict[str, int], cap: int | float | None = None, elsewhere: int = 0) -> int | None:
    """Bytes that can be taken beside those that are needed. An eighth is left to others. None if the system does not say.

    Args:
        needed: bytes beyond what is held already, by what they are for.
        cap: ``host_memory`` of a run without a disk, which counts as the machine's memory; None for all of it.
        elsewhere: bytes of the cap that other processes have taken.
    """
    room = room_for(cap, elsewhere, disk=False)
    return None if room is None else all_but_an_eighth(room - sum(needed.values()))


def all_but_an_eighth(free: int) -> int:
    """What may be taken of so many bytes that are free."""
    return max(0, free) * 7 // 8


def check_host(needed: dict[str, int], remedy: str, cap: int | float | None = None, elsewhere: int = 0) -> None:
    """Refuses to begin what would get the process killed later.

    Args:
        needed: bytes beyond what is held already, by what they are for.
        remedy: what the user can do, as a sentence.
        cap: ``host_memory`` of a run without a disk, which counts as the machine's memory; None for all of it.
        elsewhere: bytes of the cap that other processes have taken.

    Raises:
        MemoryError: more is needed than is available.
    """
    room = room_for(cap, elsewhere, disk=False)
    total = sum(needed.values())
    if room is not None and total > room:
        free_garbage()  # a run that is over may be held by nothing else
        room = room_for(cap, elsewhere, disk=False)
    if room is None or total <= room:
        return
    parts = ", ".join(f"{human_bytes(nbytes)} {what}" for what, nbytes in needed.items() if nbytes)
    taken = resident_bytes() + elsewhere
    if cap is None or (isinstance(cap, int) and taken + total <= cap - _LEAST_MARGIN):
        raise MemoryError(
            f"{human_bytes(total)} more of host memory are needed ({parts}), and {human_bytes(room)} can be had "
            f"(the system's free memory and swap, within the limits of the control group). {remedy}"
        )
    raise MemoryError(f"{_over_cap(cap, taken, total, room, parts)} {remedy}")


def _over_cap(cap: int | float, taken: int, total: int, room: int, parts: str) -> str:
    """Says that a run needs more than ``host_memory``, how much is enough, and how a disk takes the rest."""
    if not isinstance(cap, int):
        return (
            f"host_memory={cap:g} of the free memory is too little: {human_bytes(total)} more are needed ({parts}), and "
            f"it leaves {human_bytes(room)}. Store the rest on a disk: "
            f'SuperpipelineStrategy(disk="/scratch", host_memory={cap:g}).'
        )
    enough = enough_bytes(_with_margin(taken + total, disk=False) + _DIFFERS)
    given = exact_bytes(cap)
    return (
        f'host_memory="{given}" is too little: {human_bytes(taken + total + _LEAST_MARGIN)} are needed '
        f"({human_bytes(taken)} taken already, {parts}, {human_bytes(_LEAST_MARGIN)} for batches). "
        f'host_memory="{enough}" is enough. Or store the rest on a disk: '
        f'SuperpipelineStrategy(disk="/scratch", host_memory="{given}").'
    )
