"""Ring attention: keys and values go round the ring while queries stay, or the other way round.

    pass-KV (arXiv 2310.01889)                        pass-Q (arXiv 2411.01783, algorithm 3)
    rank 0 --kv 0--> rank 1 --kv 1--> rank 2          rank 0 --q 0--> rank 1 --q 1--> rank 2
                                                         ^---result of q 0---'
Whichever is better in a tick, `pass_choice` says.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp

from slope_jax.mesh.axes import RING, varying

Partial = TypeVar("Partial")
Queries = TypeVar("Queries")
KVBlock = tuple[jax.Array, jax.Array]  # keys and values of a block, and their positions


def pass_kv(
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
    next_rank = _ranks_after(1)

    def step(_: jax.Array, carry: tuple[KVBlock, Partial]) -> tuple[KVBlock, Partial]:
        block, partial = carry
        following = jax.lax.ppermute(block, RING, next_rank)
        return following, attend(partial, block)

    def one_round(b: jax.Array, partial: Partial) -> Partial:
        block = read_block(b)
        if ring > 1:
            block, partial = jax.lax.fori_loop(0, ring - 1, step, (block, partial))
        return attend(partial, block)

    return jax.lax.fori_loop(0, num_blocks, one_round, partial)


def pass_q(
    visit: Callable[[Queries], tuple[Partial, jax.Array]],
    merge: Callable[[Partial, Partial], Partial],
    queries: Queries,
    partial: Partial,
) -> tuple[Partial, jax.Array]:
    """Lets this device's queries attend to the KV of all ring ranks, by going there.

    In step s every rank works on the queries of the rank s places before it and sends the result straight home, while
    the next queries are already on their way. All devices of the mesh must call it together: the exchanges are
    operations over the whole mesh.

    Args:
      visit: the result of the queries of any rank with this rank's KV alone, and how much work that was.
      merge: puts results of the same queries with different keys together.
      queries: of this rank; what `visit` has to know of them, so that they can go to another.
      partial: what this rank's queries start with.

    Returns:
      The result of this rank's queries with all keys, and the work that was done on this device.
    """
    ring = jax.lax.axis_size(RING)
    total = varying(jnp.zeros((), jnp.int32))
    for step in range(ring):
        following = jax.lax.ppermute(queries, RING, _ranks_after(1)) if step < ring - 1 else queries
        found, work = visit(queries)
        if step:
            found = jax.lax.ppermute(found, RING, _ranks_after(-step))
        partial = merge(partial, found)
        total = total + work
        queries = following
    return partial, total


def _ranks_after(places: int) -> list[tuple[int, int]]:
    ring = jax.lax.axis_size(RING)
    return [(r, (r + places) % ring) for r in range(ring)]
