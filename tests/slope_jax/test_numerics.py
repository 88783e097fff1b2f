"""Precision: bfloat16 against transformers' own bfloat16, long rings, large residuals, and what padding may hold."""

from __future__ import annotations

import dataclasses
import pathlib
import shutil

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from slope_jax import Engine, MeshShape
from tests.oracle import checkpoints, golden, numpy_forward
from tests.oracle.checkpoints import WriteCheckpoint
from tests.slope_jax.engines import check, engine


@pytest.mark.parametrize("name", golden.CASES)
@pytest.mark.parametrize("shape", [MeshShape(), MeshShape(1, 2, 2)], ids=str)
def test_bfloat16_is_no_worse_than_transformers(checkpoint: WriteCheckpoint, name: str, shape: MeshShape) -> None:
    """Root-mean-square and largest error of the last logits over all prompts of a golden file, against float32."""
    case = golden.load(name)
    results = engine(checkpoint(case.model), shape, dtype="bfloat16", chunk_tokens=128).prefill(case.prompts)
    ours = np.stack([r.logits for r in results]) - case.logits
    theirs = case.logits_bf16 - case.logits
    assert np.abs(ours).max() <= np.abs(theirs).max()
    assert np.square(ours).mean() <= np.square(theirs).mean()


@pytest.mark.parametrize("name", golden.CASES)
def test_float32_equals_transformers(checkpoint: WriteCheckpoint, name: str) -> None:
    case = golden.load(name)
    results = engine(checkpoint(case.model), MeshShape(1, 2, 2), chunk_tokens=128).prefill(case.prompts)
    np.testing.assert_allclose(np.stack([r.logits for r in results]), case.logits, atol=2e-4, rtol=0)
    by_length = {r.num_tokens: r for r in results}
    for length, layers in case.kv.items():
        for layer, (k, v) in enumerate(layers):
            start, found_k, found_v = by_length[length].kv.layer(layer)
            np.testing.assert_allclose(found_k, k[start:], atol=2e-4, rtol=0)
            np.testing.assert_allclose(found_v, v[start:], atol=2e-4, rtol=0)


def test_error_does_not_grow_with_the_ring(checkpoint: WriteCheckpoint) -> None:
    """Case C05: partial results stay in float32 from step to step, whatever goes round.

    Every token goes to all experts, because a token that rounding sends to another expert would drown the error.
    """
    model = dataclasses.replace(checkpoints.TOY, num_experts=checkpoints.TOY.experts_per_token)
    directory = checkpoint(model)
    prompts = [checkpoints.random_prompt(model, 512, seed=s) for s in range(12)]
    exact = np.stack([numpy_forward.forward(directory, p)[0] for p in prompts])
    error = {}
    for ring, ring_pass in ((1, "kv"), (8, "kv"), (8, "q")):
        it = engine(directory, MeshShape(1, ring, 1), dtype="bfloat16", chunk_tokens=512, ring_pass=ring_pass)
        logits = np.stack([r.logits for r in it.prefill(prompts)])
        error[ring, ring_pass] = np.sqrt(np.square(logits - exact).mean())
    assert max(error.values()) <= 1.2 * error[1, "kv"]


def test_large_residuals(checkpoint: WriteCheckpoint) -> None:
    """Case G16: a residual stream of 1e5 and more, beyond float16, stays finite and exact."""
    model = dataclasses.replace(checkpoints.TOY, down_exponents=(134, 138))
    directory = checkpoint(model)
    prompts = [checkpoints.random_prompt(model, n, seed=n) for n in (1, 40)]
    tensors = numpy_forward.load(directory).tensors
    assert np.abs(tensors["model.layers.0.mlp.experts.down_proj"]).max() > 1e3
    check(directory, prompts, engine(directory, MeshShape(2, 2, 1)).prefill(prompts))
    for result in engine(directory, dtype="bfloat16").prefill(prompts):
        assert np.isfinite(result.logits).all()


def test_float16_is_refused(toy_dir: pathlib.Path) -> None:
    with pytest.raises(ValueError, match=r"dtype='float16' is not supported.*bfloat16.*float32"):
        Engine.load(toy_dir, dtype="float16")


def test_padding_may_hold_anything(toy_dir: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Case G22: the embedding of id 0, which fills up chunks, is not a number, and no prompt has id 0."""
    poisoned = tmp_path / "poisoned"
    shutil.copytree(toy_dir, poisoned)
    name = "model.embed_tokens.weight"
    for file in poisoned.glob("*.safetensors"):
        tensors = load_file(file)
        if name in tensors:
            tensors[name][0] = ml_dtypes.bfloat16(np.nan)
            save_file(tensors, file, metadata={"format": "pt"})
    prompts = [[max(i, 1) for i in checkpoints.random_prompt(checkpoints.TOY, n, seed=n)] for n in (1, 7, 64, 65)]
    for shape in (MeshShape(), MeshShape(2, 2, 2)):
        clean = engine(toy_dir, shape).prefill(prompts)
        dirty = engine(poisoned, shape).prefill(prompts)
        for a, b in zip(clean, dirty, strict=True):
            assert a.logits.tobytes() == b.logits.tobytes()


def test_the_window_is_kept_in_every_layout(checkpoint: WriteCheckpoint) -> None:
    """Case C13: with window layers only, a token outside every window changes nothing; inside, it does."""
    model = dataclasses.replace(checkpoints.TOY, layer_types=("sliding_attention",))
    directory = checkpoint(model)
    prompt = checkpoints.random_prompt(model, 3 * model.window, seed=0)
    for shape in (MeshShape(), MeshShape(1, 2, 1), MeshShape(1, 1, 2), MeshShape(1, 4, 2)):
        it = engine(directory, shape)

        def logits(position: int, it: Engine = it) -> bytes:
            changed = list(prompt)
            changed[position] = (changed[position] + 1) % model.vocab
            return it.prefill([changed])[0].logits.tobytes()

        same = it.prefill([prompt])[0].logits.tobytes()
        assert logits(len(prompt) - 1 - model.window) == same
        assert logits(0) == same
        assert logits(len(prompt) - model.window) != same
