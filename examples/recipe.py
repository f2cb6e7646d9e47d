"""The former place of ``examples/demos/recipe.py``, for ``train_vision.py``."""

from examples.demos.recipe import (
    HOLDS_TRAINING,
    add_run_options,
    check_file,
    check_least,
    check_positive,
    cuda_peak,
    make_trainer,
    plain_steps_per_second,
    plain_training_bytes,
    prepare_output,
    run,
)

__all__ = [
    "HOLDS_TRAINING",
    "add_run_options",
    "check_file",
    "check_least",
    "check_positive",
    "cuda_peak",
    "make_trainer",
    "plain_steps_per_second",
    "plain_training_bytes",
    "prepare_output",
    "run",
]
