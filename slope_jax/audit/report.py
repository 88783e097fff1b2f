"""What an engine needs and exchanges for a prompt, read from its compiled programs, next to what formulas say.

The programs are those of `Engine`, compiled for virtual devices and for weights of which only the shapes exist, so a
model of any size can be looked at on a small machine.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable

import jax
from flax import nnx

from slope_jax.audit import hlo
from slope_jax.audit.buffers import Temporary, largest_temporaries
from slope_jax.audit.traffic import TrafficRow, UnplannedExchangeError, traffic_rows
from slope_jax.audit.work import Tick, Work, plan_ticks, prompt_work
from slope_jax.execution.memory import per_device_bytes, weight_bytes
from slope_jax.execution.spec import DTYPES, EXPERT_WEIGHTS, TickPrograms, all_reduce_form, stages_on
from slope_jax.kv.pool import CacheShape
from slope_jax.mesh import ring_policy
from slope_jax.mesh.axes import MeshShape, make_mesh
from slope_jax.mesh.layout import plan_chunks, zigzag
from slope_jax.model.config import SLIDING, GptOssConfig
from slope_jax.model.counts import cost
from slope_jax.model.parallel.expert_parallel import ExchangeShape
from slope_jax.model.stage_plan import StagePlan

BYTES_TOLERANCE = 0.02  # by which compiled bytes may differ from those of the formula
MOST_IMBALANCE = 1.05  # the busiest device over the mean
_TEMPORARIES = 8  # how many of the largest are kept


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRow:
    """Bytes of one part of a device's memory: compiled, and by the formula where there is one."""

    part: str
    num_bytes: int
    formula: int | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Audit:
    """What was found; bytes and operations are those of one device.

    Attributes:
      plan: the layers of each stage.
      cache: the sizes of the KV cache.
      memory: by part.
      temporaries: the largest values that the program holds for a while.
      traffic: the exchanges of the prompt by kind.
      ticks: of the prompt.
      idle: the share of the stages' ticks in which they have no chunk.
      work: of the prompt.
      random_expert_rounds: rounds of the exchange of expert parallelism in a layer when routing is random, of which
        `traffic` counts one, as balanced routing takes; None without expert parallelism.
      failures: what is not as it must be, in words.
    """

    plan: StagePlan
    cache: CacheShape
    memory: tuple[MemoryRow, ...]
    temporaries: tuple[Temporary, ...]
    traffic: tuple[TrafficRow, ...]
    ticks: tuple[Tick, ...]
    idle: float
    work: Work
    random_expert_rounds: float | None
    failures: tuple[str, ...]


def audit(
    config: GptOssConfig,
    shape: MeshShape,
    *,
    num_tokens: int,
    dtype: str = "bfloat16",
    expert_weights: str = "bfloat16",
    expert_parallel: bool = False,
    tensor_parallel: bool = False,
    all_reduce: str | None = None,
    chunk_tokens: int = 4096,
    ring_pass: str = ring_policy.AUTO,
    block_q: int | None = None,
    block_kv: int = 512,
    page_tokens: int = 64,
) -> Audit:
    """Compiles what an engine would run for a prompt, and compares it with the formulas of `model.cost`.

    The prompt is alone, and the KV cache has room for it. Each program is also compiled for a prompt twice as long, to
    see what depends on the length.

    Args:
      config: the model.
      shape: the mesh; there must be as many devices.
      num_tokens: tokens of the prompt.
      dtype: as of `Engine.load`.
      expert_weights: as of `Engine.load`.
      expert_parallel: as of `Engine.load`.
      tensor_parallel: as of `Engine.load`.
      all_reduce: as of `Engine.load`.
      chunk_tokens: as of `Engine.load`.
      ring_pass: as of `Engine.load`.
      block_q: as of `Engine.load`.
      block_kv: as of `Engine.load`.
      page_tokens: as of `Engine.load`.

    Raises:
      ValueError: the mesh does not fit the model or the devices, the prompt is too long, or the compiled program holds
        an exchange that cannot be read.
    """
    for name, value, allowed in (
        ("dtype", dtype, tuple(DTYPES)),
        ("expert_weights", expert_weights, EXPERT_WEIGHTS),
        ("ring_pass", ring_pass, ring_policy.RING_PASSES),
    ):
        if value not in allowed:
            raise ValueError(f"{name}={value!r} is not supported; it must be one of {list(allowed)}")
    form = all_reduce_form(tensor_parallel=tensor_parallel, expert_parallel=expert_parallel, all_reduce=all_reduce)
    if chunk_tokens < 1:
        raise ValueError(f"chunk_tokens must be positive, not {chunk_tokens}")
    if not 0 < num_tokens <= config.max_position:
        raise ValueError(f"a prompt of {num_tokens} tokens: the model takes 1 to {config.max_position}")
    plan = stages_on(config, shape, expert_parallel=expert_parallel)
    chunk_tokens = min(chunk_tokens, num_tokens)

    def programs_for(config: GptOssConfig, tokens: int) -> TickPrograms:
        return TickPrograms.of(
            config,
            plan,
            shape,
            dtype=dtype,
            packed_experts=expert_weights == "mxfp4",
            expert_parallel=expert_parallel,
            all_reduce=form,
            chunk_tokens=chunk_tokens,
            kv_cache_tokens=tokens,
            block_q=block_q,
            block_kv=block_kv,
            page_tokens=page_tokens,
            ring_pass=ring_pass,
        )

    mesh = make_mesh(shape)
    programs = programs_for(config, num_tokens)
    longer = programs_for(dataclasses.replace(config, max_position=2 * config.max_position), 2 * num_tokens)
    model = programs.abstract_model(mesh)
    ring, window = shape.ring, config.sliding_window
    chunks = [(start, zigzag(start, n, ring, window)) for start, n in plan_chunks(num_tokens, chunk_tokens)]
    ticks = plan_ticks(programs, chunks)
    compiled = {b: programs.lower(b, mesh, *model).compile() for b in sorted({tick.bucket for tick in ticks})}
    exchanges = {bucket: _exchanges(program) for bucket, program in compiled.items()}
    largest = compiled[max(compiled)]
    memory = memory_rows(programs, largest, max(compiled), model[1])
    work = prompt_work(programs, chunks, ticks)
    failures = [*check_memory(memory), *check_balance(work)]
    traffic: tuple[TrafficRow, ...] = ()
    try:
        traffic = traffic_rows(programs, exchanges, ticks)
        failures += check_traffic(traffic)
        for bucket, found in exchanges.items():
            others = _exchanges(longer.lower(bucket, mesh, *model).compile())
            failures += check_length(programs, bucket, (found, others))
    except UnplannedExchangeError as error:
        failures.append(str(error))
    return Audit(
        plan=plan,
        cache=programs.cache,
        memory=memory,
        temporaries=tuple(largest_temporaries(largest, _TEMPORARIES)),
        traffic=traffic,
        ticks=ticks,
        idle=sum(chunk is None for tick in ticks for chunk in tick.chunks) / (len(ticks) * shape.pp),
        work=work,
        random_expert_rounds=_random_expert_rounds(programs, max(compiled)) if programs.expert_parallel else None,
        failures=tuple(failures),
    )


def _random_expert_rounds(programs: TickPrograms, bucket: int) -> float:
    shape = programs.shape
    exchange = ExchangeShape.of(programs.config, programs.rows(bucket), shape.ulysses, DTYPES[programs.dtype])
    return exchange.mean_rounds(shape.num_devices)


def memory_rows(
    programs: TickPrograms, compiled: jax.stages.Compiled, bucket: int, params: nnx.State
) -> tuple[MemoryRow, ...]:
    """The memory of a device while it runs a program, `params` being the shapes of the model's state."""
    config, plan, shape, cache = programs.config, programs.plan, programs.shape, programs.cache
    dtype = DTYPES[programs.dtype]
    by_formula = cost.device_weight_bytes(
        config,
        plan,
        shape,
        dtype,
        packed=programs.packed_experts,
        expert_parallel=programs.expert_parallel,
        split=programs.split,
    )
    found = dataclasses.asdict(weight_bytes(params))
    state = jax.eval_shape(programs.empty_state)
    device = {name: per_device_bytes(array) for name, array in vars(state.cache).items()}
    slot = cost.cache_bytes(config, plan, shape, dtype)
    hidden = 4 * programs.rows(programs.buckets[-1]) * config.hidden_size  # float32
    analysis = compiled.memory_analysis()
    assert analysis is not None
    weights = [
        MemoryRow(part=f"weights: {part}", num_bytes=found[part], formula=n)
        for part, n in dataclasses.asdict(by_formula).items()
    ]
    state_rows = [
        MemoryRow(
            part="KV pages of full layers",
            num_bytes=device["pages"] + device["positions"],
            formula=cache.pages * cache.page * slot.slot,
        ),
        MemoryRow(part="KV tails of window layers", num_bytes=device["tails"], formula=cache.requests * slot.request),
        MemoryRow(part="residual stream between ticks", num_bytes=per_device_bytes(state.hidden), formula=hidden),
    ]
    inputs = 4 * (math.prod(programs.packed_shape(bucket)) // (shape.pp * shape.ring) + 1 + bucket)
    arguments = sum(row.formula or 0 for row in (*weights, *state_rows)) + inputs
    return (
        *weights,
        *state_rows,
        MemoryRow(part="all of these, as compiled", num_bytes=analysis.argument_size_in_bytes, formula=arguments),
        MemoryRow(part="temporaries", num_bytes=analysis.temp_size_in_bytes),
    )


def check_memory(rows: Iterable[MemoryRow]) -> list[str]:
    """What in a device's memory is not as the formulas say."""
    return [
        f"{row.part}: {row.num_bytes} bytes, but {row.formula} by the formula"
        for row in rows
        if row.formula is not None and _differ(row.num_bytes, row.formula)
    ]


def check_traffic(rows: Iterable[TrafficRow]) -> list[str]:
    """What in the exchanges is not as the formulas say."""
    failures = []
    for row in rows:
        name = " ".join(part for part in dataclasses.astuple(row.key) if part)
        if _differ(row.num_bytes, row.formula):
            failures.append(f"{name}: {row.num_bytes} bytes leave a device, but {row.formula} by the formula")
        if row.axes != row.formula_axes:
            failures.append(f"{name}: over the axes {row.axes}, but {row.formula_axes} by the formula")
    return failures


def check_balance(work: Work) -> list[str]:
    """Which work is divided too unevenly over the devices of a stage."""
    balances = {"attention": work.attention_balance, "experts": work.expert_balance}
    return [
        f"{part}: the busiest device takes {balance:.3f} times as long as the mean, more than {MOST_IMBALANCE}"
        for part, balance in balances.items()
        if balance > MOST_IMBALANCE
    ]


def check_length(
    programs: TickPrograms, bucket: int, exchanges: tuple[list[hlo.Exchange], list[hlo.Exchange]]
) -> list[str]:
    """What window layers exchange differently when the prompt is twice as long.

    Args:
      programs: the sizes of the first program.
      bucket: of both programs.
      exchanges: of the program for the prompt, and of the one for a prompt twice as long.
    """
    sent = []
    tick = Tick(bucket=bucket, ring_pass=ring_policy.KV, rounds=1, chunks=())
    for found in exchanges:
        rows = traffic_rows(programs, {bucket: found}, [tick])
        sent.append({row.key: row.num_bytes for row in rows if row.key.layer == SLIDING})
    return [
        f"{key.scope} {key.operation} of window layers: {sent[0].get(key, 0)} bytes a tick, but {sent[1].get(key, 0)} "
        "when the prompt is twice as long"
        for key in sorted({*itertools.chain(*sent)})
        if sent[0].get(key) != sent[1].get(key)
    ]


def _differ(found: int, formula: int) -> bool:
    return abs(found - formula) > BYTES_TOLERANCE * formula


def _exchanges(compiled: jax.stages.Compiled) -> list[hlo.Exchange]:
    text = compiled.as_text()
    if text is None:
        raise ValueError("this backend does not show its compiled programs")
    return hlo.parse_exchanges(text)
