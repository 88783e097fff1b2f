"""Fits a cluster's quantities to lines of the engine's benchmark, and says how well each operation is met.

    python -m slope_jax.launch.bench --model=mini --operations --meshes=1x1x1,2x2x2 --cpu_devices=8 \
        --prompt_tokens=512,2048,4096,8192,16384 > bench.jsonl

Operations that were measured alone become points of their curves. What is left (projections, memory, launches) is
fitted to whole prefills, the short ones; the longer ones are kept for a test. Lines during which the machine was not
steady are fitted to in neither way. The machine's peak varies while it is
measured, so every time is taken relative to the peak of its own line.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from slope_jax.mesh.axes import MeshShape
from slope_jax.model.config import GptOssConfig
from slope_jax.planner.devices import Cluster
from slope_jax.planner.evaluate import predict
from slope_jax.planner.fit import Fit, Sample, fit
from slope_jax.planner.layout import Layout
from slope_jax.planner.operations import OperationTimes
from slope_jax.planner.quantity import MEASURED, Curve, Point

Row = Mapping[str, Any]
_EXPERTS = {"bfloat16": "experts", "float32": "experts", "mxfp4": "experts_mxfp4"}
_ONE_DEVICE = {"compute": ("dense",), "memory": ("memory",), "overhead": ("launch", "host")}
_SEVERAL = {"sharing": ("sharing",), "exchanges": ("collective", "ring_step")}
_LIMITS = {
    "compute": (0.2, 1.6),
    "memory": (0.2, 1.6),
    "overhead": (0.05, 20.0),
    "exchanges": (0.05, 20.0),
    "sharing": (0.5, 3.0),
}
_SOURCE = "the engine's benchmark"
_STEPS = 60  # of a bisection


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OperationError:
    """How well a curve meets a point of its own.

    Attributes:
      operation: the quantity.
      at: where on the curve.
      value: what was measured.
      left_out: what the other points say there, over it, less one; None where there are no others.
    """

    operation: str
    at: float
    value: float
    left_out: float | None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """A calibrated cluster.

    Attributes:
      cluster: the cluster.
      operations: the points that were measured alone.
      prefills: how whole prefills are met, those that were fitted to and those that were not.
    """

    cluster: Cluster
    operations: tuple[OperationError, ...]
    prefills: Fit


def calibrate(config: GptOssConfig, cluster: Cluster, rows: Iterable[Row], *, fit_up_to: int = 4096) -> Calibration:
    """Calibrates a cluster.

    Args:
      config: the model that was measured.
      cluster: where to start; quantities about which the lines say nothing stay as they are.
      rows: the lines, all of one model on one machine; those of tensor parallelism are left out.
      fit_up_to: prefills of prompts up to this length are fitted to, longer ones only compared.

    Raises:
      ValueError: lines are missing or are of several models, or there are too few prefills to fit to.
    """
    rows = [row for row in rows if row.get("parallelism", "context") == "context"]
    prefills = [row for row in rows if row["kind"] == "prefill" and row["concurrency"] == 1]
    if not prefills:
        raise ValueError("there is no line of kind prefill with a single prompt at once")
    if len(models := {row["model"] for row in rows}) > 1:
        raise ValueError(f"the lines are of several models: {', '.join(sorted(models))}")
    weights = prefills[0]["expert_weights"]
    prefills = [row for row in prefills if row["expert_weights"] == weights]
    operations = [
        row
        for row in rows
        if row["kind"] == "operation" and row["expert_weights"] == weights and row.get("steady", True)
    ]
    peak = float(np.median([row["peak_tflop_per_s"] for row in (*prefills, *operations)])) * 1e12
    cluster = dataclasses.replace(cluster, matmul_flops=peak)
    curves = exchange_curves([row for row in operations if row["devices"] > 1], peak)
    curves |= measured_curves(config, cluster, [row for row in operations if row["devices"] == 1], weights)
    found = cluster.replace(**curves)
    alone = [_sample(config, row, peak, fit_up_to) for row in _in_order(prefills) if row["devices"] == 1]
    several = [_sample(config, row, peak, fit_up_to) for row in _in_order(prefills) if row["devices"] > 1]
    known = sum(sample.is_fitted for sample in alone)
    if not known:
        raise ValueError(f"there is no steady prefill on one device of at most {fit_up_to} tokens to fit to")
    found = fit(found, dict(list(_ONE_DEVICE.items())[:known]), alone, limits=_LIMITS).cluster
    if known := sum(sample.is_fitted for sample in several):
        found = fit(found, dict(list(_SEVERAL.items())[:known]), several, limits=_LIMITS).cluster
    return Calibration(
        cluster=found,
        operations=tuple(error for curve in curves.values() for error in _errors(curve)),
        prefills=fit(found, {}, [*alone, *several]),
    )


def measured_curves(
    config: GptOssConfig, cluster: Cluster, rows: Iterable[Row], expert_weights: str
) -> dict[str, Curve]:
    """The curves of attention and experts, from the lines of a single device."""
    points: dict[str, list[Point]] = {}

    def add(name: str, at: float | None, value: float) -> None:
        point = Point(at=at, value=value, low=value, high=value, status=MEASURED, source=_SOURCE)
        points.setdefault(name, []).append(point)

    for row in sorted(rows, key=lambda row: row.get("tokens", 0)):
        name, tokens = row["operation"], row.get("tokens", 0)
        if name == "full_attention":
            add(name, tokens, row["share_of_peak"])
        elif name == "window_attention":
            add(name, None, row["share_of_peak"])
        elif name == _EXPERTS[expert_weights]:
            seconds = row["seconds"] * row["peak_tflop_per_s"] * 1e12 / cluster.matmul_flops
            share = _expert_share(config, cluster, tokens, expert_weights, seconds)
            add("experts", tokens * config.experts_per_token / config.num_experts, share)
    return {
        (f"full_attention/{config.head_dim}" if name == "full_attention" else name): Curve(
            name=name, points=tuple(found[-1:] if found[-1].at is None else found)
        )
        for name, found in points.items()
    }


def exchange_curves(rows: Iterable[Row], peak: float) -> dict[str, Curve]:
    """The bandwidths and the time beside the bytes, from the exchanges of a mesh; empty without such lines.

    Devices that share the cores take turns, so one of them takes that part of the time that they take together.
    """
    kinds = {"all_to_all": "all_to_all", "ppermute": "permute", "psum": "all_reduce", "all_gather": "all_reduce"}
    found: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        seconds = row["seconds"] * row["peak_tflop_per_s"] * 1e12 / peak / row["devices"]
        sent = row["gbyte_per_s"] * 1e9 * row["seconds"]
        found.setdefault(kinds[row["operation"]], []).append((sent, seconds))
    if not found:
        return {}
    beside = min(seconds for times in found.values() for _, seconds in times)
    values = {"collective": beside}
    for kind, times in found.items():
        sent, seconds = max(times)
        if seconds > 2 * beside:  # otherwise the bytes do not show
            values[kind] = sent / (seconds - beside)
    return {
        name: Curve(name=name, points=(Point(at=None, value=v, low=v, high=v, status=MEASURED, source=_SOURCE),))
        for name, v in values.items()
    }


def _expert_share(config: GptOssConfig, cluster: Cluster, tokens: int, expert_weights: str, seconds: float) -> float:
    """The share of the peak with which the experts of one layer take so long."""
    layout = Layout(shape=MeshShape(), chunk_tokens=tokens, expert_weights=expert_weights)
    low, high = 1e-3, 1.0
    for _ in range(_STEPS):
        share = math.sqrt(low * high)
        point = Point(at=None, value=share, low=share, high=share, status=MEASURED, source=_SOURCE)
        moved = cluster.replace(experts=Curve(name="experts", points=(point,)))
        taken, _padding = OperationTimes(config, moved, layout).expert_layer(tokens, 1)
        low, high = (share, high) if taken > seconds else (low, share)
    return high


def _sample(config: GptOssConfig, row: Row, peak: float, fit_up_to: int) -> Sample:
    layout = Layout(
        shape=MeshShape(*(int(degree) for degree in row["mesh"].split("x"))),
        chunk_tokens=row["chunk_tokens"],
        expert_weights="mxfp4" if row["expert_weights"] == "mxfp4" else "bfloat16",
        dtype=row["dtype"],
    )
    return Sample(
        name=f"{row['mesh']}, {row['prompt_tokens']} tokens",
        seconds=row["ttft_median_s"] * row["peak_tflop_per_s"] * 1e12 / peak,
        predict=functools.partial(_ttft, config, layout, row["prompt_tokens"]),
        is_fitted=row["prompt_tokens"] <= fit_up_to and row.get("steady", True),
    )


def _ttft(config: GptOssConfig, layout: Layout, num_tokens: int, cluster: Cluster) -> float:
    return predict(config, cluster, layout, num_tokens).ttft_s


def _in_order(rows: Iterable[Row]) -> list[Row]:
    return sorted(rows, key=lambda row: (row["devices"], row["mesh"], row["prompt_tokens"]))


def _errors(curve: Curve) -> list[OperationError]:
    found = []
    for point in curve.points:
        others = tuple(p for p in curve.points if p is not point)
        said = dataclasses.replace(curve, points=others)(point.at or 1.0) if others else None
        found.append(
            OperationError(
                operation=curve.name,
                at=point.at or 0.0,
                value=point.value,
                left_out=None if said is None else said / point.value - 1,
            )
        )
    return found


class Correction:
    """A running factor, actual over expected TTFT, that a server keeps while it runs.

    It is the mean of the logarithms, in which an observation fades as others follow, so that one slow prompt moves it
    little and a slower machine is followed.

    Args:
      fading: weight of the newest observation.

    Raises:
      ValueError: `fading` is not between 0 and 1.
    """

    def __init__(self, fading: float = 0.1):
        if not 0 < fading < 1:
            raise ValueError(f"fading must be between 0 and 1, not {fading}")
        self._fading = fading
        self._mean = 0.0
        self._weight = 0.0

    @property
    def factor(self) -> float:
        """By which to multiply an expected TTFT; 1 before anything was observed."""
        return math.exp(self._mean / self._weight) if self._weight else 1.0

    def observe(self, expected_s: float, actual_s: float) -> None:
        """Takes note of a prompt.

        Raises:
          ValueError: a time is not positive.
        """
        if not (expected_s > 0 and actual_s > 0):
            raise ValueError(f"times must be positive, not {expected_s} expected and {actual_s} actual")
        self._mean += self._fading * (math.log(actual_s / expected_s) - self._mean)
        self._weight += self._fading * (1 - self._weight)
