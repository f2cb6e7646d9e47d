"""Frozen stacks of experts in 4 bits: :class:`PackedStack` and :func:`pack_experts`.

torchao quantises and dequantises (``NVFP4Tensor``, ``MXTensor``), but multiplies a stack of matrices by few functions: none for
MXFP4, and none that adds PEFT's adapters to a stack. :class:`PackedStack` therefore holds a tensor of torchao. An operation on it
gets the dequantised weight, computes, and frees it. This works on every device, on plain Lightning as well.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import Tensor, nn

from sp_lightning.experts.stacks import stacks_in
from sp_lightning.model.wrapped import builder, parts
from sp_lightning.torch_compat.modes import no_inference_mode
from sp_lightning.torch_compat.private import tree_leaves, tree_map_only, writes_arguments

_AT_ONCE = 2**25
"""About as many values are quantised or dequantised at once: torchao makes several temporary tensors in float32."""
_BLOCKS = {"nvfp4": 16, "mxfp4": 32}
"""By format, the number of values with a common scale. They follow each other along the inputs of a linear layer."""
_aten = torch.ops.aten


class PackedStack(Tensor):
    """Matrices in 4 bits: an operation on them computes with the dequantised ones. They cannot be trained.

    ``copy_`` from a packed tensor of the same format and layout (``load_state_dict``) is the only write.

    ``stack[i]``, ``detach``, ``clone``, ``to``, and a transposition of the last two dimensions give a packed tensor. Autograd
    keeps the packed tensor for backward, too.

    Args:
        inner: a tensor of torchao with ``dequantize()``, of shape ``(experts, out, in)`` or ``(out, in)``.
        flipped: True if the dequantised weight is contiguous with the shape ``(…, in, out)``, as in gpt-oss.
        transposed: True if this tensor is the transposed weight.
        dtype: the dtype of the dequantised weight.
    """

    read_only = True
    inner: Any
    flipped: bool
    transposed: bool

    @staticmethod
    def __new__(cls, inner: Any, flipped: bool, transposed: bool, dtype: torch.dtype) -> PackedStack:
        *first, rows, columns = inner.shape
        if flipped:
            rows, columns = columns, rows
        shape, strides = [*first, rows, columns], [*([rows * columns] * len(first)), columns, 1]
        if transposed:
            shape[-2:], strides[-2:] = shape[:-3:-1], strides[:-3:-1]
        made: PackedStack = torch.Tensor._make_wrapper_subclass(
            cls, shape, strides=strides, dtype=dtype, device=inner.device, requires_grad=False
        )
        made.inner, made.flipped, made.transposed = inner, flipped, transposed
        return made

    __torch_function__: Any = torch._C._disabled_torch_function_impl

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["inner"], (self.flipped, self.transposed, self.dtype)

    @staticmethod
    def __tensor_unflatten__(tensors: dict[str, Any], context: Any, size: Any, stride: Any) -> PackedStack:
        return PackedStack(tensors["inner"], *context)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickles the plain tensors. Wrapper subclasses cannot be loaded with a callable map_location, as Lightning does."""
        names, context = self.inner.__tensor_flatten__()
        plain = {name: getattr(self.inner, name) for name in names}
        size, stride = tuple(self.inner.size()), tuple(self.inner.stride())
        inner = (type(self.inner), plain, context, size, stride)
        return _unpickled, (inner, self.flipped, self.transposed, self.dtype, isinstance(self, nn.Parameter))

    def __repr__(self) -> str:  # type: ignore[override]
        return f"PackedStack({type(self.inner).__name__}, {tuple(self.shape)}, {self.dtype})"

    def dequantize(self) -> Tensor:
        """Returns the weight, with this tensor's shape, strides and dtype."""
        if self.inner.dim() == 2:
            dense = self.inner.dequantize().to(self.dtype)
        else:
            dense = torch.cat([each.dequantize().to(self.dtype) for each in _pieces(self.inner)])
        if self.flipped:
            dense = dense.transpose(-1, -2).contiguous()
        return dense.transpose(-1, -2) if self.transposed else dense

    def _like(self, inner: Any, *, transposed: bool | None = None, dtype: torch.dtype | None = None) -> PackedStack:
        return PackedStack(
            inner, self.flipped, self.transposed if transposed is None else transposed, dtype or self.dtype
        )

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args else None
        if isinstance(first, PackedStack):
            with no_inference_mode():  # torch makes no views of a tensor subclass that are inference tensors
                packed = first._packed(func, args, kwargs)
            if packed is not None:
                return packed
        if _writes_packed(func, args, kwargs):
            if func is _aten.copy_.default and isinstance(args[1], PackedStack):
                raise NotImplementedError(
                    f"Copying into {first!r} from {args[1]!r}. Expected the same format and layout."
                )
            raise NotImplementedError(
                f"{func} would write a weight in 4 bits (PackedStack), which cannot be written or trained. Train adapters "
                "beside it; or assign another parameter."
            )
        args, kwargs = tree_map_only(PackedStack, PackedStack.dequantize, (args, kwargs))
        return func(*args, **kwargs)

    def _packed(self, func: Any, args: Any, kwargs: Any) -> PackedStack | None:
        """Returns the result of a function that leaves the weight packed; None if it needs the values."""
        if func in (_aten.detach.default, _aten.alias.default):
            return self._like(self.inner.detach())
        if func is _aten.clone.default:
            return self._like(self.inner.clone())
        if func is _aten.select.int and self.dim() == 3 and args[1] in (0, -3):
            return self._like(self.inner[args[2]])
        last = {self.dim() - 2, self.dim() - 1}
        if func is _aten.t.default or (
            func is _aten.transpose.int and {each % self.dim() for each in args[1:]} == last
        ):
            return self._like(self.inner, transposed=not self.transposed)
        if func is _aten._to_copy.default and not {*kwargs} - {"dtype", "device", "non_blocking"}:
            device = kwargs.get("device")
            inner = self.inner.clone() if device is None else self.inner.to(device)
            return self._like(inner, dtype=kwargs.get("dtype"))
        if func is _aten.copy_.default and self._has_layout_of(args[1]):
            for (_, part), (_, other) in zip(parts("", self.inner), parts("", args[1].inner), strict=True):
                part.copy_(other)
            return self
        return None

    def _has_layout_of(self, other: Any) -> bool:
        return (
            isinstance(other, PackedStack)
            and type(self.inner) is type(other.inner)
            and (self.shape, self.flipped, self.transposed) == (other.shape, other.flipped, other.transposed)
        )


def _writes_packed(func: Any, args: Any, kwargs: Any) -> bool:
    """Returns True if a function writes a packed tensor."""
    if not writes_arguments(func):
        return False
    named = {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)} | kwargs
    written = [named.get(each.name) for each in func._schema.arguments if each.alias_info and each.alias_info.is_write]
    return any(isinstance(each, PackedStack) for each in tree_leaves(written))


def _unpickled(inner: Any, flipped: bool, transposed: bool, dtype: torch.dtype, is_parameter: bool) -> Tensor:
    kind, *rest = inner
    made = PackedStack(kind.__tensor_unflatten__(*rest), flipped, transposed, dtype)
    return nn.Parameter(made, requires_grad=False) if is_parameter else made


torch.serialization.add_safe_globals([PackedStack, _unpickled])  # checkpoints are loaded with weights_only=True


def pack_experts(module: nn.Module, format: Literal["nvfp4", "mxfp4"] = "nvfp4") -> list[str]:  # noqa: A002
    """Quantises the stacked experts of a model to 4 bits, and freezes them. It works with every strategy.

    Call it before adapters are added::

        self.model = AutoModelForCausalLM.from_pretrained(...)
        sp_lightning.pack_experts(self.model)
        self.model = get_peft_model(self.model, ...)

    Args:
        module: the model, or a part of it. Experts that are stacked in one parameter of shape ``(experts, out, in)`` are
            quantised, or ``(experts, in, out)`` if their module has ``is_transposed`` (gpt-oss).
        format: ``"nvfp4"`` takes 4.5 bits for a value: a scale of 8 bits for 16 values, and a float32 scale for each expert.
            ``"mxfp4"`` takes 4.25 bits: a power of two for 32 values.

    Returns:
        The names of the quantised parameters.

    Raises:
        ImportError: torchao is missing.
        ValueError: there are no stacked experts, or the inputs of one are not a multiple of 16 (of 32 for ``"mxfp4"``).
    """
    if format not in _BLOCKS:
        raise ValueError(f'Got format={format!r}. Expected "nvfp4" or "mxfp4".')
    quantise = _quantise_nvfp4 if format == "nvfp4" else quantise_mxfp4
    made: list[str] = []
    for name, owner, key in [*named_stacks(module)]:
        weight: Any = owner._parameters[key]
        if isinstance(weight, PackedStack):
            continue
        flipped = is_flipped(owner)
        dense = weight.detach().transpose(1, 2) if flipped else weight.detach()
        if dense.shape[-1] % _BLOCKS[format]:
            raise ValueError(
                f"{name!r} has {dense.shape[-1]} inputs. Expected a multiple of {_BLOCKS[format]} for format={format!r}."
            )
        pieces = [quantise(piece.contiguous()) for piece in dense.split(_experts_at_once(dense.shape))]
        inner = _joined(pieces)
        owner._parameters[key] = nn.Parameter(PackedStack(inner, flipped, False, weight.dtype), requires_grad=False)
        made.append(name)
    if not made:
        raise ValueError(
            f"{type(module).__name__} has no stacked experts to pack: expected modules of experts whose parameters have "
            "three dimensions, as in transformers 5 (Qwen3MoeExperts)."
        )
    return made


def named_stacks(module: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """Yields the name, module and attribute of each stack of experts."""
    for prefix, owner in module.named_modules():
        stacks = [id(stack) for stack in stacks_in(owner)]
        for key, parameter in owner._parameters.items():
            if id(parameter) in stacks:
                yield (f"{prefix}.{key}" if prefix else key), owner, key


def is_flipped(owner: nn.Module) -> bool:
    """Returns True if a module of experts keeps its stacks with the shape ``(experts, in, out)``."""
    return bool(getattr(owner, "is_transposed", False))


def _experts_at_once(shape: torch.Size) -> int:
    return max(1, _AT_ONCE // (shape[-1] * shape[-2]))


def _pieces(stack: Any) -> Iterator[Any]:
    """Yields a tensor of torchao in pieces of some experts. torchao does not slice stacks itself."""
    count = _experts_at_once(stack.shape)
    build = builder(stack)
    plain = [part for _, part in parts("", stack)]
    for begin in range(0, len(stack), count):
        yield build(iter([part[begin : begin + count] for part in plain]))


def _joined(pieces: list[Any]) -> Any:
    """Joins pieces of a stack again."""
    plain = zip(*([part for _, part in parts("", piece)] for piece in pieces), strict=True)
    # torch joins no tensors of some 8-bit dtypes.
    joined = [torch.cat([part.view(torch.uint8) for part in each]).view(each[0].dtype) for each in plain]
    return builder(pieces[0])(iter(joined))


def _torchao(name: str) -> Any:
    try:
        from torchao.prototype import mx_formats
    except ImportError as error:
        raise ImportError("Experts in 4 bits need torchao. Install it: pip install torchao") from error
    return getattr(mx_formats, name)


def _quantise_nvfp4(stack: Tensor) -> Any:
    module = _torchao("nvfp4_tensor")
    scale = module.per_tensor_amax_to_scale(stack.abs().amax(dim=(1, 2), keepdim=True).float())
    return module.NVFP4Tensor.to_nvfp4(stack, per_tensor_scale=scale)


def quantise_mxfp4(stack: Tensor) -> Any:
    """Returns a tensor of torchao with the values of a stack in MXFP4."""
    return _torchao("mx_tensor").MXTensor.to_mx(stack, torch.float4_e2m1fn_x2, 32)
