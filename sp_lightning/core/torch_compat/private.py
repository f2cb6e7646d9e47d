"""All private names of torch that this package uses: names with an underscore, or in modules with one.

torch may change these without notice. So this file defines one name for each of them, with its meaning and the reason why
torch's public API does not suffice. With torch 2.10, 2.11 and 2.15, this file defines all of them; some have two sources.
``tests/torch_compat/test_torch_private.py`` tests results whose change no training would show, and
``tests/repository/test_architecture.py`` keeps private names out of all other files. ``tests/torch_compat/features.py`` has the
feature that needs each name. ``python -m tests.torch_compat.test_torch_names`` lists the names that the installed torch lacks.

Hot paths call these functions hundreds of times in a step. If the arguments need no change, the name is therefore torch's own
function and not a wrapper.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from inspect import unwrap
from operator import attrgetter
from types import SimpleNamespace
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, autograd, jit, nn, overrides, serialization
from torch._dynamo import comptime as compile_time
from torch._dynamo import convert_frame, decorators, eval_frame, exc
from torch._dynamo import utils as dynamo_utils
from torch._dynamo.variables import ConstantVariable
from torch._functorch import pyfunctorch
from torch._subclasses import fake_tensor
from torch.autograd import forward_ad
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules import module as module_globals
from torch.optim import Optimizer
from torch.optim import optimizer as optimizers
from torch.utils import _python_dispatch, _pytree, checkpoint
from torch.utils._device import DeviceContext
from torch.utils.hooks import RemovableHandle

# ---------------------------------------------------------------------------------------------------- autograd's engine

current_graph_task: Callable[[], int] = torch._C._current_graph_task_id
"""Returns the number of the backward pass that runs in this thread, or -1. The public API cannot tell whether one runs."""

queue_callback: Callable[[Callable[[], None]], None] = (
    # ``torch.autograd.graph.queue_callback`` is in torch 2.15 and not in 2.11.
    getattr(torch.autograd.graph, "queue_callback", None) or autograd.Variable._execution_engine.queue_callback
)
"""Queues a function that autograd calls at the end of the running backward pass. If the pass fails, autograd drops it."""

ENGINE_CALL = (autograd, "_engine_run_backward")
"""The function with which ``backward`` and ``autograd.grad`` run the engine. No public hook runs in the caller's thread after an
error."""

will_execute_node: Callable[[Any], bool] = torch._C._will_engine_execute_node
"""Returns True if the running backward pass will execute a node of the graph. There is no public way to ask.

Raises:
    RuntimeError: no backward pass runs, or ``torch.autograd.grad`` was asked for this node's own gradient.
"""

top_saved_tensors_hooks: Callable[[], tuple[Callable[..., Any], Callable[..., Any]] | None] = partial(
    torch._C._autograd._top_saved_tensors_default_hooks,
    False,  # ignore_is_tracing: returns None while torch traces, because tracing ignores saved-tensor hooks
)
"""Returns the current pair of saved-tensor hooks (pack, unpack), or None. The public API can only set them."""


def checkpoint_hook() -> Callable[..., Any] | None:
    """Returns the current pack hook if it is a non-reentrant checkpoint's, else None. It has no public name."""
    hooks = top_saved_tensors_hooks()
    return hooks[0] if hooks is not None and hooks[0].__module__ == checkpoint.__name__ else None


TORCHSCRIPT: tuple[Any, ...] = (torch._C.ScriptFunction, torch._C.ScriptMethod)
"""The classes of TorchScript callables: functions and methods, scripted and traced. One of the classes has no public name."""


def is_of_compiled_graph(ctx: Any) -> bool:
    """Returns True if a ``ctx`` is of the Function that runs a compiled graph. The Function has no public name."""
    return bool(ctx._forward_cls.__module__.startswith("torch._functorch._aot_autograd"))


preserve_version_counter: Callable[[Tensor | tuple[Tensor, ...]], Any] = autograd._unsafe_preserve_version_counter
"""A context that restores the version counters of tensors on exit. The public API only increments them."""


def forward_mode_level() -> int:
    """Returns the active level of forward-mode differentiation, or -1. The public API only enters and exits levels."""
    return forward_ad._current_level


def profiler_runs() -> bool:
    """Returns True while a profiler of torch records. ``record_function`` would cost microseconds also without a profiler."""
    return autograd.profiler._is_profiler_enabled


# ------------------------------------------------------------------------------------------------ transforms and modes

interpreter_stack: Callable[[], list[Any] | None] = torch._C._functorch.get_interpreter_stack
"""Returns the active ``torch.func`` transforms, outermost first, or None. The public API cannot tell whether one is active."""

DIFFERENTIATING = (torch._C._functorch.TransformType.Grad, torch._C._functorch.TransformType.Jvp)
"""The results of ``key()`` of entries of :data:`interpreter_stack` for transforms that differentiate."""

transforms_active: Callable[[], bool] = torch._C._are_functorch_transforms_active
"""Returns True if a ``torch.func`` transform is active. As :data:`interpreter_stack`, but makes no list."""


def is_batched(tensor: Tensor) -> bool:
    """Returns True for a batched tensor of ``torch.vmap`` or ``autograd.grad(is_grads_batched=True)``. No public way to ask."""
    functorch = torch._C._functorch
    return functorch.is_batchedtensor(tensor) or functorch.is_legacy_batchedtensor(tensor)


no_vmap_mode: Callable[[], AbstractContextManager[Any]] = partial(
    torch._C._ExcludeDispatchKeyGuard, torch._C.DispatchKeySet(torch._C._dispatch_key_parse("VmapMode"))
)
"""A context in which ``autograd.grad(is_grads_batched=True)`` allows random numbers. There is no public way to exit vmap mode."""

clear_transforms: Callable[[], AbstractContextManager[Any]] = pyfunctorch.temporarily_clear_interpreter_stack
"""A context without ``torch.func`` transforms: operators create ordinary tensors. There is no public way to exit a transform."""

count_dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
"""Returns the number of active ``TorchDispatchMode``. There is no public way to ask."""

disable_dispatch_modes: Callable[[], Any] = _python_dispatch._disable_current_modes
"""A context in which no active ``TorchDispatchMode`` sees operators. The public API cannot suspend them."""

count_function_modes: Callable[[], int] = torch._C._len_torch_function_stack
"""Returns the number of active ``TorchFunctionMode``. There is no public way to ask."""

TorchDispatchMode = _python_dispatch.TorchDispatchMode
"""The base class of modes that see every operator. torch documents it, but only a private module has it."""

is_traceable_wrapper_subclass = _python_dispatch.is_traceable_wrapper_subclass
"""Returns True if a tensor wraps other tensors (``__tensor_flatten__``), as quantised ones do. Only a private module has it."""

# ------------------------------------------------------------------------------------------------------- nested values

# torch itself uses ``torch.utils._pytree`` for nested values. There is no public module yet.

tree_leaves = _pytree.tree_leaves
"""Returns the values in nested tuples, lists, dicts, named tuples and registered classes, as a list."""

tree_map = _pytree.tree_map
"""Applies a function to every leaf of a nested value, and returns the results in the same structure."""

tree_map_only = _pytree.tree_map_only
"""As :data:`tree_map`, for leaves of one type."""

tree_flatten = _pytree.tree_flatten
"""Returns the leaves of a nested value and its structure, for :data:`tree_unflatten`."""

tree_unflatten = _pytree.tree_unflatten
"""Returns a nested value from its leaves and its structure."""

# -------------------------------------------------------------------------------------------------- storages, operators

no_torch_functions: Callable[[], AbstractContextManager[None]] = torch._C.DisableTorchFunction
"""A context in which torch does not call ``__torch_function__`` of Tensor subclasses and function modes. The public context does
not disable modes."""

subclasses_are_asked: Callable[[], bool] = torch._C._is_torch_function_enabled
"""Returns True if torch calls ``__torch_function__`` of subclasses, False in ``torch.DisableTorchFunctionSubclass``."""

make_wrapper: Callable[..., Any] = Tensor._make_wrapper_subclass
"""Creates an object of a class with ``__torch_dispatch__``: with shape, strides, dtype and device, but without memory."""

storage_id: Callable[[torch.UntypedStorage], int] = attrgetter("_cdata")
"""Returns a number that is unique to a storage during its life. ``data_ptr`` is 0 for all fake storages, and changes with a
resize."""

storage_use_count: Callable[[int], int] = torch._C._storage_Use_Count
"""Returns the number of a storage's owners in C++, given its :data:`storage_id`: tensors and graphs, and the storage's Python
object as one more owner. There is no public way to ask."""

is_view: Callable[[Tensor], bool] = Tensor._is_view
"""Returns True if a tensor is a view of another one for autograd. There is no public way to ask."""


def storage_of(reference: StorageWeakRef) -> torch.UntypedStorage | None:
    """Returns the storage of a weak reference; None if it has expired. torch passes storages between processes this way."""
    storage: torch.UntypedStorage | None = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
    return storage


_swap_memory: Callable[..., None] | None = getattr(torch.UntypedStorage, "_swap_data_ptr_", None)


def move_storage(storage: torch.UntypedStorage) -> None:
    """Copies a storage on the host to other memory. The storage and all of its tensors use the other memory from then on.

    In torch 2.11 only ``share_memory_`` can do so: it moves a storage to memory that processes can share.
    """
    if _swap_memory is not None:
        _swap_memory(storage, storage.clone())
    else:
        storage.share_memory_()


null_storage: Callable[[int, torch.device, int], Any] = torch._C._construct_storage_from_data_pointer
"""Creates a storage from an address (0: no memory), a device and a number of bytes. No public way makes one without memory."""

refuse_access: Callable[[int, str], None] = getattr(
    torch._C, "_set_storage_data_ptr_access_error_msg", lambda storage, why: None
)
"""Makes each access to a storage's memory raise a RuntimeError with a message. Arguments: the :data:`storage_id`, the message.

Before 2.14, CPU-only builds lack this function: reading such memory raises another error of torch's, or crashes the process."""

exchange_memory: Callable[[Tensor, Tensor], None] = torch._C._swap_tensor_impl
"""Exchanges the contents of two tensors; the Python objects keep their identity and attributes. It works across devices, which
``p.data = other`` does not. The public ``torch.utils.swap_tensors`` raises for tensors with weak references, such as the weights
of ``nn.LSTM``."""


class NoticesSwap:
    """The base of parameters that ``torch.utils.swap_tensors`` must not exchange: the other tensor would get their class.

    torch counts the references to both tensors before it exchanges anything, by a method without a public name.
    """

    def before_swap(self) -> None:
        """Prepares for the exchange, or raises an error."""

    def _use_count(self) -> int:
        self.before_swap()
        with torch.DisableTorchFunctionSubclass():
            return Tensor._use_count(self)  # type: ignore[attr-defined]


base_of: Callable[[Tensor], Tensor | None] = attrgetter("_base")
"""Returns the base tensor of a view, for autograd; None if the tensor is not a view. There is no public way to ask."""


def overlaps_itself(tensor: Tensor) -> bool:
    """Returns True if two elements of a tensor certainly share memory, as in an expanded one. No public way to ask."""
    return torch._debug_has_internal_overlap(tensor) == 1  # 0: no, 2: too expensive to tell


sparse_indices: Callable[[Tensor], Tensor] = Tensor._indices
"""Returns the indices of a sparse tensor, coalesced or not. The public ``indices`` raises if it is not coalesced."""

sparse_values: Callable[[Tensor], Tensor] = Tensor._values
"""Returns the values of a sparse tensor, coalesced or not. The public ``values`` raises if it is not coalesced."""


def sparse_rows(numbers: Tensor, rows: Tensor, shape: torch.Size, *, once: bool = True) -> Tensor:
    """Returns a sparse tensor with ``rows`` ``(n, *shape[1:])`` at the row indices ``numbers`` ``(1, n)``, ``int64``.

    It does not read the values of the two. ``once`` promises that ``numbers`` ascend without duplicates. The public
    ``torch.sparse_coo_tensor`` warns about checks of invariants that nobody requested (torch 2.11).
    """
    return torch.ops.aten._sparse_coo_tensor_unsafe(numbers, rows, shape, is_coalesced=once)


def writes_arguments(function: Any) -> bool:
    """Returns True for an operator whose schema marks an argument as written. Schemas have no public name."""
    schema = getattr(function, "_schema", None)
    return schema is not None and bool(schema.is_mutable)


# Dispatch modes see operators. The functions that call these operators are public, the operators are not.

to_copy_operator: Any = torch.ops.aten._to_copy
"""The operator of ``tensor.to`` when it copies."""

grouped_mm_operator: Any = torch.ops.aten._grouped_mm
"""The operator of ``torch.nn.functional.grouped_mm``: products of several matrices at once."""

cpu_attention_operator: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
"""The operator of ``scaled_dot_product_attention`` on the CPU: its first arguments are query, key and value."""

cpu_attention_backward_operator: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
"""The backward of :data:`cpu_attention_operator`: the first argument is the gradient of the result; query, key, value follow."""


def copy_each(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copies each source into its target. The public ``copy_`` takes one pair per call, which costs the host more time.

    Args:
        targets, sources: any tensors, in two sequences of one length.
    """
    if len(targets) == 1:
        targets[0].copy_(sources[0])
    elif targets:  # torch refuses empty lists
        torch._foreach_copy_(list(targets), list(sources))


FUSED_STEPS: frozenset[Callable[..., Any]] = frozenset(
    (torch._fused_adam_, torch._fused_adamw_, torch._fused_sgd_, torch._fused_adagrad_)
)
"""The operators of fused optimizers. Their positional arguments are lists, empty or as long as the first: weights, gradients,
then state. The optimizers are public, the operators are not."""


def store_of_default_group() -> Any:
    """Returns the store of the default process group, which runs on several devices need. No public function returns it.

    Environment variables need not name the store: user code may have made the group by ``init_method=`` or ``store=``.
    """
    return torch.distributed.distributed_c10d._get_default_store()


def second_level_cache() -> int:
    """Returns the bytes of a core's L2 cache; 0 if torch does not report them. torch 2.10 has no public way to ask."""
    if hasattr(torch.cpu, "get_capabilities"):
        return int(torch.cpu.get_capabilities().get("l2_cache_size", 0))
    return int(getattr(torch._C._cpu, "_L2_cache_size", lambda: 0)())


def fused_sgd_step(weight: Tensor, gradient: Tensor) -> None:
    """Takes one plain SGD step with a learning rate of 1, in place, with the fused kernel.

    The public way, a step of ``torch.optim.SGD``, also runs the hooks that other code has registered for all optimizers.
    """
    torch._fused_sgd_(
        [weight], [gradient], [], weight_decay=0.0, momentum=0.0, lr=1.0, dampening=0.0, nesterov=False, maximize=False,
        is_first_step=False,
    )  # fmt: skip


FakeTensor = fake_tensor.FakeTensor
"""A tensor with shape, dtype and device, but without memory. Public tensors without memory are always on the device ``meta``."""

# ---------------------------------------------------------------------------------------- hooks that others registered

# torch has public functions to register hooks, and none to list them.

gradient_hooks: Callable[[Tensor], dict[int, Callable[..., Any]] | None] = attrgetter("_backward_hooks")
"""Returns the hooks of ``tensor.register_hook``, by number; None or empty if there are none."""

accumulation_hooks: Callable[[Tensor], dict[int, Callable[..., Any]] | None] = attrgetter("_post_accumulate_grad_hooks")
"""Returns the hooks of ``tensor.register_post_accumulate_grad_hook``, by number; None or empty if there are none."""


class NodeHooks(NamedTuple):
    """Hooks on the node with which autograd accumulates the gradient of a leaf.

    Attributes:
        before: those of ``node.register_prehook``. Each gets ``(gradient,)``, and may return another gradient.
        after: those of ``node.register_hook``. Each gets ``()`` and ``(gradient,)`` when ``leaf.grad`` has the gradient.
    """

    before: list[Callable[..., Any]]
    after: list[Callable[..., Any]]


def node_hooks(leaf: Tensor) -> NodeHooks | None:
    """Returns the hooks on a leaf's node; None if there are none.

    The node exists as long as a graph or user code holds it, and it counts as a user of the leaf. So a leaf without other users
    than Python has none, and nothing else is asked: nearly always.
    """
    if torch._C.TensorBase._use_count(leaf) < 2:  # type: ignore[attr-defined]
        return None
    with torch.DisableTorchFunctionSubclass():
        if not leaf.requires_grad or not leaf.is_leaf:
            return None
        node = torch.autograd.graph.get_gradient_edge(leaf).node
    found = []
    for register in (node.register_prehook, node.register_hook):
        handle: Any = register(_no_hook)  # torch lists a node's hooks nowhere else
        hooks = handle.hooks_dict_ref()
        handle.remove()
        found.append(list(hooks.values()))
    return NodeHooks(*found) if any(found) else None


def _no_hook(*_: Any) -> None:
    pass


def counted_nodes(hook: Callable[..., Any]) -> Sequence[Any]:
    """Returns the nodes that a hook of ``register_multi_grad_hook`` waits for (mode ``"all"``); empty for other hooks."""
    if not getattr(hook, "__qualname__", "").startswith("register_multi_grad_hook.<locals>."):
        return ()
    code, cells = hook.__code__, hook.__closure__ or ()
    return next(
        (each.cell_contents for name, each in zip(code.co_freevars, cells, strict=True) if name == "grad_fns"), ()
    )


def has_accumulation_hooks(leaf: Tensor) -> bool:
    """Returns True if user code runs when the gradient of a leaf is accumulated: hooks of the leaf, or of its node."""
    return bool(accumulation_hooks(leaf)) or node_hooks(leaf) is not None


TENSOR_METADATA = ("_version", "_backward_hooks", "_post_accumulate_grad_hooks")
"""Private attributes of a tensor whose read does not touch its memory."""

forward_hooks: Callable[[nn.Module], dict[int, Callable[..., Any]]] = attrgetter("_forward_hooks")
global_forward_hooks: dict[int, Callable[..., Any]] = module_globals._global_forward_hooks
forward_pre_hooks: Callable[[nn.Module], dict[int, Callable[..., Any]]] = attrgetter("_forward_pre_hooks")
global_forward_pre_hooks: dict[int, Callable[..., Any]] = module_globals._global_forward_pre_hooks
"""The hooks of ``module.register_forward_hook``, of ``register_module_forward_hook`` (all modules), and of the same two functions
for hooks before forward (``…_forward_pre_hook``), by number."""


def loads_in_its_own_way(module: nn.Module) -> bool:
    """Returns True if ``load_state_dict`` of a module calls code that is not torch's: a hook or an overridden method."""
    return bool(module._load_state_dict_pre_hooks) or not type(module)._load_from_state_dict.__module__.startswith(
        "torch."
    )


def step_pre_hooks(optimizer: Any) -> list[Callable[..., Any]] | None:
    """Returns the hooks before an optimizer's step, global ones included; None if it is not a torch optimizer."""
    own = getattr(optimizer, "_optimizer_step_pre_hooks", None)
    return None if own is None else [*own.values(), *optimizers._global_optimizer_pre_hooks.values()]


def step_hooks(optimizer: Optimizer) -> list[Callable[..., Any]]:
    """Returns the optimizer's own hooks before and after its step. A wrapper of an optimizer may lack the attributes."""
    found = (getattr(optimizer, f"_optimizer_step_{when}_hooks", {}) for when in ("pre", "post"))
    return [hook for hooks in found for hook in hooks.values()]


def global_step_hooks() -> list[Callable[..., Any]]:
    """Returns the hooks before and after the step of every optimizer."""
    return [*optimizers._global_optimizer_pre_hooks.values(), *optimizers._global_optimizer_post_hooks.values()]


def has_global_step_hooks(*hooks: Callable[..., Any]) -> bool:
    """Returns True if all of these hooks are registered before or after the step of every optimizer."""
    return all(hook in global_step_hooks() for hook in hooks)


def remove_global_step_hooks(*hooks: Callable[..., Any]) -> None:
    """Removes hooks before and after the step of every optimizer. Each may be registered any number of times.

    The public handles do not suffice: an interrupt may occur before the caller has stored one.
    """
    for registered in (optimizers._global_optimizer_pre_hooks, optimizers._global_optimizer_post_hooks):
        for number in [number for number, hook in registered.items() if hook in hooks]:
            del registered[number]


def run_first_after_step(optimizer: Optimizer, handle: RemovableHandle) -> None:
    """Moves a hook to the front of an optimizer's post-step hooks. The public ``register_step_post_hook`` appends."""
    optimizer._optimizer_step_post_hooks.move_to_end(handle.id, last=False)  # type: ignore[attr-defined]


# ---------------------------------------------------------------------------------------------- modules and parameters

COMPILED_CALL = "_compiled_call_impl"
"""The attribute in which ``module.compile()`` stores the compiled call. It has no public name."""
compiled_call: Callable[[nn.Module], object] = attrgetter(COMPILED_CALL)
"""Returns the compiled call of a module; None if the module is not compiled."""

SCRIPTING = (jit._recursive, "create_script_module")
"""The function with which ``torch.jit.script`` converts a module. torch has no hook that runs before it."""

RNN_WEIGHTS = ("_flat_weights", "_flat_weight_refs")
"""The attributes in which ``nn.RNNBase`` lists its weights. It makes new lists whenever a weight is replaced."""

frame_compiler: Callable[[], Any] = torch._C._dynamo.eval_frame.get_eval_frame_callback
"""Returns Dynamo's callback for the frames of this thread; None if ``torch.compile`` is not active in it. No public way."""

COMPILE_LOCK: Any = convert_frame.compile_lock
"""The lock that ``torch.compile`` holds while it compiles. It has no public name."""


def compiled_graphs() -> int:
    """Returns how many graphs ``torch.compile`` has made in this process. The public log names them, but does not count them."""
    return int(dynamo_utils.counters["stats"]["unique_graphs"])


def compiles_here() -> bool:
    """Returns True while ``torch.compile`` compiles in this thread."""
    return bool(COMPILE_LOCK._is_owned())


def set_compiling(compiling: bool) -> bool:
    """Sets the result of ``torch.compiler.is_compiling()`` in all threads, and returns the previous one. No public way."""
    before = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = compiling
    return before


def default_device_is_set() -> bool:
    """Returns True if ``torch.set_default_device``, or a device as a context, is active in this thread.

    The public getter returns a device in any case.
    """
    return count_function_modes() > 0 and any(
        isinstance(mode, DeviceContext) for mode in overrides._get_current_function_mode_stack()
    )


leave_frame_out: Callable[[Callable[..., Any]], Callable[..., Any]] = decorators.skip
"""Excludes a frame from ``torch.compile``. The public ``torch.compiler.disable(recursive=False)`` adds a frame around it."""


def trace_only_inlined(function: Callable[..., Any]) -> Callable[..., Any]:
    """Marks a function, and returns it: ``torch.compile`` inlines it into its caller's graph, but starts no graph in it.

    There is no public way.
    """
    eval_frame.skip_code(function.__code__)
    return function


comptime: Any = compile_time.comptime
"""Calls a function, with a context as its argument, while ``torch.compile`` traces. No-op otherwise. No public module has it."""


def first_traced(context: Any, name: str) -> Any:
    """Returns the first object of the tuple ``name``, a local variable of the frame that called :data:`comptime`.

    Returns None if the object exists only in the graph.
    """
    variable = context.get_local(name)._i_will_not_complain_if_bc_breaks_VariableTracker()
    return getattr(variable.items[0], "value", None)


def set_traced(context: Any, name: str, value: bool) -> None:
    """Sets a local variable of the frame that called :data:`comptime`. The graph gets no guard on the variable."""
    translator = context._i_will_not_complain_if_bc_breaks_InstructionTranslator()
    translator.symbolic_locals[name] = ConstantVariable.create(value)


_HOOKS = ("backward_hooks", "backward_pre_hooks", "forward_hooks", "forward_pre_hooks")


def traces_only_forward(module: nn.Module) -> bool:
    """Returns True if ``torch.compile`` traces only ``forward`` at a call of the module, and puts no guard on its hooks.

    torch does so since 2.14 if all conditions are met: no hooks, of the module or of all modules; torch's own ``__call__``; no
    ``forward`` that was set on the module itself; and ``skip_nnmodule_hook_guards`` (the default), which omits guards on hooks.
    """
    hooked = any(getattr(module, f"_{kind}") or getattr(module_globals, f"_global_{kind}") for kind in _HOOKS)
    unchanged = type(module).__call__ is nn.Module.__call__ and type(module)._call_impl is nn.Module._call_impl
    return torch._dynamo.config.skip_nnmodule_hook_guards and unchanged and not hooked and "forward" not in vars(module)


def traced_tensor(context: Any, name: str) -> Tensor:
    """Returns the tensor in a local variable of the frame that called :data:`comptime`. It must be an input of the graph."""
    variable = context.get_local(name)._i_will_not_complain_if_bc_breaks_VariableTracker()
    tensor: Tensor = variable.proxy.node.meta["grapharg"].example
    return tensor


def trace_of(context: Any) -> Any:
    """Returns an object that identifies this attempt of ``torch.compile`` to trace a graph: a new attempt has another object."""
    return context._i_will_not_complain_if_bc_breaks_InstructionTranslator().output


def restart_trace(why: str) -> NoReturn:
    """Makes ``torch.compile`` drop the running trace, and trace the same call again. No public way."""
    raise exc.UnspecializeRestartAnalysis(restart_reason=why)  # this error also clears the log of the former attempt


def original_module(module: nn.Module) -> nn.Module:
    """Returns the module inside the result of ``torch.compile(module)``; another module unchanged. No public way."""
    return module._orig_mod if isinstance(module, eval_frame.OptimizedModule) else module


def starts_graph_with_hooks(module: nn.Module) -> bool:
    """Returns True if ``torch.compile`` starts a graph in the forward of this torch module only if the module has hooks.

    torch does so since 2.14, undocumented. Attention modules are excluded, because hooks change the path that they choose.
    """
    torchs = type(module).__module__.startswith(("torch.nn.", "torch.ao."))
    return torchs and not isinstance(module, (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerEncoder))


WHY_LEFT_OUT = "_torchdynamo_disable_msg"
"""The attribute of an excluded function with the reason, which ``torch.compile(fullgraph=True)`` puts into its error."""

DYNAMO_MARKS = ("_dynamo", "_has_dynamo", "_specialize_on")
"""Prefixes of the attributes that ``torch.compile`` reads from a tensor's ``__dict__`` (``_has_dynamo…`` not in torch 2.11)."""


def is_compiled(module: nn.Module) -> bool:
    """Returns True after ``torch.compile(module)`` or ``module.compile()``. No public way to ask."""
    return isinstance(module, eval_frame.OptimizedModule) or getattr(module, COMPILED_CALL, None) is not None


pruned_attribute: Callable[[Any], str] = attrgetter("_tensor_name")
"""Returns the attribute that a ``torch.nn.utils.prune.BasePruningMethod`` prunes. It has no public name."""


def take_for_parameter(tensor: Tensor) -> None:
    """Makes ``isinstance(tensor, nn.Parameter)`` True for a tensor of another class. The public way creates another tensor."""
    vars(tensor)["_is_param"] = True


MODULE_APPLY = (nn.Module, "_apply")
"""The method that ``to`` calls for each module, and that modules override. The public methods move all parameters."""


def moves_modules(code: Any) -> bool:
    """Returns True if code is torch's that moves a module's parameters, and their gradients with them."""
    return code is unwrap(nn.Module._apply).__code__


scaler_device: Callable[[torch.amp.GradScaler], str] = attrgetter("_device")
"""Returns the device type of a gradient scaler. It has no public name."""


def unscales_by_itself(optimizer: Any) -> bool:
    """Returns True if an optimizer was constructed fused: its step unscales gradients itself, so the scaler does not."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def save_by_way_of(value: Callable[[Any], Any], content: Any, stream: Any) -> None:
    """As ``torch.save``, but writes ``value(storage)`` for each storage, one at a time.

    The public function needs the values of all storages in memory.
    """
    with serialization._open_zipfile_writer_buffer(stream) as file:

        def write(name: str, data: Any, nbytes: int) -> None:
            file.write_record(name, value(data) if torch.is_storage(data) else data, nbytes)

        writer = SimpleNamespace(write_record=write, write_record_metadata=file.write_record_metadata)
        serialization._save(content, writer, pickle, serialization.DEFAULT_PROTOCOL, False)
