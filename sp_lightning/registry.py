"""Where the capabilities enter. This is the only file of the core that names their folders.

A capability is a folder without which the core works: it is found here, when the option that asks for it is resolved, and enters
through an interface that the core defines. Its own ``__init__`` says what it adds, at which interface it enters, and what it
costs when it is not used. Nothing is imported from a capability before it is asked for.

If a folder is missing, one of three things happens. Each function below says which:

- **error**: the option raises :class:`MissingCapabilityError` (for example ``disk=``);
- **fallback**: a default continues without it and logs one line (for example ``k="auto"`` without ``tuning``);
- **slower**: the results are the same, and nothing is logged (for example optimizer steps without ``kernels``).

The core files that still import a capability are listed in ``tests/repository/test_architecture.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sp_lightning.model.rows import RowFinder

CAPABILITIES = {
    "activations": "offloads or recomputes activations, and cuts a loss into chunks",
    "comparison": "compares a module with plain Lightning (sp_lightning.check)",
    "disk": "keeps optimizer state, weights and gradients on a disk",
    "experts": "uploads only the experts and embedding rows that a batch uses",
    "gpu_steps": "runs optimizer steps on the GPU, and keeps layers there with their optimizer state",
    "kernels": "compiles kernels for optimizer steps on the CPU",
    "planner": "the command line: plan, check, rates, convert",
    "ranks": "trains on several devices",
    "sharing": "lets several trainings share one frozen base",
    "tuning": "measures batches, and chooses k, k' and the modes of activations",
}
"""The folders, and what each adds."""

PUBLIC = {
    "SharedBase": "sharing.shared_base",
    "check": "comparison.check",
    "chunk_loss": "activations.chunked_loss",
    "rank_order_hook": "ranks.rank_order",
}
"""The public names of ``sp_lightning`` that capabilities have, and the file of each."""


class MissingCapabilityError(ImportError):
    """An option needs a folder of the package that is not installed."""


@contextmanager
def needed_for(option: str) -> Iterator[None]:
    """Imports of a capability stand inside this context, so that a missing folder raises one clear error.

    Args:
        option: what the user wrote, for the message, for example ``disk="/scratch"``.

    Raises:
        MissingCapabilityError: the folder is missing.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        folder = _capability(error.name)
        if folder is None:
            raise
        raise MissingCapabilityError(
            f"{option} needs sp_lightning/{folder}, which is not installed. "
            f"Install the whole package (pip install --force-reinstall sp_lightning), or leave {option} out."
        ) from None


def _capability(module: str | None) -> str | None:
    """Returns the capability that a module's name is in; None for other modules."""
    package, _, rest = (module or "").partition(".")
    folder = rest.partition(".")[0]
    return folder if package == "sp_lightning" and folder in CAPABILITIES and not is_installed(folder) else None


@cache
def is_installed(folder: str) -> bool:
    """Returns True if the folder of a capability is part of this installation."""
    return find_spec(f"sp_lightning.{folder}") is not None


def public(name: str) -> Any:
    """Returns what a public name of a capability stands for.

    Raises:
        MissingCapabilityError: the folder is missing.
    """
    with needed_for(f"sp_lightning.{name}"):
        return getattr(import_module(f"sp_lightning.{PUBLIC[name]}"), name)


@cache
def row_finder() -> RowFinder:
    """Returns what finds stacked experts and embeddings. Without ``experts`` (slower), all layers are uploaded whole."""
    if is_installed("experts"):
        from sp_lightning.experts.finder import ExpertsAndEmbeddings

        return ExpertsAndEmbeddings()
    from sp_lightning.model.rows import RowFinder

    return RowFinder()
