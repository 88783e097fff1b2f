"""Rows as words: nothing is lost, and fixed point is as exact as it says."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from slope_jax.model.parallel import wire


@pytest.mark.parametrize("dtype", [np.float32, np.int32, np.uint16, np.int16, ml_dtypes.bfloat16], ids=str)
def test_words_hold_every_bit(dtype: Any) -> None:
    size = np.dtype(dtype).itemsize
    x: np.ndarray = np.random.default_rng(0).integers(0, 256, (3, 5, 4 * size), np.uint8).view(dtype)
    words = wire.to_words(jnp.asarray(x))
    assert (words.dtype, words.shape) == (jnp.uint16, (3, 5, 2 * size))
    assert np.asarray(wire.from_words(words, dtype)).tobytes() == x.tobytes()


@pytest.mark.parametrize("width", [2880, 512, 96, 40, 7])
def test_fixed_point_is_within_half_a_step_of_each_block(width: int) -> None:
    rng = np.random.default_rng(width)
    x = (rng.normal(size=(50, width)) * np.exp(rng.normal(size=(50, width)) * 3)).astype(np.float32)
    x[3] = 0
    x[4] *= 1e-33
    words = jax.jit(wire.to_fixed_point)(x)
    assert words.dtype == jnp.uint16
    assert words.shape == (50, wire.fixed_point_words(width))
    assert wire.fixed_point_words(2880) == 2880 + 2 * 45
    found = np.asarray(jax.jit(wire.from_fixed_point, static_argnums=1)(words, width), np.float64)
    block = np.gcd(width, wire.BLOCK)
    largest = np.abs(x).reshape(50, -1, block).max(2).repeat(block, 1)
    step = np.maximum(largest, 1e-30).astype(np.float64) / 32767
    assert (np.abs(found - x) <= 0.51 * step).all(), "the hundredth is for the rounding of float32 itself"
    assert (found[3] == 0).all()


def test_fixed_point_rounds_far_less_than_bfloat16() -> None:
    x = np.random.default_rng(0).normal(size=(100, 2880)).astype(np.float32)
    fixed = np.asarray(wire.from_fixed_point(wire.to_fixed_point(jnp.asarray(x)), 2880)) - x
    rounded = x.astype(ml_dtypes.bfloat16).astype(np.float32) - x
    assert 40 * np.square(fixed).mean() ** 0.5 < np.square(rounded).mean() ** 0.5


@pytest.mark.parametrize("value", [np.nan, -np.nan, np.inf, -np.inf])
def test_what_is_not_finite_does_not_come_back_finite(value: float) -> None:
    """In all places of a block, in an array large enough for vector instructions."""
    x = np.random.default_rng(0).normal(size=(64, 128)).astype(np.float32)
    x[np.arange(64), np.arange(64)] = value
    found = np.asarray(jax.jit(lambda x: wire.from_fixed_point(wire.to_fixed_point(x), 128))(x))
    assert not np.isfinite(found[:, :64]).any()
    np.testing.assert_allclose(found[:, 64:], x[:, 64:], atol=1e-3)
