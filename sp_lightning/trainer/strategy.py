"""The strategy: hands Lightning's calls to the run and its loops, and shows users what these know."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, cast

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy, Strategy
from lightning.pytorch.trainer.states import TrainerFn

from sp_lightning.device.closing import close_all
from sp_lightning.model.patterns import LayerChoice
from sp_lightning.model.without_values import named_tensors
from sp_lightning.plan.activation_policy import Activations
from sp_lightning.plan.options import Count, Fused, OptimizerOn, Overlap, Transfer, by_name
from sp_lightning.sharing.shared_base import current, refuse_from_elsewhere, take
from sp_lightning.trainer.callback import SuperpipelineCallback
from sp_lightning.trainer.checkpoint_folder import common_tensors, write
from sp_lightning.trainer.checkpoint_io import AtomicCheckpointIO, folder_for, load
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
from sp_lightning.trainer.options import Options


class StreamingStrategy(LoopStrategy):
    """Streams the layers of an unchanged LightningModule through a few slots of device memory.

    Weights, gradients and optimizer state are on the host; the model's layers pass through ``k + k_prime`` slots on
    the device while they run. Results are bitwise those of plain Lightning with the same optimizer on the host.

    With ``Trainer(devices=N)`` each device has a process and batches of its own, and all of them share the memory of one host
    store. Gradients are summed layer by layer, and rank 0's optimizer steps for all. Results are those of Lightning's ``ddp``.

    Args:
        k: layers usable on the device at once, at least 1. More is faster and takes more memory. ``"auto"``: after two
            batches through the smallest window, the one that is predicted to be fastest within the budget (2 on the
            CPU, which sets no limit).
        k_prime: layers that move as one transfer, at least 1, or ``"auto"``.
        memory_budget: device memory for everything: bytes, a size (``"8GiB"``), or a share of what is free at set-up
            (``0.8``); None for all that is free but a margin of a sixteenth.
        activations: what happens to the tensors that autograd saves in a layer's forward. ``"keep"`` leaves them on the
            device; ``"recompute"`` computes them again in backward, from the layer's inputs; ``"offload"`` moves them to the
            host and back. ``"auto"`` keeps them if all fit within the budget, and otherwise takes for each layer what is
            predicted to be fastest; on the CPU without ``memory_budget`` it is ``"keep"``. A mapping decides by patterns of
            the names of layers and of modules above them, the first match (``{"encoder.**": "offload"}``). Results are the
            same. With ``"recompute"`` hooks on modules inside a layer,
            prints and global variables see its forward twice.
        layers: what counts as a layer: None (they are found), names or glob patterns of modules, module classes, or a
            callable that takes the LightningModule and returns names or modules.
        resident: names or glob patterns of modules or parameters that stay on the device.
        pin_memory: page-lock host memory; without it copies are synchronous. Memory for gradients and activations is
            page-locked in the first batch, which takes longer for it.
        fused_optimizer: run torch's optimizers fused (``fused=True``) where they can be. That is much faster, and the last
            bits differ. ``"auto"``: on an accelerator, and where ``optimizer_overlap`` asks for it by name.
        optimizer_overlap: when the host updates weights. ``"off"``: in the optimizer's step. ``"forward"``: layer by layer
            in the background, under the next forward. ``"backward"``: each layer as soon as its gradients are complete,
            which are then freed (``p.grad`` is None after the step). ``"auto"``: ``"forward"`` on an accelerator where no
            user code would have to wait for it, else ``"off"``. Results are the same.
        optimizer_on: where optimizers step. ``"host"``: there, where weights and state are. ``"device"``: a layer's weights,
            gradients and state pass through two slots of the device, where the optimizer's own code steps them as its user
            made it: on a GPU results are bitwise those of plain Lightning there. For torch's optimizers but LBFGS and
            SparseAdam, torchao's with few bits, bitsandbytes', and any class that says
            ``steps_each_parameter_alone = True``: whose step reads and writes one parameter, its gradient and its
            ``state[p]`` at a time, and nothing else. On one device. ``"auto"``: the place where the links, the host's memory and
            its processor, as they are measured, bound a step less; it is said, because the last bits differ.
        transfer: how the devices of a node upload a layer. ``"whole"``: each by itself. ``"sliced"``: each a part, and they send
            each other theirs, which takes less time where the devices have fast links (NVLink) and batches are small.
            ``"auto"``: whatever is faster by a measurement at set-up. Results are the same.
        save_frozen: whether checkpoints hold frozen weights. If not, those are left out that are as they were when training
            began; a file without them can be resumed from if the module has the same ones, which is checked.
        check_writes: look for weights that are written within a step in a way that torch shows no sign of (through a
            reference that was taken before the step, NumPy, DLPack, a storage). What was written on the device is taken
            over; the rest is refused by name. It is slow, because it reads all weights in each step: use it to find out.
        save_distributed_checkpoint: whether all ranks write checkpoints together, in the format of torch.distributed.checkpoint:
            a folder that all nodes have to see, which any number of devices and nodes resumes from. Otherwise rank 0 writes a
            file. ``python -m sp_lightning convert`` makes one of the other.
        weights: a file or folder with the values of a module that was built on the meta device, or of one sub-module: of
            safetensors (as ``save_pretrained`` writes it), a checkpoint, or a state dictionary. They come from there into the
            host store, layer by layer.
        disk: a folder on a fast drive. What ``host_memory`` does not hold of the optimizers' state is in a scratch file there,
            which is gone when the process is; gradients and trained weights after it. Frozen weights that it does not hold are
            read in place from their own files, any outside of training: those of ``weights``, of transformers'
            ``from_pretrained``, or any that are mapped. With several devices only the state goes to the disk.
        host_memory: with ``disk``, memory of the host for everything: bytes, a size (``"64GiB"``), or a share of what is free
            at set-up; None for all that is free. All processes of a node have it in common.
        callback: attach a :class:`~sp_lightning.SuperpipelineCallback` while a run lasts, if the trainer has none.
        device: where layers compute, if not on the trainer's choice. Then it is the one device, whatever ``Trainer(devices=…)``
            says.
        accelerator, checkpoint_io, precision_plugin: as in Lightning's ``SingleDeviceStrategy``.

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
        activations: Activations = "auto",
        layers: LayerChoice = None,
        resident: str | Sequence[str] = (),
        pin_memory: bool = True,
        fused_optimizer: Fused = "auto",
        optimizer_overlap: Overlap = "auto",
        optimizer_on: OptimizerOn = "host",
        transfer: Transfer = "whole",
        save_frozen: bool = True,
        save_distributed_checkpoint: bool = False,
        check_writes: bool = False,
        weights: str | Path | None = None,
        disk: str | Path | None = None,
        host_memory: int | float | str | None = None,
        callback: bool = True,
        device: str | int | torch.device | None = None,
        accelerator: pl.accelerators.Accelerator | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
    ) -> None:
        options = Options.checked(
            k=k, k_prime=k_prime, memory_budget=memory_budget, activations=activations, layers=layers,
            resident=resident, pin_memory=pin_memory, fused_optimizer=fused_optimizer,
            optimizer_overlap=optimizer_overlap, optimizer_on=optimizer_on, transfer=transfer, save_frozen=save_frozen,
            save_distributed_checkpoint=save_distributed_checkpoint, check_writes=check_writes, weights=weights,
            disk=disk, host_memory=host_memory, callback=callback,
        )  # fmt: skip
        self._given = GivenValues(options.weights, stay=options.disk is not None)
        self._frozen: FrozenWeights | None = None
        self._left_out: LeftOut = {}
        self._attached: SuperpipelineCallback | None = None
        self._made_in = current()
        super().__init__(options, device, accelerator, checkpoint_io, precision_plugin)

    # ------------------------------------------------------------------ set-up and teardown

    def connect(self, model: pl.LightningModule) -> None:
        refuse_from_elsewhere(self._made_in)
        trainer = trainer_of(model)  # none yet, where it is connected by hand; the trainer does it again
        if trainer is not None:
            try:
                take(trainer, model)
            except RuntimeError:
                forget_module(self)  # which may be another trial's: the base class would move it
                raise
        super().connect(model)
        if trainer is None or not self._options.callback:
            return
        if not any(isinstance(callback, SuperpipelineCallback) for callback in trainer.callbacks):
            self._attached = self.callback_class()
            attach_callback(trainer, self._attached)

    def setup(self, trainer: pl.Trainer) -> None:
        self._signals.install(self._is_torn)
        try:
            self._set_up(trainer)
        except MemoryError as error:  # it says what is missing; which of our functions has counted it helps no user
            raise error.with_traceback(None) from None
        finally:  # Lightning notes handlers after this, and puts them back after teardown
            self._signals.remove()

    def _set_up(self, trainer: pl.Trainer) -> None:
        # As the base class, but optimizer state stays where the parameters are: on the host.
        assert self.accelerator is not None
        assert self.model is not None
        assert self.lightning_module is not None
        self.accelerator.setup(trainer)
        trains = trainer.state.fn == TrainerFn.FITTING
        if self._options.save_distributed_checkpoint and type(self.checkpoint_io) is not AtomicCheckpointIO:
            raise ValueError(
                "With save_distributed_checkpoint=True all ranks write checkpoints by torch.distributed.checkpoint, and not by a "
                f"{type(self.checkpoint_io).__name__}. Leave one of them out."
            )
        self._given.complete(self.lightning_module, training=trains)
        layer_sync = getattr(self, "_layer_sync", None)  # of several devices, with Trainer(sync_batchnorm=True)
        if trains and layer_sync is not None:
            self.model = layer_sync.apply(self.model)
        self.model = self.precision_plugin.convert_module(self.model)
        self.model_to_device()
        self._frozen = None
        if trains:
            self.setup_optimizers(trainer)
            self._fitting_begins()
            note_trained(self.lightning_module)
            if not self._options.save_frozen:
                self._frozen = FrozenWeights(self.lightning_module)
        self.setup_precision_plugin()

    def teardown(self) -> None:
        self._signals.install(self._is_torn)
        try:
            self._tear_down()
        finally:
            self._signals.remove()

    def _tear_down(self) -> None:
        try:
            close_all(self._detach_callback, self._close)
            if self.lightning_module is not None and any(
                each.is_meta for _, each in named_tensors(self.lightning_module)
            ):
                forget_module(self)  # set-up refused it; the base class would fail to move it to the CPU
        finally:
            super().teardown()

    def _detach_callback(self) -> None:
        """The trainer has the callbacks of its user after a run, however that has ended."""
        trainer = None if self.lightning_module is None else trainer_of(self.lightning_module)
        if trainer is not None:
            trainer.callbacks = [callback for callback in trainer.callbacks if callback is not self._attached]
        self._attached = None

    # ------------------------------------------------------------------ checkpoints

    def lightning_module_state_dict(self) -> dict[str, Any]:
        self._refuse_partially_updated()
        assert self.lightning_module is not None
        with nullcontext() if self._run is None else self._run.host_parameters():
            state = super().lightning_module_state_dict()
            self._left_out = {} if self._frozen is None else self._frozen.leave_out(state)
        return state

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        if self._left_out and "state_dict" in checkpoint:
            checkpoint[FROZEN] = self._left_out
        together = self._options.save_distributed_checkpoint
        self._compare_nodes("for a checkpoint", state=together)  # before anything is written
        if together:
            self._save_together(checkpoint, folder_for(filepath, storage_options))
        else:
            super().save_checkpoint(checkpoint, filepath, storage_options)

    def _save_together(self, checkpoint: dict[str, Any], folder: Path) -> None:
        """All ranks write. After a run no rank compares what they have, and rank 0 writes alone, as it does after an error."""
        assert self.lightning_module is not None
        with nullcontext() if self._run is None else self._run.host_parameters():
            alone = self._run is None or self._ranks is None
            own = {} if alone else common_tensors(self.lightning_module, self.optimizers)
            if self._ranks is None or not self._ranks.failure:
                try:
                    self.barrier("of a checkpoint")  # a rank that has failed in a hook does not come, and is named
                except BaseException as error:
                    self.note_failure(error)  # a rank that saves because of it waits for no other
                    raise
                write(checkpoint, folder, own)
            elif self._ranks.first:  # the others may never come
                write(checkpoint, folder, own, alone=True)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Weights stay in the file until they are copied to where they belong."""
        module, drops = self.lightning_module, self._ranks is not None and not self._ranks.primary
        stays = self._options.disk is not None or drops  # who drops the state reads none of it
        return load(checkpoint_path, self.checkpoint_io, module, weights_only, state_stays=stays)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """The base class would move the state to the device."""
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=False):
            if self._ranks is None or self._ranks.primary:
                optimizer.load_state_dict(state)
            else:  # the optimizers of a node's first rank alone have state
                optimizer.load_state_dict({**state, "state": {}})
        if self._run is not None:
            self._run.steps.state_loaded()

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        assert self.lightning_module is not None
        restored = self._given.restore(self.lightning_module, checkpoint["state_dict"])
        if not self._options.save_frozen:
            note_loaded(self.lightning_module, checkpoint["state_dict"], restored)
        fill_checkpoint(self.lightning_module, cast(dict[str, Any], checkpoint))
        with nullcontext() if self._run is None else self._run.loading():
            super().load_model_state_dict(checkpoint, strict)


class SuperpipelineStrategy(StreamingStrategy, Strategy):
    __doc__ = StreamingStrategy.__doc__
    one_device = SingleDeviceStrategy
    several_devices = DDPStrategy


# What is abstract in Lightning's base class, the strategies of devices define.
SuperpipelineStrategy.__abstractmethods__ = frozenset()
