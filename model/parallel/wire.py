"""Rows as they travel between devices: runs of 16-bit words, so that all that belongs to a row is one message.

Values of bfloat16 are one word each, those of float32 two. Partial results of a bfloat16 model take one word too, in
fixed point: blocks of up to 64 neighbouring values share a float32 scale, the largest of them over 32767. The error,
half a scale at most, is some forty times below that of rounding to bfloat16, for as many bytes.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

BLOCK = 64  # values that share a scale, or fewer where the width of a row is not a multiple of it
_LARGEST = 32767  # of a fixed-point value
_LEAST = 1e-30  # taken for the largest value of a block that has none above it, so that no scale is zero


def to_words(x: jax.Array) -> jax.Array:
    """An array of a type of two or four bytes as uint16, its last axis twice as long in the second case."""
    words = jax.lax.bitcast_convert_type(x, jnp.uint16)
    return words if words.ndim == x.ndim else words.reshape(*x.shape[:-1], -1)


def from_words(words: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Undoes `to_words`."""
    if jnp.dtype(dtype).itemsize == 2:
        return jax.lax.bitcast_convert_type(words, dtype)
    return jax.lax.bitcast_convert_type(words.reshape(*words.shape[:-1], -1, 2), dtype)


def fixed_point_words(width: int) -> int:
    """Words of a row of `width` values in fixed point."""
    return width + 2 * (width // _block(width))


def to_fixed_point(x: jax.Array) -> jax.Array:
    """Rows of float32 values in fixed point, as words: the values, then the scales.

    A block with a value that is not finite comes back with none that is.
    """
    blocks = x.reshape(*x.shape[:-1], -1, _block(x.shape[-1]))
    # The largest magnitude by its bits, of which those of NaN are the greatest: a maximum of floats on CPU drops NaN.
    bits = jax.lax.bitcast_convert_type(jnp.abs(blocks), jnp.int32)
    largest = jax.lax.bitcast_convert_type(jnp.max(bits, axis=-1, keepdims=True), jnp.float32)
    scales = jnp.where(largest < _LEAST, _LEAST, largest) / _LARGEST
    values = jnp.round(blocks / scales).astype(jnp.int16).reshape(x.shape)
    return jnp.concatenate([to_words(values), to_words(scales[..., 0])], axis=-1)


def from_fixed_point(words: jax.Array, width: int) -> jax.Array:
    """Undoes `to_fixed_point` for rows of `width` values."""
    values = from_words(words[..., :width], jnp.int16).astype(jnp.float32)
    scales = from_words(words[..., width:], jnp.float32)
    return (values.reshape(*scales.shape, -1) * scales[..., None]).reshape(values.shape)


def _block(width: int) -> int:
    return math.gcd(width, BLOCK)
