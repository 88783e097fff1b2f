"""The ticks of a prompt that is alone in the pipeline, and the work of each device in them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from slope_jax.execution.spec import TickPrograms
from slope_jax.mesh.layout import RankTokens
from slope_jax.model.config import FULL, SLIDING, GptOssConfig
from slope_jax.model.counts import cost
from slope_jax.model.counts.attention_blocks import ChunkWork, chunk_work

Chunks = list[tuple[int, list[RankTokens]]]  # first position, and tokens by ring rank


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """A tick of a prompt that is alone in the pipeline.

    Attributes:
      bucket: tokens that its chunks are padded to.
      ring_pass: what goes round the ring, "kv" or "q" (see `mesh.pass_choice`).
      rounds: rounds in which KV goes round.
      chunks: the chunk in each stage, None where it is idle.
    """

    bucket: int
    ring_pass: str
    rounds: int
    chunks: tuple[int | None, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Work:
    """The work of a prompt.

    Attributes:
      products: block products of attention of each device, `[pp, ring]`; the same on all ulysses ranks.
      attention_operations: floating-point operations in those blocks, of each device, `[pp, ring]`.
      needed_attention_operations: of the mean device, those that the mask lets through.
      rows: tokens that go through the experts of each device, `[ring, ulysses]`, or `[ring, 1]` when all ulysses ranks
        have the same.
      expert_operations: floating-point operations of the experts of those tokens on a device, with a leading axis `pp`.
      attention_balance: time of the busiest ring rank in each step over the mean, all steps together.
      expert_balance: rows of the busiest device in each chunk over the mean, all chunks together.
      stage_balance: operations of the busiest stage over the mean.
    """

    products: NDArray[np.int64]
    attention_operations: NDArray[np.float64]
    needed_attention_operations: float
    rows: NDArray[np.int64]
    expert_operations: NDArray[np.float64]
    attention_balance: float
    expert_balance: float
    stage_balance: float


def plan_ticks(programs: TickPrograms, chunks: Chunks) -> tuple[Tick, ...]:
    """The ticks of a prompt that is alone in the pipeline, as `Engine` runs them."""
    counts = np.array([[len(rank.positions) for rank in ranks] for _, ranks in chunks])
    lengths = counts.sum(axis=1)
    held = counts.cumsum(axis=0).max(axis=1)  # tokens of the fullest ring rank after each chunk
    return tuple(
        tick_of(programs, inside, lengths, held) for inside in chunks_in_stages(len(chunks), programs.shape.pp)
    )


def chunks_in_stages(chunks: int, stages: int) -> tuple[tuple[int | None, ...], ...]:
    """The chunk in each stage in every tick of a prompt that is alone in the pipeline, None where a stage is idle."""
    return tuple(
        tuple(t - s if 0 <= t - s < chunks else None for s in range(stages)) for t in range(chunks + stages - 1)
    )


def tick_of(
    programs: TickPrograms, inside: tuple[int | None, ...], lengths: NDArray[np.int64], held: NDArray[np.int64]
) -> Tick:
    """The tick that runs some chunks.

    Args:
      programs: their sizes.
      inside: the chunk in each stage, None where it is idle; at least one is not.
      lengths: tokens of each chunk.
      held: tokens of its prompt on the fullest ring rank after each chunk.
    """
    present = [c for c in inside if c is not None]
    bucket = programs.bucket_of(max(int(lengths[c]) for c in present))
    ring_pass, rounds = programs.ring_rounds(bucket, max(int(held[c]) for c in present))
    return Tick(bucket=bucket, ring_pass=ring_pass, rounds=rounds, chunks=inside)


def prompt_work(programs: TickPrograms, chunks: Chunks, ticks: Sequence[Tick]) -> Work:
    """Counts the work of a prompt on each device."""
    config, plan, shape = programs.config, programs.plan, programs.shape
    before = [np.zeros(0, np.int32)] * shape.ring
    cached = [before]
    for _, ranks in chunks:
        before = [np.concatenate([old, rank.positions]) for old, rank in zip(before, ranks, strict=True)]
        cached.append(before)

    @functools.cache
    def work_of(chunk: int, bucket: int, ring_pass: str) -> ChunkWork:
        spec = programs.stage_spec(bucket)
        return chunk_work(chunks[chunk][1], cached[chunk], spec, programs.sequence_ranks, ring_pass)

    kinds = [[config.layer_types[layer] for layer in stage if layer is not None] for stage in plan.layers]
    layers = np.array([(k.count(FULL), k.count(SLIDING)) for k in kinds])
    products = np.zeros((shape.pp, shape.ring), np.int64)
    pairs = np.zeros((shape.pp, shape.ring), np.int64)
    slowest = np.zeros(shape.pp, np.int64)
    rows = np.zeros((len(chunks), shape.ring, programs.sequence_ranks), np.int64)
    for tick in ticks:
        for stage, chunk in enumerate(tick.chunks):
            if chunk is not None:
                found = work_of(chunk, tick.bucket, tick.ring_pass)
                spec = programs.stage_spec(tick.bucket)
                keys = np.array([spec.block_kv, spec.attention(config.sliding_window).window_keys])
                products[stage] += found.sums(*layers[stage])
                pairs[stage] += spec.block_q * found.sums(*(layers[stage] * keys))
                slowest[stage] += spec.block_q * found.slowest(*(layers[stage] * keys))
                rows[chunk] = found.rows
    per_pair = 4 * config.num_heads // shape.ulysses * config.head_dim  # a score and a weighted value for every head
    chunk_layers = layers.sum(axis=1)
    num_tokens = int(rows.sum())
    operations = cost.prompt_operations(config, num_tokens)
    per_row = operations.experts / num_tokens / config.num_layers / programs.split.ranks
    stages = [_stage_operations(config, kind, num_tokens) for kind in kinds]
    return Work(
        products=products,
        attention_operations=pairs.astype(np.float64) * per_pair,
        needed_attention_operations=(operations.full_attention + operations.window_attention) / shape.num_devices,
        rows=rows.sum(axis=0),
        expert_operations=chunk_layers[:, None, None] * rows.sum(axis=0) * per_row,
        attention_balance=float((slowest / pairs.mean(axis=1)).max()),
        expert_balance=float(rows.max(axis=(1, 2)).sum() / rows.mean(axis=(1, 2)).sum()),
        stage_balance=max(stages) * len(stages) / sum(stages),
    )


def _stage_operations(config: GptOssConfig, kinds: list[str], num_tokens: int) -> int:
    operations = cost.prompt_operations(dataclasses.replace(config, layer_types=tuple(kinds)), num_tokens)
    return operations.total - operations.unembedding  # which all stages share
