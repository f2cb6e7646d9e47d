"""Train a linear map beside a frozen vision-language model (eP-ALM, arXiv 2303.11403): frozen weights cost no gradients.

    python examples/demos/bridge_vlm.py                                        # all weights of a small LLaVA, a minute
    python examples/demos/bridge_vlm.py --model runs/bridge_vlm/model --trained bridge  # the model frozen, 1 % beside it

``--data`` is a folder of images with a file ``metadata.jsonl`` in it, a line per image as Hugging Face's imagefolder has
it: ``{"file_name": "1.jpg", "text": "a cat"}``. Without ``--model`` a small LLaVA (a CLIP vision tower, a projector, a Llama)
starts from random weights; without ``--data`` it learns scikit-learn's handwritten digits and crops of its two photographs.

``--trained bridge`` freezes all of the model, and trains a linear map and a soft token. Both runs print what trained
weights cost: uploads, gradients, optimizer state.

The order of events: write captions of images that are held out, train on the others, write them again, compare the memory.
To fine-tune your own model, copy ``examples/finetune_vlm.py``.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from PIL import Image
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.utils.data import DataLoader
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    AutoProcessor,
    CLIPImageProcessor,
    CLIPVisionConfig,
    CLIPVisionModel,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
)

if not __package__:  # started as a file: what lies beside it is found from the repository's root
    sys.path.insert(0, str(Path(__file__).parents[2]))

from examples.demos.console import ConsoleLogger, last_loss, say, say_memory, say_speed, steps_per_second
from examples.demos.language import check_model
from examples.demos.recipe import (
    HOLDS_TRAINING,
    PLAIN_STEPS,
    add_run_options,
    check_least,
    check_positive,
    cuda_peak,
    make_trainer,
    plain_steps_per_second,
    plain_training_bytes,
    prepare_output,
    run,
)
from examples.demos.text import train_tokenizer

HEAD = 16  # numbers per attention head of the small LLaVA
PIXELS, PATCH = 32, 8  # of its images and patches, on each side
HELD_OUT = 10  # every tenth image is for validation
CAPTIONED = 48  # validation images that get a caption
SHOWN = 6  # captions that are printed
BRIDGE = "bridge.pt"  # what --trained bridge writes
CROPS = 100  # of each photograph
DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
PHOTOGRAPHS = {"china.jpg": "a temple in china", "flower.jpg": "a flower in a garden"}
# The small LLaVA's; other models have their own.
CHAT = (
    "{% for message in messages %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<image>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}\n{% endfor %}"
)

Pair = tuple[Image.Image | Path, str]  # an image or its file, and the caption


@dataclass(frozen=True)
class Result:
    """The results of a run.

    Attributes:
        first_loss, last_loss: of the first training step, and the mean over the last tenth of the steps.
        val_loss: on images that were held out, at the end.
        steps: optimizer steps.
        right_before, right: share of captions of held-out images that came out word for word, before and after.
        captions: of held-out images: the right one, the model's before, and after.
        images_per_second: of training; 0 with one step.
        peak_device_bytes, planned_device_bytes: weights and gradients on the device, counted and planned.
        plain_device_bytes: computed: weights, gradients and AdamW's moments, which plain training keeps there.
        trained, parameters: numbers that are trained, and all.
        fetched_bytes: of layers to the device, in training and the validation at its end, and of all that is stepped there.
        offloaded_gradient_bytes: of gradients to the host.
        state_bytes: of the optimizer's state, at the end.
        step_download_bytes: of weights and state from steps on the device back to the host; 0 where the host steps.
        model: folder for ``--model`` or ``from_pretrained``; with ``--trained bridge``, of ``bridge.pt``.
    """

    first_loss: float
    last_loss: float
    val_loss: float
    steps: int
    right_before: float
    right: float
    captions: list[tuple[str, str, str]]
    images_per_second: float
    peak_device_bytes: int
    planned_device_bytes: int
    plain_device_bytes: int
    trained: int
    parameters: int
    fetched_bytes: int
    offloaded_gradient_bytes: int
    state_bytes: int
    step_download_bytes: int
    model: Path


def main(argv: Sequence[str] | None = None) -> Result:
    """Run the recipe; ``argv`` as on the command line."""
    parser = make_parser()
    options = parser.parse_args(argv)
    try:  # all that can be wrong with the input shows here, before any work
        check(options)
        pairs = read_photographs_and_digits() if options.data is None else read_folder(options.data)
        training, held_out = divide(pairs, options.batch_size)
        processor = small_processor(pairs) if options.model is None else load_processor(options.model)
        bridged = options.trained == "bridge"
        captions = Captions(processor, options.prompt, image=not bridged)
        captions.for_training(training[:1])  # the template, the image's tokens, the caption behind them
        check_parts(options)
        (folder,) = prepare_output(options.output, "bridge" if bridged else "model")
        console = ConsoleLogger(options.steps)
        trainer, strategy = make_trainer(options, logger=console, optimizer_on=options.optimizer_on)
    except (ValueError, OSError, MisconfigurationException) as error:
        parser.error(str(error))

    pl.seed_everything(options.seed, verbose=False)
    model = small_llava(processor) if options.model is None else load_vlm(options.model, options.precision)
    if bridged:
        model = Bridge(model)
    module = Captioner(model, processor, options.lr, options.new_tokens)

    def batches(pairs: Sequence[Pair], collate: Any, *, steps: int | None = None) -> DataLoader[Any]:
        picked = [pairs[i] for i in order(len(pairs), steps * options.batch_size)] if steps else pairs
        return DataLoader(picked, options.batch_size, collate_fn=collate, num_workers=options.workers)  # type: ignore[arg-type]

    to_caption = batches(held_out[:CAPTIONED], captions.for_generation)

    def write_captions() -> list[str]:
        written = trainer.predict(module, to_caption)
        return [caption for batch in written or () for caption in batch]

    say(f"{len(training):,} images with captions, {len(held_out):,} more are held out")
    before = write_captions()
    say(f"\n{strategy.plan}\n")
    trainer.fit(
        module,
        batches(training, captions.for_training, steps=options.steps),
        batches(held_out, captions.for_training),
    )
    # of this run, before the next one has its own
    plan, stats, state_bytes, allocated = strategy.plan, strategy.stats(), optimizer_bytes(trainer), cuda_peak(trainer)
    val_loss = float(trainer.callback_metrics["val_loss"])
    after = write_captions()
    model.save_pretrained(folder)
    processor.save_pretrained(folder)

    wanted = [caption for _, caption in held_out[:CAPTIONED]]
    result = Result(
        first_loss=console.losses[0].loss,
        last_loss=last_loss(console.losses),
        val_loss=val_loss,
        steps=trainer.global_step,
        right_before=share(wanted, before),
        right=share(wanted, after),
        captions=list(zip(wanted, before, after, strict=True)),
        images_per_second=options.batch_size * steps_per_second(console.losses),
        peak_device_bytes=stats.peak_device_bytes,
        planned_device_bytes=plan.peak_device_bytes,
        plain_device_bytes=plain_training_bytes(module),
        trained=sum(p.numel() for p in module.parameters() if p.requires_grad),
        parameters=sum(p.numel() for p in module.parameters()),
        fetched_bytes=stats.fetched_bytes + stats.step_upload_bytes,
        offloaded_gradient_bytes=stats.offloaded_gradient_bytes,
        state_bytes=state_bytes,
        step_download_bytes=stats.step_download_bytes,
        model=folder,
    )
    say("\nCaptions of images that were held out:")
    for right, first, last in result.captions[:SHOWN]:
        say(f"  right   {right}\n  before  {first!r}\n  after   {last!r}\n")
    say(f"Loss: {result.first_loss:.3f} → {result.last_loss:.3f}, on held-out images {val_loss:.3f}")
    say(f"Right word for word: {result.right_before:.0%} → {result.right:.0%} of {len(wanted)} held-out images")
    say_cost(result)
    more = batches(training, captions.for_training, steps=PLAIN_STEPS + 1)
    speed = plain_steps_per_second(options, module, more)
    say_speed(result.images_per_second, options.batch_size * speed, "images")
    peak, plain = result.peak_device_bytes, result.plain_device_bytes
    say_memory(plan, counted=peak, plain=plain, holds=HOLDS_TRAINING, allocated=allocated)
    say(f"Bridge: {folder / BRIDGE}" if bridged else f"Model: {folder} (go on with --model {folder})")
    return result


def optimizer_bytes(trainer: pl.Trainer) -> int:
    """Bytes of all tensors of the optimizers' state."""
    states = [state for optimizer in trainer.optimizers for state in optimizer.state.values()]
    return sum(value.nbytes for state in states for value in state.values() if isinstance(value, Tensor))


def say_cost(result: Result) -> None:
    """Prints memory and time of the trained parameters, in lines that compare with those of ``--trained all``."""
    say(f"Trained: {result.trained:,} of {result.parameters:,} parameters ({result.trained / result.parameters:.1%})")
    for count, what in (
        (result.fetched_bytes, "to the device: layers, in validation, too, and what is stepped there"),
        (result.offloaded_gradient_bytes, "to the host: gradients"),
        (result.step_download_bytes, "to the host: weights and state, from steps on the device"),
        (result.state_bytes, "optimizer state"),
    ):
        say(f"  {count:>15,} bytes  {what}")


class Captioner(pl.LightningModule):
    """Any image-text-to-text model of transformers. Nothing in here knows how its layers get to the device.

    Args:
        model: of transformers.
        processor: its own.
        lr: learning rate of AdamW.
        new_tokens: per caption, at most.
    """

    def __init__(self, model: nn.Module, processor: Any, lr: float, new_tokens: int) -> None:
        super().__init__()
        self.model: Any = model
        self.processor = processor
        self.lr = lr
        self.new_tokens = new_tokens

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = self.model(**batch, use_cache=False).loss
        self.log("loss", loss, batch_size=len(batch["input_ids"]), prog_bar=True)
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        loss = self.model(**batch, use_cache=False).loss
        self.log("val_loss", loss, batch_size=len(batch["input_ids"]))

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> list[str]:
        written = self.model.generate(**batch, do_sample=False, max_new_tokens=self.new_tokens)
        new = written[:, batch["input_ids"].shape[1] :]
        return [text.strip() for text in self.processor.batch_decode(new, skip_special_tokens=True)]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=self.lr)


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
                f"--trained bridge: {type(model).__name__} has no vision_tower of CLIP, whose [CLS] feature the bridge takes. "
                "Take a LLaVA such as llava-hf/llava-1.5-7b-hf, or --trained all."
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

    def save_pretrained(self, folder: Path) -> None:
        """The trained parameters alone."""
        folder.mkdir(exist_ok=True)
        torch.save({name: p.detach() for name, p in self.named_parameters() if p.requires_grad}, folder / BRIDGE)

    def _embed(self, input_ids: Tensor, attention_mask: Tensor, pixel_values: Tensor) -> dict[str, Tensor]:
        image = self.bridge(self.model.model.vision_tower(pixel_values).pooler_output)  # of [CLS], (images, width)
        before = torch.stack([image, self.soft_token.expand_as(image)], 1)
        words = self.model.get_input_embeddings()(input_ids)
        return {
            "inputs_embeds": torch.cat([before, words], 1),
            "attention_mask": pad(attention_mask, (2, 0), value=1),
        }


class Captions:
    """Images and captions → what the model takes, by its own processor and chat template.

    Args:
        processor: of the model.
        prompt: stands before each caption, behind the image.
        image: whether the text has the tokens that the model puts an image's features in place of.
    """

    def __init__(self, processor: Any, prompt: str, *, image: bool = True) -> None:
        self.processor = processor
        self.image = image
        message = {"role": "user", "content": [{"type": "image"}] * image + [{"type": "text", "text": prompt}]}
        self.question = processor.apply_chat_template([message], add_generation_prompt=True)
        self.end = processor.tokenizer.eos_token or ""

    def for_training(self, pairs: Sequence[Pair]) -> dict[str, Tensor]:
        """``labels`` are the captions' tokens; -100, which no loss counts, at the question and the padding."""
        answers = [caption + self.end for _, caption in pairs]
        batch = self._encode([image for image, _ in pairs], [self.question + answer for answer in answers], "right")
        lengths = [len(tokens) for tokens in self.processor.tokenizer(answers, add_special_tokens=False)["input_ids"]]
        labels = torch.full_like(batch["input_ids"], -100)
        for row, length in enumerate(lengths):
            end = int(batch["attention_mask"][row].sum())
            labels[row, end - length : end] = batch["input_ids"][row, end - length : end]
        return {**batch, "labels": labels}

    def for_generation(self, pairs: Sequence[Pair]) -> dict[str, Tensor]:
        """Questions alone, filled up on the left: the model writes on from the last position."""
        return self._encode([image for image, _ in pairs], [self.question] * len(pairs), "left")

    def _encode(self, images: list[Image.Image | Path], texts: list[str], side: str) -> dict[str, Tensor]:
        # some templates write the token that begins a text, and the tokenizer would write it again
        begins = self.processor.tokenizer.bos_token
        once = {"add_special_tokens": False} if begins and self.question.startswith(begins) else {}
        opened = [Image.open(each).convert("RGB") if isinstance(each, Path) else each for each in images]
        how: dict[str, Any] = {"padding": True, "padding_side": side, "return_tensors": "pt", **once}
        if self.image:
            return dict(self.processor(images=[[image] for image in opened], text=texts, **how))
        # a processor refuses images without tokens for them, and its two parts do not
        pixels = self.processor.image_processor(opened, return_tensors="pt")["pixel_values"]
        return {**self.processor.tokenizer(texts, **how), "pixel_values": pixels}


# ---------------------------------------------------------------------- images and captions


def read_photographs_and_digits() -> list[Pair]:
    """scikit-learn's images: 1,797 digits, and crops of two photographs.

    Raises:
        ValueError: scikit-learn is missing.
    """
    try:
        from sklearn.datasets import load_digits, load_sample_image
    except ImportError as error:
        raise ValueError(
            "The images come with scikit-learn: pip install scikit-learn. Or give --data FOLDER."
        ) from error
    digits = load_digits()
    pairs: list[Pair] = [
        (Image.fromarray((255 - pixels * 15.9).astype("uint8")).convert("RGB"), f"the digit {DIGITS[label]}")
        for pixels, label in zip(digits.images, digits.target, strict=True)
    ]
    random = torch.Generator().manual_seed(0)
    for name, caption in PHOTOGRAPHS.items():
        photograph = Image.fromarray(load_sample_image(name))
        for _ in range(CROPS):
            size = int(torch.randint(200, 400, (), generator=random))
            left = int(torch.randint(photograph.width - size, (), generator=random))
            top = int(torch.randint(photograph.height - size, (), generator=random))
            pairs.append((photograph.crop((left, top, left + size, top + size)).resize((64, 64)), caption))
    return pairs


def read_folder(data: Path) -> list[Pair]:
    """Images that ``metadata.jsonl`` names; they are read when their batch is made.

    Raises:
        ValueError: a line or an image that cannot be used.
    """
    listing = data / "metadata.jsonl"
    if not listing.is_file():
        raise ValueError(
            f'--data {data}: the folder has no metadata.jsonl. Write a line per image: {{"file_name": "1.jpg", "text": "a cat"}}.'
        )
    pairs: list[Pair] = []
    for number, line in enumerate(listing.read_text(encoding="utf-8").splitlines(), 1):
        try:
            entry = json.loads(line)
            file, caption = data / entry["file_name"], str(entry["text"])
            with Image.open(file) as image:  # reads the header alone
                image.verify()
        except (json.JSONDecodeError, KeyError, TypeError, OSError) as error:
            raise ValueError(f"{listing}, line {number}: {type(error).__name__}: {error}") from error
        pairs.append((file, caption))
    return pairs


def divide(pairs: Sequence[Pair], batch_size: int) -> tuple[list[Pair], list[Pair]]:
    """For training, and held out: every so manyeth of all, in an order drawn by lot.

    Raises:
        ValueError: too few for a batch.
    """
    shuffled = [pairs[i] for i in order(len(pairs), len(pairs))]
    held_out = -(-len(shuffled) // HELD_OUT)
    if len(shuffled) - held_out < batch_size:
        raise ValueError(
            f"There are {len(shuffled) - held_out} images to train on, a batch takes --batch-size {batch_size}. Lower it."
        )
    return shuffled[held_out:], shuffled[:held_out]


def order(count: int, length: int) -> list[int]:
    """``length`` numbers below ``count``; none comes again before all have come."""
    random = torch.Generator().manual_seed(1)
    rounds = -(-length // count)
    return torch.cat([torch.randperm(count, generator=random) for _ in range(rounds)])[:length].tolist()


def share(wanted: Sequence[str], written: Sequence[str]) -> float:
    """Of captions that are right word for word."""
    return sum(a == b for a, b in zip(wanted, written, strict=True)) / len(wanted)


# ---------------------------------------------------------------------- model


def small_processor(pairs: Sequence[Pair]) -> Any:
    """The small LLaVA's processor. Its tokenizer is trained on the captions."""
    tokenizer = train_tokenizer("\n".join(caption for _, caption in pairs))
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    size = {"height": PIXELS, "width": PIXELS}
    return LlavaProcessor(
        image_processor=CLIPImageProcessor(size=size, crop_size=size, do_center_crop=False),
        tokenizer=tokenizer,
        patch_size=PATCH,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,  # CLIP's class token, which "default" leaves out again
        chat_template=CHAT,
    )


def small_llava(processor: Any, layers: int = 3, hidden: int = 96) -> Any:
    """A LLaVA from random weights."""
    shape = {
        "hidden_size": hidden, "intermediate_size": 3 * hidden, "num_hidden_layers": layers,
        "num_attention_heads": hidden // HEAD,
    }  # fmt: skip
    tokenizer = processor.tokenizer
    ends = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = LlavaConfig(
        vision_config=CLIPVisionConfig(**shape, image_size=PIXELS, patch_size=PATCH),
        text_config=LlamaConfig(
            **shape, vocab_size=len(tokenizer), max_position_embeddings=128, tie_word_embeddings=True, **ends
        ),
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        image_seq_length=(PIXELS // PATCH) ** 2,
    )
    return LlavaForConditionalGeneration(config)


def load_processor(model: str) -> Any:
    """
    Raises:
        ValueError: there is none, or it has no chat template.
    """
    try:
        processor = AutoProcessor.from_pretrained(model)
    except (OSError, ValueError) as error:
        raise ValueError(f"--model {model}: no processor could be loaded from there. {error}") from error
    if getattr(processor, "chat_template", None) is None or not hasattr(processor, "image_processor"):
        raise ValueError(
            f"--model {model}: its processor has no chat template for images. Take a model that is made to chat."
        )
    if processor.tokenizer.pad_token is None:
        processor.tokenizer.pad_token = processor.tokenizer.eos_token
    return processor


def load_vlm(model: str, precision: str) -> Any:
    """``from_pretrained``: a folder, or a name on a hub; half precision only where the trainer's is."""
    dtype = torch.bfloat16 if precision == "bf16-true" else torch.float32
    # from_pretrained leaves it in eval mode, and Lightning trains in the mode that it finds
    return AutoModelForImageTextToText.from_pretrained(model, dtype=dtype).train()


def check_parts(options: argparse.Namespace) -> None:
    """The model without values, which costs nothing at any size.

    Raises:
        ValueError: ``--trained bridge`` cannot be.
    """
    if options.model is not None and options.trained == "bridge":
        with torch.device("meta"):
            Bridge(AutoModelForImageTextToText.from_config(AutoConfig.from_pretrained(options.model)))


# ---------------------------------------------------------------------- the command line


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    add = parser.add_argument
    add(
        "--model",
        help="folder or hub name of a vision-language model that chats (default: a small LLaVA, random weights)",
    )
    add(
        "--data",
        type=Path,
        help="folder with images and metadata.jsonl (default: scikit-learn's digits and photographs)",
    )
    add("--steps", type=int, default=400, help="optimizer steps (%(default)s)")
    add("--batch-size", type=int, default=16, help="images per step (%(default)s)")
    add(
        "--lr",
        type=float,
        help="learning rate (default: 1e-3 from random weights, 1e-5 with --model, 1e-2 with --trained bridge)",
    )
    add("--prompt", default="What is this?", help="stands between image and caption (%(default)r)")
    add("--new-tokens", type=int, default=16, help="per caption, at most (%(default)s)")
    add(
        "--trained",
        default="all",
        choices=["all", "bridge"],
        help="bridge: freeze the model; train a linear map from its vision tower, and a soft token (%(default)s)",
    )
    add("--optimizer-on", default="cpu", choices=["cpu", "gpu"], help="where the optimizer steps (%(default)s)")
    add("--workers", type=int, default=0, help="processes that prepare images (%(default)s)")
    add_run_options(parser, "bridge_vlm")
    return parser


def check(options: argparse.Namespace) -> None:
    """Fill in the default that depends on another.

    Raises:
        ValueError: an option that cannot be.
    """
    check_least(options, steps=1, batch_size=1, new_tokens=1, workers=0)
    if options.data is not None and not options.data.is_dir():
        raise ValueError(f"--data {options.data}: the folder does not exist.")
    if options.model is not None:
        check_model(options.model)
    if options.lr is None:
        options.lr = 1e-2 if options.trained == "bridge" else 1e-3 if options.model is None else 1e-5
    check_positive(options, "lr")


if __name__ == "__main__":
    run(main)
