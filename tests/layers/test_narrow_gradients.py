"""Gradients that stay as they came: nobody who asks for ``param.grad`` sees a difference, and nobody pays who does not."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from sp_lightning.core.device.device import Device
from sp_lightning.core.engine.streamer import Streamer
from sp_lightning.core.layers import gradients
from sp_lightning.core.layers.narrow_gradient import (
    NarrowGradient,
    Norms,
    change,
    drop,
    keep_narrow,
    stored,
    unwidened,
    widen,
)
from sp_lightning.core.model.find import find_layers
from sp_lightning.core.plan.plan import make_plan
from sp_lightning.core.updates import scaler
from sp_lightning.core.updates.background import BackgroundUpdates
from tests.support.mixed import MIXED, scaled
from tests.support.models import Module, Stack, vectors
from tests.support.overlapping import overlapping
from tests.support.runs import assert_equal, assert_same, fit, fused, loader, trainer_for
from tests.support.simdevice import simulated
from tests.support.tiers import first

looks: list[int] = []
WIDE = torch.arange(12, dtype=torch.float32).view(3, 4)


class Mine(nn.Parameter):
    """A class of a user's."""


def with_narrow(kind: type[nn.Parameter] = nn.Parameter) -> nn.Parameter:
    looks.clear()
    parameter = kind(torch.ones(3, 4))
    keep_narrow(parameter, WIDE.bfloat16(), looked_at=lambda: looks.append(1))
    return parameter


@pytest.mark.parametrize("kind", [nn.Parameter, Mine])
def test_it_stays_as_it_came_whatever_is_done_with_the_parameter(kind: type[nn.Parameter]) -> None:
    parameter = with_narrow(kind)
    assert isinstance(parameter, kind)
    assert type(parameter).__name__ == kind.__name__
    assert torch.equal(parameter.detach() + parameter.data, torch.full((3, 4), 2.0))
    assert parameter.requires_grad
    assert {parameter: 1}[parameter] == 1
    assert type(parameter * 1) is Tensor
    assert type(type(parameter)(torch.zeros(2))) is kind
    assert type(pickle.loads(pickle.dumps(parameter))) is nn.Parameter
    copied = copy.deepcopy(parameter)
    assert type(copied) is kind
    assert copied.grad is None, "as torch copies parameters"
    assert not looks
    found = stored(parameter)
    assert isinstance(found, NarrowGradient)
    assert unwidened(found).dtype is torch.bfloat16
    assert (found.dtype, found.shape, found.layout) == (torch.float32, parameter.shape, torch.strided)
    assert torch.empty_like(found).dtype is torch.float32


@pytest.mark.parametrize("kind", [nn.Parameter, Mine])
def test_who_asks_for_it_gets_a_plain_tensor(kind: type[nn.Parameter]) -> None:
    parameter = with_narrow(kind)
    found = parameter.grad
    assert type(found) is Tensor
    assert found.data_ptr() == parameter.grad.data_ptr(), "the same memory each time"  # type: ignore[union-attr]
    assert torch.equal(found, WIDE)
    assert found.stride() == WIDE.stride()
    assert looks == [1], "once"
    assert type(parameter) is kind
    parameter.sum().backward()  # type: ignore[no-untyped-call]
    assert torch.equal(found, WIDE + 1), "autograd adds to it without asking Python"


def saved(value: Tensor | None) -> Any:
    torch.save(value, file := io.BytesIO())
    file.seek(0)
    return torch.load(file)


def tangent(parameter: Any) -> Tensor:
    found: Any = torch.func.jvp(lambda x: x * 1, (torch.ones(3, 4),), (parameter.grad,))
    return found[1]


def cotangent(parameter: Any) -> Tensor:
    x = torch.ones(3, 4, requires_grad=True)
    return torch.autograd.grad(x * 1, x, grad_outputs=parameter.grad)[0]


def data(parameter: Any) -> Tensor:
    other = torch.zeros(3, 4)
    other.data = parameter.grad
    return other


READERS: dict[str, Callable[[Any], Any]] = {
    "arithmetic": lambda p: p.grad * 1,
    "torch.tensor": lambda p: torch.as_tensor(p.grad, dtype=torch.float64).float(),
    "asarray": lambda p: torch.asarray(p.grad, copy=True),
    "new_tensor": lambda p: torch.ones(1).new_tensor(p.grad.tolist()),
    "Tensor": lambda p: torch.Tensor(p.grad),
    "set_": lambda p: torch.zeros(3, 4).set_(p.grad),
    "data": data,
    "jvp": tangent,
    "grad_outputs": cotangent,
    "vmap": lambda p: torch.func.vmap(lambda x: x * 1)(p.grad),
    "Parameter": lambda p: nn.Parameter(p.grad).data,
    "numpy": lambda p: torch.from_numpy(p.grad.numpy()),
    "dlpack": lambda p: torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(p.grad)),
    "deepcopy": lambda p: copy.deepcopy(p.grad),
    "pickle": lambda p: pickle.loads(pickle.dumps(p.grad)),
    "save": lambda p: saved(p.grad),
}


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # by torch.func itself
@pytest.mark.parametrize("name", READERS)
def test_whoever_reads_it_reads_its_values(name: str) -> None:
    """Some of these read a tensor without asking its class, and would read whatever stood in its memory."""
    assert torch.equal(READERS[name](with_narrow()), WIDE)
    assert looks == [1]


def test_a_mode_of_the_user_sees_nothing_of_it() -> None:
    seen: list[Any] = []

    class Sees(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    parameter = with_narrow()
    with Sees():
        found = parameter.grad
    assert torch.equal(found, WIDE)  # type: ignore[arg-type]
    assert seen in ([], [Tensor.grad.__get__])  # type: ignore[attr-defined]


def test_it_can_be_replaced_and_removed() -> None:
    for remove in (lambda p: setattr(p, "grad", None), lambda p: delattr(p, "grad"), drop):
        parameter = with_narrow(Mine)
        remove(parameter)
        assert parameter.grad is None
        assert type(parameter) is Mine
    parameter = with_narrow()
    parameter.grad = other = torch.ones(3, 4)
    drop(parameter)
    assert parameter.grad is other, "only a narrow gradient is dropped"
    assert not looks


def test_its_changes_are_made_in_order_when_it_is_widened() -> None:
    parameter = with_narrow()
    assert change(parameter, lambda gradient: gradient.add_(1))
    assert change(parameter, lambda gradient: gradient.mul_(0.5))
    norm = Norms().of(stored(parameter))  # type: ignore[arg-type]
    assert not looks
    assert torch.equal(norm, torch.linalg.vector_norm((WIDE + 1) * 0.5))
    assert torch.equal(parameter.grad, (WIDE + 1) * 0.5)  # type: ignore[arg-type]
    assert not change(parameter, lambda gradient: gradient.mul_(0.1)), "whoever asks has to change this one himself"
    assert torch.equal(parameter.grad, (WIDE + 1) * 0.5)  # type: ignore[arg-type]
    assert looks == [1]


def test_changes_of_several_steps_do_not_pile_up() -> None:
    parameter = with_narrow()
    changed = [change(parameter, lambda gradient: gradient.mul_(0.5)) for _ in range(3)]
    assert changed == [True, True, False]
    assert torch.equal(parameter.grad, WIDE * 0.25)  # type: ignore[arg-type]
    assert not change(nn.Parameter(torch.ones(1)), lambda gradient: gradient.mul_(0.5)), "it has none"


@pytest.mark.parametrize("came", [torch.bfloat16, torch.float16])
def test_the_norm_has_the_bits_of_the_widened_one(came: torch.dtype) -> None:
    norms = Norms()
    for shape in ((7,), (300, 401), (4097,), (64, 32, 3, 3), (16, 3, 3, 8), ()):
        value = torch.randn(shape).to(came)
        if value.ndim == 4:
            value = value.to(memory_format=torch.channels_last)
        wide = value.float()
        parameter = nn.Parameter(torch.zeros_like(value, dtype=torch.float32))
        keep_narrow(parameter, value, looked_at=lambda: None)
        for _ in range(2):
            assert torch.equal(norms.of(stored(parameter)), torch.linalg.vector_norm(wide))  # type: ignore[arg-type]
            assert torch.equal(norms.of(wide), torch.linalg.vector_norm(wide))
            change(parameter, lambda gradient: gradient.mul_(1 / 3))
            wide.mul_(1 / 3)


def test_norms_of_two_dtypes_are_computed_each_in_its_own() -> None:
    norms, came = Norms(), (WIDE / 3).bfloat16()
    for dtype in (torch.float64, torch.float32, torch.float64):
        parameter = nn.Parameter(torch.zeros(3, 4, dtype=dtype))
        keep_narrow(parameter, came, looked_at=lambda: None)
        change(parameter, lambda gradient: gradient.mul_(1 / 3))
        norm = norms.of(stored(parameter))  # type: ignore[arg-type]
        assert norm.dtype is dtype
        assert torch.equal(norm, torch.linalg.vector_norm(came.to(dtype).mul_(1 / 3)))
        buffer = norms._wide.data_ptr()
        norms.of(stored(parameter))  # type: ignore[arg-type]
        assert norms._wide.data_ptr() == buffer, "the buffer is kept for the next gradient"


def test_an_engine_that_is_closed_leaves_plain_tensors() -> None:
    """Another one may be built over the same parameters in the middle of a run, and takes their classes for the user's."""
    net = Stack()
    found = find_layers(net)
    streamer = Streamer(net, found, make_plan(found, k=1, k_prime=1), Device(torch.device("cpu")), pin=False)
    (parameter, *_) = net.parameters()
    keep_narrow(parameter, torch.ones_like(parameter, dtype=torch.bfloat16), looked_at=lambda: None)
    streamer.close()
    assert type(parameter) is nn.Parameter
    assert kind(parameter) == "Tensor"


# ---------------------------------------------------------------------- in training


class Looks(Module):
    """A module that looks at its gradients in training_step, before they are set to None: no hook says that it will.

    Args:
        look: is given the host's parameters, or those of the step.
        hosts: which of both.
    """

    def __init__(self, look: Callable[[nn.Parameter], Any], *, hosts: bool = True) -> None:
        super().__init__(Stack())
        self.look = look
        self.found: list[Any] = []
        self.hosts = hosts

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        (group,) = self.trainer.optimizers[0].param_groups
        parameters = group["params"] if self.hosts else list(self.parameters())
        self.found.append([self.look(parameter) for parameter in parameters])
        return super().training_step(batch, batch_idx)


def trained(strategy: Any, make: Callable[[], Module], **options: Any) -> Any:
    torch.manual_seed(0)
    module = fused(make)()
    trainer_for(strategy, **(options if "plugins" in options else {**MIXED, **options})).fit(module, loader(vectors(4)))
    return module


def value(parameter: nn.Parameter) -> Tensor | None:
    return None if parameter.grad is None else parameter.grad.clone()


CLIPS: dict[str, dict[str, Any]] = {
    "": {},
    "by norm": {"gradient_clip_val": 1e-3},
    "by value": {"gradient_clip_val": 1e-4, "gradient_clip_algorithm": "value"},
}


@pytest.mark.long("takes a second or more")
@pytest.mark.parametrize("clip", first(CLIPS, "by norm", why="values are clipped in the same place"))
@pytest.mark.parametrize("hosts", [True, False])
def test_gradients_after_a_step_are_plains(hosts: bool, clip: str) -> None:
    """Clipped, if the step clips."""
    plain = trained("auto", lambda: Looks(value, hosts=hosts), **CLIPS[clip])
    with simulated():
        ours = trained(overlapping("forward"), lambda: Looks(value, hosts=hosts), **CLIPS[clip])
    assert_equal(ours.found, plain.found, "gradients")
    assert_equal(dict(ours.state_dict()), dict(plain.state_dict()), "weights")


def kind(parameter: nn.Parameter) -> str:
    return type(stored(parameter)).__name__


def narrow_ones(make: Callable[[], Module], **options: Any) -> list[int]:
    """How many gradients were narrow, by step."""
    found = trained(overlapping("forward"), make, **options).found
    return [each.count("NarrowGradient") for each in found]


@pytest.mark.rest("takes tenths of a second")
def test_they_stay_as_they_came_until_somebody_has_looked() -> None:
    """From then on they are widened as they come: otherwise each would take memory twice."""
    none, *others = narrow_ones(lambda: Looks(kind))
    assert none == 0, "nothing has come yet"
    assert others == [max(others)] * 3
    assert others[0] > 10

    def looks_then(parameter: nn.Parameter) -> str:
        before = kind(parameter)
        assert parameter.grad is None or parameter.grad.isfinite().all()
        return before

    assert narrow_ones(lambda: Looks(looks_then)) == [0, others[0], 0, 0]


@pytest.mark.rest("takes tenths of a second")
def test_those_of_the_last_step_are_plain_tensors_after_the_run() -> None:
    module = trained(overlapping("forward"), lambda: Looks(kind))
    assert all(type(parameter) is nn.Parameter for parameter in module.parameters())
    assert all(kind(parameter) == "Tensor" for parameter in module.parameters())


@pytest.mark.rest("takes tenths of a second")
def test_zero_grad_does_not_widen_them_and_nothing_of_it_is_left() -> None:
    module = trained(overlapping("forward"), lambda: Looks(kind))
    assert "zero_grad" not in vars(module.trainer.optimizers[0])
    gc.collect()
    assert not [each for each in gc.get_objects() if type(each) is NarrowGradient]


class SkipsZero(Looks):
    """Gradients are set to None in every second batch alone."""

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        if batch_idx % 2 == 0:
            optimizer.zero_grad()


class StepsTwice(Looks):
    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer.step(closure=optimizer_closure)
        optimizer.step()


class SkipsLayers(Looks):
    """Some layers get no gradient in every second batch, and keep those of the batch before."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx % 2 == 0:
            return super().training_step(batch, batch_idx)
        return self.net.head(self.net.stem(batch)).square().mean()

    def zero_grad(self, *_: Any) -> None: ...

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        if batch_idx % 2 == 0:
            optimizer.zero_grad()


class ClipsSometimes(SkipsLayers):
    """Gradients that an earlier step has clipped are used by a step that does not clip."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.trainer.gradient_clip_val = 1e-3 if batch_idx % 2 == 0 else None
        return super().training_step(batch, batch_idx)


@pytest.mark.rest("takes tenths of a second")
def test_a_gradient_that_was_clipped_is_used_clipped_by_a_step_that_does_not_clip(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sp_lightning.core.plan.update_policy.may_stay_narrow", lambda facts, paging: True)
    plain = trained("auto", lambda: ClipsSometimes(kind), gradient_clip_val=1e-3)
    ours = trained(overlapping("forward"), lambda: ClipsSometimes(kind), gradient_clip_val=1e-3)
    assert_equal(dict(ours.state_dict()), dict(plain.state_dict()), "weights")


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.parametrize("clip", first(CLIPS, "by norm", why="the norm is what could be that of other values"))
@pytest.mark.parametrize("make", first([SkipsZero, StepsTwice, SkipsLayers], SkipsLayers, why="it does what they do"))
def test_a_gradient_that_is_used_twice_is_clipped_as_plains(
    make: type[Looks], clip: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With such hooks none is kept; here they are kept all the same, as if a hook could not be seen."""
    monkeypatch.setattr("sp_lightning.core.plan.update_policy.may_stay_narrow", lambda facts, paging: True)
    plain = trained("auto", lambda: make(kind), **CLIPS[clip])
    ours = trained(overlapping("forward"), lambda: make(kind), **CLIPS[clip])
    assert_equal(dict(ours.state_dict()), dict(plain.state_dict()), "weights")


class Scaler(torch.amp.GradScaler):
    """A scaler of a user's."""


class Constructed(Looks):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), fused=True)


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.parametrize("option", ["hook", "end", "accumulated", "scaler", "unscales by itself", "off"])
def test_they_are_widened_as_they_come_where_that_saves_nothing(option: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a hook may see them, where they are added up, and where somebody else divides them."""
    kept: list[int] = []
    monkeypatch.setattr(gradients, "keep_narrow", lambda *_: kept.append(1))
    options: dict[str, Any] = {
        "scaler": scaled(Scaler),
        "unscales by itself": scaled(),
        "accumulated": {**MIXED, "accumulate_grad_batches": 2},
    }.get(option, MIXED)

    class Sees(Looks):
        def on_train_batch_end(self, *_: Any) -> None: ...

    class AtTheEnd(Looks):
        def on_train_end(self) -> None: ...

    make = {"hook": Sees, "end": AtTheEnd, "unscales by itself": Constructed}.get(option, Looks)
    found = trained(overlapping("off" if option == "off" else "forward"), lambda: make(kind), **options).found
    assert {each for kinds in found for each in kinds} <= {"Tensor", "NoneType"}
    assert not kept


# ---------------------------------------------------------------------- under 16-mixed

SCALES = {"": 2.0**8, "too large at first": 2.0**40}
"""With the larger one gradients are infinite, so that steps are skipped."""


class Watches(Looks):
    """Looks at gradients in training_step, and in one hook between backward and that.

    Args:
        place: the hook's name; without one it does nothing.
    """

    def __init__(self, place: str) -> None:
        super().__init__(value)
        self.place = place

    def note(self, place: str) -> None:
        if place == self.place:
            (group,) = self.trainer.optimizers[0].param_groups
            self.found.append([value(parameter) for parameter in group["params"]])

    def on_after_backward(self) -> None:
        self.note("on_after_backward")

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.note("on_before_optimizer_step")

    def on_train_batch_end(self, *_: Any) -> None:
        self.note("on_train_batch_end")


@pytest.mark.long("takes a second or more")
@pytest.mark.parametrize(
    "place",
    first(
        ["", "on_after_backward", "on_before_optimizer_step", "on_train_batch_end"],
        "on_before_optimizer_step",
        why="other moments of the same step",
    ),
)
@pytest.mark.parametrize("clip", first(CLIPS, "by norm", why="values are clipped in the same place"))
@pytest.mark.parametrize("scale", SCALES)
def test_gradients_of_16_mixed_are_scaled_unscaled_and_clipped_when_plains_are(
    scale: str, clip: str, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With such hooks none is kept; here they are kept all the same, as if a hook could not be seen."""
    monkeypatch.setattr("sp_lightning.core.plan.update_policy.may_stay_narrow", lambda facts, paging: True)

    def run(strategy: Any) -> Watches:
        options = {**CLIPS[clip], **scaled(init_scale=SCALES[scale])}
        found: Watches = trained(strategy, lambda: Watches(place), **options)
        return found

    plain = run("auto")
    with simulated():
        ours = run(overlapping("forward"))
    assert len(plain.found) == (8 if place else 4)
    assert_equal(ours.found, plain.found, "gradients")
    assert_equal(dict(ours.state_dict()), dict(plain.state_dict()), "weights")
    assert_equal(ours.trainer.precision_plugin.state_dict(), plain.trainer.precision_plugin.state_dict(), "scaler")
    seen = [gradient for found in plain.found for gradient in found if gradient is not None]
    assert all(gradient.isfinite().all() for gradient in seen) == (SCALES[scale] < 2**30)


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.parametrize("clip", first(CLIPS, "by norm", why="it reads them all"))
@pytest.mark.parametrize("scale", SCALES)
def test_gradients_of_16_mixed_stay_narrow_in_skipped_steps_too(scale: str, clip: str) -> None:
    none, *others = narrow_ones(lambda: Looks(kind), **CLIPS[clip], **scaled(init_scale=SCALES[scale]))
    assert none == 0
    assert others == [max(others)] * 3
    assert others[0] > 10


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("make", first([SkipsZero, SkipsLayers], SkipsLayers, why="it does what it does"))
def test_a_gradient_of_16_mixed_that_is_used_twice_is_unscaled_as_plains(
    make: type[Looks], scale: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sp_lightning.core.plan.update_policy.may_stay_narrow", lambda facts, paging: True)

    def run(strategy: Any) -> list[Any]:
        module = trained(strategy, lambda: make(kind), **CLIPS["by norm"], **scaled(init_scale=SCALES[scale]))
        return [dict(module.state_dict()), module.trainer.precision_plugin.state_dict()]

    assert_equal(run(overlapping("forward")), run("auto"), "weights and scaler")


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.parametrize("moment", ["looked through", "submitted"])
def test_a_thread_that_reads_gradients_in_the_middle_of_a_step_changes_nothing(
    moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a logger of the user's may, at any moment: what it has widened is unscaled and clipped once."""
    are_finite, submit = scaler._are_finite, BackgroundUpdates.submit
    parameters: list[nn.Parameter] = []
    read: list[str] = []

    def look(now: str) -> None:
        if now == moment:
            read.extend(kind(parameter) for parameter in parameters)
            assert all(parameter.grad is not None for parameter in parameters)

    def looked_through(gradients: list[Tensor]) -> bool:
        look("looked through")
        return are_finite(gradients)

    def submitted(self: BackgroundUpdates, *args: Any) -> None:
        look("submitted")
        submit(self, *args)

    class Read(Module):
        def on_fit_start(self) -> None:
            parameters[:] = self.parameters()

    def run(strategy: Any) -> Any:
        module = fused(lambda: Read(Stack()))()
        trainer_for(strategy, **CLIPS["by norm"], **scaled()).fit(module, loader(vectors(4)))
        return [dict(module.state_dict()), module.trainer.optimizers[0].state_dict()]

    torch.manual_seed(0)
    plain = run("auto")
    monkeypatch.setattr(scaler, "_are_finite", looked_through)
    monkeypatch.setattr(BackgroundUpdates, "submit", submitted)
    torch.manual_seed(0)
    assert_equal(run(overlapping("forward")), plain, "weights and state")
    assert "NarrowGradient" in read


@pytest.mark.rest("takes tenths of a second")
def test_what_is_kept_by_hand_and_widened_is_plains() -> None:
    """A whole run of which a part is looked at, with everything that is left behind."""
    options: dict[str, Any] = {"recorded": "losses", "gradient_clip_val": 1e-3, **MIXED}
    ours = fit(fused(lambda: Looks(value)), vectors(4), overlapping("forward"), **options)
    assert_same(ours, fit(fused(lambda: Looks(value)), vectors(4), **options))
    parameter = with_narrow()
    widen(parameter)
    widen(parameter)
    assert torch.equal(parameter.grad, WIDE)  # type: ignore[arg-type]


def test_two_threads_compute_norms_in_one_buffer() -> None:
    """Backward's thread and the background do, if some gradients are on a disk. The second waits for the first."""
    norms, first, second = Norms(), *(nn.Parameter(torch.ones(64)) for _ in range(2))
    for parameter, value in ((first, 1.0), (second, 2.0)):
        keep_narrow(parameter, torch.full((64,), value, dtype=torch.bfloat16), looked_at=lambda: None)
    found: list[Tensor] = []
    other = threading.Thread(target=lambda: found.append(norms.of(stored(second))))  # type: ignore[arg-type]

    def begin_other(_: Tensor) -> None:
        other.start()
        other.join(0.2)  # without the wait, it writes the buffer in this time

    change(first, begin_other)
    assert norms.of(stored(first)) == 8  # type: ignore[arg-type]
    other.join()
    assert found == [16]
