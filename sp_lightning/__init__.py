"""Train and predict with models larger than the GPU's memory, as a PyTorch Lightning strategy.

``import sp_lightning`` registers ``"superpipeline"``: ``Trainer(strategy="superpipeline")``, of ``lightning`` and of
``pytorch_lightning``, for whom :mod:`sp_lightning.pytorch_lightning` has the same classes.
"""

from lightning.pytorch.strategies import StrategyRegistry
from lightning_utilities.core.imports import RequirementCache

from sp_lightning._version import __version__
from sp_lightning.callback import SuperpipelineCallback
from sp_lightning.plan import Plan, PlannedLayer
from sp_lightning.stats import Stats
from sp_lightning.strategy import SuperpipelineStrategy

__all__ = ["Plan", "PlannedLayer", "Stats", "SuperpipelineCallback", "SuperpipelineStrategy", "__version__"]

SuperpipelineStrategy.register_strategies(StrategyRegistry)
if RequirementCache("pytorch-lightning>=2.6"):
    import sp_lightning.pytorch_lightning  # noqa: F401 (registers its own)
