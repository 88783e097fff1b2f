"""Operations, bytes in memory and bytes between devices, counted from sizes and lengths alone.

Everything that reports a rate, sizes a buffer or predicts a time takes its numbers from here. Operations are those of
the matrix products that the model needs, a multiply-add being two: what the mask or the router leaves out is not
counted, nor are norms, softmax, activations, biases and rotary embeddings, nor padding. Bytes between devices are those
that the compiled tick moves, padding included (see `slope_jax.execution.tick`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable

import jax.numpy as jnp
from jax.typing import DTypeLike

from slope_jax.mesh import all_reduce, ring_policy
from slope_jax.mesh.axes import AXES, PP, RING, SEQUENCE_AXES, ULYSSES, MeshShape
from slope_jax.model.config import FULL, SLIDING, GptOssConfig
from slope_jax.model.ops.mxfp4 import BLOCK, BLOCK_BYTES
from slope_jax.model.parallel.expert_parallel import ExchangeShape
from slope_jax.model.parallel.tensor_split import TensorSplit
from slope_jax.model.stage_plan import StagePlan

_FLOAT32 = _INT32 = 4  # bytes
_BFLOAT16 = 2
_WHOLE = TensorSplit()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Operations:
    """Floating-point operations by kind, of all layers together.

    Attributes:
      projections: into and out of attention.
      router: scores of the experts.
      experts: the experts that tokens are sent to, and no others.
      full_attention: scores and weighted values of full layers, of the keys that the causal mask lets through.
      window_attention: the same of sliding-window layers, of the keys in the window.
      unembedding: logits.
    """

    projections: int = 0
    router: int = 0
    experts: int = 0
    full_attention: int = 0
    window_attention: int = 0
    unembedding: int = 0

    @property
    def total(self) -> int:
        """All of them."""
        return sum(dataclasses.astuple(self))

    def __add__(self, other: Operations) -> Operations:
        mine, theirs = dataclasses.asdict(self), dataclasses.asdict(other)
        return Operations(**{kind: mine[kind] + theirs[kind] for kind in mine})


def visible_keys(start: int, length: int, window: int | None = None) -> int:
    """(query, key) pairs that the mask lets through, for queries at positions `start` to `start + length - 1`.

    A query at position i sees i + 1 keys, at most `window` of them.
    """
    return _pairs_before(start + length, window) - _pairs_before(start, window)


def chunk_operations(config: GptOssConfig, start: int, length: int, *, is_last: bool) -> Operations:
    """The operations of a chunk of `length` tokens after `start` tokens of the same prompt that are in the cache.

    Args:
      config: the model.
      start: tokens before the chunk.
      length: tokens of the chunk.
      is_last: whether the prompt ends with the chunk, so that the logits of its last token are needed.
    """
    c = config
    full, sliding = (c.layer_types.count(kind) for kind in (FULL, SLIDING))
    tokens_in_layers = length * c.num_layers
    pair = 4 * c.num_heads * c.head_dim  # a score and a weighted value for every query head
    return Operations(
        projections=tokens_in_layers * 2 * _projection_weights(c),
        router=tokens_in_layers * 2 * c.hidden_size * c.num_experts,
        experts=tokens_in_layers * 2 * c.experts_per_token * _expert_weights(c),
        full_attention=full * pair * visible_keys(start, length),
        window_attention=sliding * pair * visible_keys(start, length, c.sliding_window),
        unembedding=2 * c.hidden_size * c.vocab_size if is_last else 0,
    )


def prompt_operations(config: GptOssConfig, num_tokens: int, cached: int = 0) -> Operations:
    """The operations of the prefill of a prompt, of which the first `cached` tokens need no computation."""
    return chunk_operations(config, cached, num_tokens - cached, is_last=True)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WeightBytes:
    """Bytes of weights by part.

    Attributes:
      attention: projections, sinks and norms.
      router: routers and norms.
      experts: kernels and biases of the experts.
      embedding: of tokens.
      unembedding: to logits, with the final norm.
    """

    attention: int
    router: int
    experts: int
    embedding: int
    unembedding: int

    @property
    def total(self) -> int:
        """All parts together."""
        return sum(dataclasses.astuple(self))


def checkpoint_bytes(config: GptOssConfig, *, packed: bool) -> WeightBytes:
    """Bytes of the tensors of a published checkpoint: bfloat16, the kernels of experts in MXFP4 when `packed`."""
    embedding = config.vocab_size * config.hidden_size * _BFLOAT16
    return _weight_bytes(
        config,
        layers=config.num_layers,
        kernel=_BFLOAT16,
        vector=_BFLOAT16,
        packed=packed,
        embedding=embedding,
        unembedding=embedding,
    )


def device_weight_bytes(
    config: GptOssConfig,
    plan: StagePlan,
    shape: MeshShape,
    dtype: DTypeLike,
    *,
    packed: bool,
    expert_parallel: bool = False,
    split: TensorSplit = _WHOLE,
) -> WeightBytes:
    """Bytes of the weights that each device of a mesh holds, those of empty slots included (see `model.gpt_oss`).

    Args:
      config: the model.
      plan: the layers of each pipeline stage.
      shape: the mesh.
      dtype: of kernels and embeddings; norms, biases and sinks are float32.
      packed: whether the kernels of experts are in MXFP4.
      expert_parallel: whether the experts are split over the ulysses axis.
      split: over how many ulysses ranks the layers are.
    """
    devices = shape.num_devices
    itemsize = jnp.dtype(dtype).itemsize
    whole = _weight_bytes(
        split.share(config),
        layers=len(plan.pattern),
        kernel=itemsize,
        vector=_FLOAT32,
        packed=packed,
        embedding=config.vocab_size * _share(config.hidden_size, devices) * itemsize,
        unembedding=_share(config.vocab_size, devices) * config.hidden_size * itemsize,
    )
    return dataclasses.replace(whole, experts=whole.experts // (shape.ulysses if expert_parallel else 1))


def kv_bytes_per_token(config: GptOssConfig, dtype: DTypeLike) -> int:
    """Bytes of keys and values that a token adds to a prompt's KV on all devices together: those of full layers."""
    return config.layer_types.count(FULL) * 2 * config.num_kv_heads * config.head_dim * jnp.dtype(dtype).itemsize


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CacheBytes:
    """What the KV cache of a device is made of.

    Attributes:
      slot: bytes of a token slot, in all full layers of a stage and with its position.
      request: bytes of the window tails of a request that is under way.
    """

    slot: int
    request: int


def cache_bytes(config: GptOssConfig, plan: StagePlan, shape: MeshShape, dtype: DTypeLike) -> CacheBytes:
    """Bytes of a slot and of a request in the cache of a device (see `slope_jax.kv.pool`)."""
    full, sliding = (plan.pattern.count(kind) for kind in (FULL, SLIDING))
    kv = _device_kv_heads(config, shape) * config.head_dim * jnp.dtype(dtype).itemsize
    return CacheBytes(slot=full * kv + _INT32, request=sliding * config.sliding_window * kv)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ActivationBytes:
    """Bytes of the arrays of a device that grow with the tokens of a chunk; compiled programs need some more.

    Attributes:
      residual: the residual stream, float32.
      hand_off: the residual stream that enters the stage at the next tick.
      attention: queries, new keys and values, and the float32 result with its maximum and sum.
      experts: normalised input, and the float32 output of every expert of every token.
      all_reduce: what a device sends and receives in a sum of tensor parallelism.
    """

    residual: int
    hand_off: int
    attention: int
    experts: int
    all_reduce: int = 0

    @property
    def peak(self) -> int:
        """The most that is needed at once: attention, experts and sums take turns."""
        return self.residual + self.hand_off + max(self.attention, self.experts, self.all_reduce)


def activation_bytes(
    config: GptOssConfig, shape: MeshShape, bucket: int, dtype: DTypeLike, split: TensorSplit = _WHOLE
) -> ActivationBytes:
    """Bytes of activations of a device while it works on a chunk padded to `bucket` tokens."""
    c, itemsize = config, jnp.dtype(dtype).itemsize
    slots = bucket // shape.ring
    rows = slots // (shape.ulysses // split.ranks)
    heads = c.num_heads // shape.ulysses
    return ActivationBytes(
        residual=rows * c.hidden_size * _FLOAT32,
        hand_off=rows * c.hidden_size * _FLOAT32,
        attention=slots * (heads + _device_kv_heads(c, shape)) * c.head_dim * itemsize
        + slots * heads * (c.head_dim + 2) * _FLOAT32,
        experts=rows * c.hidden_size * (itemsize + c.experts_per_token * _FLOAT32),
        all_reduce=sum(
            step.operand_bytes * (1 + (split.ranks if step.operation == "all_gather" else 1))
            for step in _sums(c, rows, itemsize, split)
        ),
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """An exchange that every device takes part in, one or several times in a tick.

    Attributes:
      purpose: what it is for.
      scope: the named scope that it has in the compiled program, "" for what the compiler adds to gather the outputs.
      operation: "all_to_all", "ppermute", "all_gather" or "psum".
      axes: the mesh axes that it runs over.
      layer: the kind of the layers that it belongs to, None outside of layers.
      count: how often a tick does it.
      operand_bytes: bytes of its operand on a device.
      sent_bytes: bytes that leave a device each time (the one that sends most), by the ring algorithm for "all_gather"
        and "psum".
    """

    purpose: str
    scope: str
    operation: str
    axes: tuple[str, ...]
    layer: str | None
    count: int
    operand_bytes: int
    sent_bytes: int

    @property
    def total_sent_bytes(self) -> int:
        """Bytes that leave a device in a tick."""
        return self.count * self.sent_bytes


def sent_bytes(operation: str, operand_bytes: int, ranks: int) -> int:
    """Bytes that leave a device in an exchange of `ranks` devices (see `Collective.sent_bytes`)."""
    return {
        "all_to_all": operand_bytes * (ranks - 1) // ranks,
        "ppermute": operand_bytes,
        "all_gather": operand_bytes * (ranks - 1),
        "psum": 2 * operand_bytes * (ranks - 1) // ranks,
        "psum_scatter": operand_bytes * (ranks - 1) // ranks,
    }[operation]


@dataclasses.dataclass(frozen=True, slots=True)
class Traffic:
    """The exchanges of a tick; those over a single rank, which move nothing, are left out."""

    collectives: tuple[Collective, ...]

    def sent_bytes(self, *, axes: Iterable[str] | None = None, layer: str | None = None) -> int:
        """Bytes that leave a device in a tick, over the given axes and in layers of the given kind if any are given."""
        wanted = None if axes is None else tuple(axes)
        return sum(
            c.total_sent_bytes for c in self.collectives if wanted in (None, c.axes) and layer in (None, c.layer)
        )


def tick_traffic(
    config: GptOssConfig,
    plan: StagePlan,
    shape: MeshShape,
    dtype: DTypeLike,
    *,
    bucket: int,
    ring_block: int,
    rounds: int,
    ring_pass: str = ring_policy.KV,
    expert_parallel: bool = False,
    expert_rounds: int = 1,
    split: TensorSplit = _WHOLE,
) -> Traffic:
    """What a device sends in a tick.

    Empty slots of a stage take part in every exchange, and padding is sent like tokens.

    Args:
      config: the model.
      plan: the layers of each pipeline stage.
      shape: the mesh.
      dtype: of weights and KV.
      bucket: tokens that chunks are padded to.
      ring_block: KV slots that a rank sends in one round of the ring.
      rounds: rounds in which KV goes round the ring.
      ring_pass: what goes round the ring, keys and values or queries (see `mesh.pass_choice`).
      expert_parallel: whether the experts are split over the ulysses axis.
      expert_rounds: rounds of the exchange of expert parallelism in a layer; balanced routing takes one.
      split: over how many ulysses ranks the layers are.
    """
    c, itemsize = config, jnp.dtype(dtype).itemsize
    sizes = {PP: shape.pp, RING: shape.ring, ULYSSES: shape.ulysses}
    rows = bucket // (shape.ring * shape.ulysses)
    columns = _share(c.hidden_size, shape.num_devices) * itemsize  # of the embedding of a token
    found: list[Collective] = []

    def add(
        purpose: str,
        scope: str,
        operation: str,
        axes: tuple[str, ...],
        operand: int,
        count: int = 1,
        layer: str | None = None,
    ) -> None:
        ranks = math.prod(sizes[axis] for axis in axes)
        if ranks > 1 and count:
            found.append(
                Collective(
                    purpose=purpose,
                    scope=scope,
                    operation=operation,
                    axes=axes,
                    layer=layer,
                    count=count,
                    operand_bytes=operand,
                    sent_bytes=sent_bytes(operation, operand, ranks),
                )
            )

    stage_devices, sequence_ranks = shape.ring * shape.ulysses, shape.ulysses // split.ranks
    add("embedding to its tokens", "embed", "all_to_all", SEQUENCE_AXES, stage_devices * rows * columns)
    add("embedding of all stages", "embed", "all_gather", (PP,), rows * stage_devices * columns)
    if split.ranks > 1:
        add("embedding of all ranks", "embed", "all_gather", (ULYSSES,), rows * c.hidden_size * itemsize)
    held = bucket // (shape.ring * sequence_ranks)  # tokens whose residual stream a device has
    sums = _sums(c, held, itemsize, split)
    for kind in (SLIDING, FULL):
        layers = plan.pattern.count(kind)
        # Above the number of KV heads, each of them is sent to several ranks.
        heads = c.num_heads + 2 * max(c.num_kv_heads, shape.ulysses)
        exchanges = layers if sequence_ranks > 1 else 0
        operand = rows * heads * c.head_dim * itemsize
        add("sequence to heads", "project_in", "all_to_all", (ULYSSES,), operand, exchanges, kind)
        kv = _device_kv_heads(c, shape) * c.head_dim * itemsize
        if kind == FULL and ring_pass == ring_policy.KV:
            hops = layers * rounds * (shape.ring - 1)
            add("ring, KV", "pass_kv", "ppermute", (RING,), ring_block * kv, hops, kind)
            add("ring, positions", "pass_kv", "ppermute", (RING,), ring_block * _INT32, hops, kind)
        elif kind == FULL:
            hops, slots, heads = layers * (shape.ring - 1), rows * shape.ulysses, c.num_heads // shape.ulysses
            add("ring, queries", "pass_q", "ppermute", (RING,), slots * heads * c.head_dim * itemsize, hops, kind)
            # With them goes how many there are, and where the gap in them is.
            add("ring, positions", "pass_q", "ppermute", (RING,), (slots + 2) * _INT32, hops, kind)
            scores = slots * heads * _FLOAT32
            add("ring, weighted values", "pass_q", "ppermute", (RING,), scores * c.head_dim, hops, kind)
            add("ring, maxima and sums", "pass_q", "ppermute", (RING,), scores, 2 * hops, kind)
        else:
            # One to the rank above and one to the rank below.
            add("halo", "window_attention", "ppermute", (RING,), (c.sliding_window - 1) * kv, 2 * layers, kind)
        operand = rows * c.num_heads * c.head_dim * itemsize
        add("heads to sequence", "project_out", "all_to_all", (ULYSSES,), operand, exchanges, kind)
        for scope, part in (("project_out", "attention"), ("experts", "experts")):
            for step in sums:
                add(f"sum of {part}", scope, step.operation, (ULYSSES,), step.operand_bytes, layers, kind)
        if expert_parallel and shape.ulysses > 1:
            exchange = ExchangeShape.of(c, rows, shape.ulysses, dtype)
            times = layers * expert_rounds
            add("tokens to experts", "experts", "all_to_all", (ULYSSES,), exchange.dispatch_bytes, times, kind)
            add("experts to tokens", "experts", "all_to_all", (ULYSSES,), exchange.combine_bytes, times, kind)
            add("rounds of experts", "experts", "psum", AXES, _INT32, layers, kind)
    add("last token", "unembed", "psum", AXES, c.hidden_size * _FLOAT32)
    add("logits", "", "all_gather", AXES, _share(c.vocab_size, shape.num_devices) * _FLOAT32)
    for count in ("attention blocks", "rounds of experts"):
        gathered = _INT32
        for axis in (ULYSSES, RING, PP):
            add(count, "", "all_gather", (axis,), gathered)
            gathered *= sizes[axis]
    add("hand-off", "hand_off", "ppermute", (PP,), held * c.hidden_size * _FLOAT32)
    return Traffic(tuple(found))


def _pairs_before(end: int, window: int | None) -> int:
    """(query, key) pairs of all queries before position `end`."""
    ramp = end if window is None else min(end, window)
    return ramp * (ramp + 1) // 2 + (end - ramp) * (window or 0)


def _projection_weights(config: GptOssConfig) -> int:
    """Weights of the projections into and out of attention, of one layer."""
    heads_in, heads_out = config.num_heads + 2 * config.num_kv_heads, config.num_heads
    return config.hidden_size * (heads_in + heads_out) * config.head_dim


def _expert_weights(config: GptOssConfig) -> int:
    """Weights of one expert: gate, up and down."""
    return 3 * config.hidden_size * config.intermediate_size


def _weight_bytes(
    config: GptOssConfig, *, layers: int, kernel: int, vector: int, packed: bool, embedding: int, unembedding: int
) -> WeightBytes:
    """Bytes by part for kernels and vectors of `kernel` and `vector` bytes an element."""
    c = config
    attention_vectors = (c.num_heads + 2 * c.num_kv_heads) * c.head_dim + c.num_heads + 2 * c.hidden_size
    expert_kernels = _expert_weights(c) * kernel if not packed else _expert_weights(c) // BLOCK * (BLOCK_BYTES + 1)
    expert_vectors = 2 * c.intermediate_size + c.hidden_size
    return WeightBytes(
        attention=layers * (_projection_weights(c) * kernel + attention_vectors * vector),
        router=layers * (c.hidden_size * c.num_experts * kernel + (c.num_experts + c.hidden_size) * vector),
        experts=layers * c.num_experts * (expert_kernels + expert_vectors * vector),
        embedding=embedding,
        unembedding=unembedding + c.hidden_size * vector,
    )


def _sums(config: GptOssConfig, rows: int, itemsize: int, split: TensorSplit) -> tuple[all_reduce.Step, ...]:
    """The collectives of a sum of tensor parallelism, of so many tokens."""
    if split.ranks == 1:
        return ()
    return all_reduce.steps(split.form, rows * config.hidden_size, itemsize, split.ranks)


def _device_kv_heads(config: GptOssConfig, shape: MeshShape) -> int:
    """Key heads and value heads of a device, together."""
    return 2 * max(config.num_kv_heads // shape.ulysses, 1)


def _share(size: int, devices: int) -> int:
    """The part of an axis that one device holds, the axis padded to a multiple of the devices."""
    return -(-size // devices)
