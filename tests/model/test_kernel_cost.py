"""Bytes of elementwise steps counted one by one, and tiles counted for routing that was drawn at random."""

from __future__ import annotations

import numpy as np
import pytest

from slope_jax.model.counts.kernel_cost import elementwise_bytes, grouped_rows, used_experts
from slope_jax.model.published import published_config


def test_elementwise_bytes_of_a_token_one_by_one() -> None:
    """(numbers read, their bytes), (numbers written, their bytes) of each step of a layer of gpt-oss-120b."""
    D, F, X, E = 2880, 2880, 4, 128
    heads = (64 + 2 * 8) * 64
    residual = [
        ((D, 4), (D, 2)),  # norm before attention
        ((2 * D, 4), (D, 4)),  # sum after attention
        ((D, 4), (D, 2)),  # norm before the experts
        ((E, 4), (E, 4)),  # scores and their choice
        ((X * D, 2), (X * D, 2)),  # a copy for each expert
        ((X * D + D, 4), (X * D + D, 4)),  # products with down written, read by the sum into the residual stream
    ]
    found = elementwise_bytes(published_config("gpt-oss-120b"), "bfloat16")
    assert found.residual == sum(r * a + w * b for (r, a), (w, b) in residual)
    assert found.heads == 2 * heads * 2
    assert found.experts == X * (2 * F + 2 * F + F) * 2  # written, read, and the activation written
    assert 300e3 < found.total < 400e3


@pytest.mark.parametrize(("pairs", "experts", "tile"), [(4096, 128, 16), (1024, 128, 16), (65_536, 128, 128)])
def test_rows_of_tiles_are_those_of_random_routing(pairs: int, experts: int, tile: int) -> None:
    random = np.random.default_rng(0)
    rows = [np.bincount(random.integers(0, experts, pairs), minlength=experts) for _ in range(50)]
    counted = np.mean([(-(-r // tile) * tile).sum() for r in rows])
    # Where experts have about a tile of rows each, half a tile is some too much or too little.
    assert grouped_rows(pairs, experts, tile) == pytest.approx(counted, rel=0.12)
    assert used_experts(pairs, experts) == pytest.approx(np.mean([(r > 0).sum() for r in rows]), rel=0.01)


def test_a_dense_model_fills_but_one_tile() -> None:
    assert grouped_rows(1000, 1, 128) == 1024
    assert used_experts(1000, 1) == 1
