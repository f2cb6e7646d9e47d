"""The command ``plan``."""

from __future__ import annotations

import gc
import logging
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from sp_lightning.planner.answer import Answer, answer
from sp_lightning.planner.arguments import Question
from sp_lightning.planner.budget import best_first, budgets, fields, in_words
from sp_lightning.planner.estimate import estimate_model
from sp_lightning.planner.measured import with_rates
from sp_lightning.planner.model_source import find_config
from sp_lightning.planner.remedies import remedies
from sp_lightning.planner.report import as_fields, as_table, as_text, in_json
from sp_lightning.planner.verdict import verdict


def run_plan(questions: Sequence[Question]) -> None:
    """Prints the answers: one in detail, several as a table.

    Raises:
        ValueError, ImportError: a question cannot be answered.
        SystemExit: with the highest :attr:`~sp_lightning.planner.answer.Answer.status`. A status of 0 raises no error.
    """
    questions = with_rates(questions)
    answers: list[Answer] = []
    with _nothing_else_said(), _no_garbage_collected():
        for line in _lines(questions, answers):
            print(line, flush=True)
    if status := max(each.status for each in answers):
        raise SystemExit(status)


def _lines(questions: Sequence[Question], answers: list[Answer]) -> Iterator[str]:
    """Yields the output as soon as it is known. Appends each answer to ``answers``."""
    for question in questions:
        find_config(question.model)  # raises an error about an invalid name before any model is built
    if questions[0].hours is not None:
        yield from _in_hours(questions, answers)
        return
    found = (_answer(question, answers) for question in questions)
    if questions[0].json:
        yield in_json([as_fields(each) for each in found])
    elif len(questions) > 1:
        yield from as_table(questions, found)
    else:
        (one,) = found
        yield _with_remedies(one)


def _with_remedies(one: Answer) -> str:
    """Returns an answer as text. If plain Lightning does not fit, and activations are known, remedies are tried."""
    return as_text(one, remedies(one, _notify) if one.status < 3 and not one.fits_plain else [])


def _in_hours(questions: Sequence[Question], answers: list[Answer]) -> Iterator[str]:
    """Yields the output of ``--hours``: for each model and sequence length, the best way to train and its plan.

    Appends the answer of each best way to ``answers``. If no way fits, this is the answer to the first question of the group.
    """
    groups: dict[tuple[object, ...], list[Question]] = {}
    for question in questions:
        groups.setdefault((question.model, question.tokens), []).append(question)
    found: list[dict[str, object]] = []
    for first, *more in groups.values():
        ways = best_first(way for question in (first, *more) for way in budgets(question, _notify))
        answers.append(ways[0].answer if ways else answer(estimate_model(first)))
        if first.json:
            found.append(as_fields(answers[-1]) | (fields(ways[0]) if ways else {}))
        elif ways:
            rest = as_text(answers[-1], []) if len(groups) == 1 else verdict(answers[-1])
            yield "\n".join([*in_words(ways, first), "", rest, ""])
        else:
            yield _with_remedies(answers[-1])
    if found:
        yield in_json(found)


def _answer(question: Question, answers: list[Answer]) -> Answer:
    """Answers a question, and appends the answer to ``answers``. Sets ``question.predict`` for ``--generate``."""
    question.predict = question.predict or question.generate is not None
    _notify(f"runs a batch of {question.model} without values")
    answers.append(answer(estimate_model(question)))
    return answers[-1]


def _notify(what: str) -> None:
    """Prints a message before a slow step, if the standard error is a terminal."""
    if sys.stderr.isatty():
        print(f"plan {what} …", file=sys.stderr, flush=True)


@contextmanager
def _nothing_else_said() -> Iterator[None]:
    """Hides warnings and logs of libraries. With fake tensors, torch logs errors, for example about an unsupported size."""
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


@contextmanager
def _no_garbage_collected() -> Iterator[None]:
    """Disables garbage collection, which takes a second for the imported modules and frees almost nothing."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
