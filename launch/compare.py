"""Compares the result of a prefill with the plain forward on one device.

Where the router of a layer prefers one expert to another by no more than rounding, both choices are right, and a
token whose choice differs has quite other numbers from there on. So a difference is looked into: if its first token
was at such a tie, the plain forward is run again with the other expert, and everything must be equal then.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence

import numpy as np

from slope_jax.model import reference
from slope_jax.result import PrefillResult

# Float32 rounding of logits of order 5 stays well below this; a wrong mask, position or sink is far above.
TOLERANCE = 2e-4
# Two experts whose router logits are this close may change places by rounding.
TIE = 3e-5
# Rounding turns about one decision in 50,000; more than this in one prompt are a fault, not chance.
MAX_TIES = 8


@dataclasses.dataclass(frozen=True)
class Difference:
    """The largest differences between a result and the plain forward.

    Attributes:
      logits: of the logits of the last position.
      kv: of the keys and values.
      ties: (layer, token) of ties between two experts at which the two took different ones.
    """

    logits: float
    kv: float
    ties: tuple[tuple[int, int], ...] = ()

    def __str__(self) -> str:
        ties = "".join(f", other expert of a tie at layer {layer} token {token}" for layer, token in self.ties)
        return f"logits {self.logits:.2e}, KV {self.kv:.2e}{ties}"


def compare(checkpoint: str | os.PathLike[str], token_ids: Sequence[int], result: PrefillResult) -> Difference:
    """Compares a result with the plain forward of its prompt.

    Args:
      checkpoint: the folder that the engine was loaded from.
      token_ids: the prompt.
      result: what a float32 engine returned for it.
    """
    ties: list[tuple[int, int]] = []
    while True:
        expected = reference.forward(checkpoint, token_ids, swapped=ties)
        kv, first = _compare_kv(expected, result)
        # NumPy's max, unlike Python's, is NaN when one of the numbers is.
        logits = float(np.max(np.abs(result.logits - expected.logits)))
        if not logits <= TOLERANCE and first is None:
            first = len(expected.kv), len(token_ids) - 1
        tie = None if first is None or len(ties) == MAX_TIES else _tie_before(expected, result, *first)
        if tie is None or tie in ties:
            return Difference(logits, kv, tuple(ties))
        ties.append(tie)


def _compare_kv(expected: reference.Forward, result: PrefillResult) -> tuple[float, tuple[int, int] | None]:
    """The largest difference, and the first layer, and in it the first token, where one is above the tolerance."""
    largest, first = 0.0, None
    for layer, pair in enumerate(expected.kv):
        start, *found = result.kv.layer(layer)
        difference_T = np.max([np.abs(a - b[start:]).max((1, 2)) for a, b in zip(found, pair, strict=True)], axis=0)
        largest = float(np.max([largest, difference_T.max()]))
        above = ~(difference_T <= TOLERANCE)
        if first is None and above.any():
            first = layer, start + int(np.argmax(above))
    return largest, first


def _tie_before(expected: reference.Forward, result: PrefillResult, layer: int, token: int) -> tuple[int, int] | None:
    """The closest tie of a token since the last layer, before `layer`, whose keys and values show that it was equal."""
    shown = [i for i in range(layer) if result.kv.header.layers[i].start <= token]
    since = range(shown[-1] if shown else 0, layer)
    closest = min(since, key=lambda i: expected.margins_LT[i, token], default=None)
    return (closest, token) if closest is not None and expected.margins_LT[closest, token] <= TIE else None
