"""The planner's ticks are the engine's."""

from __future__ import annotations

import numpy as np
import pytest

from slope_jax import MeshShape
from slope_jax.audit.work import plan_ticks
from slope_jax.execution.spec import TickPrograms
from slope_jax.launch.make_checkpoint import PRESETS
from slope_jax.mesh.layout import plan_chunks, zigzag
from slope_jax.model.stage_plan import plan_stages
from slope_jax.planner.schedule import Scheduler, one_pass

MINI = PRESETS["mini"].config()


@pytest.mark.parametrize(
    ("shape", "chunk", "tokens"),
    [(MeshShape(2, 2, 2), 4096, 16_384), (MeshShape(4, 2, 1), 1024, 10_001), (MeshShape(1, 8, 1), 3000, 3001)],
)
def test_ticks_are_those_of_the_programs_with_their_whole_cache(shape: MeshShape, chunk: int, tokens: int) -> None:
    programs = TickPrograms.of(
        MINI,
        plan_stages(MINI.layer_types, shape.pp),
        shape,
        dtype="bfloat16",
        packed_experts=True,
        expert_parallel=False,
        chunk_tokens=chunk,
        kv_cache_tokens=tokens,
        block_q=None,
        block_kv=512,
        page_tokens=64,
        ring_pass="auto",
    )
    chunks = [(start, zigzag(start, n, shape.ring, MINI.sliding_window)) for start, n in plan_chunks(tokens, chunk)]
    expected = plan_ticks(programs, chunks)
    found = Scheduler(MINI, shape, "bfloat16", chunk, tokens).alone
    assert found.bucket.tolist() == [tick.bucket for tick in expected]
    assert found.rounds.tolist() == [tick.rounds for tick in expected]
    assert found.inside.T.tolist() == [[-1 if c is None else c for c in tick.chunks] for tick in expected]
    assert found.ring_block.tolist() == [programs.stage_spec(tick.bucket).ring_block for tick in expected]


def test_a_full_pipeline_runs_every_chunk_once_in_every_stage() -> None:
    scheduler = Scheduler(MINI, MeshShape(4, 1, 1), "bfloat16", 1000, 5000)
    steady = scheduler.steady
    assert steady.inside.shape == (4, 5)
    assert all(sorted(stage) == list(range(5)) for stage in steady.inside.tolist())
    assert scheduler.alone.inside.shape == (4, 8)


def test_one_pass_holds_what_is_cached_and_new() -> None:
    found = one_pass(3200, 124_800, 4)
    assert np.array_equal(found.chunks.held, [32_000])
    assert (found.ring_block.tolist(), found.rounds.tolist()) == ([32_000], [1])
