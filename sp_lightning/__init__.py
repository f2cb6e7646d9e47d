"""Train and predict with models larger than the GPU's memory, as a PyTorch Lightning strategy.

``import sp_lightning`` registers ``"superpipeline"``: ``Trainer(strategy="superpipeline")``.
"""

from lightning.pytorch.strategies import StrategyRegistry

from sp_lightning._version import __version__
from sp_lightning.callback import SuperpipelineCallback
from sp_lightning.plan import Plan, PlannedLayer
from sp_lightning.strategy import SuperpipelineStrategy
from sp_lightning.streamer import Stats

__all__ = ["Plan", "PlannedLayer", "Stats", "SuperpipelineCallback", "SuperpipelineStrategy", "__version__"]

SuperpipelineStrategy.register_strategies(StrategyRegistry)
