"""Copies of gradients: user code of each rank reads ``param.grad`` as under ``ddp``, although only a layer's owner has it.

After a backward, gradients are *open*: user code of the other ranks of the node may read them. They are closed when the engine
uses them next: in the optimizer's step, in the next backward, or when it unscales or clips.

An owner *publishes* a gradient: it copies the gradient to memory that the node's ranks share. It does so before its own user code
gets or sets ``param.grad``, and if another rank asks. The thread that looks for failures answers, so a rank may read what no
other rank reads. Other ranks see the memory through a private view, as they see weights: what their code writes is their own.

When gradients are closed, a collective compares the values that user code has written, as for weights: they must be the same on
all ranks. The owner's values are used.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import replace
from time import monotonic
from types import FrameType
from typing import TYPE_CHECKING, Any
from zlib import crc32

import torch
from torch import Tensor, nn

from sp_lightning.core.device.device import Wait
from sp_lightning.core.device.layout import Span, bytes_of, part, view, whole_pages
from sp_lightning.core.device.lease import ALONE, lend, references, shared
from sp_lightning.core.torch_compat.modes import no_inference_mode, unseen
from sp_lightning.core.torch_compat.private import moves_modules, subclasses_are_asked
from sp_lightning.core.weights.gradient_roles import (
    HasGradientElsewhere,
    free,
    is_engines,
    is_narrow,
    narrow_and_changes,
    reader,
    resets_gradients,
    stored,
)
from sp_lightning.core.weights.layer import StreamedLayer
from sp_lightning.core.weights.roles import ParameterRole, leave, leave_all, take_all
from sp_lightning.experimental.ranks.shared_memory import OwnView

if TYPE_CHECKING:
    from sp_lightning.experimental.ranks.owners import RankOwners
    from sp_lightning.experimental.ranks.ranks import Ranks

_SOON = 0.2
"""Seconds after an answer in which further questions are expected, and answered within a millisecond."""

_present: GradientCopies | None = None
"""The copies of the present engine."""


class GradientCopies:
    """The copies of all gradients of a node, as one rank sees them.

    Args:
        ranks: the ranks.
        owners: the owners of the layers.
        layers: all layers.
    """

    def __init__(self, ranks: Ranks, owners: RankOwners, layers: Sequence[StreamedLayer]) -> None:
        global _present
        self._ranks, self._owners = ranks, owners
        self._places = [(layer, index) for layer in layers for index in range(len(layer.block.parameters))]
        self._numbers = {
            id(layer.block.parameters[index]): number for number, (layer, index) in enumerate(self._places)
        }
        # Each gradient has pages of its own, which take memory from its publication until it is closed.
        self._begins = [end := whole_pages(16 * len(self._places))]
        for number in range(len(self._places)):
            self._begins.append(end := end + whole_pages(self._span(number).nbytes))
        self._memory = ranks.share(end, "copies of gradients")
        words = self._memory.common[: 16 * len(self._places)].view(torch.int64)
        # By gradient: the round in which another rank asks for it, and twice the round in which it was published; one more if
        # it cannot be read.
        self._asked, self._published = words.view(2, -1).unbind()
        self._round = 0  # counts how often gradients became open; the same on all ranks
        self._open: dict[int, nn.Parameter] = {}
        # Gradients that this rank has published, to find out whether user code has set another one.
        self._mine: dict[int, weakref.ref[Tensor]] = {}
        self._views: dict[int, OwnView] = {}
        # Copies that user code has got, and perhaps written; without a view, gradients that it has set.
        self._given: dict[int, Tensor] = {}
        self._lock = threading.RLock()  # of this process; another thread publishes, too
        self._answered = 0.0
        ranks.failures.serve = self._answer
        _present = self

    def _span(self, number: int) -> Span:
        layer, index = self._places[number]
        return replace(layer.block.planned.spans[index], offset=0)

    def _slot(self, number: int) -> Tensor:
        """Returns the shared memory of a gradient, flat ``uint8``."""
        return bytes_of(self._memory.common[self._begins[number] :], self._span(number))

    def _owns(self, number: int) -> bool:
        return self._owners.owns(self._places[number][0])

    def _opened(self, parameters: Iterable[nn.Parameter] | None) -> dict[int, nn.Parameter]:
        """Returns the open gradients of some parameters; of all parameters if ``parameters`` is None."""
        if parameters is None:
            return dict(self._open)
        numbers = {self._numbers.get(id(each)) for each in parameters}
        return {number: each for number, each in self._open.items() if number in numbers}

    @property
    def opened(self) -> list[nn.Parameter]:
        """The parameters whose gradients are open."""
        return list(self._open.values())

    # ------------------------------------------------------------------ gradients are open

    def open(self, parameters: Iterable[nn.Parameter] | None = None) -> None:
        """Opens the gradients of some parameters; of all if ``parameters`` is None. All ranks call it after they have met."""
        chosen = None if parameters is None else set(map(id, parameters))
        mine, gone = list[nn.Parameter](), list[int]()
        with self._lock, torch.DisableTorchFunctionSubclass():
            self._round += 1
            for number, (layer, index) in enumerate(self._places):
                parameter = layer.block.parameters[index]
                if chosen is not None and id(parameter) not in chosen:
                    continue
                if not self._owns(number):
                    if isinstance(parameter, HasGradientElsewhere):
                        self._open[number] = parameter
                elif (
                    stored(parameter) is None or layer.owner.update is not None
                ):  # an update in backward frees gradients
                    gone.append(number)
                else:
                    self._open[number] = parameter
                    mine.append(parameter)
            self._published[gone] = 2 * self._round + 1
            take_all(mine, PublishesGradient)

    def read(self, parameter: nn.Parameter) -> Tensor:
        """Returns this rank's copy of another rank's gradient. Waits until the gradient is published.

        Raises:
            RuntimeError: the gradient is not open, or was freed.
            RankError: another rank has failed.
        """
        number = self._numbers.get(id(parameter), -1)
        if number in self._given:
            return self._given[number]
        owner = "another process" if number < 0 else self._owners.owner_of(self._places[number][0])
        if number in self._open and not self._ranks.over and self._wait_for(number):
            span = self._span(number)
            if number not in self._views:
                self._views[number] = self._memory.view_anew(*self._begins[number : number + 2])
            self._given[number] = view(lend(bytes_of(self._views[number].bytes, span)), span)
            return self._given[number]
        raise RuntimeError(
            f"param.grad was read of a parameter of shape {tuple(parameter.shape)} whose layer {owner} steps: with several "
            "devices, that process alone has the gradient now. Other processes can read it after backward, until the optimizer "
            "steps: in on_after_backward or on_before_optimizer_step. For the norm of all gradients, call "
            "trainer.strategy.gradient_norm() in all processes."
        )

    def _wait_for(self, number: int) -> bool:
        """Waits until a gradient of another rank is published. Returns False if it cannot be read."""
        word = self._published[number : number + 1]
        if int(word) < 2 * self._round:
            self._asked[number] = self._round
            self._ranks.wait_until(word, 2 * self._round, Wait.READ_AFTER_PUBLISH)
        return int(word) == 2 * self._round

    def reopen(self, parameters: Iterable[nn.Parameter]) -> None:
        """Opens gradients again, which the engine has changed in place. Copies that user code holds are changed as well."""
        self.open(parameters)
        for number in list(self._given):
            if not (self._is_held(number) and number in self._open and self._wait_for(number)):
                self._forget(number)
            elif number in self._views:
                self._views[number].drop()
            else:
                with no_inference_mode(), torch.no_grad():
                    self._given[number].copy_(part(self._slot(number), self._span(number)))

    def publish(self, parameter: nn.Parameter) -> None:
        """Copies an open gradient of this rank to the shared memory, once."""
        number = self._numbers.get(id(parameter), -1)
        with self._lock, unseen(), no_inference_mode(), torch.no_grad():
            if number not in self._open or number in self._mine:
                return
            published: Any = stored(parameter)
            span = self._span(number)
            form = None if published is None else (published.layout, published.dtype, published.shape)
            if readable := form == (torch.strided, span.dtype, span.shape):
                gradient, changes = narrow_and_changes(published)
                slot = part(self._slot(number), span)
                slot.copy_(gradient)
                for change in changes:
                    change(slot)
                self._mine[number] = weakref.ref(published)
            self._published[number] = 2 * self._round + (not readable)

    def _answer(self) -> bool:
        """Publishes gradients of this rank for which other ranks ask. Returns True if they may soon ask for others."""
        with self._lock:
            for number in (self._asked == self._round).nonzero().flatten().tolist() if self._open else ():
                if number in self._open and self._owns(number):
                    self.publish(self._open[number])
                    self._asked[number], self._answered = 0, monotonic()
        return monotonic() < self._answered + _SOON

    # ------------------------------------------------------------------ gradients are closed

    def written(self, parameters: Iterable[nn.Parameter] | None = None) -> dict[tuple[str, str], Any]:
        """Returns digests of open gradients that user code of this rank has written or set, to be compared between ranks."""
        found: dict[tuple[str, str], Any] = {}
        with unseen(), no_inference_mode(), torch.no_grad():
            for number, parameter in sorted(self._opened(parameters).items()):
                if (digest := self._digest(number, parameter)) is not None:
                    found["writes to gradients", self._span(number).name] = digest
        return found

    def _digest(self, number: int, parameter: nn.Parameter) -> int | str | None:
        """Returns a checksum of a gradient, or ``"None"``; None if user code of this rank has not changed the gradient."""
        if not self._owns(number) and isinstance(parameter, HasGradientElsewhere):
            untouched = number not in self._given or (number in self._views and not self._views[number].written())
            value, was_set = self._given.get(number), False
        else:
            published = self._mine.get(number)
            untouched = self._owns(number) and (published is None or is_narrow(parameter))
            value = stored(parameter)
            was_set = value is not (self._given.get(number) if published is None else published())
        if untouched or value is None:
            return None if untouched else "None"
        now = torch.zeros(self._span(number).nbytes, dtype=torch.uint8, device="cpu")
        part(now, self._span(number)).copy_(value)
        return crc32(now.numpy().tobytes()) if was_set or not torch.equal(now, self._slot(number)) else None

    def forget(self, parameters: Iterable[nn.Parameter] | None = None) -> None:
        """Forgets this rank's copies of gradients. Those that user code still holds keep their values."""
        for number in self._opened(parameters):
            if number in self._given:
                self._forget(number)

    def _is_held(self, number: int) -> bool:
        return references(self._given, number) > ALONE or shared(self._given[number])

    def _forget(self, number: int) -> None:
        held = self._is_held(number)
        del self._given[number]
        if held and (kept := self._views.pop(number, None)) is not None:
            kept.keep(0, kept.bytes.nbytes)
        elif number in self._views:
            self._views[number].drop()

    def close(self, parameters: Iterable[nn.Parameter] | None = None, *, reopens: bool = False) -> None:
        """Closes gradients, after all ranks have compared what they have written. Frees the shared memory.

        If user code has set the gradient of another rank's layer, that rank has the same gradient. It is kept if :meth:`reopen`
        will change it.
        """
        with self._lock:
            closed = self._opened(parameters)
            leave_all([*closed.values()], PublishesGradient)
            for number, parameter in closed.items():
                del self._open[number]
                with (
                    torch.DisableTorchFunctionSubclass()
                ):  # the owner's update, which may run, uses no gradient of this rank
                    value = None if self._owns(number) else stored(parameter)
                if value is not None:
                    free(parameter, HasCopiedGradient)
                    if number in self._given:
                        self._forget(number)
                    if reopens:
                        self._views.pop(number, None)
                        self._given[number] = value
                del value
                if self._mine.pop(number, None) is not None:
                    self._memory.free(*self._begins[number : number + 2])


class HasCopiedGradient(HasGradientElsewhere):
    """The role of a host parameter whose gradient another rank has: user code reads a copy."""

    def grad_for_users(self) -> Tensor | None:
        assert _present is not None
        return _present.read(self)


class PublishesGradient(ParameterRole):
    """The role of a host parameter with an open gradient on its owner, until user code reads or sets the gradient."""

    rank = 2

    def _publish(self, frame: FrameType, *, to_set: bool = False) -> bool:
        """Publishes the gradient and ends the role, if ``frame`` is user code that may change the gradient. Returns True then."""
        frame = reader(frame)
        if is_engines(frame) or (not to_set and (resets_gradients(frame) or moves_modules(frame.f_code))):
            return False
        assert _present is not None
        _present.publish(self)
        leave(self, PublishesGradient)
        return True

    @property
    def grad(self) -> Tensor | None:
        if subclasses_are_asked() and self._publish(sys._getframe(1)):
            return self.grad  # without the role
        return super().grad

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        if not self._publish(sys._getframe(1), to_set=True):
            leave(self, PublishesGradient)
        self.grad = value

    @grad.deleter
    def grad(self) -> None:
        self.grad = None
