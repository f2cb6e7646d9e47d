"""What happened when: intervals of every kind, in a picture, at no cost where nobody asked."""

from __future__ import annotations

import pickle
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from sp_lightning import SuperpipelineCallback, SuperpipelineStrategy
from sp_lightning.core.device.device import Device, Stream, Wait
from sp_lightning.core.device.stats import Stats
from sp_lightning.core.device.timeline import Interval, Timeline, name_of
from sp_lightning.core.model.find import find_layers
from sp_lightning.core.plan.plan import make_plan
from sp_lightning.trainer.metrics import bottleneck, counters_line
from tests.support.models import Module, Stack, llama, tokens, vectors
from tests.support.runs import assert_same, fit, loader, trainer_for

PNG = b"\x89PNG"


class Drawn(NamedTuple):
    """What a picture was made of."""

    intervals: list[Interval]
    names: Sequence[str]
    title: str

    def named(self, kind: str) -> list[str]:
        """The names of the layers of a kind's intervals, in their order."""
        return [name_of(each.layer, self.names) for each in self.intervals if each.kind == kind]


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Drawn]:
    """The pictures so far, which are not drawn."""
    found = list[Drawn]()

    def draws(intervals: list[Interval], names: Sequence[str], path: Path, title: str) -> None:
        found.append(Drawn(sorted(intervals, key=lambda each: each.begin), names, title))
        path.write_bytes(PNG)

    monkeypatch.setattr("sp_lightning.trainer.callback.draw_timeline", draws)
    return found


def run(tmp_path: Path, overlap: Any = "off", every: int = 2) -> Any:
    callback = SuperpipelineCallback(plot=tmp_path / "a folder" / "run.png", every_n_steps=every)
    strategy = SuperpipelineStrategy(k=1, k_prime=1, optimizer_overlap=overlap)
    return fit(lambda: llama(layers=4), tokens() * 2, strategy, callbacks=[callback], recorded="losses")


@pytest.fixture
def updates_run_when_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    """Background work begins when something waits for it.

    The layers are tiny: otherwise all updates of a batch may end before the next batch, and its recording, begins.
    """
    later, finish, awaited = Device.later, Device.finish, [threading.Event()]

    def held_back(self: Device, work: Callable[[], None], urgency: int | None = None) -> Future[None]:
        begins = awaited[0]

        def work_when_awaited() -> None:
            begins.wait()
            work()

        return later(self, work_when_awaited, urgency)

    def begin_and_finish(self: Device, work: Future[None], why: Wait) -> None:
        awaited[0].set()
        awaited[0] = threading.Event()
        finish(self, work, why)

    monkeypatch.setattr(Device, "later", held_back)
    monkeypatch.setattr(Device, "finish", begin_and_finish)


@pytest.mark.usefixtures("updates_run_when_awaited")
@pytest.mark.parametrize(("every", "last"), [(1, 5), (2, 5), (3, 4), (9, 1)])
def test_the_last_recorded_batch(every: int, last: int, drawn: list[Drawn], tmp_path: Path) -> None:
    plan = run(tmp_path, "forward", every).trainer.strategy.plan
    (picture,) = drawn
    assert picture.title == f"Training batch {last}, k = 1, k' = 1"
    kinds = {each.kind for each in picture.intervals}
    assert kinds == {"fetch", "forward", "backward", "between", "drain", "update"}
    assert all(each.end >= each.begin for each in picture.intervals)
    names = [layer.name for layer in plan.layers]
    assert picture.named("forward") == names, "each layer once, in order"
    assert picture.named("backward") == names[:0:-1], "an embedding's backward needs no weights"
    assert set(picture.named("drain")) == {*names, "weights outside layers"}
    for each in picture.intervals:
        if each.kind == "fetch" and each.layer is not None:
            assert each.nbytes == plan.layers[each.layer].nbytes


@pytest.mark.rest("takes tenths of a second")
def test_compute_waits_for_its_fetch(drawn: list[Drawn], tmp_path: Path) -> None:
    run(tmp_path)
    intervals = drawn[0].intervals
    fetches = [each for each in intervals if each.kind == "fetch"]
    for use in (each for each in intervals if each.kind == "forward"):
        before = [each for each in fetches if each.layer == use.layer and each.begin < use.begin]
        assert all(each.end <= use.begin + 1e-6 for each in before)


@pytest.mark.usefixtures("everything_is_worth_moving")
def test_activations_travel_in_the_row_of_the_layer_that_saved_them(drawn: list[Drawn], tmp_path: Path) -> None:
    callback = SuperpipelineCallback(plot=tmp_path / "run.png", every_n_steps=2)
    strategy = SuperpipelineStrategy(k=1, k_prime=1, activations="offload")
    fit(lambda: Module(Stack()), vectors(), strategy, callbacks=[callback], recorded="losses")
    forward = set(drawn[0].named("forward"))
    for kind in ("store", "return"):
        assert set(drawn[0].named(kind)) == forward - {"net.blocks.4", "net.head"}, (
            "the two that backward comes to first keep theirs"
        )


@pytest.mark.long("takes a second or more")
def test_results_are_the_same_with_a_timeline(tmp_path: Path) -> None:
    strategy = SuperpipelineStrategy(k=1, k_prime=1, optimizer_overlap="forward")
    without = fit(lambda: llama(layers=4), tokens() * 2, strategy, recorded="losses")
    assert_same(run(tmp_path, "forward"), without)
    assert (tmp_path / "a folder" / "run.png").read_bytes().startswith(PNG)


def test_a_run_that_fails_leaves_what_it_has(drawn: list[Drawn], tmp_path: Path) -> None:
    class Fails(Module):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx == 2:
                raise KeyError("on purpose")
            return self.loss(batch)

    callback = SuperpipelineCallback(plot=tmp_path / "run.png", every_n_steps=1)
    with pytest.raises(KeyError):
        fit(lambda: Fails(Stack()), vectors(), SuperpipelineStrategy(), callbacks=[callback])
    assert drawn[0].intervals


@pytest.mark.rest("takes tenths of a second")
def test_nothing_is_marked_where_nobody_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    def marked(self: Timeline, *args: Any) -> None:
        raise AssertionError("an interval was kept")

    monkeypatch.setattr(Timeline, "add", marked)
    outcome = fit(lambda: Module(Stack()), vectors(), SuperpipelineStrategy())
    strategy: Any = outcome.trainer.strategy
    assert strategy.stats().fetched_layers
    assert Device(torch.device("cpu")).mark(Stream.COMPUTE) is None


@pytest.mark.rest("takes tenths of a second")
def test_what_happens_between_batches_is_no_computation(
    drawn: list[Drawn], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock goes forward by a day between two batches."""
    day, days = 86_400, [0]
    monkeypatch.setattr("sp_lightning.core.device.device.perf_counter", lambda: time.perf_counter() + day * days[0])

    class TakesADay(Module):
        def on_train_batch_end(self, *args: Any) -> None:
            days[0] += 1

    callback = SuperpipelineCallback(plot=tmp_path / "run.png", every_n_steps=1)
    fit(lambda: TakesADay(Stack()), vectors(), SuperpipelineStrategy(), callbacks=[callback], recorded="losses")
    assert max(each.end - each.begin for each in drawn[0].intervals) < day


@pytest.mark.rest("takes tenths of a second")
def test_metrics_and_progress_bar(tmp_path: Path) -> None:
    from lightning.pytorch.loggers import CSVLogger

    callback = SuperpipelineCallback(progress_bar=True, metrics="all", every_n_steps=2)
    trainer = trainer_for(SuperpipelineStrategy(), logger=CSVLogger(tmp_path), callbacks=[callback])
    trainer.fit(Module(Stack()), loader(vectors(6)))
    header = (Path(trainer.log_dir or "") / "metrics.csv").read_text().splitlines()[0].split(",")
    wanted = {f"superpipeline/{name}" for name in ("waited", "device_bytes", "fetch_gbps", "window")}
    assert wanted <= set(header)
    assert trainer.progress_bar_metrics["window"] == 2
    assert 0 <= trainer.progress_bar_metrics["waited"] <= 1


def stats(**seconds: float) -> Stats:
    return Stats(**seconds)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (
            {"stall_seconds": 4.0, "update_stall_seconds": 1.0},
            "waited 40% of 10.0 s for uploads. Use a larger k or gpu_memory",
        ),
        ({"gradient_stall_seconds": 2.0}, "20% of 10.0 s for gradient offloading. Use more tokens or images"),
        ({"update_stall_seconds": 3.0}, "30% of 10.0 s for optimizer steps. Use a larger batch"),
        ({"step_seconds": 5.0, "stall_seconds": 1.0}, "50% of 10.0 s for optimizer steps. Use a larger batch"),
    ],
)
def test_the_bottleneck_is_named_with_the_option_that_helps(seconds: dict[str, float], said: str) -> None:
    plan = make_plan(find_layers(Stack()), k=1, k_prime=1)
    assert said in bottleneck(stats(**seconds), 10.0, plan)
    assert "larger k or" not in bottleneck(stats(**seconds), 10.0, make_plan(find_layers(Stack()), k=9, k_prime=1))


def test_what_was_waited_is_one_figure_with_its_parts() -> None:
    """The figures were of five kinds without a sum, with a number of times behind them."""
    line = counters_line(stats(stall_seconds=4.0, gradient_stall_seconds=0.5, update_stall_seconds=1.25))
    assert line.endswith(
        "; waited 5.75 s (4.00 s for uploads, 0.50 s for gradient offloading, 1.25 s for optimizer steps)."
    )
    assert counters_line(stats()).endswith("; waited 0.00 s.")


@pytest.mark.parametrize("seconds", [0.0, 0.1, 0.9])  # of a short run it would be noise
def test_what_was_hardly_waited_for_is_not_worth_a_word(seconds: float) -> None:
    assert bottleneck(stats(stall_seconds=seconds), 10.0, make_plan(find_layers(Stack()), k=1, k_prime=1)) == ""


@pytest.mark.parametrize("options", [{"every_n_steps": 0}, {"every_n_steps": True}, {"plot": "/"}])
def test_bad_options(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"every_n_steps must be|is a folder; name a file in it"):
        SuperpipelineCallback(**options)


@pytest.mark.rest("takes tenths of a second")
def test_a_run_is_predicted_from_its_own_timeline(drawn: list[Drawn], tmp_path: Path) -> None:
    """The measured batch, walked again with the same k: the same fetches, and all of its computation."""
    from sp_lightning.tools.planner.prediction.simulator import Walk
    from tests.support.planner import measured

    strategy = run(tmp_path).trainer.strategy
    intervals = drawn[0].intervals
    visits, rates = measured(intervals, len(strategy.plan.layers), synchronous=True)
    found = Walk(strategy.plan, visits, rates).predict()
    fetched = [each.layer for each in intervals if each.kind == "fetch"]
    walked = [
        each.layer for each in found.intervals if each.kind == "fetch" and each.layer != len(strategy.plan.layers)
    ]
    assert Counter(walked) == Counter(fetched)
    busy = sum(each.end - each.begin for each in intervals if each.kind in ("forward", "backward", "between"))
    assert found.busy["compute"] == pytest.approx(busy)


@pytest.mark.rest("takes tenths of a second")
def test_validation_is_no_part_of_the_batch_before_it(drawn: list[Drawn], tmp_path: Path) -> None:
    callback = SuperpipelineCallback(plot=tmp_path / "run.png", every_n_steps=1)
    strategy = SuperpipelineStrategy(k=1, k_prime=1)
    fit(lambda: llama(layers=4), tokens() * 2, strategy, val=tokens(), val_check_interval=2, callbacks=[callback])
    assert len(drawn[0].named("forward")) == 6


def test_two_callbacks_draw_a_picture_each(drawn: list[Drawn], tmp_path: Path) -> None:
    callbacks = [SuperpipelineCallback(plot=tmp_path / name, every_n_steps=1) for name in ("a.png", "b.png")]
    fit(lambda: Module(Stack()), vectors(), SuperpipelineStrategy(), callbacks=callbacks)
    first, second = (each.intervals for each in drawn)
    assert len(first) == len(second) > 20


def test_a_path_that_cannot_be_written_is_refused_before_any_work(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    callback = SuperpipelineCallback(plot=tmp_path / "file" / "run.png")
    with pytest.raises(OSError, match="file"):
        fit(lambda: Module(Stack()), vectors(), SuperpipelineStrategy(), callbacks=[callback])
    with pytest.raises(ValueError, match=r"must end in one of"):
        SuperpipelineCallback(plot=tmp_path / "run.xyz")


@pytest.mark.rest("takes tenths of a second")
def test_a_run_without_a_batch_that_is_kept_leaves_no_file(tmp_path: Path) -> None:
    callback = SuperpipelineCallback(plot=tmp_path / "run.png")
    trainer = trainer_for(SuperpipelineStrategy(), callbacks=[callback])
    trainer.fit(Module(Stack()), loader(vectors(1)))
    trainer.predict(Module(Stack()), loader(vectors(1)))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.rest("takes tenths of a second")
def test_a_disk_that_fills_up_costs_neither_checkpoint_nor_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr("sp_lightning.trainer.callback.draw_timeline", full)
    callback = SuperpipelineCallback(plot=tmp_path / "run.png", every_n_steps=1)
    fit(lambda: Module(Stack()), vectors(), SuperpipelineStrategy(), callbacks=[callback])

    class Fails(Module):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            raise KeyError("on purpose")

    with pytest.raises(KeyError, match="on purpose"):
        fit(lambda: Fails(Stack()), vectors(), SuperpipelineStrategy(), callbacks=[callback])


class Pickles(Module):
    def on_train_batch_end(self, *args: Any) -> None:
        (callback,) = (each for each in self.trainer.callbacks if isinstance(each, SuperpipelineCallback))
        state = pickle.loads(pickle.dumps(callback.__getstate__()))
        assert isinstance(state["_batch"], list)
        assert callback.__getstate__()["_strategy"] is None


@pytest.mark.long("takes a second or more")
def test_the_callback_can_be_pickled_and_copied(tmp_path: Path) -> None:
    callback = SuperpipelineCallback(plot=tmp_path / "run.png", every_n_steps=1)
    outcome = fit(lambda: Pickles(Stack()), vectors(), SuperpipelineStrategy(), callbacks=[callback])
    assert outcome.losses
    assert type(pickle.loads(pickle.dumps(callback))) is SuperpipelineCallback


@pytest.mark.rest("takes tenths of a second")
def test_masters_have_names_of_their_own(drawn: list[Drawn], tmp_path: Path) -> None:
    class Penalized(Module):
        def loss(self, batch: Any) -> Any:
            return super().loss(batch) + sum(p.norm() for p in self.parameters())

    callback = SuperpipelineCallback(plot=tmp_path / "run.png", every_n_steps=1)
    fit(
        lambda: Penalized(Stack()), vectors(), SuperpipelineStrategy(k=1, k_prime=1), callbacks=[callback],
        precision="bf16-mixed",
    )  # fmt: skip
    names = drawn[0].named("forward")
    assert {"net.head", "net.head, float32"} <= set(names) or any(name.endswith(", float32") for name in names)


@pytest.mark.long("takes a second or more")
def test_ranges_in_torchs_profiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Future, "done", lambda _: False)  # the host finds no work done, however fast the thread is
    strategy = SuperpipelineStrategy(k=1, k_prime=1, activations="recompute", optimizer_overlap="forward")
    everywhere = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    with torch.profiler.profile(experimental_config=everywhere) as profiler:
        layers = fit(lambda: llama(layers=2), tokens(), strategy, recorded="losses").trainer.strategy.plan.layers
    found = {each.name for each in profiler.events() if re.match(r"[a-z ]+: ", each.name)}
    kinds = ["gradient offloading", "optimizer step", "upload"]
    named = {f"{kind}: {layer.name}" for kind in kinds for layer in layers}
    waits = {f"host waits: {wait.value}" for wait in Wait}
    assert named <= found
    assert found & waits
    assert "recomputation" in {each.split(": ")[0] for each in found}


@pytest.mark.rest("takes tenths of a second")
def test_no_ranges_without_a_profiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sp_lightning.core.device.device._Timed.__init__", pytest.fail)
    fit(lambda: llama(layers=2), tokens(), SuperpipelineStrategy(k=1, k_prime=1), recorded="losses")
