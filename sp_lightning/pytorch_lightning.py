"""The strategy and its callback for ``pytorch_lightning``. Importing this module registers the strategy in that package.

``import sp_lightning`` imports this module if ``pytorch_lightning`` was imported before.
"""

import logging

from pytorch_lightning.callbacks import Callback
from pytorch_lightning.strategies import DDPStrategy, SingleDeviceStrategy, Strategy, StrategyRegistry

from sp_lightning.trainer.callback import SuperpipelineCallback as LightningsCallback
from sp_lightning.trainer.strategy import StreamingStrategy
from sp_lightning.trainer.user_hooks import WRITE_NO_WEIGHTS

__all__ = ["SuperpipelineCallback", "SuperpipelineStrategy"]


class SuperpipelineCallback(LightningsCallback, Callback):  # type: ignore[misc]
    __doc__ = LightningsCallback.__doc__


class SuperpipelineStrategy(StreamingStrategy, Strategy):  # type: ignore[misc]
    __doc__ = StreamingStrategy.__doc__
    _one_device = SingleDeviceStrategy
    _several_devices = DDPStrategy
    _callback_class = SuperpipelineCallback
    log = logging.getLogger("pytorch_lightning.superpipeline")


SuperpipelineStrategy.__abstractmethods__ = frozenset()
WRITE_NO_WEIGHTS.add(SuperpipelineCallback)
SuperpipelineStrategy.register_strategies(StrategyRegistry)
