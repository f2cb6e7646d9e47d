"""What nobody shows: weights of the host that were written within a step where torch bumps no version."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from sp_lightning.store.block import HostBlock
from sp_lightning.weights.digest import digest

_Look = tuple[int, int, str]
"""Version, address and digest of a parameter."""


class WeightWatch:
    """Compares the host's weights with what they were when somebody looked last, by a pass over them.

    Args:
        blocks: the host store. What is written on the device is not looked at here.
    """

    def __init__(self, blocks: Sequence[HostBlock]) -> None:
        self._places = [(block, index) for block in blocks for index in range(len(block.parameters))]
        self._looks: dict[tuple[HostBlock, int], _Look] = {}

    def look(self) -> None:
        """What the weights are now is right."""
        with ThreadPoolExecutor(torch.get_num_threads()) as threads:
            self._looks = dict(zip(self._places, threads.map(_look, self._places), strict=True))

    def look_away(self) -> None:
        """Whoever comes next may write the host's weights."""
        self._looks = {}

    def look_at(self, block: HostBlock, index: int) -> None:
        """The engine has written a weight."""
        self._looks[block, index] = _look((block, index))

    def compare(self) -> None:
        """Whoever has looked last, and nobody since, has to be right.

        Raises:
            RuntimeError: a weight has other values under the version and the address that it had.
        """
        with ThreadPoolExecutor(torch.get_num_threads()) as threads:
            for (block, index), now in zip(self._places, threads.map(_look, self._places), strict=True):
                before = self._looks.get((block, index), now)
                if now[:2] == before[:2] and now != before:  # an exchange, or a version, is seen without us
                    self._looks = {}  # said once
                    name = block.planned.spans[index].name
                    raise RuntimeError(
                        f"Parameter {name!r} was written within a step by a way that torch shows no sign of: the .data of a "
                        "reference that was taken before the step, numpy(), DLPack, or its storage. What is on the device of "
                        "it is out of date. Reach it through its module within a step, or write it between two steps."
                    )


def _look(place: tuple[HostBlock, int]) -> _Look:
    parameter = place[0].parameters[place[1]]
    return parameter._version, parameter.data_ptr(), digest(parameter)
