"""What the engine promises beside exact numbers: no compilation, recovery, limits, balance, times, KV hand-off."""

from __future__ import annotations

import itertools
import math
import pathlib
import shutil
from collections.abc import Iterator
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from slope_jax import Engine, MeshShape, Request, load_kv
from slope_jax.mesh.processes import distributed
from slope_jax.model.checkpoint import weights
from slope_jax.result import NO_TOKEN
from tests.oracle import checkpoints
from tests.slope_jax.engines import check, engine, oracle

TOY = checkpoints.TOY


def prompt(length: int, seed: int = 0) -> list[int]:
    """A random prompt; where results are compared with the oracle, of the lengths used here, without near ties."""
    return checkpoints.random_prompt(TOY, length, seed=1000 * seed + length)


@pytest.fixture
def compilations() -> Iterator[list[str]]:
    """The programs that XLA compiles from here on."""
    seen: list[str] = []

    def listen(event: str, duration_secs: float, **_: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            seen.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield seen
    jax.monitoring.unregister_event_duration_listener(listen)


@pytest.mark.parametrize("shape", [MeshShape(), MeshShape(2, 2, 2)], ids=str)
def test_nothing_compiles_after_warmup(toy_dir: pathlib.Path, shape: MeshShape, compilations: list[str]) -> None:
    """Cases J06 and P20, over all lengths up to two chunks, sampling, and the KV of a result."""
    it = Engine.load(toy_dir, mesh=shape, dtype="float32", chunk_tokens=48, kv_cache_tokens=96, page_tokens=8)
    assert it.warmup() == len(it.buckets) + 1
    assert compilations, "the listener does not hear compilations"
    compilations.clear()
    for length in (*range(1, 97, 5), 48, 49, 96):
        result = it.prefill([Request(prompt_token_ids=prompt(length), temperature=1.0, seed=1)])[0]
        result.kv.layer(0)
        result.kv.layer(1)
    it.prefill([prompt(n) for n in (96, 1, 50)])
    assert compilations == []
    assert all(b <= 2 * a for a, b in itertools.pairwise(it.buckets))


def test_nothing_compiles_when_the_ring_changes_its_pass(toy_dir: pathlib.Path, compilations: list[str]) -> None:
    """One program per bucket does both."""
    it = Engine.load(toy_dir, mesh=MeshShape(1, 2, 1), dtype="float32", chunk_tokens=32, page_tokens=8, block_kv=16)
    assert it.warmup() == len(it.buckets) + 1
    compilations.clear()
    check(toy_dir, [prompt(400)], it.prefill([prompt(400)]))
    assert {tick.ring_pass for tick in it.last_ticks} == {"kv", "q"}
    assert compilations == []


def test_a_failed_tick_leaves_a_working_engine(toy_dir: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Case J13: the cache was given away to a tick that failed."""
    it = Engine.load(toy_dir, mesh=MeshShape(1, 2, 1), dtype="float32", chunk_tokens=64)
    prompts = [prompt(100), prompt(9)]
    check(toy_dir, prompts, it.prefill(prompts))
    real, calls = it._tick, 0

    def failing(bucket: int) -> Any:
        tick, block = real(bucket)

        def call(*args: Any) -> Any:
            nonlocal calls
            calls += 1
            out = tick(*args)
            if calls == 2:
                raise RuntimeError("injected after dispatch")
            return out

        return call, block

    monkeypatch.setattr(it, "_tick", failing)
    with pytest.raises(RuntimeError, match="injected"):
        it.prefill(prompts)
    check(toy_dir, prompts, it.prefill(prompts))


def test_an_error_in_a_callback_leaves_a_working_engine(toy_dir: pathlib.Path) -> None:
    it = engine(toy_dir, MeshShape(2, 1, 1))

    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        it.prefill([prompt(200), prompt(5)], on_tick=stop)
    prompts = [prompt(130, seed=1), prompt(6, seed=2)]
    check(toy_dir, prompts, it.prefill(prompts))


@pytest.mark.parametrize("shape", [MeshShape(), MeshShape(1, 2, 2), MeshShape(2, 2, 1)], ids=str)
def test_a_cache_for_one_long_prompt_serves_many(toy_dir: pathlib.Path, shape: MeshShape) -> None:
    """Requests that do not fit now wait; pages go from one to the next without a trace."""
    it = engine(toy_dir, shape, kv_cache_tokens=150)
    prompts = [prompt(n, seed=s) for s, n in enumerate([150, 149, 80, 7, 150, 1, 64, 120])]
    check(toy_dir, prompts, it.prefill(prompts))
    check(toy_dir, prompts[::-1], it.prefill(prompts[::-1]))


def test_limits_to_the_token(toy_dir: pathlib.Path) -> None:
    """Case S03: the least of all limits holds, and a refused prompt harms no other."""
    it = engine(toy_dir, kv_cache_tokens=100)
    assert it.max_prompt_tokens == 100
    good = [prompt(100), prompt(99)]
    with pytest.raises(ValueError, match=r"item 1.*101 tokens.*limit is 100.*kv_cache_tokens=100"):
        it.prefill([prompt(5), prompt(101)])
    check(toy_dir, good, it.prefill(good))
    with pytest.raises(ValueError, match=r"2049 tokens.*limit is 2048.*model"):
        engine(toy_dir).prefill([prompt(2049)])


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([], "empty"),
        ([-1], "-1"),
        ([211], r"211.*greatest id is 210"),
        ([2**31], str(2**31)),
        ([2**32 + 5], str(2**32 + 5)),
        ([10**20], str(10**20)),
        ([1.5], r"1\.5"),
        ([True], "True"),
        (["5"], "'5'"),
        ([[1, 2]], r"\[1, 2\]"),
        ([None], "None"),
        ("", "empty"),
        ("text", "tokenizer"),
    ],
)
def test_bad_prompts_are_refused_before_anything_runs(toy_dir: pathlib.Path, ids: Any, message: str) -> None:
    """Cases J01, S01 and S02."""
    it = engine(toy_dir)
    it.last_ticks = ()
    with pytest.raises(ValueError, match=message):
        it.prefill([prompt(3), ids])
    assert it.last_ticks == ()
    assert it.prefill([[210]])[0].token_id == int(np.argmax(oracle(toy_dir, (210,))[0]))


def test_duplicate_ids_are_refused(toy_dir: pathlib.Path) -> None:
    requests = [Request(prompt_token_ids=[n], request_id="a") for n in (1, 2)]
    with pytest.raises(ValueError, match="'a'"):
        engine(toy_dir).prefill(requests)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mesh": MeshShape(1, 1, 3)}, r"ulysses=3.*8 query heads.*\[1, 2, 4, 8\]"),
        ({"mesh": MeshShape(7, 1, 1)}, "pp=7.*6 layers"),
        ({"mesh": MeshShape(2, 4, 2)}, r"2x4x2.*16 devices.*there are 8"),
        ({"mesh": (1, 1, 1)}, "MeshShape"),
        ({"dtype": "float64"}, "float64"),
        ({"expert_weights": "int8"}, "int8"),
        ({"ring_pass": "both"}, r"ring_pass='both'.*'auto', 'kv', 'q'"),
        ({"chunk_tokens": 0}, "chunk_tokens.*0"),
        ({"chunk_tokens": True}, "chunk_tokens.*True"),
        ({"page_tokens": 24}, "page_tokens.*24"),
        ({"kv_cache_tokens": -5}, "kv_cache_tokens.*-5"),
    ],
)
def test_what_cannot_work_is_refused_before_weights_are_read(
    toy_dir: pathlib.Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], message: str
) -> None:
    monkeypatch.setattr(weights, "load_model", lambda *_: pytest.fail("weights were read"))
    with pytest.raises(ValueError, match=message):
        Engine.load(toy_dir, **options)


@pytest.mark.parametrize("degrees", [{"pp": 0}, {"ring": -1}, {"ulysses": 1.5}, {"pp": True}])
def test_mesh_degrees_are_positive_integers(degrees: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(degrees))):
        MeshShape(**degrees)


@pytest.mark.parametrize("length", [1024, 1100, 1663])
@pytest.mark.parametrize("shape", [MeshShape(1, r, u) for r, u in ((2, 1), (4, 1), (8, 1), (4, 2), (2, 4))], ids=str)
def test_attention_work_is_balanced(toy_dir: pathlib.Path, shape: MeshShape, length: int) -> None:
    """Products of a query block and a key block, counted where the loops run, for prompts of 64 blocks and more."""
    it = engine(toy_dir, shape, chunk_tokens=2048, block_q=16, block_kv=16, page_tokens=16)
    it.prefill([prompt(length)])
    work = np.sum([tick.attention_blocks for tick in it.last_ticks], axis=0)[0]
    assert work.shape == (shape.ring, shape.ulysses)
    assert work.max() / work.mean() <= 1.05
    # Nothing that the mask excludes is computed: in each of 3 full layers half of the square of blocks, which end where
    # segments end, and in each of 3 window layers the two or three blocks that a window of 8 touches.
    q_blocks = 2 * shape.ring * math.ceil(length / (2 * shape.ring) / 16)
    kv_blocks = shape.ring * math.ceil(length / shape.ring / 16)
    assert work.sum() / shape.ulysses <= 3 * (q_blocks * kv_blocks / 2 + 2 * q_blocks) + 3 * 3 * q_blocks


def test_balance_over_chunks(toy_dir: pathlib.Path) -> None:
    it = engine(toy_dir, MeshShape(1, 4, 1), chunk_tokens=512, block_q=16, block_kv=16, page_tokens=16)
    it.prefill([prompt(2000)])
    assert [tick.chunks[0] for tick in it.last_ticks] == [(0, 500 * i, 500) for i in range(4)]
    work = np.sum([tick.attention_blocks for tick in it.last_ticks], axis=0)
    assert work.max() / work.mean() <= 1.05


def test_ticks_fill_the_pipeline(toy_dir: pathlib.Path) -> None:
    """A prompt of 4 chunks on 2 stages takes 5 ticks; a second prompt joins without a bubble."""
    it = engine(toy_dir, MeshShape(2, 1, 1))
    it.prefill([prompt(256)])
    assert [tick.chunks for tick in it.last_ticks] == [
        ((0, 0, 64), None),
        ((0, 64, 64), (0, 0, 64)),
        ((0, 128, 64), (0, 64, 64)),
        ((0, 192, 64), (0, 128, 64)),
        (None, (0, 192, 64)),
    ]
    seen: list[tuple[int, int]] = []
    it.prefill([prompt(256), prompt(5)], on_tick=lambda done, total: seen.append((done, total)))
    assert [tick.chunks[0] for tick in it.last_ticks][:2] == [(1, 0, 5), (0, 0, 64)]
    assert len(it.last_ticks) == 6
    assert seen == [(i, 6) for i in range(1, 7)]


def test_ttft_is_from_the_call_to_the_token(toy_dir: pathlib.Path) -> None:
    """Case S12: with one chunk a tick, later requests wait for earlier ones, and all tokens are computed once."""
    it = engine(toy_dir, chunk_tokens=64)
    prompts = [prompt(150, seed=s) for s in range(10)]
    it.prefill(prompts)  # compiles
    results = it.prefill(prompts)
    times = [r.ttft_s for r in results]
    assert times == sorted(times)
    assert times[0] > 0
    assert times[-1] > 3 * times[0]
    assert sum(chunk[2] for tick in it.last_ticks for chunk in tick.chunks if chunk) == sum(len(p) for p in prompts)


def test_sampling_follows_its_settings(toy_dir: pathlib.Path) -> None:
    it = engine(toy_dir)
    ids = prompt(20)
    greedy = it.prefill([ids])[0]
    requests = [Request(prompt_token_ids=ids, temperature=2.0, top_k=5, seed=s) for s in range(40)]
    tokens = [r.token_id for r in it.prefill(requests)]
    assert set(tokens) <= set(np.argsort(-greedy.logits)[:5].tolist())
    assert len(set(tokens)) > 1
    assert tokens == [r.token_id for r in it.prefill(requests)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_saved_kv_is_the_kv(toy_dir: pathlib.Path, tmp_path: pathlib.Path, dtype: str) -> None:
    ids = prompt(90)
    result = engine(toy_dir, MeshShape(2, 2, 2), dtype=dtype).prefill([ids])[0]
    loaded = load_kv(result.kv.save(tmp_path / "kv"), token_ids=ids, dtype=dtype, kv_heads=2, head_dim=32, num_layers=6)
    for layer in range(6):
        start, k, v = loaded.layer(layer)
        mine = result.kv.layer(layer)
        assert start == mine[0] == (90 - 8 if layer % 2 == 0 else 0)
        assert k.tobytes() == mine[1].tobytes()
        assert v.tobytes() == mine[2].tobytes()
    width = 4 if dtype == "float32" else 2
    assert result.kv.nbytes == 2 * 2 * 32 * width * (3 * 90 + 3 * 8)


def test_an_empty_batch_is_empty(toy_dir: pathlib.Path) -> None:
    assert engine(toy_dir).prefill([]) == []


def test_heads_of_the_real_model_fit(toy_dir: pathlib.Path) -> None:
    """gpt-oss has 64 query and 8 KV heads: every power of two up to 64 works, replicating KV heads above 8."""
    for ulysses in range(1, 65):
        shape = MeshShape(1, 1, ulysses)
        if math.log2(ulysses).is_integer():
            shape.check_heads(64, 8)
        else:
            with pytest.raises(ValueError, match=f"ulysses={ulysses}"):
                shape.check_heads(64, 8)


def test_a_prompt_without_finite_logits_harms_no_other(toy_dir: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """The embedding of one id is not a number, as in a damaged checkpoint."""
    poisoned = tmp_path / "poisoned"
    shutil.copytree(toy_dir, poisoned)
    for file in poisoned.glob("*.safetensors"):
        tensors = load_file(file)
        if "model.embed_tokens.weight" in tensors:
            tensors["model.embed_tokens.weight"][7] = ml_dtypes.bfloat16(np.nan)
            save_file(tensors, file, metadata={"format": "pt"})
    good = [[i if i != 7 else 8 for i in prompt(n)] for n in (30, 70)]
    first, bad, last = engine(poisoned, MeshShape(1, 2, 1)).prefill([good[0], [1, 7, 2], good[1]])
    check(toy_dir, good, [first, last])
    assert first.error is last.error is None
    assert bad.token_id == NO_TOKEN
    assert bad.error is not None
    assert "not finite" in bad.error


def test_processes_compare_order_layer_and_request(toy_dir: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the processes of a run compare tells any two calls apart that would not do the same."""
    it, said = engine(toy_dir), list[str]()
    monkeypatch.setattr(distributed, "agree", lambda name, summary: said.append(f"{name} {summary}"))
    requests = [Request(prompt_token_ids=[i], request_id=name) for i, name in ((1, "a"), (2, "b"))]
    a, b = it.prefill(requests)
    it.prefill(requests[::-1])
    for result, layer in ((a, 0), (a, 1), (b, 0)):
        result.kv.layer(layer)
    assert len(said) == 5
    assert len(set(said)) == 5
