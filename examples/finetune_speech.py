"""Fine-tune Whisper on your recordings, on a GPU that is smaller than the model. One file, to copy and to change.

    python examples/finetune_speech.py                              # a small model on telephone tones, without downloads
    python examples/finetune_speech.py --model openai/whisper-large-v3 --data my.jsonl --language english \\
        --batch-size 8 --accumulate-grad-batches 2                  # every weight, on a 24 GB card
    python examples/finetune_speech.py --model openai/whisper-large-v3 --data my.jsonl --language english --lora 16
    python examples/finetune_speech.py --resume runs/finetune_speech/last.ckpt    # continue an interrupted run
    python examples/finetune_speech.py --strategy auto              # plain Lightning, for comparison

Rows of ``--data`` are ``{"audio": "x.wav", "text": "what is said"}``. Files are relative to the JSONL file: WAV, 16 bits,
one channel or more, at the model's sampling rate (Whisper: 16 kHz), at most 30 s. The default data are synthesized:
the tones of telephone keys, and the digits of the keys as text. They show that training works, not that it works on speech.

Time and memory of the second command on a 24 GB card, *estimated* for 100 TFLOP/s and 25 GB/s over PCIe:

    python -m sp_lightning plan examples/shapes/whisper-large-v3.json --batch-size 8 --tokens 128 --gradient-checkpointing \\
        --gradient-clip norm --accumulate-grad-batches 2 --gpu-memory 22GiB --host-memory 62GiB
        # 1.52 s per batch, 673 tokens/s, device memory 3.9 GiB, host memory 26.5 GiB; plain Lightning needs 28.7 GiB

With ``--lora 16``, plain Lightning (``--strategy auto``) fits a 24 GB card (*estimated*: 6.2 GiB), and is faster.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
import wave
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROW = 'For example: {"audio": "x.wav", "text": "what is said"}'

# ---------------------------------------------------------------------- options


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    add = parser.add_argument
    add("--model", help="hub name or folder of a Whisper model (default: a small one, random weights)")
    add("--data", type=Path, help='JSONL file, rows {"audio": ..., "text": ...} (default: synthesized telephone tones)')
    add("--language", help="of the text, for multilingual models, for example english")
    add(
        "--task",
        choices=["transcribe", "translate"],
        help="for multilingual models: transcribe, or translate to English",
    )
    add("--batch-size", type=int, default=8, help="recordings per batch (%(default)s)")
    add("--accumulate-grad-batches", type=int, default=1, help="batches per optimizer step (%(default)s)")
    add("--epochs", type=float, help="passes over the data (default: 3 with --data, else 6)")
    add("--steps", type=int, help="optimizer steps, in place of --epochs")
    add("--every", type=int, help="steps between validations and checkpoints (default: a tenth of all)")
    add("--lr", type=float, help="peak learning rate (default: 1e-3 with --lora, 1e-5 with --model, else 2e-3)")
    add("--lora", type=int, metavar="RANK", help="train LoRA adapters (PEFT) of this rank, and no other weights")
    add("--gradient-checkpointing", action=argparse.BooleanOptionalAction, default=True, help="the model's own (on)")
    add("--precision", default="bf16-mixed", choices=["bf16-mixed", "bf16-true", "32-true"], help="(%(default)s)")
    add("--strategy", default="superpipeline", choices=["superpipeline", "auto"], help="auto is plain (%(default)s)")
    add("--gpu-memory", help="at most, for example 16GiB (default: free memory)")
    add("--accelerator", default="auto", help="as in Lightning (%(default)s)")
    add("--workers", type=int, default=0, help="processes that read recordings (%(default)s)")
    add("--seed", type=int, default=0, help="(%(default)s)")
    add("--resume", type=Path, help="last.ckpt of a run with the same options")
    add("--output", type=Path, default=Path("runs/finetune_speech"), help="(%(default)s)")
    return parser


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Reads the options, and reports errors that show without a model."""
    parser = make_parser()
    options = parser.parse_args(argv)
    for name in ("batch_size", "accumulate_grad_batches", "epochs", "steps", "every", "lr", "lora"):
        value = getattr(options, name)
        if value is not None and value <= 0:
            parser.error(f"--{name.replace('_', '-')} {value}: expected a number above 0")
    if options.data and not options.data.is_file():
        parser.error(f"--data {options.data}: not a file. Expected a JSONL file. {ROW}")
    if (options.language or options.task) and not options.model:
        parser.error("--language and --task: need --model. For example: --model openai/whisper-small")
    if options.resume and not options.resume.is_file():
        parser.error(f"--resume {options.resume}: not a file. Expected last.ckpt of an earlier run")
    if options.output.is_file():
        parser.error(f"--output {options.output}: expected a folder, got a file")
    return options


if __name__ == "__main__":
    parse()  # reports wrong options before the slow imports that follow; main() reads them again

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset
from transformers import AutoConfig, AutoTokenizer, ByT5Tokenizer, WhisperConfig, WhisperFeatureExtractor
from transformers import WhisperForConditionalGeneration as Whisper
from transformers import get_cosine_schedule_with_warmup as cosine_with_warmup

from sp_lightning import SuperpipelineStrategy

IGNORED = -100  # a label that does not count in the loss
TONES = Path("runs/tones")

# ---------------------------------------------------------------------- training


class FineTune(pl.LightningModule):
    """Plain Lightning: only ``Trainer(strategy=...)`` decides where the layers are."""

    def __init__(self, model: Any, lr: float, steps: int) -> None:
        super().__init__()
        self.model, self.lr, self.steps = model, lr, steps

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = self.model(**batch, use_cache=False).loss  # the mean over the labels of this batch
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.model(**batch, use_cache=False).loss, batch_size=len(batch["labels"]))

    def on_validation_epoch_end(self) -> None:
        losses = sorted(self.trainer.callback_metrics.items())
        print(f"step {self.global_step}/{self.steps}", *(f" {name} {loss:.3f}" for name, loss in losses), flush=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=self.lr)
        schedule = cosine_with_warmup(optimizer, self.steps // 20, self.steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


# ---------------------------------------------------------------------- data


class Recordings(Dataset[dict[str, Tensor]]):
    """Reads recordings when they are needed: the features of the sound, and the labels of the text."""

    def __init__(self, rows: list[tuple[Path, list[int]]], extractor: Any) -> None:
        self.rows, self.extractor = rows, extractor

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        file, labels = self.rows[index]
        features = self.extractor(read_wave(file), sampling_rate=self.extractor.sampling_rate, return_tensors="pt")
        return {"input_features": features.input_features[0], "labels": torch.tensor(labels)}


def collate(items: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Features have one size, because Whisper pads each recording to 30 s. Labels are padded with IGNORED."""
    features = torch.stack([item["input_features"] for item in items])
    labels = pad_sequence([item["labels"] for item in items], batch_first=True, padding_value=IGNORED)
    return {"input_features": features, "labels": labels}


def read_wave(file: Path) -> np.ndarray:
    with wave.open(str(file)) as sound:
        samples = np.frombuffer(sound.readframes(sound.getnframes()), dtype="<i2")
        return samples.reshape(-1, sound.getnchannels()).mean(axis=1, dtype=np.float32) / 32768


def read_rows(data: Path, config: Any, extractor: Any, tokenizer: Any) -> list[tuple[Path, list[int]]]:
    """Files and labels. Checks each row and the header of each file."""
    rows = []
    for number, line in enumerate(data.read_text(encoding="utf-8").rstrip("\n").split("\n"), 1):
        where = f"--data {data}, line {number}"
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{where}: not JSON ({error}). {ROW}") from error
        if not (isinstance(row, dict) and all(isinstance(row.get(name), str) for name in ("audio", "text"))):
            raise ValueError(f'{where}: expected "audio" and "text", got {line[:80]}. {ROW}')
        check_wave(file := data.parent / row["audio"], where, extractor)
        labels = tokenizer(row["text"])["input_ids"]
        if labels[0] == config.decoder_start_token_id:  # the model puts it in front
            labels = labels[1:]
        if len(labels) > config.max_target_positions:
            raise ValueError(
                f"{where}: the text has {len(labels)} tokens. Expected at most {config.max_target_positions}. Cut it and "
                "its recording into shorter ones"
            )
        rows.append((file, labels))
    return rows


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


def write_tones(folder: Path) -> Path:
    """The default data: 512 recordings of one to three telephone keys. Each key has a low tone and a high one (DTMF)."""
    folder.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(0)
    rows = []
    for number in range(512):
        digits = random.integers(0, 10, size=random.integers(1, 4))
        sound = [np.zeros(random.integers(1_000, 8_000))]
        for digit in digits:
            row, column = (3, 1) if digit == 0 else divmod(digit - 1, 3)
            times = np.arange(random.integers(2_400, 4_800)) / 16_000
            tones = [
                np.sin(2 * np.pi * hertz * times) for hertz in ((697, 770, 852, 941)[row], (1209, 1336, 1477)[column])
            ]
            sound += [random.uniform(0.1, 0.4) * np.sum(tones, axis=0), np.zeros(random.integers(800, 3_200))]
        samples = np.concatenate(sound)
        samples += random.normal(scale=0.01, size=samples.shape)
        with wave.open(str(folder / f"{number:03}.wav"), "wb") as file:
            file.setnchannels(1)
            file.setsampwidth(2)
            file.setframerate(16_000)
            file.writeframes((samples.clip(-1, 1) * 32767).astype("<i2").tobytes())
        rows.append(json.dumps({"audio": f"{number:03}.wav", "text": " ".join(map(str, digits))}))
    (folder / "rows.jsonl").write_text("\n".join(rows))
    return folder / "rows.jsonl"


# ---------------------------------------------------------------------- model


def read_config(options: argparse.Namespace) -> tuple[Any, Any, Any]:
    """The model's config, its feature extractor, and its tokenizer. Weights are loaded after all input has been checked."""
    if options.model is None:  # a small Whisper, for 3 s of sound in place of 30 s
        size: dict[str, Any] = {
            "d_model": 64,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_ffn_dim": 256,
            "decoder_ffn_dim": 256,
        }
        size |= {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "num_mel_bins": 40}
        size |= {"max_source_positions": 150, "max_target_positions": 32, "init_std": 0.1}
        tokenizer = ByT5Tokenizer()  # bytes
        ids = {
            "pad_token_id": 0,
            "bos_token_id": 0,
            "decoder_start_token_id": 0,
            "eos_token_id": tokenizer.eos_token_id,
        }
        config = WhisperConfig(vocab_size=len(tokenizer), **size, **ids)
        return config, WhisperFeatureExtractor(feature_size=40, chunk_length=3), tokenizer
    path = Path(options.model)
    local = options.model.startswith((".", "/")) or options.model.count("/") > 1 or path.exists()
    if local and not (path / "config.json").is_file():
        raise ValueError(
            f"--model {options.model}: expected a folder with config.json, or a hub name, for example openai/whisper-small"
        )
    config = AutoConfig.from_pretrained(options.model)
    if not isinstance(config, WhisperConfig):
        raise ValueError(f"--model {options.model}: expected a Whisper model, got {config.model_type}")
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    if options.language or options.task:
        tokenizer.set_prefix_tokens(language=options.language, task=options.task)
    return config, WhisperFeatureExtractor.from_pretrained(options.model), tokenizer


def load_model(options: argparse.Namespace, config: Any) -> Any:
    """The model on the CPU. The strategy copies layers to the GPU when they are needed."""
    # bf16-mixed computes in bfloat16. Weights that are trained stay in float32, frozen ones need no more than bfloat16.
    half = options.precision == "bf16-true" or (options.precision == "bf16-mixed" and options.lora)
    dtype = torch.bfloat16 if half else torch.float32
    model = Whisper.from_pretrained(options.model, dtype=dtype) if options.model else Whisper(config).to(dtype)
    if options.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if options.lora:
        from peft import LoraConfig, get_peft_model

        size = {"r": options.lora, "lora_alpha": 2 * options.lora}
        model = get_peft_model(model, LoraConfig(target_modules="all-linear", **size))
    return model.train()  # from_pretrained returns it in evaluation mode, and Lightning keeps the mode


# ---------------------------------------------------------------------- the run


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


def main(argv: Sequence[str] | None = None) -> FineTune:
    options = parse(argv)
    try:  # reports errors in the input before any work
        strategy: Any = options.strategy
        if strategy == "superpipeline":  # other options: keep_on_gpu, k, optimizer_on, ... (examples/guide/options.md)
            strategy = SuperpipelineStrategy(gpu_memory=options.gpu_memory, save_frozen=not options.lora)
        config, extractor, tokenizer = read_config(options)
        rows = read_rows(options.data or write_tones(TONES), config, extractor, tokenizer)
        spacing = max(10, len(rows) // 256)  # one recording in 10 is for validation, 256 at most
        held_out, training = rows[::spacing], [row for i, row in enumerate(rows) if i % spacing]
        step_size = options.batch_size * options.accumulate_grad_batches
        if len(training) < step_size:
            raise ValueError(
                f"--data has {len(training)} recordings for training. Expected at least {step_size}: --batch-size × "
                "--accumulate-grad-batches. Lower one of them, or give more data"
            )
        epochs = options.epochs or (3 if options.data else 6)
        steps = options.steps or max(1, int(epochs * len(training) / step_size))
        done = torch.load(options.resume, mmap=True)["global_step"] if options.resume else 0
        if done >= steps:
            raise ValueError(f"--resume {options.resume}: has {done} of {steps} steps. For example: --steps {2 * done}")
    except (ValueError, OSError) as error:
        make_parser().error(str(error))

    # The newest transformers have another name for gradient_checkpointing_enable. Small data need no workers.
    ignored = "gradient_checkpointing_enable|does not have many workers|Checkpoint directory"
    warnings.filterwarnings("ignore", message=f".*({ignored})")
    pl.seed_everything(options.seed, verbose=False)
    lr = options.lr or (1e-3 if options.lora else 1e-5 if options.model else 2e-3)
    module = FineTune(load_model(options, config), lr, steps)
    if options.resume and not fits(options.resume, module, options.strategy):
        make_parser().error(
            f"--resume {options.resume}: a checkpoint of another model or of a run with other options (--lora). Expected "
            "last.ckpt of a run with the same options"
        )

    # The recordings of the whole run: all in random order, then all in another order, and so on. If the run is resumed,
    # it begins with the first unused one. The used ones move to the end, because Lightning counts them as read.
    random = torch.Generator().manual_seed(options.seed)
    orders = [torch.randperm(len(training), generator=random) for _ in range(1 + steps * step_size // len(training))]
    order = torch.cat(orders)[: steps * step_size]
    loading: dict[str, Any] = {"collate_fn": collate, "num_workers": options.workers}
    sampler: Any = order.roll(-done * step_size).tolist()
    batches = DataLoader(Recordings(training, extractor), options.batch_size, sampler=sampler, **loading)
    validation = DataLoader(Recordings(held_out, extractor), options.batch_size, **loading)

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
    for part in (module.model, extractor, tokenizer):
        part.save_pretrained(saved)
    count = (trainer.global_step - done) * step_size
    print(f"Trained on {count:,} recordings in {seconds:.0f} s ({count / seconds:,.1f} per second, with validation).")
    print(f"Saved: {saved}. Checkpoint: {last}. Losses: {options.output / 'logs'}.")
    print(f"To continue, repeat the command with --resume {last} --steps {2 * steps}.")
    return module


if __name__ == "__main__":
    main()
