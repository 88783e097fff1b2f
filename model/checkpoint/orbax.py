"""Checkpoints in Orbax form: written once from safetensors, read by every process in part, on any mesh.

Arrays are stored by layer of the whole model, under the names of the Hugging Face tensors, so nothing in the folder
depends on a mesh or on a division into stages. Large tensors are stored as several pieces along one axis, and pieces
are gathered in parts of bounded size, each of them an Orbax checkpoint of its own: writing needs the memory of a part
or two, whatever the size of the model.

    config.json, tokenizer.json, ...   copied
    slope_jax.json                     format version, dtype and form of the experts; written last
    tensors.json                       shapes, types, pieces, and the sizes of all files
    part_00000/, part_00001/, ...      Orbax checkpoints (OCDBT, Zarr 3): {"name:start": piece, ...}
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import os
import pathlib
import shutil
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
import tensorstore
from jax.typing import DTypeLike
from tqdm import tqdm

from slope_jax.model.checkpoint.safetensors import (
    BFLOAT16,
    Checkpoint,
    check_tensor,
    expected_tensors,
    slice_bounds,
)
from slope_jax.model.config import MXFP4, GptOssConfig, load_config, read_json
from slope_jax.model.ops import mxfp4

FORMAT_VERSION = 1
MARKER_FILE, INDEX_FILE = "slope_jax.json", "tensors.json"
PIECE_BYTES = 64 << 20  # of the largest piece
PART_BYTES = 256 << 20  # of pieces gathered in one Orbax checkpoint
CHUNK_BYTES = 256 << 10  # of the chunks of embedding and unembedding, of which a device needs a few rows or columns
EMBEDDING_COLUMNS = 32  # of a piece of the embedding, whose columns are split over all devices

_EMBEDDING, _UNEMBEDDING = "model.embed_tokens.weight", "lm_head.weight"

_COPIED = ("generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
           "chat_template.jinja")  # fmt: skip
_DTYPES = {"bfloat16": BFLOAT16, "float32": np.dtype(np.float32), "uint8": np.dtype(np.uint8)}
# Tensors that become parameters of the dtype of the model; all others become float32 whatever that dtype is.
_ROUNDED = ("_proj.weight", "router.weight", "embed_tokens.weight", "lm_head.weight", "gate_up_proj", "down_proj")


@dataclasses.dataclass(frozen=True, slots=True)
class _Piece:
    """A range of a tensor along its piece axis, and the part that holds it."""

    part: str
    start: int
    stop: int


@dataclasses.dataclass(frozen=True, slots=True)
class _Stored:
    """A tensor as `INDEX_FILE` describes it."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    axis: int
    pieces: tuple[_Piece, ...]


def is_converted(directory: str | os.PathLike[str]) -> bool:
    """Whether a folder holds a checkpoint that `convert` wrote completely."""
    return (pathlib.Path(directory) / MARKER_FILE).is_file()


def convert(
    source: Checkpoint, output: str | os.PathLike[str], *, dtype: DTypeLike = np.float32, experts: str | None = None
) -> None:
    """Writes an Orbax checkpoint that loads to the same bits as its source.

    Args:
      source: the safetensors checkpoint.
      output: the folder to write, which must not exist or be empty.
      dtype: the widest type that the result will be loaded with. With float32 no value is rounded, and bfloat16 tensors
        stay as small as they are; with bfloat16 the float32 tensors that a bfloat16 model would round are rounded.
      experts: "mxfp4" or "bfloat16" (unpacked); as in the source by default.

    Raises:
      ValueError: another dtype or form, unquantised experts that should become MXFP4, or an output folder that is in
        use.
    """
    dtype = np.dtype(dtype)
    if dtype not in (BFLOAT16, np.float32):
        raise ValueError(f"dtype must be bfloat16 or float32, not {dtype}")
    if experts not in (None, MXFP4, "bfloat16"):
        raise ValueError(f"expert weights must be {MXFP4} or bfloat16, not {experts!r}")
    if experts == MXFP4 and not source.quantized:
        raise ValueError(f"{source.directory}: the experts are not quantised and cannot be written in {MXFP4}")
    output = pathlib.Path(output)
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ValueError(f"{output}: exists already and is not an empty folder")
    output.mkdir(parents=True, exist_ok=True)
    unpack = source.quantized and experts == "bfloat16"
    quantized = source.quantized and not unpack

    tensors: dict[str, dict[str, Any]] = {}
    with _PartWriter(output) as writer:
        names = sorted(expected_tensors(source.config, quantized))
        for name in tqdm(names, desc="convert", unit="tensor", disable=None):
            shape, itemsize = _stored_shape(source, name, unpack)
            axis = 1 if name == _EMBEDDING else 0
            step = min(shape[axis], max(1, PIECE_BYTES * shape[axis] // (math.prod(shape) * itemsize)))
            if name == _EMBEDDING:
                step = min(shape[axis], max(1, step // EMBEDDING_COLUMNS) * EMBEDDING_COLUMNS)
            entry: dict[str, Any] = {"shape": list(shape), "axis": axis, "pieces": []}
            for start in range(0, shape[axis], step):
                stop = min(start + step, shape[axis])
                band = _read_band(source, name, axis, slice(start, stop), unpack)
                if dtype == BFLOAT16 and name.endswith(_ROUNDED):
                    band = band.astype(BFLOAT16, copy=False)
                entry["dtype"] = str(band.dtype)
                # Reading many columns at a time takes fewer reads than each piece of the embedding by itself.
                width = EMBEDDING_COLUMNS if name == _EMBEDDING else step
                for first in range(start, stop, width):
                    last = min(first + width, stop)
                    piece = band[(slice(None),) * axis + (slice(first - start, last - start),)]
                    part = writer.add(f"{name}:{first}", np.ascontiguousarray(piece), _save_args(name, len(shape)))
                    entry["pieces"].append([part, first, last])
            tensors[name] = entry
    _copy_side_files(source.directory, output, quantized)
    _write_json(output / INDEX_FILE, {"tensors": tensors, "files": _file_sizes(output)})
    marker = {"format_version": FORMAT_VERSION, "dtype": str(dtype), "expert_weights": _form(quantized)}
    _write_json(output / MARKER_FILE, marker)


class ConvertedCheckpoint:
    """A checked checkpoint that `convert` wrote, readable in part.

    Attributes:
      directory: the folder.
      config: the hyperparameters in its config.json.
      quantized: whether the expert weights are in MXFP4.
      bytes_read: bytes of the stored chunks, without compression, that were decoded so far by this object.
    """

    def __init__(
        self, directory: pathlib.Path, config: GptOssConfig, marker: Mapping[str, Any], tensors: Mapping[str, _Stored]
    ):
        """For `open`; the tensors are taken as checked."""
        self.directory = directory
        self.config = config
        self.quantized = marker["expert_weights"] == MXFP4
        self.bytes_read = 0
        self._dtype = _DTYPES[marker["dtype"]]
        self._tensors = dict(tensors)

    @classmethod
    def open(cls, directory: str | os.PathLike[str]) -> ConvertedCheckpoint:
        """Opens the checkpoint in a folder.

        Raises:
          ValueError: another format version, or a file or tensor that is missing, surplus, of another size, or not what
            config.json requires. The message names the file and the tensor.
        """
        directory = pathlib.Path(directory)
        marker = read_json(directory / MARKER_FILE)
        if marker.get("format_version") != FORMAT_VERSION:
            raise ValueError(
                f"{directory / MARKER_FILE}: format version {marker.get('format_version')!r} is not {FORMAT_VERSION}"
            )
        if marker.get("dtype") not in ("bfloat16", "float32") or marker.get("expert_weights") not in (
            _form(True),
            _form(False),
        ):
            raise ValueError(f"{directory / MARKER_FILE}: not valid: {marker}")
        config = load_config(directory)
        index_path = directory / INDEX_FILE
        index = read_json(index_path)
        try:
            tensors = {name: _parse_stored(entry) for name, entry in index["tensors"].items()}
            sizes = {str(file): int(size) for file, size in index["files"].items()}
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{index_path}: not valid: {error}") from error
        _check_files(directory, sizes)
        expected = expected_tensors(config, marker["expert_weights"] == MXFP4)
        for name, stored in tensors.items():
            check_tensor(str(index_path), name, stored.shape, stored.dtype, expected)
            if list(itertools.chain(*((p.start, p.stop) for p in stored.pieces))) != _seams(stored):
                raise ValueError(f"{index_path}: tensor {name}: the pieces do not make up its axis {stored.axis}")
        missing = [name for name in expected if name not in tensors]
        if missing:
            raise ValueError(f"{index_path}: tensor {missing[0]} is missing")
        return cls(directory, config, marker, tensors)

    def check_dtype(self, dtype: np.dtype[Any]) -> None:
        """Raises ValueError when values were rounded to a narrower type than the one asked for."""
        if dtype != BFLOAT16 and self._dtype == BFLOAT16:
            raise ValueError(f"{self.directory}: was converted for bfloat16 and cannot be loaded as {dtype}")

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor."""
        return self._tensors[name].shape

    def dtype(self, name: str) -> np.dtype[Any]:
        """The type of a tensor's elements: bfloat16, float32 or uint8."""
        return self._tensors[name].dtype

    def where(self, name: str) -> str:
        """Folder and name of a tensor, for messages."""
        return f"{self.directory}: {name}"

    def read(self, name: str, *index: slice) -> np.ndarray:
        """The part of a tensor that slices (of step 1) of its leading axes select, from the chunks that overlap it.

        Raises:
          ValueError: the stored array cannot be read or is not what the index says.
        """
        stored = self._tensors[name]
        axis = stored.axis
        bounds = slice_bounds(index, stored.shape)
        out = np.empty([stop - start for start, stop in bounds], stored.dtype)
        for piece in stored.pieces:
            first, last = max(bounds[axis][0], piece.start), min(bounds[axis][1], piece.stop)
            if first >= last:
                continue
            inside = list(bounds)
            inside[axis] = (first - piece.start, last - piece.start)
            target = [slice(None)] * len(bounds)
            target[axis] = slice(first - bounds[axis][0], last - bounds[axis][0])
            out[tuple(target)] = self._read_piece(name, piece, inside)
        return out

    def _read_piece(self, name: str, piece: _Piece, bounds: list[tuple[int, int]]) -> np.ndarray:
        stored = self._tensors[name]
        shape = list(stored.shape)
        shape[stored.axis] = piece.stop - piece.start
        base = (self.directory / piece.part).resolve().as_uri() + "/"
        kvstore = {"driver": "ocdbt", "base": base, "path": f"{name}:{piece.start}/"}
        try:
            array = tensorstore.open({"driver": "zarr3", "kvstore": kvstore}, open=True, read=True).result()
            if list(array.shape) != shape or array.dtype.numpy_dtype != stored.dtype:
                raise ValueError(f"is {array.dtype.name}{list(array.shape)}, not {stored.dtype}{shape}")
            part = np.asarray(array[tuple(slice(start, stop) for start, stop in bounds)].read().result())
        except ValueError as error:  # tensorstore's own errors are ValueErrors too
            raise ValueError(f"{self.directory / piece.part}: tensor {name}: {error}") from error
        chunk: tuple[Any, ...] = array.chunk_layout.read_chunk.shape or array.shape
        chunks = [(-(-stop // c) - start // c) * c for (start, stop), c in zip(bounds, chunk, strict=True)]
        self.bytes_read += math.prod(chunks) * stored.dtype.itemsize
        return part


class _PartWriter:
    """Gathers pieces and writes them as Orbax checkpoints of bounded size."""

    def __init__(self, output: pathlib.Path):
        self._output = output.resolve()
        self._parts = 0
        self._pieces: dict[str, np.ndarray] = {}
        self._args: dict[str, ocp.SaveArgs] = {}
        self._nbytes = 0
        self._checkpointer = ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_zarr3=True))

    def __enter__(self) -> _PartWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if kind is None:
            self._flush()
        self._checkpointer.close()

    def add(self, key: str, piece: np.ndarray, args: ocp.SaveArgs) -> str:
        """Keeps a piece for writing; returns the name of the part that it will be in."""
        if self._pieces and self._nbytes + piece.nbytes > PART_BYTES:
            self._flush()
        self._pieces[key], self._args[key] = piece, args
        self._nbytes += piece.nbytes
        return self._name()

    def _name(self) -> str:
        return f"part_{self._parts:05d}"

    def _flush(self) -> None:
        tree = ocp.args.PyTreeSave(self._pieces, save_args=self._args)
        self._checkpointer.save(self._output / self._name(), args=tree)
        self._parts += 1
        self._pieces, self._args, self._nbytes = {}, {}, 0


def _stored_shape(source: Checkpoint, name: str, unpack: bool) -> tuple[tuple[int, ...], int]:
    """Shape of a tensor as it is stored, and the bytes of its elements before it is rounded."""
    if unpack and name.endswith(("gate_up_proj", "down_proj")):
        experts, rows, blocks, _ = source.shape(f"{name}_blocks")
        return (experts, blocks * mxfp4.BLOCK, rows), BFLOAT16.itemsize
    return source.shape(name), source.dtype(name).itemsize


def _read_band(source: Checkpoint, name: str, axis: int, part: slice, unpack: bool) -> np.ndarray:
    """A range of a tensor along an axis, unpacked if asked for."""
    index = (slice(None),) * axis + (part,)
    if unpack and name.endswith(("gate_up_proj", "down_proj")):
        blocks, scales = (source.read(f"{name}_{kind}", *index) for kind in ("blocks", "scales"))
        mxfp4.check_scales(scales, f"{source.where(f'{name}_scales')}, from expert {part.start}")
        return mxfp4.dequantize(blocks, scales, BFLOAT16).swapaxes(1, 2)
    band = source.read(name, *index)
    if name.endswith("_scales"):
        mxfp4.check_scales(band, f"{source.where(name)}, from expert {part.start}")
    return band


def _save_args(name: str, ndim: int) -> ocp.SaveArgs:
    """How a tensor is cut in chunks: one for each expert, small ones of the vocabulary matrices, one of all others."""
    if name in (_EMBEDDING, _UNEMBEDDING):
        return ocp.SaveArgs(chunk_byte_size=CHUNK_BYTES)
    return ocp.SaveArgs(shard_axes=(0,)) if ndim > 2 else ocp.SaveArgs()


def _copy_side_files(source: pathlib.Path, output: pathlib.Path, quantized: bool) -> None:
    config = read_json(source / "config.json")
    if not quantized:
        config.pop("quantization_config", None)
    _write_json(output / "config.json", config)
    for name in _COPIED:
        if (source / name).is_file():
            shutil.copyfile(source / name, output / name)


def _form(quantized: bool) -> str:
    return MXFP4 if quantized else "unquantised"


def _parse_stored(entry: Mapping[str, Any]) -> _Stored:
    pieces = tuple(_Piece(str(part), int(start), int(stop)) for part, start, stop in entry["pieces"])
    return _Stored(tuple(int(n) for n in entry["shape"]), _DTYPES[entry["dtype"]], int(entry["axis"]), pieces)


def _seams(stored: _Stored) -> list[int]:
    """Starts and stops of pieces that follow one another from the first to the last place of the axis."""
    stops = [piece.stop for piece in stored.pieces]
    starts = [0, *stops[:-1]]
    seams = list(itertools.chain(*zip(starts, stops, strict=True)))
    return seams if stops and stops[-1] == stored.shape[stored.axis] else []


def _part_files(directory: pathlib.Path) -> Iterator[pathlib.Path]:
    for part in sorted(directory.glob("part_*")):
        yield from (path for path in sorted(part.rglob("*")) if path.is_file())


def _file_sizes(directory: pathlib.Path) -> dict[str, int]:
    return {path.relative_to(directory).as_posix(): path.stat().st_size for path in _part_files(directory)}


def _check_files(directory: pathlib.Path, sizes: Mapping[str, int]) -> None:
    for file, size in sizes.items():
        try:
            found = (directory / file).stat().st_size
        except OSError as error:
            raise ValueError(f"{directory / file}: cannot be read: {error.strerror}") from error
        if found != size:
            raise ValueError(f"{directory / file}: has {found} bytes, but {INDEX_FILE} says {size}")


def _write_json(path: pathlib.Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=None if path.name == INDEX_FILE else 2) + "\n")
