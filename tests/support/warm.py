"""What the server of ranks imports before it forks, so that no process imports it by itself."""

import torch

import tests.equality.on_ranks
import tests.support.models  # noqa: F401
from tests.support.runs import imports_are_over

torch.set_num_threads(1)
imports_are_over()
