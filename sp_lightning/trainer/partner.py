"""What the callback needs of the strategy beside it."""

from __future__ import annotations

import logging
from typing import Protocol

from sp_lightning.device.timeline import Timeline
from sp_lightning.observe.stats import Stats
from sp_lightning.plan.ledger import Ledger
from sp_lightning.plan.plan import Plan


class Partner(Protocol):
    """A strategy of this package, as its callback sees it.

    Attributes:
        log: where a user's messages go.
    """

    log: logging.Logger

    def remarks(self) -> list[str]:
        """Returns what a user should know beside the plan, in sentences."""

    @property
    def plan(self) -> Plan:
        """What was decided."""

    @property
    def ledger(self) -> Ledger:
        """The host's memory and traffic in training."""

    def stats(self) -> Stats:
        """Returns the counters since set-up."""

    def expect_next_batch(self) -> None:
        """Notes that a training batch is over."""

    def make_timeline(self) -> Timeline:
        """Returns a timeline of the run's device."""

    def record(self, timeline: Timeline, *, on: bool) -> None:
        """Switches a timeline on or off."""
