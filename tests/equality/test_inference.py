"""Validate, test, predict and generate are equal to plain, in any order with training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn

from tests.support.models import CASES, Module, Stack, Transformer, llama, tokens, vectors
from tests.support.runs import assert_equal, assert_same, collate, fit, loader, superpipeline, trainer_for
from tests.support.tiers import first


class Generating(Transformer):
    """Generates in ``predict_step``, as users of transformers do."""

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net.generate(  # type: ignore[operator]
            batch["input_ids"], max_new_tokens=6, do_sample=batch_idx == 1, num_beams=2 if batch_idx == 2 else 1, use_cache=True,
            pad_token_id=0,
        )  # fmt: skip


NAMES = [
    "llama-dropout",
    "gpt2-tied",
    "bert",
    "resnet50",
    "vit",
    "lstm",
    "rescaled-in-eval",
    "transformer-encoder",
    "reused",
]


@pytest.mark.long("takes a second or more")
@pytest.mark.parametrize("inference_mode", first([True, False], True, why="the same without inference mode"))
@pytest.mark.parametrize(
    ("k", "k_prime"),
    first([(1, 1), (2, 1), (3, 2), (99, 1)], (1, 1), (99, 1), second=[(3, 2)], why="windows in between"),
)
@pytest.mark.parametrize("name", NAMES)
def test_validate_test_predict(name: str, k: int, k_prime: int, inference_mode: bool) -> None:
    def results(strategy: Any) -> list[Any]:
        pl.seed_everything(3, verbose=False)
        module = CASES[name].make()
        batches = CASES[name].batches()
        trainer = trainer_for(strategy, inference_mode=inference_mode)
        return [
            trainer.validate(module, loader(batches), verbose=False),
            trainer.test(module, loader(batches), verbose=False),
            trainer.predict(module, loader(batches)),
            trainer.predict(module, loader(batches)),
            dict(module.state_dict()),
        ]

    assert_equal(results(superpipeline(k=k, k_prime=k_prime)), results("auto"), name)


class Attends(nn.Module):
    """Attention, which in evaluation reads the weight of its ``out_proj`` in one operation, if nobody hides it."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.feed = nn.MultiheadAttention(16, 2, batch_first=True), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.feed(x + self.attention(x, x, x, need_weights=False)[0])


def encoder_layers(depth: int) -> nn.Module:
    return nn.Sequential(*[nn.TransformerEncoderLayer(16, 2, 32, batch_first=True) for _ in range(depth)])


ATTENDING: dict[str, Callable[[], nn.Module]] = {
    "attention": lambda: nn.Sequential(Attends(), Attends()),
    "encoder layers": lambda: encoder_layers(2),
    "one encoder layer": lambda: encoder_layers(1),
    "encoder": lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2),
}


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.parametrize("layers", [[nn.Linear], [nn.MultiheadAttention], "**.out_proj", None], ids=str)
@pytest.mark.parametrize("name", ATTENDING)
def test_attention_whose_children_are_layers(name: str, layers: Any) -> None:
    """It left its fast path, because weights that it reads without calling their modules were away: other last bits."""
    batches = [torch.randn(4, 5, 16, generator=torch.Generator().manual_seed(i)) for i in range(3)]

    def results(strategy: Callable[[], Any]) -> Any:
        outcome = fit(lambda: Module(ATTENDING[name]()), batches, strategy(), val=batches[:1])
        with mock.patch.object(torch, f"_{fast}", wraps=getattr(torch, f"_{fast}")) as used:
            return outcome, trainer_for(strategy()).predict(outcome.module, loader(batches)), used.call_count

    fast = "native_multi_head_attention" if name == "attention" else "transformer_encoder_layer_fwd"
    ours, predicted, uses = results(lambda: superpipeline(k=1, layers=layers))
    plain, expected, expected_uses = results(lambda: "auto")
    assert_same(ours, plain)
    assert_equal(predicted, expected, "predicted")
    assert uses == expected_uses > 0


@pytest.mark.rest("takes tenths of a second")
def test_generate() -> None:
    def texts(strategy: Any) -> Any:
        pl.seed_everything(3, verbose=False)
        module = Generating(llama().net)
        return trainer_for(strategy).predict(module, loader(tokens(3)))

    assert_equal(texts(superpipeline(k=1)), texts("auto"), "generated")


@pytest.mark.long("takes a second or more")
@pytest.mark.parametrize("inference_mode", [True, False])
def test_fit_after_validate(inference_mode: bool) -> None:
    """Memory first allocated in inference mode must not break a later fit."""

    def outcome(strategy: Any) -> Any:
        pl.seed_everything(3, verbose=False)
        module = llama()
        trainer = trainer_for(strategy, inference_mode=inference_mode)
        trainer.validate(module, loader(tokens()), verbose=False)
        trainer.fit(module, loader(tokens()), loader(tokens()))
        trainer.test(module, loader(tokens()), verbose=False)
        return [dict(module.state_dict()), trainer.predict(module, loader(tokens())), dict(trainer.callback_metrics)]

    assert_equal(outcome(superpipeline(k=2)), outcome("auto"), "fit after validate")


@pytest.mark.rest("takes tenths of a second")
def test_prediction_keeps_what_fits() -> None:
    """Over many batches a fixed part stays and the rest streams: a sliding window would miss every layer."""
    module = Module(Stack(depth=8))
    strategy = superpipeline(k=4, k_prime=1)
    trainer = trainer_for(strategy)
    trainer.predict(module, loader(vectors(2)))
    first = strategy.stats().fetched_layers
    trainer = trainer_for(strategy2 := superpipeline(k=4, k_prime=1))
    trainer.predict(module, loader(vectors(10)))
    per_batch = (strategy2.stats().fetched_layers - first) / 8
    layers, slots = len(strategy.plan.layers), sum(ring.slots for ring in strategy.plan.rings)
    assert per_batch <= layers - slots + 2


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.parametrize("training", [True, False])
def test_calls_outside_a_step(training: bool) -> None:
    """``self(x)`` in a hook streams as well, and leaves the host's parameters in the modules."""

    class CallsInHook(Module):
        def on_train_epoch_end(self) -> None:
            with torch.set_grad_enabled(training):
                y = self.net(torch.ones(2, 16))
                if training:
                    y.sum().backward()
                self.register_buffer("seen", y.detach().clone())
            assert all(type(p) is torch.nn.Parameter for p in self.parameters())

    batches = vectors()
    ours = fit(lambda: CallsInHook(Stack()), batches, superpipeline(k=1))
    reference = fit(lambda: CallsInHook(Stack()), batches)
    assert_same(ours, reference)
    assert_equal([p.grad for p in ours.module.parameters()], [p.grad for p in reference.module.parameters()], "grads")


def test_collate_is_the_identity_on_whole_batches() -> None:
    assert collate([5]) == 5
