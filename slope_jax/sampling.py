"""The choice of the first token from the logits of the last position, on the host in float64."""

from __future__ import annotations

import dataclasses

import numpy as np
from numpy.typing import NDArray

_FIRST_SORTED, _GROWTH = 1024, 16


@dataclasses.dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token id and the natural logarithm of its probability."""

    token_id: int
    logprob: float


def sample_token(
    logits: NDArray[np.float32], temperature: float = 0.0, top_p: float = 1.0, top_k: int = 0, seed: int = 0
) -> int:
    """Chooses a token.

    Greedy at temperature 0, the lowest id on ties. Otherwise logits are divided by the temperature, cut to the `top_k`
    most likely tokens (0: all), then to the smallest set whose probability among those reaches `top_p`, and one token
    is drawn with a counter-based generator (Philox), so that every process that holds the same logits draws the same
    token from the same seed.

    Args:
      logits: `[vocab]`.
      temperature: 0 or greater.
      top_p: in (0, 1].
      top_k: 0 or greater.
      seed: 0 to 2**64 - 1.

    Raises:
      ValueError: the logits are not one finite vector.
    """
    _check_logits(logits)
    if temperature == 0:
        return int(np.argmax(logits))
    values = np.asarray(logits, np.float64)
    with np.errstate(over="ignore", under="ignore"):  # a tiny temperature sends all but the greatest to -inf
        weights = np.exp((values - values.max()) / temperature)
    uniform = np.random.Generator(np.random.Philox(key=seed)).random()
    # Sorting logits, which are exact, and not probabilities keeps the order independent of the exp of the platform. Few
    # tokens have most of the probability, as a rule, so that no more of them are sorted than are needed.
    most = min(top_k or values.size, values.size)
    count = most if top_k else min(_FIRST_SORTED, values.size)
    order = _greatest(values, count)
    total = weights[order].sum() if top_k else weights.sum()
    needed = total * (top_p if top_p < 1 else uniform)
    cumulative = np.cumsum(weights[order])
    while count < most and cumulative[-1] <= needed:
        count = min(_GROWTH * count, most)
        order = _greatest(values, count)
        cumulative = np.cumsum(weights[order])
    if top_p < 1:
        kept = int(np.searchsorted(cumulative, needed, side="left")) + 1
        order, cumulative = order[:kept], cumulative[:kept]
        total = cumulative[-1]
    index = min(int(np.searchsorted(cumulative, uniform * total, side="right")), len(order) - 1)
    return int(order[index])


def log_probabilities(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    """The natural logarithms of `softmax(logits)`, `[vocab]`; raises ValueError as `sample_token`."""
    _check_logits(logits)
    shifted = np.asarray(logits, np.float64) - np.max(logits)
    return shifted - np.log(np.exp(shifted).sum())


def top_logprobs(logits: NDArray[np.float32], n: int) -> list[TokenLogprob]:
    """The `n` most likely tokens at temperature 1, most likely first, the lowest id first on ties.

    Raises:
      ValueError: the logits are not one finite vector.
    """
    logprobs = log_probabilities(logits)
    order = _greatest(np.asarray(logits), n)
    return [TokenLogprob(int(i), float(logprobs[i])) for i in order]


def _greatest(values: NDArray[np.floating], n: int) -> NDArray[np.intp]:
    """Where the `n` greatest values are, the greatest first, the lowest index first on ties."""
    if n >= values.size:
        return np.argsort(-values, kind="stable")
    least = np.partition(values, values.size - n)[values.size - n]
    among = np.flatnonzero(values >= least)
    return among[np.argsort(-values[among], kind="stable")][:n]


def _check_logits(logits: NDArray[np.float32]) -> None:
    if logits.ndim != 1 or not logits.size:
        raise ValueError(f"logits must be one vector over the vocabulary, not of shape {logits.shape}")
    finite = np.isfinite(logits)
    if not finite.all():
        bad = int(np.argmin(finite))
        raise ValueError(
            f"{int((~finite).sum())} of {logits.size} logits are not finite; first: {logits[bad]} at {bad}"
        )
