"""Random weights drawn where they are read are those of a whole tensor, and make a model that works."""

from __future__ import annotations

import dataclasses
import pathlib

import numpy as np
import pytest

from slope_jax import Engine, MeshShape
from slope_jax.launch import make_checkpoint as maker
from slope_jax.launch.random_weights import RandomSource
from slope_jax.model.config import load_config

TINY = maker.PRESETS["tiny"]


def test_the_config_of_a_preset_is_that_of_its_checkpoint(tmp_path: pathlib.Path) -> None:
    found = load_config(maker.make_checkpoint(tmp_path / "tiny", TINY))
    assert TINY.config() == dataclasses.replace(found, eos_token_ids=())


@pytest.mark.parametrize(
    "name",
    [
        "model.embed_tokens.weight",
        "model.layers.1.mlp.experts.gate_up_proj_blocks",
        "model.layers.2.mlp.experts.down_proj_scales",
        "model.layers.3.mlp.experts.down_proj_bias",
        "model.layers.0.self_attn.sinks",
    ],
)
def test_a_part_is_that_part_of_the_whole(name: str) -> None:
    source = RandomSource(TINY.config(), seed=3)
    whole = source.read(name)
    assert whole.shape == source.shape(name)
    assert whole.dtype == source.dtype(name)
    assert len(np.unique(whole)) > 2
    index = tuple(slice(n // 3, n - 1) for n in whole.shape)
    np.testing.assert_array_equal(source.read(name, *index), whole[index])
    np.testing.assert_array_equal(source.read(name, index[0]), whole[index[0]])
    assert (RandomSource(TINY.config(), seed=4).read(name) != whole).any()


def test_a_model_without_a_checkpoint_does_not_depend_on_the_mesh() -> None:
    source = RandomSource(TINY.config())
    prompt = np.random.default_rng(0).integers(0, TINY.vocab_size, 100)
    results = [
        Engine.load(source, mesh=shape, dtype="float32", chunk_tokens=64, kv_cache_tokens=128).prefill([prompt])[0]
        for shape in (MeshShape(), MeshShape(2, 1, 2))
    ]
    assert results[0].logits.std() > 1
    np.testing.assert_allclose(results[0].logits, results[1].logits, atol=2e-4)
