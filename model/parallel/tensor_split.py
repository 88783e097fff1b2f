"""Tensor parallelism: the weights of a layer divided over the ulysses ranks (Megatron-LM, arXiv 1909.08053).

A rank is then a model with fewer heads and narrower experts, which sees all tokens of its ring rank; what attention and
experts add to the residual stream is the sum over the ranks.

    context parallelism    tokens divided, weights whole       heads exchanged before and after attention
    tensor parallelism     weights divided, tokens whole       two sums a layer

The experts' width is divided in whole blocks of MXFP4. Where these do not divide evenly, as the 90 blocks of gpt-oss
over 4 or 8 ranks, all ranks get as many as the fullest and the last ones are filled up with zeros, which give zeros.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from slope_jax.mesh import all_reduce
from slope_jax.mesh.axes import ULYSSES
from slope_jax.model.config import GptOssConfig
from slope_jax.model.ops.mxfp4 import BLOCK
from slope_jax.model.storage import from_bits, to_bits


class Part(NamedTuple):
    """The places of a tensor, along one of its axes, that belong to a rank; `stop` may lie beyond its end."""

    axis: int
    start: int
    stop: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TensorSplit:
    """Over how many ranks of the ulysses axis layers are divided: over one, or over all of them.

    Attributes:
      ranks: how many; 1 leaves weights whole.
      form: of the all-reduce, one of `all_reduce.FORMS`.

    Raises:
      ValueError: there is no such form.
    """

    ranks: int = 1
    form: str = all_reduce.PSUM

    def __post_init__(self) -> None:
        all_reduce.check_form(self.form)

    @classmethod
    def of(cls, ulysses: int, form: str | None) -> TensorSplit:
        """The split over `ulysses` ranks with an all-reduce of a form; with None, or over one rank, none."""
        if form is not None:
            all_reduce.check_form(form)
        return cls() if form is None or ulysses == 1 else cls(ranks=ulysses, form=form)

    def check(self, ulysses: int, expert_parallel: bool) -> None:
        """Raises ValueError when layers cannot be divided so on a mesh."""
        if self.ranks not in (1, ulysses):
            raise ValueError(f"tensor parallelism over {self.ranks} ranks needs as many of {ulysses=}")
        if self.ranks > 1 and expert_parallel:
            raise ValueError("tensor parallelism and expert parallelism both divide the experts; choose one of them")

    @property
    def axis(self) -> str | None:
        """The mesh axis that weights are divided over."""
        return ULYSSES if self.ranks > 1 else None

    def share(self, config: GptOssConfig) -> GptOssConfig:
        """The model that one rank is."""
        if self.ranks == 1:
            return config
        blocks = -(-config.intermediate_size // BLOCK)
        return dataclasses.replace(
            config,
            num_heads=config.num_heads // self.ranks,
            num_kv_heads=max(config.num_kv_heads // self.ranks, 1),
            intermediate_size=-(-blocks // self.ranks) * BLOCK,
        )

    def add_up(self, x_TD: jax.Array, dtype: DTypeLike) -> jax.Array:
        """The sum over the ranks, float32, of what each adds to the residual stream; it travels in `dtype`."""
        if self.ranks == 1:
            return x_TD

        def unpack(bits: jax.Array) -> jax.Array:
            return from_bits(bits).astype(jnp.float32)

        return all_reduce.all_reduce(x_TD, ULYSSES, self.form, lambda x: to_bits(x.astype(dtype)), unpack)

    def once(self, bias: jax.Array) -> jax.Array:
        """A term of a sum over the ranks that must be added once: zeros on all ranks but the first."""
        return bias if self.ranks == 1 else jnp.where(jax.lax.axis_index(ULYSSES) == 0, bias, 0)

    def part(self, tensor: str, config: GptOssConfig, rank: int) -> Part | None:
        """What a rank has of a tensor of a layer, given by the end of its name; None if it has all of it.

        Above the number of KV heads, several ranks have the same one.
        """
        if self.ranks == 1 or tensor not in _DIVIDED:
            return None
        axis, kind = _DIVIDED[tensor]
        mine, H = self.share(config), config.head_dim
        # The size of a part, and how many parts lie before it.
        size, before = {
            "heads": (mine.num_heads, rank),
            "queries": (mine.num_heads * H, rank),
            "keys": (mine.num_kv_heads * H, rank * config.num_kv_heads // self.ranks // mine.num_kv_heads),
            "gates and ups": (2 * mine.intermediate_size, rank),
            "width": (mine.intermediate_size, rank),
            "blocks": (mine.intermediate_size // BLOCK, rank),
        }[kind]
        return Part(axis, before * size, (before + 1) * size)


# The axis of each tensor that is divided, and what lies along it.
_DIVIDED = {
    "self_attn.q_proj.weight": (0, "queries"),
    "self_attn.k_proj.weight": (0, "keys"),
    "self_attn.v_proj.weight": (0, "keys"),
    "self_attn.q_proj.bias": (0, "queries"),
    "self_attn.k_proj.bias": (0, "keys"),
    "self_attn.v_proj.bias": (0, "keys"),
    "self_attn.sinks": (0, "heads"),
    "self_attn.o_proj.weight": (1, "queries"),
    "mlp.experts.gate_up_proj_bias": (1, "gates and ups"),
    "mlp.experts.gate_up_proj_blocks": (1, "gates and ups"),
    "mlp.experts.gate_up_proj_scales": (1, "gates and ups"),
    "mlp.experts.gate_up_proj": (2, "gates and ups"),
    "mlp.experts.down_proj_blocks": (2, "blocks"),
    "mlp.experts.down_proj_scales": (2, "blocks"),
    "mlp.experts.down_proj": (1, "width"),
}
