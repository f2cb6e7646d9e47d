"""``plan --devices N --nodes M``: what several devices of one node have together, what each has for itself, and each node."""

from __future__ import annotations

import re
from typing import Any

import pytest

from sp_lightning.__main__ import main
from sp_lightning.planner.arguments import make_parser
from tests.support.answers import plan
from tests.support.tiers import some

DEVICES = 4
MODEL = ("vit_b_16", "--batch-size", "2", "--k", "1", "--k-prime", "1", "--precision", "32-true")
WEIGHTS = 4 * 86_567_656
GIGA = 1e9


def answers(
    capsys: pytest.CaptureFixture[str], *arguments: str, of_several: tuple[str, ...] = ()
) -> tuple[dict[str, Any], dict[str, Any]]:
    """For one device and for several, with the arguments that count with several alone."""
    one = plan(capsys, *MODEL, *arguments)
    return one, plan(capsys, *MODEL, *arguments, "--devices", str(DEVICES), *of_several)


@pytest.mark.rest("models of billions of parameters")
def test_the_node_has_weights_gradients_and_state_once_and_activations_for_each(
    capsys: pytest.CaptureFixture[str],
) -> None:
    one, several = answers(capsys, "--activations", "offload")
    assert one["host_bytes"] == pytest.approx(4 * WEIGHTS + one["offloaded_bytes"], rel=1e-3)
    assert several["host_bytes"] - one["host_bytes"] == (DEVICES - 1) * one["offloaded_bytes"]


@pytest.mark.long("plans of a whole model")
def test_gradients_of_several_devices_are_as_wide_as_parameters(capsys: pytest.CaptureFixture[str]) -> None:
    one, several = (plan(capsys, *MODEL[:-1], "bf16-mixed", *more) for more in ((), ("--devices", str(DEVICES))))
    casts = several["host_bytes"] - 4 * WEIGHTS
    assert casts > WEIGHTS / 4
    assert several["host_bytes"] - one["host_bytes"] == pytest.approx(casts, rel=0.02), (
        "half of these weights' gradients"
    )
    (window,) = several["windows"][:1]
    sent = (WEIGHTS - casts) * (DEVICES - 1) / DEVICES
    assert window["busy_seconds"]["links"] == pytest.approx(sent / (200 * GIGA), rel=0.01), (
        "between devices they are narrow"
    )


@pytest.mark.rest("two plans of a whole model; the first tier has one of them")
def test_each_device_fetches_all_and_sends_a_part(capsys: pytest.CaptureFixture[str]) -> None:
    plans = answers(capsys, "--host-bandwidth", "1000", "--pcie", "5", of_several=("--links", "10"))
    one, several = (each["windows"][0] for each in plans)
    assert several["busy_seconds"]["fetch"] == one["busy_seconds"]["fetch"]
    assert several["busy_seconds"]["compute"] == one["busy_seconds"]["compute"]
    assert several["busy_seconds"]["optimizer"] == one["busy_seconds"]["optimizer"]
    assert several["busy_seconds"]["drain"] == pytest.approx(one["busy_seconds"]["drain"] / DEVICES, rel=1e-3)
    assert one["busy_seconds"]["links"] == 0
    sent = WEIGHTS * (DEVICES - 1) / DEVICES
    assert several["busy_seconds"]["links"] == pytest.approx(sent / (10 * GIGA), rel=1e-3)
    copied = (several["busy_seconds"]["fetch"] + several["busy_seconds"]["drain"]) * 5
    once = (one["busy_seconds"]["fetch"] + one["busy_seconds"]["drain"]) * 5
    more = several["busy_seconds"]["host memory"] - one["busy_seconds"]["host memory"]
    assert more == pytest.approx((DEVICES * copied - once) / 1000, rel=1e-3)


@pytest.mark.rest("two plans of a whole model; the first tier has one of them")
def test_a_device_has_room_for_what_is_sent_and_received(capsys: pytest.CaptureFixture[str]) -> None:
    one, several = answers(capsys)
    largest = max(layer["bytes"] for layer in one["layers"])
    more = several["windows"][0]["device_bytes"] - one["windows"][0]["device_bytes"]
    assert 2 * (2 + 1 / DEVICES) * largest <= more < 4 * 2 * largest


@pytest.mark.rest("two plans of a whole model; the first tier has one of them")
@pytest.mark.parametrize(
    ("slow", "binds"),
    [("--links", "links"), ("--pcie", "fetch"), ("--host-bandwidth", "host memory"), ("--tflops", "compute")],
)
def test_what_is_slow_binds(slow: str, binds: str, capsys: pytest.CaptureFixture[str]) -> None:
    fast = {
        "--links": "1e3",
        "--pcie": "1e3",
        "--host-bandwidth": "1e5",
        "--tflops": "1e4",
        "--device-bandwidth": "1e6",
    }
    rates = [each for pair in {**fast, slow: "0.01"}.items() for each in pair]
    found = plan(capsys, *MODEL, *rates, "--devices", str(DEVICES))
    assert found["windows"][0]["binds"] == binds
    assert found["windows"][0]["seconds"] >= found["windows"][0]["busy_seconds"][binds]


def test_the_text_says_what_is_assumed(capsys: pytest.CaptureFixture[str]) -> None:
    main(["plan", *MODEL, "--devices", str(DEVICES), "--links", "77"])
    text = capsys.readouterr().out
    assert f"on each of {DEVICES} devices" in text
    assert "host memory of the node" in text
    assert "77 GB/s from each device to the others (--links)" in text
    assert f"SuperpipelineStrategy(k=1, k_prime=1) in Trainer(devices={DEVICES})" in text


@pytest.mark.rest("two plans of a whole model; the first tier has one of them")
def test_updates_in_backward_keep_few_gradients(capsys: pytest.CaptureFixture[str]) -> None:
    late, early = (
        plan(capsys, *MODEL, "--devices", "2", "--optimizer-overlap", each) for each in ("forward", "backward")
    )
    assert 0.6 * WEIGHTS < late["host_bytes"] - early["host_bytes"] < WEIGHTS


# ---------------------------------------------------------------------- nodes

NODES = 4


@pytest.mark.rest("two plans of a whole model; the first tier has one of them")
@pytest.mark.parametrize(
    ("precision", "wide"), some([("32-true", 1), ("bf16-true", 2)], ("bf16-true", 2), why="the same, half as wide")
)
def test_each_node_sends_its_sums_over_the_network(
    precision: str, wide: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Everything else is as on one node; sums of 16 bits travel in float32."""
    options = ("--precision", precision, "--devices", str(DEVICES))
    one, several = (
        plan(capsys, *MODEL, *options, *more) for more in ((), ("--nodes", str(NODES), "--network", "2GB/s"))
    )
    assert several["host_bytes"] == one["host_bytes"]
    busy, alone = (each["windows"][0]["busy_seconds"] for each in (several, one))
    sent = 2 * (NODES - 1) / NODES * WEIGHTS  # in float32, whatever the precision
    assert busy["network"] == pytest.approx(sent / (2 * GIGA), rel=0.01)
    assert "network" not in alone
    assert {name: seconds for name, seconds in busy.items() if name != "network"} == pytest.approx(alone, rel=1e-6)
    more = several["windows"][0]["device_bytes"] - one["windows"][0]["device_bytes"]
    largest = max(layer["bytes"] for layer in one["layers"])
    assert 2 * wide * (1 + 1 / NODES) * largest / DEVICES <= more < 4 * 3 * wide * largest / DEVICES


@pytest.mark.rest("two plans of a whole model; the first tier has one of them")
def test_a_second_node_is_compared_with_one_that_is_alone(capsys: pytest.CaptureFixture[str]) -> None:
    """Alone it has gradients half as wide; it was said to take as long as one that sends them over a network."""
    options = (*MODEL[:-1], "bf16-mixed", "--host-bandwidth", "5")
    alone = plan(capsys, *options)["windows"][0]["seconds"]
    main(["plan", *options, "--nodes", "2", "--network", "2GB/s"])
    assert f"nodes: one takes {alone:.3g} s per batch" in capsys.readouterr().out


@pytest.mark.long("plans of a whole model")
def test_a_second_node_pays_if_the_network_is_fast(capsys: pytest.CaptureFixture[str]) -> None:
    said = {}
    for network in ("0.001", "1e6"):
        main(["plan", *MODEL, "--nodes", "2", "--network", network, "--verbose"])
        said[network] = capsys.readouterr().out
    (gain,) = re.findall(r"compared with it, 2 train (\S+) times as many samples", said["0.001"])
    assert float(gain) < 1, "it does not pay"
    assert "  network ◀" in said["0.001"]
    assert "faster --network" in said["0.001"]
    assert "2 train 2 times as many samples\n" in said["1e6"]
    assert "network ◀" not in said["1e6"]
    for text in said.values():
        assert "images of 224 × 224 on each of 2 nodes" in text
        assert "host memory of each node" in text
        assert "in Trainer(devices=1, num_nodes=2)" in text


@pytest.mark.parametrize(
    ("text", "rate"),
    [("25", 25e9), ("25GB/s", 25e9), ("200Gb/s", 25e9), ("200 Gbit/s", 25e9), ("100Gbps", 12.5e9), ("800Mb/s", 0.1e9)],
)
def test_rates_are_in_bytes_or_in_bits_as_networks_are_sold(text: str, rate: float) -> None:
    question = make_parser().parse_args(["plan", "vit_b_16", "--network", text, "--links", text])
    assert question.network == rate
    assert question.links == rate


@pytest.mark.parametrize("text", ["fast", "0Gb/s", "25Gx/s", "1.2.3Gb/s"])
def test_what_is_no_rate_is_refused_with_an_example(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["plan", "vit_b_16", "--network", text])
    assert "200Gb/s" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "several"),
    [(("--links", "50GB/s"), "devices"), (("--network", "100Gb/s"), "nodes")],
)
def test_what_counts_with_several_alone_is_refused_for_one(
    given: tuple[str, ...], several: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as raised:
        main(["plan", "resnet18", *given])
    assert raised.value.code == 2
    assert f"{given[0]} needs --{several} 2 or more" in capsys.readouterr().err
    main(["plan", "resnet18", *given, f"--{several}", "2"])
    assert "The fastest" in capsys.readouterr().out
