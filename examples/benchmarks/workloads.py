"""What is trained or predicted: real shapes, random weights and data, the same for every contestant."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric import Fabric
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torchvision.models.vision_transformer import EncoderBlock, VisionTransformer
from transformers import CLIPVisionConfig, LlamaConfig, LlamaForCausalLM, LlavaConfig, LlavaForConditionalGeneration
from transformers.initialization import no_init_weights
from transformers.models.clip.modeling_clip import CLIPEncoderLayer
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

BLOCKS: tuple[type[nn.Module], ...] = (LlamaDecoderLayer, CLIPEncoderLayer, EncoderBlock)

# hidden, intermediate, layers, heads, key-value heads, vocabulary, tied
_LLAMA = {
    "tiny": (64, 128, 4, 4, 2, 256, True),
    "0.1B": (768, 2048, 12, 12, 12, 32000, True),
    "1.5B": (2048, 8192, 24, 32, 8, 32000, False),
    "3B": (3072, 8192, 28, 24, 8, 128256, True),  # Llama-3.2-3B
    "7B": (4096, 11008, 32, 32, 32, 32000, False),  # Llama-2-7B
    "8B": (4096, 14336, 32, 32, 8, 128256, False),  # Llama-3.1-8B
    "14B": (5120, 13824, 48, 40, 8, 152064, False),  # with the sizes of Qwen2.5-14B
}
# image, patch, layers, heads, hidden, mlp
_VIT = {
    "tiny": (32, 8, 4, 4, 64, 128),
    "huge": (224, 14, 32, 16, 1280, 5120),  # torchvision's vit_h_14
    "giant": (224, 14, 40, 16, 1408, 6144),  # ViT-g/14 of "Scaling Vision Transformers"
}
# image, patch, layers, heads, hidden, intermediate of LLaVA's eye; the language model is Llama of the same size
_EYE = {"tiny": (32, 8, 2, 4, 64, 128), "1.5B": (336, 14, 24, 16, 1024, 4096), "7B": (336, 14, 24, 16, 1024, 4096)}

SIZES = {"llm": tuple(_LLAMA), "vision": tuple(_VIT), "vlm": tuple(_EYE)}
PRECISIONS = ("32-true", "bf16-mixed", "bf16-true")
CLASSES = 1000  # of the vision model
LOSS_CHUNK = 2048  # tokens whose logits exist at once
WARM_UP = 2  # steps that come before the measured ones
BATCHES = 4  # different batches; they come again
TILE = 4_194_301  # random numbers that all weights are cut from; a prime, so that rows of a matrix differ


@dataclass(frozen=True)
class Workload:
    """One thing to measure.

    Attributes:
        task: "train" or "predict".
        family: "llm", "vision" or "vlm".
        size: a key of ``SIZES[family]``.
        precision: Lightning's name, one of ``PRECISIONS``.
        items: tokens per step, or images per step of a vision model.
        length: tokens per sequence; a vision model has none and leaves it alone.
        checkpointing: activations of each block are computed again in backward.
        steps: at most, warm-up included.
    """

    task: str
    family: str = "llm"
    size: str = "tiny"
    precision: str = "bf16-mixed"
    items: int = 128
    length: int = 64
    checkpointing: bool = False
    steps: int = 8

    def __post_init__(self) -> None:
        if self.family not in SIZES or self.size not in SIZES[self.family]:
            raise ValueError(f"There is no {self.family} of size {self.size!r}; sizes by family are {SIZES}.")
        if self.precision not in PRECISIONS:
            raise ValueError(f"precision {self.precision!r} is not among {PRECISIONS}.")
        if self.steps <= WARM_UP:
            raise ValueError(f"{self.steps} steps leave none to measure: {WARM_UP} warm up. For example --steps 5.")
        if self.items < 1:
            raise ValueError(
                f"{self.items} {self.unit} per step are nothing to measure. For example --tokens {self.length}."
            )
        if self.family != "vision" and self.items % self.length:
            raise ValueError(
                f"{self.items} tokens per step are no whole sequences of {self.length}. "
                f"For example --tokens {max(1, self.items // self.length) * self.length}."
            )

    @property
    def unit(self) -> str:
        """What ``items`` counts."""
        return "images" if self.family == "vision" else "tokens"

    @property
    def name(self) -> str:
        kept = ", checkpointing" if self.checkpointing else ""
        return f"{self.task} {self.family} {self.size}, {self.precision}, {self.items} {self.unit}{kept}"

    @property
    def weight_bytes(self) -> int:
        """Bytes of one weight as the optimizer sees it."""
        return 2 if self.precision == "bf16-true" else 4


class Task(pl.LightningModule):
    """An ordinary LightningModule around a network whose call gives the loss."""

    def __init__(self, net: nn.Module, optimizer: Callable[..., Any] | None = None) -> None:
        super().__init__()
        self.net = net
        self.optimizer = optimizer or adamw

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.net(**batch)

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.net(**batch)

    def configure_optimizers(self) -> Any:
        return self.optimizer(self.parameters())


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """The optimizer of all contestants that let one choose."""
    return torch.optim.AdamW(parameters, lr=1e-4, fused=True)


class LanguageLoss(nn.Module):
    """Next-token loss of a causal model, in chunks: the logits of a long batch would dwarf all else."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, **inputs: Tensor) -> Tensor:
        hidden = self.model.model(input_ids=input_ids, use_cache=False, **inputs).last_hidden_state
        states = hidden[:, :-1].flatten(0, 1).split(LOSS_CHUNK)
        labels = input_ids[:, 1:].flatten().split(LOSS_CHUNK)
        total = torch.stack([self._chunk(*pair) for pair in zip(states, labels, strict=True)]).sum()
        return total / sum(len(each) for each in labels)

    def _chunk(self, states: Tensor, labels: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            return checkpoint(self._summed, states, labels, use_reentrant=False)
        return self._summed(states, labels)

    def _summed(self, states: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.model.lm_head(states).float(), labels, reduction="sum")


class VisionLoss(nn.Module):
    """Cross entropy of an image classifier."""

    def __init__(self, model: VisionTransformer) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.model(images).float(), labels)


class Checkpointed(nn.Sequential):
    """A Sequential that computes each member's activations again in backward; torchvision has no switch for it."""

    def forward(self, x: Tensor) -> Tensor:
        for member in self:
            x = checkpoint(member, x, use_reentrant=False)
        return x


def build_net(workload: Workload, seed: int = 0) -> nn.Module:
    """The network on the host, in the precision's dtype, with the same random weights every time."""
    fabric = Fabric(accelerator="cpu", devices=1, precision=workload.precision)  # type: ignore[arg-type]
    with fabric.init_module(), no_init_weights():
        net = _skeleton(workload)
    _fill(net, seed)
    return net.train(workload.task == "train")


@cache
def parameter_count(family: str, size: str) -> int:
    """Parameters, tied ones once; nothing is allocated."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in _skeleton(Workload("train", family, size)).parameters())


def _skeleton(workload: Workload) -> nn.Module:
    if workload.family == "vision":
        return _vision(workload)
    model: Any = LlamaForCausalLM(_llama(workload)) if workload.family == "llm" else _llava(workload)
    if workload.checkpointing:
        # transformers 5.23 gave gradient_checkpointing_enable this name
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": False})
    model.tie_weights()  # no_init_weights leaves that out, too
    return LanguageLoss(model)


def _llama(workload: Workload) -> LlamaConfig:
    hidden, intermediate, layers, heads, kv_heads, vocabulary, tied = _LLAMA[workload.size]
    return LlamaConfig(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        vocab_size=vocabulary,
        tie_word_embeddings=tied,
        max_position_embeddings=workload.length,
    )


def _llava(workload: Workload) -> LlavaForConditionalGeneration:
    image, patch, layers, heads, hidden, intermediate = _EYE[workload.size]
    eye = CLIPVisionConfig(
        image_size=image,
        patch_size=patch,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        hidden_size=hidden,
        intermediate_size=intermediate,
    )
    text = _llama(workload)
    return LlavaForConditionalGeneration(
        LlavaConfig(
            vision_config=eye,
            text_config=text,
            image_token_index=text.vocab_size - 1,
            image_seq_length=_patches(workload),
            vision_feature_layer=-1,
            tie_word_embeddings=text.tie_word_embeddings,
        )
    )


def _vision(workload: Workload) -> VisionLoss:
    image, patch, layers, heads, hidden, mlp = _VIT[workload.size]
    model = VisionTransformer(image, patch, layers, heads, hidden, mlp, num_classes=CLASSES)
    if workload.checkpointing:
        model.encoder.layers = Checkpointed(OrderedDict(model.encoder.layers.named_children()))
    return VisionLoss(model)


def _patches(workload: Workload) -> int:
    image, patch, *_ = _EYE[workload.size]
    return (image // patch) ** 2


@torch.no_grad()
def _fill(net: nn.Module, seed: int) -> None:
    """Normal numbers of deviation 0.02 in matrices, ones in norms, zeros in biases.

    All matrices are cut from one tile: filling billions of weights one random number at a time would take minutes.
    """
    tile = torch.empty(TILE).normal_(std=0.02, generator=torch.Generator().manual_seed(seed))
    start = 0
    for name, parameter in net.named_parameters():
        if parameter.dim() < 2:
            parameter.fill_(1.0 if name.endswith("weight") else 0.0)
            continue
        rest = parameter.view(-1)
        while len(rest):
            piece = tile[start : start + len(rest)]
            rest[: len(piece)] = piece
            rest, start = rest[len(piece) :], (start + len(piece)) % TILE


class Batches:
    """The same few batches over and over, from host memory, until ``is_over``."""

    def __init__(self, batches: list[dict[str, Tensor]], steps: int, is_over: Callable[[], bool]) -> None:
        self.batches = batches
        self.steps = steps
        self.is_over = is_over

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        for step in range(self.steps):
            if self.is_over():
                return
            yield self.batches[step % len(self.batches)]


def build_batches(workload: Workload, is_over: Callable[[], bool], seed: int = 1) -> Batches:
    """Random ids or images on the host, the same every time."""
    random = torch.Generator().manual_seed(seed)
    count = min(BATCHES, workload.steps)
    return Batches([_batch(workload, random) for _ in range(count)], workload.steps, is_over)


def _batch(workload: Workload, random: torch.Generator) -> dict[str, Tensor]:
    if workload.family == "vision":
        side = _VIT[workload.size][0]
        images = torch.randn(workload.items, 3, side, side, generator=random)
        return {"images": images, "labels": torch.randint(CLASSES, (workload.items,), generator=random)}
    rows, words = workload.items // workload.length, _LLAMA[workload.size][5]
    if workload.family == "llm":
        return {"input_ids": torch.randint(words, (rows, workload.length), generator=random)}
    ids = torch.randint(words - 1, (rows, workload.length), generator=random)
    ids[:, : _patches(workload)] = words - 1  # one image, then text
    side = _EYE[workload.size][0]
    return {"input_ids": ids, "pixel_values": torch.randn(rows, 3, side, side, generator=random)}
