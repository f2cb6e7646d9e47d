"""``superpipeline plan``: adapters, modules without values, what would make it faster, and what to write."""

from __future__ import annotations

import re
from typing import Any

import peft
import pytest
import torch
import transformers
from torch import Tensor, nn

from sp_lightning import SuperpipelineStrategy
from sp_lightning.__main__ import main
from sp_lightning.core.plan.units import parse_bytes
from tests.support.answers import plan
from tests.support.models import Module, Stack, vectors
from tests.support.runs import fit, fused
from tests.support.tiers import first


def adapted() -> nn.Module:
    """A factory whose module has PEFT's adapters, which are moved and cast while they are made."""
    net = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4, vocab_size=64
        )
    )
    wanted = peft.LoraConfig(r=4, target_modules=["q_proj"])
    adapters: nn.Module = peft.get_peft_model(net.to(torch.bfloat16), wanted)
    return adapters.to(torch.float32)


@pytest.mark.long("takes a second or more")
def test_adapters_are_planned(capsys: pytest.CaptureFixture[str]) -> None:
    found = plan(capsys, "tests.planner.test_plan_advice:adapted", "--input", "2", "8", "--k", "1", "--k-prime", "1")
    real = adapted()
    assert found["activation_bytes"], "it was run on paper"
    assert found["parameters"] == sum(parameter.numel() for parameter in real.parameters())
    trained = sum(parameter.numel() for parameter in real.parameters() if parameter.requires_grad)
    assert 0 < trained < 0.1 * found["parameters"]
    weights = 6 * found["parameters"]  # float32 and its cast
    assert weights < found["host_bytes"] < weights + 40 * trained + 2**18


@pytest.mark.long("takes a second or more")
def test_activations_that_travel_too_slowly_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    main(
        [
            "plan",
            *[
                "resnet18",
                "--batch-size",
                "64",
                "--k",
                "1",
                "--k-prime",
                "1",
                "--activations",
                "offload",
                "--pcie",
                "1",
            ],
        ]
    )
    (line,) = re.findall(r"^faster: (.*)$", capsys.readouterr().out, re.MULTILINE)
    assert re.fullmatch(r"with .* s for activations\. Recompute some of them, or .*", line)


@pytest.mark.long("takes a second or more")
@pytest.mark.parametrize(
    ("arguments", "choice"),
    [
        ((), "(k=1, k_prime=1)"),
        (("--optimizer-overlap", "backward", "--activations", "recompute"),
         '(k=1, k_prime=1, activations="recompute", optimizer_overlap="backward")'),
        (("--keep-on-gpu", "fc", "--layers", "layer1.*", "layer2.*"),
         '(k=1, k_prime=1, layers=["layer1.*", "layer2.*"], keep_on_gpu=["fc"])'),
    ],
)  # fmt: skip
def test_the_verdict_has_every_option_that_the_answer_depends_on(
    arguments: tuple[str, ...], choice: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found = plan(capsys, "resnet18", "--k", "1", "--k-prime", "1", "--gpu-memory", "8GiB", *arguments)
    assert f"\nWith this strategy: SuperpipelineStrategy{choice}, " in found["verdict"]


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.parametrize(("precision", "gradients"), [("bf16-mixed", 2), ("16-mixed", 2), ("32-true", 4)])
def test_gradients_that_stay_in_16_bits_are_counted_so(
    precision: str, gradients: int, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["plan", "resnet18", "--k", "1", "--k-prime", "1", "--precision", precision])
    (line,) = re.findall(r"^host memory (.*)$", capsys.readouterr().out, re.MULTILINE)
    (size,) = re.findall(r"gradients (.*?),", line)
    assert parse_bytes("it", size) == pytest.approx(gradients * 11.69e6, rel=0.05)


class Tied(Module):
    device_of_the_net = "cpu"

    def __init__(self) -> None:
        super().__init__(nn.Identity())

    def configure_model(self) -> None:
        with torch.device(self.device_of_the_net):
            self.net = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
        self.net[3].weight = self.net[0].weight

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)  # type: ignore[no-any-return]


class TiedOnMeta(Tied):
    device_of_the_net = "meta"


@pytest.mark.rest("takes tenths of a second")
def test_a_module_on_the_meta_device(capsys: pytest.CaptureFixture[str]) -> None:
    """A run would take its values from a file; here it needs none."""
    found, same = (
        plan(capsys, f"tests.planner.test_plan_advice:{name}", "--input", "4", "16", "--k", "1")
        for name in ("TiedOnMeta", "Tied")
    )
    assert found["parameters"] == 3 * 16 * 16 + 4 * 16
    assert {**found, "model": ""} == {**same, "model": ""}


@pytest.mark.long("a plan and a run of a whole model")
def test_activations_are_chosen_within_the_limit_as_a_run_chooses_them(capsys: pytest.CaptureFixture[str]) -> None:
    """What takes least is as fast as the limit allows, and all is kept once there is room for it."""
    asked = ["resnet18", "--batch-size", "64", "--k", "1", "--k-prime", "1", "--tflops", "10"]

    def window(mode: str, limit: int) -> dict[str, Any]:
        (found,) = plan(capsys, *asked, "--activations", mode, "--gpu-memory", f"{limit}B")["windows"]
        return dict(found)

    kept, recomputed, offloaded = (window(mode, 2**40) for mode in ("keep", "recompute", "offload"))
    least, most = min(recomputed["device_bytes"], offloaded["device_bytes"]), kept["device_bytes"]
    chosen = [window("auto", least + int(share * (most - least))) for share in (0, 0.5, 1)]
    assert all(each["fits"] for each in chosen)
    assert chosen[0]["seconds"] > chosen[1]["seconds"] > chosen[2]["seconds"] == kept["seconds"]
    assert chosen[0]["seconds"] <= max(recomputed["seconds"], offloaded["seconds"])
    assert re.fullmatch(r"keep \d+ \(.*\); (recompute|offload) \d+ \(.*\).*", chosen[1]["activations"])
    assert chosen[2]["activations"].startswith(f"keep {chosen[2]['activations'].split()[1]}")
    assert "; " not in chosen[2]["activations"]
    assert not window("auto", least - 2**20)["fits"]


@pytest.mark.long("takes a second or more")
@pytest.mark.parametrize("arguments", [(), ("--gpu-memory", "8GiB", "--predict"), ("--gpu-memory", "8GiB")])
def test_all_activations_are_kept_by_default_if_they_fit(
    arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    """The answer is that of ``keep``, which is written only if it was asked for."""
    asked = ["resnet18", "--k", "1", "--k-prime", "1", *arguments]
    by_default, kept, auto = (
        plan(capsys, *asked, *more) for more in ((), ("--activations", "keep"), ("--activations", "auto"))
    )
    assert by_default == auto
    assert by_default.pop("verdict") == kept.pop("verdict").replace(', activations="keep"', "")
    assert by_default == kept


@pytest.mark.long("a model of real size is counted twice")
def test_the_largest_window_that_fits_is_among_those_that_are_tried(capsys: pytest.CaptureFixture[str]) -> None:
    limit = next(each for each in plan(capsys, "resnet50", "--k", "7")["windows"] if each["k_prime"] == 1)[
        "device_bytes"
    ]
    windows = plan(capsys, "resnet50", "--k-prime", "1", "--gpu-memory", f"{limit}B")["windows"]
    assert max(each["k"] for each in windows if each["fits"]) == 7
    assert {1, 2, 4, 7, 8} <= {each["k"] for each in windows}


class Sixteen(Module):
    """A module with sixteen layers, and its batch."""

    def __init__(self) -> None:
        super().__init__(nn.Sequential(*(nn.Linear(16, 16) for _ in range(16))))
        self.example_input_array = torch.zeros(4, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)  # type: ignore[no-any-return]


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.parametrize("limit", [(), ("--gpu-memory", "100GiB")])
def test_a_window_in_which_all_layers_have_a_slot_is_among_those_that_are_tried(
    capsys: pytest.CaptureFixture[str], limit: tuple[str, ...]
) -> None:
    found = plan(capsys, "tests.planner.test_plan_advice:Sixteen", *limit)
    assert {(14, 2), (15, 1)} <= {(each["k"], each["k_prime"]) for each in found["windows"]}


# ---------------------------------------------------------------------- accumulated batches, clipping

STEPS = [(1, None), (4, None), (1, "norm"), (4, "norm"), (4, "value")]


@pytest.mark.parametrize(("batches", "clip"), first(STEPS, (4, "norm"), why="each alone"))
@pytest.mark.parametrize("precision", first(["bf16-mixed", "32-true"], "bf16-mixed", why="without casts"))
def test_a_step_has_the_host_memory_of_a_run(
    precision: Any, batches: int, clip: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    options: Any = {} if clip is None else {"gradient_clip_val": 0.1, "gradient_clip_algorithm": clip}
    strategy = SuperpipelineStrategy(k=1, k_prime=1, optimizer_overlap="forward")
    fit(
        fused(lambda: Module(Stack())), vectors(4), strategy, recorded="nothing", precision=precision,
        accumulate_grad_batches=batches, **options,
    )  # fmt: skip
    arguments = ["--accumulate-grad-batches", str(batches), "--precision", precision]
    arguments += ["--gradient-clip", clip] if clip else []
    size = [str(each) for each in vectors()[0].shape]
    found = plan(capsys, "tests.support.models:Stack", "--input", *size, "--k", "1", "--k-prime", "1", *arguments)
    assert found["host_bytes"] == strategy.ledger.nbytes


@pytest.mark.long("takes a second or more")
def test_updates_are_shared_by_accumulated_batches(capsys: pytest.CaptureFixture[str]) -> None:
    """A long update is one in four batches, and hides what it can under the next of them."""
    arguments = ["resnet18", "--k", "1", "--k-prime", "1", "--host-bandwidth", "1", "--precision", "32-true"]
    one, four, clipped = (
        plan(capsys, *arguments, *more)["windows"][0]["seconds"]
        for more in ((), ("--accumulate-grad-batches", "4"), ("--gradient-clip", "norm"))
    )
    assert one / 4 < four < 0.75 * one  # sums of gradients read and write host memory, too
    assert one < clipped < 1.5 * one


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["--gradient-clip", "norm", "--optimizer-overlap", "backward"],
            "--optimizer-overlap backward does not work with --gradient-clip norm",
        ),
        *(
            (
                ["--precision", half, "--optimizer-on", "gpu", "--optimizer-overlap", "backward"],
                f"--optimizer-overlap backward does not work with --optimizer-on gpu and --precision {half}",
            )
            for half in ("bf16-true", "16-true")
        ),
        (["--optimizer-on", "gpu", "--devices", "2"], "--optimizer-on gpu does not work with --devices"),
        (["--accumulate-grad-batches", "2", "--predict"], "--accumulate-grad-batches does not work with --predict"),
        (["--accumulate-grad-batches", "0"], "an integer of at least 1"),
    ],
)
def test_steps_that_cannot_be(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["plan", "resnet18", *arguments])
    assert stop.value.code == 2
    assert said in capsys.readouterr().err


class TiedByCode(Module):
    """Its head reads the weight of its embedding, which no module's call shows."""

    def __init__(self) -> None:
        super().__init__(nn.Identity())
        self.tok = nn.Embedding(4096, 32)
        self.net = nn.Sequential(*(nn.Linear(32, 32) for _ in range(4)))
        self.example_input_array = torch.zeros(2, 4, dtype=torch.long)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.net(self.tok(x))
        return hidden @ self.tok.weight.T

    def loss(self, batch: Tensor) -> Tensor:
        return self(batch).square().mean()  # type: ignore[no-any-return]


@pytest.mark.rest("takes tenths of a second")
def test_a_table_whose_whole_weight_is_read_is_planned_whole(capsys: pytest.CaptureFixture[str]) -> None:
    """It was planned as if only rows came: a run's peak was nine times what had been said."""
    options = ["--precision", "32-true", "--optimizer-overlap", "off", "--k", "1", "--k-prime", "1"]
    found = plan(capsys, "tests.planner.test_plan_advice:TiedByCode", *options)
    assert found["tables"] == []
    assert any(note.startswith("tok: more than rows of it are read") for note in found["notes"])
    assert 'SuperpipelineStrategy(k=1, k_prime=1, optimizer_overlap="off", layers=["tok"])' in found["verdict"]
    bound = found["windows"][0]["device_bytes"] - found["activation_bytes"]
    strategy = SuperpipelineStrategy(k=1, k_prime=1, layers=["tok"])
    fit(TiedByCode, [torch.zeros(2, 4, dtype=torch.long)] * 2, strategy)
    assert 4096 * 32 * 4 < strategy.stats().peak_device_bytes <= bound


class Descends(Module):
    """Its optimizer has a state of one tensor per parameter, and its rate needs nothing of a run."""

    def __init__(self) -> None:
        super().__init__(Stack())
        self.example_input_array = torch.zeros(4, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)  # type: ignore[no-any-return]

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1)}


class DescendsInARun(Descends):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 1 / self.trainer.max_steps)


@pytest.mark.long("takes a second or more")
def test_the_optimizer_is_the_modules_own(capsys: pytest.CaptureFixture[str]) -> None:
    """Or AdamW where the module's own needs a run, and what the command line names in any case."""
    texts = {}
    for name, more, expected in (
        ("Descends", [], "SGD (configure_optimizers)"),
        ("DescendsInARun", [], "AdamW (--optimizer)"),
        ("Descends", ["--optimizer", "adamw"], "AdamW (--optimizer)"),
    ):
        main(["plan", f"tests.planner.test_plan_advice:{name}", "--k", "1", *more])
        texts[name, *more] = capsys.readouterr().out
        assert f"\nassumed: {expected}, " in texts[name, *more]
    own, named = (
        plan(capsys, "tests.planner.test_plan_advice:Descends", "--k", "1", *more)
        for more in ([], ["--optimizer", "adamw"])
    )
    assert named["host_bytes"] - own["host_bytes"] == 4 * own["parameters"], "one tensor of state less"


# ---------------------------------------------------------------- steps on the device


@pytest.mark.long("takes a second or more")
def test_steps_on_the_device_are_planned(capsys: pytest.CaptureFixture[str]) -> None:
    window = ("resnet18", "--k", "1", "--k-prime", "1")
    host, device = (plan(capsys, *window, "--optimizer-on", where) for where in ("cpu", "gpu"))
    late = plan(capsys, *window, "--optimizer-on", "gpu", "--optimizer-overlap", "forward")
    assert 'optimizer_on="gpu"' in device["verdict"]
    slots = device["windows"][0]["device_bytes"] - host["windows"][0]["device_bytes"]
    assert slots > 16 * max(layer["bytes"] for layer in device["layers"]) / 6, (
        "weights, gradients and state of one layer"
    )
    assert device["host_parts"]["gradients"] < late["host_parts"]["gradients"] / 10, "those of layers never leave"


@pytest.mark.long("takes a second or more")
@pytest.mark.parametrize("half", first(["bf16-true", "16-true"], "bf16-true", why="as bfloat16"))
def test_where_weights_have_16_bits_no_step_on_the_device_is_in_the_background(
    half: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where nothing is said of ``--optimizer-overlap``, a run chooses "off" by itself."""
    window = ("resnet18", "--k", "1", "--k-prime", "1", "--optimizer-on", "gpu", "--precision")
    chosen, off = (plan(capsys, *window, half, *more) for more in ((), ("--optimizer-overlap", "off")))
    wide, wide_off = (plan(capsys, *window, "bf16-mixed", *more) for more in ((), ("--optimizer-overlap", "off")))
    seconds = [found["windows"][0]["seconds"] for found in (chosen, off, wide, wide_off)]
    assert seconds[0] == seconds[1]
    assert seconds[2] < seconds[3]
