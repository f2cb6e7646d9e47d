"""pytorch_tabular: networks for tables, which it makes and trains from configurations."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
from pytorch_tabular import TabularModel, models
from pytorch_tabular.config import DataConfig, OptimizerConfig, TrainerConfig

REQUIRES = ["pytorch-tabular"]

_random = np.random.default_rng(0)
_TABLE = pd.DataFrame({
    "a": _random.random(200),
    "b": _random.random(200),
    "c": _random.choice(list("xyz"), 200),
    "d": _random.choice(list("pq"), 200),
    "y": _random.integers(0, 2, 200),
})  # fmt: skip


def _train(config: Any, options: dict[str, Any]) -> None:
    model = TabularModel(
        data_config=DataConfig(target=["y"], continuous_cols=["a", "b"], categorical_cols=["c", "d"]),
        model_config=config(**{"task": "classification", **options}),
        optimizer_config=OptimizerConfig(),
        trainer_config=TrainerConfig(
            max_epochs=1, batch_size=32, early_stopping=None, checkpoints=None, load_best=False, progress_bar="none", seed=1,
            accelerator="cpu",
        ),
        verbose=False,
    )  # fmt: skip
    model.fit(train=_TABLE, validation=_TABLE)
    model.evaluate(_TABLE, verbose=False)
    model.predict(_TABLE)


_BACKBONE = {
    "backbone_config_class": "CategoryEmbeddingModelConfig",
    "backbone_config_params": {"task": "backbone", "layers": "8"},
}
_ATTENTION = {"input_embed_dim": 8, "num_heads": 2, "num_attn_blocks": 2}
MODELS: dict[str, Callable[[], None]] = {
    config.__name__.removesuffix("Config"): partial(_train, config, options)
    for config, options in (
        (models.CategoryEmbeddingModelConfig, {"layers": "16-8", "use_batch_norm": True, "dropout": 0.1}),
        (models.FTTransformerConfig, _ATTENTION),
        (models.TabTransformerConfig, _ATTENTION),
        (models.GANDALFConfig, {"gflu_stages": 2}),
        (models.NodeConfig, {"num_layers": 1, "num_trees": 8, "depth": 3}),
        (models.AutoIntConfig, {"attn_embed_dim": 8, "num_heads": 2}),
        (models.DANetConfig, {"n_layers": 4, "abstlay_dim_1": 8}),
        (models.GatedAdditiveTreeEnsembleConfig, {"num_trees": 2, "gflu_stages": 2, "tree_depth": 2}),
        (models.MDNConfig, {"task": "regression", **_BACKBONE, "head_config": {"num_gaussian": 2}}),
    )
}
