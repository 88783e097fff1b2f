"""The invariance law: results do not depend on how they were computed. The oracle shares no code with the engine."""

from __future__ import annotations

import pathlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slope_jax import MeshShape, Request
from tests.oracle import checkpoints
from tests.oracle.checkpoints import WriteCheckpoint
from tests.slope_jax.engines import ALL_SHAPES, check, engine, steady_prompt

LENGTHS = [1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 32, 33, 40, 63, 64, 65, 127, 150, 301]
MODELS = {"toy8": checkpoints.TOY8, "irregular": checkpoints.TOY_IRREGULAR, "wide": checkpoints.WIDE}


def prompts_of(
    directory: pathlib.Path, model: checkpoints.TinyModel, lengths: list[int], seed: int = 0
) -> list[list[int]]:
    return [list(steady_prompt(directory, model, n, seed)) for n in lengths]


@pytest.mark.parametrize("shape", ALL_SHAPES, ids=str)
def test_every_shape_and_length(checkpoint: WriteCheckpoint, shape: MeshShape) -> None:
    """All shapes of 1, 2, 4 and 8 devices; lengths about the window, the chunk and the number of devices."""
    directory = checkpoint(checkpoints.TOY8)
    prompts = prompts_of(directory, checkpoints.TOY8, LENGTHS)
    check(directory, prompts, engine(directory, shape).prefill(prompts))


@st.composite
def _ways_to_compute(draw: st.DrawFn) -> tuple[str, MeshShape, int, str, list[int]]:
    name = draw(st.sampled_from(sorted(MODELS)))
    shapes = [s for s in ALL_SHAPES if _fits(MODELS[name], s)]
    chunk = draw(st.sampled_from([1, 3, 8, 9, 16, 17, 40, 100, 257]))
    longest = 40 if chunk < 8 else 200
    lengths = draw(st.lists(st.integers(1, longest), min_size=1, max_size=5))
    return name, draw(st.sampled_from(shapes)), chunk, draw(st.sampled_from(["auto", "kv", "q"])), lengths


def _fits(model: checkpoints.TinyModel, shape: MeshShape) -> bool:
    kv_heads = model.num_kv_heads
    heads = model.num_heads % shape.ulysses == 0 and max(kv_heads, shape.ulysses) % min(kv_heads, shape.ulysses) == 0
    return heads and shape.pp <= (model.num_layers + 1) // 2


@settings(max_examples=24)
@given(way=_ways_to_compute(), seed=st.integers(0, 3))
def test_any_way_to_compute(
    checkpoint: WriteCheckpoint, way: tuple[str, MeshShape, int, str, list[int]], seed: int
) -> None:
    """Mesh shape, chunk size (and so bucket and pages), ring pass, batch order, neighbours and lengths together."""
    name, shape, chunk, ring_pass, lengths = way
    directory = checkpoint(MODELS[name])
    prompts = prompts_of(directory, MODELS[name], lengths, seed)
    it = engine(directory, shape, chunk_tokens=chunk, kv_cache_tokens=512, ring_pass=ring_pass)
    check(directory, prompts, it.prefill(prompts))


@pytest.mark.parametrize("chunk", [1, 3, 8, 9, 16, 17])
def test_tails_of_the_window_layers_between_chunks(checkpoint: WriteCheckpoint, chunk: int) -> None:
    """Case P01: chunks shorter and longer than the window of 8."""
    directory = checkpoint(checkpoints.TOY_IRREGULAR)
    prompts = prompts_of(directory, checkpoints.TOY_IRREGULAR, [chunk, chunk + 1, 40, 50])
    check(
        directory,
        prompts,
        engine(directory, MeshShape(1, 2, 2), chunk_tokens=chunk, kv_cache_tokens=64).prefill(prompts),
    )


def test_every_length_on_eight_devices(checkpoint: WriteCheckpoint) -> None:
    """Case C10: lengths 1 to 40 on ring 4 x ulysses 2, most of which divide by nothing."""
    directory = checkpoint(checkpoints.TOY)
    prompts = prompts_of(directory, checkpoints.TOY, list(range(1, 41)))
    check(directory, prompts, engine(directory, MeshShape(1, 4, 2)).prefill(prompts))


def test_neighbours_do_not_change_a_bit(checkpoint: WriteCheckpoint) -> None:
    """Case G22, to the last bit: a prompt alone, and among others, in the same bucket and with the same ring pass."""
    directory = checkpoint(checkpoints.TOY)
    it = engine(directory, MeshShape(2, 2, 2))
    prompts = prompts_of(directory, checkpoints.TOY, [64, 65, 63, 130])
    together = it.prefill(prompts)
    for prompt, among in zip(prompts, together, strict=True):
        alone = it.prefill([prompt])[0]
        assert alone.logits.tobytes() == among.logits.tobytes()
        for layer in range(alone.kv.num_layers):
            for mine, theirs in zip(alone.kv.layer(layer)[1:], among.kv.layer(layer)[1:], strict=True):
                assert mine.tobytes() == theirs.tobytes()


def test_results_come_in_the_order_of_the_batch(checkpoint: WriteCheckpoint) -> None:
    directory = checkpoint(checkpoints.TOY)
    lengths = [100, 1, 50, 7, 33]
    prompts = prompts_of(directory, checkpoints.TOY, lengths)
    requests = [Request(prompt_token_ids=p, request_id=f"r{len(p)}") for p in prompts]
    results = engine(directory, MeshShape(2, 2, 2)).prefill(requests)
    assert [r.request_id for r in results] == [f"r{n}" for n in lengths]
    check(directory, prompts, results)


@pytest.mark.parametrize(("shape"), [MeshShape(1, 1, 4), MeshShape(1, 1, 8), MeshShape(1, 2, 4)], ids=str)
def test_more_ulysses_ranks_than_kv_heads(checkpoint: WriteCheckpoint, shape: MeshShape) -> None:
    """Case C08, and C07: sinks and biases follow the head shard."""
    directory = checkpoint(checkpoints.TOY)
    prompts = prompts_of(directory, checkpoints.TOY, [1, 9, 70])
    check(directory, prompts, engine(directory, shape).prefill(prompts))


@pytest.mark.parametrize("experts", ["mxfp4", "bfloat16"])
@pytest.mark.parametrize("spelling", ["rope_scaling", "rope_parameters"])
def test_checkpoint_forms_give_equal_results(checkpoint: WriteCheckpoint, experts: str, spelling: str) -> None:
    directory = checkpoint(checkpoints.TOY, experts=experts, rope_spelling=spelling, num_files=1)
    prompts = prompts_of(directory, checkpoints.TOY, [40])
    check(directory, prompts, engine(directory, MeshShape(1, 2, 1)).prefill(prompts))


def test_packed_experts_are_bit_equal_to_unpacked(checkpoint: WriteCheckpoint) -> None:
    directory = checkpoint(checkpoints.TOY)
    prompts = prompts_of(directory, checkpoints.TOY, [5, 100])
    unpacked, packed = (
        engine(directory, MeshShape(2, 1, 2), expert_weights=form).prefill(prompts) for form in ("bfloat16", "mxfp4")
    )
    check(directory, prompts, packed)
    for a, b in zip(unpacked, packed, strict=True):
        assert a.logits.tobytes() == b.logits.tobytes()
