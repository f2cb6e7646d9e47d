"""Steps on the GPU: checkpoints, memory and errors. What user code finds is in ``tests/equality``, waits in ``tests/device``."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import seed_everything
from torch import Tensor
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer

from sp_lightning.capabilities.gpu_steps.on_device import StepsOnDevice
from sp_lightning.capabilities.gpu_steps.step_slots import StepSlots
from sp_lightning.core.device.device import Stream, Wait
from tests.support.models import vectors
from tests.support.nets import Does, Stepped, on_device
from tests.support.on_disk import FAULTS, assert_whole, break_calls, on_disk, without_room
from tests.support.runs import Outcome, assert_equal, assert_same, fit, loader, superpipeline, trainer_for
from tests.support.simdevice import SimDevice, simulated
from tests.support.tiers import first

# ---------------------------------------------------------------------- checkpoints


def of_bitsandbytes(name: str, **settings: Any) -> Stepped:
    optim: Any = pytest.importorskip("bitsandbytes.optim")
    return Stepped(lambda parameters: getattr(optim, name)(parameters, lr=1e-2, **settings))


STRATEGIES: dict[str, Callable[[Path], Any]] = {
    "plain": lambda folder: "auto",
    "cpu": lambda folder: superpipeline(k=1),
    "gpu": lambda folder: on_device(),
    "disk": on_disk,
    "gpu, disk": partial(on_disk, optimizer_on="gpu"),
}


@pytest.mark.parametrize(
    ("before", "after", "name"),
    first(
        [
            ("plain", "gpu", "AdamW"), ("gpu", "plain", "AdamW"), ("cpu", "gpu", "AdamW"), ("gpu", "cpu", "AdamW"),
            ("gpu", "gpu", "AdamW"), ("gpu, disk", "plain", "AdamW"), ("gpu, disk", "gpu", "AdamW"),
            ("gpu, disk", "gpu, disk", "AdamW"), ("gpu, disk", "disk", "AdamW"), ("plain", "gpu", "AdamW8bit"),
            ("gpu", "plain", "AdamW8bit"), ("gpu", "gpu", "AdamW8bit"),
        ],
        ("plain", "gpu", "AdamW"), ("gpu", "plain", "AdamW"), why="the others read the same files",
    ),
)  # fmt: skip
def test_a_checkpoint_goes_on_elsewhere(
    before: str, after: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """bitsandbytes' state has tables of numbers that all parameters share."""
    without_room(monkeypatch)
    make = Stepped if name == "AdamW" else partial(of_bitsandbytes, name, min_8bit_size=16)

    def run(where: str, epochs: int, ckpt_path: Path | None = None) -> Outcome:
        strategy = STRATEGIES[where](tmp_path)
        return fit(make, vectors(), strategy, ckpt_path=ckpt_path, recorded="nothing", max_epochs=epochs)

    for where in ("plain", before):
        run(where, 1).trainer.save_checkpoint(tmp_path / f"{where}.ckpt")
    saved, plains = (torch.load(tmp_path / f"{where}.ckpt", weights_only=False) for where in (before, "plain"))
    assert_equal(saved["optimizer_states"], plains["optimizer_states"], "optimizer_states")
    went_on = run(after, 2, ckpt_path=tmp_path / f"{before}.ckpt")
    assert_same(went_on, run("plain", 2, ckpt_path=tmp_path / "plain.ckpt"))
    tables = [entry.get("qmap1") for entry in went_on.trainer.optimizers[0].state.values()]
    assert name == "AdamW" or all(torch.equal(table, tables[0]) for table in tables)


@pytest.fixture
def stay(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The tensors of state that do not come to the device for their step."""
    found: list[Tensor] = []
    exchange = StepsOnDevice._exchange

    def noting(self: StepsOnDevice, *args: Any) -> Any:
        pairs = exchange(self, *args)
        found.extend(each for each, _ in pairs)
        return pairs

    monkeypatch.setattr(StepsOnDevice, "_exchange", noting)
    return found


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.parametrize("fused", [False, True])
def test_state_that_was_loaded_goes_where_torch_puts_it(fused: bool, stay: list[Tensor], tmp_path: Path) -> None:
    def make() -> Stepped:
        return Stepped(lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, fused=fused))

    outcome = fit(make, vectors(), on_device(), recorded="nothing")
    assert stay == []
    outcome.trainer.save_checkpoint(tmp_path / "last.ckpt")
    fit(make, vectors(), on_device(), recorded="nothing", max_epochs=2, ckpt_path=tmp_path / "last.ckpt")
    # A step that is not fused counts on the host, but for counts that it has made itself.
    assert bool(stay) is not fused
    assert all(each.ndim == 0 for each in stay)


class Halves(torch.optim.Optimizer):
    """A class that only its user knows, and that writes gradients."""

    steps_each_parameter_alone = True

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: Any) -> Any:  # type: ignore[override]
        loss = torch.enable_grad()(closure)()
        for p in [p for group in self.param_groups for p in group["params"]]:
            p.sub_(p.grad.mul_(0.5))
        return loss


NESTEROV = partial(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True, foreach=True)


@pytest.mark.parametrize(
    ("make", "stay", "read"),
    first(
        [(make, stay, read) for make in (NESTEROV, Halves) for stay in (0, 0.5) for read in (False, True)],
        (NESTEROV, 0, False), (Halves, 0, False), why="the same with layers that stay, and with a hook that looks",
    ),
)  # fmt: skip
def test_gradients_that_a_step_writes_are_plains(make: Callable[[Any], Optimizer], stay: float, read: bool) -> None:
    """In mixed precision they had no memory for a step's results, or stayed as they came, in 16 bits."""

    def trained(strategy: Any) -> tuple[Outcome, list[Any]]:
        seen: list[Any] = []
        note = Does(
            on_train_batch_end=lambda _, module, *__: seen.append([p.grad.clone() for p in module.parameters()])
        )
        options: dict[str, Any] = {"callbacks": [note] * read, "recorded": "nothing", "precision": "bf16-mixed"}
        ended = fit(partial(Stepped, make), vectors(3), strategy, **options)
        return ended, seen or [p.grad for p in ended.module.parameters()]

    with simulated():
        ours, seen = trained(on_device(gpu_layers=stay))
    plain, expected = trained("auto")
    assert_same(ours, plain)
    assert_equal(seen, expected, "gradients")


# ---------------------------------------------------------------------- errors


class Raises(torch.optim.AdamW):
    """Raises an error in the third step of a parameter, after it has written everything."""

    steps_each_parameter_alone = True

    def step(self, closure: Any) -> Any:  # type: ignore[override]
        with torch.enable_grad():
            closure()
        with torch.no_grad():
            for p in [p for group in self.param_groups for p in group["params"]]:
                state = self.state[p]
                state["step"] = state.get("step", torch.zeros(())).add_(1)
                state["moments"] = [0.9 * each for each in state.get("moments", [])] or [torch.zeros_like(p)]
                state["moments"][0] += p.grad
                p.data = p.data - state["moments"][0]
                if state["step"] == 3:
                    raise ZeroDivisionError("in the middle")


@pytest.mark.rest("takes tenths of a second")
def test_an_error_in_the_middle_leaves_each_layer_whole() -> None:
    def whole(trainer: Any) -> Any:
        named = {name: p.detach() for name, p in trainer.lightning_module.named_parameters()}
        return deepcopy((named, trainer.optimizers[0].state_dict()["state"]))

    before: list[Any] = []

    def note(trainer: Any, *_: Any) -> None:
        optimizer = trainer.optimizers[0]
        optimizer.load_state_dict(deepcopy(optimizer.state_dict()))  # now "step" is the host's, as torch loads it
        before[:] = [whole(trainer)]

    class Catches(Stepped):
        def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
            try:
                super().optimizer_step(*args, **kwargs)
            except ZeroDivisionError:
                made[0].access([p.data for p in self.parameters()], None, write=True)  # nothing reads weights any more
                raise

    trainer = trainer_for(on_device(), callbacks=[Does(on_train_batch_start=note)])
    with pytest.raises(ZeroDivisionError, match="in the middle"), simulated() as made:
        trainer.fit(Catches(Raises), loader(vectors()))
    assert_equal(whole(trainer), before[0], "weights and state")


@pytest.mark.long("takes a second or more")
@pytest.mark.parametrize("overlap", first(["off", "forward", "backward"], "forward", why="its other modes"))
def test_an_error_between_layers_leaves_each_old_or_new(overlap: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fourth layer of the third step has been stepped on the device when it fails."""
    step, calls = StepsOnDevice.step, count(1)

    def failing(self: StepsOnDevice, key: Any, part_of: Any, own: Callable[[], Any], *, declared: bool) -> None:
        def then() -> None:
            own()
            if next(calls) == 2 * 7 + 4:
                raise ZeroDivisionError("in the middle")

        step(self, key, part_of, then, declared=declared)

    def by_layer(trainer: Any) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, p in trainer.lightning_module.named_parameters():
            layer = ".".join(name.split(".")[: 3 if "blocks" in name else 2])
            found.setdefault(layer, []).append(deepcopy((p.detach(), trainer.optimizers[0].state[p])))
        return found

    monkeypatch.setattr(StepsOnDevice, "step", failing)
    trainer = trainer_for(on_device(optimizer_overlap=overlap))
    seed_everything(7, verbose=False)
    module = Stepped()
    with pytest.raises(ZeroDivisionError, match="in the middle"), simulated():
        trainer.fit(module, loader(vectors()))
    old, new = (by_layer(fit(Stepped, vectors(), recorded="losses", limit_train_batches=n).trainer) for n in (2, 3))
    whole = [
        next(at for at, each in enumerate((old, new)) if is_equal(found, each[layer]))
        for layer, found in by_layer(trainer).items()
    ]
    assert sorted(whole) == [0, 0, 0, 0, 1, 1, 1], "none is half of each"


def is_equal(ours: Any, plain: Any) -> bool:
    try:
        assert_equal(ours, plain, "")
    except AssertionError:
        return False
    return True


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.parametrize("fault", ["write error", "read error"])
def test_a_disk_that_fails_ends_the_step_with_one_error(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_room(monkeypatch)
    module, trainer = (
        Stepped(),
        trainer_for(on_disk(tmp_path, optimizer_on="gpu", optimizer_overlap="forward"), max_epochs=2),
    )
    with monkeypatch.context() as patch:
        break_calls(patch, fault, 12)
        with pytest.raises(OSError, match=f"Optimizer state on the disk {FAULTS[fault][2]}"):
            trainer.fit(module, loader(vectors()))
        with pytest.raises(RuntimeError, match="not those of any whole step"):
            trainer.save_checkpoint(tmp_path / "after.ckpt")
    assert_whole(module, tmp_path)


def test_bitsandbytes_settings_of_single_parameters_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    optim: Any = pytest.importorskip("bitsandbytes.optim")
    module = of_bitsandbytes("AdamW8bit")
    manager = optim.GlobalOptimManager.get_instance()
    monkeypatch.setattr(manager, "pid2config", {})
    manager.override_config(next(module.parameters()), "optim_bits", 32)
    with pytest.raises(ValueError, match="GlobalOptimManager has settings for single parameters"):
        trainer_for(on_device()).fit(module, loader(vectors()))


# ---------------------------------------------------------------------- memory


def test_the_slots_take_what_is_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    close = StepsOnDevice.close

    def noting(self: StepsOnDevice) -> None:
        taken.append(self.nbytes)
        close(self)

    monkeypatch.setattr(StepsOnDevice, "close", noting)
    strategy = on_device()
    fit(Stepped, vectors(), strategy, recorded="nothing")
    plan = strategy.plan
    largest = max(layer.gradient_bytes for layer in plan.trained)
    assert plan.update_bytes == 9 * largest  # two slots, and the root of Adam's step
    # Beside each parameter's state its count of steps lies in a slot where the device is the CPU.
    steps = 2 * 512 * max(len(layer.spans) for layer in plan.trained)
    assert 8 * largest <= max(taken) <= 8 * largest + steps
    without = superpipeline(k=1)
    fit(Stepped, vectors(), without, recorded="nothing")
    assert plan.peak_device_bytes - without.plan.peak_device_bytes == plan.update_bytes


@pytest.mark.long("takes a second or more")
def test_what_a_step_has_made_is_there_until_it_has_left(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[bool] = []
    wait = StepSlots._wait

    def noting(self: StepsOnDevice, *slots: Any) -> None:
        taken.extend(bool(slot.results) for slot in slots if slot.downloaded is not None)
        wait(self, *slots)

    monkeypatch.setattr(StepSlots, "_wait", noting)
    with simulated():
        fit(Stepped, vectors(), on_device(), recorded="nothing")
    assert taken
    assert all(taken)


class Uploads(SimDevice):
    """Notes for each copy to the device whether it waits for all kernels that were issued before."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.behind: list[bool] = []

    def copy(self, targets: Any, sources: Any, stream: Stream, *, why: Wait | None = None) -> None:
        kernels = self.clocks[Stream.COMPUTE].get(Stream.COMPUTE, 0)
        self.behind.append(self.clocks[Stream.UPLOAD].get(Stream.COMPUTE, 0) == kernels)
        super().copy(targets, sources, stream, why=why)


@pytest.mark.parametrize("sizes", [[100] * 9, [100, 100, 3000, 100, 100, 100, 100, 100], [0, 5000], []], ids=str)
def test_gradients_come_while_norms_of_others_are_computed(sizes: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each came after the norm of the one before, in a copy of its own."""
    monkeypatch.setattr("sp_lightning.capabilities.gpu_steps.on_device._HALF", 2048)
    device, generator = Uploads(), torch.Generator().manual_seed(1)
    gradients = [torch.randn(size, generator=generator) for size in sizes]
    found = StepsOnDevice(device, pin=False, slots=2).norms(gradients)
    assert_equal(found, [get_total_norm([each]) for each in gradients], "norms")
    assert len(device.behind) <= len(sizes)
    if sizes == [100] * 9:
        assert device.behind == [True, False, False], "four of them have room in a half"
    if 3000 in sizes:
        assert device.behind == [True, True, True, False], "a large one has all of the memory"
