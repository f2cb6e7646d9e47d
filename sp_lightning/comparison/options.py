"""The options of a check. This file imports nothing, so that ``--help`` is fast."""

SMALL = ("llm", "vit", "vlm")
"""The small models of ``dial``: functions of ``small_models``."""

STRATEGY_OPTIONS = (
    "k", "k_prime", "gpu_memory", "activations", "layers", "keep_on_gpu", "pin_memory", "fused_optimizer",
    "optimizer_overlap", "optimizer_on", "gpu_layers", "load_weights_from", "disk", "host_memory",
)  # fmt: skip
"""The strategy's options that ``check`` takes. The others are for several devices, or ``check`` sets them itself."""
