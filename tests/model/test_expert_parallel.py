"""The exchange of expert parallelism against a loop over tokens, whatever the routing, and the bytes that it sends."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from slope_jax.mesh.axes import PER_DEVICE, ULYSSES, MeshShape, make_mesh
from slope_jax.model.ops.experts import xla
from slope_jax.model.parallel import expert_parallel
from slope_jax.model.parallel.expert_parallel import ExchangeShape
from tests.model.test_moe import CONFIG, tokenwise

SMALL = dataclasses.replace(CONFIG, num_experts=16)
PUBLISHED = dataclasses.replace(CONFIG, hidden_size=2880, num_experts=128, experts_per_token=4)


def make_weights(config: Any, seed: int = 0) -> dict[str, np.ndarray]:
    """Of values that bfloat16 holds."""
    rng = np.random.default_rng(seed)
    E, D, F = config.num_experts, config.hidden_size, config.intermediate_size
    weights = {
        "gate_up": rng.normal(size=(E, D, 2 * F)) / D**0.5,
        "gate_up_bias": rng.normal(size=(E, 2 * F)),
        "down": rng.normal(size=(E, F, D)) / F**0.5,
        "down_bias": rng.normal(size=(E, D)),
    }
    return {name: w.astype(ml_dtypes.bfloat16).astype(np.float64) for name, w in weights.items()}


def compiled(config: Any, shape: MeshShape, tokens: int, dtype: Any, *, parallel: bool = True) -> Any:
    """The layer on a mesh, for arrays that lead with its axes; it gives the output and the rounds."""
    split, whole = P(ULYSSES), P()

    def layer(x: Any, logits: Any, valid: Any, w: dict[str, Any]) -> Any:
        x, logits, valid = x[0, 0, 0], logits[0, 0, 0], valid[0, 0, 0]
        routing = xla.route(logits, config.experts_per_token)
        read = lambda e: (w["gate_up"][e], w["down"][e])  # noqa: E731
        biases = w["gate_up_bias"], w["down_bias"]
        if parallel:
            y, rounds = expert_parallel.expert_parallel_mlp(x, routing, valid, config, read, *biases)
        else:
            y, rounds = xla.grouped_mlp(x, routing, valid, config, read, *biases), jnp.zeros((), jnp.int32)
        return y[None, None, None], rounds

    mesh = make_mesh(shape, jax.devices()[: shape.num_devices])
    in_specs = (PER_DEVICE, PER_DEVICE, PER_DEVICE, split if parallel else whole)
    function = jax.shard_map(layer, mesh=mesh, in_specs=in_specs, out_specs=(PER_DEVICE, P()))
    lead = (shape.pp, shape.ring, shape.ulysses, tokens)
    kinds = {name: dtype if name in ("gate_up", "down") else jnp.float32 for name in make_weights(config)}
    arguments = (
        jax.ShapeDtypeStruct((*lead, config.hidden_size), dtype),
        jax.ShapeDtypeStruct((*lead, config.num_experts), jnp.float32),
        jax.ShapeDtypeStruct(lead, bool),
        {name: jax.ShapeDtypeStruct(w.shape, kinds[name]) for name, w in make_weights(config).items()},
    )
    program = jax.jit(function).lower(*arguments).compile()

    def run(x: np.ndarray, logits: np.ndarray, valid: np.ndarray, weights: dict[str, np.ndarray]) -> Any:
        w = {name: jnp.asarray(value, kinds[name]) for name, value in weights.items()}
        values = jnp.asarray(x, dtype), jnp.asarray(logits, jnp.float32), jnp.asarray(valid), w
        placed = [jax.device_put(v, jax.NamedSharding(mesh, spec)) for v, spec in zip(values, in_specs, strict=True)]
        y, rounds = program(*placed)
        return np.asarray(y), int(rounds)

    run.text = program.as_text()  # type: ignore[attr-defined]
    return run


def skewed(kind: str, logits: np.ndarray) -> np.ndarray:
    if kind == "one expert":
        logits[..., 5] += 100
    elif kind == "one rank":
        logits[..., 8 : 8 + SMALL.experts_per_token] += 100
    elif kind == "one source":  # only the tokens of the first device all go to one rank
        logits[..., 0, :, 0] += 100
    return logits


def rows_by_rank(logits: np.ndarray, valid: np.ndarray, config: Any, ranks: int) -> np.ndarray:
    """Tokens `[..., U]` of each device that need each rank."""
    chosen = np.argsort(-logits, axis=-1, kind="stable")[..., : config.experts_per_token]
    ranks_of = chosen // (config.num_experts // ranks)
    return np.stack([((ranks_of == u).any(-1) & valid).sum(-1) for u in range(ranks)], -1)


@pytest.fixture(scope="module", params=[(1, 1, 8, 17), (2, 2, 2, 40), (1, 2, 4, 1)], ids=str)
def small_layer(request: pytest.FixtureRequest) -> Any:
    *shape, tokens = request.param
    return MeshShape(*shape), tokens, compiled(SMALL, MeshShape(*shape), tokens, jnp.float32)


@pytest.mark.parametrize("skew", ["even", "one expert", "one rank", "one source"])
@pytest.mark.parametrize("share", [1.0, 0.7])
def test_it_equals_a_loop_over_tokens(small_layer: Any, skew: str, share: float) -> None:
    """No token is dropped, and there are as many rounds as the fullest queue of the mesh needs."""
    shape, tokens, run = small_layer
    rng = np.random.default_rng(tokens)
    lead = (shape.pp, shape.ring, shape.ulysses, tokens)
    x, logits = rng.normal(size=(*lead, SMALL.hidden_size)), rng.normal(size=(*lead, SMALL.num_experts))
    logits = skewed(skew, logits)
    valid = rng.random(lead) < share
    valid[..., 0] = True
    x[~valid] = np.nan  # padding must not matter
    weights = make_weights(SMALL)
    found, rounds = run(x, logits, valid, weights)
    expected = tokenwise(x[valid], logits[valid], weights, SMALL.experts_per_token)
    np.testing.assert_allclose(found[valid], expected, rtol=1e-5, atol=1e-4)
    assert (found[~valid] == 0).all()
    fullest = rows_by_rank(logits, valid, SMALL, shape.ulysses).max()
    capacity = ExchangeShape.of(SMALL, tokens, shape.ulysses, jnp.float32).capacity
    assert rounds == -(-fullest // capacity)
    if skew == "one expert" and shape.ulysses == 8:
        assert rounds > 1, "several rounds were not tried"


def test_a_stage_without_tokens_sends_nothing_and_waits_for_the_others(small_layer: Any) -> None:
    shape, tokens, run = small_layer
    rng = np.random.default_rng(0)
    lead = (shape.pp, shape.ring, shape.ulysses, tokens)
    x, logits = rng.normal(size=(*lead, SMALL.hidden_size)), rng.normal(size=(*lead, SMALL.num_experts))
    weights = make_weights(SMALL)
    valid = np.zeros(lead, bool)
    found, rounds = run(np.full_like(x, np.nan), logits, valid, weights)
    assert rounds == 0
    assert (found == 0).all()
    valid[-1, -1, -1] = True  # all devices but one are idle
    found, rounds = run(np.where(valid[..., None], x, np.nan), logits, valid, weights)
    assert rounds >= 1
    expected = tokenwise(x[valid], logits[valid], weights, SMALL.experts_per_token)
    np.testing.assert_allclose(found[valid], expected, rtol=1e-5, atol=1e-4)
    assert (found[~valid] == 0).all()


def test_bfloat16_is_no_worse_than_without_the_exchange() -> None:
    """What comes back is rounded, but far less than what the layer rounds anyway."""
    config = dataclasses.replace(SMALL, hidden_size=128, intermediate_size=128, num_experts=32, experts_per_token=4)
    shape, tokens, rng = MeshShape(1, 1, 4), 256, np.random.default_rng(0)
    lead = (1, 1, 4, tokens)
    x, logits, valid = rng.normal(size=(*lead, 128)), rng.normal(size=(*lead, 32)), np.ones(lead, bool)
    weights = make_weights(config)
    exact = tokenwise(x[valid], logits[valid], weights, config.experts_per_token)
    error = {}
    for parallel in (False, True):
        found, _ = compiled(config, shape, tokens, jnp.bfloat16, parallel=parallel)(x, logits, valid, weights)
        error[parallel] = np.sqrt(np.square(found[valid] - exact).mean())
    assert error[False] > 1e-4
    assert error[True] < 1.001 * error[False]


@pytest.mark.parametrize("ranks", [2, 4, 8, 16])
@pytest.mark.parametrize("tokens", [1600, 4096])
def test_balanced_routing_takes_one_round_near_the_least_bytes(ranks: int, tokens: int) -> None:
    """The least is counted from the routing itself: each (token, other rank) once there and once back, in bfloat16."""
    logits = np.random.default_rng(ranks).normal(size=(ranks, tokens, PUBLISHED.num_experts))
    rows = rows_by_rank(logits, np.ones((ranks, tokens), bool), PUBLISHED, ranks)
    shape = ExchangeShape.of(PUBLISHED, tokens, ranks, jnp.bfloat16)
    assert rows.max() <= shape.capacity
    least = (rows.sum() - np.trace(rows)) / ranks * PUBLISHED.hidden_size * 2 * 2
    assert shape.least_bytes == pytest.approx(least, rel=0.02)
    assert shape.sent_bytes() <= 1.3 * shape.least_bytes


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32], ids=["bfloat16", "float32"])
def test_the_compiled_program_sends_what_the_formula_says(dtype: Any) -> None:
    text = compiled(SMALL, MeshShape(1, 2, 4), 40, dtype).text
    shape = ExchangeShape.of(SMALL, 40, 4, dtype)
    assert shape.capacity < 40
    exchanges = [line for line in text.splitlines() if re.search(r"= .* all-to-all\(", line)]
    found = []
    for line in exchanges:
        result = line.split(" all-to-all(")[0]
        sizes = [np.prod([int(n) for n in dims.split(",")]) for dims in re.findall(r"u16\[([\d,]+)\]", result)]
        found.append(2 * int(sum(sizes)))
    assert sorted(found) == sorted([shape.dispatch_bytes, shape.combine_bytes])
    sent = sum(found) * 3 // 4  # one of four buffers stays
    assert shape.sent_bytes() == sent
    assert shape.sent_bytes(3) == 3 * sent


@pytest.mark.parametrize(("tokens", "ranks", "devices", "least", "most"), [
    (16, 8, 32, 1.9, 3.0), (256, 8, 32, 1.01, 1.99), (256, 4, 8, 1.0, 1.9), (4096, 8, 32, 1.0, 1.001)
])  # fmt: skip
def test_rounds_of_random_routing(tokens: int, ranks: int, devices: int, least: float, most: float) -> None:
    """Chance alone overfills the buffers of a few tokens, and not those of many; as often as when it is tried."""
    exchange = ExchangeShape.of(PUBLISHED, tokens, ranks, jnp.bfloat16)
    random, trials = np.random.default_rng(0), 40 if tokens < 4096 else 1
    rounds = []
    for _ in range(trials):
        order = random.random((devices * tokens, PUBLISHED.num_experts), np.float32)
        drawn = np.argpartition(order, PUBLISHED.experts_per_token - 1, axis=1)[:, : PUBLISHED.experts_per_token]
        needed = (drawn[:, :, None] // (PUBLISHED.num_experts // ranks) == np.arange(ranks)).any(axis=1)
        rows = needed.reshape(devices, tokens, ranks).sum(axis=1)
        rounds.append(-(-int(rows.max()) // exchange.capacity))
    assert least <= exchange.mean_rounds(devices) <= most
    assert abs(exchange.mean_rounds(devices) - np.mean(rounds)) < 0.2
    assert exchange.mean_rounds(devices, imbalance=1.5) >= max(exchange.mean_rounds(devices), 1.9)
