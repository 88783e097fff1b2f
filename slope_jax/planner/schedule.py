"""The ticks of prompts in the pipeline: which chunk is in which stage, and what goes round the ring meanwhile.

They are the engine's own: chunks are cut and laid out by `mesh.layout`, and buckets, rounds and what is passed come
from `TickPrograms` by way of `audit_work`, which the audit uses too.
"""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
from numpy.typing import NDArray

from slope_jax.audit import work
from slope_jax.audit.work import Tick
from slope_jax.execution.spec import TickPrograms
from slope_jax.mesh import ring_policy
from slope_jax.mesh.axes import MeshShape
from slope_jax.mesh.layout import active_ranks, length_buckets, plan_chunks, zigzag
from slope_jax.model.config import GptOssConfig
from slope_jax.planner.layout import stages_of

_PAGE, _BLOCK_KV = 64, 512  # what `Engine.load` takes when nothing else is asked for


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Chunks:
    """The chunks of a prompt.

    Attributes:
      start: position of the first token of each.
      length: tokens of each.
      held: tokens of the prompt on the fullest ring rank after each.
      active: ring ranks that have tokens of each.
    """

    start: NDArray[np.int64]
    length: NDArray[np.int64]
    held: NDArray[np.int64]
    active: NDArray[np.int64]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Schedule:
    """A run of ticks.

    Attributes:
      chunks: of a prompt.
      inside: the chunk in each stage, -1 where it is idle, `[stages, ticks]`.
      bucket: tokens that the chunks of each tick are padded to.
      rounds: rounds in which KV goes round the ring in each tick; 0 where queries go.
      ring_block: KV slots that a rank sends in one round of each tick.
      ring_pass: what goes round in most of the ticks, `ring_policy.KV` or `Q`.
    """

    chunks: Chunks
    inside: NDArray[np.int64]
    bucket: NDArray[np.int64]
    rounds: NDArray[np.int64]
    ring_block: NDArray[np.int64]
    ring_pass: str


@functools.lru_cache(maxsize=512)
def chunks_of(num_tokens: int, chunk_tokens: int, ring: int, window: int) -> Chunks:
    """The chunks of a prompt as the engine cuts them."""
    cut = plan_chunks(num_tokens, chunk_tokens)
    ranks = [[len(rank.positions) for rank in zigzag(start, length, ring, window)] for start, length in cut]
    start, length = np.array(cut, np.int64).T
    return Chunks(
        start=start,
        length=length,
        held=np.cumsum(ranks, axis=0).max(axis=1),
        active=active_ranks(length, ring, window),
    )


class Scheduler:
    """The ticks of a mesh for prompts of one length.

    Args:
      config: the model.
      shape: the mesh.
      dtype: of the model.
      chunk_tokens: the longest chunk.
      num_tokens: tokens of each prompt.
      ring_pass: what goes round the ring, see `mesh.pass_choice`.
      machine: the speed of the devices of a ring, by which the engine chooses what goes round.
    """

    def __init__(
        self,
        config: GptOssConfig,
        shape: MeshShape,
        dtype: str,
        chunk_tokens: int,
        num_tokens: int,
        ring_pass: str = ring_policy.AUTO,
        machine: ring_policy.Machine | None = None,
    ):
        chunk_tokens = min(chunk_tokens, num_tokens)
        self.chunks = chunks_of(num_tokens, chunk_tokens, shape.ring, config.sliding_window)
        # Of the cache only the page has a part in the ticks, and the size of a large one takes long to compute. How
        # weights are stored and divided has none.
        small = min(chunk_tokens, _PAGE)
        programs = TickPrograms.of(
            config,
            stages_of(config.layer_types, shape.pp),
            shape,
            dtype=dtype,
            packed_experts=False,
            expert_parallel=False,
            chunk_tokens=small,
            kv_cache_tokens=small,
            block_q=None,
            block_kv=_BLOCK_KV,
            page_tokens=_PAGE,
            ring_pass=ring_pass,
            machine=machine,
        )
        buckets = length_buckets(chunk_tokens, shape, config.sliding_window)
        self.programs = dataclasses.replace(programs, chunk_tokens=chunk_tokens, buckets=buckets)

    @functools.cached_property
    def alone(self) -> Schedule:
        """The ticks of one prompt that is alone in the pipeline."""
        return self._schedule(work.chunks_in_stages(len(self.chunks.length), self.programs.shape.pp))

    @functools.cached_property
    def steady(self) -> Schedule:
        """The ticks in which one prompt enters, in a pipeline that is full of prompts."""
        count = len(self.chunks.length)
        stages = range(self.programs.shape.pp)
        return self._schedule(tuple(tuple((t - s) % count for s in stages) for t in range(count)))

    def _schedule(self, grid: tuple[tuple[int | None, ...], ...]) -> Schedule:
        found: dict[tuple[int, int], Tick] = {}
        ticks: list[Tick] = []
        for inside in grid:
            present = [c for c in inside if c is not None]
            key = int(self.chunks.length[present].max()), int(self.chunks.held[present].max())
            if key not in found:
                found[key] = work.tick_of(self.programs, inside, self.chunks.length, self.chunks.held)
            ticks.append(found[key])
        blocks = {bucket: self.programs.stage_spec(bucket).ring_block for bucket in {tick.bucket for tick in ticks}}
        queries = sum(tick.ring_pass == ring_policy.Q for tick in ticks)
        return Schedule(
            chunks=self.chunks,
            inside=np.array([[-1 if c is None else c for c in inside] for inside in grid]).T,
            bucket=np.array([tick.bucket for tick in ticks]),
            rounds=np.array([tick.rounds for tick in ticks]),
            ring_block=np.array([blocks[tick.bucket] for tick in ticks]),
            ring_pass=ring_policy.Q if 2 * queries > len(ticks) else ring_policy.KV,
        )


scheduler = functools.lru_cache(maxsize=4096)(Scheduler)  # many layouts differ in nothing that has a part in the ticks


def one_pass(num_tokens: int, cached: int, ring: int, ring_pass: str = ring_policy.KV) -> Schedule:
    """A whole prompt as one chunk in one stage, with `cached` tokens before it, in the manner of arXiv 2411.01783.

    The KV of new and of cached tokens goes round the ring in one round, whatever its size.
    """
    held = -(-(num_tokens + cached) // ring)
    return Schedule(
        chunks=Chunks(
            start=np.array([cached]), length=np.array([num_tokens]), held=np.array([held]), active=np.array([ring])
        ),
        inside=np.zeros((1, 1), np.int64),
        bucket=np.array([num_tokens]),
        rounds=np.array([1 if ring_pass == ring_policy.KV else 0]),
        ring_block=np.array([held]),
        ring_pass=ring_pass,
    )
