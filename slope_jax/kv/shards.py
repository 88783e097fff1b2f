"""The KV of a finished prompt on the host: each process keeps its devices' part, layers are put together on demand."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from numpy.typing import NDArray

from slope_jax.kv.files import LayerKV
from slope_jax.mesh.axes import PER_DEVICE, PP, mesh_shape
from slope_jax.mesh.layout import prompt_positions
from slope_jax.mesh.processes import distributed
from slope_jax.model.config import FULL, GptOssConfig
from slope_jax.model.stage_plan import StagePlan

Coordinates = tuple[int, int, int]  # of a device on the mesh
Gather = Callable[[jax.Array, jax.Array], jax.Array]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PromptParts:
    """This process's part of a prompt's KV.

    Attributes:
      pages: keys and values as `bits`, per device groups `[full slots of the unit, repeats, pages, page, J, H]`.
      tails: likewise `[window slots of the unit, repeats, window, J, H]`, one array per device.
      num_tokens: of the prompt.
      chunk_tokens: the longest chunk, by which the tokens were laid out.
    """

    pages: dict[Coordinates, list[NDArray[Any]]]
    tails: dict[Coordinates, NDArray[Any]]
    num_tokens: int
    chunk_tokens: int


def local_parts(array: jax.Array) -> dict[Coordinates, NDArray[Any]]:
    """The shards on this process's devices of an array that leads with the mesh axes, by mesh coordinates."""
    return {
        tuple(s.start or 0 for s in shard.index[:3]): np.asarray(shard.data)[0, 0, 0]  # type: ignore[misc]
        for shard in array.addressable_shards
    }


def make_gather(mesh: Mesh) -> Gather:
    """Builds the program that gives every process the parts of one stage, `[ring, ulysses, ...]`.

    It takes an array that leads with the mesh axes, and the stage.
    """

    def device_gather(part: jax.Array, stage: jax.Array) -> jax.Array:
        mine = jax.lax.axis_index(PP) == stage
        return jax.lax.psum(jnp.where(mine, part[0], 0), PP)

    sharded = jax.shard_map(device_gather, mesh=mesh, in_specs=(PER_DEVICE, P()), out_specs=P(*PER_DEVICE[1:]))
    return jax.jit(sharded, out_shardings=jax.NamedSharding(mesh, P()))


def gather_rows(
    rows: dict[Coordinates, NDArray[Any]], stage: int, mesh: Mesh, gather: Gather, slots: int
) -> NDArray[Any]:
    """The rows of one stage from all processes, `[ring, ulysses, rows, J, H]`; every process must call it.

    Args:
      rows: up to `slots` rows of each of this process's devices, as many on all.
      stage: whose rows to gather.
      mesh: the mesh.
      gather: the program that `make_gather` built.
      slots: rows are filled up to this number, so that no length of a prompt compiles anything.
    """
    part = next(iter(rows.values()))

    def device_rows(index: Any) -> NDArray[Any]:
        mine = rows[tuple(s.start or 0 for s in index[:3])]  # type: ignore[index]
        return np.pad(mine, [(0, slots - len(mine))] + [(0, 0)] * (mine.ndim - 1))[None, None, None]

    shape = (*mesh.devices.shape, slots, *part.shape[1:])
    array = jax.make_array_from_callback(shape, jax.NamedSharding(mesh, PER_DEVICE), device_rows)
    everywhere = jax.NamedSharding(mesh, P())
    stage_array = jax.make_array_from_callback((), everywhere, lambda _: np.asarray(stage, np.int32))
    return np.asarray(gather(array, stage_array))[:, :, : len(part)]


def _joined(groups: list[NDArray[Any]], index: tuple[int, int]) -> NDArray[Any]:
    """The token slots `[slots, J, H]` of one layer."""
    parts = [group[index].reshape(-1, *group.shape[4:]) for group in groups]
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


class PromptKVReader:
    """Puts the layers of a prompt together from the parts on all devices.

    Calling it with a layer's global index returns `(start, keys, values)`; in a run of several processes all of them
    must call it for the same layers in the same order.
    """

    def __init__(
        self,
        parts: PromptParts,
        request_id: str,
        config: GptOssConfig,
        plan: StagePlan,
        mesh: Mesh,
        gather: Gather,
        group_slots: int,
    ):
        self._parts, self._request_id, self._num_tokens = parts, request_id, parts.num_tokens
        self._config, self._plan, self._mesh = config, plan, mesh
        self._gather, self._group_slots = gather, group_slots

    @functools.cached_property
    def _positions(self) -> list[NDArray[np.int32]]:
        """Per ring rank, the positions of its slots in order; computed when they are first needed."""
        ring, window = mesh_shape(self._mesh).ring, self._config.sliding_window
        return prompt_positions(self._num_tokens, self._parts.chunk_tokens, ring, window)

    def __call__(self, layer: int) -> LayerKV:
        """One layer, in token order."""
        distributed.agree("PrefillKV.layer", {"layer": f"{layer} of request {self._request_id}"})
        stage, repeat, slot = self._plan.location(layer)
        kind = self._plan.unit[slot]
        index = self._plan.unit[:slot].count(kind), repeat
        if kind == FULL:
            slots = max(map(len, self._positions))
            rows = {where: _joined(groups, index)[:slots] for where, groups in self._parts.pages.items()}
            return self._assemble(self._stage_rows(rows, stage), self._positions, 0)
        rows = {where: part[index] for where, part in self._parts.tails.items()}
        start = max(self._num_tokens - self._config.sliding_window, 0)
        span = np.arange(self._num_tokens - self._config.sliding_window, self._num_tokens)
        # The tails of all ring ranks but the first are not those of the prompt's end.
        tails = {where: part for where, part in self._stage_rows(rows, stage).items() if where[0] == 0}
        return self._assemble(tails, [span], start)

    def _assemble(
        self, rows: dict[tuple[int, int], NDArray[Any]], positions: list[NDArray[Any]], start: int
    ) -> LayerKV:
        """Sets rows `[slots, J, H]` by (ring, ulysses) rank in token order."""
        kv_heads, ulysses = self._config.num_kv_heads, mesh_shape(self._mesh).ulysses
        dtype = next(iter(rows.values())).dtype
        kv = np.zeros((2, self._num_tokens - start, kv_heads, self._config.head_dim), dtype)
        for (ring, rank), part in rows.items():
            heads = part.shape[1] // 2
            first = rank * kv_heads // ulysses
            held = positions[ring] >= 0
            at = positions[ring][held] - start
            for half in (0, 1):
                kv[half, at, first : first + heads] = part[: len(held), half * heads : (half + 1) * heads][held]
        if kv.dtype == np.uint16:
            kv = kv.view(ml_dtypes.bfloat16)
        return start, kv[0], kv[1]

    def _stage_rows(self, rows: dict[Coordinates, NDArray[Any]], stage: int) -> dict[tuple[int, int], NDArray[Any]]:
        """The rows of one stage, of all processes, by (ring, ulysses) rank."""
        if jax.process_count() == 1:
            return {(ring, ulysses): part for (pp, ring, ulysses), part in rows.items() if pp == stage}
        shape, size = mesh_shape(self._mesh), next(iter(rows.values())).shape[0]
        step = self._group_slots
        groups = [
            gather_rows({w: p[a : a + step] for w, p in rows.items()}, stage, self._mesh, self._gather, step)
            for a in range(0, size, step)
        ]
        whole = np.concatenate(groups, axis=2)
        return {(r, u): whole[r, u] for r in range(shape.ring) for u in range(shape.ulysses)}
