"""Frozen stacks of experts in 4 bits: :class:`PackedStack` and :func:`pack_experts`.

An operation on a packed stack gets the dequantised weight, computes, and frees it. This works with every model, function and
device, on plain Lightning as well. torchao quantises. But its own tensors of these formats support few functions on stacks: no
grouped products, and not the function that adds PEFT's adapters. Its dequantisation has the same results, but reads and writes
about 105 bytes for each value, because it computes step by step in float32. :meth:`PackedStack.dequantize` reads and writes about
9 (``examples/results/README.md``, Models and experts).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from sp_lightning.capabilities.experts.stacks import stacks_in
from sp_lightning.core.plan.choices import Packing
from sp_lightning.core.torch_compat.modes import no_inference_mode
from sp_lightning.core.torch_compat.private import (
    FakeTensor,
    make_wrapper,
    to_copy_operator,
    tree_leaves,
    tree_map_only,
    writes_arguments,
)
from sp_lightning.core.weights.device_parameter import tensor_data

_AT_ONCE = 2**25
"""About this number of values is quantised or dequantised at once: torchao makes several temporary tensors in float32, and
:meth:`PackedStack.dequantize` needs 4 bytes for two values."""
_BLOCKS = {"nvfp4": 16, "mxfp4": 32}
"""By format, the number of values with a common scale. They follow each other along the inputs of a linear layer."""
_QUANTISED = (torch.float32, torch.bfloat16)
"""The dtypes that torchao quantises."""
_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""The values of 4 bits (E2M1), of both formats: https://www.opencompute.org/documents/ocp-microscaling-formats-mx-v1-0-spec"""
_SAME_STRIDES = (None, torch.preserve_format)
"""Memory formats of ``clone`` that keep the strides."""
_aten = torch.ops.aten


class PackedStack(Tensor):
    """Matrices in 4 bits. An operation on them computes with the dequantised matrices. They cannot be trained.

    ``stack[i]``, ``detach``, ``clone``, ``to``, and a transposition of the last two dimensions give a packed tensor. Autograd
    saves the packed tensor for backward as well.

    The only operation that writes is ``copy_`` from a packed tensor of the same format and layout, as in ``load_state_dict``. A
    view (``stack[i]``, or a transposed stack) cannot be written. So Superpipeline need not look for writes after each use of a
    view.

    Args:
        values: ``uint8`` of shape ``(experts, out, in / 2)`` or ``(out, in / 2)``: two values in each byte, the first one in the
            lower 4 bits.
        scales: the scales of blocks of values, ``float8_e4m3fn`` (NVFP4) or ``float8_e8m0fnu`` (MXFP4) of shape
            ``(…, out, in / block)``.
        factors: for NVFP4, ``float32`` of shape ``(…, 1, 1)``, by which the scales are multiplied; otherwise None.
        flipped: True if the dequantised weight is contiguous with the shape ``(…, in, out)``, as in gpt-oss.
        transposed: True if this tensor is the transposed weight.
        dtype: the dtype of the dequantised weight.
        read_only: True for a view.
    """

    values: Tensor  # type: ignore[assignment]
    scales: Tensor
    factors: Tensor | None
    flipped: bool
    transposed: bool
    read_only: bool

    @staticmethod
    def __new__(
        cls,
        values: Tensor,
        scales: Tensor,
        factors: Tensor | None,
        flipped: bool,
        transposed: bool,
        dtype: torch.dtype,
        read_only: bool = False,
    ) -> PackedStack:
        *first, rows, columns = values.shape
        columns *= 2
        if flipped:
            rows, columns = columns, rows
        shape, strides = [*first, rows, columns], [*([rows * columns] * len(first)), columns, 1]
        if transposed:
            shape[-2:], strides[-2:] = shape[:-3:-1], strides[:-3:-1]
        made: PackedStack = make_wrapper(
            cls, shape, strides=strides, dtype=dtype, device=values.device, requires_grad=False
        )
        made.values, made.scales, made.factors = values, scales, factors
        made.flipped, made.transposed, made.read_only = flipped, transposed, read_only
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch.DisableTorchFunctionSubclass():  # so that results do not become packed tensors
            return func(*args, **(kwargs or {}))

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        parts = ["values", "scales"] if self.factors is None else ["values", "scales", "factors"]
        return parts, (self.flipped, self.transposed, self.dtype, self.read_only)

    @staticmethod
    def __tensor_unflatten__(tensors: dict[str, Any], context: Any, size: Any, stride: Any) -> PackedStack:
        return PackedStack(tensors["values"], tensors["scales"], tensors.get("factors"), *context)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickles the plain tensors: torch cannot load wrapper subclasses with a callable map_location, which Lightning uses."""
        context = (self.flipped, self.transposed, self.dtype)
        scales = self.scales.view(torch.uint8)  # pickle does not support their dtype
        return _unpickled, (self.values, scales, self.factors, *context, isinstance(self, nn.Parameter))

    @property
    def data(self) -> Any:
        """The data of a tensor. Only a tensor with the same packing can be assigned, whose packed values replace the old ones."""
        return tensor_data.__get__(self)

    @data.setter
    def data(self, other: Any) -> None:
        if not self._has_layout_of(other):
            raise NotImplementedError(
                f"Assigning {type(other).__name__} to the .data of {self!r}. Expected the same format and layout. Assign another "
                "parameter instead: module.weight = nn.Parameter(…)."
            )
        tensor_data.__set__(self, other)  # torch assigns the dtype, and not the packed values
        self.values, self.scales, self.factors = other.values, other.scales, other.factors

    def share_memory_(self) -> PackedStack:
        """Moves the packed values and scales to shared memory."""
        for part in self.__tensor_flatten__()[0]:
            getattr(self, part).share_memory_()
        return self

    def __repr__(self) -> str:  # type: ignore[override]
        return f"PackedStack({self.format}, {tuple(self.shape)}, {self.dtype})"

    @property
    def format(self) -> str:
        """``"nvfp4"`` or ``"mxfp4"``."""
        return "mxfp4" if self.factors is None else "nvfp4"

    def dequantize(self) -> Tensor:
        """Returns the weight, with this tensor's shape, strides and dtype. Some experts at a time have temporary tensors."""
        *first, rows, columns = self.values.shape
        columns *= 2
        dense = torch.empty(
            (*first, columns, rows) if self.flipped else (*first, rows, columns), dtype=self.dtype, device=self.device
        )
        # A tracer's compiler makes one kernel without temporary tensors. The cache of `_pairs` must not get a tracer's tensors.
        traced = type(self.values) not in (Tensor, FakeTensor)
        pairs = (_pairs if type(self.values) is Tensor else _pairs.__wrapped__)(self.dtype, self.device)
        for target, values, scales, factors in self._pieces(dense, rows * columns if not traced else 1):
            scales = scales.float() if factors is None else factors * scales.float()
            made = (
                torch.empty_like(target.transpose(-1, -2), memory_format=torch.contiguous_format)
                if self.flipped
                else target
            )
            torch.index_select(pairs, 0, values.reshape(-1).int(), out=made.view(-1).view(pairs.dtype))
            # torch multiplies in float32 and rounds once. Values of 4 bits are exact in every dtype.
            made.view(*scales.shape, -1).mul_(scales.unsqueeze(-1))
            if self.flipped:
                target.copy_(made.transpose(-1, -2))
        return dense.transpose(-1, -2) if self.transposed else dense

    def _pieces(self, dense: Tensor, size: int) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor | None]]:
        """Yields the dense weight, values, scales and factors of some experts at a time; ``size``: values of one expert."""
        parts = (dense, self.values, self.scales, self.factors)
        if self.values.dim() == 2:
            yield parts
            return
        count = max(1, _AT_ONCE // size)
        for begin in range(0, len(dense), count):
            yield tuple(each if each is None else each[begin : begin + count] for each in parts)  # type: ignore[misc]

    def _each(
        self,
        function: Any,
        *,
        transposed: bool | None = None,
        dtype: torch.dtype | None = None,
        read_only: bool = False,
    ) -> PackedStack:
        """Returns a packed tensor whose plain tensors are the results of a function."""
        factors = None if self.factors is None else function(self.factors)
        transposed = self.transposed if transposed is None else transposed
        return PackedStack(
            function(self.values),
            function(self.scales),
            factors,
            self.flipped,
            transposed,
            dtype or self.dtype,
            read_only,
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
                view = ", and no view: copy into the whole parameter" * args[0].read_only
                remedy = ""
                if args[1].format != args[0].format:
                    remedy = f' Pack the model as the other one: pack_experts(model, "{args[1].format}").'
                raise NotImplementedError(
                    f"Copying into {first!r} from {args[1]!r}. Expected the same format and layout{view}.{remedy}"
                )
            raise NotImplementedError(
                f"{func} would write a weight in 4 bits (PackedStack). It cannot be trained, averaged, or merged with adapters. "
                "Train adapters beside it and keep them; weight.dequantize() has its values, for another parameter."
            )
        args, kwargs = tree_map_only(PackedStack, PackedStack.dequantize, (args, kwargs))
        return func(*args, **kwargs)

    def _packed(self, func: Any, args: Any, kwargs: Any) -> PackedStack | None:
        """Returns the result of a function that leaves the weight packed; None if the function needs dequantised values.

        A ``copy_`` from a packed tensor of the same layout writes the packed values.
        """
        if func in (_aten.detach.default, _aten.alias.default):
            return self._each(Tensor.detach, read_only=self.read_only)
        if func is _aten.clone.default and (kwargs.get("memory_format") in _SAME_STRIDES or self.is_contiguous()):
            return self._each(Tensor.clone)
        if func is _aten.empty_like.default and kwargs.get("device") not in (None, self.device):  # Module.to_empty
            return self._each(partial(torch.empty_like, device=kwargs["device"]))
        if func is _aten.select.int and self.dim() == 3 and args[1] in (0, -3):
            return self._each(lambda part: part[args[2]], read_only=True)
        last = {self.dim() - 2, self.dim() - 1}
        if func is _aten.t.default or (
            func is _aten.transpose.int and {each % self.dim() for each in args[1:]} == last
        ):
            return self._each(lambda part: part, transposed=not self.transposed, read_only=True)
        # Other arguments do not matter: a packed tensor is strided, and its parts keep their order.
        if func.overloadpacket is to_copy_operator:
            device = kwargs.get("device")
            return self._each(lambda part: part.to(device, copy=True), dtype=kwargs.get("dtype"))
        if func is _aten.copy_.default and not self.read_only and self._has_layout_of(args[1]):
            for part in self.__tensor_flatten__()[0]:
                getattr(self, part).copy_(getattr(args[1], part))
            return self
        return None

    def _has_layout_of(self, other: Any) -> bool:
        return isinstance(other, PackedStack) and (self.format, self.shape, self.flipped, self.transposed) == (
            other.format,
            other.shape,
            other.flipped,
            other.transposed,
        )


@cache
def _pairs(dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns the two values of each byte as one number, of shape ``(256,)``: a kernel copies both at once.

    Made once per device, because the host waits for the copy.
    """
    with no_inference_mode():
        values = torch.tensor(_VALUES, dtype=dtype, device="cpu")
        pairs = torch.stack([values.repeat(16), values.repeat_interleave(16)], 1).to(device)
        return pairs.view({2: torch.int32, 4: torch.int64, 8: torch.complex128}[dtype.itemsize]).view(-1)


def _writes_packed(func: Any, args: Any, kwargs: Any) -> bool:
    """Returns True if a function writes, and its first argument, an entry of that argument, or ``out=`` is a packed tensor."""
    written = (*args[:1], kwargs.get("out"))
    return writes_arguments(func) and any(isinstance(each, PackedStack) for each in tree_leaves(written))


def _unpickled(
    values: Tensor,
    scales: Tensor,
    factors: Tensor | None,
    flipped: bool,
    transposed: bool,
    dtype: torch.dtype,
    is_parameter: bool,
) -> Tensor:
    scales = scales.view(torch.float8_e8m0fnu if factors is None else torch.float8_e4m3fn)
    made = PackedStack(values, scales, factors, flipped, transposed, dtype)
    return nn.Parameter(made, requires_grad=False) if is_parameter else made


torch.serialization.add_safe_globals([PackedStack, _unpickled])  # checkpoints are loaded with weights_only=True


def pack_experts(module: nn.Module, format: Packing = "nvfp4") -> list[str]:  # noqa: A002
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
        ValueError: the format is unknown; the module has no stacked experts, or they are packed already; a matrix has a number of
            inputs that is not a multiple of 16 (``"nvfp4"``) or 32 (``"mxfp4"``); or a value is not finite. Only in the last case
            some stacks may have been replaced already.
    """
    if format not in _BLOCKS:
        raise ValueError(f'Got format={format!r}. Expected "nvfp4" or "mxfp4".')
    stacks = _stacks_to_pack(module, format)
    made: dict[Any, nn.Parameter] = {}  # by weight, because two modules may share one
    for name, owner, key in stacks:
        weight: Any = owner._parameters[key]
        if weight not in made:
            made[weight] = _quantise(name, weight.detach(), format, flipped=is_flipped(owner))
        owner._parameters[key] = made[weight]
    return [name for name, _, _ in stacks]


def _stacks_to_pack(module: nn.Module, format: Packing) -> list[tuple[str, nn.Module, str]]:  # noqa: A002
    """Returns the name, module and attribute of each stack that is not packed. The errors are those of :func:`pack_experts`."""
    all_stacks = [*named_stacks(module)]
    found = [each for each in all_stacks if not isinstance(each[1]._parameters[each[2]], PackedStack)]
    if not found:
        raise ValueError(
            f"The stacked experts of {type(module).__name__} are packed already ({all_stacks[0][0]!r} …)."
            if all_stacks
            else f"{type(module).__name__} has no stacked experts to pack: expected modules of experts whose parameters have "
            "three dimensions, as in transformers 5 (Qwen3MoeExperts)."
        )
    for name, owner, key in found:
        inputs = owner._parameters[key].shape[1 if is_flipped(owner) else 2]  # type: ignore[union-attr]
        if inputs % _BLOCKS[format]:
            other = ' "nvfp4" takes multiples of 16.' if format == "mxfp4" and not inputs % _BLOCKS["nvfp4"] else ""
            raise ValueError(
                f"{name!r} has {inputs} inputs. Expected a multiple of {_BLOCKS[format]} for format={format!r}.{other}"
            )
    return found


def _quantise(name: str, stack: Tensor, format: Packing, *, flipped: bool) -> nn.Parameter:  # noqa: A002
    """Returns a stack in 4 bits. Quantises some experts at a time. Raises a ValueError if a value is not finite."""
    quantise = _quantise_nvfp4 if format == "nvfp4" else _quantise_mxfp4
    dense = stack.transpose(1, 2) if flipped else stack
    count = _experts_at_once(dense)
    pieces = []
    for begin in range(0, len(dense), count):
        piece = dense[begin : begin + count].contiguous()
        piece = piece if piece.dtype in _QUANTISED else piece.float()
        if _has_values(piece) and not piece.isfinite().all():
            raise ValueError(f"{name!r} has values that are not finite, which 4 bits cannot hold.")
        pieces.append(quantise(piece))
    values, scales, *factors = map(_joined, zip(*pieces, strict=True))
    packed = PackedStack(values, scales, factors[0] if factors else None, flipped, False, stack.dtype)
    return nn.Parameter(packed, requires_grad=False)


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


def _experts_at_once(stack: Tensor) -> int:
    """Returns how many experts of a stack are quantised at once."""
    if not _has_values(stack):
        return len(stack)
    return max(1, _AT_ONCE // (stack.shape[-1] * stack.shape[-2]))


def _has_values(stack: Tensor) -> bool:
    """Returns True if a stack has memory. Fake tensors (``superpipeline plan``) and tensors on the meta device have none."""
    return not (stack.is_meta or isinstance(stack, FakeTensor))


def _joined(pieces: tuple[Tensor, ...]) -> Tensor:
    # torch.cat does not support some 8-bit dtypes.
    return torch.cat([piece.view(torch.uint8) for piece in pieces]).view(pieces[0].dtype)


def _torchao(name: str) -> Any:
    try:
        from torchao.prototype import mx_formats
    except ImportError as error:
        raise ImportError("Experts in 4 bits need torchao. Install it: pip install torchao") from error
    return getattr(mx_formats, name)


def _quantise_nvfp4(stack: Tensor) -> tuple[Tensor, ...]:
    module = _torchao("nvfp4_tensor")
    largest = stack.abs().amax(dim=(1, 2), keepdim=True).float()
    factors = module.per_tensor_amax_to_scale(torch.where(largest == 0, 1.0, largest))  # zeros would be divided by zero
    made = module.NVFP4Tensor.to_nvfp4(stack, per_tensor_scale=factors)
    return made.qdata, made.scale, factors


def _quantise_mxfp4(stack: Tensor) -> tuple[Tensor, ...]:
    made = _torchao("mx_tensor").MXTensor.to_mx(stack, torch.float4_e2m1fn_x2, 32)
    return made.qdata, made.scale
