"""What is predicted is what the engine does: the same events, in the same order."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchvision.models.vision_transformer import VisionTransformer
from transformers import BertConfig, BertForMaskedLM, LlamaConfig, LlamaForCausalLM

from sp_lightning.core.model.find import find_layers
from sp_lightning.core.plan.plan import make_plan
from sp_lightning.tools.planner.dry_run import Work, estimate
from sp_lightning.tools.planner.fake import fake_tensors
from sp_lightning.tools.planner.prediction.simulator import Walk
from sp_lightning.tools.planner.prediction.visits import Prediction, Rates, Visit
from tests.support.engine import Trace, events, step, streamed
from tests.support.planner import schedule_visits
from tests.support.simdevice import SimDevice
from tests.support.tiers import first

SLOW = Rates(upload=1e9, download=1e9, update=1e12, host_memory=1e12)


def of_slots(happened: list[str]) -> list[str]:
    return [each for each in happened if each.split()[0] in ("fetch", "use", "release")]


def engine_events(net: nn.Module, run: Callable[[], Any], *, k: int, k_prime: int, training: bool) -> list[str]:
    """Of three batches."""
    with events() as happened, streamed(net, SimDevice(torch.device("cpu")), k=k, k_prime=k_prime) as engine:
        for batch in range(3):
            quiet = not training and batch > 0
            if training:
                step(engine, run, quiet=quiet)
            else:
                with torch.no_grad():
                    step(engine, run, training=False, quiet=quiet)
        return of_slots(happened)


def walked_events(plan: Any, visits: list[Visit], overlap: Any = "off") -> list[str]:
    with events() as happened:
        walk = Walk(plan, visits, SLOW, overlap=overlap)
        for _ in range(3):
            walk.batch()
        return of_slots(happened)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(("k", "k_prime", "count"), [(1, 1, 5), (2, 1, 7), (2, 2, 6), (3, 2, 9), (9, 1, 5), (1, 3, 8)])
def test_the_order_of_events_is_the_engines(k: int, k_prime: int, count: int, training: bool) -> None:
    net = nn.Sequential(*(nn.Linear(16, 16) for _ in range(count)))
    x = torch.ones(2, 16, requires_grad=True)

    def run() -> None:
        out = net(x)
        if training:
            out.sum().backward()

    plan = make_plan(find_layers(net), k=k, k_prime=k_prime)
    expected = engine_events(net, run, k=k, k_prime=k_prime, training=training)
    assert walked_events(plan, schedule_visits(plan, [1.0] * count, training=training)) == expected


def llama() -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
    config = LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=5, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=512, tie_word_embeddings=True,
    )  # fmt: skip
    ids = torch.zeros(2, 8, dtype=torch.long)
    return LlamaForCausalLM(config), lambda net: net(input_ids=ids, labels=ids, use_cache=False).loss


def bert() -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
    config = BertConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4, vocab_size=512,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    ids = torch.zeros(2, 8, dtype=torch.long)
    return BertForMaskedLM(config), lambda net: net(input_ids=ids, labels=ids).loss


def vit() -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
    net = VisionTransformer(
        image_size=32, patch_size=8, num_layers=4, num_heads=4, hidden_dim=64, mlp_dim=128, num_classes=10
    )
    return net, lambda net: net(torch.ones(2, 3, 32, 32)).square().mean()


def worked(make: Any) -> Work:
    with fake_tensors():
        net, loss = make()
        return estimate(find_layers(net), lambda: loss(net))


@pytest.mark.long("takes a second or more")
@pytest.mark.parametrize(("k", "k_prime"), [(1, 1), (2, 1), (2, 2)])
@pytest.mark.parametrize("make", first([llama, bert, vit], llama, why="other models"))
def test_a_batch_on_paper_gives_the_engines_events(make: Any, k: int, k_prime: int) -> None:
    net, loss = make()
    plan = make_plan(find_layers(net), k=k, k_prime=k_prime)
    expected = engine_events(net, lambda: loss(net).backward(), k=k, k_prime=k_prime, training=True)
    visits = worked(make).visits(flops=1e12, memory=1e11)
    assert walked_events(plan, visits) == expected


def test_what_is_made_on_paper_leaves_torch_as_it_was() -> None:
    theirs = nn.init._no_grad_trunc_normal_
    with pytest.raises(KeyError), fake_tensors():
        raise KeyError
    assert nn.init._no_grad_trunc_normal_ is theirs
    assert type(torch.empty(1)) is Tensor


def test_the_time_of_one_batch_is_predicted() -> None:
    """However many are simulated before it."""
    plan = make_plan(find_layers(nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))), k=2, k_prime=1)
    rates = Rates(upload=math.inf, download=math.inf, update=math.inf, host_memory=math.inf, visit_seconds=0.0)
    visits = schedule_visits(plan, [1.0] * 6, training=True)
    for batches in (1, 3):
        assert Walk(plan, visits, rates).predict(batches=batches).seconds == sum(visit.seconds for visit in visits)


@pytest.mark.parametrize("k_prime", [1, 2])
def test_the_hosts_own_time_is_hidden_under_computing_and_binds_where_that_is_less(k_prime: int) -> None:
    count = 6
    plan = make_plan(find_layers(nn.Sequential(*(nn.Linear(64, 64) for _ in range(count)))), k=2, k_prime=k_prime)
    rates = Rates(math.inf, math.inf, math.inf, math.inf, visit_seconds=1.0, weight_seconds=0.5)
    host = 2 * count * (1.0 + 2 * 0.5)  # a weight and a bias, forward and backward
    visits = (schedule_visits(plan, [each] * count, training=True) for each in (0.01, 10.0))
    short, long = (Walk(plan, each, rates).predict() for each in visits)
    assert short.busy["host"] == long.busy["host"] == pytest.approx(host)
    assert short.binds == "host"
    assert host < short.seconds < host + 1
    assert long.binds == "compute"
    assert (
        long.busy["compute"] < long.seconds < long.busy["compute"] + 4
    )  # before the first work there is nothing to hide it


@pytest.mark.parametrize("training", [True, False])
def test_hundreds_of_layers_that_all_fit_are_not_compared_with_each_other(
    training: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host's time for each stays what it is: an empty slot is the best, whatever is in the others."""
    asked = []
    next_uses = Trace.next_uses

    def counted(self: Any, layer: Any) -> Any:
        asked.append(layer)
        return next_uses(self, layer)

    monkeypatch.setattr(Trace, "next_uses", counted)
    plan = make_plan(find_layers(nn.Sequential(*(nn.Linear(8, 8) for _ in range(200)))), k=200, k_prime=1)
    walk = Walk(plan, schedule_visits(plan, [1e-3] * 200, training=training), SLOW)
    for _ in range(2):
        walk.batch()
    assert 0 < len(asked) < 4 * 2 * 200


# ---------------------------------------------------------------- updates of the host, while backward goes on


@pytest.mark.parametrize("update", [0.5, 1.5, 2.5, 3.0, 3.5])
def test_updates_take_all_the_time_until_the_layers_are_needed(update: float) -> None:
    """Layers of a second of forward and two of backward: updates by next use end with them, if all time is enough.

    Args:
        update: of a layer, in seconds.
    """
    count = 12
    plan = make_plan(find_layers(nn.Sequential(*(nn.Linear(64, 64) for _ in range(count)))), k=99, k_prime=1)
    visits = schedule_visits(plan, [1.0] * count, training=True)
    computes = sum(visit.seconds for visit in visits)
    rate = plan.layers[0].gradient_bytes / update
    rates = Rates(upload=1e15, download=1e15, update=rate, host_memory=1e15)

    def seconds(overlap: Any, *, frees: bool = False) -> float:
        walk = Walk(plan, visits, rates, overlap=overlap, frees=frees)
        for _ in range(6):
            begun = walk.batch()
        return walk.ended - begun

    limit = max(computes, count * update)
    assert limit <= seconds("backward") <= 1.1 * limit + update
    assert seconds("backward") <= seconds("backward", frees=True) + 1e-9
    if count * update > computes / 2:  # more than backward has time for, or the next forward
        assert seconds("backward") < seconds("forward") < seconds("off")


# ---------------------------------------------------------------- steps on the device


def stepped(overlap: Any, rates: Rates) -> Walk:
    plan = make_plan(find_layers(nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))), k=2, k_prime=1)
    walk = Walk(plan, schedule_visits(plan, [1e-4] * 6, training=True), rates, overlap=overlap)
    for _ in range(3):
        walk.batch()
    return walk


def test_what_an_update_on_the_device_needs_passes_the_links() -> None:
    rates = Rates(upload=1e9, download=1e9, update=1e12, host_memory=1e12, update_upload=4.0, update_download=3.0)
    gradients = 6 * (64 * 64 + 64) * 4
    seconds = {}
    for overlap in ("off", "forward", "backward"):
        begun = (walk := stepped(overlap, rates)).ended
        walk.batch()
        seconds[overlap] = walk.ended - begun
        moved = {kind: sum(e.nbytes for e in walk.device.intervals if e.kind == kind) for kind in ("bring", "take")}
        padded = moved["take"] / 3
        assert gradients <= padded < 1.1 * gradients
        assert moved["bring"] == 4 * padded
        assert seconds[overlap] >= moved["bring"] / rates.upload
    drained = [each for each in walk.device.intervals if each.kind == "drain" and each.nbytes]
    assert not drained, "in backward gradients of layers stay"
    assert seconds["forward"] <= seconds["off"]
    assert seconds["backward"] <= seconds["off"]


def test_what_a_step_has_just_cast_is_not_fetched() -> None:
    """A forward that waits for updates finds their casts on the device."""
    net = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))
    plan = make_plan(find_layers(net, autocast=torch.bfloat16), k=2, k_prime=1)
    rates = Rates(upload=3e8, download=3e8, update=1e15, host_memory=1e12, update_upload=4.0, update_download=3.0)

    def fetched(overlap: Any) -> int:
        walk = Walk(plan, schedule_visits(plan, [1e-4] * 6, training=True), rates, overlap=overlap)
        for _ in range(3):
            walk.batch()
        end = max(e.end for e in walk.device.intervals if e.kind == "forward")
        return sum(e.nbytes for e in walk.device.intervals if e.kind == "fetch" and e.begin < end)

    assert fetched("off") == sum(layer.nbytes for layer in plan.layers)
    assert fetched("forward") == 0


# ---------------------------------------------------------------- layers that stay on the device

COUNT, KERNELS = 12, 0.1  # layers, and seconds of the step of one that stays


def staying(
    stay: int, overlap: Any, *, upload: float = 1e15, update: float = 1.5, places: bool = False, python: float = 0.0
) -> Prediction:
    """A second of forward and two of backward for each layer, ``update`` seconds of the host for one that does not stay.

    ``places``: the device steps those, too.
    """
    net = nn.Sequential(*(nn.Linear(64, 64) for _ in range(COUNT)))
    plan = make_plan(find_layers(net, gpu_layers=stay), k=2, k_prime=1)
    size = 64 * 65 * 4 + 128  # with alignment
    there = {"update_upload": 4.0, "update_download": 3.0} if places else {}
    rates = Rates(
        upload,
        upload,
        size / (KERNELS if places else update),
        1e15,
        visit_seconds=python,
        step=64 * 65 * 4 / KERNELS,
        **there,
    )
    moving = schedule_visits(plan, [1.0] * (COUNT - stay), training=True)
    # Those that stay are the first in forward, and the last in backward.
    first, last = [Visit((), 1.0)] * stay, [Visit((), 2.0, backward=True)] * stay
    return Walk(plan, [*first, *moving, *last], rates, overlap=overlap).predict()


@pytest.mark.parametrize("places", [False, True])
@pytest.mark.parametrize("upload", [1e15, 3e4])
@pytest.mark.parametrize("overlap", ["off", "forward", "backward"])
def test_the_more_layers_stay_the_faster_up_to_what_plain_lightning_takes(
    overlap: Any, upload: float, places: bool
) -> None:
    """Each step of one that stays takes its kernels' time, after backward; what the host's take beyond that is saved."""
    found = [staying(stay, overlap, upload=upload, places=places) for stay in (0, 3, 6, 9, COUNT)]
    seconds = [each.seconds for each in found]
    plain = COUNT * (3.0 + KERNELS)
    assert seconds[-1] == pytest.approx(plain)
    for less, more in pairwise(seconds):
        assert more <= less + 3 * KERNELS + 1e-9
    moved = [sum(e.nbytes for e in each.intervals if e.kind != "update") for each in found]
    assert moved == sorted(moved, reverse=True)
    assert moved[-1] == 0, "nothing passes the link"
    assert found[2].busy["gpu steps"] == pytest.approx(6 * KERNELS)
    assert "gpu steps" not in found[0].busy
    if not places:
        assert [each.busy["optimizer"] for each in found] == pytest.approx(
            [1.5 * n for n in (12, 9, 6, 3, 0)], rel=0.02
        )


def test_steps_of_layers_that_stay_begin_when_backward_is_over() -> None:
    """A norm of all gradients is known then."""
    for overlap in ("off", "forward", "backward"):
        intervals = staying(6, overlap).intervals
        (step,) = [each for each in intervals if each.kind == "update" and each.layer is None]
        over = max(each.end for each in intervals if each.kind == "backward")
        assert step.begin >= over - 1e-9
        assert step.end - step.begin == pytest.approx(6 * KERNELS)
