"""``bridge_vlm.py``: what is frozen costs no gradients, no optimizer state, and no way back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import seed_everything
from PIL import Image
from torch.nn.functional import cross_entropy
from transformers import AutoModelForImageTextToText, SiglipVisionConfig

from examples.demos import bridge_vlm
from examples.demos.bridge_vlm import Bridge, BridgeEncoder, FineTune, common
from tests.support.models import llama
from tests.support.runs import Outcome, Recorded, assert_same, fit, fused, superpipeline
from tests.support.tiers import first

TRAINED = ["model.soft_token", "model.bridge.weight", "model.bridge.bias"]
ROWS: list[dict[str, Any]] = [
    {"image": Image.new("RGB", (8, 8), "red"), "question": "What is this?", "answer": "a temple in china"},
    {"image": Image.new("RGB", (9, 9), "blue"), "question": "What is this?", "answer": "one"},
]
CONFIG, PROCESSOR = common.small_llava()
ENCODE = BridgeEncoder(PROCESSOR)
STEPS = 3
BATCHES = [ENCODE(ROWS)] * STEPS
WAYS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "host": ({"k": 1}, {}),
    "device": ({"k": 1, "optimizer_on": "gpu"}, {}),
    "recompute": ({"k": 2, "activations": "recompute"}, {}),
    "forward": ({"k": 1, "optimizer_overlap": "forward"}, {}),
    "backward": ({"k": 1, "optimizer_overlap": "backward"}, {}),
    "mixed": ({"k": 1}, {"precision": "bf16-mixed"}),
    "half": ({"k": 1}, {"precision": "bf16-true"}),
}


def bridged() -> FineTune:
    model = AutoModelForImageTextToText.from_config(CONFIG)
    return FineTune(Bridge(model), PROCESSOR.tokenizer, lr=1e-2, steps=STEPS)


def trained_bytes(outcome: Outcome) -> int:
    """Of the weights that are named above."""
    return sum(outcome.state[name].nbytes for name in TRAINED)


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.parametrize("way", first(list(WAYS), "host", "device", why="windows, modes and precisions of the same"))
def test_training_is_bitwise_plain_lightnings(way: str) -> None:
    options, trainer = WAYS[way]
    make = fused(bridged) if "optimizer_overlap" in options else bridged  # others cannot be taken apart
    seen: Recorded = "losses" if way == "backward" else "gradients"  # which are gone when hooks come
    plain = fit(make, BATCHES, recorded=seen, **trainer)
    assert_same(fit(make, BATCHES, superpipeline(**options), recorded=seen, **trainer), plain)

    seed_everything(7, verbose=False)
    dtype = torch.bfloat16 if way == "half" else torch.float32
    before = bridged().to(dtype).state_dict()
    for name, value in plain.state.items():
        assert torch.equal(value, before[name]) == (name not in TRAINED), name


@pytest.mark.rest("takes tenths of a second")
def test_only_the_bridge_and_the_soft_token_have_gradients_and_state() -> None:
    strategy = superpipeline(k=1)
    outcome = fit(bridged, BATCHES, strategy)
    assert len(outcome.gradients) == STEPS
    for gradients in outcome.gradients:
        assert [name for name, gradient in gradients.items() if gradient is not None] == TRAINED
        assert all(gradient.any() for gradient in gradients.values() if gradient is not None)
    (optimizer,) = outcome.trainer.optimizers
    names = {id(p): name for name, p in outcome.module.named_parameters()}
    assert [names[id(p)] for p in optimizer.state] == TRAINED
    assert strategy.ledger.state == 2 * trained_bytes(outcome)


@pytest.mark.rest("takes tenths of a second")
def test_gradients_that_leave_are_those_of_the_bridge_and_the_soft_token() -> None:
    strategy = superpipeline(k=1)
    outcome = fit(bridged, BATCHES, strategy)
    assert strategy.stats().offloaded_gradient_bytes == STEPS * trained_bytes(outcome)


@pytest.mark.rest("takes tenths of a second")
def test_frozen_layers_travel_one_way() -> None:
    """On the host they are not written to at all, and where layers are stepped on the device, they are not sent back."""
    versions: list[dict[str, int]] = []

    def noting() -> FineTune:
        module = bridged()
        versions.append({name: p._version for name, p in module.named_parameters() if not p.requires_grad})
        return module

    host, device = superpipeline(k=1), superpipeline(k=1, optimizer_on="gpu")
    outcome = fit(noting, BATCHES, host)
    assert {name: p._version for name, p in outcome.module.named_parameters() if not p.requires_grad} == versions[0]
    assert host.stats().host_waits == 0  # it waits for each weight that it takes back
    assert host.stats().step_download_bytes == 0

    fit(bridged, BATCHES, device)
    assert device.stats().host_waits == 0
    # weights, two moments of each, and a count of steps, which lies with them where the device is the CPU
    assert device.stats().step_download_bytes == STEPS * (3 * trained_bytes(outcome) + 4 * len(TRAINED))
    assert device.stats().fetched_bytes == host.stats().fetched_bytes


@pytest.mark.long("takes a second or more")
def test_the_projector_stays_on_the_host() -> None:
    """Nothing uses it; the first batch fetches ahead by the order of modules, because it has no trace to go by."""
    few, many = superpipeline(k=1), superpipeline(k=1)
    fit(bridged, BATCHES, few)
    fit(bridged, BATCHES * 3, many)
    (projector,) = [name for name in few.fetches() if name.endswith("multi_modal_projector")]
    assert few.fetches()[projector] == many.fetches()[projector] <= 1
    assert all(count > 2 * STEPS for name, count in many.fetches().items() if name != projector)


def test_captions_are_written_as_they_are_trained() -> None:
    """Embedding, image first, in both: the first token that is written is the likeliest in the forward of training."""
    seed_everything(7, verbose=False)
    model = bridged().model.eval()
    question = ENCODE.questions(ROWS)
    with torch.no_grad():
        written = model.generate(**question, do_sample=False, max_new_tokens=1)
        logits = model(labels=question["input_ids"], use_cache=False, **question).logits
    assert torch.equal(written[:, :-1], question["input_ids"])
    assert torch.equal(written[:, -1], logits[:, -1].argmax(-1))
    assert logits.shape[1] == question["input_ids"].shape[1] + 2
    assert not torch.equal(logits[0, -1], logits[1, -1])  # of one question, and two images


def test_the_loss_is_of_the_captions_words() -> None:
    """The image and the soft token stand before the words, and move the labels with them."""
    seed_everything(7, verbose=False)
    model, batch = bridged().model, BATCHES[0]
    with torch.no_grad():
        out = model(**batch, use_cache=False)
    words = out.logits[:, 2:-1].flatten(0, 1)  # each word but the last says the next one
    torch.testing.assert_close(
        out.loss, cross_entropy(words, batch["labels"][:, 1:].flatten())
    )  # summed in another order


@pytest.mark.rest("takes tenths of a second")
def test_a_model_without_clip_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="--model: LlamaForCausalLM has no vision_tower of CLIP"):
        Bridge(llama(layers=1).net)

    config, _ = common.small_llava()
    config.vision_config = SiglipVisionConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=1
    )
    config.save_pretrained(tmp_path / "llava")  # without weights: it is refused before any work
    PROCESSOR.save_pretrained(tmp_path / "llava")
    with pytest.raises(SystemExit):
        bridge_vlm.main(["--model", str(tmp_path / "llava"), "--output", str(tmp_path / "run")])
    assert "LlavaForConditionalGeneration has no vision_tower of CLIP" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.long("seconds of training")
def test_the_demonstration_says_what_a_bridge_costs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = []
    for number, row in enumerate(ROWS * 4):
        row["image"].save(tmp_path / f"{number}.png")
        lines.append(json.dumps({**row, "image": f"{number}.png"}))
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    small = ["--steps", "8", "--batch-size", "2", "--accelerator", "cpu", "--data", str(tmp_path / "rows.jsonl")]
    costs = bridge_vlm.main([*small, "--output", str(tmp_path / "run")])
    full, bridge = costs.values()
    assert list(costs) == ["all weights", "the bridge"]
    assert bridge.trained < 0.05 * full.trained
    assert bridge.offloaded_gradient_bytes == 8 * 4 * bridge.trained < full.offloaded_gradient_bytes / 20
    assert bridge.step_download_bytes == full.step_download_bytes == 0
    assert bridge.state_bytes == 2 * 4 * bridge.trained + 4 * len(TRAINED)
    said = capsys.readouterr().out
    assert f"bytes of gradients  {full.offloaded_gradient_bytes:>15,}  {bridge.offloaded_gradient_bytes:>15,}\n" in said
    saved = torch.load(tmp_path / "run" / "bridge.pt", weights_only=True)
    assert [f"model.{name}" for name in saved] == TRAINED
    assert sum(p.numel() for p in saved.values()) == bridge.trained

    on_gpu = bridge_vlm.main([*small, "--optimizer-on", "gpu", "--output", str(tmp_path / "gpu")])
    assert on_gpu["all weights"].step_download_bytes > 50 * on_gpu["the bridge"].step_download_bytes > 0
