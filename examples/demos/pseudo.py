"""Pseudo-to-Real (M6-10T, arXiv 2110.03888): one block in place of all, which then become blocks of their own."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def share_block(model: nn.Module) -> nn.Module:
    """The first block of the longest list of blocks takes the place of all.

    The model is to be called with ``use_cache=False``, as in training: a cache has one place for each block.

    Raises:
        ValueError: the blocks are of several kinds.
    """
    blocks = max((each for each in model.modules() if isinstance(each, nn.ModuleList)), key=len)
    kinds = {str(each) for each in blocks}, set(getattr(model.config, "layer_types", None) or [])
    if max(map(len, kinds)) > 1:
        raise ValueError(
            "--pseudo: the blocks are of several kinds, and one cannot take the place of all. Leave it out."
        )
    for place in range(len(blocks)):
        blocks[place] = blocks[0]
    return model


def delink(shared: nn.Module, real: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Tensor]]:
    """Gives ``real`` the weights of ``shared``, whose block each of its blocks copies, and returns Adam's moments, likewise.

    A module with several places is in a state dict under each of its names. So the names say what goes where.

    What justifies copies of the moments? Adam's step is m / √v, so it would be the same if m were divided by n and v by n²:
    each block's next step is, but for its own new gradient, the one that the shared block would have made. What comes
    then is a guess. The shared gradient was the sum of n, and a block's own is n times smaller if all n agree, and √n times
    if they have nothing in common. m forgets the sums in 10 steps, v in 50 (with β = 0.9 and 0.98), and meanwhile steps are
    shorter by about that factor. That is one more warm-up, which errs on the safe side, and costs a short run more than
    beginning without moments would (measured: examples/results/README.md, Recipes and demos).

    Args:
        shared: made by :func:`share_block`.
        real: the same model with blocks of its own.
        optimizer: of ``shared``.

    Returns:
        By name of a parameter of ``real``, what its optimizer's state is to be.
    """
    real.load_state_dict(shared.state_dict())
    places = dict(shared.named_parameters(remove_duplicate=False))
    return {
        name: {key: value.clone() for key, value in optimizer.state[places[name]].items()}
        for name, _ in real.named_parameters()
    }
