"""Blockwise attention against a plain softmax in float64: windows, sinks, empty blocks, keys in several parts."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from slope_jax.mesh.layout import PAD_POSITION, ChunkView
from slope_jax.model.ops.attention.xla import (
    AttentionSpec,
    Partial,
    QueryBlocks,
    attend,
    finish_partial,
    merge,
    start_partial,
)
from tests import on_mesh

RNG = np.random.default_rng(0)


def blockwise(
    q: np.ndarray,
    q_positions: np.ndarray,
    parts: list[tuple[np.ndarray, np.ndarray, np.ndarray]],
    sinks: np.ndarray,
    window: int | None,
    split: int | None = None,
    block_q: int = 4,
    block_kv: int = 8,
    apart: bool = False,
) -> tuple[np.ndarray, int]:
    """Attention of q `[T, N, H]` to keys and values `[S, K, H]` in parts, each padded as needed; blocks done.

    The parts are added one by one, or looked at apart from each other and merged.
    """
    tokens, _, head_dim = q.shape
    spec = AttentionSpec(block_q=block_q, block_kv=block_kv, window=window)
    kv_heads = parts[0][0].shape[1]
    scaled = (q / np.sqrt(head_dim)).astype(np.float32)
    q_KTGH = np.pad(scaled, [(0, block_q), (0, 0), (0, 0)]).reshape(tokens + block_q, kv_heads, -1, head_dim)
    positions = np.pad(q_positions.astype(np.int32), (0, block_q), constant_values=PAD_POSITION)

    def run(q_KTGH: jnp.ndarray, sinks_N: jnp.ndarray) -> tuple[jnp.ndarray, jnp.ndarray]:
        zero = jnp.int32(0)
        chunk = ChunkView(
            jnp.int32(tokens),
            jnp.int32(tokens if split is None else split),
            zero,
            zero,
            jnp.asarray(positions[:tokens]),
            jnp.zeros(1, jnp.int32),
        )
        partial = start_partial(sinks_N, tokens, kv_heads, head_dim, spec)
        nothing = start_partial(jnp.full_like(sinks_N, -jnp.inf), tokens, kv_heads, head_dim, spec)
        for k, v, k_positions in parts:
            pad = spec.padding(len(k))
            kv = np.concatenate([k, v], axis=1).astype(np.float32)
            # The padding is not a number, which must not matter.
            kv_JSH = np.pad(kv, [(0, pad), (0, 0), (0, 0)], constant_values=np.nan).swapaxes(0, 1)
            positions_S = np.pad(k_positions.astype(np.int32), (0, pad), constant_values=PAD_POSITION)
            found = attend(
                nothing if apart else partial,
                q_KTGH,
                jnp.asarray(positions),
                QueryBlocks.of(chunk, block_q),
                jnp.asarray(kv_JSH),
                jnp.asarray(positions_S),
                spec,
            )
            partial = Partial(*merge(partial[:3], found[:3]), partial.blocks + found.blocks) if apart else found
        return finish_partial(partial, tokens), partial.blocks

    out, blocks = on_mesh.run(run, jnp.asarray(q_KTGH.swapaxes(0, 1)), jnp.asarray(sinks, jnp.float32))
    return np.asarray(out), int(blocks)


def plain(
    q: np.ndarray,
    q_positions: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    k_positions: np.ndarray,
    sinks: np.ndarray,
    window: int | None,
) -> np.ndarray:
    out = np.zeros(q.shape)
    group = q.shape[1] // k.shape[1]
    for t, position in enumerate(q_positions):
        seen = (k_positions >= 0) & (k_positions <= position)
        if window is not None:
            seen &= k_positions > position - window
        for n in range(q.shape[1]):
            scores = k[seen, n // group] @ q[t, n] / np.sqrt(q.shape[2])
            top = max(scores.max(initial=-np.inf), sinks[n])
            weights = np.exp(scores - top)
            total = weights.sum() + np.exp(sinks[n] - top)
            out[t, n] = weights @ v[seen, n // group] / total if seen.any() else 0
    return out


def random_case(tokens: int, keys: int, heads: int = 6, kv_heads: int = 2, head_dim: int = 16) -> list[np.ndarray]:
    shapes = [(tokens, heads, head_dim), (keys, kv_heads, head_dim), (keys, kv_heads, head_dim)]
    return [*(RNG.normal(size=shape) * 2 for shape in shapes), RNG.normal(size=heads) * 4]


@pytest.mark.parametrize("window", [None, 1, 5, 8, 40])
@pytest.mark.parametrize(("tokens", "before"), [(1, 0), (7, 0), (32, 0), (13, 30), (1, 64)])
def test_equals_a_plain_softmax(window: int | None, tokens: int, before: int) -> None:
    """Queries that continue a prompt of which `before` keys are there already."""
    q, k, v, sinks = random_case(tokens, tokens + before)
    q_positions, k_positions = np.arange(before, before + tokens), np.arange(before + tokens)
    found, _ = blockwise(q, q_positions, [(k, v, k_positions)], sinks, window)
    np.testing.assert_allclose(found, plain(q, q_positions, k, v, k_positions, sinks, window), atol=3e-6)


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("window", [None, 6])
def test_keys_in_parts_of_any_order(window: int | None, apart: bool) -> None:
    """Cases C01, C02 and C06: parts that hold no visible key weigh nothing, and the sink counts once."""
    tokens, keys = 20, 60
    q, k, v, sinks = random_case(tokens, keys)
    # A gap in the queries, as on a ring rank that holds two segments.
    q_positions = np.concatenate([np.arange(10, 19), np.arange(49, 60)])
    k_positions = np.arange(keys)
    order = [np.arange(40, 60), np.arange(0, 7), np.arange(7, 40)]
    parts = [(k[i], v[i], k_positions[i]) for i in order]
    parts.append((np.full((8, 2, 16), np.nan), np.full((8, 2, 16), np.nan), np.full(8, PAD_POSITION)))
    found, _ = blockwise(q, q_positions, parts, sinks, window, split=9, apart=apart)
    np.testing.assert_allclose(found, plain(q, q_positions, k, v, k_positions, sinks, window), atol=3e-6)


def test_only_blocks_with_a_visible_pair_are_computed() -> None:
    """32 causal queries in blocks of 4 with keys in blocks of 8; with a window, once for each block of queries."""
    q, k, v, sinks = random_case(32, 32)
    positions = np.arange(32)
    visible = positions[None, :] <= positions[:, None]
    needed = visible.reshape(8, 4, 4, 8).any(axis=(1, 3)).sum()
    assert blockwise(q, positions, [(k, v, positions)], sinks, None)[1] == needed
    assert blockwise(q, positions, [(k, v, positions)], sinks, 3)[1] == 8


@pytest.mark.parametrize(("position", "seen"), [(0, 1), (126, 127), (127, 128), (128, 128), (129, 128), (300, 128)])
def test_window_counts_the_query_itself(position: int, seen: int) -> None:
    """Case G04, with equal scores, no sink and values that tell the positions apart."""
    keys = 304
    k = np.zeros((keys, 1, keys))
    v = np.eye(keys)[:, None]
    q = np.zeros((1, 1, keys))
    found, _ = blockwise(q, np.array([position]), [(k, v, np.arange(keys))], np.array([-np.inf]), 128)
    weights = found[0, 0]
    np.testing.assert_allclose(weights[position - seen + 1 : position + 1], 1 / seen, rtol=1e-5)
    assert np.count_nonzero(weights) == seen


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("parts", [1, 2])
def test_sink_example(parts: int, apart: bool) -> None:
    """Cases G07 and C06: scores 1 and 2, values 1 and 3, sink 0.5, with the keys together and apart."""
    k, v = np.array([1.0, 2.0])[:, None, None], np.array([1.0, 3.0])[:, None, None]
    q, positions = np.ones((1, 1, 1)), np.arange(2)
    pieces = [(k, v, positions)] if parts == 1 else [(k[i : i + 1], v[i : i + 1], positions[i : i + 1]) for i in (0, 1)]
    sink = blockwise(q, np.array([1]), pieces, np.array([0.5]), None, apart=apart)[0].item()
    assert sink == pytest.approx(2.116819, abs=1e-6)
    no_sink = blockwise(q, np.array([1]), pieces, np.array([-np.inf]), None, apart=apart)[0].item()
    assert no_sink == pytest.approx(2.462117, abs=1e-6)


@pytest.mark.parametrize("apart", [False, True])
def test_no_key_and_no_sink_give_zero(apart: bool) -> None:
    q, k, v, _ = random_case(4, 8)
    found, _ = blockwise(q, np.arange(4), [(k, v, np.arange(100, 108))], np.full(6, -np.inf), None, apart=apart)
    assert (found == 0).all()
