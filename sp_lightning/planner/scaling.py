"""Scales configs of transformers to other sizes, and predicts the loss of a size by a scaling law."""

from __future__ import annotations

import math
from typing import Any

from torch import nn

LAW = "L = 1.82 + 482 / N^0.348 + 2085 / D^0.366 (Chinchilla's data, fitted anew by Besiroglu et al., arXiv 2404.10102)"
"""The law of :func:`expected_loss`, in words."""

FITTED_TO = 44_000_000
"""The number of parameters of the smallest model that the law was fitted to."""


def expected_loss(parameters: int, tokens: float) -> float:
    """Returns the expected loss of a language model in nats per token, after training on ``tokens`` without repetition.

    This is the parametric fit of Besiroglu et al. (arXiv 2404.10102) to the runs of Hoffmann et al. (arXiv 2203.15556):
    transformers of 44 M to 16 B parameters on web text. For other models and data, it can only rank sizes.
    """
    return 1.8172 + 482.01 / parameters**0.3478 + 2085.43 / tokens**0.3658


def scaled(config: Any, module: nn.Module, wanted: int) -> dict[str, Any]:
    """Returns the fields of a transformers config for another size of the same family.

    Heads keep their size. For each width (a number of whole heads), the depth is computed with which the model has the wanted
    size. Of these pairs, the function returns the one whose ratio of width to depth is nearest to that of the config. The number
    of key-value heads and the width of the feed-forward network are scaled with the width. The vocabulary does not change.

    Args:
        config: the config of the model.
        module: a model of this config, whose parameters are counted.
        wanted: the number of parameters, embeddings included.

    Raises:
        ValueError: the family has no such fields, or the vocabulary alone exceeds the wanted size.
    """
    names = ("hidden_size", "num_hidden_layers", "num_attention_heads")
    width, depth, heads = (getattr(config, name, None) for name in names)
    if not (isinstance(width, int) and isinstance(depth, int) and isinstance(heads, int) and width % heads == 0):
        raise ValueError(
            f"--scale: configs of {config.model_type} have no {', '.join(names)} that could be scaled. Make a config of each "
            "size, and give them all: plan A.json B.json"
        )
    group = heads // (getattr(config, "num_key_value_heads", None) or heads)
    size, per_head = _embedded(module), width // heads
    per_layer = (sum(p.numel() for p in module.parameters()) - size) / depth
    found: list[tuple[float, int, int]] = []
    # At most eight times the width. Multiples of the group, so that each key-value head keeps its number of query heads.
    for count in range(group, 8 * heads + 1, group):
        share = count / heads
        # The parameters of embeddings are proportional to the width, and those of a layer to its square.
        layers = round((wanted - size * share) / (per_layer * share**2))
        if layers >= 1:
            found.append((abs(math.log(layers * width / (count * per_head * depth))), count, layers))
    if not found:
        raise ValueError(
            f"--scale {wanted}: the vocabulary of {config.model_type} alone takes more, with one layer of the smallest width. "
            "Ask for a larger size, or give a config with a smaller vocab_size."
        )
    _, count, layers = min(found)
    new = {"hidden_size": count * per_head, "num_hidden_layers": layers, "num_attention_heads": count}
    if getattr(config, "num_key_value_heads", None):
        new["num_key_value_heads"] = count // group
    for name in ("intermediate_size", "ffn_dim"):
        if isinstance(inner := getattr(config, name, None), int):
            new[name] = max(1, round(inner * count / heads))
    return new


def refuse_another_size(module: nn.Module, wanted: int) -> None:
    """Raises a ValueError if the size of a scaled model differs by more than a quarter from the wanted size.

    This happens if, for example, experts have a width of their own.
    """
    count = sum(weight.numel() for weight in module.parameters())
    if not 0.75 * wanted <= count <= 1.25 * wanted:
        raise ValueError(
            f"--scale {wanted:,}: with width and depth in proportion this family has {count:,} parameters, because parts "
            "of it do not grow with its width, or it has too few layers. Ask for a larger size, or make a config by hand."
        )


def _embedded(module: nn.Module) -> int:
    """Returns the number of parameters of embeddings and head, which is proportional to the width. Tied weights count once."""
    found = {id(w): w.numel() for m in module.modules() if isinstance(m, nn.Embedding) for w in m.parameters()}
    head = getattr(module, "get_output_embeddings", lambda: None)()
    found |= {} if head is None else {id(w): w.numel() for w in head.parameters() if w.ndim == 2}
    return sum(found.values())
