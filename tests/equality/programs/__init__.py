"""Programs by subject: each module of this folder adds its own to the registry."""

import importlib
import pkgutil

from sp_lightning.registry import MissingCapabilityError
from tests.equality.rows import LOOPS as LOOPS
from tests.equality.rows import MISTAKES as MISTAKES
from tests.equality.rows import PROGRAMS as PROGRAMS

for _module in pkgutil.iter_modules(__path__):
    try:
        importlib.import_module(f"{__name__}.{_module.name}")
    except MissingCapabilityError:
        continue  # a capability that is not installed has no programs
    except ModuleNotFoundError as error:
        if not str(error.name).startswith("sp_lightning.capabilities."):
            raise
