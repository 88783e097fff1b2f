"""Every token has one place, the places balance causal work, and what windows need lies next door (CASES C10)."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from slope_jax.mesh.axes import MeshShape
from slope_jax.mesh.layout import (
    PAD_POSITION,
    ChunkView,
    largest_share,
    length_buckets,
    pack_chunk,
    plan_chunks,
    prompt_positions,
    smallest_bucket,
    zigzag,
)

RINGS = [1, 2, 3, 4, 8]
LENGTHS = [*range(1, 42), 63, 64, 65, 127, 128, 129, 500, 1001]


@pytest.mark.parametrize("ring", RINGS)
@pytest.mark.parametrize("window", [1, 2, 8, 128])
def test_every_token_is_owned_once(ring: int, window: int) -> None:
    for length in LENGTHS:
        layout = zigzag(100, length, ring, window)
        owned = np.concatenate([rank.positions for rank in layout])
        np.testing.assert_array_equal(np.sort(owned), np.arange(100, 100 + length))
        assert all((np.diff(rank.positions) > 0).all() for rank in layout)


@pytest.mark.parametrize("ring", RINGS)
@pytest.mark.parametrize("window", [2, 8, 128])
def test_window_keys_lie_on_the_neighbour(ring: int, window: int) -> None:
    reach = window - 1
    for length in LENGTHS:
        layout = zigzag(0, length, ring, window)
        for rank, tokens in enumerate(layout):
            first, second = tokens.positions[: tokens.split], tokens.positions[tokens.split :]
            if len(first) and rank > 0:
                below = layout[rank - 1]
                expected = np.arange(first[0] - reach, first[0])
                np.testing.assert_array_equal(below.positions[: below.split][-reach:], expected)
            if len(second):
                above = layout[rank + 1]
                expected = np.arange(second[0] - reach, second[0])
                np.testing.assert_array_equal(above.positions[-reach:], expected)
            assert (np.diff(first) == 1).all()
            assert (np.diff(second) == 1).all()


@pytest.mark.parametrize("ring", RINGS)
def test_last_token_is_on_rank_zero(ring: int) -> None:
    for length in LENGTHS:
        assert zigzag(0, length, ring, 8)[0].positions[-1] == length - 1


@pytest.mark.parametrize("ring", [2, 4, 8])
def test_causal_work_is_equal(ring: int) -> None:
    length = 64 * ring
    work = [int((rank.positions + 1).sum()) for rank in zigzag(0, length, ring, 8)]
    assert max(work) / np.mean(work) < 1.001


@pytest.mark.parametrize("shape", [MeshShape(1, 1, 1), MeshShape(1, 2, 2), MeshShape(1, 4, 3), MeshShape(1, 8, 8)])
@pytest.mark.parametrize("window", [1, 3, 8, 128])
def test_every_chunk_fits_its_bucket(shape: MeshShape, window: int) -> None:
    smallest = smallest_bucket(shape, window)
    for bucket in length_buckets(4 * smallest + 5, shape, window):
        assert bucket % (shape.ring * shape.ulysses) == 0
        for length in {1, *np.linspace(1, bucket, 50, dtype=int).tolist()}:
            held = max(len(rank.positions) for rank in zigzag(0, length, shape.ring, window))
            assert held <= bucket // shape.ring
            assert held <= largest_share(length, shape.ring, window)


def test_buckets_are_few_and_reach_the_chunk() -> None:
    buckets = length_buckets(4096, MeshShape(1, 4, 8), 128)
    assert buckets == (2048, 4096)
    assert length_buckets(4096, MeshShape(), 128) == (128, 256, 512, 1024, 2048, 4096)
    assert length_buckets(1, MeshShape(1, 2, 2), 8)[-1] == smallest_bucket(MeshShape(1, 2, 2), 8)


@pytest.mark.parametrize(("length", "chunk"), [(1, 1), (9, 4), (8193, 4096), (4096, 4096), (17, 100)])
def test_chunks_are_equal_to_a_token(length: int, chunk: int) -> None:
    chunks = plan_chunks(length, chunk)
    sizes = [n for _, n in chunks]
    assert [start for start, _ in chunks] == [sum(sizes[:i]) for i in range(len(sizes))]
    assert sum(sizes) == length
    assert len(sizes) == -(-length // chunk)
    assert max(sizes) - min(sizes) <= 1


def test_prompt_positions_ascend_over_chunks() -> None:
    positions = prompt_positions(301, 64, 4, 8)
    np.testing.assert_array_equal(np.sort(np.concatenate(positions)), np.arange(301))
    assert all((np.diff(p) > 0).all() for p in positions)


def test_a_packed_chunk_reads_back() -> None:
    rank = zigzag(40, 50, 2, 8)[1]
    view = ChunkView.unpack(jnp.asarray(pack_chunk(rank, 7, 3, np.array([5, 9, -1], np.int32), 32)), 32)
    count = len(rank.positions)
    assert (int(view.num_tokens), int(view.split), int(view.cached), int(view.slot)) == (count, rank.split, 7, 3)
    np.testing.assert_array_equal(view.positions_T[:count], rank.positions)
    assert (np.asarray(view.positions_T[count:]) == PAD_POSITION).all()
    np.testing.assert_array_equal(view.page_table, [5, 9, -1])
