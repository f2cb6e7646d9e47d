"""Several nodes: what every rank sees is bitwise what it sees under Lightning's ``ddp``.

Processes stand for nodes: each two of them, say, have shared memory of their own, and the network is this machine's. Two nodes of
one device are compared with ``ddp`` itself, two of two devices with ``ddp`` whose communication hook adds up the ranks of a node
and then the nodes.
"""

from __future__ import annotations

import pytest

from tests.equality.on_ranks import ACCUMULATED, MODES, TRAINED, compare, reference
from tests.support.tiers import some

pytestmark = pytest.mark.rest("several processes; the first tier has those of one node")

ONE_EACH, TWO_EACH = (2, 1), (2, 2)
FEW = ("stack", "gan", "conditional")
KINDS = ("conditional", "resnet50", "experts/mixture", "lora-checkpoint", "rows/looked-up")
EVERY_FIFTH = [name for name in TRAINED if name not in (*FEW, *KINDS)][::5]
SHOWN = ("mixed", "half", "all under forward", "scaled")


@pytest.mark.long("takes a second or more")
@pytest.mark.parametrize("name", some(TRAINED, *FEW, why="the second tier has a few cases, one node has more"))
def test_two_nodes_of_one_device_are_ddp(name: str) -> None:
    compare(name, ONE_EACH, reference=reference(name, ONE_EACH))


@pytest.mark.long("takes a second or more")
@pytest.mark.parametrize("name", some(TRAINED, *KINDS[::2], why="the second tier has some kinds"))
def test_two_nodes_of_two_devices_are_ddp_in_order(name: str) -> None:
    compare(name, TWO_EACH, reference=reference(name, TWO_EACH))


@pytest.mark.long("takes a second or more")
@pytest.mark.parametrize("name", some([*EVERY_FIFTH, *KINDS], "conditional", why="two nodes take the same way"))
def test_gradients_are_accumulated_on_two_nodes(name: str) -> None:
    compare(name, TWO_EACH, options=ACCUMULATED, reference=reference(name, TWO_EACH))


@pytest.mark.long("takes a second or more")
@pytest.mark.parametrize("mode", some(MODES, *SHOWN, why="ranks of one node have all modes"))
@pytest.mark.parametrize(
    "name", some(["conditional", "llama-dropout", "experts/mixture"], "conditional", why="one shows it")
)
def test_modes(name: str, mode: str) -> None:
    strategy, options = MODES[mode]
    compare(name, TWO_EACH, strategy, options, reference(name, TWO_EACH))


@pytest.mark.long("takes a second or more")
@pytest.mark.parametrize("mode", some(MODES, "scaled", "half", why="two devices on each take the same way"))
def test_modes_with_one_device_on_each_node(mode: str) -> None:
    strategy, options = MODES[mode]
    compare("conditional", ONE_EACH, strategy, options, reference("conditional", ONE_EACH))


@pytest.mark.long("the second tier has two nodes")
@pytest.mark.parametrize("name", KINDS)
def test_three_nodes(name: str) -> None:
    compare(name, (3, 1), reference=reference(name, (3, 1)))


@pytest.mark.long("takes a second or more")
@pytest.mark.parametrize(
    "mode", some(["all under forward", "mixed", "scaled"], "mixed", why="one shows the order of streams")
)
def test_nodes_with_simulated_devices(mode: str) -> None:
    """As on accelerators: copies take effect late, and memory that is used too early is NaN."""
    strategy, options = MODES[mode]
    compare("llama-dropout", TWO_EACH, strategy, options, reference("llama-dropout", TWO_EACH), on_devices=True)


@pytest.mark.long("takes a second or more")
def test_the_comparison_can_fail() -> None:
    """All ranks one after the other have another sum than the nodes' sums have."""
    with pytest.raises(AssertionError, match="values differ"):
        compare("llama-dropout", TWO_EACH, reference="ddp in one row")
