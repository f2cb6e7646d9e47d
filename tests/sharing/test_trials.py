"""Each trial of a shared base is bitwise the run that it would have been alone."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.optim import optimizer as torch_optimizer

from sp_lightning import SharedBase, SuperpipelineStrategy
from sp_lightning.experimental.sharing import shared_base
from sp_lightning.experimental.sharing.common import SharedLayers, TrialMemory
from sp_lightning.experimental.sharing.shared_base import Trial, current
from sp_lightning.experimental.sharing.turns import TURNS
from tests.support.runs import Outcome, assert_equal, assert_same, fit, loader, trainer_for
from tests.support.tiers import first
from tests.support.trials import RATES, WIDTH, Adapted, Learner, batches, interruptible, learn


def assert_each_is_itself(count: int, run: Callable[[float], Outcome] = learn) -> SharedBase:
    rates = RATES[:count]
    alone = [run(rate) for rate in rates]
    base = SharedBase()
    for ours, its in zip(base.map(run, rates), alone, strict=True):
        assert_same(ours, its)
    return base


@pytest.mark.long("takes a second or more")
@pytest.mark.parametrize("count", [2, 3, 5])
def test_trials_are_what_they_are_alone(count: int) -> None:
    base = assert_each_is_itself(count)
    assert_same(learn(RATES[0]), learn(RATES[0], plain=True))
    strategy = SuperpipelineStrategy(k=1)
    fit(lambda: Learner(RATES[0]), batches(RATES[0]), strategy)
    fetches = sum(strategy.fetches().values())
    layer = sum(p.nbytes for p in Learner(RATES[0], depth=1).parameters() if not p.requires_grad)
    # Two layers of the base stay on the device, so that where forward turns into backward none has to come again.
    assert 0.7 * fetches * layer <= base.fetched_bytes <= fetches * layer, "the base has come once for all trials"


OPTIONS: dict[str, dict[str, Any]] = {
    "recompute": {"activations": "recompute"},
    "offload": {"activations": "offload"},
    "k2": {"k": 2},
    "device": {"optimizer_on": "gpu"},
    "bf16-mixed": {"precision": "bf16-mixed"},
    "bf16-true": {"precision": "bf16-true"},
    "accumulated": {"accumulate_grad_batches": 2},
    "clipped": {"gradient_clip_val": 0.01},
}


@pytest.mark.long("takes a second or more")
@pytest.mark.parametrize(
    "name", first(list(OPTIONS), "recompute", "bf16-true", "bf16-mixed", why="other paths of the same")
)
def test_options(name: str) -> None:
    assert_each_is_itself(3, lambda rate: learn(rate, **OPTIONS[name]))


@pytest.mark.long("takes a second or more")
def test_updates_in_the_background() -> None:
    def run(rate: float) -> Outcome:
        strategy = SuperpipelineStrategy(k=1, optimizer_overlap="forward")
        return fit(lambda: Learner(rate), batches(rate), strategy, recorded="losses")

    assert_each_is_itself(3, run)


class OwnAutocast(Learner):
    """Uses one trained weight several times within its own autocast, whose cache casts it once."""

    def __init__(self, rate: float) -> None:
        super().__init__(rate)
        self.again = nn.Linear(WIDTH, WIDTH)

    def loss(self, batch: Any) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            for block in self.net:  # type: ignore[union-attr]
                batch = batch + self.again(block(batch))
        return batch.float().square().mean()


class InnerAutocasts(OwnAutocast):
    """Enters it for that weight alone. Within the one of ``bf16-mixed`` the cast outlives each of them."""

    def loss(self, batch: Any) -> Tensor:
        for block in self.net:  # type: ignore[union-attr]
            batch = block(batch)
            with torch.autocast("cpu", torch.bfloat16):
                batch = batch + self.again(batch)
        return batch.float().square().mean()


@pytest.mark.long("takes a second or more")
@pytest.mark.parametrize(("make", "precision"), [(OwnAutocast, "32-true"), (InnerAutocasts, "bf16-mixed")])
def test_trials_with_an_autocast_of_their_own(make: type[Learner], precision: Any) -> None:
    """A gradient that comes through one cast is another one than the sum of those that come through two."""
    assert_each_is_itself(3, lambda rate: learn(rate, make=make, precision=precision))
    its = learn(RATES[0], make=make, precision=precision)
    assert_same(its, learn(RATES[0], make=make, precision=precision, plain=True))


@pytest.mark.long("takes a second or more")
def test_trials_of_different_lengths_depths_and_validations(tmp_path: Path) -> None:
    """One validates, one saves checkpoints, one is deeper, one ends early, one resumes."""
    learn(RATES[4], max_epochs=1).trainer.save_checkpoint(tmp_path / "resume.ckpt")

    def run(rate: float) -> Outcome:
        at = RATES.index(rate)
        options: list[dict[str, Any]] = [
            {"val": batches(rate, 2), "max_epochs": 2},
            {"enable_checkpointing": True, "default_root_dir": tmp_path / f"{rate}", "max_epochs": 2},
            {"make": lambda rate: Learner(rate, depth=6)},
            {"max_steps": 2},
            {"ckpt_path": tmp_path / "resume.ckpt", "max_epochs": 2},
        ]
        return learn(rate, **options[at])

    assert_each_is_itself(5, run)


@pytest.mark.rest("takes tenths of a second")
def test_bars_are_off() -> None:
    """Those of Rich, of which a process can show one."""
    pytest.importorskip("rich")
    base = SharedBase()
    assert len(base.map(lambda rate: learn(rate, enable_progress_bar=True, enable_model_summary=True), RATES[:3])) == 3


class Fails(Learner):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx == 2:
            raise ZeroDivisionError("in the middle")
        return super().training_step(batch, batch_idx)


class FailsInBackward(Learner):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if batch_idx == 2:
            self.net[1].up.weight.register_hook(lambda _: 1 / 0)  # type: ignore[index, union-attr]
        return loss


@pytest.mark.long("takes a second or more")
@pytest.mark.parametrize("kind", [Fails, FailsInBackward])
def test_one_that_fails_leaves_the_others_alone(kind: type[Learner]) -> None:
    def run(rate: float) -> Outcome:
        return learn(rate, make=kind if rate == RATES[1] else Learner)

    alone = [learn(rate) for rate in RATES[:3]]
    first, failed, third = SharedBase().map(run, RATES[:3], return_exceptions=True)
    assert isinstance(failed, ZeroDivisionError)
    assert_same(first, alone[0])
    assert_same(third, alone[2])
    with pytest.raises(ZeroDivisionError) as raised:
        SharedBase().map(run, RATES[:3])
    assert "with 0.003" in raised.value.__notes__[-1]


class Writes(Learner):
    """One trial writes a frozen weight, one unfreezes a layer."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        base = self.net[2].base  # type: ignore[index, union-attr]
        if batch_idx == 1 and self.rate == RATES[0]:
            with torch.no_grad():
                base.weight.mul_(1.5)
        if batch_idx == 1 and self.rate == RATES[1]:
            base.bias.data = torch.ones(WIDTH)

    def configure_optimizers(self) -> Any:
        if self.rate == RATES[2]:
            self.net[1].base.requires_grad_(True)  # type: ignore[index, union-attr]
        return super().configure_optimizers()


@pytest.mark.long("takes a second or more")
def test_a_frozen_weight_that_one_trial_writes_is_its_own() -> None:
    assert_each_is_itself(4, lambda rate: learn(rate, make=Writes))


class Other(Learner):
    """Of one trial a layer of the base has other values."""

    def __init__(self, rate: float) -> None:
        super().__init__(rate)
        if rate == RATES[1]:
            nn.init.constant_(self.net[3].base.weight, 0.01)  # type: ignore[index, union-attr]


class Swaps(Learner):  # so that the block leaves its memory to the old values, which the other weight holds
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1 and self.rate == RATES[0]:
            first, second = self.net[0].base.weight, self.net[1].base.weight  # type: ignore[index, union-attr]
            first.data, second.data = second.data, first.data


@pytest.mark.rest("takes tenths of a second")
def test_frozen_weights_that_one_trial_swaps_are_swapped_for_it_alone() -> None:
    assert_each_is_itself(2, lambda rate: learn(rate, make=Swaps))


def test_one_trial_alone_brings_nothing_for_others() -> None:
    base = SharedBase()
    base.map(learn, RATES[:1])
    assert base.fetched_bytes == 0


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.parametrize("k", [99, 1], ids=["theirs do too", "theirs do not"])
def test_trials_whose_layers_all_stay_take_turns(k: int) -> None:
    """Nothing comes to the device for them after the first batch."""
    seen = list[float]()

    class Notes(Learner):
        def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            seen.append(self.rate)
            return super().predict_step(batch, batch_idx)

    def run(rate: float) -> Any:
        strategy = SuperpipelineStrategy(k=99 if rate == RATES[0] else k)
        return trainer_for(strategy).predict(Notes(rate), loader(batches(rate, 30 if rate == RATES[0] else 3)))

    SharedBase().map(run, RATES[:2])
    assert sum(before != after for before, after in pairwise(seen)) > 2, "one after the other"


@pytest.mark.long("takes a second or more")
def test_there_is_a_turn_for_each_layer_that_comes_and_three_more_in_a_step() -> None:
    """At its beginning, and where forward and backward have nothing left to fetch. Each takes time, so there are no more."""
    before, steps, fetches = TURNS._given, 20, list[int]()

    def run(rate: float) -> None:
        strategy = SuperpipelineStrategy(k=2)
        trainer_for(strategy, max_epochs=1).fit(Learner(rate), loader(batches(rate, steps)))
        fetches.append(sum(strategy.fetches().values()))

    SharedBase().map(run, RATES[:2])
    assert sum(fetches) < TURNS._given - before <= sum(fetches) + 2 * 3 * steps + 20


@pytest.mark.long("takes a second or more")
def test_how_many_threads_compute_is_each_trial_s_own() -> None:
    """A thread has a number of its own besides the process's, and a trial that begins later may have the thread of another."""
    before, seen = torch.get_num_threads(), dict[float, list[int]]()

    class Threads(Learner):
        def on_train_batch_start(self, *_: Any) -> None:
            seen.setdefault(self.rate, []).append(torch.get_num_threads())
            if self.rate == RATES[0]:
                torch.set_num_threads(before + 2)

    def run(rate: float) -> Outcome:
        return learn(rate, make=Threads, max_epochs=1 if rate == RATES[0] else 3)

    SharedBase(max_trials=2).map(run, RATES[:3])
    assert [set(seen[rate]) for rate in RATES[:3]] == [{before, before + 2}, {before}, {before}]
    assert torch.get_num_threads() == before


@pytest.mark.rest("takes tenths of a second")
def test_a_layer_that_differs_is_its_own() -> None:
    assert_each_is_itself(3, lambda rate: learn(rate, make=Other))


@pytest.mark.rest("takes tenths of a second")
def test_prediction() -> None:
    def run(rate: float) -> Any:
        torch.manual_seed(int(1e5 * rate))
        return trainer_for(SuperpipelineStrategy(k=1)).predict(Learner(rate), loader(batches(rate)))

    alone = [run(rate) for rate in RATES]
    base = SharedBase()
    for ours, its in zip(base.map(run, RATES), alone, strict=True):
        assert all(map(torch.equal, ours, its))
    assert base.fetched_bytes > 0


class Writer(pl.LightningModule):
    """Writes on from a prompt."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        config = transformers.LlamaConfig(
            hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=2, vocab_size=64
        )
        self.net = transformers.LlamaForCausalLM(config).eval().requires_grad_(False)

    def predict_step(self, batch: Tensor, batch_idx: int) -> Any:
        return self.net.generate(input_ids=batch, max_new_tokens=6, do_sample=True, pad_token_id=0)


@pytest.mark.rest("takes tenths of a second")
def test_generation_brings_the_weights_once_for_a_token_of_each_trial() -> None:
    fetched = list[int]()

    def run(seed: int) -> Any:
        torch.manual_seed(seed)
        strategy = SuperpipelineStrategy(k=1)
        found = trainer_for(strategy).predict(Writer(), loader([torch.randint(64, (1, 3))]))
        fetched.append(strategy.stats().fetched_bytes)
        return found

    alone = [run(seed) for seed in range(3)]
    base = SharedBase()
    assert_equal(base.map(run, range(3)), alone, "what was written")
    assert base.fetched_bytes < 1.4 * fetched[0]


@pytest.mark.parametrize("wrapped", [False, True], ids=["map", "wrap"])
def test_a_trial_begins_with_the_process_as_it_is_when_it_is_called(wrapped: bool) -> None:
    def run(_: int) -> Any:
        found = torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled(), torch.rand(4)
        torch.manual_seed(7)
        torch.set_default_dtype(torch.float32)
        return found

    base = SharedBase()
    trial = base.wrap(run)
    torch.manual_seed(3)
    torch.set_default_dtype(torch.float64)
    torch.use_deterministic_algorithms(True)
    before = torch.get_rng_state()
    try:
        found = [trial(each) for each in range(3)] if wrapped else base.map(run, range(3))
        assert torch.equal(torch.get_rng_state(), before)
        assert_equal(found, 3 * [(torch.float64, True, torch.rand(4))], "what each trial finds")
    finally:
        torch.set_default_dtype(torch.float32)
        torch.use_deterministic_algorithms(False)


@pytest.mark.rest("takes tenths of a second")
def test_the_base_is_once_in_memory() -> None:
    """Pages of frozen weights are nobody's own."""
    own = list[int]()

    class Looks(Learner):
        def on_train_end(self) -> None:
            engine = self.trainer.strategy._run.engine  # type: ignore[attr-defined]
            memories = [each.block.memory for each in engine._layers if isinstance(each.block.memory, TrialMemory)]
            own.append(sum(end - begin for memory in memories for begin, end in memory.own(memory.common.nbytes)))

    assert_each_is_itself(2, lambda rate: learn(rate, make=Looks))
    net = Learner(RATES[0])
    frozen = sum(p.nbytes for p in net.parameters() if not p.requires_grad)
    assert own[:2] == [0, 0]  # alone there is none
    assert all(0 < each < frozen / 1.5 for each in own[2:])


@pytest.mark.long("takes a second or more")
def test_no_more_than_max_trials_run_at_once() -> None:
    under_way = list[int]()
    base = SharedBase(max_trials=2)

    def run(rate: float) -> Outcome:
        outcome = learn(rate)
        under_way.append(len(base._under_way))
        return outcome

    base.map(run, RATES)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(base.wrap(run), RATES[:4]))
    SharedBase(max_trials=1).map(run, RATES[:3])
    assert max(under_way) == 2


class Restores(Learner):
    """One trial writes a frozen weight and puts back what it was, by other memory."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        weight = self.net[2].base.weight  # type: ignore[index, union-attr]
        if batch_idx == 1 and self.rate == RATES[0]:
            self.backup = weight.detach().clone()
            with torch.no_grad():
                weight.mul_(1.5)
        if batch_idx == 2 and self.rate == RATES[0]:
            weight.data = self.backup


@pytest.mark.rest("takes tenths of a second")
def test_a_frozen_weight_that_is_put_back_is_what_it_was() -> None:
    assert_each_is_itself(2, lambda rate: learn(rate, make=Restores))


class Ranked(Learner):
    """The adapters are larger from trial to trial, and the last trial's are larger than the base."""

    def __init__(self, rate: float) -> None:
        super().__init__(rate)
        for block in self.net:  # type: ignore[union-attr]
            wider = Adapted(rank=(1, 3, 90)[RATES.index(rate)])
            block.down, block.up = wider.down, wider.up


@pytest.mark.long("takes a second or more")
def test_adapters_of_any_rank_share_the_base() -> None:
    base = assert_each_is_itself(3, lambda rate: learn(rate, make=Ranked))
    frozen = sum(p.nbytes for p in Learner(RATES[0]).parameters() if not p.requires_grad)
    assert base.fetched_bytes < 2 * 4 * 2 * frozen, "three trials have fetched the base less than twice"


@pytest.mark.long("takes a second or more")
def test_two_bases_at_once() -> None:
    alone = [learn(rate) for rate in RATES[:4]]
    with ThreadPoolExecutor(2) as pool:
        halves = [pool.submit(SharedBase().map, learn, rates) for rates in (RATES[:2], RATES[2:4])]
        for ours, its in zip([each for half in halves for each in half.result()], alone, strict=True):
            assert_same(ours, its)


@pytest.mark.long("takes a second or more")
def test_checkpoints_in_one_folder_are_each_trials_own(tmp_path: Path) -> None:
    def run(rate: float) -> tuple[str, dict[str, Any]]:
        outcome = learn(rate, enable_checkpointing=True, default_root_dir=tmp_path, max_epochs=2)
        assert outcome.trainer.checkpoint_callback is not None
        return outcome.trainer.checkpoint_callback.best_model_path, outcome.state  # type: ignore[attr-defined]

    found = SharedBase().map(run, RATES[:3])
    assert len({path for path, _ in found}) == 3
    for path, state in found:
        assert_equal(torch.load(path)["state_dict"], state, path)


@pytest.mark.long("takes a second or more")
def test_trials_that_begin_and_end_while_others_step() -> None:
    depths = dict(zip(RATES, (2, 7, 3), strict=False))
    options: dict[str, Any] = {"k": 2, "max_epochs": 3, "precision": "bf16-mixed"}
    assert_each_is_itself(3, lambda rate: learn(rate, make=lambda _: Learner(rate, depth=depths[rate]), **options))


class Wide(Learner):
    """A layer is far larger than all of the others' layers."""

    def __init__(self, rate: float) -> None:
        super().__init__(rate)
        torch.manual_seed(2)
        self.net.append(nn.Sequential(nn.Linear(WIDTH, 900), nn.Linear(900, WIDTH)).requires_grad_(False))  # type: ignore[operator]


@pytest.mark.long("takes a second or more")
def test_larger_layers_come_later() -> None:
    base, begun = SharedBase(layers=1), threading.Event()

    class Begins(Learner):
        def on_train_batch_end(self, *_: Any) -> None:
            begun.set()

    def run(rate: float) -> Outcome:
        if rate == RATES[2]:
            begun.wait(20)
        return base.wrap(learn)(rate, make=Wide if rate == RATES[2] else Begins, max_epochs=6)

    with ThreadPoolExecutor(3) as pool:
        ours = list(pool.map(run, RATES[:3]))
    for rate, outcome in zip(RATES, ours, strict=False):
        assert_same(outcome, learn(rate, make=Wide if rate == RATES[2] else Learner, max_epochs=6))


@pytest.mark.long("takes a second or more")
def test_a_trial_has_several_runs_and_may_unfreeze_all_between_them() -> None:
    def run(rate: float) -> Any:
        torch.manual_seed(int(1e5 * rate))
        module, other = Learner(rate), Learner(rate)
        strategy = {"k": 1}
        trainer_for(SuperpipelineStrategy(**strategy)).fit(module, loader(batches(rate)))
        trainer_for(SuperpipelineStrategy(**strategy)).fit(other, loader(batches(rate)))
        module.requires_grad_(True)
        trainer_for(SuperpipelineStrategy(**strategy)).fit(module, loader(batches(rate)))
        found = trainer_for(SuperpipelineStrategy(**strategy)).predict(module, loader(batches(rate)))
        return [found, dict(module.state_dict()), dict(other.state_dict())]

    alone = [run(rate) for rate in RATES[:3]]
    base = SharedBase()
    assert_equal(base.map(run, RATES[:3]), alone, "several runs")
    assert_equal(base.map(run, RATES[:3]), alone, "and anew")


class StepsInAThread(Learner):
    def __init__(self, rate: float) -> None:
        super().__init__(rate)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        loss = super().training_step(batch, batch_idx)
        self.manual_backward(loss)
        thread = threading.Thread(target=optimizer.step)
        thread.start()
        thread.join()
        return loss


@pytest.mark.long("takes a second or more")
def test_a_thread_of_a_trials_own() -> None:
    assert_each_is_itself(3, lambda rate: learn(rate, make=StepsInAThread))


@pytest.mark.long("takes a second or more")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("error", [ZeroDivisionError, SystemExit, KeyboardInterrupt])
def test_nothing_is_left_of_trials(error: type[BaseException]) -> None:
    class Ends(Learner):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            if batch_idx == 2 and self.rate == RATES[1]:
                raise error
            return super().training_step(batch, batch_idx)

    def left() -> tuple[int, int, int]:
        gc.collect()
        maps = sum("superpipeline-base" in line for line in Path("/proc/self/maps").read_text().splitlines())
        return maps, len(torch_optimizer._global_optimizer_pre_hooks), threading.active_count()

    before = left()
    found = SharedBase().map(lambda rate: learn(rate, make=Ends), RATES[:3], return_exceptions=True)
    assert [isinstance(each, Outcome) for each in found] == [True, False, True]
    del found
    assert all(now <= then for now, then in zip(left(), before, strict=True))  # of other tests more may be gone


@pytest.mark.rest("takes tenths of a second")
def test_an_interrupt_ends_all_trials() -> None:
    """Ctrl-C reaches the main thread, which waits for them."""
    begun = list[float]()

    class Interrupts(Learner):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            begun.append(self.rate)
            if len(begun) == 7:
                interrupt()
                time.sleep(0.3)

    with interruptible() as interrupt, pytest.raises(KeyboardInterrupt):
        SharedBase(max_trials=3).map(lambda rate: learn(rate, make=Interrupts, max_epochs=100), RATES)
    assert len(begun) < 30
    assert set(begun) <= set(RATES[:3]), "no further one begins"


@pytest.mark.long("takes a second or more")
def test_an_interrupt_ends_trials_that_have_not_begun() -> None:
    """Ctrl-C comes while the first one makes its model."""
    begun = list[float]()

    def run(rate: float) -> Outcome:
        begun.append(rate)
        trial = current()
        assert trial is not None
        if len(begun) == 1:
            while len(TURNS._waiting) < 3:
                time.sleep(0.01)
            interrupt()
            while trial.turn.error is None:
                time.sleep(0.01)
        return learn(rate)

    with interruptible() as interrupt, pytest.raises(KeyboardInterrupt):
        SharedBase().map(run, RATES[:4])
    assert len(begun) == 1
    assert TURNS._running is None


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.parametrize("part", [Trial, SharedLayers], ids=["the trial", "the device's memory"])
def test_what_fails_at_the_end_of_a_trial_ends_its_turn(part: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(_: Any) -> None:
        raise OSError("the device is gone")

    monkeypatch.setattr(part, "close" if part is Trial else "free", fails)
    found = SharedBase().map(learn, RATES[:3], return_exceptions=True)
    assert [str(each) for each in found if not isinstance(each, Outcome)] == ["the device is gone"] * (
        3 if part is Trial else 1
    )
    assert not TURNS._waiting
    assert TURNS._running is None


def test_shares_of_the_devices_memory_are_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever trials before it have taken by then. One alone has what a run has that is no trial."""
    free, shares = iter((1000, 600, 400)), list[int | None]()
    monkeypatch.setattr(shared_base, "device_for", lambda _: SimpleNamespace(free_bytes=lambda: next(free)))

    def run(others: int) -> None:
        while len(TURNS._waiting) < others:
            time.sleep(0.01)
        trial = current()
        assert trial is not None
        shares.append(trial._share(torch.device("cuda")))
        trial.step_begins()

    base = SharedBase(max_trials=3)
    base.map(run, [2, 0, 0])
    assert shares == [250, 250, 250]
    base.map(run, [0])
    assert shares[3:] == [None]
    base.map(run, [1, 0])
    assert shares[4:] == [400 // 3, 400 // 3], "what is free when none is under way any more"
