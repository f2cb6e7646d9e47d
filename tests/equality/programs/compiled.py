"""``torch.compile``: compiled blocks compute with 16-bit casts, as eager blocks do, with as many graphs as on plain Lightning."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch._dynamo
import transformers
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from sp_lightning.core.device.device import Device
from sp_lightning.trainer.compile import compile_blocks
from tests.equality.rows import Tiers, mistake, program, tiers
from tests.equality.training import forget_graphs
from tests.support.models import CheckpointedCalls, Module, Stack, lora, tokens, vectors
from tests.support.nets import Does, Tied
from tests.support.runs import Make, Outcome, loader, superpipeline, trainer_for
from tests.support.simdevice import simulated

LATER = tiers(long=["compiled, k=1"])
SOON = tiers(rest=["compiled, k=1"])
MASTERS = "needs weights in float32"


@contextmanager
def told(why: str, *others: Any) -> Iterator[None]:
    """Our run says once that a graph needs masters, and why; or nothing."""
    with ExitStack() as stack:
        caught = stack.enter_context(warnings.catch_warnings(record=True))
        warnings.simplefilter("always")
        for other in others:
            stack.enter_context(other())
        yield
    said = [str(each.message) for each in caught if MASTERS in str(each.message)]
    assert len(said) == bool(why), said
    assert why in "".join(said)


def same_graphs(ours: Outcome) -> None:
    """Weights that stay on the device are of another class than those that move."""
    strategy: Any = ours.trainer.strategy
    made, plain = ours.extra["graphs"], ours.extra["plain"].extra["graphs"]
    assert plain <= made <= plain * (2 if strategy.plan.stay else 1), "streaming made another graph"
    assert made == strategy.stats().compiled_graphs


def compiled(
    name: str, variants: Tiers = LATER, *, why: str | None = "", others: Any = (), also: Any = None, **more: Any
) -> Callable[[Any], Any]:
    """Registers a program. ``why`` is what our run says of graphs that need masters; None if it may have other graphs."""

    def checks(ours: Outcome) -> None:
        if why == "" and ours.module.trainer.state.fn == "fit":
            same_graphs(ours)
        if also is not None:
            also(ours)

    inside = {} if why is None else {"inside": partial(told, why, *others)}
    return program(f"compiled: {name}", variants, also=checks, **inside, **more)


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


def of(block: Callable[[], nn.Module], kind: type[Module] = Module) -> Make:
    return lambda: kind(Linears(block))


def inside(kind: type[nn.Module]) -> Callable[[Any], Make]:
    """Makes a net of the decorated class around blocks, or a module of it."""
    return lambda made: lambda: made(Linears(kind)) if issubclass(made, Module) else Module(made(kind))


# ---------------------------------------------------------------------- bytes, modes, devices


def moves_casts(ours: Outcome) -> None:
    """Uploads took 1.82 times the bytes of eager blocks, which are half of these weights'."""
    stats, plan = ours.trainer.strategy.stats(), ours.trainer.strategy.plan  # type: ignore[attr-defined]
    assert stats.fetched_bytes == stats.fetched_layers * 16 * 32 * 2 * 2 > 0
    assert stats.offloaded_gradient_bytes == len(vectors()) * 4 * 16 * 32 * 2 * 2
    assert stats.demand_fetches == stats.extra_slots == 0
    assert plan.slot_bytes == 2 * 16 * 32 * 2 * 2


def biases_are_wide(ours: Outcome) -> None:
    """A compiler that fuses the cast of a bias with the addition may leave out the rounding."""
    layer = ours.trainer.strategy.plan.layers[1]  # type: ignore[attr-defined]
    assert [cast.name for cast in layer.casts] == ["net.blocks.0.inner.weight", "net.blocks.0.outer.weight"]
    assert [span.dtype for span in layer.spans] == [torch.float32] * 2


compiled("the bytes of eager blocks", SOON, covers="casts are inputs of graphs", also=moves_casts)(of(Block))
compiled(
    "a stack in every mode", tiers(rest=["compiled, backward"], long=[f"compiled, {each}" for each in (
        "k=1", "validated", "forward", "recompute", "offload")]),
    covers="biases move in float32", also=biases_are_wide, validated=True,
)(lambda: Module(Stack()))  # fmt: skip
for name, make, variant in (
    ("tied weights", lambda: Module(Tied()), "offload"), ("tied weights", lambda: Module(Tied()), "some stay, recompute"),
    ("checkpoints", lambda: Module(CheckpointedCalls(False)), "some stay"),
    ("reentrant checkpoints", lambda: Module(CheckpointedCalls(True)), "recompute"), ("adapters", lora, "some stay"),
):  # fmt: skip
    # Without the dispatch mode that watches operators: under it, ``aot_eager`` runs eagerly.
    compiled(
        f"{name} on the simulated device, {variant}", tiers(long=[f"compiled, {variant}"]),
        others=[partial(simulated, watch=False)], covers="each wait for what a graph takes",
        batches=tokens if make is lora else partial(vectors, 4),
    )(make)  # fmt: skip


def sizes(*sizes: int) -> Any:
    torch.manual_seed(1)
    return [torch.randn(size, 16, requires_grad=True) for size in sizes or (2, 5, 7, 5, 9)]


compiled("sizes that change", batches=sizes, covers="they make no further graphs")(lambda: Module(Stack()))


def compiles(*names: str, make: Make = lambda: Module(Stack()), **options: Any) -> Make:
    """A module of which parts are compiled by hand."""

    def made() -> Any:
        forget_graphs()
        module = make()
        for name in names:
            module.get_submodule(name).compile(backend="aot_eager", **options)
        return module

    return made


def with_wrapper() -> Any:
    module: Any = compiles("net.blocks.2.inner")()
    module.net.blocks[1] = torch.compile(module.net.blocks[1], backend="aot_eager")
    return module


def parts_cast(ours: Outcome) -> None:
    cast = {cast.name for layer in ours.trainer.strategy.plan.layers for cast in layer.casts}  # type: ignore[attr-defined]
    assert {"net.blocks.1._orig_mod.inner.weight", "net.blocks.2.inner.weight", "net.blocks.2.outer.bias"} <= cast


BY_HAND = tiers(long=["users, k=1, bf16-mixed"])
compiled("torch.compile of a block, and of a part of one", BY_HAND, also=parts_cast,
         covers="blocks that users have compiled")(with_wrapper)  # fmt: skip
blocks = [f"net.blocks.{at}" for at in range(5)]
compiled("sizes that are dynamic from the beginning", BY_HAND, batches=sizes, covers="one graph for all sizes")(
    compiles(*blocks, dynamic=True)
)

# ---------------------------------------------------------------------- graphs that need masters


@compiled("a weight that another function reads", SOON, why="another function", of=of)
class Penalised(Block):
    """The other blocks, which use the same graph, get masters as well; so do the next batches."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.inner.weight.square().mean()


@compiled("autocast that is off in a block", why="autocast is off", of=of)
class Precise(Block):
    """A router in float32, as in DeepSeek's models."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            gate = self.inner(x.float()).sigmoid()
        return x + self.outer(gate)


@compiled("a weight that is used twice", why="used twice", of=of)
class Twice(Block):
    """Its gradients are added up in float32."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(super().forward(x))


class Sometimes(Block):
    """Another function reads a weight of some blocks."""

    reads = False

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y + nn.functional.linear(y, (self.inner.weight * 2)[:16]) if self.reads else y


class Later(Module):
    """Its last block needs masters. The others have been called with casts by then, and run again in backward."""

    def __init__(self, *, checkpoints: bool) -> None:
        super().__init__(Linears(Sometimes, 3))
        self.net.blocks[2].reads = True
        self.checkpoints = checkpoints

    def loss(self, batch: Tensor) -> Tensor:
        for block in self.net.blocks:  # type: ignore[union-attr]
            batch = checkpoint(block, batch, use_reentrant=False) if self.checkpoints else block(batch)
        return batch.float().square().mean()


for checkpoints in (True, False):
    compiled(
        f"a later block needs masters, {'checkpoints' if checkpoints else 'recompute'}", why="reads a weight",
        variants=LATER if checkpoints else tiers(long=["compiled, recompute"]), covers="no block before it is changed",
    )(partial(Later, checkpoints=checkpoints))  # fmt: skip

# ---------------------------------------------------------------------- the same graphs

compiled("adapters on a frozen base", batches=tokens, covers="a base of which nothing is trained")(lora)


@compiled("a weight in two graphs", of=of)
class TwiceInTwoGraphs(Block):
    """The gradients of all runs were added up in 16 bits."""

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        torch._dynamo.graph_break()
        return super().forward(x)


@compiled("one graph in a loop", of=of)
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


@compiled("weights under other names", of=of)
class OldWeightNorm(Block):
    """torch._weight_norm reads memory without a call of any function that a class could notice."""

    def __init__(self) -> None:
        super().__init__()
        with warnings.catch_warnings(action="ignore"):
            torch.nn.utils.weight_norm(self.inner)


@compiled("a frozen weight that is used twice", of=of)
class FrozenTwice(Twice):
    """No gradients of it are added up."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(16))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale


class Asking(Block):
    """Asks for what the weight is, which no copy is needed for."""

    def __init__(self) -> None:
        super().__init__()
        self.inner.weight.factor = 0.5  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        weight = self.inner.weight
        if weight.dtype is torch.float32 and weight.shape[0] == len(weight) and not weight.is_cuda:
            x = x * getattr(weight, "factor", 1.0)
        return super().forward(x)


def nothing_is_left(ours: Outcome) -> None:
    """After a call no weight has a cast, or attributes that are not its own."""
    assert ours.module.noted
    for kind, names in ours.module.noted:  # type: ignore[union-attr]
        assert kind != "CompiledStandIn"
        assert not {"_bound_cast", "factor"} & names


@compiled("dtype, shape and attributes", of=inside(Asking), also=nothing_is_left)
class Looks(Module):
    """Blocks that ask for what the weight is."""

    def loss(self, batch: Any) -> Tensor:
        loss = super().loss(batch)
        weights = [block.inner.weight for block in self.net.blocks]  # type: ignore[union-attr]
        self.noted = [(type(each).__name__, set(vars(each))) for each in weights]
        return loss


class Catches(Module):
    def loss(self, batch: Any) -> Tensor:
        try:
            return super().loss(batch)
        except ValueError:
            return super().loss(batch[:2])


@compiled("a call that raises", batches=partial(sizes, 2, 3, 2),
          of=lambda block: of(block, Catches))  # fmt: skip
class Raises(Block):
    """It leaves stand-ins behind."""

    @torch.compiler.disable
    def refuse_three(self, x: Tensor) -> Tensor:
        if x.shape[0] == 3:
            raise ValueError("three")
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self.refuse_three(x + self.outer(torch.tanh(self.inner(x))))


# ---------------------------------------------------------------------- any number of graphs


@compiled(".data between graphs", why=None, of=of)
class Data(Block):
    """It breaks the graph."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + nn.functional.linear(x, self.inner.weight.data)[:, :16]


@compiled("code between two graphs", why=None, of=of)
class EagerInside(Block):
    """Code that is not compiled reads a weight: with the module, and by itself."""

    @torch.compiler.disable
    def eager(self, x: Tensor) -> Tensor:
        return self.outer(x) * self.outer.weight.mean()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.eager(torch.tanh(self.inner(x)))


@compiled("a block without autocast", why=None, of=inside(Block))
class InFloat32(Linears):
    """Neither the hooks of its step nor those of its backward are compiled: dynamo failed in the engine's code."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x)
        with torch.autocast("cpu", enabled=False):
            x = self.blocks[1](x.float())
        return self.blocks[2](x)


@compiled("a master that is on the device already", why=None, of=inside(Block))
class ReadBefore(Module):
    """It is read in float32 before the block is called."""

    def loss(self, batch: Any) -> Tensor:
        penalty = self.net.blocks[1].inner.weight.square().mean()
        return super().loss(batch) + penalty


@compiled("blocks inside a compiled function", why=None, of=inside(Block))
class CallsCompiled(Linears):
    """Compiled code calls compiled blocks."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.compile(super().forward, backend="aot_eager")(x)


class Holds(nn.Module):
    """A block of which only a part is compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.part = Block()

    def forward(self, x: Tensor) -> Tensor:
        return self.part(x)


PARTS = [f"net.blocks.{at}.part" for at in range(4)]


@compiled(
    "a master that was written on the device", BY_HAND, why=None, validated=True, max_epochs=2,
    of=lambda block: compiles(*PARTS, make=of(block)),
)  # fmt: skip
class WritesBefore(Holds):
    """Written in evaluation, before the compiled part reads it."""

    def forward(self, x: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            self.part.inner.weight.mul_(0.5)
        return super().forward(x)


@compiled(
    "a part that is called from outside", BY_HAND, why=None, of=lambda kind: compiles(*PARTS, make=of(Holds, kind))
)
class CallsPart(Module):
    """The block's layer is not uploaded for such a call."""

    def loss(self, batch: Any) -> Tensor:
        return super().loss(self.net.blocks[1].part(batch))


@compiled("a compiled module that calls another one", why="another function", of=of)
class Nested(nn.Module):
    """Between two graphs; then it reads one of its own weights."""

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


class Generates(LightningModule):
    """Generates tokens, with a cache of keys and values."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        config = transformers.LlamaConfig(
            vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=64,
        )  # fmt: skip
        self.net = transformers.LlamaForCausalLM(config).eval()
        self.options = options
        forget_graphs()
        compile_blocks(self.net, backend="aot_eager", dynamic=True)

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        found = self.net.generate(
            batch, max_new_tokens=3, do_sample=False, pad_token_id=0, return_dict_in_generate=True, output_logits=True,
            **self.options,
        )  # fmt: skip
        return found.sequences, torch.stack(found.logits)


def prompts() -> Any:
    return [torch.arange(1, 2 * length + 1).view(2, length) for length in (5, 7)]


def same_graphs_alone(ours: Outcome) -> None:
    assert ours.extra["graphs"] == ours.extra["plain"].extra["graphs"] > 0, "streaming made another graph"


compiled("tokens with a static cache", BY_HAND, run="predict", batches=prompts, why=None, covers="a decoder of blocks",
         also=same_graphs_alone)(partial(Generates, cache_implementation="static"))  # fmt: skip

# ---------------------------------------------------------------------- what changes during a run


def compile_now(trainer: Any, module: Any) -> None:
    compile_blocks(module, backend="aot_eager")


def in_second_epoch(does: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    return lambda trainer, module: does(trainer, module) if trainer.current_epoch == 1 else None


for hook, does in {
    "on_fit_start": compile_now, "on_train_start": compile_now, "on_train_epoch_start": in_second_epoch(compile_now),
}.items():  # fmt: skip
    compiled(
        f"blocks that {hook} compiles", BY_HAND, max_epochs=2, covers="they get other casts",
        callbacks=lambda hook=hook, does=does: [Does(**{hook: does})],
    )(compiles(make=lambda: Module(Stack(16))))  # fmt: skip


def hook_on_one_block(trainer: Any, module: Any) -> None:
    module.net.blocks[1].inner.register_forward_hook(lambda module, args, out: 0.5 * out)


class OwnCall(nn.Linear):
    def __call__(self, *args: Any) -> Any:
        return 2 * super().__call__(*args)


class OwnCallImpl(nn.Linear):
    def _call_impl(self, *args: Any, **kwargs: Any) -> Any:
        return 2 * super()._call_impl(*args, **kwargs)


class OwnForward(nn.Linear):
    """The forward is the object's own. Then the graph has guards on hooks, on plain Lightning as well."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        forward = super().forward
        self.forward = lambda x: 2 * forward(x)  # type: ignore[method-assign, assignment]


def with_inner(kind: type[nn.Linear]) -> nn.Module:
    block = Block()
    block.inner = kind(16, 32, bias=False)
    return block


class Guarded(Module):
    """Graphs have guards on hooks inside them."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__(net)
        torch._dynamo.config.skip_nnmodule_hook_guards = False

    def on_fit_end(self) -> None:
        torch._dynamo.config.skip_nnmodule_hook_guards = True


# By default a graph has no guard on hooks inside it, and one that is registered later has no effect.
for name, kind, made in (
    ("", nn.Linear, Module), (", with guards", nn.Linear, Guarded), (", call", OwnCall, Module), (", impl", OwnCallImpl, Module),
    (", forward", OwnForward, Module),
):  # fmt: skip
    compiled(
        f"a hook inside a block from the second epoch on{name}", max_epochs=2,
        callbacks=lambda: [Does(on_train_epoch_start=in_second_epoch(hook_on_one_block))],
        covers="it takes effect as on plain Lightning, or has none there",
    )(of(partial(with_inner, kind), made))  # fmt: skip


@compiled("a hook of all modules", SOON, of=inside(Block))
class HookedAll(Module):
    """It takes effect inside a compiled block as on plain Lightning."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__(net)
        halve = lambda module, args, out: 0.5 * out if isinstance(module, nn.Linear) else None  # noqa: E731
        self.handle = nn.modules.module.register_module_forward_hook(halve)

    def on_fit_end(self) -> None:
        self.handle.remove()


# ---------------------------------------------------------------------- what users compile: layers, modules, functions


LONG = tiers(long=["keep, k=1"])
REST = tiers(rest=["keep, k=1"])


def anew(make: Callable[[], Any]) -> Callable[[], Any]:
    """Makes a module with nothing compiled before."""

    def made() -> Any:
        torch._dynamo.reset()
        # dynamo's own remarks: on inputs that are no leaves, and on hooks that it leaves out of graphs, as it is told to
        warnings.filterwarnings("ignore", category=UserWarning)
        return make()

    return made


class Text(Stack):
    """With a table, of which only rows travel."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(300, 16)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.table(x[:, 0].abs().mul(50).long() % 300))


def each_layer(module: Any, backend: str) -> Any:
    if backend == "inductor" and shutil.which("g++") is None:
        pytest.skip("inductor needs a compiler for the CPU")
    for layer in module.net.blocks:
        layer.compile(backend=backend)
    return module


def inner_module(module: Any, backend: str) -> Any:
    module.net = torch.compile(module.net, backend=backend)
    return module


def inner_module_in_place(module: Any, backend: str) -> Any:
    module.net.compile(backend=backend)
    return module


def lightning_module(module: Any, backend: str) -> Any:
    return torch.compile(module, backend=backend)


def compiled_by(way: Any, net: Any, backend: str) -> Any:
    return way(Module(net()), backend)


for way, layers, backend in (
    (each_layer, Stack, "aot_eager"), (inner_module, Stack, "aot_eager"), (inner_module_in_place, Text, "aot_eager"),
    (lightning_module, Stack, "aot_eager"), (each_layer, partial(Stack, 2), "inductor"),
):  # fmt: skip
    name = f"compile: {way.__name__.replace('_', ' ')}, {backend}"
    program(name, REST if backend != "inductor" and way is each_layer else LONG, validated=True, covers="a way to compile")(
        anew(partial(compiled_by, way, layers, backend))
    )  # fmt: skip


class WholeGraph(Module):
    """A loss that is one graph and takes the head's weight; a conditional of torch's, whose branches are; bare blocks."""

    def __init__(self, kind: str) -> None:
        super().__init__(nn.Sequential(*[nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4)]))
        self.head, self.kind = nn.Linear(16, 5), kind
        self.criterion = torch.compile(self.error, backend="eager", fullgraph=True) if "loss" in kind else self.error
        if "blocks" in kind:
            for block in self.net.children():
                block.compile(backend="eager", fullgraph="fullgraph" in kind)

    @staticmethod
    def error(hidden: Tensor, weight: Tensor) -> Tensor:
        return (hidden @ weight.T).square().mean()

    def loss(self, batch: Any) -> Tensor:
        hidden = self.net(batch)
        weight = self.head.weight.clone() if "clone" in self.kind else self.head.weight
        if "cond" in self.kind:
            return torch.cond(hidden.sum() > 0, self.error, lambda h, w: (h @ w.T).abs().mean(), (hidden, weight))
        return self.criterion(hidden, weight)


for graph in ("blocks", "blocks, fullgraph", "loss", "loss, clone", "cond", "cond, clone"):
    said_of_graphs = r".*Superpipeline copies weights.*without fullgraph=True.*weight\.clone\(\)"
    program(
        f"compile: a whole graph, {graph}", REST, repairable=False,
        refused=dict.fromkeys(REST, said_of_graphs) if graph in ("loss", "cond") else {},
        covers="dynamo said that it skips a function of ours that is disabled, and that one is to remove that",
    )(anew(partial(WholeGraph, graph)))  # fmt: skip


class Graphs:
    """A backend that notes what is in each graph."""

    def __init__(self) -> None:
        self.seen: list[list[str]] = []

    def __call__(self, graph: Any, inputs: Any) -> Any:
        self.seen.append([node.target.__name__ for node in graph.graph.nodes if node.op == "call_function"])
        return graph.forward


class CompiledOutside(Module):
    """Computes with a network beside the trained one as one graph: in steps and between them."""

    def __init__(self) -> None:
        super().__init__(Stack(2))
        net = nn.Sequential(nn.Linear(16, 16), nn.Sequential(nn.Linear(16, 16), nn.ReLU())).requires_grad_(False)
        self.graphs = Graphs()
        self.judge = [torch.compile(lambda x: net(x), backend=self.graphs, fullgraph=True)]

    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) + self.judge[0](batch).square().mean()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.judge[0](batch)


def goes_on(ours: Any) -> None:
    """The next runs find the same graph."""
    for _ in range(3):
        trainer_for(superpipeline(k=1)).fit(ours.module, loader(vectors(2)))
    assert ours.module.graphs.seen == [["linear", "linear", "relu"]]


program(
    "compile: a graph of another module", LONG, also=goes_on, inside=lambda: torch._dynamo.config.patch(recompile_limit=2),
    covers="each call of any module passes code of ours: it is followed",
)(anew(CompiledOutside))  # fmt: skip


class InOneGraph(Module):
    """A compiled function that calls streamed layers of torch's own classes, and parts that stay on the device."""

    def __init__(self, *, hooked: bool = False) -> None:
        super().__init__(
            nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16)) for _ in range(3))
        )
        self.graphs, self.head = Graphs(), nn.Linear(16, 16)
        self.run = torch.compile(self.layers, backend=self.graphs)
        for block in self.net.children() if hooked else ():
            block.register_forward_hook(torch.compiler.disable(lambda *_: None))

    def layers(self, x: Tensor) -> Tensor:
        for block in self.net.children():
            x = block(x) + 1
        return x

    def loss(self, batch: Any) -> Tensor:
        return self.head(self.run(batch)).square().mean()


def parts_apart(ours: Any) -> None:
    """Or ``activations`` would not count for the second part."""
    assert max([graph.count("linear") for graph in ours.module.graphs.seen], default=0) <= 2, "one graph has two parts"


program("compile: a graph that ends at layers", LONG, covers="as at any hook of a user's")(anew(InOneGraph))
program(
    "compile: a graph that ends at parts that stay", tiers(long=["recompute, k=1"]), strategy={"keep_on_gpu": "net"},
    also=parts_apart, covers="their weights are there, and no upload ends the graph",
)(anew(InOneGraph))  # fmt: skip

# ---------------------------------------------------------------------- CUDA graphs


class Asynchronous(Device):
    """An accelerator, as far as set-up asks."""

    synchronous = False


def with_graphs(way: str) -> None:
    """They are recorded for the addresses of weights, which streaming changes."""
    torch._dynamo.reset()
    module: Any = Module(Stack())
    blocks: Any = module.net.blocks
    if way == "lightning module":
        module = torch.compile(module, mode="reduce-overhead")
    elif way == "layer":
        blocks[2].compile(mode="max-autotune")
    elif way == "function":
        blocks[2].forward = torch.compile(blocks[2].forward, options={"triton.cudagraphs": True})
    else:
        blocks[2] = torch.compile(blocks[2], mode="reduce-overhead")
    with mock.patch("sp_lightning.trainer.run.device_for", Asynchronous):
        trainer_for(superpipeline(k=1)).fit(module, loader(vectors(1)))


for place in ("lightning module", "layer", "function", "inner module"):
    name = "Module" if place == "lightning module" else "net.blocks.2"
    said = f"ValueError: .*'{name}' is compiled with CUDA graphs.*max-autotune-no-cudagraphs"
    mistake(f"compile: CUDA graphs of a {place}", said)(partial(with_graphs, place))
