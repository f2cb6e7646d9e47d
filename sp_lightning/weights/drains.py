"""Drains: transfers to the host that are under way, of which a few may have memory on the device."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

from sp_lightning.device.device import Device
from sp_lightning.device.waits import Stream, Wait


class HasLanded(Protocol):
    """A transfer to the host."""

    @property
    def landed(self) -> Any:
        """The event after the transfer."""


D = TypeVar("D", bound=HasLanded)


class Drains(Generic[D]):
    """Transfers to the host, in the order in which they were issued. At most ``in_flight`` have memory on the device.

    Args:
        device: waits for the transfers.
        in_flight: the number of layers whose gradients may be on the device at once (k' + 1).
        free: called with a transfer once compute has waited for it, so that its device memory may be used again.
        apply: called with a transfer once the host has waited for it.
    """

    def __init__(self, device: Device, in_flight: int, free: Callable[[D], None], apply: Callable[[D], None]) -> None:
        self.in_flight = in_flight
        self._device = device
        self._free = free
        self._apply = apply
        self._flying: deque[D] = deque()
        self._landed: deque[D] = deque()

    def add(self, drain: D) -> None:
        """Takes a transfer that was issued, and retires others so that ``in_flight`` bounds it and the next one."""
        self._flying.append(drain)
        self.retire(self.in_flight - 1)

    def retire(self, keep: int) -> None:
        """Frees the device memory of all but the ``keep`` latest transfers, for which compute waits."""
        while len(self._flying) > keep:
            drain = self._flying.popleft()
            self._device.wait(Stream.COMPUTE, drain.landed, Wait.REUSE_AFTER_DRAIN)
            self._free(drain)
            self._landed.append(drain)

    def finish(self, keep: int = 1) -> None:
        """Finishes all transfers that are retired but the ``keep`` latest ones.

        This bounds the host memory of gradients, and how far the host runs ahead.
        """
        while len(self._landed) > keep:
            drain = self._landed.popleft()
            self._device.synchronize(drain.landed, Wait.APPLY_AFTER_DRAIN)
            self._apply(drain)

    def flush(self) -> None:
        """Finishes all transfers."""
        self.retire(0)
        self.finish(0)

    @property
    def overdue(self) -> bool:
        """Whether :meth:`finish` has something to do."""
        return len(self._landed) > 1

    @property
    def under_way(self) -> bool:
        """Whether there is any."""
        return bool(self._flying or self._landed)

    def take(self) -> list[D]:
        """Returns the transfers that are under way, and no longer tracks them."""
        under_way = [*self._flying, *self._landed]
        self._flying.clear()
        self._landed.clear()
        return under_way
