"""A language model's loss without logits: the code of the guide, streamed and plain, and the error for the old name."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sp_lightning
from sp_lightning.core.torch_compat.private import TorchDispatchMode, tree_leaves
from tests.support.models import Transformer, llama, tokens
from tests.support.repository import ROOT, blocks
from tests.support.runs import assert_same, fit, fused, superpipeline

NEWER = pytest.mark.skipif(not hasattr(nn, "LinearCrossEntropyOptions"), reason="torch 2.14 has it")
LOSSES = [pytest.param("loss_without_logits", marks=NEWER), "loss_in_chunks"]
CHUNK = 5  # the last of a batch's 14 tokens are fewer


def of_the_guide(name: str) -> Any:
    """Returns a function that memory.md shows."""
    shown: dict[str, Any] = {}
    for block in blocks(ROOT / "examples" / "guide" / "memory.md", "python"):
        if f"def {name}" in block:
            exec(compile(block, name, "exec"), shown)
    return shown[name]


class WithoutLogits(Transformer):
    """Computes its loss by the guide's code."""

    def __init__(self, name: str, **options: Any) -> None:
        super().__init__(llama(**options).net)
        self.of, self.given = of_the_guide(name), (CHUNK,) * (name == "loss_in_chunks")

    def loss(self, batch: Any) -> Tensor:
        loss: Tensor = self.of(self.net, batch, *self.given)
        return loss


def batches() -> list[Any]:
    """Some labels are ignored, so that chunks count differently."""
    found = copy.deepcopy(list(tokens()))
    for batch in found:
        batch["labels"] = batch["labels"].clone()
        batch["labels"][0, 2:6] = -100
    return found


@pytest.mark.long("trainings of a small Llama")
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
@pytest.mark.parametrize("options", [{}, {"activations": "recompute"}, {"optimizer_overlap": "backward"}], ids=str)
@pytest.mark.parametrize("name", LOSSES)
def test_streamed_as_on_plain_lightning(name: str, options: dict[str, Any], precision: Any) -> None:
    make = fused(lambda: WithoutLogits(name))
    given: dict[str, Any] = {"precision": precision, "recorded": "losses"}  # gradients are freed in backward
    ours = fit(make, batches(), superpipeline(k=1, **options), **given)
    assert_same(ours, fit(make, batches(), **given))


@pytest.mark.rest("forwards and backwards of a small Llama")
@pytest.mark.parametrize("name", LOSSES)
def test_the_loss_and_all_gradients_are_those_of_the_whole_but_for_rounding(name: str) -> None:
    batch, found = batches()[0], []
    torch.manual_seed(0)
    state = llama(dropout=0.0).net.state_dict()
    for module in (WithoutLogits(name, dropout=0.0), llama(dropout=0.0)):
        module.net.load_state_dict(state)
        loss = module.loss(batch)
        loss.backward()
        found.append([loss.detach(), *(p.grad for p in module.net.parameters())])
    for ours, whole in zip(*found, strict=True):
        torch.testing.assert_close(ours, whole)


@pytest.mark.parametrize("name", LOSSES)
def test_losses_of_16_bit_models_are_not_added_up_in_16_bits(name: str) -> None:
    """torch's function returned 8.5 in place of 9.07."""
    torch.manual_seed(0)
    hidden, ids = torch.randn(1, 2001, 64).bfloat16(), torch.randint(8000, (1, 2001))
    head = nn.Linear(64, 8000, bias=False, dtype=torch.bfloat16)
    nn.init.normal_(head.weight, std=0.05)
    net = SimpleNamespace(model=lambda _: SimpleNamespace(last_hidden_state=hidden), lm_head=head)
    loss = of_the_guide(name)(net, {"input_ids": ids, "labels": ids})
    logits = hidden[0, :-1].double() @ head.weight.double().T
    torch.testing.assert_close(loss.double(), nn.functional.cross_entropy(logits, ids[0, 1:]), rtol=5e-3, atol=0)


class Largest(TorchDispatchMode):
    """Notes the most entries of a tensor."""

    most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.most = max([self.most, *(leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, Tensor))])
        return result


@pytest.mark.rest("forwards and backwards of a small Llama")
@pytest.mark.parametrize("name", LOSSES)
def test_logits_that_are_never_there(name: str) -> None:
    vocabulary, count = 300, 2 * 63
    batch = {"input_ids": (ids := torch.randint(vocabulary, (2, 64))), "labels": ids}
    sizes = {"vocab_size": vocabulary, "hidden_size": 16, "num_attention_heads": 2, "max_position_embeddings": 64}
    most = []
    for module in (WithoutLogits(name, **sizes), llama(**sizes)):
        with Largest() as largest:
            module.loss(batch).backward()
        most.append(largest.most)
    assert most[0] < count * vocabulary <= most[1]


def test_the_old_name_says_what_to_write() -> None:
    with pytest.raises(
        AttributeError, match=r"chunk_loss was removed.*linear_cross_entropy\(hidden\.float\(\), .*memory\.md"
    ):
        sp_lightning.chunk_loss  # type: ignore[attr-defined]  # noqa: B018
    assert "chunk_loss" not in dir(sp_lightning)
