"""One run: its engine and the steps of its optimizers.

The engine is built at set-up, built again if user code has exchanged parameters, and closed at the end. A run does not know its
strategy: it only gets the module, the options, the device, a logger and the trainer. A loop without Lightning calls the same
methods, and :class:`~sp_lightning.any_loop.stream.UserLoop` stands in for the trainer.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from sp_lightning import registry
from sp_lightning._version import TESTED_TORCH
from sp_lightning.core.device.accelerator import device_for
from sp_lightning.core.device.closing import close_all
from sp_lightning.core.device.device import Device
from sp_lightning.core.device.own_threads import OwnThreads
from sp_lightning.core.device.stats import Stats
from sp_lightning.core.engine.activations import ActivationPlan
from sp_lightning.core.engine.engine import Engine
from sp_lightning.core.engine.placement import ONE_DEVICE, Placement
from sp_lightning.core.messages import (
    LESS_HOST_MEMORY,
    after_out_of_memory,
    in_our_words,
    note,
    note_places,
    say_once,
)
from sp_lightning.core.model.checks import refuse_cuda_graphs
from sp_lightning.core.model.elsewhere import Tie, ties_elsewhere
from sp_lightning.core.model.find import find_layers
from sp_lightning.core.model.found import Found, OverlappingPair
from sp_lightning.core.model.wrapped import move
from sp_lightning.core.plan.choices import Mode
from sp_lightning.core.plan.ledger import returning_bytes, state_bytes
from sp_lightning.core.plan.plan import Plan
from sp_lightning.core.plan.window import Window, about_others
from sp_lightning.core.store.block import open_blocks
from sp_lightning.core.torch_compat.moved import move_module
from sp_lightning.core.torch_compat.private import tree_leaves
from sp_lightning.core.weights.buffers import find_averages
from sp_lightning.core.weights.device_parameter import DeviceParameter
from sp_lightning.core.weights.roles import ParameterRole
from sp_lightning.registry import layer_stepper, make_tuner
from sp_lightning.trainer.compat import last_checkpoint, skips_backward
from sp_lightning.trainer.group import Group
from sp_lightning.trainer.host_memory import HostBudget, check_host
from sp_lightning.trainer.optimizer_steps import OptimizerSteps
from sp_lightning.trainer.options import Options
from sp_lightning.trainer.plan_text import cap_remarks, sentence
from sp_lightning.trainer.tuner import BaseTuner
from sp_lightning.trainer.user_hooks import UserHooks


@dataclass(frozen=True)
class Results:
    """The results of a run that users can read, also after its end.

    Attributes:
        plan: the plan, with how layers are updated.
        activations: the mode of activations of each unit, by name.
        stats: the counters.
        partially_updated: the reason if only some weights have the values of the last step; None if all have them.
    """

    plan: Plan
    activations: dict[str, Mode]
    stats: Stats
    partially_updated: str | None


def untested_versions() -> list[str]:
    """Returns a list with a sentence if torch is newer than the tested versions; else an empty list.

    The package uses private names of torch, which may change in any version.
    """
    oldest, newest = TESTED_TORCH
    major, minor = map(int, torch.__version__.split(".")[:2])
    if (major, minor) <= tuple(map(int, newest.split("."))):
        return []
    return [f"torch {torch.__version__} is newer than the tested versions ({oldest} to {newest})."]


_CPU = torch.device("cpu")
_RETURNING = "for layers that return from the GPU when the run ends"


class Run:
    """One run: from the strategy's set-up to its teardown.

    A run is over after :meth:`close`, or if building the engine again raises an error.

    Args:
        module: the root. Its parameters become views of the host store. Buffers and metrics move to the device.
        options: the user's options.
        device: the device on which the layers compute.
        autocast: the dtype that autocast casts to; None without autocast.
        group: the processes that train the module together.
        log: the logger for the user's messages.
        trains: True if optimizers will step the module's parameters. See also :meth:`expect_gradients`.
        trainer: has the facts about the loop: optimizers, hooks, clipping.

    Raises:
        ValueError: the model or the options are not supported, or the model does not fit into the GPU memory of the run.
        MemoryError: the host has too little memory.
        torch.OutOfMemoryError: the device has too little memory.

    Attributes:
        module: as the argument.
        group: as the argument.
        trains: as the argument.
        trainer: as the argument.
        engine_or_none: the engine; None when the run is over.
        hooks: finds the points at which user code could read or write weights.
        steps: the steps of the optimizers.
        tuner: changes the window and the modes of activations between batches.
        placement: makes the parts of the engine that depend on where weights are stored and on the number of devices.
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
        trainer: Any,
    ) -> None:
        self.module = module
        self.trainer = trainer
        self.trains = trains
        self.placement = ONE_DEVICE
        self._options = options
        self._device = device
        self._autocast = autocast
        self.group = group
        self._log = log
        self._make_stepper = layer_stepper(options.optimizer_on)
        self._window = Window(
            options.k,
            options.k_prime,
            options.gpu_memory,
            ranks=group.size,
            nodes=group.nodes,
            training=trains,
            steps_on_device=options.optimizer_on == "gpu",
        )
        self._threads = OwnThreads()
        self._overlapping: list[OverlappingPair | Tie] = []  # frozen weights that share memory, and must stay frozen
        self._host_room: int | None = None  # bytes of host memory for activations; None for no limit
        self._activations = ActivationPlan()
        self._must_send_buffers = trains  # see step_begins()
        self._lent = False  # True in the context :meth:`gpu_released`
        self._stay: set[nn.Parameter] = set()  # the parameters of layers that `gpu_layers=` chose
        self._has_moved = False  # True when an engine of this run has moved the weights
        _refuse_in_step(module)
        self.engine_or_none: Engine | None = None
        self.tuner: BaseTuner
        self.hooks = UserHooks(trainer)
        self.steps = OptimizerSteps(self, options, log)
        try:
            self._refuse_ties()
            self._build()
            self.steps.open()
        except BaseException:  # the caller does not get the object, so it cannot close it
            self.close()
            raise

    @property
    def engine(self) -> Engine:
        """The engine of a run that is not over."""
        assert self.engine_or_none is not None
        return self.engine_or_none

    @property
    def automatic(self) -> bool:
        """True if Lightning calls backward and the optimizers (automatic optimization)."""
        return bool(self.trainer.lightning_module.automatic_optimization)

    # ------------------------------------------------------------------ batches

    def batch_starts(self, phase: str, batch: Any) -> None:
        """Adapts the engine to changes of the module since the last batch, and lets the tuner change k and activations.

        Args:
            phase: the loop: "train", "validate", "test" or "predict".
            batch: the batch, whose size the tuner compares with earlier batches.
        """
        self.renew()
        if phase == "train" and self.hooks.may_write_weights("train"):  # other loops: `quiet` in :meth:`step`
            self.engine.invalidate()
        if (phase == "train") == self.trains:  # not for validation within training, which the tuner does not measure
            self.tuner.batch_starts(batch, self.trainer.accumulate_grad_batches if self.trains else 1)

    def step(self, phase: str, user_code: Callable[[], Any], *, ends_with_backward: bool) -> Any:
        """Runs the user's code of a batch, with the engine streaming layers.

        The engine's step ends

        - with the backward, if ``ends_with_backward``: user code or Lightning calls backward next;
        - in this method otherwise: in loops without training, in Lightning's manual optimization, and if the batch is skipped (no
          loss, or no backward);
        - in :meth:`whole_after_failure` after an error: the module has the host parameters, for code that catches the error.

        Args:
            phase: the loop: "train", "validate", "test" or "predict".
            user_code: the code. It returns None if no backward follows.
            ends_with_backward: True if a backward follows the user's code.

        Raises:
            torch.OutOfMemoryError: device memory does not suffice. From now on the window is smaller, if k and k' allow it. The
                error has a note about options that use less memory.
        """
        training = phase == "train"
        self.step_begins()
        engine, hooks = self.engine, self.hooks
        if not ends_with_backward:  # otherwise an optimizer's step may be running, whose closure calls this method
            self.steps.forget_running_steps()
        with self.whole_after_failure(make_room=True):
            manual = training and not ends_with_backward
            engine.begin(phase, training=training, manual=manual, quiet=not hooks.may_have_written(phase))
            with engine.saving():
                output = user_code()
                if training:
                    self.steps.hold_host_parameters()
                if ends_with_backward:
                    self.steps.forget_freed()
                if ends_with_backward and output is not None and not skips_backward(self.trainer):
                    # A hook before or at zero_grad may read the last step's gradients, which only host parameters have.
                    engine.await_backward(seen=hooks.may_write_weights("zero_grad"))
                else:
                    # After the last batch of a validation within training, hooks of training run before the engine's next step.
                    follows = training or hooks.may_write_weights(phase) or hooks.may_write_weights("train")
                    engine.end(writes_follow=follows)
                return output

    # ------------------------------------------------------------------ results for users

    @property
    def results(self) -> Results:
        """The present results; after the end of the run, the results from when the engine was closed."""
        engine = self.engine_or_none
        if engine is not None:
            plan = engine.plan
            self._results = Results(
                plan=replace(plan, updates=self.steps.policy),
                activations=dict(engine.activations.modes),
                stats=engine.stats(),
                partially_updated=engine.updates.partially_updated,
            )
        return self._results

    @property
    def device_memory(self) -> tuple[int, int] | None:
        """The peak of device memory and its limit, in bytes; None if there is no limit or the device counts no memory."""
        peak = self.engine.device.peak_bytes()
        return None if peak is None or self._window.room is None else (peak, self._window.room)

    def remarks(self) -> list[str]:
        """Returns sentences for the user about this run, which are logged with the plan."""
        remarks = [remark for remark in (self._window.remark, self.placement.remark, self.tuner.remark) if remark]
        remarks += cap_remarks(self._options.k, self._options.k_prime, self.engine.plan, self._options.gpu_layers)
        return [*self.engine.found.advice, *remarks, *self.steps.remarks(), *untested_versions()]

    def describe(self) -> tuple[str, str]:
        """Returns the plan in one line, with the remarks, and as a table. Both are logged when steps begin."""
        plan, ledger = self.engine.plan, self.steps.ledger
        state = None if ledger is None else ledger.state
        if (
            state is not None and plan.stay
        ):  # plain Lightning's state is on the GPU, too, which the ledger does not count
            state = state_bytes(self.trainer.optimizers)
        plan = replace(plan, updates=self.steps.policy)
        line = sentence(plan, state=state, on_cpu=self.engine.device.computes_on_host)
        return " ".join([line, *self.remarks()]), str(plan)

    # ------------------------------------------------------------------ the engine

    def may_step_on_gpu(self) -> bool:
        """Returns True if GPU memory has room for optimizer steps, for the advice to set ``optimizer_on`` after training."""
        return self._window.fits(replace(self.engine.plan, steps_on_device=True))

    def renew(self) -> None:
        """Adapts the engine to changes of the module by user code since the last batch. Called before each batch.

        - Parameters or modules were exchanged, or modules compiled: the engine is built again. Collective.
        - Layers were unfrozen: the plan counts their gradients, and the tuner prepares for a batch that takes more memory.
        - Hooks or clipping were changed: how optimizers step is decided again.

        Raises:
            ValueError: user code has unfrozen one of two weights that share memory, or the changed module is not supported.
        """
        self.steps.open()  # other code may have removed hooks on optimizers
        if any(p.device.type != self._device.type for p in self._stay):  # another run of the module has ended
            self.to_device(self.engine.found)
        for pair in self._overlapping:
            pair.refuse_trained()
        changed = self.engine.changed()
        if changed:
            self._log.debug(
                "Superpipeline: parameters or modules were exchanged or compiled; the layers are absorbed again."
            )
            self.group.barrier("an exchange of parameters or modules, of their dtypes, or a compilation")
            self.finish_updates()
            self._refuse_ties()
            self._end_engine()
            self._build()
        engine = self.engine
        if engine.thawed():
            engine.recount(self._window.again(engine.plan, engine.found))
            self.tuner.expect_more()
        if changed:
            self.steps.engine_rebuilt()
        else:
            self.steps.check_batch_settings()

    # ------------------------------------------------------------------ GPU memory between steps

    @property
    def gpu_memory(self) -> int | float | None:
        """The limit of device memory: bytes, a share of the free memory, or None."""
        return self._window.budget

    def change_gpu_memory(self, budget: int | float | None) -> None:
        """Builds the engine again for another limit of device memory, between two steps. The tuner measures again.

        Args:
            budget: the limit: bytes, a share of the free memory, or None.

        Raises:
            RuntimeError: a step runs, or several devices train.
            ValueError: the model does not fit.
            BaseException: another error. The former limit stays after each error, and the engine is built with it.
        """
        self._refuse_to_lend("gpu_memory")
        self.finish_updates()
        before, self._window.budget = self._window.budget, budget
        self._build_again(undo=partial(setattr, self._window, "budget", before))

    def expect_gradients(self) -> None:
        """Plans gradients from now on, and decides how the present optimizers step. Called between two steps.

        The run has got its first optimizers, or more. Or it has none, and its weights train: code that this package does not see
        may step them (an optimizer of float32 copies, a loop by hand).

        Raises:
            ValueError: the model does not fit with gradients. The run goes on as before.
            MemoryError: host memory does not suffice for gradients. The run goes on as before.
        """
        if self._lent:  # a later call plans them
            return
        self.finish_updates()
        before, self.trains = self.trains, True
        self._window.expect_gradients(True)

        def undo() -> None:
            self.trains = before
            self._window.expect_gradients(before)

        self._build_again(self.training_begins, undo=undo)

    def _build_again(self, begins: Callable[[], None] | None = None, *, undo: Callable[[], None]) -> None:
        """Builds the engine again, because settings have changed.

        Args:
            begins: called when the engine is built.
            undo: restores the settings. Called after an error; the engine is then built with the former settings.
        """
        try:
            self._refuse_ties()  # before the present engine ends
        except BaseException:
            undo()
            raise
        try:
            self._end_engine()
            self._build()
            if begins is not None:
                begins()
        except BaseException:
            undo()
            self._end_engine()
            self._build()
            raise
        finally:
            if self.engine_or_none is not None:
                self.steps.engine_rebuilt()

    @contextmanager
    def gpu_released(self) -> Generator[int, None, None]:
        """A context between two steps, in which the run has no weights and buffers on the device, and no optimizer state.

        At its end, buffers and weights that stay on the device return, with their optimizer state; layers are uploaded when they
        are needed.

        Yields:
            Bytes of weights that stay on the device, because tensors of user code view their memory.

        Raises:
            RuntimeError: a step runs, the device is released already, or several devices train.
            MemoryError: the host has no memory for the layers that stay on the device.
            torch.OutOfMemoryError: at the end, the device has no memory for the slots.
        """
        self._refuse_to_lend("gpu_released()")
        with self.whole_after_failure():
            self.engine.updates.wait_for_all()
            self._complete_writes()
        self.tuner.stop_timing()
        engine = self.engine
        plan, found = engine.plan, engine.found
        if leaving := returning_bytes(plan, self.trainer.optimizers, found.on_gpu):
            check_host({"for layers that leave the GPU": leaving}, LESS_HOST_MEMORY, self._host_budget())
        self._lent = True
        try:
            engine.leave_device()
            self.to_host(found)
            engine.device.release_unused()
            yield engine.weight_bytes - found.staying[0]
        finally:
            self._lent = False
            if self.engine_or_none is engine:  # otherwise the run has ended
                self.to_device(found)
                try:
                    engine.resize(plan)
                except torch.OutOfMemoryError as error:
                    error.add_note("Free what was allocated in the context gpu_released() before its end.")
                    raise

    def _refuse_to_lend(self, what: str) -> None:
        """Raises a RuntimeError if a step runs, if the device is released, or if others use the engine, too."""
        engine = self.engine
        if engine.in_step or engine.in_backward or self.steps.running or self.is_foreign:
            raise RuntimeError(
                f"{what} was used while a step runs. Expected a moment between two steps: on_train_batch_end of a callback, or "
                "after optimizer.step() in a loop of your own. A loss that is kept without a backward keeps its step running: "
                "delete it, or compute it under torch.no_grad()."
            )
        if self._lent:
            raise RuntimeError(
                f"{what} was used inside of gpu_released(): the GPU is released already. Leave it first."
            )
        if not self.group.alone:
            raise RuntimeError(f"{what} needs a training of its own on one device. Use Trainer(devices=1).")

    def close(self) -> None:
        """Ends the run. The module then has ordinary parameters on the host, and optimizers are as they were configured."""
        close_all(self._end_engine, self.steps.close)
        self.placement = ONE_DEVICE  # files are gone with the run

    def _end_engine(self) -> None:
        """Closes the engine, if there is one, and keeps its results. Called at the end of the run, and before a new engine.

        Layers that stay on the device return to the CPU.
        """
        engine = self.engine_or_none
        if engine is None:  # building it may have failed after layers were moved
            self._return_staying()
            return
        try:
            # The results are read after the abort, because their counters include transfers that it waits for.
            parts = partial(engine.abort, over=True), lambda: self.results, engine.close, self._return_staying
            failed = sys.exception() is not None
            close_all(*((engine.refuse_late_writes, *parts) if not failed else parts))
        finally:
            self.engine_or_none = None

    def _build(self) -> None:
        """Builds the engine: finds layers, plans memory, and moves weights to the host store and all else to the device."""
        device = device_for(self._device)
        if not device.synchronous:
            refuse_cuda_graphs(self.module)
        found, plan = self._find_and_plan(device)
        layers = plan.trained
        # The weights are in host memory already, and the host store copies them layer by layer. So additional memory is needed
        # only for the copy of one layer, and for the casts.
        largest = max(each.nbytes for each in (*layers, *plan.masters))
        casts = sum(cast.nbytes for layer in layers for cast in layer.casts)
        check_host({"for a layer's copy": largest, "for casts": casts}, LESS_HOST_MEMORY, self._host_budget())
        self.placement = self._place(found, plan)
        self._stay = {parameter for layer in found.stay for _, parameter in layer.parameters}
        with self._following():
            self.to_device(found)
            self.engine_or_none = Engine(
                self.module,
                found,
                plan,
                device,
                pin=self._options.pin_memory,
                placement=self.placement,
                make_activations=self._activations.make,
                averages=find_averages(self.module),
                threads=self._threads,
                make_stepper=self._make_stepper,
                log=self._log,
            )
        self._has_moved = True
        self.engine_or_none.activations.limit_host_memory(self._host_room)
        self._overlapping += found.overlapping
        self.tuner = make_tuner(
            self._window,
            self.engine_or_none,
            device,
            self._log,
            evicts=self._activations.evicts,
        )

    def _ties(self) -> list[Tie]:
        """Returns the weights that share memory with parameters and buffers of other modules."""
        return ties_elsewhere(self.module, {id(parameter) for block in open_blocks() for parameter in block.parameters})

    def _refuse_ties(self) -> None:
        """Checks that the next engine parts no weight from a weight of another module. Called before it moves the weights.

        If an engine of this run has moved the weights before, user code has tied the others since then: :meth:`_following`.

        Raises:
            ValueError: a trained weight was tied before, or only a part of it was, or another run streams the other module.
        """
        parted = [tie for tie in self._ties() if not (self._has_moved and tie.can_follow)]
        for tie in parted:
            tie.refuse_trained()
        self._overlapping += parted

    @contextmanager
    def _following(self) -> Generator[None, None, None]:
        """A context in which weights get other memory, and the weights of other modules that are tied to them get it, too."""
        ties = [tie for tie in self._ties() if tie.can_follow] if self._has_moved else []
        yield
        for tie in ties:
            tie.follow()

    def to_device(self, found: Found) -> None:
        """Moves everything that is not streamed to the device, as ``module.to(device)`` does: see :func:`move_module`.

        These are buffers and metrics, modules that cannot be streamed, layers that ``gpu_layers=`` chose, and, in training,
        their optimizer state. Averages of weights stay on the host.
        """
        self._move(found, self._device, find_averages(self.module))
        if self.steps.policy is not None:  # before, the trainer has the optimizers of its last run
            self._move_state(found.on_gpu, self._device)

    def to_host(self, found: Found) -> None:
        """Moves to the host what :meth:`to_device` has moved."""
        self._move(found, _CPU, ())
        self._move_state(found.on_gpu, _CPU)

    def _move(self, found: Found, device: torch.device, averages: Sequence[nn.Module]) -> None:
        whole = {parameter for _, aside in found.aside for parameter in aside.parameters()}
        move_module(self.module, device, set(self.module.parameters()) - whole, averages)
        self._move_staying(device)

    def _move_staying(self, device: torch.device) -> None:
        """Moves the layers that ``gpu_layers=`` chose."""
        if self._stay:
            with self._following():
                for parameter in self._stay:
                    move(parameter, partial(Tensor.to, device=device))

    def _move_state(self, parameters: Collection[nn.Parameter], device: torch.device) -> None:
        """Moves the optimizer state of parameters, to the places that ``Optimizer.load_state_dict`` gives it."""
        for optimizer in self.trainer.optimizers if parameters else ():
            for group in optimizer.param_groups:
                steps_too = group.get("fused") or group.get("capturable") or device == _CPU
                for p in set(parameters).intersection(group["params"]):
                    state = optimizer.state.get(p, {})
                    for name, value in state.items() if isinstance(state, Mapping) else [("", state)]:
                        for each in tree_leaves(value) if name != "step" or steps_too else ():
                            if isinstance(each, Tensor):
                                move(each, partial(Tensor.to, device=device))

    def _return_staying(self) -> None:
        """Returns layers that stay on the device to the CPU for good, with their optimizer state."""
        self._move_staying(_CPU)
        self._move_state(self._stay, _CPU)
        self._stay = set()

    def _place(self, found: Found, plan: Plan) -> Placement:
        """Returns the placement: of several devices, on the disk, or in this process's host memory."""
        of_group = self.group.placement()
        if of_group is not None:
            return of_group
        if self._options.disk is None:
            return ONE_DEVICE
        accumulate = self.trainer.accumulate_grad_batches if self.trains else 0
        return registry.disk_tier().place(found, plan, self._options, self._device, accumulate=accumulate)

    def _find_and_plan(self, device: Device) -> tuple[Found, Plan]:
        """Finds the layers, makes the plan of device memory, and resolves ``activations=``."""
        layers = self._options.layers
        find: Any = partial(
            find_layers,
            self.module,
            keep_on_gpu=self._options.keep_on_gpu,
            autocast=self._autocast,
            gpu_layers=self._options.gpu_layers,
        )
        found = find(layers=layers)
        plan = self._window.begin(found, device)
        is_limited = self.trains and self._window.room is not None
        self._activations = registry.activations(self._options.activations, self.module, found, may_evict=is_limited)
        if found.experts and self._activations.reruns:
            # A forward that runs again has to find all experts of its block, so experts are not layers of their own.
            found = find(layers=layers, whole_blocks=True)
            plan = self._window.begin(found, device)
        return found, plan

    def training_begins(self) -> None:
        """Decides how optimizers step, and reserves host memory. Called before the first batch, and after a loop got optimizers.

        Raises:
            ValueError: an option names a place or a mode that is not possible.
            MemoryError: host memory does not suffice for gradients and optimizer state.
        """
        self._move_state(self.engine.found.on_gpu, self._device)  # user code may have made optimizers before the run
        state, ledger = self.steps.begin(), self.steps.ledger
        assert ledger is not None
        self.reserve_host_memory(
            {"for gradients": ledger.gradients, "for the optimizer's state": state}, returning=ledger.returning
        )

    def reserve_host_memory(self, needed: dict[str, int], *, returning: int = 0) -> None:
        """Checks that the host has the memory for training. Sets the limit of offloaded activations to the rest.

        Args:
            needed: bytes, by purpose.
            returning: bytes of layers that return to the host when the run ends. Activations have left it then.

        Raises:
            MemoryError: the host does not have that much memory.
        """
        spare = check_host(needed, LESS_HOST_MEMORY, self._host_budget())
        if returning:
            check_host({**needed, _RETURNING: returning}, LESS_HOST_MEMORY, self._host_budget())
        # Each process of the node offloads its own activations, so they divide the rest.
        self._host_room = None if spare is None else spare // self.group.size
        self.engine.activations.limit_host_memory(self._host_room)

    def _host_budget(self) -> HostBudget:
        """Returns the limit of host memory, less the memory of the node's other processes. Collective if there is a limit."""
        budget = self._options.host_budget
        budget.count_others(self.group.gather)
        return budget

    # ------------------------------------------------------------------ between batches, after errors, at the end of training

    def finish_updates(self) -> None:
        """Waits for updates in the background and for writes to files. After an error, the module has the host parameters.

        Called at the end of training, and before code that reads optimizers: an optimizer has another class while its updates
        run. In a thread that is not the run's, this only waits for the updates, and changes no state of the run.
        """
        if self.is_foreign:
            self.engine.updates.finish()
            return
        with self.whole_after_failure():
            self.engine.updates.finish()
            self._complete_writes()

    def _complete_writes(self) -> None:
        """Waits until all data that leaves memory is written to files.

        Raises:
            OSError: a write failed. The weights then count as torn: with the state or the gradients that were lost, no later
                checkpoint would be one of a whole step.
        """
        try:
            self.placement.complete_pending()
            self.steps.state.complete_pending()
        except OSError as error:
            self.engine.updates.torn = f"data on the disk could not be written: {error!r}"
            raise

    def _make_room(self, error: torch.OutOfMemoryError) -> None:
        """Shrinks the window, so that code that catches the error can continue. Adds a note with remedies to the error.

        Args:
            error: the out-of-memory error, which has ended a step.
        """
        plan = self.engine.plan
        self.tuner.shrink()
        if self._activations.why_kept:
            say_once(self._log, self._activations.why_kept)
        error.add_note(after_out_of_memory(plan))
        if (others := self.engine.device.held_by_others()) is not None:
            error.add_note(about_others(*others))

    def host_parameters(self) -> AbstractContextManager[None]:
        """A context in which the module has the host parameters with up-to-date values, for example for a checkpoint."""
        if self.is_foreign:
            return nullcontext()
        self._complete_writes()
        return self.engine.reading()

    @property
    def is_foreign(self) -> bool:
        """True in a thread that is not the run's. In such a thread, the module always has the host parameters."""
        return not self._threads.own

    def loading(self) -> AbstractContextManager[None]:
        """A context for loading a state into the module between steps. Marks all copies on the device as out of date first.

        With several devices, the values that a layer's owner loads count for all processes of the node.
        """
        self.engine.allow_writes()
        return self.engine.owners.loading(self.module)

    def step_begins(self) -> None:
        """Called when a step of a loop begins. With several devices, sends rank 0's buffers to all ranks.

        As with DistributedDataParallel, buffers are sent before the first step of training, and before each step that follows a
        training step.
        """
        if self._must_send_buffers:
            self.group.send_buffers(self.module)
        # In manual optimization, Lightning's ddp sends buffers once: no backward that sums gradients follows within its forward.
        self._must_send_buffers = self.trains and torch.is_grad_enabled() and self.automatic

    @contextmanager
    def whole_after_failure(self, *, make_room: bool = False) -> Generator[None, None, None]:
        """A context that restores the host parameters after an error, and explains the error.

        Exception: if user code inside the running step can still catch the error, the step continues (``Engine.abort``).

        - Reports the error to the other processes.
        - Replaces an error of torch that this package causes.
        - Adds notes to other errors, for example if only some weights have the values of the last step.

        Args:
            make_room: True if an out-of-memory error of the device shrinks the window.

        Raises:
            RuntimeError: the error that replaces an error of torch.
        """
        try:
            yield
        except BaseException as error:
            # An out-of-memory error is not reported: user code may catch it in all processes, and continue.
            if not isinstance(error, torch.OutOfMemoryError):
                self.group.fail(error)
            self.abort()
            if (explained := in_our_words(error)) is not None:
                raise RuntimeError(explained) from error
            partly = self.engine.updates.partially_updated
            note(error, partly, last_checkpoint(self.trainer) if partly else None)
            if make_room and isinstance(error, torch.OutOfMemoryError) and "made_room" not in vars(error):
                vars(error)["made_room"] = (
                    True  # only once: the same error may leave two such contexts, the optimizer step's and the batch's
                )
                self._make_room(error)
            raise

    def note_places(self, error: BaseException) -> None:
        """Adds a note to an error that was raised between two steps, if it is about tensors on two devices."""
        if self.engine_or_none is not None:
            note_places(error, [layer.name for layer in self.engine_or_none.found.stay])

    def abort(self) -> None:
        """Ends the step, and restores the host parameters. An error in this method is logged: it must not hide the first error.

        If user code inside the step can still catch the first error, the step continues (``Engine.abort``).
        """
        try:
            self.engine.abort()
            self.engine.allow_writes()  # the code that catches the error may write weights
        except Exception:
            self._log.exception("Superpipeline could not put the CPU's parameters back after the error that follows.")


def weight_in_step(module: nn.Module) -> str | None:
    """Returns the name of a weight that belongs to a run in the middle of a step; None if there is none."""
    return next((name for name, p in module.named_parameters() if issubclass(type(p), DeviceParameter)), None)


def _refuse_in_step(module: pl.LightningModule) -> None:
    """Raises a ValueError if a weight of the module belongs to another run that is in the middle of a step.

    If another run is between two steps, parameters get their ordinary classes.
    """
    name = weight_in_step(module)
    if name is not None:
        raise ValueError(
            f"{name!r} of {type(module).__name__} is a weight of another run, which is in the middle of a step. Begin this run "
            "between two steps (on_train_batch_start, on_train_batch_end), or with a copy: copy.deepcopy(module)."
        )
    for parameter in module.parameters():  # each use between two steps of another run makes the class an ordinary one
        if issubclass(type(parameter), ParameterRole):
            _ = parameter.data
