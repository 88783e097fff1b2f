"""Machines come from files that say where every number is from, and bad files are refused by name."""

from __future__ import annotations

import dataclasses
import pathlib

import pytest

from slope_jax.planner import Cluster, known_devices
from slope_jax.planner.devices import FOLDER, QUANTITIES, to_toml
from slope_jax.planner.quantity import STATUSES

NAMES = ("a100", "cpu", "h100", "h200", "mi250", "mi300x")


def test_the_machines_that_come_with_the_planner() -> None:
    assert known_devices() == NAMES
    for name in NAMES:
        cluster = Cluster.load(name, nodes=3)
        assert cluster.num_devices == 3 * cluster.devices_per_node
        assert all(cluster.sources)
        points = [point for curve in cluster.quantities.values() for point in curve.points]
        assert all(point.status in STATUSES and len(point.source) > 3 for point in points)
        names = {known.split("/")[0] for known in cluster.quantities}
        assert names == set(QUANTITIES) - ({"sharing"} if name != "cpu" else set())


def test_data_sheets() -> None:
    """By hand: 104 compute units at 1.7 GHz do 1024 operations per clock each; 64 GiB; 4 cards of 200 Gb/s."""
    mi250 = Cluster.load("mi250")
    assert mi250.matmul_flops == pytest.approx(104 * 1.7e9 * 1024, rel=1e-3)
    assert mi250.memory_bytes == 64 * 2**30
    assert mi250.network_bandwidth_of_node == 4 * 200e9 / 8


def test_a_file_of_ones_own(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text((FOLDER / "mi250.toml").read_text().replace("memory_bytes = 68_719_476_736", "memory_bytes = 7"))
    assert Cluster.load(path).memory_bytes == 7
    assert Cluster.load(str(path)).name == "mine"


def test_what_is_written_is_read_back(tmp_path: pathlib.Path) -> None:
    for name in NAMES:
        path = tmp_path / f"{name}.toml"
        cluster = Cluster.load(name)
        path.write_text(to_toml(cluster), encoding="utf-8")
        assert dataclasses.asdict(Cluster.load(path)) == dataclasses.asdict(cluster)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("devices = 8\n", "devices = 0\n", "node.devices must be positive, not 0"),
        ("devices = 8\n", "", "node.devices is missing"),
        ("matmul_flops = 181.05e12", 'matmul_flops = "fast"', "device.matmul_flops must be of type float, not 'fast'"),
        ("memory_bandwidth", "memory_bandwith", "device.memory_bandwidth is missing"),
        ("[[quantity.host]]", "[[quantity.hosts]]", "quantity.hosts is not known"),
        ("share = 0.78", "share = 0.98", "memory, point 1: 0 <= low"),
        ("head_dim = 64\n", "", "every point needs a head_dim"),
        ("[0,     200e9,", "[0,     100e9,", "symmetric"),
        ("low = 0.07\n", "low = 0\n", "dense: a rate must be positive"),
        ("bytes_per_s = 41e9\nlow = 35e9\n", "bytes_per_s = 0\nlow = 0\n", "permute: a rate must be positive"),
        ("[device]", "[devices]", "devices is not known"),
        ("nodes of Frontier", 'nodes of "Frontier', "mine.toml"),
    ],
)
def test_bad_files_are_refused(tmp_path: pathlib.Path, old: str, new: str, message: str) -> None:
    text = (FOLDER / "mi250.toml").read_text()
    assert old in text
    path = tmp_path / "mine.toml"
    path.write_text(text.replace(old, new))
    with pytest.raises(ValueError, match=r"mine\.toml: ") as caught:
        Cluster.load(path)
    assert message in str(caught.value)


def test_unknown_machines_and_no_nodes() -> None:
    with pytest.raises(ValueError, match=r"'mi999' is neither a machine that is known \(a100, cpu, .*\) nor a file"):
        Cluster.load("mi999")
    for nodes in (0, -1, True):
        with pytest.raises(ValueError, match="at least one node"):
            Cluster.load("mi250", nodes=nodes)
