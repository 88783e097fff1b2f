"""The named device mesh `(pp, ring, ulysses)` and the shapes that it may have."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Sequence
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, PartitionSpec

PP, RING, ULYSSES = "pp", "ring", "ulysses"
AXES = (PP, RING, ULYSSES)
SEQUENCE_AXES = (RING, ULYSSES)  # the axes over which the tokens of a chunk are split
PER_DEVICE = PartitionSpec(*AXES)  # of arrays that lead with the axes of the mesh

Tree = TypeVar("Tree")


@dataclasses.dataclass(frozen=True, slots=True)
class MeshShape:
    """How many devices each axis of the mesh has.

    Attributes:
      pp: pipeline stages.
      ring: ranks of the ring that passes keys and values, or queries (ring attention).
      ulysses: ranks that exchange sequence shards for head shards (Ulysses attention).

    Raises:
      ValueError: a degree is not a positive integer.
    """

    pp: int = 1
    ring: int = 1
    ulysses: int = 1

    def __post_init__(self) -> None:
        for axis in AXES:
            degree = getattr(self, axis)
            if isinstance(degree, bool) or not isinstance(degree, int) or degree < 1:
                raise ValueError(f"mesh axis {axis} must be a positive integer, not {degree!r}")

    @property
    def num_devices(self) -> int:
        """Devices that the mesh uses."""
        return self.pp * self.ring * self.ulysses

    def __str__(self) -> str:
        return f"{self.pp}x{self.ring}x{self.ulysses}"

    def check_heads(self, num_heads: int, num_kv_heads: int) -> None:
        """Raises ValueError when attention heads cannot be split over the ulysses axis.

        A ulysses degree above the number of KV heads is served by replicating each KV head, so one must divide the
        other.
        """
        if num_heads % self.ulysses:
            allowed = [u for u in range(1, num_heads + 1) if num_heads % u == 0 and _kv_fits(u, num_kv_heads)]
            raise ValueError(
                f"ulysses={self.ulysses} does not divide the {num_heads} query heads; allowed values: {allowed}"
            )
        if not _kv_fits(self.ulysses, num_kv_heads):
            allowed = [u for u in range(1, num_heads + 1) if num_heads % u == 0 and _kv_fits(u, num_kv_heads)]
            raise ValueError(
                f"ulysses={self.ulysses} neither divides nor is a multiple of the {num_kv_heads} KV heads; "
                f"allowed values: {allowed}"
            )

    def check_experts(self, num_experts: int) -> None:
        """Raises ValueError when experts cannot be split evenly over the ulysses axis."""
        if num_experts % self.ulysses:
            allowed = [u for u in range(1, num_experts + 1) if num_experts % u == 0]
            raise ValueError(
                f"expert parallelism cannot split {num_experts} experts over ulysses={self.ulysses}; "
                f"allowed values: {allowed}"
            )


def _kv_fits(ulysses: int, num_kv_heads: int) -> bool:
    return num_kv_heads % ulysses == 0 or ulysses % num_kv_heads == 0


def make_mesh(
    shape: MeshShape, devices: Sequence[jax.Device] | None = None, hosts: Sequence[str] | None = None
) -> Mesh:
    """Builds the device mesh, ulysses innermost so that its groups stay on one host where that is possible.

    Args:
      shape: the degrees of the axes.
      devices: the devices to use, in any order; all devices of all processes by default.
      hosts: the host of each process, by its number; by default every process counts as a host of its own.

    Raises:
      ValueError: the mesh needs more devices than there are, or would leave a process without a device of the mesh.
    """
    if hosts is None:
        hosts = [str(process) for process in range(jax.process_count())]
    available = _host_by_host(jax.devices() if devices is None else devices, hosts)
    if len(set(available)) != len(available):
        raise ValueError("a device is given twice")
    if shape.num_devices > len(available):
        raise ValueError(
            f"the mesh {shape} (pp x ring x ulysses) needs {shape.num_devices} devices, but there are {len(available)}"
        )
    chosen = _take_evenly(available, shape.num_devices)
    left_out = {d.process_index for d in available} - {d.process_index for d in chosen}
    if left_out:
        raise ValueError(
            f"the mesh {shape} uses {shape.num_devices} of {len(available)} devices, which leaves processes "
            f"{sorted(left_out)} without any; start fewer processes or use a larger mesh"
        )
    grid = np.array(chosen, dtype=object).reshape(shape.pp, shape.ring, shape.ulysses)
    return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * 3)


def _host_by_host(devices: Sequence[jax.Device], hosts: Sequence[str]) -> list[jax.Device]:
    """Devices of one host next to each other, whatever the order in which processes were numbered."""
    return sorted(devices, key=lambda d: (hosts.index(hosts[d.process_index]), d.process_index, d.id))


def _take_evenly(devices: list[jax.Device], count: int) -> list[jax.Device]:
    """The first devices of every process, the same number of each where the count allows."""
    by_process: dict[int, list[jax.Device]] = collections.defaultdict(list)
    for device in devices:
        by_process[device.process_index].append(device)
    if count % len(by_process) == 0 and all(len(d) >= count // len(by_process) for d in by_process.values()):
        return [d for group in by_process.values() for d in group[: count // len(by_process)]]
    return devices[:count]


def varying(tree: Tree) -> Tree:
    """Declares that arrays differ from device to device, as a loop's carry must when the loop makes them differ."""

    def cast(x: jax.Array) -> jax.Array:
        missing = tuple(axis for axis in AXES if axis not in jax.typeof(x).manual_axis_type.varying)
        return jax.lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(cast, tree)


def where_needed(needed: jax.Array, compute: Callable[[], Tree]) -> Tree:
    """What `compute` gives on devices that need it, and zeros, without computing anything, on the others.

    It must hold no exchange, since not all devices take part.
    """
    shapes = jax.eval_shape(compute)
    nothing = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), shapes)
    found: Tree = jax.lax.cond(needed, lambda: varying(compute()), lambda: varying(nothing))
    return found


def mesh_shape(mesh: Mesh) -> MeshShape:
    """The degrees of a mesh made by `make_mesh`."""
    return MeshShape(pp=mesh.shape[PP], ring=mesh.shape[RING], ulysses=mesh.shape[ULYSSES])


def describe_mesh(mesh: Mesh, hosts: Sequence[str]) -> str:
    """A table of the mesh for the start-up log: one line per ulysses group, with hosts, processes and device ids.

    Args:
      mesh: the mesh.
      hosts: the host of each process, by its number.
    """
    kinds = sorted({d.device_kind for d in mesh.devices.flat})
    lines = [f"mesh {mesh_shape(mesh)} (pp x ring x ulysses) of {mesh.devices.size} devices, {', '.join(kinds)}"]
    lines.append("  each line a ulysses group: host, then process:device")
    split_groups = 0
    for pp, ring in np.ndindex(mesh.devices.shape[:2]):
        group = mesh.devices[pp, ring]
        by_host: dict[str, list[str]] = {}
        for device in group:
            by_host.setdefault(hosts[device.process_index], []).append(f"{device.process_index}:{device.id}")
        split_groups += len(by_host) > 1
        lines.append(f"  pp {pp} ring {ring}: " + "; ".join(f"{host} {' '.join(ids)}" for host, ids in by_host.items()))
    if split_groups:
        lines.append(f"  {split_groups} ulysses groups span several hosts, whose links are slower")
    return "\n".join(lines)
