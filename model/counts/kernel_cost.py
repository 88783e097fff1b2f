"""What kernels do beside the operations that `cost` counts: bytes of elementwise steps, and rows that fill up tiles."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jax.typing import DTypeLike

from slope_jax.model.config import GptOssConfig

_FLOAT32 = 4  # bytes


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ElementwiseBytes:
    """Bytes of a token in memory that a layer reads and writes outside of its matrix products and of attention.

    Attributes:
      residual: norms and sums of the residual stream, and what goes to the experts and comes back.
      heads: biases and rotary embedding of queries, keys and values.
      experts: activations between the two products of the experts.
    """

    residual: int
    heads: int
    experts: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.residual + self.heads + self.experts


def elementwise_bytes(config: GptOssConfig, dtype: DTypeLike) -> ElementwiseBytes:
    """What a token costs in the memory of a device in a layer whose operations are fused no further than usual.

    A step reads its operands and writes its result once: the norm before attention and the one before the experts; the
    rotation; the sum after attention; the router's scores; the copy of the token for each of its experts, unless there
    is but one expert; the product with gates and ups, which is written, and read by the activation; the products with
    down, which are written, and read by the weighted sum that enters the residual stream.
    """
    c, itemsize = config, jnp.dtype(dtype).itemsize
    norm = c.hidden_size * (_FLOAT32 + itemsize)
    total = 3 * c.hidden_size * _FLOAT32
    router = 2 * c.num_experts * _FLOAT32
    copies = 2 * c.experts_per_token * c.hidden_size * itemsize if c.num_experts > 1 else 0
    down = (2 * c.experts_per_token + 2) * c.hidden_size * _FLOAT32
    return ElementwiseBytes(
        residual=2 * norm + total + router + copies + down,
        heads=2 * (c.num_heads + 2 * c.num_kv_heads) * c.head_dim * itemsize,
        experts=5 * c.experts_per_token * c.intermediate_size * itemsize,
    )


def grouped_rows(pairs: float, experts: int, tile: int) -> float:
    """Rows that a grouped product works on, those that fill up the last tile of each expert included.

    The last tile of an expert is half full, on the average; one with fewer rows than a tile takes one tile.

    Args:
      pairs: (token, expert) pairs.
      experts: among which they are spread evenly, by chance.
      tile: rows that are worked on together.
    """
    if experts == 1:
        return -(-pairs // tile) * tile
    used = used_experts(pairs, experts)
    return max(used * tile, pairs + used * tile / 2)


def used_experts(pairs: float, experts: int) -> float:
    """How many of the experts have a row, on the average, when pairs are spread evenly by chance."""
    return experts * (1 - (1 - 1 / experts) ** pairs) if experts > 1 else min(pairs, 1.0)
