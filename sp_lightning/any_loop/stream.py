"""``sp_lightning.stream``: streams a module in any loop."""

from __future__ import annotations

import logging
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor, nn
from torch.optim import Optimizer

from sp_lightning.any_loop.words import LOG, in_loop, reword
from sp_lightning.core.device.accelerator import present_device
from sp_lightning.core.device.closing import close_all
from sp_lightning.core.device.stats import Stats
from sp_lightning.core.engine.engine import Engine
from sp_lightning.core.messages import say_once
from sp_lightning.core.model.checks import refuse_computed_weights
from sp_lightning.core.plan.plan import Plan
from sp_lightning.core.torch_compat.around_calls import release, surround
from sp_lightning.core.torch_compat.modes import never_compiled
from sp_lightning.core.torch_compat.patched import Patch, WatchesEngine, replace_method, unwatch, watch
from sp_lightning.core.torch_compat.private import checkpoint_hook, tree_leaves
from sp_lightning.trainer.group import ALONE
from sp_lightning.trainer.option_checks import checked_budget
from sp_lightning.trainer.run import Run
from sp_lightning.trainer.scaler import HostGradScaler
from sp_lightning.trainer.strategy import SuperpipelineStrategy

_OF_LIGHTNING = {
    "accelerator", "callback", "checkpoint_io", "disk", "load_weights_from", "precision_plugin", "save_frozen",
}  # fmt: skip
"""Options of the strategy that concern Lightning's Trainer or its checkpoints."""


@in_loop()
def stream(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer] = (),
    *,
    autocast: torch.dtype | None = None,
    only_steps_write: bool = False,
    **options: Any,
) -> StreamedLoop:
    """Streams a module in a loop of your own: its layers are copied to the GPU while they run.

    ::

        optimizer = torch.optim.AdamW(model.parameters())
        with sp_lightning.stream(model, optimizer, gpu_memory="8GiB"):
            for batch in batches:
                loss = model(**batch).loss
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()

    Results are bitwise those of the same loop without this line, under the same conditions as for
    :class:`~sp_lightning.SuperpipelineStrategy`. A training step begins with a call of ``model`` while gradients are enabled,
    and ends with the next backward. Several calls before a backward are one step. Other calls, and ``model.generate``, are steps
    without a backward. At all other times the module has its ordinary parameters, on the CPU, with their gradients. All other
    code uses these: clipping, state dictionaries, schedulers, ``GradScaler``.

    Args:
        model: the root module, on the CPU. Do not move it to the GPU: the stream calls ``model.to(device)`` itself, in a way that
            leaves weights where they are, and ``model.to("cpu")`` at its end.
        optimizer: the optimizer of the loop, or all of them. None for a loop that trains nothing, and for optimizers that step
            copies of the weights. The first call that builds a graph of trained weights then plans memory for their gradients.
        autocast: the dtype of the ``torch.autocast`` in which the loop calls the module. 16-bit copies of the weights are then
            uploaded, half the bytes. Results do not depend on it.
        only_steps_write: True if you promise that only ``optimizer.step`` writes weights between a backward and the next forward.
            The next step's first layers are then uploaded as soon as they are updated.
        options: options of :class:`~sp_lightning.SuperpipelineStrategy`, without those for checkpoints and disks. For example,
            ``optimizer_overlap="forward"`` runs updates layer by layer while the next forward runs.

    Returns:
        The stream, a context that ends it. Without ``with``, call its ``close()``.

    Raises:
        TypeError: an argument has another type; an option is unknown, or belongs to Lightning's Trainer.
        ValueError: an optimizer has no weight of the module; a weight is not on the CPU, or belongs to another stream; there are
            several processes; an option is not possible in such a loop; or the model does not fit.
        MemoryError: the host has too little memory.
    """
    optimizers = [optimizer] if isinstance(optimizer, Optimizer) else optimizer
    if isinstance(optimizers, Sequence):
        optimizers = list(map(unwrapped, optimizers))
    is_list = isinstance(optimizers, Sequence) and all(isinstance(each, Optimizer) for each in optimizers)
    if not isinstance(model, nn.Module) or not is_list or not isinstance(autocast, torch.dtype | None):
        raise TypeError(
            f"stream({type(model).__name__}, {type(optimizer).__name__}, autocast={autocast!r}): expected a module, its "
            "optimizer (or a list of optimizers), and a dtype such as autocast=torch.bfloat16, or None."
        )
    if isinstance(model, nn.DataParallel):
        raise TypeError(
            "stream(DataParallel): expected the module itself, because one device computes: stream(model.module, …)."
        )
    strategy = strategy_with(options, "stream()")
    together = torch.distributed.is_available() and torch.distributed.is_initialized()
    if together and (processes := torch.distributed.get_world_size()) > 1:
        raise ValueError(
            f"stream() was called in one of {processes} processes. Expected one, because it shares no gradients. Start one "
            "process, or use Lightning's Trainer: Trainer(strategy=SuperpipelineStrategy(), devices=…)."
        )
    within = [other._module for other in _open if other._run.engine.in_step]  # these hold device parameters now
    for name, parameter in model.named_parameters():
        if any(model is other for other in within) or any(id(parameter) in other.weights for other in _open):
            raise ValueError(
                f"{name!r} is streamed already: two streams would move it. Expected one stream for each weight. Close the first: "
                "stream.close(), with Fabric fabric.strategy.teardown()."
            )
        if parameter.device.type != "cpu":
            raise ValueError(
                f"{name!r} is on {parameter.device}. Expected all weights on the CPU, from where they are streamed. Leave out "
                'model.to(device); give a constructor that moves the model itself (sentence-transformers) device="cpu"; or call '
                "model.cpu() before the optimizer is made. Load a model on the meta device first."
            )
    device = present_device() if options.get("device") is None else strategy.root_device
    for each in optimizers:
        if not steps(each, model):
            raise ValueError(
                f"{type(each).__name__} has no weight of the streamed module. Expected its own optimizer: "
                f"{type(each).__name__}(model.parameters()). If it steps copies of the weights (float32 master weights), leave "
                "it out: sp_lightning.stream(model)."
            )
    loop = UserLoop(model, optimizers, device, only_steps_write=only_steps_write)
    return StreamedLoop(
        Run(model, strategy._options, device, autocast, ALONE, LOG, bool(optimizers), loop)  # type: ignore[arg-type]
    )


def strategy_with(options: Mapping[str, Any], caller: str) -> SuperpipelineStrategy:
    """Checks the options of a loop, and returns a strategy that has them.

    Raises:
        TypeError, ValueError: see :func:`stream`.
    """
    if wrong := sorted(_OF_LIGHTNING & set(options)):
        raise TypeError(f"{caller} has no option {wrong[0]!r}, which belongs to Lightning's Trainer. Leave it out.")
    try:
        return SuperpipelineStrategy(**options)
    except TypeError as error:
        raise TypeError(str(error).replace(SuperpipelineStrategy.__name__, caller)) from None


def unwrapped(optimizer: Any) -> Any:
    """Returns the optimizer inside of the wrapper that accelerate's ``prepare`` returns; any other optimizer as it is.

    Other wrappers may write weights after the step of the optimizer inside, so the stream needs the wrapper itself.
    """
    is_wrapper = type(optimizer).__module__ == "accelerate.optimizer"
    return optimizer.optimizer if is_wrapper else optimizer


def steps(optimizer: Optimizer, module: nn.Module) -> bool:
    """Returns True if an optimizer has a weight of the module."""
    own = set(map(id, module.parameters()))
    return any(id(parameter) in own for group in optimizer.param_groups for parameter in group["params"])


class UserLoop:
    """The attributes of a Trainer that a :class:`~sp_lightning.trainer.run.Run` reads, for a loop without a Trainer.

    The loop's code may read and write weights and gradients at any time, as in Lightning's manual optimization.

    Args:
        module: the root.
        optimizers: the optimizers that the loop steps.
        device: the device on which layers compute.
        only_steps_write: True if the user promises that only optimizers' steps write weights between two training steps.
    """

    gradient_clip_val = gradient_clip_algorithm = datamodule = None
    accumulate_grad_batches = 1
    global_step = 0
    callbacks: Sequence[Any] = ()
    checkpoint_callbacks: Sequence[Any] = ()
    fit_loop = SimpleNamespace(_skip_backward=False)

    def __init__(
        self, module: nn.Module, optimizers: Sequence[Optimizer], device: torch.device, *, only_steps_write: bool
    ) -> None:
        self.lightning_module = SimpleNamespace(automatic_optimization=False, parameters=module.parameters)
        self.optimizers = list(optimizers)
        self.strategy = SimpleNamespace(root_device=device)
        self.precision_plugin = Precision()
        self.only_steps_write = only_steps_write

    def code_at(self, point: str) -> list[str]:
        """Returns a name for the code that may run at a point of :data:`~sp_lightning.trainer.user_hooks._HOOKS`.

        Code between forward and backward belongs to the step, as in manual optimization: it finds device parameters.
        """
        absent = {"zero_grad", "train"} if self.only_steps_write else {"zero_grad"}
        return [] if point in absent else ["your loop"]

    def refuse_other(self, optimizer: Optimizer) -> None:
        """Called when an optimizer steps weights of the module. Raises a RuntimeError if the stream was not given it."""
        if not any(optimizer is each for each in self.optimizers):
            raise RuntimeError(
                f"{type(optimizer).__name__} steps weights of a stream, and was not given to it. Expected all optimizers of "
                "these weights: close this stream, and begin another one: sp_lightning.stream(model, [all optimizers]). "
                "With Fabric: fabric.setup(model, optimizer, other)."
            )


class StreamedLoop(WatchesEngine):
    """A module that is streamed in a loop of the user. :func:`stream` makes it.

    Args:
        run: the run of the module. Its trainer is a :class:`UserLoop`.

    Attributes:
        weights: the ``id`` of each parameter.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._module: nn.Module = run.module
        self._loop: UserLoop = run.trainer
        self.weights = set(map(id, self._module.parameters()))
        self._inside = False  # True while a call of the root runs
        self._graphs: list[weakref.ref[_Awaited]] = []  # of the running step's outputs
        self._described: Engine | None = None  # the engine whose plan was logged last
        self._logged = set[str]()  # the lines that describe a plan
        self._replaced = ExitStack()
        _open.append(self)
        watch(self)
        try:
            self._surround()
            if run.trains:
                run.training_begins()
            for each in self._loop.optimizers:
                self._replace_step(each)
            if hasattr(self._module, "generate"):
                self._replaced.enter_context(replace_method(self._module, "generate", self._generate))
            for patch in _scaler_patches:
                patch.install()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> StreamedLoop:
        return self

    def __exit__(self, _: object, error: BaseException | None, *__: object) -> None:
        if error is not None:
            self._run.note_places(error)
        self.close()

    @in_loop()
    def close(self) -> None:
        """Ends the stream: waits for all updates. The module is then an ordinary module on the CPU. May be called again.

        Graphs of earlier forwards cannot run backward any more.

        Raises:
            BaseException: an update has failed. The stream has ended nevertheless.
        """
        if self not in _open:
            return
        _open.remove(self)
        unwatch(self)
        for patch in () if _open else _scaler_patches:
            patch.remove()
        release(self._module, self)
        run = self._run
        found = None if run.engine_or_none is None else run.engine_or_none.found
        close_all(
            *([run.finish_updates] if found is not None and sys.exception() is None else []),
            self._replaced.close,
            run.close,
            *([partial(run.to_host, found)] if found is not None else []),
        )

    @in_loop()
    def add(self, optimizer: Optimizer) -> None:
        """Adds an optimizer of the module's weights, between two steps. Graphs of earlier forwards cannot run backward any more.

        Raises:
            ValueError, MemoryError: the model does not fit with gradients. The stream goes on without the optimizer.
        """
        self._loop.optimizers.append(optimizer)
        try:
            self._run.expect_gradients()
        except BaseException:
            self._loop.optimizers.pop()
            raise
        finally:
            self._surround()
        self._replace_step(optimizer)

    def _replace_step(self, optimizer: Optimizer) -> None:
        self._replaced.enter_context(replace_method(optimizer, "step", self._step))

    @property
    def plan(self) -> Plan:
        """The plan: layers, k, k', memory. Also after the end."""
        return self._run.results.plan

    def stats(self) -> Stats:
        """Returns the counters. Also after the end."""
        return self._run.results.stats

    @property
    def gpu_memory(self) -> int | float | None:
        """The limit of GPU memory. It may be set between two steps: see :attr:`SuperpipelineStrategy.gpu_memory`."""
        return self._run.gpu_memory

    @gpu_memory.setter
    @in_loop()
    def gpu_memory(self, value: int | float | str | None) -> None:
        budget = checked_budget("gpu_memory", value)
        self._between("gpu_memory")
        try:
            self._run.change_gpu_memory(budget)
        finally:
            self._surround()

    @in_loop()
    def gpu_released(self) -> AbstractContextManager[int]:
        """A context between two steps in which other code can use the GPU's memory.

        See :meth:`SuperpipelineStrategy.gpu_released`.
        """
        self._between("gpu_released()")
        return self._run.gpu_released()

    def _between(self, what: str) -> None:
        """Ends a step that no backward follows. Raises a RuntimeError if the stream has ended."""
        if self not in _open:
            raise RuntimeError(
                f"{what} of a stream that has ended. Expected an open one: sp_lightning.stream(model, optimizer)."
            )
        self._end_without_graph()

    # ------------------------------------------------------------------ a call of the root

    def failed(self, _: Any) -> None:
        """Called when a backward has raised an error."""
        if (error := sys.exception()) is not None:
            reword(error)

    def _surround(self) -> None:
        """Puts this object around all calls of the root, outside of the engine's own function."""
        release(self._module, self)
        surround(self._module, self)
        self._engine = self._run.engine

    @never_compiled
    def __call__(self, call: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Runs a call of the root as a step, or as part of the running step. Calls within it, and in backward, belong to it."""
        # The module is called anew, because the engine may be built again before.
        return self.call(partial(call if self._is_within else nn.Module.__call__, module, *args, **kwargs))

    def call(self, forward: partial[Any]) -> Any:
        """Runs code that calls the root, or parts of it, as a step of training if gradients are enabled."""
        return self._call(forward, training=torch.is_grad_enabled() and self._trains())

    def _trains(self) -> bool:
        """Returns True if a backward may give weights gradients. Without optimizers, other code may step the weights."""
        return self._run.trains or any(parameter.requires_grad for parameter in self._module.parameters())

    def _generate(self, own: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Runs the root's method ``generate``, which calls the root for each token, as one step without a backward."""
        return self._call(partial(own, *args, **kwargs), training=False)

    @property
    def _is_within(self) -> bool:
        """True in a call of the root, in backward, and in a thread that is not the loop's: a further call begins no step."""
        return self._inside or self._run.is_foreign or self._run.engine.in_backward

    @in_loop()
    def _call(self, forward: partial[Any], *, training: bool) -> Any:
        if self._is_within:
            return forward()
        if checkpoint_hook() is not None:
            raise RuntimeError(
                "torch.utils.checkpoint(model, …) around a streamed module: its step would begin inside of the checkpoint. "
                "Expected checkpoints of parts of the module, or use_reentrant=True, or, in place of the checkpoint, "
                'stream(…, activations="recompute").'
            )
        self._inside = True
        try:
            return self._as_step(forward, training=training)
        finally:
            self._inside = False

    def _as_step(self, forward: partial[Any], *, training: bool) -> Any:
        run, engine = self._run, self._run.engine
        self._end_without_graph()
        if engine.in_step:
            with run.whole_after_failure(make_room=True), engine.saving():
                return self._await(forward())
        refuse_computed_weights(self._module)
        if training and not run.trains:
            self._expect_gradients()
        self._graphs.clear()
        phase = "train" if training else "predict"
        if not run.steps.running:  # otherwise `_step` has called it, before the closure
            self._batch_starts(phase, (forward.args, forward.keywords))
        if LOG.isEnabledFor(logging.INFO) and self._described is not self._engine:
            self._described = self._engine
            line, table = run.describe()
            say_once(LOG, line, self._logged)
            LOG.debug("\n%s", table)
        # A forward that returns None may have made a graph, too. None would tell `Run.step` that no backward follows.
        (output,) = run.step(phase, lambda: (forward(),), ends_with_backward=training)
        return self._await(output) if training else output

    def _expect_gradients(self) -> None:
        """Plans gradients, because the first call of a loop without optimizers builds a graph of trained weights."""
        try:
            self._run.expect_gradients()
        except (ValueError, MemoryError) as error:
            error.add_note(
                "The stream has no optimizer, and this call builds a graph of weights that require gradients. "
                "To train nothing, call the module under torch.no_grad(), or freeze it: model.requires_grad_(False)."
            )
            raise
        finally:
            self._surround()

    def _end_without_graph(self) -> None:
        """Ends a step whose graphs are gone: no backward follows."""
        engine = self._run.engine
        if engine.in_step and not any(each() for each in self._graphs):
            engine.end(writes_follow=True)

    def _await(self, output: Any) -> Any:
        """Notes the graphs of an output: the running step ends with their backward, or when they are gone."""
        tensors = [each for each in tree_leaves(output) if isinstance(each, Tensor) and each.requires_grad]
        awaited = _Awaited()
        for tensor in tensors:
            tensor.register_hook(awaited)
        if tensors:
            self._graphs.append(weakref.ref(awaited))
        return output

    def _batch_starts(self, phase: str, batch: Any) -> None:
        self._run.batch_starts(phase, batch)
        if self._run.engine is not self._engine:
            self._surround()

    # ------------------------------------------------------------------ an optimizer's step

    @in_loop()
    def _step(self, own: Callable[..., Any], optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Runs an optimizer's step through the run's :class:`~sp_lightning.trainer.optimizer_steps.OptimizerSteps`.

        Args:
            own: the optimizer's step.
            optimizer: the optimizer.
            args, kwargs: the arguments of the step, perhaps a closure among them.
        """
        run = self._run
        closure = next(filter(callable, (*args, *kwargs.values())), None)
        if closure is not None and not run.steps.running:
            self._batch_starts("train", ())

        def step(closed: Callable[[], Any]) -> Any:
            def given(argument: Any) -> Any:
                return closed if argument is closure and closure is not None else argument

            return own(*map(given, args), **{name: given(each) for name, each in kwargs.items()})

        result = run.steps.run(optimizer, closure or (lambda: None), step, self._loop.precision_plugin)
        if self._loop.only_steps_write and not run.engine.in_step and not run.steps.running:
            with run.whole_after_failure():
                run.engine.prefetch_for("train", training=True)
        return result


class _Awaited:
    """A hook on the outputs of a call of the root. It does nothing, and their graph keeps it alive."""

    def __call__(self, gradient: Tensor) -> None: ...


def _scaled(call: Callable[..., Any], scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
    """Gives torch's ``GradScaler`` the class for gradients on the host, when it is first used with an optimizer of a stream."""
    ours = any(optimizer is each for stream in _open for each in stream._loop.optimizers)
    if ours and type(scaler).__module__.startswith("torch."):
        scaler.__class__ = HostGradScaler
    return call(scaler, optimizer, *args, **kwargs)


_open: list[StreamedLoop] = []
"""The streams that have not ended. This list keeps them alive."""
_scaler_patches = [Patch(torch.amp.GradScaler, name, _scaled) for name in ("step", "unscale_")]
