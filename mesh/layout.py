"""Where the tokens of a chunk lie on the mesh: zigzag over the ring, striped over ulysses.

A chunk of n tokens is cut into 2m equal segments, m being the ring ranks that take part. Rank r < m holds segment r and
then segment 2m-1-r, packed without a gap into the first slots of its share of the bucket; the other ranks hold nothing.
Causal work is then the same on all m ranks:

    m = 3       rank 0        rank 1        rank 2
                [ 0 | 5 ]     [ 1 | 4 ]     [ 2 . 3 ]       | is the split, rank 2 has none: 2 and 3 are neighbours

Slot i of a ring rank is row i // ulysses of its ulysses rank i % ulysses, so padding is spread evenly, and where a
token lies does not depend on the bucket. (In tensor parallelism every ulysses rank holds all slots.) All ranks take
part once a chunk has 2 * ring * (window - 1) tokens; below that, m is as large as keeps every segment at least window -
1 long. So the keys that a segment's window needs from before it always lie at the end of the one segment before it, on
a neighbour (see `halo`), and the last tokens of a chunk, which the next chunk needs, lie on rank 0, which needs them.
"""

from __future__ import annotations

import dataclasses
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np

from slope_jax.mesh.axes import ULYSSES, MeshShape

PAD_POSITION = np.iinfo(np.int32).max  # of slots without a token: later than every query, so never attended to


@dataclasses.dataclass(frozen=True, slots=True)
class RankTokens:
    """The tokens of a chunk that one ring rank holds.

    Attributes:
      positions: int32 `[tokens]`, positions in the prompt, ascending.
      split: how many of them stand before the gap between the rank's two segments; all of them if there is no gap.
    """

    positions: np.ndarray
    split: int


def active_ranks(num_tokens: int | np.ndarray, ring: int, window: int) -> np.ndarray:
    """How many ring ranks hold tokens of a chunk of `num_tokens` (element by element)."""
    return np.clip(np.asarray(num_tokens) // (2 * max(window - 1, 1)), 1, ring)


def zigzag(start: int, num_tokens: int, ring: int, window: int) -> list[RankTokens]:
    """The tokens of every ring rank, for a chunk of `num_tokens` that begins at position `start`."""
    ranks = int(active_ranks(num_tokens, ring, window))
    bounds = [start + j * num_tokens // (2 * ranks) for j in range(2 * ranks + 1)]
    layout = []
    for rank in range(ring):
        if rank >= ranks:
            layout.append(RankTokens(np.zeros(0, np.int32), 0))
            continue
        mirror = 2 * ranks - 1 - rank
        first = np.arange(bounds[rank], bounds[rank + 1], dtype=np.int32)
        second = np.arange(bounds[mirror], bounds[mirror + 1], dtype=np.int32)
        positions = np.concatenate([first, second])
        layout.append(RankTokens(positions, len(first) if rank < ranks - 1 else len(positions)))
    return layout


def largest_share(num_tokens: int | np.ndarray, ring: int, window: int) -> np.ndarray:
    """An upper bound, tight to two tokens, on the tokens of a chunk that one ring rank holds (element by element)."""
    ranks = active_ranks(num_tokens, ring, window)
    return 2 * -(-np.asarray(num_tokens) // (2 * ranks))


def smallest_bucket(shape: MeshShape, window: int) -> int:
    """The smallest bucket, in tokens, in which every chunk that is no longer than it has room on every rank."""
    per_rank = max(4 * (window - 1) + 2 if shape.ring > 1 else window, 16)
    return _round_up(per_rank * shape.ring, bucket_unit(shape))


def bucket_unit(shape: MeshShape) -> int:
    """Buckets are multiples of this number of tokens."""
    return shape.ring * math.lcm(2, shape.ulysses)


def length_buckets(chunk_tokens: int, shape: MeshShape, window: int) -> tuple[int, ...]:
    """The token counts that chunks are padded to, ascending, each at most twice the one before."""
    unit, smallest = bucket_unit(shape), smallest_bucket(shape, window)
    largest = max(_round_up(chunk_tokens, unit), smallest)
    buckets = [largest]
    while buckets[-1] > smallest:
        buckets.append(max(_round_up(-(-buckets[-1] // 2), unit), smallest))
    return tuple(reversed(buckets))


def plan_chunks(num_tokens: int, chunk_tokens: int) -> list[tuple[int, int]]:
    """Divides a prompt into the fewest chunks of at most `chunk_tokens`, all of one length to a token.

    Equal chunks share a bucket, fill the pipeline evenly and leave no short last chunk that costs a whole tick.

    Returns:
      The (start, length) of every chunk, in order.
    """
    chunks = -(-num_tokens // chunk_tokens)
    bounds = [i * num_tokens // chunks for i in range(chunks + 1)]
    return [(a, b - a) for a, b in itertools.pairwise(bounds)]


def prompt_positions(num_tokens: int, chunk_tokens: int, ring: int, window: int) -> list[np.ndarray]:
    """The positions of a whole prompt that each ring rank holds, in the order of its slots."""
    chunks = [zigzag(start, n, ring, window) for start, n in plan_chunks(num_tokens, chunk_tokens)]
    return [np.concatenate([chunk[rank].positions for chunk in chunks]) for rank in range(ring)]


def sequence_rank(ranks: int) -> jax.Array:
    """Which part of its ring rank's tokens a device holds, when these are spread over `ranks` ulysses ranks.

    They are spread over all of them, or over 1: then every ulysses rank holds all.
    """
    return jax.lax.axis_index(ULYSSES) % ranks


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ChunkView:
    """What a device knows of the chunk in its stage: data, never constants of the program.

    Attributes:
      num_tokens: tokens of the chunk on this ring rank (0: the stage is idle).
      split: see `RankTokens`.
      cached: tokens of the same prompt that earlier chunks left in this rank's pages.
      slot: the request's row in the tables of window tails.
      positions_T: positions of this ring rank's slots, `PAD_POSITION` beyond `num_tokens`.
      page_table: pages of the request on this ring rank, in order.
    """

    num_tokens: jax.Array
    split: jax.Array
    cached: jax.Array
    slot: jax.Array
    positions_T: jax.Array
    page_table: jax.Array

    @staticmethod
    def unpack(packed: jax.Array, tokens: int) -> ChunkView:
        """Reads one row of `pack_chunk` back; `tokens` is the number of slots of a ring rank."""
        num_tokens, split, cached, slot = (packed[i] for i in range(_SCALARS))
        positions, table = packed[_SCALARS : _SCALARS + tokens], packed[_SCALARS + tokens :]
        return ChunkView(num_tokens, split, cached, slot, positions, table)

    def local_rows(self, values_T: jax.Array, ranks: int) -> jax.Array:
        """The entries of a per-slot array that belong to this device, of slots spread over `ranks` ulysses ranks."""
        return jax.lax.dynamic_index_in_dim(values_T.reshape(-1, ranks), sequence_rank(ranks), axis=1, keepdims=False)

    def valid_T(self) -> jax.Array:
        """Which slots of this ring rank hold tokens."""
        return jnp.arange(self.positions_T.shape[0]) < self.num_tokens


_SCALARS = 4


def packed_length(tokens: int, max_pages: int) -> int:
    """Numbers in a row of `pack_chunk`."""
    return _SCALARS + tokens + max_pages


def pack_chunk(rank: RankTokens, cached: int, slot: int, page_table: np.ndarray, tokens: int) -> np.ndarray:
    """Packs what one ring rank has to know of a chunk into one int32 row, so that a tick needs one transfer."""
    row = np.full(packed_length(tokens, len(page_table)), PAD_POSITION, np.int32)
    count = len(rank.positions)
    row[:_SCALARS] = count, rank.split, cached, slot
    row[_SCALARS : _SCALARS + count] = rank.positions
    row[_SCALARS + tokens :] = page_table
    return row


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
