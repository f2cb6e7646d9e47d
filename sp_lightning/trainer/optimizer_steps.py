"""Runs the steps of a run's optimizers as the policy says: whole or by layers, at once or in the background."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from typing import Any, Protocol

import lightning.pytorch as pl
import torch
from torch.optim import Optimizer

from sp_lightning import registry
from sp_lightning.engine.layerwise import LayerwiseStep
from sp_lightning.engine.placement import Placement
from sp_lightning.engine.state_store import IN_MEMORY, StateStore
from sp_lightning.engine.streamer import Streamer
from sp_lightning.plan.choices import Overlap
from sp_lightning.plan.ledger import Ledger, Steps, make_ledger
from sp_lightning.plan.update_policy import (
    EarlyUpdates,
    Paging,
    Place,
    UpdateFacts,
    UpdatePolicy,
    against_gpu_bits,
    against_staying,
    choose_overlap,
    complete,
    decide,
    may_stay_narrow,
)
from sp_lightning.registry import step_place
from sp_lightning.torch_compat.patched import in_place_of
from sp_lightning.trainer.group import Group
from sp_lightning.trainer.options import Options
from sp_lightning.trainer.step_hooks import StepHooks
from sp_lightning.trainer.update_facts import (
    CLIPPING,
    batch_facts,
    clips_as_lightning,
    collect,
    real_optimizers,
    scaler_of,
)
from sp_lightning.trainer.user_hooks import UserHooks, clips_in_its_own_way
from sp_lightning.updates.fused import has_fused_step, is_separable, runs_fused

Closure = Callable[[], Any]


class SteppedRun(Protocol):
    """What :class:`OptimizerSteps` uses of a run."""

    module: pl.LightningModule
    trains: bool
    group: Group
    placement: Placement
    hooks: UserHooks
    streamer: Streamer | None

    @property
    def engine(self) -> Streamer:
        """The engine. It may be built anew while the run lasts."""

    @property
    def steps_on_device(self) -> bool:
        """Whether layers step on the GPU, as far as is decided."""

    @property
    def shares_base(self) -> bool:
        """Whether the run is a trial of a SharedBase."""

    def step_on_host(self) -> None:
        """Gives the memory of steps on the GPU to other things."""

    def let_layers_stay(self, may: bool) -> None:
        """Says whether results would be the same if layers stayed on the GPU."""

    def most_that_stay(self) -> int:
        """Returns how many layers could stay on the GPU."""

    def finish_updates(self) -> None:
        """Waits for updates in the background."""

    def whole_after_failure(self, *, make_room: bool = False) -> AbstractContextManager[None]:
        """A context after which the module is whole, whatever was raised in it."""


class OptimizerSteps:
    """Runs the optimizers' steps of one run, and announces every other optimizer's step to its engine.

    Args:
        run: the run whose layers the steps update.
        options: the user's.
        log: the logger for the mode of updates, at DEBUG.

    Attributes:
        policy: how layers are updated; None until :meth:`begin`, when there are optimizers.
        state: keeps the optimizers' state between steps.
    """

    def __init__(self, run: SteppedRun, options: Options, log: Any) -> None:
        self._run = run
        self._options = options
        self._log = log
        self._layerwise: dict[Optimizer, LayerwiseStep] = {}
        self._trainer: Any = run.module.trainer
        self._whole = run.group.steps(lambda: run.engine)
        self.state: StateStore = IN_MEMORY
        self._facts = UpdateFacts()
        self.policy: UpdatePolicy | None = None
        # What ``_layerwise`` was made for.
        self._executed: tuple[Streamer, UpdateFacts, UpdatePolicy] | None = None
        self._logged = ""  # the mode that was logged last
        self._bits = registry.gpu_bits(None)
        self._none_stay = ""  # why gpu_layers="auto" keeps no layer on the device
        self._place = step_place()(lambda: run.engine.device, self._count_as)
        self._step_hooks = StepHooks(lambda: run.streamer, run.module, self._fuses_whole)
        self._tried = False  # whether a step has shown what backward needs
        self._needed = ""  # its use of a layer whose gradients were complete
        self._steps = 0  # how many steps are running: an optimizer may step inside another one's closure
        self._updates = False  # whether the innermost of them has come to the optimizer's own code
        self._backward = False  # whether one has begun in it that updates layers
        self._counted: int | None = None  # how many steps the trainer had counted when the last one returned

    def open(self) -> None:
        """Starts noticing the steps of all optimizers. Called again, because other code may remove torch's hooks."""
        self._step_hooks.open()

    def close(self) -> None:
        """Restores the optimizers as their users configured them. Called after the run is closed."""
        self._step_hooks.close()
        self._whole.detach()
        self._layerwise.clear()
        self._executed = None
        self.state = IN_MEMORY  # files are gone with the run

    # ------------------------------------------------------------------ how steps run

    @property
    def overlap(self) -> Overlap:
        """What updates run beside; ``"off"`` until that is decided."""
        return "off" if self.policy is None else self.policy.overlap

    @property
    def _frees(self) -> bool:
        return self.policy is not None and self.policy.early is EarlyUpdates.FREES

    def _is_fused(self, optimizer: Optimizer) -> bool:
        """Returns True if an optimizer runs fused if its user has left that open."""
        fuse = self.policy is not None and self.policy.fused
        return fuse and optimizer in self._real_optimizers and has_fused_step(optimizer)

    def _fuses_whole(self, optimizer: Optimizer) -> bool:
        """Returns True if a step of all layers runs fused. Logs once that it has the CPU's last bits."""
        if (layerwise := self._layerwise.get(optimizer)) is not None:
            layerwise.warn_of_bits("user code has called torch's optimizer, not the one that self.optimizers() returns")
        return self._is_fused(optimizer)

    @property
    def _real_optimizers(self) -> list[Optimizer]:
        """The optimizers that step; none outside of training."""
        return real_optimizers(self._trainer) if self._run.trains else []

    def begin(self) -> int:
        """Decides how layers are updated, and where the optimizers' state is. Returns the bytes of host memory for state.

        Raises:
            ValueError: an option asks by name for a place or a mode that is not possible.
        """
        self._decide(self._collect())
        state = self.place_state()
        self._execute()
        self.absorb_state()
        return state

    def arrange(self) -> None:
        """Decides again if the facts have changed: optimizers, hooks, callbacks, or the layers that stay.

        Raises:
            ValueError: an option asks by name for a place or a mode that is not possible.
        """
        if (facts := self._collect()) != self._facts:
            self._decide(facts)
        self._execute()

    def _collect(self) -> UpdateFacts:
        run = self._run
        return collect(
            self._trainer,
            self._options,
            self._real_optimizers,
            self._place,
            place="gpu" if run.steps_on_device else "cpu",
            stay=bool(run.engine.plan.stay),
            on_cpu=run.engine.device.computes_on_host,
            ranks=not run.group.alone,
            shares_base=run.shares_base,
            tried=self._tried,
            needed=self._needed,
        )

    def _decide(self, facts: UpdateFacts) -> None:
        """Decides where and when optimizers step."""
        if self._place.moves(self._real_optimizers, facts):
            self._run.step_on_host()
            facts = replace(facts, place="cpu")
        self._facts, self.policy = facts, decide(facts)

    def _execute(self) -> None:
        """Completes the policy, and has the optimizers step as it says."""
        run, engine, facts, decided = self._run, self._run.engine, self._facts, self.policy
        assert decided is not None
        paging = Paging(self.state.elsewhere, run.placement.pages_gradients, run.placement.pages)
        optimizers = self._real_optimizers
        bits = self._bits = registry.gpu_bits(None if facts.place == "gpu" else engine.device.plain_steps_on)
        bits.decide(
            optimizers,
            run.module,
            against_gpu_bits(decided, facts, paging),
            fuse=facts.fused_optimizer is True,
            scaled=facts.batch.scales,
            clips=self._clips() == "norm" or clips_in_its_own_way(run.module),
        )
        likes = [bits.stepping.get(each) for each in optimizers]
        like_gpu = [(like is not None, like is not None and like.norms is not None) for like in likes]
        policy = self.policy = complete(decided, facts, paging, like_gpu)
        self._none_stay = against_staying(facts, like_gpu=bool(bits.stepping) and bits.whole)
        run.let_layers_stay(not self._none_stay)
        if self._executed != (engine, facts, policy):
            self._make_steps(policy, optimizers)
            self._executed = engine, facts, policy
        # Again each time: a checkpoint may have given an optimizer other state.
        self._whole.attach([each for each in optimizers if each not in self._layerwise], scaler_of(self._trainer))
        placed = self._options.disk is None or self.state is not IN_MEMORY  # only the primary's state is on the disk
        if placed and policy.mode != self._logged:
            self._log.debug("%s\nSuperpipeline: updates in the background: %s.", self._count(), policy.mode)
            self._logged = policy.mode

    def _make_steps(self, policy: UpdatePolicy, optimizers: Sequence[Optimizer]) -> None:
        """Makes the steps of optimizers that are taken apart by layers."""
        engine = self._run.engine
        engine.updating.gradients.keep_for_own_slot = policy.gradients_stay
        if policy.all_threads:
            engine.device.background_threads = torch.get_num_threads()
        self._layerwise = {
            optimizer: LayerwiseStep(
                optimizer,
                engine.updating,
                policy=policy,
                own=own,
                clip_value=self._facts.batch.clip_value,
                state=self.state,
                like=self._bits.stepping.get(optimizer),
            )
            for optimizer, own in zip(optimizers, policy.optimizers, strict=True)
            if own.by_layers
        }

    def look_again(self) -> None:
        """Decides again if user code has added hooks, or changed the clipping, since the last batch. Called when a batch begins.

        Raises:
            ValueError: ``"backward"`` was asked for by name, and is no longer possible.
        """
        if self.overlap != "backward" or not self._layerwise or batch_facts(self._trainer) == self._facts.batch:
            return
        self._run.finish_updates()
        self.arrange()
        if when := self._when():
            self._log.info("Superpipeline: %s", when)

    def _end_trial(self, needed: Sequence[str]) -> None:
        """Decides again after a step has shown whether updates may begin in backward.

        Args:
            needed: uses of layers whose gradients were complete, or why no step can be divided.
        """
        self._tried, self._needed = True, f"in the first step, {needed[0]}" if needed else ""
        self._run.finish_updates()  # until then optimizers have a class that waits
        self.arrange()
        if needed:
            self._log.info("Superpipeline: %s", self._when())

    def _when(self) -> str:
        """Returns when updates run and why not sooner, as a sentence; empty if the user has chosen that, or on the CPU."""
        policy = self.policy
        if self._options.optimizer_overlap != "auto" or policy is None or not self._real_optimizers:
            return ""
        if self._run.engine.device.computes_on_host:
            return ""
        if self.overlap == "backward" or (self.overlap == "forward" and not policy.why):  # the first step tries that
            return "Optimizer steps overlap with backward and the next forward pass."
        if policy.overlap == "forward":
            return f"Optimizer steps overlap with the next forward pass; {policy.why}."
        return f"Optimizer steps do not overlap with the model; {policy.why}."

    def better(self) -> str:
        """Returns how steps would be faster, in the other place or at another time, in sentences; empty if there is no choice."""
        if self._run.engine.device.computes_on_host or not self._real_optimizers or self.policy is None:
            return ""
        self._run.finish_updates()  # until then optimizers have a class that waits
        other = self._place.better(self._real_optimizers, self._facts) if self._run.group.alone else ""
        earlier = self._earlier() if self.overlap == "forward" else ""
        return " ".join(filter(None, [other, earlier or self._would_stay()]))

    def _earlier(self) -> str:
        """Returns a sentence if the run has mostly stalled on updates, and they may also run during backward; else empty."""
        stats = self._run.engine.stats()
        if 2 * stats.update_stall_seconds < stats.waited_seconds:
            return ""
        try:
            choose_overlap(replace(self._facts, overlap="backward"), self._facts.place)
        except ValueError:
            return ""
        return (
            'Try optimizer_overlap="backward": updates then overlap with the backward pass, too '
            "(p.grad is None after a step)."
        )

    def _would_stay(self) -> str:
        """Returns a sentence if the run has mostly stalled on updates, and layers fit on the GPU with their state; else empty."""
        stats, count = self._run.engine.stats(), self._run.most_that_stay()
        waited = stats.update_stall_seconds + stats.step_seconds
        if not count or 2 * waited < stats.waited_seconds:
            return ""
        layers = len(self._run.engine.plan.layers)
        return f'Try gpu_layers="auto": {count} of {layers} layers fit on the GPU with their optimizer state, and step there.'

    def rearrange(self) -> None:
        """Makes the steps that update layer by layer again. Called after the engine was built again."""
        if self._layerwise:
            self.arrange()
            self.absorb_state()

    # ------------------------------------------------------------------ the optimizers' state

    def place_state(self) -> int:
        """Decides where the optimizers' state lies. Returns the bytes of host memory that it takes."""
        ledger = self._count()
        if self._options.disk is None:
            return ledger.state or 0
        optimizers = self._real_optimizers
        self.state, nbytes = registry.state_on_disk(
            self._run, self._options, optimizers, ledger, self._still, self._log
        )
        return nbytes

    def absorb_state(self) -> None:
        """Called when optimizers have state that their steps have not made."""
        if self.state is not IN_MEMORY:
            self.state.absorb(self._real_optimizers, self._run.engine.updating.layer_of)

    def state_loaded(self) -> None:
        """Called when optimizers have the state of a checkpoint, which may be in its file still."""
        self.absorb_state()
        self.state.loaded(self._trainer.optimizers)

    # ------------------------------------------------------------------ what a user reads

    @property
    def ledger(self) -> Ledger | None:
        """Host memory and traffic, as they are now; None outside of training."""
        return self._count() if self.policy is not None else None

    def _count(self) -> Ledger:
        trainer = self._trainer
        ledger = self._count_as(self._facts.place, self.overlap)
        fused = all(runs_fused(o, g, fuse=self._is_fused(o)) for o in trainer.optimizers for g in o.param_groups)
        placement = self._run.placement
        return self.state.count(placement.count(replace(ledger, fused=fused)), placement)

    def _count_as(self, place: Place, overlap: Overlap) -> Ledger:
        """Returns host memory and traffic with steps in this place and in this mode."""
        trainer, on_device = self._trainer, place == "gpu"
        paging = Paging(gradients=self._run.placement.pages_gradients)
        pieces = overlap != "off" and not on_device and not any(map(is_separable, trainer.optimizers))
        steps = Steps(
            early=overlap == "backward" and (self._frees or on_device),
            accumulate=trainer.accumulate_grad_batches,
            clips=self._clips(),
            scales=scaler_of(trainer) is not None,
            pieces=pieces,
            narrow=(pieces or on_device) and may_stay_narrow(self._facts, paging),
            sliced=self._run.placement.sliced,
            on_device=on_device,
        )
        return make_ledger(self._run.engine.plan, trainer.optimizers, steps)

    @contextmanager
    def _still(self) -> Generator[None, None, None]:
        """A context in which no update is under way, in any thread."""
        with ExitStack() as stack:
            if self._run.streamer is not None:  # state that is elsewhere outlives the run
                self._run.finish_updates()  # updates of this thread, with their errors
                stack.enter_context(self._run.engine.updates.still())
            yield

    def _clips(self) -> str | None:
        """Returns how the trainer clips gradients: ``"norm"``, ``"value"``, or None if it does not."""
        return (self._trainer.gradient_clip_algorithm or "norm") if self._trainer.gradient_clip_val else None

    def remarks(self) -> list[str]:
        """Returns what a user should know of the steps, in sentences."""
        remarks = [self.state.remark] if self.state.remark else []
        if when := self._when():
            remarks.append(when)
        if remark := self._place.remark(self._facts.place):
            remarks.append(remark)
        remarks[:0] = self.bits()
        if self._options.gpu_layers == "auto" and self._none_stay:
            remarks.append(f'No layer stays on the GPU (gpu_layers="auto"): {self._none_stay}.')
        stepping = self._real_optimizers if self.policy is not None else ()
        names = {
            type(optimizer).__name__
            for optimizer in stepping
            if optimizer not in self._bits.stepping and self._is_fused(optimizer) and self._fuses_a_group(optimizer)
        }
        if names:
            overlap = self._options.optimizer_overlap
            why = off = ""
            if self._options.fused_optimizer == "auto" and overlap in ("forward", "backward"):
                why, off = f', which optimizer_overlap="{overlap}" needs', ' with optimizer_overlap="off"'
            said = f"{' and '.join(sorted(names))} runs fused on the CPU{why}"
            if self._run.engine.plan.stay:
                said += ", and layers that stay step as you made it: weights are those of neither."
            else:
                said += (
                    ": results are bitwise those of plain Lightning whose optimizer has fused=True and steps on the CPU; "
                    f"fused_optimizer=False{off} leaves it as it is."
                )
            remarks.insert(0, said)
        return remarks

    def _fuses_a_group(self, optimizer: Optimizer) -> bool:
        """Returns True if a group runs fused although its user has set neither ``fused`` nor ``foreach``."""
        return any(not g.get("fused") and runs_fused(optimizer, g, fuse=True) for g in optimizer.param_groups)

    def bits(self) -> list[str]:
        """Returns whose bits steps on the CPU have, in sentences; empty without a GPU, or if the GPU steps."""
        if self.policy is None:
            return []
        mixed = bool(self._run.engine.plan.stay)
        return self._bits.sentences(automatic=self._run.module.automatic_optimization, mixed=mixed)

    # ------------------------------------------------------------------ a step

    def backward_begins(self) -> None:
        """Notes that a backward begins, which may update layers. A signal handler that reads a weight waits until it ends."""
        self._backward = bool(self._steps) and self.overlap == "backward"

    def forget_freed(self) -> None:
        """Makes freed gradients None. Called after the training step, before ``zero_grad``."""
        if self._frees:
            self._run.engine.updating.forget_freed()

    def none_runs(self) -> None:
        """Called when no step is running. One may have raised an error."""
        self._step_hooks.none_runs()

    def run(self, optimizer: Any, closure: Closure, step: Callable[[Closure], Any], plugin: Any) -> Any:
        """Runs one step.

        Args:
            optimizer: the optimizer.
            closure: runs forward and backward.
            step: Lightning's step of the optimizer, which calls the closure that it is given.
            plugin: the precision plugin, which clips gradients.
        """
        layerwise = self._layerwise.get(optimizer)

        def closed() -> Any:
            self._updates = False
            result = closure()
            self._run.engine.end_without_backward()
            self._step_hooks.closed(optimizer)
            self._updates, self._backward = True, False
            return result

        self.state.step_begins(self._run.placement)
        outer = self._step_hooks.deferring, self._updates  # an optimizer may step inside another one's closure
        # User code may catch the error of a manual step. If it does not, the step of the batch makes room.
        make_room = self._run.trains and self._run.module.automatic_optimization
        self._counted = None
        self._steps += 1
        try:
            with self._run.whole_after_failure(make_room=make_room), ExitStack() as around:
                if layerwise is not None:
                    around.enter_context(layerwise.deferring())
                    self._step_hooks.deferring = optimizer, layerwise
                around.enter_context(in_place_of(plugin, self._clipping(layerwise, plugin)))
                result = step(closed)
                self._counted = self._trainer.global_step
        finally:
            self._step_hooks.give_back_groups()
            self._step_hooks.deferring, self._updates = outer
            self._backward = False
            self._steps -= 1
        if layerwise is not None and layerwise.tried and not self._tried:
            self._end_trial(layerwise.needed)
        return result

    @property
    def is_torn(self) -> bool:
        """True if an optimizer's step has updated some weights and will update others, or is not counted yet.

        A signal handler may save a checkpoint, in which weights, optimizer state and the trainer's count have to agree.
        """
        if self._steps and (streamer := self._run.streamer) is not None:
            return self._updates or self._backward or streamer.updates.torn is not None
        return self._counted is not None and self._counted == self._trainer.global_step

    def _clipping(self, layerwise: LayerwiseStep | None, plugin: Any) -> dict[str, Any]:
        """Returns the methods that replace a precision plugin's in one step, by name."""
        methods = {} if layerwise is None else self._clips_layerwise(layerwise, plugin)
        return self._whole.clipping(methods, plugin, in_updates=layerwise is not None and self.overlap != "off")

    def _clips_layerwise(self, layerwise: LayerwiseStep, plugin: Any) -> dict[str, Any]:
        """Returns the methods that clip layer by layer; none if the precision plugin has its own."""
        clipping, read = layerwise.clipping, self._run.hooks.may_write_weights("gradients")
        assert self.policy is not None
        clip = self.policy.clip(read=read, like_gpu=clipping.like_gpu)
        if clip == "whole" or not clips_as_lightning(plugin):
            return {}
        clipping.at_once = clip == "at once"

        def by_norm(optimizer: Optimizer, clip_val: float) -> None:
            layerwise.refuse_other_clipping(None)
            clipping.by_norm(optimizer, clip_val)

        def by_value(optimizer: Optimizer, clip_val: float) -> None:
            layerwise.refuse_other_clipping(clip_val)
            clipping.by_value(optimizer, clip_val)

        return dict(zip(CLIPPING, (by_norm, by_value), strict=True))
