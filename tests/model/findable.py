"""Models of the libraries with the number of layers of each kind that are found in them."""

from __future__ import annotations

from collections.abc import Callable

import torchvision
import transformers
from torch import nn

from tests.support.models import Recurrent, Stack

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
        {"encoder.layers.2.blocks.3", "encoder.layers.3.blocks.1.mlp.fc1"},
    ),
    "resnet50": (vision("resnet50"), {"layer3.2", "layer4.0.conv2", "fc"}),
    "swin": (vision("swin_t"), {"features.5.3", "features.7.1.attn"}),
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
