"""The demonstration: its prompt is long enough, and its comparison sees every wrong number."""

from __future__ import annotations

import pathlib
from typing import Any

import numpy as np
import pytest

from slope_jax.handoff import KVHeader, LayerKV, PrefillKV
from slope_jax.launch import demo
from slope_jax.launch import make_checkpoint as maker
from slope_jax.model import reference
from slope_jax.model.config import load_config
from slope_jax.model.tokenizer import load_tokenizer
from slope_jax.result import PrefillResult

TINY = maker.PRESETS["tiny"]
IDS = [(37 * i) % TINY.vocab_size for i in range(40)]


@pytest.fixture(scope="module")
def tiny_dir(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return maker.make_checkpoint(tmp_path_factory.mktemp("made") / "tiny", TINY)


@pytest.fixture(scope="module")
def expected(tiny_dir: pathlib.Path) -> tuple[np.ndarray, list[Any]]:
    return reference.forward(tiny_dir, IDS)


def make_result(tiny_dir: pathlib.Path, logits: np.ndarray, kv: list[Any]) -> PrefillResult:
    config = load_config(tiny_dir)
    header = KVHeader.of_prompt(config, IDS, first_token_id=0, dtype="float32", model_fingerprint="")

    def fetch(layer: int) -> LayerKV:
        start = header.layers[layer].start
        return start, kv[layer][0][start:], kv[layer][1][start:]

    return PrefillResult(
        request_id="a", num_tokens=40, token_id=0, logits=logits, ttft_s=1.0, kv=PrefillKV(header, fetch)
    )


def test_equal_numbers_have_no_difference(tiny_dir: pathlib.Path, expected: tuple[np.ndarray, list[Any]]) -> None:
    assert demo.compare(tiny_dir, IDS, make_result(tiny_dir, *expected)) == (0.0, 0.0)


@pytest.mark.parametrize("wrong", [0.5, np.nan])
@pytest.mark.parametrize(("layer", "part", "token"), [(0, 1, 24), (1, 0, 0), (3, 1, 39)])
def test_one_wrong_element_of_the_kv_is_seen(
    tiny_dir: pathlib.Path,
    expected: tuple[np.ndarray, list[Any]],
    wrong: float,
    layer: int,
    part: int,
    token: int,
) -> None:
    logits, kv = expected
    changed = [[np.array(a) for a in pair] for pair in kv]
    changed[layer][part][token, 1, 5] += wrong
    logits_difference, kv_difference = demo.compare(tiny_dir, IDS, make_result(tiny_dir, logits, changed))
    assert logits_difference == 0
    np.testing.assert_allclose(kv_difference, wrong, rtol=1e-5)


@pytest.mark.parametrize("wrong", [0.5, np.nan])
def test_one_wrong_logit_is_seen(tiny_dir: pathlib.Path, expected: tuple[np.ndarray, list[Any]], wrong: float) -> None:
    logits, kv = expected
    changed = np.array(logits)
    changed[100] += wrong
    logits_difference, kv_difference = demo.compare(tiny_dir, IDS, make_result(tiny_dir, changed, kv))
    np.testing.assert_allclose(logits_difference, wrong, rtol=1e-5)
    assert kv_difference == 0


def test_the_long_prompt_is_made_of_the_sources(tiny_dir: pathlib.Path) -> None:
    tokenizer = load_tokenizer(tiny_dir, TINY.vocab_size)
    assert tokenizer is not None
    prompt = demo.sources_prompt(tokenizer, 8_000)
    assert 8_000 <= len(tokenizer.encode(prompt)) < 9_000
    assert pathlib.Path(demo.__file__).with_name("convert.py").read_text() in prompt
