"""Train a language model that uses a fifth of its weights at a time: always-sparse training, Top-KAST (arXiv 2106.03517).

    python examples/demos/train_sparse.py         # no download, a minute on a CPU

The method is a parametrization of torch's own. In each linear module of the blocks, forward uses the largest weights alone, a
share of ``DENSITY``. Gradients reach a larger share, ``SUPERSET``, so that unused weights can grow until they are used. The
others get none. Every ``EVERY`` steps a hook of the LightningModule chooses anew. The paper's exploration regulariser pulls
the used weights to zero, and the rest of the superset harder: a weight comes into use only where the loss pushes it there.

A dense training of the same model comes first, and both say what they have fetched. What sparsity gives here is a sparse model.
It saves no transfers and no host memory, because torch's weights, gradients and moments are dense, and a byte of mask travels
with each weight. It saves no multiplications, because torch multiplies by zeros, too.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from torch.nn.utils.parametrize import ParametrizationList, register_parametrization

if not __package__:  # started as a file: what lies beside it is found from the repository's root
    sys.path.insert(0, str(Path(__file__).parents[2]))

from examples.demos.console import ConsoleLogger, last_loss, say
from examples.demos.language import CausalLM, small_llama
from examples.demos.recipe import add_run_options, check_least, keep_last, make_trainer, prepare_output, run
from examples.demos.text import cut, load_tokenizer, read_text, shuffled

DENSITY, SUPERSET, EVERY, DECAY = 0.2, 0.5, 10, 1e-4  # the paper's D, D + M, N, and the strength of its regulariser


class Masked(torch.autograd.Function):
    """Gives forward the used weights, and backward the superset's gradient with that of the regulariser.

    The regulariser is no term of the loss: there it would read all weights outside of their layers' calls, and they would
    travel twice. So each backward of a layer adds it once, whatever the loss is divided by.
    """

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, level: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(weight, level)
        return weight * (level == 2)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        weight, level = ctx.saved_tensors
        return (gradients[0] + weight * torch.where(level == 2, DECAY, DECAY / DENSITY)) * (level > 0), None


class TopKast(torch.nn.Module):
    """Makes the used weights of all. A weight's level is 2 if it is used, 1 in the rest of the superset, 0 outside."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        # The level is a parameter, as parameters travel with their layer. Buffers stay on the device, all of them.
        self.level = torch.nn.Parameter(torch.full_like(weight, 2, dtype=torch.uint8), requires_grad=False)

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return Masked.apply(weight, self.level)


class SparseLM(CausalLM):
    """A language model whose blocks have sparse linear modules. They are dense until the first training step."""

    def __init__(self, model: torch.nn.Module, lr: float) -> None:
        super().__init__(model, lr)
        for linear in [each for each in self.model.model.layers.modules() if isinstance(each, torch.nn.Linear)]:
            register_parametrization(linear, "weight", TopKast(linear.weight))

    def on_train_batch_start(self, batch: torch.Tensor, batch_idx: int) -> None:
        for each in [m for m in self.modules() if isinstance(m, ParametrizationList) and self.global_step % EVERY == 0]:
            size = each.original.detach().abs()
            # Weights of one size at the limit are all in, because which of them topk takes depends on the device.
            used, trained = (size.flatten().topk(int(n * size.numel())).values[-1] for n in (DENSITY, SUPERSET))
            each[0].level.copy_((size >= used).int() + (size >= trained))  # type: ignore[operator]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        # AdamW would decay weights outside the superset. Adam moves those that leave it for some steps, by old moments.
        return torch.optim.Adam([each for each in self.parameters() if each.requires_grad], lr=self.lr)


def main(argv: list[str] | None = None) -> None:
    """Run the recipe; ``argv`` as on the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--steps", type=int, default=100, help="of each of the two trainings (%(default)s)")
    add_run_options(parser, "train_sparse")
    # To autograd, the used weights are activations: kept, those of all layers would be on the device at once.
    parser.set_defaults(activations="recompute")
    options = parser.parse_args(argv)
    kinds = (CausalLM, SparseLM)
    try:
        check_least(options, steps=1)
        folders = prepare_output(options.output, *(kind.__name__ for kind in kinds))
    except (ValueError, OSError) as error:
        parser.error(str(error))
    windows = cut(load_tokenizer(), read_text(None), length=64, batch_size=8)
    for kind, folder in zip(kinds, folders, strict=True):
        torch.manual_seed(options.seed)
        module, log = kind(small_llama(), lr=2e-3), ConsoleLogger(options.steps)
        trainer, strategy = make_trainer(options, logger=log, callbacks=[keep_last(folder)])
        trainer.fit(module, shuffled(windows, batch_size=8, steps=options.steps, seed=1))
        say(f"{kind.__name__}: loss {last_loss(log.losses):.3f}, {strategy.stats().fetched_bytes:,} bytes fetched\n")
    levels = torch.cat([each.level.flatten() for each in module.modules() if isinstance(each, TopKast)])
    say(f"Used are {(levels == 2).float().mean():.1%} of sparse weights, trained {(levels > 0).float().mean():.1%}.")
    say("Dense weights travel and stay in host memory, and torch multiplies by the zeros: sparsity saves nothing here.")


if __name__ == "__main__":
    run(main)
