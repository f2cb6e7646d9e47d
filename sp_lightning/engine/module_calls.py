"""Calls of modules, by which the engine knows when a module that uses layers is called and when it returns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from torch import nn

from sp_lightning.layers.layer import StreamedLayer
from sp_lightning.torch_compat.around_calls import release, surround
from sp_lightning.torch_compat.modes import never_compiled
from sp_lightning.torch_compat.private import trace_only_inlined

Visits = Sequence[StreamedLayer]


class Listener(Protocol):
    """Is told of calls of modules."""

    def enter(self, visits: Visits, inputs: Any) -> Visits:
        """Called before a module that uses these layers. Returns the layers that :meth:`leave` is to get."""

    def leave(self, visits: Visits, output: Any) -> None:
        """Called after the module has returned, or has raised (``output`` is then None)."""


class Runner(Protocol):
    """Runs the calls of units."""

    def run(self, unit: str, call: Any, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Returns ``call(module, *args, **kwargs)``."""


class ModuleCalls:
    """What the engine does around each call of one module: before its pre-hooks, and after its hooks.

    Args:
        listener: is told of each call.
        module: the module.
        visits: the layers that it uses.
        in_evaluation: the layers that it uses in evaluation; None if they are the same.
        unit: the unit that the module is; None if it is none.
        runner: runs the calls of a unit.
    """

    def __init__(
        self,
        listener: Listener,
        module: nn.Module,
        visits: Visits,
        in_evaluation: Visits | None = None,
        unit: str | None = None,
        runner: Runner | None = None,
    ) -> None:
        self._listener = listener
        self._module = module
        self._visits = visits
        self._in_evaluation = in_evaluation
        self._unit = unit
        self._runner = runner
        self._rows = next((layer.rows for layer in visits if layer.rows.watches_calls), None)
        surround(module, self)

    def remove(self) -> None:
        """Leaves the calls of the module alone from now on."""
        release(self._module, self)

    @trace_only_inlined
    def __call__(self, call: Any, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        visits, output = self._begin(args, kwargs), None
        try:
            if self._unit is None or self._runner is None:
                output = call(module, *args, **kwargs)
            else:
                output = self._runner.run(self._unit, call, module, args, kwargs)
            return output
        finally:  # after Ctrl-C, too
            self._end(visits, output)

    @never_compiled  # transfers cannot be part of a compiled graph
    def _begin(self, args: Any, kwargs: Any) -> Visits:
        if self._in_evaluation is not None and not self._module.training:
            return self._listener.enter(self._in_evaluation, args)
        if self._rows is None:
            return self._listener.enter(self._visits, args)
        self._rows.begin_call(self._module, args, kwargs)
        try:
            return self._listener.enter(self._visits, (args, kwargs))
        except BaseException:
            self._rows.end_call()
            raise

    @never_compiled
    def _end(self, visits: Visits, output: Any) -> None:
        if self._rows is not None:
            self._rows.end_call()
        self._listener.leave(visits, output)


def listen(
    listener: Listener,
    visits: Mapping[nn.Module, tuple[StreamedLayer, ...]],
    units: Mapping[str, nn.Module] | None = None,
    runner: Runner | None = None,
) -> list[ModuleCalls]:
    """Has a listener told of the calls of modules, as long as the returned objects exist and are not removed.

    Args:
        listener: is told.
        visits: the modules, and the layers that each uses.
        units: by name, the modules whose calls ``runner`` runs.
        runner: runs them.
    """
    unit_of = {module: name for name, module in (units or {}).items()}
    return [
        ModuleCalls(listener, module, used, _in_evaluation(module, visits), unit_of.get(module), runner)
        for module, used in visits.items()
    ]


def _in_evaluation(module: nn.Module, visits: Mapping[nn.Module, tuple[StreamedLayer, ...]]) -> Visits | None:
    """The layers that a module uses in evaluation, in which torch's encoders read weights without calling their modules.

    ``nn.TransformerEncoderLayer`` then computes with the weights of all modules in it, if they have no ``__torch_function__``.
    ``nn.TransformerEncoder`` looks at the weights of its first layer to choose its path.
    """
    read: nn.Module
    if isinstance(module, nn.TransformerEncoder) and len(module.layers):
        read = module.layers[0]
    elif isinstance(module, nn.TransformerEncoderLayer):
        read = module
    else:
        return None
    used = {layer for child in (module, *read.modules()) for layer in visits.get(child, ())}
    return None if used == set(visits[module]) else tuple(sorted(used, key=lambda layer: layer.index))
