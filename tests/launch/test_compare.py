"""The comparison with the plain forward sees every wrong number, and knows a tie between two experts."""

from __future__ import annotations

import pathlib
from typing import Any

import numpy as np
import pytest

from slope_jax.kv.files import KVHeader, LayerKV, PrefillKV
from slope_jax.launch import compare as comparing
from slope_jax.launch import make_checkpoint as maker
from slope_jax.launch.compare import Difference, compare
from slope_jax.model import reference
from slope_jax.model.config import load_config
from slope_jax.result import PrefillResult

TINY = maker.PRESETS["tiny"]
IDS = [(37 * i) % TINY.vocab_size for i in range(40)]


@pytest.fixture(scope="module")
def tiny_dir(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return maker.make_checkpoint(tmp_path_factory.mktemp("made") / "tiny", TINY)


@pytest.fixture(scope="module")
def expected(tiny_dir: pathlib.Path) -> reference.Forward:
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


def test_equal_numbers_have_no_difference(tiny_dir: pathlib.Path, expected: reference.Forward) -> None:
    assert compare(tiny_dir, IDS, make_result(tiny_dir, expected.logits, expected.kv)) == Difference(0.0, 0.0)


@pytest.mark.parametrize("wrong", [0.5, np.nan])
@pytest.mark.parametrize(("layer", "part", "token"), [(0, 1, 24), (1, 0, 0), (3, 1, 39)])
def test_one_wrong_element_of_the_kv_is_seen(
    tiny_dir: pathlib.Path,
    expected: reference.Forward,
    wrong: float,
    layer: int,
    part: int,
    token: int,
) -> None:
    logits, kv, _ = expected
    changed = [[np.array(a) for a in pair] for pair in kv]
    changed[layer][part][token, 1, 5] += wrong
    difference = compare(tiny_dir, IDS, make_result(tiny_dir, logits, changed))
    assert difference.logits == 0
    np.testing.assert_allclose(difference.kv, wrong, rtol=1e-5)


@pytest.mark.parametrize("wrong", [0.5, np.nan])
def test_one_wrong_logit_is_seen(tiny_dir: pathlib.Path, expected: reference.Forward, wrong: float) -> None:
    changed = np.array(expected.logits)
    changed[100] += wrong
    difference = compare(tiny_dir, IDS, make_result(tiny_dir, changed, expected.kv))
    np.testing.assert_allclose(difference.logits, wrong, rtol=1e-5)
    assert difference.kv == 0


def test_margins_are_those_of_the_router(tiny_dir: pathlib.Path, expected: reference.Forward) -> None:
    assert expected.margins_LT.shape == (4, len(IDS))
    assert expected.margins_LT.min() > comparing.TIE, "the tests below need a prompt without ties"
    again = reference.forward(tiny_dir, IDS, swapped=[(2, 24)])
    np.testing.assert_allclose(again.margins_LT[:3], expected.margins_LT[:3])


# Layer 1 and 3 keep all keys and values; of layers 0 and 2 those of the last tokens. A change at the last layer is seen
# in the logits of the last token alone.
@pytest.mark.parametrize("taken", [[(0, 12)], [(1, 3)], [(2, 39)], [(3, 39)], [(0, 30), (2, 7)]])
def test_the_other_expert_is_right_at_a_tie_and_wrong_elsewhere(
    tiny_dir: pathlib.Path,
    expected: reference.Forward,
    taken: list[tuple[int, int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    other = reference.forward(tiny_dir, IDS, swapped=taken)
    result = make_result(tiny_dir, other.logits, other.kv)
    wrong = compare(tiny_dir, IDS, result)
    assert wrong.ties == ()
    assert max(wrong.logits, wrong.kv) > 10 * comparing.TOLERANCE

    def as_ties(*args: Any, **kwargs: Any) -> reference.Forward:
        forward = plain(*args, **kwargs)
        margins = forward.margins_LT.copy()
        margins[tuple(np.transpose(taken))] = 1e-6
        return forward._replace(margins_LT=margins)

    plain = reference.forward
    monkeypatch.setattr(reference, "forward", as_ties)
    assert compare(tiny_dir, IDS, result) == Difference(0.0, 0.0, tuple(taken))
