"""Where the memory of a device goes, and the largest KV cache that a memory budget leaves room for."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import jax
from flax import nnx

from slope_jax.execution.tick import EngineState
from slope_jax.kv.pool import HandOffCopies
from slope_jax.model.counts.cost import WeightBytes
from slope_jax.model.stage import StageCache

_UNITS = {"": 1, "B": 1}
_UNITS |= {f"{prefix}B": 1000**i for i, prefix in enumerate("kMGT", 1)}
_UNITS |= {f"{prefix}iB": 1024**i for i, prefix in enumerate("KMGT", 1)}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MemoryReport:
    """Bytes of one device; all devices of a mesh hold as much.

    Attributes:
      weights: by part, those of empty slots of the stage included.
      kv_pool: pages, positions and window tails of the KV cache.
      activations: the residual stream that waits for the next tick.
      temporaries: what the tick of the largest bucket has beside these while it runs, as compiled: intermediate
        results, inputs and outputs.
      hand_off: copies of finished prompts' KV on their way to the host, at the most.
      concurrent_tokens: tokens that the KV cache holds at once: of one prompt, as far as the model allows one as long,
        or of several, which together hold fewer, since each fills whole pages on every ring rank.
      budget: what all of it must fit into; None when no budget was given.
    """

    weights: WeightBytes
    kv_pool: int
    activations: int
    temporaries: int
    hand_off: int
    concurrent_tokens: int
    budget: int | None

    @property
    def total(self) -> int:
        """All of them together."""
        return self.weights.total + self.kv_pool + self.activations + self.temporaries + self.hand_off

    def describe(self) -> str:
        """A line for the log."""
        parts = {name.replace("_", " "): size for name, size in dataclasses.asdict(self.weights).items()}
        parts |= {"KV pool": self.kv_pool, "activations": self.activations, "temporaries": self.temporaries}
        parts |= {"KV hand-off": self.hand_off}
        within = "" if self.budget is None else f" of the budget of {format_bytes(self.budget)}"
        sizes = ", ".join(f"{name} {format_bytes(size)}" for name, size in parts.items())
        return f"{format_bytes(self.total)}{within} per device, {self.concurrent_tokens} tokens at once: {sizes}"


class Program(Protocol):
    """A compiled program."""

    def memory_analysis(self) -> Any:
        """The sizes of its buffers."""


def measure(
    program: Program, params: nnx.State, state: EngineState, copies: HandOffCopies, tokens: int, budget: int | None
) -> MemoryReport:
    """Where the memory of a device goes.

    Args:
      program: the tick of the largest bucket.
      params: the model's state, or its shapes.
      state: the engine's state, or its shapes.
      copies: of KV on its way to the host.
      tokens: tokens that the cache holds.
      budget: if there is one.
    """
    parts = weight_bytes(params)
    kv_pool, hand_off = cache_bytes(state.cache, copies)
    activations = per_device_bytes(state.hidden)
    sizes = program.memory_analysis()
    passed = sizes.argument_size_in_bytes + sizes.output_size_in_bytes - sizes.alias_size_in_bytes
    running = passed + sizes.temp_size_in_bytes + sizes.generated_code_size_in_bytes
    return MemoryReport(
        weights=parts,
        kv_pool=kv_pool,
        activations=activations,
        temporaries=int(running) - parts.total - kv_pool - activations,
        hand_off=hand_off,
        concurrent_tokens=tokens,
        budget=budget,
    )


def cache_bytes(cache: StageCache, copies: HandOffCopies) -> tuple[int, int]:
    """Bytes on a device of the cache, and of copies of finished requests' KV."""
    pages, requests = cache.pages.shape[5], cache.tails.shape[5]
    page, request = per_device_bytes(cache.pages) // pages, per_device_bytes(cache.tails) // requests
    return per_device_bytes(cache), page * copies.pages + request * copies.requests


# Names in a parameter's path, the more special ones first.
_PARTS = {
    "experts": {"experts"},
    "router": {"moe"},
    "attention": {"attention"},
    "embedding": {"embedding"},
    "unembedding": {"unembedding", "final_norm"},
}


def weight_bytes(params: nnx.State) -> WeightBytes:
    """Bytes of the weights on one device."""
    sums = dict.fromkeys((field.name for field in dataclasses.fields(WeightBytes)), 0)
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        keys = {str(getattr(key, "key", key)) for key in path}
        part = next((part for part, names in _PARTS.items() if keys & names), None)
        if part is None:
            raise ValueError(f"no part of the memory report covers parameter {jax.tree_util.keystr(path)}")
        sums[part] += math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
    return WeightBytes(**sums)


def per_device_bytes(arrays: Any) -> int:
    """Bytes on one device of arrays that lead with the three axes of the mesh."""
    return sum(math.prod(a.shape[3:]) * a.dtype.itemsize for a in jax.tree.leaves(arrays))


class Sized(Protocol):
    """An engine, whose weights need not have been loaded."""

    def memory(self) -> MemoryReport:
        """Where the memory of a device goes."""

    def cache_bytes(self) -> int:
        """The part of it that depends on the size of the cache, without compiling anything."""


EngineT = TypeVar("EngineT", bound=Sized)


def fit_cache(
    make: Callable[[int], EngineT], params: nnx.State, *, chunk_tokens: int, most_tokens: int, budget: int
) -> EngineT:
    """The engine with the largest KV cache that fits into a budget.

    What programs need is known only when they are compiled. They are compiled for a cache of one chunk, which tells
    what is left for the cache, and for a cache of that size; if they need more then, it is made smaller, and if they
    need less, larger. A cache below one chunk has smaller programs, so there it begins with one token.

    Args:
      make: makes an engine for a number of cached tokens.
      params: the shapes of the model's state.
      chunk_tokens: with more tokens in the cache, programs hardly change.
      most_tokens: a larger cache is of no use.
      budget: bytes that a device may use.

    Raises:
      ValueError: there is no room for the weights (nothing has been compiled then), or for one token.
    """
    parts = weight_bytes(params)
    if parts.total > budget:
        sizes = ", ".join(f"{name} {format_bytes(size)}" for name, size in dataclasses.asdict(parts).items())
        raise ValueError(
            f"the memory budget of {_exactly(budget)} per device is less than its weights, {_exactly(parts.total)}: "
            f"{sizes}"
        )
    fitting, limit = make(min(chunk_tokens, most_tokens)), most_tokens + 1
    report = fitting.memory()
    if report.total > budget:
        fitting, limit = make(1), report.concurrent_tokens
        report = fitting.memory()
    if report.total > budget:
        raise ValueError(
            f"the memory budget of {_exactly(budget)} per device leaves no room for one token, for which "
            f"{_exactly(report.total)} are needed: {report.describe()}"
        )
    least = report.concurrent_tokens
    room = budget - report.total + fitting.cache_bytes()
    while (tokens := _largest(make, room, least, limit)) > least:
        engine = make(tokens)
        report = engine.memory()
        room = budget - report.total + engine.cache_bytes()
        if report.total <= budget:
            fitting, least = engine, tokens
        else:
            limit = tokens
    return fitting


def _largest(make: Callable[[int], Sized], room: int, least: int, limit: int) -> int:
    """The largest number of tokens from `least` to `limit - 1` whose cache fits into the room; `least` is taken to."""
    low, high = least, limit
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if make(middle).cache_bytes() <= room else (low, middle)
    return low


def parse_bytes(text: int | str) -> int:
    """A number of bytes, or a text such as "64GiB", "1.5 GB" or "1000000".

    Raises:
      ValueError: it is not one, or not positive.
    """
    if isinstance(text, int) and not isinstance(text, bool) and text > 0:
        return text
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-zA-Z]*)", text.strip()) if isinstance(text, str) else None
    size = int(float(match[1]) * _UNITS[match[2]]) if match and match[2] in _UNITS else 0
    if size <= 0:
        units = ", ".join(unit for unit in _UNITS if unit)
        raise ValueError(f"{text!r} is not a positive number of bytes, such as '64GiB'; the units are {units}")
    return size


def format_bytes(size: int) -> str:
    """Bytes in a binary unit."""
    power = min(max(size.bit_length() - 1, 0) // 10, 4)
    return f"{size / 1024**power:.2f} {'KMGT'[power - 1]}iB" if power else f"{size} B"


def _exactly(size: int) -> str:
    return f"{format_bytes(size)} ({size:,} bytes)"
