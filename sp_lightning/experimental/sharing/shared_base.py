""":class:`SharedBase`, whose trials share the uploads of the frozen weights that they have in common."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from functools import partial, wraps
from types import AsyncGeneratorType, CoroutineType, GeneratorType
from typing import Any, ParamSpec, TypeVar
from weakref import WeakSet

import lightning.pytorch as pl
import torch
from torch import nn

from sp_lightning.core.device.accelerator import device_for
from sp_lightning.core.device.device import Device
from sp_lightning.core.device.pages import supported
from sp_lightning.core.engine.placement import Placement
from sp_lightning.core.layers.ring import Uploads
from sp_lightning.core.model.found import Found, Layer
from sp_lightning.core.plan.plan import PlannedLayer
from sp_lightning.core.store.block import HostBlock
from sp_lightning.core.torch_compat.patched import scope
from sp_lightning.core.torch_compat.private import tree_leaves
from sp_lightning.experimental.sharing.common import ON_DEVICE, SharedLayers, SharedUploads, TrialBlock
from sp_lightning.experimental.sharing.own import TrialObjects, parts, parts_of_trainer, with_state
from sp_lightning.experimental.sharing.turns import TURNS, TrialTurn
from sp_lightning.trainer.compat import look_at_loaders
from sp_lightning.trainer.options import Options
from sp_lightning.trainer.run_scope import RunScope, set_outside

P = ParamSpec("P")
R = TypeVar("R")


class SharedBase:
    """Several trainings share the uploads of one frozen base, in threads of one process: learning rates, adapters, seeds.

    Each *trial* is a function that makes a module and a Trainer with the strategy ``"superpipeline"`` and one device, and fits,
    validates or predicts. The results of a trial are bit-identical to those of the same run alone, because one trial computes at
    a time. Turns change at uploads of layers and at the beginning of steps, and the random state and settings of the process
    change with them. A trial begins with the random state and the settings that the process has outside of trials.
    ``seed_everything`` in a trial affects only that trial.

    Common weights are found by comparing bytes. The host has one copy of them. While a layer is on the device, one upload serves
    all trials. Weights that a trial trains or writes belong to the trial alone.

    While trials run, no other code of the process may train, draw random numbers or change settings. A trial must not wait for
    code that needs a turn, for example for trials that it starts in a thread: both would wait forever. A warning is logged after
    a minute.

    Args:
        max_trials: the maximum number of trials that run at the same time; further trials wait. None for no limit.
        layers: the number of layers of the base that are on the device at once, in addition to the trials' own windows.

    Raises:
        RuntimeError: this system cannot share memory between trials.
        ValueError: an argument is not an integer of at least 1.

    Example::

        base = SharedBase()

        def run(lr):  # makes all objects that it uses
            trainer = Trainer(strategy=SuperpipelineStrategy(), max_epochs=1)
            trainer.fit(Module(lr), Data())
            return trainer.callback_metrics["loss"]

        losses = base.map(run, [1e-4, 3e-4, 1e-3, 3e-3])
    """

    def __init__(self, max_trials: int | None = None, *, layers: int = ON_DEVICE) -> None:
        if why := supported():
            raise RuntimeError(f"SharedBase cannot be used here: {why}. Run the trials one after the other.")
        _check_counts(max_trials=max_trials, layers=layers)
        self.max_trials = max_trials
        self._common = SharedLayers(layers)
        self._places = nullcontext() if max_trials is None else threading.BoundedSemaphore(max_trials)
        self._under_way = set[Trial]()
        self._computes_on: torch.device | None = None
        # Bytes of free device memory, read once for all trials under way, so that their parts are equal.
        self._free: int | None = None

    @property
    def fetched_bytes(self) -> int:
        """Bytes of the base that were uploaded for several trials together."""
        return self._common.fetched_bytes

    def wrap(self, function: Callable[P, R]) -> Callable[P, R]:
        """Returns a function that runs ``function`` as a trial, for other libraries' threads.

        Example: ``study.optimize(base.wrap(objective), n_jobs=4)``. If a trial returns a generator or a coroutine, a TypeError is
        raised, because the code of the generator would run outside of the trial's turns.
        """

        @wraps(function)
        def run(*args: P.args, **kwargs: P.kwargs) -> R:
            _refuse_inside()
            return self._run(Trial(self, self.max_trials), function, *args, **kwargs)

        return run

    def _run(self, trial: Trial, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        with self._places, ExitStack() as ends:  # runs all callbacks, in reverse order, even if one of them raises
            TURNS.begin(trial.turn)
            ends.callback(TURNS.end, trial.turn)
            self._under_way.add(trial)
            ends.callback(self._leave, trial)
            ends.callback(scope.reset, scope.set(trial))
            ends.callback(trial.close)
            # So the trial's thread runs its backward. Otherwise one thread of autograd would run the backward of all trials on an
            # accelerator, and could not change turns.
            with torch.autograd.set_multithreading_enabled(False):
                result = function(*args, **kwargs)
            if isinstance(result, (GeneratorType, AsyncGeneratorType, CoroutineType)):
                raise TypeError(f"{function!r} returns a {type(result).__name__}. A trial returns results.")
            return result

    def _leave(self, trial: Trial) -> None:
        """Ends a trial. After the last one, frees the common layers' device memory."""
        self._under_way.remove(trial)
        if not self._under_way:
            self._free = None
            self._common.free()

    def map(
        self,
        function: Callable[..., R],
        *arguments: Iterable[Any],
        return_exceptions: bool = False,
    ) -> list[Any]:
        """Calls a function with each of some arguments, as the builtin ``map`` does. Each call is a trial in a thread.

        Args:
            function: the function to run as trials.
            arguments: an iterable for each argument of the function. All iterables have the same length.
            return_exceptions: True to return errors in place of results. Otherwise the first error is raised after all trials
                have ended.

        Returns:
            The results, in the order of the arguments.

        Raises:
            ValueError: the iterables differ in length.
            RuntimeError: called inside a trial.
        """
        _refuse_inside()
        calls = list(zip(*arguments, strict=True))
        at_once = max(1, len(calls) if self.max_trials is None else min(self.max_trials, len(calls)))
        trials = [Trial(self, at_once) for _ in calls]
        with ThreadPoolExecutor(at_once, "superpipeline-trial") as pool:
            each_with = zip(trials, calls, strict=True)
            futures = [pool.submit(self._run, trial, function, *call) for trial, call in each_with]
            try:
                errors = [each.exception() for each in futures]
            # Ctrl-C: a running trial ends at its next upload or step, and other trials do not begin.
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                for trial in trials:
                    trial.turn.error = CancelledError("The trials are ended: who waits for them was interrupted.")
                raise
        for error, call in zip(errors, calls, strict=True):
            if error is not None:
                error.add_note(f"A trial of a SharedBase has raised this, with {', '.join(map(_shown, call))}.")
        if not return_exceptions:
            return [each.result() for each in futures]
        return [each.result() if error is None else error for error, each in zip(errors, futures, strict=True)]


def _shown(argument: Any) -> str:
    try:
        return repr(argument)
    except Exception:  # an error of the argument's `__repr__` must not hide the trial's error
        return f"a {type(argument).__name__}"


def _check_counts(**counts: int | None) -> None:
    for name, value in counts.items():
        if value is not None and (type(value) is not int or value < 1):
            raise ValueError(f"{name} is {repr(value)[:40]}; it has to be a number of at least 1 (no base is passed).")


_APART = "Leave that out, or run the trials one after the other, without base.map or base.wrap."


def _refuse_inside() -> None:
    if current() is not None:
        raise RuntimeError(
            "A trial of a SharedBase was started inside another trial. Expected trials one beside the other: "
            "base.map(trial, settings)."
        )


class Trial(Placement, RunScope):
    """One trial: the scope of its runs, which follow one another, and the placement that makes the parts of their engines.

    Args:
        base: the base.
        at_once: the maximum number of trials that are under way at the same time; None if the number is not known.

    Attributes:
        turn: the trial's turn.
        own: the objects that no other trial may have.
    """

    shares_base = True

    def __init__(self, base: SharedBase, at_once: int | None) -> None:
        super().__init__()
        self.placement = self
        self.turn = TrialTurn(base._common.there)
        self.own = TrialObjects()
        self._base = base
        self._at_once = at_once
        self._runs = WeakSet[Any]()
        self._blocks: list[TrialBlock] = []
        self._shares = False  # True after a run of the trial had weights in common with the base

    def check_devices(self) -> None:
        raise ValueError(f"A SharedBase is for devices=1 and num_nodes=1, and this trainer has more. {_APART}")

    def check_strategy(self, made_in: Any) -> None:
        if made_in is not self:
            raise RuntimeError(
                "A trial of a SharedBase uses a Trainer or a strategy that was made outside of it. Make both in the trial: they "
                "have the state of one run."
            )

    def take_trainer(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self.take([*parts(module), *parts_of_trainer(trainer)])
        self.own.note_trainer(trainer, module)

    def begin(self, run: Any, options: Options, device: torch.device) -> int | float | None:
        """Begins a run. If the user has not set ``gpu_memory``, returns an equal part of the free device memory for each trial.

        Also turns the progress bar off, and records the data loaders when they are iterated.

        Raises:
            ValueError: an option is not supported in trials, trials use different devices, or a part of the device memory has to
                be chosen and the number of trials is not known.
        """
        base = self._base
        if base._computes_on not in (None, device):
            raise ValueError(
                f"All trials of a SharedBase compute on one device: this one on {device}, an earlier one on {base._computes_on}. "
                "Use a SharedBase for each device."
            )
        base._computes_on = device
        if options.disk is not None:
            raise ValueError(f"disk= keeps weights where a SharedBase does not look for them. {_APART}")
        if options.gpu_layers:
            raise ValueError(
                f"gpu_layers={options.gpu_layers} keeps layers of one run in GPU memory. Trials of a SharedBase share them: "
                "leave it out."
            )
        trainer = run.module.trainer
        if trainer.progress_bar_callback is not None:  # several bars in one terminal are unreadable, and Rich raises
            trainer.progress_bar_callback.disable()
        self._runs.add(run)  # if an error leaves the run open, `close` closes it at the end of the trial
        budget = options.gpu_memory
        if budget is None and device.type != "cpu":
            budget = self._share(device)
        look_at_loaders(trainer, self.take_loaders)
        return budget

    def _share(self, device: torch.device) -> int | None:
        """Returns the bytes of device memory for this trial; None for a trial that runs alone, which may use all free memory."""
        if self._at_once is None:
            raise ValueError(
                "Trials share the device's memory, and it is not known how many there will be. Say how many run at once, "
                'SharedBase(max_trials=4), or give each a part: SuperpipelineStrategy(gpu_memory="8GiB").'
            )
        if self._base._free is None:
            self._base._free = device_for(device).free_bytes()
        free = self._base._free
        # 1 + …: the layers of the base get a part as well.
        return None if free is None or self._at_once == 1 else free // (1 + self._at_once)

    def take(self, things: Iterable[tuple[str, Any]]) -> None:
        """Records objects of this trial.

        Args:
            things: the objects, each with its place in words, for messages.

        Raises:
            RuntimeError: another trial that is under way has one of the objects.
        """
        self.own.take(things, [each.own for each in self._base._under_way if each is not self])

    def take_loaders(self, name: str, loaders: Any) -> None:
        """Records the parts of loaders that have a state, before the loaders are iterated.

        Args:
            name: the name of the hook that has returned the loaders.
            loaders: the loaders, possibly nested.
        """
        self.take((f"a part of {name}", each) for loader in tree_leaves(loaders) for each in with_state(loader))

    def step_begins(self) -> None:
        """Lets other trials have their turns. Without this, a trial whose layers are all on the device would keep its turn."""
        TURNS.pass_on(self.turn, self)  # waits as if for a layer that is not on the device: the trial is not a layer

    def close(self) -> None:
        """Closes runs that an error left open."""
        for run in list(self._runs):
            if getattr(run, "streamer", None) is not None:
                run.close()

    def finds(self, module: nn.Module, find: Callable[..., Found]) -> Callable[..., Found]:
        """Returns a function that finds the layers, and puts the frozen weights of each layer first.

        The layout of the frozen weights is then the same for all trials, whatever adapters they train. Also records the modules,
        parameters and buffers of the module.

        Raises:
            RuntimeError: another trial has a module, a parameter or a buffer of the module.
        """
        self.take(parts(module))

        def found(**how: Any) -> Found:
            plain = find(**how)
            layers = tuple(map(_frozen_first, plain.layers))
            return replace(plain, layers=layers, residents=_frozen_first(plain.residents))

        return found

    def block(self, layer: Layer, planned: PlannedLayer, *args: Any, **options: Any) -> HostBlock:
        frozen = sum(not parameter.requires_grad for _, parameter in layer.parameters)
        if not frozen:
            return super().block(layer, planned, *args, **options)
        pin = options["pin"] and not options.get("fetched_seldom")
        shared = self._base._common.layer(planned, frozen, args[0], pin=pin)
        self._blocks.append(TrialBlock(shared, layer, planned, *args, **options))
        return self._blocks[-1]

    def uploads(self, device: Device, log: logging.Logger | None) -> Uploads:
        blocks, self._blocks = self._blocks, []
        # A later run of the trial may train all weights, which is not an error.
        self._shares = self._shares or any(block.common_bytes for block in blocks)
        if not self._shares:
            what = "its frozen weights are others than those of the trial before it" if blocks else "it has none"
            raise ValueError(
                f"This trial has no frozen weights in common with others: {what}. Freeze the base (requires_grad_(False)) and "
                "load the same one in each trial, or run it outside of the SharedBase."
            )
        self.turn.log = log or self.turn.log
        others = [trial.turn.device for trial in self._base._under_way if trial is not self]
        self.turn.device = device
        device.begin_turn(sum(each.held for each in others if each is not None))
        base = self._base
        return SharedUploads(device, base._common, partial(TURNS.pass_on, self.turn), lambda: len(base._under_way) == 1)


class OutsideTrials(RunScope):
    """The scope of all threads without a trial. While trials are under way, no trainer may be used in it."""

    def take_trainer(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        TURNS.refuse_beside(trainer)


set_outside(OutsideTrials())


def _frozen_first(layer: Layer) -> Layer:
    """Returns a layer with its frozen parameters first, otherwise in the same order."""
    first: Any = partial(sorted, key=lambda named: named[1].requires_grad)
    return replace(layer, parameters=tuple(first(layer.parameters)), lowered=tuple(first(layer.lowered)))


def current() -> Trial | None:
    """Returns the trial that this thread runs; None outside of trials."""
    return scope.get()
