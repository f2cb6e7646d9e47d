"""Small networks whose last blocks are much larger than the first, so that they are divided."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torchvision import models as vision
from torchvision.models.efficientnet import MBConvConfig

from sp_lightning.core.model.find import find_layers
from sp_lightning.core.model.uneven import UnevenBlocks
from tests.support.models import Classifier, Module, images
from tests.support.runs import Batches


def vgg() -> nn.Module:
    """It has no blocks: one matrix has 71% of the weights, and stays whole."""
    features = vision.vgg.make_layers([8, "M", 16, "M", 32, "M"], batch_norm=True)
    with torch.device("meta"):  # its own classifier has half a gigabyte
        net = vision.VGG(features, num_classes=5, init_weights=False)
    net.avgpool = nn.AdaptiveAvgPool2d(2)
    net.classifier = nn.Sequential(nn.Linear(128, 128), nn.ReLU(), nn.Dropout(0.1), nn.Linear(128, 5))
    return net


class NarrowResNet(vision.ResNet):
    """An eighth as many channels."""

    def _make_layer(self, block: Any, planes: int, *args: Any, **options: Any) -> nn.Sequential:
        return super()._make_layer(block, planes // 8, *args, **options)


def resnet() -> nn.Module:
    net = NarrowResNet(vision.resnet.Bottleneck, [1, 2, 2, 2])
    net.fc = nn.Linear(256, 5)
    return net


def densenet() -> nn.Module:
    return vision.DenseNet(8, (1, 1, 2, 2), 8, drop_rate=0.1, num_classes=200)


def efficientnet() -> nn.Module:
    blocks = [MBConvConfig(1, 3, 1, 8, 8, 1), MBConvConfig(4, 3, 2, 8, 16, 3), MBConvConfig(4, 3, 2, 16, 32, 4)]
    return vision.EfficientNet(blocks, 0.1, stochastic_depth_prob=0.2, num_classes=5, last_channel=32)


def swin() -> nn.Module:
    return vision.SwinTransformer([2, 2], 16, [2, 2, 2], [1, 2, 4], [2, 2], dropout=0.1, num_classes=5)


class UNet(Module):
    def __init__(self) -> None:
        from diffusers import UNet2DConditionModel

        super().__init__(
            UNet2DConditionModel(
                sample_size=8, block_out_channels=(4, 64), layers_per_block=1, norm_num_groups=4, cross_attention_dim=16,
                attention_head_dim=4, dropout=0.1, down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
                up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
            )
        )  # fmt: skip

    def loss(self, batch: Any) -> Tensor:
        return (self.net(**batch).sample - 1).square().mean()


def latents(count: int = 3) -> Batches:
    generator = torch.Generator().manual_seed(1)
    return [
        {
            "sample": torch.randn(2, 4, 8, 8, generator=generator),
            "timestep": torch.randint(0, 1000, (2,), generator=generator),
            "encoder_hidden_states": torch.randn(2, 5, 16, generator=generator),
        }
        for _ in range(count)
    ]


CASES: dict[str, tuple[Callable[[], Module], Callable[[], Batches]]] = {
    name: (lambda make=make: Classifier(make()), lambda: images(32))
    for name, make in {
        "resnet": resnet, "vgg": vgg, "densenet": densenet, "efficientnet": efficientnet, "swin": swin,
    }.items()
} | {"unet": (UNet, latents)}  # fmt: skip

PARTS = {
    "resnet": "net.layer4.1.conv2",
    "vgg": "net.classifier.0",
    "densenet": "net.features.denseblock4.denselayer2",
    "efficientnet": "net.features.3.3.block.0",
    "swin": "net.features.5.1.mlp.0",
    "unet": "net.up_blocks.0.resnets.0.conv1",
}
"""For each network, a part that is a layer. That of ``vgg`` is a layer without the division, too."""


def names_of_layers(module: nn.Module, *, divided: bool = True, **options: Any) -> list[str]:
    """The layers that are found; with ``divided=False``, those without the division of large blocks."""
    choose = UnevenBlocks.next if divided else lambda *_: []
    with mock.patch.object(UnevenBlocks, "next", choose):
        return [layer.name for layer in find_layers(module, **options).layers]
