"""A language model's loss, whole and in chunks: what a training step adds to memory, its CPU time, and what is not bitwise equal.

From the root of the repository::

    python -m examples.benchmarks.loss

Each row is a process of its own, on the CPU and without streaming, which changes none of the results. The model has a real
vocabulary and next to nothing else.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sp_lightning import chunk_loss
from sp_lightning.core.plan.units import human_bytes

VOCABULARY, WIDTH = 128_256, 256
PRECISIONS = ("32-true", "bf16-mixed", "bf16-true")
WAYS: dict[str, dict[str, Any] | None] = {"whole": None, "keep_logits": {"keep_logits": True}, "chunks": {}}


def main(argv: Sequence[str] | None = None) -> None:
    """Measure; ``argv`` as on the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--tokens", type=int, default=1024, help="of the batch (%(default)s)")
    parser.add_argument("--chunk", type=int, default=128, help="tokens of a chunk (%(default)s)")
    parser.add_argument("--vocabulary", type=int, default=VOCABULARY, help="(%(default)s)")
    parser.add_argument("--steps", type=int, default=3, help="that are timed (%(default)s)")
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=PRECISIONS, help="(all)")
    parser.add_argument("--row", nargs=3, metavar=("PRECISION", "WAY", "FILE"), help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.row is not None:
        _measure(options, *options.row)
        return
    print(
        f"torch {torch.__version__}, {options.tokens} tokens in chunks of {options.chunk}, vocabulary {options.vocabulary}"
    )
    print(f"{'precision':<11} {'loss':<12} {'memory':>10} {'CPU s':>7}   apart: {'loss':>7} {'head':>8} {'others':>8}")
    with tempfile.TemporaryDirectory() as folder:
        for precision in options.precisions:
            whole: dict[str, Any] = {}
            for way in WAYS:
                file = str(Path(folder) / "found")
                sizes = [f"--{name}={getattr(options, name)}" for name in ("tokens", "chunk", "vocabulary", "steps")]
                command = [sys.executable, "-W", "ignore", "-m", "examples.benchmarks.loss"]
                subprocess.run([*command, *sizes, "--row", precision, way, file], check=True, stderr=subprocess.DEVNULL)
                found = torch.load(file)
                whole = whole or found
                _report(precision, way, found, whole)


def _report(precision: str, way: str, found: dict[str, Any], whole: dict[str, Any]) -> None:
    apart = {name: _apart(found["gradients"][name], each) for name, each in whole["gradients"].items()}
    head = apart.pop("lm_head.weight")
    print(
        f"{precision:<11} {way:<12} {human_bytes(found['bytes']):>10} {found['seconds']:>7.2f}          "
        f"{_apart(found['loss'], whole['loss']):>7.2g} {head:>8.2g} {max(apart.values()):>8.2g}",
        flush=True,
    )


def _apart(one: Tensor, other: Tensor) -> float:
    """The norm of a difference as a part of the second's norm; 0 only if both are bitwise the same."""
    return float((one.double() - other.double()).norm() / other.double().norm())


def _measure(options: argparse.Namespace, precision: str, way: str, file: str) -> None:
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=options.vocabulary, hidden_size=WIDTH, intermediate_size=2 * WIDTH, num_hidden_layers=2, use_cache=False,
        num_attention_heads=8, num_key_value_heads=8, max_position_embeddings=options.tokens,
    )  # fmt: skip
    net: Any = transformers.LlamaForCausalLM(config)
    net.to(torch.bfloat16 if precision == "bf16-true" else torch.float32)
    chunks = WAYS[way]
    if chunks is not None:
        chunk_loss(net, options.chunk, **chunks)
    ids = torch.randint(options.vocabulary, (1, options.tokens))

    def step() -> Tensor:
        net.zero_grad()
        mixed = (
            torch.autocast("cpu", torch.bfloat16, cache_enabled=False) if precision == "bf16-mixed" else nullcontext()
        )
        with mixed:
            loss: Tensor = net(input_ids=ids, labels=ids).loss
        loss.backward()
        return loss.detach()

    Path("/proc/self/clear_refs").write_text("5")  # the most memory is counted from here on
    before = _memory("VmRSS")
    loss = step()
    nbytes = _memory("VmHWM") - before
    gradients = {name: parameter.grad.clone() for name, parameter in net.named_parameters()}
    seconds = []
    for _ in range(options.steps):
        begin = time.process_time()
        step()
        seconds.append(time.process_time() - begin)
    torch.save({"loss": loss, "gradients": gradients, "bytes": nbytes, "seconds": statistics.median(seconds)}, file)


def _memory(name: str) -> int:
    """Bytes of this process, by a name of Linux's: those that it has (VmRSS), or the most that it had (VmHWM)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


if __name__ == "__main__":
    main()
