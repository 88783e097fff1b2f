"""The prefill engine: a checkpoint on a device mesh that turns prompts into first tokens and KV caches."""

from __future__ import annotations

import collections
import dataclasses
import logging
import os
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from numpy.typing import NDArray

from slope_jax.execution.memory import MemoryReport, cache_bytes, fit_cache, format_bytes, measure, parse_bytes
from slope_jax.execution.program_cache import compile_program, shapes_of
from slope_jax.execution.spec import DTYPES, EXPERT_WEIGHTS, TickPrograms, all_reduce_form, default_block_q, stages_on
from slope_jax.execution.tick import EngineState
from slope_jax.kv.files import KVHeader, PrefillKV, hash_token_ids
from slope_jax.kv.pool import HandOffCopies, PageAllocator, hand_off_copies, make_read_pages, requests_at_once
from slope_jax.kv.shards import PromptKVReader, PromptParts, gather_rows, local_parts, make_gather
from slope_jax.mesh import ring_policy
from slope_jax.mesh.axes import PER_DEVICE, PP, RING, MeshShape, describe_mesh, make_mesh
from slope_jax.mesh.layout import pack_chunk
from slope_jax.mesh.processes import distributed
from slope_jax.model.checkpoint import weights
from slope_jax.model.checkpoint.safetensors import TensorSource
from slope_jax.model.counts.cost import Traffic
from slope_jax.model.gpt_oss import GptOss
from slope_jax.model.stage import StageWork
from slope_jax.model.tokenizer import Tokenizer, load_tokenizer
from slope_jax.request import ParsedRequest, Prompt, RequestLimits, parse_batch
from slope_jax.result import NO_TOKEN, PrefillResult
from slope_jax.sampling import sample_token
from slope_jax.scheduling.scheduler import ChunkWork, Scheduler

_TICKS_IN_FLIGHT = 2  # enough that the devices never wait for the host, few enough that first tokens are seen at once
_READ_GROUP = 64  # pages that are copied out of the cache at a time

OnTick = Callable[[int, int], None]


class TtftObserver(Protocol):
    """What wants to know how long prompts take, such as `planner.Forecast`."""

    def observe(self, num_tokens: int, ttft_s: float) -> None:
        """Is told the tokens and the time to first token of a prompt that was alone."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TickRecord:
    """What a tick did.

    Attributes:
      bucket: tokens that its chunks were padded to.
      chunks: per stage, (index of the request in the batch, first position, tokens), or None where it was idle.
      ring_pass: what went round the ring, "kv" or "q" (see `mesh.pass_choice`).
      rounds: rounds in which KV went round; 0 when queries did.
      host_s: seconds that the host worked for it, of one core: to schedule, prepare and dispatch it, and to sample the
        token and put together the result of the request that it finished.
      host_wait_s: seconds that the host was kept waiting while it dispatched: on CPU, for cores that the devices use,
        and by XLA, which starts a program on several virtual devices only when the one before is done.
      attention_blocks: products of a query block and a key block per device, int32 `[pp, ring, ulysses]`.
      expert_rounds: rounds of the exchange of expert parallelism, of all layers of a stage together: one for each
        layer while routing is balanced.
    """

    bucket: int
    chunks: tuple[tuple[int, int, int] | None, ...]
    ring_pass: str
    rounds: int
    host_s: float
    host_wait_s: float
    attention_blocks: NDArray[np.int32]
    expert_rounds: int


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _Dispatched:
    """A tick whose results may not be there yet."""

    record: TickRecord
    logits: jax.Array
    work: StageWork
    finished: ChunkWork | None
    pages: list[jax.Array]
    tails: jax.Array | None

    @property
    def is_ready(self) -> bool:
        return bool(self.logits.is_ready())  # type: ignore[attr-defined]  # the stubs of jax lack it


class Engine:
    """A gpt-oss checkpoint on a device mesh, ready to prefill.

    Make one with `Engine.load`. In a run of several processes every process loads the engine and makes every call with
    the same arguments; a process that differs makes all of them raise.

    Attributes:
      forecast: is told how long each prompt took that was alone in its batch; set it to keep a running correction of
        what the planner expects.
      last_ticks: what the ticks of the last batch did.
    """

    def __init__(
        self,
        *,
        programs: TickPrograms,
        mesh: Mesh,
        graph: nnx.GraphDef[GptOss],
        params: nnx.State,
        tokenizer: Tokenizer | None,
        model_fingerprint: str,
        memory_budget: int | None,
    ):
        """Takes the parts that `load` has made and checked."""
        self.programs, self.mesh, self.tokenizer, self.model_fingerprint = programs, mesh, tokenizer, model_fingerprint
        self.config, self.shape, self.dtype = programs.config, programs.shape, programs.dtype
        self.chunk_tokens, self.buckets = programs.chunk_tokens, programs.buckets
        self.attention_blocks = programs.block_q, programs.block_kv
        self.max_prompt_tokens = min(programs.config.max_position, programs.kv_cache_tokens)
        self.forecast: TtftObserver | None = None
        self.last_ticks: tuple[TickRecord, ...] = ()
        self._graph, self._params, self._memory_budget = graph, params, memory_budget
        self._plan, self._cache_shape = programs.plan, programs.cache
        config, kv_cache_tokens = programs.config, programs.kv_cache_tokens
        self._group = min(_READ_GROUP, self._cache_shape.table)
        self._limits = RequestLimits(
            vocab_size=config.vocab_size,
            max_tokens=self.max_prompt_tokens,
            max_tokens_reason=(
                "the model's maximum"
                if config.max_position <= kv_cache_tokens
                else f"{kv_cache_tokens=}"
                if memory_budget is None
                else f"what the memory budget of {format_bytes(memory_budget)} per device leaves room for"
            ),
        )
        self._ticks: dict[int, tuple[Any, int]] = {}
        self._read_pages = make_read_pages(mesh)
        self._gather = make_gather(mesh)
        self._make_state = jax.jit(programs.empty_state, out_shardings=jax.NamedSharding(mesh, PER_DEVICE))
        self._state: EngineState | None = None

    @classmethod
    def load(
        cls,
        checkpoint: str | os.PathLike[str] | TensorSource,
        *,
        mesh: MeshShape = MeshShape(),  # noqa: B008 - frozen
        dtype: str = "bfloat16",
        expert_weights: str = "bfloat16",
        expert_parallel: bool = False,
        tensor_parallel: bool = False,
        all_reduce: str | None = None,
        chunk_tokens: int = 4096,
        kv_cache_tokens: int | None = None,
        memory_budget: int | str | None = None,
        devices: Sequence[jax.Device] | None = None,
        block_q: int | None = None,
        block_kv: int = 512,
        page_tokens: int = 64,
        ring_pass: str = ring_policy.AUTO,
        machine: ring_policy.Machine | None = None,
    ) -> Engine:
        """Loads a checkpoint onto a mesh.

        Args:
          checkpoint: a folder in Hugging Face layout, or one written by `slope_jax.launch.convert`; or the tensors of a
            model, which then has no tokenizer.
          mesh: how many devices each axis has.
          dtype: "bfloat16", or "float32" for exact comparison: weights, matrix products and KV.
          expert_weights: "bfloat16" unpacks the experts at load (to `dtype`), "mxfp4" keeps them packed in device
            memory and unpacks each where it is used.
          expert_parallel: splits the experts over the ulysses axis and sends tokens to them, instead of keeping all
            experts of a stage on every device; the results are the same.
          tensor_parallel: splits the weights of layers over the ulysses axis, by heads and by the width of experts,
            instead of the tokens; the results are the same. Not together with `expert_parallel`.
          all_reduce: how tensor parallelism adds up over the axis, "psum", "flat" or "tree" (see `mesh.all_reduce`);
            "psum" by default.
          chunk_tokens: prompts are processed in chunks of at most this many tokens.
          kv_cache_tokens: tokens that the KV cache holds; the model's maximum by default.
          memory_budget: bytes that a device may use, such as "64GiB"; the KV cache gets what weights and programs leave
            of it (see `memory`), up to what the requests that can be under way at once could fill.
          devices: the devices to use; all by default.
          block_q: query slots in a block of attention; by default such that a block has 1,024 rows with all its heads.
          block_kv: keys in a block of attention of full layers, a power of two.
          page_tokens: token slots in a page of the KV cache, a power of two.
          ring_pass: what goes round the ring in full-attention layers: "kv", "q", or "auto", which chooses what is
            better for the lengths in a tick (see `mesh.pass_choice`).
          machine: the speed of the devices and of their links, for "auto"; without it, "auto" counts bytes.

        Raises:
          ValueError: an argument is not supported, the mesh does not fit the devices or the model, the memory budget
            has no room for the weights or for one token, or the checkpoint is not complete and consistent.
        """
        _check_choice("dtype", dtype, tuple(DTYPES))
        _check_choice("expert_weights", expert_weights, EXPERT_WEIGHTS)
        form = all_reduce_form(tensor_parallel=tensor_parallel, expert_parallel=expert_parallel, all_reduce=all_reduce)
        _check_choice("ring_pass", ring_pass, ring_policy.RING_PASSES)
        _check_positive("chunk_tokens", chunk_tokens)
        for name, value in (("block_kv", block_kv), ("page_tokens", page_tokens)):
            _check_positive(name, value)
            if value & (value - 1):
                raise ValueError(f"{name} must be a power of two, not {value}")
        if machine is not None and not isinstance(machine, ring_policy.Machine):
            raise ValueError(f"machine must be a ring_policy.Machine, not {machine!r}")
        if not isinstance(mesh, MeshShape):
            raise ValueError(f"mesh must be a MeshShape, not {type(mesh).__name__}")
        source = weights.open_source(checkpoint)
        config = source.config
        plan = stages_on(config, mesh, expert_parallel=expert_parallel)
        if kv_cache_tokens is not None and memory_budget is not None:
            raise ValueError(
                f"{kv_cache_tokens=} and {memory_budget=} both set the size of the KV cache; give one of them"
            )
        budget = None if memory_budget is None else parse_bytes(memory_budget)
        if kv_cache_tokens is None:
            kv_cache_tokens = config.max_position
        _check_positive("kv_cache_tokens", kv_cache_tokens)
        block_q = default_block_q(config, mesh) if block_q is None else block_q
        _check_positive("block_q", block_q)
        hosts = distributed.hosts()
        device_mesh = make_mesh(mesh, devices, hosts)
        fingerprint = weights.model_fingerprint(source)
        distributed.agree(
            "Engine.load",
            {
                "model": fingerprint,
                "mesh": str(mesh),
                "dtype": dtype,
                "expert_weights": expert_weights,
                "expert_parallel": str(expert_parallel),
                "tensor_parallel": str(form),
                "chunk_tokens": str(chunk_tokens),
                "kv_cache_tokens": str(kv_cache_tokens),
                "memory_budget": str(budget),
                "blocks": f"{block_q} {block_kv} {page_tokens}",
                "ring_pass": f"{ring_pass} {machine}",
            },
        )
        log = logging.getLogger(__name__)
        if jax.process_index() == 0:
            log.info("%s", describe_mesh(device_mesh, hosts))
            log.info("%s", plan.describe())
        tokenizer = load_tokenizer(checkpoint, config.vocab_size) if isinstance(checkpoint, str | os.PathLike) else None

        def programs_for(tokens: int) -> TickPrograms:
            return TickPrograms.of(
                config,
                plan,
                mesh,
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
                machine=machine,
            )

        programs = programs_for(kv_cache_tokens)
        graph, shapes = programs.abstract_model(device_mesh)

        def make(tokens: int) -> Engine:
            return cls(
                programs=programs_for(tokens),
                mesh=device_mesh,
                graph=graph,
                params=shapes,
                tokenizer=tokenizer,
                model_fingerprint=fingerprint,
                memory_budget=budget,
            )

        if budget is None:
            engine = make(kv_cache_tokens)
        else:
            chunk, most = min(chunk_tokens, config.max_position), requests_at_once(mesh) * config.max_position
            engine = fit_cache(make, shapes, chunk_tokens=chunk, most_tokens=most, budget=budget)
            distributed.agree("Engine.load, cache", {"kv_cache_tokens": str(engine.programs.kv_cache_tokens)})
            if jax.process_index() == 0:
                log.info("%s", engine.memory().describe())
        _, engine._params = weights.load_model(
            source,
            config,
            plan,
            device_mesh,
            DTYPES[dtype],
            programs.packed_experts,
            programs.expert_parallel,
            programs.split,
        )
        return engine

    @property
    def limits(self) -> RequestLimits:
        """What this engine can serve."""
        return self._limits

    def memory(self) -> MemoryReport:
        """Where the memory of each device goes; compiles the program of the largest bucket if nothing has done so."""
        program = self._tick(self.buckets[-1])[0]
        state = jax.eval_shape(self.programs.empty_state)
        return measure(program, self._params, state, self._copies(), self.programs.kv_cache_tokens, self._memory_budget)

    def traffic(self, rounds: int = 1) -> Traffic:
        """What a device sends in a tick of the largest bucket, in which the ring has so many rounds."""
        return self.programs.traffic(self.buckets[-1], ring_policy.KV, rounds)

    def cache_bytes(self) -> int:
        """Bytes of a device that depend on the size of the KV cache: the cache, and copies on their way to the host."""
        return sum(cache_bytes(jax.eval_shape(self.programs.empty_state).cache, self._copies()))

    def _copies(self) -> HandOffCopies:
        slots = self.buckets[-1] // self.shape.ring
        return hand_off_copies(self._cache_shape, self._group, slots, _TICKS_IN_FLIGHT + 1)

    def warmup(self) -> int:
        """Compiles every program that prefill needs, and returns how many there are."""
        distributed.agree("Engine.warmup", {})
        for bucket in self.buckets:
            self._tick(bucket)
            self._dispatch([None] * self.shape.pp, bucket)
        no_pages = np.full((self.shape.ring, self._cache_shape.table), -1, np.int32)
        pages, _ = self._copy_kv(*self._prepare_copies(no_pages, 1))
        programs = len(self.buckets) + 1
        if jax.process_count() > 1:
            slots = self._group * self._cache_shape.page
            rows = {where: part[0, 0].reshape(slots, *part.shape[4:]) for where, part in local_parts(pages[0]).items()}
            gather_rows(rows, 0, self.mesh, self._gather, slots)
            programs += 1
        return programs

    def prefill(self, batch: Sequence[Prompt], on_tick: OnTick | None = None) -> list[PrefillResult]:
        """Prefills a batch of prompts of any lengths.

        Args:
          batch: strings (when the checkpoint has a tokenizer), sequences of token ids, and `Request`s, in any mix.
          on_tick: called after each tick with the ticks done and the ticks in all.

        Returns:
          One result per prompt, in the batch's order.

        Raises:
          ValueError: a prompt cannot be served; it names the value and the limit. Nothing has run then.
        """
        arrival = time.perf_counter()
        encode = self.tokenizer.encode if self.tokenizer else None
        requests = parse_batch(batch, limits=self._limits, encode=encode)
        distributed.agree("Engine.prefill", {f"item {i}": _digest(r) for i, r in enumerate(requests)})
        if not requests:
            return []
        try:
            results = self._run(requests, arrival, on_tick)
        except BaseException:
            self._state = None  # its buffers may have been given to a tick that failed
            raise
        if self.forecast is not None and len(results) == 1:
            self.forecast.observe(results[0].num_tokens, results[0].ttft_s)
        return results

    def _run(self, requests: list[ParsedRequest], arrival: float, on_tick: OnTick | None) -> list[PrefillResult]:
        allocator = PageAllocator(self._cache_shape, self.shape.ring)
        lengths = [len(r.token_ids) for r in requests]
        window = self.config.sliding_window
        scheduler = Scheduler(lengths, self.chunk_tokens, self.shape.ring, window, allocator)
        ids = [np.array(r.token_ids, np.int32) for r in requests]
        results: dict[int, PrefillResult] = {}
        records: list[TickRecord] = []
        in_flight: collections.deque[_Dispatched] = collections.deque()
        stages: collections.deque[ChunkWork | None] = collections.deque([None] * self.shape.pp, self.shape.pp)
        total = scheduler.num_chunks + self.shape.pp - 1

        def complete() -> None:
            tick, begin = in_flight.popleft(), time.thread_time()
            blocks, expert_rounds = np.asarray(tick.work.attention_blocks), np.asarray(tick.work.expert_rounds)
            if tick.finished is not None:
                index = tick.finished.request
                results[index] = self._result(requests[index], ids[index], tick, arrival)
            records.append(
                dataclasses.replace(
                    tick.record,
                    attention_blocks=blocks,
                    expert_rounds=int(expert_rounds.max()),
                    host_s=tick.record.host_s + time.thread_time() - begin,
                )
            )
            if on_tick is not None:
                on_tick(len(records), max(total, len(records)))

        while not scheduler.exhausted or any(stages):
            in_flight.append(self._dispatch_stages(stages, ids, scheduler))
            stages[-1] = None
            while in_flight and (len(in_flight) > _TICKS_IN_FLIGHT or in_flight[0].is_ready):
                complete()
        while in_flight:
            complete()
        self.last_ticks = tuple(records)
        return [results[i] for i in range(len(requests))]

    def _dispatch_stages(
        self, pipeline: collections.deque[ChunkWork | None], ids: list[NDArray[np.int32]], scheduler: Scheduler
    ) -> _Dispatched:
        """Moves all chunks one stage on and dispatches the tick."""
        begin, worked = time.perf_counter(), time.thread_time()
        pipeline.appendleft(scheduler.next_chunk())
        stages = list(pipeline)
        longest = max(work.num_tokens for work in stages if work is not None)
        bucket = self.programs.bucket_of(longest)
        finished = stages[-1] if stages[-1] is not None and stages[-1].is_last else None
        copies = None
        if finished is not None:
            tokens = max(int(c) + len(r.positions) for c, r in zip(finished.cached, finished.ranks, strict=True))
            copies = self._prepare_copies(finished.allocation.page_table, tokens, finished.allocation.row)
        ring_pass, rounds, logits, work = self._dispatch(stages, bucket, ids)
        pages, tails = ([], None) if copies is None else self._copy_kv(*copies)
        if finished is not None:
            scheduler.finish(finished)
        elapsed, worked = time.perf_counter() - begin, time.thread_time() - worked
        record = TickRecord(
            bucket=bucket,
            chunks=tuple(None if w is None else (w.request, w.start, w.num_tokens) for w in stages),
            ring_pass=ring_pass,
            rounds=rounds,
            host_s=worked,
            host_wait_s=max(elapsed - worked, 0.0),
            attention_blocks=np.zeros(0, np.int32),
            expert_rounds=0,
        )
        return _Dispatched(record, logits, work, finished, pages, tails)

    def _dispatch(
        self, stages: list[ChunkWork | None], bucket: int, ids: list[NDArray[np.int32]] | None = None
    ) -> tuple[str, int, jax.Array, StageWork]:
        """Dispatches a tick; returns what goes round the ring, in how many rounds, the logits and what devices did."""
        tick, _ = self._tick(bucket)
        slots = bucket // self.shape.ring
        packed = np.zeros(self.programs.packed_shape(bucket), np.int32)
        keys = 0
        for stage, work in enumerate(stages):
            if work is None:
                continue
            for rank, tokens in enumerate(work.ranks):
                table = work.allocation.page_table[rank]
                cached = int(work.cached[rank])
                packed[stage, rank] = pack_chunk(tokens, cached, work.allocation.row, table, slots)
                keys = max(keys, cached + len(tokens.positions))
        ring_pass, rounds = self.programs.ring_rounds(bucket, keys)
        incoming = np.zeros(1 + bucket, np.int32)
        incoming[0] = rounds
        if stages[0] is not None and ids is not None:
            for rank, tokens in enumerate(stages[0].ranks):
                first = 1 + rank * slots
                incoming[first : first + len(tokens.positions)] = ids[stages[0].request][tokens.positions]
        if self._state is None:
            self._state = self._make_state()
        state, self._state = self._state, None
        self._state, logits, work = tick(self._params, state, self._put(packed, P(PP, RING)), self._put(incoming))
        return ring_pass, rounds, logits, work

    def _tick(self, bucket: int) -> tuple[Any, int]:
        """The compiled tick of a bucket, and how many KV slots a rank sends in one round of the ring."""
        if bucket not in self._ticks:
            program = compile_program(
                lambda: self.programs.lower(bucket, self.mesh, self._graph, self._params),
                self.mesh,
                (self.programs, bucket, self._graph, *shapes_of(self._params)),
            )
            self._ticks[bucket] = program, self.programs.stage_spec(bucket).ring_block
        return self._ticks[bucket]

    def _put(self, array: NDArray[Any], spec: P = P()) -> jax.Array:  # noqa: B008 - immutable
        """Places an array that every process has."""
        sharding = jax.NamedSharding(self.mesh, spec)
        return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])

    def _prepare_copies(
        self, page_table: NDArray[np.int32], tokens: int, row: int = 0
    ) -> tuple[list[jax.Array], jax.Array]:
        """What `_copy_kv` takes, made before the tick is dispatched: on CPU, the host waits for the devices afterwards.

        Args:
          page_table: of the request.
          tokens: those of its fullest ring rank.
          row: of its window tails.
        """
        groups = -(-tokens // (self._group * self._cache_shape.page))
        table = np.full((len(page_table), groups, self._group), -1, np.int32)
        held = min(page_table.shape[1], groups * self._group)
        table.reshape(len(page_table), -1)[:, :held] = page_table[:, :held]
        ids = [self._put(table[:, g], P(RING)) for g in range(groups)]
        return ids, self._put(np.asarray(row, np.int32))

    def _copy_kv(self, ids: Sequence[jax.Array], row: jax.Array) -> tuple[list[jax.Array], jax.Array]:
        """Starts copying a request's KV out of the cache: its pages, some at a time, and its window tails."""
        assert self._state is not None
        pages = []
        for group in ids:
            copied, tails = self._read_pages(self._state.cache, group, row)
            pages.append(copied)
        return pages, tails

    def _result(
        self, request: ParsedRequest, ids: NDArray[np.int32], tick: _Dispatched, arrival: float
    ) -> PrefillResult:
        assert tick.finished is not None
        logits = np.asarray(tick.logits)[: self.config.vocab_size]
        token_id, error = NO_TOKEN, None
        try:
            token_id = sample_token(logits, request.temperature, request.top_p, request.top_k, request.seed)
        except ValueError as reason:  # the model gave something that is no number; other requests are not affected
            error = str(reason)
        ttft = time.perf_counter() - arrival
        return PrefillResult(
            request_id=request.request_id,
            num_tokens=len(ids),
            token_id=token_id,
            logits=logits,
            ttft_s=ttft,
            kv=self._prefill_kv(request.request_id, ids, token_id, tick),
            error=error,
        )

    def _prefill_kv(self, request_id: str, ids: NDArray[np.int32], token_id: int, tick: _Dispatched) -> PrefillKV:
        assert tick.tails is not None
        groups = [local_parts(group) for group in tick.pages]
        parts = PromptParts(
            pages={where: [group[where] for group in groups] for where in groups[0]},
            tails=local_parts(tick.tails),
            num_tokens=len(ids),
            chunk_tokens=self.chunk_tokens,
        )
        header = KVHeader.of_prompt(
            self.config,
            ids,
            first_token_id=token_id,
            dtype=self.dtype,
            model_fingerprint=self.model_fingerprint,
        )
        slots = self._group * self._cache_shape.page
        reader = PromptKVReader(parts, request_id, self.config, self._plan, self.mesh, self._gather, slots)
        return PrefillKV(header, reader, is_writer=jax.process_index() == 0)


def _digest(request: ParsedRequest) -> str:
    settings = f"{request.temperature} {request.top_p} {request.top_k} {request.seed}"
    ids = hash_token_ids(request.token_ids)[:16]
    return f"request {request.request_id}: {len(request.token_ids)} tokens, {ids}, sampling {settings}"


def _check_choice(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name}={value!r} is not supported; it must be one of {list(allowed)}")


def _check_positive(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be a positive integer, not {value!r}")
