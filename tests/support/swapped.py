"""A pytest plugin: the strategy that Lightning chooses by itself is ours. For Lightning's own tests, as an outside judge.

    cd …/pytorch-lightning/tests && PYTHONPATH=.:/path/of/this/project python -m pytest -p tests.support.swapped tests_pytorch

Where a test names a strategy, that is the one it gets. The partner callback is attached, as it is by default.
"""

from typing import Any

from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.trainer.connectors.accelerator_connector import _AcceleratorConnector

from sp_lightning import SuperpipelineStrategy

_choose = _AcceleratorConnector._choose_strategy


def _choose_ours(connector: Any) -> Any:
    chosen = _choose(connector)
    if type(chosen) is SingleDeviceStrategy:
        return SuperpipelineStrategy(k=2, k_prime=1)
    return chosen


_AcceleratorConnector._choose_strategy = _choose_ours  # type: ignore[assignment,method-assign]
