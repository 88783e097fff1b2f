"""Blockwise softmax attention with sinks, over keys given by position (arXiv 2205.14135).

Positions are data and ascend in every list of queries or keys, so which blocks a query block needs follows from two
comparisons with the first and last position of each block. Blocks outside are not computed; blocks inside are computed
without a mask; only those that the diagonal crosses are masked. The keys of a window are few and lie together: they
are taken as one block that begins where the window of the first query does.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp

from slope_jax.mesh.axes import varying
from slope_jax.mesh.layout import ChunkView
from slope_jax.model.numerics import exp, precision_of
from slope_jax.model.storage import from_bits

_WINDOW_KEYS_MULTIPLE = 64

Carry = tuple[jax.Array, ...]
_FLOOR = -1e30  # the running maximum before any key; finite, so that no difference of infinities can arise


class QueryBlocks(NamedTuple):
    """The blocks of query slots to work on; a block never spans the gap between a rank's two segments.

    Attributes:
      start: first slot of each block.
      end: first slot that no longer belongs to the block's segment.
      number: how many blocks there are.
    """

    start: jax.Array
    end: jax.Array
    number: jax.Array

    @staticmethod
    def of(chunk: ChunkView, size: int) -> QueryBlocks:
        """Divides a chunk's slots into blocks of at most `size`."""
        first = -(-chunk.split // size)
        second = -(-(chunk.num_tokens - chunk.split) // size)
        i = jnp.arange(-(-chunk.positions_T.shape[0] // size) + 1)
        start = jnp.where(i < first, i * size, chunk.split + (i - first) * size)
        return QueryBlocks(start, jnp.where(i < first, chunk.split, chunk.num_tokens), first + second)


class Partial(NamedTuple):
    """Attention over the keys seen so far, all float32.

    Attributes:
      max_KTG: running maximum of the scores.
      sum_KTG: sum of the exponentials, relative to the maximum.
      out_KTGH: weighted sum of the values, relative to the maximum.
      blocks: number of (query block, key block) products computed.
    """

    max_KTG: jax.Array
    sum_KTG: jax.Array
    out_KTGH: jax.Array
    blocks: jax.Array


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """Static parameters of an attention call.

    Attributes:
      block_q: query slots in a block.
      block_kv: keys in a block, where there is no window.
      window: how many keys a query sees, itself included; None for all.
    """

    block_q: int
    block_kv: int
    window: int | None = None

    @property
    def window_keys(self) -> int:
        """Keys in the windows of a block of queries, rounded up to what processors like."""
        assert self.window is not None
        return -(-(self.block_q + self.window - 1) // _WINDOW_KEYS_MULTIPLE) * _WINDOW_KEYS_MULTIPLE

    def padding(self, keys: int) -> int:
        """Slots without a key that must follow so many with one, so that no block is cut short."""
        return -keys % self.block_kv if self.window is None else self.window_keys


def start_partial(sinks_N: jax.Array, tokens: int, kv_heads: int, head_dim: int, spec: AttentionSpec) -> Partial:
    """The result before any key: the sink alone, which has weight but no value.

    Args:
      sinks_N: sink logits of the device's query heads.
      tokens: query slots.
      kv_heads: KV heads on this device.
      head_dim: size of a head.
      spec: the static parameters; the result has `block_q` slots more than `tokens`, so that no block is cut short.
    """
    shape = (kv_heads, tokens + spec.block_q, sinks_N.shape[0] // kv_heads)
    sinks_KTG = jnp.broadcast_to(sinks_N.reshape(kv_heads, 1, -1), shape)
    maximum = jnp.maximum(sinks_KTG, _FLOOR)
    zeros = jnp.zeros((*shape, head_dim), jnp.float32)
    return varying(Partial(maximum, jnp.exp(sinks_KTG - maximum), zeros, jnp.zeros((), jnp.int32)))


def attend(
    partial: Partial,
    q_KTGH: jax.Array,
    positions_T: jax.Array,
    blocks: QueryBlocks,
    kv_JSH: jax.Array,
    positions_S: jax.Array,
    spec: AttentionSpec,
) -> Partial:
    """Adds keys and values to a partial result.

    Args:
      partial: the result so far.
      q_KTGH: queries scaled by `1 / sqrt(H)`, with `block_q` slots of padding at the end, as `bits`.
      positions_T: the queries' positions, padded likewise.
      blocks: the query blocks to work on.
      kv_JSH: keys, then values, of the device's KV heads, as `bits`.
      positions_S: their positions, ascending; negative or `PAD_POSITION` where there is no key.
      spec: the static parameters, which say how many slots at the end of S must be without a key.
    """
    kv_heads, slots, group, head_dim = q_KTGH.shape
    chex.assert_shape(partial.out_KTGH, q_KTGH.shape)
    chex.assert_shape(positions_T, (slots,))
    chex.assert_shape(kv_JSH, (2 * kv_heads, positions_S.shape[0], head_dim))
    k_KSH, v_KSH = kv_JSH[:kv_heads], kv_JSH[kv_heads:]
    block_q = spec.block_q
    if spec.window is None:
        block_kv = spec.block_kv
        chex.assert_is_divisible(positions_S.shape[0], block_kv)
    else:
        block_kv = spec.window_keys
    first_S, last_S = positions_S[::block_kv], positions_S[block_kv - 1 :: block_kv]

    def query_block(i: jax.Array, partial: Partial) -> Partial:
        start, end = blocks.start[i], blocks.end[i]
        rows = [jax.lax.dynamic_slice_in_dim(x, start, block_q, axis=1) for x in (*partial[:3], q_KTGH)]
        q_KRH = from_bits(rows[3]).reshape(kv_heads, block_q * group, head_dim)
        precision = precision_of(q_KRH.dtype)
        q_positions = jax.lax.dynamic_slice_in_dim(positions_T, start, block_q)
        earliest, latest = q_positions[0], q_positions[jnp.minimum(block_q, end - start) - 1]

        def step(first: jax.Array | int, carry: Carry, masked: bool) -> Carry:
            max_KR, sum_KR, out_KRH = carry
            k, v = (jax.lax.dynamic_slice_in_dim(x, first, block_kv, axis=1) for x in (k_KSH, v_KSH))
            k, v = from_bits(k), from_bits(v)
            scores_KRS = jnp.einsum("KRH,KSH->KRS", q_KRH, k, precision=precision, preferred_element_type=jnp.float32)
            if masked:
                key_positions = jax.lax.dynamic_slice_in_dim(positions_S, first, block_kv)
                mask_RS = jnp.repeat(_visible(q_positions, key_positions, spec.window), group, axis=0)
                scores_KRS = jnp.where(mask_RS, scores_KRS, -jnp.inf)
                # A slot without a key may hold anything, and zero times infinity is not zero.
                is_key = (key_positions >= 0) & (key_positions <= latest)
                v = jnp.where(is_key[:, None], v, 0)
            new_max_KR = jnp.maximum(max_KR, jnp.max(scores_KRS, axis=-1))
            # Values and sum see the same rounded weights, so that what they weigh always adds up to one.
            weights_KRS = exp(scores_KRS - new_max_KR[..., None], v.dtype)
            scale_KR = jnp.exp(max_KR - new_max_KR)
            values_KRH = jnp.einsum(
                "KRS,KSH->KRH",
                weights_KRS,
                v,
                precision=precision,
                preferred_element_type=jnp.float32,
            )
            sum_KR = sum_KR * scale_KR + jnp.sum(weights_KRS, axis=-1, dtype=jnp.float32)
            return new_max_KR, sum_KR, out_KRH * scale_KR[..., None] + values_KRH

        carry = tuple(x.reshape(kv_heads, block_q * group, *x.shape[3:]) for x in rows[:3])
        if spec.window is None:
            # Of the keys in ascending blocks, `earliest` sees whole blocks up to `whole`, `latest` parts of them up to
            # `stop`, and none sees anything before `begin`.
            begin, stop = jnp.sum(last_S < 0), jnp.sum(first_S <= latest)
            whole = jnp.maximum(jnp.sum(last_S <= earliest), begin)
            carry = _key_blocks(begin, whole, stop, lambda j, c, masked: step(j * block_kv, c, masked), carry, first_S)
            products = jnp.maximum(stop - begin, 0)
        else:
            oldest = jnp.maximum(earliest - spec.window + 1, 0)
            carry = step(jnp.sum(positions_S < oldest), carry, masked=True)
            products = jnp.int32(1)
        mine = start + jnp.arange(block_q) < end  # the rows after a segment's end belong to another block
        updated = [
            jax.lax.dynamic_update_slice_in_dim(
                whole_x, jnp.where(mine.reshape(1, -1, *[1] * (old.ndim - 2)), new.reshape(old.shape), old), start, 1
            )
            for whole_x, old, new in zip(partial[:3], rows[:3], carry, strict=True)
        ]
        return Partial(updated[0], updated[1], updated[2], partial.blocks + products)

    return jax.lax.fori_loop(0, blocks.number, query_block, partial)


Result = tuple[jax.Array, jax.Array, jax.Array]  # maximum, sum and output of a `Partial`


def merge(a: Result, b: Result) -> Result:
    """The result over the keys of both; a sink must have been counted in one of them only."""
    maximum = jnp.maximum(a[0], b[0])
    scales = [jnp.exp(x[0] - maximum) for x in (a, b)]
    weight = a[1] * scales[0] + b[1] * scales[1]
    return maximum, weight, a[2] * scales[0][..., None] + b[2] * scales[1][..., None]


def finish_partial(partial: Partial, tokens: int) -> jax.Array:
    """The attention output `[tokens, N, H]` in float32; zero for slots that saw neither a key nor a sink."""
    weight_KTG1 = partial.sum_KTG[:, :tokens, :, None]
    out_KTGH = partial.out_KTGH[:, :tokens] / jnp.where(weight_KTG1 == 0, 1, weight_KTG1)
    kv_heads, _, group, head_dim = out_KTGH.shape
    return out_KTGH.transpose(1, 0, 2, 3).reshape(tokens, kv_heads * group, head_dim)


def _key_blocks(
    begin: jax.Array, whole: jax.Array, stop: jax.Array, step: Callable[..., Carry], carry: Carry, first_S: jax.Array
) -> Carry:
    """Takes the steps of blocks `begin` to `whole - 1` without a mask and of `whole` to `stop - 1` with one."""
    if len(first_S) > 1:
        carry = jax.lax.fori_loop(begin, whole, lambda j, c: step(j, c, masked=False), carry)
        return jax.lax.fori_loop(whole, stop, lambda j, c: step(j, c, masked=True), carry)
    # Of a single block, which does not depend on the iteration, a compiler would move the products out of the loops, to
    # where they are computed even if no iteration needs them.
    ways: list[Callable[[Carry], Carry]] = [lambda c: step(0, c, masked=False), lambda c: step(0, c, masked=True)]
    ways.append(lambda c: c)
    which = jnp.where(begin < whole, 0, jnp.where(whole < stop, 1, 2))
    result: Carry = jax.lax.switch(which, ways, carry)
    return result


def _visible(q_positions: jax.Array, key_positions: jax.Array, window: int | None) -> jax.Array:
    q, k = q_positions[:, None], key_positions[None, :]
    oldest = 0 if window is None else jnp.maximum(q - window + 1, 0)
    return (k <= q) & (k >= oldest)
