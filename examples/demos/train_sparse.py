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

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.nn.utils.parametrize import ParametrizationList, register_parametrization
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

from sp_lightning import SuperpipelineStrategy

if not __package__:  # started as a file: the recipes are found from the repository's root
    sys.path.insert(0, str(Path(__file__).parents[2]))

from examples.finetune_llm import FineTune, common

DENSITY, SUPERSET, EVERY, DECAY = 0.2, 0.5, 10, 1e-4  # the paper's D, D + M, N, and the strength of its regulariser
OMITTED = [
    "--model", "--epochs", "--validate-every", "--lora", "--gradient-checkpointing", "--workers", "--resume", "--dial",
    "--gpu-memory", "--host-memory", "--disk", "--report",
]  # fmt: skip


class Masked(torch.autograd.Function):
    """Gives forward the used weights, and backward the superset's gradient with that of the regulariser.

    The regulariser is no term of the loss: there it would read all weights outside of their layers' calls, and they would
    travel twice. So each backward of a layer adds it once, whatever the loss is divided by.
    """

    @staticmethod
    def forward(ctx: Any, weight: Tensor, level: Tensor) -> Tensor:
        ctx.save_for_backward(weight, level)
        return weight * (level == 2)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        weight, level = ctx.saved_tensors
        return (gradients[0] + weight * torch.where(level == 2, DECAY, DECAY / DENSITY)) * (level > 0), None


class TopKast(torch.nn.Module):
    """Makes the used weights of all. A weight's level is 2 if it is used, 1 in the rest of the superset, 0 outside."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        # The level is a parameter, as parameters travel with their layer. Buffers stay on the device, all of them.
        self.level = torch.nn.Parameter(torch.full_like(weight, 2, dtype=torch.uint8), requires_grad=False)

    def forward(self, weight: Tensor) -> Tensor:
        return Masked.apply(weight, self.level)


class SparseLM(FineTune):
    """A language model whose blocks have sparse linear modules. They are dense until the first training step."""

    def __init__(self, model: Any, lr: float, steps: int) -> None:
        super().__init__(model, lr, steps)
        for linear in [each for each in self.model.model.layers.modules() if isinstance(each, torch.nn.Linear)]:
            register_parametrization(linear, "weight", TopKast(linear.weight))

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        for each in [m for m in self.modules() if isinstance(m, ParametrizationList) and self.global_step % EVERY == 0]:
            size = each.original.detach().abs()
            # Weights of one size at the limit are all in, because which of them topk takes depends on the device.
            used, trained = (size.flatten().topk(int(n * size.numel())).values[-1] for n in (DENSITY, SUPERSET))
            each[0].level.copy_((size >= used).int() + (size >= trained))  # type: ignore[operator]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        # AdamW would decay weights outside the superset. Adam moves those that leave it for some steps, by old moments.
        return torch.optim.Adam([each for each in self.parameters() if each.requires_grad], lr=self.lr)


def main(argv: Sequence[str] | None = None) -> Any:
    parser = common.training_options(
        __doc__, "train_sparse", model="", data="as of finetune_llm.py", lr="2e-3", steps=100, without=OMITTED
    )
    parser.set_defaults(lr=2e-3, model=None, resume=None, validate_every=None)
    options = common.read_options(parser, argv)
    common.prepare(options)
    with common.errors_in_the_input(options):
        tokenizer = common.small_tokenizer()
        held_out, training = common.pack(common.read_rows(options.data), tokenizer, 64)
    lines = []
    for kind in (FineTune, SparseLM):
        pl.seed_everything(options.seed, verbose=False)
        module = kind(AutoModelForCausalLM.from_config(common.small_llama(tokenizer)), options.lr, options.steps)
        run = common.Run(options, len(training))
        # To autograd, the used weights are activations: kept, those of all layers would be on the device at once. With one k,
        # the bytes of both compare.
        ours: Any = SuperpipelineStrategy(
            k=2, k_prime=1, activations="recompute", optimizer_overlap=options.optimizer_overlap
        )
        strategy: Any = "auto" if options.strategy == "auto" else ours  # auto is plain Lightning
        trainer = pl.Trainer(strategy=strategy, devices=1, **common.settings(options), **run.schedule())
        batches: Any = DataLoader(training, options.batch_size, sampler=run.sampler())
        validation: Any = DataLoader(held_out, options.batch_size)
        trainer.fit(module, batches, validation)
        trainer.save_checkpoint(options.output / f"{kind.__name__}.ckpt")
        fetched = f", {ours.stats().fetched_bytes:,} bytes fetched" if strategy is ours else ""
        lines.append(f"{kind.__name__}: loss on held-out rows {trainer.callback_metrics['val_loss']:.3f}{fetched}")
    print(*lines, sep="\n")
    levels = torch.cat([each.level.flatten() for each in module.modules() if isinstance(each, TopKast)])
    print(f"Used are {(levels == 2).float().mean():.1%} of sparse weights, trained {(levels > 0).float().mean():.1%}.")
    print(
        "Dense weights travel and stay in host memory, and torch multiplies by the zeros: sparsity saves nothing here."
    )
    return module


if __name__ == "__main__":
    main()
