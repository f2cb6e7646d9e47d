"""Imports the public names of the core, and registers the strategy with Lightning.

``import sp_lightning`` imports this file immediately. ``python -m sp_lightning`` and ``superpipeline`` import it once their
arguments are valid: torch and Lightning take seconds to import, and ``--help`` and a misspelt option do not need them.

The public names of capabilities are imported when they are first used (``sp_lightning.registry.PUBLIC``).
"""

import importlib.metadata
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from lightning_utilities.core import rank_zero
from lightning_utilities.core.imports import RequirementCache

for _package, _needed in (("torch", "2.10"), ("lightning", "2.6")):
    if not RequirementCache(f"{_package}>={_needed}"):
        raise ImportError(
            f"sp_lightning needs {_package} {_needed} or newer, and {importlib.metadata.version(_package)} is installed. "
            f'Install it: pip install -U "{_package}>={_needed}"'
        )

# Each Lightning package sets the logger of rank-zero messages when it is imported. If the user has imported pytorch_lightning,
# the import of lightning below would replace that package's logger. So it is restored afterwards.
_log = rank_zero.log if "pytorch_lightning" in sys.modules else None

from lightning.fabric.strategies import STRATEGY_REGISTRY
from lightning.pytorch.strategies import StrategyRegistry

from sp_lightning import registry
from sp_lightning.core.device.stats import Stats
from sp_lightning.core.plan.plan import Plan, PlannedLayer
from sp_lightning.trainer.callback import SuperpipelineCallback
from sp_lightning.trainer.compile import compile_blocks
from sp_lightning.trainer.strategy import SuperpipelineStrategy

registry.install()
SuperpipelineStrategy.register_strategies(StrategyRegistry)
STRATEGY_REGISTRY.register(SuperpipelineStrategy.strategy_name, registry.fabric_strategy, override=True)


def _register_with_other_package() -> None:
    """Registers the strategy with ``pytorch_lightning``, which has been imported."""
    if RequirementCache("pytorch-lightning>=2.6"):
        import sp_lightning.pytorch_lightning


class _WhenImported:
    """A finder of modules that registers the strategy with ``pytorch_lightning`` once that package has been imported.

    Neither Lightning package reads strategies from entry points, and an import by us would take its time and change the logger.
    So this object lies in ``sys.meta_path`` until the import of the package, which other finders find, has ended.
    """

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != "pytorch_lightning":
            return None
        others = (getattr(finder, "find_spec", None) for finder in sys.meta_path if finder is not self)
        spec = next((found for find in others if find and (found := find(name, path, target))), None)
        loader: Any = None if spec is None else spec.loader
        if loader is not None:
            own = loader.exec_module

            def exec_module(module: ModuleType) -> None:
                del loader.exec_module  # set on the object: its class's is there again
                own(module)
                if self in sys.meta_path:
                    sys.meta_path.remove(self)
                    _register_with_other_package()

            loader.exec_module = exec_module
        return spec


if _log is None:
    sys.meta_path.insert(0, _WhenImported())
else:
    rank_zero.log = _log
    _register_with_other_package()
