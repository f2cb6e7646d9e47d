"""Lightning's calls → the engine, nothing else."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch.plugins.precision import (
    BitsandbytesPrecision,
    MixedPrecision,
    Precision,
    TransformerEnginePrecision,
)
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.checkpoint import CheckpointError
from torch.utils.hooks import RemovableHandle

from sp_lightning.device.accelerator import device_for
from sp_lightning.device.timeline import Timeline
from sp_lightning.engine.streamer import Streamer
from sp_lightning.model.checks import refuse_cuda_graphs
from sp_lightning.model.find import find_layers
from sp_lightning.model.found import Found, Parted
from sp_lightning.model.patterns import LayerChoice
from sp_lightning.observe.messages import LESS_HOST_MEMORY, RUN_AGAIN_DIFFERED, TRANSFORMS, after_out_of_memory
from sp_lightning.observe.stats import Stats
from sp_lightning.optim.fused import FusedStep, HostGradScaler
from sp_lightning.optim.layerwise import LayeredStep
from sp_lightning.plan.activation_policy import Activations, Mode, resolve, summary
from sp_lightning.plan.host_memory import check_host, spare_bytes
from sp_lightning.plan.ledger import Ledger, make_ledger
from sp_lightning.plan.options import (
    Count,
    Fused,
    by_name,
    checked_activations,
    checked_budget,
    checked_count,
    checked_fused,
    checked_layers,
    checked_overlap,
    checked_patterns,
    checked_switch,
)
from sp_lightning.plan.plan import Plan, make_plan
from sp_lightning.trainer.callback import SuperpipelineCallback, say_once
from sp_lightning.trainer.checkpoint_io import BESIDE_AVERAGES, AtomicCheckpointIO, load
from sp_lightning.trainer.compat import (
    attach_callback,
    base_of,
    forget_module,
    given_checkpoint_io,
    is_a,
    note_device,
    set_inherited,
    skips_backward,
    trainer_of,
    wraps_another,
)
from sp_lightning.trainer.frozen_weights import FROZEN, Frozen, LeftOut, fill_in, note_loaded, note_trained
from sp_lightning.trainer.retry import Snapshot
from sp_lightning.trainer.update_policy import Overlap, choose_overlap, may_measure_early, scaler_of
from sp_lightning.trainer.user_hooks import is_known, is_quiet
from sp_lightning.tune.tuner import Tuning
from sp_lightning.tune.window import Window
from sp_lightning.weights.buffers import find_averages
from sp_lightning.weights.device_parameter import DeviceParameter

if TYPE_CHECKING:
    _Base = SingleDeviceStrategy
else:
    _Base = object  # whose namesake it will be, the subclasses say


class StreamingStrategy(_Base):
    """Streams the layers of an unchanged LightningModule through a few slots of device memory.

    Weights, gradients and optimizer state are on the host; the model's layers pass through ``k + k_prime`` slots on
    the device while they run. Results are bitwise those of plain Lightning with the same optimizer on the host.

    Args:
        k: layers usable on the device at once, at least 1. More is faster and takes more memory. ``"auto"``: after two
            batches through the smallest window, the one that is predicted to be fastest within the budget (2 on the
            CPU, which sets no limit).
        k_prime: layers that move as one transfer, at least 1, or ``"auto"``.
        memory_budget: device memory for everything: bytes, a size (``"8GiB"``), or a share of what is free at set-up
            (``0.8``); None for all that is free but a margin of a sixteenth.
        activations: what becomes of what autograd saves in each layer's forward: ``"keep"`` it on the device;
            ``"recompute"`` it in backward, from the layer's inputs; ``"offload"`` it to the host and back; ``"auto"``, for
            each layer the one that is predicted to be fastest within the budget; or patterns of names of layers and of
            modules above them, the first match deciding (``{"encoder.**": "offload"}``). Results are the same. With
            ``"recompute"`` hooks on modules inside a layer, prints and global variables see its forward twice.
        layers: what is a layer: None (found), names or glob patterns of modules, module classes, or a callable that
            takes the LightningModule and returns names or modules.
        resident: names or glob patterns of modules or parameters that stay on the device.
        pin_memory: page-lock host memory, without which copies are synchronous; that of gradients and activations in the
            first batch, which takes longer for it.
        fused_optimizer: run torch's optimizers fused (``fused=True``) where they can be; other last bits, much faster.
            ``"auto"``: on an accelerator, and where ``optimizer_overlap`` asks for it by name.
        optimizer_overlap: when the host updates weights: ``"off"``, in the optimizer's step; ``"forward"``, layer by
            layer in the background, under the next forward; ``"backward"``, each layer as soon as its gradients are
            complete, which are then freed (``p.grad`` is None after the step); ``"auto"``, ``"forward"`` on an
            accelerator where no user code would have to wait for it, else ``"off"``. Results are the same.
        save_frozen: whether checkpoints hold frozen weights. If not, those are left out that are as they were when training
            began; a file without them resumes where the module has the same ones, which is checked.
        check_writes: look for weights that are written within a step by a way that torch shows no sign of (a reference that
            was taken before the step, NumPy, DLPack, a storage), by passes over all weights in each step: what was written
            on the device is taken over, the rest is refused by name. For finding out; it is slow.
        callback: attach a :class:`~sp_lightning.SuperpipelineCallback` while a run lasts, if the trainer has none.
        device, accelerator, checkpoint_io, precision_plugin: as in Lightning's ``SingleDeviceStrategy``; the device
            is the trainer's unless it is given.

    Raises:
        ValueError, TypeError: an option that cannot be.

    The method is Superpipeline, arXiv 2410.08791.
    """

    strategy_name = "superpipeline"
    callback_class: type[SuperpipelineCallback] = SuperpipelineCallback
    # A child of Lightning's own logger: shown where its messages are shown.
    log = logging.getLogger("lightning.pytorch.superpipeline")

    @by_name
    def __init__(
        self,
        *,
        k: Count = "auto",
        k_prime: Count = "auto",
        memory_budget: int | float | str | None = None,
        activations: Activations = "keep",
        layers: LayerChoice = None,
        resident: str | Sequence[str] = (),
        pin_memory: bool = True,
        fused_optimizer: Fused = "auto",
        optimizer_overlap: Overlap = "auto",
        save_frozen: bool = True,
        check_writes: bool = False,
        callback: bool = True,
        device: str | int | torch.device | None = None,
        accelerator: pl.accelerators.Accelerator | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
    ) -> None:
        self._activations = checked_activations(activations)
        self._k = checked_count("k", k)
        self._window = Window(
            self._k,
            checked_count("k_prime", k_prime),
            checked_budget(memory_budget),
            filled=self._activations == "auto",
        )
        self._host_room: int | None = None
        self._modes: dict[str, Mode] | None = None
        self._parted: list[Parted] = []
        self._layers = checked_layers(layers)
        self._resident = checked_patterns("resident", resident)
        self._pin_memory = checked_switch("pin_memory", pin_memory)
        self._fused_optimizer = checked_fused(fused_optimizer)
        self._optimizer_overlap = checked_overlap(optimizer_overlap)
        self._save_frozen = checked_switch("save_frozen", save_frozen)
        self._check_writes = checked_switch("check_writes", check_writes)
        if self._check_writes and optimizer_overlap == "backward":
            raise ValueError(
                'check_writes=True compares weights over a backward; optimizer_overlap="backward" updates them in it. Use '
                'optimizer_overlap="off" while you look.'
            )
        self._callback = checked_switch("callback", callback)
        self._device_given = device is not None
        self._device = torch.device("cpu" if device is None else device)
        self._streamer: Streamer | None = None
        self._plan: Plan | None = None
        self._tuning: Tuning | None = None
        self._ledger: Ledger | None = None
        self._last_stats: Stats | None = None
        self._last_fetches: dict[str, int] = {}
        self._frozen: Frozen | None = None
        self._left_out: LeftOut = {}
        self._hooks: list[RemovableHandle] = []
        self._fused: dict[torch.optim.Optimizer, FusedStep] = {}
        self._layered: dict[torch.optim.Optimizer, LayeredStep] = {}
        self._deferring: torch.optim.Optimizer | None = None
        self._torn: str | None = None
        self._mode: Overlap = "off"
        self._said = ""
        self._attached: SuperpipelineCallback | None = None
        self._quiet: dict[str, bool] = {}
        self._last_phase = ""
        super().__init__(
            device=self._device,
            accelerator=accelerator,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
        )

    # ------------------------------------------------------------------ what a user reads

    @property
    def plan(self) -> Plan:
        """What was decided, from set-up on.

        Raises:
            RuntimeError: before set-up.
        """
        if self._streamer is not None:
            return self._streamer.plan
        if self._plan is None:
            raise RuntimeError("There is no plan yet: it is made in trainer.fit (validate, test, predict).")
        return self._plan

    @property
    def activations(self) -> dict[str, Mode]:
        """What becomes of activations, by layers and parts beside them; what ``"auto"`` has come to, too.

        It can be given as ``activations=`` to another strategy.

        Raises:
            RuntimeError: before set-up.
        """
        if self._streamer is not None:
            self._modes = dict(self._streamer.activations.modes)
        if self._modes is None:
            raise RuntimeError("There are no activations yet: they begin in trainer.fit.")
        return self._modes

    @property
    def ledger(self) -> Ledger:
        """Host memory and traffic of training, from set-up for ``trainer.fit`` on.

        Raises:
            RuntimeError: before, and outside training.
        """
        if self._streamer is not None and self._ledger is not None:
            self._ledger = self._make_ledger()  # layers may have been unfrozen, accumulation changed
        if self._ledger is None:
            raise RuntimeError("There is no ledger: it is made in trainer.fit, which alone has optimizers.")
        return self._ledger

    def stats(self) -> Stats:
        """Counters since the last set-up; they can be read after the run, too.

        Raises:
            RuntimeError: before set-up.
        """
        if self._streamer is not None:
            return self._streamer.stats()
        if self._last_stats is None:
            raise RuntimeError("There are no counters yet: they begin in trainer.fit (validate, test, predict).")
        return self._last_stats

    def fetches(self) -> dict[str, int]:
        """How often each layer was fetched since the last set-up, by name: which experts were, say.

        Raises:
            RuntimeError: before set-up.
        """
        self.stats()
        return self._last_fetches if self._streamer is None else self._streamer.fetches()

    # ------------------------------------------------------------------ what the trainer hands over

    @property
    def parallel_devices(self) -> list[torch.device]:
        """The device that was given, if any. Lightning hands its choice to strategies that have this attribute."""
        return [self._device] if self._device_given else []

    @parallel_devices.setter
    def parallel_devices(self, devices: Sequence[torch.device]) -> None:
        if len(devices) != 1:
            raise ValueError(
                f"superpipeline runs on one device; the trainer chose {len(devices)}: {[str(d) for d in devices]}. "
                f"Pass Trainer(devices=1), or devices=[{devices[0].index or 0}] for a certain one."
            )
        self._device = devices[0]

    @property
    def root_device(self) -> torch.device:
        """The device that computes: the one that was given, else the trainer's choice."""
        return self._device

    @property
    def num_nodes(self) -> int:
        """One; Lightning hands the trainer's number to strategies that have this attribute."""
        return 1

    @num_nodes.setter
    def num_nodes(self, number: int) -> None:
        if number != 1:
            raise ValueError(
                f"superpipeline runs on one node; the trainer was given {number}. Pass Trainer(num_nodes=1)."
            )

    @property
    def checkpoint_io(self) -> CheckpointIO:
        """The one that was given, or wrapped; else an :class:`~sp_lightning.trainer.checkpoint_io.AtomicCheckpointIO`."""
        given = given_checkpoint_io(self)
        if given is None:
            self.checkpoint_io = AtomicCheckpointIO()
        elif wraps_another(given):
            given.checkpoint_io = AtomicCheckpointIO()  # which changes nothing where it has one
        return super().checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO | None) -> None:
        set_inherited(StreamingStrategy, self, "checkpoint_io", io)

    @property
    def precision_plugin(self) -> Precision:
        return super().precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, plugin: Precision | None) -> None:
        if is_a(plugin, TransformerEnginePrecision) or is_a(plugin, BitsandbytesPrecision):
            raise ValueError(
                f"superpipeline cannot work with {type(plugin).__name__}: it replaces layers by ones whose weights cannot "
                'be streamed. Use precision="bf16-mixed" or "bf16-true".'
            )
        if is_a(plugin, MixedPrecision) and type(plugin.scaler) is torch.amp.GradScaler:
            plugin.scaler = HostGradScaler.like(plugin.scaler)
        set_inherited(StreamingStrategy, self, "precision_plugin", plugin)

    def connect(self, model: pl.LightningModule) -> None:
        super().connect(model)
        trainer = trainer_of(model)  # none yet, where it is connected by hand; the trainer does it again
        if trainer is None or not self._callback:
            return
        if not any(isinstance(each, SuperpipelineCallback) for each in trainer.callbacks):
            self._attached = self.callback_class()
            attach_callback(trainer, self._attached)

    def _detach_callback(self) -> None:
        """The trainer's callbacks are the user's again, however the run has ended."""
        trainer = None if self.lightning_module is None else trainer_of(self.lightning_module)
        if trainer is not None and self._attached is not None:
            trainer.callbacks = [each for each in trainer.callbacks if each is not self._attached]
        self._attached = None

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Generator[None, None, None]:
        """Modules are made on the host: on the device they might not fit."""
        with super().tensor_init_context(empty_init), torch.device("cpu"):  # the device of the inner context counts
            yield

    # ------------------------------------------------------------------ set-up

    def setup(self, trainer: pl.Trainer) -> None:
        # As the base class, but optimizer state stays where the parameters are: on the host.
        assert self.accelerator is not None
        assert self.model is not None
        self.accelerator.setup(trainer)
        self.model = self.precision_plugin.convert_module(self.model)
        self.model_to_device()
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
            self._said = ""
            self._arrange_overlap()
            assert self._ledger is not None
            needed = {"for gradients": self._ledger.gradients, "for the optimizer's state": self._ledger.state or 0}
            check_host(needed, LESS_HOST_MEMORY)
            assert self._streamer is not None
            self._host_room = spare_bytes(needed)
            self._streamer.limit_activations(self._host_room)
            assert self.lightning_module is not None
            note_trained(self.lightning_module)
            self._frozen = None if self._save_frozen else Frozen(self.lightning_module)
        else:
            self._frozen = None
        self.setup_precision_plugin()

    def model_to_device(self) -> None:
        """Absorb the parameters into the host store; only what is no parameter goes to the device."""
        assert self.lightning_module is not None
        self._close_streamer()
        self._torn = None
        self._build()
        self._hooks = [
            register_optimizer_step_pre_hook(self._before_update),
            register_optimizer_step_post_hook(self._after_update),
        ]

    def setup_optimizers(self, trainer: pl.Trainer) -> None:
        super().setup_optimizers(trainer)
        self._unfuse()
        if self._runs_fused():
            self._fused = {each: FusedStep(each) for each in self.optimizers if FusedStep.suits(each)}

    def _runs_fused(self) -> bool:
        """Whether optimizers whose users left it open run fused: not where the same steps on the CPU are plain's."""
        if self._fused_optimizer != "auto":
            return self._fused_optimizer
        on_host = self.root_device.type == "cpu" if self._streamer is None else self._streamer.device.computes_on_host
        return not on_host or self._implies_fused()

    def _implies_fused(self) -> bool:
        return self._fused_optimizer == "auto" and self._optimizer_overlap in ("forward", "backward")

    def remarks(self) -> list[str]:
        """What a user should know about this run beside the plan, in sentences."""
        found = []
        if self._tuning is not None:
            found.append("k and k' are chosen once two batches have been measured.")
        if isinstance(self._k, int) and self._k > self.plan.k:
            found.append(
                f"k={self._k} is capped at {self.plan.k}, the number of layers: all are on the device at once."
            )
        with self._fused_shown() as fused:
            names = sorted({type(each).__name__ for each in fused})
        if names:
            why = f', which optimizer_overlap="{self._optimizer_overlap}" needs' if self._implies_fused() else ""
            found.append(
                f"{' and '.join(names)} runs fused on the host{why}: results are bitwise those of plain Lightning whose "
                "optimizer has fused=True and steps on the CPU; fused_optimizer=False leaves it as it is."
            )
        return found

    @contextmanager
    def _fused_shown(self) -> Generator[list[torch.optim.Optimizer], None, None]:
        """While this is active groups are as a step will find them; yields the optimizers that will run fused."""
        try:
            yield [optimizer for optimizer, fused in self._fused.items() if fused.switch_on()]
        finally:
            for fused in self._fused.values():
                fused.hide()

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=False):
            optimizer.load_state_dict(state)

    def __getstate__(self) -> dict[str, Any]:
        """Without what belongs to a run, which may be under way."""
        run: dict[str, Any] = {
            "_streamer": None,
            "_hooks": [],
            "_fused": {},
            "_layered": {},
            "_tuning": None,
            "_deferring": None,
        }
        return {**super().__getstate__(), **run}

    def teardown(self) -> None:
        self._detach_callback()
        if self._streamer is not None and self._ledger is not None:
            self._ledger = self._make_ledger()  # with the state that optimizers have come to
        self._close_streamer()
        self._layered.clear()
        self._parted.clear()
        self._unfuse()
        if self.lightning_module is not None and any(p.is_meta for p in self.lightning_module.parameters()):
            forget_module(self)  # set-up refused it; the base class would fail to move it to the CPU
        super().teardown()

    # ------------------------------------------------------------------ steps

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        # Callbacks and module have had their hooks: but for an optimizer's step around it, training_step comes next.
        super().on_train_batch_start(batch, batch_idx)
        streamer = self._current()
        if not self._is_quiet("train"):
            streamer.forget()
        self._tune("train", batch)
        if self._steps_quietly():
            streamer.expect("train", training=True)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._run("train", super().training_step, *args, **kwargs)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._run("validate", super().validation_step, *args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._run("test", super().test_step, *args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._run("predict", super().predict_step, *args, **kwargs)

    def post_backward(self, closure_loss: Tensor) -> None:
        super().post_backward(closure_loss)
        if self._streamer is not None:
            self._streamer.end_without_backward()  # the module's own backward may do nothing

    def pre_backward(self, closure_loss: Tensor) -> None:
        super().pre_backward(closure_loss)
        if self._streamer is not None:
            self._streamer.announce_backward(closure_loss, quiet=self._is_quiet("backward"))

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], *args: Any, **kwargs: Any) -> Any:
        layered = self._layered.get(optimizer)

        def closed() -> Any:
            result = closure()
            if self._streamer is not None:
                self._streamer.end_without_backward()
            _hold_hosts(optimizer)
            if optimizer in self._fused and not (layered is not None and layered.begun):
                self._fused[optimizer].switch_on()  # gradients are there now, and may be sparse
            return result

        try:
            with self._whole_after_failure(), nullcontext() if layered is None else self._deferred(optimizer, layered):
                return super().optimizer_step(optimizer, closed, *args, **kwargs)
        except torch.OutOfMemoryError as error:
            if not hasattr(error, "__notes__"):  # not told yet: it came from backward or from the optimizer
                self._made_room(error, None)
            raise
        finally:
            if optimizer in self._fused:
                self._fused[optimizer].hide()

    def on_exception(self, exception: BaseException) -> None:
        self._abort()
        super().on_exception(exception)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        self._refuse_torn()
        # A checkpoint holds the host's parameters, whenever it is taken.
        with nullcontext() if self._streamer is None else self._streamer.reading():
            state = super().lightning_module_state_dict()
            self._left_out = {} if self._frozen is None else self._frozen.leave_out(state)
        if self._streamer is not None:
            self._streamer.settle()  # on_save_checkpoint follows
        return state

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        if self._left_out and "state_dict" in checkpoint:
            checkpoint[FROZEN] = self._left_out
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        return load(checkpoint_path, self.checkpoint_io, self.lightning_module, weights_only)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        assert self.lightning_module is not None
        if not self._save_frozen:
            note_loaded(self.lightning_module, checkpoint["state_dict"])
        for key in ("state_dict", BESIDE_AVERAGES):
            if key in checkpoint and FROZEN in checkpoint:
                copies = key == BESIDE_AVERAGES  # the averages are loaded in between
                filled = fill_in(self.lightning_module, checkpoint[key], checkpoint[FROZEN], copies=copies)
                cast(Any, checkpoint)[key] = filled
        if self._streamer is not None:
            self._streamer.settle()
        super().load_model_state_dict(checkpoint, strict)

    def expect_next_batch(self) -> None:
        """The batch is over: where nothing writes weights before the next one, its first layers may come now."""
        if self._streamer is not None and self._is_quiet("train"):
            with self._whole_after_failure():
                self._streamer.expect("train", training=True)

    def _run(self, phase: str, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """A step, and once more where the window was too large for it and nothing else has happened."""
        if self._streamer is None and not self._hooks:
            self._refuse_torn()
            return step(*args, **kwargs)  # called by hand, outside of a run: the weights are whole, on the host
        if phase != "train":
            self._current()  # on_train_batch_start has looked
            self._tune(phase, args)
        snapshot = None
        if self._tuning is not None:
            snapshot = Snapshot(self.lightning_module, (args, kwargs))
        try:
            return self._attempt(phase, step, *args, **kwargs)
        except torch.OutOfMemoryError as error:
            if not self._made_room(error, snapshot):
                raise
        return self._attempt(phase, step, *args, **kwargs)

    def _attempt(self, phase: str, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        assert self._streamer is not None
        assert self.lightning_module is not None
        streamer, training = self._streamer, phase == "train"
        manual = training and not self.lightning_module.automatic_optimization
        # A loop's first batch trusts no copy: hooks have run since the last step, whatever that was.
        quiet = self._steps_quietly() if training else phase == self._last_phase and self._is_quiet(phase)
        self._last_phase = phase
        with self._whole_after_failure():
            streamer.begin(phase, training=training, manual=manual, quiet=quiet)
            with streamer.saving():
                output = step(*args, **kwargs)
                skipped = training and skips_backward(self.lightning_module.trainer)  # weight averaging does that
                if training and not manual and output is not None and not skipped:
                    streamer.await_backward()
                else:
                    streamer.end(settle=training or self._may_write_after(phase))
                return output

    def _tune(self, phase: str, batch: Any) -> None:
        """Between two batches: k and k' are chosen, if they are to be."""
        assert self.lightning_module is not None
        fitting = self.lightning_module.trainer.state.fn == TrainerFn.FITTING
        if self._tuning is not None and (phase == "train") == fitting:
            self._tuning.batch_starts(batch, self._mode)

    def _made_room(self, error: torch.OutOfMemoryError, snapshot: Snapshot | None) -> bool:
        """Shrink the window after an error. Returns whether the step can be repeated; the error says why not."""
        plan = self.plan
        smaller = self._tuning is not None and self._tuning.shrink()
        obstacle = "it was not a forward" if snapshot is None else snapshot.obstacle()
        if smaller and snapshot is not None and not obstacle:
            self.log.warning(
                "Superpipeline: out of device memory with k = %d, k' = %d; the step is repeated with k = %d, k' = %d.",
                plan.k, plan.k_prime, self.plan.k, self.plan.k_prime,
            )  # fmt: skip
            snapshot.restore()
            return True
        error.add_note(after_out_of_memory(plan, self.plan, obstacle, balanced=self._activations == "auto"))
        return False

    def _is_quiet(self, phase: str) -> bool:
        if phase not in self._quiet:
            assert self.lightning_module is not None
            self._quiet[phase] = not self._check_writes and is_quiet(self.lightning_module.trainer, phase)
        return self._quiet[phase]

    def _steps_quietly(self) -> bool:
        """Whether nobody can write weights between a batch's start and its training step, which an optimizer's step calls."""
        if "step" not in self._quiet:
            assert self.lightning_module is not None
            automatic = self.lightning_module.automatic_optimization
            known = all(is_known(each) for each in self.optimizers)
            self._quiet["step"] = not self._check_writes and (not automatic or (known and self._is_quiet("optimizer")))
        return self._quiet["step"]

    def _may_write_after(self, phase: str) -> bool:
        """Whether a hook after a batch of this phase, which may be the loop's last, could write weights."""
        return not (self._is_quiet(phase) and self._is_quiet("train"))

    def _loop_starts(self) -> None:
        self._last_phase = ""
        self._quiet.clear()  # callbacks may have come and gone

    def on_train_start(self) -> None:
        self._loop_starts()
        self._arrange_overlap()

    def on_train_end(self) -> None:
        self._finish_updates()

    def on_validation_start(self) -> None:
        self._loop_starts()
        if self._tuning is not None:
            self._tuning.stop_timing()

    def on_test_start(self) -> None:
        self._loop_starts()

    def on_predict_start(self) -> None:
        self._loop_starts()

    def make_timeline(self) -> Timeline:
        """For the device of this run. Waits for it once."""
        assert self._streamer is not None
        return self._streamer.device.make_timeline()

    def record(self, timeline: Timeline, *, on: bool) -> None:
        """Whether intervals are kept from here on; what has begun before is kept when it ends."""
        timelines = [] if self._streamer is None else self._streamer.device.timelines
        if on and timeline not in timelines:
            timelines.append(timeline)
        elif not on and timeline in timelines:
            timelines.remove(timeline)

    @contextmanager
    def _whole_after_failure(self) -> Generator[None, None, None]:
        """Whatever is raised inside, host parameters are back in the modules when it gets out."""
        try:
            yield
        except BaseException as error:
            self._abort()
            if isinstance(error, RuntimeError) and "don't yet support saved tensor hooks" in str(error):
                raise RuntimeError(TRANSFORMS) from error
            if isinstance(error, CheckpointError) and self._streamer is not None and self._streamer.run_again:
                error.add_note(RUN_AGAIN_DIFFERED.format(unit=self._streamer.run_again))
            raise

    def _abort(self) -> None:
        """Make the module whole; a failure in this must not hide the error that is under way."""
        try:
            if self._streamer is not None:
                self._streamer.abort()
                self._streamer.settle()  # whoever catches the error may write weights
        except Exception:
            self.log.exception("Superpipeline could not put the host's parameters back after the error that follows.")

    # ------------------------------------------------------------------ updates in the background

    def _arrange_overlap(self) -> None:
        """Decide how the optimizers' steps run, from optimizers, hooks and callbacks as they are now."""
        assert self._streamer is not None
        assert self.lightning_module is not None
        trainer = self.lightning_module.trainer
        with self._fused_shown():
            mode, why = choose_overlap(self._optimizer_overlap, trainer, self.optimizers)
        self._mode = mode
        measure = may_measure_early(trainer)
        self._layered = {
            each: LayeredStep(each, self._streamer.updating, early=mode == "backward", measure=measure)
            for each in (self.optimizers if mode != "off" else ())
        }
        self._ledger = self._make_ledger()
        said = f"off ({why})" if why else mode
        if said != self._said:
            self.log.debug("%s\nSuperpipeline: updates in the background: %s.", self._ledger, said)
        self._said = said

    def _make_ledger(self) -> Ledger:
        assert self.lightning_module is not None
        trainer = self.lightning_module.trainer
        return make_ledger(
            self.plan,
            self.optimizers,
            early=self._mode == "backward",
            accumulate=trainer.accumulate_grad_batches,
            clips=(trainer.gradient_clip_algorithm or "norm") if trainer.gradient_clip_val else None,
            scales=scaler_of(trainer) is not None,
        )

    @contextmanager
    def _deferred(self, optimizer: torch.optim.Optimizer, layered: LayeredStep) -> Generator[None, None, None]:
        """While this is active the optimizer's step, and the clipping before it, are submitted to the background."""
        plugin: Any = self.precision_plugin
        theirs = (type(plugin).clip_grad_by_norm, type(plugin).clip_grad_by_value)
        base = base_of(plugin, Precision)
        lightnings = (base.clip_grad_by_norm, base.clip_grad_by_value)
        fold = theirs == lightnings and self._is_quiet("gradients")
        self._deferring = optimizer
        if fold:
            plugin.clip_grad_by_norm, plugin.clip_grad_by_value = layered.clip_by_norm, layered.clip_by_value
        try:
            with layered.deferring():
                yield
        finally:
            self._deferring = None
            if fold:
                del plugin.clip_grad_by_norm, plugin.clip_grad_by_value

    def _finish_updates(self) -> None:
        if self._streamer is not None:
            with self._whole_after_failure():
                self._streamer.updates.finish()

    def _refuse_torn(self) -> None:
        torn = self._torn if self._streamer is None else self._streamer.updates.torn
        if torn is not None:
            if sys.exception() is not None:  # a checkpoint on exception: Lightning tears nothing down if that fails
                self._close_streamer()
                self._unfuse()
            raise RuntimeError(
                f"These weights are not those of any whole step and are not saved: {torn}. Go on from the last checkpoint."
            )

    # ------------------------------------------------------------------ the engine

    def _current(self) -> Streamer:
        """The engine, made anew if parameters or modules were exchanged behind our back."""
        assert self._streamer is not None
        for each in self._parted:
            each.refuse_trained()
        if self._streamer.changed():
            self.log.debug("Superpipeline: parameters or modules have been exchanged; the layers are absorbed again.")
            self._finish_updates()
            streamer, self._streamer = self._streamer, None  # if building fails there is none
            streamer.close()
            self._build()
            assert self._streamer is not None
            if self._layered:
                self._arrange_overlap()
        if self._streamer.thawed():
            plan = self._streamer.plan
            self._streamer.recount(make_plan(self._streamer.found, k=plan.k, k_prime=plan.k_prime))
        return self._streamer

    def _build(self) -> None:
        module = self.lightning_module
        assert module is not None
        device = device_for(self.root_device)
        plugin: Any = self.precision_plugin
        autocast = _AUTOCAST.get(plugin.precision) if is_a(plugin, MixedPrecision) else None
        if not device.synchronous:
            refuse_cuda_graphs(module)
        find = partial(find_layers, module, resident=self._resident, autocast=autocast)
        found = find(layers=self._layers)
        plan = self._plan = self._window.begin(found, device, lambda patterns: find(layers=patterns))
        balanced = self._activations == "auto" and self._window.room is not None
        choice: Activations = "keep" if self._activations == "auto" and not balanced else self._activations
        modes = resolve(choice, module, found.units)
        if found.experts and (balanced or "recompute" in modes.values()):
            found = find(layers=self._layers, whole_blocks=True)
            plan = self._plan = self._window.begin(found, device)
        if choice != "keep":
            self.log.debug("Superpipeline: activations: %s.", "measured first" if balanced else summary(modes))
            if found.ungrouped:
                say_once(self.log, f"Superpipeline: {found.ungrouped}")
        check_host(_absorbing(plan), LESS_HOST_MEMORY)
        averages = find_averages(module)
        _move_the_rest(module, found, averages, self.root_device)
        self._streamer = Streamer(
            module,
            found,
            plan,
            device,
            pin=self._pin_memory,
            modes=modes,
            host_room=self._host_room,
            averages=averages,
            check_writes=self._check_writes,
            around_rerun=self._unlogged,
            log=self.log,
        )
        self._parted += found.parted
        self._tuning = None
        if self._window.auto or balanced:
            self._tuning = Tuning(self._window, self._streamer, device, self.log, balanced=balanced)

    @contextmanager
    def _unlogged(self) -> Generator[None, None, None]:
        """A forward that is run again has logged already."""
        own = vars(self.lightning_module)
        before = own.get("log")
        own["log"] = _log_nothing
        try:
            yield
        finally:
            if before is None:
                del own["log"]
            else:
                own["log"] = before

    def _close_streamer(self) -> None:
        for handle in self._hooks:
            handle.remove()
        self._hooks = []
        self._quiet.clear()
        if self._streamer is not None:
            self._last_stats, self._last_fetches = self._streamer.stats(), self._streamer.fetches()
            self._modes = self.activations
            self._plan = self._streamer.plan
            self._torn = self._streamer.updates.torn
            self._streamer.close()
            self._streamer = None

    def _before_update(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if self._streamer is not None:
            parameters = (p for group in optimizer.param_groups for p in group["params"])
            self._streamer.updating.before(deferred=optimizer is self._deferring, parameters=parameters)

    def _unfuse(self) -> None:
        for fused in self._fused.values():
            fused.close()
        self._fused.clear()

    def _after_update(self, *_: Any) -> None:
        if self._streamer is not None:
            self._streamer.forget()

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        if cls.strategy_name not in strategy_registry:
            strategy_registry.register(cls.strategy_name, cls, description=cls.__name__)


class SuperpipelineStrategy(StreamingStrategy, SingleDeviceStrategy):
    __doc__ = StreamingStrategy.__doc__


_AUTOCAST = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}


def _log_nothing(*args: Any, **kwargs: Any) -> None:
    """In place of ``LightningModule.log``, on which ``log_dict`` stands."""


def _absorbing(plan: Plan) -> dict[str, int]:
    """Host memory that set-up takes beside the weights, which are there: they are absorbed layer by layer."""
    layers = plan.trained
    return {
        "for a layer's copy": max(each.nbytes for each in (*layers, *plan.masters)),
        "for casts": sum(cast.nbytes for layer in layers for cast in layer.casts),
    }


def _hold_hosts(optimizer: Any) -> None:
    """Groups that were added inside the step have the device's parameters; an optimizer works on the host's."""
    for group in optimizer.param_groups:
        if any(issubclass(type(each), DeviceParameter) for each in group["params"]):
            group["params"] = [
                each.host if issubclass(type(each), DeviceParameter) else each for each in group["params"]
            ]


def _move_the_rest(module: nn.Module, found: Found, averages: Sequence[nn.Module], device: torch.device) -> None:
    """Buffers, torchmetrics and modules that keep their parameters to themselves go to the device."""
    for _, aside in found.aside:
        aside.to(device)
    bare = {child for child in module.modules() if not any(True for _ in child.parameters())}
    stay = {inner for each in averages for inner in each.modules()}
    for child in module.modules():
        note_device(child, device)
        if child in stay:
            continue
        if child in bare and not stay.intersection(child.modules()):
            child.to(device)  # metrics have states that are no buffers
        for name, buffer in child._buffers.items():
            if buffer is not None and buffer.device != device:
                child._buffers[name] = buffer.to(device)
