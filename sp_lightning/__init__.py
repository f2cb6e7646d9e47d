"""Train and predict with models larger than the GPU's memory, as a PyTorch Lightning strategy.

``Trainer(strategy=SuperpipelineStrategy())``. ``import sp_lightning  # noqa: F401`` also registers the name ``"superpipeline"``
with ``lightning``. The module :mod:`sp_lightning.pytorch_lightning` has the strategy and the callback for ``pytorch_lightning``.
"""

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from sp_lightning._version import __version__

__all__ = [
    "FabricStrategy",
    "Plan",
    "PlannedLayer",
    "Stats",
    "StreamedTrainer",
    "SuperpipelineCallback",
    "SuperpipelineStrategy",
    "__version__",
    "check",
    "compile_blocks",
    "dial",
    "load_mxfp4",
    "pack_experts",
    "rank_order_hook",
    "stream",
]

if TYPE_CHECKING:
    from sp_lightning._public import (
        Plan,
        PlannedLayer,
        Stats,
        SuperpipelineCallback,
        SuperpipelineStrategy,
        compile_blocks,
    )
    from sp_lightning.any_loop.fabric import FabricStrategy
    from sp_lightning.any_loop.stream import stream
    from sp_lightning.any_loop.transformers_trainer import StreamedTrainer
    from sp_lightning.capabilities.experts.mxfp4 import load_mxfp4
    from sp_lightning.capabilities.experts.packed_stacks import pack_experts
    from sp_lightning.experimental.ranks.rank_order import rank_order_hook
    from sp_lightning.tools.comparison.check import check
    from sp_lightning.tools.comparison.dial import dial
else:
    _REMOVED = {
        "chunk_loss": "With torch 2.14 or newer, compute the loss by torch.nn.functional.linear_cross_entropy(hidden.float(), "
        "model.lm_head.weight.float(), labels, options=torch.nn.LinearCrossEntropyOptions()). For older versions, "
        "examples/guide/memory.md has ten lines."
    }

    def __getattr__(name: str) -> object:
        """Imports a public name when it is first used, and stores the object in this module."""
        if name in _REMOVED:
            raise AttributeError(f"sp_lightning.{name} was removed. {_REMOVED[name]}")
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from sp_lightning import registry

        if name in registry.PUBLIC:
            found = registry.public(name)
        else:
            from sp_lightning import _public

            found = getattr(_public, name)
        globals()[name] = found
        return found

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})


# The command line imports _public only after its arguments were checked, because the import takes seconds (see _public). Python's
# option -m is in orig_argv only. The arguments of a user's program come later in orig_argv, so they cannot be taken for it.
if sys.orig_argv[1:3] != ["-m", "sp_lightning"] and [Path(word).name for word in sys.argv[:1]] != ["superpipeline"]:
    from sp_lightning import _public  # noqa: F401
