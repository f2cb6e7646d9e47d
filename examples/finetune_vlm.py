"""Fine-tune a vision-language model that is larger than the GPU's memory. One file, to copy and to change.

    python examples/finetune_vlm.py                                  # a small model on small data, without downloads
    python examples/finetune_vlm.py --model llava-hf/llava-1.5-7b-hf --data my.jsonl --batch-size 4 \\
        --accumulate-grad-batches 4 --precision bf16-true            # every weight, on a 24 GB card
    python examples/finetune_vlm.py --model Qwen/Qwen2.5-VL-32B-Instruct --data my.jsonl --batch-size 1 \\
        --accumulate-grad-batches 16 --lora 16                       # adapters of the language model
    python examples/finetune_vlm.py --resume runs/finetune_vlm/last.ckpt    # continue an interrupted run
    python examples/finetune_vlm.py --strategy auto                  # plain Lightning, for comparison
    python examples/finetune_vlm.py --dial                           # memory and time of k and k', measured

Rows of ``--data`` are ``{"image": "cat.jpg", "question": "What is this?", "answer": "A cat."}``; "prompt" and "completion"
are other names of the last two. Image paths are relative to the file. Only the answer counts in the loss.

Time and memory of the second command on a 24 GB card, *estimated* for 1024 tokens per row (576 are the image), 100 TFLOP/s
and 25 GB/s over PCIe:

    python -m sp_lightning plan examples/shapes/llava-1.5-7b.json --precision bf16-true --tokens 1024 --batch-size 4 \\
        --accumulate-grad-batches 4 --gradient-checkpointing --gradient-clip norm --gpu-memory 22GiB --host-memory 62GiB
        # 3.04 s per batch, 1348 tokens/s, device memory 4.3 GiB, host memory 53.8 GiB
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROW = 'For example: {"image": "cat.jpg", "question": "What is this?", "answer": "A cat."}'

# ---------------------------------------------------------------------- options


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    add = parser.add_argument
    add("--model", help="hub name or folder of a model with a chat template (default: a small LLaVA, random weights)")
    add("--data", type=Path, help=".jsonl file (default: digits and photographs of scikit-learn)")
    add("--batch-size", type=int, default=16, help="rows per batch (%(default)s)")
    add("--accumulate-grad-batches", type=int, default=1, help="batches per optimizer step (%(default)s)")
    add("--epochs", type=float, default=1.0, help="passes over the data (%(default)s)")
    add("--steps", type=int, help="optimizer steps, in place of --epochs")
    add("--every", type=int, help="steps between validations and checkpoints (default: a tenth of all)")
    add("--lr", type=float, help="peak learning rate (default: 2e-4 with --lora, 1e-5 with --model, else 2e-3)")
    add(
        "--lora",
        type=int,
        metavar="RANK",
        help="train LoRA adapters (PEFT) outside of the vision tower, for example 16",
    )
    add("--freeze-vision", action="store_true", help="do not train the vision tower")
    add("--gradient-checkpointing", action=argparse.BooleanOptionalAction, default=True, help="the model's own (on)")
    add("--precision", default="bf16-mixed", choices=["bf16-mixed", "bf16-true", "32-true"], help="(%(default)s)")
    add("--strategy", default="superpipeline", choices=["superpipeline", "auto"], help="auto is plain (%(default)s)")
    add("--gpu-memory", help="at most, for example 16GiB (default: free memory)")
    add("--accelerator", default="auto", help="as in Lightning (%(default)s)")
    add("--workers", type=int, default=0, help="processes that read images (%(default)s)")
    add("--dial", action="store_true", help="in place of the run, measure memory and time for some k and k'")
    add("--seed", type=int, default=0, help="(%(default)s)")
    add("--resume", type=Path, help="last.ckpt of a run with the same options")
    add("--output", type=Path, default=Path("runs/finetune_vlm"), help="(%(default)s)")
    return parser


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Reads the options, and reports errors that show without a model."""
    parser = make_parser()
    options = parser.parse_args(argv)
    for name in ("batch_size", "accumulate_grad_batches", "epochs", "steps", "every", "lr", "lora"):
        value = getattr(options, name)
        if value is not None and value <= 0:
            parser.error(f"--{name.replace('_', '-')} {value}: expected a number above 0")
    data, model = options.data, options.model
    if data and (not data.is_file() or data.suffix != ".jsonl"):
        found = "found a folder" if data.is_dir() else "not found" if not data.exists() else f"found {data.suffix}"
        parser.error(f"--data {data}: {found}. Expected a .jsonl file. {ROW}")
    if model and not Path(model).is_dir() and (model.startswith((".", "/")) or model.count("/") > 1):
        parser.error(f"--model {model}: not found. Expected a folder or hub name, for example llava-hf/llava-1.5-7b-hf")
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
from PIL import Image
from tokenizers import ByteLevelBPETokenizer, Tokenizer
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.data import DataLoader
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    AutoProcessor,
    CLIPImageProcessor,
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaProcessor,
    PreTrainedTokenizerFast,
)
from transformers import get_cosine_schedule_with_warmup as cosine_with_warmup

from sp_lightning import SuperpipelineStrategy, dial

IGNORED = -100  # a label that does not count in the loss
SHOWN, NEW_TOKENS = 4, 32  # held-out rows that are answered at the end, and tokens of each, at most
DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
PIXELS, PATCH = 32, 8  # of the small model's images and patches, on each side
VISION = ("vision_tower", "vision_model", "visual")  # names of vision towers in transformers


class FineTune(pl.LightningModule):
    """Plain Lightning: only ``Trainer(strategy=...)`` decides where the layers are."""

    def __init__(self, model: Any, tokenizer: Any, lr: float, steps: int) -> None:
        super().__init__()
        self.model, self.tokenizer, self.lr, self.steps = model, tokenizer, lr, steps

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = self.model(**batch, use_cache=False).loss  # the mean over the labels of this batch
        self.log("loss", loss, prog_bar=True, batch_size=len(batch["labels"]))
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        loss = self.model(**batch, use_cache=False).loss
        self.log("val_loss", loss, prog_bar=True, batch_size=len(batch["labels"]))

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> list[str]:
        ends = {"pad_token_id": self.tokenizer.pad_token_id}
        tokens = self.model.generate(**batch, do_sample=False, max_new_tokens=NEW_TOKENS, **ends)
        new = tokens[:, batch["input_ids"].shape[1] :]
        return list(self.tokenizer.batch_decode(new, skip_special_tokens=True))

    def on_validation_epoch_end(self) -> None:
        losses = sorted(self.trainer.callback_metrics.items())
        print(f"step {self.global_step}/{self.steps}", *(f" {name} {loss:.3f}" for name, loss in losses), flush=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=self.lr)
        schedule = cosine_with_warmup(optimizer, self.steps // 20, self.steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


# ---------------------------------------------------------------------- data


def read_rows(data: Path | None) -> list[dict[str, Any]]:
    """Rows of "image" (a path, or an image), "question" and "answer"."""
    if data is None:
        return digits_and_photographs()
    rows = []
    for number, line in enumerate(data.read_text(encoding="utf-8").rstrip("\n").split("\n"), 1):
        try:
            row = dict(json.loads(line))
            question, answer = row.get("question", row.get("prompt")), row.get("answer", row.get("completion"))
            if not (isinstance(row.get("image"), str) and isinstance(question, str) and isinstance(answer, str)):
                raise ValueError(f'found the columns {", ".join(row)}; expected texts "image", "question" and "answer"')
            with Image.open(data.parent / row["image"]):  # reads only the header
                rows.append({"image": data.parent / row["image"], "question": question, "answer": answer})
        except (ValueError, TypeError, OSError) as error:
            raise ValueError(f"--data {data}, line {number}: {error}. {ROW}") from error
    return rows


def digits_and_photographs() -> list[dict[str, Any]]:
    """The default data, which are part of scikit-learn: 1,797 handwritten digits, and crops of two photographs."""
    try:
        from sklearn.datasets import load_digits, load_sample_image
    except ImportError as error:
        raise ValueError(
            "The default data need scikit-learn. Run: pip install scikit-learn. Or: --data FILE"
        ) from error
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
    order = torch.randperm(len(rows), generator=random).tolist()
    return [rows[i] for i in order]


class Encoder:
    """Rows → a batch, by the model's own processor and chat template."""

    def __init__(self, processor: Any) -> None:
        self.processor, self.tokenizer = processor, processor.tokenizer

    def questions(self, rows: Sequence[dict[str, Any]], side: str = "left") -> dict[str, Tensor]:
        """For ``generate``, which continues from the last position: padding is on the left."""
        texts, images = [], []
        for row in rows:
            content = [{"type": "image"}, {"type": "text", "text": row["question"]}]
            message = [{"role": "user", "content": content}]
            texts.append(self.processor.apply_chat_template(message, add_generation_prompt=True))
            image = row["image"]
            images.append([(Image.open(image) if isinstance(image, Path) else image).convert("RGB")])
        # Some templates write the first token of a text, which the tokenizer would add again.
        begin = self.tokenizer.bos_token
        once = {"add_special_tokens": False} if begin and texts[0].startswith(begin) else {}
        how: dict[str, Any] = {"padding": True, "padding_side": side, "return_tensors": "pt", **once}
        return dict(self.processor(images=images, text=texts, **how))

    def __call__(self, rows: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
        """For training: the answer's tokens follow the question's. Labels of all other tokens are IGNORED."""
        batch = self.questions(rows, side="right")
        end = self.tokenizer.eos_token or ""
        answers = [self.tokenizer(row["answer"] + end, add_special_tokens=False)["input_ids"] for row in rows]
        starts = batch["attention_mask"].sum(dim=1).tolist()
        ends = [start + len(answer) for start, answer in zip(starts, answers, strict=True)]
        shape = batch["input_ids"].shape
        for name in [name for name, value in batch.items() if value.shape == shape]:  # with a number for each token
            value = self.tokenizer.pad_token_id if name == "input_ids" else 0
            batch[name] = pad(batch[name], (0, max(ends) - shape[1]), value=value)
        batch["labels"] = torch.full_like(batch["input_ids"], IGNORED)
        for row, (start, stop, answer) in enumerate(zip(starts, ends, answers, strict=True)):
            batch["input_ids"][row, start:stop] = batch["labels"][row, start:stop] = torch.tensor(answer)
            batch["attention_mask"][row, start:stop] = 1
        return batch


# ---------------------------------------------------------------------- model


def small_model() -> tuple[Any, Any]:
    """Config and processor of a small LLaVA: a CLIP vision tower, a projector and a Llama."""
    bpe = ByteLevelBPETokenizer()
    texts = ["Which digit is this?", "What is this?", "a temple in china", "a flower in a garden", *DIGITS]
    bpe.train_from_iterator(texts, vocab_size=512, special_tokens=["<|end|>", "<image>"], show_progress=False)
    special: dict[str, Any] = {"eos_token": "<|end|>", "pad_token": "<|end|>", "additional_special_tokens": ["<image>"]}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(bpe.to_str()), **special)
    size = {"height": PIXELS, "width": PIXELS}
    processor = LlavaProcessor(
        image_processor=CLIPImageProcessor(size=size, crop_size=size, do_center_crop=False),
        tokenizer=tokenizer,
        patch_size=PATCH,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,  # CLIP's class token, which "default" leaves out again
        chat_template="{% for message in messages %}{% for part in message['content'] %}"
        "{% if part['type'] == 'image' %}<image>{% else %}{{ part['text'] }}{% endif %}{% endfor %}{{ '\\n' }}{% endfor %}",
    )
    width = {"hidden_size": 96, "intermediate_size": 288, "num_hidden_layers": 3, "num_attention_heads": 6}
    tokens = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = LlavaConfig(
        vision_config=CLIPVisionConfig(**width, image_size=PIXELS, patch_size=PATCH),
        text_config=LlamaConfig(**width, vocab_size=len(tokenizer), max_position_embeddings=128, **tokens),
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        image_seq_length=(PIXELS // PATCH) ** 2,
    )
    return config, processor


def read_config(options: argparse.Namespace) -> tuple[Any, Any]:
    """The model's config and its processor. Weights are loaded after all input has been checked."""
    model = options.model
    if model is None:
        return small_model()
    config, processor = AutoConfig.from_pretrained(model), AutoProcessor.from_pretrained(model)
    if getattr(processor, "chat_template", None) is None or not hasattr(processor, "image_processor"):
        raise ValueError(
            f"--model {model}: found a {type(processor).__name__}. Expected a processor of images with a chat template, as "
            "instruct models have, for example llava-hf/llava-1.5-7b-hf"
        )
    if processor.tokenizer.pad_token is None:
        processor.tokenizer.pad_token = processor.tokenizer.eos_token
    with torch.device("meta"):  # without values: raises an error if the model lacks a vision tower to freeze
        choose_weights(AutoModelForImageTextToText.from_config(config), options)
    return config, processor


def choose_weights(model: Any, options: argparse.Namespace) -> Any:
    """Freezes weights and adds adapters."""
    towers = [name for name, _ in model.named_modules() if name.endswith(VISION)]
    if not towers and (options.freeze_vision or options.lora):
        option = "--freeze-vision" if options.freeze_vision else "--lora"
        raise ValueError(f"{option}: {type(model).__name__} has no module whose name ends in {', '.join(VISION)}")
    if options.freeze_vision:
        model.get_submodule(towers[0]).requires_grad_(False)
    if options.lora:
        from peft import LoraConfig, get_peft_model

        linear = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
        targets = [name for name in linear if not name.startswith(towers[0]) and not name.endswith("lm_head")]
        size = {"r": options.lora, "lora_alpha": 2 * options.lora}
        model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", target_modules=targets, **size))
    return model


def load_model(options: argparse.Namespace, config: Any) -> Any:
    """The model on the CPU. The strategy copies layers to the GPU when they are needed."""
    # bf16-mixed computes in bfloat16. Weights that are trained stay in float32, frozen ones need no more than bfloat16.
    half = options.precision == "bf16-true" or (options.precision == "bf16-mixed" and options.lora)
    dtype = torch.bfloat16 if half else torch.float32
    if options.model is None:
        model = AutoModelForImageTextToText.from_config(config, dtype=dtype)  # random weights
    else:
        model = AutoModelForImageTextToText.from_pretrained(options.model, dtype=dtype)
    if options.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return choose_weights(model, options).train()  # from_pretrained returns it in evaluation mode


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


def main(argv: Sequence[str] | None = None) -> None:
    options = parse(argv)
    try:  # reports errors in the input before any work
        strategy: Any = options.strategy
        if strategy == "superpipeline":  # other options: keep_on_gpu, k, optimizer_on, ... (examples/guide/options.md)
            strategy = SuperpipelineStrategy(gpu_memory=options.gpu_memory, save_frozen=not options.lora)
        rows = read_rows(options.data)
        config, processor = read_config(options)
        spacing = max(20, len(rows) // 64)  # one row in 20 is for validation, 64 at most
        held_out: Any = rows[::spacing]
        training: Any = [row for i, row in enumerate(rows) if i % spacing]
        step_size = options.batch_size * options.accumulate_grad_batches
        if len(training) < step_size:
            raise ValueError(
                f"--data has {len(training)} training rows. Expected at least {step_size}: --batch-size × "
                "--accumulate-grad-batches. Lower one of them, or give more rows"
            )
        encode = Encoder(processor)
        encode(training[:1])
        steps = options.steps or max(1, int(options.epochs * len(training) / step_size))
        done = torch.load(options.resume, mmap=True)["global_step"] if options.resume else 0
        if done >= steps:
            raise ValueError(f"--resume {options.resume}: has {done} of {steps} steps. For example: --steps {2 * done}")
    except (ValueError, OSError) as error:
        make_parser().error(str(error))

    # The newest transformers have another name for gradient_checkpointing_enable.
    ignored = "gradient_checkpointing_enable|does not have many workers|Checkpoint directory"
    warnings.filterwarnings("ignore", message=f".*({ignored})")
    pl.seed_everything(options.seed, verbose=False)
    lr = options.lr or (2e-4 if options.lora else 1e-5 if options.model else 2e-3)
    module = FineTune(load_model(options, config), processor.tokenizer, lr, steps)
    if options.resume and not fits(options.resume, module, options.strategy):
        make_parser().error(
            f"--resume {options.resume}: a checkpoint of another model or of a run with other options (--lora, "
            "--freeze-vision). Expected last.ckpt of a run with the same options"
        )

    # The rows of the whole run: all in random order, then all in another order, and so on. If the run is resumed,
    # it begins with the first unused row. The used ones move to the end, because Lightning counts them as read.
    random = torch.Generator().manual_seed(options.seed)
    epochs = 1 + steps * step_size // len(training)
    order = torch.cat([torch.randperm(len(training), generator=random) for _ in range(epochs)])[: steps * step_size]
    load: dict[str, Any] = {"batch_size": options.batch_size, "num_workers": options.workers}
    batches = DataLoader(training, sampler=order.roll(-done * step_size).tolist(), collate_fn=encode, **load)
    validation = DataLoader(held_out, collate_fn=encode, **load)

    if options.dial:  # the same model for each k and k', and for plain Lightning
        settings = {name: getattr(options, name) for name in ("accelerator", "precision", "accumulate_grad_batches")}
        print(
            dial(
                lambda: FineTune(load_model(options, config), processor.tokenizer, lr, steps),
                lambda: batches,
                trainer={**settings, "gradient_clip_val": 1.0},
                name="finetune_vlm",
                gpu_memory=options.gpu_memory,
            )
        )
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
    trainer.fit(module, batches, validation, ckpt_path=options.resume)
    last = options.output / "last.ckpt"
    if steps % every:  # the last steps have no validation and no checkpoint yet
        trainer.save_checkpoint(last)
        trainer.validate(module, validation, verbose=False)

    saved = options.output / ("adapter" if options.lora else "model")
    module.model.save_pretrained(saved)
    processor.save_pretrained(saved)
    shown = held_out[:SHOWN]
    (answers,) = trainer.predict(module, DataLoader(shown, len(shown), collate_fn=encode.questions)) or [[]]
    for row, answer in zip(shown, answers, strict=True):
        print(f"Held out: {row['question']}  Expected: {row['answer']!r}. Generated: {answer!r}")
    print(f"Saved: {saved}. Checkpoint: {last}. Losses: {options.output / 'logs'}.")
    print(f"To continue, repeat the command with --resume {last} --steps {2 * steps}.")


if __name__ == "__main__":
    main()
