"""What the benchmark times are the operations that it names: their results are compared with NumPy."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from slope_jax.launch.bench import operations as bench
from slope_jax.launch.make_checkpoint import PRESETS
from slope_jax.launch.random_weights import RandomSource
from slope_jax.mesh.axes import MeshShape, make_mesh
from slope_jax.model.config import FULL
from slope_jax.model.counts import cost
from slope_jax.model.ops import mxfp4
from tests.model.test_attention import plain

CONFIG = PRESETS["tiny"].config()
PREFIX = "model.layers.0.mlp."


def build(operation: str, tokens: int, dtype: type = np.float32) -> bench.Operation:
    case = bench.OperationCase(operation=operation, tokens=tokens)
    return bench.build(case, CONFIG, dtype, jax.devices()[0], (16, 32))


def test_the_table_has_only_known_operations_and_every_kind() -> None:
    assert {case.operation for case in bench.CASES} == {
        bench.FULL_ATTENTION,
        bench.WINDOW_ATTENTION,
        bench.EXPERTS,
        bench.PACKED_EXPERTS,
        bench.UNPACK,
    }
    with pytest.raises(ValueError, match="'softmax'"):
        build("softmax", 1)


@pytest.mark.parametrize("tokens", [9, 100])
@pytest.mark.parametrize("operation", [bench.FULL_ATTENTION, bench.WINDOW_ATTENTION])
def test_attention(operation: str, tokens: int) -> None:
    it = build(operation, tokens)
    q, k, v, sinks = (np.asarray(a, np.float64) for a in it.arguments)
    window = CONFIG.sliding_window if operation == bench.WINDOW_ATTENTION else None
    positions = np.arange(tokens)
    expected = plain(q, positions, k, v, positions, sinks, window)
    np.testing.assert_allclose(np.asarray(it())[0, 0, 0], expected, atol=3e-6)
    pairs = sum(min(i + 1, window or tokens) for i in range(tokens))
    assert it.operations == 4 * pairs * CONFIG.num_heads * CONFIG.head_dim


@pytest.mark.parametrize("operation", [bench.EXPERTS, bench.PACKED_EXPERTS])
def test_experts(operation: str) -> None:
    it = build(operation, 40)
    source = RandomSource(dataclasses.replace(CONFIG, layer_types=(FULL,)))

    def tensor(name: str) -> np.ndarray:
        return source.read(name).astype(np.float64)

    x = np.asarray(it.arguments[1], np.float64)
    scale = tensor("model.layers.0.post_attention_layernorm.weight")
    t = x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + CONFIG.rms_norm_eps) * scale
    logits = t @ tensor(f"{PREFIX}router.weight").T + tensor(f"{PREFIX}router.bias")
    kernels = {
        name: mxfp4.dequantize(
            source.read(f"{PREFIX}experts.{name}_proj_blocks"), source.read(f"{PREFIX}experts.{name}_proj_scales")
        ).astype(np.float64)
        for name in ("gate_up", "down")
    }
    biases = {name: tensor(f"{PREFIX}experts.{name}_proj_bias") for name in ("gate_up", "down")}
    expected = np.zeros(x.shape)
    for token in range(len(x)):
        chosen = np.argsort(-logits[token])[: CONFIG.experts_per_token]
        shares = np.exp(logits[token, chosen] - logits[token, chosen].max())
        for e, share in zip(chosen, shares / shares.sum(), strict=True):
            u = kernels["gate_up"][e] @ t[token] + biases["gate_up"][e]
            gate, up = np.minimum(u[0::2], 7), np.clip(u[1::2], -7, 7)
            a = gate / (1 + np.exp(-1.702 * gate)) * (up + 1)
            expected[token] += share * (kernels["down"][e] @ a + biases["down"][e])
    np.testing.assert_allclose(np.asarray(it())[0, 0, 0], expected, atol=2e-4)
    D, F, E = CONFIG.hidden_size, CONFIG.intermediate_size, CONFIG.num_experts
    assert it.operations == 40 * (2 * D * E + CONFIG.experts_per_token * 2 * 3 * D * F)


def test_unpacking() -> None:
    it = build(bench.UNPACK, 0, jnp.bfloat16)
    blocks, scales = (np.asarray(a) for a in it.arguments)
    expected = mxfp4.dequantize(blocks, scales)
    found = np.asarray(it())
    np.testing.assert_array_equal(found.view(jnp.bfloat16).astype(np.float32), expected)
    assert it.num_bytes == found.nbytes


def test_exchanges_have_the_bytes_of_the_tick() -> None:
    mesh = make_mesh(MeshShape(2, 2, 2))
    axes = {"all_to_all": ("ring", "ulysses"), "ppermute": ("pp",), "all_gather": ("ulysses",), "psum": mesh.axis_names}
    for operation, over in axes.items():
        collective = cost.Collective(
            purpose="test",
            scope="",
            operation=operation,
            axes=over,
            layer=None,
            count=1,
            operand_bytes=4800,
            sent_bytes=77,
        )
        it = bench.exchange(collective, mesh)
        assert it.arguments[0].nbytes == 8 * 4800
        assert it.num_bytes == 77
        out = np.asarray(it())
        ranks = math.prod(mesh.shape[axis] for axis in over)
        assert out.shape == (2, 2, 2, 1200 * (ranks if operation == "all_gather" else 1))
        assert (out == (ranks if operation == "psum" else 1)).all()
