"""Fine-tune a mixture of experts that is larger than the GPU's memory. One file, to copy and to change.

    python examples/finetune_moe.py                                  # a small model on small data, without downloads
    python examples/finetune_moe.py --model Qwen/Qwen3-30B-A3B --data my.jsonl --length 4096 --batch-size 1 \\
        --accumulate-grad-batches 8 --lora 16                        # adapters of attention, on a 24 GB card
    python examples/finetune_moe.py --model openai/gpt-oss-20b --data my.jsonl --length 4096 --batch-size 1 \\
        --experts 4bit --lora 16 --lora-experts                      # adapters of attention and of experts in 4 bits
    python examples/finetune_moe.py --resume runs/finetune_moe/last.ckpt    # continue an interrupted run
    python examples/finetune_moe.py --strategy auto                  # plain Lightning, for comparison

Rows of ``--data`` are ``{"prompt": "...", "completion": "..."}`` (only the completion counts in the loss) or
``{"text": "..."}``. For conversations and hub datasets, copy ``read_rows`` and ``encode`` of ``finetune_llm.py``.

The router's auxiliary loss is added to the loss, so that all experts stay in use. With ``--lora``, routers and experts
are frozen. If a batch is routed to few experts, only their weights are uploaded. With ``--experts 4bit``, they are in CPU
memory in 4 bits and are uploaded so. Models with experts in MXFP4 (gpt-oss) keep the values of their files, others are
quantised to NVFP4. ``--lora-experts`` adds adapters to the experts (not yet run on a GPU, as 4 bits).

Time and memory of the second command on a 24 GB card, *estimated* for 100 TFLOP/s and 25 GB/s over PCIe. Adapters of
experts are not included:

    python -m sp_lightning plan examples/shapes/qwen3-30b-a3b.json --lora 16 --tokens 4096 --gradient-checkpointing \\
        --gradient-clip norm --accumulate-grad-batches 8 --gpu-memory 22GiB --host-memory 62GiB
        # 4.37 s per batch, 938 tokens/s, device memory 21.7 GiB, host memory 57.1 GiB
"""

from __future__ import annotations

import argparse
import ast
import json
import sys
import warnings
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

# ---------------------------------------------------------------------- options


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    add = parser.add_argument
    add("--model", help="hub name, folder, or config.json for random weights (default: a small Qwen3-MoE)")
    add("--data", type=Path, help=".jsonl file of prompts and completions, or texts (default: Python's docstrings)")
    add("--length", type=int, default=128, help="tokens per window (%(default)s)")
    add("--batch-size", type=int, default=8, help="windows per batch (%(default)s)")
    add("--accumulate-grad-batches", type=int, default=1, help="batches per optimizer step (%(default)s)")
    add("--epochs", type=float, default=1.0, help="passes over the data (%(default)s)")
    add("--steps", type=int, help="optimizer steps, in place of --epochs")
    add("--every", type=int, help="steps between validations and checkpoints (default: a tenth of all)")
    add("--lr", type=float, help="peak learning rate (default: 2e-4 with --lora, 2e-5 with --model, else 2e-3)")
    add("--aux", type=float, help="factor of the router's auxiliary loss; 0 is off (default: the model's own)")
    add("--lora", type=int, metavar="RANK", help="train LoRA adapters (PEFT) of attention, for example 16")
    add("--lora-experts", action="store_true", help="with --lora: adapters of the experts, too")
    add("--experts", choices=["4bit"], help="with --lora: the frozen experts in 4 bits (needs torchao)")
    add("--gradient-checkpointing", action=argparse.BooleanOptionalAction, default=True, help="the model's own (on)")
    add("--precision", default="bf16-mixed", choices=["bf16-mixed", "bf16-true", "32-true"], help="(%(default)s)")
    add("--strategy", default="superpipeline", choices=["superpipeline", "auto"], help="auto is plain (%(default)s)")
    add("--gpu-memory", help="at most, for example 16GiB (default: free memory)")
    add("--accelerator", default="auto", help="as in Lightning (%(default)s)")
    add("--seed", type=int, default=0, help="(%(default)s)")
    add("--resume", type=Path, help="last.ckpt of a run with the same options")
    add("--output", type=Path, default=Path("runs/finetune_moe"), help="(%(default)s)")
    return parser


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Reads the options, and reports errors that show without a model."""
    parser = make_parser()
    options = parser.parse_args(argv)
    for name in ("length", "batch_size", "accumulate_grad_batches", "epochs", "steps", "every", "lr", "lora"):
        value = getattr(options, name)
        if value is not None and value <= 0:
            parser.error(f"--{name.replace('_', '-')} {value}: expected a number above 0")
    for name, given in (("--lora-experts", options.lora_experts), ("--experts 4bit", options.experts)):
        if given and not options.lora:
            parser.error(f"{name}: only adapters can be trained then. For example: {name} --lora 16")
    if options.aux is not None and options.aux < 0:
        parser.error(f"--aux {options.aux}: expected 0 or more. For example: --aux 0.001")
    data, model = options.data, options.model
    if data and (not data.is_file() or data.suffix != ".jsonl"):
        found = "found a folder" if data.is_dir() else "not found" if not data.exists() else f"found {data.suffix}"
        parser.error(f"--data {data}: {found}. Expected a .jsonl file. For example: --data my.jsonl")
    is_path = model and (model.startswith((".", "/")) or model.endswith(".json") or model.count("/") > 1)
    if is_path and not Path(model).exists():
        parser.error(
            f"--model {model}: not found. Expected a folder, config.json or hub name, for example Qwen/Qwen3-30B-A3B"
        )
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
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast, Qwen3MoeConfig
from transformers import get_cosine_schedule_with_warmup as cosine_with_warmup

import sp_lightning
from sp_lightning import SuperpipelineStrategy

IGNORED = -100  # a label that does not count in the loss
ROWS = 'Expected "prompt" and "completion", or "text". For example: {"prompt": "2 + 2 =", "completion": " 4"}'


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

    def on_validation_epoch_end(self) -> None:
        losses = sorted(self.trainer.callback_metrics.items())
        print(f"step {self.global_step}/{self.steps}", *(f" {name} {loss:.3f}" for name, loss in losses), flush=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=self.lr)
        schedule = cosine_with_warmup(optimizer, self.steps // 20, self.steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


# ---------------------------------------------------------------------- data


def read_rows(data: Path | None) -> Iterable[dict[str, Any]]:
    if data is None:
        yield from python_functions()
        return
    for number, line in enumerate(data.read_text(encoding="utf-8").rstrip("\n").split("\n"), 1):
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"--data {data}, line {number}: not JSON ({error}). {ROWS}") from error
        yield row


def python_functions() -> Iterator[dict[str, Any]]:
    """The default data: functions of Python's standard library as prompts, their docstrings as completions."""
    for path in sorted(Path(ast.__file__).parent.glob("[a-z]*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and (text := ast.get_docstring(node)):
                yield {"prompt": f"{path.stem}.{node.name}({ast.unparse(node.args)}): ", "completion": text}


def encode(row: dict[str, Any], tokenizer: Any) -> tuple[list[int], list[int]]:
    """The tokens of a row, and their labels: the same tokens, or IGNORED where they do not count in the loss."""
    begin, end = tokenizer.bos_token or "", tokenizer.eos_token or ""
    if not isinstance(row, dict):
        raise ValueError(f"found {type(row).__name__}, expected an object")
    if "prompt" in row and "completion" in row:
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


def pack(rows: Iterable[dict[str, Any]], tokenizer: Any, length: int) -> Any:
    """Joins all rows and cuts them into windows of ``length`` tokens. The last tokens, less than a window, are dropped.

    Position ids start from 0 at each row. From them, transformers makes attention masks that keep rows apart.
    """
    tokens, labels, starts = [], [], []
    for number, row in enumerate(rows, 1):
        try:
            row_tokens, row_labels = encode(row, tokenizer)
        except (ValueError, TypeError) as error:
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
    """Byte-level BPE with 1024 tokens, trained on the default data."""
    bpe = ByteLevelBPETokenizer()
    texts = (row["prompt"] + row["completion"] for row in python_functions())
    bpe.train_from_iterator(texts, vocab_size=1024, special_tokens=["<|end|>"], show_progress=False)
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(bpe.to_str()), eos_token="<|end|>")


def read_config(options: argparse.Namespace) -> tuple[Any, Any]:
    """The model's config and its tokenizer. Weights are loaded after all input has been checked."""
    model, length = options.model, options.length
    if model is None:  # a small Qwen3-MoE: 16 experts in each of 4 blocks, 2 for each token
        tokenizer = small_tokenizer()
        size = {"hidden_size": 128, "moe_intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
        size |= {"num_key_value_heads": 4, "head_dim": 32, "num_experts": 16, "num_experts_per_tok": 2}
        size |= {"vocab_size": len(tokenizer), "max_position_embeddings": max(length, 256)}
        config: Any = Qwen3MoeConfig(eos_token_id=tokenizer.eos_token_id, **size)
    else:
        config = AutoConfig.from_pretrained(model)
        longest = getattr(config, "max_position_embeddings", length)
        if length > longest:
            raise ValueError(
                f"--length {length}: {model} reads at most {longest} tokens. For example: --length {longest}"
            )
        tokenizer = small_tokenizer() if Path(model).is_file() else AutoTokenizer.from_pretrained(model)
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
        with torch.device("meta"):
            empty = AutoModelForCausalLM.from_config(config)
            if options.experts:
                sp_lightning.pack_experts(empty)
            add_adapters(empty, options)
    return config, tokenizer


def attention_layers(model: Any) -> list[str]:
    """The linear modules of attention, which get adapters."""
    linear = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    found = [name for name in linear if "attn" in name or "attention" in name]
    if not found:
        raise ValueError(f"--lora: {type(model).__name__} has no torch.nn.Linear whose name contains attn or attention")
    return found


def expert_stacks(model: Any) -> list[str]:
    """The parameters that hold all experts of a block."""
    found = [
        name for name, _ in model.named_parameters() if name.endswith(("experts.gate_up_proj", "experts.down_proj"))
    ]
    if not found:
        raise ValueError(f"--lora-experts: {type(model).__name__} has no experts.gate_up_proj and experts.down_proj")
    return found


def add_adapters(model: Any, options: argparse.Namespace) -> Any:
    from peft import LoraConfig, get_peft_model

    stacks = expert_stacks(model) if options.lora_experts else None
    size = {"r": options.lora, "lora_alpha": 2 * options.lora}
    targets = {"target_modules": attention_layers(model), "target_parameters": stacks}
    return get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **targets, **size))


def load_model(options: argparse.Namespace, config: Any) -> Any:
    """The model on the CPU. The strategy copies layers to the GPU when they are needed."""
    # bf16-mixed computes in bfloat16. Weights that are trained stay in float32, frozen ones need no more than bfloat16.
    half = options.precision == "bf16-true" or (options.precision == "bf16-mixed" and options.lora)
    dtype = torch.bfloat16 if half else torch.float32
    quantised = getattr(config, "quantization_config", None) or {}
    random = options.model is None or Path(options.model).is_file()
    if options.experts and not random and quantised.get("quant_method") == "mxfp4":
        model = load_mxfp4(options.model, config, dtype)
    else:
        if random:
            model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        else:
            model = AutoModelForCausalLM.from_pretrained(options.model, config=config, dtype=dtype)
        if options.experts:
            sp_lightning.pack_experts(model)  # before adapters are added
    if options.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if options.lora:
        model = add_adapters(model, options)
    return model.train()  # from_pretrained returns it in evaluation mode, and Lightning keeps the mode


def load_mxfp4(model: str, config: Any, dtype: torch.dtype) -> Any:
    """A model whose experts stay in 4 bits, as in its files. from_pretrained would dequantise them."""
    from huggingface_hub import snapshot_download

    folder = (
        model if Path(model).is_dir() else snapshot_download(model, allow_patterns=["*.json", "model*.safetensors"])
    )
    with torch.device("meta"):
        loaded = AutoModelForCausalLM.from_config(config, dtype=dtype)
    sp_lightning.load_mxfp4(loaded, folder)
    return loaded


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
        config, tokenizer = read_config(options)
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
    lr = options.lr or (2e-4 if options.lora else 2e-5 if options.model else 2e-3)
    module = FineTune(load_model(options, config), lr, steps, options.aux)
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
    tokenizer.save_pretrained(saved)
    print(f"Saved: {saved}. Checkpoint: {last}. Losses: {options.output / 'logs'}.")
    print(f"To continue, repeat the command with --resume {last} --steps {2 * steps}.")
    if not (options.lora and options.model is None):  # an adapter needs the base model that it names
        print(f"To generate: python examples/generate_llm.py --model {saved}")


if __name__ == "__main__":
    main()
