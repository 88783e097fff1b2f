"""Checks a cluster: runs every collective that the engine uses on every axis of the mesh and compares the numbers.

    python -m slope_jax.launch.selftest --pp=2 --ring=2 --ulysses=2 --cpu_devices=8

Prints one line per collective, axis and size, with the verdict and the rate. The exit status is 0 when every number is
right; 1 when one is wrong or a collective gives no result within --collective_timeout_s (its name is printed, and those
after it are not tried); 2 when the flags fit neither together nor to the devices.
"""

from __future__ import annotations

import dataclasses
import functools
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import jax
import numpy as np
from absl import app, flags
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from slope_jax.launch import flags as common_flags
from slope_jax.mesh.axes import AXES, describe_mesh, make_mesh
from slope_jax.mesh.processes import distributed

SIZES = tuple(1 << exponent for exponent in (10, 14, 18, 22, 26))  # 1 kB to 64 MB
CPU_MAX_BYTES = 1 << 18
_REPEATS = 3
_BYTES_PER_NUMBER = 4

Array = jax.Array
Members = Sequence[np.ndarray]


@dataclasses.dataclass(frozen=True, slots=True)
class Collective:
    """A collective over one axis, and what it must give.

    Attributes:
      name: its name in the table.
      run: `(x, axis, degree) -> y` inside `shard_map`, on the flat array of a device.
      expect: `(members, rank) -> y` from the arrays of all ranks of the axis.
    """

    name: str
    run: Callable[[Array, str, int], Array]
    expect: Callable[[Members, int], np.ndarray]


def _shift(degree: int) -> list[tuple[int, int]]:
    return [(rank, (rank + 1) % degree) for rank in range(degree)]


def _ppermute_loop(x: Array, axis: str, degree: int) -> Array:
    # One step more than a round, so that the result is not the input.
    return jax.lax.fori_loop(0, degree + 1, lambda _, x: jax.lax.ppermute(x, axis, _shift(degree)), x)


COLLECTIVES = (
    Collective(
        "psum",
        lambda x, axis, degree: jax.lax.psum(x, axis),
        lambda members, rank: np.sum(members, axis=0),
    ),
    Collective(
        # Of one part of the array, so that the result has the array's size.
        "all_gather",
        lambda x, axis, degree: jax.lax.all_gather(x[: x.size // degree], axis, tiled=True),
        lambda members, rank: np.concatenate([m[: m.size // len(members)] for m in members]),
    ),
    Collective(
        "all_to_all",
        lambda x, axis, degree: jax.lax.all_to_all(x, axis, 0, 0, tiled=True),
        lambda members, rank: np.concatenate([np.split(m, len(members))[rank] for m in members]),
    ),
    Collective(
        "ppermute",
        lambda x, axis, degree: jax.lax.ppermute(x, axis, _shift(degree)),
        lambda members, rank: members[rank - 1],
    ),
    Collective("ppermute loop", _ppermute_loop, lambda members, rank: members[(rank - 1) % len(members)]),
)


@dataclasses.dataclass(frozen=True, slots=True)
class Check:
    """One line of the table.

    Attributes:
      label: collectives, axis and bytes per device.
      num_bytes: of the array of a device.
      run: the program, on an array [pp, ring, ulysses, n]; gives one array of the same shape per collective.
      expect: what a device's part of each result must be, from its place in the mesh and the numbers of a place.
    """

    label: str
    num_bytes: int
    run: Callable[[Array], tuple[Array, ...]]
    expect: Callable[[tuple[int, ...], Callable[[tuple[int, ...]], np.ndarray]], list[np.ndarray]]


@dataclasses.dataclass(frozen=True, slots=True)
class Verdict:
    """What came of a check: the places with wrong numbers, and the seconds of the fastest run."""

    wrong: tuple[str, ...]
    seconds: float


class Watchdog:
    """Calls `on_expiry` with the label of a step that takes longer than `limit_s`, from a thread of its own."""

    def __init__(self, limit_s: float, on_expiry: Callable[[str], object]) -> None:
        self._limit_s = limit_s
        self._on_expiry = on_expiry

    def __call__(self, label: str) -> _Step:
        """A context manager round the step."""
        return _Step(threading.Timer(self._limit_s, self._on_expiry, [label]))


@dataclasses.dataclass(frozen=True, slots=True)
class _Step:
    timer: threading.Timer

    def __enter__(self) -> None:
        self.timer.daemon = True
        self.timer.start()

    def __exit__(self, *_: object) -> None:
        self.timer.cancel()


def checks(mesh: Mesh, sizes: Sequence[int], collectives: Sequence[Collective] = COLLECTIVES) -> Iterator[Check]:
    """Each collective on each axis of more than one device at each size, then all of them in one program."""
    axes = [axis for axis in AXES if mesh.shape[axis] > 1]
    for size in sizes:
        for axis in axes:
            for collective in collectives:
                yield _check(mesh, f"{collective.name} {axis}", size, [(collective, axis)])
        if axes:
            # Nothing orders these, so that several communicators are in flight at once.
            yield _check(mesh, "all at once", size, [(c, axis) for axis in axes for c in collectives])


def _check(mesh: Mesh, name: str, size: int, parts: Sequence[tuple[Collective, str]]) -> Check:
    spec = PartitionSpec(*AXES)

    @jax.jit
    # The results of psum and all_gather are the same along their axis, but every device's own copy is wanted here.
    @functools.partial(jax.shard_map, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    def run(x: Array) -> tuple[Array, ...]:
        return tuple(c.run(x.ravel(), axis, mesh.shape[axis]).reshape(1, 1, 1, -1) for c, axis in parts)

    def expect(place: tuple[int, ...], numbers: Callable[[tuple[int, ...]], np.ndarray]) -> list[np.ndarray]:
        results = []
        for collective, axis in parts:
            index = AXES.index(axis)
            members = [numbers((*place[:index], r, *place[index + 1 :])) for r in range(mesh.shape[axis])]
            results.append(collective.expect(members, place[index]))
        return results

    return Check(name, size, run, expect)


def run_check(check: Check, mesh: Mesh, watchdog: Watchdog) -> Verdict:
    """Runs a check on the devices of `mesh`; every process looks at the results of its own devices."""
    # A size that every degree divides, for the collectives that split the array.
    unit = int(np.lcm.reduce(list(mesh.shape.values())))
    length = -(-check.num_bytes // _BYTES_PER_NUMBER // unit) * unit

    @functools.cache
    def numbers(place: tuple[int, ...]) -> np.ndarray:
        # Whole numbers below 2^12: sums over up to 4096 devices are exact in float32.
        device = int(np.ravel_multi_index(place, mesh.devices.shape))
        return ((np.arange(length) * 7 + device * 1237) % 4093).astype(np.float32)

    x = jax.make_array_from_callback(
        (*mesh.devices.shape, length),
        NamedSharding(mesh, PartitionSpec(*AXES)),
        lambda index: numbers(_place(index)).reshape(1, 1, 1, -1),
    )
    label = f"{check.label}, {check.num_bytes} bytes per device"
    with watchdog(label):
        outputs = jax.block_until_ready(check.run(x))
    wrong = [text for shards in _by_device(outputs) for text in _compare(shards, check, numbers)]
    seconds = []
    with watchdog(label):
        for _ in range(_REPEATS):
            start = time.perf_counter()
            jax.block_until_ready(check.run(x))
            seconds.append(time.perf_counter() - start)
    return Verdict(tuple(wrong), min(seconds))


def _place(index: tuple[slice, ...] | None) -> tuple[int, ...]:
    """The place in the mesh of a device's part `[1, 1, 1, n]` of an array."""
    assert index is not None  # only of arrays without a sharding
    return tuple(part.start or 0 for part in index[:3])


def _by_device(outputs: Sequence[Array]) -> Iterator[list[jax.Shard]]:
    return (list(shards) for shards in zip(*(output.addressable_shards for output in outputs), strict=True))


def _compare(
    shards: Sequence[jax.Shard], check: Check, numbers: Callable[[tuple[int, ...]], np.ndarray]
) -> Iterator[str]:
    place = _place(shards[0].index)
    for number, (shard, expected) in enumerate(zip(shards, check.expect(place, numbers), strict=True)):
        got = np.asarray(shard.data).ravel()
        if got.shape != expected.shape:
            yield f"{shard.device} at {place}: {got.size} numbers instead of {expected.size}"
        elif bad := np.flatnonzero(got != expected).tolist():
            first = bad[0]
            yield (
                f"{shard.device} at (pp, ring, ulysses) {place}, result {number}: {len(bad)} of {got.size} numbers, "
                f"the first at {first}: {got[first]} instead of {expected[first]}"
            )


def run_all(
    mesh: Mesh, sizes: Sequence[int], watchdog: Watchdog, collectives: Sequence[Collective] = COLLECTIVES
) -> bool:
    """Runs all checks and prints their lines on process 0; True when this process saw no wrong number."""
    show = functools.partial(print, flush=True) if jax.process_index() == 0 else lambda _: None
    show(f"{'collective':<24} {'bytes':>9} {'ms':>9} {'GB/s':>8}  verdict")
    right = True
    for check in checks(mesh, sizes, collectives):
        verdict = run_check(check, mesh, watchdog)
        rate = check.num_bytes / verdict.seconds / 1e9
        word = "WRONG" if verdict.wrong else "ok"
        show(f"{check.label:<24} {check.num_bytes:>9} {verdict.seconds * 1e3:>9.3f} {rate:>8.3f}  {word}")
        for text in verdict.wrong:
            right = False
            print(f"selftest: {check.label}, {check.num_bytes} bytes: {text}", file=sys.stderr, flush=True)
    return right


def _hangs(label: str) -> None:
    limit_s = flags.FLAGS.collective_timeout_s
    distributed.abort(
        f"{label}: no result within {limit_s:g} s on process {jax.process_index()} (host {socket.gethostname()})"
    )


def run() -> int:
    """The body of the program; returns the exit status."""
    values = flags.FLAGS
    shape = common_flags.setup_runtime()
    try:
        hosts = distributed.hosts()
        mesh = make_mesh(shape, hosts=hosts)
    except ValueError as error:
        raise common_flags.StartError(str(error)) from error
    if jax.process_index() == 0:
        print(describe_mesh(mesh, hosts), flush=True)
    max_bytes = values.max_bytes or (CPU_MAX_BYTES if mesh.devices.flat[0].platform == "cpu" else SIZES[-1])
    sizes = [size for size in SIZES if size <= max_bytes]
    right = run_all(mesh, sizes, Watchdog(values.collective_timeout_s, _hangs))
    if mesh.devices.size == 1 and jax.process_index() == 0:
        print("one device: there are no collectives to check")
    return 0 if right else 1


def main(argv: Sequence[str]) -> None:
    """Runs the program."""
    if len(argv) > 1:
        raise app.UsageError(f"unexpected argument {argv[1]!r}")
    sys.exit(distributed.run_program(run, refusals=(common_flags.StartError,)))


def define_flags() -> None:
    """Defines the flags of the program, beside those of the mesh and of the processes."""
    flags.DEFINE_integer(
        "max_bytes", None, "Largest array per device; by default 64 MB, on CPU 256 kB.", lower_bound=SIZES[0]
    )
    flags.DEFINE_float("collective_timeout_s", 60.0, "How long a collective may take, first call included.", 0.1)


if __name__ == "__main__":
    define_flags()
    app.run(main)
