"""Modules on the meta device: their values come from a file, or from the checkpoint that is restored; else they are refused."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
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
from sp_lightning.trainer import host_memory
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
from tests.support.runs import Batches, Outcome, assert_equal, assert_same, fit, loader, superpipeline, trainer_for
from tests.support.ways import start

Make = Callable[[], pl.LightningModule]


def on_meta(make: Make) -> Make:
    """Makes the same module without values."""

    def made() -> pl.LightningModule:
        with torch.device("meta"):
            return make()

    return made


def loaded(make: Make, state: dict[str, Tensor] | None = None) -> Make:
    """Makes the module without random numbers, and gives it values as a whole, as one does without the strategy's help."""

    def made() -> pl.LightningModule:
        with torch.random.fork_rng():
            module = make()
        if state is not None:
            module.load_state_dict(state)
        return module

    return made


def other_values(make: Make) -> Any:
    """The module with values that no seed of the tests gives."""
    with torch.random.fork_rng():
        torch.manual_seed(1234)
        return make()


def vit() -> Classifier:
    net = torchvision.models.VisionTransformer(
        image_size=16, patch_size=8, num_layers=4, num_heads=2, hidden_dim=32, mlp_dim=48, num_classes=5, dropout=0.1
    )
    return Classifier(net)


def stack() -> Module:
    return Module(Stack())


def normed() -> Module:
    """It has buffers that are in files."""
    return Module(nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Linear(16, 16)))


tied_llama = partial(llama, tie_word_embeddings=True)
CASES: dict[str, tuple[Any, Batches]] = {
    "llama": (llama, tokens()),
    "tied llama": (tied_llama, tokens()),
    "gpt2": (gpt2, tokens()),
    "bert": (bert, tokens()),
    "vit": (vit, images(16)),
    "lstm": (lambda: Module(Recurrent()), [torch.randn(2, 3, 16) for _ in range(3)]),
    "normed": (normed, vectors()),
}


def same(ours: Outcome, plain: Outcome) -> None:
    assert_same(ours, plain)
    assert_equal(dict(ours.module.named_buffers()), dict(plain.module.named_buffers()), "buffers")


def from_file(folder: Path, net: nn.Module, **options: Any) -> SuperpipelineStrategy:
    """A strategy that loads a net's weights from a file."""
    save_model(net, str(folder / "net.safetensors"))
    return superpipeline(load_weights_from=folder / "net.safetensors", **options)


# ---------------------------------------------------------------------- a file of weights


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.parametrize(
    ("name", "content"), [*((name, "net") for name in CASES), ("normed", "state"), ("normed", "checkpoint")]
)
def test_values_from_files(name: str, content: str, tmp_path: Path) -> None:
    """The names of a network's file lack the prefix of the LightningModule's. Nothing is drawn for the module."""
    make, batches = CASES[name]
    source, file = other_values(make), tmp_path / "one.ckpt"
    strategy = superpipeline(load_weights_from=file) if content != "net" else from_file(tmp_path, source.net)
    torch.save(source.net.state_dict() if content == "state" else {"state_dict": source.state_dict(), "epoch": 1}, file)
    same(fit(on_meta(make), batches, strategy), fit(loaded(make, source.state_dict()), batches))


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
    same(ours, fit(Plain, tokens(), precision=precision))
    assert ours.module.net.get_output_embeddings().weight is ours.module.net.get_input_embeddings().weight


def test_a_parameter_keeps_its_dtype_its_strides_and_its_identity(tmp_path: Path) -> None:
    """Values are converted as ``copy_`` does. What the user keeps of the module is valid afterwards."""

    def make() -> Module:
        module = Module(nn.Sequential(nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 3)).to(memory_format=torch.channels_last))
        module.net[1].to(torch.float64).requires_grad_(False)
        return module

    source = other_values(make).to(torch.float32)
    module = on_meta(make)()
    kept, declared = list(module.parameters()), [(p.dtype, p.stride(), p.requires_grad) for p in module.parameters()]
    kept[0].note = "kept"  # type: ignore[attr-defined]
    strategy = from_file(tmp_path, source.net)
    strategy.connect(module)
    strategy._given.complete(module, training=True)
    assert all(ours is before for ours, before in zip(module.parameters(), kept, strict=True))
    assert [(p.dtype, p.stride(), p.requires_grad) for p in kept] == declared
    assert kept[0].note == "kept"  # type: ignore[attr-defined]
    assert_equal([p.float() for p in kept], [p.detach() for p in source.parameters()], "values")


def test_what_has_values_already_takes_those_of_the_file_too(tmp_path: Path) -> None:
    """As buffers have that accelerate leaves on the CPU. The head is in no file and stays as it was made."""
    source = other_values(normed).net
    source[1].running_mean.normal_()

    class WithHead(Module):
        def __init__(self, *, whole: bool) -> None:
            with torch.random.fork_rng():
                net: Any = normed().net
            super().__init__(net)
            self.head = nn.Linear(16, 16)
            if whole:
                net.load_state_dict(source.state_dict())
            else:
                with torch.device("meta"):
                    net[0], net[2] = nn.Linear(16, 16), nn.Linear(16, 16)

        def loss(self, batch: Any) -> Tensor:
            return self.head(self.net(batch)).square().mean()

    ours = fit(lambda: WithHead(whole=False), vectors(), from_file(tmp_path, source))
    assert_same(ours, fit(lambda: WithHead(whole=True), vectors()))


def test_a_file_is_read_once(tmp_path: Path) -> None:
    """A second run goes on with the weights that the first has trained."""
    module, trainer = on_meta(normed)(), trainer_for(from_file(tmp_path, other_values(normed).net))
    trainer.fit(module, loader(vectors()))
    trained = {name: value.clone() for name, value in module.state_dict().items()}
    trainer.validate(module, loader(vectors()), verbose=False)
    assert_equal(dict(module.state_dict()), trained, "state")


# ---------------------------------------------------------------------- a checkpoint


def checkpoint_of(make: Make, batches: Batches, file: Path, strategy: Any = "auto", **options: Any) -> dict[str, Any]:
    """Trains for some steps and writes a checkpoint. Returns options of a run that goes on."""
    fit(make, batches, strategy, **{"max_steps": 2, **options}).trainer.save_checkpoint(file)
    return {"ckpt_path": file, "max_steps": 3, "max_epochs": 2}


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.parametrize("name", CASES)
def test_training_resumes(name: str, tmp_path: Path) -> None:
    """Bitwise as with a module that was built on the CPU, and then has as many random numbers drawn."""
    make, batches = CASES[name]
    resumed = checkpoint_of(make, batches, tmp_path / "last.ckpt")
    ours = fit(on_meta(make), batches, superpipeline(), **resumed)
    assert len(ours.losses) == 1
    same(ours, fit(loaded(make), batches, **resumed))


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.parametrize("run", ["validate", "predict"])
def test_loops_restore_a_checkpoint(run: str, tmp_path: Path) -> None:
    checkpoint_of(tied_llama, tokens(), tmp_path / "last.ckpt")
    results = []
    for make, strategy in ((on_meta(tied_llama), superpipeline()), (tied_llama, "auto")):
        results.append(getattr(trainer_for(strategy), run)(make(), loader(tokens()), ckpt_path=tmp_path / "last.ckpt"))
    assert results[0]
    assert_equal(results[0], results[1], run)


@pytest.mark.rest("takes tenths of a second")
def test_a_checkpoint_comes_over_a_file(tmp_path: Path) -> None:
    """Frozen weights come from the pretrained file, trained ones from the checkpoint that leaves those out."""

    def make() -> pl.LightningModule:
        module = llama()
        module.net.model.requires_grad_(False)
        return module

    source, last, whole = other_values(make), tmp_path / "last.ckpt", tmp_path / "whole.ckpt"
    source.net.save_pretrained(tmp_path)
    frozen = {"load_weights_from": tmp_path, "save_frozen": False}
    resumed = checkpoint_of(on_meta(make), tokens(), last, superpipeline(**frozen))
    state = torch.load(last)["state_dict"]
    assert list(state) == ["net.lm_head.weight"]
    torch.save({**torch.load(last), "state_dict": {**source.state_dict(), **state}}, whole)
    ours = fit(on_meta(make), tokens(), superpipeline(**frozen), **resumed)
    assert_same(ours, fit(loaded(make), tokens(), **{**resumed, "ckpt_path": whole}))
    said = r"leaves out the frozen weight 'net\.model.* Load the same pretrained weights"
    with pytest.raises(RuntimeError, match=said):
        fit(on_meta(make), tokens(), superpipeline(save_frozen=False), **resumed)


def test_frozen_weights_that_came_from_a_checkpoint_stay_in_the_next(tmp_path: Path) -> None:
    """A module on the meta device does not have them by itself."""

    def make() -> pl.LightningModule:
        module = stack()
        module.net.stem.requires_grad_(False)  # type: ignore[union-attr, operator]
        return module

    resumed = checkpoint_of(make, vectors(), tmp_path / "first.ckpt")
    checkpoint_of(on_meta(make), vectors(), tmp_path / "second.ckpt", superpipeline(save_frozen=False), **resumed)
    assert list(torch.load(tmp_path / "second.ckpt")["state_dict"]) == list(make().state_dict())


def test_a_checkpoint_that_lacks_a_weight(tmp_path: Path) -> None:
    resumed = checkpoint_of(stack, vectors(), tmp_path / "last.ckpt")
    checkpoint = torch.load(tmp_path / "last.ckpt")
    del checkpoint["state_dict"]["net.stem.weight"]
    torch.save(checkpoint, tmp_path / "last.ckpt")
    with pytest.raises(RuntimeError, match=r"Missing key\(s\).*net\.stem\.weight"):
        fit(on_meta(stack), vectors(), superpipeline(), **resumed)
    lenient = on_meta(stack)()
    lenient.strict_loading = False
    with pytest.raises(ValueError, match=r"'net\.stem\.weight' is on the meta device"):
        fit(lambda: lenient, vectors(), superpipeline(), **resumed)


# ---------------------------------------------------------------------- refused


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
    with pytest.raises(ValueError, match=r"Buffer 'net\.0\.mask' is on the meta device.*init_empty_weights"):
        start(from_file(tmp_path, source.net), on_meta(make)())
    ours = fit(accelerate.init_empty_weights()(make), vectors(), from_file(tmp_path, source.net))
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
    module, before = Module(model), torch.get_rng_state()
    SuperpipelineStrategy()._given.restore(module, {"net.weight": torch.full((1,), 3.0)})
    SuperpipelineStrategy()._given.complete(module, training=True)
    assert torch.equal(torch.get_rng_state(), before)
    assert [name for name, buffer in model.named_buffers() if buffer.is_meta] == ["partly", "drawn", "left"]
    assert (model.computed.tolist(), model.weight.item()) == ([1.0] * 4, 3.0)


class Special(nn.Parameter):
    pass


SPECIAL: dict[str, tuple[Callable[[Any], Any], str]] = {
    "nothing": (lambda stem: None, "load_weights_from=FILE"),
    "hook": (lambda stem: stem.weight.register_hook(lambda gradient: gradient), "has hooks"),
    "late hook": (lambda stem: stem.weight.register_post_accumulate_grad_hook(lambda weight: None), "has hooks"),
    "class": (lambda stem: setattr(stem, "weight", Special(stem.weight)), "of class Special"),
    "view": (
        lambda stem: setattr(stem, "bias", nn.Parameter(stem.weight[0])),
        r"view of the memory of 'net\.stem\.weight'",
    ),
    "script": (torch.jit.script, "ScriptModule"),
}


@pytest.mark.parametrize("name", SPECIAL)
@pytest.mark.filterwarnings("ignore:.*torch.jit.*")
def test_parameters_that_are_not_simple_or_have_no_file(name: str, tmp_path: Path) -> None:
    make_special, said = SPECIAL[name]
    module: Any = on_meta(stack)()
    module.net.stem = make_special(module.net.stem) if name == "script" else module.net.stem
    make_special(module.net.stem)
    strategy = superpipeline() if name == "nothing" else from_file(tmp_path, Stack())
    with pytest.raises(ValueError, match=rf"'net\.stem\.(weight|bias)' is on the meta device.*{said}.*on the CPU"):
        start(strategy, module)


def another(state: dict[str, Tensor]) -> None:
    state.clear()
    state["a"] = torch.ones(1)


STEM, MORE = "stem.weight", r"It lacks 'net\.stem\.weight' of shape \(16, 16\)\. The "
WRONG: dict[str, tuple[Callable[[dict[str, Tensor]], Any], str]] = {
    "missing": (lambda state: state.pop(STEM), rf"its 'net'\. {MORE}file"),
    "unexpected": (lambda state: state.update(more=torch.ones(3)), r"its 'net'\. The module has no 'more' of shape \(3,\)"),
    "another": (another, r"does not fit Module\. It lacks .* and \d+ more"),
    "shape": (lambda state: state.update({STEM: torch.ones(2, 3)}), rf"{MORE}module has no 'stem\.weight' of shape \(2, 3\)"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_files_that_do_not_fit(name: str, tmp_path: Path) -> None:
    """It is said before anything is read."""
    change, said = WRONG[name]
    state, module = dict(Stack().state_dict()), on_meta(stack)()
    change(state)
    save_file(state, tmp_path / "net.safetensors")
    with pytest.raises(ValueError, match=said):
        start(superpipeline(load_weights_from=tmp_path / "net.safetensors"), module)
    assert all(parameter.is_meta for parameter in module.parameters())


def test_files_that_are_not_there(tmp_path: Path, monkeypatch: Any) -> None:
    module, index = on_meta(stack)(), tmp_path / "model.safetensors.index.json"

    def refused(kind: type[Exception], said: str, path: Path = tmp_path) -> None:
        with pytest.raises(kind, match=said):
            start(superpipeline(load_weights_from=path), module)

    refused(FileNotFoundError, "file not found", tmp_path / "none.safetensors")
    refused(ValueError, "found neither.*save_pretrained")
    for name in ("one", "two"):
        save_file({"a": torch.ones(1)}, tmp_path / f"{name}.safetensors")
    refused(ValueError, r"several \*\.safetensors \(one\.safetensors, two\.safetensors\)")
    index.write_text('{"weight_map": {"a": "three.safetensors"}}')
    refused(FileNotFoundError, "names 'three.safetensors', which is not beside it")
    for content, said in (([1], "expected a Lightning checkpoint .* found list"), ({"a": 1}, "found int")):
        torch.save(content, tmp_path / "other.pt")
        refused(ValueError, said, tmp_path / "other.pt")
    monkeypatch.setitem(sys.modules, "safetensors", None)
    refused(ImportError, "pip install safetensors", tmp_path / "one.safetensors")
    with pytest.raises(TypeError, match=r'path of a file or a folder, found 3. For example load_weights_from="model"'):
        superpipeline(load_weights_from=3)
    with pytest.raises(ValueError, match=r"all parameters of Module have values. Leave it out"):
        start(superpipeline(load_weights_from=tmp_path / "one.safetensors"))


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.parametrize(
    ("patched", "options", "said"),
    [
        (("available_bytes", 1000), {}, "for the weights"),
        (("available_bytes", 1000), {"disk": True}, "for the weights"),  # all are trained, so that none stays in the file
        (("resident_bytes", 2**30), {"host_memory": 2**30 + 96 * 2**20},
         r'host_memory="1120MiB" is too little: .* for the weights'),
    ],
)  # fmt: skip
def test_more_than_the_host_has(patched: Any, options: Any, said: str, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(host_memory, patched[0], lambda: patched[1])
    options = {"disk": tmp_path} if "disk" in options else options
    with pytest.raises(MemoryError, match=said):
        start(from_file(tmp_path, Stack(), **options), on_meta(stack)())
