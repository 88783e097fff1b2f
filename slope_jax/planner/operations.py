"""Seconds of each operation of each stage in each tick.

What there is to do comes from `model.cost`, the counts that the audit and the benchmark use, and `model.kernel_cost`;
how fast it is done comes from the cluster's quantities and from its fabric. A product takes as long as its operations
or its bytes in memory, whichever is longer. Every rank of a stage does the same, as the zigzag layout sees to.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slope_jax.execution.spec import DTYPES
from slope_jax.mesh import ring_policy
from slope_jax.mesh.axes import RING
from slope_jax.model.config import FULL, SLIDING, GptOssConfig
from slope_jax.model.counts import cost, kernel_cost
from slope_jax.model.counts.cost import Collective
from slope_jax.model.parallel.expert_parallel import ExchangeShape
from slope_jax.planner.devices import Cluster
from slope_jax.planner.fabric import Fabric
from slope_jax.planner.layout import EXPERT, Layout, stages_of
from slope_jax.planner.schedule import Schedule

Seconds = NDArray[np.float64]

# Work of a device, by operation.
COMPUTE = ("projections", "router", "experts", "full_attention", "window_attention", "elementwise", "unembedding")
# Exchanges, as far as a device waits for them.
EXCHANGES = ("all_to_all", "all_reduce", "ring", "halo", "expert_all_to_all", "hand_off", "other_exchanges")
OVERHEADS = ("launches", "host")
PARTS = (*COMPUTE, *EXCHANGES, *OVERHEADS)

_OF_RANKS_WITH_TOKENS = ("projections", "experts", "full_attention", "window_attention")
_SCOPES = {
    "project_in": "all_to_all",
    "project_out": "all_to_all",
    "window_attention": "halo",
    "experts": "expert_all_to_all",
    "hand_off": "hand_off",
    "pass_kv": "ring",
    "pass_q": "ring",
}
_SUMS = ("sum of attention", "sum of experts")  # of tensor parallelism
_TILES = (16, 128)  # least and most rows of a tile of the experts' products


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Times:
    """Seconds by part of `PARTS`, `[stages, ticks]`.

    Attributes:
      parts: what a stage takes, idle ones included as far as they do something.
      busy: whether a stage has a chunk.
      ring_hidden: transfers of the ring that take place beside attention.
      padding: what of the parts goes into rows that are no tokens, and into empty slots.
      stages_add_up: whether the stages take turns, as on virtual devices that share cores.
    """

    parts: dict[str, Seconds]
    busy: NDArray[np.bool_]
    ring_hidden: Seconds
    padding: Seconds
    stages_add_up: bool

    def ticks(self) -> Seconds:
        """How long each tick lasts: as long as its slowest stage."""
        stages = np.sum(list(self.parts.values()), axis=0)
        return stages.sum(axis=0) if self.stages_add_up else stages.max(axis=0)

    def of_prompt(self, values: Seconds) -> float:
        """Of what the stages do for chunks, the sum over the stages' mean (or over all, where they add up)."""
        over = 1 if self.stages_add_up else values.shape[0]
        return float(values[self.busy].sum() / over)


class OperationTimes:
    """The times of a model's operations on a cluster, for any schedule.

    Args:
      config: the model.
      cluster: the machine.
      layout: how the model is run.
    """

    def __init__(self, config: GptOssConfig, cluster: Cluster, layout: Layout):
        self._config, self._cluster, self._layout = config, cluster, layout
        self._plan = stages_of(config.layer_types, layout.shape.pp)
        self._dtype = DTYPES[layout.dtype]
        self._fabric = Fabric(cluster, layout.shape)
        self._one, self._window = (dataclasses.replace(config, layer_types=(kind,)) for kind in (FULL, SLIDING))
        mine = layout.tensor_split.share(self._one)  # the model that a rank of tensor parallelism is
        self._token = cost.chunk_operations(mine, 0, 1, is_last=True)  # of one token in one layer
        self._weights = cost.checkpoint_bytes(mine, packed=layout.expert_weights == "mxfp4")
        self._unpacked = cost.checkpoint_bytes(mine, packed=False).experts
        self._elementwise = kernel_cost.elementwise_bytes(mine, self._dtype)
        self._bytes_per_s = cluster.memory_bandwidth * cluster.curve("memory")()
        kinds = [[config.layer_types[i] for i in stage if i is not None] for stage in self._plan.layers]
        self._full = np.array([k.count(FULL) for k in kinds], np.float64)[:, None]
        self._sliding = np.array([k.count(SLIDING) for k in kinds], np.float64)[:, None]

    def __call__(self, schedule: Schedule) -> Times:
        """The times of a schedule."""
        inside, chunks = schedule.inside, schedule.chunks
        busy = inside >= 0
        layers = self._full + self._sliding
        slots = float(len(self._plan.pattern))
        parts = {name: np.zeros(inside.shape) for name in PARTS}

        dense = {b: self._dense_layer(b) for b in dict.fromkeys(schedule.bucket.tolist())}
        by_tick = np.array([dense[b] for b in schedule.bucket.tolist()]).T  # [3, ticks]
        parts["projections"] += np.where(busy, layers, 0) * by_tick[0]  # idle stages and empty slots compute none
        parts["router"] += slots * by_tick[1]
        parts["elementwise"] += slots * by_tick[2]
        parts["unembedding"] += self._unembedding()

        work = np.array(
            [
                [*self.expert_layer(n, a), *self.attention_layer(s, n, a)]
                for s, n, a in zip(chunks.start.tolist(), chunks.length.tolist(), chunks.active.tolist(), strict=True)
            ]
        ).T  # [4, chunks]
        per_layer = np.where(busy, work[:, inside], 0.0)
        experts, expert_padding, full, window = per_layer
        parts["experts"] += layers * experts
        parts["full_attention"] += self._full * full
        parts["window_attention"] += self._sliding * window

        ring_hidden = np.zeros(inside.shape)
        self._add_exchanges(schedule, full, parts, ring_hidden)
        parts["launches"] += slots * self._quantity("launches") * self._quantity("launch")
        parts["host"] += self._quantity("host")

        tokens = np.where(busy, chunks.length[inside], 0)
        filled = tokens / schedule.bucket
        padding = parts["projections"] * (1 - filled) + layers * expert_padding
        padding += (parts["router"] + parts["elementwise"]) * (1 - filled * layers / slots)
        if self._cluster.shares_cores:
            parts = self._on_shared_cores(parts, np.where(busy, chunks.active[inside], 0))
            ring = self._layout.shape.ring * self._layout.shape.ulysses
            padding, ring_hidden = padding * ring, ring_hidden * ring
        factor = self._quantity("engine")
        return Times(
            parts={name: factor * seconds for name, seconds in parts.items()},
            busy=busy,
            ring_hidden=ring_hidden,
            padding=factor * padding,
            stages_add_up=self._cluster.shares_cores,
        )

    def _quantity(self, name: str, at: float = 1.0) -> float:
        return self._cluster.curve(name)(at)

    def _product(self, operations: float, share: float, num_bytes: float) -> float:
        """Seconds of a matrix product."""
        return max(operations / (self._cluster.matmul_flops * share), num_bytes / self._bytes_per_s)

    def _dense_layer(self, bucket: int) -> tuple[float, float, float]:
        """Projections, router, and elementwise operations of one layer with the rows of a bucket, on a device."""
        rows = bucket / self._layout.token_ranks
        share = self._quantity("dense", rows)
        token, weights, bytes_ = self._token, self._weights, self._elementwise
        return (
            self._product(token.projections * rows, share, weights.attention),
            self._product(token.router * rows, share, weights.router),
            rows * bytes_.total / self._bytes_per_s,
        )

    def _unembedding(self) -> float:
        """Logits of one token, which every tick computes on all devices together."""
        devices = self._layout.shape.num_devices
        return self._product(
            self._token.unembedding / devices, self._quantity("dense", 1.0), self._weights.unembedding / devices
        )

    def expert_layer(self, length: int, active: int) -> tuple[float, float]:
        """Experts of one layer on a device, for `length` tokens on `active` ring ranks; and their padding."""
        c, layout = self._config, self._layout
        parted = layout.shape.ulysses if layout.split == EXPERT else 1  # ranks that the experts are split over
        across = active * (layout.token_ranks // layout.shape.ring)
        pairs = c.experts_per_token * length / across
        if layout.split == EXPERT:
            pairs *= self._quantity("routing_imbalance")
        experts = c.num_experts // parted
        per_expert = pairs / experts
        tile = int(min(max(1 << int(np.log2(max(per_expert, 1))), _TILES[0]), _TILES[1]))
        rows = kernel_cost.grouped_rows(pairs, experts, tile)
        # A dense model is one expert, whose product is like any other.
        share = self._quantity("experts", per_expert) if c.num_experts > 1 else self._quantity("dense", pairs)
        operations = self._token.experts / c.experts_per_token  # of a pair
        compute = rows * operations / (self._cluster.matmul_flops * share)
        used = kernel_cost.used_experts(pairs, experts)
        stream = used * self._weights.experts / c.num_experts / self._bytes_per_s
        seconds = max(compute, stream) + self._quantity("expert_overlap") * min(compute, stream)
        if layout.expert_weights == "mxfp4":
            seconds += self._quantity("unpacking") * used * self._unpacked / c.num_experts / self._bytes_per_s
        return seconds, compute * (1 - pairs / rows) if compute > stream else 0.0

    def attention_layer(self, start: int, length: int, active: int) -> tuple[float, float]:
        """Full attention and window attention of one layer on a device."""
        rate = self._cluster.matmul_flops * active * self._layout.shape.ulysses
        full, sliding = (cost.chunk_operations(one, start, length, is_last=False) for one in (self._one, self._window))
        share = self._cluster.attention(self._config.head_dim)(2 * start + length)
        return (
            full.full_attention / (rate * share),
            sliding.window_attention / (rate * self._quantity("window_attention", self._config.sliding_window)),
        )

    def _collectives(self, bucket: int, ring_block: int, ring_pass: str) -> list[tuple[str, Collective, float]]:
        """The exchanges of a tick with one round of the ring: the part that each belongs to, and its seconds a time."""
        layout, shape = self._layout, self._layout.shape
        traffic = cost.tick_traffic(
            self._config,
            self._plan,
            shape,
            self._dtype,
            bucket=bucket,
            ring_block=ring_block,
            rounds=1,
            ring_pass=ring_pass,
            expert_parallel=layout.split == EXPERT,
            split=layout.tensor_split,
        )
        rounds = self._expert_rounds(bucket) if layout.split == EXPERT else 1.0
        found = []
        for collective in traffic.collectives:
            name, operation = _SCOPES.get(collective.scope, "other_exchanges"), collective.operation
            if collective.purpose in _SUMS:
                # Both steps together move the bytes of the all-reduce of which the rate is known.
                name, operation = "all_reduce", "psum"
            exchange = self._fabric.exchange(operation, collective.axes)
            is_repeated = name == "expert_all_to_all" and operation == "all_to_all"
            seconds = exchange.time(collective.sent_bytes)
            found.append((name, collective, rounds * seconds if is_repeated else seconds))
        return found

    def _expert_rounds(self, bucket: int) -> float:
        """How often the exchange of expert parallelism goes on in a layer, on the average."""
        shape = self._layout.shape
        exchange = ExchangeShape.of(self._config, bucket // self._layout.token_ranks, shape.ulysses, self._dtype)
        return exchange.mean_rounds(shape.num_devices, self._quantity("routing_imbalance"))

    def _add_exchanges(
        self, schedule: Schedule, attention: Seconds, parts: dict[str, Seconds], ring_hidden: Seconds
    ) -> None:
        """Adds what the stages wait for exchanges; `attention` is that of one full layer, `[stages, ticks]`."""
        ring = self._layout.shape.ring
        slots = float(self._plan.pattern.count(FULL))
        settings = list(
            zip(schedule.bucket.tolist(), schedule.ring_block.tolist(), schedule.rounds.tolist(), strict=True)
        )
        for bucket, block, queries in dict.fromkeys((b, k, r == 0) for b, k, r in settings):
            here = np.array([(b, k, r == 0) == (bucket, block, queries) for b, k, r in settings])
            ring_pass = ring_policy.Q if queries else ring_policy.KV
            hop = result = 0.0
            for name, collective, seconds in self._collectives(bucket, block, ring_pass):
                if name != "ring":
                    parts[name][:, here] += collective.count * seconds
                elif collective.purpose in ("ring, weighted values", "ring, maxima and sums"):
                    result += seconds * collective.count / slots / (ring - 1)
                else:
                    hop += seconds
            if ring == 1 or not slots:
                continue
            rounds = np.where(queries, 1, schedule.rounds[here])
            step = attention[:, here] / (rounds * ring)
            hops = slots * rounds * (ring - 1)
            exposed = np.maximum(hop - step, 0) + self._quantity("ring_exposed") * np.minimum(hop, step)
            parts["ring"][:, here] += hops * (exposed + result + self._quantity("ring_step"))
            ring_hidden[:, here] += hops * (hop - exposed)

    def _on_shared_cores(self, parts: dict[str, Seconds], active: NDArray[np.int64]) -> dict[str, Seconds]:
        """The same where all devices of a stage take turns on the same cores."""
        shape = self._layout.shape
        scale: dict[str, Any] = dict.fromkeys(parts, shape.ring * shape.ulysses)
        scale |= dict.fromkeys(_OF_RANKS_WITH_TOKENS, active * shape.ulysses)
        scale["host"] = 1 / shape.pp  # which is the same for all stages
        shared = shape.num_devices > 1 and "sharing" in self._cluster.quantities
        factor = self._quantity("sharing") if shared else 1.0
        return {name: factor * seconds * scale[name] for name, seconds in parts.items()}


def ring_machine(config: GptOssConfig, cluster: Cluster, layout: Layout, num_tokens: int) -> ring_policy.Machine:
    """What the engine has to know of the devices to choose what goes round the ring (`Engine.load(machine=...)`)."""
    share = cluster.attention(config.head_dim)(num_tokens)
    bandwidth = (
        Fabric(cluster, layout.shape).exchange("ppermute", (RING,)).bytes_per_s if layout.shape.ring > 1 else 1.0
    )
    return ring_policy.Machine(attention_flops=cluster.matmul_flops * share, link_bandwidth=bandwidth)
