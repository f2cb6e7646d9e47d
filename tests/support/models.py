"""Small real models and awkward ones, each an unchanged LightningModule with its batches."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import peft
import torch
import torch.nn.functional as F
import torchvision
import transformers
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.support.runs import Batches


class Module(pl.LightningModule):
    """Trains ``self.net`` with AdamW; subclasses say what the loss is."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def loss(self, batch: Any) -> Tensor:
        return self.net(batch).square().mean()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), batch_size=2)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch), batch_size=2)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2)


def fused_adamw(module: nn.Module) -> torch.optim.Optimizer:
    """An optimizer whose steps may run in the background."""
    return torch.optim.AdamW(module.parameters(), lr=1e-2, fused=True)


class EitherOptimization(Module):
    """Optimizes automatically or, with ``manual``, by hand."""

    def __init__(self, net: nn.Module, *, manual: bool) -> None:
        super().__init__(net)
        self.automatic_optimization = not manual

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        if not self.automatic_optimization:
            optimizer: Any = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return loss


class Transformer(Module):
    """A transformers model whose batches are keyword arguments and whose output has a loss."""

    def loss(self, batch: Any) -> Tensor:
        return self.net(**batch).loss

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(**batch).logits


# ---------------------------------------------------------------------- transformers


def llama(
    *, dropout: float = 0.1, checkpointing: dict[str, Any] | None = None, layers: int = 4, **more: Any
) -> Transformer:
    sizes = {
        "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": layers,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32, **more,
    }  # fmt: skip
    net = transformers.LlamaForCausalLM(transformers.LlamaConfig(attention_dropout=dropout, use_cache=False, **sizes))
    net.train()
    if checkpointing is not None:
        enable_checkpointing(net, **checkpointing)
    return Transformer(net)


def enable_checkpointing(net: Any, **options: Any) -> None:
    """transformers 5.23 renamed it and warns about the old name."""
    if hasattr(net, "activation_checkpointing_enable"):
        net.activation_checkpointing_enable(options)
    else:
        net.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)


def gpt2() -> Transformer:
    config = transformers.GPT2Config(vocab_size=64, n_positions=32, n_embd=32, n_layer=4, n_head=4)
    return Transformer(transformers.GPT2LMHeadModel(config))


def t5(*, checkpointing: bool = False) -> Transformer:
    config = transformers.T5Config(
        vocab_size=64, d_model=32, d_kv=8, d_ff=48, num_layers=3, num_decoder_layers=3, num_heads=4,
        decoder_start_token_id=0, use_cache=False,
    )  # fmt: skip
    net = transformers.T5ForConditionalGeneration(config)
    if checkpointing:
        enable_checkpointing(net, use_reentrant=False)
    return Transformer(net)


def bert() -> Transformer:
    config = transformers.BertConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=4, num_attention_heads=4, intermediate_size=48,
        max_position_embeddings=32,
    )  # fmt: skip
    return Transformer(transformers.BertForMaskedLM(config))


def lora() -> Transformer:
    """Trainable adapters on a frozen base with checkpoints, whose recompute keeps frozen weights as they are."""
    module = llama(checkpointing={"use_reentrant": False})
    module.net.enable_input_require_grads()
    module.net = peft.get_peft_model(module.net, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    return module


def tokens(count: int = 3, length: int = 8) -> Batches:
    generator = torch.Generator().manual_seed(1)
    ids = [torch.randint(0, 64, (2, length), generator=generator) for _ in range(count)]
    return [{"input_ids": each, "labels": each} for each in ids]


# ---------------------------------------------------------------------- vision and recurrence


class Classifier(Module):
    def loss(self, batch: Any) -> Tensor:
        images, labels = batch
        return F.cross_entropy(self.net(images), labels)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(batch[0])


def resnet50() -> Classifier:
    return Classifier(torchvision.models.resnet50(num_classes=5, width_per_group=8))


def vit() -> Classifier:
    net = torchvision.models.VisionTransformer(
        image_size=16, patch_size=8, num_layers=4, num_heads=2, hidden_dim=32, mlp_dim=48, num_classes=5, dropout=0.1
    )
    nn.init.normal_(net.heads.head.weight)
    return Classifier(net)


def images(size: int, count: int = 3) -> Batches:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(4, 3, size, size, generator=generator), torch.randint(0, 5, (4,), generator=generator))
        for _ in range(count)
    ]


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stack = nn.ModuleList(nn.LSTM(16, 16, batch_first=True) for _ in range(4))
        self.head = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.stack:
            x, _ = layer(x)
        return self.head(x)


# ---------------------------------------------------------------------- awkward ones


class Block(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.inner = nn.Linear(width, 2 * width)
        self.outer = nn.Linear(2 * width, width)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.outer(torch.tanh(self.inner(x))))


class Stack(nn.Module):
    """Blocks between an embedding and a head."""

    def __init__(self, depth: int = 5, width: int = 16) -> None:
        super().__init__()
        self.stem = nn.Linear(width, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class WithTrunk(nn.Module):
    """A head of its own behind a network that others share."""

    def __init__(self, trunk: nn.Module) -> None:
        super().__init__()
        self.trunk, self.head = trunk, nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.trunk(x))


class SharedTrunk(nn.Module):
    """A list of tasks, and torchphysics' conditions."""

    def __init__(self) -> None:
        super().__init__()
        trunk = nn.Sequential(*(nn.Linear(16, 16) for _ in range(6)))
        self.tasks = nn.ModuleList(WithTrunk(trunk) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([task(x) for task in self.tasks]).sum(0)


class Reused(Stack):
    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
            x = self.blocks[1](x)
        return self.head(self.blocks[1](x))


class ScaledByWeight(torch.autograd.Function):
    """Saves a weight and runs a forward of its own in backward, as kernels that are written by hand do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight.sigmoid()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        x, weight = (saved.detach().requires_grad_() for saved in ctx.saved_tensors)
        with torch.enable_grad():
            y = x * weight.sigmoid()
        return torch.autograd.grad(y, (x, weight), gradients[0])


class FusedAccumulation(torch.autograd.Function):
    """Adds to an attribute of its weight in backward, as TransformerEngine's functions do."""

    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t() * 2.0

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        x, weight = ctx.saved_tensors
        g = gradients[0].to(weight.dtype) * 2.0
        weight.main_grad.mul_(0.5).add_(g.t() @ x.to(weight.dtype))
        return g @ weight, weight.main_grad.clone()


class FusedBlock(Block):
    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.inner(x))
        if not hasattr(self.outer.weight, "main_grad"):
            self.outer.weight.main_grad = torch.zeros_like(self.outer.weight)
        return x + self.drop(FusedAccumulation.apply(h, self.outer.weight))  # type: ignore[no-untyped-call]


class Convolution(nn.Module):
    """A residual block that ends in a function of its own."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(width, width, 3, padding=1)
        self.norm = nn.BatchNorm2d(width)
        self.scale = nn.Parameter(torch.randn(width, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.norm(self.convolution(x)))
        return x + ScaledByWeight.apply(y, self.scale)  # type: ignore[no-untyped-call]


def convolutions() -> Classifier:
    blocks = nn.Sequential(*(Convolution() for _ in range(4)))
    return Classifier(nn.Sequential(nn.Conv2d(3, 8, 1), blocks, nn.Flatten(), nn.Linear(8 * 8 * 8, 5)))


class Conditional(Stack):
    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for index, block in enumerate(self.blocks):
            if not self.training or torch.rand(()).item() < 0.6 or index == 0:
                x = block(x)
        return self.head(x)


class OutsideCall(Stack):
    """Calls a part of a layer from outside it, as DiT does."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block.inner(x))[..., :16] + block(x)
        return self.head(self.stem(x))


class ReturnsView(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 16))
        self.inner = Block()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.inner(x), self.weight.t()


class EscapingViews(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(ReturnsView() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        views = []
        for block in self.blocks:
            x, view = block(x)
            views.append(view)
        for view in views:
            x = x @ view / 4
        return x


class ReadWithoutForward(Stack):
    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = x + F.linear(torch.tanh(F.linear(x, block.inner.weight, block.inner.bias)), block.outer.weight)
        return F.linear(x, self.head.weight)


class PathByModules(Stack):
    """Computes equal heads at once if nothing is around their calls, and one after the other otherwise, as RF-DETR does."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x).expand(len(self.heads), -1, -1)
        hooks = [name for name in vars(nn.Module()) if name.endswith("_hooks")]
        inside = [module for head in self.heads for module in head.modules()]
        if any("forward" in vars(module) or any(getattr(module, name) for name in hooks) for module in inside):
            return torch.stack([head(each) for head, each in zip(self.heads, x, strict=True)])
        for at in (0, 2):
            layers = [head[at] for head in self.heads]  # type: ignore[index]
            x = (
                x @ torch.stack([each.weight.T for each in layers])
                + torch.stack([each.bias for each in layers])[:, None]
            )
            x = x.relu() if at == 0 else x
        return x


class CheckpointedCalls(Stack):
    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.use_reentrant)
        return self.head(x)


class InsideCheckpoint(Stack):
    """Checkpoints inside the layers' forward, where no module hook runs again."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = checkpoint(block.forward, x, use_reentrant=False)
        return self.head(x)


class WholeCheckpoint(Stack):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=True)


class RescaledInEval(Stack):
    """Divides weights in place when it is first evaluated and undoes it in training, as RWKV does."""

    scaled = False

    def forward(self, x: Tensor) -> Tensor:
        if self.scaled == self.training:
            with torch.no_grad():
                for index, block in enumerate(self.blocks):
                    if self.training:
                        block.outer.weight.mul_(2**index)
                    else:
                        block.outer.weight.div_(2**index)
            self.scaled = not self.training
        return super().forward(x)


class ClampedInForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Clamped() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Clamped(Block):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.inner.weight.clamp_(-0.2, 0.2)
        self.outer.weight.data.clamp_(-0.1, 0.1)
        return super().forward(x)


class Remembers(Block):
    """A block that writes its weights through a list from ``__init__`` inside its forward, as memories and averages do."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = nn.Parameter(torch.zeros(16), requires_grad=False)
        self.kept = [self.memory, self.outer.bias]

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.memory
        with torch.no_grad():
            self.kept[0].add_(0.1 * x.mean(0))
            self.kept[1].mul_(0.9)
            self.kept[0].data.clamp_(-0.5, 0.5)
        return super().forward(x) + self.memory


class WrittenInItsLayer(Stack):
    """Blocks whose weights change on the host while they run."""

    def __init__(self, block: type[Block]) -> None:
        super().__init__(0)
        self.blocks = nn.ModuleList(block() for _ in range(4))


class PenaltyOnParameters(Module):
    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) + 0.1 * sum(p.square().sum() for p in self.parameters())


class DoubledBlock(Block):
    def forward(self, x: Tensor) -> Tensor:
        return Block.forward(self, x) * 2


class PatchedForABatch(Module):
    """A layer's forward is another one for a while: its own, its class's, or that of another class."""

    batches = 0

    def loss(self, batch: Any) -> Tensor:
        block: Any = self.net.blocks[1]  # type: ignore[index, union-attr]
        bound, of_class = block.forward, Block.forward
        if self.batches % 3 == 0:
            block.forward = lambda x: bound(x) * 2
        elif self.batches % 3 == 1:
            Block.forward = lambda self, x: of_class(self, x) * 2  # type: ignore[method-assign]
        else:
            block.__class__ = DoubledBlock
        self.batches += torch.is_grad_enabled()
        try:
            return super().loss(batch)
        finally:
            vars(block).pop("forward", None)
            Block.forward = of_class  # type: ignore[method-assign]
            block.__class__ = Block


class GradientsOfParameters(Module):
    def loss(self, batch: Any) -> Tensor:
        loss = super().loss(batch)
        if not torch.is_grad_enabled():
            return loss
        grads = torch.autograd.grad(loss, list(self.parameters()), create_graph=True)
        return loss + sum(g.square().sum() for g in grads)


class GradientPenalty(Module):
    """WGAN-style: the norm of the gradient with respect to the input is part of the loss."""

    def loss(self, batch: Any) -> Tensor:
        x = batch.clone().requires_grad_()
        with torch.enable_grad():
            score = self.net(x).sum()
            (grad,) = torch.autograd.grad(score, x, create_graph=True)
        return score.square() * 1e-3 + (grad.norm(dim=-1) - 1).square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.net(batch).mean(), batch_size=2)


class Hooked(Module):
    """Hooks on parameters: one scales the gradient, one counts after accumulation."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__(net)
        self.accumulated: list[float] = []
        for p in self.parameters():
            p.register_hook(lambda grad: grad * 0.5)
            p.register_post_accumulate_grad_hook(lambda q: self.accumulated.append(q.grad.sum().item()))

    def on_train_end(self) -> None:
        self.register_buffer("hooked", torch.tensor(sorted(self.accumulated)))


class Frozen(Module):
    def __init__(self, net: nn.Module) -> None:
        super().__init__(net)
        for p in [*net.blocks[0].parameters(), *net.blocks[2].parameters(), *net.stem.parameters()]:  # type: ignore[union-attr,index]
            p.requires_grad_(False)


class Gan(pl.LightningModule):
    """Manual optimization with two optimizers."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = Stack(3)
        self.discriminator = Stack(3)
        self.automatic_optimization = False

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.discriminator(self.generator(batch)).mean(), batch_size=2)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        first, second = self.optimizers()
        self.toggle_optimizer(first)
        fake = self.generator(torch.randn_like(batch))
        loss = self.discriminator(fake).mean()
        self.manual_backward(loss)
        first.step()
        first.zero_grad()
        self.untoggle_optimizer(first)
        self.toggle_optimizer(second)
        loss = self.discriminator(batch).mean() - self.discriminator(fake.detach()).mean()
        loss.backward()
        self.clip_gradients(second, gradient_clip_val=0.5)
        second.step()
        self.zero_grad()
        self.untoggle_optimizer(second)
        return loss

    def configure_optimizers(self) -> Any:
        return [
            torch.optim.Adam(self.generator.parameters(), lr=1e-3),
            torch.optim.SGD(self.discriminator.parameters(), lr=1e-2, momentum=0.9),
        ]


class TargetNetwork(Module):
    """Writes parameters through ``.data`` and ``load_state_dict`` inside the step, as reinforcement learning does."""

    def __init__(self) -> None:
        super().__init__(Stack(4))
        self.target = Stack(4)

    def loss(self, batch: Any) -> Tensor:
        with torch.no_grad():
            for p, q in zip(self.net.parameters(), self.target.parameters(), strict=True):
                q.data.copy_(0.9 * q.data + 0.1 * p.data)
        return (self.net(batch) - self.target(batch).detach()).square().mean()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx == 1:
            self.target.load_state_dict(self.net.state_dict())
        return self.loss(batch)


class Teacher(Module):
    """Looks at its own output first, in inference mode, as what learns from a teacher does."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        with torch.inference_mode():
            taught = self.net(batch).float().clone()
        return (self.net(batch) - taught.clone()).square().mean() + self.loss(batch)


class Lbfgs(Module):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=4)


class SparseEmbedding(Module):
    def __init__(self) -> None:
        super().__init__(nn.Sequential(nn.Embedding(64, 16, sparse=True), Block(), Block()))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class BadlyTied(nn.Module):
    """Tied weights in blocks that are apart, a resident scale and a large stray parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.table = nn.Parameter(torch.randn(64, 16))
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.blocks[3].inner.weight = self.blocks[0].inner.weight

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x) * self.scale
        return x @ self.table.t()


def vectors(count: int = 3) -> Batches:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(4, 16, generator=generator) for _ in range(count)]


@dataclass(frozen=True)
class Case:
    make: Callable[[], pl.LightningModule]
    batches: Callable[[], Batches]


CASES: dict[str, Case] = {
    "llama-dropout": Case(llama, tokens),
    "llama-checkpoint": Case(lambda: llama(checkpointing={"use_reentrant": False}), tokens),
    "llama-checkpoint-reentrant": Case(lambda: llama(checkpointing={"use_reentrant": True}), tokens),
    "lora-checkpoint": Case(lora, tokens),
    "gpt2-tied": Case(gpt2, tokens),
    "t5": Case(t5, tokens),
    "t5-checkpoint": Case(lambda: t5(checkpointing=True), tokens),
    "bert": Case(bert, tokens),
    "resnet50": Case(resnet50, lambda: images(32)),
    "vit": Case(vit, lambda: images(16)),
    "lstm": Case(
        lambda: Module(Recurrent()),
        lambda: [torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(i)) for i in range(3)],
    ),
    "stack": Case(lambda: Module(Stack()), vectors),
    "reused": Case(lambda: Module(Reused()), vectors),
    "conditional": Case(lambda: Module(Conditional()), vectors),
    "frozen": Case(lambda: Frozen(Stack()), vectors),
    "outside-call": Case(lambda: Module(OutsideCall()), vectors),
    "returns-view": Case(lambda: Module(EscapingViews()), vectors),
    "read-without-forward": Case(lambda: Module(ReadWithoutForward()), vectors),
    "path-by-modules": Case(lambda: Module(PathByModules()), vectors),
    "patched-for-a-batch": Case(lambda: PatchedForABatch(Stack()), vectors),
    "penalty-on-parameters": Case(lambda: PenaltyOnParameters(Stack()), vectors),
    "autograd-grad": Case(lambda: GradientsOfParameters(Stack()), vectors),
    "rescaled-in-eval": Case(lambda: Module(RescaledInEval()), vectors),
    "clamped-in-forward": Case(lambda: Module(ClampedInForward()), vectors),
    "captured-in-forward": Case(lambda: Module(WrittenInItsLayer(Remembers)), vectors),
    "saved-objects": Case(lambda: twice(FusedBlock)(), vectors),
    "gradient-penalty": Case(lambda: GradientPenalty(Stack()), vectors),
    "parameter-hooks": Case(lambda: Hooked(Stack()), vectors),
    "checkpoint-calls": Case(lambda: Module(CheckpointedCalls(False)), vectors),
    "checkpoint-calls-reentrant": Case(lambda: Module(CheckpointedCalls(True)), vectors),
    "checkpoint-inside": Case(lambda: Module(InsideCheckpoint()), vectors),
    "checkpoint-whole": Case(lambda: Module(WholeCheckpoint()), lambda: [x.requires_grad_() for x in vectors()]),
    "gan": Case(Gan, vectors),
    "target-network": Case(TargetNetwork, vectors),
    "teacher": Case(lambda: Teacher(Stack()), vectors),
    "lbfgs": Case(lambda: Lbfgs(Stack()), vectors),
    "sparse-embedding": Case(
        SparseEmbedding,
        lambda: [torch.randint(0, 64, (4,), generator=torch.Generator().manual_seed(i)) for i in range(3)],
    ),
    "tied-apart": Case(lambda: Module(BadlyTied()), vectors),
    "shared-trunk": Case(lambda: Module(SharedTrunk()), vectors),
    "one-linear": Case(lambda: Module(nn.Linear(16, 16)), vectors),
    "transformer-encoder": Case(
        lambda: Module(nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 4)),
        lambda: [torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(i)) for i in range(3)],
    ),
}


def twice(block: type[nn.Module]) -> Any:
    def make() -> Module:
        stack = Stack()
        for index in range(len(stack.blocks)):
            stack.blocks[index] = block()
        return Module(stack)

    return make


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(16))
        self.blocks = nn.ModuleList(Block() for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x) * self.scale
        return x


class FunctionalCall(Module):
    """Weights that are computed lie in no slot, and no module hook tells that a layer's backward begins."""

    def loss(self, batch: Any) -> Tensor:
        weights = {name: p * 2 for name, p in self.net.named_parameters()}
        return torch.func.functional_call(self.net, weights, batch).square().mean()


class Copies(Module):
    """A copy of a streamed module is a plain module, made inside a step or between two."""

    def __init__(self) -> None:
        super().__init__(Stack())
        self.seen: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.copied = [copy.deepcopy(self.net)]
        with torch.no_grad():
            self.seen.append(self.copied[0](batch).clone())
        assert all(type(p) is nn.Parameter for p in self.copied[0].parameters())
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        with torch.no_grad():
            self.seen.append(self.copied[0](batch).clone())
            self.seen.append(copy.deepcopy(self.net)(batch).clone())
