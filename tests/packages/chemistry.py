"""chemprop: message passing over molecules, of one and of several components."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import lightning.pytorch as pl
import numpy as np
from chemprop import data, models, nn

REQUIRES = ["chemprop"]

_MOLECULES = ["CCO", "CCN", "c1ccccc1", "CC(=O)O", "CCCC", "CNC", "COC", "c1ccncc1", "CC#N", "CCl", "OCCO", "NCCN"]


def _points(molecules: list[str], digits: int = 1) -> Any:
    random = np.random.default_rng(0)
    return data.MoleculeDataset(
        [data.MoleculeDatapoint.from_smi(each, random.random(1).round(digits)) for each in molecules]
    )


def _train(make: Callable[[], Any], dataset: Any) -> None:
    loader = data.build_dataloader(dataset, batch_size=4, num_workers=0, shuffle=False)
    trainer, model = pl.Trainer(max_epochs=2), make()
    trainer.fit(model, loader, loader)
    trainer.test(model, loader)
    trainer.predict(model, loader)


def _one(
    message: Any = nn.BondMessagePassing, pool: Any = nn.MeanAggregation, head: Any = nn.RegressionFFN, **pooled: Any
) -> Any:
    return models.MPNN(message(d_h=16, depth=3), pool(**pooled), head(input_dim=16, hidden_dim=16), batch_norm=True)


def _several(shared: bool) -> Any:
    blocks = [nn.BondMessagePassing(d_h=16) for _ in range(1 if shared else 2)]
    message = nn.MulticomponentMessagePassing(blocks, 2, shared=shared)
    return models.MulticomponentMPNN(message, nn.NormAggregation(), nn.RegressionFFN(input_dim=32, hidden_dim=16))


_ONE = _points(_MOLECULES)
_TWO = data.MulticomponentDataset([_ONE, _points(_MOLECULES[::-1])])
MODELS: dict[str, Callable[[], None]] = {
    "MPNN": partial(_train, _one, _ONE),
    "MPNN over atoms": partial(_train, partial(_one, nn.AtomMessagePassing, nn.NormAggregation), _ONE),
    "MPNN with attention": partial(_train, partial(_one, pool=nn.AttentiveAggregation, output_size=16), _ONE),
    "MPNN, mean and variance": partial(_train, partial(_one, head=nn.MveFFN), _ONE),
    "MPNN, evidential": partial(_train, partial(_one, head=nn.EvidentialFFN), _ONE),
    "MPNN, two classes": partial(_train, partial(_one, head=nn.BinaryClassificationFFN), _points(_MOLECULES, 0)),
    "MulticomponentMPNN": partial(_train, partial(_several, False), _TWO),
    "MulticomponentMPNN, one block": partial(_train, partial(_several, True), _TWO),
}
