"""pass-KV and pass-Q in the engine: equal results, the choice in the record, its bytes, its balance."""

from __future__ import annotations

import collections
import math
from typing import Any

import numpy as np
import pytest

from slope_jax import Engine, MeshShape
from slope_jax.audit import hlo
from slope_jax.mesh.layout import zigzag
from slope_jax.mesh.ring_policy import HopCosts, Machine
from tests.oracle import checkpoints
from tests.oracle.checkpoints import WriteCheckpoint
from tests.slope_jax.engines import check, engine

MODELS = {"toy": checkpoints.TOY, "irregular": checkpoints.TOY_IRREGULAR}
HEADS, KV_HEADS, HEAD_DIM, WINDOW = 8, 2, 32, 8  # of both

# Shapes, the model (the irregular one leaves slots of stages empty), chunk and longest prompt. The share of new tokens
# goes from all of them to a tenth and less. Chunks of 64 tokens are on all ranks of a ring of 4, those of 24 and 5
# tokens on the first rank alone.
WAYS = [
    (MeshShape(2, 2, 2), "irregular", 64, 600),
    (MeshShape(1, 4, 2), "toy", 64, 640),
    (MeshShape(1, 8, 1), "toy", 112, 1000),
    (MeshShape(4, 2, 1), "irregular", 24, 300),
    (MeshShape(1, 2, 4), "toy", 5, 100),
]


def prompt(length: int, seed: int = 0) -> list[int]:
    return checkpoints.random_prompt(checkpoints.TOY, length, seed=seed + length)


def bytes_of_a_hop(it: Any, tick: Any) -> dict[str, float]:
    """What a device would send in a hop: KV of the fullest rank in its rounds, or queries and float32 results."""
    heads, kv_heads = HEADS // it.shape.ulysses, max(KV_HEADS // it.shape.ulysses, 1)
    _, ring_block = it._tick(tick.bucket)
    held = 0.0
    for work in tick.chunks:
        if work is not None:
            _, start, tokens = work
            fullest = max(len(rank.positions) for rank in zigzag(start, tokens, it.shape.ring, WINDOW))
            held = max(held, fullest * (start / tokens + 1))  # chunks of a prompt are equal, up to a token
    rounds = np.ceil(held / ring_block)
    return {
        "kv": rounds * ring_block * (2 * kv_heads * HEAD_DIM * 4 + 4),
        "q": tick.bucket / it.shape.ring * (heads * HEAD_DIM * 4 + 4 + heads * (HEAD_DIM + 2) * 4),
    }


@pytest.mark.parametrize("ring_pass", ["q", "auto"])
@pytest.mark.parametrize(("shape", "model", "chunk", "longest"), WAYS, ids=str)
def test_both_give_the_results_of_the_oracle(
    checkpoint: WriteCheckpoint, shape: MeshShape, model: str, chunk: int, longest: int, ring_pass: str
) -> None:
    """And "auto" passes what takes fewer bytes, judged from the lengths in the record."""
    directory = checkpoint(MODELS[model])
    it = engine(directory, shape, chunk_tokens=chunk, ring_pass=ring_pass)
    prompts = [prompt(n) for n in (longest, 1, 2 * chunk + 1)]
    check(directory, prompts, it.prefill(prompts))
    passed = [tick.ring_pass for tick in it.last_ticks]
    assert set(passed) == ({"q"} if ring_pass == "q" else {"kv", "q"})
    for tick in it.last_ticks:
        assert (tick.rounds == 0) == (tick.ring_pass == "q")
        cost = bytes_of_a_hop(it, tick)
        if ring_pass == "auto" and abs(cost["kv"] / cost["q"] - 1) > 0.1:
            assert tick.ring_pass == min(cost, key=lambda name: cost[name])


def test_a_fast_link_hides_keys_and_values(checkpoint: WriteCheckpoint) -> None:
    directory = checkpoint(MODELS["toy"])
    machine = Machine(attention_flops=1e9, link_bandwidth=1e12)
    it = engine(directory, MeshShape(1, 2, 1), chunk_tokens=32, ring_pass="auto", machine=machine)
    prompts = [prompt(400)]
    check(directory, prompts, it.prefill(prompts))
    assert {tick.ring_pass for tick in it.last_ticks} == {"kv"}
    assert any(cost["q"] < cost["kv"] for cost in (bytes_of_a_hop(it, tick) for tick in it.last_ticks))


@pytest.mark.parametrize(
    ("shape", "dtype"), [(MeshShape(1, 4, 2), "bfloat16"), (MeshShape(2, 2, 2), "float32")], ids=str
)
def test_costs_are_what_the_compiled_tick_sends(checkpoint: WriteCheckpoint, shape: MeshShape, dtype: str) -> None:
    """A program that can do both holds a round of pass-KV and a visit of all ranks in the one full layer of a unit."""
    it: Any = Engine.load(checkpoint(MODELS["toy"]), mesh=shape, dtype=dtype, chunk_tokens=256, kv_cache_tokens=512)
    bucket = it.buckets[-1]
    tick, ring_block = it._tick(bucket)
    sent: collections.Counter[str] = collections.Counter()
    for exchange in hlo.parse_exchanges(tick.as_text()):
        for scope in {"pass_kv", "pass_q"} & set(exchange.op_name.split("/")):
            # The number of rounds is data: one is counted.
            loops = [around.trip_count for around in exchange.around if isinstance(around, hlo.Loop)]
            sent[scope] += exchange.operand_bytes * math.prod(n for n in loops if n is not None)
    costs = HopCosts.of(
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        ulysses=shape.ulysses,
        itemsize=2 if dtype == "bfloat16" else 4,
    )
    hops = it.programs.plan.repeats * (shape.ring - 1)
    assert sent == {
        "pass_kv": hops * costs.kv_hop_bytes(ring_block),
        "pass_q": hops * costs.q_hop_bytes(bucket // shape.ring),
    }


@pytest.mark.parametrize("shape", [MeshShape(1, 4, 2), MeshShape(1, 8, 1)], ids=str)
def test_queries_that_travel_find_balanced_work(checkpoint: WriteCheckpoint, shape: MeshShape) -> None:
    """The same products of blocks as when KV comes to them, and as many on every device: in one chunk and over four."""
    work = {}
    for ring_pass in ("kv", "q"):
        blocks = {"block_q": 16, "block_kv": 16, "page_tokens": 16}
        it = engine(checkpoint(MODELS["toy"]), shape, chunk_tokens=512, ring_pass=ring_pass, **blocks)
        for length in (500, 2000):
            it.prefill([prompt(length)])
            work[ring_pass, length] = np.sum([tick.attention_blocks for tick in it.last_ticks], axis=0)
    for length in (500, 2000):
        assert work["q", length].sum() == work["kv", length].sum()
        assert work["q", length].max() / work["q", length].mean() <= 1.05
