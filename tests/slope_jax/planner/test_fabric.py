"""What exchanges can move, against capacities of the links worked out by hand."""

from __future__ import annotations

import dataclasses

import pytest

from slope_jax import MeshShape
from slope_jax.planner import Cluster
from slope_jax.planner.fabric import Fabric, all_to_all_bandwidth, path_bandwidth

FOUR = Cluster.load("mi250", nodes=4)


def test_all_to_all_over_the_links_of_a_node() -> None:
    """Of 2: a link of 200. Of 4: {0, 1} and {2, 3} exchange 4 of 12 parts each way over two links of 50. Of 8: 87.5."""
    links = FOUR.links
    assert links is not None
    assert all_to_all_bandwidth(links, range(2)) == 200e9
    assert all_to_all_bandwidth(links, range(4)) == pytest.approx(2 * 50e9 / (4 / 3))
    assert all_to_all_bandwidth(links, range(8)) == pytest.approx(87.5e9)


def test_paths() -> None:
    links = FOUR.links
    assert links is not None
    assert [path_bandwidth(links, 0, d) for d in (1, 2, 6, 7)] == [200e9, 50e9, 100e9, 100e9]
    with pytest.raises(ValueError, match="no links lead from device 0 to device 1"):
        path_bandwidth([[0.0, 0.0], [0.0, 0.0]], 0, 1)


@pytest.mark.parametrize(
    ("shape", "axes", "expected"),
    [
        # All 8 devices of a node send to the next: an eighth of 100 GB/s, of which 80 % are reached.
        (MeshShape(1, 4, 8), ("ring",), 0.8 * 100e9 / 8),
        # One ring over two devices of each rank: only the last pair of a node leaves it, each on a card of its own.
        (MeshShape(1, 16, 2), ("ring",), 0.8 * 25e9),
        (MeshShape(4, 8, 1), ("ring",), 41e9),
        (MeshShape(4, 1, 8), ("pp",), 0.8 * 100e9 / 8),
        (MeshShape(1, 2, 2), ("ring",), 41e9),
    ],
)
def test_neighbours(shape: MeshShape, axes: tuple[str, ...], expected: float) -> None:
    assert Fabric(FOUR, shape).exchange("ppermute", axes).bytes_per_s == pytest.approx(expected)


def test_all_to_all_beyond_a_node_is_bound_by_the_network() -> None:
    inside = Fabric(FOUR, MeshShape(1, 4, 8)).exchange("all_to_all", ("ulysses",))
    assert inside.bytes_per_s == 70e9
    assert inside.time(7e9, count=2) == pytest.approx(2 * (0.1 + 30e-6))
    across = Fabric(FOUR, MeshShape(1, 2, 16)).exchange("all_to_all", ("ulysses",))
    assert across.bytes_per_s == pytest.approx(0.8 * 100e9 / 8 / (8 / 15))
    assert across.quantities == ("between_nodes",)


def test_groups_that_nodes_divide_use_the_network() -> None:
    """Six devices in a node: of the groups of four, one has two devices in each of two nodes."""
    six = dataclasses.replace(FOUR, devices_per_node=6)
    exchange = Fabric(six, MeshShape(1, 3, 4)).exchange("all_to_all", ("ulysses",))
    assert exchange.quantities == ("between_nodes",)
    assert exchange.bytes_per_s == pytest.approx(0.8 * 100e9 / 6 / (2 / 3))


def test_a_reduction_over_two_nodes_reaches_what_lumi_reports() -> None:
    """85 GB/s of bus bandwidth on 16 devices (rccl_test_allreduce): the bytes of one ring, which a node shares."""
    both = Fabric(FOUR, MeshShape(1, 1, 16)).exchange("psum", ("ulysses",))
    assert both.bytes_per_s == pytest.approx(
        59.5e9
    )  # bound by the links of the node here, not by the network's 80 GB/s
    assert Fabric(FOUR.scaled({"all_reduce": 2}), MeshShape(1, 1, 16)).exchange(
        "psum", ("ulysses",)
    ).bytes_per_s == pytest.approx(80e9)


def test_without_bandwidths_the_links_decide() -> None:
    """Eight devices, each with a link of 64 GB/s to every other one: all seven are used."""
    links = tuple(tuple(0.0 if a == b else 64e9 for b in range(8)) for a in range(8))
    assert all_to_all_bandwidth(links, range(8)) == pytest.approx(7 * 64e9)
