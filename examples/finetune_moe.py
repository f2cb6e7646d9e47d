"""Fine-tune a mixture of experts that is larger than the GPU's memory. Copy it with common.py.

    python examples/finetune_moe.py                                  # a small model on small data, without downloads
    python examples/finetune_moe.py --model Qwen/Qwen3-30B-A3B --data my.jsonl --length 4096 --batch-size 1 \\
        --accumulate-grad-batches 8 --lora 16                        # adapters of attention, on a 24 GB card
    python examples/finetune_moe.py --model openai/gpt-oss-20b --data my.jsonl --length 4096 --batch-size 1 \\
        --experts 4bit --lora 16 --lora-experts                      # adapters of attention and of experts in 4 bits
    python examples/finetune_moe.py --resume                         # continue; or --dial, or --strategy auto (plain Lightning)

Rows of ``--data`` are those of ``finetune_llm.py``: conversations, prompts and completions, or texts.

The router's auxiliary loss is added to the loss, so that all experts stay in use. With ``--lora``, routers and experts
are frozen. If a batch is routed to few experts, only their weights are uploaded. With ``--experts 4bit``, they are in CPU
memory in 4 bits and are uploaded so. Models with experts in MXFP4 (gpt-oss) keep the values of their files, others are
quantised to NVFP4. ``--lora-experts`` adds adapters to the experts (not yet run on a GPU, as 4 bits).

Time and memory of the second command on a 24 GB card, *estimated* for 100 TFLOP/s and 25 GB/s over PCIe. Adapters of
experts are not included:

    superpipeline plan examples/shapes/qwen3-30b-a3b.json --lora 16 --tokens 4096 --gradient-checkpointing \\
        --gradient-clip norm --accumulate-grad-batches 8 --gpu-memory 22GiB --host-memory 62GiB
        # 4.37 s per batch, 938 tokens/s, device memory 21.7 GiB, host memory 57.1 GiB
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import common


def parse(argv: Sequence[str] | None = None) -> Any:
    parser = common.training_options(
        __doc__,
        "finetune_moe",
        model="hub name, folder, or config.json for random weights (default: a small Qwen3-MoE, random weights)",
        data="file, folder of files (.jsonl, .parquet, .txt) or hub dataset (default: Python's docstrings)",
        lr="2e-4 with --lora, 2e-5 with --model, else 2e-3",
        rows="windows",
    )
    add = parser.add_argument
    add("--length", type=int, default=128, help="tokens per window (%(default)s)")
    add("--aux", type=float, help="factor of the router's auxiliary loss; 0 is off (default: the model's own)")
    add("--lora-experts", action="store_true", help="with --lora: adapters of the experts, too")
    add("--experts", choices=["4bit"], help="with --lora: the frozen experts in 4 bits (needs torchao)")
    options = common.read_options(parser, argv)
    for name, given in (("--lora-experts", options.lora_experts), ("--experts 4bit", options.experts)):
        if given and not options.lora:
            options.error(f"{name}: only adapters can be trained then. For example: {name} --lora 16")
    if options.aux is not None and options.aux < 0:
        options.error(f"--aux {options.aux}: expected 0 or more. For example: --aux 0.001")
    return options


if __name__ == "__main__":
    parse()  # reports wrong options before the slow imports that follow; main() reads them again

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers import get_cosine_schedule_with_warmup as cosine_with_warmup

from sp_lightning import SuperpipelineStrategy, load_mxfp4, pack_experts


class FineTune(pl.LightningModule):
    """Plain Lightning: only ``Trainer(strategy=...)`` decides where the layers are."""

    def __init__(self, model: Any, lr: float, steps: int, aux: float) -> None:
        super().__init__()
        self.model, self.lr, self.steps, self.aux = model, lr, steps, aux

    def forward(self, batch: dict[str, Tensor]) -> Any:
        return self.model(**batch, use_cache=False, **({"output_router_logits": True} if self.aux else {}))

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        out = self(batch)  # transformers has added aux × out.aux_loss to out.loss
        self.log("loss", out.loss, prog_bar=True)
        if self.aux:
            self.log("aux_loss", out.aux_loss)  # the number of experts per token, if all experts are used equally
        return out.loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        out = self(batch)
        self.log("val_loss", out.loss - self.aux * out.aux_loss if self.aux else out.loss, prog_bar=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=self.lr)
        schedule = cosine_with_warmup(optimizer, self.steps // 20, self.steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def read_config(options: Any) -> tuple[Any, Any]:
    """The model's config and its tokenizer. Weights are loaded after all input has been checked."""
    model = options.model
    tokenizer = (
        common.small_tokenizer() if model is None or Path(model).is_file() else AutoTokenizer.from_pretrained(model)
    )
    config = AutoConfig.from_pretrained(model) if model else common.small_qwen_moe(tokenizer, options.length)
    common.check_length(config, options)
    if options.aux != 0 and not hasattr(config, "router_aux_loss_coef"):
        raise ValueError(
            f"--model {model}: a {config.model_type} model, which has no auxiliary router loss (router_aux_loss_coef). "
            "For a mixture of experts without it: --aux 0. For other models: examples/finetune_llm.py"
        )
    if options.aux is None:
        options.aux = config.router_aux_loss_coef
    elif options.aux:
        config.router_aux_loss_coef = options.aux
    if options.lora:
        with torch.device("meta"):  # without values: raises an error if the model lacks what gets adapters
            empty = AutoModelForCausalLM.from_config(config)
            if options.experts:
                pack_experts(empty)
            add_adapters(empty, options)
    return config, tokenizer


def add_adapters(model: Any, options: Any) -> Any:
    """Adapters of the linear modules of attention, and of the parameters that hold all experts of a block."""
    linear = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    attention = [name for name in linear if "attn" in name or "attention" in name]
    names = [name for name, _ in model.named_parameters()]
    stacks = [name for name in names if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]
    if not attention:
        raise ValueError(f"--lora: {type(model).__name__} has no torch.nn.Linear whose name contains attn or attention")
    if options.lora_experts and not stacks:
        raise ValueError(f"--lora-experts: {type(model).__name__} has no experts.gate_up_proj and experts.down_proj")
    targets = {"target_modules": attention, "target_parameters": stacks if options.lora_experts else None}
    return common.add_lora(model, options, task_type="CAUSAL_LM", **targets)


def load_model(options: Any, config: Any) -> Any:
    """The model on the CPU. The strategy copies layers to the GPU when they are needed."""
    dtype, quantised = common.load_dtype(options), getattr(config, "quantization_config", None) or {}
    if options.model is None or Path(options.model).is_file():
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)  # random weights
    elif options.experts and quantised.get("quant_method") == "mxfp4":  # from_pretrained would dequantise the experts
        from huggingface_hub import snapshot_download

        folder, files = options.model, ["*.json", "model*.safetensors"]
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        load_mxfp4(model, folder if Path(folder).is_dir() else snapshot_download(folder, allow_patterns=files))
    else:
        model = AutoModelForCausalLM.from_pretrained(options.model, config=config, dtype=dtype)
    if options.experts and quantised.get("quant_method") != "mxfp4":
        pack_experts(model)  # before adapters are added
    if options.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if options.lora:
        model = add_adapters(model, options)
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
        lr = options.lr or (2e-4 if options.lora else 2e-5 if options.model else 2e-3)
        return FineTune(load_model(options, config), lr, run.steps, options.aux)

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
    return module


if __name__ == "__main__":
    main()
