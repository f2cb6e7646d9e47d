"""Finetune a Flux model, with LoRA or as a whole, on your images and captions, on a GPU that is smaller than the model.

    python examples/finetune_diffusion.py                              # no download: a tiny Flux on drawn shapes, on a CPU
    python examples/finetune_diffusion.py --model black-forest-labs/FLUX.1-dev --data photos --gradient-checkpointing
    python examples/finetune_diffusion.py --model FLUX.1-dev --data photos --full --lr 1e-5 --precision bf16-true

For people who know "block swap" from other trainers. Here the strategy does it: blocks are in host memory and pass through GPU
memory while others compute. You choose no number of blocks, and results are bit-identical to plain Lightning's.

This file is meant to be copied: it needs nothing else from this folder, and diffusers 0.42 or newer. `--data` is a folder with
image.png and image.txt, or with a metadata.jsonl of lines like {"file_name": "image.png", "text": "a red circle"}. `--output`
has the LoRA for `pipe.load_lora_weights` (with `--full`, the folder `transformer`), a sample image per validation, and last.ckpt.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

# ---------------------------------------------------------------------- the command line


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    add = parser.add_argument
    add("--model", help="hub name or folder of a diffusers Flux pipeline (default: a tiny one with random weights)")
    add("--data", type=Path, help="folder of images with captions (default: drawn shapes)")
    add("--resolution", type=int, help="side of a square image in pixels; others have about its area (512; tiny: 32)")
    add("--lora", type=int, metavar="RANK", help="train a LoRA of this rank (16)")
    add("--full", action="store_true", help="train all weights instead of a LoRA")
    add("--quantize-8bit", action="store_true", help="int8 weights under the LoRA, by torchao")
    add("--gradient-checkpointing", action="store_true", help="less memory for activations, more time")
    add("--ema", type=float, metavar="DECAY", help="average the weights (0.999); host memory for a second model")
    add(
        "--steps",
        type=int,
        default=300,
        help="total number of steps, a multiple of --validate-every; with --resume, including earlier ones (%(default)s)",
    )
    add("--validate-every", type=int, help="steps between validations, and between checkpoints (a third of --steps)")
    add("--batch-size", type=int, help="images per step (1; tiny: 8)")
    add("--lr", type=float, help="learning rate (1e-4; tiny: 5e-3)")
    add("--precision", default="bf16-mixed", choices=["32-true", "bf16-mixed", "bf16-true"], help="(%(default)s)")
    add(
        "--strategy",
        default="superpipeline",
        choices=["superpipeline", "auto"],
        help="auto for plain Lightning (%(default)s)",
    )
    add("--output", type=Path, default=Path("runs/finetune_diffusion"), help="folder for results (%(default)s)")
    add("--resume", action="store_true", help="continue from last.ckpt in --output")
    add("--seed", type=int, default=0, help="(%(default)s)")
    return parser


def check(options: argparse.Namespace) -> None:
    """Fill in defaults. Raises ValueError or OSError if an option is wrong."""
    for name, tiny, usual in (("resolution", 32, 512), ("batch_size", 8, 1), ("lr", 5e-3, 1e-4)):
        if getattr(options, name) is None:
            setattr(options, name, usual if options.model else tiny)
    if options.lora is not None and options.full:
        raise ValueError("--lora and --full exclude each other. Leave one of them out.")
    before = options.output / "options.json"
    earlier = json.loads(before.read_text()) if options.resume and before.is_file() else {}
    if options.lora is None:
        options.lora = earlier.get("lora", 16)
    if earlier and (options.full, options.lora) != (earlier["full"], earlier["lora"]):
        was = "--full" if earlier["full"] else f"--lora {earlier['lora']}"
        raise ValueError(f"--resume: the run in {options.output} had {was}. Give the same.")
    if options.validate_every is None:
        options.validate_every = earlier.get("validate_every", max(1, options.steps // 3))
    for name in ("steps", "validate_every", "batch_size", "resolution", "lora", "lr"):
        if getattr(options, name) <= 0:
            raise ValueError(f"--{name.replace('_', '-')} is {getattr(options, name)}. Expected more than 0.")
    if options.steps % options.validate_every:
        more = -(-options.steps // options.validate_every) * options.validate_every
        raise ValueError(
            f"--steps {options.steps} is not a multiple of --validate-every {options.validate_every}. For example --steps {more}."
        )
    if options.ema is not None and not 0 < options.ema < 1:
        raise ValueError(f"--ema is {options.ema}. Expected a decay between 0 and 1, such as 0.999.")
    if options.quantize_8bit and (options.full or options.ema):
        raise ValueError("--quantize-8bit is for a frozen model under a LoRA. Leave out --full and --ema.")
    if options.resume and not (options.output / "last.ckpt").is_file():
        raise ValueError(
            f"--resume: {options.output / 'last.ckpt'} does not exist. Give the --output of an earlier run."
        )
    if options.model and Path(options.model).exists() and not (Path(options.model) / "model_index.json").is_file():
        raise ValueError(
            f"--model {options.model}: expected the folder of a pipeline, with model_index.json, or a hub name."
        )


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the options, and report errors that show without a model."""
    parser = make_parser()
    options = parser.parse_args(argv)
    try:
        check(options)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    return options


if __name__ == "__main__":
    parse()  # reports wrong options before the slow imports that follow; main() reads them again

import lightning.pytorch as pl
import torch
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel
from diffusers.image_processor import VaeImageProcessor
from diffusers.pipelines.flux.pipeline_flux import calculate_shift
from lightning.pytorch.callbacks import Callback, EMAWeightAveraging, ModelCheckpoint
from peft import LoraConfig, get_peft_model_state_dict
from PIL import Image, ImageDraw, ImageOps
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Sampler, default_collate
from transformers import ByT5Tokenizer, CLIPTextConfig, CLIPTextModel, T5Config, T5EncoderModel

from sp_lightning import SuperpipelineStrategy

SAMPLE_STEPS, SAMPLE_GUIDANCE = 20, 3.5
VAE_STEPS = 200  # for the tiny model
Batch = dict[str, Tensor]
Item = tuple[Path, tuple[int, int]]  # the file of an encoded image and its caption; the image's width and height


def main(argv: Sequence[str] | None = None) -> Finetune:
    options = parse(argv)
    try:  # wrong input shows here, before any work
        if options.model and (kind := FluxPipeline.load_config(options.model)["_class_name"]) != "FluxPipeline":
            raise ValueError(f"--model {options.model} is a {kind}. Expected a FluxPipeline.")
        pairs = read_pairs(options.data) if options.data else None
    except (ValueError, OSError) as error:
        make_parser().error(str(error))
    options.output.mkdir(parents=True, exist_ok=True)
    kept = {name: getattr(options, name) for name in ("full", "lora", "validate_every")}  # a resumed run has the same
    (options.output / "options.json").write_text(json.dumps(kept))
    pairs = pairs or draw_shapes(options.output / "shapes")
    options.model = options.model or str(make_tiny_model(options.output / f"tiny-{options.seed}", pairs, options.seed))

    items = encode(options, pairs)
    training = [item for number, item in enumerate(items) if number % 10 or number >= 80]  # the others are held out
    files: Any = [file for file, _ in training], [file for file, _ in items[:80:10]]
    module = Finetune(load_transformer(options), options)
    if options.resume and not fits(options.output / "last.ckpt", module, options.strategy):
        make_parser().error(
            f"--resume: {options.output / 'last.ckpt'} is a checkpoint of another model or of a run with other options "
            "(--model). Give the --output of a run with the same options."
        )
    buckets = Buckets([size for _, size in training], options.batch_size, options.validate_every, module)
    # Each epoch of Lightning has as many steps as are between two validations, and ends with a checkpoint.
    saver = ModelCheckpoint(options.output, "last", save_on_train_epoch_end=True, enable_version_counter=False)
    ema = [EMAWeightAveraging(device="cpu", decay=options.ema)] if options.ema else []
    trainer = make_trainer(
        options,
        max_steps=options.steps,
        gradient_clip_val=1.0,
        callbacks=[*ema, Progress(options), saver],
    )
    trainer.fit(
        module,
        DataLoader(files[0], batch_sampler=buckets, collate_fn=load),
        DataLoader(files[1], batch_size=1, collate_fn=load),
        ckpt_path=options.output / "last.ckpt" if options.resume else None,
    )
    if options.full:
        module.transformer.save_pretrained(options.output / "transformer")
        print(f"Saved {options.output / 'transformer'}. Load it: FluxTransformer2DModel.from_pretrained(FOLDER)")
    else:
        FluxPipeline.save_lora_weights(options.output, get_peft_model_state_dict(module.transformer))
        print(
            f'Saved {options.output / "pytorch_lora_weights.safetensors"}. Load it: pipe.load_lora_weights("{options.output}")'
        )
    return module


def fits(file: Path, module: pl.LightningModule, strategy: str) -> bool:
    """Returns True if a checkpoint has this model's weights and trains the same ones."""
    checkpoint = torch.load(file, mmap=True)
    saved = {name: value.shape for name, value in checkpoint["state_dict"].items()}
    if strategy == "superpipeline":  # which may have left out frozen weights
        frozen = {name: p.shape for name, p in module.named_parameters(remove_duplicate=False) if not p.requires_grad}
        saved = frozen | saved
    trained = sum(len(group["params"]) for group in checkpoint["optimizer_states"][0]["param_groups"])
    same = saved == {name: value.shape for name, value in module.state_dict().items()}
    return same and trained == sum(p.requires_grad for p in module.parameters())


class Finetune(pl.LightningModule):
    """A Flux transformer, trained on cached latents and text embeddings."""

    def __init__(self, transformer: Any, options: argparse.Namespace) -> None:
        super().__init__()
        self.transformer, self.lr, self.seed = transformer, options.lr, options.seed
        self.scheduler = FlowMatchEulerDiscreteScheduler.from_pretrained(options.model, subfolder="scheduler")

    def velocity(self, x: Tensor, sigma: Tensor, batch: Batch, guidance: float = 1.0) -> Tensor:
        return self.transformer(
            hidden_states=x,
            timestep=sigma,
            guidance=torch.full_like(sigma, guidance) if self.transformer.config.guidance_embeds else None,
            encoder_hidden_states=batch["text"].to(x.dtype),
            pooled_projections=batch["pooled"].to(x.dtype),
            txt_ids=x.new_zeros(batch["text"].shape[1], 3),
            img_ids=batch["ids"][0],  # the same for all images of one size
            return_dict=False,
        )[0]

    def loss(self, batch: Batch, sigma: Tensor, noise: Tensor) -> Tensor:
        """Rectified flow: the target is the velocity on the straight line from the image (0) to the noise (1)."""
        latents, position = batch["latents"].to(noise.dtype), sigma[:, None, None]
        noisy = (1 - position) * latents + position * noise
        return F.mse_loss(self.velocity(noisy, sigma, batch).float(), (noise - latents).float())

    def draw(self, batch: Batch, seed: int) -> list[Tensor]:
        """Random numbers for the times and the noise, from the CPU: the same on each device, and after a resume."""
        latents, generator = batch["latents"], torch.Generator().manual_seed(seed)
        drawn = torch.randn(len(latents), generator=generator), torch.randn(latents.shape, generator=generator)
        return [each.to(latents.device).type(self.dtype) for each in drawn]

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        normal, noise = self.draw(batch, self.seed * 1_000_000 + self.global_step)
        return self.loss(batch, normal.sigmoid(), noise)  # logit-normal times, as for SD3 and Flux

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        _, noise = self.draw(batch, batch_idx)  # the same in each validation
        losses = [self.loss(batch, noise.new_full((1,), sigma), noise) for sigma in (0.2, 0.5, 0.8)]
        self.log("val_loss", torch.stack(losses).mean(), batch_size=1)
        if batch_idx == 0:
            self.sampled = self.sample(batch, noise), batch["ids"][0]

    def sample(self, batch: Batch, x: Tensor) -> Tensor:
        """Denoise in Euler steps, for the batch's caption."""
        sigmas = torch.linspace(1, 1 / SAMPLE_STEPS, SAMPLE_STEPS).tolist()
        self.scheduler.set_timesteps(sigmas=sigmas, mu=calculate_shift(x.shape[1]), device=x.device)
        for time in self.scheduler.timesteps:
            velocity = self.velocity(x, (time / 1000).to(x.dtype).expand(1), batch, SAMPLE_GUIDANCE)
            x = self.scheduler.step(velocity, time, x, return_dict=False)[0]
        return x

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=self.lr, weight_decay=0.01)


class Progress(Callback):
    """Prints losses, and saves each validation's sample as a PNG."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.output, self.steps, self.losses = options.output, options.steps, list[float]()
        # It stays on the CPU, for one image per validation: the strategy plans GPU memory without it.
        self.vae = AutoencoderKL.from_pretrained(options.model, subfolder="vae")

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))
        if trainer.global_step in (1, self.steps) or trainer.global_step % 25 == 0:
            recent = self.losses[-25:]
            print(f"step {trainer.global_step}/{self.steps}  loss {sum(recent) / len(recent):.3f}", flush=True)

    def on_validation_epoch_end(self, trainer: pl.Trainer, module: Any) -> None:
        latents, ids = (tensor.float().cpu() for tensor in module.sampled)
        height, width = (2 * int(ids[:, axis].max() + 1) for axis in (1, 2))
        latents = FluxPipeline._unpack_latents(latents, height, width, vae_scale_factor=1)
        with torch.no_grad():
            pixels = self.vae.decode(latents / self.vae.config.scaling_factor + self.vae.config.shift_factor).sample
        file = self.output / f"sample-{trainer.global_step:06}.png"
        VaeImageProcessor().postprocess(pixels)[0].save(file)
        print(f"step {trainer.global_step}/{self.steps}  val_loss {trainer.callback_metrics['val_loss']:.3f}  {file}")


def load_transformer(options: argparse.Namespace) -> FluxTransformer2DModel:
    pl.seed_everything(options.seed, verbose=False)
    # Weights that bf16-mixed trains are in float32. Frozen ones need 16 bits only, or 8.
    wide = options.precision == "32-true" or (options.full and options.precision == "bf16-mixed")
    dtype = torch.float32 if wide else torch.bfloat16
    transformer = FluxTransformer2DModel.from_pretrained(options.model, subfolder="transformer", dtype=dtype).train()
    if options.gradient_checkpointing:
        transformer.enable_gradient_checkpointing()
    if options.full:
        return transformer
    linear = [name for name, each in transformer.named_modules() if isinstance(each, nn.Linear)]
    targets = [name for name in linear if "transformer_blocks" in name and ".norm" not in name]
    transformer.requires_grad_(False)
    transformer.add_adapter(LoraConfig(r=options.lora, lora_alpha=options.lora, target_modules=targets))
    for parameter in transformer.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    if options.quantize_8bit:
        from torchao.quantization import Int8WeightOnlyConfig, quantize_

        quantize_(transformer, Int8WeightOnlyConfig(), lambda each, name: name.endswith(".base_layer"))
    return transformer


def make_trainer(options: argparse.Namespace, **more: Any) -> pl.Trainer:
    # save_frozen=False: a checkpoint has the LoRA without the base.
    strategy = SuperpipelineStrategy(save_frozen=False) if options.strategy == "superpipeline" else options.strategy
    quiet: dict[str, Any] = {
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
    }
    return pl.Trainer(strategy=strategy, devices=1, precision=options.precision, **quiet, **more)


# ---------------------------------------------------------------------- images and captions


def read_pairs(folder: Path) -> list[tuple[Path, str]]:
    """Read the names of images, and their captions. Raises ValueError or OSError if something is missing."""
    if not folder.is_dir():
        raise ValueError(f"--data {folder}: not a folder. Expected a folder of images with captions.")
    if (folder / "metadata.jsonl").is_file():
        lines = [json.loads(line) for line in (folder / "metadata.jsonl").read_text().splitlines() if line.strip()]
        if wrong := [line for line in lines if not {"file_name", "text"} <= set(line)]:
            raise ValueError(f'--data {folder}: metadata.jsonl has {wrong[0]}. Expected "file_name" and "text".')
        pairs = [(folder / line["file_name"], line["text"]) for line in lines]
    else:
        images = sorted(file for file in folder.iterdir() if file.suffix.lower() in (".png", ".jpg", ".jpeg", ".webp"))
        if without := [file for file in images if not file.with_suffix(".txt").is_file()]:
            caption = without[0].with_suffix(".txt").name
            raise ValueError(
                f"--data {folder}: {without[0].name} has no caption. Expected {caption} beside it, or metadata.jsonl."
            )
        pairs = [(file, file.with_suffix(".txt").read_text().strip()) for file in images]
    for file, _ in pairs:
        try:
            Image.open(file).verify()
        except (OSError, SyntaxError) as error:
            raise ValueError(f"--data {folder}: {file.name} is not a readable image ({error}).") from error
    if len(pairs) < 2:
        raise ValueError(f"--data {folder}: found {len(pairs)} images with captions. Expected at least 2.")
    return pairs


def encode(options: argparse.Namespace, pairs: list[tuple[Path, str]]) -> list[Item]:
    """Compute latents and text embeddings once, and keep them in files.

    The VAE and the text encoders are frozen, so training needs neither their memory (Flux's T5: 9 GB in 16 bits) nor their time.
    They pass through GPU memory as the transformer does.
    """
    patch = 2 ** len(AutoencoderKL.load_config(options.model, subfolder="vae")["block_out_channels"])  # pixels
    grid = max(patch, options.resolution // 8 // patch * patch)  # coarser than patches: fewer sizes, fuller batches
    items: list[Item] = []
    missing: Any = []
    for file, caption in pairs:
        width, height = ImageOps.exif_transpose(Image.open(file)).size
        sides = (options.resolution * (width / height) ** power for power in (0.5, -0.5))  # the image's aspect ratio
        width, height = (max(1, round(side / grid)) * grid for side in sides)
        key = repr((options.model, options.precision, width, height, caption)).encode() + file.read_bytes()
        target = options.output / "cache" / f"{hashlib.sha256(key).hexdigest()[:32]}.pt"
        items.append((target, (width, height)))
        if not target.is_file():
            missing.append((str(file), caption, str(target), width, height))
    if missing:
        print(f"Encoding {len(missing)} images and captions", flush=True)
        (options.output / "cache").mkdir(exist_ok=True)
        trainer = make_trainer(options)
        trainer.predict(Encoder(options), DataLoader(missing, batch_size=None), return_predictions=False)
    return items


class Encoder(pl.LightningModule):
    """Writes a file for each image."""

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__()
        dtype = torch.float32 if options.precision == "32-true" else torch.bfloat16
        self.pipe = FluxPipeline.from_pretrained(options.model, transformer=None, dtype=dtype)
        self.vae, self.text, self.text_2 = self.pipe.vae, self.pipe.text_encoder, self.pipe.text_encoder_2

    def predict_step(self, batch: tuple[str, str, str, int, int], batch_idx: int) -> str:
        file, caption, target, width, height = batch
        longest = min(512, self.pipe.tokenizer_2.model_max_length)
        text, pooled, _ = self.pipe.encode_prompt(caption, device=self.device, max_sequence_length=longest)
        image = ImageOps.exif_transpose(Image.open(file)).convert("RGB")
        pixels = VaeImageProcessor(vae_scale_factor=1).preprocess(image, height, width, resize_mode="crop")
        latents = self.vae.encode(pixels.to(self.device, text.dtype)).latent_dist.mode()
        latents = (latents - self.vae.config.shift_factor) * self.vae.config.scaling_factor
        rows, columns = (side // 2 for side in latents.shape[2:])
        ids = FluxPipeline._prepare_latent_image_ids(1, rows, columns, "cpu", torch.float32)
        latents = FluxPipeline._pack_latents(latents, *latents.shape)
        item = {"latents": latents[0].cpu(), "ids": ids, "text": text[0].cpu(), "pooled": pooled[0].cpu()}
        torch.save(item, f"{target}.part")
        Path(f"{target}.part").rename(target)  # the file is complete or does not exist
        return target


def load(files: list[Path]) -> Batch:
    return default_collate([torch.load(file) for file in files])


class Buckets(Sampler[list[int]]):
    """Batches of images of one size, in random order. An epoch has ``steps`` of them and continues after the module's last step.

    Each image is used once before any is used again. The last batch of a size may be smaller.
    """

    def __init__(self, sizes: list[tuple[int, int]], batch_size: int, steps: int, module: Any) -> None:
        self.sizes, self.batch_size, self.steps, self.module = sizes, batch_size, steps, module

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Iterator[list[int]]:
        done = self.module.global_step
        return islice(self.endless(), done, done + self.steps)

    def endless(self) -> Iterator[list[int]]:
        order = random.Random(self.module.seed)
        while True:
            batches = []
            for size in sorted(set(self.sizes)):
                bucket = [index for index, each in enumerate(self.sizes) if each == size]
                order.shuffle(bucket)
                batches += [bucket[i : i + self.batch_size] for i in range(0, len(bucket), self.batch_size)]
            order.shuffle(batches)
            yield from batches


# ---------------------------------------------------------------------- the defaults: drawn shapes, a tiny model


def draw_shapes(folder: Path) -> list[tuple[Path, str]]:
    folder.mkdir(exist_ok=True)
    chance = random.Random(0)
    for number in range(96):
        colour, shape = (
            chance.choice(["red", "green", "blue", "yellow"]),
            chance.choice(["circle", "square", "triangle"]),
        )
        width, height = chance.choice([(64, 64), (96, 64), (64, 96)])
        circle = chance.uniform(24, width - 24), chance.uniform(24, height - 24), chance.uniform(14, 22)
        image = Image.new("RGB", (width, height), "white")
        corners = {"circle": 60, "square": 4, "triangle": 3}[shape]
        ImageDraw.Draw(image).regular_polygon(circle, corners, fill=colour)
        image.save(folder / f"{number:02}.png")
        (folder / f"{number:02}.txt").write_text(f"a {colour} {shape}")
    return read_pairs(folder)


def make_tiny_model(folder: Path, pairs: list[tuple[Path, str]], seed: int) -> Path:
    """Make a Flux pipeline with random weights. Its VAE is trained for some seconds, so that samples are images."""
    if (folder / "model_index.json").is_file():
        return folder
    print("Making a tiny model", flush=True)
    pl.seed_everything(seed, verbose=False)
    vae = AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
        block_out_channels=(8, 16), norm_num_groups=4, latent_channels=4, mid_block_add_attention=False,
        use_quant_conv=False, use_post_quant_conv=False,
    )  # fmt: skip
    images = [Image.open(file).convert("RGB") for file, _ in pairs[:96]]
    pixels = VaeImageProcessor().preprocess(images, 32, 32, resize_mode="crop")
    optimizer = torch.optim.AdamW(vae.parameters(), lr=5e-3)
    for _ in range(VAE_STEPS):
        batch = pixels[torch.randint(len(pixels), (8,))]
        F.mse_loss(vae.decode(vae.encode(batch).latent_dist.mode()).sample, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    latents = vae.encode(pixels).latent_dist.mode()
    vae.register_to_config(shift_factor=latents.mean().item(), scaling_factor=1 / latents.std().item())
    tokenizer = ByT5Tokenizer(model_max_length=32)
    sizes = {"vocab_size": len(tokenizer), "num_hidden_layers": 2, "pad_token_id": 0, "eos_token_id": 1}
    clip = CLIPTextConfig(
        **sizes, hidden_size=32, intermediate_size=64, num_attention_heads=4, max_position_embeddings=32, bos_token_id=0
    )
    t5 = T5Config(**sizes, d_model=32, d_kv=8, d_ff=64, num_heads=4)
    transformer = FluxTransformer2DModel(
        in_channels=16, num_layers=2, num_single_layers=4, attention_head_dim=16, num_attention_heads=4,
        joint_attention_dim=32, pooled_projection_dim=32, guidance_embeds=True, axes_dims_rope=(4, 6, 6),
    )  # fmt: skip
    text_encoders = CLIPTextModel(clip), tokenizer, T5EncoderModel(t5), tokenizer
    FluxPipeline(FlowMatchEulerDiscreteScheduler(), vae, *text_encoders, transformer).save_pretrained(folder)
    return folder


if __name__ == "__main__":
    main()
