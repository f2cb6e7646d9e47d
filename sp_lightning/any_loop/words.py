"""The words of errors and log lines in a loop without Lightning. The other folders write for Lightning's users."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager

_WORDS = {
    r"( Or s| S)tore the rest on a disk: SuperpipelineStrategy\(.*?\)\.": "",
    r"SuperpipelineStrategy\(": "sp_lightning.stream(model, optimizer, ",
    "SuperpipelineStrategy": "stream()",
    "optimization is manual": "a loop does not say before a backward that a step follows",
    "inside training_step": "between forward and backward",
    r"trainer\.fit( \(validate, test, predict\))?": "the loop",
    ", or with a new model: this trainer has saved none": " or with a new model",
    r"It is an option of the Trainer: Trainer\(precision=.*?\)\.": "Use autocast=torch.bfloat16, in torch.autocast.",
    r"It is an option of the Trainer: .*?\)\.": "Leave it out: that is done by your loop.",
    r'Trainer\(accelerator="cpu"\) or Trainer\(accelerator="gpu"\)': 'device="cpu" or device="cuda"',
    r'Trainer\(precision="bf16-true"\)': "model.to(torch.bfloat16)",
    r"Trainer\(deterministic=True\)": "torch.use_deterministic_algorithms(True)",
    "plain Lightning": "the plain loop",
}  # fmt: skip
"""By pattern, what stands in its place. In this order."""


def in_words_of_a_loop(text: str) -> str:
    """Returns a message that is written for Lightning's users in the words of a loop."""
    for pattern, words in _WORDS.items():
        text = re.sub(pattern, words, text)
    return text


def reword(error: BaseException) -> None:
    """Says the message and the notes of an error in the words of a loop."""
    said = tuple(in_words_of_a_loop(each) if isinstance(each, str) else each for each in error.args)
    if said != error.args:  # errors of the user's code stay as they are
        error.args = said
    if notes := getattr(error, "__notes__", None):
        notes[:] = map(in_words_of_a_loop, notes)


@contextmanager
def in_loop() -> Iterator[None]:
    """A context, or a decorator, that puts errors into the words of a loop."""
    try:
        yield
    except BaseException as error:
        reword(error)
        raise


def _reword_record(record: logging.LogRecord) -> bool:
    record.msg, record.args = in_words_of_a_loop(record.getMessage()), ()
    return True


LOG = logging.getLogger("lightning.pytorch.superpipeline.loop")
"""The logger of streams."""
LOG.addFilter(_reword_record)
