"""Fits a cluster's quantities to lines of the engine's benchmark, and says how well each operation is met.

Operations that were measured alone become points of their curves. What is left (projections, memory, launches) is
fitted to whole prefills, the short ones; the longer ones are kept for a test. Lines during which the machine was not
steady are fitted to in neither way. The machine's peak varies while it is
measured, so every time is taken relative to the peak of its own line.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from slope_jax.mesh.axes import MeshShape
from slope_jax.model.config import GptOssConfig
from slope_jax.planner.devices import Cluster
from slope_jax.planner.evaluate import predict
from slope_jax.planner.fit import Fit, Sample, fit
from slope_jax.planner.layout import EXPERT, SEQUENCE, Layout
from slope_jax.planner.operations import OperationTimes
from slope_jax.planner.quantity import MEASURED, Curve, Point

Row = Mapping[str, Any]
_ONE_DEVICE = {"compute": ("dense",), "memory": ("memory",), "overhead": ("launch", "host")}
_SEVERAL = {"sharing": ("sharing",), "exchanges": ("collective", "ring_step")}
_LIMITS = {
    "compute": (0.2, 1.6),
    "memory": (0.2, 1.6),
    "overhead": (0.05, 20.0),
    "exchanges": (0.05, 20.0),
    "sharing": (0.5, 3.0),
}
_SOLVED = {"experts": (1e-3, 1.0), "unpacking": (1e-3, 1e3)}  # where to look for the quantities of experts
_SOURCE = "the engine's benchmark"
_NUMBERS = {"seconds", "ttft_median_s", "peak_tflop_per_s", "prompt_tokens", "chunk_tokens", "devices"}
_OF_SOME = {"share_of_peak", "gbyte_per_s", "tokens"}  # numbers that are 0 or None for operations that do not have them
_STEPS = 60  # of a bisection
_ROUNDS = 4


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
    rows = [row for row in map(_checked, rows) if row.get("parallelism", "context") == "context"]
    prefills = [row for row in rows if row["kind"] == "prefill" and row["concurrency"] == 1]
    if not prefills:
        raise ValueError("there is no line of kind prefill with a single prompt at once")
    if len(models := {row["model"] for row in rows}) > 1:
        raise ValueError(f"the lines are of several models: {', '.join(sorted(models))}")
    operations = [row for row in rows if row["kind"] == "operation" and row.get("steady", True)]
    peak = float(np.median([row["peak_tflop_per_s"] for row in (*prefills, *operations)])) * 1e12
    cluster = dataclasses.replace(cluster, matmul_flops=peak)
    alone = _samples(config, [row for row in prefills if row["devices"] == 1], peak, fit_up_to)
    several = _samples(config, [row for row in prefills if row["devices"] > 1], peak, fit_up_to)
    known = sum(sample.is_fitted for sample in alone)
    if not known:
        raise ValueError(f"there is no steady prefill on one device of at most {fit_up_to} tokens to fit to")
    exchanges = exchange_curves([row for row in operations if row["devices"] > 1], peak)
    found, curves, left_out = cluster.replace(**exchanges), exchanges, dict[str, float]()
    groups = dict(list(_ONE_DEVICE.items())[:known])
    for round_ in range(_ROUNDS):  # the share of the experts follows from their time only once the bandwidth is known
        curves = exchanges | measured_curves(config, found, [row for row in operations if row["devices"] == 1])
        is_last = round_ == _ROUNDS - 1
        of_one = fit(cluster.replace(**curves), groups, alone, limits=_LIMITS, leave_out=is_last)
        found, left_out = of_one.cluster, of_one.left_out
    if known := sum(sample.is_fitted for sample in several):
        groups = dict(list(_SEVERAL.items())[:known])
        together = fit(found, groups, several, limits=_LIMITS, leave_out=True)
        found, left_out = together.cluster, left_out | together.left_out
    return Calibration(
        cluster=found,
        operations=tuple(error for curve in curves.values() for error in _errors(curve)),
        prefills=dataclasses.replace(fit(found, {}, [*alone, *several]), left_out=left_out),
    )


def measured_curves(config: GptOssConfig, cluster: Cluster, rows: Iterable[Row]) -> dict[str, Curve]:
    """The curves of attention and experts, from the lines of a single device."""
    points: dict[str, dict[float | None, list[float]]] = {}

    def add(name: str, at: float | None, value: float) -> None:
        points.setdefault(name, {}).setdefault(at, []).append(value)

    packed = []
    for row in sorted(rows, key=lambda row: row.get("tokens", 0)):
        name, tokens = row["operation"], row.get("tokens", 0)
        seconds = _at_peak(row, "seconds", cluster.matmul_flops)
        if name == "full_attention":
            add(f"full_attention/{config.head_dim}", tokens, row["share_of_peak"])
        elif name == "window_attention":
            add(name, config.sliding_window, row["share_of_peak"])
        elif name == "experts":
            share = _solved(config, cluster, tokens, "bfloat16", name, seconds)
            add(name, tokens * config.experts_per_token / config.num_experts, share)
        elif name == "experts_mxfp4":
            packed.append((tokens, seconds))
    curves = {name: _curve(name, of_places) for name, of_places in points.items()}
    if packed and "experts" in curves:  # what they take longer than unpacked ones is the unpacking
        with_experts = cluster.replace(experts=curves["experts"])
        passes = [_solved(config, with_experts, n, "mxfp4", "unpacking", seconds) for n, seconds in packed]
        curves["unpacking"] = _curve("unpacking", {None: passes})
    return curves


def exchange_curves(rows: Iterable[Row], peak: float) -> dict[str, Curve]:
    """The bandwidths and the time beside the bytes, from the exchanges of a mesh; empty without such lines.

    Devices that share the cores take turns, so one of them takes that part of the time that they take together.
    """
    kinds = {"all_to_all": "all_to_all", "ppermute": "permute", "psum": "all_reduce", "all_gather": "all_reduce"}
    found: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        seconds = _at_peak(row, "seconds", peak) / row["devices"]
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
    return {name: _curve(name, {None: [value]}) for name, value in values.items()}


def _curve(name: str, values: Mapping[float | None, Sequence[float]]) -> Curve:
    """A curve through the median of the values at each place."""
    return Curve(
        name=name,
        points=tuple(
            Point(at=at, value=float(np.median(v)), low=min(v), high=max(v), status=MEASURED, source=_SOURCE)
            for at, v in values.items()
        ),
    )


def _solved(
    config: GptOssConfig, cluster: Cluster, tokens: int, expert_weights: str, name: str, seconds: float
) -> float:
    """The value of a quantity with which the experts of one layer take so long; the nearest one if none does."""
    layout = Layout(shape=MeshShape(), chunk_tokens=tokens, expert_weights=expert_weights)

    def taken(value: float) -> float:
        moved = cluster.replace(**{name: _curve(name, {None: [value]})})
        return OperationTimes(config, moved, layout).expert_layer(tokens, 1)[0]

    low, high = _SOLVED[name]
    rises = taken(high) > taken(low)
    for _ in range(_STEPS):
        middle = math.sqrt(low * high)
        low, high = (low, middle) if (taken(middle) > seconds) == rises else (middle, high)
    return high


def _sample(config: GptOssConfig, row: Row, peak: float, fit_up_to: int) -> Sample:
    layout = Layout(
        shape=MeshShape(*(int(degree) for degree in row["mesh"].split("x"))),
        chunk_tokens=row["chunk_tokens"],
        split=EXPERT if row.get("expert_parallel") else SEQUENCE,
        expert_weights="mxfp4" if row["expert_weights"] == "mxfp4" else "bfloat16",
        dtype=row["dtype"],
    )
    return Sample(
        name=f"{layout}, {row['expert_weights']}, {row['prompt_tokens']} tokens",
        seconds=_at_peak(row, "ttft_median_s", peak),
        predict=functools.partial(_ttft, config, layout, row["prompt_tokens"]),
        is_fitted=row["prompt_tokens"] <= fit_up_to and row.get("steady", True),
    )


def _samples(config: GptOssConfig, rows: Iterable[Row], peak: float, fit_up_to: int) -> list[Sample]:
    """The samples of prefills, in order; of those with the same name, the later ones are numbered."""
    seen: dict[str, int] = {}
    samples = []
    for row in sorted(rows, key=lambda r: (r["devices"], r["mesh"], r["expert_weights"], r["prompt_tokens"])):
        sample = _sample(config, row, peak, fit_up_to)
        seen[sample.name] = seen.get(sample.name, 0) + 1
        number = f" ({seen[sample.name]})" if seen[sample.name] > 1 else ""
        samples.append(dataclasses.replace(sample, name=sample.name + number))
    return samples


def _at_peak(row: Row, name: str, peak: float) -> float:
    """A time of a line, as if the machine's peak had been the given one meanwhile."""
    return float(row[name] * row["peak_tflop_per_s"] * 1e12 / peak)


def _checked(row: Row) -> Row:
    """A line whose numbers can be used.

    Raises:
      ValueError: one of them is not a positive number.
    """
    for name in (_NUMBERS | {name for name in _OF_SOME if row.get(name)}) & row.keys():
        value = row[name]
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise ValueError(f"a line of kind {row['kind']}: {name} must be a positive number, not {value!r}")
    return row


def _ttft(config: GptOssConfig, layout: Layout, num_tokens: int, cluster: Cluster) -> float:
    return predict(config, cluster, layout, num_tokens).ttft_s


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
