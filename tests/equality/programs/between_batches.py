"""Hooks between two batches without training, and code within such a batch: the weights that they touch are uploaded again."""

from __future__ import annotations

import copy
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch
from lightning.pytorch.callbacks import BasePredictionWriter
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.functional import linear

from sp_lightning.core import messages
from tests.equality.rows import program, tiers
from tests.support.models import vectors
from tests.support.moments import At, each, rebind
from tests.support.runs import Outcome, loader, superpipeline, trainer_for

LAYERS, BATCHES = 6, 5
Six = partial(At, partial(nn.Linear, 16, 16), depth=LAYERS)
HELD = tiers("k=all, k'=1")
EACH = tiers("simulated, k=all", rest=["simulated, k=2, k'=2"])
LOOPS = {"predict": "on_predict_batch_end", "validate": "on_validation_batch_end", "test": "on_test_batch_end"}


def fetched(count: int) -> Callable[[Outcome], None]:
    """Asserts how many layers are uploaded, where all have slots."""

    def also(ours: Outcome) -> None:
        strategy: Any = ours.trainer.strategy
        assert strategy.plan.k in (2, LAYERS)
        if strategy.plan.k == LAYERS:
            assert strategy.stats().fetched_layers == count

    return also


def between(name: str, variants: Any = HELD, *, run: str = "predict", count: int | None = None, **more: Any) -> Any:
    """Code of a hook that runs after each batch."""
    if count is not None:
        more["also"] = fetched(count)
    return program(
        f"between batches: {name}",
        variants,
        at=LOOPS[run],
        run=run,
        batches=lambda: vectors(BATCHES),
        **{"on": Six, **more},
    )


ONCE, AGAIN = LAYERS, LAYERS + BATCHES - 1
"""Uploads if hooks write nothing, and if they write one layer: before each batch but the first."""

# ---------------------------------------------------------------------- hooks that touch no weight


class Transfers(At):
    def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
        return super().transfer_batch_to_device(batch, device, dataloader_idx)


class Writer(BasePredictionWriter):
    def write_on_batch_end(self, *_: Any) -> None: ...


def nothing(m: Any) -> None: ...


for run in LOOPS:
    covers = "hooks that touch no weight cost nothing"
    between(f"nothing after a batch, {run}", run=run, count=ONCE, covers=covers)(nothing)
for name, more in {
    "no hook": {},
    "a transfer of one's own": {"on": partial(Transfers, partial(nn.Linear, 16, 16), depth=LAYERS)},
    "a writer": {"callbacks": lambda: [Writer("batch")]},
}.items():
    program(
        f"between batches: {name}", HELD, run="predict", also=fetched(ONCE), batches=lambda: vectors(BATCHES), covers=covers,
        **{key: value for key, value in more.items() if key != "on"},
    )(more.get("on", Six))  # fmt: skip


@between("reads", count=ONCE)
def _(m: Any) -> None:
    """What loggers compute of weights, and copies."""
    layer = m.net[2]
    m.seen += [layer.weight.norm(), layer.weight.sum().item(), layer.bias.isfinite().all(), layer.weight.clone()]
    m.seen += [layer.weight.shape, layer.weight.requires_grad, layer.weight.grad]
    copy.deepcopy(layer)


# ---------------------------------------------------------------------- hooks that write the third layer


def scale(m: Any) -> None:
    with torch.no_grad():
        m.net[2].weight.mul_(0.5)


def scale_data(m: Any) -> None:
    m.net[2].weight.data.mul_(0.5)


def scale_storage(m: Any) -> None:
    torch.empty(0).set_(m.net[2].bias.untyped_storage(), 0, (16,), (1,)).mul_(0.5)


def scale_array(m: Any) -> None:
    m.net[2].weight.detach().numpy()[:] *= 0.5


def load(m: Any) -> None:
    m.net[2].load_state_dict({name: value * 0.5 for name, value in m.net[2].state_dict().items()})


def step_fused(m: Any) -> None:
    """A fused step changes no version."""
    with torch.inference_mode(False):
        parameters = list(m.net[2].parameters())
        for p in parameters:
            p.grad = torch.ones_like(p)
        torch.optim.Adam(parameters, lr=0.1, fused=True).step()
        for p in parameters:
            p.grad = None


def write_in_thread(m: Any) -> None:
    thread = threading.Thread(target=lambda: scale_data(m))
    thread.start()
    thread.join()


def scale_kept(m: Any) -> None:
    m.kept[0].__imul__(0.5)


def scale_kept_once(m: Any) -> None:
    """The write and the last reference are in one gap, in which no operation gets the parameter."""
    for kept in m.kept:
        kept.mul_(0.5)
    m.kept.clear()


def swap_average(m: Any) -> None:
    for p, other in zip(m.net[2].parameters(), m.kept[0].parameters(), strict=True):
        before = other.data.clone()
        other.data.copy_(p.data)
        p.data.copy_(before)


def halved_twice(layer: Any) -> Any:
    other = copy.deepcopy(layer)
    each(lambda p: p.data.mul_(0.25), of="net")(type("", (), {"net": other}))
    return other


def keeps(what: Callable[[Any], Any]) -> Any:
    """A module that keeps something of the third layer from the start."""
    return partial(Six, on_predict_start=lambda m: m.kept.append(what(m.net[2])))


KEPT: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "data kept": (scale_kept, lambda layer: layer.weight.data),
    "a view kept": (scale_kept, lambda layer: layer.weight.detach()[3:]),
    "an array kept": (scale_kept, lambda layer: layer.weight.detach().numpy()),
    "state kept": (scale_kept, lambda layer: layer.state_dict()["bias"]),
    "an average": (swap_average, halved_twice),
}
covers = "a layer that a hook writes is uploaded again, and no other"
for write in (scale, scale_data, scale_storage, scale_array, load, step_fused, write_in_thread):
    count = None if write is step_fused else AGAIN  # a step may write any layer
    between(f"{write.__name__} of a weight", EACH, count=count, covers=covers)(write)
for name, (through, what) in KEPT.items():
    between(f"writes through {name}", EACH, on=keeps(what), count=AGAIN, covers=covers)(through)
between("memory that is dropped after a write", on=keeps(lambda layer: layer.weight.data), count=ONCE + 1)(
    scale_kept_once
)
between("a weight's other memory", EACH, count=AGAIN, covers=covers)(lambda m: rebind(m.net[2].weight))
for run in ("validate", "test"):
    between(f"writes, {run}", tiers(rest=HELD), run=run, count=AGAIN, covers=covers)(scale_data)
for name in ("data", "data kept", "an average"):
    through, what = KEPT.get(name, (scale_data, nothing))
    more = {"on": keeps(what), "covers": "the rule for residents, and for weights whose casts are uploaded"}
    resident = {"k": LAYERS, "keep_on_gpu": ["net.2"]}
    between(f"writes of a resident, {name}", tiers(rest=HELD), strategy=resident, **more)(through)
    between(f"writes of masters, {name}", tiers(rest=HELD), precision="bf16-mixed", **more)(through)


@between("modules in each other's place", tiers(rest=HELD))
def _(m: Any) -> None:
    """Two layers are exchanged."""
    m.net[0], m.net[1] = m.net[1], m.net[0]


@between("calls of a module", tiers(rest=HELD), count=LAYERS + BATCHES)
def _(m: Any) -> None:
    """They upload no other layer."""
    m.net[2](torch.ones(1, 16))
    scale_data(m)
    m.net[2](torch.ones(1, 16))


@between("a run", tiers(rest=HELD))
def _(m: Any) -> None:
    """It finds ordinary parameters."""
    inner = At(partial(nn.Linear, 16, 16), depth=1)
    inner.net[0] = m.net[2]
    m.seen.append(trainer_for(superpipeline(k=1)).predict(inner, loader(vectors(2))))
    scale_data(m)


class Captures(At):
    """A step gets the host memory of a captured parameter, and writes it after the layer's last use in the step."""

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        memory = self.kept[0].data
        output = super().predict_step(batch, batch_idx)
        memory.mul_(0.5)
        return output


captures = partial(Captures, partial(nn.Linear, 16, 16), depth=LAYERS, init=lambda m: m.kept.append(m.net[2].weight))
between("host memory that a step writes", on=captures, covers=Captures.__doc__)(nothing)
program(
    "between batches: host memory that a step writes, without a hook", HELD, run="predict", batches=lambda: vectors(BATCHES),
    covers="it is uploaded again after the step",
)(captures)  # fmt: skip

for name, hook in (("that write nothing", nothing), ("that write", scale_data)):
    program(
        f"between batches: validations within a training, {name}", tiers(rest=HELD), at="on_validation_batch_end", on=Six,
        validated=True, max_epochs=2, covers="what hooks leave alone is not uploaded again",
    )(hook)  # fmt: skip


def exchange_in_inference(m: Any) -> None:
    """Its writes have no number: an error with a remedy, which works."""
    m.net[2].bias = nn.Parameter(m.net[2].bias * 1.1)


between(
    "a weight made in inference mode", repairable=False,
    refused=dict.fromkeys(HELD, r"RuntimeError: .*'net\.2\.bias' was made in inference mode.*inference_mode\(False\)"),
)(exchange_in_inference)  # fmt: skip
between("a weight made as the error says", covers="the remedy of the error")(
    torch.inference_mode(False)(exchange_in_inference)
)

# ---------------------------------------------------------------------- what is said of memory that is kept


class Within(At):
    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        self.kept.append(self.net[2].weight[:2])
        return super().predict_step(batch, batch_idx)


def gives_memory(m: Any) -> None:
    m.kept.append(torch.zeros_like(m.net[2].weight))
    m.net[2].weight.data = m.kept[-1]


@contextmanager
def logged() -> Iterator[set[str]]:
    """The lines that our run logs once, as a process that has said nothing yet shows them."""
    level = messages.LOG.level
    messages.LOG.setLevel(logging.INFO)
    said = set[str]()
    with mock.patch.object(messages, "_SAID", said):
        yield said
    messages.LOG.setLevel(level)


def says(*lines: str) -> Any:
    """Asserts which lines are logged of memory that is no longer the weight's."""

    def also(ours: Outcome) -> None:
        assert ours.extra["inside"] & {messages.KEPT_VIEW, messages.KEPT_MEMORY} == set(lines)

    return {"also": also, "inside": logged}


within = partial(Within, partial(nn.Linear, 16, 16), depth=LAYERS)
between("a view kept in a step", on=within, covers="a line says it", **says(messages.KEPT_VIEW))(nothing)
between("memory given to a weight", covers="a line says it", **says(messages.KEPT_MEMORY))(gives_memory)
between("a write, of which nothing is said", covers="no line is logged", **says())(scale_data)

# ---------------------------------------------------------------------- within a batch of a prediction with a slot for each layer


WINDOWS = tiers("users, k=all, two epochs", rest=["users, k=1, two epochs"])


class Between(At):
    """Its code runs in the third of five batches, when the third of four layers is to come. ``kept`` is from before the run."""

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        self.batch = batch_idx
        x = self.net[1](self.net[0](batch))
        self.at("between")
        return self.net[3](self.net[2](x)), [each.clone() for each in self.seen]


def rested(ours: Outcome) -> None:
    strategy: Any = ours.trainer.strategy
    if strategy.plan.k == 99:
        assert strategy.stats().fetched_layers <= 2 * len(strategy.plan.layers)


def resting(name: str, also: Callable[[Outcome], None] = rested, **more: Any) -> Any:
    def register(code: Callable[[Any], Any]) -> None:
        program(
            f"prediction: {name}", WINDOWS, on=Between, at="between", run="predict", batches=partial(vectors, 5), also=also,
            covers=code.__doc__ or "", **more,
        )(code)  # fmt: skip

    return register


@resting("a weight written in a batch")
def _(m: Any) -> None:
    """The layer has come, and rests on the device."""
    if m.batch == 2:
        m.net[2].second.weight.add_(1)


@resting("a weight written in a batch, and read without a call")
def _(m: Any) -> None:
    """The read sees the write."""
    if m.batch == 2:
        m.net[2].second.weight.add_(1)
        m.seen.append(linear(torch.ones(1, 16), m.net[2].second.weight))


@resting("a view written in another batch")
def _(m: Any) -> None:
    """The write is to reach the host."""
    if m.batch == 0:
        m.kept.append(m.net[2].second.bias[:])
    if m.batch == 3:
        m.kept[0].add_(1)
    m.seen[:] = [m.net[2].second.bias.clone()]


for dtype in (torch.float32, torch.float64):

    def give(m: Any, dtype: torch.dtype = dtype) -> None:
        """The memory is to reach the host, and to be read from the next batch on."""
        if m.batch == 2:
            m.net[2].second.bias.data = torch.full((16,), 7.0, dtype=dtype)
            m.net[2].second.bias.data = m.net[2].second.bias.data.float()

    resting(f"memory that a weight was given, {dtype}")(give)


for name, around in (("", None), (", by hooks that keep weights", saved_tensors_hooks(lambda t: t, lambda t: t))):

    def differentiates(m: Any, around: Any = around) -> None:
        """A prediction may build graphs, too: what it saves is found wherever its layer is."""
        if around is not None and m.batch == 0:
            m.net[0].second.bias.requires_grad_(False)
        with torch.enable_grad():
            x = vectors(1)[0].requires_grad_()
            if around is None:
                y = m.net(x).sum()
            else:
                with around:
                    y = m.net(x).sum()
        m.net[1].first.weight.data.numel()  # whoever has this may write it, so the layer does not rest any more
        weights = [weight for weight in m.net.parameters() if weight.requires_grad]
        m.seen[:] = torch.autograd.grad(y, [x, *weights])

    resting(f"a graph that is differentiated{name}", also=lambda ours: None, inference_mode=False)(differentiates)
