"""The exchanges of a prompt by kind: read from compiled ticks, and by the formulas of `model.cost`.

How often an exchange runs is the product of the loops around it: those of known length as the compiler states them,
those whose length data decides as the prompt decides it.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Mapping

from slope_jax.audit import hlo
from slope_jax.audit.work import Tick
from slope_jax.execution.spec import TickPrograms
from slope_jax.mesh import ring_policy
from slope_jax.mesh.axes import AXES, PP, RING, ULYSSES, MeshShape
from slope_jax.model.config import FULL, SLIDING
from slope_jax.model.counts import cost

# The named scopes of a tick that hold exchanges, and the kind of layer that some of them imply.
_SCOPES = (
    "embed", "project_in", "pass_kv", "pass_q", "window_attention", "project_out", "experts", "unembed", "hand_off"
)  # fmt: skip
_SCOPE_OF_PASS = {ring_policy.KV: "pass_kv", ring_policy.Q: "pass_q"}
_LAYER_OF_SCOPE = {FULL: FULL, SLIDING: SLIDING, "window_attention": SLIDING}


class UnplannedExchangeError(ValueError):
    """A compiled program holds an exchange that is not part of the design of a tick."""

    def __init__(self, exchange: hlo.Exchange, where: str):
        super().__init__(f"an exchange {where}: {exchange.operation} in {exchange.op_name}")


@dataclasses.dataclass(frozen=True, slots=True, order=True)
class ExchangeKey:
    """What tells exchanges apart: see `cost.Collective`."""

    scope: str
    operation: str
    layer: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TrafficRow:
    """The exchanges of one kind, of a device.

    Attributes:
      key: of which kind.
      axes: of the mesh, over which they run in the compiled program.
      formula_axes: over which they run by the formula.
      count: how often they run in a whole prompt.
      num_bytes: bytes that leave the device in a whole prompt.
      formula: the same by the formula.
    """

    key: ExchangeKey
    axes: tuple[str, ...]
    formula_axes: tuple[str, ...]
    count: int
    num_bytes: int
    formula: int


def traffic_rows(
    programs: TickPrograms, exchanges: Mapping[int, list[hlo.Exchange]], ticks: Iterable[Tick]
) -> tuple[TrafficRow, ...]:
    """The exchanges of the ticks, by kind, when routing to experts is balanced.

    Args:
      programs: their sizes.
      exchanges: of the program of each bucket.
      ticks: which programs run, and with how many rounds.

    Raises:
      UnplannedExchangeError: an exchange is not part of the design.
    """
    sizes = _axis_sizes(programs.shape)
    count: collections.Counter[ExchangeKey] = collections.Counter()
    found: collections.Counter[ExchangeKey] = collections.Counter()
    expected: collections.Counter[ExchangeKey] = collections.Counter()
    axes: dict[ExchangeKey, set[str]] = collections.defaultdict(set)
    expected_axes: dict[ExchangeKey, set[str]] = collections.defaultdict(set)
    for tick, times in collections.Counter(dataclasses.replace(t, chunks=()) for t in ticks).items():
        for exchange in exchanges[tick.bucket]:
            key, over = exchange_key(exchange), exchange.axes(sizes)
            runs = times * _runs(exchange, tick)
            if over and runs:
                count[key] += runs
                found[key] += runs * cost.sent_bytes(exchange.operation, exchange.operand_bytes, exchange.ranks)
                axes[key] |= set(over)
        traffic = programs.traffic(tick.bucket, tick.ring_pass, tick.rounds)
        for c in traffic.collectives:
            key = ExchangeKey(c.scope, c.operation, c.layer or "")
            expected[key] += times * c.total_sent_bytes
            expected_axes[key] |= {axis for axis in c.axes if sizes[axis] > 1}

    def ordered(over: set[str]) -> tuple[str, ...]:
        return tuple(axis for axis in AXES if axis in over)

    order = ["", *_SCOPES]
    return tuple(
        TrafficRow(
            key=key,
            axes=ordered(axes[key]),
            formula_axes=ordered(expected_axes[key]),
            count=count[key],
            num_bytes=found[key],
            formula=expected[key],
        )
        for key in sorted({*found, *expected}, key=lambda k: (k.layer, order.index(k.scope), k.operation))
    )


def exchange_key(exchange: hlo.Exchange) -> ExchangeKey:
    """Where in a tick an exchange belongs, by the named scopes in which it was written.

    Raises:
      UnplannedExchangeError: it stands in none of the scopes of a tick.
    """
    scopes = exchange.op_name.split("/")
    scope = next((name for name in reversed(scopes) if name in _SCOPES), "")
    if exchange.op_name and not scope:
        raise UnplannedExchangeError(exchange, "outside the scopes of a tick")
    layer = next((_LAYER_OF_SCOPE[name] for name in scopes if name in _LAYER_OF_SCOPE), "")
    return ExchangeKey(scope, exchange.operation, layer)


def _runs(exchange: hlo.Exchange, tick: Tick) -> int:
    """How often an exchange runs in a tick, when routing to experts is balanced.

    Raises:
      UnplannedExchangeError: it is in a branch, or in a loop whose length is not known.
    """
    scope = exchange_key(exchange).scope
    passes = scope in _SCOPE_OF_PASS.values()
    if passes and scope != _SCOPE_OF_PASS[tick.ring_pass]:
        return 0
    runs = 1
    for around in exchange.around:
        inside = around.op_name.split("/")
        if isinstance(around, hlo.Branch):
            # The one branch in a tick is what goes round the ring, and all devices take the same.
            if not (passes and FULL in inside):
                raise UnplannedExchangeError(exchange, "in a branch")
        elif around.trip_count is not None:
            runs *= around.trip_count
        elif scope == "pass_kv" and scope in inside:
            runs *= tick.rounds
        elif not (scope == "experts" and scope in inside):
            raise UnplannedExchangeError(exchange, "in a loop of unknown length")
    return runs


def _axis_sizes(shape: MeshShape) -> dict[str, int]:
    return {PP: shape.pp, RING: shape.ring, ULYSSES: shape.ulysses}
