"""Activation checkpointing: backward runs a forward again, by torch's own checkpoint.

torch's checkpoint restores torch's random state and autocast, and leaves the rest to the user. This file does the rest, so that a
forward that runs twice has the effects of one run. Before the second run this file restores the state from before the first run,
and after the second run the present state:

- the module's buffers, with their sizes, and attributes (BatchNorm's statistics, spectral norms, counters, lists, tensors that
  ``functional_call`` puts in place of weights);
- the forward's arguments that are objects (a cache of keys and values);
- the random states of Python and NumPy, and context variables;
- which weights are trained, and which attention kernels are enabled.

Writes of weights and of tensors among the arguments cannot be undone and raise an error: a weight of the module as soon as the
first run has written it, any other weight if the second run writes it once more.

Other differences (a removed hook, a patched function, a kernel that is not deterministic) change the tensors that autograd saves.
So the tensors that the two runs save are compared (``fingerprints``).
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence, Set
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import CheckpointError, GraphExecGroup, checkpoint

from sp_lightning.capabilities.activations.fingerprints import (
    Differences,
    LayerAt,
    SavedRun,
    deterministic,
    differences,
)
from sp_lightning.capabilities.activations.policy import Remedies, some
from sp_lightning.capabilities.activations.snapshot import PlainWeight, Snapshot, host_of, put
from sp_lightning.core.device.accelerator import generator_states, set_generator_states
from sp_lightning.core.device.device import profiled
from sp_lightning.core.engine.engine import Engine
from sp_lightning.core.engine.saved_objects import plain_has_no_hooks
from sp_lightning.core.plan.choices import ActivationChoice
from sp_lightning.core.torch_compat.modes import no_transforms
from sp_lightning.core.torch_compat.patched import in_place_of
from sp_lightning.core.torch_compat.private import (
    TORCHSCRIPT,
    checkpoint_hook,
    current_graph_task,
    is_traceable_wrapper_subclass,
    preserve_version_counter,
    top_saved_tensors_hooks,
    tree_flatten,
    tree_unflatten,
)

_MODIFIED = "modified by an inplace operation"
"""Part of torch's error about a saved tensor that was written. The engine raises the same error."""


class Unrepeatable(RuntimeError):
    """A forward that cannot be run a second time as if it were the first."""


class Recompute:
    """Runs units' forwards so that autograd keeps only their inputs.

    Args:
        engine: the engine.
        choice: the user's ``activations=``.

    Attributes:
        differences: the results of comparisons of two runs.
    """

    def __init__(self, engine: Engine, choice: ActivationChoice) -> None:
        self._engine = engine
        self._layers_of = {name: engine.visits.get(module, ()) for name, module in engine.found.units.items()}
        self._remedies = Remedies(engine.module, engine.found.units, choice)
        self._of_step: WeakSet[FirstRun] = WeakSet()  # the first runs of this step whose graphs are alive
        self.differences = Differences(engine.device, pin=engine.pin)
        # torch's checkpoint restores the random state of its arguments' devices. Other arguments may all be on the host.
        self._anchor = engine.device.empty(0)
        # For each unit, the names of tensors that it writes without a change of their version.
        self._volatile: defaultdict[str, set[str]] = defaultdict(set)
        self._unpacked: FirstRun | None = None  # the one that has run again last
        # Positions of tensors that a unit saves unwritten, by the unit and the dtypes of the tensors up to the last short one;
        # and the backward in which they are looked for again.
        self._unwritten: dict[tuple[Any, ...], tuple[Set[int], int]] = {}
        self._backwards, self._skips = (
            0,
            False,
        )  # of those that skip unwritten tensors: the number; True if the present one does

    def run(self, unit: str, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Runs a unit's forward so that autograd keeps only its inputs.

        The second run has effects outside the module and its arguments: on hooks of inner modules, prints, files and global
        variables.

        Args:
            unit: the unit's name.
            module: the unit's module.
            forward: the forward.
            args, kwargs: its arguments.

        Raises:
            Unrepeatable: the forward has written something that cannot be restored, or has saved a tensor in TorchScript.
        """
        given: Any = (tuple(args), kwargs)
        leaves, structure = tree_flatten(given, is_leaf=_is_leaf)
        # One object in two arguments has to be one object in the second run: attention tests whether query and key are the same.
        once = {id(leaf): leaf for leaf in leaves}
        position = {identity: number for number, identity in enumerate(once)}
        positions = [position[id(leaf)] for leaf in leaves]
        plain = plain_has_no_hooks()
        first = FirstRun(
            unit,
            module,
            list(once.values()),
            self._volatile[unit],
            self._engine.uses.layer_at,
            self._remedies,
            self._of_step,
        )

        def run(anchor: Tensor, *once: Any) -> Any:
            nonlocal given
            if given is not None:
                (args, kwargs), given = given, None  # the graph holds this function, which must not hold the arguments
                return self._run_first(first, forward, args, kwargs, plain)
            self._forget_unpacked(first)

            # Each run gets new lists and dicts, with the items from before the first run, which may have added items.
            def take() -> Any:
                return tree_unflatten([once[position] for position in positions], structure)

            again = partial(self._run_whole, first, forward, take, _Around(self._anchor.device))
            unwritten = self._find_unwritten(first, again)
            args, kwargs = take()
            # Backward may compute several gradients at once, by torch.vmap.
            with (
                self._compared(first, unwritten) as second,
                no_transforms(),
                self._rerun(unit, args),
                first.restored(self._watch_outside(unit)),
                second.noting(_unpacked, plain=plain),
            ):
                return first.before.context.copy().run(forward, *args, **kwargs)

        return checkpoint(run, self._anchor, *once.values(), use_reentrant=False)

    def _run_first(self, first: FirstRun, forward: Callable[..., Any], args: Any, kwargs: Any, plain: bool) -> Any:
        """Runs a forward for the first time, and finds out whether it must not run again. ``plain``: see :meth:`noting`."""
        with first.running(), first.saved.noting(first.unpacked, plain=plain):
            output = forward(*args, **kwargs)
        first.ended()
        self._of_step.add(first)
        return output

    def _forget_unpacked(self, next_run: FirstRun | None) -> None:
        """Frees the tensors that backward has unpacked. Only those of one forward are held, if the user retains the graph."""
        if (before := self._unpacked) is not None:
            before.read.clear()
            before.held.clear()
        self._unpacked = next_run

    @contextmanager
    def _compared(self, first: FirstRun, unwritten: Set[int]) -> Iterator[SavedRun]:
        """A context for a second run. At its end, the tensors that both runs have saved are compared.

        Args:
            first: the first run.
            unwritten: positions of tensors that are not compared.
        """
        count = self._engine.count_saved
        # The tensors of this run are on the device until the next forward runs again, or the graph is freed.
        hold = None if count is None else lambda tensor: first.held.append(count(tensor))
        second = SavedRun(self._engine.uses.layer_at, hold)
        try:
            yield second
        except Unrepeatable:  # it has a reason to name
            raise
        except BaseException:  # torch ends the second run by an exception
            self.differences.add(differences(first.saved, second, unwritten), first.differs)
            raise
        self.differences.add(differences(first.saved, second, unwritten), first.differs)

    def _run_whole(
        self,
        first: FirstRun,
        forward: Callable[..., Any],
        take: Callable[[], Any],
        around: _Around,
    ) -> SavedRun:
        """Runs a forward again to the end, only to see which tensors it saves.

        Args:
            first: the first run.
            forward: the forward.
            take: returns its positional and keyword arguments.
            around: the random states and autocast of the first run.
        """
        run = SavedRun(self._engine.uses.layer_at)
        with around.again():
            args, kwargs = take()
            with (
                self._rerun(first.unit, args),
                first.restored(self._watch_outside(first.unit)),
                run.noting(_unpacked, alone=True),
            ):
                first.before.context.copy().run(forward, *args, **kwargs)
        return run

    def _find_unwritten(self, first: FirstRun, again: Callable[[], SavedRun]) -> Set[int]:
        """Returns the positions of tensors that a forward saves without having written them.

        FlashAttention saves memory for a seed, which its kernel writes only if there is dropout. One more run, in which torch
        fills new memory, shows whether a short tensor of integers is of this kind. A kernel may write the memory in later batches
        (dropout begins). So one unit that skips such a tensor is looked at again in each backward, all of these units in turn.
        """
        if not (short := first.saved.short):
            return frozenset()
        key = (first.unit, *(each.kind[0] for each in first.saved.found[:short]))
        known = self._unwritten.get(key)
        if known is None or (known[0] and self._backwards >= known[1]):
            try:
                with deterministic():
                    found = again().filled(short)
            except Exception:  # no memory, or a forward that fails with deterministic algorithms
                return frozenset() if known is None else known[0]
            known = self._unwritten[key] = found, self._backwards + len(self._unwritten) + (known is None)
        self._skips = self._skips or bool(known[0])
        return known[0]

    @contextmanager
    def _rerun(self, unit: str, inputs: Any) -> Iterator[None]:
        """A context for the second run of a unit's forward. It drops ``self.log``: the first run has logged."""
        quiet = in_place_of(self._engine.module, {"log": _log_nothing})  # `self.log_dict` calls `self.log`
        again = self._engine.calls.rerun(self._layers_of[unit], inputs)
        with profiled(f"recomputation: {unit}"), again, quiet:
            try:
                yield
            except Exception as error:
                if not isinstance(error, Unrepeatable):
                    error.add_note(
                        f"This was raised when the forward of {unit!r} ran again in backward, to recompute its activations. "
                        'SuperpipelineStrategy(activations="offload") runs each forward once.'
                    )
                raise

    def _watch_outside(self, unit: str) -> Callable[[], str | None]:
        """Returns a function that looks for later writes of weights outside a unit, and for gradients from nested backwards.

        The function returns a text about the first finding, for an error message; None without one.
        """
        own = set(self._layers_of[unit])
        # Layers that the running backward has updated are left out: nothing may use them before the next step, and the update
        # may change their weights at any moment.
        others = [layer for layer in self._engine.layers if layer.owner not in own and not layer.owner.updated_early]
        before = [(layer, layer.parameters.host_writes()) for layer in others]
        stay = [
            PlainWeight.now(name, p)
            for layer in self._engine.found.stay
            for name, p in layer.parameters
            if not is_traceable_wrapper_subclass(p)
        ]
        given = self._engine.backward.given_by_nested()

        def done() -> str | None:
            for layer, old in before:
                if not layer.owner.updated_early and (now := layer.parameters.host_writes()) != old:
                    each = zip(layer.planned.spans, zip(*old, strict=True), zip(*now, strict=True), strict=True)
                    name = next(span.name for span, was, now_is in each if was != now_is)
                    return f"writes {name!r}, a weight outside of it"
            for weight in stay:
                if weight.is_written:
                    return f"writes {weight.name!r}, a weight outside of it"
                if weight.has_other_gradient:
                    return f"runs a backward that gives {weight.name!r} a gradient"
            trained = given()
            return None if trained is None else f"runs a backward that gives {trained!r} a gradient"

        return done

    def begin(self) -> None:
        """Called when a training step begins. A graph of an earlier step may be alive, but its backward is over in general."""
        self._of_step.clear()

    def backward_ended(self) -> None:
        """Called at the end of a backward. Drops its differences."""
        self.differences.clear()
        self._forget_unpacked(None)
        self._backwards, self._skips = self._backwards + self._skips, False


def _log_nothing(*args: Any, **kwargs: Any) -> None:
    """Takes the place of ``LightningModule.log``."""


def is_checkpointed() -> bool:
    """Returns True inside a non-reentrant checkpoint of the user, in its first or its second run."""
    return checkpoint_hook() is not None  # inside our own checkpoint, a SavedRun's hooks are the current ones


def _unpacked(unpack: Callable[[Any], Any], packed: Any) -> Any:
    return unpack(packed)


def _is_leaf(value: Any) -> bool:
    """Returns True if a value is one argument of torch's checkpoint. Only tuples, named tuples, lists and dicts are flattened."""
    return type(value) not in (tuple, list, dict) and not (isinstance(value, tuple) and hasattr(value, "_fields"))


class _Around:
    """The random states and autocast of a first run, as torch's checkpoint keeps them."""

    def __init__(self, device: torch.device) -> None:
        self._random = generator_states()
        self._autocast = [
            (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind), torch.is_autocast_cache_enabled())
            for kind in {device.type, "cpu"}
        ]

    @contextmanager
    def again(self) -> Iterator[None]:
        """A context with the random states and autocast of the first run, in which gradients are enabled."""
        now = generator_states()
        with ExitStack() as contexts:
            contexts.enter_context(no_transforms())
            contexts.enter_context(torch.enable_grad())
            for each in self._autocast:
                contexts.enter_context(torch.autocast(*each))
            set_generator_states(self._random)
            try:
                yield
            finally:
                set_generator_states(now)


class FirstRun:
    """The first run of a forward: a snapshot from before the run, the run's writes, and the tensors that autograd saves.

    Args:
        unit: the module's name.
        module: the module.
        given: the forward's arguments.
        volatile: the names of tensors that the unit has written without a change of their version. :meth:`ended` adds names.
        layer_at: finds weights on the device.
        remedies: makes the texts about ``activations=``, for errors.
        of_step: the first runs of the step, for errors.

    Attributes:
        unit: the module's name.
        before: the snapshot.
        saved: fingerprints of the tensors that autograd saves in the run.
        read: the tensors that the running backward has unpacked, by the objects that the graph holds in their place. The graph
            frees these objects, and so the tensors, as soon as it would free saved tensors.
        held: the objects that count the tensors of the last second run.
    """

    def __init__(
        self,
        unit: str,
        module: nn.Module,
        given: Sequence[Any],
        volatile: set[str],
        layer_at: LayerAt,
        remedies: Remedies,
        of_step: Set[FirstRun],
    ) -> None:
        self.unit = unit
        self._module = module
        self._remedies = remedies
        self._of_step = of_step
        self.before = Snapshot(module, given)
        self.saved = SavedRun(layer_at)
        self._volatile = volatile
        self._again = 0  # the number of further runs
        self.read: WeakKeyDictionary[Any, Tensor] = WeakKeyDictionary()
        self.held: list[Any] = []
        self._task = -1  # the backward that has unpacked them
        self._unchanged: list[tuple[str, Tensor, int]] = []  # tensors that the forward has not changed
        self.scripted: str | None = None
        """The function of TorchScript that has saved a tensor for backward in the forward."""

    @contextmanager
    def running(self) -> Iterator[None]:
        """A context for the first run. In the context, :func:`first_runs` contains the run."""
        _watch_torchscript()
        first_runs().append(self)
        try:
            yield
        finally:
            first_runs().remove(self)

    def ended(self) -> None:
        """Called after the first run. Drops the copies of large tensors that the forward has not changed.

        Raises:
            Unrepeatable: the forward has written a weight or an argument, has given a weight a gradient, or has saved a tensor in
                TorchScript.
        """
        before = self.before
        if self.scripted is not None:
            # TorchScript profiles its first call, operator by operator. A later call runs an optimized graph, which saves other
            # tensors in another order: if their shapes agree, gradients are wrong. torch's own checkpoint has this defect. Also,
            # the exception that ends its second run early cannot pass through TorchScript's interpreter.
            self.refuse(
                f"calls {self.scripted!r} in TorchScript, which saves other tensors for backward once it is optimized"
            )
        for weight in before.weights:
            if weight.is_written:
                self.refuse(f"writes its parameter {weight.name!r}")
            if weight.has_other_gradient:
                self.refuse(f"runs a backward that gives its parameter {weight.name!r} a gradient")
        for tensor, version in before.inputs:
            if tensor._version != version:
                self.refuse(f"writes a tensor of shape {tuple(tensor.shape)} that it is given")
        before.inputs.clear()  # a weight among them keeps its layer on the device
        for name, copied in list(before.tensors.items()):
            if copied.kept or copied.tensor._version != copied.version or not copied.is_in_place:
                continue
            if not copied.trusted and not copied.same_bits:
                self._volatile.add(name)  # written through .data or NumPy
            elif name not in self._volatile:
                del before.tensors[name]
                self._unchanged.append((name, copied.tensor, copied.version))

    def check(self) -> None:
        """Checks that no state was written since the first run that a further run needs and cannot restore.

        Raises:
            Unrepeatable: a weight or another tensor was written, or a weight or module was exchanged.
        """
        for name, how in self._changed():
            # If all trained weights were written between two backwards, an optimizer has probably stepped those of all layers.
            # Between forward and backward, a hook may have written the only weights of a small unit.
            trained = [weight.is_written for weight in self.before.weights if weight.is_trained()]
            every = how == _MODIFIED and bool(trained) and all(trained)
            again = self._again > 1
            by = (
                "an optimizer has stepped it, perhaps"
                if again
                else "by a hook (on_before_zero_grad) or an optimizer, perhaps"
            )
            # Backward begins with the last unit. Without the others, the user would need a run for each unit.
            changed = {first.unit for first in self._of_step if not first.updated_early and any(first._changed())}
            concerned = [unit for unit in self._remedies.units if unit == self.unit or unit in changed]
            others = [unit for unit in concerned if unit != self.unit]
            raise Unrepeatable(
                f"{name!r} of {self.unit!r} has been {how} between "
                f"{'two backwards of one graph' if again else 'forward and backward'}{f' ({by})' * every}. "
                f"{f'Also changed: {some(others)}. ' if others else ''}Each backward was to "
                f"compute the forward again. {self._remedy(concerned)}"
            )

    @property
    def updated_early(self) -> bool:
        """True if the running backward has updated weights of the unit: it has passed the unit."""
        return any(weight.updated_early for weight in self.before.weights)

    def _changed(self) -> Iterator[tuple[str, str]]:
        """Yields the names of state that has changed since the first run and cannot be restored, each with the change."""
        for weight in self.before.weights:
            if weight.is_written:
                yield weight.name, _MODIFIED
        for name, place, key, held in self.before.held:
            if host_of(place.get(key)) is not held:
                yield name, "exchanged"
        # Another call of the unit may have written a tensor without a change of its version.
        for name, tensor, version in self._unchanged:
            if tensor._version != version or name in self._volatile:
                yield name, _MODIFIED

    @contextmanager
    def restored(self, done: Callable[[], str | None]) -> Iterator[None]:
        """A context with the state from before the first run. The present state is restored at its end.

        Args:
            done: a result of ``_watch_outside``. Returns a text about an action that prevents a second run; None without one.

        Raises:
            Unrepeatable: state that cannot be restored was written since the first run (:meth:`check`), or ``done`` returns a
                text after the second run.
        """
        self._again += 1
        self.check()
        tensors = self.before.tensors.values()
        states = [*(copied.state for copied in tensors), *self.before.states]
        now = [state.read() for state in states]
        with preserve_version_counter(tuple(copied.tensor for copied in tensors)):
            try:
                put(states, (state.before for state in states))
                yield
            finally:  # torch ends the second run by an exception as soon as it has saved the tensors that backward needs
                put(states, now)
                self.refuse(done())

    def unpacked(self, unpack: Callable[[Any], Any], packed: Any) -> Any:
        """Unpacks a tensor that the forward has saved. The first call in a backward runs the forward again.

        A tensor may be unpacked several times, as in plain autograd: ``len(ctx.saved_tensors)`` unpacks all. torch's checkpoint
        unpacks it once.

        Raises:
            Unrepeatable: a tensor among the forward's arguments was written since, or the second run has saved other tensors.
        """
        if (task := current_graph_task()) != self._task:
            self.read.clear()
            self._task = task
        if (tensor := self.read.get(packed)) is None:
            tensor = self.read[packed] = self._unpack(unpack, packed)
        return tensor

    def _unpack(self, unpack: Callable[[Any], Any], packed: Any) -> Any:
        before = self._again
        try:
            return unpack(packed)
        except CheckpointError as error:
            if self._again != before:  # the second run has saved tensors of other shapes or dtypes, or fewer
                raise self.differs() from error
            with (
                GraphExecGroup()
            ):  # unpacked before and freed since: in a new group torch's checkpoint runs the forward again
                return self._unpack(unpack, packed)
        except RuntimeError as error:
            # Arguments are unpacked before the second run begins.
            if self._again == before and _MODIFIED in str(error):
                raise Unrepeatable(
                    f"A tensor that {self.unit!r} was given has been written since its forward, which backward was to compute "
                    f"again. Write x = x + layer(x) in place of x += layer(x). {self._remedy()}"
                ) from error
            raise

    def differs(self) -> Unrepeatable:
        """Returns the error for a second run that has saved other values."""
        found = f"The forward of {self.unit!r} computed other values in backward than in forward"
        return Unrepeatable(
            f"{found}. It depends on what has changed in "
            "between (a hook, a patched function or class, a context, a global variable: parametrize.cached() has one), or on a "
            f"kernel that is not deterministic (Trainer(deterministic=True)). {self._remedy()}"
        )

    def refuse(self, done: str | None) -> None:
        """Raises an error about a forward if it has done anything that prevents a second run.

        Args:
            done: the forward's action, as the message names it after "The forward of …"; None if there is none.

        Raises:
            Unrepeatable: ``done`` is not None.
        """
        if done is not None:
            raise Unrepeatable(f"The forward of {self.unit!r} {done}, and cannot be run again. {self._remedy()}")

    def _remedy(self, concerned: Collection[str] = ()) -> str:
        """Returns the end of an error: the option that runs forwards of these units once; without names, those of this unit."""
        modes = self._remedies.without(concerned or (self.unit,))
        saved = (
            "what all layers save"
            if modes == '"offload"'
            else "what they save"
            if len(concerned) > 1
            else "what it saves"
        )
        every = "" if modes == '"offload"' else ', or, for all layers, activations="offload"'
        return (
            f'This is under activations="recompute". Keep or offload {saved}: '
            f"SuperpipelineStrategy(activations={modes}){every}."
        )


_of_thread = threading.local()


def first_runs() -> list[FirstRun]:
    """Returns the first runs that are running in this thread, outermost first."""
    if not hasattr(_of_thread, "first_runs"):
        _of_thread.first_runs = []
    found: list[FirstRun] = _of_thread.first_runs
    return found


@cache
def _watch_torchscript() -> None:
    """Replaces ``__call__`` of TorchScript's classes, once in a process, to record calls that save tensors in first runs.

    torch has no hooks for TorchScript's calls.
    """
    for kind in TORCHSCRIPT:
        kind.__call__ = _watched(kind.__call__)


def _watched(call: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a replacement for ``call``. It sets :attr:`FirstRun.scripted` if the call saves a tensor in a first run."""

    def run(function: Any, *args: Any, **kwargs: Any) -> Any:
        hooks = top_saved_tensors_hooks() if first_runs() else None
        if hooks is None:
            return call(function, *args, **kwargs)
        pack, unpack = hooks

        def noted(tensor: Tensor) -> Any:
            for first in first_runs():
                first.scripted = function.name
            return pack(tensor)

        with saved_tensors_hooks(noted, unpack):
            return call(function, *args, **kwargs)

    return run
