"""Train a causal language model from random weights in so many hours on one card (Cramming, arXiv 2212.14034).

    python examples/demos/cram_llm.py                                          # three minutes, no download
    python examples/demos/cram_llm.py --pseudo 0.3                             # Pseudo-to-Real (arXiv 2110.03888)
    python examples/demos/cram_llm.py --resume                                 # one that was killed
    python examples/demos/cram_llm.py --hours 24 --model examples/shapes/llama-3.2-3b.json --data my.txt \\
        --length 1024                                                          # not run

Time is what runs out, so the learning rate follows the time and not the steps. ``Trainer(max_time=…)`` ends the run. Its timer
says how much of the time is over, and goes on from a checkpoint. The hours are those of training: set-up and two validations
come on top.

With ``--pseudo`` one block takes the place of all for the first share of the time. It stays on the device, and nothing
streams. Then each block becomes one of its own and goes on from there: the loss is the same to the bit.
"""

from __future__ import annotations

import logging
import math
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, Timer
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader
from transformers import AutoConfig, AutoModelForCausalLM

from sp_lightning import SuperpipelineStrategy

if not __package__:  # started as a file: the recipes are found from the repository's root
    sys.path.insert(0, str(Path(__file__).parents[2]))

from examples.finetune_llm import FineTune, common

CLIP, BETAS, EPS, DECAY = 0.5, (0.9, 0.98), 1e-12, 0.01  # the gradient's norm and AdamW's numbers are Cramming's
PARTS = 8  # of the time, each of which ends with a checkpoint and a line
VOCABULARY = 2048  # of the tokenizer, which is trained on the text


def parse(argv: Sequence[str] | None = None) -> Any:
    parser = common.training_options(
        __doc__,
        "cram_llm",
        model="config.json, or a hub name or folder that has one (default: a small Llama)",
        data=".txt or .jsonl file, folder of them, or dataset on the hub (default: Python's help texts)",
        lr="2e-3",
        batch_size=16,
        rows="windows",
        without=[
            "--epochs",
            "--steps",
            "--validate-every",
            "--lora",
            "--workers",
            "--dial",
            "--host-memory",
            "--disk",
            "--report",
        ],
    )
    parser.set_defaults(lr=2e-3, gradient_clip=CLIP)
    add = parser.add_argument
    add("--hours", type=float, default=0.05, help="of training (%(default)s)")
    add("--length", type=int, default=64, help="tokens per window (%(default)s)")
    add("--warmup", type=float, default=0.1, help="share of the time in which the learning rate rises (%(default)s)")
    add("--pseudo", type=float, help="share of the time with one block in place of all (none)")
    options = common.read_options(parser, argv)
    for name, most in {"hours": math.inf, "warmup": 1, "pseudo": 1}.items():
        if not (getattr(options, name) or 0) < most:
            options.error(
                f"--{name} {getattr(options, name)}: expected a number below {most}. For example: --{name} 0.1"
            )
    return options


class Result(NamedTuple):
    """The result of a run.

    Attributes:
        losses: of each step.
        validations: loss on text that was held out, before and after.
        delinked: with ``--pseudo``, the loss before and after blocks became ones of their own.
    """

    losses: list[float]
    validations: list[float]
    delinked: tuple[float, float] | None


# ---------------------------------------------------------------------- Pseudo-to-Real


def share_block(model: Any) -> Any:
    """The first block of the longest list of blocks takes the place of all.

    Raises:
        ValueError: the blocks are of several kinds.
    """
    blocks = max((each for each in model.modules() if isinstance(each, nn.ModuleList)), key=len)
    kinds = {str(each) for each in blocks}, set(getattr(model.config, "layer_types", None) or [])
    if max(map(len, kinds)) > 1:
        raise ValueError(
            "--pseudo: the blocks are of several kinds, and one cannot take the place of all. Leave it out"
        )
    for place in range(len(blocks)):
        blocks[place] = blocks[0]
    return model


def delink(shared: nn.Module, real: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Tensor]]:
    """Gives ``real`` the weights of ``shared``, whose block each of its blocks copies, and returns Adam's moments, likewise.

    A module with several places is in a state dict under each of its names. So the names say what goes where.

    What justifies copies of the moments? Adam's step is m / √v, so it would be the same if m were divided by n and v by n²:
    each block's next step is that of the shared block, except for the block's own new gradient. What comes
    then is a guess. The shared gradient was the sum of n, and a block's own is n times smaller if all n agree, and √n times
    if they have nothing in common. m forgets the sums in 10 steps, v in 50 (with β = 0.9 and 0.98), and meanwhile steps are
    shorter by about that factor. That is one more warm-up, which errs on the safe side.

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


# ---------------------------------------------------------------------- the run


class Crammed(FineTune):
    """A language model whose learning rate follows the time: up from 0 until a share of it, then down to 0 at its end.

    Attributes:
        before: seconds of training before this trainer's.
        moments: by name of a parameter, the state that the optimizer begins with.
        losses: of each batch.
    """

    def __init__(self, model: Any, options: Any, before: float) -> None:
        super().__init__(model, options.lr, steps=0)
        self.warmup, self.seconds, self.before = options.warmup, 3600 * options.hours, before
        self.moments: dict[str, dict[str, Tensor]] = {}
        self.losses: list[Tensor] = []
        self.told = before / self.seconds

    def share(self) -> float:
        """Returns the share of the training time that is over, from 0 to 1."""
        trainer: Any = self.trainer
        (timer,) = (each for each in trainer.callbacks if isinstance(each, Timer))  # of max_time
        return (self.before + timer.time_elapsed()) / self.seconds

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.losses.append(loss.detach())
        if (share := self.share()) > self.told:
            self.told = (1 + math.floor(share * PARTS)) / PARTS
            print(f"{share:.0%} of the time, step {self.global_step}: loss {loss:.3f}", flush=True)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.lr, betas=BETAS, eps=EPS, weight_decay=DECAY)
        for name, parameter in self.named_parameters():
            if name in self.moments:
                optimizer.state[parameter] = self.moments[name]

        def triangle(
            _: int,
        ) -> float:  # Lightning asks after each step. The answer is about the time, not the step's number.
            share = self.share()
            return share / self.warmup if share < self.warmup else max(0.0, 1 - share) / (1 - self.warmup)

        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": LambdaLR(optimizer, triangle), "interval": "step"},
        }


def read_input(options: Any) -> tuple[Any, Any, Any, Any]:
    """The model's config, the tokenizer, and windows of text for validation and for training."""
    rows = list(common.read_rows(options.data)) if options.data else [{"text": text} for text in topics.values()]
    tokenizer = common.byte_pairs((row.get("text", "") for row in rows), VOCABULARY)
    held_out, training = common.pack(rows, tokenizer, options.length)
    if len(training) < (step := options.batch_size * options.accumulate_grad_batches):
        raise ValueError(
            f"--batch-size: a step takes {step} windows, found {len(training)}. Lower --length or --batch-size"
        )
    if options.model is None:
        return common.small_llama(tokenizer, options.length), tokenizer, held_out, training
    config = AutoConfig.from_pretrained(options.model)
    common.check_length(config, options)
    if config.vocab_size < len(tokenizer):
        raise ValueError(
            f"--model {options.model}: vocab_size is {config.vocab_size}; expected at least {len(tokenizer)}"
        )
    if options.pseudo:
        with torch.device("meta"):
            share_block(AutoModelForCausalLM.from_config(config))
    return config, tokenizer, held_out, training


def main(argv: Sequence[str] | None = None) -> Result:
    options = parse(argv)
    common.prepare(options)
    with common.errors_in_the_input(options):  # before any work
        how = {"gpu_memory": options.gpu_memory, "optimizer_overlap": options.optimizer_overlap}
        config, tokenizer, held_out, training = read_input(options)
        SuperpipelineStrategy(**how)
    seconds, begun = 3600 * options.hours, 3600 * options.hours * (options.pseudo or 0)
    done = torch.load(options.resume, mmap=True)["global_step"] if options.resume else 0
    trained: list[tuple[Crammed, float]] = []

    def new_module(phase: str) -> Crammed:
        model = AutoModelForCausalLM.from_config(config, dtype=common.load_dtype(options))
        if options.gradient_checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        return Crammed(share_block(model), options, 0.0) if phase == "pseudo" else Crammed(model, options, begun)

    def make_trainer(phase: str, **more: Any) -> pl.Trainer:
        ours = SuperpipelineStrategy(**({"keep_on_gpu": ["**"]} if phase == "pseudo" else how))  # one block stays
        quiet = {
            "logger": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "num_sanity_val_steps": 0,
        }
        keeps = {"enable_checkpointing": bool(more.get("callbacks"))}
        strategy = "auto" if options.strategy == "auto" else ours  # auto is plain Lightning
        return pl.Trainer(strategy=strategy, devices=1, **{**common.settings(options), **quiet, **keeps, **more})

    def loss_of(phase: str, module: Crammed) -> float:
        validation: Any = DataLoader(held_out, options.batch_size)
        (metrics,) = make_trainer(phase).validate(module, validation, verbose=False)
        return metrics["val_loss"]

    def train(phase: str, module: Crammed, resume: Path | None = None) -> pl.Trainer:
        limit = timedelta(seconds=begun if phase == "pseudo" else seconds - begun)
        keep = ModelCheckpoint(
            options.output, "last", train_time_interval=limit / PARTS, save_top_k=1, enable_version_counter=False
        )
        callbacks = [keep] if phase == "real" else []
        trainer = make_trainer(phase, callbacks=callbacks, max_time=limit, max_epochs=-1, limit_val_batches=0)
        random = torch.Generator().manual_seed(options.seed + done)  # a resumed run reads in another order
        batches: Any = DataLoader(training, options.batch_size, shuffle=True, drop_last=True, generator=random)
        start = time.perf_counter()
        trainer.fit(module, batches, ckpt_path=resume)
        trained.append((module, time.perf_counter() - start))
        return trainer

    phase = "pseudo" if options.pseudo and options.resume is None else "real"
    module, delinked = new_module(phase), None
    first = loss_of(phase, module)
    trainer = train(phase, module, options.resume)
    if phase == "pseudo":  # one block becomes many, which does not change what the model says
        shared, module = module, new_module("real")
        module.moments = delink(shared.model, module.model, trainer.optimizers[0])
        module.moments = {f"model.{name}": state for name, state in module.moments.items()}
        delinked = loss_of("pseudo", shared), loss_of("real", module)
        if delinked[0] != delinked[1]:
            raise RuntimeError(
                f"The loss changed from {delinked[0]} to {delinked[1]}, and no weight did: please report it"
            )
        trainer = train("real", module)
    last = loss_of("real", module)

    saved = options.output / "model"
    module.model.save_pretrained(saved)
    tokenizer.save_pretrained(saved)
    losses = [float(loss) for each, _ in trained for loss in each.losses]
    tokens = len(losses) * options.batch_size * options.length
    if delinked:
        print(f"One block became many, and the loss stayed {delinked[0]:.6f}, bit for bit.")
    rate = tokens / sum(taken for _, taken in trained)
    print(f"Loss on held-out text: {first:.3f} → {last:.3f}, after {tokens:,} tokens, {rate:,.0f} per second.")
    print(f"The learning rate was {trainer.optimizers[0].param_groups[0]['lr']:.1e} at the end of the time.")
    print(f"Saved: {saved}. To generate: python examples/generate_llm.py --model {saved}")
    return Result(losses, [first, last], delinked)


if __name__ == "__main__":
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)  # each trainer would say the same
    main()
