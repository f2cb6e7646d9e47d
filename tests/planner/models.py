"""Models of the tables of answers: factories for the command line, and configs that are written into a folder."""

from __future__ import annotations

import json
import logging
import warnings
from pathlib import Path
from typing import Any

import peft
import torch
import transformers
from torch import Tensor, nn

import sp_lightning
from tests.support.models import Module, Stack

# ---------------------------------------------------------------------- factories


class Known(Module):
    """A factory for the command line: it says what it takes."""

    def __init__(self) -> None:
        super().__init__(Stack())
        self.example_input_array: Any = torch.zeros(4, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)  # type: ignore[no-any-return]


class Wide(Known):
    """Twelve blocks of 8 million weights and activations that are worth moving; without values they take no memory."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            *(nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024)) for _ in range(12))
        )
        self.example_input_array = torch.zeros(1024, 1024)


class Sixteen(Known):
    """Sixteen layers."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*(nn.Linear(16, 16) for _ in range(16)))


def known_by_name() -> nn.Module:
    module = Known()
    module.example_input_array = {"x": torch.zeros(4, 16)}
    return module


class Unknown(nn.Module):
    """It does not say what it takes."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Stack()


class LooksAtValues(Known):
    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) if x.sum() > 0 else self.net(-x)  # type: ignore[no-any-return]


class SaysMuch(Known):
    def forward(self, x: Tensor) -> Tensor:
        raise ValueError("\n  The input is not to my taste.\nIt never is.\n")


class WithoutForward(Module):
    def __init__(self) -> None:
        super().__init__(Stack())
        self.example_input_array = torch.zeros(4, 16)


class ConfiguresModel(Module):
    """Makes what is large where a strategy can help."""

    def __init__(self) -> None:
        super().__init__(nn.Identity())

    def configure_model(self) -> None:
        self.net = Stack()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)  # type: ignore[no-any-return]


class TakesTokens(Module):
    def __init__(self) -> None:
        super().__init__(nn.Sequential(nn.Embedding(64, 16), Stack()))

    def forward(self, ids: Tensor) -> Tensor:
        return self.net(ids)  # type: ignore[no-any-return]


class TakesEightTokens(TakesTokens):
    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.zeros(8, 16))

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) + self.positions


class Tied(Module):
    device_of_the_net = "cpu"

    def __init__(self) -> None:
        super().__init__(nn.Identity())

    def configure_model(self) -> None:
        with torch.device(self.device_of_the_net):
            self.net = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
        self.net[3].weight = self.net[0].weight

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)  # type: ignore[no-any-return]


class TiedOnMeta(Tied):
    """A run would take its values from a file; a plan needs none."""

    device_of_the_net = "meta"


class TiedByCode(Module):
    """Its head reads the weight of its embedding, which no module's call shows."""

    def __init__(self) -> None:
        super().__init__(nn.Identity())
        self.tok = nn.Embedding(4096, 32)
        self.net = nn.Sequential(*(nn.Linear(32, 32) for _ in range(4)))
        self.example_input_array = torch.zeros(2, 4, dtype=torch.long)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.net(self.tok(x))
        return hidden @ self.tok.weight.T

    def loss(self, batch: Tensor) -> Tensor:
        return self(batch).square().mean()  # type: ignore[no-any-return]


class Descends(Known):
    """Its optimizer has a state of one tensor per parameter, and its rate needs nothing of a run."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1)}


class DescendsInARun(Known):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 1 / self.trainer.max_steps)


class Noisy(Known):
    """Its library warns in every way, as torch and torchao do while they are imported and run without values."""

    def forward(self, x: Tensor) -> Tensor:
        warnings.warn("This is deprecated.", stacklevel=1)
        logging.getLogger("torch.utils._pytree").warning("This will be an error.")
        logging.getLogger("torch._subclasses.fake_tensor").error("This failed.")
        return self.net(x)  # type: ignore[no-any-return]


def adapters_of_llama() -> nn.Module:
    """PEFT's adapters, which are moved and cast while they are made."""
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4, vocab_size=64
    )
    net = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    adapters: nn.Module = peft.get_peft_model(net, peft.LoraConfig(r=4, target_modules=["q_proj"]))
    return adapters.to(torch.float32)


def with_adapters() -> nn.Module:
    net = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    peft.inject_adapter_in_model(peft.LoraConfig(target_modules=["0"], r=2), net)
    return net


def encoder() -> nn.Module:
    """``nn.MultiheadAttention`` reads the weight of its projection, and PEFT adds adapters beside that, nevertheless."""
    return nn.Sequential(*(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True) for _ in range(3)))


def packed() -> Any:
    net = transformers.GptOssForCausalLM(transformers.GptOssConfig(num_local_experts=4, num_experts_per_tok=2, **OSS))
    sp_lightning.pack_experts(net)
    net.lm_head.requires_grad_(True)
    return net


def packed_on_meta() -> Any:
    with torch.device("meta"):
        return packed()


# ---------------------------------------------------------------------- configs of transformers

OSS: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2,
    "vocab_size": 64, "head_dim": 32,
}  # fmt: skip
_LLAMA: dict[str, Any] = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 2000, "hidden_size": 128,
    "intermediate_size": 256, "num_hidden_layers": 6, "num_attention_heads": 2,
}  # fmt: skip
_GPT2: dict[str, Any] = {
    "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_embd": 64, "n_layer": 2, "n_head": 2, "n_positions": 512,
    "vocab_size": 128,
}  # fmt: skip
_OSS: dict[str, Any] = {
    "model_type": "gpt_oss", "architectures": ["GptOssForCausalLM"], "num_local_experts": 4, "num_experts_per_tok": 2, **OSS,
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": _LLAMA,
    "llama-bfloat16": {**_LLAMA, "dtype": "bfloat16"},
    "llama-float32": {**_LLAMA, "dtype": "float32"},
    "llama-quantised": {**_LLAMA, "quantization_config": {"quant_method": "bitsandbytes"}},
    "gpt2": _GPT2,
    "gpt2-without-dropout": {**_GPT2, "attn_pdrop": 0.0},
    "gpt2-large-head": {**_GPT2, "vocab_size": 50_000},
    "t5": {"model_type": "t5", "architectures": ["T5ForConditionalGeneration"], "d_model": 64, "num_layers": 2, "d_ff": 64,
           "num_heads": 2, "d_kv": 32, "vocab_size": 128, "decoder_start_token_id": 0},
    "whisper": {"model_type": "whisper", "architectures": ["WhisperForConditionalGeneration"], "d_model": 64,
                "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2, "decoder_attention_heads": 2,
                "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "vocab_size": 128, "pad_token_id": 0, "bos_token_id": 0,
                "eos_token_id": 0, "decoder_start_token_id": 0},
    "mixtral": {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "hidden_size": 256, "intermediate_size": 512,
                "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 4, "num_local_experts": 8,
                "num_experts_per_tok": 2, "vocab_size": 128},
    "qwen3-moe": {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "vocab_size": 64, "hidden_size": 32,
                  "moe_intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2,
                  "head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2},
    "gpt-oss": _OSS,
    "gpt-oss-mxfp4": {**_OSS, "quantization_config": {"quant_method": "mxfp4"}},
    "of-the-hub": {"model_type": "mine", "auto_map": {"AutoModel": "mine.Mine"}},
}  # fmt: skip
SHAPES = Path(__file__).parents[2] / "examples" / "shapes"


def write_configs(folder: Path) -> Path:
    """Writes each config as NAME.json. The folder ``shapes`` has those of real models."""
    for name, config in CONFIGS.items():
        (folder / f"{name}.json").write_text(json.dumps(config))
    (folder / "shapes").symlink_to(SHAPES, target_is_directory=True)
    return folder


class Scales(nn.Module):
    """Multiplies by the mean of some thousand weights."""

    def __init__(self, thousands: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(1024 * thousands))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight.mean()


class Uneven(nn.Module):
    """Nine layers of four sizes: with k = 5, slots of one size are chosen, and with k = 6, of two sizes, which take less."""

    sizes: tuple[int, ...] = (13, 28, 28, 19, 19, 19, 28, 13, 28)

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*map(Scales, self.sizes))
        self.example_input_array = torch.zeros(2, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)  # type: ignore[no-any-return]


class Frozen(Uneven):
    """With all five layers on the device, it takes less than with three and two slots of the largest size."""

    sizes = (9, 9, 9, 9, 10)

    def __init__(self) -> None:
        super().__init__()
        self.net.requires_grad_(False)
        self.head = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(super().forward(x))  # type: ignore[no-any-return]
