"""Rotary position embedding with YaRN scaling (arXiv 2309.00071)."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from slope_jax.model.config import GptOssConfig, RopeConfig

_FINE = 512  # positions of the fine table


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> np.ndarray:
    """The rotation per position of each pair of dimensions, float64 `[head_dim / 2]`."""
    j = np.arange(head_dim // 2, dtype=np.float64)
    plain = rope.theta ** (-2 * j / head_dim)

    def dimension(rotations: float) -> float:
        span = rope.original_max_position / (rotations * 2 * math.pi)
        return head_dim * math.log(span) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    ramp = np.clip((j - low) / (high - low), 0, 1)
    return plain * (1 - ramp) + plain / rope.factor * ramp


def magnitude(rope: RopeConfig) -> float:
    """The factor on cosine and sine, once each for queries and keys."""
    if rope.attention_factor is not None:
        return rope.attention_factor
    return 0.1 * math.log(rope.factor) + 1 if rope.factor > 1 else 1.0


def rotation(config: GptOssConfig, positions_T: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines of the positions, times the magnitude: float32 `[T, H / 2]` each.

    A float32 product of position and frequency is off by 0.005 radians at position 131,071. The angle is therefore put
    together, by the addition theorem, of a multiple of 512 positions and a rest, each from a table made in float64.
    """
    inv_freq = inverse_frequencies(config.rope, config.head_dim)
    coarse = np.outer(np.arange(0, config.max_position, _FINE, dtype=np.float64), inv_freq)
    fine = np.outer(np.arange(_FINE, dtype=np.float64), inv_freq)
    scale = magnitude(config.rope)
    high, low = positions_T // _FINE, positions_T % _FINE
    cos_a, sin_a = (jnp.asarray(scale * f(coarse), jnp.float32)[high] for f in (np.cos, np.sin))
    cos_b, sin_b = (jnp.asarray(f(fine), jnp.float32)[low] for f in (np.cos, np.sin))
    return cos_a * cos_b - sin_a * sin_b, sin_a * cos_b + cos_a * sin_b


def rotate(x_TNH: jax.Array, cos_TH: jax.Array, sin_TH: jax.Array) -> jax.Array:
    """Rotates the pairs (i, i + H/2) of every head."""
    first, second = jnp.split(x_TNH, 2, axis=-1)
    cos, sin = cos_TH[:, None], sin_TH[:, None]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
