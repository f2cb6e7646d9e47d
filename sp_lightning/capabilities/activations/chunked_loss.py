"""Computes the loss of a causal language model of transformers in chunks of tokens.

A model computes ``logits = self.lm_head(hidden)`` and passes them to its ``loss_function``, which copies them to float32 and
saves the logarithms of all probabilities. Two replacements take less memory:

- Only the loss function (``keep_logits=True``). Logits and their gradient are kept in the head's dtype, a third of the memory.
  Results are bit-identical, because each token's loss and gradient are computed from its own row.
- The head as well. It returns deferred logits, and the loss function computes them chunk by chunk, each in torch's checkpoint. No
  logits are kept. The head's product is computed twice. The gradient of the head's weight becomes a sum over chunks: the order of
  summation differs, and the sum needs memory for one more gradient of that size.

The head is called as a module, so hooks, adapters, quantised weights and the engine work as usual. It is replaced only while the
model's own forward runs, by an attribute of the instance, which Python finds before the module. The tree of modules stays as it
is, and the replacement also works when PEFT calls the model's forward directly, without hooks.
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
    """Makes a causal language model of transformers compute its loss in chunks of tokens.

    This changes forwards with ``labels`` while gradients are enabled. Evaluation, generation and training without ``labels`` are
    as before. Call this function when the model is created, before or after adapters are added. A strategy of this package is
    not needed. A second call replaces the first.

    - With ``keep_logits=True`` results are bit-identical. Only the float32 copies of logits are not kept.
    - With ``keep_logits=False`` no logits are kept, and ``output.logits`` cannot be read. Results are bit-identical if each row
      of a matrix product is the same for any number of rows, with two exceptions: the gradient of the head's weights is a sum
      over chunks, each rounded to the weights' dtype, and dropout in an adapter of the head draws other numbers.

    Args:
        model: the model of transformers, or PEFT's model around it.
        tokens: tokens per chunk. Smaller chunks take little less memory and more time.
        keep_logits: True to keep the logits, in the dtype of the head.

    Raises:
        ValueError: the model has no head, or its loss is not transformers' loss for causal language models; or ``tokens`` is
            not a positive integer.
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
    """Raises an error if a model is not a causal language model of transformers."""
    kind = type(model).__name__
    if not isinstance(head, nn.Module) or loss is None:
        raise ValueError(
            f"chunk_loss: {kind} is not a causal language model of transformers with get_output_embeddings() and a "
            "loss_function. Give the model itself: chunk_loss(self.model) in a LightningModule that has one."
        )
    forwards = (inspect.unwrap(vars(each)["forward"]) for each in type(model).__mro__ if "forward" in vars(each))
    if not any("loss_function" in each.__code__.co_names for each in forwards if inspect.isfunction(each)):
        raise ValueError(
            f"chunk_loss: {kind} computes its loss by itself (T5 and BART do), so it cannot be chunked. "
            "Leave chunk_loss out."
        )
    name = f"{getattr(loss, '__module__', '')}.{getattr(loss, '__qualname__', loss)}"
    if name != "transformers.loss.loss_utils.ForCausalLMLoss":
        raise ValueError(
            f"chunk_loss: the loss of {kind} is {name}, and only ForCausalLMLoss of transformers can be computed in chunks "
            "here. Leave chunk_loss out."
        )


# ---------------------------------------------------------------------- replacements


def _forward(forward: Callable[..., Any], model: nn.Module, path: str, *args: Any, **kwargs: Any) -> Any:
    """Runs a model's forward. If ``labels`` are given, the model's head is replaced while the forward runs."""
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
    """Replaces a head while its model's forward runs. It returns deferred logits if gradients are enabled."""

    def __init__(self, head: nn.Module) -> None:
        self._head = head

    def __call__(self, hidden: Tensor) -> Any:
        # Grad mode belongs to a thread: another thread may predict with the same model at the same time.
        return DeferredLogits(self._head, hidden) if torch.is_grad_enabled() else self._head(hidden)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._head, name)


def _loss(
    plain: Callable[..., Tensor], tokens: int, keep_logits: bool, logits: Any, labels: Tensor | None = None,
    vocab_size: Any = None, *, num_items_in_batch: Tensor | int | None = None, ignore_index: int = _IGNORED,
    shift_labels: Tensor | None = None, **kwargs: Any,
) -> Tensor:  # fmt: skip
    """Computes ``plain``, transformers' loss for causal language models, in chunks of ``tokens``.

    Calls ``plain`` itself for logits that the head has computed, if they need no gradient or ``keep_logits`` is False.
    """
    deferred = isinstance(logits, DeferredLogits)
    if not deferred and not (keep_logits and torch.is_grad_enabled() and logits.requires_grad):
        kwargs.update(num_items_in_batch=num_items_in_batch, ignore_index=ignore_index, shift_labels=shift_labels)
        return plain(logits, labels, vocab_size, **kwargs)
    if shift_labels is None:  # the tokens before position n predict token n
        shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]  # type: ignore[arg-type]
    targets = shift_labels.reshape(-1).to(logits.device)
    targets = targets.masked_fill(targets == ignore_index, _IGNORED)
    if deferred:
        losses = _of_deferred(logits, targets, tokens, vocab_size)
    else:
        losses = _KeptLogits.apply(logits.view(-1, vocab_size), targets, tokens)
    # Each token's loss is the single entry of a row, so that torch sums the losses in the same order as rows of a vocabulary. The
    # target is then 0 for each token that is not ignored.
    reduction = "mean" if num_items_in_batch is None else "sum"
    loss = F.nll_loss(-losses[:, None], targets.clamp(max=0), ignore_index=_IGNORED, reduction=reduction)
    if isinstance(num_items_in_batch, Tensor):
        num_items_in_batch = num_items_in_batch.to(loss.device)
    return loss if num_items_in_batch is None else loss / num_items_in_batch


def _loss_of_each(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.float(), targets, ignore_index=_IGNORED, reduction="none")


def _chunks(tokens: int, *tensors: Tensor) -> Iterable[tuple[Tensor, ...]]:
    """Splits tensors into chunks of rows.

    Raises:
        ValueError: the tensors differ in their numbers of rows.
    """
    if len({len(tensor) for tensor in tensors}) > 1:
        rows, targets = map(len, tensors[:2])
        raise ValueError(f"There are logits of {rows} tokens and labels for {targets}; give one label for each.")
    return zip(*(tensor.split(tokens) for tensor in tensors), strict=True)


# ---------------------------------------------------------------------- with and without logits


class _KeptLogits(torch.autograd.Function):
    """The loss of each token from kept logits. Their gradient is written into one tensor, chunk by chunk."""

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


def _of_deferred(deferred: DeferredLogits, targets: Tensor, tokens: int, vocabulary: int) -> Tensor:
    """Returns the loss of each token. Logits exist for one chunk at a time, in forward and again in backward."""
    compute, hidden = deferred.take()

    def of_chunk(rows: Tensor, targets: Tensor) -> Tensor:
        return _loss_of_each(compute(rows).view(-1, vocabulary), targets)

    chunks = _chunks(tokens, hidden, targets)
    return torch.cat([checkpoint(of_chunk, *chunk, use_reentrant=False) for chunk in chunks])


# ---------------------------------------------------------------------- logits that are computed later


class DeferredLogits:
    """Returned by a head in place of logits: the head, its input, and the model's operations on logits before its loss.

    These operations may be scaling by numbers, soft caps (``tanh``) and ``float()``. Any other operation raises an error, and so
    does any operation after :meth:`take`.

    Args:
        compute: computes logits from rows of the head's input.
        hidden: the head's input.
    """

    def __init__(self, compute: Callable[[Tensor], Tensor], hidden: Tensor) -> None:
        self.device = hidden.device
        self._deferred: tuple[Callable[[Tensor], Tensor], Tensor] | None = compute, hidden

    def take(self) -> tuple[Callable[[Tensor], Tensor], Tensor]:
        """Returns a function that computes the logits of rows, and the rows of all tokens. Raises an error at the second call."""
        compute, hidden = self._deferred or _refuse("their second use")
        self._deferred = None
        return compute, hidden.reshape(-1, hidden.shape[-1])

    def _followed_by(self, function: Callable[[Tensor], Tensor]) -> DeferredLogits:
        compute, hidden = self._deferred or _refuse("a function")
        return DeferredLogits(lambda rows: function(compute(rows)), hidden)

    def float(self) -> DeferredLogits:
        """See :meth:`torch.Tensor.float`."""
        return self._followed_by(Tensor.float)

    def tanh(self) -> DeferredLogits:
        """See :meth:`torch.Tensor.tanh`."""
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
    return value if isinstance(value, (int, float)) else _refuse("a product with something that is not a number")


def _refuse(what: str) -> NoReturn:
    """Raises the error for a use of deferred logits. ``hasattr`` and copies expect an ``AttributeError``."""
    raise AttributeError(
        f"{what}: chunk_loss keeps no logits of a forward with labels. Use chunk_loss(model, keep_logits=True), or call the "
        "model without labels for logits."
    )
