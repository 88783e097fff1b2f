"""The mesh: shapes that fit, devices in an order that keeps ulysses groups on a host, and a log that says so."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from slope_jax.mesh import axes
from slope_jax.mesh.axes import MeshShape, describe_mesh, make_mesh


@dataclasses.dataclass(frozen=True)
class FakeDevice:
    id: int
    process_index: int
    device_kind: str = "fake"


@dataclasses.dataclass(frozen=True)
class FakeMesh:
    devices: np.ndarray
    shape: dict[str, int]


def fake_mesh(shape: MeshShape, hosts: list[str]) -> Any:
    """The grid that `make_mesh` would build with one device per process."""
    devices: Any = [FakeDevice(i, i) for i in range(len(hosts))]
    ordered = axes._take_evenly(axes._host_by_host(devices[::-1], hosts), shape.num_devices)
    grid = np.array(ordered, dtype=object).reshape(shape.pp, shape.ring, shape.ulysses)
    return FakeMesh(grid, dataclasses.asdict(shape))


@pytest.mark.parametrize("numbering", ["block", "cyclic"])
def test_ulysses_groups_stay_on_a_host(numbering: str) -> None:
    """Four hosts of 8 devices, one process per device, numbered host by host or round the hosts."""
    hosts = [f"node{i // 8 if numbering == 'block' else i % 4}" for i in range(32)]
    for shape in (MeshShape(1, 4, 8), MeshShape(2, 2, 8), MeshShape(4, 2, 4), MeshShape(4, 8, 1)):
        mesh = fake_mesh(shape, hosts)
        for group in mesh.devices.reshape(-1, shape.ulysses):
            assert len({hosts[d.process_index] for d in group}) == 1
        assert "span several hosts" not in describe_mesh(mesh, hosts)


def test_the_log_names_hosts_and_devices_and_what_is_slow() -> None:
    hosts = ["a", "a", "b", "b"]
    text = describe_mesh(fake_mesh(MeshShape(1, 2, 2), hosts), hosts)
    assert "ring 0: a 0:0 1:1" in text
    assert "ring 1: b 2:2 3:3" in text
    assert "several hosts" not in text
    across = describe_mesh(fake_mesh(MeshShape(1, 1, 4), hosts), hosts)
    assert "ring 0: a 0:0 1:1; b 2:2 3:3" in across
    assert "1 ulysses groups span several hosts" in across


def test_devices_are_taken_evenly_from_processes() -> None:
    devices: Any = [FakeDevice(i, i // 4) for i in range(8)]
    assert [d.id for d in axes._take_evenly(devices, 4)] == [0, 1, 4, 5]


def test_experts_that_cannot_be_split_evenly_are_refused() -> None:
    MeshShape(1, 1, 8).check_experts(128)
    with pytest.raises(ValueError, match=r"12 experts over ulysses=8; allowed values: \[1, 2, 3, 4, 6, 12\]"):
        MeshShape(1, 1, 8).check_experts(12)


def test_a_mesh_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match=r"mesh 2x4x2.*needs 16 devices, but there are 8"):
        make_mesh(MeshShape(2, 4, 2))
    assert make_mesh(MeshShape(1, 3, 1)).shape == {"pp": 1, "ring": 3, "ulysses": 1}
