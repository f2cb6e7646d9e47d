"""The strategy's methods that Lightning's loops call during a run, and the methods with which users read plan and counters.

Two classes between :class:`~sp_lightning.trainer.host_strategy.HostStrategy` and the strategy itself: ``ReadableStrategy`` keeps
the run and its results, and ``LoopStrategy`` calls the run in each hook of Lightning.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor

from sp_lightning.core.device.device import Device
from sp_lightning.core.device.stats import Stats
from sp_lightning.core.messages import BEING_UPDATED, not_whole
from sp_lightning.core.plan.choices import Mode
from sp_lightning.core.plan.ledger import Ledger
from sp_lightning.core.plan.plan import Plan
from sp_lightning.core.updates.clipping import norm_of_all
from sp_lightning.trainer.compat import last_checkpoint
from sp_lightning.trainer.host_strategy import HostStrategy
from sp_lightning.trainer.options import Options, autocast_dtype
from sp_lightning.trainer.run import Results, Run
from sp_lightning.trainer.signals import DeferredSignals


class ReadableStrategy(HostStrategy):
    """A strategy with the plan and the counters of the present run, or of the last one.

    Args:
        options: the user's options.
        args: the arguments of :class:`~sp_lightning.trainer.host_strategy.HostStrategy`.
    """

    def __init__(self, options: Options, *args: Any) -> None:
        self._options = options
        self._run: Run | None = None  # the present run
        # What remains of the last run:
        self._last: Results | None = None
        self._ledger: Ledger | None = None
        self._remarks: list[str] = []
        self._said: set[str] = set()  # lines that earlier runs logged when they began, and that are not logged again
        self._signals = DeferredSignals()
        super().__init__(*args)

    def _close(self) -> None:
        """Ends the run, if there is one. Its plan and counters stay readable.

        Called at teardown, before another run begins, and after errors that end the run.
        """
        run = self._run
        if run is None:
            return
        try:
            if run.engine_or_none is not None:  # otherwise building the engine again has failed
                # Counted now, when the size of the optimizers' state is known.
                self._ledger = run.steps.ledger or self._ledger
                self._remarks = run.remarks()
        finally:
            try:
                run.close()
            finally:
                self._run, self._last = None, run.results

    def __getstate__(self) -> dict[str, Any]:
        """Leaves out the run, because an engine cannot be pickled. A copy is a strategy whose run has ended."""
        return {**super().__getstate__(), "_run": None, "_last": self._known}

    @property
    def plan(self) -> Plan:
        """The plan of the run: layers, k, k', memory, and how layers are updated. Available from set-up on.

        Raises:
            RuntimeError: before set-up.
        """
        return self._results("plan").plan

    @property
    def activations(self) -> dict[str, Mode]:
        """The mode of activations of each layer, and of each part that stays on the device, by name.

        If ``"auto"`` has offloaded activations of a layer, its mode is ``"offload"``. The mapping can be given
        as ``activations=`` to another strategy.

        Raises:
            RuntimeError: before set-up.
        """
        return self._results("activations").activations

    @property
    def ledger(self) -> Ledger:
        """Host memory and traffic of training, now or at the end of the last ``trainer.fit``.

        Raises:
            RuntimeError: before the set-up of the first ``trainer.fit``.
        """
        if self._run is not None:
            self._ledger = self._run.steps.ledger or self._ledger
        if self._ledger is None:
            raise RuntimeError("No ledger: only trainer.fit has optimizers.")
        return self._ledger

    def stats(self) -> Stats:
        """Returns counters since the last set-up, which may be a new one in a run (a parameter was exchanged).

        They can also be read after the run.

        Raises:
            RuntimeError: before set-up.
        """
        return self._results("counters").stats.copy()

    def fetches(self) -> dict[str, int]:
        """Returns how often each layer was fetched since the last set-up, by name: for example, which experts were used.

        Raises:
            RuntimeError: before set-up.
        """
        return self.stats().fetches

    def _results(self, what: str) -> Results:
        """Returns the results of the present or the last run.

        Args:
            what: the name of the value that the user asks for, for the error.

        Raises:
            RuntimeError: there was no run yet.
        """
        if (known := self._known) is None:
            raise RuntimeError(
                f"This strategy has no {what} yet: a run begins in trainer.fit (validate, test, predict)."
            )
        return known

    @property
    def _known(self) -> Results | None:
        run = self._run  # read once: another thread may call this while the run ends
        return self._last if run is None else run.results

    @property
    def gpu_memory(self) -> int | float | None:
        """The limit of GPU memory: bytes, a share of the free memory, or None. It may be set between two batches.

        The engine is then built again, and the run measures two batches anew, as at its beginning.

        Raises:
            ValueError, TypeError: no such value is possible, or the model does not fit. The former limit stays.
            RuntimeError: a step runs, or several devices train.
        """
        return self._options.gpu_memory

    @gpu_memory.setter
    def gpu_memory(self, value: int | float | str | None) -> None:
        options = self._options.but("gpu_memory", value)
        if self._run is not None:
            self._run.change_gpu_memory(options.gpu_memory)
        self._options = options

    def gpu_released(self) -> AbstractContextManager[int]:
        """A context between two batches in which other code can use the GPU's memory, for example an engine that generates.

        Weights, buffers and optimizer state leave the GPU, with the layers that stay there. They return afterwards, each when it
        is needed, and results do not change. Tensors of your code stay where they are. In the context, a call of a module uploads
        its layers; but buffers and layers of ``gpu_layers`` are on the CPU, so that a call that uses them raises torch's error.

        ``with strategy.gpu_released() as staying`` gives the bytes of weights that stay: those whose memory your tensors view.

        Raises:
            RuntimeError: a step runs, the GPU is released already, or several devices train.
            torch.OutOfMemoryError: at the end of the context, other code still has the memory.
        """
        return nullcontext(0) if self._run is None else self._run.gpu_released()

    def gradient_norm(self, norm_type: float = 2.0) -> Tensor:
        """Returns the norm of all gradients of the module together, as ``torch.nn.utils.get_total_norm`` computes it.

        With several devices, call it in all processes. It copies no gradient to another process, unlike code that reads each
        ``param.grad``.

        Args:
            norm_type: the kind of the norm: 2, 1, ``float("inf")`` or another positive number.

        Returns:
            A tensor without dimensions, on the CPU; 0 if the module has no gradients.

        Raises:
            RuntimeError: no run trains the module, or gradients were freed (``optimizer_overlap="backward"``).
            ValueError: ``norm_type`` is not positive.
        """
        if norm_type <= 0:
            raise ValueError(f"gradient_norm needs a positive norm_type, and got {norm_type}.")
        if self._run is None:
            raise RuntimeError("This strategy has no gradients: call gradient_norm within trainer.fit, after backward.")
        return norm_of_all(list(self._run.module.parameters()), self._run.engine, norm_type)

    def gradients_are_finite(self) -> bool:
        """Returns True if no gradient of the module has an infinite element or a NaN. Otherwise as :meth:`gradient_norm`."""
        return bool(self.gradient_norm(float("inf")).isfinite())

    def remarks(self) -> list[str]:
        """Returns sentences for the user about this run, which are logged with the plan."""
        return self._remarks if self._run is None else self._run.remarks()

    def _describe(self) -> tuple[str, str]:
        """Returns the plan of the present run in one line, with the remarks, and as a table."""
        assert self._run is not None
        return self._run.describe()

    def _step_advice(self, seconds: float) -> str:
        """Returns options with which optimizer steps could be faster, in sentences, after a run of some seconds; may be empty."""
        return "" if self._run is None else self._run.steps.advice(seconds)

    @property
    def _device_memory(self) -> tuple[int, int] | None:
        """The peak of device memory and its limit, in bytes; None on the CPU, and outside of a run."""
        return None if self._run is None else self._run.device_memory

    @property
    def _computing_device(self) -> Device | None:
        """The device of the present run, which records timelines."""
        return None if self._run is None else self._run.engine.device


class LoopStrategy(ReadableStrategy):
    """A strategy with an engine during a run. A run is training with its validation, or another loop alone.

    Outside of a run (``self._run`` is None), all methods behave as Lightning's methods of the same name.
    """

    # ------------------------------------------------------------------ a run begins and ends

    def model_to_device(self) -> None:
        """Begins a run: moves parameters to the host store, and everything else to the device. Ends an earlier run first."""
        module, options = self.lightning_module, self._options
        assert module is not None
        self._close()
        autocast = autocast_dtype(self.precision_plugin)
        self._group.check_model(module, options, self.precision_plugin)
        trains = module.trainer.state.fn == TrainerFn.FITTING
        self._run = Run(module, options, self.root_device, autocast, self._group, self.log, trains, module.trainer)
        self._group.send_buffers(module)

    def _fitting_begins(self) -> None:
        """Calls :meth:`Run.training_begins` at the end of set-up, before the optimizer state of a checkpoint is loaded.

        Raises:
            ValueError: ranks have different optimizers.
        """
        assert self._run is not None
        self._group.check_optimizers(self.optimizers)
        self._run.training_begins()

    def on_exception(self, exception: BaseException) -> None:
        self._signals.install()  # user code or Lightning may have set handlers since the last batch
        # If another process received Ctrl-C first, this process may still have deferred its own signal.
        if isinstance(exception, KeyboardInterrupt):
            self._signals.drop(signal.SIGINT)
        self._group.fail(exception)  # so that no other process waits for this one
        if self._run is not None:
            self._run.abort()
            self._run.note_places(exception)
        super().on_exception(exception)

    # ------------------------------------------------------------------ loops

    def on_train_start(self) -> None:
        self._loop_begins("train")

    def on_train_end(self) -> None:
        self._signals.run_deferred()
        if self._run is not None:
            self._run.finish_updates()
            self._run.placement.leave()

    def on_validation_start(self) -> None:
        self._loop_begins("validate")

    def on_test_start(self) -> None:
        self._loop_begins("test")

    def on_predict_start(self) -> None:
        self._loop_begins("predict")

    def _loop_begins(self, phase: str) -> None:
        """Prepares for a loop's first batch. Called for each loop, also for validation within training.

        User code has run since set-up (for example ``on_fit_start``) or since the last loop. So earlier answers are dropped:
        which hooks may write weights (determined again at the next use), and how optimizers step (decided again now, in
        training). Signal handlers that were set in the meantime, for example Lightning's own, are deferred from now on.

        Args:
            phase: the loop: "train", "validate", "test" or "predict".

        Raises:
            ValueError: an option asks for a mode of updates that has become impossible.
            BaseException: a deferred signal handler raised.
        """
        if self._run is None:
            return
        self._signals.run_deferred()
        self._signals.install()
        self._run.hooks.loop_starts()
        self._group.note_place(f"the beginning of the loop {phase!r}")
        if phase == "train":
            self._run.steps.decide_again()
        if phase == "validate":
            self._run.tuner.stop_timing()  # validation does not count as part of the previous training batch

    # ------------------------------------------------------------------ batches

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Adapts the engine to this batch, and prefetches its first layers.

        Lightning calls it after the hooks of callbacks and module. The training step follows, often in an optimizer's closure.
        """
        super().on_train_batch_start(batch, batch_idx)
        if self._run is not None:
            self._group.note_place(f"batch {batch_idx} of epoch {self._run.module.current_epoch}")
            self._batch_starts(self._run, "train", batch)
            if not self._run.hooks.may_write_before_training_step():
                with self._run.whole_after_failure():  # a fetch raises the error of an update in the background
                    self._run.engine.prefetch_for("train", training=True)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._step("train", super().training_step, *args, **kwargs)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._step("validate", super().validation_step, *args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._step("test", super().test_step, *args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._step("predict", super().predict_step, *args, **kwargs)

    def _step(self, phase: str, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Runs Lightning's step of a batch, with the engine streaming layers (:meth:`Run.step`).

        If user code calls this outside of a run, the step runs with the weights in host memory.

        Args:
            phase: the loop: "train", "validate", "test" or "predict".
            step: Lightning's method.
            args: its positional arguments: the batch and its indices.
            kwargs: its other arguments.

        Raises:
            RuntimeError: outside of a run, only some weights have the values of the last step.
        """
        run = self._run
        if run is None:
            self._refuse_partially_updated()
            return step(*args, **kwargs)  # outside of a run: the weights are in host memory
        training = phase == "train"
        if not training:  # in training, ``on_train_batch_start`` has called it
            self._batch_starts(run, phase, args)
        return run.step(phase, partial(step, *args, **kwargs), ends_with_backward=training and run.automatic)

    def _refuse_partially_updated(self) -> None:
        """Raises a RuntimeError if only some weights have the values of the last step. Called before user code gets weights.

        If an error is being handled, also ends the run: Lightning does not call teardown if saving a checkpoint then fails.
        """
        partly = None if self._known is None else self._known.partially_updated
        if partly is None:
            return
        if self._run is not None and self._run.is_foreign:
            raise RuntimeError(BEING_UPDATED)
        if sys.exception() is not None:
            self._close()
            self._signals.remove()
        assert self.lightning_module is not None
        raise RuntimeError(not_whole(partly, last_checkpoint(self.lightning_module.trainer)))

    def _batch_starts(self, run: Run, phase: str, batch: Any) -> None:
        """Adapts the engine to changes of the module since the last batch, and lets the tuner change k and activations.

        Before that, runs deferred signal handlers, and replaces handlers that were set since the last batch.

        Args:
            run: the present run. It is ended if building its engine again fails.
            phase: the loop: "train", "validate", "test" or "predict".
            batch: the batch, whose size the tuner compares with earlier batches.

        Raises:
            BaseException: a deferred signal handler raised, or the engine cannot be built again.
        """
        self._signals.run_deferred()
        self._signals.install()  # user code may have set handlers
        try:
            run.batch_starts(phase, batch)
        except BaseException:
            if run.engine_or_none is None:  # building the engine again has failed
                self._close()
            raise

    def pre_backward(self, closure_loss: Tensor) -> None:
        super().pre_backward(closure_loss)
        if self._run is not None:
            quiet = not self._run.hooks.may_write_weights("backward")
            self._run.engine.announce_backward(closure_loss, quiet=quiet)

    def post_backward(self, closure_loss: Tensor) -> None:
        super().post_backward(closure_loss)
        if self._run is not None:
            # A module may override ``backward`` and compute none. After a backward, the step has ended, and this has no effect.
            self._run.engine.end_without_backward()

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], *args: Any, **kwargs: Any) -> Any:
        step = super().optimizer_step
        if self._run is None:
            return step(optimizer, closure, *args, **kwargs)
        return self._run.steps.run(
            optimizer, closure, lambda closed: step(optimizer, closed, *args, **kwargs), self.precision_plugin
        )

    def _expect_next_batch(self) -> None:
        """Prefetches the first layers of the next batch. No-op if hooks may write weights before that batch.

        The callback calls this after a training batch, so that uploads overlap with loading the next batch.
        """
        if self._run is not None and not self._run.hooks.may_write_weights("train"):
            with self._run.whole_after_failure():
                self._run.engine.prefetch_for("train", training=True)
