"""What only a device with memory, streams and an allocator of its own can show, in numbers that do not depend on speed."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from sp_lightning import SuperpipelineStrategy
from sp_lightning.core.device.accelerator import Accelerator
from sp_lightning.core.device.device import Stream
from tests.support.models import CASES, Module, Stack, llama, tokens, vectors
from tests.support.runs import assert_same, fit
