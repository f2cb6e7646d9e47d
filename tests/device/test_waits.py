"""The omission matrix: leave out each wait of the engine in turn, and something here must fail.

The rows are the engine's own list (:class:`sp_lightning.core.device.device.Wait`), so a new wait without its scenario fails.
A wait whose omission nothing notices is not needed, and goes: two went that way. A second matrix looks whether a wait is seen
where a device waits for more than the simulation: the two that are not are listed with what implies them.

| wait | scenario that fails without it |
|---|---|
| FETCH_AFTER_USE, USE_AFTER_FETCH | training |
| DRAIN_AFTER_GRADIENT, REUSE_AFTER_DRAIN, APPLY_AFTER_DRAIN | training |
| UPDATE_AFTER_FETCH | training |
| CLOSE_AFTER_FETCH | prediction |
| RESIDENTS_AFTER_USE, USE_AFTER_RESIDENTS | training, with residents |
| UPDATE_AFTER_RESIDENTS | an optimizer step before any forward, in manual optimization |
| CAST_AFTER_FETCH | two optimizers in mixed precision, and a validation after their steps |
| WRITE_BACK_AFTER_USE | weights written in place on the device |
| FETCH_AFTER_UPDATE | updates in the background |
| READ_AFTER_UPDATE | updates in the background, and a callback that looks at weights |
| CLIP_AFTER_NORM, STEP_AFTER_BRING, TAKE_AFTER_STEP, STEP_AFTER_FETCH | steps on the device |
| BRING_AFTER_TAKE, READ_AFTER_TAKE | steps on the device |
| STORE_AFTER_SAVE, REUSE_AFTER_STORE, RETURN_AFTER_USE, USE_AFTER_RETURN | activations that are offloaded |
| REUSE_AFTER_RETURN | a unit without a backward, whose activations were under way, and nothing else comes |
| GATHER_AFTER_SEND | an embedding of which only rows travel |
| CLOSE_AFTER_STORE | a last forward without a backward |
| DROP_AFTER_DRAIN | a backward that ends with an error, because a forward that ran again has computed other values |
| UNPIN_AFTER_COPY | residents alone, in a prediction whose results nobody reads |
| REDUCE_AFTER_GRADIENT, DRAIN_AFTER_REDUCE | several devices: test_rank_waits.py |
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest import mock

import pytest
from torch import Tensor

from sp_lightning.core.device.device import Stream, Wait
from sp_lightning.core.store.block import HostBlock
from sp_lightning.core.weights.gradients import Transfers
from sp_lightning.registry import is_installed
from tests.support.runs import assert_same, superpipeline
from tests.support.simdevice import Mixed, Race, SimDevice, Watch, simulated
from tests.support.tiers import first
from tests.support.wait_scenarios import IMPLIED, OF_RANKS, SCENARIOS, left_out


@pytest.mark.long("takes a second or more")
@pytest.mark.filterwarnings("ignore:module forward hook with ``always_call=True`` raised")
@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # a failed backward that fails to end
@pytest.mark.parametrize(
    "wait",
    first(
        [wait for wait in Wait if wait not in OF_RANKS],
        *(Wait.USE_AFTER_FETCH, Wait.FETCH_AFTER_USE, Wait.DRAIN_AFTER_GRADIENT, Wait.READ_AFTER_UPDATE),
        why="each is left out once; four show that races are seen",
    ),
    ids=lambda wait: wait.name,
)
def test_every_wait_is_needed(wait: Wait, monkeypatch: pytest.MonkeyPatch) -> None:
    _move_small_activations(monkeypatch)
    assert wait in SCENARIOS, f"{wait} needs a scenario that fails without it"
    scenario = SCENARIOS[wait]
    with simulated() as made:
        ours = scenario(superpipeline(k=1))
    assert wait in made[0].waits, "the scenario does not come past this wait"
    assert_same(ours, scenario("auto"))
    with left_out(), pytest.raises((Race, Mixed, AssertionError)), simulated(wait):
        assert_same(scenario(superpipeline(k=1)), ours)


# ---------------------------------------------------------------- what else a device waits for


@contextmanager
def as_a_device_does() -> Iterator[None]:
    """Two things that the simulation leaves out so as to see each wait for itself.

    A copy to the host that is not told otherwise is done in the order of compute, and the host waits for it. And memory
    that compute has done with is written by the next kernel, which may come after another wait, not at once.
    """
    write, dispatch = HostBlock.write, Watch.__torch_dispatch__
    freed: list[Tensor] = []

    def block(device: Any) -> None:
        device.synchronize(device.record(Stream.COMPUTE), "a copy that blocks")

    def written(self: HostBlock, index: int, value: Tensor) -> bool:
        block(self._device)
        return write(self, index, value)

    def freeing(method: Callable[..., None]) -> Callable[..., None]:
        def later(self: Any, *args: Any, **options: Any) -> None:
            device = self.device if isinstance(self, Transfers) else self._device
            access = device.access

            def note(memory: Tensor | Iterable[Tensor], by: Stream | None, *, write: bool) -> None:
                tensors = [memory] if isinstance(memory, Tensor) else list(memory)
                freed.extend(tensors) if by is Stream.COMPUTE else access(tensors, by, write=write)

            with mock.patch.object(device, "access", note):
                method(self, *args, **options)

        return later

    def dispatched(self: Watch, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        while freed and not self._device.inside:
            SimDevice.access(self._device, freed.pop(), Stream.COMPUTE, write=True)
        return dispatch(self, func, types, args, kwargs)

    with (
        mock.patch.object(HostBlock, "write", written),
        mock.patch.object(Transfers, "retire", freeing(Transfers.retire)),
        mock.patch.object(Watch, "__torch_dispatch__", dispatched),
        ExitStack() as stack,
    ):
        if is_installed("capabilities.experts"):
            from sp_lightning.capabilities.experts.embedding_rows import EmbeddingRows

            look_up = EmbeddingRows._look_up

            def looked_up(self: EmbeddingRows, *args: Any, **options: Any) -> Any:
                block(self._device)  # the indices are copied to the host
                return look_up(self, *args, **options)

            stack.enter_context(mock.patch.object(EmbeddingRows, "_look_up", looked_up))
        if is_installed("capabilities.activations"):
            from sp_lightning.capabilities.activations.offload import Offload

            stack.enter_context(mock.patch.object(Offload, "retire", freeing(Offload.retire)))
            stack.enter_context(mock.patch.object(Offload, "_drop", freeing(Offload._drop)))
        yield


def _move_small_activations(monkeypatch: pytest.MonkeyPatch) -> None:
    if is_installed("capabilities.activations"):
        monkeypatch.setattr("sp_lightning.capabilities.activations.offload.WORTH_MOVING", 1)


@pytest.mark.long("the matrix above has every wait; this one asks whether it is needed")
@pytest.mark.filterwarnings("ignore:module forward hook with ``always_call=True`` raised")
@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # a failed backward that fails to end
@pytest.mark.parametrize("wait", SCENARIOS, ids=lambda wait: wait.name)
def test_no_other_wait_implies_it(wait: Wait, monkeypatch: pytest.MonkeyPatch) -> None:
    """But for those that are listed with what does."""
    _move_small_activations(monkeypatch)
    with simulated() as made, as_a_device_does():
        ours = SCENARIOS[wait](superpipeline(k=1))
    with left_out(), nullcontext() if wait in IMPLIED else pytest.raises((Race, Mixed)):
        with simulated(wait) as made, as_a_device_does():
            assert_same(SCENARIOS[wait](superpipeline(k=1)), ours)
        assert wait in made[0].waits
