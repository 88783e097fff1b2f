"""What an answer hangs on: the quantities that it uses, how well they are known, and how far it moves with them."""

from __future__ import annotations

import dataclasses

from slope_jax.model.config import FULL, GptOssConfig
from slope_jax.planner.devices import MEANINGS, Cluster
from slope_jax.planner.evaluate import Prediction, predict
from slope_jax.planner.layout import EXPERT
from slope_jax.planner.quantity import ASSUMED, HIGH, LOW, Reading


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Assumption:
    """A quantity that a prediction uses.

    Attributes:
      name: of the quantity.
      meaning: what it is.
      reading: its value where the prediction uses it, with status and sources.
      low: the least that it may be there.
      high: the most that it may be there.
      ttft_low_s: TTFT with all of the quantity's points at their least.
      ttft_high_s: TTFT with all of them at their most.
    """

    name: str
    meaning: str
    reading: Reading
    low: float
    high: float
    ttft_low_s: float
    ttft_high_s: float

    def moves(self, ttft_s: float) -> float:
        """By how much of a TTFT the answer moves at the most."""
        return max(abs(self.ttft_low_s - ttft_s), abs(self.ttft_high_s - ttft_s)) / ttft_s


def assumptions(config: GptOssConfig, cluster: Cluster, prediction: Prediction) -> tuple[Assumption, ...]:
    """The quantities on which a prediction depends, those that move it most first."""
    layout, num_tokens = prediction.layout, prediction.num_tokens
    found = []
    for name, at in places(config, prediction, cluster.devices_per_node).items():
        low, high = (cluster.moved(name, bound) for bound in (LOW, HIGH))
        times = [
            predict(config, moved, layout, num_tokens, ring_pass=prediction.ring_pass or "auto").ttft_s
            for moved in (low, high)
        ]
        curves = [
            c.attention(config.head_dim) if name == "full_attention" else c.curve(name) for c in (cluster, low, high)
        ]
        found.append(
            Assumption(
                name=name,
                meaning=MEANINGS[name],
                reading=curves[0].reading(at),
                low=curves[1](at),
                high=curves[2](at),
                ttft_low_s=times[0],
                ttft_high_s=times[1],
            )
        )
    used = [a for a in found if a.moves(prediction.ttft_s) > 1e-4]
    return tuple(sorted(used, key=lambda a: -a.moves(prediction.ttft_s)))


def hangs_on(found: tuple[Assumption, ...], ttft_s: float, least: float = 0.02) -> tuple[Assumption, ...]:
    """Those that are assumed and move the answer by more than `least` of it."""
    return tuple(a for a in found if a.reading.status == ASSUMED and a.moves(ttft_s) > least)


def places(config: GptOssConfig, prediction: Prediction, devices_per_node: int) -> dict[str, float]:
    """Where on its curve each quantity is used: by a chunk of the mean length, at the end of the prompt."""
    layout = prediction.layout
    shape, chunk = layout.shape, prediction.num_tokens / prediction.chunks
    rows = chunk / layout.token_ranks
    experts = config.num_experts // (shape.ulysses if layout.split == EXPERT else 1)
    inside = min(shape.ulysses, devices_per_node)
    places = {
        "dense": rows,
        "experts": rows * config.experts_per_token / experts,
        "window_attention": float(config.sliding_window),
        "full_attention": float(prediction.num_tokens),
        "all_to_all": inside,
        "all_reduce": inside,
    }
    names = [
        "memory", "expert_overlap", "unpacking", "ring_exposed", "routing_imbalance", "permute",
        "between_nodes", "collective", "ring_step", "launch", "launches", "host", "engine",
    ]  # fmt: skip
    if FULL not in config.layer_types:
        del places["full_attention"]
    return places | dict.fromkeys(names, 1.0)
