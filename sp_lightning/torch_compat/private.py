"""Everything of torch that this package uses and that torch keeps private: names with an underscore, or in such modules.

torch may change these without notice, so each has one name here, which says what it answers and why torch's public API
does not. All of them were seen in torch 2.10, 2.11 and 2.15. ``tests/torch_compat/test_torch_private.py`` tests the
answer of each name, and ``tests/repository/test_architecture.py`` keeps private names out of all other files.

Hot paths call these functions hundreds of times in a step. Where the arguments need no change, the name is therefore
torch's own function and not a wrapper.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from operator import attrgetter
from types import SimpleNamespace
from typing import Any, Literal

import torch
from torch import Tensor, autograd, jit, nn, overrides, serialization
from torch._dynamo import comptime as compile_time
from torch._dynamo import convert_frame, decorators, eval_frame
from torch._functorch import pyfunctorch
from torch._subclasses import fake_tensor
from torch.autograd import forward_ad
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules import batchnorm
from torch.optim import Optimizer, adagrad, adam, sgd
from torch.optim import optimizer as optimizers
from torch.utils import _python_dispatch, _pytree, checkpoint
from torch.utils._device import DeviceContext
from torch.utils.hooks import RemovableHandle

# ---------------------------------------------------------------------------------------------------- autograd's engine

current_graph_task: Callable[[], int] = torch._C._current_graph_task_id
"""The number of the backward pass that runs in this thread, or -1. The public API does not say whether one runs."""

queue_callback: Callable[[Callable[[], None]], None] = (
    # ``torch.autograd.graph.queue_callback`` is in torch 2.15 and not in 2.11.
    getattr(torch.autograd.graph, "queue_callback", None) or autograd.Variable._execution_engine.queue_callback
)
"""Has the engine call a function at the end of the running backward pass. If the pass fails, the engine drops it."""

ENGINE_CALL = (autograd, "_engine_run_backward")
"""Where ``backward`` and ``autograd.grad`` find what runs the engine. Nothing public tells the caller's thread of an error."""

will_execute_node: Callable[[Any], bool] = torch._C._will_engine_execute_node
"""Whether the backward pass that runs now will come to a node of the graph. There is no public way to ask.

Raises:
    RuntimeError: no backward pass runs, or ``torch.autograd.grad`` was asked for this node's own gradient.
"""

top_saved_tensors_hooks: Callable[[], tuple[Callable[..., Any], Callable[..., Any]] | None] = partial(
    torch._C._autograd._top_saved_tensors_default_hooks,
    False,  # ignore_is_tracing: the answer is None where torch traces and leaves such hooks out
)
"""The pair of functions that packs and unpacks what autograd saves now, or None. The public API only sets such pairs."""


def checkpoint_hook() -> Callable[..., Any] | None:
    """The function that packs what autograd saves now, if it is a non-reentrant checkpoint's. It has no public name."""
    hooks = top_saved_tensors_hooks()
    return hooks[0] if hooks is not None and hooks[0].__module__ == checkpoint.__name__ else None


TORCHSCRIPT: tuple[Any, ...] = (torch._C.ScriptFunction, torch._C.ScriptMethod)
"""The classes of what Python calls in TorchScript: functions and methods, scripted and traced. One has no public name."""

preserve_version_counter: Callable[[Tensor | tuple[Tensor, ...]], Any] = autograd._unsafe_preserve_version_counter
"""A context after which tensors have the version that they had before. The public API only counts upwards."""


def forward_mode_level() -> int:
    """The level of forward-mode differentiation that is active, or -1. The public API only enters and leaves levels."""
    return forward_ad._current_level


# ------------------------------------------------------------------------------------------------ transforms and modes

interpreter_stack: Callable[[], list[Any] | None] = torch._C._functorch.get_interpreter_stack
"""The ``torch.func`` transforms that run here, outermost first, or None. The public API does not tell that one runs."""

DIFFERENTIATING = (torch._C._functorch.TransformType.Grad, torch._C._functorch.TransformType.Jvp)
"""What ``key()`` of an entry of :data:`interpreter_stack` is where the transform takes derivatives."""

transforms_active: Callable[[], bool] = torch._C._are_functorch_transforms_active
"""Whether operators go through a ``torch.func`` transform now. As :data:`interpreter_stack`, without making a list."""


def is_batched(tensor: Tensor) -> bool:
    """Whether a tensor stands for several, in ``torch.vmap`` or in ``autograd.grad(is_grads_batched=True)``. No public way."""
    functorch = torch._C._functorch
    return functorch.is_batchedtensor(tensor) or functorch.is_legacy_batchedtensor(tensor)


no_vmap_mode: Callable[[], AbstractContextManager[Any]] = partial(
    torch._C._ExcludeDispatchKeyGuard, torch._C.DispatchKeySet(torch._C._dispatch_key_parse("VmapMode"))
)
"""A context in which ``autograd.grad(is_grads_batched=True)`` refuses no random numbers. There is no public way to leave it."""

clear_transforms: Callable[[], AbstractContextManager[Any]] = pyfunctorch.temporarily_clear_interpreter_stack
"""A context in which no ``torch.func`` transform runs, so that operators make ordinary tensors. No public way to leave them."""

count_dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
"""How many ``TorchDispatchMode`` are active. The public API does not tell."""

disable_dispatch_modes: Callable[[], Any] = _python_dispatch._disable_current_modes
"""A context in which none of the active ``TorchDispatchMode`` sees operators. The public API cannot suspend them."""

count_function_modes: Callable[[], int] = torch._C._len_torch_function_stack
"""How many ``TorchFunctionMode`` are active. The public API does not tell."""

TorchDispatchMode = _python_dispatch.TorchDispatchMode
"""The base class of modes that see every operator. torch documents it, but has it in a private module only."""

is_traceable_wrapper_subclass = _python_dispatch.is_traceable_wrapper_subclass
"""Whether a tensor consists of others (``__tensor_flatten__``), as quantised ones do. In a private module only."""

# ------------------------------------------------------------------------------------------------------- nested values

# ``torch.utils._pytree`` is what torch itself takes values apart with; there is no public module for it yet.

tree_leaves = _pytree.tree_leaves
"""The values in nested tuples, lists, dicts, named tuples and registered classes, as a list."""

tree_map = _pytree.tree_map
"""The same nested value with a function of every leaf in the leaf's place."""

tree_map_only = _pytree.tree_map_only
"""As :data:`tree_map`, for leaves of one type."""

tree_flatten = _pytree.tree_flatten
"""The leaves, and what :data:`tree_unflatten` needs to put others in their places."""

tree_unflatten = _pytree.tree_unflatten
"""A nested value from its leaves and its structure."""

# ------------------------------------------------------------------------------------------------------------ settings

# What others inherit from comes first: "none" is what the backend has for all operations, or what all backends have.
_FLOAT32 = [
    ("generic", "all"),
    *((backend, of) for of in ("all", "matmul", "conv", "rnn") for backend in ("cuda", "mkldnn")),
]


def float32_precisions() -> tuple[Any, ...]:
    """What torch computes in float32's place, by the legacy names for it and by the new ones of each backend and operation.

    The public ones answer with what is inherited, raise errors where both were used, and cannot set mkldnn's.
    """
    new = []
    for place in _FLOAT32:
        new.append(torch._C._get_fp32_precision_getter(*place))
        torch._C._set_fp32_precision_setter(*place, "none")
    products = torch.get_float32_matmul_precision()
    try:
        convolutions = torch.backends.cudnn.allow_tf32
    except RuntimeError:  # now that the new ones are "none" it is only readable if it is False
        convolutions = True
    _set_new_precisions(new)
    return products, convolutions, *new


def set_float32_precisions(found: tuple[Any, ...]) -> None:
    """Sets what :func:`float32_precisions` has returned."""
    torch.set_float32_matmul_precision(found[0])
    torch.backends.cudnn.allow_tf32 = found[1]
    _set_new_precisions(found[2:])


def _set_new_precisions(found: Sequence[str]) -> None:
    for place, precision in zip(_FLOAT32, found, strict=True):
        torch._C._set_fp32_precision_setter(*place, precision)


def product_precisions() -> tuple[Any, ...]:
    """What matrix products are computed in. As :func:`float32_precisions`, but nothing is set while it is read."""
    places = [place for place in _FLOAT32 if place[1] in ("all", "matmul")]
    backend: Any = torch.backends.cuda.matmul
    names = ("allow_fp16_reduced_precision_reduction", "allow_bf16_reduced_precision_reduction")
    return *(torch._C._get_fp32_precision_getter(*place) for place in places), *(getattr(backend, n) for n in names)


attention_order: Callable[[], list[int]] = torch._C._get_sdp_priority_order
"""In which order ``scaled_dot_product_attention`` tries its ways. The public ``sdpa_kernel`` only sets it, as a context."""

set_attention_order: Callable[[list[int]], None] = torch._C._set_sdp_priority_order
"""Sets what :data:`attention_order` has returned."""

# -------------------------------------------------------------------------------------------------- storages, operators

no_torch_functions: Callable[[], AbstractContextManager[None]] = torch._C.DisableTorchFunction
"""A context in which neither subclasses of Tensor nor torch function modes are asked. The public one leaves modes on."""

subclasses_are_asked: Callable[[], bool] = torch._C._is_torch_function_enabled
"""Whether ``__torch_function__`` of subclasses is called here: not inside ``torch.DisableTorchFunctionSubclass``."""

make_wrapper: Callable[..., Any] = Tensor._make_wrapper_subclass
"""An object of a class with ``__torch_dispatch__``, that has a shape, strides, a dtype and a device, but no memory."""

storage_id: Callable[[torch.UntypedStorage], int] = attrgetter("_cdata")
"""A number that only this storage has while it lives. ``data_ptr`` is 0 for all fake ones, and changes with a resize."""

storage_use_count: Callable[[int], int] = torch._C._storage_Use_Count
"""How many owners a storage, given by its :data:`storage_id`, has in C++: tensors, graphs, and one for all its Python
objects. There is no public way to ask."""

is_view: Callable[[Tensor], bool] = Tensor._is_view
"""Whether autograd knows a tensor as a view of another one. There is no public way to ask."""


def storage_of(reference: StorageWeakRef) -> torch.UntypedStorage | None:
    """The storage of a weak reference; None if it has expired. torch itself passes storages between processes so."""
    storage: torch.UntypedStorage | None = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
    return storage


_swap_memory: Callable[..., None] | None = getattr(torch.UntypedStorage, "_swap_data_ptr_", None)


def move_storage(storage: torch.UntypedStorage) -> None:
    """Gives a storage on the host other memory with the same bytes. All of its tensors lie there from then on.

    torch 2.11 has ``share_memory_`` alone for that, which moves a storage to memory that processes can share.
    """
    if _swap_memory is not None:
        _swap_memory(storage, storage.clone())
    else:
        storage.share_memory_()


null_storage: Callable[[int, torch.device, int], Any] = torch._C._construct_storage_from_data_pointer
"""A storage at an address, 0 for none, on a device, of a number of bytes. No public way makes one without memory."""

refuse_access: Callable[[int, str], None] = getattr(
    torch._C, "_set_storage_data_ptr_access_error_msg", lambda storage, why: None
)
"""Takes its memory from a storage, given by its :data:`storage_id`. Who asks for it then gets a RuntimeError that says this.

Before 2.14 builds for the CPU alone have no such function: reading such memory is an error of torch's, or ends the process."""

exchange_memory: Callable[[Tensor, Tensor], None] = torch._C._swap_tensor_impl
"""Exchanges all that two tensors are but the Python objects and their attributes, also between devices, which ``p.data = other``
refuses. The public ``torch.utils.swap_tensors`` refuses tensors with weak references, as the weights of ``nn.LSTM`` have."""


base_of: Callable[[Tensor], Tensor | None] = attrgetter("_base")
"""The tensor that a tensor is a view of, as autograd knows it; None if it is none. There is no public way to ask."""


def overlaps_itself(tensor: Tensor) -> bool:
    """Whether two elements of a tensor certainly share memory, as those of an expanded one do. No public way to ask."""
    return torch._debug_has_internal_overlap(tensor) == 1  # 0: no, 2: too expensive to tell


sparse_indices: Callable[[Tensor], Tensor] = Tensor._indices
"""The indices of a sparse tensor, coalesced or not. The public ``indices`` refuses a tensor that is not coalesced."""

sparse_values: Callable[[Tensor], Tensor] = Tensor._values
"""The values of a sparse tensor, coalesced or not. The public ``values`` refuses a tensor that is not coalesced."""


def sparse_rows(numbers: Tensor, rows: Tensor, shape: torch.Size, *, once: bool = True) -> Tensor:
    """A sparse tensor of a shape that has ``rows`` ``(n, *shape[1:])`` with ``numbers`` ``(1, n)``, ``int64``.

    Nothing of both is read. With ``once``, numbers ascend, and each is there once. The public ``torch.sparse_coo_tensor``
    warns about checks of invariants that were not asked for (torch 2.11).
    """
    return torch.ops.aten._sparse_coo_tensor_unsafe(numbers, rows, shape, is_coalesced=once)


def writes_arguments(function: Any) -> bool:
    """Whether a function is an operator whose schema says that it writes an argument. Schemas have no public name."""
    schema = getattr(function, "_schema", None)
    return schema is not None and bool(schema.is_mutable)


# Dispatch modes see operators. The functions that call these have public names, the operators have not.

to_copy_operator: Any = torch.ops.aten._to_copy
"""The operator of ``tensor.to`` where that copies."""

grouped_mm_operator: Any = torch.ops.aten._grouped_mm
"""The operator of ``torch.nn.functional.grouped_mm``: products of several matrices at once."""

cpu_attention_operator: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
"""The operator of ``scaled_dot_product_attention`` on the CPU: its first arguments are query, key and value."""

cpu_attention_backward_operator: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
"""Its backward: before the same three comes the gradient of its result."""


def copy_each(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copies each source into its target. The public ``copy_`` takes one pair per call, which costs the host more time.

    Args:
        targets, sources: any tensors, as many of the one as of the other.
    """
    if len(targets) == 1:
        targets[0].copy_(sources[0])
    elif targets:  # torch refuses empty lists
        torch._foreach_copy_(list(targets), list(sources))


Kind = Literal["adam", "adamw", "sgd", "adagrad"]
"""An optimizer of torch's that has a fused step on the CPU."""

FUSED_STEPS: dict[Callable[..., Any], Kind] = {
    torch._fused_adam_: "adam",
    torch._fused_adamw_: "adamw",
    torch._fused_sgd_: "sgd",
    torch._fused_adagrad_: "adagrad",
}
"""The operators that fused optimizers call. Their positional arguments are lists, empty or as long as the first: weights,
gradients, then state. The optimizers are public, what they call is not."""


def step_as_torch(
    kind: Kind,
    form: Literal["foreach", "fused"],
    weight: Tensor,
    gradient: Tensor,
    state: Sequence[Tensor | None],
    steps: float,
    settings: Mapping[str, Any],
) -> list[Tensor | None]:
    """Steps one weight as torch's optimizer does on its device, in place. The public way would run all hooks on optimizers.

    Args:
        kind, form: which optimizer, and which of its implementations.
        weight, gradient, state: on one device. The state is in the order of :data:`FUSED_STEPS`, without the number of steps.
        steps: how many there have been, this one included.
        settings: those of the fused operator.

    Returns:
        The state after the step.
    """
    given: Any = {name: value for name, value in settings.items() if name != "is_first_step"}
    given |= {"foreach": form == "foreach", "fused": form == "fused"}
    counted = [torch.tensor(steps - 1, dtype=torch.float32, device=weight.device if form == "fused" else "cpu")]
    columns: Any = [[] if each is None else [each] for each in state]
    if kind == "sgd":
        buffers = [None if settings["is_first_step"] or not settings["momentum"] else state[0]]
        sgd.sgd([weight], [gradient], buffers, **given)
        return [*buffers]
    if kind == "adagrad":
        adagrad.adagrad([weight], [gradient], columns[0], counted, **given)
    else:
        averages, squares, largest = columns
        given["decoupled_weight_decay"] = kind == "adamw"
        adam.adam([weight], [gradient], averages, squares, largest, counted, **given)
    return [*state]


def foreach_norm(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """The norm of each tensor, as ``clip_grad_norm_`` takes them on a GPU. The public function returns the norm of all."""
    return torch._foreach_norm(list(tensors), 2.0)


def second_level_cache() -> int:
    """Bytes of a core's second-level cache; 0 if torch does not know. torch 2.10 has no public way to ask."""
    if hasattr(torch.cpu, "get_capabilities"):
        return int(torch.cpu.get_capabilities().get("l2_cache_size", 0))
    return int(getattr(torch._C._cpu, "_L2_cache_size", lambda: 0)())


def fused_sgd_step(weight: Tensor, gradient: Tensor) -> None:
    """Takes one plain SGD step with a learning rate of 1, in place, with the fused kernel.

    The public way is a step of ``torch.optim.SGD``, which also runs the hooks that anybody has registered for all
    optimizers.
    """
    torch._fused_sgd_(
        [weight], [gradient], [], weight_decay=0.0, momentum=0.0, lr=1.0, dampening=0.0, nesterov=False, maximize=False,
        is_first_step=False,
    )  # fmt: skip


FakeTensor = fake_tensor.FakeTensor
"""A tensor that has a shape, a dtype and a device, and no memory. Public tensors without memory are on the device ``meta``."""

FakeTensorMode = fake_tensor.FakeTensorMode
"""The mode in which new tensors are fake tensors."""

# ---------------------------------------------------------------------------------------- hooks that others registered

# torch has public functions that register hooks, and none that tells which there are.

gradient_hooks: Callable[[Tensor], dict[int, Callable[..., Any]] | None] = attrgetter("_backward_hooks")
"""What ``tensor.register_hook`` has registered, by number; None or empty without."""

accumulation_hooks: Callable[[Tensor], dict[int, Callable[..., Any]] | None] = attrgetter("_post_accumulate_grad_hooks")
"""What ``tensor.register_post_accumulate_grad_hook`` has registered, by number; None or empty without."""

TENSOR_METADATA = ("_version", "_backward_hooks", "_post_accumulate_grad_hooks")
"""Attributes of a tensor that can be read without a look at its memory."""

forward_pre_hooks: Callable[[nn.Module], dict[int, Callable[..., Any]]] = attrgetter("_forward_pre_hooks")
global_forward_pre_hooks: dict[int, Callable[..., Any]] = torch.nn.modules.module._global_forward_pre_hooks
"""What ``module.register_forward_pre_hook``, and ``register_module_forward_pre_hook`` for all, have registered, by number."""


def loads_in_its_own_way(module: nn.Module) -> bool:
    """Whether code that is not torch's sees what ``load_state_dict`` loads into a module: a hook, or an overridden method."""
    return bool(module._load_state_dict_pre_hooks) or not type(module)._load_from_state_dict.__module__.startswith(
        "torch."
    )


def step_pre_hooks(optimizer: Any) -> list[Callable[..., Any]] | None:
    """The hooks before an optimizer's step, those of every optimizer among them; None for what is no optimizer of torch's."""
    own = getattr(optimizer, "_optimizer_step_pre_hooks", None)
    return None if own is None else [*own.values(), *optimizers._global_optimizer_pre_hooks.values()]


def step_hooks(optimizer: Optimizer) -> list[Callable[..., Any]]:
    """The hooks before and after an optimizer's step. What wraps an optimizer may have none of its own."""
    found = (getattr(optimizer, f"_optimizer_step_{when}_hooks", {}) for when in ("pre", "post"))
    return [hook for hooks in found for hook in hooks.values()]


def global_step_hooks() -> list[Callable[..., Any]]:
    """The hooks before and after the step of every optimizer."""
    return [*optimizers._global_optimizer_pre_hooks.values(), *optimizers._global_optimizer_post_hooks.values()]


def has_global_step_hooks(*hooks: Callable[..., Any]) -> bool:
    """Whether all of these are among the hooks before and after the step of every optimizer."""
    return all(hook in global_step_hooks() for hook in hooks)


def remove_global_step_hooks(*hooks: Callable[..., Any]) -> None:
    """Removes hooks before and after the step of every optimizer, registered once, several times or not at all.

    The public handle is lost if an interrupt comes before the caller has it.
    """
    for registered in (optimizers._global_optimizer_pre_hooks, optimizers._global_optimizer_post_hooks):
        for number in [number for number, hook in registered.items() if hook in hooks]:
            del registered[number]


def run_first_after_step(optimizer: Optimizer, handle: RemovableHandle) -> None:
    """Moves a hook to the front of those that run after an optimizer's step. ``register_step_post_hook`` appends."""
    optimizer._optimizer_step_post_hooks.move_to_end(handle.id, last=False)  # type: ignore[attr-defined]


# ---------------------------------------------------------------------------------------------- modules and parameters

COMPILED_CALL = "_compiled_call_impl"
"""The attribute in which ``module.compile()`` leaves what a call runs. It has no public name."""

SCRIPTING = (jit._recursive, "create_script_module")
"""Where ``torch.jit.script`` finds what makes a program of a module. It asks a module nothing before, and has no hooks."""

RNN_WEIGHTS = ("_flat_weights", "_flat_weight_refs")
"""The attributes in which ``nn.RNNBase`` lists its weights, anew whenever they are others."""

frame_compiler: Callable[[], Any] = torch._C._dynamo.eval_frame.get_eval_frame_callback
"""What ``torch.compile`` does with the frames that this thread enters now: None while it compiles nothing. No public way."""

COMPILE_LOCK: Any = convert_frame.compile_lock
"""Held by the thread in which ``torch.compile`` compiles something. No public name."""


def compiles_here() -> bool:
    """Whether ``torch.compile`` compiles something in this thread."""
    return bool(COMPILE_LOCK._is_owned())


def set_compiling(compiling: bool) -> bool:
    """Sets what ``torch.compiler.is_compiling()`` returns in all threads. Returns what it was. No public way."""
    before, torch.compiler._is_compiling_flag = torch.compiler._is_compiling_flag, compiling
    return before


def default_device_is_set() -> bool:
    """Whether ``torch.set_default_device``, or a device as a context, holds in this thread. The public way always finds one."""
    return count_function_modes() > 0 and any(
        isinstance(mode, DeviceContext) for mode in overrides._get_current_function_mode_stack()
    )


leave_frame_out: Callable[[Callable[..., Any]], Callable[..., Any]] = decorators.skip
"""Has ``torch.compile`` leave out a frame. The public ``torch.compiler.disable(recursive=False)`` puts another around it."""


def trace_only_inlined(function: Callable[..., Any]) -> Callable[..., Any]:
    """Has ``torch.compile`` follow a function where a traced one calls it, and begin no graph in it. No public way."""
    eval_frame.skip_code(function.__code__)
    return function


comptime: Any = compile_time.comptime
"""Calls a function with a context while ``torch.compile`` traces the call, and does nothing otherwise. In a private module."""


def first_traced(context: Any, name: str) -> Any:
    """The first object in a tuple, a local variable where :data:`comptime` was called; None if it is in graphs only."""
    variable = context.get_local(name)._i_will_not_complain_if_bc_breaks_VariableTracker()
    return getattr(variable.items[0], "value", None)


def starts_graph_with_hooks(module: nn.Module) -> bool:
    """Whether ``torch.compile`` begins a graph in the forward of a module of torch's own only if the module has hooks.

    That is so since torch 2.14, and nothing public says so. Attention chooses its path by its hooks.
    """
    torchs = type(module).__module__.startswith(("torch.nn.", "torch.ao."))
    return torchs and not isinstance(module, (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerEncoder))


WHY_LEFT_OUT = "_torchdynamo_disable_msg"
"""The attribute of such a function that says why, where ``torch.compile`` may leave out none (``fullgraph=True``)."""

DYNAMO_MARKS = ("_dynamo", "_has_dynamo", "_specialize_on")
"""How attributes begin that ``torch.compile`` looks for in a tensor's ``__dict__`` (``_has_dynamo…`` is not in torch 2.11)."""


def is_compiled(module: nn.Module) -> bool:
    """Whether a module is one graph: ``torch.compile(module)`` or ``module.compile()``. No public way to ask."""
    return isinstance(module, eval_frame.OptimizedModule) or getattr(module, COMPILED_CALL, None) is not None


NormBase = batchnorm._NormBase
"""The base class of batch and instance normalisation of all dimensions, which have no public one in common."""

pruned_attribute: Callable[[Any], str] = attrgetter("_tensor_name")
"""Which attribute a ``torch.nn.utils.prune.BasePruningMethod`` prunes. It has no public name."""


def take_for_parameter(tensor: Tensor) -> None:
    """Lets ``isinstance(tensor, nn.Parameter)`` hold for a tensor of another class. The public way makes another tensor."""
    vars(tensor)["_is_param"] = True


scaler_device: Callable[[torch.amp.GradScaler], str] = attrgetter("_device")
"""The type of the device that a gradient scaler is for. It has no public name."""


def unscales_by_itself(optimizer: Any) -> bool:
    """Whether a gradient scaler leaves it to an optimizer's step to unscale: to one that was constructed fused."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def part_of_file(stream: Any, offset: int, nbytes: int) -> Any:
    """A part of a file, as a file: torch.distributed.checkpoint writes one for each tensor. Its public readers load all of it."""
    from torch.distributed.checkpoint.utils import (
        _create_file_view,  # who reads no such checkpoint need not import this
    )

    return _create_file_view(stream, offset, nbytes)


def save_by_way_of(value: Callable[[Any], Any], content: Any, stream: Any) -> None:
    """``torch.save``, which writes ``value(storage)`` for each storage. It asks for one after the other; torch has all."""
    with serialization._open_zipfile_writer_buffer(stream) as file:

        def write(name: str, data: Any, nbytes: int) -> None:
            file.write_record(name, value(data) if torch.is_storage(data) else data, nbytes)

        writer = SimpleNamespace(write_record=write, write_record_metadata=file.write_record_metadata)
        serialization._save(content, writer, pickle, serialization.DEFAULT_PROTOCOL, False)


# ------------------------------------------------------------------------------------------------- what depends on them

FEATURES = {
    "every run with default options": {
        "current_graph_task": "every training step: what runs in backward, and activation checkpointing",
        "queue_callback": "every training step: the end of a backward",
        "ENGINE_CALL": "errors of a backward on an accelerator",
        "top_saved_tensors_hooks": 'activation checkpointing and offloading: activations="recompute", "offload", "auto"',
        "checkpoint_hook": "gradient checkpointing of the model itself",
        "interpreter_stack": "torch.func inside a step",
        "transforms_active": "torch.func and torch.vmap inside a step",
        "count_dispatch_modes": "a TorchDispatchMode around a step",
        "count_function_modes": "a TorchFunctionMode around a step; torch.set_default_device beside updates",
        "tree_leaves": "every run",
        "tree_map_only": "checkpoints, and arguments of layer calls",
        "product_precisions": "updates in the background (optimizer_overlap)",
        "no_torch_functions": "every training step: weights inside of a step",
        "subclasses_are_asked": "gradients that are freed in backward, or narrower than float32",
        "make_wrapper": "gradients of casts (bf16-mixed, 16-mixed)",
        "storage_id": "every run: views and shared memory of weights",
        "storage_use_count": "memory of layers that user code still holds",
        "is_view": "weights that are views of others",
        "storage_of": "host memory of weights that user code still holds",
        "move_storage": "host memory of weights that user code still holds",
        "null_storage": "weights that are not on the GPU",
        "refuse_access": "the error for a read of a weight that is not on the GPU",
        "base_of": "views of weights in hooks and checkpoints",
        "copy_each": "every run: uploads and downloads",
        "FUSED_STEPS": 'fused optimizers layer by layer (optimizer_overlap="forward", "backward")',
        "second_level_cache": "the size of pieces in updates on the CPU",
        "gradient_hooks": "tensor.register_hook on weights",
        "accumulation_hooks": "register_post_accumulate_grad_hook on weights",
        "TENSOR_METADATA": "attributes of weights that are not on the GPU",
        "forward_pre_hooks": "forward pre-hooks on experts; buffers",
        "global_forward_pre_hooks": "forward pre-hooks on experts",
        "loads_in_its_own_way": "loading checkpoints in parts",
        "step_pre_hooks": "hooks before an optimizer's step",
        "step_hooks": "hooks of an optimizer's step",
        "global_step_hooks": "hooks of every optimizer's step",
        "has_global_step_hooks": "hooks of every optimizer's step",
        "remove_global_step_hooks": "hooks of every optimizer's step",
        "run_first_after_step": "hooks after an optimizer's step",
        "COMPILED_CALL": "module.compile()",
        "frame_compiler": "torch.compile",
        "default_device_is_set": "torch.set_default_device beside updates in the background",
        "is_compiled": "torch.compile",
    },
    "an option, a precision or a common model": {
        "will_execute_node": "embeddings whose rows are uploaded by need",
        "preserve_version_counter": 'activations="recompute" and "offload"',
        "TorchDispatchMode": "superpipeline plan and the prediction of windows",
        "is_traceable_wrapper_subclass": "quantised weights (torchao) and other tensor subclasses",
        "tree_map": "steps on the GPU, and state of optimizers",
        "tree_flatten": 'activations="recompute"',
        "tree_unflatten": 'activations="recompute"',
        "float32_precisions": "trials that share a base: settings of each",
        "set_float32_precisions": "trials that share a base: settings of each",
        "attention_order": "trials that share a base: settings of each",
        "set_attention_order": "trials that share a base: settings of each",
        "exchange_memory": "modules on the meta device (load_weights_from=)",
        "overlaps_itself": 'activations="recompute": tensors that a forward writes',
        "sparse_indices": "embeddings with sparse=True",
        "sparse_values": "embeddings with sparse=True",
        "sparse_rows": "embeddings with sparse=True, and rows of embeddings",
        "writes_arguments": "quantised weights (torchao); superpipeline plan",
        "to_copy_operator": "superpipeline plan: casts",
        "grouped_mm_operator": "superpipeline plan: stacked experts",
        "cpu_attention_operator": "superpipeline plan: attention",
        "cpu_attention_backward_operator": "superpipeline plan: attention",
        "step_as_torch": "CPU optimizer steps with the bits of the GPU",
        "foreach_norm": "norms for clipping with the bits of the GPU",
        "fused_sgd_step": "fused SGD of 16-bit weights",
        "RNN_WEIGHTS": 'nn.LSTM, nn.GRU and nn.RNN with activations="recompute"',
        "NormBase": 'BatchNorm and InstanceNorm with activations="recompute"',
        "pruned_attribute": "torch.nn.utils.prune",
        "FakeTensor": "superpipeline plan; tests of modules without values",
        "FakeTensorMode": "reading checkpoint folders (save_distributed_checkpoint=True)",
        "take_for_parameter": "parameters of quantised weights, and state on a disk",
        "scaler_device": "16-mixed",
        "unscales_by_itself": "16-mixed with fused optimizers",
        "part_of_file": "reading checkpoint folders (save_distributed_checkpoint=True)",
        "save_by_way_of": "checkpoints of weights and state that are on a disk (disk=)",
    },
    "torch.compile": {
        "COMPILE_LOCK": "torch.compile beside updates in the background",
        "compiles_here": "torch.compile beside updates in the background",
        "set_compiling": "torch.compile beside updates in the background",
        "leave_frame_out": "torch.compile",
        "trace_only_inlined": "torch.compile",
        "comptime": "torch.compile",
        "first_traced": "torch.compile",
        "starts_graph_with_hooks": "torch.compile of attention modules",
        "WHY_LEFT_OUT": "torch.compile(fullgraph=True)",
        "DYNAMO_MARKS": "torch.compile: mark_dynamic on weights",
    },
    "unusual code in a step, which must be equal or an error": {
        "TORCHSCRIPT": 'TorchScript inside a layer with activations="recompute"',
        "forward_mode_level": "torch.func.jvp and forward-mode differentiation",
        "DIFFERENTIATING": "the error for torch.func.grad inside a step",
        "is_batched": "torch.vmap and autograd.grad(is_grads_batched=True) in bf16-mixed and 16-mixed",
        "no_vmap_mode": "activations computed again inside autograd.grad(is_grads_batched=True)",
        "clear_transforms": "torch.func inside a step",
        "disable_dispatch_modes": "a TorchDispatchMode around a step; superpipeline plan",
        "SCRIPTING": "torch.jit.script during a run",
    },
}
"""For each name the feature that fails if the name fails, ranked by what needs it.

``python -m tests.torch_compat.test_torch_names`` lists the names that the installed torch lacks.
"""
