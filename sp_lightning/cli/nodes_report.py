"""What several nodes bring: the lines of a plan that say so."""

from __future__ import annotations

from dataclasses import replace

from sp_lightning.cli.answer import Row
from sp_lightning.cli.arguments import Question
from sp_lightning.cli.model_estimate import ModelEstimate


def nodes_assumed(question: Question) -> list[str]:
    """What is assumed of several nodes; nothing for one."""
    if question.nodes == 1:
        return []
    return [
        f"assumed of the {question.nodes} nodes: each has a copy of everything and updates it, and "
        f"{question.network / 1e9:g} GB/s lead from each node to the others, each way, for all its devices together (--network)"
    ]


def nodes_gain(estimate: ModelEstimate, row: Row) -> list[str]:
    """How many times as many samples several nodes train in the same time as one; nothing for one, or without training."""
    question, busy = estimate.question, row.prediction.busy
    if question.nodes == 1 or question.predict:
        return []
    one = _seconds(estimate, row, 1)
    gains = {nodes: nodes * one / _seconds(estimate, row, nodes) for nodes in sorted({2, question.nodes})}
    times = ", ".join(f"{nodes} train {gain:.3g} times as many samples" for nodes, gain in gains.items())
    pays = (
        f"adds {gains[2] - 1:.0%} of what the first one trains"
        if gains[2] > 1
        else "does not pay: the sums take too long"
    )
    others = max(seconds for name, seconds in busy.items() if name != "network")
    enough = question.network / 1e9 * busy["network"] / max(others, 1e-9)
    return [
        f"nodes: one takes {one:.3g} s per batch; beside it, {times}. A second node {pays}. The network is at work for "
        f"{busy['network']:.3g} s; it binds below {enough:.3g} GB/s."
    ]


def _seconds(estimate: ModelEstimate, row: Row, nodes: int) -> float:
    """The time of a batch on so many such nodes, with the window and the modes of a row."""
    question = type(estimate.question)(**{**vars(estimate.question), "nodes": nodes})
    return replace(estimate, question=question).predict(replace(row.plan, nodes=nodes), row.modes).seconds
