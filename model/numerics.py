"""Matrix product, exponential and norm with the precision rules of the engine."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike


def precision_of(dtype: DTypeLike) -> jax.lax.Precision | None:
    """The matmul precision for operands of a dtype: float32 stays float32 on every backend."""
    return jax.lax.Precision.HIGHEST if dtype == jnp.float32 else None


def dot(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """`x @ kernel` accumulated in float32, `x` rounded to the dtype of the kernel."""
    return jax.lax.dot(
        x.astype(kernel.dtype), kernel, precision=precision_of(kernel.dtype), preferred_element_type=jnp.float32
    )


def exp(x: jax.Array, dtype: DTypeLike) -> jax.Array:
    """The exponential of float32 numbers that are at most 0, rounded to `dtype`.

    CPUs, which have no instruction for it, compute it for bfloat16 with a relative error below 1e-5, a
    hundredth of its rounding.
    """
    if dtype != jnp.bfloat16:
        return jnp.exp(x).astype(dtype)
    return jax.lax.platform_dependent(x, cpu=_short_exp, default=jnp.exp).astype(dtype)


# 2**f for f in [-1/2, 1/2] by powers of f, with the least largest relative error.
_EXP2_OF_FRACTION = (0.99999926, 0.69312181, 0.24024745, 0.05591786, 0.0095701)
_ROUNDS_TO_INTEGER = 1.5 * 2**23  # adding it leaves no place for a fraction in a float32
_MANTISSA_BITS = 23


def _short_exp(x: jax.Array) -> jax.Array:
    y = x * jnp.float32(math.log2(math.e))
    y_normal = jnp.maximum(y, -126)  # below, a float32 has no exponent of its own
    # The low bits of the sum are the nearest integer, and are read as such: the compiler takes `(y + c) - c` for y.
    shifted = jax.lax.bitcast_convert_type(y_normal + jnp.float32(_ROUNDS_TO_INTEGER), jnp.int32)
    integer = shifted - np.float32(_ROUNDS_TO_INTEGER).view(np.int32)
    fraction = y_normal - integer.astype(jnp.float32)
    power = jnp.full_like(fraction, _EXP2_OF_FRACTION[-1])
    for coefficient in _EXP2_OF_FRACTION[-2::-1]:
        power = power * fraction + jnp.float32(coefficient)
    bits = jax.lax.bitcast_convert_type(power, jnp.int32) + (integer << _MANTISSA_BITS)  # added to the exponent
    result = jnp.where(y < -126, 0, jax.lax.bitcast_convert_type(bits, jnp.float32))
    return jnp.where(jnp.isnan(x), x, result)


def rms_norm(x_TD: jax.Array, scale_D: jax.Array, eps: float) -> jax.Array:
    """Root-mean-square norm of the last axis in float32, the scale included."""
    return x_TD * jax.lax.rsqrt(jnp.mean(jnp.square(x_TD), axis=-1, keepdims=True) + eps) * scale_D
