"""The work counted from the layout is the work that the engine does."""

from __future__ import annotations

import pathlib

import numpy as np
import pytest

from slope_jax import MeshShape
from slope_jax.audit.work import plan_ticks, prompt_work
from slope_jax.mesh.layout import RankTokens, plan_chunks, zigzag
from slope_jax.model.config import FULL, SLIDING
from slope_jax.model.counts.attention_blocks import chunk_work
from slope_jax.model.stage import StageSpec
from tests.slope_jax import engines


@pytest.mark.parametrize(
    ("shape", "num_tokens", "ring_pass"),
    [
        (MeshShape(2, 2, 2), 211, "auto"),
        (MeshShape(1, 4, 2), 330, "q"),
        (MeshShape(1, 4, 2), 37, "q"),
        (MeshShape(3, 1, 1), 100, "kv"),
    ],
    ids=str,
)
def test_blocks_and_rounds_are_those_of_the_engine(
    toy_irregular_dir: pathlib.Path, shape: MeshShape, num_tokens: int, ring_pass: str
) -> None:
    """Seven layers of irregular kinds: stages differ, and some slots are empty."""
    it = engines.engine(toy_irregular_dir, shape, ring_pass=ring_pass)
    it.prefill([[7] * num_tokens])
    window, programs = it.config.sliding_window, it.programs
    chunks = [(s, zigzag(s, n, shape.ring, window)) for s, n in plan_chunks(num_tokens, it.chunk_tokens)]
    ticks = plan_ticks(programs, chunks)
    assert [(t.bucket, t.ring_pass, t.rounds) for t in ticks] == [
        (t.bucket, t.ring_pass, t.rounds) for t in it.last_ticks
    ]
    starts = [tuple(None if c is None else chunks[c][0] for c in t.chunks) for t in ticks]
    assert starts == [tuple(None if c is None else c[1] for c in t.chunks) for t in it.last_ticks]

    cached = [[np.zeros(0, np.int32)] * shape.ring]
    for _, ranks in chunks:
        cached.append([np.concatenate([a, b.positions]) for a, b in zip(cached[-1], ranks, strict=True)])
    for tick, record in zip(ticks, it.last_ticks, strict=True):
        spec = programs.stage_spec(tick.bucket)
        for stage, chunk in enumerate(tick.chunks):
            kinds = [it.config.layer_types[i] for i in it._plan.layers[stage] if i is not None]
            expected = np.zeros(shape.ring, np.int64)
            if chunk is not None:
                work = chunk_work(chunks[chunk][1], cached[chunk], spec, shape.ulysses, tick.ring_pass)
                expected = work.sums(kinds.count(FULL), kinds.count(SLIDING))
            found = record.attention_blocks[stage]
            np.testing.assert_array_equal(found, np.repeat(expected[:, None], shape.ulysses, axis=1))
    total = sum(record.attention_blocks for record in it.last_ticks)
    np.testing.assert_array_equal(prompt_work(programs, chunks, ticks).products, np.asarray(total)[:, :, 0])


SPEC = StageSpec(unit=(FULL,), ring_block=8, block_q=2, block_kv=4)


def test_blocks_counted_by_hand() -> None:
    """Six tokens on one rank, blocks of 2 queries and 4 keys: [0 1][2 3][4 5] by [0..3][4 5 . .]."""
    tokens = RankTokens(np.arange(6, dtype=np.int32), 6)
    found = chunk_work([tokens], [np.zeros(0, np.int32)], SPEC, 4, "kv")
    np.testing.assert_array_equal(found.full, [[1 + 1 + 2]])
    np.testing.assert_array_equal(found.window, [3])
    np.testing.assert_array_equal(found.rows, [[2, 2, 1, 1]])


def test_the_slowest_rank_of_each_step_is_what_takes_time() -> None:
    """Two ranks with a whole block of queries each; rank 1's are later, so rank 0 waits in the second step."""
    ranks = [RankTokens(np.arange(4, dtype=np.int32), 4), RankTokens(np.arange(4, 8, dtype=np.int32), 4)]
    found = chunk_work(ranks, [np.zeros(0, np.int32)] * 2, SPEC, 1, "kv")
    np.testing.assert_array_equal(found.full, [[2, 2], [0, 2]])
    assert found.sums(5, 0).tolist() == [10, 20]
    assert found.slowest(5, 0) == 20
    found = chunk_work(ranks, [np.zeros(0, np.int32)] * 2, SPEC, 1, "q")
    # Rank 1 has nothing for the queries of rank 0, which come before its keys.
    np.testing.assert_array_equal(found.full, [[2, 2], [2, 0]])
    assert found.sums(5, 0).tolist() == [20, 10]
    ranks.reverse()
    found = chunk_work(ranks, [np.zeros(0, np.int32)] * 2, SPEC, 1, "kv")
    np.testing.assert_array_equal(found.full, [[2, 2], [2, 0]])
    ranks = [RankTokens(np.arange(8, dtype=np.int32), 8), RankTokens(np.zeros(0, np.int32), 0)]
    found = chunk_work(ranks, [np.zeros(0, np.int32)] * 2, SPEC, 1, "kv")
    np.testing.assert_array_equal(found.rows, [[8], [0]])
    assert found.slowest(1, 1) > found.sums(1, 1).mean()
