"""Times of single operations of a model: attention, experts, unpacking of MXFP4, and the exchanges of a tick."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from slope_jax.engine import Engine
from slope_jax.launch.bench.timing import timed
from slope_jax.launch.random_weights import RandomSource
from slope_jax.mesh.axes import PER_DEVICE, MeshShape, make_mesh
from slope_jax.mesh.layout import PAD_POSITION, ChunkView
from slope_jax.mesh.processes import distributed
from slope_jax.model.checkpoint import weights
from slope_jax.model.config import FULL, SLIDING, GptOssConfig
from slope_jax.model.counts.cost import Collective, chunk_operations
from slope_jax.model.ops import mxfp4
from slope_jax.model.ops.attention import xla
from slope_jax.model.stage_plan import plan_stages
from slope_jax.model.storage import to_bits

FULL_ATTENTION, WINDOW_ATTENTION = "full_attention", "window_attention"
EXPERTS, PACKED_EXPERTS, UNPACK = "experts", "experts_mxfp4", "unpack_mxfp4"
MIN_SECONDS = 0.3  # an operation is repeated until it takes this long


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OperationCase:
    """An operation on one device, as in one layer.

    Attributes:
      operation: its name.
      tokens: how many tokens it works on; not used by those that work on weights.
    """

    operation: str
    tokens: int


CASES = (
    OperationCase(operation=FULL_ATTENTION, tokens=1024),
    OperationCase(operation=FULL_ATTENTION, tokens=8192),
    OperationCase(operation=WINDOW_ATTENTION, tokens=8192),
    OperationCase(operation=EXPERTS, tokens=512),
    OperationCase(operation=EXPERTS, tokens=4096),
    OperationCase(operation=PACKED_EXPERTS, tokens=512),
    OperationCase(operation=PACKED_EXPERTS, tokens=4096),
    OperationCase(operation=UNPACK, tokens=0),
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Operation:
    """An operation that can be run.

    Attributes:
      program: the compiled function.
      arguments: what it is called with.
      operations: floating-point operations that it needs, 0 if it does none.
      num_bytes: bytes that it writes or sends.
    """

    program: Callable[..., jax.Array]
    arguments: tuple[Any, ...]
    operations: int
    num_bytes: int

    def __call__(self) -> jax.Array:
        """Runs it to the end."""
        return jax.block_until_ready(self.program(*self.arguments))


def build(
    case: OperationCase, config: GptOssConfig, dtype: Any, device: jax.Device, blocks: tuple[int, int]
) -> Operation:
    """Makes the operation of a case, with random numbers, on one device.

    Args:
      case: the operation.
      config: the model; its first layer stands for all.
      dtype: bfloat16 or float32.
      device: where to run.
      blocks: query slots and keys in a block of xla.

    Raises:
      ValueError: there is no such operation.
    """
    mesh = make_mesh(MeshShape(), [device])
    if case.operation == FULL_ATTENTION:
        return _attention(config, case.tokens, None, dtype, mesh, blocks)
    if case.operation == WINDOW_ATTENTION:
        return _attention(config, case.tokens, config.sliding_window, dtype, mesh, blocks)
    if case.operation in (EXPERTS, PACKED_EXPERTS):
        return _experts(config, case.tokens, dtype, mesh, packed=case.operation == PACKED_EXPERTS)
    if case.operation == UNPACK:
        return _unpack(config, dtype, device)
    raise ValueError(f"there is no operation {case.operation!r}")


def _attention(
    config: GptOssConfig, tokens: int, window: int | None, dtype: Any, mesh: Mesh, blocks: tuple[int, int]
) -> Operation:
    """Causal attention of all heads; takes queries `[T, N, H]`, keys, values `[T, K, H]` and sinks `[N]` in float32."""
    N, K, H = config.num_heads, config.num_kv_heads, config.head_dim
    block_q, block_kv = (min(block, tokens) for block in blocks)
    spec = xla.AttentionSpec(block_q=block_q, block_kv=block_kv, window=window)
    padding = spec.padding(tokens)

    def run(q_TNH: jax.Array, k_TKH: jax.Array, v_TKH: jax.Array, sinks_N: jax.Array) -> jax.Array:
        q_TNH = to_bits((q_TNH / math.sqrt(H)).astype(dtype))
        q_KTGH = jnp.pad(q_TNH, [(0, block_q), (0, 0), (0, 0)]).reshape(tokens + block_q, K, N // K, H).swapaxes(0, 1)
        kv_TJH = to_bits(jnp.concatenate([k_TKH, v_TKH], axis=1).astype(dtype))
        kv_JSH = jnp.pad(kv_TJH, [(0, padding), (0, 0), (0, 0)]).swapaxes(0, 1)
        zero, count = jnp.int32(0), jnp.int32(tokens)
        positions_T = jnp.arange(tokens, dtype=jnp.int32)
        chunk = ChunkView(count, count, zero, zero, positions_T, jnp.zeros(1, jnp.int32))
        partial = xla.attend(
            xla.start_partial(sinks_N, tokens, K, H, spec),
            q_KTGH,
            jnp.pad(positions_T, (0, block_q), constant_values=PAD_POSITION),
            xla.QueryBlocks.of(chunk, block_q),
            kv_JSH,
            jnp.pad(positions_T, (0, padding), constant_values=PAD_POSITION),
            spec,
        )
        return xla.finish_partial(partial, tokens)[None, None, None]

    random = np.random.default_rng(tokens)
    shapes = [(tokens, N, H), (tokens, K, H), (tokens, K, H), (N,)]
    arrays = [random.standard_normal(shape, dtype=np.float32) for shape in shapes]
    needed = chunk_operations(_one_layer(config, SLIDING if window else FULL), 0, tokens, is_last=False)
    return Operation(
        program=_on_each_device(run, mesh, (P(),) * 4),
        arguments=_replicate(mesh, arrays),
        operations=needed.full_attention + needed.window_attention,
        num_bytes=tokens * N * H * 4,
    )


def _experts(config: GptOssConfig, tokens: int, dtype: Any, mesh: Mesh, *, packed: bool) -> Operation:
    """Norm, router and experts of one layer; takes the weights and the residual stream `[T, D]`."""
    layer = _one_layer(config, FULL)
    plan = plan_stages(layer.layer_types, 1)
    graph, params = weights.load_model(RandomSource(layer), layer, plan, mesh, dtype, packed)

    def run(params: nnx.State, x_TD: jax.Array) -> jax.Array:
        moe = nnx.merge(graph, params).layers[0].moe
        moe_graph, moe_params = nnx.split(moe)
        moe = nnx.merge(moe_graph, jax.tree.map(lambda a: a[0], moe_params))  # the stage axis taken off
        out = moe(x_TD, jnp.ones(tokens, bool), jnp.int32(0))
        return jax.tree.leaves(out)[0][None, None, None]

    x = np.random.default_rng(tokens).standard_normal((tokens, config.hidden_size), dtype=np.float32)
    specs = jax.tree.map(lambda a: a.sharding.spec, params)
    needed = chunk_operations(layer, 0, tokens, is_last=False)
    return Operation(
        program=_on_each_device(run, mesh, (specs, P())),
        arguments=(params, *_replicate(mesh, [x])),
        operations=needed.experts + needed.router,
        num_bytes=tokens * config.hidden_size * 4,
    )


def _unpack(config: GptOssConfig, dtype: Any, device: jax.Device) -> Operation:
    """Unpacks the first product of all experts of a layer; takes blocks and scales."""
    source = RandomSource(_one_layer(config, FULL))
    names = ("gate_up_proj_blocks", "gate_up_proj_scales")
    packed = tuple(jax.device_put(source.read(f"model.layers.0.mlp.experts.{name}"), device) for name in names)
    values = config.num_experts * 2 * config.intermediate_size * config.hidden_size
    return Operation(
        program=jax.jit(lambda blocks, scales: to_bits(mxfp4.unpack(blocks, scales, dtype))),
        arguments=packed,
        operations=0,
        num_bytes=values * jnp.dtype(dtype).itemsize,
    )


def exchange(collective: Collective, mesh: Mesh) -> Operation:
    """An exchange over axes of a mesh, with as many bytes as a tick moves at a time."""
    sizes = dict(zip(mesh.axis_names, mesh.devices.shape, strict=True))
    axes, ranks = collective.axes, math.prod(sizes[axis] for axis in collective.axes)
    count = -(-collective.operand_bytes // 4 // ranks) * ranks or ranks

    def run(x: jax.Array) -> jax.Array:
        x = x.reshape(-1)
        if collective.operation == "all_to_all":
            y = jax.lax.all_to_all(x, axes, 0, 0, tiled=True)
        elif collective.operation == "ppermute":
            y = jax.lax.ppermute(x, axes, [(rank, (rank + 1) % ranks) for rank in range(ranks)])
        elif collective.operation == "all_gather":
            y = jax.lax.all_gather(x, axes, tiled=True)
        else:
            y = jax.lax.psum(x, axes)
        return y[None, None, None]

    shape = (*mesh.devices.shape, count)
    x = jax.make_array_from_callback(
        shape, NamedSharding(mesh, PER_DEVICE), lambda index: np.ones(shape, np.float32)[index]
    )
    return Operation(
        program=_on_each_device(run, mesh, (PER_DEVICE,)),
        arguments=(x,),
        operations=0,
        num_bytes=collective.sent_bytes,
    )


def rows(engine: Engine, peak: Callable[[], float], max_tries: int) -> Iterator[dict[str, Any]]:
    """Measures the operations of a device and, on a mesh of several, the exchanges of a tick; one row each.

    Args:
      engine: gives the model, the mesh and the sizes.
      peak: gives the machine's peak.
      max_tries: how often a time is taken at most, while the machine is not steady.
    """
    dtype = jnp.dtype(engine.dtype)
    if engine.shape.num_devices == 1:
        device = engine.mesh.devices.flat[0]
        for case in CASES:
            operation = build(case, engine.config, dtype, device, engine.attention_blocks)
            yield {"operation": case.operation, "tokens": case.tokens} | _time(operation, peak, max_tries)
    for collective in engine.traffic().collectives:
        yield {
            "operation": collective.operation,
            "purpose": collective.purpose,
            "axes": list(collective.axes),
            "layer": collective.layer,
            "per_tick": collective.count,
            "operand_bytes": collective.operand_bytes,
        } | _time(exchange(collective, engine.mesh), peak, max_tries)


def _time(operation: Operation, peak: Callable[[], float], max_tries: int) -> dict[str, Any]:
    operation()  # compiles
    begin = time.perf_counter()
    operation()
    calls = max(1, math.ceil(MIN_SECONDS / max(time.perf_counter() - begin, 1e-6)))
    calls = int(distributed.broadcast("calls", str(calls)))

    def run() -> None:
        for _ in range(calls):
            operation()

    found = timed(run, peak, max_tries)
    seconds = found.seconds / calls
    row: dict[str, Any] = {"calls": calls, "seconds": seconds, "gbyte_per_s": operation.num_bytes / seconds / 1e9}
    if operation.operations:
        row |= {
            "tflop_per_s": operation.operations / seconds / 1e12,
            "share_of_peak": operation.operations / seconds / found.peak,
        }
    return row | {"peak_tflop_per_s": found.peak / 1e12, "tries": found.tries, "steady": found.is_steady}


def _one_layer(config: GptOssConfig, kind: str) -> GptOssConfig:
    return dataclasses.replace(config, layer_types=(kind,))


def _on_each_device(run: Callable[..., jax.Array], mesh: Mesh, in_specs: tuple[Any, ...]) -> Callable[..., jax.Array]:
    # Some exchanges give all devices the same, which out_specs does not say.
    return jax.jit(jax.shard_map(run, mesh=mesh, in_specs=in_specs, out_specs=PER_DEVICE, check_vma=False))


def _replicate(mesh: Mesh, arrays: Sequence[np.ndarray]) -> tuple[jax.Array, ...]:
    return tuple(jax.device_put(array, NamedSharding(mesh, P())) for array in arrays)
