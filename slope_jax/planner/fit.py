"""Fits quantities of a cluster to measured times, and says the error of every one of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from slope_jax.planner.devices import Cluster

_STEPS = 40
_DAMPING = 1e-4  # keeps a quantity where it is on which no time depends
_DIFFERENCE = 1e-3
_LARGEST_STEP = 0.5  # of the logarithm of a factor
_REWEIGHTED_FROM = 5  # after so many steps, least squares become least absolute errors, which outliers pull less
_LEAST_ERROR = 0.02


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A measured time.

    Attributes:
      name: what was measured.
      seconds: how long it took.
      predict: the time on a given cluster.
      is_fitted: whether quantities may be fitted to it, or it is kept to test them.
    """

    name: str
    seconds: float
    predict: Callable[[Cluster], float]
    is_fitted: bool


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """What a fit found.

    Attributes:
      cluster: with the quantities as fitted.
      factors: by which they were multiplied, by group.
      errors: predicted over measured time, less one, of every sample by name.
      fitted: the names of the samples that were fitted to.
      left_out: of each of those the error when it alone is left out of the fit; empty when that was not asked for.
    """

    cluster: Cluster
    factors: dict[str, float]
    errors: dict[str, float]
    fitted: tuple[str, ...]
    left_out: dict[str, float]

    @property
    def tested(self) -> tuple[str, ...]:
        """The names of the samples that were kept for testing."""
        return tuple(name for name in self.errors if name not in self.fitted)

    def median_error(self, names: Sequence[str] | None = None) -> float:
        """The median of the absolute errors of some samples, of all by default."""
        return float(np.median([abs(self.errors[name]) for name in (self.errors if names is None else names)]))

    def largest_error(self, names: Sequence[str] | None = None) -> float:
        """The largest absolute error of some samples, of all by default."""
        return max(abs(self.errors[name]) for name in (self.errors if names is None else names))


def fit(
    cluster: Cluster,
    groups: Mapping[str, Sequence[str]],
    samples: Sequence[Sample],
    *,
    limits: Mapping[str, tuple[float, float]] | None = None,
    leave_out: bool = False,
) -> Fit:
    """Multiplies groups of quantities by factors such that the fitted samples come out best.

    Args:
      cluster: where to start.
      groups: the quantities of each group, which get one factor (see `Cluster.scaled`).
      samples: measured times; those with `is_fitted` decide.
      limits: the least and the most that the factor of a group may be, where there are such.
      leave_out: whether to fit once more for each fitted sample, without it.

    Raises:
      ValueError: there are fewer fitted samples than groups, a time is not positive, or two samples have one name.
    """
    names = [sample.name for sample in samples]
    if len(set(names)) != len(names):
        raise ValueError(f"two samples have one name: {sorted(n for n in set(names) if names.count(n) > 1)}")
    if bad := [sample for sample in samples if not sample.seconds > 0]:
        raise ValueError(f"the time of {bad[0].name} must be positive, not {bad[0].seconds}")
    chosen = [sample for sample in samples if sample.is_fitted]
    if len(chosen) < len(groups):
        raise ValueError(f"{len(groups)} groups of quantities cannot be fitted to {len(chosen)} times")
    factors = _solve(cluster, groups, chosen, limits or {})
    found = cluster.scaled(_spread(groups, factors))
    left_out = {}
    if leave_out and len(chosen) > len(groups):
        for sample in chosen:
            others = [other for other in chosen if other is not sample]
            without = cluster.scaled(_spread(groups, _solve(cluster, groups, others, limits or {})))
            left_out[sample.name] = sample.predict(without) / sample.seconds - 1
    return Fit(
        cluster=found,
        factors=dict(zip(groups, factors.tolist(), strict=True)),
        errors={sample.name: sample.predict(found) / sample.seconds - 1 for sample in samples},
        fitted=tuple(sample.name for sample in chosen),
        left_out=left_out,
    )


def _spread(groups: Mapping[str, Sequence[str]], factors: NDArray[np.float64]) -> dict[str, float]:
    return {name: float(f) for names, f in zip(groups.values(), factors, strict=True) for name in names}


def _solve(
    cluster: Cluster,
    groups: Mapping[str, Sequence[str]],
    samples: Sequence[Sample],
    limits: Mapping[str, tuple[float, float]],
) -> NDArray[np.float64]:
    """Gauss and Newton's steps in the logarithms of the factors, on relative errors."""
    if not groups:
        return np.ones(0)
    least_logs, most_logs = np.log([limits.get(name, (1e-6, 1e6)) for name in groups]).T

    def errors(logs: NDArray[np.float64]) -> NDArray[np.float64]:
        moved = cluster.scaled(_spread(groups, np.exp(logs)))
        return np.array([sample.predict(moved) / sample.seconds - 1 for sample in samples])

    logs = np.zeros(len(groups))
    best, least = logs, np.inf
    for step in range(_STEPS):
        now = errors(logs)
        if step >= _REWEIGHTED_FROM and np.abs(now).sum() < least:
            best, least = logs, np.abs(now).sum()
        slopes = np.array([(errors(logs + _DIFFERENCE * unit) - now) / _DIFFERENCE for unit in np.eye(len(groups))]).T
        weight = 1 / np.maximum(np.abs(now), _LEAST_ERROR) if step >= _REWEIGHTED_FROM else np.ones_like(now)
        matrix = slopes.T @ (weight[:, None] * slopes) + _DAMPING * np.eye(len(groups))
        change = np.linalg.solve(matrix, -slopes.T @ (weight * now))
        logs = np.clip(logs + np.clip(change, -_LARGEST_STEP, _LARGEST_STEP), least_logs, most_logs)
        if np.abs(change).max() < 1e-5:
            break
    now = errors(logs)
    return np.exp(logs if np.abs(now).sum() < least else best)
