"""Generate with a causal language model that is larger than the GPU's memory. One file, to copy and to change.

    python examples/generate_llm.py                                  # a small random model, without downloads
    python examples/generate_llm.py --model runs/finetune_llm/model --chat --prompt "What does heapq.merge do?"
    python examples/generate_llm.py --model meta-llama/Llama-3.1-70B-Instruct --prompts prompts.jsonl --batch-size 64 \\
        --new-tokens 256                                             # on a 24 GB card
    python examples/generate_llm.py --prompts prompts.jsonl --resume # continue an interrupted run
    python examples/generate_llm.py --strategy auto                  # plain Lightning, for comparison
    python examples/generate_llm.py --dial                           # memory and time of k and k', measured

``--prompts`` is a text file with a prompt per line, or JSONL rows: ``{"prompt": "..."}`` or ``{"messages": [...]}``.
``--output`` has the same rows with "completion" and its number of "tokens". ``--model`` may be a folder of adapters, as
``finetune_llm.py --lora`` writes it. Each token needs all layers: a larger batch gives more tokens per second.

Time and memory of the third command on a 24 GB card, *estimated* for 25 GB/s over PCIe and prompts of 512 tokens:

    python -m sp_lightning plan examples/shapes/llama-3-70b.json --precision bf16-true --tokens 512 --generate 256 \\
        --batch-size 64 --gpu-memory 22GiB --host-memory 160GiB
        # 49.3 s for the prompts, then 5.56 s for each token of 64 sequences, 11.5 tokens/s
        # device memory 21.2 GiB, host memory 131.4 GiB
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# ---------------------------------------------------------------------- options


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    add = parser.add_argument
    add("--model", help="hub name, folder, or config.json for random weights (default: a small Llama, random weights)")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--prompts", type=Path, help=".txt with a prompt per line, or .jsonl (default: some examples)")
    which.add_argument("--prompt", nargs="+", metavar="TEXT", help="one or more prompts")
    add("--chat", action="store_true", help="each prompt is a user's message, in the format of the chat template")
    add("--batch-size", type=int, default=4, help="prompts at once (%(default)s)")
    add("--new-tokens", type=int, default=64, help="per prompt, at most (%(default)s)")
    add("--temperature", type=float, default=0.0, help="of sampling, for example 0.7 (0: the most likely token)")
    add("--top-p", type=float, default=1.0, help="of sampling (%(default)s)")
    add("--precision", default="bf16-true", choices=["bf16-true", "32-true"], help="(%(default)s)")
    add("--strategy", default="superpipeline", choices=["superpipeline", "auto"], help="auto is plain (%(default)s)")
    add("--gpu-memory", help="at most, for example 16GiB (default: free memory)")
    add("--accelerator", default="auto", help="as in Lightning (%(default)s)")
    add("--dial", action="store_true", help="in place of the run, measure memory and time for some k and k'")
    add("--seed", type=int, default=0, help="(%(default)s)")
    add("--resume", action="store_true", help="continue --output of an interrupted run with the same options")
    add("--output", type=Path, default=Path("runs/generate_llm.jsonl"), help="is replaced (%(default)s)")
    return parser


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Reads the options, and reports errors that show without a model."""
    parser = make_parser()
    options = parser.parse_args(argv)
    for name in ("batch_size", "new_tokens", "top_p"):
        value = getattr(options, name)
        if value is not None and value <= 0:
            parser.error(f"--{name.replace('_', '-')} {value}: expected a number above 0")
    if options.temperature < 0 or options.top_p > 1:
        parser.error("--temperature must be 0 or more, --top-p 1 or less. For example: --temperature 0.7 --top-p 0.95")
    if options.prompts and not options.prompts.is_file():
        parser.error(
            f"--prompts {options.prompts}: no such file. Expected .txt or .jsonl. For example: --prompts prompts.txt"
        )
    model = options.model
    is_path = model and (model.startswith((".", "/")) or model.endswith(".json") or model.count("/") > 1)
    if is_path and not Path(model).exists():
        parser.error(
            f"--model {model}: not found. Expected a folder, config.json or hub name, for example Qwen/Qwen3-4B"
        )
    if options.output.is_dir():
        parser.error(f"--output {options.output}: expected a file, got a folder. For example: --output out.jsonl")
    if options.resume and not options.output.is_file():
        parser.error(f"--resume: {options.output} not found. Expected the --output of an interrupted run")
    return options


if __name__ == "__main__":
    parse()  # reports wrong options before the slow imports that follow; main() reads them again

import lightning.pytorch as pl
import torch
from tokenizers import ByteLevelBPETokenizer, Tokenizer
from torch import nn
from torch.utils.data import DataLoader
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from sp_lightning import SuperpipelineStrategy, dial

PROMPTS = ["In Python, a generator is", "The value of", "See also the section", "Changed in version 3.11: the"]
ROWS = 'Expected "prompt" or "messages". For example: {"prompt": "2 + 2 ="}'


class Generate(pl.LightningModule):
    """Plain Lightning: only ``Trainer(strategy=...)`` decides where the layers are. Rows are appended to ``output``."""

    def __init__(
        self,
        model: nn.Module,
        tokenizer: PreTrainedTokenizerBase,
        output: Path,
        generation: dict[str, Any],
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.model: Any = model.requires_grad_(False)  # the plan reserves memory for gradients of trainable weights
        self.tokenizer: Any = tokenizer
        self.output, self.generation, self.seed = output, generation, seed
        if tokenizer.pad_token is None:
            tokenizer.pad_token = tokenizer.eos_token

    def predict_step(self, batch: list[dict[str, Any]], batch_idx: int) -> list[dict[str, Any]]:
        torch.manual_seed(self.seed + batch_idx)  # for sampling: a resumed run draws the same tokens
        # On the left: generate continues from the last position, which must be the prompt's last token.
        how: dict[str, Any] = {"padding": True, "padding_side": "left", "add_special_tokens": False}
        texts = [as_text(row, self.tokenizer) for row in batch]
        inputs = self.tokenizer(texts, return_tensors="pt", return_token_type_ids=False, **how).to(self.device)
        tokens = self.model.generate(**inputs, pad_token_id=self.tokenizer.pad_token_id, **self.generation)
        new = tokens[:, inputs["input_ids"].shape[1] :].tolist()
        end = self.model.generation_config.eos_token_id
        ends = end if isinstance(end, list) else [end]
        rows = []
        for row, ids in zip(batch, new, strict=True):
            length = next((i + 1 for i, token in enumerate(ids) if token in ends), len(ids))
            text = self.tokenizer.decode(ids[:length], skip_special_tokens=True)
            rows.append({**row, "completion": text, "tokens": length})  # padding is left out
        self.output.parent.mkdir(parents=True, exist_ok=True)
        with self.output.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        return rows


def as_text(row: dict[str, Any], tokenizer: Any) -> str:
    if "messages" in row:
        if tokenizer.chat_template is None:
            raise ValueError("messages need a tokenizer with a chat template, as instruct models have")
        return str(tokenizer.apply_chat_template(row["messages"], tokenize=False, add_generation_prompt=True))
    if not row.get("prompt"):
        raise ValueError(f"found the columns {', '.join(row)}" if "prompt" not in row else "the prompt is empty")
    return str((tokenizer.bos_token or "") + row["prompt"])


def read_prompts(options: argparse.Namespace) -> list[dict[str, Any]]:
    file = options.prompts
    if file is None:
        rows = [{"prompt": prompt} for prompt in options.prompt or PROMPTS]
    elif file.suffix == ".jsonl":
        rows = []
        for number, line in enumerate(file.read_text(encoding="utf-8").rstrip("\n").split("\n"), 1):
            try:
                rows.append(dict(json.loads(line)))
            except (ValueError, TypeError) as error:
                raise ValueError(f"--prompts {file}, line {number}: not a JSON object ({error}). {ROWS}") from error
    else:
        rows = [{"prompt": line} for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    if not rows:
        raise ValueError(f"--prompts {file}: the file is empty. Expected a prompt per line")
    chat = [{"messages": [{"role": "user", "content": row["prompt"]}]} if "prompt" in row else row for row in rows]
    return chat if options.chat else rows


def read_done(output: Path, rows: list[dict[str, Any]], batch_size: int) -> list[str]:
    """The lines of an interrupted run, in whole batches: a batch of other prompts may round in another way."""
    *lines, _ = output.read_text(encoding="utf-8").split("\n")  # the last line is empty, or was cut off
    for number, (line, row) in enumerate(zip(lines, rows, strict=False), 1):
        done = json.loads(line)
        if any(done.get(name) != value for name, value in row.items()):
            raise ValueError(f"--resume: {output}, line {number}, is of another prompt. Repeat the options of that run")
    if len(lines) >= len(rows):
        raise ValueError(f"--resume: {output} has all {len(rows)} prompts. To generate again, omit --resume")
    return lines[: len(lines) // batch_size * batch_size]


# ---------------------------------------------------------------------- model


def read_config(model: str | None) -> tuple[Any, Any]:
    """The model's config and its tokenizer. Weights are loaded after all input has been checked."""
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(PROMPTS, vocab_size=512, special_tokens=["<|end|>"], show_progress=False)
    small = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(bpe.to_str()), eos_token="<|end|>")
    if model is None:  # a small Llama
        size = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "num_attention_heads": 4}
        return LlamaConfig(vocab_size=len(small), bos_token_id=None, eos_token_id=small.eos_token_id, **size), small
    path = Path(model)
    source, adapter = model, path / "adapter_config.json"
    if adapter.is_file():
        source = json.loads(adapter.read_text())["base_model_name_or_path"]
        if not source:
            raise ValueError(f"--model {model}: these adapters do not name their base model (base_model_name_or_path)")
    return AutoConfig.from_pretrained(source), small if path.is_file() else AutoTokenizer.from_pretrained(model)


def load_model(options: argparse.Namespace, config: Any) -> Any:
    """The model on the CPU. The strategy copies layers to the GPU when they are needed."""
    dtype = torch.bfloat16 if options.precision == "bf16-true" else torch.float32
    if options.model is None or Path(options.model).is_file():
        return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()  # random weights
    return AutoModelForCausalLM.from_pretrained(options.model, dtype=dtype)  # with adapters, if the folder has some


# ---------------------------------------------------------------------- the run


def main(argv: Sequence[str] | None = None) -> None:
    options = parse(argv)
    try:  # reports errors in the input before any work
        strategy: Any = options.strategy
        if strategy == "superpipeline":  # other options: keep_on_gpu, k, disk, ... (examples/guide/options.md)
            strategy = SuperpipelineStrategy(gpu_memory=options.gpu_memory)
        rows = read_prompts(options)
        config, tokenizer = read_config(options.model)
        longest = getattr(config, "max_position_embeddings", None)
        for number, row in enumerate(rows, 1):
            try:
                length = len(tokenizer(as_text(row, tokenizer), add_special_tokens=False)["input_ids"])
            except Exception as error:  # chat templates raise their own errors
                raise ValueError(f"prompt {number}: {error}. {ROWS}") from error
            if longest and length + options.new_tokens > longest:
                raise ValueError(
                    f"prompt {number} has {length} tokens. With --new-tokens {options.new_tokens}, expected at most "
                    f"{longest}, as the model reads. Lower --new-tokens or shorten the prompt"
                )
        done = read_done(options.output, rows, options.batch_size) if options.resume else []
    except (ValueError, OSError) as error:
        make_parser().error(str(error))

    warnings.filterwarnings("ignore", message=".*does not have many workers")  # prompts in memory need none
    pl.seed_everything(options.seed, verbose=False)
    generation: dict[str, Any] = {"max_new_tokens": options.new_tokens, "do_sample": False}
    if options.temperature:
        generation |= {"do_sample": True, "temperature": options.temperature, "top_p": options.top_p}
    seed = options.seed + len(done) // options.batch_size
    module = Generate(load_model(options, config), tokenizer, options.output, generation, seed)
    if options.dial:  # the same model for each k and k', and for plain Lightning
        settings = {"accelerator": options.accelerator, "precision": options.precision}
        prompts: Any = (rows * 10 * options.batch_size)[: 10 * options.batch_size]
        data: Any = DataLoader(prompts, batch_size=options.batch_size, collate_fn=list)
        nowhere = Path(os.devnull)
        print(
            dial(
                lambda: Generate(load_model(options, config), tokenizer, nowhere, generation),
                lambda: data,
                predict=True,
                trainer=settings,
                name="generate_llm",
                gpu_memory=options.gpu_memory,
            )
        )
        return
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text("".join(line + "\n" for line in done), encoding="utf-8")

    trainer = pl.Trainer(
        strategy=strategy,
        accelerator=options.accelerator,
        devices=1,
        precision=options.precision,
        logger=False,
        enable_progress_bar=sys.stdout.isatty(),
    )
    begin = time.perf_counter()
    left: Any = rows[len(done) :]
    batches: Any = DataLoader(left, batch_size=options.batch_size, collate_fn=list)
    trainer.predict(module, batches, return_predictions=False)
    seconds = time.perf_counter() - begin

    *lines, _ = options.output.read_text(encoding="utf-8").split("\n")
    tokens = sum(json.loads(line)["tokens"] for line in lines[len(done) :])
    for line in lines[:3]:
        print(line)
    print(
        f"Generated {tokens:,} tokens in {seconds:.1f} s ({tokens / seconds:,.1f} per second). Saved: {options.output}."
    )


if __name__ == "__main__":
    main()
