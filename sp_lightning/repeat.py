"""Whether a step that failed for want of memory can be run once more as if nothing had happened."""

from __future__ import annotations

from typing import Any

from lightning.fabric.utilities.seed import _collect_rng_states, _set_rng_states
from torch import Tensor
from torch.utils._pytree import tree_leaves


class Snapshot:
    """What a forward might change and what can be looked at: values of the module, the batch, what was logged.

    Random state is put back, anything else that has changed forbids a repetition. State that user code keeps elsewhere
    (files, other objects) is not seen.

    Args:
        module: the LightningModule, its parameters those of the host.
        batch: the step's arguments.
    """

    def __init__(self, module: Any, batch: Any) -> None:
        self._module = module
        self._batch = batch
        self._random = _collect_rng_states(include_cuda=True)
        self._before = self._look()

    def changed(self) -> str:
        """What has changed, in words; empty if nothing has."""
        now = self._look()
        return next((what for what, before in self._before.items() if now[what] != before), "")

    def restore(self) -> None:
        """Random state is as it was."""
        _set_rng_states(self._random)

    def _look(self) -> dict[str, Any]:
        module = self._module
        results = module.trainer._results
        values = vars(module)
        return {
            "buffers": [(name, id(each), each._version) for name, each in module.named_buffers()],
            "parameters": [(id(each), each._version) for each in module.parameters()],
            "the batch": [_mark(each) for each in tree_leaves(self._batch)],
            "what was logged": {} if results is None else {key: each.update_count for key, each in results.items()},
            "attributes of the module": {key: _mark(each) for key, each in values.items() if not key.startswith("_")},
        }


def _mark(value: Any) -> Any:
    if isinstance(value, Tensor):
        return id(value), value._version
    return value if isinstance(value, (str, int, float, bool, type(None))) else id(value)
