"""The exponential that is rounded to bfloat16 is as good as the one of NumPy."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from slope_jax.model import numerics

NUMBERS = np.concatenate([np.linspace(-87, 0, 200_001), -np.geomspace(1e-30, 1, 1000)]).astype(np.float32)


def test_short_exponential_has_a_small_relative_error() -> None:
    found = np.asarray(jax.jit(numerics._short_exp)(NUMBERS), np.float64)
    np.testing.assert_allclose(found, np.exp(NUMBERS.astype(np.float64)), rtol=1e-5)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_exponential_is_that_of_numpy_rounded(dtype: jnp.dtype) -> None:
    found = np.asarray(jax.jit(lambda x: numerics.exp(x, dtype))(NUMBERS))
    assert found.dtype == dtype
    rounding = 2.0**-8 if dtype == jnp.bfloat16 else 2.0**-20
    np.testing.assert_allclose(found.astype(np.float64), np.exp(NUMBERS.astype(np.float64)), rtol=1.01 * rounding)


@pytest.mark.parametrize("x", [-np.inf, -1e30, -104.0])
def test_what_is_too_small_is_zero(x: float) -> None:
    assert jax.jit(lambda x: numerics.exp(x, jnp.bfloat16))(jnp.float32(x)) == 0


def test_what_is_not_a_number_stays_so() -> None:
    assert np.isnan(np.float32(jax.jit(lambda x: numerics.exp(x, jnp.bfloat16))(jnp.float32(np.nan))))
