"""A curve says what its points say, and how well it is known elsewhere."""

from __future__ import annotations

from typing import Any

import pytest

from slope_jax.planner.quantity import ASSUMED, HIGH, INTERPOLATED, LOW, MEASURED, Curve, Point, read_curve


def _point(place: float | None, value: float, **changes: Any) -> Point:
    return Point(
        **{"at": place, "value": value, "low": value, "high": value, "status": MEASURED, "source": "x"} | changes
    )


def test_between_points_the_value_is_linear_in_the_logarithm() -> None:
    curve = Curve(name="c", points=(_point(10, 0.2), _point(1000, 0.6)))
    assert curve(100) == pytest.approx(0.4)
    assert [curve(1), curve(10), curve(1000), curve(1e6)] == pytest.approx([0.2, 0.2, 0.6, 0.6])


def test_status_is_that_of_the_points_and_assumed_outside_of_them() -> None:
    curve = Curve(name="c", points=(_point(10, 0.2, source="a"), _point(1000, 0.6, source="b")))
    assert curve.reading(10.1).status == MEASURED
    assert curve.reading(100).status == INTERPOLATED
    assert curve.reading(100).sources == ("a", "b")
    assert curve.reading(2000).status == ASSUMED
    guess = Curve(name="c", points=(_point(10, 0.2), _point(1000, 0.6, status=ASSUMED)))
    assert guess.reading(100).status == ASSUMED
    assert Curve(name="c", points=(_point(None, 0.2),)).reading(7).status == MEASURED


def test_bounds_and_factors() -> None:
    curve = Curve(name="c", points=(_point(10, 0.2, low=0.1, high=0.5), _point(20, 0.4)))
    assert [p.value for p in curve.moved(LOW).points] == [0.1, 0.4]
    assert [p.value for p in curve.moved(HIGH).points] == [0.5, 0.4]
    assert curve.scaled(3)(20) == pytest.approx(1.2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"status": "guessed"}, "status must be one of measured, interpolated, assumed, not 'guessed'"),
        ({"source": " "}, "source is empty"),
        ({"low": 0.5}, "0 <= low <= value <= high does not hold for 0.5, 0.2, 0.2"),
        ({"at": 0.0}, "at must be positive"),
    ],
)
def test_points_that_make_no_sense(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _point(10, 0.2, **changes)


def test_curves_that_make_no_sense() -> None:
    for points in ((), (_point(10, 0.2), _point(10, 0.3)), (_point(None, 0.2), _point(10, 0.3))):
        with pytest.raises(ValueError, match="c"):
            Curve(name="c", points=points)


def test_rows_name_what_is_wrong() -> None:
    row = {"rows": 10, "share": 0.2, "status": MEASURED, "source": "x"}
    assert read_curve("dense", [row], "rows", "share")(10) == 0.2
    for change, message in (
        ({"share": "much"}, "dense, point 1: share must be a number, not 'much'"),
        ({"color": 1}, "dense, point 1: color is not known"),
    ):
        with pytest.raises(ValueError, match=message):
            read_curve("dense", [row | change], "rows", "share")
    with pytest.raises(ValueError, match="dense, point 1: rows is missing"):
        read_curve("dense", [{"share": 0.2, "status": MEASURED, "source": "x"}], "rows", "share")
