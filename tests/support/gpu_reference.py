"""The reference on a GPU, or on a CPU that stands for one: the plain module there, stepped on the CPU."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from itertools import product
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities import move_data_to_device
from torch import Tensor, nn

from sp_lightning.core.model.find import find_layers
from tests.support.models import CASES
from tests.support.runs import Batches, Make, loader

CPU = torch.device("cpu")
DEVICE = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
"""The GPU, or the CPU where a simulated device stands for a GPU."""

# Manual optimization, steps with a forward of their own, closures that step several times, weights that forwards write and
# callbacks on parameters' places have no simple reference.
NO_REFERENCE = {
    "gan", "lbfgs", "target-network", "rescaled-in-eval", "sparse-embedding", "clamped-in-forward", "captured-in-forward",
    "teacher",
}  # fmt: skip
NAMES = sorted(set(CASES) - NO_REFERENCE)

EXTRA_SLOTS = {
    ("returns-view", "32-true"),
    ("returns-view", "bf16-mixed"),
    ("penalty-on-parameters", "bf16-mixed"),
    ("path-by-modules", "32-true"),
    ("path-by-modules", "bf16-mixed"),
    ("saved-objects", "bf16-mixed"),
}
"""Cases whose graph or whose results hold weights beyond their layers' use, so that slots are made beyond the plan."""


REFUSED = {("parameter-hooks", "backward"): "post-accumulate hooks"}
"""Cases that cannot be updated inside backward, with what is said; the GPU's test took that for a defect."""


def reference(
    make: Make, batches: Batches, precision: str, device: str = DEVICE.type
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Losses and parameters of the plain module on the device, stepped on the CPU."""
    pl.seed_everything(7, verbose=False)
    module: Any = make()
    optimizer = module.configure_optimizers()
    masters = {p: p.detach().clone() for group in optimizer.param_groups for p in group["params"]}
    on_cpu = {p: torch.nn.Parameter(value) for p, value in masters.items()}
    for group in optimizer.param_groups:
        group["params"] = [on_cpu[p] for p in group["params"]]
    module.to(device)
    module.train()
    losses = []
    for batch in loader(batches):  # which takes a random number, as it does for a trainer
        batch = move_data_to_device(batch, torch.device(device))
        with torch.autocast(device, torch.bfloat16, enabled=precision == "bf16-mixed", cache_enabled=False):
            loss = module.loss(batch)
        for p in module.parameters():
            p.grad = None
        loss.backward()
        for p, master in on_cpu.items():
            master.grad = None if p.grad is None else p.grad.cpu()
        optimizer.step()
        with torch.no_grad():
            for p, master in on_cpu.items():
                p.copy_(master)
        losses.append(loss.detach().cpu())
    return losses, {key: value.cpu() for key, value in module.state_dict().items()}


# ---------------------------------------------------------------------- runs beside the unchanged program

GPU: dict[str, Any] = {"accelerator": "gpu", "recorded": "nothing"}
BATCHES = [torch.linspace(-1, 1, 64).view(4, 16).roll(step, 1) for step in range(6)]
OPTIMIZERS: dict[str, Any] = {
    "AdamW": partial(torch.optim.AdamW, lr=1e-2),
    "AdamW, amsgrad, maximised": partial(torch.optim.AdamW, lr=1e-2, amsgrad=True, maximize=True),
    "AdamW, fused": partial(torch.optim.AdamW, lr=1e-2, fused=True),
    "AdamW, far": partial(torch.optim.AdamW, lr=1e-2, betas=(0.3, 0.9)),
    "Adam, decay": partial(torch.optim.Adam, lr=1e-2, weight_decay=0.1),
    "Adam, decay, fused": partial(torch.optim.Adam, lr=1e-2, weight_decay=0.1, fused=True),
    "SGD": partial(torch.optim.SGD, lr=0.1, weight_decay=0.1),
    "SGD, momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9, dampening=0.1),
    "SGD, nesterov": partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "Adagrad": partial(torch.optim.Adagrad, lr=0.1, lr_decay=0.1, weight_decay=0.1),
}

RUNS: dict[str, dict[str, Any]] = {
    "plain": {},
    "clipped": {"gradient_clip_val": 0.1},
    "clipped by value": {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
    "accumulated, clipped": {"gradient_clip_val": 0.1, "accumulate_grad_batches": 2},
}


def ways(names: Iterable[str], precisions: Iterable[str]) -> list[tuple[str, str, str]]:
    """The optimizer, the run and the precision of each training that Lightning allows.

    In mixed precision it does not clip for a fused optimizer, which unscales gradients by itself on a GPU.
    """
    return [
        (name, run, precision)
        for name, run, precision in product(names, RUNS, precisions)
        if not ("fused" in name and "clipped" in run and precision.endswith("-mixed"))
    ]


def staying(gpu_layers: int | float, module: nn.Module) -> Iterable[nn.Parameter]:
    """The parameters of the layers that stay."""
    return [parameter for layer in find_layers(module, gpu_layers=gpu_layers).stay for _, parameter in layer.parameters]


def by_place(gpu_layers: int | float, *, fuse: bool = True, device: torch.device = CPU) -> Any:
    """The reference of ``gpu_layers`` (a number, or a share): plain Lightning, whose steps are divided by place.

    Parameters that do not stay are copied to the CPU, and stepped fused. A CPU stands for both places: it is taken for a device
    that is not the host.
    """
    from sp_lightning.tools.comparison.reference import StepsOnHost

    class StepsByPlace(StepsOnHost):
        host = CPU if device != CPU else torch.device("meta")

    return StepsByPlace(device, fuse=fuse, stay=partial(staying, gpu_layers))
