"""What users see: :class:`SharedBase`, whose trials share the transfers of the frozen weights that they have in common."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial, wraps
from typing import Any, ParamSpec, TypeVar
from weakref import WeakSet

import torch
from torch import nn

from sp_lightning.device.device import Device
from sp_lightning.device.patched import scope
from sp_lightning.device.shared_memory import supported
from sp_lightning.engine.host_source import HostSource
from sp_lightning.engine.placement import Placement
from sp_lightning.model.found import Layer
from sp_lightning.plan.plan import PlannedLayer
from sp_lightning.sharing.common import Common, SharedUploads, TrialBlock
from sp_lightning.sharing.turns import Turn, Turns
from sp_lightning.store.block import HostBlock
from sp_lightning.weights.uploads import Uploads

P = ParamSpec("P")
R = TypeVar("R")


class SharedBase:
    """Several trainings over one frozen base share its transfers: learning rates, adapters, seeds, in threads of one process.

    Each of them, a *trial*, is an ordinary function that makes a module and an ordinary Trainer with the strategy
    ``"superpipeline"``, one device, and fits, validates or predicts. All of it is bitwise what it would be alone: the turn, and
    with it the process's random state, goes from trial to trial where layers come to the device. A trial begins with the random
    state that the process had when this object was made; ``seed_everything`` in it is its own.

    What trials have in common is found by comparing bytes: one copy of it is on the host, and it comes to the device once for
    all. What a trial trains or writes is its own.

    Args:
        max_trials: how many trials run at once at most; further ones wait until one has ended. None for no limit.
        layers: how many layers of the base are on the device at once, beside the trials' own windows.

    Raises:
        RuntimeError: the system cannot share memory so.
        ValueError: an argument is no number of at least 1.

    Example::

        base = SharedBase()

        def run(lr):
            trainer = Trainer(strategy="superpipeline", max_epochs=1)
            trainer.fit(Module(lr), data)
            return trainer.callback_metrics["loss"]

        losses = base.map(run, [1e-4, 3e-4, 1e-3, 3e-3])
    """

    def __init__(self, max_trials: int | None = None, *, layers: int = 2) -> None:
        if why := supported():
            raise RuntimeError(f"SharedBase cannot be used here: {why}. Run the trials one after the other.")
        for name, value in (("max_trials", max_trials), ("layers", layers)):
            if value is not None and (type(value) is not int or value < 1):
                raise ValueError(f"{name} is {value!r}; it has to be a number of at least 1.")
        self._common = Common(layers)
        self._turns = Turns(self._common.there, max_trials)
        self._modules = WeakSet[nn.Module]()

    @property
    def fetched_bytes(self) -> int:
        """Bytes of the base that were copied to the device for several trials together."""
        return self._common.fetched_bytes

    def wrap(self, function: Callable[P, R]) -> Callable[P, R]:
        """Makes a function a trial, for threads of others: ``study.optimize(base.wrap(objective), n_jobs=4)``."""

        @wraps(function)
        def trial(*args: P.args, **kwargs: P.kwargs) -> R:
            _refuse_inside()
            turn = self._turns.begin()
            token, _here.trial = scope.set(turn), Trial(self, turn)
            try:
                # On an accelerator one thread of autograd's would run the backwards of all trials, and so could not change turns.
                with torch.autograd.set_multithreading_enabled(False):
                    return function(*args, **kwargs)
            finally:
                _here.trial = None
                scope.reset(token)
                if self._turns.count == 1:
                    self._common.free()
                self._turns.end(turn)

        return trial

    def map(
        self,
        function: Callable[..., R],
        *arguments: Iterable[Any],
        max_trials: int | None = None,
        return_exceptions: bool = False,
    ) -> list[Any]:
        """Calls a function with each of some arguments, as the builtin ``map`` does, in trials that run at once.

        Args:
            function: a trial.
            arguments: one iterable for each of its arguments, all of one length.
            max_trials: how many run at once at most; None for all.
            return_exceptions: whether what a trial raises takes the place of its result. Otherwise the first such error is
                raised once all trials have ended.

        Returns:
            The results, in the order of the arguments.
        """
        _refuse_inside()
        calls = list(zip(*arguments, strict=True))
        before, most = self._turns.most, min(max_trials or len(calls), self._turns.most or len(calls))
        self._turns.most = most
        try:
            with ThreadPoolExecutor(max(most, 1), "superpipeline-trial") as pool:
                futures = [pool.submit(self.wrap(function), *call) for call in calls]
                try:
                    errors = [each.exception() for each in futures]
                except BaseException:
                    pool.shutdown(wait=False, cancel_futures=True)
                    self._turns.cancel()
                    raise
        finally:
            self._turns.most = before
        if not return_exceptions:
            return [each.result() for each in futures]
        return [error or each.result() for error, each in zip(errors, futures, strict=True)]


_APART = "Leave one of them out: run the trials one after the other, without base.map or base.wrap."


def refuse_several_devices() -> None:
    """Refuses a trainer with several devices within a trial: a ValueError."""
    if current() is not None:
        raise ValueError(f"A SharedBase is one device's, and this trainer has several (devices=, num_nodes=). {_APART}")


def _refuse_inside() -> None:
    if current() is not None:
        raise RuntimeError("A trial of a SharedBase cannot begin inside of another one.")


class Trial(Placement):
    """The engine's parts of one trial. It may have several runs, one after the other."""

    def __init__(self, base: SharedBase, turn: Turn) -> None:
        self._base = base
        self._turn = turn
        self._module: nn.Module | None = None
        self._blocks: list[TrialBlock] = []

    def begin(
        self, module: nn.Module, budget: int | float | None, *, limited: bool, on_disk: bool
    ) -> int | float | None:
        """Begins a run, or builds its engine anew.

        Args:
            module: the root.
            budget: the user's.
            limited: whether the device's memory is.
            on_disk: whether weights may be on a disk.

        Returns:
            The run's budget: its share of the device's memory, if the user has given none.

        Raises:
            RuntimeError: another trial has the module.
            ValueError: no share can be told, or weights may be on a disk.
        """
        if on_disk:
            raise ValueError(f"disk= keeps weights where a SharedBase does not look for them. {_APART}")
        others = self._base._modules
        if self._module is not module:
            if module in others:
                raise RuntimeError(
                    f"This {type(module).__name__} is in another trial of the SharedBase. Make one in each trial: they share the "
                    "memory of frozen weights."
                )
            others.add(module)
            self._module = module
        most = self._base._turns.most
        if budget is not None or not limited:
            return budget
        if most is None:
            raise ValueError(
                "Trials share the device's memory, and it is not known how many there will be. Say how many run at once, "
                'SharedBase(max_trials=4), or give each a part: SuperpipelineStrategy(memory_budget="8GiB").'
            )
        return 1 / (1 + most)  # the base's layers take a part, too

    def block(self, layer: Layer, planned: PlannedLayer, *args: Any, **options: Any) -> HostBlock:
        if all(parameter.requires_grad for _, parameter in layer.parameters):
            return super().block(layer, planned, *args, **options)
        shared = self._base._common.layer(planned, args[0], pin=options["pin"] and not options.get("fetched_seldom"))
        self._blocks.append(TrialBlock(shared, layer, planned, *args, **options))
        return self._blocks[-1]

    def uploads(self, device: Device, lock: threading.RLock, log: logging.Logger | None) -> Uploads:
        blocks, self._blocks = self._blocks, []
        if not any(block.common_bytes for block in blocks):
            what = (
                "its frozen weights are others than those of the trial before it"
                if blocks
                else "it has no frozen weights"
            )
            raise ValueError(
                f"This trial has nothing in common with others: {what}. Freeze the base (requires_grad_(False)) and load the "
                "same one in each trial, or run it outside of the SharedBase."
            )
        turns = self._base._turns
        return SharedUploads(device, self._base._common, partial(turns.pass_on, self._turn), lambda: turns.count == 1)

    @property
    def source(self) -> Callable[..., HostSource]:
        return partial(_TrialSource, partial(self._base._turns.pass_on, self._turn))


class _TrialSource(HostSource):
    """The host store of a trial whose layers may all be on the device: its turn ends with a step, too."""

    def __init__(self, pass_on: Callable[[], None], *args: Any) -> None:
        super().__init__(*args)
        self._pass_on = pass_on

    def synchronize(self) -> None:
        super().synchronize()
        self._pass_on()


_here = threading.local()


def current() -> Trial | None:
    """The trial that this thread runs; None outside of one."""
    return getattr(_here, "trial", None)
