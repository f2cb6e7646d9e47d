"""Compiled blocks compute with 16-bit casts, as eager blocks do: equal to plain Lightning with the same compiled blocks."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, ClassVar

import pytest
import torch
import torch._dynamo
import transformers
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from sp_lightning.core.layers import compiled_calls
from sp_lightning.core.model.compile import compile_blocks
from sp_lightning.core.model.find import find_layers
from sp_lightning.core.torch_compat.private import is_compiled
from tests.equality.cases import CASES
from tests.support.mixed import MIXED, Tied
from tests.support.models import CheckpointedCalls, Module, Stack, lora, tokens, vectors
from tests.support.nets import Does
from tests.support.runs import (
    Batches,
    Outcome,
    assert_equal,
    assert_same,
    fit,
    fused,
    loader,
    superpipeline,
    trainer_for,
)
from tests.support.simdevice import simulated
from tests.support.tiers import first

pytestmark = pytest.mark.filterwarnings("ignore:.*non-leaf|.*Dynamo:UserWarning")
MASTERS = "needs weights in float32"


@pytest.fixture(autouse=True)
def _nothing_compiled() -> Iterator[None]:
    forget()
    yield
    forget()


def forget() -> None:
    """Forgets all graphs, and what is known of them."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled_calls._reading_masters.clear()


def graphs() -> int:
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def compiled(make: Callable[[], Any], **options: Any) -> Callable[[], Any]:
    def made() -> Any:
        module = make()
        compile_blocks(module, backend="aot_eager", **options)
        return module

    return made


def both(
    make: Callable[[], Any], batches: Batches, strategy: Any = None, *, expect: str = "", **options: Any
) -> tuple[Any, Outcome]:
    """Trains on plain Lightning and streamed, and asserts that all is equal, the number of graphs included."""
    strategy = strategy or superpipeline(k=1)
    plain = fit(make, batches, **{**MIXED, **options})
    made = graphs()
    forget()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ours = fit(make, batches, strategy, **{**MIXED, **options})
    assert_same(ours, plain)
    told = [str(each.message) for each in caught if MASTERS in str(each.message)]
    assert len(told) == bool(expect), told
    assert expect in "".join(told)
    if not expect:  # weights that stay on the device are of another class than those that move
        places = 2 if strategy.plan.stay else 1
        assert made <= graphs() <= places * made, "streaming made another graph"
        assert graphs() == strategy.stats().compiled_graphs
    return strategy, ours


class Linears(nn.Module):
    """Blocks without biases, so that all their bytes are cast."""

    def __init__(self, block: Callable[[], nn.Module], depth: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Block(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.inner = nn.Linear(width, 2 * width, bias=False)
        self.outer = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.outer(torch.tanh(self.inner(x)))


def of(block: Callable[[], nn.Module]) -> Callable[[], Any]:
    return lambda: Module(Linears(block))


@pytest.mark.long("takes a second or more")
def test_compiled_blocks_move_the_bytes_of_eager_blocks() -> None:
    """Uploads took 1.82 times the bytes."""
    eager = superpipeline(k=1)
    fit(of(Block), vectors(), eager, **MIXED)
    strategy, _ = both(compiled(of(Block)), vectors())
    assert strategy.stats().fetched_bytes == eager.stats().fetched_bytes > 0
    assert strategy.stats().offloaded_gradient_bytes == eager.stats().offloaded_gradient_bytes > 0
    assert strategy.stats().demand_fetches == strategy.stats().extra_slots == 0
    assert strategy.plan.slot_bytes == eager.plan.slot_bytes


@pytest.mark.long("takes a second or more")
def test_biases_move_in_float32() -> None:
    """A compiler that fuses the cast of a bias with the addition may leave out the rounding."""
    strategy, _ = both(compiled(lambda: Module(Stack())), vectors())
    layer = strategy.plan.layers[1]
    assert [cast.name for cast in layer.casts] == ["net.blocks.0.inner.weight", "net.blocks.0.outer.weight"]
    assert [span.dtype for span in layer.spans] == [torch.float32] * 2


@pytest.mark.long("takes a second or more")
@pytest.mark.parametrize(
    "mode",
    first(
        ["recompute", "offload", "backward", "forward", "accumulated", "clipped", "validated"],
        "recompute",
        why="modes of the same",
    ),
)
def test_in_every_mode(mode: str) -> None:
    make = compiled(lambda: Module(Stack()))
    strategy: dict[str, Any] = {}
    if mode in ("recompute", "offload"):
        strategy["activations"] = mode
    elif mode in ("forward", "backward"):
        strategy |= {"optimizer_overlap": mode}
        make = fused(make)
    trainers: dict[str, dict[str, Any]] = {
        "accumulated": {"accumulate_grad_batches": 2},
        "clipped": {"gradient_clip_val": 0.05},
        "validated": {"val": vectors(1)},
    }
    recorded = "losses" if mode == "backward" else "gradients"
    both(
        make,
        vectors(4),
        superpipeline(k=1, **strategy),
        recorded=recorded,
        max_epochs=2,
        **trainers.get(mode, {}),
    )


STAYS: dict[str, Any] = {"optimizer_on": "gpu", "gpu_layers": 2}


@pytest.mark.long("compiles many graphs")
@pytest.mark.parametrize(
    ("make", "options"),
    [
        (Tied, {"activations": "offload"}),
        (Tied, {**STAYS, "activations": "recompute"}),
        (partial(CheckpointedCalls, False), STAYS),
        (partial(CheckpointedCalls, True), {"activations": "recompute"}),
        pytest.param(lora, STAYS, marks=pytest.mark.long("half a minute of compilation")),
    ],
)
def test_on_the_simulated_device(make: Any, options: dict[str, Any]) -> None:
    """Without the dispatch mode that watches operators: under it, ``aot_eager`` runs eagerly."""
    batches = tokens() if make is lora else vectors(4)
    with simulated(watch=False):
        both(compiled(make if make is lora else lambda: Module(make())), batches, superpipeline(k=1, **options))


@pytest.mark.long("takes a second or more")
@pytest.mark.filterwarnings("ignore:TorchaoLoraLinear:UserWarning")
def test_a_base_of_8_bits() -> None:
    """A graph takes the parts of a weight. Dynamo set them on the stand-in, which refused it."""
    case = CASES["quantised/int8"]
    strategy, _ = both(compiled(case.make), case.batches())
    assert strategy.stats().extra_slots == 0


@pytest.mark.long("takes a second or more")
@pytest.mark.parametrize("dynamic", [None, True])
def test_sizes_that_change_make_no_further_graphs(dynamic: bool | None) -> None:
    batches = [torch.randn(2 + size, 16, requires_grad=True) for size in (0, 3, 5, 3, 7)]
    both(compiled(lambda: Module(Stack()), dynamic=dynamic), batches)


@pytest.mark.long("takes a second or more")
def test_torch_compile_of_a_block_and_of_a_part_of_a_block() -> None:
    def make() -> Any:
        module: Any = Module(Stack())
        blocks = module.net.blocks
        blocks[1] = torch.compile(blocks[1], backend="aot_eager")
        blocks[2].inner.compile(backend="aot_eager")
        return module

    strategy, _ = both(make, vectors())
    cast = {cast.name for layer in strategy.plan.layers for cast in layer.casts}
    assert {"net.blocks.1._orig_mod.inner.weight", "net.blocks.2.inner.weight", "net.blocks.2.outer.bias"} <= cast


# ---------------------------------------------------------------------- graphs that need masters


class Penalised(Block):
    """Another function reads the weight."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.inner.weight.square().mean()


class Precise(Block):
    """A router in float32, as in DeepSeek's models."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            gate = self.inner(x.float()).sigmoid()
        return x + self.outer(gate)


class Twice(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(super().forward(x))


class TwiceInTwoGraphs(Block):
    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        torch._dynamo.graph_break()
        return super().forward(x)


@pytest.mark.long("takes a second or more")
@pytest.mark.parametrize(
    ("block", "why"),
    [
        (Penalised, "another function"),
        (Precise, "autocast is off"),
        (Twice, "used twice"),
    ],
)
def test_a_graph_that_needs_masters_gets_them(block: Any, why: str) -> None:
    """The other blocks, which use the same graph, get them as well; so do the next batches and the next run."""
    both(compiled(of(block)), vectors(), expect=why)


class Sometimes(Block):
    """Another function reads a weight of some blocks."""

    def __init__(self, *, reads: bool) -> None:
        super().__init__()
        self.reads = reads

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y + nn.functional.linear(y, (self.inner.weight * 2)[:16]) if self.reads else y


class Later(Module):
    """Its last block needs masters. The others have been called with casts by then, and run again in backward."""

    def __init__(self, *, checkpoints: bool) -> None:
        super().__init__(nn.Module())
        self.net.blocks = nn.ModuleList(Sometimes(reads=index == 2) for index in range(3))
        self.checkpoints = checkpoints

    def loss(self, batch: Tensor) -> Tensor:
        for block in self.net.blocks:  # type: ignore[union-attr]
            batch = checkpoint(block, batch, use_reentrant=False) if self.checkpoints else block(batch)
        return batch.float().square().mean()


@pytest.mark.long("compiles many graphs")
@pytest.mark.parametrize("checkpoints", [True, False])
def test_a_block_that_needs_masters_changes_no_block_that_was_called_before_it(checkpoints: bool) -> None:
    strategy = superpipeline(k=1, activations="keep" if checkpoints else "recompute")
    both(compiled(lambda: Later(checkpoints=checkpoints)), vectors(), strategy, expect="reads a weight")


@pytest.mark.long("takes a second or more")
def test_the_next_run_uses_the_graphs_of_the_first_one() -> None:
    make = compiled(of(Twice))
    plain = fit(make, vectors(), **MIXED)
    forget()
    with pytest.warns(UserWarning, match=MASTERS):
        fit(make, vectors(), superpipeline(k=1), **MIXED)
    before = graphs()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=f".*{MASTERS}")
        assert_same(fit(make, vectors(), superpipeline(k=1), **MIXED), plain)
    assert graphs() == before


class InALoop(Block):
    """One graph runs three times in a call: dynamo leaves the forward alone, and compiles the function that it calls."""

    def once(self, x: Tensor) -> Tensor:
        return Block.forward(self, x)

    def forward(self, x: Tensor) -> Tensor:
        with torch.profiler.record_function("loop"):
            for _ in range(3):
                print(end="")
                x = self.once(x)
        return x


class OldWeightNorm(Block):
    def __init__(self) -> None:
        super().__init__()
        torch.nn.utils.weight_norm(self.inner)


class Data(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + nn.functional.linear(x, self.inner.weight.data)[:, :16]


class FrozenTwice(Twice):
    def __init__(self) -> None:
        super().__init__()
        self.inner.requires_grad_(False)
        self.outer.requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(16))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale


class EagerInside(Block):
    """Code that is not compiled reads a weight: with the module, and by itself."""

    @torch.compiler.disable
    def eager(self, x: Tensor) -> Tensor:
        return self.outer(x) * self.outer.weight.mean()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.eager(torch.tanh(self.inner(x)))


class Asking(Block):
    """Asks for what the weight is, which no copy is needed for."""

    def forward(self, x: Tensor) -> Tensor:
        weight = self.inner.weight
        if weight.dtype is torch.float32 and weight.shape[0] == len(weight) and not weight.is_cuda:
            x = x * getattr(weight, "factor", 1.0)
        return super().forward(x)


def with_attribute(factor: float, kind: type[Module] = Module) -> Any:
    module = kind(Linears(Asking))
    for block in module.net.blocks:
        block.inner.weight.factor = factor
    return module


def test_products_tuned_by_the_compiler_have_masters() -> None:
    """Its own kernels may leave out the rounding of a gradient."""
    module = of(Block)()
    for block in module.net.blocks:
        block.compile(mode="max-autotune-no-cudagraphs")
    found = find_layers(module, autocast=torch.bfloat16)
    assert not any(layer.lowered for layer in found.layers)
    assert any(layer.lowered for layer in find_layers(of(Block)(), autocast=torch.bfloat16).layers)


@pytest.mark.long("takes a second or more")
def test_a_call_that_raises_leaves_stand_ins() -> None:
    class Raises(Block):
        @torch.compiler.disable
        def refuse_three(self, x: Tensor) -> Tensor:
            if x.shape[0] == 3:
                raise ValueError("three")
            return x

        def forward(self, x: Tensor) -> Tensor:
            return self.refuse_three(x + self.outer(torch.tanh(self.inner(x))))

    class Caught(Module):
        def loss(self, batch: Any) -> Tensor:
            try:
                return super().loss(batch)
            except ValueError:
                return super().loss(batch[:2])

    both(compiled(lambda: Caught(Linears(Raises))), [torch.randn(n, 16, requires_grad=True) for n in (2, 3, 2)])


class InFloat32(Linears):
    """Autocast is off around a block."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x)
        with torch.autocast("cpu", enabled=False):
            x = self.blocks[1](x.float())
        return self.blocks[2](x)


class ReadBefore(Module):
    """Reads a master in float32 before the block is called, so that it is on the device already."""

    def loss(self, batch: Any) -> Tensor:
        penalty = self.net.blocks[1].inner.weight.square().mean()
        return super().loss(batch) + penalty


class Holds(nn.Module):
    """A block of which only a part is compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.part = Block()

    def forward(self, x: Tensor) -> Tensor:
        return self.part(x)


class WritesBefore(Holds):
    """Writes a master on the device, in evaluation, before the compiled part reads it."""

    def forward(self, x: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            self.part.inner.weight.mul_(0.5)
        return super().forward(x)


class CallsPart(Module):
    """Calls a compiled part of a block from outside, so that the block's layer is not uploaded for a call."""

    def loss(self, batch: Any) -> Tensor:
        return super().loss(self.net.blocks[1].part(batch))


class CallsCompiled(Linears):
    """Compiled code calls compiled blocks."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.compile(super().forward, backend="aot_eager")(x)


def parts_compiled(module: Module) -> Module:
    for each in module.net.blocks:  # type: ignore[union-attr]
        each.part.compile(backend="aot_eager")
    return module


SAME_GRAPHS: dict[str, Callable[[], Any]] = {
    "adapters on a frozen base": compiled(lora),
    "two graphs use a weight": compiled(of(TwiceInTwoGraphs)),  # the gradients of all runs were added up in 16 bits
    "one graph in a loop": compiled(of(InALoop)),
    # torch._weight_norm reads memory without a call of any function that a class could notice.
    "weights under other names": compiled(of(OldWeightNorm)),
    "a frozen weight is used twice": compiled(of(FrozenTwice)),
    "dtype, shape and attributes": compiled(lambda: with_attribute(0.5)),
}
ANY_GRAPHS: dict[str, Callable[[], Any]] = {
    ".data between graphs": compiled(of(Data)),
    "code between two graphs": compiled(of(EagerInside)),
    # Neither the hooks of its step nor those of its backward are compiled: dynamo failed in the engine's code.
    "a block without autocast": compiled(lambda: Module(InFloat32(Block))),
    "a master is on the device already": compiled(lambda: ReadBefore(Linears(Block))),
    "a master was written on the device": lambda: parts_compiled(of(WritesBefore)()),
    "a part is called from outside its layer": lambda: parts_compiled(CallsPart(Linears(Holds))),
    "blocks inside a compiled function": compiled(lambda: Module(CallsCompiled(Block))),
}


@pytest.mark.long("takes a second or more")
@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
@pytest.mark.parametrize("name", SAME_GRAPHS)
def test_equal_with_the_same_graphs(name: str) -> None:
    both(SAME_GRAPHS[name], tokens() if name.startswith("adapters") else vectors(6))


@pytest.mark.long("takes a second or more")
@pytest.mark.parametrize("name", ANY_GRAPHS)
def test_equal_with_any_number_of_graphs(name: str) -> None:
    batches = vectors()
    evaluated: dict[str, Any] = {"val": vectors(2), "max_epochs": 2} if "written" in name else {}
    plain = fit(ANY_GRAPHS[name], batches, **MIXED, **evaluated)
    forget()
    assert_same(fit(ANY_GRAPHS[name], batches, superpipeline(k=1), **MIXED, **evaluated), plain)


class Nested(nn.Module):
    """A compiled block calls another compiled module between two graphs, and then reads one of its own weights."""

    def __init__(self) -> None:
        super().__init__()
        self.part, self.own = Block(), nn.Linear(16, 16, bias=False)
        self.part.compile(backend="aot_eager")

    @torch.compiler.disable
    def between(self, x: Tensor) -> Tensor:
        return self.part(x)

    def forward(self, x: Tensor) -> Tensor:
        x = self.between(torch.tanh(x))
        return x + self.own(x) * self.own.weight.mean()


@pytest.mark.long("takes a second or more")
def test_a_compiled_block_calls_another_compiled_module() -> None:
    both(compiled(of(Nested)), vectors(), expect="another function")


class Meets(Block):
    """Two threads call the block at once; each waits for the other in the middle of it."""

    both = threading.Barrier(2)
    kinds: ClassVar[list[str]] = []

    @torch.compiler.disable
    def meet(self, x: Tensor) -> Tensor:
        self.both.wait(60)
        self.kinds.append(type(self.outer.weight).__name__)
        self.both.wait(60)
        return x

    def forward(self, x: Tensor) -> Tensor:
        return x + self.outer(self.meet(torch.tanh(self.inner(x))))


class InTwoThreads(Linears):
    def forward(self, x: Tensor) -> Tensor:
        def call(each: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
                return self.blocks[0](each)

        with ThreadPoolExecutor(2) as pool:
            first, second = pool.map(call, (x, 2 * x))
        return first + second


@pytest.mark.long("takes a second or more")
def test_two_threads_call_a_compiled_block_at_once() -> None:
    """The first one to return would take the casts from the other."""
    make = compiled(lambda: Module(InTwoThreads(Meets)))
    plain = fit(make, vectors(), **MIXED)
    forget()
    Meets.kinds.clear()
    assert_same(fit(make, vectors(), superpipeline(k=1), **MIXED), plain)
    assert len(Meets.kinds) == 2 * len(vectors())
    assert "CompiledStandIn" not in Meets.kinds


@pytest.mark.long("takes a second or more")
def test_after_a_call_no_weight_has_a_cast_or_attributes_that_are_not_its_own() -> None:
    seen: list[dict[str, Any]] = []
    kinds: set[str] = set()

    class Looks(Module):
        def loss(self, batch: Any) -> Tensor:
            loss = super().loss(batch)
            seen.extend(vars(block.inner.weight) for block in self.net.blocks)
            kinds.update(type(block.inner.weight).__name__ for block in self.net.blocks)
            return loss

    fit(compiled(lambda: with_attribute(0.5, Looks)), vectors(1), superpipeline(k=1), **MIXED)
    assert seen
    assert not any("_bound_cast" in each or "factor" in each for each in seen)
    assert "CompiledStandIn" not in kinds


class Generates(LightningModule):
    """Generates tokens in prediction, with a cache of keys and values of growing or of fixed size."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        config = transformers.LlamaConfig(
            vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=64,
        )  # fmt: skip
        torch.manual_seed(0)
        self.net = transformers.LlamaForCausalLM(config).eval()
        self.options = options
        compile_blocks(self.net, backend="aot_eager", dynamic=True)

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        found = self.net.generate(
            batch, max_new_tokens=3, do_sample=False, pad_token_id=0, return_dict_in_generate=True, output_logits=True,
            **self.options,
        )  # fmt: skip
        return found.sequences, torch.stack(found.logits)


@pytest.mark.long("takes a second or more")
@pytest.mark.parametrize("cache", first(["growing", "static"], "static", why="another cache"))
def test_tokens_are_generated_with_compiled_blocks(cache: str) -> None:
    found = []
    options = {"cache_implementation": "static"} if cache == "static" else {}
    batches = [torch.arange(1, 2 * length + 1).view(2, length) for length in (5, 7)]
    for strategy in ("auto", superpipeline(k=1)):
        forget()
        found.append(trainer_for(strategy, **MIXED).predict(Generates(**options), loader(batches)))
        found.append(graphs())
    assert_equal(found[2], found[0], "tokens and logits")
    assert found[3] == found[1], "streaming made another graph"


# ---------------------------------------------------------------------- what changes during a run


def compile_now(trainer: Any, module: Any) -> None:
    compile_blocks(module, backend="aot_eager")


def compile_in_second_epoch(trainer: Any, module: Any) -> None:
    if trainer.current_epoch == 1:
        compile_now(trainer, module)


@pytest.mark.long("takes a second or more")
@pytest.mark.parametrize(
    "late",
    first(
        [
            {"on_fit_start": compile_now},
            {"on_train_start": compile_now},
            {"on_train_epoch_start": compile_in_second_epoch},
        ],
        {"on_train_epoch_start": compile_in_second_epoch},
        why="earlier hooks",
    ),
)
def test_blocks_that_are_compiled_during_a_run_get_other_casts(late: dict[str, Any]) -> None:
    both(lambda: Module(Stack(16)), vectors(2), callbacks=[Does(**late)], max_epochs=2)


def hook_on_one_block(trainer: Any, module: Any) -> None:
    if trainer.current_epoch == 1:
        module.net.blocks[1].inner.register_forward_hook(lambda module, args, out: 0.5 * out)


@pytest.mark.long("takes a second or more")
@pytest.mark.parametrize("skipped", [True, False])
def test_a_hook_inside_a_compiled_block_takes_effect_as_on_plain_lightning(skipped: bool) -> None:
    """By default a graph has no guard on hooks inside it, and one that is registered later has no effect."""
    with torch._dynamo.config.patch(skip_nnmodule_hook_guards=skipped):
        callback = Does(on_train_epoch_start=hook_on_one_block)
        both(compiled(lambda: Module(Linears(Block))), vectors(2), callbacks=[callback], max_epochs=2)


class OwnCall(nn.Linear):
    def __call__(self, *args: Any) -> Any:
        return 2 * super().__call__(*args)


class OwnCallImpl(nn.Linear):
    def _call_impl(self, *args: Any, **kwargs: Any) -> Any:
        return 2 * super()._call_impl(*args, **kwargs)


def own_forward() -> nn.Module:
    """The forward is the object's own. Then the graph has guards on hooks, on plain Lightning as well."""
    block = Block()
    inner: Any = block.inner
    forward = inner.forward
    inner.forward = lambda x: 2 * forward(x)
    return block


def with_inner(kind: type[nn.Linear]) -> Callable[[], nn.Module]:
    def made() -> nn.Module:
        block = Block()
        block.inner = kind(16, 32, bias=False)
        return block

    return made


@pytest.mark.long("takes a second or more")
@pytest.mark.parametrize(
    "block", [with_inner(OwnCall), with_inner(OwnCallImpl), own_forward], ids=["call", "impl", "forward"]
)
def test_a_hook_on_a_module_with_a_call_of_its_own(block: Callable[[], nn.Module]) -> None:
    callback = Does(on_train_epoch_start=hook_on_one_block)
    both(compiled(lambda: Module(Linears(block))), vectors(2), callbacks=[callback], max_epochs=2)


@pytest.mark.long("takes a second or more")
def test_hooks_of_all_modules_inside_a_compiled_block() -> None:
    def halve(module: nn.Module, args: Any, out: Any) -> Any:
        return 0.5 * out if isinstance(module, nn.Linear) else None

    handle = nn.modules.module.register_module_forward_hook(halve)
    try:
        both(compiled(of(Block)), vectors(2))
    finally:
        handle.remove()


# ---------------------------------------------------------------------- compile_blocks


def test_blocks_with_experts_are_compiled_without_them() -> None:
    net = CASES["experts/mixture"].make().net
    names = compile_blocks(net, backend="aot_eager")
    assert names
    assert not any("expert" in name for name in names)
    assert [name for name, module in net.named_modules() if is_compiled(module)] == names
    assert compile_blocks(net, backend="aot_eager") == names, "once more, nothing is compiled again"


def test_compile_blocks_compiles_the_outermost_blocks() -> None:
    assert compile_blocks(Stack()) == [f"blocks.{index}" for index in range(5)]


def test_compile_blocks_without_blocks() -> None:
    with pytest.raises(ValueError, match=r"No repeated blocks found in Linear.*compile\(\)"):
        compile_blocks(nn.Linear(2, 2))
