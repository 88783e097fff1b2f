"""YaRN frequencies, magnitude and rotation against their formulas in float64."""

from __future__ import annotations

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
import pytest

from slope_jax.model.config import RopeConfig
from slope_jax.model.rope import inverse_frequencies, magnitude, rotate, rotation
from tests.model.test_moe import CONFIG

PUBLISHED = RopeConfig(theta=150000.0, factor=32.0, original_max_position=4096, truncate=False)
GPT_OSS = dataclasses.replace(CONFIG, head_dim=64, max_position=131072, rope=PUBLISHED)


def test_golden_frequencies() -> None:
    found = inverse_frequencies(PUBLISHED, 64)
    golden = {
        8: 5.081327e-02,
        9: 3.170570e-02,
        12: 6.794959e-03,
        13: 3.860359e-03,
        17: 1.293187e-04,
        18: 3.830881e-05,
        31: 3.023511e-07,
    }
    for index, value in golden.items():
        assert found[index] == pytest.approx(value, rel=1e-6)


def test_magnitude_enters_once_for_queries_and_keys() -> None:
    """Case G02: ones at position 0 score 64 * 1.8132604 / 8, or 8 with an attention factor of 1."""
    for factor, score in ((None, 64 * 1.8132604 / 8), (1.0, 8.0)):
        config = dataclasses.replace(GPT_OSS, rope=dataclasses.replace(PUBLISHED, attention_factor=factor))
        cos, sin = rotation(config, jnp.zeros(1, jnp.int32))
        ones = rotate(jnp.ones((1, 1, 64)), cos, sin)
        assert float(jnp.sum(ones * ones)) / 8 == pytest.approx(score, rel=1e-6)
    assert magnitude(PUBLISHED) == pytest.approx(1.3465735902799727, rel=1e-15)


def test_rotation_is_exact_at_every_distance() -> None:
    """A float32 product of position and frequency would be off by 0.005 at the last position."""
    positions = np.array([0, 1, 511, 512, 513, 4096, 65_537, 131_071])
    cos, sin = rotation(GPT_OSS, jnp.asarray(positions, jnp.int32))
    angles = np.outer(positions, inverse_frequencies(PUBLISHED, 64))
    np.testing.assert_allclose(cos, magnitude(PUBLISHED) * np.cos(angles), atol=5e-7)
    np.testing.assert_allclose(sin, magnitude(PUBLISHED) * np.sin(angles), atol=5e-7)


def test_rotation_pairs_the_halves_of_a_head() -> None:
    x = np.random.default_rng(0).normal(size=(3, 2, 64))
    angle = np.random.default_rng(1).normal(size=(3, 32))
    found = rotate(jnp.asarray(x), jnp.cos(jnp.asarray(angle)), jnp.sin(jnp.asarray(angle)))
    as_complex = (x[..., :32] + 1j * x[..., 32:]) * np.exp(1j * angle)[:, None]
    np.testing.assert_allclose(found, np.concatenate([as_complex.real, as_complex.imag], -1), atol=1e-6)


def test_truncated_ramp_has_whole_bounds() -> None:
    """With truncation the ramp runs from floor(8.09) = 8 to ceil(17.40) = 18."""
    found = inverse_frequencies(dataclasses.replace(PUBLISHED, truncate=True), 64)
    plain = [PUBLISHED.theta ** (-2 * j / 64) for j in range(32)]
    assert found[8] == pytest.approx(plain[8], rel=1e-12)
    assert found[18] == pytest.approx(plain[18] / 32, rel=1e-12)
    middle = plain[13] * (0.5 + 0.5 / 32)
    assert found[13] == pytest.approx(middle, rel=1e-12)
    assert math.isclose(found[7], plain[7])
