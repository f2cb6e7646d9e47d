"""What a fork costs while host memory is page-locked, as a data loader's workers pay it: seconds, and bytes copied.

A worker may not be able to read that memory at all, where the driver keeps it from forked processes: that is told, too.

    python -m examples.benchmarks.forks --gib 8

Without a GPU nothing is page-locked, and both lines are of ordinary memory.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from examples.benchmarks import cli
from sp_lightning.core.device.accelerator import device_for
from sp_lightning.core.device.host_memory import PinnedMemory


def measure(nbytes: int, device: torch.device, *, pin: bool) -> dict[str, float | bool]:
    """Fork once beside so much memory, and write one byte of each page afterwards, as an optimizer does."""
    memory = PinnedMemory(device_for(device), nbytes, pin=pin)
    memory.bytes.fill_(1)
    go, done = os.pipe(), os.pipe()
    begun = time.perf_counter()
    child = os.fork()
    if not child:
        _tell_own_bytes(go[0], done[1], memory.bytes.data_ptr())
    forked = time.perf_counter()
    own = _exchange(go[1], done[0])
    begun_writing = time.perf_counter()
    memory.bytes[:: os.sysconf("SC_PAGE_SIZE")] += 1
    written = time.perf_counter()
    _, status = os.waitpid(child, 0)
    for end in (*go, *done):
        os.close(end)
    return {
        "pinned": memory.pinned and device.type != "cpu",
        "fork_seconds": forked - begun,
        "write_seconds": written - begun_writing,
        "bytes_of_the_childs_own": own,
        "child_can_read": os.waitstatus_to_exitcode(status) == 0,
    }


def _exchange(go: int, done: int) -> float:
    os.write(go, b"1")
    return float(os.read(done, 64))


def _tell_own_bytes(go: int, done: int, address: int) -> None:
    """The child: it says how much memory is its own, which the fork has copied, reads a byte at an address, and ends."""
    ended = 1
    try:
        os.read(go, 1)
        lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
        own = sum(int(line.split()[1]) for line in lines if line.startswith(("Private_Clean", "Private_Dirty")))
        os.write(done, str(own * 1024).encode())
        ended = ctypes.string_at(address, 1) != b"\1"
    finally:
        os._exit(ended)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--gib", type=cli.positive, default=4, help="of host memory (%(default)s)")
    options = parser.parse_args(argv)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for pin in (False, True):
        found = measure(int(options.gib * 2**30), device, pin=pin)
        print(
            f"{'page-locked' if found['pinned'] else 'ordinary'}: fork {found['fork_seconds']:.3f} s, writing afterwards "
            f"{found['write_seconds']:.3f} s, {found['bytes_of_the_childs_own'] / 2**30:.2f} GiB are the child's own"
            f"{'' if found['child_can_read'] else ', which cannot read it'}",
            flush=True,
        )


if __name__ == "__main__":
    main()
