"""Frozen weights that are read in place from the user's files while adapters, or a head, are trained."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import peft
import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import BaseFinetuning, EMAWeightAveraging
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from sp_lightning import SuperpipelineStrategy
from tests.support.in_files import in_file, in_memory, stay
from tests.support.models import Module, Stack, Transformer, enable_checkpointing, llama, tokens, vectors
from tests.support.runs import assert_equal, assert_same, fit, fused, loader, trainer_for
from tests.support.simdevice import simulated
from tests.support.tiers import first


@pytest.fixture(autouse=True)
def _little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    stay(monkeypatch)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A language model's weights, in bfloat16 and in float32."""
    torch.manual_seed(11)
    net: Any = llama(dropout=0.0, tie_word_embeddings=False).net
    save_file({name: value.contiguous() for name, value in net.state_dict().items()}, tmp_path / "base.safetensors")
    half = {name: value.bfloat16().contiguous() for name, value in net.state_dict().items()}
    save_file(half, tmp_path / "half.safetensors")
    return tmp_path / "base.safetensors"


def adapters(file: Path, *, checkpointing: bool = False) -> Callable[[], pl.LightningModule]:
    """LoRA on a model whose weights are mapped, as ``from_pretrained`` leaves them."""

    def make() -> pl.LightningModule:
        net: Any = llama(dropout=0.0, tie_word_embeddings=False).net
        net.load_state_dict(load_file(file), assign=True)
        if checkpointing:
            enable_checkpointing(net, use_reentrant=False)
            net.enable_input_require_grads()
        config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], lora_dropout=0.1)
        return Transformer(peft.get_peft_model(net, config))

    return make


def in_place(folder: Path, **options: Any) -> SuperpipelineStrategy:
    return SuperpipelineStrategy(**{"k": 1, "disk": folder, **options})


class Kinds(Callback):
    """Notes whether frozen weights of layers are in files after each batch."""

    def __init__(self) -> None:
        self.found: list[set[bool]] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        layers = [p for name, p in pl_module.named_parameters() if ".layers." in name or ".blocks." in name]
        self.found.append({in_file(p) for p in layers if not p.requires_grad})


VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "k=1": ({}, {}),
    "k=2": ({"k": 2, "k_prime": 2}, {}),
    "all at once": ({"k": 1, "k_prime": 9}, {}),
    "recompute": ({"activations": "recompute"}, {}),
    "offload": ({"activations": "offload"}, {}),
    "forward": ({"optimizer_overlap": "forward"}, {}),
    "backward": ({"optimizer_overlap": "backward"}, {}),
    "clipped": ({"optimizer_overlap": "forward"}, {"gradient_clip_val": 0.01}),
    "accumulated": ({}, {"accumulate_grad_batches": 2}),
    "mixed": ({}, {"precision": "bf16-mixed"}),
    "half": ({}, {"precision": "bf16-true"}),
}


@pytest.mark.long("takes a second or more")
@pytest.mark.parametrize("variant", first(VARIANTS, "backward", "mixed", why="other options"))
def test_adapters_train_as_in_plain_lightning(variant: str, file: Path, tmp_path: Path) -> None:
    ours, options = VARIANTS[variant]
    make = adapters(file.with_name("half.safetensors") if "precision" in options else file)
    if "optimizer_overlap" in ours:
        make = fused(make)
    strategy, kinds, remarks = in_place(tmp_path, **ours), Kinds(), list[str]()

    class Asks(Callback):
        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            remarks.extend(strategy.remarks())

    mine = fit(make, tokens(), strategy, recorded="losses", callbacks=[kinds, Asks()], val=tokens(1), **options)
    assert_same(mine, fit(make, tokens(), recorded="losses", callbacks=[Kinds()], val=tokens(1), **options))
    assert kinds.found == [{True}] * 3
    assert any("are read in place from" in line for line in remarks)


@pytest.mark.long("takes a second or more")
@pytest.mark.parametrize("variant", first(["k=2", "backward", "mixed"], "backward", why="other options"))
def test_adapters_on_a_device_that_copies_late(variant: str, file: Path, tmp_path: Path) -> None:
    ours, options = VARIANTS[variant]
    make = adapters(file.with_name("half.safetensors") if "precision" in options else file)
    make = fused(make) if "optimizer_overlap" in ours else make
    with simulated():
        mine = fit(make, tokens(), in_place(tmp_path, **ours), recorded="losses", **options)
    assert_same(mine, fit(make, tokens(), recorded="losses", **options))


@pytest.mark.long("takes a second or more")
def test_checkpoints_of_torch(file: Path, tmp_path: Path) -> None:
    """Their recompute keeps frozen weights as they are."""
    make = adapters(file, checkpointing=True)
    ours = fit(make, tokens(), in_place(tmp_path), recorded="losses", callbacks=[Kinds()])
    assert_same(ours, fit(make, tokens(), recorded="losses", callbacks=[Kinds()]))


@pytest.mark.long("takes a second or more")
def test_an_unchanged_module_from_transformers(tmp_path: Path) -> None:
    """``from_pretrained`` maps the files, if the dtype is theirs."""
    import transformers

    torch.manual_seed(11)
    net: Any = llama(dropout=0.0, tie_word_embeddings=False).net
    net.bfloat16().save_pretrained(tmp_path / "model")

    def make() -> pl.LightningModule:
        loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.bfloat16)
        config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
        return Transformer(peft.get_peft_model(loaded, config))

    kinds = Kinds()
    ours = fit(make, tokens(), in_place(tmp_path), recorded="losses", callbacks=[kinds], precision="bf16-mixed")
    plain = fit(make, tokens(), recorded="losses", callbacks=[Kinds()], precision="bf16-mixed")
    assert_same(ours, plain)
    assert kinds.found == [{True}] * 3


@pytest.mark.long("takes a second or more")
@pytest.mark.parametrize("save_frozen", first([True, False], False, why="with the weights in the file"))
def test_checkpoints_are_written_and_resumed_without_weights_in_memory(
    save_frozen: bool, file: Path, tmp_path: Path
) -> None:
    make, states = adapters(file), {}
    for name in ("ours", "plain"):
        checkpoint = tmp_path / f"{name}.ckpt"

        class Saves(Callback):
            def on_train_epoch_end(self, trainer: Any, pl_module: Any, checkpoint: Path = checkpoint) -> None:
                trainer.save_checkpoint(checkpoint)
                if checkpoint.name == "ours.ckpt":
                    assert not [name for name in in_memory(pl_module) if ".layers." in name and "lora" not in name]

        def strategy(name: str = name) -> Any:
            return in_place(tmp_path, save_frozen=save_frozen) if name == "ours" else "auto"

        fit(make, tokens(), strategy(), recorded="nothing", callbacks=[Saves()])
        again = Saves() if not save_frozen else Kinds()  # the weights of a whole checkpoint come with it
        resumed = {"recorded": "losses", "max_epochs": 2, "ckpt_path": checkpoint, "callbacks": [again]}
        states[name] = fit(make, tokens(), strategy(), **resumed)
    assert_same(states["ours"], states["plain"])
    mine, theirs = (torch.load(tmp_path / f"{name}.ckpt", weights_only=True) for name in ("ours", "plain"))
    if save_frozen:
        assert_equal(mine["state_dict"], theirs["state_dict"], "state_dict")
    else:
        assert all("lora" in name for name in mine["state_dict"])
        assert len(mine["superpipeline_frozen"]) + len(mine["state_dict"]) == len(theirs["state_dict"])


# ---------------------------------------------------------------------- a head on a frozen backbone


def on_a_backbone(folder: Path, kind: type[Module]) -> Callable[[], Module]:
    torch.manual_seed(5)
    save_file(dict(Stack().state_dict()), folder / "stack.safetensors")

    def make() -> Module:
        module = kind(Stack())
        module.net.load_state_dict(load_file(folder / "stack.safetensors"), assign=True)
        module.net.blocks.requires_grad_(False)
        return module

    return make


@pytest.fixture
def backbone(tmp_path: Path) -> Callable[[], Module]:
    return on_a_backbone(tmp_path, Module)


def same_with(callback: Callable[[], Callback], make: Any, folder: Path, **options: Any) -> tuple[Any, Any]:
    kept = callback(), callback()
    ours = fit(make, vectors(5), in_place(folder), callbacks=[kept[0]], **options)
    assert_same(ours, fit(make, vectors(5), callbacks=[kept[1]], **options))
    return kept


class Unfreezes(BaseFinetuning):
    """One block after the other."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.net.blocks)

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch in (1, 2):
            self.unfreeze_and_add_param_group(pl_module.net.blocks[epoch], optimizer)


@pytest.mark.long("takes a second or more")
def test_a_weight_that_is_unfrozen_comes_to_memory(backbone: Callable[[], Module], tmp_path: Path) -> None:
    class UnfreezesAndLooks(Unfreezes):
        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            self.in_memory = in_memory(pl_module.net.blocks)

    def make() -> Module:
        module = backbone()
        module.configure_optimizers = lambda: torch.optim.AdamW(  # type: ignore[method-assign]
            [p for p in module.parameters() if p.requires_grad], lr=1e-2, weight_decay=0.1
        )
        return module

    mine, _ = same_with(UnfreezesAndLooks, make, tmp_path, max_epochs=4)
    assert {name for name in dict(make().net.blocks.named_parameters()) if name[0] in "12"} <= set(mine.in_memory)


def _thaws_within_a_step(module: Any) -> None:
    module.net.blocks[1].inner.weight.requires_grad_(True)


def _gives_a_gradient(module: Any) -> None:
    weight = module.net.blocks[1].inner.weight
    weight.grad = torch.ones_like(weight)


def _writes(module: Any) -> None:
    with torch.no_grad():
        module.net.blocks[1].inner.weight.mul_(0.5)


def _writes_what_was_detached(module: Any) -> None:
    module.net.blocks[1].inner.weight.detach().mul_(0.5)


def _writes_its_state(module: Any) -> None:
    for value in module.state_dict().values():
        value.mul_(0.9)


def _replaces_its_data(module: Any) -> None:
    held = module.state_dict()
    module.net.blocks[1].inner.weight.data = torch.full((32, 16), 0.1)
    module.held = [float(value.sum()) for value in held.values()]


def _loads_its_own_state(module: Any) -> None:
    module.load_state_dict(module.state_dict())


def _loads_a_copy(module: Any) -> None:
    module.load_state_dict({name: value * 0.5 for name, value in module.state_dict().items()})


def _copies(module: Any) -> None:
    module.held = [float(p.detach().sum()) for p in copy.deepcopy(module.net).parameters()]


def _converts_and_back(module: Any) -> None:
    module.net.double().float()


def _moves(module: Any) -> None:
    module.net.to("cpu", torch.float32).cpu()


def _exchanges(module: Any) -> None:
    module.net.blocks[1].inner.weight = nn.Parameter(torch.full((32, 16), 0.1))


def _swaps(module: Any) -> None:
    one, other = (module.net.blocks[index].inner.weight for index in (1, 3))
    one.data, other.data = other.data, one.data


def _adds_a_module(module: Any) -> None:
    module.net.extra = nn.Linear(2, 2)  # the engine is built anew


TOUCHES = {
    touch.__name__.strip("_"): touch
    for touch in (
        _thaws_within_a_step, _gives_a_gradient, _writes, _writes_what_was_detached, _writes_its_state, _replaces_its_data,
        _loads_its_own_state, _loads_a_copy, _copies, _converts_and_back, _moves, _exchanges, _adds_a_module, _swaps,
    )
}  # fmt: skip
FREE = ("thaws_within_a_step", "gives_a_gradient", "loads_its_own_state", "copies", "moves", "adds_a_module")
"""What writes nothing."""


@pytest.mark.long("takes a second or more")
@pytest.mark.parametrize(
    "moment",
    first(
        ["on_train_batch_start", "on_after_backward", "on_train_batch_end"], "on_after_backward",
        second=["on_train_batch_end"], why="other moments",
    ),
)  # fmt: skip
@pytest.mark.parametrize(
    "touch", first(TOUCHES, "writes", "thaws_within_a_step", "exchanges", "loads_a_copy", why="other ways to a weight")
)
def test_user_code_finds_the_weights(touch: str, moment: str, backbone: Callable[[], Module], tmp_path: Path) -> None:
    class Touches(Callback):
        held: Any = None

        def touched(self, trainer: Any, pl_module: Any, *rest: Any) -> None:
            if trainer.global_step == 2:
                TOUCHES[touch](pl_module)

        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            self.held, self.in_memory = getattr(pl_module, "held", None), in_memory(pl_module.net.blocks)

    setattr(Touches, moment, Touches.touched)
    mine, theirs = same_with(Touches, backbone, tmp_path, recorded="losses")
    assert mine.held == theirs.held
    assert (mine.in_memory == []) == (touch in FREE)


@pytest.mark.rest("takes tenths of a second")
def test_weights_that_are_swapped_between_forward_and_backward(backbone: Callable[[], Module], tmp_path: Path) -> None:
    """The graph's values are those of forward: what the block had to hand out then was the new memory's."""

    class Swaps(Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            self.weights = [pl_module.net.blocks[index].inner.weight for index in (1, 3)]

        def on_before_backward(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == 2:
                one, other = self.weights
                one.data, other.data = other.data, one.data

    same_with(Swaps, backbone, tmp_path, recorded="losses")


class _LoadsAnother(Callback):
    """Frees the mapped memory of a file and maps another file, to which the system gives the same addresses."""

    def __init__(self, other: Path) -> None:
        self.other = other

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        if trainer.global_step == 2:
            named = [(name[4:], p) for name, p in pl_module.named_parameters() if ".blocks." in name]
            for _, parameter in named:
                parameter.data = torch.empty(0)
            values = load_file(self.other)
            for name, parameter in named:
                parameter.data = values[name]


@pytest.mark.long("takes a second or more")
def test_another_file_at_the_same_addresses(backbone: Callable[[], Module], tmp_path: Path) -> None:
    torch.manual_seed(99)
    save_file(dict(Stack().state_dict()), tmp_path / "other.safetensors")
    same_with(lambda: _LoadsAnother(tmp_path / "other.safetensors"), backbone, tmp_path, recorded="losses")


class _TakesADtypeBack(Module):
    automatic_optimization = False

    def on_train_start(self) -> None:
        self.held = [self.net.blocks[1].inner.weight]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        loss = self.loss(batch)
        if batch_idx == 2:
            weight, before = self.held[0], self.held[0].data
            with suppress(RuntimeError):
                weight.data = before.double()
                self.manual_backward(loss)
            weight.data = before
            return loss
        self.manual_backward(loss)
        optimizer.step()
        return loss


@pytest.mark.long("takes a second or more")
def test_a_dtype_that_was_refused_and_taken_back(tmp_path: Path) -> None:
    """The layer came as zeros from then on: its weight counted as one in memory before the new one was looked at."""
    same_with(Callback, on_a_backbone(tmp_path, _TakesADtypeBack), tmp_path, recorded="losses")


@pytest.mark.long("takes a second or more")
def test_a_weight_in_another_order_is_saved(tmp_path: Path) -> None:
    """With the same memory and the same shape it counted as the file's, and was left out."""

    def net() -> nn.Module:
        return nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(3)), nn.Linear(16, 16))

    class Transposes(Callback):
        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            weight = pl_module.net[1][0].weight
            weight.data = weight.data.t()
            trainer.save_checkpoint(tmp_path / "saved.ckpt")

    save_file(dict(net().state_dict()), tmp_path / "net.safetensors")
    module = Module(net())
    module.net.load_state_dict(load_file(tmp_path / "net.safetensors"), assign=True)
    module.net[:3].requires_grad_(False)
    strategy = in_place(tmp_path, save_frozen=False)
    trainer_for(strategy, callbacks=[Transposes()]).fit(module, loader(vectors()))
    saved = torch.load(tmp_path / "saved.ckpt", weights_only=False)["state_dict"]
    assert "net.1.0.weight" in saved
    assert "net.2.0.weight" not in saved


@pytest.mark.long("takes a second or more")
def test_averages(backbone: Callable[[], Module], tmp_path: Path) -> None:
    same_with(lambda: EMAWeightAveraging(decay=0.9), backbone, tmp_path, recorded="losses")


@pytest.mark.long("takes a second or more")
def test_predictions_before_and_after(backbone: Callable[[], Module], tmp_path: Path) -> None:
    found: dict[str, Any] = {}
    for name, strategy in {"ours": in_place(tmp_path), "plain": "auto"}.items():
        pl.seed_everything(7, verbose=False)
        module, trainer = backbone(), trainer_for(strategy)
        found[name] = [trainer.predict(module, loader(vectors()))]
        trainer.fit(module, loader(vectors()))
        found[name].append(trainer.predict(module, loader(vectors())))
        if name == "ours":
            assert {in_file(p) for p in module.net.blocks.parameters()} == {True}
        found[name].append({name: value.clone() for name, value in module.state_dict().items()})
    assert_equal(found["ours"], found["plain"], "found")


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.parametrize("how", ["cut off", "written"])
def test_a_file_that_is_changed_ends_the_step_with_an_error(
    how: str, backbone: Callable[[], Module], tmp_path: Path
) -> None:
    file = tmp_path / "stack.safetensors"

    class Meanwhile(Callback):
        def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == 1:
                if how == "cut off":
                    os.truncate(file, file.stat().st_size // 2)
                else:
                    os.utime(file, (1, 1))

    with pytest.raises(OSError, match="was changed while a run reads it") as caught:
        fit(backbone, vectors(), in_place(tmp_path), callbacks=[Meanwhile()])
    assert caught.value.filename == str(file)


@pytest.mark.rest("takes tenths of a second")
def test_weights_that_were_written_before_are_in_memory(backbone: Callable[[], Module], tmp_path: Path) -> None:
    """The file has other values."""

    def make() -> Module:
        module = backbone()
        with torch.no_grad():
            for parameter in module.net.blocks.parameters():
                parameter.mul_(0.5)
        return module

    kinds = Kinds()
    ours = fit(make, vectors(), in_place(tmp_path), callbacks=[kinds])
    assert_same(ours, fit(make, vectors(), callbacks=[Kinds()]))
    assert kinds.found == [{False}] * 3


@pytest.mark.long("takes a second or more")
def test_the_ledger_counts_what_is_in_memory(backbone: Callable[[], Module], tmp_path: Path) -> None:
    strategy = in_place(tmp_path)
    fit(backbone, vectors(), strategy, recorded="nothing")
    assert strategy.ledger is not None
    module: Any = backbone()
    frozen = sum(p.nbytes for p in module.net.blocks.parameters())
    total = sum(p.nbytes for p in module.net.parameters())
    assert total - frozen <= strategy.ledger.weights < total - frozen + 512 * 28


@pytest.mark.long("takes a second or more")
def test_a_tensor_of_the_state_can_be_held(backbone: Callable[[], Module], tmp_path: Path) -> None:
    """It has the file's values as long as it is kept, after the run, too."""
    held: dict[str, Tensor] = {}

    class Holds(Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            held.update(pl_module.net.blocks.state_dict())

    fit(backbone, vectors(), in_place(tmp_path), callbacks=[Holds()], recorded="nothing")
    file = load_file(tmp_path / "stack.safetensors")
    assert_equal(held, {name: file[f"blocks.{name}"] for name in held}, "held")
