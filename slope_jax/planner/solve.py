"""What would have to be true for a target that is out of reach: faster kernels, faster links, or more nodes."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence

from slope_jax.mesh.axes import MeshShape
from slope_jax.model.config import GptOssConfig
from slope_jax.planner.assumptions import places
from slope_jax.planner.devices import Cluster
from slope_jax.planner.evaluate import Prediction, predict
from slope_jax.planner.layout import Layout
from slope_jax.planner.search import ALL, Answer, Choices, Refused, meshes, of_mesh

KERNELS: tuple[str, ...] = ("experts", "full_attention")
LINKS: tuple[str, ...] = ("all_to_all", "all_reduce", "permute", "network")
_MOST = 1024.0  # by which a quantity is multiplied at the most
_PRECISION = 1e-3
_MOST_NODES = 32
_LAYOUTS = 6  # of how many of the best meshes the quantities are solved for at a time
_NEAR = 4.0  # meshes that are this many times slower than the best are not looked at again
_SEARCHES = 4
_PEAK = 1.0  # no share can be larger

Solved = tuple[float, Prediction]  # a factor, and the configuration that needs it


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Requirement:
    """What one change has to be for a target to be met, everything else as it is.

    Attributes:
      change: what changes.
      factor: by which it is multiplied; None when no factor is enough.
      layout: the configuration that needs the smallest one.
      values: the quantities after the change, by name, at the places where the configuration uses them.
      nodes: the number of nodes, when it is that that changes.
    """

    change: str
    factor: float | None
    layout: Layout | None
    values: Mapping[str, float]
    nodes: int | None = None


def requirements(config: GptOssConfig, cluster: Cluster, found: Answer) -> tuple[Requirement, ...]:
    """The smallest change of each kind with which one prompt alone meets the target of an answer.

    A factor below one says how much slower it may become.

    Raises:
      ValueError: the answer has no target.
    """
    target = found.target_s
    if target is None:
        raise ValueError("there is no target to solve for: give --ttft_slo")
    changes = {
        "attention and experts": KERNELS,
        "attention alone": ("full_attention",),
        "experts alone": ("experts",),
        "links and network": LINKS,
    }
    solved = [
        _requirement(change, _smallest(config, cluster, found, target, names), cluster, config, names)
        for change, names in changes.items()
    ]
    return *solved, nodes_needed(config, cluster, found.num_tokens, target, found.choices)


def nodes_needed(
    config: GptOssConfig, cluster: Cluster, num_tokens: int, target_s: float, choices: Choices = ALL
) -> Requirement:
    """The smallest number of nodes with which one prompt meets a target: powers of two, and three times such.

    All devices are taken to work on the prompt, which is what makes one prompt fast.
    """
    for nodes in sorted({n for power in range(7) for n in (2**power, 3 * 2**power // 2) if n <= _MOST_NODES}):
        larger = cluster.with_nodes(nodes)
        whole = [m for m in meshes(larger.num_devices, choices.splits) if m[0].num_devices == larger.num_devices]
        fastest = _fastest(config, larger, whole, num_tokens, choices)
        if fastest and fastest[0].ttft_s <= target_s:
            layout = fastest[0].layout
            return Requirement(change="nodes", factor=nodes / cluster.nodes, layout=layout, values={}, nodes=nodes)
    return Requirement(change=f"nodes (up to {_MOST_NODES})", factor=None, layout=None, values={})


def _fastest(
    config: GptOssConfig,
    cluster: Cluster,
    tried: Iterable[tuple[MeshShape, str]],
    num_tokens: int,
    choices: Choices,
) -> list[Prediction]:
    """The fastest way of each mesh that can be used, the fastest of all first."""
    found = [of_mesh(config, cluster, shape, split, num_tokens, choices) for shape, split in tried]
    best = [min(ways, key=lambda p: p.ttft_s) for ways in found if not isinstance(ways, Refused)]
    return sorted(best, key=lambda p: p.ttft_s)


def _smallest(
    config: GptOssConfig, cluster: Cluster, found: Answer, target_s: float, names: Sequence[str]
) -> Solved | None:
    """The smallest factor for some quantities with which a configuration meets the target, and that configuration.

    Which configuration is the best changes with the factor. So the meshes are searched again with the factor that is
    enough for those that were the best before, until none of them needs less.
    """
    first = sorted(found.best, key=lambda p: p.ttft_s)
    near = [(p.layout.shape, p.layout.split) for p in first if p.ttft_s <= _NEAR * first[0].ttft_s]

    def search(factor: float) -> list[Prediction]:
        moved = cluster.scaled(dict.fromkeys(names, factor))
        return _fastest(config, moved, near, found.num_tokens, found.choices)

    def solve(candidates: Sequence[Prediction], known: Solved | None) -> Solved | None:
        for candidate in candidates[:_LAYOUTS]:
            ttft = functools.partial(_ttft, config, cluster, candidate, found.choices.ring_pass, names)
            most = _largest_factor(config, cluster, candidate, names)
            factor = smallest_factor(ttft, target_s, most if known is None else min(most, known[0]))
            if factor is not None and (known is None or factor < known[0] * (1 - _PRECISION)):
                known = factor, candidate
        return known

    best = solve(first, None) or solve(search(_largest_factor(config, cluster, first[0], names)), None)
    for _ in range(_SEARCHES):
        better = solve(search(best[0]), best) if best else None
        if better == best:
            break
        best = better
    return best


def _ttft(
    config: GptOssConfig, cluster: Cluster, candidate: Prediction, ring_pass: str, names: Sequence[str], factor: float
) -> float:
    moved = cluster.scaled(dict.fromkeys(names, factor))
    return predict(config, moved, candidate.layout, candidate.num_tokens, ring_pass=ring_pass).ttft_s


def smallest_factor(ttft: Callable[[float], float], target_s: float, most: float = _MOST) -> float | None:
    """The smallest factor up to `most` for which a falling function meets a target, to a part in a thousand."""
    if ttft(most) > target_s:
        return None
    low, high = 1 / _MOST, most
    if ttft(low) <= target_s:
        return low
    while high / low > 1 + _PRECISION:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if ttft(middle) <= target_s else (middle, high)
    return high


def _largest_factor(config: GptOssConfig, cluster: Cluster, candidate: Prediction, names: Sequence[str]) -> float:
    """The factor at which a share is the whole peak where a configuration uses it; links have no such bound."""
    shares = [_value(config, cluster, candidate, name) for name in names if name in KERNELS]
    return _PEAK / max(shares) if shares else _MOST


def _value(config: GptOssConfig, cluster: Cluster, candidate: Prediction, name: str) -> float:
    """A quantity where a configuration uses it."""
    if name == "network":
        return cluster.network_bandwidth_of_node
    curve = cluster.attention(config.head_dim) if name == "full_attention" else cluster.curve(name)
    return curve(places(config, candidate, cluster.devices_per_node).get(name, 1.0))


def _requirement(
    change: str,
    solved: Solved | None,
    cluster: Cluster,
    config: GptOssConfig,
    names: Sequence[str],
) -> Requirement:
    if solved is None:
        return Requirement(change=change, factor=None, layout=None, values={})
    factor, candidate = solved
    known = [name for name in names if name == "network" or name in cluster.quantities or name in KERNELS]
    values = {name: factor * _value(config, cluster, candidate, name) for name in known}
    return Requirement(change=change, factor=factor, layout=candidate.layout, values=values)
