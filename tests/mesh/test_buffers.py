"""The largest temporaries of a compiled program are those that its memory plan holds."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from slope_jax.audit.buffers import largest_temporaries


def test_largest_temporaries() -> None:
    def function(x: jax.Array) -> jax.Array:
        with jax.named_scope("large"):
            large = jnp.sort(x @ x, axis=0)
        with jax.named_scope("small"):
            small = jnp.sort(large[:100, :70] @ large[:70, :50], axis=0)
        return jnp.sum(small @ small[:50]) + large[0, 0]

    compiled = jax.jit(function).lower(jax.ShapeDtypeStruct((300, 300), jnp.float32)).compile()
    found = largest_temporaries(compiled, 5)
    assert found == sorted(found, reverse=True)
    assert found[0].num_bytes == 300 * 300 * 4
    assert "large" in found[0].op_name.split("/")
    analysis = compiled.memory_analysis()
    assert analysis is not None
    assert found[0].num_bytes <= analysis.temp_size_in_bytes
    assert any("small" in t.op_name.split("/") and t.num_bytes < found[0].num_bytes for t in found)


def test_arguments_results_and_constants_are_not_temporaries() -> None:
    table = jnp.arange(1000.0)
    compiled = jax.jit(lambda i, x: table[i] * x).lower(1, jax.ShapeDtypeStruct((999,), jnp.float32)).compile()
    assert all(t.num_bytes < 100 for t in largest_temporaries(compiled, 10))
