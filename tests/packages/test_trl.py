"""TRL's ``SFTTrainer`` with ``StreamedTrainer`` as a base has the bits of the plain one."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers

from sp_lightning import StreamedTrainer
from tests.support.models import llama
from tests.support.runs import assert_equal
from tests.support.simdevice import simulated

trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")

WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]


def trained(kind: Any, folder: Path, adapters: LoraConfig | None, **options: Any) -> list[Any]:
    """Trains four steps. Returns the logged numbers, weights, optimizer state, and the random state."""
    transformers.set_seed(7)
    model = llama(dropout=0.0).net
    own = Tokenizer(models.WordLevel({word: i for i, word in enumerate(["<unk>", "</s>", *WORDS])}, unk_token="<unk>"))
    own.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=own, eos_token="</s>", unk_token="<unk>")
    arguments = trl.SFTConfig(
        output_dir=str(folder), use_cpu=True, max_steps=4, per_device_train_batch_size=2, logging_steps=1, report_to="none",
        disable_tqdm=True, dataloader_pin_memory=False, learning_rate=1e-2, **options,
    )  # fmt: skip
    rows = datasets.Dataset.from_list([{"text": " ".join(WORDS[i % 4 :])} for i in range(12)])
    more = {"stream": {"k": 1}} if issubclass(kind, StreamedTrainer) else {}
    trainer = kind(
        model,
        arguments,
        train_dataset=rows,
        eval_dataset=rows,
        processing_class=tokenizer,
        peft_config=adapters,
        **more,
    )
    trainer.train()
    logged = [
        {k: v for k, v in each.items() if "runtime" not in k and "second" not in k}
        for each in trainer.state.log_history
    ]
    return [logged, dict(trainer.model.state_dict()), trainer.optimizer.state_dict(), torch.get_rng_state()]


LORA = LoraConfig(r=2, target_modules="all-linear")
WAYS: dict[str, tuple[Any, dict[str, Any]]] = {
    "the defaults": (None, {}),
    "float32": (None, {"bf16": False, "gradient_checkpointing": False}),
    "LoRA": (LORA, {}),
    "accumulation and evaluation": (
        None,
        {"gradient_accumulation_steps": 2, "eval_strategy": "steps", "eval_steps": 2},
    ),
    "packing": (None, {"packing": True, "max_length": 16}),
}


@pytest.mark.long("trains for seconds, where TRL is installed")
@pytest.mark.filterwarnings("ignore")  # TRL's and torch's own
@pytest.mark.parametrize("way", WAYS)
def test_trainings(way: str, tmp_path: Path) -> None:
    """Losses, norms after clipping, weights, optimizer state and random state."""
    adapters, options = WAYS[way]
    with simulated() as made:
        streamed = type("Streamed", (StreamedTrainer, trl.SFTTrainer), {})
        ours = trained(streamed, tmp_path, copy.deepcopy(adapters), **options)
    assert_equal(ours, trained(trl.SFTTrainer, tmp_path, copy.deepcopy(adapters), **options), way)
    assert made, "nothing was streamed"
