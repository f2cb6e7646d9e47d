"""Weights written through what somebody has taken within a step and kept: as on plain Lightning, or refused by name.

A view of a plain weight is the weight's memory. Here a view that was taken in a step is device memory, and the optimizer
writes the host's. What was written through such a view after backward was dropped without a word: the engine forgot the slot
as it marked the copies on the device as out of date. WGAN's clipping loop over ``list(self.net.parameters())``, taken in the
first step and run in ``on_train_batch_end``, was lost in the same way.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.engine import step, streamed
from tests.support.models import vectors
from tests.support.moments import At
from tests.support.poison import poisoned
from tests.support.runs import assert_same, fit, fused, superpipeline
from tests.support.simdevice import SimDevice, simulated
from tests.support.tiers import first, some

pytestmark = pytest.mark.usefixtures("everything_is_worth_moving")

TAKE: dict[str, Any] = {
    "data": lambda weights: [w.data for w in weights],
    "detach": lambda weights: [w.detach() for w in weights],
    "view": lambda weights: [w[0] for w in weights],
    "data of a view": lambda weights: [w[0].data for w in weights],
    "parameters": lambda weights: list(weights),
    "data of parameters": lambda weights: list(weights),
    "numpy": lambda weights: [w.detach().numpy() for w in weights],
    "storage": lambda weights: [(w.untyped_storage(), w.storage_offset(), w.shape) for w in weights],
}


def scale(kept: Any, kind: str) -> Any:
    with torch.no_grad():
        for each in kept:
            if kind == "numpy":
                each *= 0.9
            elif kind == "storage":
                torch.empty(0).set_(*each).mul_(0.9)
            else:
                (each.data if kind == "data of parameters" else each).mul_(0.9)


def keeps(kind: str, taken: str, written: str, manual: bool) -> At:
    """Takes weights at one moment of a batch, writes them at another one, and drops them then."""

    def take(m: At) -> None:
        if not m.kept:
            m.kept.append(TAKE[kind]([layer.first.weight for layer in m.net]))

    def write(m: At) -> None:
        if m.kept:
            scale(m.kept.pop(), kind)

    # By moment, what is done there first and second.
    done = {
        "start": ((written == "next batch", write), (taken == "start", take)),
        "after_forward": ((taken == "after forward", take), (written == "before backward", write)),
        "after_backward": ((taken == "after backward", take), (written == "before step", write)),
        "after_step": ((written == "after step", write),),
        "on_train_batch_end": ((written == "batch end", write),),
    }
    moments = {moment: [code for now, code in each if now] for moment, each in done.items()}
    return At(
        manual=manual,
        **{moment: lambda m, codes=codes: [code(m) for code in codes] for moment, codes in moments.items() if codes},
    )


WAYS = {
    f"{kind}, {taken}, {written}, {'manual' if manual else 'automatic'}": (kind, taken, written, manual)
    for kind, taken, written, manual in product(
        TAKE,
        ("start", "after forward", "after backward"),
        ("before backward", "before step", "after step", "batch end", "next batch"),
        (False, True),
    )
    if (manual or written != "after step") and (taken, written) != ("after backward", "before backward")
}
# While a step runs, some writes are not detected (limits.md): those to the .data of a view, numpy's, a storage's, and those of
# the host's weights, which modules hold after backward.
WAYS = {
    name: (kind, taken, written, manual)
    for name, (kind, taken, written, manual) in WAYS.items()
    if not (kind in ("data of a view", "numpy", "storage") and written == "before backward")
    and not (kind == "data of a view" and (taken, written, manual) == ("after backward", "before step", True))
    and not (kind not in ("detach", "view", "parameters") and (taken, written) == ("after backward", "next batch"))
}
FIRST = [
    "data, start, before step, manual",
    "detach, after forward, after step, manual",
    "data, start, batch end, automatic",
    "numpy, start, next batch, automatic",
    "data of parameters, start, batch end, automatic",
]


def judge(way: str, precision: Any, **options: Any) -> None:
    """Bitwise equality with plain Lightning, an error where plain has one, or an error that names the weight."""

    def make() -> At:
        return keeps(*WAYS[way])

    try:
        plain = fit(make, vectors(4), precision=precision)
    except RuntimeError:  # a weight that was written in place before backward
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            fit(make, vectors(4), superpipeline(**options), precision=precision)
        return
    try:
        ours = fit(make, vectors(4), superpipeline(**options), precision=precision)
    except RuntimeError as error:
        assert "Parameter 'net." in str(error)  # noqa: PT017 - equal or refused: both are right
        return
    assert_same(ours, plain)


OPTIONS: list[dict[str, Any]] = [{"k": 1, "k_prime": 1}, {"k": 4, "k_prime": 1}, {"k": 2, "keep_on_gpu": ["net.1"]}]


@pytest.mark.long("takes a second or more")
@pytest.mark.parametrize("way", first(WAYS, *FIRST, second=list(WAYS)[::18], why="the same at other moments"))
def test_writes_of_what_was_kept(way: str) -> None:
    for options in OPTIONS:
        judge(way, "32-true", **options)


@pytest.mark.rest("the same where weights travel as casts")
@pytest.mark.parametrize("way", some(WAYS, *list(WAYS)[4::40], why="the same at other moments"))
def test_in_mixed_precision(way: str) -> None:
    for options in OPTIONS[:2]:
        judge(way, "bf16-mixed", **options)


# After backward modules hold the host's weights, which a device may be reading from the next forward on.
ON_A_DEVICE = [way for way in WAYS if not ("after backward, after step" in way or "after backward, next batch" in way)]


@pytest.mark.long("takes a second or more")
@pytest.mark.parametrize(
    "way",
    first(
        ON_A_DEVICE,
        *FIRST[1:3],
        second=ON_A_DEVICE[::24],
        why="the same at other moments",
    ),
)
def test_on_a_device_of_its_own(way: str) -> None:
    for options in OPTIONS:
        with simulated():
            judge(way, "32-true", **options)


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.parametrize("way", FIRST[:4])
def test_equal_and_not_only_refused(way: str) -> None:
    def make() -> At:
        return keeps(*WAYS[way])

    plain = fit(make, vectors(4))
    for options in OPTIONS:
        assert_same(fit(make, vectors(4), superpipeline(**options)), plain)
    with poisoned():
        assert_same(fit(make, vectors(4), superpipeline(**OPTIONS[0])), plain)


def writes_in_place(through: str) -> At:
    """Weights are written in place after a forward of the same step, which may be going on on a device.

    The write did not wait for the transfers, so the first forward could read weights in the middle of it. Schedule-free
    optimizers' ``train()``, averages that are put back, and evolution strategies write so if they are called in a step.
    """

    def write(m: At) -> None:
        with torch.no_grad():
            m.net(torch.ones(2, 16))
            for p in m.trainer.optimizers[0].param_groups[0]["params"] if through == "optimizer" else m.parameters():
                p.add_(0.01)

    return At(manual=True, start=write)


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("through", ["optimizer", "module"])
def test_the_hosts_weights_are_not_written_while_a_forward_may_read_them(through: str, options: dict[str, Any]) -> None:
    plain = fit(lambda: writes_in_place(through), vectors())
    assert_same(fit(lambda: writes_in_place(through), vectors(), superpipeline(**options)), plain)
    with simulated():
        assert_same(fit(lambda: writes_in_place(through), vectors(), superpipeline(**options)), plain)


def take_once(m: At) -> None:
    if not m.kept:
        m.kept.append(list(m.net.parameters()))


def clip(m: At) -> None:
    """WGAN: weights are taken lazily, in the first step, and clipped after each batch."""
    for p in m.kept[0]:
        p.data.clamp_(-0.1, 0.1)
    torch._foreach_mul_([p.data for p in m.kept[0]], 0.9)
    with torch.no_grad():
        m.kept[0][0].add_(m.kept[0][0].grad)
    assert torch.equal(m.kept[0][0], next(m.net.parameters()))  # it is the weight that modules hold


@pytest.mark.long("takes a second or more")
@pytest.mark.parametrize("precision", first(["32-true", "bf16-mixed"], "32-true", why="the same in mixed precision"))
def test_parameters_that_were_taken_in_a_step_are_the_hosts_between_steps(precision: Any) -> None:
    def make() -> At:
        return At(start=take_once, on_train_batch_end=clip)

    plain = fit(make, vectors(4), precision=precision)
    for options in OPTIONS:
        assert_same(fit(make, vectors(4), superpipeline(**options), precision=precision), plain)
    with simulated():
        assert_same(fit(make, vectors(4), superpipeline(k=1, k_prime=1), precision=precision), plain)


def writes_both(m: At) -> None:
    """The host's weight is written through ``.data``, and a view of the device's that was taken before."""
    if m.kept:
        m.net[1].first.weight.data.add_(0.1)
        scale(m.kept.pop(), "data")


def take_data(m: At) -> None:
    if not m.kept:
        m.kept.append(TAKE["data"]([layer.first.weight for layer in m.net]))


@pytest.mark.parametrize("resident", [[], ["net.1"]])
def test_a_weight_that_is_written_in_both_ways_is_refused(resident: list[str]) -> None:
    with pytest.raises(RuntimeError, match=r"'net\.1\.first\.weight' was written .* on the CPU, and .*kept"):
        fit(
            lambda: At(start=take_data, on_train_batch_end=writes_both),
            vectors(),
            superpipeline(k=1, keep_on_gpu=resident),
        )


@pytest.mark.rest("takes tenths of a second")
def test_a_long_kept_view_follows_its_weight() -> None:
    """It is read in each batch, and never written."""

    def make() -> At:
        return At(
            start=take_data, on_train_batch_end=lambda m: m.seen.append([view.sum().item() for view in m.kept[0]])
        )

    plain = fit(make, vectors(4))
    for options in OPTIONS:
        ours = fit(make, vectors(4), superpipeline(**options))
        assert_same(ours, plain)
        assert ours.module.seen == plain.module.seen


class ReadsAfterStep(At):
    """Reads a view that it took before its own optimizer step, after the step, and after a write of the weight."""

    def __init__(self) -> None:
        super().__init__(manual=True)

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        weights = [self.net[at].first.weight for at in (0, 2)]
        views = TAKE["view"](weights)
        self.manual_backward(self.loss(batch))
        optimizer.step()
        self.seen.append([view.sum().item() for view in views])
        with torch.no_grad():
            self.net[0].first.weight.mul_(0.5)
        self.seen.append([view.sum().item() for view in views])
        optimizer.zero_grad()


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_view_is_read_after_an_optimizer_step_of_user_code(options: dict[str, Any]) -> None:
    """The slots are uploaded again then, and computation has to wait for it."""
    plain = fit(ReadsAfterStep, vectors(4))
    with simulated():
        ours = fit(ReadsAfterStep, vectors(4), superpipeline(**options))
    assert_same(ours, plain)
    assert ours.module.seen == plain.module.seen


def writes_in_backward(kind: str, taken: int, written: int) -> At:
    """Writes a kept view in a hook of the first layer, when backward has updated the last one."""

    def loss(m: At, batch: Tensor) -> Tensor:
        if m.batch == taken:
            m.kept.append(TAKE[kind]([m.net[-1].first.weight]))
        hidden = m.net[0](batch)
        if m.batch == written:
            hidden.register_hook(lambda _: scale(m.kept.pop(), kind))
        return m.net[1:](hidden).square().mean()

    return At(loss=loss)


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.parametrize("frees", [True, False])
@pytest.mark.parametrize(("taken", "written"), [(0, 0), (0, 1)])
@pytest.mark.parametrize("kind", ["data", "detach", "view"])
@pytest.mark.parametrize("k", [1, 4])
def test_views_that_are_written_in_a_backward_that_updates(
    kind: str, k: int, taken: int, written: int, frees: bool
) -> None:
    """The write was lost: the update leaves nothing that may have been written, but a view does not end with it.

    The layer is updated after backward then. Where no hook may read gradients after the step, they are freed in backward, so that
    the layer cannot be updated later, and the write is an error.
    """

    def run(strategy: Any) -> Any:
        make = fused(lambda: writes_in_backward(kind, taken, written))
        return fit(make, vectors(4), strategy, recorded="nothing" if frees else "losses")

    ours = superpipeline(k=k, k_prime=1, optimizer_overlap="backward")
    if frees:
        with pytest.raises(RuntimeError, match=r"'net\.3\.first\.weight' was written|modified by an inplace operation"):
            run(ours)
    else:
        assert_same(run(ours), run("auto"))


def gives_a_neighbour_memory(kind: str, written: str) -> At:
    """Keeps a view of one weight, gives another one of the layer other memory in the same step, and writes the view."""

    def give(m: At) -> None:
        if m.batch == 1:
            one, other = m.net[1].first.weight, m.net[1].second.weight
            m.kept.append(TAKE[kind]([other]))
            one.data = one.data * 0.5

    return At(start=give, **{written: lambda m: m.kept and scale(m.kept.pop(), kind)})


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("written", ["after_backward", "on_train_batch_end"])
@pytest.mark.parametrize("kind", ["data", "detach"])
def test_a_view_whose_layer_has_left_its_memory_is_not_written(
    kind: str, written: str, options: dict[str, Any]
) -> None:
    """The layer leaves its slot as one of its weights is given other memory; a write to the slot was lost."""
    with pytest.raises(RuntimeError, match=r"Parameter 'net\.1\.second\.weight' was written through an old view"):
        fit(lambda: gives_a_neighbour_memory(kind, written), vectors(4), superpipeline(**options))


def test_an_extra_slot_is_not_freed_while_a_layer_comes_to_it() -> None:
    """A view had the layer fetched again, and was dropped before compute had waited for that: its memory was free too early."""
    net = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    with streamed(net, SimDevice(torch.device("cpu")), k=1, k_prime=1) as streamer:
        views = list[Any]()
        step(streamer, lambda: views.extend(layer.weight.data for layer in net))
        slots = streamer._slots
        extra = next(slot for slot in slots.all if slot.extra and slot.layer is not None)
        layer: Any = extra.layer
        slots.fetch([(layer, extra, streamer._source.stage(layer))])
        views.clear()
        slots.give_back_extra()
        assert extra not in slots.all
