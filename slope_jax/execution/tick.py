"""The tick: one compiled program that runs one chunk in every pipeline stage and moves activations a stage on.

    tick t        stage 0: chunk c      stage 1: chunk c-1    stage 2: chunk c-2
                        |  ppermute along pp |                     |
    tick t+1      stage 0: chunk c+1    stage 1: chunk c      stage 2: chunk c-1

Each stage has its own chunk, of whichever request; an idle stage has a chunk without tokens.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from slope_jax.mesh.axes import AXES, PER_DEVICE, PP, RING, SEQUENCE_AXES, ULYSSES
from slope_jax.mesh.layout import ChunkView
from slope_jax.model.config import GptOssConfig
from slope_jax.model.gpt_oss import DecoderLayer, GptOss
from slope_jax.model.stage import StageCache, StageSpec, StageWork, run_stage
from slope_jax.model.stage_plan import StagePlan


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class EngineState:
    """Everything on the devices that changes from tick to tick; each array leads with the axes of the mesh.

    Attributes:
      hidden: residual stream that enters each stage next, float32 `[P, ring, ulysses, rows, D]`.
      cache: the caches of the stages.
    """

    hidden: jax.Array
    cache: StageCache


def make_tick(
    graph: nnx.GraphDef[GptOss],
    model_specs: nnx.State,
    config: GptOssConfig,
    plan: StagePlan,
    mesh: Mesh,
    spec: StageSpec,
    tokens: int,
) -> jax.stages.Wrapped:
    """Builds the tick for chunks of up to `tokens` tokens.

    The function takes the model's state, the engine's state (donated), the packed chunks int32 `[P, ring, ...]` (see
    `layout.pack_chunk`) and int32 `[1 + tokens]`: the rounds in which KV goes round the ring (0: queries go), then the
    ids of the chunk that enters stage 0 by ring rank and slot. It returns the new state, the logits float32
    `[V padded]` after the last token of the chunk in the last stage, and what each device did, as `[P, ring, ulysses]`.
    """
    ring, ulysses = mesh.shape[RING], mesh.shape[ULYSSES]
    filled = np.array([[layer is not None for layer in stage] for stage in plan.layers])
    filled = filled.reshape(len(plan.layers), plan.repeats, len(plan.unit))

    def device_tick(
        params: nnx.State, state: EngineState, packed: jax.Array, incoming: jax.Array
    ) -> tuple[EngineState, jax.Array, StageWork]:
        model = nnx.merge(graph, params)
        stage = jax.lax.axis_index(PP)
        ranks = ulysses // model.split.ranks
        rows = tokens // (ring * ranks)
        chunk = ChunkView.unpack(packed[0, 0], tokens // ring)
        local = jax.tree.map(lambda a: a[0, 0, 0], state)
        with jax.named_scope("embed"):
            embedded = model.embed(incoming[1:].reshape(ring, -1, ulysses))
        valid = chunk.local_rows(chunk.valid_T(), ranks)
        # Padding starts as zeros and stays finite, whatever the embedding of its id.
        x = jnp.where(stage == 0, jnp.where(valid[:, None], embedded, 0), local.hidden[:rows])
        x, cache, work = run_stage(
            [_stage_layer(layer) for layer in model.layers],
            jnp.asarray(filled)[stage],
            x,
            chunk,
            incoming[0],
            local.cache,
            config,
            spec,
        )
        with jax.named_scope("unembed"):
            logits = model.unembed(_last_token(x, chunk, ranks, len(plan.layers) - 1))
        stages = len(plan.layers)
        with jax.named_scope("hand_off"):
            moved = jax.lax.ppermute(x, PP, [(s, s + 1) for s in range(stages - 1)])
        hidden = local.hidden.at[:rows].set(moved)
        new_state = jax.tree.map(lambda a: a[None, None, None], EngineState(hidden, cache))
        return new_state, logits, jax.tree.map(lambda a: a[None, None, None], work)

    sharded = jax.shard_map(
        device_tick,
        mesh=mesh,
        in_specs=(model_specs, PER_DEVICE, P(PP, RING), P()),
        out_specs=(PER_DEVICE, P(AXES), PER_DEVICE),
    )
    everywhere = jax.NamedSharding(mesh, P())
    state_sharding = jax.NamedSharding(mesh, PER_DEVICE)
    return jax.jit(sharded, donate_argnums=1, out_shardings=(state_sharding, everywhere, everywhere))


def _stage_layer(layer: DecoderLayer) -> DecoderLayer:
    """A slot of the unit without the stage axis, of which a device holds one entry."""
    graph, params = nnx.split(layer)
    return nnx.merge(graph, jax.tree.map(lambda a: a[0], params))


def _last_token(x_TD: jax.Array, chunk: ChunkView, ranks: int, last_stage: int) -> jax.Array:
    """The residual stream of the last token of the last stage's chunk, on every device.

    The layout keeps the last token of every chunk on ring rank 0; where several devices hold it, the first is asked.
    """
    slot = jnp.maximum(chunk.num_tokens - 1, 0)
    holder = (
        (jax.lax.axis_index(PP) == last_stage)
        & (jax.lax.axis_index(RING) == 0)
        & (jax.lax.axis_index(ULYSSES) == slot % ranks)
    )
    row = jax.lax.dynamic_index_in_dim(x_TD, slot // ranks, keepdims=False)
    return jax.lax.psum(jnp.where(holder, row, 0), (PP, *SEQUENCE_AXES))
