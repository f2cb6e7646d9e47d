"""The parts of an answer add up: none is negative, none counts twice, and text and parts agree."""

from __future__ import annotations

import re
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from sp_lightning.core.plan.units import parse_bytes
from sp_lightning.tools.planner import dry_run
from sp_lightning.tools.planner.answer import Answer, answer
from sp_lightning.tools.planner.arguments import Question, make_parser
from sp_lightning.tools.planner.estimate import Estimate, estimate_model
from sp_lightning.tools.planner.prediction.visits import RESOURCES
from sp_lightning.tools.planner.report import as_text
from tests.support.planner import plan
from tests.support.tiers import first

WIDE = ("tests.planner.models:Wide", "--k", "1", "--k-prime", "1")
SHAPES = Path(__file__).parents[2] / "examples" / "shapes"
LIMITS: dict[str, dict[str, Any]] = {
    "none": {},
    "gpu": {"gpu_memory": 22 * 2**30},
    "both": {"gpu_memory": 22 * 2**30, "host_memory": 250 * 2**30},
    "small": {"gpu_memory": 6 * 2**30, "host_memory": 62 * 2**30},
    "disk": {"gpu_memory": 22 * 2**30, "host_memory": 30 * 2**30, "disk": 7e9},
    "stay": {"gpu_memory": 22 * 2**30, "gpu_layers": "auto"},
    "offload": {"activations": "offload"},
    "recompute": {"activations": "recompute"},
    "accumulated": {"accumulate_grad_batches": 2, "precision": "bf16-mixed"},
    "devices": {"devices": 2, "activations": "offload", "optimizer_overlap": "forward"},
}
MODELS: list[Any] = [
    ("llama-3.2-3b.json",), ("llama-3-70b.json",), ("gpt-oss-20b.json", "--lora", "16"), ("glm-4.5-air.json", "--lora", "8"),
    ("mixtral-8x7b.json",), ("qwen3-30b-a3b.json", "--lora", "16"), ("llava-1.5-7b.json",), ("vit-giant.json",),
    ("whisper-large-v3.json", "--tokens", "64"), ("examples.shapes.flux:make_flux", "--lora", "16"),
    ("llama-3-8b.json", "--gradient-checkpointing"), ("llama-3-8b.json", "--predict"),
]  # fmt: skip


def estimated(*words: str) -> Estimate:
    return estimate_model(make_parser().parse_args(["plan", *words], namespace=Question()))


def check_parts(found: Answer) -> None:
    work = found.estimate.work
    assert 0 <= work.saved("keep") <= work.activation_bytes
    for row in found.rows:
        assert row.device_bytes - row.plan.peak_device_bytes == work.alive(row.modes) >= 0
        host = dict(row.host.parts)
        assert min(host.values()) >= 0
        assert sum(host.values()) == row.host.nbytes
        assert host["activations"] == found.question.devices * work.offloaded(row.modes)
        assert bool(host["activations"]) <= ("offload" in row.modes.values())
        moved = Counter[str]()
        for each in row.prediction.intervals:
            moved[each.kind] += each.nbytes
        # Weights, returning activations and inputs of updates share the link, and take their bytes' time. With accumulation,
        # the time is the mean of several batches, and the intervals are those of the first one.
        if found.question.accumulate_grad_batches == 1:
            uploaded = sum(moved[kind] for kind in RESOURCES["fetch"])
            assert uploaded == pytest.approx(row.prediction.busy["fetch"] * row.estimate.rates.upload, rel=1e-3)
        # All that is offloaded returns, except what no backward needs (the last layer of LLaVA's vision tower).
        assert moved["store"] == work.offloaded(row.modes)
        assert 0.99 * moved["store"] <= moved["return"] <= moved["store"]
    text = "\n".join(as_text(found))
    assert " -" not in text.replace(" --", "")
    for whole, parts in re.findall(r"^(?:device|host) memory(?: of the node)? (.*?)[:,] (.*)", text, re.MULTILINE):
        sizes = re.findall(
            r"(?:weights|gradients|weights and gradients|optimizer state|results|activations|disk|at the end) ([\d.]+ \w+)",
            parts,
        )
        assert sum(parse_bytes("it", size) for size in sizes) == pytest.approx(parse_bytes("it", whole), rel=0.05)


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.parametrize("limits", first(LIMITS, "none", "both", why="other limits of the same"))
def test_parts_of_a_small_model_add_up(limits: str, small: Estimate) -> None:
    asked = small.question.but(
        **{name: value // 2**17 if name.endswith("memory") else value for name, value in LIMITS[limits].items()}
    )
    known = small.asked(asked)
    assert known is not None
    check_parts(answer(known))


@pytest.mark.rest("takes a second")
def test_activations_of_a_block_around_experts_add_up(tmp_path: Path) -> None:
    """Experts in a block are layers, and the block's forward goes on after them. Its activations never returned, and were never
    recomputed; nor did those of layers that stay.
    """
    config = tiny(tmp_path, "mixtral", "MixtralForCausalLM", ', "num_local_experts": 4, "num_key_value_heads": 4')
    kept = estimated(str(config), "--tokens", "64", "--batch-size", "256", "--precision", "bf16-true")
    seconds, flops = {}, {}
    for modes in ("keep", "recompute", "offload"):
        for stay in (0, 0.5, 1.0):
            known = kept.asked(kept.question.but(activations=modes, gpu_layers=stay))
            assert known is not None
            check_parts(found := answer(known))
            seconds[modes, stay] = found.shown.prediction.busy
            flops[modes] = known.flops(found.shown.plan, found.shown.modes)
    assert flops["recompute"] > 1.25 * flops["keep"]
    assert seconds["offload", 1.0]["drain"] > seconds["keep", 1.0]["drain"]


@pytest.mark.long("models of real size")
@pytest.mark.parametrize("model", MODELS, ids=lambda model: model[0])
def test_parts_of_each_shape_add_up(model: tuple[str, ...]) -> None:
    """One dry run for each shape, and all limits. gpt-oss counted its packed experts as activations, less than nothing in all."""
    estimate = estimated(model[0] if ":" in model[0] else str(SHAPES / model[0]), *model[1:])
    for options in LIMITS.values():
        asked = estimate.question.but(**options)
        if asked.predict and {"gpu_layers", "disk"} & set(options):
            continue
        known = estimate.asked(asked)
        assert known is not None
        check_parts(answer(known))


@pytest.mark.rest("some plans of a model")
def test_each_mode_of_activations_frees_and_moves_its_part(capsys: pytest.CaptureFixture[str]) -> None:
    """Device memory, host memory and time are those of the mode that was asked for."""
    kept = plan(capsys, *WIDE)
    saved, (window,) = kept["saved_bytes"], kept["windows"]
    assert saved["keep"] > max(saved["recompute"], saved["offload"])
    for mode in ("recompute", "offload"):
        found = plan(capsys, *WIDE, "--activations", mode)
        (other,) = found["windows"]
        freed = saved["keep"] - saved[mode]
        assert (found["flops"] > 1.25 * kept["flops"]) == (mode == "recompute")
        assert kept["activation_bytes"] - found["activation_bytes"] == freed
        assert window["device_bytes"] - other["device_bytes"] == freed
        assert found["host_bytes"] - kept["host_bytes"] == (kept["offloaded_bytes"] if mode == "offload" else 0)
        assert (other["busy_seconds"]["compute"] > 1.1 * window["busy_seconds"]["compute"]) == (mode == "recompute")
        assert (other["busy_seconds"]["drain"] > window["busy_seconds"]["drain"]) == (mode == "offload")


@pytest.mark.rest("some plans of a model")
def test_several_devices_have_weights_once_and_send_parts(capsys: pytest.CaptureFixture[str]) -> None:
    """Weights, gradients and state are there once, activations for each; each fetches all, and sends a part."""
    asked = (*WIDE, "--precision", "32-true", "--activations", "offload", "--host-bandwidth", "1000", "--pcie", "5")
    one = plan(capsys, *asked)
    several = plan(capsys, *asked, "--devices", "4", "--links", "10")
    weights = 4 * one["parameters"]
    assert one["host_bytes"] == pytest.approx(4 * weights + one["offloaded_bytes"], rel=1e-3)
    assert several["host_bytes"] - one["host_bytes"] == 3 * one["offloaded_bytes"]
    for name in ("compute", "optimizer"):
        busy = [found["windows"][0]["busy_seconds"][name] for found in (one, several)]
        assert busy[0] == pytest.approx(busy[1])
    assert several["windows"][0]["busy_seconds"]["links"] == pytest.approx(weights * 3 / 4 / 10e9, rel=1e-3)
    largest = max(layer["bytes"] for layer in one["layers"])
    more = several["windows"][0]["device_bytes"] - one["windows"][0]["device_bytes"]
    assert 2 * (2 + 1 / 4) * largest <= more < 4 * 2 * largest, "room for what is sent and received"


@pytest.mark.rest("some plans of a model")
def test_layers_that_stay_leave_host_memory_until_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    """The device has all of them, and host memory nothing before they return. The memory at the end was not counted."""
    found = [plan(capsys, *WIDE, "--gpu-layers", stay) for stay in ("0", "1", "0.5", "1.0")]
    assert [each["windows"][0]["gpu_layers"] for each in found] == [0, 1, 6, 12]
    for less, more in pairwise(found):
        assert less["windows"][0]["device_bytes"] < more["windows"][0]["device_bytes"]
        for part in ("weights", "gradients", "optimizer state"):
            assert less["host_parts"][part] > more["host_parts"].get(part, 0), part
        assert less["plain_bytes"] == more["plain_bytes"]
    assert {name for name, nbytes in found[-1]["host_parts"].items() if nbytes} == {
        "layers back from the GPU at the end"
    }
    assert len({each["host_bytes"] for each in found}) == 1


@pytest.mark.rest("some plans of a model")
@pytest.mark.parametrize("arguments", [(), ("--gpu-memory", "8GiB", "--predict"), ("--gpu-memory", "8GiB")])
def test_activations_that_fit_are_kept_by_default(
    arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    """The answer is that of "keep", which is written only if it was asked for."""
    by_default, kept, auto = (
        plan(capsys, *WIDE, *arguments, *more) for more in ((), ("--activations", "keep"), ("--activations", "auto"))
    )
    assert by_default == auto
    assert by_default.pop("verdict") == kept.pop("verdict").replace(', activations="keep"', "")
    assert by_default == kept


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Estimate:
    return estimated(str(tiny(tmp_path_factory.mktemp("model"))), "--tokens", "32", "--batch-size", "4")


def tiny(folder: Path, kind: str = "llama", architecture: str = "LlamaForCausalLM", more: str = "") -> Path:
    file = folder / "config.json"
    file.write_text(
        f'{{"architectures": ["{architecture}"], "model_type": "{kind}", "vocab_size": 256, "hidden_size": 64, '
        f'"intermediate_size": 160, "num_hidden_layers": 8, "num_attention_heads": 4, "max_position_embeddings": 64{more}}}'
    )
    return file


@pytest.mark.long("takes a second or more")
def test_an_output_that_two_equal_blocks_save_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A ResNet's block saves its output for its ReLU, and the next block for its convolution: the last one counted it again."""
    asked = ("resnet50", "--image", "64", "--precision", "32-true")
    repeated = estimated(*asked).work
    monkeypatch.setattr(dry_run, "_RUN", 8)
    every = estimated(*asked).work
    assert [call.saved for call in repeated.calls] == [call.saved for call in every.calls]
    assert repeated == every


@pytest.mark.long("takes a second or more")
@pytest.mark.parametrize("more", [[], ["--gradient-checkpointing"], ["--lora", "4"], ["--predict"]], ids=" ".join)
def test_equal_blocks_are_counted_as_if_all_had_run(
    more: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = (str(tiny(tmp_path)), "--tokens", "32", *more)
    repeated = estimated(*asked).work
    ran = 0

    def repeat(*arguments: Any) -> Any:
        nonlocal ran
        ran += 1
        return original(*arguments)

    original = dry_run._Repeats._repeat
    monkeypatch.setattr(dry_run._Repeats, "_repeat", repeat)
    assert estimated(*asked).work == repeated
    assert ran == 5 - ("--lora" in more), (
        "three of eight blocks run; with a frozen embedding, the first is of its own kind"
    )
    monkeypatch.setattr(dry_run, "_RUN", 8)
    assert estimated(*asked).work == repeated
    assert ran <= 5
