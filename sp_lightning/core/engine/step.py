"""A step: from the first fetch of a layer until modules hold the host's parameters again."""

from __future__ import annotations

import enum
import threading
from collections.abc import Collection
from typing import TYPE_CHECKING

from sp_lightning.core.weights.layer import Kind, StreamedLayer

if TYPE_CHECKING:
    from sp_lightning.core.engine.engine import Engine


class StepKind(enum.Enum):
    """The operations that a step is expected to run."""

    INFERENCE = enum.auto()
    """It has no backward."""
    AUTOMATIC = enum.auto()
    """It computes a loss. Lightning calls backward and the optimizer."""
    MANUAL = enum.auto()
    """User code calls backward, reads gradients and writes weights within the step (manual optimization)."""


class Step:
    """The running step, or the last one.

    Attributes:
        running: True if a step runs.
        kind: the kind of the running step, or of the last one.
        ends_with_backward: True if the step ends when a backward ends.
        stream: the number of the stream on which the step computes; None before its first use of a layer.
        uploaded_again: the layers whose copies were out of date when the step began, because user code may have written them
            since the last step; None if all copies were.
        expected: the phase for which :meth:`prefetch_for` has fetched the first layers; None if they are not fetched, or out of
            date.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.expected: str | None = None
        # True if modules hold host parameters in the middle of a step, where user code may write them.
        self._holds_host = False
        self._stepping = False  # True if `_holds_host` is set because an optimizer steps inside a step or a call
        self.uploaded_again: list[StreamedLayer] | None = None
        self.running = False
        self.kind = StepKind.INFERENCE
        self.ends_with_backward = False
        self.stream: int | None = None

    @property
    def training(self) -> bool:
        """True if the step is expected to run a backward."""
        return self.kind is not StepKind.INFERENCE

    # ------------------------------------------------------------------ it begins

    def begin(self, phase: str, kind: StepKind, *, quiet: bool) -> None:
        """Begins a step: puts device parameters into the modules and fetches the first layers.

        Args:
            phase: the name of the trace, for example ``train``.
            kind: the kind of the step.
            quiet: True if no code can have written weights since the last step or :meth:`prefetch_for`.
        """
        engine = self.engine
        engine.writes.refuses = True
        self.uploaded_again = self._invalidate_written(quiet)
        training = kind is not StepKind.INFERENCE
        # Layers do not rest if there is a timeline, which records the beginning and the end of each use.
        engine.residency.let_rest(not (training or engine.device.timelines))
        if self.expected != phase:
            engine.residency.prefetch.start(phase, training=training)
        # If copies do not stay valid, the first layers of the next batch would be prefetched in vain.
        engine.residency.prefetch.trace.cyclic = self.uploaded_again == [] and not training
        self.expected = None
        self.running = True
        self.kind = kind
        engine.threads.main = threading.get_ident()
        self.ends_with_backward = False
        engine.residency.slots.idle_since = None
        for layer in engine.layers:
            layer.visits = 0
            layer.rows.begin_step(training=training)
        if training:
            engine.activations.begin()
        self.activate()
        engine.residency.fetch_ahead()

    def prefetch_for(self, phase: str, *, training: bool) -> None:
        """Fetches the first layers of the next step, of ``phase``. The caller ensures that no code writes weights before it.

        First uploads residents, because the forward waits for them at its beginning, and uploads end in the order in which they
        were issued. If an update of the residents is under way, they are uploaded when the step begins.
        """
        engine = self.engine
        self._invalidate_written(True)
        if engine.source.ready(engine.residents.layer):
            engine.residents.refresh()
        engine.residency.prefetch.start(phase, training=training)
        self.expected = phase
        engine.residency.fetch_ahead()

    def begin_outside(self) -> None:
        """Prepares for a module call outside any step. Copies of weights that any code may have written are out of date."""
        self._invalidate_written(False)
        self.engine.residency.prefetch.start("outside", training=False)

    def activate(self, *, in_backward: bool = False) -> None:
        """Puts device parameters into the modules, if they hold host parameters. Uploads residents that are out of date.

        Called when a step begins or continues, and if necessary before a module call and when its backward begins.

        Args:
            in_backward: True if this is called in backward, where operations on host parameters run on the host.
        """
        engine = self.engine
        if self._holds_host:  # user code or an optimizer may have written weights while modules held host parameters
            self._holds_host = False
            self.invalidate_unused()
            engine.residents.invalidate()
        held_host = not engine.swap.on_device
        if held_host:
            engine.writes.write_back_viewed(engine.residency.slots.all)  # an error if views were written meanwhile
            engine.residents.write_back()
            engine.residency.renew_used()
            engine.swap.to_device()
        engine.residents.refresh()
        if held_host:
            engine.swap.watch_captured(not in_backward or engine.swap.captured_used)

    def refuse_other_stream(self, name: str) -> None:
        """Raises an error if the step computes on another stream than this thread does now.

        Called before each use of a layer, ``name``, or of a weight. Only one stream waits for uploads and frees slots.

        Raises:
            RuntimeError: the step computes on another stream.
        """
        stream = self.engine.device.compute_stream()
        if self.stream is None:
            self.stream = stream
        elif stream != self.stream:
            raise RuntimeError(
                f"{name!r} is used on another CUDA stream than the layers before it in this step, and would not wait for its "
                "upload. Expected one stream for all layers of a step: use the layer outside of "
                "`with torch.cuda.stream(…)`, or run the whole step inside of it."
            )

    # ------------------------------------------------------------------ weights may be written

    def _invalidate_written(self, quiet: bool) -> list[StreamedLayer] | None:
        """Marks copies on the device as out of date whose host weights may have been written since the last step.

        Args:
            quiet: True if no code can have written weights meanwhile.

        Returns:
            The layers whose copies are out of date; None if these are all, because uses of host weights were not noticed
            (:meth:`ParameterSwap.watch_between`).
        """
        noticed, touched = quiet or self.engine.swap.between, self.engine.swap.take_touched()
        if not noticed or touched:
            self.invalidate(touched if noticed else None)
        return list(touched) if noticed else None

    def invalidate(self, layers: Collection[StreamedLayer] | None = None, *, goes_on: bool = True) -> None:
        """Marks copies on the device as out of date, because the host's weights may have been written.

        Args:
            layers: the layers, with their masters; None for all.
            goes_on: True if code of the running step follows, so that modules hold device parameters again. False if an
                optimizer's step has ended that another optimizer's step had called: the outer step still writes weights.
        """
        engine = self.engine
        engine.residency.release_unpinned()
        self.invalidate_unused(layers)
        if layers is None or engine.residents.layer in layers:
            engine.residents.invalidate()
        self.expected = None  # the layers that were prefetched for the next step are out of date
        if engine.swap.on_device and engine.residency.used:
            engine.residency.renew_used()
            engine.residents.refresh()
        if goes_on and (self._stepping or (self.running and self.kind is StepKind.MANUAL)):
            self._holds_host = self._stepping = False
            self.activate()  # this step goes on after the optimizer's step

    def invalidate_unused(self, layers: Collection[StreamedLayer] | None = None) -> None:
        """Marks the copies of layers that are not in use as out of date. ``layers``: None for all.

        First releases resting layers, and copies writes through views of slots to the host. Views that user code still holds
        then get the host's present weights.
        """
        engine = self.engine
        if layers is None:
            engine.residency.let_rest(False)
        else:
            engine.residency.release_resting(layers)
        used = engine.residency.used
        engine.writes.write_back_viewed(engine.residency.slots.all)
        among = engine.layers if layers is None else layers
        engine.source.invalidate([layer for layer in among if layer.kind is not Kind.RESIDENTS and layer not in used])
        engine.residency.renew_views()

    def allow_writes(self) -> None:
        """Prepares for user code that may write weights between steps: no transfer reads them, and all copies are out of date.

        Does nothing while a step runs.
        """
        if not self.running:
            self.invalidate()
            self.engine.source.synchronize()

    def pause(self) -> None:
        """Prepares for user code that reads gradients and writes weights, after a backward in manual optimization."""
        engine = self.engine
        self.write_back()
        engine.swap.to_host()
        engine.swap.watch_captured(True)  # the graph of a backward may be kept
        self.invalidate_unused()
        engine.residents.invalidate()

    def hold_host(self) -> None:
        """Puts host parameters into the modules while an optimizer steps inside a step, because the optimizer may read them."""
        engine = self.engine
        # After a backward of a manual step, modules hold host parameters already (`pause`).
        if engine.swap.on_device or (self.running and self.kind is StepKind.MANUAL):
            engine.swap.to_host()
            self._holds_host = self._stepping = True
        # Calls in which the step runs would miss its writes of their weights, so these are noticed.
        engine.swap.watch_captured(False, besides=[layer for layer in engine.residency.used if layer.running_calls])

    def compute_on_host(self, on_host: bool) -> None:
        """Sets whether operations on host parameters run on the host. In backward they do, because gradients are added there.

        Exception: if user code has computed with a host parameter in a step of this run, they run on the device, because hooks
        and checkpoints may compute with the parameter again.
        """
        self.engine.swap.watch_captured(self.running and (not on_host or self.engine.swap.captured_used))

    def await_backward(self, *, seen: bool) -> None:
        """Makes the step end with the next backward, because user code has returned a loss (automatic optimization).

        Args:
            seen: True if user code may read weights and the last step's gradients before that backward. Modules then hold host
                parameters until the backward, because only host parameters have the gradients.
        """
        self.ends_with_backward = True
        if seen:
            self.write_back()
            self.engine.swap.to_host()
            self.engine.source.synchronize()  # user code may also write the weights
            self._holds_host = True

    def resume(self) -> None:
        """Puts device parameters into the modules again after :meth:`hold_host` or :meth:`await_backward`."""
        if self._holds_host and self.running:
            self.activate()

    def show_host(self) -> None:
        """Makes the modules as they are outside a step, until :meth:`go_on`. It may be called in the middle of a step."""
        self.write_back()
        self.engine.swap.to_host()
        self.engine.activations.remove()

    def go_on(self, *, on_device: bool) -> None:
        """Continues a step after :meth:`show_host`. ``on_device``: True if modules held device parameters before."""
        if self.running and self.training:
            self.engine.activations.install()
        if self.running and on_device:
            self.activate()
        self.allow_writes()  # user code follows (on_save_checkpoint)

    def write_back(self, *, rests: bool = False) -> None:
        """Copies every weight that was written on the device back to the host. Releases the layers that no running call uses.

        Args:
            rests: True if layers that rest and were not written may continue to rest.
        """
        engine = self.engine
        engine.residency.release_unpinned()  # a release copies the layer's writes back
        engine.residency.let_rest(rests and engine.residency.rests)
        for layer in engine.residency.used if engine.swap.on_device else ():  # a call of its module is running
            engine.writes.write_back(layer)
        engine.writes.write_back_all(goes_on=self.running)
        engine.residents.write_back()
        # From here on user code may write the host's weights, unseen. So what it has taken is not compared with them any more.
        for layer in engine.layers:
            if layer not in engine.residency.used:
                layer.parameters.exposed.clear()

    # ------------------------------------------------------------------ it ends

    def end(self, *, writes_follow: bool = False, failed: bool = False) -> None:
        """Ends the step: puts the host's parameters back into the modules.

        Args:
            writes_follow: True if user code may write weights next. Then this waits for all transfers that read them. After
                a step without backward, the first use of a weight waits instead, and only used layers are uploaded again.
            failed: True after an error.

        Raises:
            RuntimeError: a weight was written both on the host and on the device.
        """
        engine = self.engine
        # After an error, a weight that was written on the host and on the device raises no second error. Until the next step.
        engine.writes.refuses = not failed
        self.running = self._stepping = False
        self.stream = None
        for layer in engine.layers:
            layer.running_calls = 0  # a call that an error or Ctrl-C has interrupted would keep its layer in use
        try:
            self.write_back(rests=True)
        finally:  # copying writes back may raise
            self._restore_modules()
            if writes_follow and self.training:
                engine.source.synchronize()
            elif writes_follow:
                engine.swap.watch_between()

    def _restore_modules(self) -> None:
        """Puts the host's parameters back, removes what the step has added to modules, and frees memory of the step."""
        engine = self.engine
        engine.swap.to_host()
        engine.swap.watch_captured(False)
        engine.activations.remove()
        engine.activations.flush()
        if self.training:
            engine.swap.take_touched()
            self.invalidate()  # from now on, hooks and optimizers may write weights through .data, which no version shows
        engine.residency.slots.give_back_extra()
