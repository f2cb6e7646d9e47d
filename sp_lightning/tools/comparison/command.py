"""The commands ``check`` and ``dial``. Nothing here imports torch before a command runs, so that ``--help`` is fast."""

from __future__ import annotations

import argparse
import ast
import json
import sys
import traceback
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sp_lightning.tools.comparison.options import SMALL, STRATEGY_OPTIONS

HELP = (
    "compare your own model with plain Lightning, bit for bit (exit status 1: different, 2: not compared); without a model, "
    "compare small ones, and measure this machine"
)
_FILE = Path("superpipeline-check.json")

if TYPE_CHECKING:
    from sp_lightning.tools.comparison.dial import Dial

DIAL_HELP = (
    "measure memory (weights, gradients, optimizer state, activations) and time of a model with plain Lightning and with some k "
    "and k' (exit status 1: a run stopped)"
)

_CHECK_OPTIONS = ("factory", "data", "config", "steps", "seed")
_TRAINER_OPTIONS = ("accelerator", "precision")
_LISTS = ("layers", "keep_on_gpu")
_FACTORY = "package.module:Factory, which makes the LightningModule"
_WINDOWS = {"k": "layers usable on the GPU at once", "k_prime": "layers per transfer; each with each k"}
_DIALED = ("llm", "vit", "vlm")
_DEFAULTS = {"k": (1, 2, 4), "k_prime": (1, 2)}
_ALL_MODES = {"activations": '; "all" tries every mode', "optimizer_overlap": '; "all" tries every mode'}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of ``check`` to its parser."""
    parser.add_argument("factory", nargs="?", help=f"{_FACTORY} (two small models, made of torch alone)")
    parser.add_argument("--json", action="store_true", help="for programs")
    parser.add_argument("--all", action="store_true", help="without a model: small ones of all installed packages, too")
    parser.add_argument("--out", type=Path, help=f"without a model: a file to attach to a report ({_FILE})")
    _add_common(parser, steps=None)


def add_dial_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of ``dial`` to its parser."""
    small = f"{_FACTORY}; or {', '.join(SMALL)}: small models with random weights ({', '.join(_DIALED)})"
    parser.add_argument("factory", nargs="*", help=small)
    parser.add_argument("--predict", action="store_true", help="predict instead of training")
    parser.add_argument("--out", type=Path, metavar="FILE.png", help="draw a picture, too (PNG, PDF or SVG)")
    _add_common(parser, steps=10, windows=True)


def _add_common(parser: argparse.ArgumentParser, *, steps: int | None, windows: bool = False) -> None:
    parser.add_argument("--data", help="package.module:Name, which makes a LightningDataModule or training batches")
    parser.add_argument("--config", type=Path, help="a config of Lightning's CLI, in place of both")
    parser.add_argument(
        "--steps", type=int, default=steps, help=f"how many batches each run has ({steps or '4; without a model 2'})"
    )
    parser.add_argument("--seed", type=int, default=0, help="what randomness begins with (%(default)s)")
    for name in _TRAINER_OPTIONS:
        parser.add_argument(f"--{name}", type=_value, help=f"as Trainer({name}=…)")
    for name in STRATEGY_OPTIONS:
        meaning = f"as SuperpipelineStrategy({name}=…)" + ("" if windows else _ALL_MODES.get(name, ""))
        how: dict[str, Any] = {"type": _value, "nargs": "+" if name in _LISTS else None, "help": meaning}
        if windows and name in _WINDOWS:
            how = {"type": int, "nargs": "+", "help": f"{_WINDOWS[name]} (%(default)s)", "default": _DEFAULTS[name]}
        parser.add_argument(f"--{name.replace('_', '-')}", dest=name, **how)


def _value(text: str) -> Any:
    """Returns a Python value, or the text itself if it is not a literal."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def run(arguments: argparse.Namespace) -> None:
    """Runs the check and prints its report on the standard output.

    Raises:
        ValueError, TypeError: an option is invalid.
        SystemExit: with status 1 if something differs, with status 2 if nothing was compared.
    """
    from sp_lightning.tools.comparison.check import check

    options, trainer = _given(arguments)
    alone = arguments.factory is None and arguments.config is None
    if (arguments.all or arguments.out) and not alone:
        raise ValueError("--all and --out are for check without a model. Leave them out, or the model.")
    try:
        if alone:
            status, text = _check_small(arguments, options, trainer)
        else:
            report = check(**options, trainer=trainer)
            status, text = report.status, report.as_json() if arguments.json else str(report)
    except (ValueError, TypeError, ImportError, OSError):
        raise
    except BaseException as error:  # Lightning makes SystemExit(1) of Ctrl-C, and SystemExit(0) of SIGTERM
        if isinstance(error, Exception):
            traceback.print_exc()
        print(f"Nothing was compared. {type(error).__name__}: {error}", file=sys.stderr)
        raise SystemExit(2) from error
    print(text, flush=True)
    if status:
        raise SystemExit(status)


def _check_small(arguments: argparse.Namespace, options: dict[str, Any], trainer: dict[str, Any]) -> tuple[int, str]:
    """Checks small models, and writes the file. Returns the status and the text for the user."""
    from sp_lightning.tools.comparison.first_check import first_check

    if arguments.data:
        raise ValueError("--data needs a model. Give package.module:Factory, or leave --data out.")
    how = {"steps": options.pop("steps", 2), "seed": options.pop("seed")}
    status, text, found = first_check(every=arguments.all, trainer=trainer, options=options, **how)
    file = arguments.out or _FILE
    file.parent.mkdir(parents=True, exist_ok=True)
    content = json.dumps(found, indent=1)
    file.write_text(content, encoding="utf-8")
    saved = f"Saved: {file}. Attach it to a report. `superpipeline plan --rates {file}` reads it."
    return status, content if arguments.json else f"{text}\n{saved}"


def _given(arguments: argparse.Namespace) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the given options of ``check`` and of the strategy, and the given arguments of ``Trainer``."""
    given = {name: value for name, value in vars(arguments).items() if value is not None}
    options = {name: given[name] for name in (*_CHECK_OPTIONS, *STRATEGY_OPTIONS) if name in given}
    return options, {name: given[name] for name in _TRAINER_OPTIONS if name in given}


def run_dial(arguments: argparse.Namespace) -> None:
    """Measures each model, prints its table, and draws the picture.

    Raises:
        ValueError, TypeError: an option is invalid.
        SystemExit: with status 1 if a run stopped, with status 2 if nothing was measured.
    """
    from sp_lightning.tools.comparison import small_models
    from sp_lightning.tools.comparison.dial import dial
    from sp_lightning.tools.comparison.subject import NotRunError
    from sp_lightning.trainer.plot import draw_measured, supported_formats

    out: Path | None = arguments.out
    if out is not None and out.suffix[1:] not in supported_formats():
        raise ValueError(
            f"--out {out}: expected the name of a picture. The page is what dial prints: --out {out.stem}.png > {out.stem}.md"
        )
    options, trainer = _given(arguments)
    own = options.pop("factory") or ([None] if arguments.config else _DIALED)
    found: list[Dial] = []
    for name in own:
        factory = getattr(small_models, name) if name in SMALL else name
        try:
            with small_models.one_thread() if name in SMALL else nullcontext():
                found.append(dial(factory, **options, name=name, predict=arguments.predict, trainer=trainer))
        except NotRunError as error:
            print(f"{name or arguments.config}: nothing was measured. {error}", file=sys.stderr)
            raise SystemExit(2) from error
        print(found[-1], end="\n\n", flush=True)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        draw_measured({each.title: each.points for each in found}, out)
        print(f"Saved: {out}.", file=sys.stderr)
    if status := max(each.status for each in found):
        raise SystemExit(status)
