"""The engine's own cost on the host: hooks, packing, scheduling, per visit of a layer, beside FSDP2's. One row.

Tiny layers on the CPU, where computing and copying take next to nothing: what a step takes beyond the plain one,
divided by the visits (each layer once forward, once backward). Same layers, one process, one thread, taking turns.
Prediction is measured, too: forwards in inference mode, where layers make room for others and where all of them fit. So is
generation with a cache of keys and values, beside accelerate's offloading, which is transformers' own: ``device_map`` uses it.
The Python calls of this package per visit are counted as well: another load of the machine does not change their number.

From the root of the repository::

    python -m examples.benchmarks.overhead --seconds 20 --out rows.jsonl
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType

import accelerate
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

import sp_lightning
from examples.benchmarks import rows
from sp_lightning.core.device.device import Device
from sp_lightning.core.engine.engine import Engine
from sp_lightning.core.model.find import find_layers
from sp_lightning.core.plan.plan import make_plan

LAYERS = 24
WIDTH = 32
ROUNDS = 5
SEQUENCES = 2
NEW_TOKENS = 16  # of each
Step = Callable[[], object]


class Mlp(nn.Sequential):
    """Six parameters."""

    def __init__(self) -> None:
        super().__init__(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))


class Llama(nn.Module):
    """A decoder layer of transformers, nine parameters."""

    def __init__(self) -> None:
        super().__init__()
        config = LlamaConfig(
            hidden_size=WIDTH, intermediate_size=2 * WIDTH, num_attention_heads=2, attn_implementation="sdpa"
        )
        self.layer = LlamaDecoderLayer(config, 0)
        rotary = LlamaRotaryEmbedding(config)
        self.position = rotary(torch.zeros(1), torch.arange(8)[None])

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x, position_embeddings=self.position)


KINDS: dict[str, Callable[[], nn.Module]] = {"linear": lambda: nn.Linear(WIDTH, WIDTH), "mlp": Mlp, "llama": Llama}


def build(kind: str) -> tuple[nn.Sequential, Tensor]:
    """A stack of layers, the same each time, and its input."""
    torch.manual_seed(0)
    return nn.Sequential(*(KINDS[kind]() for _ in range(LAYERS))), torch.randn(1, 8, WIDTH)


def plain(kind: str) -> Step:
    """Forward and backward."""
    stack, x = build(kind)

    def step() -> None:
        stack(x).square().mean().backward()
        stack.zero_grad()

    return step


def superpipeline(kind: str, k: int = 2, k_prime: int = 1) -> Step:
    """The same, streamed: what the strategy does in a step, without Lightning."""
    stack, x = build(kind)
    found = find_layers(stack)
    plan = make_plan(found, k=k, k_prime=k_prime)
    assert len(plan.layers) == LAYERS
    engine = Engine(stack, found, plan, Device(torch.device("cpu")), pin=False)

    def step() -> None:
        engine.begin("train", training=True)
        with engine.saving():
            loss = stack(x).square().mean()
            engine.await_backward()
            engine.announce_backward(loss, quiet=True)
        loss.backward()
        stack.zero_grad()

    return step


def plain_prediction(kind: str) -> Step:
    """Forward in inference mode."""
    stack, x = build(kind)
    return lambda: _infer(stack, x)


def predicting(kind: str, k: int) -> Step:
    """The same, streamed: what the strategy does in a step of prediction where no hook may write weights."""
    stack, x = build(kind)
    found = find_layers(stack)
    engine = Engine(stack, found, make_plan(found, k=k, k_prime=1), Device(torch.device("cpu")), pin=False)

    def step() -> None:
        engine.begin("predict", training=False, quiet=True)
        with engine.saving():
            _infer(stack, x)
        engine.end()

    return step


@torch.inference_mode()
def _infer(stack: nn.Module, x: Tensor) -> None:
    stack(x)


def build_generator() -> tuple[LlamaForCausalLM, Tensor]:
    """A language model, the same each time, and its prompts."""
    torch.manual_seed(0)
    net = LlamaForCausalLM(
        LlamaConfig(
            hidden_size=WIDTH, intermediate_size=2 * WIDTH, num_attention_heads=2, num_hidden_layers=LAYERS, vocab_size=256
        )
    )  # fmt: skip
    return net.eval(), torch.randint(0, 256, (SEQUENCES, 8))


@torch.inference_mode()
def generate(net: LlamaForCausalLM, prompts: Tensor) -> Tensor:
    """Each prompt with its new tokens."""
    tokens: Tensor = net.generate(
        prompts, max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0
    )
    return tokens


def generators() -> dict[str, Callable[[], Tensor]]:
    """What generates the same tokens, by the name of who does."""
    (plain, prompts), (offloaded, _) = build_generator(), build_generator()
    accelerate.cpu_offload(offloaded, execution_device=torch.device("cpu"))
    return {
        "plain": lambda: generate(plain, prompts),
        **{f"superpipeline-{name}": _streamed_generator(k) for name, k in (("2:1", 2), ("all:1", 2 * LAYERS))},
        "accelerate": lambda: generate(offloaded, prompts),
    }


def _streamed_generator(k: int) -> Callable[[], Tensor]:
    net, prompts = build_generator()
    found = find_layers(net)
    engine = Engine(net, found, make_plan(found, k=k, k_prime=1), Device(torch.device("cpu")), pin=False)

    def step() -> Tensor:
        engine.begin("predict", training=False, quiet=True)
        with engine.saving():
            tokens = generate(net, prompts)
        engine.end()
        return tokens

    return step


def fsdp2(kind: str) -> Step:
    """The same with ``fully_shard`` and its offloading around each layer, one rank."""
    stack, x = build(kind)
    mesh, offload = init_device_mesh("cpu", (1,)), CPUOffloadPolicy(pin_memory=False)
    for module in (*stack, stack):
        fully_shard(module, mesh=mesh, offload_policy=offload)

    def step() -> None:
        stack(x).square().mean().backward()
        stack.zero_grad()

    return step


def measure(seconds: float) -> rows.Row:
    """Median seconds per step of each, and per visit what it takes beyond the plain step."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        return {
            "kind": "overhead",
            "status": "ok",
            "layers": LAYERS,
            "models": {kind: _compare(_training(kind), 2 * LAYERS, 0.6 * seconds / len(KINDS)) for kind in KINDS},
            "calls": {kind: calls_per_visit(superpipeline(kind)) for kind in KINDS},
            "prediction": {kind: _compare(_prediction(kind), LAYERS, 0.25 * seconds / len(KINDS)) for kind in KINDS},
            "generated_tokens": SEQUENCES * NEW_TOKENS,
            "generation": _compare(same_tokens(generators()), LAYERS * NEW_TOKENS, 0.15 * seconds),
        }
    finally:
        dist.destroy_process_group()


def calls_per_visit(step: Step, steps: int = 3) -> float:
    """The Python calls of functions of this package, in training. Each resumption of a generator counts."""
    package, found = str(Path(sp_lightning.__file__).parent), 0

    def count(frame: FrameType, event: str, _: object) -> None:
        nonlocal found
        found += event == "call" and frame.f_code.co_filename.startswith(package)

    for _ in range(3):
        step()
    sys.setprofile(count)
    try:
        for _ in range(steps):
            step()
    finally:
        sys.setprofile(None)
    return found / steps / (2 * LAYERS)


def _training(kind: str) -> dict[str, Step]:
    return {"plain": plain(kind), "superpipeline-2:1": superpipeline(kind), "fsdp2": fsdp2(kind)}


def _prediction(kind: str) -> dict[str, Step]:
    ours = {f"superpipeline-{k}:1": predicting(kind, k) for k in (2, LAYERS)}
    return {"plain": plain_prediction(kind), **ours}


def same_tokens(ways: dict[str, Callable[[], Tensor]]) -> dict[str, Step]:
    """The same, once it is sure that all generate the same tokens."""
    expected = ways["plain"]()
    for name, way in ways.items():
        assert torch.equal(way(), expected), f"{name} generates other tokens"
    return dict(ways)


def _compare(steps: dict[str, Step], visits: int, seconds: float) -> dict[str, dict[str, float]]:
    times: dict[str, list[float]] = {name: [] for name in steps}
    for step in steps.values():
        for _ in range(3):
            step()
    for _ in range(ROUNDS):
        for name, step in steps.items():
            times[name] += _timed(step, seconds / ROUNDS / len(steps))
    median = {name: statistics.median(each) for name, each in times.items()}
    beyond = {name: (each - median["plain"]) / visits for name, each in median.items() if name != "plain"}
    return {"step_seconds": median, "visit_seconds": beyond}


def _timed(step: Step, seconds: float) -> list[float]:
    times: list[float] = []
    while sum(times) < seconds or not times:
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    return times


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seconds", type=rows.positive, default=20, help="for all together (%(default)s)")
    parser.add_argument("--out", type=rows.rows_file, default="runs/benchmarks/rows.jsonl", help="(%(default)s)")
    options = parser.parse_args(argv)
    with rows.orderly(options.out):
        row = {**rows.origin(), **measure(options.seconds)}
        rows.append(options.out, row)
    for what, models in (("", row["models"]), (" of prediction", row["prediction"])):
        for kind, found in models.items():
            visit = {name: f"{1e6 * each:.0f} µs" for name, each in found["visit_seconds"].items()}
            print(f"overhead per layer visit{what}, {kind}: {visit}", flush=True)
    print("Python calls per layer visit:", {kind: f"{calls:.0f}" for kind, calls in row["calls"].items()}, flush=True)
    seconds = row["generation"]["step_seconds"]
    speeds = {name: f"{row['generated_tokens'] / taken:.0f}" for name, taken in seconds.items()}
    print(f"tokens per second, {LAYERS} layers, {SEQUENCES} sequences: {speeds}", flush=True)


if __name__ == "__main__":
    main()
