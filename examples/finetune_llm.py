"""Fine-tune a causal language model that is larger than the GPU's memory. Copy it with common.py.

    python examples/finetune_llm.py                                  # a small model on small data, without downloads
    python examples/finetune_llm.py --model meta-llama/Llama-3.2-3B --data my.jsonl --length 4096 \\
        --batch-size 1 --accumulate-grad-batches 8                   # every weight, on a 24 GB card
    python examples/finetune_llm.py --model meta-llama/Llama-3.1-8B-Instruct --data my.jsonl --length 4096 \\
        --batch-size 1 --accumulate-grad-batches 8 --lora 16         # adapters, on a 24 GB card
    python examples/finetune_llm.py --resume                         # continue; or --dial, or --strategy auto (plain Lightning)

Rows of ``--data`` are ``{"messages": [{"role": "user", "content": "..."}, {"role": "assistant", ...}]}`` (only what the
assistant says counts in the loss), ``{"prompt": "...", "completion": "..."}`` (only the completion) or ``{"text": "..."}``.
They are joined and cut into windows of ``--length`` tokens. Two rows are enough; one in 20 is for validation.

Time and memory of the second and third command on a 24 GB card, *estimated* for 100 TFLOP/s and 25 GB/s over PCIe:

    superpipeline plan examples/shapes/llama-3.2-3b.json --tokens 4096 --gradient-checkpointing \\
        --gradient-clip norm --accumulate-grad-batches 8 --gpu-memory 22GiB --host-memory 62GiB
        # 2 s per batch, 2046 tokens/s, device memory 12.9 GiB, host memory 57.5 GiB
    superpipeline plan examples/shapes/llama-3-8b.json --lora 16 --tokens 4096 --gradient-checkpointing \\
        --gradient-clip norm --accumulate-grad-batches 8 --gpu-memory 22GiB --host-memory 62GiB
        # 2.8 s per batch, 1462 tokens/s, device memory 8.9 GiB, host memory 15.7 GiB
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import common


def parse(argv: Sequence[str] | None = None) -> Any:
    parser = common.training_options(
        __doc__,
        "finetune_llm",
        model="hub name, folder, or config.json for random weights (default: a small Llama, random weights)",
        data="file, folder of files (.jsonl, .parquet, .txt) or hub dataset (default: Python's docstrings)",
        lr="2e-4 with --lora, 2e-5 with --model, else 4e-3",
        rows="windows",
    )
    parser.add_argument("--length", type=int, default=128, help="tokens per window (%(default)s)")
    return common.read_options(parser, argv)


if __name__ == "__main__":
    parse()  # reports wrong options before the slow imports that follow; main() reads them again

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers import get_cosine_schedule_with_warmup as cosine_with_warmup

from sp_lightning import SuperpipelineStrategy


class FineTune(pl.LightningModule):
    """Plain Lightning: only ``Trainer(strategy=...)`` decides where the layers are."""

    def __init__(self, model: nn.Module, lr: float, steps: int) -> None:
        super().__init__()
        self.model: Any = model
        self.lr, self.steps = lr, steps

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = self.model(**batch, use_cache=False).loss  # the mean over the labels of this batch
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.model(**batch, use_cache=False).loss, prog_bar=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=self.lr)
        schedule = cosine_with_warmup(optimizer, self.steps // 20, self.steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def read_config(options: Any) -> tuple[Any, Any]:
    """The model's config and its tokenizer. Weights are loaded after all input has been checked."""
    if options.model is None:
        tokenizer = common.small_tokenizer()
        return common.small_llama(tokenizer, options.length), tokenizer
    config = AutoConfig.from_pretrained(options.model)
    common.check_length(config, options)
    return config, common.small_tokenizer() if Path(options.model).is_file() else AutoTokenizer.from_pretrained(
        options.model
    )


def load_model(options: Any, config: Any) -> Any:
    """The model on the CPU. The strategy copies layers to the GPU when they are needed."""
    if options.model is None or Path(options.model).is_file():
        model = AutoModelForCausalLM.from_config(config, dtype=common.load_dtype(options))  # random weights
    else:
        model = AutoModelForCausalLM.from_pretrained(options.model, dtype=common.load_dtype(options))
    if options.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if options.lora:
        model = common.add_lora(model, options, task_type="CAUSAL_LM", target_modules="all-linear")
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
        config, tokenizer = read_config(options)
        held_out, training = common.pack(common.read_rows(options.data), tokenizer, options.length)
        run = common.Run(options, len(training))

    def make_module() -> FineTune:
        lr = options.lr or (2e-4 if options.lora else 2e-5 if options.model else 4e-3)
        return FineTune(load_model(options, config), lr, run.steps)

    batches: Any = DataLoader(training, options.batch_size, sampler=run.sampler(), num_workers=options.workers)
    validation: Any = DataLoader(held_out, options.batch_size, num_workers=options.workers)
    module = make_module()
    if options.dial:
        print(common.measure(options, make_module, batches))
        return module
    common.check_resume(options, module)
    strategy = "auto" if options.strategy == "auto" else ours  # auto is plain Lightning
    trainer = pl.Trainer(strategy=strategy, devices=1, **common.settings(options), **run.schedule())
    trainer.fit(module, batches, validation, ckpt_path=options.resume)
    run.finish(trainer, module, validation, run.used * options.length, "tokens")

    saved = options.output / ("adapter" if options.lora else "model")
    module.model.save_pretrained(saved)
    tokenizer.save_pretrained(saved)
    print(f"Saved: {saved}.")
    if not (options.lora and options.model is None):  # an adapter needs the base model that it names
        print(f"To generate: python examples/generate_llm.py --model {saved}")
    if options.model is None and options.strategy == "superpipeline" and not options.report:
        print("Next, memory and time of the same model are measured for six k and k'.", flush=True)
        print(common.measure(options, make_module, batches, steps=5))
    return module


if __name__ == "__main__":
    main()
