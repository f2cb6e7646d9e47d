"""Layers are found in any module, and cover it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torchvision
import transformers
from torch import nn

from sp_lightning.model.find import find_layers
from sp_lightning.plan.plan import make_plan
from tests.support.models import Block, Recurrent, Stack

SMALL = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 6, "num_attention_heads": 4, "vocab_size": 500,
}  # fmt: skip
KV = {**SMALL, "num_key_value_heads": 2}
VISION = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "image_size": 32,
    "patch_size": 8, "projection_dim": 64,
}  # fmt: skip
TEXT = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 500,
    "projection_dim": 64, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def causal(config: transformers.PretrainedConfig) -> nn.Module:
    return transformers.AutoModelForCausalLM.from_config(config)


def mixtral() -> nn.Module:
    return causal(transformers.MixtralConfig(**KV, num_local_experts=4))


def t5() -> nn.Module:
    config = transformers.T5Config(d_model=64, d_ff=128, num_layers=4, num_heads=4, d_kv=16, vocab_size=500)
    return transformers.T5ForConditionalGeneration(config)


def clip() -> nn.Module:
    return transformers.CLIPModel(transformers.CLIPConfig(text_config=TEXT, vision_config=VISION, projection_dim=64))


def whisper() -> nn.Module:
    config = transformers.WhisperConfig(
        d_model=64, encoder_layers=4, decoder_layers=4, encoder_ffn_dim=128, decoder_ffn_dim=128, vocab_size=500,
        encoder_attention_heads=4, decoder_attention_heads=4, pad_token_id=1, bos_token_id=1, eos_token_id=2,
        decoder_start_token_id=1,
    )  # fmt: skip
    return transformers.WhisperForConditionalGeneration(config)


def vision(name: str, **options: object) -> Callable[[], nn.Module]:
    return lambda: getattr(torchvision.models, name)(weights=None, **options)


MODELS: dict[str, tuple[Callable[[], nn.Module], set[str]]] = {
    "llama": (
        lambda: causal(transformers.LlamaConfig(**KV)),
        {"model.embed_tokens", "model.layers.0", "model.layers.5", "lm_head"},
    ),
    "mixtral": (mixtral, {"model.layers.0", "model.layers.5"}),
    "mamba": (
        lambda: causal(transformers.MambaConfig(hidden_size=64, num_hidden_layers=4, vocab_size=500)),
        {"backbone.layers.0"},
    ),
    "bert": (lambda: transformers.BertForMaskedLM(transformers.BertConfig(**SMALL)), {"bert.encoder.layer.3"}),
    "albert": (
        lambda: transformers.AlbertModel(transformers.AlbertConfig(**SMALL, embedding_size=32)),
        {"encoder.albert_layer_groups.0.albert_layers.0"},
    ),
    "t5": (t5, {"shared", "encoder.block.0", "decoder.block.3"}),
    "whisper": (whisper, {"model.encoder.layers.0", "model.decoder.layers.3"}),
    "clip": (clip, {"text_model.encoder.layers.0", "vision_model.encoder.layers.3"}),
    "swin-hf": (
        lambda: transformers.SwinModel(
            transformers.SwinConfig(embed_dim=32, depths=[2, 2, 6, 2], num_heads=[2, 2, 4, 4])
        ),
        {"encoder.layers.2.blocks.3", "encoder.layers.3.blocks.1"},
    ),
    "resnet50": (vision("resnet50"), {"layer3.2", "layer4.0", "fc"}),
    "swin": (vision("swin_t"), {"features.5.3", "features.7.1"}),
    "vit": (vision("vit_b_16"), {"encoder.layers.encoder_layer_7"}),
    "vgg": (vision("vgg11"), {"classifier.0"}),
    "densenet": (vision("densenet121"), {"features.denseblock3.denselayer12", "classifier"}),
    "convnext": (vision("convnext_tiny"), {"features.5.4", "features.7.2"}),
    "efficientnet": (vision("efficientnet_b0"), {"features.6.1"}),
    "mobilenet": (vision("mobilenet_v3_small"), {"features.11", "classifier.0"}),
    "lstm": (lambda: Recurrent(), {"stack.0", "stack.3"}),
    "mlp": (lambda: nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)), {"0", "2"}),
    "one-linear": (lambda: nn.Linear(3, 3), {""}),
    "stack": (lambda: Stack(), {"stem", "blocks.0", "blocks.4", "head"}),
}


@pytest.mark.parametrize("name", MODELS)
def test_layers_cover_the_model(name: str) -> None:
    make, expected = MODELS[name]
    module = make()
    found = find_layers(module)
    names = [layer.name for layer in found.layers]
    assert expected <= set(names)
    assert len(names) == len(set(names))
    owned = [p for layer in (*found.layers, *found.tables, found.residents) for _, p in layer.parameters]
    assert len(owned) == len({id(p) for p in owned}), "a shared parameter has one owner"
    assert {id(p) for p in owned} == {id(p) for p in module.parameters()}
    total = sum(p.numel() * p.element_size() for p in module.parameters())
    assert sum(layer.nbytes for layer in (*found.layers, *found.tables)) >= 0.95 * total


@pytest.mark.parametrize("name", sorted(set(MODELS) - {"mlp", "one-linear", "stack"}))  # alignment outweighs those
def test_slots_never_take_more_than_the_model(name: str) -> None:
    """Whatever the sizes of the layers: one convolution of VGG's is three quarters of the model."""
    module = MODELS[name][0]()
    plan = make_plan(find_layers(module), k=2, k_prime=1)
    total = sum(p.numel() * p.element_size() for p in module.parameters())
    assert plan.slot_bytes <= 1.05 * total
    assert all(layer.nbytes <= plan.rings[layer.ring].nbytes for layer in plan.layers)


def test_tied_parameters_are_used_by_both_places() -> None:
    config = transformers.GPT2Config(n_embd=64, n_layer=4, n_head=4, vocab_size=500, bos_token_id=1, eos_token_id=2)
    module = transformers.GPT2LMHeadModel(config)
    found = find_layers(module)
    owner = next(i for i, layer in enumerate(found.layers) if layer.name == "transformer.wte")
    assert found.visits[module.lm_head] == (owner,)
    assert len(found.places[module.lm_head.weight]) == 2


def test_attention_is_never_cut() -> None:
    module = nn.ModuleList([nn.MultiheadAttention(16, 2), nn.MultiheadAttention(16, 2), Block()])
    assert [layer.name for layer in find_layers(module).layers] == ["0", "1", "2"]


def test_finding_changes_nothing() -> None:
    module = Stack()
    before = [(name, id(p), p._version) for name, p in module.named_parameters()]
    find_layers(module)
    assert [(name, id(p), p._version) for name, p in module.named_parameters()] == before


def test_equal_layers_have_one_ring_of_k_and_k_prime() -> None:
    module = nn.Sequential(*(nn.Linear(64, 64) for _ in range(10)))
    for k, k_prime in ((1, 1), (2, 1), (3, 2)):
        (ring,) = make_plan(find_layers(module), k=k, k_prime=k_prime).rings
        assert ring.slots == k + k_prime


def test_planning_is_quick_for_many_sizes() -> None:
    """Sizes are grouped before all ways to split them are tried."""
    with torch.device("cpu"):
        module = nn.Sequential(*(nn.Linear(1, 1 + 128 * index, bias=False) for index in range(400)))
    plan = make_plan(find_layers(module), k=2, k_prime=1)
    assert len(plan.layers) > 300


def block(first: int = 64, inner: int = 128, last: int = 64) -> nn.Sequential:
    return nn.Sequential(nn.Linear(first, inner), nn.GELU(), nn.Linear(inner, last))


def times(count: int, make: Callable[[], nn.Module]) -> nn.Sequential:
    return nn.Sequential(*(make() for _ in range(count)))


def norms() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.ReLU())


def activated() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU())


class Routed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(64, 2)
        self.experts = nn.ModuleList(block() for _ in range(2))


def with_head(blocks: nn.Module) -> nn.Module:
    return nn.ModuleDict({"blocks": blocks, "head": nn.Linear(64, 64)})


HANDWRITTEN: dict[str, tuple[Callable[[], nn.Module], list[str]]] = {
    "list": (lambda: with_head(nn.ModuleList([block(), block()])), ["blocks.0", "blocks.1", "head"]),
    "first-other": (lambda: with_head(nn.ModuleList([block(8), block(), block()])), ["blocks.0", "blocks.1", "blocks.2", "head"]),
    "convolution-and-norm": (lambda: times(3, norms), ["0", "1", "2"]),
    "stages": (lambda: times(2, lambda: times(2, block)), ["0.0", "0.1", "1.0", "1.1"]),
    "innermost-of-two-parts": (lambda: times(2, lambda: times(2, activated)), ["0", "1"]),
    # One part: nothing is saved inside but what the part itself saves.
    "one-part": (lambda: times(2, activated), ["0.0", "1.0"]),
    # Most of the model each, and not alike: cut.
    "encoder-and-decoder": (lambda: nn.Sequential(block(64, 32, 8), block(8, 32, 64)), ["0.0", "0.2", "1.0", "1.2"]),
    "between-stages": (
        lambda: nn.Sequential(*(each() for each in (norms, lambda: times(2, Block), norms, lambda: times(2, Block)))),
        ["0.0", "1.0", "1.1", "2.0", "3.0", "3.1"],
    ),
    "experts": (Routed, ["experts.0", "experts.1"]),
}  # fmt: skip


@pytest.mark.parametrize("name", HANDWRITTEN)
def test_blocks_that_are_sequences_of_bare_modules(name: str) -> None:
    """The innermost that repeats and has more than one part; a sequence of such is a stage."""
    make, expected = HANDWRITTEN[name]
    found = find_layers(make())
    assert [layer.name for layer in found.layers] == expected
    assert len(found.experts) == (2 if name == "experts" else 0)
    assert not found.ungrouped or name in ("one-part", "encoder-and-decoder")
