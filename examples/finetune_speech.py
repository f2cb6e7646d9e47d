"""Fine-tune Whisper on your recordings, on a GPU that is smaller than the model. Copy it with common.py.

    python examples/finetune_speech.py                              # a small model on telephone tones, without downloads
    python examples/finetune_speech.py --model openai/whisper-large-v3 --data my.jsonl --language english \\
        --batch-size 8 --accumulate-grad-batches 2                  # every weight, on a 24 GB card
    python examples/finetune_speech.py --model openai/whisper-large-v3 --data my.jsonl --language english --lora 16
    python examples/finetune_speech.py --resume                     # continue; or --dial, or --strategy auto (plain Lightning)

Rows of ``--data`` are ``{"audio": "x.wav", "text": "what is said"}``. Files are relative to the JSONL file: WAV, 16 bits,
one channel or more, at the model's sampling rate (Whisper: 16 kHz), at most 30 s. The default data are synthesized:
the tones of telephone keys, and the digits of the keys as text. They show that training works, not that it works on speech.

Time and memory of the second command on a 24 GB card, *estimated* for 100 TFLOP/s and 25 GB/s over PCIe:

    superpipeline plan examples/shapes/whisper-large-v3.json --batch-size 8 --tokens 128 --gradient-checkpointing \\
        --gradient-clip norm --accumulate-grad-batches 2 --gpu-memory 22GiB --host-memory 62GiB
        # 1.52 s per batch, 673 tokens/s, device memory 3.9 GiB, host memory 26.5 GiB; plain Lightning needs 28.7 GiB

With ``--lora 16``, plain Lightning (``--strategy auto``) fits a 24 GB card (*estimated*: 6.2 GiB), and is faster.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import common


def parse(argv: Sequence[str] | None = None) -> Any:
    parser = common.training_options(
        __doc__,
        "finetune_speech",
        model="hub name or folder of a Whisper model (default: a small one, random weights)",
        data='JSONL file, rows {"audio": ..., "text": ...} (default: synthesized telephone tones)',
        lr="1e-3 with --lora, 1e-5 with --model, else 2e-3",
        rows="recordings",
        epochs=3.0,
    )
    add = parser.add_argument
    add("--language", help="of the text, for multilingual models, for example english")
    add("--task", choices=["transcribe", "translate"], help="for multilingual models; translate is to English")
    options = common.read_options(parser, argv)
    if (options.language or options.task) and not options.model:
        options.error("--language and --task: need --model. For example: --model openai/whisper-small")
    return options


if __name__ == "__main__":
    parse()  # reports wrong options before the slow imports that follow; main() reads them again

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset
from transformers import AutoConfig, AutoTokenizer, WhisperConfig, WhisperFeatureExtractor
from transformers import WhisperForConditionalGeneration as Whisper
from transformers import get_cosine_schedule_with_warmup as cosine_with_warmup

from sp_lightning import SuperpipelineStrategy

ROW = 'For example: {"audio": "x.wav", "text": "what is said"}'


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

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=self.lr)
        schedule = cosine_with_warmup(optimizer, self.steps // 20, self.steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Recordings(Dataset[dict[str, Tensor]]):
    """Reads recordings when they are needed: the features of the sound, and the labels of the text."""

    def __init__(self, rows: list[tuple[Path, list[int]]], extractor: Any) -> None:
        self.rows, self.extractor = rows, extractor

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        file, labels = self.rows[index]
        features = self.extractor(
            common.read_wave(file), sampling_rate=self.extractor.sampling_rate, return_tensors="pt"
        )
        return {"input_features": features.input_features[0], "labels": torch.tensor(labels)}


def collate(items: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Features have one size, because Whisper pads each recording to 30 s. Labels are padded with common.IGNORED."""
    features = torch.stack([item["input_features"] for item in items])
    labels = pad_sequence([item["labels"] for item in items], batch_first=True, padding_value=common.IGNORED)
    return {"input_features": features, "labels": labels}


def read_rows(data: Path, config: Any, extractor: Any, tokenizer: Any) -> list[tuple[Path, list[int]]]:
    """Files and labels. Checks each row and the header of each file."""
    rows = []
    for where, row in common.read_jsonl(data, ROW):
        if not (isinstance(row, dict) and all(isinstance(row.get(name), str) for name in ("audio", "text"))):
            raise ValueError(f'{where}: expected "audio" and "text", got {str(row)[:80]}. {ROW}')
        common.check_wave(file := data.parent / row["audio"], where, extractor)
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


def read_config(options: Any) -> tuple[Any, Any, Any]:
    """The model's config, its feature extractor, and its tokenizer. Weights are loaded after all input has been checked."""
    if options.model is None:
        return common.small_whisper()
    config = AutoConfig.from_pretrained(options.model)
    if not isinstance(config, WhisperConfig):
        raise ValueError(f"--model {options.model}: expected a Whisper model, got {config.model_type}")
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    if options.language or options.task:
        tokenizer.set_prefix_tokens(language=options.language, task=options.task)
    return config, WhisperFeatureExtractor.from_pretrained(options.model), tokenizer


def load_model(options: Any, config: Any) -> Any:
    """The model on the CPU. The strategy copies layers to the GPU when they are needed."""
    dtype = common.load_dtype(options)
    model = Whisper.from_pretrained(options.model, dtype=dtype) if options.model else Whisper(config).to(dtype)
    if options.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if options.lora:
        model = common.add_lora(model, options, target_modules="all-linear")
    return model.train()  # from_pretrained returns it in evaluation mode, and Lightning keeps the mode


def main(argv: Sequence[str] | None = None) -> pl.LightningModule:
    options = parse(argv)
    common.prepare(options)
    with common.errors_in_the_input(options):  # before any work
        # Other options: keep_on_gpu, k, optimizer_on, ... (examples/guide/options.md)
        ours = SuperpipelineStrategy(
            gpu_memory=options.gpu_memory, host_memory=options.host_memory, disk=options.disk,
            optimizer_overlap=options.optimizer_overlap, save_frozen=not options.lora,
        )  # fmt: skip
        config, extractor, tokenizer = read_config(options)
        data = Path(options.data or common.write_tones(Path("runs/tones")))
        rows = read_rows(data, config, extractor, tokenizer)
        held_out, training = common.split(rows, max(10, len(rows) // 256))  # at most 256 for validation
        run = common.Run(options, len(training))

    def make_module() -> FineTune:
        lr = options.lr or (1e-3 if options.lora else 1e-5 if options.model else 2e-3)
        return FineTune(load_model(options, config), lr, run.steps)

    load: dict[str, Any] = {"batch_size": options.batch_size, "num_workers": options.workers, "collate_fn": collate}
    batches = DataLoader(Recordings(training, extractor), sampler=run.sampler(), **load)
    validation = DataLoader(Recordings(held_out, extractor), **load)
    module = make_module()
    if options.dial:
        print(common.measure(options, make_module, batches))
        return module
    common.check_resume(options, module)
    strategy = "auto" if options.strategy == "auto" else ours  # auto is plain Lightning
    trainer = pl.Trainer(strategy=strategy, devices=1, **common.settings(options), **run.schedule())
    trainer.fit(module, batches, validation, ckpt_path=options.resume)
    run.finish(trainer, module, validation, run.used, "recordings")

    saved = options.output / ("adapter" if options.lora else "model")
    for part in (module.model, extractor, tokenizer):
        part.save_pretrained(saved)
    print(f"Saved: {saved}.")
    return module


if __name__ == "__main__":
    main()
