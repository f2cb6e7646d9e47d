"""A module becomes an ordered list of layers: what moves as one, what stays, where each parameter sits.

The tree is walked from the root. Repeated blocks are layers, large modules beside them (embeddings, heads) are layers
of their own, and what is left over stays on the device while it is small. Inside a block the experts of a
mixture-of-experts are layers of their own, and of an embedding as large as a block only the rows that are looked up
travel. Cutting at another place never changes a result (weights come by demand wherever they are read), it only costs time.
"""

from __future__ import annotations

import difflib
import math
import re
import statistics
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from sp_lightning.device.torch_private import FakeTensor, is_compiled, is_traceable_wrapper_subclass
from sp_lightning.model.wrapped import parts

LayerChoice = str | type[nn.Module] | Sequence[str | type[nn.Module]] | Callable[[nn.Module], Iterable[Any]] | None
"""What ``layers=`` takes: names or glob patterns, module classes, a callable, or None (found)."""

_Thing = TypeVar("_Thing")

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
# These read their children's weights without calling the children.
_UNDIVIDED = (nn.MultiheadAttention, nn.RNNBase, torch.jit.ScriptModule)
# Autocast casts their weights and biases wherever they are called. A subclass may do anything with them.
_LOWERED = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
# These read the weights of such children, past their calls.
_READING = (nn.MultiheadAttention, nn.TransformerEncoderLayer)
# A unit that is not one of several like blocks is cut further while it holds more than this share of the model.
_LARGE_SHARE = 1 / 4
# Small units stay on the device: together at most this share of the model, each at most a tenth of the largest.
_RESIDENT_SHARE = 1 / 50
_RESIDENT_SIZE = 1 / 10
# Of fewer bare modules there are no two groups.
_FEW = 4


class Place(NamedTuple):
    """Where a parameter sits: ``module._parameters[attribute]``."""

    module: nn.Module
    attribute: str


@dataclass(frozen=True)
class Layer:
    """Parameters that move as one, in the order in which they lie in memory.

    Attributes:
        name: of the module, or of the parameter where it belongs to no layer's module.
        parameters: qualified name and host parameter; one that several layers share belongs to the first.
        lowered: those, beside ``parameters``, that travel as their casts.
    """

    name: str
    parameters: tuple[tuple[str, nn.Parameter], ...]
    lowered: tuple[tuple[str, nn.Parameter], ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of the parameters, without alignment."""
        return sum(_nbytes(parameter) for _, parameter in (*self.parameters, *self.lowered))


class Parted(NamedTuple):
    """Two frozen parameters over one memory: a flow's permutation and its transpose, say.

    Attributes:
        names: of both.
        parameters: both, or what they consist of.
    """

    names: tuple[str, str]
    parameters: tuple[Tensor, Tensor]

    def refuse_trained(self) -> None:
        """Their values stay alike only while nobody writes one of them.

        Raises:
            ValueError: one of them is trained.
        """
        if any(each.requires_grad for each in self.parameters):
            first, second = self.names
            raise ValueError(
                f"Parameters {first!r} and {second!r} are two Parameter objects over the same memory. Moving them would "
                f"part them silently. Tie them by sharing one object (module_b.weight = module_a.weight), give one of them "
                f"a copy (module_b.weight.data = module_b.weight.data.clone()), or freeze both."
            )


@dataclass(frozen=True)
class Found:
    """What :func:`find_layers` found in a module.

    Attributes:
        layers: in the order of the module tree.
        residents: the parameters that stay on the device during a batch.
        visits: module → indices of the layers that its forward uses (its own, and those that own a tied parameter);
            modules above and beside the layers have none.
        places: parameter → everywhere it sits in the tree.
        aside: modules that keep their parameters to themselves (ScriptModules, tensor subclasses that are to be
            resident): moved whole.
        wrapped: parameters that consist of several plain tensors, which the layers have in their place.
        notes: what the plan should say about this model.
        autocast: dtype of the casts.
        tables: embeddings of which only the rows travel that are looked up, each one parameter.
        experts: indices of the layers that are used only when something is routed to them.
        units: name → module, layers and what stays on the device, in the order of the module tree.
        parted: frozen parameters over one memory, which get a copy each.
        ungrouped: where all layers are bare modules, which save nothing but what they are given: what to group, and how.
    """

    layers: tuple[Layer, ...]
    residents: Layer
    visits: dict[nn.Module, tuple[int, ...]]
    places: dict[nn.Parameter, tuple[Place, ...]]
    aside: tuple[tuple[str, nn.Module], ...]
    notes: tuple[str, ...] = ()
    autocast: torch.dtype | None = None
    wrapped: tuple[nn.Parameter, ...] = ()
    tables: tuple[Layer, ...] = ()
    experts: frozenset[int] = frozenset()
    units: Mapping[str, nn.Module] = field(default_factory=dict)
    parted: tuple[Parted, ...] = ()
    ungrouped: str = ""

    @property
    def plain_bytes(self) -> tuple[int, int]:
        """What is on the device where nothing streams: of weights, and of the gradients of those that are trained."""
        trained = [p for p in self.places if p.requires_grad]
        return sum(map(_nbytes, self.places)), sum(map(_nbytes, trained))

    @property
    def masters(self) -> tuple[Layer, ...]:
        """The float32 parameters of every layer that has casts, as further layers that come on demand."""
        return tuple(Layer(layer.name, layer.lowered) for layer in self.layers if layer.lowered)


@dataclass
class _Unit:
    """A candidate: a whole module, or one parameter that sits directly in a module that was cut."""

    name: str
    module: nn.Module | None
    parameters: list[tuple[str, nn.Parameter]]
    chosen: bool = False
    expert: bool = False
    within: bool = False  # another unit, which is around it

    @property
    def nbytes(self) -> int:
        return sum(_nbytes(parameter) for _, parameter in self.parameters)


@dataclass
class _Walk:
    """What is known while the tree is walked."""

    total: int
    chosen: set[nn.Module]
    aside: dict[nn.Module, str]
    whole_blocks: bool
    owned: set[nn.Parameter] = field(default_factory=set)
    seen: set[nn.Module] = field(default_factory=set)
    above: list[nn.Module] = field(default_factory=list)
    grouped: set[nn.Module] = field(default_factory=set)


def find_layers(
    module: nn.Module,
    *,
    layers: LayerChoice = None,
    resident: Sequence[str] = (),
    autocast: torch.dtype | None = None,
    whole_blocks: bool = False,
) -> Found:
    """Find the layers of any module.

    Args:
        module: the root, on any device but ``meta``; it is not changed.
        layers: names or glob patterns (``*`` within one name, ``**`` across), module classes, or a callable that
            returns names or modules; None finds them.
        resident: names or glob patterns of modules or parameters that are to stay on the device.
        autocast: the dtype that steps run autocast with, if they do.
        whole_blocks: whether blocks move with their experts, as a second forward of a block in backward needs them.

    Raises:
        ValueError: a pattern that matches nothing, overlapping layers, parameters without memory of their own.
    """
    names = {child: name for name, child in reversed(list(module.named_modules()))}
    _check_values(module)
    chosen = _chosen(module, layers, names)
    kept = _resident(module, resident)
    aside = _aside(module, kept)
    conflict = next((child for child in chosen if _all_in(child, kept)), None)
    if conflict is not None:
        raise ValueError(
            f"Overlapping layers: {names[conflict]!r} is chosen by layers= and by resident=. "
            f"Remove it from one of the two."
        )
    parted = _check_memory(module, aside)
    walk = _Walk(sum(_nbytes(p) for p in module.parameters()), chosen, aside, whole_blocks)
    units = list(_units(module, names[module], walk))
    places = _places(module, aside)
    lowered = set() if autocast is None else _lowered(module, places)

    stay = _small(units) | {id(unit) for unit in units if _all_of(unit, kept)}
    residents = _plain(named for unit in units for named in unit.parameters if id(unit) in stay or named[1] in kept)
    moving = [unit for unit in units if id(unit) not in stay and any(p not in kept for _, p in unit.parameters)]
    looked_up = _looked_up(moving, places)
    tables = tuple(_layer(unit, kept, lowered) for unit in moving if id(unit) in looked_up)
    streamed = [unit for unit in moving if id(unit) not in looked_up]
    found = tuple(_layer(unit, kept, lowered) for unit in streamed)
    return Found(
        layers=found,
        residents=Layer("residents", residents),
        visits=_all_visits(walk, units, streamed, kept),
        places=places,
        aside=tuple((name, each) for each, name in aside.items()),
        notes=_notes(walk, units, (*found, *tables)),
        autocast=autocast,
        wrapped=tuple(p for p in places if is_traceable_wrapper_subclass(p)),
        tables=tables,
        experts=frozenset(index for index, unit in enumerate(streamed) if unit.expert),
        units={unit.name: unit.module for unit in units if unit.module is not None and not unit.within},
        parted=parted,
        ungrouped=_ungrouped(streamed, {each: names[each] for each in walk.above}),
    )


def _layer(unit: _Unit, kept: set[nn.Parameter], lowered: set[nn.Parameter]) -> Layer:
    parameters = [named for named in unit.parameters if named[1] not in kept]
    return Layer(
        unit.name,
        _plain(named for named in parameters if named[1] not in lowered),
        tuple(named for named in parameters if named[1] in lowered),
    )


def _all_visits(
    walk: _Walk, units: list[_Unit], streamed: list[_Unit], kept: set[nn.Parameter]
) -> dict[nn.Module, tuple[int, ...]]:
    owner = {p: index for index, unit in enumerate(streamed) for _, p in unit.parameters if p not in kept}
    experts = {index for index, unit in enumerate(streamed) if unit.expert}
    visits: dict[nn.Module, tuple[int, ...]] = dict.fromkeys(walk.above, ())
    for unit in units:
        if unit.module is not None:
            visits[unit.module] = _visits(unit.module, owner, () if unit.expert else experts)
    return visits


def _units(module: nn.Module, name: str, walk: _Walk, *, block: bool = False, expert: bool = False) -> Iterator[_Unit]:
    if module in walk.seen:
        return
    walk.seen.add(module)
    if module in walk.aside or not any(True for _ in module.parameters()):
        return
    if module in walk.chosen or not _is_cut(module, walk, block=block):
        chosen = module in walk.chosen
        experts = [] if chosen or is_compiled(module) or walk.whole_blocks else [*_experts(module, name)]
        if experts and any(map(_uses_scripts, module.modules())):  # they read memory without asking: all is to be there
            experts = []
        within = [_Unit(key, each, _own(each, key, walk), expert=True, within=True) for key, each in experts]
        yield _Unit(name, module, _own(module, name, walk), chosen, expert)
        yield from within
        return
    walk.above.append(module)
    for key, parameter in module.named_parameters(recurse=False):
        if parameter not in walk.owned:
            walk.owned.add(parameter)
            full = _join(name, key)
            yield _Unit(full, None, [(full, parameter)])
    repeated, routed = _is_repeated(module), _are_experts(name, module)
    walk.grouped.update(_groups(module))
    for key, child in module.named_children():
        yield from _units(child, _join(name, key), walk, block=repeated, expert=routed)


def _is_cut(module: nn.Module, walk: _Walk, *, block: bool) -> bool:
    if is_compiled(module):
        return False
    if any(child in walk.chosen for child in module.modules()):
        return True
    if isinstance(module, _UNDIVIDED) or not _composite(module):
        return False
    if not walk.above or (type(module) in _CONTAINERS and module not in walk.grouped):  # the root is no layer, either
        return True
    large = sum(_nbytes(p) for p in module.parameters()) > _LARGE_SHARE * walk.total
    if _blocks_in(module):
        return large or not block
    return large and not block


def refuse_cuda_graphs(module: nn.Module) -> None:
    """CUDA graphs are recorded for weights at one address; torch would record anew for each slot that a layer comes to.

    Raises:
        ValueError: a module with weights is compiled so.
    """
    for name, each in module.named_modules():
        own = [value for value in vars(each).values() if isinstance(value, (FunctionType, MethodType))]
        for compiled in (each, *own) if any(True for _ in each.parameters()) else ():
            config = getattr(compiled, "get_compiler_config", None)  # of modules and functions that are compiled
            if config is not None and (config() or {}).get("triton.cudagraphs"):
                raise ValueError(
                    f"{name or type(each).__name__!r} is compiled with CUDA graphs, as by torch.compile(mode="
                    '"reduce-overhead") or (mode="max-autotune"): they hold the addresses of weights, and streamed weights '
                    'change theirs. Compile it without them: torch.compile(mode="max-autotune-no-cudagraphs"), or no mode.'
                )


def _composite(module: nn.Module) -> bool:
    return any(True for child in module.children() for _ in child.parameters())


def _is_repeated(module: nn.Module) -> bool:
    """A container with at least two like blocks that have parts of their own, or a list of a single one."""
    if not isinstance(module, _CONTAINERS):
        return False
    if type(module) is nn.ModuleList and len(module) == 1:
        return _composite(module[0])
    kinds = Counter(type(child) for child in module.children() if _composite(child))
    shapes = Counter(tuple(p.shape for p in group.parameters()) for group in _groups(module))
    return (
        any(count >= 2 for kind, count in kinds.items() if kind not in _CONTAINERS)
        or max(shapes.values(), default=0) > 1
    )


def _groups(module: nn.Module) -> list[nn.Module]:
    """The blocks that somebody has put together by hand: ``nn.Sequential`` of bare modules, side by side in a container.

    Beside a stage, which has blocks, such a thing is no block of its own, but what leads from one stage to the next.
    """
    if not isinstance(module, _CONTAINERS):
        return []
    sequences: list[nn.Module] = [
        child for child in module.children() if type(child) is nn.Sequential and _composite(child)
    ]
    bare = [child for child in sequences if _is_bare(child)]
    groups = [child for child in bare if sum(bool(each._parameters) for each in child.modules()) > 1]
    return groups if len(groups) > 1 and len(bare) == len(sequences) else []


def _is_bare(sequence: nn.Module) -> bool:
    """Whether it consists of modules without parts, and of no blocks."""
    within = [*sequence.modules()]
    leaves = all(type(each) is nn.Sequential or next(each.children(), None) is None for each in within)
    return leaves and not any(map(_groups, within))


def _experts(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    """The experts inside a block that are modules of their own, but for those inside one graph."""
    for key, child in module.named_children():
        full = _join(name, key)
        if is_compiled(child):
            continue
        if not _are_experts(key, child):
            yield from _experts(child, full)
            continue
        for inner, expert in child.named_children():
            if any(True for _ in expert.parameters()):
                yield _join(full, inner), expert


def _are_experts(name: str, module: nn.Module) -> bool:
    """A list of modules of which a router decides which are called; the name alone says so."""
    return (
        isinstance(module, (nn.ModuleList, nn.ModuleDict)) and "expert" in name.rpartition(".")[2] and len(module) > 1
    )


def _own(module: nn.Module, name: str, walk: _Walk) -> list[tuple[str, nn.Parameter]]:
    apart = {p for child in module.modules() if child in walk.aside for p in child.parameters()}
    own = [(_join(name, key), p) for key, p in module.named_parameters() if p not in walk.owned and p not in apart]
    walk.owned.update(p for _, p in own)
    walk.seen.update(module.modules())
    return own


def _small(units: list[_Unit]) -> set[int]:
    total = sum(unit.nbytes for unit in units)
    largest = max((unit.nbytes for unit in units), default=0)
    small: set[int] = set()
    held = 0
    for unit in sorted(units, key=lambda each: each.nbytes):
        held += unit.nbytes
        if held > _RESIDENT_SHARE * total or unit.nbytes > _RESIDENT_SIZE * largest:
            break
        if not unit.chosen:
            small.add(id(unit))
    return small


def _looked_up(units: list[_Unit], places: dict[nn.Parameter, tuple[Place, ...]]) -> set[int]:
    """The embeddings that are as large as the layers in the middle, and that nothing but their own calls uses."""
    if not units:
        return set()
    middle = statistics.median(unit.nbytes for unit in units)
    return {id(unit) for unit in units if not unit.chosen and unit.nbytes >= middle and _is_table(unit, places)}


def _is_table(unit: _Unit, places: dict[nn.Parameter, tuple[Place, ...]]) -> bool:
    """A forward of somebody's own may read the weight in any way."""
    if not isinstance(unit.module, nn.Embedding) or len(unit.parameters) != 1:
        return False
    if type(unit.module).forward is not nn.Embedding.forward or "forward" in vars(unit.module):
        return False
    (_, weight) = unit.parameters[0]
    return places[weight] == (Place(unit.module, "weight"),) and unit.module.max_norm is None


def _visits(module: nn.Module, owner: dict[nn.Parameter, int], apart: Collection[int]) -> tuple[int, ...]:
    """The layers that a module's call uses, but for those that come when they are called themselves."""
    return tuple(sorted({owner[p] for p in module.parameters() if p in owner} - {*apart}))


def _places(module: nn.Module, aside: dict[nn.Module, str]) -> dict[nn.Parameter, tuple[Place, ...]]:
    apart = {child for each in aside for child in each.modules()}
    places: dict[nn.Parameter, tuple[Place, ...]] = {}
    for child in module.modules():
        if child in apart:
            continue
        for key, parameter in child._parameters.items():
            if parameter is not None:
                places[parameter] = (*places.get(parameter, ()), Place(child, key))
    return places


def _lowered(module: nn.Module, places: dict[nn.Parameter, tuple[Place, ...]]) -> set[nn.Parameter]:
    """The float32 parameters that nothing but their modules' own calls is known to read."""
    whole = [
        each for each in module.modules() if isinstance(each, _READING) or is_compiled(each) or _uses_scripts(each)
    ]
    apart = {child for each in whole for child in each.modules()}
    return {
        parameter
        for parameter, where in places.items()
        if (type(parameter) is nn.Parameter or _is_on_paper(parameter))
        and parameter.dtype is torch.float32
        and all(type(child) in _LOWERED and child not in apart for child, _ in where)
    }


def _uses_scripts(module: nn.Module) -> bool:
    """Whether its code names a TorchScript function: those read the memory of what they are given without asking."""
    kind: Any = type(module)
    return _class_uses_scripts(kind) or any(isinstance(v, torch.jit.ScriptFunction) for v in vars(module).values())


@cache
def _class_uses_scripts(kind: Any) -> bool:
    for each in kind.__mro__:
        for value in vars(each).values():
            code, known = getattr(value, "__code__", None), getattr(value, "__globals__", {})
            names = [*_names(code)] if code is not None else []
            named = [value, *(known.get(name) for name in names)]
            named += [vars(each).get(name) for each in named if isinstance(each, ModuleType) for name in names]
            if any(isinstance(each, torch.jit.ScriptFunction) for each in named):
                return True
    return False


def _plain(parameters: Iterable[tuple[str, nn.Parameter]]) -> tuple[tuple[str, nn.Parameter], ...]:
    """Parameters, and in place of wrapped ones the plain tensors that they consist of."""
    return tuple(part for name, parameter in parameters for part in parts(name, parameter))


def _names(code: CodeType) -> Iterator[str]:
    """What a function names, in the functions and comprehensions inside it, too."""
    yield from code.co_names
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from _names(each)


def _aside(module: nn.Module, kept: set[nn.Parameter]) -> dict[nn.Module, str]:
    """ScriptModules take no hooks and no swapped parameters; some tensor subclasses have memory of their own kind.

    Raises:
        ValueError: such a subclass, unless it is to be resident.
    """
    aside: dict[nn.Module, str] = {}
    inside: set[nn.Module] = set()
    for name, child in module.named_modules():
        if child in inside:
            continue
        script = isinstance(child, torch.jit.ScriptModule)
        foreign = {key: p for key, p in child._parameters.items() if p is not None and _is_foreign(p)}
        for key, parameter in foreign.items():
            if not script and parameter not in kept:
                kind, full = type(parameter).__name__, _join(name, key)
                raise ValueError(
                    f"Parameter {full!r} is of class {kind}, a tensor subclass that cannot be streamed: expected one that "
                    f"consists of plain tensors (__tensor_flatten__) and is frozen. "
                    f"{_refused(parameter)} Or keep it on the device: SuperpipelineStrategy(resident=[{full!r}])."
                )
        if script or foreign:
            aside[child] = name
            inside.update(child.modules())
    return aside


def _is_foreign(parameter: nn.Parameter) -> bool:
    """Whether it has memory of its own kind: neither plain, nor made of plain tensors that nobody trains."""
    if type(parameter).__torch_dispatch__ is Tensor.__torch_dispatch__ or _is_on_paper(parameter):
        return False
    return _refused(parameter) != ""


def _refused(parameter: nn.Parameter) -> str:
    """Why a tensor subclass cannot be streamed, and what to do; empty if it can."""
    if not is_traceable_wrapper_subclass(parameter):
        return "Exchange it for a plain parameter."
    if parameter.requires_grad:
        return "Freeze it (requires_grad_(False)) and train adapters."
    if any(type(part) is not Tensor or part.layout is not torch.strided for _, part in parts("", parameter)):
        return "Exchange it for a plain parameter."
    return ""


def _is_on_paper(parameter: nn.Parameter) -> bool:
    """Whether it has no memory, because all is but estimated (``estimate``)."""
    return isinstance(parameter, FakeTensor)


def _check_values(module: nn.Module) -> None:
    for name, parameter in module.named_parameters():
        if nn.parameter.is_lazy(parameter):
            raise ValueError(
                f"Parameter {name!r} has no shape yet (a lazy module). Run one batch through the module before "
                "fit, or give the module its sizes."
            )
        if parameter.is_meta:
            raise ValueError(
                f"Parameter {name!r} is on the meta device and has no values. Load them first: "
                "module.to_empty(device='cpu') and load_state_dict, or build the module without the meta device."
            )


def _check_memory(module: nn.Module, aside: dict[nn.Module, str]) -> tuple[Parted, ...]:
    """Which parameters lie over one memory; those that are trained may not."""
    apart = {p for each in aside for p in each.parameters()}
    spans: list[tuple[int, int, str, Tensor]] = []
    for name, parameter in module.named_parameters():
        if parameter in apart:
            continue
        if parameter.layout is not torch.strided:
            raise ValueError(
                f"Parameter {name!r} has layout {parameter.layout}; only strided (dense) parameters can be streamed. "
                f"Make it dense: parameter.to_dense()."
            )
        for part_name, part in parts(name, parameter):
            if part.numel() and not _is_on_paper(part):
                start = part.data_ptr()
                spans.append((start, start + _extent(part), part_name, part))
    spans.sort(key=lambda span: span[:3])
    found = []
    last = (0, 0, "", Tensor())  # the one that reaches farthest so far
    for span in spans:
        if span[0] < last[1]:
            found.append(Parted((last[2], span[2]), (last[3], span[3])))
            found[-1].refuse_trained()
        last = max(last, span, key=lambda each: each[1])
    return tuple(found)


def _extent(tensor: Tensor) -> int:
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


def _chosen(module: nn.Module, layers: LayerChoice, names: dict[nn.Module, str]) -> set[nn.Module]:
    if layers is None:
        return set()
    chosen: dict[nn.Module, None] = {}
    if isinstance(layers, (str, type)):
        picks: Any = (layers,)
    else:
        picks = layers(module) if callable(layers) else layers
    if isinstance(picks, str) or not isinstance(picks, Iterable):
        raise TypeError(
            f"The callable given as layers= returned {type(picks).__name__}; expected a list of names or modules, "
            f"for example: lambda module: list(module.model.layers)."
        )
    for pick in picks:
        if isinstance(pick, nn.Module):
            if pick not in names:
                raise ValueError(f"layers= returned a {type(pick).__name__} that is not part of the module.")
            matches = [pick]
        elif isinstance(pick, type):
            matches = [child for child in names if isinstance(child, pick)]
            if not matches:
                kinds = sorted({type(child).__name__ for child in names if _composite(child)})
                raise ValueError(
                    f"layers= names the class {pick.__name__}, which the module has none of. It has: {kinds}."
                )
        else:
            matches = matching(module, pick, "layers", dict(module.named_modules()))
        chosen.update(dict.fromkeys(child for child in matches if any(True for _ in child.parameters())))
    for outer in chosen:
        for inner in outer.modules():
            if inner is not outer and inner in chosen:
                raise ValueError(
                    f"Overlapping layers: {names[inner]!r} is inside {names[outer]!r}, and layers= chose both. "
                    f"Choose one, for example layers=[{names[outer]!r}]."
                )
    return set(chosen)


def _resident(module: nn.Module, patterns: Sequence[str]) -> set[nn.Parameter]:
    parameters = dict(module.named_parameters(remove_duplicate=False))
    things: dict[str, nn.Module | nn.Parameter] = {**dict(module.named_modules(remove_duplicate=False)), **parameters}
    kept: set[nn.Parameter] = set()
    for pattern in patterns:
        for thing in matching(module, pattern, "resident", things):
            kept.update(thing.parameters() if isinstance(thing, nn.Module) else [thing])
    return kept


def matching(module: nn.Module, pattern: str, option: str, things: Mapping[str, _Thing]) -> list[_Thing]:
    """The things whose dotted names match a glob pattern.

    Raises:
        ValueError: there are none; the option is named, and what might have been meant.
    """
    expression = re.compile(_glob(pattern))
    matches = [thing for name, thing in things.items() if name and expression.fullmatch(name)]
    if matches:
        return matches
    sizes = {name: sum(map(_nbytes, child.parameters())) for name, child in module.named_modules() if name}
    largest = sorted(sizes, key=lambda name: sizes[name], reverse=True)[:5]
    close = difflib.get_close_matches(pattern, [name for name in things if name], n=3, cutoff=0.4)
    raise ValueError(
        f"{option}={pattern!r} matches nothing in {type(module).__name__}. "
        f"Closest names: {close or 'none'}. Largest modules: {largest}. "
        f"'*' stands for one part of a dotted name, '**' for any number of parts."
    )


def _glob(pattern: str) -> str:
    out = []
    for part in re.split(r"(\*\*|\*|\?)", pattern):
        out.append({"**": ".*", "*": "[^.]*", "?": "[^.]"}.get(part, re.escape(part)))
    return "".join(out)


def _blocks_in(module: nn.Module) -> bool:
    return any(_is_repeated(child) and not _are_experts(name, child) for name, child in module.named_modules())


def _notes(walk: _Walk, units: list[_Unit], streaming: Iterable[Layer]) -> tuple[str, ...]:
    notes = []
    for module, name in walk.aside.items():
        script = isinstance(module, torch.jit.ScriptModule)
        why = "is a ScriptModule" if script else "has parameters of a class that cannot be streamed"
        notes.append(f"{name!r} {why}: it stays on the device whole.")
    modules = [(unit.name, unit.module) for unit in units if unit.module is not None]
    compiled = [name for name, each in modules if is_compiled(each) and _blocks_in(each)]
    notes += [f"{name!r} is compiled as a whole and moves as one. Compile its layers instead." for name in compiled]
    experts = sum(unit.expert for unit in units)
    if experts:
        notes.append(f"{experts} experts are layers of their own: each comes only when something is routed to it.")
    stacked = [name for name, each in modules if any(map(_holds_stacked_experts, each.named_modules()))]
    if stacked:
        notes.append(f"experts are one stacked parameter in {len(stacked)} layers, which move whole: {stacked[0]!r} …")
    kinds = {type(p).__name__ for unit in units for _, p in unit.parameters if is_traceable_wrapper_subclass(p)}
    notes += [f"parameters of class {kind} travel as their packed bytes." for kind in sorted(kinds)]
    streamed = sum(layer.nbytes for layer in streaming)
    if walk.total and streamed < 0.95 * walk.total:
        notes.append(f"only {streamed / walk.total:.0%} of the parameter bytes are streamed; the rest is resident.")
    return tuple(notes)


def _ungrouped(streamed: Sequence[_Unit], above: Mapping[nn.Module, str]) -> str:
    """What to put together, where no layer has parts: then autograd saves most between the layers, not in them."""
    bare = {unit.module for unit in streamed}
    if len(bare) < _FEW or any(each is None or next(each.children(), None) is not None for each in bare):
        return ""
    flat = [each for each in above if type(each) is nn.Sequential and len(bare.intersection(each.children())) >= _FEW]
    said = f"all {len(bare)} layers are bare modules, between which most of what backward needs is saved. "
    if not flat:
        return f"{said}Group every few of them, with what is computed between them, in a module: such modules become the layers."
    longest = max(flat, key=lambda each: len(bare.intersection(each.children())))
    name, length = above[longest], len([*longest.children()])
    step = -(-length // max(2, math.isqrt(len(bare.intersection(longest.children())))))
    path = _join("model", name)
    return (
        f"{said}Group them: {path} = nn.Sequential(*({path}[i : i + {step}] for i in range(0, {length}, {step}))), and name "
        f'the groups: SuperpipelineStrategy(layers=["{_join(name, "*")}"], activations="recompute").'
    )


def _holds_stacked_experts(named: tuple[str, nn.Module]) -> bool:
    name, module = named
    return "expert" in name.rpartition(".")[2] and any(p.dim() >= 3 for p in module.parameters(recurse=False))


def _all_of(unit: _Unit, kept: set[nn.Parameter]) -> bool:
    return bool(unit.parameters) and all(parameter in kept for _, parameter in unit.parameters)


def _all_in(module: nn.Module, kept: set[nn.Parameter]) -> bool:
    return all(parameter in kept for parameter in module.parameters())


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


def _nbytes(tensor: Tensor) -> int:
    return sum(part.numel() * part.element_size() for _, part in parts("", tensor))
