"""A time is taken again while the machine changes, a bounded number of times, and says so."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator

import jax
import pytest

from slope_jax.launch.bench.timing import MatmulPeak, timed


@pytest.mark.parametrize(
    ("peaks", "tries", "steady", "chosen"),
    [
        ([100, 100], 1, True, 0),
        ([100, 91], 1, True, 0),
        ([100, 89, 89], 2, True, 1),
        ([100, 50, 49], 2, True, 1),
        ([100, 50, 100, 110], 3, True, 2),
        ([100, 50, 60, 100], 3, False, 1),
    ],
)
def test_unsteady_times_are_taken_again(peaks: list[float], tries: int, steady: bool, chosen: int) -> None:
    """The peak after one try is the peak before the next; of unsteady tries the least unsteady one counts."""
    given: Iterator[float] = iter(peaks)
    numbers = itertools.count()
    found = timed(lambda: next(numbers), lambda: next(given), max_tries=3)
    assert (found.tries, found.is_steady, found.value) == (tries, steady, chosen)
    assert found.peak == (peaks[chosen] + peaks[chosen + 1]) / 2
    assert next(given, None) is None


def test_a_time_is_that_of_the_function_alone() -> None:
    def slow_peak() -> float:
        time.sleep(0.2)
        return 1.0

    found = timed(lambda: time.sleep(0.05), slow_peak, max_tries=1)
    assert 0.05 <= found.seconds < 0.15


def test_no_tries_are_refused() -> None:
    with pytest.raises(ValueError, match="max_tries must be at least 1, not 0"):
        timed(lambda: None, lambda: 1.0, max_tries=0)


def test_the_peak_is_the_rate_of_a_product() -> None:
    """Between what a single slow core and what a large server could do."""
    assert 1e9 < MatmulPeak(jax.devices())() < 1e15
