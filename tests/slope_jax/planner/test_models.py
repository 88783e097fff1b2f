"""Sizes of dense and mixture-of-experts models are read from their config.json, and parts without counts refused."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import pytest

from slope_jax import MeshShape
from slope_jax.model.config import FULL, SLIDING
from slope_jax.planner import Cluster, Layout
from slope_jax.planner.models import read_model, sizes_of
from slope_jax.planner.operations import OperationTimes
from slope_jax.planner.quantity import MEASURED, Curve, Point

MIXTRAL: dict[str, Any] = {
    "model_type": "mixtral",
    "vocab_size": 32_000,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 32_768,
    "sliding_window": None,
}


def test_a_mixture_of_experts(tmp_path: pathlib.Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MIXTRAL))
    model = read_model(tmp_path)
    config = model.config
    assert (config.num_experts, config.experts_per_token, config.head_dim) == (8, 2, 128)
    assert config.layer_types == (FULL,) * 32
    assert model.expert_weights == ("bfloat16",)


def test_a_dense_model_is_one_expert() -> None:
    raw = MIXTRAL | {"num_local_experts": None, "sliding_window": 4096, "num_key_value_heads": None}
    config = sizes_of(raw | {"model_type": "mistral"})
    assert (config.num_experts, config.experts_per_token, config.num_kv_heads) == (1, 1, 32)
    assert config.layer_types == (SLIDING,) * 32
    every_sixth = sizes_of(raw | {"model_type": "gemma3_text", "sliding_window_pattern": 6}).layer_types
    assert [layer for layer, kind in enumerate(every_sixth) if kind == FULL] == [5, 11, 17, 23, 29]


def test_the_product_of_a_dense_model_is_like_any_other() -> None:
    """70 % of the peak for projections, and not the 20 % of grouped products."""
    config = sizes_of(MIXTRAL | {"num_local_experts": None})
    shares = {"dense": 0.7, "experts": 0.2}
    points = {n: Point(at=None, value=v, low=v, high=v, status=MEASURED, source="here") for n, v in shares.items()}
    cluster = Cluster.load("h100").replace(**{n: Curve(name=n, points=(p,)) for n, p in points.items()})
    layout = Layout(shape=MeshShape(), chunk_tokens=4096, expert_weights="bfloat16")
    seconds, _ = OperationTimes(config, cluster, layout).expert_layer(4096, 1)
    compute = 4096 * 3 * 2 * 4096 * 14336 / (0.7 * cluster.matmul_flops)
    assert compute < seconds < 1.1 * compute  # and part of the time in which the weights are read


def test_gpt_oss_is_packed() -> None:
    assert read_model("gpt-oss-120b").expert_weights == ("bfloat16", "mxfp4")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kv_lora_rank": 512}, "no counts for a model with kv_lora_rank"),
        ({"n_shared_experts": 1}, "no counts for a model with n_shared_experts"),
        ({"hidden_size": None}, "hidden_size must be a positive integer, not None"),
        ({"layer_types": [FULL]}, "layer_types has 1 entries for 32 layers"),
        ({"layer_types": ["linear_attention"] * 32}, "layer_types must list sliding_attention and full_attention"),
        ({"num_local_experts": 2.5}, "num_local_experts must be a positive integer, not 2.5"),
        ({"num_key_value_heads": "8"}, "num_key_value_heads must be a positive integer, not '8'"),
        ({"head_dim": -1}, "head_dim must be a positive integer, not -1"),
        ({"sliding_window": 0}, "sliding_window must be a positive integer, not 0"),
        ({"sliding_window": 4096, "model_type": "gemma2"}, "which layers have the sliding_window of 4096?"),
        ({"interleave_moe_layer_step": 2}, "no counts for a model with interleave_moe_layer_step"),
        ({"num_key_value_heads": 5}, "32 query heads cannot be divided among 5 KV heads"),
    ],
)
def test_models_that_cannot_be_planned_for(tmp_path: pathlib.Path, change: dict[str, Any], message: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(MIXTRAL | change))
    with pytest.raises(ValueError, match=f"config.json: .*{message}"):
        read_model(path)
    with pytest.raises(ValueError, match="neither a published model"):
        read_model(tmp_path / "missing")
