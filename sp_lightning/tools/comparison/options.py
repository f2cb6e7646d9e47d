"""The options of a check. This file imports nothing, so that ``--help`` is fast."""

SMALL = {
    "attention": "torch", "convolution": "torch", "llm": "transformers", "vit": "transformers", "vlm": "transformers",
    "lora": "peft", "diffusion": "diffusers",
}  # fmt: skip
"""The small models: functions of ``small_models``, and the package that each needs."""

MODES: dict[str, dict[str, str]] = {
    "defaults": {}, "offload": {"activations": "offload"}, "recompute": {"activations": "recompute"},
    "forward": {"optimizer_overlap": "forward"}, "backward": {"optimizer_overlap": "backward"},
}  # fmt: skip
"""The modes of ``check`` without a model, by name."""

STRATEGY_OPTIONS = (
    "k", "k_prime", "gpu_memory", "activations", "layers", "keep_on_gpu", "pin_memory",
    "optimizer_overlap", "optimizer_on", "gpu_layers", "load_weights_from", "disk", "host_memory",
)  # fmt: skip
"""The strategy's options that ``check`` takes. The others are for several devices, or ``check`` sets them itself."""
