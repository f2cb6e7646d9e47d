"""Optimizers that wrap another one and give its groups and its state by properties."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.models import Module, Stack, vectors
from tests.support.runs import assert_same, fit, superpipeline
from tests.support.simdevice import simulated


class Wrapper(torch.optim.Optimizer):
    """As accelerate's ``AcceleratedOptimizer``, which does not call its base class."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner

    state: Any = property(lambda self: self.inner.state)
    param_groups: Any = property(lambda self: self.inner.param_groups)
    defaults: Any = property(lambda self: self.inner.defaults)

    def state_dict(self) -> Any:
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: Any) -> None:
        self.inner.load_state_dict(state_dict)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)


class WithHooks(Wrapper):
    """As Opacus' ``DPOptimizer``: torch's hooks around the step are there, and the properties can be set."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner)
        self.register_step_pre_hook(lambda *_: None)

    _optimizer_step_pre_hooks: Any = property(lambda self: self.inner._optimizer_step_pre_hooks)
    _optimizer_step_post_hooks: Any = property(lambda self: self.inner._optimizer_step_post_hooks)
    state = property(lambda self: self.inner.state, lambda self, value: setattr(self.inner, "state", value))


class Wrapped(Module):
    def __init__(self, kind: type[Wrapper]) -> None:
        super().__init__(Stack(4))
        self.kind = kind

    def configure_optimizers(self) -> Any:
        return self.kind(torch.optim.AdamW(self.parameters(), lr=1e-2))


@pytest.mark.long("takes a second or more")
@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
@pytest.mark.parametrize("kind", [Wrapper, WithHooks])
def test_like_plain_and_from_a_checkpoint(kind: type[Wrapper], tmp_path: Path) -> None:
    """Set-up looked for ``state`` in the object's attributes and failed with ``KeyError: 'state'``."""

    def run(strategy: Any, file: Path) -> list[Any]:
        first = fit(lambda: Wrapped(kind), vectors(), strategy())
        first.trainer.save_checkpoint(file)
        return [first, fit(lambda: Wrapped(kind), vectors(), strategy(), ckpt_path=file, max_epochs=2)]

    plain = run(lambda: "auto", tmp_path / "plain.ckpt")
    for k in (1, 2):
        for ours, theirs in zip(run(lambda k=k: superpipeline(k=k), tmp_path / f"{k}.ckpt"), plain, strict=True):
            assert_same(ours, theirs)


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.parametrize("kind", [Wrapper, WithHooks])
def test_on_a_device_of_its_own(kind: type[Wrapper]) -> None:
    """Whether its step may run in the background was asked of hooks that it does not have, too."""
    plain = fit(lambda: Wrapped(kind), vectors(), recorded="nothing")
    with simulated():
        assert_same(fit(lambda: Wrapped(kind), vectors(), superpipeline(k=1), recorded="nothing"), plain)
