"""What the server of ranks imports before it forks."""

import lightning.pytorch  # noqa: F401
import torch
import torchvision  # noqa: F401
import transformers  # noqa: F401

import sp_lightning  # noqa: F401

torch.set_num_threads(1)
