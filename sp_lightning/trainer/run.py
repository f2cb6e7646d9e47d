"""One run: its engine and the steps of its optimizers.

The engine is built at set-up, built again if user code has exchanged parameters, and closed at the end. A run knows no strategy:
it is given the module, the options, the device and a log.
"""

from __future__ import annotations

import logging
from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn

from sp_lightning import registry
from sp_lightning._version import TESTED_TORCH
from sp_lightning.device.accelerator import device_for
from sp_lightning.device.closing import close_all
from sp_lightning.device.device import Device
from sp_lightning.device.own_threads import OwnThreads
from sp_lightning.engine.activations import ActivationPlan
from sp_lightning.engine.placement import ONE_DEVICE, Placement
from sp_lightning.engine.streamer import Streamer
from sp_lightning.engine.tuner import BaseTuner
from sp_lightning.layers.buffers import find_averages
from sp_lightning.layers.device_parameter import DeviceParameter
from sp_lightning.model.checks import refuse_cuda_graphs
from sp_lightning.model.find import find_layers
from sp_lightning.model.found import Found, OverlappingPair
from sp_lightning.observe.messages import (
    after_out_of_memory,
    in_our_words,
    less_host_memory,
    note,
    say_once,
)
from sp_lightning.observe.stats import Stats
from sp_lightning.plan.choices import Mode
from sp_lightning.plan.host_memory import HostBudget, check_host, spare_bytes
from sp_lightning.plan.plan import Plan
from sp_lightning.plan.window import Window
from sp_lightning.registry import layer_stepper, make_tuner
from sp_lightning.trainer.compat import last_checkpoint, note_device
from sp_lightning.trainer.group import Group
from sp_lightning.trainer.optimizer_steps import OptimizerSteps
from sp_lightning.trainer.options import Options
from sp_lightning.trainer.run_scope import current
from sp_lightning.trainer.user_hooks import UserHooks


@dataclass(frozen=True)
class Results:
    """What a user can read of a run, also after its end.

    Attributes:
        plan: the plan.
        activations: the mode of activations of each unit, by name.
        stats: the counters.
        fetches: how often each layer was fetched, by name.
        partially_updated: why only some weights have the values of the last step; None if all have them.
    """

    plan: Plan
    activations: dict[str, Mode]
    stats: Stats
    fetches: dict[str, int]
    partially_updated: str | None


def untested_versions() -> list[str]:
    """Returns a sentence if torch is newer than the tested versions. The package uses some of its private names."""
    oldest, newest = TESTED_TORCH
    major, minor = map(int, torch.__version__.split(".")[:2])
    if (major, minor) <= tuple(map(int, newest.split("."))):
        return []
    return [f"torch {torch.__version__} is newer than the tested versions ({oldest} to {newest})."]


class Run:
    """One run. It is over after :meth:`close`, and if its engine cannot be built again.

    Args:
        module: the root. Its parameters become views of the host store. Buffers and metrics move to the device.
        options: the user's.
        device: where the layers compute.
        autocast: the dtype that autocast casts to; None without.
        group: the processes that train the module together.
        log: the logger for the user's messages.
        trains: whether optimizers will step the module's parameters.

    Raises:
        ValueError: the model or the options are not supported, or the model does not fit.
        RuntimeError: the host or the device has too little memory.

    Attributes:
        module, group, trains: as given.
        streamer: the engine; None when the run is over.
        hooks: says where user code could read or write weights.
        steps: the steps of its optimizers.
        tuner: what changes the window and the modes of activations between batches.
        placement: where weights are, and how many devices there are.
    """

    def __init__(
        self,
        module: pl.LightningModule,
        options: Options,
        device: torch.device,
        autocast: torch.dtype | None,
        group: Group,
        log: logging.Logger,
        trains: bool,
    ) -> None:
        self.module = module
        self.trains = trains
        self.placement = ONE_DEVICE
        self._options = options
        self._device = device
        self._autocast = autocast
        self.group = group
        self._log = log
        self._scope = current()
        budget = self._scope.begin(self, options, device)
        self._make_stepper = layer_stepper(options.optimizer_on, options.gpu_layers)
        optimizer_on, stay = ("cpu", 0) if self._make_stepper is None else (options.optimizer_on, options.gpu_layers)
        self._window = Window(
            options.k,
            options.k_prime,
            budget,
            ranks=group.size,
            nodes=group.nodes,
            training=trains,
            optimizer_on=optimizer_on,
            stay=stay,
        )
        self._threads = OwnThreads()
        self._overlapping: list[OverlappingPair] = []
        self._host_room: int | None = None
        self._activations = ActivationPlan()
        self._buffers_due = trains
        _refuse_in_step(module)
        self.streamer: Streamer | None = None
        self.tuner: BaseTuner
        self.hooks = UserHooks(module, debug_writes=options.debug_writes)
        self.steps = OptimizerSteps(self, options, log)
        try:
            self._build()
            self._results = self.results
            self.steps.open()
        except BaseException:  # nobody else has this run yet
            self.close()
            raise

    @property
    def engine(self) -> Streamer:
        """The engine of a run that is not over."""
        assert self.streamer is not None
        return self.streamer

    # ------------------------------------------------------------------ what a user reads

    @property
    def results(self) -> Results:
        """What a user can read now, or, after the end, what it was when the engine was closed."""
        streamer = self.streamer
        if streamer is not None:
            modes, updates = dict(streamer.activations.modes), streamer.updates
            self._results = Results(
                streamer.plan, modes, streamer.stats(), streamer.fetches(), updates.partially_updated
            )
        return self._results

    @property
    def device_memory(self) -> tuple[int, int] | None:
        """The peak of device memory in bytes, and its limit; None if there is no limit."""
        peak = self.engine.device.peak_bytes()
        return None if peak is None or self._window.room is None else (peak, self._window.room)

    def remarks(self) -> list[str]:
        """Returns what a user should know in addition to the plan, in sentences."""
        remarks = [remark for remark in (self.placement.remark, self.tuner.remark) if remark]
        k, plan = self._options.k, self.engine.plan
        if isinstance(k, int) and k > plan.k and not plan.nothing:
            remarks.append(f"k={k} is capped at {plan.k}, the number of layers: all are on the device at once.")
        return [*remarks, *self.steps.remarks(), *untested_versions()]

    # ------------------------------------------------------------------ the engine

    @property
    def steps_on_device(self) -> bool:
        """Whether layers step on the GPU, as far as is decided."""
        return self._window.steps_on_device

    @property
    def shares_base(self) -> bool:
        """Whether the run is a trial of a SharedBase."""
        return self._scope.shares_base

    def let_layers_stay(self, may: bool) -> None:
        """Sets whether results would be the same if layers stayed on the GPU. Only then ``gpu_layers="auto"`` may choose it."""
        self._window.may_stay = may

    def most_that_stay(self) -> int:
        """Returns how many layers could stay on the GPU with their optimizer state; 0 if that is not known, or if some stay."""
        plan, window = self.engine.plan, self._window
        if plan.stay or not window.may_stay or window.room is None or not window.rest:
            return 0
        return len(window.filled_with_staying(plan).stay)

    def step_on_host(self) -> None:
        """Frees the GPU memory that was planned for steps: ``optimizer_on="auto"`` has chosen the CPU."""
        self._window.steps_on_device = False
        self.engine.updating.step_on_host()
        self.engine.recount(self._window.again(self.engine.plan, self.engine.found))

    def renew(self) -> None:
        """Adapts the engine to the module as it is now. Called before a batch."""
        self.steps.open()
        for pair in self._overlapping:
            pair.refuse_trained()
        changed = self.engine.changed()
        if changed:
            self._log.debug("Superpipeline: parameters or modules have been exchanged; the layers are absorbed again.")
            self.group.meet("an exchange of parameters or modules, or of their dtypes")
            self.finish_updates()
            self._end_engine()
            self._build()
        streamer = self.engine
        if streamer.thawed():
            streamer.recount(self._window.again(streamer.plan, streamer.found))
            self.tuner.expect_more()
        if changed:
            self.steps.rearrange()
        else:
            self.steps.look_again()

    def close(self) -> None:
        """Ends the run. The module then has ordinary parameters on the host, and optimizers are as they were configured."""
        close_all(self._end_engine, self.steps.close)
        self.placement = ONE_DEVICE  # files are gone with the run

    def _end_engine(self) -> None:
        streamer = self.streamer
        if streamer is None:
            return
        try:
            # Counters include transfers that are in flight for a step that will not begin.
            close_all(partial(streamer.abort, over=True), self._keep_results, streamer.close)
        finally:
            self.streamer = None

    def _keep_results(self) -> None:
        self._results = self.results

    def _build(self) -> None:
        device = device_for(self._device)
        if not device.synchronous:
            refuse_cuda_graphs(self.module)
        found, plan = self._lay_out(device)
        layers = plan.trained  # they exist already, and are moved to the host store one after another
        copies = max(each.nbytes for each in (*layers, *plan.masters))
        casts = sum(cast.nbytes for layer in layers for cast in layer.casts)
        check_host({"for a layer's copy": copies, "for casts": casts}, less_host_memory(), self._host_budget())
        self.placement = self._place(found, plan, device)
        averages = find_averages(self.module)
        move_to_device(self.module, found, averages, self._device)
        self.streamer = Streamer(
            self.module,
            found,
            plan,
            device,
            pin=self._options.pin_memory,
            placement=self.placement,
            make_activations=self._activations.make,
            averages=averages,
            threads=self._threads,
            debug_writes=self._options.debug_writes,
            make_stepper=self._make_stepper,
            log=self._log,
        )
        self.streamer.activations.limit_host_memory(self._host_room)
        self._overlapping += found.overlapping
        self.tuner = make_tuner(
            self._window,
            self.streamer,
            device,
            self._log,
            chooses_modes=self._activations.chooses,
            alone=not self._scope.shares_base,
        )

    def _place(self, found: Found, plan: Plan, device: Device) -> Placement:
        """Returns the placement: what makes the parts of the engine that depend on where weights are."""
        accumulate = self.module.trainer.accumulate_grad_batches * self.trains
        of_group = self.group.placement(self._options.transfer, device, self._log, trains=self.trains)
        if of_group is not None:
            return of_group
        if self._scope.placement is not None:
            return self._scope.placement
        if self._options.disk is None:
            return ONE_DEVICE
        return registry.placement_on_disk(found, plan, self._options, self._device, accumulate=accumulate)

    def _lay_out(self, device: Device) -> tuple[Found, Plan]:
        """Finds the layers, makes the plan, and decides what becomes of activations."""
        layers = self._options.layers
        find: Any = partial(find_layers, self.module, keep_on_gpu=self._options.keep_on_gpu, autocast=self._autocast)
        find = self._scope.finds(self.module, find)
        found = find(layers=layers)
        plan = self._window.begin(found, device, lambda patterns: find(layers=patterns))
        limited = self.trains and self._window.room is not None
        self._activations = registry.activations(self._options.activations, self.module, found, may_choose=limited)
        if found.experts and self._activations.reruns:
            found = find(layers=layers, whole_blocks=True)
            plan = self._window.begin(found, device)
        return found, plan

    def reserve_host_memory(self, needed: dict[str, int]) -> None:
        """Reserves host memory for training. Activations may use the rest.

        Args:
            needed: bytes, by purpose.

        Raises:
            RuntimeError: the host does not have that much memory.
        """
        budget = self._host_budget()
        check_host(needed, less_host_memory(self._options.optimizer_overlap), budget)
        spare = spare_bytes(needed, budget)
        # Each process offloads its own activations.
        self._host_room = None if spare is None else spare // self.group.size
        self.engine.activations.limit_host_memory(self._host_room)

    def _host_budget(self) -> HostBudget:
        """Returns what limits host memory, with what the node's other processes have taken now. Collective if it is limited."""
        budget = self._options.host_budget
        budget.count_others(self.group.gather)
        return budget

    # ------------------------------------------------------------------ between batches, after errors, at the end of training

    def finish_updates(self) -> None:
        """Waits for updates in the background and for writes to files. After an error the module has the host parameters."""
        if self.is_foreign:
            self.engine.updates.finish()
            return
        with self.whole_after_failure():
            self.engine.updates.finish()
            self.placement.complete_pending()

    def _make_room(self, error: torch.OutOfMemoryError) -> None:
        """Shrinks the window after an error that has ended a step, and adds a remedy to the error."""
        plan, modes = self.engine.plan, self.results.activations
        self.tuner.shrink()
        if self.engine.plan.stay != plan.stay:
            self.steps.arrange()
        now = self.results.activations
        freed = {} if now == modes else now
        if self._activations.why_kept:
            say_once(self._log, self._activations.why_kept)
        balanced = self._options.activations == "auto"
        error.add_note(after_out_of_memory(plan, self.engine.plan, freed, balanced=balanced))

    def host_parameters(self) -> AbstractContextManager[None]:
        """A context in which the module has the host parameters, for example for a checkpoint."""
        if self.is_foreign:
            return nullcontext()
        self.placement.complete_pending()
        return self.engine.reading()

    @property
    def is_foreign(self) -> bool:
        """True in a thread that is not the run's. It finds the host parameters in the module without the engine's help."""
        return not self._threads.own

    def loading(self) -> AbstractContextManager[None]:
        """A context for loading a state into the module between steps. Weights may be written; rank 0's values count."""
        self.engine.allow_writes()
        return self.engine.turns.loading(self.module)

    def step_begins(self) -> None:
        """Called when a step of a loop begins. Sends buffers when DistributedDataParallel would: after a training step."""
        self._scope.step_begins()
        if self._buffers_due:
            self.group.send_buffers(self.module)
        # In manual optimization Lightning's ddp sends them once: its forward ends without a backward that sums.
        self._buffers_due = self.trains and torch.is_grad_enabled() and self.module.automatic_optimization

    @contextmanager
    def whole_after_failure(self, *, make_room: bool = False) -> Generator[None, None, None]:
        """A context after which the module has the host parameters, whatever is raised inside.

        Args:
            make_room: whether an out-of-memory error of the device shrinks the window.
        """
        try:
            yield
        except BaseException as error:
            if not isinstance(error, torch.OutOfMemoryError):  # user code may catch that in all processes
                self.group.fail(error)
            self.abort()
            if (said := in_our_words(error)) is not None:
                raise RuntimeError(said) from error
            mixed = self.engine.updates.partially_updated
            note(error, mixed, last_checkpoint(self.module.trainer) if mixed else None)
            if make_room and isinstance(error, torch.OutOfMemoryError) and "made_room" not in vars(error):
                vars(error)["made_room"] = True  # the optimizer's step may be around this one
                self._make_room(error)
            raise

    def abort(self) -> None:
        """Ends the step, and restores the host parameters. An error in this must not hide the first error."""
        try:
            self.engine.abort()
            self.engine.allow_writes()  # the code that catches the error may write weights
        except Exception:
            self._log.exception("Superpipeline could not put the host's parameters back after the error that follows.")


def _refuse_in_step(module: pl.LightningModule) -> None:
    """Raises an error for a module whose weights belong to another run that is in the middle of a step.

    Raises:
        ValueError: it has such a weight.
    """
    name = next((name for name, p in module.named_parameters() if issubclass(type(p), DeviceParameter)), None)
    if name is not None:
        raise ValueError(
            f"{name!r} of {type(module).__name__} is a weight of another run, which is in the middle of a step. Begin this run "
            "between two steps (on_train_batch_start, on_train_batch_end), or with a copy: copy.deepcopy(module)."
        )


def move_to_device(module: nn.Module, found: Found, averages: Sequence[nn.Module], device: torch.device) -> None:
    """Moves buffers, metrics, and modules that keep their parameters to themselves.

    Args:
        module: the root.
        found: its layers; its parameters stay where they are.
        averages: modules whose buffers stay on the host, with the modules in them.
        device: the device of all others.
    """
    for _, aside in found.aside:
        aside.to(device)
    bare = {child for child in module.modules() if not any(True for _ in child.parameters())}
    stay = {inner for average in averages for inner in average.modules()}
    for child in module.modules():
        note_device(child, device)
        if child in stay:
            continue
        if child in bare and not stay.intersection(child.modules()):
            child.to(device)  # metrics have states that are not buffers
        for name, buffer in child._buffers.items():
            if buffer is not None and buffer.device != device:
                child._buffers[name] = buffer.to(device)
