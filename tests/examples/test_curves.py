"""The picture of losses: which points it draws, and that both kept runs have the same ones."""

from __future__ import annotations

from pathlib import Path

from examples.benchmarks import curves


def test_points_are_at_complete_steps_and_empty_cells_are_left_out(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.csv"
    metrics.write_text("epoch,loss,step,val_loss\n0,7.5,9,\n0,,9,7.25\n0,6.5,19,\n")
    assert curves.points(metrics, "loss") == ([10, 20], [7.5, 6.5])
    assert curves.points(metrics, "val_loss") == ([10], [7.25])


def test_kept_runs_have_the_same_metrics() -> None:
    plain, ours = (curves.ROWS / f"{name}.csv" for name in ("plain", "superpipeline"))
    assert plain.read_bytes() == ours.read_bytes()
    assert len(curves.points(plain, "loss")[0]) == 40
