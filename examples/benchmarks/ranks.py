"""Several devices of one node: seconds per step and host memory, beside one device, Lightning's ddp and FSDP2. One row each.

A small Llama on the machine's accelerators, or on the CPU with gloo: as many processes as there are to be devices, forked
from one that has imported everything. Each device has so many tokens, whatever their number. Host memory is the sum of the
processes' PSS, in which a page that several have counts once: the most that it was until the first step began, and what it
is after the last. It is not looked at in between. On a CPU the devices' own memory is in it.

From the root of the repository::

    python -m examples.benchmarks.ranks --ranks 1 2 4 --out rows.jsonl
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import socket
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import DDPStrategy
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset
from transformers import LlamaConfig, LlamaForCausalLM

from examples.benchmarks import cli, rows
from examples.benchmarks.contestants import HostShards, ShardedTask
from examples.benchmarks.workloads import Task
from sp_lightning import SuperpipelineStrategy

FIRST = 2  # steps before the measured ones
LOOK = 0.05  # seconds between two looks at memory
_START, _END = "set-up is over", "the last step is over"


class Net(nn.Module):
    """A language model whose call gives its loss."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.llama = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=256, hidden_size=width, intermediate_size=3 * width, num_hidden_layers=layers,
                num_attention_heads=8, use_cache=False,
            )
        )  # fmt: skip

    def forward(self, ids: Tensor) -> Tensor:
        loss: Tensor = self.llama(input_ids=ids, labels=ids).loss
        return loss


WAYS: dict[str, tuple[str, Callable[[int, str], Any]]] = {
    "plain": ("plain Lightning, one device", lambda ranks, file: "auto"),
    "ddp": ("Lightning's ddp", lambda ranks, file: DDPStrategy()),
    "fsdp2": (
        "FSDP2 CPUOffloadPolicy",
        lambda ranks, file: HostShards(data_parallel_size=ranks, tensor_parallel_size=1),
    ),
    "superpipeline": ("superpipeline", lambda ranks, file: SuperpipelineStrategy(k=2, k_prime=1)),
    "superpipeline-meta": (
        "superpipeline, module on meta with weights=",
        lambda ranks, file: SuperpipelineStrategy(k=2, k_prime=1, load_weights_from=file),
    ),
}
"""By name: what the report calls it, and its strategy, given the number of devices and a file of weights."""


def suits(way: str, ranks: int) -> bool:
    """Whether there is such a thing as this way with so many devices."""
    return way.startswith("superpipeline") or (ranks == 1) == (way == "plain")


class _Clock(pl.Callback):
    """Notes the seconds of each step, and keeps to what the parent wants to know of memory.

    Args:
        parent: is told when the steps begin and when they are over; then it looks at memory, and answers.
    """

    def __init__(self, parent: Connection) -> None:
        self.seconds: list[float] = []
        self.loss = 0.0
        self._parent = parent
        self._begun = 0.0

    def on_train_batch_start(self, *_: Any) -> None:
        if not self.seconds:
            self._meet(_START)
        self._begun = time.perf_counter()

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()
        self.seconds.append(time.perf_counter() - self._begun)
        self.loss = float(outputs["loss"])
        if trainer.global_step == trainer.max_steps:
            self._meet(_END)

    def _meet(self, what: str) -> None:
        self._parent.send(what)
        self._parent.recv()


class _Batches(IterableDataset[dict[str, Tensor]]):
    """Random tokens, others on each rank."""

    def __init__(self, rank: int, tokens: int) -> None:
        self._rank = rank
        self._tokens = tokens

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        source = torch.Generator().manual_seed(self._rank)
        while True:
            yield {"ids": torch.randint(0, 256, (1, self._tokens), generator=source)}


def _train(job: rows.Row, rank: int, parent: Connection) -> None:
    """One process of a way."""
    os.environ |= {"LOCAL_RANK": str(rank), "NODE_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": job["port"]}
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // job["ranks"]))
    clock = _Clock(parent)
    pl.seed_everything(0, verbose=False)
    with torch.device("meta" if job["way"].endswith("meta") else "cpu"):
        net = Net(job["width"], job["layers"])
    module = ShardedTask(net, None) if job["way"] == "fsdp2" else Task(net)
    trainer = pl.Trainer(
        strategy=WAYS[job["way"]][1](job["ranks"], job["file"]), accelerator="auto", devices=job["ranks"],
        max_steps=FIRST + job["steps"], logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=[clock],
    )  # fmt: skip
    trainer.fit(module, DataLoader(_Batches(rank, job["tokens"]), batch_size=None))
    parent.send({"seconds": clock.seconds[FIRST:], "loss": clock.loss})
    parent.close()
    os._exit(0)  # processes that are connected wait for each other when they end in order


def pss(pids: Sequence[int]) -> int:
    """Bytes of host memory that processes have together: a page that n processes have is 1/n of a page of each."""
    total = 0
    for pid in pids:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        total += next(int(line.split()[1]) for line in lines if line.startswith("Pss:")) * 1024
    return total


def measure(way: str, ranks: int, *, steps: int, width: int, layers: int, tokens: int, file: str) -> rows.Row:
    """Trains in one way on so many devices.

    Args:
        way: a key of :data:`WAYS`.
        ranks: how many devices.
        steps: how many steps are measured.
        width, layers: of the model.
        tokens: of a step on each device.
        file: safetensors of the model.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    job = {
        "way": way, "ranks": ranks, "steps": steps, "width": width, "layers": layers, "tokens": tokens, "file": file,
        "port": port,
    }  # fmt: skip
    row: rows.Row = {"kind": "ranks", **{name: job[name] for name in job if name not in ("file", "port")}}
    with torch.device("meta"):
        row["parameters"] = sum(parameter.numel() for parameter in Net(width, layers).parameters())
    context: Any = multiprocessing.get_context("fork")
    ends, processes = [], []
    for rank in range(ranks):
        here, there = context.Pipe()
        processes.append(context.Process(target=_train, args=(job, rank, there)))
        processes[-1].start()
        there.close()
        ends.append(here)
    try:
        return {**row, "status": "ok", **_followed(ends, [process.pid for process in processes])}
    except (EOFError, OSError) as error:
        return {**row, "status": "failed", "error": f"a process has ended before its time: {error!r}"}
    finally:
        for process in processes:
            process.join(1)
            process.kill()


def _followed(ends: Sequence[Connection], pids: Sequence[int]) -> rows.Row:
    """Watches memory until the steps begin, then lets them run, then looks once more."""
    setup = 0
    waiting = list(ends)
    while waiting:
        setup = max(setup, pss(pids))
        for end in list(waiting):
            if end.poll(LOOK / len(waiting)):
                end.recv()
                waiting.remove(end)
    setup = max(setup, pss(pids))
    _answer(ends)
    for end in ends:
        end.recv()
    after = pss(pids)
    _answer(ends)
    found = [end.recv() for end in ends]
    seconds = [max(step) for step in zip(*(each["seconds"] for each in found), strict=True)]  # the slowest rank's
    return {
        "step_seconds": seconds, "median_step_seconds": statistics.median(seconds), "loss": found[0]["loss"],
        "setup_bytes": setup, "after_bytes": after,
    }  # fmt: skip


def _answer(ends: Sequence[Connection]) -> None:
    for end in ends:
        end.send("go on")


def _write_weights(file: str, width: int, layers: int) -> None:
    pl.seed_everything(0, verbose=False)
    state = {f"net.{name}": value.clone() for name, value in Net(width, layers).state_dict().items()}
    save_file(state, file)
    os._exit(0)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4], help="numbers of devices (1 2 4)")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), help="(all)")
    parser.add_argument("--steps", type=int, default=6, help="that are measured (%(default)s)")
    parser.add_argument("--width", type=int, default=768, help="of the hidden states (%(default)s)")
    parser.add_argument("--layers", type=int, default=8, help="(%(default)s)")
    parser.add_argument("--tokens", type=int, default=128, help="of a step on each device (%(default)s)")
    parser.add_argument("--out", type=cli.rows_file, default="runs/benchmarks/rows.jsonl", help="(%(default)s)")
    options = parser.parse_args(argv)
    shape = {"width": options.width, "layers": options.layers}
    with cli.orderly(options.out), tempfile.TemporaryDirectory() as folder:
        file = f"{folder}/model.safetensors"
        writer = multiprocessing.get_context("fork").Process(target=_write_weights, args=(file, *shape.values()))
        writer.start()
        writer.join()
        for way in options.ways:
            for ranks in (each for each in options.ranks if suits(way, each)):
                row = measure(way, ranks, steps=options.steps, tokens=options.tokens, file=file, **shape)
                rows.append(options.out, {**rows.origin(), **row})
                told = (
                    f"{row.get('median_step_seconds', 0):.3f} s per step, {row.get('after_bytes', 0) / 2**30:.2f} GiB"
                )
                print(f"{way} on {ranks}: {told if row['status'] == 'ok' else row['error']}", flush=True)


if __name__ == "__main__":
    main()
