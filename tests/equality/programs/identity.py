"""Code that depends on the identity of weights: dictionaries, copies, exchanged tensors, and files that detect shared memory.

In a step modules hold other parameters than between steps, and all weights of a layer share memory.
"""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import load_model, save_file, save_model
from torch import nn
from torch.utils import swap_tensors

from tests.equality.rows import Streamed, Tiers, loop, program, tiers
from tests.support.models import vectors
from tests.support.moments import At, Code, Linears

USERS = tiers("users, k=1", rest=["users, k=1, simulated", "users, k=1, bf16-mixed", "off, 2 stay, simulated"])
"""With steps in the background in the last but one."""
STREAMED = {name: tier for name, tier in USERS.items() if "stay" not in name}
"""For code that joins weights with copies in CPU memory: no layer stays on the GPU."""
FORWARD = tiers(rest=["forward, accumulated, clipped, two epochs"])
FUSED = {**FORWARD, "backward, two epochs": 2}


def identity(name: str, variants: Tiers, **more: Any) -> Any:
    return program(f"identity: {name}", variants, **{"batches": partial(vectors, 4), **more})


def numbered(m: Any) -> dict[int, int]:
    """The number of each parameter, by its identity."""
    return {id(p): number for number, p in enumerate(m.parameters())}


# ---------------------------------------------------------------------- optimizers


class Momentum(At):
    """Its optimizer has momentum of the user's."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def own_momentum(m: Any) -> None:
    """As insightface's PartialFC does it."""
    for p in m.parameters():
        m.optimizers().state[p]["momentum_buffer"] = torch.full_like(p, 0.1)


def own_parameters(m: Any) -> None:
    m.optimizer.param_groups[0]["params"] = list(m.parameters())
    own_momentum(m)


def looks_at_optimizer(m: Any) -> None:
    numbers = numbered(m)
    m.seen.append([numbers[id(p)] for p in (*m.optimizer.state, *m.optimizer.param_groups[0]["params"])])
    m.seen.append(copy.deepcopy(m.optimizer.state_dict()))


def and_saves(put: Code) -> Code:
    return lambda m: (put(m), m.seen.append(copy.deepcopy(m.optimizer.state_dict())))


for put in (own_momentum, own_parameters):
    for manual in (False, True):
        identity(
            f"{put.__name__} put into an optimizer in a step{', manual' * manual}", USERS if manual else {**USERS, **FUSED},
            covers="state_dict() finds weights by identity: the next checkpoint raised a KeyError",
        )(partial(Momentum, manual=manual, start=and_saves(put), on_train_batch_end=looks_at_optimizer))  # fmt: skip
identity(
    "state put into an optimizer between forward and backward", {**USERS, **FUSED}, accumulate_grad_batches=2,
    covers="the next checkpoint is saved before the next step",
)(partial(Momentum, after_forward=own_momentum, on_train_batch_end=looks_at_optimizer))  # fmt: skip


class Views(At):
    """Puts views of one tensor into the optimizer, and reads that tensor later. Or clones, as the error says."""

    def __init__(self, *, clones: bool = False) -> None:
        super().__init__(start=self.put)
        self.clones = clones

    def put(self, m: Any) -> None:
        weight = self.net[0].first.weight  # type: ignore[index, union-attr]
        self.kept.append(torch.zeros(2, *weight.shape, device=weight.device) + 0 * weight.detach())
        state: Any = self.optimizers().state[weight]  # type: ignore[union-attr]
        state["momentum_buffer"] = self.kept[-1][0].clone() if self.clones else self.kept[-1][0]
        self.seen.append(self.kept[0].clone())

    configure_optimizers = Momentum.configure_optimizers


VIEWS = r"RuntimeError: optimizer\.state of 'net\.0\.first\.weight' was given a tensor 'momentum_buffer' .*value\.clone"
identity(
    "a view put into an optimizer in a step", tiers("users, k=1", rest=["users, k=1, simulated"]),
    refused={"users, k=1, simulated": VIEWS}, repairable=False, covers="the optimizer would write other memory",
)(Views)  # fmt: skip
identity("a clone put into an optimizer in a step", USERS, covers="the remedy that the error names")(
    partial(Views, clones=True)
)

# ---------------------------------------------------------------------- dictionaries of the user


def fills(m: Any) -> None:
    m.kept.append({p: number for number, p in enumerate(m.parameters())})


def finds(m: Any) -> None:
    for each in m.kept:
        m.seen.append([each.get(p) for p in m.parameters()])
        m.seen.append([p in set(each) for p in m.parameters()])


def fills_and_finds(m: Any) -> None:
    fills(m)
    finds(m)


def renews_a_bias(m: Any) -> None:
    """The engine is built again, with other device parameters."""
    finds(m)
    if m.batch == 1:
        m.net[3].second.bias = nn.Parameter(m.net[3].second.bias.detach().clone())
    if m.batch == 2:
        m.optimizer.add_param_group({"params": [m.net[3].second.bias]})


identity("dictionaries filled in steps", USERS, covers="they are read in steps and between")(
    partial(At, start=fills_and_finds, on_train_batch_end=finds)
)
identity("dictionaries filled between steps", USERS, covers="they are read in steps and between")(
    partial(At, start=finds, on_train_batch_end=fills_and_finds)
)
identity(
    "dictionaries filled in steps before a weight was exchanged", USERS, covers="two device parameters are one weight"
)(partial(At, after_forward=fills, start=finds, on_train_batch_end=renews_a_bias))

# ---------------------------------------------------------------------- copies


def trains_a_copy(m: Any) -> None:
    net, optimizer = copy.deepcopy((m.net, m.optimizer))
    net(torch.ones(2, 16)).square().mean().backward()
    optimizer.step()
    m.seen.append([p.detach().clone() for p in net.parameters()])


def copies_captured(m: Any) -> None:
    with torch.no_grad():
        m.net[1].first.weight.mul_(0.9)
    m.seen.append([p.detach().clone() for p in copy.deepcopy((m.kept[0], list(m.parameters())))[0]])


for moment in ("start", "on_train_batch_end"):
    identity(f"a module copied with its optimizer, {moment}", STREAMED, covers="the copied optimizer steps the copy")(
        partial(At, **{moment: trains_a_copy})
    )
    identity(f"captured weights copied after a write, {moment}", USERS, covers="a copy has the present values")(
        partial(At, init=lambda m: m.kept.append(list(m.net.parameters())), **{moment: copies_captured})
    )

# ---------------------------------------------------------------------- torch.utils.swap_tensors


def averages(m: Any) -> None:
    m.kept.append(copy.deepcopy(m.net))
    m.kept.append(list(m.net.parameters()))


def swaps(m: Any) -> None:
    for average, p in zip(m.kept[0].parameters(), m.net.parameters(), strict=True):
        swap_tensors(average, p)


def swaps_captured(m: Any) -> None:
    for average, p in zip(m.kept[0].parameters(), m.kept[1], strict=True):
        swap_tensors(p, average)


@torch.no_grad()
def exchanges(m: Any) -> None:
    """What the error says to write."""
    for a, b in zip(m.kept[0].parameters(), m.net.parameters(), strict=True):
        kept = a.clone()
        a.copy_(b)
        b.copy_(kept)


def samples(swap: Code) -> Code:
    """A sample of the averages."""

    def code(m: Any) -> None:
        swap(m)
        with torch.no_grad():
            m.seen.append(m.net(torch.ones(1, 16)))
        swap(m)
        m.seen.append([p.detach().clone() for p in (*m.kept[0].parameters(), *m.net.parameters())])
        assert all(type(p) is nn.Parameter for p in m.kept[0].parameters())

    return code


def stays_swapped(m: Any) -> None:
    swaps(m)
    m.seen.append([p.detach().clone() for p in m.kept[0].parameters()])


BETWEEN = ("on_train_batch_start", "on_train_batch_end", "on_before_optimizer_step", "on_after_backward")
for moment in BETWEEN:
    identity(
        f"swap_tensors and back, {moment}", {**STREAMED, **FORWARD, "stays: net": 2}, covers="weak references of ours refused it",
    )(partial(At, init=averages, **{moment: samples(swaps)}))  # fmt: skip
    identity(
        f"swap_tensors, {moment}", {**STREAMED, **FORWARD, "stays: net": 2}, covers="versions change with the tensor"
    )(partial(At, init=averages, **{moment: stays_swapped}))
SWAPPED = r"RuntimeError: torch\.utils\.swap_tensors was called for 'net\.\d\.first\.weight' inside a step, .*kept = a\.clone\(\)"
for name, swap in (("swap_tensors", swaps), ("swap_tensors of captured weights", swaps_captured)):
    for moment in ("start", "after_forward"):
        identity(
            f"{name} in a step, {moment}", USERS, refused=dict.fromkeys(USERS, SWAPPED), repairable=False,
            covers="a device parameter is a view of memory that other layers get",
        )(partial(At, init=averages, **{moment: swap}))  # fmt: skip
identity("values exchanged in a step", STREAMED, covers="the remedy that the error names")(
    partial(At, init=averages, start=samples(exchanges))
)


@loop(
    "identity: swap_tensors in a loop",
    tiers("keep, k=1", rest=["keep, k=1, simulated", "forward, 32-true, two epochs"]),
)
def _(streamed: Streamed) -> Any:
    """Of trained and frozen weights, after which the version of a weight may be the same by chance."""
    net = nn.Sequential(*(Linears() for _ in range(4)))
    net[0].requires_grad_(False)
    optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.1)
    average, seen = copy.deepcopy(net), []
    with streamed(net, optimizer):
        for batch in vectors(4):
            loss = net(batch).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            for a, b in zip(average.parameters(), net.parameters(), strict=True):
                swap_tensors(a, b)
            seen.append(loss.detach())
    return seen, net.state_dict(), average.state_dict()


# ---------------------------------------------------------------------- safetensors


class Tied(At):
    def __init__(self, **moments: Any) -> None:
        super().__init__(**moments)
        self.net[3].second.weight = self.net[0].first.weight  # type: ignore[union-attr]


def saves(how: str, m: Any) -> None:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "net.safetensors"
        if how == "save_model":
            save_model(m, str(path))
            m.seen.append(list(path.read_bytes()))
        else:  # what the error says
            save_file({name: value.clone() for name, value in m.state_dict().items()}, path)
            read = At()
            load_model(read, path)
            m.seen.append(read.state_dict())


SAVED = r"RuntimeError: safetensors\.torch\.save_model was called inside a step, .*save_file"
for make in (At, Tied):
    tied = "tied weights, " * (make is Tied)
    for moment in BETWEEN:
        identity(f"save_model, {tied}{moment}", USERS, covers="between steps each weight has a storage of its own")(
            partial(make, **{moment: partial(saves, "save_model")})
        )
    for moment in ("start", "after_forward"):
        identity(
            f"save_model in a step, {tied}{moment}", USERS, refused=dict.fromkeys(USERS, SAVED), repairable=False,
            covers="it compares the memory of weights with their storage",
        )(partial(make, **{moment: partial(saves, "save_model")}))  # fmt: skip
        identity(f"copies saved in a step, {tied}{moment}", USERS, covers="the remedy that the error names")(
            partial(make, **{moment: partial(saves, "save_file")})
        )
