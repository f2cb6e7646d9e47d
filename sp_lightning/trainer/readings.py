"""What a user reads of a strategy: the plan, the counters, the ledger."""

from __future__ import annotations

from typing import Any

from sp_lightning.observe.stats import Stats
from sp_lightning.plan.activation_policy import Mode
from sp_lightning.plan.ledger import Ledger
from sp_lightning.plan.plan import Plan
from sp_lightning.trainer.host_strategy import HostStrategy
from sp_lightning.trainer.loops import Loops
from sp_lightning.trainer.run import Run

_NO_COUNTERS = "There are no counters yet: they begin in trainer.fit (validate, test, predict)."


class Readings(HostStrategy):
    """A strategy that says what its last run was like, while it lasts and afterwards."""

    def __init__(self, *args: Any) -> None:
        self._run: Run | None = None
        self._loops: Loops | None = None  # while a run lasts
        self._ledger: Ledger | None = None
        super().__init__(*args)

    @property
    def plan(self) -> Plan:
        """What was decided, from set-up on.

        Raises:
            RuntimeError: before set-up.
        """
        return self._since_setup("There is no plan yet: it is made in trainer.fit (validate, test, predict).").plan

    @property
    def activations(self) -> dict[str, Mode]:
        """What happens to the activations of each layer, and of each part beside them, by name.

        What ``"auto"`` has chosen is in it. It can be given as ``activations=`` to another strategy.

        Raises:
            RuntimeError: before set-up.
        """
        return self._since_setup("There are no activations yet: they begin in trainer.fit.").results.activations

    @property
    def ledger(self) -> Ledger:
        """Host memory and traffic of training, from set-up for ``trainer.fit`` on.

        Raises:
            RuntimeError: before, and outside training.
        """
        if self._loops is not None:
            self._ledger = self._loops.ledger or self._ledger
        if self._ledger is None:
            raise RuntimeError("There is no ledger: it is made in trainer.fit, which alone has optimizers.")
        return self._ledger

    def stats(self) -> Stats:
        """Counters since the last set-up; they can be read after the run, too.

        Raises:
            RuntimeError: before set-up.
        """
        return self._since_setup(_NO_COUNTERS).results.stats

    def fetches(self) -> dict[str, int]:
        """How often each layer was fetched since the last set-up, by name: which experts were, for example.

        Raises:
            RuntimeError: before set-up.
        """
        return self._since_setup(_NO_COUNTERS).results.fetches

    def _since_setup(self, otherwise: str) -> Run:
        if self._run is None:
            raise RuntimeError(otherwise)
        return self._run
