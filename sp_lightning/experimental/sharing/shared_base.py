""":class:`SharedBase`, whose trials share the uploads of its frozen weights."""

from __future__ import annotations

import reprlib
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from functools import wraps
from types import AsyncGeneratorType, CoroutineType, GeneratorType
from typing import Any, ParamSpec, TypeVar
from weakref import WeakSet

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from sp_lightning.core.device.accelerator import device_for
from sp_lightning.core.engine.engine import Engine
from sp_lightning.core.engine.placement import Placement
from sp_lightning.core.model.found import Found, Layer
from sp_lightning.core.plan.plan import PlannedLayer
from sp_lightning.core.store.block import HostBlock
from sp_lightning.core.torch_compat.patched import scope
from sp_lightning.core.torch_compat.private import tree_leaves
from sp_lightning.core.weights.ring import Uploads
from sp_lightning.experimental.sharing.common import ON_DEVICE, BaseWeights, OnDevice, SharedUploads, TrialBlock
from sp_lightning.experimental.sharing.own import parts, parts_of_trainer, with_state
from sp_lightning.experimental.sharing.turns import TURNS, TrialTurn
from sp_lightning.trainer.compat import look_at_loaders
from sp_lightning.trainer.options import Options
from sp_lightning.trainer.run_scope import RunScope, set_outside

P = ParamSpec("P")
R = TypeVar("R")


class SharedBase:
    """Several trainings share the uploads of one frozen base, in threads of one process: learning rates, adapters, seeds.

    Each *trial* is a function that takes a copy of the model (:meth:`copy`), makes a Trainer with the strategy
    ``"superpipeline"`` and one device, and fits, validates or predicts. The results of a trial are bit-identical to those of the
    same run alone, because one trial computes at a time. Turns change at uploads of layers and at the beginning of steps, and the
    random state changes with them. A trial begins with the random state that the process has outside of trials.
    ``seed_everything`` in a trial affects only that trial.

    The frozen weights of all copies are in one memory. While a layer is on the device, one upload serves all trials. Weights that
    a trial unfreezes or replaces before its run belong to the trial alone. If a trial writes a frozen weight of the base, or
    changes a setting of the process, all trials that are under way raise an error that names it.

    While trials run, no other code of the process may train, draw random numbers or change settings. A trial must not wait for
    code that needs a turn, for example for trials that it starts in a thread: both would wait forever. A warning is logged after
    a minute.

    Args:
        model: the module with the frozen weights: a LightningModule or a part of one. Its frozen parameters are moved to other
            memory on the CPU.
        max_trials: the maximum number of trials that run at the same time; further trials wait. None for no limit.
        layers: the number of layers of the base that are on the device at once, in addition to the trials' own windows.

    Raises:
        TypeError: ``model`` is not a module.
        ValueError: the model has no frozen weights, or an argument is not an integer of at least 1.

    Example::

        base = SharedBase(model)

        def run(lr):  # makes all objects that it uses
            module = base.copy()
            module.lr = lr
            trainer = Trainer(strategy=SuperpipelineStrategy(), max_epochs=1)
            trainer.fit(module, Data())
            return trainer.callback_metrics["loss"]

        losses = base.map(run, [1e-4, 3e-4, 1e-3, 3e-3])
    """

    def __init__(
        self, model: nn.Module | None = None, max_trials: int | None = None, *, layers: int = ON_DEVICE
    ) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(
                f"SharedBase needs the model with the frozen weights, and got {repr(model)[:40]}. Write SharedBase(model), and "
                "in each trial module = base.copy() in place of copy.deepcopy(model)."
            )
        for name, value in (("max_trials", 1 if max_trials is None else max_trials), ("layers", layers)):
            if type(value) is not int or value < 1:
                raise ValueError(f"{name} is {repr(value)[:40]}. Expected a number of at least 1.")
        self.max_trials = max_trials
        self.weights = BaseWeights(model)
        self.on_device = OnDevice(layers)
        self.under_way = set[Trial]()
        # By their id, objects that belong to one of these trials. They live as long, so that no other object gets the id.
        self.owners: dict[int, tuple[Any, Trial]] = {}
        self.computes_on: torch.device | None = None
        # Bytes of free device memory, read once for all trials under way, so that their parts are equal.
        self.free_bytes: int | None = None
        self._places = nullcontext() if max_trials is None else threading.BoundedSemaphore(max_trials)

    @property
    def fetched_bytes(self) -> int:
        """Bytes of the base that were uploaded for several trials together."""
        return self.on_device.fetched_bytes

    def copy(self) -> Any:
        """Returns a copy of the model for one trial. Its frozen weights are new parameters over the memory of the base.

        Raises:
            RuntimeError: a frozen weight of the base was written outside of trials. In trials, the end of each trial checks this.
        """
        if current() is None:
            self._check_digests()
        return self.weights.copy_of_model()

    def wrap(self, function: Callable[P, R]) -> Callable[P, R]:
        """Returns a function that runs ``function`` as a trial, for other libraries' threads.

        Example: ``study.optimize(base.wrap(objective), n_jobs=4)``. If a trial returns a generator or a coroutine, a TypeError is
        raised, because the code of the generator would run outside of the trial's turns.
        """

        @wraps(function)
        def run(*args: P.args, **kwargs: P.kwargs) -> R:
            return self._run(Trial(self, self.max_trials, function, args), function, *args, **kwargs)

        return run

    def _run(self, trial: Trial, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        with self._places, ExitStack() as ends:  # runs all callbacks, in reverse order, even if one of them raises
            TURNS.begin(trial.turn)
            ends.callback(TURNS.end, trial.turn)
            self.under_way.add(trial)
            ends.callback(self._leave, trial)
            ends.callback(TURNS.check, trial.turn)
            ends.callback(self._check_digests, trial)
            ends.callback(trial.check)
            ends.callback(scope.reset, scope.set(trial))
            ends.callback(trial.close)
            # So the trial's thread runs its backward. Otherwise one thread of autograd would run the backward of all trials on an
            # accelerator, and could not change turns.
            with torch.autograd.set_multithreading_enabled(False), torch.set_grad_enabled(trial.grad_enabled):
                result = function(*args, **kwargs)
            if isinstance(result, (GeneratorType, AsyncGeneratorType, CoroutineType)):
                raise TypeError(f"{function!r} returns a {type(result).__name__}. A trial returns results.")
            return result

    def _check_digests(self, ends: Trial | None = None) -> None:
        """Checks that no weight of the base was written in a way that no version shows: at the end of a trial, ``ends``, and
        before a copy outside of trials."""
        names = [each.name for each in sorted(self.under_way, key=lambda each: each is not ends)]
        self.weights.check(" or ".join([*names, "code outside of trials"]))

    def _leave(self, trial: Trial) -> None:
        """Ends a trial. After the last one, frees the common layers' device memory."""
        self.under_way.remove(trial)
        self.owners = {key: owned for key, owned in self.owners.items() if owned[1] is not trial}
        if not self.under_way:
            self.free_bytes = None
            self.on_device.free()

    def map(self, function: Callable[..., R], *arguments: Iterable[Any], return_exceptions: bool = False) -> list[Any]:
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
        calls = list(zip(*arguments, strict=True))
        at_once = max(1, len(calls) if self.max_trials is None else min(self.max_trials, len(calls)))
        trials = [Trial(self, at_once, function, call) for call in calls]
        with ThreadPoolExecutor(at_once, "superpipeline-trial") as pool:
            futures = [pool.submit(self._run, trial, function, *trial.arguments) for trial in trials]
            try:
                errors = [each.exception() for each in futures]
            # Ctrl-C: a running trial ends at its next upload or step, and other trials do not begin.
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                for trial in trials:
                    trial.turn.error = CancelledError("The trials are ended: who waits for them was interrupted.")
                raise
        for trial, error in zip(trials, errors, strict=True):
            if error is not None:
                error.add_note(f"This was raised by {trial.name} of a SharedBase.")
        if not return_exceptions:
            return [each.result() for each in futures]
        return [each.result() if error is None else error for error, each in zip(errors, futures, strict=True)]


_APART = "Leave that out, or run the trials one after the other, without base.map or base.wrap."


class Trial(Placement, RunScope):
    """One trial: the scope of its runs, which follow one another, and the placement that makes the parts of their engines.

    Args:
        base: the base.
        at_once: the maximum number of trials that are under way at the same time; None if the number is not known.
        function, arguments: the call that is the trial.

    Attributes:
        base, arguments: the arguments.
        name: the trial, for errors.
        grad_enabled: True if gradients were enabled where the trial was called.
        turn: the trial's turn.
        trainers: modules and data modules of the trial, each with its trainer.
    """

    shares_base = True

    def __init__(
        self, base: SharedBase, at_once: int | None, function: Callable[..., Any], arguments: tuple[Any, ...]
    ) -> None:
        super().__init__()
        if current() is not None:
            raise RuntimeError(
                "A trial of a SharedBase was started inside another one. Use one base.map(trial, settings)."
            )
        self.placement = self
        self.base, self.arguments = base, arguments
        self.name = f"the trial {getattr(function, '__name__', 'run')}({', '.join(map(reprlib.repr, arguments))})"
        self.grad_enabled = torch.is_grad_enabled()
        self.turn = TrialTurn(base.on_device.has, base.weights.refuse_written)
        self.trainers: list[tuple[Any, pl.Trainer]] = []
        self._at_once = at_once
        self._runs = WeakSet[Any]()
        self._blocks: list[TrialBlock] = []
        self._shares = False  # True after a run of the trial had weights of the base

    def check_devices(self) -> None:
        raise ValueError(f"A SharedBase is for devices=1 and num_nodes=1, and this trainer has more. {_APART}")

    def check_strategy(self, made_in: Any) -> None:
        if made_in is not self:
            raise RuntimeError(
                "A trial of a SharedBase uses a Trainer or a strategy that was made outside of it. Make both in the "
                "trial's function."
            )

    def take_trainer(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self.take([*parts(module), *parts_of_trainer(trainer)])
        with_trainer = (module, getattr(trainer, "datamodule", None))
        self.trainers += [(each, trainer) for each in with_trainer if each is not None]

    def begin(self, run: Any, options: Options, device: torch.device) -> int | float | None:
        """Begins a run. If the user has not set ``gpu_memory``, returns an equal part of the free device memory for each trial.

        Also turns the progress bar off, and records the data loaders when they are iterated.

        Raises:
            ValueError: an option is not supported in trials, trials use different devices, or a part of the device memory has to
                be chosen and the number of trials is not known.
        """
        before = self.base.computes_on = self.base.computes_on or device
        if before != device:
            raise ValueError(
                f"All trials of a SharedBase compute on one device: this one on {device}, an earlier one on {before}. "
                "Use a SharedBase for each device."
            )
        for name, value in (("disk", options.disk), ("gpu_layers", options.gpu_layers)):
            if value:
                raise ValueError(f"{name}={value!r} is not supported in trials of a SharedBase. {_APART}")
        trainer = run.module.trainer
        if trainer.progress_bar_callback is not None:  # several bars in one terminal are unreadable, and Rich raises
            trainer.progress_bar_callback.disable()
        self._runs.add(run)  # if an error leaves the run open, `close` closes it at the end of the trial
        look_at_loaders(trainer, self.take_loaders)
        budget = options.gpu_memory
        return self._part(device) if budget is None and device.type != "cpu" else budget

    def _part(self, device: torch.device) -> int | None:
        """Returns the bytes of device memory for this trial; None for a trial that runs alone, which may use all free memory."""
        if self._at_once is None:
            raise ValueError(
                "Trials share the device's memory, and it is not known how many there will be. Say how many run at once, "
                'SharedBase(model, max_trials=4), or give each a part: SuperpipelineStrategy(gpu_memory="8GiB").'
            )
        if self.base.free_bytes is None:
            self.base.free_bytes = device_for(device).free_bytes()
        free = self.base.free_bytes
        # 1 + …: the layers of the base get a part as well.
        return None if free is None or self._at_once == 1 else free // (1 + self._at_once)

    def take(self, things: Iterable[tuple[str, Any]]) -> None:
        """Records objects of this trial, each with its place in words. Equal objects may belong to other trials.

        For a plain tensor (a buffer), records its storage, because several tensors may view one storage.

        Raises:
            RuntimeError: another trial that is under way has one of the objects.
        """
        for place, thing in things:
            held = thing.untyped_storage() if type(thing) is Tensor and thing.layout is torch.strided else thing
            _, owner = self.base.owners.setdefault(id(held), (held, self))
            if owner is not self:
                for module, trainer in owner.trainers:  # Lightning has set it to the trainer of the refused trial
                    module.trainer = trainer
                raise RuntimeError(
                    f"A {type(thing).__name__} is in two trials of a SharedBase at once: {place}. Make it or copy it in each "
                    "trial: base.copy(), copy.deepcopy, or .clone() of a tensor. Modules, data modules, callbacks, loggers, "
                    "profilers, and loaders with a state belong to one trial."
                )

    def take_loaders(self, name: str, loaders: Any) -> None:
        """Records the parts of loaders that have a state, before the loaders are iterated. ``name``: their hook's name."""
        self.take((f"a part of {name}", each) for loader in tree_leaves(loaders) for each in with_state(loader))

    def step_begins(self) -> None:
        """Lets other trials have their turns. Without this, a trial whose layers are all on the device would keep its turn."""
        self.check()
        TURNS.pass_on(self.turn, self)  # waits as if for a layer that is not on the device: the trial is not a layer

    def check(self) -> None:
        """Checks that the trial has written no weight of the base, as versions show. Raises a RuntimeError if it has."""
        for block in self._blocks:
            block.check(self.name)

    def close(self) -> None:
        """Closes runs that an error left open."""
        for run in list(self._runs):
            if getattr(run, "engine_or_none", None) is not None:
                run.close()

    def finds(self, module: nn.Module, find: Callable[..., Found]) -> Callable[..., Found]:
        """Returns a function that finds the layers, and puts the common weights of each layer first.

        Their layout is then the same for all trials, whatever adapters they train. Also records the modules, parameters and
        buffers of the module.

        Raises:
            RuntimeError: another trial has a module, a parameter or a buffer of the module.
        """
        self.take(parts(module))
        self._blocks.clear()

        def found(**how: Any) -> Found:
            plain = find(**how)
            return replace(plain, layers=tuple(map(self.base.weights.in_front, plain.layers)))

        return found

    def block(self, layer: Layer, planned: PlannedLayer, *args: Any, **options: Any) -> HostBlock:
        weights, found = self.base.weights, self.base.weights.beginning(layer, planned)
        self._shares = self._shares or any(weights.place(parameter) for _, parameter in layer.parameters)
        if not found[0]:
            return super().block(layer, planned, *args, **options)
        if options["pin"]:
            weights.lock(args[0])
        self._blocks.append(TrialBlock(weights, found, layer, planned, *args, **options))
        return self._blocks[-1]

    def uploads(self, engine: Engine) -> Uploads:
        if not self._shares:  # a later run of the trial may train all weights, which is not an error
            raise ValueError(
                "The module of this trial has no frozen weights of its SharedBase: it is not a base.copy(), or the weights have "
                "another dtype now. Write module = base.copy() in the trial; with bf16-true, write SharedBase(model.bfloat16())."
            )
        base, device = self.base, engine.device
        self.turn.device = device
        others = [trial.turn.device for trial in base.under_way if trial is not self]
        device.begin_turn(sum(each.held for each in others if each is not None))
        return SharedUploads(device, base.on_device, self.turn, base.under_way)


class OutsideTrials(RunScope):
    """The scope of all threads without a trial. While trials are under way, no trainer may be used in it."""

    def take_trainer(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        TURNS.refuse_beside(trainer)


set_outside(OutsideTrials())


def current() -> Trial | None:
    """Returns the trial that this thread runs; None outside of trials."""
    return scope.get()
