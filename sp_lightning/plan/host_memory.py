"""How much host memory can still be had: what the system has, within what the control group allows."""

from __future__ import annotations

from pathlib import Path

from sp_lightning.plan.units import human_bytes

# Where a v1 group says nothing it says a number near 2⁶³.
_UNLIMITED = 2**60


def available_bytes(root: Path = Path("/")) -> int | None:
    """Bytes that this process can take without being killed, swap included; None where the system does not say (not Linux).

    Args:
        root: of the file system.
    """
    fields = dict(line.split(":", 1) for line in _lines(root / "proc/meminfo") if ":" in line)
    if "MemAvailable" not in fields:
        return None
    free = sum(int(fields[name].split()[0]) * 1024 for name in ("MemAvailable", "SwapFree") if name in fields)
    return min([free, *_of_groups(root)])


def _of_groups(root: Path) -> list[int]:
    """Of the process's group and each above it: its limit less what it has taken, but for what could be given back."""
    found = []
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = [*line.split(":", 2), "none", ""][:3]
        if controllers and "memory" not in controllers.split(","):
            continue
        top = root / "sys/fs/cgroup" / ("memory" if controllers else "")
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes") if controllers else ("memory.max", "memory.current")
        group = top / path.strip("/")
        # In a container the path may be that of the host, and the group is at the top.
        for each in (group, *group.parents) if group.is_dir() else (top,):
            limit, taken = (_number(each / name) for name in names)
            if limit is not None and taken is not None and limit < _UNLIMITED:
                found.append(max(0, limit - taken + _reclaimable(each / "memory.stat")))
            if each == top:
                break
    return found


def _lines(file: Path) -> list[str]:
    return file.read_text(errors="replace").splitlines() if file.is_file() else []


def _number(file: Path) -> int | None:
    text = "".join(_lines(file)).strip()
    return int(text) if text.isdecimal() else None


def _reclaimable(file: Path) -> int:
    """v1 says it with all groups below in ``total_inactive_file``."""
    pairs = dict(line.split(maxsplit=1) for line in _lines(file) if len(line.split()) == 2)
    text = pairs.get("total_inactive_file", pairs.get("inactive_file", "0"))
    return int(text) if text.isdecimal() else 0


def spare_bytes(needed: dict[str, int]) -> int | None:
    """What can be taken beside what is needed; an eighth of it is left to others. None where the system does not say."""
    available = available_bytes()
    return None if available is None else max(0, available - sum(needed.values())) * 7 // 8


def check_host(needed: dict[str, int], remedy: str) -> None:
    """Refuse what would get the process killed later.

    Args:
        needed: bytes beyond what is held already, by what they are for.
        remedy: what to do, as a sentence.

    Raises:
        MemoryError: more than :func:`available_bytes`.
    """
    available = available_bytes()
    total = sum(needed.values())
    if available is not None and total > available:
        parts = ", ".join(f"{human_bytes(nbytes)} {what}" for what, nbytes in needed.items() if nbytes)
        raise MemoryError(
            f"{human_bytes(total)} more of host memory are needed ({parts}), and {human_bytes(available)} can be had "
            f"(the system's free memory and swap, within the limits of the control group). {remedy}"
        )
