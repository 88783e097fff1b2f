"""What a layout promises: time to first token, rate, concurrency within a target, and where the time goes."""

from __future__ import annotations

import dataclasses
import math

from slope_jax.mesh import ring_policy
from slope_jax.model.config import GptOssConfig
from slope_jax.planner.devices import Cluster
from slope_jax.planner.layout import Layout, Memory, memory
from slope_jax.planner.operations import PARTS, OperationTimes, Times, ring_machine
from slope_jax.planner.schedule import Schedule, scheduler


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What is predicted of prompts of one length.

    Attributes:
      layout: how the model is run, in each replica.
      replicas: copies of the model, each with prompts of its own.
      num_tokens: tokens of a prompt.
      ttft_s: time to first token of a prompt that is alone.
      requests_per_s: of all replicas, when there is always a prompt waiting.
      parts: seconds of `ttft_s` by the parts of `operations.PARTS`, the mean of the stages.
      bubble_s: seconds of `ttft_s` in which the mean stage waits for others.
      padding_s: seconds within `parts` that go into padding and empty slots.
      ring_hidden_s: transfers of the ring that cost nothing, beside `parts`.
      chunks: chunks of a prompt.
      ticks: of a prompt that is alone.
      ring_pass: what goes round the ring, "kv" or "q"; "" without a ring.
      memory: of a device, with as many prompts under way as the pipeline needs.
    """

    layout: Layout
    replicas: int
    num_tokens: int
    ttft_s: float
    requests_per_s: float
    parts: dict[str, float]
    bubble_s: float
    padding_s: float
    ring_hidden_s: float
    chunks: int
    ticks: int
    ring_pass: str
    memory: Memory

    def rate_at(self, concurrency: int) -> float:
        """Requests per second when so many prompts are always under way, spread evenly over the replicas."""
        fewest, more = divmod(concurrency, self.replicas)
        most = self.requests_per_s / self.replicas
        of_replica = [min(n / self.ttft_s, most) for n in (fewest, fewest + 1)]
        return (self.replicas - more) * of_replica[0] + more * of_replica[1]

    def ttft_at(self, concurrency: int) -> float:
        """The mean TTFT when so many prompts are always under way, by Little's law."""
        return concurrency / self.rate_at(concurrency)

    def concurrency_within(self, target_s: float) -> int:
        """The most prompts that can always be under way with a TTFT of at most `target_s`; 0 if one alone takes longer.

        By Little's law, and as far as the memory holds their KV.
        """
        if self.ttft_s > target_s:
            return 0
        by_rate = math.floor(target_s * self.requests_per_s / self.replicas * (1 + 1e-9))
        return self.replicas * max(1, min(by_rate, self.memory.prompts))

    @property
    def limit(self) -> str:
        """The largest share of the time, in words."""
        shares = self.parts | {"bubble": self.bubble_s}
        name = max(shares, key=lambda key: shares[key])
        return f"{name.replace('_', ' ')} {shares[name] / self.ttft_s:.0%}"


def predict(
    config: GptOssConfig,
    cluster: Cluster,
    layout: Layout,
    num_tokens: int,
    *,
    replicas: int = 1,
    ring_pass: str = ring_policy.AUTO,
) -> Prediction:
    """Predicts what a layout that fits does with prompts of `num_tokens` tokens (see `layout.refusal`)."""
    machine = ring_machine(config, cluster, layout, num_tokens) if ring_pass == ring_policy.AUTO else None
    ticks = scheduler(config, layout.shape, layout.dtype, layout.chunk_tokens, num_tokens, ring_pass, machine)
    operations = OperationTimes(config, cluster, layout)
    alone = ticks.alone
    times = operations(alone)
    period = float(operations(ticks.steady).ticks().sum()) if layout.shape.pp > 1 else float(times.ticks().sum())
    found = describe(times, alone)
    # The next prompt enters while the one before drains, if there is room for both.
    prompts = 1 if layout.shape.pp == 1 else math.ceil(found.ttft_s / period)
    needed = memory(config, layout, cluster, num_tokens, prompts)
    if needed.prompts < prompts:
        prompts = max(needed.prompts, 1)
        period = max(period, found.ttft_s / prompts)
        needed = memory(config, layout, cluster, num_tokens, prompts)
    return Prediction(
        layout=layout,
        replicas=replicas,
        num_tokens=num_tokens,
        ttft_s=found.ttft_s,
        requests_per_s=(1 if cluster.shares_cores else replicas) / period,  # replicas that share cores take turns
        parts=found.parts,
        bubble_s=found.bubble_s,
        padding_s=found.padding_s,
        ring_hidden_s=found.ring_hidden_s,
        chunks=len(alone.chunks.length),
        ticks=alone.inside.shape[1],
        ring_pass=alone.ring_pass if layout.shape.ring > 1 else "",
        memory=needed,
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """A time to first token and what it is made of; see `Prediction`."""

    ttft_s: float
    parts: dict[str, float]
    bubble_s: float
    padding_s: float
    ring_hidden_s: float


def describe(times: Times, schedule: Schedule) -> Split:
    """Adds up the ticks of a prompt that is alone."""
    ttft = float(times.ticks().sum())
    parts = {name: times.of_prompt(times.parts[name]) for name in PARTS}
    return Split(
        ttft_s=ttft,
        parts=parts,
        bubble_s=max(ttft - sum(parts.values()), 0.0),
        padding_s=times.of_prompt(times.padding),
        ring_hidden_s=times.of_prompt(times.ring_hidden),
    )
