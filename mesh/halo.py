"""The keys that sliding-window layers need from before each segment, by two small neighbour exchanges.

The window of a segment's first token reaches window - 1 keys back. By the rules of `layout` they lie at the end of the
segment before it: for a rank's first segment on the rank below (on rank 0: the tail of the chunk before), for its
second segment on the rank above. Spliced in, they make a band in which positions ascend:

    [ halo | first segment | halo | second segment | padding ]

The rank in the middle of the zigzag, whose two segments are neighbours, has no second halo (`split` says so).
"""

from __future__ import annotations

from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp

from slope_jax.mesh.axes import RING
from slope_jax.mesh.layout import PAD_POSITION, ChunkView


class Band(NamedTuple):
    """The keys and values of a window layer in position order.

    Attributes:
      kv_SJH: keys, then values, of the heads of this device.
      positions_S: their positions; negative or later than any query where there is no key.
    """

    kv_SJH: jax.Array
    positions_S: jax.Array


def window_band(kv_TJH: jax.Array, tail_WJH: jax.Array, chunk: ChunkView, padding: int) -> Band:
    """Splices the halos into the keys and values of a window layer.

    Args:
      kv_TJH: keys and values of the tokens on this ring rank, by slot.
      tail_WJH: those of the last `window` tokens before the chunk; only rank 0's is used.
      chunk: what this device knows of the chunk.
      padding: slots without a key at the end of the band.
    """
    reach = tail_WJH.shape[0] - 1
    chex.assert_shape(chunk.positions_T, (kv_TJH.shape[0],))
    chex.assert_equal_shape_suffix([kv_TJH, tail_WJH], 2)
    below, above = _exchange(kv_TJH, tail_WJH[1:], chunk, reach)
    length = kv_TJH.shape[0] + 2 * reach + padding
    kv = _splice(kv_TJH, below, above, chunk.split, length, 0)
    first, second = chunk.positions_T[0], _position_at(chunk, chunk.split)
    steps = jnp.arange(-reach, 0, dtype=jnp.int32)
    positions = _splice(
        chunk.positions_T,
        first + steps,
        jnp.where(chunk.split < chunk.num_tokens, second + steps, PAD_POSITION),
        chunk.split,
        length,
        PAD_POSITION,
    )
    return Band(kv, positions)


def band_tail(band: Band, chunk: ChunkView, window: int) -> jax.Array:
    """The keys and values `[window, J, H]` of the last tokens of the chunk, on the rank that holds its last token."""
    halos = jnp.where(chunk.split < chunk.num_tokens, 2, 1)
    end = chunk.num_tokens + halos * (window - 1)
    return jax.lax.dynamic_slice_in_dim(band.kv_SJH, end - window, window)


def _exchange(kv_TJH: jax.Array, tail: jax.Array, chunk: ChunkView, reach: int) -> tuple[jax.Array, jax.Array]:
    ring = jax.lax.axis_size(RING)
    end_of_first = jax.lax.dynamic_slice_in_dim(kv_TJH, chunk.split - reach, reach)
    end_of_second = jax.lax.dynamic_slice_in_dim(kv_TJH, chunk.num_tokens - reach, reach)
    below = jax.lax.ppermute(end_of_first, RING, [(r, r + 1) for r in range(ring - 1)])
    above = jax.lax.ppermute(end_of_second, RING, [(r + 1, r) for r in range(ring - 1)])
    return jnp.where(jax.lax.axis_index(RING) == 0, tail, below), above


def _splice(rows: jax.Array, below: jax.Array, above: jax.Array, split: jax.Array, length: int, fill: int) -> jax.Array:
    reach = below.shape[0]

    def shifted(by: int) -> jax.Array:
        pads = [(by, length - by - rows.shape[0])] + [(0, 0)] * (rows.ndim - 1)
        return jnp.pad(rows, pads, constant_values=fill)

    before_gap = jnp.arange(length) < reach + split
    band = jnp.where(before_gap.reshape(-1, *[1] * (rows.ndim - 1)), shifted(reach), shifted(2 * reach))
    band = jax.lax.dynamic_update_slice_in_dim(band, above.astype(rows.dtype), reach + split, axis=0)
    return jax.lax.dynamic_update_slice_in_dim(band, below.astype(rows.dtype), 0, axis=0)


def _position_at(chunk: ChunkView, slot: jax.Array) -> jax.Array:
    return jax.lax.dynamic_index_in_dim(chunk.positions_T, slot, keepdims=False)
