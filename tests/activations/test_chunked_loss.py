"""A language model's loss in chunks: what it computes, what it takes, and what is refused."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import peft
import pytest
import torch
import transformers
from torch import Tensor, nn

from sp_lightning import chunk_loss
from sp_lightning.core.torch_compat.private import TorchDispatchMode, tree_leaves
from tests.support.models import Transformer, llama, tokens
from tests.support.runs import Make, assert_equal, assert_same, fit, fused, superpipeline
from tests.support.tiers import first

VOCABULARY, CHUNK = 64, 3  # chunks of 3 leave one token of the 16 of a batch over
PRECISIONS = ["32-true", "bf16-mixed", "bf16-true"]


def other(name: str, **more: Any) -> Make:
    """A model whose logits are scaled or capped before the loss."""

    def make() -> Transformer:
        sizes = {
            "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "use_cache": False,
            "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
        }  # fmt: skip
        config = getattr(transformers, f"{name}Config")(**sizes, **more)
        return Transformer(getattr(transformers, f"{name}ForCausalLM")(config).train())

    return make


def adapted(**options: Any) -> Transformer:
    module = llama()
    module.net = peft.get_peft_model(module.net, peft.LoraConfig(r=4, **{"target_modules": ["q_proj"], **options}))
    return module


def frozen_head() -> Transformer:
    module = llama()
    module.net.lm_head.requires_grad_(False)
    return module


def adapted_later() -> Transformer:
    """The head is exchanged after the loss was chunked."""
    module = chunked(llama)()
    module.net = peft.get_peft_model(module.net, peft.LoraConfig(r=4, target_modules=["q_proj", "lm_head"]))
    return module


class TwoOptimizers(Transformer):
    """One for the head, one for the rest, by hand."""

    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.manual_backward(loss)
        for optimizer in self.optimizers():
            optimizer.step()
            optimizer.zero_grad()
        return loss

    def configure_optimizers(self) -> Any:
        head = list(self.net.lm_head.parameters())
        rest = [p for name, p in self.net.named_parameters() if not name.startswith("lm_head")]
        return [torch.optim.SGD(head, lr=1e-2), torch.optim.AdamW(rest, lr=1e-2)]


class ReturnsAll(Transformer):
    """The output itself is the step's, with logits that are none."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net(**batch)


MODELS: dict[str, Make] = {
    "llama": llama,
    "tied": lambda: llama(tie_word_embeddings=True),
    "checkpointed": lambda: llama(checkpointing={"use_reentrant": False}),
    "reentrant": lambda: llama(checkpointing={"use_reentrant": True}),
    "frozen-head": frozen_head,
    "lora": adapted,
    "lora-head": lambda: adapted(target_modules=["q_proj", "lm_head"], lora_dropout=0.1),
    "trained-head-beside-lora": lambda: adapted(modules_to_save=["lm_head"]),
    "two-optimizers": lambda: TwoOptimizers(llama().net),
    "returns-all": lambda: ReturnsAll(llama().net),
    "soft-cap": other("Gemma2", head_dim=8),
    "scaled": other("Cohere"),
    "divided": other("Granite", logits_scaling=3.0),
}


def chunked(make: Make, **options: Any) -> Callable[[], Any]:
    def made() -> pl.LightningModule:
        module: Any = make()
        chunk_loss(module.net, **{"tokens": CHUNK, **options})
        return module

    return made


def batches() -> list[Any]:
    """Some labels are ignored, so that chunks count differently."""
    found = copy.deepcopy(list(tokens()))
    for batch in found:
        batch["labels"] = batch["labels"].clone()
        batch["labels"][0, 2:6] = -100
    return found


# ---------------------------------------------------------------------- beside the whole loss


@pytest.mark.long("takes a second or more")
@pytest.mark.parametrize("precision", first(PRECISIONS, "32-true", "bf16-mixed", why="a dtype as others"))
@pytest.mark.parametrize("name", first(MODELS, "llama", "soft-cap", why="others of the same"))
def test_kept_logits_change_nothing(name: str, precision: Any) -> None:
    make = MODELS[name]
    ours = fit(chunked(make, keep_logits=True), batches(), precision=precision)
    assert_same(ours, fit(make, batches(), precision=precision))


# A sum over chunks is another order of sums; in 16 bits each chunk's part of the head's gradient is rounded. Six chunks of
# random numbers differ by half of these.
TOLERANCES = {"32-true": 1e-6, "bf16-mixed": 1e-2, "bf16-true": 1e-2}


@pytest.mark.long("takes a second or more")
@pytest.mark.parametrize("precision", first(PRECISIONS, "32-true", "bf16-mixed", why="a dtype as others"))
@pytest.mark.parametrize(
    "name", first([n for n in MODELS if n != "lora-head"], "llama", "soft-cap", "tied", why="others of the same")
)
def test_the_loss_and_all_gradients_are_those_of_the_whole_but_for_rounding(name: str, precision: Any) -> None:
    ours, whole = (fit(make, batches()[:1], precision=precision) for make in (chunked(MODELS[name]), MODELS[name]))
    tolerance = TOLERANCES[precision]
    assert torch.allclose(ours.losses[0], whole.losses[0], rtol=tolerance)
    (found,), (expected,) = ours.gradients, whole.gradients
    assert any(gradient is not None for gradient in expected.values())
    for of, gradient in expected.items():
        assert (found[of] is None) == (gradient is None)
        if gradient is not None and gradient.any():
            difference = (found[of].double() - gradient.double()).norm() / gradient.double().norm()
            assert difference < tolerance, of


@pytest.mark.parametrize("keep_logits", [False, True])
@pytest.mark.parametrize(
    "given",
    [
        {"num_items_in_batch": 7},
        {"num_items_in_batch": torch.tensor(7)},
        {"shift_labels": torch.arange(16).reshape(2, 8)},
        {"ignore_index": 3},
    ],
    ids=str,
)
def test_arguments_of_the_loss_reach_it(given: Any, keep_logits: bool) -> None:
    torch.manual_seed(0)
    net = llama(dropout=0.0).net
    batch = {**batches()[0], **given}
    if "ignore_index" in given:
        batch["labels"] = batch["labels"].clamp(min=0)
    whole = net(**batch).loss
    chunk_loss(net, CHUNK, keep_logits=keep_logits)
    torch.testing.assert_close(net(**batch).loss, whole, rtol=1e-6, atol=0)


# ---------------------------------------------------------------------- streamed


def options(mode: str) -> dict[str, Any]:
    return {"optimizer_overlap": "backward"} if mode == "backward" else {"activations": mode}


@pytest.mark.long("takes a second or more")
@pytest.mark.parametrize(
    "keep_logits", first([False, True], False, second=(), why="a loss outside of all layers, as any")
)
@pytest.mark.parametrize(
    "mode",
    first(["keep", "recompute", "offload", "backward"], "keep", second=("backward",), why="layers know of no loss"),
)
@pytest.mark.parametrize("precision", first(PRECISIONS, "32-true", "bf16-mixed", second=(), why="a dtype as others"))
@pytest.mark.parametrize(
    "name",
    first(MODELS, "llama", "tied", "lora-head", second=("soft-cap", "two-optimizers"), why="heads as others"),
)
def test_streamed_as_on_plain_lightning(name: str, precision: Any, mode: str, keep_logits: bool) -> None:
    if mode == "backward" and name == "two-optimizers":
        pytest.skip("manual optimization has no step that could be taken apart")
    make = chunked(MODELS[name], keep_logits=keep_logits)
    recorded: Any = "gradients"
    if mode == "backward":
        make, recorded = fused(make), "losses"
    ours = fit(make, batches(), superpipeline(k=1, **options(mode)), precision=precision, recorded=recorded)
    assert_same(ours, fit(make, batches(), precision=precision, recorded=recorded))


@pytest.mark.long("takes a second or more")
@pytest.mark.parametrize("keep_logits", [False, True])
def test_accumulated(keep_logits: bool) -> None:
    make = chunked(llama, keep_logits=keep_logits)
    given: dict[str, Any] = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1, "precision": "bf16-mixed"}
    assert_same(fit(make, batches(), superpipeline(k=1), **given), fit(make, batches(), **given))


@pytest.mark.long("takes a second or more")
def test_adapters_that_come_later() -> None:
    ours = fit(adapted_later, batches(), superpipeline(k=1))
    assert_same(ours, fit(adapted_later, batches()))
    early = fit(chunked(lambda: adapted(target_modules=["q_proj", "lm_head"])), batches())
    assert_equal(early.losses, ours.losses, "losses")


@pytest.mark.long("takes a second or more")
def test_the_head_travels_no_more_often_once_the_order_is_known() -> None:
    """It is called for each chunk, and in backward again."""

    def fetched(make: Make, count: int) -> dict[str, int]:
        strategy = superpipeline(k=1, k_prime=1)
        fit(make, tokens(count), strategy, recorded="losses")
        return strategy.fetches()

    heads = []
    for make in (llama, chunked(llama)):
        few, many = (fetched(make, count)["net.lm_head"] for count in (2, 5))
        heads.append(many - few)
    assert heads == [3, 3]


# ---------------------------------------------------------------------- what is there


class Largest(TorchDispatchMode):
    """Notes the dtypes of tensors with as many entries as the logits of a batch."""

    def __init__(self, entries: int) -> None:
        super().__init__()
        self.entries = entries
        self.dtypes: set[torch.dtype] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        found = (leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor))
        self.dtypes |= {leaf.dtype for leaf in found if leaf.numel() >= self.entries}
        return result


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.parametrize(
    ("chunks", "dtypes"),
    [(None, {torch.bfloat16, torch.float32}), ({"keep_logits": True}, {torch.bfloat16}), ({}, set())],
    ids=["whole", "kept", "chunked"],
)
def test_logits_that_are_never_there(chunks: dict[str, Any] | None, dtypes: set[torch.dtype]) -> None:
    net = llama(vocab_size=300, hidden_size=16, num_attention_heads=2).net.to(torch.bfloat16)
    if chunks is not None:
        chunk_loss(net, 16, **chunks)
    ids = torch.randint(300, (2, 32))
    with Largest(64 * 300) as largest:
        net(input_ids=ids, labels=ids).loss.backward()
    assert largest.dtypes == dtypes


# ---------------------------------------------------------------------- what stays as it is


@pytest.mark.rest("takes tenths of a second")
def test_other_forwards_have_their_logits() -> None:
    net, ids = chunked(llama)().net, torch.ones(1, 4, dtype=torch.long)
    plain = llama().net
    plain.load_state_dict(net.state_dict())
    for each in (net, plain):
        each.eval()
    expected = plain(input_ids=ids, labels=ids)
    with torch.no_grad():
        found = net(input_ids=ids, labels=ids)
    assert torch.equal(found.logits, expected.logits)
    assert torch.equal(found.loss, expected.loss)
    assert torch.equal(net(input_ids=ids).logits, expected.logits)
    assert torch.equal(net(input_ids=ids, labels=None).logits, expected.logits)
    assert not hasattr(
        net(input_ids=ids, labels=ids).logits, "shape"
    )  # models that are trained may be in evaluation mode
    assert torch.equal(net.generate(ids, max_new_tokens=3), plain.generate(ids, max_new_tokens=3))
    assert net.state_dict().keys() == plain.state_dict().keys()
    assert net.lm_head is net.get_output_embeddings()


def test_a_forward_that_fails_leaves_the_head() -> None:
    net = chunked(llama)().net
    with pytest.raises(ValueError, match="There are logits of 4 tokens and labels for 3"):
        net(input_ids=torch.ones(1, 4, dtype=torch.long), labels=torch.ones(1, 3, dtype=torch.long))
    assert isinstance(net.lm_head, nn.Linear)


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda net: pickle.loads(pickle.dumps(net))])
def test_copies_are_chunked_by_themselves(copied: Callable[[Any], Any]) -> None:
    net, batch = chunked(lambda: llama(dropout=0.0))().net, batches()[0]
    another = copied(net)
    assert torch.equal(another(**batch).loss, net(**batch).loss)
    another.lm_head.weight.data.zero_()
    another(**batch).loss.backward()
    assert net.lm_head.weight.grad is None
    assert not hasattr(another(**batch).logits, "shape")


def test_the_last_call_counts() -> None:
    net, batch = chunked(lambda: llama(dropout=0.0))().net, batches()[0]
    chunk_loss(net, 5, keep_logits=True)
    assert net(**batch).logits.shape == (2, 8, VOCABULARY)
    chunk_loss(net, 5)
    chunk_loss(net, 5)
    assert not hasattr(net(**batch).logits, "shape")
    assert next(iter(inspect.signature(net.forward).parameters)) == "input_ids"


# ---------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("used", "named"),
    [
        (lambda logits: logits.argmax(-1), "argmax"),
        (lambda logits: logits.shape, "shape"),
        (lambda logits: logits[0], "an operator or an index"),
        (lambda logits: logits == 0, "an operator or an index"),
        (lambda logits: torch.softmax(logits, -1), "softmax"),
        (lambda logits: logits * 2, "a function"),
    ],
)
def test_logits_that_are_not_there_say_so(used: Callable[[Any], Any], named: str) -> None:
    logits = chunked(llama)().net(**batches()[0]).logits
    with pytest.raises(AttributeError, match=f"^{named}: chunk_loss keeps no logits .* keep_logits=True"):
        used(logits)


class Masks(transformers.LlamaForCausalLM):
    """Does with its logits what cannot be noted."""

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Any:
        logits = self.lm_head(self.model(input_ids=input_ids).last_hidden_state)
        logits[..., 0] = -1.0
        loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size)
        return transformers.modeling_outputs.CausalLMOutput(loss=loss, logits=logits)


@pytest.mark.rest("takes tenths of a second")
def test_a_model_that_changes_its_logits_can_keep_them() -> None:
    def make() -> Transformer:
        return Transformer(Masks(llama().net.config))

    with pytest.raises(AttributeError, match=r"index: .* keep_logits=True"):
        fit(chunked(make), batches())
    assert_same(fit(chunked(make, keep_logits=True), batches()), fit(make, batches()))


def t5() -> nn.Module:
    config = transformers.T5Config(d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2, vocab_size=16)
    return transformers.T5ForConditionalGeneration(config)


def ones_own_loss() -> nn.Module:
    net: Any = llama().net
    net.loss_function = lambda logits, labels, vocab_size: logits.mean()
    return net


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (llama, r"Transformer is not a causal language model .* chunk_loss\(self.model\)"),
        (lambda: nn.Linear(1, 1), "Linear is not a causal language model"),
        (lambda: llama().net.model, "LlamaModel is not a causal language model"),
        (t5, "T5ForConditionalGeneration computes its loss by itself"),
        (ones_own_loss, "the loss of LlamaForCausalLM is .*<lambda>, and only ForCausalLMLoss"),
    ],
)
def test_models_that_have_no_such_loss(model: Callable[[], nn.Module], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        chunk_loss(model())


@pytest.mark.parametrize("count", [0, True, 2.0, None])
def test_chunks_of_no_tokens(count: Any) -> None:
    with pytest.raises(ValueError, match="give a whole number of at least 1"):
        chunk_loss(llama().net, count)
