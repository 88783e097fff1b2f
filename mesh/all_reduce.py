"""The sum over the devices of an axis, in three forms: the more bytes are sent, the fewer steps wait for each other.

    psum    one collective, whose algorithm the library chooses    2 (U - 1) / U values leave a device, by a ring
    flat    all-gather, then a local sum                           U - 1 values, in one step, whatever U is
    tree    reduce-scatter, then all-gather                        2 (U - 1) / U values, in two steps

for each value of the sum, U being the devices of the axis. `flat` waits least and sends most, so it is for few values.
The last two are the forms of the all-reduce by direct access to the memory of other GPUs (DDA) that Meta describes in
"Scaling LLM Inference" (2025); the reduce-scatter is an all-to-all and a local sum.

`flat` and `tree` send values as the caller packs them, and add them up in float32. `psum` sends float32: a collective
sum of bfloat16 is one of float32 on CPU anyway, where XLA widens it, and elsewhere it rounds at every step of the way.

All devices must get the same bits where they go on with the same work, such as choosing the experts of a token. `flat`
and `tree` add up in the order of the devices; the algorithms behind `psum` add up each value in one place.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import chex
import jax
import jax.numpy as jnp

PSUM, FLAT, TREE = "psum", "flat", "tree"
FORMS = (PSUM, FLAT, TREE)

_FLOAT32 = 4  # bytes

Convert = Callable[[jax.Array], jax.Array]


def all_reduce(x_TD: jax.Array, axis: str, form: str, pack: Convert, unpack: Convert) -> jax.Array:
    """The sum of the devices' `x_TD`, on each of them.

    Args:
      x_TD: float32; for "tree" the devices of the axis divide T.
      axis: of the mesh.
      form: one of `FORMS`.
      pack: makes what travels of float32 values.
      unpack: makes float32 values of what has travelled.

    Returns:
      float32 `[T, D]`.

    Raises:
      ValueError: there is no such form.
    """
    chex.assert_type(x_TD, jnp.float32)
    check_form(form)
    if form == PSUM:
        return jax.lax.psum(x_TD, axis)
    if form == FLAT:
        return jnp.sum(unpack(jax.lax.all_gather(pack(x_TD), axis)), axis=0)
    ranks = jax.lax.axis_size(axis)
    chex.assert_is_divisible(x_TD.shape[0], ranks)
    pieces_UTD = pack(x_TD.reshape(ranks, -1, x_TD.shape[1]))
    mine_UTD = unpack(jax.lax.all_to_all(pieces_UTD, axis, split_axis=0, concat_axis=0))
    return unpack(jax.lax.all_gather(pack(jnp.sum(mine_UTD, axis=0)), axis, tiled=True))


def check_form(form: str) -> None:
    """Raises ValueError when there is no such form."""
    if form not in FORMS:
        raise ValueError(f"all_reduce={form!r} is not supported; it must be one of {list(FORMS)}")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A collective of an all-reduce.

    Attributes:
      operation: "psum", "all_gather" or "all_to_all".
      operand_bytes: bytes of its operand on a device.
    """

    operation: str
    operand_bytes: int


def steps(form: str, values: int, itemsize: int, ranks: int) -> tuple[Step, ...]:
    """The collectives of a sum of so many values over `ranks` devices, each packed in `itemsize` bytes."""
    check_form(form)
    packed = values * itemsize
    return {
        PSUM: (Step(operation="psum", operand_bytes=values * _FLOAT32),),
        FLAT: (Step(operation="all_gather", operand_bytes=packed),),
        TREE: (
            Step(operation="all_to_all", operand_bytes=packed),
            Step(operation="all_gather", operand_bytes=packed // ranks),
        ),
    }[form]
