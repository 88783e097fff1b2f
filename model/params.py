"""How parameters are declared: once, with shape, dtype and sharding."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from slope_jax.model.storage import storage_dtype


def param(shape: tuple[int, ...], dtype: DTypeLike, *spec: str | tuple[str, ...] | None) -> nnx.Param[jax.Array]:
    """Declares a parameter of a global shape, split over mesh axes as `spec` says.

    Modules are only ever built under `nnx.eval_shape`, so the zeros are shapes and nothing is allocated: the values
    come from a checkpoint.
    """
    return nnx.Param(jnp.zeros(shape, dtype), out_sharding=PartitionSpec(*spec))


def kernel(shape: tuple[int, ...], dtype: DTypeLike, *spec: str | tuple[str, ...] | None) -> nnx.Param[jax.Array]:
    """Declares weights of which parts are read by index, and which are therefore kept as `bits`."""
    return param(shape, storage_dtype(dtype), *spec)
