"""A fit finds what made the times, and keeps its hands off the samples that are kept for a test."""

from __future__ import annotations

import dataclasses
import functools
import json
from typing import Any

import pytest

from slope_jax import MeshShape
from slope_jax.launch.make_checkpoint import PRESETS
from slope_jax.planner import Cluster, Layout, predict
from slope_jax.planner.calibrate import calibrate
from slope_jax.planner.fit import Sample, fit
from slope_jax.planner.operations import OperationTimes

CLUSTER = Cluster.load("cpu")
GROUPS = {"memory": ("memory",), "launch": ("launch",)}
MINI = PRESETS["mini"].config()


def _samples(truth: dict[str, float]) -> list[Sample]:
    """Three times on a machine that differs by known factors; the last one is kept for a test."""

    true = CLUSTER.scaled(truth)
    return [
        Sample(name=str(n), seconds=_seconds(n, true), predict=functools.partial(_seconds, n), is_fitted=n < 3)
        for n in (1, 2, 3)
    ]


def _seconds(n: int, cluster: Cluster) -> float:
    return n / cluster.curve("memory")() + cluster.curve("launch")() * 1e5


def test_known_factors_are_found() -> None:
    found = fit(CLUSTER, GROUPS, _samples({"memory": 1.5, "launch": 0.5}))
    assert found.factors == pytest.approx({"memory": 1.5, "launch": 0.5}, rel=1e-3)
    assert (found.fitted, found.tested) == (("1", "2"), ("3",))
    assert found.largest_error() < 1e-3


def test_the_sample_that_is_kept_has_no_part() -> None:
    samples = _samples({"memory": 1.5, "launch": 0.5})
    wrong = [*samples[:2], Sample(name="3", seconds=100.0, predict=samples[2].predict, is_fitted=False)]
    found = fit(CLUSTER, GROUPS, wrong)
    assert found.factors == pytest.approx({"memory": 1.5, "launch": 0.5}, rel=1e-3)
    assert found.errors["3"] < -0.9


def test_limits_hold() -> None:
    found = fit(CLUSTER, GROUPS, _samples({"memory": 1.5, "launch": 0.5}), limits={"memory": (0.5, 1.2)})
    assert found.factors["memory"] == pytest.approx(1.2)


def test_fits_that_make_no_sense() -> None:
    samples = _samples({})
    with pytest.raises(ValueError, match="2 groups of quantities cannot be fitted to 1 times"):
        fit(CLUSTER, GROUPS, [samples[0], samples[2]])
    with pytest.raises(ValueError, match="two samples have one name"):
        fit(CLUSTER, GROUPS, [samples[0], samples[0]])


def _rows() -> list[dict[str, Any]]:
    """Lines of a benchmark on a machine that the planner describes exactly, with other quantities than `CLUSTER`."""
    peak = 0.2e12
    true = CLUSTER.scaled(
        {"dense": 1.2, "experts": 1.3, "full_attention": 2.0, "memory": 0.8, "launch": 3.0, "sharing": 1.3}
    )
    common: dict[str, Any] = {
        "model": "mini",
        "expert_weights": "bfloat16",
        "dtype": "bfloat16",
        "peak_tflop_per_s": peak / 1e12,
    }
    true = dataclasses.replace(true, matmul_flops=peak)
    rows: list[dict[str, Any]] = []
    for operation, packing in (("experts", "bfloat16"), ("experts_mxfp4", "mxfp4")):
        for tokens in (512, 4096):
            layout = Layout(shape=MeshShape(), chunk_tokens=tokens, expert_weights=packing)
            seconds, _ = OperationTimes(MINI, true, layout).expert_layer(tokens, 1)
            row = {"kind": "operation", "operation": operation, "tokens": tokens, "seconds": seconds}
            rows.append(common | row)
    for tokens in (1024, 8192):
        share = true.attention(64)(tokens)
        row = {"kind": "operation", "operation": "full_attention", "tokens": tokens, "share_of_peak": share}
        rows.append(common | row | {"seconds": 1.0})
    window = {"kind": "operation", "operation": "window_attention", "tokens": 8192, "share_of_peak": 0.1}
    rows.append(common | window | {"seconds": 1.0})
    for mesh in ("1x1x1", "2x2x2"):
        shape = MeshShape(*map(int, mesh.split("x")))
        for tokens in (512, 2048, 4096, 8192, 16_384):
            layout = Layout(shape=shape, chunk_tokens=4096, expert_weights="bfloat16")
            row = {"kind": "prefill", "prompt_tokens": tokens, "concurrency": 1, "chunk_tokens": 4096, "mesh": mesh}
            rows.append(common | row | {"ttft_median_s": predict(MINI, true, layout, tokens).ttft_s})
    return [dict(row) | {"devices": 8 if row.get("mesh") == "2x2x2" else 1} for row in rows]


def test_calibration_finds_a_machine_that_it_can_describe() -> None:
    rows = json.loads(json.dumps(_rows()))
    found = calibrate(MINI, CLUSTER, rows)
    assert found.prefills.largest_error() < 0.03
    assert set(found.prefills.fitted) == {
        f"{mesh}, bfloat16, {n} tokens" for mesh in ("1x1x1", "2x2x2") for n in (512, 2048, 4096)
    }
    points = {(e.operation, e.at): e.value for e in found.operations}
    assert points["full_attention/64", 8192] == pytest.approx(CLUSTER.attention(64)(8192) * 2.0)
    assert points["unpacking", 0.0] == pytest.approx(CLUSTER.curve("unpacking")(), rel=0.1)
    assert points["experts", 512.0] == pytest.approx(CLUSTER.curve("experts")() * 1.3, rel=0.05)


def test_a_busy_machine_is_taken_relative_to_its_peak() -> None:
    """Half the lines at half the speed, which their peaks say."""
    slow = [
        row | {k: row[k] * f for k, f in (("peak_tflop_per_s", 0.5), ("ttft_median_s", 2.0)) if k in row}
        if row["kind"] == "prefill" and row["prompt_tokens"] > 4096
        else row
        for row in _rows()
    ]
    assert calibrate(MINI, CLUSTER, slow).prefills.largest_error() < 0.03


def test_lines_that_are_not_steady_have_no_part() -> None:
    rows = _rows()
    odd = [
        next(row for row in rows if row.get("operation") == "experts") | {"seconds": 10.0, "steady": False},
        next(row for row in rows if row["kind"] == "prefill")
        | {"prompt_tokens": 600, "ttft_median_s": 50.0, "steady": False},
    ]
    found = calibrate(MINI, CLUSTER, [*odd, *rows])
    assert "1x1x1, bfloat16, 600 tokens" in found.prefills.tested
    assert max(abs(error) for name, error in found.prefills.errors.items() if "600" not in name) < 0.03


def test_calibrations_that_make_no_sense() -> None:
    rows = _rows()
    for wrong, message in (
        ([row for row in rows if row["kind"] != "prefill"], "no line of kind prefill"),
        ([*rows, rows[0] | {"model": "tiny"}], "several models: mini, tiny"),
        (
            [row for row in rows if row.get("prompt_tokens", 0) > 4096],
            "no steady prefill on one device of at most 4096 tokens",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            calibrate(MINI, CLUSTER, wrong)
