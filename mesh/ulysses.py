"""Ulysses: exchange sequence shards for head shards before attention and back after it (arXiv 2309.14509)."""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp

from slope_jax.mesh.axes import ULYSSES


def scatter_heads(q_TNH: jax.Array, k_TKH: jax.Array, v_TKH: jax.Array, ranks: int) -> tuple[jax.Array, jax.Array]:
    """Gives every ulysses rank all tokens of its ring rank for its share of the heads, in one exchange.

    Where the degree exceeds the number of KV heads, each KV head is sent to the ranks of its query heads: rank u gets
    KV head `u * K // ulysses`.

    Args:
      q_TNH: queries of this device's tokens, all N heads.
      k_TKH: keys, all K heads.
      v_TKH: values, all K heads.
      ranks: over how many ulysses ranks the tokens of a ring rank are spread, all of them or 1; with 1, arrays hold all
        tokens and the device's heads already.

    Returns:
      Queries `[slots, N / ranks, H]` and keys followed by values `[slots, 2 max(K / ranks, 1), H]`, by slot.
    """
    rows, _, head_dim = q_TNH.shape
    chex.assert_equal_shape([k_TKH, v_TKH])
    chex.assert_shape(k_TKH, (rows, None, head_dim))
    if ranks == 1:
        return q_TNH, jnp.concatenate([k_TKH, v_TKH], axis=1)
    repeats = max(ranks // k_TKH.shape[1], 1)
    k, v = (jnp.repeat(x, repeats, axis=1) for x in (k_TKH, v_TKH))
    parts = [x.reshape(rows, ranks, -1, head_dim) for x in (q_TNH, k, v)]
    mixed = jax.lax.all_to_all(jnp.concatenate(parts, axis=2), ULYSSES, split_axis=1, concat_axis=1)
    mixed = mixed.reshape(rows * ranks, -1, head_dim)
    query_heads = q_TNH.shape[1] // ranks
    return mixed[:, :query_heads], mixed[:, query_heads:]


def gather_heads(out_TNH: jax.Array, ranks: int) -> jax.Array:
    """Undoes `scatter_heads` for the attention output.

    Args:
      out_TNH: `[slots, N / ranks, H]`.
      ranks: as of `scatter_heads`.

    Returns:
      `[rows, N * H]`: the device's own tokens with all heads.
    """
    if ranks == 1:
        return out_TNH.reshape(out_TNH.shape[0], -1)
    split = out_TNH.reshape(out_TNH.shape[0] // ranks, ranks, -1)
    return jax.lax.all_to_all(split, ULYSSES, split_axis=1, concat_axis=1).reshape(split.shape[0], -1)
