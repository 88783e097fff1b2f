"""gpt-oss in Flax NNX, as the shards that one device of the mesh holds.

Parameters are declared with their global shapes. Those of layers lead with the stage axis, split over `pp` and
replicated over `ring` and `ulysses`, and the repeat axis: a stage runs its unit of layers several times, with the
weights of repeat r in the r-th time, so that programs do not grow with the number of layers. Expert parallelism splits
the experts of a layer over `ulysses`, tensor parallelism the heads and the width of every expert: an axis of those is
then the parts of all ranks, one after the other. Embedding and unembedding are split over all devices. The modules are
called inside `shard_map`, where the stage axis has been taken off.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jax.typing import DTypeLike

from slope_jax.mesh.axes import AXES, PP, SEQUENCE_AXES, ULYSSES, mesh_shape, where_needed
from slope_jax.model.config import GptOssConfig
from slope_jax.model.numerics import dot, rms_norm
from slope_jax.model.ops import mxfp4
from slope_jax.model.ops.experts import xla
from slope_jax.model.parallel.expert_parallel import expert_parallel_mlp
from slope_jax.model.parallel.tensor_split import TensorSplit
from slope_jax.model.params import kernel, param
from slope_jax.model.stage_plan import StagePlan
from slope_jax.model.storage import from_bits

Stack = tuple[int, int]  # pipeline stages, repeats of the unit of layers
Spec = tuple[str | None, ...]  # the mesh axis of each leading axis of a parameter

REPLICATED_EXPERTS: Spec = (PP, None, None)
SPLIT_EXPERTS: Spec = (PP, None, ULYSSES)


class Attention(nnx.Module):
    """The projections, norm and sinks of an attention block; q, k and v share one kernel, heads in that order."""

    def __init__(self, config: GptOssConfig, stack: Stack, dtype: DTypeLike, split: TensorSplit):
        self.split = split
        self.config = c = split.share(config)
        D, H = c.hidden_size, c.head_dim
        N, C = split.ranks * c.num_heads, split.ranks * (c.num_heads + 2 * c.num_kv_heads)
        self.norm = param((*stack, D), jnp.float32, PP)
        self.qkv_kernel = kernel((*stack, D, C * H), dtype, PP, None, None, split.axis)
        self.qkv_bias = param((*stack, C * H), jnp.float32, PP, None, split.axis)
        self.sinks = param((*stack, N), jnp.float32, PP, None, split.axis)
        self.out_kernel = kernel((*stack, N * H, D), dtype, PP, None, split.axis)
        self.out_bias = param((*stack, D), jnp.float32, PP)

    def project_in(self, x_TD: jax.Array, repeat: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Queries `[T, N, H]`, keys and values `[T, K, H]` of the residual stream, float32, before RoPE."""
        c = self.config
        t_TD = rms_norm(x_TD, self.norm[...][repeat], c.rms_norm_eps)
        c_TCH = (dot(t_TD, from_bits(self.qkv_kernel[...][repeat])) + self.qkv_bias[...][repeat]).reshape(
            x_TD.shape[0], -1, c.head_dim
        )
        q, k, v = jnp.split(c_TCH, [c.num_heads, c.num_heads + c.num_kv_heads], axis=1)
        return q, k, v

    def project_out(self, out_TC: jax.Array, repeat: jax.Array, needed: jax.Array) -> jax.Array:
        """What the block adds to the residual stream, from the heads' outputs `[T, N * H]`; float32.

        It means nothing where it is not needed.
        """
        product = where_needed(needed, lambda: dot(out_TC, from_bits(self.out_kernel[...][repeat])))
        return self.split.add_up(product, out_TC.dtype) + self.out_bias[...][repeat]


class Experts(nnx.Module):
    """Expert weights ready for use; the first F columns of `gate_up` are the gates, the last F the ups."""

    def __init__(self, config: GptOssConfig, stack: Stack, dtype: DTypeLike, spec: Spec, split: TensorSplit):
        E, D = config.num_experts, config.hidden_size
        F = split.ranks * split.share(config).intermediate_size
        self.gate_up = kernel((*stack, E, D, 2 * F), dtype, *spec, None, split.axis)
        self.gate_up_bias = param((*stack, E, 2 * F), jnp.float32, *spec, split.axis)
        self.down = kernel((*stack, E, F, D), dtype, *spec, split.axis)
        self.down_bias = param((*stack, E, D), jnp.float32, *spec)

    def read(self, repeat: jax.Array, expert: jax.Array, dtype: DTypeLike) -> xla.Weights:
        """The kernels of one expert: gate_up `[D, 2F]` and down `[F, D]`."""
        del dtype  # the weights have been stored in it
        return from_bits(self.gate_up[...][repeat, expert]), from_bits(self.down[...][repeat, expert])


class PackedExperts(nnx.Module):
    """Expert weights in MXFP4, as in the checkpoint but for the gate rows, which stand before the up rows."""

    def __init__(self, config: GptOssConfig, stack: Stack, spec: Spec, split: TensorSplit):
        E, D = config.num_experts, config.hidden_size
        F = split.ranks * split.share(config).intermediate_size
        in_blocks, out_blocks, half = D // mxfp4.BLOCK, F // mxfp4.BLOCK, mxfp4.BLOCK // 2
        self.gate_up_blocks = param((*stack, E, 2 * F, in_blocks, half), jnp.uint8, *spec, split.axis)
        self.gate_up_scales = param((*stack, E, 2 * F, in_blocks), jnp.uint8, *spec, split.axis)
        self.gate_up_bias = param((*stack, E, 2 * F), jnp.float32, *spec, split.axis)
        self.down_blocks = param((*stack, E, D, out_blocks, half), jnp.uint8, *spec, None, split.axis)
        self.down_scales = param((*stack, E, D, out_blocks), jnp.uint8, *spec, None, split.axis)
        self.down_bias = param((*stack, E, D), jnp.float32, *spec)

    def read(self, repeat: jax.Array, expert: jax.Array, dtype: DTypeLike) -> xla.Weights:
        """The kernels of one expert, unpacked: gate_up `[D, 2F]` and down `[F, D]`."""
        gate_up = mxfp4.unpack(
            self.gate_up_blocks[...][repeat, expert], self.gate_up_scales[...][repeat, expert], dtype
        )
        down = mxfp4.unpack(self.down_blocks[...][repeat, expert], self.down_scales[...][repeat, expert], dtype)
        return gate_up.T, down.T


class MixtureOfExperts(nnx.Module):
    """The norm, router and experts of a mixture-of-experts block."""

    def __init__(
        self,
        config: GptOssConfig,
        stack: Stack,
        dtype: DTypeLike,
        packed: bool,
        expert_parallel: bool,
        split: TensorSplit,
    ):
        self.config = split.share(config)
        self.split = split
        self.expert_parallel = expert_parallel
        D, E = config.hidden_size, config.num_experts
        self.norm = param((*stack, D), jnp.float32, PP)
        self.router_kernel = kernel((*stack, D, E), dtype, PP)
        self.router_bias = param((*stack, E), jnp.float32, PP)
        spec = SPLIT_EXPERTS if expert_parallel else REPLICATED_EXPERTS
        self.experts = (
            PackedExperts(config, stack, spec, split) if packed else Experts(config, stack, dtype, spec, split)
        )

    def __call__(self, x_TD: jax.Array, valid_T: jax.Array, repeat: jax.Array) -> tuple[jax.Array, jax.Array]:
        """What the block adds to the residual stream of the valid tokens, float32; and the rounds of its exchange."""
        kernel = from_bits(self.router_kernel[...][repeat])
        t_TD = rms_norm(x_TD, self.norm[...][repeat], self.config.rms_norm_eps).astype(kernel.dtype)
        routing = xla.route(dot(t_TD, kernel) + self.router_bias[...][repeat], self.config.experts_per_token)
        experts = self.experts

        def read(expert: jax.Array) -> xla.Weights:
            return experts.read(repeat, expert, kernel.dtype)

        biases = experts.gate_up_bias[...][repeat], self.split.once(experts.down_bias[...][repeat])
        if self.expert_parallel:
            return expert_parallel_mlp(t_TD, routing, valid_T, self.config, read, *biases)
        mlp = functools.partial(xla.grouped_mlp, t_TD, routing, valid_T, self.config, read, *biases)
        y_TD = where_needed(jnp.any(valid_T), mlp)
        return self.split.add_up(y_TD, kernel.dtype), jnp.zeros((), jnp.int32)


class DecoderLayer(nnx.Module):
    """One slot of the unit, in every stage and repeat."""

    def __init__(
        self,
        config: GptOssConfig,
        stack: Stack,
        dtype: DTypeLike,
        packed: bool,
        expert_parallel: bool,
        split: TensorSplit,
    ):
        self.split = split
        self.attention = Attention(config, stack, dtype, split)
        self.moe = MixtureOfExperts(config, stack, dtype, packed, expert_parallel, split)


class GptOss(nnx.Module):
    """The whole model.

    The embedding is split by columns and the unembedding by rows of the vocabulary, each padded with zeros to a
    multiple of the number of devices.
    """

    def __init__(
        self,
        config: GptOssConfig,
        plan: StagePlan,
        devices: int,
        dtype: DTypeLike,
        packed: bool,
        expert_parallel: bool = False,
        split: TensorSplit = TensorSplit(),  # noqa: B008 - frozen
    ):
        V, D = config.vocab_size, config.hidden_size
        self.config, self.split = config, split
        self.embedding = kernel((V, _round_up(D, devices)), dtype, None, AXES)
        stack = (len(plan.layers), plan.repeats)
        layer = functools.partial(DecoderLayer, config, stack, dtype, packed, expert_parallel, split)
        self.layers = nnx.List([layer() for _ in plan.unit])
        self.final_norm = param((D,), jnp.float32)
        self.unembedding = param((_round_up(V, devices), D), dtype, AXES)

    def embed(self, ids_RWU: jax.Array) -> jax.Array:
        """The embeddings of this device's tokens, float32 `[T, D]`.

        Every device looks up all tokens of the chunk in its columns; the columns then go to the tokens' devices, and in
        tensor parallelism the tokens of these to all ulysses ranks.

        Args:
          ids_RWU: the ids of a chunk by ring rank, row and ulysses rank, the same on all devices.
        """
        ring, rows, ulysses = ids_RWU.shape
        columns = self.embedding[...][ids_RWU.transpose(0, 2, 1).reshape(ring * ulysses, rows)]
        mine = jax.lax.all_to_all(columns, SEQUENCE_AXES, split_axis=0, concat_axis=2, tiled=True)
        x_TD = jax.lax.all_gather(mine[0], PP, axis=1, tiled=True)[:, : self.config.hidden_size]
        if self.split.ranks > 1:
            x_TD = jax.lax.all_gather(x_TD, ULYSSES, axis=1).reshape(-1, x_TD.shape[1])
        return from_bits(x_TD).astype(jnp.float32)

    def unembed(self, x_D: jax.Array) -> jax.Array:
        """The logits of this device's rows of the vocabulary, float32, for one token of the residual stream."""
        return dot(rms_norm(x_D, self.final_norm[...], self.config.rms_norm_eps), self.unembedding[...].T)


def abstract_model(
    config: GptOssConfig,
    plan: StagePlan,
    mesh: Mesh,
    dtype: DTypeLike,
    packed: bool,
    expert_parallel: bool = False,
    split: TensorSplit = TensorSplit(),  # noqa: B008 - frozen
) -> tuple[nnx.GraphDef[GptOss], nnx.State]:
    """The graph definition of a model and its state, whose leaves are `jax.ShapeDtypeStruct`s with shardings.

    With a single ulysses rank, `expert_parallel` changes nothing.

    Raises:
      ValueError: the experts, or the layers, cannot be split over the ulysses axis, or both are to be.
    """
    shape = mesh_shape(mesh)
    split.check(shape.ulysses, expert_parallel)
    if expert_parallel:
        shape.check_experts(config.num_experts)
    split_experts = expert_parallel and shape.ulysses > 1
    with jax.set_mesh(mesh):
        model = nnx.eval_shape(lambda: GptOss(config, plan, shape.num_devices, dtype, packed, split_experts, split))
    graph, state = nnx.split(model)

    def on_mesh(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        sharding = jax.NamedSharding(mesh, leaf.sharding.spec)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    return graph, jax.tree.map(on_mesh, state)


def _round_up(value: int, multiple: int) -> int:
    return math.ceil(value / multiple) * multiple
