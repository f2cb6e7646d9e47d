"""What stands in place of logits that are computed later."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor


class PromisedLogits:
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

    def _followed_by(self, function: Callable[[Tensor], Tensor]) -> PromisedLogits:
        compute, hidden = self._promised or _refuse("a function")
        return PromisedLogits(lambda rows: function(compute(rows)), hidden)

    def float(self) -> PromisedLogits:
        """As a tensor's."""
        return self._followed_by(Tensor.float)

    def tanh(self) -> PromisedLogits:
        """As a tensor's."""
        return self._followed_by(torch.tanh)

    def __mul__(self, other: Any) -> PromisedLogits:
        number = _number(other)
        return self._followed_by(lambda logits: logits * number)

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> PromisedLogits:
        number = _number(other)
        return self._followed_by(lambda logits: logits / number)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> PromisedLogits:
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
