"""Calls of modules of stacked experts: what something is routed to is known as they begin, and comes alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.utils.parametrize import is_parametrized
from torch.utils.hooks import RemovableHandle

from sp_lightning.device.modes import never_compiled, no_dispatch_modes, no_inference_mode
from sp_lightning.device.torch_private import transforms_active
from sp_lightning.engine.access import Access
from sp_lightning.engine.module_hooks import ModuleHooks, Visits, attach_module_hooks, hook_on
from sp_lightning.model.stacks import Reading, how_it_reads
from sp_lightning.weights.device_parameter import hides_stand_ins
from sp_lightning.weights.expert_rows import ExpertRows, RoutedCall
from sp_lightning.weights.layer import StreamedLayer

# With so many indices for each expert nearly all experts are among them. The host does not wait for these indices.
_MANY = 16


class RoutedCalls:
    """Is told of the calls of one module of stacked experts.

    Args:
        access: the engine, which is told of them next.
        module: the module.
        experts: the rows of its layer.

    Attributes:
        pre_hooks: return the hooks that see, and may change, what the module's call is given.
    """

    def __init__(self, access: Access, module: nn.Module, experts: ExpertRows) -> None:
        self._access = access
        self._module = module
        self._experts = experts
        self.pre_hooks: list[Callable[[], Any]] = []

    def enter(self, visits: Visits, inputs: Any) -> Visits:
        """Reads what something is routed to, and brings it. Returns the layers that :meth:`leave` is to release."""
        self._experts.begin(self._route(*inputs))
        try:
            return self._access.enter(visits, inputs)
        except BaseException:
            self._experts.end()
            raise

    def leave(self, visits: Visits, output: Any) -> None:
        """Releases the layers."""
        self._experts.end()
        self._access.leave(visits, output)

    def _route(self, args: Sequence[Any], kwargs: dict[str, Any]) -> RoutedCall:
        experts = self._experts
        if experts.comes_whole or transforms_active() or hides_stand_ins((args, kwargs)):
            return RoutedCall(None)
        if is_parametrized(self._module):
            experts.say("a parametrization computes with all of them (PEFT's adapters on stacks, target_parameters)")
            return RoutedCall(None)
        reading = how_it_reads(self._module)
        if reading is Reading.UNKNOWN:
            experts.fall_back("nobody knows how its forward reads them")
            return RoutedCall(None)
        tensors = [each for each in (*args, *kwargs.values()) if isinstance(each, Tensor)]
        indices = [each for each in tensors if each.dtype in (torch.int32, torch.int64)]
        if len(indices) != 1 or indices[0].numel() >= _MANY * experts.count:
            return RoutedCall(None)
        rows = self._read(indices[0])
        if rows and not 0 <= min(rows) <= max(rows) < experts.count:
            outside = min(rows) if min(rows) < 0 else max(rows)
            experts.fall_back(f"it is given the index {outside}, which is none of its {experts.count} experts")
            return RoutedCall(None)
        # Another hook may exchange the indices before the call has them.
        hooked = sum(len(hooks() or ()) for hooks in self.pre_hooks) > 1
        return RoutedCall(rows, known=reading is Reading.ROUTED_ROWS, hooked=hooked)

    def _read(self, indices: Tensor) -> frozenset[int]:
        self._experts.host_waits += 1
        with no_dispatch_modes(), no_inference_mode():
            return frozenset(indices.detach().to("cpu", torch.int64).unique().tolist())


class _WithKeywords(ModuleHooks):
    """The hooks of one module whose listener sees keyword arguments, too."""

    @never_compiled
    def before_call(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Forward pre-hook."""
        self.before(module, (args, kwargs))


def attach_hooks(access: Access, visits: dict[nn.Module, tuple[StreamedLayer, ...]]) -> list[RemovableHandle]:
    """Attaches hooks to every module, to those of stacked experts such that see what something is routed to."""
    routed = {
        module: each.rows for module, used in visits.items() for each in used if isinstance(each.rows, ExpertRows)
    }
    handles = attach_module_hooks(access, {module: used for module, used in visits.items() if module not in routed})
    for module, experts in routed.items():
        calls = RoutedCalls(access, module, experts)
        hooks = _WithKeywords(calls, module, visits[module])
        handles.append(hook_on(module.register_forward_pre_hook, hooks.before_call, prepend=True, with_kwargs=True))
        everywhere = register_module_forward_pre_hook(lambda *_: None)
        everywhere.remove()
        calls.pre_hooks += [handles[-1].hooks_dict_ref, everywhere.hooks_dict_ref]
        handles.append(hook_on(module.register_forward_hook, hooks.after, always_call=True))
    return handles
