"""A step: from the first layer's fetch until the host's parameters are back in the modules."""

from __future__ import annotations

import enum
import threading
from collections.abc import Sequence

from sp_lightning.activations.calls import Activations
from sp_lightning.engine.exchange import Exchange
from sp_lightning.engine.host_source import HostSource
from sp_lightning.engine.lent_weights import LentWeights
from sp_lightning.engine.residency import Residency
from sp_lightning.optim.background import Updates
from sp_lightning.weights.layer import Kind, StreamedLayer
from sp_lightning.weights.residents import Residents
from sp_lightning.weights.weight_watch import WeightWatch


class StepKind(enum.Enum):
    """What is expected of a step."""

    INFERENCE = enum.auto()
    """No backward."""
    AUTOMATIC = enum.auto()
    """A loss, whose backward and update Lightning calls."""
    MANUAL = enum.auto()
    """User code reads gradients and writes weights within the step (manual optimization)."""


class Step:
    """The running step, or the last one.

    Args:
        layers: all of them.
        residency, lent, source, residents, exchange, activations, updates: the engine's parts below.
        watch: compares the host's weights, where ``check_writes`` asks for it.

    Attributes:
        running: whether a step runs.
        kind: of the step that runs, or ran last.
        ends_with_backward: whether the step is over once a backward has ended.
        thread: which thread's step it is.
        shared: whether other threads use weights in it, too.
    """

    def __init__(
        self,
        layers: Sequence[StreamedLayer],
        residency: Residency,
        lent: LentWeights,
        source: HostSource,
        residents: Residents,
        exchange: Exchange,
        activations: Activations,
        updates: Updates,
        watch: WeightWatch | None,
    ) -> None:
        self._layers = layers
        self._residency = residency
        self._lent = lent
        self._source = source
        self._residents = residents
        self._exchange = exchange
        self._activations = activations
        self._updates = updates
        self._watch = watch
        self._expected: str | None = None  # the phase whose first layers may have come already
        self.running = False
        self.kind = StepKind.INFERENCE
        self.ends_with_backward = False
        self.thread = 0
        self.shared = False

    @property
    def training(self) -> bool:
        """Whether a backward is, or was, expected."""
        return self.kind is not StepKind.INFERENCE

    # ------------------------------------------------------------------ it begins

    def begin(self, phase: str, kind: StepKind, *, quiet: bool) -> None:
        """Device parameters go into the modules, the first layers are fetched.

        Args:
            phase: name of the trace to follow.
            kind: what is expected.
            quiet: whether nothing can have written weights since the last step or :meth:`expect`.
        """
        if not quiet:
            self.forget()
        training = kind is not StepKind.INFERENCE
        if self._expected != phase:
            self._residency.prefetch.start(phase, training=training)
        self._residency.prefetch.trace.cyclic = quiet and not training
        self._expected = None
        self.running = True
        self.kind = kind
        self.thread = threading.get_ident()
        self.ends_with_backward = False
        self._residency.slots.idle_since = None
        for layer in self._layers:
            if layer.table is not None:
                layer.table.used_whole = False
        if training:
            self._activations.begin()
        self.activate()
        self._residency.fetch_ahead()

    def expect(self, phase: str, *, training: bool) -> None:
        """Nothing will write weights before the next step, which is of ``phase``: its first layers may come now."""
        self._residency.prefetch.start(phase, training=training)
        self._expected = phase
        self._residency.fetch_ahead()

    def begin_outside(self) -> None:
        """A module is called outside any step: nobody knows what was written since."""
        self.forget()
        self.thread = threading.get_ident()
        self._residency.prefetch.start("outside", training=False)

    def activate(self) -> None:
        """Device parameters into the modules."""
        if self._exchange.to_device():
            self._look_at_weights()

    def share(self, shared: bool) -> None:
        """Whether several threads use weights: then every use is noticed, so that none leaves under another's hands."""
        self.shared = shared
        for layer in self._layers:
            if layer.kind is not Kind.RESIDENTS:  # they do not leave
                layer.parameters.share(shared)

    # ------------------------------------------------------------------ weights may be written

    def forget(self) -> None:
        """Host weights have been or may have been written: copies on the device are out of date."""
        self._residency.release_unpinned()
        self.forget_copies()
        self._residents.forget()
        self._expected = None
        if self.running and self.kind is StepKind.MANUAL:
            self.activate()  # the step goes on after the optimizer's
            self._look_at_weights()

    def forget_copies(self) -> None:
        """What no running call uses is out of date."""
        used = self._residency.used
        self._source.doubt([each for each in self._layers if each.kind is not Kind.RESIDENTS and each not in used])

    def settle(self) -> None:
        """Between steps: user code may write weights now, which no transfer may be reading, and none has read."""
        if not self.running:
            self.forget()
            self._source.synchronize()

    def pause(self) -> None:
        """Within a step of manual optimization, after a backward: user code reads gradients and writes weights now."""
        self.take_back_writes()
        self._exchange.to_host()
        self.forget_copies()
        self._residents.forget()

    def take_back_writes(self) -> None:
        """Every weight that was written on the device is the host's now."""
        self._residency.release_unpinned()
        self._lent.take_back_all()
        self._residents.take_back_writes()
        for layer in self._layers:
            layer.parameters.exposed.clear()

    def stop_expecting(self) -> None:
        """What has been expected may not be what comes: another window, say."""
        self._expected = None

    # ------------------------------------------------------------------ it ends

    def end(self, *, settle: bool = False, compare: bool = True) -> None:
        """The host's parameters are back in the modules.

        Args:
            settle: whether user code may write weights next, which no transfer may be reading then.
            compare: whether ``check_writes`` is to look; not where there is an error already.

        Raises:
            RuntimeError: weights were written by a way that only ``check_writes`` sees.
        """
        if compare:
            self.compare_writes()
        self.running = False
        for layer in self._layers:
            layer.pins = 0
        self.take_back_writes()
        self._exchange.to_host()
        self._activations.remove()
        self._activations.settle()
        if self.training:
            self.forget()  # from here on hooks and optimizers may write weights unseen, through .data
        self._residency.slots.give_back_extra()
        if self.shared:
            self.share(False)
        if settle:
            self._source.synchronize()

    # ------------------------------------------------------------------ check_writes

    def compare_writes(self) -> None:
        """With ``check_writes``: the host's weights are what they were when somebody looked last.

        Raises:
            RuntimeError: a weight was written by a way that torch shows no sign of.
        """
        if self._watch is not None and self.running:
            self._watch.compare()

    def _look_at_weights(self) -> None:
        if self._watch is not None and self.running:
            self._updates.finish()
            self._watch.look()
