"""Decides where and when each layer is updated: pure functions make a frozen :class:`UpdatePolicy` from frozen facts.

- ``trainer.update_facts`` collects the facts.
- :func:`decide` needs the facts only. It decides when optimizers step, and checks that the place in the facts is possible.
- :func:`complete` adds how they step, which also depends on paging to a disk.

The engine executes the policy without further decisions.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace
from typing import Literal

from sp_lightning.core.plan.choices import Overlap, Place, Share

Unit = Literal["whole", "layers"]
Clip = Literal["whole", "at once", "in update"]


class EarlyUpdates(enum.Enum):
    """When a layer is updated with ``optimizer_overlap="backward"``, and whether its gradients are freed."""

    NO = "after backward"
    TRIED = "after backward, which shows whether they could be in it"
    KEEPS = "in backward or later; gradients stay until zero_grad"
    FREES = "in backward, after which gradients are freed, because memory is short and no hook looks at them"

    @property
    def in_backward(self) -> bool:
        """True if updates may begin before all gradients are complete."""
        return self in (EarlyUpdates.KEEPS, EarlyUpdates.FREES)


# ---------------------------------------------------------------------- facts


@dataclass(frozen=True)
class BatchFacts:
    """Facts that may change between two batches.

    Attributes:
        automatic: True if Lightning runs backward and the optimizers (automatic optimization).
        clip: how the trainer clips gradients, ``"norm"`` or ``"value"``, and the limit; None if it does not clip.
        clips_as_lightning: True if the precision plugin clips by Lightning's own methods.
        scales: True if gradients are scaled (``16-mixed``).
        averages: True if StochasticWeightAveraging is among the callbacks.
        hook: the name of a user's hook that may read gradients or weights before the step; empty if there is none.
    """

    automatic: bool = True
    clip: tuple[str, float] | None = None
    clips_as_lightning: bool = True
    scales: bool = False
    averages: bool = False
    hook: str = ""

    @property
    def clip_value(self) -> float | None:
        """The limit of each element of a gradient; None if elements are not clipped."""
        return self.clip[1] if self.clip is not None and self.clip[0] == "value" else None

    def against_early_updates(self, place: Place) -> str:
        """Returns why a layer's gradients cannot be used before all gradients are complete; empty if they can.

        Two other changes between batches do not need another mode. A layer whose parameters have new post-accumulate hooks is
        updated after backward. The closure's ``zero_grad`` undoes changes of gradients in a step hook.
        """
        if not self.automatic:
            return "optimization is manual"
        if self.clip is not None and (place == "gpu" or self.clip[0] != "value" or not self.clips_as_lightning):
            return f"gradient_clip_val={self.clip[1]} needs all gradients before the first update"
        if self.scales:
            return "the gradient scaler of 16-mixed needs all gradients before the first update"
        if self.averages:
            return "StochasticWeightAveraging steps without a backward to adapt BatchNorm"
        return f"{self.hook} may look at gradients or weights before the step" if self.hook else ""


@dataclass(frozen=True)
class OptimizerFacts:
    """Facts about one optimizer.

    Attributes:
        identity: its ``id``, which changes if a callback replaces the optimizer.
    """

    identity: int = 0


@dataclass(frozen=True)
class UpdateFacts:
    """The facts for :func:`decide` and :func:`complete`. Each reason is a clause of a sentence; empty if there is no reason.

    Attributes:
        overlap, place, gpu_layers: the options. ``place`` is ``optimizer_on``.
        disk: True if ``disk=`` is given.
        against_both: why an optimizer cannot step parameters in both places, if it has trained ones on the GPU (``gpu_layers``)
            and others.
        on_cpu: True if the model computes on the CPU.
        ranks: True if several devices train.
        optimizers: the optimizers that step; empty if nothing is trained.
        batch: the facts that may change between two batches.
        against_background: why ``"auto"`` updates nothing in the background.
        against_layers: why steps on the CPU cannot run layer by layer.
        instead: how steps on the CPU could run layer by layer, as the beginning of a sentence; empty if unknown.
        against_forward: why updates cannot overlap with the next forward.
        against_gpu: why the optimizers cannot step on the GPU.
        against_gpu_background: why steps on the GPU cannot run in the background.
        accumulation_hooks: True if parameters have post-accumulate hooks.
        step_hooks: True if optimizers have step hooks.
        unread_before_step: True if neither user code nor a gradient scaler reads or writes gradients between backward and the
            step.
        unread: True if user code does not read gradients until they are set to None.
        read_after_step: True if user code runs between the step and ``zero_grad``, or after the last step.
        tried: True after a step that recorded which layers backward uses.
        needed: a use of a layer after its gradients were complete, which that step recorded; empty if there was none.
    """

    overlap: Overlap = "auto"
    place: Place = "cpu"
    gpu_layers: Share = 0
    disk: bool = False
    against_both: str = ""
    on_cpu: bool = False
    ranks: bool = False
    optimizers: tuple[OptimizerFacts, ...] = (OptimizerFacts(),)
    batch: BatchFacts = BatchFacts()
    against_background: str = ""
    against_layers: str = ""
    instead: str = ""
    against_forward: str = ""
    against_gpu: str = ""
    against_gpu_background: str = ""
    accumulation_hooks: bool = False
    step_hooks: bool = False
    unread_before_step: bool = True
    unread: bool = True
    read_after_step: bool = False
    tried: bool = False
    needed: str = ""

    @property
    def fuses_on_cpu(self) -> bool:
        """True if steps on the CPU run fused when the user's optimizer does not specify it.

        It is False if the model computes on the CPU: plain Lightning then steps on the CPU, too, and results must equal its
        results. It is True with the modes ``"forward"`` and ``"backward"``, which need fused steps.
        """
        return not self.on_cpu or self.overlap in ("forward", "backward")


@dataclass(frozen=True)
class Paging:
    """The data that is paged out of host memory between uses, for example to a disk.

    Attributes:
        gradients: True if gradients of some layers are paged.
        anything: True if trained weights, gradients or optimizer state are paged.
    """

    gradients: bool = False
    anything: bool = False


# ---------------------------------------------------------------------- the policy


@dataclass(frozen=True)
class OptimizerPolicy:
    """How the steps of one optimizer run.

    Attributes:
        by_layers: True if it steps layer by layer.
        narrow: True if gradients of casts keep the cast's dtype until the update.
    """

    by_layers: bool = False
    narrow: bool = False


@dataclass(frozen=True)
class UpdatePolicy:
    """Where, when and how layers are updated. :func:`decide` sets the first four fields and ``fused``, :func:`complete` the rest.

    Attributes:
        place: where optimizers step. Layers that stay on the GPU (``gpu_layers``) always step on the GPU.
        overlap: the phase that updates overlap with.
        early: when a layer is updated in backward, and whether its gradients are freed.
        why: why ``"auto"`` does not use a faster mode; empty if it uses the fastest mode, or if the user chose the mode.
        unit: the layers of one step: all that this process steps, or one.
        fused: True if optimizers on the CPU run fused when the user's optimizer does not specify it.
        all_threads: True if updates in the background use as many threads as a step of all layers: the last bits of a step that
            is not fused depend on the number of threads.
        measure_norms: True if norms of gradients are computed during backward.
        clips_by_layers: True if gradients are clipped layer by layer, whether user code reads them or not.
        clips_unread_by_layers: True if gradients that user code does not read are clipped layer by layer.
        ends_on_host: True if an update ends only when its results are in host memory, because the next update may reuse it.
        optimizers: how each optimizer's steps run.
    """

    place: Place = "cpu"
    overlap: Overlap = "off"
    early: EarlyUpdates = EarlyUpdates.NO
    why: str = ""
    unit: Unit = "whole"
    fused: bool = False
    all_threads: bool = False
    measure_norms: bool = False
    clips_by_layers: bool = False
    clips_unread_by_layers: bool = False
    ends_on_host: bool = False
    optimizers: tuple[OptimizerPolicy, ...] = ()

    @property
    def mode(self) -> str:
        """The overlap, with the reason if it is not the fastest."""
        return f"{self.overlap} ({self.why})" if self.why else self.overlap

    def clip(self, *, read: bool) -> Clip:
        """Returns how gradients are clipped.

        - ``"whole"``: by the precision plugin.
        - ``"at once"``: layer by layer, in Lightning's call that clips.
        - ``"in update"``: each layer in its update.

        Args:
            read: True if user code may read gradients before the step. Then they must be clipped before user code reads them.
        """
        if not (self.clips_by_layers or (self.clips_unread_by_layers and not read)):
            return "whole"
        return "at once" if read or self.place == "gpu" else "in update"  # updates on the GPU do not clip

    def __str__(self) -> str:
        units = {"whole": "all layers at once", "layers": "layer by layer"}
        fused = ", fused if the optimizer leaves that open" if self.fused else ""
        return f"{units[self.unit]} on the {self.place.upper()}{fused}; overlap: {self.mode}"


# ---------------------------------------------------------------------- decisions


def decide(facts: UpdateFacts) -> UpdatePolicy:
    """Decides when optimizers step. Checks that they can step so, and where the user wants it.

    Raises:
        ValueError: the user chose a place or a mode that is not possible.
    """
    if facts.against_both:
        raise ValueError(
            f"gpu_layers={facts.gpu_layers} steps some layers on the GPU and the others on the CPU: {facts.against_both}. Leave "
            "gpu_layers out, or give each place an optimizer of its own."
        )
    if facts.place == "gpu" and facts.against_gpu:
        raise ValueError(f'optimizer_on="gpu" cannot be used: {facts.against_gpu}. Leave it out: then the CPU steps.')
    overlap, why = choose_overlap(facts)
    early = EarlyUpdates.NO
    if overlap == "backward":
        early, why = _choose_early(facts)
        overlap = "backward" if early.in_backward else "forward"
    fused = facts.place == "cpu" and facts.fuses_on_cpu  # on the GPU an optimizer runs as its user made it
    return UpdatePolicy(facts.place, overlap, early, why, fused=fused)


def choose_overlap(facts: UpdateFacts) -> tuple[Overlap, str]:
    """Returns the phase that updates overlap with, and, for ``"auto"``, why it is not a faster phase.

    If this returns ``"backward"`` for ``"auto"``, the uses of layers that the first step records may still be against it.

    Raises:
        ValueError: the user chose a mode that is not possible.
    """
    asked = facts.overlap
    if asked == "off":
        return "off", ""
    if not facts.optimizers:
        return "off", "there is no optimizer"
    if facts.place == "gpu":
        never, better = facts.against_gpu_background, ""
    else:
        never, better = facts.against_layers, facts.instead
    if asked == "auto":
        if why := facts.against_background or never or facts.against_forward:
            return "off", why
        why = _against_backward(facts)
        return ("forward" if why else "backward"), why
    if why := never or (_against_backward(facts) if asked == "backward" else facts.against_forward):
        on_gpu = 'optimizer_on="gpu", ' if facts.place == "gpu" else ""
        other = "off" if never or facts.against_forward else "forward"
        raise ValueError(
            f'optimizer_overlap="{asked}" cannot be used: {why}. '
            f'{better or "Use"} SuperpipelineStrategy({on_gpu}optimizer_overlap="{other}").'
        )
    return asked, ""


def complete(policy: UpdatePolicy, facts: UpdateFacts, paging: Paging) -> UpdatePolicy:
    """Completes the policy of :func:`decide`.

    Args:
        policy: where and when optimizers step.
        facts: the facts from which :func:`decide` made the policy.
        paging: the data that is paged out of host memory.
    """
    on_gpu, waits = policy.place == "gpu", policy.overlap == "off"
    by_layers = steps_by_layers(policy, facts, paging)
    # Paged gradients are never narrow: if user code read one, there would be no memory to widen it.
    narrow = may_stay_narrow(facts, paging)
    clips_norm = facts.batch.clip is not None and facts.batch.clip[0] == "norm"
    return replace(
        policy,
        unit="layers" if by_layers else "whole",
        all_threads=waits and by_layers,
        measure_norms=clips_norm and facts.unread_before_step and (paging.gradients or not waits) and not on_gpu,
        clips_by_layers=paging.gradients or on_gpu,
        clips_unread_by_layers=not waits,
        ends_on_host=on_gpu and facts.disk,
        optimizers=(OptimizerPolicy(by_layers=by_layers, narrow=narrow),) * len(facts.optimizers),
    )


def steps_by_layers(policy: UpdatePolicy, facts: UpdateFacts, paging: Paging) -> bool:
    """Returns True if optimizers step layer by layer."""
    # On several devices, all processes must decide the same, so they ask for the option.
    ranks_with_disk = facts.ranks and facts.disk
    on_gpu = policy.place == "gpu"
    return policy.overlap != "off" or on_gpu or paging.anything or ranks_with_disk


def may_stay_narrow(facts: UpdateFacts, paging: Paging) -> bool:
    """Returns True if gradients of casts may keep the cast's dtype until the update."""
    return not facts.ranks and not paging.gradients and facts.unread


def _against_backward(facts: UpdateFacts) -> str:
    """Returns why updates cannot begin in backward; empty if they can."""
    if facts.accumulation_hooks:
        return "parameters have post-accumulate hooks, which may write gradients of other parameters"
    if facts.step_hooks:
        return "the optimizer has step hooks, which run after backward"
    return facts.batch.against_early_updates(facts.place)


def _choose_early(facts: UpdateFacts) -> tuple[EarlyUpdates, str]:
    """Returns when layers are updated in the mode ``"backward"``, and, for ``"auto"``, why they are not updated in backward."""
    if facts.overlap == "auto":
        if against := _against_early(facts):
            return EarlyUpdates.NO, against
        if not facts.tried:
            return EarlyUpdates.TRIED, ""
    frees = facts.place == "gpu" or (facts.overlap == "backward" and not facts.read_after_step)
    return (EarlyUpdates.FREES if frees else EarlyUpdates.KEEPS), ""


def _against_early(facts: UpdateFacts) -> str:
    """Returns why ``"auto"`` does not begin updates in backward; empty if nothing known is against it."""
    if facts.ranks:
        return "with several devices, it is not the default"
    if facts.disk:  # user code may look at gradients that this mode has freed
        return 'with a disk, optimizer_overlap="backward" frees gradients'
    if facts.place == "gpu" and facts.read_after_step:
        return "on the GPU, gradients are freed as soon as they are used, and a hook may look at them"
    return facts.needed
