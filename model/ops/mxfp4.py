"""MXFP4 weights: 4-bit floats in blocks of 32 that share a power-of-two scale (OCP Microscaling Formats 1.0).

A block is 16 bytes along the contraction: byte b holds value 2b in its low nibble and 2b + 1 in its high one. A nibble
is sign, two exponent bits and one mantissa bit; the scale byte s (E8M0) stands for 2^(s - 127).

    nibble   0  1   2  3    4  5  6  7    8..15
    value    0  .5  1  1.5  2  3  4  6    the same, negative

Every product is exact in bfloat16 and float32, subnormal ones included; those of 2^128 and more are infinite.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import lax
from jax.typing import DTypeLike

BLOCK = 32  # values that share one scale
BLOCK_BYTES = BLOCK // 2
NAN_SCALE = 255  # the one scale byte that is not a number

_VALUES = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0], np.float32)


def check_scales(scales: np.ndarray, where: str) -> None:
    """Raises ValueError, saying `where`, when a scale byte is 255 (not a number)."""
    if scales.size and scales.max() == NAN_SCALE:
        position = tuple(int(i) for i in np.unravel_index(int(scales.argmax()), scales.shape))
        raise ValueError(f"{where}: the MXFP4 scale at {position} is {NAN_SCALE}, which is not a number")


def dequantize(blocks: np.ndarray, scales: np.ndarray, dtype: DTypeLike = np.float32) -> np.ndarray:
    """Unpacks MXFP4 on the host, by table and `ldexp`.

    Args:
      blocks: uint8 `[..., n, 16]`.
      scales: uint8 `[..., n]`.
      dtype: float32 or bfloat16; both hold every value exactly.

    Returns:
      `[..., n * 32]` of `dtype`.

    Raises:
      ValueError: shapes or dtypes do not fit, or a scale is 255.
    """
    _check(blocks, scales, dtype)
    check_scales(scales, "dequantize")
    nibbles = np.stack([blocks & 0x0F, blocks >> 4], axis=-1).reshape(*scales.shape, BLOCK)
    with np.errstate(over="ignore"):
        values = np.ldexp(_VALUES[nibbles], scales.astype(np.int32)[..., None] - 127)
    return values.reshape(*scales.shape[:-1], -1).astype(dtype)


def unpack(blocks: jax.Array, scales: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Unpacks MXFP4 on the device by integer arithmetic on the bits of the result.

    No floating-point operation takes part, so the result does not depend on how a backend treats subnormal numbers,
    and no 4-bit type is needed. A scale of 255 is not looked for here: see `check_scales`.

    Args:
      blocks: uint8 `[..., n, 16]`.
      scales: uint8 `[..., n]`.
      dtype: float32 or bfloat16.

    Returns:
      `[..., n * 32]` of `dtype`, equal to `dequantize`.

    Raises:
      ValueError: shapes or dtypes do not fit.
    """
    _check(blocks, scales, dtype)
    nibbles = jnp.stack([blocks & 0x0F, blocks >> 4], axis=-1).reshape(*scales.shape, BLOCK).astype(jnp.int32)
    code = nibbles & 7
    # A code is (1 + mantissa / 2) * 2^(exponent - 1), but for 1, which is 2^-1, and 0. `exponent` is the biased
    # exponent of the product; bfloat16 has 8 exponent and 7 mantissa bits.
    exponent = (code >> 1) - 1 + scales.astype(jnp.int32)[..., None]
    mantissa = jnp.where(code == 1, 0, (code & 1) << 6)
    normal = (exponent << 7) | mantissa
    subnormal = (128 | mantissa) >> jnp.clip(1 - exponent, min=0, max=8)
    magnitude = jnp.where(exponent > 0, jnp.minimum(normal, 0x7F80), subnormal)
    magnitude = jnp.where(code == 0, 0, magnitude)
    bits = (((nibbles & 8) << 12) | magnitude).reshape(*scales.shape[:-1], -1)
    if jnp.dtype(dtype) == jnp.bfloat16:
        return lax.bitcast_convert_type(bits.astype(jnp.uint16), jnp.bfloat16)
    return lax.bitcast_convert_type(bits << 16, jnp.float32)


def _check(blocks: np.ndarray | jax.Array, scales: np.ndarray | jax.Array, dtype: DTypeLike) -> None:
    if jnp.dtype(dtype) not in (np.float32, ml_dtypes.bfloat16):
        raise ValueError(f"MXFP4 unpacks to float32 or bfloat16, not {jnp.dtype(dtype)}")
    if blocks.dtype != np.uint8 or scales.dtype != np.uint8:
        raise ValueError(f"MXFP4 blocks and scales are uint8, not {blocks.dtype} and {scales.dtype}")
    if blocks.shape != (*scales.shape, BLOCK_BYTES):
        raise ValueError(
            f"MXFP4 blocks {blocks.shape} must be the shape of the scales {scales.shape} and {BLOCK_BYTES}"
        )
