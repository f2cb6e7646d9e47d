"""Train several LoRA adapters (PEFT) over one frozen model in lock step: each layer of the model is uploaded once for all.

    python examples/demos/lockstep_lora.py                                      # no download, a minute on a CPU
    python examples/demos/lockstep_lora.py --rates 3e-3 --lora 2 8 --seeds 0 1  # each combination is a trial
    python examples/demos/lockstep_lora.py --model meta-llama/Llama-3.1-70B --data my.txt --precision bf16-true \\
        --rates 1e-4 2e-4 4e-4 --batch-size 1 --length 512                      # not run

Without ``--model`` a small Llama first learns Python's help texts. Each combination of a learning rate, a rank and a seed is a
*trial*. One ordinary LightningModule trains all trials: each linear layer has the adapters of all, a batch has the rows of all,
and one optimizer has a group for each. The adapter of the best trial is saved as PEFT saves it.

Trained as here, plain Lightning gives the same results, bit for bit. A trial that trains alone multiplies matrices with fewer
rows, and a library may round those differently. So each trial is also trained alone (with ``--model`` only if ``--compare`` is
given), and the table shows the largest difference of its losses.
"""

from __future__ import annotations

import itertools
import logging
import math
import sys
import time
from argparse import ArgumentParser, BooleanOptionalAction, Namespace
from collections.abc import Sequence
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers import CSVLogger
from peft import LoraConfig
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM
from transformers import get_cosine_schedule_with_warmup as cosine_with_warmup

from sp_lightning import SuperpipelineStrategy
from sp_lightning.core.plan.units import human_bytes

if not __package__:  # started as a file: the recipes are found from the repository's root
    sys.path.insert(0, str(Path(__file__).parents[2]))

from examples.finetune_llm import FineTune, common, load_model, read_config

RATES = [1e-3, 3e-3, 1e-2, 3e-2]
MODEL_RATES = [5e-5, 1e-4, 2e-4, 4e-4]  # with --model, which has learned more
BASE_STEPS = 60  # in which the default model learns
OMITTED = [
    "--epochs", "--validate-every", "--resume", "--workers", "--lr", "--lora", "--gradient-checkpointing", "--dial", "--strategy",
    "--accumulate-grad-batches", "--disk", "--report",
    "--gradient-clip",  # the norm of all trials' gradients together would couple them
]  # fmt: skip


def parse(argv: Sequence[str] | None = None) -> Any:
    parser: ArgumentParser = common.training_options(
        __doc__,
        "lockstep_lora",
        model="hub name or folder of a causal language model (default: a small Llama, trained here first)",
        data=".jsonl, .parquet or .txt file, folder of them, or dataset on the hub (default: docstrings of Python)",
        lr="",
        batch_size=4,
        steps=40,
        rows="windows of each trial",
        without=OMITTED,
    )
    parser.set_defaults(gradient_checkpointing=False, lr=None, resume=None)
    add = parser.add_argument
    given, with_model = (" ".join(f"{rate:g}" for rate in rates) for rates in (RATES, MODEL_RATES))
    add("--rates", type=float, nargs="+", help=f"learning rates (default: {given}; with --model {with_model})")
    add("--lora", type=int, nargs="+", default=[8], metavar="RANK", help="ranks of the adapters (8)")
    add("--seeds", type=int, nargs="+", default=[0], help="of the adapters' first values and the order of rows (0)")
    add("--compare", action=BooleanOptionalAction, help="train each alone, too (default: only without --model)")
    add("--length", type=int, default=64, help="tokens per window (%(default)s)")
    options = common.read_options(parser, argv)
    options.rates = options.rates or (MODEL_RATES if options.model else RATES)
    options.compare = options.model is None if options.compare is None else options.compare
    for name, example in (("rates", "1e-4 3e-4"), ("lora", "8 16")):
        if min(getattr(options, name)) <= 0:
            found = f"--{name} {min(getattr(options, name)):g}"
            options.error(f"{found}: expected numbers above 0. For example: --{name} {example}")
    return options


class Trial(NamedTuple):
    """One training: ``seed`` decides about the adapter's first values and the order of rows."""

    rate: float
    rank: int
    seed: int


class StackedLoRA(nn.Module):
    """A frozen linear layer with the LoRA adapters of all trials.

    Args:
        linear: the layer.
        trials: the trials. The first rows of an input belong to the first trial, and so on, the same number to each.
        randoms: a generator for each trial. Values are drawn as by PEFT: ``down`` uniformly, ``up`` is 0.
    """

    def __init__(self, linear: nn.Linear, trials: Sequence[Trial], randoms: Sequence[torch.Generator]) -> None:
        super().__init__()
        self.linear = linear.requires_grad_(False)
        self.down, self.up = (
            nn.ParameterList(),
            nn.ParameterList(),
        )  # a parameter for each trial: (rank, in), (out, rank)
        for trial, random in zip(trials, randoms, strict=True):
            down = torch.empty(trial.rank, linear.in_features)
            nn.init.kaiming_uniform_(down, a=math.sqrt(5), generator=random)
            self.down.append(down)
            self.up.append(torch.zeros(linear.out_features, trial.rank))
        self.most = max(trial.rank for trial in trials)

    def forward(self, rows: Tensor) -> Tensor:
        """Returns the layer's output, (rows, length, out), with each trial's adapter added to its rows.

        Raises:
            ValueError: the input is not (rows, length, in). Experts of a mixture, for example, get only some of the tokens.
        """
        if rows.dim() != 3:
            raise ValueError(
                f"{self.linear} got an input of shape {tuple(rows.shape)}. Expected (rows, length, features): the rows tell "
                "which trial a token belongs to. A mixture of experts whose experts are linear layers cannot be trained here."
            )
        # A smaller rank is filled up with zeros, which stay zero: they are not parameters.
        down = torch.stack([F.pad(each, (0, 0, 0, self.most - len(each))) for each in self.down])
        up = torch.stack([F.pad(each, (0, self.most - each.shape[1])) for each in self.up])
        own = rows.unflatten(0, (len(down), -1))
        added = torch.einsum("tblr,tor->tblo", torch.einsum("tbli,tri->tblr", own, down), up)
        return self.linear(rows) + 2 * added.flatten(0, 1)  # lora_alpha is twice the rank


def add_adapters(model: Any, trials: Sequence[Trial]) -> Any:
    """Freezes the model, and adds all trials' adapters to all linear layers but the head, as PEFT's "all-linear" does.

    Raises:
        ValueError: the model has no linear layers.
    """
    model.requires_grad_(False)
    randoms = [torch.Generator().manual_seed(trial.seed) for trial in trials]
    head = model.get_output_embeddings()
    found = [(name, each) for name, each in model.named_modules() if isinstance(each, nn.Linear) and each is not head]
    if not found:
        raise ValueError(f"--model: {type(model).__name__} has no torch.nn.Linear. Expected a model such as Llama")
    for name, linear in found:
        model.set_submodule(name, StackedLoRA(linear, trials, randoms))
    return model


class Trials(pl.LightningModule):
    """Plain Lightning: trains the adapters of all trials, whose losses do not depend on each other.

    A batch has a batch of each trial: tensors of shape (trials, rows, length).

    Attributes:
        losses: of each step, (trials,).
        val_losses: of each trial, on rows that were held out, at the end.
    """

    def __init__(self, model: Any, trials: Sequence[Trial], steps: int) -> None:
        super().__init__()
        self.model, self.trials, self.steps = add_adapters(model, trials), trials, steps
        self.losses: list[Tensor] = []
        self.val_losses: list[float] = []

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        """Returns the loss of each trial: the mean over its labels."""
        labels = batch["labels"]
        inputs = {name: value.flatten(0, 1) for name, value in batch.items() if name != "labels"}
        logits = self.model(**inputs, use_cache=False).logits.unflatten(0, labels.shape[:2])
        each = zip(logits[..., :-1, :].float(), labels[..., 1:], strict=True)
        return torch.stack([F.cross_entropy(ours.flatten(0, 1), its.flatten()) for ours, its in each])

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        losses = self(batch)
        self.losses.append(losses.detach())
        self.log_dict({f"loss/{name}": loss for name, loss in zip(self.names, losses, strict=True)})
        return losses.sum()  # a trial's gradients are those of its own loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        """All trials see the same rows."""
        rows = len(batch["labels"])
        losses = self({name: value.expand(len(self.trials), *value.shape) for name, value in batch.items()})
        named = {f"val_loss/{name}": loss for name, loss in zip(self.names, losses, strict=True)}
        self.log_dict(named, batch_size=rows)

    def on_validation_epoch_end(self) -> None:
        self.val_losses = [float(self.trainer.callback_metrics[f"val_loss/{name}"]) for name in self.names]

    @property
    def names(self) -> list[str]:
        return [f"lr={trial.rate:g} rank={trial.rank} seed={trial.seed}" for trial in self.trials]

    def configure_optimizers(self) -> Any:
        stacks = [each for each in self.modules() if isinstance(each, StackedLoRA)]
        groups = [
            {"params": [part[number] for each in stacks for part in (each.down, each.up)], "lr": trial.rate}
            for number, trial in enumerate(self.trials)
        ]
        optimizer = torch.optim.AdamW(groups)
        schedule = cosine_with_warmup(optimizer, self.steps // 20, self.steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def save_adapter(module: Trials, number: int, folder: Path, base: str) -> None:
    """Saves the adapter of a trial as PEFT does: ``PeftModel.from_pretrained(model, folder)`` loads it.

    Args:
        base: the name or folder of the frozen model, for those who load the adapter.
    """
    stacks = {name: each for name, each in module.model.named_modules() if isinstance(each, StackedLoRA)}
    rank = module.trials[number].rank
    config = LoraConfig(
        r=rank, lora_alpha=2 * rank, target_modules=[*stacks], task_type="CAUSAL_LM", inference_mode=True
    )
    config.base_model_name_or_path = base
    config.save_pretrained(str(folder))
    weights = {}
    for name, each in stacks.items():
        for part, values in (("lora_A", each.down), ("lora_B", each.up)):
            weights[f"base_model.model.{name}.{part}.weight"] = values[number].detach().cpu().contiguous()
    save_file(weights, folder / "adapter_model.safetensors")


def order(trial: Trial, count: int, total: int) -> Tensor:
    """Returns ``total`` numbers of rows: all in random order, then all in another order, and so on."""
    random = torch.Generator().manual_seed(trial.seed)
    return torch.cat([torch.randperm(count, generator=random) for _ in range(1 + total // count)])[:total]


def batches(rows: Sequence[dict[str, Tensor]], trials: Sequence[Trial], size: int, steps: int) -> Any:
    """Returns a loader of ``steps`` batches: tensors of shape (trials, size, length), in each trial's own order of rows."""
    orders = torch.stack([order(trial, len(rows), steps * size) for trial in trials]).view(len(trials), steps, size)
    columns = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}

    def collate(step: Any) -> dict[str, Tensor]:
        return {name: column[orders[:, step]] for name, column in columns.items()}

    numbers: Any = range(steps)
    return DataLoader(numbers, batch_size=None, collate_fn=collate)


class Result(NamedTuple):
    """What a training came to.

    Attributes:
        module: the trained module.
        seconds: wall time of ``trainer.fit``.
        uploaded: bytes of weights, in training and validation.
    """

    module: Trials
    seconds: float
    uploaded: int


def trainer_and_strategy(options: Any, steps: int, **how: Any) -> tuple[pl.Trainer, SuperpipelineStrategy]:
    strategy = SuperpipelineStrategy(
        gpu_memory=options.gpu_memory, host_memory=options.host_memory, optimizer_overlap=options.optimizer_overlap
    )
    how |= {"max_steps": steps, "max_epochs": -1, "val_check_interval": steps, "check_val_every_n_epoch": None}
    how |= dict.fromkeys(("enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = pl.Trainer(strategy=strategy, devices=1, num_sanity_val_steps=0, **common.settings(options), **how)
    return trainer, strategy


def train(options: Any, trials: Sequence[Trial], training: Any, held_out: Any, logger: Any = False) -> Result:
    """Trains these trials in lock step, over the base in ``options.model``."""
    module = Trials(load_base(options), trials, options.steps)
    trainer, strategy = trainer_and_strategy(options, options.steps, logger=logger, log_every_n_steps=10)
    rows = batches(training, trials, options.batch_size, options.steps)
    begun = time.perf_counter()
    trainer.fit(module, rows, DataLoader(held_out, options.batch_size))
    return Result(module, time.perf_counter() - begun, strategy.stats().fetched_bytes)


def load_base(options: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(options.model, dtype=common.load_dtype(options)).train()


def train_base(options: Any, config: Any, tokenizer: Any) -> None:
    """Trains the small model with all its weights, and saves it where ``options.model`` then leads."""
    print(f"A small Llama learns Python's help texts for {BASE_STEPS} steps, with all its weights.", flush=True)
    held_out, training = common.pack(({"text": text} for text in topics.values()), tokenizer, options.length)
    module = FineTune(load_model(Namespace(**{**vars(options), "lora": None}), config), 4e-3, BASE_STEPS)
    trainer, _ = trainer_and_strategy(options, BASE_STEPS, logger=False)
    random = torch.Generator().manual_seed(options.seed)
    rows = DataLoader(training, options.batch_size, shuffle=True, generator=random)
    trainer.fit(module, rows, DataLoader(held_out, options.batch_size))
    for part in (module.model, tokenizer):
        part.save_pretrained(options.output / "base")
    options.model = str(options.output / "base")


def best(losses: Sequence[float]) -> int:
    """Returns the number of the smallest loss. One that is not a number is not the best."""
    return min(range(len(losses)), key=lambda each: math.inf if math.isnan(losses[each]) else losses[each])


def difference(together: Result, number: int, alone: Result) -> float:
    """Returns the largest difference of a trial's losses, of all steps and on held-out rows, from its run alone."""
    pairs = [
        (float(ours[number]), float(its[0]))
        for ours, its in zip(together.module.losses, alone.module.losses, strict=True)
    ]
    pairs.append((together.module.val_losses[number], alone.module.val_losses[0]))
    return max(math.inf if math.isnan(ours) != math.isnan(its) else abs(ours - its) for ours, its in pairs)


def main(argv: Sequence[str] | None = None) -> tuple[Result, list[Result]]:
    """Returns the result of all trials together, and those of each alone, if they were compared."""
    options = parse(argv)
    common.prepare(options)
    with common.errors_in_the_input(options):  # before any work
        config, tokenizer = read_config(options)
        held_out, training = common.pack(common.read_rows(options.data), tokenizer, options.length)
    trials = [Trial(*each) for each in itertools.product(options.rates, options.lora, options.seeds)]
    if options.model is None:
        train_base(options, config, tokenizer)

    print(f"{len(trials)} trials in lock step, {options.steps} steps each", flush=True)
    logger = CSVLogger(options.output, name="logs")
    together = train(options, trials, training, held_out, logger)
    alone = list[Result]()
    if options.compare:
        print("Each trial alone, one after the other", flush=True)
        alone = [train(options, [trial], training, held_out) for trial in trials]

    head = "learning rate  rank  seed  last loss  held-out loss"
    print(head + "  largest difference from alone" * options.compare)
    last = together.module.losses[-1].tolist()
    for number, trial in enumerate(trials):
        line = f"{trial.rate:13g}  {trial.rank:4}  {trial.seed:4}"
        line += f"  {last[number]:9.4f}  {together.module.val_losses[number]:13.4f}"
        print(line + (f"  {difference(together, number, alone[number]):29.2g}" if options.compare else ""))
    print(f"In lock step: {together.seconds:.1f} s, {human_bytes(together.uploaded)} of weights uploaded.")
    if options.compare:
        seconds, uploaded = sum(each.seconds for each in alone), sum(each.uploaded for each in alone)
        print(
            f"One after the other: {seconds:.1f} s, {human_bytes(uploaded)} uploaded. In lock step: "
            f"{together.seconds / seconds:.2f} of the time, {together.uploaded / uploaded:.2f} of the uploads."
        )
    chosen = best(together.module.val_losses)
    saved = options.output / "adapter"
    save_adapter(together.module, chosen, saved, options.model)
    tokenizer.save_pretrained(saved)
    print(
        f"The best trial on held-out rows: {together.module.names[chosen]}. Its adapter: {saved}. Losses: {logger.log_dir}."
    )
    print(f"To generate: python examples/generate_llm.py --model {saved}")
    return together, alone


if __name__ == "__main__":
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)  # each training would say the same
    main()
