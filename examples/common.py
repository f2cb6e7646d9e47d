"""Common parts of the recipes: options, rows of text, the order of rows, checkpoints, and small default models and data.

Copy this file with a recipe. Slow packages are imported where they are used, so that wrong options are reported at once.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import itertools
import json
import random
import sys
import time
import warnings
import wave
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

IGNORED = -100  # a label that does not count in the loss
TEXT_FILES = (".jsonl", ".parquet", ".txt")
TEXT_ROWS = 'Expected "messages", or "prompt" and "completion", or "text". For example: {"prompt": "2 + 2 =", "completion": " 4"}'
IMAGE_ROW = 'For example: {"image": "cat.jpg", "question": "What is this?", "answer": "A cat."}'
DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")

# ---------------------------------------------------------------------- options


def add_run_options(parser: argparse.ArgumentParser, output: str, without: Sequence[str] = ()) -> None:
    """The options of all recipes, also of the one that generates, except those in ``without``."""

    def add(option: str, **settings: Any) -> None:
        if option not in without:
            parser.add_argument(option, **settings)

    add("--strategy", default="superpipeline", choices=["superpipeline", "auto"], help="auto is plain (%(default)s)")
    add("--gpu-memory", help="at most, for example 16GiB (default: free memory)")
    add("--accelerator", default="auto", help="as in Lightning (%(default)s)")
    add("--dial", action="store_true", help="in place of the run, measure memory and time for some k and k'")
    add("--seed", type=int, default=0, help="(%(default)s)")
    add("--output", type=Path, default=Path("runs") / output, help="(%(default)s)")


def training_options(
    doc: str | None, name: str, *, model: str, data: str, lr: str, batch_size: int | None = 8, epochs: float = 1.0,
    steps: int | None = None, rows: str = "rows", without: Sequence[str] = (),
) -> argparse.ArgumentParser:  # fmt: skip
    """The options of all recipes that train, except those in ``without``. The texts are parts of the help."""
    parser = argparse.ArgumentParser(description=(doc or "").split("\n")[0])

    def add(option: str, *more: str, **settings: Any) -> None:
        if option not in without:
            parser.add_argument(option, *more, **settings)

    add("--model", help=model)
    add("--data", help=data)
    add("--batch-size", type=int, default=batch_size, help=f"{rows} per batch ({batch_size or '1; tiny model: 8'})")
    add("--accumulate-grad-batches", type=int, default=1, help="batches per optimizer step (%(default)s)")
    add("--epochs", type=type(epochs), default=epochs, help="passes over the data (%(default)s)")
    many = f"({steps})" if steps else "in place of --epochs"
    add("--steps", type=int, default=steps, help=f"optimizer steps, {many}; with --resume, including earlier ones")
    add("--validate-every", "--every", type=int, help="steps between validations and checkpoints (a tenth of all)")
    add("--lr", type=float, help=f"peak learning rate (default: {lr})")
    add(
        "--lora",
        type=int,
        metavar="RANK",
        help="train LoRA adapters of this rank, for example 16, and freeze the model",
    )
    add("--gradient-checkpointing", action=argparse.BooleanOptionalAction, default=True, help="the model's own (on)")
    precision = "(bf16-mixed; 32-true for the default model on a CPU)"
    add("--precision", choices=["bf16-mixed", "bf16-true", "32-true"], help=precision)
    add("--gradient-clip", type=float, default=1.0, help="norm that gradients are clipped to; 0: none (%(default)s)")
    overlap = 'when the CPU updates weights; "backward" also frees gradients early, without clipping (auto)'
    add("--optimizer-overlap", choices=["auto", "backward", "forward", "off"], default="auto", help=overlap)
    add("--workers", type=int, default=0, help="processes that read data (%(default)s)")
    add("--host-memory", help="CPU memory, at most, for example 64GiB (default: free memory)")
    add(
        "--disk",
        metavar="FOLDER",
        help="on an NVMe drive, for what --host-memory has no room for",
    )
    add("--report", type=Path, metavar="FILE", help="to which one line of JSON about the run is added at its end")
    add("--resume", nargs="?", const="", metavar="FILE", help="last.ckpt of a run with the same options (of --output)")
    add_run_options(parser, name, without)
    return parser


def read_options(parser: argparse.ArgumentParser, argv: Sequence[str] | None = None) -> Any:
    """Reads the options. Errors that show without a model end the program, as ``options.error(message)`` does."""
    options: Any = parser.parse_args(argv)
    options.error = parser.error
    for name, value in vars(options).items():
        if (
            type(value) in (int, float)
            and value <= 0
            and name not in ("seed", "workers", "aux", "temperature", "gradient_clip")
        ):
            parser.error(f"--{name.replace('_', '-')} {value}: expected a number above 0")
    if getattr(options, "optimizer_overlap", "") == "backward" and options.gradient_clip:
        parser.error("--optimizer-overlap backward: clipping needs all gradients first. Add --gradient-clip 0")
    if (getattr(options, "ema", None) or 0) >= 1:
        parser.error(f"--ema {options.ema}: expected a decay between 0 and 1. For example: --ema 0.999")
    model = options.model
    is_path = model and (model.startswith((".", "/")) or model.endswith(".json") or model.count("/") > 1)
    if is_path and not Path(model).exists():
        parser.error(f"--model {model}: not found. Expected a folder, config.json or name, for example Qwen/Qwen3-4B")
    if "lr" in options:  # a recipe that trains
        if options.output.is_file():
            parser.error(f"--output {options.output}: expected a folder, got a file")
        if options.resume is not None:
            file = Path(options.resume or options.output)
            options.resume = file / "last.ckpt" if file.is_dir() or not options.resume else file
            if not options.resume.is_file():
                parser.error(f"--resume {options.resume}: not found. Expected last.ckpt of an earlier run")
    return options


@contextmanager
def errors_in_the_input(options: Any) -> Iterator[None]:
    """Reports them as wrong options are reported."""
    try:
        yield
    except (ValueError, OSError) as error:
        options.error(str(error))


# ---------------------------------------------------------------------- rows of text


def read_jsonl(file: Path, example: str, option: str = "--data") -> Iterator[tuple[str, Any]]:
    """The rows of a JSONL file. Each one has a text for errors, which says where it is."""
    if not file.is_file():
        raise ValueError(
            f"{option} {file}: {'found a folder' if file.is_dir() else 'not found'}. Expected a .jsonl file"
        )
    text = file.read_text(encoding="utf-8").rstrip("\n")
    if not text.strip():
        raise ValueError(f"{option} {file}: the file is empty. {example}")
    for number, line in enumerate(text.split("\n"), 1):
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{option} {file}, line {number}: not JSON ({error}). {example}") from error
        yield f"{option} {file}, line {number}", row


def read_rows(data: str | None) -> Iterable[dict[str, Any]]:
    """Rows of a file, of a folder of files, or of a dataset on the Hugging Face hub."""
    if data is None:
        return python_functions()
    path = Path(data)
    files = [file for file in ([path] if path.is_file() else sorted(path.rglob("*"))) if file.suffix in TEXT_FILES]
    if path.exists() and not files:
        raise ValueError(f"--data {data}: found no {', '.join(TEXT_FILES)} file. For example: --data my.jsonl")
    if not path.exists() and (data.startswith((".", "/")) or data.endswith((*TEXT_FILES, ".json", ".csv"))):
        raise ValueError(f"--data {data}: not found. For example: --data my.jsonl")
    return itertools.chain.from_iterable(map(_read_file, files)) if files else _load_dataset(data)


def _read_file(file: Path) -> Iterator[dict[str, Any]]:
    if file.suffix == ".parquet":
        yield from _load_dataset("parquet", data_files=str(file))
    elif file.suffix == ".txt":
        yield {"text": file.read_text(encoding="utf-8")}
    else:
        yield from (row for _, row in read_jsonl(file, TEXT_ROWS))


def _load_dataset(name: str, **options: Any) -> Any:
    try:
        import datasets
    except ImportError as error:
        raise ValueError(f"--data: {name} needs the package datasets. Run: pip install datasets") from error
    return datasets.load_dataset(name, split="train", **options)


def encode(row: dict[str, Any], tokenizer: Any) -> tuple[list[int], list[int]]:
    """The tokens of a row, and their labels: the same tokens, or IGNORED where they do not count in the loss."""
    begin, end = tokenizer.bos_token or "", tokenizer.eos_token or ""
    if not isinstance(row, dict):
        raise ValueError(f"found {type(row).__name__}, expected an object")
    if "messages" in row:
        parts = _chat_parts(row["messages"], tokenizer)
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


def _chat_parts(messages: list[dict[str, str]], tokenizer: Any) -> list[tuple[str, bool]]:
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


def pack(rows: Iterable[dict[str, Any]], tokenizer: Any, length: int) -> tuple[Any, Any]:
    """Windows of ``length`` tokens for validation (one row in 20, at most 64 windows) and for training.

    Rows are joined and cut into windows; the last window is filled up. A row that is longer than a window counts as several
    rows, one for each window that it fills. Position ids start from 0 at each row. From them, transformers makes attention
    masks that keep rows apart: a token attends only to its own row. (Layers that are not attention, as in Mamba, may mix
    rows.) A row that is cut continues in the next window from position 0, without its first part.
    """
    pieces: list[tuple[list[int], list[int], bool]] = []
    for number, row in enumerate(rows, 1):
        try:
            tokens, labels = encode(row, tokenizer)
        except Exception as error:  # chat templates raise their own errors
            raise ValueError(f"--data, row {number}: {error}. {TEXT_ROWS}") from error
        pieces += [(tokens[i : i + length], labels[i : i + length], i > 0) for i in range(0, len(tokens), length)]
    counted = [i for i, (_, labels, _) in enumerate(pieces) if any(label != IGNORED for label in labels[1:])]
    if len(counted) < 2:
        raise ValueError(
            f"--data: found {len(counted)} rows whose tokens count in the loss. Expected at least 2 rows, or one of more than "
            f"--length {length} tokens, because one is for validation. {TEXT_ROWS}"
        )
    held_out = counted[:: max(20, sum(len(tokens) for tokens, *_ in pieces) // length // 64)]
    training = sorted({*range(len(pieces))} - {*held_out})
    fill = tokenizer.eos_token_id or 0
    return _cut(pieces, held_out, length, fill)[:64], _cut(pieces, training, length, fill)


def _cut(pieces: list[tuple[list[int], list[int], bool]], chosen: list[int], length: int, fill: int) -> list[Any]:
    """Windows of the chosen pieces. A piece of which the last one is True continues the piece before it."""
    import torch

    tokens, labels, starts, before = list[int](), list[int](), list[bool](), -2
    for index in chosen:
        piece, targets, continues = pieces[index]
        start = not continues or before != index - 1
        tokens += piece
        labels += [IGNORED, *targets[1:]] if start else targets  # the token before the first one is of another row
        starts += [start] + [False] * (len(piece) - 1)
        before = index
    missing = -len(tokens) % length
    tokens, labels = tokens + [fill] * missing, labels + [IGNORED] * missing
    starts += [i == 0 for i in range(missing)]
    ids, targets_, new = (torch.tensor(each).view(-1, length) for each in (tokens, labels, starts))
    index_ = torch.arange(length).expand_as(ids)
    positions = index_ - torch.where(new, index_, 0).cummax(dim=1).values
    counted = (targets_[:, 1:] != IGNORED).any(dim=1)  # without any label, the mean loss of a window is not a number
    parts = zip(ids[counted], targets_[counted], positions[counted], strict=True)
    return [{"input_ids": part[0], "labels": part[1], "position_ids": part[2]} for part in parts]


def check_length(config: Any, options: Any) -> None:
    longest = getattr(config, "max_position_embeddings", options.length)
    if options.length > longest:
        raise ValueError(
            f"--length {options.length}: {options.model} reads at most {longest} tokens. For example: --length {longest}"
        )


# ---------------------------------------------------------------------- files of images and sound


def read_image_rows(data: Path) -> list[dict[str, Any]]:
    """Rows of "image" (a path), "question" and "answer"."""
    from PIL import Image

    rows = []
    for where, row in read_jsonl(data, IMAGE_ROW):
        try:
            row = dict(row)
            question, answer = row.get("question", row.get("prompt")), row.get("answer", row.get("completion"))
            if not (isinstance(row.get("image"), str) and isinstance(question, str) and isinstance(answer, str)):
                raise ValueError(f'found the columns {", ".join(row)}; expected texts "image", "question" and "answer"')
            with Image.open(data.parent / row["image"]):  # reads only the header
                rows.append({"image": data.parent / row["image"], "question": question, "answer": answer})
        except (ValueError, TypeError, OSError) as error:
            raise ValueError(f"{where}: {error}. {IMAGE_ROW}") from error
    return rows


def read_folder(folder: Path) -> Any:
    """torchvision's ImageFolder: a folder of images for each class. Checks the header of each image."""
    from PIL import Image
    from torchvision.datasets import ImageFolder

    try:
        images = ImageFolder(folder)
    except FileNotFoundError as error:
        raise ValueError(f"--data {folder}: {error}. Expected a folder of images for each class") from error
    if len(images.classes) < 2:
        raise ValueError(f"--data {folder}: found one class, {images.classes[0]}. Expected two or more folders")
    for file, _ in images.samples:
        try:
            Image.open(file).close()  # reads the header only
        except OSError as error:
            raise ValueError(f"--data: {file} is not a readable image ({error}). Remove it or replace it") from error
    return images


def read_pairs(folder: Path) -> list[tuple[Path, str]]:
    """Read the names of images, and their captions. Raises ValueError or OSError if something is missing."""
    from PIL import Image

    if not folder.is_dir():
        raise ValueError(f"--data {folder}: not a folder. Expected a folder of images with captions.")
    if (folder / "metadata.jsonl").is_file():
        lines = [json.loads(line) for line in (folder / "metadata.jsonl").read_text().splitlines() if line.strip()]
        if wrong := [line for line in lines if not {"file_name", "text"} <= set(line)]:
            raise ValueError(f'--data {folder}: metadata.jsonl has {wrong[0]}. Expected "file_name" and "text".')
        pairs = [(folder / line["file_name"], line["text"]) for line in lines]
    else:
        images = sorted(file for file in folder.iterdir() if file.suffix.lower() in (".png", ".jpg", ".jpeg", ".webp"))
        if without := [file for file in images if not file.with_suffix(".txt").is_file()]:
            caption = without[0].with_suffix(".txt").name
            raise ValueError(
                f"--data {folder}: {without[0].name} has no caption. Expected {caption} beside it, or metadata.jsonl."
            )
        pairs = [(file, file.with_suffix(".txt").read_text().strip()) for file in images]
    for file, _ in pairs:
        try:
            Image.open(file).verify()
        except (OSError, SyntaxError) as error:
            raise ValueError(f"--data {folder}: {file.name} is not a readable image ({error}).") from error
    if len(pairs) < 2:
        raise ValueError(f"--data {folder}: found {len(pairs)} images with captions. Expected at least 2.")
    return pairs


def read_wave(file: Path) -> Any:
    import numpy as np

    with wave.open(str(file)) as sound:
        samples = np.frombuffer(sound.readframes(sound.getnframes()), dtype="<i2")
        return samples.reshape(-1, sound.getnchannels()).mean(axis=1, dtype=np.float32) / 32768


def check_wave(file: Path, where: str, extractor: Any) -> None:
    rate, longest = extractor.sampling_rate, extractor.chunk_length
    convert = f"To convert: ffmpeg -i {file} -ar {rate} -c:a pcm_s16le {file.stem}-{rate}.wav"
    if not file.is_file():
        raise ValueError(f"{where}: {file} does not exist. Expected a WAV file, relative to the folder of --data")
    try:
        with wave.open(str(file)) as sound:
            width, found, seconds = (
                sound.getsampwidth(),
                sound.getframerate(),
                sound.getnframes() / sound.getframerate(),
            )
    except (wave.Error, EOFError) as error:
        raise ValueError(f"{where}: {file} is not a WAV file of integers ({error}). {convert}") from error
    if (width, found) != (2, rate):
        raise ValueError(
            f"{where}: {file} has {8 * width} bits at {found:,} Hz. Expected 16 bits at {rate:,} Hz. {convert}"
        )
    if not 0 < seconds <= longest:
        raise ValueError(
            f"{where}: {file} has {seconds:.1f} s. Expected more than 0 and at most {longest} s. To cut it: "
            f"ffmpeg -i {file} -f segment -segment_time {longest} -c copy {file.stem}-%03d.wav"
        )


# ---------------------------------------------------------------------- the run


def split(rows: Sequence[Any], spacing: int) -> tuple[Any, Any]:
    """One row in ``spacing`` for validation, and the others for training."""
    if len(rows) < 2:
        raise ValueError(f"--data: found {len(rows)} rows. Expected at least 2, because one is for validation")
    return list(rows[::spacing]), [row for i, row in enumerate(rows) if i % spacing]


class Run:
    """The steps of a run, validations, and what is saved. A resumed run continues with the rows that were not used yet.

    Args:
        count: number of rows for training. If a step needs more than there are, it uses some more than once.
    """

    def __init__(self, options: Any, count: int = 1) -> None:
        import torch

        self.options, self.count = options, count
        self.step_size = options.batch_size * getattr(options, "accumulate_grad_batches", 1)
        self.steps = options.steps or max(1, int(options.epochs * count / self.step_size))
        self.every = options.validate_every or max(1, self.steps // 10)
        self.done = torch.load(options.resume, mmap=True)["global_step"] if options.resume else 0
        if self.done >= self.steps:
            raise ValueError(
                f"--resume {options.resume}: has {self.done} of {self.steps} steps. For example: --steps {2 * self.done}"
            )
        self.begin = time.perf_counter()

    def sampler(self) -> list[int]:
        """The rows of the whole run: all in random order, then all in another order, and so on.

        If the run is resumed, it begins with the first unused row. The used ones move to the end, because Lightning
        counts them as read.
        """
        import torch

        random, total = torch.Generator().manual_seed(self.options.seed), self.steps * self.step_size
        orders = [torch.randperm(self.count, generator=random) for _ in range(1 + total // self.count)]
        return list(torch.cat(orders)[:total].roll(-self.done * self.step_size).tolist())

    def schedule(self, *callbacks: Any) -> dict[str, Any]:
        """Arguments of the trainer: a validation and a checkpoint before the first step, and after some steps each."""
        self.begin = time.perf_counter()
        return {
            "max_steps": self.steps,
            "max_epochs": -1,
            "val_check_interval": self.every * getattr(self.options, "accumulate_grad_batches", 1),
            "check_val_every_n_epoch": None,
            **outputs(self.options, callbacks, each_epoch=False),
        }

    @property
    def used(self) -> int:
        """Rows that this run trains on, without those before it was resumed."""
        return (self.steps - self.done) * self.step_size

    def finish(self, trainer: Any, module: Any, validation: Any, count: int, rows: str) -> None:
        """Validates and saves what the last validation has not seen, and prints where everything is."""
        last = self.options.output / "last.ckpt"
        if self.steps % self.every:
            trainer.save_checkpoint(last)
            trainer.validate(module, validation, verbose=False)
        seconds = time.perf_counter() - self.begin
        print(f"Trained on {count:,} {rows} in {seconds:.0f} s ({count / seconds:,.1f} per second, with validation).")
        print(f"Checkpoint: {last}. Losses: {self.options.output / 'logs'}.")
        print(f"To continue, repeat the command with --resume --steps {2 * self.steps}.")


def outputs(options: Any, callbacks: Sequence[Any] = (), *, each_epoch: bool) -> dict[str, Any]:
    """Arguments of the trainer: after each validation a line and one checkpoint; losses in a CSV file."""
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.loggers import CSVLogger

    saved: Any = {"filename": "last", "save_on_train_epoch_end": each_epoch, "enable_version_counter": False}
    return {
        "callbacks": [*callbacks, *_reporter(options), _printer(), ModelCheckpoint(options.output, **saved)],
        "logger": CSVLogger(options.output, name="logs"),
        "log_every_n_steps": 10,
        "num_sanity_val_steps": -1,  # validates before the first step, too
        "enable_progress_bar": sys.stdout.isatty(),
        "enable_model_summary": False,
    }


def prepare(options: Any, precision: str = "bf16-mixed") -> None:
    """Chooses the precision and the threads, seeds, and leaves out warnings that do not matter here.

    On a CPU, default models run in one thread and in float32. Their operators are small, and several threads mostly wait for each
    other: beside two busy processes on two cores, a step took 10 s, and 0.5 s in one thread. Optimizer steps use as many threads
    as torch. A CPU with AVX2 alone, which has no instructions for bfloat16, took ten times as long for it as for float32.
    """
    import lightning.pytorch as pl
    import torch

    on_cpu = options.accelerator == "cpu" or (options.accelerator == "auto" and not torch.accelerator.is_available())
    if options.model is None and on_cpu:
        torch.set_num_threads(1)
        options.precision = options.precision or "32-true"
    options.precision = options.precision or precision
    # The newest transformers have another name for gradient_checkpointing_enable. Small data need no workers.
    ignored = "gradient_checkpointing_enable|does not have many workers|Checkpoint directory|number of training batches"
    warnings.filterwarnings("ignore", message=f".*({ignored})")
    pl.seed_everything(options.seed, verbose=False)


def settings(options: Any) -> dict[str, Any]:
    """Arguments of the trainer that change numbers, also for ``measure``."""
    names = ("accelerator", "precision", "accumulate_grad_batches")
    return {
        **{name: getattr(options, name, 1) for name in names},
        "gradient_clip_val": getattr(options, "gradient_clip", None) or None,
    }


def measure(options: Any, make_module: Any, data: Any, **more: Any) -> Any:
    """Runs the same model with plain Lightning and with some k and k': memory and time."""
    from sp_lightning import dial

    name = Path(sys.argv[0]).stem
    return dial(make_module, lambda: data, trainer=settings(options), name=name, gpu_memory=options.gpu_memory, **more)


def add_lora(model: Any, options: Any, **targets: Any) -> Any:
    """The model with adapters by PEFT, which freezes it."""
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(r=options.lora, lora_alpha=2 * options.lora, **targets))


def load_dtype(options: Any) -> Any:
    """``bf16-mixed`` computes in bfloat16. Weights that it trains stay in float32, frozen ones need only bfloat16."""
    import torch

    half = options.precision == "bf16-true" or (options.precision == "bf16-mixed" and options.lora)
    return torch.bfloat16 if half else torch.float32


def check_resume(options: Any, module: Any) -> None:
    """Ends the program if the checkpoint is not of this model, or if that run trained other weights."""
    import torch

    if not options.resume:
        return
    checkpoint = torch.load(options.resume, mmap=True)
    saved = {name: value.shape for name, value in checkpoint["state_dict"].items()}
    if options.strategy == "superpipeline":  # which may have left out frozen weights
        frozen = {name: p.shape for name, p in module.named_parameters(remove_duplicate=False) if not p.requires_grad}
        saved = frozen | saved
    trained = sum(len(group["params"]) for group in checkpoint["optimizer_states"][0]["param_groups"])
    same = saved == {name: value.shape for name, value in module.state_dict().items()}
    if not same or trained != sum(p.requires_grad for p in module.parameters()):
        other = next(f"--{name.replace('_', '-')}" for name in ("head_only", "full", "lora") if name in options)
        options.error(
            f"--resume {options.resume}: a checkpoint of another model or of a run with other options ({other}). "
            "Expected last.ckpt of a run with the same options"
        )


def _reporter(options: Any) -> list[Any]:
    """The callback that writes ``--report``, in a list that is empty without it."""
    if not getattr(options, "report", None):
        return []
    from sp_lightning import SuperpipelineCallback

    return [SuperpipelineCallback(report=options.report)]


def _printer() -> Any:
    """A callback that prints a line after each validation."""
    from lightning.pytorch.callbacks import LambdaCallback

    begin: list[Any] = []

    def start(trainer: Any, module: Any) -> None:
        begin[:] = trainer.global_step, time.perf_counter()

    def show(trainer: Any, module: Any) -> None:
        step, most = trainer.global_step, trainer.max_steps
        steps = most if most > 0 else int(trainer.estimated_stepping_batches)
        shown = [f" {name} {loss:.3f}" for name, loss in sorted(trainer.callback_metrics.items())]
        if trainer.state.fn == "fit" and begin and step > begin[0]:
            left = (time.perf_counter() - begin[1]) / (step - begin[0]) * (steps - step)
            shown.append(f" {left:.0f} s left")
        print(f"step {step}/{steps}", *shown, flush=True)

    return LambdaCallback(on_train_start=start, on_validation_epoch_end=show)


def cached_images(options: Any, pairs: list[tuple[Path, str]], grid: int) -> tuple[list[Any], Any]:
    """For each image the file of what is computed from it once, and its size, with about the image's aspect ratio.

    Args:
        grid: each side is a multiple of it, in pixels.

    Returns:
        Files and sizes; and for each file that does not exist: the image, the caption, the file, the width, the height.
    """
    from PIL import Image, ImageOps

    cache, items, missing = options.output / "cache", list[Any](), list[Any]()
    cache.mkdir(parents=True, exist_ok=True)
    for file, caption in pairs:
        width, height = ImageOps.exif_transpose(Image.open(file)).size
        sides = (options.resolution * (width / height) ** power for power in (0.5, -0.5))
        width, height = (max(1, round(side / grid)) * grid for side in sides)
        key = repr((options.model, options.precision, width, height, caption)).encode() + file.read_bytes()
        target = cache / f"{hashlib.sha256(key).hexdigest()[:32]}.pt"
        items.append((target, (width, height)))
        if not target.is_file():
            missing.append((str(file), caption, str(target), width, height))
    return items, missing


class Shuffled:
    """A sampler: the rows of an epoch in random order, each with a seed for its augmentation, the same after a resume."""

    def __init__(self, count: int, seed: int) -> None:
        self.count, self.seed, self.epoch = count, seed, 0

    def set_epoch(self, epoch: int) -> None:  # called by Lightning
        self.epoch = epoch

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[tuple[int, int]]:
        import torch

        random = torch.Generator().manual_seed(1_000_000 * self.seed + self.epoch)
        seeds = torch.randint(2**60, (self.count,), generator=random)
        return zip(torch.randperm(self.count, generator=random).tolist(), seeds.tolist(), strict=True)


class Seeded:
    """A dataset whose augmentations have given seeds."""

    def __init__(self, images: Any) -> None:
        self.images = images

    def __getitem__(self, item: tuple[int, int]) -> Any:
        import torch

        index, seed = item
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            return self.images[index]


def batches_of_one_size(sizes: Sequence[Any], batch_size: int, count: int, seed: int) -> list[list[int]]:
    """``count`` batches of rows that have one size. Each row is used once before any is used again.

    The last batch of a size may be smaller than ``batch_size``.
    """
    order, found = random.Random(seed), list[list[int]]()
    while len(found) < count:
        batches = []
        for size in sorted(set(sizes)):
            rows = [row for row, each in enumerate(sizes) if each == size]
            order.shuffle(rows)
            batches += [rows[i : i + batch_size] for i in range(0, len(rows), batch_size)]
        order.shuffle(batches)
        found += batches
    return found[:count]


# ---------------------------------------------------------------------- small default data, made without downloads


def python_functions() -> Iterator[dict[str, Any]]:
    """Functions of Python's standard library as questions, their docstrings as answers."""
    for path in sorted(Path(ast.__file__).parent.glob("[a-z]*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and (answer := ast.get_docstring(node)):
                question = f"What does {path.stem}.{node.name}({ast.unparse(node.args)}) do?"
                yield {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def write_digits(folder: Path) -> Path:
    """1,797 handwritten digits of 8 × 8 pixels, which are a part of scikit-learn, in a folder for each digit."""
    from PIL import Image
    from sklearn.datasets import load_digits

    digits = load_digits()
    for number, (pixels, label) in enumerate(zip(digits.images, digits.target, strict=True)):
        (folder / str(label)).mkdir(parents=True, exist_ok=True)
        Image.fromarray((pixels * 15.9).astype("uint8")).save(folder / str(label) / f"{number:04}.png")
    return folder


def digits_and_photographs() -> list[dict[str, Any]]:
    """1,797 handwritten digits, and crops of two photographs, which are parts of scikit-learn."""
    import torch
    from PIL import Image
    from sklearn.datasets import load_digits, load_sample_image

    digits = load_digits()
    rows = []
    for pixels, label in zip(digits.images, digits.target, strict=True):
        image = Image.fromarray((255 - pixels * 15.9).astype("uint8")).convert("RGB")
        rows.append({"image": image, "question": "Which digit is this?", "answer": DIGITS[label]})
    random = torch.Generator().manual_seed(0)
    for name, answer in (("china.jpg", "a temple in china"), ("flower.jpg", "a flower in a garden")):
        photograph = Image.fromarray(load_sample_image(name))
        for _ in range(100):
            left, top = (int(torch.randint(side - 200, (), generator=random)) for side in photograph.size)
            crop = photograph.crop((left, top, left + 200, top + 200)).resize((64, 64))
            rows.append({"image": crop, "question": "What is this?", "answer": answer})
    return [rows[i] for i in torch.randperm(len(rows), generator=random).tolist()]


def write_tones(folder: Path) -> Path:
    """1,024 recordings of one to three telephone keys. Each key has a low tone and a high one (DTMF)."""
    import numpy as np

    folder.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(0)
    rows = []
    for number in range(1024):
        digits = random.integers(0, 10, size=random.integers(1, 4))
        sound = [np.zeros(random.integers(1_000, 8_000))]
        for digit in digits:
            row, column = (3, 1) if digit == 0 else divmod(digit - 1, 3)
            times = np.arange(random.integers(2_400, 4_800)) / 16_000
            hertz = (697, 770, 852, 941)[row], (1209, 1336, 1477)[column]
            tones = [np.sin(2 * np.pi * each * times) for each in hertz]
            sound += [random.uniform(0.1, 0.4) * np.sum(tones, axis=0), np.zeros(random.integers(800, 3_200))]
        samples = np.concatenate(sound)
        samples += random.normal(scale=0.01, size=samples.shape)
        with wave.open(str(folder / f"{number:04}.wav"), "wb") as file:
            file.setnchannels(1)
            file.setsampwidth(2)
            file.setframerate(16_000)
            file.writeframes((samples.clip(-1, 1) * 32767).astype("<i2").tobytes())
        rows.append(json.dumps({"audio": f"{number:04}.wav", "text": " ".join(map(str, digits))}))
    (folder / "rows.jsonl").write_text("\n".join(rows))
    return folder / "rows.jsonl"


def draw_shapes(folder: Path) -> Path:
    """96 images of coloured shapes, with their captions."""
    from PIL import Image, ImageDraw

    folder.mkdir(parents=True, exist_ok=True)
    chance, corners = random.Random(0), {"circle": 60, "square": 4, "triangle": 3}
    for number in range(96):
        colour, shape = chance.choice(["red", "green", "blue", "yellow"]), chance.choice([*corners])
        width, height = chance.choice([(64, 64), (96, 64), (64, 96)])
        circle = chance.uniform(24, width - 24), chance.uniform(24, height - 24), chance.uniform(14, 22)
        image = Image.new("RGB", (width, height), "white")
        ImageDraw.Draw(image).regular_polygon(circle, corners[shape], fill=colour)
        image.save(folder / f"{number:02}.png")
        (folder / f"{number:02}.txt").write_text(f"a {colour} {shape}")
    return folder


# ---------------------------------------------------------------------- small default models, with random weights


def byte_pairs(texts: Iterable[str], size: int, special: Sequence[str] = (), **more: Any) -> Any:
    """A tokenizer that is trained on texts. Its token 0 ends a text."""
    from tokenizers import ByteLevelBPETokenizer, Tokenizer
    from transformers import PreTrainedTokenizerFast

    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(texts, vocab_size=size, special_tokens=["<|end|>", *special], show_progress=False)
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(bpe.to_str()), eos_token="<|end|>", **more)


def small_tokenizer() -> Any:
    """Byte-level BPE with 2048 tokens, trained on the default data, with a chat template."""
    texts = (message["content"] for row in python_functions() for message in row["messages"])
    tokenizer = byte_pairs(texts, 2048, ["<|user|>", "<|assistant|>", "<|system|>"])
    tokenizer.chat_template = (
        "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    return tokenizer


def small_llama(tokenizer: Any, longest: int = 2048) -> Any:
    from transformers import LlamaConfig

    size = {"hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": 6, "num_attention_heads": 4}
    size |= {"vocab_size": len(tokenizer), "max_position_embeddings": max(longest, 256)}
    return LlamaConfig(bos_token_id=None, eos_token_id=tokenizer.eos_token_id, **size)


def small_qwen_moe(tokenizer: Any, longest: int) -> Any:
    """16 experts in each of 4 blocks, 2 for each token."""
    from transformers import Qwen3MoeConfig

    size = {"hidden_size": 128, "moe_intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
    size |= {"num_key_value_heads": 4, "head_dim": 32, "num_experts": 16, "num_experts_per_tok": 2}
    size |= {"vocab_size": len(tokenizer), "max_position_embeddings": max(longest, 256)}
    return Qwen3MoeConfig(eos_token_id=tokenizer.eos_token_id, **size)


def small_llava(pixels: int = 32, patch: int = 8) -> tuple[Any, Any]:
    """Config and processor of a CLIP vision tower, a projector and a Llama."""
    from transformers import CLIPImageProcessor, CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaProcessor

    texts = ["Which digit is this?", "What is this?", "a temple in china", "a flower in a garden", *DIGITS]
    special = {"pad_token": "<|end|>", "additional_special_tokens": ["<image>"]}
    tokenizer = byte_pairs(texts, 512, ["<image>"], **special)
    size = {"height": pixels, "width": pixels}
    processor = LlavaProcessor(
        image_processor=CLIPImageProcessor(size=size, crop_size=size, do_center_crop=False),
        tokenizer=tokenizer,
        patch_size=patch,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,  # CLIP's class token, which "default" leaves out again
        chat_template="{% for message in messages %}{% for part in message['content'] %}"
        "{% if part['type'] == 'image' %}<image>{% else %}{{ part['text'] }}{% endif %}{% endfor %}{{ '\\n' }}{% endfor %}",
    )
    width: Any = {"hidden_size": 96, "intermediate_size": 288, "num_hidden_layers": 3, "num_attention_heads": 6}
    tokens: Any = {"bos_token_id": None, "eos_token_id": 0, "pad_token_id": 0, "vocab_size": len(tokenizer)}
    config = LlavaConfig(
        vision_config=CLIPVisionConfig(**width, image_size=pixels, patch_size=patch),
        text_config=LlamaConfig(**width, max_position_embeddings=128, **tokens),
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        image_seq_length=(pixels // patch) ** 2,
    )
    return config, processor


def small_whisper() -> tuple[Any, Any, Any]:
    """Config, feature extractor and tokenizer, for 3 s of sound in place of 30 s."""
    from transformers import ByT5Tokenizer, WhisperConfig, WhisperFeatureExtractor

    tokenizer = ByT5Tokenizer()  # bytes
    size: Any = {f"{part}_{name}": value for part in ("encoder", "decoder")
                 for name, value in (("layers", 2), ("ffn_dim", 256), ("attention_heads", 4))}  # fmt: skip
    size |= {
        "d_model": 64,
        "num_mel_bins": 40,
        "max_source_positions": 150,
        "max_target_positions": 32,
        "init_std": 0.1,
    }
    ids = {"pad_token_id": 0, "bos_token_id": 0, "decoder_start_token_id": 0, "eos_token_id": tokenizer.eos_token_id}
    config = WhisperConfig(vocab_size=len(tokenizer), **size, **ids)
    return config, WhisperFeatureExtractor(feature_size=40, chunk_length=3), tokenizer


def small_vit(classes: int) -> Any:
    """A model of timm, for images of 32 × 32 pixels."""
    import timm

    small: dict[str, Any] = {"img_size": 32, "patch_size": 8, "embed_dim": 96, "depth": 4, "num_heads": 3}
    small |= {"global_pool": "avg", "class_token": False, "fc_norm": False}
    config = {"input_size": (3, 32, 32), "mean": (0.5,) * 3, "std": (0.5,) * 3}
    return timm.create_model("vit_tiny_patch16_224", num_classes=classes, pretrained_cfg_overlay=config, **small)


VAE_STEPS = 200


def small_flux(folder: Path, pairs: list[tuple[Path, str]], seed: int) -> Path:
    """A folder with a Flux pipeline. Its VAE is trained on images for some seconds, so that samples are images."""
    if (folder / "model_index.json").is_file():
        return folder
    import lightning.pytorch as pl
    import torch
    from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel
    from diffusers.image_processor import VaeImageProcessor
    from PIL import Image
    from transformers import ByT5Tokenizer, CLIPTextConfig, CLIPTextModel, T5Config, T5EncoderModel

    print("Making a tiny model", flush=True)
    pl.seed_everything(seed, verbose=False)
    vae = AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
        block_out_channels=(8, 16), norm_num_groups=4, latent_channels=4, mid_block_add_attention=False,
        use_quant_conv=False, use_post_quant_conv=False,
    )  # fmt: skip
    images = [Image.open(file).convert("RGB") for file, _ in pairs[:96]]
    pixels = VaeImageProcessor().preprocess(images, 32, 32, resize_mode="crop")
    optimizer = torch.optim.AdamW(vae.parameters(), lr=5e-3)
    for _ in range(VAE_STEPS):
        batch = pixels[torch.randint(len(pixels), (8,))]
        torch.nn.functional.mse_loss(vae.decode(vae.encode(batch).latent_dist.mode()).sample, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    latents = vae.encode(pixels).latent_dist.mode()
    vae.register_to_config(shift_factor=latents.mean().item(), scaling_factor=1 / latents.std().item())
    tokenizer = ByT5Tokenizer(model_max_length=32)
    sizes: Any = {"vocab_size": len(tokenizer), "num_hidden_layers": 2, "pad_token_id": 0, "eos_token_id": 1}
    clip = CLIPTextConfig(
        **sizes, hidden_size=32, intermediate_size=64, num_attention_heads=4, max_position_embeddings=32, bos_token_id=0
    )
    transformer = FluxTransformer2DModel(
        in_channels=16, num_layers=2, num_single_layers=4, attention_head_dim=16, num_attention_heads=4,
        joint_attention_dim=32, pooled_projection_dim=32, guidance_embeds=True, axes_dims_rope=(4, 6, 6),
    )  # fmt: skip
    t5 = T5EncoderModel(T5Config(**sizes, d_model=32, d_kv=8, d_ff=64, num_heads=4))
    text_encoders = CLIPTextModel(clip), tokenizer, t5, tokenizer
    FluxPipeline(FlowMatchEulerDiscreteScheduler(), vae, *text_encoders, transformer).save_pretrained(folder)
    return folder
