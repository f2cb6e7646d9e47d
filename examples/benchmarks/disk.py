"""A disk below host memory: step time beside its limit, peak memory, and generation beside accelerate's disk offload.

Each measurement is a process of its own, so that its peak is its own. The limit of a step is the largest of what a run with
everything in memory takes (compute and memory), and of the bytes that the system has read, written, and both in a step, at the
speeds of the disk for these that are measured first.

A slower disk is this one in a control group, which the kernel limits by a token bucket. As root, with control groups of version 1
(version 2 was not tried; ``systemd-run --scope -p "IOReadBandwidthMax=/dev/… 300M"`` sets such limits there)::

    group=/sys/fs/cgroup/blkio/disk && mkdir -p $group
    echo "$(stat -c %Hd:%Ld /scratch) 300000000" | tee $group/blkio.throttle.{read,write}_bps_device
    echo $$ > $group/cgroup.procs

``--host-memory group`` leaves the limit to the control group of memory that the benchmark runs in.

From the root of the repository::

    python -m examples.benchmarks.disk --folder /scratch --host-memory 2GiB --out rows.jsonl
    python -m examples.benchmarks.disk --folder /scratch --parts largest
"""

from __future__ import annotations

import argparse
import hashlib
import multiprocessing
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils.data import DataLoader

from examples.benchmarks import rows
from sp_lightning import SuperpipelineStrategy
from sp_lightning.capabilities.disk.mapped_file import MappedFile, populate
from sp_lightning.core.plan.units import human_bytes, parse_bytes

STEPS = 6  # by default in training, else always
FIRST = 2  # steps before the measured ones
NEW_TOKENS = 6
_PROBE = 2**27


class Net(pl.LightningModule):
    """A Llama that trains with AdamW and generates."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            vocab_size=4096, hidden_size=width, intermediate_size=11 * width // 4, num_hidden_layers=layers,
            num_attention_heads=8, max_position_embeddings=256,
        )  # fmt: skip
        self.llama = LlamaForCausalLM(config)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.llama(input_ids=batch, labels=batch, use_cache=False).loss
        return loss

    def predict_step(self, batch: Tensor, batch_idx: int) -> Any:
        return self.llama.generate(batch, max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, do_sample=False)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-4, fused=True)


class Times(pl.Callback):
    """The moments at which batches ended."""

    def __init__(self) -> None:
        self.at: list[float] = []
        self.moved: list[tuple[int, int]] = []

    def on_train_batch_end(self, *_: Any) -> None:
        self.at.append(time.perf_counter())
        self.moved.append(bytes_on_disks())

    def on_predict_batch_end(self, *_: Any) -> None:
        self.at.append(time.perf_counter())

    @property
    def seconds(self) -> float:
        """Of a batch, the median."""
        return statistics.median(b - a for a, b in zip(self.at[FIRST - 1 :], self.at[FIRST:], strict=False))

    @property
    def bytes_read_and_written(self) -> tuple[float, float]:
        """Of a batch that is trained, on average, by the disk itself."""
        (read, written), (read_last, written_last) = self.moved[FIRST - 1], self.moved[-1]
        count = len(self.moved) - FIRST
        return (read_last - read) / count, (written_last - written) / count


def peak() -> int:
    """The most bytes of memory that this process has had. What ``getrusage`` says counts those of its parent, too."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


def bytes_on_disks() -> tuple[int, int]:
    """What this process has had disks read and write so far, page cache not counted."""
    text = Path("/proc/self/io").read_text()
    return int(text.split("read_bytes:")[1].split()[0]), int(text.split("\nwrite_bytes:")[1].split()[0])


def evict(folder: str) -> None:
    """Has the system forget what it has read of files, again and again, as it must if memory cannot hold them."""

    def forget() -> None:
        files = [os.open(file, os.O_RDONLY) for file in Path(folder).rglob("*") if file.is_file()]
        for file in files:
            os.fdatasync(file)
        while True:
            for file in files:
                os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            time.sleep(0.02)

    threading.Thread(target=forget, daemon=True).start()


def trainer_for(strategy: Any, times: Times, **options: Any) -> pl.Trainer:
    """A quiet trainer on the CPU."""
    return pl.Trainer(
        strategy=strategy, accelerator="cpu", devices=1, max_epochs=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=[times], **options,
    )  # fmt: skip


def digest(module: nn.Module, optimizer: Any) -> str:
    """Of all weights and of all state, tensor by tensor."""
    result = hashlib.blake2s()
    for tensor in (*module.parameters(), *(v for state in optimizer.state.values() for v in state.values())):
        result.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return result.hexdigest()


def train(asked: dict[str, Any]) -> dict[str, Any]:
    """Trains some steps. Returns seconds of a step, and the peak of resident memory before anything is compared."""
    pl.seed_everything(1, verbose=False)
    module, times = Net(asked["width"], asked["layers"]), Times()
    given = None if asked["host_memory"] == "group" else asked["host_memory"]
    below = {"disk": asked["folder"], "host_memory": given} if asked["host_memory"] else {}
    strategy = SuperpipelineStrategy(k=1, k_prime=1, optimizer_overlap=asked["overlap"], **below)
    trainer = trainer_for(strategy, times, gradient_clip_val=1.0 if asked["overlap"] == "forward" else None)
    batches = [torch.randint(0, 4096, (1, asked["tokens"])) for _ in range(asked["steps"])]
    trainer.fit(module, DataLoader(batches, batch_size=None))  # type: ignore[arg-type]
    highest = peak()
    return {
        "seconds": times.seconds, "peak": highest, "digest": digest(module, trainer.optimizers[0]),
        "parameters": sum(p.numel() for p in module.parameters()),
        "on_disk": strategy.ledger.on_disk, "weights_on_disk": strategy.ledger.weights_on_disk,
        "gradients_on_disk": strategy.ledger.gradients_on_disk, "traffic": strategy.ledger.disk_traffic,
        "bytes": times.bytes_read_and_written,
    }  # fmt: skip


def adapt(asked: dict[str, Any]) -> dict[str, Any]:
    """Trains adapters over a base whose weights are in a file."""
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaForCausalLM

    pl.seed_everything(1, verbose=False)
    with torch.device("meta"):
        module, times = Net(asked["width"], asked["layers"]), Times()
    base = LlamaForCausalLM.from_pretrained(asked["file"], dtype="auto")
    module.llama = get_peft_model(base, LoraConfig(target_modules="all-linear", r=8))
    below = {"disk": asked["folder"], "host_memory": asked["adapt_memory"]} if asked["adapt_memory"] else {}
    strategy = SuperpipelineStrategy(k=1, k_prime=1, optimizer_overlap="backward", save_frozen=False, **below)
    trainer = trainer_for(strategy, times)
    batches = [torch.randint(0, 4096, (1, asked["tokens"])) for _ in range(asked["steps"])]
    trainer.fit(module, DataLoader(batches, batch_size=None))  # type: ignore[arg-type]
    highest = peak()
    adapters = nn.ParameterList([p for p in module.parameters() if p.requires_grad])
    return {
        "seconds": times.seconds, "peak": highest, "digest": digest(adapters, trainer.optimizers[0]),
        "weights_in_memory": strategy.ledger.weights,
    }  # fmt: skip


def generate(asked: dict[str, Any]) -> dict[str, Any]:
    """Generates from a file of weights, with this package or with accelerate."""
    times, prompt = Times(), torch.arange(16)[None]
    if asked["with"] == "accelerate":
        from accelerate import init_empty_weights, load_checkpoint_and_dispatch

        with init_empty_weights(include_buffers=False):
            module = Net(asked["width"], asked["layers"]).eval()
        on_disk = {f"model.layers.{i}": "disk" for i in range(asked["layers"])}
        places = {
            **on_disk,
            "model.embed_tokens": "cpu",
            "model.norm": "cpu",
            "model.rotary_emb": "cpu",
            "lm_head": "cpu",
        }
        folder = tempfile.mkdtemp(dir=Path(asked["file"]).parent)
        load_checkpoint_and_dispatch(module.llama, asked["file"], device_map=places, offload_folder=folder)
        if asked["evicts"]:
            evict(folder)
        found = []
        with torch.no_grad():
            before, _ = bytes_on_disks()
            for _ in range(STEPS):
                found.append(module.predict_step(prompt, 0))
                times.on_predict_batch_end()
    else:
        with torch.device("meta"):
            module = Net(asked["width"], asked["layers"]).eval()
        module.llama.model.rotary_emb = type(module.llama.model.rotary_emb)(
            module.llama.config
        )  # its buffers are in no file
        strategy = SuperpipelineStrategy(
            k=1, k_prime=1, disk=asked["folder"], host_memory=asked["host_memory"], load_weights_from=asked["file"]
        )
        prompts: Any = [prompt[0]] * STEPS
        before, _ = bytes_on_disks()
        found = trainer_for(strategy, times).predict(module, DataLoader(prompts, batch_size=1)) or []
        print(" ".join(strategy.remarks()) or strategy.stats())
    return {
        "seconds": times.seconds / NEW_TOKENS, "peak": peak(),
        "read_for_each": (bytes_on_disks()[0] - before) / STEPS / NEW_TOKENS,
        "tokens": hashlib.blake2s(torch.cat(list(found)).numpy().tobytes()).hexdigest(),
    }  # fmt: skip


def apart(work: Callable[[dict[str, Any]], dict[str, Any]], asked: dict[str, Any]) -> dict[str, Any]:
    """Runs something in a process of its own; an error is the answer then."""
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_answer, args=(work, asked, theirs))
    process.start()
    theirs.close()
    try:
        found: dict[str, Any] = ours.recv()
    except EOFError:
        found = {"error": "the process ended without an answer"}
    process.join()
    return found


def _answer(work: Callable[[dict[str, Any]], dict[str, Any]], asked: dict[str, Any], pipe: Any) -> None:
    try:
        pipe.send(work(asked))
    except Exception as error:
        pipe.send({"error": f"{type(error).__name__}: {error}"})


def speeds(folder: Path) -> tuple[float, float, float]:
    """Bytes per second that this disk reads, writes, and moves if it does both at the same time, through mapped memory."""
    file = MappedFile(folder)
    memories = [file.allocate(_PROBE, pin=False) for _ in range(8)]
    for memory in memories:
        memory.renew()
        memory.common.fill_(1)
    file.leave()

    def measured(reads: int, writes: int) -> float:
        for memory in memories[len(memories) - writes :]:
            memory.renew()
            memory.common.fill_(1)
        begun = time.perf_counter()
        written = threading.Thread(target=file.leave)
        written.start()
        for memory in memories[:reads]:
            populate(memory.common.data_ptr(), _PROBE)
        written.join()
        seconds = time.perf_counter() - begun
        for memory in memories[:reads]:
            memory.use()
        file.leave()
        return (reads + writes) * _PROBE / seconds

    return measured(4, 0), measured(0, 4), measured(4, 4)


def _training(base: dict[str, Any], out: Path | None) -> None:
    all_in_memory = apart(train, {**base, "host_memory": None})
    fastest = speeds(Path(base["folder"]))
    found = apart(train, base)
    row = {"kind": "disk training", **base, **found, "speeds": fastest, "in_memory_error": all_in_memory.get("error")}
    if "error" not in found and "error" not in all_in_memory:
        read, written = found["bytes"]
        limits = {
            "in memory": all_in_memory["seconds"], "reads": read / fastest[0], "writes": written / fastest[1],
            "both": (read + written) / fastest[2],
        }  # fmt: skip
        row |= {
            "limits": limits, "share_of_limit": max(limits.values()) / found["seconds"],
            "least_bytes": 2 * (found["on_disk"] + found["weights_on_disk"] + found["gradients_on_disk"]),
            "bitwise": found["digest"] == all_in_memory["digest"], "in_memory_peak": all_in_memory["peak"],
        }  # fmt: skip
    _write(row, out)


def _generation(base: dict[str, Any], out: Path | None) -> None:
    with tempfile.TemporaryDirectory(dir=base["folder"]) as folder:
        file = Path(folder) / "model.safetensors"
        pl.seed_everything(1, verbose=False)
        save_file(Net(base["width"], base["layers"]).llama.state_dict(), file, metadata={"format": "pt"})
        for name, evicts in (("superpipeline", True), ("accelerate", True), ("accelerate", False)):
            asked = {
                **base,
                "host_memory": base["generate_memory"],
                "with": name,
                "evicts": evicts,
                "file": str(file),
            }
            _write(
                {"kind": "disk generation", **asked, "file_bytes": file.stat().st_size, **apart(generate, asked)}, out
            )


def _adapters(base: dict[str, Any], out: Path | None) -> None:
    """Adapters over a base in its file: with little memory, then with all in memory."""
    with tempfile.TemporaryDirectory(dir=base["folder"]) as folder:
        pl.seed_everything(1, verbose=False)
        Net(base["width"], base["layers"]).llama.save_pretrained(folder)
        nbytes = sum(file.stat().st_size for file in Path(folder).glob("*.safetensors"))
        found, whole = (
            apart(adapt, {**base, "file": folder, "adapt_memory": memory}) for memory in (base["adapt_memory"], None)
        )
        row = {"kind": "disk adapters", **base, "file_bytes": nbytes, **found, "in_memory_peak": whole.get("peak")}
        row |= {"in_memory_seconds": whole.get("seconds"), "bitwise": found.get("digest") == whole.get("digest")}
        _write(row, out)


def _largest(base: dict[str, Any], out: Path | None) -> None:
    """The most layers that train within the memory, by bisection; then once more with everything in memory."""
    limit, fits, too_many = parse_bytes("--host-memory", base["host_memory"]), 1, base["most_layers"]
    best: dict[str, Any] = {}
    while fits + 1 < too_many:
        layers = (fits + too_many) // 2
        found = apart(train, {**base, "layers": layers})
        if "error" in found or found["peak"] > limit:
            too_many = layers
        else:
            fits, best = layers, found
        print(f"{layers} layers: {found.get('error') or human_bytes(found['peak'])}", flush=True)
    whole = apart(train, {**base, "layers": fits, "host_memory": None})
    _write(
        {
            "kind": "disk largest", **base, "layers": fits, **best, "in_memory_peak": whole.get("peak"),
            "in_memory_seconds": whole.get("seconds"), "bitwise": whole.get("digest") == best.get("digest"),
        },
        out,
    )  # fmt: skip


def _write(row: dict[str, Any], out: Path | None) -> None:
    print({key: value for key, value in row.items() if key not in ("digest", "tokens")}, flush=True)
    if out is not None:
        rows.append(out, {**rows.origin(), "status": "failed" if "error" in row else "ok", **row})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", default=tempfile.gettempdir(), help="on the disk that is measured (%(default)s)")
    parser.add_argument("--host-memory", default="2GiB", help="or group, for what a control group leaves (%(default)s)")
    parser.add_argument("--generate-memory", default="1250MiB", help="for generation, so that layers are read in place")
    parser.add_argument("--adapt-memory", default="1300MiB", help="for adapters, whose base is read in place")
    parser.add_argument(
        "--optimizer-overlap", choices=("backward", "forward"), default="backward",
        help="when updates run; forward clips by norm, so that all gradients are there at once",
    )  # fmt: skip
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--most-layers", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--steps", type=int, default=STEPS, help=f"of training, at least {FIRST + 2} (%(default)s)")
    parser.add_argument(
        "--parts", nargs="+", choices=("train", "generate", "adapters", "largest"), default=["train", "generate"]
    )
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    base = {
        "folder": asked.folder, "host_memory": asked.host_memory, "width": asked.width, "layers": asked.layers,
        "tokens": asked.tokens, "steps": asked.steps, "most_layers": asked.most_layers, "generate_memory": asked.generate_memory,
        "adapt_memory": asked.adapt_memory, "overlap": asked.optimizer_overlap,
    }  # fmt: skip
    if "train" in asked.parts:
        _training(base, asked.out)
    if "generate" in asked.parts:
        _generation(base, asked.out)
    if "adapters" in asked.parts:
        _adapters(base, asked.out)
    if "largest" in asked.parts:
        _largest(base, asked.out)


if __name__ == "__main__":
    main()
