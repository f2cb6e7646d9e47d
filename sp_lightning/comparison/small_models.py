"""Three small models with random weights and data, for ``dial``: they train and predict on a CPU in seconds."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

_TEXT = {"vocab_size": 512, "hidden_size": 128, "intermediate_size": 352, "num_attention_heads": 4}
_IMAGE = {"image_size": 32, "patch_size": 8, "num_attention_heads": 4}
_PATCHES = 16  # of an image
_ROWS, _TOKENS, _BATCHES = 4, 32, 64


class Small(pl.LightningModule):
    """An ordinary module around a model of transformers, with its own batches.

    Args:
        model: the model.
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

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        logits: Tensor = self.model(**batch).logits
        return logits

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)

    def train_dataloader(self) -> Any:
        random = torch.Generator().manual_seed(0)
        return DataLoader([self._batch(random) for _ in range(_BATCHES)], batch_size=None)  # type: ignore[arg-type]

    def _batch(self, random: torch.Generator) -> dict[str, Tensor]:
        batch: dict[str, Tensor] = {"labels": torch.randint(10, (_ROWS,), generator=random)}
        if self._images:
            batch["pixel_values"] = torch.randn(_ROWS, 3, _IMAGE["image_size"], _IMAGE["image_size"], generator=random)
        if self._tokens:
            image_token = _TEXT["vocab_size"] - 1
            ids = torch.randint(image_token, (_ROWS, self._tokens), generator=random)
            if self._images:
                ids[:, :_PATCHES] = image_token
            batch |= {"input_ids": ids, "labels": ids.where(ids != image_token, -100)}
        return batch


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
