"""``sp_lightning.StreamedTrainer``: streams the model of transformers' ``Trainer``, and of classes that derive from it."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from sp_lightning.any_loop.stream import StreamedLoop, stream, unwrapped

if TYPE_CHECKING:
    from transformers import Trainer as _Base
else:
    _Base = object  # the user's class has a Trainer as a further base


class StreamedTrainer(_Base):
    """Streams the model of transformers' ``Trainer`` while it trains, evaluates and predicts. The first base of your class.

    ::

        class Trainer(sp_lightning.StreamedTrainer, transformers.Trainer):
            pass

        Trainer(model, args, train_dataset=rows, stream={"gpu_memory": "8GiB"}).train()

    All weights or adapters are trained, with the results of the same Trainer without this base, bit by bit. The Trainer clips,
    saves and loads as before, on the CPU, between two steps. Its checkpoints are those of the plain Trainer.

    Two things of the Trainer would move the model to the GPU: its method ``_move_model_to_device``, which does nothing here, and
    its accelerator, which gets ``device_placement=False``. One GPU is used. Batches are moved by the Trainer itself.

    Args:
        stream: the options of :func:`sp_lightning.stream`. ``autocast`` is set by ``bf16=`` and ``fp16=`` of the arguments.
        args, kwargs: as for the Trainer.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Raises a TypeError if this class comes after the Trainer, whose methods would then be used instead."""
        super().__init_subclass__(**kwargs)
        if not hasattr(super(), "train"):
            raise TypeError(
                f"{cls.__name__} has no Trainer behind StreamedTrainer. Expected this order of bases: "
                f"class {cls.__name__}(sp_lightning.StreamedTrainer, transformers.Trainer)."
            )

    def __init__(self, *args: Any, stream: dict[str, Any] | None = None, **kwargs: Any) -> None:
        if not isinstance(stream, dict | None):
            raise TypeError(
                f'stream={stream!r} takes a dictionary of options, for example stream={{"gpu_memory": "8GiB"}}.'
            )
        self._stream_options = dict(stream or {})
        self._streamed: StreamedLoop | None = None
        super().__init__(*args, **kwargs)
        self.args._n_gpu = 1  # as the Trainer does itself for models that it must not copy to several GPUs
        self.accelerator.device_placement = False
        self.add_callback(self._check_that_training_is_streamed())
        if self.args.bf16 or self.args.fp16:
            self._stream_options.setdefault("autocast", torch.bfloat16 if self.args.bf16 else torch.float16)

    def _move_model_to_device(self, model: Any, device: torch.device) -> None:
        """Leaves the model on the CPU, from where it is streamed. Puts it there if its constructor has moved it to the GPU.

        The constructors of sentence-transformers do that.
        """
        if self._streamed is None and any(parameter.device == device for parameter in model.parameters()):
            model.to("cpu")

    def create_scheduler(self, *args: Any, **kwargs: Any) -> Any:
        """Makes the scheduler as the Trainer does, and begins to stream: model and optimizer are prepared now."""
        # As accelerate does where it places the optimizer itself: the groups become other dictionaries. An optimizer that steps
        # inner ones, with the same groups, no longer shares them, so a schedule does not reach the inner ones.
        optimizer = unwrapped(self.optimizer)
        optimizer.load_state_dict(optimizer.state_dict())
        scheduler = super().create_scheduler(*args, **kwargs)
        self._end_stream()
        self._streamed = self._stream(self.optimizer)
        return scheduler

    def _stream(self, *optimizers: Any) -> StreamedLoop:
        self._place_losses()
        return stream(self.model, optimizers, **self._stream_options)

    def _place_losses(self) -> None:
        """Moves modules that hold the model to the device, without the model itself.

        These are losses of sentence-transformers. They may have weights of their own, which the optimizer steps, and follow
        ``model.device``, which is the CPU here.
        """
        held = [
            each for value in vars(self).values() for each in (value.values() if isinstance(value, dict) else [value])
        ]
        streamed = set(self.model.modules())
        for loss in held:
            if isinstance(loss, nn.Module) and loss not in streamed and self.model in set(loss.modules()):
                for part in set(loss.modules()) - streamed:
                    part._apply(lambda tensor: tensor.to(self.args.device), recurse=False)

    def _check_that_training_is_streamed(self) -> Any:
        """Returns a callback of transformers that raises a RuntimeError if the user's class has left out the method above."""
        from transformers import TrainerCallback

        trainer = self

        class Check(TrainerCallback):
            def on_train_begin(self, *_: Any, **__: Any) -> None:
                if trainer._streamed is None:
                    raise RuntimeError(
                        f"{type(trainer).__name__}.create_scheduler does not call super().create_scheduler(…), so the model "
                        "would not be streamed. Call it, and set self.lr_scheduler afterwards."
                    )

        return Check()

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Trains as the Trainer does. Afterwards the model is an ordinary module on the CPU, also after an error."""
        try:
            return super().train(*args, **kwargs)
        finally:
            self._end_stream()

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluates or predicts as the Trainer does, with the stream of the training or one of its own."""
        with nullcontext() if self._streamed is not None else self._stream():
            return super().evaluation_loop(*args, **kwargs)

    def _end_stream(self) -> None:
        streamed, self._streamed = self._streamed, None
        if streamed is not None:
            streamed.close()
