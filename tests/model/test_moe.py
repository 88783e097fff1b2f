"""Routing, the activation, and the grouped product against a loop over tokens."""

from __future__ import annotations

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
import pytest

from slope_jax.model.config import FULL, GptOssConfig, RopeConfig
from slope_jax.model.ops.experts import xla
from tests import on_mesh

CONFIG = GptOssConfig(
    vocab_size=11,
    hidden_size=32,
    intermediate_size=64,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    num_experts=7,
    experts_per_token=3,
    sliding_window=4,
    layer_types=(FULL,),
    max_position=64,
    rms_norm_eps=1e-5,
    swiglu_limit=7.0,
    rope=RopeConfig(theta=100.0, factor=2.0, original_max_position=32),
)


def test_router_weights() -> None:
    """Case G10: the softmax runs over the chosen logits alone."""
    logits = jnp.concatenate([jnp.array([2, 1.5, 1, 0.5]), jnp.zeros(124)])[None]
    routing = xla.route(logits, 4)
    np.testing.assert_array_equal(routing.experts_TX[0], [0, 1, 2, 3])
    np.testing.assert_allclose(routing.weights_TX[0], [0.45505, 0.27600, 0.16741, 0.10154], atol=1e-5)


def test_ties_go_to_the_lower_expert() -> None:
    logits = jnp.array([[1.0, 3.0, 3.0, 3.0, 0.0, 3.0]])
    np.testing.assert_array_equal(xla.route(logits, 3).experts_TX[0], [1, 2, 3])


@pytest.mark.parametrize(
    ("gate", "up", "expected"),
    [(1, 0, 0.845796), (1, -1, 0), (8, 8, 55.999625), (8, -8, -41.999719), (-8, 8, -64 / (1 + math.exp(8 * 1.702)))],
)
def test_activation_points(gate: float, up: float, expected: float) -> None:
    """Case G12: the gate is clamped from above only."""
    value = float(xla.clamped_swiglu(jnp.float32(gate), jnp.float32(up), 7.0, 1.702))
    assert value == pytest.approx(expected, rel=2e-6, abs=1e-7)


def tokenwise(x: np.ndarray, logits: np.ndarray, weights: dict[str, np.ndarray], choices: int) -> np.ndarray:
    out = np.zeros(x.shape)
    for t in range(len(x)):
        chosen = np.argsort(-logits[t], kind="stable")[:choices]
        shares = np.exp(logits[t, chosen] - logits[t, chosen].max())
        for e, share in zip(chosen, shares / shares.sum(), strict=True):
            u = x[t] @ weights["gate_up"][e] + weights["gate_up_bias"][e]
            gate, up = np.minimum(u[: len(u) // 2], 7), np.clip(u[len(u) // 2 :], -7, 7)
            a = gate / (1 + np.exp(-1.702 * gate)) * (up + 1)
            out[t] += share * (a @ weights["down"][e] + weights["down_bias"][e])
    return out


def grouped(x: np.ndarray, logits: np.ndarray, valid: np.ndarray, weights: dict[str, np.ndarray]) -> np.ndarray:
    w = {name: jnp.asarray(value, jnp.float32) for name, value in weights.items()}

    def run(x: jnp.ndarray, logits: jnp.ndarray, valid: jnp.ndarray) -> jnp.ndarray:
        routing = xla.route(logits, CONFIG.experts_per_token)
        read = lambda e: (w["gate_up"][e], w["down"][e])  # noqa: E731
        return xla.grouped_mlp(x, routing, valid, CONFIG, read, w["gate_up_bias"], w["down_bias"])

    return np.asarray(on_mesh.run(run, jnp.asarray(x, jnp.float32), jnp.asarray(logits, jnp.float32), valid))


@pytest.mark.parametrize("tokens", [1, 2, 17, 300])
@pytest.mark.parametrize("skew", ["even", "one expert", "half unused"])
def test_grouped_product_equals_a_loop_over_tokens(tokens: int, skew: str) -> None:
    rng = np.random.default_rng(tokens)
    E, D, F = CONFIG.num_experts, CONFIG.hidden_size, CONFIG.intermediate_size
    weights = {
        "gate_up": rng.normal(size=(E, D, 2 * F)),
        "gate_up_bias": rng.normal(size=(E, 2 * F)),
        "down": rng.normal(size=(E, F, D)) / 8,
        "down_bias": rng.normal(size=(E, D)),
    }
    x, logits = rng.normal(size=(tokens, D)), rng.normal(size=(tokens, E))
    if skew == "one expert":
        logits[:, 5] += 100
    if skew == "half unused":
        logits[:, ::2] -= 100
        logits[:, 0] += 100
    valid = rng.random(tokens) < 0.8
    valid[0] = True
    x[~valid] = np.nan  # padding must not matter
    found = grouped(x, logits, valid, weights)
    expected = tokenwise(x[valid], logits[valid], weights, CONFIG.experts_per_token)
    np.testing.assert_allclose(found[valid], expected, rtol=1e-5, atol=1e-4)
    assert (found[~valid] == 0).all()


def test_no_valid_token_gives_zeros() -> None:
    config = dataclasses.replace(CONFIG)
    weights = {
        "gate_up": np.ones((7, 32, 128)),
        "gate_up_bias": np.ones((7, 128)),
        "down": np.ones((7, 64, 32)),
        "down_bias": np.ones((7, 32)),
    }
    found = grouped(np.ones((5, config.hidden_size)), np.zeros((5, 7)), np.zeros(5, bool), weights)
    assert (found == 0).all()


@pytest.mark.parametrize(("tokens", "experts", "choices"), [(1024, 128, 4), (4096, 32, 4), (16, 128, 4), (1, 128, 4)])
def test_rows_worked_on_are_few(tokens: int, experts: int, choices: int) -> None:
    """Case J04: with random routing, the blocks hold less than twice the rows that exist, and a block at the least."""
    rng = np.random.default_rng(0)
    chosen = np.argsort(rng.random((tokens, experts)), axis=1)[:, :choices]
    sizes = xla._block_sizes(tokens * choices, experts)
    rows = 0
    for count in np.bincount(chosen.ravel(), minlength=experts):
        left = int(count)
        for size in sizes:
            blocks = left // size if size != sizes[-1] else -(-left // size)
            rows, left = rows + blocks * size, left - blocks * size
    assert rows >= tokens * choices
    assert rows <= max(2 * tokens * choices, sizes[-1] * min(tokens * choices, experts))
