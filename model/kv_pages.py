"""Keys, values and positions in pages: writing a chunk's slots and reading them back block by block.

A request's slots on a ring rank are numbered 0, 1, ... in position order over all its chunks; slot s is row s % page of
page `page_table[s // page]`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from slope_jax.mesh.layout import PAD_POSITION, ChunkView

Layer = tuple[int | jax.Array, ...]  # index of a layer's pages among the leading axes of an array of pages


def write_slots(pages: jax.Array, layer: Layer, rows: jax.Array, chunk: ChunkView, count: jax.Array) -> jax.Array:
    """Writes a chunk's first `count` rows behind the slots that earlier chunks left; touches nothing else.

    Args:
      pages: `[..., pages, page, ...]`.
      layer: which pages to write.
      rows: `[slots, ...]`.
      chunk: gives the page table and the number of earlier slots.
      count: how many rows to write.
    """
    page = pages.shape[len(layer) + 1]
    padded = jnp.pad(rows, [(page, page)] + [(0, 0)] * (rows.ndim - 1))
    first_page = chunk.cached // page
    end = chunk.cached + count

    def write_page(i: jax.Array, pages: jax.Array) -> jax.Array:
        first_slot = i * page
        slots = (first_slot + jnp.arange(page)).reshape(-1, *[1] * (rows.ndim - 1))
        new = jax.lax.dynamic_slice_in_dim(padded, first_slot - chunk.cached + page, page)
        where = (*layer, chunk.page_table[i])
        mine = (slots >= chunk.cached) & (slots < end)
        return pages.at[where].set(jnp.where(mine, new, pages[where]))

    last_page = jnp.where(count > 0, (end - 1) // page + 1, first_page)
    return jax.lax.fori_loop(first_page, last_page, write_page, pages)


def read_block(
    pages: jax.Array,
    layer: Layer,
    position_pages: jax.Array,
    chunk: ChunkView,
    count: jax.Array,
    block: jax.Array,
    size: int,
) -> tuple[jax.Array, jax.Array]:
    """Reads slots `[block * size, (block + 1) * size)` of a request.

    Args:
      pages: keys and values, `[..., pages, page, J, H]`.
      layer: which pages to read.
      position_pages: `[pages, page]`.
      chunk: gives the page table.
      count: how many slots the request has.
      block: which block.
      size: slots in a block, a multiple of the page.

    Returns:
      Keys and values `[J, size, H]`, and positions `[size]`, `PAD_POSITION` beyond the request's slots.
    """
    num_pages, page = position_pages.shape
    per_block = size // page
    table = jnp.pad(chunk.page_table, (0, per_block))
    ids = jax.lax.dynamic_slice_in_dim(table, block * per_block, per_block)
    ids = jnp.clip(ids, 0, num_pages - 1)  # unused entries of the table hold no page
    kv = pages[(*layer, ids)].reshape(size, *pages.shape[-2:]).swapaxes(0, 1)
    slots = block * size + jnp.arange(size)
    return kv, jnp.where(slots < count, position_pages[ids].reshape(size), PAD_POSITION)
