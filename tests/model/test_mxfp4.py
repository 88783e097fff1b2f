"""MXFP4 decodes exactly, on the host and on the device (CASES G17, G18)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from slope_jax.model.ops import mxfp4

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
FLOAT32 = np.dtype(np.float32)


def on_device(blocks: np.ndarray, scales: np.ndarray, dtype: np.dtype) -> np.ndarray:
    return np.asarray(jax.jit(mxfp4.unpack, static_argnums=2)(blocks, scales, dtype))


BOTH = pytest.mark.parametrize("decode", [mxfp4.dequantize, on_device], ids=["host", "device"])
DTYPES = pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT32], ids=str)


def by_float64(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """The definition, one value at a time, in float64."""
    out = np.empty((*scales.shape, 32))
    for where in np.ndindex(*scales.shape):
        for i in range(32):
            nibble = int(blocks[where][i // 2]) >> (4 * (i % 2)) & 15
            exponent, mantissa = nibble >> 1 & 3, nibble & 1
            size = (1 + mantissa / 2) * 2.0 ** (exponent - 1) if exponent else mantissa / 2
            out[(*where, i)] = np.copysign(np.ldexp(size, int(scales[where]) - 127), -1 if nibble & 8 else 1)
    return out.reshape(*scales.shape[:-1], -1)


@BOTH
@DTYPES
@pytest.mark.parametrize(("scale", "factor"), [(127, 1.0), (125, 0.25)])
def test_low_nibble_comes_first(decode: Callable[..., np.ndarray], dtype: np.dtype, scale: int, factor: float) -> None:
    """Case G17."""
    blocks = np.zeros((1, 16), np.uint8)
    blocks[0, :4] = [0x21, 0x7F, 0x80, 0x3A]
    values = decode(blocks, np.array([scale], np.uint8), dtype)
    wanted = np.array([0.5, 1, -6, 6, 0, -0.0, -1, 1.5]) * factor
    np.testing.assert_array_equal(values[:8].astype(np.float64), wanted)
    np.testing.assert_array_equal(np.signbit(values[:8]), np.signbit(wanted))
    assert not values[8:].any()


@BOTH
@DTYPES
def test_all_scales_and_nibbles_are_exact(decode: Callable[..., np.ndarray], dtype: np.dtype) -> None:
    """Case G18: every scale with every byte, against float64; subnormal and infinite results included."""
    scales = np.repeat(np.arange(255, dtype=np.uint8)[:, None], 16, axis=1)
    blocks = np.broadcast_to(np.arange(256, dtype=np.uint8).reshape(16, 16), (255, 16, 16)).copy()
    wanted = by_float64(blocks, scales)
    with np.errstate(over="ignore"):
        rounded = wanted.astype(np.float32)
    finite = np.isfinite(rounded)
    assert (rounded[finite] == wanted[finite]).all(), "float32 holds every finite value exactly"
    assert (~finite).sum() == (np.abs(wanted) >= 2.0**128).sum() > 0
    values = decode(blocks, scales, dtype)
    assert values.dtype == dtype
    assert values.astype(np.float32).tobytes() == rounded.tobytes()


@BOTH
def test_scales_in_one_tensor(decode: Callable[..., np.ndarray]) -> None:
    """Case G18: a subtraction in uint8 would wrap, and the axes would be mixed up if a size were repeated."""
    rng = np.random.default_rng(3)
    scales = rng.choice(np.array([0, 1, 100, 126, 127, 130, 254], np.uint8), (3, 5, 2))
    blocks = rng.integers(0, 256, (3, 5, 2, 16), np.uint8)
    with np.errstate(over="ignore"):
        wanted = by_float64(blocks, scales).astype(np.float32)
    np.testing.assert_array_equal(decode(blocks, scales, FLOAT32), wanted)
    assert wanted.shape == (3, 5, 64)


def test_unpack_in_a_loop_over_experts() -> None:
    """The use that the expert layers make of it: one expert's slice by a traced index."""
    rng = np.random.default_rng(4)
    blocks = rng.integers(0, 256, (6, 4, 3, 16), np.uint8)
    scales = rng.integers(110, 140, (6, 4, 3), np.uint8)

    @functools.partial(jax.jit, static_argnums=2)
    def total(blocks: jax.Array, scales: jax.Array, dtype: Any) -> jax.Array:
        def step(e: jax.Array, sums: jax.Array) -> jax.Array:
            return sums + mxfp4.unpack(blocks[e], scales[e], dtype).astype(jnp.float32)

        return jax.lax.fori_loop(0, blocks.shape[0], step, jnp.zeros((4, 96)))

    wanted = by_float64(blocks, scales)
    for dtype in (BFLOAT16, FLOAT32):
        np.testing.assert_allclose(np.asarray(total(blocks, scales, dtype)), wanted.sum(axis=0), rtol=1e-5, atol=1e-3)


def test_scale_255_is_refused_with_its_place() -> None:
    scales = np.full((2, 3), 127, np.uint8)
    mxfp4.check_scales(scales, "file: tensor")
    scales[1, 2] = 255
    with pytest.raises(ValueError, match=r"file: tensor: .* \(1, 2\) is 255"):
        mxfp4.check_scales(scales, "file: tensor")
    with pytest.raises(ValueError, match="255"):
        mxfp4.dequantize(np.zeros((2, 3, 16), np.uint8), scales)


@BOTH
def test_shapes_and_types_that_do_not_fit_are_refused(decode: Callable[..., np.ndarray]) -> None:
    blocks, scales = np.zeros((2, 3, 16), np.uint8), np.zeros((2, 3), np.uint8)
    with pytest.raises(ValueError, match=r"\(2, 3, 16\) must be the shape of the scales \(2,\)"):
        decode(blocks, scales[:, 0], FLOAT32)
    with pytest.raises(ValueError, match="uint8, not int8"):
        decode(blocks.astype(np.int8), scales, FLOAT32)
    with pytest.raises(ValueError, match="not float16"):
        decode(blocks, scales, np.dtype(np.float16))
