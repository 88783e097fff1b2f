"""The engine against Hugging Face transformers in one process: `pytest tests/oracle/live.py`.

Needs the packages of requirements-oracle.txt; its name keeps it out of the default collection. Transformers reads the
unquantised form of a checkpoint and the engine the MXFP4 form of the same weights.
"""

from __future__ import annotations

import functools
import pathlib
from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
import pytest
from transformers import GptOssForCausalLM

from slope_jax import Engine, MeshShape
from tests.oracle import golden, numpy_forward, transformers_reference
from tests.oracle.checkpoints import (
    GOLDEN128,
    SLIDING,
    TOY,
    TOY_IRREGULAR,
    WIDE,
    TinyModel,
    WriteCheckpoint,
    random_prompt,
)
from tests.oracle.transformers_reference import KvLayer

LENGTHS = {
    TOY: golden.LENGTHS,
    TOY_IRREGULAR: golden.LENGTHS,
    WIDE: (1, 4, 5, 6, 23),
    GOLDEN128: (1, 5, 126, 127, 128, 129, 130, 255, 256, 257, 300),
}
DECODED = 20

# Transformers in float32 differs from float64 by at most 1.1e-5 in the logits and 2.4e-5 in the KV of the golden files.
TOLERANCE = 2e-4

LoadTransformers: TypeAlias = Callable[[TinyModel], GptOssForCausalLM]


@pytest.fixture(scope="module")
def transformers_model(checkpoint: WriteCheckpoint) -> LoadTransformers:
    """A function that loads a tiny model in transformers."""

    @functools.cache
    def load(model: TinyModel) -> GptOssForCausalLM:
        return transformers_reference.load(checkpoint(model, experts="float32", dtype="float32"))

    return load


def prompts_of(model: TinyModel) -> list[list[int]]:
    """Prompts of lengths around the window and beyond."""
    return [random_prompt(model, length, seed=length) for length in LENGTHS[model]]


def load_engine(directory: pathlib.Path, mesh: MeshShape, chunk_tokens: int, expert_weights: str) -> Engine:
    """The engine in float32."""
    return Engine.load(directory, mesh=mesh, dtype="float32", expert_weights=expert_weights, chunk_tokens=chunk_tokens)


@pytest.mark.parametrize(
    ("model", "mesh", "chunk_tokens", "expert_weights"),
    [
        pytest.param(TOY, MeshShape(1, 1, 1), 4096, "bfloat16", id="toy-1x1x1"),
        pytest.param(TOY, MeshShape(2, 2, 2), 4096, "mxfp4", id="toy-2x2x2"),
        pytest.param(TOY, MeshShape(1, 4, 2), 16, "bfloat16", id="toy-1x4x2-chunks-of-16"),
        pytest.param(TOY, MeshShape(1, 1, 8), 4096, "bfloat16", id="toy-1x1x8"),
        pytest.param(TOY, MeshShape(3, 2, 1), 16, "mxfp4", id="toy-3x2x1-chunks-of-16"),
        pytest.param(TOY_IRREGULAR, MeshShape(1, 2, 4), 4096, "bfloat16", id="toy_irregular-1x2x4"),
        pytest.param(WIDE, MeshShape(1, 2, 4), 4096, "mxfp4", id="wide-1x2x4"),
        pytest.param(GOLDEN128, MeshShape(2, 2, 2), 4096, "mxfp4", id="golden128-2x2x2"),
        pytest.param(GOLDEN128, MeshShape(1, 8, 1), 128, "bfloat16", id="golden128-1x8x1-chunks-of-128"),
    ],
)
def test_logits_and_kv_equal_transformers(
    model: TinyModel,
    mesh: MeshShape,
    chunk_tokens: int,
    expert_weights: str,
    checkpoint: WriteCheckpoint,
    transformers_model: LoadTransformers,
) -> None:
    engine = load_engine(checkpoint(model), mesh, chunk_tokens, expert_weights)
    prompts = prompts_of(model)
    for prompt, result in zip(prompts, engine.prefill(prompts), strict=True):
        logits, kv = transformers_reference.prefill(transformers_model(model), prompt)
        np.testing.assert_allclose(result.logits, logits, rtol=0, atol=TOLERANCE)
        assert result.token_id == logits.argmax()
        for i, (_, k_all, v_all) in enumerate(kv):
            start, k, v = result.kv.layer(i)
            assert start == handed_over_from(model, i, len(prompt))
            np.testing.assert_allclose(k, k_all[start:], rtol=0, atol=TOLERANCE)
            np.testing.assert_allclose(v, v_all[start:], rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize(
    ("model", "mesh", "chunk_tokens"),
    [
        pytest.param(TOY, MeshShape(2, 2, 2), 16, id="toy"),
        pytest.param(TOY_IRREGULAR, MeshShape(1, 2, 2), 4096, id="toy_irregular"),
        pytest.param(GOLDEN128, MeshShape(2, 2, 2), 128, id="golden128"),
    ],
)
def test_transformers_decodes_from_the_engine_as_from_its_own_prefill(
    model: TinyModel,
    mesh: MeshShape,
    chunk_tokens: int,
    checkpoint: WriteCheckpoint,
    transformers_model: LoadTransformers,
) -> None:
    engine = load_engine(checkpoint(model), mesh, chunk_tokens, "mxfp4")
    prompts = prompts_of(model)
    for prompt, result in zip(prompts, engine.prefill(prompts), strict=True):
        kv = [result.kv.layer(i) for i in range(model.num_layers)]
        check_decoding(transformers_model(model), prompt, kv, result.token_id)


@pytest.mark.parametrize(
    "model",
    [
        pytest.param(TOY, id="toy"),
        pytest.param(TOY_IRREGULAR, id="toy_irregular"),
        pytest.param(GOLDEN128, id="golden128"),
    ],
)
def test_transformers_decodes_from_the_float64_forward_as_from_its_own_prefill(
    model: TinyModel, checkpoint: WriteCheckpoint, transformers_model: LoadTransformers
) -> None:
    for prompt in prompts_of(model):
        logits, kv = float64_hand_over(checkpoint(model), model, prompt)
        check_decoding(transformers_model(model), prompt, kv, int(logits.argmax()))


@pytest.mark.parametrize("kind", ["sliding", "full"])
def test_decoding_notices_wrong_kv(
    kind: str, checkpoint: WriteCheckpoint, transformers_model: LoadTransformers
) -> None:
    prompt = random_prompt(TOY, 33)
    logits, kv = float64_hand_over(checkpoint(TOY), TOY, prompt)
    for i, layer_kind in enumerate(TOY.layer_types):
        if (layer_kind == SLIDING) == (kind == "sliding"):
            start, k, v = kv[i]
            kv[i] = start, np.roll(k, 1, axis=0), v
    with pytest.raises(AssertionError):
        check_decoding(transformers_model(TOY), prompt, kv, int(logits.argmax()))


def handed_over_from(model: TinyModel, layer: int, num_tokens: int) -> int:
    """The first token whose KV a layer hands over."""
    return max(0, num_tokens - model.window) if model.layer_types[layer] == SLIDING else 0


def float64_hand_over(
    directory: pathlib.Path, model: TinyModel, prompt: list[int]
) -> tuple[numpy_forward.Array, list[KvLayer]]:
    """Logits and KV of the float64 forward, the KV cut as the engine hands it over."""
    logits, kv = numpy_forward.forward(directory, prompt)
    starts = [handed_over_from(model, i, len(prompt)) for i in range(model.num_layers)]
    return logits, [(start, k[start:], v[start:]) for start, (k, v) in zip(starts, kv, strict=True)]


def check_decoding(model: GptOssForCausalLM, prompt: list[int], kv: Sequence[KvLayer], first_token: int) -> None:
    """Asserts that transformers continues from the KV with the tokens that follow its own prefill."""
    continued = transformers_reference.greedy_from_kv(model, kv, len(prompt), first_token, DECODED)
    assert continued == transformers_reference.greedy(model, prompt, DECODED), f"prompt of {len(prompt)} tokens"
