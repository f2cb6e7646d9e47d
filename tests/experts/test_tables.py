"""Embeddings of which only rows travel: results are those of plain Lightning, whatever is done with the weight."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn

from sp_lightning.core.device.device import Device
from sp_lightning.core.device.layout import whole_pages
from sp_lightning.core.model.find import find_layers
from sp_lightning.core.plan.plan import make_plan
from sp_lightning.core.updates.background import BackgroundUpdates
from sp_lightning.core.weights.layer import StreamedLayer
from tests.support.engine import engine_of
from tests.support.models import Module, Transformer, llama
from tests.support.poison import poisoned
from tests.support.runs import assert_equal, assert_same, fit, fused, loader, superpipeline, trainer_for
from tests.support.simdevice import simulated
from tests.support.stacked import Stack
from tests.support.tables import CASES, ROWS, OutputsByTable, Replaced, Sgd, Text, numbers


def test_tables_are_updated_first() -> None:
    """The next forward begins with them."""

    class Looks(Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            engine = engine_of(trainer.strategy)
            self.order = [layer.name for layer in engine.updating.order()]

    looks = Looks()
    fit(fused(CASES["looked-up"]), numbers(), superpipeline(k=1), recorded="losses", callbacks=[looks])
    assert looks.order == ["residents", "net.table", *(f"net.blocks.{i}" for i in range(4))]


def test_only_rows_travel() -> None:
    batches, strategy = numbers(), superpipeline(k=1)
    fit(CASES["looked-up"], batches, strategy)
    rows = 64 * sum(len(batch.unique()) for batch in batches)
    stats, blocks = strategy.stats(), [layer.nbytes for layer in strategy.plan.layers]
    assert stats.fetched_bytes == 2 * rows + stats.fetched_layers * blocks[0]
    by_block = {name: count * blocks[0] for name, count in strategy.fetches().items()}
    assert stats.fetched_bytes_by_layer == {**by_block, "net.table": 2 * rows}
    gradients = 64 * sum(p.numel() // 16 for p in Text().blocks.parameters() if p.dim() == 2) + 4 * sum(
        p.numel() for p in Text().blocks.parameters() if p.dim() == 1
    )
    count = sum(len(batch.unique()) for batch in batches)
    assert stats.offloaded_gradient_bytes == rows + 8 * count + len(batches) * gradients  # each row with its number
    assert stats.host_waits == 2 * len(batches)  # for the rows that are to be looked up; their gradients come meanwhile
    assert strategy.plan.peak_device_bytes >= stats.peak_device_bytes
    assert stats.demand_fetches == 0


@pytest.mark.long("takes a second or more")
def test_backward_finds_the_numbers_of_rows_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy from pageable memory blocked autograd's thread until the device had done all that was issued before."""
    found: list[bool] = []
    search = torch.searchsorted

    def noting(numbers: Tensor, values: Any, **options: Any) -> Tensor:
        if isinstance(values, Tensor):  # a padding index is searched on the host
            found.append(made[0].has(numbers))
        return search(numbers, values, **options)

    monkeypatch.setattr(torch, "searchsorted", noting)
    with simulated() as made:
        ours = fit(CASES["looked-up"], numbers(), superpipeline(k=1))
    assert_same(ours, fit(CASES["looked-up"], numbers()))
    assert found
    assert all(found)


def test_a_whole_use_is_a_demand() -> None:
    strategy = superpipeline(k=1)
    fit(CASES["whole-as-well"], numbers(1), strategy)
    assert strategy.stats().demand_fetches > 0


def test_rows_of_generated_text() -> None:
    class Generating(Transformer):
        def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self.net.generate(batch, max_new_tokens=5, do_sample=True, pad_token_id=0)

    def texts(strategy: Any) -> Any:
        torch.manual_seed(3)
        module = Generating(llama(vocab_size=ROWS, tie_word_embeddings=False).net)
        return trainer_for(strategy).predict(module, loader(numbers(2)))

    strategy = superpipeline(k=1)
    assert_equal(texts(strategy), texts("auto"), "generated")
    assert [table.name for table in strategy.plan.tables] == ["net.model.embed_tokens"]


@pytest.mark.parametrize("choice", [{"layers": ["net.table"]}, {"keep_on_gpu": ["net.table"]}], ids=str)
def test_may_be_chosen_whole(choice: dict[str, Any]) -> None:
    strategy = superpipeline(k=1, **choice)
    assert_same(fit(CASES["looked-up"], numbers(), strategy), fit(CASES["looked-up"], numbers()))
    assert not strategy.plan.tables


def tied() -> nn.Module:
    net = Text()
    net.head = nn.Linear(16, ROWS, bias=False)
    net.head.weight = net.table.weight
    return net


class Scaled(nn.Embedding):
    """A forward of its own may do anything with the weight."""

    def forward(self, numbers: Tensor) -> Tensor:
        return super().forward(numbers) * 2


def scaled() -> nn.Module:
    net = Text()
    net.table = Scaled(ROWS, 16)
    return net


def patched() -> nn.Module:
    net = Text()
    net.table.forward = lambda numbers: net.table.weight[numbers]  # type: ignore[method-assign,assignment]
    return net


def small() -> nn.Module:
    net = Text()
    net.table = nn.Embedding(10, 16)
    return net


@pytest.mark.parametrize("make", [tied, small, scaled, patched, lambda: Text(max_norm=1.0)])
def test_others_move_whole(make: Callable[[], nn.Module]) -> None:
    assert not find_layers(make()).tables


def test_stacked_experts_do_not_count_among_the_layers_that_a_table_is_as_large_as() -> None:
    """They are the largest by far, and nearly nothing of them travels."""
    net = Text()
    net.blocks.extend(Stack(64) for _ in range(9))
    assert [table.name for table in find_layers(net).tables] == ["table"]


def test_the_plan_says_so() -> None:
    plan = make_plan(find_layers(Text()), k=1, k_prime=1)
    assert "of 'table' (18.8 KiB) only the rows in a batch are uploaded" in str(plan)
    assert plan.slot_bytes == 2 * plan.layers[0].nbytes
    assert plan.host_bytes > 2 * ROWS * 64


@pytest.mark.parametrize("wrong", [-1, ROWS])
def test_no_such_row(wrong: int) -> None:
    batch = torch.full((2, 3), wrong)
    with pytest.raises(IndexError, match=rf"'net.table' has {ROWS} rows and was asked for row {wrong}"):
        fit(CASES["looked-up"], [batch], superpipeline(k=1))


def test_no_rows_at_all() -> None:
    class Nothing(Module):
        def loss(self, batch: Any) -> Tensor:
            return self.net(batch).sum() + self.net.blocks[0](torch.ones(16)).sum()

    batches = [torch.empty(0, 3, dtype=torch.long), *numbers(1)]
    assert_same(
        fit(lambda: Nothing(Text()), batches, superpipeline(k=1)), fit(lambda: Nothing(Text()), batches)
    )  # fmt: skip


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_what_passes_by_our_stand_ins_gets_the_whole_weight() -> None:
    """A jagged nested tensor decides on operators before a parameter is asked."""

    class Jagged(Module):
        def loss(self, batch: Any) -> Tensor:
            rows = torch.nested.nested_tensor([batch[0], batch[1, :3]], layout=torch.jagged)
            return self.net.table(rows).values().square().mean() + super().loss(batch)

    with poisoned():
        ours = fit(lambda: Jagged(Text()), numbers(), superpipeline(k=1))
    assert_same(ours, fit(lambda: Jagged(Text()), numbers()))


@pytest.mark.parametrize("dense", [False, True])
def test_a_call_decides_whether_gradients_are_sparse(dense: bool) -> None:
    class Functional(Text):
        def forward(self, numbers: Tensor) -> Tensor:
            x = F.embedding(numbers, self.table.weight, sparse=not dense)
            for block in self.blocks:
                x = block(x)
            return x

    def make() -> Module:
        return Sgd(Functional(sparse=dense))

    layouts: list[Any] = []

    def results(strategy: Any) -> Any:
        torch.manual_seed(1)
        module = make()
        layouts.append(None)
        module.on_after_backward = lambda: layouts.__setitem__(-1, module.net.table.weight.grad.layout)  # type: ignore[method-assign]
        trainer_for(strategy).fit(module, loader(numbers()))
        return dict(module.state_dict())

    assert_equal(results(superpipeline(k=1)), results("auto"), "functional")
    assert layouts[0] == layouts[1] == (torch.strided if dense else torch.sparse_coo)


def test_half_tables_looked_up_twice() -> None:
    class Half(Module):
        def __init__(self) -> None:
            super().__init__(Text())
            self.net.table.half()

        def loss(self, batch: Any) -> Tensor:
            table = self.net.table
            return (table(batch) + table(batch.flip(0))).float().square().mean()

        def validation_step(self, *_: Any) -> None: ...

    assert_same(fit(Half, numbers(), superpipeline(k=1)), fit(Half, numbers()))


@pytest.mark.parametrize("start", [0, 448, 512, 960, 1024, 1472])
def test_sparse_gradients_beside_others_that_leave_with_them(start: int) -> None:
    """A tiny table that stays on the device, and weights beside it: they are added to earlier gradients together.

    Staging memory begins anywhere in its storage, as the allocator has it, and so did parts of gradients that overlapped.
    """

    def host_empty(device: Any, nbytes: int, *, pin: bool = False) -> Tensor:
        return torch.empty(start + whole_pages(nbytes), dtype=torch.uint8)[start:]

    class Tiny(Text):
        def __init__(self) -> None:
            super().__init__(sparse=True)
            self.tiny = nn.Embedding(5, 1, sparse=True)
            self.scale = nn.Parameter(torch.ones(1))

        def forward(self, numbers: Tensor) -> Tensor:
            return super().forward(numbers) * self.scale + self.tiny(numbers % 5)

    strategy = superpipeline(k=1)
    with mock.patch.object(Device, "host_empty", host_empty):
        ours = fit(lambda: Sgd(Tiny()), numbers(), strategy, accumulate_grad_batches=2)
    assert_same(ours, fit(lambda: Sgd(Tiny()), numbers(), accumulate_grad_batches=2))
    assert {span.name for span in strategy.plan.residents.spans} >= {"net.tiny.weight", "net.scale"}


def test_a_sparse_gradient_that_a_hook_coalesces_counts_as_on_plain() -> None:
    """torch forgets, where it accumulates gradients, that each row is there once."""

    def found(strategy: Any) -> list[bool]:
        class Looks(Callback):
            def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
                seen.append(module.net.table.weight.grad.is_coalesced())

        def make() -> Sgd:
            module = Sgd(Text(sparse=True))
            module.net.table.weight.register_hook(lambda gradient: gradient.coalesce())
            return module

        seen: list[bool] = []
        fit(make, numbers(), strategy, recorded="nothing", callbacks=[Looks()])
        return seen

    assert found(superpipeline(k=1)) == found("auto")


@pytest.mark.rest("takes tenths of a second")
def test_rows_are_gathered_after_the_update_in_the_background() -> None:
    strategy = superpipeline(k=1, optimizer_overlap="forward")
    with simulated():
        ours = fit(fused(CASES["looked-up"]), numbers(), strategy, recorded="losses")
    assert_same(ours, fit(fused(CASES["looked-up"]), numbers(), recorded="losses"))


@pytest.mark.long("takes a second or more")
@pytest.mark.parametrize("place", ["cpu", "gpu"])
def test_an_update_under_way_is_no_write_of_a_forward_that_is_recomputed(place: str) -> None:
    """It showed between the look at the table's version before the forward and the one after it."""
    submit, options = BackgroundUpdates.submit, {"optimizer_overlap": "forward", "activations": "recompute"}

    def slow(self: BackgroundUpdates, layer: StreamedLayer, work: Callable[[], None], *then: Any) -> None:
        submit(self, layer, lambda: (time.sleep(0.02), work())[1], *then)  # type: ignore[func-returns-value]

    make = CASES["looked-up"] if place == "gpu" else fused(CASES["looked-up"])
    with simulated(), mock.patch.object(BackgroundUpdates, "submit", slow):
        ours = fit(make, numbers(), superpipeline(k=1, optimizer_on=place, **options), recorded="losses")
    assert_same(ours, fit(make, numbers(), recorded="losses"))


def test_rows_of_the_next_step_are_refused() -> None:
    """A look-up in the same backward that has updated the table already."""

    class Again(Module):
        def loss(self, batch: Any) -> Tensor:
            engine = engine_of(self.trainer.strategy)
            engine.layers[len(engine.plan.layers)].updated_early = True
            return super().loss(batch)

    with pytest.raises(RuntimeError, match=r"had updated layer 'net.table' when.*its weights were needed again"):
        fit(lambda: Again(Text()), numbers(), superpipeline(k=1))


def test_one_whole_use_does_not_last() -> None:
    """In the step after it only rows' gradients leave again."""

    class Once(Module):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self.loss(batch) + (self.net.table.weight.square().sum() if batch_idx == 0 else 0)

    drained = []
    for count in (1, 2):
        strategy = superpipeline(k=1)
        fit(lambda: Once(Text()), numbers(count), strategy)
        drained.append(strategy.stats().offloaded_gradient_bytes)
    assert drained[1] - drained[0] < drained[0] - ROWS * 64 / 2


@pytest.mark.parametrize("fails", [False, True])
def test_the_module_changes_its_mind(fails: bool) -> None:
    """Dense gradients first, sparse ones then; also after a backward that has failed between."""

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            raise KeyError("in backward")

    class Changes(Module):
        def __init__(self) -> None:
            super().__init__(Text())
            self.automatic_optimization = False
            self.layouts: list[Any] = []

        def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
            table = self.net.table
            if fails and batch_idx == 0:
                with contextlib.suppress(KeyError):
                    self.manual_backward(Fails.apply(self.net.blocks[0](torch.ones(16))).sum() + self.loss(batch))
            else:
                self.manual_backward(self.loss(batch))
            self.zero_grad()
            table.sparse = True
            self.manual_backward(self.loss(batch))
            self.layouts.append(table.weight.grad.layout)
            self.zero_grad()
            table.sparse = False

        def validation_step(self, *_: Any) -> None: ...

    layouts = [fit(Changes, numbers(2), strategy).module.layouts for strategy in (superpipeline(k=1), "auto")]
    assert layouts[0] == layouts[1] == [torch.sparse_coo] * 2


def test_a_weight_that_is_replaced_between_batches_is_taken_in() -> None:
    """Not in poisoned memory, which hides what the block has when the new weight lies elsewhere."""
    ours = fit(lambda: Replaced(Text()), numbers(), superpipeline(k=1))
    assert_same(ours, fit(lambda: Replaced(Text()), numbers()))


@pytest.mark.parametrize(("net", "said"), [(Text, False), (OutputsByTable, True)])
def test_a_peak_far_above_the_plan_is_logged(net: type[Text], said: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Code reads the whole table, of which the plan has no row."""
    with caplog.at_level("INFO", "lightning.pytorch.superpipeline"):
        fit(lambda: Module(net()), numbers(), superpipeline(k=1))
    assert any("layers=['net.table'] puts it into the plan" in line for line in caplog.messages) is said
