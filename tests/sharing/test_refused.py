"""What trials may not have in common, and what else of a trial is refused by name."""

from __future__ import annotations

import copy
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any, ClassVar

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback, EarlyStopping
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.profilers import SimpleProfiler
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, RandomSampler, Sampler
from torchmetrics import MeanMetric

from sp_lightning import SharedBase, SuperpipelineStrategy
from sp_lightning.experimental.sharing.own import with_state
from sp_lightning.experimental.sharing.shared_base import current
from tests.support.runs import Outcome, assert_equal, assert_same, fit, loader, trainer_for
from tests.support.tiers import first
from tests.support.trials import RATES, WIDTH, Learner, batches, learn, shared


@pytest.mark.long("takes a second or more")
def test_what_cannot_share_is_told_before_work() -> None:
    def nothing_frozen() -> None:
        learn(1e-3, make=lambda rate: Learner(rate).requires_grad_(True))  # type: ignore[return-value]

    outside = trainer_for("superpipeline")

    def trainer_of_before() -> None:
        outside.fit(Learner(1e-3), loader(batches(1e-3)))

    def strategy_of_before() -> None:
        trainer_for(of_before).fit(Learner(1e-3), loader(batches(1e-3)))

    of_before = SuperpipelineStrategy()

    def another_base() -> None:
        learn(1e-3, make=lambda rate: copy.deepcopy(module))

    module = Learner(1e-3)

    def on_disk() -> None:
        fit(lambda: Learner(1e-3), batches(1e-3), SuperpipelineStrategy(disk="/tmp"))

    def staying() -> None:
        fit(lambda: Learner(1e-3), batches(1e-3), SuperpipelineStrategy(gpu_layers=1))

    def two_devices() -> None:
        trainer_for("superpipeline", devices=2)

    def inside() -> None:
        base.map(lambda _: None, [1])

    for bad, message in (
        (nothing_frozen, "has no frozen weights of its SharedBase"),
        (another_base, "has no frozen weights of its SharedBase"),
        (on_disk, "disk=.* is not supported in trials"),
        (staying, "gpu_layers=1 is not supported in trials"),
        (two_devices, "this trainer has more"),
    ):
        base = shared()
        base.map(learn, [1e-3])
        with pytest.raises(ValueError, match=message):
            base.wrap(bad)()

    def on_another_device() -> None:
        trial = current()
        assert trial is not None
        trial.begin(None, None, torch.device("meta"))

    base = shared()
    base.map(learn, [1e-3])
    with pytest.raises(ValueError, match="this one on meta, an earlier one on cpu"):
        base.wrap(on_another_device)()
    for before in (trainer_of_before, strategy_of_before):
        with pytest.raises(RuntimeError, match="was made outside of it"):
            base.wrap(before)()
    with pytest.raises(RuntimeError, match="was started inside another one"):
        base.wrap(inside)()
    for wrong in (0, -1, 1.5, True, "2"):
        with pytest.raises(ValueError, match="Expected a number of at least 1"):
            shared(max_trials=wrong)  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore:.*:pytest.PytestUnraisableExceptionWarning", "ignore:coroutine")
def test_a_trial_returns_what_it_has_computed() -> None:
    """The code of a generator or a coroutine would run outside of its turn."""

    def generator(rate: float) -> Iterator[float]:
        yield rate

    async def coroutine(rate: float) -> None: ...

    async def both(rate: float) -> AsyncIterator[float]:
        yield rate

    base = shared()
    functions: list[Any] = [generator, both, coroutine, partial(generator), lambda rate: generator(rate)]
    for later in functions:
        with pytest.raises(TypeError, match=r"returns a (generator|async_generator|coroutine)\. A trial returns"):
            base.wrap(later)(1e-3)


class Odd(Exception):
    def __len__(self) -> int:
        return 0

    def __repr__(self) -> str:
        raise ValueError("it has no name")


def test_errors_are_told_whatever_they_and_the_arguments_are() -> None:
    def fails(argument: Any) -> None:
        raise argument

    (found,) = shared().map(fails, [Odd()], return_exceptions=True)
    assert isinstance(found, Odd)
    assert found.__notes__[0].startswith("This was raised by the trial fails(<Odd instance at ")


class Data(pl.LightningDataModule):
    def train_dataloader(self) -> Any:
        return loader(batches(1e-3))


class Counts(IterableDataset[Tensor]):
    """It goes on where it was, whoever asks."""

    def __init__(self) -> None:
        self.count = 0

    def __iter__(self) -> Iterator[Tensor]:
        while self.count % 5 < 4:
            self.count += 1
            yield torch.full((4, WIDTH), float(self.count))
        self.count += 1


class Itself:
    """An iterator as a loader."""

    def __iter__(self) -> Itself:
        self.left = batches(1e-3)
        return self

    def __next__(self) -> Tensor:
        if not self.left:
            raise StopIteration
        return self.left.pop()


def drawn() -> RandomSampler:
    return RandomSampler(range(4), generator=torch.Generator().manual_seed(3))


def loaded(**options: Any) -> DataLoader[Tensor]:
    return DataLoader(options.pop("dataset", batches(1e-3)), batch_size=None, **options)


THINGS: dict[str, tuple[Callable[[], Any], str]] = {
    "Learner": (lambda: Learner(1e-3), "the LightningModule"),
    "Linear": (lambda: nn.Linear(WIDTH, WIDTH).requires_grad_(False), "net.1.base"),  # a copy was forgotten
    "Parameter": (lambda: nn.Parameter(torch.eye(WIDTH), requires_grad=False), "net.1.base.weight"),
    "Tensor": (lambda: torch.zeros(WIDTH), "net.1.buffer"),
    "MeanMetric": (MeanMetric, "metric"),
    "Data": (Data, "trainer.datamodule"),
    "EarlyStopping": (lambda: EarlyStopping("loss"), "trainer.callbacks"),
    "SimpleProfiler": (SimpleProfiler, "trainer.profiler"),
    "DummyLogger": (DummyLogger, "trainer.loggers"),
    "MixedPrecision": (lambda: MixedPrecision("bf16-mixed", "cpu"), "trainer.precision_plugin"),
    "DataLoader": (lambda: loaded(generator=torch.Generator().manual_seed(3), shuffle=True), "train_dataloader"),
    "RandomSampler": (drawn, "train_dataloader"),
    "DistributedSampler": (lambda: DistributedSampler(range(4), 1, 0), "train_dataloader"),  # type: ignore[arg-type]
    "Counts": (Counts, "train_dataloader"),
    "CombinedLoader": (lambda: CombinedLoader(loaded(), "max_size_cycle"), "train_dataloader"),
    "Itself": (Itself, "train_dataloader"),
    "zip": (lambda: zip(batches(1e-3), strict=True), "train_dataloader"),
}
"""What makes a thing that has a state, and where trials have it in common."""


class Measures(Learner):
    metric: MeanMetric

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch[0] if isinstance(batch, tuple) else batch, batch_idx)
        self.metric.update(loss)
        self.log("mean", self.metric.compute())
        return loss


def use(thing: Any, kind: str) -> Any:
    """A trial."""
    torch.manual_seed(5)
    module = thing if kind == "Learner" else Measures(1e-3)
    module.metric = thing if kind == "MeanMetric" else MeanMetric()
    if kind == "Linear":
        module.net[1].base = thing
    if kind == "Parameter":
        module.load_state_dict({"net.1.base.weight": thing}, strict=False, assign=True)
    if kind == "Tensor":
        module.net[1].register_buffer("buffer", thing.detach())  # as each ``state_dict()`` gives it out
    data = {
        "RandomSampler": lambda: loaded(sampler=thing),
        "DistributedSampler": lambda: loaded(sampler=thing),
        "Counts": lambda: loaded(dataset=thing),
    }.get(kind, lambda: thing)
    options: dict[str, Any] = {
        "EarlyStopping": {"callbacks": [thing]},
        "SimpleProfiler": {"profiler": thing},
        "DummyLogger": {"logger": thing},
        "MixedPrecision": {"plugins": [thing]},
    }.get(kind, {})
    trainer = trainer_for(SuperpipelineStrategy(k=1), max_epochs=2, **options)
    trainer.fit(module, data() if kind == "Data" or "loader" in THINGS[kind][1] else loader(batches(1e-3)))
    assert module.trainer is trainer
    return dict(module.state_dict()), dict(trainer.callback_metrics)


@pytest.mark.long("takes a second or more")
@pytest.mark.parametrize(
    "kind",
    first(THINGS, "Learner", "Parameter", "Tensor", "EarlyStopping", "Counts", why="other things of the same places"),
)
def test_what_has_a_state_is_in_one_trial(kind: str) -> None:
    """The trial that comes second is refused, and the first one is not disturbed."""
    make, place = THINGS[kind]
    torch.manual_seed(2)
    alone = use(make(), kind)
    torch.manual_seed(2)
    thing, base = make(), shared()
    if isinstance(thing, Learner):
        thing.take(base)
    found = base.map(lambda _: use(thing, kind), range(2), return_exceptions=True)
    first, second = sorted(found, key=lambda each: isinstance(each, RuntimeError))
    assert f"A {kind} is in two trials of a SharedBase at once: " in str(second)
    assert f"{place}. Make it" in str(second)
    assert_equal(first, alone, "the first one")
    one_by_one = shared(max_trials=1)
    if isinstance(thing, Learner):
        thing.take(one_by_one)
    one_by_one.map(lambda _: use(thing, kind), range(2))


class Around(Measures):
    """It has a module of Lightning's in it, which asks for its trainer."""

    inner: Learner

    def __init__(self, inner: Learner) -> None:
        super().__init__(1e-3)
        self.metric, self.inner = MeanMetric(), inner

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        assert self.inner.trainer is self.trainer
        return super().training_step(batch, batch_idx)


@pytest.mark.rest("takes tenths of a second")
def test_a_module_within_the_module_of_the_first_trial_keeps_its_trainer() -> None:
    inner = Learner(3e-3)

    def run(_: int) -> str:
        trainer_for(SuperpipelineStrategy(k=1)).fit(Around(inner), loader(batches(1e-3)))
        return "it ends"

    found = shared().map(run, range(2), return_exceptions=True)
    first, second = sorted(found, key=lambda each: isinstance(each, BaseException))
    assert first == "it ends"
    assert "A Learner is in two trials of a SharedBase at once: inner." in str(second)


@pytest.mark.rest("takes tenths of a second")
def test_no_hook_of_a_module_runs_in_a_second_trial() -> None:
    """Nor is it converted to another precision there, or moved at the end: it is refused before anything is done with it."""

    class Prepares(Learner):
        def setup(self, stage: str) -> None:
            done.append(stage)

        def cpu(self) -> Prepares:
            done.append("to the CPU")
            return self

    done = list[str]()
    learn(1e-3, make=Prepares)
    base = shared()
    alone, module = done.copy(), Prepares(1e-3).take(base)
    done.clear()
    found = base.map(lambda _: learn(1e-3, make=lambda _: module), range(2), return_exceptions=True)
    assert sum(isinstance(each, RuntimeError) for each in found) == 1
    assert done == alone


class Steady(Sampler[Any]):
    """A sampler of a user's, of which nothing is known."""

    def __iter__(self) -> Iterator[Any]:
        return iter([0, 1])


class Stateful(DataLoader[Any]):
    """As torchdata's."""

    def state_dict(self) -> dict[str, Any]:
        return {}


LOADERS: dict[str, tuple[Callable[[], Any], Callable[[Any], list[Any]]]] = {
    "shuffled": (lambda: DataLoader(range(4), shuffle=True), lambda loader: []),  # type: ignore[arg-type]
    "list": (lambda: batches(1e-3), lambda loader: []),
    "sampler that is a list": (lambda: loaded(sampler=[0, 1]), lambda loader: []),
    "a user's sampler": (lambda: loaded(sampler=Steady()), lambda loader: [loader.sampler]),
    "a user's batches": (
        lambda: DataLoader(range(4), batch_sampler=Steady()),  # type: ignore[arg-type]
        lambda loader: [loader.batch_sampler],
    ),
    "batches of what is drawn": (
        lambda: DataLoader(range(4), batch_sampler=BatchSampler(drawn(), 2, False)),  # type: ignore[arg-type]
        lambda loader: [loader.batch_sampler.sampler],
    ),
    "workers that stay": (lambda: loaded(num_workers=1, persistent_workers=True), lambda loader: [loader]),
    "with a state": (lambda: Stateful(batches(1e-3)), lambda loader: [loader]),  # type: ignore[arg-type]
    "combined": (
        lambda: CombinedLoader({"one": loaded(), "other": loaded(sampler=drawn())}),
        lambda loader: [loader, loader.iterables["other"].sampler],
    ),
}
"""Makes a loader, and says what of it has a state."""


@pytest.mark.parametrize("kind", LOADERS)
def test_what_of_a_loader_has_a_state(kind: str) -> None:
    make, expected = LOADERS[kind]
    loader = make()
    found, wanted = list(with_state(loader)), expected(loader)
    assert list(map(id, found)) == list(map(id, wanted))


@pytest.mark.rest("takes tenths of a second")
def test_parameters_of_another_trial_are_refused_in_the_middle() -> None:
    base = shared()
    theirs = Learner(1e-3).take(base)

    class Assigns(Learner):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if batch_idx == 1:
                self.net.load_state_dict(dict(theirs.net.named_parameters()), assign=True)  # type: ignore[arg-type, union-attr]

    def run(at: int) -> Any:
        return learn(RATES[at], make=(lambda _: theirs, Assigns)[at], max_epochs=2)

    found = base.map(run, range(2), return_exceptions=True)
    (refused,) = (each for each in found if not isinstance(each, Outcome))
    assert "A Parameter is in two trials" in str(refused)


@dataclass
class Equal(Callback):
    """It is equal to others of its class, and has no hash."""

    number: int = 1


@dataclass
class EqualData(Data):
    number: int = 1

    def __post_init__(self) -> None:
        super().__init__()


@pytest.mark.long("takes a second or more")
def test_what_trials_may_have() -> None:
    """What is only equal is each trial's own; loaders and datasets without a state may be everybody's."""
    common = loaded(shuffle=True)

    def run(at: int) -> Any:
        module = Learner(RATES[at])
        module.register_buffer("sparse", torch.eye(3).to_sparse(), persistent=False)  # it has no storage
        torch.manual_seed(at)
        trainer_for(SuperpipelineStrategy(k=1), callbacks=[Equal()]).fit(module, EqualData() if at == 2 else common)
        return dict(module.state_dict())

    assert_equal(shared().map(run, range(3)), [run(at) for at in range(3)], "together and alone")


@pytest.mark.long("takes a second or more")
def test_a_run_outside_of_trials_is_refused_beside_them() -> None:
    """It would draw from their random state. They are what they are alone."""
    alone, step, go_on = [learn(rate) for rate in RATES[:2]], threading.Event(), threading.Event()
    trainer, module = trainer_for(SuperpipelineStrategy(k=1)), Learner(1e-3)

    class Steps(Learner):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            step.set()
            assert go_on.wait(20)

    with ThreadPoolExecutor(1) as pool:
        trials = pool.submit(shared().map, lambda rate: learn(rate, make=Steps), RATES[:2])
        assert step.wait(20)
        for use in (trainer.fit, trainer.validate, trainer.predict):
            with pytest.raises(RuntimeError, match="is used outside of the trials of a SharedBase"):
                use(module, loader(batches(1e-3)))
        go_on.set()
    for ours, its in zip(trials.result(), alone, strict=True):
        assert_same(ours, its)
    trainer.fit(module, loader(batches(1e-3)))


def test_a_trial_is_refused_beside_a_run_outside_of_trials() -> None:
    """Around it, too; and it may begin once that has ended, by an error as well."""

    class Begins(Learner):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            shared().map(learn, [1e-3])

    outside = trainer_for(SuperpipelineStrategy(k=1))
    with pytest.raises(
        RuntimeError, match="outside of the trials of a SharedBase while they run, in another thread or around them"
    ):
        outside.fit(Begins(1e-3), loader(batches(1e-3)))
    shared().map(learn, [1e-3])


def test_a_base_is_made_of_a_model() -> None:
    for old in (SharedBase, partial(SharedBase, 4), partial(SharedBase, max_trials=4)):
        with pytest.raises(TypeError, match=r"Write SharedBase\(model\), and in each trial module = base.copy\(\)"):
            old()
    with pytest.raises(ValueError, match=r"no frozen weights: call model.requires_grad_\(False\)"):
        SharedBase(nn.Linear(2, 2))


class Writes(Learner):
    """The first trial writes a frozen weight in its second batch, and all go on."""

    way: Callable[[nn.Linear], Any]
    in_step: ClassVar = False

    def write(self, batch_idx: int) -> None:
        if batch_idx == 1 and self.rate == RATES[0]:
            self.way(self.net[2].base)  # type: ignore[index, union-attr]

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if not self.in_step:
            self.write(batch_idx)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if self.in_step:
            self.write(batch_idx)
        return loss


def in_place(layer: nn.Linear) -> None:
    with torch.no_grad():
        layer.weight.mul_(1.5)


def without_a_version(layer: nn.Linear) -> None:
    layer.weight.data += 1


def by_numpy(layer: nn.Linear) -> None:
    layer.weight.numpy()[0] = 3


def to_other_memory(layer: nn.Linear) -> None:
    layer.weight.data = torch.ones(WIDTH, WIDTH, device=layer.weight.device)


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.parametrize(
    ("way", "in_step"),
    [*product((in_place, without_a_version), (False, True)), (by_numpy, False), (to_other_memory, False)],
    ids=lambda value: getattr(value, "__name__", "in the step" if value else "between"),
)
def test_a_write_to_a_frozen_weight_is_an_error(way: Any, in_step: bool) -> None:
    """All trials raise it if the memory was written, because it is theirs, too; and trials that begin later as well."""

    class Writer(Writes):
        pass

    Writer.way, Writer.in_step = staticmethod(way), in_step  # type: ignore[method-assign]
    base = shared()
    found = base.map(lambda rate: learn(rate, make=Writer), RATES[:3], return_exceptions=True)
    alone = way is to_other_memory  # the base's memory has the old values
    for rate, each in zip(RATES, found, strict=False):
        if alone and rate != RATES[0]:
            assert isinstance(each, Outcome)
            continue
        assert isinstance(each, RuntimeError)
        message = str(each)
        assert "2.base.weight'" in message
        assert "layer.weight = nn.Parameter(layer.weight.clone(), requires_grad=False)" in message
        assert ("load it again, and make a new SharedBase(model)" in message) is not alone
        if way is in_place:
            assert "was written by the trial <lambda>(0.001)." in message
    if not alone:
        with pytest.raises(RuntimeError, match="was written by"):
            base.map(learn, [RATES[3]])


@pytest.mark.rest("takes tenths of a second")
def test_a_write_of_a_trial_alone_is_an_error_at_its_end() -> None:
    def writes() -> None:
        outcome = learn(RATES[0])
        without_a_version(outcome.module.net[1].base)  # type: ignore[index, union-attr, arg-type]

    with pytest.raises(RuntimeError, match=r"'1\.base\.weight'.* was written by the trial writes\(\)"):
        shared().wrap(writes)()


@pytest.mark.parametrize("own", [False, True])
def test_a_write_to_a_copy_outside_of_trials_is_an_error_of_the_next_copy(own: bool) -> None:
    """A program without ``map`` makes its copies one after the other, and trains them alone."""
    base = SharedBase(nn.Linear(3, 3).requires_grad_(False))
    layer = base.copy()
    if own:
        layer.weight = nn.Parameter(layer.weight.clone(), requires_grad=False)  # what the error proposes
    in_place(layer)
    if own:
        base.copy()
        return
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"'weight', .* was written by code outside of trials\..* load it again"):
            base.copy()


@pytest.mark.rest("takes tenths of a second")
def test_a_write_of_the_same_values_is_none() -> None:
    """As loading a checkpoint is, and the copy that bitsandbytes gives a weight."""

    def way(layer: nn.Linear) -> None:
        with torch.no_grad():
            layer.weight.copy_(layer.weight.clone())
        layer.bias.data = layer.bias.data.clone()

    class Writer(Writes):
        pass

    Writer.way = staticmethod(way)  # type: ignore[method-assign]
    alone = [learn(rate, make=Writer) for rate in RATES[:2]]
    for ours, its in zip(shared().map(lambda rate: learn(rate, make=Writer), RATES[:2]), alone, strict=True):
        assert_same(ours, its)


def test_a_copy_has_its_own_parameters_over_the_memory_of_the_base() -> None:
    class Marked(nn.Parameter):
        pass

    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3)).requires_grad_(False)
    model[1].weight = Marked(torch.eye(3), requires_grad=False)
    model[1].weight.note = "kept"
    model[2].weight = model[0].weight
    model[1].bias.requires_grad_(True)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    base = SharedBase(model)
    one, other = base.copy(), base.copy()
    assert_equal(dict(one.state_dict()), before, "values")
    for (name, p), q, r in zip(one.named_parameters(), other.parameters(), model.parameters(), strict=True):
        assert p is not q
        assert (p.data_ptr() == q.data_ptr() == r.data_ptr()) is (name != "1.bias")
    assert one[2].weight is one[0].weight
    assert type(one[1].weight) is Marked
    assert one[1].weight.note == "kept"
    one[0].weight.requires_grad_(True)
    one[0].bias.data = torch.zeros(3)
    one[1].weight.note = "another"
    assert not other[0].weight.requires_grad
    assert other[1].weight.note == "kept"
    assert torch.equal(other[0].bias, before["0.bias"])
