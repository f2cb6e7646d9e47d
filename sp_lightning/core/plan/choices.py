"""The types of options. This file does not import torch, so that ``superpipeline --help`` is fast."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

Count = int | Literal["auto"]
Share = int | float
Mode = Literal["keep", "recompute", "offload"]
Modes = Mapping[str, Mode]
ActivationChoice = Mode | Literal["auto"] | Modes
Overlap = Literal["auto", "off", "forward", "backward"]
Place = Literal["cpu", "gpu"]
Packing = Literal["nvfp4", "mxfp4"]
"""The format of stacked experts in 4 bits."""

_OFFLOADED = "Weights, gradients and optimizer state are always offloaded. Leave it out."
_K = "Use k, the number of layers in GPU memory at once: k=2."
_K_PRIME = "Layers are always prefetched. Use k_prime, the number of layers that are uploaded meanwhile: k_prime=1."
_DISK = 'Use disk, a folder for what CPU memory does not hold: disk="/scratch".'
_GPU_MEMORY = 'Use gpu_memory, the limit of GPU memory: gpu_memory="16GiB".'
_STAY = (
    "Use gpu_layers, the layers that stay in GPU memory with their optimizer state: gpu_layers=8, or gpu_layers=0.5."
)
_CHECKPOINTING = 'Use activations="recompute", which is activation checkpointing.'
_HOST_STEPS = 'Optimizers step on the CPU by default. Leave it out, or use optimizer_on="gpu" for steps on the GPU.'
_FUSED = (
    "Write it in the optimizer: torch.optim.AdamW(…, fused=True), or fused=False. One that leaves it open runs fused if the "
    'model is on a GPU, or with optimizer_overlap="forward" or "backward".'
)
_QUANTISED = "Quantise the frozen model itself (torchao, bitsandbytes); the strategy moves it as it is. Leave it out."
_TRAINER = "It is an option of the Trainer: {}."
HABITS = {
    "cpu_offload": _OFFLOADED, "offload": _OFFLOADED, "offload_params": _OFFLOADED, "offload_parameters": _OFFLOADED,
    "offload_type": _OFFLOADED, "offload_optimizer": _HOST_STEPS, "offload_optimizer_device": _HOST_STEPS,
    "blocks_to_swap": _K, "num_blocks": _K, "num_blocks_per_group": _K, "num_layers_on_gpu": _STAY, "layers_on_gpu": _STAY,
    "n_gpu_layers": _STAY, "num_gpu_layers": _STAY,
    "k'": _K_PRIME, "prefetch": _K_PRIME, "num_prefetch": _K_PRIME, "use_stream": _K_PRIME, "layers_per_copy": _K_PRIME,
    "nvme_path": _DISK, "offload_folder": _DISK, "offload_dir": _DISK, "offload_to_disk_path": _DISK,
    "memory_budget": _GPU_MEMORY, "max_memory": _GPU_MEMORY, "max_gpu_memory": _GPU_MEMORY, "vram": _GPU_MEMORY,
    "activation_checkpointing": _CHECKPOINTING, "gradient_checkpointing": _CHECKPOINTING, "checkpointing": _CHECKPOINTING,
    "activation_checkpointing_policy": _CHECKPOINTING, "activation_offload": 'Use activations="offload".',
    "fp8": _QUANTISED, "fp8_base": _QUANTISED, "load_in_8bit": _QUANTISED, "load_in_4bit": _QUANTISED, "quantization": _QUANTISED,
    "lowvram": _GPU_MEMORY, "layer_offload_fraction": _STAY,
    "offload_fraction": _STAY, "optimizer_offload_fraction": _STAY, "stage": _OFFLOADED, "zero_stage": _OFFLOADED,
    "fused_optimizer": _FUSED,
    "optimizer_in_backward": 'Use optimizer_overlap="backward".', "resident": 'Use keep_on_gpu=["lm_head"].',
    "exclude_frozen_parameters": "Use save_frozen=False.", "weights": 'Use load_weights_from="model.safetensors".',
    "precision": _TRAINER.format('Trainer(precision="bf16-mixed")'), "devices": _TRAINER.format("Trainer(devices=1)"),
    "num_nodes": _TRAINER.format("Trainer(num_nodes=2)"), "max_epochs": _TRAINER.format("Trainer(max_epochs=1)"),
    "gradient_clip_val": _TRAINER.format("Trainer(gradient_clip_val=1.0)"),
    "accumulate_grad_batches": _TRAINER.format("Trainer(accumulate_grad_batches=4)"),
}  # fmt: skip
"""The hint for each option that other libraries or the Trainer have, by name."""
