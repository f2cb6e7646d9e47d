"""Divides a module into an ordered list of layers.

The search divides the module tree into units, from the root down. Most units become layers: repeated blocks, and other large
modules such as embeddings and heads. Small units stay on the device (residents). Each expert in a block is a separate layer. A
:class:`~sp_lightning.core.model.rows.RowFinder` decides which layers are uploaded by rows.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from sp_lightning.core.model.blocks import (
    CONTAINERS,
    are_experts,
    experts_in,
    groups_in,
    has_blocks,
    has_parts,
    is_repeated,
    not_shared,
    uses_torchscript,
)
from sp_lightning.core.model.checks import (
    advice_to_divide,
    advice_to_group,
    modules_moved_whole,
    notes_on,
    overlapping_pairs,
    refuse_inference_weights,
    tunes_products,
)
from sp_lightning.core.model.found import (
    Found,
    Layer,
    NamedParameter,
    Place,
    Unit,
    buffers_in,
    is_stack,
    join_names,
    tensor_bytes,
)
from sp_lightning.core.model.patterns import LayerChoice, chosen_layers, chosen_residents
from sp_lightning.core.model.rows import RowFinder, row_finder
from sp_lightning.core.model.uneven import UnevenBlocks
from sp_lightning.core.model.without_values import refuse_without_values
from sp_lightning.core.model.wrapped import parts
from sp_lightning.core.torch_compat.private import FakeTensor, is_compiled, is_traceable_wrapper_subclass

# Small units stay on the device. Three rules limit them:
# - One unit has at most 1/10 of the bytes of the largest unit.
# - All small units together have at most 1/50 of the model's bytes, and at most the bytes of the largest unit. Even the smallest
#   window has two slots of the size of the largest unit, so small units take at most half of the memory of slots.
# - Units of the same size and class are treated alike: all of them stay, or all of them are streamed.
_RESIDENT_SHARE = 1 / 50
_RESIDENT_SIZE = 1 / 10

# Autocast casts the weight and the bias in every call of these classes. Exact classes are compared, because a subclass may use
# its weights in other ways.
_CAST = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
# These classes read the weights of their linear children without calling the children.
_READS_CHILDREN = (nn.MultiheadAttention, nn.TransformerEncoderLayer)

Places = dict[nn.Parameter, tuple[Place, ...]]


def find_layers(
    module: nn.Module,
    *,
    layers: LayerChoice = None,
    keep_on_gpu: Sequence[str] = (),
    autocast: torch.dtype | None = None,
    whole_blocks: bool = False,
    gpu_layers: int | float = 0,
) -> Found:
    """Finds the layers of a module.

    Args:
        module: the root, on any device except ``meta``. It is not changed.
        layers: names or glob patterns (``*`` within one name, ``**`` across names), module classes, or a callable that
            returns names or modules. None to choose the layers automatically.
        keep_on_gpu: names or glob patterns of modules or parameters that stay on the device.
        autocast: the dtype of autocast in steps; None without autocast.
        whole_blocks: True if a block and its experts are one layer, because a block that is recomputed needs all its experts.
            Modules with stacked experts are separate layers in any case.
        gpu_layers: the number of layers that stay on the device, or their share: the first ones.

    Raises:
        ValueError: a pattern matches nothing, layers overlap, or a parameter is not supported.
    """
    names = {child: name for name, child in reversed(list(module.named_modules()))}
    refuse_without_values(module)
    refuse_inference_weights(module)
    finder = row_finder()
    chosen, kept = chosen_layers(module, layers, names), chosen_residents(module, keep_on_gpu)
    whole = modules_moved_whole(module, kept)
    _refuse_both(chosen, kept, names)
    overlapping = overlapping_pairs(module, whole)
    places = _places(module, whole)
    lowered = set() if autocast is None else _lowered(module, places)
    options = {"chosen": chosen, "whole": whole, "whole_blocks": whole_blocks}
    walk, units, streamed, looked_up = _search(module, finder, places, kept, **options)
    count = gpu_layers if isinstance(gpu_layers, int) else round(gpu_layers * len(streamed))
    stay, streamed = streamed[:count], streamed[count:]
    on_gpu = {p for unit in stay for _, p in unit.parameters if p not in kept}
    places = {p: where for p, where in places.items() if p not in on_gpu}
    found, tables = (tuple(_layer(unit, kept, lowered, places) for unit in each) for each in (streamed, looked_up))
    stays = "gpu_layers keeps all layers" if stay else "all weights are"
    return Found(
        layers=found,
        residents=_residents(units, _small(units), kept),
        visits=_visits(walk.above, units, streamed, kept, finder.callers(module)),
        places=places,
        aside=tuple((name, child) for child, name in whole.items()),
        stay=tuple(Layer(unit.name, tuple(each for each in unit.parameters if each[1] in on_gpu)) for unit in stay),
        notes=(*notes_on(module, whole, units, (*found, *tables)), *finder.notes(units, found, tables)),
        autocast=autocast,
        wrapped=tuple(p for p in places if is_traceable_wrapper_subclass(p)),
        tables=tables,
        experts=frozenset(index for index, unit in enumerate(streamed) if unit.expert),
        units={unit.name: unit.module for unit in units if unit.module is not None and not unit.within},
        overlapping=overlapping,
        advice=tuple(filter(None, (finder.advice(module, streamed), advice_to_divide(module, streamed, names)))),
        grouping_advice=advice_to_group(streamed),
        buffer_bytes=sum(map(tensor_bytes, buffers_in(module))),
        nothing="" if found or tables else f"nothing is streamed: {stays} on the GPU",
    )


def _search(
    module: nn.Module, finder: RowFinder, places: Places, kept: set[nn.Parameter], **options: Any
) -> tuple[_Walk, list[Unit], list[Unit], list[Unit]]:
    """Divides the root into units, and then blocks that are much larger than the others into their parts.

    Args:
        module: the root.
        finder: finds rows.
        places: all places of each parameter.
        kept: the parameters that stay on the device.
        options: the other arguments of :class:`_Walk`.

    Returns:
        The last walk, all units, the units that are layers, and those of which only rows are uploaded.
    """
    divided: set[nn.Module] = set()
    uneven = UnevenBlocks(module)

    def searched(**changed: Any) -> tuple[_Walk, list[Unit], list[Unit], list[Unit]]:
        walk = _Walk(module, finder, **{**options, **changed}, divided=divided)
        units = [*walk.units(module, "")]
        units += finder.tables_in(_moving(units, _small(units), kept), places)
        moving = _moving(units, _small(units), kept)
        looked_up = finder.looked_up(moving, places)
        return walk, units, [unit for unit in moving if unit not in looked_up], looked_up

    if options["chosen"]:
        return searched()
    while True:
        # Blocks with experts stay whole. A search with `whole_blocks` does not find experts, but has to divide the same blocks.
        found = searched(whole_blocks=False)
        blocks = uneven.next(found[2], found[1])
        if divided.issuperset(blocks):
            return searched() if options["whole_blocks"] else found
        divided.update(blocks)


def _refuse_both(chosen: set[nn.Module], kept: set[nn.Parameter], names: Mapping[nn.Module, str]) -> None:
    """Raises a ValueError if ``keep_on_gpu=`` names all parameters of a module that ``layers=`` chose."""
    conflict = next((child for child in chosen if all(p in kept for p in child.parameters())), None)
    if conflict is not None:
        raise ValueError(
            f"Overlapping layers: {names[conflict]!r} is chosen by layers= and by keep_on_gpu=. "
            f"Remove it from one of the two."
        )


def _places(module: nn.Module, whole: Iterable[nn.Module]) -> Places:
    """Returns all places of each parameter, except those in modules that are moved whole."""
    excluded = {inner for child in whole for inner in child.modules()}
    places: Places = {}
    for child in module.modules():
        for key, parameter in child._parameters.items() if child not in excluded else ():
            if parameter is not None:
                places[parameter] = (*places.get(parameter, ()), Place(child, key))
    return places


def _lowered(module: nn.Module, places: Places) -> set[nn.Parameter]:
    """Returns the float32 parameters that can be uploaded as casts: only calls of their own modules read them.

    In compiled modules these are weights, and not biases (see ``weights/compiled_calls.py``).
    """
    reading = [
        child
        for child in module.modules()
        if isinstance(child, _READS_CHILDREN) or uses_torchscript(child) or tunes_products(child)
    ]
    excluded = {inner for child in reading for inner in child.modules()}
    compiled = {inner for child in module.modules() if is_compiled(child) for inner in child.modules()}
    return {
        parameter
        for parameter, where in places.items()
        # A role (`weights.roles`) that a parameter has from a former engine has the user's class as an attribute.
        if (getattr(type(parameter), "users", type(parameter)) is nn.Parameter or isinstance(parameter, FakeTensor))
        and parameter.dtype is torch.float32
        and all(type(child) in _CAST and child not in excluded for child, _ in where)
        and all(child not in compiled or key == "weight" for child, key in where)
    }


def _small(units: Sequence[Unit]) -> set[Unit]:
    """Returns the units that stay on the device because they are small. Units that ``layers=`` chose are always streamed."""
    sizes = {unit: unit.nbytes for unit in units}
    largest = max(sizes.values(), default=0)
    room = min(_RESIDENT_SHARE * sum(sizes.values()), largest)
    equal: dict[tuple[int, object], list[Unit]] = defaultdict(list)
    for unit, nbytes in sizes.items():
        equal[nbytes, unit.name if unit.module is None else type(unit.module)].append(unit)
    small: set[Unit] = set()
    for (nbytes, _), alike in sorted(equal.items(), key=lambda each: each[0][0]):
        room -= nbytes * len(alike)
        if room < 0 or nbytes > _RESIDENT_SIZE * largest:
            break
        small.update(unit for unit in alike if not unit.chosen)
    return small


def _moving(units: Iterable[Unit], small: set[Unit], kept: set[nn.Parameter]) -> list[Unit]:
    """Returns the units that are uploaded: those with a parameter that does not stay on the device."""
    return [unit for unit in units if unit not in small and any(p not in kept for _, p in unit.parameters)]


def _residents(units: Iterable[Unit], small: set[Unit], kept: set[nn.Parameter]) -> Layer:
    """Returns the layer of all residents: small units, and the parameters that ``keep_on_gpu=`` chose."""
    named = (named for unit in units for named in unit.parameters if unit in small or named[1] in kept)
    return Layer("residents", _plain(named))


def _layer(unit: Unit, kept: set[nn.Parameter], lowered: set[nn.Parameter], places: Places) -> Layer:
    """Makes the layer of a unit.

    Args:
        unit: the unit.
        kept: the parameters that stay on the device. The layer does not contain them.
        lowered: the parameters that are uploaded as casts.
        places: all places of each parameter.
    """
    parameters = [named for named in unit.parameters if named[1] not in kept]
    return Layer(
        unit.name,
        _plain(named for named in parameters if named[1] not in lowered),
        tuple(named for named in parameters if named[1] in lowered),
        unit.rows if _is_uploaded_by_rows(unit, kept | lowered, places) else 0,
    )


def _is_uploaded_by_rows(unit: Unit, special: set[nn.Parameter], places: Places) -> bool:
    """Returns True if single experts of a unit can be uploaded.

    This requires that only the unit's own module holds the stacks, because another module could read any row of a stack.

    Args:
        unit: the unit.
        special: the parameters that stay on the device or are uploaded as casts. The unit must not have such a parameter.
        places: all places of each parameter.
    """
    own = all(place.module is unit.module for _, p in unit.parameters if is_stack(p, unit.rows) for place in places[p])
    return own and all(parameter not in special for _, parameter in unit.parameters)


def _plain(parameters: Iterable[NamedParameter]) -> tuple[NamedParameter, ...]:
    """Replaces each wrapped parameter by its plain tensors."""
    return tuple(part for name, parameter in parameters for part in parts(name, parameter))


def _visits(
    above: Iterable[nn.Module],
    units: Iterable[Unit],
    streamed: Sequence[Unit],
    kept: set[nn.Parameter],
    callers: Mapping[nn.Module, nn.Module],
) -> dict[nn.Module, tuple[int, ...]]:
    """Returns for each module the indices of the layers that its call uses.

    A call of a block does not use the layers of its experts: they are uploaded when the experts are called.

    Args:
        above: the modules that were divided into units.
        units: all units.
        streamed: the units that are layers, in the order of the layers.
        kept: the parameters that stay on the device.
        callers: the outer modules for whose calls layers are uploaded (:meth:`~sp_lightning.core.model.rows.RowFinder.callers`).
    """
    owner = {p: index for index, unit in enumerate(streamed) for _, p in unit.parameters if p not in kept}
    experts = {index for index, unit in enumerate(streamed) if unit.expert}
    visits: dict[nn.Module, tuple[int, ...]] = {}
    for module in above:  # attention reads its children's weights without calling the children
        reads = isinstance(module, nn.MultiheadAttention)
        visits[module] = tuple(sorted({owner[p] for p in module.parameters() if p in owner})) if reads else ()
    for unit in units:
        if unit.module is not None:
            used = {owner[p] for p in unit.module.parameters() if p in owner}
            visits[callers.get(unit.module, unit.module)] = tuple(sorted(used if unit.expert else used - experts))
    return visits


# ---------------------------------------------------------------------- the walk through the tree

# These classes read their children's weights without calling the children, so the children cannot be separate layers.
_UNDIVIDED = (nn.MultiheadAttention, nn.RNNBase, torch.jit.ScriptModule)
# A module that is not a repeated block is divided if it has more than this share of the model's bytes.
_LARGE_SHARE = 1 / 4
# If a list of one module has more than this share of the model's bytes, that module is the network and not a block.
_ALL = 9 / 10


class _Walk:
    """One walk through a module tree.

    Args:
        module: the root.
        finder: finds stacked experts.
        chosen: the modules that ``layers=`` chose.
        whole: the modules that are moved whole. They do not become units.
        whole_blocks: as in :func:`find_layers`.
        divided: modules that are divided, whatever they are.

    Attributes:
        above: the modules that were divided, in the order of the tree.
    """

    def __init__(
        self,
        module: nn.Module,
        finder: RowFinder,
        *,
        chosen: set[nn.Module],
        whole: Mapping[nn.Module, str],
        whole_blocks: bool,
        divided: Collection[nn.Module] = (),
    ) -> None:
        self._finder = finder
        self.above: list[nn.Module] = []
        self._total = sum(map(tensor_bytes, module.parameters()))
        self._chosen = chosen
        self._whole = whole
        self._whole_blocks = whole_blocks
        self._divided = divided
        self._owned: set[nn.Parameter] = set()
        self._seen: set[nn.Module] = set()
        self._groups: set[nn.Module] = set()  # blocks that a user has grouped in nn.Sequential (`groups_in`)

    def units(self, module: nn.Module, name: str, *, is_block: bool = False, is_expert: bool = False) -> Iterator[Unit]:
        """Yields the units of a module and its submodules, in the order of the tree. A module that was seen before has none.

        Args:
            module: the module to divide.
            name: the name of the module.
            is_block: True if the module is a repeated block.
            is_expert: True if the module is in a list of experts.
        """
        if module in self._seen:
            return
        self._seen.add(module)
        if module in self._whole or not any(True for _ in module.parameters()):
            return
        if module in self._chosen or not self._is_divided(module, is_block=is_block):
            yield from self._undivided(module, name, is_expert)
            return
        self.above.append(module)
        for key, parameter in module.named_parameters(recurse=False):
            if parameter not in self._owned:
                self._owned.add(parameter)
                full = join_names(name, key)
                yield Unit(full, None, [(full, parameter)])
        blocks = not_shared(module) if is_repeated(module) and not self._is_all(module) else ()
        routed = are_experts(name, module)
        self._groups.update(groups_in(module))
        for key, child in module.named_children():
            yield from self.units(child, join_names(name, key), is_block=child in blocks, is_expert=routed)

    def _undivided(self, module: nn.Module, name: str, is_expert: bool) -> Iterator[Unit]:
        """Yields the unit of a module that is not divided, and then the units of the experts inside it.

        If the module itself holds stacked experts, its only unit is an expert.
        """
        chosen = module in self._chosen
        closed = chosen or is_compiled(module)  # one layer with all its experts, as the user or the graph requires
        experts = {} if closed else {expert: key for key, expert in experts_in(module, name, self._finder)}
        if not closed and self._finder.stacked(module):
            experts = {module: name}
        if self._whole_blocks:
            experts = {expert: key for expert, key in experts.items() if self._finder.stacked(expert)}
        if experts and any(map(uses_torchscript, module.modules())):
            experts = {}  # TorchScript reads memory without calling Python, so all weights must be on the device
        # Units of experts are made first, so that the module's unit owns only the other parameters. They are yielded last.
        within = [self._expert(expert, key, within=expert is not module) for expert, key in experts.items()]
        if module not in experts:
            yield Unit(name, module, self._own(module, name), chosen, is_expert)
        yield from within

    def _expert(self, module: nn.Module, name: str, *, within: bool) -> Unit:
        rows = self._finder.stacked(module)
        return Unit(name, module, self._own(module, name), expert=True, within=within, rows=rows)

    def _is_divided(self, module: nn.Module, *, is_block: bool) -> bool:
        """Returns True if a module is divided into units; False if it is one unit.

        The root, containers, and modules with blocks in them are divided. Other modules are divided if they have more than
        :data:`_LARGE_SHARE` of the weights. A repeated block is only divided if it has blocks in it and more than this share.
        Modules without parts and classes in :data:`_UNDIVIDED` are one unit.
        """
        if is_compiled(module):
            return False  # a compiled module is one graph: weights cannot be uploaded and evicted inside
        if module in self._divided or any(child in self._chosen for child in module.modules()):  # a layer is below it
            return True
        if isinstance(module, _UNDIVIDED) or not has_parts(module):
            return False
        is_root = not self.above
        if is_root or (type(module) in CONTAINERS and module not in self._groups):
            return True
        large = sum(map(tensor_bytes, module.parameters())) > _LARGE_SHARE * self._total
        if has_blocks(module):
            return large or not is_block
        return large and not is_block

    def _is_all(self, module: nn.Module) -> bool:
        """Returns True for a list of one module that has nearly all weights. This module is the network, and not a block."""
        return len([*module.children()]) == 1 and sum(map(tensor_bytes, module.parameters())) > _ALL * self._total

    def _own(self, module: nn.Module, name: str) -> list[NamedParameter]:
        """Returns the parameters of a module that belong to no other unit. Records that they belong to the module's unit now.

        Also records that the walk has seen the module and its submodules.
        """
        excluded = {p for child in module.modules() if child in self._whole for p in child.parameters()}
        own = [
            (join_names(name, key), parameter)
            for key, parameter in module.named_parameters()
            if parameter not in self._owned and parameter not in excluded
        ]
        self._owned.update(parameter for _, parameter in own)
        self._seen.update(module.modules())
        return own
