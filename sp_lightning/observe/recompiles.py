"""Notices that ``torch.compile`` makes new graphs long after the beginning of a run."""

from __future__ import annotations

_FIRST = 3  # batches: the first one compiles; if a size changes in the next ones, dynamo makes graphs for any size
_LATE = 3  # later batches with new graphs, after which the user is told


class Recompiles:
    """Counts the training batches in which ``torch.compile`` made new graphs, apart from the first batches of a run."""

    def __init__(self) -> None:
        self._batches = self._late = 0
        self._graphs = 0  # at the beginning of the last batch
        self._told = False

    def batch_begins(self, graphs: int) -> str:
        """Counts the batch before this one. Returns a sentence for the user if many batches had new graphs; otherwise "".

        Args:
            graphs: the number of graphs that ``torch.compile`` has made in this process so far.
        """
        self._late += self._batches > _FIRST and graphs > self._graphs
        self._batches += 1
        self._graphs = graphs
        if self._told or self._late < _LATE:
            return ""
        self._told = True
        return (
            f"torch.compile still makes new graphs: {graphs} after {self._batches - 1} training batches. Each takes seconds, as "
            "on plain Lightning. TORCH_LOGS=recompiles names the reasons. For batches of many sizes, pass dynamic=True."
        )
