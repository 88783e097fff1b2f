"""The work of each device on a prompt, from the layout of its tokens and the rules by which attention skips blocks.

Counts are of one layer, by ring rank: the ulysses ranks of a ring rank do the same attention, each for its own heads.
Attention is counted in products of a query block and a key block, as `attention.Partial.blocks` counts them: a block of
queries has one in a sliding-window layer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from slope_jax.mesh import ring_policy
from slope_jax.mesh.layout import PAD_POSITION, RankTokens
from slope_jax.model.stage import StageSpec

Counts = NDArray[np.int64]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ChunkWork:
    """The work of a layer on a chunk.

    Attributes:
      full: products of a full-attention layer, `[steps, ring]`; the ring ranks wait for each other after each step.
      window: products of a sliding-window layer, `[ring]`.
      rows: tokens of each device, `[ring, sequence ranks]`.
    """

    full: Counts
    window: Counts
    rows: Counts

    def sums(self, full: int, window: int) -> Counts:
        """Products of both kinds, `[ring]`, each of which counts as much as it is said to."""
        return full * self.full.sum(axis=0) + window * self.window

    def slowest(self, full: int, window: int) -> int:
        """The same sum when every step lasts as long as on the busiest ring rank."""
        return int(full * self.full.max(axis=1).sum() + window * self.window.max())


def chunk_work(
    ranks: Sequence[RankTokens],
    cached: Sequence[NDArray[np.int32]],
    spec: StageSpec,
    sequence_ranks: int,
    ring_pass: str,
) -> ChunkWork:
    """Counts the work of a layer on a chunk.

    Args:
      ranks: the tokens of the chunk on each ring rank.
      cached: the positions that earlier chunks of the prompt left on each ring rank, in the order of their slots.
      spec: the static parameters of the stage.
      sequence_ranks: over how many ulysses ranks the tokens of a ring rank are spread.
      ring_pass: what goes round the ring, keys and values or queries (see `mesh.pass_choice`).
    """
    ring = len(ranks)
    held = [np.concatenate([before, rank.positions]) for before, rank in zip(cached, ranks, strict=True)]
    rounds = max(-(-len(positions) // spec.ring_block) for positions in held)
    keys = [_padded(positions, rounds * spec.ring_block) for positions in held]
    # The queries of rank r meet the keys of rank r - s: if keys go round, on rank r in step s; if queries go, on rank
    # r - s, to which it takes them -s steps.
    full = np.zeros((rounds, ring, ring), np.int64)
    in_window = np.zeros(ring, np.int64)
    for rank, tokens in enumerate(ranks):
        latest = _last_of_query_blocks(tokens, spec.block_q)
        for step in range(ring):
            holder = (rank - step) % ring
            first_RS = keys[holder][:: spec.block_kv].reshape(rounds, -1)
            products = (first_RS[:, None] <= latest[:, None]).sum(axis=(1, 2))
            if ring_pass == ring_policy.KV:
                full[:, step, rank] = products
            else:
                full[:, -step % ring, holder] = products
        in_window[rank] = len(latest)
    counts = np.array([len(tokens.positions) for tokens in ranks])
    rows = -(-(counts[:, None] - np.arange(sequence_ranks)) // sequence_ranks)
    steps = full.reshape(-1, ring) if ring_pass == ring_policy.KV else full.sum(axis=0)
    return ChunkWork(full=steps, window=in_window, rows=np.maximum(rows, 0))


def _last_of_query_blocks(tokens: RankTokens, size: int) -> NDArray[np.int32]:
    """The last position of each block of queries; no block spans the gap between two segments."""
    segments = [tokens.positions[: tokens.split], tokens.positions[tokens.split :]]
    blocks = [segment[i : i + size] for segment in segments for i in range(0, len(segment), size)]
    return np.array([block[-1] for block in blocks], np.int32)


def _padded(positions: NDArray[np.int32], length: int) -> NDArray[np.int32]:
    return np.pad(positions, (0, length - len(positions)), constant_values=PAD_POSITION)
