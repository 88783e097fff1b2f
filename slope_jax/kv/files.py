"""The KV cache of a finished prompt, in a form that does not depend on the mesh that computed it.

Per layer the keys (after RoPE) and values are `[tokens, kv_heads, head_dim]` in token order. Full-attention layers hold
every token of the prompt; sliding-window layers hold the last `window` tokens, which is what a decoder needs that
recomputes the last prompt token. On disk it is a folder with two files:

    kv.json          the header: a JSON object that describes everything below
    kv.safetensors   `layers.{i}.key` and `layers.{i}.value`, with the same header as metadata
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import math
import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import safetensors
from numpy.typing import NDArray

from slope_jax.model.checkpoint.safetensors_writer import SafetensorsWriter, dtype_code
from slope_jax.model.config import SLIDING, GptOssConfig

FORMAT = "slope_jax.kv"
FORMAT_VERSION = 1
AXES = ("tokens", "kv_heads", "head_dim")
HEADER_FILE = "kv.json"
DATA_FILE = "kv.safetensors"

_DTYPES: dict[str, np.dtype[Any]] = {
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float32": np.dtype(np.float32),
}

LayerKV = tuple[int, NDArray[Any], NDArray[Any]]


@dataclasses.dataclass(frozen=True, slots=True)
class LayerSpan:
    """The tokens that a layer holds: `count` of them, from position `start`."""

    kind: str
    start: int
    count: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class KVHeader:
    """Everything that a reader has to know to use a KV cache.

    Attributes:
      model_fingerprint: names the model that computed it.
      token_ids_sha256: `hash_token_ids` of the prompt.
      num_tokens: the tokens of the prompt.
      first_token_id: the token that the prefill chose, to be decoded at position `num_tokens`.
      dtype: "bfloat16" or "float32".
      kv_heads: KV heads of every layer.
      head_dim: values per head.
      layers: the span of every layer, by global layer index.
    """

    model_fingerprint: str
    token_ids_sha256: str
    num_tokens: int
    first_token_id: int
    dtype: str
    kv_heads: int
    head_dim: int
    layers: tuple[LayerSpan, ...]

    def __post_init__(self) -> None:
        if self.dtype not in _DTYPES:
            raise ValueError(f"dtype must be one of {sorted(_DTYPES)}, not {self.dtype!r}")
        for i, span in enumerate(self.layers):
            if span.start < 0 or span.count < 1 or span.start + span.count != self.num_tokens:
                raise ValueError(
                    f"layer {i} holds {span.count} tokens from position {span.start}, which does not end at the "
                    f"{self.num_tokens} tokens of the prompt"
                )

    @classmethod
    def of_prompt(
        cls,
        config: GptOssConfig,
        token_ids: Sequence[int] | NDArray[np.integer],
        *,
        first_token_id: int,
        dtype: str,
        model_fingerprint: str,
    ) -> KVHeader:
        """The header of the KV that a model of this configuration makes for a prompt."""
        tokens = len(token_ids)
        spans = []
        for kind in config.layer_types:
            count = min(tokens, config.sliding_window) if kind == SLIDING else tokens
            spans.append(LayerSpan(kind, tokens - count, count))
        return cls(
            model_fingerprint=model_fingerprint,
            token_ids_sha256=hash_token_ids(token_ids),
            num_tokens=tokens,
            first_token_id=first_token_id,
            dtype=dtype,
            kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            layers=tuple(spans),
        )

    def layer_shape(self, layer: int) -> tuple[int, int, int]:
        """The shape of the keys, and of the values, of a layer."""
        return (self.layers[layer].count, self.kv_heads, self.head_dim)

    @property
    def nbytes(self) -> int:
        """Bytes of all keys and values together."""
        return sum(dtype.itemsize * math.prod(shape) for dtype, shape in self.tensors().values())

    def tensors(self) -> dict[str, tuple[np.dtype[Any], tuple[int, ...]]]:
        """Dtype and shape of every tensor of the data file, in the order of the file."""
        dtype = _DTYPES[self.dtype]
        return {
            name: (dtype, self.layer_shape(i))
            for i in range(len(self.layers))
            for name in (_key_name(i), _value_name(i))
        }

    def to_json(self) -> dict[str, Any]:
        """The header as it is written to `kv.json`."""
        return {
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            "model_fingerprint": self.model_fingerprint,
            "token_ids_sha256": self.token_ids_sha256,
            "num_tokens": self.num_tokens,
            "first_token_id": self.first_token_id,
            "dtype": self.dtype,
            "axes": list(AXES),
            "rope_applied": True,
            "kv_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "layers": [
                {"layer": i, **dataclasses.asdict(span), "key": _key_name(i), "value": _value_name(i)}
                for i, span in enumerate(self.layers)
            ],
        }

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> KVHeader:
        """Reads a header; raises ValueError when a field is missing, unknown or not what this version writes."""
        for name, expected in (("format", FORMAT), ("format_version", FORMAT_VERSION)):
            if fields.get(name) != expected:
                raise ValueError(f"{name} is {fields.get(name)!r}; this version reads {expected!r}")
        names = {f.name for f in dataclasses.fields(cls)}
        try:
            header = cls(
                **{name: fields[name] for name in names if name != "layers"},
                layers=tuple(LayerSpan(entry["kind"], entry["start"], entry["count"]) for entry in fields["layers"]),
            )
        except (KeyError, TypeError) as error:
            raise ValueError(f"a field is missing or has a wrong type: {error!r}") from error
        written = header.to_json()
        for name in sorted(written.keys() | fields.keys()):
            if fields.get(name) != written.get(name):
                raise ValueError(f"{name} is {fields.get(name)!r}; expected {written.get(name)!r}")
        return header


class PrefillKV:
    """The KV cache of one prompt.

    In a run of several processes the layers are gathered from all of them: every process must call `layer` and `save`
    in the same order.
    """

    def __init__(self, header: KVHeader, fetch: Callable[[int], LayerKV], *, is_writer: bool = True):
        """Makes the KV of a prompt out of a function that returns one layer.

        Args:
          header: describes the cache.
          fetch: returns (start, keys, values) of the layer with a global index.
          is_writer: whether `save` writes in this process; true in one process of a run.
        """
        self.header = header
        self._fetch = fetch
        self._is_writer = is_writer

    @property
    def num_layers(self) -> int:
        """Layers of the model."""
        return len(self.header.layers)

    @property
    def nbytes(self) -> int:
        """Bytes of all keys and values together."""
        return self.header.nbytes

    def layer(self, layer: int) -> LayerKV:
        """The KV of one layer.

        Args:
          layer: the global index of the layer.

        Returns:
          `(start, keys, values)`: the position of the first token, and two arrays `[tokens, kv_heads, head_dim]` in
          token order, of dtype float32 or `ml_dtypes.bfloat16`.

        Raises:
          ValueError: there is no such layer.
        """
        if not 0 <= layer < self.num_layers:
            raise ValueError(f"layer {layer} is not one of the {self.num_layers} layers")
        start, k, v = self._fetch(layer)
        span, shape, dtype = self.header.layers[layer], self.header.layer_shape(layer), _DTYPES[self.header.dtype]
        for name, array in (("keys", k), ("values", v)):
            if start != span.start or array.shape != shape or array.dtype != dtype:
                raise ValueError(
                    f"{name} of layer {layer} start at {start} with shape {array.shape} and dtype {array.dtype}; "
                    f"expected start {span.start}, shape {shape}, dtype {dtype}"
                )
        return start, k, v

    def save(self, directory: str | os.PathLike[str], *, overwrite: bool = False) -> pathlib.Path:
        """Writes the cache to a folder, layer by layer; the files take their names when they are complete.

        Args:
          directory: the folder, made when it does not exist.
          overwrite: whether a cache that is already there is replaced.

        Returns:
          The folder.

        Raises:
          ValueError: the folder holds a cache and `overwrite` is false.
          OSError: the files could not be written. The other processes of a run are not held up by it.
        """
        folder = pathlib.Path(directory)
        writer = _Writer(folder, self.header, overwrite) if self._is_writer else None
        try:
            for i in range(self.num_layers):
                _, k, v = self.layer(i)
                if writer is not None:
                    writer.append(i, k, v)
            if writer is not None:
                writer.finish()
        except BaseException as error:
            if writer is not None:
                writer.abandon(error)
            raise
        return folder


def hash_token_ids(token_ids: Sequence[int] | NDArray[np.integer]) -> str:
    """The SHA-256, in hexadecimal, of the ids as little-endian 64-bit integers."""
    return hashlib.sha256(np.asarray(token_ids, dtype="<i8").tobytes()).hexdigest()


def load_kv(
    directory: str | os.PathLike[str],
    *,
    model_fingerprint: str | None = None,
    token_ids: Sequence[int] | None = None,
    dtype: str | None = None,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    num_layers: int | None = None,
) -> PrefillKV:
    """Opens a cache that `PrefillKV.save` wrote; layers are read when they are asked for.

    Args:
      directory: the folder.
      model_fingerprint: what the reader needs the cache to be, as are the arguments after it; None accepts anything.
      token_ids: the prompt.
      dtype: "bfloat16" or "float32".
      kv_heads: KV heads.
      head_dim: values per head.
      num_layers: layers.

    Raises:
      ValueError: a file is missing, cut short, mixed up with another or of another version, or the cache is not what
        the reader needs; the message names the file and the field.
    """
    folder = pathlib.Path(directory)
    fields = _read_json(folder / HEADER_FILE)
    try:
        header = KVHeader.from_json(fields)
    except ValueError as error:
        raise ValueError(f"{folder / HEADER_FILE}: {error}") from error
    needed = {
        "model_fingerprint": (header.model_fingerprint, model_fingerprint),
        "token_ids_sha256": (header.token_ids_sha256, None if token_ids is None else hash_token_ids(token_ids)),
        "dtype": (header.dtype, dtype),
        "kv_heads": (header.kv_heads, kv_heads),
        "head_dim": (header.head_dim, head_dim),
        "number of layers": (len(header.layers), num_layers),
    }
    for name, (found, expected) in needed.items():
        if expected is not None and found != expected:
            raise ValueError(f"{folder / HEADER_FILE}: {name} is {found!r}; the reader needs {expected!r}")
    _check_data(folder / DATA_FILE, header, fields)

    def fetch(layer: int) -> LayerKV:
        with safetensors.safe_open(folder / DATA_FILE, framework="np") as file:
            k, v = file.get_tensor(_key_name(layer)), file.get_tensor(_value_name(layer))
        return header.layers[layer].start, k, v

    return PrefillKV(header, fetch)


class _Writer:
    """Writes the two files.

    A failure to write is kept until `finish`: the process goes on fetching layers, which the others take part in.
    """

    def __init__(self, folder: pathlib.Path, header: KVHeader, overwrite: bool):
        self._folder, self._header = folder, header
        self._error: Exception | None = None
        self._open_files = contextlib.ExitStack()
        self._data: SafetensorsWriter | None = None
        self._try(lambda: self._open(overwrite))

    def append(self, layer: int, k: NDArray[Any], v: NDArray[Any]) -> None:
        """Writes the next layer."""
        self._try(lambda: self._write(layer, k, v))

    def finish(self) -> None:
        """Gives the files their names, the header last: a folder with a header is complete."""
        self._try(self._publish)
        if self._error is not None:
            raise self._error

    def abandon(self, error: BaseException) -> None:
        """Removes what is incomplete."""
        self._open_files.__exit__(type(error), error, error.__traceback__)

    def _try(self, step: Callable[[], None]) -> None:
        if self._error is None:
            try:
                step()
            except (OSError, ValueError) as error:
                self._error = error

    def _open(self, overwrite: bool) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        for name in (HEADER_FILE, DATA_FILE):
            if not overwrite and (self._folder / name).exists():
                raise ValueError(f"{self._folder / name} exists; save to another folder or pass overwrite=True")
        metadata = {"kv": json.dumps(self._header.to_json())}
        self._data = self._open_files.enter_context(
            SafetensorsWriter(self._folder / DATA_FILE, self._header.tensors(), metadata)
        )

    def _write(self, layer: int, k: NDArray[Any], v: NDArray[Any]) -> None:
        assert self._data is not None
        self._data.write(_key_name(layer), k)
        self._data.write(_value_name(layer), v)

    def _publish(self) -> None:
        (self._folder / HEADER_FILE).unlink(missing_ok=True)
        self._open_files.close()
        part = self._folder / f".{HEADER_FILE}.{os.getpid()}.part"
        with open(part, "wb") as file:
            file.write(json.dumps(self._header.to_json(), indent=1).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
        part.replace(self._folder / HEADER_FILE)


def _check_data(path: pathlib.Path, header: KVHeader, fields: Mapping[str, Any]) -> None:
    try:
        with safetensors.safe_open(path, framework="np") as file:
            metadata = file.metadata() or {}
            slices = {name: file.get_slice(name) for name in list(file.keys())}
            found = {name: (part.get_dtype(), part.get_shape()) for name, part in slices.items()}
        described = json.loads(metadata.get("kv", "null"))
    except (OSError, ValueError, safetensors.SafetensorError) as error:
        raise ValueError(f"{path}: cannot be read: {error}") from error
    if described != fields:
        raise ValueError(f"{path}: its metadata is not the header in {HEADER_FILE}; the files are of different caches")
    expected = {name: (dtype_code(dtype), list(shape)) for name, (dtype, shape) in header.tensors().items()}
    for name in sorted(expected.keys() | found.keys()):
        if expected.get(name) != found.get(name):
            raise ValueError(f"{path}: {name} is {found.get(name)}; expected {expected.get(name)}")


def _read_json(path: pathlib.Path) -> dict[str, Any]:
    try:
        fields = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: cannot be read: {error}") from error
    if not isinstance(fields, dict):
        raise ValueError(f"{path}: holds a {type(fields).__name__}, not an object")
    return fields


def _key_name(layer: int) -> str:
    return f"layers.{layer}.key"


def _value_name(layer: int) -> str:
    return f"layers.{layer}.value"
