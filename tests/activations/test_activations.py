"""Keep, recompute, offload: bitwise equal to plain Lightning, and as much memory as the formula says."""

from __future__ import annotations

import copy
import logging
import pickle
import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import transformers
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.checkpoint import CheckpointError

from sp_lightning import SuperpipelineStrategy
from sp_lightning.activations import offload
from sp_lightning.activations.calls import Activations
from sp_lightning.activations.forward_state import Unrepeatable
from sp_lightning.activations.modes import KeepMode, RecomputeMode
from sp_lightning.activations.offload import Offload
from sp_lightning.activations.offloaded_storage import OffloadedStorage
from sp_lightning.device.layout import PAGE
from sp_lightning.device.modes import no_dispatch_modes
from sp_lightning.engine.streamer import Streamer
from sp_lightning.plan.activation_policy import Call, peak_bytes
from tests.equality.test_equality import plain, run
from tests.support.models import CASES, Case, Module, Stack, Transformer, tokens, vectors
from tests.support.poison import poisoned
from tests.support.runs import Outcome, assert_same, fit, superpipeline
from tests.support.simdevice import SimDevice, poison, simulated

MODES = ("recompute", "offload")


@pytest.fixture(autouse=True)
def everything_is_worth_moving(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models here are small."""
    monkeypatch.setattr(offload, "WORTH_MOVING", 1)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[Activations]:
    """The activations of every run, to look at after it."""
    found: list[Activations] = []
    close = Streamer.close

    def closed(self: Streamer) -> None:
        found.append(self.activations)
        close(self)

    monkeypatch.setattr(Streamer, "close", closed)
    return found


@pytest.fixture
def poisoned_ring(monkeypatch: pytest.MonkeyPatch) -> None:
    """Host memory is NaN as soon as no graph needs what is in it, and device memory when nothing is to be read there."""
    end, drop = OffloadedStorage.__del__, Offload._drop

    def ended(self: OffloadedStorage) -> None:
        with no_dispatch_modes():  # nothing that the engine does
            poison(self.buffer.memory.bytes)
        end(self)

    def dropped(self: Offload, storages: Sequence[OffloadedStorage]) -> None:
        mine = [storage.returned for storage in storages if storage.returned is not None]
        drop(self, storages)
        for memory in mine:
            if torch._C._storage_Use_Count(memory.untyped_storage()._cdata) <= 2:  # ours and the object's
                with no_dispatch_modes():
                    poison(memory)

    monkeypatch.setattr(OffloadedStorage, "__del__", ended)
    monkeypatch.setattr(Offload, "_drop", dropped)


# ---------------------------------------------------------------------- equality


@pytest.mark.parametrize("name", CASES)
def test_recompute_is_bitwise_equal(name: str) -> None:
    strategy = superpipeline(k=1, k_prime=1, activations="recompute")
    if name == "clamped-in-forward":
        with pytest.raises(
            Unrepeatable, match=r"'net.blocks.0' writes its parameter 'inner.weight', and cannot be run again"
        ):
            run(CASES[name], strategy)
        return
    with poisoned():
        ours = run(CASES[name], strategy)
    assert_same(ours, plain(name))


@pytest.mark.parametrize("name", CASES)
def test_offload_is_bitwise_equal_and_without_races(name: str, poisoned_ring: None) -> None:
    with simulated():
        ours = run(CASES[name], superpipeline(k=1, k_prime=1, activations="offload"))
    assert_same(ours, plain(name))


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["llama-dropout", "lora-checkpoint", "gradient-penalty", "frozen"])
def test_precision_and_accumulation(name: str, mode: Any, precision: str, poisoned_ring: None) -> None:
    case = CASES[name]
    if precision == "bf16-true":
        case = Case(lambda: CASES[name].make().bfloat16(), case.batches)
    options: dict[str, Any] = {"precision": precision, "accumulate_grad_batches": 2, "gradient_clip_val": 0.1}
    with simulated():
        ours = run(case, superpipeline(k=1, activations=mode), **options)
    assert_same(ours, run(case, "auto", **options))


@pytest.mark.parametrize("overlap", ["forward", "backward"])
@pytest.mark.parametrize("mode", MODES)
def test_updates_in_the_background(mode: Any, overlap: Any) -> None:
    case = CASES["llama-dropout"]

    def trained(**options: Any) -> Outcome:
        strategy = SuperpipelineStrategy(k=1, optimizer_overlap=overlap, **options)
        return fit(case.make, case.batches(), strategy, gradients=False, gradient_clip_val=None)

    with simulated():
        ours = trained(activations=mode)
    assert_same(ours, trained())


def test_the_comparison_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes back is what backward reads: one wrong number is seen."""
    load = Offload.load

    def wrong(self: Offload, stored: Any) -> Tensor:
        tensor = load(self, stored).clone()
        tensor.view(-1)[0] += 1
        return tensor

    monkeypatch.setattr(Offload, "load", wrong)
    with pytest.raises(AssertionError, match=r"gradients|losses"):
        assert_same(run(CASES["stack"], superpipeline(k=1, activations="offload")), plain("stack"))


# ---------------------------------------------------------------------- a forward that runs twice shows once


class Norms(nn.Module):
    """Statistics that are moved, by momentum and by number, an iteration that is read and written, a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = spectral_norm(nn.Linear(16, 16))
        self.moved = nn.BatchNorm1d(16)
        self.averaged = nn.BatchNorm1d(16, momentum=None)
        self.drop = nn.Dropout(0.2)
        self.register_buffer("calls", torch.zeros(1))

    calls: Tensor

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x + self.drop(self.averaged(self.moved(self.inner(x)))) * self.calls


class Keeps(nn.Module):
    """Everything that Python code keeps from call to call: a number, a list, a tensor, an object, a set."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)
        self.calls = 0
        self.means: list[float] = []
        self.by_name: dict[str, list[int]] = {"x": []}
        self.last: Any = torch.zeros(16)
        self.shapes: set[int] = set()

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.means.append(float(x.detach().mean()))
        self.by_name["x"].append(self.calls)
        self.shapes.add(self.calls)
        y = x + torch.tanh(self.inner(x)) * self.calls + self.last * len(self.means)
        self.last = y.detach().mean(0)
        self.fresh = len(self.shapes)
        return y


def twice(block: type[nn.Module]) -> Any:
    def make() -> Module:
        stack = Stack()
        for index in range(len(stack.blocks)):
            stack.blocks[index] = block()
        return Module(stack)

    return make


@pytest.mark.parametrize("block", [Norms, Keeps])
def test_state_changes_once(block: type[nn.Module]) -> None:
    ours = fit(twice(block), vectors(), superpipeline(k=1, activations="recompute"))
    reference = fit(twice(block), vectors())
    assert_same(ours, reference)
    for mine, theirs in zip(ours.module.modules(), reference.module.modules(), strict=True):
        if isinstance(mine, Keeps):
            for name in ("calls", "means", "by_name", "shapes", "fresh"):
                assert getattr(mine, name) == getattr(theirs, name), name
            assert torch.equal(mine.last, theirs.last)


def cached_llama() -> Transformer:
    """As a configuration comes: a forward makes a cache of keys and values, which its layers add to."""
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=32,
    )  # fmt: skip
    assert config.use_cache
    return Transformer(transformers.LlamaForCausalLM(config))


class LooksAtCache(Transformer):
    """The loss asks what the layers have added."""

    def on_after_backward(self) -> None:
        assert {layer.keys.shape[-2] for layer in self.cache.layers} == {8}, "added to again in backward"

    def loss(self, batch: Any) -> Tensor:
        output = self.net(**batch)
        self.cache = output.past_key_values
        return output.loss + sum(layer.keys.square().mean() for layer in output.past_key_values.layers)


class Collects(nn.Module):
    """Adds to a list and to a dict that it is given, and reads them."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)

    def forward(self, x: Tensor, seen: list[Tensor], *, by_name: dict[str, Any]) -> Tensor:
        seen.append(self.inner(x))
        by_name["count"] = by_name.get("count", 0) + 1
        return x + torch.tanh(sum(seen)) * len(seen) * by_name["count"]  # type: ignore[arg-type]


class Collecting(Module):
    def __init__(self) -> None:
        super().__init__(nn.ModuleList(Collects() for _ in range(4)))

    def loss(self, batch: Any) -> Tensor:
        seen: list[Tensor] = []
        by_name: dict[str, Any] = {}
        for block in self.net:  # type: ignore[attr-defined]
            batch = block(batch, seen, by_name=by_name)
        assert len(seen) == by_name["count"] == 4
        return batch.square().mean() + sum(each.square().mean() for each in seen)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", [Transformer, LooksAtCache])
def test_a_cache_is_added_to_once(kind: type[Transformer], mode: Any) -> None:
    def make() -> Transformer:
        return kind(cached_llama().net)

    ours = fit(make, tokens(), superpipeline(k=1, activations=mode))
    assert_same(ours, fit(make, tokens()))


@pytest.mark.parametrize("mode", MODES)
def test_what_arguments_collect_is_collected_once(mode: Any) -> None:
    ours = fit(Collecting, vectors(), superpipeline(k=1, activations=mode))
    assert_same(ours, fit(Collecting, vectors()))


# ---------------------------------------------------------------------- what leaves, and how often


class Saves(torch.autograd.Function):
    """Saves some large tensors, and has no others."""

    SIZE = 2**16

    @staticmethod
    def forward(ctx: Any, x: Tensor, count: int) -> Tensor:
        ctx.save_for_backward(*(x.new_ones(Saves.SIZE // 4).mul_(x[0, 0]) for _ in range(count)))
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0] * ctx.saved_tensors[-1][0], None


class Saving(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(8, 8), nn.Linear(8, 8)
        self.count = count

    def forward(self, x: Tensor) -> Tensor:
        return self.after(Saves.apply(self.before(x), self.count))  # type: ignore[no-untyped-call]


def saving(counts: Sequence[int]) -> Module:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Saving(count) for count in counts)

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x)
            return x

    return Module(Net())


def rows() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(2, 8, generator=generator) for _ in range(3)]


def train_saving(counts: Sequence[int], mode: Any) -> tuple[Outcome, SimDevice]:
    with simulated(capacity=2**40) as devices:
        ours = fit(lambda: saving(counts), rows(), superpipeline(k=2, k_prime=1, activations=mode))
    return ours, devices[0]


@pytest.mark.parametrize("counts", [[1] * 8, [3, 1, 2, 1, 3, 3, 1, 2], [1, 1, 1, 1, 1, 5, 1, 1], [2, 1]], ids=str)
def test_peak_memory_is_that_of_the_formula(
    counts: list[int], seen: list[Activations], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In units of what is saved, exactly; weights and everything else take less than half of one here."""
    monkeypatch.setattr(offload, "WORTH_MOVING", Saves.SIZE)
    mixed: dict[str, Any] = {"net.blocks.0": "offload", "net.blocks.1": "recompute", "net.blocks.5": "offload"}
    later: dict[str, Any] = {f"net.blocks.{index}": "offload" for index in (2, 3, 6)}
    choices = ["offload", "keep", "recompute"] + ([mixed, {**later, "**": "recompute"}] if len(counts) == 8 else [])
    reference = fit(lambda: saving(counts), rows())
    calls: tuple[Call, ...] = ()
    for choice in choices:
        ours, device = train_saving(counts, choice)
        assert_same(ours, reference)
        calls = calls or seen[-1].calls
        assert [call.saved for call in calls] == [count * Saves.SIZE for count in counts]
        predicted = peak_bytes(calls, seen[-1].modes)
        assert predicted <= device.peak < predicted + Saves.SIZE / 2, choice


def test_the_savings_are_what_the_method_promises(seen: list[Activations]) -> None:
    """More than 60 % below keeping, in both ways."""
    peaks = {mode: train_saving([1] * 8, mode)[1].peak for mode in ("keep", *MODES)}
    assert max(peaks[mode] for mode in MODES) < 0.4 * peaks["keep"]


def handwritten() -> nn.Sequential:
    return nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16), nn.Tanh())


class Handwritten(nn.Module):
    """Its blocks have no class of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(handwritten() for _ in range(8))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def peak_of(make: Any, mode: Any, **options: Any) -> int:
    """Of many rows, so that activations outweigh weights; and the results are plain Lightning's."""
    batches = [torch.randn(2048, 16, generator=torch.Generator().manual_seed(1))] * 2
    with simulated(capacity=2**40) as devices:
        ours = fit(make, batches, superpipeline(k=1, k_prime=1, activations=mode, **options))
    assert_same(ours, fit(make, batches))
    return devices[0].peak


def test_blocks_that_are_sequences_of_bare_modules_are_recomputed() -> None:
    """A block saves 160 numbers of a row, of which 16 are its input: one block, the inputs and gradients are left of 8."""
    peaks = {mode: peak_of(lambda: Module(Handwritten()), mode) for mode in ("keep", "recompute")}
    assert peaks["recompute"] < 0.35 * peaks["keep"]


def flat() -> Module:
    return Module(nn.Sequential(*(each for _ in range(8) for each in handwritten())))


def test_what_is_to_be_grouped_is_said_and_helps(caplog: pytest.LogCaptureFixture) -> None:
    """Where no layer has parts, recomputing them frees nothing."""
    with caplog.at_level(logging.INFO, "lightning.pytorch"):
        kept, again = (peak_of(flat, mode) for mode in ("keep", "recompute"))
    assert again > 0.95 * kept
    (said,) = [record.getMessage() for record in caplog.records if "bare modules" in record.getMessage()]
    paste, options = re.findall(r"Group them: (.*), and name the groups: SuperpipelineStrategy\((.*)\)\.$", said)[0]

    def grouped() -> Module:
        model = flat()
        exec(paste, {"model": model, "nn": nn})
        return model

    given = eval(f"dict({options})")
    assert peak_of(grouped, given.pop("activations"), **given) < 0.45 * kept


class Views(nn.Module):
    """Saves one storage four times: whole, a part, turned, and again."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        first, second = y[:, :8], y[:, 8:]
        return x + torch.cat([first * second, y.t()[:8].t() * second], dim=1) * y


def test_views_and_duplicates_of_one_storage_travel_once(
    seen: list[Activations], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = fit(twice(Views), vectors(1), superpipeline(activations="offload"))
    assert_same(ours, fit(twice(Views), vectors(1)))
    x, y = 4 * 16 * 4, 4 * 16 * 4
    of_blocks = [call.saved for call in seen[0].calls if "blocks" in call.unit]
    assert all(saved <= x + 2 * y + y for saved in of_blocks)  # x, y, and the product's two factors
    assert seen[0].offload.stored_bytes == sum(call.saved for call in seen[0].calls[:-2])
    assert seen[0].offload.returned_bytes == seen[0].offload.stored_bytes


def test_small_tensors_buffers_and_residents_stay(seen: list[Activations], monkeypatch: pytest.MonkeyPatch) -> None:
    class Buffered(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(16, 16)
            self.register_buffer("table", torch.randn(4, 16))

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x) * self.table

    monkeypatch.setattr(offload, "WORTH_MOVING", 4 * 16 * 4)  # vectors() is as large as that
    fit(twice(Buffered), vectors(1), superpipeline(activations="offload"))
    assert {call.saved for call in seen[0].calls if "blocks" in call.unit} == {4 * 16 * 4}, "x, and not the table"
    monkeypatch.setattr(offload, "WORTH_MOVING", 4 * 16 * 4 + 1)
    fit(twice(Buffered), vectors(1), superpipeline(activations="offload"))
    assert seen[1].offload.stored_bytes == 0


def test_the_last_units_of_a_forward_are_exempt(seen: list[Activations]) -> None:
    fit(lambda: Module(Stack()), vectors(), superpipeline(activations="offload"))
    calls = seen[0].calls
    assert [call.unit for call in calls][-2:] == ["net.blocks.4", "net.head"]
    assert seen[0].offload.stored_bytes == 3 * sum(call.saved for call in calls[:-2])


def test_nothing_comes_on_demand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each unit's saved tensors are on their way before backward comes to it."""
    pre_backward, seen = Offload.pre_backward, 0

    def noted(self: Offload, call: Any) -> None:
        nonlocal seen
        storages = call.needed()
        assert all(each.returned is not None or each.source is not None for each in storages), call.unit
        seen += len(storages)
        pre_backward(self, call)

    monkeypatch.setattr(Offload, "pre_backward", noted)
    case = CASES["llama-dropout"]
    fit(case.make, case.batches(), superpipeline(activations="offload"))
    assert seen > 10


# ---------------------------------------------------------------------- the host's memory


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    messages: list[str] = []
    monkeypatch.setattr(SuperpipelineStrategy.log, "warning", lambda text, *values: messages.append(text % values))
    return messages


@pytest.mark.parametrize("room", [0, 3 * Saves.SIZE])
def test_a_host_without_room_recomputes(
    room: int, said: list[str], seen: list[Activations], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first batch, whose sizes nobody knows, keeps what does not fit; later ones compute it again."""
    monkeypatch.setattr(offload, "WORTH_MOVING", Saves.SIZE)
    monkeypatch.setattr("sp_lightning.trainer.run.spare_bytes", lambda needed: room)
    counts: list[int] = [1] * 8
    recomputed: list[bool] = []

    def noted(run: Callable[..., Any], again: bool) -> Callable[..., Any]:
        def runs(*args: Any) -> Any:
            recomputed.append(again)
            return run(*args)

        return runs

    monkeypatch.setattr(KeepMode, "run", noted(KeepMode.run, False))
    monkeypatch.setattr(RecomputeMode, "run", noted(RecomputeMode.run, True))
    ours, _ = train_saving(counts, "offload")
    assert_same(ours, fit(lambda: saving(counts), rows()))
    assert seen[0].ring.peak_bytes <= room
    assert not any(recomputed[:8])
    assert sum(recomputed[8:16]) == 6 - room // Saves.SIZE
    assert len([each for each in said if "the host has no room for the activations of 'net.blocks." in each]) == 1


def test_the_ring_is_used_again_and_given_back(seen: list[Activations]) -> None:
    """Batch after batch in the same memory, whatever their sizes."""
    batches = [torch.randn(size, 16) for size in (4, 4, 3, 4, 2, 4, 4)]
    fit(lambda: Module(Stack()), batches, superpipeline(activations="offload"))
    (activations,) = seen
    pages = sum(-(-call.saved // PAGE) * 4 for call in activations.calls[:-2])  # a unit saves at most four
    assert activations.ring.peak_bytes <= pages * PAGE
    assert not activations.ring._idle
    assert not activations.ring._returned


# ---------------------------------------------------------------------- graphs that users make


class TwoBackwards(Module):
    """``retain_graph``: the same saved tensors twice."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__(net)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        loss = self.loss(batch)
        self.manual_backward(loss, retain_graph=True)
        self.manual_backward(loss * 2)
        optimizer.step()
        return loss


class Partly(Module):
    """A backward that reaches only some units, and a graph that has none."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        net: Any = self.net
        unused = self.loss(batch * 2)
        hidden = net.stem(batch)
        for block in net.blocks[:3]:
            hidden = block(hidden)
        (gradient,) = torch.autograd.grad(hidden.square().mean(), hidden, retain_graph=True)
        del unused
        return self.loss(batch) + hidden.mean() + gradient.detach().mean()


class UsersHooks(Module):
    """The user's own hooks around one forward, a function of theirs inside another."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        with save_on_cpu():
            loss = self.loss(batch)
        with saved_tensors_hooks(lambda x: x * 2, lambda x: x / 2):
            loss = loss + self.loss(batch)
        return loss + self.loss(batch)


class WritesLater(nn.Module):
    """In-place operations that autograd allows, on views and on what was saved before the write."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x).relu_()
        z = torch.zeros_like(y)
        z[:, :8] = y[:, :8]
        z[:, 8:].add_(y[:, 8:].exp())
        z.mul_(2)
        return x + torch.sigmoid(z).mul(2).add_(1)


class WrittenBetween(nn.Module):
    """Saves a tensor, writes it, and saves it again; nobody asks for the gradient of the first use."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)
        self.scale = nn.Parameter(torch.ones(16))

    def forward(self, x: Tensor) -> Tensor:
        y = x.detach().tanh()
        self.unused = self.scale * y
        y.add_(1)
        return x + torch.tanh(self.inner(x)) + self.scale * y


USERS: dict[str, Any] = {
    "written-between": twice(WrittenBetween),
    "two-backwards": lambda: TwoBackwards(Stack()),
    "partly": lambda: Partly(Stack()),
    "users-hooks": lambda: UsersHooks(Stack()),
    "writes-later": twice(WritesLater),
    "compiled": lambda: _compiled(),
}


def _compiled() -> Module:
    stack = Stack()
    stack.blocks[1].compile(backend="aot_eager")
    stack.blocks[2] = torch.compile(stack.blocks[2], backend="aot_eager")  # type: ignore[assignment]
    return Module(stack)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo looks at inputs
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", USERS)
def test_what_users_do_with_graphs(name: str, mode: Any) -> None:
    ours = fit(USERS[name], vectors(), superpipeline(k=1, activations=mode))
    assert_same(ours, fit(USERS[name], vectors()))


class WritesSaved(nn.Module):
    """What plain autograd refuses."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.exp(self.inner(x))
        y.add_(1)
        return y


def writes_saved() -> Module:
    stack = Stack()
    stack.blocks[0] = WritesSaved()
    return Module(stack)


@pytest.mark.parametrize("strategy", ["auto", superpipeline(activations="offload")], ids=["plain", "offload"])
def test_a_saved_tensor_that_was_written_is_refused(strategy: Any) -> None:
    """Though what has left was not."""
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation: .* is at version 1; expected version 0"):
        fit(writes_saved, vectors(), strategy)


class Copies(Callback):
    """Copies the module in the middle of a step, in both ways that there are."""

    def __init__(self) -> None:
        self.copies: list[Any] = []

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
        block = pl_module.net.blocks[1]
        assert "forward" in vars(block), "the step has ended"
        self.copies = [copy.deepcopy(block), pickle.loads(pickle.dumps(block))]
        self.original = block


def test_a_copy_that_is_made_in_a_step_runs_by_itself() -> None:
    copies = Copies()
    ours = fit(lambda: Module(Stack()), vectors(), superpipeline(activations="recompute"), callbacks=[copies])
    assert_same(ours, fit(lambda: Module(Stack()), vectors()))
    assert "forward" not in vars(copies.original.eval())
    for each in copies.copies:
        x = torch.randn(4, 16)
        before = each.eval()(x)
        with torch.no_grad():
            each.inner.weight.zero_()
            each.inner.bias.zero_()
        assert not torch.equal(each(x), before), "it ran the original's forward"


class Chunked(Module):
    """A loss that takes the head's weight, and makes no logits."""

    def loss(self, batch: Any) -> Tensor:
        net: Any = self.net
        x = net.stem(batch)
        for block in net.blocks:
            x = block(x)
        labels = torch.arange(len(batch)) % 16
        options = nn.LinearCrossEntropyOptions()  # type: ignore[attr-defined]
        return torch.nn.functional.linear_cross_entropy(x, net.head.weight, labels, options=options)  # type: ignore[attr-defined]


@pytest.mark.skipif(not hasattr(nn, "LinearCrossEntropyOptions"), reason="torch 2.15 has it")
@pytest.mark.parametrize("options", [{}, {"resident": ["net.head"]}, {"layers": ["net.blocks.*"]}], ids=str)
@pytest.mark.parametrize("mode", ["keep", *MODES])
def test_a_chunked_loss(mode: Any, options: dict[str, Any]) -> None:
    with simulated():
        ours = fit(lambda: Chunked(Stack()), vectors(), superpipeline(k=1, activations=mode, **options))
    assert_same(ours, fit(lambda: Chunked(Stack()), vectors()))


_calls: list[int] = []


class Fickle(nn.Module):
    """Does something else each time, by a global variable."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        _calls.append(1)
        return x + (torch.tanh(self.inner(x)) if len(_calls) % 2 else self.inner(torch.cat([x, x])).exp()[:4].sin())


def test_a_forward_that_does_something_else_the_second_time_is_named() -> None:
    stack = Stack()
    stack.blocks[1] = Fickle()
    with pytest.raises(CheckpointError) as raised:
        fit(lambda: Module(stack), vectors(), superpipeline(activations="recompute"))
    assert 'activations={"net.blocks.1": "offload", "**": "recompute"}' in "".join(raised.value.__notes__)


# ---------------------------------------------------------------------- options


def test_patterns_decide_by_the_first_match(seen: list[Activations]) -> None:
    choice: dict[str, Any] = {"net.blocks.1": "keep", "net.blocks": "recompute", "net.he*": "offload"}
    fit(lambda: Module(Stack()), vectors(), superpipeline(activations=choice))
    modes = {name.removeprefix("net."): mode for name, mode in seen[0].modes.items()}
    assert modes.pop("blocks.1") == modes.pop("stem") == "keep"
    assert modes.pop("head") == "offload"
    assert set(modes.values()) == {"recompute"}


@pytest.mark.parametrize(
    ("choice", "error", "said"),
    [
        ("drop", ValueError, "activations must be one of"),
        (3, TypeError, r"activations takes one of .* found 3"),
        ({"net.blocks.*": "drop"}, ValueError, r"a pattern's mode is one of"),
        ({3: "keep"}, TypeError, "found the pattern 3"),
    ],
)
def test_options_that_cannot_be(choice: Any, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        SuperpipelineStrategy(activations=choice)


@pytest.mark.parametrize(
    ("pattern", "said"),
    [
        ("net.blok.*", r"activations='net.blok.\*' matches nothing in Module. Closest names: \['net.blocks"),
        ("net.blocks.1.inner", r"names a part of 'net.blocks.1'.*Use activations=\{'net.blocks.1': 'offload'\}"),
    ],
)
def test_patterns_that_match_no_unit(pattern: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        fit(lambda: Module(Stack()), vectors(), superpipeline(activations={pattern: "offload"}))
