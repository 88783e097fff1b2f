"""The scheduler in fake time: short prompts do not wait for long ones, nor long ones for more than the short (S06)."""

from __future__ import annotations

import numpy as np
import pytest

from slope_jax.kv.pool import Allocation, CacheShape, PageAllocator
from slope_jax.scheduling.scheduler import ChunkWork, Scheduler

SHAPE = CacheShape(page=8, pages=100, table=80, requests=4)


def feed(
    lengths: list[int], chunk: int = 16, shape: CacheShape = SHAPE, ring: int = 2, stages: int = 2
) -> list[ChunkWork | None]:
    """All chunks in the order in which they enter a pipeline, None where the cache has no room."""
    scheduler = Scheduler(lengths, chunk, ring, 8, PageAllocator(shape, ring))
    order: list[ChunkWork | None] = []
    while not scheduler.exhausted:
        order.append(scheduler.next_chunk())
        left = order[-stages] if len(order) >= stages else None
        if left is not None and left.is_last:
            scheduler.finish(left)
        assert len(order) < 10_000
    return order


def test_short_prompts_overtake_a_long_one() -> None:
    order = feed([600, 10, 12, 16, 5])
    assert [w.request for w in order[:4] if w] == [4, 1, 2, 3]
    long_chunks = [w for w in order if w and w.request == 0]
    assert len(long_chunks) == 38
    assert len(order) == 42


def test_every_token_is_fed_once_and_in_order() -> None:
    lengths = [100, 33, 7, 64, 65]
    order = [w for w in feed(lengths) if w]
    for request, length in enumerate(lengths):
        chunks = [w for w in order if w.request == request]
        assert [w.start for w in chunks] == np.cumsum([0, *[w.num_tokens for w in chunks[:-1]]]).tolist()
        assert sum(w.num_tokens for w in chunks) == length
        assert [w.is_last for w in chunks] == [False] * (len(chunks) - 1) + [True]
        cached = np.zeros(2, int)
        for work in chunks:
            np.testing.assert_array_equal(work.cached, cached)
            cached += [len(r.positions) for r in work.ranks]


def test_a_prompt_that_does_not_fit_now_waits() -> None:
    """Two prompts of 60 pages a rank and 100 pages: the second enters when the first has left the last stage."""
    order = feed([960, 950], chunk=32)
    works = [w for w in order if w]
    assert [w.request for w in works] == [1] * 30 + [0] * 30
    assert order.count(None) == 1


def test_requests_at_once_are_bounded() -> None:
    order = feed([8] * 10, shape=CacheShape(page=8, pages=100, table=80, requests=1), stages=3)
    assert sum(w is not None for w in order) == 10
    for i in range(len(order) - 2):
        assert sum(w is not None for w in order[i : i + 3]) == 1


@pytest.mark.parametrize("ring", [1, 3])
def test_pages_are_neither_lost_nor_shared(ring: int) -> None:
    allocator = PageAllocator(SHAPE, ring)
    held: list[Allocation] = []
    rng = np.random.default_rng(0)
    for _ in range(300):
        if held and rng.random() < 0.5:
            allocator.release(held.pop(rng.integers(len(held))))
        else:
            allocation = allocator.allocate(rng.integers(0, 400, ring))
            held += [allocation] if allocation else []
        for rank in range(ring):
            pages = [p for a in held for p in a.page_table[rank] if p >= 0]
            assert len(pages) == len(set(pages))
        rows = [a.row for a in held]
        assert len(rows) == len(set(rows))
    for allocation in held:
        allocator.release(allocation)
    assert allocator.allocate(np.full(ring, 80 * 8)) is not None
