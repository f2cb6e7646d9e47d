"""Steps on the device: every optimizer in every form, resumed both ways, and what is refused.

The models are in ``tests/equality``, what stays on the device in ``test_staying_on_device.py``, what is waited for in
``tests/device/test_waits.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import seed_everything
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from torch import Tensor, nn
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer

from sp_lightning import SuperpipelineStrategy
from sp_lightning.capabilities.gpu_steps.on_device import StepsOnDevice
from sp_lightning.capabilities.gpu_steps.step_slots import StepSlots
from sp_lightning.core.device.device import Stream, Wait
from tests.support.models import vectors
from tests.support.nets import Does
from tests.support.on_device import Stepped, alternating, on_device
from tests.support.runs import Outcome, assert_equal, assert_same, fit, loader, superpipeline, trainer_for
from tests.support.simdevice import SimDevice, simulated
from tests.support.tiers import first

Make = Callable[[Any], Optimizer]
FORMS: dict[str, dict[str, Any]] = {
    "as it comes": {},
    "foreach": {"foreach": True},
    "one by one": {"foreach": False},
    "fused": {"fused": True},
    "a tensor as learning rate": {"lr": torch.tensor(1e-2)},
}
KINDS = (
    "ASGD",
    "Adadelta",
    "Adafactor",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "NAdam",
    "RAdam",
    "RMSprop",
    "Rprop",
    "SGD",
)


def optimizers() -> dict[str, Make]:
    """torch's optimizers, in each form that the class has."""
    found: dict[str, Make] = {}
    for kind in KINDS:
        for form, options in FORMS.items():
            options = {**options, "momentum": 0.9} if kind == "SGD" else options

            def make(parameters: Any, kind: str = kind, options: dict[str, Any] = options) -> Optimizer:
                return getattr(torch.optim, kind)(parameters, **{"lr": 1e-2, **options})  # type: ignore[no-any-return]

            try:
                make([nn.Parameter(torch.ones(1))])
            except (TypeError, RuntimeError, ValueError):
                continue
            found[f"{kind}, {form}"] = make
    found["AdamW, amsgrad"] = lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, amsgrad=True)
    return found


OPTIMIZERS = optimizers()
SHOWN = [name for name in OPTIMIZERS if name.endswith("as it comes") or name.startswith(("AdamW", "SGD"))]


@pytest.mark.long("takes a second or more")
@pytest.mark.parametrize(
    "name",
    first(
        list(OPTIMIZERS), "Adafactor, as it comes", "AdamW, foreach", second=SHOWN,
        why="the second tier has each optimizer, and each form of two",
    ),
)  # fmt: skip
def test_a_step_by_layers_has_the_bits_of_the_whole(name: str) -> None:
    def run(strategy: Any) -> Outcome:
        return fit(lambda: Stepped(OPTIMIZERS[name]), vectors(), strategy, gradient_clip_val=0.05, recorded="losses")

    plain = run("auto")
    assert_same(run(on_device(optimizer_overlap="off")), plain)
    with simulated():
        assert_same(run(on_device(optimizer_overlap="forward")), plain)


def test_muon_is_plains() -> None:
    def run(strategy: Any) -> Outcome:
        def make() -> Stepped:
            module = Stepped()
            hidden = [p for p in module.parameters() if p.ndim == 2]
            module.make = lambda _: torch.optim.Muon(hidden, lr=1e-2)
            return module

        return fit(make, vectors(), strategy, recorded="losses")

    assert_same(run(on_device()), run("auto"))


class Lowers(Stepped):
    """A scheduler writes its learning rate, which is a tensor, while updates may still be under way."""

    def __init__(self) -> None:
        super().__init__(lambda parameters: torch.optim.AdamW(parameters, lr=torch.tensor(1e-2), foreach=False))

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class HooksSteps(Stepped):
    """Hooks around a step read all state."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        optimizer.register_step_pre_hook(self.look)
        optimizer.register_step_post_hook(self.look)
        return optimizer

    def look(self, optimizer: Optimizer, *_: Any) -> None:
        self.seen.append([deepcopy(dict(values)) for values in optimizer.state.values()])


@pytest.mark.long("takes a second or more")
@pytest.mark.parametrize("make", [Lowers, HooksSteps])
@pytest.mark.parametrize("overlap", ["off", "forward"])
def test_what_user_code_does_around_a_step_is_plains(make: Callable[[], Stepped], overlap: str) -> None:
    def run(strategy: Any) -> Outcome:
        outcome = fit(make, vectors(), strategy, recorded="losses")
        outcome.extra["seen"] = getattr(outcome.module, "seen", [])
        return outcome

    plain = run("auto")
    with simulated():
        ours = run(on_device(optimizer_overlap=overlap))
    assert_same(ours, plain)
    assert_equal(ours.extra, plain.extra, "what hooks have seen")


# ---------------------------------------------------------------------- state is on the host, and in plain's files


class Looks(Callback):
    """Notes the state after each step, and where it is."""

    def __init__(self) -> None:
        self.seen: list[dict[str, Tensor]] = []
        self.objects: list[dict[str, int]] = []

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        state = trainer.optimizers[0].state
        named = {f"{i}.{key}": value for i, each in enumerate(state.values()) for key, value in each.items()}
        self.seen.append({name: value.clone() for name, value in named.items()})
        self.objects.append({name: id(value) for name, value in named.items()})


@pytest.mark.long("takes a second or more")
def test_users_find_plains_state_on_the_host() -> None:
    looks, plains = Looks(), Looks()
    fit(Stepped, vectors(), "auto", callbacks=[plains], recorded="losses")
    with simulated():
        fit(Stepped, vectors(), on_device(), callbacks=[looks], recorded="losses")
    assert_equal(looks.seen, plains.seen, "state")
    assert all(each == looks.objects[0] for each in looks.objects), "each step leaves the same tensors"


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.parametrize(
    ("before", "after"),
    first(
        [("plain", "gpu"), ("gpu", "plain"), ("cpu", "gpu"), ("gpu", "cpu"), ("gpu", "gpu")],
        ("plain", "gpu"), ("gpu", "plain"), why="the others read the same files",
    ),
)  # fmt: skip
def test_a_checkpoint_goes_on_elsewhere(before: str, after: str, tmp_path: Path) -> None:
    def strategy(where: str) -> Any:
        return "auto" if where == "plain" else superpipeline(k=1, optimizer_on=where)

    def run(where: str, epochs: int, ckpt_path: Path | None = None) -> Outcome:
        return fit(Stepped, vectors(), strategy(where), ckpt_path=ckpt_path, recorded="nothing", max_epochs=epochs)

    for where in ("plain", before):
        run(where, 1).trainer.save_checkpoint(tmp_path / f"{where}.ckpt")
    saved, plains = (torch.load(tmp_path / f"{where}.ckpt", weights_only=False) for where in (before, "plain"))
    assert_equal(saved["optimizer_states"], plains["optimizer_states"], "optimizer_states")
    went_on = run(after, 2, ckpt_path=tmp_path / f"{before}.ckpt")
    plain = run("plain", 2, ckpt_path=tmp_path / "plain.ckpt")
    assert_equal(went_on.state, plain.state, "state")
    assert_equal(went_on.optimizers, plain.optimizers, "optimizers")


class Replaces(Callback):
    """Gives a weight other state between two steps."""

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        optimizer = trainer.optimizers[0]
        if batch_idx == 2:
            state = next(iter(optimizer.state.values()))
            state["exp_avg"] = state["exp_avg"] * 2
        if batch_idx == 3:
            optimizer.load_state_dict(optimizer.state_dict())
            next(iter(optimizer.state.values()))["exp_avg_sq"].mul_(2)


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


@pytest.mark.long("takes a second or more")
def test_state_that_users_exchange_is_stepped(stay: list[Tensor]) -> None:
    plain = fit(Stepped, vectors(), "auto", callbacks=[Replaces()], recorded="losses")
    with simulated():
        ours = fit(Stepped, vectors(), on_device(), callbacks=[Replaces()], recorded="losses")
    assert_same(ours, plain)
    assert all(each.ndim == 0 for each in stay), "on the GPU"


@pytest.mark.parametrize("steps", [2, 5])
def test_what_has_no_gradient_keeps_its_state(steps: int) -> None:
    """Once the state of the part that steps is of the same shapes, which does not make it the same."""
    ours = fit(alternating, vectors(5), on_device(), limit_train_batches=steps)
    assert_same(ours, fit(alternating, vectors(5), limit_train_batches=steps))


@pytest.mark.long("takes a second or more")
@pytest.mark.parametrize("precision", first(["32-true", "bf16-mixed"], "bf16-mixed", why="there, gradients are narrow"))
@pytest.mark.parametrize("stay", first([0, 0.5], 0, why="the others are plain"))
@pytest.mark.parametrize("read", [False, True])
def test_gradients_that_a_step_writes_are_plains(precision: Any, stay: float, read: bool) -> None:
    """torch's ``foreach`` step with Nesterov momentum writes them. In mixed precision they had no memory for its results."""

    def trained(strategy: Any) -> tuple[Outcome, list[Any]]:
        seen: list[Any] = []
        note = Does(
            on_train_batch_end=lambda _, module, *__: seen.append([p.grad.clone() for p in module.parameters()])
        )
        make = partial(Stepped, partial(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True, foreach=True))
        ended = fit(make, vectors(3), strategy, callbacks=[note] * read, recorded="nothing", precision=precision)
        return ended, seen or [p.grad for p in ended.module.parameters()]

    with simulated():
        ours, seen = trained(on_device(gpu_layers=stay))
    plain, expected = trained("auto")
    assert_same(ours, plain)
    assert_equal(seen, expected, "gradients")


def test_a_step_shows_in_the_versions_of_weights() -> None:
    seen: list[list[int]] = []

    class Versions(Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            seen.append([p._version for p in pl_module.parameters()])

    fit(Stepped, vectors(), on_device(), callbacks=[Versions()], recorded="nothing")
    assert all(now > before for one, other in pairwise(seen) for before, now in zip(one, other, strict=True))


# ---------------------------------------------------------------------- optimizers of users


class Own(Optimizer):
    """Keeps lists and numbers, writes its gradient, gives a parameter new memory, and raises an error if it is told to."""

    steps_each_parameter_alone = True
    raises_at = -1

    def __init__(self, parameters: Any, lr: float = 1e-2) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            for p in [p for p in group["params"] if p.grad is not None]:
                state = self.state[p]
                state["count"] = state.get("count", 0) + 1
                state["step"] = state.get("step", torch.zeros(())).add_(1)
                state["moments"] = [0.9 * each for each in state.get("moments", [])] or [
                    torch.zeros_like(p),
                    torch.ones_like(p),
                ]
                state["moments"][0] += p.grad
                p.data = p.data - group["lr"] * state["moments"][0] / state["moments"][1].sqrt()
                p.grad.mul_(0.5)
                if state["count"] == self.raises_at:
                    raise ZeroDivisionError("in the middle")
        return loss


@pytest.mark.long("takes a second or more")
def test_a_users_optimizer_that_says_so_is_plains() -> None:
    def run(strategy: Any) -> Outcome:
        return fit(lambda: Stepped(Own), vectors(), strategy, recorded="gradients", accumulate_grad_batches=2)

    plain = run("auto")
    with simulated():
        assert_same(run(on_device()), plain)


class Shares(Callback):
    """Gives two weights one moment."""

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            blocks = pl_module.net.blocks
            one, other = (trainer.optimizers[0].state[block.inner.weight] for block in blocks[:2])
            one["moments"][1] = other["moments"][1]


def test_state_that_two_weights_share_in_a_list_is_refused() -> None:
    with pytest.raises(RuntimeError, match="updates layers one by one, but two parameters share a state"):
        trainer_for(on_device(), callbacks=[Shares()]).fit(Stepped(Own), loader(vectors()))


class GivesOthers(Own):
    """Gives parameters another dtype."""

    def step(self, closure: Any = None) -> Any:
        for p in [p for group in self.param_groups for p in group["params"] if p.grad is not None]:
            p.data = p.data.double()
        return closure()


def test_a_step_that_gives_a_parameter_another_dtype_is_refused() -> None:
    with pytest.raises(
        RuntimeError, match=r"GivesOthers.step has given a parameter of 'net\S+' torch.float64 of shape"
    ):
        trainer_for(on_device()).fit(Stepped(GivesOthers), loader(vectors()))


@pytest.mark.long("takes a second or more")
def test_an_error_in_the_middle_leaves_each_layer_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    def whole(trainer: Any) -> Any:
        named = {name: p.detach() for name, p in trainer.lightning_module.named_parameters()}
        return deepcopy((named, trainer.optimizers[0].state_dict()["state"]))

    class Notes(Callback):
        def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
            optimizer = trainer.optimizers[0]
            optimizer.load_state_dict(deepcopy(optimizer.state_dict()))  # now "step" is the host's, as torch loads it
            self.before = whole(trainer)

    class Catches(Stepped):
        def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
            try:
                super().optimizer_step(*args, **kwargs)
            except ZeroDivisionError:
                made[0].access([p.data for p in self.parameters()], None, write=True)  # nothing reads weights any more
                raise

    monkeypatch.setattr(Own, "raises_at", 3)
    notes = Notes()
    trainer = trainer_for(on_device(), callbacks=[notes])
    with pytest.raises(ZeroDivisionError, match="in the middle"), simulated() as made:
        trainer.fit(Catches(Own), loader(vectors()))
    assert_equal(whole(trainer), notes.before, "weights and state")


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


# ---------------------------------------------------------------------- clipping


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


# ---------------------------------------------------------------------- what is refused


class Unknown(torch.optim.SGD):
    pass


class Manual(Stepped):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class OwnNorm(Precision):
    def clip_grad_by_norm(self, *args: Any) -> None:
        super().clip_grad_by_norm(*args)


@pytest.mark.parametrize(
    ("make", "plugin", "said"),
    [
        (lambda: Stepped(torch.optim.LBFGS), Precision, "LBFGS steps all parameters together"),
        (lambda: Stepped(lambda ps: Unknown(ps, lr=0.1)), Precision, r"Unknown.steps_each_parameter_alone = True"),
        (Manual, Precision, "optimization is manual"),
        (Stepped, OwnNorm, "OwnNorm.clip_grad_by_norm would compute norms on the CPU"),
        (
            lambda: Stepped(lambda ps: torch.optim.AdamW(ps, fused=True)),
            lambda: MixedPrecision("16-mixed", "cpu"),
            "the fused step of AdamW unscales gradients by itself",
        ),
    ],
    ids=["LBFGS", "unknown", "manual", "own norm", "unscales"],
)
def test_what_would_not_be_plains_is_refused(
    make: Callable[[], Stepped], plugin: Callable[[], Precision], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        trainer_for(on_device(), plugins=[plugin()]).fit(make(), loader(vectors()))


class Exchanges(Stepped):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            self.trainer.optimizers = [Unknown(self.parameters(), lr=0.1)]


def test_an_exchange_for_an_optimizer_that_the_gpu_cannot_step_is_refused() -> None:
    with pytest.raises(
        ValueError, match='optimizer_on="gpu" cannot be used: Unknown is not known to step each parameter'
    ):
        trainer_for(on_device()).fit(Exchanges(), loader(vectors()))


class LookedUp(Stepped):
    """An embedding with sparse gradients, and an optimizer that takes them."""

    def __init__(self) -> None:
        super().__init__(lambda parameters: torch.optim.SGD(parameters, lr=0.1))
        self.table = nn.Embedding(8, 16, sparse=True)

    def loss(self, batch: Any) -> Tensor:
        return super().loss(self.table(batch))


@pytest.mark.parametrize(("overlap", "clip"), [("off", 0.05), ("backward", None)])
def test_sparse_gradients_are_refused(overlap: Any, clip: float | None) -> None:
    trainer = trainer_for(on_device(optimizer_overlap=overlap), gradient_clip_val=clip)
    with pytest.raises(RuntimeError, match="updates layers one by one, but 'table' has sparse gradients"):
        trainer.fit(LookedUp(), loader([torch.arange(4)]))


def test_the_remedy_for_an_unknown_optimizer_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Unknown, "steps_each_parameter_alone", True, raising=False)

    def run(strategy: Any) -> Outcome:
        return fit(lambda: Stepped(lambda ps: Unknown(ps, lr=0.1)), vectors(), strategy, recorded="losses")

    assert_same(run(on_device()), run("auto"))


# ---------------------------------------------------------------------- bitsandbytes, by its kernels for the CPU


def of_bitsandbytes(name: str, **settings: Any) -> Stepped:
    optim: Any = pytest.importorskip("bitsandbytes.optim")
    return Stepped(lambda parameters: getattr(optim, name)(parameters, lr=1e-2, **settings))


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.parametrize(("name", "settings"), [("AdamW", {}), ("AdamW8bit", {"min_8bit_size": 16})], ids=["32", "8"])
@pytest.mark.parametrize("overlap", ["off", "backward"])
def test_bitsandbytes(name: str, settings: dict[str, Any], overlap: str) -> None:
    """Its state of 8 bits has tables of numbers that all parameters share."""

    def run(strategy: Any) -> Outcome:
        return fit(lambda: of_bitsandbytes(name, **settings), vectors(), strategy, recorded="losses")

    assert_same(run(on_device(optimizer_overlap=overlap)), run("auto"))


@pytest.mark.long("takes a second or more")
def test_tables_that_layers_share_are_no_race() -> None:
    def run(strategy: Any) -> Outcome:
        return fit(lambda: of_bitsandbytes("AdamW8bit", min_8bit_size=16), vectors(), strategy, recorded="losses")

    with simulated():
        ours = run(on_device(optimizer_overlap="backward"))
    assert_same(ours, run("auto"))


@pytest.mark.parametrize("overlap", ["forward", "backward"])
def test_an_overlap_on_the_cpu_names_steps_on_the_gpu_for_bitsandbytes(overlap: Any) -> None:
    with pytest.raises(
        ValueError, match=r'AdamW8bit is not one of .* Step on the GPU \(optimizer_on="gpu"\), or use Sup'
    ):
        fit(
            lambda: of_bitsandbytes("AdamW8bit", min_8bit_size=16),
            vectors(),
            SuperpipelineStrategy(k=1, optimizer_overlap=overlap),
        )


def test_bitsandbytes_has_an_ordinary_optimizer() -> None:
    def run(strategy: Any) -> Outcome:
        return fit(lambda: of_bitsandbytes("PytorchLARS", momentum=0.9), vectors(), strategy, recorded="losses")

    assert_same(run(on_device()), run("auto"))


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.parametrize("first", ["auto", "device"])
@pytest.mark.parametrize("second", ["auto", "device"])
def test_bitsandbytes_goes_on_from_either(first: str, second: str, tmp_path: Path) -> None:
    strategies: dict[str, Callable[[], Any]] = {"auto": lambda: "auto", "device": on_device}
    path = tmp_path / "last.ckpt"

    def make() -> Stepped:
        return of_bitsandbytes("AdamW8bit", min_8bit_size=16)

    fit(make, vectors(), strategies[first](), recorded="nothing").trainer.save_checkpoint(path)
    ours = fit(make, vectors(), strategies[second](), recorded="losses", max_epochs=3, ckpt_path=path)
    assert_same(ours, fit(make, vectors(), "auto", recorded="losses", max_epochs=3, ckpt_path=path))
    tables = [entry["qmap1"] for entry in ours.trainer.optimizers[0].state.values()]
    assert len(tables) > 2
    assert all(torch.equal(table, tables[0]) for table in tables)


def test_bitsandbytes_settings_of_single_parameters_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    optim: Any = pytest.importorskip("bitsandbytes.optim")
    module = of_bitsandbytes("AdamW8bit")
    manager = optim.GlobalOptimManager.get_instance()
    monkeypatch.setattr(manager, "pid2config", {})
    manager.override_config(next(module.parameters()), "optim_bits", 32)
    with pytest.raises(ValueError, match="GlobalOptimManager has settings for single parameters"):
        trainer_for(on_device()).fit(module, loader(vectors()))


def test_bitsandbytes_that_pages_is_refused() -> None:
    with pytest.raises(ValueError, match="PagedAdamW8bit pages its state by itself"):
        trainer_for(on_device()).fit(of_bitsandbytes("PagedAdamW8bit"), loader(vectors()))
