"""The optimizer's step on the host, for ``plan``: a pass over memory if it is fused, more if it computes much."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from sp_lightning.cli.arguments import Question
from sp_lightning.plan.ledger import Ledger, make_ledger
from sp_lightning.plan.plan import Plan

_EIGHT_BITS_SECONDS = 21e-9  # per parameter, measured on two cores: tests/results/2026-11-22-updates-cpu.md
_MOST_OBLONG = 8  # Muon is for the matrices of layers; those of a vocabulary (embeddings, heads) are more oblong


@dataclass(frozen=True)
class HostStep:
    """How an optimizer's step runs.

    Attributes:
        name: what it is called in the answer.
        optimizers: optimizers with the same state, so that host memory can be counted.
        seconds: what a step takes, if that is not a pass of a fused optimizer over memory; None if it is.
        why: how many seconds, in words; empty for a fused optimizer.
        separable: whether it can run in the background nevertheless.
    """

    name: str
    optimizers: tuple[torch.optim.Optimizer, ...]
    seconds: float | None = None
    why: str = ""
    separable: bool = False

    @property
    def waits(self) -> bool:
        """Whether the device waits for it, because it cannot run in the background."""
        return self.seconds is not None and not self.separable

    def early(self, question: Question) -> bool:
        """Whether each layer is updated in backward, after which its gradients are freed."""
        return question.accumulate == 1 and question.overlap == "backward" and not self.waits

    def ledger(self, question: Question, plan: Plan) -> Ledger:
        """The host's memory and its traffic."""
        pieces = question.overlap != "off" and self.seconds is None
        return make_ledger(
            plan,
            self.optimizers,
            early=self.early(question),
            accumulate=question.accumulate,
            clips=question.clip,
            scales=question.precision == "16-mixed",
            pieces=pieces,
            narrow=pieces,
            sliced=question.transfer == "sliced",
        )


def refuse_step(question: Question) -> None:
    """Refuses steps that cannot be.

    Raises:
        ValueError: nothing is trained, or gradients are clipped that are not all there.
    """
    if question.predict and (question.accumulate > 1 or question.clip):
        raise ValueError("--accumulate and --clip are for training, and nothing is trained here; leave them out.")
    if question.clip and question.overlap == "backward":
        raise ValueError(
            "--overlap backward updates layers before all gradients are there, and --clip needs them. Leave one of them out."
        )


def host_step(question: Question, module: nn.Module) -> HostStep | None:
    """The step of the optimizer that the question names; None for inference.

    Raises:
        ValueError: nothing in the module is trained, or torchao is missing.
    """
    if question.predict:
        return None
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    if not trained:
        raise ValueError(f"No parameter of {question.model!r} requires a gradient. Say --predict.")
    asked = question.step_seconds
    if question.optimizer == "muon":
        matrices = [weight for weight in trained if _is_for_muon(weight)]
        # SGD with momentum has one tensor of state for each matrix, as Muon has. The others are AdamW's, by convention.
        others = [weight for weight in trained if not _is_for_muon(weight)]
        momentum = [torch.optim.SGD(matrices, momentum=0.95)] if matrices else []
        optimizers = (*momentum, *([torch.optim.AdamW(others)] if others else []))
        if asked is None:
            flops = muon_flops(matrices)
            seconds = flops / (question.host_tflops * 1e12)
            why = f"{flops / 1e12:.3g} TFLOP on the host, {seconds:.3g} s with {question.host_tflops:g} TFLOP/s (--host-tflops)"
            return HostStep("Muon", optimizers, seconds, why)
        return HostStep("Muon", optimizers, asked, f"{asked:g} s (--step-seconds)")
    if question.optimizer == "adamw8bit":
        return _eight_bits(question, trained)
    fused = torch.optim.SGD(trained, momentum=0.9) if question.optimizer == "sgd" else torch.optim.AdamW(trained)
    name = "SGD with momentum" if question.optimizer == "sgd" else "AdamW"
    if asked is None:
        return HostStep(name, (fused,))
    return HostStep(f"an optimizer with the state of {name}", (fused,), asked, f"{asked:g} s (--step-seconds)")


def _eight_bits(question: Question, trained: list[nn.Parameter]) -> HostStep:
    """torchao's AdamW8bit, which converts its state in each step: only a measurement tells how long that takes.

    Raises:
        ValueError: torchao is missing.
    """
    try:
        from torchao.optim import AdamW8bit
    except ImportError as error:
        raise ValueError("--optimizer adamw8bit needs torchao: pip install torchao") from error
    seconds, said = question.step_seconds, ""
    if seconds is None:
        seconds = _EIGHT_BITS_SECONDS * sum(parameter.numel() for parameter in trained)
        said = f", {1e9 * _EIGHT_BITS_SECONDS:g} ns per parameter as on two CPU cores"
    return HostStep(
        "AdamW8bit", (AdamW8bit(trained),), seconds, f"{seconds:.3g} s{said} (--step-seconds)", separable=True
    )


def muon_flops(matrices: Iterable[Tensor]) -> int:
    """What Muon multiplies in a step: five Newton–Schulz iterations for each matrix, as ``torch.optim.Muon`` does them.

    An iteration of an m × n matrix, m ≤ n, has products of m·n·m, m·m·m and m·m·n multiplications and additions.

    Args:
        matrices: of shape ``(rows, columns)``.
    """
    total = 0
    for matrix in matrices:
        m, n = sorted(matrix.shape)
        total += 5 * (2 * m * m * n + 2 * m**3 + 2 * m * m * n)
    return total


def _is_for_muon(weight: Tensor) -> bool:
    return weight.ndim == 2 and max(weight.shape) <= _MOST_OBLONG * min(weight.shape)
