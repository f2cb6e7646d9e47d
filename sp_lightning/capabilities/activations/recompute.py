"""``activations="recompute"``: torch's checkpoint (``use_reentrant=False``) around the forward of each unit.

Backward runs the forward again as an ordinary call of the unit, without the unit's own hooks. What torch's checkpoint does is
torch's: random numbers of torch and autocast are those of the first run, and the shapes of what both runs save are compared.
This file adds what torch leaves to the user, where it is cheap:

- **Buffers** count once: the second run begins with the values from before the first run, and the present values are restored
  after it (:class:`Buffers`).
- **Weights and arguments** that were written since the first run began are an error, as autograd's own check is.
- In the first call of a unit in each epoch, **attributes** of modules and random numbers of Python and NumPy are compared
  before and after the forward (:func:`what_forwards_change`). A change would be made twice, so it is an error.
"""

from __future__ import annotations

import random
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np  # Lightning needs torchmetrics, which needs NumPy
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import CheckpointError, checkpoint

from sp_lightning.core.device.device import profiled
from sp_lightning.core.engine.engine import Engine
from sp_lightning.core.model.found import join_names
from sp_lightning.core.torch_compat.modes import no_dispatch_modes, no_inference_mode, no_transforms
from sp_lightning.core.torch_compat.patched import in_place_of
from sp_lightning.core.torch_compat.private import (
    RNN_WEIGHTS,
    checkpoint_hook,
    is_traceable_wrapper_subclass,
    overlaps_itself,
    preserve_version_counter,
    top_saved_tensors_hooks,
    tree_flatten,
    tree_unflatten,
)
from sp_lightning.core.weights.device_parameter import same_place

Again = Callable[[Callable[..., Any], Any, Any], Any]
"""Runs a forward as a call of its module without the module's hooks."""

TRUSTED = ("torch.", "torchvision.", "transformers.", "timm.", "peft.", "bitsandbytes.", "torchao.")
"""Forwards of modules from these packages change no attributes, or make the same change in each call."""

_SMALL = 2**20
"""Buffers of a unit are copied as long as all copies take less than this many bytes."""

_OF_MODULES = frozenset(vars(nn.Module())) | {"forward", *RNN_WEIGHTS}  # attributes that torch and this package set
_PLAIN = (int, float, complex, str, bytes, bool, type(None))
_SIZED: tuple[type, ...] = (list, dict, set, tuple, deque)
_GENERATORS: tuple[tuple[type, Callable[[Any], Any]], ...] = (
    (random.Random, lambda each: None if isinstance(each, random.SystemRandom) else random.Random.getstate(each)),
    (np.random.RandomState, lambda each: repr(each.get_state())),
    (np.random.Generator, lambda each: repr(each.bit_generator.state)),
    (torch.Generator, lambda each: each.get_state().tolist()),
)
_MODIFIED = "modified by an inplace operation"  # a part of autograd's error, and of the engine's
_REMEDY = 'This is under activations="recompute". SuperpipelineStrategy(activations="offload") runs each forward once.'
_SCRIPTED = f"{{name!r}} is TorchScript, which may save other tensors for backward when it is called again. {_REMEDY}"


class Unrepeatable(RuntimeError):
    """A forward that cannot run a second time in backward."""


class Recompute:
    """Runs units' forwards so that autograd keeps only their arguments.

    Args:
        engine: the engine.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        # torch's checkpoint restores the random states of the devices of its arguments. This one says which device is used.
        self._anchor = engine.device.empty(0)
        self._weights = {
            unit: [
                (join_names(name, key), inner, key)
                for name, inner in module.named_modules()
                if not isinstance(inner, torch.jit.ScriptModule)
                for key in inner._parameters
            ]
            for unit, module in engine.found.units.items()
        }
        self._epoch: Any = None
        self._looked_at: set[str] = set()  # the units that have been called in this epoch
        # Of the last second run: what counts its tensors as on the device, and tensors that backward has read.
        self.held: list[Any] = []
        self.read: WeakKeyDictionary[Any, Tensor] = WeakKeyDictionary()

    def begin(self) -> None:
        """Called when a training step begins."""
        if (epoch := getattr(self.engine.module, "current_epoch", None)) != self._epoch:
            self._epoch = epoch
            self._looked_at.clear()

    def forget(self) -> None:
        """Called before a forward runs again, and at the end of a backward. Frees the tensors of the last second run."""
        self.held.clear()
        self.read.clear()

    def run(
        self, unit: str, module: nn.Module, again: Again, forward: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        """Runs the forward of a unit, and prepares its second run.

        Args:
            unit: the unit's name.
            module: the unit's module.
            again: makes a second run a call of the module.
            forward: the forward.
            args, kwargs: its arguments. Tensors in them are saved as autograd saves tensors.

        Raises:
            Unrepeatable: the forward changes what would be changed again by a second run.
        """
        call = Checkpointed(self, unit, again, forward, args, kwargs, self._weights[unit])
        call.looks = unit not in self._looked_at
        self._looked_at.add(unit)
        call.add(unit, module)
        device = self._anchor.device
        there = any(isinstance(each, Tensor) and each.device == device for each in call.leaves)
        leaves, call.leaves = call.leaves, []  # the graph holds `call`, which must not hold arguments
        return checkpoint(call, *leaves, *(() if there else (self._anchor,)), use_reentrant=False)


class Checkpointed:
    """One call of a unit. torch's checkpoint calls this object in forward, and again in each backward.

    Args:
        recompute: as named.
        unit, again, forward, args, kwargs: as in :meth:`Recompute.run`.
        weights: the places of the unit's weights: names, modules, and names in these.

    Attributes:
        leaves: the arguments of the checkpoint: the values in ``args`` and ``kwargs``, each once.
        looks: True to find out in the first run what the forward changes.
    """

    looks = False

    def __init__(
        self,
        recompute: Recompute,
        unit: str,
        again: Again,
        forward: Callable[..., Any],
        args: Any,
        kwargs: Any,
        weights: Sequence[tuple[str, nn.Module, str]],
    ) -> None:
        self._recompute, self._unit, self._again, self._forward = recompute, unit, again, forward
        self._given: Any = (tuple(args), kwargs)
        leaves, self._structure = tree_flatten(self._given, is_leaf=_is_leaf)
        # One object in two arguments has to be one object in the second run: attention tests whether query and key are the same.
        once = {id(leaf): leaf for leaf in leaves}
        at = {identity: number for number, identity in enumerate(once)}
        self._at = [at[id(leaf)] for leaf in leaves]
        self.leaves = [*once.values()]
        self._places = [*weights]
        self._weights = [_writes_of(inner, key) for _, inner, key in weights]
        self._buffers = Buffers()
        self._units: dict[str, nn.Module] = {}
        self._before: dict[str, Any] = {}
        self._runs = self._saved = 0
        self._versions: list[int] = []  # of the tensors that the last second run has saved

    def add(self, unit: str, module: nn.Module) -> None:
        """Records the state of the unit, or of another one that its forward calls, before its first run."""
        if self._runs > 1 or unit in self._units:
            return
        self._units[unit] = module
        self._buffers.add(module)
        if self.looks:
            self._before = what_forwards_change(unit, module) | self._before
        # Hooks and torch's older `weight_norm` put tensors in the place of weights.
        computed = [
            (join_names(name, key), inner, key)
            for name, inner in module.named_modules()
            for key, value in vars(inner).items()
            if isinstance(value, Tensor) and value.grad_fn is not None
        ]
        self._places += computed
        self._weights += [_writes_of(inner, key) for _, inner, key in computed]

    def __call__(self, *leaves: Any) -> Any:
        self._runs += 1
        if self._runs > 1:
            # Each run gets new lists and dicts, with the items from before the first run. DenseNet adds to such a list later.
            args, kwargs = tree_unflatten([leaves[at] for at in self._at], self._structure)
            try:
                with no_transforms():  # backward may compute several gradients at once, by torch.vmap
                    return self._again(self._run_again, args, kwargs)
            except Exception as error:
                if not isinstance(error, Unrepeatable):
                    error.add_note(
                        f"This was raised when the forward of {self._unit!r} ran again in backward, to recompute its "
                        f"activations. {_REMEDY}"
                    )
                raise
        (args, kwargs), self._given = self._given, None
        pack, unpack = _present_hooks()
        with _inside(self), saved_tensors_hooks(partial(self._pack, pack), partial(self._unpack, unpack)):
            output = self._forward(*args, **kwargs)
        if self.looks:
            self._refuse_changed()
        if (name := self._buffers.written()) is not None:
            raise Unrepeatable(
                f"The forward of {self._unit!r} writes the buffer {name!r}, which is too large to be copied, and would write it "
                f"again when backward runs it again. {_REMEDY}"
            )
        return output

    def _refuse_changed(self) -> None:
        """Raises an error if the first run has changed something that a second run would change again.

        Raises:
            Unrepeatable: as described.
        """
        before, self._before = self._before, {}
        after = {name: now for each in self._units.items() for name, now in what_forwards_change(*each).items()}
        for name, now in after.items():
            if not _same(before.get(name), now):
                raise Unrepeatable(
                    f"The forward of {self._unit!r} changes {name}, and would change it again when backward runs it again. "
                    f"Expected a forward that changes only buffers. {_REMEDY}"
                )

    def _run_again(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the forward as in the first run. torch ends this run by an exception as soon as it has what backward needs."""
        self._refuse_written()
        self._versions = []
        self._recompute.forget()
        pack, _ = _present_hooks()
        quiet = in_place_of(self._recompute.engine.module, {"log": _log_nothing})  # `self.log_dict` calls `self.log`
        saved: list[Tensor] = []
        hooks = saved_tensors_hooks(partial(self._pack_again, pack, saved), saved.__getitem__)
        try:
            with profiled(f"recomputation: {self._unit}"), quiet, self._buffers.restored(), _inside(self), hooks:
                return self._forward(*args, **kwargs)
        finally:
            # A cache of keys and values may hold the graph of this run, which must not hold activations and slots.
            saved.clear()

    def _pack(self, pack: Callable[[Tensor], Any], tensor: Tensor) -> tuple[int, Any]:
        self._saved += 1
        return self._saved - 1, pack(tensor)

    def _pack_again(self, pack: Callable[[Tensor], Any], saved: list[Any], tensor: Tensor) -> int:
        self._versions.append(tensor._version)
        if (count := self._recompute.engine.count_saved) is not None:
            self._recompute.held.append(count(tensor))
        saved.append(pack(tensor))
        return len(saved) - 1

    def _unpack(self, unpack: Callable[[Any], Tensor], packed: tuple[int, Any]) -> Tensor:
        """Returns a tensor that the forward has saved. The first call in a backward runs the forward again."""
        runs, (number, holder) = self._runs, packed
        read = self._recompute.read
        try:
            # torch's checkpoint gives each tensor once. Kernels of mamba read `ctx.saved_tensors` twice.
            if (tensor := read.get(holder)) is None:
                tensor = read[holder] = unpack(holder)
        except (CheckpointError, AssertionError) as error:
            if hasattr(error, "__notes__"):  # the forward has raised it
                raise
            raise Unrepeatable(
                f"The forward of {self._unit!r} saved other tensors when it ran again in backward, or a tensor was read again "
                f"after the backward of the layer. {_REMEDY} torch says:\n{error}"
            ) from error
        except RuntimeError as error:
            if self._runs == runs and _MODIFIED in str(error):  # arguments are unpacked before the second run
                raise Unrepeatable(
                    f"A tensor that {self._unit!r} was given has been written since its forward began, which backward was to "
                    f"compute again. Write x = x + layer(x) in place of x += layer(x). {_REMEDY}"
                ) from error
            raise
        if tensor._version != self._versions[number]:
            self._refuse_written()
            raise Unrepeatable(
                f"A tensor that the forward of {self._unit!r} saved for backward has been {_MODIFIED}. {_REMEDY}"
            )
        return tensor

    def _refuse_written(self) -> None:
        """Raises an error if a weight of the unit was written, or exchanged, since the first run began.

        Raises:
            Unrepeatable: as described.
        """
        for (name, inner, key), before in zip(self._places, self._weights, strict=True):
            if (now := _writes_of(inner, key)) != before:
                how = "exchanged" if now is None or before is None or now[:-1] != before[:-1] else _MODIFIED
                raise Unrepeatable(
                    f"{name!r} of {self._unit!r} has been {how} between forward and backward, in which its forward runs again: "
                    f"by the forward itself, a hook (on_before_zero_grad) or an optimizer, perhaps. {_REMEDY}"
                )


class Buffers:
    """The buffers of modules, and copies of the small ones."""

    def __init__(self, modules: Sequence[nn.Module] = ()) -> None:
        self._modules: list[nn.Module] = []
        self._places: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._copies: list[tuple[Tensor, Tensor | None, Tensor]] = []  # a buffer, its place, a copy of its values
        self._large: list[tuple[str, Tensor, int, Tensor]] = []  # a name, a buffer, its version and its place
        self._nbytes = 0
        for module in modules:
            self.add(module)

    def add(self, module: nn.Module) -> None:
        """Adds the buffers of a module and of the modules inside it, as they are now."""
        self._modules.append(module)
        # The dicts of TorchScript's modules cannot be copied.
        inner = (vars(each).get("_buffers") for each in module.modules())
        self._places += [(place, dict(place)) for place in inner if place and type(place) in (dict, OrderedDict)]
        buffers = [(name, each) for name, each in module.named_buffers() if _can_be_copied(each)]
        with no_inference_mode(), no_dispatch_modes(), torch.no_grad():
            for name, each in sorted(buffers, key=lambda pair: pair[1].nbytes):
                self._nbytes += each.nbytes
                if self._nbytes < _SMALL:
                    place = None if is_traceable_wrapper_subclass(each) else each.detach()
                    self._copies.append((each, place, each.detach().clone()))
                else:
                    self._large.append((name, each, each._version, each.detach()))

    def written(self) -> str | None:
        """Returns the name of a large buffer that was written, and forgets the others; None without one."""
        large, self._large = self._large, []
        written = (
            name for name, each, version, place in large if each._version != version or not same_place(each, place)
        )
        return next(written, None)

    @contextmanager
    def restored(self) -> Iterator[None]:
        """A context with the recorded buffers and values. At its end the present ones are restored."""
        if not self._places and not self._copies:
            yield
            return
        now = Buffers(self._modules)
        self._put()
        try:
            yield
        finally:
            now._put()

    def _put(self) -> None:
        for held, buffers in self._places:
            held.clear()
            held.update(buffers)
        tensors = tuple(each for each, _, _ in self._copies)
        with no_inference_mode(), no_dispatch_modes(), torch.no_grad(), preserve_version_counter(tensors):
            for tensor, memory, values in self._copies:
                if memory is not None and not same_place(tensor, memory):  # `resize_`, or `.data = …`
                    tensor.data = memory
                tensor.copy_(values)


def _can_be_copied(tensor: Tensor) -> bool:
    """Returns True if a tensor has memory of its own that can be restored."""
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_meta or tensor.is_inference():
        return False
    # An expanded tensor's values are in its base. FSDP frees memory for a time.
    return not overlaps_itself(tensor) and bool(tensor.untyped_storage().nbytes() or not tensor.numel())


def what_forwards_change(unit: str, module: nn.Module) -> dict[str, Any]:
    """Returns what forwards of a module may change besides buffers, by a name for errors.

    These are attributes of modules that are not :data:`TRUSTED`, gradients, and random states of Python and NumPy.

    Raises:
        Unrepeatable: a module contains TorchScript. It profiles its first call; a later call runs an optimized graph, which saves
            other tensors. If their shapes agree, gradients are wrong without an error of torch.
    """
    found: dict[str, Any] = {
        "the random numbers of Python": random.getstate(),
        "the random numbers of NumPy": repr(np.random.get_state()),
    }
    for name, parameter in module.named_parameters(prefix=unit):
        with torch.DisableTorchFunctionSubclass():
            gradient = host_of(parameter).grad
        if gradient is not None:
            found[f"the gradient of {name!r}"] = gradient, gradient._version
    for name, inner in module.named_modules(prefix=unit):
        if isinstance(inner, torch.jit.ScriptModule):
            raise Unrepeatable(_SCRIPTED.format(name=name))
        if not type(inner).__module__.startswith(TRUSTED):
            for key, value in vars(inner).items():
                if isinstance(value, torch.jit.ScriptFunction):
                    raise Unrepeatable(_SCRIPTED.format(name=join_names(name, key)))
                if key not in _OF_MODULES:
                    found[f"the attribute {join_names(name, key)!r}"] = _seen(value)
    return found


def _seen(value: Any) -> tuple[Any, ...]:
    """Returns a value, with its length, version or random state. Calls no method that its class defines."""
    kind = type(value)
    if issubclass(kind, Tensor):
        return value, _version(value)
    if (sized := next((each for each in _SIZED if issubclass(kind, each)), None)) is not None:
        items = dict.values(value) if sized is dict else sized.__iter__(value)  # type: ignore[attr-defined]
        versions = [_version(each) for each in items if issubclass(type(each), Tensor)]
        return value, (sized.__len__(value), versions)  # type: ignore[attr-defined]
    return value, next((state(value) for each, state in _GENERATORS if issubclass(kind, each)), None)


def _is_leaf(value: Any) -> bool:
    """Returns True if a value is one argument of the checkpoint. Only tuples, named tuples, lists and dicts are flattened."""
    return type(value) not in (tuple, list, dict) and not (isinstance(value, tuple) and hasattr(value, "_fields"))


def host_of(parameter: Any) -> Any:
    """Returns the host parameter of a device parameter, and any other value as it is."""
    group = getattr(parameter, "_of", None)
    return parameter if group is None else group.hosts[parameter._index]


def _version(tensor: Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version


def _same(before: Any, after: Any) -> bool:
    if type(before) is not tuple or type(after) is not tuple or len(before) != 2:
        return bool(before == after)
    (old, *state), (new, *now) = before, after
    return (old is new or (type(old) is type(new) and type(old) in _PLAIN and old == new)) and state == now


def _writes_of(module: nn.Module, key: str) -> tuple[Any, ...] | None:
    """Returns numbers of which the last one rises with each write of a weight. The others differ for another weight."""
    weight: Any = module._parameters.get(key, vars(module).get(key))
    if weight is None:
        return None
    group = getattr(weight, "_of", None)
    return (
        (0, id(weight), weight._version) if group is None else (id(group), weight._index, group.writes(weight._index))
    )


def _log_nothing(*args: Any, **kwargs: Any) -> None:
    """Takes the place of ``LightningModule.log`` in second runs: the first run has logged."""


_present_hooks: Callable[[], Any] = top_saved_tensors_hooks  # there are some inside a checkpoint


def is_checkpointed() -> bool:
    """Returns True inside a non-reentrant checkpoint of the user, in its first or its second run."""
    return checkpoint_hook() is not None


_of_thread = threading.local()


def running() -> list[Checkpointed]:
    """Returns the calls of recomputed units that run in this thread, in their first or their second run."""
    if not hasattr(_of_thread, "running"):
        _of_thread.running = []
    found: list[Checkpointed] = _of_thread.running
    return found


@contextmanager
def _inside(call: Checkpointed) -> Iterator[None]:
    running().append(call)
    try:
        yield
    finally:
        running().remove(call)
