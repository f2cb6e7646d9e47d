"""Train a linear map beside a frozen vision-language model (eP-ALM, arXiv 2303.11403): frozen weights cost no gradients.

    python examples/demos/bridge_vlm.py                                        # no download, a minute on a CPU
    python examples/demos/bridge_vlm.py --model llava-hf/llava-1.5-7b-hf --data photos.jsonl     # not run

First all weights of the model are trained, as by ``finetune_vlm.py``, whose model, rows and batches these are. Then that model
is frozen, and a linear map and a soft token beside it are trained. The last lines say what trained weights cost: uploads,
gradients, optimizer state. With ``--model`` only the second training runs.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.utils.data import DataLoader
from transformers import AutoModelForImageTextToText, CLIPVisionModel

from sp_lightning import SuperpipelineStrategy

if not __package__:  # started as a file: the recipes are found from the repository's root
    sys.path.insert(0, str(Path(__file__).parents[2]))

from examples.finetune_vlm import Encoder, FineTune, common, read_config

RATE = 1e-2  # of the bridge
OMITTED = [
    "--epochs", "--validate-every", "--lora", "--gradient-checkpointing", "--resume", "--dial", "--strategy", "--host-memory",
    "--disk", "--report",
]  # fmt: skip


def parse(argv: Sequence[str] | None = None) -> Any:
    parser = common.training_options(
        __doc__,
        "bridge_vlm",
        model="hub name or folder of a LLaVA with CLIP (default: a small LLaVA, trained here first)",
        data=".jsonl file (default: digits and photographs of scikit-learn)",
        lr=f"2e-3 for all weights, {RATE:g} for the bridge",
        batch_size=16,
        steps=120,
        without=OMITTED,
    )
    parser.set_defaults(resume=None, validate_every=None, lora=None, freeze_vision=False)
    parser.add_argument("--optimizer-on", default="cpu", choices=["cpu", "gpu"], help="where it steps (%(default)s)")
    return common.read_options(parser, argv)


class Cost(NamedTuple):
    """What a training costs.

    Attributes:
        trained: numbers that are trained.
        fetched_bytes: of layers to the device, with validation, and of all that is stepped there.
        offloaded_gradient_bytes: of gradients to the host.
        step_download_bytes: of weights and state from steps on the device back to the host; 0 where the host steps.
        state_bytes: of the optimizer's state, at the end.
        val_loss: on rows that were held out, at the end.
    """

    trained: int
    fetched_bytes: int
    offloaded_gradient_bytes: int
    step_download_bytes: int
    state_bytes: int
    val_loss: float


class Bridge(nn.Module):
    """A frozen LLaVA, and what is trained in place of its projector: a linear map and a soft token (eP-ALM, arXiv 2303.11403).

    The vision tower's [CLS] feature becomes one embedding of the language model, and a learned embedding follows it; both
    stand before the text. The bridge is a module of its own, because LLaVA's projector is two linear maps of every patch, and
    LLaVA leaves [CLS] out. The projector is not used, so it stays on the host once the strategy has seen a batch. eP-ALM
    brings several features to several blocks of the language model. Here one comes with the embeddings, so that no block's
    forward has to change.

    Args:
        model: LLaVA with a CLIP vision tower.

    Raises:
        ValueError: it is another model.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        if not isinstance(getattr(getattr(model, "model", None), "vision_tower", None), CLIPVisionModel):
            raise ValueError(
                f"--model: {type(model).__name__} has no vision_tower of CLIP, whose [CLS] feature the bridge takes. "
                "Expected a LLaVA such as llava-hf/llava-1.5-7b-hf"
            )
        self.model = model.requires_grad_(False)
        vision, text = model.config.vision_config, model.config.text_config
        self.bridge = nn.Linear(vision.hidden_size, text.hidden_size, dtype=model.dtype)
        # as large as the embeddings of words, beside which it stands
        self.soft_token = nn.Parameter(torch.randn(text.hidden_size, dtype=model.dtype) * text.initializer_range)

    def forward(self, labels: Tensor, use_cache: bool, **batch: Tensor) -> Any:
        return self.model(**self._embed(**batch), labels=pad(labels, (2, 0), value=-100), use_cache=use_cache)

    def generate(self, **batch: Any) -> Tensor:
        """As ``generate`` of the model: the question, and what was written behind it."""
        inputs = {name: batch.pop(name) for name in ("input_ids", "attention_mask", "pixel_values")}
        return torch.cat([inputs["input_ids"], self.model.generate(**self._embed(**inputs), **batch)], 1)

    def _embed(self, input_ids: Tensor, attention_mask: Tensor, pixel_values: Tensor) -> dict[str, Tensor]:
        image = self.bridge(self.model.model.vision_tower(pixel_values).pooler_output)  # of [CLS], (images, width)
        before = torch.stack([image, self.soft_token.expand_as(image)], 1)
        words = self.model.get_input_embeddings()(input_ids)
        return {
            "inputs_embeds": torch.cat([before, words], 1),
            "attention_mask": pad(attention_mask, (2, 0), value=1),
        }


class BridgeEncoder(Encoder):
    """Encodes rows for a bridge: the image is not a token of the text, and stands before the text."""

    def questions(self, rows: Sequence[dict[str, Any]], side: str = "left") -> dict[str, Tensor]:
        batch = super().questions(rows, side)  # a processor refuses images without tokens for them
        image = self.tokenizer.convert_tokens_to_ids(self.processor.image_token)
        ids = [row[row != image].tolist() for row in batch["input_ids"]]
        batch |= dict(self.tokenizer.pad({"input_ids": ids}, padding_side=side, return_tensors="pt"))
        return batch


def cost(trainer: pl.Trainer, module: pl.LightningModule, strategy: SuperpipelineStrategy) -> Cost:
    states = [state for optimizer in trainer.optimizers for state in optimizer.state.values()]
    stats = strategy.stats()
    return Cost(
        trained=sum(p.numel() for p in module.parameters() if p.requires_grad),
        fetched_bytes=stats.fetched_bytes + stats.step_upload_bytes,
        offloaded_gradient_bytes=stats.offloaded_gradient_bytes,
        step_download_bytes=stats.step_download_bytes,
        state_bytes=sum(value.nbytes for state in states for value in state.values() if isinstance(value, Tensor)),
        val_loss=float(trainer.callback_metrics["val_loss"]),
    )


def main(argv: Sequence[str] | None = None) -> dict[str, Cost]:
    options = parse(argv)
    common.prepare(options)
    with common.errors_in_the_input(options):  # before any work
        rows = common.read_image_rows(Path(options.data)) if options.data else common.digits_and_photographs()
        config, processor = read_config(options)
        held_out, training = common.split(rows, max(20, len(rows) // 64))
        with torch.device("meta"):
            Bridge(AutoModelForImageTextToText.from_config(config))
        BridgeEncoder(processor)(training[:1])

    def train(model: Any, encode: Encoder, lr: float) -> Cost:
        run = common.Run(options, len(training))
        names = ("gpu_memory", "optimizer_on", "optimizer_overlap")
        strategy = SuperpipelineStrategy(**{name: getattr(options, name) for name in names})
        module = FineTune(model, processor.tokenizer, lr, run.steps)
        trainer = pl.Trainer(strategy=strategy, devices=1, **common.settings(options), **run.schedule())
        load: dict[str, Any] = {"batch_size": options.batch_size, "num_workers": options.workers, "collate_fn": encode}
        batches: Any = DataLoader(training, sampler=run.sampler(), **load)
        validation: Any = DataLoader(held_out, **load)
        trainer.fit(module, batches, validation)
        return cost(trainer, module, strategy)

    costs: dict[str, Cost] = {}
    if options.model is None:
        model = AutoModelForImageTextToText.from_config(config)  # random weights
        print("All weights are trained.")
        costs["all weights"] = train(model.train(), Encoder(processor), options.lr or 2e-3)
    else:
        model = AutoModelForImageTextToText.from_pretrained(options.model, dtype=common.load_dtype(options)).train()
    print("The model is frozen. A linear map and a soft token are trained.")
    bridge = Bridge(model)
    costs["the bridge"] = train(bridge, BridgeEncoder(processor), options.lr or RATE)
    saved = options.output / "bridge.pt"
    torch.save({name: p.detach() for name, p in bridge.named_parameters() if p.requires_grad}, saved)
    names = ("numbers trained", "bytes uploaded", "bytes of gradients", "bytes stepped, back", "bytes of state", "loss")
    print(
        f"Saved: {saved}. What was trained, and what it cost:\n{'':>19}  {'  '.join(f'{name:>15}' for name in costs)}"
    )
    for name, values in zip(names, zip(*costs.values(), strict=True), strict=True):
        shown = (f"{value:>15.3f}" if isinstance(value, float) else f"{value:>15,}" for value in values)
        print(f"{name:>19}  {'  '.join(shown)}")
    return costs


if __name__ == "__main__":
    main()
