"""The layers of a pipeline stage on one chunk: attention with its cache, then experts, layer by layer."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from slope_jax.mesh import halo, ring, ring_policy, ulysses
from slope_jax.mesh.axes import ULYSSES, varying, where_needed
from slope_jax.mesh.layout import PAD_POSITION, ChunkView, sequence_rank
from slope_jax.model import kv_pages, rope
from slope_jax.model.config import FULL, GptOssConfig
from slope_jax.model.gpt_oss import DecoderLayer
from slope_jax.model.ops.attention import xla
from slope_jax.model.ops.attention.xla import AttentionSpec, Partial, QueryBlocks
from slope_jax.model.storage import from_bits, to_bits


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StageSpec:
    """Static parameters of a stage's program.

    Attributes:
      unit: the layer kind of each slot of the unit that the stage repeats.
      ring_block: KV slots that a rank sends in one round of the ring; a multiple of the page and of `block_kv`.
      block_q: query slots in an attention block.
      block_kv: keys in an attention block of full layers.
      ring_pass: what goes round the ring, see `pass_choice`; `AUTO` when each tick says.
    """

    unit: tuple[str, ...]
    ring_block: int
    block_q: int
    block_kv: int
    ring_pass: str = ring_policy.KV

    def attention(self, window: int | None) -> AttentionSpec:
        """The parameters of an attention call."""
        return AttentionSpec(block_q=self.block_q, block_kv=self.block_kv, window=window)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StageCache:
    """What a device keeps of the requests between ticks.

    Attributes:
      positions: positions of the cached keys, `[pages, page]`, one for all layers.
      pages: keys and values of the full-attention slots of the unit, `[slots, repeats, pages, page, J, H]`.
      tails: keys and values of the last `window` tokens of each request, for the window slots of the unit,
        `[slots, repeats, requests, window, J, H]`.
    """

    positions: jax.Array
    pages: jax.Array
    tails: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StageWork:
    """What a stage did in a tick, counted on each device.

    Attributes:
      attention_blocks: products of a query block and a key block; in a window layer each query block has one.
      expert_rounds: rounds of the exchange of expert parallelism, of all layers together.
    """

    attention_blocks: jax.Array
    expert_rounds: jax.Array


def run_stage(
    layers: list[DecoderLayer],
    active: jax.Array,
    x_TD: jax.Array,
    chunk: ChunkView,
    rounds: jax.Array,
    cache: StageCache,
    config: GptOssConfig,
    spec: StageSpec,
) -> tuple[jax.Array, StageCache, StageWork]:
    """Runs the layers of this device's stage.

    Args:
      layers: the slots of the unit.
      active: `[repeats, slots]`, which slots hold a layer in this stage; an empty one lets activations through.
      x_TD: the residual stream of the device's tokens, float32.
      chunk: the chunk.
      rounds: rounds in which KV goes round the ring, the same number on every device of the mesh; 0: queries go.
      cache: the caches before the chunk.
      config: the model's hyperparameters.
      spec: the static parameters.

    Returns:
      The residual stream after the stage, the caches with the chunk in them, and what was done.
    """
    ranks = jax.lax.axis_size(ULYSSES) // layers[0].split.ranks
    angles = rope.rotation(config, chunk.local_rows(chunk.positions_T, ranks))
    valid_T = chunk.local_rows(chunk.valid_T(), ranks)
    positions = kv_pages.write_slots(cache.positions, (), chunk.positions_T, chunk, chunk.num_tokens)

    def run_unit(repeat: jax.Array, carry: tuple[Any, ...]) -> tuple[Any, ...]:
        x_TD, pages, tails, work = carry
        full = sliding = 0
        for slot, (kind, layer) in enumerate(zip(spec.unit, layers, strict=True)):
            # An empty slot sees a chunk without tokens, so its loops, which run to the number of tokens, do not run.
            is_layer = active[repeat, slot]
            num_tokens = jnp.where(is_layer, chunk.num_tokens, 0)
            seen = dataclasses.replace(chunk, num_tokens=num_tokens, split=jnp.minimum(chunk.split, num_tokens))
            with jax.named_scope(kind):
                q_TNH, kv_TJH = _project_in(layer, repeat, x_TD, angles, num_tokens > 0, ranks)
            sinks_N = _sinks(layer, repeat, q_TNH.shape[1], ranks)
            if kind == FULL:
                with jax.named_scope("full_attention"):
                    pages = kv_pages.write_slots(pages, (full, repeat), kv_TJH, seen, num_tokens)
                    read = functools.partial(_read_ring_block, pages, (full, repeat), positions, seen, spec)
                    partial = _full_attention(q_TNH, sinks_N, kv_TJH.shape[1] // 2, seen, rounds, read, spec)
                full += 1
            else:
                with jax.named_scope("window_attention"):
                    where = (sliding, repeat, chunk.slot)
                    partial, tail = _window_attention(q_TNH, sinks_N, kv_TJH, seen, tails[where], spec, config)
                    tails = tails.at[where].set(tail)
                sliding += 1
            out_TNH = xla.finish_partial(partial, q_TNH.shape[0]).astype(from_bits(q_TNH).dtype)
            with jax.named_scope(kind), jax.named_scope("project_out"):
                out_TC = from_bits(ulysses.gather_heads(to_bits(out_TNH), ranks))
                change_TD = layer.attention.project_out(out_TC, repeat, num_tokens > 0)
            x_TD = jnp.where(is_layer, x_TD + change_TD, x_TD)
            with jax.named_scope(kind), jax.named_scope("experts"):
                change_TD, exchanges = layer.moe(x_TD, valid_T & is_layer, repeat)
                x_TD = x_TD + change_TD
            work = StageWork(work.attention_blocks + partial.blocks, work.expert_rounds + exchanges)
        return x_TD, pages, tails, work

    nothing = varying(jnp.zeros((), jnp.int32))
    start = (x_TD, cache.pages, cache.tails, StageWork(nothing, nothing))
    x_TD, pages, tails, work = jax.lax.fori_loop(0, active.shape[0], run_unit, start)
    return x_TD, StageCache(positions, pages, tails), work


def _project_in(
    layer: DecoderLayer,
    repeat: jax.Array,
    x_TD: jax.Array,
    angles: tuple[jax.Array, jax.Array],
    needed: jax.Array,
    ranks: int,
) -> tuple[jax.Array, jax.Array]:
    def project() -> tuple[jax.Array, ...]:
        q_TNH, k_TKH, v_TKH = layer.attention.project_in(x_TD, repeat)
        dtype = from_bits(layer.attention.out_kernel[...][0]).dtype
        scale = 1 / math.sqrt(q_TNH.shape[-1])
        q_TNH, k_TKH = rope.rotate(q_TNH, *angles) * scale, rope.rotate(k_TKH, *angles)
        return tuple(to_bits(x.astype(dtype)) for x in (q_TNH, k_TKH, v_TKH))

    with jax.named_scope("project_in"):
        q, k, v = where_needed(needed, project)
        return ulysses.scatter_heads(q, k, v, ranks)


def _queries(q_TNH: jax.Array, chunk: ChunkView, kv_heads: int, spec: StageSpec) -> tuple[jax.Array, jax.Array]:
    """Queries by KV head and their positions, with a block of padding so that no block is cut short."""
    tokens, _, head_dim = q_TNH.shape
    q_KTGH = q_TNH.reshape(tokens, kv_heads, -1, head_dim).swapaxes(0, 1)
    positions_T = jnp.pad(chunk.positions_T, (0, spec.block_q), constant_values=PAD_POSITION)
    return jnp.pad(q_KTGH, [(0, 0), (0, spec.block_q), (0, 0), (0, 0)]), positions_T


def _sinks(layer: DecoderLayer, repeat: jax.Array, heads: int, ranks: int) -> jax.Array:
    """The sinks of the device's query heads."""
    first = sequence_rank(ranks) * heads
    return jax.lax.dynamic_slice_in_dim(layer.attention.sinks[...][repeat], first, heads)


def _read_ring_block(
    pages: jax.Array,
    layer: kv_pages.Layer,
    positions: jax.Array,
    chunk: ChunkView,
    spec: StageSpec,
    block: jax.Array,
) -> ring.KVBlock:
    count = chunk.cached + chunk.num_tokens
    return kv_pages.read_block(pages, layer, positions, chunk, count, block, spec.ring_block)


def _full_attention(
    q_TNH: jax.Array,
    sinks_N: jax.Array,
    kv_heads: int,
    chunk: ChunkView,
    rounds: jax.Array,
    read_block: Callable[[jax.Array], ring.KVBlock],
    spec: StageSpec,
) -> Partial:
    def pass_kv() -> Partial:
        return _pass_kv(q_TNH, sinks_N, kv_heads, chunk, rounds, read_block, spec)

    def pass_q() -> Partial:
        return _pass_q(q_TNH, sinks_N, kv_heads, chunk, read_block, spec)

    if spec.ring_pass == ring_policy.AUTO:
        # Both hold exchanges of the whole mesh, all of which takes the same branch.
        return jax.lax.cond(rounds == 0, pass_q, lambda: _without_padding(pass_kv(), q_TNH.shape[0]))
    return pass_q() if spec.ring_pass == ring_policy.Q else pass_kv()


def _pass_kv(
    q_TNH: jax.Array,
    sinks_N: jax.Array,
    kv_heads: int,
    chunk: ChunkView,
    rounds: jax.Array,
    read_block: Callable[[jax.Array], ring.KVBlock],
    spec: StageSpec,
) -> Partial:
    call = spec.attention(None)
    blocks = QueryBlocks.of(chunk, spec.block_q)
    q_KTGH, positions_T = _queries(q_TNH, chunk, kv_heads, spec)
    with jax.named_scope("pass_kv"):
        return ring.pass_kv(
            lambda partial, kv: xla.attend(partial, q_KTGH, positions_T, blocks, *kv, call),
            read_block,
            rounds,
            xla.start_partial(sinks_N, q_TNH.shape[0], kv_heads, q_TNH.shape[2], call),
        )


def _pass_q(
    q_TNH: jax.Array,
    sinks_N: jax.Array,
    kv_heads: int,
    chunk: ChunkView,
    read_block: Callable[[jax.Array], ring.KVBlock],
    spec: StageSpec,
) -> Partial:
    call = spec.attention(None)
    tokens = q_TNH.shape[0]
    num_blocks = -(-(chunk.cached + chunk.num_tokens) // spec.ring_block)

    def start(sinks_N: jax.Array) -> Partial:
        return xla.start_partial(sinks_N, tokens, kv_heads, q_TNH.shape[2], call)

    def visit(queries: tuple[jax.Array, jax.Array]) -> tuple[xla.Result, jax.Array]:
        q_TNH, slots = queries
        visitor = dataclasses.replace(chunk, num_tokens=slots[0], split=slots[1], positions_T=slots[2:])
        blocks = QueryBlocks.of(visitor, spec.block_q)
        q_KTGH, positions_T = _queries(q_TNH, visitor, kv_heads, spec)

        def attend(block: jax.Array, partial: Partial) -> Partial:
            return xla.attend(partial, q_KTGH, positions_T, blocks, *read_block(block), call)

        # The sink is counted where the queries are at home.
        partial = jax.lax.fori_loop(0, num_blocks, attend, start(jnp.full_like(sinks_N, -jnp.inf)))
        return _without_padding(partial, tokens)[:3], partial.blocks

    with jax.named_scope("pass_q"):
        slots = jnp.concatenate([jnp.stack([chunk.num_tokens, chunk.split]), chunk.positions_T])
        mine = _without_padding(start(sinks_N), tokens)[:3]
        result, work = ring.pass_q(visit, xla.merge, (q_TNH, slots), mine)
        return Partial(*result, work)


def _without_padding(partial: Partial, tokens: int) -> Partial:
    max_KTG, sum_KTG, out_KTGH, blocks = partial
    return Partial(max_KTG[:, :tokens], sum_KTG[:, :tokens], out_KTGH[:, :tokens], blocks)


def _window_attention(
    q_TNH: jax.Array,
    sinks_N: jax.Array,
    kv_TJH: jax.Array,
    chunk: ChunkView,
    tail_WJH: jax.Array,
    spec: StageSpec,
    config: GptOssConfig,
) -> tuple[Partial, jax.Array]:
    kv_heads = kv_TJH.shape[1] // 2
    call = spec.attention(config.sliding_window)
    band = halo.window_band(kv_TJH, tail_WJH, chunk, call.padding(kv_TJH.shape[0]))
    q_KTGH, positions_T = _queries(q_TNH, chunk, kv_heads, spec)
    partial = xla.attend(
        xla.start_partial(sinks_N, q_TNH.shape[0], kv_heads, q_TNH.shape[2], call),
        q_KTGH,
        positions_T,
        QueryBlocks.of(chunk, spec.block_q),
        band.kv_SJH.swapaxes(0, 1),
        band.positions_S,
        call,
    )
    new_tail = halo.band_tail(band, chunk, config.sliding_window)
    return partial, jnp.where(chunk.num_tokens > 0, new_tail, tail_WJH)
