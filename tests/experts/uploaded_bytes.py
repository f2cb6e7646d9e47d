"""Trains small models with adapters on stacked experts, and prints the uploaded bytes of experts::

python -m tests.experts.uploaded_bytes
"""

from __future__ import annotations

import datetime
import importlib.metadata
import logging
import platform
import warnings

from tests.support import stacked
from tests.support.runs import assert_same, fit, superpipeline


def row(name: str, *, packed: bool) -> str:
    """Returns a row of the table. The run has the results of plain Lightning, or an error is raised."""
    make, batches, strategy = stacked.adapted(name, packed=packed), stacked.tokens(), superpipeline(k=1)
    assert_same(fit(make, batches, strategy), fit(make, batches))
    whole = len(batches) * strategy.plan.stack_bytes  # backward needs no stack that has an adapter
    return f"| {name} | {'nvfp4' if packed else 'float32'} | {whole:,} | {strategy.stats().expert_bytes:,} |"


def main() -> None:
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    packages = ("torch", "lightning", "transformers", "peft", "torchao")
    versions = ", ".join(f"{each} {importlib.metadata.version(each)}" for each in packages)
    print(f"{datetime.date.today()}, {platform.machine()}, Python {platform.python_version()}, {versions}\n")
    print("| model | experts | all experts in each forward | uploaded |")
    print("|---|---|---|---|")
    for name in stacked.WIDER:
        for packed in (False, True):
            print(row(name, packed=packed), flush=True)


if __name__ == "__main__":
    main()
