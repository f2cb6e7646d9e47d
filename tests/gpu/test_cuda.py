"""The same equality on CUDA, and what only a GPU can show: allocator peaks and overlapping streams.

The reference is the plain module on the device, its gradients copied to the CPU, stepped there and copied back: the
optimizer runs on the same device on both sides, and fused, because the strategy runs it so if its user leaves that open.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor

from sp_lightning import SuperpipelineStrategy
from tests.support import tables
from tests.support.gpu_reference import EXTRA_SLOTS, NAMES, REFUSED, reference
from tests.support.models import CASES, Module, Transformer, llama
from tests.support.runs import (
    LossRecorder,
    Recorder,
    assert_equal,
    fused,
    loader,
    superpipeline,
    trainer_for,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore::UserWarning"),  # each kernel without a deterministic form says so once
    pytest.mark.usefixtures("deterministic"),
]


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize(("k", "k_prime"), [(1, 1), (2, 1), (3, 2), (99, 1)])
@pytest.mark.parametrize("name", NAMES)
def test_training_is_bitwise_equal(name: str, k: int, k_prime: int, precision: Any) -> None:
    losses, state = reference(fused(CASES[name].make), CASES[name].batches(), precision)
    pl.seed_everything(7, verbose=False)
    module = CASES[name].make()
    recorder = Recorder()
    strategy = superpipeline(k=k, k_prime=k_prime)
    trainer = trainer_for(strategy, accelerator="gpu", precision=precision, callbacks=[recorder])
    trainer.fit(module, loader(CASES[name].batches()))
    assert_equal([each.cpu() for each in recorder.losses], losses, "losses")
    ours = {key: value.cpu() for key, value in module.state_dict().items() if key != "hooked"}
    assert_equal(ours, state, "state")
    if (name, precision) not in EXTRA_SLOTS:
        assert strategy.stats().extra_slots == 0


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("mode", ["auto", "forward", "backward"])
@pytest.mark.parametrize("name", NAMES)
def test_updates_in_the_background_are_bitwise_those_of_the_step(name: str, mode: Any, precision: Any) -> None:
    losses, state = reference(fused(CASES[name].make), CASES[name].batches(), precision)
    pl.seed_everything(7, verbose=False)
    module = CASES[name].make()
    recorder = LossRecorder()
    strategy = SuperpipelineStrategy(k=1, optimizer_overlap=mode)
    trainer = trainer_for(strategy, accelerator="gpu", precision=precision, callbacks=[recorder])
    if (name, mode) in REFUSED:
        with pytest.raises(ValueError, match=REFUSED[name, mode]):
            trainer.fit(module, loader(CASES[name].batches()))
        return
    trainer.fit(module, loader(CASES[name].batches()))
    assert_equal([each.cpu() for each in recorder.losses], losses, "losses")
    ours = {key: value.cpu() for key, value in module.state_dict().items() if key != "hooked"}
    assert_equal(ours, state, "state")


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("mode", ["recompute", "offload", "auto"])
@pytest.mark.parametrize("name", NAMES)
def test_activations_are_bitwise_equal(name: str, mode: Any, precision: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sp_lightning.capabilities.activations.offload.WORTH_MOVING", 1)
    losses, state = reference(fused(CASES[name].make), CASES[name].batches(), precision)
    pl.seed_everything(7, verbose=False)
    module = CASES[name].make()
    recorder = LossRecorder()
    strategy = superpipeline(k=1, k_prime=1, activations=mode)
    trainer = trainer_for(strategy, accelerator="gpu", precision=precision, callbacks=[recorder])
    trainer.fit(module, loader(CASES[name].batches()))
    assert_equal([each.cpu() for each in recorder.losses], losses, "losses")
    ours = {key: value.cpu() for key, value in module.state_dict().items() if key != "hooked"}
    assert_equal(ours, state, "state")


@pytest.mark.gpu("the peak of torch's own allocator")
@pytest.mark.parametrize("mode", ["recompute", "offload", "auto"])
def test_activations_leave_the_device(mode: Any) -> None:
    """A long sequence: more than 60 % less than with everything on the device."""
    tokens = torch.ones(8, 1024, dtype=torch.long)
    batch = {"input_ids": tokens, "labels": tokens}

    def peak(**options: Any) -> int:
        torch.cuda.empty_cache()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        strategy = superpipeline(**options)
        trainer = trainer_for(strategy, accelerator="gpu", precision="bf16-true")
        trainer.fit(large_llama().bfloat16(), loader([batch] * 4))
        return strategy.stats().peak_allocated_bytes

    everything = peak(k=99, k_prime=1)
    budget = {"gpu_memory": int(0.4 * everything)} if mode == "auto" else {"k": 2, "k_prime": 1}
    assert peak(activations=mode, **budget) < 0.4 * everything


def large_llama() -> Transformer:
    return llama(
        dropout=0.0, layers=12, hidden_size=1024, intermediate_size=2816, num_attention_heads=16, vocab_size=64,
        max_position_embeddings=1024,
    )  # fmt: skip


@pytest.mark.gpu("the peak of torch's own allocator")
def test_the_allocator_peak_is_the_plan_plus_activations() -> None:
    """Activations are what the allocator holds beyond the plan with everything on the device; streaming adds none."""
    batch = {"input_ids": torch.ones(1, 8, dtype=torch.long), "labels": torch.ones(1, 8, dtype=torch.long)}

    def peak(k: int) -> tuple[int, int]:
        torch.cuda.empty_cache()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        strategy = superpipeline(k=k, k_prime=1)
        trainer_for(strategy, accelerator="gpu").fit(large_llama(), loader([batch] * 3))
        return torch.cuda.max_memory_allocated(), strategy.plan.peak_device_bytes

    everything, planned_everything = peak(99)
    activations = everything - planned_everything
    window, planned_window = peak(2)
    assert window <= planned_window + max(activations, 0) + 64 * 2**20
    assert window < 0.6 * everything


@pytest.mark.gpu("a trace of kernels")
def test_copies_overlap_compute(tmp_path: Path) -> None:
    """In a profiler trace some host-to-device copies run while kernels run on another stream."""
    from torch.profiler import ProfilerActivity, profile

    batch = {"input_ids": torch.ones(4, 32, dtype=torch.long), "labels": torch.ones(4, 32, dtype=torch.long)}
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        trainer_for(superpipeline(k=2), accelerator="gpu").fit(large_llama(), loader([batch] * 4))
    trace.export_chrome_trace(str(tmp_path / "trace.json"))
    import json

    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    copies = [e for e in events if e.get("cat") == "gpu_memcpy" and "HtoD" in e["name"] and e["dur"] > 20]
    kernels = [e for e in events if e.get("cat") == "kernel"]
    assert copies
    assert kernels
    overlapping = sum(
        any(k["ts"] < c["ts"] + c["dur"] and c["ts"] < k["ts"] + k["dur"] and k["tid"] != c["tid"] for k in kernels)
        for c in copies
    )
    assert overlapping > len(copies) // 4


@pytest.mark.gpu("CUDA's page locks")
def test_pinned_memory_is_registered_and_given_back() -> None:
    strategy = superpipeline()
    module = large_llama()
    trainer = trainer_for(strategy, accelerator="gpu")
    batch = {"input_ids": torch.ones(1, 8, dtype=torch.long), "labels": torch.ones(1, 8, dtype=torch.long)}
    trainer.fit(module, loader([batch]))
    pointer = next(module.parameters())
    assert pointer.device.type == "cpu"
    torch.ones(1, device="cuda").item()  # no error is left in the runtime
    trainer.fit(module, loader([batch]))  # registered anew


@pytest.mark.gpu("the peak of torch's own allocator")
def test_the_window_chooses_itself_within_the_budget() -> None:
    """And results are those of any other window."""
    batch = {"input_ids": torch.ones(4, 64, dtype=torch.long), "labels": torch.ones(4, 64, dtype=torch.long)}
    budget = 500 * 2**20

    def run(strategy: SuperpipelineStrategy) -> tuple[Any, int]:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        pl.seed_everything(7, verbose=False)
        module = large_llama()
        trainer_for(strategy, accelerator="gpu").fit(module, loader([batch] * 6))
        return {name: value.cpu() for name, value in module.state_dict().items()}, strategy.stats().peak_allocated_bytes

    strategy = superpipeline(gpu_memory=budget)
    ours, peak = run(strategy)
    assert peak <= budget
    assert strategy.plan.slot_bytes + strategy.plan.resident_bytes <= budget
    assert_equal(ours, run(superpipeline(k=2, k_prime=1))[0], "state")


@pytest.mark.gpu("the limit of torch's own allocator")
def test_out_of_memory_says_which_window_takes_less() -> None:
    class Hungry(Transformer):
        def loss(self, batch: Any) -> Tensor:
            taken = (
                torch.empty(350 * 2**20, dtype=torch.uint8, device="cuda") if self.trainer.global_step == 4 else None
            )
            loss = super().loss(batch)
            del taken
            return loss

    batch = {"input_ids": torch.ones(1, 8, dtype=torch.long), "labels": torch.ones(1, 8, dtype=torch.long)}
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 800 * 2**20) / total)
    try:
        strategy = superpipeline(k=8, k_prime=1)
        with pytest.raises(torch.OutOfMemoryError) as raised:
            trainer_for(strategy, accelerator="gpu").fit(Hungry(large_llama().net), loader([batch] * 6))
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert "Use less: SuperpipelineStrategy(k=1, k_prime=1, " in "\n".join(raised.value.__notes__)


def test_a_timeline_has_every_kind_and_its_fetches_end_before_their_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sp_lightning import SuperpipelineCallback

    drawn: list[Any] = []
    monkeypatch.setattr("sp_lightning.trainer.callback.draw_timeline", lambda intervals, *_: drawn.extend(intervals))
    batch = {"input_ids": torch.ones(4, 32, dtype=torch.long), "labels": torch.ones(4, 32, dtype=torch.long)}
    strategy = SuperpipelineStrategy(k=2, k_prime=1, optimizer_overlap="forward")
    callback = SuperpipelineCallback(plot=tmp_path / "run.png", every_n_steps=1)
    trainer_for(strategy, accelerator="gpu", callbacks=[callback]).fit(large_llama(), loader([batch] * 4))
    assert {each.kind for each in drawn} == {"fetch", "forward", "backward", "between", "drain", "update"}
    for use in (each for each in drawn if each.kind in ("forward", "backward")):
        before = [f for f in drawn if f.kind == "fetch" and f.layer == use.layer and f.begin < use.begin]
        assert all(f.end <= use.begin + 50e-6 for f in before)


class NoSync(Module):
    """A copy or an operator that makes the host wait for the device is an error in its backward."""

    def on_before_backward(self, loss: Tensor) -> None:
        torch.cuda.set_sync_debug_mode("error")

    def on_after_backward(self) -> None:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu("a wait that CUDA notices")
def test_the_backward_of_looked_up_rows_does_not_make_the_host_wait() -> None:
    """It copied the numbers of the rows from pageable memory."""
    torch.use_deterministic_algorithms(False)  # index_put_ of an embedding's backward sorts in one of its forms
    try:
        trainer_for(superpipeline(k=1), accelerator="gpu").fit(NoSync(tables.Text()), loader(tables.numbers()))
    finally:
        torch.cuda.set_sync_debug_mode("default")
