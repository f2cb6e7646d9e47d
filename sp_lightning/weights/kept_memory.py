"""Device memory of weights that user code still holds when it may write them: a view, ``.data``, an array of numpy."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor

from sp_lightning.weights.digest import digest
from sp_lightning.weights.parameter_group import ParameterGroup


class KeptMemory:
    """The values that a layer's weights had in such memory and on the host, at a moment when both were alike.

    On plain Lightning a view and its weight are one memory. Here they are two, and nothing tells of a write to either:
    not a version (``.data``), nor a call (numpy). So both are compared with what they were, and the one that was written
    is copied to the other one. The caller has waited for everything that writes them.

    Args:
        group: the layer's device parameters, and the host's.
        values: the present values on the device.
    """

    def __init__(self, group: ParameterGroup, values: Iterable[Tensor]) -> None:
        self._device = _digests(values)
        self._host = _digests(group.hosts)

    def written(self, group: ParameterGroup, values: Iterable[Tensor], *, refuse: bool = True) -> list[int]:
        """The indices of the weights that were written on the device since, and not on the host.

        Raises:
            RuntimeError: a weight was written on the host as well, so that one of the two writes would be lost, and
                ``refuse`` is set.
        """
        device = _digests(values)
        written = [index for index, (old, new) in enumerate(zip(self._device, device, strict=True)) if old != new]
        twice = [index for index in written if digest(group.hosts[index]) != self._host[index]]
        if twice and refuse:
            raise RuntimeError(
                f"Parameter {group.spans[twice[0]].name!r} was written twice between two of the engine's looks at it: on the "
                "host, and through a view of it (.data, .detach(), weight[0], numpy()) that was taken inside a step and "
                "kept. One of both writes would be lost. Take the view anew, from its module, where you write."
            )
        return [index for index in written if index not in twice]


def _digests(values: Iterable[Tensor]) -> Sequence[str]:
    return [digest(value) for value in values]
