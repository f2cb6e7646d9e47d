"""The strategy: options, set-up, teardown and checkpoints."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from inspect import signature
from pathlib import Path
from typing import Any, cast

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy, Strategy
from lightning.pytorch.trainer.states import TrainerFn

from sp_lightning.core.device.closing import close_all
from sp_lightning.core.model.patterns import LayerChoice
from sp_lightning.core.model.without_values import named_tensors
from sp_lightning.core.plan.choices import ActivationChoice, Count, Overlap, Place, Share
from sp_lightning.trainer.callback import SuperpipelineCallback
from sp_lightning.trainer.checkpoint_io import load
from sp_lightning.trainer.compat import attach_callback, forget_module, trainer_of
from sp_lightning.trainer.frozen_weights import (
    FROZEN,
    FrozenWeights,
    LeftOut,
    fill_checkpoint,
    note_loaded,
    note_trained,
)
from sp_lightning.trainer.given_values import GivenValues
from sp_lightning.trainer.loops import LoopStrategy
from sp_lightning.trainer.option_checks import by_name
from sp_lightning.trainer.options import Options
from sp_lightning.trainer.run import weight_in_step


class StreamingStrategy(LoopStrategy):
    """Trains and runs an unchanged LightningModule whose model is larger than the GPU's memory.

    Weights, gradients and optimizer state are in host memory. The model's layers are copied to ``k + k_prime`` slots of GPU
    memory while they run. The method is Superpipeline, arXiv 2410.08791.

    Results are bitwise those of plain Lightning. If the optimizer steps on the CPU, they are those of plain Lightning whose
    gradients are moved to the CPU, and unscaled, clipped and stepped there.

    With ``Trainer(devices=N)`` each device has its own process and batches, and all of them share one copy of the weights in
    host memory. Gradients are summed layer by layer, and rank 0's optimizer steps for all. Results are those of ``ddp``.

    Args:
        k: layers usable on the GPU at once, at least 1. More is faster and takes more memory.

            - ``"auto"``: 1 at first. It is doubled between batches while uploads stall them and it fits; doublings that make no
              batch faster are taken back (CPU: 2).

        k_prime: further layers that may be uploaded meanwhile, at least 1. ``"auto"`` is 1. A transfer has at most that many.
        gpu_memory: GPU memory that the run may use for everything: a size (``"16GiB"``; ``16`` is GiB), or a share of the memory
            that is free at set-up (``"80%"``). None: 15/16 of the free memory; if ``k`` is a number, all of it.
        activations: how activations are stored. It does not change results.

            - ``"auto"``: kept; if GPU memory gets full, the oldest are offloaded (on the CPU without ``gpu_memory``: kept).
            - ``"keep"``: in GPU memory.
            - ``"recompute"``: torch's checkpoint around each layer. Prints, and hooks on modules inside a layer, run twice.
            - ``"offload"``: copied to host memory and back.
            - a mapping from patterns of layer names to modes; the first match decides (``{"encoder.**": "offload"}``).

        layers: what counts as a layer: names or glob patterns of modules, module classes, or a callable that takes the
            LightningModule and returns names or modules. None: layers are found.
        keep_on_gpu: names or glob patterns of modules or parameters that stay in GPU memory.
        pin_memory: page-lock host memory. Without it, copies are synchronous. The first batch takes longer, because memory for
            gradients and activations is page-locked then.
        optimizer_overlap: when the CPU updates weights. It does not change results.

            - ``"auto"``: the fastest mode that nothing in the run rules out. The log names it.
            - ``"backward"``: each layer as soon as its gradients are complete (fused backward pass). The gradients are freed;
              reading ``p.grad`` after the step raises an error. Exception: on one device with steps on the CPU, gradients are
              kept if a hook may read them after the step.
            - ``"forward"``: layer by layer, while the next forward runs.
            - ``"off"``: in ``optimizer.step()``.

        optimizer_on: where optimizers step.

            - ``"cpu"``: in host memory.
            - ``"gpu"``: weights, gradients and state of one layer at a time are copied to the GPU and back. Results are
              bitwise those of plain Lightning on that GPU. One device. It works with torch's optimizers except LBFGS and
              SparseAdam, torchao's low-bit ones, bitsandbytes', and classes with ``steps_each_parameter_alone = True``: each
              update reads and writes only one parameter, its gradient and its ``state[p]``.
            - ``"auto"``: the faster place by a short measurement. The log names the place, because the last bits differ.

        gpu_layers: layers that stay in GPU memory as ordinary modules, with their gradients and optimizer state, and are stepped
            there: a number (``8``), or a share of all layers (``0.5``). The first layers stay. ``superpipeline plan MODEL
            --gpu-layers auto`` proposes a number. Between steps, these weights are on the GPU. One device.
        save_frozen: write frozen weights to checkpoints. If False, frozen weights that have not changed since training began are
            left out. To resume, the module must have the same frozen weights, which is checked.
        load_weights_from: a file or folder with the values of a module, or a sub-module, that was built on the meta device:
            safetensors (as ``save_pretrained`` writes), a checkpoint or a state dictionary.
        disk: a folder on an NVMe drive. Optimizer state beyond ``host_memory`` is stored in a temporary file there, then
            gradients, then trained weights. Frozen weights are read from their own files. With several devices, only
            optimizer state is stored on the disk.
        host_memory: host memory that all processes of the node may use together: a size (``"64GiB"``; ``64`` is GiB), or a share
            of the memory that is free at set-up (``"80%"``). None: all free memory. With ``disk``, the rest is stored on the
            disk. Without ``disk``, a run that needs more raises an error before it begins, as on a machine with that memory;
            ``superpipeline plan --host-memory`` estimates the same.
        callback: attach a :class:`~sp_lightning.SuperpipelineCallback` during a run if the trainer has none.
        device: the device that computes, if not the trainer's choice.
        accelerator, checkpoint_io, precision_plugin: as in Lightning's ``SingleDeviceStrategy``.

    Raises:
        ValueError, TypeError: an option has an invalid value.
    """

    strategy_name = "superpipeline"
    _callback_class: type[SuperpipelineCallback] = SuperpipelineCallback
    # A child of Lightning's own logger: shown where its messages are shown.
    log = logging.getLogger("lightning.pytorch.superpipeline")

    @by_name
    def __init__(
        self,
        *,
        k: Count = "auto",
        k_prime: Count = "auto",
        gpu_memory: int | float | str | None = None,
        activations: ActivationChoice = "auto",
        layers: LayerChoice = None,
        keep_on_gpu: str | Sequence[str] = (),
        pin_memory: bool = True,
        optimizer_overlap: Overlap = "auto",
        optimizer_on: Place = "cpu",
        gpu_layers: Share = 0,
        save_frozen: bool = True,
        load_weights_from: str | Path | None = None,
        disk: str | Path | None = None,
        host_memory: int | float | str | None = None,
        callback: bool = True,
        device: str | int | torch.device | None = None,
        accelerator: pl.accelerators.Accelerator | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
    ) -> None:
        options = Options.checked(
            k=k, k_prime=k_prime, gpu_memory=gpu_memory, activations=activations, layers=layers,
            keep_on_gpu=keep_on_gpu, pin_memory=pin_memory,
            optimizer_overlap=optimizer_overlap, optimizer_on=optimizer_on, gpu_layers=gpu_layers,
            save_frozen=save_frozen, load_weights_from=load_weights_from, disk=disk, host_memory=host_memory, callback=callback,
        )  # fmt: skip
        self._given = GivenValues(options.load_weights_from, stay=options.disk is not None, budget=options.host_budget)
        self._frozen: FrozenWeights | None = None
        self._left_out: LeftOut = {}
        self._attached: SuperpipelineCallback | None = (
            None  # the callback that this strategy has attached to the trainer
        )
        super().__init__(options, device, accelerator, checkpoint_io, precision_plugin)

    def __repr__(self) -> str:
        options = vars(self._options)
        not_default = [
            f"{name}={options[name]!r}"
            for name, parameter in signature(StreamingStrategy).parameters.items()
            if name in options and options[name] != parameter.default
        ]
        return f"{type(self).__name__}({', '.join(not_default)})"

    # ------------------------------------------------------------------ set-up and teardown

    def connect(self, model: pl.LightningModule) -> None:
        """Connects the strategy to a module, and attaches the callback. The trainer calls this before all other methods."""
        trainer = trainer_of(model)  # None if user code connects the strategy; the trainer connects it again
        super().connect(model)
        if trainer is None or not self._options.callback:
            return
        if not any(isinstance(callback, SuperpipelineCallback) for callback in trainer.callbacks):
            self._attached = self._callback_class()
            attach_callback(trainer, self._attached)

    def setup(self, trainer: pl.Trainer) -> None:
        self._signals.install()
        try:
            self._set_up(trainer)
        except MemoryError as error:  # the message suffices: the traceback only shows functions of this package
            raise error.with_traceback(None) from None
        finally:  # Lightning saves the present handlers after set-up, and sets them again after teardown
            self._signals.remove()

    def _set_up(self, trainer: pl.Trainer) -> None:
        """Does the work of Lightning's ``Strategy.setup``, but optimizer state stays with the parameters, in host memory.

        Before that, it gives values to modules on the meta device. In ``fit`` it also decides how optimizers step, and records
        which weights are trained and which are frozen, for checkpoints.
        """
        assert self.accelerator is not None
        assert self.model is not None
        assert self.lightning_module is not None
        self.accelerator.setup(trainer)
        trains = trainer.state.fn == TrainerFn.FITTING
        self._given.complete(self.lightning_module, training=trains)  # before layers are found, which need values
        # An attribute of Lightning's DDPStrategy. It is not None with Trainer(sync_batchnorm=True).
        layer_sync = getattr(self, "_layer_sync", None)
        if trains and layer_sync is not None:
            self.model = layer_sync.apply(self.model)
        self.model = self.precision_plugin.convert_module(self.model)
        self.model_to_device()
        if self._frozen is not None and (trains or self._frozen.module is not self.lightning_module):
            self._frozen = None  # validation, test and prediction of the same module keep the record of fit
        if trains:
            self.setup_optimizers(trainer)
            self._fitting_begins()
            note_trained(self.lightning_module)
            if not self._options.save_frozen:
                self._frozen = FrozenWeights(self.lightning_module)
        self.setup_precision_plugin()

    def teardown(self) -> None:
        """Ends the run: the module has ordinary host parameters, and optimizers are as their user configured them.

        Signal handlers are deferred during this method. Otherwise a handler that saves a checkpoint could find a half-closed run,
        and a handler that raises could stop the closing half-way. User code or Lightning may have set handlers since the last
        batch, so handlers are replaced once more. At the end, the replaced handlers are restored, and the deferred handlers run.
        Lightning restores the handlers from before the run only after this method.

        If closing raises an error, the callback is detached and Lightning's own teardown runs nevertheless.

        Raises:
            BaseException: closing the run has failed, or a deferred handler has raised.
        """
        self._signals.install()
        try:
            self._tear_down()
        finally:
            self._signals.remove()

    def _tear_down(self) -> None:
        """Detaches the callback and closes the run, and then runs Lightning's own teardown in any case."""
        try:
            close_all(self._detach_callback, self._close)
            module = self.lightning_module
            if module is not None and (
                weight_in_step(module) is not None or any(tensor.is_meta for _, tensor in named_tensors(module))
            ):
                # Set-up has raised an error for this module. The base class would move it to the CPU: from under the other run
                # whose step it is in. It cannot move a meta tensor.
                forget_module(self)
        finally:
            super().teardown()

    def _detach_callback(self) -> None:
        """Removes the strategy's callback from the trainer."""
        trainer = None if self.lightning_module is None else trainer_of(self.lightning_module)
        if trainer is not None:
            trainer.callbacks = [callback for callback in trainer.callbacks if callback is not self._attached]
        self._attached = None

    # ------------------------------------------------------------------ checkpoints

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Returns the host's weights. With ``save_frozen=False``, omits frozen weights, and records them for the checkpoint.

        Raises:
            RuntimeError: only some weights have the values of the last step.
        """
        self._refuse_partially_updated()
        assert self.lightning_module is not None
        with nullcontext() if self._run is None else self._run.host_parameters():
            state = super().lightning_module_state_dict()
            self._left_out = {} if self._frozen is None else self._frozen.leave_out(state)
        return state

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        if self._left_out and "state_dict" in checkpoint:
            checkpoint[FROZEN] = self._left_out
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Loads a checkpoint. Weights stay in the file until they are copied to their places.

        Optimizer state also stays in the file if it will be copied to a disk, or if each process copies only its part.
        """
        state_stays = self._options.disk is not None or not self._group.alone
        return load(checkpoint_path, self.checkpoint_io, self.lightning_module, weights_only, state_stays=state_stays)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Loads the optimizers' state to host memory: the base class would move it to the device."""
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=False):
            optimizer.load_state_dict(self._group.owned_state(optimizer, state))
        if self._run is not None:
            self._run.steps.state_loaded()

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Loads the weights of a checkpoint.

        Before that, modules on the meta device get values, and frozen weights that the checkpoint omits are added to it.
        """
        assert self.lightning_module is not None
        restored = self._given.restore(self.lightning_module, checkpoint["state_dict"])
        if not self._options.save_frozen:
            note_loaded(self.lightning_module, checkpoint["state_dict"], restored)
        fill_checkpoint(self.lightning_module, cast(dict[str, Any], checkpoint))
        with nullcontext() if self._run is None else self._run.loading():
            super().load_model_state_dict(checkpoint, strict)


class SuperpipelineStrategy(StreamingStrategy, Strategy):
    __doc__ = StreamingStrategy.__doc__
    _one_device = SingleDeviceStrategy
    _several_devices = DDPStrategy


# Lightning's strategies for one and for several devices define the abstract methods. ``HostStrategy.__new__`` makes each object
# with a class that has one of these strategies as a base. This class itself lacks the methods, and Lightning's CLI (jsonargparse)
# refuses abstract classes. So its set of abstract methods is emptied.
SuperpipelineStrategy.__abstractmethods__ = frozenset()
