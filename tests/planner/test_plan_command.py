"""``superpipeline``: what it says of real models, and what it says to bad input."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
from torch import Tensor, nn

from sp_lightning.__main__ import main
from sp_lightning.capabilities.activations import offload
from sp_lightning.tools.planner.arguments import REMOVED
from sp_lightning.tools.planner.estimate import SAME
from tests.support.answers import plan
from tests.support.models import Module, Stack
from tests.support.runs import fit, superpipeline
from tests.support.simdevice import simulated
from tests.support.tiers import first

SHAPES = Path(__file__).parents[2] / "examples" / "shapes"


@pytest.mark.long("a model of many billions of parameters")
def test_of_seventy_billion_parameters_equal_blocks_run_once(capsys: pytest.CaptureFixture[str]) -> None:
    """So it takes seconds."""
    block: Any = transformers.models.llama.modeling_llama.LlamaDecoderLayer
    with mock.patch.object(block, "forward", autospec=True, side_effect=block.forward) as forward:
        found = plan(
            capsys, str(SHAPES / "llama-3-70b.json"), "--precision", "bf16-true", "--gpu-memory", "24GiB",
            "--host-memory", "560GiB", "--gradient-checkpointing", "--k", "1", "2",
        )  # fmt: skip
    assert forward.call_count == 3, "of 80 blocks the first two and the last one"
    assert found["parameters"] == 70_553_706_496
    assert len(found["layers"]) == 81
    assert found["tables"] == [{"name": "model.embed_tokens", "bytes": 128256 * 8192 * 2}]
    # Eight bytes for each: weight, gradient and two moments in bfloat16.
    assert found["host_bytes"] == pytest.approx(8 * 70.55e9, rel=0.02)
    # 6 N T, and 2 N T for the recompute of the blocks; attention comes on top, embeddings need none.
    assert 0.9 < found["flops"] / (8 * 70.55e9 * 2048) < 1.1
    enough = SAME * min(window["seconds"] for window in found["windows"])
    fast = [window for window in found["windows"] if window["seconds"] <= enough]
    smallest = min(fast, key=lambda window: window["device_bytes"])
    assert all(window["fits"] for window in found["windows"])
    assert found["best"] == {key: smallest[key] for key in ("k", "k_prime", "gpu_layers")}
    assert found["verdict"].startswith(f"It fits: SuperpipelineStrategy(k={smallest['k']}")


@pytest.mark.long("takes a second or more")
@pytest.mark.parametrize(
    ("arguments", "layers"),
    first(
        [
            ([str(SHAPES / "vit-giant.json"), "--batch-size", "4"], 40),
            ([str(SHAPES / "llava-1.5-7b.json")], 45),
            ([str(SHAPES / "llama-3-8b.json"), "--predict"], 33),
            (["resnet18", "--batch-size", "2"], 10),
            (["vit_b_16", "--predict"], 12),
        ],
        if_=lambda each: each[0][0] == "resnet18",
        second=[([str(SHAPES / "llama-3-8b.json"), "--predict"], 33), (["vit_b_16", "--predict"], 12)],
        why="models of billions of parameters",
    ),
    ids=["vit-giant", "llava", "llama-predict", "resnet18", "vit_b_16"],
)
def test_models_of_all_kinds(arguments: list[str], layers: int, capsys: pytest.CaptureFixture[str]) -> None:
    found = plan(capsys, *arguments, "--gpu-memory", "24GiB", "--k", "1")
    assert found["activation_bytes"], "it was run on paper"
    assert re.match(
        r"(You don't need sp_lightning: .*\nWith this strategy|It fits): SuperpipelineStrategy\(k=1", found["verdict"]
    )
    assert len(found["layers"]) >= layers


@pytest.mark.long("a model of billions of parameters")
def test_generation_counts_keys_and_values(capsys: pytest.CaptureFixture[str]) -> None:
    """Two numbers of so many heads, in each layer, for each token; the prompts' logits are of their last token only."""
    model = str(SHAPES / "llama-3-8b.json")
    cache = 2 * 32 * 8 * 128 * 2  # bytes of a token
    options = ["--precision", "bf16-true", "--generate", "64", "--tokens", "448", "--k", "2"]
    found = {batch: plan(capsys, model, *options, "--batch-size", str(batch)) for batch in (1, 16)}
    for batch, answer in found.items():
        assert batch * 512 * cache < answer["activation_bytes"] < 3 * batch * 512 * cache + 2**29
        assert f"each token of {batch} sequence" in answer["verdict"]
    # Weights are fetched once for all sequences: sixteen take hardly longer than one.
    assert found[16]["windows"][0]["seconds"] < 1.1 * found[1]["windows"][0]["seconds"]
    assert found[16]["prompt_seconds"] > found[1]["prompt_seconds"]


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.parametrize(
    "model", first(["resnet50", str(SHAPES / "vit-giant.json")], "resnet50", why="a model of billions of parameters")
)
def test_generation_by_models_that_have_no_cache(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["plan", model, "--generate", "8"])
    assert stop.value.code == 2
    assert "with a key-value cache; leave out --generate" in capsys.readouterr().err


@pytest.mark.long("a model of real size is counted")
def test_generation_of_an_encoder_and_a_decoder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The decoder reads the encoder's output through keys and values of its own; the prompts are the encoder's."""
    config = transformers.T5Config(d_model=256, d_kv=64, d_ff=512, num_layers=4, num_heads=4, vocab_size=4096)
    config.architectures = ["T5ForConditionalGeneration"]
    config.save_pretrained(tmp_path)
    options = ["--generate", "16", "--tokens", "128", "--batch-size", "4", "--k", "1"]
    found = plan(capsys, str(tmp_path), *options)
    cache = 4 * (2 * 4 * 256 * (128 + 16)) * 4  # bytes: sequences × (keys and values, layers, width) of both attentions
    assert cache < found["activation_bytes"]
    assert "each token of 4 sequences" in found["verdict"]


class Known(Module):
    """A factory for the command line: it says what it takes."""

    def __init__(self) -> None:
        super().__init__(Stack())
        self.example_input_array = torch.zeros(4, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)  # type: ignore[no-any-return]


class Unknown(nn.Module):
    """It does not, and its forward looks at values."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Stack()


class LooksAtValues(Known):
    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) if x.sum() > 0 else self.net(-x)  # type: ignore[no-any-return]


class SaysMuch(Known):
    def forward(self, x: Tensor) -> Tensor:
        raise ValueError("\n  The input is not to my taste.\nIt never is.\n")


class WithoutForward(Module):
    def __init__(self) -> None:
        super().__init__(Stack())
        self.example_input_array = torch.zeros(4, 16)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("Unknown", "Unknown has no forward; define one that calls the network as training_step does"),
        ("WithoutForward", "WithoutForward has no forward; define one"),
        ("Stack", "are not known: add --input SIZE"),
        ("LooksAtValues", "no batch could be run without values (its example_input_array: DataDependentOutput"),
        ("SaysMuch", "(its example_input_array: ValueError: The input is not to my taste)"),
    ],
)
def test_modules_that_cannot_be_run_without_values(name: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["plan", f"tests.planner.test_plan_command:{name}", "--k", "1"])
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.long("takes a second or more")
def test_what_is_said_on_paper_is_what_a_run_does(capsys: pytest.CaptureFixture[str]) -> None:
    """Layers, and the most device memory, activations included; the simulated device counts every byte."""
    found = plan(
        capsys, "tests.planner.test_plan_command:Known", "--precision", "32-true", "--k", "1", "--k-prime", "1"
    )
    with simulated(capacity=2**40) as devices:
        outcome = fit(Known, [torch.zeros(4, 16)] * 3, superpipeline(k=1, k_prime=1), recorded="losses")
    run: Any = outcome.trainer.strategy
    assert [each["bytes"] for each in found["layers"]] == [each.nbytes for each in run.plan.layers]
    (window,) = found["windows"]
    assert devices[0].peak <= window["device_bytes"] <= 1.5 * devices[0].peak


def needs_hub_code(folder: Path) -> str:
    (folder / "config.json").write_text(json.dumps({"model_type": "mine", "auto_map": {"AutoModel": "mine.Mine"}}))
    return str(folder)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("nothing-like-it", "Unknown model 'nothing-like-it'. Expected package.module"),
        ("swin_tt", "Unknown model 'swin_tt'. Did you mean 'swin_t' or "),
        ("tests.planner.test_plan_command:Missing", "has no attribute 'Missing'"),
        ("no.such.module:Factory", "No module named 'no'"),
        ("builtins:dict", "returned a dict; expected an nn.Module"),
        ("/no/such/folder", "'/no/such/folder' does not exist. Expected package.module"),
        ("../no/such/folder", "'../no/such/folder' does not exist. Expected package.module"),
        ("missing.json", "'missing.json' does not exist"),
        (needs_hub_code, "needs code from a model hub"),
    ],
)
def test_bad_models(model: Any, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["plan", model(tmp_path) if callable(model) else model])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


CONFIGS: dict[str, dict[str, Any]] = {
    "t5": {"model_type": "t5", "architectures": ["T5ForConditionalGeneration"], "d_model": 64, "num_layers": 2, "d_ff": 64,
           "num_heads": 2, "d_kv": 32, "vocab_size": 128, "decoder_start_token_id": 0},
    "whisper": {"model_type": "whisper", "architectures": ["WhisperForConditionalGeneration"], "d_model": 64,
                "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2, "decoder_attention_heads": 2,
                "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "vocab_size": 128, "pad_token_id": 0, "bos_token_id": 0,
                "eos_token_id": 0, "decoder_start_token_id": 0},
    "mixtral": {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "hidden_size": 256, "intermediate_size": 512,
                "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 4, "num_local_experts": 8,
                "num_experts_per_tok": 2, "vocab_size": 128},
    "gpt2": {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_embd": 64, "n_layer": 2, "n_head": 2,
             "n_positions": 512, "vocab_size": 128},
}  # fmt: skip


def config(name: str, folder: Path, **more: Any) -> str:
    file = folder / f"{name}.json"
    file.write_text(json.dumps({**CONFIGS[name], **more}))
    return str(file)


@pytest.mark.long("seconds for each model")
@pytest.mark.parametrize("name", CONFIGS)
def test_encoder_decoders_speech_and_experts_are_run(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = plan(capsys, config(name, tmp_path), "--tokens", "64", "--k", "1")
    assert found["activation_bytes"]


@pytest.mark.long("takes a second or more")
def test_experts_count_for_the_tokens_that_are_routed_to_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = plan(
        capsys, config("mixtral", tmp_path), "--predict", "--tokens", "64", "--precision", "32-true", "--k", "1"
    )
    experts = 4 * 2 * (3 * 256 * 512)  # of each token, in all layers: two of eight
    others = 4 * 4 * 256 * 256 + 128 * 256 + 4 * 8 * 256
    assert found["flops"] == pytest.approx(2 * 64 * (experts + others), rel=0.1)


@pytest.mark.long("a language model is run on paper twice")
def test_attention_with_dropout_takes_no_more_than_without(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A GPU has kernels for it; the CPU has not, and would keep the matrix of all pairs of tokens."""
    with_dropout = plan(capsys, config("gpt2", tmp_path), "--tokens", "128", "--k", "1")["activation_bytes"]
    without = plan(capsys, config("gpt2", tmp_path, attn_pdrop=0.0), "--tokens", "128", "--k", "1")["activation_bytes"]
    assert with_dropout == without


@pytest.mark.long("a model of real size is counted")
def test_groups_of_convolutions_count_in_backward(capsys: pytest.CaptureFixture[str]) -> None:
    forward = plan(capsys, "mobilenet_v2", "--predict", "--k", "1", "--precision", "32-true")["flops"]
    assert plan(capsys, "mobilenet_v2", "--k", "1", "--precision", "32-true")["flops"] == pytest.approx(
        3 * forward, rel=0.05
    )


class ConfiguresModel(Module):
    """Makes what is large where a strategy can help."""

    def __init__(self) -> None:
        super().__init__(nn.Identity())

    def configure_model(self) -> None:
        self.net = Stack()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)  # type: ignore[no-any-return]


@pytest.mark.rest("takes tenths of a second")
def test_a_module_that_is_made_late_and_an_input_by_its_shape(capsys: pytest.CaptureFixture[str]) -> None:
    found = plan(capsys, "tests.planner.test_plan_command:ConfiguresModel", "--input", "4", "16", "--k", "1")
    known = plan(capsys, "tests.planner.test_plan_command:Known", "--k", "1")
    assert found["parameters"] == known["parameters"]
    assert found["activation_bytes"] == known["activation_bytes"]
    assert found["batch"] == "a batch of 4 × 16"


def make_known_by_name() -> nn.Module:
    module = Known()
    module.example_input_array = {"x": torch.zeros(4, 16)}  # type: ignore[assignment]
    return module


@pytest.mark.rest("takes tenths of a second")
def test_an_example_of_keyword_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    found = plan(capsys, "tests.planner.test_plan_command:make_known_by_name", "--k", "1")
    assert (
        found["activation_bytes"]
        == plan(capsys, "tests.planner.test_plan_command:Known", "--k", "1")["activation_bytes"]
    )


@pytest.mark.rest("takes tenths of a second")
def test_little_that_is_missing_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ("tests.planner.test_plan_command:Known", "--k", "1", "--activations", "keep")
    needed = plan(capsys, *asked)["windows"][0]["device_bytes"]
    found = plan(capsys, *asked, "--gpu-memory", f"{needed - 3}B")
    assert " available, 3 B short." in found["verdict"]


@pytest.mark.long("takes a second or more")
def test_what_does_not_fit_ends_with_another_status(capsys: pytest.CaptureFixture[str]) -> None:
    """The answer is printed all the same."""
    for option in ("--gpu-memory=1KiB", "--host-memory=1KiB"):
        with pytest.raises(SystemExit) as ended:
            main(["plan", "tests.planner.test_plan_command:Known", "--k", "1", option])
        assert ended.value.code == 1
        assert "It does not fit: " in capsys.readouterr().out


class TakesTokens(Module):
    def __init__(self) -> None:
        super().__init__(nn.Sequential(nn.Embedding(64, 16), Stack()))

    def forward(self, ids: Tensor) -> Tensor:
        return self.net(ids)  # type: ignore[no-any-return]


class TakesEightTokens(TakesTokens):
    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.zeros(8, 16))

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) + self.positions


@pytest.mark.rest("takes tenths of a second")
def test_an_input_of_whole_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    found = plan(capsys, "tests.planner.test_plan_command:TakesTokens", "--input", "4", "8", "--k", "1")
    assert found["batch"] == "a batch of 4 × 8 integers"
    assert found["activation_bytes"]


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param(
            ["vit_b_16", "--image", "100"],
            "cannot take its batch (1 image of 100 × 100: AssertionError: Wrong image height! Expected 224 but got 100!).",
            marks=pytest.mark.rest("a model of real size is run on paper"),
        ),
        ([str(SHAPES / "llama-3-8b.json"), "--image", "100"], "takes no images. Leave --image out."),
        (
            ["tests.planner.test_plan_command:ConfiguresModel", "--input", "4", "8"],
            "set example_input_array in the module",
        ),
        (
            ["tests.planner.test_plan_command:TakesEightTokens", "--input", "4", "9"],
            "; a batch of 4 × 9 integers: RuntimeError: ",
        ),
    ],
)
def test_sizes_that_the_model_cannot_take(
    arguments: list[str], message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """Not the activations are unknown then; and torch's own log of what was tried is not shown."""
    with pytest.raises(SystemExit) as ended:
        main(["plan", *arguments, "--k", "1"])
    assert ended.value.code == 2
    said = capfd.readouterr().err
    assert message in said
    assert said.count("\n") == 1


@pytest.mark.parametrize("option", REMOVED)
def test_removed_options_say_what_to_do_instead(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    for words in ([option, "2"], [f"{option}=2"]):
        with pytest.raises(SystemExit) as ended:
            main(["plan", "resnet18", *words])
        assert ended.value.code == 2
        assert f"plan: error: {option} was removed: {REMOVED[option]}." in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["plan", "--help"])
    assert option not in capsys.readouterr().out


@pytest.mark.parametrize("option", [["--batch-size", "4"], ["--image", "224"]], ids=" ".join)
def test_sizes_of_named_models_are_refused_for_a_factory(option: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["plan", "tests.planner.test_plan_command:TakesTokens", *option])
    assert ended.value.code == 2
    assert capsys.readouterr().err == (
        f"superpipeline plan: {option[0]} cannot be used with 'tests.planner.test_plan_command:TakesTokens'. "
        "Use --input 4 3 224 224 (batch first).\n"
    )


@pytest.mark.long("takes a second or more")
def test_small_layers_and_large_logits_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["plan", config("gpt2", tmp_path, vocab_size=50_000), "--tokens", "64", "--k", "1", "--k-prime", "1"])
    said = capsys.readouterr().out
    outside = "12.2 MiB of activations lie outside the layers (largest: float32 (64, 50000), 12.2 MiB). activations="
    assert f"note: {outside}" in said
    assert "(examples/guide/memory.md)" in said
    main(["plan", config("gpt2", tmp_path), "--tokens", "16", "--k", "1", "--k-prime", "1"])
    said = capsys.readouterr().out
    assert re.search(r"^faster: .* s for Python\. Use larger layers \(layers=\)", said, re.MULTILINE)


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.parametrize(("windows", "rows"), [(["--k", "1"], 0), (["--k", "1", "2"], 4), ([], 0)])
def test_windows_that_were_asked_for_are_shown(
    windows: list[str], rows: int, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["plan", "tests.planner.test_plan_command:Known", *windows])
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert sum(len(line) >= 7 and line[0] in "12" and line[1] in "12" for line in lines) == rows


def frozen() -> nn.Module:
    return Stack().requires_grad_(False)


def fails() -> None:
    raise KeyError("on purpose")


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("torch.nn:Identity", "'torch.nn:Identity' has no parameters"),
        ("tests.planner.test_plan_command:frozen", "requires a gradient. Add --predict."),
        ("torch.nn:Linear", "'() failed: TypeError"),
        ("tests.planner.test_plan_command:fails", "() failed: KeyError"),
    ],
)
def test_factories_that_make_nothing(model: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["plan", model])
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ('{"model_type": "no-such"}', "got 'no-such'"),
        (json.dumps(CONFIGS["gpt2"]), "--tokens 2048: "),
    ],
)
def test_bad_configs(text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(SystemExit):
        main(["plan", str(tmp_path), "--tokens", "2048"])
    assert message in capsys.readouterr().err


@pytest.mark.long("takes a second or more")
def test_activations_in_each_mode(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Device memory, host memory and time are those of the mode that was asked for."""
    monkeypatch.setattr(offload, "WORTH_MOVING", 1)
    arguments = ["tests.planner.test_plan_command:Known", "--k", "1", "--k-prime", "1"]
    kept = plan(capsys, *arguments)
    saved, (window,) = kept["saved_bytes"], kept["windows"]
    assert saved["keep"] > max(saved["recompute"], saved["offload"])
    for mode in ("recompute", "offload"):
        found = plan(capsys, *arguments, "--activations", mode)
        (other,) = found["windows"]
        freed = saved["keep"] - saved[mode]
        assert (found["flops"] > 1.25 * kept["flops"]) == (mode == "recompute")
        assert kept["activation_bytes"] - found["activation_bytes"] == freed
        assert window["device_bytes"] - other["device_bytes"] == freed
        assert found["host_bytes"] - kept["host_bytes"] == (kept["offloaded_bytes"] if mode == "offload" else 0)
        assert (other["busy_seconds"]["compute"] > window["busy_seconds"]["compute"]) == (mode == "recompute")
        assert (other["busy_seconds"]["drain"] > window["busy_seconds"]["drain"]) == (mode == "offload")
        assert f'activations="{mode}"' in found["verdict"]
    assert "activations=" not in kept["verdict"]


# ---------------------------------------------------------------------- the command line itself


def test_help_needs_neither_torch_nor_lightning() -> None:
    code = "import runpy, sys; sys.argv = ['superpipeline', 'plan', '--help']; import sp_lightning.__main__ as it\n"
    code += "try: it.main()\nexcept SystemExit: print(sorted({'torch', 'lightning'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.long("a subprocess that imports torch")
def test_the_console_script_finds_modules_in_the_current_folder(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from torch import nn\ndef make(): return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))\n"
    )
    code = "import sys; sys.path.pop(0); sys.argv = ['superpipeline', 'plan', 'mine:make', '--input', '2', '8', '--k', '1']\n"
    code += "import sp_lightning.__main__ as it; it.main()"
    environment = {**os.environ, "PYTHONPATH": str(SHAPES.parents[1])}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "SuperpipelineStrategy(" in done.stdout


@pytest.mark.long("a subprocess that imports torch")
def test_a_reader_that_has_seen_enough_is_not_an_error() -> None:
    command = f"{sys.executable} -m sp_lightning plan resnet18 --k 1 | true; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "0"
    assert "BrokenPipe" not in done.stderr


def test_the_keys_of_an_answer_are_frozen(capsys: pytest.CaptureFixture[str]) -> None:
    """Programs read them. The CHANGELOG says what changes."""
    assert set(plan(capsys, "tests.planner.test_plan_command:Known", "--k", "1")) == {
        "activation_bytes", "activations", "assumed", "batch", "best", "checkpointed_bytes", "devices", "disk",
        "flops", "generated_tokens", "gpu_layers", "host_bytes",
        "host_fits", "host_parts", "layers", "measured", "model", "notes",
        "offloaded_bytes", "optimizer_on", "pack_experts", "parameters", "plain_bytes", "precision", "prompt_seconds",
        "saved_bytes", "tables", "trained_parameters", "training", "verdict", "windows",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["check", "M.json"], "`plan` takes a config; `check` needs your own module"),
        (["rates", "--disk", "/no/such/folder"], "--disk /no/such/folder: not a folder"),
        (["rates", "--seconds", "abc"], "must be a number above 0, got abc"),
        (["plan", "resnet18", "--gpu-memory", "much"], "expected a size: GiB as a number (24)"),
        (["plan", "resnet18", "--gpu-memory", "80%"], "A share has no meaning here"),
        (["plan", "resnet18", "--k=0"], "argument --k: must be an integer of at least 1, got 0"),
        (["plan", "resnet18", "--pcie=-1"], "argument --pcie: '-1' is not a rate"),
    ],
)
def test_what_is_wrong_is_said_with_what_was_expected(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err
