"""Which chunk enters the pipeline next.

The chunk comes from the request with the fewest tokens left, so short prompts overtake long ones and a long one waits
at most for the short ones of its own batch. A request is admitted when the cache has room for all of it, and keeps its
room until its last chunk has left the last stage.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from slope_jax.kv.pool import Allocation, PageAllocator
from slope_jax.mesh.layout import RankTokens, plan_chunks, zigzag


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ChunkWork:
    """A chunk on its way through the pipeline.

    Attributes:
      request: index of the request in the batch.
      start: position of its first token in the prompt.
      num_tokens: its length.
      is_last: whether the prompt ends with it.
      ranks: its tokens on each ring rank.
      cached: tokens of the prompt that earlier chunks left on each ring rank, int32 `[ring]`.
      allocation: the request's place in the cache.
    """

    request: int
    start: int
    num_tokens: int
    is_last: bool
    ranks: list[RankTokens]
    cached: np.ndarray
    allocation: Allocation


@dataclasses.dataclass(slots=True, eq=False)
class _Progress:
    """A request that has been admitted, or waits to be."""

    request: int
    chunks: list[tuple[int, list[RankTokens]]]  # (start, ranks), in order
    cached: np.ndarray
    allocation: Allocation | None = None
    next_chunk: int = 0
    tokens_left: int = 0


class Scheduler:
    """Feeds the chunks of a batch of prompts to the pipeline, one at a time.

    Args:
      lengths: the prompts' lengths.
      chunk_tokens: the longest chunk.
      ring: ring ranks.
      window: the window of the sliding layers.
      allocator: the cache's free pages; each prompt of the batch must fit into it alone.
    """

    def __init__(self, lengths: Sequence[int], chunk_tokens: int, ring: int, window: int, allocator: PageAllocator):
        self._allocator = allocator
        self._waiting = [self._plan(i, n, chunk_tokens, ring, window) for i, n in enumerate(lengths)]
        self.num_chunks = sum(len(p.chunks) for p in self._waiting)
        self._admitted: list[_Progress] = []

    @property
    def exhausted(self) -> bool:
        """Whether every chunk has been fed."""
        return not self._waiting and not self._admitted

    def next_chunk(self) -> ChunkWork | None:
        """The chunk that enters the pipeline now; None when there is none, or none that the cache has room for."""
        for progress in sorted(self._admitted + self._waiting, key=lambda p: p.tokens_left):
            if progress.allocation is None:
                progress.allocation = self._allocator.allocate(_tokens_per_rank(progress.chunks))
                if progress.allocation is None:
                    continue
                self._waiting.remove(progress)
                self._admitted.append(progress)
            return self._take(progress, progress.allocation)
        return None

    def finish(self, work: ChunkWork) -> None:
        """Gives back the room of a request whose last chunk has left the last stage."""
        self._allocator.release(work.allocation)

    def _plan(self, request: int, length: int, chunk_tokens: int, ring: int, window: int) -> _Progress:
        chunks = [(start, zigzag(start, n, ring, window)) for start, n in plan_chunks(length, chunk_tokens)]
        return _Progress(request, chunks, np.zeros(ring, np.int32), tokens_left=length)

    def _take(self, progress: _Progress, allocation: Allocation) -> ChunkWork:
        start, ranks = progress.chunks[progress.next_chunk]
        progress.next_chunk += 1
        counts = np.array([len(r.positions) for r in ranks], np.int32)
        work = ChunkWork(
            request=progress.request,
            start=start,
            num_tokens=int(counts.sum()),
            is_last=progress.next_chunk == len(progress.chunks),
            ranks=ranks,
            cached=progress.cached,
            allocation=allocation,
        )
        progress.cached = progress.cached + counts
        progress.tokens_left -= work.num_tokens
        if work.is_last:
            self._admitted.remove(progress)
        return work


def _tokens_per_rank(chunks: list[tuple[int, list[RankTokens]]]) -> np.ndarray:
    return np.sum([[len(r.positions) for r in ranks] for _, ranks in chunks], axis=0)
