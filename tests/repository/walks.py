"""Count the Python calls of the package in short parts of a training: what a reader follows in a debugger.

``sys.setprofile`` counts every call of a function whose file is in the package's folder, on every thread. The script knows
no other name of the package than its public ones, so its figures can be compared after files and functions have moved.

From the root of the repository::

    python -m tests.repository.walks

It prints the walks, the size of each folder and import cycles (see :mod:`tests.repository.shape`).
"""

from __future__ import annotations

import logging
import statistics
import sys
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

import sp_lightning
from sp_lightning import SuperpipelineStrategy
from tests.repository import shape
from tests.support.results import result_row

PACKAGE = f"{Path(sp_lightning.__file__).parent}/"
BLOCKS, WIDTH, K = 8, 16, 2
BATCHES, WARM_UP = 9, 4

FIT = "`Trainer.fit` until the first layer is called"
FORWARD = "forward of one layer"
ENTER = "— before its own forward"
COMPUTE = "— while its own forward runs"
LEAVE = "— after its own forward"
BACKWARD_OF_LAYER = "backward of one layer"
BACKWARD = "whole backward"
UPDATES = "from the end of backward to the next batch"
BATCH = "whole batch"


class Function(NamedTuple):
    """A function, by its place in the source. Code objects of two files can be equal."""

    file: str
    line: int
    name: str


class Calls(Counter[Function]):
    """How often each function of the package was called in one walk."""

    @property
    def files(self) -> set[str]:
        return {function.file for function in self}


class Tracer:
    """Counts calls of functions in a folder, for each walk that is open when they happen.

    Threads that ``threading`` starts while it is installed count as well. A thread that autograd starts counts after its
    first :meth:`open`. A generator that is resumed counts as a call, as ``sys.setprofile`` reports it.

    Args:
        folder: functions whose file is below it count. It ends with a slash.

    Attributes:
        walks: for each name, the calls of each time it was walked.
        at_call, at_return: what to do when the function with a code object is called and when it returns, with its frame.
    """

    def __init__(self, folder: str = PACKAGE) -> None:
        self.folder = folder
        self.walks: dict[str, list[Calls]] = {}
        self.at_call: dict[CodeType, Callable[[FrameType], None]] = {}
        self.at_return: dict[CodeType, Callable[[FrameType], None]] = {}
        self._open: dict[str, Calls] = {}
        self._installed = False

    @contextmanager
    def installed(self) -> Iterator[Tracer]:
        """A context in which this thread, and each thread that it starts, is traced."""
        self._installed = True
        threading.setprofile(self._profile)
        sys.setprofile(self._profile)
        try:
            yield self
        finally:
            self._installed = False
            sys.setprofile(None)
            threading.setprofile(None)  # type: ignore[arg-type]

    def open(self, walk: str) -> None:
        """Begins a walk; one of that name that is open begins again."""
        if self._installed:
            sys.setprofile(self._profile)
        self._open[walk] = Calls()

    def close(self, walk: str) -> None:
        """Ends a walk, if it is open."""
        if walk in self._open:
            self.walks.setdefault(walk, []).append(self._open.pop(walk))

    def _profile(self, frame: FrameType, event: str, argument: Any) -> None:
        if not self._installed:
            sys.setprofile(None)  # of a thread that outlives the context
            return
        code = frame.f_code
        if event == "call":
            if code in self.at_call:
                self.at_call[code](frame)
            if code.co_filename.startswith(self.folder):
                function = Function(code.co_filename, code.co_firstlineno, code.co_qualname)
                for calls in list(self._open.values()):
                    calls[function] += 1
        elif event == "return" and code in self.at_return:
            self.at_return[code](frame)


class Block(nn.Module):
    """Two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        down: Tensor = self.down(torch.relu(self.up(x)))
        return down


class Stack(pl.LightningModule):
    """Blocks, trained with AdamW. The tracer opens and closes walks at the borders of its middle block.

    A layer's forward is the whole call of the block, with every hook around it. A layer's backward is from the gradient of
    the block's output to that of its input: one period of the backward, from a point of one layer to that point of the next.
    """

    def __init__(self, tracer: Tracer) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.tracer = tracer
        tracer.at_call[Block.forward.__code__] = self._forward_begins
        tracer.at_return[Block.forward.__code__] = self._forward_ends
        tracer.at_call[torch.autograd.backward.__code__] = lambda frame: tracer.open(BACKWARD)
        tracer.at_return[torch.autograd.backward.__code__] = self._backward_ends

    @property
    def middle(self) -> nn.Module:
        return self.blocks[BLOCKS // 2]

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        tracer, x = self.tracer, batch
        for walk in (UPDATES, BATCH):
            tracer.close(walk)
        tracer.open(BATCH)
        for block in self.blocks:
            tracer.close(FIT)
            if block is not self.middle:
                x = block(x)
                continue
            _at_gradient(x, lambda: tracer.close(BACKWARD_OF_LAYER))
            tracer.open(FORWARD)
            tracer.open(ENTER)
            x = block(x)
            tracer.close(LEAVE)
            tracer.close(FORWARD)
            _at_gradient(x, lambda: tracer.open(BACKWARD_OF_LAYER))
        return x.square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)

    def _forward_begins(self, frame: FrameType) -> None:
        if frame.f_locals["self"] is self.middle:
            self.tracer.close(ENTER)
            self.tracer.open(COMPUTE)

    def _forward_ends(self, frame: FrameType) -> None:
        if frame.f_locals["self"] is self.middle:
            self.tracer.close(COMPUTE)
            self.tracer.open(LEAVE)

    def _backward_ends(self, frame: FrameType) -> None:
        self.tracer.close(BACKWARD)
        self.tracer.open(UPDATES)


def _at_gradient(x: Tensor, then: Callable[[], None]) -> None:
    """Calls ``then`` when the gradient of ``x`` is known."""

    def hook(gradient: Tensor) -> None:
        then()

    x.register_hook(hook)


def trace(overlap: str, batches: int = BATCHES) -> dict[str, list[Calls]]:
    """The walks of a training: each as often as it happened."""
    torch.manual_seed(0)
    tracer = Tracer()
    module = Stack(tracer)
    trainer = pl.Trainer(
        strategy=SuperpipelineStrategy(k=K, optimizer_overlap=overlap), accelerator="cpu", devices=1, max_epochs=1,
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    loader: Any = torch.utils.data.DataLoader(torch.randn(batches, 4, WIDTH), batch_size=None)  # type: ignore[arg-type]
    with tracer.installed():
        tracer.open(FIT)
        trainer.fit(module, loader)
    return tracer.walks


class Figure(NamedTuple):
    """One walk: the median of its calls, the least and the most of them, and what the median one touches."""

    calls: int
    least: int
    most: int
    functions: int
    files: int

    def __str__(self) -> str:
        spread = "" if self.least == self.most else f" ({self.least:,} to {self.most:,})"
        return f"{self.calls:,}{spread} | {self.functions} | {self.files}"


def figure(times: list[Calls]) -> Figure:
    """What the median of several times shows."""
    total = [calls.total() for calls in times]
    middle = times[total.index(statistics.median_low(total))]
    return Figure(middle.total(), min(total), max(total), len(middle), len(middle.files))


def walks(overlap: str, found: dict[str, list[Calls]]) -> Iterator[str]:
    """The rows of the table of walks, for one training."""
    yield f"| {FIT} | {overlap} | {figure(found[FIT])} |"
    for walk in (FORWARD, ENTER, COMPUTE, LEAVE, BACKWARD_OF_LAYER, BACKWARD, UPDATES, BATCH):
        yield f"| {walk} | {overlap} | {figure(found[walk][WARM_UP:])} |"


def main() -> None:
    """Prints all tables, and a row of ``examples/results/README.md``."""
    for name in ("lightning", "lightning.pytorch", "sp_lightning"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    found = {overlap: trace(overlap) for overlap in ("off", "backward")}
    print(f"{BLOCKS} blocks of two linear layers, AdamW, CPU, k={K}; batches after {WARM_UP} warm-up batches.\n")
    print("| walk | overlap | calls | functions | files |\n|---|---|---|---|---|")
    for overlap, times in found.items():
        for row in walks(overlap, times):
            print(row)
    for line in shape.report():
        print(line)
    forward, backward = (figure(found["off"][walk][WARM_UP:]) for walk in (FORWARD, BACKWARD_OF_LAYER))
    figures = f"{forward.calls}, {forward.files}; {backward.calls}, {backward.files}"
    print(result_row("Calls, files of a layer's forward; backward", figures, "python -m tests.repository.walks"))


if __name__ == "__main__":
    main()
