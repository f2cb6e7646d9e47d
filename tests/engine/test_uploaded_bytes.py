"""The bytes that a late batch uploads, as a table: a change that costs an upload shows as a change of the table.

``python -m tests.engine.test_uploaded_bytes`` writes the table anew. Give the reason in the commit.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest
from lightning.pytorch import Callback, seed_everything
from torch.utils.data import DataLoader

from tests.support.runs import superpipeline, trainer_for
from tests.support.tiers import first
from tests.support.zoo import T5, Entry, hf, labelled

TABLE = Path(__file__).with_name("uploaded_bytes.txt")
WINDOWS = ((1, 1), (2, 1), (4, 1), (3, 2), (4, 2), (6, 3))
DEEP = {"num_hidden_layers": 6}
MODELS = {
    "llama": hf("LlamaForCausalLM", **DEEP),
    "llama, tied": hf("LlamaForCausalLM", tie_word_embeddings=True, **DEEP),
    "bert": hf("BertForMaskedLM", **DEEP),
    "t5": hf("T5ForConditionalGeneration", **{**T5, "num_layers": 4, "num_decoder_layers": 4}),
    "vit": hf("ViTForImageClassification", labelled, **DEEP),
    "qwen3 moe": hf("Qwen3MoeForCausalLM", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, **DEEP),
}
Mode = Literal["keep", "recompute", "offload", "predict"]
ROWS = [(name, mode) for name in MODELS for mode in ("keep", "recompute", "offload", "predict")]


class Uploads(Callback):
    """Notes the bytes that were uploaded until the end of each batch."""

    def __init__(self) -> None:
        self.at: list[int] = []

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.at.append(trainer.strategy.stats().fetched_bytes)


def uploaded(entry: Entry, mode: Mode, window: tuple[int, int]) -> int:
    """The bytes of the last of four batches; in prediction, the mean of the last four of eight, because the order goes round."""
    seed_everything(7, verbose=False)
    module, at = entry.make(), list[int]()
    for count in (4, 8) if mode == "predict" else (4,):
        strategy = superpipeline(k=window[0], k_prime=window[1], activations="keep" if mode == "predict" else mode)
        uploads = Uploads()
        trainer = trainer_for(strategy, callbacks=[uploads])
        batches: Any = DataLoader(entry.batches(count), batch_size=None)  # type: ignore[arg-type]
        if mode != "predict":
            trainer.fit(module, batches)
            return uploads.at[-1] - uploads.at[-2]
        trainer.predict(module, batches)
        at.append(strategy.stats().fetched_bytes)
    return (at[1] - at[0]) // 4


def row(name: str, mode: Mode) -> str:
    return f"{name}, {mode}: " + " ".join(str(uploaded(MODELS[name], mode, window)) for window in WINDOWS)


@pytest.mark.long("takes a second or more")
@pytest.mark.parametrize(("name", "mode"), first(ROWS, ("llama, tied", "recompute"), why="the same for other models"))
def test_uploads_are_those_of_the_table(name: str, mode: Mode) -> None:
    assert row(name, mode) in TABLE.read_text().splitlines()


if __name__ == "__main__":
    TABLE.write_text("\n".join([f"k, k' of the columns: {WINDOWS}", *(row(*each) for each in ROWS)]) + "\n")
