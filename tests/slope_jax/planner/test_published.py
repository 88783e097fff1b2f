"""Predictions against published measurements; fitted points and test points are looked at apart."""

from __future__ import annotations

import statistics

import pytest

from slope_jax import MeshShape
from slope_jax.model.counts import cost
from slope_jax.model.published import published_config
from slope_jax.planner import Cluster, Layout
from slope_jax.planner.fit import Fit, fit
from slope_jax.planner.models import sizes_of
from slope_jax.planner.operations import OperationTimes
from slope_jax.planner.quantity import Curve
from tests.slope_jax.planner import published

# vLLM's experts of gpt-oss-120b in MXFP4 on one H100, of one layer (aiconfigurator, power_law_1.01): tokens, seconds.
EXPERTS = {512: 1.01e-3, 1024: 1.31e-3, 2048: 1.69e-3, 4096: 2.46e-3, 8192: 3.97e-3, 16_384: 6.67e-3}


@pytest.fixture(scope="module")
def meta() -> Fit:
    return published.meta_fit()


def test_context_parallelism_of_a_dense_model(meta: Fit) -> None:
    """arXiv 2411.01783: 10 TTFTs and 8 pass-KV rows, 6 of which four numbers are fitted to."""
    assert len(meta.factors) <= 4
    assert (len(meta.fitted), len(meta.tested), len(meta.errors)) == (6, 12, 18)
    for names in (None, meta.fitted, meta.tested):
        assert meta.median_error(names) <= 0.05
        assert meta.largest_error(names) <= 0.15


def test_the_sizes_of_the_dense_model() -> None:
    """405.85 billion parameters, of which two matrices of 128256 x 16384 are outside of the layers."""
    config = sizes_of(published.read("meta_tables.json")["llama_405b"])
    operations = cost.prompt_operations(config, 1000)
    layers = 405.853e9 - 2 * 128_256 * 16_384
    assert operations.projections + operations.experts == pytest.approx(2 * 1000 * layers, rel=1e-3)


def test_served_on_one_node_of_newer_devices() -> None:
    """The engine's factor was chosen by one row, which comes first; the README has all errors with their signs."""
    found = published.served_errors()
    assert abs(found[0][1]) < 0.03
    tests = [error for row, error, _ in found if not row["fit"]]
    assert len(tests) == 11
    assert statistics.median(map(abs, tests)) < 0.15
    assert max(map(abs, tests)) < 0.40
    # The operations alone are always faster than an engine that serves: what they leave out is never negative.
    assert all(bare < 0 for _, _, bare in found)


def test_experts_on_h100_with_one_point_left_out_at_a_time() -> None:
    cluster = Cluster.load("h100").scaled({"unpacking": 0.0})
    curve = cluster.curve("experts")
    assert len(curve.points) == len(EXPERTS)
    errors = []
    for i, (tokens, seconds) in enumerate(EXPERTS.items()):
        assert _expert_seconds(cluster, tokens) == pytest.approx(seconds, rel=0.02)
        if 0 < i < len(EXPERTS) - 1:
            others = curve.points[:i] + curve.points[i + 1 :]
            without = cluster.replace(experts=Curve(name="experts", points=others))
            errors.append(_expert_seconds(without, tokens) / seconds - 1)
    assert max(map(abs, errors)) < 0.15


def _expert_seconds(cluster: Cluster, tokens: int) -> float:
    layout = Layout(shape=MeshShape(), chunk_tokens=tokens)
    return OperationTimes(published_config("gpt-oss-120b"), cluster, layout).expert_layer(tokens, 1)[0]


def test_a_model_that_is_wrong_does_not_pass(meta: Fit) -> None:
    """Without the ring's cost the long rows of many nodes are far off, whatever is fitted."""
    cluster = Cluster.load(published.FOLDER / "meta_gtt.toml", nodes=16)
    free = cluster.scaled({"network": 1e6, "ring_step": 1e-6})
    groups = {"products": published.META_GROUPS["products"], "attention": ("full_attention",)}
    worse = fit(free, groups, published.meta_samples())
    assert worse.largest_error() > 0.2
