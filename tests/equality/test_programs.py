"""Each program of the registry is bitwise equal to plain Lightning in its variants, or refused by name.

One row: ``pytest -n 0 'tests/equality/test_programs.py::test_a_program_is_equal[NAME | VARIANT]'``, or ``…_is_refused[…]``.
Warnings are errors; the filters below are for what torch says to programs that are right.
"""

from __future__ import annotations

import ast
import re
from dataclasses import replace

import lightning.pytorch as pl
import pytest

from tests.equality.programs import LOOPS, MISTAKES, PROGRAMS
from tests.equality.rows import REFUSALS, loop_rows, mistake_rows, rows, variant_of
from tests.equality.training import DYNAMOS, looped, ours, plain
from tests.support.runs import Outcome, as_torch_can, assert_equal, assert_same

pytestmark = [
    pytest.mark.usefixtures("everything_is_worth_moving"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated"),  # torch.func.jvp calls it the first time
    # torch announces that saved-tensor hooks will see what these checkpoints save; ours keep what is no weight.
    pytest.mark.filterwarnings(
        "ignore:A saved_tensors_hooks context .* is active around a selective activation:FutureWarning"
    ),
    pytest.mark.filterwarnings("ignore:`torch.jit.trace.*` is deprecated"),
    pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node"),  # torch.func.linearize itself
    pytest.mark.filterwarnings("ignore:`torch.nn.utils.spectral_norm` is deprecated"),
    pytest.mark.filterwarnings("ignore:TorchaoLoraLinear was instantiated without"),  # these adapters cannot be merged
    pytest.mark.filterwarnings("ignore:`training_step` returned `None`"),
    pytest.mark.filterwarnings("ignore:.*returned `None`, this fit will run with no optimizer"),
    pytest.mark.filterwarnings(f"ignore:{DYNAMOS}:UserWarning"),
]
REMEDY = re.compile(
    r"Strategy\((?:optimizer_on=\"gpu\", )?(activations|optimizer_overlap)=(\{.*?\}|\"\w+\")|Strategy\((keep_on_gpu)=(\['.*?'\])"
    r"|Pass (optimizer_overlap)=('\w+')"
)


def compare(outcome: Outcome, reference: Outcome) -> None:
    assert_same(outcome, reference)
    mine, theirs = (getattr(each.module, "seen", None) for each in (outcome, reference))
    assert_equal(mine, theirs, "what the program has seen")
    mine, theirs = (dict(each.trainer.callback_metrics) for each in (outcome, reference))
    assert_equal(mine, theirs, "metrics")
    assert outcome.extra["draws"] == reference.extra["draws"], "random states of Python and NumPy"


def text_of(error: BaseException) -> str:
    """As Python prints it, with what was added to it."""
    return "\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())])


@pytest.mark.parametrize(("name", "variant_name"), rows(refused=False))
def test_a_program_is_equal(name: str, variant_name: str) -> None:
    program, variant = PROGRAMS[name], variant_of(variant_name)
    with as_torch_can():
        reference = plain(name, program, variant)
    outcome, _ = ours(program, variant)
    compare(outcome, reference)
    outcome.extra["plain"] = reference
    program.also(outcome)


@pytest.mark.parametrize(("name", "variant_name"), rows(refused=True))
def test_a_program_is_refused(name: str, variant_name: str) -> None:
    """With ordinary parameters afterwards; an option that the error names works."""
    program, variant = PROGRAMS[name], variant_of(variant_name)
    modules: list[tuple[pl.LightningModule, set[type]]] = []

    def make() -> pl.LightningModule:
        module = program.make()
        modules.append((module, set(map(type, module.parameters()))))
        return module

    with pytest.raises(Exception) as caught:  # noqa: PT011  # the class is a part of the text
        ours(replace(program, make=make), variant)
    found, said = text_of(caught.value), REFUSALS[name, variant_name]
    assert said != "?", found
    assert re.match(f"(?s){said}", found), found
    module, kinds = modules[-1]
    assert set(map(type, module.parameters())) <= kinds
    repaired = program
    while program.repairable and (remedy := REMEDY.search(found)):  # as often as another layer is named
        name_of, value = filter(None, remedy.groups())
        option, before = ast.literal_eval(value), repaired.strategy.get(name_of)
        if name_of == "keep_on_gpu":  # one weight is named at a time
            option = sorted({*(before or ()), *option})
        assert option != before, f"the option does not help: {found}"
        repaired = replace(repaired, strategy={**repaired.strategy, name_of: option})
        try:
            outcome, _ = ours(repaired, variant)
        except RuntimeError as error:
            found = text_of(error)
            continue
        # Plain Lightning's fused steps do not take what ours refuse in one mode of updates only.
        if name_of != "optimizer_overlap":
            compare(outcome, plain(name, program, variant))
        return


@pytest.mark.parametrize(("name", "variant_name"), loop_rows())
def test_a_loop_is_equal(name: str, variant_name: str) -> None:
    """Without a Trainer, in a stream or with our strategy of Fabric."""
    assert_equal(looped(LOOPS[name], variant_of(variant_name)), looped(LOOPS[name], None), name)


@pytest.mark.parametrize("name", mistake_rows())
def test_a_mistake_is_explained(name: str) -> None:
    with pytest.raises(BaseException) as caught:  # noqa: PT011  # the class is a part of the text
        MISTAKES[name].code()
    assert re.match(f"(?s){MISTAKES[name].said}", found := text_of(caught.value)), found
