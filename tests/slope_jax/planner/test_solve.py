"""What a target would need is enough when it is given, and less is not."""

from __future__ import annotations

import pytest

from slope_jax.model.published import published_config
from slope_jax.planner import Choices, Cluster, predict
from slope_jax.planner.layout import EXPERT, SEQUENCE
from slope_jax.planner.search import answer
from slope_jax.planner.solve import KERNELS, nodes_needed, requirements, smallest_factor

CONFIG = published_config("gpt-oss-120b")
CLUSTER = Cluster.load("mi250", nodes=4)


def test_the_factor_is_just_enough() -> None:
    found = answer(CONFIG, CLUSTER, 65_536, 0.8)
    needed = {r.change: r for r in requirements(CONFIG, CLUSTER, found)}
    kernels = needed["attention and experts"]
    assert kernels.factor is not None
    assert kernels.layout is not None
    assert kernels.values["full_attention"] == pytest.approx(0.25 * kernels.factor)
    for change, is_met in ((1.0, True), (0.99, False)):
        moved = CLUSTER.scaled(dict.fromkeys(KERNELS, kernels.factor * change))
        assert (predict(CONFIG, moved, kernels.layout, 65_536).ttft_s <= 0.8) is is_met
    alone = needed["attention alone"].factor
    assert alone is not None
    assert alone > kernels.factor
    assert needed["links and network"].factor is None  # compute alone takes longer
    assert needed["nodes"].nodes == 6


def test_targets_that_no_number_of_nodes_meets() -> None:
    found = nodes_needed(CONFIG, CLUSTER.with_nodes(24), 65_536, 0.001)
    assert (found.factor, found.nodes) == (None, None)


def test_only_what_may_be_tried_is_tried() -> None:
    """Without splitting the experts, 64K tokens take several stages or more memory, and more than four nodes."""
    choices = Choices(splits=(SEQUENCE,), ring_pass="q")
    found = answer(CONFIG, CLUSTER, 65_536, 1.6, choices)
    needed = requirements(CONFIG, CLUSTER, found)
    layouts = [r.layout for r in needed if r.layout is not None]
    assert layouts
    assert {layout.split for layout in layouts} == {SEQUENCE}


def test_what_is_said_to_be_needed_is_what_a_new_plan_needs() -> None:
    """With other kernels other meshes, chunks and formats are the best: the factor is the smallest for all of them."""
    choices, tokens, target = Choices(splits=(SEQUENCE,)), 100_000, 2.2
    needed = requirements(CONFIG, CLUSTER, answer(CONFIG, CLUSTER, tokens, target, choices))[0]
    assert needed.factor is not None
    for change, is_met in ((1.0, True), (0.98, False)):
        moved = CLUSTER.scaled(dict.fromkeys(KERNELS, needed.factor * change))
        fastest = min(p.ttft_s for p in answer(CONFIG, moved, tokens, None, choices).best)
        assert (fastest <= target) is is_met


def test_a_large_cluster_may_need_less_than_it_has() -> None:
    found = nodes_needed(CONFIG, CLUSTER.with_nodes(48), 65_536, 1.0)
    assert (found.nodes, found.factor) == (4, 4 / 48)


def test_shares_are_read_where_the_configuration_uses_them() -> None:
    """On H100, 4,096 tokens are 128 for each expert, at which their products are far from their best."""
    h100 = Cluster.load("h100")
    choices = Choices(splits=(EXPERT,), expert_weights=("bfloat16",))
    now = min(p.ttft_s for p in answer(CONFIG, h100, 4096, None, choices).best)
    found = answer(CONFIG, h100, 4096, 0.97 * now, choices)
    alone = next(r for r in requirements(CONFIG, h100, found) if r.change == "experts alone")
    assert alone.factor is not None
    assert alone.layout is not None
    rows = 4096 * 4 / 128 / alone.layout.shape.ring
    assert alone.values["experts"] == pytest.approx(alone.factor * h100.curve("experts")(rows))


def test_fewer_nodes_are_enough_for_a_loose_target() -> None:
    """8 devices: twice the work of each at two nodes, and so on."""
    found = nodes_needed(CONFIG, CLUSTER, 32_768, 0.9)
    assert found.nodes == 2


def test_smallest_factor_of_a_function() -> None:
    assert smallest_factor(lambda f: 8 / f, 2.0) == pytest.approx(4.0, rel=2e-3)
    assert smallest_factor(lambda f: 1 + 8 / f, 1.0) is None


def test_without_a_target_there_is_nothing_to_solve() -> None:
    with pytest.raises(ValueError, match="no target"):
        requirements(CONFIG, CLUSTER.with_nodes(1), answer(CONFIG, CLUSTER.with_nodes(1), 8192, None))
