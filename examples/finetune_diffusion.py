"""Fine-tune a Flux model, with LoRA or as a whole, on your images and captions. Copy it with common.py.

    python examples/finetune_diffusion.py                              # no download: a tiny Flux on drawn shapes, on a CPU
    python examples/finetune_diffusion.py --model black-forest-labs/FLUX.1-dev --data photos --lora 16
    python examples/finetune_diffusion.py --model FLUX.1-dev --data photos --full --lr 1e-5 --precision bf16-true
    python examples/finetune_diffusion.py --resume                     # or --dial, or --strategy auto (plain Lightning)

For people who know "block swap" from other trainers. Here the strategy does it: blocks are in CPU memory and pass through GPU
memory while others compute. You choose no number of blocks, and results are bit-identical to plain Lightning's.

It needs diffusers 0.42 or newer. ``--data`` is a folder with image.png and image.txt, or with a metadata.jsonl of lines like
``{"file_name": "image.png", "text": "a red circle"}``. ``--output`` has a sample image of each validation and the LoRA for
``pipe.load_lora_weights(FOLDER)`` (with ``--full``, the folder ``transformer``): pytorch_lora_weights.safetensors with keys like
``transformer.transformer_blocks.0.attn.to_q.lora_A.weight``. Its scale is 1, because alpha is the rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import common


def parse(argv: Sequence[str] | None = None) -> Any:
    parser = common.training_options(
        __doc__,
        "finetune_diffusion",
        model="hub name or folder of a diffusers Flux pipeline (default: a tiny one, random weights)",
        data="folder of images with captions (default: drawn shapes)",
        lr="1e-4 with --model, else 5e-3",
        batch_size=None,
        steps=300,
        rows="images",
        without=["--accumulate-grad-batches", "--epochs"],
    )
    add = parser.add_argument
    add("--resolution", type=int, help="side of a square image in pixels; others have about its area (512; tiny: 32)")
    add("--full", action="store_true", help="train all weights instead of a LoRA, whose default rank is 16")
    add("--quantize-8bit", action="store_true", help="int8 weights under the LoRA, by torchao")
    add("--ema", type=float, metavar="DECAY", help="average the weights (0.999); CPU memory for a second model")
    options = common.read_options(parser, argv)
    options.resolution = options.resolution or (512 if options.model else 32)
    options.batch_size = options.batch_size or (1 if options.model else 8)
    if options.lora and options.full:
        options.error("--lora and --full exclude each other. Leave one of them out")
    options.lora = options.lora or (None if options.full else 16)
    if options.quantize_8bit and (options.full or options.ema):
        options.error("--quantize-8bit: is for a frozen model under a LoRA. Leave out --full and --ema")
    return options


if __name__ == "__main__":
    parse()  # reports wrong options before the slow imports that follow; main() reads them again

import lightning.pytorch as pl
import torch
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel
from diffusers.image_processor import VaeImageProcessor
from diffusers.pipelines.flux.pipeline_flux import calculate_shift
from lightning.pytorch.callbacks import EMAWeightAveraging, LambdaCallback
from peft import LoraConfig, get_peft_model_state_dict
from PIL import Image, ImageOps
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, default_collate

from sp_lightning import SuperpipelineStrategy

SAMPLE_STEPS, SAMPLE_GUIDANCE = 20, 3.5
Batch = dict[str, Tensor]


class Finetune(pl.LightningModule):
    """A Flux transformer, trained on cached latents and text embeddings."""

    def __init__(self, transformer: Any, model: str, lr: float, seed: int) -> None:
        super().__init__()
        self.transformer, self.lr, self.seed = transformer, lr, seed
        self.scheduler = FlowMatchEulerDiscreteScheduler.from_pretrained(model, subfolder="scheduler")

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
        loss = self.loss(batch, normal.sigmoid(), noise)  # logit-normal times, as for SD3 and Flux
        self.log("loss", loss, prog_bar=True, batch_size=len(noise))
        return loss

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


def load_transformer(options: Any) -> FluxTransformer2DModel:
    pl.seed_everything(options.seed, verbose=False)
    dtype, folder = common.load_dtype(options), "transformer"
    transformer = FluxTransformer2DModel.from_pretrained(options.model, subfolder=folder, dtype=dtype).train()
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


class Encoder(pl.LightningModule):
    """Writes latents and text embeddings to a file for each image.

    The VAE and the text encoders are frozen, so training needs neither their memory (Flux's T5: 9 GB in 16 bits) nor their
    time. They pass through GPU memory as the transformer does.
    """

    def __init__(self, options: Any) -> None:
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


def save_sample(options: Any, trainer: pl.Trainer, module: Any) -> None:
    """Saves the validation's sample as a PNG. The VAE stays on the CPU: the strategy plans GPU memory without it."""
    latents, ids = (tensor.float().cpu() for tensor in module.sampled)
    height, width = (2 * int(ids[:, axis].max() + 1) for axis in (1, 2))
    latents = FluxPipeline._unpack_latents(latents, height, width, vae_scale_factor=1)
    vae = AutoencoderKL.from_pretrained(options.model, subfolder="vae")
    with torch.no_grad():
        pixels = vae.decode(latents / vae.config.scaling_factor + vae.config.shift_factor).sample
    VaeImageProcessor().postprocess(pixels)[0].save(options.output / f"sample-{trainer.global_step:06}.png")


def main(argv: Sequence[str] | None = None) -> Finetune:
    options = parse(argv)
    common.prepare(options)

    def make_trainer(**more: Any) -> pl.Trainer:
        # Other options: keep_on_gpu, k, optimizer_on, ... (examples/guide/options.md)
        ours = SuperpipelineStrategy(
            gpu_memory=options.gpu_memory, host_memory=options.host_memory, disk=options.disk,
            optimizer_overlap=options.optimizer_overlap, save_frozen=False,
        )  # fmt: skip
        strategy = "auto" if options.strategy == "auto" else ours  # auto is plain Lightning
        return pl.Trainer(strategy=strategy, devices=1, **common.settings(options), **more)

    with common.errors_in_the_input(options):  # before any work
        encoding = make_trainer(logger=False, enable_checkpointing=False, enable_progress_bar=False)
        if options.model and (kind := FluxPipeline.load_config(options.model)["_class_name"]) != "FluxPipeline":
            raise ValueError(f"--model {options.model}: a {kind}. Expected a FluxPipeline")
        pairs = common.read_pairs(Path(options.data)) if options.data else None
        run = common.Run(options)
        if options.ema and run.steps % run.every:
            raise ValueError(f"--ema: --steps {run.steps} is not a multiple of --validate-every {run.every}")
    given = options.model
    pairs = pairs or common.read_pairs(common.draw_shapes(options.output / "shapes"))
    options.model = options.model or str(
        common.small_flux(options.output / f"tiny-{options.seed}", pairs, options.seed)
    )

    patch = 2 ** len(AutoencoderKL.load_config(options.model, subfolder="vae")["block_out_channels"])  # pixels
    grid = max(patch, options.resolution // 8 // patch * patch)  # coarser than patches: fewer sizes, fuller batches
    items, missing = common.cached_images(options, pairs, grid)
    if missing:
        print(f"Encoding {len(missing)} images and captions", flush=True)
        encoding.predict(Encoder(options), DataLoader(missing, batch_size=None), return_predictions=False)
    held_out, training = common.split(items, max(10, len(items) // 8))  # at most 8 for validation
    sizes = [size for _, size in training]
    order = common.batches_of_one_size(sizes, options.batch_size, run.steps, options.seed)
    order = order[run.done :] + order[: run.done]  # Lightning counts the first ones of a resumed run as read
    files: Any = [[file for file, _ in part] for part in (training, held_out)]
    batches: Any = DataLoader(files[0], batch_sampler=order, collate_fn=load)
    validation: Any = DataLoader(files[1], collate_fn=load)

    def make_module() -> Finetune:
        lr = options.lr or (1e-4 if given else 5e-3)
        return Finetune(load_transformer(options), options.model, lr, options.seed)

    module = make_module()
    if options.dial:
        print(common.measure(options, make_module, batches))
        return module
    common.check_resume(options, module)
    average = [EMAWeightAveraging(device="cpu", decay=options.ema)] if options.ema else []
    sampling = LambdaCallback(on_validation_epoch_end=lambda trainer, module: save_sample(options, trainer, module))
    trainer = make_trainer(**run.schedule(*average, sampling) | {"num_sanity_val_steps": 0})
    trainer.fit(module, batches, validation, ckpt_path=options.resume)
    run.finish(trainer, module, validation, sum(map(len, order[: run.steps - run.done])), "images")
    if options.full:
        module.transformer.save_pretrained(options.output / "transformer")
        print(f"Saved: {options.output / 'transformer'}. To load: FluxTransformer2DModel.from_pretrained(FOLDER)")
    else:
        FluxPipeline.save_lora_weights(options.output, get_peft_model_state_dict(module.transformer))
        print(f'Saved: the LoRA in {options.output}. To load: pipe.load_lora_weights("{options.output}")')
    return module


if __name__ == "__main__":
    main()
