"""The tick programs of an engine, from sizes alone.

`Engine` compiles them for the arrays of a checkpoint; `audit` compiles the same for shapes, and needs no checkpoint.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from slope_jax.execution.tick import EngineState, make_tick
from slope_jax.kv.pool import CacheShape, cache_shape, empty_cache
from slope_jax.mesh import ring_policy
from slope_jax.mesh.all_reduce import PSUM, check_form
from slope_jax.mesh.axes import PER_DEVICE, PP, RING, MeshShape
from slope_jax.mesh.layout import length_buckets, packed_length
from slope_jax.mesh.ring_policy import HopCosts, PassRule
from slope_jax.model.config import GptOssConfig
from slope_jax.model.counts.cost import Traffic, tick_traffic
from slope_jax.model.gpt_oss import GptOss, abstract_model
from slope_jax.model.parallel.tensor_split import TensorSplit
from slope_jax.model.stage import StageSpec
from slope_jax.model.stage_plan import StagePlan, plan_stages

DTYPES = {"bfloat16": jnp.bfloat16, "float32": jnp.float32}
EXPERT_WEIGHTS = ("bfloat16", "mxfp4")


def stages_on(config: GptOssConfig, shape: MeshShape, *, expert_parallel: bool) -> StagePlan:
    """The layers of each pipeline stage of a mesh that suits a model.

    Raises:
      ValueError: the heads, the layers or the experts cannot be divided so.
    """
    shape.check_heads(config.num_heads, config.num_kv_heads)
    if expert_parallel:
        shape.check_experts(config.num_experts)
    return plan_stages(config.layer_types, shape.pp)


def default_block_q(config: GptOssConfig, shape: MeshShape) -> int:
    """Query slots of a block of attention such that it has 1,024 rows with all its heads."""
    group = config.num_heads // max(config.num_kv_heads, shape.ulysses)
    return max(1024 // group, 16)


def all_reduce_form(*, tensor_parallel: bool, expert_parallel: bool, all_reduce: str | None) -> str | None:
    """The form of the all-reduce of tensor parallelism, None without it.

    Raises:
      ValueError: there is no such form, or the three do not go together.
    """
    for name, value in (("tensor_parallel", tensor_parallel), ("expert_parallel", expert_parallel)):
        if not isinstance(value, bool):
            raise ValueError(f"{name} must be True or False, not {value!r}")
    if all_reduce is not None:
        check_form(all_reduce)
    if not tensor_parallel:
        if all_reduce is not None:
            raise ValueError(f"{all_reduce=} is of no use without tensor_parallel")
        return None
    if expert_parallel:
        raise ValueError("tensor_parallel and expert_parallel both divide the experts; choose one of them")
    return all_reduce or PSUM


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TickPrograms:
    """The static sizes of an engine's ticks.

    Attributes:
      config: the model.
      plan: the layers of each pipeline stage.
      shape: the mesh.
      dtype: "bfloat16" or "float32".
      packed_experts: whether the kernels of experts stay in MXFP4.
      expert_parallel: whether the experts are split over the ulysses axis, which must have several ranks then.
      split: over how many ulysses ranks the layers are.
      chunk_tokens: the longest chunk.
      kv_cache_tokens: tokens that the KV cache holds.
      cache: the sizes of the KV cache.
      buckets: tokens that chunks are padded to; there is a program for each.
      block_q: query slots in a block of attention.
      block_kv: keys in a block of attention, a power of two.
      pass_rule: what goes round the ring in a tick.
    """

    config: GptOssConfig
    plan: StagePlan
    shape: MeshShape
    dtype: str
    packed_experts: bool
    expert_parallel: bool
    split: TensorSplit
    chunk_tokens: int
    kv_cache_tokens: int
    cache: CacheShape
    buckets: tuple[int, ...]
    block_q: int
    block_kv: int
    pass_rule: PassRule

    @classmethod
    def of(
        cls,
        config: GptOssConfig,
        plan: StagePlan,
        shape: MeshShape,
        *,
        dtype: str,
        packed_experts: bool,
        expert_parallel: bool,
        all_reduce: str | None = None,
        chunk_tokens: int,
        kv_cache_tokens: int,
        block_q: int | None,
        block_kv: int,
        page_tokens: int,
        ring_pass: str,
        machine: ring_policy.Machine | None = None,
    ) -> TickPrograms:
        """The sizes that an engine with these arguments has (see `Engine.load`).

        `all_reduce` is the form that tensor parallelism takes (see `all_reduce_form`).
        """
        chunk_tokens = min(chunk_tokens, config.max_position, kv_cache_tokens)
        if shape.ring == 1 and ring_pass == ring_policy.AUTO:
            ring_pass = ring_policy.KV  # nothing is passed, so there is nothing to choose
        costs = HopCosts.of(
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            ulysses=shape.ulysses,
            itemsize=jnp.dtype(DTYPES[dtype]).itemsize,
        )
        return cls(
            config=config,
            plan=plan,
            shape=shape,
            dtype=dtype,
            packed_experts=packed_experts,
            expert_parallel=expert_parallel and shape.ulysses > 1,
            split=TensorSplit.of(shape.ulysses, all_reduce),
            chunk_tokens=chunk_tokens,
            kv_cache_tokens=kv_cache_tokens,
            cache=cache_shape(
                config, shape, kv_cache_tokens=kv_cache_tokens, chunk_tokens=chunk_tokens, page=page_tokens
            ),
            buckets=length_buckets(chunk_tokens, shape, config.sliding_window),
            block_q=default_block_q(config, shape) if block_q is None else block_q,
            block_kv=block_kv,
            pass_rule=PassRule(ring_pass=ring_pass, costs=costs, machine=machine),
        )

    def abstract_model(self, mesh: Mesh) -> tuple[nnx.GraphDef[GptOss], nnx.State]:
        """The graph of the model, and the shapes of its state (see `gpt_oss.abstract_model`)."""
        return abstract_model(
            self.config, self.plan, mesh, DTYPES[self.dtype], self.packed_experts, self.expert_parallel, self.split
        )

    @property
    def sequence_ranks(self) -> int:
        """Over how many ulysses ranks the tokens of a ring rank are spread: 1 if each of them has all."""
        return self.shape.ulysses // self.split.ranks

    def rows(self, bucket: int) -> int:
        """Tokens whose residual stream a device holds."""
        return bucket // (self.shape.ring * self.sequence_ranks)

    def bucket_of(self, tokens: int) -> int:
        """The bucket of a chunk of `tokens` tokens."""
        return next(b for b in self.buckets if b >= tokens)

    def stage_spec(self, bucket: int) -> StageSpec:
        """The static parameters of the stages in the program of a bucket."""
        slots, page = bucket // self.shape.ring, self.cache.page
        # A rank of a ring holds two segments. A block that spans both is masked for most queries, so it should be no
        # longer than one of them.
        segment = slots if self.shape.ring == 1 else -(-slots // 2)
        block_kv = min(self.block_kv, max(1 << (segment - 1).bit_length(), page))
        unit = max(page, block_kv)
        return StageSpec(
            unit=self.plan.unit,
            ring_block=-(-slots // unit) * unit,
            block_q=min(self.block_q, slots),
            block_kv=block_kv,
            ring_pass=self.pass_rule.ring_pass,
        )

    def ring_rounds(self, bucket: int, keys: int) -> tuple[str, int]:
        """What goes round the ring in a tick, "kv" or "q", and in how many rounds KV goes: none when queries go.

        Args:
          bucket: of the tick.
          keys: KV slots on the fullest ring rank, those of the chunk included.
        """
        ring_block = self.stage_spec(bucket).ring_block
        rounds = -(-keys // ring_block)
        ring_pass = self.pass_rule(bucket // self.shape.ring, rounds * ring_block)
        return ring_pass, 0 if ring_pass == ring_policy.Q else rounds

    def traffic(self, bucket: int, ring_pass: str, rounds: int) -> Traffic:
        """What a device sends in a tick, by formula (see `cost.tick_traffic`)."""
        return tick_traffic(
            self.config,
            self.plan,
            self.shape,
            DTYPES[self.dtype],
            bucket=bucket,
            ring_block=self.stage_spec(bucket).ring_block,
            rounds=rounds,
            ring_pass=ring_pass,
            expert_parallel=self.expert_parallel,
            split=self.split,
        )

    def empty_state(self) -> EngineState:
        """The state before the first tick, of zeros."""
        lead = (self.shape.pp, self.shape.ring, self.shape.ulysses)
        hidden = jnp.zeros((*lead, self.rows(self.buckets[-1]), self.config.hidden_size), jnp.float32)
        return EngineState(hidden, empty_cache(self.config, self.plan, self.shape, self.cache, DTYPES[self.dtype]))

    def packed_shape(self, bucket: int) -> tuple[int, int, int]:
        """The shape of the packed chunks of a tick."""
        return self.shape.pp, self.shape.ring, packed_length(bucket // self.shape.ring, self.cache.table)

    def lower(self, bucket: int, mesh: Mesh, graph: nnx.GraphDef[GptOss], params: nnx.State) -> jax.stages.Lowered:
        """The program of a bucket, ready to compile.

        Args:
          bucket: one of the buckets.
          mesh: of the shape that the sizes are for.
          graph: of the model.
          params: its state; arrays, or their shapes with shardings.
        """
        specs = jax.tree.map(lambda a: a.sharding.spec, params)
        tick = make_tick(graph, specs, self.config, self.plan, mesh, self.stage_spec(bucket), bucket)
        return tick.lower(
            params,
            _sharded(jax.eval_shape(self.empty_state), mesh, PER_DEVICE),
            _sharded(jax.ShapeDtypeStruct(self.packed_shape(bucket), jnp.int32), mesh, P(PP, RING)),
            _sharded(jax.ShapeDtypeStruct((1 + bucket,), jnp.int32), mesh, P()),
        )


def _sharded(shapes: Any, mesh: Mesh, spec: P) -> Any:
    sharding = jax.NamedSharding(mesh, spec)
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding), shapes)
