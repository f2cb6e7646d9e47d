"""Fine-tune a causal language model that is larger than the GPU's memory. One file, to copy and to change.

    python examples/finetune_llm.py                                  # a small model on small data, without downloads
    python examples/finetune_llm.py --model meta-llama/Llama-3.2-3B --data my.jsonl --length 4096 \\
        --batch-size 1 --accumulate-grad-batches 8                   # every weight, on a 24 GB card
    python examples/finetune_llm.py --model meta-llama/Llama-3.1-8B-Instruct --data my.jsonl --length 4096 \\
        --batch-size 1 --accumulate-grad-batches 8 --lora 16         # adapters, on a 24 GB card
    python examples/finetune_llm.py --resume runs/finetune_llm/last.ckpt    # continue an interrupted run
    python examples/finetune_llm.py --strategy auto                  # plain Lightning, for comparison
    python examples/finetune_llm.py --dial                           # memory and time of k and k', measured

Rows of ``--data`` are ``{"messages": [{"role": "user", "content": "..."}, {"role": "assistant", ...}]}`` (only what the
assistant says counts in the loss), ``{"prompt": "...", "completion": "..."}`` (only the completion) or ``{"text": "..."}``.

Time and memory of the second and third command on a 24 GB card, *estimated* for 100 TFLOP/s and 25 GB/s over PCIe:

    python -m sp_lightning plan examples/shapes/llama-3.2-3b.json --tokens 4096 --gradient-checkpointing \\
        --gradient-clip norm --accumulate-grad-batches 8 --gpu-memory 22GiB --host-memory 62GiB
        # 2.01 s per batch, 2037 tokens/s, device memory 12.9 GiB, host memory 57.5 GiB
    python -m sp_lightning plan examples/shapes/llama-3-8b.json --lora 16 --tokens 4096 --gradient-checkpointing \\
        --gradient-clip norm --accumulate-grad-batches 8 --gpu-memory 22GiB --host-memory 62GiB
        # 2.8 s per batch, 1462 tokens/s, device memory 8.9 GiB, host memory 15.7 GiB
"""

from __future__ import annotations

import argparse
import ast
import itertools
import json
import sys
import time
import warnings
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

DATA = (
    'file, folder of files (.jsonl, .parquet, .txt) or hub dataset (default: Python\'s docstrings). Rows have "messages", or '
    '"prompt" and "completion", or "text"'
)

# ---------------------------------------------------------------------- options


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    add = parser.add_argument
    add("--model", help="hub name, folder, or config.json for random weights (default: a small Llama, random weights)")
    add("--data", help=DATA)
    add("--length", type=int, default=128, help="tokens per window (%(default)s)")
    add("--batch-size", type=int, default=8, help="windows per batch (%(default)s)")
    add("--accumulate-grad-batches", type=int, default=1, help="batches per optimizer step (%(default)s)")
    add("--epochs", type=float, default=1.0, help="passes over the data (%(default)s)")
    add("--steps", type=int, help="optimizer steps, in place of --epochs")
    add("--every", type=int, help="steps between validations and checkpoints (default: a tenth of all)")
    add("--lr", type=float, help="peak learning rate (default: 2e-4 with --lora, 2e-5 with --model, else 4e-3)")
    add(
        "--lora",
        type=int,
        metavar="RANK",
        help="train LoRA adapters (PEFT) of this rank, for example 16, and no other weights",
    )
    add("--gradient-checkpointing", action=argparse.BooleanOptionalAction, default=True, help="the model's own (on)")
    precision = "(bf16-mixed; 32-true for the default model on a CPU)"
    add("--precision", choices=["bf16-mixed", "bf16-true", "32-true"], help=precision)
    add("--strategy", default="superpipeline", choices=["superpipeline", "auto"], help="auto is plain (%(default)s)")
    add("--gpu-memory", help="at most, for example 16GiB (default: free memory)")
    add("--accelerator", default="auto", help="as in Lightning (%(default)s)")
    add(
        "--dial",
        action="store_true",
        help="only measure memory and time for some k and k'; the default model does both",
    )
    add("--seed", type=int, default=0, help="(%(default)s)")
    add("--resume", type=Path, help="last.ckpt of a run with the same options")
    add("--output", type=Path, default=Path("runs/finetune_llm"), help="(%(default)s)")
    return parser


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Reads the options, and reports errors that show without a model."""
    parser = make_parser()
    options = parser.parse_args(argv)
    for name in ("length", "batch_size", "accumulate_grad_batches", "epochs", "steps", "every", "lr", "lora"):
        value = getattr(options, name)
        if value is not None and value <= 0:
            parser.error(f"--{name.replace('_', '-')} {value}: expected a number above 0")
    if options.resume and options.resume.is_dir():
        parser.error(
            f"--resume {options.resume}: expected a file, got a folder. For example: {options.resume}/last.ckpt"
        )
    if options.resume and not options.resume.is_file():
        parser.error(f"--resume {options.resume}: not found. Expected last.ckpt of an earlier run")
    if options.output.is_file():
        parser.error(f"--output {options.output}: expected a folder, got a file")
    return options


if __name__ == "__main__":
    parse()  # reports wrong options before the slow imports that follow; main() reads them again

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from tokenizers import ByteLevelBPETokenizer, Tokenizer
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaConfig, PreTrainedTokenizerFast
from transformers import get_cosine_schedule_with_warmup as cosine_with_warmup

from sp_lightning import SuperpipelineStrategy, dial

IGNORED = -100  # a label that does not count in the loss
FILES = (".jsonl", ".parquet", ".txt")
ROWS = 'Expected "messages", or "prompt" and "completion", or "text". For example: {"prompt": "2 + 2 =", "completion": " 4"}'


class FineTune(pl.LightningModule):
    """Plain Lightning: only ``Trainer(strategy=...)`` decides where the layers are."""

    def __init__(self, model: Any, lr: float, steps: int) -> None:
        super().__init__()
        self.model, self.lr, self.steps = model, lr, steps
        self.begin: tuple[int, float] | None = None  # the first step, and its time

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = self.model(**batch, use_cache=False).loss  # the mean over the labels of this batch
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.model(**batch, use_cache=False).loss, prog_bar=True)

    def on_train_start(self) -> None:
        self.begin = self.global_step, time.perf_counter()

    def on_validation_epoch_end(self) -> None:
        shown = [f" {name} {loss:.3f}" for name, loss in sorted(self.trainer.callback_metrics.items())]
        if self.begin:  # None before the first step
            first, began = self.begin
            left = (time.perf_counter() - began) / (self.global_step - first) * (self.steps - self.global_step)
            shown.append(f" {left:.0f} s left")
        print(f"step {self.global_step}/{self.steps}", *shown, flush=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=self.lr)
        schedule = cosine_with_warmup(optimizer, self.steps // 20, self.steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


# ---------------------------------------------------------------------- data


def read_rows(data: str | None) -> Iterable[dict[str, Any]]:
    """Rows of a file, of a folder of files, or of a dataset on the Hugging Face hub."""
    if data is None:
        return python_functions()
    path = Path(data)
    files = [file for file in ([path] if path.is_file() else sorted(path.rglob("*"))) if file.suffix in FILES]
    if path.is_file() and not files:
        raise ValueError(
            f"--data {data}: expected a file that ends in {', '.join(FILES)}. For example: --data my.jsonl"
        )
    if path.is_dir() and not files:
        raise ValueError(f"--data {data}: the folder has no {', '.join(FILES)} file. For example: --data my.jsonl")
    if not path.exists() and (data.startswith((".", "/")) or data.endswith((*FILES, ".json", ".csv"))):
        raise ValueError(f"--data {data}: does not exist. For example: --data my.jsonl")
    return itertools.chain.from_iterable(map(read_file, files)) if files else load_dataset(data)


def read_file(file: Path) -> Iterator[dict[str, Any]]:
    if file.suffix == ".parquet":
        yield from load_dataset("parquet", data_files=str(file))
    elif file.suffix == ".txt":
        yield {"text": file.read_text(encoding="utf-8")}
    else:
        for number, line in enumerate(file.read_text(encoding="utf-8").rstrip("\n").split("\n"), 1):
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"--data {file}, line {number}: not JSON ({error}). {ROWS}") from error
            yield row


def load_dataset(name: str, **options: Any) -> Any:
    try:
        import datasets
    except ImportError as error:
        raise ValueError(f"--data: {name} needs the package datasets. Run: pip install datasets") from error
    return datasets.load_dataset(name, split="train", **options)


def python_functions() -> Iterator[dict[str, Any]]:
    """The default data: functions of Python's standard library as questions, their docstrings as answers."""
    for path in sorted(Path(ast.__file__).parent.glob("[a-z]*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and (answer := ast.get_docstring(node)):
                question = f"What does {path.stem}.{node.name}({ast.unparse(node.args)}) do?"
                yield {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def encode(row: dict[str, Any], tokenizer: Any) -> tuple[list[int], list[int]]:
    """The tokens of a row, and their labels: the same tokens, or IGNORED where they do not count in the loss."""
    begin, end = tokenizer.bos_token or "", tokenizer.eos_token or ""
    if "messages" in row:
        parts = chat_parts(row["messages"], tokenizer)
    elif "prompt" in row and "completion" in row:
        parts = [(begin + row["prompt"], False), (row["completion"] + end, True)]
    elif "text" in row:
        parts = [(begin + row["text"] + end, True)]
    else:
        raise ValueError(f"found the columns {', '.join(row)}")
    tokens: list[int] = []
    labels: list[int] = []
    for text, counts in parts:  # each on its own, as a prompt is tokenized on its own when the model generates
        part = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        tokens += part
        labels += part if counts else [IGNORED] * len(part)
    return tokens, [IGNORED, *labels[1:]]  # in a window, the token before the first one is of another row


def chat_parts(messages: list[dict[str, str]], tokenizer: Any) -> list[tuple[str, bool]]:
    """A conversation in the format of the chat template, in parts: the text, and whether it counts in the loss."""
    if tokenizer.chat_template is None:
        raise ValueError("messages need a tokenizer with a chat template, as instruct models have")
    parts, before = [], ""
    for i, message in enumerate(messages):
        if message["role"] == "assistant":
            prompt = tokenizer.apply_chat_template(messages[:i], tokenize=False, add_generation_prompt=True)
            answered = tokenizer.apply_chat_template(messages[: i + 1], tokenize=False)
            if not (prompt.startswith(before) and answered.startswith(prompt)):
                raise ValueError("the chat template changes earlier messages; give rows with one assistant message")
            parts += [(prompt[len(before) :], False), (answered[len(prompt) :], True)]
            before = answered
    if not parts:
        raise ValueError("found no message of the role assistant")
    return parts


def pack(rows: Iterable[dict[str, Any]], tokenizer: Any, length: int) -> Any:
    """Joins all rows and cuts them into windows of ``length`` tokens. The last tokens, less than a window, are dropped.

    Position ids start from 0 at each row. From them, transformers makes attention masks that keep rows apart: a token
    attends only to its own row. (Layers that are not attention, as in Mamba, may mix rows.) A row that is cut continues
    in the next window from position 0, without its first part.
    """
    tokens, labels, starts = [], [], []
    for number, row in enumerate(rows, 1):
        try:
            row_tokens, row_labels = encode(row, tokenizer)
        except Exception as error:  # chat templates raise their own errors
            raise ValueError(f"--data, row {number}: {error}. {ROWS}") from error
        tokens += row_tokens
        labels += row_labels
        starts += [True] + [False] * (len(row_tokens) - 1)
    count = len(tokens) // length
    ids, targets, start = (
        torch.tensor(each[: count * length]).view(count, length) for each in (tokens, labels, starts)
    )
    index = torch.arange(length).expand(count, length)
    positions = index - torch.where(start.bool(), index, 0).cummax(dim=1).values
    counted = (targets[:, 1:] != IGNORED).any(dim=1)  # without any label, the mean loss of a window is not a number
    parts = zip(ids[counted], targets[counted], positions[counted], strict=True)
    return [{"input_ids": part[0], "labels": part[1], "position_ids": part[2]} for part in parts]


# ---------------------------------------------------------------------- model


def small_tokenizer() -> Any:
    """Byte-level BPE with 2048 tokens, trained on the default data, with a chat template."""
    bpe = ByteLevelBPETokenizer()
    texts = (message["content"] for row in python_functions() for message in row["messages"])
    special = ["<|end|>", "<|user|>", "<|assistant|>", "<|system|>"]
    bpe.train_from_iterator(texts, vocab_size=2048, special_tokens=special, show_progress=False)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(bpe.to_str()), eos_token="<|end|>")
    tokenizer.chat_template = (
        "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    return tokenizer


def read_config(model: str | None, length: int) -> tuple[Any, Any]:
    """The model's config and its tokenizer. Weights are loaded after all input has been checked."""
    if model is None:  # a small Llama
        tokenizer = small_tokenizer()
        size = {"hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": 6, "num_attention_heads": 4}
        size |= {"vocab_size": len(tokenizer), "max_position_embeddings": max(length, 256)}
        return LlamaConfig(bos_token_id=None, eos_token_id=tokenizer.eos_token_id, **size), tokenizer
    path = Path(model)
    if not path.exists() and (model.startswith((".", "/")) or model.endswith(".json") or model.count("/") > 1):
        raise ValueError(
            f"--model {model}: not found. Expected a folder, config.json or hub name, for example Qwen/Qwen3-4B"
        )
    config = AutoConfig.from_pretrained(model)
    longest = getattr(config, "max_position_embeddings", length)
    if length > longest:
        raise ValueError(f"--length {length}: {model} reads at most {longest} tokens. For example: --length {longest}")
    return config, small_tokenizer() if path.is_file() else AutoTokenizer.from_pretrained(model)


def load_model(options: argparse.Namespace, config: Any) -> Any:
    """The model on the CPU. The strategy copies layers to the GPU when they are needed."""
    # bf16-mixed computes in bfloat16. Weights that are trained stay in float32, frozen ones need no more than bfloat16.
    half = options.precision == "bf16-true" or (options.precision == "bf16-mixed" and options.lora)
    dtype = torch.bfloat16 if half else torch.float32
    if options.model is None or Path(options.model).is_file():
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)  # random weights
    else:
        model = AutoModelForCausalLM.from_pretrained(options.model, dtype=dtype)
    if options.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if options.lora:
        from peft import LoraConfig, get_peft_model

        size = {"r": options.lora, "lora_alpha": 2 * options.lora}
        model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear", **size))
    return model.train()  # from_pretrained returns it in evaluation mode, and Lightning keeps the mode


# ---------------------------------------------------------------------- the run


def adapt_to_cpu(options: argparse.Namespace) -> None:
    """Chooses the precision. On a CPU, the default model runs in one thread and in float32.

    Its operators are small, and several threads mostly wait for each other: beside two busy processes on two cores, a step took
    10 s, and 0.5 s in one thread. Optimizer steps use as many threads as torch. A CPU with AVX2 alone, which has no instructions
    for bfloat16, took ten times as long for it as for float32.
    """
    on_cpu = options.accelerator == "cpu" or (options.accelerator == "auto" and not torch.accelerator.is_available())
    if options.model is None and on_cpu:
        torch.set_num_threads(1)
        options.precision = options.precision or "32-true"
    options.precision = options.precision or "bf16-mixed"


def fits(file: Path, module: pl.LightningModule, strategy: str) -> bool:
    """Returns True if a checkpoint has this model's weights and trains the same ones."""
    checkpoint = torch.load(file, mmap=True)
    saved = {name: value.shape for name, value in checkpoint["state_dict"].items()}
    if strategy == "superpipeline":  # which may have left out frozen weights
        frozen = {name: p.shape for name, p in module.named_parameters(remove_duplicate=False) if not p.requires_grad}
        saved = frozen | saved
    trained = sum(len(group["params"]) for group in checkpoint["optimizer_states"][0]["param_groups"])
    same = saved == {name: value.shape for name, value in module.state_dict().items()}
    return same and trained == sum(p.requires_grad for p in module.parameters())


def main(argv: Sequence[str] | None = None) -> None:
    options = parse(argv)
    adapt_to_cpu(options)
    try:  # reports errors in the input before any work
        strategy: Any = options.strategy
        if strategy == "superpipeline":  # other options: keep_on_gpu, k, optimizer_on, ... (examples/guide/options.md)
            strategy = SuperpipelineStrategy(gpu_memory=options.gpu_memory, save_frozen=not options.lora)
        config, tokenizer = read_config(options.model, options.length)
        windows = pack(read_rows(options.data), tokenizer, options.length)
        spacing = max(20, len(windows) // 64)  # one window in 20 is for validation, 64 at most
        held_out = windows[::spacing]
        training: Any = [window for i, window in enumerate(windows) if i % spacing]
        step_size = options.batch_size * options.accumulate_grad_batches
        if len(training) < step_size:
            raise ValueError(
                f"--data has {len(training)} training windows. Expected at least {step_size}: --batch-size × "
                "--accumulate-grad-batches. Lower one of them or --length, or give more data"
            )
        steps = options.steps or max(1, int(options.epochs * len(training) / step_size))
        done = torch.load(options.resume, mmap=True)["global_step"] if options.resume else 0
        if done >= steps:
            raise ValueError(f"--resume {options.resume}: has {done} of {steps} steps. For example: --steps {2 * done}")
    except (ValueError, OSError) as error:
        make_parser().error(str(error))

    # The newest transformers have another name for gradient_checkpointing_enable. Data in memory need no workers.
    ignored = "gradient_checkpointing_enable|does not have many workers|Checkpoint directory"
    warnings.filterwarnings("ignore", message=f".*({ignored})")
    pl.seed_everything(options.seed, verbose=False)
    lr = options.lr or (2e-4 if options.lora else 2e-5 if options.model else 4e-3)
    module = FineTune(load_model(options, config), lr, steps)
    if options.resume and not fits(options.resume, module, options.strategy):
        make_parser().error(
            f"--resume {options.resume}: a checkpoint of another model or of a run with other options (--lora). Expected "
            "last.ckpt of a run with the same options"
        )

    # The windows of the whole run: all in random order, then all in another order, and so on. If the run is resumed,
    # it begins with the first unused window. The used ones move to the end, because Lightning counts them as read.
    random = torch.Generator().manual_seed(options.seed)
    epochs = 1 + steps * step_size // len(training)
    order = torch.cat([torch.randperm(len(training), generator=random) for _ in range(epochs)])[: steps * step_size]
    batches = DataLoader(training, options.batch_size, sampler=order.roll(-done * step_size).tolist())
    validation = DataLoader(held_out, options.batch_size)

    def measure(batch_count: int) -> Any:
        """Trains the same model with plain Lightning and with some k and k'."""
        names = ("accelerator", "precision", "accumulate_grad_batches")
        settings = {**{name: getattr(options, name) for name in names}, "gradient_clip_val": 1.0}
        make = {"factory": lambda: FineTune(load_model(options, config), lr, steps), "data": lambda: batches}
        return dial(**make, steps=batch_count, trainer=settings, name="finetune_llm", gpu_memory=options.gpu_memory)

    if options.dial:
        print(measure(10))
        return

    every = options.every or max(1, steps // 10)
    checkpoint = ModelCheckpoint(  # after each validation, in place of the one before
        options.output, filename="last", save_on_train_epoch_end=False, enable_version_counter=False
    )
    trainer = pl.Trainer(
        strategy=strategy,
        accelerator=options.accelerator,
        devices=1,
        precision=options.precision,
        max_steps=steps,
        max_epochs=-1,
        accumulate_grad_batches=options.accumulate_grad_batches,
        gradient_clip_val=1.0,
        val_check_interval=every * options.accumulate_grad_batches,
        check_val_every_n_epoch=None,
        num_sanity_val_steps=-1,  # validates before the first step, too
        callbacks=[checkpoint],
        logger=CSVLogger(options.output, name="logs"),
        log_every_n_steps=10,
        enable_progress_bar=sys.stdout.isatty(),
        enable_model_summary=False,
    )
    begin = time.perf_counter()
    trainer.fit(module, batches, validation, ckpt_path=options.resume)
    last = options.output / "last.ckpt"
    if steps % every:  # the last steps have no validation and no checkpoint yet
        trainer.save_checkpoint(last)
        trainer.validate(module, validation, verbose=False)
    seconds = time.perf_counter() - begin

    saved = options.output / ("adapter" if options.lora else "model")
    module.model.save_pretrained(saved)
    tokenizer.save_pretrained(saved)
    tokens = (trainer.global_step - done) * step_size * options.length
    print(f"Trained on {tokens:,} tokens in {seconds:.0f} s ({tokens / seconds:,.0f} per second, with validation).")
    print(f"Saved: {saved}. Checkpoint: {last}. Losses: {options.output / 'logs'}.")
    print(f"To continue, repeat the command with --resume {last} --steps {2 * steps}.")
    if not (options.lora and options.model is None):  # an adapter needs the base model that it names
        print(f"To generate: python examples/generate_llm.py --model {saved}")
    if options.model is None and options.strategy == "superpipeline":
        print("Next, k and k' of the same model are measured, in a few seconds.", flush=True)
        print(measure(5))


if __name__ == "__main__":
    main()
