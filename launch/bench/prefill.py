"""Times of whole prefills: time to first token, throughput, and the share of the machine's matmul peak."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from slope_jax.engine import Engine
from slope_jax.launch.bench.timing import Timed, timed
from slope_jax.mesh.axes import MeshShape
from slope_jax.mesh.layout import prompt_positions
from slope_jax.model.counts.cost import Operations, prompt_operations
from slope_jax.result import PrefillResult


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PrefillCase:
    """A batch of prompts of one length on one mesh.

    Attributes:
      mesh: the mesh.
      prompt_tokens: tokens of each prompt.
      concurrency: prompts of the batch.
    """

    mesh: MeshShape
    prompt_tokens: int
    concurrency: int


def product_of(
    meshes: Iterable[MeshShape], prompt_tokens: Iterable[int], concurrency: Iterable[int]
) -> tuple[PrefillCase, ...]:
    """The cases of every combination, those of one mesh together."""
    lengths, counts = list(prompt_tokens), list(concurrency)
    return tuple(
        PrefillCase(mesh=mesh, prompt_tokens=length, concurrency=count)
        for mesh in meshes
        for length in lengths
        for count in counts
    )


# What is measured when no other cases are asked for: what one device does, and eight devices of the same machine.
CASES = {
    "tiny": product_of((MeshShape(), MeshShape(2, 2, 2)), (50, 200), (1, 3)),
    "mini": product_of((MeshShape(),), (512, 4096, 8192, 16_384, 32_768), (1,))
    + product_of(
        (MeshShape(1, 4, 2), MeshShape(2, 2, 2), MeshShape(1, 8, 1), MeshShape(4, 2, 1)), (8192, 16_384), (1,)
    ),
    "mini_concurrent": product_of((MeshShape(), MeshShape(1, 4, 2), MeshShape(4, 2, 1)), (2048, 8192), (1, 2, 4)),
}


def cache_tokens(cases: Sequence[PrefillCase], chunk_tokens: int, window: int) -> int:
    """Tokens that a KV cache must hold such that no prompt of a batch waits for room, on any ring rank.

    Args:
      cases: the batches.
      chunk_tokens: the longest chunk.
      window: the sliding window of the model.
    """

    def held(case: PrefillCase) -> int:
        positions = prompt_positions(case.prompt_tokens, chunk_tokens, case.mesh.ring, window)
        return case.mesh.ring * max(len(of_rank) for of_rank in positions) * case.concurrency

    return max(map(held, cases))


def prefill_row(
    engine: Engine, case: PrefillCase, repeats: int, peak: Callable[[], float], max_tries: int
) -> dict[str, Any]:
    """Measures a case on a warm engine.

    Args:
      engine: on the mesh of the case.
      case: what to measure.
      repeats: batches to time.
      peak: gives the machine's peak.
      max_tries: how often a batch is timed at most, while the machine is not steady.
    """
    prompts = np.random.default_rng(case.prompt_tokens).integers(
        0, engine.config.vocab_size, (case.concurrency, case.prompt_tokens), dtype=np.int32
    )
    batches: list[Timed[list[PrefillResult]]] = []
    host_s: list[tuple[float, float]] = []
    for _ in range(repeats):
        batches.append(timed(lambda: engine.prefill(list(prompts)), peak, max_tries))
        host_s += [(tick.host_s, tick.host_wait_s) for tick in engine.last_ticks]
    works, waits = 1e3 * np.array(host_s).T
    return {
        "prompt_tokens": case.prompt_tokens,
        "concurrency": case.concurrency,
        "chunk_tokens": engine.chunk_tokens,
        "buckets": sorted({tick.bucket for tick in engine.last_ticks}),
        **_rates(batches, prompt_operations(engine.config, case.prompt_tokens), case),
        "ticks": len(engine.last_ticks),
        "host_ms_per_tick": float(np.median(works)),
        "host_ms_per_tick_max": float(works.max()),
        "host_wait_ms_per_tick": float(np.median(waits)),
    }


def _rates(batches: Sequence[Timed[list[PrefillResult]]], operations: Operations, case: PrefillCase) -> dict[str, Any]:
    ttft_s = [result.ttft_s for batch in batches for result in batch.value]
    seconds = float(np.median([batch.seconds for batch in batches]))
    peak = float(np.median([batch.peak for batch in batches]))
    total = case.concurrency * operations.total
    return {
        "repeats": len(batches),
        "ttft_median_s": float(np.median(ttft_s)),
        "ttft_p99_s": float(np.percentile(ttft_s, 99, method="higher")),
        "batch_s": seconds,
        "tokens_per_s": case.concurrency * case.prompt_tokens / seconds,
        "operations": {kind: case.concurrency * n for kind, n in dataclasses.asdict(operations).items()},
        "tflop_per_s": total / seconds / 1e12,
        "peak_tflop_per_s": peak / 1e12,
        "share_of_peak": float(np.median([total / batch.seconds / batch.peak for batch in batches])),
        "tries": sum(batch.tries for batch in batches),
        "steady": all(batch.is_steady for batch in batches),
    }
