"""Expert parallelism: each ulysses rank holds a part of the experts, and tokens travel to them and back.

A token is sent once to each rank that has experts of it, with the ids and weights of those, and comes back once, as the
weighted sum of what they gave, so it moves as seldom as it can. Buffers have a fixed size, with room for somewhat more
rows than balanced routing sends to a rank. What does not fit goes in further rounds, so that no token is dropped
whatever the routing:

    rows for rank 0:  t0 t3 t4 t6 | t7 t9 .  .      capacity 4: two rounds
    rows for rank 1:  t1 t2 t5 .  | .  .  .  .

The number of rounds is the largest that any device of the mesh needs, because exchanges inside a loop must run equally
often on all of them. Devices without tokens take part with empty buffers.

A round is not cut in parts of which one is computed while the next travels: each expert would get that many times fewer
rows at a time, and half-filled tiles and weights that are read again cost more than an exchange takes.

Partial sums are formed, and added up, in float32. Between devices they are float32 in a float32 model; in a bfloat16
model they are 16-bit fixed point (see `wire`), which is as short as bfloat16 and rounds far less.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from scipy.special import bdtr  # type: ignore[import-untyped]

from slope_jax.mesh.axes import AXES, ULYSSES, varying
from slope_jax.model.config import GptOssConfig
from slope_jax.model.ops.experts import xla
from slope_jax.model.parallel import wire

# What balanced routing sends, over the least possible; it decides how large buffers are. The larger they are, the more
# uneven routing may be before it takes a second round. Chance causes none once a rank is sent some hundred rows.
SENT_OVER_LEAST = 1.25


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeShape:
    """The sizes of the exchange of a layer, for one device.

    Attributes:
      tokens: tokens of the device.
      ranks: ranks that exchange; each is sent one buffer in a round, its own included.
      mean_rows: rows for each rank when every set of experts is equally likely.
      capacity: rows of a buffer.
      dispatch_words: 16-bit words of a row on its way to the experts.
      combine_words: 16-bit words of a row on its way back.
      row_bytes: bytes of the activations of a token in the compute dtype.
    """

    tokens: int
    ranks: int
    mean_rows: float
    capacity: int
    dispatch_words: int
    combine_words: int
    row_bytes: int

    @classmethod
    def of(cls, config: GptOssConfig, tokens: int, ranks: int, dtype: DTypeLike) -> ExchangeShape:
        """The exchange of `tokens` tokens per device among `ranks` ranks.

        A rank is needed by a token unless all of the token's experts are among those of the other ranks.
        """
        D, E, X = config.hidden_size, config.num_experts, config.experts_per_token
        mean_rows = tokens * (1 - math.comb(E - E // ranks, X) / math.comb(E, X))
        dtype = jnp.dtype(dtype)
        row_words = D * dtype.itemsize // 2
        dispatch_words = row_words + 3 * X  # an id and a float32 weight for each expert
        combine_words = row_words if dtype == jnp.float32 else wire.fixed_point_words(D)
        room = SENT_OVER_LEAST * 2 * row_words / (dispatch_words + combine_words)
        return cls(
            tokens=tokens,
            ranks=ranks,
            mean_rows=mean_rows,
            capacity=min(tokens, max(math.ceil(mean_rows), math.floor(room * mean_rows))),
            dispatch_words=dispatch_words,
            combine_words=combine_words,
            row_bytes=2 * row_words,
        )

    @property
    def dispatch_bytes(self) -> int:
        """Bytes of the buffers of a round on their way to the experts, the one that stays on the device included."""
        return self.ranks * self.capacity * self.dispatch_words * 2

    @property
    def combine_bytes(self) -> int:
        """Bytes of the buffers of a round on their way back, the one that stays on the device included."""
        return self.ranks * self.capacity * self.combine_words * 2

    def sent_bytes(self, rounds: int = 1) -> int:
        """Bytes that leave the device in a layer; balanced routing takes one round."""
        return rounds * (self.dispatch_bytes + self.combine_bytes) * (self.ranks - 1) // self.ranks

    def mean_rounds(self, devices: int, imbalance: float = 1.0) -> float:
        """Rounds of a layer, on the average, when the experts of each token are drawn by chance.

        All devices take as many rounds as the fullest buffer of any of them needs.

        Args:
          devices: of the whole mesh.
          imbalance: rows of the rank that is needed most, over those of the mean rank.
        """
        usual = self.mean_rows / self.tokens  # the chance that a token needs a rank
        rounds = 0.0
        for full in range(math.ceil(self.tokens / self.capacity)):
            few, most = bdtr(full * self.capacity, self.tokens, [usual, min(imbalance * usual, 1.0)])
            rounds += 1 - few ** (devices * (self.ranks - 1)) * most**devices
        return rounds

    @property
    def least_bytes(self) -> float:
        """Bytes of balanced routing in which each token goes once to each other rank that it needs, and comes back."""
        return 2 * (self.ranks - 1) * self.mean_rows * self.row_bytes


class _Queues(NamedTuple):
    """The rows that a device has for each rank, in the order of their tokens.

    Attributes:
      token: the token of each row, `[U, T * X]`-long queues end to end.
      start: where in `token` the queue of each rank starts.
      size: rows of each rank.
      rank_TX: the rank of each choice of expert.
      place_TX: where in the queue of its rank a token stands, -1 at all but the first choice of each rank.
    """

    token: jax.Array
    start: jax.Array
    size: jax.Array
    rank_TX: jax.Array
    place_TX: jax.Array


def expert_parallel_mlp(
    x_TD: jax.Array,
    routing: xla.Routing,
    valid_T: jax.Array,
    config: GptOssConfig,
    read_weights: Callable[[jax.Array], xla.Weights],
    gate_up_bias_EF: jax.Array,
    down_bias_ED: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """`xla.grouped_mlp` with the experts spread evenly over the ulysses ranks, in order.

    Args:
      x_TD: normalised input in the compute dtype.
      routing: the experts of each token, by their ids in the whole model.
      valid_T: which rows are tokens; nothing is sent for the others.
      config: the model's hyperparameters.
      read_weights: gives the weights of one of this rank's experts in the compute dtype.
      gate_up_bias_EF: of this rank's experts, float32 `[E / U, 2F]`, gates first.
      down_bias_ED: of this rank's experts, float32 `[E / U, D]`.

    Returns:
      The experts' output of every token, weighted and summed, float32 `[T, D]`; and the rounds that it took.
    """
    ranks, local_experts = jax.lax.axis_size(ULYSSES), gate_up_bias_EF.shape[0]
    tokens, width = x_TD.shape
    chex.assert_shape(routing, (tokens, config.experts_per_token))
    chex.assert_equal(local_experts * ranks, config.num_experts)
    shape = ExchangeShape.of(config, tokens, ranks, x_TD.dtype)
    capacity = shape.capacity
    queues = _queues(routing.experts_TX // local_experts, valid_T, ranks)
    rounds = jax.lax.pmax(varying(-(-jnp.max(queues.size) // capacity)), AXES)
    x_TW = wire.to_words(x_TD)

    def one_round(done: jax.Array, y_TD: jax.Array) -> jax.Array:
        first = done * capacity
        with jax.named_scope("dispatch"):
            sent = _rows_to_send(x_TW, routing, queues, first, capacity, local_experts)
            received = jax.lax.all_to_all(sent, ULYSSES, split_axis=0, concat_axis=0)
        x_RD, local = _unpack_rows(received.reshape(ranks * capacity, -1), width, x_TD.dtype)
        y_RD = xla.grouped_mlp(
            x_RD,
            local,
            jnp.ones(x_RD.shape[0], bool),
            config,
            read_weights,
            gate_up_bias_EF,
            down_bias_ED,
            expected_pairs=tokens * config.experts_per_token,
        )
        with jax.named_scope("combine"):
            packed = wire.to_words(y_RD) if x_TD.dtype == jnp.float32 else wire.to_fixed_point(y_RD)
            back = jax.lax.all_to_all(packed.reshape(ranks, capacity, -1), ULYSSES, split_axis=0, concat_axis=0)
            return y_TD + _sum_of_returned(back, queues, first, width, x_TD.dtype)

    y_TD = jax.lax.fori_loop(0, rounds, one_round, varying(jnp.zeros(x_TD.shape, jnp.float32)))
    return y_TD, rounds


def _queues(rank_TX: jax.Array, valid_T: jax.Array, ranks: int) -> _Queues:
    choices = rank_TX.shape[1]
    earlier = jnp.tril(jnp.ones((choices, choices), bool), -1)
    is_first_TX = ~jnp.any((rank_TX[:, :, None] == rank_TX[:, None, :]) & earlier, axis=2) & valid_T[:, None]
    groups = xla.group_by_expert(jnp.where(is_first_TX, rank_TX, ranks), valid_T, ranks)
    place_TX = groups.row_of_pair.reshape(rank_TX.shape) - groups.start[rank_TX]
    return _Queues(groups.order // choices, groups.start, groups.size, rank_TX, jnp.where(is_first_TX, place_TX, -1))


def _rows_to_send(
    x_TW: jax.Array, routing: xla.Routing, queues: _Queues, first: jax.Array, capacity: int, local_experts: int
) -> jax.Array:
    """The next rows for each rank: activations, ids of the experts on that rank, weights; `[U, capacity, words]`.

    `local_experts` is the id of no expert: it stands for experts of other ranks, and fills empty rows.
    """
    place_UC = (first + jnp.arange(capacity))[None]
    is_row_UC = place_UC < queues.size[:, None]
    token_UC = queues.token[jnp.where(is_row_UC, queues.start[:, None] + place_UC, 0)]
    first_expert_U = jnp.arange(queues.size.shape[0], dtype=jnp.int32) * local_experts
    ids_UCX = routing.experts_TX[token_UC] - first_expert_U[:, None, None]
    is_here_UCX = is_row_UC[:, :, None] & (ids_UCX >= 0) & (ids_UCX < local_experts)
    ids_UCX = jnp.where(is_here_UCX, ids_UCX, local_experts).astype(jnp.uint16)
    return jnp.concatenate([x_TW[token_UC], ids_UCX, wire.to_words(routing.weights_TX[token_UC])], axis=-1)


def _unpack_rows(words_RW: jax.Array, width: int, dtype: DTypeLike) -> tuple[jax.Array, xla.Routing]:
    words = width * jnp.dtype(dtype).itemsize // 2
    choices = (words_RW.shape[1] - words) // 3
    x_RW, ids_RX, weights_RW = jnp.split(words_RW, [words, words + choices], axis=1)
    routing = xla.Routing(ids_RX.astype(jnp.int32), wire.from_words(weights_RW, jnp.float32))
    return wire.from_words(x_RW, dtype), routing


def _sum_of_returned(back_UCW: jax.Array, queues: _Queues, first: jax.Array, width: int, dtype: DTypeLike) -> jax.Array:
    """The sum of the rows of each token that came back in a round, float32 `[T, D]`."""
    _, capacity, words = back_UCW.shape
    back_RW = back_UCW.reshape(-1, words)
    place_TX = queues.place_TX - first
    is_back_TX = (queues.place_TX >= 0) & (place_TX >= 0) & (place_TX < capacity)
    row_TX = jnp.where(is_back_TX, queues.rank_TX * capacity + place_TX, 0)

    y_TD = jnp.zeros((row_TX.shape[0], width), jnp.float32)
    for x in range(row_TX.shape[1]):
        row_TW = back_RW[row_TX[:, x]]
        exact = dtype == jnp.float32
        row_TD = wire.from_words(row_TW, jnp.float32) if exact else wire.from_fixed_point(row_TW, width)
        y_TD += jnp.where(is_back_TX[:, x, None], row_TD, 0)
    return y_TD
