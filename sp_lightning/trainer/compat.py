"""Lightning under both its names: ``pytorch_lightning`` is ``lightning.pytorch`` once more, with classes of its own.

What is imported here from ``lightning`` stands for its namesake, too; which of them an object is of, its class tells.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeGuard, TypeVar

T = TypeVar("T")

_NAMES = {"pytorch_lightning": "lightning.pytorch", "lightning_fabric": "lightning.fabric"}


def path(kind: type) -> str:
    """Where ``lightning`` has this class."""
    package, dot, rest = kind.__module__.partition(".")
    return f"{_NAMES.get(package, package)}{dot}{rest}.{kind.__qualname__}"


def is_a(value: object, kind: type[T]) -> TypeGuard[T]:
    """As ``isinstance``, of the kind or its namesake."""
    return any(path(each) == path(kind) for each in type(value).__mro__)


def is_exactly(value: object, kinds: Iterable[type]) -> bool:
    """Whether the value's class is one of them or of their namesakes; a subclass is not."""
    return path(type(value)) in {path(each) for each in kinds}


def base_of(value: object, kind: type[T]) -> type[T]:
    """``kind`` or its namesake, whichever the value's class has among its bases."""
    return next((each for each in type(value).__mro__ if path(each) == path(kind)), kind)
