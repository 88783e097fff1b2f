"""The layers of a pipeline stage on one chunk: attention with its cache, then experts, layer by layer."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp

from slope_jax.mesh import halo, ring, ulysses
from slope_jax.mesh.axes import ULYSSES
from slope_jax.mesh.layout import PAD_POSITION, ChunkView
from slope_jax.model import attention, kv_pages, rope
from slope_jax.model.attention import AttentionSpec, Partial, QueryBlocks
from slope_jax.model.config import FULL, GptOssConfig
from slope_jax.model.gpt_oss import DecoderLayer


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StageSpec:
    """Static parameters of a stage's program.

    Attributes:
      pattern: the layer kind of each slot.
      ring_block: KV slots that a rank sends in one round of the ring; a multiple of the page and of `block_kv`.
      block_q: query slots in an attention block.
      block_kv: keys in an attention block.
    """

    pattern: tuple[str, ...]
    ring_block: int
    block_q: int
    block_kv: int

    def attention(self, window: int | None) -> AttentionSpec:
        """The parameters of an attention call."""
        return AttentionSpec(block_q=self.block_q, block_kv=self.block_kv, window=window)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StageCache:
    """What a device keeps of the requests between ticks.

    Attributes:
      positions: positions of the cached keys, `[pages, page]`, one for all layers.
      pages: keys and values of each full-attention slot, `[pages, page, J, H]`.
      tails: keys and values of the last `window` tokens for each window slot, `[request slots, window, J, H]`.
    """

    positions: jax.Array
    pages: tuple[jax.Array, ...]
    tails: tuple[jax.Array, ...]


def run_stage(
    layers: list[DecoderLayer],
    active: jax.Array,
    x_TD: jax.Array,
    chunk: ChunkView,
    num_blocks: jax.Array,
    cache: StageCache,
    config: GptOssConfig,
    spec: StageSpec,
) -> tuple[jax.Array, StageCache, jax.Array]:
    """Runs the layers of this device's stage.

    Args:
      layers: the parameters of the pattern's slots.
      active: which slots hold a layer in this stage; an empty one lets activations through.
      x_TD: the residual stream of the device's tokens, float32.
      chunk: the chunk.
      num_blocks: rounds of the ring, the same number on every device of the mesh.
      cache: the caches before the chunk.
      config: the model's hyperparameters.
      spec: the static parameters.

    Returns:
      The residual stream after the stage, the caches with the chunk in them, and the number of attention block products.
    """
    ranks = jax.lax.axis_size(ULYSSES)
    rank = jax.lax.axis_index(ULYSSES)
    angles = rope.rotation(config, chunk.local_rows(chunk.positions_T, ranks, rank))
    valid_T = chunk.local_rows(chunk.valid_T(), ranks, rank)
    cache = dataclasses.replace(
        cache, positions=kv_pages.write_slots(cache.positions, chunk.positions_T, chunk, chunk.num_tokens)
    )
    pages, tails = list(cache.pages), list(cache.tails)
    full_slot = window_slot = 0
    work = jnp.zeros((), jnp.int32)
    for slot, (kind, layer) in enumerate(zip(spec.pattern, layers, strict=True)):
        # An empty slot sees a chunk without tokens, so its loops, which run to the number of tokens, do not run.
        seen = dataclasses.replace(chunk, num_tokens=jnp.where(active[slot], chunk.num_tokens, 0))
        seen = dataclasses.replace(seen, split=jnp.minimum(seen.split, seen.num_tokens))
        q_TNH, kv_TJH = _project_in(layer, x_TD, angles)
        if kind == FULL:
            with jax.named_scope("full_attention"):
                pages[full_slot] = kv_pages.write_slots(pages[full_slot], kv_TJH, seen, seen.num_tokens)
                partial = _full_attention(
                    layer, q_TNH, seen, num_blocks, pages[full_slot], cache.positions, spec, config
                )
            full_slot += 1
        else:
            with jax.named_scope("window_attention"):
                partial, tails[window_slot] = _window_attention(layer, q_TNH, kv_TJH, seen, tails[window_slot], spec, config)
            window_slot += 1
        out_TNH = attention.finish_partial(partial, q_TNH.shape[0]).astype(kv_TJH.dtype)
        change_TD = layer.attention.project_out(ulysses.gather_heads(out_TNH))
        x_TD = jnp.where(active[slot], x_TD + change_TD, x_TD)
        with jax.named_scope("experts"):
            x_TD = x_TD + layer.moe(x_TD, valid_T & active[slot])
        work = work + partial.blocks
    return x_TD, StageCache(cache.positions, tuple(pages), tuple(tails)), work


def _project_in(
    layer: DecoderLayer, x_TD: jax.Array, angles: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    with jax.named_scope("project_in"):
        q_TNH, k_TKH, v_TKH = layer.attention.project_in(x_TD)
        dtype = layer.attention.qkv_kernel[...].dtype
        scale = attention.LOG2_E / math.sqrt(q_TNH.shape[-1])
        q_TNH, k_TKH = rope.rotate(q_TNH, *angles) * scale, rope.rotate(k_TKH, *angles)
        return ulysses.scatter_heads(*(x.astype(dtype) for x in (q_TNH, k_TKH, v_TKH)))


def _queries(q_TNH: jax.Array, chunk: ChunkView, kv_heads: int, spec: StageSpec) -> tuple[jax.Array, jax.Array]:
    """Queries by KV head and their positions, with a block of padding so that no block is cut short."""
    tokens, _, head_dim = q_TNH.shape
    q_KTGH = q_TNH.reshape(tokens, kv_heads, -1, head_dim).swapaxes(0, 1)
    positions_T = jnp.pad(chunk.positions_T, (0, spec.block_q), constant_values=PAD_POSITION)
    return jnp.pad(q_KTGH, [(0, 0), (0, spec.block_q), (0, 0), (0, 0)]), positions_T


def _sinks(layer: DecoderLayer, heads: int) -> jax.Array:
    """The sinks of the query heads that Ulysses gives this device."""
    return jax.lax.dynamic_slice_in_dim(layer.attention.sinks[...], jax.lax.axis_index(ULYSSES) * heads, heads)


def _full_attention(
    layer: DecoderLayer,
    q_TNH: jax.Array,
    chunk: ChunkView,
    num_blocks: jax.Array,
    pages: jax.Array,
    positions: jax.Array,
    spec: StageSpec,
    config: GptOssConfig,
) -> Partial:
    tokens, heads, head_dim = q_TNH.shape
    kv_heads = pages.shape[2] // 2
    blocks = QueryBlocks.of(chunk, spec.block_q)
    q_KTGH, positions_T = _queries(q_TNH, chunk, kv_heads, spec)
    call = spec.attention(None)
    count = chunk.cached + chunk.num_tokens
    return ring.ring_scan(
        lambda partial, kv: attention.attend(partial, q_KTGH, positions_T, blocks, *kv, call),
        lambda b: kv_pages.read_block(pages, positions, chunk, count, b, spec.ring_block),
        num_blocks,
        attention.start_partial(_sinks(layer, heads), tokens, kv_heads, head_dim, call),
    )


def _window_attention(
    layer: DecoderLayer,
    q_TNH: jax.Array,
    kv_TJH: jax.Array,
    chunk: ChunkView,
    tails: jax.Array,
    spec: StageSpec,
    config: GptOssConfig,
) -> tuple[Partial, jax.Array]:
    tokens, heads, head_dim = q_TNH.shape
    kv_heads = kv_TJH.shape[1] // 2
    call = spec.attention(config.sliding_window)
    tail = tails[chunk.slot]
    band = halo.window_band(kv_TJH, tail, chunk, spec.block_kv)
    q_KTGH, positions_T = _queries(q_TNH, chunk, kv_heads, spec)
    partial = attention.attend(
        attention.start_partial(_sinks(layer, heads), tokens, kv_heads, head_dim, call),
        q_KTGH,
        positions_T,
        QueryBlocks.of(chunk, spec.block_q),
        band.kv_SJH.swapaxes(0, 1),
        band.positions_S,
        call,
    )
    new_tail = halo.band_tail(band, chunk, config.sliding_window)
    return partial, tails.at[chunk.slot].set(jnp.where(chunk.num_tokens > 0, new_tail, tail))
