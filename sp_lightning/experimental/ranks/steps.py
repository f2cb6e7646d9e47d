"""Optimizers of several ranks: each has the state of its rank's layers. Clipping and unscaling count all gradients."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import LBFGS, Optimizer

from sp_lightning.core.engine.engine import Engine
from sp_lightning.core.torch_compat.patched import attributes_of, in_place_of, is_patched
from sp_lightning.core.updates.clipping import Clipping
from sp_lightning.core.updates.fused import is_separable
from sp_lightning.experimental.ranks.agreement import settings
from sp_lightning.experimental.ranks.owners import ALIKE, RankOwners, closure_again
from sp_lightning.trainer.group import OwnedSteps
from sp_lightning.trainer.scaler import Found, HostGradScaler
from sp_lightning.trainer.update_facts import CLIPPING

if TYPE_CHECKING:
    from sp_lightning.experimental.ranks.ranks import Ranks


class RankSteps(OwnedSteps):
    """Divides optimizers by the owners of their layers.

    Args:
        ranks: the ranks.
        engine: returns the engine whose weights are stepped. The engine may be built again during a run.
    """

    def __init__(self, ranks: Ranks, engine: Callable[[], Engine]) -> None:
        self._ranks = ranks
        self._engine = engine
        self._owner_of = dict[nn.Parameter, int]()  # also of former engines
        self._made = dict[nn.Parameter, tuple[int, int]]()
        self._attached = ExitStack()

    @property
    def _owners(self) -> RankOwners:
        owners = self._engine().owners
        assert isinstance(owners, RankOwners)
        return owners

    def attach(self, optimizers: list[Optimizer], scaler: Any, plugin: Any) -> None:
        """Assigns layers to ranks, and divides the optimizers' state. Clips and unscales by all ranks' gradients.

        Raises:
            ValueError: an optimizer has no attribute ``state`` of its own, which could be divided, or is LBFGS.
        """
        self.detach()
        for divided in [attributes_of(each).get("state") for each in optimizers]:
            if isinstance(divided, DividedState):
                self._owner_of |= divided.owner_of
                self._made |= divided.made
        self._owners.assign(optimizers, self._owner_of, steps_alone)
        for optimizer in optimizers:
            if isinstance(optimizer, LBFGS):
                raise ValueError(closure_again(type(optimizer).__name__))
            if "state" not in attributes_of(optimizer):
                raise ValueError(
                    f"{type(optimizer).__name__} gives the state of an optimizer that it wraps, and several devices divide it. "
                    "Return the wrapped optimizer from configure_optimizers, or pass Trainer(devices=1)."
                )
            if not isinstance(attributes_of(optimizer)["state"], DividedState):
                optimizer.state = DividedState(self._ranks, optimizer, self._owner_of, self._made)
        if isinstance(scaler, HostGradScaler):
            unscale = scaler._unscale_grads_

            def unscale_grads(*args: Any) -> Found:
                with self._owners.changing("unscaling of gradients"):
                    return self._agree(unscale(*args))

            self._attached.enter_context(in_place_of(scaler, {"_unscale_grads_": unscale_grads}))
        clip = plugin.clip_gradients

        def clip_gradients(optimizer: Any, clip_val: Any = 0.0, *args: Any, **kwargs: Any) -> None:
            methods = {"clip_grad_by_norm": self._by_norm, "clip_grad_by_value": self._by_value}
            put = in_place_of(plugin, {name: methods[name] for name in CLIPPING if name not in vars(plugin)})
            with put, self._owners.changing("clipping of gradients") if clip_val > 0 else nullcontext():
                clip(optimizer, clip_val, *args, **kwargs)

        self._attached.enter_context(in_place_of(plugin, {"clip_gradients": clip_gradients}))

    def detach(self) -> None:
        self._attached.close()

    def owned(self, optimizers: list[Optimizer]) -> AbstractContextManager[None]:
        return self._owners.divided(optimizers)

    def _by_norm(self, optimizer: Any, clip_val: float) -> None:
        clipping = Clipping(optimizer, self._engine())
        clipping.at_once = True
        clipping.by_norm(optimizer, clip_val)

    def _by_value(self, optimizer: Any, clip_val: float) -> None:
        clipping = Clipping(optimizer, self._engine())
        clipping.at_once = True
        clipping.by_value(optimizer, clip_val)

    def _agree(self, found: Found) -> Found:
        """Returns whether any rank has found a gradient that is not finite; empty if no rank has gradients."""
        largest = torch.tensor([max((float(each) for each in found.values()), default=-1.0)], device="cpu")
        self._ranks.largest(largest, "unscaling of gradients")
        return {} if largest < 0 else {torch.device("cpu"): largest[0]}


def steps_alone(optimizer: Any) -> bool:
    """Returns True if an optimizer is known to step each parameter by itself. Then each rank may step some parameters."""
    kind = type(optimizer)
    is_torchs = getattr(torch.optim, kind.__name__, None) is kind
    patched = is_patched(optimizer, attributes_of(optimizer).get("step"))
    return (is_torchs or is_separable(optimizer)) and not patched


class DividedState(defaultdict[Any, Any]):
    """The state of an optimizer, of the parameters that this rank owns.

    Reading the state of other parameters, or of all, raises an error that names the owner.

    Args:
        ranks: the ranks.
        optimizer: the optimizer, whose present state this takes.
        owner_of: the rank of the node that owns each parameter.
        made: by parameter, the step that has made its state, for the order of the state on plain Lightning.
    """

    def __init__(
        self,
        ranks: Ranks,
        optimizer: Optimizer,
        owner_of: Mapping[nn.Parameter, int],
        made: dict[nn.Parameter, tuple[int, int]],
    ) -> None:
        state: dict[Any, Any] = attributes_of(optimizer)["state"]
        super().__init__(
            dict, {p: dict.get(state, p) for p in dict.keys(state) if owner_of.get(p, ranks.rank) == ranks.rank}
        )
        self.ranks, self._optimizer, self.owner_of, self.made = ranks, optimizer, owner_of, made

    def _refuse(self, parameters: Sequence[Any]) -> None:
        for parameter in parameters:
            owner = self.owner_of.get(parameter, self.ranks.rank)
            if owner != self.ranks.rank:
                name = self.ranks.called(self.ranks.node * self.ranks.size + owner)
                raise RuntimeError(
                    f"The optimizer's state of a parameter of shape {tuple(parameter.shape)} was read on {self.ranks.name}, but "
                    f"{name} steps its layer and has its state. Read it there, or call "
                    "trainer.strategy.optimizer_state(optimizer) on all ranks: it returns the whole state on rank 0."
                )

    def __missing__(self, key: Any) -> Any:
        self._refuse([key])
        self.made[key] = self.ranks.stepped, 0
        return super().__missing__(key)

    def __reduce__(self) -> Any:  # pickled and copied as an ordinary state
        return defaultdict, (dict, dict(self.items()))

    def gathered(self) -> dict[str, Any]:
        """Returns the optimizer's state dictionary. Rank 0's has the whole state, that of other ranks has none. Collective."""
        what = "gathering of an optimizer's state"
        self.ranks.compare(
            what, settings(self._optimizer), ALIKE
        )  # rank 0's are saved, and another rank may have stepped
        found: list[tuple[Any, Any, Any]] = []
        with self.ranks.together(what):
            for parameter in [p for group in self._optimizer.param_groups for p in group["params"]]:
                own = self.made.get(parameter, (0, 0)), dict.get(self, parameter)
                when, state = self.ranks.to_first(own, self.owner_of.get(parameter, 0)) or own
                if state is not None and self.ranks.first:
                    found.append((when, parameter, state))
        attributes = attributes_of(self._optimizer)
        attributes["state"] = {parameter: state for _, parameter, state in sorted(found, key=itemgetter(0))}
        try:
            return self._optimizer.state_dict()
        finally:
            attributes["state"] = self


def _checked(name: str) -> Any:
    """Returns a method of dictionaries that first checks that this rank has the state of the parameter, or of all parameters."""

    def method(self: DividedState, *args: Any) -> Any:
        self._refuse(args[:1] or [p for group in self._optimizer.param_groups for p in group["params"]])
        return getattr(defaultdict, name)(self, *args)

    return method


for _name in ("__contains__", "get", "setdefault", "__iter__", "items", "keys", "values"):
    setattr(DividedState, _name, _checked(_name))


def owned_state(optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """Returns a state dictionary with the state of the parameters that this rank owns."""
    divided = attributes_of(optimizer)["state"]
    assert isinstance(divided, DividedState)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    divided.made |= {parameters[index]: (-1, position) for position, index in enumerate(state["state"])}
    own = {index for index, p in enumerate(parameters) if divided.owner_of.get(p, 0) == divided.ranks.rank}
    return {**state, "state": {index: value for index, value in state["state"].items() if index in own}}
