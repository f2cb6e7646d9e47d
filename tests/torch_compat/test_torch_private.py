"""Privates of torch whose change no training would show at once: what the package asks of them, and their answers."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.checkpoint import checkpoint

from sp_lightning.core.device.lease import lend
from sp_lightning.core.torch_compat import private as torch_private
from sp_lightning.trainer.scaler import HostGradScaler

# ---------------------------------------------------------------------------------------------------- autograd's engine


def test_the_store_of_the_default_group_has_another_connection() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        store = torch_private.store_of_default_group()
        store.clone().set("key", "value")
        assert store.get("key") == b"value"
    finally:
        dist.destroy_process_group()


def test_the_second_level_cache_is_known() -> None:
    size = torch_private.second_level_cache()
    assert size == 0 or 2**17 <= size <= 2**28


def test_what_was_queued_is_dropped_where_backward_fails() -> None:
    ended: list[bool] = []
    leaf = torch.ones(2, requires_grad=True)
    between = leaf * 2

    def fail(gradient: Tensor) -> None:
        torch_private.queue_callback(lambda: ended.append(True))
        raise ValueError("on purpose")

    between.register_hook(fail)
    with pytest.raises(ValueError, match="on purpose"):
        between.sum().backward()
    assert ended == []


def test_a_node_knows_whether_backward_comes_to_another() -> None:
    answers: list[bool | str] = []

    class Asks(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, leaf: Tensor) -> Tensor:
            return leaf.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            try:
                answers.append(torch_private.will_execute_node(ctx.next_functions[0][0]))
            except RuntimeError:
                answers.append("asked for")
            return gradient

    leaf, other = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    Asks.apply(leaf).sum().backward()
    halfway = other * 1
    torch.autograd.grad((Asks.apply(leaf) + halfway).sum(), halfway, retain_graph=True)
    assert answers == [True]  # the second backward does not come to the node that asks
    torch.autograd.grad(Asks.apply(leaf).sum(), leaf)
    assert answers == [True, "asked for"]
    product = Asks.apply(leaf * 1)
    torch.autograd.backward(product.sum(), inputs=[leaf])
    assert answers == [True, "asked for", True]
    with pytest.raises(RuntimeError):
        torch_private.will_execute_node(product.grad_fn)


def test_the_hooks_of_saved_tensors_on_top_are_told() -> None:
    assert torch_private.top_saved_tensors_hooks() is None

    def pack(tensor: Tensor) -> Tensor:
        return tensor

    def unpack(tensor: Tensor) -> Tensor:
        return tensor

    with torch.autograd.graph.save_on_cpu(), torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        assert torch_private.top_saved_tensors_hooks() == (pack, unpack)
        before = torch._C._autograd._saved_tensors_hooks_set_tracing(True)  # as torch.compile does while it traces
        try:
            assert torch_private.top_saved_tensors_hooks() is None, "a graph that is traced calls none"
        finally:
            torch._C._autograd._saved_tensors_hooks_set_tracing(before)
    assert torch_private.top_saved_tensors_hooks() is None


def test_the_hook_of_a_checkpoint_is_told() -> None:
    seen = []

    def run(x: Tensor) -> Tensor:
        with torch.autograd.graph.save_on_cpu():
            assert torch_private.checkpoint_hook() is None
        seen.append(torch_private.checkpoint_hook())
        return x.exp()

    x = torch.ones(2, requires_grad=True)
    checkpoint(run, x, use_reentrant=False).sum().backward()
    assert all(seen)
    assert len(set(seen)) == len(seen) == 2
    assert torch_private.checkpoint_hook() is None


def test_levels_of_forward_mode_are_told() -> None:
    assert torch_private.forward_mode_level() < 0
    with forward_ad.dual_level():
        assert torch_private.forward_mode_level() >= 0
    assert torch_private.forward_mode_level() < 0


# ------------------------------------------------------------------------------------------------ transforms and modes


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # jvp calls it the first time
def test_transforms_are_told_and_which_of_them_differentiate() -> None:
    told: list[tuple[bool, list[bool]]] = []

    def note(x: Tensor) -> Tensor:
        stack = torch_private.interpreter_stack() or []
        told.append(
            (torch_private.transforms_active(), [each.key() in torch_private.DIFFERENTIATING for each in stack])
        )
        return x.sum()

    assert torch_private.interpreter_stack() is None
    note(torch.ones(2))
    torch.vmap(note)(torch.ones(2, 2))
    torch.func.grad(note)(torch.ones(2))
    torch.func.jvp(note, (torch.ones(2),), (torch.ones(2),))
    torch.func.grad(lambda x: torch.vmap(note)(x).sum())(torch.ones(2, 2))
    assert told == [(False, []), (True, [False]), (True, [True]), (True, [True]), (True, [True, False])]


def test_batched_tensors_are_told_from_others() -> None:
    seen: list[bool] = []

    def note(x: Tensor) -> Tensor:
        seen.append(torch_private.is_batched(x))
        return x

    note(torch.ones(2))
    torch.vmap(note)(torch.ones(2, 2))
    x = torch.ones(2, requires_grad=True)
    y = 2 * x
    y.register_hook(note)
    torch.autograd.grad(y, x, torch.ones(3, 2), is_grads_batched=True)
    assert seen == [False, True, True]


# -------------------------------------------------------------------------------------------------- storages, operators


def test_a_storage_has_a_number_of_its_own_and_counts_its_owners() -> None:
    tensor = torch.ones(4)
    storage, other = tensor.untyped_storage(), torch.ones(4).untyped_storage()
    number, alone = (
        torch_private.storage_id(storage),
        torch_private.storage_use_count(torch_private.storage_id(storage)),
    )
    assert number != torch_private.storage_id(other)
    view = tensor[1:]
    assert torch_private.storage_id(view.untyped_storage()) == number
    assert torch_private.storage_use_count(torch_private.storage_id(storage)) == alone + 1
    leaf = torch.ones(3, requires_grad=True)
    saved = leaf * view
    del view
    assert torch_private.storage_use_count(torch_private.storage_id(storage)) == alone + 1  # the graph's
    del saved
    assert torch_private.storage_use_count(torch_private.storage_id(storage)) == alone == 2
    storage.resize_(4096)
    assert torch_private.storage_id(storage) == number
    with torch_private.fake_tensor.FakeTensorMode():
        fakes = [torch.ones(2).untyped_storage() for _ in range(2)]
        assert torch_private.storage_id(fakes[0]) != torch_private.storage_id(fakes[1])


@pytest.mark.parametrize("newest", [True, False])
def test_a_storage_moves_with_its_tensors(newest: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not newest:
        monkeypatch.setattr(torch_private, "_swap_memory", None)
    memory = torch.arange(4.0)
    tensor = lend(memory.view(torch.uint8)).view(torch.float32)
    view, reference = tensor[1:], StorageWeakRef(tensor.untyped_storage())
    found = torch_private.storage_of(reference)
    assert found is not None
    assert found.data_ptr() == memory.data_ptr()
    torch_private.move_storage(found)
    memory.fill_(7)
    assert tensor.tolist() == [0, 1, 2, 3]
    tensor.add_(1)
    assert view.tolist() == [2, 3, 4]
    assert memory.tolist() == [7, 7, 7, 7]
    del tensor, view, found
    assert torch_private.storage_of(reference) is None


def test_views_are_told_from_tensors_of_their_own() -> None:
    leaf = torch.ones(3)
    with torch.no_grad():
        assert torch_private.is_view(leaf[:1])
        assert torch_private.is_view(leaf.view(-1))
        assert not any(map(torch_private.is_view, (leaf, leaf.clone(), leaf + 1)))


def test_certain_overlap_is_told() -> None:
    assert torch_private.overlaps_itself(torch.ones(1).expand(3))
    assert not torch_private.overlaps_itself(torch.ones(3, 3).t())
    assert not torch_private.overlaps_itself(torch.ones(11).as_strided((3, 3), (2, 3)))  # too expensive to tell


def test_operators_that_write_their_arguments_are_told() -> None:
    assert torch_private.writes_arguments(torch.ops.aten.add_.Tensor)
    assert not torch_private.writes_arguments(torch.ops.aten.add.Tensor)
    assert not torch_private.writes_arguments(torch.add)


# ---------------------------------------------------------------------------------------- hooks that others registered


def test_hooks_of_tensors_are_told_as_long_as_they_are_registered() -> None:
    parameter = nn.Parameter(torch.ones(2))
    assert not torch_private.gradient_hooks(parameter)
    assert not torch_private.accumulation_hooks(parameter)

    def hook(gradient: Tensor) -> None: ...

    def after(accumulated: Tensor) -> None: ...

    handles = parameter.register_hook(hook), parameter.register_post_accumulate_grad_hook(after)
    assert list((torch_private.gradient_hooks(parameter) or {}).values()) == [hook]
    assert list((torch_private.accumulation_hooks(parameter) or {}).values()) == [after]
    for handle in handles:
        handle.remove()
    assert not torch_private.gradient_hooks(parameter)
    assert not torch_private.accumulation_hooks(parameter)


def test_modules_that_load_in_their_own_way_are_told() -> None:
    class Own(nn.Linear):
        def _load_from_state_dict(self, *args: Any) -> None: ...

    hooked = nn.Linear(1, 1)
    hooked.register_load_state_dict_pre_hook(lambda *_: None)
    assert torch_private.loads_in_its_own_way(hooked)
    assert torch_private.loads_in_its_own_way(Own(1, 1))
    assert not torch_private.loads_in_its_own_way(nn.Linear(1, 1))
    assert not torch_private.loads_in_its_own_way(nn.BatchNorm1d(1))  # torch's own way


def test_hooks_of_optimizers_are_told_and_one_can_be_the_first() -> None:
    parameter = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    assert torch_private.step_pre_hooks(optimizer) == []
    assert torch_private.step_pre_hooks(object()) is None
    order: list[str] = []

    def before(*_: Any) -> None:
        order.append("before")

    def users(*_: Any) -> None:
        order.append("users")

    def ours(*_: Any) -> None:
        order.append("ours")

    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(users)
    handle = optimizer.register_step_post_hook(ours)
    assert torch_private.step_pre_hooks(optimizer) == [before]
    assert torch_private.step_hooks(optimizer) == [before, users, ours]
    torch_private.run_first_after_step(optimizer, handle)
    assert torch_private.step_hooks(optimizer) == [before, ours, users]
    optimizer.step()
    assert order == ["before", "ours", "users"]


def test_hooks_of_all_optimizers_are_told() -> None:
    def before(*_: Any) -> None: ...

    def after(*_: Any) -> None: ...

    others = torch_private.global_step_hooks()
    handles = register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)
    assert [each for each in torch_private.global_step_hooks() if each not in others] == [before, after]
    for handle in handles:
        handle.remove()
    assert torch_private.global_step_hooks() == others


# ---------------------------------------------------------------------------------------------- modules and parameters


def test_compiled_modules_are_told_and_where_the_compiled_call_is() -> None:
    plain, whole, in_place = nn.Linear(1, 1), torch.compile(nn.Linear(1, 1), backend="eager"), nn.Linear(1, 1)
    in_place.compile(backend="eager")
    assert [torch_private.is_compiled(each) for each in (plain, whole, in_place)] == [False, True, True]
    vars(in_place)[torch_private.COMPILED_CALL] = lambda x: "called"
    assert in_place(torch.ones(1)) == "called"


def test_a_thread_that_compiles_says_so_in_a_frame_that_is_left_out() -> None:
    seen: list[bool] = []

    def look() -> None:
        seen.append(torch_private.frame_compiler() is not None)

    vars(look)[torch_private.WHY_LEFT_OUT] = "It looks."
    torch_private.leave_frame_out(look)

    def function(x: Tensor) -> Tensor:
        look()
        return x + 1

    function(torch.ones(1))
    torch.compile(function, backend="eager")(torch.ones(1))
    assert seen == [False, True]
    with pytest.raises(RuntimeError, match=r"It looks\."):
        torch.compile(lambda x: function(x) * 2, backend="eager", fullgraph=True)(torch.ones(1))


def test_a_thread_that_compiles_holds_a_lock_and_others_are_told_that_it_does() -> None:
    seen = list[tuple[bool, bool, bool]]()

    def backend(graph: Any, _: Any) -> Any:
        others = list[bool]()
        thread = threading.Thread(target=lambda: others.append(torch_private.COMPILE_LOCK.acquire(blocking=False)))
        thread.start()
        thread.join()
        seen.append((torch_private.compiles_here(), torch.compiler.is_compiling(), *others))
        return graph

    assert not torch_private.compiles_here()
    torch.compile(lambda x: x + 1, backend=backend)(torch.ones(2))
    assert [(here, other) for here, _, other in seen] == [(True, False)]
    assert not torch_private.compiles_here()
    before = torch_private.set_compiling(True)
    assert not before
    assert torch.compiler.is_compiling()
    assert torch_private.set_compiling(before)
    assert not torch.compiler.is_compiling()


def test_a_default_device_is_told() -> None:
    assert not torch_private.default_device_is_set()
    with torch.device("meta"):
        assert torch_private.default_device_is_set()
    torch.set_default_device("meta")
    try:
        assert torch_private.default_device_is_set()
    finally:
        torch.set_default_device(None)
    assert not torch_private.default_device_is_set()


def test_compile_marks_tensors_with_attributes_that_begin_so() -> None:
    decorators = torch._dynamo.decorators
    for mark in (
        decorators.mark_dynamic, decorators.maybe_mark_dynamic, decorators.mark_static, decorators.mark_unbacked,
        lambda tensor, _: decorators.mark_static_address(tensor),
    ):  # fmt: skip
        tensor = torch.ones(2, 2)
        mark(tensor, 0)
        assert vars(tensor)
        assert [name for name in vars(tensor) if not name.startswith(torch_private.DYNAMO_MARKS)] == []


def test_an_optimizer_that_is_constructed_fused_unscales_by_itself_and_one_that_is_fused_later_does_not() -> None:
    weights = [nn.Parameter(torch.ones(2))]
    later = torch.optim.AdamW(weights)
    later.param_groups[0]["fused"] = True
    assert torch_private.unscales_by_itself(torch.optim.AdamW(weights, fused=True))
    assert not torch_private.unscales_by_itself(later)


def test_a_gradient_scaler_tells_its_device_and_asks_its_own_method_to_unscale(monkeypatch: pytest.MonkeyPatch) -> None:
    assert torch_private.scaler_device(torch.amp.GradScaler("cpu", enabled=False)) == "cpu"
    parameter = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    scaler = HostGradScaler("cpu", init_scale=4.0)
    called: list[type] = []
    theirs = torch.amp.GradScaler._unscale_grads_

    def noted(self: Any, *args: Any) -> Any:
        called.append(type(self))
        return theirs(self, *args)

    monkeypatch.setattr(torch.amp.GradScaler, "_unscale_grads_", noted)
    scaler.scale(parameter.sum()).backward()
    scaler.unscale_(optimizer)
    assert called == [HostGradScaler]
    assert parameter.grad is not None
    assert parameter.grad.tolist() == [1.0, 1.0]
