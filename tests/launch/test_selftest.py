"""The self-test of a cluster says ok when the numbers are right, and only then."""

from __future__ import annotations

import dataclasses
import threading
import time

import jax
import numpy as np
import pytest

from slope_jax.launch import selftest
from slope_jax.mesh.axes import AXES, MeshShape, make_mesh

WAIT_S = 60.0


def no_watchdog() -> selftest.Watchdog:
    return selftest.Watchdog(WAIT_S, lambda label: None)


def test_every_collective_on_every_axis_is_right(capfd: pytest.CaptureFixture[str]) -> None:
    mesh = make_mesh(MeshShape(2, 2, 2))
    assert selftest.run_all(mesh, [1 << 10], no_watchdog())
    lines = capfd.readouterr().out.splitlines()[1:]
    assert all(line.endswith(" ok") for line in lines), lines
    expected = {f"{c.name} {axis}" for axis in AXES for c in selftest.COLLECTIVES} | {"all at once"}
    assert {line[:24].rstrip() for line in lines} == expected


@pytest.mark.parametrize("size", [1 << 10, 1000])
def test_axes_of_one_device_are_left_out(size: int, capfd: pytest.CaptureFixture[str]) -> None:
    assert selftest.run_all(make_mesh(MeshShape(1, 3, 1)), [size], no_watchdog())
    names = {line[:24].rstrip() for line in capfd.readouterr().out.splitlines()[1:]}
    assert names == {f"{c.name} ring" for c in selftest.COLLECTIVES} | {"all at once"}


@pytest.mark.parametrize("broken", selftest.COLLECTIVES, ids=lambda collective: collective.name)
def test_collective_that_does_nothing_is_found_out(
    broken: selftest.Collective, capfd: pytest.CaptureFixture[str]
) -> None:
    idle = dataclasses.replace(broken, run=lambda x, axis, degree: x)
    assert not selftest.run_all(make_mesh(MeshShape(1, 4, 1)), [1 << 10], no_watchdog(), [idle])
    captured = capfd.readouterr()
    assert "WRONG" in captured.out
    assert f"{broken.name} ring, 1024 bytes" in captured.err
    assert "at (pp, ring, ulysses) (0, 1, 0)" in captured.err


def test_one_wrong_number_is_found_out(capfd: pytest.CaptureFixture[str]) -> None:
    psum = selftest.COLLECTIVES[0]

    def flip(x: jax.Array, axis: str, degree: int) -> jax.Array:
        here = jax.lax.axis_index(axis) == 2
        return psum.run(x, axis, degree).at[77].add(here.astype(np.float32))

    flipped = dataclasses.replace(psum, run=flip)
    assert not selftest.run_all(make_mesh(MeshShape(1, 4, 1)), [1 << 10], no_watchdog(), [flipped])
    err = capfd.readouterr().err
    assert err.count("1 of 256 numbers, the first at 77") == 2  # alone, and in "all at once"
    assert "(0, 2, 0)" in err


def test_expected_numbers_are_those_of_the_definition() -> None:
    members = [np.array([0.0, 1, 2, 3]), np.array([10.0, 11, 12, 13])]
    expected = {
        "psum": ([10, 12, 14, 16], [10, 12, 14, 16]),
        "all_gather": ([0, 1, 10, 11], [0, 1, 10, 11]),
        "all_to_all": ([0, 1, 10, 11], [2, 3, 12, 13]),
        "ppermute": ([10, 11, 12, 13], [0, 1, 2, 3]),
        "ppermute loop": ([10, 11, 12, 13], [0, 1, 2, 3]),
    }
    for collective in selftest.COLLECTIVES:
        for rank in (0, 1):
            np.testing.assert_array_equal(collective.expect(members, rank), expected[collective.name][rank])


def test_collective_that_hangs_is_named(capfd: pytest.CaptureFixture[str]) -> None:
    named: list[str] = []

    def sleep(x: np.ndarray) -> np.ndarray:
        time.sleep(1.0 if not named else 0.0)
        return x

    def slow(x: jax.Array, axis: str, degree: int) -> jax.Array:
        return jax.pure_callback(sleep, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    hanging = selftest.Collective("slow", slow, lambda members, rank: members[rank])
    watchdog = selftest.Watchdog(0.5, named.append)
    assert selftest.run_all(make_mesh(MeshShape(1, 2, 1)), [1 << 10], watchdog, [hanging])
    assert named[0] == "slow ring, 1024 bytes per device"
    assert "slow ring" in capfd.readouterr().out


def test_watchdog_is_silent_about_what_ends_in_time() -> None:
    expired = threading.Event()
    with selftest.Watchdog(0.3, lambda label: expired.set())("quick"):
        pass
    assert not expired.wait(0.6)
