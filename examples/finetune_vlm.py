"""Fine-tune a vision-language model that is larger than the GPU's memory. Copy it with common.py.

    python examples/finetune_vlm.py                                  # a small model on small data, without downloads
    python examples/finetune_vlm.py --model llava-hf/llava-1.5-7b-hf --data my.jsonl --batch-size 4 \\
        --accumulate-grad-batches 4 --precision bf16-true            # every weight, on a 24 GB card
    python examples/finetune_vlm.py --model Qwen/Qwen2.5-VL-32B-Instruct --data my.jsonl --batch-size 1 \\
        --accumulate-grad-batches 16 --lora 16                       # adapters of the language model
    python examples/finetune_vlm.py --resume                         # continue; or --dial, or --strategy auto (plain Lightning)

Rows of ``--data`` are ``{"image": "cat.jpg", "question": "What is this?", "answer": "A cat."}``; "prompt" and "completion"
are other names of the last two. Image paths are relative to the file. Only the answer counts in the loss.

Time and memory of the second command on a 24 GB card, *estimated* for 1024 tokens per row (576 are the image), 100 TFLOP/s
and 25 GB/s over PCIe:

    superpipeline plan examples/shapes/llava-1.5-7b.json --precision bf16-true --tokens 1024 --batch-size 4 \\
        --accumulate-grad-batches 4 --gradient-checkpointing --gradient-clip norm --gpu-memory 22GiB --host-memory 62GiB
        # 3.04 s per batch, 1348 tokens/s, device memory 4.3 GiB, host memory 53.8 GiB
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import common


def parse(argv: Sequence[str] | None = None) -> Any:
    parser = common.training_options(
        __doc__,
        "finetune_vlm",
        model="hub name or folder of a model with a chat template (default: a small LLaVA, random weights)",
        data=".jsonl file (default: digits and photographs of scikit-learn)",
        lr="2e-4 with --lora, 1e-5 with --model, else 2e-3",
        batch_size=16,
    )
    parser.add_argument("--freeze-vision", action="store_true", help="do not train the vision tower; --lora freezes it")
    return common.read_options(parser, argv)


if __name__ == "__main__":
    parse()  # reports wrong options before the slow imports that follow; main() reads them again

import lightning.pytorch as pl
import torch
from PIL import Image
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.data import DataLoader
from transformers import AutoConfig, AutoModelForImageTextToText, AutoProcessor
from transformers import get_cosine_schedule_with_warmup as cosine_with_warmup

from sp_lightning import SuperpipelineStrategy

SHOWN, NEW_TOKENS = 4, 32  # held-out rows that are answered at the end, and tokens of each, at most
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

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=self.lr)
        schedule = cosine_with_warmup(optimizer, self.steps // 20, self.steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


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
        """For training: the answer's tokens follow the question's. Labels of all other tokens are common.IGNORED."""
        batch = self.questions(rows, side="right")
        end = self.tokenizer.eos_token or ""
        answers = [self.tokenizer(row["answer"] + end, add_special_tokens=False)["input_ids"] for row in rows]
        starts = batch["attention_mask"].sum(dim=1).tolist()
        ends = [start + len(answer) for start, answer in zip(starts, answers, strict=True)]
        shape = batch["input_ids"].shape
        for name in [name for name, value in batch.items() if value.shape == shape]:  # with a number for each token
            value = self.tokenizer.pad_token_id if name == "input_ids" else 0
            batch[name] = pad(batch[name], (0, max(ends) - shape[1]), value=value)
        batch["labels"] = torch.full_like(batch["input_ids"], common.IGNORED)
        for row, (start, stop, answer) in enumerate(zip(starts, ends, answers, strict=True)):
            batch["input_ids"][row, start:stop] = batch["labels"][row, start:stop] = torch.tensor(answer)
            batch["attention_mask"][row, start:stop] = 1
        return batch


def read_config(options: Any) -> tuple[Any, Any]:
    """The model's config and its processor. Weights are loaded after all input has been checked."""
    model = options.model
    if model is None:
        return common.small_llava()
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


def choose_weights(model: Any, options: Any) -> Any:
    """Freezes weights and adds adapters."""
    towers = [name for name, _ in model.named_modules() if name.endswith(VISION)]
    if not towers and (options.freeze_vision or options.lora):
        option = "--freeze-vision" if options.freeze_vision else "--lora"
        raise ValueError(f"{option}: {type(model).__name__} has no module whose name ends in {', '.join(VISION)}")
    if options.freeze_vision:
        model.get_submodule(towers[0]).requires_grad_(False)
    if options.lora:
        linear = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
        targets = [name for name in linear if not name.startswith(towers[0]) and not name.endswith("lm_head")]
        model = common.add_lora(model, options, task_type="CAUSAL_LM", target_modules=targets)
    return model


def load_model(options: Any, config: Any) -> Any:
    """The model on the CPU. The strategy copies layers to the GPU when they are needed."""
    if options.model is None:
        model = AutoModelForImageTextToText.from_config(config, dtype=common.load_dtype(options))  # random weights
    else:
        model = AutoModelForImageTextToText.from_pretrained(options.model, dtype=common.load_dtype(options))
    if options.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return choose_weights(model, options).train()  # from_pretrained returns it in evaluation mode


def main(argv: Sequence[str] | None = None) -> pl.LightningModule:
    options = parse(argv)
    common.prepare(options)
    with common.errors_in_the_input(options):  # before any work
        # Other options: keep_on_gpu, k, optimizer_on, ... (examples/guide/options.md)
        ours = SuperpipelineStrategy(
            gpu_memory=options.gpu_memory, host_memory=options.host_memory, disk=options.disk,
            optimizer_overlap=options.optimizer_overlap, save_frozen=not options.lora,
        )  # fmt: skip
        rows = common.read_image_rows(Path(options.data)) if options.data else common.digits_and_photographs()
        config, processor = read_config(options)
        held_out, training = common.split(rows, max(20, len(rows) // 64))  # at most 64 rows for validation
        encode = Encoder(processor)
        encode(training[:1])
        run = common.Run(options, len(training))

    def make_module() -> FineTune:
        lr = options.lr or (2e-4 if options.lora else 1e-5 if options.model else 2e-3)
        return FineTune(load_model(options, config), processor.tokenizer, lr, run.steps)

    load: dict[str, Any] = {"batch_size": options.batch_size, "num_workers": options.workers, "collate_fn": encode}
    batches: Any = DataLoader(training, sampler=run.sampler(), **load)
    validation: Any = DataLoader(held_out, **load)
    module = make_module()
    if options.dial:
        print(common.measure(options, make_module, batches))
        return module
    common.check_resume(options, module)
    strategy = "auto" if options.strategy == "auto" else ours  # auto is plain Lightning
    trainer = pl.Trainer(strategy=strategy, devices=1, **common.settings(options), **run.schedule())
    trainer.fit(module, batches, validation, ckpt_path=options.resume)
    run.finish(trainer, module, validation, run.used, "rows")

    saved = options.output / ("adapter" if options.lora else "model")
    module.model.save_pretrained(saved)
    processor.save_pretrained(saved)
    shown = held_out[:SHOWN]
    (answers,) = trainer.predict(module, DataLoader(shown, len(shown), collate_fn=encode.questions)) or [[]]
    for row, answer in zip(shown, answers, strict=True):
        print(f"Held out: {row['question']}  Expected: {row['answer']!r}. Generated: {answer!r}")
    print(f"Saved: {saved}.")
    return module


if __name__ == "__main__":
    main()
