"""The registry of cases: what is trained, and what each covers, in words."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from sp_lightning.core.plan.plan import Plan
from sp_lightning.registry import is_installed
from tests.support import experts, kernels, models, quantised, stacked, tables, uneven
from tests.support.runs import Batches, Make, Run


@dataclass(frozen=True)
class Case:
    """What is trained.

    Args:
        make: makes the module.
        batches: makes its batches.
        covers: what would fail here and in no other case.
        quick: the case stands for its kind in the first tier.
        without: options of the trainer that plain Lightning refuses with this module.
        shown_by: what the plan says if it is that case.
        fusible: its optimizer has a fused implementation for its gradients.
        callbacks: makes callbacks of its trainer.
        run: what the trainer does: train, predict or validate.
    """

    make: Make
    batches: Callable[[], Batches]
    covers: str
    quick: bool = False
    without: frozenset[str] = frozenset()
    shown_by: Callable[[Plan], Any] | None = None
    fusible: bool = True
    callbacks: Callable[[], list[Any]] = list
    run: Run = "fit"

    def options(self, options: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in options.items() if name not in self.without}

    def validation(self) -> Batches | None:
        """A batch that requires a gradient is a leaf of its own run; validation runs on copies without."""
        batches = self.batches()
        return None if any(getattr(batch, "requires_grad", False) for batch in batches) else batches[:2]


COVERS = {
    "llama-dropout": "attention with grouped keys and values, dropout: a real model, random numbers on the device",
    "llama-checkpoint": "transformers' checkpoints: layers come a second time in backward",
    "llama-checkpoint-reentrant": "reentrant checkpoints: a backward inside the backward",
    "lora-checkpoint": "adapters on a frozen base: layers without gradients beside layers with few",
    "gpt2-tied": "one weight that an embedding and the head use",
    "t5": "an encoder and a decoder, of which one reads the other's output",
    "t5-checkpoint": "both with checkpoints",
    "bert": "an encoder with a head that is tied",
    "resnet50": "convolutions and BatchNorm: layers of many sizes, buffers that change in forward",
    "vit": "a vision transformer with parameters beside its layers, which stay on the device",
    "lstm": "recurrent layers, whose weights one kernel takes together",
    "stack": "equal blocks between two linear layers: nothing but the window",
    "reused": "a layer that is called several times: its gradients come in parts",
    "conditional": "layers that are left out at random: prefetch guesses wrong, gradients are missing",
    "frozen": "layers that only travel one way, between others",
    "outside-call": "a part of a layer called from outside of it, before the layer itself",
    "returns-view": "a layer that returns a view of its weight, which is read when the layer is gone",
    "read-without-forward": "weights read without any module's call",
    "path-by-modules": "another algorithm if a module has hooks or a forward of its own",
    "patched-for-a-batch": "a layer's forward that is another one until the loss is there",
    "penalty-on-parameters": "a loss that reads all parameters outside of forward",
    "autograd-grad": "gradients of parameters inside the step, with a graph of their own",
    "rescaled-in-eval": "weights written in place in a forward without gradients",
    "clamped-in-forward": "weights written in place, and through .data, in a forward with gradients",
    "captured-in-forward": "weights written through references from before the step, inside their layer's forward",
    "saved-objects": "attributes of a weight that a custom Function finds again in backward",
    "gradient-penalty": "gradients of the input as a part of the loss: layers needed twice in backward",
    "parameter-hooks": "hooks on parameters, before and after their gradients are added up",
    "checkpoint-calls": "checkpoints around layers, by the user",
    "checkpoint-calls-reentrant": "reentrant checkpoints around layers, by the user",
    "checkpoint-inside": "checkpoints around the forward of layers, where no hook of a module runs again",
    "checkpoint-whole": "one checkpoint around all layers, and batches that require gradients",
    "gan": "manual optimization with two optimizers and clipping by hand",
    "target-network": "weights that the step writes into another network, through .data",
    "teacher": "a forward in inference mode within the step, which is the first one that a layer comes for",
    "lbfgs": "an optimizer whose step calls forward and backward several times",
    "sparse-embedding": "a gradient that is sparse",
    "tied-apart": "one weight in two layers that are apart, and a parameter beside all layers",
    "shared-trunk": "a list of heads around one network, which is called once for each head",
    "one-linear": "one layer and nothing else",
    "transformer-encoder": "torch's own transformer, with its fast path in evaluation",
}
QUICK = {"llama-dropout", "llama-checkpoint-reentrant", "gpt2-tied", "vit", "stack", "reused", "conditional",
         "frozen", "clamped-in-forward", "captured-in-forward", "gan", "sparse-embedding",
         "teacher"}  # fmt: skip
BY_HAND = frozenset({"accumulate_grad_batches", "gradient_clip_val", "gradient_clip_algorithm"})
WITHOUT = {
    "gan": BY_HAND,
    "lbfgs": BY_HAND,
    "sparse-embedding": BY_HAND - {"accumulate_grad_batches"},  # torch 2.10 cannot clip sparse gradients
}

CASES: dict[str, Case] = {
    name: Case(
        case.make, case.batches, COVERS[name], name in QUICK, WITHOUT.get(name, frozenset()),
        fusible=name != "sparse-embedding",
    )
    for name, case in models.CASES.items()
}  # fmt: skip


# ---------------------------------------------------------------------- embeddings of which only rows travel

OF_TABLES = {
    "looked-up": "two look-ups in one step",
    "padding": "a row without a gradient",
    "by-frequency": "gradients that are scaled by how often a row is looked up",
    "sparse": "sparse gradients of the rows that were looked up",
    "whole-as-well": "the whole weight is read beside its rows",
    "written": "rows written in place, and through .data, in forward",
    "checkpointed": "the look-up runs again in backward",
    "checkpointed-with-head": "it runs again when the whole weight has come, which it had not the first time",
    "hooked": "a hook that sees the dense gradient",
    "asked-for": "the gradient asked for inside the step, with a graph of its own",
    "frozen": "no gradient at all",
    "thawed": "a gradient from the second batch on",
    "kept": "the last step's gradients are held by the user",
    "inside": "tables inside of larger modules, two of them in a list",
    "sparse-and-dense": "a sparse gradient and a dense one of one weight",
    "dense-and-sparse": "the same, in the other order",
}


def clips_sparse_gradients() -> bool:
    """aten::linalg_vector_norm lacks SparseCPU in torch 2.10 and 2.11."""
    try:
        torch.nn.utils.get_total_norm([torch.ones(2, 2).to_sparse(1)])
    except NotImplementedError:
        return False
    return True


CASES |= {
    f"rows/{name}": Case(
        make, tables.numbers, f"rows of an embedding: {OF_TABLES[name]}", name in ("looked-up", "sparse"),
        frozenset() if name != "sparse" or clips_sparse_gradients() else BY_HAND - {"accumulate_grad_batches"},
        # A compiled module is one layer, with the table inside.
        shown_by=lambda plan: any(each.name.startswith("net.table") for each in (*plan.tables, *plan.layers)),
        fusible="sparse" not in name,
    )
    for name, make in tables.CASES.items()
}  # fmt: skip


# ---------------------------------------------------------------------- experts and quantised weights

OF_EXPERTS = {
    "mixture": "each row goes to one of four experts: layers that come only when something is routed to them",
    "one-expert": "one expert gets everything, the others no gradient",
    "switch": "a real model with experts in every second block",
}
CASES |= {
    f"experts/{name}": Case(make, batches, OF_EXPERTS[name], name == "mixture", shown_by=lambda plan: plan.experts)
    for name, (make, batches) in experts.CASES.items()
}
OF_STACKED = {
    "qwen3": "a real model with experts that are stacked in one parameter: rows of it come, and come again in backward",
    "gpt-oss": "the same with another layout of the stacks, and with biases",
    "mixtral-eager": "the same, where a loop reads the experts one by one",
    "olmoe-batched": "the same, where an index reads them all at once; a loss of the router",
    "own": "experts of a user's own class",
    "few": "experts that nothing is routed to, and that get no gradient",
    "called-twice": "two calls in one forward, for which other experts come into the slot that is in use",
    "penalised": "all experts are read outside of their module, too: their gradients leave whole",
    "kept-views": "a view of one expert is read in a call that is routed to others",
    "written": "experts that are written in place and through .data while others are away",
    "dense": "a forward that reads all experts whatever is routed",
    "frozen": "experts without gradients",
    "hooked": "a hook that writes gradients of experts that nothing was routed to",
}
CASES |= {
    f"stacked/{name}": Case(
        make, batches, OF_STACKED[name], name == "called-twice",
        shown_by=lambda plan: any(layer.rows for layer in plan.layers) or not is_installed("capabilities.experts"),
    )
    for name, (make, batches) in stacked.CASES.items()
}  # fmt: skip
OF_QUANTISED = {
    "int8": "trainable adapters on a frozen base of 8 bits: a weight travels as the parts that it consists of",
    "int4": "the same with 4 bits, whose parts have other shapes",
    "int8-checkpoint": "the same with 8 bits under checkpoints",
}
CASES |= {
    f"quantised/{name}": Case(
        make, models.tokens, OF_QUANTISED[name], name == "int8", shown_by=quantised.travels_packed
    )
    for name, make in quantised.CASES.items()
}  # fmt: skip
CASES["own-function"] = Case(
    models.convolutions, lambda: models.images(8),
    "a function of the user's, which saves a weight and has a backward inside its own, behind convolution and BatchNorm",
)  # fmt: skip
CASES["unwritten-memory"] = Case(
    models.twice(kernels.RunsKernel), models.vectors,
    "a function that saves memory that nothing has written, as FlashAttention does without dropout",
)  # fmt: skip
CASES["saved-twice"] = Case(
    models.twice(kernels.CountsSaved), models.vectors,
    "a function whose backward reads its saved tensors twice, as mamba's kernels do",
)  # fmt: skip


# ---------------------------------------------------------------------- blocks that are divided into their parts


def has_part(plan: Plan, name: str) -> bool:
    return any(layer.name == uneven.PARTS[name] for layer in plan.layers)


OF_UNEVEN = {
    "resnet": "convolutions of a residual block that are layers, while the block's statistics stay on the device",
    "vgg": "one matrix that is larger than all others together: it stays whole",
    "densenet": "a block whose parts read the outputs of all parts before them",
    "efficientnet": "parts that are called inside of a branch that is dropped at random",
    "swin": "attention that reads its children's weights is one layer, and the network beside it is two",
    "unet": "parts that are called in another order than they have in the tree",
}
CASES |= {
    f"uneven/{name}": Case(
        make, batches, OF_UNEVEN[name],
        shown_by=partial(has_part, name=name),
    )
    for name, (make, batches) in uneven.CASES.items()
}  # fmt: skip
