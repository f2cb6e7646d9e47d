"""Finds stacked experts and embeddings, and makes the rows of their layers."""

from __future__ import annotations

import logging
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from sp_lightning.capabilities.experts.embedding_rows import EmbeddingRows
from sp_lightning.capabilities.experts.expert_rows import ExpertRows
from sp_lightning.capabilities.experts.stacks import adapting_modules, own_stacks, routed_share, stacked_rows, stacks_in
from sp_lightning.core.device.device import Device
from sp_lightning.core.model.blocks import uses_torchscript
from sp_lightning.core.model.found import Found, Layer, Place, Unit, is_stack, join_names, tensor_bytes
from sp_lightning.core.model.rows import RowFinder
from sp_lightning.core.plan.units import in_gib
from sp_lightning.core.torch_compat.private import is_compiled
from sp_lightning.core.weights.layer import Kind, StreamedLayer

Places = Mapping[nn.Parameter, tuple[Place, ...]]


class ExpertsAndEmbeddings(RowFinder):
    """Finds stacked experts (``stacks``), and embeddings that only look up rows."""

    def stacked(self, module: nn.Module) -> int:
        return stacked_rows(module)

    def callers(self, root: nn.Module) -> Mapping[nn.Module, nn.Module]:
        return adapting_modules(root)

    def tables_in(self, units: Sequence[Unit], places: Places) -> list[Unit]:
        """Takes embeddings out of larger modules: out of wrappers in a list, and out of BERT's module of three embeddings.

        Such an embedding has more than half of its unit's bytes, and :meth:`looked_up` would return it.
        """
        tables = []
        for unit in units:
            if unit.module is None or unit.chosen or unit.expert or not unit.parameters:
                continue
            if any(is_compiled(child) or uses_torchscript(child) for child in unit.module.modules()):
                continue
            name, weight = max(unit.parameters, key=lambda named: tensor_bytes(named[1]))
            inner = places[weight][0].module
            table = Unit(name.rpartition(".")[0], inner, [(name, weight)], within=True)
            if (
                inner is not unit.module
                and 2 * table.nbytes > unit.nbytes
                and table in self.looked_up([*units, table], places)
            ):
                unit.parameters = [named for named in unit.parameters if named[1] is not weight]
                tables.append(table)
        return tables

    def looked_up(self, units: Sequence[Unit], places: Places) -> list[Unit]:
        """Returns the embeddings of which only looked-up rows are uploaded.

        These are embeddings that only look up rows, are at least as large as the median unit without rows, and were not chosen by
        ``layers=``.
        """
        median = statistics.median([unit.nbytes for unit in units if not unit.rows] or [0])
        return [unit for unit in units if not unit.chosen and _only_looks_up(unit, places) and unit.nbytes >= median]

    def notes(self, units: Sequence[Unit], layers: Sequence[Layer], tables: Sequence[Layer]) -> list[str]:
        notes = [
            f"of {table.name!r} ({in_gib(table.nbytes)}) only the rows in a batch are uploaded; "
            f"layers=[{table.name!r}] uploads it whole."
            for table in tables
        ]
        stacked = [layer for layer in layers if layer.rows]
        if stacked:
            first = stacked[0]
            one = sum(tensor_bytes(p) for _, p in first.parameters if is_stack(p, first.rows)) // first.rows
            notes.append(
                f"experts are stacked in {len(stacked)} modules, and only experts that tokens are routed to are uploaded: "
                f"{first.name!r} … with {first.rows} of {in_gib(one)} each. "
                f"layers= with the blocks around them uploads them whole."
            )
        apart = {unit.name for unit in units if unit.rows}
        inside = (
            join_names(unit.name, key) if key else unit.name
            for unit in units
            if unit.module is not None
            for key, child in unit.module.named_modules()
            if stacks_in(child)
        )
        whole = [name for name in inside if name not in apart]
        if whole:
            notes.append(f"experts are stacked in {len(whole)} modules that are uploaded whole: {whole[0]!r} …")
        return notes

    def advice(self, root: nn.Module, streamed: Sequence[Unit]) -> str:
        uploaded = {parameter for unit in streamed for _, parameter in unit.parameters}
        closed = {
            inner
            for unit in streamed
            if unit.module is not None and (unit.chosen or is_compiled(unit.module))
            for inner in unit.module.modules()
        }
        # The outputs of linear layers, by the modules that contain them and those beside them.
        outputs = defaultdict[nn.Module, set[int]](set)
        for parent in root.modules():
            found = {child.out_features for child in parent.children() if isinstance(child, nn.Linear)}
            for module in (parent, *parent.children()):
                outputs[module] |= found
        whole = {
            name: stacks
            for name, module in root.named_modules()
            if module not in closed and (stacks := own_stacks(module, name, outputs[module]))
            if uploaded.issuperset(stacks.values())
        }
        if not whole:
            return ""
        (name, stacks), *others = whole.items()
        (key, stack), *_ = stacks.items()
        return (
            f"The {len(stack)} experts in {join_names(name, key)!r}{' …' if others else ''} are uploaded together. "
            f"In a list, only those that a batch uses are uploaded: self.experts = nn.ModuleList(Expert() for _ in "
            f"range({len(stack)}))."
        )

    def routed_share(self, module: nn.Module, args: Sequence[Any]) -> float:
        return routed_share(module, args)

    def make_rows(
        self, found: Found, layers: Sequence[StreamedLayer], device: Device, log: logging.Logger | None, *, pin: bool
    ) -> dict[nn.Module, tuple[StreamedLayer, ...]]:
        embeddings: dict[nn.Module, tuple[StreamedLayer, ...]] = {}
        tables = [layer for layer in layers if layer.kind is Kind.TABLE]
        for layer, found_layer in zip(tables, found.tables, strict=True):
            embedding: Any = found.places[found_layer.parameters[0][1]][0].module
            layer.rows = EmbeddingRows(embedding, layer, device, pin=pin)
            embeddings[embedding] = (layer,)
        for layer in layers:
            if layer.planned.rows:
                layer.rows = ExpertRows(layer, device, log or logging.getLogger("lightning.pytorch"))
        return embeddings


def _only_looks_up(unit: Unit, places: Places) -> bool:
    """Returns True if a unit is an embedding that only looks up rows: torch's own forward, an untied weight, no ``max_norm``."""
    if not isinstance(unit.module, nn.Embedding) or len(unit.parameters) != 1:
        return False
    if type(unit.module).forward is not nn.Embedding.forward or "forward" in vars(unit.module):
        return False
    (_, weight) = unit.parameters[0]
    return places[weight] == (Place(unit.module, "weight"),) and unit.module.max_norm is None
