"""Who competes: what each needs, and how it trains or predicts the same module."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from torch import Tensor, nn

from examples.benchmarks.workloads import BLOCKS, Task, Workload
from sp_lightning import SuperpipelineStrategy  # which registers "superpipeline"

# Host memory as multiples of the weights' bytes: weight, gradient, two moments. Pinned blocks (weights, gradients) are
# rounded up to powers of two unless torch is told otherwise: twice their size at worst.
TRAINING = 4.0
ROUNDED = 6.0
# What transformers of billions of parameters cost DeepSpeed, measured by others: 23 bytes per parameter.
DEEPSPEED = 23 / 4
EXACT_PINNING = {"PYTORCH_ALLOC_CONF": "pinned_max_round_threshold_mb:1"}


def unfused(parameters: Any) -> torch.optim.Optimizer:
    """AdamW as users write it."""
    return torch.optim.AdamW(parameters, lr=1e-4)


@dataclass(frozen=True)
class Contestant:
    """Plain Lightning, everything on the device; and what others differ in.

    Attributes:
        name: on the command line.
        label: in the report.
        host_copies: by task that it serves, host memory as a multiple of the weights' bytes.
        distributions: what must be installed, by the names of package registries.
        device: the type of device that it needs, or "" for any.
        precisions: those it can do; empty for all.
        environment: variables of its process.
        updates_on_host: its optimizer works on host memory, so that the update's seconds can be read off the clock.
        checkpointing: it computes activations again in backward, where the workload does not say so for all.
        compiled: each block is compiled (``block.compile()``).
        clips: gradients are clipped to this norm; None if they are not.
        attention: a name of transformers' for how attention is computed; None for its default.
    """

    name: str = "plain"
    label: str = "plain Lightning"
    host_copies: Mapping[str, float] = field(default_factory=lambda: {"train": 1.0, "predict": 1.0})
    distributions: tuple[str, ...] = ()
    device: str = ""
    precisions: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    updates_on_host: bool = False
    checkpointing: bool = False
    compiled: bool = False
    clips: float | None = None
    attention: str | None = None

    def module(self, net: nn.Module, workload: Workload) -> Task:
        """The LightningModule around the network."""
        # Lightning refuses to clip a fused optimizer in mixed precision.
        return Task(net) if self.clips is None else Task(net, unfused)

    def trainer_arguments(self, workload: Workload) -> dict[str, Any]:
        """Trainer arguments beyond those that all contestants share, except for clipping."""
        return {"strategy": "auto"}


THREADS = (15, 12, 10, 8)
"""Numbers of threads that update in the background."""
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "default": (", optimizer not fused", {}),
    "off": (", fused", {"optimizer_overlap": "off"}),
    "forward": (", fused, under forward", {"optimizer_overlap": "forward"}),
    "backward": (", fused, under backward", {"optimizer_overlap": "backward"}),
    "device": (", stepped on the device", {"optimizer_on": "gpu"}),
    "early": (", stepped on the device in backward", {"optimizer_on": "gpu", "optimizer_overlap": "backward"}),
    "keep": (", activations kept", {"activations": "keep"}),
    "recompute": (", activations recomputed", {"activations": "recompute"}),
    "offload": (", activations offloaded", {"activations": "offload"}),
    # Of a device without such a bound, "auto" would keep whatever plain Lightning can keep.
    "auto": (" in 16 GiB, activations auto", {"activations": "auto", "gpu_memory": "16GiB"}),
    **{
        f"threads{threads}": (f", fused, under backward, {threads} threads", {"optimizer_overlap": "backward"})
        for threads in THREADS
    },
}
"""Label and options of the strategy, by the last part of a contestant's name: superpipeline-2:1-forward."""


class Offloaded(Contestant):
    """Plain Lightning with torch's own way of activations to the host."""

    def module(self, net: nn.Module, workload: Workload) -> Task:
        return SavedOnHost(net)


class SavedOnHost(Task):
    """A Task whose saved tensors, weights among them, go to pinned host memory."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        with torch.autograd.graph.save_on_cpu(pin_memory=True):
            return super().training_step(batch, batch_idx)


@dataclass(frozen=True)
class Superpipeline(Contestant):
    """This project."""

    k: int = 2
    k_prime: int = 1
    variant: str = ""

    def module(self, net: nn.Module, workload: Workload) -> Task:
        if self.variant == "default":  # left open, it would run fused
            return Task(net, lambda parameters: torch.optim.AdamW(parameters, lr=1e-4, fused=False))
        return super().module(net, workload)

    def trainer_arguments(self, workload: Workload) -> dict[str, Any]:
        _, options = VARIANTS.get(self.variant, ("", {}))
        return {"strategy": SuperpipelineStrategy(k=self.k, k_prime=self.k_prime, **options)}


class WithHook(Task):
    """A Task with a hook that many modules have, beside every batch."""

    def on_train_batch_end(self, *_: Any) -> None:
        """Metrics would be logged here."""


@dataclass(frozen=True)
class Ordinary(Contestant):
    """This project as README shows it: ``SuperpipelineStrategy()`` and no option, around an ordinary module.

    Attributes:
        task: the module.
    """

    task: type[Task] = Task

    def module(self, net: nn.Module, workload: Workload) -> Task:
        return self.task(net, unfused)

    def trainer_arguments(self, workload: Workload) -> dict[str, Any]:
        return {"strategy": "superpipeline"}


class Staying(Ordinary):
    """The same with as many layers on the device, with their optimizer state, as fit."""

    def trainer_arguments(self, workload: Workload) -> dict[str, Any]:
        return {"strategy": SuperpipelineStrategy(gpu_layers=0.5)}


class Recomputing(Ordinary):
    """The same with all activations computed again in backward."""

    def trainer_arguments(self, workload: Workload) -> dict[str, Any]:
        return {"strategy": SuperpipelineStrategy(activations="recompute")}


class Fsdp(Contestant):
    """Lightning's FSDPStrategy, each block a unit."""

    def trainer_arguments(self, workload: Workload) -> dict[str, Any]:
        return {"strategy": FSDPStrategy(cpu_offload=True, auto_wrap_policy=set(BLOCKS))}


class HostShards(ModelParallelStrategy):
    """ModelParallelStrategy that leaves parameters where fully_shard wants them: on the host."""

    def model_to_device(self) -> None:
        assert self.model is not None
        for module in self.model.modules():
            for name, buffer in module._buffers.items():
                module._buffers[name] = None if buffer is None else buffer.to(self.root_device)


class ShardedTask(Task):
    """A Task whose blocks, and whose rest, are FSDP2 units with weights in host memory."""

    def __init__(self, net: nn.Module, weights: torch.dtype | None) -> None:
        super().__init__(net)
        self.weights = weights

    def configure_model(self) -> None:
        from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard

        if isinstance(self.net, FSDPModule):
            return
        options: dict[str, Any] = {
            "mesh": self.device_mesh["data_parallel"],  # type: ignore[index]
            "offload_policy": CPUOffloadPolicy(pin_memory=torch.cuda.is_available()),
            "mp_policy": MixedPrecisionPolicy(param_dtype=self.weights, reduce_dtype=torch.float32),
        }
        for module in list(self.net.modules()):
            if isinstance(module, BLOCKS):
                fully_shard(module, **options)
        fully_shard(self.net, **options)


class Fsdp2(Contestant):
    """FSDP2's fully_shard through Lightning's ModelParallelStrategy, casting weights itself as its guide advises."""

    def module(self, net: nn.Module, workload: Workload) -> Task:
        return ShardedTask(net, torch.bfloat16 if workload.precision == "bf16-mixed" else None)

    def trainer_arguments(self, workload: Workload) -> dict[str, Any]:
        return {"strategy": HostShards()}


@dataclass(frozen=True)
class DeepSpeed(Contestant):
    """ZeRO with the optimizer offloaded, in stage 3 the weights as well, and the optimizer that it demands for that.

    Memory is pinned, as DeepSpeed does by default and Lightning does not.
    """

    stage: int = 3

    def module(self, net: nn.Module, workload: Workload) -> Task:
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        return Task(net, lambda parameters: DeepSpeedCPUAdam(parameters, lr=1e-4, weight_decay=0.01, adamw_mode=True))

    def trainer_arguments(self, workload: Workload) -> dict[str, Any]:
        from lightning.pytorch.strategies import DeepSpeedStrategy

        options: dict[str, Any] = {"offload_optimizer": True, "offload_parameters": self.stage == 3, "pin_memory": True}
        return {"strategy": DeepSpeedStrategy(stage=self.stage, **options)}


class TorchAo(Contestant):
    """Plain Lightning with torchao's optimizer, which keeps its state and works on the host."""

    def module(self, net: nn.Module, workload: Workload) -> Task:
        from torchao.optim import CPUOffloadOptimizer

        class Optimizer(CPUOffloadOptimizer):
            # Lightning asks an optimizer for these, and torchao's does not initialize its base class.
            defaults: ClassVar[dict[str, Any]] = {}
            state: ClassVar[dict[Any, Any]] = {}

        return Task(net, lambda parameters: Optimizer(parameters, torch.optim.AdamW, lr=1e-4, fused=True))


class Bare(Contestant):
    """Predicts without a Trainer: whatever offloads an ``nn.Module``."""

    def prepare(self, net: nn.Module, device: torch.device) -> None:
        """Make the network, which is on the host, compute on the device."""
        raise NotImplementedError


class Accelerate(Bare):
    """accelerate's cpu_offload."""

    def prepare(self, net: nn.Module, device: torch.device) -> None:
        from accelerate import cpu_offload

        cpu_offload(net, execution_device=device)


class Diffusers(Bare):
    """diffusers' group offloading, each block a group with a stream of its own; what is outside, leaf by leaf."""

    def prepare(self, net: nn.Module, device: torch.device) -> None:
        from diffusers.hooks import apply_group_offloading

        options: dict[str, Any] = {"onload_device": device, "use_stream": device.type == "cuda"}
        stacks = [module for module in net.modules() if _holds_blocks(module)]
        for stack in stacks:
            apply_group_offloading(stack, offload_type="block_level", num_blocks_per_group=1, **options)
        inside = {child for stack in stacks for child in stack.modules()}
        for module in net.modules():
            if module not in inside and next(module.parameters(recurse=False), None) is not None:
                apply_group_offloading(module, offload_type="leaf_level", **options)


def _holds_blocks(module: nn.Module) -> bool:
    lists = [child for child in module.children() if isinstance(child, (nn.ModuleList, nn.Sequential))]
    return any(isinstance(member, BLOCKS) for each in lists for member in each)


def superpipeline(k: int, k_prime: int, variant: str = "") -> Superpipeline:
    """This project at one (k, k'), with defaults but for the variant's options."""
    copies = {"train": TRAINING, "predict": 1.0}
    name, label = f"superpipeline-{k}:{k_prime}", f"superpipeline {k}:{k_prime}"
    if variant:
        name, label = f"{name}-{variant}", label + VARIANTS[variant][0]
    threads = variant.removeprefix("threads")
    # The process has one thread more than updates have.
    environment = {"OMP_NUM_THREADS": str(int(threads) + 1)} if threads != variant else {}
    options: dict[str, Any] = {"k": k, "k_prime": k_prime, "variant": variant, "environment": environment}
    return Superpipeline(name, label, copies, updates_on_host=True, **options)


def _rival(kind: Callable[..., Contestant], name: str, label: str, copies: float, **more: Any) -> Contestant:
    return kind(name, label, {"train": copies}, updates_on_host=True, **more)


_OURS = {"train": TRAINING}
_FLASH: dict[str, Any] = {"distributions": ("flash-attn",), "device": "cuda", "attention": "flash_attention_2"}
ORDINARY: tuple[Contestant, ...] = (
    Contestant("plain-clipped", "plain Lightning, clipped", {"train": 1.0}, clips=1.0),
    Contestant("plain-compiled", "plain Lightning, compiled blocks", {"train": 1.0}, compiled=True),
    Ordinary("default", "superpipeline, README's snippet", _OURS, updates_on_host=True),
    Ordinary("default-clipped", "superpipeline, README's snippet, clipped", _OURS, updates_on_host=True, clips=1.0),
    Ordinary("default-hooked", "superpipeline, README's snippet, a hook", _OURS, updates_on_host=True, task=WithHook),
    Staying("stay", "superpipeline, gpu_layers=0.5", _OURS, updates_on_host=True),
    Staying("stay-clipped", "superpipeline, gpu_layers=0.5, clipped", _OURS, updates_on_host=True, clips=1.0),
    Contestant("plain-flash", "plain, checkpointing, flash-attn", {"train": 1.0}, checkpointing=True, **_FLASH),
    Recomputing(
        "recompute-flash", "superpipeline, activations recomputed, flash-attn", _OURS, updates_on_host=True, **_FLASH
    ),
    Ordinary(
        "default-compiled",
        "superpipeline, README's snippet, compiled blocks",
        _OURS,
        updates_on_host=True,
        compiled=True,
    ),
)
"""What an ordinary program gets, beside plain Lightning with the same."""

RIVALS: tuple[Contestant, ...] = (
    Contestant(),
    Contestant("plain-recompute", "plain, checkpointing", {"train": 1.0}, checkpointing=True),
    Offloaded("plain-offload", "plain, save_on_cpu", {"train": 1.0}),
    _rival(Fsdp, "fsdp", "FSDP cpu_offload", ROUNDED, device="cuda"),
    _rival(Fsdp2, "fsdp2", "FSDP2 CPUOffloadPolicy", ROUNDED),
    _rival(
        Fsdp2, "fsdp2-exact", "FSDP2, pinned sizes exact", TRAINING, device="cuda", environment=EXACT_PINNING
    ),
    _rival(
        DeepSpeed, "deepspeed", "DeepSpeed ZeRO-3 offload", DEEPSPEED,
        distributions=("deepspeed",), device="cuda", precisions=("32-true", "bf16-mixed"),
    ),
    _rival(
        DeepSpeed, "deepspeed-2", "DeepSpeed ZeRO-2 offload", DEEPSPEED,
        distributions=("deepspeed",), device="cuda", precisions=("32-true", "bf16-mixed"), stage=2,
    ),
    _rival(TorchAo, "torchao", "torchao CPUOffloadOptimizer", ROUNDED, distributions=("torchao",), device="cuda"),
    Accelerate("accelerate", "accelerate cpu_offload", {"predict": 1.0}, ("accelerate",)),
    Diffusers("diffusers", "diffusers group offload", {"predict": 3.0}, ("diffusers",)),  # pinned, rounded mirrors
)  # fmt: skip


def known(pairs: list[tuple[int, int]]) -> dict[str, Contestant]:
    """All contestants by name, this project once for each (k, k'), in the order of a run."""
    ours = [superpipeline(*pair) for pair in pairs]
    return {each.name: each for each in (RIVALS[0], *ours, *RIVALS[1:])}


def by_name(name: str) -> Contestant:
    """One contestant.

    Raises:
        ValueError: there is none of that name.
    """
    head, _, rest = name.partition("-")
    pair, _, variant = rest.partition("-")
    if head == "superpipeline" and pair and (not variant or variant in VARIANTS):
        return superpipeline(*parse_pair(pair), variant)
    try:
        return {**known([]), **{each.name: each for each in ORDINARY}}[name]
    except KeyError:
        names = ", ".join([*known([]), *(each.name for each in ORDINARY)])
        raise ValueError(
            f"There is no contestant {name!r}; there are {names} and superpipeline-2:1, or other k:k', "
            f"or superpipeline-2:1-forward; its variants are {list(VARIANTS)}."
        ) from None


def parse_pair(text: str) -> tuple[int, int]:
    """``"4:2"`` as k and k'.

    Raises:
        ValueError: it is something else.
    """
    pair = re.fullmatch(r"([1-9]\d*):([1-9]\d*)", text)
    if pair is None:
        raise ValueError(f"{text!r} is no pair k:k' of numbers from 1. For example 2:1.")
    return int(pair[1]), int(pair[2])
