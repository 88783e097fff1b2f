"""How fast devices exchange: over the links of a node, and over the network between nodes.

Devices are numbered node by node, and the mesh puts them in that order, ulysses innermost. So a group over an axis is a
run of devices at equal distances, and whether it stays inside a node follows from the two.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence

import numpy as np

from slope_jax.mesh.axes import PP, RING, ULYSSES, MeshShape
from slope_jax.planner.devices import Cluster

Links = Sequence[Sequence[float]]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """What an exchange costs.

    Attributes:
      bytes_per_s: bytes that leave a device per second.
      seconds: beside the bytes.
      quantities: the quantities of the cluster that decide.
    """

    bytes_per_s: float
    seconds: float
    quantities: tuple[str, ...]

    def time(self, sent_bytes: float, count: int = 1) -> float:
        """Seconds for so many exchanges of so many bytes each."""
        return count * (sent_bytes / self.bytes_per_s + self.seconds)


class Fabric:
    """The exchanges of a mesh on a cluster."""

    def __init__(self, cluster: Cluster, shape: MeshShape):
        """Lays the mesh on the first devices of the cluster."""
        self._cluster = cluster
        self._sizes = {PP: shape.pp, RING: shape.ring, ULYSSES: shape.ulysses}
        self._strides = {ULYSSES: 1, RING: shape.ulysses, PP: shape.ulysses * shape.ring}
        self._devices = shape.num_devices
        self._found: dict[tuple[str, tuple[str, ...]], Exchange] = {}

    def exchange(self, operation: str, axes: tuple[str, ...]) -> Exchange:
        """The cost of an operation of `cost.Collective` over axes of the mesh."""
        key = operation, axes
        if key not in self._found:
            latency = self._cluster.curve("collective")()
            size = math.prod(self._sizes[axis] for axis in axes)
            stride = self._strides[axes[-1]]
            if operation == "ppermute":
                bandwidth, names = self._permute(size, stride)
            else:
                bandwidth, names = self._collective(operation, size, stride)
            self._found[key] = Exchange(bytes_per_s=bandwidth, seconds=latency, quantities=names)
        return self._found[key]

    def _permute(self, size: int, stride: int) -> tuple[float, tuple[str, ...]]:
        """Each device to the next of its group, the last one to the first; the slowest of them counts."""
        cluster, per_node = self._cluster, self._cluster.devices_per_node
        leaving: dict[int, int] = {}  # devices of a node that send to another one
        inside: set[tuple[int, int]] = set()
        for device in range(self._devices):
            place = device // stride % size
            other = device + (stride if place < size - 1 else -stride * (size - 1))
            if device // per_node == other // per_node:
                inside.add((device % per_node, other % per_node))
            else:
                leaving[device // per_node] = leaving.get(device // per_node, 0) + 1
        found: list[tuple[float, tuple[str, ...]]] = []
        if inside:
            if "permute" in cluster.quantities:
                found.append((cluster.curve("permute")(), ("permute",)))
            elif cluster.links is not None:
                slowest = min(path_bandwidth(cluster.links, a, b) for a, b in inside if a != b)
                found.append((slowest, ()))
        if leaving:
            found.append((self._network_share(max(leaving.values())), ("between_nodes",)))
        return min(found)

    def _collective(self, operation: str, size: int, stride: int) -> tuple[float, tuple[str, ...]]:
        """An all-to-all, or a reduction or a gathering by rings."""
        cluster = self._cluster
        inside = self._inside(size, stride)
        name = "all_to_all" if operation == "all_to_all" else "all_reduce"
        found: list[tuple[float, tuple[str, ...]]] = []
        if inside > 1:
            if name in cluster.quantities:
                bandwidth = cluster.curve(name)(inside)
            elif cluster.links is not None:
                bandwidth = all_to_all_bandwidth(cluster.links, range(0, inside * stride, stride))
            else:
                bandwidth = math.inf
            share = (inside - 1) / (size - 1) if name == "all_to_all" else 1.0
            found.append((bandwidth / share, (name,)))
        if inside < size:
            in_use = min(cluster.devices_per_node, self._devices)
            # Rings enter and leave a node once, so all devices of it share the network for the bytes of one.
            groups = max(in_use // inside, 1)
            if name == "all_to_all":
                share, bandwidth = (size - inside) / (size - 1), self._network_share(in_use)
            else:
                share, bandwidth = 1.0, self._network_share(groups)
                bandwidth = max(
                    bandwidth, cluster.network_bandwidth_of_node * cluster.curve("between_nodes")() / groups
                )
            found.append((bandwidth / share, ("between_nodes",)))
        return min(found) if found else (math.inf, ())

    def _inside(self, size: int, stride: int) -> int:
        """Devices of a group in one node: those of the group and the node where they are fewest, which wait longest."""
        device = np.arange(self._devices)
        first = device - device // stride % size * stride
        groups = np.stack([first, device // self._cluster.devices_per_node])
        return int(np.unique(groups, axis=1, return_counts=True)[1].min())

    def _network_share(self, devices: int) -> float:
        """Bytes per second of each of several devices of a node that send to other nodes at once."""
        cluster = self._cluster
        most = min(cluster.network_bandwidth, cluster.network_bandwidth_of_node / devices)
        return most * cluster.curve("between_nodes")()


def path_bandwidth(links: Links, start: int, end: int) -> float:
    """Bytes per second from one device to another, on the path of fewest links that is widest."""
    best = max(_shortest_paths(links, start, end), key=lambda path: _width(links, path))
    return _width(links, best)


def all_to_all_bandwidth(links: Links, devices: Sequence[int]) -> float:
    """Bytes per second that every device can send in an all-to-all, by the links alone.

    What two devices exchange is spread evenly over the paths of fewest links between them, through devices of the group
    where there are such; the link that has most to carry decides.
    """
    load: dict[tuple[int, int], float] = {}
    for start, end in itertools.permutations(devices, 2):
        paths = _shortest_paths(links, start, end)
        inside = [path for path in paths if set(path) <= set(devices)] or paths
        for path in inside:
            for a, b in itertools.pairwise(path):
                load[a, b] = load.get((a, b), 0.0) + 1 / (len(devices) - 1) / len(inside)
    return min(links[a][b] / share for (a, b), share in load.items())


def _width(links: Links, path: Sequence[int]) -> float:
    return min(links[a][b] for a, b in itertools.pairwise(path))


def _shortest_paths(links: Links, start: int, end: int) -> list[list[int]]:
    paths = [[start]]
    for _ in links:
        done = [path for path in paths if path[-1] == end]
        if done:
            return done
        paths = [
            [*path, other]
            for path in paths
            for other, width in enumerate(links[path[-1]])
            if width > 0 and other not in path
        ]
    raise ValueError(f"no links lead from device {start} to device {end}")
