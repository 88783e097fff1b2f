"""The first token: greedy ties, cuts by top_k and top_p, frequencies, and the same token from the same seed."""

from __future__ import annotations

import math

import numpy as np
import pytest

from slope_jax.sampling import sample_token, top_logprobs

LOGITS = np.array([1.0, 3.0, -2.0, 3.0, 2.0], np.float32)


def test_greedy_takes_the_lowest_id_of_a_tie() -> None:
    assert sample_token(LOGITS) == 1
    assert sample_token(LOGITS, temperature=0.0, top_k=1, top_p=0.1, seed=9) == 1


def frequencies(temperature: float, top_p: float = 1.0, top_k: int = 0, draws: int = 4000) -> np.ndarray:
    tokens = [sample_token(LOGITS, temperature, top_p, top_k, seed) for seed in range(draws)]
    return np.bincount(tokens, minlength=len(LOGITS)) / draws


def softmax(logits: list[float]) -> list[float]:
    total = math.fsum(math.exp(x) for x in logits)
    return [math.exp(x) / total for x in logits]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_tokens_are_drawn_with_the_probabilities_of_softmax(temperature: float) -> None:
    expected = softmax([float(x) / temperature for x in LOGITS])
    # Four standard deviations of a frequency over 4000 draws are at most 0.032.
    np.testing.assert_allclose(frequencies(temperature), expected, atol=0.032)


def test_top_k_keeps_the_most_likely_and_renormalises() -> None:
    a, b, c = softmax([3.0, 3.0, 2.0])
    np.testing.assert_allclose(frequencies(1.0, top_k=3), [0, a, 0, b, c], atol=0.032)
    assert frequencies(5.0, top_k=1, draws=50)[1] == 1
    np.testing.assert_allclose(frequencies(1.0, top_k=99), softmax([float(x) for x in LOGITS]), atol=0.032)


def test_top_p_keeps_the_smallest_set_that_reaches_it() -> None:
    # Probabilities in order: 0.3995, 0.3995, 0.1470, 0.0541, ...: 0.79 needs two tokens, 0.80 three.
    assert (frequencies(1.0, top_p=0.3, draws=200) > 0).nonzero()[0].tolist() == [1]
    assert (frequencies(1.0, top_p=0.79, draws=200) > 0).nonzero()[0].tolist() == [1, 3]
    assert (frequencies(1.0, top_p=0.80, draws=200) > 0).nonzero()[0].tolist() == [1, 3, 4]


def test_top_p_applies_to_the_probabilities_after_top_k() -> None:
    # Of the two most likely tokens each has 0.5, so 0.45 keeps one; of all tokens the first has only 0.3995.
    assert (frequencies(1.0, top_p=0.45, top_k=2, draws=100) > 0).nonzero()[0].tolist() == [1]
    assert (frequencies(1.0, top_p=0.45, draws=100) > 0).nonzero()[0].tolist() == [1, 3]


def test_a_seed_gives_one_token_and_seeds_differ() -> None:
    logits = np.zeros(1000, np.float32)
    tokens = [sample_token(logits, temperature=1.0, seed=seed) for seed in range(20)]
    assert tokens == [sample_token(logits, temperature=1.0, seed=seed) for seed in range(20)]
    assert len(set(tokens)) > 15
    assert sample_token(logits, temperature=1.0, seed=2**64 - 1) in range(1000)


def test_a_tiny_temperature_is_greedy_and_does_not_overflow() -> None:
    assert sample_token(np.array([1e30, -1e30, 2e30], np.float32), temperature=5e-324, seed=3) == 2


def test_top_logprobs_are_those_of_log_softmax() -> None:
    top = top_logprobs(LOGITS, 3)
    assert [t.token_id for t in top] == [1, 3, 4]
    probabilities = softmax([float(x) for x in LOGITS])
    np.testing.assert_allclose(
        [t.logprob for t in top], [math.log(probabilities[i]) for i in (1, 3, 4)], rtol=0, atol=1e-12
    )
    assert len(top_logprobs(LOGITS, 99)) == 5


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_are_refused(bad: float, temperature: float) -> None:
    with pytest.raises(ValueError, match=r"1 of 3 logits are not finite; first: .* at 1"):
        sample_token(np.array([0, bad, 1], np.float32), temperature)


def test_logits_must_be_one_vector() -> None:
    with pytest.raises(ValueError, match=r"not of shape \(1, 3\)"):
        top_logprobs(np.zeros((1, 3), np.float32), 1)


@pytest.mark.parametrize("temperature", [0.3, 1.0, 4.0])
def test_large_vocabularies_are_cut_as_if_all_of_them_were_sorted(temperature: float) -> None:
    """With ties at the cut, and with more tokens in the set than are sorted at first."""
    random = np.random.default_rng(0)
    logits = np.round(random.normal(0, 2, 20_000), 1).astype(np.float32)
    order = np.argsort(-logits.astype(np.float64), kind="stable")
    assert [t.token_id for t in top_logprobs(logits, 50)] == order[:50].tolist()
    for top_k in (1, 7, 3000, 20_000):
        cut = order[:top_k]
        weights = np.exp((logits[cut].astype(np.float64) - logits.max()) / temperature)
        for top_p in (0.1, 0.9, 0.99, 1.0):
            cumulative = np.cumsum(weights)
            kept = cut[: np.searchsorted(cumulative, top_p * cumulative[-1] * (1 - 1e-12)) + 1]
            drawn = {sample_token(logits, temperature, top_p, top_k, seed) for seed in range(20)}
            assert drawn <= set(kept.tolist())
            uniform = np.random.Generator(np.random.Philox(key=3)).random()
            expected = kept[np.searchsorted(cumulative[: len(kept)], uniform * cumulative[len(kept) - 1])]
            assert sample_token(logits, temperature, top_p, top_k, seed=3) == expected
    without_k = {sample_token(logits, temperature, 0.9, 0, seed) for seed in range(20)}
    assert without_k == {sample_token(logits, temperature, 0.9, 20_000, seed) for seed in range(20)}
