"""Memory and copied bytes of the page of 150 lines, of sp_lightning and of plain training, on the page's own model."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import asdict
from typing import Any, NamedTuple

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn

from examples.superpipeline_in_150_lines import Superpipeline, keeping, size
from sp_lightning.tools.comparison.activations import CountingStrategy

PARTS = ("weights", "gradients", "optimizer state", "activations")
STEPS = 3


class Net(LightningModule):
    def __init__(self, net: nn.Sequential) -> None:
        super().__init__()
        self.net = net
        self.losses: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.losses.append(loss.detach())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def net_and_batches() -> tuple[nn.Sequential, list[tuple[Tensor, Tensor]]]:
    """The model and the data of the page."""
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Sequential(nn.LayerNorm(256), nn.Linear(256, 256), nn.GELU()) for _ in range(8)))
    return net, [(torch.randn(64, 256), torch.randn(64, 256)) for _ in range(STEPS)]


def trained_by(precision: str, strategy: Any) -> Net:
    """Trains with Lightning."""
    net, batches = net_and_batches()
    module = Net(net)
    quiet: dict[str, Any] = dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_model_summary", "enable_progress_bar"), False
    )
    trainer = Trainer(max_epochs=1, accelerator="cpu", precision=precision, strategy=strategy, **quiet)  # type: ignore[arg-type]
    trainer.fit(module, torch.utils.data.DataLoader(batches, batch_size=None))  # type: ignore[arg-type]
    return module


def trained_by_page(k: int, k_prime: int) -> tuple[list[Tensor], nn.Module, Superpipeline]:
    net, batches = net_and_batches()
    streamed = Superpipeline(net, k, k_prime)
    optimizer, losses = torch.optim.AdamW(net.parameters(), lr=1e-3), []
    for x, target in batches:
        losses.append(streamed.forward_and_backward(x, target))
        optimizer.step()
        optimizer.zero_grad()
    return losses, net, streamed


def equal(losses: Sequence[Tensor], net: nn.Module, plain: Net) -> str:
    pairs = [*zip(losses, plain.losses, strict=True), *zip(net.parameters(), plain.net.parameters(), strict=True)]
    return "equal" if all(torch.equal(*pair) for pair in pairs) else "different"


class Row(NamedTuple):
    """What a way takes, in KiB: its memory, and what is uploaded and offloaded in a batch."""

    memory: float
    uploaded: float
    offloaded: float
    verdict: str


def measure(k: int, k_prime: int) -> dict[str, Row]:
    """Each way, with the window of the page."""
    found: dict[str, tuple[Sequence[int], float, float, str]] = {}
    window = {"k": k, "k_prime": k_prime}
    for precision in ("32-true", "bf16-mixed"):
        plain = trained_by(precision, "auto")
        net, batches = deepcopy(plain.net), net_and_batches()[1]
        kept: dict[int, int] = {}
        mixed = torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16-mixed")
        with mixed, keeping(kept, without=[*net.parameters()]):
            loss = nn.functional.mse_loss(net(batches[0][0]), batches[0][1])
        weights = size(net.parameters())
        loss.backward()
        found[f"plain, {precision}"] = (weights, weights, 2 * weights, sum(kept.values())), 0, 0, "equal"
        if precision == "32-true":
            losses, net_of_page, page = trained_by_page(**window)
            memory = [page.peak[part] for part in PARTS]
            copied = page.uploaded / STEPS, page.offloaded / STEPS
            found["the page"] = memory, *copied, equal(losses, net_of_page, plain)
        for activations in ("keep", "recompute"):
            strategy = CountingStrategy(**window, activations=activations)  # type: ignore[arg-type]
            ours = trained_by(precision, strategy)
            stats = asdict(strategy.stats())
            memory = [
                *(stats[f"peak_{part}_bytes"] for part in ("weight", "gradient", "optimizer")),
                strategy.held.peak,
            ]
            copied = stats["fetched_bytes"] / STEPS, stats["offloaded_gradient_bytes"] / STEPS
            found[f"{activations}, {precision}"] = memory, *copied, equal(ours.losses, ours.net, plain)
    return {
        name: Row(sum(memory) / 1024, up / 1024, down / 1024, how) for name, (memory, up, down, how) in found.items()
    }
