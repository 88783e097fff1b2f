"""Machines: a device, the node that it is in, and how many nodes there are. Read from TOML files.

    Cluster.load("mi250", nodes=4)
    Cluster.load("my_machine.toml", nodes=2)

A file has the tables `[device]`, `[node]` and `[[quantity.NAME]]`; those in the folder `devices` show how. Everything
that is not a data-sheet number is a quantity: a curve of points, each with a source and a status (see `quantity`).
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import pathlib
import tomllib
from collections.abc import Mapping
from typing import Any

from slope_jax.planner.quantity import Curve, read_curve

MOST_NODES = 1024  # for more, trying all meshes takes minutes
FOLDER = pathlib.Path(__file__).parent / "devices"

# Name of a quantity: the key of its place on the curve (None: one value holds everywhere), and the key of its value.
QUANTITIES: dict[str, tuple[str | None, str]] = {
    "dense": ("rows", "share"),
    "experts": ("rows_per_expert", "share"),
    "full_attention": ("keys", "share"),
    "window_attention": ("window", "share"),
    "memory": (None, "share"),
    "expert_overlap": (None, "share"),
    "unpacking": (None, "passes"),
    "ring_exposed": (None, "share"),
    "routing_imbalance": (None, "factor"),
    "all_to_all": ("devices", "bytes_per_s"),
    "all_reduce": ("devices", "bytes_per_s"),
    "permute": (None, "bytes_per_s"),
    "between_nodes": (None, "share"),
    "collective": (None, "seconds"),
    "ring_step": (None, "seconds"),
    "launch": (None, "seconds"),
    "launches": (None, "per_layer"),
    "host": (None, "seconds"),
    "engine": (None, "factor"),
    "sharing": (None, "factor"),
    "memory_reserve": (None, "share"),
}
MEANINGS = {
    "dense": "share of the matmul peak in projections, router and unembedding",
    "experts": "share of the matmul peak in the experts' products, tile padding counted as work",
    "full_attention": "share of the matmul peak in full attention, by twice the mean number of keys of a query",
    "window_attention": "share of the matmul peak in window attention, by the length of the window",
    "memory": "share of the memory bandwidth that is reached",
    "expert_overlap": "share of the shorter of weight streaming and products that is not hidden by the longer",
    "unpacking": "times that the bfloat16 form of packed experts goes through memory in a tick",
    "ring_exposed": "share of a ring transfer that costs time beside the attention of its step",
    "routing_imbalance": "rows of the busiest rank of expert parallelism over the mean",
    "all_to_all": "bytes that a device sends per second in an all-to-all inside a node",
    "all_reduce": "bytes that a device sends per second in an all-reduce inside a node",
    "permute": "bytes that a device sends per second to another one of its node",
    "between_nodes": "share of the network bandwidth that is reached",
    "collective": "time of an exchange beside its bytes",
    "ring_step": "time of a ring step beside its attention and its bytes",
    "launch": "time of a launch that is not hidden",
    "launches": "launches of a layer",
    "host": "time of a tick on the host that is not hidden",
    "engine": "time of an engine that serves over that of its operations",
    "sharing": "time of several devices that share cores over the sum of what each one takes alone",
    "memory_reserve": "share of the memory that is left to the runtime and to fragmentation",
}
_FROM_LINKS = {"all_to_all", "all_reduce", "permute"}  # which follow from the links where they are not given
_OPTIONAL = {*_FROM_LINKS, "sharing"}
_RATES = {"dense", "experts", "full_attention", "window_attention", "memory", "between_nodes", *_FROM_LINKS}
_DEVICE = {"name": str, "matmul_flops": float, "memory_bytes": int, "memory_bandwidth": float, "source": str}
_NODE = {"devices": int, "network_cards": int, "network_bandwidth": float, "source": str}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Cluster:
    """Nodes of equal devices.

    Attributes:
      name: of the file.
      device: what a device is called.
      nodes: how many nodes there are.
      devices_per_node: devices of a node.
      matmul_flops: peak of matrix products in bfloat16 with float32 sums, operations per second of a device.
      memory_bytes: of a device.
      memory_bandwidth: bytes per second of a device, by the data sheet.
      network_cards: of a node.
      network_bandwidth: bytes per second and direction of one card.
      links: bytes per second and direction between the devices of a node, `[from][to]`; None behind a switch.
      shares_cores: whether the devices are virtual and share the cores of one machine, whose peak each one has when the
        others are idle.
      quantities: what was measured or is assumed, by the names in `QUANTITIES`; `full_attention` by head dim too.
      sources: of the data-sheet numbers.
    """

    name: str
    device: str
    nodes: int
    devices_per_node: int
    matmul_flops: float
    memory_bytes: int
    memory_bandwidth: float
    network_cards: int
    network_bandwidth: float
    links: tuple[tuple[float, ...], ...] | None
    shares_cores: bool
    quantities: Mapping[str, Curve]
    sources: tuple[str, ...]

    @property
    def num_devices(self) -> int:
        """Devices of all nodes together."""
        return self.nodes * self.devices_per_node

    @property
    def network_bandwidth_of_node(self) -> float:
        """Bytes per second and direction that leave a node, by the data sheet."""
        return self.network_cards * self.network_bandwidth

    def curve(self, name: str) -> Curve:
        """A quantity.

        Raises:
          KeyError: the file does not give it.
        """
        return self.quantities[name]

    def attention(self, head_dim: int) -> Curve:
        """The quantity `full_attention` of the head dim that is nearest."""
        dims = [int(name.partition("/")[2]) for name in self.quantities if name.startswith("full_attention/")]
        nearest = min(dims, key=lambda dim: (abs(math.log(dim / head_dim)), dim))
        return self.quantities[f"full_attention/{nearest}"]

    def replace(self, **curves: Curve) -> Cluster:
        """The same cluster with other curves; `full_attention` stands for all of its head dims."""
        merged = dict(self.quantities)
        for name, curve in curves.items():
            merged |= {known: curve for known in merged if known.split("/")[0] == name} or {name: curve}
        return dataclasses.replace(self, quantities=merged)

    def scaled(self, factors: Mapping[str, float]) -> Cluster:
        """The same cluster with quantities multiplied; `network` stands for the bandwidth of the cards."""
        merged = {
            known: curve.scaled(factors.get(known.split("/")[0], 1.0)) for known, curve in self.quantities.items()
        }
        cards = self.network_bandwidth * factors.get("network", 1.0)
        return dataclasses.replace(self, quantities=merged, network_bandwidth=cards)

    def moved(self, name: str, bound: str) -> Cluster:
        """The same cluster with one quantity at its `LOW` or `HIGH` bound."""
        merged = {
            known: curve.moved(bound) if known.split("/")[0] == name else curve
            for known, curve in self.quantities.items()
        }
        return dataclasses.replace(self, quantities=merged)

    def with_nodes(self, nodes: int) -> Cluster:
        """The same cluster with another number of nodes.

        Raises:
          ValueError: it is not an integer from 1 to `MOST_NODES`.
        """
        if isinstance(nodes, bool) or not isinstance(nodes, int) or nodes < 1:
            raise ValueError(f"a cluster needs at least one node, not {nodes!r}")
        if nodes > MOST_NODES:
            raise ValueError(f"a cluster of {nodes} nodes: the planner takes at most {MOST_NODES}")
        return dataclasses.replace(self, nodes=nodes)

    @classmethod
    def load(cls, name: str | os.PathLike[str], nodes: int = 1) -> Cluster:
        """A machine that comes with the planner, by its name, or one in a TOML file, by its path.

        Raises:
          ValueError: there is neither, or the file is not as it must be (the message names what), or `nodes` is not a
            integer from 1 to `MOST_NODES`.
        """
        path = pathlib.Path(name)
        if os.fspath(name) in known_devices():
            path = FOLDER / f"{os.fspath(name)}.toml"
        elif not path.is_file():
            raise ValueError(
                f"{os.fspath(name)!r} is neither a machine that is known ({', '.join(known_devices())}) nor a file"
            )
        try:
            raw = tomllib.loads(path.read_text(encoding="utf-8"))
            cluster = cls._read(path.stem, raw)
        except OSError as error:
            raise ValueError(f"{path}: cannot be read: {error.strerror}") from error
        except (ValueError, TypeError) as error:
            raise ValueError(f"{path}: {error}") from error
        return cluster.with_nodes(nodes)

    @classmethod
    def _read(cls, name: str, raw: Mapping[str, Any]) -> Cluster:
        if unknown := sorted(raw.keys() - {"device", "node", "quantity"}):
            raise ValueError(f"{', '.join(unknown)} is not known; known: device, node, quantity")
        device = _table(raw, "device", _DEVICE, {"shares_cores": bool})
        node = _table(raw, "node", _NODE, {"links": list})
        quantities = _read_quantities(raw.get("quantity", {}))
        links = _read_links(node.get("links"), node["devices"])
        for needed in sorted(_FROM_LINKS - quantities.keys()) if links is None and node["devices"] > 1 else ():
            raise ValueError(f"quantity.{needed} is missing: without node.links it must be given")
        return cls(
            name=name,
            device=device["name"],
            nodes=1,
            devices_per_node=node["devices"],
            matmul_flops=device["matmul_flops"],
            memory_bytes=device["memory_bytes"],
            memory_bandwidth=device["memory_bandwidth"],
            network_cards=node["network_cards"],
            network_bandwidth=node["network_bandwidth"],
            links=links,
            shares_cores=device.get("shares_cores", False),
            quantities=quantities,
            sources=(device["source"], node["source"]),
        )


def to_toml(cluster: Cluster) -> str:
    """A file from which `Cluster.load` reads the same machine, for one that was calibrated."""
    lines = ["[device]", f"name = {json.dumps(cluster.device)}", f"matmul_flops = {cluster.matmul_flops!r}"]
    lines += [f"memory_bytes = {cluster.memory_bytes}", f"memory_bandwidth = {cluster.memory_bandwidth!r}"]
    lines += ["shares_cores = true"] * cluster.shares_cores + [f"source = {json.dumps(cluster.sources[0])}", ""]
    lines += ["[node]", f"devices = {cluster.devices_per_node}", f"network_cards = {cluster.network_cards}"]
    lines += [f"network_bandwidth = {cluster.network_bandwidth!r}", f"source = {json.dumps(cluster.sources[1])}"]
    if cluster.links is not None:
        lines += ["links = [", *(f"  {list(row)}," for row in cluster.links), "]"]
    for known, curve in cluster.quantities.items():
        name, _, head_dim = known.partition("/")
        place, unit = QUANTITIES[name]
        for point in curve.points:
            lines += ["", f"[[quantity.{name}]]"] + ([f"head_dim = {head_dim}"] if head_dim else [])
            if place is not None:
                lines.append(f"{place} = {point.at or 1.0!r}")  # one point holds everywhere
            lines += [f"{unit} = {point.value!r}", f"low = {point.low!r}", f"high = {point.high!r}"]
            lines += [f"status = {json.dumps(point.status)}", f"source = {json.dumps(point.source)}"]
    return "\n".join(lines) + "\n"


def known_devices() -> tuple[str, ...]:
    """The names of the machines that come with the planner."""
    return tuple(sorted(path.stem for path in FOLDER.glob("*.toml")))


def _table(
    raw: Mapping[str, Any], name: str, needed: Mapping[str, type], optional: Mapping[str, type]
) -> dict[str, Any]:
    table = raw.get(name)
    if not isinstance(table, Mapping):
        raise ValueError(f"the table [{name}] is missing")
    if missing := sorted(needed.keys() - table.keys()):
        raise ValueError(f"{name}.{missing[0]} is missing")
    kinds = {**needed, **optional}
    if unknown := sorted(table.keys() - kinds.keys()):
        raise ValueError(f"{name}.{unknown[0]} is not known; known: {', '.join(sorted(kinds))}")
    values: dict[str, Any] = {}
    for key, value in table.items():
        kind: Any = kinds[key]
        accepted = (int, float) if kind is float else (kind,)
        if not isinstance(value, accepted) or isinstance(value, bool) != (kind is bool):
            raise ValueError(f"{name}.{key} must be of type {kind.__name__}, not {value!r}")
        if kind in (int, float) and not 0 < value < math.inf:
            raise ValueError(f"{name}.{key} must be positive, not {value!r}")
        values[key] = float(value) if kind is float else value
    return values


def _read_links(rows: list[Any] | None, devices: int) -> tuple[tuple[float, ...], ...] | None:
    if rows is None:
        return None
    if len(rows) != devices or any(not isinstance(row, list) or len(row) != devices for row in rows):
        raise ValueError(f"node.links must have {devices} rows of {devices} numbers, as many as node.devices")
    links = tuple(tuple(float(value) for value in row) for row in rows)
    if any(links[i][j] != links[j][i] or links[i][j] < 0 for i in range(devices) for j in range(devices)):
        raise ValueError("node.links must be symmetric and not negative")
    return links


def _read_quantities(raw: Any) -> dict[str, Curve]:
    if not isinstance(raw, Mapping):
        raise ValueError("quantity must hold tables, as in [[quantity.dense]]")
    if unknown := sorted(raw.keys() - QUANTITIES.keys()):
        raise ValueError(f"quantity.{unknown[0]} is not known; known: {', '.join(QUANTITIES)}")
    curves: dict[str, Curve] = {}
    for name, (place, unit) in QUANTITIES.items():
        rows = raw.get(name)
        if rows is None:
            if name not in _OPTIONAL:
                raise ValueError(f"quantity.{name} is missing: {MEANINGS[name]}")
            continue
        if not isinstance(rows, list) or not all(isinstance(row, Mapping) for row in rows):
            raise ValueError(f"quantity.{name} must be written as [[quantity.{name}]], once for each point")
        if name != "full_attention":
            curves[name] = read_curve(name, rows, place, unit)
            continue
        by_dim: dict[int, list[dict[str, Any]]] = {}
        for row in rows:
            if not isinstance(row.get("head_dim"), int) or row["head_dim"] < 1:
                raise ValueError("quantity.full_attention: every point needs a head_dim")
            by_dim.setdefault(row["head_dim"], []).append({k: v for k, v in row.items() if k != "head_dim"})
        for dim, of_dim in by_dim.items():
            curves[f"{name}/{dim}"] = read_curve(f"{name}/{dim}", of_dim, place, unit)
    for name, curve in curves.items():
        if name.split("/")[0] in _RATES and not all(point.low > 0 for point in curve.points):
            raise ValueError(f"{name}: a rate must be positive, and so must the least that it may be")
    return curves
