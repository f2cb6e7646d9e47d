"""Train and predict with models larger than the GPU's memory, as a PyTorch Lightning strategy.

``import sp_lightning`` registers ``"superpipeline"`` with ``lightning``: ``Trainer(strategy="superpipeline")``. For
``pytorch_lightning`` :mod:`sp_lightning.pytorch_lightning` does so, and has the same classes.
"""

import sys
from pathlib import Path

from sp_lightning._version import __version__

# The command line imports the rest itself (see sp_lightning._public). orig_argv tells a command from a program whose own
# arguments look like it.
if sys.orig_argv[1:3] != ["-m", "sp_lightning"] and [Path(word).name for word in sys.argv[:1]] != ["superpipeline"]:
    from sp_lightning._public import (
        Plan,
        PlannedLayer,
        SharedBase,
        Stats,
        SuperpipelineCallback,
        SuperpipelineStrategy,
        check,
        chunk_loss,
        rank_order_hook,
    )

__all__ = [
    "Plan",
    "PlannedLayer",
    "SharedBase",
    "Stats",
    "SuperpipelineCallback",
    "SuperpipelineStrategy",
    "__version__",
    "check",
    "chunk_loss",
    "rank_order_hook",
]
