"""What is known of a machine: curves of points, each with its source and with how well it is known."""

from __future__ import annotations

import bisect
import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

MEASURED, INTERPOLATED, ASSUMED = "measured", "interpolated", "assumed"
STATUSES = (MEASURED, INTERPOLATED, ASSUMED)
LOW, HIGH = "low", "high"
_SAME = 0.02  # relative difference up to which a point counts as the one that was measured


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One value of a curve.

    Attributes:
      at: where on the curve; None for a value that holds everywhere.
      value: the value.
      low: the least that it may well be.
      high: the most that it may well be.
      status: `MEASURED`, `INTERPOLATED` or `ASSUMED`.
      source: who says so.

    Raises:
      ValueError: a value is out of order, or the status is not one of the three, or there is no source.
    """

    at: float | None
    value: float
    low: float
    high: float
    status: str
    source: str

    def __post_init__(self) -> None:
        if self.status not in STATUSES:
            raise ValueError(f"status must be one of {', '.join(STATUSES)}, not {self.status!r}")
        if not self.source.strip():
            raise ValueError("source is empty: say where the number comes from")
        if self.at is not None and not (self.at > 0 and math.isfinite(self.at)):
            raise ValueError(f"at must be positive, not {self.at}")
        if not 0 <= self.low <= self.value <= self.high < math.inf:
            raise ValueError(f"0 <= low <= value <= high does not hold for {self.low}, {self.value}, {self.high}")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What a curve says at one place: a value, how well it is known, and from which sources."""

    value: float
    status: str
    sources: tuple[str, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """Points in ascending order, with straight lines between them against the logarithm of the place.

    Before the first point and after the last the value stays what it is there.

    Raises:
      ValueError: there is no point, places repeat, or a value that holds everywhere stands beside others.
    """

    name: str
    points: tuple[Point, ...]

    def __post_init__(self) -> None:
        places = [point.at for point in self.points]
        if not places:
            raise ValueError(f"{self.name} has no point")
        if len(places) > 1 and None in places:
            raise ValueError(f"{self.name} has several points, one of which does not say where it is")
        known = [place for place in places if place is not None]
        if sorted(set(known)) != known:
            raise ValueError(f"the points of {self.name} must be in ascending order and differ, not at {known}")

    def __call__(self, at: float = 1.0) -> float:
        """The value at a place."""
        before, after, share = self._between(at)
        return before.value + share * (after.value - before.value)

    def reading(self, at: float = 1.0) -> Reading:
        """The value at a place with its status: assumed outside of the points, however well those are known."""
        before, after, share = self._between(at)
        value = before.value + share * (after.value - before.value)
        used = [before] if share == 0 else [after] if share == 1 else [before, after]
        near = [p for p in used if p.at is None or abs(at - p.at) <= _SAME * p.at]
        if near:
            status = near[0].status
        elif ASSUMED in (p.status for p in used) or before is after:
            status = ASSUMED
        else:
            status = INTERPOLATED
        return Reading(value=value, status=status, sources=tuple(dict.fromkeys(p.source for p in used)))

    def moved(self, bound: str) -> Curve:
        """The curve with every point at its `LOW` or `HIGH` bound."""
        values = [getattr(point, bound) for point in self.points]
        return self._with_values(values)

    def scaled(self, factor: float) -> Curve:
        """The curve with every value multiplied."""
        return self._with_values([point.value * factor for point in self.points])

    @property
    def is_certain(self) -> bool:
        """Whether no point has room to move."""
        return all(point.low == point.high for point in self.points)

    def _with_values(self, values: Sequence[float]) -> Curve:
        points = tuple(
            dataclasses.replace(p, value=v, low=min(p.low, v), high=max(p.high, v))
            for p, v in zip(self.points, values, strict=True)
        )
        return Curve(name=self.name, points=points)

    def _between(self, at: float) -> tuple[Point, Point, float]:
        """The points around a place, and how far it is from the first to the second."""
        places = [point.at for point in self.points if point.at is not None]
        if len(places) < 2 or at <= places[0]:
            return self.points[0], self.points[0], 0.0
        if at >= places[-1]:
            return self.points[-1], self.points[-1], 0.0
        after = bisect.bisect_right(places, at)
        share = math.log(at / places[after - 1]) / math.log(places[after] / places[after - 1])
        return self.points[after - 1], self.points[after], share


def read_curve(name: str, rows: Sequence[Mapping[str, Any]], place: str | None, unit: str) -> Curve:
    """Reads the points of a curve from the tables of a device file.

    Args:
      name: of the curve.
      rows: one table per point.
      place: the key of the place, None where one value holds everywhere.
      unit: the key of the value.

    Raises:
      ValueError: a key is missing or unknown, or a value is not a number in its range; the message names the point.
    """
    needed = {unit, "status", "source"} | ({place} if place else set())
    points = []
    for number, row in enumerate(rows, 1):
        where = f"{name}, point {number}"
        if missing := sorted(needed - row.keys()):
            raise ValueError(f"{where}: {', '.join(missing)} is missing")
        if unknown := sorted(row.keys() - needed - {LOW, HIGH}):
            raise ValueError(
                f"{where}: {', '.join(unknown)} is not known; known: {', '.join(sorted(needed))}, low, high"
            )
        numbers = {key: row[key] for key in row.keys() - {"status", "source"}}
        for key, value in numbers.items():
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise ValueError(f"{where}: {key} must be a number, not {value!r}")
        value = float(row[unit])
        try:
            points.append(
                Point(
                    at=float(row[place]) if place else None,
                    value=value,
                    low=float(row.get(LOW, value)),
                    high=float(row.get(HIGH, value)),
                    status=str(row["status"]),
                    source=str(row["source"]),
                )
            )
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error
    return Curve(name=name, points=tuple(points))
