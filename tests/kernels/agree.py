"""Which recipes have torch's bits on this machine: ``python -m tests.kernels.agree [N]``, for N variants of each optimizer (all).

It imports torch, llvmlite and ``sp_lightning.capabilities.kernels`` alone, so that it runs where little can be installed, as
in an emulator.
"""

from __future__ import annotations

import random
import sys
from collections import Counter
from functools import partial
from itertools import product

import torch

from sp_lightning.capabilities.kernels import norms, update
from sp_lightning.capabilities.kernels.variants import Variant


def variants() -> list[Variant]:
    """All that there are, in an order of chance."""
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    found = []
    for gradient, cast, factors, maximize, decays in product(
        dtypes, (None, *dtypes[1:]), (0, 1, 2), (False, True), (False, True)
    ):
        make = partial(Variant, gradient=gradient, cast=cast, factors=factors, maximize=maximize, decays=decays)
        for amsgrad, near in product((False, True), repeat=2):
            found += [make("adam", amsgrad=amsgrad, near=near), make("adamw", amsgrad=amsgrad, near=near)]
        for momentum, begun, nesterov in ((0, 0, 0), (1, 0, 0), (1, 1, 0), (1, 0, 1), (1, 1, 1)):
            found.append(make("sgd", momentum=bool(momentum), first=bool(begun), nesterov=bool(nesterov)))
        found.append(make("adagrad"))
    return random.Random(7).sample(found, len(found))


def main(most: int = sys.maxsize) -> None:
    """Prints how many variants agree with which recipe, and whether norms do."""
    print(f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}")
    seen, agree = Counter[str](), Counter[str]()
    for variant in variants():
        seen[variant.kind] += 1
        if seen[variant.kind] <= most:
            found = update._checked(variant)
            agree[f"{variant.kind}: {'none' if found is None else found[1]}"] += 1
    for what, count in sorted(agree.items()):
        print(f"{count:>5} {what}")
    for dtype in norms._DTYPES:
        print(f"norms of {dtype}: {'none' if norms._checked(dtype) is None else 'agree'}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
