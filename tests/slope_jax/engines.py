"""Engines for tests, and how their results are compared with the float64 oracle."""

from __future__ import annotations

import functools
import pathlib
from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np

from slope_jax import Engine, MeshShape, PrefillResult
from tests.oracle import numpy_forward
from tests.oracle.checkpoints import TinyModel, random_prompt

# On the toy models, whose logits are of order 5, float32 gives logits and KV within 1e-5 of the oracle on every mesh
# (`python -m tests.slope_jax.noise` prints it). The law allows twenty times that; a wrong key, position, sink or
# expert is a hundred times further off.
TOLERANCE = 2e-4

# Where the last expert chosen and the first one not chosen are this close, float32 rounding, which moves router logits
# by about 5e-6 here, decides which expert a token gets, and no implementation can be right. Prompts with such a token,
# by the oracle, are not used.
ROUTER_GAP = 3e-5

ALL_SHAPES = tuple(
    MeshShape(pp, ring, ulysses)
    for devices in (1, 2, 4, 8)
    for pp in (1, 2, 4, 8)
    for ring in (1, 2, 4, 8)
    for ulysses in (1, 2, 4, 8)
    if pp * ring * ulysses == devices
)


@functools.lru_cache(maxsize=4)
def engine(directory: pathlib.Path, shape: MeshShape = MeshShape(), **options: Any) -> Engine:  # noqa: B008
    """An engine in float32 with small pages and blocks, so that short prompts have many; the last few are kept."""
    defaults: dict[str, Any] = {"dtype": "float32", "chunk_tokens": 64, "page_tokens": 8, "block_q": 8, "block_kv": 16}
    return Engine.load(directory, mesh=shape, **{**defaults, **options})


@functools.lru_cache(maxsize=512)
def oracle(directory: pathlib.Path, prompt: tuple[int, ...]) -> tuple[np.ndarray, list[tuple[np.ndarray, np.ndarray]]]:
    """Logits and KV of a prompt in float64."""
    return numpy_forward.forward(directory, list(prompt))


@functools.lru_cache(maxsize=1024)
def steady_prompt(directory: pathlib.Path, model: TinyModel, length: int, seed: int) -> tuple[int, ...]:
    """A random prompt without a near tie between experts."""
    for attempt in range(100):
        prompt = random_prompt(model, length, seed=1000 * seed + attempt)
        router: list[np.ndarray] = []
        numpy_forward.forward(directory, prompt, router_logits=router)
        ordered = np.sort(np.concatenate(router), axis=1)[:, ::-1]
        gaps = ordered[:, model.experts_per_token - 1] - ordered[:, model.experts_per_token]
        if gaps.min() > ROUTER_GAP:
            return tuple(prompt)
    raise AssertionError(f"no steady prompt of {length} tokens")


def errors(directory: pathlib.Path, prompt: Sequence[int], result: PrefillResult) -> tuple[float, float]:
    """The largest differences from the oracle: of the logits, and of all layers' keys and values."""
    logits, kv = oracle(directory, tuple(prompt))
    assert result.num_tokens == len(prompt)
    assert result.logits.shape == logits.shape
    assert result.logits.dtype == np.float32
    assert result.kv.num_layers == len(kv)
    largest = 0.0
    for layer, (k, v) in enumerate(kv):
        start, found_k, found_v = result.kv.layer(layer)
        for found, expected in ((found_k, k[start:]), (found_v, v[start:])):
            assert found.shape == expected.shape
            assert found.dtype in (np.float32, ml_dtypes.bfloat16)
            largest = max(largest, float(np.abs(found.astype(np.float64) - expected).max()))
    return float(np.abs(result.logits - logits).max()), largest


def check(directory: pathlib.Path, prompts: Sequence[Sequence[int]], results: Sequence[PrefillResult]) -> None:
    """Asserts that results are those of the oracle, up to float32 rounding."""
    assert len(results) == len(prompts)
    for prompt, result in zip(prompts, results, strict=True):
        logits, kv = errors(directory, prompt, result)
        assert logits < TOLERANCE, f"{len(prompt)} tokens: logits differ by {logits}"
        assert kv < TOLERANCE, f"{len(prompt)} tokens: KV differs by {kv}"
        assert result.token_id == int(np.argmax(oracle(directory, tuple(prompt))[0]))
