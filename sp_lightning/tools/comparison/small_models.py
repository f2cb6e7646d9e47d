"""Small models with random weights and data: they train and predict on a CPU in seconds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

_TEXT = {"vocab_size": 512, "hidden_size": 128, "intermediate_size": 352, "num_attention_heads": 4}
_IMAGE = {"image_size": 32, "patch_size": 8, "num_attention_heads": 4}
_PATCHES = 16  # of an image
_ROWS, _TOKENS, _BATCHES = 4, 32, 64


@contextmanager
def one_thread() -> Iterator[None]:
    """Computes in one thread. Such small operators gain nothing from more, and other programs would disturb them."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


class Small(pl.LightningModule):
    """An ordinary module around a model, with its own batches.

    Args:
        model: the model. Like those of transformers, it returns an object with ``loss`` and ``logits``.
        tokens: how many tokens a row has; 0 for images with a class.
        images: True if rows have an image.
    """

    def __init__(self, model: nn.Module, *, tokens: int = 0, images: bool = False) -> None:
        super().__init__()
        self.model = model
        self._tokens, self._images = tokens, images

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = self.model(**batch).loss
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.training_step(batch, batch_idx)

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        logits: Tensor = self.model(**batch).logits
        return logits

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)

    def train_dataloader(self) -> Any:
        random = torch.Generator().manual_seed(0)
        return DataLoader([self._batch(random) for _ in range(_BATCHES)], batch_size=None)  # type: ignore[arg-type]

    val_dataloader = train_dataloader

    def _batch(self, random: torch.Generator) -> dict[str, Tensor]:
        batch: dict[str, Tensor] = {"labels": torch.randint(10, (_ROWS,), generator=random, device="cpu")}
        if self._images:
            batch["pixel_values"] = torch.randn(
                _ROWS, 3, _IMAGE["image_size"], _IMAGE["image_size"], generator=random, device="cpu"
            )
        if self._tokens:
            image_token = _TEXT["vocab_size"] - 1
            ids = torch.randint(image_token, (_ROWS, self._tokens), generator=random, device="cpu")
            if self._images:
                ids[:, :_PATCHES] = image_token
            batch |= {"input_ids": ids, "labels": ids.where(ids != image_token, -100)}
        return batch


class _Network(nn.Module):
    """Blocks between a stem and a head, made of torch alone.

    Args:
        stem: reads the first tensor of a batch.
        blocks: the blocks.
        head: returns the logits.
        given: the name of the first tensor.
    """

    def __init__(self, stem: nn.Module, blocks: list[nn.Module], head: nn.Module, given: str) -> None:
        super().__init__()
        self.stem, self.blocks, self.head, self._given = stem, nn.ModuleList(blocks), head, given

    def forward(self, labels: Tensor, **batch: Tensor) -> SimpleNamespace:
        x = self.stem(batch[self._given])
        for block in self.blocks:
            x = block(x)
        logits = self.head(x)
        return SimpleNamespace(loss=F.cross_entropy(logits.flatten(0, -2), labels.flatten()), logits=logits)


def attention() -> Small:
    """Six blocks of attention with dropout, made of torch alone."""
    width, words = 64, _TEXT["vocab_size"]
    blocks: list[nn.Module] = [
        nn.TransformerEncoderLayer(width, 4, 2 * width, batch_first=True, norm_first=True) for _ in range(6)
    ]
    return Small(_Network(nn.Embedding(words, width), blocks, nn.Linear(width, words), "input_ids"), tokens=_TOKENS)


def convolution() -> Small:
    """Six blocks of a convolution and batch normalization, made of torch alone."""
    width = 32
    blocks: list[nn.Module] = [
        nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()) for _ in range(6)
    ]
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10))
    return Small(_Network(nn.Conv2d(3, width, 4, stride=4), blocks, head, "pixel_values"), images=True)


def lora() -> Small:
    """Llama with adapters of PEFT."""
    from peft import LoraConfig, get_peft_model

    small = llm()
    small.model = get_peft_model(small.model, LoraConfig(r=4, target_modules="all-linear"))
    return small


class _Denoiser(nn.Module):
    """A model of diffusers, which returns the mean squared error of its output."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, labels: Tensor, pixel_values: Tensor) -> SimpleNamespace:
        sample = self.net(pixel_values, labels).sample
        return SimpleNamespace(loss=F.mse_loss(sample, pixel_values), logits=sample)


def diffusion() -> Small:
    """A U-Net of diffusers."""
    from diffusers import UNet2DModel

    kinds = {"down_block_types": ("DownBlock2D", "AttnDownBlock2D"), "up_block_types": ("AttnUpBlock2D", "UpBlock2D")}
    net = UNet2DModel(sample_size=32, block_out_channels=(32, 64), layers_per_block=1, norm_num_groups=8, **kinds)
    return Small(_Denoiser(net), images=True)


def llm() -> Small:
    """Llama with 8 blocks."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return Small(LlamaForCausalLM(LlamaConfig(**_TEXT, num_hidden_layers=8)), tokens=_TOKENS)


def vit() -> Small:
    """ViT with 8 blocks and dropout."""
    from transformers import ViTConfig, ViTForImageClassification

    size = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 8, "num_labels": 10}
    return Small(ViTForImageClassification(ViTConfig(**_IMAGE, **size, hidden_dropout_prob=0.1)), images=True)


def vlm() -> Small:
    """LLaVA with 4 blocks that read images, and 6 that read text."""
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

    eye = CLIPVisionConfig(**_IMAGE, hidden_size=64, intermediate_size=256, num_hidden_layers=4)
    text = LlamaConfig(**_TEXT, num_hidden_layers=6)
    token = {"image_token_index": _TEXT["vocab_size"] - 1, "image_seq_length": _PATCHES, "vision_feature_layer": -1}
    config = LlavaConfig(vision_config=eye, text_config=text, **token, vision_feature_select_strategy="default")
    return Small(LlavaForConditionalGeneration(config), tokens=_TOKENS, images=True)
