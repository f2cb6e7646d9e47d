"""Gradient scaling with gradients on the host."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor, nn

from sp_lightning import SuperpipelineStrategy
from sp_lightning.core.weights.gradient_roles import NarrowGradient, keep_narrow, stored, unwidened
from sp_lightning.trainer.scaler import HostGradScaler
from tests.support.models import Module, Stack, vectors
from tests.support.planted import is_streamed
from tests.support.runs import as_on_a_gpu, assert_equal, fit


def train(scaler: torch.amp.GradScaler, gradients: list[float]) -> tuple[list[torch.Tensor], dict[str, Any]]:
    parameter = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    seen = []
    for value in gradients:
        scaler.scale(torch.ones(()))
        parameter.grad = torch.full((3,), value) * scaler.get_scale()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        seen.append(parameter.detach().clone())
    return seen, scaler.state_dict()


def test_scales_skips_and_grows_as_torchs() -> None:
    gradients = [1.0, 2.0, float("inf"), 3.0, 4.0]
    options: dict[str, Any] = {"device": "cpu", "init_scale": 1024.0, "growth_interval": 2}
    ours, plain = (train(kind(**options), gradients) for kind in (HostGradScaler, torch.amp.GradScaler))
    assert [value.tolist() for value in ours[0]] == [value.tolist() for value in plain[0]]
    assert ours[1] == plain[1]
    assert torch.equal(ours[0][1], ours[0][2]), "the step with an infinite gradient is skipped"


DEVICE = Tensor.device.__get__


class OnTheWay(Tensor):
    """A value on an accelerator: a copy that nobody waits for has not arrived when the CPU reads it."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == DEVICE:  # a new object each time
            return torch.device("cuda", 0)
        func = Tensor.clone if func is Tensor.__deepcopy__ else func
        args = args[:1] if func is Tensor.clone else args
        with torch.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
            if (kwargs or {}).get("non_blocking"):
                return torch.full_like(result, 7.0).as_subclass(Tensor)
            return result.as_subclass(Tensor if func is Tensor.cpu else cls) if isinstance(result, Tensor) else result


def test_the_cpu_does_not_read_a_scale_that_is_on_its_way() -> None:
    parameter = nn.Parameter(torch.ones(3))
    parameter.grad = torch.full((3,), 8.0)
    scale, found = (torch.tensor(value).as_subclass(OnTheWay) for value in (0.25, 0.0))
    scaler = HostGradScaler(device="cpu")
    infinite = scaler._unscale_grads_(torch.optim.SGD([parameter]), scale, found, allow_fp16=False)
    assert parameter.grad.tolist() == [2.0, 2.0, 2.0]
    assert [value.item() for value in infinite.values()] == [0.0]


def test_a_fused_optimizer_does_not_read_a_scale_that_is_on_its_way() -> None:
    """torch's ``step`` sets it as ``grad_scale``, by which the fused kernel divides the gradients."""
    scaler = HostGradScaler(device="cpu")
    scaler._scale = torch.tensor(4.0).as_subclass(OnTheWay)
    scale = scaler._get_scale_async()
    assert type(scale) is Tensor, "a copy on the CPU, for which the call has waited"
    assert scale.item() == 4.0


@pytest.mark.parametrize("overlap", ["off", "forward", "backward"])
@pytest.mark.parametrize("fused", [True, None])
def test_the_cpu_does_not_read_a_learning_rate_that_is_on_its_way(
    fused: bool | None, overlap: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's fused steps copy it to the CPU without blocking."""
    adam: Any = import_module("torch.optim.adam")
    real, rates = adam._fused_adam, set[type]()

    def noting(*args: Any, lr: Any, **kwargs: Any) -> None:
        rates.add(type(lr))  # updates in the background read an OnTheWay as a plain tensor
        real(*args, lr=lr, **kwargs)

    monkeypatch.setattr(adam, "_fused_adam", noting)

    class Learns(Module):
        def configure_optimizers(self) -> Any:
            rate = torch.tensor(0.01)
            self.rate = rate.as_subclass(OnTheWay) if is_streamed(self) else rate
            return torch.optim.AdamW(self.parameters(), lr=self.rate, fused=fused if is_streamed(self) else True)

    strategy = SuperpipelineStrategy(k=1, k_prime=1, optimizer_overlap=overlap)  # type: ignore[arg-type]
    with as_on_a_gpu():
        ours = fit(lambda: Learns(Stack()), vectors(), strategy, recorded="nothing")
    plain = fit(lambda: Learns(Stack()), vectors(), recorded="nothing")
    assert_equal(ours.state, plain.state, "weights")
    (group,) = ours.trainer.optimizers[0].param_groups
    assert group["lr"] is ours.trainer.lightning_module.rate, "the user's tensor is back"
    assert rates == {Tensor}, "a copy on the CPU, for which a call has waited"


FINITE = [1.0, -3.0, 65504.0, -65504.0, 2.0**-24, -0.0, 0.0, 0.1]


@pytest.mark.parametrize("scale", [2.0**16, 3.0, 1.0, 2.0**-126, 2.0**120])
@pytest.mark.parametrize("odd", [None, float("inf"), -float("inf"), float("nan")])
@pytest.mark.parametrize("where", ["narrow", "wide"])
def test_narrow_gradients_are_unscaled_as_torchs_scaler_unscales_wide_ones(
    odd: float | None, scale: float, where: str
) -> None:
    """Twice, as after a step that was skipped: the second time torch finds what the first multiplication has made."""
    odds = [] if odd is None else [odd]
    values = [
        torch.tensor(FINITE * 5 + odds * (where == "narrow") + FINITE * 7, dtype=torch.float16),
        torch.randn(3, 5, 2, 2).half().to(memory_format=torch.channels_last),
        torch.tensor([], dtype=torch.float16),
    ]

    def unscaled(kind: type[torch.amp.GradScaler]) -> list[Any]:
        parameters = [nn.Parameter(torch.zeros_like(value, dtype=torch.float32)) for value in values]
        for parameter, value in zip(parameters, values, strict=True):
            if kind is HostGradScaler:
                keep_narrow(parameter, value, looked_at=lambda: None)
            else:
                parameter.grad = value.float()
        wide, without = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(3))
        wide.grad = torch.tensor([1.0, 2.0, odd if odds and where == "wide" else 3.0])
        optimizer = torch.optim.SGD([{"params": parameters}, {"params": [wide, without]}])
        found = []
        for _ in range(2):
            inverse = torch.tensor(scale).double().reciprocal().float()
            infinite = kind(device="cpu")._unscale_grads_(optimizer, inverse, torch.zeros(()), False)
            found.append({str(device): value.item() for device, value in infinite.items()})
        assert without.grad is None
        return [found, [parameter.grad for parameter in (*parameters, wide)]]

    assert_equal(unscaled(HostGradScaler), unscaled(torch.amp.GradScaler), "found, and gradients")


def test_a_narrow_gradient_stays_narrow_and_as_it_came_when_it_is_unscaled() -> None:
    parameter, came = nn.Parameter(torch.zeros(3)), torch.tensor([1.0, 2.0, 4.0]).half()
    keep_narrow(parameter, came, looked_at=lambda: None)
    HostGradScaler(device="cpu")._unscale_grads_(
        torch.optim.SGD([parameter]), torch.tensor(0.25), torch.zeros(()), False
    )
    gradient = stored(parameter)
    assert unwidened(gradient) is came
    assert came.tolist() == [1.0, 2.0, 4.0]
    assert type(gradient) is NarrowGradient
    assert parameter.grad is not None
    assert parameter.grad.tolist() == [0.25, 0.5, 1.0]


@pytest.mark.parametrize("own", [True, False])
def test_the_scaler_of_16_mixed_is_exchanged(own: bool) -> None:
    """torch's copies the scale without blocking, and the CPU may read it before it has come."""
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0) if own else None
    plugin = MixedPrecision("16-mixed", "cpu", scaler=scaler)
    strategy = SuperpipelineStrategy(precision_plugin=plugin)
    assert strategy.precision_plugin is plugin, "checkpoints name the plugin's class"
    assert type(plugin.scaler) is HostGradScaler
    assert plugin.scaler.is_enabled()
    if own:
        assert plugin.scaler.get_scale() == 64.0
