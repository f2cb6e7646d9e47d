"""``python -m sp_lightning plan``: adapters, modules without values, what would make it faster, and what to write."""

from __future__ import annotations

import re

import peft
import pytest
import torch
import transformers
from torch import Tensor, nn

from sp_lightning.__main__ import main
from tests.support.answers import plan
from tests.support.models import Module


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


def test_adapters_are_planned(capsys: pytest.CaptureFixture[str]) -> None:
    found = plan(capsys, "tests.cli.test_plan_advice:adapted", "--input", "2", "8", "--k", "1", "--k-prime", "1")
    real = adapted()
    assert found["activation_bytes"], "it was run on paper"
    assert found["parameters"] == sum(parameter.numel() for parameter in real.parameters())
    trained = sum(parameter.numel() for parameter in real.parameters() if parameter.requires_grad)
    assert 0 < trained < 0.1 * found["parameters"]
    weights = 6 * found["parameters"]  # float32 and its cast
    assert weights < found["host_bytes"] < weights + 40 * trained + 2**18


def test_activations_that_travel_too_slowly_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    main(["plan", "resnet18", "--batch", "64", "--k", "1", "--k-prime", "1", "--activations", "offload", "--pcie", "1"])
    (line,) = re.findall(r"^faster: (.*)$", capsys.readouterr().out, re.MULTILINE)
    assert re.fullmatch(r"with .*% of the time is waited for activations; recompute some of them, or .*", line)


@pytest.mark.parametrize(
    ("arguments", "choice"),
    [
        ((), "(k=1, k_prime=1)"),
        (("--overlap", "backward", "--activations", "recompute"),
         '(k=1, k_prime=1, activations="recompute", optimizer_overlap="backward")'),
        (("--resident", "fc", "--layers", "layer1.*", "layer2.*"),
         '(k=1, k_prime=1, layers=["layer1.*", "layer2.*"], resident=["fc"])'),
    ],
)  # fmt: skip
def test_the_last_line_has_every_option_that_the_answer_depends_on(
    arguments: tuple[str, ...], choice: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found = plan(capsys, "resnet18", "--k", "1", "--k-prime", "1", "--gpu-memory", "8GiB", *arguments)
    assert found["verdict"].startswith(f"It fits: SuperpipelineStrategy{choice}, ")


@pytest.mark.parametrize(("precision", "gradients"), [("bf16-mixed", 2), ("16-mixed", 2), ("32-true", 4)])
def test_gradients_that_stay_in_16_bits_are_counted_so_and_what_widens_them_is_named(
    precision: str, gradients: int, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["plan", "resnet18", "--k", "1", "--k-prime", "1", "--precision", precision])
    (line,) = re.findall(r"^host memory (.*)$", capsys.readouterr().out, re.MULTILINE)
    (mib,) = re.findall(r"gradients (.*?) MiB", line)
    assert float(mib) == pytest.approx(gradients * 11.69e6 / 2**20, rel=0.05)
    assert ("hooks between two steps" in line) == (gradients == 2)


@pytest.mark.rest("the largest torchvision model")
def test_a_model_of_one_size_is_run_with_that(capsys: pytest.CaptureFixture[str]) -> None:
    """The weights of ``vit_h_14`` were trained with images of 518 pixels, and the model that is made takes 224."""
    found = plan(capsys, "vit_h_14", "--k", "1", "--k-prime", "1")
    assert found["activation_bytes"]


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


def test_a_module_on_the_meta_device(capsys: pytest.CaptureFixture[str]) -> None:
    """A run would take its values from a file; here it needs none."""
    found, same = (
        plan(capsys, f"tests.cli.test_plan_advice:{name}", "--input", "4", "16", "--k", "1")
        for name in ("TiedOnMeta", "Tied")
    )
    assert found["parameters"] == 3 * 16 * 16 + 4 * 16
    assert {**found, "model": ""} == {**same, "model": ""}
