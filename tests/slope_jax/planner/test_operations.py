"""Times of operations, against numbers worked out by hand from the model's sizes and the machine's."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from slope_jax import MeshShape
from slope_jax.launch.make_checkpoint import PRESETS
from slope_jax.model.published import published_config
from slope_jax.planner import Cluster, Layout, Prediction, predict
from slope_jax.planner.layout import EXPERT, SEQUENCE, TENSOR, memory, refusal
from slope_jax.planner.quantity import MEASURED, Curve, Point

CONFIG = published_config("gpt-oss-120b")
TOKENS = 102_400
PEAK = 181.05e12


def _constant(name: str, value: float) -> Curve:
    point = Point(at=None, value=value, low=value, high=value, status=MEASURED, source="this test")
    return Curve(name=name, points=(point,))


PLAIN = Cluster.load("mi250", nodes=4).replace(
    dense=_constant("dense", 0.5),
    experts=_constant("experts", 0.5),
    full_attention=_constant("full_attention", 0.25),
    routing_imbalance=_constant("routing_imbalance", 1.0),
    collective=_constant("collective", 0.0),
    ring_step=_constant("ring_step", 0.0),
    host=_constant("host", 0.0),
    unpacking=_constant("unpacking", 0.0),
)


def _predict(shape: MeshShape, split: str = SEQUENCE, chunk: int = TOKENS, cluster: Cluster = PLAIN) -> Prediction:
    return predict(CONFIG, cluster, Layout(shape=shape, chunk_tokens=chunk, split=split), TOKENS, ring_pass="kv")


def test_compute_of_a_mesh_without_stages() -> None:
    """Operations of the model over 32 devices: attention 2880 x 9216 weights, experts 4 x 3 x 2880^2."""
    parts = _predict(MeshShape(1, 4, 8), EXPERT).parts
    rows = TOKENS / 32
    assert parts["projections"] == pytest.approx(36 * rows * 2 * 2880 * (5120 + 4096) / (PEAK * 0.5), rel=1e-6)
    pairs = TOKENS * (TOKENS + 1) / 2
    assert parts["full_attention"] == pytest.approx(18 * pairs * 4 * 4096 / 32 / (PEAK * 0.25), rel=1e-6)
    needed = 36 * rows * 4 * 6 * 2880**2 / (PEAK * 0.5)
    assert needed < parts["experts"] < 1.25 * needed  # tiles, and weights that are read meanwhile


def test_packed_experts_are_unpacked_in_every_tick() -> None:
    """128 experts of 3 x 2880 x 2880 weights in bfloat16, divided by 8 ranks, written and read once in each layer."""
    twice = PLAIN.replace(unpacking=_constant("unpacking", 2.0))
    times = [_predict(MeshShape(1, 4, 8), EXPERT, TOKENS // 2, cluster).parts["experts"] for cluster in (PLAIN, twice)]
    unpacked = 128 / 8 * 3 * 2880**2 * 2
    assert times[1] - times[0] == pytest.approx(2 * 36 * 2 * unpacked / (0.78 * 1.6e12), rel=0.01)


def test_exchanges_of_a_mesh_without_stages() -> None:
    """Queries, keys, values and results: 7/8 of (64 + 16 + 64) heads of 64 numbers of 2 bytes leave, at 70 GB/s."""
    found = _predict(MeshShape(1, 4, 8), EXPERT)
    rows = TOKENS / 32
    assert found.parts["all_to_all"] == pytest.approx(36 * rows * 144 * 64 * 2 * 7 / 8 / 70e9, rel=1e-6)
    # The ring moves 2 KV heads in three hops, 256 bytes and a position for each of a quarter of the tokens, at 10 GB/s;
    # attention takes longer, so that nothing of it is waited for.
    assert found.ring_hidden_s == pytest.approx(18 * 3 * (TOKENS / 4) * 260 / 10e9, rel=0.02)
    assert found.parts["ring"] == 0


def test_a_ring_that_is_not_hidden_costs_what_is_longer() -> None:
    fast = PLAIN.replace(full_attention=_constant("full_attention", 1.0)).scaled({"network": 1 / 40})
    found = _predict(MeshShape(1, 4, 8), EXPERT, cluster=fast)
    hop = (TOKENS / 4) * 260 / (10e9 / 40)
    step = found.parts["full_attention"] / 18 / 4
    assert found.parts["ring"] == pytest.approx(18 * 3 * (hop - step), rel=0.02)
    together = _predict(MeshShape(1, 4, 8), EXPERT, cluster=fast.replace(ring_exposed=_constant("ring_exposed", 1.0)))
    assert together.parts["ring"] == pytest.approx(18 * 3 * hop, rel=0.02)


def test_tensor_parallelism_reduces_twice_a_layer() -> None:
    """2 x 7/8 of 2880 numbers of 2 bytes leave a device for each token, twice in each layer, at 59.5 GB/s."""
    found = _predict(MeshShape(ulysses=8), TENSOR, chunk=10_240)
    assert found.parts["all_reduce"] == pytest.approx(36 * 2 * TOKENS * 2880 * 2 * 2 * 7 / 8 / 59.5e9, rel=1e-3)
    assert found.parts["all_to_all"] == found.parts["ring"] == 0
    alone = _predict(MeshShape(ulysses=8), SEQUENCE, chunk=10_240)
    assert found.parts["full_attention"] == pytest.approx(alone.parts["full_attention"])
    assert found.parts["elementwise"] > 5 * alone.parts["elementwise"]


def test_a_pipeline_takes_its_chunks_and_stages_less_one() -> None:
    """Six stages, each of three layers of both kinds, and chunks whose work grows: the slowest stage is a tick."""
    six = _predict(MeshShape(6, 1, 1), chunk=12_800)
    assert (six.chunks, six.ticks) == (8, 13)
    of_stage = [seconds / 6 for seconds in _chunk_times()]
    ticks = [max(of_stage[max(0, t - 5) : t + 1]) for t in range(13)]
    assert six.ttft_s == pytest.approx(sum(ticks), rel=0.01)
    assert six.bubble_s == pytest.approx(sum(ticks) - sum(of_stage), rel=0.02)
    # Full of prompts, every tick has the slowest of six chunks in a row, which go round.
    turns = [max(of_stage[(t - s) % 8] for s in range(6)) for t in range(8)]
    assert 1 / six.requests_per_s == pytest.approx(sum(turns), rel=0.01)


def _chunk_times() -> list[float]:
    """Of one device: the times of prompts of 1, 2, ... 8 chunks, one less the other."""
    layout = Layout(shape=MeshShape(), chunk_tokens=12_800)
    totals = [predict(CONFIG, PLAIN, layout, 12_800 * n).ttft_s for n in range(1, 9)]
    return list(np.diff([0.0, *totals]))


def test_little() -> None:
    found = _predict(MeshShape(4, 1, 8), chunk=12_800)
    many = found.concurrency_within(10.0)
    assert many == math.floor(10.0 * found.requests_per_s)
    assert found.concurrency_within(found.ttft_s * 0.99) == 0
    assert found.concurrency_within(found.ttft_s * 1.001) >= 1
    assert found.ttft_at(1) == pytest.approx(found.ttft_s)
    assert found.ttft_at(40) == pytest.approx(40 / found.requests_per_s)


def test_prompts_that_do_not_fit_at_once_do_not_overlap() -> None:
    """Two stages with room for one prompt each: the next one enters when the one before has left."""
    layout = Layout(shape=MeshShape(2, 1, 2), chunk_tokens=TOKENS // 4, split=EXPERT)
    roomy = PLAIN.scaled({"memory_reserve": 0.0})
    room = memory(CONFIG, layout, roomy, TOKENS)
    tight = dataclasses.replace(roomy, memory_bytes=room.total + room.kv_of_prompt // 2)
    both = [predict(CONFIG, cluster, layout, TOKENS) for cluster in (roomy, tight)]
    assert [p.memory.prompts > 1 for p in both] == [True, False]
    assert both[0].ttft_s == both[1].ttft_s
    assert both[1].requests_per_s == pytest.approx(1 / both[1].ttft_s)
    assert both[0].requests_per_s > both[1].requests_per_s
    assert all(p.memory.fits for p in both)


def test_devices_that_share_cores_are_no_faster_together() -> None:
    mini = PRESETS["mini"].config()
    cpu = Cluster.load("cpu").replace(host=_constant("host", 0.0))
    one = predict(mini, cpu, Layout(shape=MeshShape(), chunk_tokens=2048), 8192, replicas=8)
    assert one.requests_per_s == pytest.approx(1 / one.ttft_s)
    many = predict(mini, cpu, Layout(shape=MeshShape(2, 2, 2), chunk_tokens=2048), 8192)
    for part in ("full_attention", "window_attention"):
        assert many.parts[part] == pytest.approx(one.parts[part])
    assert many.ttft_s > one.ttft_s
    capacity = memory(mini, many.layout, cpu, 8192).capacity
    assert capacity == cpu.memory_bytes // 8


def test_memory_by_part_and_what_does_not_fit() -> None:
    """65.25 GB of packed weights; the KV of a token is 2048 bytes in each of 18 full layers."""
    layout = Layout(shape=MeshShape(1, 1, 1), chunk_tokens=8192)
    needed = memory(CONFIG, layout, PLAIN, TOKENS, prompts=2)
    assert needed.weights == pytest.approx(65.25e9, rel=0.002)
    assert needed.kv == pytest.approx(2 * TOKENS * 18 * 2048, rel=0.01)
    assert "of the 68.7 GB of a device (weights 65.3" in str(refusal(CONFIG, layout, PLAIN, TOKENS))
    spread = Layout(shape=MeshShape(1, 4, 8), chunk_tokens=8192, split=EXPERT)
    assert memory(CONFIG, spread, PLAIN, TOKENS).weights < 11e9
    assert refusal(CONFIG, spread, PLAIN, TOKENS) is None


@pytest.mark.parametrize(
    ("shape", "split", "message"),
    [
        (MeshShape(1, 1, 3), SEQUENCE, "does not divide the 64 query heads"),
        (MeshShape(37, 1, 1), SEQUENCE, "pp=37 stages cannot be filled by the 36 layers"),
        (MeshShape(8, 8, 1), SEQUENCE, "needs 64 devices, but there are 32"),
        (MeshShape(2, 2, 1), EXPERT, "expert parallelism needs several ulysses ranks"),
    ],
)
def test_layouts_that_cannot_be(shape: MeshShape, split: str, message: str) -> None:
    reason = refusal(CONFIG, Layout(shape=shape, chunk_tokens=8192, split=split), PLAIN, TOKENS)
    assert message in str(reason)
