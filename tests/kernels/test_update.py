"""Kernels of our own: torch's bits in every variant, or torch's operators."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from sp_lightning.capabilities.kernels import jit, update
from sp_lightning.capabilities.kernels.norms import norms_of
from sp_lightning.capabilities.kernels.update import update_in_one_pass
from sp_lightning.capabilities.kernels.variants import RECIPES, Recipe, Variant
from sp_lightning.core.device.background_thread import BackgroundThread
from sp_lightning.core.device.host_kernels import HostKernels, Operands
from sp_lightning.core.torch_compat.private import FUSED_STEPS
from sp_lightning.core.updates import pieces
from tests.kernels.agree import variants
from tests.support.mixed import scaled
from tests.support.models import Module
from tests.support.pieces import OPTIMIZERS, Steps
from tests.support.runs import Outcome, assert_same, fit, fused, superpipeline
from tests.support.simdevice import simulated
from tests.support.tiers import first

pytest.importorskip("llvmlite")
from sp_lightning.capabilities.kernels.ir import text


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The kinds of optimizers whose kernels have run, however small the tensors were."""
    seen: list[Any] = []

    def noting(operator: Any, *args: Any) -> bool:
        done = update_in_one_pass(operator, *args)
        seen.extend([FUSED_STEPS[operator]] * done)
        return done

    monkeypatch.setattr(pieces, "host_kernels", lambda: HostKernels(noting, norms_of))
    monkeypatch.setattr(update, "LEAST", 16)
    return seen


@pytest.fixture
def anew(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing is compiled yet."""
    update._checked.cache_clear()
    yield
    update._checked.cache_clear()


ADAMW = Variant("adamw", torch.bfloat16, torch.bfloat16, 0, maximize=False, decays=True, near=True)


def available() -> bool:
    """Whether AdamW's kernel can be compiled and has torch's bits."""
    return update._checked(ADAMW) is not None


# ---------------------------------------------------------------------- bits


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.parametrize("clip", ["", "norm", "value"])
@pytest.mark.parametrize("came", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_kernels_get_the_bits_of_torchs_operators(name: str, came: torch.dtype, clip: str, calls: list[Any]) -> None:
    whole = Steps(OPTIMIZERS[name], None, came, clip)
    ours = Steps(OPTIMIZERS[name], 512, came, clip)
    for index, (mine, plain) in enumerate(zip(ours.outcome(), whole.outcome(), strict=True)):
        assert torch.equal(mine, plain), index
    # A clamp is no factor, and a wide gradient that is changed is changed for its user to see.
    assert bool(calls) is (clip == "" or (clip == "norm" and came is not torch.float32))


HALVES = [torch.bfloat16, torch.float16]


def in_16_bits(operator: Any, settings: dict[str, Any], dtype: torch.dtype, count: int, threads: int = 1) -> bool:
    """Updates 16-bit weights by a kernel and by torch in one thread, and compares bits. Returns whether a kernel did it."""
    torch.manual_seed(count)
    kind, before = FUSED_STEPS[operator], torch.get_num_threads()
    weight, gradient = torch.randn(count).to(dtype), torch.randn(count).to(dtype)
    state: list[Any] = [torch.rand(count).to(dtype) for _ in range(3)] + [torch.tensor(5.0)]
    if kind in ("adam", "adamw") and not settings["amsgrad"]:
        state[2] = None
    elif kind == "sgd":
        state = [state[0] if settings["momentum"] else None]
    elif kind == "adagrad":
        state = [state[0], state[3]]
    ours, theirs = ([weight.clone(), *(each if each is None else each.clone() for each in state)] for _ in range(2))
    torch.set_num_threads(threads)
    try:
        done = update_in_one_pass(operator, settings, Operands(ours[0], gradient, None, ours[1:]), [])
        torch.set_num_threads(1)
        operator([theirs[0]], [gradient], *([] if each is None else [each] for each in theirs[1:]), **settings)
    finally:
        torch.set_num_threads(before)
    assert all(mine is None or torch.equal(mine, plain) for mine, plain in zip(ours, theirs, strict=True))
    return done


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.parametrize("threads", [1, 2, 4])
@pytest.mark.parametrize("count", [16384, 16384 + 15, 16384 + 16, 3 * 16384 + 33])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_16_bit_weights_get_torchs_bits(dtype: torch.dtype, count: int, threads: int) -> None:
    """Their state is of 16 bits, too (``bf16-true``). torch's fused step took longer for them than for float32."""
    assert in_16_bits(torch._fused_adamw_, adamw(), dtype, count, threads)


SGD_SETTINGS = {"lr": 0.1, "weight_decay": 0.1, "dampening": 0.1, "nesterov": False, "maximize": True}
ADAGRAD_SETTINGS = {"lr": 0.1, "lr_decay": 0.1, "weight_decay": 0.1, "eps": 1e-8, "maximize": False}


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize(
    ("operator", "settings"),
    [
        (torch._fused_adam_, lambda: adamw(maximize=True)),
        (torch._fused_adamw_, lambda: adamw(amsgrad=True)),
        (torch._fused_sgd_, lambda: SGD_SETTINGS | {"momentum": 0.0, "is_first_step": True}),
        (torch._fused_sgd_, lambda: SGD_SETTINGS | {"momentum": 0.9, "is_first_step": False}),
        (torch._fused_adagrad_, lambda: ADAGRAD_SETTINGS),
    ],
    ids=["adam", "amsgrad", "sgd", "momentum", "adagrad"],
)
def test_other_optimizers_in_16_bits(operator: Any, settings: Callable[[], dict[str, Any]], dtype: torch.dtype) -> None:
    assert in_16_bits(operator, settings(), dtype, 200_007)


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.parametrize("recipe", RECIPES[1:], ids=str)
def test_the_comparison_of_16_bit_weights_can_fail(recipe: Recipe) -> None:
    """Rounding to 16 bits hides most of what a recipe changes: 4,099 elements, enough for float32, show nothing."""
    variant = Variant("adamw", torch.bfloat16, None, 0, maximize=False, decays=True, near=True, weight=torch.bfloat16)
    found = update._checked(variant)
    assert found is not None
    if found[1] == RECIPES[0]:
        assert not update._agrees(variant, jit.Compiled(text(variant, recipe)), recipe)


EVERY, PARTS = variants(), 100


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.parametrize(
    "part", first(range(PARTS), 0, second=range(6), why="a few seconds of compiling each"), ids=str
)
def test_every_variant_agrees(part: int) -> None:
    assert [variant for variant in EVERY[part::PARTS] if update._checked(variant) is None] == []


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("count", [16384, 16385, 16384 + 31, 3 * 16384 + 7, 40000])
def test_neither_threads_nor_ends_change_bits(count: int, threads: int) -> None:
    torch.manual_seed(count)
    gradient = torch.randn(count).bfloat16()
    settings: dict[str, Any] = {
        "lr": 0.01,
        "beta1": 0.9,
        "beta2": 0.99,
        "weight_decay": 0.1,
        "eps": 1e-8,
        "amsgrad": False,
    }
    settings |= {"maximize": False, "grad_scale": None, "found_inf": None}
    ours = [torch.randn(count), torch.randn(count), torch.rand(count), torch.tensor(5.0)]
    theirs = [each.clone() for each in ours]
    cast, before = torch.empty(count, dtype=torch.bfloat16), torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        state = [ours[1], ours[2], None, ours[3]]
        assert update_in_one_pass(torch._fused_adamw_, settings, Operands(ours[0], gradient, cast, state), [0.5])
    finally:
        torch.set_num_threads(before)
    torch._fused_adamw_([theirs[0]], [gradient.float() * 0.5], [theirs[1]], [theirs[2]], [], [theirs[3]], **settings)
    assert all(map(torch.equal, ours, theirs))
    assert torch.equal(cast, theirs[0].bfloat16())


def test_what_is_written_shows_in_versions(calls: list[Any]) -> None:
    weight, momentum = torch.randn(64), torch.zeros(64)
    settings: dict[str, Any] = {"lr": 0.1, "weight_decay": 0.0, "momentum": 0.9, "dampening": 0.0, "nesterov": False}
    settings |= {"maximize": False, "is_first_step": True, "grad_scale": None, "found_inf": None}
    before = weight._version, momentum._version
    operands = Operands(weight, torch.ones(64).bfloat16(), None, [momentum])
    assert update_in_one_pass(torch._fused_sgd_, settings, operands, [])
    assert (weight._version, momentum._version) > before


# ---------------------------------------------------------------------- runs


class Wide(Module):
    def __init__(self) -> None:
        super().__init__(nn.Sequential(*(nn.Sequential(nn.Linear(150, 150), nn.Tanh()) for _ in range(4))))


BATCHES = [torch.linspace(-1, 1, 300).view(2, 150).roll(step, 1) for step in range(3)]
RUNS: dict[str, Callable[[], dict[str, Any]]] = {
    "bf16-true": lambda: {"precision": "bf16-true"},
    "bf16-true, clipped": lambda: {"precision": "bf16-true", "gradient_clip_val": 0.01},
    "bf16-mixed": lambda: {"precision": "bf16-mixed"},
    "bf16-mixed, clipped": lambda: {"precision": "bf16-mixed", "gradient_clip_val": 0.01},
    "16-mixed, clipped": lambda: {**scaled(), "gradient_clip_val": 0.01},
    "accumulated": lambda: {"precision": "bf16-mixed", "accumulate_grad_batches": 2},
}


def run(strategy: Any, **options: Any) -> Outcome:
    return fit(fused(Wide), BATCHES, strategy, recorded="nothing", **options)


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.parametrize("options", RUNS.values(), ids=list(RUNS))
@pytest.mark.parametrize("overlap", first(["forward", "backward"], "forward", why="its other mode"))
def test_runs_are_plains(overlap: str, options: Callable[[], dict[str, Any]], calls: list[Any]) -> None:
    if overlap == "backward" and "gradient_clip_val" in options():
        pytest.skip("needs all gradients at once, and is refused")
    with simulated():
        ours = run(superpipeline(k=1, optimizer_overlap=overlap), **options())
    assert len(calls) >= 8
    assert_same(ours, run("auto", **options()))


class Large(Module):
    """Its weights are more than one thread's part of an update."""

    def __init__(self) -> None:
        super().__init__(nn.Sequential(*(nn.Linear(301, 301) for _ in range(2))))


@pytest.mark.parametrize("threads", [1, 2, 4])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
def test_bits_do_not_depend_on_the_threads_of_the_background(
    precision: str, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    init = BackgroundThread.__init__
    monkeypatch.setattr(BackgroundThread, "__init__", lambda self, _, begin: init(self, threads, begin))
    options: Any = {"precision": precision, "recorded": "nothing"}
    batches = [torch.linspace(-1, 1, 602).view(2, 301).roll(step, 1) for step in range(3)]
    ours = fit(fused(Large), batches, superpipeline(k=1, optimizer_overlap="forward"), **options)
    assert_same(ours, fit(fused(Large), batches, **options))


# ---------------------------------------------------------------------- where there is none


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """What is said at DEBUG."""
    monkeypatch.setattr(jit.LOG, "propagate", True)
    caplog.set_level(logging.DEBUG, jit.LOG.name)
    return caplog


def test_the_log_says_that_a_kernel_is_used_once(anew: None, log: pytest.LogCaptureFixture) -> None:
    assert available()
    assert available()
    assert log.text.count("Superpipeline: a kernel is used for Variant(kind='adamw'") == 1


@pytest.mark.rest("takes tenths of a second")
def test_a_run_without_llvmlite_is_the_same(
    monkeypatch: pytest.MonkeyPatch, calls: list[Any], anew: None, log: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "llvmlite.binding", None)
    assert not available()
    assert "torch's operators are used for Variant(kind='adamw'" in log.text
    assert "no kernel can be compiled, which pip install llvmlite may mend: import of llvmlite" in log.text
    with simulated():
        ours = run(superpipeline(k=1, optimizer_overlap="forward"), precision="bf16-mixed")
    assert not calls
    assert_same(ours, run("auto", precision="bf16-mixed"))


@pytest.mark.long("takes a second or more")
def test_a_kernel_that_differs_is_not_used(
    monkeypatch: pytest.MonkeyPatch, calls: list[Any], anew: None, log: pytest.LogCaptureFixture
) -> None:
    """As one would whose processor rounds otherwise."""
    monkeypatch.setattr(
        "sp_lightning.capabilities.kernels.ir.text", lambda *given: text(*given).replace("fdiv", "fmul", 1)
    )
    with simulated():
        ours = run(superpipeline(k=1, optimizer_overlap="forward"), precision="bf16-mixed")
    assert "kernels differ from torch's operators" in log.text
    assert_same(ours, run("auto", precision="bf16-mixed"))


SGD = Variant("sgd", torch.bfloat16, None, 1, maximize=False, decays=True, momentum=True)
ADAGRAD = Variant("adagrad", torch.bfloat16, None, 1, maximize=False, decays=True)


@pytest.mark.parametrize(
    ("variant", "recipe"),
    [
        *((ADAMW, recipe) for recipe in RECIPES[1:]),
        *((SGD, recipe) for recipe in RECIPES[1:]),
        *((ADAGRAD, recipe) for recipe in RECIPES[1:] if not recipe.contracted),  # NEON adds its squares as AVX2 does
    ],
    ids=lambda each: each.kind if isinstance(each, Variant) else f"{each.width}-{each.fused}-{each.contracted}",
)
def test_other_recipes_are_other_bits_here(variant: Variant, recipe: Recipe) -> None:
    """Otherwise nothing shows that the right one was chosen."""
    found = update._checked(variant)
    assert found is not None
    if found[1] == RECIPES[0]:
        assert not update._agrees(variant, jit.Compiled(text(variant, recipe)), recipe)


HARDENED = """
import ctypes, sys
libc = ctypes.CDLL(None)
if libc.prctl(65, 1, 0, 0, 0):  # PR_SET_MDWE: what was written is never executable, and oneDNN makes no bfloat16 kernels
    sys.exit(7)
import tests.kernels.test_update as here
print(here.available())
with here.simulated():
    ours = here.run(here.superpipeline(k=1, optimizer_overlap="forward"), gradient_clip_val=0.01)
here.assert_same(ours, here.run("auto", gradient_clip_val=0.01))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="this protection is Linux'")
@pytest.mark.long("a process of its own")
def test_a_hardened_system_trains_without() -> None:
    found = subprocess.run([sys.executable, "-c", HARDENED], capture_output=True, text=True, timeout=300)
    if found.returncode == 7:
        pytest.skip("this kernel of Linux has no such protection")
    assert found.returncode == 0, found.stderr
    assert found.stdout.startswith("False")


def test_a_system_that_refuses_executable_memory_is_noticed(
    monkeypatch: pytest.MonkeyPatch, calls: list[Any], anew: None
) -> None:
    def refuse() -> None:
        raise OSError(13, "memory cannot be made executable")

    monkeypatch.setattr(jit, "_refuse_if_hardened", refuse)
    assert not available()


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (
            lambda given: (
                given
                | {name: given[name][:100] for name in ("weight", "gradient")}
                | {"state": [torch.zeros(100), torch.tensor(1.0)]}
            ),
            "small",
        ),
        (lambda given: given | {"factors": [1.0, 2.0, 3.0]}, "three factors"),
        (lambda given: given | {"weight": given["weight"].double()}, "double precision"),
        (lambda given: given | {"gradient": given["gradient"].double()}, "a gradient in double precision"),
        (
            lambda given: given | {"state": [torch.zeros(20000).double(), torch.tensor(1.0)]},
            "state in double precision",
        ),
        (lambda given: given | {"cast": torch.empty(20000).double()}, "a cast to double precision"),
        (lambda given: given | {"cast": torch.empty(20001, dtype=torch.bfloat16)[1:]}, "a cast between two lines"),
        *(
            (lambda given, of=of: given | {"settings": given["settings"] | {of: torch.zeros(1)}}, f"a {of}")
            for of in ("grad_scale", "found_inf")
        ),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_what_kernels_leave_to_torch(change: Any, why: str) -> None:
    """None is even compared with torch there: it would write past memory of fewer bits, or read a number that is missing."""
    settings: dict[str, Any] = {"lr": 0.1, "lr_decay": 0.0, "weight_decay": 0.0, "eps": 1e-8, "maximize": False}
    given: dict[str, Any] = {
        "settings": settings, "weight": torch.randn(20000), "gradient": torch.randn(20000).bfloat16(), "factors": [],
        "cast": None, "state": [torch.zeros(20000), torch.tensor(1.0)],
    }  # fmt: skip

    def done(settings: Any, factors: Any, **operands: Any) -> bool:
        return update_in_one_pass(torch._fused_adagrad_, settings, Operands(**operands), factors)

    assert done(**given)
    changed = change(given)
    before: Tensor = changed["weight"].clone()
    with mock.patch(
        "sp_lightning.capabilities.kernels.update._checked", side_effect=AssertionError("a kernel is tried")
    ):
        assert not done(**changed)
    assert torch.equal(changed["weight"], before)


# ---------------------------------------------------------------------- what an attacker found


def adamw(**other: Any) -> dict[str, Any]:
    settings = {"lr": 0.01, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1, "eps": 1e-8, "amsgrad": False}
    return settings | {"maximize": False, "grad_scale": None, "found_inf": None} | other


def beside_torch(settings: dict[str, Any], gradient: Tensor) -> bool:
    """Updates by a kernel and by torch, and says whether a kernel has done it. The bits are the same, of zeros, too."""
    count = gradient.numel()
    torch.manual_seed(0)
    ours = [torch.randn(count), torch.zeros(count), torch.zeros(count), torch.tensor(1.0)]
    theirs = [each.clone() for each in ours]
    operands = Operands(ours[0], gradient, None, [ours[1], ours[2], None, ours[3]])
    done = update_in_one_pass(torch._fused_adamw_, settings, operands, [])
    operator: Any = torch._fused_adamw_
    operator([theirs[0]], [gradient.float()], [theirs[1]], [theirs[2]], [], [theirs[3]], **settings)
    for one, other in zip(ours, theirs, strict=True) if done else ():
        assert torch.equal(one.view(torch.int32), other.view(torch.int32))
    return done


@pytest.mark.parametrize(
    ("other", "done"),
    [
        ({"beta1": 0.500000001}, True),  # less than half of the way in double precision, and half of it in float32
        ({"beta1": 0.0}, False),
        ({"lr": torch.inf}, False),
        ({"lr": 1e300, "weight_decay": 1e300}, False),
        ({"weight_decay": torch.tensor(0.1)}, True),
    ],
    ids=["half of the way", "no average", "infinite", "too large", "a tensor"],
)
def test_settings_at_the_edge(other: dict[str, Any], done: bool) -> None:
    gradient = torch.randn(16387).bfloat16()
    gradient[-3:] = -0.0
    assert beside_torch(adamw(**other), gradient) is done


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_defaults_of_users_do_not_matter(dtype: torch.dtype, device: str, anew: None) -> None:
    gradient, count = torch.randn(20000).bfloat16(), 20000
    tensors = [torch.ones(count), torch.zeros(count), torch.zeros(count), torch.tensor(1.0)]
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    torch.set_default_device(device)
    try:
        operands = Operands(tensors[0], gradient, None, [tensors[1], tensors[2], None, tensors[3]])
        assert update_in_one_pass(torch._fused_adamw_, adamw(), operands, [])
        (norm,) = norms_of([gradient]).values()
    finally:
        torch.set_default_dtype(before)
        torch.set_default_device(None)
    assert torch.equal(norm, torch.linalg.vector_norm(gradient.float()))


@pytest.mark.parametrize(
    "wrong",
    [
        {"state": [torch.zeros(20000), torch.zeros(20000), None, torch.tensor(1.0)]},  # of another shape
        {"state": [None, None, None, torch.tensor(1.0)]},
        {"gradient": torch.zeros(100).bfloat16()},
        {"cast": torch.zeros(100).bfloat16()},
    ],
    ids=["another shape", "none", "a short gradient", "a short cast"],
)
def test_what_does_not_fit_is_left_to_torch(wrong: dict[str, Any]) -> None:
    moments = [torch.zeros(100, 200), torch.zeros(100, 200)]
    right: dict[str, Any] = {
        "weight": torch.ones(100, 200), "gradient": torch.ones(100, 200).bfloat16(), "cast": None,
        "state": [*moments, None, torch.tensor(1.0)],
    }  # fmt: skip
    assert update_in_one_pass(torch._fused_adamw_, adamw(), Operands(**right), [])
    assert not update_in_one_pass(torch._fused_adamw_, adamw(), Operands(**{**right, **wrong}), [])


def test_a_broken_llvmlite_is_none(monkeypatch: pytest.MonkeyPatch, anew: None) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise TypeError("create_pipeline_tuning_options() got an unexpected keyword argument 'speed_level'")

    monkeypatch.setattr("llvmlite.binding.create_pipeline_tuning_options", broken)
    assert not available()
