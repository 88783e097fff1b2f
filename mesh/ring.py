"""Ring attention: keys and values pass round the ring while queries stay (pass-KV; arXiv 2310.01889)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import jax

from slope_jax.mesh.axes import RING

Partial = TypeVar("Partial")
KVBlock = tuple[jax.Array, jax.Array]  # keys and values of a block, and their positions


def ring_scan(
    attend: Callable[[Partial, KVBlock], Partial],
    read_block: Callable[[jax.Array], KVBlock],
    num_blocks: jax.Array,
    partial: Partial,
) -> Partial:
    """Lets this device's queries attend to the KV of all ring ranks, block by block.

    In round b every rank reads block b of its own KV and sends it on as soon as it has it, so the transfer of the next
    block runs beside the attention to the present one. All devices of the mesh must give the same `num_blocks`: the
    exchange is one operation over the whole mesh.

    Args:
      attend: adds a block to the partial result.
      read_block: gives block b of this rank's KV.
      num_blocks: rounds, the same number on every device.
      partial: the result so far.
    """
    ring = jax.lax.axis_size(RING)
    next_rank = [(r, (r + 1) % ring) for r in range(ring)]

    def one_round(b: jax.Array, partial: Partial) -> Partial:
        block = read_block(b)
        for step in range(ring):
            following = jax.lax.ppermute(block, RING, next_rank) if step < ring - 1 else block
            partial = attend(partial, block)
            block = following
        return partial

    return jax.lax.fori_loop(0, num_blocks, one_round, partial)
