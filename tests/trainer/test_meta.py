"""Modules on the meta device: their values come from a file, or from the checkpoint that is restored; else they are refused."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import accelerate
import lightning.pytorch as pl
import pytest
import torch
import torchvision
import transformers
from safetensors.torch import save_file, save_model
from torch import Tensor, nn
from transformers import initialization

from sp_lightning import SuperpipelineStrategy
from sp_lightning.core.plan import host_memory
from tests.support.models import (
    Classifier,
    Module,
    Recurrent,
    Stack,
    Transformer,
    bert,
    gpt2,
    images,
    llama,
    tokens,
    vectors,
)
from tests.support.runs import Batches, assert_equal, assert_same, fit, loader, superpipeline, trainer_for
from tests.support.starts import start
from tests.support.tiers import some

Make = Callable[[], pl.LightningModule]


def on_meta(make: Make) -> Make:
    """Makes the same module without values."""

    def made() -> pl.LightningModule:
        with torch.device("meta"):
            return make()

    return made


def loaded(make: Make, state: dict[str, Tensor]) -> Make:
    """Makes the module without values and gives it these as a whole, as one does without the strategy's help."""

    def made() -> pl.LightningModule:
        with torch.random.fork_rng():
            module = make()
        module.load_state_dict(state)
        return module

    return made


def other_values(make: Make) -> pl.LightningModule:
    """The module with values that no seed of the tests gives."""
    with torch.random.fork_rng():
        torch.manual_seed(1234)
        return make()


def vit() -> Classifier:
    net = torchvision.models.VisionTransformer(
        image_size=16, patch_size=8, num_layers=4, num_heads=2, hidden_dim=32, mlp_dim=48, num_classes=5, dropout=0.1
    )
    return Classifier(net)


class Normed(nn.Sequential):
    """It has buffers that are in files."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Linear(16, 16))


def tied_llama() -> Transformer:
    return llama(tie_word_embeddings=True)


CASES: dict[str, tuple[Make, Batches]] = {
    "llama": (llama, tokens()),
    "tied llama": (tied_llama, tokens()),
    "gpt2": (gpt2, tokens()),
    "bert": (bert, tokens()),
    "vit": (vit, images(16)),
    "lstm": (lambda: Module(Recurrent()), [torch.randn(2, 3, 16) for _ in range(3)]),
    "normed": (lambda: Module(Normed()), vectors()),
}


# ---------------------------------------------------------------------- a file of weights


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.parametrize("name", CASES)
def test_values_from_safetensors(name: str, tmp_path: Path) -> None:
    """The file is that of the network, whose names lack the prefix of the LightningModule's. Nothing is drawn for it."""
    make, batches = CASES[name]
    source = other_values(make)
    save_model(source.net, str(tmp_path / "net.safetensors"))
    ours = fit(on_meta(make), batches, superpipeline(load_weights_from=tmp_path / "net.safetensors"))
    plain = fit(loaded(make, source.state_dict()), batches)
    assert_same(ours, plain)
    assert_equal(dict(ours.module.named_buffers()), dict(plain.module.named_buffers()), "buffers")


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight:UserWarning")
def test_what_save_pretrained_writes(precision: str, tmp_path: Path) -> None:
    """Several files with an index, built in ``configure_model``; the reference reads them by ``from_pretrained``."""
    other_values(tied_llama).net.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    kind, config = transformers.LlamaForCausalLM, transformers.LlamaConfig.from_pretrained(tmp_path)

    class Ours(Transformer):
        def __init__(self) -> None:
            super().__init__(nn.Identity())

        def configure_model(self) -> None:
            if isinstance(self.net, nn.Identity):
                with torch.device("meta"):
                    self.net = kind._from_config(config).train()

    class Plain(Ours):
        def configure_model(self) -> None:
            self.net = kind.from_pretrained(tmp_path).train()

    ours = fit(Ours, tokens(), superpipeline(load_weights_from=str(tmp_path)), precision=precision)
    plain = fit(Plain, tokens(), precision=precision)
    assert_same(ours, plain)
    assert_equal(dict(ours.module.named_buffers()), dict(plain.module.named_buffers()), "buffers")
    head, embedding = ours.module.net.get_output_embeddings(), ours.module.net.get_input_embeddings()
    assert head.weight is embedding.weight


@pytest.mark.parametrize("content", ["checkpoint", "state"])
def test_values_from_files_of_torch(content: str, tmp_path: Path) -> None:
    source = other_values(lambda: Module(Normed()))
    if content == "checkpoint":
        trainer = trainer_for("auto")
        trainer.strategy.connect(source)
        trainer.save_checkpoint(tmp_path / "one.ckpt")
    else:
        torch.save(source.net.state_dict(), tmp_path / "one.ckpt")
    make = CASES["normed"][0]
    ours = fit(on_meta(make), vectors(), superpipeline(load_weights_from=tmp_path / "one.ckpt"))
    assert_same(ours, fit(loaded(make, source.state_dict()), vectors()))


def test_a_parameter_keeps_its_dtype_its_strides_and_its_identity(tmp_path: Path) -> None:
    """Values are converted as ``copy_`` does. What the user keeps of the module is valid afterwards."""

    def make() -> Module:
        module = Module(nn.Sequential(nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 3)).to(memory_format=torch.channels_last))
        module.net[1].to(torch.float64).requires_grad_(False)
        return module

    source = other_values(make).to(torch.float32)
    save_model(source.net, str(tmp_path / "net.safetensors"))
    module = on_meta(make)()
    kept, declared = list(module.parameters()), [(p.dtype, p.stride(), p.requires_grad) for p in module.parameters()]
    kept[0].note = "kept"
    strategy = superpipeline(load_weights_from=tmp_path / "net.safetensors")
    strategy.connect(module)
    strategy._given.complete(module, training=True)
    assert all(ours is before for ours, before in zip(module.parameters(), kept, strict=True))
    assert [(p.dtype, p.stride(), p.requires_grad) for p in kept] == declared
    assert kept[0].note == "kept"
    assert_equal([p.float() for p in kept], [p.detach() for p in source.parameters()], "values")


def test_what_has_values_already_takes_those_of_the_file_too(tmp_path: Path) -> None:
    """As buffers have that accelerate leaves on the CPU. The head is in no file and stays as it was made."""
    source = other_values(CASES["normed"][0])
    source.net[1].running_mean.normal_()
    save_model(source.net, str(tmp_path / "net.safetensors"))

    class WithHead(Module):
        def __init__(self) -> None:
            net = Normed()
            super().__init__(net)
            self.head = nn.Linear(16, 16)
            with torch.device("meta"):
                net[0], net[2] = nn.Linear(16, 16), nn.Linear(16, 16)

        def loss(self, batch: Any) -> Tensor:
            return self.head(self.net(batch)).square().mean()

    class Plain(WithHead):
        def __init__(self) -> None:
            super().__init__()
            self.net = Normed()
            self.net.load_state_dict(source.net.state_dict())

    def plain() -> Plain:
        """Of the two it draws the numbers of the head last, after those of the network, as ours does."""
        torch.manual_seed(7)
        head = WithHead().head
        state = torch.get_rng_state()
        module = Plain()
        module.head = head
        torch.set_rng_state(state)
        return module

    ours = fit(WithHead, vectors(), superpipeline(load_weights_from=tmp_path / "net.safetensors"))
    assert_same(ours, fit(plain, vectors()))


def test_a_file_is_read_once(tmp_path: Path) -> None:
    """A second run goes on with the weights that the first has trained."""
    make = CASES["normed"][0]
    save_model(other_values(make).net, str(tmp_path / "net.safetensors"))
    module = on_meta(make)()
    trainer = trainer_for(superpipeline(load_weights_from=tmp_path / "net.safetensors"))
    trainer.fit(module, loader(vectors()))
    trained = {name: value.clone() for name, value in module.state_dict().items()}
    trainer.validate(module, loader(vectors()), verbose=False)
    assert_equal(dict(module.state_dict()), trained, "state")


# ---------------------------------------------------------------------- a checkpoint


def checkpoint_of(
    make: Make, batches: Batches, file: Path, strategy: Any = "auto", count: int = 2, **options: Any
) -> None:
    """Trains for some steps and writes a checkpoint."""
    fit(make, batches, strategy, max_steps=count, **options).trainer.save_checkpoint(file)


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.parametrize("name", CASES)
def test_training_resumes(name: str, tmp_path: Path) -> None:
    """Bitwise as with a module that was built on the CPU, and then has as many random numbers drawn."""
    make, batches = CASES[name]
    checkpoint_of(make, batches, tmp_path / "last.ckpt")

    def undrawn() -> pl.LightningModule:
        with torch.random.fork_rng():
            return make()

    resumed = {"ckpt_path": tmp_path / "last.ckpt", "max_steps": 3, "max_epochs": 2}
    ours, plain = fit(on_meta(make), batches, superpipeline(), **resumed), fit(undrawn, batches, **resumed)
    assert len(ours.losses) == 1
    assert_same(ours, plain)
    assert_equal(dict(ours.module.named_buffers()), dict(plain.module.named_buffers()), "buffers")


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.parametrize("loop", ["validate", "test", "predict"])
def test_loops_restore_a_checkpoint(loop: str, tmp_path: Path) -> None:
    checkpoint_of(tied_llama, tokens(), tmp_path / "last.ckpt")
    results = []
    for make, strategy in ((on_meta(tied_llama), superpipeline()), (tied_llama, "auto")):
        module, trainer = make(), trainer_for(strategy)
        results.append(getattr(trainer, loop)(module, loader(tokens()), ckpt_path=tmp_path / "last.ckpt"))
    assert results[0]
    assert_equal(results[0], results[1], loop)


@pytest.mark.rest("takes tenths of a second")
def test_a_checkpoint_comes_over_a_file(tmp_path: Path) -> None:
    """Frozen weights come from the pretrained file, trained ones from the checkpoint that leaves those out."""

    def make() -> pl.LightningModule:
        module = llama()
        module.net.model.requires_grad_(False)
        return module

    source = other_values(make)
    source.net.save_pretrained(tmp_path)
    resumed = {"ckpt_path": tmp_path / "last.ckpt", "max_steps": 3, "max_epochs": 2}
    frozen = {"load_weights_from": tmp_path, "save_frozen": False}
    checkpoint_of(on_meta(make), tokens(), tmp_path / "last.ckpt", superpipeline(**frozen))
    state = torch.load(tmp_path / "last.ckpt")["state_dict"]
    assert list(state) == ["net.lm_head.weight"]
    ours = fit(on_meta(make), tokens(), superpipeline(**frozen), **resumed)
    whole = {**source.state_dict(), **state}
    torch.save({**torch.load(tmp_path / "last.ckpt"), "state_dict": whole}, tmp_path / "whole.ckpt")
    plain = fit(loaded(make, whole), tokens(), **{**resumed, "ckpt_path": tmp_path / "whole.ckpt"})
    assert_same(ours, plain)
    with pytest.raises(
        RuntimeError, match=r"leaves out the frozen weight 'net\.model.* Load the same pretrained weights"
    ):
        fit(on_meta(make), tokens(), superpipeline(save_frozen=False), **resumed)


def test_frozen_weights_that_came_from_a_checkpoint_stay_in_the_next(tmp_path: Path) -> None:
    """A module on the meta device does not have them by itself."""

    def make() -> pl.LightningModule:
        module = Module(Stack())
        module.net.stem.requires_grad_(False)
        return module

    first, second = tmp_path / "first.ckpt", tmp_path / "second.ckpt"
    checkpoint_of(make, vectors(), first)
    checkpoint_of(
        on_meta(make), vectors(), second, superpipeline(save_frozen=False), count=3, max_epochs=2, ckpt_path=first
    )
    state = torch.load(second)["state_dict"]
    assert list(state) == list(make().state_dict())


def test_a_checkpoint_that_lacks_a_weight(tmp_path: Path) -> None:
    checkpoint_of(lambda: Module(Stack()), vectors(), tmp_path / "last.ckpt")
    checkpoint = torch.load(tmp_path / "last.ckpt")
    del checkpoint["state_dict"]["net.stem.weight"]
    torch.save(checkpoint, tmp_path / "last.ckpt")
    with pytest.raises(RuntimeError, match=r"Missing key\(s\).*net\.stem\.weight"):
        fit(on_meta(lambda: Module(Stack())), vectors(), superpipeline(), ckpt_path=tmp_path / "last.ckpt")
    lenient = on_meta(lambda: Module(Stack()))()
    lenient.strict_loading = False
    with pytest.raises(ValueError, match=r"'net\.stem\.weight' is on the meta device"):
        fit(lambda: lenient, vectors(), superpipeline(), ckpt_path=tmp_path / "last.ckpt")


# ---------------------------------------------------------------------- refused


def test_a_module_without_values() -> None:
    with pytest.raises(
        ValueError, match=r"'net\.stem\.weight' is on the meta device.*load_weights_from=FILE.*on the CPU"
    ):
        start(superpipeline(), on_meta(lambda: Module(Stack()))())


def test_buffers_that_are_nowhere(tmp_path: Path) -> None:
    """The remedy: accelerate leaves buffers on the CPU."""

    class Masked(nn.Linear):
        def __init__(self) -> None:
            super().__init__(16, 16)
            self.register_buffer("mask", torch.tril(torch.ones(16, 16)), persistent=False)

        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.linear(x, self.weight * self.mask, self.bias)

    def make() -> Module:
        return Module(nn.Sequential(Masked(), Masked()))

    source = other_values(make)
    save_model(source.net, str(tmp_path / "net.safetensors"))
    with pytest.raises(ValueError, match=r"Buffer 'net\.0\.mask' is on the meta device.*init_empty_weights"):
        start(superpipeline(load_weights_from=tmp_path / "net.safetensors"), on_meta(make)())

    def remedied() -> Module:
        with accelerate.init_empty_weights():
            return make()

    ours = fit(remedied, vectors(), superpipeline(load_weights_from=tmp_path / "net.safetensors"))
    plain = fit(loaded(make, source.state_dict()), vectors())
    assert_equal(ours.state, plain.state, "state")  # accelerate draws what it throws away


def test_buffers_that_transformers_computes_in_part() -> None:
    """What its initialisation leaves as it was, or draws, is not taken for a value."""

    class Partly(transformers.LlamaPreTrainedModel):
        def __init__(self) -> None:
            super().__init__(transformers.LlamaConfig())
            for name in ("computed", "partly", "drawn", "left"):
                self.register_buffer(name, torch.zeros(4), persistent=False)
            self.weight = nn.Parameter(torch.ones(1))
            self.post_init()

        def _init_weights(self, module: nn.Module) -> None:
            initialization.ones_(module.computed)
            initialization.zeros_(module.partly[:2])
            initialization.normal_(module.drawn)
            initialization.zeros_(module.weight)

    with torch.device("meta"):
        model = Partly()
    module = Module(model)
    before = torch.get_rng_state()
    SuperpipelineStrategy()._given.restore(module, {"net.weight": torch.full((1,), 3.0)})
    SuperpipelineStrategy()._given.complete(module, training=True)
    assert torch.equal(torch.get_rng_state(), before)
    assert [name for name, buffer in model.named_buffers() if buffer.is_meta] == ["partly", "drawn", "left"]
    assert (model.computed.tolist(), model.weight.item()) == ([1.0] * 4, 3.0)


def test_values_that_nobody_needs(tmp_path: Path) -> None:
    save_model(Stack(), str(tmp_path / "net.safetensors"))
    with pytest.raises(ValueError, match=r"all parameters of Module have values. Leave it out"):
        start(superpipeline(load_weights_from=tmp_path / "net.safetensors"))


def hooked(weight: nn.Parameter) -> None:
    weight.register_hook(lambda gradient: gradient)


def hooked_after(weight: nn.Parameter) -> None:
    weight.register_post_accumulate_grad_hook(lambda weight: None)


class Special(nn.Parameter):
    pass


SPECIAL: dict[str, tuple[Callable[[Module], Any], str]] = {
    "hook": (lambda module: hooked(module.net.stem.weight), "has hooks"),
    "late hook": (lambda module: hooked_after(module.net.stem.weight), "has hooks"),
    "class": (lambda module: setattr(module.net.stem, "weight", Special(module.net.stem.weight)), "of class Special"),
    "view": (
        lambda module: setattr(module.net.stem, "bias", nn.Parameter(module.net.stem.weight[0])),
        r"view of the memory of 'net\.stem\.weight'",
    ),
    "script": (lambda module: setattr(module.net, "stem", torch.jit.script(module.net.stem)), "ScriptModule"),
}


@pytest.mark.parametrize("name", SPECIAL)
@pytest.mark.filterwarnings("ignore:.*torch.jit.*")
def test_parameters_that_are_not_simple(name: str, tmp_path: Path) -> None:
    make_special, said = SPECIAL[name]
    save_model(Stack(), str(tmp_path / "net.safetensors"))
    module = on_meta(lambda: Module(Stack()))()
    make_special(module)
    with pytest.raises(ValueError, match=rf"'net\.stem\.(weight|bias)' is on the meta device and .*{said}.*on the CPU"):
        start(superpipeline(load_weights_from=tmp_path / "net.safetensors"), module)


def changed(**changes: Tensor | None) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    return lambda state: {name: value for name, value in {**state, **changes}.items() if value is not None}


WRONG: dict[str, tuple[Callable[[dict[str, Tensor]], dict[str, Tensor]], str]] = {
    "missing": (
        changed(**{"stem.weight": None}),
        r"its 'net'\. It lacks 'net\.stem\.weight' of shape \(16, 16\)\. The file",
    ),
    "unexpected": (changed(more=torch.ones(3)), r"its 'net'\. The module has no 'more' of shape \(3,\)"),
    "another": (
        lambda state: {"a": torch.ones(1), "b": torch.ones(1)},
        r"does not fit Module\. It lacks .* and \d+ more",
    ),
    "shape": (
        changed(**{"stem.weight": torch.ones(2, 3)}),
        r"It lacks 'net\.stem\.weight' of shape \(16, 16\)\. The module has no 'stem\.weight' of shape \(2, 3\)",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_files_that_do_not_fit(name: str, tmp_path: Path) -> None:
    """It is said before anything is read."""
    change, said = WRONG[name]
    save_file(change(dict(Stack().state_dict())), tmp_path / "net.safetensors")
    module = on_meta(lambda: Module(Stack()))()
    with pytest.raises(ValueError, match=said):
        start(superpipeline(load_weights_from=tmp_path / "net.safetensors"), module)
    assert all(parameter.is_meta for parameter in module.parameters())


def test_files_that_are_not_there(tmp_path: Path, monkeypatch: Any) -> None:
    module = on_meta(lambda: Module(Stack()))()

    def refused(kind: type[Exception], said: str, path: Path = tmp_path) -> None:
        with pytest.raises(kind, match=said):
            start(superpipeline(load_weights_from=path), module)

    refused(FileNotFoundError, "file not found", tmp_path / "none.safetensors")
    refused(ValueError, "found neither.*save_pretrained")
    save_file({"a": torch.ones(1)}, tmp_path / "one.safetensors")
    save_file({"a": torch.ones(1)}, tmp_path / "two.safetensors")
    refused(ValueError, r"several \*\.safetensors \(one\.safetensors, two\.safetensors\)")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text('{"weight_map": {"a": "three.safetensors"}}')
    refused(FileNotFoundError, "names 'three.safetensors', which is not beside it")
    torch.save([1], tmp_path / "list.pt")
    refused(ValueError, "expected a Lightning checkpoint .* found list", tmp_path / "list.pt")
    torch.save({"a": 1}, tmp_path / "numbers.pt")
    refused(ValueError, "found int", tmp_path / "numbers.pt")
    monkeypatch.setitem(sys.modules, "safetensors", None)
    refused(ImportError, "pip install safetensors", tmp_path / "one.safetensors")
    with pytest.raises(TypeError, match=r'path of a file or a folder, found 3. For example load_weights_from="model"'):
        superpipeline(load_weights_from=3)


@pytest.mark.long("takes a second or more")
def test_more_than_the_host_has(tmp_path: Path, monkeypatch: Any) -> None:
    save_model(Stack(), str(tmp_path / "net.safetensors"))
    monkeypatch.setattr(host_memory, "available_bytes", lambda: 1000)
    with pytest.raises(MemoryError, match="for the weights"):
        start(superpipeline(load_weights_from=tmp_path / "net.safetensors"), on_meta(lambda: Module(Stack()))())
    # All of them are trained, so that none stays in the file.
    with pytest.raises(MemoryError, match="for the weights"):
        start(
            superpipeline(load_weights_from=tmp_path / "net.safetensors", disk=tmp_path),
            on_meta(lambda: Module(Stack()))(),
        )


@pytest.mark.rest("takes tenths of a second")
def test_more_than_host_memory_without_a_disk(tmp_path: Path, monkeypatch: Any) -> None:
    save_model(Stack(), str(tmp_path / "net.safetensors"))
    monkeypatch.setattr(host_memory, "resident_bytes", lambda: 2**30)
    strategy = superpipeline(load_weights_from=tmp_path / "net.safetensors", host_memory=2**30 + 96 * 2**20)
    with pytest.raises(MemoryError, match=r'host_memory="1120MiB" is too little: .* for the weights'):
        start(strategy, on_meta(lambda: Module(Stack()))())


# ---------------------------------------------------------------------- memory

SET_UP = """
import sys, threading, time
import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader
from sp_lightning import SuperpipelineStrategy

file, how = sys.argv[1:]

class Model(pl.LightningModule):
    def __init__(self):
        super().__init__()
        with torch.device("cpu" if how == "cpu" else "meta"):
            self.net = nn.Sequential(*(nn.Linear(2048, 2048, bias=False) for _ in range(24)))  # 16 MiB each

    def validation_step(self, batch, batch_idx):
        self.net(batch)

def resident(key):
    return int(open("/proc/self/status").read().split(key + ":")[1].split()[0]) * 1024

def watch():
    global peak
    while not over:
        peak = max(peak, resident("RssAnon"))
        time.sleep(0.001)

weights, checkpoint = {"weights": (file, None), "checkpoint": (None, file), "cpu": (None, None)}[how]
strategy = SuperpipelineStrategy(k=1, k_prime=1, load_weights_from=weights)
trainer = pl.Trainer(
    strategy=strategy, accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
    enable_checkpointing=False, inference_mode=False,
)
if weights:
    import safetensors
peak, over, before, anonymous = 0, False, resident("VmRSS"), resident("RssAnon")
watcher = threading.Thread(target=watch)
watcher.start()
trainer.validate(Model(), DataLoader(torch.ones(1, 2048), batch_size=1), ckpt_path=checkpoint, verbose=False)
over = True
watcher.join()
print((resident("VmHWM") - before) / 2**24, (peak - anonymous) / 2**24)  # ru_maxrss would be that of the parent
"""


@pytest.mark.long("subprocesses that import torch and fill memory")
@pytest.mark.parametrize("how", some(["weights", "checkpoint", "cpu"], "weights", why="the same store"))
def test_set_up_takes_the_store_and_a_few_layers(how: str, tmp_path: Path) -> None:
    """24 layers of 16 MiB, and on this host the two slots. Without a file a module on the CPU takes no more."""
    if not Path("/proc/self/status").exists():
        pytest.skip("reads the memory of a process from /proc")
    net, file = nn.Sequential(*(nn.Linear(2048, 2048, bias=False) for _ in range(24))), tmp_path / "file"
    if how == "weights":
        file = tmp_path / "net.safetensors"
        save_model(net, str(file))
    if how == "checkpoint":
        torch.save({"state_dict": {f"net.{name}": value for name, value in net.state_dict().items()},
                    "pytorch-lightning_version": pl.__version__}, file)  # fmt: skip
    ran = subprocess.run([sys.executable, "-W", "ignore", "-c", SET_UP, str(file), how], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    resident, anonymous = map(float, ran.stdout.split()[-2:])
    assert 24 < anonymous < 24 + 2 + 3
    if how != "checkpoint":  # the pages of a checkpoint stay until all is read; the system may take them before
        assert resident < 24 + 2 + 8
