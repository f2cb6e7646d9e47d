"""``plan``: does a model fit, with which k, and how fast?"""

from __future__ import annotations

import logging
from pathlib import Path

from sp_lightning.cli.answer import Answer, answer
from sp_lightning.cli.arguments import Question, complete, make_parser
from sp_lightning.cli.report import as_json, as_text
from sp_lightning.device.torch_private import FAKE_TENSOR_LOGGER
from sp_lightning.observe.plot import Point, draw_windows, require_matplotlib


def run_plan(arguments: list[str]) -> None:
    """Answers on the standard output.

    Raises:
        SystemExit: with status 1 if the model does not fit, with status 2 if the question cannot be answered.
    """
    parser = make_parser()
    question = parser.parse_args(arguments, namespace=Question())
    question.predict = question.predict or question.generate is not None
    logging.getLogger("transformers").setLevel(logging.ERROR)
    # torch logs every error under its FakeTensorMode, and a size that the model cannot take is one.
    logging.getLogger(FAKE_TENSOR_LOGGER).setLevel(logging.CRITICAL)
    if question.plot is not None:
        require_matplotlib()
        question.plot.parent.mkdir(parents=True, exist_ok=True)
    try:
        complete(question)
        answered = answer(question)
    except (ValueError, ImportError) as error:
        parser.exit(2, f"python -m sp_lightning plan: {error}\n")
    print(as_json(answered) if question.json else as_text(answered), flush=True)
    if question.plot is not None:
        _draw(answered, question.plot)
    if answered.best is None:
        raise SystemExit(1)


def _draw(answered: Answer, path: Path) -> None:
    question = answered.question
    points = [Point(row.plan.k, row.plan.k_prime, row.device_bytes, row.prediction.seconds) for row in answered.rows]
    draw_windows(points, question.gpu_memory, path, f"{answered.estimate.model.name}, {question.precision}")
