"""The registries of programs, of loops and of refusals.

A program is user code that runs in a training. It names the variants in which it has to be equal to plain Lightning, and those in
which it is refused, with the text of the error. To add a test, write a program below ``tests/equality/programs``::

    @program("disk: averages written in place", tiers(rest=["state, forward"], long=["state"]), at="on_train_batch_end")
    def _(m: Any) -> None:
        \"\"\"What was read for the write is written back, not what was on the disk.\"\"\"
        for state in m.optimizer.state.values():
            state["exp_avg"].mul_(0.5)

``test_programs.py`` runs it: losses, gradients, parameters, buffers, optimizer state, random state and what the program has put
into ``m.seen`` are compared bitwise. With ``run="predict"`` or ``run="validate"`` the trainer does that in place of training, and
what it returns is compared. With ``validated=True`` a training is validated after its epoch.

A name is ``subject: promise``. Callbacks are made by ``callbacks=lambda: [Mine()]``; they get the module, so they can put
something into ``m.seen``, too. ``variants.py`` explains the names of variants: begin with ``users, k=1``, where no hook of the
tests' looks at gradients, and ``keep, k=1``, where one does. What our run alone is to show (a count, ``m.noted``) is asserted
by ``also=``. For a refusal, write ``refused={"users, k=1": "?"}``: the test fails, and shows the text.

A loop is such code without a Trainer (:func:`loop`). A mistake is code that raises an error, with its text (:func:`mistake`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import partial
from typing import Any, TypeVar

import pytest

from tests.equality.cases import Case
from tests.equality.variants import OF_PROGRAMS, VARIANTS, Variant
from tests.support.models import vectors
from tests.support.moments import At
from tests.support.runs import Batches, Make, Outcome

Tiers = dict[str, int]
"""Variants by name, with the tier in which a program runs in each of them."""
MARKS: dict[int, Any] = {
    1: (),
    2: pytest.mark.rest("takes tenths of a second"),
    3: pytest.mark.long("the second tier has this program in another variant, or one of its kind"),
}
T = TypeVar("T")
Streamed = Callable[..., AbstractContextManager[Any]]
"""``sp_lightning.stream`` with the options of a variant; or, for the reference, a context that does nothing."""


@dataclass(frozen=True, kw_only=True)
class Program(Case):
    """A case with user code of its own.

    Args:
        variants: how it is trained.
        trainer: options of the trainer, besides those of the variant.
        strategy: options of the strategy, in place of those of the variant.
        validated: whether a training has a validation, with the first two batches.
        repairable: whether it trains, equal to plain Lightning, with the option that its refusal names.
        inside: a context around our run alone: a fault of the system, or a count of calls. What it yields is
            ``ours.extra["inside"]``.
        checkpointed: whether the reference has torch's checkpoint around each unit that is recomputed.
        also: what else is asserted of our run. It gets our outcome; ``ours.module.noted`` has what the program noted, and
            ``ours.extra["plain"]`` is plain Lightning's outcome.
    """

    variants: Tiers = field(default_factory=dict)
    trainer: Mapping[str, Any] = field(default_factory=dict)
    strategy: Mapping[str, Any] = field(default_factory=dict)
    validated: bool = False
    repairable: bool = True
    inside: Callable[[], AbstractContextManager[Any]] = nullcontext
    checkpointed: bool = False
    also: Callable[[Outcome], None] = lambda ours: None

    def options(self, options: dict[str, Any]) -> dict[str, Any]:
        return {**super().options(options), **self.trainer}

    def validation(self) -> Batches | None:
        return super().validation() if self.validated else None


PROGRAMS: dict[str, Program] = {}
REFUSALS: dict[tuple[str, str], str] = {}
"""For a program and a variant the error, a pattern of ``Class: text``. An option that the text names is tried."""


def tiers(*first: str, rest: Iterable[str] = (), long: Iterable[str] = ()) -> Tiers:
    """Variants by tier: a first one below 0.3 s, ``rest`` below a few seconds, ``long`` for the others."""
    return {**dict.fromkeys(first, 1), **dict.fromkeys(rest, 2), **dict.fromkeys(long, 3)}


def _check_names(name: str, variants: Tiers) -> None:
    for each in variants:
        known = [*VARIANTS, *OF_PROGRAMS]
        assert each in known, f"{name!r}: no variant {each!r}, but perhaps {get_close_matches(each, known, 5)}"


def program(
    name: str,
    variants: Tiers,
    *,
    at: str = "",
    of: Callable[..., Make] | None = None,
    on: Callable[..., Any] = At,
    batches: Callable[[], Batches] = vectors,
    refused: Mapping[str, str] | None = None,
    covers: str = "",
    **more: Any,
) -> Callable[[T], T]:
    """Registers a program: a class or function that makes a module, a block (with ``of``), or code (with ``at``).

    Args:
        name: option and promise, in nouns.
        variants: the variants in which it is equal, with their tiers.
        at: the moment at which the decorated code runs (:class:`tests.support.moments.At`).
        of: makes what makes the module from the decorated class.
        on: makes the module in which code runs.
        batches: makes the batches.
        refused: variants in which it is refused, with the error; they need a tier as well.
        covers: one sentence. By default it is the docstring.
        more: fields of :class:`Program`, and options of the trainer.
    """

    def register(made: Any) -> Any:
        make = partial(on, **{at: made}) if at else made if of is None else of(made)
        sentence = covers or (made.__doc__ or "").strip()
        assert name not in PROGRAMS, f"two programs are called {name!r}"
        assert len(sentence.split()) > 2, f"{name!r} needs a sentence that says what it covers"
        fields = {key: more.pop(key) for key in list(more) if key in Program.__dataclass_fields__}
        PROGRAMS[name] = Program(
            make=make, batches=batches, covers=sentence, variants=variants, trainer=more, **fields
        )  # fmt: skip
        REFUSALS.update({(name, variant): said for variant, said in (refused or {}).items()})
        _check_names(name, variants)
        assert (refused or {}).keys() <= variants.keys(), f"{name!r}: in which tier is each refusal?"
        return made

    return register


def variant_of(name: str) -> Variant:
    return VARIANTS[name] if name in VARIANTS else OF_PROGRAMS[name]


def rows(*, refused: bool) -> list[Any]:
    """Parameters of a test: a program and a variant, with the mark of their tier."""
    return [
        pytest.param(name, variant, id=f"{name} | {variant}", marks=MARKS[tier])
        for name, program in PROGRAMS.items()
        for variant, tier in program.variants.items()
        if ((name, variant) in REFUSALS) == refused
    ]


@dataclass(frozen=True, kw_only=True)
class Loop:
    """A loop without a Trainer.

    Args:
        train: gets :data:`Streamed`, or a Fabric, and returns all that is compared.
        variants: how it is streamed.
        covers: one sentence.
        fabric: makes options of the Fabric that ``train`` gets; None if it gets :data:`Streamed`.
        inside: a context around our run alone.
    """

    train: Callable[[Any], Any]
    variants: Tiers
    covers: str
    fabric: Callable[[], dict[str, Any]] | None = None
    inside: Callable[[], AbstractContextManager[Any]] = nullcontext


@dataclass(frozen=True)
class Mistake:
    """Code that raises an error, a pattern of ``Class: text``, in a tier."""

    code: Callable[[], Any]
    said: str
    tier: int


LOOPS: dict[str, Loop] = {}
MISTAKES: dict[str, Mistake] = {}


def loop(name: str, variants: Tiers, *, covers: str = "", **more: Any) -> Callable[[T], T]:
    """Registers a loop: a function that trains. For ``more`` see :class:`Loop`."""

    def register(train: Any) -> Any:
        assert name not in LOOPS, f"two loops are called {name!r}"
        LOOPS[name] = Loop(train=train, variants=variants, covers=covers or (train.__doc__ or "").strip(), **more)
        _check_names(name, variants)
        assert len(LOOPS[name].covers.split()) > 2, f"{name!r} needs a sentence that says what it covers"
        return train

    return register


def mistake(name: str, said: str, *, tier: int = 1) -> Callable[[T], T]:
    """Registers code that raises an error. The code may go on, as the error says, where it catches it itself."""

    def register(code: Any) -> Any:
        assert name not in MISTAKES, f"two mistakes are called {name!r}"
        MISTAKES[name] = Mistake(code, said, tier)
        return code

    return register


def loop_rows() -> list[Any]:
    """Parameters of a test: a loop and a variant, with the mark of their tier."""
    return [
        pytest.param(name, variant, id=f"{name} | {variant}", marks=MARKS[tier])
        for name, each in LOOPS.items()
        for variant, tier in each.variants.items()
    ]


def mistake_rows() -> list[Any]:
    """Parameters of a test: mistakes, with the mark of their tier."""
    return [pytest.param(name, marks=MARKS[each.tier]) for name, each in MISTAKES.items()]
