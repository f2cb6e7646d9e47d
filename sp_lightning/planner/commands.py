"""The commands: ``plan``, ``convert``, and those of Lightning's CLI, which finds this strategy registered."""

from __future__ import annotations

import gc
import logging
import os
import pickle
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from sp_lightning.observe.plot import Point, draw_windows, require_matplotlib
from sp_lightning.planner.answer import Answer, answer
from sp_lightning.planner.arguments import PROGRAM, Question
from sp_lightning.planner.budget import Budget, best_first, budgets, fields, in_words, sizes
from sp_lightning.planner.estimate import estimate_model
from sp_lightning.planner.measured import corrected, with_rates
from sp_lightning.planner.model_source import find_config
from sp_lightning.planner.remedies import remedies
from sp_lightning.planner.report import as_fields, as_table, as_text, in_json
from sp_lightning.planner.trials import lacking
from sp_lightning.planner.verdict import verdict
from sp_lightning.ranks.checkpoint_folder import write
from sp_lightning.trainer.checkpoint_io import AtomicCheckpointIO


def run_plan(questions: Sequence[Question]) -> None:
    """Answers on the standard output: one question at length, several in a table.

    Raises:
        ValueError, ImportError: a question cannot be answered.
        SystemExit: with :attr:`~sp_lightning.planner.answer.Answer.status`, unless that is 0.
    """
    questions = with_rates(questions)
    first = questions[0]
    if first.plot is not None:
        require_matplotlib()
        first.plot.parent.mkdir(parents=True, exist_ok=True)
    answers: list[Answer] = []
    with _nothing_else_said(), _no_garbage_collected():
        for line in _lines(questions, answers):
            print(line, flush=True)
    if first.plot is not None:
        points = [
            Point(row.plan.k, row.plan.k_prime, row.device_bytes, row.prediction.seconds) for row in answers[0].rows
        ]
        draw_windows(points, first.gpu_memory, first.plot, f"{first.model}, {first.precision}")
    if status := max(max(each.status, bool(lacking(each))) for each in answers):
        raise SystemExit(status)


def _lines(questions: Sequence[Question], answers: list[Answer]) -> Iterator[str]:
    """What is printed, as soon as it is known. Adds the answers to the list."""
    for question in questions:
        find_config(question.model)  # a name that cannot be is refused before any model is made
    if questions[0].hours is not None:
        yield from _in_hours(questions, answers)
        return
    found = (_answer(corrected(question, _say), answers) for question in questions)
    if questions[0].json:
        yield in_json([as_fields(each) for each in found])
    elif len(questions) > 1:
        yield from as_table(questions, found)
    else:
        (one,) = found
        yield _with_remedies(one)


def _with_remedies(one: Answer) -> str:
    return as_text(one, remedies(one, _say) if one.status < 3 and not one.fits_plain else [])


def _in_hours(questions: Sequence[Question], answers: list[Answer]) -> Iterator[str]:
    """What the time is enough for: of each model, size and length the best way, with what it rests on."""
    groups: dict[tuple[object, ...], list[Question]] = {}
    for question in questions:
        key = question.model, question.tokens, question.scale
        groups.setdefault(key, []).append(corrected(question, _say))
    chosen, found = list[Budget](), list[dict[str, object]]()
    for first, *more in groups.values():
        ways = best_first(way for question in (first, *more) for way in budgets(question, _say))
        answers.append(ways[0].answer if ways else answer(estimate_model(first)))
        if first.json:
            found.append(as_fields(answers[-1]) | (fields(ways[0]) if ways else {}))
        elif ways:
            rest = as_text(answers[-1], []) if len(groups) == 1 else verdict(answers[-1])
            yield "\n".join([*in_words(ways, first), "", rest, ""])
        else:
            yield _with_remedies(answers[-1])
        chosen += ways[:1]
    if found:
        yield in_json(found)
    else:
        yield from sizes(chosen)


def _answer(question: Question, answers: list[Answer]) -> Answer:
    question.predict = question.predict or question.generate is not None
    _say(f"runs a batch of {question.model} without values")
    answers.append(answer(estimate_model(question)))
    return answers[-1]


def _say(what: str) -> None:
    """Says on a terminal what takes its time."""
    if sys.stderr.isatty():
        print(f"plan {what} …", file=sys.stderr, flush=True)


@contextmanager
def _nothing_else_said() -> Iterator[None]:
    """Hides what libraries warn of. torch logs even errors under its FakeTensorMode, such as a size that a model cannot take."""
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
    """Keeps Python from looking for cycles in all that is imported, which takes a second and frees next to nothing."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def run_lightning(arguments: list[str]) -> None:
    """Runs Lightning's CLI.

    Raises:
        SystemExit: jsonargparse is missing, the arguments name no model, or a value in the configuration is invalid. The
            message has the reason.
    """
    named = [word.partition("=")[0] for word in arguments]
    if not {"--model", "--config", "-c", "--help", "-h", "--print_config"} & set(named):
        raise SystemExit(
            f"{PROGRAM} {arguments[0]}: no model. Expected --config FILE or --model package.Class. For example "
            f"{PROGRAM} {arguments[0]} --config examples/configs/fit_llm.yaml"
        )
    try:
        from lightning.pytorch.cli import LightningCLI

        # With arguments of its own, the CLI warns that sys.argv has others.
        LightningCLI(args=arguments) if arguments != sys.argv[1:] else LightningCLI()
    except ModuleNotFoundError as error:
        if "jsonargparse" not in str(error):
            raise
        raise SystemExit(f'{error} Install it: pip install "jsonargparse[signatures]".') from error
    except ValueError as error:
        # jsonargparse lists every type that it tried, and the value in full. The user needs the reasons alone.
        tried = str(error).partition("\nErrors:\n  - ")[2].partition("\nGiven value type:")[0].split("\n  - ")
        reasons = [reason for reason in tried if reason and not reason.startswith("Expected a ")]
        if not reasons:
            raise
        raise SystemExit(f"{PROGRAM} {arguments[0]}: {' '.join(reasons)}") from error


def run_convert(source: Path, target: Path, *, trust: bool) -> None:
    """Converts a checkpoint: a folder becomes a file of plain Lightning's, a file becomes a folder.

    Args:
        source: the checkpoint.
        target: what is written; it must not be there.
        trust: whether the checkpoint may hold other objects than tensors and plain values.

    Raises:
        ValueError, OSError: the checkpoint cannot be read, or cannot be written.
    """
    io = AtomicCheckpointIO()
    if os.path.lexists(target):
        raise ValueError(f"{target} is there already. Name another target, or remove it.")
    try:
        checkpoint = io.load_checkpoint(source, weights_only=not trust)
    except pickle.UnpicklingError as error:
        raise ValueError(
            f"{source} holds more than tensors and plain values. If you trust it: --trust. ({error})"
        ) from error
    if not isinstance(checkpoint, dict):
        raise ValueError(f"{source} holds a {type(checkpoint).__name__}, and no checkpoint.")
    if source.is_dir():
        io.save_checkpoint(checkpoint, target)
    else:
        write(checkpoint, target, {})
