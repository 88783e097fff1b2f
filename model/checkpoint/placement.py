"""How host data becomes the shards of a sharded array, in pieces and without a copy of a shard on the host."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Sharding

from slope_jax.model.storage import to_bits, value_dtype

Index: TypeAlias = tuple[tuple[int, int], ...]  # (start, stop) of a shard along each axis of the global array
Make: TypeAlias = Callable[..., jax.Array]  # makes a piece of a parameter from parts of tensors, while tracing


def local_shards(shape: tuple[int, ...], sharding: Sharding) -> dict[Index, list[jax.Device]]:
    """The distinct shards of an array that this process holds, each with the devices that hold it."""
    shards: dict[Index, list[jax.Device]] = {}
    for device, slices in sharding.addressable_devices_indices_map(shape).items():
        bounds = (s.indices(n)[:2] for s, n in zip(slices or (), shape, strict=True))
        shards.setdefault(tuple(bounds), []).append(device)
    return shards


def assemble(shape: tuple[int, ...], dtype: Any, sharding: Sharding, shards: dict[Index, jax.Array]) -> jax.Array:
    """The global array whose local shards, each on some device of this process, are `shards`.

    Replicas are copies; on CPU, where all devices are in one memory, they are views of the same buffer.
    """
    arrays = []
    for index, devices in local_shards(shape, sharding).items():
        shard = shards[index]
        on_cpu = devices[0].platform == "cpu"
        # device_put takes an aligned, read-only NumPy view as it is, but copies from one CPU device to another.
        arrays += [jax.device_put(np.asarray(shard) if on_cpu else shard, device) for device in devices]
    return jax.make_array_from_single_device_arrays(shape, sharding, arrays, dtype=dtype)


class ShardBuilder:
    """A shard that is filled along one axis, piece by piece, on one of its devices."""

    def __init__(self, index: Index, dtype: Any, devices: Sequence[jax.Device], axis: int):
        """Starts with zeros.

        Args:
          index: the place of the shard in the global array, which gives its shape.
          dtype: of the shard.
          devices: those that hold it.
          axis: the axis to fill; places that no piece is written to stay zeros.
        """
        shape = tuple(stop - start for start, stop in index)
        self._buffer = jnp.zeros(shape, dtype, device=_home(devices))
        self._axis = axis
        self._filled = 0

    def append(self, parts: Sequence[np.ndarray], make: Make, at: tuple[int, ...] | None = None) -> None:
        """Writes `make(*parts, dtype=)` behind all that is there, or at a place along the axes up to the filled one.

        The axes of that piece are those of the shard from the filled one on; the first is as long as the parts' first,
        the others are as long as the shard's.

        Raises:
          ValueError: the piece does not fit.
        """
        place = np.array([0] * self._axis + [self._filled] if at is None else at, np.int32)
        self._buffer = _append(self._buffer, tuple(parts), place, make=make, axis=self._axis)
        self._filled += parts[0].shape[0]
        # Without this the parts of all pieces could be waiting for their transfer at the same time.
        self._buffer.block_until_ready()

    def finish(self, expected: int) -> jax.Array:
        """The shard, after a check that `expected` places of the axis were filled.

        Raises:
          ValueError: another number of places was filled.
        """
        if self._filled != expected:
            raise ValueError(f"a shard of shape {self._buffer.shape} was filled to {self._filled} of {expected}")
        return self._buffer


@functools.partial(jax.jit, static_argnames=("make", "axis"), donate_argnames="buffer")
def _append(buffer: jax.Array, parts: tuple[jax.Array, ...], place: jax.Array, *, make: Make, axis: int) -> jax.Array:
    piece = make(*parts, dtype=value_dtype(buffer.dtype))
    piece = to_bits(piece) if buffer.dtype == jnp.uint16 else piece
    fits = piece.dtype == buffer.dtype and piece.shape == (*parts[0].shape[:1], *buffer.shape[axis + 1 :])
    if not fits or piece.shape[0] > buffer.shape[axis]:
        raise ValueError(f"a piece {piece.dtype}{piece.shape} does not fit a shard {buffer.dtype}{buffer.shape}")
    starts = [*place, *[0] * (piece.ndim - 1)]
    return lax.dynamic_update_slice(buffer, piece.reshape((1,) * axis + piece.shape), starts)


def _home(devices: Sequence[jax.Device]) -> jax.Device:
    """Where to build a shard: on CPU on one device for all, so that each program is compiled once for all of them."""
    return jax.local_devices(backend="cpu")[0] if devices[0].platform == "cpu" else devices[0]
