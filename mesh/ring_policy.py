"""Which of the two goes round the ring in a tick: keys and values (pass-KV) or queries (pass-Q); arXiv 2411.01783.

A hop is one exchange with the next rank, and either way there are ring - 1 of them. In pass-KV a hop carries a rank's
keys and values, in pass-Q its queries, and for each hop a partial result in float32 goes home to the rank of its
queries. So pass-Q moves less when a prompt has many more keys in the cache than the chunk has queries. What is moved
while the devices compute costs no time, which the choice takes into account where it knows the machine.
"""

from __future__ import annotations

import dataclasses

KV, Q, AUTO = "kv", "q", "auto"
RING_PASSES = (AUTO, KV, Q)

_FLOAT32 = _INT32 = 4  # bytes
_HEADER = 2 * _INT32  # how many of the queries there are, and where the gap between their segments is


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HopCosts:
    """What a token slot costs in a hop of a full-attention layer, on one device.

    Attributes:
      kv_bytes: of the keys, the values and the position of a key slot.
      query_bytes: of the queries and the position of a query slot.
      result_bytes: of the partial result of a query slot: maximum, sum and weighted values of each head.
      pair_operations: floating-point operations of a query slot with a key slot.
    """

    kv_bytes: int
    query_bytes: int
    result_bytes: int
    pair_operations: int

    @staticmethod
    def of(*, num_heads: int, num_kv_heads: int, head_dim: int, ulysses: int, itemsize: int) -> HopCosts:
        """The costs in a model's heads, split over `ulysses` ranks, with `itemsize` bytes in a value of q, k and v."""
        heads, kv_heads = num_heads // ulysses, max(num_kv_heads // ulysses, 1)
        return HopCosts(
            kv_bytes=2 * kv_heads * head_dim * itemsize + _INT32,
            query_bytes=heads * head_dim * itemsize + _INT32,
            result_bytes=heads * (head_dim + 2) * _FLOAT32,
            pair_operations=4 * heads * head_dim,
        )

    def kv_hop_bytes(self, keys: int) -> int:
        """Bytes that a device sends in a hop of pass-KV with `keys` key slots on each rank."""
        return keys * self.kv_bytes

    def q_hop_bytes(self, queries: int) -> int:
        """Bytes that a device sends for a hop of pass-Q with `queries` query slots on each rank, results included."""
        return queries * (self.query_bytes + self.result_bytes) + _HEADER


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """How fast the devices of a ring are.

    Attributes:
      attention_flops: floating-point operations per second of attention on a device.
      link_bandwidth: bytes per second that a device sends to the next rank of the ring.

    Raises:
      ValueError: a number is not positive.
    """

    attention_flops: float
    link_bandwidth: float

    def __post_init__(self) -> None:
        for name in ("attention_flops", "link_bandwidth"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, not {getattr(self, name)!r}")


def choose_pass(queries: int, keys: int, costs: HopCosts, machine: Machine | None = None) -> str:
    """`KV` or `Q`, whichever keeps the devices waiting for fewer bytes; `KV` when they are equal.

    During the attention of one hop the link carries some bytes for nothing. Beyond them,

    * pass-KV waits for keys and values: for none if it is hidden (equation 2 of the paper);
    * pass-Q waits for queries (none by equation 3) and for partial results, which are there only after the attention.

    The comparison of the two is algorithm 5 of the paper, equation 5, in bytes. Without a machine nothing is hidden,
    and it is the comparison of all bytes moved. Equation 1 compares the queries alone: with 64 query and 8 KV heads
    they are smaller than the KV where less than 1/4 of the tokens are new. Partial results in float32, of queries in
    bfloat16, make it 1/12.

    Args:
      queries: query slots of a rank, new tokens.
      keys: key slots of a rank, those of the new tokens and of all tokens before them.
      costs: of a slot.
      machine: the speed of the devices, where it is known.
    """
    hidden = 0.0
    if machine is not None:
        attention_s = queries * keys * costs.pair_operations / machine.attention_flops
        hidden = attention_s * machine.link_bandwidth
    wait_for_kv = max(keys * costs.kv_bytes - hidden, 0)
    wait_for_q = max(queries * costs.query_bytes - hidden, 0) + queries * costs.result_bytes
    return Q if wait_for_q < wait_for_kv else KV


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PassRule:
    """What decides in every tick.

    Attributes:
      ring_pass: `KV` or `Q` to pass always the same, `AUTO` for what `choose_pass` says.
      costs: of a slot.
      machine: the speed of the devices, where it is known.
    """

    ring_pass: str
    costs: HopCosts
    machine: Machine | None = None

    def __call__(self, queries: int, keys: int) -> str:
        """`KV` or `Q` for a tick in which every rank has so many query slots and key slots (see `choose_pass`)."""
        if self.ring_pass != AUTO:
            return self.ring_pass
        return choose_pass(queries, keys, self.costs, self.machine)
