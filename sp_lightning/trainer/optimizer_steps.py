"""Runs the steps of a run's optimizers: all layers at once or layer by layer, in ``optimizer.step()`` or in the background.

``plan.update_policy`` makes these decisions (the *policy*), from facts that ``trainer.update_facts`` collects.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch.optim import Optimizer

from sp_lightning import registry
from sp_lightning.core.engine.engine import Engine
from sp_lightning.core.plan.choices import Overlap
from sp_lightning.core.plan.ledger import Ledger, Steps, make_ledger
from sp_lightning.core.plan.update_policy import (
    EarlyUpdates,
    Paging,
    UpdateFacts,
    UpdatePolicy,
    choose_overlap,
    complete,
    decide,
    may_stay_narrow,
)
from sp_lightning.core.torch_compat.patched import in_place_of
from sp_lightning.core.updates.fused import divide, has_fused_step, is_separable, runs_fused
from sp_lightning.core.updates.layerwise import LayerwiseStep
from sp_lightning.core.updates.state_store import IN_MEMORY, StateStore
from sp_lightning.trainer.options import Options
from sp_lightning.trainer.step_hooks import StepHooks, hold_host_parameters
from sp_lightning.trainer.update_facts import (
    batch_facts,
    clips_as_lightning,
    collect,
    real_optimizers,
    scaler_of,
)

Closure = Callable[[], Any]


class OptimizerSteps:
    """Runs the steps of the trainer's optimizers in one run, and prepares the run's engine for steps of all other optimizers.

    The policy is decided again when facts change: at the beginning of a loop, after the engine was built again, before batches.
    With ``optimizer_overlap="auto"``, if nothing known is against updates in backward, the first step is a trial: it runs without
    such updates, and records which layers backward uses after their gradients are complete. If backward uses none, later steps
    may update layers in backward.

    Args:
        run: the :class:`~sp_lightning.trainer.run.Run` whose layers the steps update.
        options: the user's options.
        log: the logger of the user's messages.

    Attributes:
        policy: how layers are updated; None before :meth:`begin`, which needs the optimizers.
        state: keeps the optimizers' state between steps.
    """

    def __init__(self, run: Any, options: Options, log: Any) -> None:
        self._run = run
        self._options = options
        self._log = log
        self._layerwise: dict[Optimizer, LayerwiseStep] = {}  # the steps that are divided into layers
        self._trainer = run.trainer
        self._owned_steps = run.group.steps(lambda: run.engine)
        self.state: StateStore = IN_MEMORY
        self._facts = UpdateFacts()
        self.policy: UpdatePolicy | None = None
        # The engine, the facts and the policy for which the objects in `_layerwise` were made.
        self._applied: tuple[Engine, UpdateFacts, UpdatePolicy] | None = None
        self._logged = ""  # the mode that was logged last
        self._step_hooks = StepHooks(
            lambda: run.engine_or_none,
            run.module,
            self._may_fuse,
            getattr(run.trainer, "refuse_other", None),
        )
        self._tried = False  # True after the trial (see the docstring of the class)
        # A use of a layer by backward after the layer's gradients were complete, which the trial has found.
        self._needed = ""
        self._running = 0  # the number of running steps: an optimizer may step inside another one's closure

    def open(self) -> None:
        """Registers hooks on the steps of all optimizers. Called before each batch: other code may have removed the hooks."""
        self._step_hooks.open()

    def close(self) -> None:
        """Restores the optimizers as their users configured them. Called after the engine is closed, or if it was not built."""
        self._step_hooks.close()
        self.hold_host_parameters()
        self._owned_steps.detach()
        self._layerwise.clear()
        self._applied = None
        self.state = IN_MEMORY  # the files of a store on the disk exist only during the run

    def hold_host_parameters(self) -> None:
        """Replaces device parameters that user code has put into the optimizers. Called after the user's code of a step."""
        engine = self._run.engine_or_none
        for optimizer in self._real_optimizers:
            hold_host_parameters(optimizer, None if engine is None else engine.updating)

    # ------------------------------------------------------------------ how steps run

    @property
    def running(self) -> bool:
        """True while an optimizer steps, also while its closure runs."""
        return self._running > 0

    @property
    def overlap(self) -> Overlap:
        """The phase of a batch with which updates overlap; ``"off"`` before the policy is decided."""
        return "off" if self.policy is None else self.policy.overlap

    @property
    def _frees(self) -> bool:
        """True if updates in backward free the gradients of their layer."""
        return self.policy is not None and self.policy.early is EarlyUpdates.FREES

    def _may_fuse(self, optimizer: Optimizer) -> bool:
        """Returns True if groups of an optimizer may run fused although the user has not set ``fused``.

        If True, :func:`~sp_lightning.core.updates.fused.runs_fused` decides for each group. False for an optimizer that is
        not the trainer's.
        """
        fuse = self.policy is not None and self.policy.fused
        return fuse and optimizer in self._real_optimizers and has_fused_step(optimizer)

    @property
    def _real_optimizers(self) -> list[Optimizer]:
        """The trainer's optimizers, without wrappers; an empty list outside of training."""
        return real_optimizers(self._trainer) if self._run.trains else []

    def begin(self) -> int:
        """Decides how layers are updated, and where the optimizers' state is stored. Called at the end of set-up, and after
        a loop has got optimizers.

        If state is stored on the disk, existing state is moved there.

        Returns:
            The bytes of host memory for state.

        Raises:
            ValueError: an option asks by name for a place or a mode that is not possible.
        """
        self._attach()
        self._decide(self._collect())
        nbytes = self.place_state()
        self._apply_policy()
        self._absorb_state()
        if self._differs_unasked and (fusing := self._describe_fusing()):
            self._log.warning("Superpipeline: %s", fusing)
        return nbytes

    @property
    def _differs_unasked(self) -> bool:
        """True if, only because of ``optimizer_overlap``, steps run fused that plain Lightning would also run on the CPU."""
        return self._facts.on_cpu

    def decide_again(self) -> None:
        """Decides again if the facts have changed: optimizers, hooks, or callbacks.

        Applies the policy even if the facts are the same: the engine, or an optimizer's state, may be another object now.

        Raises:
            ValueError: an option asks by name for a place or a mode that is not possible.
        """
        facts = self._collect()
        if facts != self._facts:
            self._decide(facts)
        self._apply_policy()

    def _collect(self) -> UpdateFacts:
        """Collects the facts on which the policy depends, as they are now."""
        run = self._run
        of_run = UpdateFacts(
            ranks=not run.group.alone,
            tried=self._tried,
            needed=self._needed,
        )
        return collect(of_run, self._trainer, self._options, self._real_optimizers, run.engine.found)

    def _decide(self, facts: UpdateFacts) -> None:
        """Decides when optimizers step. :meth:`_apply_policy` then applies the decision."""
        self._facts = facts
        self.policy = decide(facts)

    def _apply_policy(self) -> None:
        """Completes the policy, and makes the objects that run the steps.

        The objects are made again only if the engine, the facts or the policy have changed since the last call. A new mode of
        updates is logged at DEBUG.
        """
        run = self._run
        engine = run.engine
        facts = self._facts
        decided = self.policy
        assert decided is not None
        placement = run.placement
        paging = Paging(placement.pages_gradients, anything=self.state.elsewhere or placement.pages)
        optimizers = self._real_optimizers
        policy = self.policy = complete(decided, facts, paging)
        if policy.all_threads:  # user code may have changed the number of threads, for example in on_fit_start
            engine.device.background_threads = torch.get_num_threads()
        if self._applied != (engine, facts, policy):
            self._make_steps(policy, optimizers)
            self._applied = engine, facts, policy
        self._attach()  # even if nothing has changed: a checkpoint may have given an optimizer other state
        if policy.mode != self._logged and self._log.isEnabledFor(logging.DEBUG):
            self._log.debug("%s\nSuperpipeline: updates in the background: %s.", self._count(), policy.mode)
            self._logged = policy.mode

    def _attach(self) -> None:
        self._owned_steps.attach(self._real_optimizers, scaler_of(self._trainer), self._trainer.precision_plugin)

    def _make_steps(self, policy: UpdatePolicy, optimizers: Sequence[Optimizer]) -> None:
        """Makes the steps of the optimizers whose steps are divided into layers."""
        engine = self._run.engine
        self._layerwise = {
            optimizer: LayerwiseStep(
                optimizer,
                engine,
                policy=policy,
                own=own,
                clip_value=self._facts.batch.clip_value,
                state=self.state,
            )
            for optimizer, own in zip(optimizers, policy.optimizers, strict=True)
            if own.by_layers
        }

    def check_batch_settings(self) -> None:
        """Decides again if optimizers, hooks or clipping have changed. Called before each batch.

        The trainer's optimizers count if layers step on the GPU, which cannot run all optimizers. Hooks and clipping
        (:func:`batch_facts`) count if updates run in backward: these must not begin before hooks or clipping have had all
        gradients. If the user has not chosen the mode, logs the new mode.

        Raises:
            ValueError: ``"backward"`` was asked for by name, and is no longer possible.
        """
        facts, optimizers = self._facts, self._real_optimizers
        steps_there = facts.place == "gpu" or self._run.engine.found.stay
        exchanged = steps_there and [each.identity for each in facts.optimizers] != list(map(id, optimizers))
        early = self.overlap == "backward" and self._layerwise
        if not (exchanged or (early and batch_facts(self._trainer) != facts.batch)):
            return
        self._run.finish_updates()  # the facts depend on the optimizer's class, which is another one while updates run
        self.decide_again()
        if schedule := self._describe_schedule():
            self._log.info("Superpipeline: %s", schedule)

    def _end_trial(self, needed: Sequence[str]) -> None:
        """Decides again after the first step has shown whether updates may begin in backward.

        Args:
            needed: uses of layers in backward after their gradients were complete, or the reason why the step cannot be divided
                into layers; empty if updates may begin in backward.
        """
        self._tried = True
        self._needed = f"in the first step, {needed[0]}" if needed else ""
        self._run.finish_updates()  # the facts depend on the optimizer's class, which is another one while updates run
        self.decide_again()
        if needed:
            self._log.info("Superpipeline: %s", self._describe_schedule())

    def _describe_schedule(self) -> str:
        """Returns a sentence: when updates run, and why not sooner. Empty if the user has chosen the mode, or on the CPU."""
        policy = self.policy
        if self._options.optimizer_overlap != "auto" or policy is None or not self._real_optimizers:
            return ""
        if self._run.engine.device.computes_on_host:
            return ""
        if self.overlap == "backward" or (self.overlap == "forward" and not policy.why):
            # "forward" without a reason: the first step is still to try whether updates may begin in backward.
            return "Optimizer steps overlap with backward and the next forward pass."
        if policy.overlap == "forward":
            return f"Optimizer steps overlap with the next forward pass; {policy.why}."
        return f"Optimizer steps do not overlap with the model; {policy.why}."

    def advice(self, seconds: float) -> str:
        """Returns a sentence if at least half of a run was spent on updates that the GPU could run; else empty.

        Waits for all updates. The sentence is logged after training.

        Args:
            seconds: the duration of the run.
        """
        engine, facts = self._run.engine, self._facts
        if engine.device.computes_on_host or not self._real_optimizers or self.policy is None:
            return ""
        self._run.finish_updates()  # so that the last stall counts
        stats = engine.stats()
        on_updates = stats.update_stall_seconds + stats.step_seconds
        if facts.place == "gpu" or facts.ranks or facts.against_gpu or 2 * on_updates < seconds:
            return ""
        try:
            choose_overlap(replace(facts, place="gpu"))
        except ValueError:  # the GPU cannot update in the mode that the user chose
            return ""
        if not self._run.may_step_on_gpu():
            return ""
        return 'Try optimizer_on="gpu": the GPU then runs the optimizer steps, and results have its last bits.'

    def engine_rebuilt(self) -> None:
        """Makes the steps by layers for the new engine. Called after the engine was built again.

        Steps that are not divided into layers look up the present engine themselves.
        """
        self._attach()
        if self._layerwise:
            self.decide_again()
            self._absorb_state()

    # ------------------------------------------------------------------ the optimizers' state

    def place_state(self) -> int:
        """Decides where the optimizers' state is stored, and sets :attr:`state`. Returns the bytes of host memory for state."""
        ledger = self._count()
        if self._options.disk is None:
            return ledger.state or 0
        optimizers = self._real_optimizers
        with self._owned_steps.owned(optimizers):
            self.state, nbytes = registry.disk_tier().open_store(
                self._run, self._options, optimizers, ledger, self._log
            )
        return nbytes

    def _absorb_state(self) -> None:
        """If state is stored on the disk, moves state there that no step has made, for example the state of a checkpoint."""
        if self.state is not IN_MEMORY:
            with self._owned_steps.owned(self._real_optimizers):
                self.state.absorb(self._real_optimizers, self._run.engine.updating.layer_of)

    def state_loaded(self) -> None:
        """Called when the optimizers have got the state of a checkpoint.

        If state is stored on the disk, tensors that are views of the checkpoint's file are copied to memory.
        """
        self._attach()
        self._absorb_state()
        with self._owned_steps.owned(self._real_optimizers):
            self.state.loaded(self._trainer.optimizers)

    # ------------------------------------------------------------------ results for users

    @property
    def ledger(self) -> Ledger | None:
        """Host memory, as it is now; None outside of training."""
        return self._count() if self.policy is not None else None

    def _count(self) -> Ledger:
        """Returns host memory of the run, with the decided place and mode, and with the files on a disk."""
        trainer, overlap, placement = self._trainer, self.overlap, self._run.placement
        on_device = self._facts.place == "gpu"
        paging = Paging(gradients=placement.pages_gradients)
        pieces = overlap != "off" and not on_device and not any(map(is_separable, trainer.optimizers))
        steps = Steps(
            early=overlap == "backward" and (self._frees or on_device),
            accumulate=trainer.accumulate_grad_batches,
            clips=self._clips(),
            narrow=(pieces or on_device) and may_stay_narrow(self._facts, paging),
            on_device=on_device,
        )
        ledger = make_ledger(self._run.engine.plan, trainer.optimizers, steps, self._run.engine.found.on_gpu)
        return self.state.count(placement.count(ledger), placement)

    def _clips(self) -> str | None:
        """Returns how the trainer clips gradients: ``"norm"``, ``"value"``, or None if it does not."""
        if not self._trainer.gradient_clip_val:
            return None
        return self._trainer.gradient_clip_algorithm or "norm"

    def remarks(self) -> list[str]:
        """Returns sentences for the user about the steps, which are logged with the plan."""
        fusing = "" if self._differs_unasked else self._describe_fusing()  # then it is a warning
        remarks = [fusing, self.state.remark, self._describe_schedule()]
        return [remark for remark in remarks if remark]

    def _describe_fusing(self) -> str:
        """Returns a sentence if optimizers whose user did not set ``fused`` run fused, with the CPU's bits; else empty."""
        optimizers = self._real_optimizers if self.policy is not None else ()
        names = {
            type(optimizer).__name__
            for optimizer in optimizers
            if self._may_fuse(optimizer) and self._fuses_a_group(optimizer)
        }
        if not names:
            return ""
        overlap = self._options.optimizer_overlap
        why = off = ""
        if overlap in ("forward", "backward"):
            why = f', which optimizer_overlap="{overlap}" needs'
            off = ' and optimizer_overlap="off"'
        runs_fused_here = f"{' and '.join(sorted(names))} runs fused on the CPU{why}"
        if self._run.engine.found.stay:
            return f"{runs_fused_here}, and layers that stay (gpu_layers) step on the GPU as you made it."
        return (
            f"{runs_fused_here}: results are bitwise those of plain Lightning whose optimizer has fused=True and steps on the "
            f"CPU; fused=False in the optimizer{off} leaves it unfused."
        )

    def _fuses_a_group(self, optimizer: Optimizer) -> bool:
        """Returns True if a group runs fused although its user has set neither ``fused`` nor ``foreach``."""
        on_gpu = self._run.engine.found.on_gpu
        parts = [divide(group, on_gpu)[0] for group in optimizer.param_groups]
        return any(not p.get("fused") and p["params"] and runs_fused(optimizer, p, fuse=True) for p in parts)

    # ------------------------------------------------------------------ a step

    def forget_freed(self) -> None:
        """Makes freed gradients None, so that reading them no longer raises an error. Called after the training step."""
        if self._frees:
            self._run.engine.updating.forget_freed()

    def forget_running_steps(self) -> None:
        """Called when no step is running. An earlier one may have raised an error, after which torch calls no hook."""
        self._step_hooks.forget_running_steps()

    def run(self, optimizer: Any, closure: Closure, step: Callable[[Closure], Any], plugin: Any) -> Any:
        """Runs one step, inside of the strategy's ``optimizer_step``. After the trial step, decides the policy again.

        Args:
            optimizer: the optimizer.
            closure: runs forward and backward.
            step: Lightning's step of the optimizer. It calls the closure that it gets.
            plugin: the precision plugin. During the step, its clipping methods are replaced.

        Returns:
            The result of ``step``.
        """
        layerwise = self._layerwise.get(optimizer)

        def closure_then_prepare() -> Any:
            result = closure()
            self._run.engine.end_without_backward()  # no effect if the closure has run a backward
            self._step_hooks.prepare_after_closure(optimizer)
            return result

        self.state.step_begins(self._run.placement)
        outer = self._step_hooks.deferring  # an optimizer may step inside another one's closure
        # In manual optimization, user code may catch an out-of-memory error of this step. If it does not, `Run.step`,
        # inside of which this step runs, shrinks the window.
        make_room = self._run.trains and self._run.automatic
        self._running += 1
        try:
            with self._run.whole_after_failure(make_room=make_room), ExitStack() as around:
                if layerwise is not None:
                    around.enter_context(layerwise.deferring())
                    self._step_hooks.deferring = optimizer, layerwise
                around.enter_context(in_place_of(plugin, self._clipping(layerwise, plugin)))
                result = step(closure_then_prepare)
        finally:
            self._step_hooks.give_back_groups()
            self._step_hooks.deferring = outer
            self._running -= 1
            if not self._running:
                self._step_hooks.forget_running_steps()  # torch calls no hook after a step that has raised an error
        if layerwise is not None and layerwise.tried and not self._tried:
            self._end_trial(layerwise.needed)
        return result

    def _clipping(self, layerwise: LayerwiseStep | None, plugin: Any) -> dict[str, Any]:
        """Returns, by name, the clipping methods to use during one step in place of the precision plugin's."""
        return {} if layerwise is None else self._clips_layerwise(layerwise, plugin)

    def _clips_layerwise(self, layerwise: LayerwiseStep, plugin: Any) -> dict[str, Any]:
        """Returns, by name, the methods that clip layer by layer; an empty dictionary if the plugin clips all gradients.

        The plugin clips all gradients if ``UpdatePolicy.clip`` returns ``"whole"``, or if it has its own clipping methods. Also
        sets whether gradients are clipped at once or in the updates.
        """
        assert self.policy is not None
        clipping = layerwise.clipping
        hooks_read_gradients = self._run.hooks.may_write_weights("gradients")
        clip = self.policy.clip(read=hooks_read_gradients)
        if clip == "whole" or not clips_as_lightning(plugin):
            return {}
        clipping.at_once = clip == "at once"

        def clip_by_norm(optimizer: Optimizer, clip_val: float) -> None:
            layerwise.refuse_other_clipping(clip_value=None)  # a norm does not limit single elements
            clipping.by_norm(optimizer, clip_val)

        def clip_by_value(optimizer: Optimizer, clip_val: float) -> None:
            layerwise.refuse_other_clipping(clip_value=clip_val)
            clipping.by_value(optimizer, clip_val)

        return {"clip_grad_by_norm": clip_by_norm, "clip_grad_by_value": clip_by_value}
