"""Layers keep their global index whatever the stages (CASES P17), and stages share one pattern."""

from __future__ import annotations

import pytest

from slope_jax.model.config import FULL, SLIDING
from slope_jax.model.stage_plan import plan_stages

KINDS = {"S": SLIDING, "F": FULL}


def kinds(letters: str) -> list[str]:
    return [KINDS[letter] for letter in letters]


@pytest.mark.parametrize(
    ("letters", "pp"),
    [("SF" * 18, 1), ("SF" * 18, 4), ("SF" * 18, 8), ("SF" * 12, 5), ("SFSFSFS", 2), ("SSFSFFS", 2), ("SF" * 4, 8)],
)
def test_every_layer_has_one_place_of_its_kind(letters: str, pp: int) -> None:
    plan = plan_stages(kinds(letters), pp)
    found = [layer for stage in plan.layers for layer in stage if layer is not None]
    assert found == list(range(len(letters)))
    for layer, kind in enumerate(kinds(letters)):
        stage, repeat, slot = plan.location(layer)
        assert plan.layer_at(stage, repeat, slot) == layer
        assert plan.unit[slot] == kind
    assert plan.unit * plan.repeats == plan.pattern
    assert len(plan.layers) == pp
    assert all(any(layer is not None for layer in stage) for stage in plan.layers)


def test_36_layers_on_8_stages_cost_what_the_log_says() -> None:
    plan = plan_stages(kinds("SF" * 18), 8)
    assert len(plan.pattern) == 6
    assert plan.unit == (SLIDING, FULL)
    assert plan.memory_overhead == pytest.approx(48 / 36)
    assert plan.work_imbalance == pytest.approx(5 * 8 / 36)
    assert "pattern SFSFSF" in plan.describe()
    assert "1.33x" in plan.describe()


@pytest.mark.parametrize(("letters", "pp", "reason"), [("SSSFFF", 2, "use pp=1"), ("SF", 3, "pp=3 stages")])
def test_what_cannot_be_split_is_refused(letters: str, pp: int, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        plan_stages(kinds(letters), pp)
    assert plan_stages(kinds(letters), 1).num_layers == len(letters)


def test_an_unknown_layer_is_an_error() -> None:
    with pytest.raises(ValueError, match="layer 6"):
        plan_stages(kinds("SFSFSF"), 2).location(6)
