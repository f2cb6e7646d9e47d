"""The catalogue of the model matrix: real models of the libraries, tiny, with random weights and with dropout."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import peft
import pytest
import timm
import torch
import transformers
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torchvision import models as vision
from torchvision.models import detection, segmentation
from torchvision.models.convnext import CNBlockConfig
from torchvision.models.video import SwinTransformer3d, VideoResNet
from torchvision.models.video import resnet as r3

from tests.support.models import Module, Transformer, llama
from tests.support.runs import Batches

Draw = Callable[[], Any]


@dataclass(frozen=True)
class Entry:
    """One row of the matrix.

    Attributes:
        name: unique.
        make: an unchanged LightningModule.
        draw: a batch, from torch's random state.
    """

    name: str
    make: Callable[[], Module]
    draw: Draw

    def batches(self, count: int = 3) -> Batches:
        """The same ones in each call."""
        with torch.random.fork_rng():
            torch.manual_seed(1)
            return [self.draw() for _ in range(count)]


class Outputs(Module):
    """Any model: trains the floating-point tensors that it returns towards one, and predicts all of them."""

    def outputs(self, batch: Any) -> list[Tensor]:
        found = self.net(*batch) if isinstance(batch, tuple) else self.net(**batch)
        return [each for each in pytree.tree_leaves(found) if isinstance(each, Tensor)]

    def loss(self, batch: Any) -> Tensor:
        return torch.stack(
            [(each - 1).square().mean() for each in self.outputs(batch) if each.is_floating_point()]
        ).sum()

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self.outputs(batch)


class Pretrained(Transformer):
    """A transformers model that computes its loss itself; predicts all tensors that it returns."""

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return {name: each for name, each in self.net(**batch).items() if isinstance(each, Tensor)}


# ---------------------------------------------------------------------- batches

IMAGE = 60  # the token that stands for a part of an image; texts have smaller ones


def ids(*shape: int) -> Tensor:
    return torch.randint(3, IMAGE, shape)


def text() -> dict[str, Any]:
    tokens = ids(2, 8)
    return {"input_ids": tokens, "labels": tokens}


def image() -> Tensor:
    return torch.randn(2, 3, 32, 32)


def classes(*shape: int) -> Tensor:
    return torch.randint(0, 5, (2, *shape))


def labelled() -> dict[str, Any]:
    return {"pixel_values": image(), "labels": classes()}


def pairs(**more: Any) -> dict[str, Any]:
    """Images with their texts."""
    return {"input_ids": ids(2, 8), "pixel_values": image(), **more}


def described(parts: int, *pixels: int) -> dict[str, Any]:
    """Texts that begin with an image of so many parts."""
    tokens = torch.cat([torch.full((2, parts), IMAGE), ids(2, 8)], 1)
    return {"input_ids": tokens, "labels": tokens, "pixel_values": torch.randn(*(pixels or (2, 3, 32, 32)))}


def grids() -> dict[str, Any]:
    """Qwen2-VL's images: patches in a row, and how they lie."""
    batch = described(1, 8, 96)
    seen = (batch["input_ids"] == IMAGE).int()
    return {**batch, "image_grid_thw": torch.tensor([[1, 2, 2], [1, 2, 2]]), "mm_token_type_ids": seen}


def pixels(*shape: int) -> Draw:
    return lambda: (torch.randn(2, 3, *shape),)


def boxes(label: str) -> list[dict[str, Tensor]]:
    return [{"boxes": torch.tensor([[0.2, 0.2, 0.6, 0.6]]), label: torch.tensor([1])} for _ in range(2)]


# ---------------------------------------------------------------------- transformers

LIBRARY = object()  # leaves a size to the library
# What the libraries call sizes and dropout: a configuration keeps what it knows.
SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 32, "head_dim": 8, "use_cache": False,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "dropout": 0.1, "dropout_rate": 0.1, "activation_dropout": 0.1, "attention_dropout": 0.1, "attn_pdrop": 0.1,
    "embd_pdrop": 0.1, "resid_pdrop": 0.1, "hidden_dropout": 0.1, "hidden_dropout_prob": 0.1,
    "attention_probs_dropout_prob": 0.1, "drop_path_rate": 0.1,
    "image_size": 32, "patch_size": 16, "num_labels": 5,
}  # fmt: skip
BART: dict[str, Any] = {
    "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "decoder_start_token_id": 1,
}  # fmt: skip
T5: dict[str, Any] = {
    "d_model": 32, "d_kv": 8, "d_ff": 48, "num_heads": 4, "num_layers": 2, "num_decoder_layers": 2,
    "decoder_start_token_id": 0,
}  # fmt: skip
NESTED: dict[str, Any] = dict.fromkeys(("hidden_size", "num_hidden_layers", "num_attention_heads"), LIBRARY)
STAGED: dict[str, Any] = {**NESTED, "depths": [1, 2], "hidden_sizes": [16, 32], "num_stages": 2, "patch_size": 4}


def hf(cls: str, draw: Draw = text, **sizes: Any) -> Entry:
    """A model of transformers, named as its configuration names it."""
    model = getattr(transformers, cls)

    def make() -> Module:
        chosen = {name: value for name, value in {**SIZES, **sizes}.items() if value is not LIBRARY}
        return Pretrained(model(model.config_class(**chosen)).train())

    return Entry(model.config_class.model_type, make, draw)


def vlm(cls: str, draw: Draw, vision: dict[str, Any], text: dict[str, Any], **sizes: Any) -> Entry:
    """A model of a vision and a language part, each with a configuration of its own."""
    parts = {"vision_config": {**SIZES, **vision}, "text_config": {**SIZES, **text}}
    return hf(cls, draw, **NESTED, **parts, image_token_id=IMAGE, image_token_index=IMAGE, **sizes)


DECODERS = [
    hf("LlamaForCausalLM"),
    hf("MistralForCausalLM", sliding_window=4),
    hf("Qwen2ForCausalLM"),
    hf("Qwen3ForCausalLM"),
    hf("GemmaForCausalLM"),
    hf("Gemma2ForCausalLM", sliding_window=4),
    hf("Gemma3ForCausalLM", sliding_window=4),
    hf("PhiForCausalLM"),
    hf("Phi3ForCausalLM"),
    hf("GPT2LMHeadModel"),
    hf("GPTNeoForCausalLM", attention_types=[[["global", "local", "global"], 1]], window_size=4),
    hf("GPTNeoXForCausalLM"),
    hf("GPTJForCausalLM", rotary_dim=4),
    hf("GPTBigCodeForCausalLM"),
    hf("OPTForCausalLM", ffn_dim=48, word_embed_proj_dim=16, layerdrop=0.3),
    hf("BloomForCausalLM"),
    hf("FalconForCausalLM", head_dim=LIBRARY),
    hf("MptForCausalLM", max_seq_len=32),
    hf("StableLmForCausalLM"),
    hf("Olmo2ForCausalLM"),
    hf("CohereForCausalLM"),
    hf("Starcoder2ForCausalLM"),
    hf("GraniteForCausalLM"),
    hf("Glm4ForCausalLM"),
    hf("SmolLM3ForCausalLM"),
    hf("NemotronForCausalLM"),
]
EXPERTS = [
    hf("MixtralForCausalLM", num_local_experts=4),  # experts are stacked parameters
    hf("Qwen3MoeForCausalLM", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16),
    hf("OlmoeForCausalLM", num_experts=4, num_experts_per_tok=2),
    hf("GptOssForCausalLM", num_local_experts=4, num_experts_per_tok=2, sliding_window=4),
    hf(
        "DeepseekV3ForCausalLM", n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1,
        moe_intermediate_size=16, first_k_dense_replace=1, num_key_value_heads=4, head_dim=LIBRARY, v_head_dim=8,
        q_lora_rank=16, kv_lora_rank=8, qk_rope_head_dim=4, qk_nope_head_dim=4,
    ),
    hf("SwitchTransformersForConditionalGeneration", **T5, num_experts=4),  # experts are modules
    hf("NllbMoeForConditionalGeneration", **BART, num_experts=4, encoder_sparse_step=2, decoder_sparse_step=2),
]  # fmt: skip
RECURRENT = [
    hf("MambaForCausalLM", state_size=4),
    hf("Mamba2ForCausalLM", state_size=4, num_heads=8, n_groups=2, chunk_size=4),
    hf("RwkvForCausalLM", context_length=16, attention_hidden_size=32),
    hf("RecurrentGemmaForCausalLM", lru_width=32, attention_window_size=4),
    hf("JambaForCausalLM", num_experts=2, attn_layer_period=2, attn_layer_offset=1, mamba_d_state=4),
]
ENCODERS = [
    hf("BertForMaskedLM"),
    hf("RobertaForMaskedLM"),
    hf("AlbertForMaskedLM", embedding_size=16),
    hf("DebertaV2ForMaskedLM", relative_attention=True, pos_att_type=["p2c", "c2p"]),
    hf("ElectraForMaskedLM", embedding_size=16),
    hf("DistilBertForMaskedLM", hidden_dim=48),
    hf("ModernBertForMaskedLM", mlp_dropout=0.1),
    hf("MPNetForMaskedLM"),
    hf("XLNetLMHeadModel", d_head=8, d_inner=48, max_position_embeddings=LIBRARY),
]
ENCODER_DECODERS = [
    hf("T5ForConditionalGeneration", **T5),
    hf("BartForConditionalGeneration", **BART, encoder_layerdrop=0.3),
    hf("PegasusForConditionalGeneration", **BART),
    hf("M2M100ForConditionalGeneration", **BART),
    hf(
        "WhisperForConditionalGeneration", lambda: {"input_features": torch.randn(2, 8, 16), "labels": ids(2, 8)},
        **BART, num_mel_bins=8, max_source_positions=8, max_target_positions=16,
    ),
    hf(
        "Wav2Vec2ForCTC", lambda: {"input_values": torch.randn(2, 400), "labels": ids(2, 3)}, layerdrop=0.3,
        conv_dim=[16, 16], conv_kernel=[8, 4], conv_stride=[4, 4], num_feat_extract_layers=2,
        num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2, mask_time_length=2,
    ),
]  # fmt: skip
VISION = [
    hf("ViTForImageClassification", labelled),
    hf("DeiTForImageClassification", labelled),
    hf("BeitForImageClassification", labelled),
    hf("Dinov2ForImageClassification", labelled),
    hf("SwinForImageClassification", labelled, **STAGED, num_heads=[2, 4], embed_dim=16, window_size=4, head_dim=LIBRARY),
    hf("ConvNextForImageClassification", labelled, **STAGED),
    hf("ResNetForImageClassification", labelled, **STAGED, embedding_size=16),
    hf(
        "SegformerForSemanticSegmentation", lambda: {"pixel_values": image(), "labels": classes(32, 32)},
        **{**STAGED, "num_attention_heads": [2, 4]}, num_encoder_blocks=2, sr_ratios=[2, 1], mlp_ratios=[2, 2],
        patch_sizes=[7, 3], strides=[4, 2], decoder_hidden_size=32,
    ),
    hf(
        "DetrForObjectDetection", lambda: {"pixel_values": image(), "labels": boxes("class_labels")},
        **{**BART, **NESTED}, num_queries=4,
        backbone_config={
            "model_type": "resnet", "depths": [1, 2], "hidden_sizes": [16, 32], "embedding_size": 16,
            "out_features": ["stage2"],
        },
    ),
    hf(
        "ViTMAEForPreTraining", lambda: {"pixel_values": image()}, patch_size=8, decoder_hidden_size=32,
        decoder_num_hidden_layers=2, decoder_num_attention_heads=4, decoder_intermediate_size=48,
    ),
]  # fmt: skip
VISION_LANGUAGE = [
    vlm(
        "CLIPModel", lambda: pairs(return_loss=True), {"model_type": "clip_vision_model"},
        {"model_type": "clip_text_model"}, projection_dim=16,
    ),
    vlm(
        "SiglipModel", lambda: pairs(return_loss=True), {"model_type": "siglip_vision_model"},
        {"model_type": "siglip_text_model"},
    ),
    vlm(
        "LlavaForConditionalGeneration", lambda: described(4), {"model_type": "clip_vision_model"},
        {"model_type": "llama"},
    ),
    vlm(
        "PaliGemmaForConditionalGeneration", lambda: described(4),
        {"model_type": "siglip_vision_model", "vision_use_head": False, "projection_dim": 32}, {"model_type": "gemma"},
        projection_dim=32,
    ),
    vlm(
        "Qwen2VLForConditionalGeneration", grids,
        {"depth": 3, "embed_dim": 32, "num_heads": 4, "patch_size": 4, "mlp_ratio": 2},
        {"rope_parameters": {"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 1e4}},
        vision_start_token_id=61, vision_end_token_id=62, video_token_id=63,
    ),
    vlm("Idefics3ForConditionalGeneration", lambda: described(1, 2, 1, 3, 32, 32), {}, {"model_type": "llama"}),
    vlm(
        "Blip2ForConditionalGeneration", lambda: described(4), {},
        {"model_type": "opt", "ffn_dim": 48, "word_embed_proj_dim": 32},
        qformer_config={**SIZES, "encoder_hidden_size": 32}, num_query_tokens=4,
    ),
    vlm("BlipForConditionalGeneration", lambda: described(0), {}, {"encoder_hidden_size": 32}),
    hf("ViltForQuestionAnswering", lambda: pairs(labels=torch.rand(2, 5))),
]  # fmt: skip

# ---------------------------------------------------------------------- torchvision, timm, diffusers, peft


IMAGES = pixels(32, 32)


def net(name: str, make: Callable[[], nn.Module], draw: Draw = IMAGES) -> Entry:
    return Entry(name, lambda: Outputs(make()), draw)


def backbone() -> Any:
    """Stages of a ResNet, as detectors take them."""
    found = vision.ResNet(vision.resnet.BasicBlock, [1, 1, 1, 1])
    stages: Any = nn.Sequential(found.conv1, found.bn1, found.relu, found.maxpool, found.layer1, found.layer2)
    stages.out_channels = 128
    return stages


def anchors() -> Any:
    return detection.anchor_utils.AnchorGenerator(((16,),), ((1.0,),))


def faster_rcnn() -> nn.Module:
    return detection.FasterRCNN(
        backbone(), rpn_anchor_generator=anchors(), min_size=32, max_size=32, box_score_thresh=0.0,
        box_detections_per_img=5, box_head=detection.faster_rcnn.TwoMLPHead(128 * 7 * 7, 32),
        box_predictor=detection.faster_rcnn.FastRCNNPredictor(32, 5),
    )  # fmt: skip


def retinanet() -> nn.Module:
    return detection.RetinaNet(
        backbone(), 5, anchor_generator=anchors(), min_size=32, max_size=32, score_thresh=0.0, detections_per_img=5
    )


def deeplab() -> nn.Module:
    return segmentation.DeepLabV3(
        vision._utils.IntermediateLayerGetter(backbone(), {"5": "out"}),
        segmentation.deeplabv3.DeepLabHead(128, 5, (2, 4)),
    )


def r3d() -> nn.Module:
    return VideoResNet(r3.BasicBlock, [r3.Conv3DSimple] * 4, [1, 1, 1, 1], r3.BasicStem, 5)


def detected() -> Any:
    """Images with boxes in pixels."""
    targets = [{**each, "boxes": each["boxes"] * 32} for each in boxes("labels")]
    return list(torch.rand(2, 3, 32, 32)), targets


TORCHVISION = [
    net("torchvision-resnet", lambda: vision.ResNet(vision.resnet.Bottleneck, [1, 1, 2, 1], 5, width_per_group=8)),
    net("torchvision-vit", lambda: vision.VisionTransformer(32, 16, 3, 4, 32, 48, dropout=0.1, num_classes=5)),
    net(
        "torchvision-swin",
        lambda: vision.SwinTransformer([4, 4], 16, [1, 2], [2, 4], [4, 4], dropout=0.1, num_classes=5),
    ),
    net(
        "torchvision-convnext",
        lambda: vision.ConvNeXt([CNBlockConfig(16, 32, 1), CNBlockConfig(32, None, 2)], 0.1, num_classes=5),
    ),
    net("densenet", lambda: vision.DenseNet(8, (2, 2, 2), 16, drop_rate=0.1, num_classes=5)),
    net("densenet-checkpointed", lambda: vision.DenseNet(8, (2, 2, 2), 16, num_classes=5, memory_efficient=True)),
    net("mobilenet_v3", lambda: vision.mobilenet_v3_small(num_classes=5)),
    net("efficientnet", lambda: vision.efficientnet_b0(num_classes=5)),
    net("regnet", lambda: vision.regnet_y_400mf(num_classes=5)),
    net("googlenet", lambda: vision.googlenet(num_classes=5, aux_logits=False, init_weights=False)),
    net("shufflenet", lambda: vision.shufflenet_v2_x0_5(num_classes=5)),
    net("squeezenet", lambda: vision.squeezenet1_1(num_classes=5)),
    net("maxvit", lambda: vision.MaxVit((32, 32), 16, 2, [16, 32], [1, 1], 8, 0.1, num_classes=5)),
    net("fasterrcnn", faster_rcnn, detected),
    net("retinanet", retinanet, detected),
    net("deeplabv3", deeplab),
    # One frame: with 2, and with images of 1 × 1, torch 2.15's bfloat16 weight gradient reads what nobody wrote.
    net("r3d", r3d, pixels(1, 32, 32)),
    net(
        "swin3d", lambda: SwinTransformer3d([2, 4, 4], 16, [1, 2], [2, 4], [2, 4, 4], num_classes=5), pixels(4, 16, 16)
    ),
]


def tm(name: str, size: int = 32, **sizes: Any) -> Entry:
    """A model of timm."""
    return net(f"timm-{name}", lambda: timm.create_model(name, num_classes=5, **sizes), pixels(size, size))


SMALL: dict[str, Any] = {"embed_dim": 32, "depth": 3, "num_heads": 4, "proj_drop_rate": 0.1, "drop_path_rate": 0.1}
TIMM = [
    tm("vit_tiny_patch16_224", **SMALL, img_size=32),
    tm("eva02_tiny_patch14_224", 28, **SMALL, img_size=28),
    tm("mobilevit_xxs", drop_rate=0.1),
    tm("convnextv2_atto", depths=(1, 1, 2, 1), dims=(16, 16, 32, 32), drop_path_rate=0.1),
    tm("nf_resnet26", width_factor=0.125, drop_rate=0.1),
]


def diffusers() -> Any:
    """The library. A machine without it, as the one with a GPU is, skips the tests of these models, and of no others."""
    return pytest.importorskip("diffusers")


def timed(**more: Any) -> dict[str, Any]:
    return {"timestep": torch.randint(0, 1000, (2,)), **more}


def latents() -> Tensor:
    return torch.randn(2, 4, 8, 8)


def frames() -> Tensor:
    """Latents of a video: batch, channels, frames, height, width."""
    return torch.randn(2, 4, 2, 8, 8)


def prompted() -> dict[str, Tensor]:
    return {"encoder_hidden_states": torch.randn(2, 5, 32)}


def prompts() -> dict[str, Tensor]:
    return {**prompted(), "pooled_projections": torch.randn(2, 16)}


def masked(size: int = 5) -> dict[str, Tensor]:
    """A text of full length, and one that is filled up."""
    mask = torch.ones(2, size, dtype=torch.bool)
    mask[1, 3:] = False
    return {"encoder_attention_mask": mask}


HEADS: dict[str, Any] = {"num_attention_heads": 4, "attention_head_dim": 8}
DIFFUSION = [
    net(
        "unet",
        lambda: diffusers().UNet2DConditionModel(
            sample_size=8, block_out_channels=(16, 32), layers_per_block=1, norm_num_groups=8, cross_attention_dim=16,
            attention_head_dim=4, dropout=0.1, down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
            up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        ),
        lambda: timed(sample=latents(), encoder_hidden_states=torch.randn(2, 5, 16)),
    ),
    net(
        "dit",
        lambda: diffusers().DiTTransformer2DModel(
            **HEADS, num_layers=3, dropout=0.1, sample_size=8, num_embeds_ada_norm=10, norm_num_groups=4
        ),
        lambda: timed(hidden_states=latents(), class_labels=classes()),
    ),
    net(
        "sd3",
        lambda: diffusers().SD3Transformer2DModel(
            **HEADS, num_layers=3, sample_size=8, in_channels=4, out_channels=4, joint_attention_dim=32,
            caption_projection_dim=32, pooled_projection_dim=16, pos_embed_max_size=8,
        ),
        lambda: timed(hidden_states=latents(), **prompts()),
    ),
    net(
        "flux",
        lambda: diffusers().FluxTransformer2DModel(
            **HEADS, num_layers=2, num_single_layers=2, in_channels=4, joint_attention_dim=32,
            pooled_projection_dim=16, axes_dims_rope=(2, 2, 4),
        ),
        lambda: timed(
            hidden_states=torch.randn(2, 6, 4), img_ids=torch.zeros(6, 3), txt_ids=torch.zeros(5, 3), **prompts()
        ),
    ),
    net(
        "flux2",
        lambda: diffusers().Flux2Transformer2DModel(
            **HEADS, num_layers=2, num_single_layers=2, in_channels=4, joint_attention_dim=32,
            timestep_guidance_channels=16, axes_dims_rope=(2, 2, 2, 2),
        ),
        lambda: timed(
            hidden_states=torch.randn(2, 6, 4), img_ids=torch.zeros(6, 4), txt_ids=torch.zeros(5, 4),
            guidance=torch.rand(2), **prompted(),
        ),
    ),
    net(
        "qwen_image",
        lambda: diffusers().QwenImageTransformer2DModel(
            **HEADS, num_layers=3, in_channels=16, out_channels=4, joint_attention_dim=32, axes_dims_rope=(2, 2, 4)
        ),
        lambda: timed(
            hidden_states=torch.randn(2, 6, 16), img_shapes=[[(1, 2, 3)]] * 2, **prompted(),
            encoder_hidden_states_mask=masked()["encoder_attention_mask"],
        ),
    ),
    net(
        "z_image",
        lambda: diffusers().ZImageTransformer2DModel(
            in_channels=4, dim=32, n_layers=2, n_refiner_layers=1, n_heads=4, n_kv_heads=4, cap_feat_dim=32,
            axes_dims=[2, 2, 4], axes_lens=[96, 16, 16],
        ),
        lambda: {
            "x": [torch.randn(4, 1, 8, 8), torch.randn(4, 1, 8, 4)], "t": torch.rand(2),
            "cap_feats": [torch.randn(5, 32), torch.randn(3, 32)],
        },
    ),
    net(
        "lumina2",
        lambda: diffusers().Lumina2Transformer2DModel(
            sample_size=8, in_channels=4, hidden_size=32, num_layers=2, num_refiner_layers=1, num_attention_heads=4,
            num_kv_heads=2, multiple_of=16, axes_dim_rope=(2, 2, 4), axes_lens=(32, 16, 16), cap_feat_dim=32,
        ),
        lambda: {"hidden_states": latents(), "timestep": torch.rand(2), **prompted(), **masked()},
    ),
    net(
        "sana",
        lambda: diffusers().SanaTransformer2DModel(
            **HEADS, num_layers=3, dropout=0.1, in_channels=4, out_channels=4, num_cross_attention_heads=4,
            cross_attention_head_dim=8, cross_attention_dim=32, caption_channels=32, sample_size=8,
        ),
        lambda: timed(hidden_states=latents(), **prompted(), **masked()),
    ),
    net(
        "wan",
        lambda: diffusers().WanTransformer3DModel(
            **HEADS, num_layers=3, in_channels=4, out_channels=4, text_dim=32, freq_dim=16, ffn_dim=48
        ),
        lambda: timed(hidden_states=frames(), **prompted()),
    ),
    net(
        "ltx",
        lambda: diffusers().LTXVideoTransformer3DModel(
            **HEADS, num_layers=3, in_channels=4, out_channels=4, cross_attention_dim=32, caption_channels=32
        ),
        lambda: timed(
            hidden_states=torch.randn(2, 8, 4), num_frames=2, height=2, width=2, **prompted(), **masked()
        ),
    ),
    net(
        "cogvideox",
        lambda: diffusers().CogVideoXTransformer3DModel(
            **HEADS, num_layers=3, dropout=0.1, in_channels=4, out_channels=4, time_embed_dim=16, text_embed_dim=32,
            sample_width=8, sample_height=8, sample_frames=5, max_text_seq_length=5,
        ),
        lambda: timed(hidden_states=frames().transpose(1, 2), **prompted()),
    ),
    net(
        "hunyuan_video",
        lambda: diffusers().HunyuanVideoTransformer3DModel(
            **HEADS, num_layers=2, num_single_layers=2, num_refiner_layers=1, in_channels=4, out_channels=4,
            text_embed_dim=32, pooled_projection_dim=16, rope_axes_dim=(2, 2, 4),
        ),
        lambda: timed(hidden_states=frames(), guidance=torch.rand(2) * 1000, **prompts(), **masked()),
    ),
    net(
        "sdxl",
        lambda: diffusers().UNet2DConditionModel(
            sample_size=8, block_out_channels=(16, 32), layers_per_block=1, norm_num_groups=8, cross_attention_dim=32,
            attention_head_dim=(2, 4), transformer_layers_per_block=(1, 2), use_linear_projection=True, dropout=0.1,
            down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
            up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"), addition_embed_type="text_time",
            addition_time_embed_dim=8, projection_class_embeddings_input_dim=64,
        ),
        lambda: timed(
            sample=latents(), **prompted(),
            added_cond_kwargs={"text_embeds": torch.randn(2, 16), "time_ids": torch.rand(2, 6)},
        ),
    ),
    net(
        "autoencoder_kl",
        lambda: diffusers().AutoencoderKL(
            down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
            block_out_channels=(16, 32), norm_num_groups=8,
        ),
        lambda: {"sample": torch.randn(2, 3, 16, 16), "sample_posterior": True},
    ),
]  # fmt: skip


def adapted(name: str, config: peft.PeftConfig) -> Entry:
    """Llama with adapters, the rest of it frozen."""
    return Entry(name, lambda: Pretrained(peft.get_peft_model(llama().net, config)), text)


ADAPTERS = [
    adapted("lora", peft.LoraConfig(r=4, lora_dropout=0.1, target_modules=["q_proj", "v_proj"])),
    adapted("dora", peft.LoraConfig(r=4, lora_dropout=0.1, target_modules="all-linear", use_dora=True)),
    adapted("ia3", peft.IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"])),
]

SECTIONS = {
    "Decoders": DECODERS,
    "Mixtures of experts": EXPERTS,
    "State spaces and recurrence": RECURRENT,
    "Encoders": ENCODERS,
    "Encoder–decoders, speech": ENCODER_DECODERS,
    "Vision: transformers": VISION,
    "Vision: torchvision": TORCHVISION,
    "Vision: timm": TIMM,
    "Vision and language": VISION_LANGUAGE,
    "Diffusion": DIFFUSION,
    "Adapters": ADAPTERS,
}
ZOO = {entry.name: entry for entries in SECTIONS.values() for entry in entries}

# On some CPUs plain Lightning gives other losses each time, NaN among them: there is nothing to compare with.
NOT_REPEATED = {
    ("r3d", "bf16-mixed"): "torch 2.15's conv3d in bfloat16 on the CPU reads memory that nobody has written"
}
