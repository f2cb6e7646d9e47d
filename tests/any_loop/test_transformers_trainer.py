"""transformers' Trainer with ``StreamedTrainer`` as a base has the bits of the plain Trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from sp_lightning import StreamedTrainer
from tests.support.models import llama, lora, tokens
from tests.support.runs import assert_equal
from tests.support.simdevice import simulated
from tests.support.tiers import some


class Streamed(StreamedTrainer, transformers.Trainer):
    pass


def trainer_of(kind: Any, folder: Path, model: Any, count: int = 12, more: Any = None, **options: Any) -> Any:
    settings: dict[str, Any] = {
        "output_dir": str(folder), "use_cpu": True, "max_steps": 6, "per_device_train_batch_size": 1, "logging_steps": 1,
        "save_steps": 3, "report_to": "none", "disable_tqdm": True, "dataloader_pin_memory": False, "learning_rate": 1e-2,
    }  # fmt: skip
    arguments = transformers.TrainingArguments(**{**settings, **options})
    rows = [{name: value[0] for name, value in batch.items()} for batch in tokens(count)]
    given = {"stream": {"k": 1}, **(more or {})} if issubclass(kind, StreamedTrainer) else more or {}
    return kind(model, arguments, train_dataset=rows, eval_dataset=rows[:2], **given)


def trained(kind: Any, folder: Path, make: Any, resume: str | None = None, **options: Any) -> tuple[Any, list[Any]]:
    """Trains six steps with a checkpoint after the third, and evaluates. Returns the trainer, and all that it has computed."""
    transformers.set_seed(7)
    trainer = trainer_of(kind, folder, make().net, **options)
    trainer.train(resume_from_checkpoint=resume)
    trainer.evaluate()
    metrics = [
        {k: v for k, v in each.items() if "runtime" not in k and "second" not in k}
        for each in trainer.state.log_history
    ]
    state = trainer.optimizer.state_dict()
    return trainer, [metrics, dict(trainer.model.state_dict()), state, torch.get_rng_state()]


WAYS: dict[str, Any] = {
    "all weights": (llama, {}),
    "accumulation and evaluation": (
        llama,
        {"gradient_accumulation_steps": 2, "eval_strategy": "steps", "eval_steps": 2},
    ),
    "LoRA in bfloat16": (lora, {"bf16": True}),
    "gradient checkpointing": (lambda: llama(checkpointing={"use_reentrant": False}), {}),
}


@pytest.mark.rest("takes a second")
@pytest.mark.parametrize("way", some(WAYS, "LoRA in bfloat16", why="other settings of the same"))
def test_trainings(way: str, tmp_path: Path) -> None:
    """Losses, gradient norms after clipping, weights, optimizer state and random state."""
    make, options = WAYS[way]
    with simulated() as made:
        trainer, ours = trained(Streamed, tmp_path / "ours", make, **options)
    assert_equal(ours, trained(transformers.Trainer, tmp_path / "plain", make, **options)[1], way)
    assert made, "nothing was streamed"
    assert {type(parameter) for parameter in trainer.model.parameters()} == {nn.Parameter}


@pytest.mark.long("checkpoints are the plain Trainer's own code")
@pytest.mark.parametrize("kinds", [(Streamed, transformers.Trainer), (transformers.Trainer, Streamed)])
def test_a_checkpoint_of_one_is_resumed_by_the_other(kinds: Any, tmp_path: Path) -> None:
    first, second = kinds
    whole = trained(first, tmp_path, llama)[1]
    resumed = trained(second, tmp_path, llama, resume=str(tmp_path / "checkpoint-3"))[1]
    assert_equal(resumed[1:], whole[1:], "resumed")


class Classified(nn.Module):
    """A loss as those of sentence-transformers: it holds the model, and has weights and buffers of its own."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.classifier = nn.Linear(2 * model.config.vocab_size, 3)  # type: ignore[union-attr, arg-type, operator]
        self.loss = nn.CrossEntropyLoss(weight=torch.ones(3))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        first, second = (self.model(input_ids=each).logits.mean(1) for each in (rows, rows.flip(1)))
        loss: torch.Tensor = self.loss(self.classifier(torch.cat([first, second], -1)), rows[:, 0] % 3)
        return loss


class WithLoss(transformers.Trainer):
    """As sentence-transformers' Trainer: the loss goes where the model is, and the optimizer steps the loss."""

    def __init__(self, model: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(model, *args, **kwargs)
        torch.manual_seed(3)
        self.loss: Any = {"a": Classified(model).to(model.device), "none": None}

    def create_optimizer(self, *_: Any) -> torch.optim.Optimizer:
        self.optimizer = torch.optim.AdamW(self.loss["a"].parameters(), lr=1e-2)
        return self.optimizer

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        loss = self.loss["a"](inputs["input_ids"])
        return (loss, {}) if return_outputs else loss


class StreamedWithLoss(StreamedTrainer, WithLoss):
    pass


@pytest.mark.long("takes a second or more")
def test_a_loss_that_holds_the_model_and_weights_of_its_own(tmp_path: Path) -> None:
    with simulated() as made:
        trainer, ours = trained(StreamedWithLoss, tmp_path / "ours", llama, eval_strategy="steps", eval_steps=2)
    plain_trainer, plain = trained(WithLoss, tmp_path / "plain", llama, eval_strategy="steps", eval_steps=2)
    assert_equal(ours, plain, "results")
    ours_of_loss, plain_of_loss = (dict(each.loss["a"].state_dict()) for each in (trainer, plain_trainer))
    assert_equal(ours_of_loss, plain_of_loss, "weights of the loss")
    assert made, "nothing was streamed"


def test_a_loss_that_holds_the_model_goes_to_the_device_and_the_model_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stayed on the CPU with the model, while the model's outputs are on the device."""
    trainer = trainer_of(StreamedWithLoss, tmp_path, llama().net)
    monkeypatch.setattr(type(trainer.args), "device", torch.device("meta"))
    trainer._place_losses()
    assert {parameter.device.type for parameter in trainer.model.parameters()} == {"cpu"}
    assert {each.device.type for each in trainer.loss["a"].classifier.parameters()} == {"meta"}
    assert trainer.loss["a"].loss.weight.device.type == "meta"


def test_a_model_that_has_moved_itself_returns_to_the_cpu(tmp_path: Path) -> None:
    trainer, moved, calls = trainer_of(Streamed, tmp_path, llama().net), nn.Linear(2, 2), list[Any]()
    moved.to = calls.append  # type: ignore[method-assign, assignment]
    for model in (moved, nn.Linear(2, 2, device="meta")):  # the second one was not moved by its constructor
        trainer._move_model_to_device(model, torch.device("cpu"))
    assert calls == ["cpu"]


class Both(torch.optim.Optimizer):
    """Steps two inner optimizers, and shares their groups."""

    def __init__(self, *inner: torch.optim.Optimizer) -> None:
        super().__init__([group for each in inner for group in each.param_groups], {})
        self.inner, self.param_groups = inner, [group for each in inner for group in each.param_groups]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for each in self.inner:
            each.step()


@pytest.mark.rest("two trainings")
def test_a_schedule_reaches_inner_optimizers_as_on_the_plain_trainer(tmp_path: Path) -> None:
    """accelerate loads the optimizer's own state into it, so that it no longer shares its groups with the inner ones."""

    def losses(kind: Any) -> list[Any]:
        transformers.set_seed(5)
        model = llama(layers=2).net
        matrices, vectors = ([p for p in model.parameters() if (p.ndim > 1) is wanted] for wanted in (True, False))
        optimizer = Both(torch.optim.SGD(matrices, lr=0.1), torch.optim.Adam(vectors, lr=1e-2))
        more = {"optimizers": (optimizer, None)}
        trainer = trainer_of(kind, tmp_path, model, 4, more, max_steps=4, save_strategy="no")
        trainer.train()
        names = ("loss", "grad_norm", "learning_rate")
        return [[each.get(name) for name in names] for each in trainer.state.log_history]

    assert losses(Streamed) == losses(transformers.Trainer)


class OwnSchedule(Streamed):
    """Makes a scheduler without the Trainer's method, in which the stream begins."""

    def create_scheduler(self, *args: Any, **kwargs: Any) -> Any:
        self.lr_scheduler = torch.optim.lr_scheduler.ConstantLR(self.optimizer)
        return self.lr_scheduler


class OwnScheduleAfterwards(OwnSchedule):
    """The remedy of the error."""

    def create_scheduler(self, *args: Any, **kwargs: Any) -> Any:
        Streamed.create_scheduler(self, *args, **kwargs)
        return super().create_scheduler(*args, **kwargs)


@pytest.mark.rest("trains one step")
def test_a_class_that_leaves_the_beginning_of_the_stream_out_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"OwnSchedule.create_scheduler does not call super\(\).create_scheduler"):
        trainer_of(OwnSchedule, tmp_path, llama(layers=1).net, max_steps=1, save_strategy="no").train()
    trainer = trainer_of(OwnScheduleAfterwards, tmp_path, llama(layers=1).net, max_steps=1, save_strategy="no")
    trainer.train()
    assert isinstance(trainer.lr_scheduler, torch.optim.lr_scheduler.ConstantLR)


def test_the_order_of_bases_and_options() -> None:
    with pytest.raises(TypeError, match=r"class Wrong\(sp_lightning.StreamedTrainer, transformers.Trainer\)"):
        type("Wrong", (transformers.Trainer, StreamedTrainer), {})
    with pytest.raises(TypeError, match="takes a dictionary of options"):
        type("Right", (StreamedTrainer, transformers.Trainer), {})(stream="8GiB")
