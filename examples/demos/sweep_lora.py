"""Try several learning rates of LoRA (PEFT) at once: the trainings share the transfers of the frozen model.

    python examples/demos/sweep_lora.py                                         # no download, a minute on a CPU
    python examples/demos/sweep_lora.py --compare                               # and the same one after the other
    python examples/demos/sweep_lora.py --model runs/finetune_llm/model --rates 1e-4 1e-3
    python examples/demos/sweep_lora.py --model meta-llama/Llama-3.1-70B --data my.txt --precision bf16-true \\
        --batch-size 1 --length 512                                             # not run

Without ``--model`` a small Llama first learns Python's help texts. Each learning rate is a *trial*: an ordinary function that
takes a copy of the model with its adapters, and fits it with a trainer of its own. ``SharedBase.map`` runs all of them in threads
of this process. A layer of the frozen model comes to the device once, and all trials use it before the next one comes.

The losses are bitwise those of trainings one after the other, which ``--compare`` checks.
"""

from __future__ import annotations

import logging
import math
import sys
import time
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from sp_lightning import SharedBase, SuperpipelineStrategy
from sp_lightning.core.plan.units import human_bytes

if not __package__:  # started as a file: the recipes are found from the repository's root
    sys.path.insert(0, str(Path(__file__).parents[2]))

from examples.finetune_llm import FineTune, common, load_model, read_config

RATES = [1e-3, 3e-3, 1e-2, 3e-2]
MODEL_RATES = [5e-5, 1e-4, 2e-4, 4e-4]  # with --model, which has learned more
BASE_STEPS = 60  # in which the default model learns


def parse(argv: Sequence[str] | None = None) -> Any:
    parser = common.training_options(
        __doc__,
        "sweep_lora",
        model="hub name or folder of a causal language model (default: a small Llama, trained here first)",
        data=".jsonl, .parquet or .txt file, folder of them, or dataset on the hub (default: docstrings of Python)",
        lr="",
        batch_size=4,
        steps=40,
        rows="windows",
        without=[
            "--epochs",
            "--validate-every",
            "--resume",
            "--workers",
            "--lr",
            "--gradient-checkpointing",
            "--dial",
            "--strategy",
        ],
    )
    parser.set_defaults(gradient_checkpointing=False, lora=8, lr=None, resume=None)
    add = parser.add_argument
    given, with_model = (" ".join(f"{rate:g}" for rate in rates) for rates in (RATES, MODEL_RATES))
    add("--rates", type=float, nargs="+", help=f"learning rates (default: {given}; with --model {with_model})")
    add("--max-trials", type=int, help="how many train at once at most; each takes memory (default: all)")
    add("--compare", action="store_true", help="train the same one after the other, too, and compare")
    add("--length", type=int, default=64, help="tokens per window (%(default)s)")
    options = common.read_options(parser, argv)
    options.rates = options.rates or (MODEL_RATES if options.model else RATES)
    if min(options.rates) <= 0:
        options.error(f"--rates {min(options.rates):g}: expected numbers above 0. For example: --rates 1e-4 3e-4")
    return options


class Trial(NamedTuple):
    """What one learning rate came to.

    Attributes:
        rate: the learning rate.
        losses: of each step, and at the end that on rows that were held out.
        fetched_bytes: what came into the trial's own slots.
    """

    rate: float
    losses: list[float]
    fetched_bytes: int

    @property
    def bits(self) -> list[str]:
        """Returns the losses in a form that is equal only if all bits are equal, also for NaN."""
        return [loss.hex() for loss in self.losses]


class Result(NamedTuple):
    """The results of the trials, in the order of their learning rates.

    Attributes:
        trials: all at once.
        base_bytes: uploaded bytes of the frozen model, once for all trials.
        alone: the same trials one after the other; empty without ``--compare``.
    """

    trials: list[Trial]
    base_bytes: int
    alone: list[Trial]


class Learner(FineTune):
    """Keeps its losses."""

    def __init__(self, model: Any, lr: float, steps: int) -> None:
        super().__init__(model, lr, steps)
        self.losses: list[Tensor] = []

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.losses.append(loss.detach())
        return loss


def train(options: Any, module: Learner, training: Any, validation: Any) -> Trial:
    """One training, as one would write it for itself."""
    strategy = SuperpipelineStrategy(gpu_memory=options.gpu_memory, optimizer_overlap=options.optimizer_overlap)
    how: dict[str, Any] = dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
    )
    how |= {"max_steps": module.steps, "val_check_interval": module.steps, "check_val_every_n_epoch": None}
    trainer = pl.Trainer(strategy=strategy, devices=1, num_sanity_val_steps=0, **common.settings(options), **how)
    random = torch.Generator().manual_seed(options.seed)
    batches = DataLoader(training, options.batch_size, shuffle=True, generator=random)
    trainer.fit(module, batches, DataLoader(validation, options.batch_size))
    losses = [float(loss) for loss in (*module.losses, trainer.callback_metrics["val_loss"])]
    return Trial(module.lr, losses, strategy.stats().fetched_bytes)


def main(argv: Sequence[str] | None = None) -> Result:
    options = parse(argv)
    common.prepare(options)
    with common.errors_in_the_input(options):  # before any work
        config, tokenizer = read_config(options)
        held_out, training = common.pack(common.read_rows(options.data), tokenizer, options.length)
    if options.model is None:
        print(f"A small Llama learns Python's help texts for {BASE_STEPS} steps, with all its weights.")
        some, texts = common.pack(({"text": text} for text in topics.values()), tokenizer, options.length)
        base = Learner(load_model(Namespace(**{**vars(options), "lora": None}), config), 4e-3, BASE_STEPS)
        train(options, base, texts, some)
        options.output.mkdir(parents=True, exist_ok=True)
        base.model.save_pretrained(options.output / "base")
        options.model = str(options.output / "base")

    pl.seed_everything(options.seed, verbose=False)
    shared = SharedBase(load_model(options, config), options.max_trials)

    def trial(rate: float) -> Trial:
        pl.seed_everything(options.seed, verbose=False)  # this trial's own: the others' random state is not touched
        module = Learner(shared.copy(), rate, options.steps)
        done = train(options, module, training, held_out)
        print(f"Learning rate {rate:g}: loss {done.losses[-1]:.3f} on held-out rows", flush=True)
        return done

    print(f"{len(options.rates)} learning rates at once, {options.steps} steps each", flush=True)
    begun = time.perf_counter()
    trials, seconds = shared.map(trial, options.rates), time.perf_counter() - begun
    alone: list[Trial] = []
    if options.compare:
        print("The same learning rates, one after the other", flush=True)
        begun = time.perf_counter()
        alone, alone_seconds = [trial(rate) for rate in options.rates], time.perf_counter() - begun
        compare(trials, alone)
        fetched = human_bytes(sum(each.fetched_bytes for each in alone))
        print(f"One after the other: {alone_seconds:.1f} s, {fetched} to the device. All losses are bitwise the same.")
    print(f"At once: {seconds:.1f} s, {human_bytes(shared.fetched_bytes)} of the frozen model to the device, for all.")
    print(f"The best learning rate is {best(trials).rate:g}, with a loss of {best(trials).losses[-1]:.3f}.")
    return Result(trials, shared.fetched_bytes, alone)


def best(trials: Sequence[Trial]) -> Trial:
    return min(trials, key=lambda each: math.inf if math.isnan(each.losses[-1]) else each.losses[-1])


def compare(trials: Sequence[Trial], alone: Sequence[Trial]) -> None:
    """
    Raises:
        RuntimeError: a loss differs in a bit.
    """
    for ours, its in zip(trials, alone, strict=True):
        if ours.bits != its.bits:
            step = next(i for i, pair in enumerate(zip(ours.bits, its.bits, strict=True)) if pair[0] != pair[1])
            raise RuntimeError(
                f"The trial of learning rate {ours.rate:g} has other losses than alone, from number {step} on. This is a defect "
                "of SharedBase: please report it."
            )


if __name__ == "__main__":
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)  # each trial would say the same
    main()
