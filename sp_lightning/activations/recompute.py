"""A forward whose inner results are not kept: backward computes them once more, by torch's own checkpoint.

torch restores its random state and autocast, and leaves the rest to the user. Here the rest is done for the user: a forward
that runs twice leaves the traces of one run, and finds the second time what it found the first time. For the second run,
these are what they were before the first one: the module's buffers and attributes (BatchNorm's statistics, spectral norms,
counters, lists, tensors that ``functional_call`` puts in place of weights), the objects that it is given (a cache of keys
and values), the random states of Python and NumPy, context variables, which weights are trained, and the choice of attention
kernels. After the second run, they are as they were before it. What cannot be put back, as a weight or an argument that the
forward writes, is refused by name: a weight of the module as soon as the first run has written it, another one if the second
run writes it once more.

Whatever else differs in the second run (a hook that was removed, a function that was patched, a kernel that is not
deterministic) shows in what autograd saves, which is compared with what it saved in the first run (``fingerprints``).
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import CheckpointError, checkpoint

from sp_lightning.activations.fingerprints import Differences, LayerAt, SavedRun, differences
from sp_lightning.activations.once_only import explained, known_cause
from sp_lightning.activations.snapshot import Snapshot, host_of, put
from sp_lightning.device.accelerator import generator_states, set_generator_states
from sp_lightning.engine.activations import ActivationSetup
from sp_lightning.torch_compat.modes import no_transforms
from sp_lightning.torch_compat.patched import in_place_of
from sp_lightning.torch_compat.private import (
    TORCHSCRIPT,
    checkpoint_hook,
    current_graph_task,
    preserve_version_counter,
    top_saved_tensors_hooks,
    tree_flatten,
    tree_leaves,
    tree_unflatten,
)

_MODIFIED = "modified by an inplace operation"
"""Of torch's error about a saved tensor, as this package raises it, too."""
_OF_ALL = (
    'This is under activations="recompute", which "auto" may choose. Keep or offload what all layers save: '
    'SuperpipelineStrategy(activations="offload").'
)


class Unrepeatable(RuntimeError):
    """A forward that cannot be run a second time as if it were the first."""


class Recompute:
    """Runs units' forwards of which autograd keeps the inputs only; and finds out, in a trial, of which ones it could.

    In a trial autograd keeps everything, as usual. What forwards write, and what is written between them and the end of backward,
    is looked at, and each forward runs again right before its backward, for nothing but a look at what it saves.

    Args:
        setup: the parts of the engine.

    Attributes:
        in_trial: whether forwards are looked at now.
        differences: what the comparisons of two runs have found.
    """

    def __init__(self, setup: ActivationSetup) -> None:
        self._setup = setup
        self._layer_at = setup.layer_at
        self._units = setup.found.units
        self.differences = Differences(setup.device, pin=setup.pin)
        # It tells torch's checkpoint whose random state to restore if no argument does.
        self._anchor = setup.device.empty(0)
        # By unit, the tensors that it writes where no version shows it.
        self._volatile: defaultdict[str, set[str]] = defaultdict(set)
        self.in_trial = False
        self._unfit: dict[str, str] = {}
        self._watched: list[FirstRun] = []

    def run(self, unit: str, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Runs a unit's forward, of which autograd keeps the inputs only.

        The second run is seen by everything outside of the module and its arguments: hooks on inner modules, prints, files
        and global variables.

        Raises:
            Unrepeatable: the forward has written what cannot be put back, or has saved something in TorchScript.
        """
        given: Any = (tuple(args), kwargs)
        leaves, structure = tree_flatten(given, is_leaf=_is_leaf)
        # What is given twice has to be one object in the second run, too: attention asks whether query and key are the same.
        once = {id(leaf): leaf for leaf in leaves}
        position = {identity: number for number, identity in enumerate(once)}
        positions = [position[id(leaf)] for leaf in leaves]
        first: FirstRun | None = None

        def run(anchor: Tensor, *once: Any) -> Any:
            nonlocal first, given
            if first is None:
                first = FirstRun(unit, module, once, self._volatile[unit], self._layer_at, self._units)
                (args, kwargs), given = given, None
                with first.running(), first.saved.noting(first.unpacked):
                    output = forward(*args, **kwargs)
                first.ended()
                return output
            # Lists and dicts are made anew, as they were given: what the forward has added to them stays in those of the
            # first run.
            args, kwargs = tree_unflatten([once[position] for position in positions], structure)
            # Backward may compute several gradients at once, by torch.vmap.
            with (
                no_transforms(),
                self._rerun(unit, args),
                first.restored(self._watch_outside(unit)),
                self._compared(first),
            ):
                return first.before.context.copy().run(forward, *args, **kwargs)

        return checkpoint(run, self._anchor, *once.values(), use_reentrant=False)

    @contextmanager
    def _compared(self, first: FirstRun) -> Iterator[None]:
        """While this is active, a forward runs again. What it saves is compared with what it saved before."""
        second = SavedRun(self._layer_at)
        try:
            with second.noting(_unpacked):
                yield
        finally:  # torch ends the second run by an exception
            self.differences.add(differences(first.saved, second), first.differs)

    @contextmanager
    def _rerun(self, unit: str, inputs: Any) -> Iterator[None]:
        """A context for the second run of a unit's forward. The root module logs nothing: the first run has logged."""
        quiet = in_place_of(self._setup.module, {"log": _log_nothing})  # log_dict calls it, too
        with self._setup.rerun(self._setup.layers_of[unit], inputs), quiet:
            yield

    def _watch_outside(self, unit: str) -> Callable[[], str | None]:
        """Looks at the weights outside of a unit. Returns a function that says what was done to them since; None if nothing."""
        own = set(self._setup.layers_of[unit])
        # A layer that the running backward has updated is left out: nothing may use it before the next step, and its update
        # changes its weights at any time.
        others = [layer for layer in self._setup.layers if layer.owner not in own and not layer.owner.updated_early]
        before = [(layer, layer.parameters.host_writes()) for layer in others]
        given = self._setup.given_by_nested()

        def done() -> str | None:
            for layer, old in before:
                if not layer.owner.updated_early and (now := layer.parameters.host_writes()) != old:
                    each = zip(layer.planned.spans, zip(*old, strict=True), zip(*now, strict=True), strict=True)
                    name = next(span.name for span, was, now_is in each if was != now_is)
                    return f"writes {name!r}, a weight outside of it"
            trained = given()
            return None if trained is None else f"runs a backward that gives {trained!r} a gradient"

        return done

    # ------------------------------------------------------------------ the trial

    def begin_trial(self, unfit: Mapping[str, str]) -> None:
        """Looks at all forwards from now on, except those of units that are known to be unfit, each with the reason."""
        self.in_trial, self._unfit = True, dict(unfit)

    def end_trial(self) -> dict[str, str]:
        """Looks at none from now on. Returns the units that could not be recomputed, and why."""
        unfit, self._unfit, self.in_trial = self._unfit, {}, False
        return unfit

    def try_out(
        self, unit: str, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any
    ) -> tuple[Any, Callable[[], None] | None]:
        """Runs a unit's forward and looks at what it changes.

        Returns:
            Its output, and what is to be called when its backward begins; None if the unit cannot be recomputed.
        """
        if unit in self._unfit:
            return forward(*args, **kwargs), None
        if current_graph_task() != -1:  # this is a second run already, of a unit or of a checkpoint around it
            return forward(*args, **kwargs), None
        try:
            first = FirstRun(
                unit, module, tree_leaves((args, kwargs)), self._volatile[unit], self._layer_at, self._units
            )
            again = None  # a checkpoint of the user's around the unit runs it again by itself
            if not is_checkpointed():
                again = partial(self._try_again, first, forward, _Given(args, kwargs), _Around(self._anchor.device))
        except Exception as error:  # an object of the user's may raise anything when it is looked at
            self._unfit[unit] = str(error)
            return forward(*args, **kwargs), None
        done = self._watch_outside(unit)
        with first.running(), first.saved.noting(_unpacked):
            output = forward(*args, **kwargs)
        first.saved.note(output)
        try:
            first.ended()
            first.refuse(done())
        except Unrepeatable as error:
            self._unfit[unit] = str(error)
            return output, None
        self._watched.append(first)
        return output, again

    def _try_again(self, first: FirstRun, forward: Callable[..., Any], given: _Given, around: _Around) -> None:
        """Runs a forward again, whose backward begins, and looks at what it saves. Nothing uses what it computes.

        Raises:
            Unrepeatable: each run saves other values. Then runs may have changed what the next step's forward will find.
        """
        if not self.in_trial or first.unit in self._unfit:
            return

        def again() -> SavedRun:
            run = SavedRun(self._layer_at)
            with around.again():
                args, kwargs = given.take()
                with (
                    self._rerun(first.unit, args),
                    first.restored(self._watch_outside(first.unit)),
                    run.noting(_unpacked),
                ):
                    output = first.before.context.copy().run(forward, *args, **kwargs)
            run.note(output)
            return run

        moves = False
        try:
            second = again()
            if _differ(first.saved, second):
                self._unfit[first.unit] = str(first.differs())
                # Otherwise something was around the first run alone.
                moves = _differ(second, again(), weights_may_be_copies=True)
        except torch.OutOfMemoryError:  # in a step that recomputes it, less of other units is on the device
            pass
        except Exception as error:  # a forward may raise anything that it does not raise in its first run
            self._unfit[first.unit] = str(error)
        finally:
            first.drop_values()
        if moves:
            raise first.moves()

    def backward_ended(self) -> None:
        """Looks at what was written since the forwards, which a second forward in backward could not put back."""
        self.differences.clear()
        watched, self._watched = self._watched, []
        for first in watched if self.in_trial else ():
            try:
                first.check()
            except Unrepeatable as error:
                self._unfit[first.unit] = str(error)


def _log_nothing(*args: Any, **kwargs: Any) -> None:
    """Takes the place of ``LightningModule.log``."""


def is_checkpointed() -> bool:
    """Whether a non-reentrant checkpoint of the user's, in its first or its second run, takes what autograd saves now."""
    return checkpoint_hook() is not None  # within ours, a SavedRun's hooks are before it


def _differ(one: SavedRun, other: SavedRun, *, weights_may_be_copies: bool = False) -> bool:
    """Whether two runs that have ended have saved other values."""
    found = differences(one, other, weights_may_be_copies=weights_may_be_copies)
    return len(one.found) != len(other.found) or any(each.item() for each in found)


def _unpacked(unpack: Callable[[Any], Any], packed: Any) -> Any:
    return unpack(packed)


def _is_leaf(value: Any) -> bool:
    """Whether checkpoint keeps a value as it is. Objects are not taken apart, even if torch was told how to do that."""
    return type(value) not in (tuple, list, dict) and not (isinstance(value, tuple) and hasattr(value, "_fields"))


class _Given:
    """The arguments of a forward, for a second run. Tensors are packed as autograd's own are, and may be away meanwhile."""

    def __init__(self, args: Any, kwargs: Any) -> None:
        leaves, self._structure = tree_flatten((tuple(args), kwargs), is_leaf=_is_leaf)
        hooks: Any = top_saved_tensors_hooks() or (Tensor.detach, Tensor.detach)
        pack, self._unpack = hooks
        self._leaves = [
            (pack(leaf), leaf.requires_grad, leaf.is_leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves
        ]
        self._tensors = [isinstance(leaf, Tensor) for leaf in leaves]

    def take(self) -> Any:
        """The positional arguments, and those by name.

        Raises:
            RuntimeError: one has been written since.
        """
        each = zip(self._leaves, self._tensors, strict=True)
        return tree_unflatten([self._tensor(*leaf) if tensor else leaf for leaf, tensor in each], self._structure)

    def _tensor(self, packed: Any, requires_grad: bool, is_leaf: bool) -> Tensor:
        tensor = self._unpack(packed).detach().requires_grad_(requires_grad)
        return tensor if is_leaf else tensor.view_as(tensor)


class _Around:
    """What torch's checkpoint keeps for a second run: random states and autocast."""

    def __init__(self, device: torch.device) -> None:
        self._random = generator_states()
        self._autocast = [
            (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind), torch.is_autocast_cache_enabled())
            for kind in {device.type, "cpu"}
        ]

    @contextmanager
    def again(self) -> Iterator[None]:
        """While this is active, they are as they were."""
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
    """The first run of a forward: what it finds when this object is made, and what it changes until :meth:`ended`.

    Args:
        unit: the module's name.
        module: it and the modules inside it are looked at.
        given: the forward's arguments. Objects among them that are no tensors are looked at, and what they hold.
        volatile: the names of tensors that the unit was seen to write where no version shows it; more are added.
        layer_at: finds weights on the device.
        units: the units by name, for errors.

    Attributes:
        unit: the same.
        before: what it finds.
        saved: what autograd saves in it.
    """

    def __init__(
        self,
        unit: str,
        module: nn.Module,
        given: Sequence[Any],
        volatile: set[str],
        layer_at: LayerAt,
        units: Mapping[str, nn.Module],
    ) -> None:
        self.unit = unit
        self._module = module
        self._units = units
        self.before = Snapshot(module, given)
        self.saved = SavedRun(layer_at)
        self._volatile = volatile
        self._again = 0  # how often it was run again
        self._unchanged: list[tuple[str, Tensor, int]] = []  # tensors that the forward has not changed
        self.scripted: str | None = None
        """The function of TorchScript that has saved something for backward in the forward."""

    @contextmanager
    def running(self) -> Iterator[None]:
        """While this is active, the forward runs."""
        _watch_torchscript()
        first_runs().append(self)
        try:
            yield
        finally:
            first_runs().remove(self)

    def ended(self) -> None:
        """Forgets the values of large tensors that the forward has not changed.

        Raises:
            Unrepeatable: it has written what cannot be put back, or has saved something in TorchScript.
        """
        before = self.before
        if self.scripted is not None:
            # Its first call is profiled and runs operator by operator. A later one runs an optimized graph, which saves other
            # tensors, in another order: gradients were wrong where their shapes were the same. torch's own checkpoint has
            # this defect, and the exception that ends its second run early cannot pass through TorchScript's interpreter.
            self.refuse(
                f"calls {self.scripted!r} in TorchScript, which saves other tensors for backward once it is optimized"
            )
        for weight in before.weights:
            if weight.is_written:
                self.refuse(f"writes its parameter {weight.name!r}", known_cause(self._module))
            if weight.has_other_gradient:
                self.refuse(f"runs a backward that gives its parameter {weight.name!r} a gradient")
        for tensor, version in before.inputs:
            if tensor._version != version:
                self.refuse(f"writes a tensor of shape {tuple(tensor.shape)} that it is given")
        before.inputs.clear()  # a weight among them would keep its layer on the device
        for name, copied in list(before.tensors.items()):
            if copied.kept or copied.tensor._version != copied.version:
                continue
            if not copied.trusted and not copied.same_bits:
                self._volatile.add(name)  # it was written through .data, or in NumPy
            elif name not in self._volatile:
                del before.tensors[name]
                self._unchanged.append((name, copied.tensor, copied.version))

    def drop_values(self) -> None:
        """Forgets all but what :meth:`check` needs. There is no further run."""
        self.before.states.clear()
        self.before.tensors.clear()
        self.saved.found.clear()

    def check(self) -> None:
        """Checks that what was written since can be put back.

        Raises:
            Unrepeatable: it cannot.
        """
        changed = [(weight.name, _MODIFIED) for weight in self.before.weights if weight.is_written]
        changed += [
            (name, "exchanged") for name, place, key, held in self.before.held if host_of(place.get(key)) is not held
        ]
        # Another call of the unit may have written a tensor where no version shows it.
        changed += [
            (name, _MODIFIED)
            for name, tensor, version in self._unchanged
            if tensor._version != version or name in self._volatile
        ]
        for name, how in changed:
            trained = [weight.is_written for weight in self.before.weights if weight.is_trained()]
            stepped = how == _MODIFIED and bool(trained) and all(trained)
            between = "two backwards of one graph" if self._again > 1 else "forward and backward"
            raise Unrepeatable(
                f"{name!r} of {self.unit!r} has been {how} between {between}"
                f"{' (an optimizer has stepped it, perhaps)' * stepped}. Each backward was to compute the forward again. "
                f"{_OF_ALL if stepped else self._remedy}"
            )

    @contextmanager
    def restored(self, done: Callable[[], str | None]) -> Iterator[None]:
        """While this is active, everything is as it was before the forward. Afterwards it is as it is now.

        Args:
            done: says what the second run has done to weights outside of the unit.

        Raises:
            Unrepeatable: something was written since that cannot be put back, or the second run has written a weight
                outside of the unit once more, or has given it another gradient.
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
            finally:  # torch stops the second run by an exception once it has computed what backward needs
                put(states, now)
                self.refuse(done())

    def unpacked(self, unpack: Callable[[Any], Any], packed: Any) -> Any:
        """Unpacks what the forward has saved: the first call runs the forward again.

        Raises:
            Unrepeatable: what the forward was given has been written since.
        """
        before = self._again
        try:
            return unpack(packed)
        except CheckpointError as error:
            if self._again == before:
                raise
            raise self.differs() from error  # other tensors were saved, or another number of them
        except RuntimeError as error:
            if self._again == before and _MODIFIED in str(error):
                raise Unrepeatable(
                    f"A tensor that {self.unit!r} was given has been written since its forward, which backward was to compute "
                    f"again. Write x = x + layer(x) in place of x += layer(x). {self._remedy}"
                ) from error
            raise

    def differs(self) -> Unrepeatable:
        """The error that its second run has saved other values."""
        found = f"The forward of {self.unit!r} computed other values in backward than in forward"
        if (cause := known_cause(self._module)) is not None:
            return Unrepeatable(f"{found}. Perhaps {explained(cause, self._units)}")
        return Unrepeatable(
            f"{found}. It depends on what has changed in "
            "between (a hook, a patched function or class, a context, a global variable: parametrize.cached() has one), or on a "
            f"kernel that is not deterministic (Trainer(deterministic=True)). {self._remedy}"
        )

    def moves(self) -> Unrepeatable:
        """The error that each run saves other values, after a trial."""
        return Unrepeatable(
            f"The forward of {self.unit!r} computed other values each time it ran. It changes what it depends on (an iterator, a "
            'global counter), or uses a kernel that is not deterministic (Trainer(deterministic=True)). activations="auto" has '
            "run it again, to find out whether it can be recomputed: start anew with "
            'SuperpipelineStrategy(activations="offload").'
        )

    def refuse(self, done: str | None, cause: str | None = None) -> None:
        """Refuses a forward for what it has done, with the known cause of that.

        Raises:
            Unrepeatable: it has done anything.
        """
        if done is not None and cause is not None:
            raise Unrepeatable(
                f"The forward of {self.unit!r} {done}, and cannot be run again: {explained(cause, self._units)}"
            )
        if done is not None:
            raise Unrepeatable(f"The forward of {self.unit!r} {done}, and cannot be run again. {self._remedy}")

    @property
    def _remedy(self) -> str:
        return (
            'This is under activations="recompute", which "auto" may choose. Keep or offload what it saves: '
            f'SuperpipelineStrategy(activations={{"{self.unit}": "offload", "**": "recompute"}}), or, for all layers, '
            'activations="offload".'
        )


_of_thread = threading.local()


def first_runs() -> list[FirstRun]:
    """The forwards of this thread that run for the first time, of which a second one may come."""
    if not hasattr(_of_thread, "first_runs"):
        _of_thread.first_runs = []
    found: list[FirstRun] = _of_thread.first_runs
    return found


@cache
def _watch_torchscript() -> None:
    """From now on, forwards are told which calls of TorchScript save for backward. torch has no hooks around such calls."""
    for kind in TORCHSCRIPT:
        kind.__call__ = _watched(kind.__call__)


def _watched(call: Callable[..., Any]) -> Callable[..., Any]:
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
