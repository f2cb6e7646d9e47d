"""Generate with a causal language model that is larger than the GPU's memory. Copy it with common.py.

    python examples/generate_llm.py                                  # a small random model, without downloads
    python examples/generate_llm.py --model runs/finetune_llm/model --chat --prompt "What does heapq.merge do?"
    python examples/generate_llm.py --model meta-llama/Llama-3.1-70B-Instruct --prompts prompts.jsonl --batch-size 64 \\
        --new-tokens 256                                             # on a 24 GB card
    python examples/generate_llm.py --prompts prompts.jsonl --resume # or --dial, or --strategy auto (plain Lightning)

``--prompts`` is a text file with a prompt per line, or JSONL rows: ``{"prompt": "..."}`` or ``{"messages": [...]}``.
``--output`` has the same rows with "completion" and its number of "tokens". ``--model`` may be a folder of adapters, as
``finetune_llm.py --lora`` writes it. Each token needs all layers: a larger batch gives more tokens per second.

Time and memory of the third command on a 24 GB card, *estimated* for 25 GB/s over PCIe and prompts of 512 tokens:

    superpipeline plan examples/shapes/llama-3-70b.json --precision bf16-true --tokens 512 --generate 256 \\
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
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import common


def parse(argv: Sequence[str] | None = None) -> Any:
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
    precision = "(bf16-true; 32-true for the default model on a CPU)"
    add("--precision", choices=["bf16-true", "32-true"], help=precision)
    add("--resume", action="store_true", help="continue --output of an interrupted run with the same options")
    common.add_run_options(parser, "generate_llm.jsonl")
    options = common.read_options(parser, argv)
    if options.temperature < 0 or options.top_p > 1:
        options.error("--temperature must be 0 or more, --top-p 1 or less. For example: --temperature 0.7 --top-p 0.95")
    if options.prompts and not options.prompts.is_file():
        options.error(f"--prompts {options.prompts}: not found. Expected .txt or .jsonl. For example: --prompts my.txt")
    if options.output.is_dir():
        options.error(f"--output {options.output}: expected a file, got a folder. For example: --output out.jsonl")
    if options.resume and not options.output.is_file():
        options.error(f"--resume: {options.output} not found. Expected the --output of an interrupted run")
    return options


if __name__ == "__main__":
    parse()  # reports wrong options before the slow imports that follow; main() reads them again

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from sp_lightning import SuperpipelineStrategy

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


def read_prompts(options: Any) -> list[dict[str, Any]]:
    file = options.prompts
    if file is None:
        rows = [{"prompt": prompt} for prompt in options.prompt or PROMPTS]
    elif file.suffix == ".jsonl":
        rows = [row for _, row in common.read_jsonl(file, ROWS, "--prompts")]
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


def read_config(model: str | None) -> tuple[Any, Any]:
    """The model's config and its tokenizer. Weights are loaded after all input has been checked."""
    if model is None:
        return common.small_llama(small := common.byte_pairs(PROMPTS, 512)), small
    source, adapter = model, Path(model) / "adapter_config.json"
    if adapter.is_file():
        source = json.loads(adapter.read_text())["base_model_name_or_path"]
        if not source:
            raise ValueError(f"--model {model}: these adapters do not name their base model (base_model_name_or_path)")
    config = AutoConfig.from_pretrained(source)
    return config, common.byte_pairs(PROMPTS, 512) if Path(model).is_file() else AutoTokenizer.from_pretrained(model)


def load_model(options: Any, config: Any) -> Any:
    """The model on the CPU. The strategy copies layers to the GPU when they are needed."""
    dtype = torch.bfloat16 if options.precision == "bf16-true" else torch.float32
    if options.model is None or Path(options.model).is_file():
        return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()  # random weights
    return AutoModelForCausalLM.from_pretrained(options.model, dtype=dtype)  # with adapters, if the folder has some


def main(argv: Sequence[str] | None = None) -> None:
    options = parse(argv)
    common.prepare(options, "bf16-true")
    with common.errors_in_the_input(options):  # before any work
        # Other options: keep_on_gpu, k, disk, ... (examples/guide/options.md)
        ours = SuperpipelineStrategy(gpu_memory=options.gpu_memory)
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
    generation: dict[str, Any] = {"max_new_tokens": options.new_tokens, "do_sample": False}
    if options.temperature:
        generation |= {"do_sample": True, "temperature": options.temperature, "top_p": options.top_p}
    seed = options.seed + len(done) // options.batch_size

    def make_module(output: Path = Path(os.devnull)) -> Generate:
        return Generate(load_model(options, config), tokenizer, output, generation, seed)

    def batches(rows: Any) -> Any:
        return DataLoader(rows, options.batch_size, collate_fn=list)

    if options.dial:
        prompts = batches((rows * 5 * options.batch_size)[: 5 * options.batch_size])
        print(common.measure(options, make_module, prompts, predict=True, steps=5))
        return
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text("".join(line + "\n" for line in done), encoding="utf-8")

    strategy = "auto" if options.strategy == "auto" else ours  # auto is plain Lightning
    quiet: dict[str, Any] = {"logger": False, "enable_progress_bar": sys.stdout.isatty()}
    trainer = pl.Trainer(strategy=strategy, devices=1, **common.settings(options), **quiet)
    begin = time.perf_counter()
    trainer.predict(make_module(options.output), batches(rows[len(done) :]), return_predictions=False)
    seconds = time.perf_counter() - begin
    *lines, _ = options.output.read_text(encoding="utf-8").split("\n")
    tokens, speed = sum(json.loads(line)["tokens"] for line in lines[len(done) :]), "per second"
    print(*lines[:3], sep="\n")
    print(f"Generated {tokens:,} tokens in {seconds:.1f} s ({tokens / seconds:,.1f} {speed}). Saved: {options.output}.")


if __name__ == "__main__":
    main()
