"""A step that users put on an optimizer is told from what torch and schedulers put there."""

from __future__ import annotations

import functools
import types
from typing import Any

import pytest
import torch
from torch import nn

from sp_lightning.core.torch_compat.patched import in_place_of, is_patched


def test_a_step_that_users_put_on_an_optimizer_is_told_from_what_schedulers_put_there() -> None:
    for schedules in (False, True):
        for patches in (False, True):
            optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
            if patches:

                def step(self: Any, closure: Any = None, own: Any = optimizer.step) -> Any:
                    return own(closure)

                functools.update_wrapper(step, optimizer.step)  # it has torch's name and attributes
                del step.__wrapped__  # type: ignore[attr-defined]
                vars(optimizer)["step"] = types.MethodType(step, optimizer)
            if schedules:
                torch.optim.lr_scheduler.StepLR(optimizer, 1)
            assert is_patched(optimizer, vars(optimizer).get("step")) == patches


class Counts:
    """Its method notes its calls."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def act(self, what: str) -> None:
        self.calls.append(what)

    def other(self, what: str) -> None:
        self.calls.append(f"other {what}")


def test_a_wrapper_that_others_leave_around_a_method_of_ours_stays() -> None:
    """Ours, which it calls, passes on to what was there before."""
    owner = Counts()
    for method in (owner.other, functools.partial(owner.other)):
        with in_place_of(owner, {"act": method}):
            inner = owner.act
            owner.act = lambda what, inner=inner: inner(f"wrapped {what}")  # type: ignore[method-assign, misc]
            owner.act("a")
        owner.act("b")
        assert owner.calls == ["other wrapped a", "wrapped b"]
        del owner.act
        owner.calls.clear()


def test_an_object_has_its_own_again_afterwards() -> None:
    owner = Counts()
    with in_place_of(owner, {"act": owner.other}):
        del owner.act  # others remove it
    assert vars(owner).keys() == {"calls"}
    own = owner.act = functools.partial(owner.other, "own")  # type: ignore[method-assign, assignment]
    with pytest.raises(KeyError), in_place_of(owner, {"act": owner.other}):
        raise KeyError
    assert vars(owner)["act"] is own
