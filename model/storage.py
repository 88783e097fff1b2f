"""Arrays that are only moved are kept as bits.

XLA on CPU does slices, gathers and updates of bfloat16 in float32, and takes the conversion out of the loop that does
them: it would widen all expert weights of a stage, or the whole KV cache, to read one block of it. Integers it moves as
they are. So bfloat16 weights that are indexed, and the KV cache, are uint16 arrays, turned into bfloat16 where they
enter a product. On other backends the change of type costs nothing.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike


def storage_dtype(dtype: DTypeLike) -> jnp.dtype:
    """The dtype in which values of a dtype are kept: uint16 for bfloat16, otherwise the same."""
    return jnp.dtype(jnp.uint16) if jnp.dtype(dtype) == jnp.bfloat16 else jnp.dtype(dtype)


def value_dtype(stored: DTypeLike) -> jnp.dtype:
    """The dtype of the values in an array, given the dtype in which they are kept."""
    return jnp.dtype(jnp.bfloat16) if jnp.dtype(stored) == jnp.uint16 else jnp.dtype(stored)


def to_bits(x: jax.Array) -> jax.Array:
    """Values in the form in which they are kept."""
    return x if x.dtype == storage_dtype(x.dtype) else jax.lax.bitcast_convert_type(x, storage_dtype(x.dtype))


def from_bits(x: jax.Array) -> jax.Array:
    """Kept values in the form in which they are computed with."""
    return jax.lax.bitcast_convert_type(x, jnp.bfloat16) if x.dtype == jnp.uint16 else x
