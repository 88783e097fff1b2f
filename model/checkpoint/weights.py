"""From the tensors of a checkpoint to the sharded parameters of `GptOss`.

Every process reads only the bytes that its own devices need, and each of them once. Tensor parallelism is different in
that several ranks may have a KV head, and that what is scattered over an expert is cut out of the whole expert. Large
shards are built piece by piece, so that the host never holds more than a few pieces beside the device arrays, and in
jitted functions that unpack, transpose and de-interleave on the device.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.typing import DTypeLike
from tqdm import tqdm

from slope_jax.mesh.axes import ULYSSES
from slope_jax.model.checkpoint import orbax
from slope_jax.model.checkpoint.placement import Index, Make, ShardBuilder, assemble, local_shards
from slope_jax.model.checkpoint.safetensors import (
    BFLOAT16,
    Checkpoint,
    TensorSource,
    expected_tensors,
    slice_bounds,
)
from slope_jax.model.config import GptOssConfig
from slope_jax.model.gpt_oss import GptOss, abstract_model
from slope_jax.model.ops import mxfp4
from slope_jax.model.parallel.tensor_split import TensorSplit
from slope_jax.model.stage_plan import StagePlan
from slope_jax.model.storage import value_dtype

PIECE_BYTES = 64 << 20  # about what is read or made at a time of a large parameter


def open_source(directory: str | os.PathLike[str] | TensorSource) -> TensorSource:
    """Opens a folder of safetensors files, or one that `orbax.convert` wrote, and checks that it is complete.

    A source that is open already is returned as it is.

    Raises:
      ValueError: as `Checkpoint.open` or `orbax.ConvertedCheckpoint.open`.
    """
    if not isinstance(directory, str | os.PathLike):
        return directory
    if orbax.is_converted(directory):
        return orbax.ConvertedCheckpoint.open(directory)
    return Checkpoint.open(os.fspath(directory))


def model_fingerprint(source: TensorSource) -> str:
    """A hash of the hyperparameters and of the first row of every tensor but the experts' products.

    It tells two sets of weights of one architecture apart, at the price of a few kilobytes a tensor, and is the same
    for all forms in which the experts of a model can be stored.
    """
    digest = hashlib.sha256(source.config.fingerprint().encode())
    names = expected_tensors(source.config, source.quantized)
    for name in sorted(n for n in names if not n.endswith(("_proj", "_blocks", "_scales"))):
        digest.update(name.encode())
        digest.update(source.read(name, slice(0, 1 if len(source.shape(name)) > 1 else None)).astype("<f4").tobytes())
    return digest.hexdigest()


def load_model(
    source: TensorSource,
    config: GptOssConfig,
    plan: StagePlan,
    mesh: Mesh,
    dtype: DTypeLike,
    packed: bool,
    expert_parallel: bool = False,
    split: TensorSplit = TensorSplit(),  # noqa: B008 - frozen
) -> tuple[nnx.GraphDef[GptOss], nnx.State]:
    """Reads what the devices of this process need and places it on the mesh.

    Args:
      source: a checked checkpoint.
      config: hyperparameters, of the same sizes as the checkpoint's.
      plan: which layers each pipeline stage holds.
      mesh: the mesh, made by `make_mesh`.
      dtype: bfloat16 or float32, of the kernels, the embedding and the unembedding.
      packed: whether expert weights stay in MXFP4.
      expert_parallel: whether the experts are split over the ulysses axis.
      split: over how many ulysses ranks the layers are.

    Returns:
      The graph definition of `GptOss` and its state, with the shardings that `abstract_model` declares. MXFP4 weights
      and bfloat16 tensors convert exactly; float32 tensors round to the nearest bfloat16, ties to even.

    Raises:
      ValueError: another dtype, a checkpoint that does not suit `config`, `dtype` or `packed`, a plan of other layers,
        experts or layers that cannot be split, or an MXFP4 scale that is not a number.
    """
    _check_request(source, config, plan, dtype, packed)
    graph, state = abstract_model(config, plan, mesh, dtype, packed, expert_parallel, split)
    leaves, treedef = jax.tree_util.tree_flatten_with_path(state)
    params = [
        _Parameter(_leaf_name(path), leaf.shape, leaf.dtype, NamedSharding(mesh, leaf.sharding.spec))
        for path, leaf in leaves
    ]
    # disable=None shows the bar only when standard error is a terminal.
    with tqdm(desc="weights", unit="B", unit_scale=True, disable=None if jax.process_index() == 0 else True) as bar:
        loader = _Loader(source, plan, split, bar.update)
        bar.total = sum(loader.nbytes(param) for param in params)
        arrays = [loader.load(param) for param in params]
    return graph, jax.tree_util.tree_unflatten(treedef, arrays)


def _check_request(source: TensorSource, config: GptOssConfig, plan: StagePlan, dtype: DTypeLike, packed: bool) -> None:
    if jnp.dtype(dtype) not in (BFLOAT16, np.float32):
        raise ValueError(f"dtype must be bfloat16 or float32, not {jnp.dtype(dtype)}")
    source.check_dtype(jnp.dtype(dtype))
    if packed and not source.quantized:
        raise ValueError("expert weights cannot stay in MXFP4: the experts of the checkpoint are not quantised")
    given, stored = (expected_tensors(c, source.quantized) for c in (config, source.config))
    for name in [*stored, *given]:
        if stored.get(name) != given.get(name):
            raise ValueError(f"the configuration is not of the model in the checkpoint: they differ in tensor {name}")
    placed = sorted(layer for stage in plan.layers for layer in stage if layer is not None)
    if placed != list(range(config.num_layers)):
        raise ValueError(f"the stage plan places layers {placed}, but the model has {config.num_layers} layers")
    for stage in plan.layers:
        for kind, layer in zip(plan.pattern, stage, strict=True):
            if layer is not None and config.layer_types[layer] != kind:
                raise ValueError(
                    f"the stage plan has layer {layer} in a slot for {kind}, but it is {config.layer_types[layer]}"
                )


def _leaf_name(path: Sequence[Any]) -> str:
    """`layers.3.attention.norm` for a path of tree keys."""
    return ".".join(str(key.key) for key in path if isinstance(key, jax.tree_util.DictKey))


def _suffix(name: str) -> str:
    """The name of a layer's tensor without `model.layers.{i}.`."""
    return name.split(".", 3)[3]


def _cast(array: np.ndarray, dtype: Any) -> np.ndarray:
    """Floats in another type. On the host, because a device may flush subnormal numbers to zero on the way."""
    return array if array.dtype == np.uint8 else array.astype(dtype, copy=False)


def _keep(x: jax.Array, *, dtype: Any) -> jax.Array:
    return x


def _split_rows(x: jax.Array, *, dtype: Any) -> jax.Array:
    """Rows that alternate gate, up, gate, up, ... as all gates, then all ups."""
    return jnp.concatenate([x[:, 0::2], x[:, 1::2]], axis=1)


def _split_columns(x: jax.Array, *, dtype: Any) -> jax.Array:
    return jnp.concatenate([x[..., 0::2], x[..., 1::2]], axis=-1)


def _unpack(blocks: jax.Array, scales: jax.Array, *, dtype: Any) -> jax.Array:
    return mxfp4.unpack(blocks, scales, dtype).swapaxes(1, 2)


def _unpack_and_split(blocks: jax.Array, scales: jax.Array, *, dtype: Any) -> jax.Array:
    return _unpack(_split_rows(blocks, dtype=dtype), _split_rows(scales, dtype=dtype), dtype=dtype)


# What the parameters of a layer are made of: tensors of the checkpoint that are read wholly, and a function of them.
_WHOLE: dict[str, tuple[tuple[str, ...], Callable[..., np.ndarray]]] = {
    "attention.norm": (("input_layernorm.weight",), np.asarray),
    "attention.qkv_kernel": (
        ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"),
        lambda q, k, v: np.concatenate([q, k, v]).T,
    ),
    "attention.qkv_bias": (
        ("self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias"),
        lambda q, k, v: np.concatenate([q, k, v]),
    ),
    "attention.sinks": (("self_attn.sinks",), np.asarray),
    "attention.out_kernel": (("self_attn.o_proj.weight",), np.transpose),
    "attention.out_bias": (("self_attn.o_proj.bias",), np.asarray),
    "moe.norm": (("post_attention_layernorm.weight",), np.asarray),
    "moe.router_kernel": (("mlp.router.weight",), np.transpose),
    "moe.router_bias": (("mlp.router.bias",), np.asarray),
    "moe.experts.gate_up_bias": (
        ("mlp.experts.gate_up_proj_bias",),
        lambda bias: np.concatenate([bias[:, 0::2], bias[:, 1::2]], axis=1),
    ),
    "moe.experts.down_bias": (("mlp.experts.down_proj_bias",), np.asarray),
}

# The same for expert weights, which are read some experts at a time: tensors without their common prefix.
_PACKED: dict[str, tuple[tuple[str, ...], Make]] = {
    "moe.experts.gate_up_blocks": (("gate_up_proj_blocks",), _split_rows),
    "moe.experts.gate_up_scales": (("gate_up_proj_scales",), _split_rows),
    "moe.experts.down_blocks": (("down_proj_blocks",), _keep),
    "moe.experts.down_scales": (("down_proj_scales",), _keep),
}
_UNPACKED: dict[str, tuple[tuple[str, ...], Make]] = {
    "moe.experts.gate_up": (("gate_up_proj_blocks", "gate_up_proj_scales"), _unpack_and_split),
    "moe.experts.down": (("down_proj_blocks", "down_proj_scales"), _unpack),
}
_UNQUANTISED: dict[str, tuple[tuple[str, ...], Make]] = {
    "moe.experts.gate_up": (("gate_up_proj",), _split_columns),
    "moe.experts.down": (("down_proj",), _keep),
}

_EXPERT_AXIS = 2  # of the parameters of experts, after stages and repeats; the first of their tensors

_MODEL = {
    "embedding": "model.embed_tokens.weight",
    "final_norm": "model.norm.weight",
    "unembedding": "lm_head.weight",
}


class _Parameter:
    """A parameter to load: its name in the state, and the global array that it must become."""

    def __init__(self, name: str, shape: tuple[int, ...], dtype: Any, sharding: NamedSharding):
        self.name = name
        self.shape = shape
        self.dtype = np.dtype(dtype)
        self.value_dtype = np.dtype(value_dtype(dtype))
        self.sharding = sharding
        self.shards = local_shards(shape, sharding)

    def rank(self, index: Index) -> int:
        """The ulysses rank whose part a shard is; 0 if all have the same."""
        axis = next((i for i, name in enumerate(self.sharding.spec) if name == ULYSSES), None)
        return 0 if axis is None else index[axis][0] // (index[axis][1] - index[axis][0])


class _Loader:
    """Reads and places parameters, one at a time."""

    def __init__(self, source: TensorSource, plan: StagePlan, split: TensorSplit, on_read: Callable[[int], Any]):
        self._source = source
        self._plan = plan
        self._split = split
        self._on_read = on_read

    def nbytes(self, param: _Parameter) -> int:
        """Bytes that this process reads for a parameter."""
        total = 0
        for index in param.shards:
            for name in self._tensors(param, index):
                shape = self._source.shape(name)
                if param.name in _MODEL:
                    shape = tuple(min(stop, n) - min(start, n) for (start, stop), n in zip(index, shape, strict=True))
                else:
                    experts = slice(*index[_EXPERT_AXIS]) if ".experts." in param.name else slice(None)
                    bounds = slice_bounds(self._slices(name, experts, param.rank(index)), shape)
                    shape = tuple(stop - start for start, stop in bounds)
                total += math.prod(shape) * self._source.dtype(name).itemsize
        return total

    def load(self, param: _Parameter) -> jax.Array:
        """A parameter, filled and placed."""
        if param.name == "embedding":
            shards = self._load_columns(param)
        elif param.name in _MODEL:
            shards = {index: self._load_rows(param, index) for index in param.shards}
        elif param.name.split(".", 2)[2] in _WHOLE:
            shards = {index: self._load_whole(param, index) for index in param.shards}
        else:
            shards = {index: self._load_experts(param, index) for index in param.shards}
        return assemble(param.shape, param.dtype, param.sharding, shards)

    def _read(self, name: str, *index: slice) -> np.ndarray:
        part = self._source.read(name, *index)
        self._on_read(part.nbytes)
        return part

    def _slices(self, name: str, experts: slice, rank: int) -> tuple[slice, ...]:
        """What to read of a tensor of a layer for a rank.

        A part of the last axes lies in many small pieces, which take longer to read than all of it.
        """
        part = self._split.part(_suffix(name), self._source.config, rank)
        if part is None or part.axis > 1:
            return (experts,)
        size = self._source.shape(name)[part.axis]
        mine = slice(min(part.start, size), min(part.stop, size))
        return (mine,) if part.axis == 0 else (experts, mine)

    def _read_part(self, name: str, experts: slice, rank: int) -> np.ndarray:
        """What a rank has of some experts of a tensor of a layer, filled up with zeros.

        Args:
          name: of the tensor.
          experts: which entries of its first axis, unless this is the one that is divided over the ranks.
          rank: of ulysses.
        """
        found = self._read(name, *self._slices(name, experts, rank))
        part = self._split.part(_suffix(name), self._source.config, rank)
        if part is None:
            return found
        if part.axis > 1:
            found = found[(slice(None),) * part.axis + (slice(part.start, part.stop),)]
        missing = part.stop - part.start - found.shape[part.axis]
        padding = [(0, missing if axis == part.axis else 0) for axis in range(found.ndim)]
        return np.pad(found, padding) if missing else found

    def _tensors(self, param: _Parameter, index: Index) -> list[str]:
        """All tensors that a shard is made of."""
        if param.name in _MODEL:
            return [_MODEL[param.name]]
        return [name for repeat in range(self._plan.repeats) for name in self._rule(param, index, repeat)[0]]

    def _rule(self, param: _Parameter, index: Index, repeat: int) -> tuple[list[str], Callable[..., Any]]:
        """The tensors that a repeat of a layer parameter is made of, none for an empty slot, and what makes it."""
        _, slot, key = param.name.split(".", 2)
        if index[0][1] - index[0][0] != 1:
            raise ValueError(f"a shard of parameter {param.name} spans stages {index[0][0]} to {index[0][1] - 1}")
        layer = self._plan.layer_at(index[0][0], repeat, int(slot))
        make: Callable[..., Any]
        if key in _WHOLE:
            tensors, make = _WHOLE[key]
        else:
            rules = _PACKED | (_UNPACKED if self._source.quantized else _UNQUANTISED)
            if key not in rules:
                raise ValueError(f"no rule says what parameter {param.name} is made of")
            parts, make = rules[key]
            tensors = tuple(f"mlp.experts.{part}" for part in parts)
        return [] if layer is None else [f"model.layers.{layer}.{tensor}" for tensor in tensors], make

    def _load_whole(self, param: _Parameter, index: Index) -> jax.Array:
        """The part of one stage of a small layer parameter (zeros for empty slots), a layer at a time."""
        shape = tuple(stop - start for start, stop in index)
        experts = slice(*index[_EXPERT_AXIS]) if ".experts." in param.name else slice(None)
        builder = ShardBuilder(index, param.dtype, param.shards[index], axis=1)
        filled = 0
        for repeat in range(shape[1]):
            names, make = self._rule(param, index, repeat)
            if names:
                value = make(*(self._read_part(name, experts, param.rank(index)) for name in names))
                builder.append([_cast(value, param.value_dtype)[None]], _keep, at=(0, repeat))
                filled += 1
        return builder.finish(filled)

    def _load_experts(self, param: _Parameter, index: Index) -> jax.Array:
        """The part of one stage of expert weights (zeros for empty slots), some experts at a time."""
        shape = tuple(stop - start for start, stop in index)
        first_expert = index[_EXPERT_AXIS][0]
        builder = ShardBuilder(index, param.dtype, param.shards[index], axis=_EXPERT_AXIS)
        experts = _largest_divisor(shape[_EXPERT_AXIS], PIECE_BYTES // (math.prod(shape[3:]) * param.dtype.itemsize))
        filled = 0
        for repeat in range(shape[1]):
            names, make = self._rule(param, index, repeat)
            for place in range(0, shape[_EXPERT_AXIS] if names else 0, experts):
                first = first_expert + place
                parts = [self._read_part(name, slice(first, first + experts), param.rank(index)) for name in names]
                for name, part in zip(names, parts, strict=True):
                    if name.endswith("_scales"):
                        mxfp4.check_scales(part, f"{self._source.where(name)}, from expert {first}")
                builder.append([_cast(part, param.value_dtype) for part in parts], make, at=(0, repeat, place))
                filled += experts
        return builder.finish(filled)

    def _load_columns(self, param: _Parameter) -> dict[Index, jax.Array]:
        """Shards of all rows and some columns of a matrix; columns past its end are zeros.

        Each block of rows is read once for all shards.
        """
        tensor = _MODEL[param.name]
        height, width = self._source.shape(tensor)
        columns = {index: (min(index[1][0], width), min(index[1][1], width)) for index in param.shards}
        columns = {index: (start, stop) for index, (start, stop) in columns.items() if start < stop}
        builders = {index: ShardBuilder(index, param.dtype, param.shards[index], axis=0) for index in param.shards}
        runs = _merge(columns.values())
        rows = self._rows_per_piece(param, sum(stop - start for start, stop in runs))
        for first in range(0, height, rows):
            block = slice(first, min(first + rows, height))
            for run in runs:
                part = _cast(self._read(tensor, block, slice(*run)), param.value_dtype)
                for index, (start, stop) in columns.items():
                    if run[0] <= start < run[1]:
                        mine = part[:, start - run[0] : stop - run[0]]
                        padding = index[1][1] - index[1][0] - mine.shape[1]
                        builders[index].append([np.pad(mine, ((0, 0), (0, padding)))], _keep)
        return {index: builder.finish(height if index in columns else 0) for index, builder in builders.items()}

    def _load_rows(self, param: _Parameter, index: Index) -> jax.Array:
        """A shard of some rows of a matrix or of a vector; rows past its end are zeros."""
        tensor = _MODEL[param.name]
        height, *rest = self._source.shape(tensor)
        start, stop = (min(row, height) for row in index[0])
        builder = ShardBuilder(index, param.dtype, param.shards[index], axis=0)
        rows = self._rows_per_piece(param, math.prod(rest))
        for first in range(start, stop, rows):
            part = self._read(tensor, slice(first, min(first + rows, stop)))
            builder.append([_cast(part, param.value_dtype)], _keep)
        return builder.finish(stop - start)

    def _rows_per_piece(self, param: _Parameter, width: int) -> int:
        itemsize = max(param.dtype.itemsize, self._source.dtype(_MODEL[param.name]).itemsize)
        return max(1, PIECE_BYTES // (max(1, width) * itemsize))


def _largest_divisor(number: int, limit: int) -> int:
    """The largest divisor of a number that is not above the limit, or 1: equal pieces need one program."""
    return next(d for d in range(max(1, min(number, limit)), 0, -1) if number % d == 0)


def _merge(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Disjoint ranges in order, those that touch joined."""
    merged: list[tuple[int, int]] = []
    for start, stop in sorted(ranges):
        if merged and merged[-1][1] == start:
            merged[-1] = (merged[-1][0], stop)
        else:
            merged.append((start, stop))
    return merged
