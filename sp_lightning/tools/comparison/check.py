"""The runs of a check, and what their differences mean."""

from __future__ import annotations

import dis
import gc
import sys
from collections.abc import Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path
from shutil import rmtree
from tempfile import TemporaryDirectory
from typing import Any, get_args

import torch

from sp_lightning.core.plan.choices import Mode
from sp_lightning.tools.comparison.record import Compared, Difference, compare, unrepeatable
from sp_lightning.tools.comparison.report import Report, RunFigures
from sp_lightning.tools.comparison.runs import STOPPED, RunResult, RunVariant, root_device, run, undisturbed
from sp_lightning.tools.comparison.subject import Factory, NotRunError, Subject
from sp_lightning.trainer.strategy import SuperpipelineStrategy

ALL = "all"
"""For ``activations`` and ``optimizer_overlap``: every mode, one after the other."""
_LARGE = 2**27
"""If a checkpoint has more bytes than this, garbage is collected before the next run. For a small model, collecting takes longer
than a run."""
_STOPS = NotRunError, torch.OutOfMemoryError
"""The errors that :meth:`_Checking._run` raises."""
_MODES = {"activations": get_args(Mode), "optimizer_overlap": ("off", "forward", "backward")}


def check(
    factory: Factory | None = None,
    data: Factory | None = None,
    *,
    config: str | Path | None = None,
    steps: int = 4,
    seed: int = 0,
    trainer: Mapping[str, Any] | None = None,
    **options: Any,
) -> Report:
    """Trains, validates and predicts some batches with plain Lightning and with this strategy, and compares them bitwise.

    Plain Lightning runs twice (once more if only some modes run optimizers fused), and the strategy once in each mode. Then both
    train one more batch from plain Lightning's checkpoint. Module and data are made anew for each run, from the same seed. Files
    are in a temporary folder, about fifteen times as large as the weights, which is removed afterwards. Random states are
    restored.

    Args:
        factory: makes the LightningModule when it is called: a callable, or ``"package.module:Name"``.
        data: makes a LightningDataModule or training batches in the same way. By default the module's own data is used.
        config: a config of Lightning's CLI, in place of factory and data, or with them if it does not name the classes.
        steps: the number of trained batches, and the most validated and predicted batches; at least 1.
        seed: the seed of all random states.
        trainer: arguments of ``Trainer`` that change numbers or the device, for example ``{"precision": "bf16-mixed"}``.
            Arguments that a check sets itself (``max_epochs``, ``devices``, ``strategy`` and others) raise an error here, and
            are listed in the report if a config has them.
        options: options of :class:`~sp_lightning.SuperpipelineStrategy`. ``activations`` and ``optimizer_overlap`` can be
            ``"all"``: every mode, one after the other.

    Returns:
        The report. Its ``status`` is 0 if all is equal, 1 if something differs, and 2 if nothing was compared. ``print``
        shows it as a table.

    Raises:
        ValueError, TypeError: a name cannot be imported, or an option or an argument of ``Trainer`` is invalid.
    """
    if steps < 1:
        raise ValueError(f"steps must be at least 1, found {steps}.")
    return check_variants(Subject(factory, data, config, steps, seed, dict(trainer or {})), options)


def check_variants(
    subject: Subject, options: dict[str, Any], modes: Mapping[str, dict[str, Any]] | None = None
) -> Report:
    """Compares plain Lightning with the strategy in several modes. Arguments and errors are those of :func:`check`.

    Args:
        subject: the module, its data and the trainer's settings.
        options: options of the strategy.
        modes: further options by the name of a mode; None for those that ``"all"`` in ``options`` asks for.
    """
    with undisturbed(subject.settings), TemporaryDirectory(prefix="sp_lightning-") as folder:
        checking = _Checking(subject, options, Path(folder), modes)
        try:
            return checking.report()
        except NotRunError as error:
            return replace(checking.found, why=str(error))


class _Checking:
    """The runs of one check.

    Args:
        subject: the module, its data and the trainer's settings.
        options: options of the strategy.
        folder: the folder for all files.
        modes: as in :func:`check_variants`.
    """

    def __init__(
        self, subject: Subject, options: dict[str, Any], folder: Path, modes: Mapping[str, dict[str, Any]] | None
    ) -> None:
        self._subject, self._folder, self._modes = subject, folder, modes
        self._given = options
        self._runs, self._large = 0, False
        self.found = Report()

    def report(self) -> Report:
        """Runs plain Lightning and the variants of the strategy, compares them, and returns the report.

        Raises:
            NotRunError: nothing could be compared.
            ValueError, TypeError: an option of the strategy is invalid.
        """
        settings, options, unused = self._subject.described()
        options |= self._given
        if unused:
            self.found.notes.append(
                f"Not used, because a check has its own length, files and devices: {', '.join(unused)}."
            )
        self._device = root_device(settings)
        self.found.counted = self._device.type == "cpu"
        variants = {name: {**options, **mode} for name, mode in (self._modes or _asked(options)).items()}
        for variant in variants.values():
            SuperpipelineStrategy(**variant)  # invalid options raise an error before the first run
        # Both sides step fused, or both do not: otherwise their last bits differ.
        fuses = list(dict.fromkeys(is_fused(variant, self._device) for variant in variants.values()))
        steps = _plain_steps(options)
        try:
            plain, again = (self._run(RunVariant(name, fuse=fuses[0], **steps)) for name in ("plain", "plain again"))
        except torch.OutOfMemoryError as error:
            raise NotRunError(_too_large(self._device)) from error
        if not plain.trained:
            raise NotRunError("No training step has returned a loss or made a gradient, so nothing was trained.")
        self._but = unrepeatable(again.record, plain.record, "logged values")
        compared = compare(again.record, plain.record, self._but)
        rmtree(again.checkpoint.parent)
        if differ := [f"{what} ({each.first.name}, {each.first.how})" for what, each in compared.items() if each.first]:
            raise NotRunError(
                f"Plain Lightning, run twice from the same seed, differs from itself: {'; '.join(differ)}. {_REPEATABLE}"
            )
        if names := sorted({name.removeprefix("0.") for _, name in self._but}):
            self.found.notes.append(
                f"Not compared, because plain Lightning logs others when run twice: {', '.join(names)}."
            )
        plains = {fuses[0]: plain}
        for fuse in fuses[1:]:
            plains[fuse] = self._run(RunVariant("plain, fused" if fuse else "plain, not fused", fuse=fuse, **steps))
        fused = ""
        if any(fuses) and (plain.moved or self._device.type == "cpu"):
            where = " where the strategy fuses them" if len(fuses) > 1 else ""
            fused = f", with optimizers fused on the CPU{where},"
        self.found.reference = f"Plain Lightning{fused} and the strategy, from the same start on {self._device}:"
        self._compare_with_plain(variants, plains)
        return self.found

    def _compare_with_plain(self, variants: dict[str, dict[str, Any]], plains: dict[bool, RunResult]) -> None:
        """Runs the variants. ``plains`` has the runs of plain Lightning by whether their optimizers step fused."""
        first = None
        for name, options in variants.items():
            plain = plains[is_fused(options, self._device)]
            ours = self._attempt(RunVariant(f"superpipeline, {name}" if name else "superpipeline", options), plain)
            if ours is None:
                continue
            if first is None:
                first = ours
                self._describe(plain, ours)
            self.found.runs.append(_figures(ours))
        if first is None:
            if self.found.rows:
                return  # every variant ended with an error, and plain Lightning did not
            raise NotRunError(" ".join(self.found.notes))
        plain = plains[is_fused(first.way.options or {}, self._device)]
        self._continue(first.way, plain)
        predicted = [entry.values().get("") for entry in plain.record.entries if entry.kind == "predictions"]
        self.found.notes += [f"Plain Lightning, too: {each}" for each in predicted if str(each).startswith(STOPPED)]
        absent = [what for what in ("validation", "predictions") if what not in self.found.rows]
        self.found.notes += [f"The module or its data have nothing for these: {', '.join(absent)}."] if absent else []

    # ------------------------------------------------------------------ runs

    def _run(self, way: RunVariant) -> RunResult:
        """Runs a variant, and prints its name on the standard error.

        Raises:
            NotRunError: the run raised an error.
            torch.OutOfMemoryError: the device has too little memory.
        """
        self._runs += 1
        print(f"check: run {self._runs}, {way.name}", file=sys.stderr, flush=True)
        if self._large:
            gc.collect()  # a trainer and its module refer to each other, and models of several runs may fill the memory
        try:
            done = run(self._subject, way, self._folder / str(self._runs))
            self._large = done.checkpoint.stat().st_size > _LARGE
            return done
        except _STOPS:
            self._large = True
            raise
        except Exception as error:
            raise NotRunError(f"The run {way.name!r} stopped. {type(error).__name__}: {error}") from error

    def _attempt(self, way: RunVariant, plain: RunResult) -> RunResult | None:
        """Runs a variant, and adds the comparison of its record with plain Lightning's to the report.

        If the run ends with an error, returns None. Too little memory becomes a note in the report, and so does an error that the
        strategy raises for the user's settings. Any other error counts as a difference.
        """
        try:
            done = self._run(way)
        except _STOPS as error:
            if isinstance(error, torch.OutOfMemoryError):
                self.found.notes.append(f"The run {way.name!r} had too little memory and shows nothing. {error}")
            elif way.begins is None and is_refusal(error.__cause__):
                self.found.notes.append(str(error))
            else:
                cause = error.__cause__ or error
                found = Difference("", "before its end", f"{type(cause).__name__}: {cause}")
                self._note("the run itself", way, Compared(first=found))
            return None
        compared = compare(done.record, plain.record, self._but)
        for what, each in compared.items():
            self._note("continued" if way.begins else what, way, each)
        if done.recomputed and not way.begins and _trains_other(compared):
            self._compare_with_checkpoints(done, plain)
        rmtree(done.checkpoint.parent)
        return done

    def _compare_with_checkpoints(self, done: RunResult, plain: RunResult) -> None:
        """Adds a note if a run equals plain Lightning with torch's checkpoint around each recomputed layer, and not without."""
        layers = done.recomputed

        def equals(result: RunResult, number: int) -> bool:
            """Returns True if a run equals plain Lightning with checkpoints around the first ``number`` layers."""
            name = f"plain, with checkpoints around {number} layers"
            other = self._run(replace(plain.way, name=name, checkpoints=layers[:number]))
            found = compare(other.record, result.record, self._but)
            rmtree(other.checkpoint.parent)
            return not _trains_other(found)

        try:
            if not equals(done, len(layers)):
                return
            fewest, most = (
                0,
                len(layers),
            )  # with `fewest` checkpoints plain Lightning is as without, with `most` it is not
            while most - fewest > 1:
                middle = (fewest + most) // 2
                fewest, most = (middle, most) if equals(plain, middle) else (fewest, middle)
        except _STOPS:  # plain Lightning does not run with checkpoints
            return
        self.found.notes.append(
            f"The run {done.way.name!r} equals plain Lightning with torch's checkpoint around each layer, and not without: the "
            f'forward of {layers[most - 1]!r} computes something else when it runs again. Use activations="offload".'
        )

    def _note(self, what: str, way: RunVariant, compared: Compared) -> None:
        """Adds a comparison to a row of the report. The row keeps its first difference."""
        row = self.found.rows.setdefault(what, Compared())
        row.tensors, row.values = row.tensors + compared.tensors, row.values + compared.values
        row.first = row.first or (compared.first and replace(compared.first, run=way.name))

    def _continue(self, ours: RunVariant, plain: RunResult) -> None:
        """Trains one more batch from plain Lightning's checkpoint with both. The strategy's file was compared with this one."""
        begins = plain.checkpoint
        try:
            expected = self._run(replace(plain.way, name="plain, from its own checkpoint", begins=begins))
        except _STOPS as error:
            self.found.notes.append(f"Nothing went on from a checkpoint. {error}")
            return
        self._attempt(replace(ours, name="superpipeline, from plain Lightning's checkpoint", begins=begins), expected)

    # ------------------------------------------------------------------ the rest of the report

    def _describe(self, plain: RunResult, ours: RunResult) -> None:
        """Adds the number of layers, their share of all bytes, and the time and memory of plain Lightning to the report."""
        plan = ours.plan
        assert plan is not None
        streams = sum(layer.nbytes for layer in (*plan.layers, *plan.tables))
        self.found.layers = len(plan.layers)
        self.found.streamed = streams / max(streams + plan.resident_bytes, 1)
        self.found.runs.append(_figures(plain, sum(plan.plain) + plain.state_bytes))


def _trains_other(compared: Mapping[str, Compared]) -> bool:
    """Returns True if two runs have other losses or weights. Buffers count once with the strategy, and twice in checkpoints."""
    return any(compared[what].first for what in ("losses", "weights") if what in compared)


def _asked(options: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Returns the modes that options ask for: one for each combination if a value is ``"all"``, else one without a name."""
    asked = [name for name in _MODES if options.get(name) == ALL]
    modes = [dict(zip(asked, chosen, strict=True)) for chosen in product(*(_MODES[name] for name in asked))]
    named = [name for name in _MODES if name in options] if asked else []
    return {", ".join(str({**options, **mode}[name]) for name in named): mode for mode in modes}


def _plain_steps(options: dict[str, Any]) -> dict[str, Any]:
    """Returns where plain Lightning's optimizers step, as arguments of :class:`RunVariant`."""
    chosen = {name: given for name in ("gpu_layers", "layers", "keep_on_gpu") if (given := options.get(name))}
    return {"on_device": options.get("optimizer_on") == "gpu", "stay": chosen if "gpu_layers" in chosen else {}}


def is_fused(options: dict[str, Any], device: torch.device) -> bool:
    """Returns True if the strategy runs optimizers fused on the CPU whose users have not set ``fused``."""
    if options.get("optimizer_on") == "gpu":  # optimizers run unchanged on the GPU
        return False
    return device.type != "cpu" or options.get("optimizer_overlap") in ("forward", "backward")


def _figures(done: RunResult, counted: int | None = None) -> RunFigures:
    ours = counted if done.stats is None else done.stats.peak_device_bytes + done.state_bytes
    return RunFigures(done.way.name, done.seconds, ours if done.peak_bytes is None else done.peak_bytes)


def is_refusal(error: BaseException | None) -> bool:
    """Returns True if a ``raise`` statement of this package ended the run, and not user code, torch, or a failed assertion."""
    at = None if error is None else error.__traceback__
    if at is None or isinstance(error, AssertionError):
        return False
    while at.tb_next is not None:
        at = at.tb_next
    code = at.tb_frame.f_code
    return Path(code.co_filename).is_relative_to(_PACKAGE) and dis.opname[code.co_code[at.tb_lasti]] == "RAISE_VARARGS"


_PACKAGE = Path(__file__).parents[2]
_REPEATABLE = (
    "No strategy can be bit-identical to such a program. Seed generators of your own where the factory makes them. Choose "
    "kernels that repeat: Trainer(deterministic=True, benchmark=False). In backward, flash and cuDNN attention may add in "
    "another order each time: deterministic=True chooses others, as torch.nn.attention.sdpa_kernel(SDPBackend.MATH) does. The "
    "package flash-attn needs deterministic=True in its call (FLASH_ATTENTION_DETERMINISTIC=1 in transformers)."
)


def _too_large(device: torch.device) -> str:
    """Returns the reason why a model is not compared, with what to do."""
    elsewhere = "" if device.type == "cpu" else 'on the CPU (--accelerator cpu, trainer={"accelerator": "cpu"}), or '
    return (
        f"Plain Lightning has too little memory for this model on {device}, so there is nothing to compare with. Check it "
        f"{elsewhere}with fewer layers of the same kinds."
    )
