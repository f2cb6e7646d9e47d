"""A model without memory, with a batch that it can take."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sp_lightning.device.torch_private import tree_leaves

WANTED = (
    "a factory (package.module:Factory), a transformers config (a folder with config.json, or such a file), or the name of "
    "a torchvision model (vit_h_14)"
)
"""The ways to name a model on the command line."""

# Most of transformers' vision models have patches of so many pixels on each side.
_PATCH = 16

FORWARD_WANTED = (
    "define one that calls the network as training_step does, or give what makes the network itself "
    "(package.module:make_network)"
)
"""What helps where a module has no forward."""

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""The positional and the keyword arguments of a forward."""


@dataclass(frozen=True)
class ModelWithBatch:
    """A model that is to be estimated.

    Attributes:
        name: the name by which it was asked for.
        module: the model; its parameters have no memory.
        batch: makes the arguments of a forward. None if it is not known what the model takes.
        items: what a batch consists of, in words: ``4096 tokens``.
        uses: how often a forward uses a weight, as a guess: once for each token, or each patch of an image.
        generation: takes the number of tokens to generate, and returns two functions: one runs the prompts, the other
            runs the last of those tokens with the keys and values of all tokens before it. None if the model has no
            cache of keys and values.
    """

    name: str
    module: nn.Module
    batch: Callable[[], Arguments] | None
    items: str
    uses: int
    generation: Callable[[int], tuple[Callable[[], None], Callable[[], None]]] | None = None

    def run(self, *, training: bool, autocast: torch.dtype | None) -> Tensor | None:
        """Runs one forward. Returns the loss in training: the model's own, or the mean of its first output.

        Raises:
            ValueError: it is not known what the model takes.
        """
        if self.batch is None:
            raise ValueError("it is not known what the model takes: say --input SIZE …, or set its example_input_array")
        args, kwargs = self.batch()
        with torch.autocast("cpu", autocast) if autocast is not None else nullcontext():
            output = self.module(*args, **kwargs)
            return _loss(output) if training else None


def has_forward(module: nn.Module) -> bool:
    """Whether a module, or one of its classes, has a forward of its own. Lightning's calls the one of torch, which raises."""
    forward = getattr(module.forward, "__func__", module.forward)
    where = getattr(forward, "__module__", None) or ""
    return where != nn.Module.__module__ and not where.startswith(("lightning.pytorch.", "pytorch_lightning."))


def describe_images(batch: int, size: int) -> str:
    """A batch of square images in words; ``size`` is in pixels."""
    return f"{batch} image{'' if batch == 1 else 's'} of {size} × {size}"


def count_patches(size: int) -> int:
    """How many patches a vision model cuts a square image into; ``size`` is in pixels."""
    return max(1, size // _PATCH) ** 2


def _loss(output: Any) -> Tensor:
    loss = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
    if isinstance(loss, Tensor):
        return loss
    # A subclass of dict is a leaf to torch, unless its library has registered it.
    leaves = tree_leaves(dict(output) if isinstance(output, dict) else output)
    outputs = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]
    if not outputs:
        raise ValueError("nothing that the model returns has a gradient")
    return outputs[0].float().mean()
