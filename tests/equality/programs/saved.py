"""A custom ``torch.autograd.Function`` finds in backward the parameter that it saved. Attributes of activations are refused.

If saved-tensor hooks are active, torch makes a new tensor of what they return. A Function that adds to ``weight.main_grad``, sets
``weight.grad`` or writes ``weight.data`` in backward then trained other weights, silently.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from tests.equality.rows import program, tiers
from tests.support.models import Block, twice

MODES = ("keep, k=1", "offload, k=1", "recompute, k=1")
EACH = (
    *MODES, "backward, accumulated, two epochs", "forward, accumulated, clipped, two epochs", "clipped by norm",
    "stepped on the device, off, 32-true, plain", "50% stay, these stepped on the device, off, 32-true, simulated",
)  # fmt: skip


class Product(torch.autograd.Function):
    """``x @ weight.T``, whose backward calls ``does`` with its ``ctx``, what is saved, and the weight's gradient."""

    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any, does: Any) -> Tensor:
        output = x @ weight.t()
        ctx.save_for_backward(x, weight, x, output)
        ctx.does = does
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        saved = ctx.saved_tensors
        return gradients[0] @ saved[1], ctx.does(ctx, *saved, gradients[0].t() @ saved[0]), None


class Saves(Block):
    seen: list[Any]
    others: list[Any]
    hooked: list[Any]  # hooks run once the gradient is on the host, perhaps after the next block's backward has begun
    does: Callable[..., Any]

    def around(self, x: Tensor) -> Tensor:
        return Product.apply(x, self.outer.weight, partial(self.does, self))  # type: ignore[no-untyped-call]

    def forward(self, x: Tensor) -> Tensor:
        y: Any = self.around(torch.sin(self.inner(x)).mul_(1))
        y.tag = 1
        return x + y


def _looks(block: Any, ctx: Any, x: Any, weight: Any, again: Any, output: Any, gradient: Tensor) -> Tensor:
    """Notes the weight and the output, and registers a hook."""
    is_it = isinstance(weight, nn.Parameter), weight is block.outer.weight, getattr(weight, "main_grad", None)
    block.seen.append((*is_it, weight.is_leaf, weight.requires_grad, weight._version == block.outer.weight._version))
    block.seen.append((x.requires_grad, x.is_leaf))
    block.seen.append((hasattr(output, "tag"), output.grad_fn is ctx, ctx.needs_input_grad))
    if weight.requires_grad:
        weight.register_post_accumulate_grad_hook(lambda p: block.hooked.append(p.grad.clone()))
    return gradient


def _sets_grad(block: Any, ctx: Any, x: Any, weight: Any, again: Any, output: Any, gradient: Tensor) -> None:
    weight.grad = gradient.clone() if weight.grad is None else weight.grad + gradient


def _writes_data(block: Any, ctx: Any, x: Any, weight: Any, again: Any, output: Any, gradient: Tensor) -> Tensor:
    weight.data.sub_(gradient, alpha=0.05)
    return gradient


def saves(does: Callable[..., Any], kind: type[Saves] = Saves) -> Any:
    module = twice(kind)()
    module.seen = [[], [[] for _ in module.net.blocks]]
    for block, hooked in zip(module.net.blocks, module.seen[1], strict=True):
        block.seen, block.does, block.hooked = module.seen[0], does, hooked
        if kind is Neighbours:  # a module that holds others may not write their weights under "recompute"
            block.others = list(module.net.blocks)
        block.outer.weight.main_grad = 3.0
    return module


for does in (_looks, _sets_grad, _writes_data):
    modes = [
        each for each in EACH[1:] if does is not _writes_data or each != "recompute, k=1"
    ]  # the write is not detected
    program(
        f"saved tensors: a parameter whose backward {does.__name__[1:].replace('_', ' ')}",
        tiers(EACH[0], rest=modes), covers="an attribute, a gradient or data of the parameter itself", checkpointed=True,
    )(partial(saves, does))  # fmt: skip


def with_sgd() -> Any:
    module = saves(_sets_grad)
    module.configure_optimizers = lambda: torch.optim.SGD(module.parameters(), lr=0.1)
    return module


program(
    "saved tensors: a parameter whose backward sets grad, SGD",
    tiers(rest=["keep, k=1, simulated"]), covers="the step on the CPU found a gradient in memory of the GPU",
)(with_sgd)  # fmt: skip


class OwnHooks(Saves):
    def around(self, x: Tensor) -> Tensor:
        with saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
            return super().around(x)


class Checkpointed(Saves):
    def around(self, x: Tensor) -> Tensor:
        return checkpoint(super().around, x, use_reentrant=False)


class Reentrant(Saves):
    def around(self, x: Tensor) -> Tensor:
        return checkpoint(super().around, x, use_reentrant=True)


class Frozen(Saves):
    """Reads a frozen weight, which backward may read after the update of the others."""

    def around(self, x: Tensor) -> Tensor:
        self.outer.weight.requires_grad_(False)
        return super().around(x)


class Neighbours(Saves):
    """One Function uses the weights of two layers."""

    def around(self, x: Tensor) -> Tensor:
        other = self.others[0]
        if other is self:
            return super().around(x)
        return OfTwo.apply(x, self.outer.weight, other.outer.weight, self.seen)  # type: ignore[no-untyped-call]


class OfTwo(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any, one: Any, other: Any, seen: Any) -> Tensor:
        ctx.save_for_backward(x, one, other)
        ctx.seen = seen
        return x @ (one * other).t()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        x, one, other = ctx.saved_tensors
        with torch.DisableTorchFunctionSubclass():  # as an extension in C++ reads them
            product, gradient = one * other, gradients[0].t() @ x
            ctx.seen.append((one.main_grad, other.main_grad))
            return gradients[0] @ product, gradient * other, gradient * one, None


class Mapped(Saves):
    def around(self, x: Tensor) -> Tensor:
        return torch.vmap(lambda row: Row.apply(row, self.outer.weight, self.seen))(x)  # type: ignore[no-untyped-call]


class Row(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Any, weight: Any, seen: Any) -> Tensor:
        return weight @ x

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs[:2])
        ctx.seen = inputs[2]

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        x, weight = ctx.saved_tensors
        ctx.seen.append((getattr(weight, "main_grad", None), isinstance(weight, nn.Parameter), weight.requires_grad))
        return weight.t() @ gradients[0], gradients[0][:, None] * x, None


class Operator(Saves):
    def around(self, x: Tensor) -> Tensor:
        seen.append(self.seen)
        return product(x, self.outer.weight)


seen: list[list[Any]] = []


@torch.library.custom_op("sp_lightning_tests::product", mutates_args=())
def product(x: Tensor, weight: Tensor) -> Tensor:
    return x @ weight.t()


def _keep(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs)


def _product_backward(ctx: Any, gradient: Tensor) -> Any:
    x, weight = ctx.saved_tensors
    seen[-1].append((getattr(weight, "main_grad", None), isinstance(weight, nn.Parameter)))
    return gradient @ weight, gradient.t() @ x


product.register_autograd(_product_backward, setup_context=_keep)


class Shown(Saves):
    """Reads the saved tensors in forward, and twice."""

    def around(self, x: Tensor) -> Tensor:
        output: Any = super().around(x)
        if torch.is_grad_enabled():
            one, again = output.grad_fn.saved_tensors, output.grad_fn.saved_tensors
            self.seen.append((one[1] is again[1] is self.outer.weight, one[1].main_grad))
        return output


class Subclass(Tensor):
    pass


def _tag(x: Any) -> Any:
    x.scale = 2.0
    return x


MARKS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {  # before and after the Function's forward
    "before": (_tag, lambda x: x),
    "after": (lambda x: x, _tag),
    "subclass": (lambda x: x.as_subclass(Subclass), lambda x: x),
}


class Marked(Saves):
    mark: str

    def around(self, x: Tensor) -> Tensor:
        before, after = MARKS[self.mark]
        x = before(x)
        output = super().around(x)
        after(x)
        return output.as_subclass(Tensor)


class OfLeaf(Saves):
    """Saves a leaf with an attribute, which is found."""

    def around(self, x: Tensor) -> Tensor:
        self.scale: Any = getattr(self, "scale", _tag(torch.tensor(2.0, device=x.device)))
        scaled: Tensor = Scaled.apply(x, self.scale, self.seen)  # type: ignore[no-untyped-call]
        return super().around(scaled)


class Scaled(torch.autograd.Function):
    """What the error advises: the value is in ``ctx``."""

    @staticmethod
    def forward(ctx: Any, x: Any, scale: Any, seen: Any) -> Tensor:
        ctx.save_for_backward(scale)
        ctx.scale, ctx.seen = scale.scale, seen
        return x * scale

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (scale,) = ctx.saved_tensors
        ctx.seen.append((scale.scale, ctx.scale))
        return gradients[0] * ctx.scale, None, None


for kind in (OwnHooks, Checkpointed, Reentrant, Frozen, Neighbours, Mapped, Operator, Shown, OfLeaf):
    others = MODES[1:2] if kind in (Neighbours, Shown, OfLeaf) else MODES[1:]  # need attributes, which checkpoints lose
    program(
        f"saved tensors: a parameter, {kind.__name__}", tiers(rest=["keep, k=1", "backward, accumulated, two epochs"],
        long=others),
        covers="whichever code saves it", checkpointed=True,
    )(partial(saves, _looks, kind))  # fmt: skip
for mark in MARKS:
    what = "of the class Subclass" if mark == "subclass" else "with the attribute 'scale'"
    said = rf"RuntimeError: .*ProductBackward has saved an activation {what}.*ctx\.scale = x\.scale"
    program(
        f"saved tensors: an activation with an attribute, {mark}", tiers(MODES[0], rest=MODES[1:]),
        refused=dict.fromkeys(MODES[:2], said), covers="what backward would not find", checkpointed=True,
    )(partial(saves, _looks, type("Kind", (Marked,), {"mark": mark})))  # fmt: skip
