"""Hugging Face safetensors checkpoints: checked wholly before use, then read by the byte range.

`Checkpoint.open` parses the index and the header of each file, and compares names, shapes, dtypes and file sizes with
what config.json requires. Reads are positioned (`preadv`) and not memory-mapped: pages of a map that were read count as
memory of the process for as long as the map lives.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import pathlib
from collections.abc import Mapping
from typing import Any, Protocol, TypeAlias

import ml_dtypes
import numpy as np

from slope_jax.model.config import MXFP4, GptOssConfig, load_config, quantization_method, read_json
from slope_jax.model.ops import mxfp4

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
FLOATS = (BFLOAT16, np.dtype(np.float32))
BYTES = (np.dtype(np.uint8),)
_DTYPES = {"BF16": BFLOAT16, "F32": np.dtype(np.float32), "U8": np.dtype(np.uint8)}
TensorSpec: TypeAlias = tuple[tuple[int, ...], tuple[np.dtype[Any], ...]]  # shape and allowed types
_MAX_HEADER = 100_000_000  # bytes; the limit that the safetensors format sets


class TensorSource(Protocol):
    """Tensors under their Hugging Face names, readable in part."""

    @property
    def config(self) -> GptOssConfig:
        """The hyperparameters of the model that the tensors are of."""

    @property
    def quantized(self) -> bool:
        """Whether the expert weights are in MXFP4."""

    def check_dtype(self, dtype: np.dtype[Any]) -> None:
        """Raises ValueError when the tensors cannot be loaded in a type without a loss that the source did not have."""

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor."""

    def dtype(self, name: str) -> np.dtype[Any]:
        """The type of a tensor's elements."""

    def where(self, name: str) -> str:
        """File and name of a tensor, for messages."""

    def read(self, name: str, *index: slice) -> np.ndarray:
        """The part of a tensor that slices of its leading axes select."""


@dataclasses.dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor lies: `offset` bytes into `file`, in row-major order."""

    file: pathlib.Path
    offset: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return math.prod(self.shape) * self.dtype.itemsize


class Checkpoint:
    """A checked checkpoint of safetensors files.

    Attributes:
      directory: the folder.
      config: the hyperparameters in its config.json.
      quantized: whether the expert weights are in MXFP4.
      tensors: where each tensor lies, by its Hugging Face name.
      bytes_read: bytes of tensors read so far by this object.
    """

    def __init__(
        self, directory: pathlib.Path, config: GptOssConfig, quantized: bool, tensors: Mapping[str, TensorInfo]
    ):
        """For `open`; the tensors are taken as checked."""
        self.directory = directory
        self.config = config
        self.quantized = quantized
        self.bytes_read = 0
        self.tensors = dict(tensors)

    @classmethod
    def open(cls, directory: str | os.PathLike[str]) -> Checkpoint:
        """Opens the checkpoint in a folder by its index, or its only file; sub-folders play no part.

        Raises:
          ValueError: anything that is missing, surplus, truncated, or of the wrong shape or type, or an index or a
            configuration that contradicts the files. The message names the file and the tensor.
        """
        directory = pathlib.Path(directory)
        if not directory.is_dir():
            raise ValueError(f"{directory}: no such folder")
        config = load_config(directory)
        tensors = _read_index(directory)
        method = quantization_method(read_json(directory / "config.json"))
        quantized = _is_quantized(tensors, method, directory)
        _check_tensors(tensors, expected_tensors(config, quantized), directory)
        return cls(directory, config, quantized, tensors)

    def check_dtype(self, dtype: np.dtype[Any]) -> None:
        """Does nothing: the tensors are the source."""

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor."""
        return self.tensors[name].shape

    def dtype(self, name: str) -> np.dtype[Any]:
        """The type of a tensor's elements: bfloat16, float32 or uint8."""
        return self.tensors[name].dtype

    def where(self, name: str) -> str:
        """File and name of a tensor, for messages."""
        return f"{self.tensors[name].file}: {name}"

    def read(self, name: str, *index: slice) -> np.ndarray:
        """The part of a tensor that slices (of step 1) of its leading axes select; no other byte is read.

        Raises:
          ValueError: the file has become shorter, or cannot be read.
        """
        info = self.tensors[name]
        bounds = slice_bounds(index, info.shape)
        out = np.empty([stop - start for start, stop in bounds], info.dtype)
        if out.size:
            self._read_into(out, info, bounds)
        self.bytes_read += out.nbytes
        return out

    def _read_into(self, out: np.ndarray, info: TensorInfo, bounds: list[tuple[int, int]]) -> None:
        strides = [math.prod(info.shape[axis + 1 :]) * info.dtype.itemsize for axis in range(len(bounds))]
        partial = [axis for axis, (start, stop) in enumerate(bounds) if (start, stop) != (0, info.shape[axis])]
        inner = partial[-1] if partial else 0  # from this axis on the selection is contiguous
        run = math.prod(out.shape[inner:]) * info.dtype.itemsize
        first = info.offset + sum(bound[0] * stride for bound, stride in zip(bounds, strides, strict=True))
        buffer = out.reshape(-1).view(np.uint8).data
        try:
            descriptor = os.open(info.file, os.O_RDONLY)
        except OSError as error:
            raise ValueError(f"{info.file}: cannot be read: {error.strerror}") from error
        try:
            for i, position in enumerate(np.ndindex(*out.shape[:inner])):
                offset = first + sum(p * stride for p, stride in zip(position, strides, strict=False))
                _read_run(descriptor, buffer[i * run : (i + 1) * run], offset, info.file)
        finally:
            os.close(descriptor)


def slice_bounds(index: tuple[slice, ...], shape: tuple[int, ...]) -> list[tuple[int, int]]:
    """(start, stop) along each axis of what slices of the leading axes select."""
    slices = index + (slice(None),) * (len(shape) - len(index))
    return [s.indices(n)[:2] for s, n in zip(slices, shape, strict=True)]


def _read_run(descriptor: int, buffer: memoryview, offset: int, file: pathlib.Path) -> None:
    done = 0
    while done < len(buffer):
        count = os.preadv(descriptor, [buffer[done:]], offset + done)
        if count == 0:
            raise ValueError(f"{file}: ends at byte {offset + done}: the file was truncated after it was opened")
        done += count


def expected_tensors(config: GptOssConfig, quantized: bool) -> dict[str, TensorSpec]:
    """Shape and allowed types of each tensor of a checkpoint, by its Hugging Face name.

    Raises:
      ValueError: the widths of an MXFP4 model are not multiples of its block.
    """
    c = config
    D, V, E, F, N, K = c.hidden_size, c.vocab_size, c.num_experts, c.intermediate_size, c.num_heads, c.num_kv_heads
    layer: dict[str, TensorSpec] = {
        "input_layernorm.weight": ((D,), FLOATS),
        "self_attn.sinks": ((N,), FLOATS),
        "post_attention_layernorm.weight": ((D,), FLOATS),
        "mlp.experts.gate_up_proj_bias": ((E, 2 * F), FLOATS),
        "mlp.experts.down_proj_bias": ((E, D), FLOATS),
    }
    linears = {
        "self_attn.q_proj": (N * c.head_dim, D),
        "self_attn.k_proj": (K * c.head_dim, D),
        "self_attn.v_proj": (K * c.head_dim, D),
        "self_attn.o_proj": (D, N * c.head_dim),
        "mlp.router": (E, D),
    }
    for name, (rows, columns) in linears.items():
        layer[f"{name}.weight"] = ((rows, columns), FLOATS)
        layer[f"{name}.bias"] = ((rows,), FLOATS)
    for name, rows, columns in (("gate_up_proj", 2 * F, D), ("down_proj", D, F)):
        if not quantized:
            layer[f"mlp.experts.{name}"] = ((E, columns, rows), FLOATS)
            continue
        if columns % mxfp4.BLOCK:
            raise ValueError(f"MXFP4 needs {name} inputs in blocks of {mxfp4.BLOCK}, but there are {columns}")
        blocks = columns // mxfp4.BLOCK
        layer[f"mlp.experts.{name}_blocks"] = ((E, rows, blocks, mxfp4.BLOCK_BYTES), BYTES)
        layer[f"mlp.experts.{name}_scales"] = ((E, rows, blocks), BYTES)
    tensors = {f"model.layers.{i}.{name}": spec for i in range(c.num_layers) for name, spec in layer.items()}
    tensors["model.embed_tokens.weight"] = tensors["lm_head.weight"] = ((V, D), FLOATS)
    tensors["model.norm.weight"] = ((D,), FLOATS)
    return tensors


def check_tensor(
    file: str, name: str, shape: tuple[int, ...], dtype: np.dtype[Any], expected: Mapping[str, TensorSpec]
) -> None:
    """Raises ValueError, naming file and tensor, unless a tensor is one of the expected ones."""
    if name not in expected:
        raise ValueError(f"{file}: surplus tensor {name}: the model of config.json has none of that name")
    needed, dtypes = expected[name]
    if shape != needed:
        raise ValueError(f"{file}: tensor {name} has shape {list(shape)}, config.json needs {list(needed)}")
    if dtype not in dtypes:
        names = " or ".join(str(choice) for choice in dtypes)
        raise ValueError(f"{file}: tensor {name} has dtype {dtype}, supported: {names}")


def _read_index(directory: pathlib.Path) -> dict[str, TensorInfo]:
    """The tensors of the files that the index lists, or of the only file, after a check that the two agree."""
    index_path = directory / INDEX_FILE
    if not index_path.is_file():
        if not (directory / SINGLE_FILE).is_file():
            raise ValueError(f"{directory}: has neither {INDEX_FILE} nor {SINGLE_FILE}")
        return _read_header(directory / SINGLE_FILE)
    weight_map = read_json(index_path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{index_path}: weight_map is missing or empty")
    for name, file in weight_map.items():
        if not isinstance(file, str) or not file or pathlib.PurePath(file).name != file:
            raise ValueError(
                f"{index_path}: {name} is said to be in {file!r}, which is not the name of a file beside it"
            )
    tensors: dict[str, TensorInfo] = {}
    for file in sorted(set(weight_map.values())):
        for name, info in _read_header(directory / file).items():
            if weight_map.get(name) != file:
                listed = f"lists it in {weight_map[name]}" if name in weight_map else "does not list it"
                raise ValueError(f"{directory / file}: holds tensor {name}, but {INDEX_FILE} {listed}")
            tensors[name] = info
    for name, file in weight_map.items():
        if name not in tensors:
            raise ValueError(f"{directory / file}: does not hold tensor {name}, which {INDEX_FILE} lists there")
    return tensors


def _read_header(path: pathlib.Path) -> dict[str, TensorInfo]:
    """The tensors of one safetensors file, after a check of the header against the size of the file."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, _MAX_HEADER):
                raise ValueError(f"{path}: truncated: {size} bytes, too few for the header of a safetensors file")
            text = file.read(length)
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from error
    try:
        header = json.loads(text, object_pairs_hook=_header_table)
    except ValueError as error:
        raise ValueError(f"{path}: the header is not valid: {error}") from error
    if not isinstance(header, dict):
        raise ValueError(f"{path}: the header is not a JSON object")
    header.pop("__metadata__", None)
    tensors = {name: _parse_entry(path, name, entry, 8 + length) for name, entry in header.items()}
    position = 8 + length
    for name, info in sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].nbytes)):
        if info.offset != position:
            raise ValueError(f"{path}: tensor {name} begins at byte {info.offset}, not {position}: gap or overlap")
        position += info.nbytes
        if position > size:
            raise ValueError(f"{path}: truncated: tensor {name} ends at byte {position}, but the file has {size}")
    if position != size:
        raise ValueError(f"{path}: has {size} bytes, but its header describes {position}")
    return tensors


def _parse_entry(path: pathlib.Path, name: str, entry: Any, data_start: int) -> TensorInfo:
    try:
        kind, shape, (start, stop) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        numbers = [*shape, start, stop]
        fits = all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in numbers)
    except (TypeError, KeyError, ValueError):
        fits = False
    if not fits:
        raise ValueError(f"{path}: the header entry of tensor {name} is not valid: {entry!r}")
    if kind not in _DTYPES:
        raise ValueError(f"{path}: tensor {name} has dtype {kind}; supported: {', '.join(_DTYPES)}")
    info = TensorInfo(path, data_start + start, shape, _DTYPES[kind])
    if stop - start != info.nbytes:
        raise ValueError(
            f"{path}: tensor {name} takes {stop - start} bytes, but {kind} {list(shape)} needs {info.nbytes}"
        )
    return info


def _header_table(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        raise ValueError("a name is repeated")
    return table


def _is_quantized(tensors: Mapping[str, TensorInfo], method: str | None, directory: pathlib.Path) -> bool:
    """Whether the experts are in MXFP4, which the tensors and the configuration must agree about."""
    packed = next((name for name in tensors if name.endswith(("_proj_blocks", "_proj_scales"))), None)
    plain = next((name for name in tensors if name.endswith((".experts.gate_up_proj", ".experts.down_proj"))), None)
    if packed and plain:
        raise ValueError(
            f"experts both in MXFP4 ({tensors[packed].file}: {packed}) and unquantised ({tensors[plain].file}: {plain})"
        )
    if packed and method != MXFP4:
        raise ValueError(
            f"{tensors[packed].file}: {packed} is an MXFP4 tensor, but {directory / 'config.json'} has no "
            "quantization_config"
        )
    if plain and method == MXFP4:
        raise ValueError(
            f"{tensors[plain].file}: {plain} is unquantised, but quantization_config of {directory / 'config.json'} "
            f"says {MXFP4}"
        )
    return method == MXFP4


def _check_tensors(
    tensors: Mapping[str, TensorInfo],
    expected: Mapping[str, TensorSpec],
    directory: pathlib.Path,
) -> None:
    """Raises ValueError unless the tensors are exactly the expected ones."""
    for name, info in tensors.items():
        check_tensor(str(info.file), name, info.shape, info.dtype, expected)
    missing = [name for name in expected if name not in tensors]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ValueError(f"{directory}: tensor {missing[0]}{more} is missing: no file holds it")
