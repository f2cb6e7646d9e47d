"""Updates with the bits of torch's optimizers on a GPU: which formulas there are, how they are told apart, when one is used."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import combinations
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from examples.benchmarks.gpu_bits import plain_variants
from sp_lightning.capabilities.kernels import gpu, gpu_norms, update
from sp_lightning.capabilities.kernels.step_like import step_like
from sp_lightning.capabilities.kernels.variants import GpuNormRecipe, GpuRecipe, Like, Variant, gpu_recipes
from sp_lightning.core.device.host_kernels import HALVES, Operands
from sp_lightning.core.layers.narrow_gradient import Factor, change, keep_narrow, note_unaligned
from sp_lightning.core.torch_compat.private import FUSED_STEPS, foreach_norm, step_as_torch
from sp_lightning.core.updates.pieces import InPieces
from tests.support.emulated_gpu import ALL, EmulatedGpu, forget, norm
from tests.support.tiers import first

pytest.importorskip("llvmlite")
from sp_lightning.capabilities.kernels import gpu_ir
from sp_lightning.capabilities.kernels.gpu_ir import text
from sp_lightning.capabilities.kernels.jit import Compiled

CPU = torch.device("cpu")
DTYPES = (torch.float32, *HALVES)


VARIANTS = list(plain_variants(CPU))
OF_FLOAT32 = [each for each in VARIANTS if each.weight is torch.float32]


@pytest.fixture(autouse=True)
def _anew() -> Iterator[None]:
    forget()
    yield
    forget()


def found_on(usual: frozenset[str], variant: Variant) -> GpuRecipe | None:
    """The recipe that is found on a GPU with such operators."""
    with EmulatedGpu(usual):
        found = gpu.find_confirmed(variant, update._run_plain)
    return None if found is None else found[1]


# ---------------------------------------------------------------------- which is found

PARTS = 24


@pytest.mark.parametrize("part", first(range(PARTS), 0, second=[1], why="seconds of NumPy each"), ids=str)
def test_every_formula_is_found_on_a_gpu_that_has_it(part: int) -> None:
    cases = [(variant, recipe) for variant in OF_FLOAT32 for recipe in gpu_recipes(variant)]
    for variant, recipe in cases[part :: 8 * PARTS]:
        assert found_on(recipe.usual, variant) == recipe, variant


@pytest.mark.long("takes a second or more")
@pytest.mark.parametrize("part", first(range(PARTS), 0, second=[1], why="seconds of NumPy each"), ids=str)
def test_16_bit_weights_have_the_formula_of_float32(part: int) -> None:
    """There a rounding in float32 shows in few results, or in none."""
    halves = [each for each in VARIANTS if each.weight is not torch.float32]
    for variant in halves[part :: 4 * PARTS]:
        recipe = gpu_recipes(variant)[-1]
        assert found_on(recipe.usual, variant) == recipe, variant


@pytest.mark.long("takes a second or more")
@pytest.mark.parametrize("part", first(range(8), 0, second=range(1, 4), why="a second of compiling each"), ids=str)
def test_the_sample_tells_all_formulas_apart(part: int) -> None:
    """Each two formulas of one update have different results, in several elements."""
    for variant in OF_FLOAT32[part::8]:
        results = []
        for recipe in gpu_recipes(variant):
            weight, gradient, *state = gpu.sample(variant)
            assert weight is not None
            assert gradient is not None
            given = gpu.numbers(variant, gpu.settings_of(variant), 7.0)
            update._run_plain(Compiled(text(variant, recipe)), weight, gradient, state, given)
            results.append((recipe, [weight, *(each for each in state if each is not None)]))
        for (one, mine), (other, others) in combinations(results, 2):
            differ = sum(int((a != b).sum() - (a.isnan() & b.isnan()).sum()) for a, b in zip(mine, others, strict=True))
            assert differ >= 8, (variant, one, other)


class OtherGpu(EmulatedGpu):
    """A GPU whose average has an unknown formula."""

    def _on_one(self, kind: str, own: Any, *others: Any, **settings: Any) -> Any:
        if kind == "lerp":
            end, weight = others
            return own * (1 - weight) + end * weight
        return super()._on_one(kind, own, *others, **settings)


@pytest.mark.long("takes a second or more")
def test_an_unknown_formula_is_never_used() -> None:
    variant = Variant("adamw", torch.float32, None, 0, False, True, near=True, like=Like(CPU, "foreach"))
    with OtherGpu(ALL):
        assert not update.is_confirmed(variant)
    forget()
    with EmulatedGpu(ALL):
        assert update.is_confirmed(variant)


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.parametrize(
    "differs",
    [
        pytest.param(lambda weight, steps: 2 <= steps <= 10, id="early"),
        pytest.param(lambda weight, steps: steps >= 10_000, id="late"),
        pytest.param(lambda weight, steps: weight.numel() % 4, id="odd sizes"),
        pytest.param(lambda weight, steps: weight.storage_offset() % 4 and not weight.numel() % 4, id="odd offsets"),
    ],
)
def test_formulas_are_compared_at_many_steps_sizes_and_offsets(
    differs: Callable[[Tensor, float], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU may have other bits only for some numbers of steps, because of powers of betas, and for odd tensors."""

    def stepped(kind: Any, form: Any, weight: Tensor, gradient: Tensor, state: Any, steps: float, settings: Any) -> Any:
        found = step_as_torch(kind, form, weight, gradient, state, steps, settings)
        if differs(weight, steps):
            weight.mul_(1.5)
        return found

    variant = Variant("adamw", torch.float32, None, 0, False, True, near=True, like=Like(CPU, "foreach"))
    monkeypatch.setattr(gpu, "_COUNT", 1 << 10)
    with EmulatedGpu(ALL):
        assert update.is_confirmed(variant)
        forget()
        monkeypatch.setattr(gpu, "step_as_torch", stepped)
        assert not update.is_confirmed(variant)


def test_what_a_gpu_computes_in_double_precision_is_not_known() -> None:
    assert gpu_recipes(Variant("sgd", torch.float32, None, 0, False, False, like=Like(CPU, "fused"))) == []


# ---------------------------------------------------------------------- what is made of a gradient


SETTINGS: dict[Any, dict[str, Any]] = {
    torch._fused_adamw_: {
        "lr": 0.01, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1, "eps": 1e-8, "amsgrad": False, "maximize": False,
    },
    torch._fused_sgd_: {
        "lr": 0.1, "weight_decay": 0.1, "momentum": 0.9, "dampening": 0.1, "nesterov": False, "maximize": True,
        "is_first_step": False,
    },
    torch._fused_adagrad_: {"lr": 0.1, "lr_decay": 0.1, "weight_decay": 0.1, "eps": 1e-8, "maximize": False},
}  # fmt: skip
SHAPES = [(), (0,), (1,), (7,), (5, 33), (300, 70), (4, 3, 5, 5)]


def state_for(kind: str, weight: Tensor) -> list[Any]:
    """State after four steps, and how many there will be with this one."""
    average, squares = torch.randn_like(weight), torch.rand_like(weight)
    if kind == "sgd":
        return [average]
    return [squares, torch.tensor(5.0)] if kind == "adagrad" else [average, squares, None, torch.tensor(5.0)]


@pytest.mark.parametrize("changed", [None, "factor", "clamp"])
@pytest.mark.parametrize("layout", ["contiguous", "channels last", "cast not aligned"])
@pytest.mark.parametrize("came", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("operator", SETTINGS, ids=FUSED_STEPS.get)
def test_weights_of_all_shapes_have_the_gpus_bits(
    operator: Any, came: torch.dtype, layout: str, changed: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "_COUNT", 1 << 10)
    torch.manual_seed(0)
    kind, like = FUSED_STEPS[operator], Like(CPU, "foreach")
    for shape in SHAPES:
        weight = nn.Parameter(torch.randn(shape))
        if layout == "channels last" and len(shape) == 4:
            weight = nn.Parameter(weight.detach().to(memory_format=torch.channels_last))
        gradient = torch.randn_like(weight).to(came)
        state = state_for(kind, weight.detach())
        theirs: list[Any] = [each if each is None else each.clone() for each in (weight.detach(), *state)]
        wide = gradient.to(torch.float32, copy=True)
        changes = {"factor": Factor(torch.tensor(0.3)), "clamp": lambda each: each.clamp_(-0.5, 0.5), None: None}
        by: Any = changes[changed]
        if by is not None:
            by(wide)
        steps = state[-1] if kind != "sgd" else torch.tensor(0.0)
        with EmulatedGpu(), torch.no_grad():
            expected = step_as_torch(
                kind,
                "foreach",
                theirs[0],
                wide,
                theirs[1:] if kind == "sgd" else theirs[1:-1],
                float(steps),
                SETTINGS[operator],
            )
        cast = torch.empty(weight.numel() + 1, dtype=torch.bfloat16)[int(layout == "cast not aligned") :][
            : weight.numel()
        ]
        cast = cast.view(weight.shape)
        if came is torch.float32:
            weight.grad = gradient.clone()
        else:
            keep_narrow(weight, gradient, lambda: None)
        clips = {} if by is None or change(weight, by) else {id(weight): by}
        given = weight.grad if came is torch.float32 else nn.Parameter.__base__.grad.__get__(weight)  # type: ignore[union-attr]
        columns = [[] if each is None else [each] for each in state]
        # The GPU is asked in this thread, which has the mode; in a run that is done before the first step.
        with (
            torch.no_grad(),
            EmulatedGpu(),
            InPieces({id(weight): cast}, clips, {id(weight): partial(step_like, like)}),
            torch.DisableTorchFunctionSubclass(),
        ):
            operator([weight], [given], *columns, **SETTINGS[operator], grad_scale=None, found_inf=None)
        assert torch.equal(weight.detach(), theirs[0]), shape
        moments = state if kind == "sgd" else state[:-1]
        assert all(
            own is None or torch.equal(own, each)
            for own, each in zip(moments, expected, strict=True)
            if each is not None
        )  # type: ignore[arg-type]
        assert torch.equal(cast, weight.detach().bfloat16()), shape


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
def test_nesterov_momentum_alone_is_added_to_the_gradient(layout: torch.memory_format) -> None:
    """torch adds it in place. User code sees the values, and autograd the new version."""
    weight = nn.Parameter(torch.randn(4, 3, 5, 5).to(memory_format=layout))
    weight.grad = torch.randn_like(weight)
    average = torch.randn_like(weight)
    settings = {
        **SETTINGS[torch._fused_sgd_],
        "nesterov": True,
        "dampening": 0.0,
        "weight_decay": 0.0,
        "maximize": False,
    }
    like, expected = Like(CPU, "foreach"), weight.grad.clone()
    version = weight.grad._version
    with EmulatedGpu(), torch.no_grad():
        step_as_torch("sgd", "foreach", weight.detach().clone(), expected, [average.clone()], 0.0, settings)
        with InPieces({}, {}, {id(weight): partial(step_like, like)}), torch.DisableTorchFunctionSubclass():
            torch._fused_sgd_([weight], [weight.grad], [average], **settings, grad_scale=None, found_inf=None)  # type: ignore[call-overload]
    assert torch.equal(weight.grad, expected)
    assert weight.grad._version > version


def test_a_kernel_that_differs_from_the_confirmed_one_is_never_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that leaves out a factor stands for one that LLVM has compiled otherwise."""
    variant = Variant("sgd", torch.bfloat16, None, 1, False, True, momentum=True, like=Like(CPU, "foreach"))
    with EmulatedGpu():
        assert update._checked(variant) is not None
        update._checked.cache_clear()
        monkeypatch.setattr(gpu_ir, "text", lambda what, recipe: text(replace(what, factors=0), recipe))
        assert update.is_confirmed(variant)
        assert update._checked(variant) is None


@pytest.mark.long("takes a second or more")
@pytest.mark.parametrize("part", first(range(40), 0, second=range(1, 4), why="seconds of compiling each"), ids=str)
def test_casts_and_factors_leave_the_gpus_bits(part: int) -> None:
    """Kernels that widen, multiply and cast are compared with the one that was compared with the GPU."""
    made = [
        replace(each, gradient=gradient, cast=cast, factors=factors)
        for each in OF_FLOAT32 for gradient in DTYPES for cast in (None, *HALVES) for factors in (0, 1, 2)
    ]  # fmt: skip
    with EmulatedGpu():
        assert [each for each in made[part::320] if update._checked(each) is None] == []


# ---------------------------------------------------------------------- norms


@pytest.mark.long("takes a second or more")
@pytest.mark.parametrize("fused", [True, False])
def test_norms_have_the_gpus_bits(fused: bool) -> None:
    with EmulatedGpu(ALL if fused else ALL - {"norm"}):
        assert gpu_norms.has_norms_of(CPU, 1)
    for dtype in DTYPES:
        gradients = [torch.randn(count).to(dtype) for count in (1, 6, 70_000, 131_073)]
        for own, gradient in zip(gpu_norms.norms_like(CPU, gradients), gradients, strict=True):
            assert float(own) == float(norm(gradient.float().numpy(), fused=fused))


@pytest.mark.long("takes a second or more")
def test_norms_depend_on_the_place_of_a_gradient_in_the_gpus_memory() -> None:
    gradients = [torch.randn(8200) for _ in range(8)]
    for each in gradients:
        note_unaligned(each)
    with EmulatedGpu():
        assert gpu_norms.has_norms_of(CPU, 1)
    found = list(map(float, gpu_norms.norms_like(CPU, gradients)))
    assert found == [float(norm(each.numpy(), aligned=False)) for each in gradients]
    assert found != [float(norm(each.numpy())) for each in gradients]


@pytest.mark.rest("takes tenths of a second")
def test_the_sample_tells_formulas_of_norms_apart() -> None:
    gradients = gpu_norms.sample(torch.float32)
    once, twice = (
        torch.stack(gpu_norms._run(Compiled(text(torch.float32, GpuNormRecipe(fused=fused))), gradients))
        for fused in (True, False)
    )
    assert int((once != twice).sum()) > 5


def test_more_chunks_than_threads_are_added_up_in_two_rounds() -> None:
    torch.manual_seed(0)
    sums = [torch.rand(512 * 2 + 3), torch.rand(3)]
    found = gpu_norms._added(sums)
    of_threads = sums[0][:512] + sums[0][512:1024]
    of_threads[:3] += sums[0][1024:]
    of_warps = of_threads.view(16, 32)
    for half in (16, 8, 4, 2, 1):  # as the threads of a warp add up
        of_warps = of_warps[:, :half] + of_warps[:, half:]
    total = of_warps[:, 0]
    for half in (8, 4, 2, 1):
        total = total[:half] + total[half:]
    assert float(found[0]) == float(total)
    assert float(found[1]) == float(sums[1][0] + sums[1][2] + sums[1][1])


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.parametrize(("many", "equal"), [(3 * 65536, True), (600 * 65536, False)])
def test_many_chunks_are_compared_if_a_gradient_has_them(
    many: int, equal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This GPU adds up the sums of 600 chunks in another order; the emulator is asked for no norm as large as that."""
    monkeypatch.setattr(gpu_norms, "_MANY", 200_000)
    monkeypatch.setattr(gpu_norms, "_COUNTS", (1, 2, 3, 300))
    with EmulatedGpu():
        assert gpu_norms.has_norms_of(CPU, 512 * 65536)
        if not equal:
            monkeypatch.setattr(gpu_norms, "foreach_norm", lambda tensors: [each.norm() * 2 for each in tensors])
        assert gpu_norms.has_norms_of(CPU, many) is equal


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.parametrize("differs", DTYPES, ids=str)
def test_norms_are_compared_in_each_dtype(differs: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients of 16 bits have norms of 16 bits."""
    monkeypatch.setattr(gpu_norms, "_COUNTS", (1, 2, 3, 300))
    with EmulatedGpu():
        assert gpu_norms.has_norms_of(CPU, 1)
        forget()
        monkeypatch.setattr(
            gpu_norms, "foreach_norm",
            lambda tensors: [each * 2 if each.dtype is differs else each for each in foreach_norm(tensors)],
        )  # fmt: skip
        assert not gpu_norms.has_norms_of(CPU, 1)


def test_the_host_waits_for_one_copy_of_norms(monkeypatch: pytest.MonkeyPatch) -> None:
    norms, copied, to = [*torch.rand(9).unbind(), torch.rand((), device="meta")], list[Any](), Tensor.to

    def noted(self: Tensor, *where: Any) -> Tensor:
        copied.append(self.shape)
        return to(self, *where)

    monkeypatch.setattr(Tensor, "to", noted)
    assert gpu_norms.GpuNorms(torch.device("meta")).total(norms).is_meta
    assert copied == [(9,)], "all in one; the last norm is on the GPU already"


def test_no_python_runs_for_each_chunk() -> None:
    """It would hold the interpreter's lock during backward."""
    kernel: Any = SimpleNamespace(run=lambda count, _, given: ctypes.memset(given.sums, 0, 4 * count))

    def calls(chunks: int) -> int:
        noted, gradient = list[str](), torch.zeros(1).expand(chunks * gpu_norms.CHUNK)
        sys.setprofile(lambda frame, event, of: noted.append(event))
        gpu_norms._run(kernel, [gradient])
        sys.setprofile(None)
        return len(noted)

    assert calls(1) == calls(500)


@pytest.mark.parametrize("what", ["weight", "gradient"])
def test_a_kernel_never_gets_an_address_on_the_gpu(what: str) -> None:
    tensors = {name: torch.zeros(32, device="meta" if name == what else "cpu") for name in ("weight", "gradient")}
    operands = Operands(**tensors, cast=None, state=[torch.zeros(32)])
    with EmulatedGpu(), pytest.raises(AssertionError, match=rf"got a {what} of shape \(32,\) on meta"):
        update.update_in_one_pass(torch._fused_sgd_, SETTINGS[torch._fused_sgd_], operands, [], Like(CPU, "foreach"))


@pytest.mark.rest("takes tenths of a second")
def test_norms_that_differ_are_never_used() -> None:
    assert not gpu_norms.has_norms_of(CPU, 1)  # torch's own on the CPU, which adds up otherwise
