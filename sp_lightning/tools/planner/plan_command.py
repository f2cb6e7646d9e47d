"""The command ``plan``."""

from __future__ import annotations

import gc
import json
import logging
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from sp_lightning.tools.planner.answer import answer
from sp_lightning.tools.planner.arguments import Question
from sp_lightning.tools.planner.estimate import estimate_model
from sp_lightning.tools.planner.measured import with_rates
from sp_lightning.tools.planner.model_source import find_config
from sp_lightning.tools.planner.report import as_fields, as_text


def run_plan(question: Question) -> None:
    """Prints the answer.

    Raises:
        ValueError, ImportError: the question cannot be answered.
        SystemExit: with :attr:`~sp_lightning.tools.planner.answer.Answer.status`. A status of 0 raises no error.
    """
    question = with_rates(question)
    find_config(question.model)  # raises an error about an invalid name before any model is built
    question.predict = question.predict or question.generate is not None
    with _quiet():
        if sys.stderr.isatty():
            print(f"plan runs a batch of {question.model} without values …", file=sys.stderr, flush=True)
        found = answer(estimate_model(question))
        if question.json:
            print(json.dumps(as_fields(found), indent=2))
        else:
            print("\n".join(as_text(found)))
    if found.status:
        raise SystemExit(found.status)


@contextmanager
def _quiet() -> Iterator[None]:
    """Hides warnings and logs of libraries. With fake tensors, torch logs errors, for example about an unsupported size.

    Also disables garbage collection, which takes a second for the imported modules and frees almost nothing.
    """
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    gc.disable()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        gc.enable()
        logging.disable(before)
