"""Flux (11.9 billion parameters) for ``plan``: LoRA or all weights, with one image of 1024 × 1024 pixels.

superpipeline plan examples.shapes.flux:make_flux --lora 16 --gradient-checkpointing --gpu-memory 22GiB
"""

from __future__ import annotations

import torch
from diffusers import FluxTransformer2DModel


def make_flux() -> FluxTransformer2DModel:
    model = FluxTransformer2DModel(guidance_embeds=True).to(torch.bfloat16)  # as the weights are loaded
    image, prompt = (1024 // 16) ** 2, 512  # tokens: one for each 16 × 16 pixels
    model.example_input_array = {
        "hidden_states": torch.zeros(1, image, 64),
        "encoder_hidden_states": torch.zeros(1, prompt, 4096),
        "pooled_projections": torch.zeros(1, 768),
        "timestep": torch.zeros(1),
        "guidance": torch.zeros(1),
        "img_ids": torch.zeros(image, 3),
        "txt_ids": torch.zeros(prompt, 3),
    }
    return model
