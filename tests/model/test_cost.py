"""Operations and bytes against counts one by one, published numbers, and the arrays and programs of the engine."""

from __future__ import annotations

import collections
import dataclasses
import math
import pathlib
from typing import Any

import jax
import numpy as np
import pytest

from slope_jax import Engine, MeshShape
from slope_jax.audit import hlo
from slope_jax.mesh.axes import make_mesh
from slope_jax.model.checkpoint.safetensors import expected_tensors
from slope_jax.model.config import FULL, GptOssConfig, load_config
from slope_jax.model.counts import cost
from slope_jax.model.gpt_oss import abstract_model
from slope_jax.model.parallel.tensor_split import TensorSplit
from slope_jax.model.published import PUBLISHED, find_config, published_config
from slope_jax.model.stage_plan import plan_stages
from tests.model.test_config import EXPECTED

BIG = published_config("gpt-oss-120b")


def test_the_published_models_are_those_of_their_config_files() -> None:
    assert dataclasses.replace(BIG, eos_token_ids=EXPECTED.eos_token_ids) == EXPECTED
    small = published_config("gpt-oss-20b")
    assert (small.num_layers, small.num_experts) == (24, 32)
    assert dataclasses.replace(small, layer_types=BIG.layer_types, num_experts=128) == BIG
    with pytest.raises(ValueError, match=r"'gpt-oss-7b'.*gpt-oss-20b, gpt-oss-120b"):
        published_config("gpt-oss-7b")
    assert PUBLISHED == ("gpt-oss-20b", "gpt-oss-120b")


def brute_force(config: GptOssConfig, start: int, length: int) -> dict[str, int]:
    """Operations counted token by token, layer by layer and product by product."""
    count: collections.Counter[str] = collections.Counter()
    D, H, F = config.hidden_size, config.head_dim, config.intermediate_size
    for position in range(start, start + length):
        for kind in config.layer_types:
            for heads in (config.num_heads, config.num_kv_heads, config.num_kv_heads):
                count["projections"] += 2 * D * heads * H
            count["projections"] += 2 * config.num_heads * H * D
            count["router"] += 2 * D * config.num_experts
            for _ in range(config.experts_per_token):
                count["experts"] += 2 * D * 2 * F + 2 * F * D
            first = 0 if kind == FULL else max(0, position - config.sliding_window + 1)
            for _ in range(first, position + 1):
                part = "full_attention" if kind == FULL else "window_attention"
                count[part] += config.num_heads * (2 * H + 2 * H)
    return dict(count)


@pytest.mark.parametrize(
    ("start", "length"), [(0, 1), (0, 7), (0, 8), (0, 9), (0, 40), (3, 2), (5, 6), (8, 1), (33, 20)]
)
def test_operations_of_a_chunk_are_those_counted_one_by_one(
    toy_irregular_dir: pathlib.Path, start: int, length: int
) -> None:
    config = load_config(toy_irregular_dir)
    found = cost.chunk_operations(config, start, length, is_last=False)
    assert dataclasses.asdict(found) == brute_force(config, start, length) | {"unembedding": 0}
    last = cost.chunk_operations(config, start, length, is_last=True)
    assert last.total - found.total == last.unembedding == 2 * config.hidden_size * config.vocab_size


def test_chunks_add_up_to_the_prompt() -> None:
    parts = [cost.chunk_operations(BIG, s, n, is_last=s == 700) for s, n in ((0, 100), (100, 600), (700, 300))]
    assert parts[0] + parts[1] + parts[2] == cost.prompt_operations(BIG, 1000)
    assert parts[2] == cost.prompt_operations(BIG, 1000, cached=700)


def test_operations_are_the_published_ones() -> None:
    """4.552e9 active weights a token without the unembedding; tera-operations of gpt-oss-120b by part, from 32K up."""
    ops = cost.prompt_operations(BIG, 1)
    assert ops.projections + ops.router + ops.experts == 2 * 4_551_966_720
    rows = {
        32_768: (62.6, 0.9, 234.8, 158.3, 1.2, 457.9),
        65_536: (125.2, 1.7, 469.7, 633.3, 2.5, 1232.4),
        100_000: (191.1, 2.7, 716.6, 1474.6, 3.8, 2388.7),
        131_072: (250.5, 3.5, 939.3, 2533.3, 5.0, 3731.5),
    }
    for tokens, (dense, router, experts, full, window, total) in rows.items():
        ops = cost.prompt_operations(BIG, tokens)
        found = (ops.projections, ops.router, ops.experts, ops.full_attention, ops.window_attention, ops.total)
        np.testing.assert_allclose(np.array(found) / 1e12, (dense, router, experts, full, window, total), atol=0.1)


@pytest.mark.parametrize(("name", "total"), [("gpt-oss-20b", 13_761_264_768), ("gpt-oss-120b", 65_248_815_744)])
def test_checkpoint_bytes_are_those_of_the_published_files(name: str, total: int) -> None:
    assert cost.checkpoint_bytes(published_config(name), packed=True).total == total


@pytest.mark.parametrize("packed", [True, False])
def test_checkpoint_bytes_are_those_of_the_tensors(toy_dir: pathlib.Path, packed: bool) -> None:
    config = load_config(toy_dir)
    tensors = {
        name: math.prod(shape) * (1 if name.endswith(("_blocks", "_scales")) else 2)
        for name, (shape, _) in expected_tensors(config, packed).items()
    }
    parts = {
        "attention": (".self_attn.", ".input_layernorm."),
        "router": (".mlp.router.", ".post_attention_layernorm."),
        "experts": (".mlp.experts.",),
        "embedding": ("model.embed_tokens.",),
        "unembedding": ("lm_head.", "model.norm."),
    }
    sums = {part: sum(n for name, n in tensors.items() if any(p in name for p in of)) for part, of in parts.items()}
    assert sum(sums.values()) == sum(tensors.values())
    assert dataclasses.asdict(cost.checkpoint_bytes(config, packed=packed)) == sums


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("divided", ["nothing", "experts", "layers"])
@pytest.mark.parametrize("shape", [MeshShape(), MeshShape(2, 2, 2), MeshShape(3, 1, 2), MeshShape(1, 1, 8)], ids=str)
def test_device_weight_bytes_are_those_of_the_state(
    toy_irregular_dir: pathlib.Path, shape: MeshShape, packed: bool, divided: str, dtype: str
) -> None:
    """Seven layers of irregular kinds leave slots empty on 2 and 3 stages, and no axis divides by 6."""
    config = load_config(toy_irregular_dir)
    plan = plan_stages(config.layer_types, shape.pp)
    expert_parallel = divided == "experts"
    split = TensorSplit.of(shape.ulysses, "psum" if divided == "layers" else None)
    _, state = abstract_model(config, plan, make_mesh(shape), dtype, packed, expert_parallel, split)
    sums: collections.Counter[str] = collections.Counter()
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        name = jax.tree_util.keystr(path)
        part = next(
            part
            for part, keys in {
                "attention": ["'attention'"],
                "experts": ["'experts'"],
                "router": ["'moe'"],
                "unembedding": ["'unembedding'", "'final_norm'"],
                "embedding": ["'embedding'"],
            }.items()
            if any(key in name for key in keys)
        )
        sums[part] += math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
    formula = cost.device_weight_bytes(
        config, plan, shape, dtype, packed=packed, expert_parallel=expert_parallel, split=split
    )
    assert dataclasses.asdict(formula) == dict(sums)


def test_kv_bytes_are_the_published_ones() -> None:
    assert cost.kv_bytes_per_token(BIG, "bfloat16") == 36_864


@pytest.mark.parametrize("shape", [MeshShape(), MeshShape(2, 2, 2), MeshShape(1, 1, 4)], ids=str)
def test_cache_bytes_are_those_of_the_cache(toy_dir: pathlib.Path, shape: MeshShape) -> None:
    it = Engine.load(toy_dir, mesh=shape, kv_cache_tokens=100, page_tokens=8)
    cache = jax.eval_shape(it.programs.empty_state).cache
    per_device = sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(cache)) // shape.num_devices
    pages, requests = cache.positions.shape[3], cache.tails.shape[5]
    found = cost.cache_bytes(it.config, it._plan, shape, "bfloat16")
    assert pages * 8 * found.slot + requests * found.request == per_device


@pytest.mark.parametrize(
    ("shape", "dtype", "ring_pass", "expert_parallel", "form"),
    [
        (MeshShape(2, 2, 2), "bfloat16", "kv", False, None),
        (MeshShape(2, 2, 2), "bfloat16", "q", True, None),
        (MeshShape(1, 1, 4), "float32", "auto", True, None),
        (MeshShape(2, 2, 2), "bfloat16", "kv", False, "flat"),
    ],
    ids=str,
)
def test_traffic_is_what_the_compiled_tick_exchanges(
    toy_dir: pathlib.Path, shape: MeshShape, dtype: str, ring_pass: str, expert_parallel: bool, form: str | None
) -> None:
    """A program holds the exchanges of a unit of layers, of a round of the ring, and of a round of experts once."""
    options: dict[str, Any] = {"ring_pass": ring_pass, "expert_parallel": expert_parallel}
    options |= {"tensor_parallel": form is not None, "all_reduce": form}
    it: Any = Engine.load(
        toy_dir, mesh=shape, dtype=dtype, chunk_tokens=256, kv_cache_tokens=512, page_tokens=8, **options
    )
    bucket, sizes = it.buckets[-1], dict(it.mesh.shape)
    tick, ring_block = it._tick(bucket)
    traffic = cost.tick_traffic(
        it.config,
        it._plan,
        shape,
        dtype,
        bucket=bucket,
        ring_block=ring_block,
        rounds=1,
        ring_pass="kv" if ring_pass == "auto" else ring_pass,
        expert_parallel=expert_parallel,
        split=TensorSplit.of(shape.ulysses, form),
    )
    expected: collections.Counter[Any] = collections.Counter()
    for c in traffic.collectives:
        axes = tuple(axis for axis in c.axes if sizes[axis] > 1)
        times = c.count // (it._plan.repeats if c.layer else 1)
        expected[c.operation, axes, c.operand_bytes, c.sent_bytes] += times
    found: collections.Counter[Any] = collections.Counter()
    for e in hlo.parse_exchanges(tick.as_text()):
        if e.axes(sizes):
            sent = cost.sent_bytes(e.operation, e.operand_bytes, e.ranks)
            found[e.operation, e.axes(sizes), e.operand_bytes, sent] += 1
    assert found == expected


def test_sums_of_tensor_parallelism_are_the_published_ones() -> None:
    """gpt-oss-120b on 8 ranks in bfloat16: 20,160 bytes a token and layer, against 16,128 of heads and tokens."""
    sent = {}
    for form in (None, "tree", "flat", "psum"):
        traffic = cost.tick_traffic(
            BIG,
            plan_stages(BIG.layer_types, 1),
            MeshShape(1, 1, 8),
            "bfloat16",
            bucket=4096,
            ring_block=4096,
            rounds=1,
            split=TensorSplit.of(8, form),
        )
        tokens = 36 * (4096 // 8 if form is None else 4096)
        layers = sum(traffic.sent_bytes(layer=kind) for kind in set(BIG.layer_types))
        sent[form] = layers / tokens
    assert sent == {None: 16_128, "tree": 20_160, "flat": 80_640, "psum": 40_320}


def test_activations_of_tensor_parallelism_hold_all_tokens() -> None:
    shape, sizes = MeshShape(1, 2, 8), {}
    for form in (None, "tree", "flat"):
        sizes[form] = cost.activation_bytes(BIG, shape, 4096, "bfloat16", TensorSplit.of(8, form))
    assert sizes["tree"].residual == 8 * sizes[None].residual == 2048 * 2880 * 4
    assert sizes["tree"].attention == sizes[None].attention
    token = 2880 * 2
    # Sent and received: every rank's values; or, one after the other, a piece for every rank, and all pieces.
    assert sizes["flat"].all_reduce == 2048 * token * 9
    assert sizes["tree"].all_reduce == 2048 * token * (2 + 1 / 8 + 1)
    assert sizes[None].all_reduce == 0


def test_configs_are_found_by_name_and_path(toy_dir: pathlib.Path, tmp_path: pathlib.Path) -> None:
    assert find_config("gpt-oss-120b") == BIG
    toy = load_config(toy_dir)
    assert find_config(toy_dir) == toy
    # The end tokens of generation_config.json, which stands beside it in the folder, are not those of config.json.
    alone = find_config(str(toy_dir / "config.json"))
    assert dataclasses.replace(alone, eos_token_ids=toy.eos_token_ids) == toy
    with pytest.raises(ValueError, match=r"gpt-oss-7b.*gpt-oss-20b, gpt-oss-120b"):
        find_config("gpt-oss-7b")
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(ValueError, match=r"bad\.json.*model_type"):
        find_config(tmp_path / "bad.json")
