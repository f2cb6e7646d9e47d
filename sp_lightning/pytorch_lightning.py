"""The strategy and its callback for those who import ``pytorch_lightning``; importing this registers the strategy there.

``import sp_lightning`` does so where ``pytorch_lightning`` has been imported before it.
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
