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
from sp_lightning.experimental.sharing.common import BaseWeights, OnDevice
from sp_lightning.experimental.sharing.shared_base import Trial, current
from sp_lightning.experimental.sharing.turns import TURNS
from tests.support.runs import Outcome, assert_equal, assert_same, fit, loader, trainer_for
from tests.support.tiers import first
from tests.support.trials import RATES, WIDTH, Adapted, Learner, batches, blocks, interruptible, learn, shared


def assert_each_is_itself(count: int, run: Callable[[float], Outcome] = learn, **options: Any) -> SharedBase:
    rates = RATES[:count]
    alone = [run(rate) for rate in rates]
    base = shared(**options)
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


class Unfreezes(Learner):
    """One trial unfreezes a layer, and one gives a layer a weight of its own."""

    def __init__(self, rate: float) -> None:
        super().__init__(rate)
        block = self.net[3].base  # type: ignore[index, union-attr]
        if rate == RATES[1]:
            block.weight = nn.Parameter(torch.full_like(block.weight, 0.01), requires_grad=False)

    def configure_optimizers(self) -> Any:
        if self.rate == RATES[2]:
            self.net[1].base.requires_grad_(True)  # type: ignore[index, union-attr]
        return super().configure_optimizers()


class Ranked(Learner):
    """The adapters are larger from trial to trial, and the last trial's are larger than the base."""

    def __init__(self, rate: float) -> None:
        super().__init__(rate)
        for block in self.net:  # type: ignore[union-attr]
            wider = Adapted(rank=(1, 3, 90)[RATES.index(rate)])
            block.down, block.up = wider.down, wider.up


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


CASES: dict[str, dict[str, Any]] = {
    "recompute": {"activations": "recompute"},
    "offload": {"activations": "offload"},
    "k2": {"k": 2},
    "device": {"optimizer_on": "gpu"},
    "bf16-mixed": {"precision": "bf16-mixed"},
    "bf16-true": {"precision": "bf16-true"},
    "accumulated": {"accumulate_grad_batches": 2},
    "clipped": {"gradient_clip_val": 0.01},
    "in the background": {"optimizer_overlap": "forward", "recorded": "losses"},
    "an autocast of its own": {"make": OwnAutocast},
    "inner autocasts": {"make": InnerAutocasts, "precision": "bf16-mixed"},
    "weights of its own": {"make": Unfreezes},
    "adapters of any rank": {"make": Ranked},
    "steps in a thread": {"make": StepsInAThread},
    "of any depth": {"make": lambda rate: Learner(rate, depth=(2, 7, 3)[RATES.index(rate)]), "max_epochs": 3, "k": 2},
}


@pytest.mark.long("takes a second or more")
@pytest.mark.parametrize(
    "name", first(list(CASES), "recompute", "bf16-true", "bf16-mixed", why="other paths of the same")
)
def test_cases(name: str) -> None:
    dtype = torch.bfloat16 if name == "bf16-true" else torch.float32
    base = assert_each_is_itself(3, lambda rate: learn(rate, **CASES[name]), dtype=dtype)
    if name == "adapters of any rank":
        frozen = sum(p.nbytes for p in Learner(RATES[0]).parameters() if not p.requires_grad)
        assert base.fetched_bytes < 2 * 4 * 2 * frozen, "three trials have fetched the base less than twice"


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
    base = shared()
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
    first, failed, third = shared().map(run, RATES[:3], return_exceptions=True)
    assert isinstance(failed, ZeroDivisionError)
    assert_same(first, alone[0])
    assert_same(third, alone[2])
    with pytest.raises(ZeroDivisionError) as raised:
        shared().map(run, RATES[:3])
    assert "the trial run(0.003)" in raised.value.__notes__[-1]


def test_one_trial_alone_brings_nothing_for_others() -> None:
    base = shared()
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

    shared().map(run, RATES[:2])
    assert sum(before != after for before, after in pairwise(seen)) > 2, "one after the other"


@pytest.mark.long("takes a second or more")
def test_there_is_a_turn_for_each_layer_that_comes_and_three_more_in_a_step() -> None:
    """At its beginning, and where forward and backward have nothing left to fetch. Each takes time, so there are no more."""
    before, steps, fetches = TURNS._given, 20, list[int]()

    def run(rate: float) -> None:
        strategy = SuperpipelineStrategy(k=2)
        trainer_for(strategy, max_epochs=1).fit(Learner(rate), loader(batches(rate, steps)))
        fetches.append(sum(strategy.fetches().values()))

    shared().map(run, RATES[:2])
    assert sum(fetches) < TURNS._given - before <= sum(fetches) + 2 * 3 * steps + 20


@pytest.mark.rest("takes tenths of a second")
def test_prediction() -> None:
    def run(rate: float) -> Any:
        torch.manual_seed(int(1e5 * rate))
        return trainer_for(SuperpipelineStrategy(k=1)).predict(Learner(rate), loader(batches(rate)))

    alone = [run(rate) for rate in RATES]
    base = shared()
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
        trial = current()
        self.net = (
            transformers.LlamaForCausalLM(config).eval().requires_grad_(False) if trial is None else trial.base.copy()
        )
        torch.manual_seed(2)

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
    base = SharedBase(Writer().net)
    assert_equal(base.map(run, range(3)), alone, "what was written")
    assert base.fetched_bytes < 1.4 * fetched[0]


@pytest.mark.parametrize("wrapped", [False, True], ids=["map", "wrap"])
def test_a_trial_begins_with_the_process_as_it_is_when_it_is_called(wrapped: bool) -> None:
    def run(_: int) -> Any:
        found = torch.get_default_dtype(), torch.is_grad_enabled(), torch.rand(4)
        torch.manual_seed(7)
        torch.set_default_dtype(torch.float32)
        return found

    base = shared()
    trial = base.wrap(run)
    torch.manual_seed(3)
    torch.set_default_dtype(torch.float64)
    before = torch.get_rng_state()
    try:
        with torch.no_grad():
            found = [trial(each) for each in range(3)] if wrapped else base.map(run, range(3))
        assert torch.equal(torch.get_rng_state(), before)
        assert_equal(found, 3 * [(torch.float64, False, torch.rand(4))], "what each trial finds")
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_base_is_once_in_memory(dtype: torch.dtype) -> None:
    """All trials' frozen weights are at the same addresses, in their runs and after them."""
    places = list[list[int]]()

    def note(module: nn.Module) -> None:
        places.append([p.data_ptr() for p in module.parameters() if not p.requires_grad])

    class Looks(Learner):
        def on_train_batch_end(self, *_: Any) -> None:
            note(self)

    def run(rate: float) -> None:
        note(learn(rate, make=Looks, precision="bf16-true" if dtype is torch.bfloat16 else "32-true").module)

    shared(dtype=dtype).map(run, RATES[:2])
    assert len(places) == 10
    assert places == 10 * [places[0]]


@pytest.mark.long("takes a second or more")
def test_no_more_than_max_trials_run_at_once() -> None:
    under_way = list[int]()
    base = shared(max_trials=2)

    def run(rate: float) -> Outcome:
        outcome = learn(rate)
        under_way.append(len(base.under_way))
        return outcome

    base.map(run, RATES)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(base.wrap(run), RATES[:4]))
    shared(max_trials=1).map(run, RATES[:3])
    assert max(under_way) == 2


@pytest.mark.long("takes a second or more")
def test_two_bases_at_once() -> None:
    alone = [learn(rate) for rate in RATES[:4]]
    bases = shared(), shared()  # making them draws random numbers
    with ThreadPoolExecutor(2) as pool:
        both = zip(bases, (RATES[:2], RATES[2:4]), strict=True)
        halves = [pool.submit(base.map, learn, rates) for base, rates in both]
        for ours, its in zip([each for half in halves for each in half.result()], alone, strict=True):
            assert_same(ours, its)


@pytest.mark.long("takes a second or more")
def test_checkpoints_in_one_folder_are_each_trials_own(tmp_path: Path) -> None:
    def run(rate: float) -> tuple[str, dict[str, Any]]:
        outcome = learn(rate, enable_checkpointing=True, default_root_dir=tmp_path, max_epochs=2)
        assert outcome.trainer.checkpoint_callback is not None
        return outcome.trainer.checkpoint_callback.best_model_path, outcome.state  # type: ignore[attr-defined]

    found = shared().map(run, RATES[:3])
    assert len({path for path, _ in found}) == 3
    for path, state in found:
        assert_equal(torch.load(path)["state_dict"], state, path)


@pytest.mark.long("takes a second or more")
def test_larger_layers_come_later() -> None:
    torch.manual_seed(2)
    wide = nn.Sequential(nn.Linear(WIDTH, 900), nn.Linear(900, WIDTH)).requires_grad_(False)
    with torch.random.fork_rng():
        base = SharedBase(nn.ModuleList([blocks(4), wide]), layers=1)
    begun = threading.Event()

    class OfBase(Learner):
        def __init__(self, rate: float) -> None:
            super().__init__(rate)
            if current() is None:
                self.take(base)

        def take(self, base: SharedBase) -> Any:
            copied = base.copy()
            for block, its in zip(self.net, copied[0], strict=True):  # type: ignore[call-overload]
                block.base = its.base
            if self.rate == RATES[2]:
                self.net.append(copied[1])  # type: ignore[operator]

        def on_train_batch_end(self, *_: Any) -> None:
            begun.set()

    def run(rate: float) -> Outcome:
        if rate == RATES[2]:
            begun.wait(20)
        return base.wrap(learn)(rate, make=OfBase, max_epochs=6)

    with ThreadPoolExecutor(3) as pool:
        ours = list(pool.map(run, RATES[:3]))
    for rate, outcome in zip(RATES, ours, strict=False):
        assert_same(outcome, learn(rate, make=OfBase, max_epochs=6))


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
    base = shared()
    assert_equal(base.map(run, RATES[:3]), alone, "several runs")
    assert_equal(base.map(run, RATES[:3]), alone, "and anew")


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
        bases = sum(isinstance(each, BaseWeights) for each in gc.get_objects())
        return bases, len(torch_optimizer._global_optimizer_pre_hooks), threading.active_count()

    before = left()
    found = shared().map(lambda rate: learn(rate, make=Ends), RATES[:3], return_exceptions=True)
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
        shared(max_trials=3).map(lambda rate: learn(rate, make=Interrupts, max_epochs=100), RATES)
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
        shared().map(run, RATES[:4])
    assert len(begun) == 1
    assert TURNS._running is None


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.parametrize("part", [Trial, OnDevice], ids=["the trial", "the device's memory"])
def test_what_fails_at_the_end_of_a_trial_ends_its_turn(part: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(_: Any) -> None:
        raise OSError("the device is gone")

    begun = list[float]()

    def run(rate: float) -> Outcome:
        begun.append(rate)
        # Otherwise the first trial may end before the others begin, and frees the memory, too.
        while len(begun) == 1 and len(TURNS._waiting) < 2:
            time.sleep(0.01)
        return learn(rate)

    monkeypatch.setattr(part, "close" if part is Trial else "free", fails)
    found = shared().map(run, RATES[:3], return_exceptions=True)
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
        shares.append(trial._part(torch.device("cuda")))
        trial.step_begins()

    base = shared(max_trials=3)
    base.map(run, [2, 0, 0])
    assert shares == [250, 250, 250]
    base.map(run, [0])
    assert shares[3:] == [None]
    base.map(run, [1, 0])
    assert shares[4:] == [400 // 3, 400 // 3], "what is free when none is under way any more"
