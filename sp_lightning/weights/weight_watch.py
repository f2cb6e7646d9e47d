"""Finds host weights that were written within a step in a way that no version shows (``check_writes=True``)."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from sp_lightning.device.layout import Elsewhere
from sp_lightning.store.block import HostBlock
from sp_lightning.weights.digest import digest

_Look = tuple[int, int, str]
"""Version, address and digest of a parameter."""


class WeightWatch:
    """Compares the digests of the host's weights with those of the last look, by a pass over all weights.

    Args:
        blocks: the host store. What is written on the device is not compared here.
    """

    def __init__(self, blocks: Sequence[HostBlock]) -> None:
        self._places = [(block, index) for block in blocks for index in range(len(block.parameters))]
        self._looks: dict[tuple[HostBlock, int], _Look] = {}

    def look(self) -> None:
        """Takes the present values of all weights for right."""
        with ThreadPoolExecutor(torch.get_num_threads()) as threads:
            self._looks = dict(zip(self._places, threads.map(_look, self._places), strict=True))

    def look_away(self) -> None:
        """Forgets the last look, because what comes next may write the host's weights."""
        self._looks = {}

    def look_at(self, block: HostBlock, index: int) -> None:
        """Takes the present value of one weight for right, because the engine has written it."""
        self._looks[block, index] = _look((block, index))

    def compare(self) -> None:
        """Compares all weights with the last look, if there was one.

        Raises:
            RuntimeError: a weight has other values although its version and its address are the same.
        """
        if self._looks:
            with ThreadPoolExecutor(torch.get_num_threads()) as threads:
                for place, now in zip(self._places, threads.map(_look, self._places), strict=True):
                    self._compare(place, now)

    def compare_one(self, block: HostBlock, index: int) -> None:
        """Does what :meth:`compare` does for one weight, before the engine overwrites it with what is on the device."""
        if (block, index) in self._looks:
            self._compare((block, index), _look((block, index)))

    def _compare(self, place: tuple[HostBlock, int], now: _Look) -> None:
        before = self._looks.get(place, now)
        if now[:2] == before[:2] and now != before:  # other versions and addresses are noticed elsewhere
            self._looks = {}  # the error is raised only once
            raise RuntimeError(
                f"Parameter {place[0].planned.spans[place[1]].name!r} was written within a step by a way that torch shows no "
                "sign of: the .data of a reference that was taken before the step, numpy(), DLPack, or its storage. What is on "
                "the device of it is out of date. Reach it through its module within a step, or write it between two steps."
            )


def _look(place: tuple[HostBlock, int]) -> _Look:
    parameter = place[0].parameters[place[1]]
    if isinstance(parameter, Elsewhere):  # whoever writes it brings it to memory first
        return parameter._version, 0, ""
    return parameter._version, parameter.data_ptr(), digest(parameter)
