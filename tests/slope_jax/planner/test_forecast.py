"""The running correction of the planner's expectation, by itself and in an engine."""

from __future__ import annotations

import pathlib

import numpy as np
import pytest

from slope_jax import Engine, MeshShape
from slope_jax.planner import Cluster, Forecast, Layout, predict

CLUSTER = Cluster.load("cpu")
OPTIONS = {"dtype": "float32", "chunk_tokens": 16, "kv_cache_tokens": 64, "page_tokens": 8}


@pytest.fixture(scope="module")
def engine(toy_dir: pathlib.Path) -> Engine:
    return Engine.load(toy_dir, mesh=MeshShape(1, 1, 2), expert_parallel=True, **OPTIONS)  # type: ignore[arg-type]


def test_the_correction_follows_the_machine(engine: Engine) -> None:
    forecast = Forecast(engine.programs, CLUSTER, fading=0.2)
    layout = Layout(
        shape=MeshShape(1, 1, 2), chunk_tokens=16, split="expert", expert_weights="bfloat16", dtype="float32"
    )
    predicted = predict(engine.config, CLUSTER, layout, 40).ttft_s
    assert (forecast.factor, forecast(40)) == (1.0, predicted)
    forecast.observe(40, 1.5 * predicted)
    assert forecast.factor == pytest.approx(1.5)  # the first observation is all that is known
    random = np.random.default_rng(0)
    for noise in random.lognormal(0.0, 0.1, 100):
        forecast.observe(40, 2.0 * predicted * noise)
    assert forecast.factor == pytest.approx(2.0, rel=0.1)
    assert forecast(20) == pytest.approx(forecast.factor * predict(engine.config, CLUSTER, layout, 20).ttft_s)
    before = forecast.factor
    forecast.observe(40, 40 * predicted)  # one slow prompt
    assert before < forecast.factor < 2 * before
    with pytest.raises(ValueError, match="must be positive, not -1"):
        forecast.observe(40, -1.0)
    with pytest.raises(ValueError, match="fading must be between 0 and 1, not 1"):
        Forecast(engine.programs, CLUSTER, fading=1.0)


def test_an_engine_keeps_it_up_to_date(engine: Engine) -> None:
    """By prompts that were alone; those of a batch wait for each other."""
    forecast = engine.forecast = Forecast(engine.programs, CLUSTER)
    engine.prefill([list(range(30)), list(range(20))])
    assert forecast.factor == 1.0
    (result,) = engine.prefill([list(range(30))])
    assert forecast.factor == pytest.approx(result.ttft_s / forecast.predicted(30))
    assert forecast(30) == pytest.approx(result.ttft_s)
