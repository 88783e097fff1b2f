"""Mixture of experts: routing, and a grouped matrix product that works only on rows that exist.

The (token, choice) pairs are sorted by expert. Each expert with rows is visited once, its weights are read (or
unpacked) once, and its rows are worked on block by block. Blocks are written in ascending order, so the rows that a
block writes beyond the end of its expert are overwritten by the next expert.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp

from slope_jax.mesh.axes import varying
from slope_jax.model.config import GptOssConfig
from slope_jax.model.numerics import dot
from slope_jax.model.storage import from_bits, to_bits

Weights = tuple[jax.Array, jax.Array]  # gate_up [D, 2F] and down [F, D] of one expert


class Routing(NamedTuple):
    """The experts of each token and their weights.

    Attributes:
      experts_TX: expert ids, int32.
      weights_TX: softmax over the chosen logits, float32.
    """

    experts_TX: jax.Array
    weights_TX: jax.Array


class Groups(NamedTuple):
    """The (token, choice) pairs sorted by expert.

    Attributes:
      order: pair index `token * X + choice` of each sorted row.
      row_of_pair: where each pair is in the sorted rows.
      start: first row of each expert.
      size: rows of each expert.
    """

    order: jax.Array
    row_of_pair: jax.Array
    start: jax.Array
    size: jax.Array


def route(logits_TE: jax.Array, experts_per_token: int) -> Routing:
    """Picks the highest logits of each token, the lower expert on a tie; the softmax runs over those alone."""
    top_TX, experts_TX = jax.lax.top_k(logits_TE, experts_per_token)
    return Routing(experts_TX, jax.nn.softmax(top_TX, axis=-1))


def group_by_expert(experts_TX: jax.Array, valid_T: jax.Array, num_experts: int) -> Groups:
    """Sorts the pairs by expert; pairs of tokens that are padding go last and belong to no expert."""
    pairs = jnp.where(valid_T[:, None], experts_TX, num_experts).reshape(-1)
    order = jnp.argsort(pairs, stable=True)
    row_of_pair = jnp.zeros_like(order).at[order].set(jnp.arange(order.shape[0]), unique_indices=True)
    edges = jnp.searchsorted(pairs[order], jnp.arange(num_experts + 1))
    return Groups(order, row_of_pair, edges[:-1], jnp.diff(edges))


def clamped_swiglu(gate: jax.Array, up: jax.Array, limit: float, alpha: float) -> jax.Array:
    """`gate * sigmoid(alpha * gate) * (up + 1)`, the gate clamped from above only."""
    gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
    return gate * jax.nn.sigmoid(alpha * gate) * (up + 1)


def grouped_mlp(
    x_TD: jax.Array,
    routing: Routing,
    valid_T: jax.Array,
    config: GptOssConfig,
    read_weights: Callable[[jax.Array], Weights],
    gate_up_bias_EF: jax.Array,
    down_bias_ED: jax.Array,
    expected_pairs: int | None = None,
) -> jax.Array:
    """The experts' output of every token, weighted and summed; float32 `[T, D]`.

    Args:
      x_TD: normalised input in the compute dtype.
      routing: the experts of each token, as indices of the biases; an id that is too large stands for no expert.
      valid_T: which rows are tokens; the output of the others is zero.
      config: the model's hyperparameters.
      read_weights: gives the weights of one expert in the compute dtype.
      gate_up_bias_EF: float32 `[E, 2F]`, gates first.
      down_bias_ED: float32 `[E, D]`.
      expected_pairs: how many (token, expert) pairs there usually are; by default all that there can be.
    """
    tokens, choices = routing.experts_TX.shape
    chex.assert_shape(x_TD, (tokens, config.hidden_size))
    chex.assert_shape(valid_T, (tokens,))
    chex.assert_shape(gate_up_bias_EF, (None, 2 * config.intermediate_size))
    chex.assert_shape(down_bias_ED, (None, config.hidden_size))
    num_experts = down_bias_ED.shape[0]
    sizes = _block_sizes(expected_pairs or tokens * choices, num_experts)
    groups = group_by_expert(routing.experts_TX, valid_T, num_experts)
    token_of_row = jnp.pad(groups.order // choices, (0, sizes[-1]))
    bits_TD = to_bits(x_TD)
    used = jnp.argsort(groups.size == 0, stable=True)

    def one_expert(i: jax.Array, y_RD: jax.Array) -> jax.Array:
        expert = used[i]
        gate_up, down = read_weights(expert)

        def one_block(row: jax.Array, size: int, y_RD: jax.Array) -> jax.Array:
            x_BD = from_bits(bits_TD[jax.lax.dynamic_slice_in_dim(token_of_row, row, size)])
            u_BF = dot(x_BD, gate_up) + gate_up_bias_EF[expert]
            gate, up = jnp.split(u_BF, 2, axis=-1)
            a_BF = clamped_swiglu(gate, up, config.swiglu_limit, config.swiglu_alpha)
            y_BD = dot(a_BF, down) + down_bias_ED[expert]
            return jax.lax.dynamic_update_slice_in_dim(y_RD, y_BD, row, axis=0)

        row, left = groups.start[expert], groups.size[expert]
        for size in sizes:
            # The last size also takes what does not fill a block of it.
            blocks = left // size if size != sizes[-1] else -(-left // size)
            y_RD = jax.lax.fori_loop(
                0, blocks, lambda b, y, row=row, size=size: one_block(row + b * size, size, y), y_RD
            )
            row, left = row + blocks * size, left - blocks * size
        return y_RD

    rows = varying(jnp.zeros((tokens * choices + sizes[-1], x_TD.shape[1]), jnp.float32))
    rows = jax.lax.fori_loop(0, jnp.sum(groups.size > 0), one_expert, rows)
    has_expert_TX = valid_T[:, None] & (routing.experts_TX < num_experts)
    y_TXD = rows[jnp.where(has_expert_TX, groups.row_of_pair.reshape(tokens, choices), 0)]
    return jnp.sum(jnp.where(has_expert_TX[:, :, None], y_TXD * routing.weights_TX[:, :, None], 0), axis=1)


def _block_sizes(pairs: int, num_experts: int) -> tuple[int, ...]:
    """Rows of a block, large sizes first: large ones use the matrix units best, small ones waste little on a rest."""
    mean = max(pairs // num_experts, 1)
    smallest = min(max(1 << (mean // 2).bit_length(), 8), 64)
    return (512, smallest) if mean >= 512 else (smallest,)
