"""The parameters are the checkpoint's tensors, bit for bit, on every mesh and from every form of the checkpoint."""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from slope_jax.mesh.axes import MeshShape, make_mesh
from slope_jax.model.checkpoint import weights
from slope_jax.model.checkpoint.placement import ShardBuilder
from slope_jax.model.checkpoint.safetensors import Checkpoint
from slope_jax.model.config import SLIDING, load_config
from slope_jax.model.parallel.tensor_split import TensorSplit
from slope_jax.model.stage_plan import StagePlan, plan_stages
from tests.oracle import checkpoints
from tests.oracle.checkpoints import TOY, TOY_IRREGULAR, WIDE, TinyModel, WriteCheckpoint

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
FLOAT32 = np.dtype(np.float32)


def load(
    source: Checkpoint | pathlib.Path,
    shape: tuple[int, int, int],
    dtype: Any,
    packed: bool,
    expert_parallel: bool = False,
    split: TensorSplit = TensorSplit(),  # noqa: B008 - frozen
) -> tuple[dict[str, jax.Array], StagePlan]:
    """The loaded parameters by name, and the plan that they were loaded with."""
    config = source.config if isinstance(source, Checkpoint) else load_config(source)
    plan = plan_stages(config.layer_types, shape[0])
    mesh = make_mesh(MeshShape(*shape), jax.devices()[: np.prod(shape)])
    opened = source if isinstance(source, Checkpoint) else weights.open_source(source)
    _, state = weights.load_model(opened, config, plan, mesh, dtype, packed, expert_parallel, split)
    leaves = jax.tree_util.tree_flatten_with_path(state)[0]
    names = [jax.tree_util.keystr(path, simple=True, separator=".").removesuffix(".value") for path, _ in leaves]
    return dict(zip(names, (array for _, array in leaves), strict=True)), plan


def kept(x: np.ndarray) -> np.ndarray:
    """Weights that are read by index are kept as bits."""
    return x.view(np.uint16) if x.dtype == BFLOAT16 else x


@functools.cache
def tensors(model: TinyModel, experts: checkpoints.ExpertForm = "mxfp4") -> dict[str, np.ndarray]:
    return checkpoints.model_tensors(model, experts=experts)


def expected(model: TinyModel, plan: StagePlan, devices: int, dtype: np.dtype, packed: bool) -> dict[str, np.ndarray]:
    """All parameters, made from the tensors of the oracle by whole-array NumPy."""
    plain, mxfp4 = tensors(model, "float32"), tensors(model)

    def split(x: np.ndarray, axis: int) -> np.ndarray:
        even, odd = (np.take(x, np.arange(first, x.shape[axis], 2), axis) for first in (0, 1))
        return np.concatenate([even, odd], axis)

    def layer(i: int) -> dict[str, np.ndarray]:
        t = {name.removeprefix(f"model.layers.{i}."): x for name, x in plain.items()}
        p = {name.removeprefix(f"model.layers.{i}.mlp.experts."): x for name, x in mxfp4.items()}
        kernels = {
            "attention.qkv_kernel": np.hstack([t[f"self_attn.{x}_proj.weight"].T for x in "qkv"]),
            "attention.out_kernel": t["self_attn.o_proj.weight"].T,
            "moe.router_kernel": t["mlp.router.weight"].T,
        }
        vectors = {
            "attention.norm": t["input_layernorm.weight"],
            "attention.qkv_bias": np.hstack([t[f"self_attn.{x}_proj.bias"] for x in "qkv"]),
            "attention.sinks": t["self_attn.sinks"],
            "attention.out_bias": t["self_attn.o_proj.bias"],
            "moe.norm": t["post_attention_layernorm.weight"],
            "moe.router_bias": t["mlp.router.bias"],
            "moe.experts.gate_up_bias": split(t["mlp.experts.gate_up_proj_bias"], 1),
            "moe.experts.down_bias": t["mlp.experts.down_proj_bias"],
        }
        out = {name: kept(x.astype(dtype)) for name, x in kernels.items()}
        out |= {name: x.astype(FLOAT32) for name, x in vectors.items()}
        if packed:
            out["moe.experts.gate_up_blocks"] = split(p["gate_up_proj_blocks"], 1)
            out["moe.experts.gate_up_scales"] = split(p["gate_up_proj_scales"], 1)
            out["moe.experts.down_blocks"] = p["down_proj_blocks"]
            out["moe.experts.down_scales"] = p["down_proj_scales"]
        else:
            out["moe.experts.gate_up"] = kept(split(t["mlp.experts.gate_up_proj"], 2).astype(dtype))
            out["moe.experts.down"] = kept(t["mlp.experts.down_proj"].astype(dtype))
        return out

    layers = [layer(i) for i in range(model.num_layers)]
    state: dict[str, np.ndarray] = {}
    stack = (len(plan.layers), plan.repeats)
    for slot in range(len(plan.unit)):
        held = [stage[slot :: len(plan.unit)] for stage in plan.layers]
        for name, like in layers[0].items():
            rows = [np.zeros_like(like) if i is None else layers[i][name] for stage in held for i in stage]
            state[f"layers.{slot}.{name}"] = np.stack(rows).reshape(*stack, *like.shape)
    V, D = model.vocab, model.hidden
    embedding, unembedding = plain["model.embed_tokens.weight"], plain["lm_head.weight"]
    state["embedding"] = kept(np.pad(embedding, ((0, 0), (0, -D % devices))).astype(dtype))
    state["unembedding"] = np.pad(unembedding, ((0, -V % devices), (0, 0))).astype(dtype)
    state["final_norm"] = plain["model.norm.weight"].astype(FLOAT32)
    return state


def assert_same_bits(actual: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert actual.keys() == wanted.keys()
    for name, value in wanted.items():
        a, w = np.asarray(actual[name]), np.asarray(value)
        assert (a.dtype, a.shape) == (w.dtype, w.shape), name
        assert a.tobytes() == w.tobytes(), name


@pytest.mark.parametrize("packed", [False, True], ids=["unpacked", "packed"])
@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT32], ids=str)
@pytest.mark.parametrize(
    ("model", "shape"),
    [(TOY, (1, 1, 1)), (TOY, (4, 1, 2)), (TOY, (3, 1, 1)), (TOY_IRREGULAR, (2, 2, 2)), (WIDE, (1, 2, 3))],
    ids=["toy-1", "toy-4x1x2", "toy-3", "irregular-2x2x2", "wide-1x2x3"],
)
def test_parameters_are_the_tensors(
    checkpoint: WriteCheckpoint, model: TinyModel, shape: tuple[int, int, int], dtype: np.dtype, packed: bool
) -> None:
    state, plan = load(checkpoint(model), shape, dtype, packed)
    assert_same_bits(state, expected(model, plan, int(np.prod(shape)), dtype, packed))
    if shape[0] == 4:
        assert any(layer is None for stage in plan.layers for layer in stage), "no empty slot was tried"


def test_every_device_holds_its_shard_and_no_more(toy_dir: pathlib.Path) -> None:
    state, plan = load(toy_dir, (2, 2, 2), BFLOAT16, False)
    wanted = expected(TOY, plan, 8, BFLOAT16, False)
    for name, array in state.items():
        assert len(array.addressable_shards) == 8
        for shard in array.addressable_shards:
            pp, ring, ulysses = np.unravel_index(shard.device.id, (2, 2, 2))
            if name == "embedding":
                part = wanted[name][:, 12 * shard.device.id :][:, :12]
            elif name == "unembedding":
                part = wanted[name][27 * shard.device.id :][:27]
            elif name == "final_norm":
                part = wanted[name]
            else:
                part = wanted[name][pp : pp + 1]
            np.testing.assert_array_equal(np.asarray(shard.data), part, err_msg=f"{name} {ring} {ulysses}")


@pytest.mark.parametrize("packed", [False, True], ids=["unpacked", "packed"])
@pytest.mark.parametrize(("model", "shape"), [(TOY, (4, 1, 2)), (WIDE, (1, 2, 4))], ids=["toy-4x1x2", "wide-1x2x4"])
def test_expert_parallelism_gives_every_device_its_own_experts(
    checkpoint: WriteCheckpoint,
    monkeypatch: pytest.MonkeyPatch,
    model: TinyModel,
    shape: tuple[int, int, int],
    packed: bool,
) -> None:
    """Bit for bit, in pieces of less than a shard, with empty slots of stages, and with every byte read once."""
    monkeypatch.setattr(weights, "PIECE_BYTES", 30_000)
    source = Checkpoint.open(checkpoint(model))
    state, plan = load(source, shape, BFLOAT16, packed, expert_parallel=True)
    wanted = expected(model, plan, 8, BFLOAT16, packed)
    assert_same_bits(state, wanted)
    share = model.num_experts // shape[2]
    for name in (n for n in wanted if ".experts." in n):
        for shard in state[name].addressable_shards:
            pp, _, ulysses = np.unravel_index(shard.device.id, shape)
            part = wanted[name][pp : pp + 1, :, ulysses * share : (ulysses + 1) * share]
            np.testing.assert_array_equal(np.asarray(shard.data), part, err_msg=f"{name} {pp} {ulysses}")
    index = json.loads((source.directory / "model.safetensors.index.json").read_text())
    assert source.bytes_read == index["metadata"]["total_size"]


def parts_of_rank(model: TinyModel, ranks: int, rank: int) -> dict[str, tuple[int, list[int | None]]]:
    """Which places of each divided parameter a rank has, head by head and column by column; None where it has zeros.

    Of each, the axis after the stages and repeats, and the places in the parameter of the whole model.
    """
    N, K, H, F = model.num_heads, model.num_kv_heads, model.head_dim, model.intermediate
    heads = list(range(rank * N // ranks, (rank + 1) * N // ranks))
    kv_heads = list(dict.fromkeys(h // (N // K) for h in heads))
    columns = [*heads, *(N + k for k in kv_heads), *(N + K + k for k in kv_heads)]
    blocks = -(-F // 32 // ranks)  # of the width, on each rank
    width = [f if f < F else None for f in range(32 * blocks * rank, 32 * blocks * (rank + 1))]
    gates_and_ups = [*width, *(None if f is None else F + f for f in width)]

    def of_heads(which: list[int]) -> list[int | None]:
        return [h * H + i for h in which for i in range(H)]

    return {
        "attention.qkv_kernel": (1, of_heads(columns)),
        "attention.qkv_bias": (0, of_heads(columns)),
        "attention.sinks": (0, list(heads)),
        "attention.out_kernel": (0, of_heads(heads)),
        "moe.experts.gate_up": (2, gates_and_ups),
        "moe.experts.gate_up_bias": (1, gates_and_ups),
        "moe.experts.gate_up_blocks": (1, gates_and_ups),
        "moe.experts.gate_up_scales": (1, gates_and_ups),
        "moe.experts.down": (1, width),
        "moe.experts.down_blocks": (2, [None if f is None else f // 32 for f in width[::32]]),
        "moe.experts.down_scales": (2, [None if f is None else f // 32 for f in width[::32]]),
    }


@pytest.mark.parametrize("form", ["unpacked", "packed", "unquantised"])
@pytest.mark.parametrize(
    ("model", "shape"), [(TOY, (4, 1, 2)), (TOY, (1, 1, 8)), (WIDE, (1, 2, 4))], ids=["toy-2", "toy-8", "wide-4"]
)
def test_tensor_parallelism_gives_every_device_its_heads_and_columns(
    checkpoint: WriteCheckpoint,
    monkeypatch: pytest.MonkeyPatch,
    model: TinyModel,
    shape: tuple[int, int, int],
    form: str,
) -> None:
    """Bit for bit, with empty slots, KV heads that several ranks have, and blocks that the ranks do not divide."""
    monkeypatch.setattr(weights, "PIECE_BYTES", 30_000)
    packed, ranks = form == "packed", shape[2]
    directory = checkpoint(model, experts="bfloat16") if form == "unquantised" else checkpoint(model)
    state, plan = load(directory, shape, BFLOAT16, packed, split=TensorSplit(ranks=ranks))
    wanted = expected(model, plan, 8, BFLOAT16, packed)
    assert state.keys() == wanted.keys()
    for name in (n for n in wanted if n.startswith("layers.")):
        key = name.split(".", 2)[2]
        for shard in state[name].addressable_shards:
            pp, _, ulysses = np.unravel_index(shard.device.id, shape)
            part = wanted[name][pp : pp + 1]
            if key in (parts := parts_of_rank(model, ranks, int(ulysses))):
                axis, places = parts[key]
                zero = np.zeros_like(np.take(part, [0], axis + 2))
                columns = [zero if p is None else np.take(part, [p], axis + 2) for p in places]
                part = np.concatenate(columns, axis + 2)
            np.testing.assert_array_equal(np.asarray(shard.data), part, err_msg=f"{name} {pp} {ulysses}")


@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT32], ids=str)
@pytest.mark.parametrize(
    "options",
    [
        {"experts": "bfloat16"},
        {"experts": "float32", "dtype": "float32"},
        {"num_files": 1},
        {"num_files": 7, "rope_spelling": "rope_parameters"},
    ],
    ids=str,
)
def test_all_forms_of_a_checkpoint_load_equal(
    checkpoint: WriteCheckpoint, options: dict[str, Any], dtype: np.dtype
) -> None:
    reference, _ = load(checkpoint(TOY), (2, 1, 2), dtype, False)
    other, _ = load(checkpoint(TOY, **options), (2, 1, 2), dtype, False)
    assert_same_bits(other, reference)


@pytest.mark.parametrize("packed", [False, True], ids=["unpacked", "packed"])
def test_pieces_join_exactly(checkpoint: WriteCheckpoint, monkeypatch: pytest.MonkeyPatch, packed: bool) -> None:
    monkeypatch.setattr(weights, "PIECE_BYTES", 30_000)
    state, plan = load(checkpoint(WIDE), (1, 3, 1), FLOAT32, packed)
    assert_same_bits(state, expected(WIDE, plan, 3, FLOAT32, packed))


def write_tensors(directory: pathlib.Path, changed: dict[str, np.ndarray], **options: Any) -> pathlib.Path:
    """A toy checkpoint in one file, with some tensors replaced."""
    checkpoints.write_checkpoint(TOY, directory, num_files=1, **options)
    form = {key: value for key, value in options.items() if key in ("experts", "dtype")}
    save_file(checkpoints.model_tensors(TOY, **form) | changed, directory / "model.safetensors")
    return directory


def test_float32_rounds_to_nearest_even_and_subnormals_survive(tmp_path: pathlib.Path) -> None:
    rng = np.random.default_rng(0)
    values = rng.integers(0, 2**32, (TOY.vocab, TOY.hidden), dtype=np.uint32)
    values[0, :4] = [0x3F808000, 0x3F818000, 0x00008001, 0x80010000]  # two ties, two subnormal numbers
    values[(values & 0x7F800000) == 0x7F800000] = 0x3F800000  # no infinities and NaNs
    name = "lm_head.weight"
    directory = write_tensors(tmp_path, {name: values.view(np.float32)}, experts="float32", dtype="float32")
    wide, _ = load(directory, (1, 1, 1), FLOAT32, False)
    np.testing.assert_array_equal(np.asarray(wide["unembedding"]).view(np.uint32), values)
    narrow, _ = load(directory, (1, 1, 1), BFLOAT16, False)
    rounded = (values.astype(np.uint64) + 0x7FFF + ((values >> 16) & 1)) >> 16
    np.testing.assert_array_equal(np.asarray(narrow["unembedding"]).view(np.uint16), rounded)
    assert np.asarray(narrow["unembedding"]).view(np.uint16)[0, :4].tolist() == [0x3F80, 0x3F82, 0x0001, 0x8001]


@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT32], ids=str)
def test_gates_are_even_rows_and_ups_odd_rows(tmp_path: pathlib.Path, dtype: np.dtype) -> None:
    """Case G11, for the biases, the packed rows, the unpacked rows and the unquantised columns."""
    E, F, D = TOY.num_experts, TOY.intermediate, TOY.hidden
    prefix = "model.layers.0.mlp.experts.gate_up_proj"
    rows = np.arange(2 * F)
    bias = np.broadcast_to(rows.astype(BFLOAT16), (E, 2 * F)).copy()
    # Row r of the weights is 2^(r - 64) throughout: nibble 2 is 1.0.
    blocks = np.full((E, 2 * F, D // 32, 16), 0x22, np.uint8)
    scales = np.broadcast_to((rows + 63).astype(np.uint8)[:, None], (E, 2 * F, D // 32)).copy()
    packed_tensors = {f"{prefix}_bias": bias, f"{prefix}_blocks": blocks, f"{prefix}_scales": scales}
    plain = np.broadcast_to(np.ldexp(1.0, rows - 64).astype(BFLOAT16), (E, D, 2 * F)).copy()
    order = np.concatenate([rows[0::2], rows[1::2]])

    directory = write_tensors(tmp_path / "mxfp4", packed_tensors)
    packed, _ = load(directory, (1, 1, 1), dtype, True)
    assert (np.asarray(packed["layers.0.moe.experts.gate_up_bias"])[0, 0] == order).all()
    assert (np.asarray(packed["layers.0.moe.experts.gate_up_scales"])[0, 0] == order[:, None] + 63).all()
    unquantised = write_tensors(tmp_path / "plain", {f"{prefix}_bias": bias, prefix: plain}, experts="bfloat16")
    for source in (directory, unquantised):
        unpacked, _ = load(source, (1, 1, 1), dtype, False)
        assert (np.asarray(unpacked["layers.0.moe.experts.gate_up_bias"])[0, 0] == order).all()
        kernel = np.asarray(unpacked["layers.0.moe.experts.gate_up"])[0, 0]
        values = kernel.view(BFLOAT16) if kernel.dtype == np.uint16 else kernel
        assert (values.astype(np.float64) == np.ldexp(1.0, order - 64)).all()


@pytest.mark.parametrize("packed", [False, True], ids=["unpacked", "packed"])
def test_scale_255_is_refused_by_name(tmp_path: pathlib.Path, packed: bool) -> None:
    name = "model.layers.3.mlp.experts.down_proj_scales"
    scales = tensors(TOY)[name].copy()
    scales[5, 7, 1] = 255
    directory = write_tensors(tmp_path, {name: scales})
    with pytest.raises(ValueError, match=rf"model\.safetensors: {name}.*\(5, 7, 1\) is 255"):
        load(directory, (1, 1, 1), BFLOAT16, packed)


def test_requests_that_cannot_be_met_are_refused(checkpoint: WriteCheckpoint, toy_dir: pathlib.Path) -> None:
    config, mesh = load_config(toy_dir), make_mesh(MeshShape(), jax.devices()[:1])
    plan = plan_stages(config.layer_types, 1)

    def attempt(directory: pathlib.Path = toy_dir, **changed: Any) -> None:
        request = {"config": config, "plan": plan, "mesh": mesh, "dtype": BFLOAT16, "packed": False} | changed
        weights.load_model(weights.open_source(directory), **request)

    with pytest.raises(ValueError, match="dtype must be bfloat16 or float32, not float16"):
        attempt(dtype=jnp.float16)
    with pytest.raises(ValueError, match="not quantised"):
        attempt(checkpoint(TOY, experts="bfloat16"), packed=True)
    with pytest.raises(ValueError, match=r"differ in tensor model\.embed_tokens\.weight"):
        attempt(config=dataclasses.replace(config, vocab_size=212))
    with pytest.raises(ValueError, match="the model has 6 layers"):
        attempt(plan=StagePlan((SLIDING,), ((0,),)))
    with pytest.raises(ValueError, match="layer 0 in a slot for full_attention"):
        attempt(plan=StagePlan(plan.pattern[::-1], plan.layers))


def test_an_unfilled_shard_is_an_error() -> None:
    builder = ShardBuilder(((0, 4), (0, 2)), np.float32, jax.devices()[:1], axis=0)
    builder.append([np.ones((3, 2), np.float32)], lambda x, dtype: x)
    with pytest.raises(ValueError, match="filled to 3 of 4"):
        builder.finish(4)


@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 2, 2), (1, 2, 4), (4, 1, 1)], ids=str)
def test_every_byte_is_read_once(toy_dir: pathlib.Path, shape: tuple[int, int, int]) -> None:
    source = Checkpoint.open(toy_dir)
    load(source, shape, BFLOAT16, False)
    index = json.loads((toy_dir / "model.safetensors.index.json").read_text())
    assert source.bytes_read == index["metadata"]["total_size"]


def test_fingerprint_tells_weights_apart_but_not_forms(checkpoint: WriteCheckpoint) -> None:
    def fingerprint(model: TinyModel, **options: Any) -> str:
        return weights.model_fingerprint(weights.open_source(checkpoint(model, **options)))

    forms: list[dict[str, Any]] = [
        {},
        {"experts": "bfloat16"},
        {"num_files": 1},
        {"experts": "float32", "dtype": "float32"},
    ]
    assert len({fingerprint(TOY, **form) for form in forms}) == 1
    assert fingerprint(TOY) != fingerprint(dataclasses.replace(TOY, seed=99))
    assert fingerprint(TOY) != fingerprint(dataclasses.replace(TOY, rope_theta=101.0))
