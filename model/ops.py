"""Matrix product and norm with the precision rules of the engine."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike


def precision_of(dtype: DTypeLike) -> jax.lax.Precision | None:
    """The matmul precision for operands of a dtype: float32 stays float32 on every backend."""
    return jax.lax.Precision.HIGHEST if dtype == jnp.float32 else None


def dot(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """`x @ kernel` accumulated in float32, `x` rounded to the dtype of the kernel."""
    return jax.lax.dot(
        x.astype(kernel.dtype), kernel, precision=precision_of(kernel.dtype), preferred_element_type=jnp.float32
    )


def rms_norm(x_TD: jax.Array, scale_D: jax.Array, eps: float) -> jax.Array:
    """Root-mean-square norm of the last axis in float32, the scale included."""
    return x_TD * jax.lax.rsqrt(jnp.mean(jnp.square(x_TD), axis=-1, keepdims=True) + eps) * scale_D
