"""The page that shows the idea: it is short, equal to plain training, and waits wherever a GPU needs it to."""

from __future__ import annotations

import ast
import re
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils.checkpoint import checkpoint

from examples import superpipeline_in_150_lines as page
from tests.examples import one_page
from tests.support.repository import ROOT

FILE = ROOT / "examples" / "superpipeline_in_150_lines.py"
GUIDE = ROOT / "examples" / "guide" / "how_it_works.md"
OTHERS = pytest.mark.rest("other windows than the smallest and the default")
BLOCKS, BLOCK_KIB = 8, (256 * 256 + 3 * 256) * 4 / 1024


@pytest.fixture(autouse=True)
def _on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """``tests/gpu`` runs the page on a GPU."""
    monkeypatch.setattr(page, "DEVICE", "cpu")
    monkeypatch.setattr(page, "device", torch.cpu)


def printed_by(argv: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, tuple[float, float]]:
    """Returns the rows of the table: plain and streamed."""
    page.main(argv)
    head, *rows, verdict = capsys.readouterr().out.splitlines()
    assert head.startswith("KiB on ")
    assert verdict == "All losses and weights are equal, bit for bit."
    cells = [row.rsplit(maxsplit=2) for row in rows]
    return {name: (float(plain.replace(",", "")), float(ours.replace(",", ""))) for name, plain, ours in cells}


@pytest.mark.parametrize(("k", "k_prime"), [(2, 1), (1, 1), pytest.param(6, 2, marks=OTHERS)])
def test_it_trains_as_plain_training_with_the_memory_and_bytes_of_the_formula(
    k: int, k_prime: int, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = printed_by([f"--k={k}", f"--k-prime={k_prime}"], capsys)
    slots = min(k + k_prime, BLOCKS)
    model = BLOCKS * BLOCK_KIB
    assert rows["weights"] == pytest.approx((model, slots * BLOCK_KIB), abs=0.5)
    assert rows["gradients"] == pytest.approx((model, 2 * BLOCK_KIB), abs=0.5)
    assert rows["optimizer state"] == pytest.approx((2 * model, 0), abs=0.5)
    # Plain, each block keeps its input, two more activations and LayerNorm's statistics, and the loss keeps two tensors.
    # Streamed, all inputs are kept, and the rest of one block.
    activation, statistics = 64 * 256 * 4 / 1024, 64 * 2 * 4 / 1024
    kept = BLOCKS * (3 * activation + statistics) + 2 * activation, (BLOCKS + 2) * activation + statistics
    assert rows["activations"] == pytest.approx(kept, abs=0.5)
    assert rows["total"] == pytest.approx([sum(each) for each in zip(*list(rows.values())[:4], strict=True)], abs=2)
    # In backward, the last blocks are still in their slots.
    assert rows["uploaded"] == pytest.approx((0, (2 * BLOCKS - slots) * BLOCK_KIB), abs=0.5)
    assert rows["offloaded"] == pytest.approx((0, model), abs=0.5)


def test_it_is_at_most_150_lines_and_imports_torch_only() -> None:
    source = FILE.read_text()
    assert len(source.splitlines()) <= 150
    imported = {
        (node.module if isinstance(node, ast.ImportFrom) else alias.name).split(".")[0]  # type: ignore[union-attr]
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    assert imported - sys.stdlib_module_names == {"torch"}


def cells(page: Path) -> list[list[str]]:
    """Returns the rows of a page's tables."""
    return [line.strip("| ").split(" | ") for line in page.read_text().splitlines() if line.startswith("| ")]


def test_the_guide_begins_with_it_and_has_its_figures(capsys: pytest.CaptureFixture[str]) -> None:
    assert re.findall(r"\]\((.+?)\)", GUIDE.read_text())[0] == "../superpipeline_in_150_lines.py"
    rows = printed_by([], capsys)
    figures = [f"{rows[name][1]:,.0f}" for name in ("total", "uploaded", "offloaded")]
    assert ["the 150 lines", *figures] in cells(GUIDE)
    assert ["plain training", f"{rows['total'][0]:,.0f}", "0", "0"] in cells(GUIDE)


@pytest.mark.rest("trains with Lightning six times")
def test_figures_of_the_guide_are_measured_again() -> None:
    found = one_page.measure(2, 1)
    assert {row.verdict for row in found.values()} == {"equal"}
    measured = [[f"{value:,.0f}" for value in row[:3]] for row in found.values()]
    shown = [row[1:] for row in cells(GUIDE) if row[-1].replace(",", "").isdecimal()]
    assert len(shown) == 5
    assert [row for row in shown if row not in measured] == []


def test_its_comparison_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    offload = page.Superpipeline.offload_gradients

    def drop_one(self: Any, block: nn.Module, gradients: list[Tensor]) -> None:
        offload(self, block, [torch.zeros_like(gradients[0]), *gradients[1:]])

    monkeypatch.setattr(page.Superpipeline, "offload_gradients", drop_one)
    with pytest.raises(SystemExit, match="differ"):
        page.main([])


# ---------------------------------------------------------------------- beside an ordinary loop


def block(*more: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), *more, nn.Tanh())


def blocks() -> nn.Sequential:
    return nn.Sequential(*(block() for _ in range(5)))


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def trained(
    model: nn.Module, k: int = 2, k_prime: int = 1, of: ModuleType | None = None, batches: int = 1
) -> dict[str, Tensor]:
    """Trains three steps of some batches, streamed by a page or plain; returns losses, weights and buffers."""
    torch.manual_seed(2)
    optimizer, losses = adamw(model), []
    streamed = of.Superpipeline(model, k, k_prime) if of else None
    for _ in range(3):
        for _ in range(batches):
            x, target = torch.randn(4, 8), torch.randn(4, 8)
            if streamed:
                losses.append(streamed.forward_and_backward(x, target))
            else:
                loss = nn.functional.mse_loss(model(x), target)
                loss.backward()
                losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    return {**model.state_dict(), "losses": torch.stack(losses)}


def differing(make: Callable[[], nn.Module], of: ModuleType = page, batches: int = 1, **window: int) -> set[str]:
    """Returns the names of what differs from an ordinary loop."""
    models = []
    for _ in range(2):
        torch.manual_seed(1)
        models.append(make())
    plain, ours = trained(models[0], batches=batches), trained(models[1], of=of, batches=batches, **window)
    return {name for name in plain if not torch.equal(plain[name], ours[name])}


# What the guide says that the page gets wrong or refuses, by the first words of its row there.
WRONG: dict[str, tuple[Callable[[], nn.Sequential], int, str]] = {
    "tied weights": (lambda: tied(blocks()), 1, "differs"),
    "a block that is called twice": (
        lambda: nn.Sequential(*blocks(), shared := block(), block(), shared),
        1,
        "differs",
    ),
    "accumulated gradients": (blocks, 2, "differs"),
    "frozen weights": (lambda: frozen(blocks()), 1, "differs"),
    "hooks on parameters": (lambda: hooked(blocks()), 1, "differs"),
    "dropout": (lambda: nn.Sequential(*(block(nn.Dropout()) for _ in range(5))), 1, "differs"),
    "buffers": (lambda: nn.Sequential(*(block(nn.BatchNorm1d(8)) for _ in range(5))), 1, "only buffers differ"),
    "blocks of different shapes": (lambda: nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 8)), 1, "error"),
    "reentrant checkpoints": (lambda: nn.Sequential(*(Checkpointed() for _ in range(5))), 1, "error"),
}


def tied(model: nn.Sequential) -> nn.Sequential:
    model[4][0].weight = model[0][0].weight
    return model


def hooked(model: nn.Sequential) -> nn.Sequential:
    model[1][0].weight.register_hook(lambda gradient: gradient / 2)
    return model


def frozen(model: nn.Sequential) -> nn.Sequential:
    model[1][0].weight.requires_grad_(False)
    return model


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.second, self.first(x), use_reentrant=True)  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", WRONG)
def test_what_the_guide_says_that_the_page_gets_wrong(name: str) -> None:
    make, batches, outcome = WRONG[name]
    if outcome == "error":
        with pytest.raises((AssertionError, RuntimeError), match=r"other shapes|use_reentrant"):
            differing(make, batches=batches)
        return
    found = differing(make, batches=batches)
    of_buffers = {each for each in found if "running" in each or "tracked" in each}
    assert found
    assert (found == of_buffers) == (outcome == "only buffers differ")


def test_the_guide_has_a_row_for_each_program_that_the_page_gets_wrong() -> None:
    others = {"mixed precision", "weights that are replaced", "checkpoint files"}
    assert {row[0] for row in cells(GUIDE) if "tests/" in row[-1]} == {*WRONG, *others}


def test_tests_that_the_guide_names_are_there() -> None:
    for names, link in re.findall(r"^\|[^|]+\|[^|]+\| (`.+`) in \[.+\]\((.+)\) \|$", GUIDE.read_text(), re.MULTILINE):
        source = (GUIDE.parent / link).read_text()
        for name in re.findall("`(.+?)`", names):
            row = name.rpartition(": ")[2]  # a file of programs may name its subject once
            assert re.search(rf"def {name}\(|\"{name}\"|\"{row}[\",]", source), name


def test_weights_that_are_replaced_are_an_error_on_the_page() -> None:
    streamed = page.Superpipeline(model := blocks(), 2, 1)
    model.load_state_dict(blocks().state_dict(), assign=True)
    with pytest.raises(KeyError):
        streamed.forward_and_backward(torch.randn(4, 8), torch.randn(4, 8))


def test_mixed_precision_is_equal_on_the_page() -> None:
    torch.manual_seed(1)
    model = blocks()
    plain = deepcopy(model)
    streamed = page.Superpipeline(model, 2, 1)
    x, target = torch.randn(4, 8), torch.randn(4, 8)
    with torch.autocast("cpu", torch.bfloat16):
        loss = nn.functional.mse_loss(plain(x), target)
        ours = streamed.forward_and_backward(x, target)
    loss.backward()
    assert torch.equal(loss, ours)
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(plain.parameters(), model.parameters(), strict=True))
    assert streamed.uploaded == 2 * 5 * (64 + 8) * 4 - 3 * (64 + 8) * 4, "float32"


# ---------------------------------------------------------------------- a GPU on which all copies are late


class Race(AssertionError):
    """Memory is used before the work that it depends on is complete."""


class LateDevice(TorchDispatchMode):
    """Takes the place of ``torch.cuda``: compute runs at once, and a copy as late as the waits allow.

    Until a copy runs, its target has NaN. A copy that does not wait for the operators that used its memory is a :class:`Race`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.operators = 0
        self.used: dict[int, int] = {}  # the number of the last operator of compute that used memory, by address
        self.compute = LateStream(self)
        self.streams = [self.compute]
        self.current = self.compute

    def Stream(self) -> LateStream:  # noqa: N802
        self.streams.append(LateStream(self))
        return self.streams[-1]

    def current_stream(self) -> LateStream:
        return self.current

    @contextmanager
    def stream(self, stream: LateStream) -> Iterator[None]:
        self.current = stream
        yield
        self.current = self.compute

    def synchronize(self) -> None:
        for stream in self.streams:
            stream.record_event().synchronize()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.current is not self.compute and func is torch.ops.aten.copy_.default:
            return self.current.copy_later(*args[:2])
        found = func(*args, **(kwargs or {}))
        self.operators += 1
        for each in (*args, found, *(found if isinstance(found, tuple | list) else ())):
            if isinstance(each, Tensor):
                self.used[each.untyped_storage().data_ptr()] = self.operators
        return found


class LateStream:
    def __init__(self, device: LateDevice) -> None:
        self.device = device
        self.queue: deque[Callable[[], None]] = deque()
        self.ran = 0
        self.after = 0  # the number of operators of compute that this stream's next copy waits for

    def record_event(self) -> LateEvent:
        return LateEvent(self, self.ran + len(self.queue), self.device.operators)

    def wait_event(self, event: LateEvent) -> None:
        if event.stream is self.device.compute:
            self.after = max(self.after, event.operators)
        else:
            event.synchronize()

    def copy_later(self, target: Tensor, source: Tensor) -> Tensor:
        on_device = target if isinstance(source, nn.Parameter) else source
        if self.device.used.get(on_device.untyped_storage().data_ptr(), 0) > self.after:
            raise Race("a copy does not wait for the operator that used its memory")
        alive, target_memory = weakref.ref(source), target.detach()

        def copy() -> None:
            if (memory := alive()) is None:
                raise Race("memory was freed before it was copied")
            with _disable_current_modes():  # the copy is not an operator of compute
                target_memory.copy_(memory.detach())

        target_memory.fill_(float("nan"))
        self.queue.append(copy)
        return target


class LateEvent:
    def __init__(self, stream: LateStream, position: int, operators: int) -> None:
        self.stream, self.position, self.operators = stream, position, operators

    def synchronize(self) -> None:
        while self.stream.ran < self.position:
            self.stream.queue.popleft()()
            self.stream.ran += 1


def on_late_device(without: str | None = None) -> ModuleType:
    """Returns the page on a late device of its own, without one of its waits."""
    source = FILE.read_text()
    if without is not None:
        assert source.count(without) == 1
        source = source.replace(without, "pass")
    module = ModuleType("late_page")
    exec(compile(source, str(FILE), "exec"), module.__dict__)
    module.__dict__.update(device=LateDevice(), DEVICE="cpu")
    return module


@pytest.mark.parametrize(
    ("k", "k_prime"),
    [(1, 1), (2, 1), *(pytest.param(*window, marks=OTHERS) for window in ((1, 2), (3, 2), (1, 0), (9, 1)))],
)
def test_copies_that_are_late_change_nothing(k: int, k_prime: int) -> None:
    late = on_late_device()
    with late.device:
        assert differing(blocks, late, k=k, k_prime=k_prime) == set()


@pytest.mark.parametrize(
    "wait",
    [
        "self.upload.wait_event(slot.free)",
        "self.compute.wait_event(slot.uploaded)",
        "self.offload.wait_event(self.compute.record_event())",
        "done.synchronize()",
        "device.synchronize()",
    ],
)
def test_each_wait_is_needed(wait: str) -> None:
    late = on_late_device(without=wait)
    with late.device, pytest.raises(AssertionError):
        assert differing(blocks, late) == set()
