"""Times next to the machine's matmul peak, which is measured right before and right after what is timed.

Machines are shared, and clocks move: a time means something only as a ratio to what the same machine could do in the
same seconds. When the two peaks differ by more than a tenth, the machine changed meanwhile and the time is taken again.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from slope_jax.mesh.processes import distributed

T = TypeVar("T")

STEADY = 0.1  # largest relative difference of the two peaks
_CPU_SIZE, _CPU_PRODUCTS = 2048, 1
_SIZE, _PRODUCTS = 8192, 16  # of which one takes an accelerator of 1 PFLOP/s about a millisecond
_BEST_OF = 3


class MatmulPeak:
    """The rate of square matrix products of bfloat16 operands with float32 accumulation, on all devices together.

    The virtual CPU devices of a process share the cores of the machine, so that there one of them does the product.
    """

    def __init__(self, devices: Sequence[jax.Device]):
        """Compiles the product for the devices."""
        on_cpu = devices[0].platform == "cpu"
        used = list({device.process_index: device for device in devices}.values()) if on_cpu else list(devices)
        size, self._products = (_CPU_SIZE, _CPU_PRODUCTS) if on_cpu else (_SIZE, _PRODUCTS)
        self._operations = 2 * size**3 * self._products * len(used)
        mesh = jax.make_mesh((len(used),), ("devices",), devices=used, axis_types=(jax.sharding.AxisType.Auto,))

        def product(a: jax.Array, b: jax.Array) -> jax.Array:
            return jax.lax.dot(a[0], b[0], preferred_element_type=jnp.float32)[None]

        spec = P("devices")
        self._product = jax.jit(jax.shard_map(product, mesh=mesh, in_specs=(spec, spec), out_specs=spec))
        sharding = jax.NamedSharding(mesh, spec)
        numbers = np.random.default_rng(0).standard_normal((size, size), dtype=np.float32)
        operand = np.broadcast_to(numbers.astype(jnp.bfloat16), (len(used), size, size))
        self._operand = jax.make_array_from_callback(operand.shape, sharding, lambda index: operand[index])
        self()

    def __call__(self) -> float:
        """The peak now, in operations per second: the best of a few runs."""
        best = float("inf")
        for _ in range(_BEST_OF):
            begin = time.perf_counter()
            jax.block_until_ready([self._product(self._operand, self._operand) for _ in range(self._products)])
            best = min(best, time.perf_counter() - begin)
        return self._operations / best


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Timed(Generic[T]):
    """A time that was taken.

    Attributes:
      value: what the timed function returned.
      seconds: how long it took.
      peak: operations per second that the machine could do meanwhile, the mean of before and after.
      tries: how often it was timed.
      is_steady: whether the peaks before and after agreed; when they never did, the try in which they differed least
        is given.
    """

    value: T
    seconds: float
    peak: float
    tries: int
    is_steady: bool


def timed(function: Callable[[], T], peak: Callable[[], float], max_tries: int) -> Timed[T]:
    """Times a function that returns when its work is done, until the machine was steady or `max_tries` times."""
    best: Timed[T] | None = None
    least = float("inf")
    before = peak()
    for number in range(1, max_tries + 1):
        begin = time.perf_counter()
        value = function()
        seconds = time.perf_counter() - begin
        after = peak()
        # All processes go by the machine of process 0, so that they time equally often.
        difference = float(distributed.broadcast("steadiness", repr(abs(after - before) / max(before, after))))
        if difference < least:
            best = Timed(
                value=value,
                seconds=seconds,
                peak=(before + after) / 2,
                tries=number,
                is_steady=difference <= STEADY,
            )
            least = difference
        if difference <= STEADY:
            break
        before = after
    if best is None:
        raise ValueError(f"max_tries must be at least 1, not {max_tries}")
    return dataclasses.replace(best, tries=number)
