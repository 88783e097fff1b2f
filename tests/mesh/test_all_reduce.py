"""The forms of the all-reduce give the sum, the same bits to all devices, and send what `steps` says."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from slope_jax.audit import hlo
from slope_jax.mesh import all_reduce
from slope_jax.mesh.axes import PER_DEVICE, ULYSSES, MeshShape, make_mesh
from slope_jax.model.storage import from_bits, to_bits

SHAPE = MeshShape(1, 2, 4)
TOKENS, WIDTH = 8, 6


def compiled(form: str, dtype: Any) -> Any:
    def per_device(x: jax.Array) -> jax.Array:
        y = all_reduce.all_reduce(
            x[0, 0, 0],
            ULYSSES,
            form,
            lambda v: to_bits(v.astype(dtype)),
            lambda bits: from_bits(bits).astype(jnp.float32),
        )
        return y[None, None, None]

    mesh = make_mesh(SHAPE, jax.devices()[:8])
    sharded = jax.shard_map(per_device, mesh=mesh, in_specs=PER_DEVICE, out_specs=PER_DEVICE, check_vma=False)
    return jax.jit(sharded).lower(jax.ShapeDtypeStruct((1, 2, 4, TOKENS, WIDTH), jnp.float32)).compile()


@pytest.mark.parametrize("form", all_reduce.FORMS)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_every_device_gets_the_sum_and_sends_what_is_said(form: str, dtype: Any) -> None:
    program = compiled(form, dtype)
    # Whole numbers of which bfloat16 holds each, and float32 all sums, so that the order of additions does not matter.
    x = np.random.default_rng(0).integers(-100, 100, (1, 2, 4, TOKENS, WIDTH)).astype(np.float32)
    found = np.asarray(program(x))
    total = x.sum(axis=2, keepdims=True)
    assert len(np.unique(total)) > 20
    if form == all_reduce.TREE and dtype == jnp.bfloat16:  # the sum travels too
        total = total.astype(jnp.bfloat16).astype(np.float32)
    np.testing.assert_array_equal(found, np.broadcast_to(total, x.shape))

    found_steps = [(e.operation, e.operand_bytes) for e in hlo.parse_exchanges(program.as_text())]
    steps = all_reduce.steps(form, TOKENS * WIDTH, jnp.dtype(dtype).itemsize, SHAPE.ulysses)
    assert found_steps == [(step.operation, step.operand_bytes) for step in steps]


@pytest.mark.parametrize("form", all_reduce.FORMS)
def test_all_devices_get_the_same_bits(form: str) -> None:
    """Of numbers whose sum depends on the order of the additions; it is within float32 rounding all the same."""
    x = np.random.default_rng(1).normal(size=(1, 2, 4, TOKENS, WIDTH)).astype(np.float32)
    x *= 10.0 ** np.arange(4, dtype=np.float32).reshape(1, 1, 4, 1, 1)
    found = np.asarray(compiled(form, jnp.float32)(x))
    for rank in range(4):
        assert found[:, :, rank].tobytes() == found[:, :, 0].tobytes()
    np.testing.assert_allclose(found[:, :, 0], x.astype(np.float64).sum(axis=2), atol=1e-2 * 2**-10)


def test_bytes_sent_for_a_value() -> None:
    """Of gpt-oss in bfloat16 on 8 ranks: a sum of 2880 values sends 10,080 bytes a token in two steps."""
    assert [s.operand_bytes for s in all_reduce.steps("tree", 2880, 2, 8)] == [5760, 720]
    assert [s.operand_bytes for s in all_reduce.steps("flat", 2880, 2, 8)] == [5760]
    assert [s.operand_bytes for s in all_reduce.steps("psum", 2880, 2, 8)] == [11520]


def test_an_unknown_form_is_refused() -> None:
    with pytest.raises(ValueError, match=r"all_reduce='star' is not supported.*\['psum', 'flat', 'tree'\]"):
        all_reduce.steps("star", 1, 1, 1)
