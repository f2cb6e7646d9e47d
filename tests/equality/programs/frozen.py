"""Frozen weights that are read in place from the user's files while adapters, or a head, are trained."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial, wraps
from pathlib import Path
from typing import Any

import peft
import torch
import transformers
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import BaseFinetuning, EMAWeightAveraging
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tests.equality.rows import program, tiers
from tests.support.models import Transformer, enable_checkpointing, llama, tokens, vectors
from tests.support.moments import At
from tests.support.on_disk import in_file, in_memory
from tests.support.runs import Outcome, assert_equal

HERE = "frozen weights in their files"
LONG = tiers(long=[HERE])
REST = tiers(rest=[HERE])


@cache
def files() -> Path:
    """A folder with the weights of a language model in two dtypes and as transformers writes them, and of two small nets."""
    files.folder = tempfile.TemporaryDirectory()  # type: ignore[attr-defined]  # until the process ends
    folder = Path(files.folder.name)  # type: ignore[attr-defined]
    with torch.random.fork_rng():
        torch.manual_seed(11)
        net: Any = llama(dropout=0.0, tie_word_embeddings=False).net
        save_file({name: value.contiguous() for name, value in net.state_dict().items()}, folder / "base")
        net.bfloat16().save_pretrained(folder / "model")
        for name in ("net", "other"):
            save_file(dict(At(depth=6).net.state_dict()), folder / name)
    return folder


class Kinds(Callback):
    """Notes whether frozen weights of layers are in files after each batch."""

    def __init__(self) -> None:
        self.found: list[set[bool]] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        parts = (".layers.", ".first.", ".second.")
        layers = [p for name, p in pl_module.named_parameters() if any(part in name for part in parts)]
        self.found.append({in_file(p) for p in layers if not p.requires_grad})


def are(kind: bool) -> Callable[[Outcome], None]:
    """Asserts that frozen weights are in their files after each batch, or are not, and that the strategy says so."""

    def also(ours: Outcome) -> None:
        (kinds,) = (each for each in ours.trainer.callbacks if isinstance(each, Kinds))  # type: ignore[attr-defined]
        assert set(map(frozenset, kinds.found)) == {frozenset({kind})}
        strategy: Any = ours.trainer.strategy
        assert any("are read in place from" in line for line in strategy.remarks()) == kind

    return also


def adapters(file: str, *, checkpointing: bool = False) -> Transformer:
    """LoRA on a model whose weights are mapped, as ``from_pretrained`` leaves them."""
    if file == "model":
        net: Any = transformers.AutoModelForCausalLM.from_pretrained(files() / file, dtype=torch.bfloat16)
    else:
        net = llama(dropout=0.0, tie_word_embeddings=False).net
        net.load_state_dict(load_file(files() / file), assign=True)
    if checkpointing:
        enable_checkpointing(net, use_reentrant=False)
        net.enable_input_require_grads()
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], lora_dropout=0.1)
    return Transformer(peft.get_peft_model(net, config))


trains = partial(
    program, batches=tokens, also=are(True), callbacks=lambda: [Kinds()], covers="adapters on mapped weights"
)
WAYS = (
    "k=2", "k'=9", "recompute", "offload", "forward", "backward", "clipped", "accumulated", "k=2, simulated",
)  # fmt: skip
LATE = tiers(rest=[f"{HERE}, backward, simulated"], long=[f"{HERE}, {way}" for way in WAYS])
trains("frozen: adapters", LATE | REST, validated=True)(partial(adapters, "base"))
HALF = tiers(rest=[f"{HERE}, bf16-mixed"], long=[f"{HERE}, bf16-mixed, simulated", f"{HERE}, bf16-true"])
trains("frozen: adapters of a model in 16 bits", HALF)(partial(adapters, "model"))
trains("frozen: checkpoints of torch", LONG, covers="their recompute keeps frozen weights as they are")(
    partial(adapters, "base", checkpointing=True)
)

# ---------------------------------------------------------------------- a head on a frozen backbone


class Backbone(At):
    def __init__(self, **moments: Any) -> None:
        super().__init__(depth=6, on_train_end=lambda m: m.noted.extend(in_memory(m.net[1:5])), **moments)
        self.net.load_state_dict(load_file(files() / "net"), assign=True)
        self.net[1:5].requires_grad_(False)


touches = partial(program, on=Backbone, batches=lambda: vectors(5))


def weight_of(m: Any, layer: int = 2) -> Any:
    return m.net[layer].first.weight


def nothing_in_memory(ours: Outcome) -> None:
    assert ours.module.noted == []


def some_in_memory(ours: Outcome) -> None:
    assert ours.module.noted != []


def swap(one: Any, other: Any) -> None:
    one.data, other.data = other.data, one.data


READS: dict[str, Callable[[Any], Any]] = {
    "a weight thawed within a step": lambda m: weight_of(m).requires_grad_(True),
    "a gradient given": lambda m: setattr(weight_of(m), "grad", torch.ones(16, 16)),
    "its own state loaded": lambda m: m.load_state_dict(m.state_dict()),
    "a copy": lambda m: m.seen.extend(p.detach().sum() for p in copy.deepcopy(m.net).parameters()),
    "a move": lambda m: m.net.to("cpu", torch.float32).cpu(),
    "a module added": lambda m: m.net.append(nn.Linear(16, 16)),  # the engine is built anew
}


def replaces(m: Any) -> None:
    held = m.state_dict()
    weight_of(m).data = torch.full((16, 16), 0.1)
    m.seen += [value.sum() for value in held.values()]


WRITES: dict[str, Callable[[Any], Any]] = {
    "a weight written": torch.no_grad()(lambda m: weight_of(m).mul_(0.5)),
    "a detached weight written": lambda m: weight_of(m).detach().mul_(0.5),
    "state written": lambda m: [value.mul_(0.9) for value in m.state_dict().values()],
    "data replaced": replaces,
    "other values loaded": lambda m: m.load_state_dict({name: value * 0.5 for name, value in m.state_dict().items()}),
    "another dtype and back": lambda m: m.net.double().float(),
    "a weight exchanged": lambda m: setattr(m.net[2].first, "weight", nn.Parameter(torch.full((16, 16), 0.1))),
    "two weights swapped": lambda m: swap(weight_of(m, 1), weight_of(m, 3)),
}  # fmt: skip
QUICK = ("a weight thawed within a step", "a weight written", "other values loaded", "a weight exchanged")


def in_the_third_step(code: Callable[[Any], Any]) -> Callable[[Any], None]:
    @wraps(code)
    def run(m: Any) -> None:
        if m.trainer.global_step == 2:
            code(m)

    return run


for name, code in (READS | WRITES).items():
    for moment in ("on_train_batch_start", "on_after_backward", "on_train_batch_end"):
        touches(
            f"frozen: {name}, {moment}", REST if name in QUICK and moment == "on_after_backward" else LONG, at=moment,
            also=nothing_in_memory if name in READS else some_in_memory, covers="user code finds the weights",
        )(in_the_third_step(code))  # fmt: skip


swaps = partial(Backbone, on_train_start=lambda m: m.kept.extend([weight_of(m, 1), weight_of(m, 3)]))


@touches(
    "frozen: weights swapped between forward and backward", REST, at="after_forward", on=swaps, repairable=False,
    refused=dict.fromkeys(REST, r"RuntimeError: .*has been modified by an inplace operation"),
)  # fmt: skip
@in_the_third_step
def _(m: Any) -> None:
    """Backward would need the values of forward, which are written over."""
    one, other = m.kept
    one.data, other.data = other.data.clone(), one.data.clone()


@touches(
    "frozen: memory swapped between forward and backward", LONG, at="after_forward", on=swaps, repairable=False,
    refused=dict.fromkeys(LONG, r"RuntimeError: .*'net\.1\.first\.weight' was given the memory of .*other\.data\.clone"),
)  # fmt: skip
@in_the_third_step
def _(m: Any) -> None:
    """Views of slots would part; a swap of copies works."""
    swap(*m.kept)


@touches("frozen: another file at the same addresses", LONG, at="on_train_batch_end")
@in_the_third_step
def _(m: Any) -> None:
    """Frees the mapped memory of a file and maps another file, to which the system gives the same addresses."""
    for parameter in m.net[1:5].parameters():
        parameter.data = torch.empty(0)
    values = load_file(files() / "other")
    for name, parameter in m.net.named_parameters():
        if parameter.numel() == 0:
            parameter.data = values[name]


@program("frozen: a dtype that was refused and taken back", LONG, batches=lambda: vectors(5))
class TakesADtypeBack(Backbone):
    """The layer came as zeros from then on: its weight counted as one in memory before the new one was looked at."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        loss, weight = self.loss(batch), self.kept[0]
        before = weight.data
        if batch_idx != 2:
            self.manual_backward(loss)
            optimizer.step()
            return loss
        with suppress(RuntimeError):
            weight.data = before.double()
            self.manual_backward(loss)
        weight.data = before
        return loss

    def on_train_start(self) -> None:
        self.kept.append(weight_of(self))


class Unfreezes(BaseFinetuning):
    """One block after the other."""

    def freeze_before_training(self, pl_module: Any) -> None: ...

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch in (1, 2):
            self.unfreeze_and_add_param_group(pl_module.net[epoch], optimizer)


def unfrozen_in_memory(ours: Outcome) -> None:
    assert {name.split(".")[0] for name in ours.module.noted} >= {"1", "2"}


touches(
    "frozen: weights unfrozen", LONG, max_epochs=4, callbacks=lambda: [Unfreezes()], also=unfrozen_in_memory,
    covers="a weight that is unfrozen comes to memory",
)(Backbone)  # fmt: skip
averages = {"callbacks": lambda: [EMAWeightAveraging(decay=0.9)]}
touches("frozen: averages", LONG, covers="a callback that copies all", **averages)(Backbone)
touches("frozen: predictions", LONG, run="predict", covers="a run that trains nothing")(Backbone)


@touches("frozen: weights written before", REST, callbacks=lambda: [Kinds()], also=are(False))
class WrittenBefore(Backbone):
    """The file has other values."""

    def __init__(self) -> None:
        super().__init__()
        for parameter in self.net[1:5].parameters():
            parameter.data.mul_(0.5)


def has_the_file_s_values(ours: Outcome) -> None:
    module: Any = ours.module
    of_file = load_file(files() / "net")
    total, frozen = (sum(int(p.nbytes) for p in net.parameters()) for net in (module.net, module.net[1:5]))
    for held in module.kept:
        assert_equal(held, {name: of_file[name] for name in held}, "held")
    ledger: Any = ours.trainer.strategy.ledger  # type: ignore[attr-defined]
    assert total - frozen <= ledger.weights < total - frozen + 512 * 28


@touches("frozen: state that is held", LONG, at="on_train_batch_end", also=has_the_file_s_values)
def _(m: Any) -> None:
    """It has the file's values as long as it is kept, after the run, too. The ledger counts what is in memory."""
    m.kept.append({name: value for name, value in m.net.state_dict().items() if name[0] in "1234"})
