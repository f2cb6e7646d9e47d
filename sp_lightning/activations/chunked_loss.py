"""The loss of a causal language model of transformers, from a few tokens' logits at a time.

A model computes ``logits = self.lm_head(hidden)`` and hands them to its ``loss_function``, which copies them to float32 and
saves the logarithms of all probabilities. There are two ways to have that back:

- The loss function alone is exchanged (``keep_logits=True``). Logits and their gradient stay, in the head's dtype, which is
  a third of what there was. All is bitwise the same, because each token's loss and gradient are computed from its own row.
- The head gives a promise of logits, which the loss function keeps chunk by chunk, each in a checkpoint of torch's. No
  logits stay. The price is a second product with the head's weight, whose gradient becomes a sum over chunks: another
  order of sums, and a second gradient of that size while it is made.

The head is called by its module's call, not read: hooks, adapters, quantised weights and the engine see ordinary calls. It
is exchanged only while the model's own forward runs, by an attribute of the instance that is found before the module: PEFT
calls that forward past all hooks, and the tree of modules stays as it is.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from functools import partial, update_wrapper
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

_IGNORED = -100


def chunk_loss(model: nn.Module, tokens: int = 1024, *, keep_logits: bool = False) -> None:
    """Has a causal language model of transformers compute its loss from a few tokens' logits at a time.

    This changes a forward with ``labels`` while gradients are enabled. All others are as before: evaluation, generation,
    training without ``labels``. Call it where the model is made, before or after adapters are added. It needs no streaming.

    With ``keep_logits`` everything is bitwise the same, and what is saved in float32 is not there any more. Without, logits
    are not there either, and ``output.logits`` has none to read. Loss and gradients are bitwise the same then, too, where
    the rows of a product do not depend on how many there are; but for the head's weights, whose gradient is a sum over
    chunks, each rounded to its dtype. Dropout in an adapter of the head draws other numbers.

    Args:
        model: the model of transformers itself, or PEFT's around it.
        tokens: how many tokens there are in a chunk. Fewer take little less memory and more time.
        keep_logits: whether the logits stay, in the dtype of the head.

    Raises:
        ValueError: the model has no head, or another loss than transformers' for causal language models; or ``tokens`` is
            no positive whole number.
    """
    if isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 1:
        raise ValueError(f"chunk_loss(tokens={tokens!r}): give a whole number of at least 1, for example 1024.")
    whole: Any = model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]
    loss: Any = getattr(whole, "loss_function", None)
    forward: Any = whole.forward
    plain = loss.args[0] if _is_ours(loss, _loss) else loss
    head = whole.get_output_embeddings() if hasattr(whole, "get_output_embeddings") else None
    _check(whole, head, plain)
    whole.loss_function = partial(_loss, plain, tokens, keep_logits)
    if _is_ours(forward, _forward):
        forward = whole.forward = forward.args[0]
    if not keep_logits:
        path = next(name for name, module in whole.named_modules() if module is head)
        whole.forward = update_wrapper(partial(_forward, forward, whole, path), forward)


def _is_ours(function: Any, of: Callable[..., Any]) -> bool:
    return isinstance(function, partial) and function.func is of


def _check(model: nn.Module, head: Any, loss: Any) -> None:
    """Refuses what is no causal language model of transformers."""
    kind = type(model).__name__
    if not isinstance(head, nn.Module) or loss is None:
        raise ValueError(
            f"chunk_loss: {kind} is not a causal language model of transformers with get_output_embeddings() and a "
            "loss_function. Give the model itself: chunk_loss(self.model) in a LightningModule that has one."
        )
    forwards = (inspect.unwrap(vars(each)["forward"]) for each in type(model).__mro__ if "forward" in vars(each))
    if not any("loss_function" in each.__code__.co_names for each in forwards if inspect.isfunction(each)):
        raise ValueError(
            f"chunk_loss: {kind} computes its loss by itself (T5 and BART do), so that chunks of it cannot be asked for. "
            "Leave chunk_loss out."
        )
    name = f"{getattr(loss, '__module__', '')}.{getattr(loss, '__qualname__', loss)}"
    if name != "transformers.loss.loss_utils.ForCausalLMLoss":
        raise ValueError(
            f"chunk_loss: the loss of {kind} is {name}, and only ForCausalLMLoss of transformers can be computed in chunks "
            "here. Leave chunk_loss out."
        )


# ---------------------------------------------------------------------- what stands in place of the model's own


def _forward(forward: Callable[..., Any], model: nn.Module, path: str, *args: Any, **kwargs: Any) -> Any:
    """A model's forward. If it is given labels, its head is exchanged while it runs."""
    given = inspect.signature(forward).bind(*args, **kwargs).arguments if args else kwargs
    if given.get("labels") is None:
        return forward(*args, **kwargs)
    above, _, name = path.rpartition(".")
    attributes = vars(model.get_submodule(above))
    attributes[name] = _Head(model.get_submodule(path))
    try:
        return forward(*args, **kwargs)
    finally:
        attributes.pop(name, None)


class _Head:
    """Stands in place of a head while its model's forward runs, and gives a promise if there is to be a backward."""

    def __init__(self, head: nn.Module) -> None:
        self._head = head

    def __call__(self, hidden: Tensor) -> Any:
        # This is asked of the thread: another one may predict with the same model meanwhile.
        return DeferredLogits(self._head, hidden) if torch.is_grad_enabled() else self._head(hidden)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._head, name)


def _loss(
    plain: Callable[..., Tensor], tokens: int, keep_logits: bool, logits: Any, labels: Tensor | None = None,
    vocab_size: Any = None, *, num_items_in_batch: Tensor | int | None = None, ignore_index: int = _IGNORED,
    shift_labels: Tensor | None = None, **kwargs: Any,
) -> Tensor:  # fmt: skip
    """What ``plain``, transformers' loss for causal language models, computes."""
    promised = isinstance(logits, DeferredLogits)
    if not promised and not (keep_logits and torch.is_grad_enabled() and logits.requires_grad):
        kwargs.update(num_items_in_batch=num_items_in_batch, ignore_index=ignore_index, shift_labels=shift_labels)
        return plain(logits, labels, vocab_size, **kwargs)
    if shift_labels is None:  # tokens before n predict n
        shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]  # type: ignore[arg-type]
    targets = shift_labels.reshape(-1).to(logits.device)
    targets = targets.masked_fill(targets == ignore_index, _IGNORED)
    if promised:
        losses = _of_promise(logits, targets, tokens, vocab_size)
    else:
        losses = _KeptLogits.apply(logits.view(-1, vocab_size), targets, tokens)
    # Torch sums the losses of all tokens as it would sum entries of rows of a vocabulary: each is the one entry of its row.
    reduction = "mean" if num_items_in_batch is None else "sum"
    loss = F.nll_loss(-losses[:, None], targets.clamp(max=0), ignore_index=_IGNORED, reduction=reduction)
    if isinstance(num_items_in_batch, Tensor):
        num_items_in_batch = num_items_in_batch.to(loss.device)
    return loss if num_items_in_batch is None else loss / num_items_in_batch


def _loss_of_each(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.float(), targets, ignore_index=_IGNORED, reduction="none")


def _chunks(tokens: int, *tensors: Tensor) -> Iterable[tuple[Tensor, ...]]:
    """Rows of several tensors, some at a time.

    Raises:
        ValueError: they have not equally many rows.
    """
    if len({len(tensor) for tensor in tensors}) > 1:
        rows, targets = map(len, tensors[:2])
        raise ValueError(f"There are logits of {rows} tokens and labels for {targets}; give one label for each.")
    return zip(*(tensor.split(tokens) for tensor in tensors), strict=True)


# ---------------------------------------------------------------------- the two ways


class _KeptLogits(torch.autograd.Function):
    """The loss of each token, from logits that are there. Their gradient is made in one piece of memory, chunk by chunk."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, tokens: int) -> Tensor:
        ctx.save_for_backward(logits, targets)
        ctx.tokens = tokens
        return torch.cat([_loss_of_each(*chunk) for chunk in _chunks(tokens, logits, targets)])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        logits, targets = ctx.saved_tensors
        made = torch.empty_like(logits)
        for rows, wanted, gradient, into in _chunks(ctx.tokens, logits, targets, gradients[0], made):
            with torch.enable_grad():
                leaf = rows.detach().requires_grad_()
                losses = _loss_of_each(leaf, wanted)
            into.copy_(torch.autograd.grad(losses, leaf, gradient)[0])
        return made, None, None


def _of_promise(promised: DeferredLogits, targets: Tensor, tokens: int, vocabulary: int) -> Tensor:
    """The loss of each token, from logits that are there for a chunk alone, and in backward again."""
    compute, hidden = promised.take()

    def of_chunk(rows: Tensor, targets: Tensor) -> Tensor:
        return _loss_of_each(compute(rows).view(-1, vocabulary), targets)

    chunks = _chunks(tokens, hidden, targets)
    return torch.cat([checkpoint(of_chunk, *chunk, use_reentrant=False) for chunk in chunks])


# ---------------------------------------------------------------------- logits that are computed later


class DeferredLogits:
    """What a head gives in place of logits: the head, what it was given, and what the model does with logits before its loss.

    That is noted: numbers that scale them, and soft caps. All else is refused, and so is everything once they are taken.
    """

    def __init__(self, compute: Callable[[Tensor], Tensor], hidden: Tensor) -> None:
        self.device = hidden.device
        self._promised: tuple[Callable[[Tensor], Tensor], Tensor] | None = compute, hidden

    def take(self) -> tuple[Callable[[Tensor], Tensor], Tensor]:
        """What computes the logits of some rows, and the rows of all tokens. The promise holds nothing from then on."""
        compute, hidden = self._promised or _refuse("their second use")
        self._promised = None
        return compute, hidden.reshape(-1, hidden.shape[-1])

    def _followed_by(self, function: Callable[[Tensor], Tensor]) -> DeferredLogits:
        compute, hidden = self._promised or _refuse("a function")
        return DeferredLogits(lambda rows: function(compute(rows)), hidden)

    def float(self) -> DeferredLogits:
        """As a tensor's."""
        return self._followed_by(Tensor.float)

    def tanh(self) -> DeferredLogits:
        """As a tensor's."""
        return self._followed_by(torch.tanh)

    def __mul__(self, other: Any) -> DeferredLogits:
        number = _number(other)
        return self._followed_by(lambda logits: logits * number)

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> DeferredLogits:
        number = _number(other)
        return self._followed_by(lambda logits: logits / number)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> DeferredLogits:
        name: str = getattr(function, "__name__", str(function))
        return args[0].tanh() if function is torch.tanh else _refuse(name)

    def __getattr__(self, name: str) -> NoReturn:
        _refuse(name)

    def _refused(self, *_: Any) -> NoReturn:
        _refuse("an operator or an index")

    __getitem__ = __setitem__ = __iter__ = __len__ = __bool__ = __neg__ = __pow__ = __matmul__ = __array__ = _refused
    __add__ = __radd__ = __sub__ = __rsub__ = __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _refused
    __hash__ = object.__hash__


def _number(value: Any) -> int | float:
    return value if isinstance(value, (int, float)) else _refuse("a product with what is no number")


def _refuse(what: str) -> NoReturn:
    """Says why there are no logits, with an error that ``hasattr`` and copies understand."""
    raise AttributeError(
        f"{what}: chunk_loss keeps no logits of a forward with labels. Say chunk_loss(model, keep_logits=True), or call the "
        "model without labels for logits."
    )
