"""The public names of the package, and the registration of the strategy with Lightning.

``import sp_lightning`` imports this file at once. ``python -m sp_lightning`` and ``superpipeline`` import it once their
arguments have been read: torch and Lightning take seconds to import, which ``--help`` and a misspelt option need not wait for.
"""

import importlib.metadata
import sys

from lightning_utilities.core import rank_zero
from lightning_utilities.core.imports import RequirementCache

for _package, _needed in (("torch", "2.10"), ("lightning", "2.6")):
    if not RequirementCache(f"{_package}>={_needed}"):
        raise ImportError(
            f"sp_lightning needs {_package} {_needed} or newer, and {importlib.metadata.version(_package)} is installed. "
            f'Install it: pip install -U "{_package}>={_needed}"'
        )

# Whichever of Lightning's two packages is imported last takes the logger of their messages. It stays with the users'.
_log = rank_zero.log if "pytorch_lightning" in sys.modules else None

from lightning.pytorch.strategies import StrategyRegistry

from sp_lightning.activations.chunked_loss import chunk_loss
from sp_lightning.comparison.check import check
from sp_lightning.observe.stats import Stats
from sp_lightning.plan.plan import Plan, PlannedLayer
from sp_lightning.ranks.rank_order import rank_order_hook
from sp_lightning.sharing.shared_base import SharedBase
from sp_lightning.trainer.callback import SuperpipelineCallback
from sp_lightning.trainer.strategy import SuperpipelineStrategy

SuperpipelineStrategy.register_strategies(StrategyRegistry)
if _log is not None:
    rank_zero.log = _log
    if RequirementCache("pytorch-lightning>=2.6"):
        import sp_lightning.pytorch_lightning
