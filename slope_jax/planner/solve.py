"""What would have to be true for a target that is out of reach: faster kernels, faster links, or more nodes."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence

from slope_jax.model.config import GptOssConfig
from slope_jax.planner.devices import Cluster
from slope_jax.planner.evaluate import Prediction, predict
from slope_jax.planner.layout import Layout
from slope_jax.planner.quantity import Curve
from slope_jax.planner.search import ALL, Answer, Choices, Refused, meshes, of_mesh

KERNELS: tuple[str, ...] = ("experts", "full_attention")
LINKS: tuple[str, ...] = ("all_to_all", "all_reduce", "permute", "network")
_MOST = 1024.0  # by which a quantity is multiplied at the most
_PRECISION = 1e-3
_MOST_NODES = 32
_MOST_STAGES = 4
_LAYOUTS = 6  # of how many of the best meshes the quantities are solved for
_PEAK = 1.0  # no share can be larger


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
    fastest = sorted(found.best, key=lambda p: p.ttft_s)[:_LAYOUTS]
    smallest = functools.partial(_smallest, config, cluster, fastest, target, found.choices.ring_pass)
    kernels, experts, attention = smallest(KERNELS), smallest(("experts",)), smallest(("full_attention",))
    links = smallest(LINKS)
    return (
        _requirement("attention and experts", kernels, cluster, config, KERNELS, found.num_tokens),
        _requirement("attention alone", attention, cluster, config, ("full_attention",), found.num_tokens),
        _requirement("experts alone", experts, cluster, config, ("experts",), found.num_tokens),
        _requirement("links and network", links, cluster, config, LINKS, found.num_tokens),
        nodes_needed(config, cluster, found.num_tokens, target, found.choices),
    )


def nodes_needed(
    config: GptOssConfig, cluster: Cluster, num_tokens: int, target_s: float, choices: Choices = ALL
) -> Requirement:
    """The smallest number of nodes with which one prompt meets a target: powers of two, and three times such.

    More nodes are taken to be never slower, so fewer are looked at only when those that there are do; and all devices
    are taken to work on the prompt in few stages, which is what makes one prompt fast.
    """

    def fastest(nodes: int) -> Layout | None:
        larger = cluster.with_nodes(nodes)
        for shape, split in meshes(larger.num_devices, choices.splits):
            if shape.num_devices < larger.num_devices or shape.pp > _MOST_STAGES:
                continue
            found = of_mesh(config, larger, shape, split, num_tokens, choices)
            if isinstance(found, Refused):
                continue
            best = min(found, key=lambda p: p.ttft_s)
            if best.ttft_s <= target_s:
                return best.layout
        return None

    counts = sorted({n for power in range(7) for n in (2**power, 3 * 2**power // 2) if 0 < n <= _MOST_NODES})
    more = [n for n in counts if n >= cluster.nodes]
    fewer = [n for n in reversed(counts) if n < cluster.nodes]
    nodes, layout = next(((n, found) for n in more if (found := fastest(n)) is not None), (0, None))
    if layout is None:
        return Requirement(change=f"nodes (up to {_MOST_NODES})", factor=None, layout=None, values={})
    for n in fewer if nodes == more[0] else ():
        found = fastest(n)
        if found is None:
            break
        nodes, layout = n, found
    return Requirement(change="nodes", factor=nodes / cluster.nodes, layout=layout, values={}, nodes=nodes)


def _smallest(
    config: GptOssConfig,
    cluster: Cluster,
    candidates: Sequence[Prediction],
    target_s: float,
    ring_pass: str,
    names: Sequence[str],
) -> tuple[float, Layout] | None:
    """The smallest factor for some quantities with which one of the candidates meets the target."""
    found: tuple[float, Layout] | None = None
    most = _largest_factor(config, cluster, names)
    for candidate in candidates:
        ttft = functools.partial(_ttft, config, cluster, candidate, ring_pass, names)
        factor = smallest_factor(ttft, target_s, most if found is None else found[0])
        if factor is not None and (found is None or factor < found[0] * (1 - _PRECISION)):
            found = factor, candidate.layout
    return found


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


def _largest_factor(config: GptOssConfig, cluster: Cluster, names: Sequence[str]) -> float:
    """The factor at which the largest share among some quantities is the whole peak; links have no such bound."""
    shares = [p.value for name in names if name in KERNELS for p in _curve(config, cluster, name).points]
    return _PEAK / max(shares) if shares else _MOST


def _curve(config: GptOssConfig, cluster: Cluster, name: str) -> Curve:
    return cluster.attention(config.head_dim) if name == "full_attention" else cluster.curve(name)


def _requirement(
    change: str,
    solved: tuple[float, Layout] | None,
    cluster: Cluster,
    config: GptOssConfig,
    names: Sequence[str],
    num_tokens: int,
) -> Requirement:
    if solved is None:
        return Requirement(change=change, factor=None, layout=None, values={})
    factor, layout = solved
    values = {}
    for name in names:
        if name == "network":
            values[name] = factor * cluster.network_bandwidth_of_node
        elif name == "full_attention":
            values[name] = factor * cluster.attention(config.head_dim)(num_tokens)
        elif name in cluster.quantities:
            place = layout.shape.ulysses if name.startswith("all_") else layout.chunk_tokens / layout.token_ranks
            values[name] = factor * cluster.curve(name)(place)
    return Requirement(change=change, factor=factor, layout=layout, values=values)
