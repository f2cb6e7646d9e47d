"""Models whose experts are stacked in one parameter: transformers' own, and small ones that read them in the same way."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor, nn

import sp_lightning
from tests.support.models import Module, Transformer

EXPERTS = 8
READS_ADDRESSES = torch.__version__.startswith("2.10.")
"""True if transformers' ``grouped_mm`` looks at the addresses of stacks on a CPU. Then all experts are uploaded."""


def tokens(count: int = 3, length: int = 2) -> list[Any]:
    """Few tokens, so that most experts are not routed to."""
    generator = torch.Generator().manual_seed(1)
    ids = [torch.randint(0, 64, (1, length), generator=generator) for _ in range(count)]
    return [{"input_ids": each, "labels": each} for each in ids]


_SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "use_cache": False, "num_experts_per_tok": 2,
}  # fmt: skip

CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("Qwen3Moe", {"num_experts": EXPERTS, "moe_intermediate_size": 24, "head_dim": 8}),
    "mixtral": ("Mixtral", {"num_local_experts": EXPERTS}),
    "gpt-oss": ("GptOss", {"num_local_experts": EXPERTS, "head_dim": 8, "layer_types": ["full_attention"] * 2}),
    "olmoe": ("Olmoe", {"num_experts": EXPERTS}),
    "granite": ("GraniteMoe", {"num_local_experts": EXPERTS}),
    "deepseek": (
        "DeepseekV3",
        {"n_routed_experts": EXPERTS, "moe_intermediate_size": 24, "first_k_dense_replace": 0, "n_group": 2, "topk_group": 1,
         "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
         "num_key_value_heads": 4},
    ),
    "qwen2": ("Qwen2Moe", {"num_experts": EXPERTS, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 16}),
    "phi": ("Phimoe", {"num_local_experts": EXPERTS}),
    "flex-olmo": ("FlexOlmo", {"num_experts": EXPERTS, "pad_token_id": 0}),
    "glm4": (
        "Glm4Moe",
        {"n_routed_experts": EXPERTS, "moe_intermediate_size": 24, "first_k_dense_replace": 0, "head_dim": 8, "n_group": 1,
         "topk_group": 1},
    ),
}  # fmt: skip


def transformer(name: str, implementation: str = "grouped_mm", **more: Any) -> Transformer:
    """A small model of transformers with stacked experts."""
    kind, own = CONFIGS[name]
    config = getattr(transformers, f"{kind}Config")(**{**_SIZES, **own, **more})
    net = getattr(transformers, f"{kind}ForCausalLM")(config)
    net.set_experts_implementation(implementation)
    return Transformer(net)


# ---------------------------------------------------------------------- adapters on stacked experts

ADAPTED = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
WIDER = {"qwen3": {"moe_intermediate_size": 32}, "gpt-oss": {"intermediate_size": 64}}
"""Models with adapters, and sizes that 4-bit formats accept: rows of whole blocks."""


def adapted(
    name: str = "qwen3",
    implementation: str = "grouped_mm",
    *,
    targets: tuple[str, ...] = ADAPTED,
    packed: bool = False,
    dtype: torch.dtype = torch.float32,
    adapters: int = 1,
) -> Callable[[], Transformer]:
    """Makes small models with PEFT's adapters on their stacked experts.

    Args:
        targets: ends of the names of the adapted parameters (``target_parameters``).
        packed: True if the experts below the adapters are packed in 4 bits.
        dtype: of all other weights but those of adapters.
        adapters: how many are active.
    """

    def make() -> Transformer:
        module = transformer(name, implementation, **WIDER[name])
        module.net.to(dtype)
        if packed:
            sp_lightning.pack_experts(module.net)
        config = peft.LoraConfig(
            r=2, target_modules=["q_proj"], target_parameters=list(targets), init_lora_weights=False
        )
        module.net = peft.get_peft_model(module.net, config)
        for number in range(1, adapters):
            module.net.add_adapter(f"other{number}", config)
            module.net.base_model.set_adapter(["default", f"other{number}"])
        return module

    return make


# ---------------------------------------------------------------------- small experts


def of_transformers(kind: type[nn.Module]) -> Any:
    """Gives a class the place of transformers' own, whose forwards read stacks only through torch functions."""
    kind.forward.__module__ = "transformers.models.of_tests"
    return kind


@of_transformers
class Stack(nn.Module):
    """Experts in one parameter, read one by one."""

    def __init__(self, count: int = EXPERTS, width: int = 16) -> None:
        super().__init__()
        self.inner = nn.Parameter(torch.randn(count, width, width) / 4)
        self.outer = nn.Parameter(torch.randn(count, width, width) / 4)
        self.bias = nn.Parameter(torch.randn(count, width))

    def forward(self, x: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for number in indices.unique().tolist():
            rows, place = torch.where(indices == number)
            hidden = torch.tanh(x[rows] @ self.inner[number]) @ self.outer[number] + self.bias[number]
            out = out.index_add(0, rows, (hidden * weights[rows, place, None]).to(out.dtype))
        return out


def kernel(x: Tensor, stack: Tensor) -> Tensor:
    """Stands for a kernel that takes pointers: torch sees nothing of what it reads."""
    with torch.DisableTorchFunctionSubclass():
        return x + stack.sum()


class Router(nn.Module):
    """A block: a linear layer and experts, of which each row of the input goes to two."""

    stack: type[Stack] = Stack

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(16, 16)
        self.gate = nn.Linear(16, EXPERTS)
        self.experts = self.stack()

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        weights, indices = self.gate(x).softmax(-1).topk(2)
        return indices, weights

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.before(x))
        indices, weights = self.route(x)
        return x + self.experts(x, indices, weights)


class Routers(nn.Module):
    """Three such blocks."""

    def __init__(self, block: type[Router] = Router) -> None:
        super().__init__()
        self.layers = nn.ModuleList(block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class CalledTwice(Router):
    """Other rows go to other experts: two calls in a forward."""

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.before(x))
        indices, weights = self.route(x)
        return x + self.experts(x[:1], indices[:1], weights[:1]) + self.experts(x[1:], indices[1:], weights[1:]).sum()


class Penalised(Router):
    """The forward of a block reads all its experts after their call."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 0.01 * self.experts.inner.square().sum()


class Few(Router):
    """All rows go to two experts, and the others get no gradient."""

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        weights, indices = self.gate(x)[:, 2:4].softmax(-1).topk(2)
        return indices + 2, weights


@of_transformers
class KeepsOne(Stack):
    """A view of one expert is kept from one call to the next, in which something may be routed to others."""

    def forward(self, x: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        kept, self.kept = getattr(self, "kept", None), None
        out = super().forward(x, indices, weights)
        if kept is None:
            self.kept = self.inner[int(indices[0, 0])]
            return out
        return out + 0.1 * torch.tanh(x @ kept).to(out.dtype)


class KeptViews(CalledTwice):
    stack = KeepsOne


@of_transformers
class WritesOne(Stack):
    """Experts that are written in their forward, in place."""

    def forward(self, x: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        out = super().forward(x, indices, weights)
        if not torch.is_grad_enabled():
            self.inner[int(indices[0, 0])].mul_(0.5)
            self.outer.data[1].mul_(0.5)
        return out


class Written(Router):
    stack = WritesOne


@of_transformers
class Everything(Stack):
    """Each expert computes for each row, and what is not routed to counts nothing."""

    def forward(self, x: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        shares = torch.zeros(len(x), EXPERTS, dtype=weights.dtype).scatter(1, indices, weights)
        hidden = torch.tanh(torch.einsum("ti,eij->etj", x, self.inner)) @ self.outer + self.bias[:, None]
        return torch.einsum("te,etj->tj", shares, hidden)


class Dense(Router):
    stack = Everything


def own(block: type[Router] = Router) -> Module:
    return Module(Routers(block))


def frozen() -> Module:
    module = own()
    for layer in module.net.layers:
        layer.experts.requires_grad_(False)
    return module


def hooked() -> Module:
    """A hook on a stack's gradient writes rows that nothing was routed to."""
    module = own(Few)
    for layer in module.net.layers:
        layer.experts.inner.register_hook(lambda gradient: gradient + 1.0)
    return module


def rows() -> list[Any]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(2, 16, generator=generator) for _ in range(3)]


CASES: dict[str, tuple[Any, Any]] = {
    "qwen3": (lambda: transformer("qwen3"), tokens),
    "gpt-oss": (lambda: transformer("gpt-oss"), tokens),
    "mixtral-eager": (lambda: transformer("mixtral", "eager"), tokens),
    "olmoe-batched": (lambda: transformer("olmoe", "batched_mm", output_router_logits=True), tokens),
    "own": (own, rows),
    "few": (lambda: own(Few), rows),
    "called-twice": (lambda: own(CalledTwice), rows),
    "penalised": (lambda: own(Penalised), rows),
    "kept-views": (lambda: own(KeptViews), rows),
    "written": (lambda: own(Written), rows),
    "dense": (lambda: own(Dense), rows),
    "frozen": (frozen, rows),
    "hooked": (hooked, rows),
}


# ---------------------------------------------------------------------- small checkpoints in MXFP4, in the layout of gpt-oss


def dense(dtype: torch.dtype = torch.bfloat16, *, tied: bool = False, **more: Any) -> Any:
    """A small gpt-oss with values."""
    torch.manual_seed(0)
    return transformer("gpt-oss", intermediate_size=64, tie_word_embeddings=tied, **more).net.to(dtype)


def files_of(model: Any) -> dict[str, Tensor]:
    """The tensors of a checkpoint like gpt-oss's: random experts in MXFP4, the other weights of the model."""
    from sp_lightning.capabilities.experts.packed_stacks import named_stacks

    tensors = {name: value.clone() for name, value in model.state_dict().items() if "experts.gate" not in name}
    if model.config.tie_word_embeddings:
        del tensors["lm_head.weight"]
    generator = torch.Generator().manual_seed(3)
    for name, owner, key in named_stacks(model):
        experts, inputs, out = getattr(owner, key).shape
        tensors.pop(name, None)
        shape = (experts, out, inputs // 32)
        tensors[f"{name}_blocks"] = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, generator=generator)
        tensors[f"{name}_scales"] = torch.randint(115, 124, shape, dtype=torch.uint8, generator=generator)
        tensors[f"{name}_bias"] = torch.randn(experts, out, generator=generator).bfloat16()
    return tensors


def write_files(folder: Path, tensors: dict[str, Tensor], shards: int = 1) -> Path:
    """Writes ``*.safetensors``, of which the index of several names all but one."""
    folder.mkdir(exist_ok=True)
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return folder
    names = sorted(tensors)  # so that blocks and scales of a stack are in different files
    files = {name: f"model-{number % shards:05}.safetensors" for number, name in enumerate(names)}
    for file in {*files.values()}:
        save_file({name: tensors[name] for name in names if files[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    save_file({"unused": torch.ones(1)}, folder / "other.safetensors")
    return folder
