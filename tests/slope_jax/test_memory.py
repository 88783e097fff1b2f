"""Attention needs memory in proportion to the tokens; the memory report is of real arrays, and budgets are kept."""

from __future__ import annotations

import dataclasses
import gc
import pathlib
import subprocess
import sys
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

from slope_jax import Engine, MeshShape
from slope_jax.execution.memory import MemoryReport, fit_cache, format_bytes, parse_bytes
from slope_jax.kv.pool import CacheShape, PageAllocator
from slope_jax.launch.make_checkpoint import PRESETS, make_checkpoint
from slope_jax.launch.random_weights import RandomSource
from slope_jax.model.checkpoint import weights
from slope_jax.model.counts import cost
from tests.oracle import checkpoints
from tests.slope_jax.engines import check

ROOT = pathlib.Path(__file__).parents[2]
SMALL: dict[str, Any] = {"dtype": "float32", "chunk_tokens": 64, "page_tokens": 8, "block_q": 8, "block_kv": 16}


def test_32k_tokens_stay_under_4_gib(tmp_path: pathlib.Path) -> None:
    """The bench-size model; one layer's scores alone would take 64 GiB if they were kept."""
    make_checkpoint(tmp_path / "mini", PRESETS["mini"])
    command = [sys.executable, "-m", "tests.slope_jax.memory_job", str(tmp_path / "mini"), "32768"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=ROOT, check=True)
    assert int(done.stdout) < 4 << 30


def prompts(lengths: list[int]) -> list[list[int]]:
    return [checkpoints.random_prompt(checkpoints.TOY, n, seed=i) for i, n in enumerate(lengths)]


def bytes_on(device: jax.Device, arrays: Any) -> int:
    return sum(s.data.nbytes for a in jax.tree.leaves(arrays) for s in a.addressable_shards if s.device == device)


@pytest.fixture(scope="module")
def least(toy_dir: pathlib.Path) -> MemoryReport:
    """What an engine needs whose cache holds one token."""
    return Engine.load(toy_dir, kv_cache_tokens=1, **SMALL).memory()


def test_the_report_is_of_the_arrays_on_the_devices(toy_dir: pathlib.Path) -> None:
    shape = MeshShape(2, 2, 1)
    it = Engine.load(toy_dir, mesh=shape, kv_cache_tokens=256, **SMALL)
    report = it.memory()
    it.prefill(prompts([100]))
    state: Any = it._state
    for device in it.mesh.devices.flat:
        assert bytes_on(device, it._params) == report.weights.total
        assert bytes_on(device, state.cache) == report.kv_pool
        assert bytes_on(device, state.hidden) == report.activations
    assert report.weights == cost.device_weight_bytes(it.config, it._plan, shape, "float32", packed=False)
    assert (report.concurrent_tokens, report.budget) == (256, None)
    # Temporaries hold at least the residual stream, and the queries of all heads.
    rows = it.buckets[-1] // (shape.ring * shape.ulysses)
    assert report.temporaries > 4 * rows * (it.config.hidden_size + it.config.num_heads * it.config.head_dim)
    assert report.hand_off >= report.kv_pool // 2
    parts = (report.weights.total, report.kv_pool, report.activations, report.temporaries, report.hand_off)
    assert report.total == sum(parts)
    assert format_bytes(report.total) in report.describe()


def test_a_budget_is_used_up_and_not_exceeded(toy_dir: pathlib.Path, least: MemoryReport) -> None:
    """What fits is served, together too; what can never fit is refused at once; what does not fit now waits."""
    budget = least.total + 1_500_000
    it = Engine.load(toy_dir, memory_budget=budget, **SMALL)
    report, tokens = it.memory(), it.memory().concurrent_tokens
    assert 100 < tokens < 2048
    assert report.budget == budget
    assert report.total <= budget
    more = Engine.load(toy_dir, kv_cache_tokens=tokens + 1, **SMALL)
    assert report.total - it.cache_bytes() + more.cache_bytes() > budget
    assert it.max_prompt_tokens == tokens
    too_long = [0] * (tokens + 1)
    with pytest.raises(ValueError, match=rf"{tokens + 1} tokens, the limit is {tokens} \(.*memory budget of .*iB"):
        it.prefill([[1], too_long])
    assert list(it.last_ticks) == []
    batch = prompts([tokens, tokens // 2, tokens - 7, 1, tokens // 3])
    check(toy_dir, batch, it.prefill(batch))
    # Each of the two longest needs the whole cache, so the longer one waits until the other has left it.
    order = [chunk[0] for tick in it.last_ticks for chunk in tick.chunks if chunk is not None]
    assert sorted(set(order)) == [0, 1, 2, 3, 4]
    assert max(i for i, request in enumerate(order) if request == 2) < order.index(0)


def test_a_cache_of_more_than_the_longest_prompt_holds_several(toy_dir: pathlib.Path) -> None:
    it = Engine.load(toy_dir, kv_cache_tokens=3 * 2048 + 100, **SMALL)
    assert it.max_prompt_tokens == 2048
    assert it._cache_shape == CacheShape(page=8, pages=3 * 256 + 13 + 4, table=256, requests=4)
    allocator = PageAllocator(it._cache_shape, 1)
    for tokens in (2048, 2048, 2048, 100):
        assert allocator.allocate(np.array([tokens])) is not None
    assert allocator.allocate(np.array([1])) is None


def test_budgets_that_cannot_work_are_refused_with_the_numbers(
    toy_dir: pathlib.Path, least: MemoryReport, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = least.weights
    monkeypatch.setattr(weights, "load_model", lambda *_: pytest.fail("weights were read"))
    for budget, message in (
        (parts.total - 1, rf"{parts.total - 1:,} bytes.*less than its weights.*{parts.total:,} bytes.*experts"),
        (least.total - 1, rf"{least.total - 1:,} bytes.*no room for one token.*{least.total:,} bytes.*temporaries"),
    ):
        with pytest.raises(ValueError, match=message):
            Engine.load(toy_dir, memory_budget=budget, **SMALL)
    with pytest.raises(ValueError, match=r"kv_cache_tokens=5 and memory_budget='1GiB'"):
        Engine.load(toy_dir, memory_budget="1GiB", kv_cache_tokens=5)
    for bad in ("64 gigs", "", "-1GiB", "0", 0, -5, True, 1.5, "nan", "1e9"):
        with pytest.raises(ValueError, match=r"not a positive number of bytes.*GiB"):
            Engine.load(toy_dir, memory_budget=bad)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("64GiB", 64 << 30),
        ("1.5 GB", 1_500_000_000),
        ("12", 12),
        ("3kB", 3000),
        ("2KiB", 2048),
        (7, 7),
        ("1TiB", 1 << 40),
    ],
)
def test_sizes(text: int | str, size: int) -> None:
    assert parse_bytes(text) == size


@dataclasses.dataclass
class FakeEngine:
    """An engine whose programs need more memory when the cache holds 50 tokens and more."""

    tokens: int

    def cache_bytes(self) -> int:
        return 10 * self.tokens

    def memory(self) -> MemoryReport:
        return MemoryReport(
            weights=cost.WeightBytes(attention=0, router=0, experts=0, embedding=0, unembedding=0),
            kv_pool=10 * self.tokens,
            activations=0,
            temporaries=100 if self.tokens < 50 else 300,
            hand_off=0,
            concurrent_tokens=self.tokens,
            budget=None,
        )


@pytest.mark.parametrize("chunk", [1, 20, 60, 200])
@pytest.mark.parametrize(
    ("budget", "tokens"), [(110, 1), (119, 1), (120, 2), (599, 49), (699, 49), (800, 50), (1_000_000, 99)]
)
def test_room_is_made_for_programs_that_grow_with_the_cache(chunk: int, budget: int, tokens: int) -> None:
    found = fit_cache(FakeEngine, nnx.State({}), chunk_tokens=chunk, most_tokens=99, budget=budget)
    # Where one token more needs larger programs, a few tokens less are taken rather than the last one.
    assert found.memory().total <= budget
    assert tokens - 10 <= found.tokens <= tokens


def live_bytes() -> int:
    """Bytes of all arrays on devices, those that share a buffer counted once."""
    gc.collect()
    buffers = {}
    for array in jax.live_arrays():
        for shard in array.addressable_shards:
            buffers[shard.data.unsafe_buffer_pointer()] = shard.data.nbytes
    return sum(buffers.values())


def test_packed_experts_stay_packed_on_the_device() -> None:
    """Device memory of MXFP4 experts is within 2 % of the packed size, and nothing unpacked is kept or made at once."""
    mini = dataclasses.replace(PRESETS["mini"], num_layers=2).config()
    before = live_bytes()
    it = Engine.load(RandomSource(mini), expert_weights="mxfp4", chunk_tokens=512, kv_cache_tokens=512)
    live = live_bytes() - before
    report = it.memory()
    packed = cost.checkpoint_bytes(mini, packed=True).experts
    assert live == report.weights.total
    assert report.weights.experts <= 1.02 * packed
    unpacked = cost.checkpoint_bytes(mini, packed=False).experts
    assert unpacked > 3 * packed
    result = it.prefill([np.arange(300) % mini.vocab_size])[0]
    assert np.isfinite(result.logits).all()
    # What the program has at once beside its arguments: not the unpacked experts of a layer, of which there are two.
    plain = Engine.load(RandomSource(mini), chunk_tokens=512, kv_cache_tokens=512).memory()
    assert report.temporaries - plain.temporaries < unpacked // 2 // 4
