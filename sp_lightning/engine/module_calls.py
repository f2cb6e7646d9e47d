"""Notifies the engine before and after each call of a module that uses layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from torch import nn

from sp_lightning.layers.layer import StreamedLayer
from sp_lightning.torch_compat.around_calls import release, surround
from sp_lightning.torch_compat.modes import never_compiled
from sp_lightning.torch_compat.private import trace_only_inlined

Visits = Sequence[StreamedLayer]


class Listener(Protocol):
    """Receives the beginning and the end of module calls."""

    def enter(self, visits: Visits, inputs: Any) -> Visits:
        """Called before the call of a module that uses the layers ``visits``. Returns the layers to pass to :meth:`leave`."""

    def leave(self, visits: Visits, output: Any) -> None:
        """Called after the module has returned or raised. If it raised, ``output`` is None."""


Run = Callable[[str, Any, nn.Module, Any, Any], Any]
"""Runs the call of a unit; see :attr:`~sp_lightning.engine.activations.Activations.run`."""


class ModuleCalls:
    """Calls the listener around each call of one module: before its pre-hooks and after its hooks.

    Args:
        listener: the object to call.
        module: the module.
        visits: the layers that the module uses.
        in_evaluation: the layers that the module uses in evaluation; None if they are ``visits``.
        unit: the name of the module as a unit of activations; None if it is not a unit.
        run: runs the calls of units; None if units are called like other modules.
    """

    def __init__(
        self,
        listener: Listener,
        module: nn.Module,
        visits: Visits,
        in_evaluation: Visits | None = None,
        unit: str | None = None,
        run: Run | None = None,
    ) -> None:
        self._listener = listener
        self._module = module
        self._visits = visits
        self._in_evaluation = in_evaluation
        self._unit = unit
        self._run = run
        self._rows = next((layer.rows for layer in visits if layer.rows.watches_calls), None)
        surround(module, self)

    def remove(self) -> None:
        """Ends the calls of the listener."""
        release(self._module, self)

    @trace_only_inlined
    def __call__(self, call: Any, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        visits = self._begin(args, kwargs)
        output = None
        try:
            if self._unit is None or self._run is None:
                output = call(module, *args, **kwargs)
            else:
                output = self._run(self._unit, call, module, args, kwargs)
            return output
        finally:  # also after Ctrl-C
            self._end(visits, output)

    @never_compiled  # transfers cannot be part of a compiled graph
    def _begin(self, args: Any, kwargs: Any) -> Visits:
        """Calls the listener's ``enter``. Layers that choose rows by the call's arguments (experts) get the arguments first."""
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
    run: Run | None = None,
) -> list[ModuleCalls]:
    """Calls a listener around the calls of modules, until the returned objects are removed.

    Args:
        listener: the object to call.
        visits: by module, the layers that the module uses.
        units: by name, the modules whose calls ``run`` runs.
        run: runs the calls of units; None if units are called like other modules.
    """
    unit_of = {module: name for name, module in (units or {}).items()}
    return [
        ModuleCalls(listener, module, used, _in_evaluation(module, visits), unit_of.get(module), run)
        for module, used in visits.items()
    ]


def _in_evaluation(module: nn.Module, visits: Mapping[nn.Module, tuple[StreamedLayer, ...]]) -> Visits | None:
    """Returns the layers that a module uses in evaluation; None if they are the same as in training.

    In evaluation torch's encoders read weights without calling their modules. ``nn.TransformerEncoderLayer`` reads the weights
    of all its submodules if the weights have no ``__torch_function__``. ``nn.TransformerEncoder`` reads the weights of its first
    layer to choose its path.
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
