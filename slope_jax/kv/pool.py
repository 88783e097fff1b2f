"""The KV cache: its size, which request has which pages, and how a finished prompt's KV leaves the devices."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from slope_jax.mesh.axes import PER_DEVICE, RING, MeshShape
from slope_jax.mesh.layout import largest_share
from slope_jax.model.config import FULL, SLIDING, GptOssConfig
from slope_jax.model.stage import StageCache
from slope_jax.model.stage_plan import StagePlan
from slope_jax.model.storage import storage_dtype


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CacheShape:
    """Sizes of the cache of one device.

    Attributes:
      page: token slots of a page.
      pages: pages of a device.
      table: pages that one request can have on a device.
      requests: requests that can be under way at once.
    """

    page: int
    pages: int
    table: int
    requests: int


def requests_at_once(mesh: MeshShape) -> int:
    """Requests that can be under way at once: enough to keep every stage busy while finished requests drain."""
    return 2 * mesh.pp + 2


def cache_shape(
    config: GptOssConfig, mesh: MeshShape, *, kv_cache_tokens: int, chunk_tokens: int, page: int
) -> CacheShape:
    """The cache that holds any prompt of the model that has up to `kv_cache_tokens` tokens, or as many of several.

    What a ring rank holds of a prompt depends on its chunks: short chunks lie on few ranks (see `mesh.layout`).
    """
    longest = min(kv_cache_tokens, config.max_position)
    lengths = np.arange(1, longest + 1)
    chunks = -(-lengths // chunk_tokens)
    long_chunks = lengths % chunks  # this many are one token longer than the others
    share = long_chunks * largest_share(lengths // chunks + 1, mesh.ring, config.sliding_window)
    share += (chunks - long_chunks) * largest_share(lengths // chunks, mesh.ring, config.sliding_window)
    table = -(-int(share.max()) // page)
    pages = -(-table * kv_cache_tokens // longest)
    requests = requests_at_once(mesh)
    return CacheShape(page=page, pages=pages + requests, table=table, requests=requests)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HandOffCopies:
    """The most copies of finished requests' KV that a device can have at once, on their way to the host.

    Attributes:
      pages: pages, in all full layers.
      requests: requests, each with its window tails.
    """

    pages: int
    requests: int


def hand_off_copies(shape: CacheShape, group: int, chunk_slots: int, requests: int) -> HandOffCopies:
    """The copies of `requests` requests, each finished one tick after the one before.

    All but the first may have entered the cache only when the first had left it, and then have one chunk.

    Args:
      shape: the cache.
      group: a copy has whole groups of this many pages.
      chunk_slots: token slots of a chunk on a device.
      requests: how many.
    """
    longest = -(-shape.table // group) * group
    late = (requests - 1) * -(-chunk_slots // shape.page)
    pages = min(requests * longest, shape.pages + late + requests * group)
    return HandOffCopies(pages=pages, requests=requests)


def empty_cache(
    config: GptOssConfig, plan: StagePlan, mesh: MeshShape, shape: CacheShape, dtype: DTypeLike
) -> StageCache:
    """A cache of zeros, each array leading with the axes of the mesh; keys and values are kept as bits."""
    stored = storage_dtype(dtype)
    lead = (mesh.pp, mesh.ring, mesh.ulysses)
    combined = 2 * max(config.num_kv_heads // mesh.ulysses, 1)
    kv = (combined, config.head_dim)
    full, sliding = (plan.unit.count(kind) for kind in (FULL, SLIDING))
    return StageCache(
        positions=jnp.zeros((*lead, shape.pages, shape.page), jnp.int32),
        pages=jnp.zeros((*lead, full, plan.repeats, shape.pages, shape.page, *kv), stored),
        tails=jnp.zeros((*lead, sliding, plan.repeats, shape.requests, config.sliding_window, *kv), stored),
    )


class PageAllocator:
    """Which pages are free on each ring rank, and which request rows.

    Pages are numbered alike on all stages and ulysses ranks of a ring rank, since these hold the same tokens.
    """

    def __init__(self, shape: CacheShape, ring: int):
        self._shape = shape
        self._free_pages = [list(range(shape.pages - 1, -1, -1)) for _ in range(ring)]
        self._free_rows = list(range(shape.requests - 1, -1, -1))

    def allocate(self, tokens: np.ndarray) -> Allocation | None:
        """Room for `tokens[r]` tokens on each ring rank r, or None when there is not enough now."""
        counts = -(-tokens // self._shape.page)
        if not self._free_rows or any(n > len(f) for n, f in zip(counts, self._free_pages, strict=True)):
            return None
        table = np.full((len(counts), self._shape.table), -1, np.int32)
        for free, row, count in zip(self._free_pages, table, counts.tolist(), strict=True):
            row[:count] = free[len(free) - count :][::-1]
            del free[len(free) - count :]
        return Allocation(row=self._free_rows.pop(), page_table=table)

    def release(self, allocation: Allocation) -> None:
        """Gives the pages and the row back."""
        self._free_rows.append(allocation.row)
        for rank, pages in enumerate(allocation.page_table):
            self._free_pages[rank].extend(pages[pages >= 0][::-1].tolist())


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Allocation:
    """What a request occupies.

    Attributes:
      row: its row in the tables of window tails.
      page_table: int32 `[ring, table]`, its pages on each ring rank in order, then -1.
    """

    row: int
    page_table: np.ndarray


ReadPages = Callable[[StageCache, jax.Array, jax.Array], tuple[jax.Array, jax.Array]]


def make_read_pages(mesh: Mesh) -> ReadPages:
    """Builds the program that copies a request's KV out of the cache, on each device its own part.

    It takes the cache, page ids int32 `[ring, n]` and the request's row int32 `[]`, and returns the pages
    `[P, ring, ulysses, full slots, repeats, n, page, J, H]` and the tails
    `[P, ring, ulysses, window slots, repeats, window, J, H]`.
    """

    def device_read(cache: StageCache, ids: jax.Array, row: jax.Array) -> tuple[jax.Array, jax.Array]:
        ids = jnp.clip(ids[0], 0, cache.positions.shape[3] - 1)  # unused entries of a page table hold no page
        return cache.pages[:, :, :, :, :, ids], cache.tails[:, :, :, :, :, row]

    sharded = jax.shard_map(device_read, mesh=mesh, in_specs=(PER_DEVICE, P(RING), P()), out_specs=PER_DEVICE)
    return jax.jit(sharded)
