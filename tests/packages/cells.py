"""scvi-tools: variational models of cells, some of which Pyro trains, some with an adversary."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import anndata
import numpy as np
import scvi
from scipy.sparse import csr_matrix

REQUIRES = ["scvi-tools", "scanpy"]

scvi.settings.seed = 0
_BRIEF = {"max_epochs": 2, "batch_size": 64, "accelerator": "cpu"}


def _cells() -> Any:
    random = np.random.default_rng(0)
    cells = anndata.AnnData(csr_matrix(random.poisson(2, (200, 60)).astype("float32")))
    cells.obs["batch"] = random.choice(["a", "b"], 200)
    cells.obs["label"] = random.choice(["x", "y", "unknown"], 200)
    cells.obsm["proteins"] = random.poisson(3, (200, 5)).astype("float32")
    cells.layers["spliced"] = cells.layers["unspliced"] = cells.X.toarray()
    return cells


def _train(
    kind: Any, set_up: dict[str, Any], options: dict[str, Any], *, change: Callable[[Any], Any] | None = None
) -> Any:
    cells = _cells()
    if change is not None:
        cells.X = change(cells.X)
    kind.setup_anndata(cells, **set_up)
    model = kind(cells, **options)
    model.train(**_BRIEF)
    return model


def _solo() -> None:
    scvi.external.SOLO.from_scvi_model(_train(scvi.model.SCVI, {}, _SMALL)).train(max_epochs=2, accelerator="cpu")


def _gimvi() -> None:
    both = _cells(), _cells()
    for cells in both:
        scvi.external.GIMVI.setup_anndata(cells)
    scvi.external.GIMVI(*both, n_latent=5).train(**_BRIEF)


def _predicted_labels() -> None:
    set_up = {"labels_key": "label", "unlabeled_category": "unknown", "batch_key": "batch"}
    _train(scvi.model.SCANVI, set_up, _SMALL).predict(soft=True)


_SMALL = {"n_hidden": 16}
_BATCH = {"batch_key": "batch"}
MODELS: dict[str, Callable[[], None]] = {
    "SCVI": partial(_train, scvi.model.SCVI, _BATCH, {**_SMALL, "n_layers": 2}),
    "LinearSCVI": partial(_train, scvi.model.LinearSCVI, {}, {"n_latent": 5}),
    "SCANVI": _predicted_labels,
    "AmortizedLDA, Pyro": partial(_train, scvi.model.AmortizedLDA, {}, {"n_topics": 4, **_SMALL}),
    "PEAKVI": partial(_train, scvi.model.PEAKVI, {}, _SMALL, change=lambda counts: (counts > 2).astype("float32")),
    "AUTOZI": partial(_train, scvi.model.AUTOZI, {}, _SMALL),
    "CondSCVI": partial(_train, scvi.model.CondSCVI, {"labels_key": "label"}, _SMALL),
    "TOTALVI, adversarial": partial(
        _train, scvi.model.TOTALVI, {"protein_expression_obsm_key": "proteins", **_BATCH}, {}
    ),
    "GIMVI": _gimvi,
    "SOLO": _solo,
    "RNAStereoscope": partial(_train, scvi.external.RNAStereoscope, {"labels_key": "label"}, {}),
    "VELOVI": partial(
        _train, scvi.external.VELOVI, {"spliced_layer": "spliced", "unspliced_layer": "unspliced"}, _SMALL
    ),
    "SysVI": partial(_train, scvi.external.SysVI, _BATCH, {}, change=lambda counts: counts.toarray()),
}
